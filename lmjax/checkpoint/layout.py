"""Where a run's checkpoints lie: WORKDIR/checkpoints/<step>/, <step> being the optimizer steps done. No jax."""

import os

from etils import epath

CHECKPOINTS = "checkpoints"


def folder(workdir: os.PathLike | str) -> epath.Path:
    """Where they lie, as an absolute path: Orbax misreads a relative one."""
    path = os.fspath(workdir)
    return epath.Path(path if "://" in path else os.path.abspath(path)) / CHECKPOINTS


def steps(workdir: os.PathLike | str) -> list[int]:
    """Steps of the finished checkpoints of a run, ascending; unfinished ones have another name."""
    if not folder(workdir).exists():
        return []
    return sorted(int(path.name) for path in folder(workdir).iterdir() if path.name.isdigit())
