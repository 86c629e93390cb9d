"""Add the vision tower of a model to the spec of its decoder."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.vision.grid import GridVisionSpec
from .....protocol.checkpoint.vision.llama import TilesVisionSpec
from .....protocol.checkpoint.vision.read import vision_spec
from ....layers.spec import ModelSpec
from ..common import without_axes
from ..with_encoders import encoder_decoders
from . import ernie, mllama


def with_vision(spec: ModelSpec, whole: ConfigFields) -> ModelSpec:
    """Return the spec with the vision tower of the `whole` model, for which `has_vision` is true.

    Raises:
        CheckpointError: A field is missing or invalid, or the tower does not fit the decoder.
    """
    encoder = vision_spec(whole, spec.hidden_size)
    if spec.source is not None and spec.source.encoder is not None:
        return encoder_decoders.with_images(spec, encoder)
    spec = replace(spec, encoder=encoder)
    if encoder.has_axes and not spec.rotary_axes:
        raise whole.error("mrope_section is missing, which images need")
    if isinstance(encoder, TilesVisionSpec):
        spec = mllama.with_images(spec, encoder)
    if encoder.num_page_outputs:
        spec = encoder_decoders.with_pages(spec, encoder)
    if isinstance(encoder, GridVisionSpec) and encoder.expert_tokens:
        spec = ernie.with_images(spec, encoder.expert_tokens)
    if max(encoder.added_after, default=-1) >= len(spec.layers):
        last = max(encoder.added_after)
        raise whole.error(
            f"the vision tower has outputs for layer {last + 1}, but the decoder has {len(spec.layers)} layers"
        )
    spec = replace(spec, added_after=encoder.added_after)
    if not encoder.has_axes:
        spec = without_axes(spec)
    return spec
