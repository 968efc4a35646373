"""The layers of ``docs/architecture.md`` hold: imports point down, files are short, tests mirror the tree.

Each rule is a function from a root to complaints ``path:line: what``, so that the tests below can prove it red on
made-up files before they hold it against the repository. Docstrings, exports, hidden imports and readers of the
environment are ruff's (``pyproject.toml``); the rules for kernels are in ``test_architecture_kernels.py``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| (\d+) \| `(?:ddpcore/)?([a-z_]+)(?:/|\.py)?` \|", re.MULTILINE)  # of the page's table
MAX_LAYERS, MAX_PARTS, MAX_ARROWS = 10, 24, 97
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_FLOORS = 6  # files of the longest chain of imports inside a part
# "path" or "path:function" -> why it may be longer.
EXCEPTIONS: dict[str, str] = {}
SIZED = ("ddpcore", "csrc", "tests", "benchmarks", "examples", "setup.py")
SOURCES = {".py", ".h", ".cpp", ".cu", ".cuh"}
# Files above the strategies that train with some by name, and decide nothing by it.
NAMING = {
    "ddpcore/bench/demo.py": "it shows two strategies",
    "ddpcore/testing/optimizer.py": "it trains an optimizer with and without averages",
}
BENCHMARKS, FACADE = "benchmarks", "__init__"
ENTRY = "__main__"  # python -m ddpcore needs this file; it starts a command by name and imports nothing


def layers_of(root: Path) -> dict[str, int]:
    """Part -> layer, lowest first, as the page's table says."""
    return {part: int(layer) for layer, part in ROW.findall((root / "docs" / "architecture.md").read_text())}


@cache
def parsed(text: str) -> ast.Module:
    """Most rules read the same files of the package."""
    return ast.parse(text)


@pytest.fixture(scope="module", autouse=True)
def parsed_here_alone() -> Iterator[None]:
    """The trees take memory."""
    yield
    parsed.cache_clear()


def parse(path: Path) -> ast.Module:
    return parsed(path.read_text())


def part_of(dotted: list[str]) -> str:
    """Of a dotted name: ``ddpcore.part.more``, ``ddpcore`` itself, or a benchmark."""
    return BENCHMARKS if dotted[0] == BENCHMARKS else dotted[1] if len(dotted) > 1 else FACADE


def imports_of(root: Path, path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, dotted name) of every module of ddpcore that is imported, at any depth."""
    here = list(path.relative_to(root).with_suffix("").parts)
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            is_package = base == ["ddpcore"]  # `from ddpcore import models` is an import of ddpcore.models
            inside = {alias.name for alias in node.names if (root / "ddpcore" / alias.name).exists()}
            found = [[*base, alias.name] if is_package and alias.name in inside else base for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in found if name[0] == "ddpcore")


def arrows_of(root: Path) -> Iterator[tuple[Path, int, str, str]]:
    """(file, line, importing part, imported part) of every import that leaves its part."""
    for top in ("ddpcore", BENCHMARKS):
        for path in sorted((root / top).rglob("*.py")):
            where = path.relative_to(root)
            part = part_of(list(where.with_suffix("").parts))
            for line, target in imports_of(root, path):
                if part_of(target) != part:
                    yield where, line, part, part_of(target)


def layer_complaints(root: Path) -> list[str]:
    layers, complaints = layers_of(root), []
    for path in sorted((root / "ddpcore").iterdir()):
        name = path.stem
        if name not in ("__pycache__", ENTRY) and path.suffix in ("", ".py") and name not in layers:
            complaints.append(f"ddpcore/{path.name}:1: {name!r} has no layer: add it to the table")
    for where, line, part, other in arrows_of(root):
        if other not in layers and not (root / "ddpcore" / other).exists():
            continue  # a compiled module
        if other not in layers:
            complaints.append(f"{where}:{line}: imports {other!r}, which has no layer")
        elif part in layers and layers[other] >= layers[part]:
            complaints.append(f"{where}:{line}: {part} (layer {layers[part]}) imports {other} (layer {layers[other]})")
    return complaints


def module_name(root: Path, path: Path) -> str:
    """The dotted name of a module; a package is named by its folder."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floors_of(root: Path, part: Path) -> list[str]:
    """The longest chain of imports between the modules of a part. What ``__init__.py`` gathers does not count."""
    paths = {module_name(root, path): path for path in sorted(part.rglob("*.py"))}
    below: dict[str, set[str]] = {}
    for name, path in paths.items():
        nodes = [node for node in ast.walk(parse(path)) if isinstance(node, ast.ImportFrom) and node.module]
        found = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names} | {
            node.module for node in nodes
        }
        below[name] = {other for other in found if other in paths and other != name and paths[other].stem != FACADE}

    @cache
    def longest(name: str) -> tuple[str, ...]:
        return (name, *max(map(longest, sorted(below[name])), key=len, default=()))

    return list(max(map(longest, below), key=len, default=()))


def floor_complaints(root: Path) -> list[str]:
    chains = [floors_of(root, part) for part in sorted((root / "ddpcore").iterdir()) if part.is_dir()]
    return [f"{len(chain)} files deep: {' -> '.join(chain)}" for chain in chains if len(chain) > MAX_FLOORS]


def concrete_classes(root: Path) -> dict[str, str]:
    """Class -> its part, of strategies and communicators that are not interfaces, and of the optimizers."""
    tops = {"strategies": {"Strategy", "Baseline"}, "comm": {"Communicator"}, "optim": {"Optimizer", "FusedOptimizer"}}
    found: dict[str, str] = {}
    for part, bases in tops.items():
        known = set(bases)
        classes = [
            node
            for path in sorted((root / "ddpcore" / part).rglob("*.py"))
            for node in ast.walk(parse(path))
            if isinstance(node, ast.ClassDef)
        ]
        for _ in classes:  # until no further subclass is found
            for node in classes:
                if {
                    base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases
                } & known:
                    known.add(node.name)
        found |= dict.fromkeys(known - bases, part)
    return found


def concrete_complaints(root: Path) -> list[str]:
    """Places above a part that ask for one of its concrete classes, so that a user's own class could not answer."""
    layers, concrete, complaints = layers_of(root), concrete_classes(root), []
    for path in sorted((root / "ddpcore").rglob("*.py")):
        part = part_of(list(path.relative_to(root).with_suffix("").parts))
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "isinstance":
                continue
            names = [one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name) and one.id in concrete]
            for name in names:
                if concrete[name] != part and layers.get(part, 0) > layers[concrete[name]]:
                    where = path.relative_to(root)
                    complaints.append(
                        f"{where}:{node.lineno}: asks for {name}: ask its interface what it needs to know"
                    )
    return complaints


def strategy_names(root: Path, classes: set[str]) -> set[str]:
    """The short names of these strategies: the ``name`` of each class."""
    return {
        node.value.value
        for path in sorted((root / "ddpcore" / "strategies").rglob("*.py"))
        for one in ast.walk(parse(path))
        if isinstance(one, ast.ClassDef) and one.name in classes
        for node in one.body
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Constant)
        if ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]) == "name"
    }


def asked_names(node: ast.AST, names: set[str], classes: set[str]) -> list[str]:
    """The strategies' names in a comparison or a match: literals, and ``.name`` of a class or of a ``strategy``."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        parts = [part for side in sides for part in [side, *getattr(side, "elts", ())]]
    elif isinstance(node, ast.MatchValue):
        parts = [node.value]
    else:
        return []
    literals = [part.value for part in parts if isinstance(part, ast.Constant) and part.value in names]
    owners = [ast.unparse(part.value) for part in parts if isinstance(part, ast.Attribute) and part.attr == "name"]
    return literals + [f"{one}.name" for one in owners if one in classes or one.lower().endswith("strategy")]


def strategy_complaints(root: Path) -> list[str]:
    """Places above the strategies that name a class of one, or compare with its name, so that no other can be meant."""
    layers, complaints = layers_of(root), []
    concrete = {name for name, part in concrete_classes(root).items() if part == "strategies"}
    names = strategy_names(root, concrete)
    for path in sorted((root / "ddpcore").rglob("*.py")):
        where = str(path.relative_to(root))
        part = part_of(list(path.relative_to(root).with_suffix("").parts))
        if part == FACADE or layers.get(part, 0) <= layers["strategies"]:
            continue
        for node in ast.walk(parse(path)):
            found = asked_names(node, names, concrete)
            if isinstance(node, ast.ImportFrom) and where not in NAMING:
                found = [alias.name for alias in node.names if alias.name in concrete]
            line = getattr(node, "lineno", 0)
            complaints += [f"{where}:{line}: names {one}: ask Traits, plan() or the registry" for one in found]
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
            for node in ast.walk(ast.parse(path.read_text())) if path.suffix == ".py" else ():
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES and f"{where}:{node.name}" not in exceptions:
                    complaints.append(f"{where}:{node.lineno}: {node.name} has {num_lines} lines, at most 60")
    return complaints


def mirror_complaints(root: Path) -> list[str]:
    """Every folder of tests is named after the folder it tests; tests/cpp and tests/cuda_on_cpu are those of csrc."""
    others = {Path(name) for name in ("cpp", "cuda_on_cpu", BENCHMARKS, "docs", "examples", "fuzz", "multihost")}
    folders = {path.parent.relative_to(root / "tests") for path in (root / "tests").rglob("test_*")} - {Path()}
    folders = {folder for folder in folders if folder.name != "__pycache__"}
    return [
        f"tests/{folder}:1: there is no ddpcore/{folder}"
        for folder in sorted(folders)
        if folder not in others and not (root / "ddpcore" / folder).is_dir()
    ]


def export_complaints(root: Path) -> list[str]:
    """A name is exported by one package: there is one way to import it."""
    owners: dict[str, list[str]] = {}
    for path in sorted((root / "ddpcore").rglob("__init__.py")):
        for node in parse(path).body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
            ):
                for name in ast.literal_eval(node.value):
                    owners.setdefault(name, []).append(str(path.relative_to(root)))
    return [f"{name} is exported by {' and '.join(found)}" for name, found in owners.items() if len(found) > 1]


def assert_none(complaints: list[str]) -> None:
    assert not complaints, "\n" + "\n".join(complaints)


def test_the_entry_imports_nothing():
    assert list(imports_of(ROOT, ROOT / "ddpcore" / f"{ENTRY}.py")) == []


def test_imports_point_down():
    assert_none(layer_complaints(ROOT))


def test_there_are_few_parts_layers_and_arrows():
    layers = layers_of(ROOT)
    arrows = {(part, other) for _, _, part, other in arrows_of(ROOT) if other in layers}
    assert set(layers.values()) == set(range(max(layers.values()) + 1))
    assert len(set(layers.values())) <= MAX_LAYERS
    assert len(layers) <= MAX_PARTS
    assert len(arrows) <= MAX_ARROWS, f"{len(arrows)} arrows: {sorted(arrows)}"


def test_files_and_functions_are_short():
    assert_none(size_complaints(ROOT, EXCEPTIONS))


def test_every_exception_is_needed():
    needed = size_complaints(ROOT, {}) if EXCEPTIONS else []
    for entry in EXCEPTIONS:
        path, _, function = entry.partition(":")
        assert any(c.startswith(f"{path}:") and function in c for c in needed), f"{entry} is no exception any more"


def test_parts_are_few_files_deep():
    assert_none(floor_complaints(ROOT))


def test_no_layer_asks_for_a_concrete_class():
    assert_none(concrete_complaints(ROOT))


def test_no_layer_names_a_strategy():
    assert_none(strategy_complaints(ROOT))


def test_tests_mirror_the_tree():
    assert_none(mirror_complaints(ROOT))


def test_a_public_name_has_one_import_path():
    assert_none(export_complaints(ROOT))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


TABLE = """
| layer | part | what |
| 1 | `ops/` | kernels |
| 2 | `topology/` | who |
| 2 | `optim/` | rules |
| 3 | `comm/` | sends |
| 4 | `__init__.py` | what a user imports |
| 5 | `bench/` | times |
| 6 | `benchmarks/` | more |
"""
LONG = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
BAD_IMPORTS = {
    "a higher layer": ("optim/x.py", "from ddpcore.comm import base", r"optim.x.py:1: optim \(layer 2\) imports comm"),
    "the same layer": ("optim/x.py", "\nimport ddpcore.topology", "optim.x.py:2: optim .* imports topology"),
    "by package": ("optim/x.py", "from ddpcore import comm", "optim.x.py:1: .* imports comm"),
    "relatively": ("optim/x.py", "from ..comm import x", "optim.x.py:1: .* imports comm"),
    "next to it": ("optim/x.py", "from .. import comm", "optim.x.py:1: .* imports comm"),
    "the facade": ("comm/base.py", "from ddpcore import DPSGD", r"imports __init__ \(layer 4\)"),
    "in a function": ("ops/x.py", "def f():\n    import ddpcore.bench", "ops.x.py:2: .* imports bench"),
    "in the facade": ("__init__.py", "import ddpcore.bench", "ddpcore.__init__.py:1: __init__ .* imports bench"),
    "no layer": ("attic.py", "", "attic.py:1: 'attic' has no layer"),
    "imports no layer": ("bench/x.py", "import ddpcore.attic", "'attic', which has no layer"),
}


@pytest.mark.parametrize("case", BAD_IMPORTS)
def test_bad_imports_are_reported(tmp_path, case):
    name, text, message = BAD_IMPORTS[case]
    folders = {f"ddpcore/{part}/__init__.py": "" for part in ("ops", "topology", "optim", "comm", "bench")}
    attic = {"ddpcore/attic/__init__.py": ""} if case == "imports no layer" else {}
    write(tmp_path, {"docs/architecture.md": TABLE, **folders, **attic, f"ddpcore/{name}": text})
    complaints = [found for found in layer_complaints(tmp_path) if re.search(message, found)]
    assert len(complaints) == 1, layer_complaints(tmp_path)


def test_good_imports_pass(tmp_path):
    write(tmp_path, {
        "docs/architecture.md": TABLE,
        "ddpcore/__init__.py": "from ddpcore.comm import x\nfrom .topology import y",
        "ddpcore/ops/__init__.py": "import torch",
        "ddpcore/comm/shared/coordination.py": "from .. import base\nimport ddpcore.ops",
        "benchmarks/x.py": "import ddpcore.bench",
    })  # fmt: skip
    assert layer_complaints(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ddpcore/x.py", "x = 1\n" * 501, "ddpcore/x.py:501: more than 500 lines"),
        ("csrc/cpu/x.cpp", "\n" * 501, "csrc/cpu/x.cpp:501: more than 500 lines"),
        ("tests/x.py", LONG, "tests/x.py:1: f has 61 lines, at most 60"),
    ],
)
def test_long_files_and_functions_are_reported(tmp_path, name, text, message):
    write(tmp_path, {"setup.py": "", name: text})
    assert size_complaints(tmp_path, {}) == [message]
    assert size_complaints(tmp_path, {name: "why", f"{name}:f": "why"}) == []


def test_a_second_way_to_import_is_reported(tmp_path):
    write(tmp_path, {"ddpcore/__init__.py": '__all__ = ["A"]', "ddpcore/ops/__init__.py": '__all__ = ["A", "B"]'})
    assert export_complaints(tmp_path) == ["A is exported by ddpcore/__init__.py and ddpcore/ops/__init__.py"]


def test_tests_of_nothing_are_reported(tmp_path):
    files = ["ddpcore/comm/shared/x.py", "tests/comm/shared/test_x.py", "tests/attic/test_y.py", "tests/test_z.py"]
    write(tmp_path, dict.fromkeys(files, ""))
    assert mirror_complaints(tmp_path) == ["tests/attic:1: there is no ddpcore/attic"]


def test_a_long_chain_of_imports_is_reported(tmp_path):
    names = [f"m{number}" for number in range(MAX_FLOORS + 1)]
    files = {f"ddpcore/comm/{one}.py": f"from ddpcore.comm.{other} import x" for one, other in pairwise(names)}
    write(tmp_path, {**files, f"ddpcore/comm/{names[-1]}.py": "", "ddpcore/comm/__init__.py": "from .m0 import x"})
    (complaint,) = floor_complaints(tmp_path)
    assert complaint.startswith(f"{MAX_FLOORS + 1} files deep: ddpcore.comm.m0 -> ddpcore.comm.m1 -> ")
    (tmp_path / "ddpcore/comm/m0.py").unlink()
    assert floor_complaints(tmp_path) == []


def test_a_question_for_a_concrete_class_is_reported(tmp_path):
    table = "| 1 | `comm/` | x |\n| 2 | `strategies/` | x |\n| 3 | `bench/` | x |\n| 0 | `optim/` | x |\n"
    write(tmp_path, {
        "docs/architecture.md": table,
        "ddpcore/comm/x.py": "class Communicator: ...\nclass Far(Communicator): ...\nisinstance(x, Far)",
        "ddpcore/strategies/x.py": "class Strategy: ...\nclass A(Strategy): ...\nclass B(A): ...",
        "ddpcore/optim/x.py": "",
        "ddpcore/bench/x.py": "isinstance(x, B)\nisinstance(x, (int, Far))\nisinstance(x, Strategy)",
    })  # fmt: skip
    found = [complaint.partition(": ask its")[0] for complaint in concrete_complaints(tmp_path)]
    assert found == ["ddpcore/bench/x.py:1: asks for B", "ddpcore/bench/x.py:2: asks for Far"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("if name == 'a': ...", "a"),
        ("if 'b' in names or name != 'other': ...", "b"),
        ("if name not in ('other', 'a'): ...", "a"),
        ("x = A.name in names", "A.name"),
        ("while config.strategy.name == other: ...", "config.strategy.name"),
        ("x = own_strategy.name != other", "own_strategy.name"),
        ("match name:\n    case 'b': ...", "b"),
        ("from ddpcore.strategies.x import B", "B"),
        ("from ddpcore import A", "A"),
        ("COMPARED = ('a', 'b')", None),
        ("if row.name == 'other' or strategy.traits == 'other': ...", None),
        ("from ddpcore.strategies.x import Strategy", None),
    ],
)
def test_a_comparison_with_a_strategy_is_reported(tmp_path, line, found):
    table = "| 0 | `optim/` | x |\n| 1 | `comm/` | x |\n| 2 | `strategies/` | x |\n| 3 | `bench/` | x |\n"
    text = "class Strategy: ...\nclass A(Strategy):\n    name: ClassVar[str] = 'a'\nclass B(A):\n    name = 'b'"
    write(tmp_path, {
        "docs/architecture.md": table,
        "ddpcore/strategies/x.py": text,
        "ddpcore/strategies/y.py": line,
        "ddpcore/bench/x.py": line,
    })  # fmt: skip
    complaints = [complaint.partition(": ask")[0] for complaint in strategy_complaints(tmp_path)]
    where = 2 if line.startswith("match") else 1
    assert complaints == ([] if found is None else [f"ddpcore/bench/x.py:{where}: names {found}"])
