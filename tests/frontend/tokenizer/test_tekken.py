"""Tokenizers in `tekken.json`, with the prompts of mistral-common 1.13.1, and in `tiktoken.model`."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine.frontend.chat.detection import choose_formats
from engine.frontend.chat.messages import AUDIO_PART
from engine.frontend.chat.template import ChatTemplate
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.config import FrontendConfig
from engine.protocol.errors import CheckpointError

JOINED = [
    "he",
    "ll",
    "hell",
    "hello",
    "lo",
    " w",
    "or",
    " wor",
    "ld",
    " world",
    "\u00e9",
    "12",
    "\n\n",
]
VOCABULARY = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in JOINED)]
NUM_SPECIAL = 40
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"

TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
LISTED = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]'
    "[/AVAILABLE_TOOLS]"
)
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Sys"},
    {"role": "user", "content": "W?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "get", "arguments": '{"city": "Oslo é"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "12 °C"},
    {"role": "assistant", "content": "It is 12. ", "reasoning_content": "Hm."},
    {"role": "user", "content": "more"},
    {"role": "user", "content": [{"type": "text", "text": "p1"}, {"type": "text", "text": "p2"}]},
]
OLD_CALL = '[TOOL_CALLS][{"name": "get", "arguments": {"city": "Oslo é"}, "id": "abcdefghi"}]</s>'
MORE = "more\n\np1\n\np2[/INST]"
PROMPTS = {
    "v3": f"<s>[INST]W?[/INST]{OLD_CALL}"
    '[TOOL_RESULTS]{"content": "12 °C", "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    f"It is 12.</s>{LISTED}[INST]Sys\n\n{MORE}",
    "v7": f"<s>[SYSTEM_PROMPT]Sys[/SYSTEM_PROMPT][INST]W?[/INST]{OLD_CALL}"
    "[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]12 °C[/TOOL_RESULTS]"
    f"It is 12.</s>{LISTED}[INST]{MORE}",
    "v11": "<s>[SYSTEM_PROMPT]Sys[/SYSTEM_PROMPT][INST]W?[/INST]"
    '[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{"city": "Oslo é"}</s>'
    "[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]12 °C[/TOOL_RESULTS]"
    f"It is 12.</s>{LISTED}[INST]{MORE}",
    "v13": f"<s>[SYSTEM_PROMPT]Sys[/SYSTEM_PROMPT]{LISTED}[INST]W?[/INST]"
    '[TOOL_CALLS]get[ARGS]{"city": "Oslo é"}</s>'
    "[TOOL_RESULTS]12 °C[/TOOL_RESULTS]"
    f"[THINK]Hm.[/THINK]It is 12.</s>[INST]{MORE}",
}


def write_tekken(directory: Path, version: str = "v11", **fields: Any) -> Path:
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(VOCABULARY)
    ]
    config = {
        "pattern": PATTERN,
        "version": version,
        "num_vocab_tokens": 150_000,
        "default_vocab_size": NUM_SPECIAL + len(VOCABULARY),
        "default_num_special_tokens": NUM_SPECIAL,
    }
    directory.mkdir(exist_ok=True)
    # The file has more tokens than the model.
    file = {"config": config, "vocab": [*vocabulary, vocabulary[0]]} | fields
    (directory / "tekken.json").write_text(json.dumps(file))
    return directory


def write_tiktoken(directory: Path, lines: list[str] | None = None, **fields: Any) -> Path:
    """Write the files of a Kimi, whose special tokens follow all others."""
    directory.mkdir(exist_ok=True)
    if lines is None:
        lines = [f"{base64.b64encode(x).decode()} {rank}" for rank, x in enumerate(VOCABULARY)]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    size = len(VOCABULARY)
    named = {size: "[BOS]", size + 1: "[EOS]", size + 5: "<|open|>"}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {str(i): {"content": t, "special": True} for i, t in named.items()},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config | fields))
    return directory


def write_phi(directory: Path) -> Path:
    """Write the files of a Phi-3-small, with fewer tokens."""
    config = {"tokenizer_class": "Phi3SmallTokenizer", "chat_template": "own"}
    write_tiktoken(directory, **config, eos_token="<|endoftext|>", added_tokens_decoder=None)
    (directory / "tiktoken.model").rename(directory / "cl100k_base.tiktoken")
    return directory


def joined(word: bytes) -> list[bytes]:
    """Join the adjacent pair of the lowest rank, the first of several, as long as there is one."""
    parts = [bytes([byte]) for byte in word]
    if word in VOCABULARY:
        return [word]
    while True:
        ranks = [
            (VOCABULARY.index(parts[i] + parts[i + 1]), i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in VOCABULARY
        ]
        if not ranks:
            return parts
        _, i = min(ranks)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize(
    ("write", "start", "first"),
    [(write_tekken, [1], NUM_SPECIAL), (write_tiktoken, [], 0), (write_phi, [], 0)],
)
def test_words_are_joined_by_rank_and_decoded_to_the_same_text(
    tmp_path: Path, write: Callable[[Path], Path], start: list[int], first: int
) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "model"))
    rng = random.Random(1)
    for _ in range(200):
        word = "".join(rng.choice("heloé") for _ in range(rng.randrange(1, 9)))
        expected = [first + VOCABULARY.index(part) for part in joined(word.encode())]
        assert list(tokenizer.encode(word)) == [*start, *expected]
    ids = list(tokenizer.encode("hello world 12\n\nsmörgås 😀"))
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello world 12\n\nsmörgås 😀"


def test_special_tokens_of_phi_3_small_follow_all_others(tmp_path: Path) -> None:
    """The published file has 100,256 tokens, and `<|end|>` the id 100,266."""
    tokenizer = load_tokenizer(write_phi(tmp_path / "model"))
    size = len(VOCABULARY)
    assert tokenizer.eos_token_id == size + 1
    ids = [size + 6, 256, size + 10, size + 7, size + 20, size + 95]
    text = "<|user|>he<|end|><|assistant|><|endofprompt|><|dummy_id_86|>"
    assert list(tokenizer.encode(text)) == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he"
    assert tokenizer.chat_templates == {"default": "own"}


def test_special_tokens_of_tiktoken_files_are_named_or_reserved(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tiktoken(tmp_path / "model"))
    size = len(VOCABULARY)
    assert tokenizer.eos_token_id == size + 1
    assert list(tokenizer.encode("<|open|>he[EOS]")) == [size + 5, 256, size + 1]
    assert (
        tokenizer.decode([size + 255], skip_special_tokens=False)
        == f"<|reserved_token_{size + 255}|>"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text("own")
    assert load_tokenizer(tmp_path / "model").chat_templates == {"default": "own"}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tokenizer_class": "Other"}, "read only for the tokenizer_class TikTokenTokenizer"),
        ({"lines": ["YQ=="]}, "not a tokenizer of tiktoken"),
        ({"lines": ["YQ== 0", "Yg== 2"]}, "must have different ranks from 0"),
        ({"lines": ["YQ== 0", "YQ== 1"]}, "must have different ranks from 0"),
        ({"added_tokens_decoder": {str(len(VOCABULARY)): "[BOS]"}}, r"added_tokens_decoder\.\d+"),
        (
            {"added_tokens_decoder": {str(len(VOCABULARY)): {"content": 3}}},
            r"added_tokens_decoder\.\d+\.content",
        ),
    ],
)
def test_damaged_tiktoken_files_are_refused(
    tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        load_tokenizer(write_tiktoken(tmp_path / "model", **fields))


@pytest.mark.parametrize("version", PROMPTS)
def test_prompts_have_the_format_of_the_version(tmp_path: Path, version: str) -> None:
    tokenizer = load_tokenizer(write_tekken(tmp_path / "model", version))
    template = ChatTemplate(
        tokenizer.chat_templates["default"],
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )
    assert template.render(CHAT, tools=TOOLS) == PROMPTS[version]
    parts = [AUDIO_PART, {"type": "text", "text": "W?"}]
    heard = template.render([{"role": "user", "content": parts}])
    assert heard == "<s>[INST][BEGIN_AUDIO][AUDIO]W?[/INST]"
    formats = choose_formats(FrontendConfig(), template)
    assert formats.tool_calls.name == "mistral"
    assert formats.reasoning.name == ("mistral" if version == "v13" else None)


def test_files_may_list_special_tokens_and_have_a_template_of_their_own(tmp_path: Path) -> None:
    names = ["<unk>", "<s>", "</s>", "<pad>", "[THINK]"]
    listed = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    directory = write_tekken(tmp_path / "model", "v99", special_tokens=listed)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.pad_token_id == 3 and not tokenizer.chat_templates
    assert tokenizer.decode([4, 5], skip_special_tokens=False) == "[THINK]<SPECIAL_5>"
    (directory / "chat_template.jinja").write_text("own")
    assert load_tokenizer(directory).chat_templates == {"default": "own"}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"config": {}}, "not a tokenizer of Mistral"),
        ({"vocab": []}, "must have 269 tokens in order of rank"),
        ({"special_tokens": [{"rank": 0, "token_str": "<s>"}]}, "no special token </s>"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        load_tokenizer(write_tekken(tmp_path / "model", **fields))
