"""The load: the network first, then one user with prompts of several lengths, then more and more users."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from headrace.lab.bench import process_watch
from headrace.lab.bench.endpoint import Endpoint, EndpointError, base_url
from headrace.lab.bench.lengths import Lengths
from headrace.lab.bench.metrics import StageResult
from headrace.lab.bench.run import Target, ctrl_c, open_http, probe_target
from headrace.lab.bench.session import Plan, Session, View
from headrace.lab.bench.synthetic import Calibration, Synthetic, calibrate
from headrace.lab.bench.workload import Listed, Workload
from headrace.lab.diagnose.measurements import Hardware, Level, Measurements, gentle, level
from headrace.lab.diagnose.network import Pinger, measure_network

if TYPE_CHECKING:
    import aiohttp

_METRICS_EVERY_S = 0.25  # oftener in short runs
_LEAST_LIMIT_S = 4.0  # of a stage, however short the whole is to be
_GENTLE_SHARE = 0.3  # of the time; the rest is for the hard load
_GENTLE_ANSWER = 8
_LEAST_GAIN = 0.05  # of throughput, that more users must bring
_LONG_RUN_S = 60.0  # from here on: longer prompts, and a finer ladder of users
_MOST_USERS = 128
_MOST_LEVEL_S = 12.0


class Asked(msgspec.Struct, kw_only=True, frozen=True):
    """``seconds`` is the time for everything. ``output_tokens`` None: as the time allows, up to 64."""

    seconds: float = 120.0
    prompt_tokens: int = 128
    output_tokens: int | None = None
    seed: int = 0


class Served(msgspec.Struct, kw_only=True, frozen=True):
    """What is known of a MODEL served for the purpose: the server's options, its file, the machine."""

    options: str = ""
    narrow_weights: bool | None = None
    hardware: Hardware | None = None


async def measure(
    target: Target,
    asked: Asked,
    view: View,
    *,
    served: Served | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> Measurements:
    """Load ``target`` gently, then hard. Ctrl-C ends it early with what there is.

    Raises HeadraceError if the endpoint can't be loaded at all, or answers nothing in the whole time.
    """
    async with open_http(target) as http:
        endpoint = await probe_target(http, target)
        pid = target.server_pid or _local_pid(target.address)
        found = Measurements(
            target=target.name,
            model=endpoint.model,
            route=endpoint.route,
            owner=endpoint.owner,
            serve=served.options if served is not None else "",
            is_model=served is not None,
            narrow_weights=served.narrow_weights if served is not None else None,
            hardware=served.hardware if served is not None else None,
            local=pid is not None,
            streaming=endpoint.streaming,
            usage=endpoint.usage,
            fixed_length=endpoint.fixed_length,
            max_model_len=endpoint.max_model_len,
            first_answer_ms=_ms(endpoint.first_answer_s),
            network=await measure_network(http, endpoint),
        )
        run = _Run(http, endpoint, await calibrate(http, endpoint), asked, view, pid, count_tokens, found)
        with ctrl_c(run.interrupt):
            await run.gently()
            await run.hard()
    if not found.gentle and not any(lv.completed for lv in found.levels):
        why = found.notes[-1] if found.notes else "nothing was answered in the time that there was"
        raise EndpointError(f"{endpoint.url} can't be diagnosed: {why}")
    found.seconds = round(time.perf_counter() - run.began, 3)
    return found


class _Run:
    def __init__(
        self,
        http: aiohttp.ClientSession,
        endpoint: Endpoint,
        calibration: Calibration,
        asked: Asked,
        view: View,
        pid: int | None,
        count_tokens: Callable[[str], int] | None,
        found: Measurements,
    ) -> None:
        self.began = time.perf_counter()
        self._http = http
        self._endpoint = endpoint
        self._calibration = calibration
        self._asked = asked
        self._view = view
        self._pid = pid
        self._count_tokens = count_tokens
        self._found = found
        self._session: Session | None = None
        self._stages = 0

    def interrupt(self) -> None:
        """End now, with what was measured so far."""
        self._found.interrupted = True
        if self._session is not None:
            self._session.interrupt()

    def _left_s(self, until_s: float) -> float:
        return self.began + until_s - time.perf_counter()

    async def gently(self) -> None:
        """One user: short, middling and long prompts, then a long one that a prefix cache knows."""
        until_s = self._asked.seconds * _GENTLE_SHARE
        lengths = self._lengths()
        for number, tokens in enumerate(lengths):
            await self._one_user(tokens, self._left_s(until_s) / (len(lengths) + 1 - number))
        await self._one_user(lengths[-1], self._left_s(until_s), repeated=True)

    def _lengths(self) -> list[int]:
        longest = 1024 if self._asked.seconds >= _LONG_RUN_S else 256
        if self._endpoint.max_model_len is not None:
            longest = min(longest, max(self._endpoint.max_model_len - 2 * _GENTLE_ANSWER, 16))
        return sorted({16, min(self._asked.prompt_tokens, longest), longest})

    async def _one_user(self, tokens: int, seconds: float, *, repeated: bool = False) -> None:
        """Two to eight requests, as many as fit into ``seconds``, by what shorter ones took."""
        known = [(g.e2e_ms, g.prompt_tokens) for g in self._found.gentle if g.e2e_ms and g.prompt_tokens]
        took_ms = max((e2e * max(tokens / prompt, 1.0) for e2e, prompt in known), default=0.0)
        fit = int(seconds * 1000 / took_ms) if took_ms else 3
        if self._found.interrupted or (fit < 2 and repeated):
            return
        workload: Workload = self._synthetic(tokens, _GENTLE_ANSWER)
        plan = Plan(kind="closed", levels=(1,), duration_s=None, requests=min(max(fit, 2), 8), warmup_s=0.0)
        if repeated:
            workload = Listed("repeated", workload.conversation(0, 0))
        stage = await self._stage(workload, plan, max(seconds, 1.0) + self._asked.seconds / 4)
        if stage is None and not self._found.interrupted:
            self._found.notes.append(
                f"{tokens} prompt tokens: nothing was answered in the time that there was"
            )
        if stage is not None:
            self._note_errors(stage)
            result = gentle(stage, repeated=repeated)
            if result.requests:
                self._found.gentle.append(result)

    async def hard(self) -> None:
        """More and more users, until that brings nothing more or the time is over."""
        seconds = self._asked.seconds
        # However slow the gentle part was, the hard one gets half of the time.
        until_s = max(seconds, time.perf_counter() - self.began + seconds / 2)
        step = 2 if seconds >= _LONG_RUN_S else 4
        ladder = [1]
        while ladder[-1] * step <= _MOST_USERS:
            ladder.append(ladder[-1] * step)
        output = self._output_tokens(seconds / 15)
        flat, best = 0, 0.0
        for number, users in enumerate(ladder):
            left_s = self._left_s(until_s)
            if self._found.interrupted or (number >= 2 and left_s < 0.05 * seconds):
                return
            window_s = min(max(left_s / (len(ladder) - number), 0.08 * seconds), _MOST_LEVEL_S)
            plan = Plan(
                kind="closed", levels=(users,), duration_s=0.8 * window_s, warmup_s=min(0.2 * window_s, 2.0)
            )
            workload = self._synthetic(self._prompt_tokens(output), output)
            async with Pinger(self._http, self._endpoint, self._found.network.path) as pinger:
                limit_s = max(left_s, 2 * window_s)
                if number < 2:  # these two must be had, even if users are served one after the other
                    limit_s = max(limit_s, 2 * users * self._expected_s(output))
                stage = await self._stage(workload, plan, limit_s)
            if stage is None:
                if not self._found.levels and not self._found.interrupted:
                    self._found.notes.append(f"one user: nothing was answered within {limit_s:.0f} s")
                return
            self._note_errors(stage)
            reached = level(stage, pinger.answer_ms)
            self._found.levels.append(reached)
            flat = 0 if reached.tok_s > best * (1 + _LEAST_GAIN) else flat + 1
            best = max(best, reached.tok_s)
            if flat >= 2 or (flat and _held_up(reached)) or not reached.completed:
                return

    def _expected_s(self, output: int) -> float:
        """How long one user's request should take, by the slowest of the gentle load."""
        known = [(g.e2e_ms, g.tpot_ms or 0.0) for g in self._found.gentle if g.e2e_ms is not None]
        return max((e2e + output * tpot for e2e, tpot in known), default=0.0) / 1000

    def _output_tokens(self, seconds: float) -> int:
        """An answer that one user gets in a few ``seconds``, 8 to 64 tokens, if nobody chose its length."""
        if self._asked.output_tokens is not None:
            return self._asked.output_tokens
        known = [g for g in self._found.gentle if g.tpot_ms]
        if not known or not known[0].tpot_ms:
            return 16 if seconds < 4 else 64
        return int(min(max(seconds * 1000 / known[0].tpot_ms / 4, 8), 64))

    def _prompt_tokens(self, output: int) -> int:
        tokens = self._asked.prompt_tokens
        if self._endpoint.max_model_len is not None:
            tokens = min(tokens, max(self._endpoint.max_model_len - output - 1, 1))
        return tokens

    def _synthetic(self, prompt: int, output: int) -> Synthetic:
        self._stages += 1  # a seed of its own: no stage meets what another has put into a prefix cache
        seed = 1000 * self._asked.seed + self._stages
        return Synthetic(Lengths("fixed", prompt), Lengths("fixed", output), self._calibration, seed=seed)

    async def _stage(self, workload: Workload, plan: Plan, limit_s: float) -> StageResult | None:
        """One stage, cut off after ``limit_s``; None if not even one request ended."""
        session = Session(
            self._http,
            self._endpoint,
            workload,
            plan,
            self._view,
            server_pid=self._pid,
            count_tokens=self._count_tokens,
            metrics_every_s=max(min(_METRICS_EVERY_S, self._asked.seconds / 60), 0.1),
        )
        self._session = session
        timer = asyncio.get_running_loop().call_later(max(limit_s, _LEAST_LIMIT_S), session.interrupt)
        try:
            await session.run()
        finally:
            timer.cancel()
            self._session = None
        stages = [stage for stage in session.stages if stage.requests]
        return stages[-1] if stages else None

    def _note_errors(self, stage: StageResult) -> None:
        for kind, count in stage.errors.items():
            self._found.notes.append(
                f"{stage.label}: {count} × {kind}, such as: {stage.error_examples.get(kind, '')}"
            )


def _held_up(reached: Level) -> bool:
    """Whether requests wait or are refused: even more users would show nothing new."""
    server = reached.server
    waits = server is not None and server.waiting_max is not None and server.waiting_max >= 1
    return reached.refused_share > 0.05 or waits


def _local_pid(address: str) -> int | None:
    parts = urlsplit(base_url(address))
    if parts.hostname not in ("localhost", "127.0.0.1", "::1") or parts.port is None:
        return None
    return process_watch.listening_pid(parts.port)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
