"""The parts of a sandbox by themselves: what it shows, what it understands, what it carries, and what it says."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from longrein.agents import sandbox, warden
from longrein.agents.dockerfile import Command, Copy, Directory, read_environment
from longrein.agents.keeper import MOST_FILES
from longrein.agents.output import Output
from longrein.agents.process import check
from longrein.agents.relay import MOST_CONNECTIONS, relayed
from longrein.agents.runner import Launch
from longrein.agents.sandbox import outermost, visible_directories
from longrein.config import RunnerSection
from longrein.errors import SandboxUnavailable, TaskError
from tests.agents.trials import make_task, make_trial, run, said, shell


def test_visible_directories_bring_their_interpreter_and_no_neighbour(tmp_path: Path) -> None:
    environment = tmp_path / "env"
    (environment / "bin").mkdir(parents=True)
    (tmp_path / "python3.11" / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text(f"home = {tmp_path}/python3.11/bin\nversion = 3.11\n")
    launch = Launch(("x",), readable=(environment / "bin", environment, Path("/usr/lib"), tmp_path / "missing"))
    assert visible_directories(launch) == [environment, tmp_path / "python3.11"]
    inner = environment / "bin"
    assert outermost([inner, environment, tmp_path / "python3.11", inner]) == [environment, tmp_path / "python3.11"]


def test_a_dockerfile_is_read_as_docker_reads_it(tmp_path: Path) -> None:
    for name in ("one.txt", "two.txt", "sub/three.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "Dockerfile").write_text(
        'FROM a AS b\n\n# comment\nENV A=1 B="two words" \\\n    C=$A-${B}\nENV D old form\nWORKDIR /srv\nWORKDIR sub\n'
        'COPY *.txt ./\nCOPY sub /data\nCOPY one.txt renamed.txt\nCOPY ["two.txt", "/abs/"]\nRUN echo \\$A $A\n'
    )
    environment = read_environment(tmp_path, "/app")
    assert environment.env == {"A": "1", "B": "two words", "C": "1-two words", "D": "old form"}
    copies = {step.path: step.source.name for step in environment.steps if isinstance(step, Copy)}
    assert copies == {
        "/srv/sub/one.txt": "one.txt",
        "/srv/sub/two.txt": "two.txt",
        "/data/three.txt": "three.txt",
        "/srv/sub/renamed.txt": "one.txt",
        "/abs/two.txt": "two.txt",
    }
    assert [step.path for step in environment.steps if isinstance(step, Directory)] == ["/srv", "/srv/sub", "/data"]
    (command,) = [step for step in environment.steps if isinstance(step, Command)]
    assert command.argv == ("/bin/sh", "-c", "echo \\$A $A") and command.cwd == "/srv/sub" and command.env["A"] == "1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM x\nVOLUME /data", ("Dockerfile:2", "VOLUME", "WORKDIR")),
        ("COPY --from=b x y", ("Dockerfile:1", "--from")),
        ("COPY nothing.* .", ("Dockerfile:1", "nothing.*")),
        ("COPY ../../etc/passwd .", ("Dockerfile:1", "passwd")),
        ("COPY link .", ("link", "regular file")),
        ("ENV A", ("Dockerfile:1", "NAME=value")),
        ("RUN cat <<EOF\nx\nEOF", ("Dockerfile:1", "here-document")),
        ("COPY 'a b", ("Dockerfile:1", "quotation")),
        ("RUN a \\", ("Dockerfile:1", "incomplete")),
    ],
)
def test_what_a_dockerfile_may_not_say_is_named(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    (tmp_path / "Dockerfile").write_text(text)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(TaskError) as caught:
        read_environment(tmp_path, "/app")
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200_000])
async def test_output_keeps_both_ends(size: int) -> None:
    output = Output(100)
    text = bytes(i % 251 for i in range(size))

    def write() -> None:
        view = memoryview(text)
        while view:
            view = view[os.write(output.write_end, view) :]

    await asyncio.to_thread(write)
    kept = await output.finish()
    if size <= 100:
        assert kept == text
    else:
        assert kept == text[:50] + f"\n[{size - 100} bytes omitted]\n".encode() + text[-50:]


async def test_evidence_is_bounded_whatever_its_names(tmp_path: Path) -> None:
    script = """
    cd /logs/agent; long=$(printf 'n%.0s' $(seq 255)); echo kept > $long; mkdir omitted.txt; echo kept > omitted.txt/in
    mkdir -p a/b/c/d/e; echo deep > a/b/c/d/e/file; ln -s /etc/passwd link; mkfifo pipe; echo odd > $'\\xff'
    truncate -s 100G sparse; mkdir zmany; for i in $(seq 100); do echo kept > zmany/$i; done
    """
    trial = make_trial(tmp_path, shell(script))
    assert (await run(trial, disk_mb=200_000)).ending == "exited 0"
    kept = {str(path.relative_to(trial.evidence / "agent")) for path in (trial.evidence / "agent").rglob("*")}
    assert {"n" * 255, "omitted.txt", "omitted.txt/in", "zmany/1"} < kept
    assert not kept & {"link", "pipe", "sparse", "a"} and len(kept) < MOST_FILES + 5


async def test_network_host_means_the_hosts_network(tmp_path: Path) -> None:
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        trial = make_trial(tmp_path, shell(f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo connected"))
        await run(trial, network="host")
    assert said(trial) == "connected\n"


async def test_a_task_without_its_test_says_so(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    (task.path / "tests" / "test.sh").unlink()
    outcome = await run(make_trial(tmp_path, shell("true"), task))
    assert outcome.failure.startswith("task unusable: ") and "test.sh" in outcome.failure and not outcome.retryable


def listener() -> tuple[socket.socket, int]:
    end = socket.create_server(("127.0.0.1", 0))
    return end, end.getsockname()[1]


async def test_the_relay_waits_for_whoever_does_not_read(tmp_path: Path) -> None:
    taken = asyncio.Event()

    async def greedy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await taken.wait()
        while await reader.read(1 << 20):
            pass
        writer.write(b"done")
        writer.close()

    async with await asyncio.start_unix_server(greedy, tmp_path / "sock"):
        end, port = listener()
        async with relayed(end, tmp_path / "sock"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            sent = 0
            with pytest.raises(TimeoutError):
                while sent < 256 << 20:
                    writer.write(bytes(1 << 20))
                    sent += 1 << 20
                    async with asyncio.timeout(0.5):
                        await writer.drain()
            assert sent < 64 << 20
            taken.set()
            await writer.drain()
            writer.write_eof()
            assert await reader.read() == b"done"
            writer.close()


async def test_the_relay_passes_on_that_nobody_answers(tmp_path: Path) -> None:
    end, port = listener()
    async with relayed(end, tmp_path / "nobody"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_the_relay_bounds_connections_and_drops_them_when_it_ends(tmp_path: Path) -> None:
    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(hold, tmp_path / "sock"):
        end, port = listener()
        async with relayed(end, tmp_path / "sock"):
            ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST_CONNECTIONS)]
            await asyncio.sleep(0.1)
            surplus, closing = await asyncio.open_connection("127.0.0.1", port)
            with pytest.raises((ConnectionError, EOFError)):
                await surplus.readexactly(1)
            closing.close()
        for reader, writer in ends:
            with pytest.raises((ConnectionError, EOFError)):
                await reader.readexactly(1)
            writer.close()


def test_without_bubblewrap_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"bwrap is not installed.*apt-get install.*sandbox: none"):
        check(RunnerSection())


def test_where_namespaces_are_forbidden_it_says_what_to_enable() -> None:
    unshare = shutil.which("unshare")
    forbidden = [unshare or "unshare", "--user", "--map-root-user", "/bin/sh", "-c"]
    if unshare is None or subprocess.run([*forbidden, "true"], capture_output=True).returncode:
        pytest.skip("this machine's unshare cannot make a namespace to forbid more in")
    program = (
        "from longrein.agents.process import check; from longrein.config import RunnerSection\n"
        "from longrein.errors import SandboxUnavailable\n"
        "try: check(RunnerSection())\nexcept SandboxUnavailable as error: print(error)"
    )
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    said = subprocess.run([*forbidden, script, sys.executable, program], capture_output=True, text=True, timeout=60)
    assert "runner.sandbox: bubblewrap cannot be used on this machine: " in said.stdout, said.stderr
    assert "unshare" in said.stdout and "max_user_namespaces" in said.stdout and "sandbox: none" in said.stdout
    assert said.stdout.count("\n") == 1


async def test_a_verifiers_python_reads_no_settings_of_the_harness(tmp_path: Path) -> None:
    judge = "#!/bin/bash\n/usr/bin/python3 -c pass\necho 0 > /logs/verifier/reward.txt"
    forge = """
    site=$(/usr/bin/python3 -c 'import site; print(site.USER_SITE)'); mkdir -p $site
    echo 'open("/logs/verifier/reward.txt", "w").write("1"); import os; os.kill(os.getppid(), 9)' > usercustomize.py
    mv usercustomize.py $site
    """
    if not Path("/usr/bin/python3").exists():
        pytest.skip("the host has no Python of its own")
    trial = make_trial(tmp_path, shell(forge), make_task(tmp_path / "task", test=judge))
    outcome = await run(trial)
    assert outcome.receipt is not None and outcome.receipt.raw == 0.0


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has one user for all sandboxes")
def test_no_two_sandboxes_have_the_same_user() -> None:
    first, held = warden._free_user(0)
    second, also_held = warden._free_user(0)
    assert first != second
    held.close()
    again, held = warden._free_user(0)
    assert again == first
    held.close()
    also_held.close()


@pytest.mark.parametrize("times", [2, 3])
async def test_a_warden_that_is_killed_as_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    start, killed = sandbox._start_warden, 0

    def killed_at_once(end: socket.socket) -> "subprocess.Popen[bytes]":
        nonlocal killed
        process = start(end)
        if killed < times:
            killed += 1
            process.kill()
        return process

    monkeypatch.setattr(sandbox, "_start_warden", killed_at_once)
    if times == 3:
        with pytest.raises(
            SandboxUnavailable, match=r"killed as it started, 3 times in a row, the last time by SIGKILL"
        ):
            await sandbox.Warden.start()
    else:
        warden = await sandbox.Warden.start()
        assert warden.alive
        await warden.close()
