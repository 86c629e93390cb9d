"""Compile grammars, and track the state of one request in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ..errors import EngineError
from ..sampling_params import StructuredOutput
from .grammar import grammar_text, shorten_error
from .special_tokens import SpecialTokens, special_tokens_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_ITEMS_IN_ROW: Final = 10_000
"""Maximum items in a parser row for grammars in the core. About 20,000 take 1 ms. llguidance's default is 2,000."""

MAX_ISOLATED_ITEMS: Final = 5_000_000
MAX_ISOLATED_FUEL: Final = 100_000_000
"""Lexer fuel of an isolated grammar, about 50,000 of which take 1 ms.

The process's limits on time and memory are reached before this one.
"""

MAX_ISOLATED_SYMBOLS: Final = 2_000_000


class CompileError(EngineError):
    """Raised for a grammar that cannot be compiled within the limits. `reason` is llguidance's message."""

    def __init__(self, structured_output: StructuredOutput, reason: str) -> None:
        self.reason = shorten_error(reason)
        super().__init__(f"the {structured_output.kind.value} cannot be compiled: {self.reason}")


class GrammarState(msgspec.Struct):
    """The state of one request in its grammar.

    llguidance's matcher does not count end tokens after it has stopped, so they are counted here. A matcher that has
    refused a token is in an error state and accepts no more tokens.
    """

    matcher: LLMatcher
    end_token_ids: frozenset[int]
    special_tokens: SpecialTokens
    can_roll_back: bool
    """False for a grammar with a terminal that llguidance limits by `max_tokens` or ends by `stop`."""
    num_ends_after_stop: int = 0

    @property
    def error(self) -> str:
        """The reason why the matcher accepts no more tokens; "" if it has no error."""
        return shorten_error(self.matcher.get_error()) if self.matcher.is_error() else ""

    def compute_mask(self) -> bytes:
        """Return a bitmask of the allowed next tokens, one bit per token."""
        mask = bytearray(self.matcher.compute_bitmask())
        self.allow_special_texts(memoryview(mask))
        return bytes(mask)

    def allow_special_texts(self, mask: memoryview) -> None:
        """Change a computed bitmask: where a special token's text is forced, allow that text instead of the token."""
        if not (allowed := self.special_tokens.find_allowed(mask)):
            return
        matcher = self.matcher
        if matcher.is_stopped() or matcher.is_error():
            return
        refused = [token_id for token_id in allowed if not matcher.validate_tokens([token_id])]
        if not refused:
            return
        instead = self.special_tokens.find_first_token(matcher.compute_ff_bytes())
        if instead is not None:
            mask[instead // 8] |= 1 << instead % 8
            for token_id in refused:
                mask[token_id // 8] &= ~(1 << token_id % 8) & 0xFF

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance by these tokens. Return False if the grammar forbids one of them."""
        for token_id in token_ids:
            if not self.matcher.is_stopped():
                if not self.matcher.consume_token(token_id):
                    return False
            elif token_id in self.end_token_ids and not self.matcher.is_error():
                self.num_ends_after_stop += 1
            else:
                return False
        return True

    def num_acceptable(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens would be accepted in a row, without advancing."""
        count = self.matcher.validate_tokens(list(token_ids))
        if count:
            is_over = token_ids[count - 1] in self.end_token_ids
        else:
            is_over = self.matcher.is_stopped() and not self.matcher.is_error()
        if is_over:
            count += sum(1 for _ in takewhile(self.end_token_ids.__contains__, token_ids[count:]))
        return count

    def forced_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that must follow these, without advancing."""
        trial = self._begin_trial()
        if not trial.accept(token_ids):
            return []
        forced = [] if trial.matcher.is_stopped() else trial.matcher.compute_ff_tokens()
        if not self.special_tokens.ids.isdisjoint(forced):
            forced = forced[: trial.matcher.validate_tokens(forced)]
        self._end_trial(len(token_ids))
        return forced

    def compute_masks(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the mask before each token up to the first forbidden one, and after the last, without advancing."""
        trial = self._begin_trial()
        masks = [trial.compute_mask()]
        for token_id in token_ids:
            if not trial.num_acceptable((token_id,)) or not trial.accept((token_id,)):
                break
            masks.append(trial.compute_mask())
        self._end_trial(len(masks) - 1)
        return masks

    def _begin_trial(self) -> GrammarState:
        """Return the state to advance by tokens on trial: this one, or a copy if it could not be rolled back."""
        if self.can_roll_back:
            return self
        return msgspec.structs.replace(self, matcher=self.matcher.deep_copy())

    def _end_trial(self, num_tokens: int) -> None:
        """Undo the last tokens that were accepted on trial, unless a copy accepted them."""
        if self.can_roll_back:
            ends = min(num_tokens, self.num_ends_after_stop)
            self.num_ends_after_stop -= ends
            self.matcher.rollback(num_tokens - ends)


def load_grammar_tokenizer(path: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Load a tokenizer.json file, or the one in a directory.

    Raises:
        EngineError: There is no tokenizer.json, or no end token, which the masks after the end allow alone.
    """
    if not eos_token_ids:
        raise EngineError(
            "structured outputs need an end token, but this model's files name none; add eos_token_id to config.json"
        )
    # Imported here so that only processes that use grammars load the library.
    from llguidance import LLTokenizer

    json_path = Path(path)
    if path and json_path.is_dir():
        json_path /= "tokenizer.json"
    if json_path.suffix != ".json" or not json_path.is_file():
        raise EngineError("structured outputs need a tokenizer.json, but this model has none")
    # Each call holds the interpreter lock, so that the core's loop waits. Two calls let it run in between.
    whole = LLTokenizer(
        str(json_path), n_vocab=vocab_size, eos_token=sorted(eos_token_ids), slices=[]
    )
    tokenizer = whole.with_slices(LLTokenizer.general_slices())
    # Find the special tokens now, so that processes forked from this one do not have to do it again.
    special_tokens_of(tokenizer)
    return tokenizer


def shared_limits() -> LLParserLimits:
    """Return limits for a grammar in the core, where a token may delay others by a few milliseconds at most."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=MAX_ITEMS_IN_ROW, verbose_errors=False)


def isolated_limits() -> LLParserLimits:
    """Return limits for a grammar in its own process, whose time and memory are limited anyway."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=MAX_ISOLATED_ITEMS,
        step_max_items=MAX_ISOLATED_ITEMS,
        initial_lexer_fuel=MAX_ISOLATED_FUEL,
        step_lexer_fuel=MAX_ISOLATED_FUEL,
        max_grammar_size=MAX_ISOLATED_SYMBOLS,
        verbose_errors=False,
    )


def verify_grammar(structured_output: StructuredOutput) -> None:
    """Check a grammar without a tokenizer.

    Raises:
        CompileError: The grammar is invalid with any tokenizer.
        ParameterError: The specification cannot be read.
    """
    from llguidance import LLMatcher

    grammar = grammar_text(structured_output)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=isolated_limits())
    if is_error:
        raise CompileError(structured_output, " ".join(messages))


def start_grammar(
    matcher: LLMatcher, end_token_ids: frozenset[int], special_tokens: SpecialTokens
) -> GrammarState:
    """Return the state of a request at the beginning of its compiled grammar."""
    trial = matcher.deep_copy()
    allowed = int.from_bytes(trial.compute_bitmask(), "little")
    first_allowed = (allowed & -allowed).bit_length() - 1
    can_roll_back = trial.consume_token(first_allowed) and trial.rollback(1)
    return GrammarState(matcher, end_token_ids, special_tokens, can_roll_back)


def compile_grammar(
    tokenizer: LLTokenizer, structured_output: StructuredOutput, limits: LLParserLimits
) -> LLMatcher:
    """Compile a grammar and compute its first mask, which is a large part of the work for a large grammar.

    Raises:
        CompileError: The grammar cannot be compiled within the limits.
        ParameterError: The specification cannot be read.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar_text(structured_output), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise CompileError(structured_output, matcher.get_error())
    return matcher
