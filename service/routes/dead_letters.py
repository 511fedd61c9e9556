"""/admin/dead-letters: events that were given up on, to be looked at, put back or thrown away."""

from __future__ import annotations

from typing import Annotated, Literal, final

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from service.auth import AdminEngine
from service.errors import Forbidden, InvalidInput, NotFound, NotReplayable, Overloaded, Unauthorized, Unavailable
from service.openapi import problem_responses
from store.dead_letters import DeadLetter

#: Letters shown on one page.
PAGE_LETTERS = 50
PAGE_LETTERS_MAX = 200
#: Letters that one call tries to put back.
REPLAYED_AT_ONCE = 1_000

router = APIRouter(prefix="/admin/dead-letters", tags=["dead letters"])

Partition = Annotated[int, Path(ge=0, description="As listed.")]
LetterId = Annotated[str, Path(max_length=64, description="As listed.", examples=["1767225600000-0"])]


@final
class LetterEvent(BaseModel):
    """The reward that could not be learned, without its inputs."""

    user_id: str
    incarnation: int
    decision_id: str
    arm_id: str
    event_id: str
    reward: float = Field(description="As it is learned, from 0 to 1: its place in the range that it was sent in.")
    received_ms: int


@final
class LetterOut(BaseModel):
    """An event that was given up on."""

    partition: int
    letter_id: str
    reason: str
    attempts: int = Field(description="How often it was tried alone.")
    buried_ms: int
    event: LetterEvent | None = Field(description="Null for an entry that is not a reward; it can only be discarded.")

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
    cursor: str | None = Field(description="Ask for the next page with it; null on the last one.")


@final
class ReplayedOut(BaseModel):
    """A letter that waits to be learned again."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"entry_id": "1767225700000-0"}]})

    entry_id: str = Field(description="What the event is called in its stream now.")


@final
class ReplayedAllOut(BaseModel):
    """What became of the letters."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"replayed": 12, "refused": 1, "cursor": None}]})

    replayed: int
    refused: int = Field(description="Left where they are, since no worker could take them.")
    cursor: str | None = Field(description="There may be more: call again with it. Null when all were tried.")


@final
class DiscardedOut(BaseModel):
    """A letter that is gone."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"discarded": True}]})

    discarded: Literal[True] = True


@router.get(
    "",
    summary="List events that were given up on",
    responses=problem_responses(Unauthorized, Forbidden, InvalidInput, Unavailable),
)
async def letters(
    engine: AdminEngine,
    limit: Annotated[int, Query(ge=1, le=PAGE_LETTERS_MAX)] = PAGE_LETTERS,
    cursor: Annotated[str | None, Query(max_length=64, description="Of the page before.")] = None,
    order: Annotated[Literal["newest", "oldest"], Query(description="Which come first.")] = "newest",
) -> LettersOut:
    """The dead letters of all partitions."""
    try:
        page = await engine.ask_events(
            lambda events: events.dead_letters(limit=limit, cursor=cursor, newest_first=order == "newest")
        )
    except ValueError:
        raise InvalidInput(("cursor",), "is not one that this call has answered with") from None
    return LettersOut(letters=[LetterOut.of(letter) for letter in page.letters], cursor=page.cursor)


@router.post(
    "/replay",
    summary="Have all of them learned again",
    responses=problem_responses(Unauthorized, Forbidden, InvalidInput, Overloaded, Unavailable),
)
async def replay_all(
    engine: AdminEngine,
    cursor: Annotated[str | None, Query(max_length=64, description="Of the call before.")] = None,
) -> ReplayedAllOut:
    """Put back the letters there are now, up to 1,000 in one call. After a 503 some are put back; the same call again
    goes on."""
    try:
        done = await engine.ask_events(lambda events: events.replay_everything(most=REPLAYED_AT_ONCE, cursor=cursor))
    except ValueError:
        raise InvalidInput(("cursor",), "is not one that this call has answered with") from None
    return ReplayedAllOut(replayed=done.replayed, refused=done.refused, cursor=done.cursor)


@router.post(
    "/{partition}/{letter_id}/replay",
    summary="Have one learned again",
    responses=problem_responses(
        Unauthorized, Forbidden, NotFound, NotReplayable, InvalidInput, Overloaded, Unavailable
    ),
)
async def replay(engine: AdminEngine, partition: Partition, letter_id: LetterId) -> ReplayedOut:
    """Put an event back, its attempts forgotten. It is learned once, or comes to the dead letters again."""
    answer = await engine.ask_events(lambda events: events.replay(partition, letter_id))
    if answer.status == "unknown":
        raise NotFound("No such letter: it was replayed, discarded or never there.")
    if answer.status == "refused":
        raise NotReplayable(f"The letter cannot be put back: {answer.detail}.")
    return ReplayedOut(entry_id=answer.detail)


@router.delete(
    "/{partition}/{letter_id}",
    summary="Throw one away",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def discard(engine: AdminEngine, partition: Partition, letter_id: LetterId) -> DiscardedOut:
    """Delete a letter for good: its reward is not learned."""
    if not await engine.ask_events(lambda events: events.discard(partition, letter_id)):
        raise NotFound("No such letter: it was replayed, discarded or never there.")
    return DiscardedOut()
