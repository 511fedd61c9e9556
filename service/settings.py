"""Every setting of the service and the worker: environment variables named METABAN_…, and REDIS_URL.

Settings of the learner are None unless set: the preset (`METABAN_PRESET`) has the value then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import AliasChoices, Field, JsonValue, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from pydantic_settings import SettingsError as BadSource

from models.exploration import DRAWS, DRAWS_SCALE
from models.settings import LIMITS, LearnerSettings, named_settings
from service.setting_checks import digests_only, hosts_only, known_scheme, origins_only, split_words
from service.tracing import can_trace
from store.reward_rules import RewardRules

#: Settings of the learner that have variables of their own.
LEARNER_SETTINGS = (
    "alpha", "nu", "gamma", "width", "depth", "user_steps", "meta_steps", "user_rate", "meta_rate", "l1", "standardize",
    "bonus",
)  # fmt: skip


class SettingsError(ValueError):
    """The environment holds values that cannot be used; the message has one line for each."""


@final
class Settings(BaseSettings):
    """What `metaban serve` and `metaban worker` run with."""

    model_config = SettingsConfigDict(
        env_prefix="METABAN_", extra="ignore", frozen=True, populate_by_name=True, env_ignore_empty=True
    )

    # Where things are
    redis_url: str | None = Field(
        default=None,
        validation_alias=AliasChoices("REDIS_URL", "redis_url"),
        repr=False,
        description="redis://, rediss:// or unix:// of the store, redis+cluster://host:port,host:port or "
        "rediss+cluster://… of a cluster (one of its servers is enough); unset: a private Valkey in data_dir.",
    )
    data_dir: Path = Field(default=Path("data"), description="Directory of the private Valkey and of local files.")
    namespace: str = Field(
        default="default",
        pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$",
        description="The recommender that requests mean which name none.",
    )
    partitions: int = Field(
        default=16, ge=1, le=1024, description="Parts a new namespace is split into; fixed at its creation."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of a new namespace's initial parameters.")

    # Keys
    client_keys: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(),
        repr=False,
        description="SHA-256 digests (hex, separated by commas) of the keys accepted in X-API-Key; `shop:digest` is "
        "good for the namespace shop alone. With no keys at all the server binds only to loopback. `metaban key` "
        "makes one.",
    )
    admin_keys: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(),
        repr=False,
        description="Digests of keys, or `namespace:digest`, that may do all that a client may, and administer.",
    )

    # The learner
    preset: Literal["default", "paper", "pooled"] = Field(
        default="default",
        description="Posterior heads on a shared trunk, Meta-Ban as published, or what its public code does.",
    )
    alpha: float | None = Field(
        default=None, ge=0, le=LIMITS["alpha"].most, description="Weight of the exploration bonus."
    )
    bonus: Literal["gradient", "posterior"] | None = Field(
        default=None,
        description="What the bonus of paper and pooled is made of: gradients, as published, or the deviation of the "
        "asking user's own learner. That of the preset default always is its posterior's.",
    )
    nu: float | None = Field(default=None, gt=1, le=LIMITS["nu"].most, description="Group tolerance ν of Eq. 4.")
    gamma: float | None = Field(default=None, ge=0, lt=1, description="Group gap γ of Eq. 4.")
    width: int | None = Field(default=None, ge=1, le=LIMITS["width"].most, description="Units in each hidden layer, m.")
    depth: int | None = Field(default=None, ge=2, le=LIMITS["depth"].most, description="Layers, L.")
    user_steps: int | None = Field(
        default=None, ge=1, le=LIMITS["user_steps"].most, description="Steps of a user's learner, J₁."
    )
    meta_steps: int | None = Field(
        default=None, ge=1, le=LIMITS["meta_steps"].most, description="Steps of the adaptation, J₂."
    )
    user_rate: float | None = Field(
        default=None, gt=0, le=LIMITS["user_rate"].most, description="Rate of a user's learner, η₁."
    )
    meta_rate: float | None = Field(
        default=None, gt=0, le=LIMITS["meta_rate"].most, description="Rate of the adaptation, η₂."
    )
    l1: float | None = Field(default=None, ge=0, le=LIMITS["l1"].most, description="Weight of the L1 term, λ.")
    standardize: bool | None = Field(default=None, description="Standardise inputs by their running moments.")
    learner: dict[str, JsonValue] = Field(
        default_factory=dict,
        description='More settings of the learner as a JSON object, such as {"beta2": 2, "draw": "uniform"}.',
    )
    candidate_pool: int = Field(
        default=2048, ge=1, le=1_000_000, description="Users that a request compares with, at most."
    )

    # Features
    hash_dimension: int = Field(default=32, ge=1, le=4096, description="Places that named features are hashed into.")
    context_products: bool = Field(default=False, description="Add the products of arm and context features.")
    intercept: bool = Field(default=True, description="Add a constant 1 to every input.")

    # Exploration
    policy: Literal["ucb", "ucb-floor", "squarecb", "thompson"] = Field(
        default="ucb-floor",
        description="How arms are chosen from their scores: the best one, the best one with an exact floor of "
        "epsilon, by inverse-gap weighting, or as often as an arm is the best of a posterior draw around its score.",
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
        description="Posterior draws of each arm that thompson counts; one more is shared by all.",
    )
    thompson_scale: float = Field(
        default=DRAWS_SCALE,
        ge=0,
        le=1_000,
        description="How far from the score thompson takes them, as a share of the posterior's deviation.",
    )

    # The kill switch
    serving: Literal["learner", "baseline"] = Field(
        default="learner",
        description="baseline: serve the baseline ranking in place of what was learned, and learn nothing from it.",
    )
    baseline: tuple[str, ...] = Field(
        default=(),
        max_length=10_000,
        description="Arm ids in the order of the baseline, as a JSON list; arms that it does not name come after "
        "them, in the order of the request.",
    )

    # Warm starts
    fusion: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: new users with a profile begin from what is fused of others, where that helps; off: all "
        "begin from the meta-learner's prior.",
    )
    fusion_interval_s: float = Field(
        default=3_600, gt=0, le=31_536_000, description="Seconds after which fusion is trained again if it can be."
    )
    fusion_growth: float = Field(
        default=0.25, gt=0, le=100, description="Share by which its sources must grow to be trained before that."
    )
    fusion_min_sources: int = Field(
        default=50, ge=32, le=1_000, description="Users with a profile and rewards from which on it is trained."
    )

    # The machine
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where tensors live.")
    torch_threads: int = Field(default=1, ge=1, le=256, description="Threads of one tensor operation.")
    active_users_max: int = Field(default=10_000, ge=1, description="Users outside the candidate pool kept in memory.")

    # Events and decisions
    durability: Literal["everysec", "always", "replicated"] = Field(
        default="everysec",
        description="everysec: a crash may lose the last 2 s; always: nothing that was acknowledged is lost; "
        "replicated: a reward is acknowledged when replicas have it (needs REDIS_URL).",
    )
    replicas: int = Field(
        default=1, ge=1, le=16, description="Replicas that must have a reward before it is acknowledged (replicated)."
    )
    replica_wait_ms: int = Field(
        default=2_000, ge=1, le=4_000, description="Longest wait for them; the reward is refused with 503 after it."
    )
    reward_window_s: int = Field(
        default=86_400, ge=1, le=31_536_000, description="How long a decision waits for its rewards."
    )
    late_window_s: int = Field(
        default=86_400,
        ge=0,
        le=31_536_000,
        description="How long after that it is kept, so that a late reward is told from one of an unknown decision.",
    )
    repeated_rewards: Literal["first", "last", "sum"] = Field(
        default="sum", description="What several rewards of one arm of one decision count as."
    )
    reward_min: float = Field(default=0.0, description="The least reward there is; learned as 0.")
    reward_max: float = Field(default=1.0, description="The greatest reward there is; learned as 1.")
    default_reward: float | None = Field(
        default=None,
        description="What a decision without a reward is learned with after reward_wait_s; unset: it is not learned.",
    )
    reward_wait_s: float | None = Field(
        default=None, description="How long a decision waits for a reward before default_reward is learned."
    )
    dedupe_window_s: int = Field(
        default=604_800, ge=1, le=31_536_000, description="How long an event_id is remembered."
    )
    backlog_limit: int = Field(
        default=100_000, ge=1, description="Events that may wait in one partition before feedback is refused."
    )
    samples_kept: int = Field(
        default=256, ge=1, le=100_000, description="Latest events of each user kept to learn from."
    )
    wait_applied_timeout_s: float = Field(
        default=5.0, gt=0, le=300, description="Longest wait of POST /feedback?wait=applied."
    )

    store_outage: Literal["serve", "refuse"] = Field(
        default="serve",
        description="While the store is away: serve decides from memory without recording it, refuse answers 503.",
    )

    # Requests
    max_body_bytes: int = Field(
        default=1_048_576, ge=1024, le=1_073_741_824, description="Longest request body that is read."
    )
    max_arms: int = Field(default=1000, ge=1, le=100_000, description="Arms in one request.")
    max_dimension: int = Field(
        default=4096, ge=1, le=1_000_000, description="Features of one arm, and of the learner's input."
    )
    max_catalogue: int = Field(default=10_000, ge=1, le=1_000_000, description="Arms in the catalogue.")
    max_import_bytes: int = Field(
        default=67_108_864, ge=1024, le=1_073_741_824, description="Longest file of arms that is imported."
    )
    drain_s: float = Field(
        default=1.0,
        ge=0,
        le=600,
        description="How long requests are still served after SIGTERM, while /health/ready sends them elsewhere.",
    )

    # Who is let in, and how often
    rate_limit: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Requests a second that one key may send, or one address where there are no keys; 0 is no limit.",
    )
    rate_burst: int = Field(
        default=50, ge=1, le=1_000_000, description="Requests that may come at once before rate_limit counts."
    )
    max_concurrent: int = Field(
        default=512, ge=1, le=100_000, description="Requests under way; more are refused with 503 at once."
    )
    max_connections: int = Field(
        default=2048, ge=1, le=1_000_000, description="Open connections; more are refused with 503 and closed."
    )
    allowed_hosts: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(),
        description="Names (separated by commas) that requests may come under. Without keys: beside those of "
        "loopback; with keys: all when unset.",
    )
    cors_origins: Annotated[frozenset[str], NoDecode] = Field(
        default=frozenset(),
        description="Origins (separated by commas) whose web pages may call the service, or * for all of them, "
        "which takes keys; none when unset.",
    )

    # Logs and traces
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/?#]+[^\s?#]*$",
        repr=False,
        description="OpenTelemetry collector that traces are sent to over HTTP, such as http://localhost:4318; "
        "none are made when unset. Needs metaban[otel].",
    )
    log_format: Literal["json", "console"] = Field(
        default="console", description="One JSON object a line, or lines for people."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least severe shown.")

    _known_scheme = field_validator("redis_url")(known_scheme)
    _split = field_validator("client_keys", "admin_keys", "allowed_hosts", "cors_origins", mode="before")(split_words)
    _digests_only = field_validator("client_keys", "admin_keys")(digests_only)
    _hosts_only = field_validator("allowed_hosts")(hosts_only)
    _origins_only = field_validator("cors_origins")(origins_only)

    @field_validator("log_level", "log_format", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @property
    def appendfsync(self) -> Literal["everysec", "always"]:
        """How often a private Valkey syncs what it wrote to disk."""
        return "always" if self.durability == "always" else "everysec"

    @property
    def has_keys(self) -> bool:
        """Whether any key is configured, and so required."""
        return bool(self.client_keys or self.admin_keys)


def learner_settings(settings: Settings) -> LearnerSettings:
    """The preset with what the environment overrides."""
    given = {name: getattr(settings, name) for name in LEARNER_SETTINGS}
    overrides = {name: value for name, value in given.items() if value is not None}
    if settings.preset == "default" and overrides.pop("bonus", "posterior") != "posterior":
        raise SettingsError(
            "METABAN_BONUS: the bonus of the preset default is its posterior's: leave it out, or say so"
        )
    known = named_settings(settings.preset).to_json()
    for name in overrides:
        if name not in known:
            raise SettingsError(f"METABAN_{name.upper()}: the preset {settings.preset} has no such setting")
    overrides["seed"] = settings.seed
    for name in settings.learner:
        if name == "preset" or name in overrides:
            raise SettingsError(f"METABAN_LEARNER: {name} has a variable of its own, METABAN_{name.upper()}")
    try:
        return named_settings(settings.preset, **overrides, **settings.learner)
    except ValueError as error:
        raise SettingsError(f"METABAN_LEARNER: {error}") from error


def told(error: ValidationError) -> str:
    """What is wrong with settings, a line each, without their values."""
    lines = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        name = str(problem["loc"][0]) if problem["loc"] else ""
        variable = "REDIS_URL" if name.lower() == "redis_url" else f"METABAN_{name.upper()}"
        lines.append(f"{variable}: {problem['msg'].removeprefix('Value error, ')}")
    return "\n".join(lines)


def reward_rules(settings: Settings) -> RewardRules:
    """What rewards mean, unless the namespace says otherwise."""
    try:
        rules = RewardRules(
            repeated=settings.repeated_rewards,
            reward_min=settings.reward_min,
            reward_max=settings.reward_max,
            default_reward=settings.default_reward,
            wait_s=settings.reward_wait_s,
        )
    except ValueError as error:
        raise SettingsError(
            f"METABAN_REWARD_MIN, METABAN_REWARD_MAX, METABAN_DEFAULT_REWARD, METABAN_REWARD_WAIT_S: {error}"
        ) from None
    if rules.wait_s is not None and rules.wait_s > settings.reward_window_s:
        raise SettingsError("METABAN_REWARD_WAIT_S: is longer than METABAN_REWARD_WINDOW_S, when rewards are late")
    return rules


def load_settings(**overrides: Any) -> Settings:
    """Settings of the environment; what is wrong with them is one readable SettingsError."""
    try:
        settings = Settings(**overrides)
    except BadSource as error:
        raise SettingsError(f"{error}; it has to be JSON") from None
    except ValidationError as error:
        # Not chained: the original repeats the values, and some of them are secrets.
        raise SettingsError(told(error)) from None
    learner_settings(settings)
    reward_rules(settings)
    if settings.dedupe_window_s < settings.reward_window_s:
        raise SettingsError(
            "METABAN_DEDUPE_WINDOW_S: is shorter than METABAN_REWARD_WINDOW_S: a reward that is sent again in between "
            "would be learned twice"
        )
    if settings.durability == "replicated" and settings.redis_url is None:
        raise SettingsError(
            "METABAN_DURABILITY: replicated needs replicas, and the private Valkey has none: set REDIS_URL to a "
            "server or a cluster that has"
        )
    if "*" in settings.cors_origins and not settings.has_keys:
        raise SettingsError(
            "METABAN_CORS_ORIGINS: without keys, * would let every web page that is open on this machine use the "
            "service: name the origins, or set METABAN_CLIENT_KEYS"
        )
    if settings.otlp_endpoint is not None and not can_trace():
        raise SettingsError(
            "METABAN_OTLP_ENDPOINT: traces need packages that are not installed: pip install 'metaban[otel]'"
        )
    return settings
