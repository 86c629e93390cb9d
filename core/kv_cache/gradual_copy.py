"""Copy a long list in parts, while it changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class GradualCopy(Generic[T]):
    """The items that a list had when the copy was begun.

    Until `copy_items` has returned True, `keep_item` must be called with each item that is about to be replaced.
    """

    def __init__(self, items: Sequence[T]) -> None:
        self._items = items
        self.copied: list[T] = []
        self._kept: dict[int, T] = {}

    def keep_item(self, index: int, item: T) -> None:
        """Remember the item at `index`, which is about to be replaced."""
        self._kept.setdefault(index, item)

    def copy_items(self, count: int) -> bool:
        """Copy the next `count` items. Return whether the copy is complete."""
        start = len(self.copied)
        self.copied += self._items[start : start + count]
        return len(self.copied) == len(self._items)

    def read(self) -> list[T]:
        """Return all items as they were."""
        copied = self.copied + list(self._items[len(self.copied) :])
        for index, item in self._kept.items():
            copied[index] = item
        return copied
