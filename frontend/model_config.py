"""From a checkpoint on this machine to what every process must know of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from ..protocol.config import LoadFormat, ModelConfig
from ..protocol.errors import CheckpointError, ConfigError
from ..protocol.gguf import GGUFFile
from ..protocol.gguf_config import gguf_to_hf_config
from ..protocol.model_dimensions import ModelDimensions
from .console import Console
from .model_options import CHECKPOINT_QUANTIZATIONS, ModelOptions, ResolvedModel
from .model_source import find_checkpoint, find_tokenizer
from .tokenizer import tokenizer_json_path

Json: TypeAlias = dict[str, Any]

LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Field of a generation_config.json -> sampling parameter."""

GGUF_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# These scale positions that max_position_embeddings already counts.
LENGTH_KEEPING_ROPE_TYPES = ("default", "llama3", "longrope", "su", "mrope", "proportional")


def resolve_model(options: ModelOptions, console: Console) -> ResolvedModel:
    """Find, fetch if need be, and read the model's configuration.

    Raises ConfigError or CheckpointError if there is no such model or it cannot be served as asked.
    """
    name, path = find_checkpoint(options, console)
    tokenizer_path = find_tokenizer(options, path, console)
    reader = _read_gguf if path.suffix == ".gguf" else _read_directory
    config, generation, eos = reader(path, tokenizer_path)
    config |= options.hf_overrides
    text = _text_config(config)
    source = f"{path}/config.json" if path.is_dir() else str(path)
    return ResolvedModel(
        config=ModelConfig(
            model=name,
            path=str(path),
            tokenizer_path=str(tokenizer_json_path(tokenizer_path).parent),
            served_names=options.served_model_name or (name,),
            architecture=_require(text, "model_type", str, source),
            vocab_size=_require(text, "vocab_size", int, source),
            max_model_len=_max_model_len(text, options.max_model_len, source),
            eos_token_ids=tuple(dict.fromkeys((*eos, *_token_ids(generation), *_token_ids(text)))),
            dtype=options.dtype,
            load_format=LoadFormat(options.load_format),
            quantization=_quantization_at_load(options.quantization, config, path),
            seed=options.seed,
            hf_overrides=options.hf_overrides,
        ),
        default_sampling=_default_sampling(options, generation),
        size_bytes=_size_bytes(path),
        dimensions=_dimensions(text),
    )


def _quantization_at_load(asked: str | None, config: Json, path: Path) -> str | None:
    """Return what the worker shall do: nothing if the checkpoint is quantized as asked."""
    if asked not in CHECKPOINT_QUANTIZATIONS:
        return asked
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    found = quantization.get("quant_method")
    if found == CHECKPOINT_QUANTIZATIONS[asked]:
        return None
    raise ConfigError(
        f"--quantization {asked}: the weights of {path} are "
        + (f"quantized with {found!r}" if found else "not quantized")
        + "; leave the option out to serve them as they are"
    )


def _read_gguf(path: Path, tokenizer_path: Path) -> tuple[Json, Json, list[int]]:
    """The config, the generation config and the tokeniser's own end tokens."""
    gguf = GGUFFile(path)
    generation = {
        name: gguf.metadata[f"general.sampling.{key}"]
        for key, name in GGUF_SAMPLING_KEYS.items()
        if f"general.sampling.{key}" in gguf.metadata
    }
    return gguf_to_hf_config(gguf), generation, _tokenizer_eos(tokenizer_path)


def _read_directory(path: Path, tokenizer_path: Path) -> tuple[Json, Json, list[int]]:
    config = _read_json(path / "config.json")
    return (
        config,
        _read_json_if_present(path / "generation_config.json"),
        _tokenizer_eos(tokenizer_path),
    )


def _read_json(path: Path) -> Json:
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CheckpointError(path, error.strerror or str(error)) from error
    except msgspec.DecodeError as error:
        raise CheckpointError(path, f"not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(path, "must hold a JSON object")
    return content


def _read_json_if_present(path: Path) -> Json:
    return _read_json(path) if path.is_file() else {}


def _text_config(config: Json) -> Json:
    """The language model's part of a multimodal model's config."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def _require(config: Json, name: str, kind: type[Any], source: str) -> Any:
    value = config.get(name)
    if not isinstance(value, kind):
        raise CheckpointError(
            source, f"{name} must be {'a string' if kind is str else 'an integer'}, it is {value!r}"
        )
    return value


def _dimensions(config: Json) -> ModelDimensions | None:
    try:
        return msgspec.convert(
            {
                "num_layers": config["num_hidden_layers"],
                "num_heads": config["num_attention_heads"],
                "num_kv_heads": config.get("num_key_value_heads"),
                "intermediate_size": config["intermediate_size"],
                "vocab_size": config["vocab_size"],
            },
            ModelDimensions,
        )
    except (KeyError, msgspec.ValidationError):
        return None


def _max_model_len(config: Json, wanted: int, source: str) -> int:
    limit = _length_limit(config)
    if limit is None:
        if wanted == -1:
            raise CheckpointError(source, "no context length is given; set --max-model-len")
        return wanted
    if wanted > limit:
        raise ConfigError(
            f"--max-model-len {wanted} exceeds the model's context length of {limit} ({source}); lower it, or extend the "
            """model with --hf-overrides '{"rope_scaling": {…}}' if it was made for that"""
        )
    return limit if wanted == -1 else wanted


def _length_limit(config: Json) -> int | None:
    lengths = [config[name] for name in LENGTH_FIELDS if isinstance(config.get(name), int)]
    if not lengths:
        return None
    limit = min(lengths)
    rope: Json = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in LENGTH_KEEPING_ROPE_TYPES or str(config["model_type"]).startswith("gemma3"):
        return limit
    factor = rope.get("factor")
    if factor is None:
        # YaRN then extends what the model was trained with to the length that the config names.
        return limit
    if kind == "yarn":
        limit = rope.get("original_max_position_embeddings", limit)
    return int(limit * factor)


def _token_ids(config: Json) -> list[int]:
    value = config.get("eos_token_id")
    if isinstance(value, int):
        return [value]
    return [token for token in value if isinstance(token, int)] if isinstance(value, list) else []


def _tokenizer_eos(path: Path) -> list[int]:
    """The id of the tokeniser's end token, if it says which one it is."""
    if path.suffix == ".gguf":
        eos = GGUFFile(path).metadata.get("tokenizer.ggml.eos_token_id")
        return [] if eos is None else [int(eos)]
    directory = path if path.is_dir() else path.parent
    config = _read_json_if_present(directory / "tokenizer_config.json")
    eos = config.get("eos_token") or _read_json_if_present(
        directory / "special_tokens_map.json"
    ).get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    return [id_ for id_, content in _added_tokens(directory, config) if content == text][:1]


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """Just what is needed of a tokenizer.json, so that its vocabulary is skipped, not built."""

    added_tokens: list[_AddedToken] = []


def _added_tokens(directory: Path, tokenizer_config: Json) -> Iterator[tuple[int, str]]:
    for id_, token in tokenizer_config.get("added_tokens_decoder", {}).items():
        yield int(id_), token.get("content", "")
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            tokens = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
        except msgspec.DecodeError as error:
            raise CheckpointError(path, f"not a tokeniser ({error}); download it again") from error
        yield from ((token.id, token.content) for token in tokens)


def _default_sampling(options: ModelOptions, generation: Json) -> dict[str, float | int]:
    if options.generation_config == "vllm":
        generation = {}
    elif options.generation_config != "auto":
        path = Path(options.generation_config).expanduser()
        if not path.exists():
            raise ConfigError(
                f"--generation-config {path} does not exist; give auto, vllm, a file or a directory"
            )
        generation = _read_json(path / "generation_config.json" if path.is_dir() else path)
    sampling = dict(_sampling_fields(generation))
    for name, value in options.override_generation_config.items():
        if (
            name not in SAMPLING_FIELDS
            or isinstance(value, bool)
            or not isinstance(value, int | float)
        ):
            raise ConfigError(
                f"--override-generation-config: {name} = {value!r} is not one of the numbers "
                f"{', '.join(SAMPLING_FIELDS)}"
            )
        sampling[SAMPLING_FIELDS[name]] = value
    return sampling


def _sampling_fields(generation: Json) -> Iterable[tuple[str, float | int]]:
    for name, parameter in SAMPLING_FIELDS.items():
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield parameter, value


def _size_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
