"""GET /admin/stream: state of the event streams."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final, final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from metaban.service.errors import Forbidden, Unauthorized, Unavailable
from metaban.service.http.audit import AuditedRoute
from metaban.service.http.auth import AdminEngine
from metaban.service.http.openapi import problem_responses
from metaban.store.events.stream import PartitionStatus
from metaban.store.users.users import COUNTERS

router = APIRouter(route_class=AuditedRoute, tags=["administration"])

COUNTED_EXAMPLE: Final[JsonDict] = {**dict.fromkeys(COUNTERS, 0), "enqueued": 90, "applied": 87}


class StreamTotals(BaseModel):
    """Numbers that are summed over partitions."""

    waiting: int = Field(description="Events not learned yet, whether delivered to a worker or not.")
    pending: int = Field(description="Waiting events that were delivered to a worker.")
    dead_letters: int = Field(description="Dead letters that are kept.")
    oldest_age_ms: int | None = Field(description="Age of the oldest waiting event; null if none waits.")
    counters: dict[str, int] = Field(
        description="Events counted since the namespace was created. In each partition, "
        "enqueued + replayed = applied + voided + buried + waiting."
    )


@final
class PartitionOut(StreamTotals):
    """One partition."""

    partition: int
    consumers: int = Field(description="Consumers of the group `learners`, including those of stopped workers.")
    owner: str | None = Field(description="The worker that reads the partition; null if there is none.")


@final
class TotalsOut(StreamTotals):
    """All partitions together."""

    unowned: int = Field(description="Partitions that no worker reads.")


@final
class StreamOut(BaseModel):
    """The event streams of a namespace."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "totals": {
                        "waiting": 3,
                        "pending": 1,
                        "dead_letters": 0,
                        "oldest_age_ms": 12,
                        "counters": COUNTED_EXAMPLE,
                        "unowned": 0,
                    },
                    "partitions": [
                        {
                            "partition": 0,
                            "waiting": 3,
                            "pending": 1,
                            "consumers": 1,
                            "owner": "worker-1-5f1c22ab",
                            "oldest_age_ms": 12,
                            "dead_letters": 0,
                            "counters": COUNTED_EXAMPLE,
                        }
                    ],
                }
            ]
        }
    )

    totals: TotalsOut
    partitions: list[PartitionOut]


@router.get(
    "/admin/stream",
    summary="State of the event streams",
    responses=problem_responses(Unauthorized, Forbidden, Unavailable),
)
async def show(engine: AdminEngine) -> StreamOut:
    """Backlog, workers, dead letters and counters of every partition, read in one round trip."""
    found = await engine.ask_events(lambda events: events.status(COUNTERS))
    return StreamOut(totals=_totals(found), partitions=[PartitionOut(**asdict(each)) for each in found])


def _totals(found: list[PartitionStatus]) -> TotalsOut:
    ages = [each.oldest_age_ms for each in found if each.oldest_age_ms is not None]
    return TotalsOut(
        waiting=sum(each.waiting for each in found),
        pending=sum(each.pending for each in found),
        dead_letters=sum(each.dead_letters for each in found),
        oldest_age_ms=max(ages, default=None),
        counters={name: sum(each.counters[name] for each in found) for name in COUNTERS},
        unowned=sum(each.owner is None for each in found),
    )
