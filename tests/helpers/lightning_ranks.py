"""Ranks of ``tests/integrations/test_lightning.py``: Lightning's Trainer with its DDP and with ddpcore's strategies."""

from __future__ import annotations

import copy
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddpcore import LocalSGD, NoisySSGD
from ddpcore.distributed.saved import run_state
from ddpcore.integrations.lightning import GossipStrategy
from ddpcore.optim import FusedAdamW, FusedSGD
from helpers import ranks


class Classifier(lightning.LightningModule):
    """Records what each step and each validation saw."""

    def __init__(self, make: Any = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
        self.make = make or (lambda parameters: FusedSGD(parameters, lr=0.1, momentum=0.9))
        self.losses: list[float] = []
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)
        self.seen.append(flat(self))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return self.make(self.net.parameters())


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.net.parameters()]).clone()


def loader() -> DataLoader:
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), batch_size=8, shuffle=True)


def fit(folder: Path, strategy: Any, epochs: int, resume: Any = None, make: Any = None, **more: Any) -> Any:
    lightning.seed_everything(7 + int(os.environ.get("RANK", 0)), verbose=False)
    module = more.pop("module", partial(Classifier, make))()
    module.automatic_optimization = more.pop("automatic", True)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **{"enable_checkpointing": False, **more},
    )
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    return trainer, module


class Observed(Classifier):
    """Computes with its weights in many places of an evaluation, and counts samples in a buffer."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0.0))
        self.fails, self.counts, self.distances = fails, [], []
        self.listed = list(self.net.parameters())
        self.found: dict[str, list[torch.Tensor]] = {"list": [], "hook": [], "buffer": []}

    def validation_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch, index)
        self.count += len(batch[0])
        self.found["list"].append(torch.cat([one.detach().reshape(-1) for one in self.listed]))
        self.found["buffer"].append(self.net[1].running_mean.clone())
        if self.fails:
            raise ValueError("a failing validation")

    def on_validation_epoch_end(self) -> None:
        self.found["hook"].append(flat(self))
        self.distances.append(self.trainer.strategy.handle.consensus_distance())
        self.state = refused(lambda: run_state(self.trainer.strategy.handle))
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "observed.ckpt")
        self.counts.append(self.count.item())
        self.count.zero_()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end


def refused(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def check(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    plain = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731
    for name, strategy in {"ddp": "ddp", "ssgd": "ddpcore-ssgd"}.items():
        _, module = fit(folder, strategy, 2, make=plain, **options)
        found[name] = (module.losses, flat(module))
    for name in ("ddpcore-dpsgd", "ddpcore-ssgd", "ddpcore-adpsgd"):
        found[name] = resumed(folder, name)
    found["local"] = resumed(folder, lambda: GossipStrategy(LocalSGD(period=3, outer=outer)))
    for precision in ("bf16-mixed",):  # without clipping, which Lightning refuses for optimizers that unscale
        _, module = fit(folder, "ddpcore-dpsgd", 1, precision=precision, accumulate_grad_batches=2)
        found[precision] = module.losses
    found["evaluations"] = evaluations(folder)
    found["trainers"] = trainers(folder)
    found["moves"] = moves(folder)
    found["noises"] = noises(folder)
    found["refused"] = refusals(folder)
    return found


def outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def resumed(folder: Path, make: Any) -> dict[str, Any]:
    """Four epochs at once, and two and two."""
    made = (lambda: make) if isinstance(make, str) else make
    saved = str(folder / f"{make if isinstance(make, str) else 'local'}.ckpt")
    whole_trainer, whole = fit(folder, made(), 4)
    half_trainer, half = fit(folder, made(), 2)
    before = flat(half)
    half_trainer.save_checkpoint(saved)
    _, later = fit(folder, made(), 4, resume=saved)
    handle = whole_trainer.strategy.handle
    average = flat(handle.evaluation_model().module)
    seen = len(whole.seen)
    whole_trainer.test(whole, loader(), verbose=False)
    return {
        "whole": flat(whole),
        "resumed": flat(later),
        "losses": (whole.losses, half.losses + later.losses),
        "average": average,
        "validated": whole.seen[seen - 1],
        "tested": whole.seen[-1],
        "distance": handle.consensus_distance(),
        "unchanged": torch.equal(before, flat(half)),
        "file": flat(loaded(saved)),
        "half_average": flat(half_trainer.strategy.handle.evaluation_model().module),
    }


def loaded(path: str) -> Classifier:
    module = Classifier()
    module.load_state_dict(torch.load(path, weights_only=False)["state_dict"], strict=False)
    return module


def evaluations(folder: Path) -> dict[str, Any]:
    """Evaluations of the trained module, which has other weights on each rank, and of others."""
    lightning.seed_everything(7, verbose=False)
    module, failing, other = Observed(), Observed(fails=True), Classifier()
    trainer, _ = fit(folder, GossipStrategy(LocalSGD(period=100)), 2, module=lambda: module)
    average, before, handle = trainer.strategy.handle.evaluation_model().module, flat(module), trainer.strategy.handle
    strategy = GossipStrategy(LocalSGD(period=100))
    error = refused(lambda: fit(folder, strategy, 1, module=lambda: failing))
    found = {
        "averages": (flat(average), average.net[1].running_mean),
        "found": {name: values[-1] for name, values in module.found.items()},
        "file": flat(loaded(str(folder / "observed.ckpt"))),
        "counts": list(module.counts),
        "distances": (module.distances[-1], handle.consensus_distance()),
        "error": error,
        "failed": (flat(failing), flat(strategy.handle.evaluation_model().module)),
        "state": module.state,
    }
    trainer.test(module, loader(), verbose=False)
    found["unchanged"] = torch.equal(before, flat(module))
    initial = flat(other)
    trainer.test(other, loader(), verbose=False)
    trainer.save_checkpoint(folder / "other.ckpt")
    found["other"] = (initial, other.seen[-1], flat(other), flat(loaded(str(folder / "other.ckpt"))))
    trainer.test(module, loader(), verbose=False)
    found["again"] = module.seen[-1]
    return found


class Uneven(Classifier):
    """Rank 1 has larger losses, so the states of its trainer differ from those of rank 0."""

    def __init__(self, has_scheduler: bool) -> None:
        super().__init__()
        self.has_scheduler = has_scheduler

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index) * (1000.0 if self.global_rank else 1.0)
        self.log("own", float(self.global_step if self.global_rank else -self.global_step), on_epoch=False)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "uneven.ckpt")

    def configure_optimizers(self) -> Any:
        optimizer = FusedAdamW(self.net.parameters(), lr=1e-3)
        if not self.has_scheduler:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "own", "interval": "step"}}


def trainers(folder: Path) -> dict[str, Any]:
    """What three epochs at once, and two and one, end with, where the trainers of the ranks have other states."""

    def run(name: str, resume: Any = None) -> Any:
        scaler = torch.amp.GradScaler("cpu")
        more = {
            "scaler": {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]},
            "scheduler": {},
            "callback": {"callbacks": [StochasticWeightAveraging(0.01, 1)]},
        }[name]
        return fit(folder, "ddpcore-dpsgd", 3, module=partial(Uneven, name == "scheduler"), resume=resume, **more)

    found = {}
    for name in ("scaler", "scheduler", "callback"):
        whole, later = run(name), run(name, resume=str(folder / "uneven.ckpt"))
        states = [
            (one.precision_plugin.state_dict(), one.optimizers[0].param_groups[0]["lr"]) for one, _ in (whole, later)
        ]
        found[name] = {"weights": (flat(whole[1]), flat(later[1])), "states": states}
    return found


def moves(folder: Path) -> dict[str, Any]:
    """A DDP checkpoint begins a gossip run, and back."""
    trainer, _ = fit(folder, "ddp", 1)
    trainer.save_checkpoint(folder / "ddp.ckpt")
    gossip_trainer, gossip = fit(folder, "ddpcore-dpsgd", 2, resume=str(folder / "ddp.ckpt"))
    gossip_trainer.save_checkpoint(folder / "gossip.ckpt")
    _, back = fit(folder, "ddp", 3, resume=str(folder / "gossip.ckpt"))
    return {"losses": (gossip.losses, back.losses), "back": flat(back)}


def refusals(folder: Path) -> dict[str, str]:
    strategy = GossipStrategy("dpsgd")
    trainer, module = fit(folder, strategy, 1)
    return {
        "find_unused": refused(lambda: GossipStrategy("dpsgd", find_unused_parameters=True)),
        "baseline": refused(lambda: GossipStrategy("ddp")),
        "unknown": refused(lambda: GossipStrategy("dpsdg")),
        "two optimizers": refused(lambda: fit(folder, "ddpcore-dpsgd", 1, make=list_of_two, automatic=False)),
        "closure": refused(lambda: fit(folder, "ddpcore-local_sgd", 1, make=torch.optim.LBFGS)),
        "closure by hand": refused(
            lambda: fit(folder, "ddpcore-local_sgd", 1, make=torch.optim.LBFGS, automatic=False)
        ),
        "passes": refused(lambda: fit(folder, noisy(), 1, module=partial(ByHand, 3))),
        "ema": refused(lambda: fit(folder, "ddpcore-dpsgd", 1, callbacks=[EMAWeightAveraging(decay=0.9)])),
        "again": refused(lambda: trainer.fit(copy.copy(module), loader())),
        "shared": refused(lambda: trainer.test(sharing(module), loader(), verbose=False)),
        "another": refused(lambda: fit(folder, "ddpcore-ssgd", 4, resume=str(folder / "ddpcore-dpsgd.ckpt"))),
    }


class ByHand(Classifier):
    """A step of several passes."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.passes, self.used = passes, []

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(self.passes):
            self.used.append(flat(self))
            self.manual_backward(Classifier.training_step(self, batch, index))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        return torch.optim.SGD(self.net.parameters(), lr=0.0)


def noisy() -> GossipStrategy:
    return GossipStrategy(NoisySSGD(0.1, where="per_learner"))


def noises(folder: Path) -> list[float]:
    """The noise in the weights of each pass, where the optimizer moves nothing."""
    _, module = fit(folder, noisy(), 1, module=partial(ByHand, 1))
    return [(used - flat(module)).std().item() for used in module.used]


def sharing(module: Classifier) -> Classifier:
    other = Classifier()
    other.net = module.net
    return other


def list_of_two(parameters: Any) -> list[torch.optim.Optimizer]:
    first, *others = parameters
    return [FusedSGD([first], lr=0.1), FusedSGD(others, lr=0.1)]


def check_alone(folder: Path) -> dict[str, Any]:
    """One process goes on with what :func:`check` has saved, and with what it has saved itself."""
    saved, own = str(folder / "ddpcore-dpsgd.ckpt"), folder / "alone.ckpt"
    _, begun = fit(folder, "ddpcore-dpsgd", 2, resume=saved)
    later_trainer, later = fit(folder, "ddpcore-dpsgd", 3, resume=saved)
    trainer, module = fit(folder, "ddpcore-dpsgd", 2)
    trainer.save_checkpoint(own)
    return {
        "begun": flat(begun),
        "begun_losses": begun.losses,
        "losses": later.losses,
        "step": later_trainer.strategy.handle.learner.step,
        "num_losses": len(module.losses),
        "validated": (module.seen[-1], flat(module)),
        "resumed": (
            flat(fit(folder, "ddpcore-dpsgd", 3)[1]),
            flat(fit(folder, "ddpcore-dpsgd", 3, resume=str(own))[1]),
        ),
    }


def main() -> None:
    if sys.argv[5:] == ["alone"]:
        torch.save(check_alone(Path(sys.argv[4])), Path(sys.argv[1]) / "0.pt")
        return
    path, rank, world_size = ranks.join()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": str(world_size), "GROUP_RANK": "0"}
    torch.save(check(Path(sys.argv[4])), path)


if __name__ == "__main__":
    main()
