"""Chat templates, compared with the rendering by transformers."""

import json
import time
from pathlib import Path

import pytest
import tokenizers
from engine.frontend.chat import ModelTemplates
from engine.frontend.chat.messages import AUDIO_MARK, AUDIO_PART
from engine.frontend.chat.template import ChatTemplate, ChatTemplateError, load_chat_template
from engine.frontend.tokenizer.tokenizer import Tokenizer
from engine.protocol.errors import ParameterError
from tokenizers import decoders, models
from transformers.utils.chat_template_utils import render_jinja_template

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HEADERS_AND_TOOLS = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- if system or tools %}
[system]{{ system }}
{%- if tools is not none %}
{%- for tool in tools %}

{{ tool | tojson(indent=4) }}
{%- endfor %}
{%- endif %}
[/system]
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
[result]{{ message.content }}
    {%- elif 'tool_calls' in message and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('only one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
[call]{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
    {%- else %}
[{{ message['role'] }}]{{ message['content'] | trim }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
[assistant]
{% endif %}
"""

PARTS = """\
{%- macro show(content) -%}
    {%- if content is string -%}
        {{ content }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'text' -%}{{ part.text }}|{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(count=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'skip' %}{% continue %}{% endif -%}
    {%- set ns.count = ns.count + 1 -%}
    {%- if loop.last %}last {% endif -%}
    {%- generation -%}
    {{ ns.count }}{{ message.role }}: {{ show(message.content) }}
    {%- endgeneration %}
{% endfor -%}
"""

CONVERSATIONS = [
    [{"role": "user", "content": "Hi <b>you</b> & 'me'"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "é漢👍\n\n"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": ""},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter <für> Städte",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def reference(template: str, messages, **variables) -> str:
    [text], _ = render_jinja_template([messages], chat_template=template, **variables)
    return text


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("source", [CHATML, HEADERS_AND_TOOLS, PARTS])
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_prompt_equals_that_of_transformers(source, messages, generate, tools) -> None:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    ours = template.render(messages, add_generation_prompt=generate, tools=tools)
    assert ours == reference(
        source, messages, add_generation_prompt=generate, tools=tools, bos_token="<s>"
    )


def test_template_receives_the_variables_of_the_request() -> None:
    source = "{{ enable_thinking }}{{ documents[0].title }}{{ strftime_now('%Y') }}"
    text = ChatTemplate(source).render(
        CONVERSATIONS[0],
        documents=[{"title": "T"}],
        enable_thinking=False,
    )
    assert text == f"FalseT{time.strftime('%Y')}"


@pytest.mark.parametrize("text", ["The answer", "The answer ", "", "  x"])
@pytest.mark.parametrize("source", [CHATML, HEADERS_AND_TOOLS, PARTS])
def test_continue_final_message_ends_with_its_text(source: str, text: str) -> None:
    messages = [*CONVERSATIONS[0], {"role": "assistant", "content": text}]
    prompt = ChatTemplate(source, special_tokens={"bos_token": "<s>"}).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert prompt == reference(source, messages, continue_final_message=True, bos_token="<s>")
    assert prompt.endswith(text.strip() if source is HEADERS_AND_TOOLS else text)


def test_a_template_may_loop_over_tools_in_chats_without_any() -> None:
    template = ChatTemplate("{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}Hi")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    messages = [{"role": "user", "content": "Hi"}]
    assert template.render(messages) == "Hi"
    assert template.render(messages, tools=[tool]) == "[f]Hi"


@pytest.mark.parametrize(
    ("source", "function", "expected"),
    [
        # A template that needs no descriptions gets the tool as it was sent.
        (
            "{{ tools | tojson }}",
            {"name": "f"},
            '[{"type": "function", "function": {"name": "f"}}]',
        ),
        ("{{ tools[0].function.description ~ '!' }}", {"name": "f"}, "!"),
        ("{{ tools[0].function.description + '!' }}", {"name": "f"}, "!"),
        ("{{ tools[0].function.description + '!' }}", {"name": "f", "description": "d"}, "d!"),
        (
            "{{ tools[0].function.parameters.properties | tojson }}",
            {"name": "f", "description": "d"},
            "{}",
        ),
        (
            "{% for p in tools[0].function.parameters.properties.values() %}"
            "{{ p.type + p.description }}{% endfor %}",
            {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}},
            "string",
        ),
        (
            "{{ tools | map(attribute='function') | tojson }}",
            {"name": "f"},
            '[{"name": "f"}]',
        ),
    ],
)
def test_a_tool_may_lack_what_the_template_reads(source: str, function: dict, expected: str):
    template = ChatTemplate("{% if tools %}" + source + "{% endif %}")
    tools = [{"type": "function", "function": function}]
    assert template.render([{"role": "user", "content": "Hi"}], tools=tools) == expected


def test_continue_final_message_requires_visible_text() -> None:
    template = ChatTemplate(CHATML)
    with pytest.raises(ChatTemplateError, match="cannot both be true"):
        template.render(CONVERSATIONS[0], continue_final_message=True)
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(ChatTemplateError, match="text content"):
        ChatTemplate("{{ messages[-1].content is none }}").render(
            [{"role": "assistant", "content": None, "tool_calls": [call]}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
    with pytest.raises(ChatTemplateError, match="does not write"):
        ChatTemplate("fixed").render(
            CONVERSATIONS[0], add_generation_prompt=False, continue_final_message=True
        )


TEXT_PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("source", "content_format", "content", "expected"),
    [
        ("{{ messages[0].content }}", "auto", TEXT_PARTS, "one\ntwo"),
        ("{{ messages[0].content }}", "auto", "one", "one"),
        (PARTS, "auto", TEXT_PARTS, "last 1user: one|two|"),
        (PARTS, "auto", "one", "last 1user: one"),
        (PARTS, "string", TEXT_PARTS, "last 1user: one\ntwo"),
        (PARTS, "openai", "one", "last 1user: one|"),
        ("{% for p in messages[0].content %}{{ p.text }}{% endfor %}", "auto", "one", "one"),
        (
            "{% for p in messages[0].content %}{{ p.text }}{% endfor %}",
            "auto",
            TEXT_PARTS,
            "onetwo",
        ),
        ("{{ messages[0].content }}", "auto", ["a", {"type": "refusal", "refusal": "b"}], "a\nb"),
    ],
)
def test_content_has_the_form_that_the_template_expects(
    source, content_format, content, expected
) -> None:
    template = ChatTemplate(source, content_format=content_format)
    assert template.render([{"role": "user", "content": content}]).strip() == expected


def test_template_receives_arguments_of_tool_calls_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"é": [1]}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    given = json.dumps(messages)
    text = ChatTemplate(HEADERS_AND_TOOLS).render(messages)
    assert '[call]{"name": "f", "parameters": {"é": [1]}}[result]done' in text
    assert json.dumps(messages) == given


CALLS = "{% for m in messages %}{{ m.role }} {{ m.tool_call_id }} {{ m.tool_calls | default([]) | tojson }}\n{% endfor %}"


@pytest.mark.parametrize("arguments", ['{"a', "", "null", "[1]", "NaN", '"x"', None, 5, ["x"]])
def test_arguments_that_are_not_an_object_become_an_empty_one(arguments: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    text = ChatTemplate(CALLS).render([{"role": "assistant", "tool_calls": [call]}])
    assert '"function": {"name": "f", "arguments": {}}' in text


def test_calls_of_custom_tools_become_function_calls() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "sh", "input": 'ls "a"'}}
    text = ChatTemplate(CALLS).render([{"role": "assistant", "tool_calls": [call]}])
    function = {"name": "sh", "arguments": {"input": 'ls "a"'}}
    assert json.dumps([{"id": "1", "type": "function", "function": function}]) in text


def test_calls_and_results_of_functions_become_those_of_tools() -> None:
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{"}},
        {"role": "function", "name": "f", "content": "done"},
    ]
    function = {"name": "f", "arguments": {}}
    [_, call, result] = ChatTemplate(CALLS).render(messages).splitlines()
    made = [{"id": "call00001", "type": "function", "function": function}]
    assert call == f"assistant  {json.dumps(made)}"
    assert result.startswith("tool call00001 ")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[-1].content is none }}", "True"),
        ("{{ messages[-1].content + '!' }}", "!"),
        ("{{ messages[-1].content }}", ""),
    ],
)
def test_null_content_is_accepted(source: str, expected: str) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert ChatTemplate(source).render([message]) == expected


def test_null_content_without_tool_calls_is_empty() -> None:
    assert (
        ChatTemplate("{{ messages[0].content is none }}").render(
            [{"role": "assistant", "content": None, "tool_calls": []}]
        )
        == "False"
    )


def test_developer_becomes_system_if_the_template_has_no_such_role() -> None:
    message = {"role": "developer", "content": "x"}
    assert ChatTemplate("{{ messages[0].role }}").render([message]) == "system"
    knows = "{% if messages[0].role == 'developer' %}developer!{% endif %}"
    assert ChatTemplate(knows).render([message]) == "developer!"


def test_template_receives_reasoning_of_earlier_turns() -> None:
    message = {"role": "assistant", "content": "x", "reasoning": "because"}
    template = ChatTemplate("{{ messages[0].reasoning_content }} {{ messages[0].thinking }}")
    assert template.render([message]) == "because because"


@pytest.mark.parametrize(
    ("message", "param", "problem"),
    [
        ({"content": "x"}, "messages[1].role", "must be a string"),
        ({"role": "user", "content": 5}, "messages[1].content", "array of parts, got 5"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "messages[1].content[1].type",
            'must be "text", because this model reads only text; got "image_url"',
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": 3}]},
            "messages[1].content[0].text",
            "must be a string",
        ),
        (
            {"role": "assistant", "function_call": "f"},
            "messages[1].function_call",
            "must be an object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"custom": {"name": "f", "input": 3}}]},
            "messages[1].tool_calls[0].custom.input",
            "must be a string",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            "messages[1].tool_calls[0].function.name",
            "must be a string",
        ),
    ],
)
def test_an_error_names_the_invalid_field(message, param: str, problem: str) -> None:
    with pytest.raises(ParameterError, match=problem) as error:
        ChatTemplate(CHATML).render([{"role": "user", "content": "x"}, message])
    assert error.value.param == param


def test_empty_messages_are_rejected() -> None:
    with pytest.raises(ParameterError, match="messages must not be empty"):
        ChatTemplate(CHATML).render([])


def test_errors_raised_by_the_template_are_reported() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    refusal = r"^the chat template rejected the messages: roles must alternate$"
    with pytest.raises(ChatTemplateError, match=refusal):
        template.render(CONVERSATIONS[0])
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("fine\n{% if %}")
    for broken in ("{{ messages[0].content + 1 }}", "{{ messages[0].no.such }}", "{{ 2 ** 3 }}"):
        with pytest.raises(ChatTemplateError, match=r"^the chat template failed: ."):
            ChatTemplate(broken).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include 'x' %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        pytest.param(
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{% for i in [1, 2] recursive %}{% if loop.depth < 90 %}{{ loop([1, 2]) }}{% endif %}"
            "{% endfor %}",
            marks=pytest.mark.slow,
        ),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10 ** 10) }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ lipsum(100000) }}",
    ],
)
def test_a_template_cannot_escape_the_sandbox_or_run_for_ever(source: str, monkeypatch) -> None:
    monkeypatch.setattr("engine.frontend.chat.template.MAX_RENDER_SECONDS", 0.2)
    template = ChatTemplate(source)
    with pytest.raises(ChatTemplateError):
        template.render(CONVERSATIONS[0])


def test_the_tool_use_template_is_used_only_with_tools(tmp_path) -> None:
    def prompt(with_tools: bool, instead: str | None = None, **templates: str) -> str | None:
        backend = tokenizers.Tokenizer(models.BPE())
        backend.decoder = decoders.ByteLevel()
        tokenizer = Tokenizer(backend, tmp_path, bos_token="<s>", chat_templates=templates)
        template = ModelTemplates(tokenizer, instead).choose(with_tools)
        return template and template.render(CONVERSATIONS[0])

    both = {"default": "plain", "tool_use": "{{ bos_token }} tools"}
    assert prompt(False, **both) == "plain"
    assert prompt(True, **both) == "<s> tools"
    assert prompt(True, default="plain", rag="{% unused") == "plain"
    assert prompt(True, "{{ 'given' }}", **both) == "given"
    assert prompt(True) is None


@pytest.mark.parametrize(
    ("source", "shows"),
    [
        (CHATML, False),
        (HEADERS_AND_TOOLS, True),
        ("{% if tools and messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}", True),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}", False),
        ("{# tools #}{{ messages[0].content }}", False),
        ("{% for tool in tools %}{{ tool.function.description }}{% endfor %}", True),
    ],
)
def test_a_template_that_ignores_tools_is_recognized(source: str, shows: bool) -> None:
    assert ChatTemplate(source).shows_tools is shows


def test_chat_template_option_is_a_file_or_the_template_itself(tmp_path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(CHATML, encoding="utf-8")
    assert load_chat_template(str(file)) == load_chat_template(CHATML) == CHATML
    named = ChatTemplate(load_chat_template("chatml"))
    messages = [{"role": "user", "content": "Hi"}]
    assert named.render(messages) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ChatTemplateError, match="neither a Jinja template nor a readable file"):
        load_chat_template(str(tmp_path / "absent.jinja"))


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
            "U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gemma",
            "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
            "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("llama2-sys", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\n U  [/INST]A</s>[INST] V [/INST]"),
        ("mistral-v3", "<s>[INST] S\n\n U [/INST] A</s>[INST] V[/INST]"),
        ("vicuna", "<s>S\n\nUSER:  U \nASSISTANT: A</s>\nUSER: V\nASSISTANT:"),
        (
            "chatglm4",
            "[gMASK]<sop><|system|>\nS<|user|>\n U <|assistant|>\nA<|user|>\nV<|assistant|>\n",
        ),
    ],
)
def test_templates_have_the_names_of_llama_cpp(name: str, prompt: str) -> None:
    template = ChatTemplate(load_chat_template(name), special_tokens={"bos_token": "<s>"})
    texts = ("system", "S"), ("user", " U "), ("assistant", "A"), ("user", "V")
    messages = [{"role": role, "content": text} for role, text in texts]
    assert template.render(messages) == prompt


@pytest.mark.parametrize(
    ("shown", "expected"),
    [("<audio>", "user: <audio>Who is it?"), ("", f"user: {AUDIO_MARK}Who is it?")],
)
def test_a_clip_is_marked_in_the_text_if_the_template_does_not_show_it(shown, expected):
    source = (
        "{% for m in messages %}{{ m.role }}: {% for part in m.content %}"
        "{% if part.type == 'audio' %}" + shown + "{% endif %}{{ part.text }}"
        "{% endfor %}{% endfor %}"
    )
    content = [AUDIO_PART, {"type": "text", "text": "Who is it?"}]
    template = ChatTemplate(source)
    assert template.render([{"role": "user", "content": content}]) == expected


@pytest.mark.parametrize("adds", [True, False])
def test_named_templates_begin_as_texts_do(tmp_path: Path, adds: bool) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    backend.add_special_tokens(["<s>"])
    backend.decoder = decoders.ByteLevel()
    if adds:
        pieces = [("<s>", 0)]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            "<s> $A", special_tokens=pieces
        )
    template = ModelTemplates(Tokenizer(backend, tmp_path, bos_token="<s>"), "llama3").choose(False)
    assert template is not None
    prompt = template.render([{"role": "user", "content": "a"}])
    assert prompt.startswith("<s><|start_header_id|>" if adds else "<|start_header_id|>user")
