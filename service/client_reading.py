"""From the JSON of an answer to a frozen dataclass, by its annotations.

Members that the dataclass does not know are ignored, so that a newer service can be talked to; members that it needs
and that are missing or of another type are named in an error. A field with a default may be left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from service.client_errors import UnexpectedAnswer

Answer = TypeVar("Answer")
#: Takes a value and where it stands in the answer.
Reader: TypeAlias = Callable[[Any, str], Any]


def parse(content: bytes | str) -> Any:
    """The JSON of an answer."""
    try:
        return json.loads(content)
    except ValueError:
        raise UnexpectedAnswer("the answer is not JSON: is there a metaban service at this address?") from None


def read(answer: type[Answer], value: Any, where: str = "") -> Answer:
    """The value as an instance of a dataclass."""
    hint: Any = answer
    result: Answer = _reader(hint)(value, where)
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
        return lambda value, where: value
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
    fields = [(field.name, _reader(hints[field.name]), _is_needed(field)) for field in dataclasses.fields(answer)]

    def read_object(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(where, "an object")
        found = {}
        for name, read_field, needed in fields:
            path = f"{where}.{name}" if where else name
            if name in value:
                found[name] = read_field(value[name], path)
            elif needed:
                raise _missing(path)
        return answer(**found)

    return read_object


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _list_reader(read_part: Reader) -> Reader:
    def read_list(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise _wrong(where, "a list")
        return tuple(read_part(part, f"{where}[{place}]") for place, part in enumerate(value))

    return read_list


def _mapping_reader(read_part: Reader) -> Reader:
    def read_mapping(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(where, "an object")
        return {name: read_part(part, f"{where}.{name}") for name, part in value.items()}

    return read_mapping


def _union_reader(readers: list[Reader]) -> Reader:
    def read_one(value: Any, where: str) -> Any:
        refusal: UnexpectedAnswer | None = None
        for reader in readers:
            try:
                return reader(value, where)
            except UnexpectedAnswer as error:
                # The first alternative is what is meant; those after it are what it may be instead.
                refusal = refusal or error
        raise refusal or _wrong(where, "something else")

    return read_one


def _plain_reader(kind: Any) -> Reader:
    # JSON writes 1.0 as 1, and Python takes True for 1.
    accepted = (int, float) if kind is float else kind

    def read_plain(value: Any, where: str) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise _wrong(where, "null" if kind is NoneType else f"of type {kind.__name__}")
        return float(value) if kind is float else value

    return read_plain


def _missing(path: str) -> UnexpectedAnswer:
    return UnexpectedAnswer(f"the answer has no `{path}`: is the service as new as this client?")


def _wrong(path: str, wanted: str) -> UnexpectedAnswer:
    return UnexpectedAnswer(f"`{path}` of the answer is not {wanted}" if path else f"the answer is not {wanted}")
