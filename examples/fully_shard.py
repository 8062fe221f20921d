"""Sharded training on several ranks, in a loop of one's own.

    torchrun --nproc-per-node 2 examples/fully_shard.py

Each rank holds its part of parameters, gradients and moments; a layer is gathered while it
computes. With devices: backend nccl, and the model and batches on the rank's device.
"""

import torch
import torch.distributed as dist
from torch import nn

import odc

WIDTH, LAYERS, STEPS, BATCH = 128, 4, 20, 16


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Learns to sort the numbers that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights on all ranks
    model = Model()
    for layer in model.layers:
        odc.fully_shard(layer)
    odc.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(1 + dist.get_rank())  # different batches
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        loss = nn.functional.mse_loss(model(x), x.sort().values)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            mean = total.item() / dist.get_world_size()
            print(f"step {step}  loss {mean:.4f}  gradient norm {norm.item():.3f}")
    held = sum(p.to_local().numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    print(f"rank {dist.get_rank()} holds {held} of {whole} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
