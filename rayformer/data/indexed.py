"""Megatron's .bin/.idx pair: tokens back to back in one file, and where sequences and documents begin in the other.

.idx, little endian, for N sequences and K = documents + 1

    0          9 bytes   magic "MMIDIDX" and two zero bytes
    9          u64       version, 1
    17         u8        dtype code
    18, 26     u64, u64  N, K
    34         int32[N]  length of each sequence in tokens
    34+4N      int64[N]  its first byte in .bin
    34+12N     int64[K]  first sequence of each document; begins with 0, ends with N
    34+12N+8K  int8[N]   modes, only in multimodal files (accepted and not used)
"""

from __future__ import annotations

import os
import struct
import uuid
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rayformer.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name) for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
MAX_SEQUENCE = 2**31 - 1  # tokens: lengths are stored as int32

_HEADER = struct.Struct("<9sQBQQ")
_CHECK_BLOCK = 1 << 20


class IndexedFileError(DataError):
    """A .bin or .idx file can't be read as what it is named: its path, the rule it breaks, and a way out."""

    def __init__(self, path: Path, rule: str, fix: str) -> None:
        super().__init__(path, rule, fix)  # all of them, so that it can be pickled
        self.path, self.rule, self.fix = path, rule, fix

    def __str__(self) -> str:
        return f"{self.path}: {self.rule}; {self.fix}"


def index_path(prefix: str | Path) -> Path:
    """Return the .idx file of a prefix."""
    return Path(f"{prefix}.idx")


def tokens_path(prefix: str | Path) -> Path:
    """Return the .bin file of a prefix."""
    return Path(f"{prefix}.bin")


def optimal_dtype(vocab_size: int | None) -> np.dtype:
    """Return the dtype that Megatron stores a vocabulary of this size in: uint16 below 65,500, else int32."""
    return DTYPES[8] if vocab_size is not None and vocab_size < 65500 else DTYPES[4]


def sequence_pointers(lengths: npt.ArrayLike, itemsize: int) -> npt.NDArray[np.int64]:
    """Return the first byte of each sequence in .bin, computed in 64 bits whatever the dtype of lengths."""
    sizes = np.asarray(lengths, dtype=np.int64) * itemsize
    pointers = np.zeros_like(sizes)
    np.cumsum(sizes[:-1], out=pointers[1:])
    return pointers


class IndexedWriter:
    """Writes a .bin/.idx pair that appears under its names only when complete.

    Tokens go to a temporary file beside the target as they come; `close` writes the index, syncs both and renames
    .bin, then .idx. Leaving the `with` block by an exception removes what was written and leaves an older pair as is.

    >>> with IndexedWriter("corpus", optimal_dtype(257)) as writer:      # doctest: +SKIP
    ...     writer.add_document([72, 105, 256])                          # one sequence
    ...     writer.add_document([[72, 105], [256]])                      # two

    Raises DataError for tokens that dtype can't hold and for sequences beyond 2^31 - 1 tokens.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next((code for code, known in DTYPES.items() if known == self.dtype), None)
        if self._code is None:
            raise DataError(f"{prefix}: dtype {self.dtype} has no code in .idx; use one of {_known_dtypes()}")
        self._bin, self._idx = tokens_path(prefix), index_path(prefix)
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        unique = f".{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
        self._bin_part, self._idx_part = Path(f"{self._bin}{unique}"), Path(f"{self._idx}{unique}")
        self._file = open(self._bin_part, "xb")  # noqa: SIM115, closed by close and _discard
        self._lengths = array("i")
        self._bounds = array("q", [0])
        self._open_length = 0
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        return len(self._bounds) - 1

    def add_document(self, tokens: np.ndarray | Sequence[int] | Sequence[npt.ArrayLike]) -> None:
        """Add a document of one sequence (1-dim tokens) or of several (a sequence of them)."""
        several = len(tokens) > 0 and np.ndim(tokens[0]) > 0
        sequences: Iterable[Any] = tokens if several else (tokens,)
        for sequence in sequences:
            self.append(sequence)
            self.end_sequence()
        self.end_document()

    def append(self, tokens: npt.ArrayLike) -> None:
        """Add tokens to the sequence that is being written, for sequences that do not fit into memory."""
        values = self._cast(np.asarray(tokens))
        self._file.write(values.data)
        self._open_length += values.size
        self.num_tokens += values.size

    def end_sequence(self) -> None:
        """End the sequence that `append` was writing; one without tokens is a sequence too."""
        if self._open_length > MAX_SEQUENCE:
            raise DataError(
                f"{self._bin}: sequence {len(self._lengths)} has {self._open_length} tokens, and .idx counts at most "
                f"{MAX_SEQUENCE}; split its document into several"
            )
        self._lengths.append(self._open_length)
        self._open_length = 0

    def end_document(self) -> None:
        """End the document that consists of the sequences ended since the last one."""
        assert self._open_length == 0, "end_sequence comes before end_document"
        self._bounds.append(len(self._lengths))

    def close(self) -> None:
        """Write the index and give both files their names."""
        assert self._open_length == 0 and self._bounds[-1] == len(self._lengths), "the last document was not ended"
        try:
            _sync_and_close(self._file)
            with open(self._idx_part, "xb") as file:
                file.write(_HEADER.pack(MAGIC, VERSION, self._code, len(self._lengths), len(self._bounds)))
                lengths = np.asarray(self._lengths, dtype="<i4")
                file.write(lengths.tobytes())
                file.write(sequence_pointers(lengths, self.dtype.itemsize).astype("<i8").tobytes())
                file.write(np.asarray(self._bounds, dtype="<i8").tobytes())
                _sync_and_close(file)
            # An old index must not describe new tokens, not even between the two renames.
            self._idx.unlink(missing_ok=True)
            os.replace(self._bin_part, self._bin)
            os.replace(self._idx_part, self._idx)
            _sync_folder(self._bin.parent)
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def _discard(self) -> None:
        self._file.close()
        self._bin_part.unlink(missing_ok=True)
        self._idx_part.unlink(missing_ok=True)

    def _cast(self, values: np.ndarray) -> np.ndarray:
        if values.size == 0:
            return np.empty(0, self.dtype)
        if values.ndim != 1:
            raise DataError(f"{self._bin}: a sequence must have 1 dim, found shape {values.shape}; flatten it")
        if self.dtype.kind in "iu":
            low, high = values.min(), values.max()
            info = np.iinfo(self.dtype)
            if values.dtype.kind not in "iu" or low < info.min or high > info.max:
                raise DataError(
                    f"{self._bin}: tokens of dtype {values.dtype} from {low} to {high} do not fit into {self.dtype}; "
                    "use optimal_dtype(vocab_size)"
                )
        return np.ascontiguousarray(values, dtype=self.dtype)


class IndexedDataset:
    """Reads a .bin/.idx pair through memory maps, after checking everything that the index says.

    `lengths` int32[N] tokens, `pointers` int64[N] bytes, `document_bounds` int64[K] sequences. Opening reads the
    index once and no tokens. Raises IndexedFileError, a DataError, naming the file, what was expected and what was
    found; among others where sequences are not back to back, because `tokens` could then not be one stream.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.path = tokens_path(prefix)
        self._index_path = index_path(prefix)
        index = _map(self._index_path)
        self.dtype, self.num_sequences, num_bounds = self._header(index)
        lengths_end = _HEADER.size + 4 * self.num_sequences
        self.lengths: npt.NDArray[np.int32] = index[_HEADER.size : lengths_end].view("<i4")
        pointers_end = lengths_end + 8 * self.num_sequences
        self.pointers: npt.NDArray[np.int64] = index[lengths_end:pointers_end].view("<i8")
        self.document_bounds: npt.NDArray[np.int64] = index[pointers_end : pointers_end + 8 * num_bounds].view("<i8")
        self.num_documents = num_bounds - 1
        self._check_bounds()
        tokens = _map(self.path)
        self._check_pointers(tokens.size)
        self._tokens = tokens.view(self.dtype)
        self.num_tokens = self._tokens.size

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` tokens (default: the rest) of sequence i from token `offset` on, a read-only view."""
        if not 0 <= i < self.num_sequences:
            raise IndexError(f"{self.path}: sequence {i} of {self.num_sequences}")
        size = int(self.lengths[i])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"{self.path}: tokens {offset} to {stop} of sequence {i}, which has {size}")
        start = int(self.pointers[i]) // self.dtype.itemsize
        return self._tokens[start + offset : start + stop]

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of all sequences back to back, a read-only view."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"{self.path}: tokens {start} to {stop} of {self.num_tokens}")
        return self._tokens[start:stop]

    def document_start(self, document: int) -> int:
        """Return the position in `tokens` of a document's first token; num_documents stands for the end."""
        sequence = int(self.document_bounds[document])
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self.pointers[sequence]) // self.dtype.itemsize

    def _header(self, index: np.ndarray) -> tuple[np.dtype, int, int]:
        found = index[: _HEADER.size].tobytes()
        magic = found[: len(MAGIC)]
        if magic != MAGIC:
            self._refuse(
                f"expected magic {MAGIC.hex()} ({MAGIC!r}) at byte 0, found {magic.hex()} ({magic!r})",
                "give a Megatron index of version 1, or preprocess the text anew",
            )
        if len(found) < _HEADER.size:
            self._refuse(f"expected a header of {_HEADER.size} bytes, found {len(found)}", "copy or write it anew")
        _, version, code, num_sequences, num_bounds = _HEADER.unpack(found)
        if version != VERSION:
            self._refuse(
                f"expected version {VERSION} at byte 9, found {version} ({found[9:17].hex()})",
                f"convert it to version {VERSION}",
            )
        if code not in DTYPES:
            self._refuse(
                f"expected a dtype code of {_known_dtypes()} at byte 17, found {code} ({found[17:18].hex()})",
                "write it anew with one of these",
            )
        plain = _HEADER.size + 12 * num_sequences + 8 * num_bounds
        if num_bounds < 1 or index.size not in (plain, plain + num_sequences):
            self._refuse(
                f"expected {plain} bytes for {num_sequences} sequences and {num_bounds} document boundaries (at "
                f"least 1), or {plain + num_sequences} with modes, found {index.size}",
                "copy or write it anew",
            )
        return DTYPES[code], num_sequences, num_bounds

    def _check_bounds(self) -> None:
        bounds = self.document_bounds
        if bounds[0] != 0 or bounds[-1] != self.num_sequences:
            self._refuse(
                f"expected the first document boundary to be 0 and the last {self.num_sequences}, the number of "
                f"sequences, found {bounds[0]} and {bounds[-1]}",
                "write it anew",
            )
        if (falling := np.flatnonzero(bounds[1:] < bounds[:-1])).size:
            i = int(falling[0])
            self._refuse(
                f"expected document boundaries in ascending order, found {bounds[i]} before {bounds[i + 1]} at {i}",
                "write it anew",
            )

    def _check_pointers(self, bin_bytes: int) -> None:
        end = 0
        for first in range(0, self.num_sequences, _CHECK_BLOCK):
            lengths = self.lengths[first : first + _CHECK_BLOCK]
            pointers = self.pointers[first : first + _CHECK_BLOCK]
            if (negative := np.flatnonzero(lengths < 0)).size:
                i = int(negative[0])
                self._refuse(f"expected lengths from 0 on, found {lengths[i]} at sequence {first + i}", "write it anew")
            expected = end + sequence_pointers(lengths, self.dtype.itemsize)
            if (gaps := np.flatnonzero(pointers != expected)).size:
                i = int(gaps[0])
                self._refuse(
                    f"expected sequence {first + i} at byte {expected[i]} of .bin, where the one before it ends, "
                    f"found {pointers[i]}",
                    "write the pair anew with its sequences back to back",
                )
            end = int(expected[-1]) + int(lengths[-1]) * self.dtype.itemsize
        if bin_bytes != end:
            raise IndexedFileError(
                self.path,
                f"expected {end} bytes, as {self._index_path.name} says, found {bin_bytes}",
                "copy or write the pair anew",
            )

    def _refuse(self, rule: str, fix: str) -> None:
        raise IndexedFileError(self._index_path, rule, fix)


def _map(path: Path) -> np.ndarray:
    """Return the bytes of a file as a read-only array; memory maps can't be empty, files can."""
    try:
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r")) if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise IndexedFileError(
            path, f"can't be read ({error.strerror})", "give the prefix of a readable .bin/.idx pair"
        ) from error


def _known_dtypes() -> str:
    return ", ".join(f"{code} ({dtype.name})" for code, dtype in DTYPES.items())


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
