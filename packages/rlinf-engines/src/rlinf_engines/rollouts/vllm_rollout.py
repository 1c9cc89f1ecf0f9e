"""Rollout backend ``vllm``: a vLLM engine in this process or one of its own, on CPU or GPU.

The engine batches dynamically: its random numbers are keyed per request, but its results may change with the
batch in the last bits of a log-probability.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.types import Generated, GenerateRequest, ParallelInfo, SamplingParams

if TYPE_CHECKING:
    import torch

    from rlinf_engines.rollouts.held_weights import HeldWeights
    from rlinf_engines.rollouts.vllm_engine import Engine, EngineDied, EngineSpec

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
log = logging.getLogger(__name__)


class VllmRollout:
    """Generate with vLLM's engine.

    The tiny model is written to a temporary directory and loaded from there, so it starts from the same
    weights as every other backend. New weights go into the live engine, also while responses are being generated: what
    they have of keys and values is computed anew, and each token records the version that drew it.

    An engine that dies, or that shows no sign of life for ``rollout.stall_timeout_s``, is replaced by a new one
    with the last installed weights, and only what it still owed is drawn again, with the same random numbers
    (``rollout.max_restarts`` times in a row; an error that a new engine raises again in the same words before anything
    has finished ends that at once). In this process (``rollout.engine_process=false``) that holds for a step
    that raises; a crash of the process is the caller's, and a stuck step only shows in the log.

    ``offload`` drops the key-value cache and takes the weights off the device. It is allowed between any two responses:
    what is being generated is computed anew up to where it was. On a GPU it is vLLM's sleep mode. On a CPU it is
    ``DeviceStore`` over the tensors that vLLM's model has, which leaves out most of the weights: linear layers multiply
    by packed copies inside its C++ library, which nobody can move, and they stay in memory.
    """

    requires: tuple[str, ...] = ("vllm", "transformers")

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.version = 0
        self.tokenizer: Any = None
        self.engine: Engine | None = None
        self._owed: dict[str, GenerateRequest] = {}
        self._sampling = SamplingParams(1)
        self._asleep = False
        self._torn = ""
        self._held: HeldWeights | None = None
        self._restarts = 0
        self._raised = ""  # what the last engine raised, if nothing has finished or was installed since

    def setup(self, model: Any, parallel: ParallelInfo, *, seed: int) -> None:
        """Start the engine. ``model`` is the config node, ``seed`` the root seed.

        With the engine in this process, environment variables that vLLM reads at import are set here, so nothing may
        have imported vLLM in another mode before.
        """
        if model.dtype == "float64":
            raise ConfigError("model.dtype: vllm does not compute in float64; use float32 or bfloat16")
        self._model, self._seed = model, seed
        on_gpu = parallel.device.startswith("cuda")
        check_allocator(os.environ, on_gpu=on_gpu)
        self._in_process = not bool(self.cfg.engine_process)
        self._max_restarts = int(self.cfg.max_restarts)
        from rlinf_engines.conf.rollouts import check_head_size, check_tensor_parallel
        from rlinf_engines.model_check import head_size
        from rlinf_engines.models import load_config, load_tokenizer, max_positions, parameter_shapes, torch_dtype
        from rlinf_engines.rollouts.held_weights import HeldWeights
        from rlinf_engines.rollouts.vllm_engine import EngineDied

        for problem in [] if on_gpu or model.path is None else check_head_size(head_size(model)):
            raise ConfigError(problem)
        self.tokenizer = load_tokenizer(model)
        limit = max_positions(model)
        self._max_positions = limit if self.cfg.max_model_len is None else int(self.cfg.max_model_len)
        if limit is not None and self._max_positions is not None and self._max_positions > limit:
            raise ConfigError(
                f"rollout.max_model_len: {self._max_positions} is more than the {limit} tokens that the model takes; "
                f"lower it, or null for the model's limit"
            )
        with _ModelDirectory(model, self.tokenizer, seed) as directory:
            config = load_config(directory)
            text = config.get_text_config()
            heads = int(text.num_attention_heads)
            kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
            for problem in check_tensor_parallel(int(self.cfg.tensor_parallel_size), heads, kv_heads):
                raise ConfigError(problem)
            self._shapes, self._aliases = parameter_shapes(config)
            self._vocabulary = int(text.vocab_size)
            declared = text.eos_token_id
            ends = declared if isinstance(declared, (list, tuple)) else [declared]
            stop = {int(self.tokenizer.eos_token_id), *(int(i) for i in ends if i is not None)}
            self._spec = self._describe(parallel, on_gpu, tuple(sorted(stop)))
            if not self._in_process or self._max_restarts or int(self.cfg.tensor_parallel_size) > 1:
                self._held = HeldWeights(torch_dtype(model.dtype))
            try:
                self.engine = self._new_engine(directory)
            except EngineDied as error:
                raise RLinfError(f"rollout vllm: the engine did not start: {error}{error.log}") from error

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> Iterator[Generated]:
        """Yield responses as they finish, in any order; the checks run before the first is drawn."""
        from rlinf_engines.rollouts.requests import check_requests
        from rlinf_engines.rollouts.stop_strings import check_stop
        from rlinf_engines.sampling import check_sampling

        check_sampling(sampling)
        check_stop(sampling.stop)
        check_requests(requests, sampling, self._max_positions, self._vocabulary)
        if self._torn:
            raise RLinfError(f"rollout: {self._torn}; load whole weights before generating")
        return self._run(list(requests), sampling)

    def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put whole parameters into the live engine. All must come, under Hugging Face names, tied ones once."""
        self._check_loaded(f"load_weights of version {version}")
        given = list(weights)
        self._check_weights(version, given)
        self._torn = f"version {version} was only partly installed"
        if self._held is not None:
            self._held.take(version, given)
        self._survive(lambda engine: engine.install(version, given, self._held), installs=True)
        self.version = version
        self._torn = self._raised = ""

    def onload(self) -> None:
        """Bring the weights back; the key-value cache is empty."""
        if self._asleep:
            self._survive(lambda engine: engine.onload())
            self._asleep = False

    def offload(self) -> None:
        """Keep the weights in host memory and drop the cache. With ``gpu_sleep=false`` everything stays on the GPU."""
        if not self._asleep and self.engine is not None:
            self._survive(lambda engine: engine.offload())
            self._asleep = True

    def close(self) -> None:
        """End the engine, and its process where it has one."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        if self._held is not None:
            self._held.close()

    def _run(self, requests: list[GenerateRequest], sampling: SamplingParams) -> Iterator[Generated]:
        from rlinf_engines.rollouts.stall_watch import StallWatch

        if self._owed:
            raise RLinfError("rollout vllm: one generate at a time; finish or close the one before")
        self._check_loaded("generate")
        self._sampling = sampling
        self._owed = {request.id: request for request in requests}
        try:
            # A restart submits what is owed itself.
            self._survive(lambda engine: engine.submit(requests, sampling), installs=True)
            with StallWatch(
                float(self.cfg.stall_timeout_s),
                "rollout vllm: a step of the engine",
                "rollout.engine_process=true would replace it",
            ) as watch:
                while self._owed:
                    self._check_loaded("generate")
                    if self._in_process:
                        watch.begin()
                    finished = self._survive(lambda engine: engine.step(), installs=True) or []
                    watch.end()
                    if finished:
                        self._raised = ""
                    for response in finished:
                        del self._owed[response.id]
                        yield response
            self._restarts = 0
        finally:
            # The consumer may have stopped early: nothing may run on under weights that come next.
            if self._owed:
                self._owed = {}
                if self.engine is not None:
                    self._survive(lambda engine: engine.abort(), installs=True)

    def _survive(self, call: Any, *, installs: bool = False) -> Any:
        """Call the engine; replace it when it dies. ``installs``: a new engine needs no such call any more."""
        from rlinf_engines.rollouts.vllm_engine import EngineDied

        if self.engine is None:
            raise RLinfError("rollout vllm: the engine is closed, or was never set up")
        while True:
            try:
                return call(self.engine)
            except EngineDied as error:
                self._restart(error)
                if installs:
                    return None

    def _restart(self, cause: EngineDied) -> None:
        """A new engine with the last installed weights and what is still owed; tries again while tries are left, and
        while it is not the same error again."""
        from rlinf_engines.rollouts.vllm_engine import EngineDied, EngineRaised

        while True:
            again = isinstance(cause, EngineRaised) and str(cause) == self._raised
            self._raised = str(cause) if isinstance(cause, EngineRaised) else ""
            where = self._end_engine(last=again or self._restarts >= self._max_restarts) or cause.log
            if again:
                raise RLinfError(
                    f"rollout vllm: the engine died: {cause}; so did the one before it, and nothing had finished in "
                    f"between: no restart helps{where}"
                ) from cause
            self._restarts += 1
            if self._restarts > self._max_restarts:
                raise RLinfError(
                    f"rollout vllm: the engine died: {cause}; rollout.max_restarts={self._max_restarts} allows no "
                    f"further restart{where}"
                ) from cause
            if self._held is not None and self._held.version is None and self.version:
                raise RLinfError(f"rollout vllm: the engine died: {cause}; whole weights to restart it with are gone")
            log.warning(
                "rollout vllm: the engine died: %s; restart %d of %d with weights of version %d, drawing again the %d "
                "responses that it owed",
                cause,
                self._restarts,
                self._max_restarts,
                self._held.version if self._held is not None and self._held.version is not None else self.version,
                len(self._owed),
            )
            try:
                with _ModelDirectory(self._model, self.tokenizer, self._seed) as directory:
                    self.engine = self._new_engine(directory)
                if self._held is not None and self._held.version is not None:
                    self.engine.install(self._held.version, None, self._held)
                if self._asleep:
                    self.engine.offload()
                if self._owed:
                    self.engine.submit(list(self._owed.values()), self._sampling)
                return
            except EngineDied as error:
                cause = error

    def _end_engine(self, *, last: bool) -> str:
        """Close what is left of the engine; where its log is, when it has one and is the ``last``."""
        from rlinf_engines.rollouts.vllm_process import EngineProcess

        where = ""
        if isinstance(self.engine, EngineProcess) and last:
            where = f"; its log is {self.engine.keep_log()}"
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        return where

    def _new_engine(self, directory: str) -> Engine:
        from dataclasses import replace

        spec = replace(self._spec, directory=directory)
        if self._in_process:
            from rlinf_engines.rollouts.vllm_engine import LocalEngine

            return LocalEngine(spec, self.tokenizer, self.version)
        from rlinf_engines.rollouts.vllm_process import EngineProcess

        engine = EngineProcess(spec, self.version)
        weakref.finalize(self, engine.close)
        return engine

    def _describe(self, parallel: ParallelInfo, on_gpu: bool, stop: tuple[int, ...]) -> EngineSpec:
        from rlinf_engines.rollouts.vllm_engine import EngineSpec
        from rlinf_engines.seeds import derive_seed

        cfg, tensor_parallel = self.cfg, int(self.cfg.tensor_parallel_size)
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": self._model.dtype,
            "seed": derive_seed(self._seed, "vllm") % 2**31,
            "max_model_len": self._max_positions,
            "max_num_seqs": int(cfg.max_num_seqs),
            "max_num_batched_tokens": int(cfg.max_num_batched_tokens),
            "enforce_eager": bool(cfg.enforce_eager),
            "enable_prefix_caching": bool(cfg.enable_prefix_caching),
            # A step's tokens are known before the next one: weights may change in between.
            "async_scheduling": False,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "tensor_parallel_size": tensor_parallel,
        }
        if tensor_parallel > 1:
            options["distributed_executor_backend"] = "mp"
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # our sampler is for the first one
            "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        }
        sleeps = bool(cfg.gpu_sleep)
        gpu_memory, cache_gb = float(cfg.gpu_memory_utilization), int(cfg.kv_cache_gb)
        if on_gpu:
            options.update({"gpu_memory_utilization": gpu_memory, "enable_sleep_mode": sleeps})
        else:
            # The runtime has chosen the cores; vLLM would bind the process to others.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(cache_gb)
            # Whole blocks of a prompt are shared; vLLM's 128 on a CPU would leave most prompts of a group unshared.
            options["block_size"] = 32
        return EngineSpec(
            directory="",
            dtype=self._model.dtype,
            device=parallel.device,
            threads=parallel.threads,
            options=options,
            environment=environment,
            stop_ids=stop,
            sleeps=sleeps,
            stall_timeout_s=float(cfg.stall_timeout_s),
        )

    def _check_weights(self, version: int, given: list[tuple[str, torch.Tensor]]) -> None:
        missing = dict(self._shapes)
        for name, tensor in given:
            name = self._aliases.get(name, name)
            if name not in self._shapes:
                raise RLinfError(f"weights of version {version}: the model has no parameter {name!r}")
            if tuple(tensor.shape) != self._shapes[name]:
                raise RLinfError(
                    f"weights of version {version}: {name} has shape {tuple(tensor.shape)}, the model's has "
                    f"{self._shapes[name]}"
                )
            missing.pop(name, None)
        if missing:
            raise RLinfError(f"weights of version {version}: {len(missing)} are missing, first {next(iter(missing))}")

    def _check_loaded(self, what: str) -> None:
        if self._asleep:
            raise RLinfError(
                f"rollout: {what} while offloaded; call onload() first (a worker: inside `with self.on_device()`)"
            )


class _ModelDirectory:
    """The directory that the engine loads from; the tiny model is written to one that is gone afterwards."""

    def __init__(self, model: Any, tokenizer: Any, seed: int) -> None:
        self._model, self._tokenizer, self._seed = model, tokenizer, seed
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> str:
        if self._model.path is not None:
            return str(Path(self._model.path).expanduser())
        from rlinf_engines.models import export_model, load_model

        self._folder = tempfile.TemporaryDirectory(prefix="rlinf-vllm-")
        directory = Path(self._folder.name) / "model"
        export_model(load_model(self._model, self._seed), self._tokenizer, directory)
        return str(directory)

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def check_allocator(environment: Mapping[str, str], *, on_gpu: bool) -> None:
    """Refuse allocator settings that break sleep mode and handing tensors to another process on a GPU."""
    for variable in ALLOCATOR_VARIABLES:
        value = environment.get(variable, "")
        if on_gpu and "expandable_segments:true" in value.replace(" ", "").lower():
            raise ConfigError(
                f"{variable}={value}: expandable segments break vLLM's sleep mode and sharing of GPU memory between "
                "processes; remove expandable_segments from it"
            )
