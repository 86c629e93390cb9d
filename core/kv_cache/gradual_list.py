"""A long list that can be copied in parts, over several steps, while it changes."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

T = TypeVar("T")

COPIED_AT_ONCE: Final = 4096
"""Number of items that are copied per step. Copying a whole list would delay the step."""


class GradualCopy(Generic[T]):
    """The items that a list had when the copy was begun."""

    def __init__(self, items: list[T]) -> None:
        self._items = items
        self.copied: list[T] = []
        self.kept: dict[int, T] = {}
        """The items that were replaced before the copy was complete."""

    def copy_items(self, count: int) -> bool:
        """Copy the next `count` items. Return whether the copy is complete."""
        start = len(self.copied)
        self.copied += self._items[start : start + count]
        return len(self.copied) == len(self._items)

    def read(self) -> list[T]:
        """Return all items as they were."""
        copied = self.copied + self._items[len(self.copied) :]
        for index, item in self.kept.items():
            copied[index] = item
        return copied


class GradualList(Generic[T]):
    """A list of fixed length. While `copy` is not None, `keep_item` must be called before an item is replaced."""

    def __init__(self, items: list[T]) -> None:
        self.items = items
        self.copy: GradualCopy[T] | None = None

    def keep_item(self, index: int) -> None:
        """Keep an item that is about to be replaced for the copy that is being made."""
        if self.copy is not None:
            self.copy.kept.setdefault(index, self.items[index])

    def replace_item(self, index: int, item: T) -> None:
        """Replace an item."""
        self.keep_item(index)
        self.items[index] = item

    def replace_all(self, items: list[T]) -> None:
        """Replace all items. A copy that is being made reads the old list."""
        self.items = items
        self.copy = None

    def begin_copy(self) -> GradualCopy[T]:
        """Return a copy of the current items, which `continue_copy` completes."""
        if self.copy is not None:
            self.copy.copy_items(len(self.items))
        self.copy = GradualCopy(self.items)
        return self.copy

    def continue_copy(self) -> None:
        """Copy some items more of a copy that is being made."""
        if self.copy is not None and self.copy.copy_items(COPIED_AT_ONCE):
            self.copy = None

    def rebuild(self) -> None:
        """Set the field that is not part of snapshots."""
        self.copy = None
