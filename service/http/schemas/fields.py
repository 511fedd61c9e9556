"""Field types that request models share, and the base of request models."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

#: Larger numbers overflow float32 as soon as they are squared or summed.
MAX_MAGNITUDE: Final = 1e30

MAX_ID_CHARS: Final = 256

MAX_EVENTS: Final = 1000

DECISION_ID_PATTERN: Final = r"^[A-Za-z0-9._:-]{1,128}$"

#: Visible ASCII. With an index of a batch appended, it is still a valid event_id.
IDEMPOTENCY_KEY_PATTERN: Final = r"^[!-~]{1,200}$"

CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

#: The same as a JavaScript regular expression, for OpenAPI.
NO_CONTROL_CHARACTERS: Final = r"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]*$"

#: Tags of union members. Pydantic puts them into the paths of errors; `problems.py` removes them.
LIST, OBJECT, NUMBER, TEXT, FLAG = "<list>", "<object>", "<number>", "<text>", "<flag>"

UNION_TAGS: Final = frozenset({LIST, OBJECT, NUMBER, TEXT, FLAG})


def _without_control_characters(text: str) -> str:
    if CONTROL_CHARACTERS.search(text):
        raise PydanticCustomError("control_character", "must not contain control characters")
    return text


def _kind_of_features(value: Any) -> str | None:
    return LIST if isinstance(value, list) else OBJECT if isinstance(value, dict) else None


def _kind_of_value(value: Any) -> str | None:
    if isinstance(value, bool):
        return FLAG
    return NUMBER if isinstance(value, int | float) else TEXT if isinstance(value, str) else None


Identifier: TypeAlias = Annotated[
    str,
    Field(min_length=1, max_length=MAX_ID_CHARS, json_schema_extra={"pattern": NO_CONTROL_CHARACTERS}),
    AfterValidator(_without_control_characters),
]

DecisionId: TypeAlias = Annotated[str, Field(pattern=DECISION_ID_PATTERN)]

Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False, ge=-MAX_MAGNITUDE, le=MAX_MAGNITUDE)]

NamedValue: TypeAlias = Annotated[
    Annotated[Number, Tag(NUMBER)]
    | Annotated[str, Field(max_length=MAX_ID_CHARS), Tag(TEXT)]
    | Annotated[bool, Tag(FLAG)],
    Discriminator(
        _kind_of_value,
        custom_error_type="feature_value",
        custom_error_message="must be a number, a string or a boolean",
    ),
]

FeatureName: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]

FeaturesIn: TypeAlias = Annotated[
    Annotated[list[Number], Field(min_length=1, fail_fast=True), Tag(LIST)]
    | Annotated[dict[FeatureName, NamedValue], Field(min_length=1), Tag(OBJECT)],
    Discriminator(
        _kind_of_features,
        custom_error_type="features",
        custom_error_message="must be a list of numbers, or an object of named numbers, strings and booleans",
    ),
]


class RequestModel(BaseModel):
    """Base of request bodies: strict types, no unknown members, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
