"""Everything that can fail before the first step, tried for real.

Each check is tried although another failed, unless it needs that one's result; the report is one JSON object.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longrein.agents import harnesses, process
from longrein.agents.dockerfile import read_environment
from longrein.calls.conversation import Conversation, Message
from longrein.calls.listening import tcp_listener
from longrein.calls.rendering import Renderer, check_renderer, open_renderer
from longrein.config import Config
from longrein.engines import weights
from longrein.errors import LongreinError
from longrein.learning import fsdp
from longrein.learning.adapters import check_targets
from longrein.learning.process import open_hook
from longrein.records import Task
from longrein.run import load_tasks

# fp32 weights, gradients and two moments, and the engine's own copy, per parameter.
BYTES_PER_TRAINED_PARAMETER = 20
FREE_DISK_PER_PARAMETER = 26


@dataclass(frozen=True, slots=True)
class Check:
    """One thing tried."""

    name: str
    ok: bool
    detail: str
    seconds: float


@dataclass(slots=True)
class Report:
    """What doctor found."""

    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def failures(self) -> str:
        return "\n".join(f"{check.name}: {check.detail}" for check in self.checks if not check.ok)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "checks": {
                check.name: {"ok": check.ok, "detail": check.detail, "seconds": round(check.seconds, 3)}
                for check in self.checks
            },
        }

    def attempt(self, name: str, work: Callable[[], tuple[str, Any]]) -> Any:
        """Try one thing; its value, or None if it failed."""
        began = time.monotonic()
        try:
            detail, value = work()
        except LongreinError as error:
            self.checks.append(Check(name, False, str(error), time.monotonic() - began))
            return None
        self.checks.append(Check(name, True, detail, time.monotonic() - began))
        return value


def examine(config: Config) -> Report:
    """Check files, digests, model, tokenizer and template, harness, sandbox, memory and disk."""
    report = Report()
    tasks = report.attempt("tasks", lambda: _tasks(config))
    model = report.attempt("model", lambda: _model(config))
    if model is not None:
        report.attempt("template", lambda: _template(config, model, tasks or ()))
        report.attempt("learner", lambda: _learner(config, model))
        report.attempt("memory", lambda: _memory(config, model))
    if tasks:
        report.attempt("harness", lambda: _harness(config, tasks[0]))
    report.attempt("gateway", lambda: _gateway(config))
    report.attempt("sandbox", lambda: _sandbox(config))
    report.attempt("output", lambda: _output(config, model))
    return report


def _tasks(config: Config) -> tuple[str, Any]:
    tasks, held_out = load_tasks(config)
    both = {task.digest for task in tasks} & {task.digest for task in held_out}
    if both:
        names = sorted(task.task_id for task in held_out if task.digest in both)
        raise LongreinError(f"tasks.evaluate: {', '.join(names)} are also trained on. Hold other tasks out.")
    for task in (*tasks, *held_out):
        read_environment(task.path / "environment", task.workdir)
    return f"{len(tasks)} to train on, {len(held_out)} held out", tasks


def _model(config: Config) -> tuple[str, Path]:
    directory = weights.local_directory(config.model.path, config.model.revision)
    return f"{config.model.path}, {weights.parameter_count(directory) / 1e6:.1f} M parameters", directory


def _template(config: Config, model: Path, tasks: Sequence[Task]) -> tuple[str, None]:
    renderer = open_renderer(model, config.model)
    told = check_renderer(renderer)
    limit = config.model.context_length
    longest = max((_prompt_tokens(renderer, task) for task in tasks), default=0)
    if limit is not None and longest >= limit:
        raise LongreinError(
            f"model.context_length is {limit}: with all that is always shown, one instruction comes to {longest} "
            "tokens. Raise it, or shorten the instruction or model.demonstrations."
        )
    return told, None


def _prompt_tokens(renderer: Renderer, task: Task) -> int:
    return len(renderer.render(Conversation((Message("user", task.instruction),))).ids)


def _learner(config: Config, model: Path) -> tuple[str, None]:
    if config.algorithm.process.hook is not None:
        open_hook(config.algorithm.process.hook)
    fsdp.check(config.learner, config.algorithm, config.agents.policies)
    if config.learner.lora is None:
        return f"{config.algorithm.name}, all weights", None
    check_targets(weights.skeleton(model), config.learner.lora)
    policies = ", ".join(config.agents.policies)
    return f"{config.algorithm.name}, adapters of {policies} on {', '.join(config.learner.lora.targets)}", None


def _gateway(config: Config) -> tuple[str, None]:
    listener = tcp_listener(config.gateway.host, config.gateway.port)
    host, port = listener.getsockname()[:2]
    listener.close()
    return f"can listen on {host}, port {port if config.gateway.port else 'any'}", None


def _harness(config: Config, task: Any) -> tuple[str, None]:
    launch = harnesses.launch(
        config.harness, task, base_url="http://127.0.0.1:1", key="key", model=config.gateway.model_name
    )
    return " ".join(launch.argv[:1]), None


def _sandbox(config: Config) -> tuple[str, None]:
    return process.check(config.runner), None


def _memory(config: Config, model: Path) -> tuple[str, None]:
    trained = weights.parameter_count(model)
    served = len(config.agents.policies) + config.agents.serves_base
    # With adapters: the base once, and what each policy is served from.
    per_parameter = BYTES_PER_TRAINED_PARAMETER if config.learner.lora is None else 4 + 4 * served
    needed = trained * per_parameter
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _reclaimable()
    text = f"{needed / 2**30:.1f} GiB for weights and optimizer, {available / 2**30:.1f} GiB available"
    if needed > available:
        raise LongreinError(f"{text}. Use learner.lora, or a smaller model.")
    return text, None


def _reclaimable() -> int:
    """Bytes of file cache that Linux gives back when asked; 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.split()[1].isdigit()}
    return max(0, values.get("MemAvailable", 0) - values.get("MemFree", 0))


def _output(config: Config, model: Path | None) -> tuple[str, None]:
    directory = config.output.dir
    parent = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise LongreinError(f"output.dir {directory}: nothing can be written to {parent} ({error.strerror}).") from None
    free = shutil.disk_usage(parent).free
    needed = 2**28
    if model is not None:
        needed += weights.parameter_count(model) * FREE_DISK_PER_PARAMETER
    if free < needed:
        raise LongreinError(
            f"output.dir {directory}: {free / 2**30:.1f} GiB free, checkpoints need {needed / 2**30:.1f}. Free some, "
            "or choose another disk."
        )
    return f"{directory}, {free / 2**30:.0f} GiB free", None
