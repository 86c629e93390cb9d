"""A sample of the cases of tests with many: `pytest --sample SEED`.

All cases take longer than a developer waits, and most differ little from each other. So `scripts/test` runs an eighth
of the cases of each test at each commit, but at least one, and `scripts/test --nightly` runs all. In a file with the
marker `sampled`, whose tests serve a model each, the tests are the cases.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import pytest

ONE_IN = 8

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
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


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


def _sample(cases: Sequence[T], name: Callable[[T], str], seed: str) -> list[T]:
    """Return one in eight cases, in their order."""

    def rank(number: int) -> str:
        return hashlib.sha256(f"{seed} {name(cases[number])}".encode()).hexdigest()

    chosen = sorted(range(len(cases)), key=rank)[: -(-len(cases) // ONE_IN)]
    return [cases[number] for number in sorted(chosen)]
