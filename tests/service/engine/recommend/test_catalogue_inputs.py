"""Inputs made by the catalogue in memory, and how it follows the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from metaban.models.features import FeatureError, FeatureLayout, assemble, infer_layout
from metaban.service.engine.recommend.catalogue import ArmTable, Catalogue, EncodedArms
from metaban.service.engine.store_guard import StoreAccess, StoreGuard
from metaban.store.catalogue import ArmWrite, CatalogueRevision, CatalogueStore, Changes
from metaban.store.namespaces import NamespaceStore


def outcome(work: Callable[[], np.ndarray]) -> Any:
    """The result, or the refusal."""
    try:
        return work()
    except FeatureError as error:
        return error.field, error.message


def laid(arms: dict[str, Any], layout: FeatureLayout, earlier: EncodedArms | None = None) -> EncodedArms:
    return EncodedArms.of(ArmTable.of(arms), layout, earlier)


numbers = st.floats(-1e30, 1e30)
names = st.text(min_size=1, max_size=4)
named = st.dictionaries(names, st.one_of(numbers, st.booleans(), st.text(max_size=4)), min_size=1, max_size=5)


@hypothesis_settings(max_examples=150, deadline=None)
@given(st.data())
def test_inputs_equal_those_of_assemble(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 4))
    vectors = named if data.draw(st.booleans()) else st.lists(numbers, min_size=length, max_size=length)
    context = data.draw(st.one_of(st.none(), named, st.lists(numbers, min_size=2, max_size=2)))
    stored = data.draw(st.dictionaries(names, vectors, min_size=1, max_size=6))
    layout = infer_layout(
        list(stored.values()), context, products=data.draw(st.booleans()), intercept=data.draw(st.booleans()),
        hash_dimension=8, max_dimension=4096,
    )  # fmt: skip
    # Loaded from the store, and with some inputs made before.
    blobs = {arm: ArmWrite.put(arm, features).features for arm, features in stored.items()}
    before = data.draw(st.sets(st.sampled_from(sorted(stored))))
    early = ArmTable.of({}).changed(Changes({arm: blobs[arm] for arm in before}, CatalogueRevision(1, "x"), anew=False))
    table = early.changed(
        Changes({arm: blob for arm, blob in blobs.items() if arm not in before}, CatalogueRevision(2, "y"), anew=False)
    )
    made = EncodedArms.of(table, layout, EncodedArms.of(early, layout, None))
    ids = sorted(stored)
    places = data.draw(st.one_of(st.none(), st.permutations(range(len(ids)))))
    rows = None if places is None else np.array(places, dtype=np.intp)
    asked = [stored[ids[place]] for place in (range(len(ids)) if places is None else places)]
    expected = outcome(lambda: assemble(layout, asked, context))
    for _ in range(2):
        inputs = outcome(lambda: made.inputs(rows, context))
        if isinstance(expected, np.ndarray):
            assert isinstance(inputs, np.ndarray)
            assert inputs.dtype == expected.dtype
            np.testing.assert_array_equal(inputs, expected)
            inputs[:] = np.nan  # the caller may change its copy
        else:
            assert inputs == expected


def test_thousand_arms() -> None:
    """Sizes for every path through numpy."""
    generator = np.random.default_rng(1)
    arms = {f"arm {n:04d}": generator.normal(size=20).tolist() for n in range(1_000)}
    layout = infer_layout(
        list(arms.values()), [1.0, 2.0], products=True, intercept=True, hash_dimension=8, max_dimension=4096
    )
    made = laid(arms, layout)
    for rows in (None, generator.permutation(1_000)[:300]):
        ids = sorted(arms) if rows is None else [sorted(arms)[row] for row in rows]
        expected = assemble(layout, [arms[arm] for arm in ids], [0.5, -2.0])
        np.testing.assert_array_equal(made.inputs(rows, [0.5, -2.0]), expected)


steps = st.one_of(
    st.tuples(st.just("put"), st.sets(st.sampled_from("abcdef"), min_size=1), st.integers(1, 3)),
    st.tuples(st.just("remove"), st.sets(st.sampled_from("abcdef"), min_size=1), st.just(0)),
    st.tuples(st.just("look"), st.integers(0, 1), st.just(0)),
)


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, max_size=30), st.integers(1, 3), st.booleans())
async def test_mirror_equals_a_reference(
    redis: Redis, valkey_url: str, history: Any, tombstones: int, with_names: bool
) -> None:
    """Two processes at different paces, under changes, removals and compactions."""
    await redis.flushall()
    record = await NamespaceStore(redis).open_or_create("shop", partitions=1, seed=0, learner={})
    store = CatalogueStore(redis, record.keys, record.store_id, arms_max=10, tombstones_kept=tombstones, stamps_kept=4)

    async def no_probe() -> None:
        pass

    def features(value: int) -> Any:
        return {"x": float(value), "kind": str(value)} if with_names else [float(value), 1.0]

    layout = infer_layout([features(1)], None, products=False, intercept=True, hash_dimension=8, max_dimension=99)
    breaker = StoreGuard(no_probe)
    mirrors = [Catalogue(store), Catalogue(store)]
    ledger: dict[str, Any] = {}

    async def look(mirror: Catalogue) -> None:
        table = await mirror.follow(StoreAccess(breaker, go_on=False))
        assert table.ids == tuple(sorted(ledger))
        assert table.rows == {arm: place for place, arm in enumerate(table.ids)}
        if ledger:
            made = await mirror.encode(table, layout)
            expected = assemble(layout, [ledger[arm] for arm in table.ids], None)
            np.testing.assert_array_equal(made.inputs(None, None), expected)

    for kind, what, value in history:
        if kind == "look":
            await look(mirrors[what])
            continue
        put = kind == "put"
        writes = [ArmWrite.put(arm, features(value)) if put else ArmWrite.remove(arm) for arm in sorted(what)]
        await store.change(writes, now_ms=1)
        for arm in what:
            if put:
                ledger[arm] = features(value)
            else:
                ledger.pop(arm, None)
    for mirror in mirrors:
        await look(mirror)
