"""Workers that talk to each other beside channels: a ring within a group, and a word between two groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlinf_core import Flow, Worker, recipe, task


@dataclass
class Settings:
    num_steps: int = 2
    leaves: bool = False


class Talker(Worker):
    device = False
    ranks = 3

    def setup(self) -> None:
        from rlinf_comm import communicator_of

        self.comm = communicator_of(self, timeout=30.0)

    @task
    def ring(self) -> dict[str, float]:
        import torch

        mine = torch.full((1000, 100), float(self.rank))
        after, before = f"{self.name}[{(self.rank + 1) % 3}]", f"{self.name}[{(self.rank - 1) % 3}]"
        self.comm.send({"of": self.rank, "data": mine}, after, meta=self.step)
        if self.cfg.leaves and self.rank == 1:
            import os

            os._exit(7)
        got = self.comm.recv_message(before)
        total = got.obj["data"].sum().item()
        assert got.meta == self.step
        everyone = [f"{self.name}[{rank}]" for rank in range(3)]
        said = self.comm.broadcast({"from": 2} if self.rank == 2 else None, source=everyone[2], members=everyone)
        return {"total": total, "said": said["from"]}

    def teardown(self) -> None:
        self.comm.close()


@recipe(schema=Settings)
def talking(flow: Flow, cfg: Any) -> None:
    talker = flow.group("talker", Talker, cfg)
    for step in flow.steps(cfg.num_steps):
        step.report(talker.ring(), reduce="sum")
        step.join()
