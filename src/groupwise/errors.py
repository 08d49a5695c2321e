"""The one exception tree.

Every error a user can cause is a `GroupwiseError` with four facts that each surface needs:

    code       a stable string for programs            (HTTP body, `--json`)
    status     the HTTP status                          (server)
    exit_code  the process's exit status                (CLI)
    hint       what to do next, in one sentence         (all)

Messages say what happened, the offending value and what would be valid. Exit codes: 1 the run failed, 2 the
configuration or the command line is wrong, 3 something that start-up needs is missing, 5 a job failed or was cancelled,
75 temporary (try again), 130 interrupted after a clean save.
"""

from __future__ import annotations


class GroupwiseError(Exception):
    """Base of every error that is not a bug of ours."""

    code = "error"
    status = 500
    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.hint}" if self.hint else self.message

    def as_dict(self) -> dict[str, str | None]:
        """The error envelope's inside: {"message", "type", "code", "hint"}."""
        return {"message": self.message, "type": type(self).__name__, "code": self.code, "hint": self.hint}


class ConfigError(GroupwiseError, ValueError):
    """The configuration is malformed, has an unknown key, or asks for things that exclude each other."""

    code, status, exit_code = "invalid_config", 400, 2


class DataError(GroupwiseError, ValueError):
    """A dataset cannot be read or a row of it is unusable; names file, line and key."""

    code, status, exit_code = "invalid_data", 400, 2


class ChatError(GroupwiseError, ValueError):
    """Messages cannot be rendered by this model's chat template."""

    code, status, exit_code = "invalid_messages", 400, 2


class ContextLengthError(GroupwiseError, ValueError):
    """A prompt does not fit the model's context together with the tokens asked for."""

    code, status, exit_code = "context_length_exceeded", 400, 2


class ModelError(GroupwiseError):
    """A model or tokenizer cannot be found, loaded or used."""

    code, status, exit_code = "model_not_found", 404, 3


class LoadError(GroupwiseError, ImportError):
    """A `module:attribute` reference cannot be imported."""

    code, status, exit_code = "load_failed", 400, 2


class RewardError(GroupwiseError):
    """The reward functions cannot be trusted: every completion of a batch failed, or one broke its contract."""

    code, status, exit_code = "reward_failed", 500, 1


class AdapterNotFoundError(GroupwiseError, LookupError):
    """No such adapter, version or alias; the message lists what there is."""

    code, status, exit_code = "adapter_not_found", 404, 2


class AdapterError(GroupwiseError):
    """An adapter directory is damaged, of another base model, or cannot be used as asked."""

    code, status, exit_code = "invalid_adapter", 400, 1


class StorageError(GroupwiseError, OSError):
    """Something could not be written whole (disk full, no permission); what was there before is untouched."""

    code, status, exit_code = "storage_full", 507, 75

    def __init__(self, message: str, *, hint: str | None = None):  # OSError would eat the arguments
        GroupwiseError.__init__(self, message, hint=hint)


class TrainingError(GroupwiseError):
    """Training cannot go on: repeated non-finite steps, no usable groups, a mismatch beyond repair."""

    code, status, exit_code = "training_failed", 500, 1


class Interrupted(GroupwiseError):
    """The user asked to stop; everything was saved first."""

    code, status, exit_code = "interrupted", 499, 130
