"""An audio tower, which turns the log-mel features of an audio clip into embeddings for the decoder.

Shapes: C features of a frame, N frames, P rows (two frames each), D hidden size of the tower, F intermediate size, K
outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.checkpoint.audio_tower import AudioTowerSpec
from ...protocol.errors import EngineError
from ...protocol.messages import AudioPayload
from ..device.torch_threads import torch_threads
from ..loaders import Checkpoint
from .layers import LayersSpec, LayerWeights, MakeLayers, Patches, TorchLayers
from .weights import Linear, VisionWeights, check_activation, find_activation

_NORM_EPS = 1e-5
_decoder = msgspec.msgpack.Decoder(AudioPayload)


class AudioTower:
    """The tower described by `spec` and its projection, in torch, with the layers that `make_layers` returns.

    It computes one window at a time, so that results do not depend on other audio clips.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """

    def __init__(
        self,
        spec: AudioTowerSpec,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        num_threads: int = 1,
        make_layers: MakeLayers = TorchLayers,
    ) -> None:
        self.spec = spec
        self._device, self._dtype = device, dtype
        self._num_threads = num_threads
        size = spec.hidden_size
        tensors = VisionWeights(checkpoint, "audio_tower.conv1.weight", device, dtype)

        def convolution(name: str, columns: int) -> tuple[Tensor, Tensor]:
            name = f"audio_tower.{name}"
            return tensors.read(f"{name}.weight", size, columns, 3), tensors.read(
                f"{name}.bias", size
            )

        self._convolutions = convolution("conv1", spec.num_mel_bins), convolution("conv2", size)
        self._positions_PD = tensors.read(
            "audio_tower.embed_positions.weight", spec.num_positions, size
        )
        check_activation(checkpoint, spec.activation)
        self._layers = make_layers(
            _layers_spec(spec),
            (
                _read_layer(spec, tensors, f"audio_tower.layers.{index}.")
                for index in range(spec.num_layers)
            ),
        )
        self._norm = tensors.read_layer_norm("audio_tower.layer_norm", size, _NORM_EPS)
        self._project = _read_projection(spec, tensors, checkpoint)

    @torch.inference_mode()
    def encode(self, data: bytes) -> Tensor:
        """Return the embeddings [K, output size] for the data of an encoder input.

        Raises:
            EngineError: The data are invalid, which a correct frontend never sends.
        """
        try:
            clip = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise EngineError(f"an encoder input is not an audio clip: {error}") from error
        dtype = torch.float16 if clip.is_float16 else torch.float32
        expected = clip.num_mel_bins * clip.num_frames * dtype.itemsize
        after, most = self.spec.frames_after, self.spec.num_frames + self.spec.frames_after
        has_shape = clip.num_mel_bins == self.spec.num_mel_bins
        if not has_shape or not after < clip.num_frames <= most:
            raise EngineError(
                f"an audio clip has {clip.num_mel_bins} mel bins and {clip.num_frames} frames, but the model "
                f"needs {self.spec.num_mel_bins} bins and at most {most} frames"
            )
        if len(clip.features) != expected:
            raise EngineError(f"an audio clip has {len(clip.features)} bytes, expected {expected}")
        # Copy the features, because torch requires a writable array, and the bytes of the message are read-only.
        features = torch.frombuffer(bytearray(clip.features), dtype=dtype)
        features_CN = features.view(clip.num_mel_bins, -1).to(self._device, self._dtype)
        with torch_threads(self._device, self._num_threads):
            return self._encode(features_CN)

    def warm_up(self) -> None:
        """Encode a window of silence."""
        spec = self.spec
        silence = bytes(4 * spec.num_mel_bins * spec.num_frames)
        self.encode(
            msgspec.msgpack.encode(AudioPayload(spec.num_mel_bins, spec.num_frames, silence))
        )

    def _encode(self, features_CN: Tensor) -> Tensor:
        x_DN = features_CN[None]
        for stride, (weight, bias) in enumerate(self._convolutions, 1):
            x_DN = F.gelu(F.conv1d(x_DN, weight, bias, stride=stride, padding=1))
        num_rows = x_DN.shape[2] - self.spec.frames_after // 2
        x_PD = x_DN[0].T[:num_rows] + self._positions_PD[:num_rows]
        x_PD = self._layers(x_PD, Patches())[self.spec.num_layers]
        joined = self.spec.rows_per_output
        if self.spec.join == "stack":
            return self._project(self._norm(x_PD).reshape(len(x_PD) // joined, -1))
        pairs = x_PD[: len(x_PD) // joined * joined].view(-1, joined, x_PD.shape[1])
        return self._project(self._norm(pairs.mean(1)))


def _read_projection(
    spec: AudioTowerSpec, tensors: VisionWeights, checkpoint: Checkpoint
) -> Callable[[Tensor], Tensor]:
    name, size = "multi_modal_projector.linear", spec.output_size
    if spec.join == "mean":
        return tensors.read_linear(name, size, spec.hidden_size)
    first = tensors.read_linear(
        f"{name}_1", size, spec.hidden_size * spec.rows_per_output, has_bias=False
    )
    second = tensors.read_linear(f"{name}_2", size, size, has_bias=False)
    activation = find_activation(checkpoint, spec.projection_activation)
    return lambda x_KD: second(activation(first(x_KD)))


def _layers_spec(spec: AudioTowerSpec) -> LayersSpec:
    return LayersSpec(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        head_dim=spec.hidden_size // spec.num_heads,
        feature_layers=(spec.num_layers,),
        activation=spec.activation,
        norm_eps=_NORM_EPS,
    )


def _read_layer(spec: AudioTowerSpec, tensors: VisionWeights, prefix: str) -> LayerWeights:
    size, inner = spec.hidden_size, spec.intermediate_size
    # The projection to keys has no bias.
    query, key, value = (
        tensors.read_linear(f"{prefix}self_attn.{name}_proj", size, size, has_bias=name != "k")
        for name in "qkv"
    )
    assert query.bias is not None
    key.bias = torch.zeros_like(query.bias)
    return LayerWeights(
        attention_norm=tensors.read_layer_norm(f"{prefix}self_attn_layer_norm", size, _NORM_EPS),
        qkv=[Linear.join((query, key, value))],
        output=tensors.read_linear(f"{prefix}self_attn.out_proj", size, size),
        mlp_norm=tensors.read_layer_norm(f"{prefix}final_layer_norm", size, _NORM_EPS),
        gate=None,
        up=tensors.read_linear(f"{prefix}fc1", inner, size),
        down=tensors.read_linear(f"{prefix}fc2", size, inner),
    )
