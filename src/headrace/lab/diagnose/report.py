"""All that a run of diagnose found, as JSON or for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headrace.lab.diagnose.prompts import PromptAdvice
from headrace.lab.diagnose.terminal import show, show_prompts
from headrace.lab.diagnose.verdict import Diagnosis

if TYPE_CHECKING:
    from rich.console import Console


class Report(msgspec.Struct, kw_only=True):
    """None for what was not asked for."""

    diagnosis: Diagnosis | None = None
    prompts: PromptAdvice | None = None

    def json(self) -> bytes:
        """As a JSON object, indented."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"

    def show(self, console: Console) -> None:
        """Print it."""
        slope = None
        if self.diagnosis is not None:
            show(self.diagnosis, console)
            slope = self.diagnosis.prefill_ms_per_token
        if self.prompts is not None:
            show_prompts(self.prompts, slope, console)
