"""``benchmarks/small_cases.py`` calls every kernel there is: what it leaves out, no memory checker sees."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import small_cases
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Keeps what is called inside: the operator, the dtype of its first tensor, and which optional tensors it had."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()
        self.origins: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("ddpcore::"):
            first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            self.seen.add((name, first.dtype))
        if name == "ddpcore::noise_sums":
            self.origins.add(args[2] is not None)
        return func(*args, **(kwargs or {}))


def test_every_kernel_is_called() -> None:
    calls, options = Calls(), Namespace(device="cpu")
    dtypes = list(small_cases.DTYPES.values())
    with calls:
        small_cases.all_cases(options)
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ddpcore::")}
    assert len(names) > 5
    assert calls.seen >= {(name, dtype) for name in names for dtype in dtypes}
    assert calls.origins == {True, False}
