"""One training: steps, evaluations on held-out data, checkpoints, and when it is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from headrace.errors import GenerationError
from headrace.lab.compress.algorithms.forward import head_logits
from headrace.lab.compress.training.checkpoints import Evaluated, State, restore, save
from headrace.lab.compress.training.losses import Targets, Terms, backward, divergence
from headrace.lab.compress.training.network import Sequences, run_layers
from headrace.lab.compress.training.settings import Schedule
from headrace.lab.compress.training.student import Student
from headrace.lab.compress.training.teacher import Teacher
from headrace.model.store import Progress

_ROWS = 128  # of logits at a time, in evaluations
_BETAS = (0.9, 0.95)


@dataclass(eq=False)
class Trainer:
    """Brings a student closer to a teacher, and leaves it at its best.

    ``held_out`` are the sequences that tell how close it is, by the teacher's divergence to the student over
    the whole vocabulary at temperature 1, in float32; ``judge`` knows what the teacher says of them, and
    ``teacher`` of ``sequences``. ``folder`` keeps checkpoints, from which the same training goes on exactly.
    ``note`` gets a line at each evaluation.
    """

    student: Student
    teacher: Teacher
    sequences: Sequences
    judge: Teacher
    held_out: Sequences
    schedule: Schedule
    terms: Terms
    folder: Path
    pairs: Mapping[int, int] = field(default_factory=dict)
    progress: Progress = lambda what, done, total: None
    note: Callable[[str], None] = lambda line: None
    _judged: list[tuple[Sequence[int], Targets]] = field(init=False, default_factory=list)

    def run(self) -> State:
        """Train until the schedule ends or held-out data gets no better.

        Raises GenerationError where numbers are not finite any more, OSError if no checkpoint can be written.
        """
        parameters = self.student.parameters
        optimizer = self._optimizer()
        began, before = time.monotonic(), 0.0
        found = restore(self.folder, optimizer, parameters)
        if found is None:
            state = State()
            best = self._evaluate(state, {})
            save(self.folder, state, optimizer, parameters, None)
        else:
            state, best = found
            before = state.seconds
        saved_at = state.seconds
        while state.stopped is None:
            rate = self.schedule.rate(state.step, state.seconds)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["factor"]
            self._step(optimizer, state)
            state.seconds = before + time.monotonic() - began
            share = self.schedule.share(state.step, state.seconds)
            self._tell(state)
            due = int(share * self.schedule.evaluations)
            if due > state.evaluated:
                state.evaluated = due
                best = self._evaluate(state, best)
                state.seconds = before + time.monotonic() - began
                state.stopped = self._end(state, share)
            if state.stopped or state.seconds - saved_at >= 60 * self.schedule.checkpoint_minutes:
                is_best = state.best.step == state.step
                save(self.folder, state, optimizer, parameters, None if is_best else best)
                saved_at = state.seconds
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(best[name])
        return state

    def kl(self) -> float:
        """Of the teacher to the student as it is, nats per held-out token."""
        with torch.no_grad():
            weights = self.student.weights()
            architecture = self.student.architecture
            total, rows = 0.0, 0
            for numbers, targets in self._known():
                sequences = [self.held_out[number] for number in numbers]
                final = run_layers(architecture, weights, sequences)[-1]
                for start in range(0, len(final), _ROWS):
                    stop = min(start + _ROWS, len(final))
                    logits = head_logits(architecture, weights, final[start:stop])
                    total += float(divergence(logits, targets.rows(start, stop)).double().sum())
                rows += len(final)
        return total / rows

    def _known(self) -> list[tuple[Sequence[int], Targets]]:
        """What the teacher says of the held-out sequences: looked up once."""
        if not self._judged:
            numbers = range(len(self.held_out))
            for some in _parts(numbers, self.held_out, self.schedule.micro_tokens):
                self._judged.append((some, self.judge.targets(some)))
        return self._judged

    def _optimizer(self) -> torch.optim.AdamW:
        groups: dict[tuple[float, float], list[torch.Tensor]] = {}
        for name, parameter in self.student.parameters.items():
            decay = self.schedule.weight_decay if parameter.ndim == 2 else 0.0
            groups.setdefault((self.student.rate(name), decay), []).append(parameter)
        return torch.optim.AdamW(
            [
                {"params": some, "factor": factor, "weight_decay": decay}
                for (factor, decay), some in groups.items()
            ],
            lr=self.schedule.learning_rate,
            betas=_BETAS,
            fused=True,
        )

    def _step(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        numbers = self._drawn(state.step)
        rows = sum(len(self.sequences[number]) for number in numbers)
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for some in _parts(numbers, self.sequences, self.schedule.micro_tokens):
            sequences = [self.sequences[number] for number in some]
            weights = self.student.weights()
            streams = run_layers(self.student.architecture, weights, sequences, bf16=self.schedule.bf16)
            loss += backward(
                self.student.architecture,
                weights,
                streams,
                sequences,
                self.teacher.targets(some),
                self.terms,
                rows,
                self.pairs,
                bf16=self.schedule.bf16,
            )
        norm = torch.nn.utils.clip_grad_norm_(self.student.parameters.values(), self.schedule.clip)
        if not (math.isfinite(loss) and math.isfinite(float(norm))):
            raise GenerationError(
                f"The loss of step {state.step + 1} is not finite: the student's numbers have run away. Use "
                f"a smaller --learning-rate than {self.schedule.learning_rate:g}. The last checkpoint is "
                f"kept in {self.folder}."
            )
        optimizer.step()
        state.step += 1
        state.tokens += rows
        state.losses = (state.losses[0] + loss, state.losses[1] + 1)

    def _drawn(self, step: int) -> list[int]:
        """The numbers of a step's sequences: each pass over the data has an order of its own."""
        count, size = len(self.sequences), self.schedule.batch_size
        drawn = []
        for place in range(step * size, (step + 1) * size):
            order = np.random.default_rng([self.schedule.seed, place // count]).permutation(count)
            drawn.append(int(order[place % count]))
        return drawn

    def _evaluate(self, state: State, best: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Look at held-out data, say what is seen, and keep the parameters if they are better than ever."""
        total, steps = state.losses
        state.losses = (0.0, 0)
        now = Evaluated(state.step, state.seconds, self.kl(), total / steps if steps else None)
        if not math.isfinite(now.kl):
            raise GenerationError(
                f"The student's divergence on held-out data is not finite after step {state.step}: its "
                "weights are damaged, or the learning rate is too high. The last checkpoint is kept in "
                f"{self.folder}."
            )
        state.history.append(now)
        self.note(self._line(state, now))
        if state.best is not now:
            return best
        return {name: tensor.detach().clone() for name, tensor in self.student.parameters.items()}

    def _end(self, state: State, share: float) -> str | None:
        """Why the training is over, if it is."""
        if share >= 1:
            return "minutes" if self.schedule.steps is None or state.step < self.schedule.steps else "steps"
        since = len(state.history) - 1 - state.history.index(state.best)
        return "no better" if since >= self.schedule.patience else None

    def _line(self, state: State, now: Evaluated) -> str:
        words = f"step {now.step}: held-out KL {now.kl:.5f}" + (" (best)" if state.best is now else "")
        if now.loss is not None:
            speed = state.tokens / max(state.seconds, 1e-9)
            words += f", loss {now.loss:.5f}; {state.seconds / 60:.1f} min, {speed:.0f} tokens/s"
            share = self.schedule.share(state.step, state.seconds)
            if 0 < share < 1:
                words += f", about {state.seconds * (1 - share) / share / 60:.1f} min to go"
        return words

    def _tell(self, state: State) -> None:
        schedule = self.schedule
        if schedule.minutes is not None:
            self.progress("training", int(state.seconds), math.ceil(60 * schedule.minutes))
        elif schedule.steps is not None:
            self.progress("training", state.step, schedule.steps)


def _parts(numbers: Sequence[int], sequences: Sequences, tokens: int) -> Iterator[list[int]]:
    """The numbers in their order, in parts whose sequences have up to ``tokens`` together, or are one."""
    held: list[int] = []
    size = 0
    for number in numbers:
        if held and size + len(sequences[number]) > tokens:
            yield held
            held, size = [], 0
        held.append(number)
        size += len(sequences[number])
    yield held
