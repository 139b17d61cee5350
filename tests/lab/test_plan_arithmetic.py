"""plan's arithmetic: sizes against values worked out by hand, and what must hold for any sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.lab.bench.slo import parse_slo
from headrace.lab.plan.hardware import Device, Hardware, read_hardware
from headrace.lab.plan.network import BF16, FP8, INT4, INT8, Network
from headrace.lab.plan.options import options
from headrace.lab.plan.roofline import Layout, Placed
from headrace.lab.plan.serving import Workload, closed_loop, open_loop
from headrace.lab.plan.source import Sizes, find, known_shapes

TABLE = read_hardware()


def network(name: str = "llama-3.1-8b") -> Network:
    return find(name).network


def placed(name: str = "llama-3.1-8b", device: str = "h100-sxm", **changes: float | None) -> Placed:
    changed = TABLE.devices[device].model_copy(update=changes)
    return Placed(network(name), BF16, changed, TABLE.efficiency[changed.kind], Layout())


def test_llama_8b_by_hand() -> None:
    llama = network()
    assert llama.kv_bytes_per_token() == 2 * 2 * 8 * 128 * 32 == 131072
    layer = 4096 * 4096 * 2 + 2 * 1024 * 4096 + 3 * 14336 * 4096
    assert llama.matrix_parameters() == 32 * layer
    assert llama.parameters() == 8_030_261_248
    heads = 2 * 128256 * 4096
    assert llama.weight_bytes(BF16) == 2 * 8_030_261_248
    assert llama.weight_bytes(FP8) == 32 * layer + 2 * (heads + 65 * 4096)
    assert llama.weight_bytes(INT4) == int(32 * layer * 4.125 / 8) + 2 * heads + 2 * 65 * 4096 + 32 * 0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.2-1b", 1.236),
        ("llama-3.1-70b", 70.554),
        ("qwen3-8b", 8.191),
        ("qwen3-30b-a3b", 30.532),
        ("mixtral-8x7b", 46.703),
        ("mistral-7b-v0.1", 7.242),
        ("gemma-3-27b", 27.009),
    ],
)
def test_known_shapes_have_their_published_parameters(name: str, billions: float) -> None:
    assert network(name).parameters() / 1e9 == pytest.approx(billions, abs=0.0006)


def test_every_known_shape_names_its_source() -> None:
    assert all(shape["source"] for shape in known_shapes().values())


def test_a_window_bounds_what_a_sequence_keeps() -> None:
    mistral = network("mistral-7b-v0.1")  # all layers see 4096 tokens
    assert mistral.kv_bytes(4096) == 4096 * mistral.kv_bytes_per_token()
    assert mistral.kv_bytes(32768) == (4096 + 16) * mistral.kv_bytes_per_token()
    gemma = network("gemma-3-27b")  # 10 of 62 layers see everything, 52 see 1024 tokens
    a_layer = 2 * 2 * 16 * 128
    assert gemma.kv_bytes(8192) == a_layer * (10 * 8192 + 52 * (1024 + 16))
    assert gemma.prefill_attention_macs(2048) == 2 * 32 * 128 * (
        10 * 2048 * 2049 / 2 + 52 * (1024 * 1025 / 2 + 1024 * 1024)
    )


def test_experts_that_a_batch_touches() -> None:
    qwen = network("qwen3-30b-a3b")
    dense = qwen.step_weight_bytes(BF16, 0) / 2
    expert = 48 * 3 * 768 * 2048
    assert qwen.step_weight_bytes(BF16, 1) / 2 - dense == pytest.approx(8 * expert)
    assert qwen.step_weight_bytes(BF16, 10_000) / 2 - dense == pytest.approx(128 * expert)
    assert 3.0 < qwen.active_matrix_parameters() / 1e9 + 2 * 0.311 < 3.5  # "A3B" counts the embeddings


def test_a_decode_step_by_hand() -> None:
    one = placed()
    shares = one.efficiency
    read = 2 * (8_030_261_248 - 128256 * 4096) + 1000 * 131072  # the embedding is looked up, not read
    seconds = read / (3350e9 * shares.bandwidth.value) + shares.step_s.value
    assert one.decode_step_s(1, 1000) == pytest.approx(seconds, rel=1e-3)


def test_tensor_parallel_devices_halve_the_reading_and_pay_for_their_links() -> None:
    one, two = placed(), replace(placed(), layout=Layout(2))
    size = 4096 * 2
    moved = size / (450e9 * one.efficiency.link.value)
    links = 2 * 32 * (one.efficiency.link_s.value + moved)
    fixed = one.efficiency.step_s.value
    expected = (one.decode_step_s(1, 1000) - fixed) / 2 + links + fixed
    assert two.decode_step_s(1, 1000) == pytest.approx(expected, rel=1e-6)


def test_kv_heads_are_copied_beyond_their_number() -> None:
    many = replace(placed("qwen3-30b-a3b"), layout=Layout(8))  # four KV heads
    assert many.kv_copies() == 2
    assert replace(many, layout=Layout(4)).kv_copies() == 1


@pytest.mark.parametrize(("device", "fits"), [("h100-sxm", False), ("h200", False), ("mi300x", True)])
def test_70b_in_bf16_needs_more_than_one_hopper(device: str, fits: bool) -> None:
    assert (placed("llama-3.1-70b", device).max_sequences(2048) > 0) == fits


def test_one_user_waits_for_nobody() -> None:
    one, work = placed(), Workload(512, 65, 1)
    alone = closed_loop(one, work, 1)
    assert alone.ttft_s == pytest.approx(one.prefill_s(512))
    assert alone.tpot_s == pytest.approx(one.decode_step_s(1, 512 + 32.5))
    assert alone.e2e_s == pytest.approx(one.prefill_s(512) + 64 * one.decode_step_s(1, 544.5))


def test_an_open_loop_keeps_littles_law_or_is_overloaded() -> None:
    one, work = placed(), Workload(1024, 128, rate=4.0)
    steady = open_loop(one, work, 4.0, most=500)
    assert steady is not None
    assert steady.sequences == pytest.approx(4.0 * steady.e2e_s, rel=0.01)
    assert open_loop(one, work, 1e4, most=500) is None


sizes = st.builds(
    Sizes,
    layers=st.integers(1, 96),
    hidden=st.sampled_from([512, 2048, 4096, 8192]),
    heads=st.sampled_from([8, 16, 32]),
    kv_heads=st.sampled_from([1, 2, 8]),
    ffn=st.integers(64, 32768),
    vocab=st.integers(256, 262144),
    window=st.one_of(st.none(), st.integers(16, 8192)),
    tied_head=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(sizes, st.floats(50, 8000), st.floats(1, 4), st.integers(1, 30000), st.integers(1, 200))
def test_more_bandwidth_is_never_slower(
    size: Sizes, bandwidth: float, factor: float, context: int, users: int
) -> None:
    net = size.network()
    base = TABLE.devices["l4"]
    slow, fast = (
        Placed(net, INT8, base.model_copy(update={"bandwidth_gbs": rate}), TABLE.efficiency["gpu"], Layout())
        for rate in (bandwidth, bandwidth * factor)
    )
    assert fast.decode_step_s(users, context) <= slow.decode_step_s(users, context)
    assert fast.prefill_s(context) <= slow.prefill_s(context)
    work = Workload(context, 64, users)
    assert closed_loop(fast, work, users).e2e_s <= closed_loop(slow, work, users).e2e_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 100_000), st.integers(0, 100_000), st.sampled_from([1, 2]))
def test_more_context_never_takes_less_memory(size: Sizes, context: int, more: int, width: int) -> None:
    net = size.network()
    assert net.kv_bytes(context + more, width) >= net.kv_bytes(context, width) > 0
    assert net.kv_read_bytes(context + more) >= net.kv_read_bytes(context)
    placed_net = Placed(net, INT4, TABLE.devices["h200"], TABLE.efficiency["gpu"], Layout(), width)
    assert placed_net.max_sequences(context + more) <= placed_net.max_sequences(context)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 64), st.integers(1, 64))
def test_more_users_never_shorten_an_answer(users: int, more: int) -> None:
    work = Workload(512, 128, 1)
    few, many = (closed_loop(placed(), work, count) for count in (users, users + more))
    assert many.e2e_s >= few.e2e_s * (1 - 1e-9)
    assert many.output_tokens_per_s >= few.output_tokens_per_s * (1 - 1e-9)


def priced(**prices: float | None) -> Hardware:
    """L4s that differ in price alone."""
    base = TABLE.devices["l4"]
    devices: dict[str, Device] = {
        name: base.model_copy(update={"price_per_hour": price}) for name, price in prices.items()
    }
    return Hardware(devices, TABLE.efficiency, TABLE.engine)


def test_the_cheapest_that_meets_the_slo_comes_first_and_what_misses_it_last() -> None:
    table = priced(dear=2.0, cheap=0.5, unpriced=None)
    slow = TABLE.devices["l4"].model_copy(
        update={"bandwidth_gbs": 10.0, "price_per_hour": 0.01, "link_gbs": None}
    )
    small = TABLE.devices["l4"].model_copy(update={"memory_gib": 1.0, "link_gbs": None, "network_gbs": None})
    table = replace(table, devices={"slow": slow, "small": small, **table.devices})
    work = Workload(512, 128, 4, slo=parse_slo("tpot=100ms"))
    ranked = options(network(), table, work, precisions=["fp8"])
    assert [option.name for option in ranked] == ["cheap", "dear", "unpriced", "slow", "small"]
    assert [option.meets_slo for option in ranked] == [True, True, True, False, False]
    assert ranked[3].missed[0][0] == "tpot"
    assert ranked[4].why_not == "weights do not fit"
    first = ranked[0].price_per_million()
    assert first == pytest.approx(0.5 / 3600 / ranked[0].output_tokens_per_s * 1e6)


def test_copies_are_added_until_the_load_is_carried() -> None:
    work = Workload(512, 128, rate=40.0, slo=parse_slo("ttft=2s,tpot=80ms"))
    (option,) = options(network(), TABLE, work, on=["l4"], precisions=["fp8"])
    assert option.copies > 1
    assert option.meets_slo
    assert option.output_tokens_per_s == pytest.approx(40.0 * 128)
    fewer = replace(work, rate=4.0)
    assert options(network(), TABLE, fewer, on=["l4"], precisions=["fp8"])[0].devices < option.devices


def test_stages_only_where_a_node_does_not_do() -> None:
    work = Workload(512, 128, 1)
    (option,) = options(network("llama-3.1-70b"), TABLE, work, on=["rtx-4090"], precisions=["bf16"])
    assert (option.layout.tp, option.layout.pp > 1) == (4, True)
    assert option.fits
    (option,) = options(network("llama-3.1-70b"), TABLE, work, on=["h200"], precisions=["bf16"])
    assert option.layout == Layout(2)


def test_devices_are_bounded() -> None:
    work = Workload(512, 128, rate=100.0)
    (option,) = options(network(), TABLE, work, on=["l4"], precisions=["bf16"], max_devices=2)
    assert "more than 2 devices" in option.why_not
    assert option.steady is None
