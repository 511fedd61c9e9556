"""`metaban arms …`: import, export and list the catalogue."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from metaban.service.cli.terminal import (
    ReportProgress,
    fail,
    print_rows,
    progress_bar,
    settings_or_exit,
    stderr,
    stdout,
)
from metaban.service.settings.environment import Settings

if TYPE_CHECKING:
    from metaban.models.features import FeatureLayout
    from metaban.store.catalogue import CatalogueStore

arms_app = typer.Typer(
    help="Import, export and list the catalogue of arms (JSON lines).",
    epilog="Works on the namespace of METABAN_NAMESPACE, in the store described by\n`metaban snapshot --help`.",
    no_args_is_help=True,
)

Result = TypeVar("Result")


@arms_app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="One arm per line.")],
    replace: Annotated[bool, typer.Option("--replace", help="Remove the arms that are not in the file.")] = False,
) -> None:
    """Add or change arms from a file of lines such as {"id": "a", "features": [1, 2]}. All lines are checked before any
    arm is written."""

    async def work(
        settings: Settings, store: CatalogueStore, layout: FeatureLayout | None, report: ReportProgress
    ) -> dict[str, Any]:
        from metaban.service.engine.admin.arm_files import ArmFile, import_arms
        from metaban.service.http.parsing import parse_arm_line

        with file.open("rb") as source:
            arms = ArmFile(source, settings, layout, partial(parse_arm_line, settings=settings))
            return await import_arms(store, arms, "replace" if replace else "upsert", report)

    done = _with_catalogue(work)
    stdout.print(
        f"{done['arms']} arms: {done['written']} written, {done['unchanged']} unchanged, {done['removed']} removed"
    )


@arms_app.command("export")
def export_file(
    file: Annotated[Path, typer.Argument(dir_okay=False, help="Target file; it appears when it is complete.")],
) -> None:
    """Write all arms to a file that can be imported."""

    async def work(
        settings: Settings, store: CatalogueStore, layout: FeatureLayout | None, report: ReportProgress
    ) -> int:
        from metaban.service.engine.admin.arm_files import EXPORT_ARMS, export_line

        total, done, cursor = await store.count(), 0, None
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as target:
            try:
                while True:
                    page = await store.page(limit=EXPORT_ARMS, cursor=cursor)
                    target.write(b"".join(map(export_line, page.arms)))
                    done, cursor = done + len(page.arms), page.cursor
                    report("arms", done, max(done, total))
                    if cursor is None:
                        break
                target.flush()
                os.fsync(target.fileno())
                os.replace(target.name, file)
            except BaseException:
                os.unlink(target.name)
                raise
        return done

    stdout.print(f"{_with_catalogue(work)} arms")


@arms_app.command("list")
def list_arms(
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Number of arms.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Continue where another list ended.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List arms, sorted by id."""

    async def work(
        settings: Settings, store: CatalogueStore, layout: FeatureLayout | None, report: ReportProgress
    ) -> Any:
        return await store.page(limit=limit, cursor=cursor)

    page = _with_catalogue(work)
    if as_json:
        for arm in page.arms:
            stdout.print(json.dumps(asdict(arm)), markup=False)
    elif page.arms:
        print_rows(
            ("arm", "version", "features"),
            [(arm.id, str(arm.version), json.dumps(arm.features, ensure_ascii=False)) for arm in page.arms],
        )
    else:
        stdout.print("no arms")
    if page.cursor is not None:
        stderr.print(f"more with --cursor {page.cursor}", markup=False)


def _with_catalogue(
    work: Callable[[Settings, CatalogueStore, FeatureLayout | None, ReportProgress], Awaitable[Result]],
) -> Result:
    """Run a function on the catalogue of the namespace in the settings."""
    settings = settings_or_exit()
    from metaban.service.errors import ServiceError
    from metaban.store.errors import StoreError
    from metaban.store.valkey.locate import located_store

    try:
        with (
            located_store(settings.redis_url, settings.data_dir, appendfsync=settings.appendfsync) as url,
            progress_bar() as report,
        ):
            return asyncio.run(_work(settings, url, report, work))
    except (ServiceError, StoreError, OSError) as error:
        fail(str(error))


async def _work(
    settings: Settings,
    url: str,
    report: ReportProgress,
    work: Callable[[Settings, CatalogueStore, FeatureLayout | None, ReportProgress], Awaitable[Result]],
) -> Result:
    from metaban.models.features import FeatureLayout
    from metaban.store.catalogue import CatalogueStore
    from metaban.store.client.connection import connect
    from metaban.store.errors import StoreError
    from metaban.store.namespaces import NamespaceStore

    redis = connect(url)
    try:
        record = await NamespaceStore(redis).load(settings.namespace)
        if record is None or record.state == "deleted":
            raise StoreError(f"there is no namespace {settings.namespace} in this store: see METABAN_NAMESPACE")
        store = CatalogueStore(redis, record.keys, record.store_id, arms_max=settings.max_catalogue)
        layout = None if record.layout is None else FeatureLayout.from_json(record.layout)
        return await work(settings, store, layout, report)
    finally:
        await redis.aclose()
