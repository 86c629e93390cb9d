"""The base class of the formats in which checkpoints store quantized linear modules.

Shapes: O output features, D input features, G groups of a row.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import gcd
from typing import Final

import msgspec
import torch
from torch import Tensor

from .matrix import QuantizedMatrix

SUPPORTED = (
    "fp8 (per tensor, per channel, in blocks), auto-round (as gptq, awq, fp8, MXFP4 or MXFP8), awq (gemm, 4 bits), "
    "bitnet, bitsandbytes (NF4, FP4, 8 bits), gptq (2, 3, 4 and 8 bits), hqq, mxfp4, mxfp8, modelopt (NVFP4, "
    "FP8, MXFP8, and mixtures of these), quark (FP8, MXFP4, 4 bits), torchao and compressed-tensors (float-quantized, int-quantized, pack-quantized "
    "with 4 and 8 bits, nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp8-quantized, and mixtures of these)"
)
"""The alternatives that error messages suggest if a scheme is not supported."""


ALL_MODULES: Final = ("Linear",)
"""The targets of a scheme that all modules have."""

_CLASSES: Final = ("Linear", "FusedMoE", "RoutedExperts")


class UnsupportedScheme(ValueError):
    """Raised for a `quantization_config` that is not supported; the message names the unsupported part."""


class StoredModule(msgspec.Struct, frozen=True):
    """The tensors of one linear module, by the last component of their names.

    `shape` and `dtype`, in safetensors' spelling, return None for a tensor that does not exist. `load` reads ranges of
    a tensor's dimensions; None means the whole dimension. `problem` returns the error to raise for an inconsistent
    module. `header` is the text about the module's weight in the header of its file.
    """

    name: str
    shape: Callable[[str], tuple[int, ...] | None]
    dtype: Callable[[str], str | None]
    load: Callable[..., Tensor]
    problem: Callable[[str], Exception]
    header: str | None = None

    def has(self, tensor: str) -> bool:
        """Return whether the module has this tensor."""
        return self.shape(tensor) is not None

    def read(self, tensor: str, expected: tuple[int, ...], *parts: range | None) -> Tensor:
        """Read part of a tensor, which must have the shape `expected`."""
        found = self.shape(tensor)
        if found != expected:
            stored = "is missing" if found is None else f"has shape {list(found)}"
            raise self.problem(
                f"the tensor '{self.name}.{tensor}' {stored}, expected {list(expected)}"
            )
        return self.load(tensor, *parts)


class QuantizationScheme(ABC):
    """A storage format. A module is quantized if it has a tensor `marker` whose type is one of `marker_dtypes`."""

    marker: str
    marker_dtypes: frozenset[str]
    companions: frozenset[str]
    """Other tensors that a quantized module may have, except its bias. A name may have several components."""

    def is_marker(self, tensor: str, dtype: str) -> bool:
        """Return whether a tensor with this last component of its name and this type marks a quantized module."""
        return tensor == self.marker and dtype in self.marker_dtypes

    @abstractmethod
    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""

    @abstractmethod
    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of the module's matrix, and no more of its tensors than they need."""


class ModuleSchemes:
    """The schemes of a checkpoint's modules, each with the targets that it applies to.

    A target is the name of a module, a regular expression after "re:" that matches the beginning of the name, or the
    name of a class. All linear modules belong to any class, but names take precedence, as in compressed-tensors.
    """

    def __init__(self, schemes: Sequence[tuple[Sequence[str], QuantizationScheme]]) -> None:
        self.schemes = [scheme for _, scheme in schemes]
        by_target = [(target, scheme) for targets, scheme in schemes for target in targets]
        self._by_name = dict(by_target[::-1])
        self._by_pattern = []
        for target, scheme in by_target:
            if target.startswith("re:"):
                try:
                    self._by_pattern.append((re.compile(target.removeprefix("re:")), scheme))
                except re.error as error:
                    raise UnsupportedScheme(
                        f"the invalid target {target!r} ({error}) of a config group"
                    ) from None
        self._of_class = next((s for target, s in by_target if target in _CLASSES), None)

    def find(self, module: str, tensor: str, dtype: str) -> QuantizationScheme | None:
        """Return the scheme of a module, given one of its tensors; None if no scheme has the tensor as its marker.

        If the module has another marker than the scheme of its target, the config names modules unlike the checkpoint.
        Then the first scheme with this marker applies.
        """
        if not any(each.is_marker(tensor, dtype) for each in self.schemes):
            return None
        targets = (scheme for pattern, scheme in self._by_pattern if pattern.match(module))
        wanted = self._by_name.get(module) or next(targets, self._of_class)
        candidates = [*([] if wanted is None else [wanted]), *self.schemes]
        return next(each for each in candidates if each.is_marker(tensor, dtype))


class ProjectionScheme(ModuleSchemes):
    """The scheme of all projections of layers, whose stored tensors are like those of other modules."""

    def __init__(self, scheme: QuantizationScheme) -> None:
        super().__init__([(ALL_MODULES, scheme)])

    def find(self, module: str, tensor: str, dtype: str) -> QuantizationScheme | None:
        """See `ModuleSchemes.find`."""
        return super().find(module, tensor, dtype) if module.endswith("_proj") else None


def shape_of(module: StoredModule, tensor: str) -> tuple[int, int]:
    """Return the shape of a stored matrix, which must exist."""
    found = module.shape(tensor)
    if found is None or len(found) != 2:
        stored = "is missing" if found is None else f"has {len(found)} dimensions, not 2"
        raise module.problem(f"the tensor '{module.name}.{tensor}' {stored}")
    return found[0], found[1]


def covering(part: range, size: int) -> range:
    """Return the range of units of `size` elements that contains the elements `part`."""
    return range(part.start // size, -(-part.stop // size))


def within(part: range, size: int) -> slice:
    """Return the range of the elements `part` within the units `covering(part, size)`."""
    start = part.start // size * size
    return slice(part.start - start, part.stop - start)


def unpack_bytes(words: Tensor, bits: int) -> Tensor:
    """Split int32 words [R, n] into fields of up to 8 bits, lowest first: uint8 [R, n * 32 / bits].

    A field of 3 bits may continue in the next word.
    """
    as_bytes = words.reshape(-1).view(torch.uint8).view(len(words), 4 * words.shape[1])
    if bits == 8:
        return as_bytes
    if bits == 4:
        return torch.stack((as_bytes & 15, as_bytes >> 4), -1).flatten(-2)
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    each_bit = (as_bytes.unsqueeze(-1) >> places & 1).flatten(-2)
    return (each_bit.unflatten(-1, (-1, bits)) << places[:bits]).sum(-1, dtype=torch.uint8)


def middle_shift(bits: int) -> int:
    """Return the number that moves integers of `bits` to the middle of four bits; 0 for four bits or more.

    Kernels have no integers of fewer bits. They multiply values minus 8, which should be small.
    """
    return 8 - (1 << (bits - 1)) if bits < 4 else 0


class ColumnGroups(msgspec.Struct, frozen=True):
    """The groups to which the columns `part` of a matrix belong.

    If the part begins or ends inside a group, the part has smaller groups: each stored group is divided into several.
    """

    part: range
    stored: range
    size: int
    repeats: int

    @classmethod
    def from_part(cls, part: range, group_size: int, num_columns: int) -> ColumnGroups:
        """Return the groups of the columns `part` of `num_columns` columns."""
        stored = covering(part, group_size)
        if len(stored) == 1:
            return cls(part, stored, len(part), 1)
        size = gcd(group_size, part.start)
        if part.stop != num_columns:
            size = gcd(size, part.stop)
        return cls(part, stored, size, group_size // size)

    def expand(self, x_OG: Tensor) -> Tensor:
        """Return one value for each group of the part, given one for each stored group, which may be larger."""
        if self.repeats == 1:
            return x_OG
        first = (self.part.start - self.stored.start * self.size * self.repeats) // self.size
        count = -(-len(self.part) // self.size)
        return x_OG.repeat_interleave(self.repeats, 1)[:, first : first + count].contiguous()


def groups_of_columns(
    module: StoredModule, tensor: str, num_columns: int, group_size: int
) -> Tensor | None:
    """Return the group of each column, int64 [D], read from `tensor`; None if groups are in order.

    Some quantizers write the tensor without using it, and fill it with -1.
    """
    if not module.has(tensor):
        return None
    groups = module.read(tensor, (num_columns,)).long()
    in_order = torch.arange(num_columns, device=groups.device) // group_size
    if torch.equal(groups, in_order) or bool((groups == -1).all()):
        return None
    num_groups = -(-num_columns // group_size)
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise module.problem(
            f"'{module.name}.{tensor}' has groups {int(groups.min())} to {int(groups.max())}, "
            f"but there are {num_groups}"
        )
    return groups


def in_group_order(matrix: QuantizedMatrix, group_of_column_D: Tensor) -> QuantizedMatrix:
    """Return the matrix with its columns reordered so that each group's columns are neighbors.

    `matrix` has the scales and zeros of all groups. If its columns are only a part, with different numbers of columns
    per group, each column becomes its own group.
    """
    order_D = torch.argsort(group_of_column_D, stable=True)
    groups, counts = torch.unique_consecutive(group_of_column_D[order_D], return_counts=True)
    size = int(counts[0])
    is_even = bool((counts[:-1] == size).all()) and int(counts[-1]) <= size
    if not is_even:
        groups, size = group_of_column_D, 1
        order_D = torch.arange(len(groups), device=groups.device)
    zero = matrix.zero_OG
    return QuantizedMatrix(
        matrix.values_OD[:, order_D],
        matrix.bits,
        matrix.scale_OG[:, groups],
        size,
        zero if isinstance(zero, int) else zero[:, groups],
        column_order_D=order_D if is_even else None,
    )
