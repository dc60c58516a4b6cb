"""Settings for property tests on a busy machine: no example is failed for being slow."""

import os

from hypothesis import HealthCheck, settings

LEAST = int(os.environ.get("LONGREIN_EXAMPLES", "0"))
"""``make properties`` asks for many more than a test run does."""


def examples(most: int) -> settings:
    return settings(
        max_examples=max(most, LEAST),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
