"""What released harnesses do besides their main loop, seen live: sub-agents, summaries, titles, routing.

Those that are not installed are skipped.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from longrein.agents import harnesses
from tests.calls.clients import Client, play, tool_call

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

HELLO = "echo hi > hello.txt"
CLAUDE = tool_call("Bash", {"command": HELLO, "description": "A step"})
CODEX = tool_call("exec_command", {"cmd": HELLO})
OPENCODE = tool_call("bash", {"command": HELLO, "description": "A step"})
QWEN = tool_call("run_shell_command", {"command": HELLO, "is_background": False})
ERRAND = {"description": "look", "prompt": "Say the word.", "subagent_type": "general-purpose"}


@dataclass(frozen=True)
class Scripted(Client):
    """A harness whose model says these lines, in the order it is asked."""

    lines: tuple[str, ...] = ()

    def script(self, turns: int) -> list[str]:
        return list(self.lines)


def scripted(profile: str, dialect: str, command: list[str], *lines: str) -> Scripted:
    return Scripted(profile, profile, dialect, "", command=tuple(command), lines=lines)


def command_of(name: str, *, env: list[str] | None = None) -> list[str]:
    """A profile's command; with ``env``, under other environment variables (as ``env`` takes them)."""
    program, *arguments = harnesses.profile(name).command
    return (
        [program, *arguments] if env is None else ["env", *env, f"{{prefix}}/node_modules/.bin/{program}", *arguments]
    )


def with_tools(command: list[str], tools: str) -> list[str]:
    at = command.index("--tools") + 1
    return [*command[:at], tools, *command[at + 1 :]]


def before_task(command: list[str], *arguments: str) -> list[str]:
    return [*command[:-1], *arguments, command[-1]]


# (name, calls' agents, whether each is trained) after the harness and what its model says.
CASES = {
    "claude-code, sub-agent": (
        scripted(
            "claude-code",
            "messages",
            with_tools(command_of("claude-code"), "Bash,Agent"),
            tool_call("Agent", ERRAND),
            *(CLAUDE, CLAUDE, "The word is hi.", "All done.", "All done."),
        ),
        {"main": True, "sub-agent": True},
    ),
    "claude-code, summary": (
        scripted(
            "claude-code",
            "messages",
            with_tools(
                command_of("claude-code", env=["-u", "DISABLE_COMPACT", "CLAUDE_CODE_MAX_CONTEXT_TOKENS=14000"]), "Bash"
            ),
            *(CLAUDE, "<summary>It is made.</summary>", "All done."),
        ),
        {"main": True, "compaction": True},
    ),
    "codex, sub-agent": (
        scripted(
            "codex",
            "responses",
            command_of("codex"),
            tool_call("multi_agent_v1__spawn_agent", {"message": "Say the word."}),
            *(CODEX, CODEX, "All done.", "All done."),
        ),
        {"main": True, "sub-agent": True},
    ),
    "codex, summary": (
        scripted(
            "codex",
            "responses",
            before_task(command_of("codex"), "-c", "model_auto_compact_token_limit=20000"),
            *(CODEX, "It is made.", "All done."),
        ),
        {"main": True, "compaction": True},
    ),
    "opencode, sub-agent": (
        scripted(
            "opencode",
            "chat",
            command_of("opencode"),
            tool_call("task", {**ERRAND, "subagent_type": "general"}),
            *("The word is hi.", OPENCODE, "All done."),
        ),
        {"main": True, "sub-agent": True},
    ),
    "opencode, title": (
        scripted(
            "opencode",
            "chat",
            [word for word in command_of("opencode") if word not in ("--title", "task")],
            *(OPENCODE, OPENCODE, "All done."),
        ),
        {"main": True, "title": False},
    ),
    "qwen-code, sub-agent": (
        scripted(
            "qwen-code",
            "chat",
            command_of("qwen-code"),
            tool_call("agent", ERRAND),
            *(QWEN, QWEN, "All done.", "All done.", "All done."),
        ),
        {"main": True, "sub-agent": True},
    ),
    "gemini-cli, router": (
        scripted(
            "gemini-cli",
            "gemini",
            command_of("gemini-cli", env=["-u", "GEMINI_MODEL"]),
            '{"complexity_reasoning": "It is simple.", "complexity_score": 5}',
            *(tool_call("run_shell_command", {"command": HELLO}), "All done."),
        ),
        {"main": True, "router": False},
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_each_call_is_its_agents(name: str, tiny_directory: Path, tmp_path: Path) -> None:
    client, agents = CASES[name]
    if harnesses.installed(harnesses.profile(client.profile)) is None:
        pytest.skip(f"{client.profile} is not installed (longrein harness install {client.profile})")
    played = await play(client, tiny_directory, tmp_path)
    assert (played.outcome.ending, played.reward) == ("exited 0", 1.0), played.output[-2000:]
    assert {call.agent: call.train for call in played.calls} == agents
    assert played.exact
    # What one agent says, no other goes on from (a summary is asked for at the end of what it sums up).
    known = {call.call_id: call for call in played.calls}
    for call in played.calls:
        if call.parent_id is not None and call.agent != "compaction":
            assert known[call.parent_id].agent == call.agent
