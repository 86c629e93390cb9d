import sys
from pathlib import Path

# So that any test can say `from support.… import …`.
sys.path.insert(0, str(Path(__file__).parent))

from support.triton_interpreter import interpret_without_gpu

# Triton looks once, and much of torch loads it.
interpret_without_gpu()
