"""The hardware table: what can be had, at which price, and which shares of peak are assumed. A YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from headrace.errors import ConfigError
from headrace.yaml_file import read_yaml

BUILT_IN = Path(__file__).with_name("hardware.yaml")

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Kind = Literal["gpu", "cpu"]
Rate = Literal["bf16", "fp8", "int8"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Factor(_Strict):
    """A number that is assumed or measured, and why it is what it is."""

    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    reason: Text


class ShareFactor(_Strict):
    """A share of a peak, and why no more."""

    value: Share
    reason: Text


class Efficiency(_Strict):
    """What of the vendor's figures a serving engine reaches on devices of one kind."""

    bandwidth: ShareFactor
    compute: ShareFactor
    memory: ShareFactor
    link: ShareFactor
    step_s: Factor
    link_s: Factor


class EngineFactors(_Strict):
    """Of headrace's own kernels; ``*_slots``: instructions, in units of one dot product of 64 bytes."""

    bandwidth: ShareFactor
    kv_bandwidth: Factor
    unpack4_slots: Factor
    unpack8_slots: Factor
    group_slots: Factor
    chain_slots: Factor
    amx_group_slots: Factor
    amx_product_slots: Factor
    amx_dense_slots: Factor
    wide_share: Factor
    dense_slots: Factor
    softmax_slots: Factor
    quantise_slots: Factor
    row_slots: Factor
    glu_slots: Factor
    rope_slots: Factor
    barrier_s: Factor
    step_s: Factor


class Slice(_Strict):
    """A part that a device can be cut into (MIG): so many fit, each with these shares of the whole."""

    name: Text
    count: Annotated[int, Field(ge=2)]
    memory_gib: Positive
    compute: Share
    bandwidth: Share


class Device(_Strict):
    """One kind of device. Rates are of dense multiplication, in tera-operations (2 per multiply-add)."""

    title: Text
    kind: Kind
    memory_gib: Positive
    bandwidth_gbs: Positive
    tflops: dict[Rate, Positive]
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] = 1
    link_gbs: Positive | None = None  # one direction, of one device to the others of its node
    network_gbs: Positive | None = None  # likewise to other nodes
    slices: tuple[Slice, ...] = ()
    price_per_hour: Positive | None = None  # of one device, in dollars
    price_source: str = ""
    price_date: str = ""
    source: Text
    source_date: Text


class Change(_Strict):
    """A device of the user's that is ``like`` another but for the figures given here."""

    like: Text
    title: Text | None = None
    memory_gib: Positive | None = None
    bandwidth_gbs: Positive | None = None
    tflops: dict[Rate, Positive] | None = None
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    link_gbs: Positive | None = None
    network_gbs: Positive | None = None
    slices: tuple[Slice, ...] | None = None
    price_per_hour: Positive | None = None
    price_source: str | None = None
    price_date: str | None = None
    source: Text | None = None
    source_date: Text | None = None

    def of(self, device: Device) -> Device:
        """The device, changed. A price without a source is the user's own."""
        changes = {name: getattr(self, name) for name in self.model_fields_set - {"like"}}
        if "price_per_hour" in changes:
            changes = {"price_source": "yours", "price_date": ""} | changes
        return device.model_copy(update=changes)


def _which(entry: Any) -> str:
    like = entry.get("like") if isinstance(entry, dict) else getattr(entry, "like", None)
    return "whole" if like is None else "change"


Entry = Annotated[Annotated[Device, Tag("whole")] | Annotated[Change, Tag("change")], Discriminator(_which)]


class _File(_Strict):
    devices: dict[Text, Entry] = {}
    efficiency: dict[Kind, Efficiency] = {}
    engine: EngineFactors | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """The table in use."""

    devices: Mapping[str, Device]
    efficiency: Mapping[Kind, Efficiency]
    engine: EngineFactors

    def chosen(self, names: Iterable[str]) -> dict[str, Device]:
        """The named devices, or all. Raises ConfigError for a name that the table does not have."""
        names = list(names)
        for name in names:
            if name not in self.devices:
                known = ", ".join(self.devices)
                raise ConfigError(f"--on: there is no {name!r} in the table; there are {known}.")
        return {name: self.devices[name] for name in names or self.devices}


def read_hardware(path: Path | None = None) -> Hardware:
    """The built-in table; ``path``: a file that adds to it and replaces of it what it names.

    Raises ConfigError with file, line and field for what is wrong in it.
    """
    built_in = read_yaml(BUILT_IN, _File)
    devices = {name: entry for name, entry in built_in.devices.items() if isinstance(entry, Device)}
    assert built_in.engine is not None
    if path is None:
        return Hardware(devices, built_in.efficiency, built_in.engine)
    own = read_yaml(path, _File)
    for name, entry in own.devices.items():
        if isinstance(entry, Device):
            devices[name] = entry
        elif entry.like in devices:
            devices[name] = entry.of(devices[entry.like])
        else:
            known = ", ".join(devices)
            raise ConfigError(f"{path}: devices.{name} is like {entry.like!r}, which is none of {known}.")
    efficiency = {**built_in.efficiency, **own.efficiency}
    return Hardware(devices, efficiency, own.engine or built_in.engine)
