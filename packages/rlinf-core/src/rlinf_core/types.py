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
    numbers together with ``id``. ``greedy`` asks for the most likely token at every position. ``messages`` (objects
    with ``role`` and ``content``) stand for the conversation whose text ``text`` is, for the model's chat template.
    """

    id: str
    text: str
    answer: str = ""
    group_size: int = 1
    step: int = 0
    greedy: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] | None = None

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
    A response ends after the token that completes one of the texts ``stop`` (in what the response's tokens decode
    to, special tokens included); no token is cut off. With ``ignore_eos`` the model's own end tokens are drawn like any
    other and end nothing.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


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
"""A packed micro-batch: S sequences laid end to end without padding. Shape legend: N tokens of all sequences together,
M of them targets (response tokens).

``ids`` list of S names; ``input_ids``, ``position_ids`` int64 [N] (positions begin at 0 in each sequence);
``cu_seqlens`` int32 [S + 1], where each sequence begins, and N; ``max_len`` int, tokens of the longest; ``predict``
int64 [M], the places in [N] whose logits predict the targets; ``targets`` int64 [M]; ``mask`` bool [M]; ``segments``
int64 [M], the sequence of each target, counted from 1. Whatever else a loss reads is [M] or [S] and a constant.
"""


@dataclass(slots=True, frozen=True)
class VocabShard:
    """The part of the vocabulary that this rank's logits have: from token ``start`` on, the rest with the other ranks
    of ``group`` (a torch.distributed group). ``group`` is ``None`` where the logits have the whole vocabulary."""

    group: Any = None
    start: int = 0


HeadFn = Callable[["torch.Tensor", Batch, VocabShard], "dict[str, torch.Tensor]"]
"""(logits [M, V] of the ``predict`` places, micro-batch, shard) -> what the loss reads, each [M] (log-probs, …)."""
LossFn = Callable[["dict[str, torch.Tensor]", Batch], "tuple[torch.Tensor, float, dict[str, float]]"]
"""(outputs of the head, micro-batch) -> (loss *sum*, its count, sums of metrics)."""


@dataclass(slots=True, frozen=True)
class NetworkSpec:
    """A network for a trainer that is no causal LM of a config node: any ``torch.nn.Module`` and how it is run.

    Its micro-batches are mappings too, with ``ids`` (list of names, for messages) and whatever tensors ``forward`` and
    the loss read; a trainer moves the tensors to its device and looks at nothing else.

    Attributes:
        build: seed -> the network on the CPU. Equal seeds give equal weights. Floating-point parameters are trained in
            the format that ``dtype`` asks for and are cast to it; buffers stay as they are made. Every parameter is
            trained: what is not must be a buffer.
        forward: (network, micro-batch on the device) -> outputs that the loss reads. ``network`` may be a backend's
            wrapper: run it by calling it (``network(x)``), not one of its parts or methods, or hooks that gather
            sharded weights and autocast are missed. It runs in training mode inside ``accumulate`` and in evaluation
            mode inside ``forward``; it must not change buffers (``Trainer.update_buffers`` does, equally on all ranks).
        filler: a micro-batch that adds nothing, for ranks that have run out of theirs when a backend's ranks must run
            equally often; the same parameters must take part in its forward as in that of others. No loss is computed
            of it.
        export: (network, weights, directory) -> writes all that a load needs into the directory, which exists and is
            empty. The parameters of ``network`` may be empty: what it was made of may be read of it, numbers are in
            ``weights`` alone (whole, on the CPU, parameters in ``dtype``, persistent buffers as they are).
        dtype: "float32", "float64" or "bfloat16"; the last trains float32 masters and computes in bfloat16.
    """

    build: Callable[[int], torch.nn.Module]
    forward: Callable[[torch.nn.Module, Batch], dict[str, torch.Tensor]]
    filler: Callable[[], Batch]
    export: Callable[[torch.nn.Module, dict[str, torch.Tensor], Path], None]
    dtype: str = "float32"


@runtime_checkable
class Trainer(Protocol):
    """One rank of a trainer backend (entry-point group ``rlinf.trainers``; the entry is the class).

    The constructor takes the backend's own config node. A loss is a sum and a count: gradients of the
    sum accumulate, and ``step(count)`` divides once by the count over all micro-batches *and replicas*.

    A *replica* is the ranks that hold one copy of the model together (tensor and pipeline parallel); the ranks of a
    replica must be given the same batches, which ``share`` brings about. Without model parallelism each rank is one.
    """

    tokenizer: Any

    @property
    def micro_batch_tokens(self) -> int:
        """The most tokens that a micro-batch should have; who cuts the batch reads it."""

    def setup(
        self, model: Any, head: HeadFn | None, parallel: ParallelInfo, *, seed: int, role: str = "policy"
    ) -> None:
        """Build model and optimizer. ``model`` is the model config node (path or tiny) of a causal LM, or a
        ``NetworkSpec``: then ``head`` is ``None``, ``role`` "policy", ``tokenizer`` stays ``None`` and outputs are what
        ``NetworkSpec.forward`` gives. A backend that trains causal LMs only refuses it by name.

        ``role="critic"``: the same network with one number per position instead of logits; ``head`` is then ``None``
        and the outputs are ``{"values": [M]}``.
        """

    def share(self, items: Sequence[Any]) -> list[Any]:
        """The items of all ranks of this rank's replica, in rank order; one's own where a rank is a replica."""

    def most(self, number: int) -> int:
        """The largest ``number`` over all ranks. Collective."""

    def forward(self, batches: Sequence[Batch]) -> list[dict[str, torch.Tensor]]:
        """The head's outputs of each micro-batch without gradients, in evaluation mode, on every rank of the replica.

        Collective. Replicas may give different numbers of micro-batches.
        """

    def accumulate(self, batches: Sequence[Batch], loss_fn: LossFn) -> tuple[float, float, dict[str, float]]:
        """Forward and backward of micro-batches; returns (loss sum, count, metric sums) of this rank's replica.

        Collective. Replicas may give different numbers of micro-batches, none too: a backend whose ranks must run
        equally often fills up with empty ones.
        """

    def step(self, count: float) -> StepInfo:
        """Reduce over replicas, divide by ``count`` (the global one), clip, update, zero the gradients. Collective."""

    def reduce(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum each value over replicas, in rank order (collective); replicas may give different names, the ranks of
        one replica give the same."""

    def gather(self, value: Any) -> list[Any]:
        """The (picklable) values of all replicas, in rank order; the ranks of one replica give the same. Collective."""

    def restart_optimizer(self, cfg: Any) -> None:
        """Begin a new phase with the weights as they are: fresh optimizer state and schedule from ``cfg``."""

    def update_buffers(self, change: Callable[[torch.nn.Module], None]) -> None:
        """Let ``change`` write to the network's buffers (running statistics), in evaluation mode, without gradients.

        Every rank calls it with the same data in the same order (see ``gather``), so that buffers stay equal on all
        ranks. Buffers are on the trainer's device; parameters, which may be parts here, are not to be touched or read.
        """

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters and persistent buffers under their Hugging Face names (of a ``NetworkSpec``: their names in
        the network), tied ones once. Collective: every rank runs it to its end; what comes out is for rank 0 (other
        ranks may be given nothing)."""

    def onload(self) -> None: ...

    def offload(self) -> None: ...

    def save(self, path: Path) -> None:
        """Exact state (weights, optimizer, schedule, RNG), written aside and renamed when whole. Collective."""

    def load(self, path: Path) -> None:
        """Restore what ``save`` wrote, bit-equal for the same ranks; another split of the model is resharded or
        refused by name, and so is what is half-written or of another model. Collective."""

    def export(self, path: Path) -> None:
        """Hugging Face directory (config, safetensors, tokenizer). Collective."""

    def close(self) -> None: ...


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

    def close(self) -> None:
        """End the engine, and its processes where it has some; it may be called twice, or before ``setup``."""


@runtime_checkable
class Env(Protocol):
    """A vectorised environment (entry-point group ``rlinf.envs``). One autoreset meaning: an episode that
    ends at step t is reset within step t; the observation before the reset is in ``info["final_obs"]``."""

    num_envs: int

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]: ...

    def close(self) -> None: ...
