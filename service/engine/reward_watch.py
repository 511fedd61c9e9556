"""Warns when nothing can be learned from the rewards of a namespace: they are all equal, or none come.

Decisions and rewards are counted where they pass (`Decider`, `Feedback`), and compared here every CHECK_EVERY_S. Only
when the counts of this process look wrong, the counters of the store are read: rewards may be sent to other processes,
and default rewards are made by workers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final, final

import structlog

from metaban.service.engine.feedback import Feedback
from metaban.service.engine.recommend.decide import Decider
from metaban.service.engine.store_guard import StoreGuard
from metaban.service.settings.namespace import LiveSettings
from metaban.service.telemetry.metrics import NamespaceMetrics, WarningCode
from metaban.store.errors import StoreError
from metaban.store.users.users import UserStore

CHECK_EVERY_S: Final = 10.0

#: Decisions without a reward that cause a warning.
DECISIONS_MIN: Final = 100

#: Equal rewards in a row that cause a warning. Lowest rewards in a row are usual where clicks are rare.
EQUAL_MIN: Final = 100

EQUAL_LOWEST_MIN: Final = 1_000

#: Time that a default reward may take once it is due, in seconds.
DEFAULT_REWARD_S: Final = 30.0

#: Moments remembered within the wait for a reward.
MOMENTS: Final = 20

log = structlog.get_logger()


@final
@dataclass(frozen=True, slots=True)
class LearningWarning:
    """Why a namespace cannot learn, and what to do."""

    code: WarningCode
    detail: str


@final
@dataclass(frozen=True, slots=True)
class _Moment:
    """Decisions and accepted rewards of this process until then."""

    at_s: float
    decisions: int
    rewards: int


@final
class RewardWatch:
    """Watches the rewards of one namespace."""

    def __init__(
        self,
        live: LiveSettings,
        guard: StoreGuard,
        users: UserStore,
        decider: Decider,
        feedback: Feedback,
        metrics: NamespaceMetrics,
    ) -> None:
        self._live = live
        self._guard = guard
        self._users = users
        self._decider = decider
        self._feedback = feedback
        self._metrics = metrics
        self._log = log.bind(namespace=metrics.namespace)
        #: The warnings that hold now.
        self.warnings: tuple[LearningWarning, ...] = ()
        self._moments: deque[_Moment] = deque()
        # Decisions until the latest reward of the namespace, and that number of its rewards in the store.
        self._rewarded = 0
        self._rewards_here = 0
        self._rewards_stored: int | None = None
        # Rewards until the latest default reward of the namespace, and the number of its default rewards in the store.
        self._varied = 0
        self._defaults_stored: int | None = None

    async def run(self) -> None:
        """Check until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            try:
                await self.check(loop.time())
            except StoreError:
                pass  # the store guard reports it; the next check looks again
            except Exception:
                self._log.exception("reward_check_failed")

    async def check(self, now_s: float) -> None:
        """Compare the counts, and log, expose and clear warnings."""
        before = self._before(now_s)
        found: list[LearningWarning] = []
        # A baseline is served while nothing is learned on purpose.
        if self._live.settings.serving == "learner":
            found = [each for each in (await self._equal(before), await self._missing(before)) if each is not None]
        codes, known = {each.code for each in found}, {each.code for each in self.warnings}
        for each in found:
            if each.code not in known:
                self._log.warning("learning_warning_raised", code=each.code, detail=each.detail)
        for code in known - codes:
            self._log.info("learning_warning_cleared", code=code)
        self.warnings = tuple(found)
        self._metrics.set_warnings(codes)

    def _before(self, now_s: float) -> _Moment:
        """The counts when decisions were made whose rewards or default rewards must have come by now."""
        wait_s = self._live.rules.waited_s + DEFAULT_REWARD_S
        if not self._moments or now_s - self._moments[-1].at_s >= wait_s / MOMENTS:
            self._moments.append(_Moment(now_s, self._decider.decided, self._feedback.accepted))
        while len(self._moments) > 1 and self._moments[1].at_s <= now_s - wait_s:
            self._moments.popleft()
        first = self._moments[0]
        return first if first.at_s <= now_s - wait_s else _Moment(first.at_s, 0, 0)

    async def _equal(self, before: _Moment) -> LearningWarning | None:
        """Whether the latest rewards are all equal, default rewards included."""
        rules, reward, equal = self._live.rules, self._feedback.latest, self._feedback.equal
        least = EQUAL_LOWEST_MIN if reward == 0 else EQUAL_MIN
        if equal < least:
            return None
        default = rules.reward_of_silence
        if default is not None and rules.range.scaled(default) != reward:
            # Only clicks are sent, perhaps: then default rewards are made.
            defaults = (await self._guard.call(self._users.counters))["defaulted"]
            if defaults != self._defaults_stored:
                self._defaults_stored, self._varied = defaults, self._feedback.accepted
            equal = min(equal, before.rewards - self._varied)
            if equal < least:
                return None
        return LearningWarning(
            "rewards-equal",
            f"the latest {equal} rewards are all {rules.range.as_sent(reward):g}: nothing can be learned from rewards "
            "that do not differ. Send a lower reward for arms that were shown without success than for those with "
            "success, or send none for them and leave default_reward on.",
        )

    async def _missing(self, before: _Moment) -> LearningWarning | None:
        """Whether decisions get no rewards at all."""
        if self._feedback.accepted != self._rewards_here:
            self._rewards_here, self._rewarded = self._feedback.accepted, self._decider.decided
        missing = before.decisions - self._rewarded
        if missing < DECISIONS_MIN:
            return None
        counters = await self._guard.call(self._users.counters)
        stored = counters["enqueued"] - counters["defaulted"]
        if stored and stored != self._rewards_stored:
            # Rewards came through other processes, or before this one started.
            self._rewards_stored, self._rewarded = stored, self._decider.decided
            return None
        return LearningWarning(
            "rewards-missing",
            f"{missing} decisions in a row got no reward within {self._live.rules.waited_s:g} s, and none came for "
            "other decisions either: nothing is learned from users. Send rewards to POST /feedback with the "
            "decision_id of the answer; if they are sent, metaban_rewards_total counts the rejected ones, and answers "
            "say why; if they take longer, raise reward_wait_s.",
        )
