"""The options of a Python Data Source: read as what they are, and none that nobody asks for."""

from __future__ import annotations

from collections.abc import Mapping

from ftlayer.checks import MOST
from ftlayer.errors import ConfigError

_OF_SPARK = {"checkpointlocation", "queryname"}
"""Options that Spark hands over with the user's own; in lower case."""


class DataSourceOptions:
    """Options as ``option`` of a reader or writer of Spark has set them, by names without regard to case.

    It notes what it is asked for: what is left at the end is unknown (`check_all_known`).
    """

    def __init__(self, options: Mapping[str, str], format: str) -> None:
        self._options = {name.lower(): str(value) for name, value in options.items()}
        self._format = format
        self._known: dict[str, None] = {}
        self._prefixes: list[str] = []

    def get(self, name: str) -> str | None:
        """Return an option's text; None: it is not set."""
        self.know(name)
        return self._options.get(name.lower())

    def text(self, name: str, default: str) -> str:
        found = self.get(name)
        return default if found is None else found

    def required(self, name: str) -> str:
        """Return an option's text. Raises `ConfigError` if there is none."""
        found = self.get(name)
        if not found:
            raise ConfigError(f"option {name!r} is missing: .option({name!r}, …)")
        return found

    def names(self, name: str, default: str = "") -> list[str]:
        """Return an option that is names with commas between them."""
        return [part.strip() for part in self.text(name, default).split(",") if part.strip()]

    def count(self, name: str, default: int, *, most: int = MOST) -> int:
        """Return an option that is a number from 1 to ``most``. Raises `ConfigError`."""
        text = self.text(name, str(default))
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise ConfigError(f"{name}: expected a number from 1 to {most}, got {text!r}")
        return int(text)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return an option that is true or false. Raises `ConfigError`."""
        text = self.text(name, str(default)).lower()
        if text not in {"true", "false"}:
            raise ConfigError(f"{name}: expected true or false, got {text!r}")
        return text == "true"

    def below(self, prefix: str) -> dict[str, str]:
        """Return the options whose names begin so, in lower case and without that."""
        self._prefixes.append(prefix)
        return {
            name.removeprefix(prefix): value
            for name, value in self._options.items()
            if name.startswith(prefix)
        }

    def know(self, *names: str) -> None:
        self._known.update(dict.fromkeys(names))

    def check_all_known(self) -> None:
        """Raise `ConfigError` for an option that was not asked for, with those that were."""
        known = {name.lower() for name in self._known} | _OF_SPARK
        for name in self._options:
            if name not in known and not name.startswith(tuple(self._prefixes)):
                names = ", ".join([*self._known, *(f"{prefix}…" for prefix in self._prefixes)])
                raise ConfigError(f"option {name!r} is unknown to {self._format}; it knows {names}")
