"""The seeds of a test."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed() -> None:
    """Seed Python, numpy and torch, for the same random numbers in each test and each case.

    ``torch.manual_seed`` also formats the stack for each kind of device that is not there, which takes 0.6 ms.
    """
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
