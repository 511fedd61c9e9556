"""`metaban snapshot …`: create, list, restore, export and import snapshots."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

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
    from metaban.service.engine.admin.snapshots import KnownLearners
    from metaban.store.client.connection import Store
    from metaban.store.snapshots.folder import Listed, SnapshotFolder

COLUMNS: Final = ("id", "name", "age", "MiB", "users", "events", "epoch", "state")

UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))

snapshot_app = typer.Typer(
    name="snapshot",
    help="Save the learned state to a file and restore it, while the service runs.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    epilog="""
[bold]Roll back a bad hour[/bold]

  metaban snapshot list

  metaban snapshot restore 20260301T060000Z-ab12cd

Uses the store at REDIS_URL or, without it, the private Valkey in
METABAN_DATA_DIR: that of a running service, or one started for the command.
Works on the namespace of METABAN_NAMESPACE; `list`, names and `latest` mean
its snapshots only. Files are in METABAN_DATA_DIR/snapshots.
""",
)

Which = Annotated[str, typer.Argument(metavar="ID", help="The id of a snapshot, its name, or `latest`.")]


@snapshot_app.command()
def create(
    name: Annotated[str, typer.Option(help="Optional name, such as before-release.")] = "",
) -> None:
    """Create a snapshot of the learned state. Requests and learning continue meanwhile."""
    from metaban.store.snapshots.manifest import NAME_PATTERN, is_free_name

    if name and not NAME_PATTERN.fullmatch(name):
        raise typer.BadParameter("use up to 64 letters, digits, dots, dashes and underscores", param_hint="--name")
    if not is_free_name(name):
        raise typer.BadParameter("must not be `latest` or have the form of an id", param_hint="--name")
    with _reported_errors() as settings:
        from metaban.store.errors import SnapshotError
        from metaban.store.namespaces import NamespaceStore
        from metaban.store.snapshots.create import create_snapshot

        if settings.redis_url is None and not (settings.data_dir / "valkey").is_dir():
            raise SnapshotError(f"there is no store in {settings.data_dir}: set METABAN_DATA_DIR or REDIS_URL")
        folder = _folder(settings)

        async def take(redis: Store, report: ReportProgress) -> None:
            record = await NamespaceStore(redis).load(settings.namespace)
            if record is None or record.state != "ready":
                raise SnapshotError(f"the store has no namespace {settings.namespace}: set METABAN_NAMESPACE")
            manifest = await create_snapshot(redis, record, folder.path, _rules(), name=name, progress=report)
            stdout.print(manifest.id, markup=False)
            stderr.print(
                f"{manifest.users} users, {manifest.events} events, epoch {manifest.epoch}"
                + (f", {manifest.damaged} damaged users skipped" if manifest.damaged else ""),
                markup=False,
            )

        _with_store(settings, take)


@snapshot_app.command("list")
def show(
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every snapshot completely.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List the snapshots of the namespace, newest first. Exits with 1 when one cannot be used."""
    with _reported_errors() as settings:
        listed = _folder(settings).list(verify=verify)
        if as_json:
            for entry in listed:
                stdout.print(json.dumps(entry.fields(verified=verify)), markup=False)
        elif listed:
            print_rows(COLUMNS, [_row(entry, verify=verify) for entry in listed], unbroken={"id"})
        else:
            stdout.print(f"no snapshots of namespace {settings.namespace}", markup=False)
        for entry in listed:
            if entry.problem:
                stderr.print(f"[red]{entry.id}[/] {escape(entry.problem)}")
    if any(entry.problem for entry in listed):
        raise typer.Exit(1)


@snapshot_app.command()
def restore(
    which: Which,
    rename: Annotated[
        str, typer.Option("--as", metavar="NAMESPACE", help="Restore into this namespace, also from another one.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation; needed without a terminal.")] = False,
) -> None:
    """Restore all users and the shared state from a snapshot, while the service runs.

    What was learned since is lost: create a snapshot first if you may need it. To complete an interrupted restore, run
    it again.
    """
    with _reported_errors() as settings:
        from metaban.store.snapshots.restore import restore_snapshot

        path = _folder(settings).find(which)
        namespace = rename or settings.namespace
        if not yes:
            if not sys.stdin.isatty():
                fail("a restore loses what was learned since: confirm it with --yes")
            typer.confirm(f"Restore namespace {namespace} to {path.stem} and lose what it learned since?", abort=True)

        async def restore_from(redis: Store, report: ReportProgress) -> None:
            done = await restore_snapshot(redis, path, namespace, _rules(), rename=bool(rename), progress=report)
            stdout.print(f"restored {done.snapshot} as epoch {done.epoch}", markup=False)
            stderr.print(
                f"{done.users} users restored, {done.dropped} dropped that are not in the snapshot"
                + (f", {done.forgotten} skipped that were forgotten since" if done.forgotten else ""),
                markup=False,
            )

        _with_store(settings, restore_from)


@snapshot_app.command("export")
def export_(which: Which, file: Annotated[Path, typer.Argument(help="Target file; must not exist.")]) -> None:
    """Verify a snapshot and copy it to a file."""
    with _reported_errors() as settings, progress_bar() as report:
        _folder(settings).export(which, file, lambda done, total: report("bytes", done, total))


@snapshot_app.command("import")
def import_(file: Annotated[Path, typer.Argument(help="An exported snapshot.")]) -> None:
    """Verify a file and add it to the snapshots."""
    with _reported_errors() as settings, progress_bar() as report:
        manifest = _folder(settings).bring_in(file, lambda done, total: report("bytes", done, total))
        stdout.print(manifest.id, markup=False)


def _with_store(settings: Settings, work: Callable[[Store, ReportProgress], Awaitable[None]]) -> None:
    from metaban.store.client.connection import check_server, connect
    from metaban.store.valkey.locate import located_store

    with (
        located_store(settings.redis_url, settings.data_dir, appendfsync=settings.appendfsync) as url,
        progress_bar() as report,
    ):

        async def run() -> None:
            redis = connect(url)
            try:
                await check_server(redis)
                await work(redis, report)
            finally:
                await redis.aclose()

        asyncio.run(run())


@contextmanager
def _reported_errors() -> Iterator[Settings]:
    """The settings; expected errors are printed as one line, with exit status 1."""
    from metaban.store.errors import StoreError

    settings = settings_or_exit()
    try:
        yield settings
    except (StoreError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        stderr.print("[red]interrupted[/] run an interrupted restore again to complete it")
        raise typer.Exit(1) from None


def _folder(settings: Settings) -> SnapshotFolder:
    from metaban.store.snapshots.folder import SnapshotFolder

    return SnapshotFolder(settings.data_dir, settings.namespace, _rules())


def _rules() -> KnownLearners:
    from metaban.service.engine.admin.snapshots import KnownLearners

    return KnownLearners()


def _row(entry: Listed, *, verify: bool) -> list[str]:
    size = f"{entry.size / 2**20:.1f}"
    manifest = entry.manifest
    if manifest is None:
        return [entry.id, "", "", size, "", "", "", "damaged"]
    state = "intact" if verify else "not verified"
    return [
        entry.id,
        manifest.name,
        _age(time.time() - manifest.created_ms / 1_000),
        size,
        str(manifest.users),
        str(manifest.events),
        str(manifest.epoch),
        state,
    ]


def _age(seconds: float) -> str:
    for unit, name in UNITS:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0, seconds):.0f} s"
