"""Shared by all commands: errors as messages and exit codes, `--json`, `--debug`, `--url`, tables."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len
from typer.core import TyperGroup

from groupwise.cli.output import print_json, print_line, say
from groupwise.errors import GroupwiseError, Interrupted, StorageError, StorageFullError
from groupwise.tasks.transcript import visible

if TYPE_CHECKING:
    from groupwise.sdk.client import Client

EXIT_CODES = (
    "Exit codes: 0 done; 1 the run failed; 2 the configuration or the command line is wrong; 3 the model or something "
    "else that start-up needs is missing; 4 the server refuses the API key, or the hub the token; 5 the job failed "
    "or was cancelled; 75 temporary, such as a full disk or a server that is away: try again; 130 interrupted, with "
    "everything saved."
)


ELSEWHERE = {
    "sft": "groupwise run FILE with `kind: sft` learns from examples",
    "dpo": "groupwise run FILE with `kind: dpo` learns preference pairs",
    "grpo": "groupwise run FILE",
    "finetune": "groupwise run FILE, or groupwise demo for a first look",
    "resume": "groupwise run FILE resume=auto",
    "runs": "groupwise ui runs/* lists the runs of this directory; groupwise health RUN looks at one",
    "compare": "groupwise report RUN --compare RUN, or groupwise eval FILE --adapter A --against B",
    "status": "groupwise health RUN of a run, groupwise health of a server, groupwise train status JOB of a job",
    "upload": "groupwise push RUN --to OWNER/NAME",
    "export": "groupwise adapters export NAME DIR --run RUN",
    "merge": "groupwise adapters export NAME DIR --run RUN --format merged",
    "generate": "groupwise chat RUN, or groupwise rollouts sample on a server",
    "evaluate": "groupwise eval FILE --adapter RUN",
    "lint": "groupwise rewards lint MODULE:FUNCTION, or groupwise env check MODULE:CLASS",
    "new": "groupwise init",
    "vllm": "groupwise vllm-serve FILE",
    "convert": "groupwise import FILE",
    "version": "--version behind groupwise, or groupwise doctor",
    "help": "groupwise --help, and groupwise COMMAND --help",
    "score": "groupwise rewards lint MODULE:FUNCTION, or groupwise check FILE",
}  # commands of others, and what does the same here
_SAME = {
    "list": "runs", "ls": "runs", "publish": "upload", "push-to-hub": "upload", "hub": "upload",
    "inference": "generate", "infer": "generate", "predict": "generate",
    "test": "evaluate", "create": "new", "continue": "resume", "rl": "grpo", "fine-tune": "finetune", "diff": "compare",
    "ps": "runs", "reward": "score", "test-reward": "score",
}  # fmt: skip


class CommandGroup(TyperGroup):
    """Turns errors into messages and exit codes, and says what does what an unknown command asks for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command; fails as click does where there is none, in our words where these are known."""
        word = args[0].lower() if args else ""
        if word and self.get_command(ctx, args[0]) is None:
            said = ELSEWHERE.get(_SAME.get(word, word)) if ctx.parent is None else None
            if word.endswith((".yaml", ".yml", ".toml")):
                said = f"groupwise run {args[0]} trains as a file says"
            if said is not None:
                ctx.fail(f"There is no command {args[0]!r}: {said}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
        try:
            return self._invoked(ctx)
        except GroupwiseError as error:
            if ctx.meta.get("debug"):
                traceback.print_exc()
            else:
                say(f"error: {error}")
            request_id = getattr(error, "request_id", None)  # of a RemoteError
            if request_id:
                say(f"  (request id {request_id})")
            if ctx.meta.get("as_json"):
                with suppress(OSError):  # which may be what the error is about
                    print_json({"error": error.as_dict() | ({"request_id": request_id} if request_id else {})})
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            say("stopped")
            raise typer.Exit(Interrupted.exit_code) from None

    def _invoked(self, ctx: typer.Context) -> Any:
        """Raises StorageFullError also where nobody was asked before there was no room, as on stdout."""
        try:
            return super().invoke(ctx)
        except StorageError:
            raise
        except OSError as error:
            if isinstance(full := StorageError.of(error, f"cannot write: {error}"), StorageFullError):
                raise full from error
            raise


def _remember(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Tell `CommandGroup` of an option that concerns errors."""
    context.meta[parameter.name] = value
    return value


def examples(*lines: str) -> str:
    """Return a command's epilogue."""
    return "\n\n".join(("Examples:", *lines))


def print_answer(value: Any) -> None:
    """Print what a server answered, in its own words, as JSON."""
    from groupwise.sdk.types import as_json

    print_json(as_json(value))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, never cut or folded, so that ids and names can be copied at any width of the terminal."""
    widths = [max(cell_len(visible(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            visible(cell) + " " * (width - cell_len(visible(cell))) for cell, width in zip(row, widths, strict=True)
        ]
        print_line("  ".join(cells).rstrip())


def open_client(url: str | None, api_key: str | None) -> Client:
    """Return the client of the server that is meant; what it waits for is said on stderr."""
    from groupwise.sdk.client import Client

    return Client(url, api_key=api_key, note=say)


def quiet_libraries() -> None:
    """Show only warnings of the libraries, and the progress of downloads."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.", callback=_remember)]

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_remember)]

Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="The same as KEY=VALUE; may be repeated.")
]

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="The server; default: GROUPWISE_URL, or http://127.0.0.1:8420."),
]

ApiKey = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", help="The server's API key; default: GROUPWISE_API_KEY.")
]

OPTIONS: dict[str, Any] = {
    "cls": CommandGroup,
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
