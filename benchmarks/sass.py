#!/usr/bin/env python3
"""Computes from the machine code of the CUDA kernels what limits each of them, without a GPU.

Compiles every ``csrc/cuda/*.cu`` and reads the instructions (SASS) and the registers of each kernel. For the kernels of
``CASES`` it follows the path of a complete, aligned block of 4096 elements and counts the instructions, the
double-precision instructions and the global loads and stores. With the rates of a GPU they give the shortest times of
memory, instruction issue and double precision; the longest of them is the limit. Latencies, caches and conflicts are
ignored. Nothing is measured.

It needs nvcc, cuobjdump and nvdisasm: a CUDA toolkit, or the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARE = 16  # elements of a thread in a block: csrc/cuda/storage.cuh
THREADS = 256
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(\S+?)(?:\s+(.*?))?\s*;")
USAGE = re.compile(r" Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True)
class Gpu:
    """Published rates of a GPU.

    Multiprocessors, boost clock and memory bandwidth are from NVIDIA's data sheets (T4; A100 80GB SXM; H100 SXM) and
    the whitepaper of the Ada architecture (RTX 4090). Double-precision operations and conversions between 32 and 64
    bits are per clock and multiprocessor, from the table of arithmetic throughput in the CUDA C++ Programming Guide.
    Each of the four schedulers of a multiprocessor issues one instruction of a warp per clock.
    """

    name: str
    arch: str  # of the code that is examined
    multiprocessors: int
    ghz: float
    gb_per_s: float
    doubles: int
    conversions: int
    max_threads: int  # of a multiprocessor

    def seconds(self, bytes_: float, instructions: float, doubles: float, conversions: float) -> dict[str, float]:
        """The shortest time of an element, in nanoseconds, for each resource."""
        clock = self.multiprocessors * self.ghz
        times = [doubles / self.doubles, conversions / self.conversions]
        fp64 = (
            sum(times) if self.doubles == self.conversions else max(times)
        )  # one unit does both where it is that slow
        return {
            "memory": bytes_ / self.gb_per_s,
            "issue": instructions / (4 * 32 * clock),
            "FP64": fp64 / clock,
        }


GPUS = (
    Gpu("T4", "sm_80", 40, 1.59, 320, 2, 2, 1024),
    Gpu("A100", "sm_80", 108, 1.41, 2039, 32, 16, 2048),
    Gpu("RTX 4090", "sm_80", 128, 2.52, 1008, 2, 2, 1536),
    Gpu("H100", "sm_90", 132, 1.98, 3350, 64, 16, 2048),
)

# For each case: the kernel, the bytes that an element must move between memory and GPU (from the headers of
# csrc/cuda/*.cu), and for noise_sums the number of rows. It has a kernel of its own for GPUs with slow doubles.
CASES: dict[str, tuple[str, float, int | None]] = {
    "sgd fp32": ("one_pass_kernel<Sgd<float, false, false>, NoMix, 32>", 20, None),
    "sgd bf16": ("one_pass_kernel<Sgd<__nv_bfloat16, false, false>, NoMix, 32>", 10, None),
    "sgd bf16, masters": ("one_pass_kernel<Sgd<__nv_bfloat16, true, false>, NoMix, 32>", 22, None),
    "sgd fp32, state of bf16": ("one_pass_kernel<Sgd<float, false, true>, NoMix, 32>", 16, None),
    "adamw fp32": ("one_pass_kernel<Adamw<float, false, false>, NoMix, 32>", 28, None),
    "adamw bf16": ("one_pass_kernel<Adamw<__nv_bfloat16, false, false>, NoMix, 32>", 22, None),
    "adamw fp32, states of bf16": ("one_pass_kernel<Adamw<float, false, true>, NoMix, 32>", 20, None),
    "lars fp32": ("two_pass_kernel<Lars<float, false, false>, NoMix, 32>", 20, None),
    "lars bf16": ("two_pass_kernel<Lars<__nv_bfloat16, false, false>, NoMix, 32>", 10, None),
    "lars fp32, state of bf16": ("two_pass_kernel<Lars<float, false, true>, NoMix, 32>", 16, None),
    "lamb fp32": ("two_pass_kernel<Lamb<float, false, false>, NoMix, 32>", 28, None),
    "lamb bf16": ("two_pass_kernel<Lamb<__nv_bfloat16, false, false>, NoMix, 32>", 22, None),
    "lamb fp32, states of bf16": ("two_pass_kernel<Lamb<float, false, true>, NoMix, 32>", 20, None),
    "mix fp32, 1 peer": ("mix_kernel<float, 8>", 12, None),
    "mix bf16, 1 peer": ("mix_kernel<__nv_bfloat16, 8>", 6, None),
    "mix_sgd fp32, 1 peer": ("one_pass_kernel<Sgd<float, false, false>, StepMix, 32>", 24, None),
    "mix_sgd bf16, 1 peer": ("one_pass_kernel<Sgd<__nv_bfloat16, false, false>, StepMix, 32>", 12, None),
    "mix_adamw fp32, 1 peer": ("one_pass_kernel<Adamw<float, false, false>, StepMix, 32>", 32, None),
    "mix_lars fp32, 1 peer": ("two_pass_kernel<Lars<float, false, false>, StepMix, 32>", 28, None),
    "mix_lamb fp32, 1 peer": ("two_pass_kernel<Lamb<float, false, false>, StepMix, 32>", 36, None),
    "average fp32, 2 rows": ("average_kernel<float, 16>", 16, None),
    "norms fp32": ("norms_kernel<float, 128>", 4, None),
    "norms bf16": ("norms_kernel<__nv_bfloat16, 128>", 2, None),
    "noise_sums fp32, 2 rows": ("gram_kernel<float, false, false, GramTable<128, 32>>", 8, 2),
    "noise_sums fp32, 2 rows, slow doubles": ("gram_kernel<float, false, true, GramTable<128, 32>>", 8, 2),
    "noise_sums bf16, 2 rows": ("gram_kernel<__nv_bfloat16, false, false, GramTable<128, 32>>", 4, 2),
    "noise_sums bf16, 2 rows, slow doubles": ("gram_kernel<__nv_bfloat16, false, true, GramTable<128, 32>>", 4, 2),
    "noise_sums fp32, 16 rows": ("gram_kernel<float, false, false, GramTable<128, 32>>", 64, 16),
    "noise_sums fp32, 16 rows, slow doubles": ("gram_kernel<float, false, true, GramTable<128, 32>>", 64, 16),
}


def launches(gpu: Gpu, case: str) -> bool:
    """Whether the GPU takes the kernel of this case: has_slow_doubles in csrc/cuda/noise.cu."""
    slow = gpu.doubles < 8
    return slow if case.endswith("slow doubles") else not (slow and f"{case}, slow doubles" in CASES)


@dataclass(frozen=True)
class Instruction:
    """One line of SASS. ``operation`` has its modifiers, as in ``LDG.E.128``."""

    address: int
    predicate: str | None
    operation: str
    operands: str

    def is_vector(self) -> bool:
        """Whether it loads or stores 16 bytes, or loads 8: four elements of a 16-bit tensor beside an fp32 one."""
        kind, *modifiers = self.operation.split(".")
        foreign = "STRONG" in modifiers and kind == "LDG"  # partial sums that other multiprocessors have written
        return kind in ("LDG", "STG") and not foreign and ("128" in modifiers or (kind == "LDG" and "64" in modifiers))

    def width(self) -> int:
        """Bytes of a load or store by one thread."""
        modifiers = self.operation.split(".")
        return next((size for name, size in (("128", 16), ("64", 8), ("U16", 2), ("U8", 1)) if name in modifiers), 4)

    def is_double(self) -> bool:
        """Whether the double-precision unit runs it."""
        return re.match(r"D(ADD|MUL|FMA|SETP|MNMX)\b", self.operation) is not None

    def is_conversion(self) -> bool:
        """Whether it converts from or to 64 bits."""
        return re.match(r"(F2F|I2F|F2I)\b.*64", self.operation) is not None


@dataclass
class Block:
    """Instructions that run one after the other, and the addresses of the blocks that can follow."""

    instructions: list[Instruction] = field(default_factory=list)
    next: list[int] = field(default_factory=list)

    def cost(self) -> int:
        """The number of instructions. A fused double operation counts 64, as on a GPU with few units for it.

        So where a kernel can add in double or in pairs of fp32 numbers, the path takes the pairs.
        """
        return sum(64 if one.operation.startswith("DFMA") else 1 for one in self.instructions)

    def is_wide(self) -> bool:
        """Whether it loads or stores vectors of elements; a single load of 8 bytes is a scalar."""
        widths = [one.width() for one in self.instructions if one.is_vector()]
        return 16 in widths or len(widths) > 1


@dataclass(frozen=True)
class Usage:
    """Registers of a thread, bytes of its stack (spilled registers), shared memory of a CUDA block."""

    registers: int
    stack: int
    shared: int

    def blocks(self, gpu: Gpu) -> int:
        """CUDA blocks of 256 threads that fit on a multiprocessor with its 65536 registers, allocated by eights."""
        registers = (self.registers + 7) // 8 * 8
        return min(65536 // (registers * THREADS), gpu.max_threads // THREADS)


def functions(sass: str) -> dict[str, list[Instruction]]:
    """The instructions of each kernel, by its mangled name."""
    found: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    for line in sass.splitlines():
        if "Function :" in line:
            body = found[line.split()[-1]] = []
        elif match := LINE.match(line):
            address, predicate, operation, operands = match.groups()
            body.append(Instruction(int(address, 16), predicate, operation, operands or ""))
    return found


def target(instruction: Instruction) -> int | None:
    match = re.search(r"\b0x([0-9a-f]+)$", instruction.operands)
    return int(match[1], 16) if match else None


def blocks_of(body: list[Instruction]) -> dict[int, Block]:
    """The basic blocks of a kernel, by the address of their first instruction. Calls return, so they end no block."""
    following = {one.address: after.address for one, after in itertools.pairwise(body)}
    ends: dict[int, list[int]] = {}
    rejoins: dict[str, int] = {}
    for one in body:
        kind, behind = one.operation.split(".")[0], following.get(one.address)
        straight = [] if behind is None else [behind]
        if kind == "BSSY":
            rejoins[one.operands.split(",")[0]] = target(one) or 0
        elif kind == "BSYNC":
            ends[one.address] = [rejoins[one.operands]] if one.operands in rejoins else straight
        elif kind == "BRA":
            is_conditional = one.predicate is not None or "P" in one.operands or "DIV" in one.operation
            jump = target(one)
            ends[one.address] = ([] if jump is None else [jump]) + (straight if is_conditional else [])
        elif kind in ("EXIT", "RET"):
            ends[one.address] = straight if one.predicate is not None else []
    starts = {body[0].address} | {address for after in ends.values() for address in after}
    starts |= {following[address] for address in ends if address in following}
    result: dict[int, Block] = {}
    current = Block()
    for one in body:
        if one.address in starts:
            current = result[one.address] = Block()
        current.instructions.append(one)
        if one.address in ends:
            current.next = ends[one.address]
        elif following.get(one.address) in starts:
            current.next = [following[one.address]]
    return result


def shortest(blocks: dict[int, Block], start: int, goals: Iterable[int]) -> list[int] | None:
    """The path from after ``start`` to the nearest goal, with the lowest ``cost``. The goal is included."""
    goals = set(goals)
    queue: list[tuple[int, list[int]]] = [(0, [])]
    seen: set[int] = set()
    while queue:
        cost, path = heapq.heappop(queue)
        here = path[-1] if path else start
        if path and here in goals:
            return path
        if path and here in seen:
            continue
        seen.update(path[-1:])
        for address in blocks[here].next:
            if address in blocks:
                heapq.heappush(queue, (cost + blocks[address].cost(), [*path, address]))
    return None


def cycle(blocks: dict[int, Block], stops: list[int]) -> list[int]:
    """A cycle through all stops, from each one to the nearest that is left."""
    path, left = stops[:1], set(stops[1:])
    while left:
        path += shortest(blocks, path[-1], left) or sys.exit("sass.py: a loop has no path through its vectors")
        left.discard(path[-1])
    return path + (shortest(blocks, path[-1], path[:1]) or [])[:-1]


def path_of_block(body: list[Instruction], rows: int | None = None) -> list[Instruction]:
    """The instructions of one thread for one complete block.

    They are the cycles through the basic blocks that load or store vectors: one cycle, or one for each pass of a kernel
    with two loops. ``rows``: of noise_sums, which reads tiles of two rows, and with each of them all later rows.
    """
    blocks = blocks_of(body)
    wide = [start for start, block in blocks.items() if block.is_wide()]
    path: list[int] = []
    if rows is not None:
        tiles = rows // 2
        path = cycle(blocks, wide[:1]) * tiles + cycle(blocks, wide[1:2]) * (tiles * (rows - 2) - tiles * (tiles - 1))
        wide = []
    while wide:
        first = wide[0]
        loop = [one for one in wide if one == first or is_loop(blocks, first, one)]
        path += cycle(blocks, loop)
        wide = [one for one in wide if one not in loop]
    return [one for start in path for one in blocks[start].instructions]


def is_loop(blocks: dict[int, Block], one: int, other: int) -> bool:
    """Whether there is a path to the other block, and one back."""
    return shortest(blocks, one, [other]) is not None and shortest(blocks, other, [one]) is not None


@dataclass(frozen=True)
class Counts:
    """Per element: instructions, double operations, conversions, bytes of global loads and stores."""

    instructions: float
    doubles: float
    conversions: float
    bytes: float


def counts_of(path: list[Instruction]) -> Counts:
    moved = sum(one.width() for one in path if one.is_vector())
    doubles, conversions = sum(map(Instruction.is_double, path)), sum(map(Instruction.is_conversion, path))
    return Counts(len(path) / SHARE, doubles / SHARE, conversions / SHARE, moved / SHARE)


def widths_of(path: list[Instruction], kind: str) -> str:
    """The widths in bytes of all loads (``LDG``) or stores (``STG``) of elements.

    A store of 8 bytes is one of elements where loads have this width too, else one of a sum in double precision.
    """
    loads = {one.width() for one in path if one.is_vector() and one.operation.startswith("LDG")}
    stores = {one.width() for one in path if one.operation.startswith("STG")} & (loads | {16})
    found = loads if kind == "LDG" else stores
    return "+".join(str(width) for width in sorted(found, reverse=True)) or "-"


def plain_name(mangled: str) -> str:
    """``kernel<arguments>``, without namespaces and parameters."""
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"ddpcore::|cuda::|\(anonymous namespace\)::|^void ", "", name).replace("> >", ">>")
    return re.sub(r"\(.*", "", name).replace("void ", "")


def program(name: str) -> str:
    """The path of a tool, from PATH or beside this Python's packages."""
    beside = Path(sys.prefix) / "lib"
    found = shutil.which(name) or next(
        (str(path) for path in beside.glob(f"python*/site-packages/nvidia/*/bin/{name}")), None
    )
    if found is None:
        sys.exit(f"sass.py: {name} is missing: install a CUDA toolkit, or the packages that its docstring names")
    return found


def read(arch: str, folder: Path) -> dict[str, tuple[list[Instruction], Usage]]:
    """Every kernel of csrc/cuda, compiled for ``arch``."""
    cuobjdump = program("cuobjdump")
    result = {}
    for source in sorted((ROOT / "csrc/cuda").glob("*.cu")):
        cubin = folder / f"{source.stem}.{arch}.cubin"
        flags = ["-std=c++20", "-O3", "-fmad=false", f"-arch={arch}", "-cubin"]
        subprocess.run([program("nvcc"), *flags, "-o", str(cubin), str(source)], check=True)
        dumps = [
            subprocess.run([cuobjdump, flag, str(cubin)], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-sass", "--dump-resource-usage")
        ]
        usages = {name: Usage(*map(int, numbers)) for name, *numbers in USAGE.findall(dumps[1])}
        for name, body in functions(dumps[0]).items():
            result[plain_name(name)] = (body, usages[name])
    return result


def limits(gpu: Gpu, case_bytes: float, counts: Counts) -> str:
    """The limit, and the share of the memory bandwidth that it leaves."""
    times = gpu.seconds(case_bytes, counts.instructions, counts.doubles, counts.conversions)
    name = max(times, key=lambda one: times[one])
    return name if name == "memory" else f"{name}, {100 * times['memory'] / times[name]:.0f} %"


def table(kernels: dict[str, dict[str, tuple[list[Instruction], Usage]]]) -> list[str]:
    """Markdown: a row for each case, with the counts of the first architecture."""
    first = next(iter(kernels))
    gpus = [gpu for gpu in GPUS if gpu.arch in kernels]
    head = ["kernel", "registers", "spilled", "blocks", "loads", "stores"]
    head += ["instructions", "doubles", "conversions", "bytes"]
    lines = [f"| {' | '.join(head + [gpu.name for gpu in gpus])} |", f"|{' --- |' * (len(head) + len(gpus))}"]
    for case, (name, case_bytes, rows) in CASES.items():
        body, usage = kernels[first][name]
        path = path_of_block(body, rows)
        counts = counts_of(path)
        blocks = "/".join(str(kernels[gpu.arch][name][1].blocks(gpu)) for gpu in gpus)
        cells = [case, f"{usage.registers}", f"{usage.stack}", blocks, widths_of(path, "LDG"), widths_of(path, "STG")]
        cells += [f"{counts.instructions:.0f}", f"{counts.doubles:.1f}", f"{counts.conversions:.1f}", f"{case_bytes:g}"]
        for gpu in gpus:
            counts = counts_of(path_of_block(kernels[gpu.arch][name][0], rows))
            cells.append(limits(gpu, case_bytes, counts) if launches(gpu, case) else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def every_kernel(kernels: dict[str, tuple[list[Instruction], Usage]]) -> list[str]:
    """A line for each kernel: registers, stack, and its global accesses by width in bytes."""
    lines = []
    for name, (body, usage) in kernels.items():
        loads, stores = ({one.width() for one in body if one.operation.startswith(kind)} for kind in ("LDG", "STG"))
        widths = [",".join(map(str, sorted(sizes))) or "-" for sizes in (loads, stores)]
        lines.append(f"{name:64} {usage.registers:4} {usage.stack:4}  loads {widths[0]:10} stores {widths[1]}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"], help="architectures to compile for")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kernels = {arch: read(arch, Path(folder)) for arch in options.arch}
    for arch, found in kernels.items():
        print(f"{arch}: kernel, registers, stack, widths in bytes", *every_kernel(found), "", sep="\n")
    print(*table(kernels), sep="\n")


if __name__ == "__main__":
    main()
