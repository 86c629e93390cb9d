"""Chooses what executes the model: the native program on a CPU that has one, torch otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..protocol.arrays import Int32Array
from ..protocol.config import CPUBackend, EngineConfig, SpeculativeConfig
from ..protocol.errors import ConfigError
from ..protocol.model_dimensions import check_parallel
from .attention import AttentionSpec, PagedAttention, attention_backend
from .attention.graph_break import BreakingAttention
from .batch import PersistentBatch
from .cpu.attention import NativeAttention
from .cpu.decoder import NativeDecoder
from .cpu.decoding import NativeDecoding
from .cpu.library import NotSupportedNatively, instruction_set
from .device import has_float8, resolve_dtype, usable_cores
from .kv_cache_groups import group_layers
from .loaders import Checkpoint
from .models.decoder import Decoder
from .models.families import model_spec
from .models.layers import LayerKernels
from .models.shard import ModelShard
from .models.spec import ModelSpec
from .parallel_state import ParallelState
from .sampling import Sampler, SamplerOutput

logger = logging.getLogger(__name__)


class Model(Protocol):
    """What the model runner needs. T tokens of a step, S of them sampled, D hidden size, V vocabulary."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def shard(self) -> ModelShard: ...

    @property
    def attention(self) -> PagedAttention: ...

    @property
    def hidden_dtype(self) -> torch.dtype: ...

    def forward(
        self,
        inputs: Tensor,
        positions_T: Tensor,
        kv_caches: Sequence[Tensor],
        attn_metadata: Sequence[Any],
    ) -> Tensor:
        """Fill the KV caches and return the hidden states [T, D] after the last layer that is here.

        `inputs` are token ids [T] for the first stage of a pipeline, hidden states [T, D] for the others.
        """

    def compute_logits(self, hidden_SD: Tensor) -> Tensor:
        """Return float32 logits [S, V]."""

    def make_sampler(self, batch: PersistentBatch) -> Sampler:
        """Return what samples for the requests of `batch`, as `forward_and_sample` does from then on."""

    def forward_and_sample(
        self,
        inputs: Tensor,
        positions_T: Tensor,
        kv_caches: Sequence[Tensor],
        attn_metadata: Sequence[Any],
        rows_S: Int32Array,
        slots_S: Int32Array,
    ) -> SamplerOutput:
        """Fill the KV caches, and sample from the logits of `forward`'s rows `rows_S` for these slots."""

    def decoding(
        self,
        batch: PersistentBatch,
        kv_caches: Sequence[Tensor],
        speculative: SpeculativeConfig | None = None,
    ) -> NativeDecoding | None:
        """Return what decodes the requests of `batch` faster than `forward_and_sample` does, if there is such a thing.

        With `speculative` it finds drafts, and verifies them.
        """


def load_model(
    config: EngineConfig,
    device: torch.device,
    checkpoint: Checkpoint,
    on_progress: Callable[[int, int], None],
    parallel: ParallelState,
    breaks_graphs: bool = False,
) -> Model:
    """With `breaks_graphs` the attention can be left out of graphs that are captured.

    Raises CheckpointError for a checkpoint that cannot be served, ConfigError when `--cpu-backend native` cannot
    be had.
    """
    spec = group_layers(
        model_spec({**checkpoint.config, **config.model.hf_overrides}, checkpoint.config_path),
        config.model.max_model_len,
    )
    check_parallel(spec.dimensions, config.parallel)
    shard = parallel.shard(spec)
    dtype = resolve_dtype(config.model.dtype, device)
    kv_dtype = config.cache.kv_cache_dtype
    if kv_dtype.startswith("fp8") and not has_float8(device):
        raise ConfigError(
            f"--kv-cache-dtype {kv_dtype} needs a GPU that computes with float8, of compute capability 8.9 or later; "
            "on the CPU there is int8"
        )
    attention_spec = AttentionSpec.of(
        spec,
        shard,
        block_size=config.cache.block_size,
        dtype=dtype if kv_dtype == "auto" else resolve_dtype(kv_dtype, device),
        device=device,
    )
    common: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "max_model_len": config.model.max_model_len,
        "shard": shard,
        "on_progress": on_progress,
    }
    backend = config.device.cpu_backend
    num_workers = config.parallel.num_workers
    if device.type == "cpu" and backend is not CPUBackend.TORCH:
        # The native program has its own threads; torch's would only spin beside them.
        torch.set_num_threads(1)
        num_threads = config.device.threads or max(1, usable_cores() // num_workers)
        try:
            decoder = NativeDecoder(
                spec,
                checkpoint,
                NativeAttention(attention_spec),
                **common,
                quantization=config.model.quantization,
                num_threads=num_threads,
            )
            if parallel.is_output_rank:
                logger.info("kernels for %s, threads: %d", instruction_set(), num_threads)
            return decoder
        except NotSupportedNatively as reason:
            if backend is CPUBackend.NATIVE:
                raise ConfigError(f"--cpu-backend native: {reason}") from reason
            if parallel.is_output_rank:
                logger.warning("%s; running on plain torch, which is several times slower", reason)
    if config.model.quantization is not None:
        raise ConfigError(
            f"--quantization {config.model.quantization} needs the native CPU backend, "
            "which does not run here"
        )
    if kv_dtype == "int8":
        raise ConfigError(
            "--kv-cache-dtype int8 needs the native CPU backend, which does not run here"
        )
    # OpenMP's threads spin at barriers: when the frontend or the core wants the core that one of them holds, every
    # operation waits for a time slice. Leaving them a core of their own is faster than using it.
    torch.set_num_threads(config.device.threads or max(1, (usable_cores() - 1) // num_workers))
    is_batch_invariant = config.device.batch_invariant
    if is_batch_invariant and device.type == "cuda":
        attention = attention_backend(attention_spec, "triton_batch_invariant")
    else:
        attention = attention_backend(attention_spec)
    if breaks_graphs:
        attention = BreakingAttention(attention)
    kernels = _layer_kernels(dtype, device, is_batch_invariant)
    return Decoder(spec, checkpoint, attention, kernels=kernels, **common)


def _layer_kernels(
    dtype: torch.dtype, device: torch.device, is_batch_invariant: bool
) -> LayerKernels:
    if device.type != "cuda":
        return LayerKernels()
    # Triton comes with torch for CUDA; on a CPU there need be none.
    from .cuda.layers import TritonKernels

    return TritonKernels(
        dtype, has_float8=has_float8(device), is_batch_invariant=is_batch_invariant
    )
