"""Transcripts of chat models, whose answers may begin with the language."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine.frontend.chat.special_tokens import SpecialTokenGuard
from engine.frontend.chat.template import ChatTemplate
from engine.frontend.client.engine_client import Delta
from engine.frontend.media.transcription.chat_prompt import ChatPrompts
from engine.frontend.media.transcription.options import Task, TranscriptionOptions
from engine.frontend.model_source.chat_audio import read_chat_audio
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.errors import ParameterError
from support.audio.checkpoints import audio_directory

TEMPLATE = '{% for m in messages %}{{ m.role }}:{{ "<|audio_pad|>" if m.role == "user" else m.content }} {% endfor %}'


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audio_directory(tmp_path_factory.mktemp("model"), "qwen3_asr")[0]


def prompts_of(
    path: Path, policy: Any = "escape", source: str = TEMPLATE
) -> tuple[ChatPrompts, Any]:
    tokenizer = load_tokenizer(str(path))
    config = ConfigFields.read(path / "config.json")
    audio = read_chat_audio(path, config, config.required_section("text_config"))
    assert audio is not None
    assert audio.speech is not None
    model: Any = SimpleNamespace(
        max_model_len=100, vocab_size=config.required_section("text_config").integer("vocab_size")
    )
    model.eos_token_ids = (tokenizer.token_to_id("</s>"),)
    guard = SpecialTokenGuard(tokenizer, policy)
    template = ChatTemplate(source)
    return ChatPrompts(model, audio, audio.speech, tokenizer, template, guard), tokenizer


@pytest.mark.parametrize(
    ("answer", "language", "text"),
    [
        ("language English<asr_text>the quick fox", "en", "the quick fox"),
        ("language None<asr_text>", "", ""),
        ("the quick brown fox jumps over the lazy dog and the quick brown fox", "", None),
    ],
)
def test_text_before_the_mark_is_read_as_the_language_and_hidden_in_streams(
    path: Path, answer: str, language: str, text: str | None
) -> None:
    prompts, tokenizer = prompts_of(path)
    token_ids = list(tokenizer.encode(answer, add_special_tokens=False))
    found = prompts.read_answer(token_ids)
    assert found.language == language
    expected = answer if text is None else text
    assert prompts.text(token_ids[found.start :]).strip() == expected
    held = prompts.hold("")
    assert held is not None
    assert prompts.hold("en") is None
    shown = [
        held.read(Delta(tokenizer.decode([token]), [token], [token]))  # type: ignore[list-item]
        for token in token_ids
    ]
    shown.append(held.read(Delta("", []), is_end=True))
    assert [each.text for each in shown[:3]] == ["", "", ""]
    assert [token for each in shown for token in each.token_ids] == token_ids[found.start :]
    assert [log for each in shown for log in each.logprobs or ()] == token_ids[found.start :]


def test_special_tokens_in_prompts_stay_text_or_are_refused(path: Path) -> None:
    prompts, tokenizer = prompts_of(path)
    options = TranscriptionOptions(prompt="names <|audio_pad|>")
    item = EncoderInput(0, 3, bytes(32), 3, b"")
    token_ids, [placed] = prompts.for_window(
        options, "en", [item], seconds=1.0, has_timestamps=False
    )
    mark = tokenizer.token_to_id("<|audio_pad|>")
    assert [i for i, token in enumerate(token_ids) if token == mark] == [
        placed.position + i for i in range(3)
    ]
    text = tokenizer.decode(token_ids)
    assert text.startswith("system:names <|audio_pad|> user:")
    assert text.endswith("language English<asr_text>")
    refusing, _ = prompts_of(path, "refuse")
    with pytest.raises(ParameterError, match="must not contain the special token") as raised:
        refusing.for_window(options, "", [item], seconds=1.0, has_timestamps=False)
    assert raised.value.param == "prompt"


@pytest.mark.parametrize(
    ("kind", "task", "language", "expected"),
    [
        ("gemma3n", "transcribe", "", "Transcribe this audio: CLIP"),
        ("gemma3n", "transcribe", "fr", "Transcribe this audio into French: CLIP"),
        ("gemma3n", "translate", "", "Translate this audio into English: CLIP"),
        ("audioflamingo3", "transcribe", "", "Transcribe the input speech.CLIP"),
        ("gemma4", "transcribe", "de", "CLIPTranscribe the following speech segment in German"),
    ],
)
def test_instructions_have_the_clip_and_the_language_where_models_expect_them(
    tmp_path: Path, kind: str, task: str, language: str, expected: str
) -> None:
    path, _ = audio_directory(tmp_path, kind)
    source = json.loads((path / "tokenizer_config.json").read_text()).get("chat_template")
    source = source or (path / "chat_template.jinja").read_text()
    prompts, tokenizer = prompts_of(path, source=source)
    item = EncoderInput(0, 189, bytes(32), 189, b"")
    options = TranscriptionOptions(task=Task(task))
    token_ids, [placed] = prompts.for_window(
        options, language, [item], seconds=1.0, has_timestamps=False
    )
    clip = {
        "gemma3n": f"\n\n<start_of_audio>{'<audio_soft_token>' * 188}<end_of_audio>\n\n",
        "gemma4": f"<|audio>{'<|audio|>' * 189}<audio|>",
        "audioflamingo3": f"<|start|>{'<sound>' * 189}",
    }[kind]
    text = tokenizer.decode(token_ids)
    assert text.startswith("user: " + expected.replace("CLIP", clip))
    assert token_ids[placed.position - 1] == tokenizer.token_to_id(clip.strip().split(">")[0] + ">")


def test_context_and_language_are_parts_for_templates_that_have_the_instruction(
    tmp_path: Path,
) -> None:
    path, _ = audio_directory(tmp_path, "moss_transcribe_diarize")
    source = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'audio' %}<|audio_pad|>"
        "{% elif p.type == 'keywords' %}{{ p.keywords | join('+') }}{% else %}{{ p.text }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    prompts, tokenizer = prompts_of(path, source=source)
    options = TranscriptionOptions(keywords=("quick", "<|audio_pad|>"))
    items = [EncoderInput(0, size, bytes(32), size, b"") for size in (25, 14)]
    token_ids, placed = prompts.for_window(options, "", items, seconds=1.0, has_timestamps=False)
    text = tokenizer.decode(token_ids)
    # A time follows every 12 embeddings, and the second window begins right after the 24th and one more.
    part = "<|audio_pad|>" * 12
    assert (
        text.replace(" ", "")
        == f"{part}1{part}2{part}3<|audio_pad|><|audio_pad|><|audio_pad|>quick+<|audio_pad|>"
    )
    kept = [np.frombuffer(item.kept, "<i4").tolist() for item in placed]
    mark = tokenizer.token_to_id("<|audio_pad|>")
    for item, own in zip(placed, kept, strict=True):
        tokens = token_ids[item.position : item.position + item.num_tokens]
        assert len(own) + item.size == item.num_tokens
        assert [index for index, token in enumerate(tokens) if token != mark] == own
    refusing, _ = prompts_of(path, "refuse", source)
    with pytest.raises(ParameterError, match="must not contain the special token") as raised:
        refusing.for_window(options, "", items, seconds=1.0, has_timestamps=False)
    assert raised.value.param == "keywords[1]"
