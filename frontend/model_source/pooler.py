"""Apply `--pooler-config` to the way in which a checkpoint pools."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from ...protocol.config.model import Activation, ClassifierConfig, PoolerConfig
from ...protocol.errors import ConfigError
from ...protocol.pooling_params import PoolingKind

_STEP: Final = "STEP"
_KINDS: Final = {
    "ALL": PoolingKind.ALL,
    "CLS": PoolingKind.CLS,
    "LAST": PoolingKind.LAST,
    "MEAN": PoolingKind.MEAN,
    _STEP: PoolingKind.ALL,
}
"""vLLM's name of a pooling -> which vectors are kept. STEP keeps those of one token, which ends a step."""

_SPLIT_KINDS: Final = (PoolingKind.CLS, PoolingKind.LAST, PoolingKind.MEAN)
"""The poolings of texts that may be embedded in parts."""

_TASKS: Final = ("embed", "classify", "token_embed", "token_classify")
_KIND_FIELDS: Final = ("pooling_type", "seq_pooling_type", "tok_pooling_type")
_FIELDS: Final = (
    *_KIND_FIELDS,
    "step_tag_id",
    "use_activation",
    "enable_chunked_processing",
    "max_embed_len",
    "dimensions",
    "task",
    "logit_mean",
    "logit_sigma",
    "enable_flash_late_interaction",
)
"""Fields of vLLM's pooler config. The last one has no effect, because it chooses a kernel of vLLM."""

_MAX_EMBED_LEN: Final = 1 << 20
"""The default of `max_embed_len`."""


def change_pooler(pooler: PoolerConfig, changes: Mapping[str, object]) -> PoolerConfig:
    """Return a pooler with the changes of `--pooler-config`.

    Raises:
        ConfigError: A field is unknown, or its value is not valid.
    """
    if unknown := sorted(set(changes).difference(_FIELDS)):
        raise ConfigError(
            f"--pooler-config has the unknown field {unknown[0]!r}; use {', '.join(_FIELDS)}"
        )
    kind, step_token_id = pooler.kind, -1
    names = [changes[name] for name in _KIND_FIELDS if changes.get(name) is not None]
    for name in names:
        if name not in _KINDS:
            raise ConfigError(
                f"pooling_type in --pooler-config must be one of {', '.join(_KINDS)}, got {name!r}"
            )
        kind = _KINDS[str(name)]
    if (task := changes.get("task")) is not None:
        if task not in _TASKS:
            raise ConfigError(
                f"task in --pooler-config must be one of {', '.join(_TASKS)}, got {task!r}"
            )
        if str(task).startswith("token_"):
            kind = PoolingKind.ALL
        elif kind is PoolingKind.ALL:
            raise ConfigError(
                f"task {task!r} in --pooler-config needs a vector of each text, but the pooling is ALL; use 'token_{task}'"
            )
    token_id = changes.get("step_tag_id")
    if token_id is not None:
        if type(token_id) is not int or token_id < 0 or kind is not PoolingKind.ALL:
            raise ConfigError(
                "step_tag_id in --pooler-config must be a token id, with the pooling_type STEP, "
                f"got {token_id!r}"
            )
        step_token_id = token_id
    elif _STEP in names:
        raise ConfigError(
            "step_tag_id is missing in --pooler-config, which the pooling_type STEP needs"
        )
    normalize = changes.get("use_activation", pooler.normalize)
    if not isinstance(normalize, bool):
        raise ConfigError(
            f"use_activation in --pooler-config must be true or false, got {normalize!r}"
        )
    changed = msgspec.structs.replace(
        pooler,
        kind=kind,
        normalize=normalize,
        step_token_id=step_token_id,
        dimensions=_dimensions(pooler, changes),
    )
    return msgspec.structs.replace(changed, max_embed_len=_max_embed_len(changed, changes))


def _dimensions(pooler: PoolerConfig, changes: Mapping[str, object]) -> int:
    """Return the length to which embeddings are truncated by default; 0 for their whole length."""
    size, length = pooler.hidden_size, changes.get("dimensions")
    if length is None:
        return 0
    allowed = (*pooler.lengths, size) if pooler.lengths else range(1, size + 1)
    if type(length) is not int or length not in allowed:
        raise ConfigError(
            f"dimensions in --pooler-config must be {_one_of(pooler.lengths, size)}, got {length!r}"
        )
    return length


def _one_of(lengths: tuple[int, ...], size: int) -> str:
    if not lengths:
        return f"between 1 and {size}"
    return " or ".join(map(str, sorted({*lengths, size})))


def _max_embed_len(pooler: PoolerConfig, changes: Mapping[str, object]) -> int:
    """Return the maximum number of tokens of a text that is embedded in parts; 0 if none is."""
    splits = changes.get("enable_chunked_processing", False)
    if not isinstance(splits, bool):
        raise ConfigError(
            f"enable_chunked_processing in --pooler-config must be true or false, got {splits!r}"
        )
    length = changes.get("max_embed_len")
    if not splits:
        if length is not None:
            raise ConfigError(
                "max_embed_len in --pooler-config needs enable_chunked_processing, which is false"
            )
        return 0
    if pooler.kind not in _SPLIT_KINDS or pooler.text_changes is not None:
        raise ConfigError(
            "enable_chunked_processing in --pooler-config needs a model that makes one vector of a text, "
            "by the pooling_type CLS, LAST or MEAN"
        )
    if length is None:
        return _MAX_EMBED_LEN
    if type(length) is not int or not 1 <= length <= _MAX_EMBED_LEN:
        raise ConfigError(
            f"max_embed_len in --pooler-config must be between 1 and {_MAX_EMBED_LEN}, got {length!r}"
        )
    return length


def change_classifier(
    classifier: ClassifierConfig | None, changes: Mapping[str, object]
) -> ClassifierConfig | None:
    """Return a classification head with the changes of `--pooler-config` to its scores.

    Raises:
        ConfigError: A value is not a number, or scores would be divided by 0.
    """
    if classifier is None:
        return None
    mean, sigma = _number(changes, "logit_mean", 0.0), _number(changes, "logit_sigma", 1.0)
    if not sigma:
        raise ConfigError("logit_sigma in --pooler-config must not be 0")
    activation = classifier.activation
    if changes.get("use_activation") is False:
        activation = Activation.IDENTITY
    return msgspec.structs.replace(
        classifier, activation=activation, logit_mean=mean, logit_sigma=sigma
    )


def _number(changes: Mapping[str, object], name: str, default: float) -> float:
    value = changes.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} in --pooler-config must be a number, got {value!r}")
    return value
