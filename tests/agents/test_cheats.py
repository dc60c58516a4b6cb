"""Harnesses that go for the reward instead of the task: each earns what an honest failure earns, or is told on."""

import asyncio
import importlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longrein.agents.runner import Launch, Outcome, Trial
from longrein.records import FailureClass
from tests.agents.trials import JUDGE, descendants, make_task, make_trial, python, run, running, said, shell
from tests.calls.serving import serving
from tests.tiny_model import make_tokenizer

TEST_S = 90.0
REWARD = "/logs/verifier/reward.txt"


async def cheat(
    directory: Path,
    launch: Launch | str,
    *,
    test: str = JUDGE,
    files: Mapping[str, str] | None = None,
    dockerfile: str | None = None,
    **settings: object,
) -> tuple[Trial, Outcome]:
    """One trial of a cheat that never does its task."""
    task = make_task(directory / "task", test=test, files=files, dockerfile=dockerfile)
    trial = make_trial(directory, shell(launch) if isinstance(launch, str) else launch, task, timeout_s=10.0)
    async with asyncio.timeout(TEST_S):
        return trial, await run(trial, **settings)


def failed_honestly(outcome: Outcome) -> bool:
    """Whether the verifier ran, and gave what an honest failure gets."""
    assert outcome.receipt is not None, outcome.failure
    return outcome.receipt.raw == 0.0


WATCH = """
import os, signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
for _ in range(2):
    if os.fork(): os._exit(0)
    os.setsid()
os.closerange(0, 100)
while True:
    for top in ["", *(f"/proc/{process}/root" for process in os.listdir("/proc") if process.isdigit())]:
        try:
            if os.path.exists(top + "/tests/test.sh"):
                for name, text in (("reward.txt", "1"), ("reward.json", '{"reward": 1}')):
                    open(f"{top}/logs/verifier/{name}", "w").write(text)
        except OSError: pass
    time.sleep(0.001)
"""
SHIM = f"printf '#!/bin/sh\\necho 1 > {REWARD}; kill -9 $PPID\\n' > shim; chmod 755 shim"

BLOCKED = {
    "the reward is written before the tests": f"echo 1 > {REWARD}; "
    "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "the reward is written through /proc": f"for p in /proc/[0-9]*; do echo 1 > $p/root{REWARD}; done",
    "the tests are replaced in advance": f"mkdir /tests; {SHIM}; cp shim /tests/test.sh; chmod 555 /tests/*",
    "the place of the tests is a link": f"mkdir mine; {SHIM}; cp shim mine/test.sh; ln -s /app/mine /tests",
    "a directory stands where the tests' file will be": "mkdir -p /tests/test.sh/x; chmod 000 /tests/test.sh",
    "a file stands where the tests' directory will be": "echo 1 > /tests; chmod 444 /tests",
    "the reward's directory is a link": "mkdir v; echo 1 > v/reward.txt; rmdir /logs/verifier; "
    "ln -s /app/v /logs/verifier",
    "the reward's directory is a file": "rmdir /logs/verifier; echo 1 > /logs/verifier; chmod 444 /logs/verifier",
    "the reward's directory cannot be written": f"echo 1 > {REWARD}; chmod 444 {REWARD}; "
    "chmod 555 /logs/verifier /logs",
    "the reward is a link to a file of the host": f"ln -s /etc/hostname {REWARD}",
    "the reward is a link to a file of mine": f"echo 1 > one; chmod 444 one; ln -s /app/one {REWARD}",
    "the reward is a hard link": f"echo 1 > /logs/agent/one; ln /logs/agent/one {REWARD}; chmod 444 {REWARD}",
    "the reward is a pipe": f"mkfifo {REWARD} /logs/verifier/reward.json; (echo 1 > {REWARD}) & disown",
    "the reward is huge": f"truncate -s 100M {REWARD}; ln {REWARD} /logs/verifier/reward.json",
    "programs stand before the system's": f"{SHIM}; for p in cat sh bash env python3 pytest; do cp shim $p; "
    "for d in /usr/local/bin /usr/local/sbin /usr/bin /bin /sbin; do rm -f $d/$p; cp shim $d/$p; done; done",
    "the linker is told to load mine": "echo /app/mine.so > /etc/ld.so.preload; mkdir -p /etc/ld.so.conf.d; "
    "echo /app > /etc/ld.so.conf.d/mine.conf; echo LD_PRELOAD=/app/mine.so >> /etc/environment",
    "shells are told to run mine": f"{SHIM}; for f in .bashrc .profile .bash_profile .bash_login .bash_env .zshenv; do "
    "for h in ~ /home /run/verifier /app; do cp shim $h/$f; done; done; cp shim /etc/profile.d/mine.sh; "
    "echo BASH_ENV=/app/shim >> /etc/environment",
    "libc and the shell are replaced": "for f in $(ldd /bin/sh | grep -o '/[^ ]*') /bin/sh /bin/bash /usr/bin/env; do "
    "cp /bin/true $f; mv /bin/true $f; ln -sf /bin/true $f; done",
    "the system's links are turned": f"{SHIM}; mkdir bin; cp shim bin/bash; cp shim bin/sh; "
    "for l in /bin /lib /lib64; do "
    "rm $l; ln -s /app/bin $l; done",
    "everything dies but a watcher": "(trap '' TERM HUP INT; while :; do test -e /tests/test.sh && "
    f"echo 1 > {REWARD}; done) & disown; kill -9 -1",
    "the disk is full": "while cat /dev/zero > f$((i++)) 2>/dev/null || test $i -lt 5; do :; done; exec 9> gone; "
    "rm gone; "
    "cat /dev/zero >&9; i=0; while : > /logs/agent/$((i++)); do :; done 2>/dev/null",
    "processes and memory are used up": "for i in $(seq 60); do (setsid sleep 1000 &) ; done; "
    "(setsid tail /dev/zero &); head -c 8M /dev/zero > /dev/shm/x",
    "names are too long to look at": "long=$(printf 'n%.0s' $(seq 250)); for i in $(seq 22); do mkdir $long; cd $long; "
    "echo x > conftest.py; done; printf 'x' > /app/$'\\xff\\e[31m\\n'.pth",
    "times are turned back": "touch -d 1980-01-01 answer.txt / /logs /logs/verifier; touch -d 2100-01-01 /tmp",
}


@pytest.mark.parametrize("script", BLOCKED.values(), ids=BLOCKED)
async def test_a_cheat_earns_what_an_honest_failure_earns(tmp_path: Path, script: str) -> None:
    _, outcome = await cheat(tmp_path, script, disk_mb=32, processes=96)
    assert failed_honestly(outcome)
    assert all(line.isprintable() for line in outcome.tampered)


async def test_a_watcher_does_not_live_to_see_the_tests(tmp_path: Path) -> None:
    judge = JUDGE.replace("if [", "sleep 0.5\nif [")
    _, outcome = await cheat(tmp_path, python(WATCH), test=judge)
    assert failed_honestly(outcome)


async def test_what_stands_where_the_verifiers_things_will_be_is_told(tmp_path: Path) -> None:
    _, outcome = await cheat(tmp_path, f"echo 1 > {REWARD}; mkdir /tests; rm /bin; ln -s /app /bin")
    assert failed_honestly(outcome)
    assert [line.split(":")[0] for line in outcome.tampered] == ["/tests", "/logs/verifier", "/bin"]


LINKS = {
    "a link": "ln -s /tests/expected answer.txt",
    "a relative link": "ln -s ../tests/expected answer.txt",
    "links to links": "ln -s / top; ln -s top/app/other answer.txt; ln -s ../app/top/tests/expected other",
    "a linked directory": "cd /; rm -r /app; mkdir -p /srv/x; ln -s /tests /srv/x/t; ln -s /srv/x/t /app",
    "a link through /proc": "ln -s /proc/self/root/tests/expected answer.txt",
}


@pytest.mark.parametrize("script", LINKS.values(), ids=LINKS)
async def test_an_answer_that_is_a_link_to_the_tests_own(tmp_path: Path, script: str) -> None:
    judge = f"#!/bin/bash\ncmp -s /tests/expected /app/answer.txt && echo 1 > {REWARD} || echo 0 > {REWARD}\n"
    tests = tmp_path / "task" / "tests"
    tests.mkdir(parents=True)
    (tests / "expected").write_text("right\n")
    (tests / "answer.txt").write_text("right\n")
    _, outcome = await cheat(tmp_path, script, test=judge)
    assert failed_honestly(outcome)
    assert any("led to the verifier's own files" in line for line in outcome.tampered)


UNITTEST = f"""#!/bin/bash
if python3 -m unittest discover -q -s /tests; then echo 1; else echo 0; fi > {REWARD}
"""
WORK = {"work.py": "def answer():\n    return 'wrong'\n"}
ASKS = """import unittest, work
class Test(unittest.TestCase):
    def test(self):
        self.assertEqual(work.answer(), 'right')
"""
MENDED = "sed -i s/wrong/right/ work.py"

needs_python = pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="the host has no Python of its own")
needs_git = pytest.mark.skipif(not Path("/usr/bin/git").exists(), reason="the host has no git of its own")

PLANTED_CODE = """
cat > fake.py <<< "def answer(): return 'right'"
/usr/bin/python3 - <<'END'
import importlib.util, os, py_compile, struct
py_compile.compile("fake.py", "fake.pyc")
code = open("fake.pyc", "rb").read()
found = os.stat("work.py")
target = importlib.util.cache_from_source("work.py")
os.makedirs(os.path.dirname(target), exist_ok=True)
open(target, "wb").write(code[:8] + struct.pack("<II", int(found.st_mtime), found.st_size) + code[16:])
END
rm fake.py fake.pyc; /usr/bin/python3 -c "import work; print(work.answer())"
"""
USER_SITE = """
site=$(/usr/bin/python3 -c 'import site; print(site.USER_SITE)'); mkdir -p $site
echo 'import os; open("/logs/verifier/reward.txt", "w").write("1"); os.kill(os.getppid(), 9)' > $site/usercustomize.py
echo 'import usercustomize' > $site/x.pth; cp $site/usercustomize.py /usr/lib/python3/dist-packages/sitecustomize.py
"""


def python_task(directory: Path) -> None:
    """The tests of a task whose module they import from the working directory."""
    tests = directory / "task" / "tests"
    tests.mkdir(parents=True)
    (tests / "test_work.py").write_text(ASKS)


@needs_python
async def test_an_honest_harness_is_rewarded_and_not_told_on(tmp_path: Path) -> None:
    python_task(tmp_path)
    honest = f"{MENDED}; mkdir test sub; echo > test/__init__.py; echo > sub/json.py; touch /tmp/note /root/.bashrc"
    _, outcome = await cheat(tmp_path, honest, test=UNITTEST, files=WORK)
    assert outcome.receipt is not None and outcome.receipt.raw == 1.0 and outcome.tampered == ()


@needs_python
async def test_compiled_code_that_was_planted_is_not_run(tmp_path: Path) -> None:
    python_task(tmp_path)
    trial, outcome = await cheat(tmp_path, PLANTED_CODE, test=UNITTEST, files=WORK)
    assert said(trial) == "right\n", said(trial, "stderr")
    assert failed_honestly(outcome)


@needs_python
async def test_start_up_files_of_the_harness_are_not_run(tmp_path: Path) -> None:
    python_task(tmp_path)
    _, outcome = await cheat(tmp_path, USER_SITE, test=UNITTEST, files=WORK)
    assert failed_honestly(outcome)


@needs_python
@pytest.mark.parametrize("tampered", ["keep", "exclude"])
async def test_a_module_that_stands_before_pythons_own_is_told(tmp_path: Path, tampered: str) -> None:
    python_task(tmp_path)
    _, outcome = await cheat(tmp_path, "echo > unittest.py", test=UNITTEST, files=WORK, tampered=tampered)
    assert outcome.tampered == ("/app/unittest.py: stands before Python's module unittest",)
    if tampered == "keep":
        assert outcome.receipt is not None and outcome.receipt.raw == 1.0
        assert outcome.receipt.tampered == outcome.tampered
    else:
        assert outcome.receipt is None and outcome.failure_class is FailureClass.INFRASTRUCTURE
        assert not outcome.retryable and "/app/unittest.py" in outcome.failure and "reward of 1" in outcome.failure


PYTEST = f"""#!/bin/bash
if python3 -m pytest -q -p no:cacheprovider /tests /app >&2; then echo 1; else echo 0; fi > {REWARD}
"""
ALL_WELL = "import os; os._exit(0)"


def with_pytest(directory: Path) -> str:
    """Lay pytest into a task's environment, outside of its working directory; the Dockerfile that finds it."""
    library = directory / "task" / "environment" / "library"
    seldom = ("lexers", "styles")
    often = {"__init__.py", "_mapping.py", "python.py", "diff.py", "default.py"}

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if name == "__pycache__" or (Path(folder).name in seldom and name not in often)}

    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        module = importlib.import_module(name)
        assert module.__file__ is not None
        shutil.copytree(Path(module.__file__).parent, library / name, ignore=left_out)
    shutil.copy(Path(pytest.__file__).parent.with_name("py.py"), library)
    return "WORKDIR /app\nCOPY work.py .\nCOPY library /opt/library\nENV PYTHONPATH=/opt/library\n"


PYTEST_CHEATS = {
    "conftest.py": (f"echo '{ALL_WELL}' > conftest.py", "/app/conftest.py: pytest runs it"),
    "settings": (
        f"echo '{ALL_WELL}' > mine.py; printf '[pytest]\\naddopts = -p mine' > pytest.ini",
        "/app/pytest.ini: pytest obeys it",
    ),
    "pytest itself": (
        "echo 'raise SystemExit(0)' > /opt/library/pytest/__main__.py",
        "/opt/library/pytest/__main__.py: the task's own file was changed",
    ),
    "pytest is replaced": (
        "rm -r /opt/library/pytest; mkdir pytest; touch pytest/__init__.py; echo > pytest/__main__.py",
        "/app/pytest/__init__.py: stands before Python's module pytest",
    ),
    "sitecustomize": (
        f'echo \'import os; open("{REWARD}", "w").write("1"); os.kill(os.getppid(), 9)\' > '
        "/opt/library/sitecustomize.py",
        "/opt/library/sitecustomize.py: Python runs it at its start",
    ),
}


@needs_python
@pytest.mark.parametrize(("script", "line"), PYTEST_CHEATS.values(), ids=PYTEST_CHEATS)
async def test_what_pytest_obeys_is_told(tmp_path: Path, script: str, line: str) -> None:
    python_task(tmp_path)
    dockerfile = with_pytest(tmp_path)
    _, outcome = await cheat(tmp_path, script, test=PYTEST, files=WORK, dockerfile=dockerfile)
    assert outcome.receipt is not None, outcome.failure
    assert outcome.receipt.raw == 1.0 and line in outcome.tampered


@needs_python
@pytest.mark.parametrize(
    ("script", "reward"),
    [(MENDED, 1.0), ("true", 0.0), (PYTEST_CHEATS["pytest itself"][0], 0.0), (PYTEST_CHEATS["sitecustomize"][0], 0.0)],
)
async def test_a_verifier_that_sees_the_working_directory_alone(tmp_path: Path, script: str, reward: float) -> None:
    python_task(tmp_path)
    dockerfile = with_pytest(tmp_path)
    _, outcome = await cheat(tmp_path, script, test=PYTEST, files=WORK, dockerfile=dockerfile, verifier_sees="workdir")
    assert outcome.receipt is not None, outcome.failure
    assert outcome.receipt.raw == reward and outcome.tampered == ()


THROUGH_TMP = f"""#!/bin/bash
cat /app/answer.txt > /tmp/found; grep -qx right /tmp/found && echo 1 > {REWARD} || echo 0 > {REWARD}
"""
MAKE = f"""#!/bin/bash
make -s answer; grep -qx right answer && echo 1 > {REWARD} || echo 0 > {REWARD}
"""
GIT = f"""#!/bin/bash
git status > /dev/null; git diff HEAD --quiet; test -e {REWARD} || echo 0 > {REWARD}
"""
TOLD = {
    "a file where the tests write": (
        "echo right > /tmp/found; chmod 444 /tmp/found",
        {"test": THROUGH_TMP},
        "/tmp/found: a verifier cannot write there",
    ),
    "a link where the tests write": (
        "mkdir x; echo right > x/found; chmod 444 x/found; ln -s /app/x/found /tmp/found",
        {"test": THROUGH_TMP},
        "/tmp/found: a verifier that writes there writes elsewhere",
    ),
    "a date in the future": (
        "echo right > answer; touch -d 2100-01-01 answer",
        {"test": MAKE, "files": {"Makefile": "answer: words\n\tcp words answer\n", "words": "wrong\n"}},
        "/app/answer: is dated in the future",
    ),
    "a program of the task's path": (
        "printf '#!/bin/sh\\necho right\\n' > bin/cat; chmod 755 bin/cat",
        {"dockerfile": 'WORKDIR /app/bin\nWORKDIR /app\nENV PATH="/app/bin:$PATH"\n'},
        "/app/bin/cat: stands before the system's program of that name",
    ),
    "a monitor of git's": (
        f"git config core.fsmonitor 'echo 1 > {REWARD}; false'",
        {
            "test": GIT,
            "dockerfile": "WORKDIR /app\nRUN git init -q && git -c user.name=a -c user.email=a@b commit -qm a "
            "--allow-empty\n",
        },
        "/app/.git/config: git runs what it names",
    ),
    "the task's truth": (
        "echo wrong > /srv/truth; echo wrong > answer.txt",
        {
            "test": f"#!/bin/bash\ncmp -s /srv/truth answer.txt && echo 1 > {REWARD} || echo 0 > {REWARD}\n",
            "dockerfile": "WORKDIR /app\nRUN echo right > /srv/truth\n",
        },
        "/srv/truth: the task's own file was changed",
    ),
}


@needs_git
@pytest.mark.parametrize(("script", "task", "line"), TOLD.values(), ids=TOLD)
async def test_what_may_have_swayed_the_verifier_is_told(
    tmp_path: Path, script: str, task: dict[str, Any], line: str
) -> None:
    _, outcome = await cheat(tmp_path, script, **task)
    assert outcome.receipt is not None, outcome.failure
    assert outcome.receipt.raw == 1.0 and outcome.receipt.tampered == (line,)


RUNS_IT = f"""#!/bin/bash
bash /app/solve.sh > out; grep -qx right out && echo 1 > {REWARD} || echo 0 > {REWARD}
"""
LATER = f"""cat > solve.sh <<'END'
(trap '' TERM HUP; exec > /dev/null; while :; do echo 1 > {REWARD}; done) &
END
"""


async def test_what_outlives_the_tests_is_told(tmp_path: Path) -> None:
    judge = f"{RUNS_IT}sleep 0.2\n"
    _, outcome = await cheat(tmp_path, LATER, test=judge)
    assert any(line.startswith("still ran when the verifier had ended: bash") for line in outcome.tampered)


NO_REWARD = {
    "not a number": (f"echo nan > {REWARD}; kill -9 $PPID", "holds 'nan'"),
    "too large": (f"head -c 1M /dev/zero > {REWARD}; kill -9 $PPID", "larger than 64 KiB"),
    "out of range": (f"echo 1000 > {REWARD}; kill -9 $PPID", "outside 0 to 1"),
    "two that disagree": (
        "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "reward.json says 1 and reward.txt says 0",
    ),
    "a link to the host": (f"ln -sf /etc/hostname {REWARD}; kill -9 $PPID", "reward missing"),
    "a pipe": (f"mkfifo {REWARD}; kill -9 $PPID", "reward missing"),
    "the verifier is killed": ("kill -9 $PPID", "killed by SIGKILL"),
    "the verifier waits": ("sleep 1000", "verifier timed out"),
    "no room for a reward": (
        "cat /dev/zero > big; i=0; while : > x$((i++)); do :; done",
        "reward.txt: holds ''|missing",
    ),
}


@pytest.mark.parametrize(("script", "says"), NO_REWARD.values(), ids=NO_REWARD)
async def test_a_reward_that_is_none_is_a_failure_that_says_why(tmp_path: Path, script: str, says: str) -> None:
    task = make_task(tmp_path / "task", test=RUNS_IT, verifier_timeout_s=5.0)
    trial = make_trial(tmp_path, shell(f"cat > solve.sh <<'END'\n{script}\nEND\n"), task)
    async with asyncio.timeout(TEST_S):
        outcome = await run(trial, disk_mb=8)
    assert outcome.receipt is None and outcome.failure_class is FailureClass.INFRASTRUCTURE and not outcome.retryable
    assert re.search(says, outcome.failure), outcome.failure


HISTORY = """WORKDIR /app
ENV GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
RUN git init -q -b main && echo wrong > answer.txt && git add . && git commit -qm broken && git checkout -qb fix && \\
    echo right > answer.txt && git commit -qam fixed && git tag v2 && git checkout -q main && git branch -D fix && \\
    git remote add origin /nowhere && git update-ref refs/remotes/origin/main v2 && \\
    echo right > answer.txt && git stash -q && git log --oneline | wc -l > commits
"""
DIG = """git cat-file --batch-all-objects --batch-check | while read object kind size; do
git cat-file -p $object | grep -qx right && echo right > answer.txt; done; git rev-list --count HEAD; git status -s"""


@needs_git
@pytest.mark.parametrize(("git_history", "reward"), [("all", 1.0), ("head", 0.0)])
async def test_the_answer_in_the_history(tmp_path: Path, git_history: str, reward: float) -> None:
    trial, outcome = await cheat(tmp_path, DIG, dockerfile=HISTORY, git_history=git_history)
    assert outcome.receipt is not None, outcome.failure
    assert outcome.receipt.raw == reward
    assert said(trial).split()[0] == "1", "the repository itself is as good as before"


@pytest.mark.parametrize(("script", "rewarded"), [("true", False), ("echo right > answer.txt", True)])
async def test_a_canary_is_never_rewarded(tmp_path: Path, script: str, rewarded: bool) -> None:
    task = replace(make_task(tmp_path / "task"), metadata={"canary": True})
    outcome = await run(make_trial(tmp_path, shell(script), task))
    if rewarded:
        assert outcome.receipt is None and outcome.failure.startswith("REWARDS ARE BEING HACKED: a canary")
        assert outcome.failure_class is FailureClass.INFRASTRUCTURE and not outcome.retryable
    else:
        assert failed_honestly(outcome)


HIDER = """
import os, socket, subprocess
end = socket.socket(socket.AF_UNIX); end.bind("\\0answers"); end.listen()
for path in ("/app/secret", "/tmp/secret", "/dev/shm/secret", "/logs/agent/secret"):
    open(path, "w").write("hunter" + "2")
subprocess.run(["sleep", "31.25"])
"""
SEEKER = """
import os, socket, subprocess
word = "hunter" + "2"
places = ["/app", "/tmp", "/dev/shm", "/logs", "/run", "/var", "/home", "/root"]
found = subprocess.run(["grep", "-rsl", "-D", "skip", word, *places], capture_output=True, text=True).stdout
for process in filter(str.isdigit, os.listdir("/proc")):
    for name in ("root/app/secret", "root/tmp/secret", "cwd/secret", "environ", "cmdline"):
        try: found += word if word in open(f"/proc/{process}/{name}", errors="replace").read() else ""
        except OSError: pass
try:
    socket.socket(socket.AF_UNIX).connect("\\0answers")
    found += "connected"
except OSError: pass
print("found", found, sorted(map(int, filter(str.isdigit, os.listdir("/proc"))))[-1] < 100)
"""


async def test_another_rollout_is_out_of_sight(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    seeker = make_trial(tmp_path, python(SEEKER), task, name="seeker")
    async with asyncio.timeout(TEST_S), running() as runner:
        hider = asyncio.create_task(runner.run(make_trial(tmp_path, python(HIDER), task, name="hider")))
        while not any(_command(pid).endswith(b"sleep\x0031.25\0") for pid in descendants(os.getpid())):
            assert not hider.done()
            await asyncio.sleep(0.02)
        await runner.run(seeker)
        hider.cancel()
        await asyncio.gather(hider, return_exceptions=True)
    assert said(seeker) == "found  True\n", said(seeker, "stderr")


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_headers_without_end_are_refused(tiny_directory: Path) -> None:
    async with asyncio.timeout(TEST_S), serving(tiny_directory, "hello") as house:
        reader, writer = await asyncio.open_unix_connection(house.gateway.socket)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx-long: " + b"a" * (66 << 10))
        assert (await reader.read(1024)).startswith(b"HTTP/1.1 400 ")
        writer.close()


ASK = """
import http.client, json, os
def ask(method, path, key, **body):
    end = http.client.HTTPConnection("127.0.0.1", 8080, timeout=10)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    end.request(method, path, json.dumps(body) if body else None, headers)
    return end.getresponse().status
mine, other = os.environ["KEY"], os.environ["OTHER"]
chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
print(ask("GET", "/v1/models", mine))
for key in ("", "lr-", other, mine[:-1], mine + "x", mine.upper()):
    print(ask("POST", "/v1/chat/completions", key, **chat))
print(ask("POST", f"/k/{other}/v1/chat/completions", "", **chat))
for path in ("/pause", "/resume", "/rollouts", "/v1/rollouts/other", "/v1/reward", "/control", "/admin", "/metrics",
             "/docs", "/openapi.json", "/v1/keys", "/v1/responses/other", "/debug"):
    for method in ("GET", "POST", "PUT", "DELETE"):
        print(ask(method, path, mine))
"""


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tokenizer().save_pretrained(directory)
    return directory


async def test_a_key_opens_nothing_but_its_own_calls(tmp_path: Path, tiny_directory: Path) -> None:
    async with asyncio.timeout(TEST_S), serving(tiny_directory, "hello") as house:
        key, closed = house.open("mine"), house.open("over")
        await house.gateway.close_rollout("over")
        running_too = house.open("other")
        trial = make_trial(tmp_path, python(ASK, KEY=key, OTHER=closed))
        trial = replace(trial, gateway_socket=house.gateway.socket)
        await run(trial)
        statuses = said(trial).split()
        assert statuses[0] == "200" and set(statuses[1:8]) == {"401"}, said(trial, "stderr")
        assert len(statuses) == 8 + 13 * 4 and set(statuses[8:]) <= {"404", "405"}
        assert not house.engine.requests
        assert (await house.gateway.close_rollout("other")).calls == 0 and running_too != key
