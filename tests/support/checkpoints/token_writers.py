"""Tiny random encoders that write tokens, as files on disk."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.audio.sizes import NUM_MEL_BINS, SAMPLES
from support.checkpoints.source import write_letters
from support.checkpoints.source_models import MODELS
from support.media.audio_features import granite_features

GRANITE, OMNIASR, LASR = "granite", "omniasr", "lasr"
WAV2VEC2, HUBERT, MMS, DATA2VEC = "Wav2Vec2", "Hubert", "Wav2Vec2 MMS", "Data2VecAudio"
CONFORMER, ROTATED = "Wav2Vec2Conformer", "Wav2Vec2Conformer rotary"
BERT, ADAPTED, WAVLM, SEW, SEW_D = "Wav2Vec2Bert", "Wav2Vec2Bert adapter", "WavLM", "SEW", "SEWD"
LETTER_KINDS = (
    *(WAV2VEC2, HUBERT, MMS, DATA2VEC, CONFORMER, ROTATED, BERT, ADAPTED, WAVLM, SEW, SEW_D),
)
CTC_KINDS = ("CTC", GRANITE, OMNIASR, LASR, *LETTER_KINDS)


def writer_directory(directory: Path, kind: str) -> tuple[Path, Any]:
    """Write a Parakeet ("CTC", "RNNT" or "TDT") or a model of another kind with a tokenizer.

    Return its directory and transformers' model.
    """
    if kind in LETTER_KINDS:
        return _letter_writer(directory, kind)
    ids = write_letters(directory, ("<pad>", "<blank>"), "<pad>")
    vocab_size = 1 + max(ids.values())
    has_ctc = kind in CTC_KINDS
    # CTC has no token for padding beside the blank.
    special = {"pad_token_id": ids["<pad>"]} | (
        {"pad_token_id": ids["<blank>"]} if has_ctc else {"blank_token_id": ids["<blank>"]}
    )
    name = f"Parakeet{{}}{kind}"
    encoder = MODELS["canary"][1]["encoder_config"] | {"scale_input": True}
    if kind == GRANITE:
        name = "GraniteSpeech5{}CTC"
        encoder = {
            "model_type": "granite_speech5_encoder",
            "vocab_size": vocab_size,
            "num_mel_bins": 16,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "context_size": 21,
            "max_position_embeddings": 32,
            "subsample_layers": [0, 2],
        }
    section = "encoder_config"
    if kind == LASR:
        name = "Lasr{}CTC"
        encoder = {
            "num_mel_bins": 16,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "subsampling_conv_channels": 24,
            "conv_kernel_size": 8,
        }
    if kind == OMNIASR:
        name, section = "OmniASR{}CTC", "audio_config"
        special["blank_token_id"] = ids["<blank>"]
        encoder = {"model_type": "omniasr_audio", **SAMPLES}
    config = getattr(transformers, name.format("") + "Config")(
        vocab_size=vocab_size,
        **{section: encoder},
        **special,
        **({} if has_ctc else {"decoder_hidden_size": 24}),
    )
    torch.manual_seed(0)
    model_class = getattr(transformers, name.format("For"))
    model = model_class._from_config(config, attn_implementation="eager").eval()
    _spread(model)
    for buffer_name, buffer in model.named_buffers():
        if "running_" in buffer_name:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    with torch.no_grad():
        # Most rows have no token, as those of speech.
        head = model.ctc_head if has_ctc else model.joint.head
        head.bias[ids["<blank>"]] += 3
    if not has_ctc:
        model.generation_config.decoder_start_token_id = ids["<blank>"]
    model.save_pretrained(directory)
    fields = {"feature_size": 16, "sampling_rate": 16_000, "hop_length": 160, "n_fft": 512}
    if kind == GRANITE:
        fields = {"num_mel_bins": 16, **fields}
    (directory / "preprocessor_config.json").write_text(json.dumps(fields))
    return directory, model


def _spread(model: torch.nn.Module, deviation: float = 0.5) -> None:
    """Draw the weights of matrices again, so that outputs differ."""
    for name, parameter in model.named_parameters():
        if not re.search(r"norm\w*\.weight|bias$", name):
            torch.nn.init.normal_(parameter, 0, deviation)


def _letter_writer(directory: Path, kind: str) -> tuple[Path, Any]:
    """Write a wav2vec 2.0, or a HuBERT with norms before its layers, and a tokenizer of letters.

    An MMS has the vocabularies and the layers of two languages.
    """
    tokens = ["<pad>", "|", *("ABCDEFGHIJ" if kind == HUBERT else "abcdefghij")]
    vocabulary: dict[str, Any] = {token: index for index, token in enumerate(tokens)}
    settings: dict[str, Any] = {"do_lower_case": kind == HUBERT}
    if kind in (BERT, ADAPTED, WAVLM, SEW, SEW_D):
        settings["tokenizer_class"] = "Wav2Vec2CTCTokenizer"
    if kind == MMS:
        vocabulary = {"eng": {"<pad>": 0, "|": 1, "x": 2}, "fra": vocabulary}
        settings |= {"target_lang": "fra", "tokenizer_class": "Wav2Vec2CTCTokenizer"}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    has_layer_norms = {
        "feat_extract_norm": "layer",
        "conv_bias": True,
        "do_stable_layer_norm": True,
    }
    name = kind.split()[0]
    others: dict[str, Any] = {} if kind == WAV2VEC2 else has_layer_norms
    if kind == DATA2VEC:
        others = {"num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5}
    elif kind == WAVLM:
        others = {"num_buckets": 12, "max_bucket_distance": 20}
    elif kind == SEW:
        others = {"squeeze_factor": 3}
    elif kind == SEW_D:
        # There is no matrix before the layers.
        others = {"position_buckets": 8, "max_position_embeddings": 20, "conv_dim": [8, 12, 32]}
    elif name == CONFORMER:
        others = {"position_embeddings_type": "rotary" if kind == ROTATED else "relative"}
    elif name == BERT:
        others = {"feature_projection_input_dim": 32}
        others |= {"left_max_position_embeddings": 6, "right_max_position_embeddings": 3}
        others |= {"add_adapter": kind == ADAPTED}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokens),
        adapter_attn_dim=6 if kind == MMS else None,
        **SAMPLES | others,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCTC")(config).eval()
    # Numbers of conformers with larger weights depend on the order of sums.
    is_conformer = name in (CONFORMER, BERT)
    _spread(model, 0.3 if is_conformer else 0.5)
    with torch.no_grad():
        model.lm_head.bias[0] += 1 if is_conformer else 3
    model.save_pretrained(directory)
    if kind == MMS:
        own = re.compile(r".*\.adapter_layer\..*|lm_head\..*")
        tensors = {name: x for name, x in model.state_dict().items() if own.fullmatch(name)}
        save_file(tensors, directory / "adapter.fra.safetensors")
        save_file({"lm_head.weight": torch.zeros(3, 32)}, directory / "adapter.spa.safetensors")
        # The other tensors are those of another language.
        stored = load_file(directory / "model.safetensors")
        stored |= {name: x + 1 for name, x in stored.items() if "adapter_layer" in name}
        stored |= {"lm_head.weight": torch.ones(3, 32), "lm_head.bias": torch.ones(3)}
        save_file(stored, directory / "model.safetensors")
        fields = json.loads((directory / "config.json").read_text()) | {"vocab_size": 3}
        (directory / "config.json").write_text(json.dumps(fields))
    settings = {"do_normalize": kind != HUBERT}
    if name == BERT:
        settings = {"num_mel_bins": 16, "feature_size": 16, "stride": 2}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return directory, model


def features(kind: str, samples: np.ndarray) -> dict[str, torch.Tensor]:
    """Return the features of transformers' extractor, which for Granite Speech 5 needs torchaudio."""
    if kind == OMNIASR:
        extractor = transformers.OmniASRFeatureExtractor()
        return dict(extractor(samples, sampling_rate=16_000, return_tensors="pt"))
    if kind in (BERT, ADAPTED):
        extractor = transformers.SeamlessM4TFeatureExtractor(feature_size=16, num_mel_bins=16)
        return dict(extractor(samples, sampling_rate=16_000, return_tensors="pt"))
    if kind in LETTER_KINDS:
        extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=kind != HUBERT)
        return dict(extractor(samples, sampling_rate=16_000, return_tensors="pt"))
    if kind == LASR:
        extractor = transformers.LasrFeatureExtractor(feature_size=16)
        return dict(extractor(samples, sampling_rate=16_000, return_tensors="pt"))
    if kind != GRANITE:
        extractor = transformers.ParakeetFeatureExtractor(feature_size=16)
        return dict(extractor(samples, sampling_rate=16_000, return_tensors="pt"))
    num_frames = 2 * -(-(len(samples) // 160) // 2)
    filled = np.pad(samples, (0, max(0, (num_frames - 1) * 160 + 1 - len(samples))))
    frames = granite_features(filled[: (num_frames - 1) * 160 + 159], NUM_MEL_BINS).reshape(
        num_frames, -1
    )
    # compute_deltas of torchaudio: the slope of the line through three frames.
    padded = torch.cat((frames[:1], frames, frames[-1:]))
    deltas = (padded[2:] - padded[:-2]) / 2
    rows = torch.cat((frames, deltas), 1).reshape(1, num_frames // 2, -1)
    return {"input_features": rows, "attention_mask": torch.ones(rows.shape[:2])}
