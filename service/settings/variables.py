"""Environment variables of settings: their names, a list with values and meanings, and a check for unknown ones."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final, Literal, final, get_args, get_origin

import structlog

from metaban.service.settings.environment import LEARNER_SETTINGS, OFF, PREFIX, Settings, variable_of
from metaban.store.failpoints import FAILPOINTS_VARIABLE
from metaban.store.processes import SUPERVISED_VARIABLE


@final
@dataclass(frozen=True, slots=True)
class OptionVariable:
    """A variable that is the default of an option of `metaban serve`."""

    variable: str
    default: str
    meaning: str


HOST: Final = OptionVariable(
    "METABAN_HOST", "127.0.0.1", "Address to listen on. Without keys only a loopback address is accepted."
)
PORT: Final = OptionVariable("METABAN_PORT", "8000", "Port to listen on; 0 chooses a free one.")

#: Variables that are not settings: options of commands, and those of supervised processes, tests and benchmarks.
OTHER_VARIABLES: Final = frozenset(
    {SUPERVISED_VARIABLE, FAILPOINTS_VARIABLE, HOST.variable, PORT.variable, "METABAN_KEY", "METABAN_BENCH_DATA"}
)

_log = structlog.stdlib.get_logger(__name__)


def setting_rows(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Variable, value (unless secret) and meaning of each setting; the meaning lists the choices, if any."""
    for name, field in Settings.model_fields.items():
        value = getattr(settings, name)
        if not field.repr:
            text = "(set)" if value else "(unset)"
        elif value is None:
            text = "(the preset's)" if name in LEARNER_SETTINGS else OFF if name == "default_reward" else "(unset)"
        else:
            text = _as_set(value)
        meaning = field.description or ""
        if choices := _choices(field.annotation):
            meaning += f" One of {', '.join(choices)}."
        yield variable_of(name), text, meaning
    for option in (HOST, PORT):
        yield (
            option.variable,
            os.environ.get(option.variable) or option.default,
            f"{option.meaning} Option of `metaban serve`.",
        )


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables that start with METABAN_ and are not known."""
    known = {variable_of(name) for name in Settings.model_fields} | OTHER_VARIABLES
    # pydantic reads variables in any case.
    return sorted(name for name in environment if name.upper().startswith(PREFIX) and name.upper() not in known)


def warn_of_unknown_variables() -> None:
    """Log the names of unknown variables. Not the values, which may be secrets. Only the parent process logs them."""
    if SUPERVISED_VARIABLE in os.environ:
        return
    if unknown := unknown_variables(os.environ):
        _log.warning(
            "settings_unknown", variables=unknown, effect="they are ignored; `metaban settings` lists all settings"
        )


def _as_set(value: Any) -> str:
    """A value as it is written in its variable."""
    if isinstance(value, frozenset):
        return ",".join(sorted(value)) or "[]"
    return json.dumps(value, separators=(",", ":")) if isinstance(value, tuple | dict) else str(value)


def _choices(annotation: Any) -> tuple[str, ...]:
    """The values of a Literal, also of an optional one."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    inner = [part for part in get_args(annotation) if part is not NoneType]
    return _choices(inner[0]) if len(inner) == 1 and get_origin(inner[0]) is Literal else ()
