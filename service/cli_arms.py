"""`metaban arms …`: the catalogue from and to files of JSON lines, and a look at it."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from service.settings import Settings
from service.terminal import Tell, fail, print_rows, progress_bar, settings_or_exit, stderr, stdout

if TYPE_CHECKING:
    from models.features import FeatureLayout
    from store.catalogue import CatalogueStore

arms_app = typer.Typer(
    help="The catalogue of arms: import it from a file of JSON lines, export it to one, list it.",
    epilog="Works on the namespace of METABAN_NAMESPACE, in the store that\n`metaban snapshot --help` tells of.",
    no_args_is_help=True,
)
Result = TypeVar("Result")


@arms_app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="One arm a line.")],
    replace: Annotated[bool, typer.Option("--replace", help="Remove the arms that are not in the file.")] = False,
) -> None:
    """Add or change arms by a file of lines such as {"id": "a", "features": [1, 2]}. All are checked before any is
    written."""

    async def work(
        settings: Settings, store: CatalogueStore, layout: FeatureLayout | None, tell: Tell
    ) -> dict[str, Any]:
        from service.arms_files import ArmFile, import_arms

        with file.open("rb") as source:
            arms = ArmFile(source, settings, layout)
            return await import_arms(store, arms, "replace" if replace else "upsert", tell)

    done = _with_catalogue(work)
    stdout.print(
        f"{done['arms']} arms: {done['written']} written, {done['unchanged']} unchanged, {done['removed']} removed"
    )


@arms_app.command("export")
def export_file(
    file: Annotated[Path, typer.Argument(dir_okay=False, help="Written when all arms are in it.")],
) -> None:
    """Write all arms to a file that can be imported."""

    async def work(settings: Settings, store: CatalogueStore, layout: FeatureLayout | None, tell: Tell) -> int:
        from service.arms_files import EXPORT_ARMS, export_line

        total, done, cursor = await store.count(), 0, None
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as target:
            try:
                while True:
                    page = await store.page(limit=EXPORT_ARMS, cursor=cursor)
                    target.write(b"".join(map(export_line, page.arms)))
                    done, cursor = done + len(page.arms), page.cursor
                    tell("arms", done, max(done, total))
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
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Arms shown.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Go on where another list ended.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show arms in the order of their ids."""

    async def work(settings: Settings, store: CatalogueStore, layout: FeatureLayout | None, tell: Tell) -> Any:
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
        stderr.print(f"there are more: --cursor {page.cursor}", markup=False)


def _with_catalogue(
    work: Callable[[Settings, CatalogueStore, FeatureLayout | None, Tell], Awaitable[Result]],
) -> Result:
    """Do something with the catalogue of the namespace that the settings name."""
    settings = settings_or_exit()
    from service.errors import ServiceError
    from store.errors import StoreError
    from store.locate import located_store

    try:
        with (
            located_store(settings.redis_url, settings.data_dir, appendfsync=settings.appendfsync) as url,
            progress_bar() as tell,
        ):
            return asyncio.run(_work(settings, url, tell, work))
    except (ServiceError, StoreError, OSError) as error:
        fail(str(error))


async def _work(
    settings: Settings,
    url: str,
    tell: Tell,
    work: Callable[[Settings, CatalogueStore, FeatureLayout | None, Tell], Awaitable[Result]],
) -> Result:
    from models.features import FeatureLayout
    from store.catalogue import CatalogueStore
    from store.connection import connect
    from store.errors import StoreError
    from store.namespaces import Namespaces

    redis = connect(url)
    try:
        record = await Namespaces(redis).load(settings.namespace)
        if record is None or record.state == "deleted":
            raise StoreError(f"there is no namespace {settings.namespace} in this store: see METABAN_NAMESPACE")
        store = CatalogueStore(redis, record.keys, record.store_epoch, arms_max=settings.max_catalogue)
        layout = None if record.layout is None else FeatureLayout.from_json(record.layout)
        return await work(settings, store, layout, tell)
    finally:
        await redis.aclose()
