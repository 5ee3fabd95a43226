"""Preprocessing: every file a document, in a fixed order, and nothing skipped in silence."""

import os

import pytest

from rayformer.data.indexed import IndexedDataset, optimal_dtype
from rayformer.data.preprocess import preprocess
from rayformer.data.tokenizers import ByteTokenizer
from rayformer.errors import DataError

EOD = ByteTokenizer.eod


def documents(prefix):
    dataset = IndexedDataset(prefix)
    return [dataset.get(i).tolist() for i in range(dataset.num_sequences)]


def folder_of(tmp_path, files):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_files_come_in_order_of_their_relative_paths(tmp_path):
    folder = folder_of(tmp_path, {"b/z.txt": b"3", "a.txt": b"2", "b.txt": b"4", "A.md": b"1", "empty": b""})
    summary = preprocess([folder], tmp_path / "out", ByteTokenizer())
    # "A.md" < "a.txt" < "b.txt" < "b/z.txt" < "empty"
    assert documents(summary.prefix) == [[ord("1"), EOD], [ord("2"), EOD], [ord("4"), EOD], [ord("3"), EOD], [EOD]]
    assert (summary.num_documents, summary.num_tokens) == (5, 9)
    assert IndexedDataset(summary.prefix).dtype == optimal_dtype(257)


def test_suffixes_choose_within_folders_only(tmp_path):
    folder = folder_of(tmp_path, {"a.txt": b"a", "b.md": b"b"})
    preprocess([folder / "b.md", folder], tmp_path / "out", ByteTokenizer(), suffixes=[".txt"])
    assert documents(tmp_path / "out") == [[ord("b"), EOD], [ord("a"), EOD]]


def test_bytes_that_are_not_text_are_kept_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("rayformer.data.preprocess._CHUNK_BYTES", 3)
    raw = bytes(range(256)) + "ü€".encode()
    preprocess([folder_of(tmp_path, {"raw": raw})], tmp_path / "out", ByteTokenizer())
    assert documents(tmp_path / "out") == [[*raw, EOD]]


def test_links_are_followed(tmp_path):
    folder = folder_of(tmp_path, {"a": b"a"})
    other = tmp_path / "other"
    other.mkdir()
    (other / "b").write_bytes(b"b")
    (folder / "link").symlink_to(other)
    preprocess([folder], tmp_path / "out", ByteTokenizer())
    assert documents(tmp_path / "out") == [[ord("a"), EOD], [ord("b"), EOD]]


def missing(folder):
    return folder / "missing"


def dangling_link(folder):
    (folder / "link").symlink_to(folder / "nowhere")
    return folder / "link"


def link_to_parent(folder):
    (folder / "loop").symlink_to(folder)
    return folder / "loop"


def pipe(folder):
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@pytest.mark.parametrize("make", [missing, dangling_link, pipe])
def test_file_that_cannot_be_read_is_named_and_nothing_is_written(tmp_path, make):
    folder = folder_of(tmp_path, {"a": b"a"})
    bad = make(folder)
    with pytest.raises(DataError, match=str(bad)):
        preprocess([folder / "a", bad], tmp_path / "out", ByteTokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


@pytest.mark.parametrize("make", [dangling_link, link_to_parent, pipe])
def test_folder_with_something_that_cannot_be_read_is_refused(tmp_path, make):
    folder = folder_of(tmp_path, {"a": b"a"})
    bad = make(folder)
    with pytest.raises(DataError, match=str(bad)):
        preprocess([folder], tmp_path / "out", ByteTokenizer())


def test_empty_folder_and_no_input_are_refused(tmp_path):
    folder = folder_of(tmp_path, {"a.md": b"a"})
    with pytest.raises(DataError, match=r"texts: the folder holds no files ending in \.txt"):
        preprocess([folder], tmp_path / "out", ByteTokenizer(), suffixes=[".txt"])
    (folder / "a.md").unlink()
    with pytest.raises(DataError, match="texts: the folder holds no files;"):
        preprocess([folder], tmp_path / "out", ByteTokenizer())
    with pytest.raises(DataError, match="no input files"):
        preprocess([], tmp_path / "out", ByteTokenizer())
