"""Write a GGUF model of the Llama architecture as a Hugging Face directory in bf16.

    scripts/bench/run dequantize OUT_DIRECTORY [--model FILE.gguf]

For peers that cannot read GGUF. The weights are the quantized ones in a wider format, so all peers run the same model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from engine.frontend.tokenizer.converted import converted_directory
from engine.workers.loaders import open_checkpoint
from safetensors.torch import save_file
from support.servers.server import default_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="model to measure (default: the default model)")
    arguments = parser.parse_args()
    path, out = arguments.model or Path(default_model()), arguments.out
    checkpoint = open_checkpoint(path)
    if checkpoint.config["model_type"] != "llama":
        raise SystemExit(f"--model: {path} is {checkpoint.config['model_type']}, not llama")
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: checkpoint.tensor(name, torch.bfloat16) for name in checkpoint.names()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **checkpoint.config}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for file in converted_directory(path).iterdir():
        shutil.copy(file, out)


if __name__ == "__main__":
    main()
