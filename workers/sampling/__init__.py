"""Choosing the next token of every row of a batch from its logits."""

from .choice import choose_greedy, choose_tokens
from .logprobs import prompt_logprobs
from .metadata import SamplingMetadata
from .sampler import Sampler, SamplerOutput

__all__ = [
    "Sampler",
    "SamplerOutput",
    "SamplingMetadata",
    "choose_greedy",
    "choose_tokens",
    "prompt_logprobs",
]
