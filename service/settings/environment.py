"""All settings of the service and the worker, read from environment variables (METABAN_… and REDIS_URL) and checked.

A learner setting that is None has the value of the preset (`METABAN_PRESET`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, final

from annotated_types import Interval
from pydantic import AliasChoices, Field, JsonValue, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from pydantic_settings import SettingsError as BadSource

from metaban.models.policies import DRAWS, DRAWS_SCALE
from metaban.models.settings import LIMITS, LearnerSettings, named_settings
from metaban.service.telemetry.tracing import can_trace
from metaban.store.reward_rules import DEDUPE_WINDOW_S, WINDOW_S, RewardRules

PREFIX: Final = "METABAN_"

STORE_SCHEMES: Final = ("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")

#: A SHA-256 digest as `metaban key` prints it; `namespace:` in front limits its key to that namespace.
DIGEST_PATTERN: Final = re.compile(r"(?:[a-z0-9][a-z0-9_-]{0,39}:)?[0-9a-f]{64}")

#: A name, an IPv4 address, or an IPv6 address in brackets, as in a Host header without its port.
HOST_PATTERN: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,252}[a-z0-9])?|\[[0-9a-f:.]+\]")

ORIGIN_PATTERN: Final = re.compile(r"https?://[a-z0-9][a-z0-9.-]*(:\d{1,5})?|https?://\[[0-9a-f:.]+\](:\d{1,5})?")

#: What to do if the store cannot do what `replicated` promises.
WAITAOF_ADVICE: Final = (
    "`replicated` needs WAITAOF while the server has `appendonly yes`: run Redis 7.2 or newer or any Valkey, or set "
    "another METABAN_DURABILITY."
)

#: Learner settings with variables of their own.
LEARNER_SETTINGS: Final = (
    "alpha", "nu", "gamma", "width", "depth", "user_steps", "meta_steps", "user_rate", "meta_rate", "l1", "standardize",
    "bonus", "samples_kept", "candidate_pool",
)  # fmt: skip

#: Those that every preset has, with the same default.
OF_EVERY_PRESET: Final = ("samples_kept", "candidate_pool")

#: Settings in a namespace's reward rules, with the names of their fields there.
REWARD_SETTINGS: Final = {
    "repeated_rewards": "repeated",
    "reward_min": "reward_min",
    "reward_max": "reward_max",
    "default_reward": "default_reward",
    "reward_wait_s": "wait_s",
    "reward_window_s": "window_s",
    "dedupe_window_s": "dedupe_window_s",
}

#: Value of `default_reward` that means none, in variables and in requests.
OFF: Final = "off"


def within(name: str) -> Interval:
    """The range of a learner setting, for a field of that name; the preset may narrow it."""
    limits = LIMITS[name]
    return Interval(ge=limits.least, lt=limits.most) if limits.below else Interval(ge=limits.least, le=limits.most)


class SettingsError(ValueError):
    """The environment holds invalid values; the message has one line for each."""


def check_store_url(url: str | None) -> str | None:
    """Check the URL of a store."""
    # The value is not repeated in the message: it may hold a password.
    if url is not None and not url.startswith(STORE_SCHEMES):
        raise ValueError(f"must start with {', '.join(STORE_SCHEMES[:-1])} or {STORE_SCHEMES[-1]}")
    return url


def split_words(value: Any) -> Any:
    """Split a text at commas and spaces; a JSON list is accepted too."""
    if not isinstance(value, str):
        return value
    # Not every text in brackets is a JSON list: IPv6 addresses are in brackets too.
    if value.lstrip().startswith('["') or value.strip() == "[]":
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError("is not a valid JSON list; separate values by commas") from None
    return [part for part in re.split(r"[,\s]+", value) if part]


def check_digests(digests: frozenset[str]) -> frozenset[str]:
    """Check digests of keys; returns them in lower case."""
    lowered = frozenset(digest.lower() for digest in digests)
    if any(not DIGEST_PATTERN.fullmatch(digest) for digest in lowered):
        raise ValueError(
            "must hold SHA-256 digests of 64 hex digits, not the keys, each alone or as namespace:digest; "
            "`metaban key` prints both"
        )
    return lowered


def check_hosts(hosts: frozenset[str]) -> frozenset[str]:
    """Check names of hosts; returns them in lower case."""
    lowered = frozenset(host.lower() for host in hosts)
    if any(not HOST_PATTERN.fullmatch(host) for host in lowered):
        raise ValueError("must hold names or addresses without a scheme and a port, such as api.example.com")
    return lowered


def check_origins(origins: frozenset[str]) -> frozenset[str]:
    """Check origins of web pages; `*` means all."""
    if any(origin != "*" and not ORIGIN_PATTERN.fullmatch(origin) for origin in origins):
        raise ValueError("must hold origins as browsers send them, such as https://shop.example.com, or *")
    return origins


@final
class Settings(BaseSettings):
    """Settings of `metaban serve` and `metaban worker`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, populate_by_name=True, env_ignore_empty=True
    )

    # Store and namespace
    redis_url: str | None = Field(
        default=None,
        validation_alias=AliasChoices("REDIS_URL", "redis_url"),
        repr=False,
        description="URL of the store: redis://, rediss:// or unix://; redis+cluster://host:port,host:port or "
        "rediss+cluster://… for a cluster (one of its servers is enough). Unset: a private Valkey in data_dir.",
    )
    data_dir: Path = Field(default=Path("data"), description="Directory of the private Valkey and of local files.")
    namespace: str = Field(
        default="default",
        pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$",
        description="Namespace used when a request names none.",
    )
    partitions: int = Field(
        default=16, ge=1, le=1024, description="Partitions of a new namespace; fixed at its creation."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of a new namespace's initial parameters.")

    # Keys
    client_keys: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(),
        repr=False,
        description="SHA-256 digests (hex, separated by commas) of the keys accepted in X-API-Key; `shop:digest` "
        "accepts a key for the namespace shop only. Without any keys the server binds only to loopback. `metaban key` "
        "creates a key.",
    )
    admin_keys: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(),
        repr=False,
        description="Digests of admin keys, or `namespace:digest`. An admin key may do everything a client key may.",
    )

    # The learner
    preset: Literal["default", "paper", "pooled"] = Field(
        default="default",
        description="default: posterior heads on a shared trunk; paper: Meta-Ban as published; pooled: as in its "
        "authors' public code.",
    )
    alpha: Annotated[float | None, within("alpha")] = Field(
        default=None, description="Weight of the exploration bonus."
    )
    bonus: Literal["gradient", "posterior"] | None = Field(
        default=None,
        description="Exploration bonus of the presets paper and pooled: from gradients, as published, or the posterior "
        "deviation of the user's own learner. The preset default always uses its posterior.",
    )
    nu: Annotated[float | None, within("nu")] = Field(default=None, description="Group tolerance ν of Eq. 4.")
    gamma: Annotated[float | None, within("gamma")] = Field(default=None, description="Group gap γ of Eq. 4.")
    width: Annotated[int | None, within("width")] = Field(default=None, description="Units in each hidden layer, m.")
    depth: Annotated[int | None, within("depth")] = Field(default=None, description="Layers, L.")
    user_steps: Annotated[int | None, within("user_steps")] = Field(
        default=None, description="Gradient steps of a user's learner, J₁."
    )
    meta_steps: Annotated[int | None, within("meta_steps")] = Field(
        default=None, description="Gradient steps of the meta adaptation, J₂."
    )
    user_rate: Annotated[float | None, within("user_rate")] = Field(
        default=None, description="Learning rate of a user's learner, η₁."
    )
    meta_rate: Annotated[float | None, within("meta_rate")] = Field(
        default=None, description="Learning rate of the meta adaptation, η₂."
    )
    l1: Annotated[float | None, within("l1")] = Field(default=None, description="Weight of the L1 term, λ.")
    standardize: bool | None = Field(default=None, description="Standardise inputs by their running moments.")
    learner: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Learner settings without a variable of their own, as a JSON object such as "
        '{"beta2": 2, "draw": "uniform"}.',
    )
    samples_kept: Annotated[int, within("samples_kept")] = Field(
        default=LearnerSettings.samples_kept,
        description="Latest samples kept per user; one is an arm of a decision with its rewards.",
    )
    candidate_pool: Annotated[int, within("candidate_pool")] = Field(
        default=LearnerSettings.candidate_pool, description="Largest number of users that a request is compared with."
    )

    # Features
    hash_dimension: int = Field(default=32, ge=1, le=4096, description="Inputs that named features are hashed into.")
    context_products: bool = Field(
        default=False, description="Add products of arm and context features; `default` makes its own."
    )
    intercept: bool = Field(default=True, description="Add a constant 1 to every input.")

    # Exploration
    policy: Literal["ucb", "ucb-floor", "squarecb", "thompson"] = Field(
        default="ucb-floor",
        description="How arms are chosen from their scores. ucb: the highest; ucb-floor: the highest, with probability "
        "epsilon spread over all arms; squarecb: inverse-gap weighting; thompson: by how often an arm is the best of "
        "a posterior draw.",
    )
    epsilon: float = Field(
        default=0.02, ge=0, le=1, description="Share of decisions spread evenly over the arms (ucb-floor)."
    )
    squarecb_gamma: float = Field(
        default=100.0, gt=0, le=1e9, description="How strongly squarecb prefers the best arm."
    )
    thompson_draws: int = Field(
        default=DRAWS,
        ge=1,
        le=1_000,
        description="Posterior draws per arm (thompson); one more draw is shared by all arms.",
    )
    thompson_scale: float = Field(
        default=DRAWS_SCALE,
        ge=0,
        le=1_000,
        description="Standard deviation of these draws, as a share of the posterior's.",
    )

    # The kill switch
    serving: Literal["learner", "baseline"] = Field(
        default="learner",
        description="learner: serve what was learned; baseline: serve the baseline ranking and learn nothing from it.",
    )
    baseline: tuple[str, ...] = Field(
        default=(),
        max_length=10_000,
        description="Baseline ranking: a JSON list of arm ids. Other arms follow in the order of the request.",
    )

    # Warm starts
    fusion: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: new users with a profile get a warm start by model fusion, if it helps; off: all new users "
        "start from the prior.",
    )
    fusion_interval_s: float = Field(
        default=3_600, gt=0, le=31_536_000, description="Seconds after which the fusion model is trained again."
    )
    fusion_growth: float = Field(
        default=0.25, gt=0, le=100, description="Growth of its number of source users that makes it train earlier."
    )
    fusion_min_sources: int = Field(
        default=50, ge=32, le=1_000, description="Users with a profile and rewards needed to train it."
    )

    # The machine
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Device of the tensors.")
    torch_threads: int = Field(default=1, ge=1, le=256, description="Threads per tensor operation.")
    active_users_max: int = Field(default=10_000, ge=1, description="Users outside the candidate pool kept in memory.")

    # Events and decisions
    durability: Literal["everysec", "always", "replicated"] = Field(
        default="everysec",
        description="everysec: a crash may lose the last 2 s; always: nothing acknowledged is lost; replicated: a "
        "reward is acknowledged when replicas have it (needs REDIS_URL).",
    )
    replicas: int = Field(
        default=1, ge=1, le=16, description="Replicas that must have a reward before it is acknowledged (replicated)."
    )
    replica_wait_ms: int = Field(
        default=2_000,
        ge=1,
        le=4_000,
        description="Longest wait for these replicas; then the reward is refused (503).",
    )
    reward_window_s: int = Field(
        default=WINDOW_S, ge=1, le=31_536_000, description="Seconds after a decision in which its rewards are learned."
    )
    late_window_s: int = Field(
        default=86_400,
        ge=0,
        le=31_536_000,
        description="Seconds a decision is kept after that, to tell a late reward from an unknown decision.",
    )
    repeated_rewards: Literal["first", "last", "sum"] = Field(
        default="sum", description="Which of several rewards for one arm of a decision counts, or their sum."
    )
    reward_min: float = Field(default=0.0, description="Smallest possible reward; learned as 0.")
    reward_max: float = Field(default=1.0, description="Largest possible reward; learned as 1.")
    default_reward: float | None = Field(
        default=0.0,
        description="Reward learned for each arm of a decision that got none within reward_wait_s; off: nothing is "
        "learned from it. A 0 outside the range of rewards counts as the lower end.",
    )
    reward_wait_s: float | None = Field(
        default=None,
        description="Seconds after a decision before default_reward is learned. Unset: 600, or reward_window_s if that "
        "is shorter.",
    )
    dedupe_window_s: int = Field(
        default=DEDUPE_WINDOW_S,
        ge=1,
        le=31_536_000,
        description="Seconds an event_id is remembered to detect duplicates.",
    )
    backlog_limit: int = Field(
        default=100_000, ge=1, description="Events waiting in one partition above which feedback is refused with 503."
    )
    user_retention_days: int = Field(
        default=0,
        ge=0,
        le=3_650,
        description="Days without a decision after which a user is forgotten; 0: never.",
    )
    wait_applied_timeout_s: float = Field(
        default=5.0, gt=0, le=300, description="Longest wait of POST /feedback?wait=applied, and for min_version."
    )
    store_outage: Literal["serve", "refuse"] = Field(
        default="serve",
        description="While the store does not answer: serve decides from memory without a record, refuse answers 503.",
    )

    # Requests
    max_body_bytes: int = Field(
        default=1_048_576, ge=1024, le=1_073_741_824, description="Largest request body, in bytes."
    )
    max_arms: int = Field(default=1000, ge=1, le=100_000, description="Most arms in one request.")
    max_dimension: int = Field(
        default=4096, ge=1, le=1_000_000, description="Most features of one arm, and of the learner's input."
    )
    max_catalogue: int = Field(default=10_000, ge=1, le=1_000_000, description="Most arms in the catalogue.")
    max_import_bytes: int = Field(
        default=67_108_864,
        ge=1024,
        le=1_073_741_824,
        description="Largest file of arms to import, in bytes.",
    )
    drain_s: float = Field(
        default=1.0,
        ge=0,
        le=600,
        description="Seconds that requests are still served after SIGTERM, while /health/ready answers 503.",
    )

    # Admission
    rate_limit: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Requests per second of one key, or of one address when there are no keys; 0: no limit.",
    )
    rate_burst: int = Field(
        default=50, ge=1, le=1_000_000, description="Requests that may come at once before rate_limit applies."
    )
    max_concurrent: int = Field(
        default=512,
        ge=1,
        le=100_000,
        description="Most requests in progress, at most half of max_connections; more are refused with 503.",
    )
    max_connections: int = Field(
        default=2048,
        ge=1,
        le=1_000_000,
        description="Most open connections; one more takes the place of the one that has been idle longest.",
    )
    allowed_hosts: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(),
        description="Accepted Host headers, separated by commas. Without keys, loopback names are accepted as well; "
        "with keys and unset, all are.",
    )
    cors_origins: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(),
        description="Origins (separated by commas) whose web pages may call the service; * for all, which needs keys. "
        "Unset: none.",
    )

    # Logs and traces
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/?#]+[^\s?#]*$",
        repr=False,
        description="OpenTelemetry collector that receives traces over HTTP, such as http://localhost:4318. Unset: no "
        "traces. Needs the extra otel.",
    )
    log_format: Literal["json", "console"] = Field(
        default="console", description="json: one JSON object per line; console: lines for people."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Lowest level logged.")

    _check_store_url = field_validator("redis_url")(check_store_url)
    _split = field_validator("client_keys", "admin_keys", "allowed_hosts", "cors_origins", mode="before")(split_words)
    _check_digests = field_validator("client_keys", "admin_keys")(check_digests)
    _check_hosts = field_validator("allowed_hosts")(check_hosts)
    _check_origins = field_validator("cors_origins")(check_origins)

    @field_validator("log_level", "log_format", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("default_reward", mode="before")
    @classmethod
    def _none_if_off(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.strip().lower() == OFF else value

    @property
    def appendfsync(self) -> Literal["everysec", "always"]:
        """How often a private Valkey syncs its file to disk."""
        return "always" if self.durability == "always" else "everysec"

    @property
    def has_keys(self) -> bool:
        """Whether any key is configured, and so required."""
        return bool(self.client_keys or self.admin_keys)


def load_settings(**overrides: Any) -> Settings:
    """Settings of the environment; raises one SettingsError that lists all invalid variables."""
    try:
        settings = Settings(**overrides)
    except BadSource as error:
        raise SettingsError(f"{error}; it must be JSON") from None
    except ValidationError as error:
        # Not chained: the original repeats the values, and some of them are secrets.
        raise SettingsError(describe_errors(error)) from None
    learner_settings(settings)
    reward_rules(settings)
    check_retention(settings.user_retention_days, settings.reward_window_s + settings.late_window_s)
    if settings.durability == "replicated" and settings.redis_url is None:
        raise SettingsError(
            "METABAN_DURABILITY: replicated needs replicas, and the private Valkey has none: set REDIS_URL to a "
            "server or a cluster with replicas"
        )
    if "*" in settings.cors_origins and not settings.has_keys:
        raise SettingsError(
            "METABAN_CORS_ORIGINS: without keys, * would let every web page that is open on this machine use the "
            "service: name the origins, or set METABAN_CLIENT_KEYS"
        )
    if settings.otlp_endpoint is not None and not can_trace():
        raise SettingsError(
            "METABAN_OTLP_ENDPOINT: traces need packages that are not installed: pip install '.[otel]' in a clone of "
            "metaban"
        )
    return settings


def learner_settings(
    settings: Settings, *, preset: str | None = None, own: Mapping[str, JsonValue] | None = None
) -> LearnerSettings:
    """The learner of a new namespace: its preset, with the settings of the environment, with those of its own.

    The environment's settings are for the environment's preset; of another preset only those that all presets have.
    """
    preset, own = preset or settings.preset, own or {}
    given = {name: getattr(settings, name) for name in (*LEARNER_SETTINGS, "seed")}
    given = {name: value for name, value in given.items() if value is not None}
    others = settings.learner
    if preset != settings.preset:
        given, others = {name: given[name] for name in (*OF_EVERY_PRESET, "seed")}, {}
    if preset == "default" and given.pop("bonus", "posterior") != "posterior":
        raise SettingsError(
            "METABAN_BONUS: the preset default always uses its posterior: leave it out, or set it to posterior"
        )
    known = named_settings(preset).to_json()
    for name in given:
        if name not in known:
            raise SettingsError(f"{variable_of(name)}: the preset {preset} has no such setting")
    if misplaced := [name for name in others if name in Settings.model_fields]:
        raise SettingsError(f"METABAN_LEARNER: {misplaced[0]} has a variable of its own, {variable_of(misplaced[0])}")
    if misplaced := [name for name in own if name in ("preset", "seed")]:
        raise SettingsError(f"METABAN_LEARNER: {misplaced[0]} is not set here, but beside it")
    try:
        return named_settings(preset, **{**given, **others, **own})
    except ValueError as error:
        name = str(error).partition(" ")[0]
        blamed = variable_of(name) if name in given and name not in own else "METABAN_LEARNER"
        raise SettingsError(f"{blamed}: {error}") from error


def reward_rules(settings: Settings) -> RewardRules:
    """Reward rules of a new namespace."""
    try:
        return RewardRules(**{field: getattr(settings, name) for name, field in REWARD_SETTINGS.items()})
    except ValueError as error:
        given = [variable_of(name) for name in REWARD_SETTINGS if name in settings.model_fields_set]
        raise SettingsError(f"{', '.join(given)}: {error}") from None


def shown_rules(rules: RewardRules) -> dict[str, JsonValue]:
    """Reward rules as settings, with the values that are in effect for unset ones."""
    fields = rules.to_json()
    shown = {name: fields[field] for name, field in REWARD_SETTINGS.items()}
    if rules.default_reward is None:
        shown["default_reward"] = OFF
    return {**shown, "reward_wait_s": rules.waited_s}


def check_retention(retention_days: int, decisions_kept_s: float) -> None:
    """SettingsError when users would be forgotten while a decision of theirs is still kept."""
    if retention_days and retention_days * 86_400 < decisions_kept_s:
        raise SettingsError(
            "METABAN_USER_RETENTION_DAYS: is shorter than METABAN_REWARD_WINDOW_S and METABAN_LATE_WINDOW_S together, "
            f"in which decisions are kept: set it to at least {math.ceil(decisions_kept_s / 86_400)}, or to 0"
        )


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return "REDIS_URL" if name == "redis_url" else f"{PREFIX}{name.upper()}"


def describe_errors(error: ValidationError) -> str:
    """The errors of settings, one line each, without the values."""
    lines = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        name = str(problem["loc"][0]) if problem["loc"] else ""
        lines.append(f"{variable_of(name.lower())}: {problem['msg'].removeprefix('Value error, ')}")
    return "\n".join(lines)
