"""`bench` lies beside the package and is not installed: it is found in the checkout, behind all that is installed."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
