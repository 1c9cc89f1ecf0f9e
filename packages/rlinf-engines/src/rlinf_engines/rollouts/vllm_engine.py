"""A vLLM engine in the process that makes it: requests in, finished responses out, one step at a time.

``VllmRollout`` drives one of these, here or behind a pipe in a process of its own (``vllm_process``).
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from rlinf_core.errors import NonFiniteError, RLinfError
from rlinf_core.types import Generated, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    import torch

    from rlinf_engines.offload import DeviceStore
    from rlinf_engines.rollouts.held_weights import HeldWeights


SHARED = Path("/dev/shm")


class EngineDied(RLinfError):
    """An engine is gone, or cannot go on: another one can take its place."""

    log: str = ""
    """Where its output is, to end a message with; set where the engine itself can no longer be asked."""


class EngineRaised(EngineDied):
    """An engine cannot go on because it raised: with the same work, another one may well raise the same."""


@dataclass(slots=True, frozen=True)
class EngineSpec:
    """Everything that an engine is started from, as plain data."""

    directory: str
    dtype: str
    device: str
    threads: int
    options: dict[str, Any]
    """vLLM's own arguments."""
    environment: dict[str, str]
    """Variables that vLLM reads when it is imported."""
    stop_ids: tuple[int, ...]
    sleeps: bool = False
    stall_timeout_s: float = 300.0

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


class Engine(Protocol):
    """What ``VllmRollout`` asks of an engine. Every call may raise ``EngineDied``."""

    def submit(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        """Add requests; their responses come out of ``step``."""

    def step(self) -> list[Generated]:
        """Go on, and hand over what has finished; may be empty."""

    def abort(self) -> None:
        """Forget every request."""

    def install(self, version: int, given: Sequence[tuple[str, torch.Tensor]] | None, held: HeldWeights | None) -> None:
        """Put whole weights in; requests that are running go on with them. ``held`` has the same when not None."""

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Running:
    """A response that is not finished."""

    request: GenerateRequest
    watch: Any  # StopStrings
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class LocalEngine:
    """vLLM's engine core, stepped by the caller. The prompts of one ``submit`` share their sampling parameters."""

    def __init__(self, spec: EngineSpec, tokenizer: Any, version: int = 0) -> None:
        self.version = version
        self._spec = spec
        self._tokenizer = tokenizer
        self.prompt_tokens = 0  # of all requests
        self.shared_tokens = 0  # of these, those that were computed for another request before
        self._running: dict[str, _Running] = {}
        self._store: DeviceStore | None = None  # on a CPU
        self._llm = _start(spec)
        self._core: Any = self._llm.engine_core
        self._serial = 0
        self._meetings = _meeting_files(self._llm)
        if not spec.on_gpu and sys.platform == "linux" and self._workers() == 1:
            import torch

            from rlinf_engines.offload import DeviceStore
            from rlinf_engines.rollouts.vllm_worker import weight_tensors

            self._store = DeviceStore(
                "rollout", torch.device("cpu"), lambda: self.tensors(weight_tensors), spec.threads
            )

    def submit(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        from rlinf_engines.rollouts.stop_strings import StopStrings
        from rlinf_engines.sampling import request_streams

        ends = () if sampling.ignore_eos else self._spec.stop_ids
        stop = sorted({*ends, *sampling.stop_token_ids})
        streams = request_streams(sampling.seed, [r.key for r in requests]).tolist()
        for request, stream in zip(requests, streams, strict=True):
            self._serial += 1  # the engine's own names: one that is given up may still be known to it
            name = f"{self._serial}"
            self._core.add_request(self._engine_request(name, request, sampling, stop, stream))
            self._running[name] = _Running(request, StopStrings(self._tokenizer, sampling.stop))

    def step(self) -> list[Generated]:
        try:
            outputs = self._core.get_output()
        except (RLinfError, KeyboardInterrupt):
            raise
        except Exception as error:  # whatever breaks in there, the engine is not to be trusted any more
            raise EngineRaised(f"a step failed: {type(error).__name__}: {error}") from error
        finished: list[Generated] = []
        cut: list[str] = []
        for output in outputs.outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            if output.prefill_stats is not None and not running.tokens:
                self.prompt_tokens += len(running.request.prompt_ids)
                self.shared_tokens += int(output.prefill_stats.num_cached_tokens)
            reason = self._take(running, output)
            if reason is None:
                continue
            if output.finish_reason is None:
                cut.append(output.request_id)
            del self._running[output.request_id]
            finished.append(Generated(running.request.id, running.tokens, running.logprobs, running.versions, reason))
        if cut:
            self._core.abort_requests(cut)
        return finished

    def abort(self) -> None:
        if self._running:
            self._core.abort_requests(list(self._running))
            self._running.clear()
            self._core.get_output()  # lets the workers forget them

    def install(self, version: int, given: Sequence[tuple[str, torch.Tensor]] | None, held: HeldWeights | None) -> None:
        from rlinf_engines.rollouts.vllm_worker import install_held, install_weights

        if self._workers() == 1:
            weights = given if given is not None else _held(held)
            self._call(install_weights, weights)
        else:  # a pipe is no place for weights
            assert held is not None
            self._call(install_held, held.path, held.entries)
        self._forget_cache()
        self.version = version

    def install_file(self, version: int, path: str, entries: Sequence[Any]) -> None:
        """``install`` of what another process holds."""
        from rlinf_engines.rollouts.vllm_worker import install_held

        self._call(install_held, path, entries)
        self._forget_cache()
        self.version = version

    def offload(self) -> None:
        if self._store is not None:
            from rlinf_engines.rollouts.vllm_worker import cache_tensors
            from rlinf_engines.slot_memory import discard

            self._llm.reset_prefix_cache(reset_running_requests=True)
            self._store.offload()
            discard(self.tensors(cache_tensors))
        elif self._spec.on_gpu and self._spec.sleeps:
            self._llm.sleep(level=1, mode="keep")

    def onload(self) -> None:
        if self._store is not None:
            self._store.onload()
        elif self._spec.on_gpu and self._spec.sleeps:
            self._llm.wake_up(tags=["weights", "kv_cache"])

    def close(self) -> None:
        self._running.clear()
        if self._store is not None:
            self._store.close()
        with contextlib.suppress(Exception):  # it may be broken, and is of no more use
            self._core.shutdown()
        for file in self._meetings:
            # On a CPU the workers share memory that has the file's name. vLLM removes neither.
            for left in (file, *SHARED.glob(f"{file.name}-*")):
                left.unlink(missing_ok=True)

    def tensors(self, read: Callable[[Any], list[torch.Tensor]]) -> list[torch.Tensor]:
        """What ``read`` finds in the worker (one worker only)."""
        return [tensor for found in self._call(read) for tensor in found]

    def _call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        found: list[Any] = self._llm.collective_rpc(function, args=args)
        return found

    def _workers(self) -> int:
        return int(self._spec.options.get("tensor_parallel_size", 1))

    def _forget_cache(self) -> None:
        """Cached keys and values belong to the old weights: what is running is computed anew with the new ones."""
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineDied("the engine kept cached prompts of the weights before")

    def _engine_request(
        self, name: str, request: GenerateRequest, sampling: SamplingParams, stop: list[int], stream: int
    ) -> Any:
        from vllm import SamplingParams as EngineSampling
        from vllm.v1.engine import EngineCoreRequest

        from rlinf_engines.rollouts.vllm_worker import STREAM

        params = EngineSampling(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=stop,
            logprobs=0,  # of the drawn token alone
            detokenize=False,
            extra_args={
                STREAM: (stream, request.greedy, sampling.top_k, sampling.top_p, sampling.temperature),
            },
        )
        return EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(request.prompt_ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(self._serial),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )

    def _take(self, running: _Running, output: Any) -> str | None:
        """Add new tokens; why the response ends, or None."""
        stopped = False
        for place, token in enumerate(output.new_token_ids):
            logprob = float(output.new_logprobs.logprobs[place][0])
            if logprob - logprob != 0.0:
                raise NonFiniteError(
                    f"rollout: log-probability of request {running.request.id!r} at position {len(running.tokens)} is "
                    f"not finite (policy version {self.version})"
                )
            running.tokens.append(int(token))
            running.logprobs.append(logprob)
            running.versions.append(self.version)
            stopped = stopped or running.watch.push(int(token))
        if output.finish_reason is None:
            return "stop" if stopped else None
        reason = str(output.finish_reason)
        if reason not in ("stop", "length"):
            raise EngineDied(f"request {running.request.id!r} ended by {reason!r}")
        return "stop" if stopped else reason


def _held(held: HeldWeights | None) -> Any:
    assert held is not None
    return held.tensors()


def _start(spec: EngineSpec) -> Any:
    """vLLM's engine. Nothing may have imported vLLM in another mode before."""
    os.environ.update(spec.environment)
    import torch
    import torch._dynamo

    if spec.options["enforce_eager"] and not spec.on_gpu:
        # The engine's small helpers are compiled even when eager: 20 s in C++ at the first token.
        torch._dynamo.config.disable = True
    torch.set_num_threads(spec.threads)
    with warnings.catch_warnings():
        # vLLM walks over deprecated names of torch.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            from rlinf_engines.rollouts.vllm_worker import install_sampler
        except ImportError as error:
            raise RLinfError(f"rollout vllm: importing vllm failed: {error}") from error
        try:
            engine = LLMEngine.from_engine_args(EngineArgs(model=spec.directory, **spec.options))
        except (RuntimeError, ValueError, OSError, NotImplementedError) as error:
            raise RLinfError(f"rollout vllm: the engine did not start: {_advice(str(error), spec.on_gpu)}") from error
        engine.collective_rpc(install_sampler)
    return engine


def _meeting_files(engine: Any) -> set[Path]:
    """The files at which the engine's workers have met."""
    from rlinf_engines.rollouts.vllm_worker import meeting_place

    places = [urlsplit(place) for place in engine.collective_rpc(meeting_place)]
    return {Path(place.path) for place in places if place.scheme == "file"}


def _advice(text: str, on_gpu: bool) -> str:
    """What the engine says, with our name of the knob where it names its own."""
    # On a CPU vLLM advises this too, though the size of its cache is given there.
    memory = "rollout.gpu_memory_utilization" if on_gpu else "rollout.kv_cache_gb"
    knobs = {
        "VLLM_CPU_KVCACHE_SPACE": "rollout.kv_cache_gb",
        "kv-cache-memory-bytes": "rollout.kv_cache_gb",
        "gpu_memory_utilization": memory,
        "max_model_len": "rollout.max_model_len",
        "must be divisible by tensor parallel size": "rollout.tensor_parallel_size",
    }
    ours = sorted({ours for theirs, ours in knobs.items() if theirs in text})
    return f"{text}{' (in our config: ' + ', '.join(ours) + ')' if ours else ''}"
