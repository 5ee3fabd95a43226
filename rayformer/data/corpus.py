"""What `data.train[].path` means: a stream of tokens to train on, and one that is held out."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rayformer.data.indexed import IndexedDataset, IndexedFileError
from rayformer.data.stdlib import build_stdlib, stdlib_files
from rayformer.data.tokenizers import get_tokenizer
from rayformer.errors import ConfigError, DataError, Problem

PYTHON_STDLIB = "python-stdlib"


class TokenStream:
    """The tokens of documents [first_document, last_document) of a dataset, back to back."""

    def __init__(self, dataset: IndexedDataset, first_document: int, last_document: int) -> None:
        assert 0 <= first_document <= last_document <= dataset.num_documents
        self._dataset = dataset
        self.path = dataset.path
        self.first_token = dataset.document_start(first_document)  # position in the file
        self.num_tokens = dataset.document_start(last_document) - self.first_token

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return a copy of tokens [start, stop) of the stream; raises IndexError outside of it."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"{self.path}: tokens {start} to {stop} of a stream of {self.num_tokens}")
        return self._dataset.tokens(self.first_token + start, self.first_token + stop).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus cut into its two parts; an empty held-out part is None."""

    train: TokenStream
    held_out: TokenStream | None


def corpus_path(path: str, base_dir: Path) -> str:
    """The path as it can be opened from anywhere: a relative one starts from base_dir."""
    return path if path == PYTHON_STDLIB else str(base_dir / path)


def open_corpus(path: str, *, split: Sequence[float], tokenizer: str, cache_dir: Path) -> Corpus:
    """Open `python-stdlib` or a .bin/.idx pair (given by its prefix, or by either file).

    The documents of a pair are cut in file order by the weights of split: train, held out, and not used. The standard
    library has its own cut, by file names, and is written below cache_dir on first use. Raises DataError for what
    `problems` would have told before.
    """
    if path == PYTHON_STDLIB:
        train, held_out = map(IndexedDataset, build_stdlib(cache_dir, get_tokenizer(tokenizer)))
        return Corpus(
            train=TokenStream(train, 0, train.num_documents), held_out=TokenStream(held_out, 0, held_out.num_documents)
        )
    return _cut(_open_pair(path), split)


def problems(
    entries: Sequence[tuple[str, float]],
    *,
    split: Sequence[float],
    tokenizer: str,
    vocab: int,
    seq: int,
    cache_dir: Path,
) -> list[Problem]:
    """Return everything that keeps `data.train` (path and weight of each entry) from being trained on.

    Reads names, sizes and index files, never tokens, and writes nothing.
    """
    found = [*_split_problems(split), *_tokenizer_problems(tokenizer, vocab)]
    usable_split = None if any("data.split" in problem.keys for problem in found) else split
    if len(entries) != 1:
        found.append(
            Problem(
                keys={"data.train": [path for path, _ in entries]},
                rule=f"blends are not supported yet, so it must have exactly one entry and has {len(entries)}",
                fix="keep one, or write all texts into one .bin/.idx pair",
            )
        )
    for i, (path, _) in enumerate(entries):
        key = f"data.train[{i}].path"
        if path == PYTHON_STDLIB:
            found += _stdlib_problems(key, seq, cache_dir)
        else:
            found += _pair_problems(key, path, usable_split, seq)
    return found


def _open_pair(path: str) -> IndexedDataset:
    dataset = IndexedDataset(path.removesuffix(".idx").removesuffix(".bin"))
    if dataset.dtype.kind == "f":
        raise IndexedFileError(
            dataset.path, f"expected integers, found {dataset.dtype.name}", "write token ids as integers"
        )
    return dataset


def _cut(dataset: IndexedDataset, split: Sequence[float]) -> Corpus:
    """Cut at round(share of the weights * number of documents), as Megatron does."""
    lows = [0.0, *accumulate(weight / sum(split) for weight in split)]
    first, middle, last, _ = (round(low * dataset.num_documents) for low in lows)
    train, held_out = TokenStream(dataset, first, middle), TokenStream(dataset, middle, last)
    if train.num_tokens == 0:
        raise DataError(
            f"{dataset.path}: split {list(split)} leaves no tokens of {dataset.num_documents} documents to train on; "
            "give train a larger weight"
        )
    return Corpus(train=train, held_out=held_out if held_out.num_tokens else None)


def _split_problems(split: Sequence[float]) -> Iterator[Problem]:
    if len(split) != 3 or not all(math.isfinite(weight) and weight >= 0 for weight in split) or sum(split) <= 0:
        yield Problem(
            keys={"data.split": list(split)},
            rule="must be three weights (train, held out, not used), none negative, with a positive sum",
            fix="use for example [99, 1, 0]",
        )


def _tokenizer_problems(tokenizer: str, vocab: int) -> Iterator[Problem]:
    try:
        size = get_tokenizer(tokenizer).vocab_size
    except ConfigError as error:
        yield from error.problems
        return
    if vocab < size:
        yield Problem(
            keys={"data.tokenizer": tokenizer, "model.vocab": vocab},
            rule=f"the tokenizer has {size} ids, more than the model's vocabulary",
            fix=f"use model.vocab={size} or more",
        )


def _stdlib_problems(key: str, seq: int, cache_dir: Path) -> Iterator[Problem]:
    keys = {key: PYTHON_STDLIB}
    try:
        train, _ = stdlib_files()
    except DataError as error:
        yield Problem(keys=keys, rule=str(error), fix="or use a .bin/.idx pair")
        return
    yield from _size_problems(keys, "train part", sum(file.num_bytes + 1 for file in train), seq)
    existing = next(folder for folder in (cache_dir.absolute(), *cache_dir.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(
            keys=keys,
            rule=f"its tokens are kept in {cache_dir}, and {existing} is not a folder that can be written to",
            fix="make it one, or use another place",
        )


def _pair_problems(key: str, path: str, split: Sequence[float] | None, seq: int) -> Iterator[Problem]:
    keys = {key: path}
    try:
        dataset = _open_pair(path)
    except IndexedFileError as error:
        yield Problem(keys=keys, rule=f"{error.path}: {error.rule}", fix=error.fix)
        return
    if split is None:
        return
    try:
        corpus = _cut(dataset, split)
    except DataError:
        yield Problem(
            keys={**keys, "data.split": list(split)},
            rule=f"no tokens of its {dataset.num_documents} documents are left to train on",
            fix="give the first part of data.split a larger weight, or the file more documents",
        )
        return
    yield from _size_problems(keys, "train part", corpus.train.num_tokens, seq)
    if corpus.held_out is not None:
        held_out_keys = {**keys, "data.split": list(split)}
        yield from _size_problems(held_out_keys, "held-out part", corpus.held_out.num_tokens, seq)


def _size_problems(keys: Mapping[str, object], part: str, num_tokens: int, seq: int) -> Iterator[Problem]:
    if num_tokens < seq + 1:
        yield Problem(
            keys={**keys, "batch.seq": seq},
            rule=f"its {part} has {num_tokens} tokens, fewer than one sample of batch.seq + 1 = {seq + 1}",
            fix="use more data, a smaller batch.seq or another data.split",
        )
