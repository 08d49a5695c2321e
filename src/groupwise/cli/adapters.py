"""`groupwise adapters ...`: the adapters of a server, or of a store on this machine's disk.

    --url URL                  that server's (so does GROUPWISE_URL, where no store is named)
    --run RUN, --store DIR     the store of a run (its directory or name), or any store
    neither                    the server at http://127.0.0.1:8420 if one answers, else the newest run in runs/

A store that a server uses is changed through the server, which verifies a version before it is active. What was meant
is said on stderr whenever it was not named.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.frame import (
    OPTIONS,
    ApiKey,
    AsJson,
    Debug,
    Url,
    examples,
    open_client,
    print_answer,
    print_table,
    quiet_libraries,
)
from groupwise.cli.output import finite, print_json, print_line, print_pairs, say
from groupwise.errors import AdapterError, AdapterNotFoundError, ConfigError, RemoteError, StorageError
from groupwise.store.dtypes import BY_FORMAT

if TYPE_CHECKING:
    from groupwise.sdk.client import Client
    from groupwise.store.adapters import AdapterStore
    from groupwise.types import PolicyVersion

PROBE_S = 1.0  # a server on this machine answers at once, or is not the one to ask

Run = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="Those of a run (its directory or name), not a server's."),
]
Store = Annotated[Path | None, typer.Option("--store", metavar="DIR", help="A store outside a run.")]
Named = Annotated[str, typer.Argument(metavar="NAME[@N]", help="A version, or a name for its newest one.")]
OnServer = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="A server; default: the one on this machine, if any.")
]

app = typer.Typer(help="Adapters of a server (--url), or of a store on disk (--run, --store).", **OPTIONS)


# ---- of a server or a store ----


@app.command("list", epilog=examples("groupwise adapters list", "groupwise adapters list --run runs/arithmetic-1"))
def list_adapters(
    url: OnServer = None,
    run: Run = None,
    store: Store = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List every adapter, the active version marked."""
    if client := _server(url, api_key, run, store):
        with client:
            listed = client.adapters.list()
        return print_answer(listed) if as_json else _print_adapters(listed, url=client.url)
    opened = _open_store(run, store)
    infos, active, notes = opened.list(), opened.active, opened.notes()
    if as_json:
        versions = [_info_as_json(info, notes.get(info.version)) for info in infos]
        return print_json({"store": str(opened.root), "active": str(active), "versions": versions})
    rows = [("", "version", "step", "parent", "reward", "created", "note" if notes else "")]
    for info in infos:
        mark, note = "*" if info.version == active else "", notes.get(info.version, "")
        reward = _reward(info.metrics)
        rows.append((mark, str(info.version), str(info.step), str(info.parent), reward, info.created, note))
    print_pairs(rows)
    say(f"* is active: {active}; store {opened.root}")


@app.command()
def show(
    name: Named,
    url: OnServer = None,
    run: Run = None,
    store: Store = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show where a version came from, and its files."""
    if client := _server(url, api_key, run, store):
        from groupwise.sdk.types import as_json as dump

        with client:
            described = dump(client.adapters.show(name))
    else:
        opened = _open_store(run, store)
        version = opened.resolve(name)
        path = opened.path(version)
        described = _info_as_json(opened.info(version), opened.notes().get(version))
        described |= {"path": str(path), "active": version == opened.active}
        described["evaluations"] = list(opened.evaluations(version))
    if as_json:
        return print_json(described)
    for key, value in described.items():
        if key == "history":
            print_table([("", "version", "step", "parent", "reward", "created", "", "note"), *map(_history_row, value)])
        elif key == "evaluations":
            print_table(evaluation_rows(value))
        elif key == "notes" or (key == "note" and value is None):
            continue  # of a server they stand behind each version
        else:
            print_line(f"{key:<14} {json.dumps(value) if isinstance(value, dict | list) else value}")


@app.command(epilog=examples('groupwise adapters note arithmetic@110 "good at sums, weak at carries"'))
def note(
    name: Named,
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="One line; an empty one removes the note.", show_default=False)
    ],
    url: OnServer = None,
    run: Run = None,
    store: Store = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Keep a line of text about a version, which `list` and `show` print and the web interface searches."""
    if client := _server(url, api_key, run, store):
        with client:
            return _print_result(client.adapters.note(name, text), "version", as_json=as_json)
    opened = _open_store(run, store)
    version = opened.resolve(name)
    kept = opened.write_note(version, text)
    if as_json:
        return print_json({"version": str(version), "note": kept})
    print(version)


@app.command()
def activate(
    name: Annotated[str, typer.Argument(metavar="NAME[@N]", help="A version, or `base`.")],
    url: OnServer = None,
    run: Run = None,
    store: Store = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a version the active one."""
    if client := _server(url, api_key, run, store):
        with client:
            return _print_result(client.adapters.activate(name), "version", as_json=as_json)
    opened = _open_store(run, store)
    opened.activate(opened.resolve(name))
    _print_active(opened, as_json=as_json)


@app.command()
def rollback(
    url: OnServer = None,
    run: Run = None,
    store: Store = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Go back to the version that was active before."""
    if client := _server(url, api_key, run, store):
        with client:
            return _print_result(client.adapters.rollback(), "version", as_json=as_json)
    opened = _open_store(run, store)
    opened.rollback()
    _print_active(opened, as_json=as_json)


class ExportFormat(StrEnum):
    """The file format that a version is exported to."""

    PEFT = "peft"
    MERGED = "merged"
    GGUF = "gguf"


@app.command(
    epilog=examples(
        "groupwise adapters export arithmetic@110 ./my-adapter",
        "groupwise adapters export arithmetic@110 ./my-model --format merged --dtype bfloat16",
        "groupwise adapters export arithmetic@110 my-model.gguf --format gguf --dtype q8_0",
    )
)
def export(
    name: Named,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="A new directory, of gguf a new file.")],
    format_: Annotated[
        ExportFormat,
        typer.Option(
            "--format", help="peft: the adapter; merged, gguf: the whole model, for transformers or llama.cpp."
        ),
    ] = ExportFormat.PEFT,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of a whole model: auto (as the base's files), float32, bfloat16, float16; of gguf also q8_0.",
            show_default=False,
        ),
    ] = None,
    url: OnServer = None,
    run: Run = None,
    store: Store = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a version to DEST: the adapter as PEFT has it, or merged into its base model as one whole model."""
    if format_ != ExportFormat.PEFT:
        check_dtype(format_, dtype or "auto")
    client = _server(url, api_key, run, store)
    if format_ != ExportFormat.PEFT:
        return _export_model(client, name, dest, format_, dtype or "auto", run=run, store=store, as_json=as_json)
    if dtype is not None:
        raise ConfigError(f"--dtype {dtype} acts with --format merged and gguf only", hint="leave it out")
    directory = dest
    if client:
        with client:
            name, path = _export(client, name, directory)
    else:
        opened, version = _found(name, run, store)
        name, path = str(version), opened.export(version, directory)
    if as_json:
        return print_json({"version": name, "path": str(path)})
    print(path)


# ---- of a server only ----


@app.command()
def delete(
    name: Annotated[str, typer.Argument(metavar="NAME[@N]", help="An adapter with all its versions, or one version.")],
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Delete an adapter of a server, or one version; the active one is refused."""
    with open_client(url, api_key) as client:
        deleted = client.adapters.delete(name)
    if as_json:
        return print_answer(deleted)
    print_line(f"deleted {', '.join(deleted.versions) or deleted.name}")


@app.command(
    epilog=examples(
        "groupwise adapters upload support ./my-peft-adapter", "groupwise adapters upload sums arithmetic@110"
    )
)
def upload(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it.")],
    source: Annotated[
        str,
        typer.Argument(
            metavar="ADAPTER",
            help="A run or RUN@N, a directory as PEFT saves it, or a tar.gz of one.",
            show_default=False,
        ),
    ],
    new_version: Annotated[bool, typer.Option("--new-version", help="Add to an adapter that exists.")] = False,
    any_base: Annotated[bool, typer.Option("--any-base", help="Even if it names another base model.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Give a server an adapter: of a run, or one that PEFT saved."""
    from groupwise.store.locate import find_adapter

    path = Path(source)
    if not path.is_file():
        path = find_adapter(source).directory
    with open_client(url, api_key) as client:
        uploaded = client.adapters.upload(name, path, new_version=new_version, any_base=any_base)
    _print_result(uploaded, "version", as_json=as_json)


@app.command()
def download(
    name: Named,
    target: Annotated[
        Path | None, typer.Argument(metavar="TAR.GZ", help="Default: NAME.tar.gz.", show_default=False)
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write an adapter of a server to a tar.gz that PEFT can load from."""
    with open_client(url, api_key) as client:
        path = client.adapters.download(name, target or Path(f"{name}.tar.gz"))
    if as_json:
        return print_json({"path": str(path), "size_bytes": path.stat().st_size})
    print(path)


@app.command(epilog=examples("groupwise adapters merge math=0.7 code@3=0.3 --output-name both --mode ties"))
def merge(
    sources: Annotated[list[str], typer.Argument(metavar="NAME[@N]=WEIGHT...", help="What to merge.")],
    output_name: Annotated[str, typer.Option(metavar="NAME", help="The adapter to make.")],
    mode: Annotated[str, typer.Option(help="weighted_average, ties or concat.")] = "weighted_average",
    density: Annotated[float | None, typer.Option(help="The fraction that ties keeps; default 0.2.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make one adapter from several, on a server."""
    weights = dict(_weight(source) for source in sources)
    with open_client(url, api_key) as client:
        merged = client.adapters.merge(weights, output_name, mode=mode, density=density)
    _print_result(merged, "version", as_json=as_json)


# ---- which of the two ----


def check_dtype(format_: str, dtype: str) -> None:
    """Raise ConfigError for a type that a whole model is not written in, before anything is loaded."""
    if dtype == "auto" or dtype in BY_FORMAT[format_]:
        return
    hint = f"use one of auto, {', '.join(BY_FORMAT[format_])}"
    if re.fullmatch(r"i?q[2-6]_\w+", dtype.lower()):
        hint += f"; llama.cpp makes it of those: llama-quantize model.gguf small.gguf {dtype.upper()}"
    raise ConfigError(f"a {format_} model cannot be of type {dtype!r}", hint=hint, field="--dtype")


def _server(url: str | None, api_key: str | None, run: str | None, store: Path | None) -> Client | None:
    """Return the server that is meant; None where it is a store."""
    if run is not None or store is not None:
        if url is not None:
            raise ConfigError("both a server and a store are given", hint="give --url, or one of --run and --store")
        return None
    client = open_client(url, api_key)
    if url is None and not os.environ.get("GROUPWISE_URL"):
        if not _answers(client):
            return None
        say(f"server {client.url}")
    return client


def _answers(client: Client) -> bool:
    """Return whether a server is there, without trying again."""
    from groupwise.sdk.client import Client

    try:
        with Client(client.url, retries=0) as probe:
            return bool(probe.health(timeout=PROBE_S).status)
    except RemoteError:
        client.close()
        return False


def _export(client: Client, name: str, directory: Path) -> tuple[str, Path]:
    """Download a version and unpack it, checked, into a new directory."""
    from groupwise.store.archive import read_archive

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise AdapterError(f"{directory} exists and is not an empty directory", hint="give a directory that is new")
    version = client.adapters.show(name).versions[-1]
    with TemporaryDirectory() as scratch:
        archive = client.adapters.download(version, Path(scratch, "adapter.tar.gz"))
        whole = Path(scratch, "adapter")
        whole.mkdir()
        with archive.open("rb") as stream:
            read_archive(stream, whole)
        try:
            shutil.copytree(whole, directory, dirs_exist_ok=True)
        except OSError as error:
            raise StorageError.of(error, f"cannot write {directory}: {error}", hint="name another directory") from error
    return version, directory


def _export_model(
    client: Client | None,
    name: str,
    dest: Path,
    format_: str,
    dtype: str,
    *,
    run: str | None,
    store: Path | None,
    as_json: bool,
) -> None:
    """Merge a version of a server, a store or any run into its base model, which is loaded here."""
    from groupwise.store.export import export_model
    from groupwise.store.locate import TrainedPolicy, find_adapter, find_policy

    quiet_libraries()
    with ExitStack() as stack:
        if client:
            scratch = Path(stack.enter_context(TemporaryDirectory()), "adapter")
            with client:
                of = client.adapters.show(name).history[-1]
                name, _ = _export(client, of.version, scratch)
            located = replace(find_adapter(str(scratch)), base_hash=of.base_hash, quantization=of.quantization)
            policy = TrainedPolicy(model=of.base_model, adapter=located, run_dir=None)
        elif run is not None or store is not None:
            opened = _open_store(run, store)
            version = opened.resolve(name)
            name, policy = str(version), find_policy(str(opened.path(version)))
        else:
            policy = find_policy(name)
            name = str(policy.adapter.version) if policy.adapter else name
        exported = export_model(policy, dest, format=format_, dtype=dtype)
    if exported.note:
        say(exported.note)
    if as_json:
        shown = {"version": name, "path": str(exported.path), "format": format_, "dtype": exported.dtype}
        return print_json(shown | {"base_model": policy.model, "note": exported.note})
    print(exported.path)


def _found(name: str, run: str | None, store: Path | None) -> tuple[AdapterStore, PolicyVersion]:
    """Return the version that is meant, of a run or a store that is named, or of any run, with the store that it is
    in."""
    from groupwise.store.locate import find_policy

    if run is not None or store is not None:
        opened = _open_store(run, store)
        return opened, opened.resolve(name)
    try:
        policy = find_policy(name)
    except AdapterNotFoundError as error:
        error.hint = f"{error.hint}, or a server with --url URL (none answers on this machine)"
        raise
    if policy.adapter is None:
        message = f"{name} trained all parameters, so that there is no adapter; its model is {policy.model}"
        raise AdapterNotFoundError(message, hint="write it for another program: --format merged, or --format gguf")
    if policy.adapter.store is None:
        message = f"{policy.adapter.directory} is an adapter in PEFT's layout already"
        raise AdapterError(message, hint="copy it, or write the whole model: --format merged, or --format gguf")
    return policy.adapter.store, policy.adapter.version


def _open_store(run: str | None, store: Path | None) -> AdapterStore:
    from groupwise.store.locate import open_store

    try:
        opened = open_store(run=run, store=store)
    except AdapterNotFoundError as error:
        if run is None and store is None:
            error.hint = f"{error.hint}, or a server with --url URL (none answers on this machine)"
        raise
    for warning in opened.warnings:
        say(f"warning: {warning}")
    return opened


# ---- what is printed ----


def _print_result(value: Any, what: str, *, as_json: bool) -> None:
    """Print one fact of what a server did, or all."""
    if as_json:
        print_answer(value)
    else:
        print_line(str(getattr(value, what)))


def _print_adapters(listed: Any, *, url: str) -> None:
    noted = any(each.notes for each in listed.available)
    rows = [("", "adapter", "active", "versions", "size", "modified", "note" if noted else "")]
    for each in listed.available:
        mark = "*" if each.active_version else ""
        modified = (each.modified_at or "").rstrip("Z").replace("T", " ")
        numbers = [version.rpartition("@")[2] for version in each.versions]
        span = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else "".join(numbers)
        size, note = f"{each.size_bytes / 2**20:.1f} MiB", each.notes.get(each.versions[-1], "")
        rows.append((mark, each.name, each.active_version or "", span, size, modified, note))
    if listed.available:
        print_table(rows)
    if not listed.available:
        return say(f"no adapters on {url} yet")
    kept = f"; of each, the newest {listed.keep_versions} stay" if listed.keep_versions else ""
    say(f"* is active: {listed.active_version}; server {url}{kept}")


def _reward(metrics: Mapping[str, float]) -> str:
    reward = metrics.get("reward/mean")
    return "" if reward is None else f"{reward:.3f}"


def _history_row(version: Mapping[str, Any]) -> tuple[str, ...]:
    mark = "*" if version["active"] else ""
    texts = (str(version[key]) for key in ("version", "step", "parent"))
    fate = "not kept" if version["surplus"] else ""
    reward, made, note = _reward(version["metrics"]), str(version["created_at"]), version["note"] or ""
    return (mark, *texts, reward, made, fate, note)


def evaluation_rows(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a version's results in suites, a row for each metric."""
    rows = [("evaluated", "metric", "value", "", "samples", "by", "")] if results else []
    for result in results:
        by = f"{result['suite']} {result['release']}"
        how = "chat" if result["chat"] else ""
        for name, metric in result["metrics"].items():
            error = f"± {metric['stderr']:.4f}" if "stderr" in metric else ""
            samples = str(metric.get("samples", ""))
            rows.append((result["created"], name, f"{metric['value']:.4f}", error, samples, by, how))
    return rows


def _weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        return name, float(weight)
    except ValueError:
        raise ConfigError(f"{text!r} is not NAME=WEIGHT", hint="write math=0.7 code@3=0.3") from None


def _info_as_json(info: Any, note: str | None) -> dict[str, Any]:
    return {
        "version": str(info.version),
        "created": info.created,
        "step": info.step,
        "parent": str(info.parent),
        "note": note,
        "base_model": info.base_model,
        "base_hash": info.base_hash,
        "quantization": info.quantization,
        "config_hash": info.config_hash,
        "metrics": {key: finite(value) for key, value in info.metrics.items()},
        "files": {name: size for name, (size, _) in info.files.items()},
    }


def _print_active(store: AdapterStore, *, as_json: bool) -> None:
    if as_json:
        print_json({"store": str(store.root), "active": str(store.active)})
    else:
        print(store.active)
