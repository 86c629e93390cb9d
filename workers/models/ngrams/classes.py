"""The classes of tokens of which n-grams consist: tokens with similar texts have the same class."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from ....protocol.errors import CheckpointError

_SPACE = "\ue000"
"""Replaces a text that is one space, because spaces at both ends are removed."""
_REPLACEMENT = "\ufffd"
"""The character in the texts of tokens that are parts of a character."""


@lru_cache(maxsize=1)
def token_classes(directory: Path, vocab_size: int, num_classes: int) -> NDArray[np.int64]:
    """Return the class of each token, numbered in the order of their first tokens. All layers share the result.

    Texts are equal apart from case, accents, forms of characters, and the kind and number of spaces.

    Args:
        directory: The checkpoint, with a `tokenizer.json`.
        vocab_size: The number of tokens; those that the tokenizer lacks have the class of the first token.
        num_classes: The number of classes that the checkpoint states.

    Raises:
        CheckpointError: There is no tokenizer, or its tokens have another number of classes.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(path, "is missing, from which the model computes classes of tokens")
    tokenizer = Tokenizer.from_file(str(path))
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
    numbers: dict[str, int] = {}
    classes = np.zeros(vocab_size, np.int64)
    for token in range(min(vocab_size, tokenizer.get_vocab_size())):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT in text:
            text = tokenizer.id_to_token(token) or text
        else:
            text = normalizer.normalize_str(text) or text
        classes[token] = numbers.setdefault(text, len(numbers))
    if len(numbers) != num_classes:
        raise CheckpointError(
            path,
            f"has tokens of {len(numbers)} classes, but the config states {num_classes} "
            "(engram_compressed_vocab_size); use the tokenizer of the model",
        )
    return classes
