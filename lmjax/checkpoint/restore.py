"""Restoring: onto any mesh and any number of processes, all of it or an error that lists every mismatch.

An unreadable checkpoint is never taken for "none": the one before is tried, and said; if none can be read, that is an error.
Each of several processes reads its own part alone, then all agree: one that failed would leave the others in a barrier for ever.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from orbax.checkpoint import v1 as ocp

from lmjax.checkpoint.layout import folder, steps
from lmjax.errors import RunError, UserError
from lmjax.sharding import multihost

MISMATCHES_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint as read."""

    step: int
    state: Any
    metadata: dict[str, Any]
    unreadable: tuple[str, ...]  # newer checkpoints that could not be read, and why


def restore(workdir: os.PathLike | str, abstract: Any, step: int | None = None, partial: bool = False) -> Restored:
    """The newest readable checkpoint, or that of `step`.

    Args:
      workdir: the run's folder.
      abstract: the state as ShapeDtypeStructs with shardings.
      step: only this one.
      partial: what else the checkpoint holds is not wanted.

    Raises:
      UserError: there is none, or its arrays are not those of `abstract`.
      RunError: there are some, and none can be read.
    """
    found = steps(workdir)
    if step is not None and step not in found:
        raise UserError(f"{workdir} has no checkpoint of step {step}; it has {found or 'none'}")
    if not found:
        raise UserError(f"{workdir} holds no checkpoint: is it the workdir of a run that saved?")
    unreadable: list[str] = []
    for candidate in [step] if step is not None else reversed(found):
        reason = ""
        try:
            state, metadata = load(folder(workdir) / str(candidate), abstract, partial)
        except UserError:
            raise
        except Exception as error:  # whatever a damaged file makes the reader raise; nothing is swallowed, see below
            first = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
            reason = f"checkpoint {candidate} cannot be read ({type(error).__name__}: {first})"
        reasons = [reason for reason in multihost.told_by_all(reason) if reason]
        if not reasons:
            return Restored(candidate, state, metadata, tuple(unreadable))
        state = None  # what this process could read is not held beside the one before
        unreadable.append(reasons[0])
    raise RunError(f"{workdir}: no checkpoint can be read: " + "; ".join(unreadable))


def load(path: epath.Path, abstract: Any, partial: bool) -> tuple[Any, dict[str, Any]]:
    """This process's part of a checkpoint, and the metadata. Waits for no other process."""
    context = ocp.Context()
    context.pytree.loading.partial_load = partial
    if jax.process_count() > 1:
        alone = jax.process_index()
        context.multiprocessing.primary_host = alone
        context.multiprocessing.active_processes = {alone}
        context.multiprocessing.barrier_sync_key_prefix = f"process_{alone}"
    with context:
        metadata = ocp.metadata(path)
        if metadata.metadata is None:
            raise ValueError("the description of its arrays is damaged")
        compare(path, metadata.metadata, abstract, partial)
        return ocp.load(path, abstract), metadata.custom_metadata


def set_aside(workdir: os.PathLike | str, newer_than: int) -> None:
    """Renames unreadable checkpoints, so that the run can write their steps again; nothing is deleted."""
    for step in steps(workdir):
        if step > newer_than:
            path = folder(workdir) / str(step)
            path.rename(path.parent / f"{step}.unreadable")


def compare(path: epath.Path, stored: Any, abstract: Any, partial: bool = False) -> None:
    """Orbax casts a wrong dtype silently: every leaf's shape and dtype must be what is asked for."""
    have = {name: (tuple(leaf.shape), jnp.dtype(leaf.dtype)) for name, leaf in leaves(stored)}
    want = {name: described(leaf) for name, leaf in leaves(abstract)}
    wrong = [f"{name}: missing" for name in want if name not in have]
    wrong += [f"{name}: not expected" for name in have if name not in want and not partial]
    for name in want.keys() & have.keys():
        if want[name] != have[name]:
            wrong.append(f"{name}: stored {show(have[name])}, expected {show(want[name])}")
    if wrong:
        more = f" … and {len(wrong) - MISMATCHES_SHOWN} more" if len(wrong) > MISMATCHES_SHOWN else ""
        raise UserError(f"{path} does not fit this config: " + "; ".join(sorted(wrong)[:MISMATCHES_SHOWN]) + more)


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) with one spelling of the path, whatever kinds of containers hold it."""
    return [("/".join(part(key) for key in path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def part(key: Any) -> str:
    """The name in a key of a dict, a sequence or an attribute."""
    return str(next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)))


def described(leaf: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], Any]:
    """(shape, dtype) as stored; a PRNG key is stored as its words."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return tuple(leaf.shape), jnp.dtype(leaf.dtype)


def show(shape_dtype: tuple[tuple[int, ...], Any]) -> str:
    """`float32[4, 192]`."""
    return f"{shape_dtype[1]}{list(shape_dtype[0])}"
