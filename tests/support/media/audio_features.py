"""Features of audio clips, as transformers' extractors compute them."""

from __future__ import annotations

import numpy as np
import torch
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function


def granite_features(clip: np.ndarray, num_mel_bins: int) -> torch.Tensor:
    """Return the features [pairs, 2 * mel bins] of transformers' extractor, which itself needs torchaudio."""
    filters = mel_filter_bank(257, num_mel_bins, 0.0, 8000.0, 16_000, mel_scale="htk")
    power = spectrogram(
        clip, window_function(400, "hann"), 400, 160, fft_length=512, power=2.0, mel_filters=filters
    )
    log = np.log10(np.maximum(power, 1e-10))
    features = np.maximum(log, log.max() - 8.0).T / 4 + 1
    pairs = len(features) // 2
    return torch.from_numpy(features[: 2 * pairs].reshape(pairs, -1)).float()


def kaldi_features(clip: np.ndarray, num_mel_bins: int) -> torch.Tensor:
    """Return the features [frames, mel bins] of Kaldi for samples with the range of 16-bit integers."""
    return _kaldi(clip * 32768.0, num_mel_bins, "povey")


def stacked_features(clip: np.ndarray, num_mel_bins: int) -> torch.Tensor:
    """Return the features [rows, 7 * mel bins] of transformers' extractor, which itself needs torchaudio."""
    frames = _kaldi(clip, num_mel_bins, "hamming")
    padded = torch.cat((frames[:1].expand(3, -1), frames, frames[-1:].expand(9, -1)))
    return torch.stack([padded[i : i + 7].flatten() for i in range(0, len(frames), 6)])


def _kaldi(clip: np.ndarray, num_mel_bins: int, window: str) -> torch.Tensor:
    filters = mel_filter_bank(
        257,
        num_mel_bins,
        20.0,
        8000.0,
        16_000,
        mel_scale="kaldi",
        triangularize_in_mel_space=True,
    )
    found = spectrogram(
        clip.astype(np.float64),
        window_function(400, window, periodic=False),
        400,
        160,
        fft_length=512,
        power=2.0,
        center=False,
        preemphasis=0.97,
        remove_dc_offset=True,
        mel_filters=filters,
        log_mel="log",
        mel_floor=1.192092955078125e-07,
    )
    return torch.from_numpy(found.T).float()
