"""Fill-in-the-middle prompts: the model writes the text between a prefix and a suffix.

They are for models that were trained to fill in the middle (arXiv 2207.14255).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..http.errors import bad_request
from ..tokenizer import Tokenizer

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


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The fill-in-the-middle prompt format of one model.

    `parts` are token ids, with `PREFIX` and `SUFFIX` where these texts are inserted. `end_ids` are the tokens that end
    the middle.
    """

    parts: tuple[int | str, ...]
    end_ids: tuple[int, ...]

    def encode(
        self, tokenizer: Tokenizer, prefix: str, suffix: str, *, add_special_tokens: bool
    ) -> list[int]:
        """Return the token ids of the prompt for a prefix and a suffix."""
        texts = {PREFIX: prefix, SUFFIX: suffix}
        token_ids = list(tokenizer.encode("", add_special_tokens))
        for part in self.parts:
            if isinstance(part, str):
                token_ids += tokenizer.encode(texts[part], False)
            else:
                token_ids.append(part)
        return token_ids


def find_infill_format(tokenizer: Tokenizer) -> InfillFormat | None:
    """Return the format whose tokens the vocabulary has; None for a model without one."""
    for names in _FORMATS:
        parts = [
            name if name in (PREFIX, SUFFIX) else tokenizer.token_to_id(name) for name in names
        ]
        if None not in parts:
            ends = (tokenizer.token_to_id(name) for name in _ENDS)
            return InfillFormat(
                tuple(part for part in parts if part is not None),
                tuple(token_id for token_id in ends if token_id is not None),
            )
    return None


def require_infill(found: InfillFormat | None) -> InfillFormat:
    """Return `found`, the format of the model.

    Raises:
        APIError: The model has no such format (400).
    """
    if found is None:
        raise bad_request(
            "suffix",
            "suffix needs a model that fills in the middle, and this model's vocabulary has no tokens for it; "
            "leave suffix out",
        )
    return found
