#!/usr/bin/env python3
"""Changes one line of the CUDA kernels at a time and requires that a test of the CPU replacement fails each time.

Usage: ``tests/cuda_on_cpu/mutations.py [words]``. It works on a copy of the tree. A mutation runs if its name contains
all words. The exit code is 1 if no test fails for a mutation, or if a test fails without one.
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
SEEDS = (1, 2, 3)  # orders of threads and blocks
SLOW_DOUBLES = 2  # the seed with which the device has slow doubles


class Mutation(NamedTuple):
    """Replaces ``old``, which must occur once, by ``new`` in a file of csrc/cuda. ``program:test`` must then fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation("no barrier in BlockSum", "sum.cuh",
             "        __syncthreads();\n        Value total", "        Value total", "kernels:Mix"),
    Mutation("one set of slots in BlockSum", "sum.cuh",
             "        parity_ ^= 1;\n        return", "        return", "kernels:Mix"),
    Mutation("no barrier in BlockSums", "sum.cuh",
             "        __syncthreads();\n        for (int k", "        for (int k", "exact:Noise*"),
    Mutation("one set of slots in BlockSums", "sum.cuh", "        parity_ ^= 1;\n    }", "    }", "exact:Noise*"),
    Mutation("no barrier after the tile is read", "mix.cu",
             "            __syncthreads();\n            mix_tile(", "            mix_tile(", "kernels:MixStacked"),
    Mutation("no barrier after the mean", "mix.cu",
             "    __syncthreads();\n    for (int start", "    for (int start", "kernels:MixStacked"),
    Mutation("no barrier after a tile", "mix.cu",
             "            __syncthreads();\n        }\n        for (int j", "        }\n        for (int j",
             "kernels:MixStacked"),
    Mutation("no barrier after a block", "mix.cu",
             "        __syncthreads();\n    }\n}\n", "    }\n}\n", "kernels:MixStacked"),
    Mutation("half of a block at the barrier", "sum.cuh",
             "        __syncthreads();\n        Value total",
             "        if (threadIdx.x < threads / 2) __syncthreads();\n        Value total", "kernels:Mix"),
    Mutation("half of a warp at the shuffle", "sum.cuh",
             "        value = warp_sum(value);\n", "        if (lane < 16) value = warp_sum(value);\n", "kernels:Mix"),
    Mutation("shuffle offset", "sum.cuh", "int offset = width / 2;", "int offset = width / 4;", "kernels:SegmentNorms"),
    Mutation("place_of, one off", "storage.cuh", "* width + i % width;", "* width + i % width + 1;", "kernels:Mix"),
    Mutation("place_of, order of a share", "storage.cuh",
             "* width + i % width;", "* width + (i ^ 1) % width;", "kernels:SegmentNorms"),
    Mutation("vector index of a read", "storage.cuh",
             "share.vectors[i].bits = again == Again::kYes ? source[i * kThreads] :",
             "share.vectors[i].bits = again == Again::kYes ? source[i] :", "kernels:Mix"),
    Mutation("no tail guard of a read", "storage.cuh",
             "share[i] = i < count ? block[place_of<width>(i)] : store<T>(0.0f);",
             "share[i] = block[place_of<width>(i)];", "kernels:Mix"),
    Mutation("no tail guard of a write", "storage.cuh",
             "if (i < count) block[place_of<width>(i)] = share[i];", "block[place_of<width>(i)] = share[i];",
             "kernels:Mix"),
    Mutation("a stale master counts", "storage.cuh",
             "return own == stored ? master : load(param);", "return master;", "optimizers:StaleMasters"),
    Mutation("tail guard, one off", "mix.cu",
             "inside = index < num_vectors && column + e < table.numel",
             "inside = index < num_vectors && column + e <= table.numel", "kernels:MixStacked"),
    Mutation("no tail guard of a row of others", "mix.cu",
             "column + e < table.numel ? source[e] : store<T>(0.0f);", "source[e];", "kernels:MixStacked"),
    Mutation("a row of others, one off", "mix.cu",
             "read_other(table, row - table.num_learners,", "read_other(table, row - 1,", "kernels:MixStacked"),
    Mutation("alignment of others is not asked for", "mix.cu",
             " &&\n                    std::all_of(args.others, args.others + args.num_others, is_aligned);", ";",
             "kernels:MixStacked"),
    Mutation("alignment is not asked for", "sgd.cuh",
             "numel == kBlock && is_aligned(param) && is_aligned(master) && is_aligned(grad) && is_aligned(momentum)",
             "numel == kBlock", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("a segment's first block", "one_pass.cuh",
             "(block - segment.first_block) * kBlock", "(block - list.begin_block) * kBlock",
             "optimizers:EverySettingSizeAndAlignment"),
    Mutation("a chunk's first segment", "segments.cuh",
             "table.first_segment = first;", "table.first_segment = 0;", "kernels:SegmentNorms"),
    Mutation("stride of sum_rows", "sum.cuh", "values[mine * stride]", "values[mine]", "kernels:Mix"),
    Mutation("turns of sum_rows", "sum.cuh",
             "row += kUnroll * threads", "row += threads", "kernels:TotalOfManyBlocks"),
    Mutation("one turn of sum_rows", "sum.cuh",
             "row < num_rows; row += kUnroll * threads", "row < threads; row += kUnroll * threads",
             "kernels:TotalOfManyBlocks"),
    Mutation("rows of a total", "norms.cu",
             "args.sums, args.num_blocks, 1, stream", "args.sums, args.num_segments, 1, stream",
             "kernels:SegmentNorms"),
    Mutation("a row of noise sums, one off", "noise.cu",
             "min(row + a, table.num_rows - 1)]", "max(row + a - 1, 0)]", "exact:Noise*"),
    Mutation("pairs of a tile only", "noise.cu",
             "int row = tile + kTile; row < num_rows;", "int row = tile + 2 * kTile; row < num_rows;",
             "exact:Noise*"),
    Mutation("alignment of a segment is not asked for", "noise.cu",
             " && segment.first % kVector<T> == 0;", ";", "exact:Noise*"),
    Mutation("alignment of the origin is not asked for", "noise.cu", "is_aligned(args.origin) && ", "", "exact:Noise*"),
    Mutation("segments of a later launch", "noise.cu",
             "(table.list.first_segment + index) * num_rows", "index * num_rows", "exact:NoiseOfMany*"),
    Mutation("pairs of small numbers", "noise.cu",
             "largest >= 0x1p-48f", "largest >= 0x1p-60f", "exact:NoiseOfEveryMagnitude"),
    Mutation("pairs of large numbers", "noise.cu",
             "largest <= 0x1p60f", "largest <= 0x1p64f", "exact:NoiseOfEveryMagnitude"),
    Mutation("pairs without what a product rounds away", "noise.cu",
             "tail += rounded + fmaf(left, right, -product);", "tail += rounded;", "exact:NoiseOfEverySize*"),
    Mutation("pairs without what a sum rounds away", "noise.cu",
             "tail += rounded + fmaf(left, right, -product);", "tail += fmaf(left, right, -product);",
             "exact:NoiseOfEverySize*"),
    Mutation("pairs without a tail", "noise.cu",
             "static_cast<double>(head) + static_cast<double>(tail)", "static_cast<double>(head)",
             "exact:NoiseOfEverySize*"),
    Mutation("pairs of which one fits", "noise.cu",
             "left.fits && right.fits ?", "left.fits ?", "exact:NoiseOfEveryMagnitude"),
    Mutation("pairs only if all rows of a tile fit", "noise.cu",
             "double pairs[kPairs];", "own[0].fits = own[1].fits = own[0].fits && own[1].fits; double pairs[kPairs];",
             "exact:NoiseOfARow*"),
    Mutation("halves of two sums of a warp exchanged in pairs", "sum.cuh",
             "low ? right : left, kWarp", "low ? left : right, kWarp", "exact:NoiseOfEveryMagnitude"),
    Mutation("an odd sum of a block beside its pairs", "sum.cuh",
             "if (count % 2 == 1) {", "if (count % 2 == 2) {", "exact:NoiseOfEveryMagnitude"),
    Mutation("the origin is left out", "noise.cu", "values[i] -= load(origin[i]);", ";", "exact:Noise*"),
    Mutation("turns of a block", "one_pass.cuh",
             "block += static_cast<int>(gridDim.x),", "block += static_cast<int>(gridDim.x) + 1,",
             "optimizers:EverySettingSizeAndAlignment"),
    Mutation("shared memory, too little", "mix.cu",
             "return sums_bytes() + tile_bytes() +", "return tile_bytes() +", "kernels:MixStacked"),
    Mutation("no barrier after the groups' scales", "segments.cuh",
             "    }\n    __syncthreads();\n}", "    }\n}", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("scales of the first group only", "one_pass.cuh",
             "const int64_t group = segment.group - table.first_group;", "const int64_t group = 0;",
             "optimizers:GroupsOfWholeBlocks"),
    Mutation("scales of a group of another launch", "one_pass.cuh",
             "segment.group - table.first_group;", "segment.group % kMaxGroups;",
             "optimizers:ManyTinyTensorsInManyGroups"),
    Mutation("no barrier between phases", "two_pass.cuh",
             "            if (phase > batches_.begin_phase) cooperative_groups::this_grid().sync();\n", "",
             "optimizers:MoreThanTheCacheHolds"),
    Mutation("trust of another launch", "two_pass.cuh",
             "batches_.squares[row]) : batches_.trust[row]);", "batches_.squares[row]) : batches_.trust[index]);",
             "optimizers:ManyTinyTensorsInManyGroups"),
    Mutation("a ticket is not reset", "two_pass.cuh",
             "        *ticket = 0;\n", "", "optimizers:MoreThanTheCacheHolds"),
    Mutation("a ticket too few", "two_pass.cuh",
             "!= static_cast<unsigned long long>(num_blocks)) return",
             "+ 1 < static_cast<unsigned long long>(num_blocks)) return",
             "optimizers:MoreThanTheCacheHolds"),
    Mutation("stride of finish", "two_pass.cuh",
             "mine = row + i * kThreads;", "mine = row + i;", "optimizers:MoreThanTheCacheHolds"),
    Mutation("a first block without its second pass", "two_pass.cuh",
             "                if (at.whole) {\n",
             "                if (block == first_block) continue;\n                if (at.whole) {\n",
             "optimizers:MoreThanTheCacheHolds"),
    Mutation("empty segments are not visited", "two_pass.cuh",
             "        if (batches_.begin_phase == 0) visit_empty_segments();\n", "",
             "optimizers:NoSegmentsAndOnlyEmptyOnes"),
    Mutation("steps of a group counted twice", "segments.cuh",
             "static_cast<int32_t>(next_group - first_group);", "table.num_groups;",
             "optimizers:ManyTinyTensorsInManyGroups"),
    Mutation("a group not counted in the last launch", "segments.cuh",
             "static_cast<int32_t>(next_group - first_group);",
             "static_cast<int32_t>(next_group - first_group - (end == args.num_segments));",
             "optimizers:ManyTinyTensorsInManyGroups"),
    Mutation("steps counted by every block", "segments.cuh", " + 1 < gridDim.x) return;", " + 1 < 1) return;",
             "optimizers:MoreThanTheCacheHolds"),
    Mutation("the count of finished blocks is not reset", "segments.cuh",
             "    *table.finished = 0;\n", "", "optimizers:MoreThanTheCacheHolds"),
    Mutation("a step of one pass that is skipped is taken", "one_pass.cuh",
             "if (skips_step(table.scaling)) return false;", "", "optimizers:EveryScalingAndSkippedSteps"),
    Mutation("LARS and LAMB count a skipped step", "two_pass.cuh",
             "if (skips_step(table.scaling)) return;", "if (skips_step(table.scaling)) return count_steps(table);",
             "optimizers:EveryScalingAndSkippedSteps"),
    Mutation("the count of a launch that is not the last", "two_pass.cuh",
             "if (batches.end_phase > batches.num_batches) count_steps", "count_steps",
             "optimizers:WithoutCooperativeLaunch"),
    Mutation("tail guard of AdamW, one off", "adamw.cu",
             "if (i >= at.numel) break;", "if (i > at.numel) break;", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("elements ahead of AdamW, one too few", "adamw.cu",
             "first += kAhead * kThreads", "first += (kAhead + 1) * kThreads",
             "optimizers:EverySettingSizeAndAlignment"),
    Mutation("alignment of the moments is not asked for", "adam.cuh",
             "is_aligned(grad) && is_aligned(exp_avg) &&\n              is_aligned(exp_avg_sq)", "is_aligned(grad)",
             "optimizers:EverySettingSizeAndAlignment"),
    Mutation("moments that are not written", "adamw.cu",
             "        write<true>(shares.exp_avg_sqs, at.exp_avg_sq, at.numel);\n", "", "exact:AdamwOfEvery*"),
    Mutation("no tail guard of an update", "lamb.cu",
             "if (first + k >= count) break;", "", "optimizers:LambWithoutEps"),
    Mutation("no tail guard of a norm", "lars.cu",
             "i < count; ++i", "i < kShare; ++i", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("tail guard of SGD, one off", "sgd.cuh",
             "if (i >= at.numel) break;", "if (i > at.numel) break;", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("tail guard of LAMB, one off", "lamb.cu",
             "if (i >= at.numel) break;", "if (i > at.numel) break;", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("every peer begins the mix anew", "mix.cuh", "k == 0 ? table.self", "k >= 0 ? table.self", "kernels:Mix"),
    Mutation("no peer, no mix", "mix.cuh", "if (table.num_peers == 0) {", "if (table.num_peers < 0) {", "kernels:Mix"),
    Mutation("noise of every block from the first element", "mix.cuh",
             "noise.first + first + place_of", "noise.first + place_of", "kernels:Noise"),
    Mutation("a step mixes from its first element", "mix.cuh",
             "return at.param - static_cast<const T*>(weights);", "return 0;", "optimizers:MixAndStep"),
    Mutation("a step's mix reads where it writes", "mix.cuh",
             "return static_cast<const T*>(source) + first_of<T>(at);", "return at.param;", "optimizers:MixAndStep"),
    Mutation("alignment of a step's mix is not asked for", "one_pass.cuh", "at.whole && mix.aligned", "at.whole",
             "optimizers:MixAndStep"),
    Mutation("alignment of a first pass's mix is not asked for", "two_pass.cuh",
             "at.whole && mix_.aligned", "at.whole", "optimizers:MixAndStep"),
    Mutation("no barrier after the mix of a block", "mix.cuh",
             "        __syncthreads();  // the step of the block", "        // the step of the block",
             "optimizers:MixAndStep"),
    Mutation("LARS does not keep the mixed weights", "lars.cu",
             "if constexpr (!std::is_same_v<Mix, NoMix>) write(", "if constexpr (false) write(",
             "optimizers:MixAndStep"),
    Mutation("LAMB does not keep the mixed weights", "lamb.cu",
             "if constexpr (!std::is_same_v<Mix, NoMix>) write(", "if constexpr (false) write(",
             "optimizers:MixAndStep"),
    Mutation("noise within one four alone", "mix.cuh",
             "    if (index % 4 != 0) next = four_normals(noise.seed, noise.step, index / 4 + 1);\n", "",
             "kernels:Noise"),
    Mutation("noise not shifted by two", "mix.cuh",
             "(index & 2) != 0 ? both[k + 2] : both[k]", "both[k]", "kernels:Noise"),
    Mutation("norm of one element of a share", "lars.cu",
             "load(grads[i]));", "load(grads[0]));", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("turns of finish", "two_pass.cuh",
             "row < num_blocks; row += kUnroll * kThreads", "row < num_blocks; row += kThreads",
             "exact:TrustOfATensorOfManyBlocks"),
    Mutation("one turn of finish", "two_pass.cuh",
             "row < num_blocks; row +=", "row < kThreads; row +=", "exact:TrustOfATensorOfManyBlocks"),
    Mutation("finish adds a row for each thread", "two_pass.cuh",
             "if (mine >= num_blocks) continue;", "if (mine >= min(num_blocks, kThreads)) continue;",
             "exact:TrustOfATensorOfManyBlocks"),
    Mutation("a launch that does nothing", "one_pass.cuh",
             "if (num_blocks == 0 && table.finished == nullptr) return cudaSuccess;", "",
             "graphs:AStepOfNothingIsOneLaunchIfItIsCounted"),
    Mutation("no cooperative launch", "two_pass.cuh",
             "    if (cooperative != 0 && passes", "    if (cooperative < 0 && passes", "graphs:AStepOfLeNet5*"),
    Mutation("a middle table, one off", "segments.cuh",
             "end - first <= kSomeSegments", "end - first <= kSomeSegments + 1", "optimizers:TensorsOfEveryTable"),
    Mutation("elements ahead, one too few", "sgd.cuh",
             "first += kAhead * kThreads", "first += (kAhead + 1) * kThreads",
             "optimizers:EverySettingSizeAndAlignment"),
    Mutation("tables never full", "segments.cuh",
             "end - first < many && args", "end - first < kFewSegments && args",
             "graphs:AStepTakesOneLaunchForEachTable*"),
    Mutation("a launch on another stream", "launch.cuh",
             "config.stream = stream;", "config.stream = nullptr;", "graphs:ReplayedSteps*"),
    Mutation("a step that allocates", "two_pass.cuh",
             "    cudaError_t error = cudaGetDevice(&device);\n",
             "    cudaError_t error = cudaGetDevice(&device);\n"
             "    void* room = nullptr;\n    cudaMalloc(&room, 8);\n    cudaFree(room);\n",
             "graphs:ReplayedSteps*"),
    Mutation("arguments that count calls", "lamb.cu",
             "return two_passes<Lamb<T, Master, Rounded>>(args, args, args.rule, mix, stream);",
             "static int calls = 0;\n        LambRule rule = args.rule;\n        rule.beta1 -= 1e-3 * calls++;\n"
             "        return two_passes<Lamb<T, Master, Rounded>>(args, args, rule, mix, stream);",
             "graphs:ReplayedSteps*"),
    Mutation("no decay in R, on CPU and CUDA", "../math.h",
             "(grad_norm + decay * weight_norm + ", "(grad_norm + 0.0 * decay + ", "exact:LarsOfEvery*"),
    Mutation("words of a share, one draw for all", "states.cuh",
             "if (i % 4 == 0) four_ =", "if (i == 0) four_ =", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("words of a share in another order", "states.cuh",
             "return four_.words[i % 4];", "return four_.words[3 - i % 4];", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("words of every block from the first element", "adam.cuh",
             "segment.first_index + first : 0", "segment.first_index : 0", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("words of every block of momentum from the first element", "sgd.cuh",
             "segment.first_index + first : 0", "segment.first_index : 0", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("words of a misaligned block, one off", "sgd.cuh",
             "(key, at.index + i)", "(key, at.index + i + 1)", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("both moments by the same bits", "adam.cuh",
             "(State::kSecond, second, word)", "(State::kFirst, second, word)",
             "optimizers:EverySettingSizeAndAlignment"),
    Mutation("states rounded without the step", "states.cuh",
             "return {seed, step_of(group)};", "return {seed, 0};", "optimizers:EverySettingSizeAndAlignment"),
    Mutation("states rounded without the seed", "segments.cuh",
             "table.state_seed = args.state_seed;", "table.state_seed = 0;",
             "optimizers:EverySettingSizeAndAlignment"),
    Mutation("rounded states with a mix", "mix.cuh",
             "if (args.masters || args.mix != nullptr) return cudaErrorInvalidValue;", "",
             "optimizers:MixWithMastersOrRoundedStatesOrTooManyPeersIsAnError"),
]  # fmt: skip


def run(command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command with its output in stdout. A failure does not raise."""
    return subprocess.run(
        command, env={**os.environ, **more}, text=True, errors="replace", stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def copy_tree(target: Path) -> Path:
    """Copy the files of a build to ``target`` and configure it. Returns the build folder."""
    for name in ("csrc", "tests/cpp", "tests/cuda_on_cpu"):
        shutil.copytree(ROOT / name, target / name)
    shutil.copy(ROOT / "CMakeLists.txt", target)
    flags = target / "tests/cuda_on_cpu/CMakeLists.txt"
    # A mutation may leave unused variables. Without optimization a file compiles in half of the time.
    flags.write_text(flags.read_text().replace(" -Werror", "").replace("-Og", "-O0").replace("-g1", "-g0"))
    build = target / "build"
    configured = run(["cmake", "-S", str(target), "-B", str(build), "-DDDPCORE_CUDA=OFF"])
    if configured.returncode != 0:
        sys.exit(configured.stdout)
    return build


def compile_program(build: Path, test: str) -> Path:
    """Build the program of a ``program:test`` again. Ends the script if it does not compile."""
    name = f"test_cuda_{test.partition(':')[0]}_on_cpu"
    done = run(["cmake", "--build", str(build), "--target", name, "-j", str(os.cpu_count())])
    if done.returncode != 0:
        sys.exit(done.stdout)
    return build / "tests/cuda_on_cpu" / name


def first_red(program: Path, test: str, seeds: tuple[int, ...] = SEEDS) -> tuple[int, str] | None:
    """The first seed with which the test fails, and the line with the reason; None if it passes with all seeds."""
    command = [str(program), f"--gtest_filter=*.{test.partition(':')[2]}", "--gtest_fail_fast"]
    for seed in seeds:
        done = run(command, CUDA_ON_CPU_SEED=str(seed), CUDA_ON_CPU_DOUBLE_RATIO="64" if seed == SLOW_DOUBLES else "2")
        if done.returncode != 0:
            lines = done.stdout.splitlines()
            for mark in ("AddressSanitizer:", "runtime error:", "cuda_on_cpu: ", "Failure"):
                for number, line in enumerate(lines):
                    if mark in line:
                        return seed, (lines[number + 1] if mark == "Failure" else line[line.index(mark) :]).strip()
            return seed, lines[-1] if lines else "no output"
    return None


def try_mutation(mutation: Mutation, tree: Path, build: Path) -> tuple[int, str] | None:
    """The result of first_red for the mutated tree. The file is restored afterwards."""
    path = tree / "csrc/cuda" / mutation.file
    whole = path.read_text()
    if whole.count(mutation.old) != 1:
        sys.exit(f"{mutation.name}: {mutation.file} has {whole.count(mutation.old)} places like\n{mutation.old}")
    path.write_text(whole.replace(mutation.old, mutation.new))
    try:
        return first_red(compile_program(build, mutation.test), mutation.test)
    finally:
        path.write_text(whole)


def main(words: list[str]) -> int:
    """Print a line for each mutation. Returns the exit code."""
    chosen = [mutation for mutation in MUTATIONS if all(word in mutation.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        build = copy_tree(tree)
        for test in sorted({mutation.test for mutation in chosen}):
            if (red := first_red(compile_program(build, test), test, SEEDS[:1])) is not None:
                sys.exit(f"{test} is red without a mutation, seed {red[0]}: {red[1]}")
        survivors = 0
        print(f"{'mutation':40}{'file':14}{'test':42}{'seed':>5}{'s':>5}  seen as", flush=True)
        for mutation in chosen:
            start = time.monotonic()
            red = try_mutation(mutation, tree, build)
            survivors += red is None
            seed, why = red if red is not None else ("-", "SURVIVES")
            seconds = time.monotonic() - start
            print(
                f"{mutation.name:40}{mutation.file:14}{mutation.test:42}{seed:>5}{seconds:5.0f}  {why[:90]}", flush=True
            )
    print(f"{len(chosen) - survivors} of {len(chosen)} seen")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
