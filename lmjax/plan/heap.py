"""How much room buffers take that come and go: as the compiler places them, largest first, each in the tightest gap that is free for all
its life. No jax.

What lives at once is the least that any placement needs; a large buffer that does not fit into what smaller ones leave makes the heap
taller than that. XLA plans the temporaries of a program in this way (GlobalDecreasingSizeBestFitHeap).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Bytes that are held from one phase of a step to another, both included."""

    part: str  # what a plan calls it
    size: int
    first: int
    last: int

    def meets(self, other: "Buffer") -> bool:
        """Whether both are held at some time."""
        return self.first <= other.last and other.first <= self.last


def placed(buffers: list[Buffer]) -> list[tuple[int, Buffer]]:
    """Each buffer with its offset."""
    done: list[tuple[int, Buffer]] = []
    for buffer in sorted(buffers, key=lambda one: (-one.size, one.first - one.last)):
        others = sorted((offset, other.size) for offset, other in done if other.meets(buffer))
        best, end = None, 0
        for offset, size in others:
            gap = offset - end
            if gap >= buffer.size and (best is None or gap < best[0]):
                best = gap, end
            end = max(end, offset + size)
        done.append((end if best is None else best[1], buffer))
    return done


def height(buffers: list[Buffer]) -> int:
    """Bytes of the heap."""
    return max((offset + buffer.size for offset, buffer in placed(buffers)), default=0)


def fullest(buffers: list[Buffer]) -> int:
    """The phase in which most bytes are held."""
    phases = {buffer.first for buffer in buffers}
    return max(sorted(phases), key=lambda phase: sum(one.size for one in buffers if one.first <= phase <= one.last))
