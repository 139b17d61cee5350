"""The ``quantization_config`` of a Hugging Face ``config.json``: which way its linears are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.model.weights.compressed_tensors import CompressedTensors
from headrace.model.weights.gptq_awq import Awq, Gptq
from headrace.model.weights.hf_keys import Keys
from headrace.model.weights.quantized_linear import Method

_METHODS: dict[str, Callable[[Keys], Method]] = {
    "compressed-tensors": CompressedTensors,
    "awq": Awq,
    "gptq": Gptq,
}


def method_of(config: dict[str, Any]) -> Method | None:
    """How a parsed ``config.json`` says that linears are quantised; None: they are not.

    Raises ModelFormatError, naming the key, for a method or setting that is not supported.
    """
    outer = Keys(config)
    if not outer.has("quantization_config"):
        return None
    keys = outer.section("quantization_config")
    name = keys.text("quant_method")
    if name not in _METHODS:
        raise keys.wrong(
            "quant_method",
            f"is {name!r}, which is not read; {', '.join(_METHODS)} are. Use the unquantised release with "
            "load-time quantisation, or a GGUF file",
        )
    return _METHODS[name](keys)
