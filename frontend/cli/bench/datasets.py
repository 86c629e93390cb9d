"""The requests of a benchmark: random, from a file, with shared prefixes, a trace, or conversations of agents.

Everything is drawn with a seed, so that two servers, or two runs, get the same requests. Options have the names that
`vllm bench serve` gives them.
"""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from ....protocol.errors import ConfigError

Prompt: TypeAlias = str | list[int]
"""A text, or token ids. Token ids give the exact number of prompt tokens with every tokenizer."""

FIRST_ORDINARY_ID: Final = 1000
"""In nearly every vocabulary, all ids from this one up are ordinary tokens and not special ones."""
CHARACTERS_A_TOKEN: Final = 4
"""Typical number of characters per token, used where the tokenizer is not known."""
_DEFAULT_COUNT: Final = 100
_SHORTEST_TOKENS: Final = 4
_MOST_PROMPT_TOKENS: Final = 1024
_MOST_TOTAL_TOKENS: Final = 2048
"""Maximum prompt plus answer tokens of conversations from a ShareGPT file, as in vLLM."""

_COMMON: Final = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law "
    "car city name team minute idea body back parent face level office door health person art war "
    "history party result change morning reason research girl guy moment air teacher force education"
)
_WORDS: Final = tuple(_COMMON.split())
"""Words that are one token each in most vocabularies."""


class DatasetName(enum.StrEnum):
    """The kinds of requests that `--dataset-name` offers."""

    RANDOM = "random"
    SHAREGPT = "sharegpt"
    PREFIX = "prefix_repetition"
    AGENT = "agent"
    TRACE = "trace"


class Turn(msgspec.Struct, frozen=True):
    """A request of a session: the text that it adds to the conversation, and the maximum tokens of its answer."""

    prompt: Prompt
    max_tokens: int


class Session(msgspec.Struct, frozen=True):
    """A conversation. The prompt of each request begins with all earlier prompts and answers.

    `start` is the time of its first request in seconds, if the dataset has such times.
    """

    turns: list[Turn]
    system: str | None = None
    start: float | None = None


Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Ratio: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class DatasetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of all datasets. Lengths are in tokens. The strings in the annotations are the help lines."""

    dataset_name: Annotated[DatasetName, "Source of the prompts"] = DatasetName.RANDOM
    dataset_path: Annotated[
        str | None, "File for sharegpt, agent or trace; see the documentation for its format"
    ] = None
    num_prompts: Annotated[
        Positive | None, "Number of requests or conversations (default: 100, or all of a trace)"
    ] = None
    random_input_len: Annotated[Positive, "random: prompt tokens"] = 1024
    random_output_len: Annotated[Positive, "random: generated tokens"] = 128
    random_range_ratio: Annotated[Ratio, "random: lengths vary by up to this fraction"] = 0.0
    random_prefix_len: Annotated[Count, "random: tokens of a prefix shared by all prompts"] = 0
    random_vocab_size: Annotated[Positive, "random: token ids are below this"] = 30_000
    sharegpt_output_len: Annotated[
        Positive | None, "sharegpt: generated tokens (default: as recorded)"
    ] = None
    prefix_repetition_prefix_len: Annotated[
        Count, ("prefix_repetition: tokens of a shared prefix")
    ] = 256
    prefix_repetition_suffix_len: Annotated[
        Positive, ("prefix_repetition: tokens after the prefix")
    ] = 256
    prefix_repetition_num_prefixes: Annotated[
        Positive, ("prefix_repetition: number of different prefixes")
    ] = 10
    prefix_repetition_output_len: Annotated[Positive, "prefix_repetition: generated tokens"] = 128
    agent_turns: Annotated[Positive, "agent: requests per conversation"] = 8
    agent_system_len: Annotated[Count, "agent: tokens of the system prompt, shared by all"] = 1024
    agent_input_len: Annotated[Positive, "agent: tokens that each request adds"] = 256
    agent_output_len: Annotated[Positive, "agent: generated tokens per request"] = 64
    seed: Annotated[int, "Seed of the requests and their arrival times"] = 0

    @property
    def is_synthetic(self) -> bool:
        """True if the texts are random, so that answers have no natural end."""
        if self.dataset_name is DatasetName.TRACE:
            return True
        return self.dataset_name is not DatasetName.SHAREGPT and self.dataset_path is None

    @property
    def needs_messages(self) -> bool:
        """True if the requests are chats."""
        return self.dataset_name is DatasetName.AGENT


def check_file(options: DatasetOptions) -> None:
    """Check that the file of a dataset is given and can be read, before a server is started for it.

    Raises:
        ConfigError: It is missing.
    """
    if options.dataset_path is not None:
        try:
            with Path(options.dataset_path).open("rb"):
                pass
        except OSError as error:
            raise ConfigError(f"--dataset-path {options.dataset_path}: {error.strerror}") from None
    elif options.dataset_name in (DatasetName.SHAREGPT, DatasetName.TRACE):
        raise ConfigError(f"--dataset-name {options.dataset_name} needs --dataset-path FILE")


def make_sessions(options: DatasetOptions, count: int | None, *, as_text: bool) -> list[Session]:
    """Return `count` sessions, or the default number if it is None.

    Args:
        options: The options of the dataset.
        count: The number of sessions.
        as_text: True if prompts are texts instead of token ids, as chats need. Their token counts are approximate.

    Raises:
        ConfigError: The file cannot be used, or has too few conversations.
    """
    if options.dataset_name is DatasetName.TRACE:
        return _from_trace(options, as_text=as_text)[:count]
    count = count or _DEFAULT_COUNT
    rng = random.Random(options.seed)
    if options.dataset_name is DatasetName.SHAREGPT or options.dataset_path is not None:
        return _from_file(options, count, rng)

    draw = _drawer(options, rng, as_text=as_text)

    match options.dataset_name:
        case DatasetName.PREFIX:
            return _shared_prefixes(options, count, draw)
        case DatasetName.AGENT:
            return _agents(options, count, rng)
    return _random(options, count, rng, draw)


def _drawer(options: DatasetOptions, rng: random.Random, *, as_text: bool) -> Callable[[int], Any]:
    """Return a function that draws a prompt of a length."""
    if options.random_vocab_size <= FIRST_ORDINARY_ID:
        raise ConfigError(
            f"--random-vocab-size {options.random_vocab_size}: must be above {FIRST_ORDINARY_ID}, because "
            "smaller ids may be special tokens"
        )

    def draw(length: int) -> Any:
        if as_text:
            return " ".join(rng.choices(_WORDS, k=length)) + " "
        return rng.choices(range(FIRST_ORDINARY_ID, options.random_vocab_size), k=length)

    return draw


def _random(
    options: DatasetOptions, count: int, rng: random.Random, draw: Callable[[int], Any]
) -> list[Session]:
    def vary(length: int) -> int:
        by = int(length * options.random_range_ratio)
        return max(1, rng.randint(length - by, length + by))

    prefix = draw(options.random_prefix_len)
    return [
        Session(
            [
                Turn(
                    prefix + draw(vary(options.random_input_len)),
                    vary(options.random_output_len),
                )
            ]
        )
        for _ in range(count)
    ]


def _shared_prefixes(
    options: DatasetOptions, count: int, draw: Callable[[int], Any]
) -> list[Session]:
    prefixes = [
        draw(options.prefix_repetition_prefix_len)
        for _ in range(options.prefix_repetition_num_prefixes)
    ]
    return [
        Session(
            [
                Turn(
                    prefixes[index % len(prefixes)] + draw(options.prefix_repetition_suffix_len),
                    options.prefix_repetition_output_len,
                )
            ]
        )
        for index in range(count)
    ]


def _agents(options: DatasetOptions, count: int, rng: random.Random) -> list[Session]:
    """Return conversations like those of agents: a long shared system prompt, then short answers to long inputs."""

    def draw(length: int) -> str:
        return " ".join(rng.choices(_WORDS, k=length))

    system = draw(options.agent_system_len) or None
    return [
        Session(
            [
                Turn(draw(options.agent_input_len), options.agent_output_len)
                for _ in range(options.agent_turns)
            ],
            system,
        )
        for _ in range(count)
    ]


class _TraceLine(msgspec.Struct):
    """The fields of a trace for `engine simulate` that a client can imitate. Tokens of equal prefixes are equal."""

    arrival: float
    prompt_tokens: Positive
    output_tokens: Positive
    prefix: str = ""
    prefix_tokens: Count = 0


def _from_trace(options: DatasetOptions, *, as_text: bool) -> list[Session]:
    """Return the requests of a trace with random tokens, sorted by their times."""
    assert options.dataset_path is not None
    sessions = []
    for number, line in enumerate(Path(options.dataset_path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = msgspec.json.decode(line, type=_TraceLine)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"--dataset-path {options.dataset_path}, line {number}: {error}"
            ) from None
        num_shared = min(request.prefix_tokens, request.prompt_tokens) if request.prefix else 0
        seeds = f"{options.seed} {request.prefix}", f"{options.seed} {number}"
        draw_shared, draw = (
            _drawer(options, random.Random(seed), as_text=as_text) for seed in seeds
        )
        prompt = draw_shared(num_shared) + draw(request.prompt_tokens - num_shared)
        sessions.append(Session([Turn(prompt, request.output_tokens)], start=request.arrival))
    if not sessions:
        raise ConfigError(f"--dataset-path {options.dataset_path}: contains no request")
    return sorted(sessions, key=lambda session: session.start or 0.0)


def _from_file(options: DatasetOptions, count: int, rng: random.Random) -> list[Session]:
    assert options.dataset_path is not None
    path = Path(options.dataset_path)
    is_agent = options.dataset_name is DatasetName.AGENT
    sessions = []
    for system, pairs in read_conversations(path):
        turns = [
            Turn(asked, options.sharegpt_output_len or max(1, len(told) // CHARACTERS_A_TOKEN))
            for asked, told in (pairs if is_agent else pairs[:1])
        ]
        if turns and (is_agent or _is_usable(turns[0])):
            sessions.append(Session(turns, system if is_agent else None))
    if not sessions:
        raise ConfigError(f"--dataset-path {path}: contains no usable conversation")
    rng.shuffle(sessions)
    return [sessions[index % len(sessions)] for index in range(count)]


def _is_usable(turn: Turn) -> bool:
    prompt = len(turn.prompt) // CHARACTERS_A_TOKEN
    return (
        prompt >= _SHORTEST_TOKENS
        and turn.max_tokens >= _SHORTEST_TOKENS
        and prompt <= _MOST_PROMPT_TOKENS
        and prompt + turn.max_tokens <= _MOST_TOTAL_TOKENS
    )


def read_conversations(path: Path) -> Iterator[tuple[str | None, list[tuple[str, str]]]]:
    """Yield the system prompt and the (question, answer) pairs of each conversation of a file.

    The file has ShareGPT's format, a list of objects with `conversations`, or has one JSON object per line with
    `messages` in OpenAI's format.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            entries = json.loads(text)
        else:
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path}: invalid JSON: {error}") from None
    for entry in entries:
        if not isinstance(entry, dict):
            raise ConfigError(f"--dataset-path {path}: a conversation must be an object")
        yield _split_conversation(entry)


def _split_conversation(entry: dict[str, Any]) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the system prompt, and for each answer of the assistant the text before it and the answer."""
    said = [
        (str(m.get("from") or m.get("role")), m.get("value") or m.get("content") or "")
        for m in entry.get("conversations") or entry.get("messages") or ()
    ]
    system = None
    asked: list[str] = []
    pairs = []
    for role, text in said:
        if not isinstance(text, str):
            continue
        if role == "system":
            system = text
        elif role in ("gpt", "assistant"):
            if asked:
                pairs.append(("\n".join(asked), text))
            asked = []
        else:
            # Results of tools count as input, as messages of the user do.
            asked.append(text)
    return system, pairs
