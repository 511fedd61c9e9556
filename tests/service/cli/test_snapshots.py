"""`metaban snapshot` with snapshots of several namespaces in one data directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from metaban.service.cli.main import app
from metaban.store.snapshots.manifest import new_id
from tests.service.snapshots import in_place, take
from tests.store.helpers import user_record, write_snapshot
from tests.worker.workshop import OpenWorkshop

#: Later than any snapshot taken by the test.
FAR_FUTURE_S = 4_000_000_000

Add = Callable[..., str]


@pytest.fixture
def add(tmp_path: Path) -> Add:
    """Write a snapshot that can be listed, and return its id."""

    def one(at_s: int, namespace: str, name: str = "") -> str:
        folder = tmp_path / "snapshots"
        return write_snapshot(folder, [user_record("u")], id=new_id(at_s), namespace=namespace, name=name).stem

    return one


def run(data_dir: Path, *words: str, code: int = 0, **changes: str | None) -> str:
    environment = {
        "METABAN_DATA_DIR": str(data_dir), "METABAN_NAMESPACE": "shop", "COLUMNS": "80", "NO_COLOR": "1",
        "TERM": "xterm", "REDIS_URL": None, **changes,
    }  # fmt: skip
    result = CliRunner().invoke(app, ["snapshot", *words], env=environment)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("terminal", ["1", None])
def test_ids_and_names_are_not_truncated(tmp_path: Path, add: Add, columns: str, terminal: str | None) -> None:
    name = "before-the-release-of-the-new-front-page-which-was-put-off-twice"
    ids = [add(at, "shop", name) for at in (1_000, 2_000)]
    said = run(tmp_path, "list", COLUMNS=columns, FORCE_COLOR=terminal)
    assert "…" not in said
    assert all(snapshot in said for snapshot in ids)
    if terminal is None:  # a pipe
        assert [line.split()[:2] for line in said.splitlines()[1:]] == [[snapshot, name] for snapshot in ids[::-1]]
    elif columns == "80":
        assert max(map(len, said.splitlines())) <= 80


def test_list_as_json(tmp_path: Path, add: Add) -> None:
    snapshot = add(1_000, "shop", "kept")
    (tmp_path / "snapshots" / "20260301T060000Z-ab12cd.tar").write_bytes(bytes(4_096))

    def listed(*options: str) -> list[dict[str, Any]]:
        lines = run(tmp_path, "list", "--json", *options, code=1).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    damaged, whole = listed()
    assert (damaged["id"], damaged["intact"], damaged["users"]) == ("20260301T060000Z-ab12cd", False, None)
    assert "cannot be used" in damaged["problem"]
    size = (tmp_path / "snapshots" / f"{snapshot}.tar").stat().st_size
    assert whole == {
        "id": snapshot, "name": "kept", "namespace": "shop", "created_ms": 1, "size": size, "users": 1, "events": 11,
        "epoch": 4, "intact": None, "problem": None,
    }  # fmt: skip


def test_list_shows_one_namespace(tmp_path: Path, add: Add) -> None:
    own, other = add(1_000, "shop"), add(2_000, "default")
    said = run(tmp_path, "list")
    assert own in said
    assert other not in said
    assert "no snapshots of namespace third" in run(tmp_path, "list", METABAN_NAMESPACE="third")


def test_names_and_latest_are_of_the_namespace(tmp_path: Path, add: Add) -> None:
    add(1_000, "shop", "newer")
    add(2_000, "default", "newer")
    add(3_000, "default", "theirs")
    for which in ("latest", "newer"):
        # Found; the next check refuses its learner.
        assert "there is no snapshot" not in (said := run(tmp_path, "export", which, str(tmp_path / "out"), code=1))
        assert "2 snapshots" not in said
    assert "no snapshot theirs of namespace shop" in run(tmp_path, "restore", "theirs", "--yes", code=1)


def test_without_a_terminal_a_restore_needs_a_yes(tmp_path: Path, add: Add) -> None:
    add(1_000, "shop", "newer")
    assert "confirm it with --yes" in run(tmp_path, "restore", "newer", code=1)


async def test_latest_is_restored_though_another_namespace_has_a_later_one(
    open_workshop: OpenWorkshop,
    valkey_url: str,
    tmp_path: Path,
    add: Add,
) -> None:
    shop = await open_workshop()
    await in_place(shop)
    taken = await take(shop, tmp_path / "snapshots", name="newer")
    other = add(FAR_FUTURE_S, "default", "newer")

    async def restore(which: str, code: int = 0) -> str:
        """The command runs in a thread because it has its own event loop."""
        return await asyncio.to_thread(run, tmp_path, "restore", which, "--yes", code=code, REDIS_URL=valkey_url)

    assert f"restored {taken.id}" in await restore("latest")
    assert f"restored {taken.id}" in await restore("newer")
    assert f"{other} is of namespace default, not of shop" in await restore(other, code=1)
