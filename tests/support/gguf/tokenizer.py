"""The tokenizer of a GGUF file."""

from __future__ import annotations

import json
import re
from typing import Any

import transformers
from gguf import GGUFWriter, TokenType


def add_tokenizer(
    writer: GGUFWriter,
    tokenizer: transformers.PreTrainedTokenizerFast,
    vocab_size: int,
    pre_tokenizer: str,
) -> None:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    is_sentencepiece = model["type"] == "Unigram" or model.get("byte_fallback", False)
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for token, i in tokenizer.get_vocab().items():
        tokens[i], types[i] = token, TokenType.NORMAL
        if is_sentencepiece and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            types[i] = TokenType.BYTE
    for added in content["added_tokens"]:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        types[added["id"]] = kind
    if tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = TokenType.UNKNOWN
        writer.add_unk_token_id(tokenizer.unk_token_id)

    writer.add_tokenizer_model("llama" if is_sentencepiece else "gpt2")
    writer.add_tokenizer_pre("default" if is_sentencepiece else pre_tokenizer)
    writer.add_token_list(tokens)
    if is_sentencepiece:
        scores = sentencepiece_scores(model)
        writer.add_token_scores([scores.get(token, -10_000.0) for token in tokens])
    writer.add_token_types(types)
    if not is_sentencepiece:
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    else:
        first = tokenizer.tokenize("a")[0]
        writer.add_add_space_prefix(first.startswith("▁"))
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
        writer.add_add_bos_token(tokenizer("a").input_ids[0] == tokenizer.bos_token_id)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def sentencepiece_scores(model: dict[str, Any]) -> dict[str, float]:
    """Return scores in which earlier merges are better."""
    if model["type"] == "Unigram":
        return dict(model["vocab"])
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(model["merges"]):
        scores.setdefault(left + right, -float(rank))
    return scores
