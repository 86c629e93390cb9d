"""Models that are published without a chat template have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from engine.frontend.chat import ChatTemplate, ChatTemplateError, ModelTemplates, choose_formats
from engine.frontend.chat.messages import IMAGE_PART
from engine.frontend.tokenizer.tokenizer import Tokenizer
from engine.protocol.config.frontend import FrontendConfig
from tokenizers import decoders, models

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4", "reasoning_content": "Easy."}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
CALL = {
    "role": "assistant",
    "content": "I add.",
    "reasoning_content": "Use it.",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "add", "arguments": {"numbers": [2, "é"], "unit": "<m>"}},
        }
    ],
}
WRITTEN_CALL = """

<｜DSML｜tool_calls>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="numbers" string="false">[2, "é"]</｜DSML｜parameter>
<｜DSML｜parameter name="unit" string="true"><m></｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""


def built_in(directory: Path, architecture: str) -> ChatTemplate:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, directory, bos_token=BOS, eos_token=EOS)
    assert ModelTemplates(tokenizer, architecture="llama").choose(True) is None
    found = ModelTemplates(tokenizer, architecture=architecture).choose(True)
    assert found is not None
    return found


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    return built_in(tmp_path, "deepseek_v4")


@pytest.mark.parametrize("starts", [False, True])
def test_prompts_of_molmo2_start_with_one_token(tmp_path: Path, starts: bool) -> None:
    source = "{{ bos_token }}" * starts + "{{ messages[0].content }}"
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    templates = {"default": source}
    tokenizer = Tokenizer(backend, tmp_path, bos_token=BOS, chat_templates=templates)
    found = ModelTemplates(tokenizer, architecture="molmo2").choose(False)
    assert found is not None
    assert found.render([QUESTION]) == f"{BOS}2 + 2?"
    plain = ModelTemplates(tokenizer, architecture="llama").choose(False)
    assert plain is not None
    assert plain.render([QUESTION]) == BOS * starts + "2 + 2?"


@pytest.mark.parametrize(
    ("messages", "kwargs", "prompt"),
    [
        ([QUESTION], {}, "<｜User｜>2 + 2?<｜Assistant｜><think>"),
        ([QUESTION], {"enable_thinking": False}, "<｜User｜>2 + 2?<｜Assistant｜></think>"),
        ([QUESTION], {"thinking": False}, "<｜User｜>2 + 2?<｜Assistant｜></think>"),
        (
            [{"role": "system", "content": "Be terse."}, QUESTION, ANSWER, QUESTION],
            {},
            f"Be terse.<｜User｜>2 + 2?<｜Assistant｜></think>4{EOS}<｜User｜>2 + 2?<｜Assistant｜><think>",
        ),
        (
            [QUESTION, ANSWER, QUESTION],
            {"thinking": False},
            f"<｜User｜>2 + 2?<｜Assistant｜></think>4{EOS}<｜User｜>2 + 2?<｜Assistant｜></think>",
        ),
    ],
)
def test_prompts_of_deepseek_v4(
    template: ChatTemplate, messages: list[dict[str, Any]], kwargs: dict[str, Any], prompt: str
) -> None:
    assert template.render(messages, **kwargs) == BOS + prompt


def test_deepseek_v4_sees_tools_calls_and_results(template: ChatTemplate) -> None:
    """With tools, earlier reasoning stays, and results belong to the turn of the user."""
    results = [{"role": "tool", "tool_call_id": "c1", "content": text} for text in ("4", "5")]
    system = {"role": "system", "content": "Be terse."}
    messages = [system, QUESTION, CALL, *results, {"role": "user", "content": "So?"}]
    before, _, after = template.render(messages, tools=[TOOL]).partition("<｜User｜>")
    assert before.startswith(f"{BOS}Be terse.\n\n## Tools\n\n")
    assert '{"name": "add", "parameters": {"type": "object", "properties": {}}}\n' in before
    assert after == (
        f"2 + 2?<｜Assistant｜><think>Use it.</think>I add.{WRITTEN_CALL}{EOS}<｜User｜>"
        "<tool_result>4</tool_result>\n\n<tool_result>5</tool_result>\n\nSo?<｜Assistant｜><think>"
    )
    assert "## Tools" in template.render([QUESTION], tools=[TOOL])


def test_deepseek_v4_1_gets_the_effort_and_marks_with_spaces(tmp_path: Path) -> None:
    template = built_in(tmp_path, "deepseek_v41")
    effort = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    prompt = "<｜User｜>2 + 2?<｜Assistant｜><think>"
    assert template.render([QUESTION]) == f"{BOS}<｜System｜>{effort.format(75)}{prompt}"
    for given, stated in (("low", 50), ("max", 100), (7, 7)):
        rendered = template.render([QUESTION], reasoning_effort=given)
        assert rendered == f"{BOS}<｜System｜>{effort.format(stated)}{prompt}"
    plain = template.render([QUESTION], thinking=False)
    assert plain == f"{BOS}<｜User｜>2 + 2?<｜Assistant｜></think>"
    system = {"role": "system", "content": "Be terse."}
    later = template.render([system, QUESTION, ANSWER, system, QUESTION], thinking=False)
    assert later.startswith(f"{BOS}<｜System｜>Be terse.<｜User｜>")
    assert later.count("<｜System｜>Be terse.") == 2
    called = template.render([QUESTION, CALL], tools=[TOOL], add_generation_prompt=False)
    spaced = WRITTEN_CALL.replace("tool_calls", "calls").replace("DSML｜", "DSML｜ ")
    assert called.endswith(f"I add.{spaced}{EOS}")
    assert choose_formats(FrontendConfig(), template).tool_calls.name == "deepseek_v41"
    with pytest.raises(ChatTemplateError, match="reasoning_effort must be low"):
        template.render([QUESTION], reasoning_effort=101)


def test_the_formats_of_deepseek_v4_are_found(template: ChatTemplate) -> None:
    formats = choose_formats(FrontendConfig(), template)
    assert formats.tool_calls.name == "deepseek_v4"
    assert formats.reasoning.name == "qwen3"


def k3(role: str, text: str, attributes: str = "") -> str:
    """Return a message in Kimi K3's format."""
    head = f'<|open|>message role="{role}"{attributes}<|sep|>'
    return f"{head}{text}<|close|>message<|sep|><|end_of_msg|>"


def k3_tag(name: str, text: str, attributes: str = "") -> str:
    return f"<|open|>{name}{attributes}<|sep|>{text}<|close|>{name}<|sep|>"


def test_kimi_k3_sees_tools_calls_and_results(tmp_path: Path) -> None:
    """Results are in the order of their calls if all of them name one."""
    template = built_in(tmp_path, "kimi_k3")
    second = {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}}
    call = CALL | {"tool_calls": [*CALL["tool_calls"], second]}
    results = [
        {"role": "tool", "tool_call_id": i, "content": text}
        for i, text in (("c2", "5"), ("c1", "4"))
    ]
    arguments = k3_tag("argument", '[2, "é"]', ' key="numbers" type="array"')
    arguments += k3_tag("argument", "<m>", ' key="unit" type="string"')
    calls = k3_tag("call", arguments, ' tool="add" index="1"')
    calls += k3_tag("call", "", ' tool="now" index="2"')
    answer = k3_tag("response", "I add.") + k3_tag("tools", calls)
    system = {"role": "system", "content": "Be terse."}
    tools = (
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
        '[{"function":{"name":"add","parameters":{"properties":{},"type":"object"}},"type":"function"}]\n```'
    )
    declared = k3("system", tools, ' type="tool-declare"')
    chat = k3("system", "Be terse.") + k3("user", "2 + 2?") + "%s"
    chat += k3("tool", "4", ' tool="add" index="1"') + k3("tool", "5", ' tool="now" index="2"')
    messages = [system, QUESTION, call, *results]
    prompt = template.render(messages, tools=[TOOL], thinking=False)
    head = '<|open|>message role="assistant"<|sep|><|open|>'
    assert prompt == declared + chat % k3("assistant", answer) + f"{head}response<|sep|>"
    prompt = template.render(messages, reasoning_effort="low")
    effort, _, rest = prompt.partition("<|end_of_msg|>")
    assert effort.startswith('<|open|>message role="system" type="thinking-effort"<|sep|>')
    assert effort.endswith("with `thinking_effort=low`.<|close|>message<|sep|>")
    thought = k3("assistant", k3_tag("think", "Use it.") + answer)
    assert rest == chat % thought + f"{head}think<|sep|>"
    with pytest.raises(ChatTemplateError, match="the effort must be low, medium, high or max"):
        template.render([QUESTION], reasoning_effort="xhigh")
    unnamed = template.render([QUESTION, call, {"role": "tool", "content": "4"}], thinking=False)
    assert k3("tool", "4", ' tool="add" index="1"') in unnamed


def test_the_formats_of_kimi_k3_are_found(tmp_path: Path) -> None:
    formats = choose_formats(FrontendConfig(), built_in(tmp_path, "kimi_k3"))
    assert formats.tool_calls.name == formats.reasoning.name == "kimi_k3"


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("<OCR>", "What is the text in the image?"),
        ("<OPEN_VOCABULARY_DETECTION> a cat ", "Locate a cat in the image."),
        ("A question?", "A question?"),
    ],
)
def test_tasks_of_florence2_become_questions(tmp_path: Path, text: str, question: str) -> None:
    prompt = built_in(tmp_path, "florence2").render([{"role": "user", "content": text}])
    assert prompt == f"{BOS}{question}{EOS}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("<s_docvqa>", ""),
        ("Who?", "<s_question>Who?</s_question><s_answer>"),
        ("<s_docvqa><s_question>Who?", "<s_question>Who?"),
        ("<s_question>Who?", "<s_question>Who?"),
    ],
)
def test_the_image_of_donut_takes_the_place_of_its_task(
    tmp_path: Path, text: str, expected: str
) -> None:
    parts = [{"type": "text", "text": text}, IMAGE_PART]
    prompt = built_in(tmp_path, "donut").render([{"role": "user", "content": parts}])
    assert prompt == f"<image>{expected}"


def test_questions_of_chameleon_end_with_a_separator(tmp_path: Path) -> None:
    prompt = built_in(tmp_path, "chameleon").render([QUESTION, ANSWER, QUESTION])
    separator = "<reserved08706>"
    assert prompt == f"{BOS}2 + 2?{separator}4{EOS}2 + 2?{separator}"


def test_moondream_answers_questions_and_writes_captions(tmp_path: Path) -> None:
    template = built_in(tmp_path, "moondream")
    start = "<|endoftext|>"
    for text, length in (("caption", "normal"), ("describe short", "short")):
        assert template.render([{"role": "user", "content": text}]) == (
            f"{start}<|md_reserved_0|>describe<|md_reserved_1|>{length}<|md_reserved_2|>"
        )
    assert template.render([QUESTION, {"role": "assistant", "content": "4"}, QUESTION]) == (
        f"{start}<|md_reserved_0|>query<|md_reserved_1|>2 + 2?<|md_reserved_2|>4"
        "<|md_reserved_0|>query<|md_reserved_1|>2 + 2?<|md_reserved_2|>"
    )
    parts = [{"type": "text", "text": "Who?"}, IMAGE_PART]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert template.render(chat).startswith(f"{start}<image><|md_reserved_0|>query")
