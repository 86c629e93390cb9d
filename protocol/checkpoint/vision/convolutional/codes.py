"""Read the vision tokenizer of Apertus 1.5, which turns images into tokens of the decoder's vocabulary."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ...config_fields import ConfigFields
from ..spec import TowerSpec

NUM_GROUPS: Final = 32
"""The number of groups of channels that norms divide."""

_MAX_SIZE: Final = 1 << 20
_Sizes = list[Annotated[int, msgspec.Meta(ge=1, le=64)]]


class CodesVisionSpec(TowerSpec, frozen=True):
    """An encoder of convolutions (arXiv 2012.09841), whose output at each place becomes the most similar code.

    A code is a token of the decoder, whose embedding is that of the place.

    Attributes:
        stage_channels: The numbers of channels of the stages. Each stage but the last halves both sides at its end.
        num_blocks: The number of blocks of a stage.
        attending_stages: The stages, from 0, in whose blocks places attend to each other.
        latent_size: The number of channels after the last stage.
        code_size: The number of elements of a code.
        num_codes: The number of codes.
        first_token: The token of the first code.
        vocab_size: The number of embeddings of the decoder.
        output_size: The number of elements of an embedding.
    """

    first_channels: int
    stage_channels: tuple[int, ...]
    num_blocks: int
    attending_stages: tuple[int, ...]
    latent_size: int
    code_size: int
    num_codes: int
    first_token: int
    vocab_size: int
    output_size: int

    @property
    def unit(self) -> int:
        """The side, in pixels, of the square of an image that becomes one embedding."""
        return 1 << (len(self.stage_channels) - 1)


def apertus(fields: ConfigFields, vision: ConfigFields, output_size: int) -> CodesVisionSpec:
    """Return the vision tokenizer of Apertus 1.5."""
    base = vision.integer("base_channels", 256, maximum=_MAX_SIZE)
    if base % NUM_GROUPS:
        raise vision.wrong("base_channels", f"a multiple of {NUM_GROUPS}", base)
    vision.require("in_channels", 3)
    factors = _sizes(vision, "channel_multiplier", [1, 1, 2, 2, 4])
    resolutions = vision.get("attn_resolutions", [16])
    if not isinstance(resolutions, list) or not all(type(x) is int for x in resolutions):
        raise vision.wrong("attn_resolutions", "a list of integers", resolutions)
    resolution = vision.integer("resolution", 256, maximum=_MAX_SIZE)
    num_codes = vision.integer("codebook_size", 131_072, maximum=_MAX_SIZE)
    vocab_size = fields.first_section("text_config").integer("vocab_size", 266_752)
    first = fields.integer("image_token_offset", 131_272, minimum=0)
    if first + num_codes > vocab_size:
        needed = f"at most {vocab_size - num_codes}, so that all codes are in the vocabulary"
        raise fields.wrong("image_token_offset", needed, first)
    return CodesVisionSpec(
        first_channels=base,
        stage_channels=tuple(base * factor for factor in factors),
        num_blocks=vision.integer("num_res_blocks", 4, maximum=64),
        attending_stages=tuple(i for i in range(len(factors)) if resolution >> i in resolutions),
        latent_size=vision.integer("latent_channels", 256, maximum=_MAX_SIZE),
        code_size=vision.integer("embed_dim", 256, maximum=_MAX_SIZE),
        num_codes=num_codes,
        first_token=first,
        vocab_size=vocab_size,
        output_size=output_size,
    )


def _sizes(vision: ConfigFields, name: str, default: list[int]) -> list[int]:
    value = vision.get(name, default)
    try:
        found = msgspec.convert(value, _Sizes)
    except msgspec.ValidationError:
        found = []
    if not 0 < len(found) <= 8:
        raise vision.wrong(name, "up to 8 numbers from 1 to 64", value)
    return found
