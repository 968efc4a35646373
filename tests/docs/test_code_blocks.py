"""Every block of code in the README and in ``docs/`` says what it is, and runs if it can.

- ``python`` runs, in the order of the page, in one namespace. A page whose blocks another test runs says so:
  ``<!-- run by tests/... -->``. A single block that cannot run has ``<!-- not run: the reason -->`` before it.
- ``sh`` holds commands: scripts exist, and flags of the bench and the experiments are accepted.
- ``diff`` shows what changes in a program: both sides run.
- ``text`` is output or a drawing. The pages of ``docs/results`` are left out: their commands take hours.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpcore
from ddpcore.__main__ import COMMANDS as PROGRAMS
from ddpcore.bench.commands import COMMANDS
from ddpcore.experiments.commands import parse
from ddpcore.options import command_line
from helpers.ranks import ROOT

RESULTS = ROOT / "docs" / "results"
FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
RUN_BY = re.compile(r"<!-- run by (tests/[\w/]+\.py) -->")
NOT_RUN = re.compile(r"<!-- not run: .{10,} -->\n+$")
KINDS = {"python", "sh", "toml", "cpp", "text", "diff"}


class Block(NamedTuple):
    """A fenced block: the page, its first line, the word after the fence, the text, and what stands before it."""

    page: Path
    line: int
    kind: str
    text: str
    before: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(page, text[: m.start()].count("\n") + 1, m[2], m[3], text[: m.start()]) for m in FENCE.finditer(text)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md"]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if RESULTS not in page.parents)
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN_HERE = [
    page
    for page in PAGES
    if not RUN_BY.search(page.read_text()) and any(block.kind == "python" for block in blocks_of(page))
]


def usual_names() -> dict[str, Any]:
    """What fragments leave out: a model, an optimizer, a loss, batches, the step, weights to mix."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(3)]
    return {
        "__name__": "page",  # so that a block for ranks does not start them
        "torch": torch,
        "ddpcore": ddpcore,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": loader,
        "loss_fn": nn.functional.cross_entropy,
        "step": 3,
        "weights": torch.randn(100),
        "peers": [torch.randn(100)],
    }


@pytest.fixture
def as_one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The variables of torchrun for a world of one, so that a block may call ``init_process_group``."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_every_block_says_what_it_is() -> None:
    wrong = [
        f"{name_of(b.page)}:{b.line}: ```{b.kind}: use one of {sorted(KINDS)}, or a directive"
        for b in BLOCKS
        if b.kind not in KINDS and not b.kind.startswith("{")
    ]
    assert not wrong, "\n" + "\n".join(wrong)
    assert len(BLOCKS) > 60


def test_what_another_test_runs_is_run_there() -> None:
    found = [(page, test) for page in PAGES for test in RUN_BY.findall(page.read_text())]
    assert len(found) >= 4
    for page, test in found:
        assert f'"{page.name}"' in (ROOT / test).read_text(), f"{test} does not read {page.name}"


@pytest.mark.usefixtures("as_one_rank")
@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names, num_run = usual_names(), 0
    for block in blocks_of(page):
        if block.kind == "python":
            # The empty lines make a traceback name the line of the page.
            code = compile("\n" * block.line + block.text, str(page), "exec")
            if not NOT_RUN.search(block.before):
                exec(code, names)
                num_run += 1
    assert num_run >= 1, "no block of this page runs: let it be run, or mark it as text"


@pytest.mark.usefixtures("as_one_rank")
@pytest.mark.parametrize("side", "-+")
def test_both_sides_of_a_diff_run(side: str) -> None:
    (block,) = (block for block in BLOCKS if block.kind == "diff")
    lines = block.text.splitlines()
    names = usual_names()
    exec("\n".join(line[1:] for line in lines if line[:1] in ("", " ", side)), names)
    trained = names["trained"]
    assert not torch.equal(trained[0].weight, usual_names()["model"][0].weight)
    assert type(trained) is nn.Sequential
    assert sum(line.startswith(side) for line in lines) in (2, 3)


def commands() -> Iterator[tuple[str, str]]:
    """(page and line, command) of the pages whose commands no other test runs."""
    for block in BLOCKS:
        if block.kind == "sh" and not RUN_BY.search(block.page.read_text()):
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := line.split("  #")[0].strip():
                    yield f"{name_of(block.page)}:{block.line}", words


@pytest.mark.parametrize(("where", "command"), list(commands()))
def test_a_command_is_accepted(where: str, command: str) -> None:
    program, *words = shlex.split(command)
    if program == "ddpcore":
        assert accepted("ddpcore", words)
    elif program == "python" and words[0] == "-m":
        assert accepted(words[1], words[2:])
    elif program == "make":
        targets = [word for word in words if "=" not in word and not word.startswith("-")]
        assert set(targets) <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    elif program in ("python", "torchrun"):
        (script,) = [word for word in words if word.endswith(".py")]
        flags = [word for word in words[words.index(script) + 1 :] if word.startswith("--")]
        text = (ROOT / script).read_text()
        assert all(f'"{flag}"' in text for flag in flags), f"{script} lacks one of {flags}"
    else:
        assert program in ("pip", "source") or (ROOT / program).is_file(), where


def accepted(module: str, words: list[str]) -> bool:
    """Whether the program's own parser takes the words."""
    if module == "ddpcore":
        module, first, _ = PROGRAMS[words[0]]
        words = [*first, *words[1:]]
    if module == "ddpcore.bench":
        name = words.pop(0) if words and not words[0].startswith("-") else ""
        return command_line.parse(COMMANDS[name].options, words, prog=name, epilog="") is not None
    if module == "ddpcore.experiments":
        return parse(words) is not None
    return any((ROOT / Path(*module.split("."))).with_suffix(end).exists() for end in (".py", ""))
