"""Says which lines of gpu_wheels.txt this Python lacks, and fails if any but an optional one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NEEDED = Path(__file__).with_suffix(".txt")
OPTIONAL = "optional "


def numbers(text: str) -> tuple[int, ...]:
    """2.11.0+cu130 -> (2, 11, 0)."""
    return tuple(int(part) for part in text.partition("+")[0].split(".") if part.isdecimal())


def problem(line: str) -> str:
    """What is wrong with one requirement, or ""."""
    name, _, least = line.removeprefix(OPTIONAL).partition(">=")
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"{name} is missing, {line} is needed"
    return "" if numbers(found) >= numbers(least) else f"{name} {found} is too old, {line} is needed"


def main() -> None:
    lines = [line for line in NEEDED.read_text().splitlines() if line and not line.startswith("#")]
    for text in filter(None, (problem(line) for line in lines if line.startswith(OPTIONAL))):
        print(f"optional: {text}")
    problems = [text for line in lines if not line.startswith(OPTIONAL) and (text := problem(line))]
    if problems:
        raise SystemExit("\n".join(problems) + f"\nsee {NEEDED.name}")


if __name__ == "__main__":
    main()
