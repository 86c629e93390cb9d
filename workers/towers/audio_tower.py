"""An audio tower, which turns the log-mel features of an audio clip into embeddings for the decoder.

Shapes: C features of a frame, N frames, P rows (two frames each), D hidden size of the tower, F intermediate size, K
outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.config.audio.codec import CodecSpec
from ...protocol.config.audio.conformer_layers import CtcConformerSpec
from ...protocol.config.audio.samples import FrameSpec, SamplesSpec, StreamingSpec, WaveSpec
from ...protocol.config.audio.tower import (
    AnyAudioSpec,
    AudioTowerSpec,
    CausalSpec,
    ConformerSpec,
    FastConformerSpec,
    MemorySpec,
    OutputGroups,
    OutputTimes,
    PatchesSpec,
    RelativeConformerSpec,
    UniversalSpeechSpec,
)
from ...protocol.encoder_inputs.payloads import AudioPayload
from ...protocol.errors import EngineError
from ..device.torch_threads import torch_threads
from ..loaders import Checkpoint
from .audio.causal import CausalEncoder, PartEncoder
from .audio.codec import CodecEncoder
from .audio.conformer import Conformer
from .audio.ctc_conformer import CtcConformer
from .audio.fast_conformer import FastConformer
from .audio.frames import FrameProjection
from .audio.memory import MemoryEncoder
from .audio.patches import PatchEncoder
from .audio.relative_conformer import RelativeConformer
from .audio.samples import SamplesEncoder
from .audio.stems import make_stem, stem_marker
from .audio.streaming import StreamingEncoder
from .audio.universal import UniversalSpeech
from .audio.waves import WaveEncoders
from .image_tower import TowerSource
from .layers import LayersSpec, LayerWeights, Patches
from .rotary import PatchRotary
from .weights import Linear, Norm, VisionWeights, check_activation, find_activation

_NORM_EPS = 1e-5
_GATED_NORM_EPS = _RMS_NORM_EPS = 1e-6
_decoder = msgspec.msgpack.Decoder(AudioPayload)


class AudioTower:
    """The tower described by `spec` and its projection, in torch, with the layers that `make_layers` returns.

    It computes one window at a time, so that results do not depend on other audio clips.
    """

    def __init__(self, spec: AnyAudioSpec, source: TowerSource) -> None:
        self.spec = spec
        self._device, self._dtype = source.device, source.dtype
        if isinstance(spec, CodecSpec):
            # Rounded samples would have other codes.
            self._dtype = torch.float32
        self._num_threads = source.num_threads
        self._encode = _ENCODERS[type(spec)](spec, source)

    @torch.inference_mode()
    def encode(self, data: bytes) -> Tensor:
        """Return the embeddings [K, output size] for the data of an encoder input.

        Raises:
            EngineError: The data are invalid, which a correct frontend never sends.
        """
        clip, features_CN = self._read(data)
        with torch_threads(self._device, self._num_threads):
            if isinstance(self._encode, _WhisperTower):
                outputs_KD = self._encode(features_CN, clip.window, clip.num_outputs)
            elif isinstance(self._encode, WaveEncoders):
                outputs_KD = self._encode(features_CN, clip.window)
            elif isinstance(self._encode, PartEncoder):
                outputs_KD, _ = self._encode(features_CN, None)
            else:
                outputs_KD = self._encode(features_CN)
            return outputs_KD[: clip.num_outputs or None]

    @torch.inference_mode()
    def encode_next(self, data: bytes, state: Any) -> tuple[Tensor, Any]:
        """Return the embeddings for the next part of a clip, and the state after it; see `PartEncoder`.

        Raises:
            EngineError: The data are invalid, which a correct frontend never sends.
        """
        assert isinstance(self._encode, PartEncoder)
        _, features_CN = self._read(data)
        if features_CN.shape[1] % self._encode.frames_per_output:
            raise EngineError(f"a part of a clip has {features_CN.shape[1]} frames")
        with torch_threads(self._device, self._num_threads):
            return self._encode(features_CN, state)

    def _read(self, data: bytes) -> tuple[AudioPayload, Tensor]:
        """Return a clip and its features [C, N]."""
        try:
            clip = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise EngineError(f"an encoder input is not an audio clip: {error}") from error
        dtype = torch.float16 if clip.is_float16 else torch.float32
        num_features = max(clip.num_mel_bins, 1)
        expected = num_features * clip.num_frames * dtype.itemsize
        after, most = self.spec.frames_after, self.spec.num_frames + self.spec.frames_after
        has_shape = clip.num_mel_bins == self.spec.num_mel_bins
        # A part of a clip that is shorter than a frame may have none.
        least = 0 if self.spec.silence == "cut" else after + 1
        if not has_shape or not least <= clip.num_frames <= most:
            raise EngineError(
                f"an audio clip has {clip.num_mel_bins} mel bins and {clip.num_frames} frames, but the model "
                f"needs {self.spec.num_mel_bins} bins and at most {most} frames"
            )
        if len(clip.features) != expected:
            raise EngineError(f"an audio clip has {len(clip.features)} bytes, expected {expected}")
        if not 0 <= clip.num_outputs <= self.spec.num_outputs(self.spec.num_frames):
            raise EngineError(
                f"an audio clip needs {clip.num_outputs} outputs, but a window has "
                f"{self.spec.num_outputs(self.spec.num_frames)}"
            )
        # Copy the features, because torch requires a writable array, and the bytes of the message are read-only.
        features = torch.empty(0, dtype=dtype)
        if clip.features:
            features = torch.frombuffer(bytearray(clip.features), dtype=dtype)
        return clip, features.view(num_features, clip.num_frames).to(self._device, self._dtype)

    def warm_up(self) -> None:
        """Encode a window of silence, or some rows of it if clips have no windows."""
        spec = self.spec
        num_frames = spec.warm_frames or spec.num_frames
        silence = bytes(4 * max(spec.num_mel_bins, 1) * num_frames)
        self.encode(msgspec.msgpack.encode(AudioPayload(spec.num_mel_bins, num_frames, silence)))


class _WhisperTower:
    def __init__(self, spec: AudioTowerSpec, source: TowerSource) -> None:
        self._spec = spec
        tensors = source.weights(stem_marker(spec), spec.tensor_names)
        self._stem = make_stem(spec, tensors)
        check_activation(source.checkpoint, spec.activation)
        self._layers = source.make_layers(
            _layers_spec(spec),
            (
                _read_layer(spec, tensors, f"audio_tower.layers.{index}.")
                for index in range(spec.num_layers)
            ),
        )
        self._norm = _read_norm(spec, tensors, "audio_tower.layer_norm")
        self._mlps: list[Callable[[Tensor], Tensor]] = []
        if spec.gated_size:
            names = ("audio_adapter", *(f"audio_mergers.{i}" for i in range(len(spec.read_layers))))
            self._mlps = [_read_gated_mlp(spec, tensors, name) for name in names]
            return
        self._project = _read_projection(spec, tensors, source.checkpoint)
        self._join: Callable[[Tensor], Tensor] | None = None
        if spec.groups is not None:
            self._join = _read_groups(spec.groups, spec.output_size, tensors)

    def __call__(self, features_CN: Tensor, window: int, num_outputs: int) -> Tensor:
        spec = self._spec
        if spec.silence in ("dropped", "filling"):
            # The last frame is silent, and so are those that follow it up to the end of the window.
            missing = (0, spec.num_frames - features_CN.shape[1])
            features_CN = F.pad(features_CN, missing, mode="replicate")
        x_PD = self._stem(features_CN, window)
        if spec.silence == "cut":
            x_PD = F.pad(x_PD, (0, 0, 0, max(0, num_outputs * spec.rows_per_output - len(x_PD))))
        places_P2: Tensor | None = None
        if spec.rotary is not None:
            places_P2 = torch.arange(len(x_PD), device=x_PD.device)[:, None].expand(-1, 2)
        features = self._layers(x_PD, Patches(places_P2))
        x_PD = features[spec.num_layers]
        if spec.gated_size:
            found = [self._norm(x_PD), *(features[layer] for layer in spec.read_layers)]
            projected = (mlp(x) for mlp, x in zip(self._mlps, found, strict=True))
            return torch.cat(list(projected), 1)
        joined = spec.rows_per_output
        if spec.join == "fill":
            rows_PD = F.pad(self._norm(x_PD), (0, 0, 0, -len(x_PD) % joined))
            return self._project(rows_PD.view(-1, joined * x_PD.shape[1]))
        if spec.join == "stack":
            return self._project(self._norm(x_PD).reshape(len(x_PD) // joined, -1))
        pairs = x_PD[: len(x_PD) // joined * joined].view(-1, joined, x_PD.shape[1])
        x_KD = self._norm(pairs.mean(1))
        if spec.times is not None:
            x_KD = _rotate_by_times(x_KD, spec.times, window, spec.num_outputs(spec.num_frames))
        x_KD = self._project(x_KD)
        return x_KD if self._join is None else self._join(x_KD)


def _read_gated_mlp(
    spec: AudioTowerSpec, tensors: VisionWeights, name: str
) -> Callable[[Tensor], Tensor]:
    size, inner = spec.hidden_size, spec.gated_size
    gate, up = (
        tensors.read_linear(f"{name}.{each}_proj", inner, size, has_bias=False)
        for each in ("gate", "up")
    )
    down = tensors.read_linear(f"{name}.down_proj", spec.output_size, inner, has_bias=False)
    return lambda x_PD: down(F.silu(gate(x_PD)) * up(x_PD))


def _read_groups(
    groups: OutputGroups, size: int, tensors: VisionWeights
) -> Callable[[Tensor], Tensor]:
    """Return the function that joins the outputs of each group."""
    prefix, count = "audio_groups.", groups.size
    matching = tensors.read_linear(f"{prefix}continual_output_matching", size, size, has_bias=False)
    added: Tensor | float = 0.0
    if groups.added_row is not None:
        row = tensors.read_rows(
            f"{prefix}embed_tokens.weight", [groups.added_row], groups.num_codes, size
        )
        added = tensors.read_linear(f"{prefix}output_matching", size, size, has_bias=False)(row[0])

    def join(x_KD: Tensor) -> Tensor:
        filled = F.pad(x_KD, (0, 0, 0, -len(x_KD) % count)).view(-1, count, size)
        return matching(filled.mean(1)) + added

    return join


def _read_projection(
    spec: AudioTowerSpec, tensors: VisionWeights, checkpoint: Checkpoint
) -> Callable[[Tensor], Tensor]:
    name, size, inner = "multi_modal_projector.linear", spec.output_size, spec.projection_size
    columns = spec.hidden_size * (1 if spec.join == "mean" else spec.rows_per_output)
    has_bias = spec.has_projection_bias
    if spec.projects_gated:
        return _read_gated_rows(spec, tensors, checkpoint, columns)
    if spec.gated_norm:
        return _read_gated_projection(spec, tensors, checkpoint, columns)
    if not inner:
        return tensors.read_linear(name, size, columns, has_bias=has_bias)
    first = tensors.read_linear(f"{name}_1", inner, columns, has_bias=has_bias)
    second = tensors.read_linear(f"{name}_2", size, inner, has_bias=has_bias)
    activation = find_activation(checkpoint, spec.projection_activation)
    if spec.has_projection_norm:
        before = tensors.read_layer_norm("multi_modal_projector.ln_pre", columns, _NORM_EPS)
        return lambda x_KD: second(activation(first(before(x_KD))))
    if not (eps := spec.projection_norm_eps):
        return lambda x_KD: second(activation(first(x_KD)))
    norm = tensors.read_layer_norm("multi_modal_projector.norm", size, eps)
    return lambda x_KD: norm(second(activation(first(x_KD))))


def _read_gated_rows(
    spec: AudioTowerSpec, tensors: VisionWeights, checkpoint: Checkpoint, columns: int
) -> Callable[[Tensor], Tensor]:
    """Return the projections of MERaLiON-2."""
    prefix, inner, size = "multi_modal_projector.", spec.projection_size, spec.hidden_size
    norm = tensors.read_layer_norm(f"{prefix}ln_pre", size, _NORM_EPS)
    shapes = ((inner, columns), (inner, inner), (inner, inner), (spec.output_size, inner))
    first, gate, up, last = (
        tensors.read_linear(f"{prefix}linear_{index}", *shape) for index, shape in enumerate(shapes)
    )
    activation = find_activation(checkpoint, spec.projection_activation)

    def project(x_KD: Tensor) -> Tensor:
        x = activation(first(norm(x_KD.unflatten(1, (-1, size))).flatten(1)))
        return last(activation(gate(x)) * up(x))

    return project


def _read_gated_projection(
    spec: AudioTowerSpec, tensors: VisionWeights, checkpoint: Checkpoint, columns: int
) -> Callable[[Tensor], Tensor]:
    """Return the projections of Ultravox."""
    prefix, inner = "multi_modal_projector", spec.projection_size
    is_gated = spec.projection_activation == "swiglu"
    middle, size = inner // (1 + is_gated), spec.output_size
    before = tensors.read_rms_norm(f"{prefix}.ln_pre", columns, _GATED_NORM_EPS)
    first = tensors.read_linear(f"{prefix}.linear_1", inner, columns, has_bias=False)
    second = tensors.read_linear(f"{prefix}.linear_2", size, middle, has_bias=False)
    is_last = spec.gated_norm == "last"
    name, norm_size = ("ln_post", size) if is_last else ("ln_mid", middle)
    norm = tensors.read_rms_norm(f"{prefix}.{name}", norm_size, _GATED_NORM_EPS)
    activation = find_activation(checkpoint, "silu" if is_gated else spec.projection_activation)

    def project(x_KD: Tensor) -> Tensor:
        x = first(before(x_KD))
        if is_gated:
            x, gate = x.chunk(2, 1)
            x = activation(gate) * x
        else:
            x = activation(x)
        return norm(second(x)) if is_last else second(norm(x))

    return project


def _rotate_by_times(x_KD: Tensor, times: OutputTimes, window: int, num_outputs: int) -> Tensor:
    """Return outputs of a window, rotated by their times in the clip. A full window has `num_outputs`."""
    size = times.num_rotated
    places_K = torch.arange(len(x_KD), device=x_KD.device).float()
    exponents = torch.arange(0, size, 2, device=x_KD.device).float() / size
    frequencies = 1.0 / times.theta**exponents
    by_window = window / times.theta * frequencies
    by_place = (places_K / times.theta * (2 * math.pi))[:, None] * frequencies
    seconds_K = (window * num_outputs + places_K) * times.seconds
    angles = torch.cat((by_window.expand_as(by_place), by_place), 1)
    angles = (angles * (-2 * math.pi * seconds_K)[:, None]).double()
    even, odd = x_KD[:, : 2 * size].double().unflatten(1, (-1, 2)).unbind(2)
    sine, cosine = angles.sin(), angles.cos()
    rotated = torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), 2).flatten(1)
    return torch.cat((rotated.to(x_KD), x_KD[:, 2 * size :]), 1)


def _rotary(spec: AudioTowerSpec) -> PatchRotary | None:
    if spec.rotary is None:
        return None
    head_dim = spec.hidden_size // spec.num_heads
    return PatchRotary("sequence", spec.rotary.theta, head_dim, num_rotated=spec.rotary.num_rotated)


def _layers_spec(spec: AudioTowerSpec) -> LayersSpec:
    return LayersSpec(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        head_dim=spec.hidden_size // spec.num_heads,
        feature_layers=tuple(sorted({*spec.read_layers, spec.num_layers})),
        activation=spec.activation,
        norm_kind=spec.norm_kind,
        norm_eps=_NORM_EPS if spec.norm_kind == "layer" else _RMS_NORM_EPS,
        rotary=_rotary(spec),
        has_gate=spec.has_gate,
    )


def _read_norm(spec: AudioTowerSpec, tensors: VisionWeights, name: str) -> Norm:
    eps = _NORM_EPS if spec.norm_kind == "layer" else _RMS_NORM_EPS
    return tensors.read_norm(name, spec.hidden_size, spec.norm_kind, eps)


def _read_layer(spec: AudioTowerSpec, tensors: VisionWeights, prefix: str) -> LayerWeights:
    size, inner = spec.hidden_size, spec.intermediate_size
    query, key, value = (
        tensors.read_linear(
            f"{prefix}self_attn.{name}_proj", size, size, has_bias=name != "k" or spec.has_key_bias
        )
        for name in "qkv"
    )
    if key.bias is None:
        # All three must have a bias to be joined.
        assert query.bias is not None
        key.bias = torch.zeros_like(query.bias)
    rotary = _rotary(spec)
    if rotary is not None and (order_K := rotary.stored_order) is not None:
        query, key = query.reorder_heads(order_K), key.reorder_heads(order_K)
    gate: Linear | None = None
    up = tensors.read_linear(f"{prefix}fc1", inner * (1 + spec.has_gate), size)
    if spec.has_gate:
        gate, up = up.split(2)
    return LayerWeights(
        attention_norm=_read_norm(spec, tensors, f"{prefix}self_attn_layer_norm"),
        qkv=[Linear.join((query, key, value))],
        output=tensors.read_linear(f"{prefix}self_attn.out_proj", size, size),
        mlp_norm=_read_norm(spec, tensors, f"{prefix}final_layer_norm"),
        gate=gate,
        up=up,
        down=tensors.read_linear(f"{prefix}fc2", size, inner),
    )


_Encoder: TypeAlias = Callable[[Tensor], Tensor] | _WhisperTower | WaveEncoders | PartEncoder
_ENCODERS: Final[dict[type, Callable[[Any, TowerSource], _Encoder]]] = {
    AudioTowerSpec: _WhisperTower,
    CausalSpec: CausalEncoder,
    CodecSpec: CodecEncoder,
    ConformerSpec: Conformer,
    CtcConformerSpec: CtcConformer,
    FastConformerSpec: FastConformer,
    FrameSpec: FrameProjection,
    MemorySpec: MemoryEncoder,
    PatchesSpec: PatchEncoder,
    RelativeConformerSpec: RelativeConformer,
    SamplesSpec: SamplesEncoder,
    StreamingSpec: StreamingEncoder,
    UniversalSpeechSpec: UniversalSpeech,
    WaveSpec: WaveEncoders,
}
"""The class of encoders for each class of specs."""
