"""Multiple choice and texts: scores against transformers, sources of text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.errors import ConfigError
from headrace.frontend.tokenizer import load_tokenizer
from headrace.lab.evaluate.choices import Choice, hellaswag, score_choices
from headrace.lab.evaluate.scoring import open_scorer
from headrace.lab.evaluate.texts import load_text, tokenise
from tests.lab.data_wheel import offer_cases
from tests.lab.small_models import make_model


def test_acc_and_acc_norm_are_those_of_a_direct_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_cases(tmp_path, monkeypatch)
    model = make_model(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    cases = hellaswag()
    assert cases[0].context == "Milling: The wheel turns 0 times and"
    assert cases[0].continuations[0] == " stops."

    def total(context: str, continuation: str) -> float:
        ids, start = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
        with torch.no_grad():
            rows = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
        return sum(float(rows[at - 1, ids[at]]) for at in range(start, len(ids)))

    expected = []
    for case in cases:
        totals = [total(case.context, text) for text in case.continuations]
        normed = [value / (len(text) - 1) for value, text in zip(totals, case.continuations, strict=True)]
        expected.append(
            {
                "acc": float(totals.index(max(totals)) == case.right),
                "acc_norm": float(normed.index(max(normed)) == case.right),
            }
        )
    advanced: list[int] = []
    with open_scorer(tmp_path / "model", max_tokens=256, backend="torch", threads=1) as scorer:
        items = score_choices(cases, scorer, tokenizer, advance=advanced.append)
        assert [item.scores for item in items] == expected
        assert any(scores["acc"] != scores["acc_norm"] for scores in expected)
        assert sum(advanced) == len(cases) == 12

        long = Choice("long", "word " * 200, (" yes", " no"), 0)  # loses its beginning, not its end
        assert set(score_choices([long], scorer, tokenizer)[0].scores) == {"acc", "acc_norm"}


def test_texts_are_joined_by_blank_lines_and_cut_to_a_number_of_tokens(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    (tmp_path / "a").write_text("one\n\n\n")
    (tmp_path / "b").write_text("\ntwo")
    text = load_text([str(tmp_path / "a"), str(tmp_path / "b")])
    assert text.content == "one\n\ntwo"
    assert tokenise(text, tokenizer, 5) == tokenizer.encode("one\n\n")
    assert tokenise(text, tokenizer, 500) == tokenizer.encode("one\n\ntwo")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe", r"not UTF-8 \(byte 0\)"), (b" \n", "is empty"), (None, "No such file")],
)
def test_texts_that_are_none(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_text([str(tmp_path / "text")])
