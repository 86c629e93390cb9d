from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.hostile.target import Target, open_target


class Targets:
    """One server for all attacks of a file, so that leftovers of one affect the next. It is replaced if it exits.

    It ends with the file, because its streams use a third of a processor.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._target: Target | None = None

    def find_alive(self) -> Target:
        if self._target is None or not self._target.is_alive:
            self._target = self._stack.enter_context(open_target())
        return self._target


@pytest.fixture(scope="module")
def targets() -> Iterator[Targets]:
    with ExitStack() as stack:
        yield Targets(stack)


@pytest.fixture
def target(targets: Targets) -> Target:
    return targets.find_alive()
