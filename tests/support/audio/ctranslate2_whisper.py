"""Convert a Whisper model of CTranslate2 to a checkpoint of transformers."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import transformers

DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
"""The types of stored numbers, by their ids in the file."""

ENGLISH_END = 50256
"""The token that ends a text of models that know only English; that of others is the next one."""


def read_variables(path: Path) -> dict[str, np.ndarray]:
    """Return the variables of a model.bin of format version 6, with those that are aliases."""
    with path.open("rb") as file:
        version, _ = _number(file, "<I"), _text(file)
        assert version == 6, f"{path} has format version {version}, expected 6"
        _number(file, "<I")
        variables = {}
        for _ in range(_number(file, "<I")):
            name = _text(file)
            shape = [_number(file, "<I") for _ in range(_number(file, "<B"))]
            dtype = DTYPES[_number(file, "<B")]
            data = file.read(_number(file, "<I"))
            variables[name] = np.frombuffer(data, dtype).reshape(shape)
        for _ in range(_number(file, "<I")):
            alias = _text(file)
            variables[alias] = variables[_text(file)]
    return variables


def convert(source: Path, target: Path) -> Path:
    """Write the model in `source` to `target`, in float16, with its tokenizer. Return `target`."""
    variables = read_variables(source / "model.bin")
    config = json.loads((source / "config.json").read_text())
    tensors = {
        "model." + name: torch.from_numpy(array.astype(np.float16))
        for stack in ("encoder", "decoder")
        for name, array in _stack(variables, stack)
    }
    vocab_size, size = tensors["model.decoder.embed_tokens.weight"].shape
    layers = {
        stack: len({name.split(".")[3] for name in tensors if f"{stack}.layers" in name})
        for stack in ("encoder", "decoder")
    }
    tokens = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    num_heads = int(variables["encoder/num_heads"])
    model_config = transformers.WhisperConfig(
        vocab_size=vocab_size,
        d_model=size,
        num_mel_bins=tensors["model.encoder.conv1.weight"].shape[1],
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=num_heads,
        decoder_attention_heads=num_heads,
        encoder_ffn_dim=len(tensors["model.encoder.layers.0.fc1.weight"]),
        decoder_ffn_dim=len(tensors["model.decoder.layers.0.fc1.weight"]),
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=start,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    with torch.device("meta"):
        model = transformers.WhisperForConditionalGeneration(model_config)
    state: dict[str, Any] = tensors | {
        "proj_out.weight": tensors["model.decoder.embed_tokens.weight"]
    }
    model.load_state_dict(state, assign=True)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        suppress_tokens=config["suppress_ids"],
        begin_suppress_tokens=config["suppress_ids_begin"],
        alignment_heads=config["alignment_heads"],
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        max_initial_timestamp_index=50,
        return_timestamps=False,
        max_length=448,
        **_languages(config, ids),
    )
    model.save_pretrained(target)
    transformers.WhisperFeatureExtractor(feature_size=model_config.num_mel_bins).save_pretrained(
        target
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(source / "tokenizer.json"),
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.save_pretrained(target)
    return target


def _languages(config: dict[str, Any], ids: dict[str, int]) -> dict[str, Any]:
    """Return the tokens of languages and tasks, which English models do not use."""
    if ids["<|endoftext|>"] == ENGLISH_END:
        return {"is_multilingual": False}
    languages = set(config["lang_ids"])
    return {
        "is_multilingual": True,
        "lang_to_id": {name: token for name, token in ids.items() if token in languages},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("translate", "transcribe")},
    }


def _stack(variables: dict[str, np.ndarray], stack: str) -> list[tuple[str, np.ndarray]]:
    """Return the tensors of the encoder or the decoder under transformers' names."""
    found = {
        name.removeprefix(f"{stack}/"): array
        for name, array in variables.items()
        if name.startswith(f"{stack}/") and array.ndim
    }
    renamed: list[tuple[str, np.ndarray]] = []
    for name, array in found.items():
        if name.startswith("projection/"):
            continue
        parts = name.split("/")
        if parts[0] == "position_encodings":
            renamed.append((f"{stack}.embed_positions.weight", array))
        elif parts[0] == "embeddings":
            renamed.append((f"{stack}.embed_tokens.weight", array))
        elif parts[0] in ("conv1", "conv2"):
            renamed.append((f"{stack}.{parts[0]}.{parts[1]}", array))
        elif parts[0] == "layer_norm":
            renamed.append((f"{stack}.layer_norm.{_norm_part(parts[1])}", array))
        else:
            prefix = f"{stack}.layers.{parts[0].removeprefix('layer_')}"
            renamed += _layer(prefix, parts[1:], array)
    return renamed


def _layer(prefix: str, parts: list[str], array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    block, kind = parts[0], parts[-1]
    if block == "ffn":
        if parts[1] == "layer_norm":
            return [(f"{prefix}.final_layer_norm.{_norm_part(kind)}", array)]
        return [(f"{prefix}.fc{int(parts[1][-1]) + 1}.{kind}", array)]
    name = "encoder_attn" if block == "attention" else "self_attn"
    if parts[1] == "layer_norm":
        return [(f"{prefix}.{name}_layer_norm.{_norm_part(kind)}", array)]
    index = int(parts[1].removeprefix("linear_"))
    if name == "self_attn":
        names = (["q_proj", "k_proj", "v_proj"], ["out_proj"])[index]
    else:
        names = (["q_proj"], ["k_proj", "v_proj"], ["out_proj"])[index]
    # Keys have no bias in transformers, and one of zeros here.
    return [
        (f"{prefix}.{name}.{each}.{kind}", part)
        for each, part in zip(names, np.split(array, len(names)), strict=True)
        if (each, kind) != ("k_proj", "bias")
    ]


def _norm_part(kind: str) -> str:
    return {"gamma": "weight", "beta": "bias"}[kind]


def _number(file: BinaryIO, kind: str) -> int:
    return int(struct.unpack(kind, file.read(struct.calcsize(kind)))[0])


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "<H")).rstrip(b"\0").decode()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
