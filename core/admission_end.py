"""Why a step admitted no further request."""

from __future__ import annotations

import enum


class AdmissionEnd(enum.StrEnum):
    """Why requests wait that have no `Obstacle` of their own."""

    NONE_LEFT = enum.auto()
    """All others were admitted or set aside."""
    PREEMPTION = enum.auto()
    SEQUENCES = enum.auto()
    TOKENS = enum.auto()
    MESSAGE = enum.auto()
    QUARANTINE = enum.auto()
    ENCODERS = enum.auto()
    BLOCKS = enum.auto()
    DELAY = enum.auto()
    PARTIAL_PREFILLS = enum.auto()
