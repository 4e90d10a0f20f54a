"""What `gpu_check test --parallel` relies on: each test is in one part, no GPU has more than its places."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import gpu_tests
from scripts.gpu_tests import PLACES, parts_for, run_all
from tests.support.parts import RANKS, Part, deal

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
def test_of_the_host(): pass
@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_many(num_ranks): pass
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_slow(num_ranks): pass
"""
RUN = """
import json, os, sys, time
begin = time.monotonic()
time.sleep(0.1)
record = {"part": sys.argv[2], "time": (begin, time.monotonic())}
record["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
with open(os.environ["RECORDS"], "a") as out: out.write(json.dumps(record) + "\\n")
sys.exit(1 if sys.argv[2] == "2:1/4" else 5 if sys.argv[2] == "3-slow:1/1" else 0)
"""


class Item:
    """As much of a pytest.Item as parts look at."""

    def __init__(self, nodeid: str, *marks: str, **params: object) -> None:
        self.nodeid, self._marks, self.callspec = nodeid, marks, SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> object:
        return name if name in self._marks else None


SUITE = [
    Item("host"),
    *[Item(f"many[{case}-{n}]", "gpu", num_ranks=n) for n in (1, 2, 4) for case in range(30)],
    *[Item(f"few[{n}]", "gpu", num_gpus=n) for n in (2, 4)],
    *[Item(f"hosts[{len(hosts)}]", "gpu", hosts=hosts) for hosts in ((0, 1, 1), (0, 0, 1, 1))],
    Item("of_two", "gpu"),
    *[Item(f"slow[{n}]", "gpu", "slow", num_ranks=n) for n in (1, 2, 4)],
]


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_every_test_is_in_one_part(gpus: int) -> None:
    found = [each for part in parts_for(gpus) for each in part.of(SUITE)]
    assert len(found) == len(SUITE) and set(found) == set(SUITE)


def test_parts_hold_their_ranks_and_whole_functions() -> None:
    found = {str(part): [test.nodeid for test in part.of(SUITE)] for part in parts_for(2)}
    assert found["0:1/1"] == ["host"]
    assert found["3:1/1"] == ["hosts[3]"]
    assert found["2-slow:1/1"] == ["slow[2]"]
    assert found["2:1/2"] == [f"many[{case}-2]" for case in range(30)]
    assert found["2:2/2"] == ["few[2]", "of_two"]
    assert found["4:1/1"][-2:] == ["few[4]", "hosts[4]"]


def test_a_test_that_no_part_would_have_is_named() -> None:
    with pytest.raises(pytest.UsageError, match=r"few\[8\] has 8 ranks"):
        Part.parse("4:1/1").of([Item("few[8]", "gpu", num_gpus=8)])


def test_the_option_leaves_the_tests_of_a_part(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(TESTS)
    line = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-o"]
    line += ["markers=gpu: x\nslow: y", "--part", "2-slow:1/1", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        line, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60, env=env
    )
    assert "1/7 tests collected" in ended.stdout
    assert "test_slow[2]" in ended.stdout


@pytest.mark.parametrize("text", ["", "4", "5:1/1", "4:0/2", "4:3/2", "4-fast:1/1", "4:1/2/3"])
def test_a_part_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"RANKS\[-slow\]:I/N"):
        Part.parse(text)


def test_parts_cost_about_the_same() -> None:
    costs = [1, 20, 3, 8, 2, 2, 9, 20, 1, 4]
    parts = deal(costs, 3)
    sums = Counter(dict.fromkeys(range(3), 0))
    for part, cost in zip(parts, costs, strict=True):
        sums[part] += cost
    assert max(sums.values()) - min(sums.values()) <= min(costs) + 1


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_no_gpu_has_more_than_its_places(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.py").write_text(RUN)
    monkeypatch.setenv("RECORDS", str(tmp_path / "records"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ordinals = [str(4 + gpu) for gpu in range(gpus)]
    parts = parts_for(gpus)
    failed = run_all(parts, ordinals, [sys.executable, str(tmp_path / "run.py")])
    assert failed == sum(str(part) == "2:1/4" for part in parts)
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert sorted(record["part"] for record in records) == sorted(map(str, parts))
    for record in records:
        part, visible = Part.parse(record["part"]), (record["gpus"] or "").split(",")
        assert part.ranks == 0 or len({*visible} & {*ordinals}) == len(visible) == min(part.ranks, gpus)
    for at in (record["time"][0] for record in records):
        taken: Counter[str] = Counter()
        for record in records:
            if record["gpus"] and record["time"][0] <= at < record["time"][1]:
                places = PLACES if "slow" in record["part"] else 1
                taken.update(dict.fromkeys(record["gpus"].split(","), places))
        assert not taken or max(taken.values()) <= PLACES, (at, records)
    assert ("part 2:1/4, GPUs" in capfd.readouterr().out) == (gpus == 4)


def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "SECONDS", 0.5)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert run_all([Part(RANKS[0], False, 1, 1)], ["0"], command) == 1
