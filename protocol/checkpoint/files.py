"""List the files of a checkpoint that processes read at each start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec

from ..errors import CheckpointError
from .config_fields import ConfigFields
from .field_names import text_section, with_known_names
from .mistral_config.convert import convert_params
from .pooling.decisions import DECISIONS, decision_fields

_SPLIT_GGUF: Final = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_MAX_HEADER_BYTES: Final = 100_000_000
SOURCE_TOKENIZER: Final = "source_tokenizer.json"
"""The tokenizer of sources of an encoder-decoder model, if another one than that of its answers."""

_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    SOURCE_TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
)


_CONFIG: Final = "config.json"
_PARAMS: Final = "params.json"


def is_in_mistral_format(directory: Path) -> bool:
    """Return whether a directory has a model in Mistral's own format only: params.json and consolidated weights."""
    if not (directory / _PARAMS).is_file():
        return False
    if not (directory / _CONFIG).is_file():
        return True
    names = [file.name for file in directory.glob("*.safetensors")]
    return bool(names) and all(name.startswith("consolidated") for name in names)


def has_model_config(directory: Path) -> bool:
    """Return whether a directory has the config of a model."""
    return any((directory / name).is_file() for name in (_CONFIG, _PARAMS))


def read_model_config(directory: Path) -> ConfigFields:
    """Return the fields of a model's config.json, or those that its params.json amounts to.

    Raises:
        CheckpointError: The file is missing or invalid, or describes a model that is not supported.
    """
    if is_in_mistral_format(directory):
        return convert_params(ConfigFields.read(directory / _PARAMS))
    fields = with_known_names(ConfigFields.read(directory / _CONFIG))
    values = decision_fields(fields, ConfigFields.read_if_present(directory / DECISIONS))
    if quantization := _find_quantization(fields, directory):
        values["quantization_config"] = quantization
    if (file := find_language_adapter(directory, fields)) is not None:
        # The vocabulary is that of the language.
        head = read_header(file).get(_ADAPTER_HEAD)
        if head is None:
            raise CheckpointError(file, f"there is no tensor {_ADAPTER_HEAD!r}; download it again")
        values["vocab_size"] = head.shape[0]
    return fields.with_values(values) if values else fields


_ADAPTER_HEAD: Final = "lm_head.weight"


def find_language_adapter(directory: Path, fields: ConfigFields) -> Path | None:
    """Return the file with the layers of one language that replace those of an MMS (arXiv 2305.13516), if it is there.

    The language is the `target_lang` of the tokenizer.
    """
    if fields.get("adapter_attn_dim") is None:
        return None
    tokenizer = ConfigFields.read_if_present(directory / "tokenizer_config.json")
    file = directory / f"{_LANGUAGE}{tokenizer.text('target_lang', '')}.safetensors"
    return file if file.is_file() else None


_LANGUAGE: Final = "adapter."
"""The beginning of the names of files with the layers of one language."""


_QUANTIZATION_FILES: Final = {
    "hf_quant_config.json": "modelopt",
    "quant_config.json": "awq",
    "quantize_config.json": "gptq",
}
"""Files that describe the quantization of a checkpoint whose config.json does not, and their methods."""

_AWQ_NAMES: Final = {"w_bit": "bits", "q_group_size": "group_size"}


def _find_quantization(fields: ConfigFields, directory: Path) -> dict[str, Any] | None:
    """Return the quantization that a config has in the section of its text, or another file; None if there is none."""
    if fields.first_section("quantization_config", "compression_config").config:
        return None
    text = text_section(fields)
    nested = None if text is None else text.section("quantization_config")
    if nested is not None:
        return dict(nested.config)
    for name, method in _QUANTIZATION_FILES.items():
        if found := ConfigFields.read_if_present(directory / name).config:
            named = {_AWQ_NAMES.get(key, key): value for key, value in found.items()}
            return {"quant_method": method} | named
    if "BitnetForCausalLM" in fields.texts("architectures"):
        # Its own code always rounds the weights (1bitLLM).
        return {"quant_method": "bitnet", "quantization_mode": "online"}
    return None


PART_FOLDERS: Final = ("transformer", "vision_encoder")
"""The folders of a decoder and its tower in a directory in the layout of diffusers (Cosmos 3)."""


def _list_safetensors(directory: Path) -> list[Path]:
    """Return all safetensors files of a model, and their indexes. Those of its parts may be in folders of their own."""
    found = [*directory.glob("*.safetensors*")]
    if not any(file.suffix == ".safetensors" for file in found):
        for name in PART_FOLDERS:
            found += (directory / name).glob("*.safetensors*")
    return sorted(file for file in found if file.is_file())


def find_safetensors(directory: Path) -> list[Path]:
    """Return the files with a model's weights in a directory, and their index.

    A directory with weights in the format of transformers may also have Mistral's, and LoRA adapters.
    """
    others = (_LANGUAGE, "adapter_", "consolidated")[: 2 if is_in_mistral_format(directory) else 3]
    return [file for file in _list_safetensors(directory) if not file.name.startswith(others)]


def find_weight_files(path: Path) -> list[Path]:
    """Return the files that a worker reads from the checkpoint at `path`, a directory or a `.gguf` file."""
    if path.is_dir():
        others = (_CONFIG, _PARAMS, DECISIONS, *_QUANTIZATION_FILES)
        found = [file for name in others if (file := path / name).is_file()]
        return sorted([*found, *_list_safetensors(path)])
    if split := _SPLIT_GGUF.fullmatch(path.name):
        return sorted(path.parent.glob(f"{split[1]}-*-of-{split[2]}.gguf"))
    return [path]


def find_tensor(path: Path, name: str) -> Path:
    """Return the safetensors file with a tensor of the checkpoint in the directory `path`.

    Raises:
        CheckpointError: There is no such file.
    """
    index = ConfigFields.read_if_present(path / "model.safetensors.index.json")
    file = path / index.first_section("weight_map").text(name, "model.safetensors")
    if not file.is_file():
        raise CheckpointError(file, "is missing; download it")
    return file


def read_tensor_names(directory: Path) -> list[str]:
    """Return the names of the tensors in a directory with safetensors files."""
    index = ConfigFields.read_if_present(directory / "model.safetensors.index.json")
    if weights := index.first_section("weight_map").config:
        return [*weights]
    names: list[str] = []
    for path in find_safetensors(directory):
        if path.suffix == ".safetensors":
            names += read_header(path)
    return names


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    shape: tuple[int, ...] = ()


def read_header(path: Path) -> dict[str, _Entry]:
    """Return the tensors of a safetensors file by name. Raise CheckpointError if its header is damaged."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, _MAX_HEADER_BYTES))
    try:
        return msgspec.json.decode(header, type=dict[str, _Entry])
    except msgspec.DecodeError:
        raise CheckpointError(path, "its header is damaged; download it again") from None


def find_tokenizer_files(directory: Path) -> list[Path]:
    """Return the tokenizer and chat-template files in a directory, which frontends and cores read."""
    names = [directory / name for name in _TOKENIZER_FILES]
    names += directory.glob("additional_chat_templates/*.jinja")
    return sorted(name for name in names if name.is_file())
