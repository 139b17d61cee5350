"""Streaming a sequence's text gives what decoding it at once gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from headrace.errors import ModelFormatError
from headrace.frontend.detokenizer import Detokenizer
from headrace.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.frontend.byte_model import EOS, TURN, VOCAB, byte_backend

BYTES = Tokenizer(byte_backend())


def sentencepiece_backend(*, strip: bool = True) -> tokenizers.Tokenizer:
    """Llama 2's arrangement with a tiny vocabulary: control, 256 bytes, and a few pieces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁▁", "é", "語", "▁ab", "ab"]
    backend = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return backend


SPM = Tokenizer(sentencepiece_backend())
SPM_SIZE = SPM.vocab_size
TOKENIZERS = {"bytes": BYTES, "sentencepiece": SPM}


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], *, skip: bool = True) -> str:
    detokenizer, text, at = Detokenizer(tokenizer, skip_special_tokens=skip), "", 0
    for size in sizes:
        text += detokenizer.push(ids[at : at + size])
        at += size
    return text + detokenizer.push(ids[at:]) + detokenizer.finish()


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_deltas_join_to_the_decoded_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=20))
    skip = data.draw(st.booleans())
    assert stream(tokenizer, ids, sizes, skip=skip) == tokenizer.decode(ids, skip)


@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.booleans())
def test_byte_level_decoding_is_that_of_tokenizers(ids: list[int], skip: bool) -> None:
    assert BYTES.decode(ids, skip) == byte_backend().decode(ids, skip_special_tokens=skip)


@given(st.text(alphabet="ab é語🙂\n", max_size=20))
def test_sentencepiece_decoding_is_that_of_tokenizers(text: str) -> None:
    """On valid text; tokenizers turns a whole run of byte tokens into U+FFFD if any part of it is invalid."""
    ids = SPM._backend.encode(text.replace(" ", "▁")).ids
    assert SPM.decode(ids) == SPM._backend.decode(ids) == text.removeprefix(" ")


@given(st.text(max_size=50))
def test_any_text_survives_token_by_token(text: str) -> None:
    assert stream(BYTES, BYTES.encode(text), [1] * len(text.encode())) == text


def test_a_character_appears_with_its_last_byte() -> None:
    ids = BYTES.encode("🙂")
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push([token]) for token in ids] == ["", "", "", "🙂"]
    assert detokenizer.finish() == ""


def test_an_incomplete_character_at_the_end_is_a_replacement() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push(BYTES.encode("é")[:1]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_the_leading_space_of_sentencepiece_stays_where_text_goes_on() -> None:
    space_a = SPM.token_id("▁a")
    assert space_a is not None
    assert SPM.decode([space_a, space_a]) == "a a"
    assert Detokenizer(SPM, continues_text=True).push([space_a]) == " a"
    assert Detokenizer(SPM).push([1, space_a]) == "a"  # BOS is no text


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    ids = [TURN, *BYTES.encode("x"), EOS]
    assert BYTES.decode(ids) == "x"
    assert BYTES.decode(ids, skip_special_tokens=False) == "<turn>x<eos>"


def test_ids_beyond_the_vocabulary_are_no_text() -> None:
    """Models pad their vocabulary; a sampled padding id must not end the stream with an exception."""
    assert BYTES.decode([VOCAB + 7]) == ""
    assert BYTES.token_bytes(2**40) == b""


def test_a_tokenizer_that_cannot_generate_says_so() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelFormatError, match="not generate"):
        Tokenizer(backend).token_bytes(1)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@settings(max_examples=60)
@given(st.data())
def test_smollm2_decodes_as_tokenizers_does(smollm2: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, smollm2.vocab_size - 1), max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=20))
    assert stream(smollm2, ids, sizes) == smollm2.decode(ids) == smollm2._backend.decode(ids)
