"""Read how models whose encoders read clips without padding process audio clips, from the files of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from ...config.audio.conformer_layers import CtcConformerSpec
from ...config.audio.processor import AudioProcessorConfig, SpeechKind
from ...config.audio.samples import SamplesSpec
from ...config.audio.tower import FastConformerSpec
from ..config_fields import ConfigFields
from .ctc_conformers import bert_spec, lasr_spec
from .fields import read_token
from .seamless import seamless_languages, seamless_spec
from .speech_encoders import canary_encoder_spec, fast_conformer_spec
from .token_writers import (
    GRANITE_STACKED,
    WriterSpec,
    granite_spec,
    joined_spec,
    parakeet_spec,
    samples_spec,
    speecht5_spec,
    with_encoder_fields,
)

_SECONDS: Final = 30.0
"""The maximum length of a window, up to which Cohere Transcribe's processor does not split a clip; also of others."""

_COHERE_PROMPT: Final = (
    *("▁", "<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>"),
    *("<|{language}|>", "<|{language}|>"),
    *("<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>"),
)
_COHERE_LANGUAGES: Final = (
    *("ar", "de", "el", "en", "es", "fr", "it"),
    *("ja", "ko", "nl", "pl", "pt", "vi", "zh"),
)
_CANARY_PROMPT: Final = (
    *("<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>"),
    *("<|{language}|>", "<|{target}|>"),
    *("<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>"),
)
_CANARY_LANGUAGES: Final = (
    *("bg", "cs", "da", "de", "el", "en", "es", "et", "fi", "fr", "hr", "hu", "it"),
    *("lt", "lv", "mt", "nl", "pl", "pt", "ro", "ru", "sk", "sl", "sv", "uk"),
)


def canary_processor(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    """Return the audio preprocessing of Canary."""
    common = _prompted(processor, canary_encoder_spec(config), generation, config)
    return msgspec.structs.replace(
        common, kind=SpeechKind.CANARY, prompt=_CANARY_PROMPT, languages=_CANARY_LANGUAGES
    )


def cohere_processor(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    """Return the audio preprocessing of Cohere Transcribe."""
    common = _prompted(processor, fast_conformer_spec(config), generation, config)
    return msgspec.structs.replace(common, prompt=_COHERE_PROMPT, languages=_COHERE_LANGUAGES)


def _prompted(
    processor: ConfigFields,
    encoder: FastConformerSpec,
    generation: ConfigFields,
    config: ConfigFields,
) -> AudioProcessorConfig:
    start = read_token(generation, "decoder_start_token_id", 4, config)
    return msgspec.structs.replace(_common(processor, encoder), start_token_id=start)


def parakeet_processor(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    """Return the audio preprocessing of Parakeet."""
    return msgspec.structs.replace(
        _common(processor, parakeet_spec(config)),
        kind=SpeechKind(config.text("model_type")),
        writes_tokens=True,
    )


def granite_processor(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    """Return the audio preprocessing of Granite Speech 5."""
    needed = {"sampling_rate": 16_000, "hop_length": 160, "n_fft": 512, "win_length": 400}
    processor.require_all(**(needed | {"delta_win_length": 3, "logmel_floor_db": 8.0}))
    encoder = granite_spec(config)
    processor.require("num_mel_bins", encoder.num_mel_bins // GRANITE_STACKED, default=80)
    # A row has two frames.
    convolutions = [(2, 2, 0)] * len(encoder.halving_layers)
    return msgspec.structs.replace(
        _unpadded(SpeechKind.GRANITE_CTC, encoder, 320, convolutions), writes_tokens=True
    )


def samples_processor(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    """Return the audio preprocessing of OmniASR, or of wav2vec 2.0."""
    kind = SpeechKind(config.text("model_type"))
    audio = _samples_processor(processor, kind, samples_spec(config))
    return msgspec.structs.replace(audio, writes_tokens=True)


def speecht5_processor(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    """Return the audio preprocessing of SpeechT5, which standardizes samples only if its files say so."""
    processor = processor.with_defaults(do_normalize=False)
    return msgspec.structs.replace(
        _samples_processor(processor, SpeechKind.SPEECHT5, speecht5_spec(config)),
        start_token_id=read_token(generation, "decoder_start_token_id", 2, config),
    )


def joined_processor(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    """Return the audio preprocessing of an encoder of speech that is joined to a decoder of texts."""
    encoder = joined_spec(config)
    if isinstance(encoder, CtcConformerSpec):
        audio = _bert_processor(processor, encoder)
    else:
        audio = _samples_processor(processor, SpeechKind.JOINED, encoder)
    decoder = config.required_section("decoder")

    def token(name: str, default: int) -> int:
        default = read_token(config, name, default, decoder)
        return read_token(generation, name, default)

    return msgspec.structs.replace(
        audio,
        writes_tokens=False,
        start_token_id=token("decoder_start_token_id", token("bos_token_id", 0)),
        forced_token_id=token("forced_bos_token_id", -1),
    )


def _samples_processor(
    processor: ConfigFields, kind: SpeechKind, encoder: SamplesSpec
) -> AudioProcessorConfig:
    processor.require("sampling_rate", 16_000, default=16_000)
    variance_term = 1e-5 if kind is SpeechKind.OMNIASR_CTC else 1e-7
    convolutions = [(size, stride, 0) for _, size, stride in encoder.convolutions]
    if (last := encoder.last_convolutions) is not None:
        convolutions += [(last.kernel_size, last.stride, last.padding)] * last.count
    return msgspec.structs.replace(
        _unpadded(kind, encoder, 1, convolutions),
        variance_term=variance_term * processor.boolean("do_normalize", True),
    )


def bert_processor(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    """Return the audio preprocessing of Wav2Vec2-BERT."""
    return _bert_processor(processor, bert_spec(with_encoder_fields(config)))


def _bert_processor(processor: ConfigFields, encoder: CtcConformerSpec) -> AudioProcessorConfig:
    needed = {"sampling_rate": 16_000, "stride": 2, "num_mel_bins": encoder.num_mel_bins // 2}
    # A row has two frames.
    return _conformer_processor(SpeechKind.WAV2VEC2_BERT, processor, encoder, needed, (320, 560))


def seamless_processor(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    """Return the audio preprocessing of SeamlessM4T, whose features are those of Wav2Vec2-BERT."""
    encoder = seamless_spec(config)
    needed = {"sampling_rate": 16_000, "stride": 2, "num_mel_bins": encoder.num_mel_bins // 2}
    kind = SpeechKind(config.text("model_type"))
    audio = _conformer_processor(kind, processor, encoder, needed, (320, 560))
    # The generation config is absent when only the encoder's sizes are read.
    languages = seamless_languages(generation) if generation.config else {}
    return msgspec.structs.replace(
        audio,
        writes_tokens=False,
        start_token_id=read_token(generation, "decoder_start_token_id", 3, config),
        language_token_ids=languages,
        languages=tuple(languages),
    )


def lasr_processor(
    processor: ConfigFields, config: ConfigFields, generation: ConfigFields
) -> AudioProcessorConfig:
    """Return the audio preprocessing of MedASR."""
    encoder = lasr_spec(with_encoder_fields(config))
    needed = {"sampling_rate": 16_000, "hop_length": 160, "n_fft": 512, "win_length": 400}
    needed["feature_size"] = encoder.num_mel_bins
    return _conformer_processor(SpeechKind.LASR_CTC, processor, encoder, needed, (160, 400))


def _conformer_processor(
    kind: SpeechKind,
    processor: ConfigFields,
    encoder: CtcConformerSpec,
    needed: dict[str, int],
    frames: tuple[int, int],
) -> AudioProcessorConfig:
    """Return the preprocessing with the distance and the length of `frames`, if fields have the `needed` values."""
    processor.require_all(**needed)
    hop_length, frame_length = frames
    return msgspec.structs.replace(
        _unpadded(kind, encoder, hop_length, encoder.convolutions),
        frame_length=frame_length,
        writes_tokens=True,
    )


def _common(processor: ConfigFields, encoder: FastConformerSpec) -> AudioProcessorConfig:
    processor.require_all(
        sampling_rate=16_000,
        hop_length=160,
        n_fft=512,
        feature_size=encoder.num_mel_bins,
        win_length=400,
        preemphasis=0.97,
    )
    return _unpadded(SpeechKind.COHERE, encoder, 160, [(3, 2, 1)] * encoder.num_halvings)


def _unpadded(
    kind: SpeechKind,
    encoder: WriterSpec,
    hop_length: int,
    convolutions: Sequence[tuple[int, int, int]],
) -> AudioProcessorConfig:
    """Return the preprocessing for an encoder whose `convolutions` have these kernels, strides and paddings."""
    return AudioProcessorConfig(
        kind=kind,
        num_mel_bins=encoder.num_mel_bins,
        sampling_rate=16_000,
        hop_length=hop_length,
        chunk_seconds=_SECONDS,
        strides=tuple(stride for _, stride, _ in convolutions),
        kernels=tuple(kernel for kernel, _, _ in convolutions),
        paddings=tuple(padding for _, _, padding in convolutions),
        max_source_positions=encoder.num_outputs(encoder.num_frames),
        start_token_id=0,
    )
