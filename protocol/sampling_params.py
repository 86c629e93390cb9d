"""Sampling parameters of a request, and their limits."""

import math
from collections.abc import Collection
from enum import StrEnum
from itertools import chain
from typing import Final

import msgspec

from .errors import ParameterError

MAX_SEED: Final = 2**63 - 1
"""Largest seed: the largest integer that both JSON clients and int64 tensors represent exactly."""

MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARACTERS: Final = 8192
"""Maximum total characters of all stop strings."""

MAX_LOGIT_BIASES: Final = 1024
MAX_BAD_WORDS: Final = 1024
MAX_BAD_WORDS_CHARACTERS: Final = 16384
"""Maximum total characters of all bad words."""

MAX_STOP_TOKEN_IDS: Final = 1024
MAX_LOGPROB_TOKEN_IDS: Final = 128
"""Maximum number of listed tokens of a request, as in vLLM."""

MAX_DRY_LENGTH: Final = 2**31 - 1
MAX_BREAKERS: Final = 64
MAX_BREAKER_CHARACTERS: Final = 40
"""Maximum characters of a text that ends repetitions. llama.cpp truncates longer ones."""

SAMPLERS: Final = ("top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""The samplers that choose among the tokens, by their names in llama.cpp, and in its default order."""

PLAIN_ORDER: Final = ("temperature", "typ_p", "top_k", "min_p", "top_p")
"""The order of the samplers for requests that use none of the others, and do not choose another order."""

PENALTIES: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")

MAX_N: Final = 128
MAX_PATTERN_SIZE: Final = 1024
"""Maximum tokens of a repeated pattern that is searched for."""


class GrammarKind(StrEnum):
    """The language in which a structured output is specified."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "grammar"
    STRUCTURAL_TAG = "structural_tag"


class FreeReasoning(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Unconstrained reasoning before a constrained text, from one of the `starts` to the first of the `ends`.

    Starts and ends are texts; those that are a single token are also listed by id. If `is_open`, no start is needed,
    because the prompt contains it or the format implies it; there must then be an end. A `grammar` in Lark's notation,
    in which `@answer` is the constrained text, replaces all other fields. If `max_tokens` is not -1, at most that many
    tokens precede the end, which must be a single token. If `is_optional`, the constrained text may come without any
    reasoning although that `is_open`; a text that may be anything can then end before the reasoning does.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    is_open: bool
    grammar: str = ""
    max_tokens: int = -1
    is_optional: bool = False


class StructuredOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A constraint on the generated text, or on the text after its `reasoning`.

    `spec` is a JSON schema, a list of choices in JSON, a regular expression, a Lark grammar, or a structural tag in
    JSON. It is empty for `JSON_OBJECT`. If `is_isolated`, the grammar is so expensive that it runs in its own process.
    """

    kind: GrammarKind
    spec: str = ""
    reasoning: FreeReasoning | None = None
    is_isolated: bool = False


class TranscriptRules(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens that a speech model may sample (Whisper, arXiv 2212.04356).

    `suppressed_token_ids` are never sampled, and `begin_suppressed_token_ids` are not sampled first. If
    `first_timestamp_id` is 0, there are no other rules. Otherwise the tokens from this id on are timestamps, which come
    in pairs around pieces of text, in the order of time:

    * The first token is a timestamp, at most `max_initial_timestamp` after the first one, if that is not -1.
    * After two timestamps in a row, or after the first token, the next token is not a timestamp.
    * After any other timestamp, the next token is a timestamp or has an id of at least `end_token_id`.
    * Timestamps never decrease. Only the second of a pair may equal the first.
    * If all timestamps together are more probable than every other token, a timestamp is sampled.

    With these rules, the token before `first_timestamp_id`, which asks for no timestamps, is never sampled.
    """

    suppressed_token_ids: tuple[int, ...] = ()
    begin_suppressed_token_ids: tuple[int, ...] = ()
    first_timestamp_id: int = 0
    end_token_id: int = 0
    max_initial_timestamp: int = -1


class PromptCandidates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens whose log-probabilities are reported for single tokens of a prompt.

    `token_ids` are int32 [rows, num_tokens]. Row i has the candidates in place of the prompt token `first` + 1 + i, and
    the last row those in place of the last token. Earlier tokens of the prompt, and candidates of -1, report arbitrary
    values.
    """

    first: int
    num_tokens: int
    token_ids: bytes


class RepetitionDetectionParams(msgspec.Struct, frozen=True, gc=False):
    """The repetitions that end an output, as in vLLM: a pattern of tokens at least `min_count` times in a row.

    The pattern has `min_pattern_size` (0 for 1) to `max_pattern_size` tokens. No repetition is searched for if
    `max_pattern_size` is 0.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def verify(self) -> None:
        """Raise ParameterError for the first value that is out of range."""
        name = "repetition_detection"
        _integer(f"{name}.max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_SIZE)
        _integer(f"{name}.min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        if self.max_pattern_size:
            _integer(f"{name}.min_count", self.min_count, 2, None)


class StatesOf(StrEnum):
    """The tokens of a request whose hidden states are returned.

    PROMPT returns those of the prompt, and ALL also those of the output but its last token, which is not computed. LAST
    returns those of the last computed token.
    """

    PROMPT = "prompt"
    ALL = "all"
    LAST = "last"


class ReturnedStates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The hidden states that a request returns: in its answer or, if `in_file`, in a file.

    `path` is the file; the frontend chooses one if it is empty.
    """

    tokens: StatesOf
    path: str = ""
    in_file: bool = False


class DryParams(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A penalty for tokens that would continue a repetition, as in llama.cpp and text-generation-webui ("DRY").

    If the last L tokens occurred before, followed by a token t, then `multiplier * base ** (L - allowed_length)` is
    subtracted from the logit of t, for the longest such L, if that is at least `allowed_length`. No more than 64 tokens
    are compared. Only the last `last_n` tokens of prompt and output are considered, or all if it is -1. A repetition
    does not contain any of the texts `sequence_breakers`. The frontend derives `breaker_token_ids` from them, int32:
    the number of tokens of each spelling, followed by these.
    """

    multiplier: float = 0.0
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1
    sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    breaker_token_ids: bytes = b""

    def verify_numbers(self) -> None:
        """Raise ParameterError for the first number that is out of range."""
        _number("dry_multiplier", self.multiplier, 0.0, 100.0)
        _number("dry_base", self.base, 1.0, 100.0)
        _integer("dry_allowed_length", self.allowed_length, 0, MAX_DRY_LENGTH)
        _integer("dry_penalty_last_n", self.last_n, -1, MAX_DRY_LENGTH)

    def verify_breakers(self) -> None:
        """Raise ParameterError if there are too many breakers, or one is empty or too long."""
        name = "dry_sequence_breakers"
        _length(name, len(self.sequence_breakers), MAX_BREAKERS)
        for i, text in enumerate(self.sequence_breakers):
            if not text:
                raise ParameterError(f"{name}[{i}]", "must not be empty")
            _length(f"{name}[{i}]", len(text), MAX_BREAKER_CHARACTERS, "characters")


class SamplingParams(msgspec.Struct, omit_defaults=True, gc=False):
    """Sampling parameters, with the names and meanings of OpenAI and vLLM.

    The frontend applies `n`, `stop`, `stop_regex`, `include_stop_str_in_output`, `bad_words`, `detokenize`,
    `skip_special_tokens` and `repetition_detection`. The core reads the limits and stop tokens. The workers read
    the rest.

    Attributes:
        max_tokens: The maximum number of output tokens; None for as many as the context allows.
        min_tokens: The number of tokens before which no end-of-sequence or stop token is sampled, unless a structured
            output allows nothing else.
        temperature: The divisor of the logits. 0 is greedy.
        top_p: The total probability of the most probable tokens that are kept. 0 is greedy.
        top_k: The number of most probable tokens that are kept; 0 or -1 keeps all.
        min_p: The minimum probability of a token, as a fraction of that of the most probable one.
        typical_p: The total probability of the most typical tokens that are kept.
        top_n_sigma: The maximum distance of a token's logit from the largest one, in standard deviations of all logits;
            0 keeps all tokens (arXiv 2411.07641).
        xtc_probability: The probability that all but the least probable of the tokens that reach `xtc_threshold` are
            removed ("exclude top choices" of llama.cpp and text-generation-webui).
        xtc_threshold: The probability that such a token has at least.
        dynatemp_range: The temperature lies at most this far from `temperature`, the higher the more uncertain the
            distribution is; 0 for a fixed one.
        dynatemp_exponent: The power of the relative entropy by which it grows.
        samplers: Which of `SAMPLERS` apply, in which order. If there are none, all apply, in the order of
            `sampler_order`. Greedy requests ignore all but the temperature.
        dry: The penalty for repetitions; None for none.
        presence_penalty: Subtracted from the logits of tokens in the output.
        frequency_penalty: Subtracted from the logits of tokens in the output, once for each time that they occur.
        repetition_penalty: Divides positive, and multiplies negative, logits of tokens in the prompt or output.
        seed: The seed of the request; with None or -1, the frontend draws one.
        stop_token_ids: Tokens that end the output.
        ignore_eos: True if end-of-sequence tokens do not end the output.
        logit_bias: Token id -> the number that is added to its logit.
        bad_words_token_ids: Token sequences that are never sampled, as the frontend derives them from `bad_words`.
        allowed_token_ids: The only tokens that may be sampled; None for all.
        logprobs: The number of alternatives to report for each output token; -1 for the whole vocabulary.
        prompt_logprobs: The same for each prompt token.
        structured_output: The grammar of the output.
        n: The number of outputs.
        stop: Texts that end the output.
        stop_regex: Regular expressions whose matches end the output.
        include_stop_str_in_output: True if the output contains the stop text that ended it.
        bad_words: Texts that are never generated.
        detokenize: False if the output has only token ids.
        skip_special_tokens: False if the output's text contains special tokens.
        transcript_rules: Rules for timestamps, which apply before all other filters. Only the frontend sets them.
        processed_logprobs: True if `logprobs` are those of the distribution from which the token is drawn, after all
            changes and filters, instead of the model's own.
        logprob_token_ids: Tokens that are reported after the alternatives of `logprobs`.
        prompt_logprob_token_ids: Tokens that are reported after the alternatives of `prompt_logprobs`.
        prompt_candidates: More tokens that are reported after them, other ones for each prompt token; None for none.
        reports_progress: True if the core reports each computed part of the prompt.
        repetition_detection: The repetitions that end the output; None for none.
        returned_states: The tokens whose hidden states are returned; None for none. Only the frontend sets it.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    samplers: tuple[str, ...] = ()
    dry: DryParams | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    transcript_rules: TranscriptRules | None = None
    processed_logprobs: bool = False
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprob_token_ids: tuple[int, ...] = ()
    prompt_candidates: PromptCandidates | None = None
    reports_progress: bool = False
    repetition_detection: RepetitionDetectionParams | None = None
    returned_states: ReturnedStates | None = None

    @property
    def sampler_order(self) -> tuple[str, ...]:
        """The order in which the samplers apply."""
        if self.samplers:
            return self.samplers
        needs_more = self.top_n_sigma > 0 or self.xtc_probability > 0 or self.dynatemp_range > 0
        return SAMPLERS if needs_more else PLAIN_ORDER

    def verify(self, *, vocab_size: int, max_logprobs: int) -> None:
        """Raise ParameterError for the first parameter that is out of range."""
        self.verify_types()
        self.verify_numbers(vocab_size=vocab_size, max_logprobs=max_logprobs)
        self.verify_lists(vocab_size=vocab_size)

    def verify_types(self) -> None:
        """Raise ParameterError for the first parameter of another type than its field.

        The core could not decode the message with the request, and would drop it.
        """
        try:
            _decode(_encode(self))
        except msgspec.ValidationError as error:
            text, _, path = str(error).replace("`", "").partition(" - at ")
            name = path.rpartition("$.")[2] or "sampling_params"
            raise ParameterError(name, f"has the wrong type: {text.lower()}") from None
        except (TypeError, OverflowError) as error:
            raise ParameterError("sampling_params", str(error)) from None

    def verify_numbers(self, *, vocab_size: int, max_logprobs: int) -> None:
        """Verify the parameters that take constant time to check."""
        _integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
            if self.min_tokens > self.max_tokens:
                raise ParameterError(
                    "min_tokens",
                    f"must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}",
                )
        _integer("min_tokens", self.min_tokens, 0, None)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, None)
        if self.min_p:
            _number("min_p", self.min_p, 0.0, 1.0)
        _number("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        if self.top_n_sigma:
            _number("top_n_sigma", self.top_n_sigma, 0.0, 1000.0)
        if self.xtc_probability:
            _number("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _number("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        if self.dynatemp_range:
            _number("dynatemp_range", self.dynatemp_range, 0.0, 100.0)
        _number("dynatemp_exponent", self.dynatemp_exponent, 0.0, 100.0)
        if self.dry is not None:
            self.dry.verify_numbers()
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.repetition_detection is not None:
            self.repetition_detection.verify()
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _verify_logprobs(name, count, vocab_size, max_logprobs)

    def verify_for_blocks(self) -> None:
        """Raise ParameterError for the first parameter that a block-diffusion model cannot apply.

        These parameters depend on the tokens before each token, which such a model does not know when it chooses the
        token.
        """
        defaults = SamplingParams()
        for name in (*PENALTIES, "dry", "bad_words", "structured_output", "prompt_logprobs"):
            if getattr(self, name) != getattr(defaults, name):
                raise ParameterError(
                    "structured_outputs" if name == "structured_output" else name,
                    "is not supported by block-diffusion models, which choose the tokens of a block "
                    "in any order; remove it",
                )
        if self.processed_logprobs:
            raise ParameterError(
                "logprobs",
                "are those of the model for block-diffusion models; remove the request for processed ones",
            )

    def verify_lists(self, *, vocab_size: int) -> None:
        """Verify the parameters that are lists, whose check takes time in proportion to their length."""
        if self.stop:
            _verify_stops("stop", self.stop)
            if "" in self.stop:
                raise ParameterError("stop", "must not contain an empty string")
        if self.stop_regex:
            _verify_stops("stop_regex", self.stop_regex)
        if self.samplers:
            _length("samplers", len(self.samplers), len(SAMPLERS))
        for i, name in enumerate(self.samplers):
            if name not in SAMPLERS:
                raise ParameterError(
                    f"samplers[{i}]", f"must be one of {', '.join(SAMPLERS)}, got {name[:40]!r}"
                )
        if self.dry is not None:
            self.dry.verify_breakers()
        if self.bad_words:
            num_characters = sum(map(len, self.bad_words))
            _length("bad_words", len(self.bad_words), MAX_BAD_WORDS)
            _length("bad_words", num_characters, MAX_BAD_WORDS_CHARACTERS, "characters")
        if self.stop_token_ids:
            _length("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
            _token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ParameterError("allowed_token_ids", "must not be empty")
            _length("allowed_token_ids", len(self.allowed_token_ids), vocab_size)
            _token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        if listed := self.logprob_token_ids:
            _verify_listed_tokens("logprobs", self.logprobs, listed, vocab_size)
        if listed := self.prompt_logprob_token_ids:
            _verify_listed_tokens("prompt_logprobs", self.prompt_logprobs, listed, vocab_size)
        if self.logit_bias is not None:
            _length("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES)
            _token_ids("logit_bias", self.logit_bias, vocab_size)
            for token, bias in self.logit_bias.items():
                if not -100.0 <= bias <= 100.0:
                    _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.bad_words_token_ids:
            token_ids = tuple(chain.from_iterable(self.bad_words_token_ids))
            _token_ids("bad_words", token_ids, vocab_size)
        if (rules := self.transcript_rules) is not None:
            for name, token_ids in (
                ("suppressed_token_ids", rules.suppressed_token_ids),
                ("begin_suppressed_token_ids", rules.begin_suppressed_token_ids),
                ("first_timestamp_id", (rules.first_timestamp_id,)),
                ("end_token_id", (rules.end_token_id,)),
            ):
                _token_ids(f"transcript_rules.{name}", token_ids, vocab_size)


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(SamplingParams).decode


def _integer(name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ParameterError(name, f"must be {limit}, got {value}")


def _number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    too_low = value <= low if open_low else value < low
    # An integer beyond all doubles must be compared first.
    if too_low or value > high or not math.isfinite(value):
        left = "(" if open_low else "["
        raise ParameterError(name, f"must be in {left}{low:g}, {high:g}], got {value}")


def _length(name: str, length: int, limit: int, unit: str = "entries") -> None:
    if length > limit:
        raise ParameterError(name, f"must have at most {limit} {unit}, got {length}")


def _token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not token_ids:
        return
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise ParameterError(
            name,
            f"token id {low if low < 0 else high} is outside the vocabulary [0, {vocab_size})",
        )


def _verify_stops(name: str, texts: Collection[str]) -> None:
    _length(name, len(texts), MAX_STOP_STRINGS)
    _length(name, sum(map(len, texts)), MAX_STOP_CHARACTERS, "characters")


def _verify_listed_tokens(
    needed: str, count: int | None, token_ids: Collection[int], vocab_size: int
) -> None:
    name = f"{needed.removesuffix('s')}_token_ids"
    if count is None:
        raise ParameterError(name, f"needs {needed}")
    _length(name, len(token_ids), MAX_LOGPROB_TOKEN_IDS)
    _token_ids(name, token_ids, vocab_size)


def _verify_logprobs(name: str, count: int, vocab_size: int, max_logprobs: int) -> None:
    wanted = vocab_size if count == -1 else count
    limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
    if count < -1:
        raise ParameterError(name, f"must be -1 or at least 0, got {count}")
    if wanted > limit:
        meaning = f", which means all {vocab_size} tokens" if count == -1 else ""
        raise ParameterError(
            name, f"must be at most {limit} (--max-logprobs), got {count}{meaning}"
        )
