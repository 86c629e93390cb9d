"""A decoder of any family that the installed transformers has, with Engine's paged attention and sampler.

Families for which Engine has no spec run as a module of transformers. The module's attention interface calls Engine's
attention, which stores keys and values. The module sees the tokens of all requests of a step as one sequence.

Shapes: T tokens of a step, S of them sampled, D hidden size, H query heads, G key/value heads, K head dimension, V
vocabulary.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ....protocol.arrays import Int32Array
from ....protocol.errors import CheckpointError, ConfigError, counted
from ...attention import AttentionBackend, AttentionLayer, as_backend
from ...batch import AttentionBatch
from ...layers.layer_spec import LayerSpec
from ...layers.layers import LayerKernels
from ...layers.parallel.shard import ModelShard
from ...layers.spec import ModelSpec
from ..torch_decoder import TorchDecoder

_ATTENTION = "engine"
"""The name of Engine's attention in transformers' configs."""

_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"
"""The method of transformers' models that warns if tokens of padding have no mask."""

_SELF_CHECK_TOKENS = 12
_SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

AttentionFunction = Callable[..., tuple[Tensor, None]]


class _SeenLayer(msgspec.Struct, frozen=True):
    """The arguments with which a layer called the attention in a trial run."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None


def has_transformers() -> bool:
    """Return whether the package is installed."""
    return importlib.util.find_spec("transformers") is not None


class TransformersModel:
    """A transformers model on the meta device, and a `ModelSpec` derived from how it calls its attention function.

    Args:
        path: A directory with a config.json.
        trusts_remote_code: If true, Python code in the checkpoint may run.

    Raises:
        CheckpointError: transformers does not have this architecture, or it cannot run with paged attention.
        ConfigError: transformers is not installed.
    """

    def __init__(
        self, path: Path, overrides: dict[str, object], *, trusts_remote_code: bool = False
    ) -> None:
        if not has_transformers():
            raise ConfigError(
                "--model-impl transformers needs the package transformers: "
                "pip install 'engine-serve[transformers]'"
            )
        # Imported here, because importing transformers takes seconds that other models should not spend.
        transformers: Any = importlib.import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        self.path = path
        self._transformers = transformers
        self._trusts_remote_code = trusts_remote_code
        transformers.AttentionInterface.register(_ATTENTION, self._note)
        self._seen: dict[int, _SeenLayer] = {}
        try:
            self.config = transformers.AutoConfig.from_pretrained(
                path, trust_remote_code=trusts_remote_code, **overrides
            )
            with torch.device("meta"):
                module = transformers.AutoModelForCausalLM.from_config(
                    self.config,
                    dtype=torch.bfloat16,
                    attn_implementation=_ATTENTION,
                    trust_remote_code=trusts_remote_code,
                )
                for each in module.modules():
                    # It reads the values of tokens, and these have none.
                    if hasattr(each, _PADDING_CHECK):
                        setattr(each, _PADDING_CHECK, lambda *_: None)
                output = run_module(module, torch.zeros(4).long(), torch.arange(4))
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, NotImplementedError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            reason = f"a trial run without weights ends with {reason}"
            if isinstance(error, KeyError) and error.args == (_ATTENTION,):
                reason = "its layers have attention functions of their own"
            if "Unrecognized configuration class" in reason:
                reason = f"it has no decoder for model_type {self.config.model_type!r} without images or audio"
            raise self._refusal(reason) from error
        self.spec = self._spec(output.last_hidden_state.shape[-1])

    def _refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(
            self.path, f"transformers cannot run the model with Engine's attention: {reason}"
        )

    def _note(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *_: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Record the arguments of one layer's attention, and return an empty result of its shape.

        transformers creates no mask for an unknown attention, so a mask is one that the layer itself computes.
        """
        if attention_mask is not None:
            raise self._refusal("its attention has a custom mask")
        for name in ("s_aux", "alibi", "position_bias"):
            if options.get(name) is not None:
                raise self._refusal(f"its attention has {name}")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise self._refusal("its attention is bidirectional, or only its mask is causal")
        num_heads, num_tokens, head_dim = query.shape[1:]
        if value.shape != key.shape or key.shape[-1] != head_dim:
            raise self._refusal("its keys and values differ in size")
        index: Any = module.layer_idx
        self._seen[int(index)] = _SeenLayer(
            num_heads,
            int(key.shape[1]),
            head_dim,
            float(options.get("scaling") or head_dim**-0.5),
            options.get("sliding_window"),
            options.get("softcap"),
        )
        return query.new_empty(1, num_tokens, num_heads, head_dim), None

    def _spec(self, hidden_size: int) -> ModelSpec:
        text = self.config.get_text_config()
        # The layers of a decoder may be fewer or more than those of the encoder beside which it was trained.
        num_layers = int(getattr(text, "decoder_layers", text.num_hidden_layers))
        layers = [self._seen.get(i) for i in range(num_layers)]
        heads = {(x.num_heads, x.num_kv_heads, x.head_dim, x.scale, x.softcap) for x in layers if x}
        if None in layers or len(self._seen) != num_layers or len(heads) != 1:
            raise CheckpointError(
                self.path,
                f"only {len(self._seen)} of its {num_layers} layers call transformers' attention interface, "
                f"with {counted(len(heads), 'head layout')}; all layers must call it, with one layout",
            )
        num_heads, num_kv_heads, head_dim, scale, softcap = heads.pop()
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * num_layers
        if not set(kinds) <= {"full_attention", "sliding_attention"}:
            others = sorted(set(kinds) - {"full_attention", "sliding_attention"})
            raise CheckpointError(
                self.path,
                f"its layer_types {', '.join(others)} are not supported; use another model",
            )
        return ModelSpec(
            model_type=str(self.config.model_type),
            vocab_size=int(text.vocab_size),
            hidden_size=hidden_size,
            intermediate_size=num_heads * head_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            layers=tuple(LayerSpec(None, layer.window) for layer in layers if layer),
            max_position_embeddings=int(getattr(text, "max_position_embeddings", 0) or 1 << 30),
            norm_eps=0.0,
            attention_scale=scale,
            tie_word_embeddings=False,
            attention_softcap=softcap,
        )

    def load(self, dtype: torch.dtype, device: torch.device, attend: AttentionFunction) -> Any:
        """Return the module with its weights. Its attention calls `attend`."""
        self._transformers.AttentionInterface.register(_ATTENTION, attend)
        try:
            module: Any = self._transformers.AutoModelForCausalLM.from_pretrained(
                self.path,
                config=self.config,
                dtype=dtype,
                attn_implementation=_ATTENTION,
                trust_remote_code=self._trusts_remote_code,
            )
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                self.path, f"transformers cannot load the model: {reason}"
            ) from error
        return module.to(device).eval()


def run_module(module: Any, input_ids_T: Tensor, positions_T: Tensor | None) -> Any:
    """Return the output of the layers; its `last_hidden_state` is [1, T, D], after the last norm.

    Without positions, the module chooses those of a sequence that starts with the first token.
    """
    positions_1T = None if positions_T is None else positions_T[None]
    return module.base_model(
        input_ids=input_ids_T[None], position_ids=positions_1T, use_cache=False
    )


def _replace_positions(module: nn.Module, positions_T: Callable[[], Tensor | None]) -> None:
    """Let embeddings of positions read those of the step, because decoders like BART's number tokens themselves."""

    def replace(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        replaced_T, given = positions_T(), options.get("position_ids")
        if replaced_T is None or given is None:
            return None
        return args, options | {"position_ids": replaced_T.expand(given.shape)}

    for each in module.modules():
        parameters = inspect.signature(each.forward).parameters
        if isinstance(each, nn.Embedding) and "position_ids" in parameters:
            each.register_forward_pre_hook(replace, with_kwargs=True)


class _GivenHiddenStates(nn.Module):
    """A module that replaces the layers when only the head is computed."""

    output_class: type
    hidden_SD: Tensor

    @property
    def decoder(self) -> nn.Module:
        """The module that the heads of encoder-decoder families call."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output_class(last_hidden_state=self.hidden_SD[None])


class TransformersDecoder(TorchDecoder):
    """The whole model as a module of transformers.

    Raises:
        CheckpointError: The weights cannot be loaded, or the results change if a sequence is divided among steps.
    """

    is_foreign = True

    def __init__(
        self,
        model: TransformersModel,
        spec: ModelSpec,
        attention: AttentionBackend,
        *,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(spec, attention, ModelShard.whole(spec), dtype, LayerKernels())
        self._layers = [
            AttentionLayer(spec.attention_scale, layer.window, spec.attention_softcap)
            for layer in spec.layers
        ]
        self._kv_caches: Sequence[Tensor] = ()
        self._metadata: Sequence[Any] = ()
        self._module = model.load(dtype, attention.device, self._attend)
        self._positions_T: Tensor | None = None
        self._first_position = 0
        _replace_positions(self._module, lambda: self._positions_T)
        self._given = _GivenHiddenStates()
        # Run the head of the family, including all that it does to logits, on given hidden states.
        self._head = copy.copy(self._module)
        self._head._modules = {
            **self._module._modules,
            self._module.base_model_prefix: self._given,
        }
        self._path = model.path

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """Compute the attention of one layer: queries [1, H, T, K], keys and values [1, G, T, K]."""
        index: Any = module.layer_idx
        q_THK, k_TGK, v_TGK = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        attended_THK = as_backend(self.attention).forward(
            q_THK,
            k_TGK,
            v_TGK,
            self._kv_caches[index],
            self._metadata[self.spec.layers[index].kv_cache_group],
            self._layers[index],
        )
        return attended_THK[None], None

    @torch.inference_mode()
    def forward(
        self,
        inputs: Tensor,
        positions_T: Tensor,
        kv_caches: Sequence[Tensor],
        attn_metadata: Sequence[Any],
    ) -> Tensor:
        """Fill the KV caches and return the normed hidden states [T, D] of token ids [T]."""
        return self._run(inputs, positions_T, kv_caches, attn_metadata)

    def _run(
        self,
        inputs: Tensor,
        positions_T: Tensor | None,
        kv_caches: Sequence[Tensor],
        attn_metadata: Sequence[Any],
    ) -> Tensor:
        self._kv_caches, self._metadata = kv_caches, attn_metadata
        if positions_T is not None:
            positions_T = positions_T.long() + self._first_position
        self._positions_T = positions_T
        output = run_module(self._module, inputs.long(), positions_T)
        self._given.output_class = type(output)
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def store_source(self, *_: Any, **__: Any) -> None:
        """Do nothing, because the model has no cross attention."""

    def record_queries(self, *_: Any, **__: Any) -> None:
        """Do nothing, because the model has no cross attention."""

    def join_round(self) -> None:
        """Do nothing, because replicas do not divide the experts."""

    @torch.inference_mode()
    def compute_logits(self, hidden_SD: Tensor, slots_S: Int32Array | None = None) -> Tensor:
        """Return the logits [S, V] in float32."""
        self._given.hidden_SD = hidden_SD.to(self.hidden_dtype)
        none = torch.zeros((1, len(hidden_SD)), dtype=torch.long, device=hidden_SD.device)
        logits_1SV: Tensor = self._head(input_ids=none, use_cache=False).logits
        return logits_1SV[0].float()

    @torch.inference_mode()
    def check(self) -> None:
        """Compute a sequence in one step, and again in two steps together with other sequences.

        Raises:
            CheckpointError: The results differ, so layers depend on other tokens by other means than attention, or
                the module itself would choose other positions.
        """
        block_size, vocab_size = self.attention.block_size, self.spec.vocab_size
        num_blocks = -(-_SELF_CHECK_TOKENS // block_size)
        shape = self.attention.kv_cache_shape(1 + 3 * num_blocks)
        caches = [
            torch.zeros(shape, dtype=self.attention.dtype, device=self.attention.device)
            for _ in self.spec.layers
        ]
        tokens = np.random.default_rng(0).integers(0, vocab_size, (3, _SELF_CHECK_TOKENS))
        padding = self._module.config.get_text_config().pad_token_id
        if padding is not None:
            # Such a token may have no position.
            tokens[tokens == padding] = (padding + 1) % vocab_size

        def hidden_states(*chunks: tuple[int, int, int], has_positions: bool = True) -> Tensor:
            """Return the hidden states of chunks (sequence, start, stop), computed in one step."""
            step = _Chunks(np.array(chunks, np.int32), num_blocks, block_size)
            metadata = [self.attention.build(step.batch(), w) for w in self.spec.windows_by_group]
            ids_T = torch.from_numpy(np.concatenate([tokens[i, a:b] for i, a, b in chunks]))
            positions_T = torch.from_numpy(step.positions_T()).to(self.attention.device)
            return self._run(
                ids_T.to(self.attention.device),
                positions_T if has_positions else None,
                caches,
                metadata,
            ).float()

        middle, end = _SELF_CHECK_TOKENS // 2 + 1, _SELF_CHECK_TOKENS
        own_TD = hidden_states((0, 0, end), has_positions=False)
        # Positions of RoBERTa follow the id of the padding token.
        for self._first_position in (0, *([] if padding is None else [padding + 1])):
            whole_TD = hidden_states((0, 0, end))
            if self._is_close(own_TD, whole_TD):
                break
        else:
            raise CheckpointError(
                self._path,
                "transformers' model does not number the tokens of a sequence from 0 or from the padding token's id "
                "plus 1, so Engine cannot serve it",
            )
        first_TD = hidden_states((1, 0, end), (0, 0, middle))[end:]
        second_TD = hidden_states((2, 0, end), (0, middle, end), (1, end - 1, end))
        parts_TD = torch.cat((first_TD, second_TD[end:-1]))
        if not self._is_close(parts_TD, whole_TD):
            raise CheckpointError(
                self._path,
                "transformers' model computes different values if its tokens are split over several steps, so "
                "Engine cannot serve it",
            )

    def _is_close(self, x_TD: Tensor, y_TD: Tensor) -> bool:
        difference = float((x_TD - y_TD).abs().max() / y_TD.abs().max())
        return difference <= _SELF_CHECK_TOLERANCE[self.hidden_dtype]


class _Chunks(msgspec.Struct, frozen=True):
    """Chunks of sequences, int32 rows of (sequence, start, stop), each sequence with its own `num_blocks` blocks."""

    rows_S3: NDArray[np.int32]
    num_blocks: int
    block_size: int

    def positions_T(self) -> NDArray[np.int32]:
        """Return the position of each token."""
        return np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in self.rows_S3])

    def batch(self) -> AttentionBatch:
        """Return the step's description for the attention."""
        sequences_S, starts_S, stops_S = self.rows_S3.T
        blocks = 1 + sequences_S[:, None] * self.num_blocks + np.arange(self.num_blocks)
        sizes_S = stops_S - starts_S
        rows_T, positions_T = np.repeat(np.arange(len(sizes_S)), sizes_S), self.positions_T()
        place_T = blocks[rows_T, positions_T // self.block_size] * self.block_size
        return AttentionBatch(
            np.concatenate(([0], np.cumsum(sizes_S))).astype(np.int32),
            stops_S.astype(np.int32),
            blocks.astype(np.int32),
            (place_T + positions_T % self.block_size).astype(np.int32),
        )
