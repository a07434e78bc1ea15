from __future__ import annotations

import numpy as np
import pytest

from hullspeed.runtime.philox import philox4x32, uniforms

# Known answers of the Random123 library (kat_vectors, "philox4x32 10").
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    got = philox4x32(np.array([words(counter)], np.uint64), np.array([words(key)], np.uint64))
    assert got.tolist() == [words(answer)]


def test_rows_are_independent() -> None:
    counters = np.array([words(counter) for counter, _, _ in KNOWN], np.uint64)
    keys = np.array([words(key) for _, key, _ in KNOWN], np.uint64)
    assert philox4x32(counters, keys).tolist() == [words(answer) for _, _, answer in KNOWN]


def test_uniforms_are_uniform_and_differ_in_every_argument() -> None:
    seeds = np.repeat(np.array([1, 2**63 + 5], np.uint64), 20_000)
    positions = np.tile(np.arange(20_000, dtype=np.uint64), 2)
    first, second = uniforms(seeds, positions), uniforms(seeds, positions, 1)
    for draws in (first, second):
        assert draws.min() >= 0.0
        assert draws.max() < 1.0
        counts, _ = np.histogram(draws, bins=20, range=(0, 1))
        # Chi-square with 19 degrees of freedom: 43.8 is the 99.9 % point.
        assert ((counts - 2000) ** 2 / 2000).sum() < 43.8
    assert len(np.unique(np.concatenate([first, second]))) == 80_000
