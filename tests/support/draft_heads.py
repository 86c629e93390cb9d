"""Random drafting heads, as modules and as files."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama


class Fusion(nn.Module):
    """The product that begins a head, and the norms before it."""

    def __init__(self, size: int, *, has_norms: bool, has_bias: bool = False) -> None:
        super().__init__()
        self.embedding_norm = llama.LlamaRMSNorm(size, 1e-6) if has_norms else nn.Identity()
        self.hidden_norm = llama.LlamaRMSNorm(size, 1e-6) if has_norms else nn.Identity()
        self.projection = nn.Linear(2 * size, size, bias=has_bias)

    def forward(self, embedded_TD: Tensor, hidden_TD: Tensor, *, has_hidden_first: bool) -> Tensor:
        parts = [self.embedding_norm(embedded_TD), self.hidden_norm(hidden_TD)]
        return self.projection(torch.cat(parts[::-1] if has_hidden_first else parts, -1))


def randomize(module: nn.Module) -> nn.Module:
    for name, parameter in module.named_parameters():
        is_norm = "norm" in name
        nn.init.normal_(parameter, float(is_norm), 0.1 if is_norm else 0.2)
    return module.eval()


def write_eagle_head(
    directory: Path, config: transformers.LlamaConfig
) -> tuple[llama.LlamaDecoderLayer, Fusion]:
    """Write an EAGLE head as published for Llama 3: `fc`, and a layer without input norm. Return its modules."""
    layer = llama.LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    fusion = Fusion(config.hidden_size, has_norms=False, has_bias=True)
    for module in (layer, fusion):
        randomize(module)
    one_layer = transformers.LlamaConfig(**config.to_dict() | {"num_hidden_layers": 1})
    one_layer.architectures = ["LlamaForCausalLM"]
    one_layer.save_pretrained(directory)
    tensors = {f"layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    tensors |= {f"fc.{name}": tensor for name, tensor in fusion.projection.state_dict().items()}
    tensors["embed_tokens.weight"] = torch.zeros(config.vocab_size, config.hidden_size)
    save_file(tensors, directory / "model.safetensors")
    return layer, fusion
