"""A router whose logits an MLP computes, and that passes on a projection to the router of the next layer.

Shapes: T tokens of a step, D hidden size, R elements of the projection, E experts.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ...layers.layers import LayerKernels, RMSNorm
from ...layers.specs.experts import RouterSpec
from ..stage.passed_state import PassedState
from ..weights import WeightReader


class RouterState(PassedState):
    """The projections [T, R] that the last router of a stage has passed on; None before the first one of the model."""

    def __init__(self) -> None:
        self.passed_TR: Tensor | None = None

    def receive(self, received_TE: Tensor | None) -> None:
        """See `PassedState.receive`."""
        self.passed_TR = received_TE

    def sent(self) -> Tensor | None:
        """See `PassedState.sent`."""
        return self.passed_TR


class RouterMLP:
    """Computes the logits of a layer's router in float32."""

    def __init__(
        self,
        spec: RouterSpec,
        shape: tuple[int, int],
        weights: WeightReader,
        prefix: str,
        kernels: LayerKernels,
    ) -> None:
        (num_experts, hidden_size), size = shape, spec.size
        self.state = RouterState()
        """The state that the routers of a stage share, which the decoder sets."""
        self._products = [
            kernels.router_linear(weights.read_float32(f"{prefix}{name}.weight", *sizes))
            for name, sizes in (
                ("down_proj", (size, hidden_size)),
                ("router_mlp.fc1", (size, size)),
                ("router_mlp.fc2", (size, size)),
                ("router_mlp.out_proj", (num_experts, size)),
            )
        ]
        self._biases = [
            weights.read_vector(f"{prefix}{name}.bias", size)
            for name in ("down_proj", "router_mlp.fc1", "router_mlp.fc2")
        ]
        self._factor_R: Tensor | None = None
        if weights.has(name := f"{prefix}router_states_scale"):
            self._factor_R = weights.read_vector(name, size)
        self._norm = RMSNorm(
            weights.read_vector(f"{prefix}router_mlp.norm.weight", size), spec.norm_eps
        )

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the logits [T, E]."""
        project, first, second, output = self._products
        project_bias_R, first_bias_R, second_bias_R = self._biases
        x_TR = project(x_TD) + project_bias_R
        if self._factor_R is not None and self.state.passed_TR is not None:
            x_TR = x_TR + self.state.passed_TR.float() * self._factor_R
        self.state.passed_TR = x_TR
        x_TR = F.gelu(first(self._norm(x_TR)) + first_bias_R)
        return output(F.gelu(second(x_TR) + second_bias_R))
