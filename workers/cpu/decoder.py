"""A decoder that runs each step as one call of a native program.

Shapes: T tokens of a step, S of them sampled, D hidden size, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.arrays import Int32Array
from ...protocol.config import SpeculativeConfig
from ..batch import PersistentBatch
from ..device.device import usable_cores
from ..device.dtypes import (
    AnyArray,
    HostDtype,
    address,
    as_tensor,
    configured_dtype,
    float32_array,
    on_host,
    torch_dtype,
)
from ..layers.parallel.shard import ModelShard
from ..layers.spec import ModelSpec
from ..loaders import Checkpoint, DummyCheckpoint
from ..loaders.stored.packed_file import PackedFile
from ..models.cross_attention import QueryRecorder
from ..models.encoder import Encoder
from ..models.lora.adapters import LoraAdapters, RowAdapters
from ..models.score_head import ScoreHead
from ..models.weights import ProgressCallback
from ..sampling import SamplerOutput
from ..towers.placed import Placed
from .abi.structs import Step, StepGroup
from .adapters import NativeAdapters
from .attention import NativeAttention, NativeAttentionMetadata
from .decoding import NativeDecoding
from .drafts.kept_inputs import NativeKeptInputs
from .library import NotSupportedNatively
from .program import NativeProgram, StoringProgram
from .recording.model_shape import model_shape
from .recording.recorder import Recorder
from .sampling import NativeSampler, PromptScorer, RowsToSample
from .supported import check_supported
from .weights import NativeWeightReader


class NativeDecoder:
    """The model described by `spec`, or a shard of it, as a recorded program with the interface of `Decoder`.

    Hidden states are float32. Quantized weights stay quantized.

    Args:
        spec: The model.
        checkpoint: Its weights.
        attention: The KV cache for the heads of the shard.
        dtype: The dtype of float weights.
        max_model_len: The length of the longest sequence that will be served.
        shard: The part of the model; by default the whole.
        on_progress: Called with (loaded bytes, total bytes).
        quantization: "int8" or "int4" to quantize float weights while they are read.
        keeps_float16: If true, float16 weights stay float16.
        num_threads: The number of threads; by default the number of CPU cores that the process may use.
        loras: The LoRA adapters that requests may use.
        packed: A file with the packed matrices, or for them.
        places_embeddings: If true, embeddings may replace tokens even if the model has no encoder.
        kept_layers: The layers whose inputs are kept in `kept_hidden_TE`; the number of layers means the final norm's
            input.
        stores_keys: If true, `store_keys` can be called.

    Raises:
        NotSupportedNatively: Only the torch decoder supports this model.
        CheckpointError: See `Decoder`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        attention: NativeAttention,
        *,
        dtype: torch.dtype | HostDtype,
        max_model_len: int,
        shard: ModelShard | None = None,
        on_progress: ProgressCallback | None = None,
        quantization: str | None = None,
        keeps_float16: bool = False,
        num_threads: int | None = None,
        loras: LoraAdapters | None = None,
        packed: PackedFile | None = None,
        places_embeddings: bool = False,
        kept_layers: Sequence[int] | None = None,
        stores_keys: bool = False,
    ) -> None:
        self.is_foreign = False
        self.spec = spec
        self.kept_hidden_TE: Tensor | None = None
        """The hidden states of all tokens of the last step, [T, E]: normed ones, then the input of each kept layer."""
        self.loras = loras
        self.encoder: Encoder | None = None
        self.placed: Placed | None = None
        self.rotary_T3: AnyArray | None = None
        self.reads_T1: Tensor | None = None
        self.attention = attention
        self.shard = shard = shard or ModelShard.whole(spec)
        self._kept = NativeKeptInputs(spec, shard, kept_layers)
        self.kept_width, self.received_width = self._kept.kept_width, self._kept.received_width
        self.hidden_dtype = configured_dtype("float32", attention.device)
        if isinstance(checkpoint, DummyCheckpoint):
            raise NotSupportedNatively("the native CPU backend does not support dummy weights")
        check_supported(spec)
        if kept_layers and spec.hyper_connections is not None and not spec.hyper_connections.rank:
            raise NotSupportedNatively(
                "the native CPU backend does not support heads that read means of streams"
            )
        has_encoder = spec.source is not None and spec.source.encoder is not None
        if has_encoder and shard.tensor_parallel.size > 1:
            raise NotSupportedNatively(
                "the native CPU backend does not support encoders with --tensor-parallel-size"
            )
        num_threads = num_threads or usable_cores()
        adapters = None
        if loras is not None:
            vocabulary = shard.tensor_parallel.part(spec.vocab_size)
            adapters = NativeAdapters(loras, spec, vocabulary, torch_dtype(dtype))
        weights = NativeWeightReader(
            checkpoint,
            dtype,
            has_head=spec.has_head and not spec.tie_word_embeddings,
            has_embedding=spec.has_embedding,
            tensor_names=spec.tensor_names,
            row_factors=spec.row_factors,
            is_transposed=spec.has_transposed_matrices,
            quantization=quantization,
            keeps_float16=keeps_float16,
            num_threads=num_threads,
            shard=shard,
            on_progress=on_progress,
            on_matrix=None if adapters is None else adapters.add_matrix,
            packed=packed,
        )
        if loras is not None:
            loras.prepare(spec, shard, weights.checkpoint)
        self.score_head = ScoreHead.read(spec, weights, loras) if shard.is_last else None
        shape = model_shape(spec, shard, attention, num_threads)
        self._program = NativeProgram(shape, spec.norm_eps, adapters)
        self._recorder: QueryRecorder | None = None
        self._store: StoringProgram | None = None
        if spec.source is not None:
            store_spec = replace(spec, hidden_size=spec.source.hidden_size, norm_kind="layer")
            shape = model_shape(store_spec, shard, attention, num_threads)
            self._store = StoringProgram(shape, spec.norm_eps)
        elif stores_keys:
            self._store = StoringProgram(shape, spec.norm_eps)
        recorder = Recorder(
            self._program,
            spec,
            shard,
            weights,
            max_model_len,
            self._store,
            places_embeddings=places_embeddings,
            kept_columns=self._kept.columns,
        )
        recorder.record()
        self._embeds = shard.is_first and spec.has_embedding
        if shard.tensor_parallel.size > 1:
            self._program.join_ranks(shard.tensor_parallel)
        if shard.expert_group is not None:
            self._program.join_experts(shard.expert_group)
        self._embedding: NativeProgram | None = None
        if self.kept_width and recorder.embedding is not None:
            single = replace(spec, hyper_connections=None, attention_residuals=None)
            self._embedding = NativeProgram(model_shape(single, shard, attention, 1), spec.norm_eps)
            scale = spec.rounded_embedding_scale(weights.any_dtype)
            self._embedding.add_op("embed", parts=[recorder.embedding], scale=scale)
            self._embedding.add_op("final_norm")
            self._embedding.add_op("head")
        self._kv_caches: Sequence[AnyArray] = ()
        num_caches = sum(len(spec.layers[index].cache_groups) for index in shard.layers)
        self._kv_pointers = (ctypes.c_void_p * num_caches)()
        self._groups = (StepGroup * len(spec.windows_by_group))()
        self._cross_group = min(spec.cross_groups, default=None)
        # Reuse the struct, because creating one takes much longer.
        self._step = Step(groups=self._groups, kv_caches=self._kv_pointers)

    def forward(
        self,
        inputs: AnyArray,
        positions_T: AnyArray,
        kv_caches: Sequence[AnyArray],
        attn_metadata: Sequence[NativeAttentionMetadata],
    ) -> AnyArray:
        """Fill the KV caches. Return float32 hidden states, as a tensor or array like `inputs`.

        On the last stage they are normed, [T, D]. On other stages they include all that later stages read, [T,
        `received_width`].

        Args:
            inputs: Token ids [T] for the first stage, else hidden states of the previous stage, which are overwritten.
            positions_T: Integer positions.
            kv_caches: One tensor per KV-cache group that a layer of the shard reads, in the order of the layers.
            attn_metadata: Results of `NativeAttention.build` for each KV-cache group, including those of states.
        """
        hidden_TD = self._run(inputs, positions_T, kv_caches, attn_metadata)
        return hidden_TD if isinstance(inputs, np.ndarray) else as_tensor(hidden_TD)

    def store_source(
        self,
        encoded_ED: AnyArray,
        kv_caches: Sequence[AnyArray],
        attn_metadata: Mapping[int, NativeAttentionMetadata],
    ) -> None:
        """Store the keys and values of an encoder's outputs in the caches of cross attention.

        Args:
            encoded_ED: The outputs of the encoder.
            kv_caches: The same as for `forward`.
            attn_metadata: For each cross-attention group, the result of `NativeAttention.build` for a sequence with as
                many tokens.
        """
        assert self._store is not None
        hidden_ED = float32_array(encoded_ED)
        positions_E = np.arange(len(hidden_ED), dtype=np.int32)
        self._store.store(hidden_ED, positions_E, kv_caches, attn_metadata)

    def store_keys(
        self,
        inputs_TD: Tensor,
        positions_T: AnyArray,
        kv_caches: Sequence[AnyArray],
        attn_metadata: Sequence[NativeAttentionMetadata],
    ) -> None:
        """Store the keys and values that each layer computes from the same inputs [T, D], without a norm before it.

        The other arguments are those of `forward`.
        """
        assert self._store is not None
        of_groups = dict(enumerate(attn_metadata))
        self._store.store(float32_array(inputs_TD), _int32(positions_T), kv_caches, of_groups)

    def record_queries(self, recorder: QueryRecorder | None) -> None:
        """Pass the queries of cross attention in later steps to `recorder`; None stops that."""
        self._recorder = recorder

    def make_sampler(self, batch: PersistentBatch) -> NativeSampler:
        """Return the sampler for the requests of `batch`, which `forward_and_sample` uses from now on."""
        self._sampler = NativeSampler(batch, self.spec.num_token_ids, self._program)
        self._batch = batch
        return self._sampler

    def make_prompt_scorer(self, max_rows: int) -> PromptScorer:
        """Return an object that computes the log-probabilities of up to `max_rows` prompt tokens at a time."""
        return PromptScorer(max_rows, self.spec.num_token_ids, self._program)

    def forward_and_sample(
        self,
        inputs: AnyArray,
        positions_T: AnyArray,
        kv_caches: Sequence[AnyArray],
        attn_metadata: Sequence[NativeAttentionMetadata],
        rows_S: Int32Array,
        slots_S: Int32Array,
    ) -> SamplerOutput:
        """Run `forward` and sample from its rows `rows_S`, in one native call.

        If every row takes its most likely token, logits are not written to memory. Rows that are not sampled skip the
        end of the last layer.
        """
        metadata = self._sampler.describe(slots_S)
        rows = None
        if not metadata.takes_most_likely:
            positions_S = self._batch.num_tokens[slots_S]
            rows = RowsToSample(self._sampler, metadata, len(rows_S), positions_S)
        tokens_S = np.empty(len(rows_S), np.int32)
        self._run(
            inputs,
            positions_T,
            kv_caches,
            attn_metadata,
            wants_all_hidden=bool(self.kept_width),
            num_logit_rows=len(rows_S),
            logit_rows=rows_S.ctypes.data,
            tokens=tokens_S.ctypes.data,
            sampling=None if rows is None else rows.pointer,
        )
        logprobs = None if rows is None else rows.logprobs()
        return SamplerOutput(tokens_S.astype(np.int64), metadata, logprobs)

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return the embeddings of tokens, float32 [T, D]. Requires a decoder with `kept_layers`.

        All tensor-parallel ranks must call this with the same tokens at the same time.
        """
        assert self._embedding is not None
        ranks, tokens_T = self.shard.tensor_parallel, _int32(ids_T)
        part = ranks.part(self.spec.vocab_size)
        if ranks.size > 1:
            is_elsewhere_T = (tokens_T < part.start) | (tokens_T >= part.stop)
            tokens_T = np.where(is_elsewhere_T, 0, tokens_T - part.start).astype(np.int32)
        hidden_TD = np.empty((len(tokens_T), self.spec.hidden_size), np.float32)
        positions_T = np.zeros_like(tokens_T)
        bounds = np.array([0, len(ids_T)], np.int32)
        step = Step(
            num_tokens=len(ids_T),
            num_sequences=1,
            wants_all_hidden=True,
            input_ids=tokens_T.ctypes.data,
            positions=positions_T.ctypes.data,
            query_start_loc=bounds.ctypes.data,
            hidden=hidden_TD.ctypes.data,
            hidden_stride=hidden_TD.shape[1],
        )
        if not self._embedding.run(step):
            raise ValueError(f"token ids must be in [0, {self.spec.num_token_ids})")
        if ranks.size > 1:
            hidden_TD[is_elsewhere_T] = 0
        return ranks.sum(as_tensor(hidden_TD))

    def choose_tokens(
        self, hidden_SD: Tensor, slots_S: Int32Array, positions_S: Int32Array
    ) -> Tensor:
        """Return the tokens that the requests in these slots would sample from hidden states, int32 [S].

        Args:
            hidden_SD: Hidden states after the final norm.
            slots_S: The slots.
            positions_S: The index of the token that each row samples, which determines its random number.
        """
        metadata = self._sampler.describe(slots_S)
        rows = None
        if not metadata.takes_most_likely:
            rows = RowsToSample(self._sampler, metadata, len(slots_S), positions_S)
        tokens_S = np.empty(len(slots_S), np.int32)
        adapters = None if self.loras is None else self.loras.of_slots(slots_S)
        self._run_head(
            hidden_SD,
            _numbers(adapters),
            tokens=tokens_S.ctypes.data,
            sampling=None if rows is None else rows.pointer,
        )
        return as_tensor(np.maximum(tokens_S, 0))

    def choose_among(
        self, ids_C: Tensor, logits_SC: Tensor, slots_S: Int32Array, positions_S: Int32Array
    ) -> Tensor:
        """Return the tokens, int64 [S], that the requests sample from `ids_C`; all other logits are -inf.

        Each row may have its own tokens, [S, C].
        """
        ids_SC = ids_C.expand(logits_SC.shape)
        if self._sampler.describe(slots_S).takes_most_likely:
            return ids_SC.gather(1, logits_SC.argmax(1, keepdim=True))[:, 0]
        logits_SV = np.full((len(slots_S), self.spec.num_token_ids), -np.inf, np.float32)
        np.put_along_axis(logits_SV, ids_SC.numpy(), float32_array(logits_SC), 1)
        return as_tensor(self._sampler.sample(logits_SV, slots_S, positions_S).token_ids)

    def join_round(self) -> None:
        """Compute rows of other replicas, which chose experts of this rank."""
        self._program.join_round()

    def compute_logits(self, hidden_SD: AnyArray, slots_S: Int32Array | None = None) -> AnyArray:
        """Return the logits [S, V] in float32, with the LoRA adapters of these slots; None for the base model.

        They are a tensor or array like the hidden states.
        """
        logits_SV = np.empty((len(hidden_SD), self.spec.num_token_ids), np.float32)
        adapters = None
        if self.loras is not None and slots_S is not None:
            adapters = self.loras.of_slots(slots_S)
        self._run_head(hidden_SD, _numbers(adapters), logits=logits_SV.ctypes.data)
        return logits_SV if isinstance(hidden_SD, np.ndarray) else as_tensor(logits_SV)

    def decoding(
        self,
        batch: PersistentBatch,
        kv_caches: Sequence[AnyArray],
        speculative: SpeculativeConfig | None = None,
    ) -> NativeDecoding | None:
        """Return a faster way to decode the requests of `batch`, which can also verify drafts.

        Return None for a pipeline stage, which cannot sample without the others.
        """
        if not (self.shard.is_first and self.shard.is_last):
            return None
        loras = None if self.loras is None else self.loras.number_by_slot
        return NativeDecoding(
            self._program, batch, kv_caches, self._sampler, speculative, loras, self.kept_width
        )

    def profile(self) -> list[tuple[str, float]]:
        """Return (kind, seconds spent so far) for each operation, in order."""
        return self._program.profile()

    def _run(
        self,
        inputs: AnyArray,
        positions_T: AnyArray,
        kv_caches: Sequence[AnyArray],
        attn_metadata: Sequence[NativeAttentionMetadata],
        *,
        wants_all_hidden: bool = True,
        num_logit_rows: int = 0,
        logit_rows: int | None = None,
        tokens: int | None = None,
        sampling: Any = None,
    ) -> NDArray[np.float32]:
        positions_T = _int32(positions_T)
        ids_T = _int32(inputs) if self._embeds else np.zeros_like(positions_T)
        received_TE = None if self._embeds else float32_array(inputs)
        hidden_TD = self._kept.begin_step(len(ids_T), received_TE)
        if self.kept_width:
            self.kept_hidden_TE = as_tensor(hidden_TD)[:, : self.kept_width]
        token_id = None
        if self.spec.per_layer_inputs is not None:
            token_id = self.spec.per_layer_inputs.placed_token_id
        if self.placed is not None and token_id is not None:
            # Encoder outputs replace embeddings, but not the inputs of layers.
            ids_T = _int32(self.placed.replace_ids(as_tensor(ids_T), token_id))
        step = self._step
        step.num_tokens = len(ids_T)
        step.num_sequences = len(attn_metadata[0].seq_lens)
        step.input_ids = ids_T.ctypes.data
        step.positions = positions_T.ctypes.data
        step.query_start_loc = attn_metadata[0].query_start_loc.ctypes.data
        for group, metadata in zip(self._groups, attn_metadata, strict=True):
            group.block_table = metadata.block_table.ctypes.data
            group.block_table_stride = metadata.block_table.shape[1]
            group.slot_mapping = metadata.slot_mapping.ctypes.data
        if kv_caches is not self._kv_caches:
            self._kv_caches = kv_caches
            self._kv_pointers[:] = [*map(address, kv_caches)]
        step.hidden, step.wants_all_hidden = hidden_TD.ctypes.data, wants_all_hidden
        step.hidden_stride = hidden_TD.shape[1]
        step.num_logit_rows, step.logit_rows = num_logit_rows, logit_rows
        step.tokens, step.sampling = tokens, sampling
        step.adapters = _numbers(None if self.loras is None else self.loras.tokens)
        queries_LTHK: NDArray[np.float32] | None = None
        step.source_queries = None
        if self._cross_group is not None:
            step.source_lens = attn_metadata[self._cross_group].seq_lens.ctypes.data
            if self._recorder is not None:
                shape = len(self.shard.layers), len(ids_T), -1, self.spec.head_dim
                num_queries = len(self.shard.heads(self.spec)) * len(ids_T) * len(self.shard.layers)
                queries_LTHK = np.empty(num_queries * self.spec.head_dim, np.float32).reshape(shape)
                step.source_queries = queries_LTHK.ctypes.data
        step.placed = step.encoded = None
        if self.placed is not None:
            encoded = float32_array(self.placed.encoded)
            step.placed, step.encoded = self.placed.rows_T.ctypes.data, encoded.ctypes.data
            step.encoded_stride = encoded.shape[1]
        step.rotary = None
        if self.rotary_T3 is not None:
            rotary_T3 = _int32(self.rotary_T3)
            step.rotary = rotary_T3.ctypes.data
        visible = attn_metadata[0].visible
        step.visible = None if visible is None else visible.ctypes.data
        step.span_layers = attn_metadata[0].span_layers
        if not self._program.run(step):
            raise ValueError(
                f"token ids must be in [0, {self.spec.num_token_ids}), "
                f"got {ids_T.min()} to {ids_T.max()}"
            )
        if queries_LTHK is not None and self._recorder is not None:
            for layer, q_THK in zip(self.shard.layers, queries_LTHK, strict=True):
                self._recorder.record(layer, as_tensor(q_THK))
        return self._kept.finish_step(hidden_TD, received_TE)

    def _run_head(self, hidden_SD: AnyArray, adapters: int | None, **outputs: Any) -> None:
        hidden_SD = float32_array(hidden_SD)
        rows = np.arange(len(hidden_SD), dtype=np.int32)
        step = Step(
            num_logit_rows=len(rows),
            logit_rows=rows.ctypes.data,
            hidden=hidden_SD.ctypes.data,
            hidden_stride=hidden_SD.shape[1],
            adapters=adapters,
            **outputs,
        )
        self._program.run(step)


def _numbers(adapters: RowAdapters | None) -> int | None:
    """Return the address of the adapter number of each row, or None if no row has an adapter."""
    if adapters is None or not (adapters.number_T >= 0).any():
        return None
    return adapters.number_T.ctypes.data


def _int32(array: AnyArray) -> NDArray[np.int32]:
    return np.ascontiguousarray(on_host(array), np.int32)
