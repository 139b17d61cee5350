"""Journal: what requests were asked and have had, written to disk beside the engine, never on its thread."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import msgspec

from headrace.engine.config import CheckpointConfig
from headrace.engine.journal_file import FolderLock, JournalFile, read_records
from headrace.engine.request import EngineOutput, EngineRequest
from headrace.engine.saved import (
    GIVEN_UP,
    MAX_DEATHS,
    Admitted,
    Closed,
    Dropped,
    Heard,
    Identity,
    Record,
    SavedRequest,
    SavedRequests,
)
from headrace.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)

_SYNC_EVERY_S = 1.0  # a killed process loses nothing that was written; only a power cut can
_RETRY_S = 5.0  # after the disk has refused
_LEAST_REWRITE = 4 * 2**20  # bytes of a file that are worth being written anew
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class JournalStats(msgspec.Struct, frozen=True):
    """``num_requests``: under way or complete and kept. ``broken``: the disk refuses; it is tried again."""

    num_requests: int
    size_bytes: int
    broken: bool


class _Sync:
    """Somebody waits for the disk to have everything."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: str | None = None


class Journal:
    """The requests of one process, in a folder that it has for itself.

    ``saved``: what the last process left there, in the order of arrival: whoever opened the journal decides
    what goes on. All methods are thread-safe and none but :meth:`sync` and :meth:`close` waits for the disk:
    a thread writes, every ``interval_s`` seconds, and at once where a request arrives or is dropped. When the
    disk refuses, serving goes on: it is logged once, counted in :meth:`stats`, and what is kept is written
    anew as soon as that is possible.
    """

    def __init__(self, config: CheckpointConfig, identity: Identity) -> None:
        """Raises ConfigError if the folder cannot be used, or holds unfinished requests of another model."""
        folder = Path(config.path)
        self._config = config
        self._identity = identity
        self._lock = FolderLock(folder)
        self._file = JournalFile(folder)
        self._inbox: deque[Record | list[EngineOutput] | _Sync] = deque()  # append and popleft are atomic
        self._wake, self._urgent = threading.Event(), threading.Event()
        self._encode = msgspec.msgpack.Encoder().encode
        self._broken: str | None = None
        self._retry_at = 0.0
        self._closed = False
        self._wrote = False  # something that the disk may not hold yet
        self._size_bytes = 0  # of all requests' records
        self._complete: dict[str, None] = {}  # requests, in the order in which they ended
        self._synced_at = time.monotonic()
        try:
            self._requests = _load(folder, identity)
            self._complete = {name: None for name, saved in self._requests.items() if saved.ended}
            self._rewritten = 0  # bytes of the file when it was last written anew
            self._rewrite()
        except OSError as error:
            if error.errno not in _FULL:
                self._lock.release()
                raise ConfigError(
                    f"checkpoint_path {config.path!r} cannot be written: {error.strerror or error}.",
                    param="checkpoint_path",
                ) from None
            self._set_broken(error)
        except BaseException:
            self._lock.release()
            raise
        self.saved = [saved.copy() for saved in self._requests.values()]
        self._thread = threading.Thread(target=self._run, name="headrace-journal", daemon=True)
        self._thread.start()

    @property
    def grace_s(self) -> float:
        """How long whoever asked is waited for."""
        return self._config.grace_s

    def admit(self, request: EngineRequest) -> None:
        """A request, with its seed, is being submitted."""
        self._post(Admitted(request, time.time()), urgent=True)

    def hear(self, outputs: list[EngineOutput]) -> None:
        """News of a request's choices."""
        self._post(outputs)

    def drop(self, request_id: str) -> None:
        """Keep nothing more of a request. Unknown ones are ignored."""
        self._post(Dropped(request_id), urgent=True)

    def sync(self) -> None:
        """Wait until the disk has everything. Raises CheckpointError if it refuses."""
        if not self._thread.is_alive():
            raise CheckpointError("The journal is closed.")
        waiting = _Sync()
        self._post(waiting, urgent=True)
        while not waiting.done.wait(0.5):
            if not self._thread.is_alive():
                raise CheckpointError("The journal is closed.")
        if waiting.error is not None:
            raise CheckpointError(f"The journal cannot be written: {waiting.error}.")

    def stats(self) -> JournalStats:
        """A snapshot."""
        return JournalStats(len(self._requests), self._file.size_bytes, self._broken is not None)

    def close(self, *, clean: bool = True) -> None:
        """Write what is left and leave the folder; unfinished requests stay. Closing twice is fine.

        Not ``clean``: the engine has died, and one of them may be why.
        """
        self._post(Closed(clean), urgent=True)
        self._closed = True
        self._thread.join()

    def _post(self, item: Record | list[EngineOutput] | _Sync, *, urgent: bool = False) -> None:
        if self._closed:
            return
        self._inbox.append(item)
        if not self._wake.is_set():  # asking is much cheaper than setting
            self._wake.set()
        if urgent:
            self._urgent.set()

    # The writer's thread

    def _run(self) -> None:
        try:
            while not self._turn():
                pass
        except BaseException as error:  # whatever it is, serving goes on
            _log.critical("The journal's writer died.", exc_info=error)
            self._broken = f"{type(error).__name__}: {error}"
            self._closed = True
            self._inbox.clear()
        finally:
            self._file.close()
            self._lock.release()

    def _turn(self) -> bool:
        """Wait for news and write it; True once the journal is closed."""
        self._wake.wait(None if not self._requests and self._broken is None else _SYNC_EVERY_S)
        if self._inbox:
            self._urgent.wait(self._config.interval_s)
        self._wake.clear()
        self._urgent.clear()  # before the inbox is read: what comes later sets them again
        records: list[Record] = []
        heard: dict[tuple[str, int], None] = {}  # choices that have had something
        now = time.time()
        waiting: list[_Sync] = []
        closed = False
        while self._inbox and not closed:
            item = self._inbox.popleft()
            if isinstance(item, list):
                for output in item:
                    if self._hear(output, now):
                        heard[output.request_id, output.choice] = None
            elif isinstance(item, _Sync):
                waiting.append(item)
            else:
                if not isinstance(item, Dropped):
                    self._requests.apply(item)
                elif not self._drop(item.request_id):
                    continue
                closed = isinstance(item, Closed)
                records.append(item)
        for name, choice in heard:
            if (saved := self._requests.get(name)) is not None and choice in saved.outputs:
                records.append(Heard(saved.unwritten(choice), now))
        records += self._forget(now)
        self._write(records, sync=bool(waiting) or closed)
        for each in waiting:
            each.error = self._broken
            each.done.set()
        return closed

    def _hear(self, output: EngineOutput, now: float) -> bool:
        """Whether it is news of a request that is kept."""
        saved = self._requests.get(output.request_id)
        if saved is None or not saved.take(output, now):
            return False
        if saved.ended is not None:
            self._complete[output.request_id] = None
        return True

    def _forget(self, now: float) -> list[Record]:
        """Complete answers that nobody has come for in time, or for which there is no room."""
        dropped: list[Record] = []
        while self._complete:
            name = next(iter(self._complete))
            saved = self._requests[name]
            in_time = (saved.ended or 0.0) + self._config.grace_s > now
            if in_time and self._size_bytes <= self._config.max_bytes:
                break
            self._drop(name)
            dropped.append(Dropped(name))
        return dropped

    def _drop(self, name: str) -> bool:
        """Whether there was such a request."""
        saved = self._requests.pop(name, None)
        if saved is not None:
            self._size_bytes -= saved.size_bytes
            self._complete.pop(name, None)
        return saved is not None

    def _write(self, records: list[Record], *, sync: bool) -> None:
        now = time.monotonic()
        try:
            if self._broken is not None:
                if now < self._retry_at and not sync:
                    return
                self._rewrite()
                self._file.append(self._encode(record) for record in records if isinstance(record, Closed))
                self._broken = None
                _log.warning("The journal is written again.")
                return
            if records:
                self._file.append(self._payloads(records))
                self._wrote = True
            if sync or (now - self._synced_at >= _SYNC_EVERY_S and self._wrote):
                self._file.sync()
                self._synced_at, self._wrote = now, False
            if self._file.size_bytes > max(2 * self._rewritten, self._rewritten + _LEAST_REWRITE):
                self._rewrite()
        except OSError as error:
            self._set_broken(error)

    def _payloads(self, records: Iterable[Record]) -> Iterator[bytes]:
        """The records' bytes, counted towards their requests."""
        for record in records:
            name = None
            if isinstance(record, Admitted):
                name = record.request.request_id
            elif isinstance(record, Heard):
                name = record.output.request_id
            try:
                payload = self._encode(record)
            except (TypeError, ValueError, OverflowError) as error:
                _log.warning("The request %s cannot be kept in the journal: %s", name, error)
                self._drop(name or "")
                continue
            if name is not None and (saved := self._requests.get(name)) is not None:
                saved.size_bytes += len(payload)
                self._size_bytes += len(payload)
            yield payload

    def _rewrite(self) -> None:
        """What is kept, and nothing else."""
        self._size_bytes = 0
        for saved in self._requests.values():
            saved.size_bytes = 0
        kept = [record for saved in self._requests.values() for record in saved.records()]
        self._file.rewrite(chain([self._encode(self._identity)], self._payloads(kept)))
        self._rewritten, self._wrote = self._file.size_bytes, False
        self._synced_at = time.monotonic()

    def _set_broken(self, error: OSError) -> None:
        if self._broken is None:
            _log.error(
                "The journal %s cannot be written (%s): serving goes on, requests cannot be resumed.",
                self._file.path,
                error.strerror or error,
            )
        self._broken = error.strerror or str(error)
        self._retry_at = time.monotonic() + _RETRY_S


def _load(folder: Path, identity: Identity) -> SavedRequests:
    """What the last process left, as it is to go on in this one. Raises ConfigError."""
    found = SavedRequests()
    before: Identity | None = None
    closed = False
    decode = msgspec.msgpack.Decoder(Record).decode
    for payload in read_records(folder):
        try:
            record = decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            _log.error("The journal in %s has a record that cannot be read: %s", folder, error)
            break
        closed = isinstance(record, Closed) and record.clean
        if isinstance(record, Identity):
            before = record
        found.apply(record)
    same = before is not None and before.fingerprint == identity.fingerprint
    if found and before is not None and not same:
        if (before.model, before.vocab_size) != (identity.model, identity.vocab_size):
            raise ConfigError(
                f"checkpoint_path {str(folder)!r} holds {len(found)} requests to the model {before.model!r}, "
                f"which {identity.model!r} cannot go on with: serve that model, or empty the folder.",
                param="checkpoint_path",
            )
        _log.warning(
            "The requests in %s are of the fingerprint %s, this is %s: they go on as well as they can.",
            folder,
            before.fingerprint,
            identity.fingerprint,
        )
    now = time.time()
    for saved in found.values():
        saved.exact = saved.exact and ((same and identity.exact) or saved.ended is not None)
        if saved.ended is not None:
            saved.ended = now  # while there was no server nobody could come for it
        else:
            _count_death(saved, closed, now)
    return found


def _count_death(saved: SavedRequest, closed: bool, now: float) -> None:
    tokens = saved.num_tokens
    if tokens > saved.known:
        saved.deaths = 0
    elif not closed:
        saved.deaths += 1
    saved.known = tokens
    if saved.deaths >= MAX_DEATHS:
        for choice in saved.open_choices:
            end = EngineOutput(
                request_id=saved.request.request_id,
                choice=choice,
                finish_reason="error",
                error_kind="GenerationError",
                error_message=GIVEN_UP,
            )
            saved.take(end, now)
