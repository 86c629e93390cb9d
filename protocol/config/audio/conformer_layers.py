"""The layers of conformers whose rows attend to all rows of a clip."""

from typing import Literal

import msgspec

from ..token_decoders import CtcSpec
from .bases import UnpaddedSpec


class ConformerLayers(msgspec.Struct, frozen=True):
    """Layers of a conformer (arXiv 2005.08100): an MLP, attention, a depthwise convolution, and another MLP.

    Attributes:
        has_bias: True if the products of attention and MLPs have biases.
        has_attention_bias: False if those of attention have none in any case.
        has_qkv_norms: True if queries, keys and values have norms of their own instead of a common one.
        has_conv_bias: True if the convolution and the products around it have biases.
        positions: The way in which attention depends on places. "distances": scores have embeddings of all distances
            (arXiv 1901.02860). "keys": they have learned keys of the distances from -`num_before` to `num_after`, to
            which larger ones are cut (arXiv 1803.02155). "inputs": the inputs of queries and keys are rotated.
            "rotary": queries and keys are rotated. "none": it does not.
        theta: The base of rotations.
        conv_expansion: The number of the convolution's channels for each element of a row.
        conv_norm: The norm after the convolution, over the rows of training ("batch") or the channels ("layer").
        is_causal: True if the convolution reads no later rows.
        mlp_factors: The factors of an MLP's inputs and outputs in their sum.
        conv_factors: Those of the convolution.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kernel_size: int
    activation: str
    has_bias: bool = True
    has_attention_bias: bool = True
    has_qkv_norms: bool = False
    has_conv_bias: bool = False
    positions: Literal["distances", "keys", "inputs", "rotary", "none"] = "distances"
    num_before: int = 0
    num_after: int = 0
    theta: float = 10_000.0
    conv_expansion: int = 1
    conv_norm: Literal["batch", "layer"] = "batch"
    is_causal: bool = False
    mlp_factors: tuple[float, float] = (1.0, 0.5)
    conv_factors: tuple[float, float] = (1.0, 1.0)
    norm_eps: float = 1e-5
    has_norm_bias: bool = True


class Convolutions(msgspec.Struct, frozen=True):
    """Convolutions over frames or rows, each of which has this kernel size, stride and padding."""

    count: int
    kernel_size: int
    stride: int
    padding: int = 0

    def num_rows(self, num_rows: int) -> int:
        """Return the number of rows that they make."""
        for _ in range(self.count):
            num_rows = max(0, (num_rows + 2 * self.padding - self.kernel_size) // self.stride + 1)
        return num_rows


class CtcConformerSpec(UnpaddedSpec, frozen=True, tag=True):
    """A conformer that reads features and, with a `decoder`, writes tokens (Wav2Vec2-BERT, MedASR and SeamlessM4T).

    A norm and a matrix make its rows or, with a `stem`, two matrices and the convolutions between them, of which the
    last has `stem_channels`. After the layers there may be a norm, with `has_middle_mlp` an MLP with halved outputs,
    and `adapters`: layers of attention to rows that a gated convolution makes, and an MLP. The activation of these MLPs
    is `adapter_activation`. Without a `decoder`, a `last` norm or matrix may follow.
    """

    layers: ConformerLayers
    num_mel_bins: int
    num_frames: int
    output_size: int
    decoder: CtcSpec | None
    tensor_names: tuple[tuple[str, str], ...]
    stem: Convolutions | None = None
    stem_channels: int = 0
    has_last_norm: bool = False
    has_middle_mlp: bool = False
    adapters: Convolutions | None = None
    adapter_activation: str = "relu"
    last: Literal["norm", "matrix", "none"] = "norm"

    @property
    def convolutions(self) -> list[tuple[int, int, int]]:
        """The kernel size, the stride and the padding of the convolutions that make fewer rows."""
        return [
            (each.kernel_size, each.stride, each.padding)
            for each in (self.stem, self.adapters)
            if each is not None
            for _ in range(each.count)
        ]

    def num_outputs(self, num_frames: int) -> int:
        """Return the maximum number of tokens for the frames of a clip."""
        for each in (self.stem, self.adapters):
            num_frames = num_frames if each is None else each.num_rows(num_frames)
        return num_frames
