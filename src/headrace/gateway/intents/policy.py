"""A route's policy: which of its models answers a request that was taken for an intent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.errors import ConfigError, InvalidRequestError
from headrace.gateway.intents.settings import WANTED, Route

if TYPE_CHECKING:
    from headrace.gateway.config import GatewayConfig
    from headrace.gateway.intents.classifier import Classifier, Judgement

HEADER = "x-headrace-route"

Reason = Literal["quality", "difficulty", "confidence", "no_embedding", "override"]
"""Why a model was chosen: it is the cheapest that is good enough; that is another one because the request is
difficult; the intent is not sure; no embedding came; the client asked for it."""

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "best_of",
)


@dataclass(slots=True)
class Choice:
    """A request's way through a route. ``options``: the candidates that its key may use. ``names_maximum``:
    the client said how long the answer may be.

    ``cache_key``: of all that the choice follows from beside the request; None while a release among them is
    on trial, because then equal requests may get different versions.

    ``model``, ``reason`` and ``judgement`` are filled in when it is decided; an override needs no judgement.
    """

    policy: Policy
    options: tuple[str, ...]
    names_maximum: bool = False
    cache_key: str | None = None
    model: str = ""
    reason: Reason | None = None
    judgement: Judgement | None = None


class Policy:
    """A route under its name. ``digest``: of all that its choices follow from."""

    def __init__(self, name: str, settings: Route, classifier: Classifier) -> None:
        """Raises ConfigError if it speaks of intents that the classifier does not know."""
        self.name = name
        self.settings = settings
        self.classifier = classifier
        self.named = settings.named
        spoken = {*settings.wanted, *(settings.decoding if "decoding" in settings.model_fields_set else ())}
        spoken |= {intent for candidate in settings.candidates.values() for intent in candidate.by_intent}
        if unknown := sorted(spoken - {*classifier.intents}):
            raise ConfigError(
                f"routes: {name}: the classifier does not know the intent {unknown[0]}; "
                f"it knows {', '.join(classifier.intents)}"
            )
        said = settings.model_dump_json().encode()
        self.digest = hashlib.blake2b(said, key=classifier.digest, digest_size=8).hexdigest()

    @property
    def large(self) -> str:
        """The candidate that is safe, and that savings are told against."""
        return self.named["large"]

    def override(self, headers: Mapping[str, str]) -> str | None:
        """The candidate that a client asks for. Raises InvalidRequestError if it is none."""
        asked = headers.get(HEADER, "").strip()
        if asked.lower() in ("", "auto", self.name):
            return None
        if asked not in self.named:
            raise InvalidRequestError(
                f"{HEADER}: {asked[:200]} is none of {', '.join(self.named)}", param="model"
            )
        return self.named[asked]

    def choose(
        self, options: Sequence[str], judgement: Judgement, costs: Mapping[str, int]
    ) -> tuple[str, Reason]:
        """One of ``options`` and why. ``costs``: what each would cost, at most, in 1e-9 dollars."""
        settings, intent = self.settings, judgement.intent
        quality = {
            name: settings.candidates[name].by_intent.get(intent, settings.candidates[name].quality)
            for name in options
        }
        best = max(options, key=lambda name: (quality[name], -costs[name]))
        safe = self.large if self.large in options else best
        if judgement.seen == "features" and settings.without_embedding == "large":
            return safe, "no_embedding"
        if judgement.confidence < settings.min_confidence:
            return safe, "confidence"

        def cheapest(wanted: float) -> str:
            good = [name for name in options if quality[name] >= min(wanted, quality[best])]
            return min(good, key=lambda name: (costs[name], -quality[name]))

        wanted = settings.wanted.get(intent, WANTED.get(intent, 1.0))
        plain = cheapest(wanted)
        lifted = cheapest(wanted + settings.lift * max(2 * judgement.difficulty - 1, 0.0))
        return lifted, "quality" if lifted == plain else "difficulty"

    def add_decoding(self, body: dict[str, Any], intent: str) -> None:
        """The intent's sampling fields, where the request sets none itself."""
        defaults = self.settings.decoding.get(intent)
        several = body.get("n") not in (None, 1)  # of which greedy ones would all be the same
        if defaults is None or several or any(body.get(field) is not None for field in _SAMPLING):
            return
        body.update(defaults.model_dump(exclude_none=True))


def policies(config: GatewayConfig) -> dict[str, Policy]:
    """The routes of a configuration; they share a classifier. Raises ConfigError if that cannot be used."""
    if not config.routes:
        return {}
    from headrace.gateway.intents.classifier import read_classifier

    classifier = read_classifier(config.classifier)
    return {name: Policy(name, settings, classifier) for name, settings in config.routes.items()}
