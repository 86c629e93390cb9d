"""Read the tensors of a vision tower, and check their shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.errors import CheckpointError
from ..layers.activations import ACTIVATIONS, NAMES_IN_CONFIGS
from ..loaders import Checkpoint, DummyCheckpoint
from ..loaders.dummy import made_up
from ..loaders.tensor_names import TensorNames, translate_names


class Norm(msgspec.Struct):
    """A norm over the last dimension: a layer norm, or a root-mean-square norm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    is_rms: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normed tensor."""
        shape = self.weight.shape
        if self.is_rms:
            return F.rms_norm(x, shape, self.weight, self.eps)
        return F.layer_norm(x, shape, self.weight, self.bias, self.eps)


class Linear(msgspec.Struct):
    """A product with a matrix [rows, columns]. `bounds` limit its inputs (first two) and its outputs."""

    weight: Tensor
    bias: Tensor | None = None
    bounds: Tensor | None = None

    @classmethod
    def join(cls, linears: Sequence[Linear]) -> Linear:
        """Return one product that concatenates the outputs of several products without bounds."""
        biases = [each.bias for each in linears if each.bias is not None]
        weight = torch.cat([each.weight for each in linears])
        return cls(weight, torch.cat(biases) if biases else None)

    def split(self, count: int) -> list[Linear]:
        """Return `count` products that have equal parts of the outputs."""
        weights = self.weight.chunk(count)
        if self.bias is None:
            return [Linear(weight) for weight in weights]
        return [Linear(*part) for part in zip(weights, self.bias.chunk(count), strict=True)]

    def repeat_heads(self, head_dim: int, count: int) -> Linear:
        """Return a product in which each group of `head_dim` outputs occurs `count` times in a row."""
        rows = torch.arange(len(self.weight), device=self.weight.device).view(-1, 1, head_dim)
        order = rows.expand(-1, count, -1).flatten()
        return Linear(self.weight[order], None if self.bias is None else self.bias[order])

    def reorder_heads(self, order_K: Tensor) -> Linear:
        """Return a product whose outputs have another order in each head."""
        index = torch.arange(len(self.weight), device=self.weight.device).view(-1, len(order_K))
        order = index[:, order_K.to(index.device)].flatten()
        return Linear(self.weight[order], None if self.bias is None else self.bias[order])

    def scale_outputs(self, factors: Tensor) -> None:
        """Multiply each output by a factor, by scaling the rows of the matrix."""
        self.weight.mul_(factors[:, None])
        if self.bias is not None:
            self.bias.mul_(factors)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        if self.bounds is None:
            return F.linear(x, self.weight, self.bias)
        x = F.linear(x.clamp(*self.bounds[:2]), self.weight, self.bias)
        return x.clamp(*self.bounds[2:])


def attend(q: Tensor, k: Tensor, v: Tensor, num_heads: int) -> Tensor:
    """Return the attention output [..., Q, D] of queries [..., Q, D] to keys and values [..., P, D]."""
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(-3, -2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)


def find_activation(checkpoint: Checkpoint, name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation with this name. Raise CheckpointError if the name is unknown."""
    check_activation(checkpoint, name)
    return activation(name)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation with this name, which `check_activation` accepts."""
    return ACTIVATIONS[NAMES_IN_CONFIGS[name]]


def check_activation(checkpoint: Checkpoint, name: str) -> None:
    """Raise CheckpointError if there is no activation of this name."""
    if NAMES_IN_CONFIGS.get(name) not in ACTIVATIONS:
        raise CheckpointError(
            checkpoint.config_path,
            f"the activation {name!r} of the vision tower is not supported; "
            f"supported are {', '.join(sorted(NAMES_IN_CONFIGS))}",
        )


class VisionWeights:
    """The tensors that have the same prefix as the tensor `marker`. `tensor_names` translates all names.

    Attributes:
        dtype: The dtype of the tensors that are read.

    Raises:
        CheckpointError: There is no such tensor.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        marker: str,
        device: torch.device,
        dtype: torch.dtype,
        tensor_names: TensorNames = (),
    ) -> None:
        self._stored = translate_names(checkpoint.names(), tensor_names)
        found = next((name for name in sorted(self._stored) if name.endswith(marker)), None)
        if found is None and not isinstance(checkpoint, DummyCheckpoint):
            raise CheckpointError(checkpoint.path, f"there is no tensor named '...{marker}'")
        self._prefix = (found or "").removesuffix(marker)
        self._checkpoint = checkpoint
        self._device, self.dtype = device, dtype

    def __contains__(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor."""
        return self._prefix + name in self._stored

    def read(self, name: str, *shape: int) -> Tensor:
        """Return a tensor that has this shape, apart from dimensions of size 1.

        Raises:
            CheckpointError: It is missing or has another shape.
        """
        name = self._prefix + name
        if isinstance(self._checkpoint, DummyCheckpoint):
            return made_up(name, shape, self.dtype, self._device)
        stored = self._stored_name(name, shape)
        return self._checkpoint.tensor(stored, self.dtype).to(self._device).view(shape)

    def _stored_name(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the checkpoint's name of a tensor that has this shape, apart from dimensions of size 1."""
        stored = self._stored.get(name)
        if stored is None:
            raise self._checkpoint.missing(name)
        found = tuple(self._checkpoint.shape(stored))
        if [size for size in found if size > 1] != [size for size in shape if size > 1]:
            raise CheckpointError(
                self._checkpoint.path,
                f"the tensor {stored!r} has shape {list(found)}, the config needs {list(shape)}",
            )
        return stored

    def read_table(self, name: str, columns: int) -> Tensor:
        """Return a matrix with any number of rows.

        Raises:
            CheckpointError: It is missing or has another number of columns.
        """
        stored = self._stored.get(self._prefix + name)
        rows = 1 if stored is None else self._checkpoint.shape(stored)[0]
        return self.read(name, rows, columns)

    def read_rows(self, name: str, rows: Sequence[int], num_rows: int, columns: int) -> Tensor:
        """Return some rows of a matrix [num_rows, columns], without reading the others.

        Raises:
            CheckpointError: It is missing or has another shape.
        """
        name = self._prefix + name
        if isinstance(self._checkpoint, DummyCheckpoint):
            return made_up(name, (len(rows), columns), self.dtype, self._device)
        stored = self._stored_name(name, (num_rows, columns))
        parts = [
            self._checkpoint.tensor(stored, self.dtype, part=range(row, row + 1)) for row in rows
        ]
        return torch.cat(parts).to(self._device)

    def read_linear(
        self, name: str, rows: int, columns: int, *, has_bias: bool = True, clips: bool = False
    ) -> Linear:
        """Return a product. If `clips`, it has bounds."""
        weight = self.read(f"{name}.weight", rows, columns)
        bias = self.read(f"{name}.bias", rows) if has_bias else None
        bounds: Tensor | None = None
        if clips:
            names = ("input_min", "input_max", "output_min", "output_max")
            bounds = torch.stack([self.read(f"{name}.{each}") for each in names])
        return Linear(weight, bias, bounds)

    def read_joined(self, prefix: str, size: int) -> list[Linear]:
        """Return the products of an attention to queries, keys and values, which are stored as one."""
        weight = self.read(f"{prefix}in_proj_weight", 3 * size, size)
        return Linear(weight, self.read(f"{prefix}in_proj_bias", 3 * size)).split(3)

    def read_norm(self, name: str, size: int, kind: Literal["layer", "rms"], eps: float) -> Norm:
        """Return a norm."""
        if kind == "rms":
            return self.read_rms_norm(name, size, eps)
        return self.read_layer_norm(name, size, eps)

    def read_layer_norm(self, name: str, size: int, eps: float, *, has_bias: bool = True) -> Norm:
        """Return a layer norm."""
        weight = self.read(f"{name}.weight", size)
        bias = self.read(f"{name}.bias", size) if has_bias else None
        return Norm(weight, bias, eps, is_rms=False)

    def read_rms_norm(self, name: str, size: int, eps: float, offset: float = 0.0) -> Norm:
        """Return an RMS norm. `offset` is added to its weights."""
        return Norm(self.read(f"{name}.weight", size) + offset, None, eps, is_rms=True)
