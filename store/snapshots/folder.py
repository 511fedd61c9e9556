"""The snapshots of a data directory: list, find, export and import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from metaban.store.errors import SnapshotError
from metaban.store.snapshots.file import SnapshotReader
from metaban.store.snapshots.manifest import ID_PATTERN, LATEST, Manifest
from metaban.store.snapshots.records import LearnerRules, rules_for


@final
@dataclass(frozen=True, slots=True)
class Listed:
    """A file of the folder; without a manifest if it cannot be read."""

    id: str
    size: int
    manifest: Manifest | None
    problem: str = ""

    def fields(self, *, verified: bool) -> dict[str, Any]:
        """Fields for the API and for `--json`."""
        known = self.manifest
        return {
            "id": self.id,
            "name": known.name if known else "",
            "namespace": known and known.namespace,
            "created_ms": known and known.created_ms,
            "size": self.size,
            "users": known and known.users,
            "events": known and known.events,
            "epoch": known and known.epoch,
            "intact": (True if verified else None) if known else False,
            "problem": self.problem or None,
        }


@final
class SnapshotFolder:
    """Snapshots of one namespace in `METABAN_DATA_DIR/snapshots`. Reads files: do not call it in an event loop."""

    def __init__(self, data_dir: Path, namespace: str, rules: LearnerRules) -> None:
        self.path = data_dir / "snapshots"
        self._namespace = namespace
        self._rules = rules

    def list(self, *, verify: bool = False) -> list[Listed]:
        """Snapshots of the namespace, newest first; with `verify` they are read completely.

        Includes unreadable files, whose namespace is unknown.
        """
        found = sorted((path for path in self.path.glob("*.tar") if ID_PATTERN.fullmatch(path.stem)), reverse=True)
        entries = (self._inspect(path, verify=verify) for path in found)
        return [entry for entry in entries if entry is not None]

    def find(self, wanted: str) -> Path:
        """File of a snapshot by its id or name, or of the latest; SnapshotError if there is none, or several.

        Names and `latest` are looked up in the namespace. An id may be of another namespace; the restore checks that.
        """
        if ID_PATTERN.fullmatch(wanted):
            path = self.path / f"{wanted}.tar"
            if path.is_file():
                return path
        known = self.list()
        if wanted == LATEST:
            matching = [entry for entry in known if entry.manifest is not None][:1]
        else:
            matching = [entry for entry in known if entry.manifest is not None and entry.manifest.name == wanted]
        if len(matching) > 1:
            raise SnapshotError(
                f"{len(matching)} snapshots of namespace {self._namespace} are named {wanted}: use an id"
            )
        if not matching:
            raise SnapshotError(
                f"there is no snapshot {wanted} of namespace {self._namespace} in {self.path}: "
                "`metaban snapshot list` shows them"
            )
        return self.path / f"{matching[0].id}.tar"

    def export(self, wanted: str, target: Path, progress: Callable[[int, int], None]) -> Manifest:
        """Verify a snapshot and copy it to a file."""
        return self._copy(self.find(wanted), lambda manifest: target, progress)

    def bring_in(self, source: Path, progress: Callable[[int, int], None]) -> Manifest:
        """Verify a file and copy it into the folder."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._copy(source, lambda manifest: self.path / f"{manifest.id}.tar", progress)

    def _copy(self, source: Path, target: Callable[[Manifest], Path], progress: Callable[[int, int], None]) -> Manifest:
        with SnapshotReader(source) as reader:
            self._verify(reader, progress)
            path = target(reader.manifest)
            reader.copy_to(path)
        # Check the copy too: a copy that cannot be restored is worse than none.
        try:
            with SnapshotReader(path) as copy:
                copy.check_digests()
        except SnapshotError:
            path.unlink(missing_ok=True)
            raise
        return reader.manifest

    def _verify(self, reader: SnapshotReader, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        reader.verify(rules_for(self._rules, reader.manifest.learner, reader.manifest.layout), progress)

    def _inspect(self, path: Path, *, verify: bool) -> Listed | None:
        """Description of a file; None for a snapshot of another namespace."""
        try:
            with SnapshotReader(path) as reader:
                if reader.manifest.namespace != self._namespace:
                    return None
                if verify:
                    self._verify(reader)
                return Listed(path.stem, reader.size, reader.manifest)
        except SnapshotError as error:
            return Listed(path.stem, path.stat().st_size if path.exists() else 0, None, str(error))
