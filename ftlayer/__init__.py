"""Record-level fault tolerance for PySpark streams: the public names."""

from typing import TYPE_CHECKING, Any

from ftlayer.config import FTStatus
from ftlayer.errors import FailException, FTLayerError
from ftlayer.restart import ExponentialDelay, FailureRate, FixedDelay, NoRestart

if TYPE_CHECKING:
    from ftlayer.spark.facade import FTLayer

__all__ = [
    "ExponentialDelay",
    "FTLayer",
    "FTLayerError",
    "FTStatus",
    "FailException",
    "FailureRate",
    "FixedDelay",
    "NoRestart",
]


def __getattr__(name: str) -> Any:
    """Load `FTLayer` when it is first asked for: Spark's Python workers import this package and have no use for it."""
    if name == "FTLayer":
        from ftlayer.spark.facade import FTLayer

        return FTLayer
    raise AttributeError(f"module 'ftlayer' has no attribute {name!r}")
