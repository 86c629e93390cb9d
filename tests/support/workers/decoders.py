"""Load a checkpoint and run its decoder over a paged cache, without the rest of the engine."""

import math
import random
from functools import partial

import numpy as np
import torch
from engine.workers.attention import AttentionSpec, attention_backend
from engine.workers.batch.spans import span_layers
from engine.workers.cpu.attention import NativeAttention
from engine.workers.cpu.decoder import NativeDecoder
from engine.workers.cpu.tower_layers import NativeLayers
from engine.workers.layers.parallel.shard import ModelShard
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.models.decoder import Decoder
from engine.workers.models.families import model_spec
from engine.workers.models.kv_cache_groups import group_layers
from engine.workers.models.mixers import StateBatch
from engine.workers.towers.layers import TorchLayers
from msgspec.structs import replace
from support.workers.batches import Scheduled, attention_batch, positions

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
    **options,
):
    checkpoint = open_checkpoint(path)
    spec = group_layers(model_spec(checkpoint.config, path), max_model_len, block_size=block_size)
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
        **options,
    )


def load_native_decoder(
    path, *, dtype=torch.float32, cache_dtype=None, block_size=256, max_model_len=256, **options
):
    """Load a native program, with blocks that are large enough for states."""
    checkpoint = open_checkpoint(path)
    spec = group_layers(model_spec(checkpoint.config, path), max_model_len, block_size=block_size)
    attention = AttentionSpec.from_model(
        spec,
        ModelShard.whole(spec),
        block_size=block_size,
        dtype=cache_dtype or dtype,
        device=CPU,
    )
    return NativeDecoder(
        spec,
        checkpoint,
        NativeAttention(attention),
        dtype=dtype,
        max_model_len=max_model_len,
        **options,
    )


TOWER_LAYERS = {
    load_decoder: TorchLayers,
    load_native_decoder: partial(NativeLayers, num_threads=1),
}
"""The layers of towers that belong to each kind of decoder."""


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
        self._is_native = isinstance(decoder, NativeDecoder)
        self.kv_caches = []
        self.attention_by_group = {}
        shard = ModelShard.whole(decoder.spec)
        entries = {}
        for index, layer in enumerate(decoder.spec.layers):
            device = decoder.attention.device
            if layer.cache_source is not None:
                self.kv_caches.append(self.kv_caches[layer.cache_source])
            elif layer.attends:
                attention = decoder.attention.for_layer(decoder.spec.for_layer(layer), shard)
                self.attention_by_group[layer.kv_cache_group] = attention
                shape = attention.kv_cache_shape(num_blocks)
                self.kv_caches.append(torch.zeros(shape, dtype=dtype, device=device))
                if (compression := layer.compression) is not None:
                    source = index if compression.source is None else compression.source
                    if source == index:
                        entries[index] = torch.zeros(shape, dtype=dtype, device=device)
                    self.kv_caches.append(entries[source])
            if layer.recurrent is not None:
                num_bytes = layer.recurrent.state_parts.size(1).num_bytes(
                    decoder.hidden_dtype.itemsize
                )
                if self._is_native:
                    page_bytes = math.prod(shape[1:]) * dtype.itemsize
                    assert num_bytes <= page_bytes
                    num_bytes = page_bytes
                shape_of_states = (num_blocks, num_bytes)
                # Whatever the block held before must not matter.
                states = torch.full(shape_of_states, 255, dtype=torch.uint8, device=device)
                self.kv_caches.append(states)
        self.computed = [0] * num_requests
        self.texts = [[] for _ in range(num_requests)]
        """The tokens of the requests."""
        self.num_prompt_tokens = None
        """The length of all prompts; None if all tokens are those of prompts."""
        self.spans = None
        """The spans of the requests, whose slots are their numbers."""

    def step(self, chunks):
        """Run {request: its next tokens}; return the logits of every token of each."""
        logits = self.decoder.compute_logits(self.hidden(chunks))
        lengths = [len(tokens) for tokens in chunks.values()]
        return dict(zip(chunks, logits.split(lengths), strict=True))

    def hidden(self, chunks):
        """Run {request: its next tokens}; return the hidden states of all tokens."""
        scheduled = []
        for request, tokens in chunks.items():
            end = self.computed[request] + len(tokens)
            blocks = self.blocks[request][: -(-end // self.block_size)]
            scheduled.append(Scheduled(self.computed[request], len(tokens), blocks))
            self.computed[request] = end
            self.texts[request] += tokens
        batch = attention_batch(scheduled, self.block_size)
        device, spec = self.decoder.attention.device, self.decoder.spec
        if self.spans is not None:
            places = np.array(list(chunks)), batch.query_start_loc, positions(scheduled).numpy()
            batch = replace(
                batch,
                visible=self.spans.visible_tokens(*places),
                span_layers=span_layers(spec.span_kind),
            )
        if self.num_prompt_tokens is not None:
            lengths = np.full(len(chunks), self.num_prompt_tokens, np.int32)
            batch = replace(batch, num_prompt_tokens=lengths)
        metadata = [
            self.attention_by_group.get(group, self.decoder.attention).build(batch, windows)
            if layer is None or self._is_native
            else StateBatch.build(batch, self.block_size, layer, device)
            for group, (windows, layer) in enumerate(
                zip(spec.windows_by_group, spec.recurrent_by_group, strict=True)
            )
        ]
        if count := spec.num_earlier_tokens:
            self.decoder.earlier_TW = torch.tensor(
                [
                    ([-1] * count + self.texts[request])[end : end + count][::-1]
                    for request, tokens in chunks.items()
                    for end in range(self.computed[request] - len(tokens), self.computed[request])
                ]
            )
        return self.decoder.forward(
            torch.tensor([token for tokens in chunks.values() for token in tokens]).to(device),
            positions(scheduled).to(device),
            self.kv_caches,
            metadata,
        )

    def greedy(self, prompt, num_tokens, request=0):
        """Return the continuation of a prompt."""
        text, chunk = [], prompt
        for _ in range(num_tokens):
            chunk = [int(self.step({request: chunk})[request][-1].argmax())]
            text += chunk
        return text
