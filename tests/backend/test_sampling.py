"""What every column of the sampling table means, for the numpy sampler and each path of the native one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.backend.batch import SamplingTable
from headrace.backend.cpu import _native
from headrace.backend.sampling import Counter, philox4x32, sample, uniform
from tests.backend.sampling_tables import SAMPLERS, make_table, run_sampler

INF = float("inf")
NAN = float("nan")

every_sampler = pytest.mark.parametrize("sampler", SAMPLERS)


def drawn(sampler: str, logits: list[float], draws: int = 400, **columns: Any) -> set[int]:
    """The tokens that turn up at ``draws`` positions of one row's distribution."""
    rows = np.tile(np.array(logits, np.float32), (draws, 1))
    for name in ("seen", "bias"):
        if name in columns:
            columns[name] = [columns[name]] * draws
    table = make_table(draws, len(logits), position=np.arange(draws), **columns)
    result = run_sampler(sampler, rows, table)
    assert not result.failed.any()
    return set(result.token_ids.tolist())


@pytest.mark.parametrize("philox", [philox4x32, _native.philox4x32])
@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            0xFFFFFFFF_FFFFFFFF,
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            0x299F31D0_A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(philox: object, key: int, counter: Counter, expected: Counter) -> None:
    """Random123's known-answer vectors for philox4x32, 10 rounds."""
    assert callable(philox)
    assert tuple(philox(key, counter)) == expected


def test_uniform_stays_below_one() -> None:
    values = [uniform(seed, 1, position) for seed in range(30) for position in range(30)]
    assert all(0 <= value < 1 for value in values)
    assert len(set(values)) == len(values)
    assert abs(float(np.mean(values)) - 0.5) < 0.03


@every_sampler
def test_greedy_takes_the_lowest_of_equal_logits(sampler: str) -> None:
    logits = [[0, 3, 1, 3, 3], [-0.0, 0.0, -1, -1, -1], [-INF, -5, -INF, -5, -INF]]
    assert run_sampler(sampler, np.array(logits), make_table(3, 5, temperature=0)).token_ids.tolist() == [
        1,
        0,
        1,
    ]


@every_sampler
def test_greedy_far_into_a_wide_row(sampler: str) -> None:
    """Found in every block, in a partial vector at the end, and at its first occurrence."""
    vocab = 5003
    for best in (0, 15, 16, 1023, 1024, 3500, 4991, 4992, 5002):
        logits = np.full((1, vocab), -3, np.float32)
        logits[0, best:] = 2
        assert run_sampler(sampler, logits, make_table(1, vocab, temperature=0)).token_ids.tolist() == [best]


@every_sampler
def test_tiny_temperature_is_greedy_without_overflow(sampler: str) -> None:
    for temperature in (1e-6, 1e-30, 1e-45):
        assert drawn(sampler, [1, 5, 4.99, -80, -INF], temperature=temperature) == {1}
    # Equal logits stay equally likely at any temperature.
    assert drawn(sampler, [1, 5, 5, -80, -INF], temperature=1e-6) == {1, 2}


@every_sampler
def test_huge_temperature_keeps_banned_tokens_banned(sampler: str) -> None:
    assert drawn(sampler, [1, 50, -INF, -50], temperature=3e38) == {0, 1, 3}


@every_sampler
def test_top_k_keeps_lower_ids_of_equal_logits(sampler: str) -> None:
    logits: list[float] = [1, 2, 1, 1, 2, 0]
    assert drawn(sampler, logits, top_k=1) == {1}
    assert drawn(sampler, logits, top_k=2) == {1, 4}
    assert drawn(sampler, logits, top_k=4) == {0, 1, 2, 4}
    assert drawn(sampler, logits, top_k=99) == {0, 1, 2, 3, 4, 5}


@every_sampler
def test_top_p_keeps_the_smallest_set_that_reaches_it(sampler: str) -> None:
    logits = np.log([0.5, 0.1, 0.25, 0.15]).tolist()
    assert drawn(sampler, logits, top_p=0.49) == {0}
    assert drawn(sampler, logits, top_p=0.51) == {0, 2}
    assert drawn(sampler, logits, top_p=0.76) == {0, 2, 3}
    assert drawn(sampler, logits, top_p=0.91) == {0, 1, 2, 3}
    assert drawn(sampler, logits, top_p=1e-9) == {0}


@every_sampler
def test_top_p_cuts_among_equal_logits_by_id(sampler: str) -> None:
    assert drawn(sampler, [0.0] * 8, top_p=0.3) == {0, 1, 2}
    assert drawn(sampler, [-1.0, 4, 4, 4, 4], top_p=0.45) == {1, 2}


@every_sampler
def test_top_p_renormalises_after_min_p_and_top_k(sampler: str) -> None:
    """0.4 of 0.4 + 0.3 is more than half; of the whole it would be less."""
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert drawn(sampler, logits, top_p=0.55) == {0, 1}
    assert drawn(sampler, logits, top_p=0.55, top_k=2) == {0}
    assert drawn(sampler, logits, top_p=0.55, min_p=0.7) == {0}


@every_sampler
def test_min_p_is_relative_to_the_likeliest(sampler: str) -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert drawn(sampler, logits, min_p=0.2) == {0, 1, 2}
    assert drawn(sampler, logits, min_p=0.5) == {0, 1}
    assert drawn(sampler, logits, min_p=1.0) == {0}
    # After temperature: 0.5 : 0.3 becomes 0.25 : 0.09.
    assert drawn(sampler, logits, min_p=0.5, temperature=0.5) == {0}


@every_sampler
def test_bias_forces_and_bans(sampler: str) -> None:
    assert drawn(sampler, [9.0, 0, 0, 0], bias={0: -INF}) == {1, 2, 3}
    assert drawn(sampler, [9.0, 0, 0, 0], bias={3: 100.0}) == {3}


@every_sampler
def test_repetition_penalty_counts_the_prompt_and_divides_or_multiplies_by_sign(sampler: str) -> None:
    logits = np.array([[4.0, 3, -1], [-4, -3, -9]])
    table = make_table(2, 3, temperature=0, repetition_penalty=1.5, seen=[{0: 0}, {1: 2}])
    assert run_sampler(sampler, logits, table).token_ids.tolist() == [1, 0]


@every_sampler
def test_presence_and_frequency_count_the_output_only(sampler: str) -> None:
    logits = np.array([[2.0, 1.9, 0, 0]] * 4)
    seen = [{0: 0}, {0: 1}, {0: 1, 1: 3}, {0: 2, 1: 1}]
    presence = make_table(4, 4, temperature=0, presence_penalty=0.5, seen=seen)
    assert run_sampler(sampler, logits, presence).token_ids.tolist() == [0, 1, 0, 0]
    frequency = make_table(4, 4, temperature=0, frequency_penalty=0.5, seen=seen)
    assert run_sampler(sampler, logits, frequency).token_ids.tolist() == [0, 1, 0, 1]


@every_sampler
def test_penalties_come_after_bias_and_before_the_mask(sampler: str) -> None:
    """Bias first: (1 + 3) / 2 = 2 loses to 2.5; penalties first would leave 1 / 2 + 3 = 3.5."""
    table = make_table(1, 2, temperature=0, bias=[{0: 3.0}], seen=[{0: 1}], repetition_penalty=2)
    assert run_sampler(sampler, np.array([[1.0, 2.5]]), table).token_ids.tolist() == [1]
    table = make_table(1, 2, temperature=0, bias=[{0: 100.0}], allowed=[[1]], mask_row=0)
    assert run_sampler(sampler, np.array([[1.0, 2.5]]), table).token_ids.tolist() == [1]


@every_sampler
def test_masks_ban_by_bit(sampler: str) -> None:
    vocab = 70
    rows = np.tile(np.arange(vocab, dtype=np.float32), (4, 1))
    table = make_table(
        4, vocab, temperature=0, mask_row=[0, -1, 1, 2], allowed=[[3, 33, 65], [31, 32], range(vocab)]
    )
    assert run_sampler(sampler, rows, table).token_ids.tolist() == [65, 69, 32, 69]


@every_sampler
def test_failed_rows_do_not_disturb_their_neighbours(sampler: str) -> None:
    good = np.linspace(-2, 2, 40)
    bad = {
        "NaN": np.where(np.arange(40) == 7, NAN, good),
        "+inf": np.where(np.arange(40) == 39, INF, good),
        "all -inf": np.full(40, -INF),
        "bias NaN": good,
        "bias +inf": good,
        "bias beyond the vocabulary": good,
        "bias before the vocabulary": good,
        "seen beyond the vocabulary": good,
        "mask bans all": good,
        "banned by bias": np.where(np.arange(40) == 2, 1.0, -INF),
    }
    bias: list[dict[int, float]] = [{} for _ in bad]
    seen: list[dict[int, int]] = [{} for _ in bad]
    bias[3], bias[4], bias[5], bias[6], bias[9] = {1: NAN}, {1: INF}, {40: 1.0}, {-1: 1.0}, {2: -INF}
    seen[7] = {2**31 - 1: 1}
    logits = [good]
    for row in bad.values():
        logits += [row, good]
    m = len(logits)

    def interleaved(rows: list[Any]) -> list[Any]:
        return [{} if i % 2 == 0 else rows[i // 2] for i in range(m)]

    table = make_table(
        m,
        40,
        temperature=0.9,
        num_logprobs=2,
        position=np.arange(m),
        bias=interleaved(bias),
        seen=interleaved(seen),
        allowed=[[]],
        mask_row=[0 if i == 17 else -1 for i in range(m)],
    )
    result = run_sampler(sampler, np.array(logits), table)
    assert dict(zip(bad, result.failed[1::2].tolist(), strict=True)) == dict.fromkeys(bad, True)
    assert result.token_ids[1::2].tolist() == [0] * len(bad)
    assert np.isnan(result.logprobs[1::2]).all()
    assert (result.top_ids[1::2] == -1).all()

    assert not result.failed[::2].any()
    alone = make_table(m // 2 + 1, 40, temperature=0.9, num_logprobs=2, position=np.arange(0, m, 2))
    expected = run_sampler(sampler, np.tile(good, (m // 2 + 1, 1)), alone)
    assert result.token_ids[::2].tolist() == expected.token_ids.tolist()
    assert result.logprobs[::2].tobytes() == expected.logprobs.tobytes()


@every_sampler
def test_logprobs_are_of_the_raw_distribution(sampler: str) -> None:
    raw = np.array([3.0, 1.0, 2.0, -INF, 2.0])
    expected = raw - np.log(np.exp(raw).sum())
    table = make_table(
        3,
        5,
        temperature=[0, 0.5, 1e-6],
        num_logprobs=[4, 0, -1],
        bias=[{1: 9.0}] * 3,
        seen=[{1: 1, 0: 3}] * 3,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        top_k=2,
        allowed=[[1]],
        mask_row=0,
    )
    result = run_sampler(sampler, np.tile(raw, (3, 1)), table)
    assert result.token_ids.tolist() == [1, 1, 1]
    np.testing.assert_allclose(result.logprobs, [expected[1], expected[1], NAN], atol=1e-6)
    assert result.top_ids.tolist() == [[0, 2, 4, 1], [-1] * 4, [-1] * 4]
    np.testing.assert_allclose(result.top_logprobs[0], expected[[0, 2, 4, 1]], atol=1e-6)
    assert np.isnan(result.top_logprobs[1:]).all()


@every_sampler
def test_more_logprobs_than_tokens(sampler: str) -> None:
    result = run_sampler(
        sampler, np.array([[0.0, -INF, 1.0]]), make_table(1, 3, temperature=0, num_logprobs=6)
    )
    assert result.top_ids.tolist() == [[2, 0, 1, -1, -1, -1]]
    assert result.top_logprobs[0, 2] == -INF
    assert np.isnan(result.top_logprobs[0, 3:]).all()


@every_sampler
def test_a_vocabulary_of_one(sampler: str) -> None:
    table = make_table(2, 1, temperature=[0, 1], top_p=0.5, top_k=1, min_p=0.3, num_logprobs=1)
    result = run_sampler(sampler, np.array([[-7.0], [1e30]]), table)
    assert result.token_ids.tolist() == [0, 0]
    assert result.logprobs.tolist() == [0, 0]


@every_sampler
def test_no_rows(sampler: str) -> None:
    result = run_sampler(sampler, np.zeros((0, 8)), make_table(0, 8))
    assert result.token_ids.shape == (0,)
    assert result.top_ids.shape == (0, 0)


@every_sampler
@pytest.mark.parametrize("counter", ["position", "seed", "choice"])
def test_draws_follow_the_distribution(sampler: str, counter: str) -> None:
    """Chi-square over draws that differ in one word of the noise only; 7 degrees of freedom, p = 1e-4."""
    draws = 4000 if sampler == "numpy" else 40_000
    logits = np.array([0.3, -1, 2, 0, 1.1, -0.2, 1.9, 0.7])
    columns: dict[str, Any] = {"seed": 1234, counter: np.arange(draws)}
    table = make_table(draws, 8, temperature=1.3, **columns)
    tokens = run_sampler(sampler, np.tile(logits, (draws, 1)), table).token_ids
    expected = np.exp(logits / 1.3)
    expected *= draws / expected.sum()
    observed = np.bincount(tokens, minlength=8)
    assert (np.square(observed - expected) / expected).sum() < 29.9


@every_sampler
def test_a_row_depends_on_itself_alone(sampler: str) -> None:
    """The same tokens and logprobs, bit for bit, alone, in a batch and in another order."""
    rng = np.random.default_rng(5)
    m, vocab = 12, 3000
    logits = rng.normal(size=(m, vocab)).astype(np.float32) * 2
    columns: dict[str, Any] = {
        "temperature": rng.choice([0, 0.7, 1.3], m).tolist(),
        "top_p": rng.choice([1, 0.9], m).tolist(),
        "top_k": rng.choice([0, 40], m).tolist(),
        "seed": list(range(m)),
        "position": rng.integers(0, 999, m).tolist(),
    }

    def rows(order: list[int]) -> SamplingTable:
        return make_table(
            len(order), vocab, num_logprobs=3, **{name: [c[i] for i in order] for name, c in columns.items()}
        )

    together = run_sampler(sampler, logits, rows(list(range(m))))
    order = rng.permutation(m).tolist()
    shuffled = run_sampler(sampler, logits[order], rows(order))
    assert shuffled.token_ids.tolist() == together.token_ids[order].tolist()
    assert shuffled.logprobs.tobytes() == together.logprobs[order].tobytes()
    for i in range(m):
        alone = run_sampler(sampler, logits[i : i + 1], rows([i]))
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs.tobytes() == together.logprobs[i : i + 1].tobytes()
        assert alone.top_logprobs.tobytes() == together.top_logprobs[i : i + 1].tobytes()


def test_the_numpy_sampler_leaves_the_logits_alone() -> None:
    logits = np.array([[1, 2, 3]], np.float32)
    before = logits.copy()
    sample(logits, make_table(1, 3, bias=[{0: 5.0}], allowed=[[0]], mask_row=0))
    assert (logits == before).all()


@every_sampler
def test_tables_that_do_not_fit_are_refused(sampler: str) -> None:
    logits = np.zeros((2, 40))
    with pytest.raises(ValueError, match=r"(?i)sampling table"):
        run_sampler(sampler, logits, make_table(3, 40))
    with pytest.raises(ValueError, match="mask"):
        run_sampler(sampler, logits, make_table(2, 32, allowed=[[1]], mask_row=0))
    with pytest.raises(ValueError, match="mask"):
        run_sampler(sampler, logits, make_table(2, 40, mask_row=0))
    table = make_table(2, 40, seen=[{1: 1}, {2: 1}])
    table.seen_start = np.array([0, 5, 2], np.int32)
    with pytest.raises(ValueError, match="seen_start"):
        run_sampler(sampler, logits, table)
    with pytest.raises(ValueError, match="vocab"):
        run_sampler(sampler, np.zeros((1, 0)), make_table(1, 0))


@pytest.mark.parametrize("isa", SAMPLERS[1:])
def test_native_columns_of_another_type_are_refused(isa: str) -> None:
    """A silent conversion would hand the sampler a copy that is freed before it is read."""
    table = make_table(1, 4)
    table.temperature = table.temperature.astype(np.float64)
    with pytest.raises(ValueError, match="temperature"):
        run_sampler(isa, np.zeros((1, 4)), table)
    with pytest.raises(ValueError, match="cannot run here"):
        _native.sample(np.zeros((1, 4), np.float32), make_table(1, 4), isa="mmx")
