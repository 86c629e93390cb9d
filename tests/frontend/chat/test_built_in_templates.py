"""Models that are published without a chat template have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from engine.frontend.chat import ChatTemplate, ModelTemplates, choose_formats
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


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, tmp_path, bos_token=BOS, eos_token=EOS)
    assert ModelTemplates(tokenizer, architecture="llama").choose(True) is None
    found = ModelTemplates(tokenizer, architecture="deepseek_v4").choose(True)
    assert found is not None
    return found


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


def test_the_formats_of_deepseek_v4_are_found(template: ChatTemplate) -> None:
    formats = choose_formats(FrontendConfig(), template)
    assert formats.tool_calls.name == "deepseek_v4"
    assert formats.reasoning.name == "qwen3"
