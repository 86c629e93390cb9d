"""Read the keys of a GGUF file's metadata by type."""

from collections.abc import Callable
from copy import copy
from typing import Any, Self, TypeAlias

import numpy as np

from ...errors import CheckpointError
from ..config_fields import ConfigFields
from ..gguf import GGMLQuantizationType, GGUFFile


class GGUFFields(ConfigFields):
    """The keys of a GGUF file's metadata that begin with `prefix`."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value. A list with an equal number for each layer is returned as that number."""
        value = self.config.get(self.prefix + name)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, float):
            with np.errstate(over="ignore"):
                value = float(str(np.float32(value)))
        return default if value is None else value

    def optional_integer(self, name: str) -> int | None:
        """Return an integer, or None if the key is absent or its value is 0."""
        return self.integer(name, 0, minimum=0) or None

    def optional_positive(self, name: str) -> float | None:
        """Return a number, or None if the key is absent or its value is 0."""
        return self.number(name, 0) or None


class ModelFields(GGUFFields):
    """The metadata keys of one architecture, with access to the file's tensors."""

    def __init__(self, gguf: GGUFFile, architecture: str) -> None:
        super().__init__(gguf.metadata, gguf.path, f"{architecture}.")
        self.gguf = gguf

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor."""
        return name in self.gguf.tensors

    def has_tensor_of_a_layer(self, name: str) -> bool:
        """Return whether at least one layer has a tensor of this name."""
        return any(self.has_tensor(f"blk.{i}.{name}") for i in range(self.num_layers))

    def floats(self, tensor_name: str) -> list[float]:
        """Return the elements of a float32 tensor. Raise CheckpointError if there is no such tensor."""
        tensor = self.gguf.tensors.get(tensor_name)
        if tensor is None or tensor.ggml_type is not GGMLQuantizationType.F32:
            raise CheckpointError(self.gguf.path, f"there is no F32 tensor {tensor_name!r}")
        return [float(str(x)) for x in self.gguf.data(tensor).view("<f4")]

    @property
    def num_layers(self) -> int:
        """The number of layers, including those for multi-token prediction."""
        return self.layer_count("block_count")

    def of_layers(self, name: str, count: int | None = None) -> list[int]:
        """Return an integer for each layer, or for the first `count` ones.

        The file has one value for all layers, or a list with one for each or for each of the first `count`.
        """
        values, all_layers = self.config.get(self.prefix + name), self.num_layers
        count = all_layers if count is None else count
        if isinstance(values, np.ndarray) and (values.size > 1 or values.size == count):
            if values.dtype.kind not in "iub" or len(values) not in (count, all_layers):
                raise self.wrong(name, "a list with an integer for each layer", values.tolist())
            return [int(value) for value in values[:count]]
        return [self.integer(name, minimum=0)] * count

    def with_largest(self, *names: str) -> Self:
        """Return these fields with each of the named lists of one integer per layer replaced by its largest integer."""
        keys = [key for key in self.config if key.startswith(self.prefix)]
        lists = [name for name in names if isinstance(self.get(name), np.ndarray)]
        largest = {self.prefix + name: self.largest(name) for name in lists}
        fields = copy(self)
        fields.config = {key: self.config[key] for key in keys} | largest
        return fields

    def largest(self, name: str, default: int | None = None) -> int:
        """Return the maximum of an integer over all layers, which must be positive."""
        if default is not None and self.get(name) is None:
            return default
        values = self.of_layers(name)
        if min(values) < 0 or max(values) < 1:
            raise self.wrong(name, "positive for some layer", values)
        return max(values)

    @property
    def num_heads(self) -> int:
        """The number of query heads. Without attention, the number of RWKV's or Mamba-2's heads, or the rank of steps.

        All layers that attend have the same number.
        """
        if (size := self.optional_integer("wkv.head_size")) is not None:
            return self.integer("embedding_length") // size
        name = "ssm.time_step_rank" if self.is_purely_recurrent else "attention.head_count"
        return self.largest(name)

    @property
    def is_purely_recurrent(self) -> bool:
        """True if no layer has attention or an MLP, so that their sizes are 0 in the file."""
        return self.prefix in ("mamba.", "mamba2.")

    @property
    def head_dim(self) -> int:
        """The number of elements of a query head."""
        head_dim = self.integer(
            "attention.key_length", self.integer("embedding_length") // self.num_heads
        )
        if head_dim == 0:
            raise CheckpointError(
                self.gguf.path,
                f"the embedding is narrower than the number of heads, {self.num_heads}",
            )
        return head_dim


Translate: TypeAlias = Callable[[ModelFields], dict[str, Any]]
"""A function that returns the config fields that an architecture adds to the common ones, or overrides."""
