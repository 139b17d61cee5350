"""Where tokenizers come from: the cache of converted ones, folders, and their damage."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelFormatError, ModelNotFoundError
from headrace.frontend import tokenizer_cache
from headrace.frontend.tokenizer import load_tokenizer
from tests.frontend.byte_model import byte_backend


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
        threading.Thread(target=lambda: loaded.append(load_tokenizer(smollm2_path).vocab_size))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == [49152] * 4
    assert len(list((cache / "tokenizers").iterdir())) == 1


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
