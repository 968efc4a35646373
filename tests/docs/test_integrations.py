"""Every script of ``docs/integrations.md`` and ``docs/trainers.md`` runs with the real packages."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import forked, ranks

TRAINING = ranks.ROOT / "docs" / "training.md"
PAGES = "".join((ranks.ROOT / "docs" / name).read_text() for name in ("integrations.md", "trainers.md"))
SCRIPTS = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGES, re.MULTILINE | re.DOTALL))
PRINTED = {
    "lightning_lamb.py": "the resumed run has the same bits",
    "accelerate_lamb.py": "the resumed run has the same bits",
    "transformers_lamb.py": "the resumed run has the same bits",
    "fabric_gossip.py": "2 ranks, consensus distance ",
    "lightning_virtual.py": "24 steps, consensus distance ",
    "lightning_gossip.py": "accuracy of the averaged model ",
    "transformers_gossip.py": "loss of the averaged model 0.",
    "accelerate_gossip.py": "accuracy of the averaged model ",
    "other_learners.py": "3 learners, 2 steps",
}
ON_RANKS = ("fabric_gossip.py", "transformers_gossip.py", "accelerate_gossip.py")


# What each script would import again, with the parts that transformers imports when they are first used.
IMPORTS = "\n".join(
    [
        *(
            ast.unparse(line)
            for text in SCRIPTS.values()
            for line in ast.parse(text).body
            if isinstance(line, ast.Import | ast.ImportFrom)
        ),
        "from transformers import BertForSequenceClassification, Trainer",
    ]
)


def run(script: str, text: str, folder: Path) -> tuple[int | None, str, str]:
    """The exit code of a script, as a process of its own, and what it prints and says."""
    (folder / script).write_text(text)
    started = forked.imported(IMPORTS, ranks.environment()).start([script], folder, ranks.environment(), folder)
    started.join(ranks.LIMIT)
    code = started.exitcode
    started.kill()
    return code, *forked.output(folder)


def test_every_script_of_the_page_is_known() -> None:
    assert set(SCRIPTS) == set(PRINTED)
    assert PAGES.count("```python") == len(SCRIPTS)
    for name, text in SCRIPTS.items():
        compile(text, name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("script", PRINTED)
def test_a_script_runs(script: str, tmp_path: Path) -> None:
    code, printed, said = run(script, SCRIPTS[script], tmp_path)
    assert code == 0, printed + said
    assert PRINTED[script] in printed


@pytest.mark.slow
@pytest.mark.parametrize("script", ON_RANKS)
def test_a_script_runs_on_ranks(script: str, tmp_path: Path) -> None:
    """With the variables of torchrun."""
    (tmp_path / script).write_text(SCRIPTS[script])
    start = forked.imported(IMPORTS, ranks.environment()).start
    first, second = ranks.printed(ranks.as_torchrun([script], tmp_path, start=start))
    assert PRINTED[script] in first and PRINTED[script] not in second


@pytest.mark.slow
def test_a_script_runs_under_torchrun(tmp_path: Path) -> None:
    """The start itself, with one of them."""
    script = ON_RANKS[-1]
    (tmp_path / script).write_text(SCRIPTS[script])
    done = ranks.torchrun([script], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert PRINTED[script] in done.stdout, done.stdout


@pytest.mark.slow
def test_lightning_refuses_to_clip_beside_mixed_precision(tmp_path: Path) -> None:
    """As the page says: if this passes one day, the page must change."""
    text = SCRIPTS["lightning_lamb.py"].replace("logger=False", "logger=False, gradient_clip_val=1.0")
    assert text != SCRIPTS["lightning_lamb.py"]
    code, _, said = run("clipped.py", text, tmp_path)
    assert code == 1
    assert "The current optimizer, FusedLAMB, does not allow for gradient clipping" in said


@pytest.mark.slow
def test_wandb_takes_the_rows_of_a_record(tmp_path: Path) -> None:
    """The block of ``docs/training.md``, after a shorter config than that of the page. It writes offline."""
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed: pip install wandb")
    (block,) = re.findall(r"^```python\n(import wandb\n.*?)^```$", TRAINING.read_text(), re.MULTILINE | re.DOTALL)
    before = (
        "from ddpcore.training import TrainConfig, train\n"
        "config = TrainConfig.from_dict({'model': 'mlp', 'data': {'name': 'digits', 'batch_size': 100},\n"
        "    'strategy': {'name': 'dpsgd', 'learners': 4}, 'run': {'epochs': 2}})\n"
    )
    after = "print(log.summary['epoch/train_loss'])\nlog.finish()\n"
    (tmp_path / "log.py").write_text(before + block + after)
    done = subprocess.run(
        [sys.executable, "log.py"],
        cwd=tmp_path,
        env={**ranks.environment(), "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout.split()[-1]) > 0
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb")), "the rows are on the disk"
