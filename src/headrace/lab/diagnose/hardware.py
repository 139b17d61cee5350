"""The ceilings of this machine against what a model asks of it: for our own cpu backend."""

from __future__ import annotations

from pathlib import Path

from headrace.lab.diagnose.measurements import Hardware


def measure_hardware(path: Path, weight_bytes: int, threads: int, seconds: float) -> Hardware | None:
    """Measure memory bandwidth and arithmetic in about ``seconds``; None if the model can't be opened."""
    from headrace.backend.cpu.limits import measure_limits
    from headrace.errors import HeadraceError
    from headrace.model.weights import open_checkpoint

    try:
        architecture = open_checkpoint(path).architecture
    except HeadraceError:
        return None  # the server says what is wrong with it
    macs = 0
    for layer in architecture.layers:
        a, ff = layer.attention, layer.feed_forward
        qkv = (a.heads + 2 * a.kv_heads) * a.head_dim
        mixed = a.heads * a.head_dim
        macs += architecture.hidden_size * (qkv + mixed + (3 if ff.gated else 2) * ff.width)
    limits = measure_limits(threads, seconds)
    return Hardware(
        threads=threads,
        weight_bytes=weight_bytes,
        macs_per_token=macs,
        read_bytes_s=limits.read(weight_bytes),
        int8_macs_s=limits.vector_int8_macs_per_s,
    )
