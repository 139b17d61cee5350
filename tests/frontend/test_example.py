"""The example that the README points to, run as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "seed.py"


def test_the_seed_example(smollm2_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), str(smollm2_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rate = re.search(r"prefix cache hit rate: ([\d.]+)%", run.stdout)
    assert rate is not None and float(rate[1]) > 50
    assert re.search(r"running sequences: +0$", run.stdout, re.MULTILINE)
    assert run.stderr == "", "no progress bar, no warnings where nobody watches"
