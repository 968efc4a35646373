"""Uneven shards: parts of a training split whose classes differ from learner to learner."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpcore.data.shards import permutation, philox
from ddpcore.options.typed import check_choice, check_keys, check_range, typed

Indices = npt.NDArray[np.int64]

SHARDS = ("even", "dirichlet", "by_class", "given")
"""Values of ``shards``; :func:`split` explains them. ``even`` leaves the assignment to the ``sampler``."""

_OPTIONS = {"dirichlet": ("alpha",), "given": ("parts",)}
_KEY = (0, 0, 0, 0, 3)  # a key that neither ShardedBatches nor a Dataset uses


def split(
    shards: str, labels: Any, num_learners: int, *, seed: int = 0, alpha: float = 0.5, parts: Any = None
) -> list[Indices]:
    """The sample numbers of each learner, a list of int64 arrays in ascending order.

    A pure function of its arguments, so every rank computes the same list. Unless they are given, parts are disjoint
    and of equal size, so that the mean of the learners' losses is the loss over all of their samples; a remainder of
    fewer samples than learners is left out.

    Args:
        shards: ``even``: random parts.
            ``dirichlet``: each learner draws the frequencies of its classes from a Dirichlet distribution with
            concentration ``alpha`` times the frequencies of all samples times the number of classes (Hsu et al. 2019,
            "Measuring the effects of non-identical data distribution"). A class that is used up is left out, so the
            last learners take what is left.
            ``by_class``: samples in the order of their classes, cut into parts (McMahan et al. 2017, with one part for
            each learner).
            ``given``: ``parts``.
        labels: class numbers ``[N]``, not negative: a tensor, an array or a list. ``even`` and ``given`` also take
            ``[N, T]``, labels at T places of a sample.
        num_learners: number of parts.
        seed: of the random choices.
        alpha: concentration, above 0. A learner has few classes if it is small, and all of them if it is large.
        parts: for ``given``, one list of sample numbers for each learner.

    Raises:
        ValueError: alpha is not above 0, there are fewer samples than learners, the given parts are no parts, or
            ``dirichlet`` or ``by_class`` has labels ``[N, T]``.
    """
    check_choice("shards", shards, SHARDS)
    check_range("shards: num_learners", num_learners, least=1)
    classes = np.asarray(labels, dtype=np.int64)
    if classes.ndim > 1 and shards in ("dirichlet", "by_class"):
        both = f"shards is '{shards}' and labels are {list(classes.shape)}"
        raise ValueError(f"{both}: a sample has no single class, take 'even' or 'given'")
    if classes.ndim < 1 or (classes < 0).any():
        raise ValueError(f"shards: labels must be class numbers [N], not negative; they are {list(classes.shape)}")
    if shards == "given":
        return _checked(parts, len(classes), num_learners)
    alpha = check_alpha(alpha)
    if len(classes) < num_learners:
        raise ValueError(f"{num_learners} learners cannot share {len(classes)} samples: take at most {len(classes)}")
    order, each = permutation(len(classes), seed, *_KEY), len(classes) // num_learners
    kept = order[: each * num_learners]
    if shards == "dirichlet":
        return _dirichlet(kept, classes, num_learners, alpha, seed)
    if shards == "by_class":
        kept = kept[np.argsort(classes[kept], kind="stable")]
    return [np.sort(part) for part in kept.reshape(num_learners, each)]


def check_alpha(alpha: Any) -> float:
    """The concentration as a float. ValueError unless it is above 0."""
    alpha = typed("shards: alpha", alpha, float)
    check_range("shards: alpha", alpha, above=0)
    return float(alpha)


def check_options(shards: str, options: Mapping[str, Any]) -> None:
    """ValueError unless these are options of the kind of shards, in their range."""
    check_choice("shards", shards, SHARDS)
    check_keys(f"shards {shards}", options, _OPTIONS.get(shards, ()))
    if "alpha" in options:
        check_alpha(options["alpha"])
    if shards == "given" and "parts" not in options:
        raise ValueError("shards is 'given': put one list of sample numbers for each learner in the option parts")


def total_variation(labels: Any, parts: Sequence[Any]) -> float:
    """How uneven the parts are, from 0 (all have the same classes) to 1 (none has a class of the whole).

    The mean over learners of ``1/2 sum_c |p_j(c) - p(c)|``, the total variation distance between the frequencies of
    classes in part j and in all parts together. Of labels ``[N, T]`` each place counts.
    """
    classes = np.asarray(labels, dtype=np.int64)
    num = int(classes.max()) + 1
    counts = np.stack([np.bincount(classes[np.asarray(part, dtype=np.int64)].ravel(), minlength=num) for part in parts])
    own, whole = counts / counts.sum(axis=1, keepdims=True), counts.sum(axis=0) / counts.sum()
    return float(abs(own - whole).sum(axis=1).mean() / 2)


def _checked(parts: Any, num_samples: int, num_learners: int) -> list[Indices]:
    if not isinstance(parts, Iterable):
        raise ValueError(f"shards: parts is {parts!r}: give one list of sample numbers for each learner")
    found = [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]
    if len(found) != num_learners:
        raise ValueError(f"shards: there are {len(found)} parts and {num_learners} learners: give one for each")
    for learner, part in enumerate(found):
        what = f"shards: the part of learner {learner}"
        if part.ndim != 1 or len(part) == 0:
            raise ValueError(f"{what} is {list(part.shape)}: give at least one sample")
        if part[0] < 0 or part[-1] >= num_samples:
            raise ValueError(f"{what} has samples {part[0]} to {part[-1]}: there are 0 to {num_samples - 1}")
        if (part[1:] == part[:-1]).any():
            raise ValueError(f"{what} has a sample twice: name each once")
    return found


def _dirichlet(kept: Indices, classes: Indices, num_learners: int, alpha: float, seed: int) -> list[Indices]:
    each, num_classes = len(kept) // num_learners, int(classes.max()) + 1
    stacks = [kept[classes[kept] == c] for c in range(num_classes)]  # in random order
    left = np.array([len(stack) for stack in stacks])
    shares = left / left.sum()
    taken = np.zeros(num_classes, dtype=np.int64)
    parts = []
    for learner in range(num_learners):
        shapes = enumerate(alpha * num_classes * shares)
        logs = [_log_gamma(shape, seed, *_KEY, learner, c) if shape > 0 else -np.inf for c, shape in shapes]
        counts = _drawn(np.array(logs), left - taken, each)
        chosen = [stack[begin : begin + num] for stack, begin, num in zip(stacks, taken, counts, strict=True)]
        parts.append(np.sort(np.concatenate(chosen)))
        taken += counts
    return parts


def _drawn(logs: npt.NDArray[np.float64], left: Indices, num: int) -> Indices:
    """How many of each class, ``num`` in all and at most ``left``, as near to exp(logs) as whole numbers are."""
    counts = np.zeros_like(left)
    while missing := num - int(counts.sum()):
        room = left - counts
        open_logs = np.where(room > 0, logs, -np.inf)
        wanted = np.exp(open_logs - open_logs.max())  # relative to the largest: not all are 0
        wanted *= missing / wanted.sum()
        whole = np.floor(wanted)
        more = np.minimum(whole.astype(np.int64), room)
        for c in np.argsort(whole - wanted, kind="stable")[: missing - int(more.sum())]:  # the largest remainders
            more[c] += more[c] < room[c] and wanted[c] > 0
        counts += more
    return counts


def _log_gamma(shape: float, seed: int, *key: int) -> float:
    """The logarithm of a number of the gamma distribution (Marsaglia and Tsang 2000), a function of seed and key.

    The logarithm, because at a small shape most numbers are too small for a float. For a shape below 1 it draws one of
    shape + 1 and multiplies by ``u^(1/shape)``.
    """
    d = (shape + 1 if shape < 1 else shape) - 1 / 3
    for attempt in range(1000):  # each succeeds in at least 95 of 100 cases
        u, v, w, x = (philox(4, seed, *key, attempt) >> np.uint64(11)).astype(np.float64) * 2**-53 + 2**-54
        normal = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
        cube = (1 + normal / np.sqrt(9 * d)) ** 3
        if cube > 0 and np.log(w) < normal**2 / 2 + d - d * cube + d * np.log(cube):
            break
    result = np.log(d * cube)
    return float(result + np.log(x) / shape if shape < 1 else result)
