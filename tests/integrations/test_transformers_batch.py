"""Batches of Transformers' tokenizers and models: same type, same encodings, packed; contracts C12, C16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader
from transformers import BatchEncoding, BatchFeature, DataCollatorWithPadding, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

from prefetchpipe import GPUPrefetcher
from tests.support import is_cuda, is_simulated, same_bytes, settle

pytestmark = pytest.mark.timeout(60)

TEXTS = ["a small batch", "of a few words", "and one more a few words", "small"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = sorted({word for text in TEXTS for word in text.split()})
    inner = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1} | {w: i + 2 for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


def encoded(tokenizer: Any) -> BatchEncoding:
    return tokenizer(TEXTS, padding=True, return_tensors="pt", return_offsets_mapping=True)


def test_c12_a_batch_encoding_keeps_its_encodings(device: Any, fetch: str, tokenizer: Any) -> None:
    source, expected = encoded(tokenizer), encoded(tokenizer)
    held = dict(source.data)
    for out in GPUPrefetcher([source, source], device, fetch=fetch):
        settle(device)
        assert type(out) is BatchEncoding
        assert list(out) == list(expected)
        for key in expected:
            assert same_bytes(out[key], expected[key])
            assert out[key].is_cuda == is_cuda(device)
        assert out.is_fast
        assert out.n_sequences == expected.n_sequences
        assert out.tokens(2) == expected.tokens(2)
        assert out.word_ids(1) == expected.word_ids(1)
        assert out.char_to_token(0, 3) == expected.char_to_token(0, 3)
        assert out.encodings[0] is source.encodings[0]
        assert out.input_ids is out["input_ids"]
        out["more"] = 1
        assert "more" not in source
    assert all(source[key] is value for key, value in held.items())


def test_c12_a_collator_s_batches_equal_those_of_the_plain_loop(device: Any, tokenizer: Any) -> None:
    rows = [tokenizer(text) | {"label": i} for i, text in enumerate(TEXTS * 3)]
    loader = DataLoader(rows, batch_size=5, collate_fn=DataCollatorWithPadding(tokenizer))
    plain = list(loader)
    out = list(GPUPrefetcher(loader, device))
    settle(device)
    assert len(out) == len(plain) == 3
    for one, other in zip(out, plain, strict=True):
        assert type(one) is type(other)
        assert list(one) == list(other)
        assert all(same_bytes(one[key], other[key]) for key in other)


def test_c16_they_are_packed(stream_device: Any, tokenizer: Any) -> None:
    batch = encoded(tokenizer)
    prefetcher = GPUPrefetcher([batch] * 4, stream_device)
    for _ in prefetcher:
        pass
    stats = prefetcher.stats()
    assert stats.staged_bytes >= 4 * sum(value.nbytes for value in batch.values())
    assert stats.pageable_bytes == 0
    if is_simulated(stream_device):
        assert stream_device.copies <= 4 * len(batch)


def test_c12_features_and_outputs(device: Any) -> None:
    features = BatchFeature({"pixel_values": torch.ones(2, 3, 4, 4), "sizes": [(4, 4), (4, 4)]})
    output = CausalLMOutput(logits=torch.full((2, 5), 3.0), loss=torch.tensor(1.0))
    one, other = GPUPrefetcher([features, output], device)
    settle(device)
    assert type(one) is BatchFeature
    assert same_bytes(one["pixel_values"], torch.ones(2, 3, 4, 4))
    assert one["sizes"] == [(4, 4), (4, 4)]
    assert type(other) is CausalLMOutput
    assert other.logits is other["logits"]
    assert float(other.loss) == 1
    assert other.hidden_states is None
    assert all(tensor.is_cuda == is_cuda(device) for tensor in (one["pixel_values"], other.logits, other.loss))
