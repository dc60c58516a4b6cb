"""A preloaded harness behaves as one started afresh: same confinement, same ending, only without the imports."""

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import longrein
from longrein.agents.runner import Launch, Preload
from tests.agents.trials import descendants, gone, make_trial, run, running, said

HARNESS = """#!{python}
import os, random, sys, time
try:
    with open({imported!r}, "a") as file:
        file.write("x")
except OSError:
    pass  # in the sandbox the harness's directory is read-only
PID = os.getpid()
AT_IMPORT = dict(os.environ)

def probe():
    import json, colorsys, resource, signal, socket, stat
    status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    keys = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Uid", "Gid", "Groups", "Umask")
    keys = (*keys, "SigIgn", "SigBlk")
    limits = ("DATA", "NPROC", "FSIZE", "NOFILE", "CORE")
    try:
        os.listdir("/proc/self/fd")
        os.readlink("/proc/self/exe")
        mine = True
    except OSError:
        mine = False
    return dict(
        status={{key: status[key] for key in keys}},
        limits={{name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in limits}},
        env=dict(os.environ), cwd=os.getcwd(), argv=sys.argv, root=sorted(os.listdir("/")), host=socket.gethostname(),
        oom=open("/proc/self/oom_score_adj").read(), session=os.getsid(0) == os.getpid(), mine=mine,
        processes=sorted(p for p in os.listdir("/proc") if p.isdigit())[:2],
        descriptors=len(os.listdir("/proc/self/fd")), stdin=sys.stdin.read(),
        handlers=[signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGCHLD) == 0],
    )

def main():
    import json
    what = sys.argv[1]
    if what == "probe":
        found = probe()
        found["warm"] = PID != os.getpid()
        found["random"] = random.random()
        found["import_env"] = AT_IMPORT
        print(json.dumps(found))
    elif what == "exit":
        sys.exit(eval(sys.argv[2]))
    elif what == "return":
        return eval(sys.argv[2])
    elif what == "raise":
        raise ValueError("of the harness")
    elif what == "die":
        os.kill(os.getpid(), 11)
    elif what == "atexit":
        import atexit, threading
        atexit.register(print, "at exit")
        threading.Timer(0.2, print, ["from a thread"]).start()
    elif what == "sleep":
        print("asleep", flush=True)
        time.sleep(1000)

if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture
def harness(tmp_path: Path) -> Path:
    """A directory with ``toy.py``, which notes each import in the file ``imported`` beside it."""
    directory = tmp_path / "harness"
    directory.mkdir()
    directory.joinpath("toy.py").write_text(HARNESS.format(python=sys.executable, imported=str(directory / "imported")))
    directory.joinpath("toy.py").chmod(0o755)
    directory.joinpath("imported").touch()
    return directory


def preload(harness: Path, *imports: str) -> Preload:
    return Preload(Path(sys.executable), ("json", *imports), "toy:main", {"PYTHONPATH": str(harness)})


def toy(harness: Path, *arguments: str, warm: Preload | None) -> Launch:
    readable = (harness, Path(sys.prefix), Path(sys.base_prefix))
    return Launch((str(harness / "toy.py"), *arguments), {"KEY": "secret of this rollout"}, {}, warm, readable)


def imports_of(harness: Path) -> int:
    return len(harness.joinpath("imported").read_text())


async def test_the_same_confinement_as_a_fresh_start(tmp_path: Path, harness: Path) -> None:
    launch = toy(harness, "probe", warm=preload(harness))
    async with running() as runner:
        found: dict[str, dict[str, Any]] = {}
        for name, one in (("warm", launch), ("again", launch), ("cold", replace(launch, preload=None))):
            trial = make_trial(tmp_path, one, name=name)
            outcome = await runner.run(trial)
            assert outcome.ending == "exited 0", said(trial, "stderr")
            found[name] = json.loads(said(trial))
    assert imports_of(harness) == 1
    warm, again, fresh = (dict(found[name]) for name in ("warm", "again", "cold"))
    assert warm.pop("warm") and again.pop("warm") and not fresh.pop("warm")
    assert warm.pop("random") != again.pop("random")
    fresh.pop("random")
    assert "secret of this rollout" not in str(warm.pop("import_env"))
    again.pop("import_env")
    fresh.pop("import_env")
    assert warm == again == fresh
    assert warm["env"]["KEY"] == "secret of this rollout" and "PYTHONPATH" not in warm["env"]
    assert warm["status"]["CapEff"] == "0" * 16 and warm["status"]["NoNewPrivs"] == "1"


@pytest.mark.parametrize(
    ("arguments", "ending", "printed"),
    [
        (("exit", "3"), "exited 3", ""),
        (("exit", "None"), "exited 0", ""),
        (("exit", "'a reason'"), "exited 1", "a reason"),
        (("return", "None"), "exited 0", ""),
        (("return", "4"), "exited 4", ""),
        (("raise",), "exited 1", "ValueError: of the harness"),
        (("die",), "killed by SIGSEGV", ""),
        (("atexit",), "exited 0", ""),
    ],
)
async def test_it_ends_as_a_console_script_does(
    tmp_path: Path, harness: Path, arguments: tuple[str, ...], ending: str, printed: str
) -> None:
    trial = make_trial(tmp_path, toy(harness, *arguments, warm=preload(harness)))
    outcome = await run(trial)
    assert outcome.ending == ending and imports_of(harness) == 1
    assert printed in said(trial, "stderr")
    if arguments == ("atexit",):
        assert said(trial) == "from a thread\nat exit\n"


async def test_time_limit_and_cancellation_hold(tmp_path: Path, harness: Path) -> None:
    launch = toy(harness, "sleep", warm=preload(harness))
    async with running() as runner:
        trial = make_trial(tmp_path, launch, timeout_s=0.5)
        outcome = await runner.run(trial)
        assert outcome.ending == "timed out" and said(trial) == "asleep\n"
        assert outcome.receipt is not None and outcome.receipt.reward == 0.0
        cancelled = asyncio.create_task(runner.run(make_trial(tmp_path, launch)))
        await asyncio.sleep(0.3)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        # The warden and the preloaded harness stay, for the next rollout.
        await gone(descendants(os.getpid()) - {*wardens(), *servers()})


async def test_with_the_hosts_network_too(tmp_path: Path, harness: Path) -> None:
    trial = make_trial(tmp_path, toy(harness, "probe", warm=preload(harness)))
    assert (await run(trial, network="host")).ending == "exited 0"
    assert json.loads(said(trial))["warm"]


def servers() -> list[int]:
    """Preloaded harnesses: children of the warden."""
    return [pid for warden in wardens() for pid in descendants(warden) if parent(pid) == warden and runs_server(pid)]


def wardens() -> list[int]:
    return [pid for pid in descendants(os.getpid()) if parent(pid) == os.getpid()]


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def runs_server(pid: int) -> bool:
    try:
        return b"preload_server.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def test_a_dead_server_is_started_again_then_done_without(
    tmp_path: Path, harness: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launch = toy(harness, "return", "0", warm=preload(harness))
    async with running() as runner:
        for _ in range(4):
            outcome = await runner.run(make_trial(tmp_path, launch))
            assert outcome.receipt is not None
            for pid in servers():
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.05)
    assert imports_of(harness) == 3
    assert "preloading it again" in caplog.text


async def test_a_server_that_dies_under_a_rollout_fails_it(tmp_path: Path, harness: Path) -> None:
    async with running() as runner:
        trial = make_trial(tmp_path, toy(harness, "sleep", warm=preload(harness)))
        task = asyncio.create_task(runner.run(trial))
        while not servers() or len(descendants(servers()[0])) < 2:
            await asyncio.sleep(0.02)
        os.kill(servers()[0], signal.SIGKILL)
        outcome = await task
        assert outcome.receipt is None and outcome.retryable and "preloaded harness: died" in outcome.failure


@pytest.mark.parametrize(
    ("module", "note"),
    [
        (
            "import threading, time\n"
            "threading.Thread(target=time.sleep, args=(1000,), name='worker', daemon=True).start()",
            "worker",
        ),
        ("raise ImportError('no such part')", "no such part"),
        ("import os; print('going down', flush=True); os._exit(9)", "going down"),
        ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", "unreachable"),
    ],
)
async def test_what_cannot_be_preloaded_starts_afresh(
    tmp_path: Path, harness: Path, caplog: pytest.LogCaptureFixture, module: str, note: str
) -> None:
    harness.joinpath("part.py").write_text(module)
    trial = make_trial(
        tmp_path, replace(toy(harness, "return", "0", warm=preload(harness, "part")), argv=("/bin/echo", "afresh"))
    )
    async with running() as runner:
        assert (await runner.run(trial)).ending == "exited 0"
        assert (await runner.run(trial)).ending == "exited 0"
    assert said(trial) == "afresh\n"
    assert caplog.text.count("cannot be preloaded") == 1 and note in caplog.text


async def test_the_server_has_no_settings_of_the_user(
    tmp_path: Path, harness: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_SECRET", "hunter2")
    harness.joinpath("part.py").write_text(
        f"import os, pathlib\npathlib.Path({str(harness)!r}, 'seen').write_text(repr((sorted(os.environ), "
        "os.listdir(pathlib.Path.home()), os.listdir('/proc/self/fd'))))"
    )
    trial = make_trial(tmp_path, toy(harness, "return", "0", warm=preload(harness, "part")))
    assert (await run(trial)).ending == "exited 0"
    names, home, descriptors = eval((harness / "seen").read_text())
    assert "TRAINER_SECRET" not in names and "KEY" not in names
    # Of the home directory only what leads to the interpreter and to longrein itself.
    programs = (Path(sys.prefix), Path(sys.base_prefix), Path(longrein.__file__))
    assert set(home) <= {path.relative_to("/root").parts[0] for path in programs if path.is_relative_to("/root")}
    assert len(descriptors) <= 6
