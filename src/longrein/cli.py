"""The command line: ``longrein train | doctor | audit | eval | harness``.

Every refusal is one paragraph on standard error and a non-zero exit; what a command is asked for goes to standard
output. Ctrl-C stops a run cleanly (exit 130), and the same command goes on with it.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import yaml

from longrein import __version__
from longrein.config import Config
from longrein.config_file import load
from longrein.errors import LongreinError

STOPPED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    status = _main(argv)
    for thread in threading.enumerate():
        if thread.name.startswith("longrein-compute"):
            thread.join(5)
            if thread.is_alive():
                # It is stuck in what it computes, and the interpreter would wait for it for ever.
                sys.stdout.flush()
                os._exit(status or 1)
    return status


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    # Read by OpenMP when torch is first imported: threads that spin while they wait take the sandboxes' cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Read by torch and oneDNN: each keeps a kernel for every shape of a product, and prompts have thousands of lengths.
    # So many hold the shapes of decoding.
    os.environ.setdefault("LRU_CACHE_CAPACITY", "256")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
    try:
        return int(arguments.command(arguments))
    except LongreinError as error:
        print(f"longrein: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("longrein: stopped. The same command goes on from here.", file=sys.stderr)
        return STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longrein",
        description="Train the model inside an agent, in the harness the agent is deployed with.",
    )
    parser.add_argument("--version", action="version", version=f"longrein {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("train", _train, "train, or go on with the run in output.dir"),
        ("doctor", _doctor, "check everything that can fail; print one JSON object"),
        ("audit", _audit, "prove from the ledger what the run in output.dir did; print one JSON object"),
        ("eval", _evaluate, "score the held-out tasks, with the run's last checkpoint if there is one"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        _configured(command)
        command.add_argument("--dry-run", action="store_true", help="print the resolved plan and start nothing")
        command.set_defaults(command=run)
    harness = commands.add_parser(
        "harness", help="known harnesses", description="list, show, install or try known harnesses"
    )
    actions = harness.add_subparsers(required=True, metavar="ACTION")
    actions.add_parser("list", help="profiles and where they are installed").set_defaults(command=_harness_list)
    install = actions.add_parser("install", help="install a pinned harness into an environment of its own")
    install.add_argument("name")
    install.set_defaults(command=_harness_install)
    show = actions.add_parser("show", help="a profile: how a harness is installed, started and pointed at the gateway")
    show.add_argument("name")
    show.set_defaults(command=_harness_show)
    probe = actions.add_parser("probe", help="run a harness once: its calls, branches, what would be trained")
    probe.add_argument("name")
    _configured(probe)
    probe.set_defaults(command=_harness_probe)
    return parser


def _configured(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML configuration")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one key; VALUE is YAML; may be repeated",
    )


def _train(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.set)
    if arguments.dry_run:
        return _print_plan(config)
    from longrein.doctor import examine
    from longrein.train import train

    report = examine(config)
    if not report.ok:
        raise LongreinError(report.failures())
    print(_run(train(config)))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from longrein.doctor import examine

    config = load(arguments.config, arguments.set)
    if arguments.dry_run:
        return _print_plan(config)
    report = examine(config)
    print(json.dumps(report.as_json(), indent=2))
    return 0 if report.ok else 1


def _audit(arguments: argparse.Namespace) -> int:
    from longrein.audit import audit

    config = load(arguments.config, arguments.set)
    if arguments.dry_run:
        return _print_plan(config)
    report = asyncio.run(audit(config))
    print(json.dumps(report.as_json(), indent=2))
    return 0 if report.ok else 1


def _evaluate(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.set)
    if arguments.dry_run:
        return _print_plan(config)
    from longrein.train import evaluate_only

    print(_run(evaluate_only(config)))
    return 0


def _print_plan(config: Config) -> int:
    """The resolved configuration and the tasks it leads to."""
    from longrein.plan import training_group
    from longrein.run import load_tasks

    tasks, held_out = load_tasks(config)
    first = [
        training_group(
            tasks,
            number,
            rollouts=config.training.rollouts,
            temperature=config.sampling.temperature,
            seed=config.training.seed,
        )
        for number in range(config.training.groups)
    ]
    plan = {
        "config": config.model_dump(mode="json"),
        "plan": {
            "training_tasks": len(tasks),
            "held_out_tasks": len(held_out),
            "rollouts_per_step": config.training.groups * config.training.rollouts,
            "steps": config.training.steps,
            "first_step": [want.task.task_id for want in first],
        },
    }
    print(yaml.safe_dump(plan, sort_keys=False), end="")
    return 0


def _harness_list(arguments: argparse.Namespace) -> int:
    from longrein.agents import harnesses

    for profile in harnesses.profiles().values():
        where = harnesses.installed(profile)
        needs = ", ".join([*([f"Python {profile.python}"] if profile.python else []), *profile.needs])
        needs = needs and f" (needs {needs})"
        print(f"{profile.name:<20} {profile.version or '':<10} {where or 'not installed'}{needs}")
    return 0


def _harness_install(arguments: argparse.Namespace) -> int:
    from longrein.agents import harnesses

    print(harnesses.install(harnesses.profile(arguments.name)))
    return 0


def _harness_show(arguments: argparse.Namespace) -> int:
    from longrein.agents import harnesses

    profile = harnesses.profile(arguments.name)
    print(yaml.safe_dump({profile.name: profile.as_tree()}, sort_keys=False, width=120), end="")
    return 0


def _harness_probe(arguments: argparse.Namespace) -> int:
    from longrein.agents.harnesses import profile
    from longrein.harness_probe import probe_harness

    config = load(arguments.config, arguments.set)
    print(_run(probe_harness(config, profile(arguments.name).name)))
    return 0


def _run(work: Coroutine[Any, Any, str]) -> str:
    """Run to the end; SIGTERM stops as cleanly as Ctrl-C."""

    async def stoppable() -> str:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    return asyncio.run(stoppable())


if __name__ == "__main__":
    sys.exit(main())
