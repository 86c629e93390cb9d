"""Read the vision tokenizers of Apertus 1.5 and Chameleon, which turn images into tokens of the vocabulary."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from ...config_fields import ConfigFields
from ..spec import TowerSpec

NUM_GROUPS: Final = 32
"""The number of groups of channels that norms divide."""

_MAX_SIZE: Final = 1 << 20
_Factor = Annotated[int, msgspec.Meta(ge=1, le=64)]
_Factors = Annotated[list[_Factor], msgspec.Meta(min_length=1, max_length=8)]


class CodesVisionSpec(TowerSpec, frozen=True):
    """An encoder of convolutions (arXiv 2012.09841), whose output at each place becomes the most similar code.

    A code is a token of the decoder, whose embedding is that of the place.

    Attributes:
        stage_channels: The numbers of channels of the stages. Each stage but the last halves both sides at its end.
        num_blocks: The number of blocks of a stage.
        attending_stages: The stages, from 0, in whose blocks places attend to each other.
        attends_last: True if places also attend to each other after the last stage.
        latent_size: The number of channels after the last stage.
        code_size: The number of elements of a code.
        num_codes: The number of codes.
        is_nearest: True if the most similar code is the one at the smallest distance, else the one with the largest
            product.
        first_token: The token of the first code.
        tokens: The token of each code; () if they follow the first one.
        vocab_size: The number of embeddings of the decoder.
        output_size: The number of elements of an embedding.
        tensor_names: Translates the checkpoint's tensor names to those of Apertus, as in `ModelSpec`.
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
    attends_last: bool = True
    is_nearest: bool = False
    tokens: tuple[int, ...] = ()
    tensor_names: tuple[tuple[str, str], ...] = ()

    @property
    def unit(self) -> int:
        """The side, in pixels, of the square of an image that becomes one embedding."""
        return 1 << (len(self.stage_channels) - 1)


def apertus(fields: ConfigFields, vision: ConfigFields, output_size: int) -> CodesVisionSpec:
    """Return the vision tokenizer of Apertus 1.5."""
    num_codes = vision.integer("codebook_size", 131_072, maximum=_MAX_SIZE)
    vocab_size = fields.first_section("text_config").integer("vocab_size", 266_752)
    first = fields.integer("image_token_offset", 131_272, minimum=0)
    if first + num_codes > vocab_size:
        needed = f"at most {vocab_size - num_codes}, so that all codes are in the vocabulary"
        raise fields.wrong("image_token_offset", needed, first)
    defaults = {"base_channels": 256, "attn_resolutions": [16], "resolution": 256}
    return CodesVisionSpec(
        **_encoder(vision.with_defaults(**defaults, num_res_blocks=4)),
        num_codes=num_codes,
        first_token=first,
        vocab_size=vocab_size,
        output_size=output_size,
    )


def chameleon(fields: ConfigFields, vision: ConfigFields, output_size: int) -> CodesVisionSpec:
    """Return the vision tokenizer of Chameleon (arXiv 2405.09818)."""
    attends = vision.get("attn_type", "vanilla") is not None
    if attends:
        vision.require("attn_type", "vanilla")
    if not attends or vision.get("attn_resolutions") is None:
        vision = vision.with_values({"attn_resolutions": []})
    own = vision.with_defaults(base_channels=128, resolution=512, num_res_blocks=2)
    # With twice as many channels, no code would have the size of the encoder's outputs.
    vision.require("double_latent", False, default=False)
    num_codes = vision.integer("num_embeddings", 8192, maximum=_MAX_SIZE)
    vocab_size = fields.integer("vocab_size", 65_536)
    return CodesVisionSpec(
        **_encoder(own),
        num_codes=num_codes,
        first_token=0,
        tokens=_tokens_of_codes(fields, num_codes, vocab_size),
        vocab_size=vocab_size,
        output_size=output_size,
        attends_last=attends,
        is_nearest=True,
        tensor_names=_CHAMELEON_NAMES,
    )


_IMAGE_PREFIX: Final = "IMGIMG"
_CODE_DIGITS: Final = str.maketrans("ABCDEFGHIJ", "0123456789")
_CHAMELEON_NAMES: Final = (
    (r"^(model\.)?vqmodel\.", "vision_tokenizer."),
    (r"\.encoder\.down\.(\d+)\.block\.(\d+)\.", r".encoder.stages.\1.layers.\2.resnet."),
    (r"\.encoder\.down\.(\d+)\.attn\.(\d+)\.", r".encoder.stages.\1.layers.\2.attention."),
    (r"\.encoder\.down\.(\d+)\.downsample\.", r".encoder.stages.\1.downsample."),
)


def _tokens_of_codes(fields: ConfigFields, num_codes: int, vocab_size: int) -> tuple[int, ...]:
    """Return the token of each code, whose name has the digits of the code as letters, as in IMGIMGBAZ for 10."""
    found: dict[int, int] = {}
    for name, token in fields.required_section("vocabulary_map").config.items():
        digits = name.removeprefix(_IMAGE_PREFIX)[:-1].translate(_CODE_DIGITS)
        is_code = name.startswith(_IMAGE_PREFIX) and digits.isdecimal()
        if is_code and type(token) is int and 0 <= token < vocab_size:
            found[int(digits)] = token
    if not found.keys() >= set(range(num_codes)):
        raise fields.error(
            f"vocabulary_map must have a token below {vocab_size} for each of the {num_codes} codes of images, "
            "from IMGIMGAZ on"
        )
    return tuple(found[code] for code in range(num_codes))


def _encoder(vision: ConfigFields) -> dict[str, Any]:
    """Return the fields of the convolutions, as keyword arguments."""
    base = vision.multiple("base_channels", NUM_GROUPS, maximum=_MAX_SIZE)
    vision.require("in_channels", 3)
    factors = [1, 1, 2, 2, 4]
    needed = "up to 8 numbers from 1 to 64"
    factors = vision.convert("channel_multiplier", factors, _Factors, needed)
    resolutions = vision.integers("attn_resolutions")
    resolution = vision.integer("resolution", maximum=_MAX_SIZE)
    return {
        "first_channels": base,
        "stage_channels": tuple(base * factor for factor in factors),
        "num_blocks": vision.integer("num_res_blocks", maximum=64),
        "attending_stages": tuple(i for i in range(len(factors)) if resolution >> i in resolutions),
        "latent_size": vision.integer("latent_channels", 256, maximum=_MAX_SIZE),
        "code_size": vision.integer("embed_dim", 256, maximum=_MAX_SIZE),
    }
