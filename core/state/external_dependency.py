"""Mark objects that the scheduler uses but that are not part of its state, such as connectors and grammar backends."""

from __future__ import annotations


class ExternalDependency:
    """Base class of objects that snapshots and recordings of the scheduler leave out."""
