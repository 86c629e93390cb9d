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
from ...layers.layers import LayerKernels
from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec
from ..weights import WeightReader
from .gated_delta_net import GatedDeltaNetMixer
from .kimi_delta_attention import KimiDeltaAttentionMixer
from .lightning_attention import LightningAttentionMixer
from .mamba1 import Mamba1Mixer
from .mamba2 import Mamba2Mixer
from .mixer import Mixer
from .rg_lru import RgLruMixer
from .short_convolution import ShortConvolutionMixer
from .states import StateBatch


def make_mixer(
    spec: ModelSpec,
    layer: MixerLayer,
    weights: WeightReader,
    prefix: str,
    shard: ModelShard,
    kernels: LayerKernels,
) -> Mixer:
    """Return the recurrent mixer of a layer."""
    match layer:
        case ShortConvolution():
            return ShortConvolutionMixer(spec, layer, weights, prefix, shard, kernels)
        case Mamba1():
            return Mamba1Mixer(spec, layer, weights, prefix, shard, kernels)
        case Mamba2():
            return Mamba2Mixer(spec, layer, weights, prefix, shard, kernels)
        case GatedDeltaNet():
            return GatedDeltaNetMixer(spec, layer, weights, prefix, shard, kernels)
        case KimiDeltaAttention():
            return KimiDeltaAttentionMixer(spec, layer, weights, prefix, shard, kernels)
        case LightningAttention():
            return LightningAttentionMixer(spec, layer, weights, prefix, shard, kernels)
        case RgLru():
            return RgLruMixer(spec, layer, weights, prefix, shard, kernels)


__all__ = ["Mixer", "StateBatch", "make_mixer"]
