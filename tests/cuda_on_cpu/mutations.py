#!/usr/bin/env python3
"""Breaks the CUDA kernels on purpose, one line at a time, and demands that a test of the stand-in goes red each time.

Works on a copy of the tree: ``tests/cuda_on_cpu/mutations.py [words]``, where a mutation runs if its name contains each
of the words. Exits with 1 where one survives, or where a test is red without any.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (1, 2, 3)  # those of CMakeLists.txt


class Mutation(NamedTuple):
    """``new`` in place of the only ``old`` in a file of csrc/cuda, and the test that must see it."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation("no barrier in BlockSum", "sum.cuh", "        __syncthreads();\n", "", "Mix"),
    Mutation("one set of slots in BlockSum", "sum.cuh", "        parity_ ^= 1;\n", "", "Mix"),
    Mutation("no barrier after the tile is read", "mix.cu",
             "            __syncthreads();\n            mix_tile(", "            mix_tile(", "MixStacked"),
    Mutation("no barrier after the mean", "mix.cu",
             "    __syncthreads();\n    for (int start", "    for (int start", "MixStacked"),
    Mutation("no barrier after a tile", "mix.cu",
             "            __syncthreads();\n        }\n        for (int j", "        }\n        for (int j",
             "MixStacked"),
    Mutation("no barrier after a block", "mix.cu", "        __syncthreads();\n    }\n}\n", "    }\n}\n", "MixStacked"),
    Mutation("half of a block at the barrier", "sum.cuh",
             "        __syncthreads();\n", "        if (threadIdx.x < threads / 2) __syncthreads();\n", "Mix"),
    Mutation("half of a warp at the shuffle", "sum.cuh",
             "        value = warp_sum(value);\n", "        if (lane < 16) value = warp_sum(value);\n", "Mix"),
    Mutation("shuffle offset", "sum.cuh", "int offset = width / 2;", "int offset = width / 4;", "SegmentNorms"),
    Mutation("place_of, one off", "storage.cuh",
             "* kVector<T> + i % kVector<T>;", "* kVector<T> + i % kVector<T> + 1;", "SgdStep"),
    Mutation("place_of, order of a share", "storage.cuh",
             "* kVector<T> + i % kVector<T>;", "* kVector<T> + (i ^ 1) % kVector<T>;", "SegmentNorms"),
    Mutation("vector index of a read", "storage.cuh",
             "share.vectors[i].bits = source[i * kThreads];", "share.vectors[i].bits = source[i];", "SgdStep"),
    Mutation("no tail guard of a read", "storage.cuh",
             "share[i] = place < numel ? block[place] : store<T>(0.0f);", "share[i] = block[place];", "SgdStep"),
    Mutation("no tail guard of a write", "storage.cuh",
             "if (place < numel) block[place] = share[i];", "block[place] = share[i];", "SgdStep"),
    Mutation("tail guard, one off", "mix.cu",
             "inside = index < num_vectors && column + e < table.numel",
             "inside = index < num_vectors && column + e <= table.numel", "MixStacked"),
    Mutation("alignment is not asked for", "sgd.cu",
             "numel == kBlock && is_aligned(param) && is_aligned(grad) && is_aligned(momentum)", "numel == kBlock",
             "SgdStep"),
    Mutation("a segment's first block", "sgd.cu",
             "(block - segment.first_block) * kBlock", "(block - table.begin_block) * kBlock", "SgdStep"),
    Mutation("a chunk's first segment", "segments.cuh",
             "table.first_segment = first;", "table.first_segment = 0;", "SegmentNorms"),
    Mutation("stride of sum_rows", "sum.cuh", "values[mine * stride]", "values[mine]", "Mix"),
    Mutation("turns of a block", "sgd.cu", "block += gridDim.x", "block += gridDim.x + 1", "SgdStep"),
    Mutation("shared memory, too little", "mix.cu",
             "return sums_bytes() + tile_bytes() +", "return tile_bytes() +", "MixStacked"),
]  # fmt: skip


def run(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """The finished command, its output in stdout; never raises for a failure."""
    return subprocess.run(
        command, env={**os.environ, **more}, text=True, errors="replace", stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def copy_tree(target: Path) -> Path:
    """What a build of the stand-in needs; returns its build folder, configured."""
    for name in ("csrc", "tests/cpp", "tests/cuda_on_cpu"):
        shutil.copytree(ROOT / name, target / name)
    shutil.copy(ROOT / "CMakeLists.txt", target)
    flags = target / "tests/cuda_on_cpu/CMakeLists.txt"
    flags.write_text(flags.read_text().replace(" -Werror", ""))  # what is left of a broken line may be unused
    build = target / "build"
    configured = run(["cmake", "-S", str(target), "-B", str(build), "-DDDPCORE_CUDA=OFF"])
    if configured.returncode != 0:
        sys.exit(configured.stdout)
    return build


def compile_tests(build: Path) -> Path:
    """The test program of the stand-in, made anew; ends the script where it does not compile."""
    done = run(["cmake", "--build", str(build), "--target", "test_cuda_kernels_on_cpu", "-j", str(os.cpu_count())])
    if done.returncode != 0:
        sys.exit(done.stdout)
    return build / "tests/cuda_on_cpu/test_cuda_kernels_on_cpu"


def first_red(program: Path, test: str, seeds: tuple[int, ...] = SEEDS) -> tuple[int, str] | None:
    """The first seed under which the test fails and the line that says why; None where it passes under all."""
    for seed in seeds:
        done = run([str(program), f"--gtest_filter=CudaTest/*.{test}", "--gtest_fail_fast"], CUDA_ON_CPU_SEED=str(seed))
        if done.returncode != 0:
            lines = done.stdout.splitlines()
            for mark in ("AddressSanitizer:", "runtime error:", "cuda_on_cpu: ", "Failure"):
                for number, line in enumerate(lines):
                    if mark in line:
                        return seed, (lines[number + 1] if mark == "Failure" else line[line.index(mark) :]).strip()
            return seed, lines[-1] if lines else "no output"
    return None


def try_mutation(mutation: Mutation, tree: Path, build: Path) -> tuple[int, str] | None:
    """What first_red says of the mutated tree; the tree is whole again afterwards."""
    path = tree / "csrc/cuda" / mutation.file
    whole = path.read_text()
    if whole.count(mutation.old) != 1:
        sys.exit(f"{mutation.name}: {mutation.file} has {whole.count(mutation.old)} places like\n{mutation.old}")
    path.write_text(whole.replace(mutation.old, mutation.new))
    try:
        return first_red(compile_tests(build), mutation.test)
    finally:
        path.write_text(whole)


def main(words: list[str]) -> int:
    """The table, a line a mutation, and the exit status."""
    chosen = [mutation for mutation in MUTATIONS if all(word in mutation.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        build = copy_tree(tree)
        program = compile_tests(build)
        for test in sorted({mutation.test for mutation in chosen}):
            if (red := first_red(program, test, SEEDS[:1])) is not None:
                sys.exit(f"{test} is red without a mutation, seed {red[0]}: {red[1]}")
        survivors = 0
        print(f"{'mutation':36}{'file':14}{'test':14}{'seed':>5}{'s':>5}  seen as", flush=True)
        for mutation in chosen:
            start = time.monotonic()
            red = try_mutation(mutation, tree, build)
            survivors += red is None
            seed, why = red if red is not None else ("-", "SURVIVES")
            seconds = time.monotonic() - start
            print(
                f"{mutation.name:36}{mutation.file:14}{mutation.test:14}{seed:>5}{seconds:5.0f}  {why[:90]}", flush=True
            )
    print(f"{len(chosen) - survivors} of {len(chosen)} seen")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
