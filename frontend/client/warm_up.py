"""The first request of a frontend, which shows that every process and socket works."""

from __future__ import annotations

import msgspec
import numpy as np

from ...protocol.config import ModelConfig
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.encoder_inputs.payloads import AudioPayload
from ...protocol.sampling_params import SamplingParams
from .encoder_inputs import encoder_source, text_source
from .sequence_io import SequenceRequest


def warm_up_request(model: ModelConfig) -> SequenceRequest:
    """Return a request for one token or one pooled vector, which any model can compute."""
    prompt: tuple[int, ...] = (0,)
    inputs: list[EncoderInput] = []
    if (audio := model.audio) is not None and audio.added is not None:
        num_frames = audio.strides[0]
        silence = bytes(4 * num_frames * max(audio.num_mel_bins, 1))
        item = encoder_source(AudioPayload(audio.num_mel_bins, num_frames, silence), 1)
        inputs.append(msgspec.structs.replace(item, num_tokens=1))
    elif audio is not None:
        num_samples = int(audio.chunk_seconds * audio.sampling_rate)
        num_frames = num_samples // audio.hop_length if audio.num_mel_bins else audio.sampling_rate
        silence = bytes(4 * num_frames * max(audio.num_mel_bins, 1))
        payload = AudioPayload(audio.num_mel_bins, num_frames, silence)
        inputs.append(encoder_source(payload, audio.num_outputs(num_frames)))
        prompt = (audio.start_token_id,)
    elif (source := model.source_text) is not None:
        inputs.append(text_source(np.zeros(1, np.int32)))
        prompt = source.start_token_ids
    return SequenceRequest(
        prompt_token_ids=np.array(prompt, np.int32),
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        pooling=None if model.generates else model.pooling_params,
        encoder_inputs=inputs,
        is_warm_up=True,
    )
