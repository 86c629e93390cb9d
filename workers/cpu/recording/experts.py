"""Record mixtures of experts in a native program."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...layers.specs.experts import ExpertsSpec, GateLimit, RouterSpec
from ...layers.specs.norm_names import NormNames
from ...models.experts.router import read_router
from ..abi.structs import activation_number
from ..experts import NativeExperts
from ..library import NotSupportedNatively
from ..packing import ActivationKind
from ..program import Floats
from .blocks import BLOCK, MLP, PART, QKV, RESIDUAL, ROUTER, SHORTCUT, BlockRecorder


def record_experts(
    blocks: BlockRecorder,
    index: int,
    prefix: str,
    experts: ExpertsSpec,
    norms: NormNames,
    shared_limit: GateLimit | None,
    target: int | None = None,
    routed: NativeExperts | None = None,
) -> None:
    """Record the mixture of experts of a layer, which is number `index` of this shard.

    `routed` are the experts if the operation that chooses among them has been recorded.
    `shared_limit` is the limit of the gates in the shared experts. If `target` is given, the output is written there.
    If the experts are a shortcut, it is kept for the operation `add_shortcut`.
    """
    spec, weights, program = blocks.spec, blocks.weights, blocks.program
    norm, module = norms.mlp_input, f"{prefix}{'shortcut' if experts.is_shortcut else 'mlp'}."
    num_logits = experts.num_experts + experts.num_identities
    kind: ActivationKind | None = None
    if experts.router is not None:
        _record_router_mlp(blocks, prefix, norms, experts.router, num_logits)
    elif routed is None:
        kind = _record_router(blocks, prefix, module, norms.mlp_input, experts)
    native = routed
    if native is None:
        native = NativeExperts(spec, experts, weights, module, blocks.shard)
        program.add_op("route", experts=native)
    mixture: dict[str, Any] = {"experts": native, "layer": index}
    if experts.latent_size:
        return _record_latent_experts(blocks, prefix, experts, norms, mixture, shared_limit)
    if native.input_kind != kind:
        kind = blocks.quantize(prefix, norm, native.input_kind)
    program.add_op("gated_experts", input_kind=kind, activation_kind=native.output_kind, **mixture)
    program.add_op("expert_outputs", input_kind=native.output_kind, **mixture)
    if experts.shared_intermediate_size:
        mlp = blocks.read_mlp(f"{module}shared_experts.", experts.shared_intermediate_size)
        if mlp.gate_up[0].activation_kind.for_whole_rows != kind:
            kind = blocks.quantize(prefix, norm, mlp.gate_up)
        blocks.add_gated(mlp, kind, limit=shared_limit)
        # The ranks' parts of the whole mixture are summed, so only one of them adds this bias.
        is_first = blocks.shard.tensor_parallel.rank == 0
        blocks.add_product(
            mlp.down.activation_kind,
            [mlp.down],
            [mlp.down_bias if is_first else None],
            source=1,
            target=BLOCK,
        )
    output_norm, eps = norms.mlp_output, spec.norm_eps
    identity_norm: list[Floats | None] = []
    if experts.num_identities and norm is not None:
        identity_norm, eps = blocks.plain_norm(f"{prefix}{norm}")
    if experts.is_shortcut:
        target = SHORTCUT
    program.add_op(
        "combine_experts",
        target=blocks.target_of(output_norm, target),
        vectors=[None, *identity_norm],
        eps=eps,
        scale=spec.residual_multiplier,
        **mixture,
    )
    if not experts.is_shortcut:
        return blocks.finish_block(prefix, None, output_norm, spec.residual_multiplier, target)
    if not blocks.is_alone:
        blocks.add_sum(SHORTCUT)


def route_input(blocks: BlockRecorder, prefix: str, experts: ExpertsSpec) -> NativeExperts:
    """Record the choice of experts by the input of a layer, and return them."""
    module = f"{prefix}mlp."
    _record_router(blocks, prefix, module, None, experts)
    native = NativeExperts(blocks.spec, experts, blocks.weights, module, blocks.shard)
    blocks.program.add_op("route", experts=native)
    return native


def _record_router(
    blocks: BlockRecorder, prefix: str, module: str, norm: str | None, experts: ExpertsSpec
) -> ActivationKind:
    """Record the logits of a router, and of the shared experts' gate. Return the format of the quantized input."""
    spec, weights = blocks.spec, blocks.weights
    num_logits = experts.num_experts + experts.num_identities
    vectors: list[Floats | None] = [None]
    if experts.has_router_bias:
        vectors = [weights.vector(f"{module}gate.bias", num_logits)]
    name = f"{module}gate.weight"
    if experts.logit_multiplier == 1.0 and not experts.second_size:
        router = [weights.packed_float32(name, num_logits, spec.hidden_size)]
    else:
        matrix = read_router(experts, weights, f"{module}gate.", spec.hidden_size)
        router = [weights.pack_float_tensor(name, matrix)]
    if experts.has_shared_gate:
        name = f"{module}shared_expert_gate.weight"
        router.append(weights.packed_float32(name, 1, spec.hidden_size))
        vectors.append(None)
    kind = blocks.quantize(prefix, norm, router)
    blocks.add_product(kind, router, vectors, target=ROUTER)
    return kind


def _record_router_mlp(
    blocks: BlockRecorder, prefix: str, norms: NormNames, router: RouterSpec, num_logits: int
) -> None:
    """Record the logits of a router that is an MLP, and what it passes on to the next layer's."""
    weights, program, size = blocks.weights, blocks.program, router.size
    name = f"{prefix}mlp.gate."
    matrices = [
        weights.packed_float32(f"{name}{module}.weight", *shape)
        for module, shape in (
            ("down_proj", (size, blocks.spec.hidden_size)),
            ("router_mlp.fc1", (size, size)),
            ("router_mlp.fc2", (size, size)),
            ("router_mlp.out_proj", (num_logits, size)),
        )
    ]
    biases = [
        weights.vector(f"{name}{module}.bias", size)
        for module in ("down_proj", "router_mlp.fc1", "router_mlp.fc2")
    ]
    factors: Floats | None = None
    if weights.has(f"{name}router_states_scale"):
        factors = weights.vector(f"{name}router_states_scale", size)
    norm = weights.vector(f"{name}router_mlp.norm.weight", size)
    blocks.add_projection(prefix, norms.mlp_input, matrices[:1], biases[:1])
    program.add_op("chain_columns", num_columns=size, vectors=[factors, norm], eps=router.norm_eps)
    kind = matrices[0].activation_kind.for_whole_rows
    for matrix, bias in zip(matrices[1:], (*biases[1:], None), strict=True):
        program.add_op("quantize_columns", activation_kind=kind, num_columns=size)
        blocks.add_product(kind, [matrix], [bias], target=ROUTER if bias is None else QKV)
        if bias is not None:
            program.add_op("activate", num_columns=size, activation=activation_number("gelu"))


def record_experts_beside(
    blocks: BlockRecorder, index: int, prefix: str, experts: ExpertsSpec, mlp: MLP, norms: NormNames
) -> None:
    """Record an MLP and experts that are added to it. The mixture is number `index` of this shard.

    Both read the residual stream, each after its own norm. The output of the block is the sum of their normed outputs.
    """
    spec, weights, program = blocks.spec, blocks.weights, blocks.program
    blocks.add_gated(mlp, blocks.quantize(prefix, norms.mlp_input, mlp.gate_up))
    blocks.add_block(prefix, mlp.down, mlp.down_bias, None, 1.0, target=BLOCK)
    size, name = spec.hidden_size, f"{prefix}beside."
    router = weights.packed_float32(f"{name}gate.weight", experts.num_experts, size)
    router_norm = weights.vector(f"{name}router_scale", size) * np.float32(size**-0.5)
    kind = router.activation_kind
    program.add_op("quantize", activation_kind=kind, vectors=[router_norm])
    blocks.add_product(kind, [router], target=ROUTER)
    native = NativeExperts(spec, experts, weights, name, blocks.shard)
    program.add_op("route", experts=native)
    mixture: dict[str, Any] = {"experts": native, "layer": index}
    kind = blocks.quantize(prefix, "pre_feedforward_layernorm_2", native.input_kind)
    program.add_op("gated_experts", input_kind=kind, activation_kind=native.output_kind, **mixture)
    program.add_op("expert_outputs", input_kind=native.output_kind, **mixture)
    program.add_op("combine_experts", target=QKV if blocks.is_alone else PART, **mixture)
    if not blocks.is_alone:
        blocks.add_sum(QKV)
    program.add_op(
        "add_blocks",
        vectors=[
            weights.vector(f"{prefix}post_feedforward_layernorm_{i}.weight", size) for i in (1, 2)
        ],
    )
    vectors: list[Floats | None] = [None]
    if norms.mlp_output is not None:
        vectors = blocks.hidden_norm(f"{prefix}{norms.mlp_output}")
    program.add_op("norm_add", vectors=vectors, scale=spec.residual_multiplier)


def _record_latent_experts(
    blocks: BlockRecorder,
    prefix: str,
    experts: ExpertsSpec,
    norms: NormNames,
    mixture: dict[str, Any],
    shared_limit: GateLimit | None,
) -> None:
    """Record experts that read a projection of the hidden states, which is computed after the experts are chosen.

    Every rank has the matrices before and after the experts. The result of the first one, and later the sum of the
    experts' outputs, is stored in the place of a layer's projection.
    """
    spec, program, native = blocks.spec, blocks.program, mixture["experts"]
    output_norm = norms.mlp_output
    is_other = experts.has_shared_gate or experts.num_identities or experts.is_shortcut
    if is_other or (output_norm and experts.shared_intermediate_size):
        raise NotSupportedNatively(
            "the native CPU backend does not support experts with a projected input (latent_size) together with a "
            "shared-expert gate, experts that return their input, or a shortcut, or with a norm of the MLP's output "
            "and shared experts"
        )
    if experts.has_latent_norms and not (blocks.is_alone or blocks.shard.has_whole_experts):
        raise NotSupportedNatively(
            "the native CPU backend does not support norms of experts' outputs with --tensor-parallel-size, unless "
            "--enable-expert-parallel is set"
        )
    size, scale = experts.latent_size, spec.residual_multiplier
    to_latent, from_latent = (
        blocks.weights.packed(f"{prefix}mlp.{name}.weight", rows, columns)
        for name, rows, columns in (
            ("to_latent", size, spec.hidden_size),
            ("from_latent", spec.hidden_size, size),
        )
    )
    biases: list[Floats | None] = [None, None]
    if spec.mlp_bias:
        biases = [
            blocks.weights.vector(f"{prefix}mlp.{name}.bias", matrix.n)
            for name, matrix in (("to_latent", to_latent), ("from_latent", from_latent))
        ]
    blocks.add_projection(prefix, norms.mlp_input, [to_latent], biases[:1])
    columns: dict[str, Any] = {"first_column": 0, "num_columns": size}
    eps = spec.norm_eps if spec.output_norm_eps is None else spec.output_norm_eps
    latent_norm: Floats | None = None
    expert_norm: Floats | None = None
    if experts.has_latent_norms:
        latent_norm, expert_norm = (
            blocks.norm(f"{prefix}mlp.{name}", size) for name in ("latent_norm", "expert_norm")
        )
    program.add_op(
        "quantize_columns", activation_kind=native.input_kind, vectors=[latent_norm], **columns
    )
    program.add_op(
        "gated_experts",
        input_kind=native.input_kind,
        activation_kind=native.output_kind,
        **mixture,
    )
    program.add_op("expert_outputs", input_kind=native.output_kind, **mixture)
    program.add_op(
        "combine_experts",
        target=QKV if blocks.is_alone else PART,
        vectors=[expert_norm],
        eps=eps,
        **mixture,
    )
    if not blocks.is_alone:
        blocks.add_sum(QKV, size=size)
    if experts.shared_intermediate_size:
        mlp = blocks.read_mlp(f"{prefix}mlp.shared_experts.", experts.shared_intermediate_size)
        input_kind = blocks.quantize(prefix, norms.mlp_input, mlp.gate_up)
        blocks.add_gated(mlp, input_kind, limit=shared_limit)
        blocks.add_block(prefix, mlp.down, mlp.down_bias, None, 1.0, target=BLOCK)
    kind = from_latent.activation_kind.for_whole_rows
    sum_norm: Floats | None = None
    if experts.norms_latent_sum:
        sum_norm = blocks.weights.vector(f"{prefix}mlp.latent_sum_norm.weight", size)
    program.add_op("quantize_columns", activation_kind=kind, vectors=[sum_norm], **columns)
    blocks.add_product(
        kind,
        [from_latent],
        biases[1:],
        target=RESIDUAL if output_norm is None else BLOCK,
        scale=scale,
    )
    if experts.shared_intermediate_size:
        program.add_op("norm_add", scale=scale)
    if output_norm is not None:
        blocks.add_normed(f"{prefix}{output_norm}", scale)
