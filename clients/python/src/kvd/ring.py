"""Places in a region's memory: who may write where until when. Callers hold the region's lock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .errors import MessageTooLarge, QueueFull
from .shared import SharedMemory

# Payloads begin on cache lines.
ALIGN = 64


def aligned(offset: int) -> int:
    return (offset + ALIGN - 1) & -ALIGN


@dataclass
class Place:
    """Bytes that one call uses, record first."""

    start: int
    end: int
    is_free: bool = False


class Ring:
    """Places in the region, taken in turn and given back in any order."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._taken: deque[Place] = deque()
        # Of calls that nobody waits for any more: free once their record says that they ended.
        self._given_up: list[Place] = []

    def take_place(self, size: int) -> Place:
        if size > self._memory.size:
            raise MessageTooLarge(
                f"a call of {size} bytes does not fit the region of {self._memory.size}: ask for"
                " less at once, or connect with more region_bytes"
            )
        taken = self._taken
        for place in self._given_up:
            place.is_free = self._memory.words[place.start >> 2] != 0
        if self._given_up:
            self._given_up = [place for place in self._given_up if not place.is_free]
        while taken and taken[0].is_free:
            taken.popleft()
        start = 0
        if taken:
            first, last = taken[0].start, taken[-1].end
            start = last
            if last <= first or last + size > self._memory.size:
                # The free bytes are those before the first place.
                start = last if last <= first else 0
                if start + size > first:
                    raise QueueFull(
                        f"no room for {size} bytes in the region beside {len(taken)} calls under"
                        " way: wait for their results, or connect with more region_bytes"
                    )
        place = Place(start, start + size)
        taken.append(place)
        return place

    def give_up(self, place: Place) -> None:
        self._given_up.append(place)
