"""Some hundreds of mixed requests leave the server as large as it was, idle, and with every block free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.e2e.running import serving

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_memory_stays_flat_and_within_its_budget(smollm2_path: Path) -> None:
    """The benchmark with its own checks: statuses, ends of streams, resident size, sequences, blocks. Then
    weights + KV budget + 120 MiB; the budget is small, so that its pages are touched.
    """
    with serving("--kv-cache-memory", "8MiB") as server:
        ran = subprocess.run(
            [sys.executable, str(SOAK), "--url", server.url, "--requests", "240", "--bound-mb", "8"],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "memory is flat" in ran.stdout
        budget = smollm2_path.stat().st_size + 8 * 2**20 + 120 * 2**20
        assert server.metric("headrace_device_memory_bytes") < budget
