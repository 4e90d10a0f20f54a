"""Writes ep_server/_C.pyi and ep_server/_cuda.pyi from the built modules; --check compares instead.

pybind11 puts the signature of everything it exposes into the first line of its docstring, in Python's syntax.
A module that is not built here, or was built without an optional part, is skipped.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
MODULES = ("_C", "_cuda")
TYPES = {
    r"typing\.SupportsInt \| typing\.SupportsIndex": "int",
    r"typing\.SupportsFloat \| typing\.SupportsIndex": "float",
    r"collections\.abc\.": "",
    r"ep_server\._\w+\.": "",
    r"\((?:self|arg0): \w+": "(self",
    r"= <[^>]*>": "= ...",
}


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a committed stub differs")
    check = parser.parse_args().check
    sys.path.insert(0, str(ROOT))
    same = True
    for name in MODULES:
        module = load(name)
        if module is None:
            continue
        path, made = ROOT / "ep_server" / f"{name}.pyi", generate(module)
        if not check:
            path.write_text(made)
            continue
        found = path.read_text().splitlines(keepends=True)
        difference = list(
            difflib.unified_diff(found, made.splitlines(keepends=True), str(path), "make stubs")
        )
        sys.stdout.writelines(difference)
        same = same and not difference
    return 0 if same else 1


def load(name: str) -> ModuleType | None:
    """The built module, or None where it is missing or incomplete; says so."""
    try:
        module = importlib.import_module(f"ep_server.{name}")
    except ImportError:
        print(f"stubs: skipped ep_server/{name}.pyi, because ep_server.{name} is not built here")
        return None
    if not getattr(module, "FABRIC", True):
        print(f"stubs: skipped ep_server/{name}.pyi, because ep_server.{name} is built without libfabric")
        return None
    return module


def generate(module: ModuleType) -> str:
    """The text of the stub."""
    lines = [f'"""{module.__doc__}\n\nWritten by `make stubs` from the built module.\n"""', ""]
    public = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
    lines += [f"{name}: {constant(value)}" for name, value in public if isinstance(value, int | tuple)]
    lines += [line for name, value in public if isinstance(value, type) for line in describe(value)]
    lines += [
        line
        for name, value in public
        if callable(value) and not isinstance(value, type)
        for line in function("def", value.__doc__, "")
    ]
    text = "\n".join(lines) + "\n"
    if "Sequence[" in text:
        text = text.replace('"""\n\n', '"""\n\nfrom collections.abc import Sequence\n\n', 1)
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "stub.pyi", "-"]
    return subprocess.run(ruff, input=text, text=True, stdout=subprocess.PIPE, cwd=ROOT, check=True).stdout


def constant(value: object) -> str:
    """The type of a module's constant."""
    return "tuple[str, ...]" if isinstance(value, tuple) else type(value).__name__


def describe(kind: type) -> Iterator[str]:
    """A class: its text, constructor, methods and properties."""
    yield f"class {kind.__name__}:"
    if kind.__doc__:
        yield f'    """{kind.__doc__}"""'
    members = [(n, v) for n, v in vars(kind).items() if not n.startswith("_") or n == "__init__"]
    shown = False
    for name, value in members:
        static = isinstance(value, staticmethod)
        doc = (value.fget if isinstance(value, property) else value.__func__ if static else value).__doc__
        if doc is None or doc.startswith("Initialize self"):  # Python cannot make one
            continue
        if isinstance(value, property):
            yield "    @property"
            doc = name + doc
        if static:
            yield "    @staticmethod"
        shown = True
        yield from function("    def", doc, "    ")
    if not shown and not kind.__doc__:
        yield "    ..."


def function(keyword: str, doc: str | None, indent: str) -> Iterator[str]:
    """A function from its docstring: the signature, then perhaps its text."""
    signature, _, text = (doc or "").strip().partition("\n")
    for old, new in TYPES.items():
        signature = re.sub(old, new, signature)
    if re.search(r"\barg\d\b", signature):
        raise SystemExit(f"an argument has no name: {signature}")
    if not text.strip():
        yield f"{keyword} {signature}: ..."
        return
    yield f"{keyword} {signature}:"
    yield f'{indent}    """{text.strip()}"""'


if __name__ == "__main__":
    sys.exit(main())
