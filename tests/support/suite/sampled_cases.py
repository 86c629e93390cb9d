"""A sample of the cases of tests with many: `pytest --sample SEED`.

All cases take longer than a developer waits, and most differ little from each other. So `scripts/test` runs an eighth
of the cases of each test at each commit, but at least one, and `scripts/test --nightly` runs all. In a file with the
marker `sampled`, whose tests serve a model each, the tests are the cases. Of a file with the marker `rotated`, whose
tests start several servers each, a third of the tests run.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import pytest

ONE_IN = 8
ONE_IN_OF_ROTATED = 3

T = TypeVar("T")
Sampled: TypeAlias = Callable[[Sequence[T], Callable[[T], str]], list[T]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        metavar="SEED",
        help=f"run one in {ONE_IN} cases of each parametrized test, at least one; another seed chooses others",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.option.sample
    if seed is None:
        return
    cases: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        of_file = item.get_closest_marker("sampled") is not None
        cases[str(item.path) if of_file else item.nodeid.partition("[")[0]].append(item)
    chosen = {id(item) for each in cases.values() for item in _sample(each, _case_name, seed)}
    chosen -= {id(item) for item in _resting(items, seed)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


def _resting(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """Return the tests of rotated files that do not run at this commit."""
    tests: defaultdict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if item.get_closest_marker("rotated") is not None:
            tests[str(item.path)][item.nodeid.partition("[")[0]].append(item)
    resting = []
    for by_name in tests.values():
        running = _sample(list(by_name), str, seed, ONE_IN_OF_ROTATED)
        resting += [item for name, each in by_name.items() if name not in running for item in each]
    return resting


def _case_name(item: Any) -> str:
    """Return the name of a case: that of its parameters, because tests with the same ones often share a server."""
    return str(item.callspec.id if hasattr(item, "callspec") else item.nodeid)


@pytest.fixture
def sampled(pytestconfig: pytest.Config) -> Sampled[Any]:
    """A function that returns the cases of a test that are its own loop, or a sample of them, chosen by their names."""

    def sample(cases: Sequence[T], name: Callable[[T], str]) -> list[T]:
        seed = pytestconfig.option.sample
        return list(cases) if seed is None else _sample(cases, name, seed)

    return sample


def _sample(
    cases: Sequence[T], name: Callable[[T], str], seed: str, one_in: int = ONE_IN
) -> list[T]:
    """Return one in `one_in` cases, at least one, in their order."""

    def rank(number: int) -> str:
        return hashlib.sha256(f"{seed} {name(cases[number])}".encode()).hexdigest()

    chosen = sorted(range(len(cases)), key=rank)[: -(-len(cases) // one_in)]
    return [cases[number] for number in sorted(chosen)]
