"""Benchmarks start as their first lines say: by their path, with their own folder alone to import from."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
SCRIPTS = [file for file in sorted(FOLDER.glob("*.py")) if "__main__" in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_a_script_finds_what_it_imports(file: Path) -> None:
    """Other folders of the repository come after it was put on the path."""
    found = False
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        found |= ast.unparse(statement).startswith("sys.path.insert(0, str(Path(__file__).parents[1]))")
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(
            ("benchmarks", "tests")
        ):
            assert found, f"line {statement.lineno}: from {statement.module} import ..."
