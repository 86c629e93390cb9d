"""Recurrent mixers: layers that combine tokens through a recurrent state instead of attention."""

from __future__ import annotations

from ....protocol.checkpoint.recurrent_layers import (
    GatedDeltaNet,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    MixerLayer,
    RgLru,
    ShortConvolution,
)
from ..layer_source import LayerSource
from .gated_delta_net import GatedDeltaNetMixer
from .kimi_delta_attention import KimiDeltaAttentionMixer
from .lightning_attention import LightningAttentionMixer
from .mamba1 import Mamba1Mixer
from .mamba2 import Mamba2Mixer
from .mixer import Mixer
from .rg_lru import RgLruMixer
from .short_convolution import ShortConvolutionMixer
from .states import StateBatch


def make_mixer(layer: MixerLayer, source: LayerSource) -> Mixer:
    """Return the recurrent mixer of a layer."""
    match layer:
        case ShortConvolution():
            return ShortConvolutionMixer(layer, source)
        case Mamba1():
            return Mamba1Mixer(layer, source)
        case Mamba2():
            return Mamba2Mixer(layer, source)
        case GatedDeltaNet():
            return GatedDeltaNetMixer(layer, source)
        case KimiDeltaAttention():
            return KimiDeltaAttentionMixer(layer, source)
        case LightningAttention():
            return LightningAttentionMixer(layer, source)
        case RgLru():
            return RgLruMixer(layer, source)


__all__ = ["Mixer", "StateBatch", "make_mixer"]
