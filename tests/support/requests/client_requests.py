"""Requests of tests of the engine client."""

from engine.frontend.client.engine_client import SequenceRequest
from engine.protocol.sampling_params import SamplingParams
from support.servers.engine_fixtures import smollm2_tokenizer

PROMPT = smollm2_tokenizer().encode("The quick brown fox jumps over the lazy dog. ")


def request(max_tokens: int = 4, prompt: list[int] = PROMPT, **params: object) -> SequenceRequest:
    return SequenceRequest(prompt, SamplingParams(max_tokens=max_tokens, **params))  # type: ignore[arg-type]
