"""What a user says about the model, and what becomes of it."""

from __future__ import annotations

import msgspec

from ..protocol.config import ModelConfig
from ..protocol.model_dimensions import ModelDimensions

CHECKPOINT_QUANTIZATIONS = {
    "awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "fp8": "fp8",
    "compressed-tensors": "compressed-tensors",
}
"""What `--quantization` may say of a checkpoint that is quantized -> `quant_method` in its config."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The model as asked for; None leaves the choice to the checkpoint.

    `model` is a directory, a `.gguf` file, a hub name `ORG/NAME[:QUANT or FILE.gguf]`, or None for the default
    model. `max_model_len` -1 means the longest the checkpoint was made for. `generation_config` is "auto" (the
    checkpoint's own sampling defaults), "vllm" (none) or the path of a file or directory that has them.
    """

    model: str | None = None
    served_model_name: tuple[str, ...] = ()
    tokenizer: str | None = None
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
    """A checkpoint on this machine, understood. `default_sampling` holds the sampling parameters to use where
    a request gives none; `size_bytes` is that of the weights' files; `dimensions` is None where the checkpoint leaves
    them to the model's family."""

    config: ModelConfig
    default_sampling: dict[str, float | int]
    size_bytes: int
    dimensions: ModelDimensions | None = None
