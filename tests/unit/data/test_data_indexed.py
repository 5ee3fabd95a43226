"""The .bin/.idx pair: Megatron's bytes, and errors that say what was found where."""

import hashlib
import json
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rayformer.data.indexed import (
    DTYPES,
    IndexedDataset,
    IndexedFileError,
    IndexedWriter,
    index_path,
    optimal_dtype,
    sequence_pointers,
    tokens_path,
)
from rayformer.errors import DataError

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "indexed_dataset.json").read_text())
FILES = GOLDEN["files"]

# B01: [1, 2, 3], [] and [65498] as uint16.
B01_IDX = bytes.fromhex(
    "4d4d49444944580000 0100000000000000 08 0300000000000000 0400000000000000 03000000 00000000 01000000"
    "0000000000000000 0600000000000000 0600000000000000"
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000"
)
B01_BIN = bytes.fromhex("0100 0200 0300 daff")


def write(prefix, documents, dtype="uint16"):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def pair(prefix, idx=B01_IDX, tokens=B01_BIN):
    index_path(prefix).write_bytes(idx)
    tokens_path(prefix).write_bytes(tokens)
    return prefix


def golden_documents(count):
    """GOLDEN["formula"]"""
    return [[(i * 31 + j * 7 + 3) % 1000 for j in range(1 + (i * 7919 + 13) % 61)] for i in range(count)]


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def patched(raw, offset, new):
    return raw[:offset] + new + raw[offset + len(new) :]


@pytest.mark.parametrize("name", ["tiny_uint16", "d40_uint16", "d40_int32", "d40_int64", "d40_uint8_mod256"])
def test_files_have_the_bytes_that_megatron_writes(tmp_path, name):
    golden = FILES[name]
    documents = golden_documents(golden["documents"])
    if golden["dtype"] == "uint8":
        documents = [[token % 256 for token in document] for document in documents]
    prefix = write(tmp_path / name, documents, golden["dtype"])
    assert tokens_path(prefix).stat().st_size == golden["bin_bytes"]
    assert index_path(prefix).stat().st_size == golden["idx_bytes"]
    assert sha256(tokens_path(prefix)) == golden["bin_sha256"]
    assert sha256(index_path(prefix)) == golden["idx_sha256"]

    dataset = IndexedDataset(prefix)
    assert dataset.num_sequences == golden["sequences"]
    assert dataset.num_documents == golden["documents"]
    assert dataset.lengths.tolist() == golden["sequence_lengths"]
    assert dataset.document_bounds.tolist() == golden["document_indices"]
    assert dataset.dtype == golden["dtype"]
    assert dataset.get(0, 1, 2).tolist() == golden["get_0_offset_1_length_2"]
    assert [dataset.get(i).tolist() for i in range(dataset.num_sequences)] == documents


def test_documents_of_several_sequences_have_the_bytes_that_megatron_writes(tmp_path):
    golden = FILES["tiny_int32_multi_sequence"]
    documents = [[d[:2], d[2:]] if i % 2 == 0 else d for i, d in enumerate(golden_documents(3))]
    prefix = write(tmp_path / "multi", documents, "int32")
    assert index_path(prefix).read_bytes().hex() == golden["idx_hex"]
    assert tokens_path(prefix).read_bytes().hex() == golden["bin_hex"]
    assert IndexedDataset(prefix).document_bounds.tolist() == golden["document_indices"]


def test_modes_of_a_multimodal_index_are_accepted(tmp_path):
    golden = FILES["tiny_int32_multimodal"]
    prefix = pair(tmp_path / "modes", bytes.fromhex(golden["idx_hex"]), bytes.fromhex(golden["bin_hex"]))
    dataset = IndexedDataset(prefix)
    assert dataset.lengths.tolist() == golden["sequence_lengths"]
    assert dataset.document_bounds.tolist() == golden["document_indices"]


def test_two_files_written_after_another_are_megatrons_merge(tmp_path):
    golden = FILES["merged tiny_uint16 + d40_uint16"]
    prefix = write(tmp_path / "merged", golden_documents(3) + golden_documents(40))
    assert sha256(tokens_path(prefix)) == golden["bin_sha256"]
    assert sha256(index_path(prefix)) == golden["idx_sha256"]
    assert IndexedDataset(prefix).document_bounds.tolist() == golden["document_indices"]


def test_dtype_codes_and_choice_are_megatrons():
    assert {dtype.name: code for code, dtype in DTYPES.items()} == GOLDEN["dtype_codes"]
    for size, name in GOLDEN["optimal_dtype"].items():
        assert optimal_dtype(None if size == "None" else int(size)) == name


def test_index_ends_with_the_number_of_sequences(tmp_path):  # B01
    prefix = write(tmp_path / "b01", [[1, 2, 3], [], [65498]])
    assert index_path(prefix).read_bytes() == B01_IDX
    assert tokens_path(prefix).read_bytes() == B01_BIN


def test_file_built_by_hand_is_read(tmp_path):  # B01
    dataset = IndexedDataset(pair(tmp_path / "b01"))
    assert [dataset.get(i).tolist() for i in range(3)] == [[1, 2, 3], [], [65498]]
    assert dataset.tokens(1, 4).tolist() == [2, 3, 65498]
    assert [dataset.document_start(d) for d in range(4)] == [0, 3, 3, 4]


def test_pointers_of_int32_lengths_do_not_overflow():  # B03
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pointers = sequence_pointers(np.array([2147483548, 123], dtype=np.int32), 4)
    assert pointers.dtype == np.int64
    assert pointers.tolist() == [0, 8589934192]


@pytest.mark.parametrize(
    ("offset", "new", "words"),
    [  # B06: what was expected, and the bytes found
        (0, b"TNTIDX\0\0", ["4d4d49444944580000", "544e544944580000", "TNTIDX"]),
        (9, b"\2", ["version 1", "found 2", "0200000000000000"]),
        (17, b"\x63", ["1 (uint8)", "8 (uint16)", "found 99", "(63)"]),
        (18, b"\4", ["expected 114 bytes", "4 sequences", "found 102"]),
        (26, b"\0", ["0 document boundaries"]),
        (34, b"\xff\xff\xff\xff", ["lengths from 0", "found -1 at sequence 0"]),
        (34, b"\4", ["sequence 1 at byte 8", "found 6"]),
        (46, b"\2", ["sequence 0 at byte 0", "found 2"]),
        (70, b"\1", ["first document boundary to be 0", "found 1 and 3"]),
        (94, b"\2", ["the last 3", "found 0 and 2"]),
        (78, b"\3", ["ascending", "found 3 before 2 at 1"]),
    ],
)
def test_damaged_index_is_refused_with_path_and_bytes(tmp_path, offset, new, words):
    prefix = pair(tmp_path / "damaged", idx=patched(B01_IDX, offset, new))
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix)
    for word in [str(index_path(prefix)), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 20, 33, 34, 101, 103])
def test_index_of_another_size_is_refused(tmp_path, size):
    prefix = pair(tmp_path / "short", idx=(B01_IDX + b"\0")[:size])
    with pytest.raises(DataError, match=r"short\.idx: expected"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("tokens", [b"", B01_BIN[:-1], B01_BIN + b"\0\0"])
def test_bin_of_another_size_is_refused(tmp_path, tokens):
    with pytest.raises(DataError, match=rf"cut\.bin: expected 8 bytes, as cut\.idx says, found {len(tokens)}"):
        IndexedDataset(pair(tmp_path / "cut", tokens=tokens))


@pytest.mark.parametrize("suffix", ["idx", "bin"])
def test_missing_file_is_named(tmp_path, suffix):
    prefix = pair(tmp_path / "half")
    Path(f"{prefix}.{suffix}").unlink()
    with pytest.raises(DataError, match=rf"half\.{suffix}: can't be read \(No such file"):
        IndexedDataset(prefix)


def test_error_survives_the_way_to_another_process(tmp_path):
    error = IndexedFileError(tmp_path, "rule", "fix")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == f"{tmp_path}: rule; fix"


def test_gap_at_a_block_border_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("rayformer.data.indexed._CHECK_BLOCK", 4)
    prefix = write(tmp_path / "blocks", [[1, 2]] * 11)
    assert IndexedDataset(prefix).num_tokens == 22
    raw = index_path(prefix).read_bytes()
    index_path(prefix).write_bytes(patched(raw, 34 + 4 * 11 + 8 * 8, b"\x22"))
    with pytest.raises(DataError, match=r"sequence 8 at byte 32 of \.bin, .* found 34"):
        IndexedDataset(prefix)


@settings(deadline=None)
@given(
    documents=st.lists(
        st.lists(arrays(np.int32, st.integers(0, 5)), min_size=1, max_size=3),
        max_size=6,
    )
)
def test_what_is_written_is_read(tmp_path_factory, documents):
    prefix = write(tmp_path_factory.mktemp("any") / "with.dots", documents, "int32")
    dataset = IndexedDataset(prefix)
    sequences = [sequence.tolist() for document in documents for sequence in document]
    assert [dataset.get(i).tolist() for i in range(dataset.num_sequences)] == sequences
    assert dataset.tokens(0, dataset.num_tokens).tolist() == [token for sequence in sequences for token in sequence]
    assert np.diff(dataset.document_bounds).tolist() == [len(document) for document in documents]
    assert dataset.num_documents == len(documents)


@pytest.mark.parametrize(
    "read",
    [
        lambda d: d.get(3),
        lambda d: d.get(-1),
        lambda d: d.get(0, 2, 2),
        lambda d: d.get(0, -1),
        lambda d: d.get(0, 4),
        lambda d: d.tokens(0, 5),
        lambda d: d.tokens(-1, 2),
        lambda d: d.tokens(3, 2),
    ],
)
def test_reading_outside_is_an_index_error(tmp_path, read):
    with pytest.raises(IndexError):
        read(IndexedDataset(pair(tmp_path / "b01")))


@pytest.mark.parametrize("tokens", [[65536], [-1], [1.5], [[[1]]]])
def test_tokens_that_do_not_fit_are_refused(tmp_path, tokens):
    with pytest.raises(DataError, match=r"out\.bin"), IndexedWriter(tmp_path / "out", "uint16") as writer:
        writer.add_document(tokens)
    assert list(tmp_path.iterdir()) == []


def test_dtype_without_a_code_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"uint64 has no code in \.idx; use one of 1 \(uint8\)"):
        IndexedWriter(tmp_path / "out", "uint64")


def test_sequence_too_long_for_the_index_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("rayformer.data.indexed.MAX_SEQUENCE", 3)
    with pytest.raises(DataError, match="sequence 1 has 4 tokens"):
        write(tmp_path / "long", [[1, 2, 3], [1, 2, 3, 4]])


def test_nothing_appears_before_close(tmp_path):
    with IndexedWriter(tmp_path / "out", "uint16") as writer:
        writer.add_document([1, 2])
        assert not index_path(tmp_path / "out").exists()
        assert not tokens_path(tmp_path / "out").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.idx"]
    assert (writer.num_documents, writer.num_tokens) == (1, 2)


def test_failed_writing_leaves_the_older_pair_alone(tmp_path):
    prefix = write(tmp_path / "out", [[1, 2, 3]])
    with pytest.raises(RuntimeError), IndexedWriter(prefix, "int32") as writer:
        writer.add_document([4])
        raise RuntimeError
    assert IndexedDataset(prefix).get(0).tolist() == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 2


def test_crash_between_the_renames_leaves_no_index(tmp_path, monkeypatch):
    prefix = write(tmp_path / "out", [[1, 2, 3]])
    replace = os.replace

    def replace_bin_only(source, target):
        if str(target).endswith(".idx"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr("rayformer.data.indexed.os.replace", replace_bin_only)
    with pytest.raises(KeyboardInterrupt):
        write(prefix, [[4, 5, 6]])
    assert [path.name for path in tmp_path.iterdir()] == ["out.bin"]
