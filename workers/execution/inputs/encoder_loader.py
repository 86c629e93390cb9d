"""Load the encoders of images, audio clips and source texts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ....protocol.checkpoint.model_dimensions import check_parallel
from ....protocol.checkpoint.vision.read import AnyVisionSpec
from ....protocol.config import CPUBackend, EngineConfig
from ....protocol.config.audio_tower import AnyAudioSpec
from ...attention import AttentionSpec, attention_backend
from ...cpu.attention import NativeAttention
from ...cpu.decoder import NativeDecoder
from ...cpu.library import NotSupportedNatively
from ...cpu.tower_layers import NativeLayers
from ...device.device import count_threads
from ...device.dtypes import torch_device
from ...layers.parallel.shard import ModelShard
from ...layers.spec import SourceSpec
from ...loaders import Checkpoint
from ...loaders.mmproj import MmprojCheckpoint
from ...models.decoder import Decoder
from ...models.encoder import Encoder
from ...models.kv_cache_groups import group_layers
from ...models.torch_decoder import TorchDecoder
from ...towers.audio_tower import AudioTower
from ...towers.image_tower import TowerSource
from ...towers.layers import Layers, LayersSpec, LayerWeights, TorchLayers
from ...towers.make_tower import make_tower
from ..source.encoder import SourceEncoder
from ..source.products import NativeProduct
from ..source.stem import AudioStem

logger = logging.getLogger(__name__)


def load_tower(
    config: EngineConfig,
    encoder: AnyAudioSpec | AnyVisionSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
) -> Encoder:
    """Load the encoder for a model's images or audio.

    Raises:
        CheckpointError: The encoder is not supported, or its files are damaged.
    """
    if device.type == "cpu":
        dtype = torch.float32
    num_threads = count_threads(config)
    is_native = device.type == "cpu" and config.device.cpu_backend is not CPUBackend.TORCH
    make_layers = partial(_tower_layers, num_threads=num_threads) if is_native else TorchLayers
    source = TowerSource(checkpoint, device, dtype, num_threads, make_layers)
    if isinstance(encoder, AnyAudioSpec):
        return AudioTower(encoder, source)
    if config.model.mmproj:
        source = source._replace(checkpoint=MmprojCheckpoint(Path(config.model.mmproj)))
    return make_tower(encoder, source)


def _tower_layers(spec: LayersSpec, layers: Iterable[LayerWeights], num_threads: int) -> Layers:
    """Return the layers of a tower as a native program, or in torch if they are not supported natively."""
    try:
        return NativeLayers(spec, layers, num_threads)
    except NotSupportedNatively as error:
        logger.info("the tower runs in torch: %s", error)
        return TorchLayers(spec, layers)


def load_source_encoder(
    config: EngineConfig,
    source: SourceSpec,
    decoder: NativeDecoder | TorchDecoder,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
) -> SourceEncoder:
    """Load the encoder of an encoder-decoder model. Every pipeline stage computes the whole encoder.

    Raises:
        CheckpointError: The encoder is not supported, or its files are damaged.
        ConfigError: The encoder cannot be divided as configured.
    """
    assert source.encoder is not None
    spec = group_layers(source.encoder, source.max_positions, config.parallel.tensor_parallel_size)
    for layer in spec.layers:
        check_parallel(spec.for_layer(layer).dimensions, config.parallel)
    device = torch_device(decoder.attention.device)
    shard = ModelShard(range(len(spec.layers)), len(spec.layers), decoder.shard.tensor_parallel)
    attention = AttentionSpec.from_model(
        spec,
        shard,
        block_size=config.cache.block_size,
        dtype=decoder.attention.dtype,
        device=decoder.attention.device,
    )
    options: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": source.max_positions,
        "shard": shard,
    }
    model: NativeDecoder | Decoder
    if isinstance(decoder, NativeDecoder):
        model = NativeDecoder(
            spec,
            checkpoint,
            NativeAttention(attention),
            quantization=config.model.quantization,
            num_threads=count_threads(config),
            **options,
        )
    else:
        model = Decoder(
            spec,
            checkpoint,
            attention_backend(attention),
            device=device,
            kernels=decoder.kernels,
            **options,
        )
    stem = None
    if source.convolutions:
        if isinstance(decoder, NativeDecoder):
            num_threads = count_threads(config)
            stem = AudioStem(
                source,
                checkpoint,
                device,
                torch.float32,
                lambda matrix: NativeProduct(matrix.to(dtype), num_threads),
            )
        else:
            stem = AudioStem(source, checkpoint, device, dtype)
    return SourceEncoder(source, model, stem, count_threads(config))
