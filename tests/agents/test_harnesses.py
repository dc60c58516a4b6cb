"""Profiles become launches: fields filled in once, programs found, and nothing of the host shown beyond them."""

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from longrein.agents import harnesses
from longrein.agents.runner import Launch
from longrein.config import HarnessSection
from longrein.config_file import load
from longrein.errors import HarnessError
from longrein.records import Task

TASK = Task("t", Path("/nowhere"), "sha256:0", "Say {key} and {'json': 1} {", workdir="/srv")


def launch(section: HarnessSection, task: Task = TASK) -> Launch:
    return harnesses.launch(section, task, base_url="http://127.0.0.1:8080", key="k-1", model="policy")


def command(*words: str, **more: object) -> HarnessSection:
    return HarnessSection.model_validate({"command": list(words), **more})


def script(file: Path, text: str = "#!/bin/sh\n") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def test_fields_are_filled_in_once() -> None:
    made = launch(
        command(
            "sh",
            "-c",
            "{instruction}|{base_url}|{key}|{model}|{workdir}|{python}",
            "awk '{print $1}' {}",
            env={"URL": "{base_url}/v1", "KEY": "{key}"},
            arguments=["--model={model}"],
        )
    )
    filled = f"Say {{key}} and {{'json': 1}} {{|http://127.0.0.1:8080|k-1|policy|/srv|{sys.executable}"
    assert made.argv[1:] == ("-c", filled, "awk '{print $1}' {}", "--model=policy")
    assert made.env == {"URL": "http://127.0.0.1:8080/v1", "KEY": "k-1"}
    assert made.preload is None and made.files == {}


def test_a_misspelt_field_is_an_error() -> None:
    with pytest.raises(HarnessError, match=r"harness.command: unknown field \{instructions\}. Did you mean \{instruct"):
        launch(command("sh", "{instructions}"))
    with pytest.raises(HarnessError, match=r"harness.env.URL: unknown field \{baseurl\}"):
        launch(command("sh", env={"URL": "{baseurl}/v1"}))


def test_programs_are_found_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{script(tmp_path / 'tools' / 'agent').parent}:/usr/bin:/bin")
    made = launch(command("agent"))
    assert made.argv == (str(tmp_path / "tools" / "agent"),)
    # Not its directory: whatever lies beside a program is none of the sandbox's business.
    assert made.readable == (tmp_path / "tools" / "agent",)
    assert launch(command("sh")).readable == ()
    (tmp_path / "tools" / "agent").chmod(0o644)
    for section, says in (
        (command("no-such-program"), "'no-such-program' was not found"),
        (command(str(tmp_path / "tools" / "agent")), "is not an executable file"),
    ):
        with pytest.raises(HarnessError, match=says):
            launch(section)


def test_an_installed_program_shows_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = script(tmp_path / "node" / "lib" / "node_modules" / "agent" / "cli.js")
    (tmp_path / "node" / "bin").mkdir()
    (tmp_path / "node" / "bin" / "agent").symlink_to("../lib/node_modules/agent/cli.js")
    assert launch(command(str(tmp_path / "node" / "bin" / "agent"))).readable == (tmp_path / "node",)
    assert launch(command(str(real))).readable == (real,)
    # A home directory may look like one, and is never shown.
    monkeypatch.setenv("HOME", str(tmp_path / "node"))
    program = script(tmp_path / "node" / "bin" / "mine")
    assert launch(command(str(program))).readable == (program,)


def test_the_interpreter_that_runs_us_comes_with_its_packages() -> None:
    made = launch(command("{python}", "-c", "import yaml"))
    assert made.argv[0] == sys.executable
    for needed in (sys.prefix, sys.base_prefix, Path(sys.executable).resolve()):
        shown = (*made.readable, Path("/usr"))
        assert any(Path(needed).is_relative_to(place) for place in shown), needed


def test_a_program_beside_the_configuration_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = script(tmp_path / "agent.sh")
    (tmp_path / "config.yaml").write_text(
        "{model: {path: m}, tasks: {train: t}, harness: {command: [./agent.sh, x]}, output: {dir: o}}"
    )
    monkeypatch.chdir("/")
    assert launch(load(tmp_path / "config.yaml").harness).argv == (str(agent), "x")


def test_files_are_read_and_may_hold_the_program(tmp_path: Path) -> None:
    agent = script(tmp_path / "agent.sh")
    made = launch(command("/app/agent", files={"/app/agent": agent}))
    assert made.argv == ("/app/agent",)
    assert made.files == {"/app/agent": b"#!/bin/sh\n"}
    assert made.readable == ()
    with pytest.raises(HarnessError, match=r"harness.files\['/app/x'\].*cannot be read"):
        launch(command("sh", files={"/app/x": tmp_path / "absent"}))
    with pytest.raises(HarnessError, match="not an absolute path"):
        launch(command("sh", files={"agent": agent}))


def test_unknown_profiles_name_near_misses() -> None:
    with pytest.raises(HarnessError, match="Did you mean 'mini-swe-agent'"):
        harnesses.profile("mini-swe-agnet")
    with pytest.raises(HarnessError, match=r"There are: mini-swe-agent, pi, .*, command"):
        harnesses.profile("zzz")


def test_what_is_not_installed_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert harnesses.installed(harnesses.profile("mini-swe-agent")) is None
    with pytest.raises(HarnessError, match="longrein harness install mini-swe-agent"):
        launch(HarnessSection(name="mini-swe-agent"))
    with pytest.raises(HarnessError, match="nothing to install"):
        harnesses.install(harnesses.profile("command"))


def wheel(directory: Path) -> Path:
    """A package with one console script, as a wheel."""
    parts = {
        "tinyharness.py": "import sys\ndef main():\n    print('ran', *sys.argv[1:])\n",
        "tinyharness-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinyharness\nVersion: 1.0\n",
        "tinyharness-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tinyharness-1.0.dist-info/entry_points.txt": "[console_scripts]\ntinyharness = tinyharness:main\n",
    }
    file = directory / "tinyharness-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        record = ""
        for name, text in parts.items():
            archive.writestr(name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(text)}\n"
        archive.writestr("tinyharness-1.0.dist-info/RECORD", record + "tinyharness-1.0.dist-info/RECORD,,\n")
    return file


def test_installing_makes_an_environment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    profile = harnesses.Profile("tiny", "1.0", pip=(str(wheel(tmp_path)),), command=("tinyharness", "{instruction}"))
    unfinished = script(tmp_path / "cache" / "longrein" / "harnesses" / "tiny-1.0" / "bin" / "left-behind")
    assert harnesses.installed(profile) is None

    place = harnesses.install(profile)
    assert place == harnesses.installed(profile) == unfinished.parent.parent
    assert not unfinished.exists()
    ran = subprocess.run([place / "bin" / "tinyharness", "well"], capture_output=True, text=True, check=True)
    assert ran.stdout == "ran well\n"

    (place / "kept").touch()
    assert harnesses.install(profile) == place and (place / "kept").exists()
    assert harnesses.installed(replace(profile, pip=("tinyharness==2.0",))) is None
    with pytest.raises(HarnessError, match=r"'tiny' could not be installed.*no-such-package"):
        harnesses.install(replace(profile, pip=("no-such-package",)))
    assert harnesses.installed(profile) is None


def python(file: Path, version: str, usable: bool = True) -> Path:
    """A program that passes for an interpreter and says in the environments it makes who made them."""
    return script(
        file,
        f"""#!/bin/sh
if [ "$1" = -c ]; then exit {0 if usable else 1}; fi
if [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    echo '#!/bin/sh' > "$3/bin/python"
    chmod +x "$3/bin/python"
    echo "{version}" > "$3/made-by"
fi
""",
    )


def test_a_newer_python_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setattr(harnesses, "NEWEST", (3, 93))
    pyenv = tmp_path / "pyenv" / "versions"

    def made_by(wanted: str) -> str:
        profile = harnesses.Profile("tiny", f"1.{wanted}", pip=("x",), python=wanted)
        return (harnesses.install(profile) / "made-by").read_text().strip()

    with pytest.raises(
        HarnessError, match=r"'tiny' needs Python 3\.91 or newer; longrein runs with 3.*python3\.91-venv"
    ):
        made_by("3.91")
    python(pyenv / "3.90.1" / "bin" / "python3.90", "too old")
    with pytest.raises(HarnessError, match=r"needs Python 3\.91"):
        made_by("3.91")
    python(pyenv / "3.91.2" / "bin" / "python3.91", "pyenv's 3.91")
    # As pyenv's own stand-in on the PATH does where no version is chosen.
    python(tmp_path / "path" / "python3.91", "refuses", usable=False)
    assert made_by("3.91") == "pyenv's 3.91"
    python(tmp_path / "path" / "python3.92", "3.92 on the PATH")
    assert made_by("3.90") == "3.92 on the PATH"
    python(pyenv / "3.93.0" / "bin" / "python3.93", "pyenv's 3.93")
    assert made_by("3.92") == "pyenv's 3.93"


def test_the_python_that_runs_us_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(harnesses, "NEWEST", (3, 93))
    python(tmp_path / "path" / "python3.93", "another")
    place = harnesses.install(harnesses.Profile("tiny", "1.0", pip=("pip",), python="3.11"))
    assert not (place / "made-by").exists() and (place / "bin" / "pip").exists()


def test_missing_programs_are_named_with_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    says = r"'terminus-2' needs the program tmux.*apt-get install tmux"
    with pytest.raises(HarnessError, match=says):
        harnesses.install(harnesses.profile("terminus-2"))
    with pytest.raises(HarnessError, match=says):
        launch(HarnessSection(name="terminus-2"))
    script(tmp_path / "path" / "tmux")
    with pytest.raises(HarnessError, match="longrein harness install terminus-2"):
        launch(HarnessSection(name="terminus-2"))


def test_a_profile_shows_what_it_needs() -> None:
    shown = harnesses.profile("openhands").as_tree()
    assert (shown["python"], shown["needs"]) == ("3.12", ["tmux"])
    assert not {"python", "needs"} & set(harnesses.profile("pi").as_tree())


def test_small_agents_of_ours_are_shown_where_they_are_used() -> None:
    made = launch(command("sh", "{programs}/with_langgraph.py"))
    assert Path(made.argv[1]).is_file()
    assert made.readable == (harnesses.PROGRAMS,)
    assert launch(command("sh")).readable == ()


def test_every_small_agent_belongs_to_a_profile() -> None:
    words = [word for profile in harnesses.profiles().values() for word in profile.command if "{programs}/" in word]
    named = {word.removeprefix("{programs}/") for word in words}
    assert named == {file.name for file in harnesses.PROGRAMS.glob("*.py")}


@pytest.mark.skipif(
    harnesses.installed(harnesses.profile("mini-swe-agent")) is None, reason="mini-swe-agent is not installed"
)
def test_mini_swe_agent_is_started_as_published(tmp_path: Path) -> None:
    place = harnesses.installed(harnesses.profile("mini-swe-agent"))
    assert place is not None
    settings = tmp_path / "mini.yaml"
    settings.write_text("agent: {}\n")
    section = HarnessSection(
        name="mini-swe-agent", arguments=["-c", "/etc/mini.yaml"], files={"/etc/mini.yaml": settings}
    )
    made = launch(section)
    assert made.argv[:3] == (str(place / "bin" / "mini"), "-m", "openai/policy")
    assert made.argv[-2:] == ("-c", "/etc/mini.yaml") and TASK.instruction in made.argv
    assert made.env["OPENAI_API_KEY"] == "k-1" and made.env["OPENAI_BASE_URL"] == "http://127.0.0.1:8080/v1"
    assert place in made.readable
    assert made.preload is not None and made.preload.python == place / "bin" / "python"
    assert os.access(made.preload.python, os.X_OK)
    assert launch(section.model_copy(update={"preload": False})).preload is None
    own = section.model_copy(update={"command": ["mini", "--help"]})
    assert launch(own).argv == (str(place / "bin" / "mini"), "--help", "-c", "/etc/mini.yaml")
    assert launch(own).preload is None
