"""Servers of a small random model of Kyutai that transcribes: its texts are those of transformers."""

from __future__ import annotations

import concurrent.futures
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
import transformers
from support.checkpoints.source import write_letters
from support.requests import realtime
from support.servers.server import DEVICE, Server, assert_nothing_is_held

torch.set_num_threads(1)

FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
_RATE, _CODEBOOKS, _CODES = 24_000, 4, 16
_CODEC = {
    "model_type": "mimi",
    "num_filters": 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "codebook_size": _CODES,
    "codebook_dim": 12,
    "vector_quantization_hidden_dimension": 12,
    "num_quantizers": _CODEBOOKS,
    "sliding_window": 10,
    "upsample_groups": 32,
}
_SILENCE = {"audio_silence_prefix_seconds": 0.3, "audio_delay_seconds": 0.5}


def _directory(path: Path, *, begins_with_text: bool) -> Any:
    """Write a model with a tokenizer, and return transformers' model. Its first token may be one of a codebook."""
    ids = write_letters(path, ("<pad>", "<s>"), "<pad>")
    vocab_size = 1 + max(ids.values())
    # A text ends with its clip, and no token ends it.
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = transformers.KyutaiSpeechToTextConfig(
        vocab_size=vocab_size,
        codebook_vocab_size=_CODES + 1,
        num_codebooks=_CODEBOOKS,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=96,
        max_position_embeddings=128,
        sliding_window=20,
        audio_bos_token_id=_CODES,
        audio_pad_token_id=vocab_size + _CODEBOOKS * (_CODES + 1),
        bos_token_id=ids["<s>"] if begins_with_text else vocab_size + 20,
        pad_token_id=ids["<pad>"],
        codec_config=_CODEC,
    )
    torch.manual_seed(0)
    model = transformers.KyutaiSpeechToTextForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, 0, 0.25)
    for name, buffer in model.named_buffers():
        if name.endswith("embed_sum"):
            torch.nn.init.normal_(buffer, 0, 8)
        elif name.endswith("cluster_usage"):
            torch.nn.init.uniform_(buffer, 0.5, 2)
    model.save_pretrained(path)
    extractor = transformers.KyutaiSpeechToTextFeatureExtractor(sampling_rate=_RATE, **_SILENCE)
    extractor.save_pretrained(path)
    return model


def _clip(seed: int, seconds: float) -> tuple[np.ndarray, tuple[str, bytes]]:
    noise = np.random.default_rng(seed).standard_normal(int(_RATE * seconds))
    samples = (0.1 * noise).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, _RATE, format="WAV", subtype="FLOAT")
    return samples, ("sound.wav", file.getvalue())


@pytest.mark.parametrize("begins_with_text", [True, False])
def test_texts_equal_those_of_transformers(tmp_path: Path, begins_with_text: bool) -> None:
    """A clip of several parts ends with the silence that the delay of the text needs."""
    model = _directory(tmp_path, begins_with_text=begins_with_text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    extractor = transformers.KyutaiSpeechToTextFeatureExtractor.from_pretrained(tmp_path)

    def text_of(samples: np.ndarray) -> str:
        inputs = extractor(samples, sampling_rate=_RATE, return_tensors="pt")
        with torch.inference_mode():
            (found,) = model.generate(input_values=inputs["input_values"], do_sample=False)
        return str(tokenizer.decode(found, skip_special_tokens=True)).strip()

    clips = [_clip(seed, seconds) for seed, seconds in enumerate((1.0, 2.77, 0.02, 4.2))]
    expected = [text_of(samples) for samples, _ in clips]
    assert len({text[:10] for text in expected}) == len(clips)
    flags = ("-tp", "2", "--inject-preemption", "0.1", "--max-num-batched-tokens", "24")
    with Server(str(tmp_path), *FLAGS, *flags, "--max-num-seqs", "4") as server:
        audio = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
        ).audio

        def ask(index: int) -> None:
            *_, done = audio.transcriptions.create(model="tiny", file=clips[index][1], stream=True)
            assert done.text == expected[index] != ""

        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(ask, [*range(len(clips))] * 2))
        # Live speech has another rate, and the same text as a file of it.
        live = clips[1][0][::3]
        *_, done = audio.transcriptions.create(
            model="tiny", file=realtime.to_file(live), stream=True
        )
        assert realtime.transcribe(server.url, live) == done.text != ""
        with pytest.raises(openai.BadRequestError, match="detects the language itself"):
            audio.transcriptions.create(model="tiny", file=clips[0][1], language="fr")
        assert_nothing_is_held(server)


def test_a_codec_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    _directory(tmp_path, begins_with_text=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["codec_config"]["use_causal_conv"] = False
    path.write_text(json.dumps(config))
    with pytest.raises(AssertionError, match=r"use_causal_conv must be true"):
        Server(str(tmp_path), *FLAGS)
