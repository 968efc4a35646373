"""``benchmarks/sass.py``: paths and counts of a small kernel, and the limit that follows from them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

_spec = importlib.util.spec_from_file_location("sass", ROOT / "benchmarks" / "sass.py")
sass = importlib.util.module_from_spec(_spec)
sys.modules["sass"] = sass  # in which its dataclasses look up their annotations
_spec.loader.exec_module(sass)

# Of cuobjdump, shortened: a loop over blocks with a path for aligned blocks (0x30) and one for the others (0x90).
DUMP = """
	code for sm_80
		Function : _ZN7ddpcore4cuda10sum_kernelIfLi32EEEvPf
	.headerflags	@"EF_CUDA_SM80 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM80)"
        /*0000*/                   S2R R3, SR_CTAID.X ;                    /* 0x0000000000037919 */
                                                                           /* 0x000e220000002500 */
        /*0010*/                   ISETP.NE.AND P0, PT, RZ, UR5, PT ;      /* 0x00000005ff007c0c */
        /*0020*/              @!P0 BRA 0x90 ;                              /* 0x0000006000008947 */
        /*0030*/                   LDG.E.128 R8, [R14.64] ;
        /*0040*/                   F2F.F64.F32 R20, R8 ;
        /*0050*/                   DFMA R20, R20, R20, RZ ;
        /*0060*/                   STG.E.EF.128 [R14.64], R8 ;
        /*0070*/                   BSSY B0, 0xd0 ;
        /*0080*/                   BRA 0xc0 ;
        /*0090*/                   LDG.E R8, [R14.64] ;
        /*00a0*/                   STG.E [R14.64], R8 ;
        /*00b0*/                   BRA 0xd0 ;
        /*00c0*/                   BSYNC B0 ;
        /*00d0*/                   IADD3 R3, R3, c[0x0][0xc], RZ ;
        /*00e0*/              @!P1 BRA 0x10 ;
        /*00f0*/                   LDG.E.64.STRONG.GPU R2, [R4.64] ;
        /*0100*/                   EXIT ;
        /*0110*/                   BRA 0x110;
		..........
"""
USAGE = """
 Function _ZN7ddpcore4cuda10sum_kernelIfLi32EEEvPf:
  REG:79 STACK:8 SHARED:128 LOCAL:0 CONSTANT[0]:608 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
NAME = "_ZN7ddpcore4cuda10sum_kernelIfLi32EEEvPf"


@pytest.fixture
def body() -> list[Any]:
    return sass.functions(DUMP)[NAME]


def test_lines_of_a_dump(body: list[Any]) -> None:
    assert len(body) == 18
    assert body[2] == sass.Instruction(0x20, "!P0", "BRA", "0x90")
    assert [one.width() for one in body if one.operation.startswith(("LDG", "STG"))] == [16, 16, 4, 4, 8]
    assert [one.address for one in body if one.is_vector()] == [0x30, 0x60]


def test_the_path_of_a_complete_block(body: list[Any]) -> None:
    """Once round the loop, by way of the vectors. It ends at 0xe0, behind which the kernel returns."""
    path = [one.address for one in sass.path_of_block(body)]
    assert path == [0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0xC0, 0xD0, 0xE0, 0x10, 0x20]
    counts = sass.counts_of(sass.path_of_block(body))
    assert counts == sass.Counts(11 / 16, 1 / 16, 1 / 16, 2.0)


def test_two_loops_are_two_cycles(body: list[Any]) -> None:
    again = [
        sass.Instruction(one.address + 0x1000, one.predicate, one.operation, one.operands.replace("0x", "0x10"))
        for one in body
    ]
    both = [one for one in body if one.operation != "EXIT"][:-1] + again
    assert len(sass.path_of_block(both)) == 2 * len(sass.path_of_block(body))


def test_the_path_takes_the_branch_with_fewer_double_instructions() -> None:
    """Pairs of fp32 numbers take more instructions than double precision, and less time where doubles are slow."""
    lines = [
        (None, "LDG.E.128", "R8, [R14.64]"),
        ("P0", "BRA", "0x50"),
        (None, "F2F.F64.F32", "R20, R8"),
        (None, "DFMA", "R20, R20, R20, RZ"),
        (None, "BRA", "0x80"),
        (None, "FMUL", "R9, R8, R8"),
        (None, "FADD", "R9, R9, R9"),
        (None, "FADD", "R9, R9, R9"),
        ("P1", "BRA", "0x0"),
        (None, "EXIT", ""),
    ]
    body = [sass.Instruction(16 * index, *line) for index, line in enumerate(lines)]
    path = sass.path_of_block(body)
    assert [one.operation for one in path] == ["LDG.E.128", "BRA", "FMUL", "FADD", "FADD", "BRA"]
    assert sass.widths_of(path, "LDG") == "16"
    assert sass.widths_of(path, "STG") == "-"


def test_widths_of_stores_are_those_of_elements() -> None:
    """A store of 8 bytes holds elements beside loads of 8 bytes, and else a sum in double precision."""
    load, short, store, total = (
        sass.Instruction(0, None, name, "") for name in ("LDG.E.128", "LDG.E.64", "STG.E.128", "STG.E.64")
    )
    assert sass.widths_of([load, short, store, total], "STG") == "16+8"
    assert sass.widths_of([load, store, total], "STG") == "16"
    assert sass.widths_of([load, short, store, total], "LDG") == "16+8"


def test_gpus_with_slow_doubles_take_other_kernels_of_noise_sums() -> None:
    taken = {gpu.name: [case for case in sass.CASES if sass.launches(gpu, case)] for gpu in sass.GPUS}
    assert all("sgd fp32" in cases for cases in taken.values())
    assert [name for name, cases in taken.items() if "noise_sums bf16, 2 rows, slow doubles" in cases] == [
        "T4",
        "RTX 4090",
    ]
    assert [name for name, cases in taken.items() if "noise_sums bf16, 2 rows" in cases] == ["A100", "H100"]


def test_a_kernel_without_vectors_has_no_path(body: list[Any]) -> None:
    assert sass.path_of_block([one for one in body if not one.is_vector()]) == []


def test_registers_and_the_blocks_that_they_leave_room_for() -> None:
    ((name, *numbers),) = sass.USAGE.findall(USAGE)
    usage = sass.Usage(*map(int, numbers))
    assert (name, usage) == (NAME, sass.Usage(79, 8, 128))
    assert usage.blocks(sass.GPUS[1]) == 3
    assert sass.Usage(32, 0, 0).blocks(sass.GPUS[0]) == 4, "of threads a T4 holds half as many"


@pytest.mark.parametrize(
    ("instructions", "doubles", "expected"), [(10, 0.0, "memory"), (10, 3.0, "FP64, 21 %"), (1000, 0.0, "issue, 2 %")]
)
def test_the_limit(instructions: float, doubles: float, expected: str) -> None:
    """A GPU of 100 G instructions, 4 G doubles and 100 GB a second, about; an element of 16 bytes."""
    gpu = sass.Gpu("G", "sm_80", 1, 100 / 128, 100, 5, 5, 2048)
    assert sass.limits(gpu, 16, sass.Counts(instructions, doubles, 0.0, 16)) == expected


def test_names() -> None:
    assert sass.plain_name(NAME) == "sum_kernel<float, 32>"


def test_kernels_that_are_looked_up_have_the_parameters_of_the_sources() -> None:
    """A name that the compiled code lacks would be noticed only where there is a compiler."""
    sources = "".join(path.read_text() for path in sorted((ROOT / "csrc/cuda").glob("*.cu*")))
    rules = {
        name: parameters.count(",") + 1
        for parameters, name in re.findall(r"template <([^<>]*)>\nstruct (\w+) {", sources)
    }
    seen = set()
    for name, _, _ in sass.CASES.values():
        for rule, arguments in re.findall(r"(Sgd|Adamw|Lars|Lamb)<([^<>]*)>", name):
            seen.add(rule)
            assert arguments.count(",") + 1 == rules[rule], name
    assert seen == {"Sgd", "Adamw", "Lars", "Lamb"}
