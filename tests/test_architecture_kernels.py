"""The rules for kernels: one name in every place, and no torch below the bindings.

Each rule is a function from files to complaints ``path:line: what``, so that the tests below can prove it red on
made-up files before they hold it against the repository.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


SCHEMA = re.compile(r'define\(\s*((?:f?"[^"]*"\s*)+),\s*reference\.(\w+)')


def schemas_of(path: Path) -> dict[str, tuple[list[str], str]]:
    """The operators that a file defines: the names of their arguments, and the name of their reference implementation.

    Parts of a schema that several operators share are constants of some file in the same folder.
    """
    shared: dict[str, str] = {}
    for other in sorted(path.parent.glob("*.py")):
        shared |= dict(re.findall(r'^([A-Z_]+_SCHEMA) = "(.*)"$', other.read_text(), re.MULTILINE))
    found = {}
    for literals, implementation in SCHEMA.findall(path.read_text()):
        schema = "".join(re.findall(r'"([^"]*)"', literals)).format_map(shared)
        name, _, rest = schema.partition("(")
        arguments = rest.rpartition(" -> ")[0].removesuffix(")").split(", ")
        found[name] = (
            [argument.split()[-1].partition("=")[0] for argument in arguments if argument != "*"],
            implementation,
        )
    return found


def kernels_of(root: Path) -> list[tuple[Path, str]]:
    """Every operator, with the file that defines it."""
    return [(path, name) for path in sorted((root / "ddpcore/ops").glob("*.py")) for name in schemas_of(path)]


def bound_arguments(root: Path, name: str) -> list[str] | None:
    """The names of the arguments of the C++ operator, in order."""
    text = (root / "csrc/bindings/operators.h").read_text()
    signature = re.search(rf"^(?:void|Tensor) {name}\(([^)]*)\) \{{", text, re.MULTILINE)
    return None if signature is None else re.findall(r"(\w+)(?:,|$)", re.sub(r"<[^>]*>", "", signature.group(1)))


def kernel_complaints(root: Path) -> list[str]:
    """An operator has one name in schema, binding, CPU file, CUDA file, Python op, reference, test and benchmark.

    ``mix_<rule>_step_`` is the kernel of the step with a mix among its arguments.
    """
    complaints = []

    def demand(where: str, pattern: str, what: str) -> None:
        path = root / where
        if not path.exists() or not re.search(pattern, path.read_text(), re.MULTILINE):
            complaints.append(f"{where}:1: {what}")

    for path, name in kernels_of(root):
        arguments, implementation = schemas_of(path)[name]
        mixes = name.startswith("mix_") and name.endswith("_step_")
        kernel, tested = (name.removeprefix("mix_"), "mix_steps") if mixes else (name, path.stem)
        definition = re.compile(
            rf"\b(?:void|cudaError_t) {kernel}\(const|^DDPCORE_FUSED_VERSIONS\({kernel},", re.MULTILINE
        )
        stems = [path.stem for path in sorted((root / "csrc/cpu").glob("*.cpp")) if definition.search(path.read_text())]
        if stems != [path.stem]:
            complaints.append(f"csrc/cpu:1: {name} is defined in {stems or 'no file'}, not in exactly {path.stem}")
        if implementation != name:
            complaints.append(f"ddpcore/ops/{path.stem}.py:1: the reference of {name} is {implementation}")
        if bound_arguments(root, name) != arguments:
            complaints.append(f"csrc/bindings/operators.h:1: {name} has not the arguments of its schema, in its order")
        demand(f"csrc/cuda/{path.stem}.cu", rf"^cudaError_t {kernel}\(const", f"does not define {kernel}")
        for backend in ("Cpu", "Cuda"):
            registered = rf'library\.impl\("{name}", TORCH_BOX\(&ddpcore::{name}<ddpcore::{backend}>\)\)'
            demand(f"csrc/bindings/{backend.lower()}.cpp", registered, f"does not register {name}")
        demand(f"ddpcore/ops/{path.stem}.py", rf"^def {name}\(", f"has no function {name}")
        demand("ddpcore/ops/__init__.py", rf'__all__ = [^=]*"{name}"', f"does not export {name}")
        demand("ddpcore/ops/reference.py", rf"^(?:def {name}\(|{name} = )", f"has no reference of {name}")
        demand(f"tests/ops/test_{tested}.py", rf"\b{name}\b", f"does not test {name}")
        measured = "rules" if name == f"{path.stem}_step_" else tested  # one benchmark measures all update rules
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
    assert len(kernels_of(ROOT)) >= 8
    assert_none(kernel_complaints(ROOT))


def test_kernels_know_no_torch():
    assert_none(torch_free_complaints(ROOT))


KERNEL = {
    "ddpcore/ops/scale.py": """
_scale = define("scale_(Tensor(a!) x, *, " f"{BY_SCHEMA}) -> ()", reference.scale_, no_result)
def scale_(x): pass
""",
    "ddpcore/ops/shared.py": 'BY_SCHEMA = "Tensor? by, float[] most"',
    "ddpcore/ops/__init__.py": '__all__ = ["scale_"]',
    "ddpcore/ops/reference.py": "def scale_(x): pass",
    "csrc/bindings/operators.h": """
template <typename Backend>
void scale_(
    const Tensor& x, const std::optional<Tensor>& by, const std::vector<double>& most) {
}""",
    "csrc/bindings/cpu.cpp": 'library.impl("scale_", TORCH_BOX(&ddpcore::scale_<ddpcore::Cpu>));',
    "csrc/bindings/cuda.cpp": 'library.impl("scale_", TORCH_BOX(&ddpcore::scale_<ddpcore::Cuda>));',
    "csrc/cpu/scale.cpp": "CLONES void scale_(const Args& args) {}",
    "csrc/cuda/scale.cu": "cudaError_t scale_(const Args& args) {}",
    "tests/ops/test_scale.py": "ops.scale_(x)",
    "benchmarks/bench_scale.py": "ops.scale_(x)",
}


def test_a_whole_kernel_passes(tmp_path):
    write(tmp_path, KERNEL)
    assert [name for _, name in kernels_of(tmp_path)] == ["scale_"]
    assert_none(kernel_complaints(tmp_path))


@pytest.mark.parametrize("name", [name for name in KERNEL if name != "ddpcore/ops/shared.py"])
def test_a_kernel_with_another_name_is_seen(name, tmp_path):
    write(tmp_path, {**KERNEL, name: KERNEL[name].replace("scale_", "scaled_")})
    complaints = kernel_complaints(tmp_path)
    assert complaints and all("scale" in complaint for complaint in complaints)
    if name != "ddpcore/ops/scale.py":  # with which all the others then do not agree
        assert len(complaints) == 1
        assert complaints[0].startswith(name if "cpu/scale" not in name else "csrc/cpu")


def test_a_kernel_in_two_files_is_seen(tmp_path):
    write(tmp_path, {**KERNEL, "csrc/cpu/other.cpp": KERNEL["csrc/cpu/scale.cpp"]})
    assert kernel_complaints(tmp_path) == ["csrc/cpu:1: scale_ is defined in ['other', 'scale'], not in exactly scale"]


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("ddpcore/ops/shared.py", "Tensor? by, float[] most", "float[] most, Tensor? by", "not the arguments of its"),
        ("ddpcore/ops/shared.py", ", float[] most", "", "not the arguments of its schema"),
        ("csrc/bindings/operators.h", "double>& most", "double>& least", "not the arguments of its schema"),
        ("ddpcore/ops/scale.py", "reference.scale_", "reference.mix_", "the reference of scale_ is mix_"),
        ("csrc/bindings/cpu.cpp", "::Cpu", "::Cuda", "cpu.cpp:1: does not register scale_"),
        ("csrc/bindings/cuda.cpp", "<ddpcore::Cuda>", "", "cuda.cpp:1: does not register scale_"),
    ],
)
def test_a_kernel_that_is_bound_to_something_else_is_seen(name, old, new, message, tmp_path):
    assert old in KERNEL[name]
    write(tmp_path, {**KERNEL, name: KERNEL[name].replace(old, new)})
    complaints = kernel_complaints(tmp_path)
    assert len(complaints) == 1 and message in complaints[0], complaints


@pytest.mark.parametrize("include", ["<torch/all.h>", "<ATen/ATen.h>", '"c10/util/Half.h"', '"../bindings/a.h"'])
@pytest.mark.parametrize("name", ["args.h", "math.h", "random.h", "cpu/x.h", "cuda/x.cuh"])
def test_torch_in_a_kernel_is_seen(name, include, tmp_path):
    write(tmp_path, {f"csrc/{name}": f"// a kernel\n#include {include}\n#include <vector>\n"})
    assert [complaint.split(": ")[0] for complaint in torch_free_complaints(tmp_path)] == [f"csrc/{name}:2"]
