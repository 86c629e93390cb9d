"""Read how an encoder-decoder model processes audio clips, from the files of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from ..config.audio.codec import CodecSpec
from ..config.audio.processor import AddedAudioConfig, AudioProcessorConfig, SpeechKind
from ..config.audio.tower import CausalSpec
from .audio.codecs import kyutai_fields
from .audio.fields import read_token
from .audio.processors import (
    bert_processor,
    canary_processor,
    cohere_processor,
    granite_processor,
    joined_processor,
    lasr_processor,
    parakeet_processor,
    samples_processor,
    seamless_processor,
    speecht5_processor,
)
from .audio.seamless import seamless_fields
from .audio.speech_encoders import streaming_spec
from .audio.token_writers import SAMPLES, WRITING, with_encoder_fields, writes_tokens
from .audio.tower import audio_tower_spec
from .audio.whisper_towers import CAUSAL_PART
from .config_fields import MAX_INTEGER, ConfigFields
from .pooling.foreign_encoders import find_foreign_encoder
from .source_text import (
    BART_FIELDS,
    SOURCE_TEXT,
    FieldNames,
    joined_fields,
    max_source_tokens,
    renamed_fields,
    with_source_text_fields,
)

_SPEECH: Final = frozenset(SpeechKind)
ADDED_KINDS: Final = frozenset({SpeechKind.VOXTRAL_REALTIME, SpeechKind.KYUTAI})
"""Kinds of models whose tokens have outputs of the encoder added."""

_CROSS_ATTENTION: Final = _SPEECH - ADDED_KINDS - WRITING
SEAMLESS: Final = (SpeechKind.SEAMLESS, SpeechKind.SEAMLESS_2)
_MOONSHINE_SECONDS: Final = 30.0
_MOONSHINE_TOKENS_PER_SECOND: Final = 6.5
"""Maximum output tokens per second of audio. Moonshine's authors set it to stop repetitions after short audio clips."""

_COHERE_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 16_384,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
    "max_position_embeddings": 1024,
    "eos_token_id": 3,
}

_REALTIME_TOKENS_BEFORE: Final = 32
_REALTIME_TOKENS_AFTER: Final = 10
"""The silence before a clip and after the delay of its text in mistral-common, in tokens of Voxtral Realtime."""

_REALTIME_SECONDS: Final = 600.0
"""The maximum length of a window of Voxtral Realtime. It bounds the size of a message with its features to 31 MB."""

_REALTIME_PAD: Final = "[STREAMING_PAD]"

_SPEECH_TO_TEXT_SECONDS: Final = 30.0
"""The maximum length of a window of Speech2Text. Its positions would reach four times as far."""

_Kernel = Annotated[int, msgspec.Meta(ge=1, le=1023)]
_Kernels = Annotated[tuple[_Kernel, ...], msgspec.Meta(min_length=1, max_length=8)]
_MAX_ALIGNMENT_HEADS: Final = 1024


def with_decoder_fields(fields: ConfigFields) -> ConfigFields:
    """Return the config of an encoder-decoder model, adding the decoder's fields under Llama's names.

    If the model is only an encoder, the encoder's fields are added. Configs of other models are returned unchanged.
    """
    if writes_tokens(fields):
        return with_encoder_fields(fields)
    if (foreign := find_foreign_encoder(fields)) is not None:
        return fields.with_values(foreign.read_fields(fields))
    kind = fields.text("model_type", "")
    if kind == SpeechKind.KYUTAI:
        return kyutai_fields(fields)
    if kind in SOURCE_TEXT:
        return with_source_text_fields(fields)
    if kind not in _CROSS_ATTENTION:
        return fields
    if kind == SpeechKind.COHERE:
        return fields.with_defaults(**_COHERE_DEFAULTS)
    if kind == SpeechKind.JOINED:
        return fields.with_values(joined_fields(fields))
    if kind in SEAMLESS:
        fields = seamless_fields(fields)
    if kind == SpeechKind.CANARY:
        decoder = fields.section("decoder_config")
        is_tied = fields.get("tie_word_embeddings", True)
        fields = fields.with_values({} if decoder is None else dict(decoder.config))
        fields = fields.with_values({"model_type": kind, "tie_word_embeddings": is_tied})
        return fields.with_defaults(**_COHERE_DEFAULTS)
    if kind == SpeechKind.MOONSHINE_STREAMING:
        return fields
    return fields.with_values(renamed_fields(fields, _DECODER_FIELDS.get(kind, BART_FIELDS)))


_DECODER_FIELDS: Final[dict[str, FieldNames]] = {
    "whisper": {**BART_FIELDS, "max_position_embeddings": ("max_target_positions",)},
    "speech_to_text": {**BART_FIELDS, "max_position_embeddings": ("max_target_positions",)},
    "speecht5": {
        "num_hidden_layers": ("decoder_layers",),
        "num_attention_heads": ("decoder_attention_heads",),
        "num_key_value_heads": ("decoder_attention_heads",),
        "intermediate_size": ("decoder_ffn_dim",),
        "max_position_embeddings": ("max_text_positions",),
    },
    "moonshine": {
        "num_hidden_layers": ("decoder_num_hidden_layers",),
        "num_attention_heads": ("decoder_num_attention_heads",),
        "num_key_value_heads": ("decoder_num_key_value_heads", "decoder_num_attention_heads"),
    },
}


def max_source_positions(fields: ConfigFields) -> int:
    """Return the maximum number of encoder outputs. Raise CheckpointError if a field is missing or invalid."""
    kind = fields.text("model_type")
    if kind in _SPEECH:
        return read_audio(ConfigFields({}, fields.path), fields).max_source_positions
    return max_source_tokens(fields)


def read_audio_processor(
    path: Path, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig | None:
    """Return the model's audio preprocessing, or None if it reads no audio clips.

    Args:
        path: The checkpoint.
        config: Its config.
        generation: Its generation config.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    if config.text("model_type", "") not in _SPEECH:
        return None
    processor = ConfigFields.read_if_present(path / "preprocessor_config.json")
    # transformers 5 stores all processors in one file.
    joined = ConfigFields.read_if_present(path / "processor_config.json")
    if not processor.config:
        # Mistral's own format has these settings in the config.
        processor = (joined if joined.config else config).first_section("feature_extractor")
    return read_audio(processor, config, generation)


def read_audio(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields | None = None
) -> AudioProcessorConfig:
    """Return a speech model's audio preprocessing, from the fields of its files."""
    kind = SpeechKind(config.text("model_type"))
    return _READERS[kind](processor, config, generation or ConfigFields({}, config.path))


def _whisper(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    num_mel_bins = config.integer("num_mel_bins", 80, maximum=1024)
    processor.require("feature_size", num_mel_bins, ", as num_mel_bins of the config")
    positions = config.integer("max_source_positions", 1500, maximum=1 << 16)
    # Frontends compute the features of no other audio clips and frames.
    rate, hop, frame = 16_000, 160, 400
    processor.require_all(sampling_rate=rate, hop_length=hop, n_fft=frame)
    seconds = 2 * positions * hop / rate
    no_timestamps = read_token(generation, "no_timestamps_token_id", -1, config)
    tasks = _tokens_by_name(generation, "task_to_id", config)
    return AudioProcessorConfig(
        kind=SpeechKind.WHISPER,
        num_mel_bins=num_mel_bins,
        sampling_rate=rate,
        hop_length=hop,
        chunk_seconds=seconds,
        strides=(1, 2),
        kernels=(3, 3),
        paddings=(1, 1),
        max_source_positions=positions,
        start_token_id=read_token(config, "decoder_start_token_id", 50257),
        language_token_ids={
            name.strip("<|>"): token
            for name, token in _tokens_by_name(generation, "lang_to_id", config).items()
        },
        transcribe_token_id=tasks.get("transcribe", -1),
        translate_token_id=tasks.get("translate", -1),
        no_timestamps_token_id=no_timestamps,
        # In every Whisper vocabulary, these two tokens precede that one.
        previous_token_id=read_token(
            generation, "prev_sot_token_id", max(no_timestamps - 2, -1), config
        ),
        no_speech_token_id=max(no_timestamps - 1, -1),
        time_precision=2 * hop / rate,
        max_initial_timestamp=read_token(generation, "max_initial_timestamp_index", -1),
        suppressed_token_ids=_suppressed(generation, config, "suppress_tokens"),
        begin_suppressed_token_ids=_suppressed(generation, config, "begin_suppress_tokens"),
        alignment_heads=_alignment_heads(generation),
    )


def _moonshine(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    rate = processor.integer("sampling_rate", 16_000, maximum=1 << 20)
    audio = AudioProcessorConfig(
        kind=SpeechKind.MOONSHINE,
        num_mel_bins=0,
        sampling_rate=rate,
        hop_length=1,
        chunk_seconds=_MOONSHINE_SECONDS,
        strides=(64, 3, 2),
        kernels=(127, 7, 3),
        paddings=(0, 0, 0),
        max_source_positions=0,
        start_token_id=read_token(generation, "decoder_start_token_id", 1, config),
        suppressed_token_ids=_suppressed(generation, config, "suppress_tokens"),
        begin_suppressed_token_ids=_suppressed(generation, config, "begin_suppress_tokens"),
        max_tokens_per_second=_MOONSHINE_TOKENS_PER_SECOND,
    )
    positions = audio.num_outputs(int(_MOONSHINE_SECONDS * rate))
    return msgspec.structs.replace(audio, max_source_positions=positions)


def _speech_to_text(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    audio = speech_to_text_stem(config)
    needed = {"sampling_rate": 16_000, "num_mel_bins": audio.num_mel_bins, "dither": 0.0}
    needed |= dict.fromkeys(("do_ceptral_normalize", "normalize_means", "normalize_vars"), True)
    processor.require_all(**needed)
    return msgspec.structs.replace(
        audio,
        start_token_id=read_token(generation, "decoder_start_token_id", 2, config),
        suppressed_token_ids=_suppressed(generation, config, "suppress_tokens"),
        begin_suppressed_token_ids=_suppressed(generation, config, "begin_suppress_tokens"),
    )


def speech_to_text_stem(config: ConfigFields) -> AudioProcessorConfig:
    """Return the frames and the convolutions of Speech2Text. Raise CheckpointError if a field is invalid."""
    config.require("input_channels", 1)
    kernels: tuple[int, ...] = (5, 5)
    needed = "1 to 8 numbers from 1 to 1023"
    kernels = config.convert("conv_kernel_sizes", kernels, _Kernels, needed)
    config.require("num_conv_layers", len(kernels))
    audio = AudioProcessorConfig(
        kind=SpeechKind.SPEECH_TO_TEXT,
        num_mel_bins=config.integer("input_feat_per_channel", 80, maximum=1024),
        sampling_rate=16_000,
        hop_length=160,
        frame_length=400,
        chunk_seconds=_SPEECH_TO_TEXT_SECONDS,
        strides=(2,) * len(kernels),
        kernels=kernels,
        paddings=tuple(kernel // 2 for kernel in kernels),
        max_source_positions=0,
        start_token_id=2,
    )
    positions = audio.num_outputs(int(_SPEECH_TO_TEXT_SECONDS * 100))
    return msgspec.structs.replace(audio, max_source_positions=positions)


def _moonshine_streaming(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    encoder = streaming_spec(config)
    # Incomplete frames count.
    strides, ones = (encoder.frame_size, 2, 2), (1, 1, 1)
    return msgspec.structs.replace(
        _moonshine(processor, config, generation),
        kind=SpeechKind.MOONSHINE_STREAMING,
        strides=strides,
        kernels=ones,
        paddings=(0, 0, 0),
        max_source_positions=encoder.num_outputs(encoder.num_frames),
    )


def _voxtral_realtime(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    text = config.section("text_config")
    spec = audio_tower_spec(config, 1 if text is None else text.integer("hidden_size", 3072))
    assert isinstance(spec, CausalSpec)
    rate, hop = 16_000, 160
    needed = {"sampling_rate": rate, "hop_length": hop, "n_fft": 400, "global_log_mel_max": 1.5}
    processor.require_all(**needed, feature_size=spec.num_mel_bins)
    num_prompt, size = _REALTIME_TOKENS_BEFORE + spec.delay, spec.frames_per_output * hop
    num_after = spec.delay + 1 + _REALTIME_TOKENS_AFTER
    return AudioProcessorConfig(
        kind=SpeechKind.VOXTRAL_REALTIME,
        num_mel_bins=spec.num_mel_bins,
        sampling_rate=rate,
        hop_length=hop,
        chunk_seconds=_REALTIME_SECONDS,
        strides=(spec.frames_per_output,),
        kernels=(1,),
        paddings=(0,),
        max_source_positions=CAUSAL_PART,
        start_token_id=0,
        prompt=("<s>", *(_REALTIME_PAD,) * num_prompt),
        added=AddedAudioConfig(
            samples_before=_REALTIME_TOKENS_BEFORE * size,
            # An output is filled.
            samples_after=num_after * size + size - 1,
            samples_per_output=size,
            outputs_per_part=CAUSAL_PART,
            marks=(_REALTIME_PAD, "[STREAMING_WORD]"),
        ),
    )


def _kyutai(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    spec = audio_tower_spec(config, config.integer("hidden_size", 2048))
    assert isinstance(spec, CodecSpec)
    rate = config.required_section("codec_config").integer("sampling_rate", 24_000)
    processor.require_all(sampling_rate=rate, feature_size=1, chunk_length_s=None)
    before, delay = (
        processor.number(f"audio_{name}_seconds", 0.0) for name in ("silence_prefix", "delay")
    )
    size = spec.frames_per_output
    return AudioProcessorConfig(
        kind=SpeechKind.KYUTAI,
        num_mel_bins=0,
        sampling_rate=rate,
        hop_length=1,
        chunk_seconds=_REALTIME_SECONDS,
        strides=(size,),
        kernels=(1,),
        paddings=(0,),
        max_source_positions=CAUSAL_PART,
        start_token_id=spec.prompt_token,
        added=AddedAudioConfig(
            samples_before=int(before * rate),
            # The last output is that of the last token, which nothing reads.
            samples_after=int((delay + 1.0) * rate) + size,
            samples_per_output=size,
            outputs_per_part=CAUSAL_PART,
            marks=(),
        ),
    )


_READERS: Final = {
    SpeechKind.WHISPER: _whisper,
    SpeechKind.MOONSHINE: _moonshine,
    SpeechKind.SPEECH_TO_TEXT: _speech_to_text,
    SpeechKind.MOONSHINE_STREAMING: _moonshine_streaming,
    SpeechKind.COHERE: cohere_processor,
    SpeechKind.CANARY: lambda processor, config, generation: canary_processor(
        processor, with_decoder_fields(config), generation
    ),
    SpeechKind.VOXTRAL_REALTIME: _voxtral_realtime,
    SpeechKind.KYUTAI: _kyutai,
    **dict.fromkeys(WRITING, parakeet_processor),
    SpeechKind.GRANITE_CTC: granite_processor,
    SpeechKind.WAV2VEC2_BERT: bert_processor,
    SpeechKind.JOINED: joined_processor,
    SpeechKind.SEAMLESS: seamless_processor,
    SpeechKind.SEAMLESS_2: seamless_processor,
    SpeechKind.SPEECHT5: speecht5_processor,
    SpeechKind.LASR_CTC: lasr_processor,
    **dict.fromkeys(SAMPLES, samples_processor),
}


def _tokens_by_name(fields: ConfigFields, name: str, config: ConfigFields) -> dict[str, int]:
    section = fields.section(name)
    if section is None:
        return {}
    vocab_size = config.integer("vocab_size", 51_865)
    return {
        key: section.integer(key, minimum=0, maximum=vocab_size - 1)
        for key in section.config
        if section.get(key) is not None
    }


def _suppressed(generation: ConfigFields, config: ConfigFields, name: str) -> tuple[int, ...]:
    """Return the suppressed tokens that exist in the vocabulary."""
    fields = generation if generation.get(name) is not None else config
    vocab_size = config.integer("vocab_size", MAX_INTEGER)
    return tuple(token for token in fields.token_ids(name) if 0 <= token < vocab_size)


def _alignment_heads(generation: ConfigFields) -> tuple[tuple[int, int], ...]:
    found = generation.get("alignment_heads", [])
    if (
        not isinstance(found, list | tuple)
        or len(found) > _MAX_ALIGNMENT_HEADS
        or not all(_is_pair(each) for each in found)
    ):
        raise generation.wrong("alignment_heads", "a list of [layer, head]", found)
    return tuple((layer, head) for layer, head in found)


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(number) is int and 0 <= number <= MAX_INTEGER for number in value)
    )
