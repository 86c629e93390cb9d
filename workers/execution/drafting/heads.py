"""Load the drafting head that the configuration names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ....protocol.config import EngineConfig, ProposerMethod
from ...cpu.decoder import NativeDecoder
from ...cpu.supported import unsupported_features
from ...layers.spec import ModelSpec
from ...loaders import Checkpoint, open_checkpoint
from ...models.weights import weight_reader
from ..kv_cache import KVCache
from ..model_loader import Model
from .assistant import is_assistant, read_assistant
from .block_head import BlockHead
from .draft_head import DraftHead, HeadSource
from .head_target import head_target
from .layered_head import LayeredHead
from .layouts.read import read_layout
from .parallel_head import ParallelHead
from .shared_cache_head import SharedCacheHead


def load_head(
    config: EngineConfig,
    model: Model,
    target_cache: KVCache,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None],
    *,
    in_torch: bool,
) -> DraftHead:
    """Load the head of `--speculative-config`.

    Args:
        config: The configuration of the engine.
        model: The model, which keeps the hidden states that the head reads.
        target_cache: Its KV cache, without memory.
        checkpoint: The model's checkpoint, which contains the head unless the configuration names another one.
        dtype: The dtype of float weights.
        on_progress: Called with (loaded bytes, total bytes).
        in_torch: If false, the head runs natively, unless native programs lack one of its operations or it reads the
            cache of a model in torch.

    Raises:
        CheckpointError: The head has another layout than the known ones, or its files are damaged.
        ConfigError: The head does not fit the model.
    """
    speculative = config.scheduler.speculative
    assert speculative is not None
    target = head_target(model, speculative.method.value)
    embed: Callable[[Tensor], Tensor] = target.embed
    if not model.shard.is_first:
        embed = _read_embedding(target.spec, checkpoint, dtype)
    if speculative.model is not None:
        checkpoint = open_checkpoint(speculative.model)
    if speculative.method is ProposerMethod.MTP and is_assistant(checkpoint):
        layout = read_assistant(target.spec, checkpoint)
    else:
        layout = read_layout(speculative, target.spec, checkpoint)
    kind = DraftHead
    if layout.reads_cache:
        kind = SharedCacheHead
        # The layout of a KV cache in torch is another one than that of a native program.
        in_torch = not isinstance(target, NativeDecoder)
    elif layout.reads_streams:
        # Native programs do not begin with streams that a head has made.
        in_torch = True
    elif layout.later:
        kind = LayeredHead
    elif layout.block_size:
        kind = BlockHead
        # Native programs have no operations for convolutions over blocks, some hyper-connections and norms of contexts.
        in_torch = (
            in_torch
            or layout.spec.hyper_connections is not None
            or layout.norms_context
            or any(layer.block_convolution for layer in layout.spec.layers)
        )
    elif layout.is_parallel:
        kind = ParallelHead
    in_torch = in_torch or bool(unsupported_features(layout.spec))
    source = HeadSource(
        config, target, target_cache, checkpoint, layout, embed, dtype, on_progress, in_torch
    )
    return kind(source)


def _read_embedding(
    spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Return a function from tokens to their embeddings, for a stage that does not embed tokens."""
    weights = weight_reader(
        checkpoint,
        dtype,
        torch.device("cpu"),
        has_head=False,
        tensor_names=spec.tensor_names,
        is_transposed=spec.has_transposed_matrices,
    )
    rows = spec.vocab_size + spec.num_unused_embeddings
    embedding_VD = weights.read("embed_tokens.weight", rows, spec.hidden_size)
    scale = spec.rounded_embedding_scale(dtype)
    return lambda ids_T: embedding_VD[ids_T].float() * scale
