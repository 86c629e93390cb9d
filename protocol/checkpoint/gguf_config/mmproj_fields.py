"""The keys of mmproj files, the vision towers beside GGUF models."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ...errors import CheckpointError
from ..gguf import GGUFFile
from .fields import GGUFFields


class Mmproj(NamedTuple):
    """The config of the model that reads images, and the fields of its image processor.

    `tokens` are the texts of special tokens by their names in tokenizer_config.json.
    """

    config: dict[str, Any]
    processor: dict[str, Any]
    tokens: Mapping[str, str] = MappingProxyType({})


class VisionFields(GGUFFields):
    """The keys of a vision tower, and the decoder that reads its outputs."""

    def __init__(self, gguf: GGUFFile, decoder: GGUFFile) -> None:
        super().__init__(gguf.metadata, gguf.path, "clip.vision.")
        self.gguf = gguf
        self._decoder = decoder

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor."""
        return name in self.gguf.tensors

    @property
    def decoder_architecture(self) -> str:
        """The architecture of the decoder."""
        return str(self._decoder.metadata.get("general.architecture"))

    @property
    def decoder_size(self) -> int:
        """The hidden size of the decoder."""
        prefix = f"{self.decoder_architecture}."
        return GGUFFields(self._decoder.metadata, self._decoder.path, prefix).integer(
            "embedding_length"
        )

    def rows(self, name: str) -> int:
        """Return the number of rows of a matrix.

        Raises:
            CheckpointError: There is none of that name.
        """
        tensor = self.gguf.tensors.get(name)
        if tensor is None or len(tensor.shape) != 2:
            raise CheckpointError(self.path, f"there is no matrix {name!r}")
        return tensor.shape[0]

    def token_id(self, text: str) -> int:
        """Return the id of a token of the decoder.

        Raises:
            CheckpointError: It has no such token.
        """
        tokens = self._decoder.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or text not in tokens:
            raise CheckpointError(
                self._decoder.path,
                f"there is no token {text!r}, which stands for images; use a model that belongs to {self.path}",
            )
        return tokens.index(text)

    def activation(self, gelu: str) -> str:
        """Return the activation, which is `gelu` if the file says that it is some GELU."""
        metadata = self.gguf.metadata
        if metadata.get("clip.use_gelu"):
            return gelu
        return "silu" if metadata.get("clip.use_silu") else "quick_gelu"

    def tower(self, gelu: str) -> dict[str, Any]:
        """Return the fields that all towers have."""
        return {
            "hidden_size": self.integer("embedding_length"),
            "intermediate_size": self.integer("feed_forward_length"),
            "num_hidden_layers": self.layer_count("block_count"),
            "num_attention_heads": self.integer("attention.head_count"),
            "image_size": self.integer("image_size"),
            "patch_size": self.integer("patch_size"),
            "layer_norm_eps": self.positive("attention.layer_norm_epsilon", 1e-6),
            "hidden_act": self.activation(gelu),
        }

    def pixels(self, side: Any) -> dict[str, Any]:
        """Return the fields that all image processors have."""
        values = {name: self.gguf.metadata.get(f"clip.vision.{name}") for name in _STATISTICS}
        found = {
            name: [float(x) for x in value] for name, value in values.items() if value is not None
        }
        return {"size": side, **found}


_STATISTICS: Final = ("image_mean", "image_std")
