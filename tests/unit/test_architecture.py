"""The shape of the source tree: who may import what, where the environment is read, how large a file is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ep_server"
GENERATED = PACKAGE / "v1"

FOUNDATION = {"errors", "records", "orders", "config", "logs", "stop_signals"}
# What is known of a model without torch.
HEADERS = {"models.checkpoint", "models.families", "models.identity", "models.sizes"}
# Package -> what it may import besides itself; "ranks.protocol" allows that module and no other of ranks.
ALLOWED = {
    "errors": set(),
    "records": set(),
    "orders": {"scheduler.placement"},
    "stop_signals": set(),
    "config": {"errors"},
    "logs": {"config"},
    "client": {"errors", "records", "v1"},
    "scheduler": {"errors", "records"},
    "exchange": {"errors", "_C"},
    "compat": {"errors", "exchange", "_C"},
    "text": {"errors", "records", "models.families"},
    "models": {"errors", "records", "exchange.api", "exchange.quant", "_C"},
    "backends": {
        "errors",
        "records",
        "exchange.api",
        "exchange.device_wait",
        "exchange.quant",
        "models",
        "_C",
    },
    "observability": {*FOUNDATION, "engine.observer", "engine.engine"},  # the state of the server
    "engine": {*FOUNDATION, "scheduler", "text", "ranks.protocol"},
    "ranks": {*FOUNDATION, "scheduler", "models", "backends", "exchange", "text", "v1", "_C"},
    "frontend": {*FOUNDATION, "engine", "text", "observability", "ranks.protocol", *HEADERS, "v1"},
    "cluster": {*FOUNDATION, "frontend", "ranks", "exchange.spec", *HEADERS, "v1"},
    "testing": {"errors", "records", "orders", "exchange", "ranks.protocol", "scheduler"},
}
TENSORS = {"ranks", "models", "backends", "exchange", "compat", "testing"}
# They put the parts together and may import anything.
ASSEMBLY = {"__main__", "cli", ""}

PURE_FORBIDDEN = {
    "asyncio", "concurrent", "ctypes", "datetime", "grpc", "multiprocessing", "numpy", "os", "random",
    "select", "socket", "subprocess", "threading", "time", "torch", "transformers", "uvloop",
}  # fmt: skip


def sources(*patterns: str, under: Path = PACKAGE) -> list[Path]:
    found = (path for pattern in patterns for path in under.rglob(pattern))
    return sorted(path for path in found if GENERATED not in path.parents)


def module_name(path: Path) -> str:
    """Dotted, without the package: scheduler.queues; scheduler for its __init__; "" for the package's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The syntax of a file."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path: Path) -> frozenset[str]:
    """Every absolute module name that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` imports the module; `from module import name` does not.
            modules = {name for name in names if is_module(name)}
            found |= modules or {node.module or ""}
    return frozenset(found)


@cache
def is_module(name: str) -> bool:
    head, _, rest = name.partition(".")
    if head != "ep_server" or not rest:
        return False
    path = PACKAGE.joinpath(*rest.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists() or rest == "_C"


def own_imports(path: Path) -> set[str]:
    """The imports of our own modules, without the package's name."""
    return {name.removeprefix("ep_server.") for name in imports(path) if name.startswith("ep_server.")}


def within(name: str, areas: set[str]) -> bool:
    return any(name == area or name.startswith(area + ".") for area in areas)


def area_of(module: str) -> str:
    return module.partition(".")[0]


def test_import_directions():
    against = {
        (module_name(path), name)
        for path in sources("*.py")
        if (area := area_of(module_name(path))) not in ASSEMBLY
        for name in own_imports(path)
        if not within(name, ALLOWED[area] | {area})
    }
    assert against == set()


def test_no_import_cycles():
    """Neither at import time nor for types alone; of modules, inside packages too."""
    graph = {module_name(path): own_imports(path) - {module_name(path)} for path in sources("*.py")}
    for module, imported in graph.items():
        # `from package import name` may mean the package's face; what imports its own package is no cycle.
        imported -= {module.rpartition(".")[0]}
    sorter = TopologicalSorter(graph)
    sorter.prepare()  # raises CycleError, which names one


# Transport -> the transports that it is made of. Nobody else imports one but the factory.
TRANSPORTS = {
    "exchange.host": set(),
    "exchange.nvlink": {"exchange.host"},
    "exchange.fabric": {"exchange.host"},
    "exchange.hierarchical": {"exchange.host", "exchange.fabric"},
}
TORCH_FREE = {"exchange.fabric.settings"}  # what is known of one beforehand


def test_only_the_factory_imports_transports():
    """Others open an exchange with exchange.factory and use exchange.api."""
    users = {}
    for module, path in ((module_name(path), path) for path in sources("*.py")):
        own = next((name for name in TRANSPORTS if within(module, {name})), "")
        allowed = TORCH_FREE | ({own} | TRANSPORTS[own] if own else set())
        users[module] = {
            n for n in own_imports(path) if within(n, set(TRANSPORTS)) and not within(n, allowed)
        }
    assert {module for module, names in users.items() if names} == {"exchange.factory"}


def classes_of(*under: str) -> list[tuple[str, ast.ClassDef]]:
    return [
        (module_name(path), node)
        for folder in under
        for path in sources("*.py", under=PACKAGE / folder)
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    ]


def test_exchanges_are_composed_not_inherited():
    """A class of the exchange has a Protocol or a kind of record as its base, and no method to inherit."""
    found = {
        (module, each.name, ast.unparse(base))
        for module, each in classes_of("exchange", "compat")
        for base in each.bases
        if not re.match(r"(Protocol|Generic|StrEnum|Enum|TypedDict|NamedTuple)\b", ast.unparse(base))
    }
    assert found == {("exchange.api", "FusedExchange", "Exchange")}  # a Protocol too


def test_no_subclass_overrides_a_method_to_refuse_it():
    """Then it is not one: what both need is a part of both. A gRPC servicer is an interface."""
    refusing = [
        f"{module}.{each.name}.{method.name}"
        for module, each in classes_of(".")
        if any(not ast.unparse(base).endswith("Servicer") for base in each.bases)
        for method in each.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(next((n for n in method.body if not is_docstring(n)), None), ast.Raise)
    ]
    assert refusing == []


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def users_of(*libraries: str) -> set[str]:
    return {
        module_name(path)
        for path in sources("*.py")
        if any(within(name, set(libraries)) for name in imports(path))
    }


def test_grpc_only_at_the_wire_and_between_nodes():
    users = users_of("grpc", "grpc_health", "grpc_reflection", "grpc_channelz", "ep_server.v1")
    assert {m for m in users if not within(m, {"frontend", "client", "cluster", "ranks", "cli"})} == set()
    assert "frontend.server" in users


def test_torch_only_where_tensors_are():
    users = users_of("torch")
    assert {
        m for m in users if not within(m, {"ranks", "models", "backends", "exchange", "compat", "testing"})
    } == set()
    assert "backends.cpu.sampler" in users


def test_triton_only_in_the_kernels_of_the_gpu():
    users = users_of("triton")
    assert {m for m in users if not within(m, {"backends.gpu.kernels.triton"})} == set()
    assert "backends.gpu.kernels.triton.norm" in users


def test_transformers_is_an_oracle_for_tests_only():
    assert users_of("transformers") == set()


def test_the_scheduler_names_no_clock_thread_process_or_tensor():
    for path in sources("*.py", under=PACKAGE / "scheduler"):
        assert {name for name in imports(path) if name.partition(".")[0] in PURE_FORBIDDEN} == set(), path


def loaded_by(*command: str) -> set[str]:
    """The libraries that `python command` imports."""
    line = [sys.executable, "-X", "importtime", *command]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT, timeout=120)
    names = re.findall(r"^import time:.*\| *([\w.]+)$", done.stderr, re.MULTILINE)
    return {name.partition(".")[0] for name in names}


def test_nothing_that_the_scheduler_imports_brings_them_in():
    loaded = loaded_by("-c", "import ep_server.scheduler")
    assert "ep_server" in loaded
    assert loaded & {"torch", "grpc", "asyncio", "numpy", "multiprocessing"} == set()


# Every process but a rank's. What is made of these modules may import nothing later on: see below.
FRONT_COMMANDS = {
    "modules": ("-c", "import ep_server.cli.app, ep_server.cli.main, ep_server.cli.demo.run"),
    "help": ("-m", "ep_server", "--help"),
    "config": ("-m", "ep_server", "config"),
    "inspect": ("-m", "ep_server", "inspect", "ep_server/assets/demo_model", "--ranks", "2"),
}


@pytest.mark.parametrize("command", FRONT_COMMANDS.values(), ids=FRONT_COMMANDS)
def test_the_front_process_never_loads_torch(command):
    loaded = loaded_by(*command)
    assert {"ep_server", "grpc"} <= loaded
    assert loaded & {"torch", "triton", "numpy", "safetensors", "transformers"} == set()


def test_the_front_imports_nothing_later_than_at_its_start():
    """So what its modules load is all it ever loads."""
    late = {
        (module_name(path), name)
        for path in sources("*.py")
        if not within(
            module_name(path),
            {"models", "backends", "exchange", "compat", "testing", "ranks.life", "ranks.devices"},
        )
        for function in nodes(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    assert late == set()


def test_only_config_reads_the_environment():
    readers = set()
    for path in sources("*.py"):
        for node in nodes(path):
            named = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
            taken = isinstance(node, ast.ImportFrom) and any("env" in a.name for a in node.names)
            if named or (taken and node.module == "os"):
                readers.add(module_name(path))
    assert readers == {"config"}
    native = sources(*NATIVE, under=ROOT / "csrc")
    assert native and not [p for p in native if re.search(r"\b(secure_)?getenv\b", p.read_text())]


def test_no_module_takes_a_private_name_of_another():
    taken = [
        f"{module_name(path)}: {node.module}.{alias.name}"
        for path in sources("*.py")
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ep_server")
        for alias in node.names
        if alias.name.startswith("_") and alias.name not in ("_C", "_cuda", "__version__")
    ]
    assert taken == []


def test_csrc_has_no_torch_and_pybind11_only_in_bindings():
    includes = {
        path.relative_to(ROOT / "csrc").as_posix(): re.findall(
            r'#\s*include\s*[<"]([^>"]+)', path.read_text()
        )
        for path in sources(*NATIVE, "*.h", under=ROOT / "csrc")
    }
    assert "bindings/module.cpp" in includes
    headers = [(file, name) for file, names in includes.items() for name in names]
    assert [h for h in headers if re.match(r"(torch|ATen|c10|caffe2)/", h[1])] == []
    python = {file for file, name in headers if "pybind11" in name or name == "Python.h"}
    assert {file for file in python if not file.startswith("bindings/")} == set()


BUDGET = {".py": 400, ".cpp": 500, ".hpp": 500, ".inc": 500, ".cu": 500, ".cuh": 500}
NATIVE = tuple(f"*{suffix}" for suffix in BUDGET if suffix != ".py")


def test_no_file_is_larger_than_its_budget():
    files = sources("*.py") + sources(*NATIVE, under=ROOT / "csrc")
    lines = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    assert len(lines) > 50
    assert {name: n for name, n in lines.items() if n > BUDGET[Path(name).suffix]} == {}


def test_the_ten_steps_of_the_readme_are_those_of_the_tree():
    """Each file that the README names for a step begins with the number of that step."""
    rows = re.findall(r"^\| (\d+) \|.*\| (`.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 11))
    for number, places in rows:
        for place in re.findall(r"`([^`]+)`", places):
            files = sorted(ROOT.glob(place + "*.py" if place.endswith("/") else place))
            first = [path.read_text(encoding="utf-8").partition("\n")[0] for path in files]
            numbered = [line for line in first if f"[{number}]" in line]
            assert numbered and (place.endswith("/") or numbered == first), (number, place, first)


PACKAGES = {
    "backends", "cli", "client", "cluster", "compat", "config", "engine", "exchange", "frontend", "models",
    "observability", "ranks", "scheduler", "testing", "text", "v1",
}  # fmt: skip
MODULES = {"__init__", "__main__", "errors", "logs", "orders", "records", "stop_signals"}
VAGUE = {"base", "core", "helpers", "lib", "manager", "misc", "shared", "tools", "util"}


def test_names_at_the_top():
    """The packages and modules of the layout are there and no others."""
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == PACKAGES
    assert {path.stem for path in PACKAGE.glob("*.py")} == MODULES


def test_no_module_has_a_vague_name():
    assert {path.stem for path in sources("*.py")} & VAGUE == set()


def test_names_of_tests_are_at_most_60_characters():
    names = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(names) > 1000
    assert {(path, name) for path, name in names if len(name) > 60} == set()


# Benchmarks that run on the ends of the tests, and tests of what benchmarks write. Anything else is an error.
BETWEEN_TREES = {
    ("benchmarks/bench_hierarchical.py", "tests"),
    ("tests/gpu/backends/gpu/test_staged_files.py", "benchmarks"),
    ("tests/integration/benchmarks/test_gpu_load.py", "benchmarks"),
    ("tests/unit/benchmarks/test_load_checkpoint.py", "benchmarks"),
}


def test_tests_benchmarks_and_scripts_do_not_import_each_other():
    trees = ("tests", "benchmarks", "scripts", "examples")
    found = set()
    for path in sorted(path for tree in trees for path in (ROOT / tree).rglob("*.py")):
        own, file = path.relative_to(ROOT).parts[0], path.relative_to(ROOT).as_posix()
        for name in imports(path):
            tree = name.partition(".")[0]
            if tree in trees and tree != own:
                found.add((file, tree))
            if own == "tests" and tree == "tests":
                assert within(name, {"tests.support"}), f"{file}: {name}"
    assert found == BETWEEN_TREES
