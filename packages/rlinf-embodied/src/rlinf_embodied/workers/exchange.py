"""How a simulator gets its decisions: over channels from a policy worker, or from a replica in its own process."""

from __future__ import annotations

from typing import Protocol

from rlinf_core import In, Out
from rlinf_embodied.data import Answered, Asked, Place
from rlinf_embodied.workers.replica import Replica


class Exchange(Protocol):
    """Each question is answered once. Several may be open, of a block one."""

    @property
    def portion(self) -> int | None:
        """Environments that the plan wants in a block; ``None``: as many as there are."""

    def ask(self, asked: Asked) -> None:
        """Send a question off."""

    def answer(self, place: Place) -> Answered:
        """Wait for the answer to the question of the block ``place``."""

    def close(self) -> None:
        """Nothing more will be asked."""


class OverChannels:
    """Questions and answers are items of two channels, whose key is the block's place."""

    def __init__(self, observations: Out[Asked], actions: In[Answered]) -> None:
        self._observations = observations
        self._actions = actions

    @property
    def portion(self) -> int | None:
        return self._actions.portion

    def ask(self, asked: Asked) -> None:
        self._observations.put(asked, key=asked.place, weight=len(asked.keys))

    def answer(self, place: Place) -> Answered:
        return self._actions.get(key=place)

    def close(self) -> None:
        self._observations.close()


class Local:
    """Questions are answered by a replica of the policy, here, when the answer is wanted."""

    portion: int | None = None

    def __init__(self, replica: Replica, step: str) -> None:
        self._replica = replica
        self._step = step
        self._open: dict[Place, Asked] = {}

    def ask(self, asked: Asked) -> None:
        self._open[asked.place] = asked

    def answer(self, place: Place) -> Answered:
        return self._replica.answer(self._open.pop(place), self._step)

    def close(self) -> None:
        assert not self._open, "every question is answered"
