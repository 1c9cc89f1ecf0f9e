"""One run of TRL's ``GRPOTrainer``: ``_trl_run.py SPEC.json OUT.json``.

The spec names the model's directory, the prompts of every step, the reward and the numbers that both sides share. Each
step's seconds are taken from the end of the step before, so that everything the trainer does counts.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(spec: dict[str, Any], out: Path) -> None:
    threads = int(spec["threads"])
    os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    steps, group = spec["prompts"], int(spec["group"])
    flat = [prompt for step in steps for prompt in step]
    data = Dataset.from_list([{"prompt": prompt["prompt"], "answer": prompt["answer"]} for prompt in flat])
    module, _, name = spec["reward"].partition(":")
    score = getattr(importlib.import_module(module), name)
    sequences = len(steps[0]) * group

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [score(text, right) for text, right in zip(texts, answer, strict=True)]

    keys: dict[str, Any] = dict(
        output_dir=str(out.parent / "trl"),
        use_cpu=True,
        per_device_train_batch_size=sequences // int(spec["accumulate"]),
        gradient_accumulation_steps=int(spec["accumulate"]),
        num_generations=group,
        max_completion_length=spec["max_new_tokens"],
        max_steps=len(steps),
        learning_rate=spec["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=spec["warmup_steps"],
        adam_beta1=spec["betas"][0],
        adam_beta2=spec["betas"][1],
        weight_decay=spec["weight_decay"],
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=int(spec["seed"]),
        optim="adamw_torch_fused",
    )
    if spec["fixed"]:
        keys["generation_kwargs"] = {"min_new_tokens": spec["max_new_tokens"]}
    rows: list[dict[str, Any]] = []
    spent = {"generate_s": 0.0}

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = super()._generate(*args, **kwargs)
            spent["generate_s"] += time.perf_counter() - began
            return found

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.last = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.last = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "reward" not in logs:
                return
            now = time.perf_counter()
            rows.append(
                {
                    "step_s": now - self.last,
                    "generate_s": spent["generate_s"],
                    "reward": float(logs["reward"]),
                    "tokens": float(logs["completions/mean_length"]) * sequences,
                    "grad_norm": float(logs["grad_norm"]),
                }
            )
            self.last, spent["generate_s"] = now, 0.0

    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    trainer = Timed(
        model=spec["model"],
        reward_funcs=reward,
        args=GRPOConfig(**keys, model_init_kwargs={"dtype": "float32"}),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    out.write_text(json.dumps({"steps": rows}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
