"""The part of a model that one worker holds."""

from __future__ import annotations

import msgspec

from ....protocol.errors import ConfigError, counted
from ..spec import ModelSpec
from ..specs.experts import ExpertsSpec
from .expert_group import ExpertGroup
from .tensor_parallel import TensorParallel


class ExpertPlacement(msgspec.Struct, frozen=True):
    """The part of a layer's experts that one rank has: some intermediate elements of each of `experts`.

    These are `elements[m]` of an expert of mixture m. If ranks share an expert, only one of them `adds_bias`.
    `elsewhere` are the experts of other ranks.
    """

    experts: range
    elsewhere: tuple[int, ...]
    elements: tuple[range, ...]
    adds_bias: bool


class ModelShard(msgspec.Struct, frozen=True):
    """A pipeline stage (`layers` of the model's `num_layers`) and a tensor-parallel part of each of its layers.

    The first stage has the embedding, the last one the final norm and the head. If `has_whole_experts`, the ranks
    divide the experts, otherwise the elements of each expert. If there is an `expert_group`, its ranks divide the
    experts.
    """

    layers: range
    num_layers: int
    tensor_parallel: TensorParallel = msgspec.field(default_factory=TensorParallel)
    has_whole_experts: bool = False
    expert_group: ExpertGroup | None = None

    @classmethod
    def whole(cls, spec: ModelSpec) -> ModelShard:
        """Return a shard with the whole model."""
        return cls(range(len(spec.layers)), len(spec.layers))

    @classmethod
    def from_stage(
        cls,
        spec: ModelSpec,
        stage: int,
        num_stages: int,
        tensor_parallel: TensorParallel,
        *,
        has_whole_experts: bool = False,
        expert_group: ExpertGroup | None = None,
    ) -> ModelShard:
        """Return the shard of a stage.

        Stages differ by at most one layer, and the last one, which also has the head, has the fewest. A layer that
        reads the keys and values of another layer, or its outputs, must be in the same stage. If that makes the last
        stage longer, the others divide the rest. In a model with indexers, the first layer of every stage that attends
        has one.
        """
        num_layers = len(spec.layers)
        if spec.loop_window and num_stages > 1:
            raise ConfigError(
                f"--pipeline-parallel-size {num_stages}: stages cannot divide a model whose layers attend to the keys of "
                "earlier ones; use --tensor-parallel-size"
            )
        starts = [-(-num_layers * i // num_stages) for i in range(num_stages)]
        sources = [
            source
            for layer in spec.layers
            for source in (layer.kv_source, layer.memory_source)
            if source is not None
        ]
        has_choices = spec.latent is not None or spec.compressed is not None
        limit = None if has_choices else min(sources, default=None)
        if limit is not None and starts[-1] > limit:
            starts = [-(-limit * i // (num_stages - 1)) for i in range(num_stages)]
        if has_choices:
            starts = [max(i for i in range(x + 1) if _may_begin(spec, i)) for x in starts]
            if len(set(starts)) < num_stages:
                raise ConfigError(
                    f"--pipeline-parallel-size {num_stages}: every stage must begin with a layer that needs neither "
                    f"the keys nor the choice of an earlier one, and too few of the model's {num_layers} layers "
                    "are such; use fewer stages"
                )
        # The experts of the layer before a stage's first one must not be added within the stage.
        shortcuts = [x.experts is not None and x.experts.is_shortcut for x in spec.layers]
        starts = [start - 1 if start and shortcuts[start - 1] else start for start in starts]
        if len(set(starts)) < num_stages:
            raise ConfigError(
                f"--pipeline-parallel-size {num_stages}: too many for the model, which has {counted(num_layers, 'layer')}; use fewer "
                "stages"
            )
        start, stop = [*starts, num_layers][stage : stage + 2]
        return cls(range(start, stop), num_layers, tensor_parallel, has_whole_experts, expert_group)

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
        """Return the key/value heads for this rank's query heads. Several ranks may have the same one."""
        return self.tensor_parallel.part(spec.num_kv_heads)

    def placement(self, experts: ExpertsSpec) -> ExpertPlacement:
        """Return the part of a layer's experts that this rank has.

        Raises:
            ConfigError: There are more ranks than intermediate elements to divide among them.
        """
        parallel = self.tensor_parallel
        every = range(experts.num_numbered)
        sizes = [experts.size_in(mixture) for mixture in range(experts.num_mixtures)]
        divided = [] if self.has_whole_experts else sizes
        if shared := experts.shared_intermediate_size:
            divided = [*divided, shared]
        if divided and min(divided) < parallel.size:
            raise ConfigError(
                f"--tensor-parallel-size {parallel.size}: experts of the model have only {min(divided)} intermediate "
                f"elements; use at most {min(divided)}"
            )
        if not self.has_whole_experts:
            elements = tuple(map(parallel.part, sizes))
            return ExpertPlacement(every, (), elements, adds_bias=parallel.rank == 0)
        own = (self.expert_group or parallel).part(experts.num_numbered)
        elsewhere = tuple(expert for expert in every if expert not in own)
        return ExpertPlacement(own, elsewhere, tuple(map(range, sizes)), adds_bias=True)


def _may_begin(spec: ModelSpec, index: int) -> bool:
    """Return whether a stage may begin with this layer: it and later layers must not use earlier keys or choices."""
    following = [layer for layer in spec.layers[index:] if layer.attends]
    compressions = [layer.compression for layer in following if layer.compression is not None]
    sources = [layer.kv_source for layer in following]
    sources += [source for each in compressions for source in (each.source, each.candidate_source)]
    if any(source is not None and source < index for source in sources):
        return False
    latents = (layer.latent or spec.latent for layer in following)
    sparse = [
        each for each, latent in zip(following, latents, strict=True) if latent and latent.indexer
    ]
    return not sparse or sparse[0].chooses_keys
