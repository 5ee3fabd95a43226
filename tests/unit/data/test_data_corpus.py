"""Corpora: what a path means, how it is cut, and everything that can be wrong with it, told at once."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash

from rayformer.data.corpus import TokenStream, open_corpus, problems
from rayformer.data.indexed import IndexedDataset, IndexedWriter, index_path, tokens_path
from rayformer.errors import DataError


def write(prefix, documents, dtype="uint16"):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def numbered(prefix, count):
    """Document i is the tokens i, i."""
    return write(prefix, [[i, i] for i in range(count)])


def opened(path, split=(99, 1, 0), cache_dir=None):
    return open_corpus(path, split=split, tokenizer="byte", cache_dir=cache_dir)


def told(tmp_path, *paths, **changes):
    settings = {"split": [99, 1, 0], "tokenizer": "byte", "vocab": 257, "seq": 4, "cache_dir": tmp_path / "cache"}
    return problems([(str(path), 1.0) for path in paths], **{**settings, **changes})


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of 60 small files, with a site-packages folder that is not part of it."""
    root = tmp_path / "lib"
    for i in range(60):
        path = root / f"pkg{i % 3}" / f"m{i:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {i}\n")
    for folder in ("site-packages", "pkg0/dist-packages"):
        (root / folder).mkdir()
        (root / folder / "alien.py").write_text("alien")
    (root / "pkg0" / "data.txt").write_text("not python")
    monkeypatch.setattr("rayformer.data.stdlib.sysconfig.get_paths", lambda: {"stdlib": str(root)})
    return root


@pytest.mark.parametrize("suffix", ["", ".idx", ".bin"])
def test_pair_is_found_by_prefix_or_either_file(tmp_path, suffix):
    assert opened(numbered(tmp_path / "a.b", 100) + suffix).train.num_tokens == 198


@pytest.mark.parametrize(
    ("split", "count", "train", "held_out"),
    [
        ([99, 1, 0], 100, range(99), range(99, 100)),
        ([8, 1, 1], 10, range(8), range(8, 9)),
        ([1, 0, 0], 10, range(10), None),
        ([99, 1, 0], 40, range(40), None),  # round(39.6)
        ([0.5, 0.25, 0.25], 5, range(2), range(2, 4)),  # round half to even, as Megatron's
        ([1, 1, 0], 3, range(2), range(2, 3)),
    ],
)
def test_documents_are_cut_by_the_weights(tmp_path, split, count, train, held_out):
    corpus = opened(numbered(tmp_path / "c", count), split)
    assert corpus.train.read(0, corpus.train.num_tokens).tolist() == [i for i in train for _ in range(2)]
    if held_out is None:
        assert corpus.held_out is None
    else:
        assert corpus.held_out.read(0, corpus.held_out.num_tokens).tolist() == [i for i in held_out for _ in range(2)]


def test_stream_is_a_part_of_the_file_and_ends_where_it_says(tmp_path):
    stream = TokenStream(IndexedDataset(numbered(tmp_path / "s", 5)), 1, 3)
    assert stream.read(1, 4).tolist() == [1, 2, 2]
    assert stream.read(1, 4).dtype == np.int64
    assert (stream.first_token, stream.num_tokens) == (2, 4)
    for start, stop in [(0, 5), (-1, 2), (3, 2)]:
        with pytest.raises(IndexError, match=r"s\.bin"):
            stream.read(start, stop)


def test_open_refuses_a_split_that_leaves_nothing_to_train_on(tmp_path):
    with pytest.raises(DataError, match=r"e\.bin: split \[0, 1, 0\] leaves no tokens of 4 documents"):
        opened(numbered(tmp_path / "e", 4), [0, 1, 0])


def test_library_is_cut_by_a_hash_of_the_names(library, tmp_path):
    corpus = opened("python-stdlib", cache_dir=tmp_path / "cache")
    files = {path.relative_to(library).as_posix(): path.read_bytes() for path in library.glob("pkg*/m*.py")}
    expected = {True: [], False: []}
    for name in sorted(files):
        expected[xxhash.xxh3_64_intdigest(name.encode()) % 20 == 0] += [*files[name], 256]
    assert expected[True] and expected[False]
    assert corpus.held_out.read(0, corpus.held_out.num_tokens).tolist() == expected[True]
    assert corpus.train.read(0, corpus.train.num_tokens).tolist() == expected[False]


def test_library_is_written_once_and_anew_when_a_file_changes(library, tmp_path):
    cache = tmp_path / "cache"
    opened("python-stdlib", cache_dir=cache)
    first = {path: path.stat().st_mtime_ns for path in cache.glob("*/*")}
    (library / "pkg0" / "m00.py").touch()
    opened("python-stdlib", cache_dir=cache)
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*/*")} == first
    assert len(first) == 4
    (library / "pkg0" / "m00.py").write_text("x = 9\n")  # of the same size
    opened("python-stdlib", cache_dir=cache)
    assert len(list(cache.iterdir())) == 2


def test_library_may_be_written_by_several_at_once(library, tmp_path):
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        corpora = list(pool.map(lambda _: opened("python-stdlib", cache_dir=cache), range(4)))
    assert len({corpus.train.num_tokens for corpus in corpora}) == 1
    assert len(list(cache.iterdir())) == 1  # the others left nothing behind


def test_failed_writing_of_the_library_leaves_nothing(library, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("rayformer.data.indexed.os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        opened("python-stdlib", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_library_of_this_python_is_large_enough_to_train_on(tmp_path):
    assert told(tmp_path, "python-stdlib", seq=1 << 20) == []
    assert not (tmp_path / "cache").exists()


def test_good_pair_has_no_problems(tmp_path):
    assert told(tmp_path, numbered(tmp_path / "good", 10)) == []


def test_all_problems_are_told_at_once(tmp_path):
    found = told(tmp_path, tmp_path / "a", tmp_path / "b", split=[1, -1, 0], tokenizer="gpt2")
    assert [sorted(problem.keys) for problem in found] == [
        ["data.split"],
        ["data.tokenizer"],
        ["data.train"],
        ["data.train[0].path"],
        ["data.train[1].path"],
    ]


@pytest.mark.parametrize(
    ("offset", "new", "words"),
    [(0, b"TNTIDX\0\0", "544e544944580000"), (9, b"\2", "found 2"), (17, b"\x63", "found 99")],
)
def test_damaged_pair_of_a_blend_is_named_with_the_bytes_found(tmp_path, offset, new, words):  # B06
    paths = [numbered(tmp_path / name, 10) for name in ("one", "two", "three")]
    raw = bytearray(index_path(paths[1]).read_bytes())
    raw[offset : offset + len(new)] = new
    index_path(paths[1]).write_bytes(raw)
    blend, damaged = told(tmp_path, *paths)
    assert "data.train" in blend.keys and "blends are not supported yet" in blend.rule
    assert damaged.keys == {"data.train[1].path": paths[1]}
    assert "two.idx: expected" in damaged.rule and words in damaged.rule


@pytest.mark.parametrize(
    "split", [[0, 0, 0], [-1, 2, 0], [1, 0], [1, 1, 1, 1], [float("nan"), 1, 1], [float("inf"), 0, 0]]
)
def test_split_that_is_not_three_weights_is_told(tmp_path, split):
    (problem,) = told(tmp_path, numbered(tmp_path / "p", 10), split=split)
    assert "data.split" in problem.keys


def test_empty_train_part_is_told(tmp_path):
    (problem,) = told(tmp_path, numbered(tmp_path / "p", 10), split=[0, 1, 0])
    assert {"data.train[0].path", "data.split"} == set(problem.keys)


@pytest.mark.parametrize(("seq", "count"), [(18, 0), (19, 0), (20, 1)])
def test_train_part_must_hold_one_sample(tmp_path, seq, count):
    found = told(tmp_path, numbered(tmp_path / "p", 10), split=[1, 0, 0], seq=seq)
    assert len(found) == count
    for problem in found:
        assert str(problem).startswith(f"data.train[0].path={tmp_path / 'p'}, batch.seq=20: its train part has 20 ")


def test_held_out_part_must_hold_one_sample_too(tmp_path):
    (problem,) = told(tmp_path, numbered(tmp_path / "p", 10), split=[9, 1, 0])
    assert "held-out part has 2 tokens" in problem.rule and "data.split" in problem.keys


def test_small_vocabulary_is_told(tmp_path):
    (problem,) = told(tmp_path, numbered(tmp_path / "p", 10), vocab=256)
    assert problem.keys == {"data.tokenizer": "byte", "model.vocab": 256}


def test_floats_are_not_tokens(tmp_path):
    (problem,) = told(tmp_path, write(tmp_path / "f", [np.ones(9)], "float64"))
    assert "f.bin: expected integers, found float64" in problem.rule


def test_truncated_tokens_are_told(tmp_path):
    path = numbered(tmp_path / "cut", 10)
    os.truncate(tokens_path(path), 39)
    (problem,) = told(tmp_path, path)
    assert "cut.bin: expected 40 bytes, as cut.idx says, found 39" in problem.rule


def test_cache_that_cannot_be_a_folder_is_told(tmp_path, library):
    (tmp_path / "file").write_text("")
    (problem,) = told(tmp_path, "python-stdlib", cache_dir=tmp_path / "file" / "cache")
    assert problem.keys == {"data.train[0].path": "python-stdlib"} and str(tmp_path / "file") in problem.rule
