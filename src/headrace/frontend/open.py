"""Opening a model: its tokenizer and its engine side by side, and the frontend that joins them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.client import EngineClient
from headrace.errors import ConfigError
from headrace.frontend.frontend import Frontend
from headrace.frontend.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from headrace.engine.config import CacheConfig, CheckpointConfig, ModelConfig, SchedulerConfig
    from headrace.model.store import Progress


def open_frontend(
    model: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    process: bool = False,
    progress: Progress | None = None,
    checkpoint: CheckpointConfig | None = None,
) -> Frontend:
    """Find (or fetch) the model, load its tokenizer and its engine side by side, and join them.

    ``process``: the engine runs in a process of its own instead of a thread. ``checkpoint``: requests are
    kept there, and those of the last process are in the frontend's ``journal.saved``; an engine's process
    that dies is started again. Raises ModelNotFoundError, DownloadError, ModelFormatError, OutOfMemoryError
    or ConfigError, each with what would be right.
    """
    from headrace.model import store

    path = store.resolve(model.model, progress=progress)
    draft = None
    speculative = scheduler.speculative
    if speculative is not None and speculative.method == "draft_model":
        from headrace.engine.build import check_speculative_config

        check_speculative_config(speculative)
        draft = store.resolve(str(speculative.model), progress=progress)
        speculative = dataclasses.replace(speculative, model=str(draft))
        scheduler = dataclasses.replace(scheduler, speculative=speculative)
    began = time.monotonic()
    loading = _InBackground(lambda: _tokenizer_of(path, draft))
    open_client = partial(_open_client, path, model, cache, scheduler, process=process)
    client: EngineClient
    if process and checkpoint is not None:
        from headrace.engine.reviving_client import RevivingClient

        client = RevivingClient(open_client)
    else:
        client = open_client()
    try:
        if checkpoint is not None:
            from headrace.engine.journaled_client import journaled

            client = journaled(client, checkpoint, model)
        tokenizer = loading.result()
        from headrace.engine.memory import trim_memory

        trim_memory()  # reading a tokenizer takes twice what it keeps
        return Frontend(client, tokenizer, model.model, opened_at=began)
    except BaseException:
        client.close()
        raise


def _tokenizer_of(path: Path, draft: Path | None) -> Tokenizer:
    """The model's. Raises ConfigError if its draft model has other tokens."""
    tokenizer = load_tokenizer(path)
    if draft is not None and draft != path:
        difference = tokenizer.difference(load_tokenizer(draft))
        if difference is not None:
            raise ConfigError(
                f"The draft model {draft.name} has another vocabulary: {difference}. Take one with the same "
                "tokenizer, as smaller models of the same family have.",
                param="model",
            )
    return tokenizer


def _open_client(
    path: Path, model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig, *, process: bool
) -> EngineClient:
    if process:
        from headrace.engine.build import CheckpointSpec
        from headrace.engine.process_client import ProcessClient

        return ProcessClient(CheckpointSpec(path=str(path), model=model, cache=cache, scheduler=scheduler))
    from headrace.engine.build import build_engine
    from headrace.engine.thread_client import ThreadClient

    return ThreadClient(build_engine(path, model, cache, scheduler))


class _InBackground:
    """A call on a thread of its own (concurrent.futures takes longer to import than this to read)."""

    def __init__(self, call: Callable[[], Tokenizer]) -> None:
        self._call = call
        self._result: Tokenizer | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="headrace-tokenizer", daemon=True)
        self._thread.start()

    def result(self) -> Tokenizer:
        """Wait. Raises what the call raised."""
        self._thread.join()
        if self._result is None:
            assert self._error is not None
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
