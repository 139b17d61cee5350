"""A plan as plain data: what ``--json`` prints, and what the tables are made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headrace.lab.plan.hardware import Hardware
from headrace.lab.plan.here import Measured, Prediction
from headrace.lab.plan.network import BF16, FP8, INT4, Network
from headrace.lab.plan.options import Option
from headrace.lab.plan.serving import Steady, Workload
from headrace.lab.plan.sharing import Suggestion
from headrace.lab.plan.source import Source

PRICES = (
    "Prices are list prices from the table's sources and dates, and change: put your own into a file and "
    "name it with --hardware. Times are estimates from vendors' figures and the table's shares of them."
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Options for a workload, best first."""

    source: Source
    work: Workload
    hardware: Hardware
    options: list[Option]
    suggestions: list[Suggestion]
    kv_value_bytes: int = 2

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        shares = {kind: efficiency.model_dump() for kind, efficiency in self.hardware.efficiency.items()}
        return {
            "network": network_facts(self.source.network, self.work, self.kv_value_bytes),
            "workload": _work(self.work),
            "efficiency": shares,
            "options": [_option(option) for option in self.options],
            "suggestions": [
                {"device": each.option.name, "precision": each.option.precision.name, "text": each.text}
                for each in self.suggestions
            ],
            "note": PRICES,
        }


def network_facts(network: Network, work: Workload, kv_value_bytes: int = 2) -> dict[str, Any]:
    """Sizes that do not depend on hardware."""
    return {
        "name": network.name,
        "parameters": network.parameters(),
        "active_matrix_parameters": network.active_matrix_parameters(),
        "layers": network.layers,
        "weight_bytes": {
            "bf16": network.weight_bytes(BF16),
            "fp8, int8": network.weight_bytes(FP8),
            "int4": network.weight_bytes(INT4),
        },
        "kv_bytes_per_token": network.kv_bytes_per_token(kv_value_bytes),
        "kv_bytes_per_sequence": network.kv_bytes(work.context, kv_value_bytes),
    }


def here_as_dict(
    source: Source, work: Workload, prediction: Prediction, measured: Measured | None
) -> dict[str, Any]:
    """For ``--here --json``."""
    found: dict[str, Any] = {
        "network": network_facts(source.network, work),
        "workload": _work(work),
        "limits": asdict(prediction.limits),
        "threads": prediction.threads,
        "load_average": prediction.load_average,
        "weight_bytes": prediction.weight_bytes,
        "kv_bytes": prediction.kv_bytes,
        "available_bytes": prediction.available_bytes,
        "fits": prediction.fits,
        "predicted": {
            "decode_tokens_per_s": prediction.decode_tokens_per_s,
            "prefill_tokens_per_s": prediction.prefill_tokens_per_s,
            **_steady(prediction.steady),
        },
    }
    if measured is not None:
        found["measured"] = asdict(measured)
        found["error"] = errors(prediction, measured)
    return found


def errors(prediction: Prediction, measured: Measured) -> dict[str, float]:
    """Predicted over measured, less one: 0.1 is a tenth too fast."""
    return {
        "decode": prediction.decode_tokens_per_s / measured.decode_tokens_per_s - 1,
        "prefill": prediction.prefill_tokens_per_s / measured.prefill_tokens_per_s - 1,
    }


def _work(work: Workload) -> dict[str, Any]:
    return {
        "prompt_tokens": work.prompt_tokens,
        "output_tokens": work.output_tokens,
        "concurrency": work.concurrency,
        "rate": work.rate,
        "slo": None if work.slo is None else str(work.slo),
    }


def _steady(steady: Steady) -> dict[str, Any]:
    return {
        "ttft_ms": steady.ttft_s * 1000,
        "tpot_ms": None if steady.tpot_s is None else steady.tpot_s * 1000,
        "e2e_ms": steady.e2e_s * 1000,
        "requests_per_s": steady.requests_per_s,
        "output_tokens_per_s": steady.output_tokens_per_s,
        "sequences": steady.sequences,
    }


def _option(option: Option) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": option.name,
        "title": option.device.title,
        "precision": option.precision.name,
        "tensor_parallel": option.layout.tp,
        "pipeline_parallel": option.layout.pp,
        "copies": option.copies,
        "devices": option.devices,
        "fits": option.fits,
        "meets_slo": option.meets_slo,
        "missed": dict(option.missed),
        "why_not": option.why_not,
        "weight_bytes": option.weight_bytes,
        "max_context": option.max_context,
        "max_sequences": option.max_sequences,
        "price_per_hour": option.price_per_hour(),
        "price_per_million_output_tokens": option.price_per_million(),
        "price_source": option.device.price_source,
        "price_date": option.device.price_date,
    }
    if option.steady is not None:
        found["each_copy"] = _steady(option.steady)
        found["output_tokens_per_s"] = option.output_tokens_per_s
    return found
