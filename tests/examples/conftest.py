"""Scripts in examples/ import what lies beside them, and so do their tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "examples"), str(HERE)]
