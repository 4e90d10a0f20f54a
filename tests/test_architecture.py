"""The shape of the source tree: who may import what, where the environment is read, how large a file is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ep_server"
GENERATED = PACKAGE / "v1"

FOUNDATION = {"errors", "records", "config"}
# Modules that speak gRPC. Everything else at the top of the package works without a wire.
WIRE = {
    "server", "service", "control", "port", "endpoint", "certificates", "health", "interceptors", "client",
    "accept_queue", "messages", "unread",
}  # fmt: skip
# Modules that put the parts together; they may import anything.
ASSEMBLY = {"__main__", "app", "cli", "demo", "benchmark", "commands"}

# What nodes of one server may import too: ranks, the headers of a checkpoint, and the calls they relay.
NODES = {
    "call_metadata",
    "ep.limits",
    "model.checkpoint",
    "model.families",
    "ranks",
    "served_model",
    "stop_signals",
    "v1",
    "versions",
}

# Area -> what it may import besides itself; "ranks.protocol" allows that module and nothing else of ranks.
ALLOWED = {
    "errors": set(),
    "records": set(),
    "config": {"errors", "config_sections"},
    "config_sections": set(),
    "scheduler": {"errors", "records"},
    "ep": {"errors", "_C"},
    "model": {"errors", "records", "ep.exchange", "ep.quant", "_C"},
    "compat": {"errors", "ep"},
    "ranks": {*FOUNDATION, "logs", "scheduler", "model", "ep", "v1", "_C", "tokenizer"},
    "nodes": {*FOUNDATION, *WIRE, *NODES},
}
FRONT = {*FOUNDATION, "scheduler", "ranks.protocol", "model.families", "model.inspect", "model.sizes"}

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


def imports(path: Path) -> set[str]:
    """Every absolute module name that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` imports the module; `from module import name` does not.
            modules = {name for name in names if is_module(name)}
            found |= modules or {node.module or ""}
    return found


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


def allowed_for(module: str) -> set[str] | None:
    """What a module may import of ours; None = anything."""
    area = module.partition(".")[0]
    if area in ASSEMBLY or module == "":
        return None
    if area in ALLOWED:
        return ALLOWED[area] | {area}
    others = {module_name(path).partition(".")[0] for path in sources("*.py")}
    core = others - set(ALLOWED) - WIRE - ASSEMBLY
    return FRONT | core | WIRE | {"v1"} if area in WIRE else FRONT | core


@pytest.mark.parametrize("path", sources("*.py"), ids=lambda path: module_name(path) or "__init__")
def test_import_directions(path):
    allowed = allowed_for(module_name(path))
    if allowed is not None:
        assert {name for name in own_imports(path) if not within(name, allowed)} == set()


def users_of(*libraries: str) -> set[str]:
    return {
        module_name(path)
        for path in sources("*.py")
        if any(within(name, set(libraries)) for name in imports(path))
    }


def test_grpc_only_at_the_wire_and_between_nodes():
    users = users_of("grpc", "grpc_health", "grpc_reflection", "ep_server.v1")
    assert {m for m in users if not within(m, WIRE | {"nodes", "ranks"} | ASSEMBLY)} == set()
    assert "server" in users


def test_torch_only_where_tensors_are():
    users = users_of("torch")
    assert {m for m in users if not within(m, {"ranks", "model", "ep", "compat"})} == set()
    assert "model.sampler" in users


def test_triton_only_in_the_kernels_of_the_gpu():
    users = users_of("triton")
    assert {m for m in users if not within(m, {"model.triton"})} == set()
    assert "model.triton.norm" in users


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
    "modules": ("-c", "import ep_server.app, ep_server.cli, ep_server.demo"),
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
    """So what its modules load is all it ever loads. A command of its own is loaded when it is called."""
    late = {
        (module_name(path), name)
        for path in sources("*.py")
        if not within(module_name(path), {"model", "ep", "compat", "ranks.life", "ranks.devices"})
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    assert late == {("commands.demo", "ep_server.demo")}


def test_only_config_reads_the_environment():
    readers = set()
    for path in sources("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ep_server")
        for alias in node.names
        if alias.name.startswith("_") and alias.name not in ("_C", "_cuda", "__version__")
    ]
    assert taken == []


def test_no_torch_header_in_csrc_and_pybind11_only_in_the_bindings():
    includes = {
        path.relative_to(ROOT / "csrc").as_posix(): re.findall(
            r'#\s*include\s*[<"]([^>"]+)', path.read_text()
        )
        for path in sources(*NATIVE, "*.h", under=ROOT / "csrc")
    }
    assert "bindings.cpp" in includes
    headers = [(file, name) for file, names in includes.items() for name in names]
    assert [h for h in headers if re.match(r"(torch|ATen|c10|caffe2)/", h[1])] == []
    python = {file for file, name in headers if "pybind11" in name or name == "Python.h"}
    assert {file for file in python if not re.fullmatch(r"bindings\w*\.[ch]pp", file)} == set()


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


PACKAGES = {"benchmark", "commands", "compat", "ep", "model", "nodes", "ranks", "scheduler", "v1"}
VAGUE = {"base", "common", "core", "helpers", "lib", "manager", "misc", "shared", "tools", "util", "utils"}


def test_names_at_the_top():
    """Every package of the layout is there, no other is, and no module has a name that says nothing."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages - {"commands"} == PACKAGES - {"commands"}
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules & VAGUE == set()
    assert {
        "records",
        "errors",
        "config",
        "engine",
        "service",
        "server",
        "stream",
        "client",
        "metrics",
    } <= modules
