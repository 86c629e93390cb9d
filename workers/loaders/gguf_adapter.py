"""Read LoRA adapters in llama.cpp's format: a GGUF file with the factors of each matrix.

Shapes: R rank, I input features, O output features. For an embedding, these are the hidden size and the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ...protocol.checkpoint.gguf import GGUFFile, GGUFTensor
from ...protocol.checkpoint.gguf_config.fields import GGUFFields
from .dequantize import dequantize
from .gguf import INTERLEAVED, split_parts
from .gguf_names import hf_name
from .peft_adapter import LowRank, StoredAdapter

_EMBEDDING: Final = "token_embd.weight"
_FACTORS: Final = (".lora_a", ".lora_b")


class GGUFAdapter(StoredAdapter):
    """An adapter in llama.cpp's format.

    `heads` has the numbers of query heads and of key heads of each layer of the model.

    Raises:
        CheckpointError: The file is damaged, of another kind, or has tensors that are not supported.
    """

    ties_embeddings: Final = False

    def __init__(
        self, path: Path, max_rank: int, scale: float, heads: Sequence[tuple[int, int]]
    ) -> None:
        super().__init__(path, max_rank, scale)
        self._gguf = GGUFFile(path)
        self._heads = heads
        fields = GGUFFields(self._gguf.metadata, path, "")
        for key, needed in (("general.type", "adapter"), ("adapter.type", "lora")):
            fields.require(key, needed, default="none")
        if fields.get("adapter.alora.invocation_tokens") is not None:
            raise self.error("it is an activated LoRA, which is not supported; use another adapter")
        self._alpha = fields.number("adapter.lora.alpha", 0.0)
        self._architecture = fields.text("general.architecture")
        self._factors: dict[str, dict[str, GGUFTensor]] = {}
        for tensor in self._gguf.tensors.values():
            stored, kind = tensor.name[:-7], tensor.name[-7:]
            found = hf_name(stored, self._architecture) if kind in _FACTORS else None
            if found is None or ".mixer." in found or not found.endswith(".weight"):
                raise self.error(
                    f"the tensor {tensor.name!r} is not supported; adapters may contain lora_a and lora_b of "
                    "matrices of attention, MLPs, the embedding and the output"
                )
            for name, part in split_parts(found, tensor).items():
                self._factors.setdefault(name.removesuffix(".weight"), {})[kind] = part

    def modules(self) -> Collection[str]:
        """Return the names of the changed modules, such as "model.layers.0.mlp.up_proj"."""
        return self._factors.keys()

    def read(self, module: str) -> LowRank:
        """Return the change of a module in float32, with the adapter's scale in `up_OR`."""
        parts = self._factors[module]
        if len(parts) != 2 or any(len(part.shape) != 2 for part in parts.values()):
            raise self.error(f"the module {module} has no pair of matrices lora_a and lora_b")
        tensor = parts[".lora_b"]
        down_RI, up_OR = (self._read(parts[kind]) for kind in _FACTORS)
        if tensor.name.startswith(_EMBEDDING):
            down_RI, up_OR = up_OR.mT.contiguous(), down_RI
        rank = self.verify_rank(module, down_RI, up_OR)
        if num_heads := self._num_interleaved_heads(tensor.name):
            if len(up_OR) % (2 * num_heads):
                raise self.error(
                    f"lora_b of {module} has {len(up_OR)} rows, which are not whole heads"
                )
            up_OR = up_OR.view(num_heads, -1, 2, rank).transpose(1, 2).reshape(up_OR.shape)
        # llama.cpp does not divide by the rank if the file has no alpha.
        return LowRank(down_RI, up_OR * (self._scale * (self._alpha / rank if self._alpha else 1)))

    def _read(self, tensor: GGUFTensor) -> Tensor:
        rows = self._gguf.rows(tensor, range(tensor.shape[0]))
        return dequantize(rows, tensor.ggml_type, torch.float32)

    def _num_interleaved_heads(self, name: str) -> int:
        """Return the number of heads whose rows are interleaved in a factor; 0 if it has none."""
        if self._architecture not in INTERLEAVED or not (".attn_q." in name or ".attn_k." in name):
            return 0
        index = int(name.split(".")[1])
        return self._heads[index][".attn_k." in name] if index < len(self._heads) else 0
