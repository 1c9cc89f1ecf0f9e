"""What runs in vLLM's workers: keyed sampling, weights, and their memory. Importing this module loads vLLM.

The functions are called in every worker of an engine (``collective_rpc``) with the worker as the first argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from rlinf_core.types import SamplingParams
from rlinf_engines.rollouts.held_weights import Entry, read_weights
from rlinf_engines.sampling import choose, uniforms

STREAM = "rlinf_stream"
"""The extra argument of a request that ``KeyedSampler`` reads: (stream, greedy, top_k, top_p, temperature)."""


class KeyedSampler(Sampler):
    """Draws with the numbers of ``rlinf_engines.sampling``, the same as rollout backend ``transformers``.

    vLLM's own seeded sampling fills a row of the vocabulary's length with random numbers for each token, which takes
    longer than a small model does, and its log-probs under top-k and top-p are those of the truncated distribution.
    Requests without a stream (vLLM's own trial runs) go to vLLM's sampler.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__("processed_logprobs")
        self._runner = runner
        self._batch: Any = None  # the metadata of the batch that what follows is of
        self._streams_B = self._greedy_B = torch.empty(0)
        self._sampling: SamplingParams | None = None

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> SamplerOutput:
        batch = self._runner.input_batch
        if batch.num_reqs == logits.shape[0]:
            self._read(batch, sampling_metadata, logits.device)
        if batch.num_reqs != logits.shape[0] or self._sampling is None:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        rows = logits.shape[0]
        # Tokens that a request has, its prompt excluded: right for preempted and partly prefilled requests too.
        position_B = torch.from_numpy(batch.num_tokens_no_spec[:rows] - batch.num_prompt_tokens[:rows])
        uniform_B = uniforms(self._streams_B, position_B.to(logits.device, torch.int64))
        tokens_B, logps_B = choose(logits, uniform_B, self._greedy_B, self._sampling)
        tokens_B1 = tokens_B.to(torch.int32).unsqueeze(-1)
        ranks_B = torch.zeros_like(tokens_B)
        return SamplerOutput(
            sampled_token_ids=tokens_B1,
            logprobs_tensors=LogprobsTensors(tokens_B1, logps_B.to(torch.float32).unsqueeze(-1), ranks_B),
        )

    def _read(self, batch: Any, metadata: Any, device: torch.device) -> None:
        """Keep the streams of the batch until it changes; nothing when a request has none."""
        if self._batch is metadata:
            return
        self._batch, self._sampling = metadata, None
        params = [self._runner.requests[name].sampling_params for name in batch.req_ids]
        keys = [p.extra_args.get(STREAM) if p is not None and p.extra_args else None for p in params]
        if not keys or any(key is None for key in keys):
            return
        streams, greedy, top_k, top_p, temperature = zip(*keys, strict=True)
        self._streams_B = torch.tensor(streams, dtype=torch.int64, device=device)
        self._greedy_B = torch.tensor(greedy, device=device)
        self._sampling = SamplingParams(1, temperature[0], top_p[0], top_k[0])


def install_sampler(worker: Any) -> None:
    """Let the worker draw keyed numbers."""
    worker.model_runner.sampler = KeyedSampler(worker.model_runner)


def meeting_place(worker: Any) -> str:
    """Where the engine's workers have met, as torch writes it (``file://PATH``)."""
    return str(getattr(worker, "distributed_init_method", ""))


def install_weights(worker: Any, given: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Put whole weights into the worker's model."""
    runner = worker.model_runner
    runner.reload_weights(weights_iterator=iter(given))
    if runner.device.type == "cpu":
        _repack_tied_layers(runner.get_model())


def install_held(worker: Any, path: str, entries: Sequence[Entry]) -> None:
    """``install_weights`` of what another process holds."""
    install_weights(worker, read_weights(path, entries))


def weight_tensors(worker: Any) -> list[torch.Tensor]:
    model = worker.model_runner.get_model()
    return [*model.parameters(), *model.buffers()]


def cache_tensors(worker: Any) -> list[torch.Tensor]:
    return list(worker.model_runner.kv_caches)


def _repack_tied_layers(model: Any) -> None:
    """Pack again what multiplies by a tied weight on a CPU.

    Layers on a CPU multiply by a packed copy. ``reload_weights`` renews the copy of a layer whose weights it was
    given; an output head tied to the embedding is given none and would go on with its old copy.
    """
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
            layer.quant_method.process_weights_after_loading(layer)
