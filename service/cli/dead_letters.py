"""`metaban dead-letters …`: list, replay and discard events that could not be applied."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from metaban.service.cli.terminal import WRONG_USE, fail, print_rows, settings_or_exit, stderr, stdout
from metaban.service.settings.environment import Settings

if TYPE_CHECKING:
    from metaban.store.events.dead_letters import DeadLetter
    from metaban.store.events.stream import EventStream

letters_app = typer.Typer(
    help="List, replay or discard dead letters: events that could not be applied.",
    epilog="Works on the namespace of METABAN_NAMESPACE, in the store described by\n`metaban snapshot --help`.",
    no_args_is_help=True,
)

COLUMNS: Final = ("partition", "letter", "user", "decision", "arm", "reward", "reason")

Result = TypeVar("Result")

Partition = Annotated[int, typer.Argument(min=0, help="As listed.")]

LetterId = Annotated[str, typer.Argument(help="As listed.")]


@letters_app.command("list")
def list_letters(
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Number of letters.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Continue where another list ended.")] = None,
    oldest: Annotated[bool, typer.Option("--oldest", help="Oldest first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List the dead letters of all partitions, newest first."""
    try:
        page = _with_stream(lambda stream: stream.letters.page(limit=limit, cursor=cursor, newest_first=not oldest))
    except ValueError as error:
        fail(str(error), status=WRONG_USE)
    rows = [_row(letter) for letter in page.letters]
    if as_json:
        for row in rows:
            stdout.print(json.dumps(row), markup=False)
    elif rows:
        cells = [["" if value is None else str(value) for value in row.values()] for row in rows]
        print_rows(COLUMNS, cells, unbroken={"letter"})
    else:
        stdout.print("no dead letters")
    if page.cursor is not None:
        stderr.print(f"more with --cursor {page.cursor}", markup=False)


@letters_app.command()
def replay(
    partition: Annotated[int | None, typer.Argument(min=0, help="As listed.")] = None,
    letter_id: Annotated[str | None, typer.Argument(help="As listed.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All current dead letters.")] = False,
) -> None:
    """Put one dead letter, or all, back into the stream. Each is applied once, even if replayed again."""
    if everything and partition is None:
        done = _with_stream(lambda stream: stream.letters.replay_everything())
        stdout.print(f"replayed {done.replayed}, refused {done.refused}")
    elif not everything and partition is not None and letter_id is not None:
        answer = _with_stream(lambda stream: stream.letters.replay(partition, letter_id))
        if answer.status != "replayed":
            fail(f"not replayed: {answer.detail}")
        stdout.print(f"replayed as {answer.detail}", markup=False)
    else:
        fail("name a partition and a letter, or --all", status=WRONG_USE)


@letters_app.command()
def discard(partition: Partition, letter_id: LetterId) -> None:
    """Delete a dead letter permanently: its reward is not learned."""
    if not _with_stream(lambda stream: stream.letters.discard(partition, letter_id)):
        fail("no such letter")
    stdout.print("discarded")


def _with_stream(work: Callable[[EventStream], Awaitable[Result]]) -> Result:
    """Run a function on the event streams of the namespace in the settings."""
    settings = settings_or_exit()
    from metaban.store.errors import StoreError
    from metaban.store.valkey.locate import located_store

    try:
        with located_store(settings.redis_url, settings.data_dir, appendfsync=settings.appendfsync) as url:
            return asyncio.run(_work(settings, url, work))
    except StoreError as error:
        fail(str(error))


async def _work(settings: Settings, url: str, work: Callable[[EventStream], Awaitable[Result]]) -> Result:
    from metaban.store.client.connection import connect
    from metaban.store.errors import StoreError
    from metaban.store.events.stream import EventStream
    from metaban.store.namespaces import NamespaceStore

    redis = connect(url)
    try:
        record = await NamespaceStore(redis).load(settings.namespace)
        if record is None or record.state == "deleted":
            raise StoreError(f"there is no namespace {settings.namespace} in this store: see METABAN_NAMESPACE")
        return await work(
            EventStream(
                redis,
                record.keys,
                dedupe_window_s=record.reward_rules.dedupe_window_s,
                backlog_limit=settings.backlog_limit,
            )
        )
    finally:
        await redis.aclose()


def _row(letter: DeadLetter) -> dict[str, str | int | float | None]:
    event = letter.event
    return {
        "partition": letter.partition,
        "letter_id": letter.letter_id,
        "user_id": event and event.user_id,
        "decision_id": event and event.decision_id,
        "arm_id": event and event.arm_id,
        "reward": event and event.reward,
        "reason": letter.reason,
    }
