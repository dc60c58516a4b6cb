"""The run directory: everything needed to audit or rebuild a run, written once or appended, never edited by hand.

config.yaml       the resolved configuration
catalog.yaml      the tasks as materialised, with digests
manifest.json     versions of what computed, digests of model, tokenizer and template
ledger.db         what happened (see ledger.py)
metrics.jsonl     one line per step, rebuilt from the ledger on resume
tensorboard/      the same as curves
checkpoints/      weights, optimizer, cursor
rollouts/         what a harness and its verifier printed, one folder per rollout
report.md, curve.png   the result
"""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from longrein.config import Config
from longrein.ledger import CommittedStep

RECORDED_PACKAGES = ("longrein", "torch", "transformers", "peft", "renderers", "tokenizers", "numpy", "starlette")


class RunDirectory:
    """Paths and writers of one run directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ledger = root / "ledger.db"
        self.metrics = root / "metrics.jsonl"
        self.checkpoints = root / "checkpoints"
        self.rollouts = root / "rollouts"
        self.tensorboard = root / "tensorboard"
        self.report = root / "report.md"
        self.curve = root / "curve.png"
        self.catalog = root / "catalog.yaml"
        self.held_out_catalog = root / "catalog-held-out.yaml"

    def create(self, config: Config) -> None:
        """Make the directory and write the resolved configuration."""
        self.rollouts.mkdir(parents=True, exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        write_whole(self.root / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))

    def configuration(self) -> dict[str, Any]:
        """The resolved configuration that the run was last started with; empty where it cannot be read."""
        try:
            tree = yaml.safe_load((self.root / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return tree if isinstance(tree, dict) else {}

    def write_manifest(self, digests: Mapping[str, str]) -> None:
        """What computed this run: versions of the interpreter and packages, digests of the model's files."""
        versions = {name: _version(name) for name in RECORDED_PACKAGES}
        manifest = {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "packages": versions,
            "digests": dict(digests),
        }
        write_whole(self.root / "manifest.json", json.dumps(manifest, indent=2) + "\n")

    def rewrite_metrics(self, steps: Iterable[CommittedStep]) -> None:
        """Make ``metrics.jsonl`` say what the ledger says."""
        write_whole(self.metrics, "".join(json.dumps(dict(step.metrics)) + "\n" for step in steps))

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add one step's line."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(metrics)) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write a file aside and rename it, so that it is never seen half-written."""
    aside = file.with_name(file.name + ".partial")
    with aside.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    aside.replace(file)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
