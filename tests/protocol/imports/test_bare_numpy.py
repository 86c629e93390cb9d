"""numpy without what servers do not need."""

import subprocess
import sys

PROGRAM = """
import sys

from engine.protocol.imports import bare_numpy

bare_numpy.install()

import numpy as np
import numpy.typing as npt

assert "numpy._typing" not in sys.modules
array_type = npt.NDArray[np.int32]
assert npt.ArrayLike is not None
assert npt.NDArray[np.int32] == array_type
assert np.linalg.inv(np.eye(2)).tolist() == [[1, 0], [0, 1]]
"""


def test_types_are_imported_with_the_first_use_of_another_one_than_ndarray() -> None:
    """It runs in a process of its own, because numpy is imported in this one."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
