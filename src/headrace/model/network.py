"""Which definition runs an architecture."""

from __future__ import annotations

from typing import TypeVar

from headrace.model.architecture import Architecture
from headrace.model.decoder import decode
from headrace.model.encoder import encode
from headrace.model.ops import Ops

T = TypeVar("T")


def run(ops: Ops[T], arch: Architecture) -> None:
    """One step of the network: a decoder ends in ``ops.sample``, an encoder in ``ops.pool``."""
    if arch.encoder is not None:
        encode(ops, arch, arch.encoder)
    else:
        decode(ops, arch)
