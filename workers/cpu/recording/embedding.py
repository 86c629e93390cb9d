"""Record the embedding of tokens."""

from __future__ import annotations

import torch

from ...models.positions.table import check_num_positions, read_positions, sinusoids
from ...models.stage.embedding import read_token_types
from ..packing import PackedWeight
from .blocks import RESIDUAL, BlockRecorder


def record_embedding(
    blocks: BlockRecorder, max_model_len: int
) -> tuple[PackedWeight, list[PackedWeight]]:
    """Record the operation that embeds tokens, their types and their positions. Return their tables.

    These are the table of tokens and the table of positions, if there is one.

    Raises:
        ConfigError: A sequence may be longer than the table of positions.
    """
    table = _token_table(blocks)
    others = _position_tables(blocks, max_model_len)
    tables = [table, *others]
    scale = blocks.spec.rounded_embedding_scale(blocks.weights.any_dtype)
    if blocks.is_alone:
        blocks.program.add_op("embed", parts=tables, scale=scale)
    else:
        blocks.program.add_op("embed", parts=tables)
        blocks.add_sum(RESIDUAL, scale=scale)
    return table, others[:1]


def _token_table(blocks: BlockRecorder) -> PackedWeight:
    """Return the embedding. If there is a second token type, its rows follow the rows of the first type.

    Without a table of positions, the embedding of a token's type is added to its row.
    """
    spec, weights = blocks.spec, blocks.weights
    size = spec.hidden_size
    has_type = bool(spec.num_token_types) and not spec.num_positions
    if not (spec.tells_segments or has_type):
        num_rows = spec.vocab_size + spec.num_unused_embeddings
        return weights.packed("embed_tokens.weight", num_rows, size, blocks.part(spec.vocab_size))
    rows = weights.read("embed_tokens.weight", spec.vocab_size, size)
    types = read_token_types(spec, weights)
    if has_type:
        rows = rows + types[0]
    if spec.tells_segments:
        rows = torch.cat((rows, rows + (types[1] - types[0])))
    return weights.pack_float_tensor("embed_tokens.weight", rows)


def _position_tables(blocks: BlockRecorder, max_model_len: int) -> list[PackedWeight]:
    """Return the tables of position and token-type embeddings, as far as they exist."""
    spec, weights = blocks.spec, blocks.weights
    if not spec.num_positions:
        return []
    check_num_positions(spec, max_model_len)
    num_rows = spec.num_positions + spec.position_offset
    part = range(spec.position_offset, num_rows)
    name = "embed_positions.weight"
    if spec.sinusoids is not None:
        rows = sinusoids(spec.sinusoids, num_rows, spec.hidden_size)[part.start :]
        tables = [weights.pack_float_tensor(name, rows)]
    elif spec.num_unplaced:
        rows = read_positions(spec, weights, max_model_len)
        tables = [weights.pack_float_tensor(name, rows)]
    else:
        tables = [weights.packed_float(name, num_rows, spec.hidden_size, part)]
    if spec.num_token_types:
        types = read_token_types(spec, weights)
        tables.append(weights.pack_float_tensor("embed_token_types.weight", types))
    return tables
