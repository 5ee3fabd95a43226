"""Samples: neighbours share a token, and a batch depends on position alone."""

import numpy as np
import pytest

from rayformer.data.corpus import TokenStream
from rayformer.data.indexed import IndexedDataset, IndexedWriter
from rayformer.data.loader import HeldOutOrder, SampleReader, TrainingOrder
from rayformer.data.order import sample_at
from rayformer.errors import DataError


def stream_of(tmp_path, num_tokens):
    """Documents of 7 tokens that count from 0, after one document of 3 that the stream leaves out."""
    with IndexedWriter(tmp_path / "counted", "int32") as writer:
        writer.add_document([900, 901, 902])
        for start in range(0, num_tokens, 7):
            writer.add_document(np.arange(start, min(start + 7, num_tokens)))
    dataset = IndexedDataset(tmp_path / "counted")
    return TokenStream(dataset, 1, dataset.num_documents)


def reader_of(tmp_path, num_tokens, seq=8, vocab=1000):
    return SampleReader(stream_of(tmp_path, num_tokens), seq=seq, vocab=vocab)


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(9, 1), (29, 3), (32, 3), (33, 4)])
def test_samples_are_as_many_as_fit(tmp_path, num_tokens, num_samples):
    reader = reader_of(tmp_path, num_tokens)
    assert reader.num_samples == num_samples
    reader.read(range(num_samples))
    with pytest.raises(IndexError):
        reader.read([num_samples])


@pytest.mark.parametrize("num_tokens", [0, 1, 8])
def test_stream_without_a_whole_sample_is_refused(tmp_path, num_tokens):
    with pytest.raises(DataError, match=rf"counted\.bin: {num_tokens} tokens are fewer than .* seq \+ 1 = 9"):
        reader_of(tmp_path, num_tokens)


def test_labels_are_the_tokens_one_further_on_and_neighbours_share_one(tmp_path):
    tokens, labels = reader_of(tmp_path, 100).read([3, 4, 0])
    assert tokens.tolist() == [list(range(24, 32)), list(range(32, 40)), list(range(8))]
    assert (labels == tokens + 1).all()
    assert labels[0, -1] == tokens[1, 0]
    assert tokens.dtype == labels.dtype == np.int64
    assert not np.shares_memory(tokens, labels)


def test_single_sample_shares_no_memory_and_no_sample_is_a_batch(tmp_path):
    reader = reader_of(tmp_path, 100)
    assert not np.shares_memory(*reader.read([0]))
    assert [part.shape for part in reader.read([])] == [(0, 8), (0, 8)]


def test_id_outside_the_vocabulary_is_named_with_its_place(tmp_path):
    reader = reader_of(tmp_path, 100, vocab=30)
    reader.read([0, 1, 2])
    with pytest.raises(DataError, match=r"counted\.bin: sample 3 has id 30 at token 33 of the file, .*model\.vocab=30"):
        reader.read([0, 3])


def test_training_order_is_the_keyed_one_over_epochs(tmp_path):
    reader = reader_of(tmp_path, 100)
    assert reader.num_samples == 12
    tokens, _ = TrainingOrder(reader, seed=5).batch(7, 20)
    assert tokens[:, 0].tolist() == [8 * sample_at(n, num_samples=12, seed=5) for n in range(7, 27)]


def test_batches_do_not_depend_on_how_they_are_asked_for(tmp_path):
    order = TrainingOrder(reader_of(tmp_path, 100), seed=5)
    whole = order.batch(3, 8)
    parts = [order.batch(first, 2) for first in range(3, 11, 2)]
    for i in range(2):
        assert (whole[i] == np.concatenate([part[i] for part in parts])).all()


def test_held_out_order_is_ascending_and_begins_again(tmp_path):
    tokens, _ = HeldOutOrder(reader_of(tmp_path, 33)).batch(2, 5)
    assert tokens[:, 0].tolist() == [16, 24, 0, 8, 16]
