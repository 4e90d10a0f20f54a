"""What `.ci/run` relies on: --no-skips makes a skip a failure; property tests do not draw at random."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPS = {
    "call": "import pytest\ndef test_it():\n    pytest.skip('no tool')\n",
    "mark": "import pytest\n@pytest.mark.skipif(True, reason='no tool')\ndef test_it():\n    pass\n",
    "fixture": "import pytest\n@pytest.fixture\ndef tool():\n    pytest.skip('no tool')\n"
    "def test_it(tool):\n    pass\n",
    "module": "import pytest\npytest.skip('no tool', allow_module_level=True)\n",
}

DRAWS = """
from pathlib import Path
from hypothesis import given, strategies

@given(strategies.binary(min_size=16))
def test_it(drawn):
    with Path("drawn").open("ab") as file:
        file.write(drawn)
"""


def run(tmp_path: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(f"{text}\ndef test_fine():\n    pass\n")
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(tmp_path)]
    return subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)


@pytest.mark.parametrize("text", SKIPS.values(), ids=SKIPS)
def test_a_skip_is_a_failure_if_it_is_to_be(tmp_path: Path, text: str) -> None:
    assert run(tmp_path, text).returncode in (0, 5)  # 5: no test was left
    strict = run(tmp_path, text, "--no-skips")
    assert strict.returncode in (1, 2), strict.stdout
    assert "no tool" in strict.stdout


def test_without_a_skip_nothing_changes(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.xfail(strict=True)\ndef test_it():\n    assert False\n"
    assert run(tmp_path, text, "--no-skips").returncode == 0


def test_property_tests_draw_the_same_every_time(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn"

    def examples(*options: str) -> bytes:
        drawn.unlink(missing_ok=True)
        assert run(tmp_path, DRAWS, *options).returncode == 0
        return drawn.read_bytes()

    assert examples() == examples() != b""
    assert examples("--hypothesis-profile=random") != examples("--hypothesis-profile=random")
