"""Read a local checkpoint's configuration into the settings that every process needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.checkpoint.config_fields import MAX_INTEGER, ConfigFields
from ...protocol.checkpoint.content_hash import hash_content
from ...protocol.checkpoint.field_names import (
    fields_of_part,
    read_text_config,
    with_common_names,
    with_known_architectures,
)
from ...protocol.checkpoint.files import (
    SOURCE_TOKENIZER,
    find_safetensors,
    find_tokenizer_files,
    find_weight_files,
    read_model_config,
)
from ...protocol.checkpoint.gguf import GGUFFile
from ...protocol.checkpoint.gguf_config.convert import gguf_to_hf_config
from ...protocol.checkpoint.gguf_config.fields import GGUFFields
from ...protocol.checkpoint.gguf_config.mmproj.fields import Mmproj
from ...protocol.checkpoint.model_dimensions import (
    DEFAULTS_OF_GEMMA3,
    EXPERT_COUNTS,
    ModelDimensions,
)
from ...protocol.checkpoint.pooling.classification import TOKEN_IDS, TOKENS, read_classifier
from ...protocol.checkpoint.pooling.embedding import (
    OFFSET_POSITIONS,
    find_sparse_head,
    has_head,
    is_encoder,
    read_embedding_files,
)
from ...protocol.checkpoint.published.deepseek import OUTPUT_WINDOW
from ...protocol.checkpoint.recurrent_config import (
    DEFAULT_LENGTH,
    RecurrentModel,
    has_unlimited_length,
    read_recurrent_layer,
)
from ...protocol.checkpoint.source_text import has_source_vocabulary, read_source_text
from ...protocol.checkpoint.speech import read_audio_processor, with_decoder_fields
from ...protocol.checkpoint.vision_kind import model_kind
from ...protocol.checkpoint.vision_presence import has_vision
from ...protocol.config import ModelConfig
from ...protocol.config.model import ModelImpl, PoolerConfig
from ...protocol.errors import CheckpointError, ConfigError, ParameterError
from ...protocol.file_identity import identify_files
from ...protocol.sampling_params import SamplingParams
from ..supervisor.console import Console
from ..tokenizer.eos import gguf_eos, tokenizer_eos
from .chat_audio import read_chat_audio
from .diffusion import read_block_diffusion
from .images.spans import find_span_kind
from .lora import find_default_lora, find_loras, find_media_lora, with_own_adapters
from .options import CHECKPOINT_QUANTIZATIONS, ModelOptions, ResolvedModel, use_hub_token
from .pooler import change_classifier, change_pooler
from .source import (
    find_checkpoint,
    find_part,
    find_tokenizer,
    find_tokenizer_directory,
    find_towers,
    read_towers,
)

LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "n_ctx",
    "model_max_length",
)
TOWER_FIELDS = (
    *("vision_config", "vit_config", "embd_layer"),
    *("audio_config", "audio_encoder_conf", "audio_encoder_config", "encoder_config"),
)
"""Names of the fields with the towers of a model."""

SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "top_n_sigma": "top_n_sigma",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "dynatemp_range": "dynatemp_range",
    "dynatemp_exponent": "dynatemp_exponent",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Name in generation_config.json -> sampling parameter."""

OVERRIDE_FIELDS = SAMPLING_FIELDS | {
    name: name for name in ("presence_penalty", "frequency_penalty")
}
"""Field of `--override-generation-config` -> sampling parameter."""

GGUF_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_repeat": "repetition_penalty",
}
# For these rope types, max_position_embeddings already includes the scaling.
LENGTH_KEEPING_ROPE_TYPES = ("default", "llama3", "longrope", "su", "mrope", "ntk", "proportional")

_NAMED_AS_WHOLE = {"kimi_k3"}
"""Model types whose chats have another format than those of other models with the same decoder."""


def resolve_model(options: ModelOptions, console: Console) -> ResolvedModel:
    """Find the model, download it if necessary, and read its configuration.

    Raises:
        ConfigError: The model does not exist, or the options do not fit it.
        CheckpointError: The checkpoint cannot be served.
    """
    use_hub_token(options.hf_token)
    options = msgspec.structs.replace(
        options, hf_overrides=with_known_architectures(options.hf_overrides)
    )
    name, path = find_checkpoint(options, console)
    served_names = options.served_model_name or (name,)
    tokenizer_path = find_tokenizer(options, path, console)
    reader = _read_gguf if path.suffix == ".gguf" else _read_directory
    checkpoint_config, generation, eos = reader(path, tokenizer_path)
    if part := fields_of_part(checkpoint_config):
        checkpoint_config = checkpoint_config.with_values(part)
        options = msgspec.structs.replace(options, hf_overrides=part | options.hf_overrides)
    whole_config = checkpoint_config.with_values(options.hf_overrides)
    mmproj = find_towers(options, path, whole_config, console)
    if model_kind(whole_config) == "ultravox" and (
        decoder := whole_config.text("text_model_id", "")
    ):
        # The checkpoint has only the tower, and its config names the decoder.
        towers_path = path
        path = find_part(decoder, options, console)
        reader = _read_gguf if path.suffix == ".gguf" else _read_directory
        checkpoint_config, generation, eos = reader(path, tokenizer_path)
        overrides: dict[str, Any] = options.hf_overrides | {"text_model_id": None}
        if not options.language_model_only:
            mmproj = towers_path
            text_config = {"text_config": checkpoint_config.config}
            overrides = {**whole_config.config, **overrides, **text_config}
        options = msgspec.structs.replace(options, hf_overrides=overrides)
    if options.language_model_only:
        towers = _without_towers(checkpoint_config.config)
        options = msgspec.structs.replace(options, hf_overrides=options.hf_overrides | towers)
    towers_beside: Mmproj | None = None
    if mmproj is not None and mmproj.suffix == ".gguf":
        towers_beside = read_towers(options, mmproj, path, checkpoint_config.config, console)
        if towers_beside is None:
            mmproj = None
        else:
            options = msgspec.structs.replace(
                options, hf_overrides={**towers_beside.config, **options.hf_overrides}
            )
    if sparse := find_sparse_head(path, checkpoint_config):
        options = msgspec.structs.replace(options, hf_overrides=sparse | options.hf_overrides)
    tokenizer_directory = find_tokenizer_directory(options, tokenizer_path)
    overrides = _with_token_ids(
        checkpoint_config.with_values(options.hf_overrides), options, tokenizer_directory
    )
    config = checkpoint_config.with_values(overrides)
    options = with_own_adapters(options, path, config)
    loras = find_loras(options, served_names, console)
    has_one = tokenizer_directory and not (tokenizer_directory / SOURCE_TOKENIZER).is_file()
    if has_one and has_source_vocabulary(config):
        raise config.error(
            "share_encoder_decoder_embeddings is false, so sources and outputs have different vocabularies, but "
            "there is one tokenizer; use files with source.spm, or --skip-tokenizer-init and token ids"
        )
    text = _text_config(config)
    vocab_size = text.integer("vocab_size")
    wanted_length = _wanted_length(text, options, console)
    embedding = read_embedding_files(path, text, config)
    pooler = change_pooler(embedding.pooler, options.pooler_config)
    eos += generation.token_ids("eos_token_id") + text.token_ids("eos_token_id")
    chat_audio = None
    if options.model_impl is not ModelImpl.TRANSFORMERS:
        files = path if mmproj is None or mmproj.is_file() else mmproj
        chat_audio = read_chat_audio(files, config, text, towers_beside, tokenizer_directory)
    images = videos = None
    if options.model_impl is not ModelImpl.TRANSFORMERS and has_vision(config):
        # Late imports, because a model without vision needs none of their modules.
        from .images.read import read_image_processor
        from .images.videos import read_video_processor

        images = read_image_processor(
            path, config, text, options.mm_processor_kwargs, towers_beside
        )
        videos = read_video_processor(path, config, text, options.mm_processor_kwargs)
    modality = "image" if images is not None else "audio" if chat_audio is not None else None
    kind = model_kind(config)
    return ResolvedModel(
        config=ModelConfig(
            model=name,
            path=str(path),
            tokenizer_path=str(tokenizer_directory or ""),
            served_names=served_names,
            # A model that reads media is named by its whole config, not by that of its text.
            architecture=kind if modality or kind in _NAMED_AS_WHOLE else text.text("model_type"),
            vocab_size=vocab_size,
            max_model_len=_max_model_len(text, wanted_length, embedding.max_length),
            eos_token_ids=tuple(id_ for id_ in dict.fromkeys(eos) if 0 <= id_ < vocab_size),
            dtype="float32" if is_encoder(text) and options.dtype == "auto" else options.dtype,
            load_format=options.load_format,
            quantization=_quantization_at_load(options.quantization, config, path),
            seed=options.seed,
            hf_overrides=overrides,
            model_impl=options.model_impl,
            trust_remote_code=options.trust_remote_code,
            weight_files=identify_files(
                _find_weight_files(path, embedding.pooler, mmproj), hash_content
            ),
            tokenizer_files=identify_files(
                find_tokenizer_files(tokenizer_directory) if tokenizer_directory else [],
                hash_content,
            ),
            is_encoder=is_encoder(text),
            has_head=has_head(config),
            pooler=pooler,
            classifier=change_classifier(read_classifier(text), options.pooler_config),
            enable_lora=options.enable_lora,
            loras=loras,
            default_lora=find_default_lora(options, loras, config),
            media_lora=find_media_lora(options, loras, console, modality),
            download_dir=options.download_dir,
            max_lora_rank=options.max_lora_rank,
            hidden_size=text.optional_integer("hidden_size") or 0,
            enable_prompt_embeds=options.enable_prompt_embeds,
            images=images,
            videos=videos,
            span_kind=find_span_kind(options, config, text),
            has_output_window=text.get(OUTPUT_WINDOW) is not None,
            mmproj=str(mmproj or ""),
            audio=read_audio_processor(path, config, generation),
            chat_audio=chat_audio,
            source_text=read_source_text(config, generation),
            diffusion=read_block_diffusion(config, text, generation),
        ),
        default_sampling=_default_sampling(options, generation),
        size_bytes=_size_bytes(path),
        dimensions=_dimensions(text),
        recurrent=_recurrent(text),
    )


def _find_weight_files(path: Path, pooler: PoolerConfig, mmproj: Path | None) -> Iterable[Path]:
    """Return the files of the model, of the layers after its pooling, and of its towers."""
    of_towers = [] if mmproj is None else find_weight_files(mmproj)
    dense = chain(pooler.dense, *pooler.other_dense.values())
    return dict.fromkeys((*find_weight_files(path), *(Path(x.path) for x in dense), *of_towers))


def _with_token_ids(
    config: ConfigFields, options: ModelOptions, tokenizer_directory: Path | None
) -> dict[str, Any]:
    """Return the config overrides, and in them the token ids of the classes if tokens were given as a classifier.

    This is `classifier_from_token` in `--hf-overrides`, which makes a classifier of a decoder.
    """
    if not (tokens := config.texts(TOKENS)):
        return options.hf_overrides
    # A late import, because few models are made a classifier.
    from ..tokenizer.load import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_directory or "")
    ids: list[int] = []
    for token in tokens:
        found = tokenizer.encode(token, add_special_tokens=False)
        if len(found) != 1:
            raise ConfigError(f"--hf-overrides: {TOKENS}: {token!r} is not one token of this model")
        ids += found
    return options.hf_overrides | {TOKEN_IDS: ids}


def _without_towers(config: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields that replace those of a config, so that the model has no towers."""
    found: dict[str, object] = {name: None for name in TOWER_FIELDS if name in config}
    # In Qwen's own layout, the towers are those of a part of the model.
    if isinstance(part := config.get("thinker_config"), dict):
        found["thinker_config"] = part | _without_towers(part)
    return found


def _quantization_at_load(asked: str | None, config: ConfigFields, path: Path) -> str | None:
    """Return the quantization that the worker applies at load; None if the checkpoint is already quantized that way."""
    if asked not in CHECKPOINT_QUANTIZATIONS:
        return asked
    found = config.first_section("quantization_config", "compression_config").get("quant_method")
    if found == CHECKPOINT_QUANTIZATIONS[asked]:
        return None
    raise ConfigError(
        f"--quantization {asked}: the weights of {path} are "
        + (f"quantized with {found!r}" if found else "not quantized")
        + "; remove the option to serve them unchanged"
    )


def _read_gguf(path: Path, tokenizer_path: Path) -> tuple[ConfigFields, ConfigFields, list[int]]:
    """Return the config, the generation config and the tokenizer's own end tokens of a GGUF file."""
    gguf = GGUFFile(path)
    sampling = GGUFFields(gguf.metadata, path, "general.sampling.")
    generation = {name: sampling.get(key) for key, name in GGUF_SAMPLING_KEYS.items()}
    return (
        ConfigFields(gguf_to_hf_config(gguf), path),
        ConfigFields(generation, path),
        gguf_eos(gguf) if tokenizer_path == path else tokenizer_eos(tokenizer_path),
    )


def _read_directory(
    path: Path, tokenizer_path: Path
) -> tuple[ConfigFields, ConfigFields, list[int]]:
    return (
        read_model_config(path),
        ConfigFields.read_if_present(path / "generation_config.json"),
        tokenizer_eos(tokenizer_path),
    )


def _text_config(config: ConfigFields) -> ConfigFields:
    """Return the language model's section of a config, with the defaults that its family omits."""
    nested = read_text_config(config)
    text = config
    if nested is not None:
        text = config.with_values({**nested.config, "architectures": config.get("architectures")})
    text = with_common_names(with_decoder_fields(text))
    is_gemma3 = text.text("model_type").startswith("gemma3")
    return text.with_defaults(**DEFAULTS_OF_GEMMA3) if is_gemma3 else text


def _dimensions(config: ConfigFields) -> ModelDimensions | None:
    """Return the model's dimensions; None if the config omits some, or if the worker will reject the config anyway."""
    try:
        return ModelDimensions(
            config.layer_count("num_hidden_layers"),
            config.integer("num_attention_heads"),
            config.optional_integer("num_key_value_heads"),
            config.integer("intermediate_size"),
            config.integer("vocab_size"),
            max(config.integer(name, 0, minimum=0) for name in EXPERT_COUNTS),
            recurrent.num_units if (recurrent := read_recurrent_layer(config)) else 0,
        )
    except CheckpointError:
        return None


def _recurrent(config: ConfigFields) -> RecurrentModel | None:
    """Return the model's recurrent layers; None if it has none or the worker will reject it."""
    try:
        return RecurrentModel.read(config)
    except CheckpointError:
        return None


def _wanted_length(config: ConfigFields, options: ModelOptions, console: Console) -> int | None:
    """Return the context length that the options ask for; that of `--ctx-size` is lowered to the model's."""
    most = options.ctx_size
    if options.max_model_len is not None or not most:
        return options.max_model_len
    if (limit := _length_limit(config)) is None or most <= limit:
        return most
    console.line(f"--ctx-size {most} is lowered to {limit}, the model's context length")
    return limit


def _max_model_len(config: ConfigFields, wanted: int | None, trained: int | None = None) -> int:
    """Return the context length: `wanted` if given, otherwise the trained length or the limit of the model."""
    limit = _length_limit(config)
    if wanted is None and trained is not None:
        return trained if limit is None else min(trained, limit)
    if limit is None:
        if wanted is not None:
            return wanted
        if has_unlimited_length(config):
            return DEFAULT_LENGTH
        raise config.error("the context length is missing; set --max-model-len")
    if wanted is None:
        return limit
    if wanted > limit:
        raise ConfigError(
            f"--max-model-len {wanted} exceeds the model's context length of {limit} ({config.path}); lower "
            "it, or extend the "
            """model with --hf-overrides '{"rope_scaling": {…}}' if it supports that"""
        )
    return wanted


def _length_limit(config: ConfigFields) -> int | None:
    lengths = [length for name in LENGTH_FIELDS if (length := config.optional_integer(name))]
    if not lengths:
        return None
    limit = min(lengths)
    if config.text("model_type") in OFFSET_POSITIONS:
        limit -= config.integer("pad_token_id", 1, minimum=0) + 1
    rope = config.first_section("rope_scaling", "rope_parameters")
    rope = rope.section("full_attention") or rope
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind in LENGTH_KEEPING_ROPE_TYPES or config.text("model_type").startswith("gemma3"):
        return limit
    factor = rope.optional_positive("factor")
    if factor is None:
        # YaRN then extends the trained length to the length in the config.
        return limit
    if kind == "yarn":
        limit = rope.integer("original_max_position_embeddings", limit)
    return int(min(limit * factor, MAX_INTEGER))


def _default_sampling(options: ModelOptions, generation: ConfigFields) -> dict[str, float | int]:
    if options.generation_config == "vllm":
        generation = ConfigFields({}, generation.path)
    elif options.generation_config != "auto":
        path = Path(os.path.expanduser(options.generation_config))
        if not path.exists():
            raise ConfigError(
                f"--generation-config {path} does not exist; use auto, vllm, or the path of a file or "
                "directory"
            )
        generation = ConfigFields.read(path / "generation_config.json" if path.is_dir() else path)
    sampling = {}
    for name, parameter in SAMPLING_FIELDS.items():
        if (value := generation.get(name)) is not None:
            try:
                sampling[parameter] = _sampling_value(name, value)
            except ParameterError as error:
                raise generation.error(
                    f"{error}; use --generation-config vllm to ignore these defaults"
                ) from None
    for name, value in options.override_generation_config.items():
        if name not in OVERRIDE_FIELDS:
            raise ConfigError(
                f"--override-generation-config: unknown field {name} = {value!r}; use one of "
                f"{', '.join(OVERRIDE_FIELDS)}"
            )
        try:
            sampling[OVERRIDE_FIELDS[name]] = _sampling_value(name, value)
        except ParameterError as error:
            raise ConfigError(f"--override-generation-config: {error}") from None
    return sampling


def _sampling_value(name: str, value: Any) -> float | int:
    """Return the validated value of a field of generation_config.json. Raise ParameterError if it is invalid."""
    parameter = OVERRIDE_FIELDS[name]
    try:
        params = msgspec.convert({parameter: value}, SamplingParams)
        params.verify(vocab_size=1, max_logprobs=0)
    except msgspec.ValidationError:
        kind = "an integer" if parameter in ("top_k", "max_tokens") else "a number"
        raise ParameterError(name, f"must be {kind}, got {value!r}") from None
    except ParameterError as error:
        raise ParameterError(name, error.problem) from None
    if value > MAX_INTEGER:
        raise ParameterError(name, f"must be at most {MAX_INTEGER}, got {value!r}")
    result: float | int = getattr(params, parameter)
    return result


def _size_bytes(path: Path) -> int:
    files = [path] if path.is_file() else find_safetensors(path)
    return sum(file.stat().st_size for file in files)
