"""pandas is not imported for arrays without it, and known when it is."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import sys
import pyarrow as pa
from ftlayer.runtime.pandas_later import leave_pandas_to_others
leave_pandas_to_others()
leave_pandas_to_others()
assert pa.array([1, 2]).to_numpy().sum() == 3
assert "pandas" not in sys.modules
"""

KNOWN = """
import pandas
column = pa.array(pandas.Series([1.0, float("nan")]))
assert column.null_count == 1, "not seen to be a Series"
assert type(pandas.__spec__.loader).__module__ != "ftlayer.runtime.pandas_later"
assert not any("ftlayer.runtime" in type(finder).__module__ for finder in sys.meta_path)
"""


@pytest.mark.parametrize(
    "use", ["", "import pandas", "assert len(pa.record_batch({'a': [1, None]}).to_pandas()) == 2"]
)
def test_pandas_is_imported_when_somebody_needs_it_and_known_then(use: str) -> None:
    pytest.importorskip("pandas")
    ran = subprocess.run([sys.executable, "-c", BEGIN + use + KNOWN], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_pandas_that_is_there_already_stays_known() -> None:
    pytest.importorskip("pandas")
    program = "import pandas\n" + BEGIN.replace('assert "pandas" not in sys.modules', "") + KNOWN
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
