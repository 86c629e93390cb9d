"""Servers of small random SeamlessM4T models: their texts are those of transformers."""

from __future__ import annotations

import concurrent.futures
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
import torch
import transformers
from support.checkpoints.source import write_letters
from support.servers.server import DEVICE, Server, assert_nothing_is_held

torch.set_num_threads(1)

FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
_LANGUAGES = {"eng": "__eng__", "deu": "__deu__"}
_SIZES = {
    "hidden_size": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 80,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 64,
    "feature_projection_input_dim": 32,
    "conv_depthwise_kernel_size": 5,
    "left_max_position_embeddings": 6,
    "right_max_position_embeddings": 2,
    "t2u_encoder_layers": 1,
    "t2u_decoder_layers": 1,
    "max_position_embeddings": 64,
}


def _directory(path: Path, version: str) -> Any:
    """Write a SeamlessM4T with a tokenizer, and return transformers' model."""
    ids = write_letters(path, ("<pad>", "<unk>", "</s>", *_LANGUAGES.values()), "</s>")
    model_class = getattr(transformers, f"SeamlessM4T{version}ForSpeechToText")
    torch.manual_seed(1 if version else 4)
    config = model_class.config_class(
        **_SIZES,
        vocab_size=32,
        tie_word_embeddings=False,
        pad_token_id=ids["<pad>"],
        eos_token_id=ids["</s>"],
        decoder_start_token_id=ids["</s>"],
    )
    model = model_class(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    # The positions, which are not stored, are large beside small embeddings.
    model.shared.weight.data *= 0.3
    generation = model.generation_config
    codes = {name: ids[token] for name, token in _LANGUAGES.items()}
    generation.text_decoder_lang_to_code_id = codes
    generation.decoder_start_token_id = generation.eos_token_id = ids["</s>"]
    generation.pad_token_id = ids["<pad>"]
    model.save_pretrained(path)
    transformers.SeamlessM4TFeatureExtractor(feature_size=16, num_mel_bins=16).save_pretrained(path)
    return model


def _clip(seed: int, seconds: float) -> tuple[np.ndarray, tuple[str, bytes]]:
    noise = np.random.default_rng(seed).standard_normal(int(16_000 * seconds))
    samples = (0.1 * noise).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV", subtype="FLOAT")
    return samples, ("sound.wav", file.getvalue())


@pytest.mark.parametrize("version", ["v2", ""])
def test_texts_equal_those_of_transformers(tmp_path: Path, version: str) -> None:
    """The prompt names the language of the text, which is English in translations."""
    model = _directory(tmp_path, version)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    extractor = transformers.SeamlessM4TFeatureExtractor.from_pretrained(tmp_path)

    def text_of(samples: np.ndarray, language: str) -> str:
        features = extractor(samples, sampling_rate=16_000, return_tensors="pt")
        with torch.inference_mode():
            found = model.generate(
                **features, tgt_lang=language, num_beams=1, do_sample=False, max_new_tokens=10
            )
        # The first two tokens are the prompt.
        end, ids = model.config.eos_token_id, found[0].tolist()[2:]
        return str(tokenizer.decode([*ids, end][: [*ids, end].index(end)])).strip()

    clips = [_clip(seed, seconds) for seed, seconds in enumerate((1.0, 2.7, 0.3, 4.2))]
    # Longer texts repeat themselves, and would be decoded again.
    flags = ("-tp", "2", "--inject-preemption", "0.1", "--max-model-len", "12")
    with Server(str(tmp_path), *FLAGS, *flags) as server:
        audio = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
        ).audio

        def ask(index: int) -> None:
            samples, file = clips[index]
            *_, done = audio.transcriptions.create(
                model="tiny", file=file, language="de", stream=True
            )
            assert done.text == text_of(samples, "deu") != ""

        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(ask, [*range(len(clips))] * 2))
        samples, file = clips[1]
        answer = httpx.post(
            f"{server.url}/v1/audio/translations",
            data={"model": "tiny", "language": "de", "stream": "true"},
            files={"file": file},
            timeout=60,
        )
        *_, event = (x for x in answer.text.splitlines() if x.startswith("data: {"))
        assert json.loads(event[6:])["text"] == text_of(samples, "eng") != text_of(samples, "deu")
        for fields, named in (
            ({}, "is required, because this model does not detect it"),
            ({"language": "fr"}, r"must be one of the model's languages \(de, en\)"),
            ({"language": "de", "prompt": "names"}, "accepts only audio"),
        ):
            with pytest.raises(openai.BadRequestError, match=named):
                audio.transcriptions.create(model="tiny", file=file, **fields)
        assert_nothing_is_held(server)
