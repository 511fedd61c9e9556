"""The data calls: recommendations, rewards and health. Each function makes the call for one method of the clients.

Arguments and docstrings of these functions are those of the methods (`clients.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import httpx

from metaban.client.codec import (
    ArmFeatures,
    Features,
    JsonObject,
    elements_of,
    encoded,
    flag,
    member,
    parse,
    query,
    read,
    segment,
)
from metaban.client.errors import InvalidArgument, api_error
from metaban.client.transport import Call
from metaban.client.types import Activation, Ask, BatchResult, Decision, FeedbackResult, Live, Ready, Reward

T = TypeVar("T")

#: Statuses besides 200 with which /health/ready answers its document.
NOT_READY: Final = frozenset({503})


def as_answer(answer: type[T], name: str | None = None) -> Callable[[httpx.Response], T]:
    """Reads the answer, or one member of it, as a dataclass."""

    def read_answer(response: httpx.Response) -> T:
        document = parse(response.content)
        return read(answer, document) if name is None else read(answer, member(document, name), name)

    return read_answer


# Recommendations


def recommend(
    user_id: str,
    arms: ArmFeatures | None = None,
    *,
    arm_ids: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    k: int = 1,
    context: Features | None = None,
    user_features: Features | None = None,
    decision_id: str | None = None,
    explain: bool = False,
    min_version: int | None = None,
    deferred: bool = False,
) -> Call[Decision]:
    """Choose `k` arms for a user: of `arms` ({id: features} or [{"id": …, "features": …}]), of the arms `arm_ids` of
    the catalogue, or of the whole catalogue.

    If `decision_id` is left out, the client generates one, so that a retry returns the decision of the first try.
    """
    ask = Ask(
        user_id, arms, arm_ids, exclude, k, context, user_features, explain=explain, min_version=min_version,
        deferred=deferred, **({} if decision_id is None else {"decision_id": decision_id}),
    )  # fmt: skip
    return Call("POST", "/recommend", as_answer(Decision), content=encoded(ask.json()))


def recommend_batch(asks: Iterable[Ask]) -> Call[tuple[BatchResult, ...]]:
    """Up to 100 requests in one; each has its own decision or error, in the same order."""
    content = encoded({"requests": _all_json("asks", Ask, "a list of Ask(user_id, arms, …)", asks)})
    return Call("POST", "/recommend/batch", _batch_results, content=content)


def _batch_results(response: httpx.Response) -> tuple[BatchResult, ...]:
    results = read(tuple[dict, ...], member(parse(response.content), "results"), "results")  # type: ignore[type-arg]
    return tuple(_batch_result(result, f"results[{index}]") for index, result in enumerate(results))


def _batch_result(result: Any, path: str) -> BatchResult:
    status = read(int, member(result, "status"), f"{path}.status")
    if status == httpx.codes.OK:
        return BatchResult(status, read(Decision, member(result, "decision"), f"{path}.decision"))
    return BatchResult(status, error=api_error(status, result.get("problem")))


def activate(decision_id: str) -> Call[Activation]:
    """Activate a `deferred` decision: it counts from now on. Repeating the call has no further effect."""
    return Call("POST", f"/decisions/{segment('decision_id', decision_id)}/activate", as_answer(Activation))


# Rewards


def feedback(
    decision_id: str,
    reward: float,
    *,
    arm_id: str | None = None,
    event_id: str | None = None,
    wait_applied: bool = False,
) -> Call[FeedbackResult]:
    """Send the reward of an arm; `arm_id` is required only if the decision has several arms.

    A reward counts once per `event_id`, which by default is derived from decision and arm: sent again, by a retry or by
    the application, it does not count twice. Several rewards of one arm need an `event_id` each. With `wait_applied`
    the call waits until the reward is applied and served.
    """
    return _feedback(Reward(decision_id, reward, arm_id, event_id).json(), wait_applied=wait_applied)


def feedback_batch(rewards: Iterable[Reward], *, wait_applied: bool = False) -> Call[FeedbackResult]:
    """Send up to 1,000 rewards; refused ones are in `rejected`."""
    events = _all_json("rewards", Reward, "a list of Reward(decision_id, reward)", rewards)
    return _feedback({"events": events}, wait_applied=wait_applied)


def _feedback(body: JsonObject, *, wait_applied: bool) -> Call[FeedbackResult]:
    wait = "applied" if flag("wait_applied", wait_applied) else None
    return Call("POST", "/feedback", as_answer(FeedbackResult), query(wait=wait), encoded(body))


def _all_json(name: str, kind: type[Ask | Reward], expected: str, values: Iterable[Ask | Reward]) -> list[JsonObject]:
    bodies = []
    for value in elements_of(name, expected, values):
        if not isinstance(value, kind):
            raise InvalidArgument(f"{name} must be {expected}, and has an element of type {type(value).__name__}")
        bodies.append(value.json())
    return bodies


# Health


def live() -> Call[Live]:
    """Whether the process answers."""
    return Call("GET", "/health/live", as_answer(Live), of_namespace=False)


def ready() -> Call[Ready]:
    """Whether the service accepts requests, and why not. Returns, and does not raise, if it does not."""
    return Call("GET", "/health/ready", as_answer(Ready), also_read=NOT_READY, of_namespace=False)
