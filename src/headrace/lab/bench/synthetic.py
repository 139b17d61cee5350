"""Made-up conversations of wanted lengths: random words, so that no two prompts share a cached beginning."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.lab.bench.client import ask
from headrace.lab.bench.endpoint import Endpoint, EndpointError
from headrace.lab.bench.lengths import Lengths
from headrace.lab.bench.records import Record
from headrace.lab.bench.workload import Message, Turn, workload_hash

if TYPE_CHECKING:
    import aiohttp

# Common words: one token each, with the space before them, in most vocabularies.
_TEXT = (
    "time people way water word day part place year back thing name sentence man line boy farm end men land "
    "home hand picture air play animal house page letter point mother answer world food country plant school "
    "father tree city earth eye head story side car night life paper group music mark book science room "
    "friend idea fish mountain horse watch color face wood bird body dog family song door product wind ship "
    "area rock order fire problem piece king space hour step star money field table morning plan figure "
    "noun power town machine base bed class heart pattern center road map rule voice unit street value game "
    "shape heat snow tire object force light summer winter north south river wheel stone mill field bridge "
    "green cold warm long short great small large high low fast slow early late open close begin build carry "
    "change clean come cut draw drive fall fill find follow give grow help hold keep know learn leave live "
    "look make mean move need pass pull push read reach rest ride run say see set show sing sit stand start "
    "stop study take talk teach tell think travel try turn use wait walk want work write young"
)
_WORDS = np.array(_TEXT.split())
_SHARED = 2**31  # generator key of the text that all prompts share


@dataclass(frozen=True, slots=True)
class Calibration:
    """How many tokens the server counts: ``overhead`` + ``per_word`` × words. ``measured`` or assumed."""

    per_word: float = 1.0
    overhead: float = 0.0
    measured: bool = False

    def words(self, tokens: int, *, opening: bool = True) -> int:
        """Words that make a prompt of about ``tokens``; at least one."""
        return max(1, round((tokens - (self.overhead if opening else 0.0)) / self.per_word))


async def calibrate(session: aiohttp.ClientSession, endpoint: Endpoint) -> Calibration:
    """Count words in the server's own tokens: two prompts of known words, and the usage of their answers.

    Raises EndpointError if even these short prompts fail.
    """
    if not endpoint.usage:
        return Calibration()
    counts = {}
    for words in (16, 80):
        record = Record(index=-1)
        rng = np.random.default_rng((0, _SHARED, words))
        body = endpoint.body([{"role": "user", "content": _text(rng, words)}], 1)
        await ask(
            session, endpoint.url, body, endpoint.headers, endpoint.timeout_s, record,
            time.perf_counter,
        )  # fmt: skip
        if not record.ok:
            raise EndpointError(
                f"{endpoint.url} fails a prompt of {words} words ({record.error}): {record.detail}"
            )
        if record.prompt_tokens is None:
            return Calibration()
        counts[words] = record.prompt_tokens
    per_word = (counts[80] - counts[16]) / 64
    if per_word <= 0:  # a usage that does not count
        return Calibration()
    return Calibration(per_word, counts[16] - 16 * per_word, measured=True)


def _text(rng: np.random.Generator, words: int) -> str:
    return " ".join(_WORDS[rng.integers(len(_WORDS), size=words)])


class Synthetic:
    """Conversations of random words with drawn lengths.

    ``shared_prefix`` is the share of every first prompt that all prompts have in common, at its beginning.
    The same seed, lengths and calibration give the same conversations.
    """

    name = "synthetic"
    fixed_length = True

    def __init__(
        self,
        prompt: Lengths,
        output: Lengths,
        calibration: Calibration,
        *,
        seed: int = 0,
        shared_prefix: float = 0.0,
        turns: int = 1,
    ) -> None:
        self.turns = turns
        self._prompt = prompt
        self._output = output
        self._calibration = calibration
        self._seed = seed
        self._share = shared_prefix
        self._shared = np.random.default_rng((seed, _SHARED)).integers(len(_WORDS), size=65536)
        rounded = [round(calibration.per_word, 6), round(calibration.overhead, 3)]
        self.hash = workload_hash([str(prompt), str(output), rounded, seed, shared_prefix, turns])

    def conversation(self, stage: int, number: int) -> list[Turn]:
        """Conversation ``number`` of a stage."""
        rng = np.random.default_rng((self._seed, stage, number + 2**31))
        return [
            Turn([self._message(rng, self._prompt.draw(rng), opening=turn == 0)], self._output.draw(rng))
            for turn in range(self.turns)
        ]

    def opening(self, stage: int, number: int, prompt_tokens: int, output_tokens: int) -> list[Turn]:
        """A conversation of one turn with lengths that were given, not drawn (a replayed trace's)."""
        rng = np.random.default_rng((self._seed, stage, number + 2**31))
        return [Turn([self._message(rng, prompt_tokens, opening=True)], output_tokens)]

    def _message(self, rng: np.random.Generator, tokens: int, *, opening: bool) -> Message:
        words = self._calibration.words(tokens, opening=opening)
        shared = int(words * self._share) if opening else 0
        own = _text(rng, words - shared)
        begin = " ".join(_WORDS[np.resize(self._shared, shared)]) if shared else ""
        return {"role": "user", "content": f"{begin} {own}".strip()}
