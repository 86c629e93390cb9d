"""The recurrent layer of xLSTM, and its description in configs."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ..config_fields import ConfigFields
from .state_size import StatePart, StateParts


class MatrixLstm(msgspec.Struct, frozen=True, tag=True):
    """An LSTM whose memory is a matrix for each head (mLSTM, Beck et al., 2024, arXiv 2405.04517).

    Keys have `key_dim` elements and values `value_dim`. A head also has a sum of keys and the logarithm of the scale of
    both as its state. The logits of gates are capped to `gate_cap`, and `eps` is added to divisors.
    """

    # The logarithm of the scale depends on one token after the other.
    segment: ClassVar[int] = 1
    kernel: ClassVar[int] = 1
    num_heads: int
    key_dim: int
    value_dim: int
    gate_cap: float
    eps: float
    norm_eps: float

    @property
    def num_units(self) -> int:
        """Number of parts that can be divided equally among ranks."""
        return self.num_heads

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`."""
        numbers = self.key_dim * self.value_dim + self.key_dim + 1
        return StateParts((StatePart(self.num_heads, numbers),), 0, (StatePart(1, 1),))


def read_xlstm(fields: ConfigFields) -> MatrixLstm:
    """Return the recurrent layer of an xLSTM.

    Raises:
        CheckpointError: A field is invalid, or heads do not divide keys and values.
    """
    size, count = fields.integer("hidden_size"), fields.integer("num_heads", 8)

    def head_size(name: str, default: float) -> int:
        elements = int(size * fields.positive(name, default))
        if elements % count:
            raise fields.wrong(name, f"such that {count} heads divide the elements", elements)
        return elements // count

    return MatrixLstm(
        count,
        head_size("qk_dim_factor", 0.5),
        head_size("v_dim_factor", 1.0),
        gate_cap=fields.positive("gate_soft_cap", 15.0),
        eps=fields.number("eps", 1e-6),
        norm_eps=fields.number("norm_eps", 1e-6),
    )
