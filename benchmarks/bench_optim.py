"""Whole steps of our optimizers on the parameters of well-known networks, beside torch's fused SGD and AdamW.

    PYTHONPATH=. python benchmarks/bench_optim.py [--models lenet5,resnet18] [--optimizers sgd,lamb] [--json FILE]

Also beside other libraries, where they are installed, and beside itself with states of bfloat16. Left, right and a copy
run in turn; the ratio left / right is the median over pairs. No model is built.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from common import DTYPES, add_options, bytes_per_param, parse, write
from implementations import COMPARISONS, LISTS, OURS, USUAL, USUAL_OPTIMIZERS, Comparison, Implementation, describe
from timing import LARGEST_COPY, copying, interleaved

from ddpcore.runtime.machine import check_memory, machine
from ddpcore.runtime.timing import quantiles

NUM_TEMPORARIES = 3  # fp32 numbers for each parameter, in libraries that materialise each operation
Row = dict[str, Any]


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of these names, with commas between them."""

    def chosen(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names or len({*names}) < len(names) or not {*names} <= {*known}:
            raise argparse.ArgumentTypeError(f"{text!r}: name some of {','.join(known)}, each once")
        return names

    return chosen


def parse_options() -> argparse.Namespace:
    """The options of the command line, on a machine that has the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names_of(LISTS), default=[*USUAL], help=f"of {','.join(LISTS)}")
    parser.add_argument("--optimizers", type=names_of(OURS), default=[*USUAL_OPTIMIZERS], help=f"of {','.join(OURS)}")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="also other libraries")
    parser.add_argument("--seconds", type=float, default=4.0, help="no pair begins later; three are always taken")
    parser.add_argument("--threads", type=int, help="of the CPU (torch's default)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="of parameters and gradients")
    add_options(parser, repeats=21, to_file="write the result to this file, after each list")
    options = parse(parser)
    if (
        min(options.repeats, 1 if options.threads is None else options.threads) < 1
        or not 0 < options.seconds < math.inf
    ):
        parser.error("--repeats and --threads must be at least 1, and --seconds above 0")
    states = 2 if {"adamw", "lamb"} & {*options.optimizers} else 1
    for name in options.models:
        needed = 4 * (2 * (2 + states) + NUM_TEMPORARIES) * describe(name)["parameters"] + LARGEST_COPY
        try:
            check_memory(f"steps of {name}", needed, options.device, "name smaller lists with --models")
        except ValueError as error:
            parser.error(str(error))
    return options


def measure(options: argparse.Namespace) -> Row:
    """The result as in the JSON file: for each comparison and parameter list a row for each side.

    The file is written after each list, so a run that is stopped early keeps its measurements.
    """
    chosen, notes = comparisons(options)
    rows: list[Row] = []
    about = {"threads": torch.get_num_threads(), "dtype": options.dtype, "notes": notes}
    result = {
        "environment": {**machine(options.device), **about},
        "lists": [describe(name) for name in options.models],
        "comparisons": [comparison.name for comparison in chosen],
        "rows": rows,
    }
    print(*notes, sep="\n", end="\n" if notes else "")
    for name in options.models:
        for optimizer in options.optimizers:
            own = OwnStep(name, optimizer, options)
            for comparison in chosen:
                if comparison.optimizer == optimizer and (comparison.peer is None or comparison.peer.is_installed()):
                    rows += own.measure(comparison)
                    print(line_of(*rows[-2:]), flush=True)
            del own  # before the next one is allocated
        write(options.json, result)
    return result


def comparisons(options: argparse.Namespace) -> tuple[list[Comparison], list[str]]:
    """The comparisons that the result names, and notes about the others."""
    chosen, notes, absent = [], [], {}
    for comparison in COMPARISONS:
        peer, why = comparison.peer, None
        if comparison.optimizer not in options.optimizers or (peer is not None and not options.peers):
            continue
        if peer is not None and not peer.is_installed():
            absent[peer.library] = f"{peer.library} ({peer.install})"
        elif peer is not None:
            why = peer.why_unusable(options.device, DTYPES[options.dtype])
        chosen += [] if why else [comparison]
        notes += [why] if why else []
    if absent:
        notes.append(f"not installed, so not measured: {', '.join(absent.values())}")
    return chosen, notes


class OwnStep:
    """Our optimizer on the parameters of a list, and a copy of as many bytes.

    The optimizers that it is compared with are allocated one after the other, to save memory.
    """

    def __init__(self, name: str, optimizer: str, options: argparse.Namespace) -> None:
        self._options, self._shapes, self._ours = options, LISTS[name][1], OURS[optimizer]
        self._about, self._itemsize = describe(name), DTYPES[options.dtype].itemsize
        self._noise = torch.randn(2**20).to(options.device, DTYPES[options.dtype])
        self._step = self.stepper(self._ours)
        rule = "sgd" if self._ours.matrices else optimizer  # no rule of one pass says what products move
        copied = bytes_per_param(rule, self._itemsize)[0] * self._about["parameters"]
        self._copy, self._copied = copying(copied, options.device)

    def measure(self, comparison: Comparison) -> list[Row]:
        """Two rows, one for each side. The row of the left side has the ratio, left / right."""
        options, sides = self._options, (comparison.left, comparison.right)
        steps = [self._step if side is self._ours else self.stepper(side) for side in sides]
        *seconds, of_copy = interleaved([*steps, self._copy], options.device, options.repeats, options.seconds)
        del steps
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        common = {
            "comparison": comparison.name,
            "optimizer": comparison.optimizer,
            **{key: self._about[key] for key in ("list", "parameters", "num_tensors")},
            "device": options.device,
            "dtype": options.dtype,
            "copy_gb_per_s": self._copied / quantiles(of_copy)["p50"] / 1e9,
            "repeats": len(of_copy),
        }
        turns = ((*sides, *seconds), (*sides[::-1], *seconds[::-1]))
        return [{**common, **self._row(comparison.optimizer, *turn)} for turn in turns]

    def _row(
        self, optimizer: str, side: Implementation, against: Implementation, mine: list[float], theirs: list[float]
    ) -> Row:
        row = {
            "implementation": side.name,
            "against": against.name,
            "ms": quantiles(1e3 * seconds for seconds in mine),
            "ratio": quantiles(left / right for left, right in zip(mine, theirs, strict=True)),
        }
        is_own = side is self._ours or side.rounded
        if not is_own or side.matrices:  # the traffic of other libraries and of matrix products is unknown
            return row | dict.fromkeys(("bytes_per_param", "bytes_per_param_uncached", "gb_per_s"))
        least, most = bytes_per_param(optimizer, self._itemsize, side.rounded)
        rate = least * self._about["parameters"] / quantiles(mine)["p50"] / 1e9
        return row | {"bytes_per_param": least, "bytes_per_param_uncached": most, "gb_per_s": rate}

    def stepper(self, implementation: Implementation) -> Callable[[], Any]:
        """The step of an optimizer, with its own parameters and gradients because some libraries write to gradients."""
        params = []
        for shape in self._shapes:
            param = torch.nn.Parameter(self._numbers(shape))
            param.grad = self._numbers(shape)
            params.append(param)
        return implementation.build(params).step

    def _numbers(self, shape: tuple[int, ...]) -> torch.Tensor:
        numel = math.prod(shape)
        return self._noise.repeat(-(-numel // len(self._noise)))[:numel].view(shape).clone()


def line_of(left: Row, right: Row) -> str:
    """Times of both, their ratio, and the bandwidth of ours (of the left one, where both are ours)."""
    ratio, times = left["ratio"], f"{left['ms']['p50']:.4g} / {right['ms']['p50']:.4g} ms"
    ours = next((row for row in (left, right) if row["gb_per_s"] is not None), None)
    text = f"{left['list']:<11}{left['comparison']:<48}{times:>20}"
    text += f"{ratio['p50']:>8.2f} [{ratio['p20']:.2f}-{ratio['p80']:.2f}]"
    if ours is not None:
        text += f"{ours['gb_per_s']:>9.1f} GB/s, {ours['gb_per_s'] / ours['copy_gb_per_s']:.0%} of a copy's"
    return text


def main() -> None:
    options = parse_options()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = measure(options)["rows"]
    apart = sum(row["ms"]["p80"] > 2 * row["ms"]["p20"] for row in rows)
    if apart:
        print(f"busy machine: in {apart} of {len(rows)} rows the p80 is more than twice the p20")


if __name__ == "__main__":
    main()
