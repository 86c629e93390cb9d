"""A tiny DiffusionGemma, and the loop of transformers that denoises its canvases, with Engine's random tokens.

The loop encodes all tokens before a canvas in every pass, and has no cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from engine.workers.sampling.random import Stream, uniforms
from support.checkpoints.tiny import sentencepiece_tokenizer
from transformers.models.diffusion_gemma import generation_diffusion_gemma as published

SETTINGS = {
    "max_denoising_steps": 7,
    "entropy_bound": 1.0,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 6.0,
}


class Generated(NamedTuple):
    """The tokens of canvases, the number of passes over each, and the log-probabilities of the last passes."""

    token_ids: list[int]
    passes: list[int]
    logprobs: list[float]


class CanvasModel(NamedTuple):
    """A model of transformers, and the number of tokens of a canvas."""

    model: Any
    size: int

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], max_tokens: int, seed: int, **changes: float
    ) -> Generated:
        """Denoise canvas after canvas. Candidates are the most probable tokens. `changes` replace settings."""
        settings: dict[str, Any] = SETTINGS | changes
        most = settings["max_denoising_steps"]
        known, found = list(prompt), Generated([], [], [])
        config = published.EntropyBoundSamplerConfig(settings["entropy_bound"])
        vocab_size = self.model.config.text_config.vocab_size
        sampler = published.EntropyBoundSampler(config, self.size, vocab_size, most)
        schedule = published.LinearTemperatureScheduleLogitsProcessor(
            settings["t_min"], settings["t_max"], most
        )
        stopping = published.StableAndConfidentStoppingCriteria(
            settings["stability_threshold"], settings["confidence_threshold"]
        )
        while len(found.token_ids) < max_tokens:
            stopping.reset()
            logits = None
            canvas = self._random_tokens(len(known), seed, 0)
            for number in range(1, most + 1):
                raw = self.model(
                    input_ids=torch.tensor([known]),
                    decoder_input_ids=canvas,
                    self_conditioning_logits=logits,
                ).logits
                logits = schedule(None, raw, cur_step=most - number + 1)
                likely = logits.argmax(-1)
                accepted = sampler.accept_canvas(canvas, likely, logits, number)
                random = self._random_tokens(len(known), seed, number)
                canvas = torch.where(sampler.accepted_token_mask, accepted, random)
                if stopping(likely, logits):
                    break
            known += likely[0].tolist()
            found.token_ids.extend(likely[0].tolist())
            found.passes.append(number)
            found.logprobs.extend(raw.log_softmax(-1).amax(-1)[0].tolist())
        return Generated(found.token_ids[:max_tokens], found.passes, found.logprobs[:max_tokens])

    def _random_tokens(self, first: int, seed: int, number: int) -> torch.Tensor:
        draws = (first + np.arange(self.size)) * 1024 + number
        fractions = uniforms(np.full(self.size, seed), draws, Stream.CANVAS)
        vocab_size = self.model.config.text_config.vocab_size
        return torch.from_numpy((fractions * vocab_size).astype(np.int64))[None]


def diffusion_gemma(directory: Path, size: int = 4, **text: Any) -> CanvasModel:
    """Write a DiffusionGemma whose context and canvases have other layer scales."""
    tokenizer = sentencepiece_tokenizer()
    ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    settings = {
        **ids,
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "sliding_window": 20,
        "max_position_embeddings": 2048,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "self_conditioning_size": 96,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    torch.manual_seed(11)
    config = transformers.DiffusionGemmaConfig(
        text_config=settings | text, vision_config=vision, canvas_length=size
    )
    model = transformers.DiffusionGemmaForBlockDiffusion(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # With larger weights, rounding errors change tokens within a few passes.
            parameter.normal_(
                0, 0.4 if "embed_tokens" in name else 0.03 if "self_cond" in name else 0.1
            )
            if name.endswith(("norm.weight", "_1.weight", "_2.weight", "scale")):
                parameter += 1
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    generation: dict[str, Any] = {**SETTINGS, "eos_token_id": tokenizer.eos_token_id}
    sampler = {"_cls_name": "EntropyBoundSamplerConfig"}
    sampler["entropy_bound"] = generation.pop("entropy_bound")
    generation["sampler_config"] = sampler
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return CanvasModel(model, size)
