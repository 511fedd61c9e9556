"""Parses JSON bodies into commands for the engine, or raises an error that names the field.

Sizes are checked first, then pydantic validates, then come checks across fields. pydantic's JSON parser is used, not
FastAPI's body models: these read with the standard library, which is slower and accepts deep nesting (until it raises
RecursionError) and lone surrogates.
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

from metaban.service.engine.commands import ArmInput, Features, RecommendCommand, RewardCommand
from metaban.service.errors import BodyTimeout, FieldPath, InvalidInput, MalformedBody, UnsupportedMedia, format_field
from metaban.service.http.problems import invalid_input
from metaban.service.http.schemas.arms import ArmIn, ArmLine
from metaban.service.http.schemas.feedback import RewardBatch, RewardIn
from metaban.service.http.schemas.fields import MAX_EVENTS, RequestModel
from metaban.service.http.schemas.recommend import RecommendRequest
from metaban.service.settings.environment import Settings

#: Time for the whole body. `metaban.service.http.admission` refuses a body that stalls earlier.
BODY_TIMEOUT_S: Final = 30.0

JSON_MEDIA: Final = re.compile(r"\s*application/(?:[\w.+-]+\+)?json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)

#: Longest malformed body that is read again to explain what is wrong.
EXPLAINED_BYTES: Final = 65_536

SURROGATES: Final = re.compile("[\ud800-\udfff]")

Model = TypeVar("Model", bound=RequestModel)


async def read_body(request: Request) -> bytes:
    """The body of a request whose Content-Type is JSON."""
    # Without a CORS preflight a web page can send any other type to a service on this machine.
    if not JSON_MEDIA.fullmatch(request.headers.get("content-type", "")):
        raise UnsupportedMedia("Send the body as JSON, with the header `Content-Type: application/json`.")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise UnsupportedMedia("Send the body uncompressed.")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.body()
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {BODY_TIMEOUT_S:g} s.") from None


def parse_json(body: bytes) -> Any:
    """Parse JSON. NaN, Infinity and 1e999 are accepted here and refused by the checks of the fields."""
    try:
        return from_json(body)
    except ValueError as error:
        raise _refusal_of(body, str(error)) from None


def _refusal_of(body: bytes, reason: str) -> InvalidInput | MalformedBody:
    """422 for JSON that is refused, 400 for a body that is not JSON. A slow path: it parses a second time."""
    if "recursion limit" in reason:
        return InvalidInput((), nested_too_deeply(reason))
    if len(body) > EXPLAINED_BYTES:
        return MalformedBody(f"The body is not valid JSON: {reason}.")
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
    """The parser's message about its recursion limit in terms of JSON, with the position."""
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
    return RecommendCommand(
        user_id=request.user_id,
        arms=_arms_of(request, exclude),
        context=request.context,
        k=request.k,
        decision_id=request.decision_id,
        fingerprint=fingerprint(request),
        deferred=request.deferred,
        user_features=request.user_features,
        arm_ids=None if request.arm_ids is None else _distinct_ids(request.arm_ids),
        exclude=exclude,
        explain=request.explain,
        min_version=request.min_version,
    )


def body_as(model: type[Model], payload: Any) -> Model:
    """Validate a body that is one model."""
    return validated(model, members_of(payload, model))


def catalogue_arm(payload: Any, model: type[Model], settings: Settings) -> Model:
    """Validate an arm of the catalogue: an object with features."""
    members = members_of(payload, model)
    check_length(members.get("features"), settings.max_dimension, ("features",))
    return validated(model, members)


def parse_arm_line(line: bytes, settings: Settings) -> ArmInput:
    """Parse and validate one line of a file of arms."""
    try:
        payload: Any = from_json(line)
    except ValueError as error:
        deep = "recursion limit" in str(error)
        raise InvalidInput((), nested_too_deeply(str(error)) if deep else f"is not JSON: {error}") from None
    arm = catalogue_arm(payload, ArmLine, settings)
    return ArmInput(arm.id, arm.features)


def reward_commands(payload: Any, key: str | None = None) -> tuple[list[RewardCommand], bool]:
    """Validate a POST /feedback; returns the rewards, and whether they came as a batch.

    `key` replaces missing event ids.
    """
    batch = isinstance(payload, dict) and "events" in payload
    rewards = _batch_of(payload) if batch else [validated(RewardIn, members_of(payload, RewardIn))]
    commands = []
    for place, reward in enumerate(rewards):
        path: tuple[str | int, ...] = ("events", place) if batch else ()
        event_id = reward.event_id or (f"{key}:{place}" if batch and key is not None else key)
        commands.append(RewardCommand(reward.decision_id, reward.arm_id, reward.reward, event_id, path))
    return commands, batch


def _batch_of(payload: dict[str, Any]) -> list[RewardIn]:
    members = members_of(payload, RewardBatch)
    events = members["events"]
    if isinstance(events, list):
        if len(events) > MAX_EVENTS:
            raise InvalidInput(("events",), f"holds {len(events)} events; at most {MAX_EVENTS} are allowed")
        for place, event in enumerate(events):
            if isinstance(event, dict):
                members_of(event, RewardIn, ("events", place))
    return validated(RewardBatch, members).events


def fingerprint(request: RecommendRequest) -> str:
    """SHA-256 of the request, independent of the order of members and the notation of numbers.

    `explain` and `min_version` are not part of it: they do not change the decision.
    """
    parts = [b"metaban/1", request.user_id.encode(), str(request.k).encode(), _canonical(request.context)]
    for arm in request.arms or ():
        parts += (arm.id.encode(), _canonical(arm.features))
    # Optional members count only when present. No id holds a control character, so names cannot be mistaken for ids.
    for name, ids in ((b"\0arm_ids", request.arm_ids), (b"\0exclude", request.exclude)):
        if ids:
            parts += (name, *(arm_id.encode() for arm_id in ids))
    if request.user_features is not None:
        parts += (b"\0user_features", _canonical(request.user_features))
    if request.deferred:
        parts.append(b"\0deferred")
    # The lengths in front make the encoding unambiguous.
    return hashlib.sha256(array("q", map(len, parts)).tobytes() + b"".join(parts)).hexdigest()


def _canonical(features: Features | None) -> bytes:
    if isinstance(features, list):
        return b"list" + array("d", features).tobytes()
    return b"json" + json.dumps(features, sort_keys=True, separators=(",", ":")).encode()


def members_of(payload: Any, model: type[RequestModel], path: FieldPath = ()) -> dict[str, Any]:
    """The object at `path`; raises InvalidInput for a member that the model does not have."""
    if not isinstance(payload, dict):
        raise InvalidInput(path, "must be a JSON object")
    known = _known_members(model)
    if not payload.keys() <= known:
        # Name only the first: a body can hold a hundred thousand of them.
        name = next(name for name in payload if name not in known)
        raise InvalidInput((*path, name), f"is not a field here; the fields are {', '.join(sorted(known))}")
    return payload


@cache
def _known_members(model: type[RequestModel]) -> frozenset[str]:
    """Cached: pydantic's `model_fields` is slow, and this is asked for each arm."""
    return frozenset(model.model_fields)


def check_length(features: Any, limit: int, path: FieldPath) -> None:
    """Refuse a list or object with too many values."""
    if isinstance(features, list | dict) and len(features) > limit:
        raise InvalidInput(path, f"holds {len(features)} values; at most {limit} are allowed")


def _arms_of(request: RecommendRequest, exclude: frozenset[str]) -> tuple[ArmInput, ...]:
    """The arms of a request, with distinct ids and features of one shape; enough of them for `k`."""
    if request.arms is None:
        return ()
    first = request.arms[0].features
    places: dict[str, int] = {}
    arms = []
    available = 0
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
        available += arm.id not in exclude
        arms.append(ArmInput(arm.id, arm.features))
    if request.k > available:
        raise InvalidInput(("k",), f"is more than the number of arms to choose from, {available}")
    if request.arm_ids is not None:
        raise InvalidInput(("arm_ids",), "names arms of the catalogue: send either this or `arms`")
    return tuple(arms)


def _distinct_ids(arm_ids: list[str]) -> tuple[str, ...]:
    places: dict[str, int] = {}
    for place, arm_id in enumerate(arm_ids):
        if (earlier := places.setdefault(arm_id, place)) != place:
            raise InvalidInput(("arm_ids", place), f"is {format_field(('arm_ids', earlier))} again")
    return tuple(arm_ids)


def validated(model: type[Model], members: dict[str, Any]) -> Model:
    """The members as a model; raises InvalidInput, which names the invalid fields."""
    try:
        return model.model_validate(members)
    except ValidationError as error:
        raise invalid_input(error) from None
