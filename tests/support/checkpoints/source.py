"""Tiny random encoder-decoder models as files on disk, and the sources that they read."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers
import torch
import transformers
from engine.protocol.arrays import int32_bytes
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.encoder_inputs.payloads import AudioPayload, TextPayload
from safetensors.torch import load_file, save_file
from support.checkpoints.mistral_files import write_mistral_files
from support.checkpoints.source_models import MODELS, VOCAB_SIZE
from torch.nn.functional import pad
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts
from transformers.models.prophetnet.modeling_prophetnet import (
    ProphetNetNgramSelfAttention,
    compute_relative_buckets,
)
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersTop1Router,
)

_WITH_SINUSOIDS = ("fsmt", "marian", "pegasus", "separate-marian")


def source_directory(
    directory: Path, kind: str, changes: Mapping[str, Any] | None = None
) -> tuple[Path, Any]:
    """Write one of `MODELS`, with `changes` of its config. Return its directory and transformers' model."""
    name, sizes = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**sizes, **(changes or {})})
    suffixes = {
        "Marian": "MTModel",
        "EncoderDecoder": "Model",
        "SpeechEncoderDecoder": "Model",
        "SpeechT5": "ForSpeechToText",
    }
    suffix = suffixes.get(name, "ForConditionalGeneration")
    model_class = getattr(transformers, f"{name}{suffix}")
    model = model_class._from_config(config, attn_implementation="eager").eval()
    if kind == "flan-t5":
        # The config says that the output projection is tied, but the checkpoint has one.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    if kind == "switch":
        # Generation computes one token at a time.
        for layer in model.decoder.modules():
            if isinstance(layer, SwitchTransformersTop1Router):
                layer.expert_capacity = 1 << 20
    for layer in model.modules():
        if isinstance(layer, NllbMoeExperts):
            layer.forward = functools.partial(_sum_experts, layer)
        if isinstance(layer, ProphetNetNgramSelfAttention):
            layer.get_predict_relative_pos_embeddings = functools.partial(_distance_biases, layer)
    for parameter_name, parameter in model.named_parameters():
        if "embed_positions" in parameter_name and kind in _WITH_SINUSOIDS:
            continue
        if re.search(r"[nN]orm\.|bias$", parameter_name):
            torch.nn.init.normal_(parameter, 0.7, 0.2)
        else:
            torch.nn.init.normal_(parameter, 0, 0.15)
    for buffer_name, buffer in model.named_buffers():
        if "running_" in buffer_name:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    if hasattr(model, "final_logits_bias"):
        torch.nn.init.normal_(model.final_logits_bias, 0, 1)
    model.save_pretrained(directory)
    if kind == "untied-whisper":
        # transformers ignores this tensor, which some checkpoints have.
        path = directory / "model.safetensors"
        stray = {"model.encoder.embed_tokens.weight": model.get_output_embeddings().weight.data}
        save_file(load_file(path) | stray, path)
    return directory, model


def _distance_biases(
    attention: Any,
    x: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    buckets: torch.Tensor | None,
) -> torch.Tensor:
    """Return the biases of the states that predict, because transformers confuses heads and tokens of a prompt."""
    if buckets is None:
        # Distances to tokens before a single one.
        sees = torch.arange(weights.shape[-1]) - positions[0, 0]
        sizes = attention.num_buckets, attention.relative_max_distance
        buckets = compute_relative_buckets(*sizes, sees)[None, None]
    shape = (attention.num_buckets, attention.num_attn_heads)
    biases = attention.relative_pos_embeddings(x.transpose(1, 2)).unflatten(-1, shape)
    biases = biases.permute(0, 1, 4, 2, 3)
    return biases.gather(-1, buckets.long()[:, None, None].expand(*biases.shape[:-1], -1))


def _sum_experts(
    experts: Any, x: torch.Tensor, _router_mask: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the outputs of NLLB's experts, because transformers 5 computes only the first two."""
    count = experts.num_experts
    outputs = [experts[f"expert_{i}"](x) * weights[:, i, None] for i in range(count)]
    return torch.stack(outputs).sum(0) * (1 - experts.moe_token_dropout)


def write_generation(directory: Path, **fields: Any) -> None:
    """Replace fields of the generation config."""
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def source(model: Any, seed: int, length: int = 0) -> tuple[torch.Tensor, EncoderInput]:
    """Return a random source in transformers' form and in Engine's form. Audio for Whisper has a fixed length."""
    rng = np.random.default_rng(seed)
    config = model.config
    if config.model_type == "whisper":
        frames = 2 * config.max_source_positions
        features = rng.standard_normal((config.num_mel_bins, frames)).astype(np.float32)
        payload: Any = AudioPayload(config.num_mel_bins, frames, features.tobytes())
        size = config.max_source_positions
    elif config.model_type in ("speech-encoder-decoder", "speecht5"):
        features = rng.standard_normal(8 * length or 3000).astype(np.float32)
        payload = AudioPayload(0, len(features), features.tobytes())
        if model.main_input_name == "inputs" and config.encoder.model_type == "wav2vec2-bert":
            features = features[: len(features) // 320 * 32].reshape(-1, 32)
            mel = np.ascontiguousarray(features.T)
            payload = AudioPayload(32, len(features), mel.tobytes())
        with torch.inference_mode():
            size = model.get_encoder()(torch.from_numpy(features)[None])[0].shape[1]
    elif config.model_type == "moonshine":
        features = rng.standard_normal(length or 3000).astype(np.float32)
        payload = AudioPayload(0, len(features), features.tobytes())
        size = (((len(features) - 127) // 64 + 1 - 7) // 3 + 1 - 3) // 2 + 1
    elif config.model_type == "moonshine_streaming":
        # One of the clips ends with an incomplete frame.
        features = rng.standard_normal(5 * length + 17 if length else 8000).astype(np.float32)
        payload = AudioPayload(0, len(features), features.tobytes())
        size = -(-len(features) // 320)
    elif config.model_type in ("cohere_asr", "canary", "speech_to_text"):
        per_row = 4 if config.model_type == "speech_to_text" else 8
        frames = length // 64 * per_row or 81
        features = rng.standard_normal((frames, 16)).astype(np.float32)
        mel = np.ascontiguousarray(features.T)
        payload = AudioPayload(len(mel), frames, mel.tobytes())
        size = -(-frames // per_row)
    else:
        features = rng.integers(4, getattr(config, "vocab_size", VOCAB_SIZE), length or 13)
        payload = TextPayload(int32_bytes(features.tolist()))
        size = len(features)
    data = msgspec.msgpack.encode(payload)
    return torch.from_numpy(features)[None], EncoderInput(0, 0, sha256(data).digest(), size, data)


@torch.inference_mode()
def logits(model: Any, inputs: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Return transformers' logits [T, V] of the decoder's tokens."""
    masks: dict[str, Any] = {}
    if model.config.model_type == "fsmt":
        # It has a causal mask only without a cache.
        masks = {"use_cache": False}
    if model.config.model_type == "led":
        # As its authors advise, the first token is global.
        masks = {"global_attention_mask": (torch.arange(inputs.shape[1]) == 0)[None].long()}
    if model.config.model_type == "moonshine_streaming":
        # The processor fills the last frame, and without a mask the encoder has no windows.
        mask = torch.ones_like(inputs)
        inputs, mask = (pad(each, (0, -inputs.shape[1] % 80)) for each in (inputs, mask))
        masks = {"attention_mask": mask}
    return model(inputs, decoder_input_ids=torch.tensor([tokens]), **masks).logits[0]


def greedy(
    model: Any, inputs: torch.Tensor, prompt: list[int], count: int, never: Sequence[int] = ()
) -> list[int]:
    """Return the most likely tokens after a prompt of the decoder, except those in `never`."""
    tokens = list(prompt)
    for _ in range(count):
        row = logits(model, inputs, tokens)[-1].clone()
        row[list(never)] = -torch.inf
        tokens.append(int(row.argmax()))
    return tokens[len(prompt) :]


LANGUAGES = ("en", "de", "fr")
WINDOW_S = 2
"""The window of the Whisper below in seconds, where those of real models have 30."""

_LETTERS = ("Ġ", *"abcdefghijklmnopqrstuvwxyz")


EXTRACTORS = {
    "cohere_asr": transformers.CohereAsrFeatureExtractor,
    "canary": transformers.ParakeetFeatureExtractor,
}


def write_letters(directory: Path, marks: Sequence[str], end: str) -> dict[str, int]:
    """Write a tokenizer of spaces and letters, and return the token of each of the special `marks`."""
    letters = {letter: index for index, letter in enumerate(_LETTERS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([*marks])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end
    ).save_pretrained(directory)
    return {mark: len(_LETTERS) + index for index, mark in enumerate(marks)}


def multilingual_whisper(directory: Path) -> tuple[Path, Any]:
    """Write a Whisper of several languages with a tokenizer. Return its directory and transformers' model.

    It has the shape of large-v3-turbo: 128 features, and fewer layers in the decoder. Its texts have no repetitions and
    high probabilities, so that none is decoded again.
    """
    marks = (
        *("<|endoftext|>", "<|startoftranscript|>"),
        *(f"<|{language}|>" for language in LANGUAGES),
        *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"),
        *("<|nospeech|>", "<|notimestamps|>"),
        *(f"<|{0.02 * step:.2f}|>" for step in range(50 * WINDOW_S + 1)),
    )
    ids = write_letters(directory, marks, "<|endoftext|>")
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    changes = {
        "vocab_size": len(_LETTERS) + len(marks),
        "num_mel_bins": 128,
        "encoder_layers": 3,
        "decoder_layers": 2,
        "max_source_positions": 50 * WINDOW_S,
        "max_target_positions": 32,
        "decoder_start_token_id": start,
    }
    path, model = source_directory(directory, "whisper", changes | special)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1)
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(3)
        # All rows have the same length, because the longest row would otherwise always be the likeliest. Marks are less
        # likely.
        rows = torch.randn(changes["vocab_size"], 48).sign() * 0.1
        rows[len(_LETTERS) :] *= 0.4
        model.model.decoder.embed_tokens.weight.copy_(rows)
        model.model.decoder.layer_norm.weight.fill_(20)
        for layer in model.model.decoder.layers:
            layer.encoder_attn.out_proj.weight.mul_(4)
    model.generation_config = transformers.GenerationConfig(
        **special,
        decoder_start_token_id=start,
        is_multilingual=True,
        lang_to_id={f"<|{language}|>": ids[f"<|{language}|>"] for language in LANGUAGES},
        task_to_id={task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        suppress_tokens=list(range(start, ids["<|notimestamps|>"])),
        begin_suppress_tokens=[0, end],
        max_initial_timestamp_index=50,
        alignment_heads=[[0, 1], [1, 4]],
    )
    model.save_pretrained(path)
    transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=WINDOW_S).save_pretrained(
        path
    )
    return path, model


@torch.inference_mode()
def whisper_text(
    model: Any, features: torch.Tensor, prompt: list[int], *, has_timestamps: bool
) -> list[int]:
    """Return the most likely tokens after a prompt by the rules of transformers."""
    generation, tokens = model.generation_config, list(prompt)
    rules: list[Any] = [
        transformers.SuppressTokensLogitsProcessor(generation.suppress_tokens),
        transformers.SuppressTokensAtBeginLogitsProcessor(
            generation.begin_suppress_tokens, len(prompt)
        ),
    ]
    if has_timestamps:
        rules.append(transformers.WhisperTimeStampLogitsProcessor(generation, len(prompt)))
    while len(tokens) < model.config.max_target_positions:
        row = logits(model, features, tokens)[-1:]
        for rule in rules:
            row = rule(torch.tensor([tokens]), row)
        token = int(row.argmax())
        if token == generation.eos_token_id:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def conformer_directory(directory: Path, kind: str) -> tuple[Path, Any]:
    """Write a Cohere Transcribe or Canary with a tokenizer. Return its directory and transformers' model."""
    marks = ("▁", "<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>")
    marks += (
        "<|pnc|>",
        "<|noitn|>",
        "<|notimestamp|>",
        "<|nodiarize|>",
        "<|en|>",
        "<|fr|>",
        "</s>",
    )
    ids = write_letters(directory, marks, "</s>")
    changes = {"vocab_size": len(_LETTERS) + len(marks), "eos_token_id": ids["</s>"]}
    if kind == "canary":
        changes["decoder_config"] = MODELS[kind][1]["decoder_config"] | changes
    path, model = source_directory(directory, kind, changes)
    with torch.no_grad():
        # Most tokens of a text are letters, which change with their positions and the clip.
        model.proj_out.bias[: len(_LETTERS)] = 4
        model.model.decoder.norm.bias.zero_()
        if kind == "canary":
            # The positions, which are not stored, are small beside equal biases.
            for name, parameter in model.model.decoder.named_parameters():
                parameter *= 0 if name.endswith("norm.bias") else 4 if "layers" in name else 1
            model.model.decoder.norm.weight *= 6
        else:
            model.model.decoder.pos_emb.weight *= 8
    model.save_pretrained(path)
    EXTRACTORS[kind](feature_size=16).save_pretrained(path)
    return path, model


def moonshine_directory(directory: Path, kind: str = "moonshine") -> tuple[Path, Any]:
    """Write a Moonshine with a tokenizer. Return its directory and transformers' model."""
    is_joined = MODELS[kind][0] == "SpeechEncoderDecoder"
    marks = ("<s>", "</s>", *["de_DE"] * is_joined)
    ids = write_letters(directory, marks, "</s>")
    special = {"bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"]}
    changes: dict[str, Any] = {"vocab_size": 1 + max(ids.values())}
    changes["decoder_start_token_id"] = ids["<s>"]
    if is_joined:
        decoder = MODELS[kind][1]["decoder"] | {"max_position_embeddings": 17}
        changes["decoder"] = decoder | changes | special
    if kind == "speecht5":
        changes |= {"max_text_positions": 16, "pad_token_id": 1}
    if kind == "speech_to_text":
        changes |= {"max_target_positions": 16, "tie_word_embeddings": False}
    path, model = source_directory(directory, kind, changes | special)
    if is_joined:
        model.generation_config.forced_bos_token_id = ids["de_DE"]
    model.generation_config.save_pretrained(path)
    return path, model


def realtime_directory(directory: Path, *, has_own_format: bool = False) -> tuple[Path, Any]:
    """Write a Voxtral Realtime with a tokenizer. Return its directory and transformers' model.

    The windows of both parts are shorter than a clip of two seconds. Mistral's own format has no other files.
    """
    marks = ("<s>", "</s>", "[STREAMING_PAD]", "[STREAMING_WORD]")
    ids = write_letters(directory, marks, "</s>")
    sizes = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.VoxtralRealtimeConfig(
        audio_config=sizes
        | {"hidden_size": 32, "head_dim": 16, "num_mel_bins": 16, "sliding_window": 50},
        text_config=sizes
        | {
            "vocab_size": len(_LETTERS) + len(marks),
            "hidden_size": 64,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "sliding_window": 40,
            "bos_token_id": ids["<s>"],
            "eos_token_id": ids["</s>"],
        },
    )
    torch.manual_seed(3)
    model = transformers.VoxtralRealtimeForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 0.7 if "norm." in name else 0, 0.2)
    if has_own_format:
        write_mistral_files(model, directory)
        return directory, model
    model.save_pretrained(directory)
    transformers.VoxtralRealtimeFeatureExtractor(feature_size=16).save_pretrained(directory)
    return directory, model


def realtime_features(samples: np.ndarray) -> torch.Tensor:
    """Return the features of a clip for `realtime_directory`, with silence around it as mistral-common pads it."""
    padded = np.pad(samples, (32 * 1280, -len(samples) % 1280 + 17 * 1280))
    extractor = transformers.VoxtralRealtimeFeatureExtractor(feature_size=16)
    return extractor(padded, sampling_rate=16_000, return_tensors="pt")["input_features"]
