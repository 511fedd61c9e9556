"""What the samples of a user mean together, by the namespace's rules: one sample for each arm of each decision.

The log keeps every reward; this is a view on it, taken wherever samples become a batch for a learner. It sees what is
kept: of rewards whose oldest sample has left the log the others count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from store.codec import NO_KEY, Sample
from store.reward_range import scaled_sum
from store.reward_rules import RewardRules


def learnable(samples: Sequence[Sample], rules: RewardRules) -> Sequence[Sample]:
    """The samples to learn from, oldest first: those of one key as one, in the place of the first of them."""
    keys = [sample.key for sample in samples if sample.key != NO_KEY]
    if len(set(keys)) == len(keys):  # nearly always
        return samples
    together: dict[int, list[Sample]] = {}
    for place, sample in enumerate(samples):
        # Keys are not negative: what has none stands alone.
        together.setdefault(-1 - place if sample.key == NO_KEY else sample.key, []).append(sample)
    return [group[0] if len(group) == 1 else _as_one(group, rules) for group in together.values()]


def _as_one(group: Sequence[Sample], rules: RewardRules) -> Sample:
    told = [sample for sample in group if not sample.by_default]
    if not told:
        return group[0]
    if rules.repeated == "first" or len(told) == 1:
        return told[0]
    if rules.repeated == "last":
        reward = told[-1].reward
    else:
        # The range of today stands in only for one that was not noted: others learned by theirs, and keep it.
        reward = scaled_sum([(sample.reward, sample.reward_range or rules.range) for sample in told])
    return replace(told[0], reward=reward, reward_range=told[-1].reward_range)
