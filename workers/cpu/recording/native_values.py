"""Values of layers in the form that native operations read."""

from __future__ import annotations

import numpy as np

from ...layers.rope import QueryScaling
from ...layers.window import AfterPrompt, Chunk, Window
from ..program import Floats

_SCALING_KINDS = ("steps", "power", "log")
"""Kinds of scaling by position, in the order of their numbers in `QueryScaling` in csrc/model/model.h."""


def window_size(window: Window | None) -> int:
    """Return the window as in `AttentionLayer` of csrc/attention/attention.h."""
    assert not isinstance(window, AfterPrompt), "native programs have no such windows"
    if isinstance(window, Chunk):
        return -(2 * window.size + window.sees_previous)
    return window or 0


def scaling_array(scaling: QueryScaling | None) -> Floats | None:
    """Return the array for `QueryScaling` in csrc/model/model.h."""
    if scaling is None:
        return None
    kind = _SCALING_KINDS.index(scaling.kind)
    return np.array([scaling.beta, scaling.length, scaling.offset, kind], np.float32)
