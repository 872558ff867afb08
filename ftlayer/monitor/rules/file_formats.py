"""The formats of files of dead letters. Commands say them in their help, so nothing heavy is imported here."""

from __future__ import annotations

from enum import StrEnum
from pathlib import PurePath

from ftlayer.errors import ConfigError


class ExportFormat(StrEnum):
    """What files of dead letters are written as; the value is the ending of their names."""

    JSONL = "jsonl"
    PARQUET = "parquet"

    @property
    def media_type(self) -> str:
        return "application/x-ndjson" if self is ExportFormat.JSONL else "application/vnd.apache.parquet"

    @classmethod
    def of_name(cls, name: str) -> ExportFormat:
        """Return what the ending of a file's name says. Raises `ConfigError` for any other ending."""
        ending = PurePath(name).suffix.removeprefix(".")
        try:
            return cls(ending)
        except ValueError:
            raise ConfigError(
                f"{name} ends in neither .{cls.JSONL} (a line of JSON a letter) nor .{cls.PARQUET}"
            ) from None
