"""Forced tool calls are parsed equally however the text is split."""

from __future__ import annotations

import itertools
import json

import pytest
from engine.frontend.api.tools.forced_calls import NamedCall, RequiredCalls
from engine.frontend.chat import CallIds, ToolCallDelta
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.tuples(st.text("abc_", min_size=1), st.dictionaries(st.text(), json_values, max_size=3)),
    min_size=1,
    max_size=3,
)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def joined(deltas: list[ToolCallDelta]) -> list[tuple[str, str]]:
    result: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.name is not None:
            assert delta.index == len(result) and delta.id
            result.append((delta.name, ""))
        name, arguments = result[delta.index]
        result[delta.index] = (name, arguments + delta.arguments)
    return result


@given(calls, st.lists(st.integers(0, 10_000)), st.sampled_from([None, 2]), st.booleans())
def test_required_calls_are_parsed_for_any_split(
    wanted: list[tuple[str, dict]], cuts: list[int], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(
        [{"name": name, "parameters": arguments} for name, arguments in wanted],
        indent=indent,
        ensure_ascii=ascii_only,
    )
    reader = RequiredCalls(CallIds())
    deltas = [delta for piece in pieces_of(text, cuts) for delta in reader.read(piece)]
    assert [(name, json.loads(arguments)) for name, arguments in joined(deltas)] == wanted


@given(st.dictionaries(st.text(), json_values), st.lists(st.integers(0, 10_000)))
def test_named_call_is_parsed_for_any_split(arguments: dict, cuts: list[int]) -> None:
    text = json.dumps(arguments)
    reader = NamedCall("f", CallIds())
    deltas = [delta for piece in pieces_of(text, cuts) for delta in reader.read(piece)]
    assert joined(deltas) == [("f", text)]
