"""Families that compute some layers several times, each time with keys and values of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.read_rope import read_rope
from ...layers.shared_block import Restart
from ...layers.spec import LayerSpec, ModelSpec
from .common import Family, base_spec, head_dim


def looped_layers(
    layers: Sequence[LayerSpec], passes: Sequence[tuple[range, Restart]]
) -> tuple[LayerSpec, ...]:
    """Return the layers of all passes in order. A pass computes a range of `layers`.

    Layers that were computed before have the weights of their first pass.
    """
    result: list[LayerSpec] = []
    first_use: dict[int, int] = {}
    for indices, restart in passes:
        for i in indices:
            weights = first_use.setdefault(i, len(result))
            result.append(
                replace(
                    layers[i],
                    restart=restart if i == indices.start else None,
                    weights=None if weights == len(result) else weights,
                )
            )
    return tuple(result)


def _hrm_text(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an HRM-Text: a slow state and a fast one, each the output of a stack of layers.

    In a cycle, the fast stack computes the sum of both states several times, then the slow stack does so once.
    """
    fields = fields.with_defaults(head_dim=128)
    count = fields.integer("num_layers_per_stack", fields.layer_count("num_hidden_layers"))
    slow_cycles, fast_cycles = fields.integer("H_cycles", 2), fields.integer("L_cycles", 3)
    for name in ("attention_bias", "mlp_bias"):
        if fields.boolean(name, False):
            raise fields.wrong(name, "false", True)
    fast, slow = range(count), range(count, 2 * count)
    passes: list[tuple[range, Restart]] = []
    for cycle in range(slow_cycles):
        for i in range(fast_cycles):
            # The output of the stack before this one is kept, and the other state is added.
            is_after_slow = i == 0
            restart = Restart(keeps=0, adds=1) if is_after_slow else Restart(keeps=1, adds=0)
            if cycle == i == 0:
                restart = Restart(norms=False, keeps=0, adds_initial=True)
            passes.append((fast, restart))
        passes.append((slow, Restart(keeps=1, adds=0)))
    layer = LayerSpec(read_rope(fields, head_dim(fields)))
    # The layers of a stack are numbered as where they are first computed.
    first_slow = fast_cycles * count
    return base_spec(
        fields.with_values({"num_key_value_heads": fields.integer("num_attention_heads")}),
        looped_layers([layer] * (2 * count), passes),
        has_norm_weights=False,
        gates_attention=True,
        has_gate_projection=True,
        embedding_scale=fields.positive(
            "embedding_scale", 1 / fields.positive("initializer_range", 0.02)
        ),
        tensor_names=(
            (r"\bL_module\.layers\.", "layers."),
            *((rf"\bH_module\.layers\.{i}\.", f"layers.@{first_slow + i}.") for i in range(count)),
            (r"\blayers\.@", "layers."),
            (r"\.attn\.", ".self_attn."),
            (r"\bz_L_init$", "initial_state"),
        ),
    )


FAMILIES = (Family("HrmTextForCausalLM", "hrm_text", _hrm_text),)
