"""The tokens that a model adds to texts that it embeds, and those whose results it leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...protocol.arrays import Int32Array
from ...protocol.config.model import PoolerConfig, TextChangesConfig
from ...protocol.errors import ConfigError
from ..tokenizer.absent import AbsentTokenizer
from ..tokenizer.token_ids import truncate
from ..tokenizer.tokenizer import Tokenizer


class TextChanges:
    """Changes the tokens of texts. `role` is the name of the model's prompt, such as "query"; "" for others.

    Raises:
        ConfigError: The tokenizer does not have the token that fills texts.
    """

    def __init__(self, config: TextChangesConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._prefix_ids = {
            role: tokenizer.token_to_id(token) for role, token in config.prefixes.items() if token
        }
        self._expansion_id = 0
        if config.expanded_length:
            expansion_id = tokenizer.token_to_id(config.expansion_token)
            if expansion_id is None:
                raise ConfigError(
                    f"the token {config.expansion_token!r}, which fills texts, is not in the tokenizer"
                )
            self._expansion_id = expansion_id
        self._skipped_ids = {
            role: np.array(
                [id_ for token in tokens if (id_ := tokenizer.token_to_id(token)) is not None],
                np.int32,
            )
            for role, tokens in config.skipped_tokens.items()
        }

    @classmethod
    def find(cls, pooler: PoolerConfig, tokenizer: Tokenizer) -> TextChanges | None:
        """Return a model's changes to texts; None if it leaves them unchanged, or if there is no tokenizer."""
        config = pooler.text_changes
        if config is None or isinstance(tokenizer, AbsentTokenizer):
            return None
        return cls(config, tokenizer)

    def prefix_of(self, role: str) -> str:
        """Return the text to put before a text whose prefix is not a token."""
        return "" if self._prefix_ids.get(role) is not None else self._config.prefixes.get(role, "")

    def suffix_of(self, role: str) -> str:
        """Return the text to put after a text."""
        return self._config.suffixes.get(role, "")

    def add_tokens(
        self, role: str, text: str, token_ids: Sequence[int] | Int32Array
    ) -> tuple[Int32Array, int]:
        """Return the tokens of a text, cut and with those that the model adds, and the number of visible tokens.

        Tokens attend only to the visible ones at the start; 0 for all. `token_ids` are those of `text` with special
        tokens.
        """
        config, prefix_id = self._config, self._prefix_ids.get(role)
        found = np.asarray(token_ids, np.int32)
        most = config.lengths.get(role, len(found) + 1) - (prefix_id is not None)
        if len(found) > most:
            bare = self._tokenizer.encode(text, add_special_tokens=False)
            found = truncate(found, np.asarray(bare, np.int32), most, "right")
        if prefix_id is not None:
            found = np.insert(found, 1, prefix_id)
        num_visible = len(found)
        missing = config.expanded_length - num_visible
        if not (role == "query" or config.expands_all) or missing <= 0:
            return found, 0
        filled = np.concatenate((found, np.full(missing, self._expansion_id, np.int32)))
        return filled, num_visible if config.hides_expansion else 0

    def keeps(self, role: str, token_ids: Int32Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which tokens have results, bool [T]."""
        skipped = self._skipped_ids.get(role, np.empty(0, np.int32))
        return ~np.isin(token_ids, skipped)
