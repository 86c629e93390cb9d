"""A sampler driven as the model runner drives it."""

import numpy as np
import torch
from engine.protocol.arrays import int32_view
from engine.protocol.sampling_params import SamplingParams
from engine.workers.sampling import Sampler, SamplerOutput, choose_tokens
from engine.workers.sampling.sampler import ChooseTokens

EOS = 2
CPU = torch.device("cpu")


class Rows:
    """Requests in a sampler, by slot. Slot s has `prompt` tokens 3, 4, 5 unless told otherwise."""

    def __init__(
        self,
        vocab_size: int,
        num_slots: int = 80,
        choose: ChooseTokens = choose_tokens,
        device: torch.device = CPU,
    ) -> None:
        self.sampler = Sampler(num_slots, vocab_size, device, choose)
        self.device = device
        self.lengths = np.zeros(num_slots, np.int32)

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt: tuple[int, ...] = (3, 4, 5),
        output: tuple[int, ...] = (),
    ) -> None:
        self.sampler.add(
            slot, params, np.array(prompt, np.int32), (EOS,), np.array(output, np.int32)
        )
        self.lengths[slot] = len(prompt) + len(output)

    def sample(
        self,
        logits: torch.Tensor,
        slots: list[int],
        grammar: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> SamplerOutput:
        slots_S = np.array(slots, np.int32)
        output = self.sampler.sample(
            logits.to(self.device, copy=True), slots_S, self.lengths[slots_S], grammar
        )
        self.lengths[slots_S] += 1
        return output

    def tokens(self, logits: torch.Tensor, slots: list[int]) -> list[int]:
        return int32_view(self.sample(logits, slots).sampled_token_ids).tolist()
