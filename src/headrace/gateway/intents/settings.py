"""The part of the gateway's file that is about routes: names that stand for a choice between models."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.gateway.fields import Name, Strict
from headrace.gateway.intents.examples import INTENT
from headrace.yaml_file import FieldError

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Intent = Annotated[str, Field(pattern=f"^{INTENT.pattern}$")]

WANTED: dict[str, float] = {
    "chat": 0.5,
    "summarise": 0.5,
    "classify": 0.5,
    "extract": 0.5,
    "maths": 0.8,
    "code": 0.8,
    "reasoning": 0.8,
    "creative": 0.8,
}
"""The quality that an intent wants where a route does not say."""


class Candidate(Strict):
    """How good a model is, from 0 to 1: at everything, and at the intents where that differs."""

    quality: Share
    by_intent: dict[Intent, Share] = Field(default_factory=dict)


class Decoding(Strict):
    """Sampling fields for requests that set none themselves."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None


def _greedy() -> dict[str, Decoding]:
    return {intent: Decoding(temperature=0.0) for intent in ("classify", "extract")}


class Route(Strict):
    """A choice between ``candidates``: the cheapest one that is as good as the intent wants.

    ``small`` and ``large``: what clients may ask for by these words, by default the candidate of the least
    and of the highest quality; large also answers what is not understood with ``min_confidence``. ``lift``:
    how much more quality the most difficult request wants. ``without_embedding``: whether the cheap features
    decide when no embedding comes in time, or the large model answers.
    """

    candidates: Annotated[dict[Name, Candidate], Field(min_length=2)]
    small: Name | None = None
    large: Name | None = None
    min_confidence: Share = 0.5
    wanted: dict[Intent, Share] = Field(default_factory=dict)
    lift: Share = 0.3
    decoding: dict[Intent, Decoding] = Field(default_factory=_greedy)
    without_embedding: Literal["features", "large"] = "features"

    @model_validator(mode="after")
    def _are_candidates(self) -> Self:
        for role in ("small", "large"):
            name = getattr(self, role)
            if name is not None and name not in self.candidates:
                raise FieldError(f"{name} is none of the candidates {', '.join(self.candidates)}", role)
        return self

    @property
    def named(self) -> dict[str, str]:
        """What clients may ask for: small, large, or a candidate by its name."""
        by_quality = sorted(self.candidates, key=lambda name: self.candidates[name].quality)
        roles = {"small": self.small or by_quality[0], "large": self.large or by_quality[-1]}
        return {name: name for name in self.candidates} | roles
