"""Tools, calls and results are described to models whose chat template does not support tools."""

from __future__ import annotations

import json

import pytest
from engine.frontend.chat import FORMATS, CallParser, ChatTemplate, ChatTemplateError
from engine.protocol.errors import ParameterError

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRICT = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no turns') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
)
"""A template without a system role, which requires alternating turns of user and assistant."""
PARTS = "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks “out”.",
        "strict": False,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = [
    {"id": str(i), "type": "function", "function": {"name": "look", "arguments": {"city": city}}}
    for i, city in enumerate(("Oslo", "Rome"))
]
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Wait.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "0", "content": "rain"},
    {"role": "tool", "tool_call_id": "1", "content": "sun"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS[:1]},
    {"role": "tool", "tool_call_id": "0", "content": "snow"},
]


def describing(source: str) -> ChatTemplate:
    template = ChatTemplate(source)
    template.describe_tools()
    assert template.shows_tools
    return template


def turns(prompt: str) -> list[tuple[str, str]]:
    parts = prompt.split("<|")[1:]
    return [(part.split("|>")[0], part.split("|>")[1]) for part in parts]


def test_tools_are_in_the_system_message() -> None:
    template = describing(CHATML)
    (role, text), *rest = turns(template.render(CHAT[:1], tools=[TOOL]))
    assert role == "system" and rest == [("user", "Hi"), ("assistant", "")]
    [line] = [line for line in text.splitlines() if line.startswith('{"name": "look"')]
    assert json.loads(line) == {k: v for k, v in TOOL["function"].items() if k != "strict"}
    assert "“out”" in line and "<tool_call>" in text
    system = {"role": "system", "content": "Be brief."}
    (role, both), *_ = turns(template.render([system, *CHAT[:1]], tools=[TOOL]))
    assert (role, both) == ("system", f"Be brief.\n\n{text}")
    assert turns(template.render([system, *CHAT[:1]])) == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", ""),
    ]


@pytest.mark.parametrize("source", [CHATML, STRICT, PARTS])
def test_calls_and_results_are_text(source: str) -> None:
    shown = turns(describing(source).render(CHAT, add_generation_prompt=False))
    assert [role for role, _ in shown] == ["user", "assistant", "user", "assistant", "user"]
    _, calls, results, call, result = (text for _, text in shown)
    assert results == (
        "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>\nAnd now?"
    )
    assert result == "<tool_response>\nsnow\n</tool_response>"
    for text, cities, content in ((calls, ["Oslo", "Rome"], "Wait."), (call, ["Oslo"], "")):
        # Calls are shown to the model in the same format in which its own calls are parsed.
        parser = CallParser(FORMATS["generic"])
        delta = parser.feed(text)
        arguments = [each.arguments for each in delta.tool_calls if each.arguments]
        assert [json.loads(each) for each in arguments] == [{"city": city} for city in cities]
        assert delta.content + parser.finish().content == content


def test_template_without_system_role_describes_tools_to_the_user() -> None:
    shown = turns(describing(STRICT).render(CHAT, tools=[TOOL], add_generation_prompt=False))
    assert shown[0][0] == "user" and shown[0][1].endswith("\n\nHi") and "look" in shown[0][1]
    assert len(shown) == 5


def test_messages_and_tools_of_the_request_stay_as_they_are() -> None:
    before = json.dumps([CHAT, TOOL])
    describing(PARTS).render(CHAT, tools=[TOOL])
    assert json.dumps([CHAT, TOOL]) == before


def test_deep_nesting_is_an_error() -> None:
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        describing(CHATML).render(CHAT, tools=[tool])


@pytest.mark.parametrize(
    ("kind", "word"),
    [("image_url", "image"), ("input_image", "image"), ("input_audio", "audio clip")],
)
def test_media_of_tool_results_become_notes_for_models_that_cannot_read_them(
    kind: str, word: str
) -> None:
    content = [{"type": "text", "text": "a.png"}, {"type": kind, kind: {"url": "data:,"}}]
    template = ChatTemplate("{% for m in messages %}{{ m.content }};{% endfor %}")
    messages = [{"role": role, "content": content} for role in ("tool", "function", "user")]
    note = f"a.png\n[{word}: not readable by this model];"
    assert template.render(messages) == note * 3
    with pytest.raises(ParameterError, match=r"messages\[3\].content\[1\].type"):
        template.render([*messages, messages[-1]])
