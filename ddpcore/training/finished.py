"""A finished run: its model and its data, from its folder."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ddpcore.data import Dataset
from ddpcore.data.shards import permutation
from ddpcore.diagnostics import DataLoss
from ddpcore.options.typed import check_choice
from ddpcore.records.run import MODEL, RunRecord
from ddpcore.storage.files import plain, shown
from ddpcore.training.build import LearnerPlacement, build_model, read_dataset
from ddpcore.training.checkpoint import load_safetensors
from ddpcore.training.config import TrainConfig
from ddpcore.training.trainer import BATCH_SIZE

_KEY = (0, 0, 0, 4)  # key of the permutation of the samples; no other random draw uses this key


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedRun:
    """What a run has left: its config, the averaged model at the end, in evaluation mode, and its data beside it."""

    path: Path
    config: TrainConfig
    model: nn.Module
    dataset: Dataset

    @classmethod
    def load(cls, path: str | Path, *, data_dir: str | Path | None = None) -> "FinishedRun":
        """Load the folder of a run, the ``out`` of ``train``; ``data_dir`` if the data set's files have moved.

        ValueError: there is no run, or it has no final model, a model of another architecture, or other data.
        """
        path = Path(path)
        record = RunRecord.read(path)
        config = TrainConfig.from_dict(record.header.get("config", {}))
        if data_dir is not None:
            config = config.overridden({"data": {"data_dir": str(data_dir)}})
        if not (path / MODEL).is_file():
            state = "it has not ended" if not record.final else "its model was not finite" if record.final.get(
                "diverged") else "the file was removed"  # fmt: skip
            raise ValueError(f"{shown(path)} has no {MODEL} ({state}): train it to the end, or take another run")
        dataset = read_dataset(config, first=False)
        if record.header.get("dataset_digest") not in (None, dataset.digest()):
            name = config.data.name
            raise ValueError(f"{shown(path)} was trained on other samples than {name!r} has here: check data_dir")
        device = LearnerPlacement.of(config, None).device
        model = build_model(config, dataset, device)
        _load(model, path / MODEL)
        return cls(path=path, config=config, model=model.eval(), dataset=dataset.to(device))

    def data(self, split: str = "train", num_samples: int | None = None) -> DataLoss:
        """The mean cross-entropy of the model over samples of a split, without augmentation and label smoothing.

        The split is ``train``, ``validation`` or ``test``. ``num_samples`` are chosen at random, the same for each run
        on these data; None: all. ValueError: the data have no such split, or not so many samples.
        """
        check_choice("split", split, tuple(self.dataset.splits()))
        samples = replace(self.dataset.splits()[split], augmentation=None)
        num = len(samples) if num_samples is None else num_samples
        if not 1 <= num <= len(samples):
            raise ValueError(f"samples is {num}: take 1 to {len(samples)}, the size of the split {split!r}")
        order = torch.from_numpy(permutation(len(samples), *_KEY)[:num].copy())
        batches = [samples.batch(part) for part in order.split(BATCH_SIZE)]
        return DataLoss(self.model, lambda outputs, labels: F.cross_entropy(outputs.float(), labels), batches)


def _load(model: nn.Module, path: Path) -> None:
    try:
        tensors = load_safetensors().torch.load_file(path)
    except Exception as error:  # damaged bytes can cause any error
        reason = plain((str(error).splitlines() or [type(error).__name__])[0])
        raise ValueError(f"{shown(path)} cannot be read ({reason}): is it damaged?") from error
    own = model.state_dict()
    for name in [*own, *tensors]:
        here, there = (tuple(side[name].shape) if name in side else None for side in (own, tensors))
        if here != there:
            what = f"{shown(path)} is of another model"
            raise ValueError(f"{what}: {plain(name)} is {there} there and {here} in that of the config")
    model.load_state_dict(tensors)
