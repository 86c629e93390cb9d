"""Families with Mamba or Mamba-2 layers, some of which share blocks, with lightning attention, or of RWKV."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.recurrent_config import DEFAULT_LENGTH
from ....protocol.checkpoint.recurrent_layers import Rwkv6, nominal_heads
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope
from ...layers.shared_block import SharedBlock
from ...layers.spec import ModelSpec
from ...layers.specs.norm_names import NormNames
from ...loaders.tensor_names import TensorNames
from .common import Family, base_spec, head_dim
from .experts import MIXTRAL_NAMES, read_experts, with_experts
from .hybrid import BAMBA_NAMES, mixed_layers, recurrent_layer


def _purely_recurrent(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Mamba, Falcon-Mamba or Mamba-2, whose layers have neither attention nor an MLP."""
    recurrent = recurrent_layer(fields)
    num_heads, size = nominal_heads(recurrent)
    layer = LayerSpec(None, recurrent=recurrent, attends=False, has_mlp=False)
    is_tied = fields.text("model_type") != "mamba2"
    length = fields.optional_integer("max_position_embeddings") or DEFAULT_LENGTH
    return base_spec(
        fields.with_values(
            {
                "max_position_embeddings": length,
                "num_attention_heads": num_heads,
                "num_key_value_heads": num_heads,
                "head_dim": size,
                # No layer has an MLP.
                "intermediate_size": recurrent.num_units,
            }
        ).with_defaults(
            tie_word_embeddings=is_tied,
            rms_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        ),
        (layer,) * fields.layer_count("num_hidden_layers"),
        norms=NormNames(attention_input="norm"),
        tensor_names=((r"(^|\.)embeddings\.", r"\1embed_tokens."), (r"(^|\.)norm_f\.", r"\1norm.")),
    )


_RWKV_NAMES = (
    (r"(^|\.)embeddings\.", r"\1embed_tokens."),
    # Only the first layer has this norm.
    (r"\blayers\.0\.pre_norm\.", "embed_norm."),
    (r"\.attn\.o_proj\.", ".mixer.out_proj."),
    (r"\.attn\.g_norm\.", ".mixer.norm."),
    (r"\.attn\.", ".mixer."),
    (r"\.ffn\.key\.mu$", ".mlp.x_k"),
    (r"\.ffn\.receptance\.mu$", ".mlp.x_r"),
    (r"\.ffn\.receptance\.linear\.", ".mlp.receptance."),
    (r"\.ffn\.key\.(linear\.)?", ".mlp.up_proj."),
    (r"\.ffn\.value\.", ".mlp.down_proj."),
    (r"\.ffn\.x_k$", ".mlp.x_k"),
    # GGUF files have a share of the first layer's values in that layer itself.
    (r".*\blayers\.0\.mixer\.v_lora\..*", ""),
)


_RWKV4_NAMES = (
    (r"^(rwkv\.)?blocks\.", "model.layers."),
    (r"^(rwkv\.)?embeddings\.", "model.embed_tokens."),
    (r"^(rwkv\.)?ln_out\.", "model.norm."),
    (r"^head\.", "lm_head."),
    (r"\.layers\.0\.pre_ln\.", ".embed_norm."),
    (r"\.ln1\.", ".attn_norm."),
    (r"\.ln2\.", ".ffn_norm."),
    (r"\.attention\.output\.", ".mixer.out_proj."),
    (r"\.attention\.", ".mixer."),
    (r"\.feed_forward\.time_mix_key$", ".mlp.x_k"),
    (r"\.feed_forward\.time_mix_receptance$", ".mlp.x_r"),
    (r"\.feed_forward\.key\.", ".mlp.up_proj."),
    (r"\.feed_forward\.value\.", ".mlp.down_proj."),
    (r"\.feed_forward\.receptance\.", ".mlp.receptance."),
)


def _rwkv4(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an RWKV-4.

    Hidden states are not halved after every few layers, as transformers does. Only the epsilons of norms depend on it.
    """
    recurrent = recurrent_layer(fields)
    num_heads, size = nominal_heads(recurrent)
    fields = fields.with_defaults(
        intermediate_size=4 * fields.integer("hidden_size"),
        hidden_act="sqrelu",
        max_position_embeddings=fields.integer("context_length", 1024),
        rms_norm_eps=fields.positive("layer_norm_epsilon", 1e-5),
    ).with_values(
        {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, "head_dim": size}
    )
    layer = LayerSpec(None, recurrent=recurrent, attends=False)
    return base_spec(
        fields,
        (layer,) * fields.layer_count("num_hidden_layers"),
        norms=NormNames("attn_norm", mlp_input="ffn_norm"),
        norm_kind="layer",
        norm_bias=True,
        has_embedding_norm=True,
        # The config's epsilon does not reach the final norm.
        final_norm_eps=1e-5,
        has_gate=False,
        tensor_names=_RWKV4_NAMES,
    )


_XLSTM_NAMES = (
    (r"^(backbone\.)?blocks\.", "model.layers."),
    (r"^(backbone\.)?embeddings\.", "model.embed_tokens."),
    (r"^(backbone\.)?out_norm\.", "model.norm."),
    (r"\.mlstm_layer\.", ".mixer."),
    (r"\.ffn\.proj_up_gate\.", ".mlp.gate_proj."),
    (r"\.ffn\.proj_up_gate_z\.", ".mlp.gate_up_proj."),
    (r"\.ffn\.proj_(up|down)\.", r".mlp.\1_proj."),
)


def _xlstm(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an xLSTM of the form of xLSTM-7B (arXiv 2503.13427)."""
    fields.require_all(use_bias=False, add_out_norm=True)
    fields = fields.with_defaults(
        hidden_size=fields.integer("embedding_dim", 4096),
        num_hidden_layers=fields.integer("num_blocks", 32),
        rms_norm_eps=fields.number("norm_eps", 1e-6),
    )
    recurrent = recurrent_layer(fields)
    num_heads, size = nominal_heads(recurrent)
    unit = fields.integer("ffn_round_up_to_multiple_of", 64)
    width = int(fields.integer("hidden_size") * fields.positive("ffn_proj_factor", 2.667))
    fields = fields.with_values(
        {
            "intermediate_size": -(-width // unit) * unit,
            "max_position_embeddings": fields.optional_integer("max_position_embeddings")
            or DEFAULT_LENGTH,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": size,
        }
    )
    layer = LayerSpec(None, recurrent=recurrent, attends=False)
    return base_spec(
        fields,
        (layer,) * fields.layer_count("num_hidden_layers"),
        norms=NormNames("norm_mlstm", mlp_input="norm_ffn"),
        final_softcap=fields.positive("output_logit_soft_cap", 30.0),
        # Transformers does not tie the embedding either, whatever the config says.
        tie_word_embeddings=False,
        tensor_names=_XLSTM_NAMES,
    )


def _rwkv(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an RWKV-6 or RWKV-7 in the form of flash-linear-attention (fla-hub).

    Some models have the norms and the MLPs of Llama instead (ARWKV, arXiv 2501.15570).
    """
    recurrent = recurrent_layer(fields)
    num_heads, size = nominal_heads(recurrent)
    default = 3.5 if isinstance(recurrent, Rwkv6) else 4.0
    ratio, hidden_size = fields.positive("hidden_ratio", default), fields.integer("hidden_size")
    fields = fields.with_defaults(
        # As in flash-linear-attention, a multiple of 32.
        intermediate_size=-(-int(hidden_size * ratio) // 32) * 32,
        hidden_act="sqrelu",
        rms_norm_eps=1e-5,
    ).with_values(
        {
            "max_position_embeddings": fields.optional_integer("max_position_embeddings")
            or DEFAULT_LENGTH,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": size,
        }
    )
    layers = (LayerSpec(None, recurrent=recurrent, attends=False),) * fields.layer_count(
        "num_hidden_layers"
    )
    norms = NormNames("attn_norm", mlp_input="ffn_norm")
    names: TensorNames = _RWKV_NAMES
    if isinstance(recurrent, Rwkv6):
        stacked = (r"\.mixer\.w_lora\.lora\.2\.weight$", ".mixer.x_proj.2.stacked")
        names = (*names, (r"\.mixer\.x_x$", ".mixer.x_bias"), stacked)
    if not fields.boolean("shifts_mlp", True):
        return base_spec(fields, layers, norms=norms, tensor_names=names)
    return base_spec(
        fields,
        layers,
        norms=norms,
        norm_kind="layer",
        norm_bias=fields.boolean("norm_bias", True),
        has_embedding_norm=fields.boolean("norm_first", True),
        has_gate=False,
        tensor_names=names,
    )


def _jamba(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(num_key_value_heads=8, num_experts=16)
    attends = _periodic(fields, "attn_layer", 8, 4)
    spec = base_spec(
        fields,
        mixed_layers(fields, None, attends),
        norms=NormNames(mlp_input="pre_ff_layernorm"),
        tensor_names=(*BAMBA_NAMES, (r"\.mlp\.router\.", ".mlp.gate.")),
    )
    if fields.integer("num_experts") == 1:
        return spec
    experts = read_experts(
        fields, (16, 2), intermediate_size="intermediate_size", renormalizes=False
    )
    return with_experts(
        spec, experts, _periodic(fields, "expert_layer", 2, 1), tensor_names=spec.tensor_names
    )


def _zamba2(fields: ConfigFields) -> ModelSpec:
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    fields = fields.with_values({"head_dim": 2 * hidden_size // num_heads}).with_defaults(
        tie_word_embeddings=True, rms_norm_eps=1e-5, hidden_act="gelu"
    )
    fields.require("use_long_context", False)
    layers = _shared_layers(fields)
    has_biases = fields.boolean("add_bias_linear", False)
    return base_spec(
        fields,
        layers,
        attention_scale=(fields.integer("head_dim") / 2) ** -0.5,
        mlp_bias=has_biases,
        tensor_names=(
            (r"\.shared_transformer\.", ".shared_block."),
            *_unused_blocks(layers),
            (r"\.linear_([qkv])_adapter_list\.", r".\1_proj_adapters."),
            (r"\.gate_up_proj_adapter_list\.", ".gate_up_proj_adapters."),
            (r"\.mamba_decoder\.", "."),
            *BAMBA_NAMES,
        ),
    )


def _zamba(fields: ConfigFields) -> ModelSpec:
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    count = fields.layer_count("num_hidden_layers")
    if (size := fields.integer("attention_hidden_size", 2 * hidden_size)) != 2 * hidden_size:
        raise fields.wrong("attention_hidden_size", f"{2 * hidden_size}, twice hidden_size", size)
    period = fields.integer("attn_layer_period", 6)
    offset = fields.integer("attn_layer_offset", 4, minimum=0)
    fields = fields.with_defaults(
        num_key_value_heads=16,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        hidden_act="gelu",
        layers_block_type=["mamba", "mamba", "hybrid"][:count]
        + ["hybrid" if i % period == offset else "mamba" for i in range(count - 3)],
    ).with_values(
        {
            "head_dim": fields.integer("attention_head_dim", 2 * hidden_size // num_heads),
            "num_mem_blocks": 1,
            "adapter_rank": 0,
        }
    )
    layers = _shared_layers(fields)
    return base_spec(
        fields,
        layers,
        attention_scale=(fields.integer("head_dim") / 2) ** -0.5,
        tensor_names=(
            (r"\.shared_transf\.", ".shared_block."),
            *_unused_blocks(layers),
            (r"\.mamba_decoder\.", "."),
            (r"\.mamba\.(x|dt)_proj_(weight|bias)$", r".mixer.\1_proj.\2"),
            *BAMBA_NAMES,
        ),
    )


def _unused_blocks(layers: tuple[LayerSpec, ...]) -> TensorNames:
    """Return rules that drop unused tensors: repeated shared weights, and low-rank products of other layers.

    A block that only one layer uses is stored with the low-rank products of other layers as well.
    """
    uses = {i: layer.shared_block for i, layer in enumerate(layers) if layer.shared_block}
    sources = [use.source for use in uses.values()]
    stored = "|".join(sorted({str(source) for source in sources}))
    own = (
        (rf".*\.layers\.{i}\.shared_block\..*adapter_list\.(?!{use.number}\.)\d+\..*", "")
        for i, use in uses.items()
        if sources.count(i) == 1
    )
    return (rf".*\.layers\.(?!({stored})\.)\d+\.shared_block\..*", ""), *own


def _shared_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Return layers with a recurrent mixer, some of which use a block.

    Like the embeddings, the blocks are shared unless `tie_word_embeddings` is false: then each of these layers has its
    own one, as in transformers. Otherwise, the layers use the shared blocks in turn.
    """
    count = fields.layer_count("num_hidden_layers")
    names = ("layers_block_type", "layer_types")
    kinds = next((kinds for name in names if (kinds := fields.per_layer(name, count))), None)
    known = ("mamba", "linear_attention", "hybrid")
    if kinds is None or not all(kind in known for kind in kinds):
        needed = f"a list of {count} layer types, each mamba or hybrid"
        raise fields.wrong("layers_block_type", needed, kinds)
    rope = None
    if fields.boolean("use_mem_rope", False):
        rope = read_rope(fields, fields.integer("head_dim"))
    uses = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    if not uses:
        raise fields.wrong("layers_block_type", "a list with at least one 'hybrid'", kinds)
    num_blocks = fields.integer("num_mem_blocks", 1, maximum=len(uses))
    is_shared = fields.boolean("tie_word_embeddings", True)
    plain = LayerSpec(None, recurrent=recurrent_layer(fields), attends=False, has_mlp=False)
    layers = [plain] * count
    for number, i in enumerate(uses):
        block = SharedBlock(
            uses[number % num_blocks] if is_shared else i,
            number,
            fields.integer("adapter_rank", 128, minimum=0),
            fields.boolean("use_shared_attention_adapter", False),
        )
        layers[i] = replace(plain, rope=rope, attends=True, shared_block=block)
    return tuple(layers)


def _periodic(fields: ConfigFields, prefix: str, period: int, offset: int) -> Callable[[int], bool]:
    """Return a function that says whether a layer is one of those given by a period and an offset in the config."""
    period = fields.integer(f"{prefix}_period", period)
    offset = fields.integer(f"{prefix}_offset", offset, minimum=0)
    return lambda i: i % period == offset


def _minimax(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a MiniMax-01. The input of a block, its norm included, is what the block's output is added to.

    A norm does not depend on the factor of its input, except by its epsilon. So a block's input has no factor here,
    and its output is multiplied by the ratio of both factors.
    """
    fields = fields.with_defaults(num_key_value_heads=8, rms_norm_eps=1e-5)
    count, eps = fields.layer_count("num_hidden_layers"), fields.number("rms_norm_eps")
    rope, window = (
        read_rope(fields, head_dim(fields), theta=1_000_000.0),
        fields.optional_integer("sliding_window"),
    )
    inputs, outputs = (
        {
            kind: fields.positive(f"{kind}_{name}_factor", 1.0)
            for kind in ("full_attn", "linear_attn", "mlp")
        }
        for name in ("alpha", "beta")
    )
    ratios = {kind: outputs[kind] / inputs[kind] for kind in inputs}
    layers = tuple(
        replace(
            layer,
            window=window if layer.attends else None,
            output_norm_eps=(
                eps / inputs["full_attn" if layer.attends else "linear_attn"] ** 2,
                eps / inputs["mlp"] ** 2,
            ),
        )
        for layer in mixed_layers(fields, rope, lambda i: i % 2 == 0)
    )
    experts = read_experts(
        fields, (8, 2), intermediate_size="intermediate_size", scale=ratios["mlp"]
    )
    spec = base_spec(
        fields,
        layers,
        norms=NormNames(None, "post_attention_layernorm", None, "output_layernorm"),
        norms_stream=True,
        has_embedding_norm=True,
        has_final_norm=False,
        attention_multiplier=ratios["full_attn"],
        recurrent_multiplier=ratios["linear_attn"],
    )
    recurrent = "|".join(str(i) for i, layer in enumerate(layers) if layer.recurrent)
    names = [
        # GGUF files have one name for the last matrix of both kinds of attention.
        (rf"\blayers\.({recurrent})\.self_attn\.o_proj\.", r"layers.\1.self_attn.out_proj."),
        (r".*\.self_attn\.(slope_rate|(query|key|diagonal)_decay)$", ""),
        (r"\.self_attn\.(qkv_proj|output_gate|out_proj|norm)\.", r".mixer.\1."),
        (r"\blayers\.0\.input_layernorm\.", "embed_norm."),
        (r"^(model\.)?norm\.", rf"\1layers.{count - 1}.output_layernorm."),
        *(
            (rf"\blayers\.{i}\.input_layernorm\.", f"layers.{i - 1}.output_layernorm.")
            for i in range(1, count)
        ),
    ]
    return with_experts(spec, experts, tensor_names=(*names, *MIXTRAL_NAMES))


FAMILIES = (
    Family("FalconMambaForCausalLM", "falcon_mamba", _purely_recurrent),
    Family("JambaForCausalLM", "jamba", _jamba),
    Family("MambaForCausalLM", "mamba", _purely_recurrent),
    Family("Mamba2ForCausalLM", "mamba2", _purely_recurrent),
    Family("MiniMaxForCausalLM", "minimax", _minimax),
    Family("RwkvForCausalLM", "rwkv", _rwkv4),
    Family("RWKV6ForCausalLM", "rwkv6", _rwkv),
    Family("RWKV7ForCausalLM", "rwkv7", _rwkv),
    Family("xLSTMForCausalLM", "xlstm", _xlstm),
    Family("ZambaForCausalLM", "zamba", _zamba),
    Family("Zamba2ForCausalLM", "zamba2", _zamba2),
)
