"""The worker without a model: what its tokens depend on, and that it needs no torch."""

import subprocess
import sys

import numpy as np
from engine.workers.null_runner import made_up_tokens, ordinary_token_ids


def test_tokens_depend_on_the_seed_and_the_position_alone() -> None:
    candidates = ordinary_token_ids(1000, (7,))
    seeds = np.repeat(np.array([1, 2, 2**63 - 1], np.int64), 100)
    positions = np.tile(np.arange(100, dtype=np.int32), 3)
    whole = made_up_tokens(seeds, positions, candidates)
    order = np.random.default_rng(0).permutation(300)
    assert (made_up_tokens(seeds[order], positions[order], candidates) == whole[order]).all()
    assert 7 not in candidates
    # Two of the same 300 draws from 999 tokens agree about 45 times; a constant would give 300.
    assert len(np.unique(whole)) > 220


def test_it_runs_without_torch() -> None:
    program = (
        "import sys\n"
        "import engine.workers.worker, engine.workers.runner, engine.workers.null_runner\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
