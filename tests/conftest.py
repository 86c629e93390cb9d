import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# So that any test can say `from support.… import …`.
sys.path.insert(0, str(Path(__file__).parent))

from support.triton_interpreter import interpret_without_gpu

# Triton looks once, and much of torch loads it.
interpret_without_gpu()

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from support.process_shares import ProcessShares

    return ProcessShares(config, log)
