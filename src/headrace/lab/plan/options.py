"""What could serve the workload: each device and precision, spread as it fits; cheapest good one first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from headrace.lab.plan.hardware import Device, Hardware
from headrace.lab.plan.network import BF16, FP8, INT4, INT8, Network, Precision
from headrace.lab.plan.roofline import Layout, Placed
from headrace.lab.plan.serving import Steady, Workload, closed_loop, open_loop

_STAGES = (2, 3, 4, 6, 8, 12, 16)
_MOST_SEQUENCES = 4096  # of a copy, above what any engine batches


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve the workload. ``steady``: of one of ``copies``; None: nothing of it fits or holds up.

    ``why_not``: what is in the way, where something is.
    """

    name: str
    device: Device
    precision: Precision
    layout: Layout
    copies: int
    steady: Steady | None
    max_context: int
    max_sequences: int
    weight_bytes: int
    missed: tuple[tuple[str, float], ...] = ()
    why_not: str = ""

    @property
    def devices(self) -> int:
        """Of all copies together."""
        return self.layout.devices * self.copies

    @property
    def fits(self) -> bool:
        """Whether weights and one sequence have room."""
        return self.max_sequences > 0

    @property
    def meets_slo(self) -> bool:
        """Whether it serves the workload within every limit."""
        return self.steady is not None and not self.missed

    @property
    def output_tokens_per_s(self) -> float:
        """Of all copies together."""
        return 0.0 if self.steady is None else self.steady.output_tokens_per_s * self.copies

    def price_per_hour(self) -> float | None:
        """In dollars, of all devices."""
        price = self.device.price_per_hour
        return None if price is None else price * self.devices

    def price_per_million(self) -> float | None:
        """Dollars for a million output tokens at the workload's load, prompts included in the price."""
        price = self.price_per_hour()
        if price is None or not self.output_tokens_per_s:
            return None
        return price / 3600 / self.output_tokens_per_s * 1e6


def options(
    network: Network,
    hardware: Hardware,
    work: Workload,
    *,
    on: Sequence[str] = (),
    precisions: Sequence[str] = (),
    stored: Precision | None = None,
    kv_value_bytes: int = 2,
    max_devices: int = 64,
) -> list[Option]:
    """One option for each device and precision, ranked.

    What meets the SLO comes first, cheapest first; then what serves but misses it, least missed first; then
    what cannot serve. ``stored``: also as a file holds it. ``kv_value_bytes``: 2 (bf16) or 1 (fp8, int8).
    """
    found = []
    for name, device in hardware.chosen(on).items():
        for precision in _precisions(device, stored):
            if precisions and precision.name not in precisions:
                continue
            first = Placed(
                network, precision, device, hardware.efficiency[device.kind], Layout(), kv_value_bytes
            )
            placed = _spread(first, work, max_devices)
            found.append(min((_option(name, each, work, max_devices) for each in placed), key=_rank))
    return sorted(found, key=_rank)


def _precisions(device: Device, stored: Precision | None) -> Iterator[Precision]:
    yield BF16
    if "fp8" in device.tflops:
        yield FP8
    elif "int8" in device.tflops:
        yield INT8
    for precision in (INT4, stored):
        if precision is not None and device.kind == "cpu":  # CPUs multiply 4-bit codes by 8-bit activations
            yield replace(precision, compute="int8")
        elif precision is not None:
            yield precision


def _spread(first: Placed, work: Workload, max_devices: int) -> list[Placed]:
    """Powers of two of a node's devices that divide the heads; stages of such only if nothing less fits."""
    device, network = first.device, first.network
    heads = network.architecture.layers[0].attention.heads
    spread = []
    tp = 1
    while tp <= min(device.devices_per_node, max_devices) and heads % tp == 0:
        if tp == 1 or device.link_gbs is not None:
            spread.append(replace(first, layout=Layout(tp)))
        tp *= 2
    if device.network_gbs is None or any(placed.max_sequences(work.context) for placed in spread):
        return spread
    largest = spread[-1].layout.tp
    stages = [pp for pp in _STAGES if pp <= network.layers and pp * largest <= max_devices]
    return spread + [replace(first, layout=Layout(largest, pp)) for pp in stages]


def _option(name: str, placed: Placed, work: Workload, max_devices: int) -> Option:
    """The fewest copies of one layout that carry the load within the SLO, else without regard to it."""
    room = min(placed.max_sequences(work.context), _MOST_SEQUENCES)
    weight_bytes = placed.network.weight_bytes(placed.precision)

    def made(copies: int, steady: Steady | None, why_not: str = "") -> Option:
        missed = {} if steady is None else steady.missed(work.slo)
        return Option(
            name,
            placed.device,
            placed.precision,
            placed.layout,
            copies,
            steady,
            placed.max_context(),
            room,
            weight_bytes,
            tuple(missed.items()),
            why_not,
        )

    if placed.kv_room_bytes() <= 0:
        return made(1, None, "weights do not fit")
    if room == 0:
        return made(1, None, f"no room for the KV of {work.context} tokens")
    most = max_devices // placed.layout.devices
    copies = _copies_within_slo(placed, work, room)
    if copies is None or copies > most:
        copies = _copies(placed, work, room, most)
    if copies is None or copies > most:
        return made(most, None, f"would take more than {max_devices} devices")
    return made(copies, _served(placed, work, room, copies))


def _served(placed: Placed, work: Workload, room: int, copies: int) -> Steady | None:
    if work.rate is not None:
        return open_loop(placed, work, work.rate / copies, room)
    assert work.concurrency is not None
    return closed_loop(placed, work, ceil(work.concurrency / copies))


def _most_users(placed: Placed, work: Workload, room: int) -> int:
    """Users at a time that one copy serves within the SLO, at most ``room``; 0: not even one."""
    low, high = 0, room
    while low < high:
        middle = (low + high + 1) // 2
        good = closed_loop(placed, work, middle).meets(work.slo)
        low, high = (middle, high) if good else (low, middle - 1)
    return low


def _copies_within_slo(placed: Placed, work: Workload, room: int) -> int | None:
    users = _most_users(placed, work, room)
    if users == 0:
        return None
    if work.concurrency is not None:
        return ceil(work.concurrency / users)
    assert work.rate is not None
    copies = max(1, ceil(work.rate / closed_loop(placed, work, users).requests_per_s))
    for more in range(copies, 2 * copies + 2):  # an open loop waits longer than a closed one of its rate
        steady = open_loop(placed, work, work.rate / more, room)
        if steady is not None and steady.meets(work.slo):
            return more
    return None


def _copies(placed: Placed, work: Workload, room: int, most: int) -> int | None:
    """The fewest copies that carry the load at all."""
    if work.concurrency is not None:
        return ceil(work.concurrency / room)
    assert work.rate is not None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        holds = open_loop(placed, work, work.rate / middle, room) is not None
        low, high = (low, middle) if holds else (middle + 1, high)
    return low if high >= 1 and open_loop(placed, work, work.rate / low, room) is not None else None


def _rank(option: Option) -> tuple[float, ...]:
    price = option.price_per_million()
    cost = inf if price is None else price
    if option.steady is None:
        return 2.0, 0.0, float(option.layout.devices), cost
    worst = max((share for _, share in option.missed), default=0.0)
    return float(worst > 0), worst, cost, float(option.devices)
