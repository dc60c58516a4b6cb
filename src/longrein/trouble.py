"""What goes wrong without an error: a step that learns nothing, or learns from what it should not trust.

Each kind is said at once with its likely causes, and stops the run when it comes in too many steps in a row.
"""

from collections.abc import Sequence

from longrein.learning.figures import UpdateReport
from longrein.records import Call


def troubles(report: UpdateReport, calls: Sequence[Call], mismatch: float) -> list[str]:
    """What was wrong with a step, in words; usually nothing.

    Args:
        calls: all that its batch holds.
        mismatch: mean absolute difference of log-probabilities, in nats, from which sampler and learner disagree.
    """
    found = []
    if not report.learned:
        found.append(f"nothing was learned: {report.why_not}")
    for name, each in {"": report, **{f" of {policy}": each for policy, each in report.policies.items()}}.items():
        fresh = each.by_age.get("0")
        if fresh is not None and fresh.logprob_difference_mean > mismatch:
            found.append(
                f"sampler and learner disagree{name}: the log-probabilities of {fresh.tokens} tokens that this very "
                f"version sampled differ by {fresh.logprob_difference_mean:.3g} in the mean (training.mismatch: "
                f"{mismatch:g}). Usual causes are an engine in bfloat16 with a model that does not bear it "
                "(engine.dtype: float32), or weights that were not served"
            )
    judged = [call.tools_valid for call in calls if call.tools_valid is not None]
    if judged and not any(judged):
        found.append(
            f"all {len(judged)} replies with tool calls are malformed or name undeclared tools. Usual causes are a "
            "model.tool_format or model.renderer that is not the model's own, or too small a sampling.max_tokens"
        )
    return found
