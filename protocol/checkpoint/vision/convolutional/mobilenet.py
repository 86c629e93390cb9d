"""Read the vision tower of Gemma 3n, which consists of convolutions and attention that shares keys (MobileNet-V5)."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from ...config_fields import ConfigFields
from ..spec import TowerSpec

_ARCHITECTURE: Final = "mobilenetv5_300m_enc"
_STEM_SIZE: Final = 64
_Kind: TypeAlias = Literal["edge", "inverted", "attention"]


class ConvBlock(msgspec.Struct, frozen=True):
    """A block of a MobileNet (arXiv 2404.10518) that turns `inputs` channels into `outputs` channels.

    * "edge": a convolution to `inner` channels, then a product.
    * "inverted": a convolution of each channel by itself, a product to `inner` channels, another convolution of each
      channel by itself, and a product. Convolutions whose kernel size is 0 are left out.
    * "attention": attention with `num_heads` heads of `inner` elements, which share one key and one value.

    Attributes:
        kernels: The side, in places, of the kernels of the first and the second convolution.
        stride: The distance, in places, of neighboring outputs: of the last convolution, or of the keys of "attention".
    """

    kind: _Kind
    inputs: int
    outputs: int
    inner: int
    kernels: tuple[int, int] = (0, 0)
    stride: int = 1
    num_heads: int = 0

    @property
    def adds_inputs(self) -> bool:
        """True if the inputs are added to the outputs."""
        return self.inputs == self.outputs and (self.stride == 1 or self.kind == "attention")


class ConvVisionSpec(TowerSpec, frozen=True):
    """The tower of Gemma 3n: MobileNet-V5, whose last two stages are the features, and a projection.

    The features of the last stage are enlarged to the size of those before them. An inverted block turns both into
    `hidden_size` channels, and `output_side` x `output_side` means of them are projected. One more embedding, for the
    token after the image, is read from a table.

    Attributes:
        stem_size: The number of channels of the convolution before the stages.
        fused_size: The number of channels within the block that turns both stages into features.
        vocab_size: The number of rows of the table.
        end_row: The row of the token after the image.
    """

    stem_size: int
    stages: tuple[tuple[ConvBlock, ...], ...]
    hidden_size: int
    fused_size: int
    output_side: int
    vocab_size: int
    end_row: int
    norm_eps: float
    output_size: int

    @property
    def num_outputs(self) -> int:
        """The number of embeddings of an image, with that of the token after it."""
        return self.output_side**2 + 1


def gemma3n(fields: ConfigFields, vision: ConfigFields, output_size: int) -> ConvVisionSpec:
    """Return the tower of Gemma 3n."""
    vision.require("architecture", _ARCHITECTURE)
    options = vision.section_or_empty("model_args")
    if others := set(options.config) - {"channel_multiplier"}:
        raise vision.wrong("model_args", "nothing but channel_multiplier", sorted(others))
    multiplier = options.positive("channel_multiplier", 1.0)
    stem_size = _STEM_SIZE if multiplier < 1 else _rounded(_STEM_SIZE * multiplier)
    # The network has no setting for these two sizes.
    vision.require("hidden_size", 2048)
    fields.require("vision_soft_tokens_per_image", 256)
    vocab_size = vision.integer("vocab_size", 128)
    first = vision.integer("vocab_offset", 262_144, minimum=0)
    end = fields.integer("eoi_token_id", 262_144, minimum=0)
    if not first <= end < first + vocab_size:
        raise fields.wrong(
            "eoi_token_id", f"one of the {vocab_size} tokens from vision_config.vocab_offset", end
        )
    stages = _stages(stem_size, multiplier)
    return ConvVisionSpec(
        stem_size=stem_size,
        stages=stages,
        hidden_size=2048,
        fused_size=_rounded(2 * sum(stage[-1].outputs for stage in stages[-2:])),
        output_side=16,
        vocab_size=vocab_size,
        end_row=end - first,
        norm_eps=vision.positive("rms_norm_eps", 1e-6),
        output_size=output_size,
    )


def _stages(inputs: int, multiplier: float) -> tuple[tuple[ConvBlock, ...], ...]:
    """Return the blocks of each stage, whose channels are multiplied by `multiplier`."""
    stages = []
    for size, blocks in _BLOCKS:
        stage = []
        outputs = _rounded(size * multiplier)
        for kind, kernels, stride, factor, num_heads in blocks:
            inner = factor if kind == "attention" else _rounded(inputs * factor)
            stage.append(ConvBlock(kind, inputs, outputs, inner, kernels, stride, num_heads))
            inputs = outputs
        stages.append(tuple(stage))
    return tuple(stages)


def _rounded(size: float) -> int:
    """Return a number of channels: a multiple of 8 that is not much smaller than `size`."""
    rounded = max(8, int(size + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * size else rounded


_Block: TypeAlias = tuple[_Kind, tuple[int, int], int, int, int]
"""The kind, the kernels, the stride, the factor of the inner channels (or the size of a head), and the heads."""


def _edge(stride: int) -> _Block:
    return "edge", (3, 0), stride, 4, 0


def _inverted(first: int, second: int, stride: int, factor: int) -> _Block:
    return "inverted", (first, second), stride, factor, 0


def _attention_and_mlp(num_heads: int, head_dim: int, stride: int) -> tuple[_Block, _Block]:
    return ("attention", (0, 3), stride, head_dim, num_heads), _inverted(0, 0, 1, 2)


_BLOCKS: Final[tuple[tuple[int, tuple[_Block, ...]], ...]] = (
    (128, (_edge(2), _edge(1), _edge(1))),
    (256, (_inverted(3, 5, 2, 6), *(_inverted(side, 0, 1, 4) for side in (5, 3, 5, 3)))),
    (
        640,
        (
            _inverted(5, 5, 2, 6),
            *[_inverted(5, 0, 1, 4)] * 7,
            _inverted(0, 0, 1, 1),
            *_attention_and_mlp(12, 64, 2) * 14,
        ),
    ),
    (1280, (_inverted(5, 5, 2, 6), *_attention_and_mlp(16, 96, 1) * 19)),
)
"""The channels of each stage of MobileNet-V5 300M, and its blocks."""
