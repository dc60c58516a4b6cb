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
from longrein.forest.targets import trainable
from longrein.records import Call, RewardProfile, Task
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


@dataclass(frozen=True)
class Client:
    """One harness in one of its ways.

    Attributes:
        tool: its shell tool; ``arguments`` are that tool's, for a command.
        files: instead of the profile's own; ``{base_url}``, ``{key}`` and ``{model}`` are filled in.
        ending: the last reply.
    """

    name: str
    profile: str
    dialect: str
    tool: str
    arguments: Callable[[str], dict[str, object]] = _command
    files: Mapping[str, str] = field(default_factory=dict)
    ending: str = "All done."

    def call(self, command: str) -> str:
        """The tool call as the model writes it."""
        told = json.dumps({"name": self.tool, "arguments": self.arguments(command)})
        return f"I act.\n<tool_call>\n{told}\n</tool_call>"


def _pi(api: str, dialect: str, path: str) -> Client:
    provider = {"baseUrl": "{base_url}" + path, "api": api, "apiKey": "{key}", "models": [{"id": "{model}"}]}
    file = {"/root/.pi/agent/models.json": json.dumps({"providers": {"longrein": provider}})}
    return Client(f"pi, {dialect}", "pi", dialect, "bash", files=file)


SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

CLIENTS = (
    _pi("openai-completions", "chat", "/v1"),
    _pi("openai-responses", "responses", "/v1"),
    _pi("anthropic-messages", "messages", ""),
    _pi("google-generative-ai", "gemini", "/v1beta"),
    replace(
        Client("mini-swe-agent", "mini-swe-agent", "chat", "bash"),
        ending=Client("", "", "", "bash").call(SUBMIT),
    ),
    Client("claude-code", "claude-code", "messages", "Bash", _described),
    Client("codex", "codex", "responses", "exec_command", lambda c: {"cmd": c}),
    Client("gemini-cli", "gemini-cli", "gemini", "run_shell_command"),
    Client("opencode", "opencode", "chat", "bash", _described),
    Client("qwen-code", "qwen-code", "chat", "run_shell_command", lambda c: {"command": c, "is_background": False}),
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
            call.prompt_ids[: len(told(known[call.parent_id]))].tolist() == told(known[call.parent_id])
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


async def play(client: Client, model: Path, folder: Path, turns: int = 2) -> Played:
    """Let a harness make one file in ``turns`` tool calls."""
    commands = ["echo hi > hello.txt", *(f"cat hello.txt | head -n {turn}" for turn in range(1, turns))]
    script = [*map(client.call, commands), client.ending]
    limits = {"max_calls": 4 * turns + 8}
    evidence = folder / "evidence"
    evidence.mkdir()
    async with serving(
        model, *script, model={"tool_format": "hermes"}, gateway=limits, context_length=1_000_000
    ) as house:
        key = house.open()
        base_url = f"http://127.0.0.1:{PORT}"
        task = _task(folder / "tasks" / "hello")
        launch = harnesses.launch(HarnessSection(name=client.profile), task, base_url=base_url, key=key, model="policy")
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
