"""Transformers: PrefetchTrainer instead of Trainer. A tiny language model learns the text of Python's help pages."""

from __future__ import annotations

import tempfile
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from prefetchpipe.integrations.transformers import PrefetchTrainer as Trainer

LENGTH = 32  # bytes of text in one sample


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """Text as bytes: a vocabulary of 256 needs no tokenizer."""

    def __init__(self, text: str) -> None:
        data = text.encode()
        self.rows = torch.frombuffer(bytearray(data[: len(data) // LENGTH * LENGTH]), dtype=torch.uint8).view(
            -1, LENGTH
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index].long()
        return {"input_ids": row, "labels": row}


def main() -> None:
    torch.manual_seed(0)
    train_set = Bytes("".join(text for name, text in topics.items() if name != "lambda"))
    eval_set = Bytes(topics["lambda"])
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=25,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = Trainer(model, arguments, train_dataset=train_set, eval_dataset=eval_set)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    print(f"loss   {before:.2f} -> {after:.2f} nats per byte")


if __name__ == "__main__":
    main()
