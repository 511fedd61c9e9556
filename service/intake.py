"""From the bytes of a body to a command for the engine, or to an error that names the field.

Cheap checks of size come first, so that a hostile body costs no more than its parsing; then pydantic; then what no
field can tell by itself. Bodies are parsed by pydantic's parser, which is faster than the standard library's and
refuses deep nesting, numbers of thousands of digits and lone surrogates.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from array import array
from typing import Any, Final, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json

from service.contracts import ArmInput, Features, RecommendCommand, RewardCommand
from service.errors import (
    BodyTimeout,
    FieldPath,
    InvalidInput,
    MalformedBody,
    UnsupportedMedia,
    format_field,
)
from service.problems import invalid_input
from service.schemas import MAX_EVENTS, ArmIn, RecommendRequest, RequestModel, RewardBatch, RewardIn
from service.settings import Settings

#: A client on a bad line needs seconds for a megabyte; one that takes longer holds memory for nothing. One that sends
#: next to nothing is given up on earlier, by `service.gate`.
BODY_TIMEOUT_S: Final = 30.0
JSON_MEDIA: Final = re.compile(r"\s*application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)
#: Longest body that is looked through for what is wrong with it.
EXPLAINED_BYTES: Final = 65_536
SURROGATES: Final = re.compile("[\ud800-\udfff]")

#: Looked up once: pydantic finds the fields of a model anew at each question, and there is one for each arm.
KNOWN_MEMBERS: Final[dict[type[RequestModel], frozenset[str]]] = {
    model: frozenset(model.model_fields) for model in (RecommendRequest, ArmIn, RewardIn, RewardBatch)
}

Model = TypeVar("Model", bound=RequestModel)


async def read_body(request: Request) -> bytes:
    """The body of a request that says it is JSON."""
    # Not pedantry: a web page may send anything but JSON to a service on this machine without asking first.
    if not JSON_MEDIA.fullmatch(request.headers.get("content-type", "")):
        raise UnsupportedMedia("Send the body as JSON, with the header `Content-Type: application/json`.")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedMedia("Send the body as it is: compressed bodies are not read.")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.body()
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {BODY_TIMEOUT_S:g} s.") from None


def parse_json(body: bytes) -> Any:
    """JSON as Python values; NaN, Infinity and 1e999 are let through, for the field's own check to refuse."""
    try:
        return from_json(body)
    except ValueError as error:
        raise _refusal_of(body, str(error)) from None


def _refusal_of(body: bytes, reason: str) -> InvalidInput | MalformedBody:
    """Tell JSON that we refuse from what is no JSON; only this slow path reads with the standard library."""
    if "recursion limit" in reason:
        return InvalidInput((), reason)
    if len(body) > EXPLAINED_BYTES:
        return MalformedBody(f"The body is not JSON that is read here: {reason}.")
    try:
        value = json.loads(body.decode())
    except UnicodeDecodeError as error:
        return MalformedBody(f"The body is not UTF-8 (byte {error.start}).")
    except json.JSONDecodeError:
        return MalformedBody(f"The body is not JSON: {reason}.")
    except (RecursionError, ValueError):
        return InvalidInput((), reason)
    path = _find_surrogate(value)
    return InvalidInput((), reason) if path is None else InvalidInput(path, "holds half of a surrogate pair")


def _find_surrogate(value: Any) -> FieldPath | None:
    stack: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, str) and SURROGATES.search(item):
            return path
        if isinstance(item, list):
            stack.extend(((*path, place), part) for place, part in enumerate(item))
        elif isinstance(item, dict):
            for name, part in item.items():
                stack.append(((*path, name), name))
                stack.append(((*path, name), part))
    return None


def recommend_command(payload: Any, settings: Settings) -> RecommendCommand:
    """Validate a POST /recommend."""
    members = _members(payload, RecommendRequest, ())
    arms = members.get("arms")
    if isinstance(arms, list):
        if len(arms) > settings.max_arms:
            raise InvalidInput(("arms",), f"holds {len(arms)} arms; at most {settings.max_arms} are allowed")
        for place, arm in enumerate(arms):
            if isinstance(arm, dict):
                features = _members(arm, ArmIn, ("arms", place)).get("features")
                _check_length(features, settings.max_dimension, ("arms", place, "features"))
    _check_length(members.get("context"), settings.max_dimension, ("context",))
    request = _validate(RecommendRequest, members)
    _check_arms(request)
    return RecommendCommand(
        user_id=request.user_id,
        arms=tuple(ArmInput(arm.id, arm.features) for arm in request.arms),
        context=request.context,
        k=request.k,
        decision_id=request.decision_id,
        fingerprint=fingerprint(request),
    )


def reward_commands(payload: Any) -> tuple[list[RewardCommand], bool]:
    """Validate a POST /feedback; whether it was a batch decides how a rejection is told."""
    if not (isinstance(payload, dict) and "events" in payload):
        reward = _validate(RewardIn, _members(payload, RewardIn, ()))
        return [_reward_command(reward)], False
    members = _members(payload, RewardBatch, ())
    events = members["events"]
    if isinstance(events, list):
        if len(events) > MAX_EVENTS:
            raise InvalidInput(("events",), f"holds {len(events)} events; at most {MAX_EVENTS} are allowed")
        for place, event in enumerate(events):
            if isinstance(event, dict):
                _members(event, RewardIn, ("events", place))
    return [_reward_command(reward) for reward in _validate(RewardBatch, members).events], True


def fingerprint(request: RecommendRequest) -> str:
    """SHA-256 of what was asked, whatever the order of members and however numbers were written."""
    parts = [b"metaban/1", request.user_id.encode(), str(request.k).encode(), _canonical(request.context)]
    for arm in request.arms:
        parts += (arm.id.encode(), _canonical(arm.features))
    # With the lengths in front, no two lists of parts are the same bytes.
    return hashlib.sha256(array("q", map(len, parts)).tobytes() + b"".join(parts)).hexdigest()


def _canonical(features: Features | None) -> bytes:
    if isinstance(features, list):
        return b"list" + array("d", features).tobytes()
    return b"json" + json.dumps(features, sort_keys=True, separators=(",", ":")).encode()


def _members(payload: Any, model: type[RequestModel], path: FieldPath) -> dict[str, Any]:
    """The object at `path`, which holds no member that the model does not know."""
    if not isinstance(payload, dict):
        raise InvalidInput(path, "must be a JSON object")
    if not payload.keys() <= KNOWN_MEMBERS[model]:
        # One is enough: a body can hold a hundred thousand of them.
        name = next(name for name in payload if name not in KNOWN_MEMBERS[model])
        raise InvalidInput((*path, name), "is not known here")
    return payload


def _check_length(features: Any, limit: int, path: FieldPath) -> None:
    if isinstance(features, list | dict) and len(features) > limit:
        raise InvalidInput(path, f"holds {len(features)} values; at most {limit} are allowed")


def _check_arms(request: RecommendRequest) -> None:
    first = request.arms[0].features
    places: dict[str, int] = {}
    for place, arm in enumerate(request.arms):
        if (earlier := places.setdefault(arm.id, place)) != place:
            raise InvalidInput(("arms", place, "id"), f"is the id of {format_field(('arms', earlier))} too")
        if type(arm.features) is not type(first):
            raise InvalidInput(("arms", place, "features"), "must be a list in all arms, or an object in all of them")
        if isinstance(first, list) and len(arm.features) != len(first):
            raise InvalidInput(
                ("arms", place, "features"),
                f"has {len(arm.features)} numbers where {format_field(('arms', 0))} has {len(first)}",
            )
    if request.k > len(request.arms):
        raise InvalidInput(("k",), f"is {request.k}, and there are {len(request.arms)} arms to choose from")


def _validate(model: type[Model], members: dict[str, Any]) -> Model:
    try:
        return model.model_validate(members)
    except ValidationError as error:
        raise invalid_input(error) from None


def _reward_command(reward: RewardIn) -> RewardCommand:
    return RewardCommand(reward.decision_id, reward.arm_id, reward.reward, reward.event_id)
