"""Load tokenizers from a Hugging Face directory, or from a GGUF file through a cached conversion."""

from os import PathLike
from typing import Final

import tokenizers
from tokenizers import AddedToken, normalizers

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.files import SOURCE_TOKENIZER
from ...protocol.errors import CheckpointError
from .absent import AbsentTokenizer
from .config import TokenizerConfig, token_flags
from .converted import tokenizer_json_path
from .tokenizer import Tokenizer

_SENTENCES: Final = "sentence_bert_config.json"
"""The file with the settings of sentence-transformers for texts."""


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer:
    """Return the tokenizer of the checkpoint at `path`, a Hugging Face directory or a `.gguf` file.

    An empty path returns an `AbsentTokenizer`, for a model that is served without one.

    Raises:
        CheckpointError: Files are missing, damaged or not supported.
    """
    if path == "":
        return AbsentTokenizer()
    json_path = tokenizer_json_path(path)
    directory = json_path.parent
    try:
        backend = tokenizers.Tokenizer.from_file(str(json_path))
    except Exception as error:  # The library raises bare Exception.
        raise CheckpointError(path, f"its tokenizer cannot be read: {error}") from error
    config = TokenizerConfig(directory)
    named = config.named_tokens
    chat_templates = config.chat_templates()
    _add_tokens(backend, config)
    if ConfigFields.read_if_present(directory / _SENTENCES).boolean("do_lower_case", False):
        others = () if backend.normalizer is None else (backend.normalizer,)
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])
    source_path = directory / SOURCE_TOKENIZER
    source = tokenizers.Tokenizer.from_file(str(source_path)) if source_path.is_file() else None
    try:
        return Tokenizer(
            backend,
            json_path,
            source=source,
            bos_token=named.get("bos_token"),
            eos_token=named.get("eos_token"),
            pad_token=named.get("pad_token"),
            named_tokens=named,
            chat_templates=chat_templates,
        )
    except ValueError as error:
        raise CheckpointError(path, str(error)) from error


def _add_tokens(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Add tokens as transformers does, and change the flags of those that tokenizer.json has as well.

    Unlike in transformers, special tokens that are not in the vocabulary are ignored: no embedding belongs to them.
    """
    named, listed = config.special_tokens()
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    tokens = {
        fields.text("content"): AddedToken(fields.text("content"), **token_flags(fields))
        for _, fields in config.added_tokens
    }
    tokens = tokens or dict(present)
    for content, flags in (listed | named).items():
        if content not in present and backend.token_to_id(content) is not None:
            tokens.setdefault(content, AddedToken(content, **flags))
    for content, token in tokens.items():
        # A special token remains one.
        token.special |= content in named or (content in present and present[content].special)
    backend.add_tokens([*tokens.values()])
    backend.encode_special_tokens = config.splits_special_tokens
