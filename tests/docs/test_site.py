"""The documentation site builds without a warning, its links lead somewhere, and every public name has a reference."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import ddpcore
from helpers.ranks import ROOT, environment

pytestmark = pytest.mark.slow

PROSE = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as ``make docs`` builds it."""
    if missing := [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed: pip install 'ddpcore[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html", "docs", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Page(HTMLParser):
    """The links, the pictures and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if anchor := found.get("id"):
            self.anchors.add(anchor)
        name = {"a": "href", "link": "href", "img": "src", "script": "src"}.get(tag, "")
        if target := found.get(name):
            self.targets.add(target)


def test_every_link_inside_the_site_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    broken, checked = [], 0
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = pages.get(file)
            if not file.is_file() or (parts.fragment and there and unquote(parts.fragment) not in there.anchors):
                broken.append(f"{path.relative_to(site)}: {target}")
            checked += 1
    assert not broken, "\n" + "\n".join(sorted(broken))
    assert checked > 1000


@pytest.mark.parametrize("page", ["README.md", "examples/README.md", "CHANGELOG.md"])
def test_every_link_of_a_page_outside_the_site_leads_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#\s]+)(?:#([\w-]+))?\)", path.read_text())
    broken = [link for link, _ in links if "://" not in link and not (path.parent / link).exists()]
    assert links and not broken


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]+)"', path.read_text())
        assert not loaded, (path, loaded)


def test_every_page_names_its_icon(site: Path) -> None:
    """A browser asks the server for ``/favicon.ico`` otherwise, and prints an error into its console."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    assert all(re.search('<link rel="shortcut icon" href="[^"]*icon.svg', path.read_text()) for path in pages)


def exported() -> Iterator[str]:
    """``package.name`` for every name of the ``__all__`` of every package."""
    for module in [ddpcore.__name__, *(f"ddpcore.{found.name}" for found in pkgutil.iter_modules(ddpcore.__path__))]:
        path = ROOT / Path(*module.split(".")) / "__init__.py"
        for node in ast.parse(path.read_text()).body if path.is_file() else ():
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                yield from (f"{module}.{name}" for name in ast.literal_eval(node.value))


def mentioned() -> Iterator[str]:
    """Every dotted name of ddpcore in the README and in the pages that is a class, a function or a value."""
    for page in PROSE:
        text = page.read_text()
        found = set(re.findall(r"\bddpcore(?:\.\w+)+", text))
        for module, names in re.findall(r"^from (ddpcore[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
            found |= {f"{module}.{name.strip()}" for name in names.split(",")}
        yield from (name for name in found if is_object(name))


def is_object(dotted: str) -> bool:
    owner, _, name = dotted.rpartition(".")
    try:
        module = importlib.import_module(owner)
    except ImportError:
        return False  # a module, a file, or an attribute of a class, which the reference of the class has
    return not name.startswith("_") and hasattr(module, name) and not hasattr(getattr(module, name), "__path__")


@pytest.mark.parametrize("names", [exported, mentioned])
def test_every_public_name_has_a_reference(site: Path, names: object) -> None:
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, target: target)
    known = {name for kind, entries in inventory.items() if kind.startswith("py:") for name in entries}
    wanted = set(names())
    assert len(wanted) > 20
    missing = sorted(wanted - known)
    assert not missing, f"add them to a page of docs/reference/, and give each a docstring: {missing}"
