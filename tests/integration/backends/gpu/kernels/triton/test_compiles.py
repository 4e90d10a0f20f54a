"""Every kernel compiles for compute capability 9.0 at real models' shapes, and fits a multiprocessor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

import ep_server.backends.gpu.kernels.triton as triton_kernels
from tests.support.once import FOLDER
from tests.support.triton.reads import before_waiting
from tests.support.triton.shapes import PARTS

SHARED_LIMIT = 227 << 10  # bytes of shared memory a block may have
SPILL = 8 if triton.__version__.startswith("3.6.") else 0  # bytes that a thread may leave in memory
SHARED_OF_ALL, SHARED_PER_BLOCK = (
    228 << 10,
    1 << 10,
)  # of a multiprocessor; what the system takes of a block's

# What was written long before: weights, what the step was given, what the host has written. See early.py.
READ_EARLY = {
    "_answers_kernel": {"weight"},
    "_embed_kernel": {"weight"},
    "_rms_norm_kernel": {"weight"},
    "_write_slots_kernel": {"records"},
    "_spread_kernel": {"words"},
    "_store_gqa_kernel": {"positions", "slots", "table"},
}
PTX = """.visible .entry _some_kernel(
	.param .u64 .ptr .global .align 1 _some_kernel_param_0,
	.param .u64 .ptr .global .align 1 _some_kernel_param_1
)
{
	ld.param.b64 	%rd1, [_some_kernel_param_0];
	ld.param.b64 	%rd2, [_some_kernel_param_1];
	mov.u32 	%r1, %tid.x;
	// begin inline asm
	@%p1 ld.global.b32 { %r2 }, [ %rd1 + 0 ];
	// end inline asm
	mad.wide.s32 	%rd3, %r2, 4, %rd2;
BODY	// begin inline asm
	griddepcontrol.wait;
	// end inline asm
	ld.global.b32 	%r9, [%rd2];
	ret;
}
"""


@pytest.mark.parametrize(
    ("body", "early", "wanted"),
    [
        ("", 1, ["slots"]),
        ("	ld.global.v2.b32 	{%r3, %r4}, [%rd3+8];\n", 2, ["slots", "rows"]),
        ("	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd3 + 0 ], 0x10;\n", 2, ["slots", "rows"]),
        ("	@!%p2 st.global.b32 	[%rd3], %r2;\n", 2, ["slots", "rows ="]),
        ("	mov.b64 	{%r4, %r5}, %rd3;\n	ld.global.b32 	%r6, [%r5];\n", 2, ["slots", "rows"]),
        ("	ld.global.b32 	%r6, [%rd7];\n", 2, ["slots", "(unknown)"]),
        ("	@%p2 bra 	$L__BB0_2;\n", 1, ["slots", "(branch)"]),
        ("", 2, ["slots", "(machine code)"]),
    ],
)
def test_what_is_touched_early_is_named(body: str, early: int, wanted: list[str]) -> None:
    sass = "LDG.E R2, desc[UR4][R2.64] ;\n" * early + "ACQBULK ;\nLDG.E R9, desc[UR4][R4.64] ;\nEXIT ;\n"
    assert before_waiting(PTX.replace("BODY", body), sass, ("slots", "rows")) == wanted
    assert before_waiting(PTX.replace("wait", "launch_dependents"), sass, ("slots",)) == ["(never waits)"]


def test_every_kernel_compiles_for_sm90() -> None:
    """One variant of each for tensors of the same types. Triton caches what did not change."""
    sources = Path(triton_kernels.__file__).parent.glob("*.py")
    source = "\n".join(path.read_text() for path in sources)
    written = set(re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE))
    assert {kernel["name"] for kernel in compiled(FOLDER / "triton", "--once")} == written


@pytest.mark.slow
def test_all_programs_of_the_experts_run_at_once(tmp_path: Path) -> None:
    """A program loops over tiles: one that starts when another has ended would run for as long again."""
    for kernel in compiled(tmp_path, "grouped"):
        threads, registers = 32 * kernel["warps"], -(-kernel["registers"] // 8) * 8
        by_shared = SHARED_OF_ALL // (kernel["shared"] + SHARED_PER_BLOCK)
        assert kernel["grid"][0] <= 132 * min(by_shared, (1 << 16) // (registers * threads)), kernel


@pytest.mark.slow
@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_every_variant_compiles_for_sm90(part: str, tmp_path: Path) -> None:
    compiled(tmp_path, part)


def compiled(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """The kernels: each fits a multiprocessor, none spills registers that is meant to be fast, and none reads
    early what the kernels ahead may still write.
    """
    settings = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton.shapes", *arguments],
        env=os.environ | settings, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT, kernel
        assert kernel["stack"] <= SPILL or kernel["part"] == "small_float32", kernel
        assert set(kernel["early"]) <= READ_EARLY.get(kernel["name"], set()), kernel
        assert kernel["registers"] * 32 * kernel["warps"] <= 1 << 16, kernel
    return kernels
