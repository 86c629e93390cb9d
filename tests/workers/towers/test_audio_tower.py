"""Models that read audio clips give the logits of transformers."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine.frontend.client.executor import ThreadExecutor
from engine.frontend.media.audio.added_clip import AddedClip
from engine.frontend.media.audio.clips import prepare_clip
from engine.frontend.media.chat_audio import ChatAudio
from engine.frontend.model_source.chat_audio import read_chat_audio
from engine.frontend.tokenizer.load import load_tokenizer
from engine.frontend.tokenizer.tokenizer import Tokenizer
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.field_names import text_section
from engine.protocol.checkpoint.files import read_model_config
from engine.protocol.checkpoint.speech import read_audio_processor
from engine.protocol.config.frontend import FrontendConfig
from engine.protocol.encoder_inputs.payloads import AudioPayload
from engine.protocol.errors import CheckpointError, EngineError, ParameterError
from engine.workers.execution.inputs.clip_parts import ClipParts
from engine.workers.execution.inputs.encoders import output_rows
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.models.families import model_spec
from engine.workers.towers.audio_tower import AudioTower
from engine.workers.towers.image_tower import TowerSource
from engine.workers.towers.placed import Placed
from support.audio.checkpoints import MARKS, MODELS, audio_directory, reference_logits
from support.checkpoints.source import realtime_directory, realtime_features
from support.workers.decoders import CPU, TOWER_LAYERS, Runner, load_decoder, load_native_decoder

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=MODELS)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param, *audio_directory(tmp_path_factory.mktemp("model"), request.param)


def tone(seed: int, seconds: float) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (0.3 * random.standard_normal(int(16_000 * seconds))).astype(np.float32)


def chat_audio(path: Path, executor: ThreadExecutor) -> tuple[ChatAudio, Tokenizer]:
    """Return what a frontend uses to put audio clips into prompts of this model."""
    tokenizer = load_tokenizer(str(path))
    config = read_model_config(path)
    text = text_section(config)
    assert text is not None
    clips = read_chat_audio(path, config, text)
    settings: Any = SimpleNamespace(
        model=SimpleNamespace(chat_audio=clips, max_model_len=1024),
        frontend=FrontendConfig(max_audio_s=60.0),
    )
    return ChatAudio(settings, tokenizer, executor), tokenizer


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_logits_equal_those_of_transformers(model: Any, load: Any) -> None:
    kind, path, reference = model
    # One clip is shorter than a window, one has an odd number of frames, others have several windows, and the last one
    # has a little more than one.
    more = (5.1, 2.0, 1.2345, 2.005)
    if kind == "musicflamingo":
        # Its class in transformers fails for the last one.
        more = more[:3]
    lengths = (0.7, 1.515, 2.0) if kind in ("qwen2_audio", "gemma3n") else (0.7, *more)
    clips = [tone(seed, seconds) for seed, seconds in enumerate(lengths)]
    executor = ThreadExecutor()
    places, tokenizer = chat_audio(path, executor)
    rate = 24_000 if kind == "vibevoice_asr" else 16_000
    found = [places.wrap((clip, rate), "audio") for clip in clips]
    prepared = asyncio.run(places.prepare(found))
    text = "the quick" + f"{MARKS[kind]} brown fox".join([""] + [""] * len(clips)) + " jumps"
    _, token_ids, inputs = places.encode(text, prepared, lambda t: (t, tokenizer.encode(t)))
    executor.close()
    prompt = list(token_ids)
    if kind == "moss_audio":
        # The tokenizer does not have these tokens.
        assert prompt[inputs[0].position - 1] == 5
        # A time may follow the last embedding.
        assert 6 in prompt[inputs[-1].position + inputs[-1].num_tokens :][:2]
    expected = reference_logits(kind, reference, prompt, clips)
    decoder = load(path, max_model_len=1024)
    tower = AudioTower(
        decoder.spec.audio_encoder,
        TowerSource(open_checkpoint(path), CPU, torch.float32, make_layers=TOWER_LAYERS[load]),
    )
    encoded = [tower.encode(item.data) for item in inputs]
    assert [len(each) for each in encoded] == [item.size for item in inputs]
    rows = np.full(len(prompt), -1, np.int32)
    row = 0
    for item in inputs:
        found_rows = output_rows(item, 0, item.num_tokens)
        rows[item.position : item.position + item.num_tokens] = np.where(
            found_rows < 0, -1, found_rows + row
        )
        row += item.size
    runner = Runner(decoder, 1, max_tokens=1024)
    outputs = []
    # The first chunk ends within the first clip.
    cuts = [0, inputs[0].position + 3, inputs[-1].position + 2, len(prompt)]
    for start, end in pairwise(cuts):
        decoder.placed = Placed(rows[start:end].copy(), torch.cat(encoded))
        if decoder.spec.score_head is None:
            outputs.append(runner.step({0: prompt[start:end]})[0])
        else:
            outputs.append(decoder.score_head(runner.hidden({0: prompt[start:end]})))
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-4, rtol=1e-4)


def test_damaged_audio_is_an_error(model: Any) -> None:
    _, path, _ = model
    spec = model_spec(open_checkpoint(path).config, path).audio_encoder
    tower = AudioTower(spec, TowerSource(open_checkpoint(path), CPU, torch.float32))
    features = bytes(4 * spec.num_mel_bins * 10)
    for clip in (
        AudioPayload(spec.num_mel_bins, 11, features),
        AudioPayload(spec.num_mel_bins + 1, 10, features),
        AudioPayload(spec.num_mel_bins, 40_000, features * 4000),
    ):
        with pytest.raises(EngineError, match="an audio clip has"):
            tower.encode(msgspec.msgpack.encode(clip))
    with pytest.raises(EngineError, match="is not an audio clip"):
        tower.encode(b"nothing")


def test_very_short_clips_are_read_or_refused(model: Any) -> None:
    _, path, _ = model
    config = read_model_config(path)
    text = text_section(config)
    assert text is not None
    clips = read_chat_audio(path, config, text)
    assert clips is not None
    for length in (0, 1, 150, 400):
        try:
            assert prepare_clip(np.ones(length, np.float32), clips, "audio").inputs
        except ParameterError as error:
            assert "is too short" in str(error)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("voxtral", "hop_length", 80),
        ("voxtral", "feature_size", 80),
        ("voxtral", "chunk_length", 30),
        ("qwen3_asr", "n_fft", 512),
        ("gemma3n", "max_frequency", 8000.0),
    ],
)
def test_other_features_are_refused(tmp_path: Path, kind: str, name: str, value: Any) -> None:
    path, _ = audio_directory(tmp_path, kind)
    file = path / "preprocessor_config.json"
    fields = json.loads(file.read_text()) | {name: value}
    file.unlink()
    # The newer of the two files has them in a section.
    (path / "processor_config.json").write_text(json.dumps({"feature_extractor": fields}))
    with pytest.raises(CheckpointError, match=f"{name} must be .*, got {value}"):
        chat_audio(path, ThreadExecutor())


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize("has_own_format", [False, True])
def test_outputs_of_a_growing_clip_are_added_to_all_tokens(
    tmp_path: Path, load: Any, has_own_format: bool
) -> None:
    path, reference = realtime_directory(tmp_path, has_own_format=has_own_format)
    config = read_model_config(path)
    audio = read_audio_processor(path, config, ConfigFields({}, path))
    assert audio is not None and audio.added is not None
    samples = tone(0, 2.34)
    clip, parts = AddedClip(audio, audio.added), []
    for piece in np.split(samples, [900, 900, 5000, 17_000, 17_300]):
        parts += clip.append(piece)
    parts += clip.finish()
    decoder = load(path, max_model_len=256)
    source = TowerSource(open_checkpoint(path), CPU, torch.float32)
    encoder = ClipParts(AudioTower(decoder.spec.audio_encoder, source))
    encoded = [encoder.encode(parts, index) for index in range(len(parts) - 1)]
    # Another clip with the same beginning takes the state of the encoder, which is computed again.
    encoder.remove_clip(parts)
    outputs = torch.cat((*encoded, encoder.encode(parts, len(parts) - 1)))
    features = realtime_features(samples)
    token_ids = torch.randint(0, 31, (len(outputs),)).tolist()
    expected = reference(torch.tensor([token_ids]), features, num_delay_tokens=6).logits[0]
    runner, found = Runner(decoder, 1, max_tokens=256), []
    for start, end in pairwise((0, 20, 57, *range(58, len(outputs) + 1))):
        rows = np.arange(end - start, dtype=np.int32)
        decoder.placed = Placed(rows, outputs[start:end], are_added=True)
        found.append(runner.step({0: token_ids[start:end]})[0])
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)
