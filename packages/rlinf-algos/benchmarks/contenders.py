"""What is compared: per case, ours and its peers on the same inputs. Peers that are not installed are left out.

Every factory returns a function without arguments; ``factors`` scale the sizes down for a smoke run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

import rlinf_algos as ours

Run = Callable[[], Any]
GAMMA, LAM = 0.99, 0.95


def optional(module: str) -> Any:
    """The module, or None when its distribution is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name.split(".")[0]):
            return None
        raise


def gae_loop(rewards: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The plain formula: one step of time after the other."""
    advantages = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    length = rewards.shape[1]
    for t in reversed(range(length)):
        after = values[:, t + 1] if t + 1 < length else torch.zeros_like(running)
        running = rewards[:, t] + GAMMA * after - values[:, t] + GAMMA * LAM * running
        advantages[:, t] = running
    return advantages


def gae(rows: int, length: int) -> dict[str, Run]:
    torch.manual_seed(0)
    rewards, values = torch.randn(rows, length), torch.randn(rows, length)
    mask = torch.ones(rows, length, dtype=torch.bool)
    gaps = mask.clone()
    gaps[:, length // 3 : length // 2] = False
    ends = torch.rand(rows, length) < 0.01
    found: dict[str, Run] = {
        "ours": lambda: ours.gae(rewards, values, mask, gamma=GAMMA, lam=LAM)[0],
        "ours, with gaps": lambda: ours.gae(rewards, values, gaps, gamma=GAMMA, lam=LAM)[0],
        "ours, with episode ends": lambda: ours.gae(rewards, values, mask, gamma=GAMMA, lam=LAM, terminated=ends)[0],
        "loop over time": lambda: gae_loop(rewards, values),
    }
    functional = optional("torchrl.objectives.value.functional")
    if functional is not None:
        after = torch.nn.functional.pad(values[:, 1:], (0, 1))[..., None]
        done = torch.zeros(rows, length, 1, dtype=torch.bool)
        done[:, -1] = True
        v, r = values[..., None], rewards[..., None]
        vec, loop = functional.vec_generalized_advantage_estimate, functional.generalized_advantage_estimate
        found["torchrl vec"] = lambda: vec(GAMMA, LAM, v, after, r, done, done)[0][..., 0]
        found["torchrl loop"] = lambda: loop(GAMMA, LAM, v, after, r, done, done)[0][..., 0]
    return found


def group_advantage(count: int, size: int = 8) -> dict[str, Run]:
    torch.manual_seed(0)
    rewards = torch.rand(count)
    ids = torch.arange(count) // size
    names = [f"prompt-{i // size}" for i in range(count)]
    found: dict[str, Run] = {
        "ours, tensor ids": lambda: ours.group_advantage(rewards, ids, eps=1e-4),
        "ours, string ids": lambda: ours.group_advantage(rewards, names, eps=1e-4),
    }
    utils = optional("trl.trainer.utils")
    if utils is not None:

        def trl() -> torch.Tensor:  # the lines of GRPOTrainer, which has no function for them
            mean = torch.nanmean(rewards.view(-1, size), dim=1).repeat_interleave(size, dim=0)
            std = utils.nanstd(rewards.view(-1, size), dim=1).repeat_interleave(size, dim=0)
            return torch.nan_to_num((rewards - mean) / (std + 1e-4), nan=0.0)

        found["TRL (fixed size, in order)"] = trl

    def by_dictionary() -> torch.Tensor:
        groups: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            groups.setdefault(name, []).append(i)
        out = torch.empty_like(rewards)
        for members in groups.values():
            r = rewards[members]
            out[members] = (r - r.mean()) / (r.std() + 1e-4)
        return out

    found["loop over groups"] = by_dictionary
    return found


def plain_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula as one writes it."""
    logp = logits.log_softmax(-1)
    return logp.gather(-1, ids[..., None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def logprobs(tokens: int, vocab: int, *, entropy: bool, backward: bool) -> dict[str, Run]:
    torch.manual_seed(0)
    logits = torch.empty(1, tokens, vocab).normal_(0, 3)
    ids = torch.randint(vocab, (1, tokens))

    def wrap(function: Callable[[torch.Tensor], Any]) -> Run:
        def run() -> Any:
            if not backward:
                with torch.no_grad():
                    return function(logits)
            leaf = logits.detach().requires_grad_()
            out = function(leaf)
            (out[0].sum() + 0.1 * out[1].sum() if entropy else out.sum()).backward()
            return leaf.grad

        return run

    mine = ours.token_logprobs_and_entropy if entropy else ours.token_logprobs
    found = {
        "ours": wrap(lambda x: mine(x, ids)),
        "plain formula": wrap(lambda x: plain_logprobs(x, ids) if entropy else plain_one(x, ids)),
    }
    utils = optional("trl.trainer.utils")
    if utils is not None:
        peer = utils.selective_log_softmax_and_entropy if entropy else utils.selective_log_softmax
        found["TRL"] = wrap(lambda x: peer(x, ids))
    return found


def plain_one(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def hidden_logprobs(tokens: int, width: int, vocab: int) -> dict[str, Run]:
    """From hidden states, forward and backward, with entropy."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width), torch.randn(vocab, width) / width**0.5
    ids = torch.randint(vocab, (tokens,))

    def wrap(function: Callable[[torch.Tensor, torch.Tensor], Any]) -> Run:
        def run() -> Any:
            h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            out = function(h, w)
            (out[0].sum() + 0.1 * out[1].sum()).backward()
            return h.grad

        return run

    return {
        "ours, hidden states": wrap(lambda h, w: ours.linear_token_logprobs_and_entropy(h, w, ids)),
        "ours, logits": wrap(lambda h, w: ours.token_logprobs_and_entropy(h @ w.t(), ids, inplace_backward=True)),
        "plain formula": wrap(lambda h, w: plain_logprobs(h @ w.t(), ids)),
    }


def aggregation(rows: int, length: int) -> dict[str, Run]:
    torch.manual_seed(0)
    x, old, a = (torch.randn(rows, length) for _ in range(3))
    losses, mask = torch.randn(rows, length), torch.rand(rows, length) < 0.7
    return {
        "ppo_clip_loss, all of it": lambda: ours.ppo_clip_loss(x, old, a, mask),
        "aggregate: token_mean": lambda: ours.aggregate(losses, mask),
        "aggregate: sequence_mean_of_token_means": lambda: ours.aggregate(losses, mask, "sequence_mean_of_token_means"),
    }


def dense_karmarkar_karp(weights: list[int], parts: int) -> list[list[int]]:
    """The textbook method on a heap: every solution has all its parts."""
    import heapq

    heap = [(-w, i, [(0, [])] * (parts - 1) + [(w, [i])]) for i, w in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, i, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = sorted(((x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)), key=lambda s: s[0])
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], i, merged))
    return [items for _, items in heap[0][2]]


def balancing(count: int, parts: int) -> dict[str, Run]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(count, generator=generator).mul(0.8).add(6).exp().long().clamp(1, 8192).tolist()
    return {
        "ours": lambda: ours.karmarkar_karp(lengths, parts),
        "ours, equal sizes": lambda: ours.karmarkar_karp(lengths, parts, equal_size=True),
        "textbook": lambda: dense_karmarkar_karp(lengths, parts),
        "first_fit_decreasing": lambda: ours.first_fit_decreasing(lengths, 16384),
    }


CASES: dict[str, Callable[[], dict[str, Run]]] = {
    "GAE 64 x 1024": lambda: gae(64, 1024),
    "GAE 512 x 8192": lambda: gae(512, 8192),
    "group advantage 1024": lambda: group_advantage(1024),
    "log-probs 512 x 32k": lambda: logprobs(512, 32_000, entropy=False, backward=False),
    "log-probs and entropy 512 x 32k": lambda: logprobs(512, 32_000, entropy=True, backward=False),
    "log-probs 512 x 32k, with backward": lambda: logprobs(512, 32_000, entropy=False, backward=True),
    "log-probs and entropy 512 x 32k, with backward": lambda: logprobs(512, 32_000, entropy=True, backward=True),
    "from hidden states 512 x 256 x 32k, with backward": lambda: hidden_logprobs(512, 256, 32_000),
    "aggregation 64 x 1024": lambda: aggregation(64, 1024),
    "Karmarkar-Karp 4096 into 64": lambda: balancing(4096, 64),
}
LARGE: dict[str, Callable[[], dict[str, Run]]] = {
    "log-probs and entropy 4096 x 152k": lambda: logprobs(4096, 152_000, entropy=True, backward=False),
    # Peers need more than 15 GiB for the backward pass at 4096 rows.
    "log-probs and entropy 1024 x 152k, with backward": lambda: logprobs(1024, 152_000, entropy=True, backward=True),
    "log-probs and entropy 4096 x 152k, with backward, ours alone": lambda: {
        "ours": logprobs(4096, 152_000, entropy=True, backward=True)["ours"]
    },
}
SMOKE: dict[str, Callable[[], dict[str, Run]]] = {
    "GAE": lambda: gae(4, 100),
    "group advantage": lambda: group_advantage(32),
    "log-probs": lambda: logprobs(16, 500, entropy=True, backward=True),
    "from hidden states": lambda: hidden_logprobs(16, 8, 500),
    "aggregation": lambda: aggregation(4, 32),
    "Karmarkar-Karp": lambda: balancing(64, 4),
}
