"""A sample of the cases of parametrized tests: `pytest --sample SEED`.

All cases take longer than a developer waits, and most differ little from each other. So `scripts/test` runs a sixth of
the cases of each test at each commit, but at least one, and `scripts/test --nightly` runs all.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import pytest

ONE_IN = 6


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
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    chosen = {id(item) for each in cases.values() for item in _sample(each, seed)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


def _sample(cases: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """Return the first sixth of the cases in an order that depends on the seed.

    The order depends on the parameters and not on the test. So tests with the same parameters, which often share a
    server, choose the same.
    """

    def rank(case: Any) -> str:
        return hashlib.sha256(f"{seed} {case.callspec.id}".encode()).hexdigest()

    return sorted(cases, key=rank)[: -(-len(cases) // ONE_IN)] if len(cases) > 1 else cases
