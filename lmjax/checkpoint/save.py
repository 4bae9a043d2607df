"""Saving: asynchronous, atomic, and believed only when it was waited for and found whole.

WORKDIR/checkpoints/<step>/ appears by a rename when all of it is written. <step> is the number of optimizer steps done, so
the run goes on with the batch of that number. The folder holds the state, and as metadata the resolved config, the fingerprints
of data and tokenizer, and the code version.
"""

import os
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from lmjax.checkpoint import retain
from lmjax.checkpoint.layout import folder
from lmjax.errors import RunError
from lmjax.train.config import CheckpointConfig


class SaveError(RunError):
    """A checkpoint could not be written; the ones before are intact."""


def as_they_are() -> ocp.Context:
    """Arrays are written uncompressed: weights are noise, and lose a twelfth of their size for more than half the time of a save and a
    second copy of them in memory until it is done."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    return context


class Saver:
    """Writes checkpoints of one run. A context manager: leaving it waits for the save in flight, which else is lost."""

    def __init__(self, workdir: os.PathLike | str, config: CheckpointConfig, metadata: dict[str, Any]):
        """
        Args:
          workdir: the run's folder.
          config: how many to keep.
          metadata: JSON values that every checkpoint carries.
        """
        self.folder = folder(workdir)
        self.metadata = metadata
        self.pending: tuple[int, Any] | None = None
        self.last_good: int | None = None
        with as_they_are():
            self.checkpointer = ocp.training.Checkpointer(
                self.folder,
                # Every save is the loop's decision: it calls at the right steps, and at the end whatever the step.
                save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
                preservation_policy=retain.policy(config),
                cleanup_tmp_directories=True,
            )
        if self.checkpointer.latest is not None:
            self.last_good = self.checkpointer.latest.step

    def save(self, step: int, state: Any) -> None:
        """Starts a save of `state`, after waiting for the one before; a state already saved at this step is left alone."""
        self.wait()
        if self.last_good == step:
            return
        try:
            with as_they_are():
                self.pending = (step, self.checkpointer.save_async(step, state, custom_metadata=self.metadata))
        except (OSError, ValueError, RuntimeError) as error:
            raise self.failure(step, error) from error

    def wait(self) -> None:
        """Blocks until the save in flight is on disk and found whole.

        Raises:
          SaveError: it is not; for example, the disk is full.
        """
        if self.pending is None:
            return
        (step, response), self.pending = self.pending, None
        try:
            response.result()
        except (OSError, ValueError, RuntimeError) as error:
            raise self.failure(step, error) from error
        # Orbax has been seen to forget a failed save: what counts is what lies there.
        if not ocp.is_orbax_checkpoint(self.folder / str(step)):
            raise self.failure(step, "it is not there after the save")
        self.last_good = step

    def failure(self, step: int, reason: object) -> SaveError:
        """The error for a failed save, with what is left to go on from."""
        kept = f"checkpoint {self.last_good} is intact" if self.last_good is not None else "there is none before it"
        first = str(reason).strip().splitlines()[0] if str(reason).strip() else repr(reason)
        return SaveError(f"the checkpoint of step {step} could not be written to {self.folder} ({first}); {kept}")

    def close(self) -> None:
        """Waits for the save in flight, then lets go of the folder."""
        self.wait()
        self.checkpointer.close()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        # The others of several processes will not come to the barrier of a save that this one can no longer finish.
        if kind is None or jax.process_count() == 1:
            self.close()
