"""What a compiled kernel reads and writes before it waits for the kernels ahead of it: from PTX and SASS."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

WAIT = "griddepcontrol.wait"
_MEMORY = re.compile(r"(ld|st|atom|red|cp\.async[\w.]*|prefetch)[\w.:]*\.global\b")
_REGISTER = re.compile(r"%\w+")
_TOUCHES = re.compile(r"\b(LDGSTS|LDG|LD|STG|ST|ATOMG|ATOM|RED|REDG|UBLKCP|UTMALDG)\b")


def before_waiting(ptx: str, sass: str, names: Sequence[str]) -> list[str]:
    """Arguments whose memory is touched, once for each access, and "(branch)" for one ahead of the wait.

    Args:
        names: of the arguments that the machine code has, in their order.
    Returns: also writes, "arg ="; "(unknown)" for an address made of no argument; "(never waits)"; "(machine
      code)" where that touches memory more often before it waits than the PTX says.
    """
    if WAIT not in ptx:
        return ["(never waits)"]
    found: list[str] = []
    accesses = 0
    sources: dict[str, frozenset[str]] = {}  # of a register: arguments that its value is computed from
    for operation, operands in _instructions(ptx[ptx.index("\n{") : ptx.index(WAIT)]):
        written, *read = operands
        if operation.startswith("ld.param"):
            index = int(re.findall(r"_param_(\d+)", read[0])[0])
            sources |= dict.fromkeys(_REGISTER.findall(written), frozenset(names[index : index + 1]))
        elif _MEMORY.match(operation):
            accesses += 1
            stores = not operation.startswith(("ld", "prefetch", "cp"))
            addresses = " ".join(each for each in operands if each.startswith("["))
            computed = [sources.get(register, frozenset()) for register in _REGISTER.findall(addresses)]
            where = sorted(frozenset().union(*computed)) or ["(unknown)"]
            found += [f"{name} =" if stores else name for name in where]
        elif operation.startswith(("bra", "ret", "exit", "trap", "call")):
            found.append("(branch)")
        else:
            known = (sources.get(register, frozenset()) for register in _REGISTER.findall(" ".join(read)))
            sources |= dict.fromkeys(_REGISTER.findall(written), frozenset().union(*known))
    if len(_TOUCHES.findall(sass[: sass.index("ACQBULK")])) > accesses:
        found.append("(machine code)")
    return found


def _instructions(text: str) -> Iterator[tuple[str, list[str]]]:
    """Operation and operands, those in brackets whole; no predicates, labels, directives, comments."""
    for statement in re.sub(r"//.*|^\s*\.loc.*|^\$?\w+:", "", text, flags=re.MULTILINE).split(";"):
        stripped = re.sub(r"^[\s{}]*(@!?%\w+\s+)?", "", statement)
        operation, *rest = stripped.split(maxsplit=1) or [""]
        operands = re.findall(r"(?:^|,)\s*(\{[^}]*\}|\[[^\]]*\]|[^,]*)", "".join(rest))
        if operation and not operation.startswith("."):
            yield operation, operands
