"""Service-level objectives: how fast an answer has to be to count."""

from __future__ import annotations

import re

import msgspec

from headrace.errors import ConfigError
from headrace.lab.bench.records import Record


class SLO(msgspec.Struct, kw_only=True, frozen=True):
    """Limits of one request in milliseconds; None: no limit. A failed request meets none."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met_by(self, record: Record) -> bool:
        """Whether a request was answered within every limit. What was not streamed has no TTFT to meet."""
        if not record.ok:
            return False
        ttft, tpot = record.ttft_s, record.tpot_s
        if self.ttft_ms is not None and (ttft is None or ttft * 1000 > self.ttft_ms):
            return False
        if self.tpot_ms is not None and tpot is not None and tpot * 1000 > self.tpot_ms:
            return False
        return self.e2e_ms is None or record.e2e_s * 1000 <= self.e2e_ms

    def __str__(self) -> str:
        limits = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in limits.items() if limit is not None)


def parse_slo(text: str) -> SLO:
    """``ttft=500ms,tpot=50ms,e2e=10s``. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(ttft|tpot|e2e)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", part, re.IGNORECASE)
        if found is None or float(found[2]) <= 0:
            raise ConfigError(f"--slo: {part.strip()!r} is no limit; write ttft=500ms,tpot=50ms,e2e=10s")
        name = f"{found[1].lower()}_ms"
        if name in limits:
            raise ConfigError(f"--slo: {found[1].lower()} is given twice")
        limits[name] = float(found[2]) * (1 if found[3].lower() == "ms" else 1000)
    return SLO(**limits)
