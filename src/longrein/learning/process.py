"""Rewards of single calls, from whoever judged them."""

import importlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from longrein.config import ProcessSection
from longrein.errors import ConfigError
from longrein.forest.targets import trainable
from longrein.records import Call, Rollout

Hook = Callable[[Rollout, Sequence[Call]], Sequence[float | None]]


def open_hook(name: str) -> Hook:
    """The function that ``package.module:function`` names.

    Raises:
        ConfigError: there is none.
    """
    module, colon, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function) if colon else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"key 'algorithm.process.hook' was given {name!r}: {error}.") from None
    if not callable(found):
        raise ConfigError(f"key 'algorithm.process.hook' was given {name!r}: expected package.module:function.")
    return found  # type: ignore[no-any-return]


def process_rewards(section: ProcessSection, rollout: Rollout, calls: Sequence[Call]) -> tuple[float | None, ...]:
    """One reward, or None, for each trainable call of a rollout, in order.

    Raises:
        ConfigError: the hook cannot be imported, or gives something else.
    """
    judged = [call for call in calls if trainable(call)]
    if section.source == "verifier":
        return _by_verifier(rollout, len(judged))
    if section.hook is not None:
        return _by_hook(section.hook, rollout, judged)
    return tuple(_by_ledger(section.source, call, calls) for call in judged)


def _by_verifier(rollout: Rollout, count: int) -> tuple[float | None, ...]:
    """Keys ``call.N`` of reward.json; its reader has checked that they are numbers."""
    receipt = rollout.receipt
    given: dict[str, Any] = json.loads(receipt.content) if receipt and receipt.file == "reward.json" else {}
    return tuple(None if (value := given.get(f"call.{index}")) is None else float(value) for index in range(count))


def _by_hook(name: str, rollout: Rollout, calls: Sequence[Call]) -> tuple[float | None, ...]:
    given = open_hook(name)(rollout, calls)
    if len(given) != len(calls) or not all(_is_reward(value) for value in given):
        raise ConfigError(
            f"algorithm.process.hook {name} returned {given!r:.200} for {len(calls)} calls of {rollout.rollout_id}: "
            "expected one finite number or None for each."
        )
    return tuple(None if value is None else float(value) for value in given)


def _is_reward(value: object) -> bool:
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float(value))
    )


def _by_ledger(source: str, call: Call, calls: Sequence[Call]) -> float | None:
    """Whether a call's tools were called validly (and succeeded); None where it called none."""
    if call.tools_valid is None:
        return None
    if not call.tools_valid or source == "tool_valid":
        return float(call.tools_valid)
    following = [other for other in calls if other.parent_id == call.call_id and other.tools_failed is not None]
    # A harness that asked for nothing more said nothing of it.
    return 1.0 - float(following[0].tools_failed or 0.0) if following else 1.0
