"""Load the encoders of images, audio clips and source texts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from ....protocol.checkpoint.model_dimensions import check_parallel
from ....protocol.config import CPUBackend, EngineConfig
from ....protocol.encoder_inputs.payloads import AudioPayload, EmbeddingPayload, ImagePayload
from ....protocol.errors import EngineError
from ...attention import AttentionSpec, attention_backend
from ...cpu.attention import NativeAttention
from ...cpu.decoder import NativeDecoder
from ...cpu.library import NotSupportedNatively
from ...cpu.tower_layers import NativeLayers
from ...device.device import count_threads
from ...device.dtypes import torch_device
from ...layers.parallel.dimensions import model_dimensions
from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec, SourceSpec
from ...loaders import Checkpoint
from ...loaders.joined import JoinedCheckpoint
from ...loaders.mmproj import MmprojCheckpoint
from ...loaders.open_checkpoint import open_checkpoint
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


_decoder = msgspec.msgpack.Decoder(AudioPayload | ImagePayload | EmbeddingPayload)


class _Towers:
    """Encodes images with one tower, and audio clips with another."""

    def __init__(self, images: Encoder, audio: Encoder) -> None:
        self._images, self._audio = images, audio

    def encode(self, data: bytes) -> torch.Tensor:
        """Return the outputs [rows, D] for the data of one input.

        Raises:
            EngineError: The data is damaged, which a correct frontend never sends.
        """
        try:
            payload = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise EngineError(f"an encoder input is no image or audio clip: {error}") from error
        tower = self._audio if isinstance(payload, AudioPayload) else self._images
        return tower.encode(data)

    def warm_up(self) -> None:
        """Encode a dummy input with each tower."""
        self._images.warm_up()
        self._audio.warm_up()


def load_towers(
    config: EngineConfig,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
) -> Encoder:
    """Load the encoder for the images and audio of a model that has towers.

    Raises:
        CheckpointError: The encoder is unknown, or its files are damaged.
    """
    if device.type == "cpu":
        dtype = torch.float32
    num_threads = count_threads(config)
    is_native = device.type == "cpu" and config.device.cpu_backend is not CPUBackend.TORCH
    make_layers = partial(_tower_layers, num_threads=num_threads) if is_native else TorchLayers
    source = TowerSource(checkpoint, device, dtype, num_threads, make_layers)
    if config.model.mmproj:
        path = Path(config.model.mmproj)
        beside = open_checkpoint(path) if path.is_dir() else MmprojCheckpoint(path)
        if spec.encoder is not None and path.is_dir():
            # The checkpoint of the decoder has the projection.
            beside = JoinedCheckpoint(beside, checkpoint)
        source = source._replace(checkpoint=beside)
    audio = None if spec.audio_encoder is None else AudioTower(spec.audio_encoder, source)
    if spec.encoder is None:
        assert audio is not None
        return audio
    images = make_tower(spec.encoder, source)
    return images if audio is None else _Towers(images, audio)


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
        CheckpointError: The encoder is unknown, or its files are damaged.
        ConfigError: The encoder cannot be divided as configured.
    """
    assert source.encoder is not None
    spec = group_layers(source.encoder, source.max_positions, config.parallel.tensor_parallel_size)
    for layer in spec.layers:
        check_parallel(model_dimensions(spec.for_layer(layer)), config.parallel)
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
    images = None
    if source.encoder.encoder is not None:
        images = load_towers(config, source.encoder, checkpoint, device, dtype)
    return SourceEncoder(source, model, stem, count_threads(config), images)
