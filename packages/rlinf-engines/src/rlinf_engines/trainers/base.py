"""What all trainer backends have in common.

A backend is a subclass of ``TrainerBase``. It must give ``_build``, ``_new_optimizer``, ``step``, ``weights``,
``_whole_state`` and ``_install_state``, and replaces more where it differs (see "for backends" below). Importing this
module loads neither torch nor transformers.

Shape legend: N tokens of all sequences of a micro-batch together, M of them predicted, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError
from rlinf_core.types import Batch, HeadFn, LossFn, NetworkSpec, ParallelInfo, StepInfo, VocabShard
from rlinf_engines.trainers.schedule import learning_rate

if TYPE_CHECKING:
    import torch

    from rlinf_engines.offload import DeviceStore
    from rlinf_engines.trainers.group import RankGroup

ROLES = ("policy", "critic")


class TrainerBase:
    """One rank of a trainer backend (see ``rlinf_core.types.Trainer``).

    Between ``offload`` and ``onload`` nothing works but ``reduce``, ``most``, ``share``, ``barrier`` and ``close``;
    all else is refused.

    Attributes:
        model: the network (a backend's own kind of module); its parameters are what is trained.
        steps_done: optimizer steps since ``setup``, ``restart_optimizer`` or as loaded.
        replica, replicas: which copy of the model this rank belongs to, and how many there are.
        lockstep: whether every forward and backward is collective, so that ranks must run equally often.
        spec: what the network is and how it is run, where it is no causal LM.
        any_network: whether the backend trains such networks.
        shares_prompts: whether prompts that a micro-batch has several times are computed once (see ``sharing``).
        memory_knobs: config keys that lower the use of memory, for messages.
    """

    requires: tuple[str, ...] = ("transformers", "tokenizers", "safetensors")
    lockstep: bool = False
    any_network: bool = True
    memory_knobs: str = "lower trainer.micro_batch_tokens, or set trainer.activation_checkpointing=true"

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.tokenizer: Any = None
        self.model: Any = None
        self.optimizer: Any = None
        self.head: HeadFn | None = None
        self.spec: NetworkSpec | None = None
        self.role = "policy"
        self.shares_prompts = False
        self.steps_done = 0
        self.parallel = ParallelInfo()
        self.replica = 0
        self.replicas = 1
        self.device: torch.device
        self.dtype: torch.dtype
        self.group: RankGroup | None = None
        # The torch.distributed group of this rank's replica, where a replica has several ranks.
        self.replica_group: Any = None
        self._seed = 0
        self._parameter_names: frozenset[str] = frozenset()
        self._store: DeviceStore | None = None

    @classmethod
    def ranks_problem(cls, cfg: Any, ranks: int) -> str:
        """Why a trainer with the config node ``cfg`` cannot have ``ranks`` ranks; empty when it can."""
        return ""

    @property
    def micro_batch_tokens(self) -> int:
        """The most tokens that a micro-batch should have; who cuts the batch reads it."""
        return int(self.cfg.micro_batch_tokens)

    # -- life -------------------------------------------------------------------------------------------------------

    def setup(
        self, model: Any, head: HeadFn | None, parallel: ParallelInfo, *, seed: int, role: str = "policy"
    ) -> None:
        """Build model and optimizer. ``model`` is the model config node or a ``NetworkSpec``, ``seed`` the root seed.

        With ``world_size`` above 1 this opens torch.distributed's default group; a peer that does not come within
        ``parallel.timeout_s`` is an error that names it.
        """
        import torch

        from rlinf_engines.models import load_tokenizer, torch_dtype
        from rlinf_engines.offload import DeviceStore
        from rlinf_engines.seeds import derive_seed
        from rlinf_engines.trainers.group import RankGroup
        from rlinf_engines.trainers.network import network_format

        if role not in ROLES:
            raise ConfigError(f"trainer: role {role!r} is unknown; choose from {', '.join(ROLES)}")
        if isinstance(model, NetworkSpec):
            if not self.any_network:
                raise ConfigError(
                    f"trainer.name: {self.cfg.name} trains causal language models only; use trainer=torch or "
                    "trainer=deepspeed for this model"
                )
            dtype, self.spec = network_format(model, head, role), model
        elif (head is None) != (role == "critic"):
            raise ConfigError(f"trainer: a {role} is set up {'without a' if role == 'critic' else 'with a'} head")
        else:
            dtype = model.dtype
        torch.set_num_threads(parallel.threads)
        self.parallel, self.head, self.role, self._seed = parallel, head, role, seed
        self.replica, self.replicas = parallel.rank, parallel.world_size
        self.device = torch.device(parallel.device)
        self.dtype = torch_dtype(dtype)
        self.tokenizer = load_tokenizer(model) if self.spec is None else None
        self.group = RankGroup(parallel, self.device)
        self.group.join()
        try:
            with self.memory_guard("setup"):
                self._build(model, role)
                self._parameter_names = frozenset(name for name, _ in self.model.named_parameters())
                self._new_optimizer()
        except BaseException:
            self.close()
            raise
        self._store = DeviceStore("trainer", self.device, self._device_tensors, parallel.threads)
        # For what a forward may draw (dropout); ranks see different samples and draw different numbers.
        torch.manual_seed(derive_seed(seed, "trainer", self.replica))

    def restart_optimizer(self, cfg: Any) -> None:
        """Begin another phase: a fresh optimizer and schedule from the node ``cfg``, the weights kept."""
        self._check_loaded("restart_optimizer")
        self.cfg = cfg
        self.steps_done = 0
        self._new_optimizer()

    def onload(self) -> None:
        """Bring weights, gradients and optimizer state back to the device, bit-equal (see ``DeviceStore``)."""
        if self._store is not None:
            self._store.onload()

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory; any time between two calls."""
        if self._store is not None:
            self._store.offload()

    def close(self) -> None:
        """Leave the process group, if this trainer opened one, and give host memory back."""
        if self._store is not None:
            self._store.close()
        if self.group is not None:
            self.group.leave()

    # -- between ranks ----------------------------------------------------------------------------------------------

    def share(self, items: Sequence[Any]) -> list[Any]:
        """The items of all ranks of this rank's replica, in rank order; one's own where a rank is a replica."""
        if self.replicas == self.parallel.world_size:
            return list(items)
        mine = (self.replica, list(items))
        everyone = self._ranks().everyone(mine, "sharing a batch", self.replica_group)
        return [item for replica, theirs in everyone if replica == self.replica for item in theirs]

    def most(self, number: int) -> int:
        """The largest ``number`` over all ranks. Collective."""
        return max(self._ranks().everyone(int(number), "agreeing on a number"))

    def reduce(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum each value over replicas, in float64 and rank order. Collective.

        Replicas may have different names; the ranks of one replica give the same values, which count once.
        """
        total: dict[str, float] = {}
        counted: set[int] = set()
        for replica, theirs in self._ranks().everyone((self.replica, dict(values)), "adding values"):
            if replica in counted:
                continue
            counted.add(replica)
            for name, value in theirs.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def gather(self, value: Any) -> list[Any]:
        """The (picklable) values of all replicas, in rank order; the ranks of one replica give the same. Collective."""
        everyone: dict[int, Any] = {}
        for replica, theirs in self._ranks().everyone((self.replica, value), "gathering values"):
            everyone.setdefault(replica, theirs)
        return list(everyone.values())

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._ranks().barrier()

    # -- forward and backward ---------------------------------------------------------------------------------------

    def forward(self, batches: Sequence[Batch]) -> list[dict[str, torch.Tensor]]:
        """The head's outputs of each micro-batch, [M] each (of a ``NetworkSpec``: what its ``forward`` gives), without
        gradients, in evaluation mode (dropout off)."""
        import torch

        self._check_loaded("forward")
        self._set_mode(train=False)
        found = []
        with torch.no_grad():
            for batch, real in self._rounds(batches):
                with self.memory_guard("forward"):
                    outputs = self._outputs(self._prepared(batch))
                if real:
                    found.append(outputs)
        return found

    def accumulate(self, batches: Sequence[Batch], loss_fn: LossFn) -> tuple[float, float, dict[str, float]]:
        """Forward and backward of micro-batches; returns (loss sum, count, metric sums) of this rank's replica.

        Gradients of the loss sums add up until ``step``. A loss that is NaN or infinite raises ``NonFiniteError``
        before its micro-batch adds anything.
        """
        self._check_loaded("accumulate")
        self._set_mode(train=True)
        total, count = 0.0, 0.0
        sums: dict[str, float] = {}
        for batch, real in self._rounds(batches):
            with self.memory_guard("accumulate"):
                batch = self._prepared(batch)
                outputs = self._outputs(batch)
                if real:
                    loss, counted, metrics = loss_fn(outputs, batch)
                    total += self.check_loss(loss, batch)
                    count += float(counted)
                    for name, value in metrics.items():
                        sums[name] = sums.get(name, 0.0) + float(value)
                else:
                    loss = zero_loss(outputs)
                # Where ranks run in step every parameter takes part, whatever outputs the loss reads.
                if self.lockstep and (self.spec is not None or not loss.requires_grad):
                    loss = loss + zero_loss(outputs)
                if loss.requires_grad:  # a micro-batch in which everything is masked has no gradient
                    self._backward(loss)
        return total, count, sums

    def step(self, count: float) -> StepInfo:
        """Reduce over replicas, divide by ``count`` (the global one), clip, update, zero the gradients. Collective.

        A gradient that is NaN or infinite raises ``NonFiniteError`` on every rank before anything is updated.
        """
        raise NotImplementedError

    def learning_rate(self) -> float:
        """The learning rate of the next optimizer step."""
        return learning_rate(self.cfg, self.steps_done)

    def filler(self) -> dict[str, Any]:
        """A micro-batch of one sequence of two tokens, its one target masked, for ranks that have run out of theirs; of
        a ``NetworkSpec`` its own."""
        import torch

        if self.spec is not None:
            return dict(self.spec.filler())
        return {
            "ids": ["filler"],
            "input_ids": torch.zeros(2, dtype=torch.int64),
            "position_ids": torch.arange(2),
            "cu_seqlens": torch.tensor([0, 2], dtype=torch.int32),
            "max_len": 2,
            "predict": torch.zeros(1, dtype=torch.int64),
            "targets": torch.zeros(1, dtype=torch.int64),
            "mask": torch.zeros(1, dtype=torch.bool),
            "segments": torch.ones(1, dtype=torch.int64),
        }

    # -- state ------------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters under Hugging Face names in ``model.dtype``, tied ones once, and persistent buffers (those
        of a ``NetworkSpec`` as they are); for rank 0. Collective."""
        raise NotImplementedError

    def update_buffers(self, change: Callable[[torch.nn.Module], None]) -> None:
        """Let ``change`` write to the network's buffers, in evaluation mode and without gradients.

        For what is not learnt by gradients (running statistics). Nothing is exchanged: every rank must call this with
        the same data in the same order (what ``gather`` gives, say), and buffers are then equal on all ranks. They are
        on this trainer's device, and keep their sizes and formats. ``change`` may not read or write parameters, of
        which a rank may have a part only. From then on ``forward``, ``weights`` and ``save`` give the new contents.
        """
        from rlinf_engines.trainers.network import change_buffers

        self._check_loaded("update_buffers")
        self._set_mode(train=False)
        change_buffers(self.model, change)

    def save(self, path: Path) -> None:
        """Write the exact state (weights, optimizer, schedule, RNG of every rank), aside and renamed when whole.

        Collective. Call between steps: accumulated gradients are not part of the state.
        """
        from rlinf_engines.trainers import checkpoint

        self._check_loaded("save")
        checkpoint.save(self, Path(path))

    def load(self, path: Path) -> None:
        """Restore what ``save`` wrote. Collective.

        Bit-equal for the same ranks and sharding; another split of the state is resharded. What is half-written, of
        another model, role or format is refused by name on every rank, before anything changes.
        """
        from rlinf_engines.trainers import checkpoint

        self._check_loaded("load")
        checkpoint.load(self, Path(path))

    def export(self, path: Path) -> None:
        """Write a Hugging Face directory (config, safetensors, tokenizer), or what a ``NetworkSpec`` writes; rank 0
        writes, aside and renamed when whole. Collective."""
        from rlinf_engines.models import empty_network, export_model
        from rlinf_engines.trainers.network import export_network

        self._check_loaded("export")
        failure: Exception | None = None
        weights = self.weights()
        if self.parallel.rank == 0:
            try:
                if self.spec is not None:
                    export_network(self.spec, self.model, {name: t.cpu() for name, t in weights}, Path(path))
                else:
                    config, generation = self._hf_configs()
                    network = empty_network(config, self.role)
                    if generation is not None:
                        network.generation_config = generation
                    whole = {name: tensor.cpu() for name, tensor in weights}
                    export_model(network, self.tokenizer, Path(path), self.dtype, whole)
            except Exception as error:  # raised by ``_agree``, after the collective part has run to its end
                failure = error
        for _ in weights:
            pass
        self._agree(failure, f"writing {path}")

    # -- guards -----------------------------------------------------------------------------------------------------

    @contextmanager
    def memory_guard(self, what: str) -> Iterator[None]:
        """Turn out-of-memory errors of torch inside into an ``RLinfError`` that names the keys that help, and failed
        collectives into one that says so."""
        import torch

        from rlinf_engines.trainers.group import is_peer_failure

        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(what, error) from error
        except RuntimeError as error:
            text = str(error)
            if "DefaultCPUAllocator" in text or "can't allocate memory" in text:
                raise self._out_of_memory(what, error) from error
            if is_peer_failure(error) and self.group is not None:
                raise self.group.peer_error(f"{what} at optimizer step {self.steps_done}", error) from error
            raise

    def _out_of_memory(self, what: str, error: BaseException) -> RLinfError:
        return RLinfError(
            f"trainer: out of memory on {self.device} in {what} (trainer.micro_batch_tokens is "
            f"{self.micro_batch_tokens}); {self.memory_knobs}, or give the other stages of the device less: {error}"
        )

    def check_count(self, count: float) -> None:
        """Refuse a count that cannot divide gradients."""
        if not (count > 0 and math.isfinite(count)):
            raise RLinfError(f"trainer.step: count is {count}; a step needs at least one counted token or sample")

    def check_loss(self, loss: torch.Tensor, batch: Batch) -> float:
        """The loss sum as a number; ``NonFiniteError`` with the samples' ids when it is none."""
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteError(f"loss sum is {value} at optimizer step {self.steps_done}{ids_of(batch)}")
        return value

    def bad_gradient(self, named: Iterable[tuple[str, torch.Tensor | None]]) -> NonFiniteError:
        """The error for a gradient norm that is not finite; ``named`` are this rank's gradients, whole or parts.

        Collective: to be called on every rank, when the norm that all ranks agree on is bad.
        """
        import torch

        mine = [name for name, grad in named if grad is not None and not bool(torch.isfinite(grad).all())]
        everyone = self._ranks().everyone(mine, "naming gradients that are not finite")
        bad = list(dict.fromkeys(name for theirs in everyone for name in theirs))
        where = f"in {len(bad)} parameters, first {bad[0]}" if bad else "in its norm"
        return NonFiniteError(f"gradient is not finite {where} at optimizer step {self.steps_done}")

    # -- for backends -----------------------------------------------------------------------------------------------

    def _build(self, model: Any, role: str) -> None:
        """Make ``self.model`` on ``self.device`` from the config node or ``NetworkSpec`` ``model``, equal on all
        replicas."""
        raise NotImplementedError

    def _new_optimizer(self) -> None:
        """Make ``self.optimizer`` from ``self.cfg``."""
        raise NotImplementedError

    def _whole_state(self) -> dict[str, Any] | None:
        """``{"weights": {name: tensor}, "optimizer": {name: {"exp_avg", "exp_avg_sq", "step"}}}``: whole tensors on the
        CPU under Hugging Face names, in the number format that is trained, on rank 0; ``None`` elsewhere. Collective.
        ``optimizer`` is empty before the first step."""
        raise NotImplementedError

    def _install_state(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of what ``_whole_state`` gave, which every rank is handed. Collective."""
        raise NotImplementedError

    def _fingerprint(self) -> dict[str, str]:
        """Number format and whole shape of each weight by its Hugging Face name, the same on every rank, for any
        sharding."""
        from rlinf_engines.models import named_weights

        return {name: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in named_weights(self.model)}

    def _hf_configs(self) -> tuple[Any, Any]:
        """(Hugging Face config, generation config or ``None``) of an export."""
        return self.model.config, getattr(self.model, "generation_config", None)

    def _call(self, **inputs: Any) -> Any:
        """Run the Hugging Face network on ``inputs``."""
        return self.model(**inputs)

    def _call_network(self, spec: NetworkSpec, batch: Batch) -> dict[str, torch.Tensor]:
        """Run a network that is no causal LM."""
        return spec.forward(self.model, batch)

    def _in_format(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A weight or buffer as ``weights`` gives it."""
        if not tensor.is_floating_point() or (self.spec is not None and name not in self._parameter_names):
            return tensor
        return tensor.to(self.dtype)

    def _outputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """What the loss reads of one micro-batch that is on the device: the head's outputs, or ``values`` [M]."""
        if self.spec is not None:
            return {name: self._exact(values) for name, values in self._call_network(self.spec, batch).items()}
        from rlinf_engines.trainers.attention import packed_inputs

        inputs, predict = packed_inputs(batch), batch["predict"]
        if self.role == "critic":
            values_N = self._call(**inputs).logits[0, :, 0]
            return {"values": self._exact(values_N[predict])}
        if self.head is None:
            raise RLinfError("trainer: forward before setup")
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            logits_MV = self._call(**inputs, logits_to_keep=predict).logits[0]
        else:
            logits_MV = self._call(**inputs).logits[0, predict]
        return self.head(self._exact(logits_MV), batch, VocabShard())

    def _exact(self, values: torch.Tensor) -> torch.Tensor:
        """In float32 at least, so that log-probs and values are not rounded to 8 bits."""
        import torch

        return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values

    def _backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of ``loss``."""
        loss.backward()

    def _set_mode(self, *, train: bool) -> None:
        if self.model.training != train:  # it walks through all modules
            self.model.train(train)

    def _device_tensors(self) -> Iterator[torch.Tensor]:
        """What ``offload`` moves: parameters, gradients, buffers, optimizer state."""
        from rlinf_engines.offload import state_tensors

        return state_tensors(self.model, self.optimizer)

    def _rng_state(self) -> dict[str, torch.Tensor]:
        """The state of this rank's random numbers, for a checkpoint."""
        import torch

        states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def _set_rng_state(self, states: Mapping[str, torch.Tensor]) -> None:
        import torch

        torch.set_rng_state(states["cpu"])
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)

    def _rounds(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, bool]]:
        """Micro-batches with whether they are real; with ``lockstep`` filled up to what the busiest rank has."""
        rounds = self.most(len(batches)) if self.lockstep else len(batches)
        for batch in batches:
            yield batch, True
        for _ in range(rounds - len(batches)):
            yield self.filler(), False

    def _prepared(self, batch: Batch) -> Batch:
        """A micro-batch as the model runs on it: on the device, a prompt that is there several times once."""
        if self.shares_prompts:
            from rlinf_engines.trainers.sharing import share_prompts

            batch = share_prompts(batch)
        return self._to_device(batch)

    def _to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        import torch

        return {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

    def _agree(self, failure: Exception | None, what: str) -> None:
        """Let a failure of one rank be one of all: raises ``failure`` here, an error that names the rank there."""
        failures = self._ranks().everyone(None if failure is None else f"{type(failure).__name__}: {failure}", what)
        if failure is not None:
            raise failure
        for rank, text in enumerate(failures):
            if text is not None:
                from rlinf_engines.trainers.group import elsewhere

                raise elsewhere(f"trainer: {what} failed on rank {rank}: {text}")

    def _ranks(self) -> RankGroup:
        if self.group is None:
            raise RLinfError("trainer: not set up yet; call setup() first")
        return self.group

    def _check_loaded(self, what: str) -> None:
        if self._store is not None:
            self._store.check(what)


def zero_loss(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Zero that depends on every output that has a gradient, so that a backward runs through the whole network."""
    import torch

    total = torch.zeros(())
    for output in outputs.values():
        if output.requires_grad:
            total = total + output.sum() * 0.0
    return total


def ids_of(batch: Batch) -> str:
    """The ids of a micro-batch's samples, for a message."""
    ids = list(batch.get("ids", ()))
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    return f" in the micro-batch of {', '.join(map(str, ids[:8]))}{more}" if ids else ""
