"""The recurrent layer of Jet-Nemotron, and its description in configs."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ..config_fields import ConfigFields
from .state_size import SEGMENT, StatePart, StateParts


class JetBlock(msgspec.Struct, frozen=True, tag=True):
    """A gated delta net whose values are convolved with taps of each token (Gu et al., 2025, arXiv 2508.15884).

    Keys have `key_dim` elements and values `value_dim`. A product of `tap_rank` elements, which is a product of the
    hidden state, gives `kernel` taps for each element of the values.
    """

    segment: ClassVar[int] = SEGMENT
    num_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    tap_rank: int
    norm_eps: float

    @property
    def num_units(self) -> int:
        """Number of parts that can be divided equally among ranks."""
        return self.num_heads

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`.

        The inputs are values before their convolution, queries, keys, convolved values, strengths and time steps.
        """
        keys, values = (
            StatePart(self.num_heads, self.key_dim),
            StatePart(self.num_heads, self.value_dim),
        )
        numbers = StatePart(self.num_heads, 1)
        return StateParts(
            (StatePart(self.num_heads, self.key_dim * self.value_dim),),
            SEGMENT - 1 + self.kernel - 1,
            (values, keys, keys, values, numbers, numbers),
        )


def read_jet_block(fields: ConfigFields) -> JetBlock:
    """Return the recurrent layer of a Jet-Nemotron. Raise CheckpointError if a field is missing or invalid."""
    own = fields.first_section("efficient_attention_config").first_section("jet")
    key_dim = own.integer("head_dim")
    heads, value_dim = own.integer("num_heads"), int(key_dim * own.positive("expand_v", 2.0))
    reduction = own.integer("dconv_generator_reduction", 8)
    # Published configs have this number as a text.
    eps = float(own.get("norm_eps", 1e-5))
    return JetBlock(
        heads,
        key_dim,
        value_dim,
        own.integer("conv_size", 4, minimum=2),
        tap_rank=heads * value_dim // reduction,
        norm_eps=eps,
    )
