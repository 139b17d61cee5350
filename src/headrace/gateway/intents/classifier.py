"""Telling a text's intent and difficulty: multinomial logistic regression on an embedding and cheap features.

A classifier has two heads: one for texts with their embedding, and one for the cheap features alone, for when
no embedding comes in time. Each has its own temperature, so that its confidence means what it says.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace.errors import ConfigError
from headrace.gateway.intents.examples import INTENT, shipped
from headrace.gateway.intents.features import NAMES, Floats, features

_MOST_BYTES = 32 * 2**20
_MOST_INTENTS = 64
_MOST_DIMENSIONS = 8192
_FARTHEST = 4.0  # a feature counts as no more than so many standard deviations from its mean

Number = Annotated[float, Field(allow_inf_nan=False)]
Seen = Literal["embedding", "features"]


class Head(BaseModel):
    """One regression over standardised inputs. ``weights``: a row for each input, a column for each intent.

    ``difficulty`` holds a weight for each input; empty if the examples had no difficulties.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: list[Number]
    scale: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    weights: list[list[Number]]
    bias: list[Number]
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    difficulty: list[Number]
    difficulty_bias: Number


class ClassifierFile(BaseModel):
    """What a classifier's JSON file holds. ``embedder`` and ``dimensions``: of the embeddings it was trained
    on; ``inputs``: the names of the cheap features it knows.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["headrace-intents-1"] = "headrace-intents-1"
    embedder: Annotated[str, Field(min_length=1, max_length=200)]
    dimensions: Annotated[int, Field(ge=1, le=_MOST_DIMENSIONS)]
    intents: Annotated[list[str], Field(min_length=2, max_length=_MOST_INTENTS)]
    inputs: list[str]
    with_embedding: Head
    features_only: Head

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(set(self.intents)) < len(self.intents) or not all(map(INTENT.fullmatch, self.intents)):
            raise ValueError("intents: different lower-case words are needed")
        if tuple(self.inputs) != NAMES:
            raise ValueError("inputs: these are not the features of this version: train it again")
        for head, size in ((self.with_embedding, self.dimensions), (self.features_only, 0)):
            size += len(NAMES)
            rows = {len(head.mean), len(head.scale), len(head.weights), len(head.difficulty) or size}
            columns = {len(head.bias), *map(len, head.weights)}
            if rows != {size} or columns != {len(self.intents)}:
                raise ValueError(f"a head's arrays must have {size} rows and {len(self.intents)} columns")
        return self


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a text was taken for. ``difficulty`` is 0.5 where nobody taught any. ``seen``: by which head."""

    intent: str
    confidence: float
    difficulty: float
    seen: Seen
    probabilities: dict[str, float]


class Regression:
    """A head as arrays. Inputs are float32 [n, inputs]."""

    def __init__(self, head: Head) -> None:
        self._mean = np.array(head.mean, dtype=np.float32)
        self._scale = np.array(head.scale, dtype=np.float32)
        self._weights = np.array(head.weights, dtype=np.float32)
        self._bias = np.array(head.bias, dtype=np.float32)
        self._temperature = head.temperature
        self._difficulty = np.array(head.difficulty or np.zeros(len(head.mean)), dtype=np.float32)
        self._difficulty_bias = head.difficulty_bias

    def probabilities(self, inputs: Floats) -> npt.NDArray[np.float64]:
        """[n, intents]; rows sum to one."""
        logits = self._standard(inputs) @ self._weights + self._bias
        return softmax(logits / self._temperature)

    def difficulty(self, inputs: Floats) -> npt.NDArray[np.float64]:
        """[n], each from 0 to 1."""
        logits = self._standard(inputs) @ self._difficulty + self._difficulty_bias
        out: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(-np.clip(logits, -50, 50)))
        return out

    def shares(self, inputs: Floats, intent: int) -> Floats:
        """[n, inputs]: what each input adds to an intent's logit, against the intents' mean."""
        against = self._weights[:, intent] - self._weights.mean(1)
        out: Floats = self._standard(inputs) * against / self._temperature
        return out

    def _standard(self, inputs: Floats) -> Floats:
        return standardised(inputs, self._mean, self._scale)


def standardised(inputs: Floats, mean: Floats, scale: Floats) -> Floats:
    """Inputs as a head sees them: around zero, and none of them out of all proportion."""
    out: Floats = np.clip((inputs - mean) / scale, -_FARTHEST, _FARTHEST)
    return out


def softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Over the last axis, in float64."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    out: npt.NDArray[np.float64] = shifted / shifted.sum(axis=-1, keepdims=True)
    return out


class Classifier:
    """A classifier that was read or trained. ``digest``: of all its numbers."""

    def __init__(self, file: ClassifierFile) -> None:
        self.intents = tuple(file.intents)
        self.embedder = file.embedder
        self.digest = hashlib.blake2b(file.model_dump_json().encode(), digest_size=8).digest()
        self.dimensions = file.dimensions
        self._heads: dict[Seen, Regression] = {
            "embedding": Regression(file.with_embedding),
            "features": Regression(file.features_only),
        }

    def judge(self, text: str, embedding: Floats | None) -> Judgement:
        """The intent of a text, by its embedding [dimensions] if there is one of the right length."""
        inputs, seen = self._inputs(text, embedding)
        head = self._heads[seen]
        [row] = head.probabilities(inputs[None])
        [difficulty] = head.difficulty(inputs[None])
        best = int(row.argmax())
        return Judgement(
            self.intents[best],
            float(row[best]),
            float(difficulty),
            seen,
            {intent: float(share) for intent, share in zip(self.intents, row, strict=True)},
        )

    def shares(self, text: str, embedding: Floats | None, intent: str) -> dict[str, float]:
        """What speaks for an intent (above 0) and against it: each cheap feature, and the whole embedding."""
        inputs, seen = self._inputs(text, embedding)
        [row] = self._heads[seen].shares(inputs[None], self.intents.index(intent))
        out = {name: float(share) for name, share in zip(NAMES, row, strict=False)}
        return out if seen == "features" else {**out, "embedding": float(row[len(NAMES) :].sum())}

    def _inputs(self, text: str, embedding: Floats | None) -> tuple[Floats, Seen]:
        cheap = features(text)
        if embedding is None or embedding.shape != (self.dimensions,):
            return cheap, "features"
        return np.concatenate([cheap, embedding.astype(np.float32)]), "embedding"


def read_classifier(path: Path | None = None) -> Classifier:
    """The classifier of a file, the shipped one by default. Raises ConfigError if it is none."""
    path = path or shipped("intents.json")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is too large for a classifier: over {_MOST_BYTES >> 20} MiB")
        return Classifier(ClassifierFile.model_validate_json(path.read_bytes()))
    except OSError as error:
        raise ConfigError(f"the classifier {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(
            f"{path} is no classifier: {where}: {first['msg']}; `headrace gateway route train` makes one"
        ) from None
