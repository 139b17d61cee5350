"""Formats that compressed models are written in; those of the engine's readers are in ``model/weights``."""

from __future__ import annotations

from headrace.lab.compress.formats.write import FORMATS, check_format, write_checkpoint

__all__ = ["FORMATS", "check_format", "write_checkpoint"]
