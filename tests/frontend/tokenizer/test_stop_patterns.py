"""Regular expressions that end a text: they match as `re` does, in bounded time."""

from __future__ import annotations

import re

import pytest
from engine.frontend.tokenizer.stop_patterns import StopPatterns, verify_patterns
from engine.protocol.errors import ParameterError
from hypothesis import given
from hypothesis import strategies as st

ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", r"\d", r"\.", "1", "é"])
REPEATS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "{,2}", "+?"])
EXPRESSIONS = st.recursive(
    st.tuples(ATOMS, REPEATS).map("".join),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda each: "(?:" + "|".join(each) + ")"),
        st.tuples(inner, REPEATS).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@given(
    EXPRESSIONS,
    st.sampled_from(["", "$", r"\Z"]),
    st.text("ab1.é\n", max_size=12),
    st.integers(1, 3),
)
def test_a_text_ends_with_the_first_complete_match(
    expression: str, anchor: str, text: str, size: int
) -> None:
    expression += anchor
    try:
        state = StopPatterns((), (expression,))
    except ParameterError:
        assert re.compile(expression).match("") is not None
        return
    ends = range(0, len(text) + size, size) if anchor else range(len(text) + 1)
    texts = [text[:end] for end in ends]
    expected = next((len(each) for each in texts if re.search(expression, each)), None)
    found = None
    for begin in range(0, len(text), size):
        if (match := state.find(text[begin : begin + size])) is not None:
            found = begin + match.end
            break
    assert found == expected


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("a*", "must not match the empty text"),
        ("(a", r"has a \( without \)"),
        ("a)", r"has a \) without \("),
        ("^a", "an anchor"),
        ("(a$)", "an anchor"),
        ("$a", "an anchor"),
        ("a*$", "must not match the empty text"),
        (r"a\b", "an anchor"),
        ("(?=a)b", "an anchor"),
        (r"(a)\1", "an anchor"),
        ("a**", "must not repeat a repetition"),
        ("a{3,2}", "repetitions 2 below the least, 3"),
        ("[b-a]", "is invalid"),
        ("(a{30}){30}", "at most 500 characters"),
        ("a" * 501, "at most 500 characters"),
        ("(" * 60 + "a" + ")" * 60, "at most 50 groups"),
        ("(((){1000}){1000}){1000}", "must not match the empty text"),
    ],
)
def test_other_expressions_are_refused(expression: str, problem: str) -> None:
    with pytest.raises(ParameterError, match=problem):
        verify_patterns((expression,))


@pytest.mark.parametrize("expression", ["(a|a)+b", "(a+)+b", "(.*)*b", ".{1,490}b", "(a|b|ab)+c1"])
def test_hostile_expressions_take_bounded_time(expression: str) -> None:
    state = StopPatterns((), (expression,))
    assert state.find("a" * 20_000) is None
