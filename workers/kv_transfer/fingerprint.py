"""The fingerprint of a worker's KV cache: a hash of all that determines the bytes of blocks, except content keys."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final, Protocol

import msgspec
import torch

from ...protocol.checkpoint.content_hash import hash_content
from ...protocol.config import EngineConfig, LoadFormat, ModelConfig
from ..attention import PagedAttention
from ..cpu.attention import NativeAttention
from ..cpu.library import LIBRARY_PATH, instruction_set
from ..device.dtypes import HostDtype
from ..layers.spec import ModelSpec

NUMERICS_VERSION: Final = 1
"""Version of the numerics and layout; increase it whenever the bytes stored for the same tokens change.

Changes of the native library need no new version, because the library's bytes are part of the fingerprint.
"""


class FingerprintedModel(Protocol):
    """The properties of a model on which the fingerprint depends."""

    @property
    def spec(self) -> ModelSpec:
        """The spec of the whole model, not only of this worker's layers."""

    @property
    def attention(self) -> PagedAttention:
        """The attention backend, which lays out the blocks."""

    @property
    def hidden_dtype(self) -> torch.dtype | HostDtype:
        """The dtype of hidden states."""


def cache_fingerprint(config: EngineConfig, model: FingerprintedModel, rank: int) -> bytes:
    """Return the fingerprint of the blocks of one worker, 32 bytes.

    If fingerprints are equal, blocks with equal content keys have equal bytes, on any machine.
    """
    parallel = config.parallel
    shape = model.attention.kv_cache_shape(1)
    sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, rank)
    facts = _facts(config, model, shape, sizes)
    return hashlib.sha256(b"engine.kv.v1" + msgspec.msgpack.encode(facts)).digest()


def divided_fingerprint(config: EngineConfig, model: FingerprintedModel, rank: int) -> bytes:
    """Return the fingerprint of the blocks of all tensor-parallel ranks of a pipeline stage, 32 bytes.

    It does not depend on their number. With different numbers, the bytes of a block are equal but for rounding errors.
    """
    parallel = config.parallel
    stage = rank // parallel.tensor_parallel_size
    facts = _facts(config, model, (), (parallel.pipeline_parallel_size, stage))
    return hashlib.sha256(b"engine.kv.divided.v1" + msgspec.msgpack.encode(facts)).digest()


def _facts(
    config: EngineConfig,
    model: FingerprintedModel,
    cache_shape: tuple[int, ...],
    sizes: tuple[int, ...],
) -> tuple[object, ...]:
    attention, parallel = model.attention, config.parallel
    is_native = isinstance(attention, NativeAttention)
    device = "cpu" if attention.device.type == "cpu" else torch.cuda.get_device_name()
    return (
        NUMERICS_VERSION,
        [file.content for file in config.model.weight_files],
        config.model.seed if config.model.load_format is LoadFormat.DUMMY else None,
        config.model.quantization,
        repr(model.spec),
        hash_config_files(config.model),
        _describe_head(config),
        type(model).__name__,
        type(attention).__name__,
        (cache_shape, str(attention.dtype), config.cache.block_size),
        str(model.hidden_dtype),
        sizes,
        parallel.data_parallel_size if parallel.enable_expert_parallel else 0,
        config.cache.prefix_hash.value,
        (device, config.device.batch_invariant),
        (instruction_set(), _hash_file(os.fspath(LIBRARY_PATH)))
        if is_native
        else str(torch.__version__),
    )


def hash_config_files(model: ModelConfig) -> bytes:
    """Return a hash of all that configures a model and its inputs, besides the headers of weights.

    It covers what no spec contains, such as the details of a quantization, the normalization of pixels, and code of the
    checkpoint. The tokenizer is not part of it, because blocks are found by their tokens.
    """
    directory = Path(model.path)
    files = {*directory.glob("*config.json"), *directory.glob("params.json")}
    if model.trust_remote_code:
        files |= {*directory.glob("*.py")}
    given = (model.hf_overrides, model.images, model.videos, model.audio, model.chat_audio)
    digest = hashlib.sha256(msgspec.json.encode(given, order="deterministic"))
    for file in sorted(files):
        if file.name not in _OTHER_CONFIGS:
            digest.update(hashlib.sha256(file.name.encode() + b"\0" + file.read_bytes()).digest())
    return digest.digest()


_OTHER_CONFIGS: Final = frozenset({"generation_config.json", "tokenizer_config.json"})


def _describe_head(config: EngineConfig) -> tuple[str, list[bytes]] | None:
    """Return text that identifies the drafting head whose keys and values are in the blocks; None without one."""
    speculative = config.scheduler.speculative
    if speculative is None or not speculative.method.reads_hidden_states:
        return None
    files: list[Path] = []
    if speculative.model is not None:
        path = Path(speculative.model)
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return speculative.method.value, [hash_content(file) for file in files]


def _hash_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
