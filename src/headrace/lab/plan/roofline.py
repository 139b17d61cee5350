"""How long steps take on devices: the larger of bytes over bandwidth and operations over rate.

Roofline: Williams, Waterman, Patterson (CACM 52/4, 2009). Tensor parallelism splits every matrix over ``tp``
devices and pays two all-reduces a layer (Megatron-LM, arXiv 1909.08053); a ring all-reduce moves
``2 (tp - 1) / tp`` of the data over each link. Pipeline parallelism splits the layers over ``pp`` stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.lab.plan.hardware import Device, Efficiency, Rate
from headrace.lab.plan.network import Network, Precision

_ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """How a copy of a network is spread: ``tp`` devices split each matrix, ``pp`` stages the layers."""

    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        """Of one copy."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Placed:
    """A network in some precision on devices: what fits, and the time of a step."""

    network: Network
    precision: Precision
    device: Device
    efficiency: Efficiency
    layout: Layout
    kv_value_bytes: int = 2

    def kv_room_bytes(self) -> float:
        """Memory for KV over all devices of a copy; negative where not even the weights fit."""
        held = self.device.memory_gib * 2**30 * self.efficiency.memory.value * self.layout.devices
        return held - self.network.weight_bytes(self.precision)

    def kv_copies(self) -> float:
        """How often KV is held: devices beyond the number of KV heads hold copies of one."""
        kv_heads = min(layer.attention.kv_heads for layer in self.network.architecture.layers)
        return max(1.0, self.layout.tp / kv_heads)

    def max_sequences(self, context: int) -> int:
        """Sequences of ``context`` tokens that fit at once into one copy; 0: none."""
        each = self.network.kv_bytes(context, self.kv_value_bytes) * self.kv_copies()
        return max(0, int(self.kv_room_bytes() / each))

    def max_context(self) -> int:
        """The longest single sequence that fits, in tokens; at most what the network was made for."""
        low, high = 0, self.network.architecture.max_positions
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.max_sequences(middle) else (low, middle - 1)
        return low

    def decode_step_s(self, sequences: float, context: float) -> float:
        """From one token of a sequence to its next, while ``sequences`` run at ``context`` tokens.

        With stages, each holds a share of the sequences, and a token passes all of them.
        """
        rows = max(sequences / self.layout.pp, 1.0) if sequences else 0.0
        network = self.network
        read = network.step_weight_bytes(self.precision, rows)
        read += rows * network.kv_read_bytes(context, self.kv_value_bytes) * self.kv_copies()
        stages = self._stage_s(
            read, self._matrix_macs(rows, rows), rows * network.attention_macs(context), rows
        )
        return stages + self.efficiency.step_s.value

    def prefill_s(self, tokens: int) -> float:
        """A prompt by itself, from its start to its first token."""
        network = self.network
        read = network.step_weight_bytes(self.precision, tokens)
        macs = self._matrix_macs(tokens, 1)
        attention = network.prefill_attention_macs(tokens)
        return self._stage_s(read, macs, attention, tokens) + self.efficiency.step_s.value

    def prefill_share_s(self, tokens: int) -> float:
        """What a prompt keeps a copy from decoding: stages work on different prompts."""
        return self.prefill_s(tokens) / self.layout.pp

    def _matrix_macs(self, rows: float, sampled: float) -> tuple[float, float]:
        """Multiply-accumulates in the precision's rate, and of the head, in bf16."""
        return rows * self.network.active_matrix_parameters(), sampled * self.network.head_parameters()

    def _stage_s(self, read: float, macs: tuple[float, float], attention: float, rows: float) -> float:
        """All stages one after another; ``read`` and multiply-accumulates are those of the whole network."""
        tp, shares = self.layout.tp, self.efficiency
        bandwidth = self.device.bandwidth_gbs * 1e9 * shares.bandwidth.value * tp
        rate = self.device.tflops[_rate(self.precision, self.device)] * 1e12 / 2 * shares.compute.value * tp
        bf16 = self.device.tflops["bf16"] * 1e12 / 2 * shares.compute.value * tp
        work = macs[0] / rate + (macs[1] + attention) / bf16
        return max(read / bandwidth, work) + self._links_s(rows)

    def _links_s(self, rows: float) -> float:
        tp, pp, shares = self.layout.tp, self.layout.pp, self.efficiency
        size = rows * self.network.architecture.hidden_size * _ACTIVATION_BYTES
        seconds = 0.0
        if tp > 1:
            assert self.device.link_gbs is not None
            moved = 2 * (tp - 1) / tp * size / (self.device.link_gbs * 1e9 * shares.link.value)
            seconds += 2 * self.network.layers * (shares.link_s.value + moved)
        if pp > 1:
            assert self.device.network_gbs is not None
            moved = size / tp / (self.device.network_gbs * 1e9 * shares.link.value)
            seconds += (pp - 1) * (shares.link_s.value + moved)
        return seconds


def _rate(precision: Precision, device: Device) -> Rate:
    """The rate that multiplies: a device without the precision's own unpacks to bf16."""
    return precision.compute if precision.compute in device.tflops else "bf16"
