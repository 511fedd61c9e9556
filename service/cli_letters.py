"""`metaban dead-letters …`: events that were given up on, to be looked at, put back or thrown away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from service.settings import Settings
from service.terminal import WRONG_USE, fail, print_rows, settings_or_exit, stderr, stdout

if TYPE_CHECKING:
    from store.dead_letters import DeadLetter
    from store.events import EventStream

letters_app = typer.Typer(
    help="Events that no learner could take: list them, have them learned again, or throw them away.",
    epilog="Works on the namespace of METABAN_NAMESPACE, in the store that\n`metaban snapshot --help` tells of.",
    no_args_is_help=True,
)
COLUMNS: Final = ("partition", "letter", "user", "decision", "arm", "reward", "reason")
Result = TypeVar("Result")

Partition = Annotated[int, typer.Argument(min=0, help="As listed.")]
LetterId = Annotated[str, typer.Argument(help="As listed.")]


@letters_app.command("list")
def list_letters(
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Letters shown.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Go on where another list ended.")] = None,
    oldest: Annotated[bool, typer.Option("--oldest", help="The oldest first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show the letters of all partitions, the newest first."""
    try:
        page = _with_stream(lambda stream: stream.dead_letters(limit=limit, cursor=cursor, newest_first=not oldest))
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
        stderr.print(f"there are more: --cursor {page.cursor}", markup=False)


@letters_app.command()
def replay(
    partition: Annotated[int | None, typer.Argument(min=0, help="As listed.")] = None,
    letter_id: Annotated[str | None, typer.Argument(help="As listed.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All letters there are now.")] = False,
) -> None:
    """Have a letter learned again, or all of them; each counts once, however often this is called."""
    if everything and partition is None:
        done = _with_stream(lambda stream: stream.replay_everything())
        stdout.print(f"replayed {done.replayed}, refused {done.refused}")
    elif not everything and partition is not None and letter_id is not None:
        answer = _with_stream(lambda stream: stream.replay(partition, letter_id))
        if answer.status != "replayed":
            fail(f"not replayed: {answer.detail}")
        stdout.print(f"replayed as {answer.detail}", markup=False)
    else:
        fail("name a partition and a letter, or --all", status=WRONG_USE)


@letters_app.command()
def discard(partition: Partition, letter_id: LetterId) -> None:
    """Delete a letter for good: its reward is not learned."""
    if not _with_stream(lambda stream: stream.discard(partition, letter_id)):
        fail("no such letter")
    stdout.print("discarded")


def _with_stream(work: Callable[[EventStream], Awaitable[Result]]) -> Result:
    """Do something with the event streams of the namespace that the settings name."""
    settings = settings_or_exit()
    from store.errors import StoreError
    from store.locate import located_store

    try:
        with located_store(settings.redis_url, settings.data_dir, appendfsync=settings.appendfsync) as url:
            return asyncio.run(_work(settings, url, work))
    except StoreError as error:
        fail(str(error))


async def _work(settings: Settings, url: str, work: Callable[[EventStream], Awaitable[Result]]) -> Result:
    from store.connection import connect
    from store.errors import StoreError
    from store.events import EventStream
    from store.namespaces import Namespaces

    redis = connect(url)
    try:
        record = await Namespaces(redis).load(settings.namespace)
        if record is None or record.state == "deleted":
            raise StoreError(f"there is no namespace {settings.namespace} in this store: see METABAN_NAMESPACE")
        return await work(
            EventStream(
                redis, record.keys, dedupe_window_s=settings.dedupe_window_s, backlog_limit=settings.backlog_limit
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
