"""Fill-in-the-middle prompts: the model writes the text between a prefix and a suffix.

They are for models that were trained to fill in the middle (arXiv 2207.14255).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ..http.errors import bad_request
from ..tokenizer.tokenizer import Tokenizer

PREFIX: Final = "prefix"
SUFFIX: Final = "suffix"

_FORMATS: Final[tuple[tuple[str, ...], ...]] = (
    # Qwen2.5-Coder and later, CodeGemma, Granite 4.
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
    # StarCoder, Granite Code, StableCode.
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),
    # SantaCoder.
    ("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>"),
    # DeepSeek-Coder, V2 and V3.
    ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),
    # GLM-4 and CodeGeeX 4.
    ("<|code_prefix|>", PREFIX, "<|code_suffix|>", SUFFIX, "<|code_middle|>"),
    # Seed-Coder.
    ("<[fim-suffix]>", SUFFIX, "<[fim-prefix]>", PREFIX, "<[fim-middle]>"),
    # CodeLlama.
    ("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"),
    # Codestral.
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),
)
"""The known prompt formats: the order of special tokens, prefix and suffix."""

_ENDS: Final = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|repo_name|>",
    "<fim_pad>",
    "<file_sep>",
    "▁<EOT>",
    "<EOT>",
)
"""Tokens that end the middle, in addition to the model's end-of-sequence tokens."""

_REPOSITORIES: Final[tuple[tuple[str, ...], ...]] = (
    # Qwen2.5-Coder and later.
    ("<|repo_name|>", "<|file_sep|>"),
    # StarCoder 2.
    ("<repo_name>", "<file_sep>"),
    # StarCoder, Granite Code.
    ("<reponame>", "<filename>"),
    # CodeGemma.
    ("<|file_separator|>",),
)
"""The tokens before a repository's name and before each of its files. CodeGemma has only the second."""

_MIN_FILE_TOKENS: Final = 64
"""Minimum tokens of other files in a prompt that does not have room for all of them."""

_PREFIX_SHARE: Final = 0.75
"""The share of a prompt that its prefix may take if prefix and suffix are too long."""


class InfillFormat(msgspec.Struct, frozen=True):
    """The fill-in-the-middle prompt format of one model.

    `parts` are token ids, with `PREFIX` and `SUFFIX` where these texts are inserted. `end_ids` are the tokens that end
    the middle. `repository_ids` and `file_ids` are the tokens before a repository and before each of its files; empty
    if the model has none.
    """

    parts: tuple[int | str, ...]
    end_ids: tuple[int, ...]
    repository_ids: tuple[int, ...] = ()
    file_ids: tuple[int, ...] = ()

    def encode(
        self, tokenizer: Tokenizer, prefix: str, suffix: str, *, add_special_tokens: bool
    ) -> list[int]:
        """Return the token ids of the prompt for a prefix and a suffix."""
        texts = {PREFIX: tokenizer.encode(prefix, False), SUFFIX: tokenizer.encode(suffix, False)}
        return [*tokenizer.encode("", add_special_tokens), *self._join(texts)]

    def encode_beside_files(
        self,
        tokenizer: Tokenizer,
        prefix: str,
        suffix: str,
        files: Iterable[tuple[str, str]],
        max_tokens: int,
    ) -> list[int]:
        """Return at most `max_tokens` token ids of the prompt for a prefix and a suffix that follow other files.

        If the texts are too long, the beginnings of the files and the prefix, and the end of the suffix, are left out.

        Args:
            tokenizer: The tokenizer.
            prefix: The text before the answer.
            suffix: The text after the answer.
            files: The name and the text of each other file.
            max_tokens: The maximum length of the prompt.
        """
        start = list(tokenizer.encode("", True))
        room = max(max_tokens - len(start) - len(self.parts), 0)
        before, after = tokenizer.encode(prefix, False), tokenizer.encode(suffix, False)
        num_before = min(len(before), max(int(room * _PREFIX_SHARE), room - len(after)))
        before = before[len(before) - num_before :]
        middle = self._join({PREFIX: before, SUFFIX: after[: room - num_before]})
        others = self._encode_files(tokenizer, files)
        num_cut = len(others) - (max_tokens - len(start) - len(middle))
        if num_cut > 0:
            others = others[num_cut:] if len(others) - num_cut >= _MIN_FILE_TOKENS else []
        return [*start, *others, *middle]

    def _encode_files(self, tokenizer: Tokenizer, files: Iterable[tuple[str, str]]) -> list[int]:
        """Return the token ids of files in the order of a repository, up to the start of the current file."""
        token_ids: list[int] = []
        for name, text in files:
            token_ids += [*self.file_ids, *tokenizer.encode(f"{name}\n{text}\n", False)]
        if token_ids and self.file_ids:
            token_ids += [*self.file_ids, *tokenizer.encode("current\n", False)]
        if token_ids and self.repository_ids:
            token_ids[:0] = [*self.repository_ids, *tokenizer.encode("project\n", False)]
        return token_ids

    def _join(self, texts: dict[str, Sequence[int]]) -> list[int]:
        token_ids: list[int] = []
        for part in self.parts:
            token_ids += texts[part] if isinstance(part, str) else (part,)
        return token_ids


def find_infill_format(tokenizer: Tokenizer) -> InfillFormat | None:
    """Return the format whose tokens the vocabulary has; None for a model without one."""
    for names in _FORMATS:
        parts = [
            name if name in (PREFIX, SUFFIX) else tokenizer.token_to_id(name) for name in names
        ]
        if None not in parts:
            found = (_find_tokens(tokenizer, tokens) for tokens in _REPOSITORIES)
            pairs = zip(found, _REPOSITORIES, strict=True)
            repository = next((ids for ids, names in pairs if len(ids) == len(names)), ())
            return InfillFormat(
                tuple(part for part in parts if part is not None),
                _find_tokens(tokenizer, _ENDS),
                repository_ids=repository[:-1],
                file_ids=repository[-1:],
            )
    return None


def _find_tokens(tokenizer: Tokenizer, names: Iterable[str]) -> tuple[int, ...]:
    """Return the ids of those tokens that the vocabulary has."""
    found = (tokenizer.token_to_id(name) for name in names)
    return tuple(token_id for token_id in found if token_id is not None)


def require_infill(
    found: InfillFormat | None, param: str = "suffix", remedy: str = "omit suffix"
) -> InfillFormat:
    """Return `found`, the format of the model. `param` is the field that needs it.

    Raises:
        APIError: The model has no such format (400).
    """
    if found is None:
        raise bad_request(
            param,
            f"needs a model that can fill in the middle, but this model's vocabulary has no tokens for that; {remedy}",
        )
    return found
