"""Tokenizers: text to ids and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rayformer.errors import ConfigError, Problem


class ByteTokenizer:
    """One id a byte, and one more that ends a document."""

    name = "byte"
    eod = 256
    vocab_size = 257

    def encode(self, text: str | bytes) -> npt.NDArray[np.uint16]:
        """Return the bytes of a text (a str as UTF-8) as ids, without eod.

        >>> ByteTokenizer().encode("Hi").tolist()
        [72, 105]
        """
        raw = text.encode() if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Return the text of ids: eod is dropped, bytes that are not UTF-8 become U+FFFD.

        Raises ValueError for ids outside the vocabulary.
        """
        values = np.asarray(ids, dtype=np.int64)
        return bytes(values[values != self.eod].tolist()).decode(errors="replace")


_KNOWN = {ByteTokenizer.name: ByteTokenizer}


def get_tokenizer(name: str) -> ByteTokenizer:
    """Return the tokenizer that `data.tokenizer` names; raises ConfigError for an unknown name."""
    if name not in _KNOWN:
        fix = f"use {', '.join(_KNOWN)}"
        raise ConfigError([Problem(keys={"data.tokenizer": name}, rule="no tokenizer has this name", fix=fix)])
    return _KNOWN[name]()
