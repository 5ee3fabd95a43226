"""Tokenizers: bytes are ids."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayformer.data.tokenizers import ByteTokenizer, get_tokenizer
from rayformer.errors import ConfigError

byte = get_tokenizer("byte")


@settings(deadline=None)
@given(st.text())
def test_text_survives_its_ids(text):
    assert byte.decode(byte.encode(text)) == text


@settings(deadline=None)
@given(st.binary())
def test_ids_are_the_bytes(raw):
    ids = byte.encode(raw)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(raw)


def test_eod_is_beyond_the_bytes_and_dropped_in_text():
    assert (ByteTokenizer.eod, ByteTokenizer.vocab_size) == (256, 257)
    assert byte.decode([72, 105, 256, 33]) == "Hi!"


def test_bytes_that_are_not_text_are_replaced():
    assert byte.decode([72, 255]) == "H\ufffd"


def test_unknown_id_is_refused():
    with pytest.raises(ValueError):
        byte.decode([257])


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"data\.tokenizer=gpt2: no tokenizer has this name; use byte"):
        get_tokenizer("gpt2")
