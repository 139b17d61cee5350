"""Random schedules: made from a seed, run against what every request gets alone, shrunk when they fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from small_engines import Answers, Clock, assert_idle, check_blocks, request, run

from headrace.engine.config import SpeculativeConfig
from headrace.engine.engine import Engine
from headrace.engine.request import EngineRequest

SPECULATION = (
    None,
    SpeculativeConfig(num_speculative_tokens=6, prompt_lookup_min=2, adaptive=False),
    SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1),
    SpeculativeConfig(method="draft_model", model="simulated", num_speculative_tokens=5, adaptive=False),
    SpeculativeConfig(method="draft_model", model="simulated", num_speculative_tokens=3),
)


@dataclass(frozen=True)
class Shape:
    """What decides a request's answer."""

    prompt: list[int]
    params: dict[str, Any]

    def request(self, name: str, **standing: Any) -> EngineRequest:
        return request(name, self.prompt, **self.params, **standing)


def random_shape(seed: int, prefixes: list[list[int]], vocab: int, max_tokens: list[int]) -> Shape:
    """A prompt that often shares a beginning with others', and parameters of every kind."""
    rng = random.Random(seed)
    prefix = rng.choice(prefixes)
    prompt = prefix[: rng.choice([1, 15, 16, 17, 32, 40, 64, 79])]
    prompt = prompt + [rng.randrange(vocab) for _ in range(rng.randrange(4))]
    params: dict[str, Any] = {
        "seed": rng.randrange(3),
        "n": rng.choice([1, 1, 1, 1, 2, 4]),
        "temperature": rng.choice([0.0, 1.0]),
        "max_tokens": rng.choice(max_tokens),
        "ignore_eos": rng.random() < 0.5,
    }
    extras: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.4, "presence_penalty": -0.2},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"logit_bias": {3: 4.0, 9: -100.0}},
        {"min_tokens": min(9, params["max_tokens"]), "stop_token_ids": [1, 2, 3]},
        {"top_p": 0.8, "top_k": 9},
    ]
    if rng.random() < 0.4:
        params |= rng.choice(extras)
    return Shape(prompt, params)


@dataclass(frozen=True)
class Arrival:
    """A request, so many steps after the one before it, and what happens to it."""

    number: int
    shape: int
    after_steps: int
    standing: dict[str, Any]
    timeout_s: float | None
    abort_after: int | None  # steps from its arrival
    abort_choice: int | None


@dataclass(frozen=True)
class Schedule:
    """An engine's settings and what it is asked; :func:`schedule` makes it from a seed."""

    seed: int
    engine: dict[str, Any]
    arrivals: list[Arrival] = field(default_factory=list)


@dataclass
class World:
    """Where schedules are run: an engine of certain sizes, and the shapes of requests.

    So few shapes that what each of them gets alone is computed once for all schedules. ``plain`` has a large
    engine without speculation or caching; the settings in ``deciding`` decide answers, and no others may.
    """

    shapes: list[Shape]
    choices: dict[str, list[Any]]
    max_requests: int
    build: Callable[..., Engine]
    plain: Callable[..., Engine]
    deciding: tuple[str, ...] = ()
    clock: type[Clock] = Clock
    _alone: dict[tuple[Any, ...], dict[int, tuple[Any, ...]]] = field(default_factory=dict)

    def alone(self, number: int, settings: dict[str, Any]) -> dict[int, tuple[Any, ...]]:
        """What each choice of a shape gets when there is nobody else."""
        deciding = {name: settings[name] for name in self.deciding}
        key = (number, *deciding.values())
        if key not in self._alone:
            texts = run(self.plain(**deciding), [self.shapes[number].request("alone")]).texts()
            self._alone[key] = {choice: text for (_, choice), text in texts.items()}
        return self._alone[key]

    def schedule(self, seed: int) -> Schedule:
        """The same for the same seed, on every machine."""
        rng = random.Random(seed)
        engine = {name: rng.choice(values) for name, values in self.choices.items()}
        tenants = rng.choice([[""], ["", "a", "b"]])
        with_deadlines = rng.random() < 0.3
        arrivals = [
            Arrival(
                number=number,
                shape=rng.randrange(len(self.shapes)),
                after_steps=rng.choice([0, 0, 0, 0, 1, 3, 9]),
                standing={
                    "priority": rng.randrange(3),
                    "tenant": rng.choice(tenants),
                    "weight": rng.choice([1.0, 2.5]),
                    "salt": rng.choice(["", "", "tenant"]),
                },
                timeout_s=rng.choice([None, 0.5, 2.0, 20.0]) if with_deadlines else None,
                abort_after=rng.randrange(20) if rng.random() < 0.15 else None,
                abort_choice=rng.choice([None, 0, 1]),
            )
            for number in range(rng.randint(1, self.max_requests))
        ]
        return Schedule(seed, engine, arrivals)

    def check(self, plan: Schedule) -> Engine:
        """Run a schedule and assert all that must hold: same answers, sound blocks, an end for everybody."""
        clock = self.clock()
        engine = self.build(clock=clock, max_queue_time_s=1e9, **plan.engine)
        answers = Answers()
        cut: set[tuple[str, int]] = set()
        aborts: list[tuple[int, Arrival]] = []
        steps = 0

        def step() -> None:
            nonlocal steps
            answers.take(engine.step())
            check_blocks(engine)
            steps += 1
            for due, victim in aborts:
                if due == steps:
                    ended = engine.abort(f"r{victim.number}", victim.abort_choice)
                    cut.update((output.request_id, output.choice) for output in ended)
                    answers.take(ended)
                    check_blocks(engine)

        for arrival in plan.arrivals:
            for _ in range(arrival.after_steps):
                step()
            asked = self.shapes[arrival.shape].request(f"r{arrival.number}", **arrival.standing)
            asked.params.timeout_s = arrival.timeout_s
            asked.arrival_time = clock.now
            engine.add(asked)
            if arrival.abort_after is not None:
                aborts.append((steps + arrival.abort_after, arrival))

        bound = steps + self.most_steps(plan)
        while engine.has_work:
            assert steps <= bound, f"after {steps} steps somebody has still not had an answer"
            step()
        assert_idle(engine)
        expected = {
            (f"r{arrival.number}", choice): text
            for arrival in plan.arrivals
            for choice, text in self.alone(arrival.shape, plan.engine).items()
        }
        assert answers.keys() == expected.keys(), "a request was lost"
        for key, text in answers.texts().items():
            last = answers[key].last
            assert last is not None
            if last.error_kind is not None or key in cut:
                assert last.error_kind in (None, "DeadlineExceededError"), last.error_message
                assert text[0] == expected[key][0][: len(text[0])], f"{key} was on the way to another answer"
            else:
                assert text == expected[key], f"{key} has another answer than alone"
        assert engine.stats().num_tenants == 0
        assert not engine.scheduler._requests
        return engine

    def most_steps(self, plan: Schedule) -> int:
        """Twice what it takes if everybody has to wait for the whole of everybody else."""
        total = 0
        for arrival in plan.arrivals:
            shape = self.shapes[arrival.shape]
            longest = len(shape.prompt) + shape.params["max_tokens"]
            chunks = -(-longest // min(16, plan.engine["max_num_batched_tokens"]))
            total += shape.params["n"] * (shape.params["max_tokens"] + chunks)
        return 2 * total + 20

    def explain(self, seed: int) -> Engine:
        """Check the schedule of a seed; a failure names the seed and the least that fails."""
        plan = self.schedule(seed)
        try:
            return self.check(plan)
        except Exception as error:
            least = self._shrink(plan)
            raise AssertionError(f"seed {seed}: {error!r}; the least that fails is {least}") from error

    def _shrink(self, plan: Schedule) -> Schedule:
        """A schedule that still fails and from which nothing can be left out."""
        plain = {
            "speculative": None,
            "tpot_target_ms": None,
            "prefix_caching": False,
            "windows": (None,),
            "window_blocks": None,
            "tier": None,
        }
        while True:
            smaller = [
                replace(plan, arrivals=plan.arrivals[:index] + plan.arrivals[index + 1 :])
                for index in range(len(plan.arrivals))
            ]
            simpler = [
                replace(plan, engine=plan.engine | {name: value})
                for name, value in plain.items()
                if plan.engine.get(name, value) != value
            ]
            found = next((each for each in smaller + simpler if self._fails(each)), None)
            if found is None:
                return plan
            plan = found

    def _fails(self, plan: Schedule) -> bool:
        try:
            self.check(plan)
        except Exception:
            return True
        return False
