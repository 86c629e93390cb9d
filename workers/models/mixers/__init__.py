"""Recurrent mixers: layers that combine tokens through a recurrent state instead of attention."""

from __future__ import annotations

from ....protocol.checkpoint.recurrent_layers import (
    GatedDeltaNet,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    MixerLayer,
    Rwkv6,
    Rwkv7,
    ShortConvolution,
)
from ....protocol.checkpoint.state_spaces.jet import JetBlock
from ....protocol.checkpoint.state_spaces.rg_lru import RgLru
from ....protocol.checkpoint.state_spaces.rwkv4 import Rwkv4
from ....protocol.checkpoint.state_spaces.xlstm import MatrixLstm
from ...layers.parallel.tensor_parallel import TensorParallel
from ..layer_source import LayerSource
from ..weights import WeightReader
from .gated_delta_net import GatedDeltaNetMixer
from .jet_block import JetBlockMixer
from .kimi_delta_attention import KimiDeltaAttentionMixer
from .lightning_attention import LightningAttentionMixer
from .mamba1 import Mamba1Mixer
from .mamba2 import Mamba2Mixer
from .mixer import Mixer, MixerRows
from .rg_lru import RgLruMixer
from .rwkv4 import Rwkv4Mixer
from .rwkv6 import Rwkv6Mixer
from .rwkv7 import Rwkv7Mixer
from .short_convolution import ShortConvolutionMixer
from .states import StateBatch
from .xlstm import MatrixLstmMixer

_MIXERS: dict[type[MixerLayer], type[Mixer]] = {
    ShortConvolution: ShortConvolutionMixer,
    Mamba1: Mamba1Mixer,
    Mamba2: Mamba2Mixer,
    GatedDeltaNet: GatedDeltaNetMixer,
    KimiDeltaAttention: KimiDeltaAttentionMixer,
    LightningAttention: LightningAttentionMixer,
    RgLru: RgLruMixer,
    MatrixLstm: MatrixLstmMixer,
    JetBlock: JetBlockMixer,
    Rwkv4: Rwkv4Mixer,
    Rwkv6: Rwkv6Mixer,
    Rwkv7: Rwkv7Mixer,
}


def mixer_rows(
    layer: MixerLayer, weights: WeightReader, prefix: str, tensor_parallel: TensorParallel
) -> MixerRows:
    """Return one rank's parts of the weights of a layer's mixer."""
    return _MIXERS[type(layer)].rows(layer, weights, prefix, tensor_parallel)


def make_mixer(layer: MixerLayer, source: LayerSource) -> Mixer:
    """Return the recurrent mixer of a layer."""
    return _MIXERS[type(layer)](layer, source)


__all__ = ["Mixer", "MixerRows", "StateBatch", "make_mixer", "mixer_rows"]
