"""The file of a snapshot: an uncompressed tar of which every byte is checked.

    users-00000.safetensors …   chunks of users, each of one partition (see `records.py`)
    epoch.safetensors           the Epoch, as stored
    manifest.json               description, and the digest of every other member (see `manifest.py`)

Headers and padding depend only on name and size, so that the reader can check them. A file is written under a temporary
name and renamed when it is complete and on disk.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self, final

from metaban.store.errors import CorruptRecord, SnapshotError
from metaban.store.failpoints import reach
from metaban.store.keys import NamespaceKeys
from metaban.store.shared.epochs import Epoch
from metaban.store.snapshots.manifest import Manifest, SnapshotMember
from metaban.store.snapshots.records import RecordRules, UserRecord, check_record, decode_chunk, encode_chunk

BLOCK: Final = 512
END: Final = bytes(2 * BLOCK)
MANIFEST: Final = "manifest.json"
EPOCH: Final = "epoch.safetensors"

#: Suffix of a file that is being written; its writer holds a lock on it.
UNFINISHED_SUFFIX: Final = ".part"

#: Most bytes of a member, which is read into memory.
MEMBER_BYTES_MAX: Final = 1 << 31
COPY_BYTES: Final = 1 << 20


@final
class SnapshotWriter:
    """Writes the members in order. Without `finish` the file is deleted."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep_unfinished(folder)
        self._folder = folder
        self._path, self.file = _open_part(folder)
        self.members: list[SnapshotMember] = []
        self._finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self._path.unlink(missing_ok=True)
        self.file.close()

    def add_users(self, partition: int, records: list[UserRecord]) -> None:
        """Write a chunk of users of one partition."""
        place = sum(member.partition is not None for member in self.members)
        self._add(f"users-{place:05d}.safetensors", encode_chunk(records), partition)

    def add_epoch(self, blob: bytes) -> None:
        """Write the epoch."""
        self._add(EPOCH, blob, None)

    def finish(self, manifest: Manifest) -> Path:
        """Write the manifest, sync the file and give it its name."""
        self._write(MANIFEST, manifest.encode())
        self.file.write(END)
        self.file.flush()
        os.fsync(self.file.fileno())
        path = self._folder / f"{manifest.id}.tar"
        reach("snapshot-before-rename")
        self._path.rename(path)
        self._finished = True
        sync_folder(self._folder)
        return path

    def _add(self, name: str, blob: bytes, partition: int | None) -> None:
        self._write(name, blob)
        self.members.append(SnapshotMember(name, len(blob), sha256(blob).hexdigest(), partition))

    def _write(self, name: str, blob: bytes) -> None:
        self.file.write(_header(name, len(blob)))
        self.file.write(blob)
        self.file.write(bytes(_padding(len(blob))))


@final
class SnapshotReader:
    """Reads the file of a snapshot; SnapshotError if a digest does not match."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise SnapshotError(f"the snapshot {path} cannot be opened: {error.strerror or error}") from error
        try:
            self._places = self._walk()
            name, (start, size) = next(reversed(self._places.items()), ("", (0, 0)))
            if name != MANIFEST:
                raise self._refusal("it does not end with a manifest")
            self.manifest = Manifest.decode(self._bytes(start, size))
            listed = [(member.name, member.size) for member in self.manifest.members]
            if [(name, size) for name, (_, size) in self._places.items()][:-1] != listed:
                raise self._refusal("its members are not those of its manifest")
            self.size = os.fstat(self._file.fileno()).st_size
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def epoch(self) -> Epoch:
        """The epoch of the snapshot."""
        member = next((member for member in self.manifest.members if member.name == EPOCH), None)
        if member is None:
            raise self._refusal("it has no epoch")
        try:
            return Epoch.decode(self._read(member))
        except CorruptRecord as error:
            raise self._refusal(str(error)) from error

    def chunks(self, partition: int) -> Iterator[list[UserRecord]]:
        """Users of a partition, each once, with their last record; one chunk at a time."""
        members = [member for member in self.manifest.members if member.partition == partition]
        latest: dict[str, int] = {}
        if len(members) > 1:  # a user updated while the snapshot was taken is in several
            for place, member in enumerate(members):
                latest |= dict.fromkeys((record.user_id for record in self._records(member)), place)
        for place, member in enumerate(members):
            # The last record counts within a chunk too.
            records = {record.user_id: record for record in self._records(member)}
            yield [record for user, record in records.items() if latest.get(user, place) == place and record.state]

    def verify(self, rules: RecordRules, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read everything; SnapshotError unless the learner can use all records."""
        manifest = self.manifest
        keys = NamespaceKeys(manifest.namespace, manifest.partitions)
        total, done, users = sum(member.size for member in manifest.members), 0, 0
        try:
            epoch = self.epoch()
            rules.check_epoch(epoch.tensors)
            if epoch.number != manifest.epoch:
                raise self._refusal("its epoch is not the one of its manifest")
            held: dict[str, bool] = {}
            reached = -1
            for member in manifest.members:
                if member.partition is not None:
                    if member.partition < reached:
                        raise self._refusal("its partitions are not in order")
                    if member.partition > reached:
                        users, reached, held = users + sum(held.values()), member.partition, {}
                    for record in self._records(member):
                        if keys.partition_of(record.user_id) != member.partition:
                            raise self._refusal("a user is in the wrong partition")
                        if record.state:
                            check_record(record, rules)
                        held[record.user_id] = bool(record.state)
                done += member.size
                progress(done, total)
            users += sum(held.values())
        except (CorruptRecord, ValueError) as error:
            raise self._refusal(str(error)) from error
        if users != manifest.users:
            raise self._refusal(f"it holds {users} users, and its manifest says {manifest.users}")

    def check_digests(self) -> None:
        """Read every member; SnapshotError if a digest does not match."""
        for member in self.manifest.members:
            self._read(member)

    def copy_to(self, target: Path) -> None:
        """Copy the file, completely or not at all; an existing file is not replaced."""
        if target.exists():
            raise SnapshotError(f"{target} exists already: remove it, or choose another name")
        try:
            part, file = _open_part(target.parent)
            try:
                with file:
                    self._file.seek(0)
                    shutil.copyfileobj(self._file, file, COPY_BYTES)
                    file.flush()
                    os.fsync(file.fileno())
                    part.rename(target)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            sync_folder(target.parent)
        except OSError as error:
            raise SnapshotError(f"{target} cannot be written: {error.strerror or error}") from error

    def _records(self, member: SnapshotMember) -> list[UserRecord]:
        try:
            return decode_chunk(self._read(member))
        except CorruptRecord as error:
            raise self._refusal(f"{member.name}: {error}") from error

    def _read(self, member: SnapshotMember) -> bytes:
        blob = self._bytes(*self._places[member.name])
        if sha256(blob).hexdigest() != member.sha256:
            raise self._refusal(f"the digest of {member.name} does not match")
        return blob

    def _walk(self) -> dict[str, tuple[int, int]]:
        """Name → (start, size) of every member, in order; SnapshotError for any other bytes in the file."""
        places: dict[str, tuple[int, int]] = {}
        end = os.fstat(self._file.fileno()).st_size
        at = 0
        while True:
            header = self._bytes(at, min(BLOCK, end - at))
            if header == bytes(BLOCK):
                if self._bytes(at, end - at if end - at <= len(END) else len(END)) != END or end != at + len(END):
                    raise self._refusal("its end is damaged")
                return places
            try:
                info = tarfile.TarInfo.frombuf(header, "ascii", "strict")
                name, size = info.name, info.size
                sound = 0 <= size <= MEMBER_BYTES_MAX and header == _header(name, size) and name not in places
            except (tarfile.HeaderError, ValueError, OverflowError) as error:
                raise self._refusal(f"it is cut short or not a snapshot: {error}") from error
            if not sound:
                raise self._refusal("it is not a snapshot of metaban, or a header in it is damaged")
            start = at + BLOCK
            at = start + size + _padding(size)
            if at > end or self._bytes(start + size, _padding(size)).strip(b"\0"):
                raise self._refusal("it is cut short or damaged between its members")
            places[name] = (start, size)

    def _bytes(self, start: int, size: int) -> bytes:
        try:
            self._file.seek(start)
            blob = self._file.read(size)
        except OSError as error:
            raise SnapshotError(f"the snapshot {self.path} cannot be read: {error.strerror or error}") from error
        if len(blob) != size:
            raise self._refusal("it is cut short")
        return blob

    def _refusal(self, reason: str) -> SnapshotError:
        return SnapshotError(f"the snapshot {self.path.name} cannot be used: {reason}")


def _open_part(folder: Path) -> tuple[Path, BinaryIO]:
    """New locked file with a temporary name."""
    while True:
        path = folder / f".{os.getpid()}-{os.urandom(4).hex()}{UNFINISHED_SUFFIX}"
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():
            return path, file
        file.close()  # deleted by `sweep_unfinished` before it was locked


def sweep_unfinished(folder: Path) -> None:
    """Delete files of writers that were killed: no process holds a lock on them."""
    for path in folder.glob(f".*{UNFINISHED_SUFFIX}"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def _padding(size: int) -> int:
    return -size % BLOCK
