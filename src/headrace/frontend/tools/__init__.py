"""Tool calls: how models are told of tools, how they write calls, and how calls are read back."""

from __future__ import annotations

from headrace.frontend.tools.formats import FORMATS, ToolFormat, tool_format
from headrace.frontend.tools.grammar import arguments_schema, calls_grammar
from headrace.frontend.tools.parser import CallDelta, Parsed, ToolParser

__all__ = [
    "FORMATS",
    "CallDelta",
    "Parsed",
    "ToolFormat",
    "ToolParser",
    "arguments_schema",
    "calls_grammar",
    "tool_format",
]
