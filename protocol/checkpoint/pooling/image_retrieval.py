"""Read models for late interaction over images (ColPali, arXiv 2407.01449), which embed each token of a text or a page.

Each extends a model that reads images by a matrix. Configs of transformers contain that of the model in a section;
those of the authors' own library, colpali-engine, are that of the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

from ...config.model import DenseActivation, DenseConfig, PoolerConfig, TextChangesConfig
from ...pooling_params import PoolingKind
from ..config_fields import ConfigFields
from ..files import find_tensor, read_tensor_names
from .late_interaction import DOCUMENT, QUERY

_NUM_ADDED: Final = 10
"""The number of tokens that fill a query."""


class _Retriever(NamedTuple):
    """The texts around a query, the prompt of a page, and the name and the default size of the matrix of a model.

    Without a prompt, that of the checkpoint's chat template is used. The name is "" for a model without a matrix.
    """

    prefix: str
    suffix: str
    page: str
    matrix: str = "custom_text_proj"
    size: int = 128


_COLPALI: Final = _Retriever("", "<pad>" * _NUM_ADDED + "\n", "<image>Describe the image.")
_COLQWEN: Final = _Retriever(
    "",
    "<|endoftext|>" * _NUM_ADDED,
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>",
)
_COLIDEFICS: Final = _Retriever(
    "",
    "<end_of_utterance>" * _NUM_ADDED,
    "<|im_start|>User:<image>Describe the image.<end_of_utterance>\nAssistant:",
    "linear",
)
_COLMODERNVBERT: Final = _COLIDEFICS._replace(
    page="<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:",
    matrix="custom_text_proj",
)
_IN_TRANSFORMERS: Final = "embedding_proj_layer"
_SIZE_FIELDS: Final = ("embedding_dim", "embed_dim", "dims", "dim", "projection_dim", "colbert_dim")
_RETRIEVERS: Final = {
    "ColIdefics3": _COLIDEFICS,
    "ColModernVBertForRetrieval": _COLMODERNVBERT,
    "ModernVBertModel": _COLMODERNVBERT,
    "ColPali": _COLPALI,
    "ColPaliForRetrieval": _COLPALI._replace(prefix="Question: ", matrix=_IN_TRANSFORMERS),
    "ColQwen2": _COLQWEN,
    "ColQwen2ForRetrieval": _COLQWEN._replace(
        prefix="Query: ", suffix=_COLQWEN.suffix + "\n", matrix=_IN_TRANSFORMERS
    ),
    "ColQwen2_5": _COLQWEN,
    "ColQwen3": _COLQWEN._replace(size=320),
    "ColQwen3_5": _COLQWEN,
    "OpsColQwen3Model": _COLQWEN._replace(
        prefix="Query: ",
        page=_COLQWEN.page.removesuffix("<|endoftext|>") + "<|im_start|>assistant\n<|endoftext|>",
    ),
    "Qwen3VLNemotronEmbedModel": _Retriever("", "", "", ""),
}
"""Architecture -> the model's texts and matrix."""


def retrieves_images(config: ConfigFields) -> bool:
    """Return whether a model with this config is one for late interaction over images."""
    return not _RETRIEVERS.keys().isdisjoint(config.texts("architectures"))


def read_image_retriever(path: Path, config: ConfigFields, whole: ConfigFields) -> PoolerConfig:
    """Return the pooling of a model for late interaction over images.

    Args:
        path: The directory of the checkpoint.
        config: The fields of the language model.
        whole: The fields of the whole model.

    Raises:
        CheckpointError: The file of the matrix is missing.
    """
    found = next(_RETRIEVERS[n] for n in whole.texts("architectures") if n in _RETRIEVERS)
    processor = ConfigFields.read_if_present(path / "processor_config.json")
    page = processor.text("visual_prompt_prefix", found.page)
    page += processor.text("visual_prompt_suffix", "")
    sizes = (whole.optional_integer(name) for name in _SIZE_FIELDS)
    size = next((size for size in sizes if size is not None), found.size)
    names = read_tensor_names(path)
    dense: tuple[DenseConfig, ...] = ()
    if found.matrix:
        choices = (_IN_TRANSFORMERS, f"model.{found.matrix}")
        matrix = next((name for name in choices if f"{name}.weight" in names), found.matrix)
        dense = (
            DenseConfig(
                str(find_tensor(path, f"{matrix}.weight")),
                config.integer("hidden_size"),
                size,
                f"{matrix}.bias" in names,
                DenseActivation.IDENTITY,
                matrix,
            ),
        )
    else:
        size = config.integer("hidden_size")
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        f"{{% if p.type == 'image' %}}{{{{ {json.dumps(page)} }}}}{{% else %}}{{{{ p.text }}}}{{% endif %}}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    return PoolerConfig(
        PoolingKind.ALL,
        True,
        size,
        dense,
        {QUERY: processor.text("query_prefix", found.prefix), DOCUMENT: ""},
        text_changes=TextChangesConfig(suffixes={QUERY: found.suffix}),
        chat_template=template if page else "",
    )
