"""What a scheduler uses but does not own."""

from __future__ import annotations


class Outside:
    """Base of objects that are no part of the scheduler's state: they are neither frozen nor written down."""
