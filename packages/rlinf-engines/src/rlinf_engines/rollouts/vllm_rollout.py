"""Rollout backend ``vllm``: a vLLM engine in this process, on CPU or GPU.

The engine batches dynamically: its random numbers are keyed per request, but its results may change with the
batch in the last bits of a log-probability.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError
from rlinf_core.types import Generated, GenerateRequest, ParallelInfo, SamplingParams

if TYPE_CHECKING:
    import torch

    from rlinf_engines.offload import DeviceStore

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class VllmRollout:
    """Generate with vLLM's engine, stepped by this process.

    The tiny model is written to a temporary directory and loaded from there, so it starts from the same
    weights as every other backend. New weights go into the live engine.

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
        self.engine: Any = None
        self._running = 0
        self._store: DeviceStore | None = None  # on a CPU
        self._asleep = False
        self._torn = ""

    def setup(self, model: Any, parallel: ParallelInfo, *, seed: int) -> None:
        """Start the engine. ``model`` is the config node, ``seed`` the root seed.

        Environment variables that vLLM reads at import are set here, so nothing may have imported vLLM
        in another mode before.
        """
        if model.dtype == "float64":
            raise ConfigError("model.dtype: vllm does not compute in float64; use float32 or bfloat16")
        self._on_gpu = parallel.device.startswith("cuda")
        gpu_memory, self._sleeps = float(self.cfg.gpu_memory_utilization), bool(self.cfg.gpu_sleep)
        cache_gb = int(self.cfg.kv_cache_gb)
        self._eager = bool(self.cfg.enforce_eager)
        self._device_options: dict[str, Any] = {}
        if self._on_gpu:
            self._device_options = {"gpu_memory_utilization": gpu_memory, "enable_sleep_mode": self._sleeps}
        check_allocator(os.environ, on_gpu=self._on_gpu)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if not self._on_gpu:
            # The runtime has chosen the cores; vLLM would bind the process to others.
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cache_gb)
        import torch
        import torch._dynamo

        from rlinf_engines.models import load_tokenizer, max_positions

        if self._eager and not self._on_gpu:
            # The engine's small helpers are compiled even when eager: 20 s in C++ at the first token.
            torch._dynamo.config.disable = True
        torch.set_num_threads(parallel.threads)
        self.tokenizer = load_tokenizer(model)
        limit = max_positions(model)
        self._max_positions = limit if self.cfg.max_model_len is None else int(self.cfg.max_model_len)
        if model.path is None:
            from rlinf_engines.models import export_model, load_model

            with tempfile.TemporaryDirectory(prefix="rlinf-vllm-") as folder:
                directory = Path(folder) / "model"
                export_model(load_model(model, seed), self.tokenizer, directory)
                self._start(str(directory), model.dtype, seed)
        else:
            self._start(str(Path(model.path).expanduser()), model.dtype, seed)

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> Iterator[Generated]:
        """Yield responses as they finish, in any order; the checks run before the first is drawn.

        Top-k and top-p are refused for sampled requests: the engine's log-probs would be those of the truncated
        distribution, which a trainer does not compute.
        """
        from rlinf_engines.rollouts.requests import check_requests
        from rlinf_engines.sampling import check_sampling

        check_sampling(sampling)
        check_requests(requests, sampling, self._max_positions, self._vocabulary)
        if (sampling.top_p < 1.0 or sampling.top_k) and not all(r.greedy for r in requests):
            key = "top_p" if sampling.top_p < 1.0 else "top_k"
            raise ConfigError(
                f"sampling.{key}: rollout vllm gives log-probs of the truncated distribution, which training would "
                "take for the policy's; use top_p=1 and top_k=0, or rollout=transformers"
            )
        if self._torn:
            raise RLinfError(f"rollout: {self._torn}; load whole weights before generating")
        return self._run(list(requests), sampling)

    def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put whole parameters into the live engine. All must come, under Hugging Face names, tied ones once.

        Refused while responses are being generated: their tokens would mix two policies unrecorded.
        """
        if self._running:
            raise RLinfError(f"weights of version {version}: {self._running} responses are being generated")
        self._check_loaded(f"load_weights of version {version}")
        given = list(weights)
        self._check_weights(version, given)
        self._torn = f"version {version} was only partly installed"
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(given)})
        if not self._on_gpu:
            self.engine.collective_rpc(_repack_tied_layers)
        # Cached keys and values of prompts belong to the old weights.
        if not self.engine.reset_prefix_cache():
            raise RLinfError(f"weights of version {version}: the engine kept cached prompts of the old ones")
        self.version = version
        self._torn = ""

    def onload(self) -> None:
        """Bring the weights back; the key-value cache is empty."""
        if not self._asleep:
            return
        if self._store is not None:
            self._store.onload()
        elif self._on_gpu and self._sleeps:
            self.engine.wake_up(tags=["weights", "kv_cache"])
        self._asleep = False

    def offload(self) -> None:
        """Keep the weights in host memory and drop the cache. With ``gpu_sleep=false`` everything stays on the GPU."""
        if self._asleep or self.engine is None:
            return
        if self._store is not None:
            from rlinf_engines.slot_memory import discard

            self.engine.reset_prefix_cache(reset_running_requests=True)
            self._store.offload()
            discard(self._cpu_tensors(_cache_tensors))
        elif self._on_gpu and self._sleeps:
            self.engine.sleep(level=1, mode="keep")
        self._asleep = True

    def _start(self, directory: str, dtype: str, seed: int) -> None:
        try:
            with warnings.catch_warnings():
                # vLLM walks over deprecated names of torch when it is imported.
                warnings.simplefilter("ignore", FutureWarning)
                from vllm.engine.arg_utils import EngineArgs
                from vllm.v1.engine.llm_engine import LLMEngine
        except ImportError as error:
            raise RLinfError(f"rollout vllm: importing vllm failed: {error}") from error
        from rlinf_engines.models import load_config, parameter_shapes
        from rlinf_engines.seeds import derive_seed

        options: dict[str, Any] = {
            "model": directory,
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "seed": derive_seed(seed, "vllm") % 2**31,
            "max_model_len": self._max_positions,
            "max_num_seqs": int(self.cfg.max_num_seqs),
            "max_num_batched_tokens": int(self.cfg.max_num_batched_tokens),
            "enforce_eager": self._eager,
            "enable_prefix_caching": bool(self.cfg.enable_prefix_caching),
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **self._device_options,
        }
        try:
            config = load_config(directory)
            self.engine = LLMEngine.from_engine_args(EngineArgs(**options))
        except (RuntimeError, ValueError, OSError, NotImplementedError) as error:
            raise RLinfError(f"rollout vllm: the engine did not start: {error}") from error
        if not self._on_gpu and sys.platform == "linux":
            import torch

            from rlinf_engines.offload import DeviceStore

            tensors = functools.partial(self._cpu_tensors, _weight_tensors)
            self._store = DeviceStore("rollout", torch.device("cpu"), tensors, torch.get_num_threads())
        self._shapes, self._aliases = parameter_shapes(config)
        self._vocabulary = int(config.get_text_config().vocab_size)
        declared = config.get_text_config().eos_token_id
        ends = declared if isinstance(declared, (list, tuple)) else [declared]
        self._stop = {int(self.tokenizer.eos_token_id), *(int(i) for i in ends if i is not None)}

    def _run(self, requests: list[GenerateRequest], sampling: SamplingParams) -> Iterator[Generated]:
        if self._running:
            raise RLinfError("rollout vllm: one generate at a time; finish or close the one before")
        stop = sorted(self._stop | set(sampling.stop_token_ids))
        names = {}  # engine's request name -> ours
        self._check_loaded("generate")
        self._running = len(requests)
        try:
            for request in requests:
                names[self._add(request, sampling, stop)] = request.id
            while self.engine.has_unfinished_requests():
                self._check_loaded("generate")
                for output in self.engine.step():
                    if output.finished:
                        self._running -= 1
                        yield self._generated(output)
            if self._running:
                raise RLinfError(f"rollout vllm: the engine ended with {self._running} responses missing")
        finally:
            # The consumer may have stopped early: nothing may run on under weights that come next.
            if self._running:
                self.engine.abort_request(list(names), internal=True)
                while self.engine.has_unfinished_requests():
                    self.engine.step()
            self._running = 0

    def _add(self, request: GenerateRequest, sampling: SamplingParams, stop: list[int]) -> str:
        from vllm import SamplingParams as EngineSampling
        from vllm.sampling_params import RequestOutputKind

        from rlinf_engines.seeds import derive_seed

        params = EngineSampling(
            temperature=0.0 if request.greedy else sampling.temperature,
            seed=None if request.greedy else derive_seed(sampling.seed, "sample", *request.key),
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=stop,
            logprobs=0,  # of the drawn token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return str(self.engine.add_request(request.id, {"prompt_token_ids": list(request.prompt_ids)}, params))

    def _generated(self, output: Any) -> Generated:
        best = output.outputs[0]
        tokens = [int(token) for token in best.token_ids]
        logprobs = [float(entry[token].logprob) for token, entry in zip(tokens, best.logprobs, strict=True)]
        if not all(value - value == 0.0 for value in logprobs):
            raise NonFiniteError(
                f"rollout: a log-probability of request {output.request_id!r} is not finite "
                f"(policy version {self.version})"
            )
        if best.finish_reason not in ("stop", "length"):
            raise RLinfError(f"rollout vllm: request {output.request_id!r} ended by {best.finish_reason!r}")
        return Generated(output.request_id, tokens, logprobs, [self.version] * len(tokens), best.finish_reason)

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

    def _cpu_tensors(self, read: Callable[[Any], list[torch.Tensor]]) -> list[torch.Tensor]:
        return [tensor for found in self.engine.collective_rpc(read) for tensor in found]


def _weight_tensors(worker: Any) -> list[torch.Tensor]:
    model = worker.model_runner.get_model()
    return [*model.parameters(), *model.buffers()]


def _cache_tensors(worker: Any) -> list[torch.Tensor]:
    return list(worker.model_runner.kv_caches)


def _repack_tied_layers(worker: Any) -> None:
    """Pack again what multiplies by a tied weight on a CPU.

    Layers on a CPU multiply by a packed copy. ``reload_weights`` renews the copy of a layer whose weights it was
    given; an output head tied to the embedding is given none and would go on with its old copy.
    """
    for layer in worker.model_runner.get_model().modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
            layer.quant_method.process_weights_after_loading(layer)


def check_allocator(environment: Mapping[str, str], *, on_gpu: bool) -> None:
    """Refuse allocator settings that break sleep mode and handing tensors to another process on a GPU."""
    for variable in ALLOCATOR_VARIABLES:
        value = environment.get(variable, "")
        if on_gpu and "expandable_segments:true" in value.replace(" ", "").lower():
            raise ConfigError(
                f"{variable}={value}: expandable segments break vLLM's sleep mode and sharing of GPU memory between "
                "processes; remove expandable_segments from it"
            )
