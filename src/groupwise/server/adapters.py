"""/v1/adapters: list, show, note, activate, roll back, delete, upload, download and merge adapters.

A path's `{name}` is "name", which stands for all its versions or for the one that it would be served by, or "name@3".
`load` and `unload` are older words for activating a version and the base model. An uploaded or merged adapter becomes a
version only when the engine has loaded it over this base model and computed with it.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from groupwise.errors import (
    AdapterError,
    AdapterNotFoundError,
    ConflictError,
    EngineError,
    MediaTypeError,
    NotReadyError,
    RequestError,
    StorageError,
    SwapRefusedError,
)
from groupwise.model.load import LoadedModel
from groupwise.sdk.types import (
    AdapterDeleted,
    AdapterDetail,
    AdapterList,
    AdapterLoaded,
    AdapterMerged,
    AdapterNoted,
    AdapterSummary,
    AdapterUnloaded,
    AdapterUploaded,
    AdapterVersion,
)
from groupwise.server.bodies import check_content_type, read_body
from groupwise.server.policies import AdapterInUseError, check_free_name
from groupwise.server.quotas import TenantFullError
from groupwise.server.retention import needing, surplus
from groupwise.server.schema_adapters import ActivateRequest, LoadRequest, MergeRequest, NoteRequest
from groupwise.server.state import given
from groupwise.server.storage import check_room
from groupwise.server.wire import documented
from groupwise.store import files
from groupwise.store.archive import read_archive, stream_archive
from groupwise.store.feedback import KEEP_TRANSITIONS
from groupwise.store.files import AdapterInfo, Provenance
from groupwise.store.merge import DENSITY, MergeMode, MergeReport, WeightedAdapter, merge_adapters
from groupwise.types import BASE, PolicyVersion

if TYPE_CHECKING:
    from groupwise.config.serve import ServeConfig
    from groupwise.server.policies import Policies
    from groupwise.store.adapters import AdapterStore
    from groupwise.store.feedback import FeedbackLog
    from groupwise.store.ledger import Ledger

MERGE_NOTE = "merge.json"  # beside a merged version's weights: what it was made of

_ACTIVATING = (AdapterError, AdapterNotFoundError, SwapRefusedError, StorageError, EngineError, NotReadyError)
_ADDING = (AdapterError, ConflictError, TenantFullError, StorageError)
_FIELDS = {
    "name": {"type": "string", "description": "The adapter's name."},
    "archive": {
        "type": "string",
        "format": "binary",
        "description": "tar.gz of adapter_config.json and adapter_model.safetensors, as PEFT saves them.",
    },
    "new_version": {"type": "string", "enum": ["true"], "description": "Add a version to an adapter that exists."},
    "any_base": {
        "type": "string",
        "enum": ["true"],
        "description": "Take it although its base_model_name_or_path names another model than the one that is served.",
    },
}
_FORM = {"type": "object", "required": ["name", "archive"], "properties": _FIELDS}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
_FORM_HINT = "POST multipart/form-data with the fields name and archive (a tar.gz)"
_DOWNLOAD = documented(errors=[AdapterError, AdapterNotFoundError])
_DOWNLOAD["responses"][200] = {"description": "The tar.gz.", "content": {"application/gzip": {}}}

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])


@dataclass(frozen=True, kw_only=True)
class AdapterParts:
    """The parts of a server that these routes use."""

    config: ServeConfig
    base: LoadedModel
    store: AdapterStore
    ledger: Ledger
    policies: Policies
    feedback: FeedbackLog


Adapters = Annotated[AdapterParts, given(AdapterParts)]


# ---- what there is ----


@router.get("", **documented(answer=AdapterList))
def list_adapters(parts: Adapters) -> AdapterList:
    """List every adapter, its versions, and which one is active."""
    active = parts.policies.active
    notes = parts.store.notes()
    by_name: dict[str, list[AdapterInfo]] = {}
    for info in parts.store.list():
        by_name.setdefault(info.version.name, []).append(info)
    return AdapterList(
        active=None if active.is_base else active.name,
        active_version=str(active),
        keep_versions=parts.config.keep_versions,
        available=[AdapterSummary(**_summary(infos, active, notes)) for infos in by_name.values()],
    )


@router.get("/{name}", **documented(answer=AdapterDetail, errors=[AdapterError, AdapterNotFoundError]))
def show_adapter(name: str, parts: Adapters) -> AdapterDetail:
    """Show one adapter with the provenance and metrics of its versions."""
    active, versions = parts.policies.active, _versions(parts, name)
    every: list[AdapterInfo] = []
    for version in parts.store.versions(versions[0].name):
        with suppress(AdapterError, AdapterNotFoundError):  # damaged, and set aside just now; or deleted
            every.append(parts.store.info(version))
    infos = [info for info in every if info.version in versions]
    if not infos:
        raise AdapterNotFoundError(f"there is no undamaged version of {name!r}")
    old = surplus(every, keep=parts.config.keep_versions)
    notes, judged = parts.store.notes(), _held_out(parts.feedback)
    history = [
        _history(
            info, active, notes.get(info.version), surplus=info.version in old, reward=judged.get(str(info.version))
        )
        for info in infos
    ]
    return AdapterDetail(**_summary(infos, active, notes), history=history)


def _held_out(book: FeedbackLog) -> dict[str, float]:
    """Return the reward on the gate's held-out prompts of each version that it judged, by name and number."""
    judged = reversed(book.transitions(limit=KEEP_TRANSITIONS, kinds=("gate_passed", "gate_refused")))
    return {each.data["version"]: each.data["reward"] for each in judged if "reward" in each.data}


def _summary(infos: Sequence[AdapterInfo], active: PolicyVersion, notes: Mapping[PolicyVersion, str]) -> dict[str, Any]:
    newest = infos[-1]
    return {
        "name": newest.version.name,
        "has_config": files.CONFIG in newest.files,
        "has_weights": files.WEIGHTS in newest.files,
        "size_bytes": _size(newest),
        "modified_at": datetime.fromisoformat(newest.created).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "files": sorted(newest.files),
        "versions": [str(info.version) for info in infos],
        "active_version": str(active) if active.name == newest.version.name else None,
        "notes": {str(info.version): notes[info.version] for info in infos if info.version in notes},
    }


def _history(
    info: AdapterInfo, active: PolicyVersion, note: str | None, *, surplus: bool, reward: float | None
) -> AdapterVersion:
    return AdapterVersion(
        version=str(info.version),
        number=info.version.number,
        active=info.version == active,
        created_at=info.created,
        size_bytes=_size(info),
        base_model=info.base_model,
        base_hash=info.base_hash,
        quantization=info.quantization,
        parent=str(info.parent),
        step=info.step,
        job_id=info.job,
        unhealthy=info.unhealthy,
        surplus=surplus,
        note=note,
        held_out=reward,
        metrics={key: value for key, value in info.metrics.items() if math.isfinite(value)},
    )


def _size(info: AdapterInfo) -> int:
    return sum(size for size, _ in info.files.values())


def _versions(parts: AdapterParts, text: str) -> tuple[PolicyVersion, ...]:
    """Return what a path names: one version, or all of an adapter. Raises AdapterError for what cannot be a name."""
    name, at, _ = text.partition("@")
    files.check_name(name)
    versions = () if at else parts.store.versions(name)
    return versions or (parts.policies.resolve(adapter=text),)


# ---- what is written about them ----


@router.put(
    "/{name}/notes",
    **documented(NoteRequest, AdapterNoted, errors=[AdapterError, AdapterNotFoundError, StorageError]),
)
async def write_note(name: str, request: Request, parts: Adapters) -> AdapterNoted:
    """Keep one line of text about a version, in place of the one before; "name" alone is its newest. The files of
    the version do not change."""
    body = await read_body(request, NoteRequest)
    files.check_name(name.partition("@")[0])
    version = parts.store.newest(name) or parts.policies.resolve(adapter=name)
    note = await asyncio.to_thread(parts.store.write_note, version, body.note)
    return AdapterNoted(version=str(version), note=note)


# ---- which one answers ----


@router.post("/load", **documented(LoadRequest, AdapterLoaded, errors=_ACTIVATING))
async def load_adapter(request: Request, parts: Adapters) -> AdapterLoaded:
    """Make an adapter's newest version, or the version that `name` names, the active one."""
    body = await read_body(request, LoadRequest)
    version = await _activate(parts, body.name)
    request.state.things = {"version": str(version)}
    return AdapterLoaded(status="loaded", name=version.name, version=str(version))


@router.post("/unload", **documented(answer=AdapterUnloaded, errors=[StorageError]))
async def unload_adapter(parts: Adapters) -> AdapterUnloaded:
    """Make the base model active. Requests that are being answered end on the version they began on."""
    await _activate(parts, BASE)
    return AdapterUnloaded()


@router.post("/{name}/activate", **documented(ActivateRequest, AdapterLoaded, errors=_ACTIVATING, optional_body=True))
async def activate_adapter(name: str, request: Request, parts: Adapters) -> AdapterLoaded:
    """Load a version, verify it, and let it answer the requests that name no adapter. If it cannot be verified the one
    that was active still is."""
    body = await read_body(request, ActivateRequest, optional=True)
    if body.version is not None and (name == BASE or "@" in name):
        raise RequestError(f"the path says {name[:80]!r}; it has no version {body.version}", field="version")
    version = await _activate(parts, name if body.version is None else f"{name}@{body.version}")
    return AdapterLoaded(status="activated", name=version.name, version=str(version))


@router.post("/rollback", **documented(answer=AdapterLoaded, errors=_ACTIVATING))
async def roll_back(parts: Adapters) -> AdapterLoaded:
    """Go back to what was active before."""
    version = await parts.policies.rollback()
    return AdapterLoaded(status="rolled_back", name=version.name, version=str(version))


async def _activate(parts: AdapterParts, text: str) -> PolicyVersion:
    """Activate a version; a name alone means its newest version that is not unhealthy."""
    if text != BASE:
        files.check_name(text.partition("@")[0])
    version = parts.store.newest(text) or parts.policies.resolve(adapter=text)
    await parts.policies.swap(version)
    return version


# ---- removing ----


@router.delete(
    "/{name}", **documented(answer=AdapterDeleted, errors=[AdapterError, AdapterNotFoundError, AdapterInUseError])
)
async def delete_adapter(name: str, parts: Adapters) -> AdapterDeleted:
    """Delete one version, or all of an adapter. Refused while one is active, answers a request, or is what a job that
    has not ended begins from."""
    versions = _versions(parts, name)
    await asyncio.to_thread(_check_no_job_needs, parts, versions)
    await parts.policies.delete(versions)
    return AdapterDeleted(name=name, versions=[str(version) for version in versions])


def _check_no_job_needs(parts: AdapterParts, versions: Sequence[PolicyVersion]) -> None:
    job = needing(parts.ledger.unfinished(), versions, parts.store)
    if job is not None:
        shown = ", ".join(map(str, versions[-3:]))
        raise AdapterInUseError(
            f"{shown} cannot be deleted: job {job.id} ({job.state}) needs it",
            hint=f"wait until the job has ended, or cancel it: POST /v1/train/cancel/{job.id}",
        )


# ---- in and out ----


@router.post("/upload", **documented(answer=AdapterUploaded, errors=(*_ADDING, MediaTypeError)), openapi_extra=_UPLOAD)
async def upload_adapter(request: Request, parts: Adapters) -> AdapterUploaded:
    """Add an adapter that PEFT saved, as a tar.gz. It must be plain LoRA that fits this base model."""
    async with _upload(request) as upload:
        version = await asyncio.to_thread(_import, parts, upload)
    request.state.things = {"version": str(version)}
    info = parts.store.info(version)
    return AdapterUploaded(name=version.name, version=str(version), size_bytes=_size(info), files=sorted(info.files))


class _Upload(NamedTuple):
    name: str
    archive: BinaryIO
    new_version: bool
    any_base: bool


@asynccontextmanager
async def _upload(request: Request) -> AsyncIterator[_Upload]:
    """Yield the form, whose archive waits in a temporary file. The guard counts its bytes."""
    check_content_type(request, wanted="multipart/form-data")
    with files.writing("receiving an upload"):
        try:
            form = await request.form(max_files=1, max_fields=len(_FIELDS), max_part_size=1024)
        except HTTPException as error:
            raise RequestError(f"the form cannot be read: {error.detail}", hint=_FORM_HINT) from error
    try:
        if unknown := [field for field in form if field not in _FIELDS]:
            raise RequestError(f"the form has an unknown field {unknown[0][:64]!r}", hint=_FORM_HINT)
        (name, *names), (archive, *archives), *flags = ([*form.getlist(field), None] for field in _FIELDS)
        if not isinstance(name, str) or names != [None]:
            raise RequestError("the form has no text 'name', or several", hint=_FORM_HINT, field="name")
        if not isinstance(archive, UploadFile) or archives != [None]:
            raise RequestError("the form has no file 'archive', or several", hint=_FORM_HINT, field="archive")
        for field, flag in zip(("new_version", "any_base"), flags, strict=True):
            if flag not in ([None], ["true", None], ["false", None]):
                raise RequestError(f"{field} is neither 'true' nor 'false'", hint=_FORM_HINT, field=field)
        yield _Upload(name, archive.file, *(flag[0] == "true" for flag in flags))
    finally:
        await form.close()


def _import(parts: AdapterParts, upload: _Upload) -> PolicyVersion:
    files.check_name(upload.name)

    def write(directory: Path) -> None:
        read_archive(upload.archive, directory)
        if not upload.any_base:
            _check_made_for(directory, parts.base)
        _check_modules(parts.base, directory)
        parts.policies.verify_files(directory)

    return _publish(parts, upload.name, write, again=upload.new_version)


def _check_made_for(directory: Path, base: LoadedModel) -> None:
    """Raise AdapterError if the adapter says that it was trained on another model. Only the models' own names count: an
    owner, a folder or the cache's revision before or after it says nothing."""
    made_for = json.loads((directory / files.CONFIG).read_bytes()).get("base_model_name_or_path")
    served = [_model_name(str(name)) for name in (base.name, base.model.config.name_or_path) if name]
    if isinstance(made_for, str) and made_for and _model_name(made_for).casefold() not in map(str.casefold, served):
        raise AdapterError(
            f"{files.CONFIG}: the adapter was made for {_model_name(made_for)[:80]!r}; {served[0]!r} is served",
            hint="serve the model that it was trained on; if it is the same one by another name, send any_base=true",
        )


def _model_name(text: str) -> str:
    """Return the last part of "owner/name" or of a path; of "models--owner--name/snapshots/revision" in a cache:
    name."""
    *_, last = parts = re.split(r"[/\\]+", text.strip().rstrip("/\\")) or [""]
    cached = [part for part in parts if part.startswith("models--")]
    return cached[-1].split("--")[-1] if cached else last


def _check_modules(base: LoadedModel, directory: Path) -> None:
    """Raise AdapterError if the model has not every module of the adapter: what is loaded is then no larger than the
    model asks for, and loading keeps other requests waiting."""
    modules = {name for name, _ in base.model.named_modules()}
    if strange := sorted(set(files.adapted_names(directory)) - modules):
        more = f" and {len(strange) - 1:,} more modules" if len(strange) > 1 else ""
        raise AdapterError(
            f"the adapter targets {strange[0][:120]!r}{more}, which this model has not",
            hint="the adapter was trained on another base model",
        )


@router.get("/{name}/download", **_DOWNLOAD)
async def download_adapter(name: str, parts: Adapters) -> StreamingResponse:
    """Send a version as a tar.gz that `peft` loads once it is unpacked, and that `upload` takes."""
    files.check_name(name.partition("@")[0])
    version = parts.policies.resolve(adapter=name)
    top = str(version) if "@" in name else name
    archive = await asyncio.to_thread(lambda: stream_archive(parts.store.path(version), top=top))
    headers = {"content-disposition": f'attachment; filename="{top}.tar.gz"', "x-adapter-version": str(version)}
    return StreamingResponse(archive, media_type="application/gzip", headers=headers)


# ---- merging ----


@router.post("/merge", **documented(MergeRequest, AdapterMerged, errors=(*_ADDING, AdapterNotFoundError)))
async def merge(request: Request, parts: Adapters) -> AdapterMerged:
    """Make one adapter of several: their weighted average, their sum (`concat`), or what they agree on (`ties`). Its
    rank is the sum of theirs, at which averages and sums are exact."""
    body = await read_body(request, MergeRequest)
    sources: list[tuple[PolicyVersion, float]] = []
    for source in body.sources:
        files.check_name(source.name.partition("@")[0])
        sources.append((parts.policies.resolve(adapter=source.name), source.weight))
    version, report = await asyncio.to_thread(_merge, parts, body, sources)
    request.state.things = {"version": str(version)}
    return AdapterMerged(
        output_name=version.name,
        version=str(version),
        mode=body.mode,
        sources=[{"name": source.name, "weight": source.weight} for source in body.sources],
        num_tensors=report.tensors,
        density=None if body.mode != "ties" else body.density or DENSITY,
    )


def _merge(
    parts: AdapterParts, body: MergeRequest, sources: Sequence[tuple[PolicyVersion, float]]
) -> tuple[PolicyVersion, MergeReport]:
    reports: list[MergeReport] = []

    def write(directory: Path) -> None:
        for version, _ in sources:
            parts.store.check_base(version, parts.base.hash)
        merged = [WeightedAdapter(parts.store.path(version), weight) for version, weight in sources]
        report = merge_adapters(merged, directory, mode=MergeMode(body.mode), density=body.density)
        made_of = [{"version": str(version), "weight": weight} for version, weight in sources]
        note = {"mode": body.mode, "density": body.density, "sources": made_of, **asdict(report)}
        (directory / MERGE_NOTE).write_text(json.dumps(note, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        parts.policies.verify_files(directory)
        reports.append(report)

    return _publish(parts, body.output_name, write, again=False), reports[0]


# ---- new versions ----


def _publish(parts: AdapterParts, name: str, write: Callable[[Path], None], *, again: bool) -> PolicyVersion:
    """Publish what `write` makes over this base model. Raises ConflictError unless the name is free, or `again`."""

    def admit() -> None:
        if parts.store.versions(name) and not again:
            raise ConflictError(
                f"there is an adapter {name!r} already",
                hint="choose another name; an upload with new_version=true adds a version",
            )

    check_free_name(name, served_name=parts.config.served_name)
    admit()
    check_room(parts.store.root, parts.config.min_free_bytes, what="adapters")
    info = Provenance(base_model=parts.base.name, base_hash=parts.base.hash, quantization=parts.base.quantization)
    return parts.store.publish(name, write, info=info, admit=admit)
