"""Which agent inside a harness a call belongs to, and whether the policy learns from it.

A harness plays several roles over one endpoint: its main loop, sub-agents, summaries, titles. Rules look at what a call
shows: the model's name, headers, the system prompt, the last user message, whether there are tools. The first rule that
matches names the agent: the configuration's own in their order, then the ready-made ones of ``agents.yaml``.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from importlib import resources

import yaml

from longrein.calls.conversation import Conversation
from longrein.config import AgentRule, AgentsSection

MAIN = AgentRule(name="main")


class Agents:
    """The rules of a run."""

    def __init__(self, config: AgentsSection) -> None:
        self._rules = (*config.rules, *(known_rules() if config.known else ()))

    def of(self, conversation: Conversation, model: str, headers: Mapping[str, str]) -> AgentRule:
        """The rule a call falls under; ``main``, which is trained, where none matches.

        Args:
            headers: names in lower case.
        """
        return next((rule for rule in self._rules if _matches(rule, conversation, model, headers)), MAIN)


@functools.cache
def known_rules() -> tuple[AgentRule, ...]:
    """The ready-made rules, in order."""
    text = resources.files("longrein.calls").joinpath("agents.yaml").read_text(encoding="utf-8")
    return tuple(AgentRule.model_validate(rule) for rule in yaml.safe_load(text))


def _matches(rule: AgentRule, conversation: Conversation, model: str, headers: Mapping[str, str]) -> bool:
    """Whether all that a rule asks for holds."""
    return all(_conditions(rule, conversation, model, headers))


def _conditions(rule: AgentRule, conversation: Conversation, model: str, headers: Mapping[str, str]) -> Iterator[bool]:
    if rule.tools is not None:
        yield bool(conversation.tools) == rule.tools
    if rule.model is not None:
        yield re.search(rule.model, model) is not None
    for name, pattern in rule.headers.items():
        yield name.lower() in headers and re.search(pattern, headers[name.lower()]) is not None
    if rule.system is not None:
        yield any(re.search(rule.system, text) for text in _texts(conversation, "system"))
    if rule.user is not None:
        yield re.search(rule.user, next(iter(reversed(_texts(conversation, "user"))), "")) is not None


def _texts(conversation: Conversation, role: str) -> list[str]:
    return [message.content for message in conversation.messages if message.role == role]
