"""Which part of a model one worker has."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..tensor_parallel import TensorParallel
from .spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelShard:
    """A pipeline stage, the `layers` of the model's `num_layers`, and a share of each of them.

    The first stage has the embedding, the last one the final norm and the head.
    """

    layers: range
    num_layers: int
    tensor_parallel: TensorParallel = field(default_factory=TensorParallel)

    @classmethod
    def whole(cls, spec: ModelSpec) -> ModelShard:
        return cls(range(len(spec.layers)), len(spec.layers))

    @classmethod
    def of_stage(
        cls, spec: ModelSpec, stage: int, num_stages: int, tensor_parallel: TensorParallel
    ) -> ModelShard:
        """Stages differ by one layer at most; none is shorter than the last one, which has the head."""
        num_layers = len(spec.layers)
        start, stop = (-(-num_layers * i // num_stages) for i in (stage, stage + 1))
        return cls(range(start, stop), num_layers, tensor_parallel)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.num_layers

    def heads(self, spec: ModelSpec) -> range:
        """The query heads."""
        return self.tensor_parallel.part(spec.num_heads)

    def kv_heads(self, spec: ModelSpec) -> range:
        """The key/value heads that those need; ranks share one if there are fewer than ranks."""
        return self.tensor_parallel.part(spec.num_kv_heads)
