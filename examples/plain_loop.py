"""A loop of your own on a model of your own, in a quarter of the memory that its state needs.

    python examples/plain_loop.py

`odc.paged` moves parameters, gradients and AdamW's moments into pages; what follows is plain
PyTorch, and gives the losses of plain PyTorch to the last bit.
"""

import torch
from torch import nn

import odc

WIDTH, LAYERS, BATCH, STEPS = 384, 10, 32, 20


class Residual(nn.Module):
    """One block; `odc.paged` loads and evicts every entry of a ModuleList by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (B, WIDTH) to the same shape."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (B, WIDTH) to the same shape."""
        for block in self.blocks:
            x = block(x)
        return x


def main() -> None:
    """Trains a stack of blocks to undo a fixed mixing of its inputs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Stack()
    state_mb = sum(p.numel() for p in model.parameters()) * 16 / 2**20
    budget_mb = int(state_mb / 4)
    model, optimizer = odc.paged(
        model, torch.optim.AdamW, lr=1e-3, page_budget=f"{budget_mb}MB", update="backward"
    )
    mixing = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    for step in range(STEPS):
        target = torch.randn(BATCH, WIDTH)
        loss = nn.functional.mse_loss(model(target @ mixing), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    counters = model.memory.take()
    print(
        f"{state_mb:.0f} MB of state under a budget of {budget_mb} MB: "
        f"{counters.bytes_in / 2**20 / STEPS:.0f} MB in, "
        f"{counters.bytes_out / 2**20 / STEPS:.0f} MB out a step"
    )
    model.close()


if __name__ == "__main__":
    main()
