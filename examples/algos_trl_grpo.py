"""rlinf-algos inside TRL's GRPOTrainer: its generation, data and optimizer loop, our advantage, log-probs and loss.

Needs ``pip install trl``. A model of two layers is built from a config, so nothing is downloaded; the reward is the
share of letters "a". Run: ``python examples/algos_trl_grpo.py [steps]`` (seconds on a CPU).
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rlinf_algos import group_advantage, kl_loss, next_token_logprobs, ppo_clip_loss


class Trainer(GRPOTrainer):
    """GRPOTrainer with this library's advantage (by id; unscorable samples left out) and DAPO's loss."""

    def _calculate_rewards(self, inputs: Any, prompts: Any, *rest: Any) -> torch.Tensor:
        per_function = super()._calculate_rewards(inputs, prompts, *rest)
        missing = per_function.isnan().all(dim=1)
        total = (per_function * self.reward_weights.to(per_function.device)).nansum(dim=1)
        rewards = total.masked_fill(missing, torch.nan)
        ids = torch.arange(len(rewards)) // self.num_generations
        self.our_advantages = group_advantage(rewards, ids, group_size=self.num_generations)
        return per_function

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        count, rank = len(output["completion_ids"]), self.accelerator.process_index
        output["advantages"] = self.our_advantages[rank * count : (rank + 1) * count].to(self.accelerator.device)
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask = attention.clone()
        mask[:, : inputs["prompt_ids"].shape[1]] = 0
        logits = model(input_ids=ids, attention_mask=attention).logits
        logprobs = next_token_logprobs(logits, ids, mask, temperature=self.temperature)
        place = (slice(None), slice(inputs["prompt_ids"].shape[1], None))
        mine, kept = logprobs[place], mask[place]
        old = inputs.get("old_per_token_logps")
        old = mine.detach() if old is None else old
        loss = ppo_clip_loss(mine, old, inputs["advantages"], kept, clip_low=0.2, clip_high=0.28)
        if self.beta:
            loss = loss.plus(kl_loss(mine, inputs["ref_per_token_logps"], kept), self.beta)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["ratio"].append(loss.metric_means()["ratio"])
        # One division by the tokens of the whole batch, over micro-batches and ranks: TRL counts them.
        normaliser = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if mode == "train":
            normaliser = normaliser * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return loss.sum / normaliser


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocab = {c: i for i, c in enumerate(["<pad>", "<eos>", *"abcdefgh "])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def share_of_a(completions: list[str], **_: Any) -> list[float]:
    return [c.replace(" ", "").count("a") / max(len(c.replace(" ", "")), 1) for c in completions]


def train(steps: int = 30, seed: int = 0) -> list[float]:
    """Train and return the mean reward of every step."""
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=Qwen2ForCausalLM(config),
            processing_class=tokenizer,
            reward_funcs=share_of_a,
            train_dataset=Dataset.from_dict({"prompt": ["bc", "d", "efg", "h"] * 50}),
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=16,
                gradient_accumulation_steps=2,
                num_generations=8,
                max_completion_length=8,
                max_steps=steps,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                bf16=False,
                seed=seed,
            ),
        )
        trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    rewards = train(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
    print(f"reward: first 3 steps {sum(rewards[:3]) / 3:.3f}, last 3 steps {sum(rewards[-3:]) / 3:.3f}")
