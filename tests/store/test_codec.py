"""The codec restores what it encoded, and refuses everything else."""

from __future__ import annotations

import pickle
import struct
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from metaban.store import codec
from metaban.store.codec import (
    DTYPES,
    ITEMS_MAX,
    EarlierRewards,
    Sample,
    check_samples,
    decode_tensors,
    encode_tensors,
    sample_key,
)
from metaban.store.decisions.decisions import DecidedItem, DecisionRecord
from metaban.store.errors import CorruptRecord
from metaban.store.reward_rules import RewardRange
from metaban.store.shared.epochs import Epoch


def keyless(sample: Sample) -> bytes:
    """A sample as stored before samples had a key."""
    arm = sample.arm_id.encode()
    sizes = (len(arm), sample.features.size, sample.phi.size)
    head = struct.pack("<BHIIddqq", 1, *sizes, sample.reward, sample.propensity, sample.epoch, sample.received_ms)
    return head + arm + sample.features.tobytes() + sample.phi.tobytes()


def placeless(sample: Sample) -> bytes:
    """A sample as stored before samples had a place: formats 3 (one reward) and 4 (several)."""
    arm, earlier, sent_in = sample.arm_id.encode(), sample.earlier, sample.reward_range
    assert sent_in is not None
    numbers = [len(arm), sample.features.size, sample.phi.size, sample.reward, sample.propensity, sample.epoch]
    numbers += [sample.received_ms, sample.key, sample.by_default, sent_in.least, sent_in.greatest]
    if earlier is None:
        head = struct.pack("<BHIIddqqQ?dd", 3, *numbers)
    else:
        head = struct.pack("<BHIIddqqQ?dddd", 4, *numbers, earlier.first, earlier.total)
    return head + arm + sample.features.tobytes() + sample.phi.tobytes()


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
ARRAYS = st.sampled_from(list(DTYPES.values())).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
SAMPLES = st.builds(
    Sample,
    features=hnp.arrays(np.float32, st.integers(0, 8), elements=st.floats(width=32, allow_nan=False)),
    reward=st.floats(allow_nan=False, allow_infinity=False),
    propensity=st.floats(0, 1),
    epoch=st.integers(-(2**63), 2**63 - 1),
    received_ms=st.integers(0, 2**63 - 1),
    arm_id=TEXT,
    key=st.integers(0, 2**64 - 1),
    by_default=st.booleans(),
    reward_range=st.builds(RewardRange, st.floats(-1e30, 0), st.floats(0, 1e30, exclude_min=True)),
    place=st.integers(0, ITEMS_MAX - 1),
)
#: Samples without a reward range have no place either.
RANGELESS = SAMPLES.map(lambda sample: replace(sample, reward_range=None, place=0))
ONE = Sample(np.ones(3, np.float32), 1.0, 0.5, 2, 3, "arm", reward_range=RewardRange(-5, 5), place=7)
REPEATED = replace(ONE, earlier=EarlierRewards(0.5, 2))
PLAIN = replace(ONE, reward_range=None, place=0)
ITEM = DecidedItem("arm", 1, 0.5, 0.4, 0.1, 0.98, 3)
RECORDS = [
    (encode_tensors({"a": np.eye(3), "b": np.zeros(0, np.float32)}, {"k": "v"}), decode_tensors),
    (ONE.encode(), Sample.decode),
    (REPEATED.encode(), Sample.decode),
    (placeless(ONE), Sample.decode),
    (placeless(REPEATED), Sample.decode),
    (PLAIN.encode(), Sample.decode),
    (keyless(PLAIN), Sample.decode),
    (Epoch(1, 2, {"mu": np.ones(4)}, ("ann",), 5).encode(), Epoch.decode),
    (
        DecisionRecord(
            "d", "u", "ff", (ITEM,), np.ones((1, 3), np.float32), np.ones((1, 0), np.float32), "ucb", 1, 2, "new", 4
        ).encode(),
        DecisionRecord.decode,
    ),
]
RECORD_NAMES = [
    "tensors",
    "sample",
    "sample with several rewards",
    "sample without place",
    "sample with several rewards without place",
    "sample without range",
    "sample without key",
    "epoch",
    "decision",
]


def assert_same(back: Sample, sample: Sample) -> None:
    """Compare all fields: samples have no equality."""
    for each in fields(Sample):
        one, two = getattr(back, each.name), getattr(sample, each.name)
        assert np.array_equal(one, two) if isinstance(two, np.ndarray) else one == two, each.name


@given(
    tensors=st.dictionaries(TEXT.filter(lambda name: name != "__metadata__"), ARRAYS, max_size=4),
    metadata=st.dictionaries(TEXT.filter(lambda name: name != "format"), TEXT, max_size=3),
)
def test_tensors_round_trip(tensors, metadata):
    back, entries = decode_tensors(encode_tensors(tensors, metadata))
    assert entries == metadata
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert back[name].tobytes() == tensor.tobytes()
        assert back[name].flags.writeable


def test_strided_and_foreign_order_arrays():
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    views = {"t": matrix.T, "step": matrix[:, ::2], "big": matrix.astype(">f4"), "f": np.asfortranarray(matrix)}
    back, _ = decode_tensors(encode_tensors(views, {}))
    for name, view in views.items():
        assert np.array_equal(back[name], view), name


def test_unsupported_arrays_are_refused():
    for tensors, metadata in [
        ({"o": np.array([object()])}, {}),
        ({"s": np.array(["text"])}, {}),
        ({"c": np.zeros(2, np.complex128)}, {}),
        ({"__metadata__": np.zeros(1)}, {}),
        ({}, {"format": "mine"}),
    ]:
        with pytest.raises(ValueError, match=r"dtype|metadata"):
            encode_tensors(tensors, metadata)
    with pytest.raises(ValueError, match="vector"):
        Sample(np.zeros((2, 2), np.float32), 0.0, 1.0, 0, 0, "arm").encode()


@given(SAMPLES | RANGELESS)
def test_sample_round_trip(sample):
    assert_same(Sample.decode(sample.encode()), sample)


@given(SAMPLES, st.floats(0, 1), st.floats(-1e33, 1e33))
def test_samples_with_several_rewards_round_trip(sample, first, total):
    several = replace(sample, earlier=EarlierRewards(first, total))
    assert_same(Sample.decode(several.encode()), several)


@pytest.mark.parametrize("more", [{"earlier": EarlierRewards(0.5, 1)}, {"place": 1}], ids=["earlier rewards", "place"])
def test_newer_parts_need_a_range(more):
    with pytest.raises(ValueError, match="range"):
        replace(PLAIN, **more).encode()


@pytest.mark.parametrize("place", [-1, ITEMS_MAX, 70_000])
def test_a_sample_with_an_impossible_place_is_refused(place):
    with pytest.raises(ValueError, match="place"):
        replace(ONE, place=place).encode()
    for sample in (ONE, REPEATED) if place >= 0 else ():
        blob = bytearray(sample.encode())
        end = len(blob) - sample.features.nbytes - len(sample.arm_id)
        blob[end - 2 : end] = min(place, 2**16 - 1).to_bytes(2, "little")
        for read in (Sample.decode, lambda blob: check_samples([blob])):
            with pytest.raises(CorruptRecord, match="place"):
                read(bytes(blob))


@given(SAMPLES, st.none() | st.builds(EarlierRewards, st.floats(0, 1), st.floats(-1e33, 1e33)))
def test_samples_without_a_place_are_still_read(sample, earlier):
    stored = replace(sample, earlier=earlier)
    assert_same(Sample.decode(placeless(stored)), replace(stored, place=0))


@pytest.mark.parametrize("wrong", [(float("nan"), 1), (1, float("inf"))])
def test_a_sample_with_invalid_earlier_rewards_is_refused(wrong):
    blob = struct.pack("<BHIIddqqQ?dddd", 4, 0, 0, 0, 0.25, 0.5, 3, 4, 5, False, 0, 1, *wrong)
    for read in (Sample.decode, lambda blob: check_samples([blob])):
        with pytest.raises(CorruptRecord, match="earlier rewards"):
            read(blob)


@given(SAMPLES)
def test_samples_without_a_key_are_still_read(sample):
    back = Sample.decode(keyless(sample))
    assert np.array_equal(back.features, sample.features)
    assert np.array_equal(back.phi, sample.phi)
    for name in ("reward", "propensity", "epoch", "received_ms", "arm_id"):
        assert getattr(back, name) == getattr(sample, name)
    assert (back.key, back.by_default, back.reward_range) == (0, False, None)


def test_samples_without_a_range_are_still_read():
    head = struct.pack("<BHIIddqqQ?", 2, 1, 2, 0, 0.25, 0.5, 3, 4, 5, True)
    back = Sample.decode(head + b"a" + np.ones(2, np.float32).tobytes())
    assert (back.reward, back.arm_id, back.key, back.by_default, back.reward_range) == (0.25, "a", 5, True, None)


@pytest.mark.parametrize("wrong", [(1, 1), (float("nan"), 1), (0, float("inf")), (-1e300, 1e300)])
def test_a_sample_with_an_invalid_range_is_refused(wrong):
    blob = struct.pack("<BHIIddqqQ?dd", 3, 0, 0, 0, 0.25, 0.5, 3, 4, 5, False, *wrong)
    for read in (Sample.decode, lambda blob: check_samples([blob])):
        with pytest.raises(CorruptRecord, match="range"):
            read(blob)


@given(st.lists((SAMPLES | RANGELESS).filter(lambda sample: np.isfinite(sample.features).all()), max_size=5), st.data())
def test_snapshots_take_samples_of_all_formats(samples, data):
    writers = (keyless, placeless, Sample.encode)
    blobs = [
        data.draw(st.sampled_from([w for w in writers if w is not placeless or s.reward_range]))(s) for s in samples
    ]
    assert check_samples(blobs) == {(sample.features.size, sample.phi.size) for sample in samples}


def test_keys_of_samples():
    pairs = [("a", "b"), ("a:b", "c"), ("a", "b:c"), ("b", "a"), ("", "a:b"), ("é", "b")]
    keys = [sample_key(*pair) for pair in pairs]
    assert len(set(keys)) == len(pairs)
    assert all(0 < key < 2**64 for key in keys)
    # never change this value: rewards of one arm and decision would be split
    assert sample_key("a", "b") == 3_915_760_938_321_433_618


@pytest.mark.parametrize(("blob", "decode"), RECORDS, ids=RECORD_NAMES)
def test_every_truncation_is_refused(blob, decode):
    for length in range(len(blob)):
        with pytest.raises(CorruptRecord):
            decode(blob[:length])
    with pytest.raises(CorruptRecord):
        decode(blob + b"\0")


@pytest.mark.parametrize(("blob", "decode"), RECORDS, ids=RECORD_NAMES)
def test_every_flipped_bit_is_refused_or_decoded(blob, decode):
    for bit in range(8 * len(blob)):
        broken = bytearray(blob)
        broken[bit // 8] ^= 1 << bit % 8
        try:
            decode(bytes(broken))
        except CorruptRecord:
            continue


@given(blob=st.binary(max_size=200), size=st.integers(0, 64), which=st.sampled_from(range(len(RECORDS))))
def test_junk_is_refused(blob, size, which):
    for junk in (blob, size.to_bytes(8, "little") + blob):
        with pytest.raises(CorruptRecord):
            RECORDS[which][1](junk)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"__metadata__":{"format":"metaban/1"},"a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],'
        b'"data_offsets":[0,0]}}',
        b'{"__metadata__":{"format":"metaban/1"},"a":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}}',
        b'{"__metadata__":{"format":"metaban/2"}}',
        b'{"__metadata__":{"format":3}}',
        b"{}",
        b"3",
    ],
)
def test_hostile_headers(header):
    with pytest.raises(CorruptRecord):
        decode_tensors(len(header).to_bytes(8, "little") + header)


def test_pickles_are_not_read():
    for _, decode in RECORDS:
        with pytest.raises(CorruptRecord):
            decode(pickle.dumps({"a": 1}))
    modules = list(Path(codec.__file__).parent.rglob("*.py"))
    assert "aof_rewrite.py" in {path.name for path in modules}, "the folders of the package are searched too"
    sources = [path.read_text() for path in modules]
    assert not any("import pickle" in source or "allow_pickle" in source for source in sources)
