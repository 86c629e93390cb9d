"""Choose the attention backend at startup."""

from typing import Literal, TypeAlias

from ...protocol.errors import ConfigError
from ..device.dtypes import dtype_name
from .interface import AttentionBackend, AttentionSpec, DeviceAttention

BackendName: TypeAlias = Literal["torch_paged", "triton_paged", "triton_batch_invariant"]


def attention_backend(spec: AttentionSpec, name: BackendName | None = None) -> DeviceAttention:
    """Return the backend `name`, or the best one for the device.

    Raises:
        ConfigError: Triton is required but not installed, or the model's attention does not support the configuration.
    """
    if spec.is_compressed:
        return _compressed_cache(spec, name)
    if name is None:
        # The kernels do not support encoders, strides between blocks, distance biases or indexers.
        is_supported = spec.is_causal and not (spec.tensor_elements or spec.has_distance_biases)
        is_supported = is_supported and not (spec.index_dim or spec.has_prompt_windows)
        is_supported = is_supported and spec.device.type == "cuda"
        if is_supported and (backend := _with_library(spec)) is not None:
            return backend
        name = "triton_paged" if is_supported else "torch_paged"
    if spec.index_dim and name != "torch_paged":
        raise ConfigError(
            f"the attention backend {name} does not support sparse attention; remove --batch-invariant, or set "
            "--max-model-len to the number of tokens that the model's indexer chooses"
        )
    if spec.has_prompt_windows and name != "torch_paged":
        raise ConfigError(
            f"the attention backend {name} does not support windows of output tokens alone; remove --batch-invariant"
        )
    if spec.has_distance_biases and name != "torch_paged":
        raise ConfigError(
            f"the attention backend {name} does not support scores or sinks that depend on distances or queries, as "
            "this model has them; remove --batch-invariant"
        )
    return _backend_class(name)(spec)


def _compressed_cache(spec: AttentionSpec, name: BackendName | None) -> DeviceAttention:
    if name is not None:
        raise ConfigError("--batch-invariant does not support compressed attention; remove it")
    if spec.dtype.itemsize < 2:
        raise ConfigError(
            f"compressed attention does not support a KV cache of {dtype_name(spec.dtype)}; set --kv-cache-dtype auto"
        )
    # Imported here, because a worker without torch needs only the interface.
    from .compressed import CompressedCache

    return CompressedCache(spec)


def _with_library(spec: AttentionSpec) -> AttentionBackend | None:
    """Return Triton attention that leaves long prompts to torch; None if that is not possible."""
    from .library_prompts import library_prompts

    library = library_prompts(spec)
    if library is None:
        return None
    try:
        from .long_prompts import LongPromptAttention
    except ModuleNotFoundError:
        return None
    return LongPromptAttention(spec, library)


def _backend_class(name: BackendName) -> type[AttentionBackend]:
    # Imported here, because a worker without torch needs only the interface.
    if name == "torch_paged":
        from .torch_paged import TorchPagedAttention

        return TorchPagedAttention
    try:
        from .batch_invariant import BatchInvariantAttention
        from .triton_paged import TritonPagedAttention
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the attention backend {name} needs {error.name}: pip install 'engine-serve[cuda]'"
        ) from error
    triton = {
        "triton_paged": TritonPagedAttention,
        "triton_batch_invariant": BatchInvariantAttention,
    }
    return triton[name]
