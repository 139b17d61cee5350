"""One run over all workloads: engines stay loaded and take turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accuracy
from catalogue import REFERENCE, Variant
from child import Child, ChildError
from environments import Unavailable
from mixed import mixed_load
from models import LargeModels, Models, start
from results import Measured, Report, Round, Row, measured, value_of
from shares import Costs, costs_of, least_seconds, share
from workloads import COLD_START, MIXED, Workload, prompts

from headrace.backend.cpu.limits import Limits
from headrace.frontend.tokenizer import load_tokenizer
from headrace.model.weights import open_checkpoint

LOAD_TIMEOUT_S = 900.0
_WARM_UP = Workload("warm-up", "", 4, 64, 4, "output")


@dataclass(frozen=True, slots=True)
class Options:
    """``budget_s``: a variant repeats a workload until it has taken so long; 0 = always all rounds.

    ``timeout_s``: of one answer. ``complete``: every format in every workload.
    """

    threads: int
    rounds: int
    budget_s: float
    timeout_s: float
    complete: bool
    output: Path


class Session:
    """Fills ``report``; ``save`` is called whenever it has grown."""

    def __init__(
        self,
        variants: list[Variant],
        options: Options,
        report: Report,
        limits: Limits,
        save: Callable[[], None],
    ) -> None:
        self._options, self._report, self._limits, self._save = options, report, limits, save
        self._variants = variants
        self._rows = {
            variant.name: Row(
                engine=variant.peer.name,
                format=variant.form.name,
                bits=variant.form.bits,
                multiplies=variant.form.multiplies,
                made_from="as shipped"
                if variant.form.source == "shipped" and not variant.form.made
                else "dequantised",
            )
            for variant in variants
        }
        report.rows[:] = self._rows.values()
        self._children: dict[str, Child] = {}
        self._weights: dict[str, int] = {}
        self._out: set[str] = set()

    def close(self) -> None:
        """End every process."""
        for child in self._children.values():
            child.close()
        self._children.clear()

    def problem(self, variant: Variant, text: str) -> None:
        """Note why something is missing."""
        line = f"{variant.name}: {text}"
        self._report.problems.append(line)
        print(line, file=sys.stderr, flush=True)
        self._save()

    def settings(self, models: Models, tokens: int, sequences: int) -> dict[str, int]:
        """What an engine is loaded with."""
        longest = min(8192, open_checkpoint(models.shipped).architecture.max_positions)
        return {
            "threads": self._options.threads,
            "max_len": longest,
            "max_sequences": sequences,
            "kv_tokens": tokens,
        }

    def generated(self, workloads: list[Workload], models: Models) -> None:
        """Measure ``workloads``, interleaved: every round asks all engines one after the other."""
        architecture = open_checkpoint(models.shipped).architecture
        costs = costs_of(architecture)
        for workload in workloads:
            self._report.titles[workload.key] = workload.title
            taking = [variant for variant in self._variants if self._takes(variant, workload)]
            rounds: dict[str, list[Round]] = {variant.name: [] for variant in taking}
            failed: set[str] = set()
            for number in range(self._options.rounds):
                for variant in taking:
                    done = rounds[variant.name]
                    if variant.name in failed or self._spent(done):
                        continue
                    child = self._child(variant, models)
                    if child is None:
                        continue
                    try:
                        done.append(self._round(child, workload, architecture.vocab_size, number))
                        self._note(variant, workload, done, costs)
                    except ChildError as error:
                        failed.add(variant.name)
                        self.problem(variant, f"{workload.key}: {error}")
                    finally:
                        child.pause()

    def _spent(self, done: list[Round]) -> bool:
        """Whether these runs have taken long enough."""
        budget_s = self._options.budget_s
        return budget_s > 0 and sum(one.seconds + (one.primed_s or 0.0) for one in done) > budget_s

    def _note(self, variant: Variant, workload: Workload, done: list[Round], costs: Costs) -> None:
        """Put what is known after another run into the report."""
        found = measured(workload, done)
        found.weights_bytes = self._weights[variant.name]
        least = least_seconds(workload, costs, found.weights_bytes, variant.form.multiplies, self._limits)
        shares = [share(workload, one.seconds, one.first_s, least) for one in done]
        found.share = value_of(shares).median
        self._rows[variant.name].workloads[workload.key] = found
        print(f"{workload.key:4} {variant.name:22} {done[-1].seconds:8.2f} s", file=sys.stderr, flush=True)
        self._save()

    def _takes(self, variant: Variant, workload: Workload) -> bool:
        if workload.large:
            return variant.form.large
        if not variant.form.small:
            return False
        return self._options.complete or workload.all_forms or variant.form.leader

    def _round(self, child: Child, workload: Workload, vocab_size: int, number: int) -> Round:
        first = self._generate(child, prompts(workload, vocab_size, number), workload.output)
        if workload.measure != "seconds":
            return first
        primed = self._generate(child, prompts(workload, vocab_size, number, again=True), workload.output)
        return Round(seconds=first.seconds, first_s=first.first_s, primed_s=primed.seconds)

    def _generate(self, child: Child, asked: list[list[int]], output_tokens: int) -> Round:
        found = self._answer(child, asked, output_tokens)
        return Round(seconds=found["seconds"], first_s=found["first_s"])

    def _answer(self, child: Child, asked: list[list[int]], output_tokens: int) -> dict[str, Any]:
        found = child.ask(self._options.timeout_s, do="generate", prompts=asked, output_tokens=output_tokens)
        lengths = {len(tokens) for tokens in found["token_ids"]}
        if lengths != {output_tokens} or len(found["token_ids"]) != len(asked):
            raise ChildError(
                f"made {sorted(lengths)} tokens for {len(asked)} prompts, not {output_tokens} each"
            )
        return found

    def _log(self, variant: Variant) -> Path:
        return self._options.output / "logs" / f"{variant.name.replace(':', '-')}.log"

    def _child(self, variant: Variant, models: Models) -> Child | None:
        """The engine with its model loaded; None if it can't be, which is noted once."""
        name = variant.name
        child = self._children.get(name)
        if child is not None and child.alive:
            return child
        if name in self._out:
            return None
        try:
            path = models.of(variant)
            child = start(variant, self._options.threads, self._log(variant))
            self._children[name] = child
            began = time.perf_counter()
            loaded = child.ask(
                LOAD_TIMEOUT_S,
                do="load",
                model=str(path),
                format=variant.form.name,
                settings=self.settings(models, 20480, 32),
            )
            row = self._rows[name]
            row.version = loaded["version"]
            self._weights[name] = loaded["weights_bytes"]
            if not isinstance(models, LargeModels):
                row.weights_bytes = loaded["weights_bytes"]
                row.load_s = round(time.perf_counter() - began, 3)
            for count in (1, _WARM_UP.requests):
                self._answer(child, prompts(_WARM_UP, 256, count)[:count], _WARM_UP.output)
            if not row.greedy_ids and not isinstance(models, LargeModels):
                self._sanity(child, variant, models)
            return child
        except (ChildError, Unavailable) as error:
            self._out.add(name)
            self.problem(variant, str(error))
            if child is not None:
                child.close()
            self._children.pop(name, None)
            return None

    def _sanity(self, child: Child, variant: Variant, models: Models) -> None:
        """The greedy tokens and, where the engine tells them, log-probabilities."""
        tokenizer = load_tokenizer(models.shipped)
        row = self._rows[variant.name]
        found = self._answer(child, [tokenizer.encode(accuracy.OPENING)], accuracy.GREEDY_TOKENS)
        row.greedy_ids = found["token_ids"][0]
        row.greedy_text = tokenizer.decode(row.greedy_ids)
        path = self._options.output / "logs" / f"{variant.name.replace(':', '-')}.npy"
        with suppress(ChildError):  # it does not tell them: the table says so
            self._logprobs(child, tokenizer.encode(accuracy.TEXT), path)

    def _logprobs(self, child: Child, token_ids: list[int], path: Path) -> None:
        asked = {"token_ids": token_ids, "rows": min(accuracy.POSITIONS, len(token_ids)), "path": str(path)}
        child.ask(self._options.timeout_s, do="logprobs", **asked)

    def compared(self, models: Models) -> None:
        """Compare every engine's log-probabilities with those of float32 weights.

        Only if the engine that computes those is among the variants: it is not installed for this alone.
        """
        if not any(variant.peer is REFERENCE.peer for variant in self._variants):
            return
        logs = self._options.output / "logs"
        reference = logs / "reference.npy"
        child: Child | None = None
        try:
            child = start(REFERENCE, self._options.threads, self._log(REFERENCE))
            child.ask(
                LOAD_TIMEOUT_S,
                do="load",
                model=str(models.of(REFERENCE)),
                format=REFERENCE.form.name,
                settings=self.settings(models, 2048, 1),
            )
            self._logprobs(child, load_tokenizer(models.shipped).encode(accuracy.TEXT), reference)
            wanted = accuracy.load(reference)
            for name, row in self._rows.items():
                path = logs / f"{name.replace(':', '-')}.npy"
                if path.exists():
                    row.accuracy = accuracy.compare(wanted, accuracy.load(path))
        except (ChildError, Unavailable, ValueError) as error:
            self.problem(REFERENCE, f"accuracy: {error}")
        finally:
            if child is not None:
                child.close()
        self._save()

    def cold_starts(self, models: Models) -> None:
        """From the start of a process to its first token, and the most memory until then."""
        self._report.titles[COLD_START] = "cold start to the first token, files in the page cache"
        taken: dict[str, list[tuple[float, int]]] = {}
        for _ in range(self._options.rounds):
            for variant in self._variants:
                if variant.name in self._out or not variant.form.small:
                    continue
                done = taken.setdefault(variant.name, [])
                if self._spent([Round(seconds=seconds) for seconds, _ in done]):
                    continue
                try:
                    done.append(self._cold_start(variant, models))
                except (ChildError, Unavailable) as error:
                    self._out.add(variant.name)
                    self.problem(variant, f"{COLD_START}: {error}")
                    continue
                values = {
                    "first token, s": value_of([seconds for seconds, _ in done]),
                    "peak memory, MB": value_of([size / 1e6 for _, size in done]),
                }
                rounds = [Round(seconds=seconds) for seconds, _ in done]
                self._rows[variant.name].workloads[COLD_START] = Measured(rounds=rounds, values=values)
                print(f"D    {variant.name:22} {done[-1][0]:8.2f} s", file=sys.stderr, flush=True)
                self._save()

    def _cold_start(self, variant: Variant, models: Models) -> tuple[float, int]:
        path = models.of(variant)
        child = start(variant, self._options.threads, self._log(variant))
        try:
            child.ask(
                LOAD_TIMEOUT_S,
                do="load",
                model=str(path),
                format=variant.form.name,
                settings=self.settings(models, 2048, 1),
            )
            self._answer(child, [list(range(300, 316))], 1)
            return time.perf_counter() - child.began, child.peak_bytes()
        finally:
            child.close()

    def mixed_loads(self, models: Models, rate: float, duration_s: float) -> None:
        """Every engine with a server, with its leading formats, one after the other."""
        for variant in self._variants:
            takes = variant.form.small and (self._options.complete or variant.form.leader)
            if not variant.peer.server or not takes or variant.name in self._out:
                continue
            try:
                settings = self.settings(models, 20480, 32)
                found = mixed_load(variant, models, settings, rate, duration_s, self._log(variant))
            except (ChildError, Unavailable) as error:
                self.problem(variant, f"{MIXED}: {error}")
                continue
            self._rows[variant.name].workloads[MIXED] = found
            print(f"H    {variant.name}", file=sys.stderr, flush=True)
            self._save()
