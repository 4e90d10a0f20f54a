"""The exchange benchmark's cases, their order, the sums it checks against, and the file that it leaves."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # its files import one another by name

from exchange_case import Case, Inputs, rows_between, wanted  # noqa: E402
from exchange_plan import FIRST, TOKENS, Asked, cases_of  # noqa: E402
from exchange_report import NCCL, OWN, Report, Row  # noqa: E402
from exchange_timing import Time  # noqa: E402

from ep_server.exchange.api import Reduction  # noqa: E402
from tests.support.exchange.expected import expect  # noqa: E402
from tests.support.exchange.routing import Inputs as Given  # noqa: E402

COMMON = Case(0, 0)


def test_the_targets_come_first_and_all_sizes_come() -> None:
    cases = cases_of(Asked(COMMON), gpus=4)
    plain = [replace(COMMON, ranks=n, tokens=t) for n in (4, 2) for t in FIRST]
    assert cases[: len(plain)] == plain
    assert len(set(cases)) == len(cases)
    usual = {(c.ranks, c.tokens) for c in cases if (c.routing, c.form, c.wire) == ("uniform", "own", "bf16")}
    assert usual == {(n, t) for n in (4, 2, 1) for t in TOKENS}
    for ranks in (4, 2):
        at_128 = [c for c in cases if (c.ranks, c.tokens) == (ranks, 128)]
        assert {c.wire for c in at_128} == {"bf16", "log10", "fp8"}
        assert {c.routing for c in at_128} == {"uniform", "zipf", "one"}
        assert {c.form for c in at_128} == {"own", "deepep"}


def test_fewer_gpus_skip_cases_unless_requested() -> None:
    assert {case.ranks for case in cases_of(Asked(COMMON), gpus=2)} == {1, 2}
    with pytest.raises(ValueError, match="4 needs as many GPUs, here are 2"):
        cases_of(Asked(COMMON, ranks=(4, 2)), gpus=2)
    with pytest.raises(ValueError, match="here are 0"):
        cases_of(Asked(COMMON), gpus=0)


def test_a_choice_is_measured_and_nothing_else() -> None:
    asked = Asked(COMMON, ranks=(2,), tokens=(128,), wires=("log10", "fp8"))
    assert cases_of(asked, 8) == [
        replace(COMMON, ranks=2, tokens=128, wire=wire) for wire in ("log10", "fp8")
    ]
    assert {case.tokens for case in cases_of(replace(asked, tokens=()), 8)} == set(TOKENS)
    quick = cases_of(replace(asked, tokens=(), quick=True), 8)
    assert [(case.tokens, case.wire) for case in quick] == [(128, "log10"), (128, "fp8")]
    assert cases_of(Asked(COMMON, overlap=True), 8) == [replace(COMMON, ranks=4, tokens=128)]


def test_routings_are_what_they_are_called() -> None:
    for routing in ("uniform", "zipf", "one"):
        ids = Inputs.of(Case(4, 64, routing=routing), 1).ids
        assert all(len(set(row)) == len(row) for row in ids.tolist()), "an expert twice in a token"
    counts = {
        routing: rows_between(Case(4, 64, routing=routing)).sum(0).tolist()
        for routing in ("uniform", "zipf", "one")
    }
    assert counts["one"] == [4 * 64, 0, 0, 0]
    assert counts["zipf"][0] > counts["uniform"][0]
    assert counts["zipf"][3] < counts["uniform"][3]


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one"])
@pytest.mark.parametrize("payload", ["bf16", "fp8"])
def test_the_sums_that_it_checks_against(payload: str, routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle of the tests gives the same bits for experts with the same factors."""
    case = Case(2, 3, hidden=256, top_k=3, experts=8, payload=payload, routing=routing)
    every = [Inputs.of(case, rank) for rank in range(case.ranks)]
    spec = replace(case.spec(1), reduction=Reduction.RANK)
    factors = torch.tensor([(1.0 + e / 16) * (-1 if e % 2 else 1) for e in range(case.experts)])
    monkeypatch.setattr("exchange_case.factors", lambda _: factors)
    got = wanted(case, 1)
    want = expect(spec, [Given(each.x, each.ids, each.weights) for each in every]).combined
    assert torch.equal(got.exact.view(torch.int16), want.view(torch.int16))
    assert torch.allclose(got.sums, want.double(), rtol=0.02, atol=0.05)


def test_rows_are_in_the_file_as_they_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    report = Report({"gpus": "2 x one"}, str(path), began=0.0)
    for tokens in (128, 16):
        case = replace(COMMON, ranks=2, tokens=tokens, wire="log10")
        row = Row(case, {name: Time(tokens, 2 * tokens) for name in OWN}, {"pair dispatch/send": 1.25})
        row.errors, row.bound_us = {"log10 rms": 0.004}, tokens / 4
        report.own(row)
        found = json.loads(path.read_text())
        assert (found["gpus"], found["rows"][-1]["case"]["tokens"]) == ("2 x one", tokens)
        assert not set(NCCL) & set(found["rows"][-1]["times_us"])
        row.times_us |= {name: Time(tokens, tokens) for name in NCCL}
        report.beside(row)
        assert json.loads(path.read_text())["rows"][-1]["times_us"]["A2A"]["median"] == tokens
    assert [row["case"]["tokens"] for row in json.loads(path.read_text())["rows"]] == [128, 16]
    assert list(tmp_path.iterdir()) == [path]
    printed = capsys.readouterr().out
    assert "128.0 (256.0)" in printed and " 25.0" in printed
    assert "log10 rms 4.00e-03" in printed and "send 1.2" in printed
    assert "NCCL: AG+RS 16.0 (16.0), A2A 16.0 (16.0)" in printed
