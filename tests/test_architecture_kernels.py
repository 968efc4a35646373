"""The house rules for kernels: one name in every place, and no torch below the bindings.

Each rule is a function from files to complaints ``path:line: what``, so that the tests below can prove it red on
made-up files before they hold it against the repository.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def kernels_of(root: Path) -> list[str]:
    return re.findall(r'library\.def\(\s*"(\w+)\(', (root / "csrc/bindings/library.cpp").read_text())


def kernel_complaints(root: Path) -> list[str]:
    """An operation is spelled alike in schema, binding, CPU file, CUDA file, Python op, twin, test and benchmark."""
    complaints = []

    def demand(where: str, pattern: str, what: str) -> None:
        path = root / where
        if not path.exists() or not re.search(pattern, path.read_text(), re.MULTILINE):
            complaints.append(f"{where}:1: {what}")

    for name in kernels_of(root):
        definition = re.compile(rf"\b(?:void|cudaError_t) {name}\(const")
        stems = [path.stem for path in sorted((root / "csrc/cpu").glob("*.cpp")) if definition.search(path.read_text())]
        if len(stems) != 1:
            complaints.append(f"csrc/cpu:1: {name} is defined in {stems or 'no file'}, not in exactly one")
            continue
        stem = stems[0]
        demand(f"csrc/cuda/{stem}.cu", rf"^cudaError_t {name}\(const", f"does not define {name}")
        for backend in ("cpu", "cuda"):
            registered = rf'library\.impl\("{name}", TORCH_BOX\(&ddpcore::{name}\)\)'
            demand(f"csrc/bindings/{backend}.cpp", registered, f"does not register {name}")
        demand(f"ddpcore/ops/{stem}.py", rf"^def {name}\(", f"has no function {name}")
        demand(f"ddpcore/ops/{stem}.py", rf'register_fake\("ddpcore::{name}"\)', f"registers no fake of {name}")
        demand("ddpcore/ops/__init__.py", rf'__all__ = [^=]*"{name}"', f"does not export {name}")
        demand("ddpcore/ops/reference.py", rf"^def {name}\(", f"has no twin of {name}")
        demand(f"tests/ops/test_{stem}.py", rf"\b{name}\b", f"does not test {name}")
        demand(f"benchmarks/bench_{stem}.py", rf"\b{name}\b", f"does not measure {name}")
    return complaints


def torch_free_complaints(root: Path) -> list[str]:
    complaints = []
    kernels = [path for room in ("cpu", "cuda") for path in sorted((root / "csrc" / room).rglob("*"))]
    for path in [root / "csrc/args.h", root / "csrc/math.h", *kernels]:
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
    assert len(kernels_of(ROOT)) >= 5
    assert_none(kernel_complaints(ROOT))


def test_kernels_know_no_torch():
    assert_none(torch_free_complaints(ROOT))


KERNEL = {
    "csrc/bindings/library.cpp": 'library.def(\n    "scale_(Tensor(a!) x) -> ()");',
    "csrc/bindings/cpu.cpp": 'library.impl("scale_", TORCH_BOX(&ddpcore::scale_));',
    "csrc/bindings/cuda.cpp": 'library.impl("scale_", TORCH_BOX(&ddpcore::scale_));',
    "csrc/cpu/scale.cpp": "CLONES void scale_(const Args& args) {}",
    "csrc/cuda/scale.cu": "cudaError_t scale_(const Args& args) {}",
    "ddpcore/ops/scale.py": '@register_fake("ddpcore::scale_")\ndef _(x): pass\ndef scale_(x): pass',
    "ddpcore/ops/__init__.py": '__all__ = ["scale_"]',
    "ddpcore/ops/reference.py": "def scale_(x): pass",
    "tests/ops/test_scale.py": "ops.scale_(x)",
    "benchmarks/bench_scale.py": "ops.scale_(x)",
}


def test_a_whole_kernel_passes(tmp_path):
    write(tmp_path, KERNEL)
    assert_none(kernel_complaints(tmp_path))


@pytest.mark.parametrize("name", [name for name in KERNEL if name != "csrc/bindings/library.cpp"])
def test_a_kernel_with_another_name_is_seen(name, tmp_path):
    write(tmp_path, {**KERNEL, name: KERNEL[name].replace("scale_", "scaled_")})
    complaints = kernel_complaints(tmp_path)
    assert complaints and all("scale_" in complaint for complaint in complaints)
    assert complaints[0].startswith(name if "cpu/scale" not in name else "csrc/cpu")


def test_a_kernel_in_two_files_is_seen(tmp_path):
    write(tmp_path, {**KERNEL, "csrc/cpu/other.cpp": KERNEL["csrc/cpu/scale.cpp"]})
    assert kernel_complaints(tmp_path) == ["csrc/cpu:1: scale_ is defined in ['other', 'scale'], not in exactly one"]


@pytest.mark.parametrize("include", ["<torch/all.h>", "<ATen/ATen.h>", '"c10/util/Half.h"', '"../bindings/a.h"'])
@pytest.mark.parametrize("name", ["args.h", "math.h", "cpu/x.h", "cuda/x.cuh"])
def test_torch_in_a_kernel_is_seen(name, include, tmp_path):
    write(tmp_path, {f"csrc/{name}": f"// a kernel\n#include {include}\n#include <vector>\n"})
    assert [complaint.split(": ")[0] for complaint in torch_free_complaints(tmp_path)] == [f"csrc/{name}:2"]
