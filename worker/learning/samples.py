"""Samples: the rewards of one arm of one decision are one sample, whatever their number.

A sample keeps what every rule for repeated rewards needs: the first reward, the latest and the sum. The rule is applied
when samples become a batch for the learner, so a changed rule also counts for samples that are already kept. A reward
whose sample was already dropped begins a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from metaban.store.codec import NO_KEY, EarlierRewards, Sample
from metaban.store.reward_rules import Repeated, RewardRange, RewardRules


def add_rewards(
    kept: Sequence[Sample], added: Iterable[Sample], assumed: RewardRange
) -> tuple[list[Sample], dict[int, Sample]]:
    """All samples after these were added, new keys at the end; and those of `kept` that changed, by their place.

    `assumed` is the range of rewards stored without one.
    """
    samples = list(kept)
    places = {sample.key: place for place, sample in enumerate(kept)}
    changed: dict[int, Sample] = {}
    for sample in added:
        place = len(samples) if sample.key == NO_KEY else places.setdefault(sample.key, len(samples))
        if place == len(samples):
            samples.append(sample)
            continue
        both = _merged(samples[place], sample, assumed)
        if place < len(kept) and both is not samples[place]:
            changed[place] = both
        samples[place] = both
    return samples, changed


def combine_rewards(samples: Sequence[Sample], rules: RewardRules) -> Sequence[Sample]:
    """Samples to learn from, oldest first, each with the one reward that the rule takes."""
    keys = [sample.key for sample in samples if sample.key != NO_KEY]
    if len(set(keys)) < len(keys):  # stored by a version that kept a sample for each reward
        samples, _ = add_rewards([], samples, rules.range)
    if all(sample.earlier is None for sample in samples):  # nearly always
        return samples
    return [_counted(sample, rules.repeated) for sample in samples]


def _merged(before: Sample, after: Sample, assumed: RewardRange) -> Sample:
    """One sample of the rewards of two; a default reward does not count beside a sent one."""
    if before.by_default or after.by_default:
        return after if before.by_default and not after.by_default else before
    sent_in = before.reward_range or assumed
    total = sent_in.as_sent(before.reward)
    first = before.reward
    if before.earlier is not None:
        first, total = before.earlier.first, before.earlier.total + total
    if after.earlier is not None:
        total += after.earlier.total
    return replace(
        before,
        reward=after.reward,
        received_ms=after.received_ms,
        reward_range=after.reward_range or assumed,
        earlier=EarlierRewards(first, total),
        place=max(before.place, after.place),  # equal, unless an older version stored one without it, as 0
    )


def _counted(sample: Sample, repeated: Repeated) -> Sample:
    """The sample with the reward that the rule takes."""
    earlier, sent_in = sample.earlier, sample.reward_range
    if earlier is None or sent_in is None:
        return sample
    if repeated == "first":
        reward = earlier.first
    elif repeated == "last":
        reward = sample.reward
    else:
        reward = sent_in.scaled(earlier.total + sent_in.as_sent(sample.reward))
    return replace(sample, reward=reward, earlier=None)
