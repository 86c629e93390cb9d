"""Read the `quantization_config` of a config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ....protocol.checkpoint.config_fields import ConfigFields
from .awq import AWQScheme, QuarkIntegerScheme
from .bitsandbytes import bitsandbytes_scheme
from .compressed_integers import CompressedIntegerScheme
from .float8 import BESIDE_STATIC, Float8Scheme
from .gptq import GPTQScheme
from .hqq import HQQScheme
from .matrix import ActivationScheme
from .microscaling import MXFP4Scheme
from .packed_minifloats import PackedMinifloatScheme
from .scheme import (
    ALL_MODULES,
    ModuleSchemes,
    ProjectionScheme,
    QuantizationScheme,
    UnsupportedScheme,
)
from .ternary import RoundedScheme, TernaryScheme
from .torchao import TorchAOScheme

_MXFP8: Final = Float8Scheme(ActivationScheme.GROUP, (1, 32))
_MODELOPT: Final[dict[str, QuantizationScheme]] = {
    "FP8": Float8Scheme(ActivationScheme.STATIC, None),
    "FP8_BLOCK_SCALES": Float8Scheme(ActivationScheme.GROUP, (128, 128)),
    "FP8_PB_WO": Float8Scheme(ActivationScheme.GROUP, (128, 128)),
    "FP8_PER_CHANNEL_PER_TOKEN": Float8Scheme(ActivationScheme.TOKEN, None),
    "MXFP8": _MXFP8,
    "NVFP4": PackedMinifloatScheme("nvfp4", "weight", "weight_scale_2"),
    "W4A16_NVFP4": PackedMinifloatScheme("nvfp4", "weight", "weight_scale_2"),
}
"""The schemes of ModelOpt's algorithms."""


def quantization_schemes(config: ConfigFields) -> ModuleSchemes:
    """Return the schemes of the modules. Raise `UnsupportedScheme` with the reason if one is not supported."""
    if config.get("quant_method") == "compressed-tensors":
        return _compressed_tensors(config)
    if config.get("quant_method") == "bitnet" and config.get("quantization_mode") == "online":
        return ProjectionScheme(RoundedScheme())
    return ModuleSchemes([(ALL_MODULES, _scheme(config))])


def _scheme(config: ConfigFields) -> QuantizationScheme:
    method = config.get("quant_method")
    name = method if isinstance(method, str) else ""
    if (make := _modelopt if name.startswith("modelopt") else _SCHEMES.get(name)) is None:
        raise UnsupportedScheme("an unnamed method" if method is None else str(method))
    return make(config)


def _bitnet(config: ConfigFields) -> QuantizationScheme:
    if config.get("use_rms_norm"):
        raise UnsupportedScheme("bitnet with use_rms_norm")
    return TernaryScheme(divides=config.get("linear_class", "bitlinear") == "bitlinear")


def _fp8(config: ConfigFields) -> QuantizationScheme:
    block_size = config.get("weight_block_size")
    activations = config.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise UnsupportedScheme(f"fp8 with activation_scheme {activations!r}")
    if (fmt := config.get("fmt", "e4m3")) != "e4m3":
        raise UnsupportedScheme(f"fp8 with fmt {fmt!r}")
    if block_size is None:
        scheme = ActivationScheme.STATIC if activations == "static" else ActivationScheme.TOKEN
        return Float8Scheme(scheme, None)
    if activations == "static":
        raise UnsupportedScheme("fp8 with weight_block_size and activation_scheme 'static'")
    return Float8Scheme(ActivationScheme.GROUP, _pair("fp8", "weight_block_size", block_size))


def _modelopt(config: ConfigFields) -> QuantizationScheme:
    algorithm = config.get("quant_algo") or config.first_section("quantization").get("quant_algo")
    if algorithm in _MODELOPT:
        return _MODELOPT[algorithm]
    if algorithm == "MIXED_PRECISION":
        source = config if config.get("quantized_layers") else config.first_section("quantization")
        return _modelopt_mixed(source.first_section("quantized_layers"))
    raise UnsupportedScheme(f"modelopt with quant_algo {algorithm!r}")


def _modelopt_mixed(modules: ConfigFields) -> QuantizationScheme:
    """Return the scheme of modules of which each has one of several algorithms. Their tensors show which one."""
    for name in modules.config:
        algorithm = modules.required_section(name).get("quant_algo")
        if algorithm not in ("FP8", "MXFP8", "NVFP4", "W4A16_NVFP4"):
            raise UnsupportedScheme(f"modelopt with quant_algo {algorithm!r} of {name}")
    return Float8Scheme(ActivationScheme.STATIC, None, BESIDE_STATIC)


def _auto_round(config: ConfigFields) -> QuantizationScheme:
    """Return the scheme of AutoRound's checkpoints, which have the tensors of another tool."""
    packing = str(config.get("packing_format", "auto_round:auto_gptq")).removeprefix("auto_round:")
    kind, group_size = config.get("data_type", "int"), config.get("group_size")
    if kind in ("fp", "fp8") and packing == "fp8":
        return Float8Scheme(ActivationScheme.GROUP, _pair("auto-round", "group_size", group_size))
    if str(kind).startswith("mx_fp") and packing == "llm_compressor" and group_size == 32:
        if config.get("bits") == 8:
            return _MXFP8
        return PackedMinifloatScheme("mxfp4", "weight_packed")
    if kind == "int" and "gptq" in packing:
        return GPTQScheme(config)
    if kind == "int" and "awq" in packing:
        return AWQScheme(config)
    raise UnsupportedScheme(f"auto-round with data_type {kind!r} and packing_format {packing!r}")


def _quark(config: ConfigFields) -> QuantizationScheme:
    """Return the scheme of Quark's checkpoints. Their tensors show which modules have four bits."""
    sections = [config.first_section("global_quant_config")]
    layers = config.first_section("layer_quant_config")
    sections += [layers.required_section(name) for name in layers.config if "output" not in name]
    activations = ActivationScheme.NONE
    packing = config.first_section("export").get("pack_method", "reorder")
    four_bits: dict[str, QuantizationScheme] = {"U8": PackedMinifloatScheme("mxfp4", "weight")}
    for section in sections:
        weight = section.first_section("weight")
        kind, scheme = weight.get("dtype"), weight.get("qscheme")
        known = (
            (None, None),
            ("fp8_e4m3", "per_tensor"),
            ("fp8_e4m3", "per_channel"),
            ("fp4", "per_group"),
            ("int4", "per_group"),
            ("uint4", "per_group"),
        )
        if (kind, scheme) not in known or (kind == "fp4" and weight.get("group_size") != 32):
            raise UnsupportedScheme(f"quark with weights of dtype {kind!r} and qscheme {scheme!r}")
        if kind == "fp8_e4m3" and activations is ActivationScheme.NONE:
            inputs = section.first_section("input_tensors")
            if inputs.config:
                is_dynamic = inputs.boolean("is_dynamic", True)
                activations = ActivationScheme.TOKEN if is_dynamic else ActivationScheme.STATIC
        if kind in ("int4", "uint4"):
            four_bits["I32"] = QuarkIntegerScheme(weight, is_reordered=packing == "reorder")
    return Float8Scheme(activations, None, four_bits)


def _compressed_tensors(config: ConfigFields) -> ModuleSchemes:
    groups = config.first_section("config_groups")
    if not groups.config:
        raise UnsupportedScheme("compressed-tensors without config_groups")
    if (form := config.first_section("sparsity_config").get("format", "dense")) != "dense":
        raise UnsupportedScheme(f"compressed-tensors with sparsity_config.format {form!r}")
    transforms = config.first_section("transform_config").first_section("config_groups")
    for name in transforms.config:
        for place in transforms.required_section(name).get("apply") or ():
            location = place.get("location") if isinstance(place, dict) else place
            # Transforms of weights were applied before they were stored. Others change activations.
            if location not in ("weight_input", "weight_output"):
                raise UnsupportedScheme(
                    f"compressed-tensors with transforms of location {location!r}"
                )
    schemes = []
    for name in groups.config:
        group = groups.required_section(name)
        # A group's own format overrides the format of the whole config.
        stored_as = group.get("format") or config.get("format")
        schemes.append((group.texts("targets") or ALL_MODULES, _of_group(group, stored_as)))
    return ModuleSchemes(schemes)


def _of_group(group: ConfigFields, stored_as: object) -> QuantizationScheme:
    method = "compressed-tensors"
    weights, activations = (group.first_section(name) for name in ("weights", "input_activations"))
    kind, bits = weights.get("type"), weights.get("num_bits")
    if stored_as == "naive-quantized" and bits == 8:
        # The name of both formats before they were two.
        stored_as = "float-quantized" if kind == "float" else "int-quantized"
    if stored_as == "nvfp4-pack-quantized":
        return PackedMinifloatScheme("nvfp4", "weight_packed", "weight_global_scale")
    if stored_as == "mxfp4-pack-quantized":
        return PackedMinifloatScheme("mxfp4", "weight_packed")
    if stored_as == "mxfp8-quantized" and weights.get("group_size", 32) == 32:
        return _MXFP8
    if not weights.config or stored_as not in (
        "float-quantized",
        "int-quantized",
        "pack-quantized",
    ):
        raise UnsupportedScheme(f"{method} with format {stored_as!r}")
    strategy = weights.get("strategy")
    if kind == "float" and bits == 8 and stored_as == "float-quantized":
        if strategy == "block":
            block_size = _pair(method, "block_structure", weights.get("block_structure"))
            return Float8Scheme(_activations(activations, ActivationScheme.GROUP), block_size)
        if strategy in ("tensor", "channel"):
            return Float8Scheme(_activations(activations, ActivationScheme.TOKEN), None)
    elif kind == "int" and stored_as != "float-quantized" and strategy in ("group", "channel"):
        is_packed = stored_as == "pack-quantized"
        if bits in ((4, 8) if is_packed else (8,)):
            group_size = weights.integer("group_size") if strategy == "group" else None
            return CompressedIntegerScheme(bits, group_size, is_packed=is_packed)
    raise UnsupportedScheme(
        f"{method} in format {stored_as!r} with weights of {bits} bits, type {kind!r}, strategy {strategy!r}"
    )


def _activations(config: ConfigFields, dynamic: ActivationScheme) -> ActivationScheme:
    if not config.config:
        return ActivationScheme.NONE
    return dynamic if config.get("dynamic") else ActivationScheme.STATIC


def _pair(method: str, field: str, value: Any) -> tuple[int, int]:
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(x, int) and x > 0 for x in value)
    ):
        return value[0], value[1]
    raise UnsupportedScheme(f"{method} with {field} {value!r}")


_SCHEMES: Final[dict[str, Callable[[ConfigFields], QuantizationScheme]]] = {
    "fp8": _fp8,
    "mxfp8": lambda config: _MXFP8,
    "fbgemm_fp8": lambda config: Float8Scheme(ActivationScheme.TOKEN, None),
    **dict.fromkeys(("auto-round", "auto_round", "intel/auto-round", "inc"), _auto_round),
    "quark": _quark,
    "awq": AWQScheme,
    "gptq": GPTQScheme,
    "mxfp4": lambda config: MXFP4Scheme(),
    "bitsandbytes": bitsandbytes_scheme,
    "bitnet": _bitnet,
    "hqq": lambda config: HQQScheme(),
    "torchao": lambda config: TorchAOScheme(),
}
"""quant_method -> the function that makes its scheme."""
