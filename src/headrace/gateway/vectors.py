"""The embedding cache: one vector for each input, so that a batch asks only for what nobody has asked yet.

A vector is kept under its input, the model and its version, the dimensions and whatever else the request
names, and the tenant. For retrieval this is the cache of the contexts too: a document that is embedded again,
alone or among others, costs nothing. Vectors are kept as float32, in which OpenAI's API has them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from headrace.gateway.usage import Usage, told

if TYPE_CHECKING:
    from headrace.gateway.context import RequestContext

_FORMATS = (None, "float", "base64")
_TOKENS = struct.Struct("<I")


@dataclass(slots=True)
class Batch:
    """The inputs of a request. ``keys``: of each, in order. ``asked``: of those that the upstream is asked
    for. ``kept``: what is known, by key; ``fresh``: what of it has just come.
    """

    keys: list[bytes]
    asked: list[bytes]
    encoding: str | None
    kept: dict[bytes, bytes] = field(default_factory=dict)
    fresh: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to ask."""
        return all(key in self.kept for key in self.keys)

    def take(self, answer: bytes, inputs: Sequence[str | list[int]]) -> None:
        """The upstream's answer to ``asked``, which are ``inputs``. Raises ValueError if it is none."""
        self.fresh = dict(zip(self.asked, _read(answer, inputs), strict=True))
        self.kept |= self.fresh


def batch_of(context: RequestContext, version: object) -> Batch | None:
    """The request's inputs; None if they, or the format, are none that can be kept one by one."""
    body = context.body
    encoding = body.get("encoding_format")
    if encoding not in _FORMATS:
        return None
    asked = {name: body[name] for name in body.keys() - {"model", "input", "encoding_format"}}
    parts = [context.tenant, "embedding", context.model, version, asked]
    start = hashlib.blake2b(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS), digest_size=32)
    keys = []
    for item in inputs_of(body):
        each = start.copy()
        each.update(orjson.dumps(item))
        keys.append(each.digest())
    return Batch(keys, keys, encoding)


def narrow(context: RequestContext, batch: Batch) -> None:
    """Ask the upstream only for what is missing, and for each input once."""
    missing = {
        key: item
        for key, item in zip(batch.keys, inputs_of(context.body), strict=True)
        if key not in batch.kept
    }
    batch.asked = list(missing)
    context.body = {**context.body, "input": list(missing.values())}


def answer_of(context: RequestContext, batch: Batch) -> tuple[bytes, Usage]:
    """The answer to a batch of which all is kept, and what it would have cost."""
    tokens = sum(_TOKENS.unpack_from(batch.kept[key])[0] for key in batch.keys)
    data = [
        {"object": "embedding", "index": place, "embedding": _encoded(batch.kept[key], batch.encoding)}
        for place, key in enumerate(batch.keys)
    ]
    answer = {
        "object": "list",
        "data": data,
        "model": context.body["model"],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), Usage(tokens)


def inputs_of(body: Mapping[str, Any]) -> list[Any]:
    """A request's inputs, each a text or token ids."""
    asked = body["input"]
    # one text, or the token ids of one
    return [asked] if isinstance(asked, str) or isinstance(asked[0], int) else asked


def tokens_by_input(usage: object, inputs: Sequence[str | list[int]]) -> list[int]:
    """The tokens of each input; together they are those that ``usage`` tells.

    Ours tell them one by one (``prompt_tokens_by_input``). Else they are divided by the inputs' lengths.
    """
    total = (told(usage) or Usage()).prompt
    each = usage.get("prompt_tokens_by_input") if isinstance(usage, dict) else None
    if isinstance(each, list) and len(each) == len(inputs):
        counts = [count for count in each if type(count) is int and count >= 0]
        if len(counts) == len(inputs) and sum(counts) == total:
            return counts
    ends = np.cumsum([0, *map(len, inputs)])
    ends = ends * total // max(int(ends[-1]), 1)
    return [int(count) for count in np.diff(ends)]


def _read(answer: bytes, inputs: Sequence[str | list[int]]) -> list[bytes]:
    """An upstream's answer as records to be kept, one for each of ``inputs``. Raises ValueError if it is no
    such answer.
    """
    try:
        whole = orjson.loads(answer)
        items = sorted(whole["data"], key=lambda item: item["index"])
        vectors = [_floats(item["embedding"]) for item in items]
    except (KeyError, TypeError, orjson.JSONDecodeError, binascii.Error) as error:
        raise ValueError(f"no embeddings came: {error!r}") from None
    if [item["index"] for item in items] != list(range(len(inputs))):
        raise ValueError(f"{len(inputs)} embeddings were asked for, and others came")
    return [
        _TOKENS.pack(min(count, 2**32 - 1)) + vector.astype("<f4").tobytes()
        for count, vector in zip(tokens_by_input(whole.get("usage"), inputs), vectors, strict=True)
    ]


def _floats(embedding: object) -> np.ndarray[Any, np.dtype[np.float32]]:
    if isinstance(embedding, str):
        raw = base64.b64decode(embedding, validate=True)
        if not raw or len(raw) % 4:
            raise ValueError("an embedding in base64 is no row of float32")
        return np.frombuffer(raw, "<f4")
    made = np.array(embedding, dtype=np.float32)
    if made.ndim != 1 or not made.size:
        raise ValueError("an embedding is a list of numbers")
    return made


def _encoded(record: bytes, encoding: str | None) -> object:
    raw = record[_TOKENS.size :]
    if encoding == "base64":
        return base64.b64encode(raw).decode()
    return np.frombuffer(raw, "<f4").astype(np.float32)
