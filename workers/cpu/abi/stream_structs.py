"""The native library's structs of layers whose tokens have several streams."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p


class AltUp(ctypes.Structure):
    """The weights of alternating updates in a layer; see `csrc/model/model.h`."""

    _fields_ = (
        ("active", c_int32),
        ("router_norm", c_void_p),
        ("router", c_void_p),
        ("predict", c_void_p),
        ("correct", c_void_p),
        ("output_scale", c_void_p),
    )


class HyperConnection(ctypes.Structure):
    """The connection of a block to the streams of a token; see `csrc/model/model.h`."""

    _fields_ = (
        ("num_factors", c_int32),
        ("num_iterations", c_int32),
        ("eps", c_float),
        ("output_scale", c_float),
        ("norm_eps", c_float),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scale", c_void_p),
        ("norm", c_void_p),
    )


class NgramTable(ctypes.Structure):
    """The embeddings of n-grams in a layer; see `csrc/model/model.h`."""

    _fields_ = (
        ("longest", c_int32),
        ("num_heads", c_int32),
        ("end_id", c_int32),
        ("first_row", c_int64),
        ("multipliers", c_void_p),
        ("sizes", c_void_p),
        ("first_rows", c_void_p),
    )
