"""Turn the workers' pooled vectors into what clients receive: embeddings, similarities, class probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ...protocol.config.model import Activation, ClassifierConfig, ModelConfig, PoolerConfig
from ...protocol.errors import ParameterError
from ...protocol.sampling_params import SamplingParams
from ..http.shown_values import echo

Vector = npt.NDArray[np.float32]

QUERY: Final = "query"
DOCUMENT: Final = "document"
"""The names that sentence-transformers gives to the prompts for queries and documents."""


def embedding_params() -> SamplingParams:
    """Return sampling parameters for an embedding request, which generates no tokens."""
    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


def verify_dimensions(dimensions: int | None, pooler: PoolerConfig) -> None:
    """Raise ParameterError if the model's embeddings cannot have `dimensions` elements."""
    size = pooler.hidden_size
    if dimensions is None:
        return
    if not 1 <= dimensions <= size:
        raise ParameterError("dimensions", f"must be between 1 and {size}, got {dimensions}")
    if pooler.lengths and dimensions not in (*pooler.lengths, size):
        one_of = " or ".join(map(str, sorted({*pooler.lengths, size})))
        raise ParameterError(
            "dimensions",
            f"must be {one_of}, the sizes that the model was trained for, got {dimensions}",
        )


def find_prompt(name: str | None, pooler: PoolerConfig) -> str:
    """Return the text to put before inputs: the model's prompt `name`, or its default prompt if `name` is None.

    Raises:
        ParameterError: The model has no such prompt.
    """
    if name is None:
        return pooler.prompts.get(pooler.default_prompt, "")
    if name not in pooler.prompts:
        names = ", ".join(pooler.prompts)
        needed = f"one of {names}" if names else "left out for this model"
        raise ParameterError("prompt_name", f"must be {needed}, got {echo(name)}")
    return pooler.prompts[name]


def finish_vector(
    pooled: bytes, pooler: PoolerConfig, *, dimensions: int | None, normalize: bool | None
) -> Vector:
    """Return a pooled vector, truncated to `dimensions` and then normalized; by default as the model was trained."""
    vector: Vector = np.frombuffer(pooled, np.float32)[:dimensions]
    if not (pooler.normalize if normalize is None else normalize):
        return vector
    norm = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
    normed: Vector = (vector / max(norm, 1e-12)).astype(np.float32)
    return normed


def cosines(pooled: Sequence[bytes], num_first: int, pooler: PoolerConfig) -> list[float]:
    """Return the cosine similarity of each later embedding and its partner among the first `num_first`."""
    vectors = np.stack(
        [finish_vector(each, pooler, dimensions=None, normalize=True) for each in pooled]
    ).astype(np.float64)
    scores: list[float] = (vectors[:num_first] * vectors[num_first:]).sum(1).tolist()
    return scores


def class_scores(pooled: bytes, classifier: ClassifierConfig, *, activate: bool | None) -> Vector:
    """Return the class probabilities for pooled scores; with `activate` False the scores themselves."""
    scores: Vector = np.frombuffer(pooled, np.float32)
    if activate is False or classifier.activation is Activation.IDENTITY:
        return scores
    wide = scores.astype(np.float64)
    if classifier.activation is Activation.SIGMOID:
        # The argument of exp is never positive, so it cannot overflow.
        small = np.exp(-np.abs(wide))
        result = np.where(wide >= 0, 1, small) / (1 + small)
    else:
        powers = np.exp(wide - wide.max())
        result = powers / powers.sum()
    probabilities: Vector = result.astype(np.float32)
    return probabilities


def verify_embeds(model: ModelConfig) -> None:
    """Raise ParameterError if a model has no embeddings: it has a classification head, or writes down speech."""
    _verify_reads_text(model)
    if model.classifier is not None:
        raise ParameterError(
            "model",
            f"{model.served_names[0]} is a classifier, which does not embed text; use /classify",
        )


def verify_classifies(model: ModelConfig) -> ClassifierConfig:
    """Return the classification head of a model.

    Raises:
        ParameterError: The model has none.
    """
    if model.classifier is None:
        raise ParameterError(
            "model",
            f"{model.served_names[0]} has no classification head, so it cannot classify text"
            + ("" if model.audio is not None else "; use /v1/embeddings"),
        )
    return model.classifier


def verify_compares(model: ModelConfig) -> None:
    """Raise ParameterError if a model cannot compare texts: a classifier with several classes, or a speech model."""
    _verify_reads_text(model)
    if model.classifier is not None and len(model.classifier.labels) != 1:
        raise ParameterError(
            "model",
            f"{model.served_names[0]} has {len(model.classifier.labels)} classes, but "
            "only a classifier with one class can compare texts; use /classify",
        )


def _verify_reads_text(model: ModelConfig) -> None:
    if model.audio is not None:
        raise ParameterError(
            "model",
            f"{model.served_names[0]} is a speech model, which does not embed text; "
            "use /v1/audio/transcriptions",
        )
