"""The model that an engine serves."""

from __future__ import annotations

import enum

import msgspec

from ..file_identity import FileIdentity, verify_files


class LoadFormat(enum.StrEnum):
    """What is loaded: `AUTO` reads the checkpoint; `DUMMY` reads only its config and makes up the weights."""

    AUTO = "auto"
    DUMMY = "dummy"


class ModelConfig(msgspec.Struct, frozen=True):
    """The model that is served.

    Attributes:
        path: The resolved checkpoint, a directory or a `.gguf` file.
        tokenizer_path: A directory with a tokenizer.json: the checkpoint's own, the one of `--tokenizer`, or the
            conversion of a GGUF file's. Empty with `--skip-tokenizer-init`.
        max_model_len: The maximum of prompt plus output tokens.
        eos_token_ids: The tokenizer's end token, then those of the generation config.
        dtype: The type of weights that are not quantized.
        quantization: "int8" or "int4" quantizes the weights at load.
        hf_overrides: Fields that replace those of the checkpoint's own configuration.
        weight_files: The files that were on disk when the server started.
        tokenizer_files: The same for the tokenizer and the chat templates.
    """

    model: str
    path: str
    tokenizer_path: str
    served_names: tuple[str, ...]
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str = "auto"
    load_format: LoadFormat = LoadFormat.AUTO
    quantization: str | None = None
    seed: int = 0
    hf_overrides: dict[str, object] = {}
    weight_files: tuple[FileIdentity, ...] = ()
    tokenizer_files: tuple[FileIdentity, ...] = ()

    @property
    def has_tokenizer(self) -> bool:
        """True unless the server runs without a tokenizer."""
        return self.tokenizer_path != ""

    def verified_tokenizer_path(self) -> str:
        """Return `tokenizer_path`.

        Raises:
            CheckpointError: One of its files changed after the server started.
        """
        verify_files(self.tokenizer_files)
        return self.tokenizer_path
