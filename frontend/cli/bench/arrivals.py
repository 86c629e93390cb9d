"""The times at which a benchmark sends its requests."""

from __future__ import annotations

import math
import random

from ....protocol.errors import ConfigError


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the times at which `count` requests are sent, in seconds after the start, in ascending order.

    The gaps are drawn from a gamma distribution with shape `burstiness` and mean 1 / `rate`. A burstiness of 1 is a
    Poisson process; a lower one gives bursts, a higher one more regular gaps. With an infinite rate, all requests are
    sent immediately.

    Raises:
        ConfigError: The rate or the burstiness is not above 0.
    """
    if not rate > 0:
        raise ConfigError(
            f"--request-rate {rate:g}: must be above 0; inf sends all requests at once"
        )
    if not 0 < burstiness < math.inf:
        raise ConfigError(f"--burstiness {burstiness:g}: must be above 0")
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times
