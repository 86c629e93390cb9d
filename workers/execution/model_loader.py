"""Load the model, as a native program if the CPU backend supports it, otherwise in torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from msgspec.structs import replace

from ...protocol.checkpoint.model_dimensions import check_parallel
from ...protocol.config import FIRST_EPOCH, CPUBackend, EngineConfig, HiddenStatesConfig, ModelImpl
from ...protocol.errors import CheckpointError, ConfigError
from ..attention import AttentionSpec
from ..cpu.attention import NativeAttention
from ..cpu.decoder import NativeDecoder
from ..cpu.library import NotSupportedNatively, instruction_set
from ..device.device import count_threads, has_float8
from ..device.dtypes import HostDevice, HostDtype, configured_dtype, torch_device, torch_dtype
from ..device.lazy_torch import is_torch_loaded
from ..layers.parallel.dimensions import model_dimensions
from ..layers.spec import ModelSpec
from ..loaders import Checkpoint
from ..loaders.own_head import has_own_head
from ..loaders.stored.packed_file import PackedFile
from ..models.families import UnknownArchitecture, model_spec
from ..models.kv_cache_groups import group_as_one, group_layers
from ..models.lora.adapters import LoraAdapters, load_at_start

if TYPE_CHECKING:
    # Import these modules at run time only where they are needed, because some of them need torch.

    from ..models.foreign.decoder import TransformersModel
    from ..models.torch_decoder import TorchDecoder
    from ..models.weights import ProgressCallback
    from .parallel_state import ParallelState

logger = logging.getLogger(__name__)


Model: TypeAlias = "NativeDecoder | TorchDecoder"
"""The decoders of the native program and of torch, which have the same methods."""


def load_model(
    config: EngineConfig,
    device: torch.device | HostDevice,
    checkpoint: Checkpoint,
    on_progress: ProgressCallback,
    parallel: ParallelState,
    *,
    has_one_group: bool = False,
    packed: PackedFile | None = None,
) -> Model:
    """Load the model, and its encoder on the stages that read the encoder's outputs.

    With `has_one_group`, all layers are in one KV-cache group that keeps every token, if that is possible. The native
    decoder maps its packed matrices from the file `packed`, if it exists.

    Raises:
        CheckpointError: The model is not supported, or its files are damaged.
        ConfigError: A requested backend or dtype is not available.
    """
    model = _load_decoder(
        config,
        device,
        checkpoint,
        on_progress,
        parallel,
        has_one_group=has_one_group,
        packed=packed,
    )
    if model.loras is not None:
        try:
            load_at_start(model.loras, config.model.loras)
        except CheckpointError as error:
            if config.epoch == FIRST_EPOCH:
                raise
            # Its files were removed since. The requests for it fail when they load it, and others are served.
            logger.warning("%s", error)
    shard = model.shard
    source = model.spec.source
    reads_outputs = shard.is_first or shard.layers.start <= max(model.spec.added_after, default=-1)
    # Layers of every stage read images by cross attention.
    reads_outputs |= source is not None
    is_encoded = reads_outputs and not model.is_foreign
    is_encoded &= (model.spec.encoder or model.spec.audio_encoder) is not None
    if source is not None or is_encoded:
        # Imported here, because it needs torch, and few models have an encoder.
        from .inputs.encoder_loader import load_source_encoder, load_towers
        from .inputs.stored_encoder import store_outputs

        dtype = torch_dtype(configured_dtype(config.model.dtype))
        if source is not None and source.encoder is not None:
            model.encoder = load_source_encoder(config, source, model, checkpoint, dtype)
        if is_encoded:
            on = torch_device(device)
            towers = load_towers(config, model.spec, checkpoint, on, dtype)
            model.encoder = store_outputs(config, towers, model.spec, on, dtype)
    return model


def _load_decoder(
    config: EngineConfig,
    device: torch.device | HostDevice,
    checkpoint: Checkpoint,
    on_progress: ProgressCallback,
    parallel: ParallelState,
    *,
    has_one_group: bool,
    packed: PackedFile | None,
) -> NativeDecoder | TorchDecoder:
    found = _model_spec(config, checkpoint)
    foreign = None if isinstance(found, ModelSpec) else found
    described = found if isinstance(found, ModelSpec) else found.spec
    max_model_len = config.model.max_model_len
    spec = group_as_one(described, max_model_len) if has_one_group else None
    spec = spec or group_layers(
        described,
        max_model_len,
        config.parallel.tensor_parallel_size,
        config.cache.block_size,
    )
    for layer in spec.layers:
        check_parallel(model_dimensions(spec.for_layer(layer)), config.parallel)
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
    kept_layers: Sequence[int] | None = None
    speculative = config.scheduler.speculative
    if speculative is not None and speculative.method.reads_hidden_states:
        from .drafting.layouts.read import find_kept_layers

        kept_layers = find_kept_layers(speculative, spec)
    states = config.scheduler.hidden_states
    if states is not None and states.layers:
        kept_layers = _verified_layers(states, described, is_foreign=foreign is not None)
    if is_native and foreign is None:
        native = _load_native(
            config, spec, checkpoint, attention, parallel, on_progress, kept_layers, packed
        )
        if native is not None:
            return native
    # Imported here, because its modules need torch.
    from .torch_loader import load_in_torch

    loras = _new_loras(config)
    return load_in_torch(
        config,
        spec,
        foreign,
        checkpoint,
        attention,
        parallel,
        on_progress,
        loras,
        kept_layers,
    )


def _verified_layers(
    states: HiddenStatesConfig, spec: ModelSpec, *, is_foreign: bool
) -> Sequence[int]:
    """Return the layers whose inputs are returned. Raises ConfigError if the model cannot return them."""
    if is_foreign or spec.num_streams:
        raise ConfigError(
            "hidden states of layers need a model with Engine's own layers and one hidden state per token; leave out "
            f"layers {list(states.layers)} to return the normed hidden states"
        )
    if (last := max(states.layers)) > len(spec.layers):
        raise ConfigError(
            f"the hidden states of layer {last} do not exist: layers are 0 to {len(spec.layers)}, and the last one "
            "stands for the input of the final norm"
        )
    return states.layers


def _new_loras(config: EngineConfig) -> LoraAdapters | None:
    """Return an empty set of LoRA adapters, which are loaded after the model; None without --enable-lora."""
    if not config.model.enable_lora:
        return None
    scheduler = config.scheduler
    return LoraAdapters(scheduler.max_cpu_loras, config.model.max_lora_rank, scheduler.max_num_seqs)


def _model_spec(config: EngineConfig, checkpoint: Checkpoint) -> ModelSpec | TransformersModel:
    """Return Engine's spec of the model. If it has none, or `--model-impl` asks for it, return transformers' model."""
    impl, overrides = config.model.model_impl, config.model.hf_overrides
    if impl is ModelImpl.TRANSFORMERS:
        return _transformers_model(config, checkpoint)
    try:
        spec = model_spec({**checkpoint.config, **overrides}, checkpoint.config_path)
    except UnknownArchitecture as unknown:
        from ..models.foreign.decoder import has_transformers

        if impl is ModelImpl.ENGINE or not checkpoint.path.is_dir() or not has_transformers():
            raise
        try:
            return _transformers_model(config, checkpoint)
        except CheckpointError as error:
            reason = str(error).removeprefix(f"{checkpoint.path}: ")
            raise CheckpointError(checkpoint.path, f"{reason}; {unknown}") from error
    may_untie = spec.tie_word_embeddings and spec.is_causal and spec.score_head is None
    if may_untie and has_own_head(checkpoint, spec.tensor_names, spec.vocab_size):
        spec = replace(spec, tie_word_embeddings=False)
    return spec


def _transformers_model(config: EngineConfig, checkpoint: Checkpoint) -> TransformersModel:
    """Return transformers' model. It cannot be divided among workers."""
    if config.parallel.workers_per_core > 1:
        raise ConfigError(
            "--model-impl transformers runs a model in a single worker; remove --tensor-parallel-size and "
            "--pipeline-parallel-size (--data-parallel-size works)"
        )
    if config.parallel.enable_expert_parallel:
        raise ConfigError(
            "--model-impl transformers does not divide experts; remove --enable-expert-parallel"
        )
    from ..models.foreign.decoder import TransformersModel

    return TransformersModel(
        checkpoint.path,
        config.model.hf_overrides,
        trusts_remote_code=config.model.trust_remote_code,
    )


def _kv_cache_dtype(
    config: EngineConfig, device: torch.device | HostDevice
) -> torch.dtype | HostDtype:
    name = config.cache.kv_cache_dtype
    if name.startswith("fp8") and not has_float8(torch_device(device)):
        raise ConfigError(
            f"--kv-cache-dtype {name} needs a GPU that supports float8 (compute capability 8.9 or later); "
            "the CPU supports int8"
        )
    return configured_dtype(config.model.dtype if name == "auto" else name, device)


def _load_native(
    config: EngineConfig,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    attention: AttentionSpec,
    parallel: ParallelState,
    on_progress: ProgressCallback,
    kept_layers: Sequence[int] | None,
    packed: PackedFile | None,
) -> NativeDecoder | None:
    """Return the model as a native program; None if that is not supported and not required."""
    if is_torch_loaded():
        # The native program has its own threads, which spinning threads of torch would slow down.
        torch.set_num_threads(1)
    num_threads = count_threads(config)
    try:
        decoder = NativeDecoder(
            spec,
            checkpoint,
            NativeAttention(attention),
            dtype=configured_dtype(config.model.dtype, attention.device),
            max_model_len=config.model.max_model_len,
            shard=parallel.shard(spec),
            on_progress=on_progress,
            quantization=config.model.quantization,
            # Converting to bfloat16 would drop three bits of each number. With AMX it is done nevertheless, because
            # products in bfloat16 are many times as fast.
            keeps_float16=config.model.dtype == "auto" and instruction_set() != "AMX",
            num_threads=num_threads,
            loras=_new_loras(config),
            places_embeddings=config.model.enable_prompt_embeds,
            kept_layers=kept_layers,
            packed=packed,
        )
    except NotSupportedNatively as reason:
        if config.device.cpu_backend is CPUBackend.NATIVE:
            raise ConfigError(f"--cpu-backend native: {reason}") from reason
        if parallel.is_output_rank:
            logger.warning("%s; falling back to torch, which is several times slower", reason)
        return None
    if parallel.is_output_rank:
        logger.info("CPU kernels: %s, threads: %d", instruction_set(), num_threads)
        if packed is not None and packed.mapped_bytes:
            logger.info("mapped the packed weights of an earlier start: %s", packed.path)
    return decoder
