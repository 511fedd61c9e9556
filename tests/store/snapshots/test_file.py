"""Snapshot files are read exactly as written or not at all."""

from __future__ import annotations

import json
import os
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaban.store.codec import Sample, encode_tensors
from metaban.store.errors import CorruptRecord, SnapshotError
from metaban.store.snapshots.file import SnapshotReader, SnapshotWriter
from metaban.store.snapshots.folder import SnapshotFolder
from metaban.store.snapshots.manifest import ID_PATTERN, Manifest, new_id
from metaban.store.snapshots.records import UserRecord, decode_chunk, encode_chunk
from tests.store.helpers import SNAPSHOT_EPOCH, SNAPSHOT_KEYS, manifest_of, user_record, write_snapshot


class Rules:
    """A learner whose states are one vector of three."""

    def check_epoch(self, tensors: dict[str, np.ndarray]) -> None:
        self.check_state({"b": tensors["mu"]})

    def check_state(self, tensors: dict[str, np.ndarray]) -> None:
        if set(tensors) != {"b"} or tensors["b"].shape != (3,) or not np.isfinite(tensors["b"]).all():
            raise ValueError("not three numbers")

    def check_sample_size(self, inputs: int, notes: int) -> None:
        if inputs != 2:
            raise ValueError("not two inputs")

    def epoch_due(self, epoch_events: int, total_events: int) -> bool:
        return False

    def renumber(self, tensors: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
        return tensors


class Learners:
    def records(self, learner: dict[str, Any], layout: dict[str, Any]) -> Rules:
        return Rules()

    def difference(self, learner: dict[str, Any], other: dict[str, Any]) -> str:
        return ""


def names(partition: int, count: int) -> list[str]:
    return [name for name in (f"u{n}" for n in range(99)) if SNAPSHOT_KEYS.partition_of(name) == partition][:count]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    zero, one = names(0, 3), names(1, 2)
    return write_snapshot(
        tmp_path,
        [user_record(zero[0]), user_record(zero[1])],
        [user_record(zero[2])],
        [user_record(user) for user in one],
    )


def refuse(path: Path, match: str | None = None) -> None:
    with pytest.raises(SnapshotError, match=match), SnapshotReader(path) as reader:
        reader.verify(Rules())


def test_round_trip(file: Path) -> None:
    with SnapshotReader(file) as reader:
        reader.verify(Rules())
        zero, one = names(0, 3), names(1, 2)
        assert list(reader.chunks(0)) == [[user_record(zero[0]), user_record(zero[1])], [user_record(zero[2])]]
        assert list(reader.chunks(1)) == [[user_record(user) for user in one]]
        assert (reader.epoch().number, reader.manifest.events) == (4, 11)
        assert reader.size == file.stat().st_size
    assert file.stat().st_mode & 0o777 == 0o600


def test_any_tar_can_list_it(file: Path) -> None:
    with tarfile.open(file) as archive:
        listed = archive.getnames()
        manifest = archive.extractfile("manifest.json")
        assert manifest is not None
        assert json.load(manifest)["users"] == 5
    assert listed == [*(f"users-{n:05d}.safetensors" for n in range(3)), "epoch.safetensors", "manifest.json"]
    assert subprocess.run(["tar", "-tf", file], capture_output=True, text=True).stdout.split() == listed


def test_every_changed_byte_is_detected(file: Path) -> None:
    whole = file.read_bytes()
    generator = random.Random(7)
    # Everywhere: records, headers, padding, manifest, the end.
    places = {*range(0, len(whole), 61), *(generator.randrange(len(whole)) for _ in range(300))}
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << generator.randrange(8)
        file.write_bytes(damaged)
        refuse(file)
    file.write_bytes(whole)
    with SnapshotReader(file) as reader:
        reader.verify(Rules())


def test_every_missing_or_extra_byte_is_detected(file: Path) -> None:
    whole = file.read_bytes()
    generator = random.Random(8)
    lengths = {0, 1, 511, 512, len(whole) - 1, len(whole) - 512, len(whole) - 1024}
    for length in lengths | {generator.randrange(len(whole)) for _ in range(100)}:
        file.write_bytes(whole[:length])
        refuse(file)
    for more in (b"\0", bytes(512), b"x" * 600, whole):
        file.write_bytes(whole + more)
        refuse(file)
    for at in (0, 512, 1024, len(whole) // 2):
        file.write_bytes(whole[:at] + b"?" + whole[at:])
        refuse(file)


def test_the_last_record_of_a_user_counts(tmp_path: Path) -> None:
    one, two, three = names(0, 3)
    path = write_snapshot(
        tmp_path,
        [user_record(one, 1), user_record(two, 1), user_record(one, 2)],
        [user_record(three, 1), user_record(two, 5)],
        [user_record(three, 0, 0, state=b"")],
        users=2,
    )
    with SnapshotReader(path) as reader:
        reader.verify(Rules())
        assert [[(item.user_id, item.version) for item in chunk] for chunk in reader.chunks(0)] == [
            [(one, 2)],
            [(two, 5)],
            [],
        ]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"state": b"broken"}, "not a record|cut short"),
        ({"state": encode_tensors({"b": np.ones(4)}, {})}, "not three numbers"),
        ({"state": encode_tensors({"b": np.full(3, np.nan)}, {})}, "not three numbers"),
        ({"samples": (b"",)}, "cut short"),
        ({"samples": (Sample(np.array([1, np.inf]), 1, 1, 0, 0, "a").encode(),)}, "not finite"),
        ({"samples": (Sample(np.ones(2), np.nan, 1, 0, 0, "a").encode(),)}, "not finite"),
        ({"samples": (Sample(np.ones(3), 1, 1, 0, 0, "a").encode(),)}, "not two inputs"),
        ({"version": -1}, "negative"),
    ],
)
def test_records_the_learner_cannot_use(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    refuse(write_snapshot(tmp_path, [user_record("u", **changes)]), match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"users": 2}, "says 2"),
        ({"epoch": 5}, "its epoch"),
        ({"format": 2}, "newer one"),
        ({"format": 0}, "format"),
        ({"partitions": 3}, "partitions"),
        ({"partitions": 0, "applied": (), "cursors": ()}, "partitions"),
        ({"namespace": "../shop"}, "namespace"),
        ({"applied": (-1, 0)}, "numbers"),
        ({"applied": ("1", 0)}, "numbers"),
        ({"id": "../../etc/passwd"}, "id"),
        ({"name": "a b"}, "name"),
        ({"learner": []}, "learner"),
        ({"members": ()}, "members"),
        ({"metaban": 1}, "texts"),
    ],
)
def test_invalid_manifests_are_refused(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    """Their digests match: another program wrote them."""
    with SnapshotWriter(tmp_path) as writer:
        writer.add_users(SNAPSHOT_KEYS.partition_of("u"), [user_record("u")])
        writer.add_epoch(SNAPSHOT_EPOCH.encode())
        manifest = manifest_of(writer, **{"users": 1, **changes, "id": new_id()})
        path = writer.finish(manifest)
        if "id" in changes:
            broken = manifest_of(writer, users=1, **changes).encode()
            with pytest.raises(SnapshotError, match=match):
                Manifest.decode(broken)
            return
    refuse(path, match)


def test_users_of_another_partition(tmp_path: Path) -> None:
    [zero], [one] = names(0, 1), names(1, 1)
    refuse(write_snapshot(tmp_path, [user_record(zero), user_record(one)]), "wrong partition")
    refuse(write_snapshot(tmp_path, [user_record(one)], [user_record(zero)]), "not in order")


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    for content in (b"", b"hello", bytes(512), bytes(1024), bytes(10_240), os.urandom(5_000)):
        path.write_bytes(content)
        refuse(path)
    (tmp_path / "manifest.json").write_text("{}")
    with tarfile.open(path, "w") as archive:
        archive.add(tmp_path / "manifest.json", "manifest.json")
    refuse(path, "not a snapshot")
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("manifest.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    refuse(path, "not a snapshot")
    refuse(tmp_path / "missing.tar", "No such file")
    refuse(tmp_path, "cannot be")


def test_an_unfinished_file_is_not_listed(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path)
    writer.add_users(SNAPSHOT_KEYS.partition_of("u"), [user_record("u")])
    folder = SnapshotFolder(tmp_path.parent, "shop", Learners())
    folder.path = tmp_path
    assert folder.list() == []
    assert len(os.listdir(tmp_path)) == 1
    # When another writer starts, the file of a live writer stays and that of a dead one is deleted.
    other = write_snapshot(tmp_path, [user_record("u")])
    assert len(os.listdir(tmp_path)) == 2
    writer.file.close()
    later = write_snapshot(tmp_path, [user_record("u")], id=new_id(1))
    assert sorted(os.listdir(tmp_path)) == sorted([other.name, later.name])


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with SnapshotWriter(tmp_path) as writer:
            writer.add_epoch(SNAPSHOT_EPOCH.encode())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert os.listdir(tmp_path) == []


@pytest.fixture
def folder(tmp_path: Path) -> SnapshotFolder:
    return SnapshotFolder(tmp_path, "shop", Learners())


@pytest.fixture
def add(folder: SnapshotFolder) -> Callable[..., Path]:
    return lambda at, **changes: write_snapshot(folder.path, [user_record("u")], id=new_id(at), **changes)


def test_the_folder(folder: SnapshotFolder, add: Callable[..., Path]) -> None:
    assert folder.list() == []
    with pytest.raises(SnapshotError, match="no snapshot latest"):
        folder.find("latest")
    old, new, newest = add(100, name="old"), add(200, name="twin"), add(300, name="twin")
    (folder.path / "notes.tar").write_text("not ours")
    assert [entry.id for entry in folder.list()] == [newest.stem, new.stem, old.stem]
    assert folder.find("latest") == newest
    assert folder.find("old") == folder.find(old.stem) == old
    with pytest.raises(SnapshotError, match="2 snapshots"):
        folder.find("twin")
    for wanted in ("nobody", "../valkey", new_id(), ""):
        with pytest.raises(SnapshotError, match="no snapshot"):
            folder.find(wanted)
    content = bytearray(newest.read_bytes())
    content[700] ^= 1
    newest.write_bytes(content)
    assert [bool(entry.problem) for entry in folder.list()] == [False] * 3
    assert [bool(entry.problem) for entry in folder.list(verify=True)] == [True, False, False]
    newest.write_bytes(content[:-3])
    assert [bool(entry.problem) for entry in folder.list()] == [True, False, False]
    assert folder.find("latest") == new


def test_export_and_import(folder: SnapshotFolder, add: Callable[..., Path], tmp_path: Path) -> None:
    path, target = add(100, name="kept"), tmp_path / "elsewhere.tar"
    told: list[tuple[int, int]] = []
    folder.export("kept", target, lambda *numbers: told.append(numbers))
    assert told[-1][0] == told[-1][1] > 0
    assert target.read_bytes() == path.read_bytes()
    with pytest.raises(SnapshotError, match="exists already"):
        folder.export("kept", target, print)
    with pytest.raises(SnapshotError, match="exists already"):
        folder.bring_in(target, lambda *numbers: None)
    path.unlink()
    assert folder.bring_in(target, lambda *numbers: None).id == path.stem
    assert path.read_bytes() == target.read_bytes()
    content = bytearray(target.read_bytes())
    content[600] ^= 4
    target.write_bytes(content)
    path.unlink()
    with pytest.raises(SnapshotError, match="cannot be used"):
        folder.bring_in(target, lambda *numbers: None)
    add(500)
    with pytest.raises(SnapshotError, match="cannot be written"):
        folder.export("latest", tmp_path / "no such folder" / "x", lambda *numbers: None)
    assert len(os.listdir(folder.path)) == 1


@given(
    st.lists(
        st.builds(
            UserRecord,
            st.text(st.characters(exclude_categories=["Cs"])),
            *[st.integers(0, 2**63 - 1)] * 3,
            st.binary(max_size=40),
            st.lists(st.binary(max_size=20), max_size=4).map(tuple),
            st.binary(max_size=20),
        ),
        max_size=5,
    )
)
def test_chunks_keep_every_byte(records: list[UserRecord]) -> None:
    assert decode_chunk(encode_chunk(records)) == records


@given(st.data())
def test_inconsistent_chunks_are_refused(data: st.DataObject) -> None:
    """Well-formed tensors with inconsistent sizes are refused."""
    tensors = {
        "standings": np.zeros((2, 3), np.int64),
        "states": np.zeros(4, np.uint8),
        "state_ends": np.array([2, 4]),
        "sample_counts": np.array([1, 0]),
        "samples": np.zeros(3, np.uint8),
        "sample_ends": np.array([3]),
    }
    users = {"users": '["a","b"]'}
    assert [each.start for each in decode_chunk(encode_tensors(tensors, users))] == [b"", b""], "as in older snapshots"
    tensors |= {"starts": np.zeros(5, np.uint8), "start_ends": np.array([0, 5])}
    assert [len(each.start) for each in decode_chunk(encode_tensors(tensors, users))] == [0, 5]
    name = data.draw(st.sampled_from([*tensors, "users"]))
    if name == "users":
        users["users"] = data.draw(st.sampled_from(["", "{}", "[1,2]", '["a"]', "[" * 9_999, '["a","\\ud800"]']))
    else:
        bad: list[np.ndarray] = [np.zeros(0), np.full(tensors[name].shape, -1), np.array([9, 9], np.int64), np.ones(())]
        tensors[name] = data.draw(st.sampled_from(bad))
    with pytest.raises(CorruptRecord):
        decode_chunk(encode_tensors(tensors, users))


def test_ids_sort_by_time() -> None:
    ids = [new_id(at) for at in (0, 1, 60, 1e9, 1.7e9)]
    assert ids == sorted(ids)
    assert all(ID_PATTERN.fullmatch(each) for each in ids)
    assert new_id(5) != new_id(5)
