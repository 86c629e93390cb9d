"""Read how a checkpoint embeds text, from the files of sentence-transformers or by the family of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from ...config.images.settings import SpanKind
from ...config.model import DenseActivation, DenseConfig, PoolerConfig, TextChangesConfig
from ...errors import CheckpointError
from ...pooling_params import PoolingKind
from ..audio.token_writers import writes_tokens
from ..config_fields import ConfigFields
from ..field_names import TASK_ADAPTERS
from ..files import find_tensor
from ..source_text import is_t5_encoder
from .beside_images import text_beside_images
from .classification import classifies_tokens, is_classifier
from .foreign_encoders import find_foreign_encoder
from .image_retrieval import read_image_retriever, retrieves_images
from .late_interaction import (
    DOCUMENT,
    QUERY,
    has_late_interaction,
    named_token,
    ranks_lists,
    read_first_colbert,
    read_list_ranker,
    read_multi_vector,
    read_pylate,
)
from .sparse import (
    TOKEN_VECTORS_FILE,
    TOKEN_WEIGHTS_FILE,
    has_three_heads,
    is_sparse,
    sparse_fields,
)

_ENCODERS: Final = frozenset(
    {
        "albert",
        "bert",
        "bert-generation",
        "clip_text_model",
        "convbert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "dpr",
        "electra",
        "ernie",
        "esm",
        "esmc",
        "embedding_gemma2",
        "embedding_gemma2_text",
        "eurobert",
        "gte",
        "jina_bert",
        "jina_embeddings_v3",
        "ibert",
        "luke",
        "megatron-bert",
        "mobilebert",
        "modernbert",
        "mpnet",
        "neobert",
        "new",
        "nomic_bert",
        "rembert",
        "roberta-prelayernorm",
        "roformer",
        "siglip_text_model",
        "splinter",
        "ultrabert",
    }
    | {"roberta", "xlm-roberta", "xlm-roberta-xl"}
)
"""The `model_type` of every family that only embeds, and reads a text as a whole."""

_CAUSAL_ENCODERS: Final = frozenset({"clip_text_model"})
"""The `model_type` of those whose tokens attend only to earlier ones."""

_HEADS: Final = (
    "AquilaModel",
    "ChatGLMModel",
    "DreamModel",
    "EncoderDecoderModel",
    "InternVLChatModel",
    "LMHeadModel",
    "MTModel",
    "MiDashengLMModel",
    "MossAudioModel",
    "POINTSV15ChatModel",
    "Qwen2_5OmniModel",
    "UltravoxModel",
)
"""The ends of names of models with a head that are called models like those without."""

OFFSET_POSITIONS: Final = frozenset(
    {"esm", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"}
)
"""The `model_type` of every family whose table of position embeddings starts with unused rows."""

_KINDS: Final = {
    "pooling_mode_cls_token": PoolingKind.CLS,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_lasttoken": PoolingKind.LAST,
}
_SPARSE_MODULES: Final = ("MLMTransformer", "SpladePooling")

LATE: Final = "late"
"""The `classifier_pooling` of EuroBERT whose result is the mean of the scores of all tokens. It is the default."""

PROJECTION: Final = "embedding_projection"
"""The config field with the name of a dense layer that the model's own file has, which follows the pooling."""

_GEMMA2_PROJECTION: Final = "language_model.embedding_projection"

_CLASSIFIER_POOLINGS: Final = {
    "last": PoolingKind.LAST,
    "mean": PoolingKind.MEAN,
    LATE: PoolingKind.HEAD,
}

_LINEAR: Final = "linear"
_MASK: Final = "MultiVectorMask"
_SUPPORTED_MODULES: Final = (
    "Transformer",
    "Pooling",
    "Dense",
    "Normalize",
    _MASK,
    *_SPARSE_MODULES,
)
_FOLLOWERS: Final = {"Pooling": ("Dense", "Normalize"), "Dense": ("Normalize",)}
"""Kind of module -> the kinds that must not precede it."""


class _Module(msgspec.Struct):
    path: str
    type: str

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


class EmbeddingFiles(msgspec.Struct, frozen=True):
    """The pooler of a checkpoint, and the maximum length of a text in tokens; None if only the model limits it."""

    pooler: PoolerConfig
    max_length: int | None = None


def is_encoder(fields: ConfigFields) -> bool:
    """Return whether a model with this config is an encoder alone, which reads a text or a clip as a whole."""
    if fields.text("model_type", "") in _ENCODERS or is_t5_encoder(fields):
        return True
    if writes_tokens(fields) or find_foreign_encoder(fields) is not None:
        return True
    return fields.get("use_bidirectional_attention") is True or fields.get("is_causal") is False


def attends_to_all(fields: ConfigFields) -> bool:
    """Return whether the tokens of a model with this config attend to later tokens."""
    return is_encoder(fields) and fields.text("model_type", "") not in _CAUSAL_ENCODERS


def text_spans(fields: ConfigFields) -> SpanKind | None:
    """Return the spans in which tokens of a model without images attend to later ones; None for causal attention.

    The tokens of an HRM-Text's prompt all attend to each other, unless `prefix_lm` is false.

    Raises:
        CheckpointError: `prefix_lm` is neither true nor false.
    """
    if fields.get("model_type") == "hrm_text" and fields.boolean("prefix_lm", True):
        return SpanKind.PROMPT
    return None


def has_head(fields: ConfigFields) -> bool:
    """Return whether a checkpoint has an output projection, that is, was not saved as a base model."""
    names = fields.texts("architectures")
    return (
        not retrieves_images(fields)
        and not ranks_lists(fields)
        and not any(name.endswith("Model") and not name.endswith(_HEADS) for name in names)
    )


def read_embedding_files(path: Path, config: ConfigFields, whole: ConfigFields) -> EmbeddingFiles:
    """Return the pooling of the checkpoint in `path`, by which it embeds text.

    Args:
        path: The directory or file of the checkpoint.
        config: The fields of the language model.
        whole: The fields of the whole model.

    Raises:
        CheckpointError: A file is invalid, or a module is not supported.
    """
    files = _read_files(path, config, whole)
    if whole.text("model_type", "") == "embedding_gemma2":
        pooler = _with_projection(path, config, _GEMMA2_PROJECTION, files.pooler)
        # Unless the tokenizer has a chat template, the parts of a message follow each other.
        template = "" if _has_template(path) else _parts_template(path, whole)
        return msgspec.structs.replace(
            files, pooler=msgspec.structs.replace(pooler, chat_template=template)
        )
    if whole.text("model_type", "") == "llama_nemotron_vl" and not _has_template(path):
        pooler = msgspec.structs.replace(files.pooler, chat_template=_NEMOTRON_TEMPLATE)
        return msgspec.structs.replace(files, pooler=pooler)
    if projection := config.text(PROJECTION, ""):
        pooler = _with_projection(path, config, projection, files.pooler)
        return msgspec.structs.replace(files, pooler=pooler)
    if not has_three_heads(config):
        return files
    return msgspec.structs.replace(files, pooler=_with_token_heads(path, config, files.pooler))


def _read_files(path: Path, config: ConfigFields, whole: ConfigFields) -> EmbeddingFiles:
    # A config without a hidden size is rejected later, by the worker.
    hidden_size = config.optional_integer("hidden_size") or 0
    lengths = _lengths(config)
    length = ConfigFields.read_if_present(path / "sentence_bert_config.json")
    if is_sparse(config):
        pooler = PoolerConfig(PoolingKind.HEAD, False, config.integer("vocab_size"))
        return EmbeddingFiles(pooler, length.optional_integer("max_seq_length"))
    if retrieves_images(whole):
        return EmbeddingFiles(read_image_retriever(path, config, whole))
    if (beside := text_beside_images(config)) is not None:
        return EmbeddingFiles(beside(path, config, whole))
    if ranks_lists(config):
        return EmbeddingFiles(read_list_ranker(path, config))
    if has_late_interaction(config):
        return _first_colbert(path, hidden_size)
    if is_classifier(config) or not (path / "modules.json").is_file():
        kind = PoolingKind.CLS if is_encoder(config) else PoolingKind.LAST
        if (foreign := find_foreign_encoder(config)) is not None:
            kind = foreign.pooling
        default = LATE if config.text("model_type", "") == "eurobert" else ""
        pooling = config.text("classifier_pooling", default)
        if pooling != LATE or is_classifier(config):
            kind = _CLASSIFIER_POOLINGS.get(pooling, kind)
        if classifies_tokens(config):
            kind = PoolingKind.ALL
        layers = _dense_of_gguf(path, config)
        size = layers[-1].out_features if layers else hidden_size
        return EmbeddingFiles(PoolerConfig(kind, True, size, layers, lengths=lengths))
    # Without a module that pools, each token has a vector, as in models for late interaction. The module of a model
    # with adapters for tasks pools as well.
    pools = config.get(TASK_ADAPTERS) is not None
    kind = PoolingKind.LAST if pools else PoolingKind.ALL
    seen = {"Normalize"} if pools else set[str]()
    dense: list[DenseConfig] = []
    mask: ConfigFields | None = None
    pools_with = ConfigFields({}, path)
    for module in _modules(path / "modules.json"):
        if module.kind not in _SUPPORTED_MODULES:
            raise CheckpointError(
                path / "modules.json",
                f"the module {module.type!r} is not supported; supported values are "
                f"{', '.join(_SUPPORTED_MODULES)}",
            )
        if seen.intersection(followers := _FOLLOWERS.get(module.kind, ())):
            raise CheckpointError(
                path / "modules.json",
                f"a {module.kind} module after {' or '.join(followers)} is not supported; use another model",
            )
        seen.add(module.kind)
        if module.kind == "Pooling":
            pools_with = ConfigFields.read(path / module.path / "config.json")
            kind = _pooling_kind(pools_with)
        if module.kind == "Dense":
            dense.append(
                _dense(path / module.path, dense[-1].out_features if dense else hidden_size)
            )
        if module.kind == _MASK:
            mask = ConfigFields.read_if_present(path / module.path / "config.json")
    prompts = ConfigFields.read_if_present(path / "config_sentence_transformers.json")
    if kind is PoolingKind.MEAN and _prompts(prompts):
        pools_with.require("include_prompt", True, " if the mean is pooled and there are prompts")
    late: TextChangesConfig | None = None
    if kind is PoolingKind.ALL:
        late = read_pylate(path, prompts) if mask is None else read_multi_vector(path, length, mask)
    if late is not None and late.hides_expansion and not is_encoder(config):
        raise prompts.error("a decoder cannot hide the tokens that fill queries from each other")
    return EmbeddingFiles(
        PoolerConfig(
            kind,
            "Normalize" in seen or kind is PoolingKind.ALL,
            dense[-1].out_features if dense else hidden_size,
            tuple(dense),
            ({} if late is None else {QUERY: "", DOCUMENT: ""}) | _prompts(prompts),
            prompts.text("default_prompt_name", "") or "",
            lengths,
            text_changes=late,
        ),
        # The lengths of queries and documents replace it.
        None if late is not None else length.optional_integer("max_seq_length"),
    )


def _with_projection(
    path: Path, config: ConfigFields, name: str, pooler: PoolerConfig
) -> PoolerConfig:
    """Return the pooler of a model whose own file has the first dense layer, called `name`."""
    size, hidden_size = config.integer("embedding_dim", 768), config.integer("hidden_size")
    weights = str(find_tensor(path, f"{name}.weight"))
    dense = DenseConfig(weights, hidden_size, size, False, DenseActivation.IDENTITY, name)
    kind = pooler.kind if (path / "modules.json").is_file() else PoolingKind.MEAN
    return msgspec.structs.replace(
        pooler,
        kind=kind,
        dense=(dense, *pooler.dense),
        hidden_size=pooler.dense[-1].out_features if pooler.dense else size,
    )


def _has_template(path: Path) -> bool:
    fields = ConfigFields.read_if_present(path / "tokenizer_config.json")
    files = ("chat_template.jinja", "chat_template.json")
    return fields.get("chat_template") is not None or any((path / name).is_file() for name in files)


def _parts_template(path: Path, whole: ConfigFields) -> str:
    """Return a chat template with the texts, images and audio clips of all messages, without anything else."""
    found = ""
    for kind, section in (("image", "vision_config"), ("audio", "audio_config")):
        if whole.section(section) is not None:
            mark = named_token(path, (f"{kind}_token",), f"which represents {kind}s in prompts")
            found += f"{{% elif p.type == '{kind}' %}}{{{{ {json.dumps(mark)} }}}}"
    return (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        f"{{% if p.type == 'text' %}}{{{{ p.text }}}}{found}{{% endif %}}"
        "{% endfor %}{% endif %}{% endfor %}"
    )


_NEMOTRON_TEMPLATE: Final = (
    "{% for m in messages %}"
    "{{ {'query': 'query: ', 'document': 'passage: '}.get(m.role, '') }}"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}{{ '<image> ' }}{% endif %}{% endfor %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
"""The chat template of Llama Nemotron Embed VL, whose prompts begin with their images."""


def _first_colbert(path: Path, hidden_size: int) -> EmbeddingFiles:
    """Return the pooling of a checkpoint in the layout of the first ColBERT, with a dense layer in its own file.

    Raises:
        CheckpointError: The file is missing.
    """
    weights = find_tensor(path, f"{_LINEAR}.weight")
    size, late = read_first_colbert(path)
    dense = DenseConfig(str(weights), hidden_size, size, False, DenseActivation.IDENTITY, _LINEAR)
    prompts = {QUERY: "", DOCUMENT: ""}
    return EmbeddingFiles(
        PoolerConfig(PoolingKind.ALL, True, size, (dense,), prompts, text_changes=late)
    )


def _with_token_heads(path: Path, config: ConfigFields, pooler: PoolerConfig) -> PoolerConfig:
    """Return the pooler of BGE-M3, which also embeds and weighs tokens, with layers in files of their own."""
    first, last = config.integer("bos_token_id", 0), config.integer("eos_token_id", 2)
    hidden_size = config.integer("hidden_size")
    for name in (TOKEN_VECTORS_FILE, TOKEN_WEIGHTS_FILE):
        if not (path / name).is_file():
            raise CheckpointError(path / name, "is missing; download it")
    heads = (
        (PoolingKind.ALL, TOKEN_VECTORS_FILE, hidden_size, DenseActivation.IDENTITY),
        (PoolingKind.WEIGHTS, TOKEN_WEIGHTS_FILE, 1, DenseActivation.RELU),
    )
    return msgspec.structs.replace(
        pooler,
        other_dense={
            kind: (DenseConfig(str(path / name), hidden_size, size, True, activation, ""),)
            for kind, name, size, activation in heads
        },
        # As in the authors' code, the last token has a vector.
        skipped_token_ids={PoolingKind.ALL: (first,), PoolingKind.WEIGHTS: (first, last)},
    )


def find_sparse_head(path: Path, config: ConfigFields) -> dict[str, Any]:
    """Return the fields that add the sparse head of sentence-transformers' files to a config; {} without one.

    Raises:
        CheckpointError: A file is invalid.
    """
    if not (path / "modules.json").is_file():
        return {}
    found = [each for each in _modules(path / "modules.json") if each.kind == "SpladePooling"]
    return (
        sparse_fields(ConfigFields.read(path / found[0].path / "config.json"), config)
        if found
        else {}
    )


def _lengths(config: ConfigFields) -> tuple[int, ...]:
    """Return the vector lengths that a Matryoshka model was trained for; empty if the config does not list them."""
    lengths = config.get("matryoshka_dimensions")
    if lengths is None and config.boolean("is_matryoshka", True):
        return ()
    lengths = lengths or []
    if not isinstance(lengths, list) or not all(type(each) is int and each > 0 for each in lengths):
        raise config.wrong("matryoshka_dimensions", "a list of positive integers", lengths)
    # The full vector is always allowed.
    return tuple(sorted(lengths)) or (config.optional_integer("hidden_size") or 1,)


def _dense_of_gguf(path: Path, config: ConfigFields) -> tuple[DenseConfig, ...]:
    """Return the dense layers that a GGUF file contains in addition to the model."""
    shapes = config.get("dense_modules") if path.suffix == ".gguf" else None
    return tuple(
        DenseConfig(str(path), columns, rows, False, DenseActivation.IDENTITY, name)
        for name, (rows, columns) in (shapes or {}).items()
    )


def _modules(path: Path) -> list[_Module]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(path, f"not a valid list of modules ({error})") from error


def _dense(path: Path, size: int) -> DenseConfig:
    """Return the dense layer in the directory `path`, which must read vectors of `size` elements."""
    fields = ConfigFields.read(path / "config.json")
    if fields.integer("in_features") != size:
        raise fields.error(f"in_features {fields.get('in_features')} must be {size} in this module")
    name = fields.text("activation_function", "torch.nn.modules.activation.Tanh")
    activation = name.rpartition(".")[2].lower()
    if activation not in list(DenseActivation):
        raise fields.error(
            f"activation_function {name!r} is not supported; supported values are "
            f"{', '.join(DenseActivation)}"
        )
    weights = path / "model.safetensors"
    if not weights.is_file():
        raise CheckpointError(weights, "the weights of the module Dense are missing; download them")
    return DenseConfig(
        str(weights),
        size,
        fields.integer("out_features"),
        fields.boolean("bias", True),
        DenseActivation(activation),
    )


def _pooling_kind(fields: ConfigFields) -> PoolingKind:
    if (mode := fields.get("pooling_mode")) is not None:
        kinds = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}
        if mode in kinds:
            return kinds[mode]
        raise fields.error(
            f"pooling_mode {mode!r} is not supported; supported values are {', '.join(kinds)}"
        )
    enabled = [
        name for name in fields.config if name.startswith("pooling_mode_") and fields.get(name)
    ]
    if len(enabled) != 1 or enabled[0] not in _KINDS:
        raise fields.error(
            f"the pooling {', '.join(enabled) or 'none'} is not supported; use one of {', '.join(_KINDS)}"
        )
    return _KINDS[enabled[0]]


def _prompts(fields: ConfigFields) -> dict[str, str]:
    prompts = fields.section("prompts")
    if prompts is None:
        return {}
    return {name: prompts.text(name) for name in prompts.config if prompts.get(name)}
