"""Released harnesses in the sandbox against the endpoint: a whole tool loop is one branch, token for token,
except where the harness itself rewrites what the model said.

Those that ask most of the endpoint, where they are installed; ``make harness-matrix`` installs and tries them all.
"""

import shutil
from pathlib import Path

import pytest

from longrein.agents import harnesses
from longrein.records import Cause
from tests.calls.clients import CLIENTS, Client, Run, play

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


PROFILES = ("pi", "mini-swe-agent", "codex", "claude-agent-sdk", "smolagents")
RUNS = [
    pytest.param(client, run, id=f"{client.name}: {run}")
    for client in CLIENTS
    if client.profile in PROFILES
    for run in client.runs
]


@pytest.mark.parametrize(("client", "run"), RUNS)
async def test_a_tool_loop(client: Client, run: Run, tiny_directory: Path, tmp_path: Path) -> None:
    if harnesses.installed(harnesses.profile(client.profile)) is None:
        pytest.skip(f"{client.profile} is not installed (longrein harness install {client.profile})")
    played = await play(client, tiny_directory, tmp_path, run.turns, thinking=run.thinking)
    assert (played.outcome.ending, played.reward) == ("exited 0", 1.0), played.output[-2000:]
    assert {call.dialect for call in played.calls} == {client.dialect}
    assert len(played.calls) == len(client.script(run.turns))
    if client.tool:
        assert [call.finish_reason for call in played.calls][: run.turns] == ["tool_calls"] * run.turns
    assert played.branches == client.branches(run.turns)
    for before, after in played.in_order():
        assert after.cause is client.later
        assert after.parent_id == (before.call_id if client.later is Cause.EXTENDED else None)
    assert played.exact
    assert all(call.delivered for call in played.calls)
