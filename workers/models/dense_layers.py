"""Dense layers of an embedding model, which are applied to its pooled vectors (sentence-transformers' module Dense).

Shapes: I input and O output features of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from ...protocol.checkpoint.gguf import GGUFFile
from ...protocol.config.model import DenseActivation, DenseConfig, LoadFormat, ModelConfig
from ...protocol.errors import CheckpointError
from ...protocol.pooling_params import PoolingKind
from ..device.dtypes import HostDevice, torch_device
from ..loaders.dequantize import dequantize
from ..loaders.stored.saved_file import SavedFile

_ACTIVATIONS: Final[dict[DenseActivation, Callable[[Tensor], Tensor]]] = {
    DenseActivation.IDENTITY: lambda x: x,
    DenseActivation.TANH: lambda x: x.tanh(),
    DenseActivation.RELU: F.relu,
    DenseActivation.GELU: F.gelu,
}

_Layers = list[tuple[DenseConfig, Tensor, Tensor | None]]


class DenseLayers:
    """The dense layers, in float32. They read one vector at a time, so that a result does not depend on the batch."""

    def __init__(self, layers: _Layers, others: dict[PoolingKind, _Layers]) -> None:
        self._layers, self._others = layers, others

    @classmethod
    def read(cls, config: ModelConfig, device: torch.device | HostDevice) -> DenseLayers | None:
        """Return the layers of a model, or None if it has none.

        Raises:
            CheckpointError: A file is missing or damaged, or a shape is wrong.
        """
        pooler = config.pooler
        if not pooler.dense and not pooler.other_dense:
            return None
        read = _make_up if config.load_format is LoadFormat.DUMMY else _read
        device = torch_device(device)

        def read_all(layers: Sequence[DenseConfig]) -> _Layers:
            return [(layer, *read(layer, device)) for layer in layers]

        others = {kind: read_all(layers) for kind, layers in pooler.other_dense.items()}
        return cls(read_all(pooler.dense), others)

    @torch.inference_mode()
    def __call__(self, vector_I: Tensor, kind: PoolingKind) -> Tensor:
        """Return the last layer's output [O] for a result of this kind."""
        for layer, weight_OI, bias_O in self._others.get(kind, self._layers):
            vector_I = _ACTIVATIONS[layer.activation](F.linear(vector_I, weight_OI, bias_O))
        return vector_I


def _read(layer: DenseConfig, device: torch.device) -> tuple[Tensor, Tensor | None]:
    if Path(layer.path).suffix == ".gguf":
        gguf = GGUFFile(layer.path)
        tensor = gguf.tensors[f"{layer.module}.weight"]
        rows = gguf.data(tensor).reshape(tensor.shape[0], -1)
        return dequantize(rows, tensor.ggml_type, torch.float32).to(device), None
    prefix = f"{layer.module}." if layer.module else ""
    try:
        is_safe = layer.path.endswith(".safetensors")
        read = _read_safe(layer.path) if is_safe else SavedFile(Path(layer.path)).get_tensor
        weight_OI = read(f"{prefix}weight").float().to(device)
        bias_O = read(f"{prefix}bias").float().to(device) if layer.has_bias else None
    except (
        OSError,
        SafetensorError,
        KeyError,
        ValueError,
        RuntimeError,
    ) as error:
        raise CheckpointError(
            layer.path, f"the weights are missing or damaged ({error}); download them again"
        ) from error
    expected = [layer.out_features, layer.in_features]
    if list(weight_OI.shape) != expected or (bias_O is not None and len(bias_O) != expected[0]):
        raise CheckpointError(
            layer.path,
            f"{prefix}weight has the shape {list(weight_OI.shape)}, not {expected}",
        )
    return weight_OI, bias_O


def _read_safe(path: str) -> Callable[[str], Tensor]:
    file: Any = safe_open(path, framework="pt")
    read: Callable[[str], Tensor] = file.get_tensor
    return read


def _make_up(layer: DenseConfig, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return random weights, for `LoadFormat.DUMMY`."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(layer.out_features, layer.in_features, generator=generator)
    return (weight_OI * layer.in_features**-0.5).to(device), None
