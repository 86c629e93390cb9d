"""Measure a server once: warm up, send the requests, and compute the figures."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Final

import uvloop

from ....protocol.errors import ConfigError, EngineError
from ...supervisor.guardian.open_files import raise_open_file_limit
from ..remote.target import Target
from .arrivals import arrival_times
from .client import Answer, Endpoint, run_sessions
from .figures import Figures, summarize
from .options import Workload
from .progress import progress_bar

_WARM_UP_SEED: Final = 1 << 20
"""This seed is far from the seeds of the rounds, so that the warm-up caches no prefix that is measured."""


def endpoint_of(target: Target, workload: Workload) -> Endpoint:
    """Return the endpoint that a workload measures. Also raise this process's limit on open files, for connections."""
    raise_open_file_limit()
    server = target.server
    return Endpoint(server.url, target.model, workload.is_chat, server.api_key, workload.fields)


def warm_up(endpoint: Endpoint, workload: Workload, count: int) -> None:
    """Send `count` concurrent sessions, without measuring them.

    Raises:
        EngineError: A request failed, so that a measurement would be pointless.
    """
    if not count:
        return
    sessions = workload.sessions(count, _WARM_UP_SEED)
    answers, _ = uvloop.run(run_sessions(endpoint, sessions))
    for answer in answers:
        if answer.error is not None:
            raise EngineError(f"{endpoint.full_url}: the warm-up failed: {answer.error}")


def measure(
    endpoint: Endpoint,
    workload: Workload,
    *,
    label: str,
    rate: float = math.inf,
    burstiness: float = 1.0,
    max_concurrency: int | None = None,
    seed_offset: int = 0,
) -> tuple[Figures, list[Answer]]:
    """Send all requests of a workload to a server.

    Args:
        endpoint: The server.
        workload: The requests.
        label: The text of the progress bar.
        rate: Sessions that start per second.
        burstiness: See `arrival_times`.
        max_concurrency: Maximum concurrent sessions.
        seed_offset: See `Workload.sessions`.

    Returns:
        The figures, which also describe the measurement, and the answers.

    Raises:
        ConfigError: The workload, the rate or the burstiness is invalid.
    """
    sessions = workload.sessions(workload.dataset.num_prompts, seed_offset)
    starts = [session.start for session in sessions if session.start is not None]
    if starts and not math.isinf(rate):
        raise ConfigError(f"--request-rate {rate:g}: a trace has its own times; leave the flag out")
    if starts:
        starts = [start - starts[0] for start in starts]
    else:
        seed = workload.dataset.seed + seed_offset
        starts = arrival_times(len(sessions), rate, burstiness, seed)
    num_requests = sum(len(session.turns) for session in sessions)
    date = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    with progress_bar(label, num_requests) as advance:
        answers, duration_s = uvloop.run(
            run_sessions(
                endpoint,
                sessions,
                starts=starts,
                max_concurrency=max_concurrency,
                on_answer=lambda answer: advance(),
            )
        )
    figures = {
        "date": date,
        "backend": workload.backend,
        "model_id": endpoint.model,
        "dataset_name": workload.dataset.dataset_name,
        "num_prompts": len(sessions),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
        **summarize(
            answers, duration_s, goodput=workload.goodput, percentiles=workload.percentiles
        ),
    }
    return figures, answers
