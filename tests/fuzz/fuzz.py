"""``fuzz.py [TARGET ...] [--seconds N]``: fuzz with atheris, each target in a process of its own, as ``make fuzz``.

New inputs go to build/fuzz/TARGET. What crashes, hangs for 10 s or takes 2 GB is written beside them, and named. Then
add it to corpus/TARGET, which ``test_corpus.py`` replays.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = HERE.parent.parent / "build" / "fuzz"
OURS = "data storage experiments.study training.checkpoint options.typed"
LIBRARIES = "tomllib zipfile gzip json h5py._hl"
INSTRUMENTED = [*(f"ddpcore.{name}" for name in OURS.split()), *LIBRARIES.split()]


def fuzz(target: str, seconds: int) -> int:
    """Fuzz a target in a child, and print one line. Returns the number of defects found."""
    found = WORK / target
    found.mkdir(parents=True, exist_ok=True)
    flags = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048", f"-artifact_prefix={found}/defect-"]
    words = [*flags, "-max_len=65536", "-print_final_stats=1", str(found), str(HERE / "corpus" / target)]
    before = set(found.glob("defect-*"))
    log = found.with_suffix(".log")
    with log.open("wb") as file:
        child = subprocess.run([sys.executable, __file__, "--in-process", target, *words], stdout=file, stderr=file)
    executed = re.findall(r"stat::number_of_executed_units: *(\d+)", log.read_text(errors="replace"))
    defects = sorted(set(found.glob("defect-*")) - before)
    ended = child.returncode != 0 and not defects  # by an error before the first input, say
    print(f"{target}: {seconds} s, {executed[-1] if executed else '?'} executions, {len(defects)} defects", flush=True)
    for path in defects:
        print(f"  {path}")
    if ended:
        print(f"  it ended with status {child.returncode}: see {log}")
    return len(defects) + ended


def run_in_process(target: str, words: list[str]) -> None:
    import atheris
    import torch  # noqa: F401  not instrumented

    with atheris.instrument_imports(include=INSTRUMENTED):
        import targets
    atheris.Setup([target, *words], targets.TARGETS[target])
    atheris.Fuzz()


def main() -> int:
    sys.path.insert(0, str(HERE))
    if sys.argv[1:2] == ["--in-process"]:
        run_in_process(sys.argv[2], sys.argv[3:])
        return 0
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("ddpcore: make fuzz needs atheris, which exists for Linux and Python up to 3.13: pip install atheris")
        return 2
    known = sorted(path.name for path in (HERE / "corpus").iterdir())
    parser = argparse.ArgumentParser(description="Fuzz the readers of files from strangers.")
    parser.add_argument("targets", nargs="*", default=known, help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    options = parser.parse_args()
    if wrong := set(options.targets) - set(known):
        parser.error(f"no such target: {', '.join(sorted(wrong))}")
    return 1 if sum([fuzz(target, options.seconds) for target in options.targets]) else 0


if __name__ == "__main__":
    sys.exit(main())
