"""The sizes of layers with a recurrent state, read from a checkpoint's config without torch.

Such a layer reads a state of fixed size instead of keys and values. The state has two parts: the recurrent part in
float32, and the layer's inputs for the last few tokens in the model's dtype.

A layer is computed in segments of tokens at fixed positions. With a recurrence, a segment has `SEGMENT` tokens. The
recurrent part is the state at the start of the last segment. The stored inputs are those since that start, plus as many
before it as the convolution reads. A token is therefore always computed by the same operations, however a prompt is
divided into steps.

A token in the middle of a segment reads only the stored inputs before it. A step can therefore end with tokens that may
be rejected, if they do not complete a segment (`KVCacheGroup.limit_drafts`). A rejection needs no undo: the next step
reads the same state and overwrites the inputs of the rejected tokens. Code that computes a layer must therefore read
the stored inputs by position, up to the first token of the step, and not by their number.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final, TypeAlias

import msgspec

from .state_spaces.jet import JetBlock
from .state_spaces.rg_lru import RgLru
from .state_spaces.rwkv4 import Rwkv4
from .state_spaces.state_size import SEGMENT, StatePart, StateParts
from .state_spaces.xlstm import MatrixLstm

SHORT_SEGMENT: Final = 8
"""Number of tokens in a segment of a layer that only convolves.

There is no recurrent part, so the length matters only for drafts. Storing the inputs of a longer segment would make
blocks large.
"""

NUM_TOKEN_DIGITS: Final = 3
"""Number of elements that hold a token id, one for each digit of base 256, which every dtype has exactly."""


class ShortConvolution(msgspec.Struct, frozen=True, tag=True):
    """A gated short convolution (LFM2)."""

    segment: ClassVar[int] = SHORT_SEGMENT
    channels: int
    kernel: int
    has_bias: bool = False

    @property
    def num_units(self) -> int:
        """Number of parts that can be divided equally among ranks."""
        return self.channels

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`."""
        inputs = (StatePart(self.channels, 1),)
        return StateParts((), self.segment - 1 + self.kernel - 1, inputs)


class Mamba1(msgspec.Struct, frozen=True, tag=True):
    """A Mamba layer (Gu and Dao, 2023, arXiv 2312.00752).

    Each channel has a state of `state_size_per_channel` elements. The time step is a product of a vector of `step_rank`
    elements. If `norm_eps` is set, that vector, B and C are normed. With several heads, the channels of each head have
    such a vector, B and C of their own, and their gates are stored beside their inputs (Zamba, arXiv 2405.16712).

    If `head_dim` is set, each `head_dim` channels have one time step, one decay and one skip factor, and their gates
    are stored before their inputs. B and C are then stored before the vector of the time step (PLaMo 2).
    """

    # The time step, B and C of a token are products of its convolved input. A longer segment would compute the products
    # of its earlier tokens again.
    segment: ClassVar[int] = 1
    channels: int
    state_size_per_channel: int
    step_rank: int
    kernel: int
    conv_bias: bool = True
    has_bias: bool = False
    norm_eps: float | None = None
    has_norm_weights: bool = False
    num_heads: int = 1
    head_dim: int = 0

    @property
    def num_units(self) -> int:
        """Number of parts that can be divided equally among ranks."""
        if self.head_dim:
            return self.channels // self.head_dim
        return self.channels if self.num_heads == 1 else self.num_heads

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`."""
        units = self.num_units
        width = self.channels // units
        return StateParts(
            (StatePart(units, width * self.state_size_per_channel),),
            self.kernel - 1,
            (StatePart(units, width),),
        )


class Mamba2(msgspec.Struct, frozen=True, tag=True):
    """A Mamba-2 layer (Dao and Gu, 2024, arXiv 2405.21060).

    Groups of heads share B and C, of `state_size_per_head` elements. After the gate, the output is normed in
    `norm_groups` groups, or not at all if that is 0. Time steps are limited to the range `min_step` to `max_step`.
    `multipliers` are factors on the projections to the gate, x, B, C and the time step. If `norm_eps` is set, it is the
    epsilon of the norm instead of the model's.
    """

    segment: ClassVar[int] = SEGMENT
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
    norm_eps: float | None = None

    @property
    def num_units(self) -> int:
        """Number of parts that can be divided equally among ranks."""
        return self.num_heads if self.num_groups == 1 else self.num_groups

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`."""
        states = StatePart(self.num_groups, self.state_size_per_head)
        return StateParts(
            (StatePart(self.num_heads, self.head_dim * self.state_size_per_head),),
            SEGMENT - 1 + self.kernel - 1,
            (
                StatePart(self.num_heads, self.head_dim),
                states,
                states,
                StatePart(self.num_heads, 1),
            ),
        )


class NgramConvolution(msgspec.Struct, frozen=True, tag=True):
    """The convolution over embeddings of n-grams (Qwen4), beside a layer's recurrent part.

    It reads `taps` tokens at distances of `ngram_size`. A stored input has `channels` elements and the digits of the
    token. It is the same on all ranks.
    """

    segment: ClassVar[int] = SEGMENT
    channels: int
    taps: int
    ngram_size: int

    @property
    def kernel(self) -> int:
        """Number of tokens from the first to the last one that a token reads."""
        return (max(self.taps, 2) - 1) * self.ngram_size + 1

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`."""
        inputs = (StatePart(1, self.channels + NUM_TOKEN_DIGITS),)
        return StateParts((), SEGMENT - 1 + self.kernel - 1, inputs)


class GatedDeltaNet(msgspec.Struct, frozen=True, tag=True):
    """A gated delta net (Yang et al., 2024, arXiv 2412.06464).

    Several value heads share one key head. Keys have `key_dim` elements and values `value_dim`. If `is_interleaved`,
    the projections to queries, keys, values and gates are stored key head by key head. `has_interleaved_steps` says the
    same about the projections to strengths and time steps. If `has_tiled_heads`, value head i uses key head i modulo
    their number; otherwise consecutive value heads share one. The gate is a sigmoid if `has_sigmoid_gate`, else SiLU.
    The weights of the outputs' norm are (stored weight + `norm_offset`) * `norm_factor` (GigaChat 3.5).
    With `ngrams`, every layer has a state for a convolution over embeddings of n-grams, which some layers have.
    """

    segment: ClassVar[int] = SEGMENT
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
    has_sigmoid_gate: bool = False
    norm_offset: float = 0.0
    norm_factor: float = 1.0
    ngrams: NgramConvolution | None = None

    @property
    def num_units(self) -> int:
        """Number of parts that can be divided equally among ranks."""
        return self.num_key_heads

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`."""
        # Ranks divide tiled heads in such a way that each of them has the key heads of its value heads.
        runs = self.num_heads // self.num_key_heads if self.has_tiled_heads else 1
        units = self.num_heads // runs
        keys = StatePart(self.num_key_heads, self.key_dim)
        numbers = StatePart(units, 1, runs)
        return StateParts(
            (StatePart(units, self.key_dim * self.value_dim, runs),),
            SEGMENT - 1 + self.kernel - 1,
            (keys, keys, StatePart(units, self.value_dim, runs), numbers, numbers),
            None if self.ngrams is None else self.ngrams.state_parts,
        )


class _EqualHeads(msgspec.Struct, frozen=True):
    """A layer in which keys and values of a head have `head_dim` elements."""

    segment: ClassVar[int] = SEGMENT
    num_heads: int
    head_dim: int

    @property
    def num_units(self) -> int:
        """Number of parts that can be divided equally among ranks."""
        return self.num_heads


class KimiDeltaAttention(_EqualHeads, frozen=True, tag=True):
    """Kimi delta attention (Kimi Linear, 2025, arXiv 2510.26692), a delta rule with one decay per element of the keys.

    If `is_low_rank`, decays are computed from projections to `head_dim` elements, and so are gates, unless
    `has_full_gates`. If `lowest_log_decay` is not 0, a decay is at least exp(`lowest_log_decay`).
    """

    kernel: int
    is_low_rank: bool = True
    has_full_gates: bool = False
    lowest_log_decay: float = 0.0

    @property
    def has_low_rank_gates(self) -> bool:
        """True if gates are computed from projections to `head_dim` elements."""
        return self.is_low_rank and not self.has_full_gates

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`."""
        heads = StatePart(self.num_heads, self.head_dim)
        return StateParts(
            (StatePart(self.num_heads, self.head_dim**2),),
            SEGMENT - 1 + self.kernel - 1,
            (heads, heads, heads, StatePart(self.num_heads, 1), heads),
        )


class LightningAttention(_EqualHeads, frozen=True, tag=True):
    """Lightning attention (MiniMax-01, 2025, arXiv 2501.08313): linear attention with a fixed decay for each head.

    If it `has_layer_decays`, the decays depend on the layer's index. The outputs are normed in `norm_groups` equal
    parts, before they are gated.

    SiLU is applied to queries, keys and values. If `is_rotated` (Ling 2.5), queries and keys are rotated instead, after
    norms of each head if it `norms_heads`. If it `has_separate_projections` (MiniCPM-SALA), those to queries, keys and
    values are stored separately.
    """

    norm_groups: int = 1
    is_rotated: bool = False
    norms_heads: bool = False
    has_separate_projections: bool = False
    has_layer_decays: bool = True

    @property
    def num_units(self) -> int:
        """Number of parts that can be divided equally among ranks."""
        return self.num_heads if self.norm_groups == 1 else self.norm_groups

    @property
    def kernel(self) -> int:
        """Number of tokens in a convolution, of which there is none."""
        return 1

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`."""
        heads = StatePart(self.num_heads, self.head_dim)
        recurrent = (StatePart(self.num_heads, self.head_dim**2),)
        return StateParts(recurrent, SEGMENT - 1, (heads,) * 3)


class Rwkv7(_EqualHeads, frozen=True, tag=True):
    """The time mixing of RWKV-7 (Peng et al., 2025, arXiv 2503.14456), a generalized delta rule.

    Each of its products reads its own mixture of a token's hidden state and the one before it. Decays, rates, the
    shares of the first layer's values, and gates are computed from projections to as many elements as the ranks; there
    are no gates if `gate_rank` is 0. If it `has_norm`, each head's output is normed with the epsilon `norm_eps`. If it
    `shifts_mlp`, the MLP reads such a mixture, too.
    """

    decay_rank: int
    rate_rank: int
    value_rank: int
    gate_rank: int
    norm_eps: float
    has_norm: bool = True
    shifts_mlp: bool = True

    @property
    def kernel(self) -> int:
        """Number of tokens that a mixture of hidden states reads."""
        return 2

    @property
    def hidden_size(self) -> int:
        """Number of elements of a hidden state, and of all heads."""
        return self.num_heads * self.head_dim

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`.

        The inputs are the hidden state, which every rank has; queries, decays, keys, values and rates of the rank's
        heads; and the hidden state that the MLP reads.
        """
        hidden = StatePart(1, self.hidden_size)
        return StateParts(
            (StatePart(self.num_heads, self.head_dim**2),),
            SEGMENT - 1 + self.kernel - 1,
            (
                hidden,
                *(StatePart(self.num_heads, self.head_dim),) * 5,
                *(hidden,) * self.shifts_mlp,
            ),
        )


class Rwkv6(_EqualHeads, frozen=True, tag=True):
    """The time mixing of RWKV-6 (Peng et al., 2024, arXiv 2404.05892): linear attention with one decay per key element.

    Values have `head_dim` elements and keys `key_dim`. The mixtures of two hidden states depend on them, by projections
    to `mix_rank` elements, which are stored in the order `mixtures`. If `halving_period` is not 0, the stored matrices
    of outputs are halved as often as that number of layers comes before theirs, which has to be undone.

    If `reads_own`, a token reads the state after its own decay and its own value, instead of the state before with a
    bonus for its value; keys are multiplied by 1 - decay, and outputs have no norm (QRWKV6, arXiv 2505.03005).
    Several heads may then share keys and values.
    """

    key_dim: int
    mix_rank: int
    decay_rank: int
    norm_eps: float
    mixtures: str = "rwkvg"
    halving_period: int = 0
    reads_own: bool = False
    num_kv_heads: int = 0
    """The number of heads of keys and values; 0 for all heads."""
    has_biases: bool = False
    """True if queries, keys and values have biases."""
    kernel: ClassVar[int] = 2

    @property
    def hidden_size(self) -> int:
        """Number of elements of a hidden state, and of the values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def shifts_mlp(self) -> bool:
        """True if the MLP reads a mixture of two hidden states, too."""
        return not self.reads_own

    @property
    def state_parts(self) -> StateParts:
        """See `Rwkv7.state_parts`; there are no rates."""
        hidden = StatePart(1, self.hidden_size)
        return StateParts(
            (StatePart(self.num_heads, self.key_dim * self.head_dim),),
            SEGMENT - 1 + self.kernel - 1,
            (
                hidden,
                *(StatePart(self.num_heads, self.key_dim),) * 3,
                StatePart(self.num_heads, self.head_dim),
                *(hidden,) * self.shifts_mlp,
            ),
        )


class _AttentionConvolutions(msgspec.Struct, frozen=True):
    """Short convolutions in a layer with attention, whose heads of keys and values have `head_dim` elements."""

    segment: ClassVar[int] = SHORT_SEGMENT
    num_kv_heads: int
    head_dim: int

    @property
    def num_units(self) -> int:
        """Number of parts that can be divided equally among ranks."""
        return self.num_kv_heads


class InnerConvolutions(_AttentionConvolutions, frozen=True, tag=True):
    """Short convolutions in a layer with attention (Inkling): of its keys, values and output, and the MLP's output.

    Each convolution's result is added to its input. Every rank has all elements of the outputs. If `is_scaled` (Inkling
    2), the sum is divided by the square root of the number of its terms. If `is_dynamic`, the taps of keys and values
    are increased by products of the token's hidden state, which all elements of a head share.
    """

    hidden_size: int
    kernel: int
    is_scaled: bool = False
    is_dynamic: bool = False

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`."""
        heads, hidden = (
            StatePart(self.num_kv_heads, self.head_dim),
            StatePart(1, self.hidden_size),
        )
        num_inputs = self.segment - 1 + self.kernel - 1
        return StateParts((), num_inputs, (heads, heads, hidden, hidden), native_tables=(2, 1, 1))


class HeadConvolutions(_AttentionConvolutions, frozen=True, tag=True):
    """Short convolutions of the queries, keys and values of attention (compressed convolutional attention, ZAYA1).

    Each channel of queries and keys is combined over `channel_kernel` tokens, and then each of their heads over
    `head_kernel` tokens. The latter half of a token's values comes from the token before it, and the queries and keys
    that share a head are added to each other (arXiv 2510.04476).
    """

    num_heads: int
    channel_kernel: int
    head_kernel: int

    @property
    def kernel(self) -> int:
        """Number of tokens on which the queries and keys of a token depend."""
        return self.channel_kernel + self.head_kernel - 1

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`."""
        heads = StatePart(self.num_kv_heads, self.head_dim)
        inputs = (StatePart(self.num_heads, self.head_dim), heads, heads)
        return StateParts((), self.segment - 1 + self.kernel - 1, inputs, native_tables=(2, 1))


MixerLayer: TypeAlias = (
    ShortConvolution
    | Mamba1
    | Mamba2
    | GatedDeltaNet
    | KimiDeltaAttention
    | LightningAttention
    | Rwkv4
    | Rwkv6
    | Rwkv7
    | RgLru
    | MatrixLstm
    | JetBlock
)
"""The layers that are a block of their own, beside attention or instead of it."""

ConvolvedAttention: TypeAlias = InnerConvolutions | HeadConvolutions
"""The convolutions within a layer with attention."""

RecurrentLayer: TypeAlias = MixerLayer | ConvolvedAttention


def nominal_heads(layer: RecurrentLayer) -> tuple[int, int]:
    """Return a number of key/value heads and a head size for a model without attention.

    They only determine the size of a KV-cache block, in which the recurrent state is stored.
    """
    if isinstance(layer, Rwkv6 | Rwkv7):
        return layer.num_heads, layer.head_dim
    return math.gcd(layer.num_units, 64), 64
