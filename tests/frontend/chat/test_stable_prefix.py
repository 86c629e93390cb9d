"""Lines that change with every request move to the end of the conversation."""

from __future__ import annotations

from typing import Any

import pytest
from engine.frontend.chat.stable_prefix import MAX_LINE_CHARACTERS, RULES, StablePrefix
from engine.protocol.errors import ConfigError

USER = {"role": "user", "content": "Hello"}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch=0fc2a;", "billing"),
        ("Today's date: 2026-11-24", "date"),
        ("  Today's date is Tue Nov 24 2026.", "date"),
        ("<current_date>2026-11-24</current_date>", "date"),
        ("The current date is November 24, 2026.", "date"),
        ("Today is Tuesday, 24 November.", "date"),
        ("Current time: 11/24/2026, 9:03:12 PM (UTC)", "clock"),
        ("The current date and time is 2026-11-24T21:03:12Z.", "clock"),
        ("- Local time = 21:03", "clock"),
        ("Timestamp: 1795563413", "clock"),
    ],
)
def test_volatile_lines_move_to_the_end_of_the_last_message(line: str, rule: str) -> None:
    messages = [system(f"You are kind.\n{line}\nBe brief."), USER]
    expected = [
        system("You are kind.\nBe brief."),
        {"role": "user", "content": f"Hello\n\n{line.strip()}"},
    ]
    assert StablePrefix([rule]).apply(messages) == expected
    assert StablePrefix(RULES).apply(messages) == expected
    others = [other for other in RULES if other != rule]
    assert StablePrefix(others).apply(messages) == messages


@pytest.mark.parametrize(
    "line",
    [
        "Tell the user the current date.",
        "Meetings take place in the current room at 10:30.",
        "Write timestamps as ISO 8601.",
        "Today's date: 2026 " + "x" * MAX_LINE_CHARACTERS,
    ],
)
def test_lines_without_volatile_content_are_unchanged(line: str) -> None:
    messages = [system(line), USER]
    assert StablePrefix(RULES).apply(messages) is messages


def test_lines_move_behind_instructions_that_follow_the_question() -> None:
    """Claude Code describes the machine in a system message after the first question."""
    header, later = "x-anthropic-billing-header: a", system("# Environment")
    messages = [system(f"{header}\nBe kind."), USER, later]
    moved = [system("Be kind."), USER, system(f"# Environment\n\n{header}")]
    assert StablePrefix(["billing"]).apply(messages) == moved
    assert StablePrefix(["billing"]).apply(messages[:1]) == messages[:1]


def test_parts_move_to_the_newest_input_of_a_conversation() -> None:
    conversation = [
        system([text("x-anthropic-billing-header: a"), text("Be kind.\nToday is 24 November.")]),
        {"role": "developer", "content": "now: 21:03"},
        USER,
        {"role": "assistant", "content": "Today is day 1"},
        {"role": "tool", "content": [text("42")], "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is"},
    ]
    moved = "x-anthropic-billing-header: a\nToday is 24 November.\nnow: 21:03"
    assert StablePrefix(RULES).apply(conversation) == [
        system([text("Be kind.")]),
        {"role": "developer", "content": ""},
        USER,
        conversation[3],
        {"role": "tool", "content": [text("42"), text(moved)], "tool_call_id": "c1"},
        conversation[5],
    ]
    # Without a message to move them to, and without a system prompt, nothing changes.
    assert StablePrefix(RULES).apply(conversation[:2]) == conversation[:2]
    assert StablePrefix(RULES).apply([USER, conversation[1]]) == [USER, conversation[1]]
    assert StablePrefix([]).apply(conversation) is conversation


def test_stable_prefix_rules_may_be_regular_expressions() -> None:
    messages = [system("session 17\nBe kind."), USER]
    assert StablePrefix([r"/session \d+/"]).apply(messages)[0] == system("Be kind.")
    for wrong in ("session", "/(/", "/"):
        with pytest.raises(ConfigError, match="--stable-prefix"):
            StablePrefix([wrong])


@pytest.mark.parametrize("messages", [[None, USER], [system(None), USER], [system([7, {}]), USER]])
def test_invalid_messages_stay_as_they_are(messages: list[Any]) -> None:
    assert StablePrefix(RULES).apply(messages) == messages
