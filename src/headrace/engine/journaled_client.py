"""JournaledClient: an engine whose requests another process can go on with."""

from __future__ import annotations

import random
import threading
import time

import msgspec

from headrace.engine.client import EngineClient, OutputSink
from headrace.engine.config import CheckpointConfig, ModelConfig
from headrace.engine.grammar import GrammarCompiler
from headrace.engine.journal import Journal
from headrace.engine.request import EngineOutput, EngineRequest, EngineStats, refusal
from headrace.engine.saved import Identity, SavedRequest
from headrace.errors import ConfigError, EngineDeadError, HeadraceError

_DEAD = EngineDeadError.__name__


def journaled(client: EngineClient, checkpoint: CheckpointConfig, model: ModelConfig) -> JournaledClient:
    """``client``, its requests kept where ``checkpoint`` says. Raises ConfigError."""
    from headrace.engine.build import check_checkpoint_config  # all that builds engines

    check_checkpoint_config(checkpoint)
    if client.architecture.encoder is not None:
        raise ConfigError(
            "checkpoint_path: this model embeds texts, which leaves nothing to go on with; leave it out.",
            param="checkpoint_path",
        )
    capabilities = client.capabilities
    identity = Identity(
        capabilities.fingerprint, model.model, client.architecture.vocab_size, capabilities.batch_invariant
    )
    return JournaledClient(client, Journal(checkpoint, identity), seed=model.seed)


class JournaledClient:
    """An EngineClient over another one: requests that have a note are kept in ``journal``, with it.

    A kept request stays until it is aborted, or ``journal.drop`` says that whoever asked has the answer, or
    nobody has come for a complete answer in time. What ends with the engine has not ended: it goes on in the
    next process. ``seed`` is the engine's: requests get their seeds here, so that they can be kept.
    """

    def __init__(self, client: EngineClient, journal: Journal, *, seed: int | None = None) -> None:
        self.architecture = client.architecture
        self.capabilities = client.capabilities
        self.max_model_len = client.max_model_len
        self.journal = journal
        self._client = client
        self._ended = False  # what the owners of requests do from then on says nothing about them
        self._died = False
        self._seed_lock = threading.Lock()
        self._seeds = random.Random(seed)

    def use_grammars(self, compiler: GrammarCompiler) -> None:
        """See EngineClient.use_grammars."""
        self._client.use_grammars(compiler)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """See EngineClient.submit."""
        with self._seed_lock:
            seed = self._seeds.getrandbits(64)  # for each request, as the engine does
        if request.params.seed is None:
            request = msgspec.structs.replace(
                request, params=msgspec.structs.replace(request.params, seed=seed)
            )
        if not request.note:
            self._client.submit(request, sink)
            return
        kept = _Kept(self, sink)
        self._client.submit(msgspec.structs.replace(request, note=b""), kept.receive)
        kept.admit(request)

    def resume(self, saved: SavedRequest, sink: OutputSink, choices: list[int]) -> None:
        """Go on with a request of the last process; ``choices``: those that have not ended, at least one.

        The sink gets what comes now, as after :meth:`submit`; if the engine refuses, each choice's end says
        why. What was computed for it is computed again, as after a preemption. Its time has run meanwhile.
        """
        asked = saved.request
        said: list[list[int] | None] = [None] * asked.params.n
        for choice in choices:
            before = asked.output_token_ids[choice] if asked.output_token_ids else None
            since = saved.outputs[choice].token_ids if choice in saved.outputs else []
            said[choice] = [*(before or ()), *since]
        request = msgspec.structs.replace(
            asked,
            note=b"",
            restarted=True,
            output_token_ids=said,
            arrival_time=time.monotonic() - max(0.0, time.time() - saved.admitted),
        )
        kept = _Kept(self, sink)
        kept.admit(None)
        try:
            self._client.submit(request, kept.receive)
        except HeadraceError as error:
            kept.receive(refusal(request, error))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """See EngineClient.abort. One that is aborted as a whole does not go on after a restart either."""
        if not self._ended:
            if choice is None:
                self.journal.drop(request_id)
            else:
                self.journal.hear([EngineOutput(request_id=request_id, choice=choice, finish_reason="abort")])
        self._client.abort(request_id, choice)

    def suspend(self, request_id: str) -> None:
        """End a request in this process alone: if it is kept, the next one goes on with it."""
        self._client.abort(request_id)

    def stats(self) -> EngineStats:
        """See EngineClient.stats."""
        return self._client.stats()

    def close(self, timeout_s: float = 5.0) -> None:
        """See EngineClient.close. What the journal has under way goes on in the next process."""
        self._ended = True
        self._client.close(timeout_s)
        self.journal.close(clean=not self._died)

    def note_death(self) -> None:
        """The engine has died: whoever aborts a request now only tidies up."""
        self._ended = self._died = True


class _Kept:
    """The sink of a request that is kept: tells the journal first."""

    __slots__ = ("_client", "_early", "_journal", "_lock", "_sink")

    def __init__(self, client: JournaledClient, sink: OutputSink) -> None:
        self._client = client
        self._journal = client.journal
        self._sink = sink
        self._lock = threading.Lock()
        self._early: list[EngineOutput] | None = []  # heard before the request was known to be good

    def admit(self, request: EngineRequest | None) -> None:
        """The engine has accepted it; None: the journal has it already."""
        with self._lock:
            early, self._early = self._early, None
            if request is not None:
                self._journal.admit(request)
            if early:
                self._journal.hear(early)

    def receive(self, outputs: list[EngineOutput]) -> None:
        """News: on the engine's thread."""
        kept = outputs
        if any(output.finish_reason is not None for output in outputs):
            kept = [output for output in outputs if not _is_end_of_engine(output)]
        if len(kept) < len(outputs) and any(output.error_kind == _DEAD for output in outputs):
            self._client.note_death()
        with self._lock:
            if self._early is not None:
                self._early += kept
            elif kept:
                self._journal.hear(kept)
        self._sink(outputs)


def _is_end_of_engine(output: EngineOutput) -> bool:
    """Whether the sequence ended because somebody ended it, or the engine: its tokens are no end of it."""
    return output.finish_reason == "abort" or output.error_kind == _DEAD
