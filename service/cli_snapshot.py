"""`metaban snapshot`: keep what was learned, look at what was kept, and go back to it."""

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

from service.settings import Settings
from service.terminal import Tell, fail, print_rows, progress_bar, settings_or_exit, stderr, stdout

if TYPE_CHECKING:
    from service.snapshot_rules import KnownLearners
    from store.connection import Store
    from store.snapshot_folder import Listed, SnapshotFolder

COLUMNS: Final = ("id", "name", "age", "MiB", "users", "events", "epoch", "state")
UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))

snapshot_app = typer.Typer(
    name="snapshot",
    help="Keep what was learned in a file, and go back to it, while the service runs.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    epilog="""
[bold]Roll back a bad hour[/bold]

  metaban snapshot list

  metaban snapshot restore 20260301T060000Z-ab12cd

Talks to REDIS_URL; or else to the private Valkey in METABAN_DATA_DIR, that of
a running service or one started for the time of the command. Works on the
namespace of METABAN_NAMESPACE: `list`, names and `latest` are of its
snapshots alone. Files are in METABAN_DATA_DIR/snapshots.
""",
)

Which = Annotated[str, typer.Argument(metavar="ID", help="The id of a snapshot, its name, or `latest`.")]


@snapshot_app.command()
def create(
    name: Annotated[str, typer.Option(help="A name to find it by, such as before-release.")] = "",
) -> None:
    """Take a snapshot of everything learned. Requests and learning go on meanwhile."""
    from store.snapshot_names import NAME_PATTERN, is_free_name

    if name and not NAME_PATTERN.fullmatch(name):
        raise typer.BadParameter("letters, digits, dot, dash and underscore, up to 64", param_hint="--name")
    if not is_free_name(name):
        raise typer.BadParameter("neither `latest` nor the form of an id, which stand for others", param_hint="--name")
    with _told_errors() as settings:
        from store.errors import SnapshotError
        from store.namespaces import Namespaces
        from store.snapshots import create_snapshot

        if settings.redis_url is None and not (settings.data_dir / "valkey").is_dir():
            raise SnapshotError(f"there is no store in {settings.data_dir}: set METABAN_DATA_DIR or REDIS_URL")
        folder = _folder(settings)

        async def take(redis: Store, tell: Tell) -> None:
            record = await Namespaces(redis).load(settings.namespace)
            if record is None or record.state != "ready":
                raise SnapshotError(f"the store has no namespace {settings.namespace}: set METABAN_NAMESPACE")
            manifest = await create_snapshot(redis, record, folder.path, _rules(), name=name, progress=tell)
            stdout.print(manifest.id, markup=False)
            stderr.print(
                f"{manifest.users} users, {manifest.events} events, epoch {manifest.epoch}"
                + (f", {manifest.damaged} damaged users left out" if manifest.damaged else ""),
                markup=False,
            )

        _with_store(settings, take)


@snapshot_app.command("list")
def show(
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every snapshot whole, to see that it is intact.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show the snapshots of the namespace, the newest first. Exits with 1 when one cannot be used."""
    with _told_errors() as settings:
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
        str, typer.Option("--as", metavar="NAMESPACE", help="Restore into this namespace, whatever it was taken of.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Put every user and the shared model back to a snapshot, while the service runs.

    What was learned since is gone, so take a snapshot first if you may want it. A restore that was interrupted is
    completed by restoring again.
    """
    with _told_errors() as settings:
        from store.snapshot_restore import restore_snapshot

        path = _folder(settings).find(which)
        namespace = rename or settings.namespace
        if not yes and sys.stdin.isatty():
            typer.confirm(f"Put namespace {namespace} back to {path.stem}, and lose what it learned since?", abort=True)

        async def put_back(redis: Store, tell: Tell) -> None:
            done = await restore_snapshot(redis, path, namespace, _rules(), rename=bool(rename), progress=tell)
            stdout.print(f"restored {done.snapshot} as epoch {done.epoch}", markup=False)
            stderr.print(
                f"{done.users} users put back, {done.dropped} dropped that it does not have"
                + (f", {done.forgotten} left out who were forgotten since" if done.forgotten else ""),
                markup=False,
            )

        _with_store(settings, put_back)


@snapshot_app.command("export")
def export_(which: Which, file: Annotated[Path, typer.Argument(help="Where to; must not exist.")]) -> None:
    """Verify a snapshot and copy it to a file, to be kept elsewhere."""
    with _told_errors() as settings, progress_bar() as tell:
        _folder(settings).export(which, file, lambda done, total: tell("bytes", done, total))


@snapshot_app.command("import")
def import_(file: Annotated[Path, typer.Argument(help="A snapshot that was exported.")]) -> None:
    """Verify a file and take it in among the snapshots."""
    with _told_errors() as settings, progress_bar() as tell:
        manifest = _folder(settings).bring_in(file, lambda done, total: tell("bytes", done, total))
        stdout.print(manifest.id, markup=False)


def _with_store(settings: Settings, work: Callable[[Store, Tell], Awaitable[None]]) -> None:
    from store.connection import check_server, connect
    from store.locate import located_store

    with (
        located_store(settings.redis_url, settings.data_dir, appendfsync=settings.appendfsync) as url,
        progress_bar() as tell,
    ):

        async def run() -> None:
            redis = connect(url)
            try:
                await check_server(redis)
                await work(redis, tell)
            finally:
                await redis.aclose()

        asyncio.run(run())


@contextmanager
def _told_errors() -> Iterator[Settings]:
    """The settings; whatever is foreseen to go wrong is told in a line, with exit status 1."""
    from store.errors import StoreError

    settings = settings_or_exit()
    try:
        yield settings
    except (StoreError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        stderr.print("[red]interrupted[/] a restore that has begun is completed by restoring again")
        raise typer.Exit(1) from None


def _folder(settings: Settings) -> SnapshotFolder:
    from store.snapshot_folder import SnapshotFolder

    return SnapshotFolder(settings.data_dir, settings.namespace, _rules())


def _rules() -> KnownLearners:
    from service.snapshot_rules import KnownLearners

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
