"""The user's model options and the resolved model."""

from __future__ import annotations

import msgspec

from ...protocol.checkpoint.model_dimensions import ModelDimensions
from ...protocol.config import ModelConfig

CHECKPOINT_QUANTIZATIONS = {
    "awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "fp8": "fp8",
    "compressed-tensors": "compressed-tensors",
}
"""Values of `--quantization` for quantized checkpoints -> the `quant_method` that the config must have."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The user's model options; None leaves the choice to the checkpoint.

    Attributes:
        model: A directory, a `.gguf` file, a hub name `ORG/NAME[:QUANT or FILE.gguf]`, or None for the default
            model.
        max_model_len: Context length in tokens; -1 for the checkpoint's maximum.
        generation_config: Sampling defaults: "auto" (the checkpoint's), "vllm" (none) or the path of a file or
            directory.
    """

    model: str | None = None
    served_model_name: tuple[str, ...] = ()
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    download_dir: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    seed: int = 0
    max_model_len: int = -1
    hf_overrides: dict[str, object] = {}
    generation_config: str = "auto"
    override_generation_config: dict[str, float | int] = {}


class ResolvedModel(msgspec.Struct, frozen=True):
    """A local checkpoint and its settings.

    Attributes:
        default_sampling: Sampling parameters for requests that set none.
        size_bytes: Total size of the weight files.
        dimensions: None if the checkpoint's config omits them.
    """

    config: ModelConfig
    default_sampling: dict[str, float | int]
    size_bytes: int
    dimensions: ModelDimensions | None = None
