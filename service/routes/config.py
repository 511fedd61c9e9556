"""/admin/config and /admin/audit: settings that change while a namespace is served, and who changed them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, final

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from service.auditing import note_detail, note_nothing
from service.auth import AdminEngine
from service.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidInput,
    MalformedBody,
    NotFound,
    SettingsChanged,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
)
from service.intake import members_of, parse_json, read_body, validated
from service.live import LIVE, LiveSettings
from service.openapi import json_body, problem_responses
from service.problems import unusable_settings
from service.schemas import Identifier, RequestModel
from service.settings import SettingsError
from store.errors import NamespaceConflict
from store.reward_range import REWARD_LIMIT
from store.reward_rules import WAIT_MAX_S, Repeated

router = APIRouter(prefix="/admin", tags=["administration"])

MAX_AUDIT_LINES: Final = 200
CURSOR_PATTERN: Final = r"^[0-9]{1,20}-[0-9]{1,20}$"


@final
class ConfigPatch(RequestModel):
    """What to change; null gives a setting back to the deployment."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"epsilon": 0.05}, {"serving": "baseline", "baseline": ["espresso", "sencha"]}]}
    )

    alpha: float | None = Field(default=None, ge=0, le=1e6, allow_inf_nan=False)
    nu: float | None = Field(default=None, ge=0, le=1e6, allow_inf_nan=False)
    gamma: float | None = Field(default=None, ge=0, lt=1, allow_inf_nan=False)
    policy: Literal["ucb", "ucb-floor", "squarecb", "thompson"] | None = None
    epsilon: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    squarecb_gamma: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)
    thompson_draws: int | None = Field(default=None, ge=1, le=1_000)
    thompson_scale: float | None = Field(default=None, ge=0, le=1_000, allow_inf_nan=False)
    reward_min: float | None = Field(default=None, ge=-REWARD_LIMIT, le=REWARD_LIMIT, allow_inf_nan=False)
    reward_max: float | None = Field(default=None, ge=-REWARD_LIMIT, le=REWARD_LIMIT, allow_inf_nan=False)
    repeated_rewards: Repeated | None = None
    default_reward: float | None = Field(default=None, ge=-REWARD_LIMIT, le=REWARD_LIMIT, allow_inf_nan=False)
    reward_wait_s: float | None = Field(default=None, gt=0, le=WAIT_MAX_S, allow_inf_nan=False)
    serving: Literal["learner", "baseline"] | None = None
    baseline: list[Identifier] | None = Field(default=None, max_length=10_000)
    fusion: Literal["auto", "off"] | None = None


@final
class ConfigOut(BaseModel):
    """The settings of a namespace as they are now."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "namespace": "default",
                    "revision": 4,
                    "settings": {
                        "alpha": 0.3,
                        "nu": 1.0,
                        "gamma": None,
                        "policy": "ucb-floor",
                        "epsilon": 0.05,
                        "squarecb_gamma": 100.0,
                        "thompson_draws": 256,
                        "thompson_scale": 0.01,
                        "serving": "learner",
                        "baseline": [],
                        "reward_min": 0.0,
                        "reward_max": 1.0,
                        "repeated_rewards": "sum",
                        "default_reward": None,
                        "reward_wait_s": None,
                        "fusion": "auto",
                    },
                    "overridden": ["epsilon"],
                }
            ]
        }
    )

    namespace: str
    revision: int = Field(description="Grows with every change; give it as `?revision=` to change nothing else.")
    settings: dict[str, JsonValue] = Field(description="Those that can be changed here; null: the learner has none.")
    overridden: list[str] = Field(description="Those that differ from the deployment's by a change made here.")


@final
class AuditLineOut(BaseModel):
    """One thing that an admin did."""

    at_ms: int
    actor: str = Field(description="The first digits of the digest of the key; empty where no keys are set.")
    action: str
    target: str = Field(description="What the path named; users by a digest of their id.")
    request_id: str
    detail: dict[str, JsonValue]


@final
class AuditOut(BaseModel):
    """Lines from the newest on."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "lines": [
                        {
                            "at_ms": 1772344800000,
                            "actor": "5e884898",
                            "action": "PATCH /admin/config",
                            "target": "",
                            "request_id": "0b1f6c1e9d7b4c41a5b4b6a2a1c0f5aa",
                            "detail": {"before": {"epsilon": 0.02}, "after": {"epsilon": 0.05}},
                        }
                    ],
                    "cursor": None,
                }
            ]
        }
    )

    lines: list[AuditLineOut]
    cursor: str | None = Field(description="Ask again with it for the lines before; null when there are none.")


@router.get(
    "/config",
    summary="The settings of a namespace",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def show(engine: AdminEngine) -> ConfigOut:
    """What can be changed while it is served, as it is in the process that answers."""
    return _shown(engine.live)


@router.patch(
    "/config",
    summary="Change settings of a namespace",
    openapi_extra=json_body(ConfigPatch),
    responses=problem_responses(
        MalformedBody,
        Unauthorized,
        Forbidden,
        NotFound,
        SettingsChanged,
        BodyTooLarge,
        UnsupportedMedia,
        InvalidInput,
        Unavailable,
    ),
)
async def change(
    request: Request,
    engine: AdminEngine,
    revision: Annotated[
        int | None, Query(ge=0, lt=2**53, description="Change nothing when the settings are not of this revision.")
    ] = None,
) -> ConfigOut:
    """A merge patch: what it does not name stays, null goes back to the deployment's setting.

    It holds in the process that answers at once, and in all others within a second or so.
    """
    members = members_of(parse_json(await read_body(request)), ConfigPatch)
    validated(ConfigPatch, members)
    before = _values(engine.live)
    try:
        live = await engine.change_settings(members, revision=revision)
    except SettingsError as error:
        raise unusable_settings(str(error), members) from error
    except NamespaceConflict as error:
        raise SettingsChanged(
            "The settings are not of this revision any more: GET /admin/config shows them as they are."
        ) from error
    after = _values(live)
    if not members:
        note_nothing(request)
    note_detail(request, before={name: before[name] for name in members}, after={name: after[name] for name in members})
    return _shown(live)


@router.get(
    "/audit",
    summary="What admins did",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def audit(
    engine: AdminEngine,
    limit: Annotated[int, Query(ge=1, le=MAX_AUDIT_LINES)] = 50,
    cursor: Annotated[str | None, Query(pattern=CURSOR_PATTERN)] = None,
) -> AuditOut:
    """Everything that changed something under `/admin`, the newest first; the last 10,000 lines or so are kept."""
    try:
        lines = await engine.audited(limit, before=cursor)
    except ValueError:
        raise InvalidInput(("cursor",), "is not one that this call has answered with") from None
    return AuditOut(
        lines=[
            AuditLineOut(
                at_ms=line.at_ms,
                actor=line.actor,
                action=line.action,
                target=line.target,
                request_id=line.request_id,
                detail=line.detail,
            )
            for line in lines
        ],
        cursor=lines[-1].cursor if len(lines) == limit else None,
    )


def _shown(live: LiveSettings) -> ConfigOut:
    return ConfigOut(
        namespace=live.record.name,
        revision=live.record.revision,
        settings=_values(live),
        overridden=sorted(set(live.record.overrides) & set(LIVE)),
    )


def _values(live: LiveSettings) -> dict[str, Any]:
    """What holds: of the learner's settings those that it was built with, be they its preset's."""
    learner = live.record.learner
    values: dict[str, Any] = {}
    for name in LIVE:
        value = getattr(live.settings, name)
        values[name] = learner.get(name) if value is None else list(value) if isinstance(value, tuple) else value
    return values
