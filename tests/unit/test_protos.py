"""The generated code is what the protos give, and every public field says what it means."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_generated_code_is_fresh(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run([ROOT / "scripts" / "protos", tmp_path], check=True, env=environment)
    made = {file.name: file.read_text() for file in (tmp_path / "ep_server" / "v1").iterdir()}
    committed = {
        file.name: file.read_text()
        for file in (ROOT / "ep_server" / "v1").glob("*_pb2*")
        if file.suffix in (".py", ".pyi")
    }
    assert sorted(made) == sorted(committed)
    assert [name for name in made if made[name] != committed[name]] == []


def test_it_is_generated_by_protobuf_6_33() -> None:
    """Which promises to run on its own major version from there on, and on the next one: 6.33 to 7."""
    for file in (ROOT / "ep_server" / "v1").glob("*_pb2.py"):
        (version,) = re.findall(r"# Protobuf Python Version: (\d+)\.(\d+)\.", file.read_text())
        assert version == ("6", "33"), file.name


def test_every_field_of_the_decode_contract_has_a_comment() -> None:
    lines = (ROOT / "protos" / "ep_server" / "v1" / "decode.proto").read_text().splitlines()
    inside = {"GenerateRequest", "TokenIds", "Sampling", "Stopping", "ResponseOptions"}
    message, bare = "", []
    for before, line in pairwise(lines):
        if match := re.match(r"message (\w+)", line):
            message = match[1]
        scalar = re.match(
            r"\s+(optional |repeated |map<.*> )?(u?int32|u?int64|double|bool|string|map<)", line
        )
        if message in inside and scalar and not before.strip().startswith("//"):
            bare.append(f"{message}: {line.strip()}")
    assert bare == []
