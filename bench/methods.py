"""Every method of `metaban bench regret` behind one interface: the learners of the service, the baselines, and VW.

A method is asked about a user, arms and perhaps a context; what the arms would have earned stays with the runner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, cast, final

import numpy as np
from numpy.typing import NDArray

from bench.environments import Environment
from bench.harness import Choice, LocalLoop
from bench.tuning import tuned_settings
from models.baselines import BASELINES, Baseline, build_baseline
from models.exploration import build_policy
from models.features import FeatureLayout, infer_layout
from models.settings import PRESETS, LearnerSettings, named_settings
from service.settings import Settings

Matrix = NDArray[np.float64]

#: Methods that are no baseline: presets of the service, and what a variant changes in `default`.
LEARNERS: Final = ("default", "paper", "pooled", "shared-net")
VOWPAL: Final = "vw"
#: Whom `default` has to beat.
RIVALS: Final = ("linucb", "linucb-user", "club", "sclub", "cofiba", "locb", "neuralucb-one", "neuralucb-ind", VOWPAL)
METHODS: Final = (*LEARNERS, *RIVALS)
#: Settings of the learner that a variant of `default` replaces, by the name of the method.
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "shared-net": {"heads": False, "embed": False, "groups": False, "memory": False},
    "default-no-groups": {"groups": False},
    "default-no-memory": {"memory": False},
    "default-no-plain-head": {"plain": False},
    "default-no-teaching": {"teaching": False},
    "default-no-trunk": {"trunk": False},
    "default-no-embedding": {"embed": False},
    "default-no-codes": {"bins": 0},
    "default-no-products": {"products_max": 0},
    "default-no-apart": {"apart": False},
    "default-greedy": {"alpha": 0.0},
}


@final
@dataclass(frozen=True, slots=True)
class Question:
    """What a method may know of a round: who asks, the arms [k, d], and the context [c] if there is one."""

    user: int
    arms: Matrix
    context: Matrix | None = None

    @property
    def joined(self) -> Matrix:
        """Arms with the context behind each, [k, d + c]."""
        if self.context is None:
            return self.arms
        return np.concatenate([self.arms, np.broadcast_to(self.context, (len(self.arms), len(self.context)))], axis=1)


class Method(ABC):
    """Decides one round after the other; rewards may come later, and are named by the number of their decision."""

    #: What it runs with, for the report.
    settings: Mapping[str, Any]

    @abstractmethod
    def decide(self, asked: Question, number: int) -> int:
        """The place of the arm to show."""

    @abstractmethod
    def learn(self, number: int, reward: float) -> None:
        """What the arm of a decision earned; said once."""


@final
class LearnerMethod(Method):
    """A learner of the service, with the policy, the candidate pool and the kept samples that the service ships."""

    def __init__(
        self, learner: LearnerSettings, inputs: FeatureLayout, *, seed: int, candidate_pool: int | None = None
    ) -> None:
        shipped = shipped_settings()
        pool = candidate_pool or shipped.candidate_pool
        policy = build_policy(shipped.policy, epsilon=shipped.epsilon, squarecb_gamma=shipped.squarecb_gamma)
        #: What decides and learns.
        self.loop = LocalLoop(
            learner, policy, inputs=inputs, seed=seed, samples_kept=shipped.samples_kept, pool_max=pool
        )
        self._open: dict[int, tuple[str, Choice]] = {}
        self.settings = {
            **learner.to_json(),
            "policy": shipped.policy,
            "epsilon": shipped.epsilon,
            "candidate_pool": pool,
            "samples_kept": shipped.samples_kept,
            "inputs": inputs.to_json(),
        }

    def decide(self, asked: Question, number: int) -> int:
        user = f"user-{asked.user}"
        # Rows of an array are as good as lists to the loop, and are not copied number by number.
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

    def decide(self, asked: Question, number: int) -> int:
        arms = asked.joined
        arm = int(self._baseline.choose(asked.user, arms))
        self._open[number] = asked.user, arms[arm]
        return arm

    def learn(self, number: int, reward: float) -> None:
        user, arm = self._open.pop(number)
        self._baseline.learn(user, arm, reward)


def shipped_settings() -> Settings:
    """The service's defaults, whatever the environment variables of this shell say."""
    return Settings.model_construct()


def known_methods() -> tuple[str, ...]:
    """Every name that `build_method` takes."""
    return (*METHODS, *(name for name in VARIANTS if name not in METHODS))


def unavailable(name: str) -> str | None:
    """Why a method cannot run here, or None."""
    if name == VOWPAL and find_spec("vowpalwabbit") is None:
        return "Vowpal Wabbit is not installed: pip install 'metaban[vw]'"
    if name not in RIVALS and preset_of(name) not in PRESETS:
        return f"there is no preset {preset_of(name)}"
    return None


def preset_of(name: str) -> str:
    """The preset that a method of the service's own starts from."""
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
    """A method for a world; overrides, pool and products of arm and context concern the service's learners only."""
    if name == VOWPAL:
        from bench.vowpal import VowpalMethod, chosen_options  # needs the optional package

        return VowpalMethod(chosen_options(env), seed=seed)
    if name in BASELINES:
        settings = tuned_settings(env, name)
        dimension = world.dimension + world.context_dimension
        return BaselineMethod(
            build_baseline(name, users=world.users, dimension=dimension, seed=seed, settings=settings), settings
        )
    preset: Any = preset_of(name)  # the signature lists the presets, which only a checker can enumerate
    learner = named_settings(preset, **{**VARIANTS.get(name, {}), **(overrides or {}), "seed": seed})
    return LearnerMethod(learner, layout_of(world, products=products), seed=seed, candidate_pool=candidate_pool)


def layout_of(world: Environment, *, products: bool = False) -> FeatureLayout:
    """What the service infers from a first request of this world."""
    shipped = shipped_settings()
    return infer_layout(
        [[0.0] * world.dimension],
        [0.0] * world.context_dimension if world.context_dimension else None,
        products=products,
        intercept=shipped.intercept,
        hash_dimension=shipped.hash_dimension,
        max_dimension=shipped.max_dimension,
    )
