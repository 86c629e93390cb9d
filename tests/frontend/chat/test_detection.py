"""Formats are chosen from what the chat template shows."""

from __future__ import annotations

import json
import re
from datetime import date

import pytest
from engine.frontend.chat import CallParser, ChatOutputParser, ChatTemplate, choose_formats
from engine.protocol.config.frontend import FrontendConfig
from support.chat.call_texts import PLAMO

TEMPLATE = (
    "{%% if tools %%}{{ tools | tojson }}{%% endif %%}"
    "{%% for message in messages %%}<|{{ message.role }}|>{{ message.content }}"
    "{%% for call in message.tool_calls or [] %%}{%% set f = call.function %%}%s{%% endfor %%}"
    "{%% endfor %%}{%% if add_generation_prompt %%}<|assistant|>{%% endif %%}"
)
TAGS = "{% for k, v in f.arguments.items() %}"
CALLS = {
    "hermes": '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
    "granite": '<|tool_call|>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]',
    "mistral": "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
    "qwen3_coder": "<tool_call>\n<function={{ f.name }}>\n"
    + TAGS
    + "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function={{ f.name }}>\n"
    + TAGS
    + "<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
    "glm45": "<tool_call>{{ f.name }}\n"
    + TAGS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n'
    + TAGS
    + '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>',
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="{{ f.name }}">'
    + TAGS
    + "]<]minimax[>[<{{ k }}>{{ v }}]<]minimax[>[</{{ k }}>{% endfor %}]<]minimax[>[</invoke>\n"
    + "]<]minimax[>[</tool_call>",
    "k2_horizon": "<ifm|tool_calls>\n<ifm|tool_call>{{ f.name }}\n"
    + TAGS
    + "<ifm|arg_key>{{ k }}</ifm|arg_key>\n<ifm|arg_value>{{ v }}</ifm|arg_value>\n{% endfor %}"
    + "</ifm|tool_call>\n</ifm|tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ f.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n"
    "{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gemma4": "<|tool_call>call:{{ f.name }}{{ '{' }}"
    + TAGS
    + '{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}}<tool_call|>',
    "functiongemma": "<start_function_call>call:{{ f.name }}{{ '{' }}"
    + TAGS
    + "{{ k }}:<escape>{{ v }}<escape>{% endfor %}}<end_function_call>",
    "lfm2": "<|tool_call_start|>[{{ f.name }}("
    + TAGS
    + "{{ k }}='{{ v }}'{% endfor %})]<|tool_call_end|>",
    "openai": "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>",
    "llama4_pythonic": "<|python_start|>[{{ f.name }}()]<|python_end|>",
    "hunyuan_a13b": '<tool_calls>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]</tool_calls>',
    "longcat": '<longcat_tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n'
    "</longcat_tool_call>",
    "internlm": '<|action_start|><|plugin|>{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "<|action_end|>",
    "granite-20b-fc": '<function_call> {"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
    "olmo3": "<function_calls>{{ f.name }}("
    + TAGS
    + "{{ k }}='{{ v }}'{% endfor %})\n</function_calls>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="{{ f.name }}">'
    + TAGS
    + '<steptml:parameter name="{{ k }}">{{ v }}</steptml:parameter>{% endfor %}</steptml:invoke><｜tool_call_end｜>'
    + "<｜tool_calls_end｜>",
    "hy_v3": "<tool_calls>\n<tool_call>{{ f.name }}<tool_sep>\n"
    + TAGS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>\n</tool_calls>",
    "hy_v4": "<tool_calls>\n<tool_call>{{ f.name }}\n"
    + TAGS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>\n</tool_calls>",
    "apertus": '<|tools_prefix|>[{"{{ f.name }}": {{ f.arguments | tojson }}}]<|tools_suffix|>',
    "cohere_command": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": '
    "{{ f.arguments | tojson }}}\n]<|END_ACTION|>",
    "dots": '<dots_function_call>\n<invoke name="{{ f.name }}">\n'
    + TAGS
    + '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n</dots_function_call>',
    "inkling": '<|content_invoke_tool_json|>{"name":"{{ f.name }}","args":{{ f.arguments | tojson }}}<|end_message|>',
    "minicpm5": '<function name="{{ f.name }}">'
    + TAGS
    + '<param name="{{ k }}">{{ v }}</param>{% endfor %}</function>',
    "muse": '<atem:function_calls>\n<atem:invoke name="{{ f.name }}">\n'
    + TAGS
    + '<atem:parameter name="{{ k }}">{{ v }}</atem:parameter>\n{% endfor %}</atem:invoke>\n</atem:function_calls>',
    "plamo3": PLAMO % ("{{ f.name }}", "{{ f.arguments | tojson }}"),
    "nemotron_json": '<TOOLCALL>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]</TOOLCALL>',
}


def chosen(source: str, **options) -> tuple[str | None, str | None]:
    formats = choose_formats(FrontendConfig(**options), ChatTemplate(source))
    assert str(formats).startswith(f"tool calls: {formats.tool_calls.name or 'none'} (")
    return formats.tool_calls.name, formats.reasoning.name


FIREFUNCTION = (
    "{{ 'Functions: ' + functions + '\nToday is ' + datetime }}{% for m in messages %}{{ m.content or '' }}"
    "{% if m.tool_calls %} functools[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]'
    "{% endif %}{% endfor %}"
)
"""A template that reads tools as Firefunction's does: as text, in variables of its own."""


def test_a_template_may_read_tools_as_text() -> None:
    assert chosen(FIREFUNCTION)[0] == "phi4_mini_json"
    template = ChatTemplate(FIREFUNCTION)
    assert template.shows_tools
    function = {"name": "f", "parameters": {"type": "object"}}
    messages = [{"role": "user", "content": "!"}]
    prompt = template.render(messages, tools=[{"type": "function", "function": function}])
    text, day = re.fullmatch(
        r"Functions: (.*)\nToday is (\d{4}-\d\d-\d\d)!", prompt, re.DOTALL
    ).groups()
    assert json.loads(text) == [function] and date.fromisoformat(day)
    assert template.render(messages, datetime="noon") == "Functions: \nToday is noon!"


@pytest.mark.parametrize("name", CALLS)
def test_tool_calls_are_parsed_as_the_template_writes_them(name: str) -> None:
    assert chosen(TEMPLATE % CALLS[name])[0] == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("<think>", "qwen3"),
        ("<|channel|>analysis", "openai_gptoss"),
        ("[THINK]", "mistral"),
        ("<|channel>thought", "gemma4"),
        ("<|START_TEXT|>", "cohere_command4"),
        ("<|content_thinking|>", "inkling"),
        ("<atem:function_calls>", "muse"),
        ("<|plamo:begin_think:plamo|>", "plamo3"),
        ("no marks", None),
    ],
)
def test_reasoning_is_parsed_as_the_template_marks_it(text: str, name: str | None) -> None:
    assert chosen(text + "{{ messages[0].content }}")[1] == name


def test_explicit_formats_and_none_replace_the_detected_ones() -> None:
    source = "<think>" + TEMPLATE % CALLS["hermes"]
    assert chosen(source) == ("hermes", "qwen3")
    assert chosen(source, tool_call_parser="glm45", reasoning_parser="mistral") == (
        "glm45",
        "mistral",
    )
    assert chosen(source, tool_call_parser="none", reasoning_parser="none") == (None, None)


@pytest.mark.parametrize("shown", ["", "{{ tools | tojson }}"])
def test_tools_are_described_where_the_template_shows_no_known_format(shown: str) -> None:
    source = "{{ messages[0].content }}" + shown
    assert choose_formats(FrontendConfig(), ChatTemplate(source)).describes_tools
    assert chosen(source)[0] == "generic"
    assert chosen(source, tool_call_parser="none")[0] is None
    assert not choose_formats(
        FrontendConfig(), ChatTemplate(TEMPLATE % CALLS["hermes"])
    ).describes_tools
    assert choose_formats(FrontendConfig(), None).call_format is None


def test_tags_of_hunyuan_4_have_the_suffix_of_the_checkpoint() -> None:
    source = (
        "<think:6f>" + TEMPLATE % re.sub(r"(<(?!t.. )/?\w+)>", r"\1:6f>", CALLS["hy_v4"]) + " tools"
    )
    formats = choose_formats(FrontendConfig(), ChatTemplate(source))
    assert (formats.tool_calls.name, formats.reasoning.name) == ("hy_v4", "qwen3")
    text = "<think:6f>Hm</think:6f><tool_calls:6f><tool_call:6f>f</tool_call:6f></tool_calls:6f>"
    assert formats.reasoning_parser is not None and formats.call_format is not None
    delta = ChatOutputParser(formats.reasoning_parser(""), CallParser(formats.call_format)).feed(
        text, finished=True
    )
    assert (delta.reasoning, delta.content) == ("Hm", "")
    assert [call.name for call in delta.tool_calls if call.name] == ["f"]
