"""Tokenizers from files: byte-level BPE against the published algorithm, caching, folders, damage."""

from __future__ import annotations

import json
import os
import threading
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelFormatError, ModelNotFoundError
from headrace.frontend import tokenizer_cache
from headrace.frontend.gguf_tokenizer import convert
from headrace.frontend.tokenizer import Tokenizer, load_tokenizer
from headrace.model.weights.gguf import GGUFFile
from tests.frontend.byte_model import byte_backend

TRICKY = [
    "Hello, world!",
    " leading and trailing ",
    "two  spaces\n\n\nlines\t\ttabs \r\n end",
    "don't I'LL they're we've",
    "numbers 1234567 ½ ³ ٣٤ 3.14159e-10",
    "naïve café ﬁ Å e\u0301 ñ",
    "日本語のテキスト 한국어 русский עברית",
    "emoji 🙂👩‍👩‍👧 🏳️‍🌈",
    "def f(x):\n    return {'a': [x ** 2]}  # comment\n",
    "\x00\x01 control \u200b zero width \ufeff",
    "a" * 300,
    "",
]
texts = st.text(max_size=60) | st.lists(st.sampled_from(TRICKY), max_size=3).map(" ".join)

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = {
    "gpt-2": [GPT2_WORDS],
    "smollm": [r"\p{N}", GPT2_WORDS],
    "llama-bpe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}


class ByteLevelBPE:
    """The published algorithm, written plainly: split into words, then merge the best pair until none is left."""

    def __init__(self, metadata: dict[str, Any], name: str) -> None:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in printable]
        self.letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
        self.patterns = WORDS[name]
        self.whole_words = name == "llama-bpe"

    def encode(self, text: str) -> list[int]:
        words = [text] if text else []
        for pattern in self.patterns:
            words = [piece for word in words for piece in self.split(pattern, word)]
        return [token for word in words for token in self.merge(word)]

    @staticmethod
    def split(pattern: str, text: str) -> Iterator[str]:
        at = 0
        for match in regex.finditer(pattern, text):
            if match.start() > at:
                yield text[at : match.start()]
            yield match[0]
            at = match.end()
        if at < len(text):
            yield text[at:]

    def merge(self, word: str) -> list[int]:
        symbols = [self.letters[b] for b in word.encode()]
        if self.whole_words and "".join(symbols) in self.ids:
            return [self.ids["".join(symbols)]]
        while len(symbols) > 1:
            pairs = list(zip(symbols, symbols[1:], strict=False))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            symbols[at : at + 2] = ["".join(best)]
        # SmolLM2 has no token for bytes that begin characters of unassigned planes: they are lost, as upstream.
        return [self.ids[symbol] for symbol in symbols if symbol in self.ids]


@pytest.fixture(scope="module")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    return dict(GGUFFile(smollm2_path).metadata)


@pytest.fixture(scope="module")
def with_pre(metadata: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """SmolLM2's vocabulary under another pre-tokenizer, as a folder."""
    made: dict[str, Tokenizer] = {}

    def make(name: str) -> Tokenizer:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            converted = convert(metadata | {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False})
            (folder / "tokenizer.json").write_text(json.dumps(converted.tokenizer))
            made[name] = load_tokenizer(folder)
        return made[name]

    return make


@pytest.mark.parametrize("name", WORDS)
def test_byte_level_bpe_is_the_published_algorithm(
    name: str, metadata: dict[str, Any], with_pre: Callable[[str], Tokenizer]
) -> None:
    ours, reference = with_pre(name), ByteLevelBPE(metadata, name)

    @settings(max_examples=60)
    @given(texts)
    def check(text: str) -> None:
        if name == "qwen2":
            assert ours.encode(text) == ours.encode(unicodedata.normalize("NFC", text))
            text = unicodedata.normalize("NFC", text)
        assert ours.encode(text) == reference.encode(text)

    check()


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2"])
def test_byte_level_bpe_is_that_of_transformers(
    name: str, metadata: dict[str, Any], with_pre: Callable[[str], Tokenizer]
) -> None:
    gguf = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    keys = {"tokens": "tokens", "merges": "merges", "token_type": "token_type"}
    described = {theirs: list(metadata[f"tokenizer.ggml.{ours}"]) for theirs, ours in keys.items()}
    described |= {"tokenizer_type": "gpt2", "pre_tokenizer_type": name}
    theirs, _ = gguf.convert_gguf_tokenizer("llama", described)
    for text in TRICKY:
        if name != "qwen2" or "\u0301" not in text:  # they leave out Qwen2's normalisation to NFC
            assert with_pre(name).encode(text) == theirs.encode(text, add_special_tokens=False).ids


def test_smollm2_chat_ids_are_those_of_the_published_tokenizer(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    ids = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407]
    ids += [19712, 8182, 2, 198, 1, 4093, 198]
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n"
    )
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_token_ids[0] == 2
    assert tokenizer.chat_template and "im_start" in tokenizer.chat_template


def test_token_bytes(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    for text in TRICKY:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_long_texts_take_the_same_path(smollm2_path: Path) -> None:
    """Long texts go through another call, which lets other threads run."""
    tokenizer = load_tokenizer(smollm2_path)
    text = "\n".join(TRICKY) * 20
    assert tokenizer.encode(text) == tokenizer._backend.encode(text).ids


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The GGUF files that were converted, rather than loaded from the cache."""
    seen: list[Path] = []
    original = tokenizer_cache.convert_file

    def counted(path: Path) -> dict[str, bytes]:
        seen.append(path)
        return original(path)

    monkeypatch.setattr(tokenizer_cache, "convert_file", counted)
    return seen


def test_a_converted_tokenizer_is_kept(smollm2_path: Path, cache: Path, conversions: list[Path]) -> None:
    first, second = load_tokenizer(smollm2_path), load_tokenizer(smollm2_path)
    assert conversions == [smollm2_path]
    assert first.fingerprint == second.fingerprint
    assert first.chat_template == second.chat_template
    assert first.eos_token_ids == second.eos_token_ids
    assert [path.name[0] for path in (cache / "tokenizers").iterdir()] != ["."], "no drafts are left"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("generation_config.json", b"{"),
    ],
)
def test_a_damaged_cache_is_made_again(
    smollm2_path: Path, cache: Path, conversions: list[Path], damage: bytes | None, name: str
) -> None:
    before = load_tokenizer(smollm2_path)
    [file] = (cache / "tokenizers").glob(f"*/{name}")
    if damage is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(damage)
    again = load_tokenizer(smollm2_path)
    assert len(conversions) == 2
    assert again.eos_token_ids == before.eos_token_ids
    load_tokenizer(smollm2_path)
    assert len(conversions) == 2


def test_a_cache_that_cannot_be_written_costs_only_time(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    assert load_tokenizer(smollm2_path).vocab_size == 49152


def test_a_changed_file_is_converted_again(smollm2_path: Path, cache: Path, conversions: list[Path]) -> None:
    copy = cache.parent / "copy.gguf"
    os.link(smollm2_path, copy) if same_device(smollm2_path, cache.parent) else copy.symlink_to(smollm2_path)
    folder = tokenizer_cache.converted_folder(copy)
    other = cache.parent / "other.gguf"
    other.write_bytes(b"GGUF")
    assert tokenizer_cache.converted_folder(other) != folder
    before = tokenizer_cache.converted_folder(other)
    os.utime(other, ns=(1, 1))
    assert tokenizer_cache.converted_folder(other) != before


def same_device(a: Path, b: Path) -> bool:
    return a.stat().st_dev == b.stat().st_dev


def test_many_first_loads_at_once(smollm2_path: Path, cache: Path) -> None:
    loaded: list[int] = []
    threads = [
        threading.Thread(target=lambda: loaded.append(load_tokenizer(smollm2_path).vocab_size)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == [49152] * 4
    assert len(list((cache / "tokenizers").iterdir())) == 1


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
    assert tokenizer.decode([2, 5, 4, 3]) == "ab<think>", "user-defined tokens are text, control tokens are not"
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


def save_folder(folder: Path, **files: Any) -> Path:
    byte_backend().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_folder_says_where_turns_end(tmp_path: Path) -> None:
    save_folder(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "<eos>"}, "bos_token": "<bos>"},
        generation_config={"eos_token_id": [258, 257]},
        config={"eos_token_id": 5},
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == (257, 258)
    assert tokenizer.bos_token_id == 256
    (tmp_path / "generation_config.json").unlink()
    assert load_tokenizer(tmp_path).eos_token_ids == (257, 5)


def test_where_folders_keep_their_template(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    save_folder(tmp_path, tokenizer_config={"chat_template": named})
    assert load_tokenizer(tmp_path).chat_template == "d"
    save_folder(tmp_path, tokenizer_config={}, chat_template={"chat_template": "j"})
    assert load_tokenizer(tmp_path).chat_template == "j"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).chat_template == "file"
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert load_tokenizer(tmp_path / "model.safetensors").chat_template == "file"


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(ModelFormatError, match=r"no readable tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFormatError, match="can't be read"):
        load_tokenizer(tmp_path)
    save_folder(tmp_path, tokenizer_config="[1]")
    with pytest.raises(ModelFormatError, match="JSON object"):
        load_tokenizer(tmp_path)
    (tmp_path / "noise.gguf").write_bytes(b"noise" * 100)
    with pytest.raises(ModelFormatError):
        load_tokenizer(tmp_path / "noise.gguf")


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
