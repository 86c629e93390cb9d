"""The fields of mmproj files, which hold the vision towers of GGUF models."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ...errors import CheckpointError
from ..gguf import GGUFFile
from .fields import GGUFFields


class Mmproj(NamedTuple):
    """The config of a model that reads images, and the fields of its image processor.

    `tokens` maps names of special tokens, as in tokenizer_config.json, to their texts.
    """

    config: dict[str, Any]
    processor: dict[str, Any]
    tokens: Mapping[str, str] = MappingProxyType({})


class Vision(GGUFFields):
    """The metadata keys of a vision tower, with access to the decoder that reads its outputs."""

    def __init__(self, gguf: GGUFFile, decoder: GGUFFile) -> None:
        super().__init__(gguf.metadata, gguf.path, "clip.vision.")
        self.gguf = gguf
        self._decoder = decoder

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor."""
        return name in self.gguf.tensors

    def num_rows(self, name: str) -> int:
        """Return the number of rows of a matrix.

        Raises:
            CheckpointError: The file has no such matrix.
        """
        tensor = self.gguf.tensors.get(name)
        if tensor is None or len(tensor.shape) != 2:
            raise CheckpointError(self.path, f"there is no matrix {name!r}")
        return tensor.shape[0]

    @property
    def has_layer_inputs(self) -> bool:
        """True if each layer of the decoder has inputs of its own (the smaller ones of Gemma 4)."""
        return bool(self._decoder.metadata.get("gemma4.embedding_length_per_layer_input"))

    @property
    def decoder_architecture(self) -> str:
        """The architecture of the decoder's file."""
        return str(self._decoder.metadata.get("general.architecture"))

    def token_id(self, text: str) -> int:
        """Return the id of a token in the decoder's vocabulary.

        Raises:
            CheckpointError: There is no such token.
        """
        tokens = self._decoder.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or text not in tokens:
            raise CheckpointError(
                self._decoder.path,
                f"there is no token {text!r}, which represents images; use the model that belongs to "
                f"{self.path}",
            )
        return tokens.index(text)

    def activation(self, gelu: str) -> str:
        """Return the name of the activation. `gelu` names the variant that is used if the file only says GELU."""
        metadata = self.gguf.metadata
        if metadata.get("clip.use_gelu"):
            return gelu
        return "silu" if metadata.get("clip.use_silu") else "quick_gelu"

    def tower(self, gelu: str) -> dict[str, Any]:
        """Return the config fields that all vision towers have in common."""
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
        """Return the fields that all image processors have in common; images have `side` x `side` pixels."""
        return {"size": side, **self.statistics()}

    def statistics(self) -> dict[str, list[float]]:
        """Return the mean and the standard deviation of each channel, if the file has them."""
        values = {name: self.gguf.metadata.get(f"clip.vision.{name}") for name in _STATISTICS}
        return {
            name: [float(x) for x in value] for name, value in values.items() if value is not None
        }


_STATISTICS: Final = ("image_mean", "image_std")
