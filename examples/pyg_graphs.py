"""Graph classification with PyTorch Geometric: scikit-learn's digits as grids of pixels, each joined to its neighbours.

Run it with `python examples/pyg_graphs.py`.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import RGCNConv, global_max_pool
from torch_geometric.utils import grid

from prefetchpipe import GPUPrefetcher

EPOCHS = 3


class Net(nn.Module):
    """Two convolutions with a weight for each direction, and the largest value of each channel."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = RGCNConv(3, width, num_relations=9)
        self.second = RGCNConv(width, width, num_relations=9)
        self.out = nn.Linear(width, 10)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores, graphs x 10."""
        x = self.first(batch.x, batch.edge_index, batch.edge_type).relu()
        x = self.second(x, batch.edge_index, batch.edge_type).relu()
        scores: torch.Tensor = self.out(global_max_pool(x, batch.batch, batch.num_graphs))
        return scores


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    digits = load_digits()
    edges, position = grid(8, 8)  # 64 pixels, and which are neighbours
    step = (position[edges[1]] - position[edges[0]]).long() + 1
    direction = step[:, 0] * 3 + step[:, 1]
    graphs = [
        Data(x=torch.cat([pixels.view(64, 1) / 16, position / 8], 1), edge_index=edges, edge_type=direction, y=label)
        for pixels, label in zip(torch.tensor(digits.images).float(), digits.target.tolist(), strict=True)
    ]
    train = GPUPrefetcher(DataLoader(graphs[:1000], batch_size=64, shuffle=True), device)
    test = GPUPrefetcher(DataLoader(graphs[1000:], batch_size=128), device)

    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(EPOCHS):
        for batch in train:  # a Batch, on the device: what PyG's own batch.to(device) gives
            loss = nn.functional.cross_entropy(model(batch), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with torch.inference_mode():
        right = sum((model(batch).argmax(1) == batch.y).sum() for batch in test)
    print(f"device          {device}")
    print(f"test accuracy   {int(right) / (len(graphs) - 1000):.3f}")
    print(f"stats           {train.stats()}")


if __name__ == "__main__":
    main()
