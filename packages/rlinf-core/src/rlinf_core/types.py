"""Shared types and protocols. Importing this module loads neither ray nor torch.

Shape legend: B sequences, T padded positions, P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Prompt:
    """One prompt of a step.

    ``id`` is unique in its step; ``group_size`` responses are drawn for it. ``step`` keys the random
    numbers together with ``id``. ``greedy`` asks for the most likely token at every position.
    """

    id: str
    text: str
    answer: str = ""
    group_size: int = 1
    step: int = 0
    greedy: bool = False
    fields: dict[str, Any] = field(default_factory=dict)

    def account_ids(self) -> tuple[str, ...]:
        """The ids of the samples that this prompt stands for in the step's account."""
        return tuple(f"{self.id}/{i}" for i in range(self.group_size))


@dataclass(slots=True)
class Sample:
    """One prompt with one response.

    ``id`` is ``f"{group}/{index}"`` where ``group`` is the prompt's id. ``response_ids`` are the token
    ids as sampled (R, never decoded and re-encoded), ``logprobs`` (R) the behaviour log-probabilities of
    those tokens at the sampling temperature (at temperature 1 when decoded greedily), ``versions`` (R) the
    policy version that drew each. The end token, when drawn, is the last entry of ``response_ids`` and
    ``finish_reason`` is ``"stop"``; it is
    ``"length"`` when the limit cut the response. ``reward`` is ``None`` until scored, and stays ``None``
    when it could not be computed (``info`` then says why).
    """

    id: str
    group: str
    index: int
    group_size: int
    prompt_text: str
    prompt_ids: list[int]
    response_ids: list[int]
    response_text: str
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    answer: str = ""
    reward: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens (P + R)."""
        return len(self.prompt_ids) + len(self.response_ids)

    def account_ids(self) -> tuple[str, ...]:
        return (self.id,)


@dataclass(slots=True)
class Trajectory:
    """One episode or segment of an environment: named arrays with leading time dimension."""

    id: str
    arrays: dict[str, Any]
    info: dict[str, Any] = field(default_factory=dict)

    def account_ids(self) -> tuple[str, ...]:
        return (self.id,)


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How tokens are drawn. ``temperature`` > 0; greedy decoding is asked for per request.

    Random numbers are a function of (seed, request key, position) alone, never of batch or order.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class GenerateRequest:
    """One response to draw. ``key`` is (step, prompt id, sample index) and keys the random numbers."""

    id: str
    prompt_ids: tuple[int, ...]
    key: tuple[int | str, ...]
    greedy: bool = False


@dataclass(slots=True, frozen=True)
class Generated:
    """A finished response: tokens, their behaviour log-probs, the version that drew each."""

    id: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


@dataclass(slots=True, frozen=True)
class ParallelInfo:
    """A rank's place in its group. ``init_method`` is a torch rendezvous (``file://``, ``tcp://``) or ``""``
    when ``world_size`` is 1. ``threads`` is the number of CPU threads the rank may use."""

    rank: int = 0
    world_size: int = 1
    init_method: str = ""
    device: str = "cpu"
    threads: int = 1
    timeout_s: float = 120.0


@dataclass(slots=True, frozen=True)
class StepInfo:
    """What one optimizer step did."""

    grad_norm: float
    lr: float


Batch = Mapping[str, Any]
ForwardFn = Callable[[Any, Batch], Any]
"""(model, micro-batch) -> outputs that the loss function reads, e.g. log-probs [B, T]."""
LossFn = Callable[[Any, Batch], "tuple[torch.Tensor, float, dict[str, float]]"]
"""(outputs, micro-batch) -> (loss *sum*, its count, sums of metrics)."""


@runtime_checkable
class Trainer(Protocol):
    """One rank of a trainer backend (entry-point group ``rlinf.trainers``; the entry is the class).

    The constructor takes the backend's own config node. A loss is a sum and a count: gradients of the
    sum accumulate, and ``step(count)`` divides once by the count over all micro-batches *and ranks*.
    """

    tokenizer: Any

    def setup(self, model: Any, forward_fn: ForwardFn, parallel: ParallelInfo, *, seed: int) -> None:
        """Build model and optimizer. ``model`` is the model config node (path or tiny)."""

    def logprobs(self, batch: Batch) -> Any:
        """``forward_fn`` without gradients, in evaluation mode."""

    def accumulate(self, batch: Batch, loss_fn: LossFn) -> tuple[float, float, dict[str, float]]:
        """Forward and backward of one micro-batch; returns (loss sum, count, metric sums) of this rank."""

    def step(self, count: float) -> StepInfo:
        """Reduce over ranks, divide by ``count`` (the global one), clip, update, zero the gradients."""

    def reduce(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum each value over ranks, in rank order (collective); ranks may give different names."""

    def restart_optimizer(self, cfg: Any) -> None:
        """Begin a new phase with the weights as they are: fresh optimizer state and schedule from ``cfg``."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters under their Hugging Face names."""

    def onload(self) -> None: ...

    def offload(self) -> None: ...

    def save(self, path: Path) -> None:
        """Exact state (weights, optimizer, schedule, RNG), written aside and renamed when whole."""

    def load(self, path: Path) -> None: ...

    def export(self, path: Path) -> None:
        """Hugging Face directory (config, safetensors, tokenizer)."""


@runtime_checkable
class Rollout(Protocol):
    """A rollout backend (entry-point group ``rlinf.rollouts``; the entry is the class).

    The constructor takes the backend's own config node. One engine per process.
    """

    tokenizer: Any
    version: int

    def setup(self, model: Any, parallel: ParallelInfo, *, seed: int) -> None: ...

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> Iterator[Generated]:
        """Yield responses as they finish, in any order."""

    def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Install whole parameters under Hugging Face names; later tokens carry ``version``."""

    def onload(self) -> None: ...

    def offload(self) -> None: ...


@runtime_checkable
class Env(Protocol):
    """A vectorised environment (entry-point group ``rlinf.envs``). One autoreset meaning: an episode that
    ends at step t is reset within step t; the observation before the reset is in ``info["final_obs"]``."""

    num_envs: int

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]: ...

    def close(self) -> None: ...
