"""Arguments to JSON, and JSON to frozen dataclasses.

Arguments of a wrong type raise InvalidArgument before they are sent; the service checks limits (lengths, ranges).
Answers are read by the annotations of a dataclass: unknown members are ignored, so that a newer service can be used;
a missing or wrong member raises UnexpectedAnswer with its path. A field with a default may be missing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote

from metaban.client.errors import InvalidArgument, UnexpectedAnswer

#: A list of numbers, or named numbers, strings and booleans. All arms of a namespace use the same kind.
Features: TypeAlias = Iterable[float] | Mapping[str, float | str | bool]
#: Arms with their features: features by id, pairs of id and features, or objects with the members `id` and `features`.
ArmFeatures: TypeAlias = Mapping[str, Features] | Iterable[tuple[str, Features]] | Iterable[Mapping[str, Any]]
JsonObject: TypeAlias = dict[str, Any]

Argument = TypeVar("Argument")
Encoded = TypeVar("Encoded")
Answer = TypeVar("Answer")
#: Takes a value and its path in the answer.
Reader: TypeAlias = Callable[[Any, str], Any]

FEATURES_HELP: Final = (
    'a list of finite numbers such as [1.0, 0.5], or named values such as {"kind": "tea", "price": 2.5}'
)
ARMS_HELP: Final = (
    '{"tea": features, "milk": features} or [{"id": "tea", "features": features}, …], '
    "where features are a list of numbers or named values"
)


# Arguments


def text(name: str, value: str) -> str:
    """The value, checked to be a string that UTF-8 can encode."""
    if not isinstance(value, str):
        raise _wrong_argument(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} must be valid Unicode, without lone surrogates") from None
    return value


def texts(name: str, values: Iterable[str]) -> list[str]:
    """The values as a list, checked to be strings."""
    elements = elements_of(name, 'a list of strings such as ["tea"]', values)
    return [text(f"{name}[{index}]", value) for index, value in enumerate(elements)]


def elements_of(name: str, expected: str, values: Iterable[Argument]) -> Iterator[Argument]:
    """The elements of a list or another iterable; a string is refused, since a list of its letters is never meant."""
    if isinstance(values, str | bytes):
        raise _wrong_argument(name, expected, values)
    try:
        return iter(values)
    except TypeError:
        raise _wrong_argument(name, expected, values) from None


def whole(name: str, value: int) -> int:
    """The value, checked to be an integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_argument(name, "an integer", value, "int(x) converts a numpy integer")
    return value


def number(name: str, value: float) -> float:
    """The value, checked to be a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_argument(name, "a finite number", value, "float(x) converts a numpy number")
    if not _is_finite(value):
        raise InvalidArgument(f"{name} must be a finite number: JSON has no NaN and no infinity")
    return value


def flag(name: str, value: bool) -> bool:
    """The value, checked to be a boolean."""
    if not isinstance(value, bool):
        raise _wrong_argument(name, "True or False", value)
    return value


def members(name: str, values: Mapping[str, Any]) -> JsonObject:
    """The values as an object, checked to be a mapping with string keys."""
    if not isinstance(values, Mapping):
        raise _wrong_argument(name, 'a mapping such as {"epsilon": 0.1}', values)
    return {text(f"each name in {name}", key): value for key, value in values.items()}


def features_json(name: str, features: Features) -> list[float] | JsonObject:
    """Features as JSON; arrays are accepted as lists of numbers."""
    if isinstance(features, Mapping):
        return {
            text(f"each name in {name}", key): _feature(f"{key!r} in {name}", value) for key, value in features.items()
        }
    try:
        if isinstance(features, str | bytes | Set):
            raise TypeError("its elements are not ordered numbers")
        numbers = [_plain_number(value) for value in features]
    # Iterating and converting run methods of the caller's objects, which may raise anything.
    except Exception as error:
        raise _wrong_argument(name, FEATURES_HELP, features) from error
    if not all(map(math.isfinite, numbers)):
        raise InvalidArgument(f"{name} must be {FEATURES_HELP}: JSON has no NaN and no infinity")
    return numbers


def arm_json(arm_id: str, features: Features) -> JsonObject:
    """One arm as JSON."""
    return {"id": text("the id of an arm", arm_id), "features": features_json(f"features of arm {arm_id!r}", features)}


def arms_json(name: str, arms: ArmFeatures) -> Iterator[JsonObject]:
    """Arms as JSON, one after the other."""
    if isinstance(arms, Mapping):
        return (arm_json(arm_id, features) for arm_id, features in arms.items())
    return (_any_arm_json(name, arm) for arm in elements_of(name, ARMS_HELP, arms))


def _any_arm_json(name: str, arm: Any) -> JsonObject:
    if isinstance(arm, Mapping) and set(arm) == {"id", "features"}:
        return arm_json(arm["id"], arm["features"])
    if isinstance(arm, tuple | list) and len(arm) == 2:
        return arm_json(*arm)
    hint = "; arms of the catalogue are chosen with arm_ids" if isinstance(arm, str) else ""
    raise InvalidArgument(f"{name} must be {ARMS_HELP}{hint}")


def optional(encode: Callable[[str, Argument], Encoded], name: str, value: Argument | None) -> Encoded | None:
    """The value encoded, or None if it is None."""
    return None if value is None else encode(name, value)


def given(**values: Any) -> JsonObject:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def encoded(value: Any) -> bytes:
    """The value as JSON. It is encoded once, so that every try sends the same bytes."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"the arguments cannot be written as JSON: {error}") from None


def segment(name: str, value: str | int) -> str:
    """A name or number as one segment of a path."""
    plain = encoded(value).decode() if isinstance(value, int) else text(name, value)
    # Clients and proxies resolve `.` and `..`.
    return quote(plain, safe="").replace(".", "%2E")


def query(**parameters: str | int | bool | None) -> dict[str, str]:
    """Parameters of a URL; None is left out."""
    return {name: _parameter(name, value) for name, value in parameters.items() if value is not None}


def _parameter(name: str, value: str | int | bool) -> str:
    if not isinstance(value, str | int):
        raise _wrong_argument(name, "a string, an integer or a boolean", value)
    return text(name, value) if isinstance(value, str) else encoded(value).decode()


def _feature(name: str, value: float | str | bool) -> float | str | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(name, value)
    if not isinstance(value, int | float):
        raise _wrong_argument(name, "a finite number, a string or a boolean", value, "float(x) converts a numpy number")
    return number(name, value)


def _plain_number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError("a string is not a number")
    return float(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _wrong_argument(name: str, expected: str, value: object, hint: str = "") -> InvalidArgument:
    message = f"{name} must be {expected}, not {type(value).__name__}"
    return InvalidArgument(f"{message} ({hint})" if hint else message)


# Answers


def parse(content: bytes | str) -> Any:
    """The JSON of an answer."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise UnexpectedAnswer("the answer is not JSON: is there a metaban service at this address?") from None


def read(answer: type[Answer], value: Any, path: str = "") -> Answer:
    """The value as an instance of a dataclass, or of another annotated type."""
    hint: Any = answer
    result: Answer = _reader(hint)(value, path)
    return result


def member(value: Any, name: str) -> Any:
    """One member of an answer that is an object."""
    if not isinstance(value, dict) or name not in value:
        raise _missing(name)
    return value[name]


@cache
def _reader(hint: Any) -> Reader:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value, path: value
    if dataclasses.is_dataclass(hint):
        return _object_reader(hint)
    if origin in (Union, UnionType):
        return _union_reader([_reader(argument) for argument in arguments])
    if origin is tuple:
        return _list_reader(_reader(arguments[0]))
    if origin is Mapping:
        return _mapping_reader(_reader(arguments[1]))
    return _plain_reader(hint)


def _object_reader(answer: Any) -> Reader:
    hints = get_type_hints(answer)
    fields = [(field.name, _reader(hints[field.name]), _is_required(field)) for field in dataclasses.fields(answer)]

    def read_object(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, "an object")
        found = {}
        for name, read_field, required in fields:
            field_path = f"{path}.{name}" if path else name
            if name in value:
                found[name] = read_field(value[name], field_path)
            elif required:
                raise _missing(field_path)
        return answer(**found)

    return read_object


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _list_reader(read_element: Reader) -> Reader:
    def read_list(value: Any, path: str) -> Any:
        if not isinstance(value, list):
            raise _wrong(path, "a list")
        return tuple(read_element(element, f"{path}[{index}]") for index, element in enumerate(value))

    return read_list


def _mapping_reader(read_element: Reader) -> Reader:
    def read_mapping(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, "an object")
        return {name: read_element(element, f"{path}.{name}") for name, element in value.items()}

    return read_mapping


def _union_reader(readers: list[Reader]) -> Reader:
    def read_union(value: Any, path: str) -> Any:
        first: UnexpectedAnswer | None = None
        for reader in readers:
            try:
                return reader(value, path)
            except UnexpectedAnswer as error:
                # The first alternative is the usual one: its error says most.
                first = first or error
        raise first or _wrong(path, "of a known type")

    return read_union


def _plain_reader(kind: Any) -> Reader:
    # JSON may write 1.0 as 1; in Python, True is an int.
    accepted = (int, float) if kind is float else kind

    def read_plain(value: Any, path: str) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise _wrong(path, "null" if kind is NoneType else f"of type {kind.__name__}")
        try:
            return float(value) if kind is float else value
        except OverflowError:
            raise _wrong(path, "a number that a float can hold") from None

    return read_plain


def _missing(path: str) -> UnexpectedAnswer:
    return UnexpectedAnswer(f"the answer has no `{path}`: is the service older than this client?")


def _wrong(path: str, expected: str) -> UnexpectedAnswer:
    return UnexpectedAnswer(f"`{path}` of the answer is not {expected}" if path else f"the answer is not {expected}")
