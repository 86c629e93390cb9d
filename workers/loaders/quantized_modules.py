"""The quantized linear modules of a safetensors checkpoint, each presented as one tensor `weight`."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.errors import CheckpointError
from .quantization.matrix import QuantizedMatrix
from .quantization.scheme import (
    SUPPORTED,
    ModuleSchemes,
    QuantizationScheme,
    StoredModule,
    UnsupportedScheme,
)

# Scales for float8 attention, which some checkpoints contain. They are not used.
_UNUSED_SCALE = re.compile(r".*\.(q_scale|[qkv]_proj\.output_scale)")


class StoredTensors(Protocol):
    """Access to the tensors of a safetensors checkpoint in their stored form.

    `HFCheckpoint` implements this protocol.
    """

    path: Path

    def stored_names(self) -> Collection[str]:
        """Return the names of the stored tensors."""

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of a stored tensor in safetensors' spelling."""

    def stored_text(self, name: str, about: str) -> str | None:
        """Return the text under the key `about` in the header of a tensor's file; None if there is none."""

    def load(self, name: str, *parts: range | None) -> torch.Tensor:
        """Read ranges of a stored tensor's dimensions."""


class QuantizedModules:
    """The quantized modules of a checkpoint.

    `names` lists the checkpoint's tensors, with one `weight` instead of all tensors of such a module.
    """

    def __init__(self, schemes: ModuleSchemes, checkpoint: StoredTensors) -> None:
        stored = frozenset(checkpoint.stored_names())
        self._modules: dict[str, tuple[QuantizationScheme, StoredModule]] = {}
        for name in stored:
            module, _, tensor = name.rpartition(".")
            if (scheme := schemes.find(module, tensor, checkpoint.stored_dtype(name))) is not None:
                found = _stored_module(checkpoint, stored, module, tensor)
                self._modules[f"{module}.weight"] = scheme, found
        if not self._modules:
            markers = " or ".join(
                f"{each.marker!r} of type {' or '.join(sorted(each.marker_dtypes))}"
                for each in schemes.schemes
            )
            raise CheckpointError(
                checkpoint.path,
                "the config says that the weights are quantized, but no module has a tensor "
                f"{markers}; download the model again",
            )
        parts = {
            f"{module.name}.{tensor}"
            for scheme, module in self._modules.values()
            for tensor in (scheme.marker, *scheme.companions)
        }
        self.names = frozenset(
            name for name in stored if not _UNUSED_SCALE.fullmatch(name) and name not in parts
        ) | frozenset(self._modules)

    @classmethod
    def from_config(
        cls, config: ConfigFields, checkpoint: StoredTensors
    ) -> QuantizedModules | None:
        """Return the checkpoint's quantized modules, or None if it is not quantized."""
        quantization = config.first_section("quantization_config", "compression_config")
        if not quantization.config:
            return None
        # The schemes need torch, which a worker without quantized modules should not import.
        from .quantization.config import quantization_schemes

        try:
            return cls(quantization_schemes(quantization), checkpoint)
        except UnsupportedScheme as scheme:
            raise CheckpointError(
                checkpoint.path,
                f"checkpoints quantized with {scheme} are not supported; use {SUPPORTED}, the original "
                "weights, or a GGUF file",
            ) from scheme

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def shape(self, name: str) -> tuple[int, int]:
        """Return the rows and columns of a module's matrix."""
        scheme, module = self._modules[name]
        return scheme.matrix_shape(module)

    def matrix(self, name: str, part: range, dim: int) -> QuantizedMatrix:
        """Read the rows (`dim` 0) or columns (1) `part` of a module's matrix."""
        num_rows, num_columns = self.shape(name)
        rows, columns = (part, range(num_columns)) if dim == 0 else (range(num_rows), part)
        scheme, module = self._modules[name]
        return scheme.matrix(module, rows, columns)


def _stored_module(
    checkpoint: StoredTensors, stored: frozenset[str], module: str, marker: str
) -> StoredModule:
    def shape(tensor: str) -> tuple[int, ...] | None:
        name = f"{module}.{tensor}"
        return checkpoint.stored_shape(name) if name in stored else None

    def dtype(tensor: str) -> str | None:
        name = f"{module}.{tensor}"
        return checkpoint.stored_dtype(name) if name in stored else None

    def load(tensor: str, *parts: range | None) -> Any:
        return checkpoint.load(f"{module}.{tensor}", *parts)

    return StoredModule(
        module,
        shape,
        dtype,
        load,
        functools.partial(CheckpointError, checkpoint.path),
        checkpoint.stored_text(f"{module}.{marker}", f"{module}.weight"),
    )
