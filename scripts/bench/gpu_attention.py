"""Measure the Triton attention kernels on a GPU, compared with torch's flash attention on the same shapes.

    scripts/bench/run gpu_attention [--heads 32 8 128] [--block-size 16] [--fp8] [--tune | --once] [--case NAME ...]

Each case is a JSON object on a line; `gpu --only attention` shows them as a table. The shapes belong to one layer of a
model. Each case also says how far the two results are apart. Torch's kernel reads
keys and values from contiguous memory, ours reads a paged cache in random order. `--tune` tries other tiles; `--once`
launches each case three times and measures nothing, for a profiler. Without a GPU the cases are tiny and the kernels
interpreted: that shows that the program works, and no more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import numpy as np
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from engine.workers.attention import AttentionLayer, AttentionSpec  # noqa: E402
from engine.workers.attention.kernels.tiles import Tile  # noqa: E402
from engine.workers.attention.triton_paged import TritonPagedAttention  # noqa: E402
from engine.workers.batch import AttentionBatch  # noqa: E402
from engine.workers.layers.rope import RotaryTables  # noqa: E402
from on_gpu.reporting import Reporter, add_done  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402


@dataclass(frozen=True, slots=True)
class Shape:
    """The attention of one layer: heads, head dimension, block size and dtype."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    is_fp8: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """Equal requests, each with `queries` tokens at the end of `keys` tokens."""

    name: str
    requests: int
    queries: int
    keys: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds for one layer with Engine's kernel, with torch's flash attention and with cuDNN's.

    `error` is the largest difference from torch's, `of_torch` the speed relative to the faster of the two.
    """

    ms: float
    tflops: float
    gb_per_s: float
    torch_ms: float | None = None
    cudnn_ms: float | None = None
    of_torch: float | None = None
    error: float | None = None


CASES = (
    Case("prefill 8k", 1, 8192, 8192),
    Case("prefill 8 x 1k", 8, 1024, 1024),
    Case("prefill 2k after 6k", 1, 2048, 8192),
    Case("decode 1 x 2k", 1, 1, 2048),
    Case("decode 1 x 128k", 1, 1, 131072),
    Case("decode 64 x 2k", 64, 1, 2048),
    Case("decode 256 x 2k", 256, 1, 2048),
)
TINY_CASES = (Case("prefill", 2, 20, 40), Case("decode", 2, 1, 300))
PREFILL_TILES = [
    Tile(rows, keys, num_warps, num_stages)
    for rows, keys, num_warps, num_stages in product((64, 128), (64, 128), (4, 8), (2, 3))
    if num_warps == 8 or rows == 64
]
DECODE_TILES = [
    Tile(16, keys, num_warps, num_stages)
    for keys, num_warps, num_stages in product((32, 64, 128), (2, 4), (2, 3, 4))
]
SPLITS = (128, 256, 512)
BACKENDS = (
    [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION] if HAS_GPU else [SDPBackend.MATH]
)


class Layer:
    """Random tensors for a case, with a cache whose blocks are shuffled."""

    def __init__(self, case: Case, shape: Shape) -> None:
        self.case, self.shape = case, shape
        self.device = torch.device("cuda" if HAS_GPU else "cpu")
        # Triton's interpreter cannot multiply bfloat16 matrices.
        dtype = torch.bfloat16 if HAS_GPU else torch.float32
        spec = AttentionSpec(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            dtype=torch.float8_e4m3fn if shape.is_fp8 else dtype,
            device=self.device,
        )
        self.backend = TritonPagedAttention(spec)
        self.layer = AttentionLayer(scale=shape.head_dim**-0.5)
        num_tokens, heads = case.requests * case.queries, shape.num_heads + shape.num_kv_heads
        random = torch.Generator(self.device).manual_seed(0)
        self.qk_THK, self.v_TGK = torch.randn(
            (num_tokens, heads + shape.num_kv_heads, shape.head_dim),
            generator=random,
            dtype=dtype,
            device=self.device,
        ).split((heads, shape.num_kv_heads), 1)
        self.q_THK = self.qk_THK[:, : shape.num_heads].contiguous()
        blocks_each = -(-case.keys // shape.block_size)
        num_blocks = case.requests * blocks_each + 1
        table = np.random.default_rng(0).permutation(num_blocks - 1).astype(np.int32) + 1
        self.block_table = table.reshape(case.requests, blocks_each)
        cache_shape = self.backend.kv_cache_shape(num_blocks)
        cache = torch.randn(cache_shape, generator=random, dtype=dtype, device=self.device)
        self.kv_cache = cache.to(self.backend.dtype)
        self.build()

    def build(self) -> None:
        """Compute the metadata, which depends on the tile sizes."""
        positions = np.arange(self.case.keys - self.case.queries, self.case.keys, dtype=np.int32)
        blocks, offsets = np.divmod(positions, self.shape.block_size)
        batch = AttentionBatch(
            query_start_loc=np.arange(self.case.requests + 1, dtype=np.int32) * self.case.queries,
            seq_lens=np.full(self.case.requests, self.case.keys, np.int32),
            block_table=self.block_table,
            slot_mapping=(self.block_table[:, blocks] * self.shape.block_size + offsets).ravel(),
        )
        self.metadata = self.backend.build(batch, {None})

    def ours(self) -> torch.Tensor:
        """Return the result of Engine's kernels, [T, H, K], for the keys and values in the cache."""
        return self.backend.attend(self.q_THK, self.kv_cache, self.metadata, self.layer)

    def store(self) -> None:
        """Rotate queries and keys, and write keys and values to the cache."""
        table = self.q_THK[:, :1]
        self.backend.rotate_and_store(
            self.qk_THK,
            self.v_TGK,
            None,
            RotaryTables(table, table),
            self.kv_cache,
            self.metadata,
            self.layer,
        )

    def torchs(self, backend: SDPBackend) -> Callable[[], torch.Tensor]:
        """The same by torch, of keys and values that lie one after the other."""
        case, shape = self.case, self.shape
        table = torch.from_numpy(self.block_table).to(self.device).long()
        k_SGLK, v_SGLK = (
            self.kv_cache[table, i]
            .to(self.q_THK.dtype)
            .transpose(1, 2)
            .flatten(2, 3)[:, :, : case.keys]
            .contiguous()
            for i in range(2)
        )
        q_SHTK = self.q_THK.unflatten(0, (case.requests, -1)).transpose(1, 2)
        is_chunk = 1 < case.queries < case.keys
        mask = causal_lower_right(case.queries, case.keys) if is_chunk else None

        def attend() -> torch.Tensor:
            with sdpa_kernel(backend):
                out_SHTK = torch.nn.functional.scaled_dot_product_attention(
                    q_SHTK,
                    k_SGLK,
                    v_SGLK,
                    attn_mask=mask,
                    is_causal=case.queries == case.keys,
                    scale=self.layer.scale,
                    enable_gqa=shape.num_heads != shape.num_kv_heads,
                )
            return out_SHTK.transpose(1, 2).flatten(0, 1)

        return attend

    @property
    def flops(self) -> float:
        """Return the operations of both products: queries with visible keys, and weights with values."""
        seen = self.case.queries * (self.case.keys - (self.case.queries - 1) / 2)
        return 4.0 * self.case.requests * seen * self.shape.num_heads * self.shape.head_dim

    @property
    def num_bytes(self) -> float:
        """Return the bytes that must be moved: keys and values once, queries and results once."""
        keys = 2 * self.case.requests * self.case.keys * self.shape.num_kv_heads
        cache = keys * self.shape.head_dim * self.kv_cache.element_size()
        return float(cache + 2 * self.q_THK.numel() * self.q_THK.element_size())


def milliseconds(function: Callable[[], object]) -> float:
    """Return the duration of a call in milliseconds.

    On a GPU, a captured graph is replayed, so launch costs are excluded.
    """
    if HAS_GPU:
        from triton.testing import do_bench_cudagraph

        # The graph runs on its own stream, which does not wait for the work that fills the tensors
        # (triton-lang/triton#10312).
        torch.cuda.synchronize()
        return float(do_bench_cudagraph(function, return_mode="median"))
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def timing(case: Case, shape: Shape) -> Timing:
    """Measure prompts, compared with torch's attention."""
    layer = Layer(case, shape)
    ms = milliseconds(layer.ours)
    error: float | None = None
    times: dict[SDPBackend, float] = {}
    for backend in BACKENDS:
        try:
            theirs = layer.torchs(backend)
            apart = (layer.ours() - theirs()).abs().max().item()
            times[backend] = milliseconds(theirs)
        except Exception:
            print(f"{case.name}: {backend} is not measured:", file=sys.stderr)
            traceback.print_exc()
            continue
        error = max(apart, error or 0.0)
    return Timing(
        ms,
        layer.flops / ms / 1e9,
        layer.num_bytes / ms / 1e6,
        times.get(BACKENDS[0]),
        times.get(SDPBackend.CUDNN_ATTENTION),
        min(times.values()) / ms if times else None,
        error,
    )


def store_timing(case: Case, shape: Shape) -> Timing:
    layer = Layer(case, shape)
    ms = milliseconds(layer.store)
    # Everything is read and written once.
    num_elements = 2 * (layer.qk_THK.numel() + layer.v_TGK.numel())
    return Timing(ms, 0.0, num_elements * layer.q_THK.element_size() / ms / 1e6)


def measurements(shape: Shape, cases: Sequence[Case]) -> Iterator[tuple[str, Callable[[], Timing]]]:
    """Yield a measurement for each case; for the first and the last also one of rotation and cache write."""
    for case in cases:
        yield case.name, partial(timing, case, shape)
        if case in (cases[0], cases[-1]):
            yield f"rotate and store, {case.name}", partial(store_timing, case, shape)


def tile_ms(case: Case, shape: Shape, tile: Tile, split_keys: int | None) -> float | None:
    """Return the milliseconds with a tile, or None if it does not fit. Decodes are split."""
    from triton.runtime.errors import OutOfResources

    layer = Layer(case, shape)
    backend = layer.backend
    if split_keys is None:
        backend.prefill_tile = tile
    else:
        backend.decode_tile = tile._replace(rows=backend.decode_tile.rows)
        backend.split_keys = split_keys
    layer.build()
    try:
        return milliseconds(layer.ours)
    except OutOfResources:
        return None


def tile_measurements(
    shape: Shape, cases: Sequence[Case]
) -> Iterator[tuple[str, str, Callable[[], float | None]]]:
    """Yield (case, tile, function that measures its milliseconds)."""
    # Without a GPU, the interpreter takes seconds for each tile.
    decode_tiles = list(product(DECODE_TILES, SPLITS))[: None if HAS_GPU else 2]
    prefill_tiles = PREFILL_TILES[: None if HAS_GPU else 2]
    for case in cases:
        if case.queries > 1:
            for tile in prefill_tiles:
                yield case.name, str(tuple(tile)), partial(tile_ms, case, shape, tile, None)
            continue
        for tile, split_keys in decode_tiles:
            name = f"{tuple(tile)} split {split_keys}"
            yield case.name, name, partial(tile_ms, case, shape, tile, split_keys)


def figures(measure: Callable[[], Timing | float | None]) -> dict[str, float | None]:
    found = measure()
    return asdict(found) if isinstance(found, Timing) else {"ms": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", type=int, nargs=3, metavar=("H", "G", "K"), default=(32, 8, 128))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--fp8", action="store_true", help="store keys and values in FP8")
    parser.add_argument("--tune", action="store_true", help="measure other tile sizes")
    parser.add_argument(
        "--once", action="store_true", help="only launch the kernels, for a profiler"
    )
    parser.add_argument(
        "--case", nargs="+", metavar="NAME", help="cases to run, such as 'prefill 8k'"
    )
    add_done(parser)
    arguments = parser.parse_args()
    heads, kv_heads, head_dim = arguments.heads if HAS_GPU else (2, 1, 16)
    shape = Shape(heads, kv_heads, head_dim, arguments.block_size, arguments.fp8)
    cases = [
        case
        for case in (CASES if HAS_GPU else TINY_CASES)
        if not arguments.case or case.name in arguments.case
    ]
    if arguments.once:
        for case in cases:
            layer = Layer(case, shape)
            for _ in range(3):
                layer.ours()
        return
    reporter = Reporter(arguments.done)
    if arguments.tune:
        for name, tile, measure_tile in tile_measurements(shape, cases):
            reporter.say(f"{name}, {tile}", partial(figures, measure_tile))
        return
    for name, measure in measurements(shape, cases):
        reporter.say(name, partial(figures, measure))


if __name__ == "__main__":
    main()
