"""Released harnesses in the sandbox against the endpoint: a whole tool loop is one branch, token for token.

Those that are not installed are skipped; ``make harness-matrix`` installs and tries them all.
"""

import shutil
from pathlib import Path

import pytest

from longrein.agents import harnesses
from longrein.records import Cause
from tests.calls.clients import CLIENTS, Client, play

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
@pytest.mark.parametrize("turns", [2, 12])
async def test_a_tool_loop_is_one_branch(client: Client, turns: int, tiny_directory: Path, tmp_path: Path) -> None:
    if harnesses.installed(harnesses.profile(client.profile)) is None:
        pytest.skip(f"{client.profile} is not installed (longrein harness install {client.profile})")
    played = await play(client, tiny_directory, tmp_path, turns)
    assert (played.outcome.ending, played.reward) == ("exited 0", 1.0), played.output[-2000:]
    assert {call.dialect for call in played.calls} == {client.dialect}
    assert [call.finish_reason for call in played.calls][:turns] == ["tool_calls"] * turns
    for before, after in played.in_order():
        assert (after.cause, after.parent_id) == (Cause.EXTENDED, before.call_id)
    assert played.exact
    assert all(call.delivered for call in played.calls)
