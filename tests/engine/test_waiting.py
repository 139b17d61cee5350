"""Who is next: priority, age, and tenants' shares."""

from __future__ import annotations

from collections import Counter

import pytest
from small_engines import Answers, Clock, finish, request, run, small_engine, tokens

from headrace.backend.simulated import Latency
from headrace.engine.engine import Engine
from headrace.errors import InvalidRequestError

STEP = Latency(step_s=1.0)


def timed_engine(**settings: object) -> Engine:
    """One sequence at a time; every step takes a second."""
    settings = {"max_num_seqs": 1, "max_queue_time_s": 1e6} | settings
    return small_engine(clock=Clock(), latency=STEP, **settings)  # type: ignore[arg-type]


def order_of_ends(engine: Engine) -> list[str]:
    order: list[str] = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finish_reason]
        engine.kv_cache.check()
    return order


# Age


@pytest.mark.parametrize(("aging_s", "place"), [(2.0, 10), (5.0, 25), (0.0, 40)])
def test_age_outweighs_priority(aging_s: float, place: int) -> None:
    """A batch job of low priority never ran as long as somebody chatted."""
    engine = timed_engine(priority_aging_s=aging_s)
    engine.add(request("patient", tokens(5, 1), priority=5, max_tokens=1))
    order = []
    for number in range(20):
        for name in (f"urgent{number}", f"more{number}"):
            engine.add(request(name, tokens(5, 2), max_tokens=1))
        order += [output.request_id for output in engine.step() if output.finish_reason]
        order += [output.request_id for output in engine.step() if output.finish_reason]
    order += order_of_ends(engine)
    assert len(order) == 41
    # Five levels are worth five times aging_s, and a step serves one request a second.
    assert abs(order.index("patient") - place) <= 2


def test_one_level_is_worth_its_seconds_and_no_more() -> None:
    """Aging made the order one of arrival: priority had no effect any more."""
    engine = timed_engine(priority_aging_s=100.0)
    for number in range(10):
        engine.add(request(f"low{number}", tokens(5, 1), priority=1, max_tokens=1))
    engine.step()
    engine.add(request("high", tokens(5, 2), priority=0, max_tokens=1))
    assert order_of_ends(engine)[0] == "high"


# Tenants


def test_a_flood_of_one_tenant_does_not_bury_another() -> None:
    """One tenant sent a hundred requests; the next one's only request waited for all of them."""
    engine = timed_engine()
    for number in range(100):
        engine.add(request(f"flood{number}", tokens(5, number), tenant="flood", max_tokens=1))
    engine.step()
    engine.add(request("other", tokens(5, 1), tenant="other", max_tokens=1))
    assert "other" in order_of_ends(engine)[:2]


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_served_tokens_follow_the_weights(weight: float, share: float) -> None:
    """Turns were fair, tokens were not: long answers got more of the engine than short ones."""
    engine = small_engine(max_num_seqs=4, max_model_len=200, prefix_caching=False)
    for number in range(60):
        engine.add(
            request(
                f"long{number}",
                tokens(40, number),
                tenant="long",
                weight=weight,
                max_tokens=40,
                ignore_eos=True,
            )
        )
    for number in range(400):
        engine.add(
            request(f"short{number}", tokens(5, number), tenant="short", max_tokens=5, ignore_eos=True)
        )
    served: Counter[str] = Counter()
    started: set[str] = set()
    for _ in range(400):
        for output in engine.step():
            tenant = output.request_id.rstrip("0123456789")
            served[tenant] += len(output.token_ids)
            if output.request_id not in started:
                started.add(output.request_id)
                served[tenant] += 40 if tenant == "long" else 5
    assert served["long"] / served.total() == pytest.approx(share, abs=0.06)
    engine.scheduler.abort_all()


def test_idle_time_is_not_saved_up() -> None:
    """A tenant that had been away for an hour had the engine for itself when it came back."""
    engine = timed_engine()
    for number in range(40):
        engine.add(request(f"busy{number}", tokens(5, number), tenant="busy", max_tokens=1))
    for _ in range(20):
        engine.step()
    for number in range(20):
        engine.add(request(f"back{number}", tokens(5, number), tenant="back", max_tokens=1))
    first = order_of_ends(engine)[:20]
    assert sum(name.startswith("back") for name in first) in (9, 10, 11)


def test_leaving_and_coming_back_does_not_help() -> None:
    """Counts were forgotten with a tenant's last request: one at a time was always served first."""
    engine = timed_engine()
    for number in range(50):
        engine.add(request(f"steady{number}", tokens(5, number), tenant="steady", max_tokens=1))
    order: list[str] = []
    number = 0
    while len(order) < 40:
        if "sly" not in {name.rstrip("0123456789") for name in engine.scheduler._requests}:
            engine.add(request(f"sly{number}", tokens(5, number), tenant="sly", max_tokens=1))
            number += 1
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert 18 <= sum(name.startswith("sly") for name in order) <= 22
    engine.scheduler.abort_all()


def test_a_low_priority_tenant_is_served_some_day() -> None:
    """Between tenants priority came first and age did not count at all."""
    engine = timed_engine(priority_aging_s=4.0)
    engine.add(request("low", tokens(5, 1), tenant="a", priority=3, max_tokens=1))
    order: list[str] = []
    for number in range(40):
        engine.add(request(f"high{number}", tokens(5, 2), tenant="b", max_tokens=1))
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert 10 <= order.index("low") <= 20


def test_a_prompt_of_each_tenant_moves() -> None:
    """The first of two long prompts took every step's tokens until it was done."""
    engine = small_engine(max_num_batched_tokens=16, max_model_len=400, num_blocks=100)
    engine.add(request("book", tokens(300, 1), tenant="a", max_tokens=1))
    engine.step()
    engine.add(request("note", tokens(30, 2), tenant="b", max_tokens=1))
    for _ in range(4):
        news = engine.step()
        if news:
            break
    assert [output.request_id for output in news] == ["note"]
    finish(engine, Answers())


def test_tenants_are_forgotten() -> None:
    """Every name that was ever seen stayed in memory."""
    engine = small_engine()
    engine.add(request("stays", tokens(5, 1), tenant="stays", max_tokens=390, ignore_eos=True))
    for number in range(300):
        engine.add(request(f"r{number}", tokens(5, 1), tenant=f"t{number}", max_tokens=1))
        engine.step()
    assert engine.stats().num_tenants <= 2
    assert len(engine.scheduler._waiting._tenants) < 100
    finish(engine, Answers())
    assert engine.stats().num_tenants == 0


def test_tenants_change_no_answer() -> None:
    """Order is all that priorities and tenants decide."""
    mixed = [
        request(
            f"r{i}",
            tokens(20 + i, i),
            tenant=f"t{i % 3}",
            weight=1 + i % 2,
            priority=i % 4,
            max_tokens=30,
            ignore_eos=True,
        )
        for i in range(12)
    ]
    plain = [request(f"r{i}", tokens(20 + i, i), max_tokens=30, ignore_eos=True) for i in range(12)]
    tight = small_engine(num_blocks=16, max_model_len=128, max_num_batched_tokens=32)
    assert run(tight, mixed).texts() == run(small_engine(), plain).texts()
    assert tight.stats().num_preemptions > 0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), "2"])
def test_bad_weights_are_refused(weight: float) -> None:
    with pytest.raises(InvalidRequestError, match="tenant_weight"):
        small_engine().add(request("r", tokens(5, 1), weight=weight))


# Victims


def test_the_victim_loses_least() -> None:
    """The last in order had computed most: preempting it threw away the longest text."""
    engine = small_engine(num_blocks=12, max_model_len=190, prefix_caching=False, max_num_seqs=3)
    lengths = {"first": 17, "short": 30, "long": 94}
    for name, length in lengths.items():
        engine.add(request(name, tokens(length, length), max_tokens=60, ignore_eos=True))
    while engine.stats().num_preemptions == 0:
        engine.step()
        engine.kv_cache.check()
    assert [seq.request.request_id for seq in engine.scheduler._waiting] == ["short"]
    finish(engine, Answers())
