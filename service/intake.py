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
from functools import cache
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
from service.schemas import (
    MAX_EVENTS,
    ArmIn,
    RecommendRequest,
    RequestModel,
    RewardBatch,
    RewardIn,
)
from service.settings import Settings

#: A client on a bad line needs seconds for a megabyte; one that takes longer holds memory for nothing. One that sends
#: next to nothing is given up on earlier, by `service.gate`.
BODY_TIMEOUT_S: Final = 30.0
JSON_MEDIA: Final = re.compile(r"\s*application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)
#: Longest body that is looked through for what is wrong with it.
EXPLAINED_BYTES: Final = 65_536
SURROGATES: Final = re.compile("[\ud800-\udfff]")

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
        return InvalidInput((), nested_too_deeply(reason))
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


def nested_too_deeply(reason: str) -> str:
    """What is said where the parser speaks of its recursion: it says where that was."""
    return f"is nested too deeply, at {reason.rpartition(' at ')[2]}"


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
    members = members_of(payload, RecommendRequest)
    arms = members.get("arms")
    if isinstance(arms, list):
        if len(arms) > settings.max_arms:
            raise InvalidInput(("arms",), f"holds {len(arms)} arms; at most {settings.max_arms} are allowed")
        for place, arm in enumerate(arms):
            if isinstance(arm, dict):
                features = members_of(arm, ArmIn, ("arms", place)).get("features")
                check_length(features, settings.max_dimension, ("arms", place, "features"))
    for name in ("arm_ids", "exclude"):
        check_length(members.get(name), settings.max_arms, (name,))
    for name in ("context", "user_features"):
        check_length(members.get(name), settings.max_dimension, (name,))
    request = validated(RecommendRequest, members)
    exclude = frozenset(request.exclude or ())
    if request.arms is not None:
        _check_arms(request.arms)
        _check_k(request, exclude)
    _check_arm_ids(request)
    return RecommendCommand(
        user_id=request.user_id,
        arms=tuple(ArmInput(arm.id, arm.features) for arm in request.arms or ()),
        context=request.context,
        k=request.k,
        decision_id=request.decision_id,
        fingerprint=fingerprint(request),
        deferred=request.deferred,
        user_features=request.user_features,
        arm_ids=None if request.arm_ids is None else tuple(request.arm_ids),
        exclude=exclude,
        explain=request.explain,
        min_version=request.min_version,
    )


def body_as(model: type[Model], payload: Any) -> Model:
    """Validate a body that is just this model."""
    return validated(model, members_of(payload, model))


def catalogue_arm(payload: Any, model: type[Model], settings: Settings) -> Model:
    """Validate what is to stand in the catalogue: an object with features."""
    members = members_of(payload, model)
    check_length(members.get("features"), settings.max_dimension, ("features",))
    return validated(model, members)


def reward_commands(payload: Any, key: str | None = None) -> tuple[list[RewardCommand], bool]:
    """Validate a POST /feedback; whether it was a batch decides how a rejection is told.

    `key` stands for event ids that are left out.
    """
    if not (isinstance(payload, dict) and "events" in payload):
        reward = validated(RewardIn, members_of(payload, RewardIn))
        return [_reward_command(reward, (), key)], False
    members = members_of(payload, RewardBatch)
    events = members["events"]
    if isinstance(events, list):
        if len(events) > MAX_EVENTS:
            raise InvalidInput(("events",), f"holds {len(events)} events; at most {MAX_EVENTS} are allowed")
        for place, event in enumerate(events):
            if isinstance(event, dict):
                members_of(event, RewardIn, ("events", place))
    rewards = validated(RewardBatch, members).events
    return [
        _reward_command(reward, ("events", place), None if key is None else f"{key}:{place}")
        for place, reward in enumerate(rewards)
    ], True


def fingerprint(request: RecommendRequest) -> str:
    """SHA-256 of what was asked, whatever the order of members and however numbers were written.

    How an answer is told (`explain`) and how fresh it has to be (`min_version`) is no part of it.
    """
    parts = [b"metaban/1", request.user_id.encode(), str(request.k).encode(), _canonical(request.context)]
    for arm in request.arms or ():
        parts += (arm.id.encode(), _canonical(arm.features))
    # What may be left out is only part of it when it is there. No id holds a control character.
    for name, ids in ((b"\0arm_ids", request.arm_ids), (b"\0exclude", request.exclude)):
        if ids:
            parts += (name, *(arm_id.encode() for arm_id in ids))
    if request.user_features is not None:
        parts += (b"\0user_features", _canonical(request.user_features))
    if request.deferred:
        parts.append(b"\0deferred")
    # With the lengths in front, no two lists of parts are the same bytes.
    return hashlib.sha256(array("q", map(len, parts)).tobytes() + b"".join(parts)).hexdigest()


def _canonical(features: Features | None) -> bytes:
    if isinstance(features, list):
        return b"list" + array("d", features).tobytes()
    return b"json" + json.dumps(features, sort_keys=True, separators=(",", ":")).encode()


def members_of(payload: Any, model: type[RequestModel], path: FieldPath = ()) -> dict[str, Any]:
    """The object at `path`, which holds no member that the model does not know."""
    if not isinstance(payload, dict):
        raise InvalidInput(path, "must be a JSON object")
    known = _known_members(model)
    if not payload.keys() <= known:
        # One is enough: a body can hold a hundred thousand of them.
        name = next(name for name in payload if name not in known)
        raise InvalidInput((*path, name), "is not known here")
    return payload


@cache
def _known_members(model: type[RequestModel]) -> frozenset[str]:
    """Looked up once: pydantic finds the fields of a model anew at each question, and there is one for each arm."""
    return frozenset(model.model_fields)


def check_length(features: Any, limit: int, path: FieldPath) -> None:
    """Refuse more features, or ids, than are allowed."""
    if isinstance(features, list | dict) and len(features) > limit:
        raise InvalidInput(path, f"holds {len(features)} values; at most {limit} are allowed")


def _check_arms(arms: list[ArmIn]) -> None:
    first = arms[0].features
    places: dict[str, int] = {}
    for place, arm in enumerate(arms):
        if (earlier := places.setdefault(arm.id, place)) != place:
            raise InvalidInput(("arms", place, "id"), f"is the id of {format_field(('arms', earlier))} too")
        if type(arm.features) is not type(first):
            raise InvalidInput(("arms", place, "features"), "must be a list in all arms, or an object in all of them")
        if isinstance(first, list) and len(arm.features) != len(first):
            raise InvalidInput(
                ("arms", place, "features"),
                f"has {len(arm.features)} numbers where {format_field(('arms', 0))} has {len(first)}",
            )


def _check_k(request: RecommendRequest, exclude: frozenset[str]) -> None:
    left = sum(arm.id not in exclude for arm in request.arms or ())
    if request.k > left:
        raise InvalidInput(("k",), f"is {request.k}, and there are {left} arms to choose from")


def _check_arm_ids(request: RecommendRequest) -> None:
    if request.arm_ids is None:
        return
    if request.arms is not None:
        raise InvalidInput(("arm_ids",), "names arms of the catalogue: send either this or `arms`")
    places: dict[str, int] = {}
    for place, arm_id in enumerate(request.arm_ids):
        if (earlier := places.setdefault(arm_id, place)) != place:
            raise InvalidInput(("arm_ids", place), f"is {format_field(('arm_ids', earlier))} again")


def validated(model: type[Model], members: dict[str, Any]) -> Model:
    """The members as a model; InvalidInput names the fields that cannot be used."""
    try:
        return model.model_validate(members)
    except ValidationError as error:
        raise invalid_input(error) from None


def _reward_command(reward: RewardIn, path: tuple[str | int, ...], event_id: str | None) -> RewardCommand:
    return RewardCommand(reward.decision_id, reward.arm_id, reward.reward, reward.event_id or event_id, path)
