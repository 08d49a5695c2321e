"""Every error carries what a program, a server and a shell need; no two kinds share a code by accident."""

from __future__ import annotations

import errno
import inspect
import pickle

import pytest

from groupwise import errors
from groupwise.errors import GroupwiseError

ASKING = {errors.FieldError: {"field": "f"}, errors.RemoteError: {"status": 400, "code": "c"}}
KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, GroupwiseError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_kind_has_a_status_an_exit_code_and_a_meaning(kind):
    assert 400 <= kind.status < 600
    assert kind.exit_code in (1, 2, 3, 5, 75, 130)
    assert kind.code == kind.code.lower()
    assert kind.__doc__


def test_codes_are_unique():
    codes = [kind.code for kind in KINDS if "code" in kind.__dict__]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ASKING], ids=lambda k: k.__name__)
def test_message_and_hint_reach_every_surface(kind):
    error = kind("what happened", hint="what to do")
    assert str(error) == "what happened\n  -> what to do"
    assert error.as_dict() == {
        "message": "what happened",
        "type": kind.__name__,
        "code": kind.code,
        "hint": "what to do",
        "field": None,
        "kind": None,
    }


@pytest.mark.parametrize(
    ("kind", "status", "code", "exit_code"),
    [
        (errors.StorageFullError, 507, "storage_full", 75),
        (errors.StorageDeniedError, 507, "storage_denied", 3),
        (errors.InUseError, 503, "in_use", 75),
        (errors.LedgerDamagedError, 503, "ledger_damaged", 3),
        (errors.DamagedPayloadError, 410, "payload_damaged", 1),
        (errors.JobNotFoundError, 404, "job_not_found", 2),
        (errors.NotCancellableError, 409, "not_cancellable", 1),
        (errors.IdempotencyConflictError, 409, "idempotency_conflict", 2),
        (errors.QueueFullError, 429, "queue_full", 75),
        (errors.RequestError, 400, "invalid_value", 2),
        (errors.AuthenticationError, 401, "invalid_api_key", 2),
        (errors.ConflictError, 409, "already_exists", 2),
        (errors.NotReadyError, 503, "not_ready", 75),
        (errors.OverloadedError, 429, "overloaded", 75),
        (errors.BodyTooLargeError, 413, "body_too_large", 2),
        (errors.MediaTypeError, 415, "unsupported_media_type", 2),
        (errors.DeadlineError, 504, "deadline_exceeded", 1),
        (errors.JobFailedError, 500, "job_failed", 5),
        (errors.SwapRefusedError, 409, "swap_refused", 1),
    ],
)
def test_what_clients_rely_on(kind, status, code, exit_code):
    assert (kind.status, kind.code, kind.exit_code) == (status, code, exit_code)


@pytest.mark.parametrize(
    ("error", "code", "exit_code", "says"),
    [
        (OSError(errno.ENOSPC, "no space"), "storage_full", 75, "free some disk space"),
        (OSError(errno.EDQUOT, "quota"), "storage_full", 75, "free some disk space"),
        (OSError(errno.EFBIG, "too large"), "storage_full", 75, "free some disk space"),
        (PermissionError(errno.EACCES, "no"), "storage_denied", 3, "let this user"),
        (OSError(errno.EROFS, "read-only"), "storage_denied", 3, "let this user"),
        (OSError(errno.EIO, "input/output error"), "storage_failed", 75, "dmesg"),
        (
            RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "storage_full",
            75,
            "",
        ),
        (RuntimeError("Permission denied (os error 13)"), "storage_denied", 3, "let this user"),
        (ValueError("rubbish"), "storage_failed", 75, "dmesg"),
    ],
)
def test_what_the_file_system_says_is_the_kind_of_the_error(error, code, exit_code, says):
    found = errors.StorageError.of(error, f"writing failed: {error}")
    assert (found.code, found.exit_code, found.status) == (code, exit_code, 507)
    assert says in found.hint and "what was stored before is unchanged" in found.hint
    assert errors.StorageError.of(error, "x", hint="do this").hint == "do this"


@pytest.mark.parametrize("kind", [errors.QueueFullError, errors.NotReadyError, errors.OverloadedError])
def test_what_passes_says_when_to_come_back(kind):
    assert kind("full", retry_after=7).retry_after == 7
    assert kind("full").retry_after > 0
    assert isinstance(kind("full"), errors.TryAgainError)


def test_an_error_says_which_field_and_what_kind():
    error = errors.ConfigError("no", field="algo.clip_high", kind="unknown")
    assert (
        (error.field, error.kind)
        == (error.as_dict()["field"], error.as_dict()["kind"])
        == ("algo.clip_high", "unknown")
    )
    assert str(error) == "no"  # what people read does not change


def test_a_field_error_is_said_of_the_field_under_any_name():
    error = errors.FieldError("{field} is {x}; lower {field}", hint="leave {field} out", field="clip_low", kind="k")
    other = error.renamed("config.clip_epsilon")
    assert (error.message, error.hint) == ("clip_low is {x}; lower clip_low", "leave clip_low out")
    assert other.message == "config.clip_epsilon is {x}; lower config.clip_epsilon"
    assert (other.hint, other.field, other.kind) == ("leave config.clip_epsilon out", "config.clip_epsilon", "k")
    assert other.renamed("clip_low").as_dict() == error.as_dict()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_crosses_processes(kind):
    error = kind("what happened", hint="what to do", **ASKING.get(kind, {}))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and vars(again) == vars(error) and str(again) == str(error)


def test_a_request_error_names_the_field_and_may_have_a_code_of_its_own():
    plain, own = errors.RequestError("no", field="groups[0]"), errors.RequestError("no", code="invalid_json")
    assert (plain.code, plain.field, own.code, own.field) == ("invalid_value", "groups[0]", "invalid_json", None)
    assert errors.RequestError.code == "invalid_value"


@pytest.mark.parametrize(("status", "exit_code"), [(400, 2), (404, 2), (429, 75), (503, 75), (507, 75), (500, 1)])
def test_a_remote_error_is_what_the_server_said(status, exit_code):
    error = errors.RemoteError("no", status=status, code="some_code", hint="do this", request_id="r1")
    assert (error.status, error.code, error.hint, error.request_id) == (status, "some_code", "do this", "r1")
    assert error.exit_code == exit_code
    assert error.as_dict()["code"] == "some_code"
