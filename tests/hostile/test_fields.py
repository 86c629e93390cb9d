"""Every field of every route gets values that are wrong, long, deep or large.

Routes and fields are read from the server's own `/openapi.json`, so a new one is attacked automatically.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

import pytest
from support.hostile.client import make_request
from support.hostile.target import NUM_THREADS, Attack, Route, Target
from support.hostile.values import LARGE, LARGEST, NESTED, SMALL
from support.suite.sampled_cases import Sampled

IS_FULL: Final = bool(os.environ.get("ENGINE_HOSTILE_FULL"))
"""Each field of each schema gets every value, which takes an hour."""

FIELDS_OF_BATCHES: Final = ("messages", "n", "stream", "tools")
"""Fields that batches read in their own way. The others are those of chat completions."""

NUM_WRONG: Final = 12
"""Number of wrong values of each field: of each type some, which change from field to field."""

NUM_WRONG_AGAIN: Final = 3
"""Number of wrong values of a field that another schema has as well."""

NUM_LARGE: Final = 1
"""Number of large values of each field, which change from field to field."""

ATTACKS_AT_ONCE: Final = 200
"""Number of attacks after which streams, processes and memory are looked at."""

FIELDS_PER_LARGEST: Final = 40
"""One in so many fields gets one of the largest values."""

_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^a+$", "maxLength": 3}},
    "required": ["a"],
}
_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True},
}
_CALL: Final = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

V = TypeVar("V")

pytestmark = pytest.mark.timeout(0 if IS_FULL else 900)

SAMPLES: Final[dict[str, list[Any]]] = {
    "messages": [
        [
            {"role": "system", "content": [{"type": "text", "text": "x"}], "name": "n"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ]
    ],
    "tools": [[_TOOL]],
    "tool_choice": [
        {"type": "function", "function": {"name": "f"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [_TOOL]}},
    ],
    "response_format": [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}},
        {"type": "structural_tag", "structures": [{"begin": "b", "schema": {}, "end": "e"}]},
    ],
    "structured_outputs": [
        {"json": _SCHEMA, "whitespace_pattern": "w", "disable_any_whitespace": True},
        {"regex": "a"},
        {"choice": ["a"]},
        {"grammar": 'root ::= "a"'},
        {"json_object": True},
        {"structural_tag": "{}"},
    ],
    "json_schema": [_SCHEMA],
    "stream_options": [{"include_usage": True, "continuous_usage_stats": True}],
    "logit_bias": [{"5": 1}],
    "documents": [[{"title": "t", "text": "x"}]],
    "chat_template_kwargs": [{"enable_thinking": True, "messages": [], "tools": []}],
    "thinking": [{"type": "enabled", "budget_tokens": 5}],
    "mm_processor_kwargs": [
        {"use_audio_in_video": True, "fps": 1, "max_pixels": 9, "size": {"longest_edge": 9}},
        {"images_kwargs": {"min_pixels": 4}, "videos_kwargs": {"num_frames": 2}},
    ],
    "images_config": [{"max_pixels": 9}],
    "video_config": [{"max_pixels": 9, "fps": 1}],
    "media_io_kwargs": [{"video": {"fps": 1, "num_frames": 2}}],
    "metadata": [{"a": "b"}],
    "options": [{"num_predict": 1, "temperature": 1, "stop": ["a"], "mirostat": 0}],
    "contents": [
        [
            {"role": "user", "parts": [{"text": "Hi"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}, "id": "c"}}]},
            {"parts": [{"functionResponse": {"name": "f", "id": "c", "response": {}}}]},
        ]
    ],
    "generationConfig": [
        {
            "maxOutputTokens": 1,
            "temperature": 1,
            "stopSequences": ["a"],
            "responseSchema": {"type": "STRING", "minLength": "1"},
            "thinkingConfig": {"thinkingBudget": 1, "includeThoughts": True},
        }
    ],
    "system": [[{"type": "text", "text": "Hi"}]],
}
"""Valid objects and lists, in each place of which a wrong value is put."""


STOPPING = ("/pause_generation", "/release_memory_occupation", "/update_weight_version")
"""Routes that stop all streams, for example if their field is null. The bodies of those that end it have the same."""

LOADING = {"/update_weights_from_disk": "model_path", "/collective_rpc": "method"}
"""Routes that load weights, which ends streams, if the body is whole -> the field that must be wrong."""


class Field(NamedTuple):
    number: int
    route: Route
    name: str

    def __str__(self) -> str:
        return f"{self.route.path} {self.name}"


@pytest.fixture
def fields(target: Target) -> list[Field]:
    """Every field of one route for each schema. Unless the attack is full, batches have only their own fields."""
    return [Field(number, *field) for number, field in enumerate(_fields_of(target))]


def _fields_of(target: Target) -> Iterator[tuple[Route, str]]:
    schemas: set[str] = set()
    for route in target.routes:
        if route.schema in schemas or route.path in STOPPING:
            continue
        schemas.add(route.schema)
        for field in route.fields:
            if route.path in LOADING and field != LOADING[route.path]:
                continue
            if IS_FULL or not route.is_batch or field in FIELDS_OF_BATCHES:
                yield route, field


def in_turn(values: dict[str, V], turn: int, count: int = 1) -> list[tuple[str, V]]:
    """Return the `count` values whose turn it is, or all in a full attack.

    They are as far apart as possible, because neighbors have the same type.
    """
    items = list(values.items())
    if IS_FULL:
        return items
    places = (turn + position * len(items) // count for position in range(count))
    return [items[place % len(items)] for place in places]


def assert_no_faults(faults: list[str]) -> None:
    shown = "\n".join(fault[:600] for fault in faults[:60])
    assert not faults, f"{len(faults)} faults:\n{shown}"


def find_all_faults(
    target: Target,
    attacks: Iterable[Attack],
    num_threads: int = 1,
    at_once: int = ATTACKS_AT_ONCE,
) -> list[str]:
    remaining = iter(attacks)
    faults = []
    while batch := list(islice(remaining, at_once)):
        faults += target.find_faults(batch, num_threads)
    return faults


def constant(value: bytes) -> Callable[[], bytes]:
    return lambda: value


def test_every_route_with_a_body_has_fields(target: Target) -> None:
    schemas = {route.schema for route in target.routes if route.schema}
    assert len(schemas) >= 4 and all(route.fields for route in target.routes if route.schema)


def test_wrong_values_in_every_field_get_a_clear_answer(
    target: Target, fields: list[Field], sampled: Sampled[Field]
) -> None:
    seen: set[str] = set()

    def attacks() -> Iterator[Attack]:
        for number, route, field in sampled(fields, str):
            count = NUM_WRONG_AGAIN if field in seen else NUM_WRONG
            seen.add(field)
            for name, value in in_turn(SMALL, number, count):
                yield route.attack(field, name, constant(value))

    assert_no_faults(find_all_faults(target, attacks(), NUM_THREADS))


def test_wrong_values_inside_objects_and_lists_get_a_clear_answer(
    target: Target, fields: list[Field], sampled: Sampled[Field]
) -> None:
    seen: set[str] = set()

    def attacks() -> Iterator[Attack]:
        for number, route, field in sampled([f for f in fields if f.name in SAMPLES], str):
            # The same code reads the field in most routes.
            is_first = IS_FULL or field not in seen
            seen.add(field)
            names = NESTED if is_first else [NESTED[number % len(NESTED)]]
            for sample in samples_of(route, field):
                for place, name, text in mutations(sample, names):
                    yield route.attack(field, f"{place} {name}", constant(text))

    assert_no_faults(find_all_faults(target, attacks(), NUM_THREADS))


def samples_of(route: Route, field: str) -> list[Any]:
    samples = SAMPLES[field]
    return [samples] if route.is_batch and field == "messages" else samples


def mutations(sample: Any, names: Sequence[str]) -> Iterator[tuple[str, str, bytes]]:
    """Return every place inside `sample` with values in it: (place, name, text).

    A place gets every other one of the named values, and the next place the others, but in a full attack all.
    """
    mark = "a place for a value"
    step = 1 if IS_FULL or len(names) == 1 else 2
    for turn, (place, marked) in enumerate(_marked(sample, mark)):
        text = json.dumps(marked).encode()
        for name in names[turn % step :: step]:
            yield place, name, text.replace(json.dumps(mark).encode(), SMALL[name])


def _marked(value: Any, mark: str) -> Iterator[tuple[str, Any]]:
    """Return copies of `value` with `mark` in one place, each with its path."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield f".{key}", {**value, key: mark}
            for path, inner in _marked(member, mark):
                yield f".{key}{path}", {**value, key: inner}
    elif isinstance(value, list):
        for index, item in enumerate(value):
            before, after = value[:index], value[index + 1 :]
            yield f"[{index}]", [*before, mark, *after]
            for path, inner in _marked(item, mark):
                yield f"[{index}]{path}", [*before, inner, *after]


def test_large_values_in_every_field_get_a_clear_answer(
    target: Target, fields: list[Field], sampled: Sampled[Field]
) -> None:
    attacks = (
        route.attack(field, name, value)
        for number, route, field in sampled(fields, str)
        for name, value in in_turn(LARGE, number, NUM_LARGE)
    )
    assert_no_faults(find_all_faults(target, attacks, at_once=30))


def test_the_largest_values_in_every_field_get_a_clear_answer(
    target: Target, fields: list[Field], sampled: Sampled[Field]
) -> None:
    attacked = [f for f in fields if IS_FULL or f.number % FIELDS_PER_LARGEST == 0]
    attacks = (
        route.attack(field, name, value)
        for number, route, field in sampled(attacked, str)
        for name, value in in_turn(LARGEST, number // FIELDS_PER_LARGEST)
    )
    assert_no_faults(find_all_faults(target, attacks, at_once=1))


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"1", b'"', b"{", b"\xff", b"{}" * 2])
def test_bodies_that_are_no_object_are_rejected(target: Target, body: bytes) -> None:
    # The first of two objects may lack a field.
    named = "body" if body != b"{}" * 2 else ""
    attacks = [
        Attack(
            f"{route.method} {route.path} {body!r}",
            partial(make_request, route.method, route.path, body),
            # A route without a body may refuse the request for another reason.
            named if route.schema else "Content-Type" * (route.method == "POST"),
            route.path,
            may_succeed=not route.schema,
        )
        for route in target.routes
        # A pause or sleep without a mode ends all streams, whatever its body.
        if "{" not in route.path
        and route.path not in ("/pause", "/sleep", "/release_kv_cache_memory")
    ]
    assert_no_faults(target.find_faults(attacks))
