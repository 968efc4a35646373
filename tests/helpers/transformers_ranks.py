"""Ranks of ``tests/integrations/test_transformers.py``: ``GossipTrainer`` beside ``Trainer`` with its DDP."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, Trainer

import ddpcore
from ddpcore.integrations.transformers import GossipTrainer
from ddpcore.optim import FusedAdamW
from helpers import ranks

SMALL_BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


class Counting(BertForSequenceClassification):
    """Counts the samples that it has evaluated."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.register_buffer("seen", torch.tensor(0), persistent=False)

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **more: Any) -> Any:
        self.seen += 0 if self.training else len(input_ids)
        return super().forward(input_ids, labels=labels, **more)


MODELS: dict[str, Any] = {
    "bert": lambda: Counting(BertConfig(vocab_size=32, **SMALL_BERT)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)),
}


class Sentences(torch.utils.data.Dataset):
    """Random tokens. The label is that of the first token, or the tokens themselves."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)  # group_by_length reads all samples in a loop
        tokens = torch.randint(2, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": int(tokens[0] >= 16) if self.name == "bert" else tokens}


class Losses(transformers.TrainerCallback):
    """The loss of each step, as the trainer logs it: the mean over ranks. And the weights before the first step."""

    def __init__(self) -> None:
        self.rows: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.begin = flat(model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs:
            self.rows.append(logs["loss"])


def train(
    folder: Path, name: str, strategy: Any, resume: Any = None, model: Any = None, **more: Any
) -> tuple[Any, list[float]]:
    """A ``GossipTrainer`` evaluates a given ``model`` first."""
    transformers.set_seed(3)
    given, model = model, MODELS[name]() if model is None else model
    options = {"max_steps": 8, "save_steps": 4, "learning_rate": 0.01, "logging_steps": 1, **more}
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        ddp_backend="gloo" if dist.is_initialized() else None,
        **options,
    )
    losses, data = Losses(), Sentences(name)
    kwargs = {"train_dataset": data, "eval_dataset": data, "callbacks": [losses]}
    if strategy is None:
        trainer = Trainer(model, arguments, **kwargs)
    else:
        trainer = GossipTrainer(model, arguments, strategy=strategy, **kwargs)
        if given is not None:
            trainer.evaluate()
            transformers.set_seed(3)  # its loader has drawn a number
    trainer.train(resume_from_checkpoint=resume)
    trainer.begin = losses.begin
    return trainer, losses.rows


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def refused(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def sharded(folder: Path, kind: DistributedType) -> None:
    """A trainer whose Accelerate is configured for a library that shards."""

    class Sharded(GossipTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.state.distributed_type = kind

    before = PartialState().distributed_type
    try:
        Sharded(MODELS["bert"](), transformers.TrainingArguments(str(folder), use_cpu=True), strategy=ddpcore.DPSGD())
    finally:
        AcceleratorState().distributed_type = before


class Scaled(GossipTrainer):
    """With a gradient scaler, which Accelerate itself makes on a GPU only. That of rank 1 meets an overflow."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * 1e38 if self.args.process_index and self.state.global_step == 1 else loss


def scaled(folder: Path) -> Any:
    """Weights and scaler after eight steps at once, and after four and four."""
    found = []
    for resume in (None, str(folder / "checkpoint-4")):
        transformers.set_seed(3)
        model = MODELS["bert"]()
        arguments = transformers.TrainingArguments(
            str(folder), max_steps=8, save_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[], seed=3
        )
        optimizers = FusedAdamW(model.parameters(), lr=0.01), None
        options = {"strategy": ddpcore.DPSGD(), "train_dataset": Sentences("bert"), "optimizers": optimizers}
        trainer = Scaled(model, arguments, **options)
        trainer.train(resume_from_checkpoint=resume)
        found.append((flat(trainer.model), trainer.accelerator.scaler.state_dict()))
    return found


def interrupted(folder: Path, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after eight steps, and after going on in the middle of this epoch, where samples have no own seed."""
    whole, _ = train(folder, "bert", ddpcore.DPSGD(), **options)
    resumed, _ = train(folder, "bert", ddpcore.DPSGD(), resume=str(folder / "checkpoint-4"), **options)
    return flat(whole.model), flat(resumed.model)


def earlier(folder: Path) -> dict[tuple[bool, bool], tuple[torch.Tensor, torch.Tensor]]:
    """Weights of SSGD with new models, and with models that a plain Trainer had evaluated, perhaps in other precision.

    One process has those of a plain Trainer instead of the first.
    """
    found = {}
    for bf16 in (False, True):
        options = {"max_steps": 3, "bf16": bf16, "save_strategy": "no"}
        new, _ = train(folder, "bert", ddpcore.SSGD() if dist.is_initialized() else None, **options)
        for other in (bf16, not bf16):
            transformers.set_seed(3)
            arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], bf16=other)
            trainer = Trainer(MODELS["bert"](), arguments, eval_dataset=Sentences("bert"))
            trainer.evaluate()
            later, _ = train(folder, "bert", ddpcore.SSGD(), model=trainer.model, **options)
            found[bf16, other] = flat(new.model), flat(later.model)
    return found


def onward(folder: Path, handle: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights of a plain Trainer and of SSGD that go on with a run's average, and with a model that loads its state."""
    found = []
    for strategy in (None, ddpcore.SSGD):
        pair = []
        for average in (handle.evaluation_model(), MODELS["bert"]()):
            average.load_state_dict(handle.evaluation_model().state_dict())
            made = None if strategy is None else strategy()
            trainer, _ = train(folder, "bert", made, model=average, max_steps=3, save_strategy="no")
            pair.append(flat(trainer.model))
        found.append(tuple(pair))
    return found


def found_size(folder: Path) -> None:
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], auto_find_batch_size=True)
    GossipTrainer(MODELS["bert"](), arguments, strategy=ddpcore.DPSGD())


def wrapped(folder: Path) -> None:
    model = torch.nn.parallel.DistributedDataParallel(MODELS["bert"]())
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], max_steps=1)
    GossipTrainer(model, arguments, strategy=ddpcore.DPSGD(), train_dataset=Sentences("bert")).train()


def check(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    for name in MODELS:
        ddp, losses = train(folder / f"ddp-{name}", name, None, **options)
        ssgd, others = train(folder / f"ssgd-{name}", name, ddpcore.SSGD(), **options)
        found[name] = {"losses": (losses, others), "weights": (flat(ddp.model), flat(ssgd.model))}
    where = folder / "dpsgd"
    whole, losses = train(where, "bert", ddpcore.DPSGD(), **options)
    average = flat(whole.handle.evaluation_model())
    _, again = train(where, "bert", ddpcore.DPSGD(), resume=str(where / "checkpoint-4"), **options)
    later, _ = train(where, "bert", ddpcore.DPSGD(), resume=str(where / "checkpoint-4"), **options)
    before = flat(whole.model)
    evaluated = whole.evaluate()["eval_loss"]
    whole.save_model(str(where / "averaged"))
    if dist.is_initialized():
        dist.barrier()  # rank 0 writes
    saved = BertForSequenceClassification.from_pretrained(where / "averaged")
    plain, _ = train(folder / "plain", "bert", None, max_steps=1, average_tokens_across_devices=False)
    plain.model.load_state_dict(saved.state_dict())
    found["dpsgd"] = {
        "weights": (flat(whole.model), flat(later.model)),
        "losses": (losses, again),
        "saved": (average, flat(saved)),
        "unchanged": torch.equal(before, flat(whole.model)),
        "counted": whole.model.seen.item(),
        "evaluated": (evaluated, plain.evaluate()["eval_loss"]),
        "distance": whole.handle.consensus_distance(),
    }
    found["scaled"] = scaled(folder / "scaled")
    found["grouped"] = interrupted(folder / "grouped", train_sampling_strategy="group_by_length")
    _, back = train(folder / "back", "bert", None, resume=str(where / "checkpoint-4"), **options)
    _, begun = train(
        folder / "begun", "bert", ddpcore.DPSGD(), resume=str(folder / "ddp-bert" / "checkpoint-4"), **options
    )
    found["moves"] = (back, begun)
    found |= {"earlier": earlier(folder / "earlier"), "onward": onward(folder / "onward", whole.handle)}
    best = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "greater_is_better": True}
    asynchronous, _ = train(folder / "best", "bert", ddpcore.ADPSGD(), metric_for_best_model="eval_loss", **best)
    chosen = asynchronous.state.best_model_checkpoint
    found["best"] = {
        "checkpoint": Path(chosen).name,
        "weights": (
            flat(BertForSequenceClassification.from_pretrained(chosen)),
            flat(asynchronous.handle.evaluation_model()),
        ),
    }
    found["refused"] = {
        "strategy": refused(lambda: train(folder / "x", "bert", "dpsgd")),
        "another": refused(lambda: train(where, "bert", ddpcore.SSGD(), resume=str(where / "checkpoint-4"))),
        "again": refused(whole.train),
        "batch size": refused(lambda: found_size(folder / "x")),
        "wrapped": refused(lambda: wrapped(folder / "x")),
        "fsdp": refused(lambda: sharded(folder / "x", DistributedType.FSDP)),
        "deepspeed": refused(lambda: sharded(folder / "x", DistributedType.DEEPSPEED)),
    }
    train(folder / "begun", "bert", None, **options)
    over = str(folder / "begun" / "checkpoint-8")
    found["refused"]["over"] = refused(lambda: train(folder / "begun", "bert", ddpcore.DPSGD(), resume=over))
    return found


def check_alone(folder: Path) -> dict[str, Any]:
    """One process goes on with what :func:`check` has saved, and with what it has saved itself."""
    saved, own = folder / "dpsgd" / "checkpoint-4", folder / "alone"
    later, losses = train(folder / "later", "bert", ddpcore.DPSGD(), resume=str(saved))
    both = folder / "again"
    shutil.copytree(folder / "dpsgd", both)  # files of two ranks
    onward, _ = train(both, "bert", ddpcore.DPSGD(), resume=str(both / "checkpoint-4"))
    again, _ = train(both, "bert", ddpcore.DPSGD(), resume=str(both / "checkpoint-8"))
    return {
        "begun": (later.begin, flat(BertForSequenceClassification.from_pretrained(saved))),
        "losses": losses,
        "step": later.handle.learner.step,
        "again": (flat(onward.model), flat(again.model)),
        "resumed": interrupted(own),
        "earlier": earlier(folder / "earlier"),
        "unseeded": interrupted(own, accelerator_config={"use_seedable_sampler": False}),
    }


def main() -> None:
    if sys.argv[5:] == ["alone"]:
        torch.save(check_alone(Path(sys.argv[4])), Path(sys.argv[1]) / "0.pt")
        return
    path, rank, world_size = ranks.join()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    torch.save(check(Path(sys.argv[4])), path)


if __name__ == "__main__":
    main()
