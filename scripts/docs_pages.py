"""Fill the reference pages of the documentation from the sources; a hook of mkdocs.

A page has a marker `<!-- generated: NAME -->` for each table, and the function `_NAME` in this file returns that table.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from engine.frontend.cli.options import Option

ROOT = Path(__file__).parents[1]
MARKER = re.compile(r"<!-- generated: ([\w-]+) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the diagram program that `scripts/docs` has downloaded, so that pages load it from their own site."""
    mermaid = os.environ.get("ENGINE_DOCS_MERMAID")
    if mermaid:
        files.append(
            File.generated(
                config, "assets/mermaid.min.js", content=Path(mermaid).read_text(encoding="utf-8")
            )
        )
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each marker by its table."""
    return MARKER.sub(lambda match: _TABLES[match.group(1)](), markdown)


def _options() -> str:
    from engine.frontend.cli.options import OPTIONS

    groups: dict[str, list[tuple[str, ...]]] = {}
    for option in OPTIONS:
        entries = [f"{flag} ({entry})" for flag, entry in option.spec.entries.items()]
        names = [option.flag, *option.negative_flags[:1], *option.spec.aliases.split(), *entries]
        row = (_codes(names), _codes(option.variables), _type(option), option.default_text)
        groups.setdefault(option.group, []).append((*row, option.spec.help))
    head = ("flag", "environment variable", "type", "default", "meaning")
    return "\n\n".join(f"### {group}\n\n{_table(head, rows)}" for group, rows in groups.items())


def _type(option: Option) -> str:
    """Return the type of an option and its limits, in words."""
    if option.choices:
        return ("list of " if option.is_list else "one of ") + ", ".join(option.choices)
    names = {bool: "boolean", int: "integer", float: "number", str: "text"}
    text = "list" if option.is_list else names.get(option.type, "JSON object")
    if option.high is not None:
        return f"{text} from {option.low} to {option.high}"
    return text if option.low is None else f"{text}, at least {option.low}"


def _codes(names: Iterable[str]) -> str:
    return "<br>".join(f"`{name}`" for name in names)


def _flag_names() -> str:
    from engine.frontend.cli.options import OPTIONS

    rows = [
        (", ".join(f"`{name}`" for name in option.aliases), f"`{option.flag}`")
        for option in OPTIONS
        if option.aliases
    ]
    return _table(("other names", "option"), rows)


def _peer_flags() -> str:
    from engine.frontend.cli.peer_flags.accepted import PEER_FLAGS

    rows = [(f"`{name}`", ", ".join(values)) for name, values in PEER_FLAGS.items()]
    return _table(("flag", "values"), rows)


def _flags_without_effect() -> str:
    from engine.frontend.cli.peer_flags.accepted import SWITCHES, WITH_LIST, WITH_VALUE

    names = sorted(SWITCHES | WITH_VALUE | WITH_LIST)
    return ", ".join(f"`{name}`" for name in names)


def _flag_translations() -> str:
    from engine.frontend.cli.peer_flags.translated import TRANSLATIONS

    meanings: dict[str, list[str]] = {}
    for name, translation in TRANSLATIONS.items():
        meanings.setdefault(translation.shown, []).append(f"`{name}`")
    rows = [(", ".join(names), f"`{shown}`") for shown, names in meanings.items()]
    return _table(("flag", "stands for"), rows)


def _flags_instead() -> str:
    from engine.frontend.cli.peer_flags.instead import INSTEAD

    reasons: dict[str, list[str]] = {}
    for name, reason in INSTEAD.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    rows = [(", ".join(sorted(names)), reason) for reason, names in reasons.items()]
    return _table(("flag", "what to do"), rows)


def _commands() -> str:
    """Return the help of all commands but `engine serve`, whose options have tables."""
    from engine.frontend.cli.completion.tree import read_commands

    parts = []
    for command in (" ".join(node.words) for node in read_commands().walk()):
        if command in ("", "serve"):
            continue
        result = subprocess.run(
            [sys.executable, "-m", "engine.frontend.cli.main", *command.split(), "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "100", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        parts.append(f"## engine {command}\n\n```text\n{result.stdout.rstrip()}\n```")
    return "\n\n".join(parts)


def _document() -> dict[str, Any]:
    """Return the OpenAPI document of a server with default settings and a classifier, which has the most routes."""
    from engine.frontend.api.openapi import describe_routes
    from engine.frontend.api.route_tables.first import FirstRoutes
    from engine.frontend.api.route_tables.others import make_routes
    from engine.protocol.config import FrontendConfig
    from engine.protocol.config.model import Activation, ClassifierConfig

    classifier = ClassifierConfig((), Activation.SOFTMAX)
    model = SimpleNamespace(classifier=classifier, generates=True, weight_files=())
    serving: Any = SimpleNamespace(
        config=SimpleNamespace(
            run_dir="",
            frontend=FrontendConfig(),
            model=model,
            scheduler=SimpleNamespace(max_num_seqs=1),
        ),
        num_replicas=1,
        transcriber=None,
        fingerprint="",
        store=None,
        when_ready=[],
    )
    first = FirstRoutes(serving)
    return describe_routes([*first.routes, *make_routes(serving, first)])


def _routes() -> str:
    from engine.frontend.http.access import OPEN_PATHS, is_operator_path

    groups: dict[str, list[tuple[str, ...]]] = {}
    document = _document()
    for path, operations in document["paths"].items():
        if f"/v1{path}" in document["paths"]:
            continue
        operation = next(iter(operations.values()))
        access = "open" if path in OPEN_PATHS else "client"
        if is_operator_path(path):
            access = "operator"
        methods = ", ".join(method.upper() for method in operations)
        row = (f"`{methods} {path}`", operation["summary"], access)
        groups.setdefault(operation["tags"][0], []).append(row)
    return "\n\n".join(
        f"### {group.capitalize()}\n\n{_table(('route', 'does', 'access'), rows)}"
        for group, rows in groups.items()
    )


def _fields() -> str:
    from engine.frontend.api.docs_page import type_name

    parts = []
    for name, schema in sorted(_document()["components"]["schemas"].items()):
        required = schema.get("required", [])
        rows = [
            (f"`{field}`", type_name(kind), "yes" if field in required else "")
            for field, kind in schema.get("properties", {}).items()
        ]
        if rows:
            parts.append(f"### {name}\n\n{_table(('field', 'type', 'required'), rows)}")
    return "\n\n".join(parts)


def _metrics() -> str:
    import msgspec
    from engine.frontend.observability.metrics.exposition import Exposition
    from engine.frontend.observability.metrics.metrics import Metrics
    from engine.protocol.config import CacheConfig, EngineConfig, FrontendConfig, ModelConfig
    from engine.protocol.messages import FinishReason

    required = {
        "served_names": ("model",),
        "vocab_size": 1,
        "max_model_len": 1,
        "eos_token_ids": (),
    }
    fields = [field.name for field in msgspec.structs.fields(ModelConfig) if field.required]
    with tempfile.TemporaryDirectory() as run_dir:
        config = EngineConfig(
            run_dir=run_dir,
            epoch=0,
            model=ModelConfig(**{name: required.get(name, "") for name in fields}),
            cache=CacheConfig(host_gib=1.0),
            frontend=FrontendConfig(metrics_compat=("vllm", "sglang", "llama.cpp")),
        )
        families = list(Exposition(config, Metrics(config).count).collect())
    rows: dict[str, list[tuple[str, ...]]] = collections.defaultdict(list)
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels}
        labels -= {"model_name", "engine", "le"}
        shown = ", ".join(f"`{label}`" for label in sorted(labels))
        meaning = family.documentation
        rows[name.partition(":")[0]].append((f"`{name}`", family.type, shown, meaning))
    head = ("series", "kind", "other labels", "meaning")
    others = (
        ("vLLM", "vllm", "vllm"),
        ("SGLang", "sglang", "sglang"),
        ("llama.cpp", "llama.cpp", "llamacpp"),
    )
    shown = (reason for reason in FinishReason if reason is not FinishReason.MOVED)
    reasons = ", ".join(f"`{reason.name.lower()}`" for reason in shown)
    return "\n\n".join(
        (
            _table(head, rows["engine"]),
            f"`finished_reason` is one of {reasons}.",
            *(
                f"## {server}'s names\n\nPublished as well with `--metrics-compat {option}`.\n\n"
                + _table(head, rows[prefix])
                for server, option, prefix in others
            ),
        )
    )


def _models() -> str:
    """Return a table of model families and their backends, from the default configs of transformers."""
    from engine.workers.cpu.supported import unsupported_features
    from engine.workers.layers.spec import ModelSpec
    from engine.workers.models.families.registry import all_families, model_spec
    from transformers import CONFIG_MAPPING, AutoConfig, logging

    logging.set_verbosity_error()

    def describe(spec: ModelSpec) -> tuple[str, ...]:
        unsupported = ", ".join(unsupported_features(spec))
        kinds = {type(layer.recurrent).__name__ for layer in spec.layers if layer.recurrent}
        return (
            f"torch ({unsupported})" if unsupported else "native",
            "yes" if any(layer.experts for layer in spec.layers) else "",
            ", ".join(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind).lower() for kind in sorted(kinds)),
        )

    rows = []
    for family in sorted(all_families(), key=lambda family: family.architecture.lower()):
        known = family.model_type if family.model_type in CONFIG_MAPPING else "llama"
        config = AutoConfig.for_model(_SAME_CONFIG.get(family.model_type, known)).to_dict()
        config["architectures"] = [family.architecture]
        config.get("text_config", config).update(_USUAL.get(family.model_type, {}))
        # transformers' default tower differs from that of published models, and the table is about decoders.
        for tower in ("vision_config", "vq_config"):
            config.pop(tower, None)
        spec = model_spec(config, "config.json")
        rows.append((f"`{family.architecture}`", f"`{family.model_type}`", *describe(spec)))
    head = ("architecture", "`model_type`", "on a CPU", "`-ep`", "recurrent layers")
    return _table(head, rows)


_USUAL: dict[str, dict[str, Any]] = {
    "alice_ai": {"model_type": "alice_ai", "linear_num_key_heads": 32},
    "bailing_moe": {"num_experts": 64, "num_experts_per_tok": 6},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "kosmos-2": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
    },
    "interns1_pro": {"rope_scaling": {"rope_type": "default", "fope_sep_head": True}},
    "llada_moe": {"expert_intermediate_size": 1024},
    "pix2struct": {"intermediate_size": 2048, "max_position_embeddings": 512},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deepseek": {"n_routed_experts": 64, "num_experts_per_tok": 6},
    "deepseek_ocr": {"n_routed_experts": 64, "num_experts_per_tok": 6},
    "deepseek_ocr2": {"num_experts_per_tok": 6},
    "unlimited_ocr": {
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "output_window": 128,
    },
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_v41": {
        "num_hidden_layers": 3,
        "compress_ratios": [0, 2, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
    },
    "deepseek_vl_v2": {"use_mla": False, "n_routed_experts": 64, "num_experts_per_tok": 6},
    "diffusion_gemma": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    "esm": {"vocab_size": 33, "position_embedding_type": "rotary"},
    "gigachat3_5": {
        "model_type": "gigachat3_5",
        "layer_types": ["linear_attention", "attention"] * 16,
    },
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe": {"head_dim": 128},
    "gpt_oss_puzzle": {
        "block_configs": [{"sliding_window": 128, "num_local_experts": 64}] * 36,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
    "jais": {"hidden_act": "swiglu"},
    "jet_nemotron": {
        "model_type": "jet_nemotron",
        "layer_types": ["jet", "attn"] * 16,
        "efficient_attention_config": {"jet": {"num_heads": 12, "head_dim": 96}},
    },
    "PanguProMoE": {
        "qk_nope_dim": 128,
        "qk_rope_dim": 64,
        "v_channels": 128,
        "moe_intermediate_size": 1344,
        "param_sink_number": 128,
        "param_sink_with_value": True,
    },
    "iquest_q1": {"num_hidden_layers": 88},
    "k2_horizon": {"layernorm_num_groups": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    **{
        name: {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57}
        for name in ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text")
    },
    "longcat_flash_ngram": {"ngram_vocab_size_ratio": 78},
    "minicpm_sala": {
        "model_type": "minicpm_sala",
        "mixer_types": ["minicpm4", "lightning-attn"],
        **dict.fromkeys(("lightning_use_rope", "use_output_gate", "use_output_norm"), True),
    },
    "minicpmo": {"version": 2.6},
    "minicpmv": {"version": 2.6},
    "motif": {"hidden_act": "poly_norm"},
    "nemotron_h_puzzle": {
        "block_configs": [
            {"block_type": "mamba"},
            {"block_type": "moe", "moe_intermediate_size": 1856, "num_experts_per_tok": 6},
            {"block_type": "attention"},
        ]
    },
    "nemotron-nas": {"num_key_value_heads_per_layer": [8] * 32},
    "openelm": {
        "num_query_heads": [12] * 32,
        "num_kv_heads": [3] * 32,
        "ffn_multipliers": [2.0] * 32,
    },
    "phi3small": {"hidden_act": "gegelu"},
    "phi4flash": {
        "model_type": "phi4flash",
        "mb_per_layer": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "plamo2": {"model_type": "plamo2"},
    "plm": {"hidden_act": "relu2"},
    "rwkv6": {"model_type": "rwkv6"},
    "rwkv7": {"model_type": "rwkv7"},
    "pp_formulanet": {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_hidden_layers": 8,
    },
    "smallthinker": {
        "moe_ffn_hidden_size": 768,
        "moe_num_primary_experts": 64,
        "moe_num_active_primary_experts": 6,
    },
    "trocr": {"num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 4096},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "xverse": {"num_experts": 64, "moe_top_k": 6},
    "step3_text": {"moe_intermediate_size": 5120, "share_expert_dim": 5120},
    **{
        name: {
            "moe_intermediate_size": 1280,
            "num_attention_groups": 4,
            "sparse_config": {"index_tp_size": 4},
        }
        for name in ("step5", "step5_vl")
    },
    **{
        name: {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 16,
            "partial_rotary_factor": 0.25,
        }
        for name in ("qwen4_exp", "qwen4_exp_text")
    },
}
"""Fields of published models for which transformers' defaults describe another kind of model."""

_SAME_CONFIG = {
    "Dream": "qwen2",
    "alice_ai": "qwen3_next",
    "bailing_moe_v2": "sarvam_moe",
    "chatglm": "glm",
    "deepseek_v41": "deepseek_v4",
    "colqwen2": "qwen2_vl",
    "ernie4_5_moe_vl": "ernie4_5_vl_moe",
    "gpt_oss_puzzle": "gpt_oss",
    "llada2_moe": "sarvam_moe",
    "rnd1": "qwen3_moe",
    "grove_moe": "qwen3_moe",
    "interns1_pro": "qwen3_vl_moe",
    "longcat_flash_ngram": "longcat_flash",
    "mimo": "qwen2",
    "mimo_v2": "mimo_v2_flash",
    "minimax_m3": "minimax_m3_vl_text",
    "nemotron_h_puzzle": "nemotron_h",
    "new": "gte",
    "nougat": "llama",
    "pangu_ultra_moe": "deepseek_v3",
    "param2moe": "sarvam_moe",
    "phi4mm": "phi4_multimodal",
    "plm": "deepseek_v2",
    "qwen3_omni_moe": "qwen3_moe",
    "qwen3_omni_moe_thinker": "qwen3_moe",
    "sdar": "qwen3",
    "sdar_moe": "qwen3_moe",
    "youtu_vl": "youtu",
}
"""For each model type that transformers does not have, one that it has; Llama's for all others."""


def _gguf_architectures() -> str:
    from engine.protocol.checkpoint.gguf_config.convert import ARCHITECTURES

    return ", ".join(f"`{name}`" for name in sorted(ARCHITECTURES)) + "."


def _chat_formats() -> str:
    from engine.frontend.chat.detection import REASONING_MARKERS, TOOL_MARKERS

    def rows(markers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(f"`` {repr(marker)[1:-1]} ``", f"`{name}`") for marker, name in markers]

    head = ("the template has", "parser")
    tools = _table(head, rows(TOOL_MARKERS))
    return f"### Tool calls\n\n{tools}\n\n### Reasoning\n\n{_table(head, rows(REASONING_MARKERS))}"


def _table(head: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    head = tuple(head)
    lines = [head, ("---",) * len(head), *rows]

    def escaped(line: Iterable[str]) -> str:
        return " | ".join(cell.replace("|", "\\|") for cell in line)

    return "\n".join(f"| {escaped(line)} |" for line in lines)


_TABLES = {
    "options": _options,
    "flag-names": _flag_names,
    "peer-flags": _peer_flags,
    "flags-without-effect": _flags_without_effect,
    "flag-translations": _flag_translations,
    "flags-instead": _flags_instead,
    "commands": _commands,
    "routes": _routes,
    "fields": _fields,
    "metrics": _metrics,
    "models": _models,
    "gguf-architectures": _gguf_architectures,
    "chat-formats": _chat_formats,
}
