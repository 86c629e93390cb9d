"""Turn the workers' pooled vectors into what clients receive: embeddings, similarities, class probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ...protocol.config.model import Activation, ClassifierConfig, ModelConfig, PoolerConfig
from ...protocol.errors import ParameterError
from ...protocol.pooling_params import PoolingKind
from ...protocol.sampling_params import SamplingParams
from ..http.shown_values import echo
from ..tokenizer.tokenizer import Tokenizer

Vector = npt.NDArray[np.float32]

QUERY: Final = "query"
DOCUMENT: Final = "document"
"""The names that sentence-transformers gives to the prompts for queries and documents."""


BY_TOKEN: Final = (PoolingKind.ALL, PoolingKind.WEIGHTS)
"""The kinds of results with a row for each token."""


class LateChunkingParams(msgspec.Struct, frozen=True):
    """Parameters of late chunking, as in vLLM: a vector for each `chunk_size` tokens of a text, special tokens too.

    The vector is the mean of the tokens' vectors, which depend on the whole text (arXiv 2409.04701).
    """

    chunk_size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]

    def __post_init__(self) -> None:
        """Raise ParameterError if the size is not a positive integer of 63 bits."""
        size: object = self.chunk_size
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 1 << 63:
            raise ParameterError("chunk_size", f"must be a positive integer, got {echo(size)}")


class LateChunk(msgspec.Struct, frozen=True):
    """A chunk of a text: the first and the last of its tokens plus one, and of its characters.

    `char_range` is None for a chunk of special tokens only.
    """

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None


class LateChunkingMetadata(msgspec.Struct, frozen=True):
    """The chunks of a text of `input_tokens` tokens, in the order of their vectors."""

    chunk_size: int
    input_tokens: int
    chunks: list[LateChunk]
    strategy: str = "fixed_tokens"

    @classmethod
    def of_text(
        cls,
        params: LateChunkingParams,
        text: str | None,
        token_ids: Sequence[int],
        tokenizer: Tokenizer,
        *,
        has_special: bool,
    ) -> LateChunkingMetadata:
        """Return the chunks of a text with these tokens. `has_special` is True if special tokens are around it.

        Raises:
            ParameterError: The tokens are not those of the text.
        """
        found = tokenizer.encode_with_places(text, has_special) if text else None
        if found is None or found[0] != list(token_ids):
            raise ParameterError(
                "late_chunking_params",
                "needs a text that is not empty, cut, or changed by the model",
            )
        size, places = params.chunk_size, found[1]
        chunks = []
        for start in range(0, len(places), size):
            chunk = places[start : start + size]
            texts = [place for place in chunk if place[0] < place[1]]
            characters = (min(texts)[0], max(end for _, end in texts)) if texts else None
            chunks.append(LateChunk((start, start + len(chunk)), characters))
        return cls(size, len(places), chunks)


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


def find_kind(task: str | None, model: ModelConfig) -> PoolingKind:
    """Return which vectors a task returns: one of each text, or one of each of its tokens.

    Args:
        task: "embed" or "token_embed", or for a model with a classification head "classify" or "token_classify"; None
            for what the model was trained for. "token_classify" also returns the weights of tokens, if a model makes
            them.
        model: The model.

    Raises:
        ParameterError: The model does not perform the task.
    """
    kind = model.pooler.kind
    verb = "embed" if model.classifier is None else "classify"
    kinds = {verb: kind, f"token_{verb}": PoolingKind.ALL}
    if kind is PoolingKind.ALL:
        del kinds[verb]
    if kind is PoolingKind.HEAD:
        del kinds[f"token_{verb}"]
    if PoolingKind.WEIGHTS in model.pooler.other_dense:
        kinds["token_classify"] = PoolingKind.WEIGHTS
    if task is None:
        return kind
    if task not in kinds:
        one_of = " or ".join(f'"{name}"' for name in kinds)
        raise ParameterError("task", f"must be {one_of}, got {echo(task)}")
    return kinds[task]


def read_vectors(
    pooled: bytes,
    kind: PoolingKind,
    model: ModelConfig,
    token_ids: npt.NDArray[np.int32],
    keeps_T: npt.NDArray[np.bool_] | None = None,
) -> Vector:
    """Return a pooled result: a vector float32 [D], or float32 [T, D] with a row for each token.

    If the model has a token that ends a step, only the rows of these tokens among `token_ids` are returned. With
    `keeps_T`, only the rows that it marks are.
    """
    vectors: Vector = np.frombuffer(pooled, np.float32)
    if kind not in BY_TOKEN:
        return vectors
    vectors = vectors.reshape(len(token_ids), -1)
    if skipped := model.pooler.skipped_token_ids.get(kind):
        return vectors[~np.isin(token_ids, skipped)]
    if model.pooler.step_token_id >= 0:
        vectors = vectors[token_ids == model.pooler.step_token_id]
    return vectors if keeps_T is None else vectors[keeps_T]


def finish_vectors(
    vectors: Vector,
    pooler: PoolerConfig,
    *,
    dimensions: int | None,
    normalize: bool | None,
    kind: PoolingKind | None = None,
) -> Vector:
    """Return vectors [..., D], truncated to `dimensions` and then normalized; by default as the pooler says.

    Weights of tokens are returned unchanged.
    """
    if kind is PoolingKind.WEIGHTS:
        return vectors
    vectors = vectors[..., : dimensions or pooler.dimensions or None]
    if not (pooler.normalize if normalize is None else normalize):
        return vectors
    norms = np.sqrt(np.square(vectors, dtype=np.float64).sum(-1, keepdims=True))
    normed: Vector = vectors / np.maximum(norms, 1e-12).astype(np.float32)
    return normed


def chunk_means(vectors_TD: Vector, size: int) -> Vector:
    """Return the mean of each `size` successive vectors, of which the last ones may be fewer, float32 [chunks, D]."""
    starts = np.arange(0, len(vectors_TD), size)
    sums = np.add.reduceat(vectors_TD, starts, 0, np.float64)
    counts = np.diff(starts, append=len(vectors_TD))
    return (sums / counts[:, None]).astype(np.float32)


def join_parts(vectors: Sequence[Vector], lengths: Sequence[int]) -> Vector:
    """Return the mean of the vectors of a text's parts, weighted by the number of tokens of each part."""
    mean: Vector = np.average(np.stack(vectors), 0, lengths).astype(np.float32)
    return mean


def similarities(vectors: Sequence[Vector], num_first: int, pooler: PoolerConfig) -> list[float]:
    """Return the similarity of each later result and its partner among the first `num_first`.

    It is the cosine of two vectors, or the product of two sparse vectors. For matrices, it is the sum of the highest
    cosine of each row of the first with any row of the second (MaxSim, ColBERT, arXiv 2004.12832).
    """
    normalize = pooler.kind is not PoolingKind.HEAD
    normed = [
        finish_vectors(each, pooler, dimensions=None, normalize=normalize).astype(np.float64)
        for each in vectors
    ]
    firsts, seconds = normed[:num_first], normed[num_first:]
    if num_first == 1:
        firsts *= len(seconds)
    if normed[0].ndim == 1:
        scores: list[float] = (np.stack(firsts) * np.stack(seconds)).sum(1).tolist()
        return scores
    pairs = zip(firsts, seconds, strict=True)
    return [float((first_QD @ second_TD.T).max(1).sum()) for first_QD, second_TD in pairs]


def class_scores(scores: Vector, classifier: ClassifierConfig, *, activate: bool | None) -> Vector:
    """Return the class probabilities for scores [..., L]; with `activate` False the scores themselves.

    Scores are first shifted and scaled as the classifier says.
    """
    if (classifier.logit_mean, classifier.logit_sigma) != (0.0, 1.0):
        scores = (scores - np.float32(classifier.logit_mean)) / np.float32(classifier.logit_sigma)
    if activate is False or classifier.activation is Activation.IDENTITY:
        return scores
    wide = scores.astype(np.float64)
    if classifier.activation is Activation.SIGMOID:
        # The argument of exp is never positive, so it cannot overflow.
        small = np.exp(-np.abs(wide))
        result = np.where(wide >= 0, 1, small) / (1 + small)
    else:
        powers = np.exp(wide - wide.max(-1, keepdims=True))
        result = powers / powers.sum(-1, keepdims=True)
    probabilities: Vector = result.astype(np.float32)
    return probabilities


def verify_embeds(model: ModelConfig) -> None:
    """Raise ParameterError if a model has no embeddings.

    It has a classification head, or a decoder beside its encoder, or it writes down speech.
    """
    _verify_reads_text(model)
    if model.source_text is not None and model.classifier is None:
        raise ParameterError(
            "model",
            f"{model.served_names[0]} has an encoder and a decoder, so it does not embed text; use /v1/completions",
        )
    if model.classifier is not None:
        raise ParameterError(
            "model",
            f"{model.served_names[0]} is a classifier, which does not embed text; use /classify",
        )


def verify_embeds_texts(model: ModelConfig) -> None:
    """Raise ParameterError if a model has no embeddings, or only those of single tokens."""
    verify_embeds(model)
    if model.pooler.kind is PoolingKind.ALL:
        raise ParameterError(
            "model",
            f"{model.served_names[0]} embeds each token of a text, not the text; use /pooling or /v1/score",
        )


def verify_classifies(model: ModelConfig) -> ClassifierConfig:
    """Return the classification head of a model. Raise ParameterError if the model has none."""
    if model.classifier is None:
        raise ParameterError(
            "model",
            f"{model.served_names[0]} has no classification head, so it cannot classify text"
            + ("" if model.audio is not None else "; use /v1/embeddings"),
        )
    if model.pooler.kind is PoolingKind.ALL:
        raise ParameterError(
            "model",
            f"{model.served_names[0]} classifies each token of a text, not the text; use /pooling",
        )
    return model.classifier


def verify_compares(model: ModelConfig) -> None:
    """Raise ParameterError if a model cannot compare texts: a classifier with several classes, or a speech model."""
    _verify_reads_text(model)
    if model.classifier is None:
        return
    verify_classifies(model)
    if len(model.classifier.labels) != 1:
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
