"""`metaban arms`: import and export of the catalogue."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from metaban.service.cli.main import app
from metaban.store.namespaces import NamespaceStore

runner = CliRunner()


@pytest.fixture
async def environment(redis: Redis, valkey_url: str, tmp_path: Path) -> dict[str, str]:
    await NamespaceStore(redis).open_or_create("shop", partitions=1, seed=0, learner={})
    return {
        "REDIS_URL": valkey_url,
        "METABAN_NAMESPACE": "shop",
        "METABAN_DATA_DIR": str(tmp_path / "data"),
        "COLUMNS": "160",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }


async def run(environment: dict[str, str], *words: str, code: int = 0) -> str:
    result = await asyncio.to_thread(runner.invoke, app, ["arms", *words], env=environment)
    assert result.exit_code == code, result.output
    return result.output


async def test_import_and_export(environment: dict[str, str], tmp_path: Path) -> None:
    source, target = tmp_path / "arms.ndjson", tmp_path / "out.ndjson"
    arms = {f"arm {n:03d}": [n, 0.5] for n in range(600)}
    source.write_text("".join(json.dumps({"id": arm, "features": x}) + "\n" for arm, x in arms.items()))
    assert "600 arms: 600 written, 0 unchanged, 0 removed" in await run(environment, "import", str(source))
    assert "600 arms" in await run(environment, "export", str(target))
    rows = [json.loads(row) for row in target.read_text().splitlines()]
    assert {row["id"]: row["features"] for row in rows} == arms
    target.write_text("\n".join(target.read_text().splitlines()[:10]))
    assert "10 arms: 0 written, 10 unchanged, 590 removed" in await run(environment, "import", "--replace", str(target))
    shown = [json.loads(row) for row in (await run(environment, "list", "--json")).splitlines()]
    assert [row["id"] for row in shown] == sorted(arms)[:10]
    first = await run(environment, "list", "--limit", "3")
    assert "arm 002" in first
    assert "--cursor arm 002" in first
    assert "arm 003" in await run(environment, "list", "--cursor", "arm 002")
    assert sorted(os.listdir(tmp_path)) == ["arms.ndjson", "out.ndjson"]


async def test_errors_are_reported(environment: dict[str, str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.ndjson"
    bad.write_text('{"id": "a", "features": [1]}\n{"id": "a", "features": [2]}\n')
    assert "line 2: id: is also the id of line 1" in await run(environment, "import", str(bad), code=1)
    assert "no arms" in await run(environment, "list")
    await run(environment, "import", str(tmp_path / "nothing"), code=2)
    await run(environment, "export", str(tmp_path / "no" / "folder"), code=1)
    elsewhere = {**environment, "METABAN_NAMESPACE": "elsewhere"}
    assert "no namespace elsewhere" in await run(elsewhere, "list", code=1)
    full = {**environment, "METABAN_MAX_CATALOGUE": "1"}
    bad.write_text('{"id": "a", "features": [1]}\n{"id": "b", "features": [2]}\n')
    assert "METABAN_MAX_CATALOGUE" in await run(full, "import", str(bad), code=1)
