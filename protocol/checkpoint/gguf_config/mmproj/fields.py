"""The fields of mmproj files, which hold the towers of GGUF models that read images and audio."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from ....errors import CheckpointError
from ...gguf import GGUFFile
from ..fields import GGUFFields


class Mmproj(NamedTuple):
    """The config of a model that reads images or audio, and the fields of its image processor.

    `tokens` maps names of special tokens, as in tokenizer_config.json, to their texts. `around_clip` are the texts
    before and after an audio clip in prompts of chat templates that read only text.
    """

    config: dict[str, Any]
    processor: Mapping[str, Any] = MappingProxyType({})
    tokens: Mapping[str, str] = MappingProxyType({})
    around_clip: tuple[str, str] = ("", "")


class Tower(GGUFFields):
    """The metadata keys of a tower, with access to the decoder that reads its outputs.

    Attributes:
        media: The name of its inputs in errors.
    """

    media: str

    def __init__(self, gguf: GGUFFile, decoder: GGUFFile, prefix: str) -> None:
        super().__init__(gguf.metadata, gguf.path, prefix)
        self.gguf = gguf
        self._decoder = decoder

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor."""
        return name in self.gguf.tensors

    def num_rows(self, name: str) -> int:
        """Return the number of rows of a matrix. Raise CheckpointError if the file has no such matrix."""
        return self._shape(name, 2, "matrix")[0]

    def num_rows_of_each(self, name: str) -> int:
        """Return the number of rows of stacked matrices. Raise CheckpointError if the file has no such tensor."""
        return self._shape(name, 3, "stack of matrices")[1]

    def num_columns(self, name: str) -> int:
        """Return the number of columns of a matrix. Raise CheckpointError if the file has no such matrix."""
        return self._shape(name, 2, "matrix")[1]

    def num_channels(self, name: str, dimension: int = 0) -> int:
        """Return the size of a dimension of a convolution, by default the number of output channels.

        Raises:
            CheckpointError: The file has no tensor of this name with four dimensions.
        """
        return self._shape(name, 4, "convolution")[dimension]

    def _shape(self, name: str, num_dimensions: int, kind: str) -> tuple[int, ...]:
        tensor = self.gguf.tensors.get(name)
        if tensor is None or len(tensor.shape) != num_dimensions:
            raise CheckpointError(self.path, f"there is no {kind} {name!r}")
        return tensor.shape

    def integers(self, name: str) -> list[int]:
        """Return a list of integers. Raise CheckpointError if the file has no such list."""
        values = self.config.get(self.prefix + name)
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu":
            raise self.wrong(name, "a list of integers", values)
        return [int(value) for value in values]

    def optional_integers(self, name: str) -> list[int]:
        """Return a list of integers, which is empty if the file has none."""
        return [] if self.config.get(self.prefix + name) is None else self.integers(name)

    def count_blocks(self, prefix: str) -> int:
        """Return the number of blocks whose tensors have names that begin with `prefix` and a number."""
        names = (name.removeprefix(f"{prefix}.") for name in self.gguf.tensors)
        return len({name.split(".")[0] for name in names if name[:1].isdigit()})

    @property
    def decoder_architecture(self) -> str:
        """The architecture of the decoder's file."""
        return str(self._decoder.metadata.get("general.architecture"))

    def _tokens(self) -> list[str]:
        """Return the decoder's vocabulary, or [] if the file has none."""
        tokens = self._decoder.metadata.get("tokenizer.ggml.tokens")
        return tokens if isinstance(tokens, list) else []

    def token_id(self, *texts: str) -> int:
        """Return the id of the first of these tokens that is in the decoder's vocabulary.

        Raises:
            CheckpointError: There is no such token.
        """
        tokens = self._tokens()
        if (found := next((text for text in texts if text in tokens), None)) is not None:
            return tokens.index(found)
        raise CheckpointError(
            self._decoder.path,
            f"there is no token {' or '.join(map(repr, texts))}, which represents {self.media}; use the model that "
            f"belongs to {self.path}",
        )


class Vision(Tower):
    """The metadata keys of a vision tower."""

    media = "images"

    def __init__(self, gguf: GGUFFile, decoder: GGUFFile) -> None:
        super().__init__(gguf, decoder, "clip.vision.")

    @property
    def patch_size(self) -> int:
        """The side of a patch, in pixels."""
        return self.integer("patch_size")

    @property
    def merge_size(self) -> int:
        """The side of the squares of patches that are merged into one embedding; files have one of two names for it."""
        size = self.optional_integer("spatial_merge_size")
        return self.integer("projector.scale_factor", 2) if size is None else size

    @property
    def has_layer_inputs(self) -> bool:
        """True if each layer of the decoder has inputs of its own (the smaller ones of Gemma 4)."""
        return bool(self._decoder.metadata.get("gemma4.embedding_length_per_layer_input"))

    def decoder_layers(self, count: int) -> list[int]:
        """Return the layer of the decoder before which each of `count` projections is added.

        Raises:
            CheckpointError: The decoder's file does not contain these layers.
        """
        decoder = self._decoder
        name = f"{self.decoder_architecture}.deepstack_mapping"
        mapping = decoder.metadata.get(name)
        numbers = mapping.tolist() if isinstance(mapping, np.ndarray) else []
        if not set(range(1, count)) <= set(numbers):
            raise CheckpointError(
                decoder.path, f"{name} must have the numbers 1 to {count - 1}, got {numbers}"
            )
        # The first one takes the place of the embeddings of tokens.
        return [0, *(numbers.index(number) for number in range(1, count))]

    def activation(self, gelu: str) -> str:
        """Return the name of the activation. `gelu` names the variant that is used if the file only says GELU."""
        metadata = self.gguf.metadata
        if metadata.get("clip.use_gelu"):
            return gelu
        return "silu" if metadata.get("clip.use_silu") else "quick_gelu"

    def tower(self, gelu: str) -> dict[str, Any]:
        """Return the config fields that all vision towers have in common."""
        return {
            **self.sizes(),
            "image_size": self.integer("image_size"),
            "patch_size": self.patch_size,
            "layer_norm_eps": self.positive("attention.layer_norm_epsilon", 1e-6),
            "hidden_act": self.activation(gelu),
        }

    def sizes(
        self, layers: str = "num_hidden_layers", heads: str = "num_attention_heads"
    ) -> dict[str, Any]:
        """Return the sizes of a tower. `layers` and `heads` are the names of the fields with their numbers."""
        return {
            "hidden_size": self.integer("embedding_length"),
            "intermediate_size": self.integer("feed_forward_length"),
            layers: self.layer_count("block_count"),
            heads: self.integer("attention.head_count"),
        }

    def pixel_limits(self) -> dict[str, int]:
        """Return the limits of an image's pixels, if the file has them."""
        found = {
            name: self.optional_integer(f"image_{name}") for name in ("min_pixels", "max_pixels")
        }
        return {name: value for name, value in found.items() if value is not None}

    def pixels(self, side: Any) -> dict[str, Any]:
        """Return the fields that all image processors have in common; images have `side` x `side` pixels."""
        return {"size": side, **self.statistics()}

    def merged_pixels(self, temporal_patch_size: int) -> dict[str, Any]:
        """Return the fields of processors that merge squares of patches of images of any size."""
        return {
            "patch_size": self.patch_size,
            "merge_size": self.merge_size,
            "temporal_patch_size": temporal_patch_size,
            **self.pixel_limits(),
            **self.statistics(),
        }

    def statistics(self) -> dict[str, list[float]]:
        """Return the mean and the standard deviation of each channel, if the file has them."""
        values = {name: self.gguf.metadata.get(f"clip.vision.{name}") for name in _STATISTICS}
        return {
            name: [float(x) for x in value] for name, value in values.items() if value is not None
        }


_STATISTICS: Final = ("image_mean", "image_std")


class Audio(Tower):
    """The metadata keys of an audio tower."""

    media = "audio"

    def __init__(self, gguf: GGUFFile, decoder: GGUFFile) -> None:
        super().__init__(gguf, decoder, "clip.audio.")

    def around_clip(self, *texts: str) -> tuple[str, str]:
        """Return the texts around a clip, without those that are no token of the decoder."""
        tokens = self._tokens()
        before, after = (text if text in tokens else "" for text in texts)
        return before, after

    def sizes(self) -> dict[str, Any]:
        """Return the config fields that all audio towers have in common, by Whisper's names."""
        return {
            "d_model": self.integer("embedding_length"),
            "encoder_ffn_dim": self.integer("feed_forward_length"),
            "encoder_layers": self.layer_count("block_count"),
            "encoder_attention_heads": self.integer("attention.head_count"),
            "num_mel_bins": self.integer("num_mel_bins"),
        }
