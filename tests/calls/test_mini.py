"""The released mini-swe-agent, unmodified, against the endpoint."""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from longrein.records import Call, Cause
from tests.calls.scripted_engine import told
from tests.calls.serving import House, serving

VARIABLE = "LONGREIN_TEST_MINI"


def installed() -> Path | None:
    """The harness's program: named by the environment, or where ``longrein harness install`` puts it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    named = os.environ.get(VARIABLE)
    program = Path(named) if named else cache / "longrein/harnesses/mini-swe-agent-2.4.6/bin/mini"
    return program if program.exists() else None


pytestmark = pytest.mark.skipif(
    installed() is None, reason=f"mini-swe-agent 2.4.6 is not installed (longrein harness install), nor in ${VARIABLE}"
)


def call(command: str) -> str:
    arguments = json.dumps({"command": command})
    return f'I act.\n<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'


async def run(house: House, key: str, folder: Path) -> dict[str, Any]:
    """Run the harness to its end; its own record of the run."""
    out = folder / "trajectory.json"
    arguments = ["-m", "openai/policy", "-y", "--exit-immediately", "-l", "0", "-t", "Create hello.txt", "-o", str(out)]
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_KEY": key,
        "OPENAI_BASE_URL": house.url,
    }
    harness = await asyncio.create_subprocess_exec(
        str(installed()),
        *arguments,
        cwd=folder,
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(harness.communicate(), 120)
    except TimeoutError:
        harness.kill()
        await harness.wait()
        raise
    assert harness.returncode == 0, output.decode()[-2000:]
    trajectory: dict[str, Any] = json.loads(out.read_text())
    return trajectory


def check_branch(calls: list[Call]) -> None:
    for before, after in itertools.pairwise(calls):
        assert (after.cause, after.parent_id) == (Cause.EXTENDED, before.call_id)
        assert after.prompt_ids[: len(told(before))].tolist() == told(before)


SUBMIT = call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.mark.skipif(sys.platform != "linux", reason="the harness is run as on the training machine")
async def test_a_whole_loop_is_one_branch(qwen3_directory: Path, tmp_path: Path) -> None:
    script = (call("echo hi > hello.txt"), call("cat hello.txt"), SUBMIT)
    async with serving(qwen3_directory, *script, context_length=32768) as house:
        trajectory = await run(house, house.open(), tmp_path)
        assert (tmp_path / "hello.txt").read_text() == "hi\n"
        assert trajectory["info"]["exit_status"] == "Submitted"
        calls = house.notebook.calls
        assert [c.finish_reason for c in calls] == ["tool_calls"] * 3
        assert all(house.notebook.delivered.values())
        check_branch(calls)


async def test_a_failed_turn_that_the_harness_deletes_starts_a_branch(tiny_directory: Path, tmp_path: Path) -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls}\n</tool_call>'
    script = (call("echo hi > hello.txt"), broken, SUBMIT)
    async with serving(tiny_directory, *script, model={"tool_format": "hermes"}, context_length=32768) as house:
        await run(house, house.open(), tmp_path)
        first, failed, last = house.notebook.calls
        check_branch([first, failed])
        assert (last.cause, last.parent_id) == (Cause.HISTORY_REWRITTEN, first.call_id)
        assert last.prompt_ids[: len(told(first))].tolist() == told(first)
