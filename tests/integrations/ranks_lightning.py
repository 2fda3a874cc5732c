"""One of two ranks: trains with and without prefetching, under DDP, with the frameworks' own distributed samplers."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prefetchpipe import GPUPrefetcher
from prefetchpipe.integrations import fabric
from prefetchpipe.integrations.lightning import GPUPrefetch
from tests.integrations import test_fabric
from tests.integrations.lightning_models import loader
from tests.integrations.test_lightning import fit

TWO = {"devices": 2, "strategy": "ddp"}


def run(train: Any, *callbacks: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return fit(Path(folder), train, loader(13), *callbacks, max_epochs=3, **TWO)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trainer = {
        "plain": run(loader(shuffle=True)),
        "prefetched": run(loader(shuffle=True), GPUPrefetch(depth=3, fetch="thread")),
    }
    try:
        run(GPUPrefetcher(loader(), "cpu"), GPUPrefetch())
    except ValueError as error:
        trainer["wrong order"] = str(error)
    fabrics = {
        "plain": test_fabric.train(test_fabric.plain, **TWO),
        "prefetched": test_fabric.train(partial(fabric.prepare, depth=3, fetch="thread"), **TWO),
    }
    Path(os.environ["RESULT"]).write_text(json.dumps({"trainer": trainer, "fabric": fabrics}))
    # The frameworks leave their group to the interpreter's exit, where gloo's threads may meet a rank that has gone.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
