"""Requests to measure with: random ones, those of a file, ones with shared prefixes, and conversations of agents.

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
"""A text, or token ids, whose number is exact with every tokenizer."""

FIRST_ORDINARY_ID: Final = 1000
"""Ids from here up are ordinary words in nearly every vocabulary."""
CHARACTERS_A_TOKEN: Final = 4
"""A usual length of tokens, where the tokenizer is not known."""
_SHORTEST_TOKENS: Final = 4
_MOST_PROMPT_TOKENS: Final = 1024
_MOST_TOTAL_TOKENS: Final = 2048
"""Limits of the conversations that are taken from a ShareGPT file, which are those of vLLM."""

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
    """The datasets."""

    RANDOM = "random"
    SHAREGPT = "sharegpt"
    PREFIX = "prefix_repetition"
    AGENT = "agent"


class Turn(msgspec.Struct, frozen=True):
    """A request: what it adds to the conversation, and the maximum tokens of its answer."""

    prompt: Prompt
    max_tokens: int


class Session(msgspec.Struct, frozen=True):
    """A conversation. Each request has those before it, and their answers, in front of its own prompt."""

    turns: list[Turn]
    system: str | None = None


Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Ratio: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class DatasetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of all datasets. Lengths are in tokens. The texts are the help lines."""

    dataset_name: Annotated[DatasetName, "Requests to send"] = DatasetName.RANDOM
    dataset_path: Annotated[
        str | None, "File of sharegpt or agent: ShareGPT's JSON, or JSON lines with messages"
    ] = None
    num_prompts: Annotated[Positive, "Requests; with agent, conversations"] = 100
    random_input_len: Annotated[Positive, "Prompt tokens of random"] = 1024
    random_output_len: Annotated[Positive, "Generated tokens of random"] = 128
    random_range_ratio: Annotated[Ratio, "Lengths of random vary by this share"] = 0.0
    random_prefix_len: Annotated[Count, "Tokens that all prompts of random begin with"] = 0
    random_vocab_size: Annotated[Positive, "Token ids of random are below this"] = 30_000
    sharegpt_output_len: Annotated[
        Positive | None, "Generated tokens of sharegpt (default: as recorded)"
    ] = None
    prefix_repetition_prefix_len: Annotated[Count, "Tokens of a shared prefix"] = 256
    prefix_repetition_suffix_len: Annotated[Positive, "Tokens behind a shared prefix"] = 256
    prefix_repetition_num_prefixes: Annotated[Positive, "Different shared prefixes"] = 10
    prefix_repetition_output_len: Annotated[Positive, "Generated tokens behind a shared prefix"] = (
        128
    )
    agent_turns: Annotated[Positive, "Requests of a conversation of agent"] = 8
    agent_system_len: Annotated[Count, "Tokens of the system prompt of agent, shared by all"] = 1024
    agent_input_len: Annotated[Positive, "Tokens that each request of agent adds"] = 256
    agent_output_len: Annotated[Positive, "Generated tokens of a request of agent"] = 64
    seed: Annotated[int, "Seed of the requests and of their times"] = 0

    @property
    def is_synthetic(self) -> bool:
        """Return whether the texts mean nothing, so that the end of an answer is arbitrary."""
        return self.dataset_name is not DatasetName.SHAREGPT and self.dataset_path is None

    @property
    def needs_messages(self) -> bool:
        """Return whether the conversations are those of chats."""
        return self.dataset_name is DatasetName.AGENT


def make_sessions(options: DatasetOptions, count: int, *, as_text: bool) -> list[Session]:
    """Return `count` sessions.

    Args:
        options: The options of the dataset.
        count: The number of sessions.
        as_text: Prompts are texts rather than token ids, for chats. Their numbers of tokens are approximate.

    Raises:
        ConfigError: The file cannot be used, or has too few conversations.
    """
    rng = random.Random(options.seed)
    if options.dataset_name is DatasetName.SHAREGPT or options.dataset_path is not None:
        return _from_file(options, count, rng)

    def draw(length: int) -> Any:
        if as_text:
            return " ".join(rng.choices(_WORDS, k=length)) + " "
        return rng.choices(range(FIRST_ORDINARY_ID, options.random_vocab_size), k=length)

    match options.dataset_name:
        case DatasetName.PREFIX:
            return _shared_prefixes(options, count, draw)
        case DatasetName.AGENT:
            return _agents(options, count, rng)
    return _random(options, count, rng, draw)


def _random(
    options: DatasetOptions, count: int, rng: random.Random, draw: Callable[[int], Any]
) -> list[Session]:
    if options.random_vocab_size <= FIRST_ORDINARY_ID:
        raise ConfigError(
            f"--random-vocab-size {options.random_vocab_size}: must be above {FIRST_ORDINARY_ID}, because the ids below it "
            "may be special tokens"
        )

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
    """Return conversations as agents have them: a long shared system prompt, then many short answers to long inputs."""

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


def _from_file(options: DatasetOptions, count: int, rng: random.Random) -> list[Session]:
    if options.dataset_path is None:
        raise ConfigError(f"--dataset-name {options.dataset_name} needs --dataset-path FILE")
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
        raise ConfigError(f"--dataset-path {path}: has no conversation that can be used")
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
    """Yield the system prompt and the pairs of question and answer of each conversation of a file.

    The file has ShareGPT's form, a list of objects with `conversations`, or a line of JSON for each conversation with
    `messages` in OpenAI's form.

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
        raise ConfigError(f"--dataset-path {path}: not JSON: {error}") from None
    for entry in entries:
        if not isinstance(entry, dict):
            raise ConfigError(f"--dataset-path {path}: a conversation must be an object")
        yield _split_conversation(entry)


def _split_conversation(entry: dict[str, Any]) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the system prompt, and what each answer of the assistant answers, with that answer."""
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
            # The results of tools are input, too.
            asked.append(text)
    return system, pairs
