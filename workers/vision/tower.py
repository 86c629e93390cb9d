"""A vision tower: from the pixels of an image to embeddings for the decoder.

Shapes: P patches of an image and the class token, D hidden size of the tower, F intermediate size, K output rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.checkpoint.vision.spec import VisionSpec
from ...protocol.errors import EngineError
from ...protocol.messages import ImagePayload
from ..loaders import Checkpoint
from .projection import read_projection
from .weights import Norm, VisionWeights, find_activation


class VisionTower:
    """The tower of `spec` and its projection, in torch.

    It computes one image at a time, so its numbers do not depend on other images.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """

    def __init__(
        self,
        spec: VisionSpec,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        num_threads: int = 1,
    ) -> None:
        self.spec = spec
        self._device, self._dtype = device, dtype
        self._num_threads = num_threads
        self._activation = find_activation(checkpoint, spec.activation)
        tensors = VisionWeights(
            checkpoint, "embeddings.patch_embedding.weight", device, dtype, spec.tensor_names
        )
        size, patch_size = spec.hidden_size, spec.patch_size
        patches = tensors.read("embeddings.patch_embedding.weight", size, 3, patch_size, patch_size)
        self._patches = patches.flatten(1)
        self._patches_bias: Tensor | None = None
        if spec.has_patch_bias:
            self._patches_bias = tensors.read("embeddings.patch_embedding.bias", size)
        self._class_D: Tensor | None = None
        if spec.has_class_token:
            self._class_D = tensors.read("embeddings.class_embedding", size)
        num_positions = spec.num_patches + spec.has_class_token
        self._positions_PD = tensors.read(
            "embeddings.position_embedding.weight", num_positions, size
        )
        # The name is misspelled in all checkpoints.
        self._pre_norm = (
            tensors.read_norm("pre_layrnorm", size, spec) if spec.has_pre_norm else None
        )
        self._post_norm = (
            tensors.read_norm("post_layernorm", size, spec) if spec.has_post_norm else None
        )
        self._layers = [
            _Layer(spec, tensors, f"encoder.layers.{index}.", self._activation)
            for index in range(max(spec.feature_layers))
        ]
        self._project = read_projection(spec, checkpoint, device, dtype)

    @torch.inference_mode()
    def __call__(self, image: ImagePayload) -> Tensor:
        """Return the embeddings [K, output size] of an image.

        Raises:
            EngineError: The image has another size than the tower reads.
        """
        side = self.spec.image_size
        if (image.width, image.height) != (side, side):
            raise EngineError(
                f"an image has {image.width} x {image.height} pixels, the model reads {side} x {side}"
            )
        if self._device.type != "cpu":
            return self._encode(image)
        # Between images a second thread would only compete with those of a native program.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            return self._encode(image)
        finally:
            torch.set_num_threads(num_threads)

    def warm_up(self) -> None:
        """Encode a black image."""
        side, ones = self.spec.image_size, (1.0, 1.0, 1.0)
        self(ImagePayload(side, side, bytes(3 * side * side), 1.0, ones, ones))

    def _encode(self, image: ImagePayload) -> Tensor:
        spec = self.spec
        x_PD = F.linear(self._split_patches(image), self._patches, self._patches_bias)
        if self._class_D is not None:
            x_PD = torch.cat((self._class_D[None], x_PD))
        x_PD = x_PD + self._positions_PD
        if self._pre_norm is not None:
            x_PD = self._pre_norm(x_PD)
        features = []
        for number, layer in enumerate(self._layers, 1):
            x_PD = layer(x_PD)
            features += [x_PD] * spec.feature_layers.count(number)
        if len(features) > 1:
            x_PD = torch.cat(
                [features[sorted(spec.feature_layers).index(i)] for i in spec.feature_layers], -1
            )
        if self._post_norm is not None:
            x_PD = self._post_norm(x_PD)
        if spec.has_class_token and not spec.keeps_class_token:
            x_PD = x_PD[1:]
        return self._project(x_PD)

    def _split_patches(self, image: ImagePayload) -> Tensor:
        """Return the normalized pixels of each patch, [P, 3 * patch size ** 2]."""
        # Copied, because torch requires a writable array, and the message's bytes are read-only.
        pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).to(self._device)
        side, patch_size = self.spec.image_size, self.spec.patch_size
        # As numpy rounds in transformers' processors.
        scaled = (pixels.view(side, side, 3).double() * image.scale).float()
        mean, std = scaled.new_tensor(image.mean), scaled.new_tensor(image.std)
        channels = ((scaled - mean) / std).to(self._dtype).permute(2, 0, 1)
        # Like a convolution, whose stride is its size, pixels beyond the last whole patch are not read.
        num_rows = side // patch_size
        whole = channels[:, : num_rows * patch_size, : num_rows * patch_size]
        patches = whole.reshape(3, num_rows, patch_size, num_rows, patch_size)
        return patches.permute(1, 3, 0, 2, 4).reshape(num_rows**2, 3 * patch_size**2)


class _Layer:
    """A layer of attention and an MLP, each after its norm."""

    def __init__(
        self,
        spec: VisionSpec,
        tensors: VisionWeights,
        prefix: str,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        size = spec.hidden_size
        self._num_heads = spec.num_heads
        self._activation = activation
        self._norms = [
            tensors.read_norm(f"{prefix}layer_norm{i}", size, spec, spec.norm_kind) for i in (1, 2)
        ]
        names = [f"{prefix}self_attn.{name}" for name in "qkv"]
        weights = [tensors.read(f"{name}_proj.weight", size, size) for name in names]
        self._qkv = torch.cat(weights)
        self._qkv_bias: Tensor | None = None
        if spec.qkv_bias:
            self._qkv_bias = torch.cat([tensors.read(f"{name}_proj.bias", size) for name in names])
        self._qk_norms: list[Norm] = []
        if spec.has_qk_norm:
            self._qk_norms = [tensors.read_rms_norm(f"{n}_norm", size, 1e-6) for n in names[:2]]
        self._output = tensors.read_linear(f"{prefix}self_attn.out_proj", size, size)
        self._up = tensors.read_linear(f"{prefix}mlp.fc1", spec.intermediate_size, size)
        self._down = tensors.read_linear(f"{prefix}mlp.fc2", size, spec.intermediate_size)
        if spec.has_layer_scales:
            # Factors on the outputs of a product are factors on its rows.
            for name, linear in (("lambda_1", self._output), ("lambda_2", self._down)):
                factors_D = tensors.read(f"{prefix}{name}", size)
                for part in linear:
                    if part is not None:
                        part.mul_(factors_D.view(-1, *[1] * (part.ndim - 1)))

    def __call__(self, x_PD: Tensor) -> Tensor:
        qkv = F.linear(self._norms[0](x_PD), self._qkv, self._qkv_bias).chunk(3, -1)
        normed = [norm(part) for norm, part in zip(self._qk_norms, qkv, strict=False)]
        q, k, v = (
            part.view(len(x_PD), self._num_heads, -1).transpose(0, 1)[None]
            for part in (*normed, *qkv[len(normed) :])
        )
        attended = F.scaled_dot_product_attention(q, k, v)[0]
        x_PD = x_PD + F.linear(attended.transpose(0, 1).reshape(x_PD.shape), *self._output)
        hidden_PF = self._activation(F.linear(self._norms[1](x_PD), *self._up))
        return x_PD + F.linear(hidden_PF, *self._down)
