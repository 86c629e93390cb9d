"""Read the classes of a checkpoint with a classification head, and how scores become probabilities."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...config.model import Activation, ClassifierConfig
from ..config_fields import ConfigFields

CLASSIFIER_SUFFIX: Final = "ForSequenceClassification"
"""The suffix of the architecture name of every model with a classification head for a text."""

TOKEN_CLASSIFIER_SUFFIX: Final = "ForTokenClassification"
"""The suffix of the architecture name of every model with a classification head for each token."""

_REWARD_LABELS: Final = {
    "InternLM2ForRewardModel": 1,
    "Qwen2ForRewardModel": 1,
    "Qwen2ForProcessRewardModel": 2,
}
"""Architecture of a reward model, which scores each token -> its number of scores, whatever the config says."""

_ACTIVATIONS: Final = {
    "Identity": Activation.IDENTITY,
    "Sigmoid": Activation.SIGMOID,
    "Softmax": Activation.SOFTMAX,
}
"""The class of torch that sentence-transformers applies to scores -> the activation."""


class Ranker(NamedTuple):
    """A decoder that scores a query and a document, which may have images.

    `template` makes a prompt of both, `end` are the tokens after it, and `offset` is added to the score.
    """

    template: str
    end: tuple[int, ...]
    offset: float


_RANKERS: Final = {
    # The prompt, the last token and the offset are those of the authors' compute_score.
    "JinaVLForRanking": Ranker(
        "{% for m in messages | reverse %}"
        "{{ '**Document**:\\n' if m.role == 'document' else '\\n**Query**:\\n' }}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'text' %}{{ p.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}",
        (100,),
        -2.65,
    ),
}
"""Architecture -> its prompt and score. Such a model has one score, whatever the config says."""

_PAIR_TEMPLATES: Final = {
    # Images precede the texts, as in the authors' processor.
    "LlamaNemotronVLForSequenceClassification": (
        "{% for m in messages %}{% if m.content is not string %}{% for p in m.content %}"
        "{% if p.type == 'image' %}{{ '<image> ' }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ ' \n \n passage:' if m.role == 'document' else 'question:' }}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    ),
}
"""Architecture -> the prompt of a query and a document, for other models."""

TOKENS: Final = "classifier_from_token"
"""The config field with the tokens, such as "no" and "yes", by which a decoder classifies.

The logits of these tokens after the prompt are the scores of the classes.
"""
TOKEN_IDS: Final = "classifier_token_ids"
"""The config field with the ids of these tokens."""

HEAD_PARTS: Final = "score_head"
"""The config field of a GGUF file with the parts of its classification head besides the projection."""
YES_OR_NO: Final = "yes_or_no"
"""The part of a head whose projection has a row for yes and one for no, which are a single class."""
PAIR_TEMPLATE: Final = "pair_template"
"""The config field of a GGUF file with the template for a query and a document; "" if the tokenizer joins them."""

MAX_LABELS: Final = 1 << 16
_DEFAULT_NUM_LABELS: Final = 2
_PROBLEM_TYPES: Final = {
    "regression": Activation.IDENTITY,
    "multi_label_classification": Activation.SIGMOID,
}


def is_classifier(fields: ConfigFields) -> bool:
    """Return whether a model with this config has a classification head."""
    names = fields.texts("architectures")
    has_own_head = TOKENS in fields.config or HEAD_PARTS in fields.config
    is_of_text = has_own_head or any(name.endswith(CLASSIFIER_SUFFIX) for name in names)
    return is_of_text or classifies_tokens(fields) or find_ranker(fields) is not None


def find_ranker(fields: ConfigFields) -> Ranker | None:
    """Return how a model scores a query and a document with its own prompt; None for other models."""
    found = (_RANKERS[name] for name in fields.texts("architectures") if name in _RANKERS)
    return next(found, None)


def classifies_tokens(fields: ConfigFields) -> bool:
    """Return whether a model with this config has a classification head that reads each token."""
    return is_reward_model(fields) or any(
        name.endswith(TOKEN_CLASSIFIER_SUFFIX) for name in fields.texts("architectures")
    )


def is_reward_model(fields: ConfigFields) -> bool:
    """Return whether a model with this config scores each token of an answer."""
    return any(name in _REWARD_LABELS for name in fields.texts("architectures"))


def read_num_labels(fields: ConfigFields) -> int:
    """Return the number of classes. Two tokens that mean no and yes are a single class."""
    if find_ranker(fields) is not None:
        return 1
    for name in fields.texts("architectures"):
        if name in _REWARD_LABELS:
            return _REWARD_LABELS[name]
    if tokens := fields.texts(TOKENS):
        return 1 if len(tokens) == 2 else len(tokens)
    labels = fields.section("id2label")
    default = _DEFAULT_NUM_LABELS if labels is None else len(labels.config)
    return fields.integer("num_labels", default, maximum=MAX_LABELS)


def read_classifier(fields: ConfigFields) -> ClassifierConfig | None:
    """Return the classes of a model, or None if it has no classification head."""
    if not is_classifier(fields):
        return None
    has_names = not fields.texts(TOKENS) and not is_reward_model(fields)
    labels = fields.section("id2label") if has_names else None
    names = tuple(
        f"LABEL_{i}" if labels is None else labels.text(str(i), f"LABEL_{i}")
        for i in range(read_num_labels(fields))
    )
    activation = _activation(fields, len(names))
    if (ranker := find_ranker(fields)) is None:
        found = (_PAIR_TEMPLATES.get(name, "") for name in fields.texts("architectures"))
        template = next(found, "") or fields.text(PAIR_TEMPLATE, "")
        return ClassifierConfig(names, activation, template)
    return ClassifierConfig(names, activation, ranker.template, ranker.end)


def _activation(fields: ConfigFields, num_labels: int) -> Activation:
    """Return the activation that the config names, else the usual one for this number of classes."""
    problem = fields.text("problem_type", "")
    if problem in _PROBLEM_TYPES:
        return _PROBLEM_TYPES[problem]
    trained = fields.section("sentence_transformers")
    name = "" if trained is None else trained.text("activation_fn", "")
    name = name or fields.text("sbert_ce_default_activation_function", "")
    usual = Activation.SIGMOID if num_labels == 1 else Activation.SOFTMAX
    found = _ACTIVATIONS.get(name.rpartition(".")[2]) if name else usual
    if found is None:
        raise fields.error(
            f"the activation function {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return usual if found is Activation.SOFTMAX else found
