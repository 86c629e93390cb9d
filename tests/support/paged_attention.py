"""Random batches of paged attention, and the same attention written out in float64."""

import math

import numpy as np
import torch
from engine.workers.attention import AttentionLayer, AttentionSpec, attention_backend
from support.batches import Scheduled, attention_batch

CPU = torch.device("cpu")


def reference(q_TGQK, k_LGK, v_LGK, layer):
    """Attention of the last T of L tokens, with nothing clever."""
    num_queries, num_keys = len(q_TGQK), len(k_LGK)
    scores = torch.einsum("tgqk,lgk->gqtl", q_TGQK.double(), k_LGK.double()) * layer.scale
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    query = torch.arange(num_keys - num_queries, num_keys, device=scores.device)[:, None]
    key = torch.arange(num_keys, device=scores.device)
    hidden = key > query
    if layer.window is not None:
        hidden |= key <= query - layer.window
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("gqtl,lgk->tgqk", weights, v_LGK.double())


class OneSequence:
    """150 random tokens in half precision that attend to each other, some in each step."""

    def __init__(self, backend_name, *, num_heads, num_kv_heads, window=None, device=CPU):
        self.window = window
        spec = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=16,
            block_size=16,
            dtype=torch.float16,
            device=device,
        )
        self.backend = attention_backend(spec, backend_name)
        self.layer = AttentionLayer(scale=0.3, window=window)
        torch.manual_seed(0)
        self.qkv = [
            torch.randn(150, heads, 16).half().to(device)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        ]
        shape = self.backend.kv_cache_shape(11)
        self.kv_cache = torch.zeros(shape, dtype=torch.float16, device=device)

    def attend(self, first, last):
        """What tokens [first, last) get, in a step of their own; those before must have had theirs."""
        batch = attention_batch([Scheduled(first, last - first, range(1, 11))], 16)
        qkv = (x[first:last] for x in self.qkv)
        metadata = self.backend.build(batch, {self.window})
        return self.backend.forward(*qkv, self.kv_cache, metadata, self.layer)


class PagedCase:
    """A backend with a cache, and requests whose earlier tokens are in it, in shuffled blocks."""

    def __init__(
        self,
        requests,
        *,
        num_kv_heads,
        repeats,
        head_dim,
        block_size,
        layer,
        dtype,
        cache_dtype=None,
        seed=0,
        backend_name="torch_paged",
        device=CPU,
    ):
        torch.manual_seed(seed)
        self.layer, self.dtype, self.device = layer, dtype, device
        self.num_kv_heads, self.repeats = num_kv_heads, repeats
        spec = AttentionSpec(
            num_heads=num_kv_heads * repeats,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=cache_dtype or dtype,
            device=device,
        )
        self.backend = attention_backend(spec, backend_name)
        sizes = [-(-(computed + scheduled) // block_size) for computed, scheduled in requests]
        ids = iter((np.random.default_rng(seed).permutation(sum(sizes) + 3) + 1).tolist())
        self.steps = [
            Scheduled(computed, scheduled, [next(ids) for _ in range(size)])
            for (computed, scheduled), size in zip(requests, sizes, strict=True)
        ]
        cache_shape = self.backend.kv_cache_shape(sum(sizes) + 4)
        self.kv_cache = torch.zeros(cache_shape, dtype=self.backend.dtype, device=device)
        self.q_THK, self.k_TGK, self.v_TGK = self._random(
            [step.num_scheduled for step in self.steps]
        )
        # The layout is the same for all backends of this interface, and torch's does many tokens at once.
        is_quantized = self.backend.dtype.itemsize == 1
        filler = self.backend if is_quantized else attention_backend(spec, "torch_paged")
        earlier = [Scheduled(0, step.num_computed, step.blocks) for step in self.steps]
        lengths = [step.num_scheduled for step in earlier]
        q, k, v = self._random(lengths)
        self._earlier = list(zip(k.split(lengths), v.split(lengths), strict=True))
        earlier = [step for step in earlier if step.num_scheduled]
        if earlier:
            metadata = filler.build(attention_batch(earlier, block_size), {layer.window})
            filler.forward(q, k, v, self.kv_cache, metadata, layer)

    def _random(self, lengths):
        """Queries, keys and values; those for a quantised cache are such that it holds them exactly."""
        shape = (sum(lengths), self.num_kv_heads, self.backend.head_dim)
        q = torch.randn(shape[0], self.num_kv_heads * self.repeats, shape[2])
        kv = torch.randn(2, *shape)
        if self.backend.dtype.itemsize == 1:
            scales = torch.ones(2, self.num_kv_heads)
            if self.layer.kv_scales_2G is not None:
                scales = self.layer.kv_scales_2G.cpu()
            kv = kv.to(self.backend.dtype).float() * scales[:, None, :, None]
        return (x.to(self.dtype).to(self.device) for x in (q, *kv))

    def batch(self, rows=None):
        """The step, or only some of its requests."""
        steps = self.steps if rows is None else [self.steps[i] for i in rows]
        return attention_batch(steps, self.backend.block_size)

    def forward(self, rows=None):
        """What these requests' tokens attend to."""
        tokens = self.tokens(rows)
        metadata = self.backend.build(self.batch(rows), {self.layer.window})
        return self.backend.forward(
            self.q_THK[tokens],
            self.k_TGK[tokens],
            self.v_TGK[tokens],
            self.kv_cache,
            metadata,
            self.layer,
        )

    def tokens(self, rows=None):
        """Where these requests' tokens are in the whole step."""
        starts = np.cumsum([0, *(step.num_scheduled for step in self.steps)])
        rows = range(len(self.steps)) if rows is None else rows
        return torch.cat([torch.arange(starts[i], starts[i + 1]) for i in rows])

    def expected(self):
        """The same in float64."""
        lengths = [step.num_scheduled for step in self.steps]
        parts = (x.split(lengths) for x in (self.q_THK, self.k_TGK, self.v_TGK))
        return torch.cat(
            [
                reference(
                    q.unflatten(1, (self.num_kv_heads, self.repeats)),
                    torch.cat((k_before, k)),
                    torch.cat((v_before, v)),
                    self.layer,
                ).flatten(1, 2)
                for q, k, v, (k_before, v_before) in zip(*parts, self._earlier, strict=True)
            ]
        )


def run(requests, **case):
    """Outputs and truth of one step of requests (tokens before it, tokens of it)."""
    paged = PagedCase(requests, **case)
    return paged.forward(), paged.expected()
