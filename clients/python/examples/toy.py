#!/usr/bin/env python3
"""Trains a small torch model on a plan, and resumes with other numbers of ranks and batch sizes.

    export ARGS='plan.json --checkpoint toy.pt --log toy.fingerprints'
    torchrun --nproc-per-node 4 examples/toy.py $ARGS --batch-size 16
    torchrun --nproc-per-node 2 examples/toy.py $ARGS --batch-size 32
    python -c 'import mula; print(mula.verify("plan.json", "toy.fingerprints"))'

Only the lines with "data" use mula. The rest is the model and ordinary distributed training.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn import functional

import mula


class Toy(torch.nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.logits = torch.nn.Linear(width, vocabulary)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.logits(self.embedding(inputs)).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", help="path of a plan, or address of a mula serve")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--checkpoint", default="toy.pt")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--log", help="folder for fingerprints")
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--width", type=int, default=32)
    o = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    model = Toy(o.vocabulary, o.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    data = mula.Stream(o.plan, o.batch_size, log=o.log)  # rank and world come from torch.distributed
    if os.path.exists(o.checkpoint):
        saved = torch.load(o.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.load_state_dict(saved["data"])

    for batch in data:
        tokens = batch.tokens.long()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
        optimizer.step()
        if rank == 0:
            print(f"step {batch.step} position {batch.first} loss {loss.item():.4f}", flush=True)
            if (batch.step + 1) % o.every == 0 or data.state_dict()["position"] == data.end:
                new = o.checkpoint + ".new"
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}, new
                )
                os.replace(new, o.checkpoint)
    data.close()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
