"""Harnesses that behave badly: each is judged by what it left in the file system, and leaves nothing else."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longrein.agents.process import check
from longrein.agents.runner import Launch
from longrein.config import RunnerSection
from longrein.records import FailureClass
from tests.agents.trials import (
    PORT,
    descendants,
    gone,
    make_task,
    make_trial,
    mounts,
    python,
    run,
    running,
    said,
    shell,
)

GOOD = "echo right > answer.txt"


async def test_a_trial_from_start_to_reward(tmp_path: Path) -> None:
    order = []

    async def verifying() -> None:
        order.append("verifying")

    task = make_task(tmp_path / "task", files={"word.txt": "right"}, dockerfile="WORKDIR /app\nCOPY word.txt .\n")
    launch = Launch(
        (
            "/bin/bash",
            "-c",
            "cat word.txt > answer.txt; cat /root/settings.txt; echo $KEY >&2; echo x > /logs/agent/log",
        ),
        {"KEY": "of this rollout"},
        {"/root/settings.txt": b"the harness's own"},
    )
    trial = make_trial(tmp_path, launch, task, verifying=verifying)
    outcome = await run(trial)
    assert outcome.ending == "exited 0" and outcome.failure == "" and outcome.failure_class is None
    assert outcome.receipt is not None and outcome.receipt.reward == 1.0 and outcome.receipt.file == "reward.txt"
    assert order == ["verifying"]
    assert said(trial) == "the harness's own" and said(trial, "stderr") == "of this rollout\n"
    assert (trial.evidence / "agent" / "log").read_text() == "x\n"
    assert set(outcome.seconds) == {"start", "harness", "stop", "verifier"}


@pytest.mark.parametrize(
    ("script", "ending"),
    [
        ("echo right > answer.txt; exit 3", "exited 3"),
        ("echo right > answer.txt; kill -SEGV $$", "killed by SIGSEGV"),
        ("echo right > answer.txt; kill -KILL $$", "killed by SIGKILL"),
        ("echo right > answer.txt; sleep 1000", "timed out"),
        # Ending the sandbox's own processes ends nothing but the harness.
        ("echo right > answer.txt; kill -9 -1; kill -9 1 2; sleep 1000", "timed out|killed by SIGKILL"),
    ],
)
async def test_however_the_harness_ends_its_work_is_judged(tmp_path: Path, script: str, ending: str) -> None:
    outcome = await run(make_trial(tmp_path, shell(script), timeout_s=1.0))
    assert outcome.ending in ending.split("|")
    assert outcome.receipt is not None and outcome.receipt.reward == 1.0


async def test_a_harness_that_cannot_start_is_not_judged(tmp_path: Path) -> None:
    outcome = await run(make_trial(tmp_path, Launch(("/no/such/program",))))
    assert outcome.receipt is None and outcome.failure_class is FailureClass.INFRASTRUCTURE and not outcome.retryable
    assert "/no/such/program" in outcome.failure and "No such file" in outcome.failure


CROWD = """
import asyncio, resource, sys
from pathlib import Path
from tests.agents.trials import make_task, make_trial, running, shell

MANY = "for i in $(seq 70); do echo x > /logs/agent/$i; echo x > /logs/artifacts/$i; done; echo right > answer.txt"

async def main():
    directory = Path(sys.argv[1])
    task = make_task(directory / "task")
    async with running() as runner:
        if sys.argv[2] == "low":
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4096))
        trials = [make_trial(directory, shell(MANY), task, name=f"r{i}") for i in range(8)]
        for outcome in await asyncio.gather(*map(runner.run, trials)):
            good = outcome.receipt is not None and outcome.receipt.reward == 1.0
            print("good" if good else "retried" if outcome.retryable else outcome.failure)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4096))
asyncio.run(main())
"""


@pytest.mark.parametrize(("limit", "endings"), [("raised", {"good"}), ("low", {"good", "retried"})])
def test_many_files_of_many_rollouts_at_once(tmp_path: Path, limit: str, endings: set[str]) -> None:
    command = [sys.executable, "-c", CROWD, str(tmp_path), limit]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.split()) == 8 and set(ended.stdout.split()) <= endings, ended.stdout


async def test_a_machine_that_refuses_is_an_outcome(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, shell(GOOD))
    (tmp_path / "evidence").write_text("no directory")
    outcome = await run(trial)
    assert outcome.receipt is None and outcome.retryable and outcome.failure_class is FailureClass.INFRASTRUCTURE
    assert outcome.failure.startswith("machine refused: ") and str(trial.evidence.parent) in outcome.failure


async def test_printing_without_end_costs_neither_disk_nor_memory(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, shell("echo first; yes & yes >&2"), timeout_s=1.0)
    outcome = await run(trial, output_kb=64)
    assert outcome.ending == "timed out"
    printed = said(trial)
    assert printed.startswith("first\ny\n") and "bytes omitted" in printed
    assert len(printed) < 66 * 1024 and len(said(trial, "stderr")) < 66 * 1024


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        while True:
            for path in ("/logs/verifier/reward.txt", "/app/answer.txt"):
                try:
                    with open(path, "w") as file:
                        file.write("1")
                except OSError:
                    pass
    os._exit(0)
os.wait()
time.sleep(0.3)
"""


async def test_daemons_are_dead_before_the_tests_arrive(tmp_path: Path) -> None:
    seen = []
    async with running() as runner:

        async def verifying() -> None:
            commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())]
            seen.append([command for command in commands if b"closerange" in command])

        judge = "sleep 0.5; r=/logs/verifier/reward.txt; value=0.5; test -e $r && value=1; echo $value > $r"
        task = make_task(tmp_path / "task", test=judge)
        outcome = await runner.run(make_trial(tmp_path, python(DAEMON), task, verifying=verifying))
        assert outcome.ending == "exited 0" and seen == [[]]
        assert outcome.receipt is not None and outcome.receipt.raw == 0.5


async def test_a_fork_bomb_hurts_only_itself(tmp_path: Path) -> None:
    async with running(processes=32) as runner:
        bomb = runner.run(make_trial(tmp_path, shell("bomb() { bomb | bomb & }; bomb; sleep 1000"), timeout_s=1.5))
        running_bomb = asyncio.create_task(bomb)
        await asyncio.sleep(1.0)
        assert len(descendants(os.getpid())) < 64
        outcome = await running_bomb
        assert outcome.receipt is not None and outcome.receipt.reward == 0.0


async def test_a_full_disk_hurts_only_itself_and_is_still_judged(tmp_path: Path) -> None:
    script = """
    for i in 1 2 3 4; do cat /dev/zero > big$i || true; cat /dev/zero > /tmp/big$i; cat /dev/zero > /dev/shm/big$i; done
    i=0; while : > /logs/agent/$i; do i=$((i+1)); done 2>/dev/null
    df --output=size -m / | tail -1; rm big1; echo right > answer.txt; cat /dev/zero > big5
    """
    judge = (
        "#!/bin/bash\ncat > $TMPDIR/room <<< 'a here-document'\n"
        + 'test "$(cat answer.txt)" = right && echo 1 > /logs/verifier/reward.txt'
    )
    trial = make_trial(tmp_path, shell(script), make_task(tmp_path / "task", test=judge), timeout_s=60.0)
    outcome = await run(trial, disk_mb=16)
    assert said(trial).split() == ["16"]
    assert "No space left on device" in said(trial, "stderr")
    assert outcome.receipt is not None and outcome.receipt.reward == 1.0, outcome.failure


async def test_memory_of_a_process_is_limited(tmp_path: Path) -> None:
    script = "import sys\ntry:\n  x = bytearray(400 << 20)\nexcept MemoryError:\n  print('refused')"
    trial = make_trial(tmp_path, python(script))
    await run(trial, memory_mb=200)
    assert said(trial) == "refused\n"


FAKE_BASH = r"""mkdir mine; printf '#!/usr/bin/env -S sh -c "echo 1 > /logs/verifier/reward.txt"' > mine/bash
cp /usr/bin/sh mine/sh; chmod 755 mine/*"""


@pytest.mark.parametrize(
    "script",
    [
        "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "echo 1 > one; rm -rf /logs/verifier; ln -s /app /logs/verifier; ln -s one reward.txt",
        "echo 1 > one; ln -s /app/one /logs/verifier/reward.json; chmod 444 /logs/verifier",
        "mkfifo /logs/verifier/reward.json; mkdir /logs/verifier/reward.txt",
        "mv /logs /elsewhere; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "(while true; do echo 1 > /logs/verifier/reward.txt; done) & disown",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 755 /tests/test.sh",
        "mkdir mine; printf 'echo 1 > /logs/verifier/reward.txt' > mine/test.sh; ln -s /app/mine /tests",
        "ln -s /usr /tests; ln -s /etc /run/verifier",
        # Programs of the harness's own in the place of the system's.
        f"{FAKE_BASH}; rm /bin; ln -s /app/mine /bin",
        f"{FAKE_BASH}; rm /bin; mv mine /bin",
        f"{FAKE_BASH}; mv /usr /usr2; cp mine/bash /usr/bin/bash; mkdir -p /usr/bin; cp mine/bash /usr/bin/bash",
        "mkdir -p /logs/verifier/$(printf 'd/%.0s' $(seq 1500))",
    ],
)
async def test_the_reward_cannot_be_forged(tmp_path: Path, script: str) -> None:
    trial = make_trial(tmp_path, shell(script))
    outcome = await run(trial)
    assert outcome.receipt is not None, outcome.failure
    assert outcome.receipt.reward == 0.0 and outcome.receipt.content == "0\n"


@pytest.mark.parametrize(
    "script",
    [
        "cd /; rm -rf /app",
        "cd /; rm -rf /app; ln -s app /app",
        "cd /; rm -rf /app; echo > /app",
        "chmod 000 /app",
        "chmod 000 /logs",
        "chmod 000 /app /logs /tmp /run /root /",
        "rm -rf /tmp; ln -s tmp /tmp",
        # Names of system directories that this host does not have.
        "for name in lib32 lib64 libx32; do test -e /$name || mkdir /$name; done",
    ],
)
async def test_what_the_harness_took_away_does_not_spare_it_the_verdict(tmp_path: Path, script: str) -> None:
    judge = "#!/bin/bash\nset -e\necho note > /tmp/note\necho 0.25 > /logs/verifier/reward.txt"
    outcome = await run(make_trial(tmp_path, shell(script), make_task(tmp_path / "task", test=judge)))
    assert outcome.receipt is not None, outcome.failure
    assert outcome.receipt.reward == 0.25


DEFAULT_MODES = r"""
import os, struct
nobody_may = b"".join(struct.pack("<HHI", tag, 0, 0xFFFFFFFF) for tag in (1, 4, 32))
for path in ("/", "/logs", "/tmp"):
    os.setxattr(path, "system.posix_acl_default", struct.pack("<I", 2) + nobody_may)
print("set")
"""


async def test_modes_the_harness_made_default_do_not_bind_the_verifier(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, python(DEFAULT_MODES))
    outcome = await run(trial)
    if said(trial) != "set\n":
        pytest.skip("this kernel's memory file systems have no such lists")
    assert outcome.receipt is not None and outcome.receipt.reward == 0.0, outcome.failure


@pytest.mark.parametrize(
    "script", ["rm -r /logs/agent; mkfifo /logs/agent", "rm -r /logs/agent; ln -s /etc /logs/agent"]
)
async def test_nothing_in_the_place_of_a_directory_of_logs_makes_us_wait(tmp_path: Path, script: str) -> None:
    trial = make_trial(tmp_path, shell(f"echo right > answer.txt; {script}"))
    async with asyncio.timeout(20):
        outcome = await run(trial)
    assert outcome.receipt is not None and outcome.receipt.reward == 1.0
    assert not (trial.evidence / "agent").exists()


@pytest.mark.parametrize(
    "judge",
    [
        "for i in $(seq 200); do echo x > /logs/verifier/log-$i; done; echo 1 > /logs/verifier/reward.txt",
        "head -c 16777216 /dev/zero > /logs/verifier/log; echo 1 > /logs/verifier/reward.txt",
    ],
)
async def test_a_reward_is_found_beside_however_much_else(tmp_path: Path, judge: str) -> None:
    outcome = await run(make_trial(tmp_path, shell("true"), make_task(tmp_path / "task", test=f"#!/bin/bash\n{judge}")))
    assert outcome.receipt is not None and outcome.receipt.reward == 1.0, outcome.failure


async def test_tests_are_absent_while_the_harness_runs(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    (task.path / "solution").mkdir()
    trial = make_trial(tmp_path, shell(f"ls /tests {task.path} {tmp_path}; ls -A / /app"), task)
    await run(trial)
    assert "test.sh" not in said(trial) and "tests" not in said(trial).split()
    assert said(trial, "stderr").count("No such file") == 3


async def test_nothing_of_the_host_is_within_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_SECRET", "hunter2")
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    script = f"""
    cat {secret} /proc/*/environ; cat /proc/1/root{secret} /proc/self/root/../..{secret}
    grep -rs hunter2 /root /home /tmp /run /var /mnt /srv /opt /app /dev/shm
    cat /etc/shadow; ls -A /root /home /run /sys
    kill -9 {os.getpid()}; ls -d /proc/{os.getpid()}
    unshare --user true; mount -t tmpfs none /mnt; mknod /tmp/disk b 254 0
    touch /usr/planted /etc/planted /dev/planted
    grep -E 'Cap(Eff|Bnd)|NoNewPrivs' /proc/self/status
    """
    trial = make_trial(tmp_path, shell(script))
    await run(trial)
    printed = said(trial)
    assert "hunter2" not in printed and not any(line.startswith("root:") for line in printed.splitlines())
    assert f"/proc/{os.getpid()}" not in printed
    status = dict(line.split(":\t") for line in printed.splitlines() if ":\t" in line)
    assert status == {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1"}
    assert not Path("/usr/planted").exists() and said(trial, "stderr").count("Read-only file system") == 3
    assert "unshare failed" in said(trial, "stderr") and "mount: /mnt: permission denied" in said(trial, "stderr")


KERNEL = r"""
import ctypes, errno, os, platform, socket
numbers = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219), "riscv64": (217, 218, 219)}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
for call in (*numbers, 425):
    print(libc.syscall(call, 0, 0, 0, 0, 0), ctypes.get_errno() == errno.ENOSYS)
for family in (38, 40):
    try:
        socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        print(error.errno == errno.EAFNOSUPPORT)
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
    socket.socket(family, socket.SOCK_DGRAM).close()
# What else is in the sandbox has no more rights to be borrowed.
for process in filter(str.isdigit, os.listdir("/proc")):
    print([line.split()[1] for line in open(f"/proc/{process}/status") if line.startswith("Seccomp:")])
"""


async def test_keys_and_sockets_that_no_namespace_holds_are_refused(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, python(KERNEL))
    assert (await run(trial)).ending == "exited 0", said(trial, "stderr")
    printed = said(trial).splitlines()
    assert printed[:6] == ["-1 True"] * 4 + ["True"] * 2
    assert len(printed) > 7 and set(printed[6:]) == {"['2']"}


async def test_the_harness_is_shown_even_below_a_hidden_home(tmp_path: Path) -> None:
    program = tmp_path / "hidden" / "program"
    program.parent.mkdir()
    program.write_text("#!/bin/bash\necho here; touch $(dirname $0)/changed")
    program.chmod(0o755)
    (tmp_path / "hidden").chmod(0o755)
    tmp_path.chmod(0o700)
    trial = make_trial(tmp_path, Launch((str(program),), readable=(program.parent,)))
    await run(trial)
    assert said(trial) == "here\n" and "Read-only file system" in said(trial, "stderr")


CLIENT = """
import socket, sys
def ask(port, host="127.0.0.1"):
    with socket.create_connection((host, port), 5) as end:
        sent = bytes(range(256)) * 4096
        end.sendall(sent); end.shutdown(socket.SHUT_WR)
        got = b"".join(iter(lambda: end.recv(65536), b""))
        return len(got), got == sent[::-1]
print(ask(8080))
print(ask(8080))
for host, port in (("127.0.0.1", int(sys.argv[1])), ("10.1.2.3", 80), ("8.8.8.8", 53)):
    try: print(ask(port, host))
    except OSError as error: print(type(error).__name__)
"""


async def test_only_the_gateway_is_reached(tmp_path: Path) -> None:
    async def reverse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()
        writer.write(data[::-1])
        await writer.drain()
        writer.close()

    gateway = await asyncio.start_unix_server(reverse, tmp_path / "gateway.sock")
    other = await asyncio.start_server(reverse, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    launch = python(CLIENT)
    trial = make_trial(tmp_path, Launch((*launch.argv, str(port)), readable=launch.readable))
    await run(trial)
    assert said(trial).splitlines() == [
        "(1048576, True)",
        "(1048576, True)",
        "ConnectionRefusedError",
        "OSError",
        "OSError",
    ]
    gateway.close()
    other.close()


async def test_the_verifier_has_no_network(tmp_path: Path) -> None:
    judge = f"(exec 3<>/dev/tcp/127.0.0.1/{PORT}) && echo 1 > $reward || echo 0 > $reward"
    gateway = await asyncio.start_unix_server(lambda reader, writer: writer.close(), tmp_path / "gateway.sock")
    harness = shell(f"(exec 3<>/dev/tcp/127.0.0.1/{PORT}) && echo connected")
    trial = make_trial(
        tmp_path, harness, make_task(tmp_path / "task", test=f"#!/bin/bash\nreward=/logs/verifier/reward.txt\n{judge}")
    )
    outcome = await run(trial)
    assert said(trial) == "connected\n"
    assert outcome.receipt is not None and outcome.receipt.reward == 0.0
    gateway.close()


@pytest.mark.parametrize(
    ("judge", "failure"),
    [
        ("#!/bin/sh\nsleep 1000", "verifier timed out: after 1 s"),
        ("#!/bin/sh\necho why >&2; exit 2", "no reward: .*missing.*exited 2: why"),
        ("#!/bin/sh\necho true > /logs/verifier/reward.txt", "no reward: "),
        ("#!/bin/sh\nln -s /etc/hostname /logs/verifier/reward.txt", "no reward: .*missing"),
        ("#!/no/such/shell\n", "verifier cannot be started: "),
    ],
)
async def test_a_verifier_without_a_good_reward_is_no_zero(tmp_path: Path, judge: str, failure: str) -> None:
    task = make_task(tmp_path / "task", test=judge, verifier_timeout_s=1.0)
    outcome = await run(make_trial(tmp_path, shell(GOOD), task))
    assert outcome.ending == "exited 0" and outcome.receipt is None
    assert outcome.failure_class is FailureClass.INFRASTRUCTURE and not outcome.retryable
    assert re.match(failure, outcome.failure), outcome.failure


async def test_an_old_reward_of_the_same_rollout_is_not_read(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, shell(GOOD), make_task(tmp_path / "task", test="#!/bin/sh\nexit 0"))
    (trial.evidence / "verifier").mkdir(parents=True)
    (trial.evidence / "verifier" / "reward.txt").write_text("1")
    outcome = await run(trial)
    assert outcome.receipt is None and "missing" in outcome.failure


async def test_the_environment_is_built(tmp_path: Path) -> None:
    dockerfile = """# a comment
FROM debian:12
ENV GREETING=hello NAME="the world"
WORKDIR /app/work
COPY word.txt tool.sh ./
RUN echo "$GREETING $NAME" > built.txt
COPY --chmod=755 tool.sh /usr/local/bin/tool
RUN test -x /usr/local/bin/tool && \\
    tool >> built.txt
RUN ["/bin/sh", "-c", "mkdir -p /data && echo made > /data/file"]
"""
    files = {"word.txt": "right", "tool.sh": "#!/bin/sh\necho from the tool; touch /usr/local/bin/other\n"}
    task = make_task(tmp_path / "task", files=files, dockerfile=dockerfile)
    trial = make_trial(tmp_path, shell("cd work; cat built.txt word.txt /data/file; echo $NAME; tool"), task)
    outcome = await run(trial)
    assert outcome.failure == "", outcome.failure
    assert said(trial) == "hello the world\nfrom the tool\nrightmade\nthe world\nfrom the tool\n"
    assert "Read-only file system" in said(trial, "stderr")
    assert "FROM debian:12" in (trial.evidence / "notes.txt").read_text()
    assert not Path("/usr/local/bin/tool").exists()


@pytest.mark.parametrize(
    ("dockerfile", "words", "retryable"),
    [
        ("FROM x\nWORKDIR /app\nUSER nobody\n", ("Dockerfile:4", "USER"), False),
        ("FROM x\nCOPY missing.txt .\n", ("Dockerfile:3", "missing.txt"), False),
        ("COPY ../tests/test.sh .\n", ("Dockerfile:2", "test.sh"), False),
        ("COPY big.bin .\n", ("/app/big.bin", "No space left"), True),
        ("RUN echo because >&2; exit 4\n", ("Dockerfile:2", "exited 4", "because"), True),
    ],
)
async def test_an_environment_that_cannot_be_built(
    tmp_path: Path, dockerfile: str, words: tuple[str, ...], retryable: bool
) -> None:
    task = make_task(tmp_path / "task", files={"big.bin": "x" * (9 << 20)}, dockerfile=f"WORKDIR /app\n{dockerfile}")
    outcome = await run(make_trial(tmp_path, shell(GOOD), task), disk_mb=8)
    assert outcome.failure_class is FailureClass.INFRASTRUCTURE and outcome.retryable is retryable
    assert all(word in outcome.failure for word in words), outcome.failure


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.1, 0.5])
async def test_cancelling_leaves_nothing(tmp_path: Path, delay_s: float) -> None:
    async with running() as runner:
        alone = descendants(os.getpid())
        trial = asyncio.create_task(runner.run(make_trial(tmp_path, shell("sleep 1000 & sleep 1000"))))
        await asyncio.sleep(delay_s)
        trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial
        await gone(descendants(os.getpid()) - alone)


async def test_many_at_once(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    async with running() as runner:
        alone = descendants(os.getpid())
        trials = [
            make_trial(tmp_path, shell(GOOD if i % 2 else "echo wrong > answer.txt"), task, name=f"r{i}")
            for i in range(8)
        ]
        outcomes = await asyncio.gather(*map(runner.run, trials))
        assert [o.receipt and o.receipt.reward for o in outcomes] == [0.0, 1.0] * 4
        await gone(descendants(os.getpid()) - alone)


async def test_a_killed_keeper_is_an_infrastructure_failure(tmp_path: Path) -> None:
    async with running() as runner:
        alone = descendants(os.getpid())
        trial = asyncio.create_task(runner.run(make_trial(tmp_path, shell("sleep 1000"))))
        while not any(b"sleep\x001000" in _command(pid) for pid in descendants(os.getpid())):
            await asyncio.sleep(0.02)
        family = descendants(os.getpid()) - alone
        for pid in family:
            if b"longrein.agents.warden" in _command(pid):
                os.kill(pid, signal.SIGKILL)
        outcome = await trial
        assert outcome.failure_class is FailureClass.INFRASTRUCTURE and outcome.retryable and outcome.receipt is None
        await gone(family)
        again = await runner.run(make_trial(tmp_path, shell(GOOD)))
        assert again.receipt is not None and again.receipt.reward == 1.0


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


HELPER = """
import asyncio, sys
from pathlib import Path
from tests.agents.trials import make_task, make_trial, python, running, said, shell

async def main():
    directory = Path(sys.argv[1])
    task = make_task(directory / "task")
    async with running() as runner:
        trials = [make_trial(directory, shell(sys.argv[2]), task, name=f"r{i}") for i in range(2)]
        print(*[o.receipt and o.receipt.reward for o in await asyncio.gather(*map(runner.run, trials))])
asyncio.run(main())
"""


async def test_nothing_survives_a_killed_trainer(tmp_path: Path) -> None:
    before = mounts()
    script = "(setsid sleep 1000 &) ; touch /logs/agent/up; sleep 1000"
    with subprocess.Popen([sys.executable, "-c", HELPER, str(tmp_path), script]) as helper:
        while sum(b"sleep\x001000" in _command(pid) for pid in descendants(helper.pid)) < 4:
            assert helper.poll() is None
            await asyncio.sleep(0.05)
        family = descendants(helper.pid)
        helper.kill()
    await gone(family)
    assert mounts() == before


STUCK = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from longrein.agents.process import ProcessRunner
from longrein.agents.runner import Preload
from longrein.config import RunnerSection
from tests.agents.trials import make_trial, python

async def main():
    directory = Path(sys.argv[1])
    preload = Preload(Path(sys.executable), ("stuck",), "stuck:main", {"PYTHONPATH": str(directory / "modules")})
    launch = python("pass", preload=preload)
    launch = replace(launch, readable=(*launch.readable, directory / "modules"))
    runner = ProcessRunner(RunnerSection())
    await runner.open()
    await runner.run(make_trial(directory, launch))
asyncio.run(main())
"""


async def test_what_is_stuck_does_not_survive_a_killed_trainer_either(tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "stuck.py").write_text("import time; time.sleep(1000)\n")
    with subprocess.Popen([sys.executable, "-c", STUCK, str(tmp_path)]) as helper:
        while not any(b"preload_server" in _command(pid) for pid in descendants(helper.pid)):
            assert helper.poll() is None
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        family = descendants(helper.pid)
        helper.kill()
    await gone(family)


async def test_an_ordinary_user_has_the_same_sandbox(tmp_path: Path) -> None:
    ordinary = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if subprocess.run([*ordinary, "true"], capture_output=True).returncode:
        pytest.skip("this machine's unshare cannot map a user")
    script = "echo right > answer.txt; unshare --user true; touch /usr/planted; test $? = 1 && id -u | grep -qx 0"
    with subprocess.Popen(
        [*ordinary, sys.executable, "-c", HELPER, str(tmp_path), script], stdout=-1, text=True
    ) as user:
        printed, _ = user.communicate(timeout=60)
    assert printed.split() == ["1.0", "1.0"]
    assert (tmp_path / "evidence" / "r0" / "harness.stderr").read_text().count("unshare failed") == 1


def test_check_says_what_works() -> None:
    assert check(RunnerSection()).startswith("bubblewrap: a sandbox started")
    assert check(RunnerSection(sandbox="none")).startswith("none:")


PLAIN_JUDGE = """#!/bin/sh
if [ "$(cat answer.txt)" = right ]; then echo 1; else echo 0; fi > "${LONGREIN_ROOT:-}/logs/verifier/reward.txt"
"""


@pytest.mark.parametrize("sandbox", ["none", "bubblewrap"])
async def test_a_portable_task_runs_with_and_without_a_sandbox(tmp_path: Path, sandbox: str) -> None:
    task = make_task(tmp_path / "task", test=PLAIN_JUDGE, files={"word.txt": "right"}, dockerfile="COPY word.txt /app/")
    launch = Launch(
        ("/bin/sh", "-c", 'cat word.txt > answer.txt; cat "$0"; (setsid sleep 1000 &); exit 3', "/root/set.txt"),
        files={"/root/set.txt": b"settings"},
    )
    trial = make_trial(tmp_path, launch, task)
    before = {path.name for path in Path(os.environ.get("TMPDIR", "/tmp")).glob("longrein-trial-*")}
    outcome = await run(trial, sandbox=sandbox)
    assert outcome.ending == "exited 3" and said(trial) == "settings"
    assert outcome.receipt is not None and outcome.receipt.reward == 1.0
    assert {path.name for path in Path(os.environ.get("TMPDIR", "/tmp")).glob("longrein-trial-*")} <= before


async def test_without_a_sandbox_time_and_output_are_still_limited(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, shell("yes & sleep 1000"), timeout_s=1.0)
    outcome = await run(trial, sandbox="none", output_kb=64)
    assert outcome.ending == "timed out" and len(said(trial)) < 66 * 1024
    assert outcome.receipt is None and "missing" in outcome.failure


async def test_without_a_sandbox_a_harness_that_removed_its_directory_is_judged_too(tmp_path: Path) -> None:
    trial = make_trial(tmp_path, shell("rmdir $PWD"), make_task(tmp_path / "task", test=PLAIN_JUDGE))
    outcome = await run(trial, sandbox="none")
    assert outcome.receipt is not None and outcome.receipt.reward == 0.0, outcome.failure
