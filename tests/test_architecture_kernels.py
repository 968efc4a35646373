"""The rules for kernels: one name in every place, and no torch below the bindings.

Each rule is a function from files to complaints ``path:line: what``, so that the tests below can prove it red on
made-up files before they hold it against the repository.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ddpcore.ops  # noqa: F401  it defines the operators

ROOT = Path(__file__).resolve().parent.parent


def operators() -> dict[str, list[str]]:
    """The names of the arguments of every operator, in the order of its schema."""
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    schemas = {name: getattr(torch.ops.ddpcore, name).default._schema for part, _, name in names if part == "ddpcore"}
    return {name: [argument.name for argument in schema.arguments] for name, schema in schemas.items()}


def bound_arguments(root: Path, name: str) -> list[str] | None:
    """The names of the arguments of the C++ operator, in order."""
    text = (root / "csrc/bindings/operators.h").read_text()
    signature = re.search(rf"^(?:void|Tensor) {name}\(([^)]*)\) \{{", text, re.MULTILINE)
    return None if signature is None else re.findall(r"(\w+)(?:,|$)", re.sub(r"<[^>]*>", "", signature.group(1)))


def kernel_complaints(root: Path, operators: dict[str, list[str]]) -> list[str]:
    """An operator has one name in schema, binding, CPU file, CUDA file, Python op, reference, test and benchmark.

    The file in ``csrc/cpu`` that defines it gives the others their names.
    """
    complaints = []

    def demand(where: str, pattern: str, what: str) -> None:
        path = root / where
        if not path.exists() or not re.search(pattern, path.read_text(), re.MULTILINE):
            complaints.append(f"{where}:1: {what}")

    for name, arguments in operators.items():
        definition = re.compile(rf"\b(?:void|cudaError_t) {name}\(const|^DDPCORE_FUSED_VERSIONS\({name},", re.MULTILINE)
        stems = [path.stem for path in sorted((root / "csrc/cpu").glob("*.cpp")) if definition.search(path.read_text())]
        if len(stems) != 1:
            complaints.append(f"csrc/cpu:1: {name} is defined in {stems or 'no file'}, not in exactly one")
            continue
        if bound_arguments(root, name) != arguments:
            complaints.append(f"csrc/bindings/operators.h:1: {name} has not the arguments of its schema, in its order")
        registered = rf'library\.impl\("{name}", TORCH_BOX\(&{name}<Backend>\)\)'
        demand("csrc/bindings/operators.h", registered, f"does not register {name}")
        demand(f"csrc/cuda/{stems[0]}.cu", rf"^cudaError_t {name}\(const", f"does not define {name}")
        demand("ddpcore/ops/__init__.py", rf'__all__ = [^=]*"{name}"', f"does not export {name}")
        demand("ddpcore/ops/reference.py", rf"^def {name}\(", f"has no reference of {name}")
        demand(f"tests/ops/test_{stems[0]}.py", rf"\b{name}\b", f"does not test {name}")
        measured = "rules" if name == f"{stems[0]}_step_" else stems[0]  # one benchmark measures all update rules
        demand(f"benchmarks/bench_{measured}.py", rf"\b{name}\b", f"does not measure {name}")
    return complaints


def torch_free_complaints(root: Path) -> list[str]:
    complaints = []
    kernels = [path for room in ("cpu", "cuda") for path in sorted((root / "csrc" / room).rglob("*"))]
    for path in [*sorted((root / "csrc").glob("*.h")), *kernels]:
        for line, text in enumerate(path.read_text().splitlines(), 1) if path.is_file() else ():
            if re.match(r'\s*#\s*include\s*[<"](?:torch|ATen|c10|\.\./bindings)', text):
                complaints.append(f"{path.relative_to(root)}:{line}: a kernel file includes torch: {text.strip()}")
    return complaints


def assert_none(complaints: list[str]) -> None:
    assert not complaints, "\n" + "\n".join(complaints)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_kernel_has_one_name():
    assert len(operators()) >= 8
    assert_none(kernel_complaints(ROOT, operators()))


def test_kernels_know_no_torch():
    assert_none(torch_free_complaints(ROOT))


OPERATORS = {"scale_": ["x", "by", "most"]}
KERNEL = {
    "ddpcore/ops/__init__.py": '__all__ = ["scale_"]',
    "ddpcore/ops/reference.py": "def scale_(x): pass",
    "csrc/bindings/operators.h": """
template <typename Backend>
void scale_(
    const Tensor& x, const std::optional<Tensor>& by, const std::vector<double>& most) {
}
    library.impl("scale_", TORCH_BOX(&scale_<Backend>));""",
    "csrc/cpu/scale.cpp": "CLONES void scale_(const Args& args) {}",
    "csrc/cuda/scale.cu": "cudaError_t scale_(const Args& args) {}",
    "tests/ops/test_scale.py": "ops.scale_(x)",
    "benchmarks/bench_scale.py": "ops.scale_(x)",
}


def test_a_whole_kernel_passes(tmp_path):
    write(tmp_path, KERNEL)
    assert_none(kernel_complaints(tmp_path, OPERATORS))


@pytest.mark.parametrize("name", KERNEL)
def test_a_kernel_with_another_name_is_seen(name, tmp_path):
    write(tmp_path, {**KERNEL, name: KERNEL[name].replace("scale_", "scaled_")})
    complaints = kernel_complaints(tmp_path, OPERATORS)
    assert complaints and all("scale" in complaint for complaint in complaints)
    assert all(complaint.startswith(name if "cpu/scale" not in name else "csrc/cpu") for complaint in complaints)


def test_a_kernel_in_two_files_is_seen(tmp_path):
    write(tmp_path, {**KERNEL, "csrc/cpu/other.cpp": KERNEL["csrc/cpu/scale.cpp"]})
    complaints = kernel_complaints(tmp_path, OPERATORS)
    assert complaints == ["csrc/cpu:1: scale_ is defined in ['other', 'scale'], not in exactly one"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("const std::vector<double>& most", "const std::vector<double>& least", "not the arguments of its schema"),
        (", const std::vector<double>& most", "", "not the arguments of its schema"),
        ("&scale_<Backend>", "&mix_<Backend>", "operators.h:1: does not register scale_"),
        ("<Backend>)", "<Cpu>)", "operators.h:1: does not register scale_"),
    ],
)
def test_a_kernel_that_is_bound_to_something_else_is_seen(old, new, message, tmp_path):
    bound = KERNEL["csrc/bindings/operators.h"]
    assert old in bound
    write(tmp_path, {**KERNEL, "csrc/bindings/operators.h": bound.replace(old, new)})
    complaints = kernel_complaints(tmp_path, OPERATORS)
    assert len(complaints) == 1 and message in complaints[0], complaints


def test_arguments_in_another_order_are_seen(tmp_path):
    write(tmp_path, KERNEL)
    complaints = kernel_complaints(tmp_path, {"scale_": ["x", "most", "by"]})
    assert len(complaints) == 1 and "not the arguments of its schema, in its order" in complaints[0]


@pytest.mark.parametrize("include", ["<torch/all.h>", "<ATen/ATen.h>", '"c10/util/Half.h"', '"../bindings/a.h"'])
@pytest.mark.parametrize("name", ["args.h", "math.h", "random.h", "cpu/x.h", "cuda/x.cuh"])
def test_torch_in_a_kernel_is_seen(name, include, tmp_path):
    write(tmp_path, {f"csrc/{name}": f"// a kernel\n#include {include}\n#include <vector>\n"})
    assert [complaint.split(": ")[0] for complaint in torch_free_complaints(tmp_path)] == [f"csrc/{name}:2"]
