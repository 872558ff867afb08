"""What may differ from machine to machine: read from environment variables, with defaults for a laptop."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "my_project"
"""Positions, state and dead letters are filed under this name. Keep it."""

STATE = Path(os.environ.get("STATE_DIR", "state")).absolute()
"""What has to be there again at the next start. Keep it as you keep a database."""

MASTER = os.environ.get("SPARK_MASTER", "local[4]")

STOP_S = float(os.environ.get("STOP_SECONDS", "60"))
"""How long a stop may take until the rest is left to the next start."""
