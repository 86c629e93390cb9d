"""A checkpoint whose tensors have trained factors, which are multiplied into them while they are read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import msgspec
import torch

from ...protocol.checkpoint.config_fields import ConfigFields
from .checkpoint import Checkpoint, Floats
from .quantization.matrix import QuantizedMatrix


class RowFactors(msgspec.Struct, frozen=True):
    """Factors on the rows of the tensors whose names match `tensor`.

    The vector whose name results from replacing the match by `vector`, times `scale`, to the power of `power`, has a
    factor for each row, or one for all rows. If `vector` is empty, the tensor itself is that vector, and is replaced by
    these factors. If it `normalizes`, there is no vector: each row of the tensor is divided by its Euclidean norm.
    """

    tensor: str
    vector: str
    scale: float = 1.0
    power: int = 1
    normalizes: bool = False


class FactoredCheckpoint(Checkpoint):
    """Another checkpoint with factors on the rows of some tensors, which are therefore never kept quantized.

    `names` maps the names by which `factors` call tensors to those in the checkpoint.
    """

    def __init__(
        self, checkpoint: Checkpoint, factors: Collection[RowFactors], names: Mapping[str, str]
    ) -> None:
        super().__init__(checkpoint.path, ConfigFields(checkpoint.config, checkpoint.config_path))
        self._checkpoint = checkpoint
        self.place = checkpoint.place
        self._rules: dict[str, tuple[str, RowFactors]] = {}
        self.vectors: set[str] = set()
        """The names, as `factors` call them, of vectors that are not read for themselves."""
        for rule in factors:
            for name in names:
                vector = re.sub(rule.tensor, rule.vector or r"\g<0>", name)
                if re.search(rule.tensor, name) and vector in names:
                    self._rules[names[name]] = names[vector], rule
                    self.vectors |= {vector} - {name}

    def names(self) -> Collection[str]:
        """See `Checkpoint.names`."""
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint.shape`."""
        return self._checkpoint.shape(name)

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        part: range | None = None,
        dim: int = 0,
    ) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        if name not in self._rules:
            result = self._checkpoint.tensor(name, dtype, part=part, dim=dim)
            self.bytes_read = self._checkpoint.bytes_read
            return result
        vector, rule = self._rules[name]
        if rule.normalizes:
            if dim:
                raise ValueError(f"{name}: a part of each row has no norm")
            matrix = self._checkpoint.tensor(name, torch.float32, part=part)
            self.bytes_read = self._checkpoint.bytes_read
            normed = torch.nn.functional.normalize(matrix)
            return normed if dtype is None else normed.to(dtype)
        is_number = self._checkpoint.shape(vector) == (1,)
        rows = None if dim or is_number else part
        read = self._checkpoint.tensor(vector, torch.float32, part=rows)
        factors = (read * rule.scale) ** rule.power
        if vector != name:
            matrix = self._checkpoint.tensor(name, torch.float32, part=part, dim=dim)
            factors = factors[:, None] * matrix
        self.bytes_read = self._checkpoint.bytes_read
        return factors if dtype is None else factors.to(dtype)

    def floats(self, name: str, *, part: range | None = None, dim: int = 0) -> Floats | None:
        """See `Checkpoint.floats`."""
        if name in self._rules:
            values = self.tensor(name, torch.float32, part=part, dim=dim)
            return Floats(values.contiguous().numpy(), "float32")
        floats = self._checkpoint.floats(name, part=part, dim=dim)
        self.bytes_read = self._checkpoint.bytes_read
        return floats

    def quantized(
        self, name: str, *, part: range | None = None, dim: int = 0
    ) -> QuantizedMatrix | None:
        """See `Checkpoint.quantized`."""
        if name in self._rules:
            return None
        matrix = self._checkpoint.quantized(name, part=part, dim=dim)
        self.bytes_read = self._checkpoint.bytes_read
        return matrix
