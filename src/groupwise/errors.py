"""All exceptions, as one tree under `GroupwiseError`.

Every error a user can cause is a `GroupwiseError` with the facts that each surface needs:

    code       a stable string for programs             (HTTP body, `--json`)
    status     the HTTP status                          (server)
    exit_code  the process's exit status                (CLI)
    hint       what to do next, in one sentence         (all)
    field      which configuration key or JSON field is wrong, as a path; None where no one field is
               ("train.lora.rank", "groups[0].messages"; HTTP calls it `param`, as OpenAI does)
    kind       a stable word that is finer than `code`, where a part of ours must tell cases apart; else None

Messages are for people: what happened, the offending value, what would be valid. No code reads them.

Exit codes: 1 the run failed, 2 the configuration or the command line is wrong, 3 something that start-up needs is
missing, 4 the server refused the key, or the hub the token, 5 a job failed or was cancelled, 75 temporary (try again),
130 interrupted after a clean save.
"""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing import Self  # an older Python gets as far as being told so


class GroupwiseError(Exception):
    """Base of every error that is not a bug of ours."""

    code = "error"
    status = 500
    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, field: str | None = None, kind: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.field = field
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.message}\n  -> {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:  # an error crosses processes whatever its constructor asks for
        return _restored, (type(self), self.args, self.__dict__)

    def as_dict(self) -> dict[str, str | None]:
        """Return the error for programs: {"message", "type", "code", "hint", "field", "kind"}."""
        said = {"message": self.message, "type": type(self).__name__, "code": self.code, "hint": self.hint}
        return said | {"field": self.field, "kind": self.kind}


def _restored(kind: type[GroupwiseError], args: tuple[Any, ...], state: dict[str, Any]) -> GroupwiseError:
    """Return the error that was pickled."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__ |= state
    return error


class ConfigError(GroupwiseError, ValueError):
    """The configuration is malformed, has an unknown key, or asks for things that exclude each other."""

    code, status, exit_code = "invalid_config", 400, 2


class FieldError(ConfigError):
    """A field is wrong. The message can be repeated under the name by which the caller knows the field.

    `message` and `hint` have `{field}` in place of the name: a loss refuses `clip_low`, and the answer to a training
    request that gave the value as `clip_epsilon` names `clip_epsilon`.

    >>> error = FieldError("{field} is -1; it must be 0 or more", field="clip_low")
    >>> str(error.renamed("clip_epsilon"))
    'clip_epsilon is -1; it must be 0 or more'
    """

    def __init__(self, message: str, *, field: str, hint: str | None = None, kind: str | None = None):
        shown = hint and hint.replace("{field}", field)
        super().__init__(message.replace("{field}", field), hint=shown, field=field, kind=kind)
        self._templates = message, hint

    def renamed(self, field: str) -> Self:
        """Return the same error with another name for the field."""
        message, hint = self._templates
        return type(self)(message, hint=hint, field=field, kind=self.kind)


class DataError(GroupwiseError, ValueError):
    """A dataset cannot be read or a row of it is unusable; names file, line and key."""

    code, status, exit_code = "invalid_data", 400, 2


class ChatError(GroupwiseError, ValueError):
    """Messages cannot be rendered by this model's chat template."""

    code, status, exit_code = "invalid_messages", 400, 2


class ContextLengthError(GroupwiseError, ValueError):
    """A prompt does not fit the model's context together with the tokens asked for."""

    code, status, exit_code = "context_length_exceeded", 400, 2


class GrammarError(GroupwiseError, ValueError):
    """A grammar of structured outputs cannot be compiled, or its text cannot be guaranteed. `field` is the path to what
    of it is wrong, as in `response_format.json_schema.schema.properties.when`; `seconds` are those of a processor
    that it took to find out."""

    code, status, exit_code = "invalid_grammar", 400, 2
    seconds: float = 0.0


class ModelError(GroupwiseError):
    """A model or tokenizer cannot be found, loaded or used."""

    code, status, exit_code = "model_not_found", 404, 3


class LoadError(GroupwiseError, ImportError):
    """A `module:attribute` reference cannot be imported."""

    code, status, exit_code = "load_failed", 400, 2


class RewardError(GroupwiseError):
    """The reward functions cannot be trusted: every completion of a batch failed, or one broke its contract."""

    code, status, exit_code = "reward_failed", 500, 1


class EnvError(GroupwiseError):
    """An environment cannot be used: it fails, hangs or breaks its contract; says which method of which class.

    `field` is the method, as in `Shop.step`, where the message names it. `kind` is "timeout" where something took too
    long, "exception" for what the environment raised, and None for all else."""

    code, status, exit_code = "environment_failed", 500, 1

    @classmethod
    def raised(cls, method: str, error: BaseException, said: str | None = None) -> Self:
        """Return the error for an exception that `method` raised; `said` is its text where that is not `str(error)`."""
        text = str(error) if said is None else said
        return cls(f"{method} raised {type(error).__name__}: {text}", field=method, kind="exception")


class EngineError(GroupwiseError):
    """vLLM, or the server of a teacher, cannot do what is needed: it refuses, is another model, or does not come
    back."""

    code, status, exit_code = "engine_failed", 502, 1


class HubError(GroupwiseError):
    """The Hugging Face hub cannot be reached, or refuses; nothing on this machine was changed. `kind` says how:

    no_token   no user is logged in                            exit code 4
    refused    the token is wrong, or may not do this          4
    not_found  no such repository or revision, or a private one   2
    taken      the repository is there, and public             2
    away       no answer, or the connection was cut            75
    None       all else, such as an answer that the client does not understand   1
    """

    code, status = "hub_failed", 502
    EXIT_CODES: ClassVar[dict[str, int]] = {"no_token": 4, "refused": 4, "not_found": 2, "taken": 2, "away": 75}

    def __init__(self, message: str, *, hint: str | None = None, field: str | None = None, kind: str | None = None):
        super().__init__(message, hint=hint, field=field, kind=kind)
        self.exit_code = self.EXIT_CODES.get(kind or "", 1)


class AdapterNotFoundError(GroupwiseError, LookupError):
    """No such adapter, version or alias; the message lists what there is."""

    code, status, exit_code = "adapter_not_found", 404, 2


class AdapterError(GroupwiseError):
    """An adapter directory is damaged, of another base model, or cannot be used as asked."""

    code, status, exit_code = "invalid_adapter", 400, 1


class StorageError(GroupwiseError, OSError):
    """Files could not be read or written as they had to be; what was there before is untouched. Where it is known why,
    it is one of the kinds below (`StorageError.of`)."""

    code, status, exit_code = "storage_failed", 507, 75

    def __init__(self, message: str, *, hint: str | None = None, field: str | None = None, kind: str | None = None):
        GroupwiseError.__init__(self, message, hint=hint, field=field, kind=kind)  # OSError would eat the arguments

    @staticmethod
    def of(error: BaseException, message: str, *, hint: str | None = None) -> StorageError:
        """Return the kind that an error of the file system stands for, with what to do about it unless `hint` says
        it."""
        found = re.search(r"os error (\d+)", str(error))  # how libraries written in Rust tell the number
        number = getattr(error, "errno", None) or (int(found[1]) if found else None)
        kind = StorageFullError if number in _FULL else StorageDeniedError if number in _DENIED else StorageError
        return kind(message, hint=hint or _WHAT_TO_DO[kind])


class StorageFullError(StorageError):
    """There is no room: on the disk, in the quota, or in the largest file that is allowed."""

    code = "storage_full"


class StorageDeniedError(StorageError):
    """This user may not: the permissions, or a file system that is mounted read-only."""

    code, exit_code = "storage_denied", 3


class InUseError(StorageError):
    """Another process has the directory or the file, and only one may."""

    code, status = "in_use", 503


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_WHAT_TO_DO: dict[type[StorageError], str] = {
    StorageFullError: "free some disk space, then try again; what was stored before is unchanged",
    StorageDeniedError: "let this user read and write there (see `ls -ld` and `mount`), then try again; what was "
    "stored before is unchanged",
    StorageError: "see what the disk has (`dmesg`), then try again; what was stored before is unchanged",
}


class LedgerDamagedError(GroupwiseError):
    """The file with the jobs is damaged, so that nothing in it can be relied on. See `ledger_repair`."""

    code, status, exit_code = "ledger_damaged", 503, 3


class DamagedPayloadError(GroupwiseError):
    """The data of a job are not those that were submitted: their checksum differs, or they are gone."""

    code, status = "payload_damaged", 410


class JobNotFoundError(GroupwiseError, LookupError):
    """No such job: it never was, or it finished so long ago that it was pruned."""

    code, status, exit_code = "job_not_found", 404, 2


class NotCancellableError(GroupwiseError):
    """The job has finished, or its version is published already."""

    code, status = "not_cancellable", 409


class IdempotencyConflictError(GroupwiseError):
    """An idempotency key came again with another body."""

    code, status, exit_code = "idempotency_conflict", 409, 2


class LeaseLostError(GroupwiseError):
    """A worker no longer holds the job it works on: stop, write nothing, drop what was made."""

    code, status = "lease_lost", 409


class JobFailedError(GroupwiseError):
    """The job that was waited for failed or was cancelled."""

    code, exit_code = "job_failed", 5


class SwapRefusedError(GroupwiseError):
    """A version did not pass its check after loading; the policy that was active still is."""

    code, status = "swap_refused", 409


class RequestError(GroupwiseError, ValueError):
    """A request asks for something that cannot be. `field` is the JSON path, as in "groups[0].messages"."""

    code, status, exit_code = "invalid_value", 400, 2

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        field: str | None = None,
        kind: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message, hint=hint, field=field, kind=kind)
        self.code = code or self.code  # one of its own, as "invalid_json" or "batch_too_large"


class AuthenticationError(GroupwiseError):
    """The API key is missing or wrong."""

    code, status, exit_code = "invalid_api_key", 401, 2


class ConflictError(GroupwiseError):
    """An adapter or checkpoint of this name exists already, or is of another kind than what it is to go into."""

    code, status, exit_code = "already_exists", 409, 2


class BodyTooLargeError(GroupwiseError):
    """A request's body has more bytes than its route takes."""

    code, status, exit_code = "body_too_large", 413, 2


class MediaTypeError(GroupwiseError):
    """A request's body is not of the content type, or has a content encoding, that its route reads."""

    code, status, exit_code = "unsupported_media_type", 415, 2


class DeadlineError(GroupwiseError):
    """The server's own deadline passed before the answer was whole."""

    code, status = "deadline_exceeded", 504


class TryAgainError(GroupwiseError):
    """Base of what passes by itself: the same request may succeed after `retry_after` seconds."""

    code, status, exit_code = "try_again", 503, 75

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        field: str | None = None,
        kind: str | None = None,
        retry_after: float = 1.0,
    ):
        super().__init__(message, hint=hint, field=field, kind=kind)
        self.retry_after = retry_after


class QueueFullError(TryAgainError):
    """The queue is full: as many jobs wait as may."""

    code, status = "queue_full", 429


class OverloadedError(TryAgainError):
    """The server is full: as many requests are being answered, and wait, as may."""

    code, status = "overloaded", 429


class NotReadyError(TryAgainError):
    """The server is loading, draining or swapping."""

    code, status = "not_ready", 503


class DeviceLostError(TryAgainError):
    """The GPU computes nothing more in this process, and does in the next: the server ends and is started again, a run
    continues from its last checkpoint with `resume: auto`. See `model.lost_device`."""

    code = "device_lost"


class RemoteError(GroupwiseError):
    """Raised by the client for a server's error answer: status, code, hint, request id and `field` (its `param`) are
    those of the answer's envelope."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        hint: str | None = None,
        field: str | None = None,
        request_id: str | None = None,
    ):
        super().__init__(message, hint=hint, field=field)
        self.status = status
        self.code = code
        self.request_id = request_id
        temporary = status in (429, 503, 507)
        self.exit_code = 75 if temporary else 2 if 400 <= status < 500 else 1


class TrainingError(GroupwiseError):
    """Training cannot continue: repeated non-finite steps, no usable groups, a mismatch beyond repair."""

    code, status, exit_code = "training_failed", 500, 1


class RankLostError(GroupwiseError):
    """Another process of a run with several did not come to what all do together; names the rank, the phase and the
    seconds. A run that is started again with `resume: auto` continues from its last checkpoint."""

    code, status, exit_code = "rank_lost", 503, 75


class ClusterError(GroupwiseError):
    """Ray cannot be reached, has no room for the run, or an actor was lost more often than it may be; names which, how
    often and why. A run that is launched again with `resume: auto` continues from its last checkpoint."""

    code, status, exit_code = "cluster_failed", 503, 75


class Interrupted(GroupwiseError):
    """The user asked to stop; everything was saved first."""

    code, status, exit_code = "interrupted", 499, 130
