"""Save and resume your own loop: the resumed run has the bits of an uninterrupted one.

python examples/save_and_resume.py --stop-after 34; python examples/save_and_resume.py        virtual learners
python examples/save_and_resume.py --folder runs/whole           not stopped: it must print the same checksum
torchrun --standalone --nproc-per-node 2 examples/save_and_resume.py --folder runs/ranks      real ranks
"""

import argparse
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ddpcore
from ddpcore.optim import FusedSGD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/save_and_resume"))
    parser.add_argument("--learners", type=int, default=4, help="of one process, without torchrun")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--stop-after", type=int, help="leave the loop after this step, as a crash would")
    args = parser.parse_args()

    on_ranks = dist.is_torchelastic_launched()
    if on_ranks:
        dist.init_process_group("gloo")
    rank, num_learners = (dist.get_rank(), dist.get_world_size()) if on_ranks else (0, args.learners)

    torch.manual_seed(0)
    inputs = torch.randn(1024, 16)
    labels = (inputs @ torch.randn(16, 4)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = ddpcore.DPSGD(ddpcore.RandomPair(seed=0))
    handle = ddpcore.distribute(model, optimizer, strategy, learners=None if on_ranks else num_learners)

    # Learners differ, so each rank saves a file of its own. The handle's state is needed beside model and optimizer.
    file, first = args.folder / f"rank-{rank}.pt", 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        handle.load_state_dict(state["handle"])  # the last one: it needs the other two
        torch.set_rng_state(state["random"])
        first = state["step"]
        print(f"rank {rank} continues after step {first}")

    for step in range(first, args.stop_after or args.steps):
        samples = torch.randint(1024, (num_learners, 32), generator=torch.Generator().manual_seed(step))
        x, y = (inputs[samples[rank]], labels[samples[rank]]) if on_ranks else (inputs[samples], labels[samples])
        loss = nn.functional.cross_entropy(handle.model(x).flatten(0, -2), y.flatten(), reduction="sum") / 32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.save_every == 0:
            state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"handle": handle.state_dict(), "random": torch.get_rng_state()}
            args.folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)  # the old file stays until the new one is complete

    weights = b"".join(p.detach().numpy().tobytes() for one in handle.models for p in one.parameters())
    step = args.stop_after or args.steps
    print(f"rank {rank}: checksum of all weights after step {step}, stopped before or not: {zlib.crc32(weights):08x}")
    if on_ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
