import json
from pathlib import Path

import pytest
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.source_text import read_source_text
from engine.protocol.checkpoint.speech import read_audio_processor, with_decoder_fields
from engine.protocol.errors import CheckpointError

WHISPER = {"model_type": "whisper", "vocab_size": 51865, "decoder_start_token_id": 50258}
GENERATION = {
    "no_timestamps_token_id": 50363,
    "lang_to_id": {"<|en|>": 50259, "<|de|>": 50261},
    "task_to_id": {"transcribe": 50359, "translate": 50358},
    "suppress_tokens": [1, 2, 60_000],
    "begin_suppress_tokens": [220, 50257],
    "alignment_heads": [[1, 0], [2, 5]],
    "max_initial_timestamp_index": 50,
}


def fields(values: dict[str, object]) -> ConfigFields:
    return ConfigFields(values, "config.json")


def test_whisper_processor_and_special_tokens_are_read(tmp_path: Path) -> None:
    audio = read_audio_processor(tmp_path, fields(WHISPER), fields(GENERATION))
    assert audio is not None
    assert (audio.num_mel_bins, audio.hop_length) == (80, 160)
    assert (audio.chunk_seconds, audio.sampling_rate) == (30.0, 16_000)
    assert audio.num_outputs(3000) == audio.max_source_positions == 1500
    assert audio.language_token_ids == {"en": 50259, "de": 50261}
    assert (audio.transcribe_token_id, audio.translate_token_id) == (50359, 50358)
    assert (audio.previous_token_id, audio.no_speech_token_id) == (50361, 50362)
    assert (audio.suppressed_token_ids, audio.begin_suppressed_token_ids) == ((1, 2), (220, 50257))
    assert (audio.alignment_heads, audio.max_initial_timestamp) == (((1, 0), (2, 5)), 50)


def test_moonshine_reads_samples(tmp_path: Path) -> None:
    audio = read_audio_processor(tmp_path, fields({"model_type": "moonshine"}), fields({}))
    assert audio is not None
    assert (audio.num_mel_bins, audio.start_token_id) == (0, 1)
    assert audio.num_outputs(16_000) == 40
    assert audio.num_outputs(100) == 0
    assert audio.max_source_positions == audio.num_outputs(480_000)


def test_decoders_of_text_start_with_the_target_language(tmp_path: Path) -> None:
    config = fields({"model_type": "mbart", "decoder_start_token_id": 2, "vocab_size": 100})
    source = read_source_text(config, fields({"forced_bos_token_id": 77}))
    assert source is not None
    assert (source.start_token_ids, source.max_tokens) == ((2, 77), 1024)
    assert read_source_text(fields({"model_type": "llama"}), fields({})) is None
    t5 = with_decoder_fields(fields({"model_type": "t5", "d_model": 8, "num_layers": 3}))
    assert (t5.integer("hidden_size"), t5.integer("num_hidden_layers")) == (8, 3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"alignment_heads": [[1]]}, "alignment_heads"),
        ({"lang_to_id": {"<|en|>": 60_000}}, "lang_to_id"),
        ({"suppress_tokens": "all"}, "suppress_tokens"),
    ],
)
def test_invalid_generation_config_field_is_named(
    tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(CheckpointError, match=field):
        read_audio_processor(tmp_path, fields(WHISPER), fields(GENERATION | changes))


@pytest.mark.parametrize("field", ["sampling_rate", "hop_length", "n_fft"])
def test_features_that_no_frontend_computes_are_refused(tmp_path: Path, field: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({field: 512}))
    with pytest.raises(CheckpointError, match=field):
        read_audio_processor(tmp_path, fields(WHISPER), fields(GENERATION))
