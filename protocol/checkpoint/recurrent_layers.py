"""Layers with a recurrent state: their sizes, read from a checkpoint's config without torch.

Such a layer reads a state of fixed size instead of keys and values. The state has a recurrent part in float32, and the
layer's inputs of the last few tokens in the dtype of the model.

A layer is computed in segments of tokens at fixed positions, `SEGMENT` tokens if it has a recurrence. The recurrent
part is the state at the start of the last segment. The inputs are those since then, and before it as many as the
convolution reads. So a token is always computed by the same operations, however a prompt is divided into steps.

Of such a state, only the first inputs are read by a token that comes before its end in the segment. So a step can end
with tokens that may be rejected, if they do not complete a segment (`KVCacheGroup.limit_drafts`). Nothing has to be
undone when they are: the next step reads the same state, and overwrites their inputs. Code that computes a layer must
therefore read the inputs of a state by position, up to the first token of the step, and not by their number.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

SEGMENT: Final = 16
"""Tokens of a segment."""


class StateSize(msgspec.Struct, frozen=True):
    """The state of one layer in one worker: `num_recurrent` numbers, and `num_inputs` inputs of `channels` numbers."""

    num_recurrent: int
    num_inputs: int
    channels: int

    def num_bytes(self, input_bytes: int) -> int:
        """Return the bytes of the state, if a number of an input has `input_bytes`."""
        return 4 * self.num_recurrent + self.num_inputs * self.channels * input_bytes


class ShortConvolution(msgspec.Struct, frozen=True, tag=True):
    """A gated short convolution (LFM2)."""

    channels: int
    kernel: int
    has_bias: bool = False

    @property
    def segment(self) -> int:
        """Tokens of a segment.

        There is no recurrent part, so the length matters for drafts only. The inputs of a longer one would make blocks
        large.
        """
        return 8

    @property
    def num_units(self) -> int:
        """The number of parts that ranks can divide equally."""
        return self.channels

    def state_size(self, ranks: int) -> StateSize:
        """Return the size of the state in one of `ranks` workers."""
        return StateSize(0, self.segment - 1 + self.kernel - 1, self.channels // ranks)


class Mamba1(msgspec.Struct, frozen=True, tag=True):
    """A Mamba layer (Gu and Dao, 2023, arXiv 2312.00752).

    Each channel has a state of `state_size_per_channel` elements. Steps are products of a vector of `step_rank`
    elements. With `norm_eps` that vector, B and C are normed.
    """

    channels: int
    state_size_per_channel: int
    step_rank: int
    kernel: int
    conv_bias: bool = True
    has_bias: bool = False
    norm_eps: float | None = None
    has_norm_weights: bool = False

    @property
    def segment(self) -> int:
        """Tokens of a segment.

        A token's step, B and C are products of its convolved input. A longer segment would compute those of the tokens
        before it again.
        """
        return 1

    @property
    def num_units(self) -> int:
        """The number of parts that ranks can divide equally."""
        return self.channels

    def state_size(self, ranks: int) -> StateSize:
        """Return the size of the state in one of `ranks` workers."""
        channels = self.channels // ranks
        return StateSize(channels * self.state_size_per_channel, self.kernel - 1, channels)


class Mamba2(msgspec.Struct, frozen=True, tag=True):
    """A Mamba-2 layer (Dao and Gu, 2024, arXiv 2405.21060).

    Groups of heads share B and C of `state_size_per_head` elements. The output is normed in `norm_groups` groups after
    the gate is applied, or not at all if that is 0. The size of a step is limited to `min_step` .. `max_step`.
    `multipliers` are factors on the projections to the gate, x, B, C and the step.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size_per_head: int
    kernel: int
    conv_bias: bool = True
    projection_bias: bool = False
    output_bias: bool = False
    norm_groups: int = 1
    gates_before_norm: bool = True
    min_step: float = 0.0
    max_step: float = float("inf")
    multipliers: tuple[float, ...] = ()

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        return SEGMENT

    @property
    def num_units(self) -> int:
        """The number of parts that ranks can divide equally."""
        return self.num_heads if self.num_groups == 1 else self.num_groups

    def state_size(self, ranks: int) -> StateSize:
        """Return the size of the state in one of `ranks` workers."""
        heads = self.num_heads // ranks
        groups = max(1, self.num_groups // ranks)
        return StateSize(
            heads * self.head_dim * self.state_size_per_head,
            SEGMENT - 1 + self.kernel - 1,
            heads * self.head_dim + 2 * groups * self.state_size_per_head + heads,
        )


class GatedDeltaNet(msgspec.Struct, frozen=True, tag=True):
    """A gated delta net (Yang et al., 2024, arXiv 2412.06464).

    Several value heads share one key head. Keys have `key_dim` elements and values `value_dim`. `is_interleaved` says
    that the projections to queries, keys, values and gates are stored key head by key head, and `has_interleaved_steps`
    that those to strengths and steps are. With `has_tiled_heads` value head i shares key head i modulo their number,
    otherwise value heads that follow each other share one.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    has_negative_eigenvalues: bool = False
    is_interleaved: bool = False
    has_interleaved_steps: bool = False
    has_tiled_heads: bool = False
    norm_eps: float | None = None

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        return SEGMENT

    @property
    def num_units(self) -> int:
        """The number of parts that ranks can divide equally."""
        return self.num_key_heads

    def state_size(self, ranks: int) -> StateSize:
        """Return the size of the state in one of `ranks` workers."""
        heads, key_heads = self.num_heads // ranks, max(1, self.num_key_heads // ranks)
        return StateSize(
            heads * self.key_dim * self.value_dim,
            SEGMENT - 1 + self.kernel - 1,
            2 * key_heads * self.key_dim + heads * self.value_dim + 2 * heads,
        )


class KimiDeltaAttention(msgspec.Struct, frozen=True, tag=True):
    """Kimi delta attention (Kimi Linear, 2025, arXiv 2510.26692): a delta rule with a decay per key element.

    Keys and values of a head have `head_dim` elements.
    """

    num_heads: int
    head_dim: int
    kernel: int

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        return SEGMENT

    @property
    def num_units(self) -> int:
        """The number of parts that ranks can divide equally."""
        return self.num_heads

    def state_size(self, ranks: int) -> StateSize:
        """Return the size of the state in one of `ranks` workers."""
        heads = self.num_heads // ranks
        return StateSize(
            heads * self.head_dim**2,
            SEGMENT - 1 + self.kernel - 1,
            heads * (4 * self.head_dim + 1),
        )


RecurrentLayer: TypeAlias = ShortConvolution | Mamba1 | Mamba2 | GatedDeltaNet | KimiDeltaAttention
