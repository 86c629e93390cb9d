"""Choose the next token of every row of a batch from its logits."""

from .choice import choose_greedy, choose_tokens
from .logprobs import Logprobs, prompt_logprobs
from .metadata import SamplingMetadata
from .sampler import Grammar, Sampler, SamplerOutput
from .torch_sampler import ChooseTokens, TorchSampler

__all__ = [
    "ChooseTokens",
    "Grammar",
    "Logprobs",
    "Sampler",
    "SamplerOutput",
    "SamplingMetadata",
    "TorchSampler",
    "choose_greedy",
    "choose_tokens",
    "prompt_logprobs",
]
