"""Loads a checkpoint and steps its decoder over a paged cache, without the rest of the engine."""

import random

import torch
from engine.workers.attention import AttentionSpec, attention_backend
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.models.decoder import Decoder
from engine.workers.models.families import model_spec
from engine.workers.parallel.shard import ModelShard
from support.batches import Scheduled, attention_batch, positions

CPU = torch.device("cpu")


def load_decoder(
    path,
    *,
    dtype=torch.float32,
    max_model_len=256,
    block_size=4,
    kernels=None,
    device=CPU,
    on_progress=None,
):
    checkpoint = open_checkpoint(path)
    spec = model_spec(checkpoint.config, path)
    shard = ModelShard.whole(spec)
    attention = AttentionSpec.from_model(
        spec, shard, block_size=block_size, dtype=dtype, device=device
    )
    return Decoder(
        spec,
        checkpoint,
        attention_backend(attention),
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        kernels=kernels,
        on_progress=on_progress,
    )


class Runner:
    """Steps a decoder over its own cache; each request owns scattered blocks."""

    def __init__(self, decoder, num_requests=1, max_tokens=256):
        self.decoder = decoder
        self.block_size = decoder.attention.block_size
        blocks_each = -(-max_tokens // self.block_size)
        num_blocks = num_requests * blocks_each + 1
        ids = random.Random(0).sample(range(1, num_blocks), num_blocks - 1)
        self.blocks = [ids[i::num_requests] for i in range(num_requests)]
        shape = decoder.attention.kv_cache_shape(num_blocks)
        dtype = decoder.attention.dtype
        self.kv_caches = [
            torch.zeros(shape, dtype=dtype, device=decoder.attention.device)
            for _ in decoder.spec.layers
        ]
        self.computed = [0] * num_requests

    def step(self, chunks):
        """Run {request: its next tokens}; return the logits of every token of each."""
        scheduled = []
        for request, tokens in chunks.items():
            end = self.computed[request] + len(tokens)
            blocks = self.blocks[request][: -(-end // self.block_size)]
            scheduled.append(Scheduled(self.computed[request], len(tokens), blocks))
            self.computed[request] = end
        batch = attention_batch(scheduled, self.block_size)
        metadata = [
            self.decoder.attention.build(batch, windows)
            for windows in self.decoder.spec.windows_by_group
        ]
        device = self.decoder.attention.device
        hidden = self.decoder.forward(
            torch.tensor([token for tokens in chunks.values() for token in tokens]).to(device),
            positions(scheduled).to(device),
            self.kv_caches,
            metadata,
        )
        logits = self.decoder.compute_logits(hidden)
        lengths = [len(tokens) for tokens in chunks.values()]
        return dict(zip(chunks, logits.split(lengths), strict=True))

    def greedy(self, prompt, num_tokens, request=0):
        """Return the continuation of a prompt."""
        text, chunk = [], prompt
        for _ in range(num_tokens):
            chunk = [int(self.step({request: chunk})[request][-1].argmax())]
            text += chunk
        return text
