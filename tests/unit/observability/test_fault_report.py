"""What a fault report says of processes, from a /proc made up for it."""

from __future__ import annotations

from pathlib import Path

from ep_server.observability.fault_report import processes


def test_a_thread_that_ends_meanwhile_hides_no_process(tmp_path: Path) -> None:
    process = tmp_path / "12"
    (process / "task" / "13").mkdir(parents=True)
    (process / "task" / "14").mkdir()
    (process / "cmdline").write_text("python\0-m\0ep_server.ranks.life")
    (process / "status").write_text("State:\tS (sleeping)\n")
    (process / "task" / "13" / "stat").write_text("13 (main (1)) S " + "1 " * 10 + "7 8 0 0")
    # Of thread 14 only the folder is left.
    assert processes(tmp_path) == {
        "12": {"State": "S (sleeping)", "rank process": True, "threads": {"13 main (1)": "S 15"}}
    }
