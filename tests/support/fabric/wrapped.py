"""Builds wrapped_libfabric.c: a libfabric that behaves as one over a card, around one that is here."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.fabric.fabric_ends import LIBRARIES, loopback, providers

SOURCE = Path(__file__).with_name("wrapped_libfabric.c")
# The versions under which a caller built with the headers of 1.x looks for them.
VERSIONS = """
FABRIC_1.0 { global: fi_version; fi_strerror; local: *; };
FABRIC_1.1 { global: fi_fabric; } FABRIC_1.0;
FABRIC_1.3 { global: fi_getinfo; fi_freeinfo; fi_dupinfo; } FABRIC_1.1;
"""


@dataclass(frozen=True)
class Wrapped:
    """What the made library does; see the top of its source."""

    name: str = "verbs;ofi_rxm"
    library: str = "system"
    lacks: str = "0"
    cq_data: int = 4
    most_writes: int = 1 << 16
    most_receives: int = 64
    emulated: int = -1
    strict: bool = False
    failing: int = 0
    broken_wait: bool = False
    hmem: bool = False
    refused: bool = False
    p2p: int = -1
    cuda_calls: int = -1

    def build(self, folder: Path) -> Path:
        """Compiles it into a folder. Its record is the file `record` there."""
        folder.mkdir(parents=True, exist_ok=True)
        made, versions = folder / "libfabric.so.1", folder / "versions"
        versions.write_text(VERSIONS, encoding="utf-8")
        macros = {
            "REAL": f'"{LIBRARIES[self.library] or "libfabric.so.1"}"',
            "BELOW": f'"{below(self.library)}"',
            "RECORD": f'"{folder / "record"}"',
            "NAME": f'"{self.name}"',
            "LACKS": self.lacks,
            "CQ_DATA": self.cq_data,
            "MOST_WRITES": self.most_writes,
            "MOST_RECEIVES": self.most_receives,
            "EMULATED": self.emulated,
            "STRICT": int(self.strict),
            "FAILING": self.failing,
            "BROKEN_WAIT": int(self.broken_wait),
            "HMEM": int(self.hmem),
            "REFUSED": int(self.refused),
            "P2P": self.p2p,
            "CUDA_CALLS": self.cuda_calls,
        }
        line = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(made)]
        line += [f"-D{name}={value}" for name, value in macros.items()]
        line += [f"-Wl,--version-script={versions}", str(SOURCE), "-ldl"]
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return made


@cache
def below(library: str) -> str:
    """The provider of this libfabric that carries the tests, as it calls it itself."""
    return providers(loopback(library))[0]
