"""Names of requests and answers."""

from __future__ import annotations

import os
import re

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def unique_id(prefix: str) -> str:
    """A fresh id such as ``chatcmpl-0123…`` (96 random bits)."""
    return f"{prefix}-{os.urandom(12).hex()}"


def request_id(given: str) -> str:
    """The id that a client gave its request, if it can do no harm in a header or a log; else a fresh one."""
    return given if _SANE_ID.fullmatch(given) else unique_id("req")
