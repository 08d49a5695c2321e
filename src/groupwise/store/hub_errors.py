"""Turns refusals and timeouts of the Hugging Face hub into one `HubError` each, which says what to do.

The hub's client raises an error of HTTP, of the network below it, or one of its own around either; the error that
counts is found along the chain of causes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from groupwise.errors import GroupwiseError, HubError

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN (https://huggingface.co/settings/tokens)"
_AGAIN = "the same command goes on: what has arrived is not sent again"


@contextmanager
def explained(doing: str, *, repo: str) -> Iterator[None]:
    """Context manager: what goes wrong while `doing` ("pushing to") something with the repository `repo` is raised as a
    HubError. Errors of ours pass."""
    try:
        yield
    except GroupwiseError:
        raise
    except Exception as error:
        raise _meant(error, f"{doing} {repo}") from error


def _meant(error: Exception, doing: str) -> HubError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    chain = list(_causes(error))
    for each in chain:
        if isinstance(each, LocalTokenNotFoundError):
            return HubError(f"{doing} needs a token, and nobody is logged in", hint=LOG_IN, kind="no_token")
        if isinstance(each, OfflineModeIsEnabled):
            hint = "unset HF_HUB_OFFLINE (and TRANSFORMERS_OFFLINE)"
            return HubError(f"{doing} needs the network, and HF_HUB_OFFLINE is set", hint=hint, kind="away")
        if isinstance(each, GatedRepoError):
            hint = f"ask for access on its page, then {LOG_IN}"
            return HubError(f"{doing} was refused: access has to be granted by its owners", hint=hint, kind="refused")
        if isinstance(each, RevisionNotFoundError):
            hint = "name a branch, a tag or a commit that its page lists, or none for the newest"
            return HubError(f"{doing} failed: it has no such revision", hint=hint, kind="not_found")
        if isinstance(each, RepositoryNotFoundError):
            hint = f"check the spelling; for a private one {LOG_IN}"
            return HubError(f"{doing} failed: there is none, or this token may not see it", hint=hint, kind="not_found")
        if isinstance(each, HfHubHTTPError):
            return _refusal(each.response.status_code, each.server_message or str(each), doing)
    for each in chain:
        if isinstance(each, HTTPError | ConnectionError | TimeoutError):
            words = f"{doing} failed: {constants.ENDPOINT} cannot be reached, or the connection was cut ({each})"
            return HubError(words, hint=f"when the network is back, {_AGAIN}", kind="away")
    return HubError(f"{doing} failed: {type(error).__name__}: {error}", hint=_AGAIN)


def _refusal(status: int, said: str, doing: str) -> HubError:
    """Return the error for an answer of the hub with this status."""
    said = " ".join(said.split())[:300]
    if status == 401:
        return HubError(f"{doing} was refused (401): the token is not valid", hint=LOG_IN, kind="refused")
    if status == 403:
        hint = "use a token with the permission `write` for this namespace, or name one of your own"
        return HubError(f"{doing} was refused (403): the token may not write there. {said}", hint=hint, kind="refused")
    if status == 429 or status >= 500:
        return HubError(f"{doing} failed: the hub answered {status}. {said}", hint=f"later, {_AGAIN}", kind="away")
    return HubError(f"{doing} failed: the hub answered {status}. {said}", hint="see https://status.huggingface.co")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, what it was raised from, and so on."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
