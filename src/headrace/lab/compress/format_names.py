"""Formats that compressed models are written in, by name: the command line imports this, so it is light."""

from __future__ import annotations

from typing import Literal

Layout = Literal["compressed-tensors", "gptq", "gptq-v2", "awq"]
"""Of rounded weights in a Transformers folder."""

Format = Literal[Layout, "gguf", "float"]
"""What can be written. ``gptq``: version 1 if all weights are symmetric, else 2. ``float``: safetensors."""

Target = Literal[Layout, "gguf-q4_0", "gguf-q4_1", "gguf-q8_0", "gguf-f16", "bf16", "f16", "f32"]
"""What a model is converted to: a format, and in GGUF or of floats the type of its weights."""

Rounding = Literal["int4", "int8", "w8a8", "fp8"]
"""How a conversion rounds floats, to nearest."""
