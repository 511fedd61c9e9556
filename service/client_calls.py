"""Every call of the API, as a plan: what is sent, and how the answer is read. `service.client` has the methods.

The functions here are the methods of both clients: their arguments and their documentation are what applications see.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import quote

import httpx

from service.client_admin_types import Page
from service.client_core import Call
from service.client_errors import Unsendable, api_error
from service.client_reading import member, parse, read
from service.client_types import (
    Activation,
    Ask,
    BatchResult,
    Decision,
    Features,
    FeedbackResult,
    Live,
    Ready,
    Reward,
)

T = TypeVar("T")

#: Statuses of /health/ready that have its answer.
NOT_READY: Final = frozenset({503})


# Building and reading


def encoded(value: Any) -> bytes:
    """A body, written once: every try sends the same bytes. What JSON does not have, such as NaN, is Unsendable."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Unsendable(f"cannot be written as JSON: {error}") from None


def segment(name: str | int) -> str:
    """A name as part of a path."""
    # `..` would be taken for a way up, by us or by a proxy.
    return quote(str(name), safe="").replace(".", "%2E")


def query(**parameters: str | int | bool | None) -> dict[str, str]:
    """Parameters as they are written in a URL; None is left out."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in parameters.items()
        if value is not None
    }


def as_answer(answer: type[T], name: str | None = None) -> Callable[[httpx.Response], T]:
    """Reads the whole answer as a dataclass, or one member of it."""

    def read_answer(response: httpx.Response) -> T:
        document = parse(response.content)
        return read(answer, document) if name is None else read(answer, member(document, name), name)

    return read_answer


def as_page(answer: type[T], name: str) -> Callable[[httpx.Response], Page[T]]:
    """Reads a list that comes in pages."""

    def read_page(response: httpx.Response) -> Page[T]:
        document = parse(response.content)
        items: tuple[T, ...] = read(tuple[answer, ...], member(document, name), name)  # type: ignore[valid-type]
        return Page(items, read(str | None, member(document, "cursor"), "cursor"))  # type: ignore[arg-type]

    return read_page


def as_list(answer: type[T], name: str) -> Callable[[httpx.Response], tuple[T, ...]]:
    """Reads a list that comes whole."""

    def read_list(response: httpx.Response) -> tuple[T, ...]:
        items: tuple[T, ...] = read(tuple[answer, ...], member(parse(response.content), name), name)  # type: ignore[valid-type]
        return items

    return read_list


def ignored(response: httpx.Response) -> None:
    """Nothing in the answer is of interest."""


# Recommendations


def recommend(
    user_id: str,
    arms: Mapping[str, Features] | None = None,
    *,
    arm_ids: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    k: int = 1,
    context: Features | None = None,
    user_features: Features | None = None,
    decision_id: str | None = None,
    explain: bool = False,
    min_version: int | None = None,
    deferred: bool = False,
) -> Call[Decision]:
    """Choose `k` arms for a user: of `arms` (features by id), of the catalogue's `arm_ids`, or of all the catalogue.

    The `decision_id` is made up here when it is left out, so that a retry gets the decision of the first try.
    """
    ask = Ask(
        user_id, arms, arm_ids, exclude, k, context, user_features, explain=explain, min_version=min_version,
        deferred=deferred, **({} if decision_id is None else {"decision_id": decision_id}),
    )  # fmt: skip
    return Call("POST", "/recommend", as_answer(Decision), content=encoded(ask.json()))


def recommend_batch(asks: Sequence[Ask]) -> Call[tuple[BatchResult, ...]]:
    """Up to 100 questions at once; every one is decided or refused by itself, in order."""
    content = encoded({"requests": [ask.json() for ask in asks]})
    return Call("POST", "/recommend/batch", _batch_results, content=content)


def _batch_results(response: httpx.Response) -> tuple[BatchResult, ...]:
    results = read(tuple[dict, ...], member(parse(response.content), "results"), "results")  # type: ignore[type-arg]
    return tuple(_batch_result(result, f"results[{place}]") for place, result in enumerate(results))


def _batch_result(result: Any, where: str) -> BatchResult:
    status = read(int, member(result, "status"), f"{where}.status")
    if status == httpx.codes.OK:
        return BatchResult(status, read(Decision, member(result, "decision"), f"{where}.decision"))
    return BatchResult(status, error=api_error(status, result.get("problem")))


def activate(decision_id: str) -> Call[Activation]:
    """Let a decision that was `deferred` count from now on; repeating it is harmless."""
    return Call("POST", f"/decisions/{segment(decision_id)}/activate", as_answer(Activation))


def feedback(
    decision_id: str,
    reward: float,
    *,
    arm_id: str | None = None,
    event_id: str | None = None,
    wait_applied: bool = False,
) -> Call[FeedbackResult]:
    """Report how an arm of a decision went; `arm_id` may be left out when one was chosen.

    A reward counts once per `event_id`. Left out, that is the decision and the arm: sent again, by a retry here or by
    the application, it never counts twice. Several rewards of one arm need an id each. `wait_applied` waits until the
    service has learned it.
    """
    return _feedback(Reward(decision_id, reward, arm_id, event_id).json(), wait_applied=wait_applied)


def feedback_batch(rewards: Sequence[Reward], *, wait_applied: bool = False) -> Call[FeedbackResult]:
    """Report up to 1,000 rewards at once; those that are not taken are in `rejected`."""
    return _feedback({"events": [reward.json() for reward in rewards]}, wait_applied=wait_applied)


def _feedback(body: Mapping[str, Any], *, wait_applied: bool) -> Call[FeedbackResult]:
    return Call(
        "POST",
        "/feedback",
        as_answer(FeedbackResult),
        query(wait="applied" if wait_applied else None),
        encoded(body),
    )


# Health


def live() -> Call[Live]:
    """Does the process answer?"""
    return Call("GET", "/health/live", as_answer(Live), of_namespace=False)


def ready() -> Call[Ready]:
    """May requests be sent, and if not, why? Does not raise when the service says no."""
    return Call("GET", "/health/ready", as_answer(Ready), also_read=NOT_READY, of_namespace=False)
