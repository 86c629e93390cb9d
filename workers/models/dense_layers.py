"""Dense layers of an embedding model, which are applied to its pooled vectors (sentence-transformers' module Dense).

Shapes: I input and O output features of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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

if TYPE_CHECKING:
    from zipfile import ZipFile

_ACTIVATIONS: Final[dict[DenseActivation, Callable[[Tensor], Tensor]]] = {
    DenseActivation.IDENTITY: lambda x: x,
    DenseActivation.TANH: lambda x: x.tanh(),
    DenseActivation.RELU: F.relu,
    DenseActivation.GELU: F.gelu,
}


_STORAGES: Final = {
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
}
"""The names of torch's types, because native workers import this module without torch."""
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
        read = _read_saved(layer.path) if layer.path.endswith(".pt") else _read_safe(layer.path)
        weight_OI = read(f"{prefix}weight").float().to(device)
        bias_O = read(f"{prefix}bias").float().to(device) if layer.has_bias else None
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
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


def _read_saved(path: str) -> Callable[[str], Tensor]:
    """Return the function from a name to its tensor in a file of `torch.save`.

    Pickled objects can run code when they are loaded. So this only scans the archive's description of its tensors.
    """
    # Late imports, because few models have such a file, and every worker would keep the modules in its memory.
    import pickletools
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            return _read_archive(archive, pickletools.genops)
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from error


def _read_archive(
    archive: ZipFile, parse: Callable[[bytes], Iterable[Any]]
) -> Callable[[str], Tensor]:
    tensors: dict[str, Tensor] = {}
    [description] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    name = storage = ""
    dtype: torch.dtype | None = None
    layout: list[int] | None = None
    for operation, argument, _ in parse(archive.read(description)):
        if operation.name == "GLOBAL":
            if (dtype_name := _STORAGES.get(str(argument))) is not None:
                dtype = getattr(torch, dtype_name)
        elif isinstance(argument, str):
            name = argument if argument in ("weight", "bias") else name
            storage = argument if argument.isdigit() else storage
        elif operation.name == "BINPERSID":
            layout = []
        elif operation.name == "REDUCE" and layout is not None:
            data = archive.read(f"{description.removesuffix('data.pkl')}data/{storage}")
            # The position in the storage, the sizes, and the strides.
            shape = layout[1 : 1 + len(layout) // 2]
            if dtype is None or layout != [0, *shape, *shape[1:], 1]:
                raise ValueError(f"{name} does not contain floats in the order of its rows")
            tensors[name] = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
            layout = None
        elif layout is not None and operation.name in ("BININT", "BININT1", "BININT2"):
            layout.append(int(argument or 0))
    return tensors.__getitem__


def _make_up(layer: DenseConfig, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return random weights, for `LoadFormat.DUMMY`."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(layer.out_features, layer.in_features, generator=generator)
    return (weight_OI * layer.in_features**-0.5).to(device), None
