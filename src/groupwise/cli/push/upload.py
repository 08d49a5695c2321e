"""Sends repositories to the Hugging Face hub, by its own client: private ones unless they are to be public.

Before anything is made there it is asked whose token this is, and whether each name is free, or of a repository that
may be written to. The files of one repository go up in one commit: it has all of them or none. Whatever was sent before
an interruption is there already when the command is given again, and files that did not change make no commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.cli.push.contents import Repository
from groupwise.errors import HubError
from groupwise.store.hub_errors import LOG_IN, explained

if TYPE_CHECKING:
    from huggingface_hub import HfApi


class Hub:
    """The hub with the token of this machine's user (HF_TOKEN, or `hf auth login`)."""

    def __init__(self) -> None:
        from huggingface_hub import HfApi, constants

        self._api: HfApi = HfApi(endpoint=constants.ENDPOINT)

    def check_owner(self, repo: str) -> None:
        """Raise HubError unless the token is valid, may write, and this user or an organisation of theirs owns what
        `repo` (OWNER/NAME) names."""
        from huggingface_hub import get_token

        if get_token() is None:
            raise HubError(f"pushing to {repo} needs a token, and nobody is logged in", hint=LOG_IN, kind="no_token")
        with explained("pushing to", repo=repo):
            user = self._api.whoami()
        owners = [user["name"], *(each["name"] for each in user.get("orgs") or ())]
        owner, name = repo.split("/")
        if owner not in owners:
            raise HubError(
                f"pushing to {repo} is not for {user['name']}, whose token this is: {owner} is somebody else",
                hint=f"write one of {', '.join(f'{each}/{name}' for each in owners[:5])}",
                field="--to",
                kind="refused",
            )
        role = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
        if role == "read":
            raise HubError(
                f"pushing to {repo} needs a token that may write, and this one may only read",
                hint=LOG_IN,
                kind="refused",
            )

    def license_of(self, base: str) -> str | None:
        """Return the licence that the card of a model on the hub names; None where it names none or cannot be read."""
        with explained("reading the licence of", repo=base):
            try:
                card = self._api.model_info(base).card_data
            except Exception as error:
                if getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404):
                    return None
                raise
        return None if card is None else card.get("license")

    def push(self, repository: Repository, *, public: bool, note: Callable[[str], None]) -> str:
        """Make the repository if need be, send its files, and return its address. Raises HubError."""
        from huggingface_hub import CommitOperationAdd

        repo, kind = repository.name, repository.kind
        with explained(f"pushing the {kind}", repo=repo):
            self._made(repository, public=public, note=note)
            added = [
                CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(file) if isinstance(file, Path) else file)
                for name, file in sorted(repository.files.items())
            ]
            self._api.create_commit(repo, added, repo_type=kind, commit_message=repository.message)
        prefix = "" if kind == "model" else f"{kind}s/"
        return f"{self._api.endpoint}/{prefix}{repo}"

    def _made(self, repository: Repository, *, public: bool, note: Callable[[str], None]) -> None:
        """Make the repository, or see that the one of this name may get the files."""
        from huggingface_hub.errors import RepositoryNotFoundError

        repo, kind = repository.name, repository.kind
        try:
            there = self._api.repo_info(repo, repo_type=kind)
        except RepositoryNotFoundError:
            sdk = "gradio" if kind == "space" else None
            self._api.create_repo(repo, repo_type=kind, private=not public, exist_ok=True, space_sdk=sdk)
            return
        if not public and not there.private:
            raise HubError(
                f"the {kind} {repo} is there and everybody sees it, and what is pushed is private unless you say so",
                hint="add --public, name another with --to, or make that one private on its page",
                field="--to",
                kind="taken",
            )
        if public and there.private:
            note(f"the {kind} {repo} is private and stays so; its page can make it public")
        there_besides = {each.rfilename for each in getattr(there, "siblings", None) or ()}
        if others := there_besides - {*repository.files, ".gitattributes"}:
            note(f"the {kind} {repo} keeps what else it has: {', '.join(_few(sorted(others)))}")


def _few(names: Sequence[str], most: int = 6) -> list[str]:
    return [*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else [])]
