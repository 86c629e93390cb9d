"""Load tokenizers from a Hugging Face directory, or from a GGUF file through a cached conversion."""

from os import PathLike

import tokenizers
from tokenizers import AddedToken, processors

from ...protocol.checkpoint.files import SOURCE_TOKENIZER
from ...protocol.errors import CheckpointError
from .absent import AbsentTokenizer
from .config import TokenizerConfig
from .converted import tokenizer_json_path
from .tokenizer import Tokenizer


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
    _add_bos_and_eos(backend, config)
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
            chat_templates=chat_templates,
        )
    except ValueError as error:
        raise CheckpointError(path, str(error)) from error


def _add_tokens(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Add tokens that tokenizer.json lacks, and mark the named tokens as special, as transformers does."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for _, token in config.added_tokens:
        content = token.text("content")
        if backend.token_to_id(content) is None:
            present = {flag: token.boolean(flag, False) for flag in flags if flag in token.config}
            backend.add_tokens([AddedToken(content, **present)])
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in dict.fromkeys(config.named_tokens.values())
            if token not in special and backend.token_to_id(token) is not None
        ]
    )


def _add_bos_and_eos(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Apply `add_bos_token` and `add_eos_token` if tokenizer.json has no post-processor."""
    if backend.post_processor is not None:
        return
    before, after = (
        [config.named_tokens[name]] if config.adds(name) else []
        for name in ("bos_token", "eos_token")
    )
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*before, *after}],
        )
