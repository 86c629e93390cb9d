"""Choosing the next token of every row of a batch from its logits."""

from .logprobs import prompt_logprobs
from .sampler import Sampler, SamplerOutput

__all__ = ["Sampler", "SamplerOutput", "prompt_logprobs"]
