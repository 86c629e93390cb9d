"""What a scheduler uses but does not own."""

from __future__ import annotations


class Outside:
    """Base of objects whose state is not the scheduler's: it is neither frozen nor written down."""
