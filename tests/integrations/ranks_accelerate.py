"""One of two ranks: loops with and without prefetching, over data that does not divide evenly."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.utils.data import DataLoader
from transformers import Trainer

from prefetchpipe.integrations.accelerate import prepare
from tests.integrations import accelerate_loops as loops
from tests.integrations.test_accelerate import plain
from tests.integrations.test_transformers import Rows, make_trainer, outcome, prefetching


def run(prepare: Any) -> dict[str, Any]:
    uneven = partial(loops.loader, 37, shuffle=True)
    return {
        "train uneven": loops.train(prepare, data=uneven),
        "without even batches": loops.uneven(prepare, 35),
        "train, seedable": loops.train(prepare, data=uneven, use_seedable_sampler=True, stop=3),
        "train, split batches": loops.train(prepare, data=uneven, split_batches=True, stop=3),
        "train, dispatched": loops.train(prepare, data=uneven, dispatch_batches=True),
        "train, stream": loops.train(prepare, data=lambda: DataLoader(loops.Stream(37), batch_size=4)),
        "skip": loops.skip(prepare, data=uneven),
        "nested": loops.nested(prepare),
    }


def train(cls: type[Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(cls, Path(folder), data=Rows(29), eval_strategy="steps", eval_steps=2)
        trainer.train()
        return outcome(trainer)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result = {
        "accelerate": {"plain": run(plain), "prefetched": run(partial(prepare, depth=3, fetch="thread"))},
        "transformers": {"plain": train(Trainer), "prefetched": train(prefetching("thread"))},
    }
    Path(os.environ["RESULT"]).write_text(json.dumps(result))
    torch.distributed.barrier()
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
