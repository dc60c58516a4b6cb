"""Harbor's Terminus 2 on the machine it runs on, without a container.

OPENAI_BASE_URL=… OPENAI_API_KEY=… python with_terminus_2.py LOGS MODEL INSTRUCTION

LOGS is the directory for its trajectory.
"""

import asyncio
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext


class Local:
    """What Terminus 2 asks of an environment."""

    session_id = environment_name = "local"
    default_user = None
    logger = logging.getLogger("local")

    def __init__(self, logs):
        self.trial_paths = SimpleNamespace(agent_dir=logs)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        shell = await asyncio.create_subprocess_exec(
            "bash", "-c", command, cwd=cwd, env={**os.environ, **(env or {})}, stdout=-1, stderr=-1
        )
        stdout, stderr = await asyncio.wait_for(shell.communicate(), timeout_sec)
        return ExecResult(stdout=stdout.decode(), stderr=stderr.decode(), return_code=shell.returncode)

    async def upload_file(self, source_path, target_path):
        shutil.copy(source_path, target_path)

    download_file = upload_file

    async def is_dir(self, path, user=None):
        return Path(path).is_dir()


async def main(folder: str, model: str, instruction: str) -> None:
    logs = Path(folder)
    logs.mkdir(parents=True, exist_ok=True)
    agent = Terminus2(
        logs_dir=logs,
        model_name=f"openai/{model}",
        api_base=os.environ["OPENAI_BASE_URL"],
        record_terminal_session=False,
    )
    local = Local(logs)
    # A tmux of its own, which it leaves running.
    os.environ.pop("TMUX", None)
    with tempfile.TemporaryDirectory() as os.environ["TMUX_TMPDIR"]:
        try:
            await agent.setup(local)
            await agent.run(instruction, local, AgentContext())
        finally:
            await local.exec("tmux kill-server")


asyncio.run(main(*sys.argv[1:]))
