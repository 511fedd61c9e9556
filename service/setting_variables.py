"""The variables that settings are read from: listed with what they mean, and told from misspelt ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

import structlog

from service.settings import LEARNER_SETTINGS, Settings
from service.supervisor import SUPERVISED_VARIABLE
from store.failpoints import FAILPOINTS_VARIABLE

PREFIX: Final = "METABAN_"
#: Ours, though no settings: of the client's key in `metaban demo`, the data of benchmarks, and tests.
OTHER_VARIABLES: Final = frozenset({SUPERVISED_VARIABLE, FAILPOINTS_VARIABLE, "METABAN_KEY", "METABAN_BENCH_DATA"})

_log = structlog.stdlib.get_logger(__name__)


def variable_of(name: str) -> str:
    """The variable that a setting is read from."""
    return "REDIS_URL" if name == "redis_url" else f"{PREFIX}{name.upper()}"


def setting_rows(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Each variable, its value unless that is secret, and its meaning, with the values to choose from if any."""
    for name, field in Settings.model_fields.items():
        value = getattr(settings, name)
        if not field.repr:
            shown = "(set)" if value else "(unset)"
        elif value is None:
            shown = "(the preset's)" if name in LEARNER_SETTINGS else "(unset)"
        else:
            shown = str(value)
        meaning = field.description or ""
        if choices := _choices(field.annotation):
            meaning += f" One of {', '.join(choices)}."
        yield variable_of(name), shown, meaning


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Variables that look like ours and mean nothing."""
    known = {variable_of(name) for name in Settings.model_fields} | OTHER_VARIABLES
    # Settings are read whatever the case of their variables.
    return sorted(name for name in environment if name.upper().startswith(PREFIX) and name.upper() not in known)


def warn_of_unknown_variables() -> None:
    """One line of log, without values: what is misspelt may be a secret. A supervised child's parent has said it."""
    if SUPERVISED_VARIABLE in os.environ:
        return
    if unknown := unknown_variables(os.environ):
        _log.warning(
            "settings not known", variables=unknown, effect="they are ignored; `metaban settings` lists those there are"
        )


def _choices(annotation: Any) -> tuple[str, ...]:
    """The words of a Literal, also of one that may be None."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    inner = [part for part in get_args(annotation) if part is not NoneType]
    return _choices(inner[0]) if len(inner) == 1 and get_origin(inner[0]) is Literal else ()
