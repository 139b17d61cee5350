"""The ways in which models write tool calls, and which of them a chat template teaches."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Every format is JSON objects with a name and arguments; what differs is what stands around them.

    Several calls are either one block of objects, ``begin`` once before all of them, or a block each
    (``separator`` between them, and ``end`` after each).
    """

    name: str
    arguments_key: str  # of the arguments in an object, beside "name"
    begin: str = ""  # before a block; may be a control token of the vocabulary. Empty: calls start the output
    optional_begin: str = ""  # may stand before calls that start the output
    end: str = ""  # after each block
    opening: str = ""  # inside a block, before the first object
    closing: str = ""
    separator: str = "\n"
    one_block: bool = False
    short_ids: bool = False  # its templates insist on ids of nine letters and digits

    @property
    def marker(self) -> str:
        """What tells calls from text: control tokens may stand for it. Empty if there is none."""
        return self.begin or self.optional_begin


FORMATS = {
    form.name: form
    for form in (
        ToolFormat(
            "hermes", "arguments", begin="<tool_call>", opening="\n", closing="\n", end="</tool_call>"
        ),
        ToolFormat(
            "llama3_json", "parameters", optional_begin="<|python_tag|>", separator="; ", one_block=True
        ),
        ToolFormat(
            *("mistral", "arguments"),
            begin="[TOOL_CALLS]",
            opening="[",
            closing="]",
            separator=", ",
            one_block=True,
            short_ids=True,
        ),
    )
}
"""By the names that vLLM's ``--tool-call-parser`` has for them; Qwen's models write hermes."""


def tool_format(template: str | None, name: str | None = None) -> ToolFormat:
    """The format called ``name``, or else the one that a chat template teaches; hermes if it teaches none.

    Raises ConfigError for a name that does not exist.
    """
    if name is not None:
        if name not in FORMATS:
            known = ", ".join(FORMATS)
            raise ConfigError(f"There is no tool call parser {name!r}; choose one of {known}.")
        return FORMATS[name]
    template = template or ""
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<|python_tag|>" in template or ('"parameters": ' in template and "<|start_header_id|>" in template):
        return FORMATS["llama3_json"]
    return FORMATS["hermes"]
