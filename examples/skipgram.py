"""Skip-gram word vectors from Python's own help texts; the table lives on the host, the GPU holds the rows in use.

python examples/skipgram.py [--device cuda] [--gpu-budget BYTES] [--steps N]
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch.nn import functional as F

from prefetchpipe import GPUPrefetcher, HostEmbedding
from prefetchpipe.tables import RowOptimizer

DIM, WINDOW, DEPTH = 64, 4, 1
ROW_BYTES = DIM * 4 * 4  # a row, its gradient, and Adamax's two states


class Pairs:
    """Batches of row ids [3 n]: n words, for each one that stands near it, and n random ones.

    A word has two rows: one as itself, and one, ``words`` further, as a neighbour of others.
    """

    def __init__(self, text: torch.Tensor, counts: torch.Tensor, batch: int, steps: int) -> None:
        self.text, self.words, self.batch, self.steps = text, len(counts), batch, steps
        self.keep = (2e-3 / (counts / counts.sum())).sqrt().clamp(max=1)  # frequent words say little
        self.noise = counts**0.75

    def __iter__(self) -> Iterator[torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        for _ in range(self.steps):
            at = torch.randint(WINDOW, len(self.text) - WINDOW, (8 * self.batch,), generator=draw)
            near = at + torch.randint(1, WINDOW + 1, at.shape, generator=draw) * (at % 2 * 2 - 1)
            pair = torch.stack([self.text[at], self.text[near]])
            kept = (torch.rand(pair.shape, generator=draw) < self.keep[pair]).all(0)
            word, near = pair[:, kept][:, : self.batch]
            noise = torch.multinomial(self.noise, len(word), replacement=True, generator=draw)
            yield torch.cat([word, self.words + near, self.words + noise])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpu-budget", type=int, help="bytes for rows on the GPU; default: a quarter of the table")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the matrices are small

    words = re.findall(r"[a-z]+", " ".join(topics.values()).lower())
    frequent = [word for word, count in Counter(words).most_common() if count > 2]
    number = {word: i for i, word in enumerate(frequent)}
    text = torch.tensor([number[word] for word in words if word in number])

    embedding = HostEmbedding(
        2 * len(number), DIM, device=options.device, init=lambda rows: rows.uniform_(-0.5 / DIM, 0.5 / DIM)
    )
    # On a CPU a count for each row means a parameter for each distinct count; one count for the table is quicker.
    optimizer = RowOptimizer(torch.optim.Adamax, embedding, lr=0.05, step_count="table")

    budget = options.gpu_budget or embedding.table.nbytes // 4
    batch = budget // (ROW_BYTES * 3 * (DEPTH + 1))
    if batch < 1:
        parser.error(f"--gpu-budget {budget} is too small for one pair")
    print(f"table      {embedding.num_embeddings} x {DIM}, {embedding.table.nbytes:,} bytes on the host")
    print(f"budget     {budget:,} bytes for rows on {options.device}: {batch} pairs a step")

    loader = GPUPrefetcher(Pairs(text, torch.bincount(text).float(), batch, options.steps), options.device)
    total, start = torch.zeros((), device=options.device), time.perf_counter()
    for step, ids in enumerate(embedding.lookahead(loader, lambda ids: ids, depth=DEPTH), 1):
        word, near, noise = embedding(ids).chunk(3)
        loss = F.softplus(-(word * near).sum(1)).mean() + F.softplus(word @ noise.T).mean(1).mean() * 5
        loss.backward()
        optimizer.step()
        total += loss.detach()  # no wait for the GPU
        if step % 400 == 0:
            print(f"step {step:5} loss {total.item() / 400:.3f}")
            total.zero_()
    print(f"training   {options.steps} steps in {time.perf_counter() - start:.1f} s")

    vectors = F.normalize(embedding.table.host_tensor()[: len(number)], dim=1)
    for word in ("integer", "exception", "import", "float", "module", "tuple"):
        nearest = (vectors @ vectors[number[word]]).topk(6).indices[1:].tolist()
        print(f"{word:10} {', '.join(frequent[i] for i in nearest)}")


if __name__ == "__main__":
    main()
