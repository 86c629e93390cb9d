"""Read LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Shapes: R rank, I input features, O output features. For an embedding, these are the hidden size and the vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.errors import CheckpointError

_TENSOR: Final = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?:(?!\.lora_).)+?)\."
    r"(?P<part>lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]|(?:base_layer\.)?weight|bias)"
)
_FACTORS: Final = ("lora_A.weight", "lora_B.weight")
_FACTOR_BIAS: Final = "lora_B.bias"
_EMBEDDING_FACTORS: Final = ("lora_embedding_A", "lora_embedding_B")
_WHOLE: Final = ("weight", "bias")
_REFUSED: Final = (
    "use_dora",
    "use_qalora",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
)
"""Fields that change what an adapter computes and are not supported: each must be absent, false or empty."""

_CHANGES_BASE: Final = ("pissa", "olora", "corda")
"""Values of `init_lora_weights` with which an adapter belongs to a changed base model instead of the stored one."""


class LowRank(msgspec.Struct, frozen=True):
    """The change of a module: `up_OR @ down_RI` is added to its matrix, and `bias_O`, if not None, to its bias."""

    down_RI: Tensor
    up_OR: Tensor
    bias_O: Tensor | None = None


class Replacement(msgspec.Struct, frozen=True):
    """A matrix [O, I] or vector [I], and a bias or None, that replace those of a module."""

    weight: Tensor
    bias: Tensor | None = None


Change: TypeAlias = LowRank | Replacement


class StoredAdapter:
    """A LoRA adapter on disk, with a rank of at most `max_rank`, whose changes are multiplied by `scale`."""

    def __init__(self, path: Path, max_rank: int, scale: float) -> None:
        self.path = path
        self._max_rank, self._scale = max_rank, scale

    def error(self, problem: str) -> CheckpointError:
        """Return a CheckpointError about the adapter."""
        return CheckpointError(self.path, problem)

    def verify_rank(self, module: str, down_RI: Tensor, up_OR: Tensor) -> int:
        """Return the rank of two factors. Raise CheckpointError if their ranks differ or are too high."""
        if down_RI.ndim != 2 or up_OR.ndim != 2 or len(down_RI) != up_OR.shape[1]:
            raise self.error(
                f"lora_A and lora_B of {module} have shapes {list(down_RI.shape)} and {list(up_OR.shape)}, "
                "which do not match"
            )
        rank = len(down_RI)
        if rank > self._max_rank:
            raise self.error(
                f"{module} has rank {rank}, but at most {self._max_rank} is allowed; raise --max-lora-rank"
            )
        return rank


class PEFTAdapter(StoredAdapter):
    """An adapter in PEFT's format.

    Raises:
        CheckpointError: The adapter is damaged, of another kind, or of a higher rank.
    """

    def __init__(self, path: Path, max_rank: int, scale: float = 1.0) -> None:
        super().__init__(path, max_rank, scale)
        self._fields = ConfigFields.read(path / "adapter_config.json")
        self._verify_kind()
        self.ties_embeddings = self._fields.boolean("ensure_weight_tying", False)
        """True if the change of the embedding also applies to an output projection that is tied to it."""
        file = path / "adapter_model.safetensors"
        try:
            opened: Any = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                file, f"the adapter's weights are missing or damaged ({error})"
            ) from error
        self._file = opened
        self._tensors: dict[str, dict[str, str]] = {}
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise CheckpointError(
                    file,
                    f"the tensor {name!r} is not supported; adapters may contain lora_A and lora_B of "
                    "modules, and whole modules",
                )
            # PEFT stores a copy of the base model's matrix next to the factors of an embedding. Ignore it.
            if match["part"] != "base_layer.weight":
                self._tensors.setdefault(match["module"], {})[match["part"]] = name

    def modules(self) -> Collection[str]:
        """Return the names of the changed modules, such as "model.layers.0.mlp.up_proj"."""
        return self._tensors.keys()

    def read(self, module: str) -> Change:
        """Return the change of a module in float32, with the adapter's scale in `up_OR` and `bias_O`."""
        parts = {*self._tensors[module]}
        has_bias = _FACTOR_BIAS in parts
        if has_bias and {*_FACTORS} <= parts:
            parts = parts - {_FACTOR_BIAS}
        if not parts <= {*_FACTORS} and not parts <= {*_EMBEDDING_FACTORS}:
            if not parts <= {*_WHOLE} or "weight" not in parts:
                raise self.error(
                    f"the module {module} has the tensors {', '.join(sorted(parts))}; it needs a pair of "
                    "lora_A and lora_B, or a weight"
                )
            if self._scale != 1.0:
                raise self.error(
                    f"the module {module} is stored whole (modules_to_save), so the adapter cannot have the "
                    f"scale {self._scale:g}; use 1 or 0"
                )
            bias = self._tensor(module, "bias") if "bias" in parts else None
            return Replacement(self._tensor(module, "weight"), bias)
        if len(parts) != 2:
            raise self.error(f"the module {module} has {min(parts)} only; it needs both A and B")
        if parts == {*_FACTORS}:
            down_RI, up_OR = (self._tensor(module, part) for part in _FACTORS)
        else:
            # The factors of an embedding are stored for the transposed matrix.
            up_RO, down_IR = (self._tensor(module, part) for part in _EMBEDDING_FACTORS)
            down_RI, up_OR = down_IR.mT, up_RO.mT
        rank = self.verify_rank(module, down_RI, up_OR)
        stated = int(self._number("r", "rank_pattern", module))
        if rank != stated:
            raise self.error(f"{module} has rank {rank}, but the config says {stated}")
        alpha = self._number("lora_alpha", "alpha_pattern", module)
        is_stabilized = self._fields.boolean("use_rslora", False)
        scale = self._scale * alpha / (math.sqrt(rank) if is_stabilized else rank)
        bias_O = self._tensor(module, _FACTOR_BIAS) * scale if has_bias else None
        if bias_O is not None and bias_O.shape != up_OR.shape[:1]:
            raise self.error(
                f"the bias of lora_B of {module} has shape {list(bias_O.shape)}, but the matrix has "
                f"{len(up_OR)} rows"
            )
        return LowRank(down_RI, up_OR * scale, bias_O)

    def _tensor(self, module: str, part: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self._tensors[module][part])
        return tensor.float()

    def _verify_kind(self) -> None:
        fields = self._fields
        if (kind := fields.text("peft_type")) != "LORA":
            raise fields.error(f"peft_type {kind!r} is not supported; use LORA")
        if (bias := fields.text("bias", "none")) != "none":
            raise fields.error(f"bias {bias!r} is not supported; use 'none'")
        for name in _REFUSED:
            if value := fields.get(name):
                raise fields.error(
                    f"{name} {value!r} is not supported; merge the adapter into the model"
                )
        start = fields.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            raise fields.error(
                f"init_lora_weights {start!r} changes the base model; convert the adapter to plain LoRA "
                "with PEFT"
            )

    def _number(self, name: str, patterns_name: str, module: str) -> float:
        """Return the number for a module: from the first pattern that its name ends with, else the default."""
        patterns = self._fields.section(patterns_name)
        for pattern in () if patterns is None else patterns.config:
            try:
                is_match = re.fullmatch(rf"(.*\.)?({pattern})", module)
            except re.error as error:
                raise self._fields.error(f"{patterns_name} {pattern!r}: {error}") from error
            if is_match and patterns is not None:
                return patterns.positive(pattern)
        return self._fields.positive(name)
