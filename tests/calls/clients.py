"""Released harnesses, unmodified, in the sandbox, against the endpoint over a scripted engine."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

from longrein.agents import harnesses
from longrein.agents.catalog import load_catalog
from longrein.agents.process import ProcessRunner
from longrein.agents.runner import Outcome, Trial
from longrein.calls.routes import CHAT, GEMINI, MESSAGES, RESPONSES
from longrein.config import HarnessSection, RunnerSection
from longrein.engines.engine import Engine
from longrein.forest.targets import trainable
from longrein.records import Call, Cause, RewardProfile, Task
from tests.calls.scripted_engine import told
from tests.calls.serving import serving

PORT = 8000
TIMEOUT_S = 120.0
DIALECTS = {dialect.name: dialect for dialect in (CHAT, GEMINI, MESSAGES, RESPONSES)}

JUDGE = """#!/bin/sh
if [ "$(cat hello.txt)" = hi ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def _command(command: str) -> dict[str, object]:
    return {"command": command}


def _described(command: str) -> dict[str, object]:
    return {"command": command, "description": "A step"}


def _summarized(command: str) -> dict[str, object]:
    return {"command": command, "summary": "A step", "security_risk": "LOW"}


def tool_call(name: str, arguments: Mapping[str, object]) -> str:
    """A call as the model writes it."""
    return f"I act.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Run:
    """So many commands, and whether the model thinks before each and before it ends."""

    turns: int
    thinking: bool = False

    def __str__(self) -> str:
        return f"{self.turns}, thinking" if self.thinking else str(self.turns)


@dataclass(frozen=True)
class Client:
    """One harness in one of its ways.

    Attributes:
        tool: its shell tool; ``arguments`` are that tool's, for a command. Empty where it has no tools.
        files: instead of the profile's own; ``{base_url}``, ``{key}`` and ``{model}`` are filled in.
        command: instead of the profile's own.
        ending: the last replies.
        writes: what the model writes for a command, where that is no tool call.
        later: how each call after the first begins.
        turns: lengths of the runs to try, in commands.
    """

    name: str
    profile: str
    dialect: str
    tool: str
    arguments: Callable[[str], dict[str, object]] = _command
    files: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    ending: tuple[str, ...] = ("All done.",)
    writes: Callable[[str], str] | None = None
    later: Cause = Cause.EXTENDED
    turns: tuple[int, ...] = (2, 12)

    @property
    def runs(self) -> list[Run]:
        """All runs to try: each length, and the shortest with a model that thinks."""
        return [Run(turns) for turns in self.turns] + [Run(self.turns[0], thinking=True)]

    def script(self, turns: int) -> list[str]:
        """All that the model says in a run: it makes the file, looks at it, ends."""
        commands = ["echo hi > hello.txt", *(f"cat hello.txt | head -n {turn}" for turn in range(1, turns))]
        writes = self.writes or (lambda command: tool_call(self.tool, self.arguments(command)))
        return [*map(writes, commands), *self.ending]

    def branches(self, turns: int) -> int:
        """Calls of a run that continue no other."""
        return 1 if self.later is Cause.EXTENDED else len(self.script(turns))


def _pi(api: str, dialect: str, path: str) -> Client:
    provider = {"baseUrl": "{base_url}" + path, "api": api, "apiKey": "{key}", "models": [{"id": "{model}"}]}
    file = {"/root/.pi/agent/models.json": json.dumps({"providers": {"longrein": provider}})}
    return Client(f"pi, {dialect}", "pi", dialect, "bash", files=file)


def _library(profile: str, dialect: str, word: str) -> Client:
    """A small agent of ours on a library that speaks more than one dialect; ``word`` names it to the program."""
    python, program, _, *rest = harnesses.profile(profile).command
    return Client(f"{profile}, {dialect}", profile, dialect, "bash", command=(python, program, word, *rest))


def _keystrokes(command: str, complete: bool = False) -> str:
    """A step of Terminus 2."""
    typed = [{"keystrokes": f"{command}\n", "duration": 0.5}] if command else []
    return json.dumps({"analysis": "I look.", "plan": "I act.", "commands": typed, "task_complete": complete})


def _edit(end: str) -> str:
    """A new file, as aider wants it written when ``end`` is ``>>>>>>> REPLACE``."""
    return f"hello.txt\n```\n<<<<<<< SEARCH\n=======\nhi\n{end}\n```"


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TERMINUS_ENDS = _keystrokes("", complete=True)

CLIENTS = (
    _pi("openai-completions", "chat", "/v1"),
    _pi("openai-responses", "responses", "/v1"),
    _pi("anthropic-messages", "messages", ""),
    _pi("google-generative-ai", "gemini", "/v1beta"),
    Client("mini-swe-agent", "mini-swe-agent", "chat", "bash", ending=(tool_call("bash", _command(SUBMIT)),)),
    Client("claude-code", "claude-code", "messages", "Bash", _described),
    Client("claude-agent-sdk", "claude-agent-sdk", "messages", "Bash", _described),
    Client("codex", "codex", "responses", "exec_command", lambda c: {"cmd": c}),
    Client("gemini-cli", "gemini-cli", "gemini", "run_shell_command"),
    Client("opencode", "opencode", "chat", "bash", _described),
    Client("qwen-code", "qwen-code", "chat", "run_shell_command", lambda c: {"command": c, "is_background": False}),
    _library("openai-agents", "responses", "responses"),
    _library("openai-agents", "chat", "chat_completions"),
    _library("langgraph", "chat", "chat"),
    _library("langgraph", "responses", "responses"),
    _library("pydantic-ai", "chat", "openai-chat:{model}"),
    _library("pydantic-ai", "responses", "openai:{model}"),
    # It plays its tool calls back as text of its own.
    Client(
        "smolagents",
        "smolagents",
        "chat",
        "bash",
        ending=(tool_call("final_answer", {"answer": "All done."}),),
        later=Cause.HISTORY_REWRITTEN,
    ),
    # No tools: edits as text, which it asks for again while they are malformed. Its instructions move to the newest
    # message each time.
    Client(
        "aider",
        "aider",
        "chat",
        "",
        writes=lambda command: _edit(f"Then {command}."),
        ending=(_edit(">>>>>>> REPLACE"),),
        later=Cause.HISTORY_REWRITTEN,
        turns=(1, 3),
    ),
    Client(
        "openhands",
        "openhands",
        "chat",
        "terminal",
        _summarized,
        ending=(tool_call("finish", {"message": "All done.", "summary": "The end", "security_risk": "LOW"}),),
    ),
    # It asks once more whether the task is done.
    Client("terminus-2", "terminus-2", "chat", "", writes=_keystrokes, ending=(TERMINUS_ENDS, TERMINUS_ENDS)),
)


@dataclass(frozen=True)
class Played:
    """What came of one run."""

    outcome: Outcome
    calls: list[Call]
    output: str
    streamed: bool

    @property
    def reward(self) -> float | None:
        return None if self.outcome.receipt is None else self.outcome.receipt.reward

    @property
    def exact(self) -> bool:
        """Whether each call that continues another begins with exactly its tokens."""
        known = {call.call_id: call for call in self.calls}
        return all(
            call.prompt_ids[: call.inherited].tolist() == told(known[call.parent_id])
            for call in self.calls
            if call.parent_id is not None
        )

    @property
    def branches(self) -> int:
        """Calls that continue no other."""
        return sum(call.parent_id is None for call in self.calls)

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens that would be trained."""
        return sum(len(call.completion_ids) for call in self.calls if trainable(call))

    @property
    def causes(self) -> dict[str, int]:
        """How many calls begin for each reason."""
        return dict(Counter(call.cause.value for call in self.calls))

    def in_order(self) -> list[tuple[Call, Call]]:
        return list(itertools.pairwise(self.calls))


async def play(
    client: Client, model: Path, folder: Path, turns: int = 2, engine: Engine | None = None, thinking: bool = False
) -> Played:
    """Let a harness make one file in ``turns`` commands.

    Args:
        engine: the model; by default what it says is scripted.
        thinking: whether the script thinks before each reply. The endpoint keeps it.
    """
    script = client.script(turns)
    if thinking:
        script = [f"<think>\nI think of step {i}.\n</think>\n\n{said}" for i, said in enumerate(script)]
    family = {"tool_format": "hermes", "keep_thinking": thinking}
    limits = {"max_calls": 4 * turns + 8}
    evidence = folder / "evidence"
    evidence.mkdir()
    async with serving(model, *script, model=family, gateway=limits, context_length=1_000_000, engine=engine) as house:
        key = house.gateway.open_rollout("r0", temperature=0.0)
        base_url = f"http://127.0.0.1:{PORT}"
        task = _task(folder / "tasks" / "hello")
        section = HarnessSection(name=client.profile, command=list(client.command) or None)
        launch = harnesses.launch(section, task, base_url=base_url, key=key, model="policy")
        if client.files:
            filled = {
                path: text.replace("{base_url}", base_url).replace("{key}", key).replace("{model}", "policy").encode()
                for path, text in client.files.items()
            }
            launch = replace(launch, files=filled)
        runner = ProcessRunner(RunnerSection(memory_mb=8192, disk_mb=1024))
        trial = Trial("r0", task, launch, house.gateway.socket, PORT, TIMEOUT_S, evidence, _nothing)
        dialect = DIALECTS[client.dialect]
        await runner.open()
        try:
            with patch.object(dialect, "read", wraps=dialect.read) as read:
                outcome = await runner.run(trial)
        finally:
            await runner.close()
        streamed = any(dialect.read(*asked.args).stream for asked in read.call_args_list)
        output = "\n".join(
            file.read_text(errors="replace") for file in sorted(evidence.rglob("*")) if file.suffix in (".txt", ".log")
        )
        return Played(outcome, house.notebook.calls, output, streamed)


async def _nothing() -> None:
    pass


def _task(directory: Path) -> Task:
    (directory / "tests").mkdir(parents=True)
    (directory / "environment").mkdir()
    (directory / "task.toml").write_text('schema_version = "1.4"\n[verifier]\ntimeout_sec = 30\n')
    (directory / "instruction.md").write_text("Create hello.txt containing hi.\n")
    (directory / "environment" / "Dockerfile").write_text("FROM scratch\nWORKDIR /app\n")
    test = directory / "tests" / "test.sh"
    test.write_text(JUDGE)
    test.chmod(0o755)
    (task,) = load_catalog(directory.parent, RewardProfile(), "gateway")
    return task
