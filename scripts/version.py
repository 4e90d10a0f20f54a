"""Prints the version of the project. With --tag, fails unless tag, chart and changelog agree with it."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version(root: Path = ROOT) -> str:
    """`__version__`, read without importing the package. Raises: SystemExit."""
    for node in ast.parse((root / "ep_server/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise SystemExit("ep_server/__init__.py: no __version__")


def check(tag: str, root: Path = ROOT) -> str:
    """The version, if everything that names one agrees with the tag. Raises: SystemExit with what differs."""
    found = version(root)
    chart = (root / "helm/ep-server/Chart.yaml").read_text(encoding="utf-8")
    named = {
        "tag": tag.removeprefix("v"),
        "Chart.yaml, version": "".join(re.findall(r"^version: (\S+)$", chart, re.MULTILINE)),
        "Chart.yaml, appVersion": "".join(re.findall(r'^appVersion: "(\S+)"$', chart, re.MULTILINE)),
    }
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"## {found}\n" not in changes:
        named["CHANGELOG.md"] = "no section"
    wrong = [f"{place}: {name}" for place, name in named.items() if name != found]
    if wrong:
        raise SystemExit(f"version {found}; {'; '.join(wrong)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="the tag of a release, such as v0.1.0")
    tag = parser.parse_args().tag
    print(check(tag) if tag else version())


if __name__ == "__main__":
    main()
