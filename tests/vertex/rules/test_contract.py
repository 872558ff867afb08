"""What the contract must not drag in."""

from __future__ import annotations

import subprocess
import sys


def test_the_contract_does_not_import_numba():
    code = "import sys, ftlayer.vertex.calls; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
