"""The projection of models like LLaVA-OneVision that norms patches first: Bee and R-4B."""

from __future__ import annotations

from typing import Any

import torch

NORMED_MODELS = {"bee": 4, "r_vl": 1}
"""Models like LLaVA-OneVision, and the width of their projections in sizes of the decoder."""


class NormedProjector(torch.nn.Module):
    """The projection of Bee and R-4B."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        size, output_size = config.vision_config.hidden_size, config.text_config.hidden_size
        self.pre_norm = torch.nn.LayerNorm(size, 1e-6)
        self.linear_1 = torch.nn.Linear(size, width * output_size)
        self.linear_2 = torch.nn.Linear(width * output_size, output_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of patches."""
        found: torch.Tensor = self.linear_2(
            torch.nn.functional.gelu(self.linear_1(self.pre_norm(x)))
        )
        return found
