"""What the native program is told of the rows it samples."""

from __future__ import annotations

import ctypes

from ...protocol.arrays import Int32Array
from ..sampling import SamplingMetadata
from .library import SamplingRows


def sampling_rows(
    metadata: SamplingMetadata, positions_S: Int32Array | None = None
) -> ctypes._Pointer[SamplingRows]:
    """The parameters are read where the sampler keeps them; `metadata` and `positions_S` must outlive the call.

    A program that decodes knows the positions.
    """
    state = metadata.state
    return ctypes.pointer(
        SamplingRows(
            state.is_greedy.ctypes.data,
            state.inverse_temperature.ctypes.data,
            state.top_k.ctypes.data,
            state.top_p.ctypes.data,
            state.min_p_margin.ctypes.data,
            state.seed.ctypes.data,
            metadata.slots_S.ctypes.data,
            None if positions_S is None else positions_S.ctypes.data,
        )
    )
