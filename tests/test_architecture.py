"""The house rules: floors, sizes, docstrings, exports. Those for kernels are in ``test_architecture_kernels.py``.

Each rule is a function from files to complaints ``path:line: what``, so that the tests below can prove it red on
made-up files before they hold it against the repository.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Lowest first. A module imports from strictly lower floors or from its own room (a folder, or one file).
FLOORS: dict[str, float] = {
    "_C": 1, "advice": 2, "dtypes": 2, "plans": 2, "flags": 2, "ops": 2,
    "flat": 3, "topology": 3, "stacked": 3, "schedules": 3, "metrics": 3, "models": 3, "data": 3,
    "buckets": 3.5, "compression": 3.5,
    "optim": 4, "comm": 4,
    "learner": 4.5,
    "strategies": 5, "observer": 5, "evaluation": 5,
    "policies": 5.5,
    "distributed": 5.7,
    "diagnostics": 5.8,
    "parallel": 6,
    "": 6.5,  # ddpcore/__init__.py: what a user imports
    "launch": 6.7, "allocator": 6.7,
    "machine": 6.8,
    "engine": 7,
    "report": 7.5,
    "experiments": 8,
    "bench": 9,
}  # fmt: skip
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# "path" or "path:function" -> why it may be longer.
EXCEPTIONS: dict[str, str] = {
    "ddpcore/ops/sgd.py:sgd_step_": "one argument a line: its name, what it means, and how it is passed on",
    "ddpcore/ops/lars.py:lars_step_": "as sgd_step_",
    "ddpcore/ops/lamb.py:lamb_step_": "as sgd_step_",
    "ddpcore/ops/mix_sgd.py:mix_sgd_step_": "as sgd_step_",
}
SIZED = ("ddpcore", "csrc", "tests", "benchmarks", "setup.py")
# Where other people's libraries are imported, by name and only if they are installed.
IMPORTS_BY_NAME = Path("ddpcore/bench/implementations.py")
SOURCES = {".py", ".h", ".cpp", ".cu", ".cuh"}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def python_files(root: Path) -> list[Path]:
    return sorted((root / "ddpcore").rglob("*.py"))


def module_of(root: Path, path: Path) -> list[str]:
    """The dotted name as a list; a package's ``__init__`` keeps its last part, so that relative imports resolve."""
    return list(path.relative_to(root).with_suffix("").parts)


def room_of(parts: list[str]) -> str:
    """What stands in FLOORS for ``ddpcore.room.more``; '' for ddpcore itself."""
    return parts[1] if len(parts) > 1 and parts[1] != "__init__" else ""


def imports_of(root: Path, path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, dotted name) of every module that is imported, at any depth."""
    here = module_of(root, path)
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:  # `from ddpcore import flat` is an import of ddpcore.flat
                is_room = len(base) == 1 and base[0] == "ddpcore" and alias.name in FLOORS
                yield node.lineno, [*base, alias.name] if is_room else base


def floor_complaints(root: Path) -> list[str]:
    complaints = []
    for path in python_files(root):
        room, where = room_of(module_of(root, path)), path.relative_to(root)
        if room not in FLOORS:
            complaints.append(f"{where}:1: {room!r} has no floor: add it to FLOORS")
            continue
        for line, target in imports_of(root, path):
            if room == "report" and target[0] == "torch":
                complaints.append(f"{where}:{line}: report imports torch")
            if target[0] != "ddpcore" or room_of(target) == room != "":
                continue
            other = room_of(target)
            if other not in FLOORS:
                complaints.append(f"{where}:{line}: imports {other!r}, which has no floor")
            elif room == "report":
                complaints.append(f"{where}:{line}: report imports ddpcore.{other}")
            elif FLOORS[other] >= FLOORS[room]:
                complaints.append(
                    f"{where}:{line}: {room or 'ddpcore'} (floor {FLOORS[room]:g}) imports "
                    f"{other or 'ddpcore'} (floor {FLOORS[other]:g})"
                )
    return complaints


def hidden_import_complaints(root: Path) -> list[str]:
    complaints = []
    for path in python_files(root):
        where = path.relative_to(root)
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Import | ast.ImportFrom):
                        complaints.append(f"{where}:{inner.lineno}: an import inside a function")
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            name = node.name if isinstance(node, ast.alias) else name
            if name == "import_module" and where == IMPORTS_BY_NAME:
                continue
            if name in ("TYPE_CHECKING", "__import__", "import_module"):
                complaints.append(f"{where}:{node.lineno}: {name} hides an import")
    return sorted(set(complaints))


def environment_complaints(root: Path) -> list[str]:
    complaints = []
    for path in python_files(root):
        where = path.relative_to(root)
        if where == Path("ddpcore/launch.py"):
            continue
        for node in ast.walk(parse(path)):
            name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
            if name in ("environ", "environb", "getenv", "putenv"):
                complaints.append(f"{where}:{node.lineno}: only launch.py reads the environment")
    return complaints


def size_complaints(root: Path, exceptions: dict[str, str]) -> list[str]:
    complaints = []
    for top in SIZED:
        for path in [root / top] if top.endswith(".py") else sorted((root / top).rglob("*")):
            if path.suffix not in SOURCES or not path.is_file():
                continue
            where = str(path.relative_to(root))
            num_lines = len(path.read_text().splitlines())
            if num_lines > MAX_FILE_LINES and where not in exceptions:
                complaints.append(f"{where}:{num_lines}: more than {MAX_FILE_LINES} lines")
            for node in ast.walk(parse(path)) if path.suffix == ".py" else ():
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES and f"{where}:{node.name}" not in exceptions:
                    complaints.append(f"{where}:{node.lineno}: {node.name} has {num_lines} lines, at most 60")
    return complaints


def docstring_complaints(root: Path) -> list[str]:
    complaints = []

    def visit(where: Path, node: ast.Module | ast.ClassDef) -> None:
        for child in node.body:
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if child.name.startswith("_"):
                continue
            if ast.get_docstring(child) is None:
                complaints.append(f"{where}:{child.lineno}: {child.name} has no docstring")
            if isinstance(child, ast.ClassDef):
                visit(where, child)

    for path in python_files(root):
        tree = parse(path)
        if ast.get_docstring(tree) is None:
            complaints.append(f"{path.relative_to(root)}:1: no module docstring")
        visit(path.relative_to(root), tree)
    return complaints


def names_bound_in(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
    return names


def export_complaints(root: Path) -> list[str]:
    complaints = []
    for path in python_files(root):
        tree = parse(path)
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
            ):
                for name in sorted(set(ast.literal_eval(node.value)) - names_bound_in(tree)):
                    complaints.append(
                        f"{path.relative_to(root)}:{node.lineno}: __all__ names {name}, which is not there"
                    )
    return complaints


def mirror_complaints(root: Path) -> list[str]:
    """Every folder of tests is named after the room it tests; tests/cpp and tests/cuda_on_cpu are those of csrc."""
    rooms = {path.name for path in (root / "ddpcore").iterdir() if path.is_dir()} | {"cpp", "cuda_on_cpu"}
    folders = {path.parent for path in (root / "tests").rglob("test_*")} - {root / "tests"}
    return [
        f"{folder.relative_to(root)}:1: there is no ddpcore/{folder.name}"
        for folder in sorted(folders)
        if folder.name not in rooms
    ]


def assert_none(complaints: list[str]) -> None:
    assert not complaints, "\n" + "\n".join(complaints)


def test_imports_point_down():
    assert_none(floor_complaints(ROOT))


def test_no_import_is_hidden():
    assert_none(hidden_import_complaints(ROOT))


def test_only_launch_reads_the_environment():
    assert_none(environment_complaints(ROOT))


def test_files_and_functions_are_short():
    assert_none(size_complaints(ROOT, EXCEPTIONS))


def test_every_exception_is_needed():
    needed = size_complaints(ROOT, {})
    for entry in EXCEPTIONS:
        path, _, function = entry.partition(":")
        assert any(c.startswith(f"{path}:") and function in c for c in needed), f"{entry} is no exception any more"


def test_public_names_have_docstrings():
    assert_none(docstring_complaints(ROOT))


def test_exported_names_exist():
    assert_none(export_complaints(ROOT))


def test_tests_mirror_the_rooms():
    assert_none(mirror_complaints(ROOT))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


LONG = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
BAD_PYTHON = {
    "a higher floor": (floor_complaints, "flat.py", "from ddpcore.comm import base", "flat.py:1: flat .* imports comm"),
    "the same floor": (floor_complaints, "flat.py", "\nimport ddpcore.topology", "flat.py:2: flat .* imports topology"),
    "by package": (floor_complaints, "optim/sgd.py", "from ddpcore import comm", "optim.sgd.py:1: .* imports comm"),
    "relatively": (floor_complaints, "optim/sgd.py", "from ..engine import x", "optim.sgd.py:1: .* imports engine"),
    "next to it": (floor_complaints, "optim/sgd.py", "from .. import engine", "optim.sgd.py:1: .* imports engine"),
    "the facade": (floor_complaints, "comm/base.py", "from ddpcore import DPSGD", r"imports ddpcore \(floor 6.5\)"),
    "a bench": (floor_complaints, "engine/x.py", "import ddpcore.bench.run", "engine.x.py:1: .* imports bench"),
    "in a function": (floor_complaints, "flat.py", "def f():\n    import ddpcore.bench", "flat.py:2: .* imports bench"),
    "in the facade": (
        floor_complaints,
        "__init__.py",
        "import ddpcore.bench",
        "__init__.py:1: ddpcore .* imports bench",
    ),
    "no floor": (floor_complaints, "attic.py", "", "'attic' has no floor"),
    "imports no floor": (floor_complaints, "bench/x.py", "import ddpcore.attic", "'attic', which has no floor"),
    "report and torch": (floor_complaints, "report/x.py", "import torch.nn", "report.x.py:1: report imports torch"),
    "report and us": (floor_complaints, "report/x.py", "from ddpcore import metrics", "report imports ddpcore.metrics"),
    "function import": (hidden_import_complaints, "x.py", "def f():\n    import os", "x.py:2: .* inside a function"),
    "method import": (hidden_import_complaints, "x.py", "class A:\n  def f(s):\n    from os import path", "x.py:3"),
    "checking": (hidden_import_complaints, "x.py", "from typing import TYPE_CHECKING", "x.py:1: TYPE_CHECKING"),
    "checking by dot": (hidden_import_complaints, "x.py", "import typing\nif typing.TYPE_CHECKING: pass", "x.py:2"),
    "by name": (hidden_import_complaints, "x.py", "import importlib\nimportlib.import_module('os')", "x.py:2"),
    "environ": (environment_complaints, "x.py", "import os\nos.environ['A']", "x.py:2: only launch.py"),
    "getenv": (environment_complaints, "engine/launch.py", "from os import getenv", "launch.py:1: only launch.py"),
    "long function": (lambda root: size_complaints(root, {}), "x.py", LONG, "x.py:1: f has 61 lines"),
    "long file": (lambda root: size_complaints(root, {}), "x.py", "\n" * 401, "x.py:401: more than 400 lines"),
    "function": (docstring_complaints, "x.py", '"""A."""\ndef f(): pass', "x.py:2: f has no docstring"),
    "class": (docstring_complaints, "x.py", '"""A."""\nclass A: pass', "x.py:2: A has no docstring"),
    "method": (docstring_complaints, "x.py", '"""A."""\nclass A:\n  """B."""\n  def f(self): pass', "x.py:4: f has no"),
    "module": (docstring_complaints, "x.py", "", "x.py:1: no module docstring"),
    "export": (export_complaints, "x.py", "import os\n__all__ = ['os', 'gone']", "x.py:2: __all__ names gone"),
}


@pytest.mark.parametrize("case", BAD_PYTHON)
def test_bad_python_is_seen(case, tmp_path):
    rule, name, text, message = BAD_PYTHON[case]
    write(tmp_path, {f"ddpcore/{name}": text})
    complaints = rule(tmp_path)
    assert len(complaints) == 1 and re.search(message, complaints[0]), complaints


def test_good_python_passes(tmp_path):
    write(tmp_path, {
        "ddpcore/__init__.py": '"""A."""\nfrom ddpcore.parallel import x\nfrom .topology import y\n__all__ = ["x"]',
        "ddpcore/optim/sgd.py": '"""A."""\nimport torch\nfrom . import base\nfrom ddpcore import ops, flat',
        "ddpcore/launch.py": '"""A."""\nimport os\nos.environ.get("RANK")\ndef _f(): pass',
        str(IMPORTS_BY_NAME): '"""A."""\nimport importlib\nimportlib.import_module("timm")',
        "ddpcore/bench/x.py": '"""A."""\nimport ddpcore\nfrom ddpcore.bench import y\nfrom ddpcore.report import z',
    })  # fmt: skip
    for rule in (floor_complaints, hidden_import_complaints, environment_complaints, export_complaints):
        assert_none(rule(tmp_path))
    assert_none(docstring_complaints(tmp_path) + size_complaints(tmp_path, {}))


@pytest.mark.parametrize("name", ["csrc/cpu/x.h", "tests/x.py", "benchmarks/x.py", "setup.py", "csrc/cuda/x.cu"])
def test_long_files_are_seen_and_excused(name, tmp_path):
    write(tmp_path, {name: "\n" * 401})
    assert size_complaints(tmp_path, {}) == [f"{name}:401: more than 400 lines"]
    assert size_complaints(tmp_path, {name: "a table"}) == []


def test_a_test_folder_without_a_room_is_seen(tmp_path):
    write(
        tmp_path,
        {"ddpcore/ops/x.py": "", "tests/ops/test_x.py": "", "tests/attic/test_y.py": "", "tests/test_z.py": ""},
    )
    assert mirror_complaints(tmp_path) == ["tests/attic:1: there is no ddpcore/attic"]
