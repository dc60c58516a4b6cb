"""Wires the rooms together into one run, and takes them apart again in the opposite order."""

import asyncio
import functools
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from longrein.agents import catalog, harnesses, process
from longrein.agents.controller import Controller, LaunchFactory, Limits
from longrein.agents.runner import Launch
from longrein.calls.gateway import Gateway
from longrein.calls.rendering import open_renderer
from longrein.config import Config
from longrein.engines import probe, weights
from longrein.engines.embedded import EmbeddedEngine
from longrein.engines.engine import Engine
from longrein.engines.several import SeveralPolicies
from longrein.errors import LedgerError
from longrein.identity import explained, identity
from longrein.learning.joint import open_learner
from longrein.learning.learner import Learner
from longrein.ledger import Ledger
from longrein.progress import Display
from longrein.records import BASE, POLICY, RewardProfile, Task
from longrein.rundir import RunDirectory
from longrein.waits import Watch, waiting

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from transformers import PreTrainedModel

P = ParamSpec("P")
T = TypeVar("T")


class Compute:
    """The one thread on which models are computed: engine steps and updates take turns, never each other's cores."""

    CLOSE_S = 60.0

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="longrein-compute")

    async def close(self) -> None:
        """Wait for what is computed now.

        Raises:
            DeadlineExceeded: it does not end.
        """
        last = self.executor.submit(lambda: None)
        self.executor.shutdown(wait=False)
        async with waiting("the computing thread to end", self.CLOSE_S):
            await asyncio.wrap_future(last)

    async def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, functools.partial(work, *args, **kwargs))


@dataclass(frozen=True, slots=True)
class Run:
    """Everything a step needs."""

    config: Config
    directory: RunDirectory
    display: Display
    ledger: Ledger
    tasks: tuple[Task, ...]
    held_out: tuple[Task, ...]
    compute: Compute
    learner: Learner
    engine: Engine
    gateway: Gateway
    controller: Controller
    board: "SummaryWriter | None"
    stopping: threading.Event = field(default_factory=threading.Event)


def reward_profile(config: Config) -> RewardProfile:
    """The configured reward profile, for tasks whose catalog entry has none of its own."""
    reward = config.tasks.reward
    return RewardProfile(reward.key, reward.scale, reward.offset, (reward.raw_range[0], reward.raw_range[1]))


def load_tasks(config: Config) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """Training tasks and held-out tasks, checked."""
    profile = reward_profile(config)
    held_out = (
        catalog.load_catalog(config.tasks.evaluate, profile, config.runner.network) if config.tasks.evaluate else ()
    )
    return catalog.load_catalog(config.tasks.train, profile, config.runner.network), held_out


@asynccontextmanager
async def opened(config: Config, display: Display) -> AsyncIterator[Run]:
    """A run, ready for its first step. Everything it started is ended on the way out, whatever happened."""
    tasks, held_out = load_tasks(config)
    model = weights.local_directory(config.model.path, config.model.revision)
    directory = RunDirectory(config.output.dir)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(Watch(display.say))
        ledger = await Ledger.open(directory.ledger)
        stack.push_async_callback(ledger.close)
        digests = await asyncio.to_thread(identity, config, model, tasks, held_out)
        if different := await ledger.identify(digests):
            raise LedgerError(
                f"output.dir {directory.root} holds a run that was begun with something else: "
                f"{'; '.join(explained(different, directory.configuration(), config))}. Use a new output.dir, or give "
                "what it was begun with."
            )
        directory.create(config)
        directory.write_manifest(digests)
        catalog.write_catalog(tasks, directory.catalog)
        if held_out:
            catalog.write_catalog(held_out, directory.held_out_catalog)
        compute = Compute()
        stack.push_async_callback(compute.close)
        display.say(f"loading {config.model.path}")
        learner, engine = await compute(_load, config, model, compute.executor)
        stack.callback(learner.close)
        stack.push_async_callback(engine.close)
        display.say(f"{engine.describe()}; {learner.describe()}")
        gateway = Gateway(
            config.gateway,
            config.sampling,
            open_renderer(model, config.model),
            engine,
            ledger,
            _socket(stack),
            config.agents,
        )
        await gateway.start()
        stack.push_async_callback(gateway.close)
        runner = process.ProcessRunner(config.runner)
        await runner.open()
        stack.push_async_callback(runner.close)
        controller = Controller(
            ledger,
            runner,
            gateway,
            _launches(config),
            directory.rollouts,
            _limits(config),
            config.training.seed,
            gateway.url if config.runner.sandbox == "none" or config.runner.network == "host" else None,
        )
        board = _board(config, directory, stack)
        yield Run(
            config, directory, display, ledger, tasks, held_out, compute, learner, engine, gateway, controller, board
        )


def _load(config: Config, model: Path, executor: ThreadPoolExecutor) -> tuple[Learner, Engine]:
    """Learner and engine over the same weights, each in its own dtype. Runs on the compute thread."""
    trained = config.agents.policies
    served = [*trained, *([BASE] if config.agents.serves_base else [])]
    learner = open_learner(model, config.learner, config.algorithm, config.training.steps, trained)
    try:
        return learner, _engine(config, learner.module, served, executor)
    except BaseException:
        learner.close()
        raise


def _engine(config: Config, module: "PreTrainedModel", served: Sequence[str], executor: ThreadPoolExecutor) -> Engine:
    choice = probe.choose(module, config.engine.dtype, config.engine.threads)
    # Fresh adapters add nothing yet: every policy begins as the base.
    engines = {
        policy: EmbeddedEngine(
            module,
            dtype=choice.dtype,
            decode_threads=choice.decode_threads,
            prefill_threads=choice.prefill_threads,
            max_batch=config.engine.max_batch,
            cache_tokens=config.engine.cache_tokens // len(served),
            context_length=config.model.context_length,
            executor=executor,
            seed=config.training.seed,
        )
        for policy in served
    }
    return engines[POLICY] if len(engines) == 1 else SeveralPolicies(engines)


def _limits(config: Config) -> Limits:
    return Limits(
        concurrency=config.runner.concurrency,
        retries=config.runner.retries,
        timeout_s=config.harness.timeout_s,
        deadline_s=config.training.collect_s,
        quorum=config.training.quorum,
        straggler_s=config.training.straggler_s,
    )


def _launches(config: Config) -> LaunchFactory:
    def launch(task: Task, *, base_url: str, key: str) -> Launch:
        return harnesses.launch(config.harness, task, base_url=base_url, key=key, model=config.gateway.model_name)

    return launch


def _socket(stack: AsyncExitStack) -> Path:
    """A short private path: unix socket paths may hold about a hundred bytes, a run directory's may be longer."""
    for left in Path(tempfile.gettempdir()).glob("longrein-*/gateway.sock"):
        if not _answers(left):
            shutil.rmtree(left.parent, ignore_errors=True)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longrein-"))) / "gateway.sock"


def _answers(file: Path) -> bool:
    """Whether someone listens there; nobody does once the process that did was killed."""
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.connect(str(file))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # busy, or not ours to ask
    return True


def _board(config: Config, directory: RunDirectory, stack: AsyncExitStack) -> "SummaryWriter | None":
    if not config.output.tensorboard:
        return None
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(directory.tensorboard))
    stack.callback(board.close)
    return board
