"""The encoder of LFM2, whose convolutions read tokens on both sides."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.recurrent_layers import ShortConvolution
from ....layers.layer_spec import LayerSpec
from ....layers.spec import ModelSpec
from ..common import Family
from ..hybrid import lfm2


def _lfm2_encoder(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a bidirectional LFM2, in which no layer has a state."""
    spec = lfm2(fields.with_values({"is_causal": None}))
    return replace(spec, layers=tuple(_without_state(fields, layer) for layer in spec.layers))


def _without_state(fields: ConfigFields, layer: LayerSpec) -> LayerSpec:
    convolution = layer.recurrent
    if not isinstance(convolution, ShortConvolution):
        return layer
    if convolution.kernel % 2 == 0:
        raise fields.wrong("conv_L_cache", "an odd number", convolution.kernel)
    return replace(layer, recurrent=None, neighbors=convolution)


FAMILIES = (Family("Lfm2BidirectionalModel", "lfm2", _lfm2_encoder),)
