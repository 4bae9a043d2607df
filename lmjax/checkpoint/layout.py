"""Where a run's checkpoints lie: WORKDIR/checkpoints/<step>/, <step> being the optimizer steps done. No jax."""

import os

from etils import epath

CHECKPOINTS = "checkpoints"


def steps(workdir: os.PathLike | str) -> list[int]:
    """Steps of the finished checkpoints of a run, ascending; unfinished ones have another name."""
    folder = epath.Path(workdir) / CHECKPOINTS
    if not folder.exists():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
