"""Loads what tests of tasks are made of: modules beside this one and elsewhere, under their own names."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

TESTS = Path(__file__).parents[3]

for _path in (
    TESTS / "functions" / "undo" / "chain_programs.py",
    TESTS / "state" / "memory_storage.py",
    Path(__file__).with_name("chain_shell.py"),
):
    _spec = spec_from_file_location(_path.stem, _path)
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_path.stem] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_path.stem])
