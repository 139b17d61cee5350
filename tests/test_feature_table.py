"""README's table of features: each of ours has a page and a test, and no cell says more than it explains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SECTION = re.search(
    r"^## Features, beside other engines$(.*?)^## ", (ROOT / "README.md").read_text("utf-8"), re.M | re.S
)
assert SECTION, "README.md has no section of features"
TEXT = SECTION[1]
ENGINES = ["headrace", "vLLM", "SGLang", "llama.cpp", "TensorRT-LLM", "TGI", "OpenVINO GenAI"]
DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
NOTE = r"[⁰¹²³⁴⁵⁶⁷⁸⁹]+"
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<file>[^)#]+)(?:#(?P<anchor>[^)]+))?\)")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


header, RULE, *ROWS = [cells(line) for line in TEXT.splitlines() if line.startswith("|")]


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links, by GitHub's rule; code blocks have none."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_row_has_a_cell_for_each_engine() -> None:
    assert header == ["", *ENGINES]
    assert all(set(cell) <= set("-:") and cell for cell in RULE)
    assert {len(row) for row in [RULE, *ROWS]} == {len(header)}
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[re.sub(r"[\[\]`]|\(.*\)", "", row[0]) for row in ROWS])
def test_what_we_have_has_a_page_and_a_test(row: list[str]) -> None:
    name, ours, *peers = row
    for cell in peers:
        assert re.fullmatch(rf"|yes|part {NOTE}", cell), cell
    if not ours:
        assert not LINK.search(name), "a page about what we do not have"
        return
    page, test = LINK.fullmatch(name), LINK.fullmatch(ours)
    assert page and page["file"].startswith("docs/")
    assert (ROOT / page["file"]).is_file()
    assert page["anchor"] is None or page["anchor"] in anchors(ROOT / page["file"])
    assert test and re.fullmatch(rf"yes|part {NOTE}", test["text"])
    assert re.fullmatch(r"tests/(\w+/)*test_\w+\.py", test["file"]) and test["anchor"] is None
    assert re.search(r"^(async )?def test_", (ROOT / test["file"]).read_text("utf-8"), re.M)


def test_every_note_is_explained_in_a_few_words_and_used() -> None:
    explained = re.search(r"^In part: (.*?)\.$", TEXT, re.M | re.S)
    assert explained
    notes = [note.split(maxsplit=1) for note in explained[1].replace("\n", " ").split("; ")]
    numbers = [int(number.translate(DIGITS)) for number, _ in notes]
    assert numbers == list(range(1, len(notes) + 1))
    assert all(len(words.split()) <= 6 for _, words in notes)
    used = {
        int(number.translate(DIGITS)) for row in ROWS for cell in row for number in re.findall(NOTE, cell)
    }
    assert used == set(numbers)


def test_our_own_blanks_are_shown() -> None:
    assert sum(not row[1] and any(row[2:]) for row in ROWS) >= 4


def test_a_blank_and_what_was_read_are_explained() -> None:
    last = TEXT.strip().split("\n\n")[-1].replace("\n", " ")
    assert last.startswith("A blank is ")
    assert all(engine in last for engine in ENGINES[1:])
