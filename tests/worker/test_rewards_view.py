"""What the samples of a user mean together, beside a version that is slow and obvious."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.presets import build_learner
from store.codec import Sample, sample_key
from store.reward_range import RewardRange
from store.reward_rules import RewardRules
from tests.worker.conftest import OpenWorkshop
from tests.worker.workshop import CPU, INPUTS, Workshop, features, make_event, make_sample, small
from worker.epochs import derive_shared
from worker.rewards_view import learnable
from worker.trainer import Pupil, Trainer

REWARDS = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0])  # whose sums are exact in any order
RULES = st.builds(
    RewardRules,
    repeated=st.sampled_from(["first", "last", "sum"]),
    reward_min=st.sampled_from([-1.0, 0.0, 1.0]),
    reward_max=st.just(3.0),
)
RANGES = st.sampled_from([None, RewardRange(0, 1), RewardRange(-4, 4), RewardRange(1, 5)])


@st.composite
def logs(draw: st.DrawFn) -> list[Sample]:
    """Samples of few keys, so that they repeat; the time tells them apart."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 4), REWARDS, st.booleans(), RANGES), max_size=12))
    return [
        Sample(np.full(2, key), reward, 0.5, key, time, str(key), key=key, by_default=by_default, reward_range=sent_in)
        for time, (key, reward, by_default, sent_in) in enumerate(sizes)
    ]


def slowly(samples: Sequence[Sample], rules: RewardRules) -> list[tuple[int, float]]:
    """Key and reward of each sample to learn from, in order."""
    seen: set[int] = set()
    view: list[tuple[int, float]] = []
    for sample in samples:
        if sample.key == 0:
            view.append((0, sample.reward))
            continue
        if sample.key in seen:
            continue
        seen.add(sample.key)
        of_key = [other for other in samples if other.key == sample.key]
        told = [other for other in of_key if not other.by_default]
        if not told:
            reward = of_key[0].reward
        elif rules.repeated == "first":
            reward = told[0].reward
        elif rules.repeated == "last":
            reward = told[-1].reward
        else:
            as_sent = 0.0
            for other in told:
                least, greatest = (
                    (rules.reward_min, rules.reward_max)
                    if other.reward_range is None
                    else (other.reward_range.least, other.reward_range.greatest)
                )
                as_sent += least + other.reward * (greatest - least)
            within = min(max(as_sent, least), greatest)
            reward = (within - least) / (greatest - least)
        view.append((sample.key, reward))
    return view


@given(logs(), RULES)
def test_it_is_what_the_slow_version_says(samples: list[Sample], rules: RewardRules) -> None:
    view = learnable(samples, rules)
    assert [sample.key for sample in view] == [key for key, _ in slowly(samples, rules)]
    assert [sample.reward for sample in view] == pytest.approx([reward for _, reward in slowly(samples, rules)])
    for sample in view:
        assert sample.features.tolist() == [sample.key] * 2
        assert sample.by_default == all(each.by_default for each in samples if each.key == sample.key) or not sample.key
    assert list(learnable(view, rules)) == list(view)


@given(st.lists(REWARDS, min_size=1, max_size=5), st.data())
def test_a_default_counts_nowhere_beside_what_was_told(rewards: list[float], data: st.DataObject) -> None:
    told = [replace(make_sample(1, reward=reward), key=7) for reward in rewards]
    both = list(told)
    for _ in range(data.draw(st.integers(1, 3))):
        both.insert(data.draw(st.integers(0, len(both))), replace(make_sample(1, reward=1), key=7, by_default=True))
    for repeated in ("first", "last", "sum"):
        rules = RewardRules(repeated)
        [alone], [among] = learnable(told, rules), learnable(both, rules)
        assert (among.reward, among.by_default) == (alone.reward, False)


@given(logs(), RULES, RULES)
def test_another_range_changes_nothing_that_was_learned(
    samples: list[Sample], before: RewardRules, after: RewardRules
) -> None:
    after = replace(after, repeated=before.repeated)
    known = [replace(sample, reward_range=sample.reward_range or before.range) for sample in samples]
    assert [sample.reward for sample in learnable(known, after)] == [
        sample.reward for sample in learnable(known, before)
    ]


def test_without_repetition_nothing_is_copied() -> None:
    samples = [replace(make_sample(number), key=number) for number in range(1, 20)]
    assert learnable(samples, RewardRules()) is samples
    keyless = [make_sample(number) for number in range(20)]
    assert learnable(keyless, RewardRules()) is keyless


def test_the_place_is_that_of_the_first() -> None:
    keys = [5, 6, 5, 7, 6, 5]
    samples = [replace(make_sample(place), key=key) for place, key in enumerate(keys)]
    assert [sample.key for sample in learnable(samples, RewardRules("last"))] == [5, 6, 7]


def trainer_of(repeated: Any = "sum", preset: str = "default") -> Trainer:
    learner = build_learner(small(preset=preset) if preset == "paper" else small(preset=preset, width=8), INPUTS)
    return Trainer(learner, CPU, rules=RewardRules(repeated))


@pytest.mark.parametrize(("repeated", "reward"), [("first", 0.25), ("last", 0.5), ("sum", 0.75)])
def test_users_and_epochs_are_fitted_to_the_view(repeated: str, reward: float) -> None:
    trainer = trainer_of(repeated, "paper")
    key = sample_key("d", "a")
    other = replace(make_sample(3), key=3)
    parts = [replace(make_sample(1, reward=part), key=key) for part in (0.25, 0.5)]
    kept = [parts[0], other, parts[1]]
    as_one = [replace(parts[0], reward=reward), other]
    shared = trainer.learner.initial_shared()
    fits = [trainer.fit(shared, [Pupil("u", 3, samples, None)]).states[0] for samples in (kept, as_one)]
    assert all(np.array_equal(fits[0][name], fits[1][name]) for name in fits[0])
    derived = [derive_shared(trainer, shared, [Pupil("u", 0, samples, None)], 0, 3) for samples in (kept, as_one)]
    assert all(np.array_equal(derived[0][name], derived[1][name]) for name in derived[0])


class TestWorker:
    """Through the store: all events stay events, and the learner sees the view."""

    async def learned(self, shop: Workshop, rewards: list[float]) -> dict[str, np.ndarray]:
        """The state after rewards for one arm of one decision, each under an id of its own."""
        for number, reward in enumerate(rewards):
            event = make_event("u", 1, event_id=f"e{number}", decision_id="d", reward=reward)
            await shop.publisher().publish(0, await shop.give([event]))
        return (await shop.users.load(["u"]))["u"].tensors

    @pytest.mark.parametrize(("repeated", "reward"), [("first", 0.25), ("last", 0.125), ("sum", 0.875)])
    async def test_repeated_rewards(self, open_workshop: OpenWorkshop, repeated: Any, reward: float) -> None:
        shop = await open_workshop()
        await shop.namespaces.set_reward_rules(shop.record, RewardRules(repeated))
        await shop.model.refresh_record()
        state = await self.learned(shop, [0.25, 0.5, 0.125])
        assert await shop.versions() == {"u": 3}
        assert [sample.reward for sample in (await shop.users.load_samples(["u"]))["u"]] == [0.25, 0.5, 0.125]
        trainer = shop.model.trainer
        assert trainer is not None
        [expected] = trainer.fit(
            shop.model.epoch.tensors, [Pupil("u", 3, [make_sample(1, reward=reward)], None)]
        ).states
        assert all(np.array_equal(state[name], expected[name]) for name in expected)
        counters = await shop.users.counters()
        assert counters["enqueued"] == counters["applied"] == 3

    async def test_other_decisions_and_arms_stand_alone(self, shop: Workshop) -> None:
        events = [
            make_event("u", 1, event_id="1", decision_id="d", arm_id="a"),
            make_event("u", 2, event_id="2", decision_id="d", arm_id="b"),
            make_event("u", 3, event_id="3", decision_id="e", arm_id="a"),
        ]
        await shop.publisher().publish(0, await shop.give(events))
        kept = (await shop.users.load_samples(["u"]))["u"]
        assert list(learnable(kept, RewardRules())) == kept
        assert [sample.features.tolist() for sample in kept] == [features(number).tolist() for number in (1, 2, 3)]
