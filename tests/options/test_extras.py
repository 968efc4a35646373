"""The helper that names the extra of a missing package."""

from __future__ import annotations

import sys

import pytest

from ddpcore.options.extras import MissingPackage, extra


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_optimizer", None)
    says = r"^torch_optimizer is not installed: pip install 'ddpcore\[bench\]'$"
    with pytest.raises(MissingPackage, match=says), extra("bench"):
        import torch_optimizer  # noqa: F401


def test_the_extra_of_the_inner_block_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    says = r"^scipy is not installed: pip install 'ddpcore\[train\]'$"
    with pytest.raises(ValueError, match=says), extra("bench"), extra("train"):
        import scipy.sparse  # noqa: F401


@pytest.mark.parametrize("module", ["torch.no_such_module", "ddpcore.no_such_module"])
def test_a_module_of_ours_or_of_torch_that_is_missing_is_no_matter_of_extras(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), extra("train"):
        __import__(module)


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), extra("train"):
        raise ZeroDivisionError
