"""Rotary position embeddings and their context extensions, and factors on queries that depend on positions.

Frequencies that depend on sequence length are computed once, for the longest sequence that will be served. A request's
results therefore never depend on other requests.

Shapes: T tokens, H heads, K head dimension, R rotated dimensions (the first R of K), P heads with own angles, or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Frequencies: TypeAlias = NDArray[np.float32]


class RopeScaling(Protocol):
    """A context extension, which changes the frequencies of the trained context for a longer one."""

    def scale(
        self, inv_freq: Frequencies, rope: RopeSpec, max_model_len: int
    ) -> tuple[Frequencies, float]:
        """Return the new inverse frequencies [R/2] and the factor on cos and sin."""
        ...


TIME_AXIS, ROW_AXIS, COLUMN_AXIS, INDEX_AXIS = range(4)


class FourierSpec(msgspec.Struct, frozen=True):
    """Sines and cosines that are stored sums of those of all frequencies (FoPE, arXiv 2412.17739).

    The first `num_frequencies` are summed; the sines and cosines of the others are 1. If `has_heads`, each key/value
    head has its own sums, which its queries share.
    """

    num_frequencies: int
    has_heads: bool


class RopeSpec(msgspec.Struct, frozen=True):
    """A rotation of the first `rotary_dim` dimensions of each head with base `theta`.

    If `axes` is given, a token has three positions: in time, and in the height and width of an image (M-RoPE, arXiv
    2409.12191). `axes` says which of them each frequency uses, or `INDEX_AXIS` for the token's index in its sequence.
    All are equal for text.

    If `has_factors`, each frequency is multiplied by the exponential of a stored number (LeRoPE).

    Frequency i is `theta` to the power of -2i / `divisor`, or -2i / `rotary_dim` if it is None. If a config asks for an
    odd number of dimensions, transformers rotates one more with the frequencies of the odd number.

    If `fourier` is given, angles are not those of one frequency each.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] = ()
    has_factors: bool = False
    divisor: int | None = None
    fourier: FourierSpec | None = None

    def inverse_frequencies(self, max_model_len: int) -> tuple[Frequencies, float]:
        """Return float32 inverse frequencies [R/2] and the factor on cos and sin."""
        inv_freq = _default_inverse_frequencies(self.theta, self.divisor or self.rotary_dim)
        if self.scaling is None:
            return inv_freq, 1.0
        return self.scaling.scale(inv_freq, self, max_model_len)


def _default_inverse_frequencies(theta: float, divisor: int) -> Frequencies:
    exponents = np.arange(0, divisor, 2, dtype=np.float32) / np.float32(divisor)
    return np.float32(1) / np.float32(theta) ** exponents


class LinearScaling(msgspec.Struct, frozen=True):
    """Divides positions by `factor`."""

    factor: float

    def scale(
        self, inv_freq: Frequencies, rope: RopeSpec, max_model_len: int
    ) -> tuple[Frequencies, float]:
        """Divide all frequencies by `factor`."""
        return inv_freq / np.float32(self.factor), 1.0


class ProportionalScaling(msgspec.Struct, frozen=True):
    """Rotates only the first `num_frequencies` pairs of a head, with the frequencies divided by `factor`."""

    num_frequencies: int
    factor: float

    def scale(
        self, inv_freq: Frequencies, rope: RopeSpec, max_model_len: int
    ) -> tuple[Frequencies, float]:
        """Set the frequencies of the other pairs to 0, and divide the frequencies of the first pairs."""
        is_rotated = np.arange(len(inv_freq)) < self.num_frequencies
        return np.where(is_rotated, inv_freq / np.float32(self.factor), np.float32(0)), 1.0


class DynamicScaling(msgspec.Struct, frozen=True):
    """NTK-aware scaling, which uses a larger base if sequences may be longer than the trained context."""

    factor: float
    max_position_embeddings: int

    def scale(
        self, inv_freq: Frequencies, rope: RopeSpec, max_model_len: int
    ) -> tuple[Frequencies, float]:
        """Return the frequencies of the larger base."""
        length = max(max_model_len, self.max_position_embeddings)
        growth = self.factor * length / self.max_position_embeddings - (self.factor - 1)
        divisor = rope.divisor or rope.rotary_dim
        theta = rope.theta * growth ** (divisor / (divisor - 2))
        return _default_inverse_frequencies(theta, divisor), 1.0


class Llama3Scaling(msgspec.Struct, frozen=True):
    """Divides low frequencies by `factor`, keeps high ones, and interpolates in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scale(
        self, inv_freq: Frequencies, rope: RopeSpec, max_model_len: int
    ) -> tuple[Frequencies, float]:
        """Divide low frequencies by `factor`."""
        turns = np.float32(self.original_max_position_embeddings) * inv_freq
        turns /= np.float32(2 * math.pi)
        width = np.float32(self.high_freq_factor - self.low_freq_factor)
        kept = ((turns - np.float32(self.low_freq_factor)) / width).clip(0, 1)
        scales = kept + (np.float32(1) - kept) / np.float32(self.factor)
        return inv_freq * scales, 1.0


class YarnScaling(msgspec.Struct, frozen=True):
    """YaRN (arXiv 2309.00071): interpolates frequencies of `beta_slow` to `beta_fast` turns per trained context."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def scale(
        self, inv_freq: Frequencies, rope: RopeSpec, max_model_len: int
    ) -> tuple[Frequencies, float]:
        """Interpolate between scaled and unscaled frequencies."""

        def dimension_with(turns: float) -> float:
            wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

        low, high = dimension_with(self.beta_fast), dimension_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.rotary_dim - 1)
        width = (high - low) or 0.001
        places = np.arange(rope.rotary_dim // 2, dtype=np.float32) - np.float32(low)
        interpolated = (places / np.float32(width)).clip(0, 1)
        divided = inv_freq / np.float32(self.factor)
        inv_freq = inv_freq * (1 - interpolated) + divided * interpolated
        return inv_freq, self.attention_factor


class LongRopeScaling(msgspec.Struct, frozen=True):
    """Divides each frequency by its own factor. The long factors apply if sequences may exceed the trained context."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    short_attention_factor: float
    long_attention_factor: float

    def scale(
        self, inv_freq: Frequencies, rope: RopeSpec, max_model_len: int
    ) -> tuple[Frequencies, float]:
        """Divide each frequency by its own factor."""
        is_long = max_model_len > self.original_max_position_embeddings
        divisors = np.array(self.long_factor if is_long else self.short_factor, np.float32)
        attention_factor = self.long_attention_factor if is_long else self.short_attention_factor
        return inv_freq / divisors, attention_factor


class QueryScaling(msgspec.Struct, frozen=True):
    """A factor on the query at position p, which depends on x = (p + `offset`) / `length`.

    It is 1 + `beta` * log(1 + floor(x)) if `kind` is "steps", (1 + x) to the power of `beta` if it is "power", and
    1 + `beta` * log(max(x, 1)) if it is "log".
    """

    beta: float
    length: float
    offset: int = 0
    kind: Literal["steps", "power", "log"] = "steps"


class RotaryTables(NamedTuple):
    """The cosines and sines of one step's positions, [T, P, R] in the model's dtype; P is 1 unless heads have own ones.

    The first half of `sin_T1R` is negated, so that a rotation only needs a roll, without negating half of the elements.
    """

    cos_TPR: Tensor
    sin_TPR: Tensor


Mixer: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function from the cosines and sines of frequencies, [T, 1, R/2] each, to those of heads, [T, P, R/2]."""


class RotaryEmbedding:
    """Computes the rotary tables of each step for one `RopeSpec`.

    `log_factors` are the stored numbers of a rope that `has_factors`, float32 [R/2]. `mix` makes the sums of one that
    has `fourier`.
    """

    def __init__(
        self,
        rope: RopeSpec,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        log_factors: Tensor | None = None,
        mix: Mixer | None = None,
    ) -> None:
        inv_freq, self.attention_factor = rope.inverse_frequencies(max_model_len)
        self.inv_freq = torch.from_numpy(inv_freq).to(device)
        if log_factors is not None:
            self.inv_freq = self.inv_freq * log_factors.exp()
        self.mix = mix
        self.axes: Tensor | None = None
        if rope.axes:
            self.axes = torch.tensor(rope.axes, dtype=torch.int32, device=device)
        self.dtype = dtype

    def tables(self, positions: Tensor) -> RotaryTables:
        """Return the tables for positions of any integer dtype: [T], or [T, 3] if the rotation has axes.

        With `INDEX_AXIS`, they are [T, 4].
        """
        if positions.ndim == 1:
            angles = torch.outer(positions.float(), self.inv_freq).unsqueeze(1)
        else:
            assert self.axes is not None
            angles = (positions.float()[:, self.axes] * self.inv_freq).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        if self.mix is not None:
            cos, sin = self.mix(cos, sin)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return RotaryTables(cos.to(self.dtype), sin.to(self.dtype))


def apply_rotary(x_THK: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate the first R dimensions of every head by the angles in `tables`."""
    cos, sin = tables
    rotary_dim = cos.shape[-1]
    if rotary_dim == x_THK.shape[-1]:
        return torch.addcmul(x_THK * cos, x_THK.roll(rotary_dim // 2, -1), sin)
    x_THR = x_THK[..., :rotary_dim]
    rotated_THR = torch.addcmul(x_THR * cos, x_THR.roll(rotary_dim // 2, -1), sin)
    return torch.cat((rotated_THR, x_THK[..., rotary_dim:]), -1)
