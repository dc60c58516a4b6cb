"""Settings for property tests on a busy machine: no example is failed for being slow."""

from hypothesis import HealthCheck, settings


def examples(most: int) -> settings:
    return settings(
        max_examples=most,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
