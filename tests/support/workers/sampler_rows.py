"""A sampler driven as the model runner drives it."""

from typing import Protocol

import numpy as np
import torch
from engine.protocol.arrays import int32_view
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import RowLogprobs
from engine.workers.batch import PersistentBatch
from engine.workers.cpu.decoder import NativeDecoder
from engine.workers.sampling import (
    ChooseTokens,
    Grammar,
    Sampler,
    SamplerOutput,
    TorchSampler,
    choose_tokens,
    prompt_logprobs,
)

EOS = 2
CPU = torch.device("cpu")


def tokens_of(output: SamplerOutput) -> list[int]:
    return int32_view(output.sampled_token_ids).tolist()


class Rows:
    """A sampler and the requests in its slots. It is the sampler of `decoder`, or else torch's with `choose`."""

    def __init__(
        self,
        vocab_size: int,
        num_slots: int = 80,
        choose: ChooseTokens = choose_tokens,
        device: torch.device = CPU,
        decoder: NativeDecoder | None = None,
    ) -> None:
        self.device = device
        self._decoder = decoder
        self.batch = PersistentBatch(num_slots, 4096, 16, 1, CPU)
        self.lengths = self.batch.num_tokens
        self.sampler: Sampler
        if decoder is None:
            self.sampler = TorchSampler(num_slots, vocab_size, device, choose)
        else:
            assert decoder.spec.vocab_size == vocab_size
            self.sampler = decoder.make_sampler(self.batch)

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt: tuple[int, ...] = (3, 4, 5),
        output: tuple[int, ...] = (),
    ) -> None:
        self.sampler.add_request(
            slot, params, np.array(prompt, np.int32), (EOS,), np.array(output, np.int32)
        )
        tokens = torch.tensor([*prompt, *output], dtype=torch.int32)
        self.batch.token_ids_NL[slot, : len(tokens)] = tokens
        self.batch.num_prompt_tokens[slot] = len(prompt)
        self.lengths[slot] = len(tokens)

    def sample(
        self, logits: torch.Tensor, slots: list[int], grammar: Grammar | None = None
    ) -> SamplerOutput:
        slots_S = np.array(slots, np.int32)
        output = self.sampler.sample(
            logits.to(self.device, copy=True), slots_S, self.lengths[slots_S], grammar
        )
        self.batch.append_tokens(slots_S, torch.as_tensor(output.token_ids).cpu())
        return output

    def score_prompt(
        self,
        slot: int,
        logits: torch.Tensor,
        next_ids: list[int],
        count: int,
        listed: list[list[int]] | None = None,
    ) -> RowLogprobs:
        """`listed` are the listed tokens of each position."""
        listed_TK = np.array(listed or [[]] * len(next_ids), np.int32)
        if self._decoder is None:
            return prompt_logprobs(slot, logits, torch.tensor(next_ids), count, listed_TK)
        score = self._decoder.make_prompt_scorer(len(next_ids))
        return score(slot, logits.clone(), np.array(next_ids, np.int32), count, listed_TK)

    def tokens(self, logits: torch.Tensor, slots: list[int]) -> list[int]:
        return tokens_of(self.sample(logits, slots))


class NewRows(Protocol):
    def __call__(self, vocab_size: int) -> Rows: ...
