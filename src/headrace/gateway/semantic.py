"""The semantic cache: a question gets the answer of another one that means the same.

Only questions that are alike in all but the last user's text are compared: tenant, model and its version,
system prompt, earlier turns, sampling fields, response format (one *scope*). Among these the nearest by their
embeddings are looked at; a verifier refuses those that differ in what changes an answer, and what is learned
of each kept question says how likely its answer is right at such a similarity. It is served when that is
within the user's ``max_false_hit_rate``. Else the upstream is asked, and whether both answers agree is the
next thing that is learned; so it is for a share of those that would be served, which shows how often the
cache is wrong. Whatever fails or takes too long is a miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import sqlite3
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from headrace.errors import ConfigError
from headrace.gateway import replay, verifier
from headrace.gateway.answers import AnswerCache, connect
from headrace.gateway.config import SemanticSettings
from headrace.gateway.embedder import Embedder, Vectors
from headrace.gateway.thresholds import Observation, Population

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger
    from usearch.index import Index

    from headrace.gateway.context import RequestContext
    from headrace.gateway.metrics import Metrics

_LONGEST = 800  # bytes of a question: longer ones do not fit into an encoder's 256 tokens for sure
_NEAREST = 8  # neighbours that are looked at
_LEAST = 0.6  # similarity; nothing below it was ever right
_EXACT_BELOW = 4096  # questions of a scope: up to there comparing with all is as quick as the graph
_SCOPES = 256  # whose indices are held; each takes 50 KiB and what its questions take
_TENANTS = 16  # whose populations are held
_AGREE = 0.9  # similarity of two answers that say the same
_OBSERVATIONS = 20_000
_TIDY_EVERY = 64  # questions kept
_MOST_LEARNING = 256
_LEARN_S = 5.0  # for the embeddings of two answers; nobody waits for them
_ONE_ANSWER_ONLY = ("tools", "functions", "logprobs", "prompt_logprobs", "audio", "prediction")


@dataclass(frozen=True, slots=True)
class Nearest:
    """The kept question that is most likely to have the right answer. ``safe``: likely enough."""

    key: bytes
    text: str
    answer: bytes
    similarity: float
    loose: bool
    safe: bool


@dataclass(frozen=True, slots=True)
class Question:
    """A request's question, as it was looked up. ``served``: it gets the answer of ``nearest``."""

    tenant: str
    scope: bytes
    text: str
    vector: Vectors
    nearest: Nearest | None
    served: bool


class SemanticCache:
    """Questions of the answers in an :class:`AnswerCache`. For one event loop."""

    def __init__(
        self,
        answers: AnswerCache,
        embedder: Embedder,
        settings: SemanticSettings,
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        """Raises ConfigError if usearch is not installed."""
        try:
            from usearch.index import Index
        except ImportError:
            raise ConfigError("cache.semantic needs usearch: pip install 'headrace[gateway]'") from None
        self.settings = settings
        self._index_class = Index
        self._answers = answers
        self._embedder = embedder
        self._metrics = metrics
        self._log = log
        self._indices: OrderedDict[bytes, Index] = OrderedDict()
        self._loading: dict[bytes, asyncio.Task[Index]] = {}
        self._populations: OrderedDict[str, tuple[int | None, Population]] = OrderedDict()
        self._learning: set[asyncio.Task[None]] = set()
        self._kept = 0
        self._random = random.Random()

    def wants(self, context: RequestContext, wish: str) -> bool:
        """Whether the request may be answered by meaning: a chat that ends in one text, for one answer."""
        asked = wish == "semantic" or (self.settings.by_default and wish in ("", "on"))
        if not asked or context.part or context.route != "chat/completions" or context.choices != 1:
            return False
        last = context.body["messages"][-1]
        if not isinstance(last, dict) or last.get("role") != "user" or last.keys() - {"role", "content"}:
            return False
        text = last.get("content")
        return (
            isinstance(text, str)
            and len(text.strip()) > 0
            and len(text.encode()) <= _LONGEST
            and not any(context.body.get(name) for name in _ONE_ANSWER_ONLY)
        )

    async def look_up(self, context: RequestContext, version: object) -> Question | None:
        """The question, and whether it is served; None if it could not be embedded in time, or anything
        else failed.
        """
        try:
            return await self._look_up(context, version)
        except Exception as error:  # no request fails on account of a cache
            self._log.warning("semantic cache failed", request_id=context.id, exc_info=error)
            self._count("failed")
            return None

    async def _look_up(self, context: RequestContext, version: object) -> Question | None:
        text = context.body["messages"][-1]["content"]
        vectors = await self._embedder.embed([text], context.tenant)
        if vectors is None:
            self._count("no embedding")
            return None
        scope = _scope(context, version, self._embedder.model, vectors.shape[1])
        nearest = await self._nearest(context.tenant, scope, text, vectors[0])
        served = nearest is not None and nearest.safe and self._random.random() >= self.settings.explore
        if nearest is not None:
            self._count("served" if served else "explored" if nearest.safe else "unsure")
        return Question(context.tenant, scope, text, vectors[0], nearest, served)

    def learn(self, question: Question, fingerprint: bytes, answer: dict[str, Any]) -> None:
        """The upstream has answered the question, and the answer is kept as ``fingerprint``. Never waits."""
        if replay.text_of(answer) is None or len(self._learning) >= _MOST_LEARNING:
            return
        task = asyncio.create_task(self._learn(question, fingerprint, answer))
        self._learning.add(task)
        self._metrics.semantic_learning.inc()
        task.add_done_callback(self._learned)

    async def aclose(self) -> None:
        """End what is under way."""
        tasks = [*self._learning, *self._loading.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _nearest(self, tenant: str, scope: bytes, text: str, vector: Vectors) -> Nearest | None:
        index = await self._index(scope, len(vector))
        if index is None or not len(index):
            self._count("no neighbour")
            return None
        population = self._population(tenant)
        own = verifier.read(text)
        best: tuple[float, Nearest] | None = None
        refused = ""
        for number, similarity in _search(index, vector):
            if similarity < _LEAST:
                break
            kept = self._question(number)
            if kept is None:
                index.remove(number)
                continue
            fingerprint, kept_text = kept
            other = verifier.read(kept_text)
            if (why := verifier.refusal(other, own)) is not None:
                refused = refused or why
                continue
            answer = self._answers.get(fingerprint)
            if answer is None:
                self._answers.drop(fingerprint)
                index.remove(number)
                continue
            key, loose = _key(scope, kept_text), verifier.loose(other, own)
            right = population.probability(key, loose, similarity)
            if best is None or right > best[0]:
                safe = right >= 1 - self.settings.max_false_hit_rate
                best = (right, Nearest(key, kept_text, answer, similarity, loose, safe))
        if best is None:
            self._count(f"refused: {refused}" if refused else "no neighbour")
            return None
        return best[1]

    async def _learn(self, question: Question, fingerprint: bytes, answer: dict[str, Any]) -> None:
        nearest, agrees = question.nearest, None
        with contextlib.suppress(sqlite3.Error):
            if nearest is not None:
                agrees = await self._agree(question, nearest, answer)
                if agrees is not None:
                    self._observe(question.tenant, nearest, agrees)
            if nearest is None or not (nearest.safe and agrees):  # else one stands for it already
                self._keep(question, fingerprint)

    def _learned(self, task: asyncio.Task[None]) -> None:
        self._learning.discard(task)
        self._metrics.semantic_learning.dec()

    def _observe(self, tenant: str, nearest: Nearest, right: bool) -> None:
        seen = Observation(nearest.key, nearest.loose, nearest.similarity, right)
        population = self._population(tenant)
        population.observe(seen)
        db = self._answers.db
        done = db.execute(
            "INSERT INTO observations (tenant, question, loose, similarity, right) VALUES (?, ?, ?, ?, ?)",
            (tenant, seen.key, seen.loose, seen.similarity, seen.right),
        )
        self._populations[tenant] = (done.lastrowid, population)
        db.execute("DELETE FROM observations WHERE id <= ?", ((done.lastrowid or 0) - _OBSERVATIONS,))
        self._metrics.semantic_checks.labels(
            "safe" if nearest.safe else "unsure", "right" if right else "wrong"
        ).inc()

    async def _agree(self, question: Question, nearest: Nearest, answer: dict[str, Any]) -> bool | None:
        """Whether the kept answer says what the new one says; None if that could not be found out."""
        kept, new = replay.text_of(replay.whole(nearest.answer)), replay.text_of(answer)
        if kept is None or new is None:
            return None
        agrees = verifier.agreement(*map(verifier.read, (kept, new, nearest.text, question.text)))
        if agrees is None:
            vectors = await self._embedder.embed(
                [_start(kept), _start(new)], question.tenant, timeout_s=_LEARN_S
            )
            agrees = None if vectors is None else bool(vectors[0] @ vectors[1] >= _AGREE)
        return agrees

    def _keep(self, question: Question, fingerprint: bytes) -> None:
        stored = question.vector.astype("<f2").tobytes()
        done = self._answers.db.execute(
            "INSERT OR IGNORE INTO questions (fingerprint, scope, text, vector) VALUES (?, ?, ?, ?)",
            (fingerprint, question.scope, question.text, stored),
        )
        if done.rowcount and done.lastrowid is not None:
            if question.scope in self._loading:  # it may have been read without this one
                self._loading.pop(question.scope)
            elif (index := self._indices.get(question.scope)) is not None:
                index.add(done.lastrowid, question.vector, threads=1)
        self._kept += 1
        if self._kept % min(_TIDY_EVERY, self.settings.max_entries) == 0:
            self._tidy()

    def _tidy(self) -> None:
        """Keep within ``max_entries``; build indices anew that hold many questions which are gone."""
        db, most = self._answers.db, self.settings.max_entries
        [count] = db.execute("SELECT COUNT(*) FROM questions").fetchone()
        if count > most:
            db.execute(
                "DELETE FROM questions WHERE id IN "
                "(SELECT id FROM questions JOIN answers USING (fingerprint) ORDER BY used_at LIMIT ?)",
                (count - most + most // 10,),
            )
        if count > most or sum(map(len, self._indices.values())) > count + _TIDY_EVERY:
            self._indices.clear()

    def _question(self, number: int) -> tuple[bytes, str] | None:
        query = "SELECT fingerprint, text FROM questions WHERE id = ?"
        row = self._answers.db.execute(query, (number,)).fetchone()
        return None if row is None else (bytes(row[0]), row[1])

    async def _index(self, scope: bytes, dimensions: int) -> Index | None:
        """The scope's questions by their vectors; None if there are none, or they are not here in time."""
        index = self._indices.get(scope)
        if index is not None:
            self._indices.move_to_end(scope)
            return index
        task = self._loading.get(scope)
        if task is None:
            query = "SELECT 1 FROM questions WHERE scope = ? LIMIT 1"
            if self._answers.db.execute(query, (scope,)).fetchone() is None:
                return None
            loading = asyncio.to_thread(self._load, scope, dimensions)
            task = self._loading[scope] = asyncio.create_task(loading)
            task.add_done_callback(lambda task: self._loaded(scope, task))
        await asyncio.wait({task}, timeout=self._embedder.timeout_s)
        return task.result() if task.done() and not task.cancelled() and task.exception() is None else None

    def _loaded(self, scope: bytes, task: asyncio.Task[Index]) -> None:
        current = self._loading.get(scope) is task
        if current:
            del self._loading[scope]
        if task.cancelled() or task.exception() is not None or not current:
            return
        self._indices[scope] = task.result()
        while len(self._indices) > _SCOPES:
            self._indices.popitem(last=False)

    def _load(self, scope: bytes, dimensions: int) -> Index:
        db = connect(self._answers.path)
        try:
            rows = db.execute("SELECT id, vector FROM questions WHERE scope = ?", (scope,)).fetchall()
        finally:
            db.close()
        rows = [(number, raw) for number, raw in rows if len(raw) == 2 * dimensions]
        index = self._index_class(ndim=dimensions, metric="cos", dtype="f16")
        if rows:
            vectors = np.frombuffer(b"".join(raw for _, raw in rows), "<f2").reshape(len(rows), dimensions)
            numbers = np.array([number for number, _ in rows], dtype=np.uint64)
            index.add(numbers, vectors.astype(np.float32), threads=1)
        return index

    def _population(self, tenant: str) -> Population:
        """What was learned of a tenant's questions; read again if another process changed it."""
        db = self._answers.db
        [last] = db.execute("SELECT MAX(id) FROM observations WHERE tenant = ?", (tenant,)).fetchone()
        known = self._populations.get(tenant)
        if known is None or known[0] != last:
            query = "SELECT question, loose, similarity, right FROM observations WHERE tenant = ? ORDER BY id"
            seen = [
                Observation(bytes(key), bool(loose), similarity, bool(right))
                for key, loose, similarity, right in db.execute(query, (tenant,))
            ]
            known = self._populations[tenant] = (last, Population(seen))
            while len(self._populations) > _TENANTS:
                self._populations.popitem(last=False)
        self._populations.move_to_end(tenant)
        return known[1]

    def _count(self, result: str) -> None:
        self._metrics.semantic.labels(result).inc()


def _search(index: Index, vector: Vectors) -> list[tuple[int, float]]:
    """Ids and cosines of the nearest, the nearest first."""
    found = index.search(vector, _NEAREST, exact=len(index) <= _EXACT_BELOW, threads=1)
    return [(int(number), 1.0 - float(far)) for number, far in zip(found.keys, found.distances, strict=True)]


def _scope(context: RequestContext, version: object, model: str, dimensions: int) -> bytes:
    """Of all that must be equal but for the last user's text; the embeddings' model as well."""
    body = context.body
    rest = {name: body[name] for name in body.keys() - {"model", "messages", "stream", "stream_options"}}
    parts = [context.tenant, context.model, version, body["messages"][:-1], rest, model, dimensions]
    return hashlib.blake2b(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS), digest_size=32).digest()


def _key(scope: bytes, text: str) -> bytes:
    """What is learned of a question belongs to its text: it outlives the answer."""
    return hashlib.blake2b(scope + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _start(text: str) -> str:
    return text.encode()[:_LONGEST].decode(errors="ignore")
