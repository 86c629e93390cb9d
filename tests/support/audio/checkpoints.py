"""Tiny random models that read audio clips, as files on disk, with a real tokenizer and transformers' features."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from support.audio.dots3 import add_image_processor, dots3_model
from support.audio.gemma import (
    FRAME_SIZE,
    IMAGE_PROCESSOR,
    gemma3n_directory,
    gemma4_config,
    gemma4_unified_config,
)
from support.audio.omni import NUM_TIMES, omni_config, use_own_layout, write_omni
from support.audio.sizes import NUM_MEL_BINS, SAMPLES
from support.checkpoints.mistral_files import write_mistral_files
from support.checkpoints.tiny import DECODER_SIZES, sentencepiece_tokenizer
from support.media.audio_features import granite_features, stacked_features
from support.media.image_marks import GEMMA_MARKS
from support.own_code.audio.model import audio_model_directory
from support.own_code.audio.models import OWN_CODE, own_model
from support.own_code.audio.ultravox import PLACEHOLDER, ultravox_directory
from support.vision.grid_configs import RADIO_PROCESSOR, nemotron_omni_config
from support.vision.qwen import END, IMAGE, START, VIDEO
from torch.nn.functional import pad
from transformers.models.whisper.modeling_whisper import sinusoids

WAVE_HOP = 320
"""Samples of an embedding of VibeVoice ASR."""

WINDOW_S = 2
"""A tower's window in seconds, where those of real models have 30."""

MODELS = (
    *("qwen2_audio", "voxtral", "qwen3_asr", "glmasr", "granite_speech", "qwen3_asr thinker"),
    *("gemma3n", "gemma4", "gemma4_unified"),
    *("audioflamingo3", "dots3_note", "granite_speech_plus", "musicflamingo"),
    *("fun_asr_nano", "moss_transcribe_diarize", "vibevoice_asr", "nemotron_h_omni"),
    *("ultravox", "ultravox 0.4", "voxtral mistral"),
    *("funaudiochat add", "funaudiochat replace", "midashenglm", "fireredasr2"),
    *("lfm2_audio", "meralion2", "moss_audio", "funasr", "omniasr"),
    *("qwen3_asr aligner", "qwen3_asr thinker aligner"),
)
"""Kinds of models. An "aligner" classifies tokens.

"thinker" is the layout of Qwen's own checkpoints, "mistral" that of Mistral's own."""

OMNI_MODELS = ("qwen2_5_omni", "qwen3_omni")
"""Kinds of models that read images as well as audio, in the layout of Qwen's own checkpoints."""

PARTS = {
    "qwen2_audio": ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    "voxtral": ("[BEGIN_AUDIO]", "[AUDIO]"),
    "qwen3_asr": ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
    "glmasr": ("<|begin_of_audio|>", "<|pad|>", "<|end_of_audio|>"),
    "granite_speech": ("<|start|>", "<|audio|>"),
    "audioflamingo3": ("<|start|>", "<sound>"),
    "dots3_note": ("<|audio_comp_start|>", "<|audio_comp_pad|>", "<|audio_comp_end|>"),
    "musicflamingo": ("<|sound_bos|>", "<sound>", "<|sound_eos|>"),
    "fun_asr_nano": ("<|start|>", "<|audio|>", "<|end|>"),
    "nemotron_h_omni": ("<so_start>", "<so_embedding>", "<so_end>"),
    "gemma3n": ("<start_of_audio>", "<audio_soft_token>", "<end_of_audio>"),
    "gemma4": ("<|audio>", "<|audio|>", "<audio|>"),
}
"""The tokens of a clip. The second stands for its embeddings."""

PARTS["vibevoice_asr"] = PARTS["fun_asr_nano"]
PARTS["moss_transcribe_diarize"] = PARTS["qwen3_asr"]
PARTS["qwen3_omni"] = PARTS["qwen2_5_omni"] = PARTS["qwen3_asr"]
for _kind in ("thinker", "aligner", "thinker aligner"):
    PARTS[f"qwen3_asr {_kind}"] = PARTS["qwen3_asr"]
PARTS["funaudiochat add"] = PARTS["funaudiochat replace"] = PARTS["qwen2_audio"]
PARTS["moss_audio"] = ("<|start|>", "<|vision_pad|>")
PARTS["omniasr"] = ("<|start|>", "<extra_id_1>", "<|lang:fra_latn|>", "<|lang:abc_latn|>")
PARTS["meralion2"] = ("<|start|>", "<SpeechHere>")
PARTS["lfm2_audio"] = ("<|start|>", "<|reserved_4|>")
PARTS["fireredasr2"] = PARTS["funasr"] = PARTS["midashenglm"] = PARTS["qwen2_audio"]
PARTS["voxtral mistral"] = PARTS["voxtral"]
PARTS["gemma4_unified"] = PARTS["gemma4"]
PARTS["granite_speech_plus"] = PARTS["granite_speech"]
PARTS["ultravox"] = PARTS["ultravox 0.4"] = ("<|start|>", PLACEHOLDER)
MARKS = {kind: parts[1] for kind, parts in PARTS.items()}
MARKS["moss_audio"] = "<|audio_bos|><|AUDIO|><|audio_eos|>"
MARKS["ultravox"] = MARKS["ultravox 0.4"] = "<|audio|>"


def audio_directory(directory: Path, kind: str) -> tuple[Path, Any]:
    """Write a model of one of `MODELS`. Return its directory and transformers' model."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(PARTS[kind])})
    if kind.startswith("gemma4"):
        tokenizer.add_special_tokens({"additional_special_tokens": [*GEMMA_MARKS.values()]})
        tokenizer.init_kwargs |= {f"{name}_token": mark for name, mark in GEMMA_MARKS.items()}
    if kind == "nemotron_h_omni":
        tokenizer.add_tokens(["<image>", "<img>", "</img>"], special_tokens=True)
    tokenizer.add_tokens("[TRANSCRIBE]" if kind.startswith("voxtral") else "<asr_text>")
    # Their processors add the tokens around a clip.
    is_bare = kind.startswith(("gemma", "moss_audio", "musicflamingo", "nemotron", "ultravox"))
    part = MARKS[kind] if is_bare else "".join(PARTS[kind][:3])
    language = "p.language"
    if kind == "omniasr":
        part, language = "".join(PARTS[kind][:2]), "'<|lang:' + p.language + '|>'"
    if kind == "vibevoice_asr":
        part = f"<|AUDIO_DURATION|> seconds {part}"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'audio' %}"
        + part
        + "{% elif p.type == 'image' %}<image>"
        "{% else %}{{ p.text or " + language + " }}{% endif %}"
        "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    text = {"vocab_size": len(tokenizer), "rope_theta": 10_000.0} | DECODER_SIZES | ids
    tower = {"num_mel_bins": NUM_MEL_BINS, "max_source_positions": 50 * WINDOW_S}
    mark = tokenizer.convert_tokens_to_ids(PARTS[kind][1])
    if kind.startswith("ultravox"):
        is_last = kind.endswith("0.4")
        written = ultravox_directory(directory, tokenizer, text, tower, is_last=is_last)
        extractor(kind).save_pretrained(directory)
        return written
    if kind.startswith(OWN_CODE):
        model = own_model(kind, text, mark, NUM_MEL_BINS)
        return audio_model_directory(directory, model, tokenizer)
    if kind == "gemma3n":
        marks = tokenizer.convert_tokens_to_ids(list(PARTS[kind]))
        written = gemma3n_directory(directory, tokenizer, NUM_MEL_BINS, marks)
        extractor(kind).save_pretrained(directory)
        return written
    if kind == "audioflamingo3":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = transformers.AudioFlamingo3Config(
            audio_config=tower | sizes | {"num_attention_heads": 4},
            text_config=text | {"model_type": "qwen2"},
            audio_token_id=mark,
        )
        model = transformers.AudioFlamingo3ForConditionalGeneration(config)
    elif kind == "dots3_note":
        model = dots3_model(tokenizer, mark, WINDOW_S)
    elif kind == "nemotron_h_omni":
        config = nemotron_omni_config(text, tokenizer.convert_tokens_to_ids("<image>"))
        config.audio_token_id = mark
        config.audio_config.num_mel_bins = NUM_MEL_BINS
        model = transformers.NemotronH_Omni_Reasoning_V3(config)
    elif kind == "fun_asr_nano":
        sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
        size = text["hidden_size"]
        config = transformers.FunAsrNanoConfig(
            audio_config={
                "num_mel_bins": NUM_MEL_BINS,
                "hidden_size": 32,
                "num_timestamp_prediction_layers": 1,
                "fsmn_kernel_size": 4,
            }
            | sizes,
            adaptor_config=sizes
            | {"hidden_size": size, "intermediate_size": size // 4, "projector_hidden_size": 40},
            text_config=text | {"model_type": "qwen3", "head_dim": 16},
            audio_token_id=mark,
        )
        model = transformers.FunAsrNanoForConditionalGeneration(config)
    elif kind == "vibevoice_asr":
        encoder = {"num_filters": 4, "kernel_size": 3, "depths": [1, 2, 1, 2]}
        encoder["downsampling_ratios"] = [8, 5, 8]
        config = transformers.VibeVoiceAsrConfig(
            acoustic_tokenizer_encoder_config=encoder | {"hidden_size": 8},
            semantic_tokenizer_encoder_config=encoder | {"hidden_size": 12},
            text_config=text | {"model_type": "qwen2"},
            audio_token_id=mark,
            acoustic_tokenizer_chunk_size=WAVE_HOP * 100,
        )
        model = transformers.VibeVoiceAsrForConditionalGeneration(config)
    elif kind == "moss_transcribe_diarize":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = transformers.MossTranscribeDiarizeConfig(
            audio_config=tower | sizes | {"num_attention_heads": 4},
            text_config=text | {"model_type": "qwen3", "head_dim": 16},
            audio_token_id=mark,
            audio_chunk_size=16_000 * WINDOW_S,
        )
        model = transformers.MossTranscribeDiarizeForConditionalGeneration(config)
        (directory / "processor_config.json").write_text('{"time_marker_every_seconds": 1}')
    elif kind == "musicflamingo":
        begin, _, end = tokenizer.convert_tokens_to_ids(list(PARTS[kind]))
        sizes: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 2}
        sizes["num_attention_heads"] = 4
        config = transformers.MusicFlamingoConfig(
            audio_config=tower | sizes | {"model_type": "audioflamingo3_encoder"},
            text_config=text | {"model_type": "qwen2"},
            audio_token_id=mark,
            audio_bos_token_id=begin,
            audio_eos_token_id=end,
        )
        model = transformers.MusicFlamingoForConditionalGeneration(config)
    elif kind == "qwen2_audio":
        config = transformers.Qwen2AudioConfig(
            audio_config=tower
            | {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
            },
            text_config=text | {"model_type": "qwen2"},
            audio_token_index=mark,
        )
        model = transformers.Qwen2AudioForConditionalGeneration(config)
    elif kind.startswith("qwen3_asr"):
        config = transformers.Qwen3ASRConfig(
            audio_config={
                "num_mel_bins": NUM_MEL_BINS,
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
                "n_window_infer": 100 * WINDOW_S,
                "downsample_hidden_size": 6,
                "output_dim": text["hidden_size"],
            },
            text_config=text | {"model_type": "qwen3", "head_dim": 16},
            audio_token_id=mark,
        )
        if kind.endswith("aligner"):
            config.num_labels = NUM_TIMES
            model = transformers.Qwen3ASRForTokenClassification(config)
        else:
            model = transformers.Qwen3ASRForConditionalGeneration(config)
    elif kind in OMNI_MODELS:
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [IMAGE, VIDEO, START, END]},
            replace_extra_special_tokens=False,
        )
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "<image>",
            f"{START}{IMAGE}{END}{{% elif p.type == 'video' %}}{START}{VIDEO}{END}",
        )
        marks = {
            "image": IMAGE,
            "video": VIDEO,
            "vision_start": START,
            "audio_start": PARTS[kind][0],
        }
        config = omni_config(
            kind,
            text | {"vocab_size": len(tokenizer)},
            NUM_MEL_BINS,
            WINDOW_S,
            audio_token_id=mark,
            **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(x) for name, x in marks.items()},
        )
        name = "Qwen3OmniMoe" if kind == "qwen3_omni" else "Qwen2_5Omni"
        model = getattr(transformers, f"{name}ThinkerForConditionalGeneration")(config)
    elif kind.startswith("gemma4"):
        begin, _, end = tokenizer.convert_tokens_to_ids(PARTS[kind])
        marks = {"boa_token_id": begin, "audio_token_id": mark, "eoa_token_index": end}
        for name, image_mark in GEMMA_MARKS.items():
            marks[f"{name}_token_id"] = tokenizer.convert_tokens_to_ids(image_mark)
        make = gemma4_config if kind == "gemma4" else gemma4_unified_config
        config = make(text, NUM_MEL_BINS, **marks)
        name = config.__class__.__name__.replace("Config", "ForConditionalGeneration")
        model = getattr(transformers, name)(config)
    elif kind == "omniasr":
        config = transformers.OmniASRConfig(
            audio_config=SAMPLES,
            text_config=text | {"model_type": "llama", "head_dim": 16},
            audio_token_id=mark,
        )
        model = transformers.OmniASRForConditionalGeneration(config)
    elif kind == "glmasr":
        config = transformers.GlmAsrConfig(
            audio_config={
                "num_mel_bins": NUM_MEL_BINS,
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 50 * WINDOW_S,
            },
            text_config=text | {"model_type": "llama", "head_dim": 16},
            audio_token_id=mark,
        )
        model = transformers.GlmAsrForConditionalGeneration(config)
    elif kind.startswith("granite"):
        is_plus = kind.endswith("plus")
        name = "GraniteSpeechPlus" if is_plus else "GraniteSpeech"
        config = getattr(transformers, f"{name}Config")(
            encoder_config=({"cat_hidden_layers": [0, 1]} if is_plus else {})
            | {
                "input_dim": 2 * NUM_MEL_BINS,
                "num_layers": 3,
                "hidden_dim": 32,
                "num_heads": 4,
                "context_size": 40,
                "max_pos_emb": 50,
                "conv_kernel_size": 7,
            },
            projector_config={
                "model_type": "blip_2_qformer",
                "hidden_size": 24,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "intermediate_size": 40,
                "encoder_hidden_size": 96 if is_plus else 32,
                "vocab_size": 10,
            },
            text_config=text | {"model_type": "granite", "embedding_multiplier": 3.0},
            audio_token_index=mark,
        )
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    else:
        config = transformers.VoxtralConfig(
            audio_config=tower
            | {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            },
            text_config=text | {"model_type": "llama", "head_dim": 16},
            audio_token_id=mark,
        )
        model = transformers.VoxtralForConditionalGeneration(config)
    model = model.float().eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_scale" not in name:
                parameter.normal_(0, 0.15)
        if kind == "nemotron_h_omni":
            # It never writes the tokens of images and audio.
            model.language_model.lm_head.weight[[mark, config.image_token_id]] = 0
        for name, buffer in model.named_buffers():
            if "running_" in name:
                buffer.uniform_(0.5, 1.5)
            if name.endswith(("_min", "_max")):
                # Bounds that some values exceed.
                buffer.fill_(1.5 if name.endswith("max") else -1.5)
    if kind == "voxtral mistral":
        positions = model.model.audio_tower.embed_positions.weight
        positions.data = sinusoids(*positions.shape)
        write_mistral_files(model, directory)
        tokenizer.save_pretrained(directory)
        return directory, model
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if kind in OMNI_MODELS:
        extractor(kind).save_pretrained(directory)
        write_omni(directory, kind)
    elif kind.startswith("gemma4"):
        (directory / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
    elif kind == "nemotron_h_omni":
        (directory / "preprocessor_config.json").write_text(json.dumps(RADIO_PROCESSOR))
    elif not kind.startswith(("granite", "fun_asr", "vibevoice")):
        extractor(kind).save_pretrained(directory)
    if kind == "dots3_note":
        add_image_processor(directory)
    if "thinker" in kind:
        use_own_layout(directory)
    return directory, model


def extractor(kind: str) -> Any:
    """Return transformers' feature extractor for the models of this module."""
    if kind == "gemma3n":
        return transformers.Gemma3nAudioFeatureExtractor(feature_size=NUM_MEL_BINS)
    if kind == "gemma4":
        return transformers.Gemma4AudioFeatureExtractor(feature_size=NUM_MEL_BINS)
    if kind == "gemma4_unified":
        return transformers.Gemma4UnifiedAudioFeatureExtractor(audio_samples_per_token=FRAME_SIZE)
    if kind == "moss_transcribe_diarize":
        return transformers.MossTranscribeDiarizeFeatureExtractor(
            NUM_MEL_BINS, chunk_length=WINDOW_S
        )
    if kind == "omniasr":
        return transformers.OmniASRFeatureExtractor()
    if kind == "dots3_note":
        return transformers.Dots3NoteFeatureExtractor(NUM_MEL_BINS, chunk_length=WINDOW_S)
    if kind.startswith("qwen3_asr"):
        return transformers.Qwen3ASRFeatureExtractor(feature_size=NUM_MEL_BINS)
    return transformers.WhisperFeatureExtractor(
        feature_size=NUM_MEL_BINS,
        chunk_length=WINDOW_S,
        return_attention_mask=kind in ("qwen2_audio", "glmasr", "audioflamingo3", "musicflamingo"),
    )


def reference_inputs(kind: str, clips: list[np.ndarray]) -> dict[str, Any]:
    """Return the inputs of transformers' model for audio clips of 16 kHz, as its processor makes them."""
    if kind.startswith(OWN_CODE):
        return {"clips": clips}
    if kind == "gemma3n":
        found = [extractor(kind)(clip, return_tensors="pt") for clip in clips]
        return {"input_features": [each["input_features"][0] for each in found]}
    if kind.startswith("gemma4"):
        return dict(extractor(kind)(clips, return_tensors="pt"))
    if kind == "nemotron_h_omni":
        extract = transformers.ParakeetFeatureExtractor(NUM_MEL_BINS)
        found = extract(clips, sampling_rate=16_000)
        return {
            "input_features": found["input_features"],
            "input_features_mask": found["attention_mask"],
        }
    if kind in ("dots3_note", "moss_transcribe_diarize", "omniasr"):
        found = dict(extractor(kind)(clips, sampling_rate=16_000, return_tensors="pt"))
        return {name: x for name, x in found.items() if name != "num_audio_tokens"}
    if kind == "vibevoice_asr":
        extract = transformers.VibeVoiceAcousticTokenizerFeatureExtractor(
            pad_to_multiple_of=WAVE_HOP
        )
        found = extract(clips, sampling_rate=24_000, return_tensors="pt")
        # Without noise.
        return dict(found) | {"sample": False}
    if kind == "fun_asr_nano":
        features = torch.stack([stacked_features(clip, NUM_MEL_BINS) for clip in clips])
        return {"input_features": features, "input_features_mask": torch.ones(features.shape[:2])}
    if kind.startswith("granite"):
        return {
            "input_features": torch.stack([granite_features(clip, NUM_MEL_BINS) for clip in clips])
        }
    extract = partial(
        extractor(kind), sampling_rate=16_000, return_attention_mask=True, return_tensors="pt"
    )
    if kind in OMNI_MODELS:
        # The whole clip is followed by silence for Qwen2.5-Omni, and ends with its last frame for Qwen3-Omni.
        padding = {"padding": True, "truncation": False}
        if kind == "qwen2_5_omni":
            padding = {"padding": "max_length", "truncation": False, "max_length": 16_000 * 10}
        found = [extract(clip, **padding) for clip in clips]
        lengths = [int(each["attention_mask"].sum()) for each in found]
        features = [each["input_features"][..., : max(lengths)] for each in found]
        features = [pad(each, (0, max(lengths) - each.shape[2])) for each in features]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return {"input_features": torch.cat(features), "feature_attention_mask": mask.long()}
    if kind.startswith("ultravox"):
        found = [extract(clip, padding=True, truncation=False)["input_features"] for clip in clips]
        size = 100 * WINDOW_S
        return {"windows": [part for each in found for part in each[0].split(size, 1)]}
    if kind.startswith("qwen3_asr"):
        # In a batch of different lengths, silence would precede the end of shorter clips.
        found = [extract(clip, padding=True) for clip in clips]
        length = max(each["input_features"].shape[2] for each in found)
        names = ("input_features", "attention_mask")
        features, mask = (
            torch.cat([pad(each[name], (0, length - each[name].shape[-1])) for each in found])
            for name in names
        )
        return {"input_features": features, "input_features_mask": mask}
    if kind in ("glmasr", "audioflamingo3", "musicflamingo"):
        size = 16_000 * WINDOW_S
        windows = [clip[i : i + size] for clip in clips for i in range(0, len(clip), size)]
        found = extract(windows, padding="max_length")
        return {
            "input_features": found["input_features"],
            "input_features_mask": found["attention_mask"],
        }
    if kind == "qwen2_audio":
        found = extract(clips, padding="max_length")
        return {
            "input_features": found["input_features"],
            "feature_attention_mask": found["attention_mask"],
        }
    window = 100 * WINDOW_S
    parts = []
    for clip in clips:
        found = extract(clip, padding=True, truncation=False, pad_to_multiple_of=16_000 * WINDOW_S)[
            "input_features"
        ]
        parts.append(found.reshape(NUM_MEL_BINS, -1, window).transpose(0, 1))
    return {"input_features": torch.cat(parts)}


@torch.inference_mode()
def reference_logits(
    kind: str, model: Any, prompt: list[int], clips: list[np.ndarray]
) -> torch.Tensor:
    """Return transformers' logits [T, V] of a prompt with audio clips."""
    ids = torch.tensor([prompt])
    if not kind.startswith(("granite", "fun_asr", "nemotron")):
        return model(input_ids=ids, **reference_inputs(kind, clips)).logits[0]
    # In a batch, rows of shorter clips would attend to silence.
    found = [
        getattr(model, "model", model)
        .get_audio_features(**reference_inputs(kind, [clip]))
        .pooler_output
        for clip in clips
    ]
    audio = [each.flatten(0, -2) for each in found]
    embeds = model.get_input_embeddings()(ids)
    mask = (ids == model.config.audio_token_id)[..., None]
    return model(inputs_embeds=embeds.masked_scatter(mask, torch.cat(audio))).logits[0]
