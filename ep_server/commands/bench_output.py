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
from ep_server.versions import versions


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

    def show(
        self, found: dict[str, Any], tables: Callable[[Console], None], picture: Callable[[], str]
    ) -> None:
        """Prints and writes.

        Args:
            found: for JSON. tables: prints to a console. picture: draws the SVG.
        """
        found = {"measured": time.strftime("%Y-%m-%d"), "versions": versions(), **found}
        if self.json_file:  # files first: whoever reads standard output may leave early
            Path(self.json_file).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if self.chart:
            Path(self.chart).write_text(picture(), encoding="utf-8")
        if self.as_json:
            print(json.dumps(found))
        else:
            tables(Console())


def _writable(path: Path) -> bool:
    if path.exists():
        return not path.is_dir() and os.access(path, os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK)
