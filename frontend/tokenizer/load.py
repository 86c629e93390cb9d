"""Tokenizers from files: a Hugging Face directory, or a GGUF file by way of a cached directory."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from ...protocol.errors import CheckpointError
from .gguf_cache import converted_directory
from .tokenizer import Tokenizer


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """The tokenizer of the checkpoint at `path`, a Hugging Face directory or a `.gguf` file.

    Raises CheckpointError for files that are missing, damaged or of a kind not supported.
    """
    json_path = tokenizer_json_path(path)
    directory = json_path.parent
    try:
        backend = tokenizers.Tokenizer.from_file(str(json_path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(path, f"its tokenizer cannot be read: {error}") from error
    config = _read_json(directory / "tokenizer_config.json")
    named = _named_tokens(_read_json(directory / "special_tokens_map.json") | config)
    _add_tokens(backend, config, named)
    _add_bos_and_eos(backend, config, named)
    try:
        return Tokenizer(
            backend,
            json_path,
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token"),
            pad_token=named.get("pad_token"),
            chat_templates=_chat_templates(directory, config),
        )
    except ValueError as error:
        raise CheckpointError(path, str(error)) from error


def tokenizer_json_path(path: str | PathLike[str]) -> Path:
    """The tokenizer.json of the checkpoint at `path`; for a GGUF file, one built and cached."""
    path = Path(path)
    directory = path if path.is_dir() else converted_directory(path)
    json_path = directory / "tokenizer.json"
    if not json_path.is_file():
        raise CheckpointError(
            directory,
            "there is no tokenizer.json; save one with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    return json_path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(path, f"not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(path, "not a JSON object")
    return content


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token ... -> the token; each is written as a string or as {"content": ...}."""
    named = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            named[name] = content
    return named


def _add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]
) -> None:
    """Add tokens that tokenizer.json lacks; make the named ones special, as transformers does."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    listed = config.get("added_tokens_decoder") or {}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(token["content"]) is None:
            present = {flag: token[flag] for flag in flags if flag in token}
            backend.add_tokens([AddedToken(token["content"], **present)])
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in dict.fromkeys(named.values())
            if token not in special and backend.token_to_id(token) is not None
        ]
    )


def _add_bos_and_eos(
    backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]
) -> None:
    """Honour `add_bos_token` and `add_eos_token` where tokenizer.json itself is silent on them."""
    if backend.post_processor is not None:
        return
    before, after = (
        [named[name]] if config.get(f"add_{name}") and name in named else []
        for name in ("bos_token", "eos_token")
    )
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*before, *after}],
        )


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    in_config = config.get("chat_template")
    if isinstance(in_config, str):
        templates["default"] = in_config
    elif isinstance(in_config, list):
        templates |= {entry["name"]: entry["template"] for entry in in_config}
    in_json = _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(in_json, str):
        templates["default"] = in_json
    for file in (directory / "additional_chat_templates").glob("*.jinja"):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if (file := directory / "chat_template.jinja").is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates
