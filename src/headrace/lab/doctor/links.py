"""What joins devices and nodes: InfiniBand or RoCE ports, and NVLink between GPUs."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.lab.doctor.check import Check, output, read

INFINIBAND = Path("/sys/class/infiniband")


def between_nodes(infiniband: Path = INFINIBAND) -> Check:
    """Ports for remote memory access: their kind, speed and state."""
    ports = sorted(infiniband.glob("*/ports/*"))
    if not ports:
        return Check(
            "nodes", "ok", "no InfiniBand or RoCE; nodes of a pool talk TCP, which replicas can live with"
        )
    found, down = [], []
    for port in ports:
        name = f"{port.parent.parent.name}/{port.name}"
        layer = read(port / "link_layer").strip()
        kind = "RoCE" if layer == "Ethernet" else layer or "unknown link"
        state = read(port / "state").partition(":")[2].strip() or "unknown"
        found.append(f"{name} {kind} {read(port / 'rate').strip() or 'unknown rate'} {state}")
        if state != "ACTIVE":
            down.append(name)
    text = "; ".join(found)
    if down:
        fix = f"check the cable and, for InfiniBand, the subnet manager of {', '.join(down)}"
        return Check("nodes", "slower", text, fix, "collectives between nodes take fewer ports, or TCP")
    return Check("nodes", "ok", text)


def between_gpus() -> Check:
    """How GPUs of this machine reach each other, by nvidia-smi's matrix (``nvidia-smi topo -m``)."""
    rows = [line.split() for line in output(["nvidia-smi", "topo", "-m"]).splitlines()]
    gpus = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    if len(gpus) < 2:
        return Check("GPU links", "ok", "fewer than two GPUs")
    paths = {cell for row in gpus for cell in row[1 : 1 + len(gpus)]} - {"X"}
    text = f"{len(gpus)} GPUs, joined by {', '.join(sorted(paths))}"
    if all(re.fullmatch(r"NV\d+", path) for path in paths):
        return Check("GPU links", "ok", f"{text} (NVLink)")
    return Check(
        "GPU links",
        "slower",
        text,
        "prefer one replica a GPU to tensor parallelism; GPUs with NVLink where a model needs several",
        "two all-reduces a layer cross PCIe: headrace plan shows what that takes",
    )
