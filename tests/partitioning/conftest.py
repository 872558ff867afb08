from __future__ import annotations

from hypothesis import settings

# Two cores are shared with whatever else runs; a slow example is no failure.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
