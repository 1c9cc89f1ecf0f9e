"""Config schema of the trainer backend ``deepspeed``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlinf_engines.conf.fields import key
from rlinf_engines.conf.trainers import TrainerConfig

STAGES = (0, 1, 2, 3)


@dataclass
class DeepSpeedTrainer(TrainerConfig):
    """Trainer backend ``deepspeed``: AdamW, data parallel, with ZeRO's ways of sharding the state."""

    name: str = key("deepspeed", "trainer backend")
    zero_stage: int = key(
        2, "what ranks share out: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights", choices=STAGES
    )
    offload_optimizer: bool = key(
        False, "keep optimizer state, and compute the update, in host memory (zero_stage 1 to 3)"
    )
    offload_parameters: bool = key(
        False, "keep weights in host memory while no layer needs them (zero_stage 3 with offload_optimizer)"
    )
    bucket_elements: int = key(
        50_000_000, "gradients and weights that go through one collective; more is faster and takes memory", min=1
    )
    persistence_elements: int = key(
        100_000, "zero_stage 3: weights with fewer elements stay whole on every rank", min=0
    )

    def validate(self, root: Any) -> list[str]:
        problems = TrainerConfig.validate(self, root)  # self is a config node: no super()
        if self.zero_stage > 0 and root.model.dtype == "float64":
            problems.append(
                f"model.dtype: DeepSpeed keeps float32 masters at trainer.zero_stage {self.zero_stage}, float64 is "
                "not trained; use float32 or bfloat16, or zero_stage=0"
            )
        if self.offload_optimizer and self.zero_stage == 0:
            problems.append(
                "trainer.offload_optimizer: needs trainer.zero_stage 1, 2 or 3, it is 0; raise it or set "
                "offload_optimizer=false"
            )
        if self.offload_parameters and not (self.zero_stage == 3 and self.offload_optimizer):
            problems.append(
                "trainer.offload_parameters: needs trainer.zero_stage=3 and trainer.offload_optimizer=true; set both "
                "or offload_parameters=false"
            )
        return problems
