"""Loads what tests of chains are made of: a module of this directory, which is no package, under its own name."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_spec = spec_from_file_location("chain_programs", Path(__file__).with_name("chain_programs.py"))
assert _spec is not None
assert _spec.loader is not None
sys.modules["chain_programs"] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["chain_programs"])
