"""Reasoning parsers, alone and before tool calls, however the text is split."""

import json

import pytest
import tokenizers
from engine.frontend.chat import FORMATS, CallParser, ChatOutputParser, reasoning_parser
from engine.frontend.tokenizer.load import load_tokenizer
from engine.frontend.tokenizer.tokenizer import Tokenizer
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from hypothesis import given
from hypothesis import strategies as st
from support.suite.examples import examples
from tokenizers import decoders, models, pre_tokenizers

OPEN = "user\nhi\nassistant\n<think>\n"
CLOSED = "user\nhi\nassistant\n<think>\n\n</think>\n\n"
K3_OPEN = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
K3_ANSWER = "<|open|>response<|sep|> A\n<|sep|><|close|>response<|sep|>"
K3_CALLS = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="string"<|sep|>'
    "<|open|>response<|sep|> <|close|>response<|sep|><|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)
LONG = "x" * 1024

CASES = [
    ("deepseek_r1", "", "Hmm, so.\n</think>\n\nThe answer. ", "Hmm, so.", "The answer. "),
    ("deepseek_r1", "", "<think>\nHmm\n</think>\n\nA", "Hmm", "A"),
    ("deepseek_r1", OPEN, "Hmm</think>A", "Hmm", "A"),
    ("deepseek_r1", "", "never ends </thin", "never ends </thin", ""),
    ("deepseek_r1", CLOSED, "\nA </think> b", "", "\nA </think> b"),
    ("deepseek_r1", "", "</think>A", "", "A"),
    ("qwen3", "", "<think>\nHmm\n\n</think>\n\nA\n", "Hmm", "A\n"),
    ("qwen3", "", "\n\nplain <b>", "", "\n\nplain <b>"),
    ("qwen3", "", "no <think>later</think>", "", "no <think>later</think>"),
    ("qwen3", OPEN, "Hmm\n</think>\n\nA", "Hmm", "A"),
    ("qwen3", CLOSED, "A", "", "A"),
    ("qwen3", "", "<think>cut", "cut", ""),
    ("qwen3", "", "<think>a</think>", "a", ""),
    ("qwen3", "", "<thi", "", "<thi"),
    ("qwen3", "tell me of <think>\nassistant\n", "A", "", "A"),
    (
        "granite",
        "",
        "Here is my thought process: Hmm.\nHere is my response: A",
        "Hmm.",
        "A",
    ),
    ("granite", "", "Here's it.", "", "Here's it."),
    ("mistral", "", "[THINK]Hmm[/THINK]A", "Hmm", "A"),
    ("k2_horizon", "<ifm|think_fast>", "Hmm</ifm|think_fast>A", "Hmm", "A"),
    ("seed_oss", "", "<seed:think>Hmm</seed:think>A", "Hmm", "A"),
    ("minimax_m3", "<mm:think>", "Hmm</mm:think>A", "Hmm", "A"),
    ("minimax_m3", "", "</mm:think>\nA </mm:think>", "", "A </mm:think>"),
    ("minimax_m3", "", "</mm:th", "", "</mm:th"),
    ("ernie45", "", "Hmm\n</think>\n\n<response>\nA\n</response>\n", "Hmm", "A"),
    ("ernie45", "", "Hmm</think>A\n", "Hmm", "A\n"),
    ("ernie45", "", "</think>\n<resp", "", "<resp"),
    ("hunyuan_a13b", "", "<think>\nHmm\n</think>\n<answer>\nA\nb\n</answer>", "Hmm", "A\nb"),
    ("hunyuan_a13b", "", "<think>\nHmm\n</think>\n<answer>\n", "Hmm", ""),
    ("hunyuan_a13b", "", "A", "", "A"),
    ("minimax_m2_append_think", "", "Hmm</think>A", "", "<think>Hmm</think>A"),
    ("plamo3", "<|plamo:begin_think:plamo|>", "Hmm<|plamo:end_think:plamo|>A", "Hmm", "A"),
    ("qwen3", OPEN, "Hmm.\n<tool_call>{}", "Hmm.", "<tool_call>{}"),
    (
        "qwen3",
        OPEN,
        "A `<tool_call>`, a <tool_call> b\n</think>A",
        "A `<tool_call>`, a <tool_call> b",
        "A",
    ),
    ("k2_horizon", "<ifm|think>", "Hmm<ifm|tool_calls>", "Hmm", "<ifm|tool_calls>"),
    ("seed_oss", "<seed:think>", "Hmm\n<seed:tool_call>a", "Hmm", "<seed:tool_call>a"),
    ("kimi_k2", OPEN, "Hmm<|tool_calls_section_begin|>", "Hmm", "<|tool_calls_section_begin|>"),
    (
        "cohere_command3",
        "",
        "<|START_THINKING|> Hmm <co>so</co: 0:[1]> \n<|END_THINKING|>\n<|START_RESPONSE|>A <co>b</co: 0:[1,2],1:[3]> < c"
        "<|END_RESPONSE|>",
        "Hmm so",
        "A b < c",
    ),
    ("cohere_command3", "", "<|START_RESPONSE|>A </co: 1", "", "A </co: 1"),
    (
        "cohere_command4",
        "<|USER_TOKEN|>hi<|CHATBOT_TOKEN|><|START_THINKING|>",
        "Hmm<|START_ACTION|>[]<|END_ACTION|>",
        "Hmm",
        "<|START_ACTION|>[]<|END_ACTION|>",
    ),
    (
        "inkling",
        "<|end_message|><|message_model|>",
        "<|content_thinking|> Hmm\n<|end_message|><|message_model|><|content_text|>A<|end_message|><|message_model|>f"
        '<|content_invoke_tool_json|>{"name":"f"}<|end_message|><|content_model_end_sampling|>',
        "Hmm",
        'A<|content_invoke_tool_json|>{"name":"f"}<|end_message|>',
    ),
    ("inkling", "<|message_model|>", "plain answer", "", "plain answer"),
    ("inkling", "", "plain answer<|end_message|>", "", "plain answer"),
    ("inkling", "<|message_model|><|content_text|>", "A", "", "A"),
    (
        "muse",
        "<|start|>user<|message|>Hi<|eot|><|start|>assistant",
        " to=self<|message|>Hmm <atem:<|eom|><|start|>assistant to=developer<|message|>x<|eom|>"
        "<|start|>assistant to=f<|message|><atem:function_calls><|eom|><|start|>assistant to=user<|message|>A<|eot|>",
        "Hmm <atem:",
        "<atem:function_calls>A",
    ),
    ("muse", "<|start|>assistant", "<|message|>Hmm<|eom|>", "Hmm", ""),
    ("kimi_vl", "◁think▷", "Hmm◁/think▷A", "Hmm", "A"),
    ("gemma4", "", "<|channel>thought\nHmm\n<channel|>A", "Hmm", "A"),
    ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "A", "", "A"),
    ("gemma4", "", "<|channel>thousand reasons<channel|>A", "thousand reasons", "A"),
    (
        "openai_gptoss",
        "<|start|>user<|message|>Hi<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>Hmm < |<|end|><|start|>assistant<|channel|>final<|message|> A\n",
        "Hmm < |",
        " A\n",
    ),
    (
        "openai_gptoss",
        "",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>c<|end|><|start|>assistant to=functions.f"
        '<|channel|>commentary json<|message|>{"x": 1}<|call|>',
        "a\n\nc",
        'b<|channel|>commentary to=functions.f<|message|>{"x": 1}<|call|>',
    ),
    (
        "openai_gptoss",
        "",
        "<|channel|>commentary to=browser.search code<|message|>q<|call|><|start|>assistant<|channel|>final"
        "<|message|>A<|return|>",
        "q",
        "A",
    ),
    ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>Once", " upon", "", " upon"),
    ("openai_gptoss", "", " no channels <|", "", " no channels <|"),
    ("openai_gptoss", "", "<|channel|>final<|message|>A<|end|> B", "", "A\n\n B"),
    ("openai_gptoss", "", "<|channel|>analysis<|message|>cut<|en", "cut<|en", ""),
    ("openai_gptoss", "", "<|channel|>anal", "", ""),
    ("openai_gptoss", "", f"<|start|>{LONG}", "", f"<|start|>{LONG}"),
    (
        "kimi_k3",
        K3_OPEN,
        " Hm <|close\n<|close|>think<|sep|>" + K3_ANSWER,
        " Hm <|close\n",
        " A\n<|sep|>",
    ),
    (
        "kimi_k3",
        K3_OPEN,
        "Hm<|close|>think<|sep|>\n" + K3_ANSWER + "\n" + K3_CALLS + "<|close|>message<|sep|>",
        "Hm",
        " A\n<|sep|>" + K3_CALLS,
    ),
    (
        "kimi_k3",
        K3_OPEN,
        "Hm<|open|>response<|sep|>A<|open|>tools<|sep|>x",
        "Hm",
        "A<|open|>tools<|sep|>x",
    ),
    ("kimi_k3", "", "<|open|>think<|sep|>a<|close|>think<|sep|>b", "a", "b"),
    (
        "kimi_k3",
        "<|open|>message<|sep|><|open|>response<|sep|>",
        "A<|close|>resp",
        "",
        "A<|close|>resp",
    ),
    ("kimi_k3", K3_OPEN, "cut<|clo", "cut<|clo", ""),
    ("kimi_k3", "", " no channels <|", "", " no channels <|"),
    ("kimi_k3", "", "<|open|>respon", "", ""),
    ("kimi_k3", "", f"<|open|>{LONG}", "", f"<|open|>{LONG}"),
]


def read(
    name: str, prompt: str, pieces: list[str], *, constrained: bool = False
) -> tuple[str, str]:
    parser = reasoning_parser(name)(prompt, constrained=constrained)
    deltas = [*map(parser.feed, pieces), parser.finish()]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content_are_separated(name, prompt, text, reasoning, content) -> None:
    assert read(name, prompt, [text]) == (reasoning, content)
    assert read(name, prompt, list(text)) == (reasoning, content)


XTML = ["<|open|>", "<|close|>", "<|sep|>", "think", "response", "tools", "message", ' key="a"']
XTML += ["text", "<", "\n", " ", "<|open|>response<|sep|>", "<|close|>think<|sep|>"]
HARMONY = [
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "assistant",
    "analysis",
    "final",
]
HARMONY += ["commentary", " to=functions.f", "<|constrain|>", "json", "text", "<", "\n", " "]
FRAGMENTS = ["<think>", "</think>", "<", "/think", ">", " ", "\n", "word", "Here is my response:"]
FRAGMENTS += ["Here is my thought process:", "Here's", "é"]


@examples(300)
@given(
    pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=10),
    prompt=st.sampled_from(["", OPEN, CLOSED]),
)
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3", "granite"])
def test_splits_do_not_change_reasoning_and_content(name, pieces, prompt, constrained) -> None:
    whole = read(name, prompt, ["".join(pieces)], constrained=constrained)
    assert read(name, prompt, pieces, constrained=constrained) == whole
    assert read(name, prompt, list("".join(pieces)), constrained=constrained) == whole


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", "", "<think>\nHmm \n</think>\n\n yes ", "Hmm", "\n\n yes "),
        ("qwen3", OPEN, "Hmm</think>\n", "Hmm", "\n"),
        ("qwen3", OPEN, "\n</think>", "", ""),
        ("qwen3", "", "\n yes", "", "\n yes"),
        ("qwen3", CLOSED, "\n yes", "", "\n yes"),
        ("deepseek_r1", "", "Hmm</think>\nyes", "Hmm", "\nyes"),
    ],
)
def test_reasoning_is_separated_from_a_constrained_answer(
    name, prompt, text, reasoning, content
) -> None:
    for pieces in ([text], list(text)):
        assert read(name, prompt, pieces, constrained=True) == (reasoning, content)


@examples(300)
@given(data=st.data(), is_open=st.booleans())
@pytest.mark.parametrize(
    ("name", "fragments", "prompt"),
    [("openai_gptoss", HARMONY, "<|start|>assistant"), ("kimi_k3", XTML, K3_OPEN)],
)
def test_splits_do_not_change_channels(name, fragments, prompt, data, is_open) -> None:
    pieces = data.draw(st.lists(st.sampled_from(fragments), max_size=16))
    text, prompt = "".join(pieces), prompt * is_open
    whole = read(name, prompt, [text])
    assert read(name, prompt, pieces) == read(name, prompt, list(text)) == whole


HARMONY_ANSWER = (
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
)


@pytest.mark.parametrize(
    ("reasoning", "tools", "prompt", "text", "content", "arguments"),
    [
        ("openai_gptoss", "openai", "", HARMONY_ANSWER, "b", '{"x": 1}'),
        (
            "kimi_k3",
            "kimi_k3",
            K3_OPEN,
            f"a<|close|>think<|sep|>{K3_ANSWER}{K3_CALLS}<|close|>message<|sep|>",
            " A\n<|sep|>",
            '{"x": "<|open|>response<|sep|> <|close|>response<|sep|>"}',
        ),
    ],
)
def test_every_split_of_channels_gives_the_same_message(
    reasoning, tools, prompt, text, content, arguments
) -> None:
    for at in range(len(text)):
        parser = ChatOutputParser(reasoning_parser(reasoning)(prompt), CallParser(FORMATS[tools]))
        deltas = [parser.feed(text[:at]), parser.feed(text[at:], finished=True)]
        assert "".join(d.reasoning for d in deltas) == "a"
        assert "".join(d.content for d in deltas) == content
        calls = [call for d in deltas for call in d.tool_calls]
        assert calls[0].name == "f" and "".join(c.arguments for c in calls) == arguments


def test_reasoning_is_streamed_as_it_arrives() -> None:
    parser = reasoning_parser("qwen3")("")
    assert not parser.feed("<think>\n")
    assert parser.feed("I think").reasoning == "I think"
    assert parser.feed(" so </th").reasoning == " so"
    assert not parser.feed("ink>\n")
    assert parser.feed("\nYes").content == "Yes"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """A tokenizer of bytes, with `</think>` as one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["</think>"])
    path = tmp_path_factory.mktemp("bytes")
    backend.save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


@pytest.mark.parametrize(
    ("name", "prompt", "text", "count"),
    [
        ("deepseek_r1", "", "éx</think>yz", 3),
        ("deepseek_r1", "", "abc", 3),
        ("deepseek_r1", CLOSED, "abc", 0),
        ("qwen3", "", "<think>ab</think>c", 9),
        ("qwen3", "", "abc", 0),
        ("qwen3", OPEN, "ab</think>c", 2),
        ("granite", "", "Here is my thought process: a Here is my response: b", 30),
        (
            "openai_gptoss",
            "",
            "<|channel|>analysis<|message|>ab<|end|><|channel|>final<|message|>c",
            39,
        ),
        ("kimi_k3", K3_OPEN, "ab<|close|>think<|sep|><|open|>response<|sep|>c", 2),
        ("kimi_k3", "", "<|open|>response<|sep|>c", 0),
    ],
)
def test_reasoning_tokens_are_counted(tokenizer: Tokenizer, name, prompt, text, count) -> None:
    parser = reasoning_parser(name)(prompt)
    parser.feed(text)
    parser.finish()
    assert parser.num_reasoning_tokens(tokenizer.encode(text), tokenizer) == count


CHOICE = StructuredOutput(GrammarKind.CHOICE, '["a"]')


@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("qwen3", "", False),
        ("qwen3", OPEN, True),
        ("qwen3", CLOSED, None),
        ("qwen3", "<think>a</think>b\nuser\nc\nassistant\n", False),
        ("deepseek_r1", "", True),
        ("deepseek_r1", CLOSED, None),
        ("granite", "", False),
    ],
)
def test_a_constraint_contains_the_markers_of_reasoning(
    tokenizer: Tokenizer, name, prompt, is_open
) -> None:
    left = reasoning_parser(name)(prompt).allow_reasoning_before(CHOICE, tokenizer)
    assert (left.kind, left.spec) == (CHOICE.kind, CHOICE.spec)
    if is_open is None:
        assert left == CHOICE
        return
    assert left.reasoning.is_open is is_open
    if name == "granite":
        assert "Here is my thought process:" in left.reasoning.starts
        assert left.reasoning.end_token_ids == ()
    else:
        assert (left.reasoning.starts, left.reasoning.ends) == (("<think>",), ("</think>",))
        assert left.reasoning.start_token_ids == ()
        assert left.reasoning.end_token_ids == (tokenizer.token_to_id("</think>"),)


def test_tool_calls_may_follow_reasoning() -> None:
    text = (
        '<think>use <tool_call> now</think>\nOk.\n<tool_call>{"name": "f", "arguments": '
        '{"a": 1}}</tool_call>'
    )
    for pieces in ([text], list(text)):
        parser = ChatOutputParser(reasoning_parser("qwen3")(""), CallParser(FORMATS["hermes"]))
        deltas = [parser.feed(piece) for piece in pieces] + [parser.feed("", finished=True)]
        assert "".join(d.reasoning for d in deltas) == "use <tool_call> now"
        assert "".join(d.content for d in deltas) == "Ok."
        calls = [call for d in deltas for call in d.tool_calls]
        assert calls[0].name == "f"
        assert json.loads("".join(call.arguments for call in calls)) == {"a": 1}


def test_without_parsers_all_text_is_content() -> None:
    parser = ChatOutputParser(None, None)
    assert parser.feed("<think>a").content == "<think>a"
    assert not parser.feed("", finished=True)
