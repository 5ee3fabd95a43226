"""Samples as arrays, in the order of training and of evaluation.

B samples of a batch, S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rayformer.data.corpus import TokenStream
from rayformer.data.order import sample_at
from rayformer.errors import DataError

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class SampleReader:
    """Cuts a stream into samples: sample j is tokens [j*seq, j*seq + seq + 1), so neighbours share one token.

    Raises DataError for a stream without a whole sample.
    """

    def __init__(self, stream: TokenStream, *, seq: int, vocab: int, ignore_ids: Sequence[int] = ()) -> None:
        self._stream, self._seq, self._vocab = stream, seq, vocab
        self._ignored = np.array(ignore_ids, dtype=np.int64)
        self.num_samples = (stream.num_tokens - 1) // seq
        if self.num_samples < 1:
            raise DataError(
                f"{stream.path}: {stream.num_tokens} tokens are fewer than one sample of seq + 1 = {seq + 1}; use more "
                "data or a smaller batch.seq"
            )

    def read(self, sample_ids: Sequence[int]) -> Batch:
        """Return tokens [B, S] and labels [B, S], the tokens one further on or -1 for ids without loss.

        They share no memory. Raises DataError for an id outside the vocabulary.
        """
        block = np.empty((len(sample_ids), self._seq + 1), dtype=np.int64)  # [B, S+1]
        for row, sample in enumerate(sample_ids):
            start = sample * self._seq
            block[row] = self._stream.read(start, start + self._seq + 1)
        self._check(block, sample_ids)
        labels = block[:, 1:].copy()
        if len(self._ignored):
            labels[np.isin(labels, self._ignored)] = -1
        return block[:, :-1].copy(), labels

    def _check(self, block: npt.NDArray[np.int64], sample_ids: Sequence[int]) -> None:
        outside = np.argwhere((block < 0) | (block >= self._vocab))
        if len(outside):
            row, column = map(int, outside[0])
            position = self._stream.first_token + sample_ids[row] * self._seq + column
            raise DataError(
                f"{self._stream.path}: sample {sample_ids[row]} has id {block[row, column]} at token {position} of the "
                f"file, outside model.vocab={self._vocab}; use the vocabulary of the tokenizer that wrote the file"
            )


class TrainingOrder:
    """Reads samples in the keyed order of `sample_at`, a new one each epoch, without end."""

    def __init__(self, reader: SampleReader, seed: int) -> None:
        self._reader, self._seed = reader, seed
        self.num_samples = reader.num_samples

    def batch(self, first: int, count: int) -> Batch:
        """Return tokens and labels, each [count, S], of the samples number first to first + count of the run."""
        num_samples = self._reader.num_samples
        return self._reader.read(
            [sample_at(n, num_samples=num_samples, seed=self._seed) for n in range(first, first + count)]
        )


class HeldOutOrder:
    """Reads samples in ascending order, and from the beginning again after the last."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader

    def batch(self, first: int, count: int) -> Batch:
        """Return tokens and labels, each [count, S], of the samples number first to first + count."""
        return self._reader.read([n % self._reader.num_samples for n in range(first, first + count)])
