"""Samples and the rules for repeated rewards, compared with slow and obvious versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaban.models.presets import build_learner
from metaban.store.codec import EarlierRewards, Sample, sample_key
from metaban.store.reward_rules import REWARD_LIMIT, RewardRange, RewardRules
from metaban.worker.epochs.derive_shared import derive_shared
from metaban.worker.learning.samples import add_rewards, combine_rewards
from metaban.worker.learning.trainer import FitInput, Trainer
from tests.worker.epochs.epoch_checks import before_first
from tests.worker.workshop import (
    CPU,
    INPUTS,
    NOTED,
    OpenWorkshop,
    Workshop,
    features,
    make_event,
    make_sample,
    small_default,
    small_paper,
)

REWARDS = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0])  # their sums are exact in any order
RULES = st.builds(
    RewardRules,
    repeated=st.sampled_from(["first", "last", "sum"]),
    reward_min=st.sampled_from([-1.0, 0.0, 1.0]),
    reward_max=st.just(3.0),
)
RANGES = st.sampled_from([None, RewardRange(0, 1), RewardRange(-4, 4), RewardRange(1, 5)])


@st.composite
def logs(draw: st.DrawFn) -> list[Sample]:
    """Samples with few keys, so that keys repeat."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 4), REWARDS, st.booleans(), RANGES), max_size=12))
    return [
        Sample(
            np.full(2, key),
            reward,
            0.5,
            key,
            time,
            str(key),
            key=key,
            by_default=by_default,
            reward_range=sent_in,
            place=0 if sent_in is None else key,  # old samples have none
        )
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


@given(logs(), RULES, st.data())
def test_it_equals_the_slow_version(samples: list[Sample], rules: RewardRules, data: st.DataObject) -> None:
    """Whether each reward was stored as a sample of its own, or added to that of its key, in batches of any size."""
    log, separate = data.draw(st.integers(0, len(samples))), data.draw(st.booleans())
    kept = list(samples[:log]) if separate else add_rewards([], samples[:log], rules.range)[0]
    while log < len(samples):
        end = data.draw(st.integers(log + 1, len(samples)))
        after, changed = add_rewards(kept, samples[log:end], rules.range)
        written = [changed.get(place, sample) for place, sample in enumerate(kept)] + after[len(kept) :]
        assert written == after
        kept, log = [Sample.decode(sample.encode()) for sample in after], end
    view = combine_rewards(kept, rules)
    assert [sample.key for sample in view] == [key for key, _ in slowly(samples, rules)]
    assert [sample.reward for sample in view] == pytest.approx([reward for _, reward in slowly(samples, rules)])
    for sample in view:
        assert sample.features.tolist() == [sample.key] * 2
        of_key = [each for each in samples if each.key == sample.key]
        counted = [each for each in of_key if not each.by_default] or of_key[:1]
        assert sample.place == max(each.place for each in counted)
        assert sample.by_default == all(each.by_default for each in samples if each.key == sample.key) or not sample.key
    assert list(combine_rewards(view, rules)) == list(view)


def together(*sent: tuple[float, RewardRange]) -> float:
    """The learned sum of rewards of one arm of one decision."""
    samples = [
        replace(make_sample(1, reward=sent_in.scaled(reward)), key=1, reward_range=sent_in) for reward, sent_in in sent
    ]
    [view] = combine_rewards(samples, RewardRules("sum"))
    return view.reward


@st.composite
def ranges(draw: st.DrawFn) -> RewardRange:
    least = draw(st.floats(-1e6, 1e6))
    return RewardRange(least, least + draw(st.floats(0.01, 1e6)))


@given(st.lists(st.tuples(st.floats(0, 1), ranges()), min_size=1, max_size=6), st.booleans())
def test_a_sum_is_that_of_the_sent_rewards(rewards: list[tuple[float, RewardRange]], one_range: bool) -> None:
    if one_range:
        rewards = [(share, rewards[-1][1]) for share, _ in rewards]
    sent = [
        Fraction(each.least) + Fraction(share) * (Fraction(each.greatest) - Fraction(each.least))
        for share, each in rewards
    ]
    least, greatest = Fraction(rewards[-1][1].least), Fraction(rewards[-1][1].greatest)
    summed = min(greatest, max(least, sum(sent, Fraction(0))))
    learned = together(*((each.as_sent(share), each) for share, each in rewards))
    assert learned == pytest.approx(float((summed - least) / (greatest - least)), abs=1e-6)


def test_sums_in_other_ranges() -> None:
    votes, stars = RewardRange(-1, 1), RewardRange(1, 5)
    assert together((0, votes), (0, votes)) == votes.scaled(0)
    assert together((1, votes), (-1, votes)) == votes.scaled(0)
    assert together((-1, votes), (-1, votes)) == 0
    assert together((1, stars), (2, stars)) == stars.scaled(3)
    assert together((1, votes), (3, stars)) == stars.scaled(4)
    assert together((3, stars), (-1, votes)) == 1, "clipped to the range of the last reward"


def test_sums_of_the_widest_and_the_narrowest_range_are_finite() -> None:
    wide, narrow = RewardRange(-REWARD_LIMIT, REWARD_LIMIT), RewardRange(0, 5e-324)
    assert together((REWARD_LIMIT, wide), (0, narrow)) == 1
    assert together((5e-324, narrow), (-REWARD_LIMIT, wide)) == 0


@given(st.lists(REWARDS, min_size=1, max_size=5), st.data())
def test_a_default_reward_does_not_count_beside_a_sent_one(rewards: list[float], data: st.DataObject) -> None:
    told = [replace(make_sample(1, reward=reward), key=7) for reward in rewards]
    both = list(told)
    for _ in range(data.draw(st.integers(1, 3))):
        both.insert(data.draw(st.integers(0, len(both))), replace(make_sample(1, reward=1), key=7, by_default=True))
    for repeated in ("first", "last", "sum"):
        rules = RewardRules(repeated)
        [alone], [among] = combine_rewards(told, rules), combine_rewards(both, rules)
        assert (among.reward, among.by_default) == (alone.reward, False)


@given(logs(), RULES, RULES)
def test_another_range_does_not_change_earlier_rewards(
    samples: list[Sample], before: RewardRules, after: RewardRules
) -> None:
    after = replace(after, repeated=before.repeated)
    known = [replace(sample, reward_range=sample.reward_range or before.range) for sample in samples]
    assert [sample.reward for sample in combine_rewards(known, after)] == [
        sample.reward for sample in combine_rewards(known, before)
    ]


def test_without_repeated_keys_nothing_is_copied() -> None:
    samples = [replace(make_sample(number), key=number) for number in range(1, 20)]
    assert combine_rewards(samples, RewardRules()) is samples
    keyless = [make_sample(number) for number in range(20)]
    assert combine_rewards(keyless, RewardRules()) is keyless


def test_the_position_is_that_of_the_first_reward() -> None:
    keys = [5, 6, 5, 7, 6, 5]
    samples = [replace(make_sample(place), key=key) for place, key in enumerate(keys)]
    assert [sample.key for sample in combine_rewards(samples, RewardRules("last"))] == [5, 6, 7]


def trainer_of(repeated: Any = "sum", preset: str = "default") -> Trainer:
    learner = build_learner(small_paper() if preset == "paper" else small_default(width=8), INPUTS)
    return Trainer(learner, CPU, rules=RewardRules(repeated))


@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize(("repeated", "reward"), [("first", 0.25), ("last", 0.5), ("sum", 0.75)])
def test_users_and_epochs_are_fitted_to_combined_rewards(repeated: str, reward: float, preset: str) -> None:
    trainer = trainer_of(repeated, preset)
    key, noted = sample_key("d", "a"), trainer.learner.noted
    other = replace(make_sample(3, noted=noted), key=3)
    parts = [replace(make_sample(1, reward=part, noted=noted), key=key) for part in (0.25, 0.5)]
    kept = [parts[0], other, parts[1]]
    as_one = [replace(parts[0], reward=reward), other]
    shared = trainer.learner.initial_shared()
    fits = [trainer.fit(shared, [FitInput("u", 3, samples, None)]).states[0] for samples in (kept, as_one)]
    assert all(np.array_equal(fits[0][name], fits[1][name]) for name in fits[0])
    derived = [derive_shared(trainer, shared, [FitInput("u", 0, samples, None)], 0, 3) for samples in (kept, as_one)]
    assert all(np.array_equal(derived[0][name], derived[1][name]) for name in derived[0])


class TestWorker:
    """Through the store: all events are counted, and the learner gets combined rewards."""

    async def learned(self, shop: Workshop, rewards: list[float]) -> dict[str, np.ndarray]:
        """State after rewards for one arm of one decision, each with its own event id."""
        for number, reward in enumerate(rewards):
            event = make_event("u", 1, event_id=f"e{number}", decision_id="d", reward=reward)
            await shop.publisher().publish(0, await shop.give([event]))
        return (await shop.users.load(["u"]))["u"].tensors

    @pytest.mark.parametrize(("repeated", "reward"), [("first", 0.25), ("last", 0.125), ("sum", 0.875)])
    async def test_repeated_rewards(self, open_workshop: OpenWorkshop, repeated: Any, reward: float) -> None:
        shop = await open_workshop()
        await shop.namespaces.change(shop.record, rewards=RewardRules(repeated).to_json())
        await shop.model.refresh_record()
        state = await self.learned(shop, [0.25, 0.5, 0.125])
        assert await shop.versions() == {"u": 3}
        [kept] = (await shop.users.load_samples(["u"]))["u"]
        assert (kept.reward, kept.earlier) == (0.125, EarlierRewards(first=0.25, total=0.75))
        trainer = shop.model.trainer
        assert trainer is not None
        [expected] = trainer.fit(
            shop.model.epoch.tensors, [FitInput("u", 3, [make_sample(1, reward=reward, noted=NOTED)], None)]
        ).states
        assert all(np.array_equal(state[name], expected[name]) for name in expected)
        counters = await shop.users.counters()
        assert counters["enqueued"] == counters["applied"] == 3

    async def test_other_decisions_and_arms_are_not_combined(self, shop: Workshop) -> None:
        events = [
            make_event("u", 1, event_id="1", decision_id="d", arm_id="a"),
            make_event("u", 2, event_id="2", decision_id="d", arm_id="b"),
            make_event("u", 3, event_id="3", decision_id="e", arm_id="a"),
        ]
        await shop.publisher().publish(0, await shop.give(events))
        kept = (await shop.users.load_samples(["u"]))["u"]
        assert list(combine_rewards(kept, RewardRules())) == kept
        assert [sample.features.tolist() for sample in kept] == [features(number).tolist() for number in (1, 2, 3)]

    @pytest.mark.parametrize("repeated", ["first", "last", "sum"])
    async def test_many_rewards_of_one_decision_displace_no_other(
        self, open_workshop: OpenWorkshop, repeated: Any
    ) -> None:
        shop = await open_workshop(samples_kept=20)
        assert await shop.namespaces.change(shop.record, rewards=RewardRules(repeated).to_json())
        await shop.model.refresh_record()
        others = [make_event("u", number) for number in range(2, 20)]
        rewards = [reward / 65_536 for reward in range(1, 301)]  # their sums are exact
        many = [
            make_event("u", 1, event_id=f"e{number}", decision_id="d", reward=reward)
            for number, reward in enumerate(rewards)
        ]
        await shop.publisher().publish(0, await shop.give([*others[:9], *many[:200], *others[9:]]))
        await shop.publisher().publish(0, await shop.give(many[200:]))
        kept = (await shop.users.load_samples(["u"]))["u"]
        assert [sample.arm_id for sample in kept] == [str(number) for number in (*range(2, 11), 1, *range(11, 20))]
        reward = {"first": rewards[0], "last": rewards[-1], "sum": sum(rewards)}[repeated]
        directly = [make_sample(number, noted=NOTED) for number in (*range(2, 11), 1, *range(11, 20))]
        directly[9] = replace(directly[9], reward=reward)
        trainer = shop.model.trainer
        assert trainer is not None
        [expected] = trainer.fit(shop.model.epoch.tensors, [FitInput("u", 318, directly, None)]).states
        state = (await shop.users.load(["u"]))["u"].tensors
        assert all(np.array_equal(state[name], expected[name]) for name in expected)
        assert await shop.versions() == {"u": 318}

    async def test_a_changed_rule_counts_for_kept_samples(self, open_workshop: OpenWorkshop) -> None:
        shop = await open_workshop()
        await self.learned(shop, [0.25, 0.5, 0.125])
        samples = (await shop.users.load_samples(["u"]))["u"]
        for repeated, reward in (("first", 0.25), ("last", 0.125), ("sum", 0.875)):
            assert [sample.reward for sample in combine_rewards(samples, RewardRules(repeated))] == [reward]

    async def test_separate_samples_of_an_earlier_version(self, shop: Workshop) -> None:
        """They stay where they are and count as one with a reward that comes later."""
        stored = [make_event("u", 1, decision_id="d", reward=reward).sample() for reward in (0.25, 0.5)]
        await shop.redis.rpush(shop.keys.samples("u"), *(sample.encode() for sample in stored))
        await self.learned(shop, [0.125])
        kept = (await shop.users.load_samples(["u"]))["u"]
        assert [sample.earlier for sample in kept] == [None, EarlierRewards(first=0.5, total=0.5)]
        for repeated, reward in (("first", 0.25), ("last", 0.125), ("sum", 0.875)):
            assert [sample.reward for sample in combine_rewards(kept, RewardRules(repeated))] == [reward]

    async def test_samples_lost_during_the_fit(self, shop: Workshop) -> None:
        """A changed sample that is not there any more is not written: the batch is computed again."""
        await self.learned(shop, [0.25])
        users = shop.user_store()
        before_first(users, "apply", lambda: shop.redis.delete(shop.keys.samples("u")))
        event = make_event("u", 1, event_id="later", decision_id="d", reward=0.5)
        assert await shop.publisher(users=users).publish(0, await shop.give([event])) == 2
        [kept] = (await shop.users.load_samples(["u"]))["u"]
        assert (kept.reward, kept.earlier) == (0.5, None)
        assert await shop.versions() == {"u": 2}
