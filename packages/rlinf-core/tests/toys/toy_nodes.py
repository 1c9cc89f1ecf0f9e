"""Workers that say on which node they are, for tests of a flow over two nodes."""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_core import In, Out, Prompt, Worker, task

ITEM_BYTES = 2 << 20


def node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


@dataclass
class Box:
    id: str
    node: str
    data: np.ndarray[Any, Any]
    crc: int

    def account_ids(self) -> tuple[str, ...]:
        return (self.id,)


class Packer(Worker):
    """Fills a box for each prompt, and notes where."""

    @task
    def pack(self, prompts: In[Prompt], boxes: Out[Box]) -> None:
        for portion in prompts.batches():
            with self.on_device():
                for prompt in portion:
                    data = np.random.default_rng(int(prompt.text)).integers(0, 255, ITEM_BYTES, np.uint8)
                    for sample in prompt.account_ids():
                        boxes.put(Box(sample, node_id(), data, zlib.crc32(data)))


class Checker(Worker):
    """Opens the boxes of another node and compares their contents."""

    @task
    def check(self, boxes: In[Box]) -> dict[str, float]:
        good, from_other = 0, 0
        for portion in boxes.batches():
            with self.on_device():
                for box in portion:
                    good += zlib.crc32(box.data) == box.crc
                    from_other += box.node != node_id()
                self.trained(portion)
        return {"good": good, "from_other": from_other}


class Waiter(Worker):
    """Says where it is, then waits for what does not come."""

    @task
    def wait(self, folder: str) -> None:
        Path(folder, f"{self.name}-{self.rank}").write_text(node_id())
        threading.Event().wait(60)


class Adder(Worker):
    """Ranks on two nodes that compute together."""

    collective = True

    def setup(self) -> None:
        import torch.distributed as dist

        info = self.parallel
        dist.init_process_group("gloo", init_method=info.init_method, rank=info.rank, world_size=info.world_size)

    @task
    def add(self) -> dict[str, float]:
        import torch
        import torch.distributed as dist

        total = torch.tensor([1.0 + self.rank])
        dist.all_reduce(total)
        nodes: list[Any] = [None] * self.world_size
        dist.all_gather_object(nodes, node_id())
        return {"total": float(total), "nodes": float(len(set(nodes)))}

    def teardown(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def prompts_of(step: int, count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", str(i), group_size=1, step=step) for i in range(count)]


def boxes_program(flow: Any, cfg: Any) -> None:
    packer, checker = flow.group("packer", Packer, cfg), flow.group("checker", Checker, cfg)
    for step in flow.steps(cfg["num_steps"]):
        prompts, boxes = step.channels("prompts", "boxes")
        step.feed(prompts, lambda index=step.index: prompts_of(index, cfg["items"]))
        packer.pack(prompts, boxes)
        step.report(checker.check(boxes), reduce="sum")
        step.join()


def sum_program(flow: Any, cfg: Any) -> None:
    adder = flow.group("adder", Adder, cfg)
    for step in flow.steps(2):
        step.report(adder.add())
        step.join()


def waiting_program(flow: Any, cfg: Any) -> None:
    first, second = flow.group("first", Waiter, cfg), flow.group("second", Waiter, cfg)
    for step in flow.steps(1):
        first.wait(cfg["folder"])
        second.wait(cfg["folder"])
        step.join()
