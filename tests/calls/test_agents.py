"""Which agent a call belongs to: the configuration's rules first, then the ready-made ones, else ``main``."""

import pytest
from pydantic import ValidationError

from longrein.calls.agents import Agents, known_rules
from longrein.calls.conversation import Conversation, Message, Tool
from longrein.config import AgentRule, AgentsSection

TALK = Conversation((Message("system", "You are a coder."), Message("user", "Fix it."), Message("assistant", "Done.")))
TOOL = Tool("shell")


def named(
    rule: dict[str, object] | None = None, conversation: Conversation = TALK, headers: dict[str, str] | None = None
) -> str:
    rules = [AgentRule.model_validate({"name": "it", **rule})] if rule else []
    return Agents(AgentsSection(rules=rules)).of(conversation, "policy", headers or {}).name


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        ({"model": "^pol"}, True),
        ({"model": "^other"}, False),
        ({"system": "coder"}, True),
        ({"system": "Fix"}, False),
        ({"user": "Fix"}, True),
        ({"user": "Done"}, False),
        ({"tools": False}, True),
        ({"tools": True}, False),
        ({"headers": {"X-Role": "^r"}}, True),
        ({"headers": {"x-other": "."}}, False),
        ({"system": "coder", "user": "nothing of the kind"}, False),
    ],
)
def test_a_rule_matches_when_all_of_it_holds(rule: dict[str, object], matches: bool) -> None:
    assert named(rule, headers={"x-role": "reviewer"}) == ("it" if matches else "main")


def test_the_last_user_message_counts() -> None:
    asked = Conversation((*TALK.messages, Message("user", "And now?")))
    assert named({"user": "now"}, asked) == "it"
    assert named({"user": "Fix"}, asked) == "main"


def test_own_rules_come_before_ready_made_ones() -> None:
    headers = {"x-claude-code-agent-id": "a1"}
    assert named(headers=headers) == "sub-agent"
    assert named({"model": "policy"}, headers=headers) == "it"
    assert Agents(AgentsSection(known=False)).of(TALK, "policy", headers).name == "main"


@pytest.mark.parametrize(
    ("conversation", "headers", "name", "train"),
    [
        (TALK, {"x-openai-subagent": "collab_spawn"}, "sub-agent", True),
        (TALK, {"x-parent-session-id": "ses_1"}, "sub-agent", True),
        (TALK, {"x-codex-turn-metadata": '{"request_kind": "compaction"}'}, "compaction", True),
        (TALK, {"x-codex-turn-metadata": '{"request_kind": "turn"}'}, "main", True),
        (TALK, {"x-codex-turn-metadata": '{"request_kind":"prewarm"}'}, "prewarm", False),
        (Conversation((Message("system", "You are a title generator."), Message("user", "a"))), {}, "title", False),
        (Conversation((Message("system", "You are a title generator."),), (TOOL,)), {}, "main", True),
        (Conversation((Message("user", "# Memory\nManaged memory has TWO directories: a, b"),)), {}, "memory", False),
        (Conversation((Message("system", "Write one-line commit messages."),)), {}, "commit-message", False),
        (Conversation((Message("system", "Put it into <state_snapshot>."),)), {}, "compaction", True),
        (Conversation((Message("system", "You are a context summarization agent."),)), {}, "compaction", True),
        (
            Conversation((Message("system", "You are a general-purpose subagent working for a parent agent."),)),
            {},
            "sub-agent",
            True,
        ),
        (Conversation((Message("system", "You are a specialized Task Routing AI."),)), {}, "router", False),
    ],
)
def test_known_harnesses(conversation: Conversation, headers: dict[str, str], name: str, train: bool) -> None:
    rule = Agents(AgentsSection()).of(conversation, "policy", headers)
    assert (rule.name, rule.train) == (name, train)


def test_a_broken_expression_is_named() -> None:
    with pytest.raises(ValidationError, match=r"'\(' is no regular expression"):
        AgentRule(name="it", system="(")
    assert len(known_rules()) == len(set(map(repr, known_rules())))
