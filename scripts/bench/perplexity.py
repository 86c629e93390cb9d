"""Measure the loss of quality by the native backend's arithmetic, by weight format.

    scripts/bench/run perplexity [--formats Q4_1,Q6_K] [--tokens 2048] [--threads 2] [--json]

The default model's weights are dequantized, and quantized again to each format. The results run over prose (Python's
help topics) and code (its standard library) in two ways: natively, with the KV cache in bf16 as it is served; and on
plain torch in float32, with exactly the values of the quantized weights. `-q` for a float checkpoint is a choice of
weights as well: `-q int8` is compared with its own weights, and `-q int8 in all` with the weights before quantization.

The difference is printed as the change of perplexity with its standard error, the mean Kullback-Leibler divergence of
the next token's distribution, and how often both prefer the same token.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.checkpoint.gguf import GGMLQuantizationType as GGMLType
from engine.workers.attention import AttentionSpec, attention_backend
from engine.workers.batch import AttentionBatch
from engine.workers.cpu.attention import NativeAttention
from engine.workers.cpu.decoder import NativeDecoder
from engine.workers.cpu.packing import WeightFormat, WeightMemory, allocate_packed, pack_rows
from engine.workers.cpu.weights import QUANTIZATIONS
from engine.workers.layers.parallel.shard import ModelShard
from engine.workers.loaders.dequantize import dequantize
from engine.workers.loaders.gguf import GGUFCheckpoint
from engine.workers.models.decoder import Decoder
from engine.workers.models.families import model_spec
from numpy.typing import NDArray
from support.gguf.quantizers import quantize
from support.servers.server import default_model
from torch import Tensor

CODE_MODULES = ("argparse", "json.decoder", "textwrap", "heapq", "http.client")
WINDOW, BLOCK_SIZE = 512, 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Format:
    """The storage format of the matrices, and of the embedding and the head.

    `quantization` is the loader's setting. If `counts_weights`, the float32 model has the weights before quantization.
    """

    matrix: GGMLType
    embedding: GGMLType
    dtype: torch.dtype = torch.bfloat16
    quantization: str | None = None
    counts_weights: bool = False


FORMATS = {
    "Q4_0": Format(GGMLType.Q4_0, GGMLType.Q8_0),
    "Q4_1": Format(GGMLType.Q4_1, GGMLType.Q8_0),
    "Q5_0": Format(GGMLType.Q5_0, GGMLType.Q8_0),
    "Q8_0": Format(GGMLType.Q8_0, GGMLType.Q8_0),
    "Q4_K": Format(GGMLType.Q4_K, GGMLType.Q6_K),
    "Q5_K": Format(GGMLType.Q5_K, GGMLType.Q6_K),
    "Q6_K": Format(GGMLType.Q6_K, GGMLType.Q6_K),
    "bf16": Format(GGMLType.BF16, GGMLType.BF16),
    "f16": Format(GGMLType.F16, GGMLType.F16, dtype=torch.float16),
    "f32": Format(GGMLType.F32, GGMLType.F32, dtype=torch.float32),
    "-q int8": Format(GGMLType.F32, GGMLType.F32, quantization="int8"),
    "-q int4": Format(GGMLType.F32, GGMLType.F32, quantization="int4"),
    "-q int8 in all": Format(GGMLType.F32, GGMLType.F32, quantization="int8", counts_weights=True),
    "-q int4 in all": Format(GGMLType.F32, GGMLType.F32, quantization="int4", counts_weights=True),
}
_K_TYPES = (GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K)
_K_BLOCK = 256


class RelabelledCheckpoint(GGUFCheckpoint):
    """Presents the model as an equal function with permuted channels, and matrices in `form`.

    In the file's own order, its groups would be on the levels to which they were quantized, and four bits would be
    exact again. The K types need rows of 256 elements, so some channels and heads are zero for them.
    """

    def __init__(self, path: Path, form: Format) -> None:
        super().__init__(path)
        self._form = form
        self._stored = GGUFCheckpoint(path)
        self._raw: dict[str, NDArray[np.uint8]] = {}
        config = self.config
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        head_dim = hidden // config["num_attention_heads"]
        padded = -(-hidden // _K_BLOCK) * _K_BLOCK if form.matrix in _K_TYPES else hidden
        shuffled = np.random.default_rng(0).permutation
        # Distribute the zeros evenly over the groups of 32.
        slots = np.arange(padded).reshape(-1, 32)[:, : 32 * hidden // padded].ravel()
        is_shuffled = form.quantization is not None
        self._hidden = slots[shuffled(hidden)] if is_shuffled else slots
        self._inner = shuffled(inner) if is_shuffled else np.arange(inner)
        self._in_head = shuffled(head_dim) if is_shuffled else np.arange(head_dim)
        self._head_dim, self._sizes = head_dim, (padded, inner)
        self._norm_factor = (hidden / padded) ** 0.5
        self.config = config | {
            "hidden_size": padded,
            "head_dim": head_dim,
            "num_attention_heads": config["num_attention_heads"] * padded // hidden,
            "num_key_value_heads": config["num_key_value_heads"] * padded // hidden,
            "rms_norm_eps": config["rms_norm_eps"] * hidden / padded,
        }

    def shape(self, name: str) -> tuple[int, ...]:
        sizes = self._axes(name)
        return tuple(size for _, size in sizes)

    def ggml_type(self, name: str) -> GGMLType:
        if name.endswith("norm.weight"):
            return GGMLType.F32
        return self._form.embedding if "embed_tokens" in name else self._form.matrix

    def quantized(self, name: str, *, part: range | None = None, dim: int = 0) -> None:
        """Return None, as for a tensor that is not quantized, because the file's own blocks are not used."""

    def raw(self, name: str, part: range | None = None) -> NDArray[np.uint8]:
        if name not in self._raw:
            values = self._stored.tensor(name, torch.float32).numpy()
            for axis, (places, size) in enumerate(self._axes(name)):
                moved = np.zeros(
                    (*values.shape[:axis], size, *values.shape[axis + 1 :]), np.float32
                )
                moved[(slice(None),) * axis + (places,)] = values
                values = moved
            if name.endswith("norm.weight"):
                values = values[:, None] * np.float32(self._norm_factor)
            self._raw[name] = quantize(values, self.ggml_type(name))
        rows = self._raw[name]
        return rows if part is None else rows[part.start : part.stop]

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        part: range | None = None,
        dim: int = 0,
    ) -> Tensor:
        # There is one worker, so each matrix is read as a whole; a row-parallel one by its columns.
        assert part in (None, range(self.shape(name)[dim]))
        values = dequantize(self.raw(name), self.ggml_type(name), torch.float32)
        values = values if len(self.shape(name)) == 2 else values[:, 0].contiguous()
        return values if dtype is None else values.to(dtype)

    def _axes(self, name: str) -> list[tuple[NDArray[np.int64], int]]:
        """Return, for each axis, the new index of each old channel, and the number of indices."""
        hidden, inner = (self._hidden, self._sizes[0]), (self._inner, self._sizes[1])
        vocabulary = self.config["vocab_size"]

        def heads(kind: str, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
            size = self.config[f"num_{kind}_heads"] * self._head_dim
            used = np.arange(size * len(self._hidden) // self._sizes[0])
            first = used // self._head_dim * self._head_dim
            return first + places[used % self._head_dim], size

        straight = np.arange(self._head_dim)
        axes = {
            "embed_tokens": [(np.arange(vocabulary), vocabulary), hidden],
            "q_proj": [heads("attention", straight), hidden],
            "k_proj": [heads("key_value", straight), hidden],
            "v_proj": [heads("key_value", self._in_head), hidden],
            "o_proj": [hidden, heads("attention", self._in_head)],
            "gate_proj": [inner, hidden],
            "up_proj": [inner, hidden],
            "down_proj": [hidden, inner],
        }
        return axes.get(name.split(".")[-2], [hidden])


class LoadedCheckpoint(RelabelledCheckpoint):
    """Presents a model whose matrices are quantized as the loader would quantize them, and dequantized again."""

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        part: range | None = None,
        dim: int = 0,
    ) -> Tensor:
        values = super().tensor(name, dtype, part=part, dim=dim)
        quantization = self._form.quantization
        if quantization is None or values.dim() != 2:
            return values
        weight_format = WeightFormat.U8 if "embed_tokens" in name else QUANTIZATIONS[quantization]
        rows, columns = values.shape
        weight = allocate_packed(weight_format, rows, columns, WeightMemory())
        pack_rows(weight, GGMLType.F32, values.float().numpy().view(np.uint8))
        return torch.from_numpy(weight.rows(range(rows))).to(values.dtype)


def texts() -> dict[str, str]:
    from pydoc_data.topics import topics

    sources = []
    for name in CODE_MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        sources.append(Path(spec.origin).read_text())
    return {"prose": "\n".join(topics[name] for name in sorted(topics)), "code": "\n".join(sources)}


def windows(path: Path, num_tokens: int) -> dict[str, list[Tensor]]:
    """Return windows of each text, spread over all of it."""
    tokenizer = load_tokenizer(path)
    found = {}
    for name, text in texts().items():
        ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
        count = max(1, num_tokens // WINDOW)
        starts = np.linspace(0, len(ids) - WINDOW, count).astype(int)
        found[name] = [ids[start : start + WINDOW] for start in starts]
    return found


def log_probabilities(decoder: Any, ids: Tensor) -> Tensor:
    """Return the log-probabilities of the next token after each token but the last, ``[T - 1, V]``."""
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    batch = AttentionBatch(
        query_start_loc=np.array([0, len(ids)], np.int32),
        seq_lens=np.array([len(ids)], np.int32),
        block_table=np.arange(1, num_blocks + 1, dtype=np.int32)[None],
        slot_mapping=np.arange(BLOCK_SIZE, BLOCK_SIZE + len(ids), dtype=np.int32),
    )
    attention = decoder.attention
    shape = attention.kv_cache_shape(num_blocks + 1)
    hidden = decoder.forward(
        ids.int(),
        torch.arange(len(ids), dtype=torch.int32),
        [torch.zeros(shape, dtype=attention.dtype) for _ in decoder.spec.layers],
        [attention.build(batch, window) for window in decoder.spec.windows_by_group],
    )
    logits: Tensor = decoder.compute_logits(hidden[:-1])
    return logits.log_softmax(-1)


def decoders(path: Path, form: Format, threads: int) -> tuple[Decoder, NativeDecoder]:
    checkpoint = RelabelledCheckpoint(path, form)
    spec = model_spec(checkpoint.config, path)
    float32 = AttentionSpec.from_model(
        spec, ModelShard.whole(spec), block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU
    )
    reference = Decoder(
        spec,
        checkpoint if form.counts_weights else LoadedCheckpoint(path, form),
        attention_backend(float32),
        dtype=torch.float32,
        device=CPU,
        max_model_len=WINDOW,
    )
    native = NativeDecoder(
        spec,
        checkpoint,
        NativeAttention(replace(float32, dtype=torch.bfloat16)),
        dtype=form.dtype,
        max_model_len=WINDOW,
        quantization=form.quantization,
        num_threads=threads,
    )
    return reference, native


@dataclass(frozen=True)
class Result:
    """The native result compared with float32, over one text. Changes are relative."""

    format: str
    text: str
    perplexity_float32: float
    perplexity: float
    change: float
    standard_error: float
    divergence: float
    agreement: float


def compare(
    name: str, text: str, ids: list[Tensor], reference: Decoder, native: NativeDecoder
) -> Result:
    expected, losses, divergences, agreements = [], [], [], []
    for window in ids:
        p, q = (log_probabilities(decoder, window) for decoder in (reference, native))
        of_next = window[1:, None]
        expected.append(-p.gather(1, of_next)[:, 0].double())
        losses.append(-q.gather(1, of_next)[:, 0].double())
        divergences.append((p.exp() * (p - q)).sum(1).double())
        agreements.append((p.argmax(1) == q.argmax(1)).double())
    loss, loss_float32 = torch.cat(losses), torch.cat(expected)
    difference = loss - loss_float32
    return Result(
        format=name,
        text=text,
        perplexity_float32=float(loss_float32.mean().exp()),
        perplexity=float(loss.mean().exp()),
        change=float(difference.mean().expm1()),
        standard_error=float(difference.std() / len(difference) ** 0.5),
        divergence=float(torch.cat(divergences).mean()),
        agreement=float(torch.cat(agreements).mean()),
    )


def results(path: Path, names: list[str], num_tokens: int, threads: int) -> Iterator[Result]:
    ids = windows(path, num_tokens)
    for name in names:
        reference, native = decoders(path, FORMATS[name], threads)
        for text, of_text in ids.items():
            yield compare(name, text, of_text, reference, native)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="GGUF file (default: the default model)")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", type=int, default=2048, help="number of tokens in each text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = arguments.model or Path(default_model())
    found = results(path, arguments.formats.split(","), arguments.tokens, arguments.threads)
    if arguments.json:
        print(json.dumps([asdict(result) for result in found], indent=1))
        return
    print("| format | text | float32 | native | change | divergence | same first token |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for r in found:
        print(
            f"| {r.format} | {r.text} | {r.perplexity_float32:.3f} | {r.perplexity:.3f} "
            f"| {r.change:+.2%} ± {r.standard_error:.2%} | {r.divergence:.5f} "
            f"| {r.agreement:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
