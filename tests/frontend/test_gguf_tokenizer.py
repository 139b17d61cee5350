"""GGUF metadata of tokenizers: what it says, and what is wrong with it."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ModelFormatError
from headrace.frontend.gguf_tokenizer import convert
from headrace.frontend.tokenizer import Tokenizer, load_tokenizer


def small(**changes: Any) -> dict[str, Any]:
    """Byte-level GGUF metadata with a handful of tokens."""
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<eos>", "<|eot_id|>", "<think>"],
        "token_type": np.array([1, 1, 1, 3, 3, 4], np.int32),
        "merges": ["a b"],
        "eos_token_id": 3,
    }
    metadata.update(changes)
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "t5"}, "'t5'.*supported are"),
        ({"model": ...}, "None"),
        ({"pre": "unheard-of"}, "'unheard-of'.*supported are"),
        ({"pre": ...}, "supported are"),
        ({"tokens": ...}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [1, 2]}, "tokens"),
        ({"tokens": "abc"}, "tokens"),
        ({"token_type": np.array([1], np.int32)}, "token_type: 6 numbers"),
        ({"merges": ...}, "merges"),
        ({"merges": ["ab"]}, "'ab'"),
        ({"merges": ["a b c"]}, "'a b c'"),
        ({"eos_token_id": 6}, "eos_token_id is 6.*0 to 5"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"bos_token_id": "x"}, "bos_token_id"),
        ({"bos_token_id": 1, "add_bos_token": 3}, "add_bos_token"),
        ({"model": "llama", "scores": np.array([1.0] * 5)}, "scores"),
        ({"model": "llama", "scores": np.array([np.nan] * 6)}, "NaN"),
        ({"model": "llama", "tokens": ["a b"] * 6, "scores": np.zeros(6)}, "plain space"),
    ],
)
def test_broken_metadata(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelFormatError, match=says):
        convert(small(**changes))


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 7),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.text(max_size=3), max_size=6),
    st.lists(st.integers(-1, 7), min_size=6, max_size=6).map(lambda numbers: np.array(numbers, np.int32)),
    st.lists(st.sampled_from(["a", "b", "ab", "<eos>", "▁", ""]), min_size=6, max_size=6),
    st.binary(max_size=3),
)
KEYS = ("model", "pre", "tokens", "token_type", "merges", "scores", "eos_token_id", "bos_token_id")
KEYS += ("unknown_token_id", "eot_token_id", "add_bos_token", "add_space_prefix")


@given(st.dictionaries(st.sampled_from(KEYS), anything, max_size=3), st.booleans())
def test_any_metadata_makes_a_tokenizer_or_a_clear_error(changes: dict[str, Any], spm: bool) -> None:
    base = {"model": "llama", "scores": np.arange(6.0)} if spm else {}
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ModelFormatError):
        tokenizer = build(small(**(base | changes)), Path(folder))
        tokenizer.encode("ab <eos> é")
        tokenizer.decode(range(8))


def test_a_template_that_is_no_text() -> None:
    with pytest.raises(ModelFormatError, match="chat_template"):
        convert(small() | {"tokenizer.chat_template": 5})


def build(converted_from: dict[str, Any], folder: Path) -> Tokenizer:
    converted = convert(converted_from)
    for name in ("tokenizer", "config", "generation"):
        file = {"config": "tokenizer_config", "generation": "generation_config"}.get(name, name)
        (folder / f"{file}.json").write_text(json.dumps(getattr(converted, name)))
    return load_tokenizer(folder)


def test_added_tokens_and_ends_of_turns(tmp_path: Path) -> None:
    tokenizer = build(small(), tmp_path)
    assert tokenizer.encode("ab<think>ba<|eot_id|>") == [2, 5, 1, 0, 4]
    assert tokenizer.decode([2, 5, 4, 3]) == "ab<think>", (
        "user-defined tokens are text, control tokens are not"
    )
    assert tokenizer.eos_token_ids == (3, 4), "an end of turn that the file does not name is one all the same"
    assert tokenizer.bos_token_id is None


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path) -> None:
    flags = {"bos_token_id": 4, "add_bos_token": True, "add_eos_token": True}
    tokenizer = build(small(**flags), tmp_path)
    assert tokenizer.encode("ab") == [4, 2, 3]
    assert tokenizer.encode("ab", add_special_tokens=False) == [2]


def test_llama3_adds_bos_unless_told_otherwise(tmp_path: Path) -> None:
    assert build(small(pre="llama-bpe", bos_token_id=4), tmp_path).encode("ab") == [4, 2]
    told = small(pre="llama-bpe", bos_token_id=4, add_bos_token=False)
    assert build(told, tmp_path).encode("ab") == [2]


def test_a_token_written_twice_has_its_first_id(tmp_path: Path) -> None:
    tokenizer = build(small(tokens=["a", "b", "ab", "ab", "a", "<eos>"], token_type=...), tmp_path)
    assert tokenizer.encode("ab") == [2]


def test_fingerprints_tell_tokenizers_apart(tmp_path: Path) -> None:
    prints = set()
    for index, changes in enumerate([{}, {"pre": "smollm"}, {"tokens": ["a", "b", "ab", "<e>", "x", "y"]}]):
        folder = tmp_path / str(index)
        folder.mkdir()
        prints.add(build(small(**changes), folder).fingerprint)
    assert len(prints) >= 2
    same = tmp_path / "same"
    same.mkdir()
    assert build(small(), same).fingerprint in prints
