"""Random batches of paged attention, and the same attention in plain float64."""

import math

import numpy as np
import torch
from engine.workers.attention import AttentionLayer, AttentionSpec, attention_backend
from engine.workers.batch import AttentionBatch
from engine.workers.layers.window import Chunk
from msgspec.structs import replace
from support.workers.batches import Scheduled, attention_batch

CPU = torch.device("cpu")


def reference(q_TGQK, k_LGK, v_LGK, layer, span=None, *, rounds_alibi=False):
    """Return plain attention of the last T of L tokens. Those of `span` see each other, whatever the window."""
    num_queries, num_keys = len(q_TGQK), len(k_LGK)
    scores = torch.einsum("tgqk,lgk->gqtl", q_TGQK.double(), k_LGK.double()) * layer.scale
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    query = torch.arange(num_keys - num_queries, num_keys, device=scores.device)[:, None]
    key = torch.arange(num_keys, device=scores.device)
    if layer.alibi_slopes_H is not None:
        slopes = layer.alibi_slopes_H.view(*scores.shape[:2], 1, 1)
        if rounds_alibi:
            scores = scores + (slopes.bfloat16() * key.bfloat16()).double() * layer.scale
        else:
            scores = scores - slopes.double() * (query - key)
    hidden = key > query
    if isinstance(layer.window, Chunk):
        hidden |= (
            key // layer.window.size < query // layer.window.size + 1 - layer.window.num_chunks
        )
    elif layer.window is not None:
        hidden |= key <= query - layer.window
    if span is not None:
        hidden &= ~((query >= span[0]) & (query < span[1]) & (key >= span[0]) & (key < span[1]))
    scores = scores.masked_fill(hidden, -math.inf)
    if layer.sinks_H is not None:
        sinks = layer.sinks_H.double().view(*scores.shape[:2], 1, 1).expand(-1, -1, num_queries, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., :num_keys]
    return torch.einsum("gqtl,lgk->tgqk", weights, v_LGK.double())


def special_layers(num_heads, device=CPU):
    """Return layers with mechanisms that few families have, by name."""
    torch.manual_seed(1)
    values = torch.rand(num_heads).to(device)
    return {
        "alibi": AttentionLayer(0.25, alibi_slopes_H=values / 8),
        "alibi, soft cap": AttentionLayer(0.25, softcap=4.0, alibi_slopes_H=values / 8),
        "rounded alibi": AttentionLayer(0.25, alibi_slopes_H=values / 8),
        "sinks": AttentionLayer(0.25, sinks_H=4 * values),
        "sinks, window": AttentionLayer(0.25, window=40, softcap=4.0, sinks_H=4 * values),
        "chunks": AttentionLayer(0.25, window=Chunk(24)),
        "long chunks": AttentionLayer(0.25, window=Chunk(600)),
        "two chunks": AttentionLayer(0.25, window=Chunk(24, sees_previous=True)),
        "two long chunks": AttentionLayer(0.25, window=Chunk(70, sees_previous=True)),
    }


SPAN_CASES = {
    "requests": [(0, 150), (70, 1), (20, 60), (64, 40), (0, 5)],
    "spans": [(30, 120), None, (20, 75), (70, 104), (0, 5)],
}
"""Requests with a span of tokens that see each other: in the middle, after a cached part of it, and as a whole."""

SPECIAL_LAYERS = tuple(special_layers(1))


def special_case(name, num_heads, device=CPU):
    """Return the arguments of `PagedCase` for one of the special layers."""
    layer = special_layers(num_heads, device)[name]
    return {"layer": layer, "rounds_alibi": name.startswith("rounded")}


class OneSequence:
    """A sequence of 150 random tokens in half precision, computed in several steps."""

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
        """Return the output of tokens [first, last) in one step; earlier tokens must have been computed."""
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
        latent_rank=0,
        seed=0,
        backend_name="torch_paged",
        device=CPU,
        spans=None,
        rounds_alibi=False,
    ):
        torch.manual_seed(seed)
        self.spans = spans or [None] * len(requests)
        self.layer, self.dtype, self.device = layer, dtype, device
        self.num_kv_heads, self.repeats = num_kv_heads, repeats
        spec = AttentionSpec(
            num_heads=num_kv_heads * repeats,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=cache_dtype or dtype,
            device=device,
            reads_distances=layer.alibi_slopes_H is not None,
            rounds_alibi=rounds_alibi,
            latent_rank=latent_rank,
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
        """Return queries, keys and values; those for a quantized cache are exactly representable."""
        shape = (sum(lengths), self.num_kv_heads, self.backend.head_dim)
        q = torch.randn(shape[0], self.num_kv_heads * self.repeats, shape[2])
        kv = torch.randn(2, *shape)
        if self.backend.dtype.itemsize == 1:
            scales = torch.ones(2, self.num_kv_heads)
            if self.layer.kv_scales_2G is not None:
                scales = self.layer.kv_scales_2G.cpu()
            kv = kv.to(self.backend.dtype).float() * scales[:, None, :, None]
        if self.backend.spec.latent_rank:
            kv[1] = kv[0]
        return (x.to(self.dtype).to(self.device) for x in (q, *kv))

    def batch(self, rows=None):
        """Return the batch of the step, or of some of its requests."""
        steps = self.steps if rows is None else [self.steps[i] for i in rows]
        batch = attention_batch(steps, self.backend.block_size)
        spans = self.spans if rows is None else [self.spans[i] for i in rows]
        if not any(spans):
            return batch
        visible = np.concatenate([_visible(*each) for each in zip(steps, spans, strict=True)])
        return replace(batch, visible=visible)

    def forward(self, rows=None):
        """Return the attention output of these requests' tokens."""
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
        """Return the positions of these requests' tokens in the whole step."""
        starts = np.cumsum([0, *(step.num_scheduled for step in self.steps)])
        rows = range(len(self.steps)) if rows is None else rows
        return torch.cat([torch.arange(starts[i], starts[i + 1]) for i in rows])

    def expected(self):
        """Return the expected output in float64."""
        lengths = [step.num_scheduled for step in self.steps]
        parts = (x.split(lengths) for x in (self.q_THK, self.k_TGK, self.v_TGK))
        return torch.cat(
            [
                reference(
                    q.unflatten(1, (self.num_kv_heads, self.repeats)),
                    torch.cat((k_before, k)),
                    torch.cat((v_before, v)),
                    self.layer,
                    span,
                    rounds_alibi=self.backend.spec.rounds_alibi,
                ).flatten(1, 2)[..., : self.backend.value_dim]
                for q, k, v, (k_before, v_before), span in zip(
                    *parts, self._earlier, self.spans, strict=True
                )
            ]
        )


def _visible(step, span):
    """Return which tokens each token of a request sees, [T, 2]."""
    positions = np.arange(step.num_computed, step.num_computed + step.num_scheduled)
    visible = np.stack((positions, positions + 1), 1).astype(np.int32)
    if span is not None:
        visible[(positions >= span[0]) & (positions < span[1])] = span
    return visible


def run(requests, **case):
    """Return outputs and expected values of one step of requests (tokens before it, tokens of it)."""
    paged = PagedCase(requests, **case)
    return paged.forward(), paged.expected()


def attend_to_sources(backend_name, *, dtype, device):
    """Return the outputs of cross attention and their expected values.

    Requests have one query or several, more or fewer than their source has outputs.
    """
    torch.manual_seed(0)
    sources, queries, block_size, head_dim = [70, 5, 150, 20], [1, 9, 40, 1], 16, 16
    causal = AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    backend, layer = (
        attention_backend(causal, backend_name).as_bidirectional(),
        AttentionLayer(0.25),
    )
    ids = iter((np.random.default_rng(0).permutation(40) + 1).tolist())
    blocks = [[next(ids) for _ in range(-(-size // block_size))] for size in sources]
    kv_cache = torch.zeros(backend.kv_cache_shape(41), dtype=dtype, device=device)
    # Triton's interpreter stores one token after another, so torch stores the long sources.
    filler = attention_backend(causal, "torch_paged").as_bidirectional()
    stored = []
    for size, own in zip(sources, blocks, strict=True):
        k_EGK, v_EGK = torch.randn(2, size, 2, head_dim).to(dtype).to(device)
        batch = attention_batch([Scheduled(0, size, own)], block_size)
        storing = backend if size < 2 * block_size else filler
        storing.store(k_EGK, v_EGK, kv_cache, storing.build(batch, ()), layer)
        stored.append((k_EGK, v_EGK))
    q_THK = torch.randn(sum(queries), 4, head_dim).to(dtype).to(device)
    table = np.zeros((4, max(map(len, blocks))), np.int32)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = own
    batch = AttentionBatch(
        np.cumsum([0, *queries]).astype(np.int32),
        np.array(sources, np.int32),
        table,
        np.full(sum(queries), -1, np.int32),
    )
    out = backend.attend(q_THK, kv_cache, backend.build(batch, {None}), layer)
    expected = []
    for q_QHK, (k_EGK, v_EGK) in zip(q_THK.split(queries), stored, strict=True):
        q_QGRK = q_QHK.double().unflatten(1, (2, 2))
        scores = torch.einsum("qgrk,egk->grqe", q_QGRK, k_EGK.double()) * layer.scale
        values = torch.einsum("grqe,egk->qgrk", scores.softmax(-1), v_EGK.double())
        expected.append(values.flatten(1, 2))
    return out.double(), torch.cat(expected)
