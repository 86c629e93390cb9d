import sys
from pathlib import Path

# So that any test can say `from support.… import …`.
sys.path.insert(0, str(Path(__file__).parent))
