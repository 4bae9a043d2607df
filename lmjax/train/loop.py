"""The train loop: the only one in this project. It knows no config section, no data, no objective: all of it comes as arguments.

Order at each step, on every process alike: wait for the batch, start the step, fetch the step before, then, where due,
evaluate, save, end; asked to end before the last step, save, evaluate, end. Values are fetched one step late, so the devices never
wait for the host; before a save they are fetched at once, so that a step that went wrong stops the run and not the checkpoint.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax

from lmjax.batch import Batch
from lmjax.checkpoint.save import Saver
from lmjax.errors import RunError
from lmjax.monitor.speed import Speed
from lmjax.monitor.watchdog import Watchdog
from lmjax.monitor.write import Writer
from lmjax.train.state import TrainState
from lmjax.train.step import Metrics, Step


class NotFiniteError(RunError):
    """A step's loss or gradient is not finite."""


@dataclasses.dataclass
class Loop:
    """What a run brings to the loop."""

    step: Callable[[int], Step]  # the program of each step
    batches: Iterator[tuple[int, Batch]]  # (step, batch on the devices)
    evaluate: Callable[[TrainState], Mapping[str, float]] | None
    saver: Saver
    writer: Writer
    watchdog: Watchdog
    speed: Speed
    should_stop: Callable[[int], bool]  # asked by every process after every step
    tokens_per_step: int  # positions of a global batch
    flops_per_token: Callable[[int], float]  # model FLOPs of a token in rows of that many
    log_every: int
    eval_every: int | None  # none: at the end only
    save_every: int
    max_skipped: int  # steps in a row that may be skipped for not being finite
    skipped: int = 0  # in a row, so far
    timed: bool = False  # whether the first step is over
    shape: tuple[int, ...] | None = None  # [B, T] of the step before
    program: Step | None = None  # that ran it

    def run(self, state: TrainState, start: int, stop: int) -> tuple[TrainState, int]:
        """Runs steps start … stop - 1.

        Returns:
          The state, and the number of steps done: less than `stop` when the run was asked to end. Its checkpoint is on disk.

        Raises:
          NotFiniteError: more than `max_skipped` steps in a row were not finite.
          SaveError: a checkpoint could not be written.
        """
        pending: tuple[int, Metrics] | None = None
        for step in range(start, stop):
            self.watchdog.at(step, "batch")
            with self.speed.waiting():
                number, batch = next(self.batches)
            if number != step:
                raise RuntimeError(f"the loader gave the batch of step {number} at step {step}")
            program = self.step(step)
            same = batch.tokens.shape == self.shape and program is self.program
            self.watchdog.at(step, "step" if same else "compiling")
            if not same:
                self.compiles_for(step, batch.tokens.shape, pending)
                pending, self.program = None, program
            state, metrics = program(state, batch)
            if pending is not None:
                self.report(*pending)
            pending = (step + 1, metrics)

            done = step + 1
            stopping = self.should_stop(done)
            at_end = done == stop
            evaluating = at_end or (self.eval_every is not None and done % self.eval_every == 0)
            saving = at_end or stopping or done % self.save_every == 0
            if evaluating or saving:
                self.report(*pending)
                pending = None
            if evaluating and (at_end or not stopping):
                # At the end before the save, asked to stop or not: from a checkpoint of the last step nothing goes on.
                self.write_evaluation(done, state)
            if saving:
                self.watchdog.at(step, "saving")
                with self.speed.paused():
                    self.writer.flush()
                    self.saver.save(done, state)
            if stopping and not at_end:
                self.writer.say(f"asked to end: saving step {done}")
                if evaluating:
                    # The resume begins with the next step, so this row is written now or never. After the save: whoever is in a
                    # hurry may end the process here and loses no step.
                    self.saver.wait()
                    self.write_evaluation(done, state)
                stop = done
                break
        self.watchdog.at(stop - 1, "saving")
        self.saver.wait()
        return state, stop

    def write_evaluation(self, done: int, state: TrainState) -> None:
        """Evaluates the state after `done` steps, where there is something to evaluate with."""
        if self.evaluate is None:
            return
        self.watchdog.at(done - 1, "evaluating")
        with self.speed.paused():
            self.writer.write(done, self.tokens(done) | self.evaluate(state))

    def compiles_for(self, step: int, shape: tuple[int, ...], pending: tuple[int, Metrics] | None) -> None:
        """Tells of another program, and ends the stopwatch's window: its figures are of one program and length."""
        if self.shape is not None:
            self.writer.say(
                f"step {step}: {shape[0]} rows of {shape[1]} tokens from here on; its program compiles first"
            )
        if pending is not None:
            self.report(*pending)
        self.shape, self.timed = shape, False
        self.speed.flops_per_token = self.flops_per_token(shape[1])

    def report(self, done: int, metrics: Metrics) -> None:
        """Fetches a step's values, stops the run if they are not finite, writes a row where due."""
        values = jax.device_get(metrics)
        self.speed.step(self.tokens_per_step)
        if not self.timed:  # the time of the first step of a shape is the compiler's
            self.timed = True
            self.speed.restart()
        self.skipped = self.skipped + 1 if values["train/skipped"] else 0
        if done % self.log_every == 0 or self.skipped:
            self.writer.write(done, self.tokens(done) | values | self.speed.read())
        if self.skipped > self.max_skipped:
            raise NotFiniteError(
                f"step {done - 1}: loss {values['train/loss']} or gradient norm {values['train/grad_norm']} is not finite, "
                f"{self.skipped} step(s) in a row; the last checkpoint is that of step {self.saver.last_good}. "
                "Lower the learning rate, or look at the step's documents with `lmjax trace`"
            )

    def tokens(self, done: int) -> dict[str, int]:
        """Positions trained on after `done` steps."""
        return {"tokens": done * self.tokens_per_step}
