"""Every error longrein raises on purpose.

An error is a sentence for the person reading it: where it stands (file and key), what was given, what was
expected, and what to do about it.

    LongreinError
    ├── ConfigError               the YAML file, or a --set
    ├── ModelError                weights, tokenizer, chat template, demonstrations
    ├── TaskError                 a task directory or the catalog
    │   └── DigestMismatch        the task changed since it was pinned
    ├── RewardError               a reward file that is not one finite number in range
    ├── HarnessError              an unknown profile, a missing program
    ├── SandboxError              a sandbox that could not be made or entered
    │   └── SandboxUnavailable    this machine forbids what the sandbox needs
    ├── CallError                 a model call answered with an error, in the dialect's own shape
    │   ├── InvalidRequest        a field the gateway cannot honour or understand
    │   ├── UnknownKey            no running rollout has this key
    │   ├── ContextLengthExceeded prompt and reply do not fit the model
    │   ├── CapExceeded           the rollout used up its calls, tokens or time
    │   └── Overloaded            too many calls wait; come back later
    ├── EngineError               the engine died or was given impossible work
    ├── LearnerError              an update that cannot be made
    │   └── NothingLearned        several steps in a row changed nothing
    ├── NoResult                  every rollout of a step or an evaluation failed
    ├── LedgerError               a ledger that belongs to another run or is damaged
    └── DeadlineExceeded          a wait ended; says what it waited for
"""


class LongreinError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(LongreinError):
    """The configuration is wrong; the message names file, key, what was given and what to do."""


class ModelError(LongreinError):
    """Weights, tokenizer, chat template or demonstrations cannot be used."""


class TaskError(LongreinError):
    """A task directory or the catalog is wrong; the message names the file."""


class DigestMismatch(TaskError):
    """A task's content is not what the catalog pinned."""


class RewardError(LongreinError):
    """The verifier's reward is missing, not a finite number, or out of range."""


class HarnessError(LongreinError):
    """A harness profile is unknown or its program is missing."""


class SandboxError(LongreinError):
    """A sandbox could not be made or entered (an infrastructure failure of the rollout)."""


class SandboxUnavailable(SandboxError):
    """This machine forbids what the sandbox needs; the message says what and names the alternative."""


class CallError(LongreinError):
    """A model call that is answered with an error.

    Attributes:
        status: HTTP status.
        code: short machine-readable code, for the dialect to place in its error shape.
        param: name of the offending request field, if one is to blame.
        retry_after_s: seconds after which a retry may succeed, if it may.
    """

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(CallError):
    """A request the gateway cannot honour or understand."""

    status = 400
    code = "invalid_request"


class UnknownKey(CallError):
    """No running rollout has this key."""

    status = 401
    code = "invalid_api_key"


class ContextLengthExceeded(CallError):
    """The prompt does not fit the model's context.

    Attributes:
        tokens, limit: of the prompt, and of prompt and reply together.
    """

    status = 400
    code = "context_length_exceeded"

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} "
            "tokens. Please reduce the length of the messages.",
            param="messages",
        )
        self.tokens = tokens
        self.limit = limit


class CapExceeded(CallError):
    """The rollout used up its calls, tokens or time; a retry cannot succeed."""

    status = 403
    code = "rollout_cap_exceeded"


class Overloaded(CallError):
    """Too many calls wait."""

    status = 429
    code = "rate_limit_exceeded"


class EngineError(LongreinError):
    """The engine died or was given work it cannot do."""


class LearnerError(LongreinError):
    """An update cannot be made."""


class NothingLearned(LearnerError):
    """Several steps in a row changed nothing; the message lists the likely causes."""


class NoResult(LongreinError):
    """Every rollout of a step or an evaluation failed; the message says with what."""


class LedgerError(LongreinError):
    """The ledger belongs to another run, is held by another process, or is damaged."""


class DeadlineExceeded(LongreinError):
    """A wait ended; the message says what was waited for and for how long."""
