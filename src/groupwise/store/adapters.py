"""The versioned adapter store: immutable versions, one of which is active.

    <root>/math/v000012/     version math@12, never changed once it has this name
    <root>/.state.json       the activations, oldest first (the last is active), and the numbers that must not come back
    <root>/.staging-*/       versions being written; their writer holds an flock on the directory
    <root>/.evaluations/     math@12.json: a version's results in public suites, oldest first
    <root>/.notes.json       users' notes on versions, in a separate file, so that a note changes no byte of a version
    <root>/.refused/         why versions do not go live, a file each (`AdapterStore.refuse`)
    <root>/.optimizer/       math/v000012/: AdamW's moments of the job that made math@12, with which the next job of
                             this name continues; only of the newest version that has any. Removed with the version
    <root>/.quarantine/      damaged versions, each with the reason
    <root>/.lock             flock: held for short moments to assign a number, or to move or remove a version

Publishing is: write into staging, check, fsync every file, then one rename to the next number under the lock, fsync of
the parent. A reader therefore sees all of a version or none of it, and a kill at any point leaves at most a staging
directory, which the next start sweeps. Any number of processes may use one store on one local file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from groupwise.errors import AdapterError, AdapterNotFoundError, InUseError, StorageError
from groupwise.store import faults, files
from groupwise.store.files import AdapterInfo, Provenance
from groupwise.store.unchanged import Unchanged
from groupwise.types import BASE, PolicyVersion

MAX_ACTIVATIONS = 256  # how far back rollback can go
MAX_NOTE = 500  # characters
REFUSED, MOMENTS = ".refused", ".optimizer"

_VERSION = re.compile(r"v([0-9]{6,12})")


@dataclass(frozen=True)
class _State:
    """The contents of `.state.json`. `retired` maps a name to the highest number that is gone: numbers are never given
    out twice."""

    activations: tuple[PolicyVersion, ...] = ()
    retired: Mapping[str, int] = field(default_factory=dict)

    def without(self, version: PolicyVersion) -> _State:
        activations: list[PolicyVersion] = []
        for entry in self.activations:
            if entry != version and activations[-1:] != [entry]:
                activations.append(entry)
        number = max(version.number, self.retired.get(version.name, 0))
        return _State(tuple(activations), {**self.retired, version.name: number})


def names_in(root: Path) -> list[str]:
    """Return the adapters that have a version in a store, sorted, without opening it, which repairs it. Raises
    StorageError if it cannot be read."""
    found = list[str]()
    with files.writing(f"reading the adapter store {root}"), suppress(FileNotFoundError):
        for name in filter(files.is_name, os.listdir(root)):
            with suppress(FileNotFoundError, NotADirectoryError):  # deleted just now
                found += [name] if any(map(_VERSION.fullmatch, os.listdir(root / name))) else []
    return sorted(found)


class AdapterStore:
    """A directory of adapter versions. `warnings` says what the last recovery, or a damaged version, changed.

    Raises StorageError when something cannot be written; what was published before is then untouched.
    """

    def __init__(self, root: Path | str):
        self.root = Path(root)
        self.warnings: list[str] = []
        self._verified: set[PolicyVersion] = set()
        self._health: dict[PolicyVersion, str | None] = {}  # what `unhealthy` has read
        self._jobs: dict[str, dict[PolicyVersion, str | None]] = {}  # what `version_of_job` has read, by adapter
        self._lists, self._infos = Unchanged[tuple[PolicyVersion, ...]](), Unchanged[AdapterInfo]()
        self._notes = Unchanged[Mapping[PolicyVersion, str]]()
        with files.writing(f"opening the adapter store {self.root}"):
            self.root.mkdir(parents=True, exist_ok=True)
            self.recover()

    # --- reading ---

    def names(self) -> tuple[str, ...]:
        """Return the adapters that have a version, sorted. Raises StorageError if the store cannot be read."""
        with files.writing(f"reading the adapter store {self.root}"):
            return tuple(sorted(entry for entry in os.listdir(self.root) if self.versions(entry)))

    def versions(self, name: str) -> tuple[PolicyVersion, ...]:
        """Return the versions of one adapter, oldest first; empty if there is no such adapter. Raises as `names`."""
        if not files.is_name(name):
            return ()
        with files.writing(f"reading the adapter {name!r}"):
            try:
                return self._lists.get(f"{self.root}/{name}", lambda: self._listed(name))
            except (FileNotFoundError, NotADirectoryError):
                return ()

    def _listed(self, name: str) -> tuple[PolicyVersion, ...]:
        matches = [_VERSION.fullmatch(entry) for entry in os.listdir(self.root / name)]
        found = (PolicyVersion(name, int(match[1])) for match in matches if match)
        return tuple(sorted(version for version in found if self._directory(version).exists()))

    def list(self) -> tuple[AdapterInfo, ...]:
        """Return every version with its provenance, by name, then number. A damaged one is quarantined and left out."""
        infos = []
        with files.writing(f"reading the adapter store {self.root}"):
            names = sorted(os.listdir(self.root))
        for version in (version for name in names for version in self.versions(name)):
            try:
                infos.append(self.info(version))
            except (AdapterError, AdapterNotFoundError):  # set aside just now (see warnings), or deleted just now
                continue
        return tuple(infos)

    def info(self, version: PolicyVersion) -> AdapterInfo:
        """Return where a version came from; `unhealthy` as of `unhealthy`. Raises AdapterNotFoundError, or AdapterError
        if it is damaged."""
        if version.is_base or not files.is_name(version.name):
            self._require(version)
        try:
            info = self._read_info(version)
            refused = None if info.unhealthy else self.refused(version)
            return info if refused is None else replace(info, unhealthy=refused)
        except AdapterError as error:
            raise self._set_aside(version, error.message) from error

    def _read_info(self, version: PolicyVersion) -> AdapterInfo:
        def read() -> AdapterInfo:
            return files.read_info(self._directory(version), version=version)

        with files.writing(f"reading {version}"):
            try:
                return self._infos.get(self._sidecar(version), read)
            except (FileNotFoundError, NotADirectoryError):
                self._require(version)
                return read()

    def path(self, version: PolicyVersion) -> Path:
        """Return the version's directory, in PEFT's layout. Its sha256s are checked the first time this process asks.

        Raises AdapterNotFoundError, or AdapterError if the version is damaged; it is then in quarantine.
        """
        directory = self._require(version)
        with files.writing(f"reading {version}"):
            damage = self._find_damage(version)
        if damage:
            raise self._set_aside(version, damage)
        return directory

    @contextmanager
    def held(self, version: PolicyVersion) -> Iterator[Path]:
        """Yield the version's directory, which no process prunes or deletes during the block. Raises as `path`."""
        directory = self._require(version)
        with ExitStack() as stack:
            try:
                with files.writing(f"reading {version}"):
                    stack.enter_context(files.in_use(directory))
            except StorageError:
                self._require(version)  # removed just now?
                raise
            yield self.path(version)

    def unhealthy(self, version: PolicyVersion) -> str | None:
        """Return why the adapter's name does not mean this version: the health problem at the end of its job
        (`Provenance.unhealthy`), or the reason why it was refused since (`refuse`). None for a healthy version, and for
        a version that cannot be read: loading that one raises the error."""
        if version not in self._health:
            try:
                self._health[version] = files.read_info(self._directory(version), version=version).unhealthy
            except AdapterError:
                return None
        return self._health[version] or self.refused(version)

    def refused(self, version: PolicyVersion) -> str | None:
        """Return why `refuse` was called; None where it was not. Another process may just have called it."""
        try:
            with open(self._refused_at(version), encoding="utf-8") as file:
                return file.read() or None
        except OSError:
            return None

    def refuse(self, version: PolicyVersion, reason: str) -> None:
        """Keep a version, but no longer let its adapter's name mean it. Activating it by hand overrules this. Raises
        AdapterNotFoundError."""
        with files.writing(f"refusing {version}"), files.locked(self.root):
            self._require(version)
            self._refusal(version).parent.mkdir(exist_ok=True)
            files.replace(self._refusal(version), reason)

    def notes(self) -> Mapping[PolicyVersion, str]:
        """Return users' notes by version; a version without a note is left out. Raises AdapterError if
        `.notes.json` cannot be read."""
        try:
            with files.writing(f"reading {self._notes_path}"):
                try:
                    return self._notes.get(str(self._notes_path), self._read_notes)
                except (FileNotFoundError, NotADirectoryError):
                    return {}
        except (ValueError, AttributeError, RecursionError) as error:
            raise AdapterError(f"{self._notes_path} cannot be read: {error}", hint="open the store again") from error

    def _read_notes(self) -> Mapping[PolicyVersion, str]:
        raw = json.loads(self._notes_path.read_bytes())
        return {PolicyVersion.parse(key): str(note) for key, note in raw.items()}

    def newest(self, name: str) -> PolicyVersion | None:
        """Return the version that an adapter's name means: the newest that is neither unhealthy nor refused, or the
        active one if that is newer (it was activated by hand). None if there is none."""
        active = self.active
        found = (each for each in reversed(self.versions(name)) if each == active or self.unhealthy(each) is None)
        return next(found, None)

    def resolve(self, text: str | None) -> PolicyVersion:
        """Return the version that a user's word means now: for None the active version, "base", "name@12", or "name":
        the active version if it is of that name, else the newest that is not unhealthy. Raises AdapterNotFoundError
        listing what there is."""
        if text is None or text == BASE:
            return self.active if text is None else PolicyVersion.base()
        if "@" in text:
            try:
                found = PolicyVersion.parse(text)
            except ValueError:
                found = None
        else:
            found = self.active if self.active.name == text else self.newest(text)
        if found is None or not self._exists(found):
            raise self._not_found(text)
        return found

    def check_base(self, version: PolicyVersion, base_hash: str) -> None:
        """Raise AdapterError unless `version` was trained on the base model with this hash."""
        if version.is_base:
            return
        info = self.info(version)
        if info.base_hash != base_hash:
            raise AdapterError(
                f"{version} was trained on {info.base_model} with base hash {info.base_hash}; "
                f"the model that is loaded has base hash {base_hash}",
                hint="load the base model that the adapter was trained on",
            )

    # --- publishing ---

    def publish(
        self,
        name: str,
        write: Callable[[Path], None],
        *,
        info: Provenance,
        admit: Callable[[], PolicyVersion | None] | None = None,
        number: int | None = None,
    ) -> PolicyVersion:
        """Make the next version of `name` from the files that `write(directory)` saves, in PEFT's layout, and return
        it. `number` asks for a particular number, which no version has or had.

        `admit` is called last, under the lock, when only the rename is missing: it raises if the version must not be
        published any more, or returns an existing version to take instead.

        Raises AdapterError if the files are not a servable adapter (layout, config, non-finite weights), StorageError
        if they cannot be written whole. An error, also one of `write` or `admit`, leaves no version behind.
        """
        files.check_name(name)
        with files.writing(f"publishing {name!r}"), files.staging(self.root) as staging:
            write(staging)
            files.check_adapter(staging)
            files.seal(staging, provenance=info)
            with files.locked(self.root):
                instead = None if admit is None else admit()
                return self._admit(staging, name=name, number=number) if instead is None else instead

    def version_of_job(self, name: str, job: str) -> PolicyVersion | None:
        """Return the version of `name` that this job published. May be called while publishing."""
        versions, known = self.versions(name), self._jobs.get(name, {})
        self._jobs[name] = jobs = {version: known[version] for version in versions if version in known}
        for version in reversed(versions):
            if jobs.get(version, job) == job:  # others were read before: an adapter may have thousands
                with suppress(AdapterError), files.writing(f"reading {version}"):  # damaged: who wants it will be told
                    jobs[version] = files.read_info(self._directory(version), version=version).job
                    if jobs[version] == job:
                        return version
        return None

    def import_(self, source: Path | str, name: str, *, info: Provenance) -> PolicyVersion:
        """Publish a copy of a PEFT directory from outside. Only its config and its safetensors file are read."""
        source = Path(source)
        if not source.is_dir():
            raise AdapterError(f"{source} is not a directory", hint="give the directory that PEFT saved")
        if not (source / files.WEIGHTS).exists() and files.has_pickles(source):
            raise AdapterError(
                f"{source} holds its weights in a pickle, which can run code when it is loaded",
                hint=f"save it as {files.WEIGHTS} (PEFT: safe_serialization=True)",
            )
        return self.publish(name, lambda directory: _copy_adapter(source, directory), info=info)

    def adopt(self, source: Path, version: PolicyVersion, *, info: Provenance) -> tuple[PolicyVersion, bool]:
        """Return a copy of another store's version, under its name and, where that is free, its number. Returns what it
        is called here, and whether it is new: one with the same weights that is here already is taken. Raises as
        `import_`."""
        digest = files.sha256(source / files.WEIGHTS)
        for here in reversed(self.versions(version.name)):
            with suppress(AdapterError):
                if self.info(here).files[files.WEIGHTS][1] == digest:
                    return here, False

        def write(directory: Path) -> None:
            _copy_adapter(source, directory)

        return self.publish(version.name, write, info=info, number=version.number), True

    def export(self, version: PolicyVersion, dest: Path | str) -> Path:
        """Copy a version to `dest` as a plain PEFT directory; `dest` must be empty or not exist."""
        source, dest = self.path(version), Path(dest)
        if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
            raise AdapterError(f"{dest} exists and is not an empty directory", hint="give a directory that is new")
        with files.writing(f"exporting {version} to {dest}"):
            dest.mkdir(parents=True, exist_ok=True)
            try:
                _copy_adapter(source, dest)
            except BaseException:
                for name in (files.CONFIG, files.WEIGHTS):
                    (dest / name).unlink(missing_ok=True)
                raise
        return dest

    # --- activating ---

    @property
    def active(self) -> PolicyVersion:
        """Return the version for requests without an `adapter`; the base model until a version is activated."""
        return (PolicyVersion.base(), *self._read_state().activations)[-1]

    @property
    def base_was_chosen(self) -> bool:
        """Return whether the base was made active, and not only is so because nothing ever was."""
        return self._read_state().activations[-1:] == (PolicyVersion.base(),)

    def was_active(self, version: PolicyVersion) -> bool:
        """Return whether the version is active, or was and can be rolled back to."""
        return version in self._read_state().activations

    def live_since(self, version: PolicyVersion) -> int:
        """Return how many activations came after the last one of `version`, or, where it never was active, of the
        version that it was trained from. Of a version that is gone at least so many: those of newer versions of its
        name."""
        line = (PolicyVersion.base(), *self._read_state().activations)
        while version not in line:
            try:
                version = self.info(version).parent
            except (AdapterError, AdapterNotFoundError):
                return sum(each.name == version.name and each.number > version.number for each in line)
        return line[::-1].index(version)

    def activate(self, version: PolicyVersion) -> None:
        """Make `version` (or the base) active, durably. Raises as `path` does."""
        if version.is_base:
            version = PolicyVersion.base()
        else:
            self.path(version)
        with files.writing(f"activating {version}"), files.locked(self.root):
            if not version.is_base:
                self._require(version)
            state = self._read_state()
            if version != self.active or not state.activations:
                activations = (*state.activations, version)[-MAX_ACTIVATIONS:]
                self._write_state(replace(state, activations=activations))

    def rollback(self) -> PolicyVersion:
        """Activate the previously active version, and return it. Raises AdapterError if there was none."""
        with files.writing("rolling back"), files.locked(self.root):
            state = self._read_state()
            if not state.activations:
                raise AdapterError("there is nothing to roll back to: no version was ever activated")
            self._write_state(replace(state, activations=state.activations[:-1]))
            self._settle_active()
            return self.active

    # --- notes ---

    def write_note(self, version: PolicyVersion, text: str | None) -> str | None:
        """Keep one line of text about a version, in place of the one before; None or blanks remove it. Returns what is
        kept. The version's own files stay as they are, and the note goes when the version goes.

        Raises AdapterNotFoundError, or AdapterError if the text is too long or more than a line."""
        note = _checked_note(text)
        with files.writing(f"writing the note of {version}"), files.locked(self.root):
            self._require(version)
            self._keep_note(version, note)
        return note

    def _keep_note(self, version: PolicyVersion, note: str | None) -> None:
        """Keep the note. The lock is held."""
        notes = self.notes()
        if notes.get(version) != note:
            kept = {**notes, version: note} if note else {each: notes[each] for each in notes if each != version}
            raw = {str(each): text for each, text in kept.items()}
            files.replace(self._notes_path, json.dumps(raw, indent=2, ensure_ascii=False) + "\n")

    # --- evaluations ---

    def record(self, version: PolicyVersion, result: Mapping[str, Any]) -> None:
        """Keep what was measured of a version, behind what is kept already; it goes when the version goes.

        Raises AdapterNotFoundError, or AdapterError if what is kept cannot be read."""
        with files.writing(f"writing the evaluations of {version}"), files.locked(self.root):
            self._require(version)
            path = self._evaluations_path(version)
            path.parent.mkdir(exist_ok=True)
            results = [*self.evaluations(version), dict(result)]
            files.replace(path, json.dumps(results, indent=2, allow_nan=False) + "\n")

    def evaluations(self, version: PolicyVersion) -> tuple[Mapping[str, Any], ...]:
        """Return a version's evaluations, oldest first. Raises AdapterError if it cannot be read."""
        path = self._evaluations_path(version)
        try:
            with files.writing(f"reading {path}"):
                results = json.loads(path.read_bytes()) if path.exists() else []
            if not (isinstance(results, list) and all(isinstance(each, dict) for each in results)):
                raise ValueError("it must be a list of objects")
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{path} cannot be read: {error}", hint="move it away to record new results") from error
        return tuple(results)

    # --- moments ---

    def moments(self, version: PolicyVersion) -> Path | None:
        """Return where the moments are with which training continues from `version`; None where there are none."""
        path = self._moments_path(version)
        return path if path.is_dir() else None

    def keep_moments(self, version: PolicyVersion, source: Path) -> None:
        """Move the directory `source` to where a version's moments are, in place of those of older versions of its
        name. Where the version is gone, or has some, or a newer one has, they are left."""
        with files.writing(f"keeping the moments of {version}"), files.locked(self.root):
            target = self._moments_path(version)
            have = self._with_moments(version.name)
            if not self._exists(version) or any(each.number >= version.number for each in have):
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
            files.fsync(target.parent)
            for each in have:
                shutil.rmtree(self._moments_path(each), ignore_errors=True)

    def _with_moments(self, name: str) -> list[PolicyVersion]:
        try:
            matches = [_VERSION.fullmatch(entry) for entry in os.listdir(self.root / MOMENTS / name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [PolicyVersion(name, int(match[1])) for match in matches if match]

    def _drop_stray_moments(self) -> None:
        """Remove moments of versions that are gone, as a kill between the two may leave them. The lock is held."""
        try:
            names = os.listdir(self.root / MOMENTS)
        except FileNotFoundError:
            return
        for version in (version for name in names for version in self._with_moments(name)):
            if not self._exists(version):
                self._drop_moments(version)

    def _drop_moments(self, version: PolicyVersion) -> None:
        path = self._moments_path(version)
        shutil.rmtree(path, ignore_errors=True)
        _remove_empty(path.parent)

    # --- removing ---

    def delete(self, version: PolicyVersion) -> None:
        """Remove a version; its number is not used again. Raises AdapterError if it is active, InUseError if another
        process holds it."""
        with files.writing(f"deleting {version}"), files.locked(self.root):
            self._require(version)
            if version == self.active:
                raise AdapterError(f"{version} is active", hint="activate another version, or 'base', before deleting")
            if not self._remove(version):
                raise InUseError(f"{version} is used by another process", hint="try again when that has ended")

    def prune(self, name: str, *, keep: int, protect: Collection[PolicyVersion] = ()) -> tuple[PolicyVersion, ...]:
        """Remove all but the newest `keep` versions of `name`, and return the removed ones.

        The active version, the target of a rollback, the versions in `protect` and those that a process holds stay.
        """
        if keep < 1:
            raise AdapterError(f"keep is {keep}; it must be at least 1", hint="delete versions one by one instead")
        with files.writing(f"pruning {name!r}"), files.locked(self.root):
            protected = {*protect, *self._read_state().activations[-2:]}
            old = [version for version in self.versions(name)[:-keep] if version not in protected]
            return tuple(version for version in old if self._remove(version))

    def rewind(self, name: str, number: int) -> None:
        """Forget the versions of `name` after `number`, as if they had never been: the next one gets the next number.

        For a run that continues from a checkpoint and will publish them again; no other process may use them.
        """
        with files.writing(f"winding {name!r} back to {number}"), files.locked(self.root):
            for version in self.versions(name):
                if version.number > number:
                    self._remove(version, held=True)
            state = self._read_state()
            self._write_state(replace(state, retired={**state.retired, name: number}))

    # --- recovery ---

    def recover(self) -> None:
        """Repair what a crash left, and say so in `warnings`. Runs when a store is opened; harmless at any time.

        Staging directories whose writer is dead are removed, damaged versions go to quarantine, and if the active one
        is missing or damaged the one that was active before it is active again.
        """
        with files.writing(f"recovering the adapter store {self.root}"), files.locked(self.root):
            files.sweep(self.root)
            self._check_state()
            self._check_notes()
            self._drop_stray_moments()
            for name in self.names():
                for version in self.versions(name):
                    if damage := files.find_damage(self._directory(version), version=version, hashes=False):
                        self._quarantine(version, damage)
            self._settle_active()

    def _check_state(self) -> None:
        try:
            self._read_state()
        except AdapterError as error:
            self._set_file_aside(self._state_path)
            self.warnings.append(f"{error.message}; it is in quarantine and 'base' is active")

    def _check_notes(self) -> None:
        try:
            self.notes()
        except AdapterError as error:
            self._set_file_aside(self._notes_path)
            self.warnings.append(f"{error.message}; it is in quarantine, and versions have no notes")

    def _set_file_aside(self, path: Path) -> None:
        quarantine = self.root / ".quarantine"
        quarantine.mkdir(exist_ok=True)
        os.replace(path, quarantine / f"{path.stem.removeprefix('.')}-{uuid4().hex[:8]}.json")

    def _settle_active(self) -> None:
        """Fall back until the active version is whole. The lock is held."""
        while not (active := self.active).is_base:
            if not self._exists(active):
                self._write_state(self._read_state().without(active))
                self.warnings.append(f"the active version {active} is missing; {self.active} is active instead")
            elif damage := self._find_damage(active):
                self._quarantine(active, damage)
            else:
                return

    def _find_damage(self, version: PolicyVersion) -> str | None:
        """Return why the files are not those that were published, or None. This process reads every byte of a version
        once."""
        if version in self._verified:
            return None
        damage = files.find_damage(self._directory(version), version=version, hashes=True)
        if damage is None:
            self._verified.add(version)
        return damage

    def _set_aside(self, version: PolicyVersion, damage: str) -> AdapterError | AdapterNotFoundError:
        """Quarantine a version that was found damaged while reading; returns the error to raise."""
        with files.writing(f"moving the damaged version {version} to quarantine"), files.locked(self.root):
            if not self._exists(version):  # deleted while it was read
                return self._not_found(str(version))
            where = self._quarantine(version, damage)
        return AdapterError(
            f"{version} is damaged: {damage}", hint=f"it was moved to {where}; publish or import it again"
        )

    def _quarantine(self, version: PolicyVersion, reason: str) -> Path:
        """Move a version out of the way with a note that says why. The lock is held."""
        was_active = version == self.active
        target = self.root / ".quarantine" / f"{version}-{uuid4().hex[:8]}"
        target.parent.mkdir(exist_ok=True)
        self._forget(version)
        self._directory(version).rename(target)
        self._forget_read(version)
        target.with_name(f"{target.name}.txt").write_text(f"{version}: {reason}\n", encoding="utf-8")
        then = f"; it was active, {self.active} is active instead" if was_active else ""
        self.warnings.append(f"{version} is damaged ({reason}) and was moved to {target}{then}")
        return target

    # --- the file system ---

    @property
    def _state_path(self) -> Path:
        return self.root / ".state.json"

    def _refusal(self, version: PolicyVersion) -> Path:
        return Path(self._refused_at(version))

    def _refused_at(self, version: PolicyVersion) -> str:
        return f"{self.root}/{REFUSED}/{version}.txt"

    @property
    def _notes_path(self) -> Path:
        return self.root / ".notes.json"

    def _moments_path(self, version: PolicyVersion) -> Path:
        return self.root / MOMENTS / version.name / f"v{version.number:06d}"

    def _evaluations_path(self, version: PolicyVersion) -> Path:
        return self.root / ".evaluations" / f"{version}.json"

    def _read_state(self) -> _State:
        try:
            with files.writing(f"reading {self._state_path}"):
                text = self._state_path.read_bytes() if self._state_path.exists() else None
            if text is None:
                return _State()
            raw = json.loads(text)
            activations = tuple(PolicyVersion.parse(text) for text in raw["activations"])
            return _State(activations, {name: files.whole_number(number) for name, number in raw["retired"].items()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise AdapterError(f"{self._state_path} cannot be read: {error}", hint="open the store again") from error

    def _write_state(self, state: _State) -> None:
        """Replace the state in one step. The lock is held."""
        raw = {"activations": [str(version) for version in state.activations], "retired": dict(state.retired)}
        files.replace(self._state_path, json.dumps(raw, indent=2) + "\n")

    def _directory(self, version: PolicyVersion) -> Path:
        return Path(self._place(version))

    def _place(self, version: PolicyVersion) -> str:
        """Return the directory as text, which is a fraction of the work where thousands are looked at."""
        return f"{self.root}/{version.name}/v{version.number:06d}"

    def _exists(self, version: PolicyVersion) -> bool:
        with files.writing(f"looking for {version}"):
            return files.is_name(version.name) and self._directory(version).exists()

    def _require(self, version: PolicyVersion) -> Path:
        if version.is_base:
            raise AdapterError("the base model is not an adapter and has no directory")
        if not self._exists(version):
            raise self._not_found(str(version))
        return self._directory(version)

    def _not_found(self, text: str) -> AdapterNotFoundError:
        if unhealthy := self.versions(text):
            last = unhealthy[-1]
            return AdapterNotFoundError(
                f"{text!r} has no healthy version: of {last}, the newest, {self.unhealthy(last)}",
                hint=f"name it with its number ({last}), or activate it by hand, if it is meant all the same",
            )
        newest = [str(self.versions(name)[-1]) for name in self.names()]
        shown = ", ".join((BASE, *newest[:20])) + (f" and {len(newest) - 20} more" if len(newest) > 20 else "")
        return AdapterNotFoundError(f"there is no adapter {text[:80]!r}", hint=f"there are (newest versions): {shown}")

    def _admit(self, staging: Path, *, name: str, number: int | None) -> PolicyVersion:
        """Give a sealed staging directory `number` if that is free, else the next one. The lock is held."""
        existing, retired = [version.number for version in self.versions(name)], self._read_state().retired.get(name, 0)
        if number is None or number <= retired or number in existing:
            number = 1 + max([retired, *existing])
        version = PolicyVersion(name, number)
        directory, target = self.root / name, self._directory(version)
        directory.mkdir(exist_ok=True)
        files.fsync(self.root)
        faults.point("publish:before-rename")
        staging.rename(target)
        faults.point("publish:after-rename")
        try:
            files.fsync(directory)
        except OSError:  # perhaps not durable, so not published
            target.rename(staging)
            raise
        self._verified.add(version)
        return version

    def _forget(self, version: PolicyVersion) -> None:
        """Forget what is known of a version besides its files, before those go. The lock is held."""
        self._write_state(self._read_state().without(version))
        self._refusal(version).unlink(missing_ok=True)
        with suppress(AdapterError):  # notes that cannot be read are set aside when a store is opened
            self._keep_note(version, None)
        self._evaluations_path(version).unlink(missing_ok=True)
        self._drop_moments(version)

    def _forget_read(self, version: PolicyVersion) -> None:
        """Forget what this process has read of a version that is gone."""
        self._health.pop(version, None)
        self._verified.discard(version)
        self._jobs.get(version.name, {}).pop(version, None)
        self._infos.forget(self._sidecar(version))

    def _sidecar(self, version: PolicyVersion) -> str:
        return f"{self._place(version)}/{files.SIDECAR}"

    def _remove(self, version: PolicyVersion, *, held: bool = False) -> bool:
        """Remove a version in one step, then its files; return whether it was removed. A version that a process holds
        stays, unless `held` is set. The caller has the lock."""
        trash, directory = files.staging_path(self.root), self._directory(version)
        if held:
            self._forget(version)
            directory.rename(trash)
        elif not files.try_move(directory, trash, before=lambda: self._forget(version)):
            return False
        self._forget_read(version)
        _remove_empty(directory.parent)
        shutil.rmtree(trash, ignore_errors=True)
        return True


def _remove_empty(directory: Path) -> None:
    """Remove the directory of a name that has nothing any more: each would be looked into whenever all are listed. The
    lock is held."""
    with suppress(OSError):  # there is something in it
        directory.rmdir()


def _checked_note(text: str | None) -> str | None:
    note = (text or "").strip()
    if len(note) > MAX_NOTE:
        raise AdapterError(f"the note has {len(note):,} characters; the limit is {MAX_NOTE}", hint="shorten it")
    if bad := next((each for each in note if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp")), None):
        raise AdapterError(
            f"the note holds {bad!r}; it must be one line of text", hint="leave out line breaks and tabs"
        )
    return note or None


def _copy_adapter(source: Path, target: Path) -> None:
    files.copy_file(source / files.CONFIG, target / files.CONFIG, limit=files.MAX_CONFIG_BYTES)
    files.copy_file(source / files.WEIGHTS, target / files.WEIGHTS, limit=files.MAX_WEIGHTS_BYTES)
