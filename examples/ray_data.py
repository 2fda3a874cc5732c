"""Ray Data as the source, Ray Train around the loop: scikit-learn's digits, one worker for each GPU or one on the CPU.

Run it with `python examples/ray_data.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch import nn

from prefetchpipe import GPUPrefetcher


def train_loop(config: dict[str, Any]) -> None:
    device = ray.train.torch.get_device()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = ray.train.torch.prepare_model(net)  # also makes the worker's GPU the current one
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])

    # Arrays as they lie in Ray's object store: they are packed from there, and arrive as tensors. (iter_torch_batches
    # does as well, with device="cpu": left alone, Ray copies every batch to the GPU itself.)
    shard = ray.train.get_dataset_shard("train")
    loader = GPUPrefetcher(shard.iter_batches(batch_size=32, batch_format="numpy"), device)

    for epoch in range(1, config["epochs"] + 1):
        right, rows = torch.zeros((), device=device), 0
        for batch in loader:
            logits = model(batch["pixels"])
            loss = nn.functional.cross_entropy(logits, batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (logits.argmax(1) == batch["label"]).sum()
            rows += len(batch["label"])
        metrics = {"epoch": epoch, "rows": rows, "accuracy": float(right) / rows}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), Path(folder) / "model.pt")
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    digits = load_digits()
    pixels = (digits.data / 16).astype(np.float32)
    data = ray.data.from_items([{"pixels": x, "label": y} for x, y in zip(pixels, digits.target, strict=True)])

    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as storage:
        trainer = ray.train.torch.TorchTrainer(
            train_loop,
            train_loop_config={"lr": 3e-3, "epochs": 4},
            scaling_config=ScalingConfig(num_workers=max(1, gpus), use_gpu=gpus > 0),
            run_config=RunConfig(storage_path=storage),
            datasets={"train": data},
        )
        metrics = trainer.fit().metrics or {}
    print(f"epochs          {metrics['epoch']}")
    print(f"rows a worker   {metrics['rows']}")
    print(f"accuracy        {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False)
    main()
    ray.shutdown()
