"""headrace compress draft: a few layers of the target, taught and measured, and served beside it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.lab.compress.training.drafting import Costs
from tests.lab.small_models import make_model
from tests.lab.training import Train, read_training, trainer


@pytest.fixture(scope="module")
def files(taught: Path) -> Path:
    return taught


@pytest.fixture
def train(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Train:
    return trainer(files, capsys, monkeypatch)


def test_a_draft_is_made_measured_and_used(train: Train, files: Path, tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text(
        "\n".join(
            json.dumps({"messages": [{"role": "user", "content": f"{number}?"}]}) for number in range(40)
        )
    )
    output = tmp_path / "draft"
    asked = ["--data", str(tmp_path / "asked.jsonl")]
    done = train("draft", "-o", str(output), "--layers", "1", "--steps", "15", "--generate", "24",
                 "--new-tokens", "24", "--quantization", "off", *asked)  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = read_training(output)
    found = report.drafting
    assert found is not None
    assert report.kind == "draft" and report.kl_after < report.kl_before
    assert report.student.endswith("layers 0 of 3")
    assert found.prompts >= 2 and found.output_tokens > 0
    assert all(0 <= share <= 1 for share in found.accepted_at)
    assert "one stream: " in done.stdout and "On this machine it " in done.stdout
    last = shlex.split(done.stdout.splitlines()[-1])
    assert last[:2] == ["headrace", "serve"]
    settings = json.loads(last[-1])
    params = SamplingParams(max_tokens=16, temperature=0)
    with LLM(str(files / "model"), speculative_config=settings | {"adaptive": False}) as llm:
        [fast] = llm.generate("The miller", params)
        assert llm.stats().draft_tokens > 0
    with LLM(str(files / "model")) as llm:
        [plain] = llm.generate("The miller", params)
    assert fast.outputs == plain.outputs


def test_a_draft_learns_from_questions_that_the_target_makes_up(
    train: Train, files: Path, tmp_path: Path
) -> None:
    """This one knows nothing, and one byte in four ends its turn."""
    talker = tmp_path / "talker"
    make_model(talker, chat=True)
    config = json.loads((talker / "config.json").read_text())
    (talker / "config.json").write_text(json.dumps(config | {"eos_token_id": list(range(64))}))
    own = ["--data", "self", "--steps", "3", "--generate", "20", "--new-tokens", "8"]
    output = tmp_path / "draft"
    done = train("draft", "-o", str(output), "--layers", "1,2", "--quantization", "int4", *own,
                 model=str(talker))  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = read_training(output)
    assert report.data["generated"] == 20
    assert report.drafting is not None and report.drafting.prompts >= 1
    done = train("draft", "-o", str(tmp_path / "out"), "--samples", "4", *own)
    assert (done.returncode, "give --samples 0" in done.stderr) == (1, True)
    config = json.loads((talker / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (talker / "tokenizer_config.json").write_text(json.dumps(config))
    done = train("draft", "-o", str(tmp_path / "out"), *own, model=str(talker))
    assert (done.returncode, "has no chat template" in done.stderr) == (1, True)


def test_bad_input_is_told(train: Train, files: Path, tmp_path: Path) -> None:
    done = train("draft", "-o", str(tmp_path / "out"), "--layers", "3")
    assert (done.returncode, "--layers: 3 must be 1 to 2 of the target's 3" in done.stderr) == (1, True)
    done = train("draft", "-o", str(tmp_path / "out"), "--layers", "2,0")
    assert (done.returncode, "must be some of the teacher's 0 to 2" in done.stderr) == (1, True)
    done = train("draft", "-o", str(tmp_path / "out"), "--layers", "few")
    assert (done.returncode, "must be a count, or numbers of layers" in done.stderr) == (1, True)
    (tmp_path / "few.jsonl").write_text(json.dumps({"text": "Only one."}))
    done = train("draft", "-o", str(tmp_path / "out"), "--data", str(tmp_path / "few.jsonl"), "--steps", "1")
    assert (done.returncode, "1 prompts of up to 32 tokens are too few" in done.stderr) == (1, True)
    assert not (tmp_path / "out").exists()


def test_which_target_a_draft_pays_for_follows_from_its_costs() -> None:
    """A cycle with one token right in two, a draft at a fifth of a step and free verification: 1.5 / 1.2."""
    costs = Costs(drafted=0.2, verifying=1.0)
    assert costs.speedup([0.5]) == pytest.approx(1.25)
    assert costs.speedup([0.5], times=2.0) == pytest.approx(1.5 / 1.1)
    times = costs.pays_from([0.5], 1.4)
    assert times is not None and costs.speedup([0.5], times) == pytest.approx(1.4)
    assert costs.pays_from([0.5], 1.6) is None
    assert costs.speedup([0.0, 0.0]) == 1.0
