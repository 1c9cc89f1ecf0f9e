"""GRPO in a bare torch loop: no trainer, no runtime, rlinf-algos and torch alone.

The task: given a digit d, say d, d+1, ..., d+5 (mod 10) and then stop; a response is as long as the policy makes it.
The reward is the share of right symbols. Run: ``python examples/algos_torch_loop.py [steps]`` (a few seconds).
"""

import sys

import torch

from rlinf_algos import aggregate, group_advantage, next_token_logprobs, ppo_clip_loss

VOCAB, STOP, LENGTH, GROUP, PROMPTS, CLIP_HIGH = 11, 10, 8, 8, 16, 0.28


class Policy(torch.nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(VOCAB, width), torch.nn.Linear(width, VOCAB)
        self.gru = torch.nn.GRU(width, width, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(self.embed(ids))[0])


@torch.no_grad()
def generate(policy: Policy, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, 1 + LENGTH] and the mask of what the policy produced (its stop symbol included)."""
    ids, alive = prompts[:, None], torch.ones(len(prompts), dtype=torch.bool)
    mask = torch.zeros(len(prompts), 1, dtype=torch.bool)
    for _ in range(LENGTH):
        drawn = torch.multinomial(policy(ids)[:, -1].softmax(-1), 1).squeeze(1)
        ids, mask = torch.cat((ids, drawn[:, None]), 1), torch.cat((mask, alive[:, None]), 1)
        alive = alive & (drawn != STOP)
    return ids, mask


def score(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    wanted = torch.cat(((ids[:, :1] + torch.arange(6)) % 10, torch.full((len(ids), 2), STOP)), 1)
    right = (ids[:, 1:] == wanted) & mask[:, 1:]
    return right.sum(1) / 7 - 0.1 * (mask.sum(1) > 7)


def train(steps: int = 200, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    history = []
    for step in range(steps):
        prompts = torch.randint(10, (PROMPTS,)).repeat_interleave(GROUP)
        ids, mask = generate(policy, prompts)
        rewards = score(ids, mask)
        advantages = group_advantage(rewards, torch.arange(PROMPTS).repeat_interleave(GROUP), group_size=GROUP)
        with torch.no_grad():
            old = next_token_logprobs(policy(ids), ids, mask)
        _, count = aggregate(old, mask)  # of the whole batch, whatever the micro-batches are
        for rows in torch.arange(len(ids)).split(48):
            logprobs = next_token_logprobs(policy(ids[rows]), ids[rows], mask[rows])
            loss = ppo_clip_loss(logprobs, old[rows], advantages[rows], mask[rows], clip_high=CLIP_HIGH)
            loss.over(count).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(float(rewards.mean()))
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4d}  reward {history[-1]:.3f}  length {mask.sum() / len(ids):.2f}")
    return history


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
