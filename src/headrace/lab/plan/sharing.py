"""A device that is larger than the model needs: parts of it (MIG), or turns on it (time-slicing)."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.lab.plan.hardware import Device, Hardware, Slice
from headrace.lab.plan.network import Network
from headrace.lab.plan.options import Option, options
from headrace.lab.plan.serving import Workload

_IDLE = 0.5  # a device that is busy for less may take turns
_MOST_TENANTS = 8  # more of them switch too often


@dataclass(frozen=True, slots=True)
class Suggestion:
    """How to share the device of ``option``. ``shared``: what a part of it then gives; None for turns."""

    option: Option
    text: str
    shared: Option | None = None


def suggestions(
    network: Network, hardware: Hardware, work: Workload, ranked: list[Option], kv_value_bytes: int = 2
) -> list[Suggestion]:
    """One a device that serves by itself: the cheapest part of it that serves as well, or turns on it."""
    found: list[Suggestion] = []
    for option in ranked:
        if any(each.option.name == option.name for each in found):
            continue
        if not option.meets_slo or option.layout.devices > 1 or option.device.kind == "cpu":
            continue
        part = _part(network, hardware, work, option, kv_value_bytes)
        if part is not None:
            found.append(part)
        elif turns := _turns(option):
            found.append(turns)
    return found


def _part(
    network: Network, hardware: Hardware, work: Workload, option: Option, kv_value_bytes: int
) -> Suggestion | None:
    parts = {piece.name: _piece(option.device, piece) for piece in option.device.slices}
    if not parts:
        return None
    table = Hardware(parts, hardware.efficiency, hardware.engine)
    best = options(
        network,
        table,
        work,
        precisions=[option.precision.name],
        stored=option.precision,
        kv_value_bytes=kv_value_bytes,
    )[0]
    if not best.meets_slo:
        return None
    count = next(piece.count for piece in option.device.slices if piece.name == best.name)
    if best.copies / count >= option.copies:
        return None
    price = best.price_per_million()
    cost = "" if price is None else f", ${price:.2f} for a million tokens"
    text = (
        f"{best.copies} of {count} {best.name} of one {option.name} carry it "
        f"({best.copies / count:.0%} of the device{cost}); the rest is free for other models"
    )
    return Suggestion(option, text, best)


def _piece(device: Device, piece: Slice) -> Device:
    """A part as a device of its own, without links to others, at its share of the price."""
    price = device.price_per_hour
    return device.model_copy(
        update={
            "title": f"{piece.name} of {device.title}",
            "memory_gib": piece.memory_gib,
            "bandwidth_gbs": device.bandwidth_gbs * piece.bandwidth,
            "tflops": {name: rate * piece.compute for name, rate in device.tflops.items()},
            "devices_per_node": 1,
            "link_gbs": None,
            "network_gbs": None,
            "slices": (),
            "price_per_hour": None if price is None else price / piece.count,
        }
    )


def _turns(option: Option) -> Suggestion | None:
    """Time-slicing: memory is divided, and each waits while another computes."""
    steady = option.steady
    if steady is None or option.copies > 1 or steady.busy > _IDLE:
        return None
    kv = steady.sequences / max(option.max_sequences, 1)
    held = option.weight_bytes / (option.device.memory_gib * 2**30)
    room = int(min(1 / (held + (1 - held) * kv), 1 / steady.busy, _MOST_TENANTS))
    if room < 2:
        return None
    text = (
        f"{option.name} is busy {steady.busy:.0%} of the time: by time-slicing, {room} models like this one "
        "could take turns on it (no isolation of latency; each needs its own share of memory)"
    )
    return Suggestion(option, text)
