"""/admin/config and /admin/audit: settings that can change at run time, and the log of admin requests."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias, final

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag

from metaban.service.errors import (
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
from metaban.service.http.audit import AuditedRoute, note_detail, note_nothing
from metaban.service.http.auth import AdminEngine
from metaban.service.http.openapi import json_body, problem_responses
from metaban.service.http.parsing import members_of, parse_json, read_body, validated
from metaban.service.http.problems import unusable_settings
from metaban.service.http.schemas.fields import NUMBER, TEXT, Identifier, RequestModel
from metaban.service.settings.environment import OFF, SettingsError, within
from metaban.service.settings.namespace import LIVE, LiveSettings
from metaban.store.errors import NamespaceConflict
from metaban.store.reward_rules import REWARD_LIMIT, WAIT_MAX_S, Repeated

router = APIRouter(route_class=AuditedRoute, prefix="/admin", tags=["administration"])

MAX_AUDIT_LINES: Final = 200

CURSOR_PATTERN: Final = r"^[0-9]{1,20}-[0-9]{1,20}$"


def _kind_of_default(value: Any) -> str | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return NUMBER if is_number else TEXT if value == OFF else None


DefaultReward: TypeAlias = Annotated[
    Annotated[float, Field(ge=-REWARD_LIMIT, le=REWARD_LIMIT, allow_inf_nan=False), Tag(NUMBER)]
    | Annotated[Literal["off"], Tag(TEXT)],
    Discriminator(
        _kind_of_default,
        custom_error_type="default_reward",
        custom_error_message='must be a number or "off"',
    ),
]


@final
class ConfigPatch(RequestModel):
    """Settings to change; null resets one to the value of the deployment."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"epsilon": 0.05}, {"serving": "baseline", "baseline": ["espresso", "sencha"]}]}
    )

    alpha: Annotated[float | None, within("alpha")] = Field(default=None, allow_inf_nan=False)
    nu: Annotated[float | None, within("nu")] = Field(default=None, allow_inf_nan=False)
    gamma: Annotated[float | None, within("gamma")] = Field(default=None, allow_inf_nan=False)
    samples_kept: Annotated[int | None, within("samples_kept")] = None
    candidate_pool: Annotated[int | None, within("candidate_pool")] = None
    policy: Literal["ucb", "ucb-floor", "squarecb", "thompson"] | None = None
    epsilon: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    squarecb_gamma: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)
    thompson_draws: int | None = Field(default=None, ge=1, le=1_000)
    thompson_scale: float | None = Field(default=None, ge=0, le=1_000, allow_inf_nan=False)
    reward_min: float | None = Field(default=None, ge=-REWARD_LIMIT, le=REWARD_LIMIT, allow_inf_nan=False)
    reward_max: float | None = Field(default=None, ge=-REWARD_LIMIT, le=REWARD_LIMIT, allow_inf_nan=False)
    repeated_rewards: Repeated | None = None
    default_reward: DefaultReward | None = Field(default=None, description='"off": none is learned.')
    reward_wait_s: float | None = Field(default=None, gt=0, le=WAIT_MAX_S, allow_inf_nan=False)
    reward_window_s: int | None = Field(default=None, ge=1, le=int(WAIT_MAX_S))
    dedupe_window_s: int | None = Field(default=None, ge=1, le=int(WAIT_MAX_S))
    serving: Literal["learner", "baseline"] | None = None
    baseline: list[Identifier] | None = Field(default=None, max_length=10_000)
    fusion: Literal["auto", "off"] | None = None
    user_retention_days: int | None = Field(default=None, ge=0, le=3_650)


@final
class ConfigOut(BaseModel):
    """The current settings of a namespace."""

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
                        "samples_kept": 256,
                        "candidate_pool": 2048,
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
                        "default_reward": 0.0,
                        "reward_wait_s": 600.0,
                        "reward_window_s": 86400,
                        "dedupe_window_s": 604800,
                        "fusion": "auto",
                        "user_retention_days": 0,
                    },
                    "overridden": ["epsilon"],
                }
            ]
        }
    )

    namespace: str
    revision: int = Field(description="Grows with every change. PATCH with `?revision=` is refused after another one.")
    settings: dict[str, JsonValue] = Field(
        description="Settings that can be changed here; null if the learner has no such setting."
    )
    overridden: list[str] = Field(description="Settings that were changed here.")


@final
class AuditLineOut(BaseModel):
    """One admin request that changed something."""

    at_ms: int
    actor: str = Field(description="First digits of the digest of the key; empty if no keys are configured.")
    action: str
    target: str = Field(description="Parameters of the path; a user id is replaced by its digest.")
    request_id: str
    detail: dict[str, JsonValue]


@final
class AuditOut(BaseModel):
    """A page of the audit log, the newest line first."""

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
    cursor: str | None = Field(description="Cursor of the next page, with older lines; null on the last page.")


@router.get(
    "/config",
    summary="Show the settings of a namespace",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def show(engine: AdminEngine) -> ConfigOut:
    """The settings that can be changed at run time, as this process uses them."""
    return _config_response(engine.live)


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
        int | None, Query(ge=0, lt=2**53, description="Refuse the change if the settings have another revision.")
    ] = None,
) -> ConfigOut:
    """A merge patch: settings that are not in it stay, null resets to the value of the deployment.

    The process that answers uses the new settings at once, all others within about a second.
    """
    members = members_of(parse_json(await read_body(request)), ConfigPatch)
    validated(ConfigPatch, members)
    before = engine.live.values()
    try:
        live = await engine.change_settings(members, revision=revision)
    except SettingsError as error:
        raise unusable_settings(str(error), members) from error
    except NamespaceConflict as error:
        raise SettingsChanged("The settings have another revision now: see GET /admin/config.") from error
    after = live.values()
    if not members:
        note_nothing(request)
    note_detail(request, before={name: before[name] for name in members}, after={name: after[name] for name in members})
    return _config_response(live)


@router.get(
    "/audit",
    summary="Audit log of admin requests",
    responses=problem_responses(Unauthorized, Forbidden, NotFound, InvalidInput, Unavailable),
)
async def audit(
    engine: AdminEngine,
    limit: Annotated[int, Query(ge=1, le=MAX_AUDIT_LINES)] = 50,
    cursor: Annotated[str | None, Query(pattern=CURSOR_PATTERN)] = None,
) -> AuditOut:
    """Requests under `/admin` that changed something, the newest first. About 10,000 lines are kept."""
    try:
        lines = await engine.audited(limit, before=cursor)
    except ValueError:
        raise InvalidInput(("cursor",), "is not a cursor returned by this call") from None
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


def _config_response(live: LiveSettings) -> ConfigOut:
    return ConfigOut(
        namespace=live.record.name,
        revision=live.record.revision,
        settings=live.values(),
        overridden=sorted(set(live.record.overrides) & set(LIVE)),
    )
