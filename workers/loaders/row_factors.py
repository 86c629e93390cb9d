"""A checkpoint whose tensors have trained factors, which are multiplied into them while they are read."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

import msgspec
import torch

from ...protocol.checkpoint.config_fields import ConfigFields
from .checkpoint import Checkpoint, Floats
from .quantization.matrix import QuantizedMatrix
from .quantization.row_tables import RowTable

_LONGEST = 10_000.0
"""The quotient of the highest and the lowest frequency of a delay's embedding."""


class RowFactors(msgspec.Struct, frozen=True):
    """Factors on the rows of the tensors whose names match the regular expression `tensor`.

    The factors are (scale * v) ** power, where v is a stored vector with one number for each row, or one for all rows.
    Its name is that of the tensor, with the match replaced by `vector`. If `vector` is empty, the tensor itself is v,
    and is replaced by its factors. If `normalizes`, there is no vector: each row is divided by its Euclidean norm.

    If `delay` is not 0, v is not stored. It is 1 + B gelu(A t), where t has the cosines and sines of the delay with
    falling frequencies. `vector`, with 1 and 2 for "{}", gives the names of A and B.
    """

    tensor: str
    vector: str
    scale: float = 1.0
    power: int = 1
    normalizes: bool = False
    delay: int = 0

    def names_of_vector(self, name: str) -> list[str]:
        """Return the names of the tensors from which the factors of a tensor are computed; none if it has none."""
        if not re.search(self.tensor, name):
            return []
        names = [self.vector.format(number) for number in (1, 2)] if self.delay else [self.vector]
        return [re.sub(self.tensor, each or r"\g<0>", name) for each in names]


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
        self._rules: dict[str, tuple[list[str], RowFactors]] = {}
        self._names: dict[str, str] = {}
        """The stored names of tensors with factors, by the names that rules have for them."""
        self.vectors: set[str] = set()
        """The names of vectors that are only factors of matrices. The checkpoint does not return them as tensors."""
        for rule in factors:
            for name in names:
                vectors = rule.names_of_vector(name)
                if vectors and names.keys() >= set(vectors):
                    self._names[name] = names[name]
                    self._rules[names[name]] = [names[each] for each in vectors], rule
                    self.vectors |= {*vectors} - {name}

    def names(self) -> Collection[str]:
        """See `Checkpoint.names`."""
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint.shape`."""
        return self._checkpoint.shape(name)

    def num_bytes(self, name: str, itemsize: int) -> int:
        """See `Checkpoint.num_bytes`."""
        return self._checkpoint.num_bytes(name, itemsize)

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
        vectors, rule = self._rules[name]
        if rule.normalizes:
            if dim:
                raise ValueError(f"{name}: rows cannot be normalized by parts of their columns")
            matrix = self._checkpoint.tensor(name, torch.float32, part=part)
            self.bytes_read = self._checkpoint.bytes_read
            normed = torch.nn.functional.normalize(matrix)
            return normed if dtype is None else normed.to(dtype)
        factors = self._factors(vectors, rule, None if dim else part)
        if vectors != [name]:
            matrix = self._checkpoint.tensor(name, torch.float32, part=part, dim=dim)
            factors = factors.view(-1, *[1] * (matrix.dim() - 1)) * matrix
        self.bytes_read = self._checkpoint.bytes_read
        return factors if dtype is None else factors.to(dtype)

    def factors_by_name(self) -> dict[str, torch.Tensor | None]:
        """Return the factors on all rows of each tensor; None for a tensor whose rows are divided by their norms."""
        return {
            name: None if rule.normalizes else self._factors(vectors, rule, None)
            for name, stored in self._names.items()
            for vectors, rule in [self._rules[stored]]
        }

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

    def table(self, name: str, dtype: torch.dtype, part: range) -> RowTable | None:
        """See `Checkpoint.table`."""
        if name in self._rules:
            return None
        table = self._checkpoint.table(name, dtype, part)
        self.bytes_read = self._checkpoint.bytes_read
        return table

    def _factors(self, vectors: list[str], rule: RowFactors, part: range | None) -> torch.Tensor:
        """Return the factors on the rows `part`, or on all rows if it is None."""
        is_number = self._checkpoint.shape(vectors[-1]) == (1,)
        rows = None if is_number else part
        read = self._checkpoint.tensor(vectors[-1], torch.float32, part=rows)
        if rule.delay:
            first = self._checkpoint.tensor(vectors[0], torch.float32)
            inner = torch.nn.functional.gelu(first @ _embed_delay(rule.delay, first.shape[1]))
            read = 1 + read @ inner
        return (read * rule.scale) ** rule.power


def _embed_delay(delay: int, size: int) -> torch.Tensor:
    """Return the cosines and then the sines of a delay, float32 [size]."""
    half = size // 2
    angles = delay * torch.exp(-math.log(_LONGEST) * torch.arange(half).float() / half)
    return torch.cat((angles.cos(), angles.sin()))
