"""The counter-based random generator: known answers, uniformity, independence."""

import numpy as np
import pytest
from engine.workers.sampling.random import Stream, philox, uniforms

# Answers published with Random123 for philox4x32-10.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], np.uint64)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_values(counter: str, key: str, answer: str) -> None:
    assert philox(words(counter), words(key)).tolist() == words(answer).tolist()


def draws(seeds: list[int] | np.ndarray, positions: list[int] | np.ndarray) -> np.ndarray:
    return uniforms(np.array(seeds, np.int64), np.array(positions, np.int64), Stream.TOKEN)


def test_a_draw_depends_only_on_its_seed_and_position() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63)]
    positions = [0, 7, 7, 2**33, 1]
    together = draws(seeds, positions)
    alone = [draws([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone
    assert len(set(together.tolist())) == 5


@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_draws_are_uniform_and_uncorrelated(axis: str) -> None:
    n = 40_000
    counting, constant = np.arange(n), np.full(n, 42)
    u = draws(constant, counting) if axis == "positions" else draws(counting, constant)
    assert u.min() >= 0 and u.max() < 1
    observed, _ = np.histogram(u, 100, (0, 1))
    chi_square = ((observed - n / 100) ** 2 / (n / 100)).sum()
    # 99 degrees of freedom: the 0.1 % and 99.9 % points.
    assert 60 < chi_square < 149
    for lag in (1, 2, 3, 16):
        correlation = np.corrcoef(u[:-lag], u[lag:])[0, 1]
        assert abs(correlation) < 4 / np.sqrt(n)
