"""Options shared by commands: how help is shown."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from ep_server.cli.options import Command

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command(cls=Command)
def documented() -> None:
    """Do it.

    This paragraph has two
    lines in the source.
    """


def test_help_wraps_paragraphs_not_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "This paragraph has two lines in the source." in shown
