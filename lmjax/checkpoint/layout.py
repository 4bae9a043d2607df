"""Where a run's checkpoints lie: WORKDIR/checkpoints/<step>/, <step> being the optimizer steps done. No jax."""

import os

from etils import epath

from lmjax.files import is_remote

CHECKPOINTS = "checkpoints"
COMMITTED = "commit_success.txt"  # Orbax's mark of a whole checkpoint in a bucket, where nothing can be renamed


def folder(workdir: os.PathLike | str) -> epath.Path:
    """Where they lie, as an absolute path: Orbax misreads a relative one."""
    path = os.fspath(workdir)
    return epath.Path(path if is_remote(path) else os.path.abspath(path)) / CHECKPOINTS


def steps(workdir: os.PathLike | str) -> list[int]:
    """Steps of the finished checkpoints of a run, ascending; unfinished ones have another name, or lack their mark."""
    if not folder(workdir).exists():
        return []
    found = [path for path in folder(workdir).iterdir() if path.name.isdigit()]
    return sorted(int(path.name) for path in found if not is_remote(workdir) or (path / COMMITTED).exists())
