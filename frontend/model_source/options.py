"""The model options of the command line, and the resolved model."""

import os
from typing import Annotated, Literal

import msgspec

from ...protocol.checkpoint.model_dimensions import ModelDimensions
from ...protocol.checkpoint.recurrent_config import RecurrentModel
from ...protocol.config import LoadFormat, ModelConfig, ModelImpl
from ...protocol.config.option import option

CHECKPOINT_QUANTIZATIONS = {
    "awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "auto-round": "auto-round",
    "bitnet": "bitnet",
    "bitsandbytes": "bitsandbytes",
    "fp8": "fp8",
    "hqq": "hqq",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
    "quark": "quark",
    "modelopt": "modelopt",
    "torchao": "torchao",
    "compressed-tensors": "compressed-tensors",
}
"""Value of `--quantization` -> the `quant_method` that the checkpoint must have."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The model options of the command line; None leaves the choice to the checkpoint."""

    model: Annotated[
        str | None,
        option(
            "Directory, .gguf file or ORG/NAME[:QUANT or FILE.gguf] on the hub",
            "--model-path --hf-repo -hf -hfr -m",
            metavar="MODEL",
            default_text="SmolLM2-135M-Instruct",
        ),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        option("Names that clients may use; responses show the first", metavar="NAME"),
    ] = ()
    tokenizer: Annotated[
        str | None,
        option(
            "Tokenizer directory or hub repository, if not the model's",
            "--tokenizer-path",
            metavar="PATH",
        ),
    ] = None
    tokenizer_revision: Annotated[
        str | None,
        option("Hub branch, tag or commit of the tokenizer", default_text="--revision"),
    ] = None
    skip_tokenizer_init: Annotated[
        bool, option("Serve without a tokenizer: prompts and answers are token ids")
    ] = False
    revision: Annotated[str | None, option("Hub branch, tag or commit")] = None
    hf_token: Annotated[
        str | None,
        option("Access token for private models on the hub", "-hft", metavar="TOKEN"),
    ] = None
    download_dir: Annotated[
        str | None,
        option("Directory for downloaded models instead of the default cache", metavar="DIR"),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        option(
            "Type of unquantized weights",
            synonyms={"half": "float16", "fp16": "float16", "float": "float32", "bf16": "bfloat16"},
        ),
    ] = "auto"
    load_format: Annotated[
        LoadFormat,
        option(
            "Weights to load; dummy uses random weights",
            synonyms=dict.fromkeys(
                (
                    "fastsafetensors",
                    "gguf",
                    "hf",
                    "instanttensor",
                    "mistral",
                    "runai_streamer",
                    "safetensors",
                ),
                "auto",
            ),
        ),
    ] = LoadFormat.AUTO
    quantization: Annotated[
        str | None,
        option(
            "int8 and int4 quantize at load (CPU); others must match the checkpoint",
            "-q",
            choices=("int8", "int4", *CHECKPOINT_QUANTIZATIONS),
        ),
    ] = None
    model_impl: Annotated[
        ModelImpl, option("Engine's own layers or transformers' module; auto prefers Engine's")
    ] = ModelImpl.AUTO
    trust_remote_code: Annotated[
        bool, option("Run Python code of the checkpoint (with --model-impl transformers)")
    ] = False
    seed: Annotated[
        int,
        option(
            "Default seed for requests that set none; 0 picks random ones",
            "--random-seed -s",
            synonyms={"-1": "0"},
            ge=0,
            le=2**63 - 1,
        ),
    ] = 0
    max_model_len: (
        Annotated[
            int,
            option(
                "Maximum prompt plus output tokens; 32k is 32000, 32K is 32768",
                "--context-length --max-seq-len",
                synonyms={"-1": "auto"},
                default_text="auto",
                ge=1,
            ),
        ]
        | None
    ) = None
    ctx_size: Annotated[
        int,
        option("--max-model-len, but lowered to the model's context; 0 is all of it", "-c", ge=0),
    ] = 0
    hf_overrides: Annotated[
        dict[str, object],
        option(
            "Fields that replace those of the model's config.json",
            "--json-model-override-args",
        ),
    ] = {}
    pooler_config: Annotated[
        dict[str, object],
        option(
            'Pooling of a text\'s vectors: {"pooling_type": "MEAN"}, or "STEP" and "step_tag_id"',
            "--override-pooler-config",
        ),
    ] = {}
    generation_config: Annotated[
        str, option("Sampling defaults: auto (the model's), vllm (none) or a path", metavar="PATH")
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, float | int],
        option(
            "Overrides of --generation-config; max_new_tokens caps every request",
            "--preferred-sampling-params",
            entries={
                "--temp": "temperature",
                "--temperature": "temperature",
                "--top-k": "top_k",
                "--top-p": "top_p",
                "--min-p": "min_p",
                "--typical": "typical_p",
                "--typical-p": "typical_p",
                "--top-nsigma": "top_n_sigma",
                "--top-n-sigma": "top_n_sigma",
                "--xtc-probability": "xtc_probability",
                "--xtc-threshold": "xtc_threshold",
                "--dynatemp-range": "dynatemp_range",
                "--dynatemp-exp": "dynatemp_exponent",
                "--repeat-penalty": "repetition_penalty",
                "--presence-penalty": "presence_penalty",
                "--frequency-penalty": "frequency_penalty",
            },
        ),
    ] = {}
    enable_lora: Annotated[bool, option("Serve LoRA adapters")] = False
    lora_modules: Annotated[
        tuple[str, ...],
        option(
            "LoRA adapters: NAME=PATH or JSON with name and path",
            "--lora-paths",
            metavar="NAME=PATH",
        ),
    ] = ()
    lora: Annotated[
        tuple[str, ...],
        option("LoRA adapter of all requests: a GGUF file or a directory", metavar="FILE"),
    ] = ()
    lora_scaled: Annotated[
        tuple[str, ...], option("As --lora, multiplied by a number", metavar="FILE:SCALE")
    ] = ()
    lora_init_without_apply: Annotated[
        bool, option("Apply the adapters of --lora only to requests that choose one")
    ] = False
    default_mm_loras: Annotated[
        dict[str, object],
        option('Default LoRA adapter of requests with media: {"image" or "audio": NAME_OR_PATH}'),
    ] = {}
    mm_processor_kwargs: Annotated[
        dict[str, object],
        option("Fields that replace those of the model's preprocessor_config.json"),
    ] = {}
    mmproj: Annotated[
        str,
        option(
            "File with the towers of a GGUF model, or none",
            "-mm",
            metavar="FILE",
            default_text="the file next to the model",
        ),
    ] = ""
    language_model_only: Annotated[
        bool, option("Do not load vision and audio towers: serve only text")
    ] = False
    enable_prompt_embeds: Annotated[bool, option("Accept embeddings as prompts of completions")] = (
        False
    )
    max_lora_rank: Annotated[int, option("Highest rank of a LoRA adapter", ge=1, le=1024)] = 16


def use_hub_token(token: str | None) -> None:
    """Let this process, and the processes that it will start, authenticate at the hub with `--hf-token`."""
    if token:
        os.environ["HF_TOKEN"] = token


class ResolvedModel(msgspec.Struct, frozen=True):
    """A local checkpoint and its settings.

    Attributes:
        default_sampling: Sampling parameters for requests that set none.
        size_bytes: Total size of the weight files.
        dimensions: The dimensions of the model; None if the checkpoint's config omits them.
        recurrent: The model's recurrent layers; None if it has none.
    """

    config: ModelConfig
    default_sampling: dict[str, float | int]
    size_bytes: int
    dimensions: ModelDimensions | None = None
    recurrent: RecurrentModel | None = None
