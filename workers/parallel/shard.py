"""The part of a model that one worker holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..layers.spec import ModelSpec
from .tensor_parallel import TensorParallel


@dataclass(frozen=True, slots=True)
class ModelShard:
    """A pipeline stage (`layers` of the model's `num_layers`) and a tensor-parallel share of each of its layers.

    The first stage has the embedding, the last one the final norm and the head.
    """

    layers: range
    num_layers: int
    tensor_parallel: TensorParallel = field(default_factory=TensorParallel)

    @classmethod
    def whole(cls, spec: ModelSpec) -> ModelShard:
        """Return a shard with the whole model."""
        return cls(range(len(spec.layers)), len(spec.layers))

    @classmethod
    def from_stage(
        cls, spec: ModelSpec, stage: int, num_stages: int, tensor_parallel: TensorParallel
    ) -> ModelShard:
        """Return the shard of a stage.

        Stages differ by at most one layer. The last one, which has the head, has the fewest.
        """
        num_layers = len(spec.layers)
        start, stop = (-(-num_layers * i // num_stages) for i in (stage, stage + 1))
        return cls(range(start, stop), num_layers, tensor_parallel)

    @property
    def is_first(self) -> bool:
        """True for the first stage."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """True for the last stage."""
        return self.layers.stop == self.num_layers

    def heads(self, spec: ModelSpec) -> range:
        """Return the query heads of this rank."""
        return self.tensor_parallel.part(spec.num_heads)

    def kv_heads(self, spec: ModelSpec) -> range:
        """Return the key/value heads of this rank's query heads; several ranks may have the same one."""
        return self.tensor_parallel.part(spec.num_kv_heads)
