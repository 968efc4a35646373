"""``average_``, the mean of the rows of several learners (``--learners``), against the torch expression for it."""

from __future__ import annotations

import argparse

from common import Case, itemsize, main, randn

from ddpcore import ops


def average(numel: int, options: argparse.Namespace) -> Case:
    """Rows with ``numel`` elements in all. Each is read and written once: 8 bytes an element in fp32."""
    columns = -(-numel // options.learners)
    left, right = randn(columns, options, options.learners), randn(columns, options, options.learners)
    return Case(
        f"average_, {options.learners} rows",
        lambda: ops.average_([left], options.learners),
        lambda: right.copy_(right.mean(dim=0)),
        "torch eager",
        2 * itemsize(options) * numel,
    )


if __name__ == "__main__":
    main(__doc__, [average])
