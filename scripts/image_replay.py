"""Builds a target of the Dockerfile where no container engine runs: its stages' commands, one by one.

Every stage is a folder. FROM copies the folder of its base: a stage's, or one given with --image for an image
that cannot be pulled here. RUN is a chroot into it, as its USER, in a mount namespace of its own. Needs root.

    scripts/image_replay.py --target cpu --image python=/path/to/root --out /path/to/empty
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[1]
RUN_SECONDS = 1800
# $1 root, $2 user:group, $3 working directory, $4 command, $5.. VARIABLE=VALUE; --bind paths in BINDS.
ENTER = """
set -e
mount --rbind /dev "$1/dev"; mount -t proc proc "$1/proc"
for path in $BINDS; do
  if [ -d "$path" ]; then mkdir -p "$1$path"; elif [ ! -e "$1$path" ]; then
    mkdir -p "$(dirname "$1$path")"; touch "$1$path"
  fi
  mount --bind -o ro "$path" "$1$path"
done
root=$1 user=$2 where=$3 command=$4; shift 4
exec chroot --userspec="$user" "$root" /usr/bin/env -i -C "$where" "$@" /bin/sh -c "$command"
"""
VARIABLE = re.compile(r"\$\{?(\w+)\}?")


@dataclass
class Stage:
    """One FROM and what follows. config: what an engine would write down instead of running."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """images: name -> folder that stands for it. passed: what every RUN gets, as of proxies."""

    images: dict[str, Path]
    arguments: dict[str, str]
    passed: dict[str, str]
    binds: tuple[Path, ...]
    out: Path


class Replay:
    """Builds stages on demand, each once."""

    def __init__(self, dockerfile: Path, options: Options) -> None:
        self.options, self.context = options, dockerfile.parent
        self.stages: dict[str, Stage] = {}
        self.globals: dict[str, str] = {}
        self.roots: dict[str, Path] = {}
        parser = DockerfileParser(fileobj=BytesIO(dockerfile.read_bytes()))
        stage: Stage | None = None
        for item in parser.structure:
            kind, value = item["instruction"], item["value"]
            if kind == "FROM":
                base, _, name = value.partition(" AS ")
                stage = self.stages[name] = Stage(base, name)
            elif stage is None and kind == "ARG":
                self.globals |= self._argument(value)
            elif kind != "COMMENT" and stage is not None:
                stage.instructions.append((kind, value))

    def build(self, name: str) -> Path:
        """The folder of a stage. Raises: SystemExit naming what failed."""
        if name not in self.roots:
            stage, root = self.stages[name], self.options.out / name
            self._copy_base(stage, root)
            for kind, value in stage.instructions:
                print(f"[{name}] {kind} {value}", flush=True)
                self._do(stage, root, kind, value)
            (self.options.out / f"{name}.json").write_text(json.dumps(self.config(stage), indent=2))
            self.roots[name] = root
        return self.roots[name]

    def config(self, stage: Stage) -> dict[str, Any]:
        """What the image tells an engine."""
        return {**stage.config, "ENV": stage.env, "WORKDIR": stage.workdir, "USER": stage.user}

    def _copy_base(self, stage: Stage, root: Path) -> None:
        if stage.base in self.stages:
            base, below = self.build(stage.base), self.stages[stage.base]
            stage.env, stage.workdir, stage.user = dict(below.env), below.workdir, below.user
            stage.config = dict(below.config)
        else:
            whole = self._expand(stage.base, self.globals)
            image = re.split("[:@]", whole)[0]
            if image not in self.options.images:
                sys.exit(f"{whole}: no folder stands for it: --image {image}=FOLDER")
            base = self.options.images[image]
        subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(root)], check=True)

    def _do(self, stage: Stage, root: Path, kind: str, value: str) -> None:
        if kind == "ARG":
            stage.args |= self._argument(value)
        elif kind == "RUN":
            self._run(stage, root, value)
        elif kind == "COPY":
            self._copy(stage, root, shlex.split(value))
        elif kind in ("ENV", "LABEL"):
            pairs = dict(word.split("=", 1) for word in shlex.split(value))
            expanded = {key: self._expand(text, stage.args | stage.env) for key, text in pairs.items()}
            (stage.env if kind == "ENV" else stage.config.setdefault("LABEL", {})).update(expanded)
        elif kind == "WORKDIR":
            stage.workdir = value
            (root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif kind == "USER":
            stage.user = value
        elif kind in ("ENTRYPOINT", "CMD"):
            stage.config[kind] = json.loads(value)
        elif kind in ("EXPOSE", "STOPSIGNAL", "HEALTHCHECK"):
            stage.config[kind] = value
        else:
            sys.exit(f"{kind} {value}: not known to this script")

    def _run(self, stage: Stage, root: Path, command: str) -> None:
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"} | stage.args | stage.env
        words = [f"{key}={value}" for key, value in (self.options.passed | env).items()]
        line = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", ENTER, "enter"]
        binds = " ".join(map(str, self.options.binds))
        done = subprocess.run(
            [*line, str(root), stage.user, stage.workdir, command, *words],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "BINDS": binds},
            check=False,
            timeout=RUN_SECONDS,
        )
        if done.returncode:
            sys.exit(f"[{stage.name}] RUN {command}: exit code {done.returncode}")

    def _copy(self, stage: Stage, root: Path, words: Sequence[str]) -> None:
        """COPY [--from=STAGE] SOURCE... TARGET; of a folder its content, as an engine does."""
        source = self.context
        if words[0].startswith("--from="):
            source, words = self.build(words[0].removeprefix("--from=")), words[1:]
        *names, target = words
        place = root / (Path(stage.workdir) / target).as_posix().lstrip("/")
        for name in names:
            found = source / name.lstrip("/")
            if found.is_dir():
                ignore = (
                    shutil.ignore_patterns("__pycache__", "*.so", "*.o") if source == self.context else None
                )
                shutil.copytree(found, place, symlinks=True, ignore=ignore, dirs_exist_ok=True)
            else:
                whole = place / found.name if target.endswith("/") or len(names) > 1 else place
                whole.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, whole)

    def _argument(self, value: str) -> dict[str, str]:
        """An ARG that has a value: given, or its default."""
        name, equals, default = value.partition("=")
        given = self.options.arguments.get(name, default if equals else None)
        return {} if given is None else {name: given}

    @staticmethod
    def _expand(text: str, values: dict[str, str]) -> str:
        missing = [name for name in VARIABLE.findall(text) if name not in values]
        if missing:
            sys.exit(f"{text}: no value for {', '.join(missing)}: --build-arg {missing[0]}=...")
        return VARIABLE.sub(lambda match: values[match[1]], text)


def _pairs(items: Sequence[str]) -> dict[str, str]:
    return dict(item.split("=", 1) for item in items)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", type=Path, required=True, help="empty folder for the stages")
    for flag, text in (
        ("--image", "NAME=FOLDER that stands for an image; repeatable"),
        ("--build-arg", "NAME=VALUE; repeatable"),
        ("--env", "NAME=VALUE that every RUN gets, such as a proxy; repeatable"),
        ("--bind", "path of this host that every RUN sees, read-only; repeatable"),
    ):
        parser.add_argument(flag, action="append", default=[], help=text)
    given = parser.parse_args()
    options = Options(
        {name: Path(folder) for name, folder in _pairs(given.image).items()},
        _pairs(given.build_arg),
        _pairs(given.env),
        tuple(map(Path, given.bind)),
        given.out.resolve(),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    Replay(ROOT / "Dockerfile", options).build(given.target)


if __name__ == "__main__":
    main()
