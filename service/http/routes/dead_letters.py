"""/admin/dead-letters: list, replay and discard events that could not be applied."""

from __future__ import annotations

from typing import Annotated, Final, Literal, final

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from metaban.service.errors import (
    Forbidden,
    InvalidInput,
    NotFound,
    NotReplayable,
    Overloaded,
    Unauthorized,
    Unavailable,
)
from metaban.service.http.audit import AuditedRoute
from metaban.service.http.auth import AdminEngine
from metaban.service.http.openapi import problem_responses
from metaban.store.events.dead_letters import DeadLetter

#: Letters on one page: by default, and at most.
PAGE_LETTERS: Final = 50
PAGE_LETTERS_MAX: Final = 200

#: Letters that one call replays at most.
REPLAYED_AT_ONCE: Final = 1_000

router = APIRouter(route_class=AuditedRoute, prefix="/admin/dead-letters", tags=["dead letters"])

Partition = Annotated[int, Path(ge=0, description="As in the list.")]

LetterId = Annotated[str, Path(max_length=64, description="As in the list.", examples=["1767225600000-0"])]


@final
class LetterEvent(BaseModel):
    """The event, without its features."""

    user_id: str
    incarnation: int
    decision_id: str
    arm_id: str
    event_id: str
    reward: float = Field(description="Scaled from the reward range to 0..1.")
    received_ms: int


@final
class LetterOut(BaseModel):
    """An event that could not be applied."""

    partition: int
    letter_id: str
    reason: str
    attempts: int = Field(description="How often the worker tried to apply it alone.")
    buried_ms: int
    event: LetterEvent | None = Field(description="null if the entry is not a reward; it can only be discarded.")

    @staticmethod
    def of(letter: DeadLetter) -> LetterOut:
        event = letter.event
        return LetterOut(
            partition=letter.partition,
            letter_id=letter.letter_id,
            reason=letter.reason,
            attempts=letter.attempts,
            buried_ms=letter.buried_ms,
            event=event and LetterEvent.model_validate(event, from_attributes=True),
        )


@final
class LettersOut(BaseModel):
    """A page of the dead letters."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "letters": [
                        {
                            "partition": 3,
                            "letter_id": "1767225600000-0",
                            "reason": "not applied after 5 attempts",
                            "attempts": 5,
                            "buried_ms": 1767225600000,
                            "event": {
                                "user_id": "ada",
                                "incarnation": 0,
                                "decision_id": "first-order",
                                "arm_id": "sencha",
                                "event_id": "first-order:sencha",
                                "reward": 1.0,
                                "received_ms": 1767225570000,
                            },
                        }
                    ],
                    "cursor": None,
                }
            ]
        }
    )

    letters: list[LetterOut]
    cursor: str | None = Field(description="Cursor of the next page; null on the last page.")


@final
class ReplayedOut(BaseModel):
    """A letter that is in the event stream again."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"entry_id": "1767225700000-0"}]})

    entry_id: str = Field(description="Id of the event in its stream.")


@final
class ReplayedAllOut(BaseModel):
    """How many letters were replayed."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"replayed": 12, "refused": 1, "cursor": None}]})

    replayed: int
    refused: int = Field(description="Letters that cannot be replayed; they stay dead letters.")
    cursor: str | None = Field(description="Cursor for the next call; null when all letters were tried.")


@final
class DiscardedOut(BaseModel):
    """A letter that was deleted."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"discarded": True}]})

    discarded: Literal[True] = True


@router.get(
    "",
    summary="List dead letters",
    responses=problem_responses(Unauthorized, Forbidden, InvalidInput, Unavailable),
)
async def letters(
    engine: AdminEngine,
    limit: Annotated[int, Query(ge=1, le=PAGE_LETTERS_MAX)] = PAGE_LETTERS,
    cursor: Annotated[str | None, Query(max_length=64, description="`cursor` of the previous page.")] = None,
    order: Annotated[Literal["newest", "oldest"], Query(description="Which letters come first.")] = "newest",
) -> LettersOut:
    """The dead letters of all partitions."""
    try:
        page = await engine.ask_events(
            lambda events: events.letters.page(limit=limit, cursor=cursor, newest_first=order == "newest")
        )
    except ValueError:
        raise InvalidInput(("cursor",), "is not a cursor returned by this call") from None
    return LettersOut(letters=[LetterOut.of(letter) for letter in page.letters], cursor=page.cursor)


@router.post(
    "/replay",
    summary="Replay all dead letters",
    responses=problem_responses(Unauthorized, Forbidden, InvalidInput, Overloaded, Unavailable),
)
async def replay_all(
    engine: AdminEngine,
    cursor: Annotated[str | None, Query(max_length=64, description="`cursor` of the previous call.")] = None,
) -> ReplayedAllOut:
    """Put up to 1,000 letters back into the event streams. After a 503 some may have been replayed; repeat the call to
    continue."""
    try:
        done = await engine.ask_events(
            lambda events: events.letters.replay_everything(most=REPLAYED_AT_ONCE, cursor=cursor)
        )
    except ValueError:
        raise InvalidInput(("cursor",), "is not a cursor returned by this call") from None
    return ReplayedAllOut(replayed=done.replayed, refused=done.refused, cursor=done.cursor)


@router.post(
    "/{partition}/{letter_id}/replay",
    summary="Replay a dead letter",
    responses=problem_responses(
        Unauthorized, Forbidden, NotFound, NotReplayable, InvalidInput, Overloaded, Unavailable
    ),
)
async def replay(engine: AdminEngine, partition: Partition, letter_id: LetterId) -> ReplayedOut:
    """Put an event back into its stream and reset its attempts. It is learned once, or becomes a dead letter again."""
    answer = await engine.ask_events(lambda events: events.letters.replay(partition, letter_id))
    if answer.status == "unknown":
        raise NotFound("There is no such letter; it may have been replayed or discarded.")
    if answer.status == "refused":
        raise NotReplayable(f"The letter cannot be replayed: {answer.detail}.")
    return ReplayedOut(entry_id=answer.detail)


@router.delete(
    "/{partition}/{letter_id}",
    summary="Discard a dead letter",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def discard(engine: AdminEngine, partition: Partition, letter_id: LetterId) -> DiscardedOut:
    """Delete a letter. Its reward is never learned."""
    if not await engine.ask_events(lambda events: events.letters.discard(partition, letter_id)):
        raise NotFound("There is no such letter; it may have been replayed or discarded.")
    return DiscardedOut()
