"""Makes what is expensive once, under build/tests, for all processes of a run and for later runs."""

from __future__ import annotations

import fcntl
import hashlib
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "tests"

T = TypeVar("T")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time. path: of a file that stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made_once(name: str, key: object, make: Callable[[Path], T]) -> T:
    """What make(folder) returns, with the files that it leaves there. Tests must not change them.

    Args:
        key: all that the result depends on; its repr() is compared.
    """
    digest = hashlib.blake2b(repr((str(ROOT), key)).encode(), digest_size=8).hexdigest()
    folder = FOLDER / f"{name}-{digest}"
    result = folder / "result.pickle"
    with locked(FOLDER / f"{name}.lock"):
        if not result.exists():
            for old in FOLDER.glob(f"{name}-{'?' * 16}"):
                shutil.rmtree(old)
            folder.mkdir()
            value = make(folder / "files")
            result.write_bytes(pickle.dumps(value))
    found: T = pickle.loads(result.read_bytes())
    return found
