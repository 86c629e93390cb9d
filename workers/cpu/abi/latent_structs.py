"""The native library's struct of latent attention."""

from __future__ import annotations

import ctypes
from ctypes import c_int32


class LatentShape(ctypes.Structure):
    """The sizes of latent attention in a layer; see `csrc/model/model.h`."""

    _fields_ = (
        ("num_heads", c_int32),
        ("key_dim", c_int32),
        ("query_inputs", c_int32),
        ("kv_rank", c_int32),
        ("plain_dim", c_int32),
        ("rotary_dim", c_int32),
        ("value_dim", c_int32),
        ("norms_rotated_key", c_int32),
        ("index_heads", c_int32),
        ("index_dim", c_int32),
        ("index_inputs", c_int32),
        ("gate_dim", c_int32),
    )

    @property
    def query_offset(self) -> int:
        """The column of the queries, or of the vector from which they are computed, in a token's projection."""
        return int(self.key_dim + self.index_dim + self.index_inputs)

    @property
    def index_offset(self) -> int:
        """The column of the weights of the indexer's heads."""
        queries = max(self.query_inputs, self.num_heads * (self.plain_dim + self.rotary_dim))
        return int(self.query_offset + queries + self.num_heads * self.key_dim)

    @property
    def gate_offset(self) -> int:
        """The column of the gates."""
        return int(self.index_offset + self.index_heads * (1 + self.index_dim))

    @property
    def size(self) -> int:
        """The number of columns."""
        return int(self.gate_offset + self.num_heads * self.gate_dim)
