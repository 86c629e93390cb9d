"""Load a model whose layers run in torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from msgspec.structs import replace

from ...protocol.config import EngineConfig
from ...protocol.errors import ConfigError
from ..attention import AttentionSpec, as_backend, attention_backend
from ..device.device import has_float8, usable_cores
from ..device.dtypes import configured_dtype, torch_device, torch_dtype
from ..layers.layers import LayerKernels
from ..layers.spec import ModelSpec
from ..loaders import Checkpoint
from ..models.decoder import Decoder
from ..models.foreign.decoder import TransformersDecoder, TransformersModel
from ..models.lora.adapters import LoraAdapters
from ..models.torch_decoder import TorchDecoder
from ..models.weights import ProgressCallback
from .parallel_state import ParallelState

logger = logging.getLogger(__name__)


def load_in_torch(
    config: EngineConfig,
    spec: ModelSpec,
    foreign: TransformersModel | None,
    checkpoint: Checkpoint,
    attention: AttentionSpec,
    parallel: ParallelState,
    on_progress: ProgressCallback,
    loras: LoraAdapters | None,
    kept_layers: Sequence[int] | None,
) -> TorchDecoder:
    """Load the layers of a model. If `foreign`, a model of transformers, is given, load its layers instead of Engine's.

    Raises:
        CheckpointError: The model is not supported, or its files are damaged.
        ConfigError: The configuration needs a native program.
    """
    device, dtype = (
        torch_device(attention.device),
        torch_dtype(configured_dtype(config.model.dtype)),
    )
    attention = replace(attention, dtype=torch_dtype(attention.dtype), device=device)
    _check(config, attention)
    if foreign is not None:
        decoder = TransformersDecoder(
            foreign, spec, as_backend(attention_backend(attention)), dtype=dtype
        )
        decoder.check()
        logger.info("using transformers' layers: %s", spec.model_type)
        return decoder
    is_batch_invariant = config.device.batch_invariant
    if is_batch_invariant and device.type == "cuda":
        backend = attention_backend(attention, "triton_batch_invariant")
    else:
        backend = attention_backend(attention)
    return Decoder(
        spec,
        checkpoint,
        backend,
        dtype=dtype,
        device=device,
        max_model_len=config.model.max_model_len,
        shard=parallel.shard(spec),
        kernels=layer_kernels(dtype, device, is_batch_invariant),
        on_progress=on_progress,
        loras=loras,
        kept_layers=kept_layers,
    )


def _check(config: EngineConfig, attention: AttentionSpec) -> None:
    """Set the number of threads, and reject configurations that only native programs support."""
    if config.model.quantization is not None:
        raise ConfigError(
            f"--quantization {config.model.quantization} needs the native CPU backend, "
            "which is not available"
        )
    if attention.dtype == torch.int8:
        raise ConfigError(
            "--kv-cache-dtype int8 needs the native CPU backend, which is not available"
        )
    # OpenMP's threads spin at barriers. If the frontend or the engine core needs a CPU core on which one of them spins,
    # every operation waits for a time slice. Leaving one core to these processes is faster.
    torch.set_num_threads(
        config.device.threads or max(1, (usable_cores() - 1) // config.parallel.num_workers)
    )


def layer_kernels(
    dtype: torch.dtype, device: torch.device, is_batch_invariant: bool
) -> LayerKernels:
    """Return the implementations of a layer's operations for a device."""
    if device.type != "cuda":
        return LayerKernels()
    # Imported here, because Triton is installed only with torch for CUDA.
    from ..cuda.layers import TritonKernels

    return TritonKernels(
        dtype, has_float8=has_float8(device), is_batch_invariant=is_batch_invariant
    )
