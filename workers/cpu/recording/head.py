"""Record the output projection."""

from __future__ import annotations

from ...layers.parallel.parallel_layers import unsampled_bias
from ..abi.structs import AttentionLayer, activation_number
from ..packing import PackedWeight
from .blocks import BLOCK, BlockRecorder


def record_head_dense(blocks: BlockRecorder) -> None:
    """Record the final norm, the dense layer before the output projection, and the norm of its activations."""
    spec, weights, program = blocks.spec, blocks.weights, blocks.program
    size = spec.hidden_size
    bias = weights.vector("head_dense.bias", size) if spec.head_dense_bias else None
    dense = weights.packed("head_dense.weight", size, size)
    kind = blocks.quantize("", "norm" if spec.has_final_norm else None, [dense])
    blocks.add_product(kind, [dense], [bias], target=BLOCK)
    program.add_op("activate", activation=activation_number(spec.activation))
    norm = blocks.hidden_norm("head_norm")
    program.add_op("final_norm", vectors=norm, eps=spec.hidden_norm_eps("head_norm"))


def record_head(blocks: BlockRecorder, embedding: PackedWeight | None) -> None:
    """Record the operation that computes logits.

    Args:
        blocks: The recorder of the program.
        embedding: The embedding, if the same worker has it.
    """
    spec, weights = blocks.spec, blocks.weights
    part = blocks.part(spec.vocab_size)
    vocabulary = spec.vocab_size, spec.hidden_size, part
    if spec.num_unsampled:
        padded = weights.read_padded_head(*vocabulary, spec.num_unsampled)
        head = weights.pack_tensor("lm_head.weight", padded)
    elif not spec.tie_word_embeddings:
        head = weights.packed_head(*vocabulary, spec.num_unused_embeddings)
    elif embedding is not None:
        head = embedding
    else:
        head = weights.packed("embed_tokens.weight", *vocabulary)
    bias = None
    if spec.head_bias:
        bias = weights.read_head_bias(spec.vocab_size, part).float().numpy()
    if spec.num_unsampled or any(spec.silent_tokens):
        never = unsampled_bias(spec, part).numpy()
        bias = never if bias is None else bias + never
    blocks.program.add_op(
        "head",
        input_kind=head.activation_kind.for_whole_rows,
        parts=[head],
        vectors=[bias],
        scale=1 / spec.logits_divisor,
        attention=AttentionLayer(softcap=spec.final_softcap or 0.0),
    )
