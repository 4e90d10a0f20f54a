"""Where the results of `ep-server bench` go: tables or JSON on standard output, JSON and a chart in files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ep_server.errors import ConfigError
from ep_server.observability.fault_report import versions


@dataclass(frozen=True, slots=True)
class Output:
    """as_json: print JSON instead of tables. json_file, chart: paths, empty = none."""

    as_json: bool
    json_file: str
    chart: str

    def check(self) -> None:
        """Before anything is measured. Raises: ConfigError for a file that could not be written."""
        for flag, path in (("--json-file", self.json_file), ("--chart", self.chart)):
            if path and not _writable(Path(path).resolve()):
                raise ConfigError(flag, path, "a file in a directory that is there, and may be written")
        if self.chart and not self.chart.endswith(".svg"):
            raise ConfigError("--chart", self.chart, "a name that ends with .svg")
        if self.chart and Path(self.chart).resolve() == Path(self.json_file).resolve():
            raise ConfigError("--chart", self.chart, "another file than that of --json-file")

    def show(
        self, found: dict[str, Any], tables: Callable[[Console], None], picture: Callable[[], str]
    ) -> None:
        """Writes and prints; what could not be written is printed all the same.

        Args:
            found: for JSON. tables: prints to a console. picture: draws the SVG.
        Raises: ConfigError for a file that could not be written.
        """
        found = {"measured": time.strftime("%Y-%m-%d"), "versions": versions(), **found}
        refused = None
        try:  # files first: whoever reads standard output may leave early
            self._write(found, picture)
        except ConfigError as error:
            refused = error
        if self.as_json:
            print(json.dumps(found))
        else:
            tables(Console())
        if refused is not None:
            raise refused

    def _write(self, found: dict[str, Any], picture: Callable[[], str]) -> None:
        texts = {
            ("--json-file", self.json_file): lambda: json.dumps(found, indent=1) + "\n",
            ("--chart", self.chart): picture,
        }
        for (flag, path), text in texts.items():
            try:
                if path:
                    Path(path).write_text(text(), encoding="utf-8")
            except OSError as error:
                raise ConfigError(flag, path, f"a file that can be written ({error.strerror})") from error


def _writable(path: Path) -> bool:
    if path.exists():
        return not path.is_dir() and os.access(path, os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK)
