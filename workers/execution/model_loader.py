"""Loads the model: as a native program on a CPU that supports it, otherwise in torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...protocol.arrays import Int32Array
from ...protocol.checkpoint.audio_tower import AudioTowerSpec
from ...protocol.checkpoint.model_dimensions import check_parallel
from ...protocol.config import CPUBackend, EngineConfig, ModelImpl
from ...protocol.errors import CheckpointError, ConfigError
from ..attention import AttentionSpec, PagedAttention, attention_backend
from ..attention.graph_break import BreakingAttention
from ..audio.tower import AudioTower
from ..batch import PersistentBatch
from ..cpu.attention import NativeAttention
from ..cpu.decoder import NativeDecoder
from ..cpu.library import NotSupportedNatively, instruction_set
from ..cpu.tower_layers import NativeLayers
from ..device.device import count_threads, has_float8, usable_cores
from ..layers.layers import LayerKernels
from ..layers.spec import ModelSpec, SourceSpec
from ..loaders import Checkpoint
from ..loaders.mmproj import MmprojCheckpoint
from ..models.cross_attention import QueryRecorder
from ..models.decoder import Decoder
from ..models.encoder import Encoder
from ..models.families import UnknownArchitecture, model_spec
from ..models.kv_cache_groups import group_layers
from ..models.lora.adapters import LoraAdapters, load_at_start
from ..models.score_head import ScoreHead
from ..models.torch_decoder import TorchDecoder
from ..models.transformers_decoder import (
    TransformersDecoder,
    TransformersModel,
    has_transformers,
)
from ..models.weights import ProgressCallback
from ..parallel.shard import ModelShard
from ..sampling import Sampler, SamplerOutput
from ..source.encoder import SourceEncoder
from ..source.products import NativeProduct
from ..source.stem import SoundStem
from ..vision.layers import Layers, LayersSpec, LayerWeights, TorchLayers
from ..vision.placed import Placed
from ..vision.towers import make_tower
from .parallel_state import ParallelState

logger = logging.getLogger(__name__)

_DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""Dtypes by the names that `--dtype` and `--kv-cache-dtype` accept."""


class Model(Protocol):
    """The model as the model runner uses it.

    Shapes: T tokens of a step, S of them sampled, D hidden size, V vocabulary.
    """

    @property
    def spec(self) -> ModelSpec:
        """The whole model."""

    @property
    def shard(self) -> ModelShard:
        """The part of the model in this worker."""

    @property
    def attention(self) -> PagedAttention:
        """The attention backend, or the KV cache of a native program."""

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of hidden states that stages exchange."""

    @property
    def loras(self) -> LoraAdapters | None:
        """The LoRA adapters that requests may use."""

    encoder: Encoder | None
    """The encoder of images, sounds or sources; None without one, and on stages that read none of its outputs."""

    placed: Placed | None
    """The encoder outputs that the tokens of the current step read."""

    rotary_T3: torch.Tensor | None
    """The rotary positions of the current step where they differ from its positions, integers [T, 3]."""

    @property
    def score_head(self) -> ScoreHead | None:
        """The classification head on pooled hidden states; None without one, and on all stages but the last."""

    def forward(
        self,
        inputs: Tensor,
        positions_T: Tensor,
        kv_caches: Sequence[Tensor],
        attn_metadata: Sequence[Any],
    ) -> Tensor:
        """Fill the KV caches and return the hidden states [T, D] after the last layer of the shard.

        `inputs` are token ids [T] for the first stage of a pipeline, hidden states [T, D] for the others.
        """

    def store_source(
        self, encoded_ED: Tensor, kv_caches: Sequence[Tensor], attn_metadata: Mapping[int, Any]
    ) -> None:
        """Store the keys and values of an encoder's outputs in the caches of cross attention.

        `attn_metadata` has the metadata of a sequence of so many tokens for each group of cross attention.
        """

    def record_queries(self, recorder: QueryRecorder | None) -> None:
        """Give the queries of cross attention in all further steps to a recorder, or to none."""

    def join_round(self) -> None:
        """Compute rows of other replicas, if these divide the experts."""

    def compute_logits(self, hidden_SD: Tensor, slots_S: Int32Array | None = None) -> Tensor:
        """Return float32 logits [S, V], with the adapters of these slots; None for the base model."""

    def make_sampler(self, batch: PersistentBatch) -> Sampler:
        """Return the sampler for the requests of `batch`, which `forward_and_sample` uses from then on."""

    def forward_and_sample(
        self,
        inputs: Tensor,
        positions_T: Tensor,
        kv_caches: Sequence[Tensor],
        attn_metadata: Sequence[Any],
        rows_S: Int32Array,
        slots_S: Int32Array,
    ) -> SamplerOutput:
        """Run `forward`, and sample from the logits of its rows `rows_S` for these slots."""


def torch_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of the model's float weights."""
    return _DTYPES[config.model.dtype]


def load_model(
    config: EngineConfig,
    device: torch.device,
    checkpoint: Checkpoint,
    on_progress: ProgressCallback,
    parallel: ParallelState,
    breaks_graphs: bool = False,
) -> Model:
    """Load the model, with its encoder on the stages that read the encoder's outputs.

    With `breaks_graphs`, captured graphs can exclude the attention.

    Raises:
        CheckpointError: The checkpoint cannot be served.
        ConfigError: A requested backend or dtype is not available.
    """
    model = _load_decoder(config, device, checkpoint, on_progress, parallel, breaks_graphs)
    if model.loras is not None:
        load_at_start(model.loras, config.model.loras)
    encoder = model.spec.encoder
    shard = model.shard
    reads_outputs = shard.is_first or shard.layers.start < model.spec.num_deepstack_layers
    if model.spec.source is not None:
        model.encoder = load_source_encoder(
            config, model.spec.source, model, checkpoint, parallel, _DTYPES[config.model.dtype]
        )
    if encoder is None or not reads_outputs or isinstance(model, TransformersDecoder):
        return model
    dtype = torch.float32 if device.type == "cpu" else _DTYPES[config.model.dtype]
    num_threads = count_threads(config)
    is_native = device.type == "cpu" and config.device.cpu_backend is not CPUBackend.TORCH
    make_layers = partial(_tower_layers, num_threads=num_threads) if is_native else TorchLayers
    if isinstance(encoder, AudioTowerSpec):
        model.encoder = AudioTower(encoder, checkpoint, device, dtype, num_threads, make_layers)
    else:
        if config.model.mmproj:
            checkpoint = MmprojCheckpoint(Path(config.model.mmproj))
        model.encoder = make_tower(encoder, checkpoint, device, dtype, num_threads, make_layers)
    return model


def _tower_layers(spec: LayersSpec, layers: Iterable[LayerWeights], num_threads: int) -> Layers:
    """Return the layers of a tower as a native program, or in torch if it does not support them."""
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
    parallel: ParallelState,
    dtype: torch.dtype,
) -> SourceEncoder:
    """Load the encoder of an encoder-decoder model. Every stage of a pipeline computes all of it.

    Raises:
        CheckpointError: The checkpoint cannot be served.
        ConfigError: The encoder cannot be divided as configured.
    """
    spec = group_layers(source.encoder, source.max_positions, config.parallel.tensor_parallel_size)
    for layer in spec.layers:
        check_parallel(spec.for_layer(layer).dimensions, config.parallel)
    device = decoder.attention.device
    shard = ModelShard(range(len(spec.layers)), len(spec.layers), decoder.shard.tensor_parallel)
    attention = AttentionSpec.from_model(
        spec,
        shard,
        block_size=config.cache.block_size,
        dtype=decoder.attention.dtype,
        device=device,
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
            stem = SoundStem(
                source,
                checkpoint,
                device,
                torch.float32,
                lambda matrix: NativeProduct(matrix.to(dtype), num_threads),
            )
        else:
            stem = SoundStem(source, checkpoint, device, dtype)
    return SourceEncoder(source, model, stem, count_threads(config))


def _load_decoder(
    config: EngineConfig,
    device: torch.device,
    checkpoint: Checkpoint,
    on_progress: ProgressCallback,
    parallel: ParallelState,
    breaks_graphs: bool,
) -> NativeDecoder | TorchDecoder:
    found = _model_spec(config, checkpoint)
    foreign = found if isinstance(found, TransformersModel) else None
    spec = group_layers(
        found.spec if isinstance(found, TransformersModel) else found,
        config.model.max_model_len,
        config.parallel.tensor_parallel_size,
    )
    for layer in spec.layers:
        check_parallel(spec.for_layer(layer).dimensions, config.parallel)
    attention = AttentionSpec.from_model(
        spec,
        parallel.shard(spec),
        block_size=config.cache.block_size,
        dtype=_kv_cache_dtype(config, device),
        device=device,
    )
    is_native = device.type == "cpu" and config.device.cpu_backend is not CPUBackend.TORCH
    if config.model.enable_prompt_embeds and foreign is not None:
        raise ConfigError("--enable-prompt-embeds needs Engine's own layers; remove --model-impl")
    if config.model.enable_lora and foreign is not None:
        raise ConfigError("--enable-lora needs Engine's own layers; remove --model-impl")
    if is_native and foreign is None:
        native = _load_native(config, spec, checkpoint, attention, parallel, on_progress)
        if native is not None:
            return native
    _check_torch(config, attention)
    if foreign is not None:
        return _load_transformers(config, foreign, spec, attention)
    return _load_torch(config, spec, checkpoint, attention, parallel, on_progress, breaks_graphs)


def _new_loras(config: EngineConfig) -> LoraAdapters | None:
    """Return the place of the LoRA adapters, which are loaded after the model; None without --enable-lora."""
    if not config.model.enable_lora:
        return None
    scheduler = config.scheduler
    return LoraAdapters(scheduler.max_cpu_loras, config.model.max_lora_rank, scheduler.max_num_seqs)


def _model_spec(config: EngineConfig, checkpoint: Checkpoint) -> ModelSpec | TransformersModel:
    """Return Engine's spec of the model, or transformers' model if Engine has none or it is asked for."""
    impl, overrides = config.model.model_impl, config.model.hf_overrides
    if impl is ModelImpl.TRANSFORMERS:
        return _transformers_model(config, checkpoint)
    try:
        return model_spec({**checkpoint.config, **overrides}, checkpoint.config_path)
    except UnknownArchitecture as unknown:
        if impl is ModelImpl.ENGINE or not checkpoint.path.is_dir() or not has_transformers():
            raise
        try:
            return _transformers_model(config, checkpoint)
        except CheckpointError as error:
            reason = str(error).removeprefix(f"{checkpoint.path}: ")
            raise CheckpointError(checkpoint.path, f"{reason}; {unknown}") from error


def _transformers_model(config: EngineConfig, checkpoint: Checkpoint) -> TransformersModel:
    """Return transformers' model, which is not divided among workers."""
    if config.parallel.workers_per_core > 1:
        raise ConfigError(
            "--model-impl transformers runs a model in one worker; remove --tensor-parallel-size and "
            "--pipeline-parallel-size (--data-parallel-size works)"
        )
    if config.parallel.enable_expert_parallel:
        raise ConfigError(
            "--model-impl transformers does not divide experts; remove --enable-expert-parallel"
        )
    return TransformersModel(
        checkpoint.path,
        config.model.hf_overrides,
        trusts_remote_code=config.model.trust_remote_code,
    )


def _kv_cache_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    name = config.cache.kv_cache_dtype
    if name.startswith("fp8") and not has_float8(device):
        raise ConfigError(
            f"--kv-cache-dtype {name} needs a GPU with float8, of compute capability 8.9 or later; "
            "the CPU supports int8"
        )
    return _DTYPES[config.model.dtype if name == "auto" else name]


def _load_native(
    config: EngineConfig,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    attention: AttentionSpec,
    parallel: ParallelState,
    on_progress: ProgressCallback,
) -> NativeDecoder | None:
    """Return None if the native program cannot run the model and is not required."""
    # The native program has its own threads, with which spinning threads of torch would compete.
    torch.set_num_threads(1)
    num_threads = count_threads(config)
    speculative = config.scheduler.speculative
    try:
        decoder = NativeDecoder(
            spec,
            checkpoint,
            NativeAttention(attention),
            dtype=_DTYPES[config.model.dtype],
            max_model_len=config.model.max_model_len,
            shard=parallel.shard(spec),
            on_progress=on_progress,
            quantization=config.model.quantization,
            # Converting to bfloat16 would drop three bits of each number. With AMX, products in bfloat16 are many times
            # as fast, so it is done there.
            keeps_float16=config.model.dtype == "auto" and instruction_set() != "AMX",
            num_threads=num_threads,
            loras=_new_loras(config),
            places_embeddings=config.model.enable_prompt_embeds,
            keeps_hidden=speculative is not None and speculative.method.reads_hidden_states,
        )
    except NotSupportedNatively as reason:
        if config.device.cpu_backend is CPUBackend.NATIVE:
            raise ConfigError(f"--cpu-backend native: {reason}") from reason
        if parallel.is_output_rank:
            logger.warning("%s; using torch, which is several times slower", reason)
        return None
    if parallel.is_output_rank:
        logger.info("kernels for %s, threads: %d", instruction_set(), num_threads)
    return decoder


def _load_torch(
    config: EngineConfig,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    attention: AttentionSpec,
    parallel: ParallelState,
    on_progress: ProgressCallback,
    breaks_graphs: bool,
) -> Decoder:
    device, dtype = attention.device, _DTYPES[config.model.dtype]
    is_batch_invariant = config.device.batch_invariant
    if is_batch_invariant and device.type == "cuda":
        backend = attention_backend(attention, "triton_batch_invariant")
    else:
        backend = attention_backend(attention)
    return Decoder(
        spec,
        checkpoint,
        BreakingAttention(backend) if breaks_graphs else backend,
        dtype=dtype,
        device=device,
        max_model_len=config.model.max_model_len,
        shard=parallel.shard(spec),
        kernels=layer_kernels(dtype, device, is_batch_invariant),
        on_progress=on_progress,
        loras=_new_loras(config),
    )


def _load_transformers(
    config: EngineConfig, model: TransformersModel, spec: ModelSpec, attention: AttentionSpec
) -> TransformersDecoder:
    decoder = TransformersDecoder(
        model, spec, attention_backend(attention), dtype=_DTYPES[config.model.dtype]
    )
    decoder.check()
    logger.info("the layers are those of transformers: %s", spec.model_type)
    return decoder


def _check_torch(config: EngineConfig, attention: AttentionSpec) -> None:
    """Set the number of threads, and refuse what only native programs support."""
    if config.model.quantization is not None:
        raise ConfigError(
            f"--quantization {config.model.quantization} needs the native CPU backend, "
            "which is not available"
        )
    if attention.dtype == torch.int8:
        raise ConfigError(
            "--kv-cache-dtype int8 needs the native CPU backend, which is not available"
        )
    # OpenMP's threads spin at barriers. When the frontend or the engine core needs a processor that one of them holds,
    # every operation waits for a time slice. Leaving one processor free for them is faster.
    torch.set_num_threads(
        config.device.threads or max(1, (usable_cores() - 1) // config.parallel.num_workers)
    )


def layer_kernels(
    dtype: torch.dtype, device: torch.device, is_batch_invariant: bool
) -> LayerKernels:
    """Return the operations of layers for a device."""
    if device.type != "cuda":
        return LayerKernels()
    # Imported here, because Triton is installed only with torch for CUDA.
    from ..cuda.layers import TritonKernels

    return TritonKernels(
        dtype, has_float8=has_float8(device), is_batch_invariant=is_batch_invariant
    )
