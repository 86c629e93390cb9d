"""A forced aligner classifies the tokens after the words of an audio clip by their times."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import transformers
from support.audio.checkpoints import PARTS, audio_directory, reference_inputs, reference_logits
from support.servers.server import Server

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("kind", ["qwen3_asr aligner", "qwen3_asr thinker aligner"])
def test_a_forced_aligner_finds_the_times_of_words(tmp_path: Path, kind: str) -> None:
    path, model = audio_directory(tmp_path, kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    start, mark, end = PARTS[kind]
    step = tokenizer.convert_tokens_to_ids("<asr_text>")
    samples = np.random.default_rng(4).integers(-9000, 9000, 11_200, np.int16)
    clip = samples / np.float32(32768)
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV")
    data = base64.b64encode(file.getvalue()).decode()
    words = "tea<asr_text><asr_text>wizards<asr_text><asr_text>"
    content = [
        {"type": "text", "text": f"{start}{mark}{end}{words}"},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
    ]
    config = json.dumps({"tok_pooling_type": "STEP", "step_tag_id": step, "use_activation": False})
    flags = ("--pooler-config", config, "--trust-request-chat-template", "--dtype", "float32")
    with Server(str(path), *flags) as server:
        body = {
            "messages": [{"role": "user", "content": content}],
            "chat_template": "{{ messages[0]['content'] }}",
            "task": "token_classify",
        }
        status, answer = server.post("/pooling", body)
    assert status == 200, answer
    found = np.array(answer["data"][0]["data"], np.float32)
    count = int(reference_inputs(kind, [clip])["input_features_mask"].sum()) // 8 + 1
    text = f"{start}{mark * count}{end}{words}"
    prompt = tokenizer.encode(text)
    expected = reference_logits(kind, model, prompt, [clip])
    np.testing.assert_allclose(found, expected[np.array(prompt) == step], atol=1e-4)
