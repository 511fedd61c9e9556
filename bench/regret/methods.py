"""The methods that `metaban bench regret` compares, by name: learners of the service, baselines and Vowpal Wabbit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final, cast, final

from metaban.bench.baselines import BASELINES, build_baseline
from metaban.bench.baselines.base import Baseline
from metaban.bench.core.local_loop import LocalLoop, LoopDecision
from metaban.bench.regret.method import Matrix, Method, VisibleRound
from metaban.bench.regret.tuning import tuned_settings
from metaban.bench.regret.vowpal import VOWPAL, VowpalMethod, chosen_options
from metaban.bench.worlds.environments import Environment
from metaban.models.features import FeatureLayout, infer_layout
from metaban.models.policies import build_policy
from metaban.models.settings import PRESETS, LearnerSettings, named_settings
from metaban.service.settings.environment import Settings

#: Methods that are not baselines: presets of the service and a variant of `default`.
LEARNERS: Final = ("default", "paper", "pooled", "shared-net")

#: Methods that `default` has to beat.
RIVALS: Final = ("linucb", "linucb-user", "club", "sclub", "cofiba", "locb", "neuralucb-one", "neuralucb-ind", VOWPAL)
METHODS: Final = (*LEARNERS, *RIVALS)

#: By variant of `default`, the learner settings that it replaces.
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "shared-net": {"heads": False, "kinds": False, "memory": False},
    "default-no-kinds": {"kinds": False},
    "default-no-memory": {"memory": False},
    "default-no-trunk": {"trunk": False},
    "default-no-codes": {"bins": 0},
    "default-no-products": {"products_max": 0},
    "default-no-apart": {"apart": False},
    "default-greedy": {"alpha": 0.0},
}


@final
class LearnerMethod(Method):
    """A learner of the service with the shipped policy, candidate pool and number of kept samples."""

    def __init__(
        self, learner: LearnerSettings, inputs: FeatureLayout, *, seed: int, candidate_pool: int | None = None
    ) -> None:
        shipped = shipped_settings()
        pool = candidate_pool or shipped.candidate_pool
        policy = build_policy(shipped.policy, epsilon=shipped.epsilon, squarecb_gamma=shipped.squarecb_gamma)
        #: The loop that decides and learns.
        self.loop = LocalLoop(
            learner, policy, inputs=inputs, seed=seed, samples_kept=shipped.samples_kept, pool_max=pool
        )
        self._open: dict[int, tuple[str, LoopDecision]] = {}
        self.settings = {
            **learner.to_json(),
            "policy": shipped.policy,
            "epsilon": shipped.epsilon,
            "candidate_pool": pool,
            "samples_kept": shipped.samples_kept,
            "inputs": inputs.to_json(),
        }

    def decide(self, asked: VisibleRound, number: int) -> int:
        user = f"user-{asked.user}"
        # The loop takes rows of an array like lists; they are not copied.
        arms = cast(Sequence[Sequence[float]], asked.arms)
        choice = self.loop.choose(user, arms, str(number), cast(Sequence[float] | None, asked.context))
        self._open[number] = user, choice
        return choice.arm

    def learn(self, number: int, reward: float) -> None:
        user, choice = self._open.pop(number)
        self.loop.learn(user, choice, reward)


@final
class BaselineMethod(Method):
    """A baseline with its tuned settings."""

    def __init__(self, baseline: Baseline, settings: Mapping[str, Any]) -> None:
        self._baseline = baseline
        self._open: dict[int, tuple[int, Matrix]] = {}
        self.settings = dict(settings)

    def decide(self, asked: VisibleRound, number: int) -> int:
        arms = asked.joined
        arm = int(self._baseline.choose(asked.user, arms))
        self._open[number] = asked.user, arms[arm]
        return arm

    def learn(self, number: int, reward: float) -> None:
        user, arm = self._open.pop(number)
        self._baseline.learn(user, arm, reward)


def shipped_settings() -> Settings:
    """The service's default settings, independent of environment variables."""
    return Settings.model_construct()


def known_methods() -> tuple[str, ...]:
    """Every name that `build_method` takes."""
    return (*METHODS, *(name for name in VARIANTS if name not in METHODS))


def unavailable(name: str) -> str | None:
    """The reason why a method cannot run here, or None."""
    if name == VOWPAL and find_spec("vowpalwabbit") is None:
        return "Vowpal Wabbit is not installed: pip install vowpalwabbit"
    if name not in RIVALS and preset_of(name) not in PRESETS:
        return f"there is no preset {preset_of(name)}"
    return None


def preset_of(name: str) -> str:
    """The preset that a learner of the service starts from."""
    return "default" if name in VARIANTS else name


def build_method(
    name: str,
    world: Environment,
    *,
    env: str,
    seed: int,
    overrides: Mapping[str, Any] | None = None,
    candidate_pool: int | None = None,
    products: bool = False,
) -> Method:
    """A method for an environment; overrides, pool and arm × context products apply to the service's learners only."""
    if name == VOWPAL:
        return VowpalMethod(chosen_options(env), seed=seed)
    if name in BASELINES:
        settings = tuned_settings(env, name)
        dimension = world.dimension + world.context_dimension
        return BaselineMethod(
            build_baseline(name, users=world.users, dimension=dimension, seed=seed, settings=settings), settings
        )
    preset: Any = preset_of(name)  # a Literal of preset names in the signature
    learner = named_settings(preset, **{**VARIANTS.get(name, {}), **(overrides or {}), "seed": seed})
    return LearnerMethod(learner, layout_of(world, products=products), seed=seed, candidate_pool=candidate_pool)


def layout_of(world: Environment, *, products: bool = False) -> FeatureLayout:
    """The layout that the service infers from a first request of this environment."""
    shipped = shipped_settings()
    return infer_layout(
        [[0.0] * world.dimension],
        [0.0] * world.context_dimension if world.context_dimension else None,
        products=products,
        intercept=shipped.intercept,
        hash_dimension=shipped.hash_dimension,
        max_dimension=shipped.max_dimension,
    )
