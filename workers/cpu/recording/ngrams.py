"""Record the embeddings of n-grams that a layer adds to all streams of a token."""

from __future__ import annotations

import numpy as np

from ....protocol.checkpoint.recurrent_layers import GatedDeltaNet
from ...layers.layer_spec import LayerSpec
from ...layers.specs.ngram import NgramSpec
from ...models.weights import Rows
from ..abi import structs
from ..library import NotSupportedNatively
from ..mixers import check_num_taps
from .blocks import PART, QKV, BlockRecorder

_NGRAM_CONVOLUTION = 5


def _table(ngrams: NgramSpec, vocab_size: int, table: int, part: range) -> structs.NgramTable:
    """Return the hashes that choose embeddings."""
    sizes_H = np.array(ngrams.head_sizes(table), np.int64)
    return structs.NgramTable(
        ngrams.longest,
        ngrams.num_heads,
        ngrams.end_id,
        part.start,
        np.array(ngrams.multipliers(vocab_size, table), np.int64),
        sizes_H,
        np.cumsum(sizes_H) - sizes_H,
    )


def _convolution(
    blocks: BlockRecorder, ngrams: NgramSpec, recurrent: GatedDeltaNet, prefix: str
) -> structs.Mixer:
    convolution = recurrent.ngrams
    assert convolution is not None
    check_num_taps(ngrams.taps)
    ranks, channels = blocks.shard.tensor_parallel.size, convolution.channels
    taps_EK = blocks.weights.floats(f"{prefix}conv1d.weight", channels, 1, ngrams.taps)[:, 0]
    return structs.Mixer(
        kind=_NGRAM_CONVOLUTION,
        channels=convolution.state_parts.size(ranks).channels,
        num_convolved=channels,
        kernel=convolution.kernel,
        segment=convolution.segment,
        num_taps=ngrams.taps,
        distance=ngrams.longest,
        state_offset=recurrent.state_parts.size(ranks).num_own_bytes(4) // 4,
        value_dim=blocks.spec.hidden_size,
        taps=taps_EK.T,
    )


def record_ngrams(
    blocks: BlockRecorder, ngrams: NgramSpec, index: int, prefix: str, layer: LayerSpec
) -> None:
    """Record the embeddings of n-grams of a layer. `index` is the index of its states' cache."""
    spec, weights, program, size = blocks.spec, blocks.weights, blocks.program, ngrams.size
    assert layer.ngram_table is not None
    assert isinstance(layer.recurrent, GatedDeltaNet)
    if size > spec.hidden_size and not blocks.is_alone:
        raise NotSupportedNatively(
            f"embeddings of n-grams of {size} elements, more than the {spec.hidden_size} of a hidden state, are not "
            "supported natively with --tensor-parallel-size"
        )
    prefix = f"{prefix}ple."
    num_rows = ngrams.num_rows(layer.ngram_table)
    part = blocks.part(num_rows)
    name = f"{prefix}ple_embedding.ngram_embedding.weight"
    table = weights.packed(name, num_rows, size // ngrams.num_all_heads, part)
    program.add_op(
        "embed_ngrams",
        target=QKV if blocks.is_alone else PART,
        parts=[table],
        layer=index,
        group=layer.state_group,
        mixer=(mixer := _convolution(blocks, ngrams, layer.recurrent, prefix)),
        ngrams=_table(ngrams, spec.vocab_size, layer.ngram_table, part),
    )
    if not blocks.is_alone:
        blocks.add_sum(QKV, size=size)
    channels = spec.num_streams * spec.hidden_size
    projections = weights.packed_together(
        [
            Rows(f"{prefix}{name}_proj", count, range(count))
            for name, count in (("value", spec.hidden_size), ("key", channels))
        ],
        size,
    )
    kind = projections[0].activation_kind.for_whole_rows
    program.add_op("quantize_columns", activation_kind=kind, num_columns=size)
    blocks.add_product(kind, projections)
    program.add_op(
        "gate_ngrams",
        vectors=[
            blocks.norm(f"{prefix}norm_{each}", channels) for each in ("key", "query", "conv")
        ],
    )
    program.add_op("convolve_ngrams", layer=index, group=layer.state_group, mixer=mixer)
