"""Loops over loaders of Accelerate, which write down every flag that the consumer can see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

Prepare = Callable[[Accelerator, Any], Any]


def new_accelerator(*, cpu: bool = True, **options: Any) -> Accelerator:
    """A fresh one; Accelerate keeps its state in singletons."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    config = DataLoaderConfiguration(
        **{k: options.pop(k) for k in list(options) if hasattr(DataLoaderConfiguration, k)}
    )
    return Accelerator(cpu=cpu, dataloader_config=config, **options)


def loader(rows: int = 38, batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(float(rows))), batch_size=batch_size, **options)


class Stream(IterableDataset):
    def __init__(self, rows: int = 38) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(self.rows)))


def values(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else [leaf.tolist() for leaf in batch]


def flags(accelerator: Accelerator, batch: Any) -> dict[str, Any]:
    state = accelerator.gradient_state
    return {
        "batch": values(batch),
        "end": state.end_of_dataloader,
        "remainder": state.remainder,
        "sync": accelerator.sync_gradients,
        "active": None if state.active_dataloader is None else type(state.active_dataloader).__name__,
        "depth": len(state.dataloader_references),
        "gathered": values(accelerator.gather_for_metrics(batch)),
    }


def train(prepare: Prepare, *, data: Any = None, epochs: int = 2, stop: int = 1000, **options: Any) -> Any:
    """Training with accumulation; losses, weights and flags at every batch."""
    torch.manual_seed(0)
    accelerator = new_accelerator(gradient_accumulation_steps=3, **options)
    batches = prepare(accelerator, data() if data else loader(shuffle=True))
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(1, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-5))
    seen = []
    for epoch in range(epochs):
        for index, batch in enumerate(batches):
            with accelerator.accumulate(model):
                x = (batch if isinstance(batch, torch.Tensor) else batch[0])[:, None]
                loss = (model(x) - 2 * x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen.append({"epoch": epoch, "loss": loss.item(), **flags(accelerator, batch)})
            if index == stop:
                break
    seen.append({"weights": [p.tolist() for p in model.parameters()], "random": torch.rand(()).item()})
    return seen


def skip(prepare: Prepare, *, data: Any = None, **options: Any) -> Any:
    """Two epochs of which the first begins in the middle."""
    torch.manual_seed(0)
    accelerator = new_accelerator(**options)
    batches = accelerator.prepare(data() if data else loader(shuffle=True))
    rest = prepare(accelerator, skip_first_batches(batches, 2))
    batches = prepare(accelerator, batches)
    return [[flags(accelerator, batch) for batch in rest], [flags(accelerator, batch) for batch in batches]]


def uneven(prepare: Prepare, rows: int) -> Any:
    """Ranks with different numbers of batches, so without anything that all ranks do together."""
    accelerator = new_accelerator(even_batches=False)
    state = accelerator.gradient_state
    batches = prepare(accelerator, loader(rows))
    return [[values(batch), state.end_of_dataloader, state.remainder] for _ in range(2) for batch in batches]


def nested(prepare: Prepare, **options: Any) -> Any:
    """An evaluation inside of a training loop, left early; then a second loop over each."""
    torch.manual_seed(0)
    accelerator = new_accelerator(gradient_accumulation_steps=2, **options)
    outer = prepare(accelerator, loader(22, shuffle=True))
    inner = prepare(accelerator, loader(9, 2))
    seen = []
    for _ in range(2):
        for index, batch in enumerate(outer):
            seen.append(flags(accelerator, batch))
            if index == 1:
                seen += [flags(accelerator, held) for held in inner]
            if index == 2:
                for held in inner:
                    seen.append(flags(accelerator, held))
                    break
            seen.append(flags(accelerator, batch))
            if index == 3:
                break
    return seen + [flags(accelerator, batch) for batch in outer]


def is_dispatcher(batches: Any) -> bool:
    return issubclass(type(batches), DataLoaderDispatcher)
