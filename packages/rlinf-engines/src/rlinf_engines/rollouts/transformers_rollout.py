"""Rollout backend ``transformers``: a decoding loop of our own over any Hugging Face causal LM.

Every request draws its own keyed random numbers (see ``rlinf_engines.sampling``), so a response does not
depend on the batch it was decoded in, up to floating-point ties.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import NonFiniteError, RLinfError
from rlinf_core.types import Generated, GenerateRequest, ParallelInfo, SamplingParams

if TYPE_CHECKING:
    import torch

    from rlinf_engines.offload import DeviceStore
    from rlinf_engines.rollouts.fused_step import FusedStep

# Positions whose random numbers are computed at once.
DRAWN_AHEAD = 32
# Rows that have finished are taken out of the batch when this part of it is left. Below, computing them
# along is cheaper than copying the cache.
COMPACT_BELOW = 0.75


class TransformersRollout:
    """Decode with a Hugging Face model in this process; Llama and Qwen2 models on a CPU in float32 take their steps in
    ``fused_step``.

    Requests are sorted by prompt and decoded in waves of at most ``max_num_seqs``. Equal prompts of a wave
    are prefilled once. Prompts are padded on the left, and a key-value cache is kept. Finished rows leave the
    batch when enough have gathered.

    ``offload`` is allowed between any two responses: the caches of what is being generated move too. Generating and
    ``load_weights`` need the model loaded.
    """

    requires: tuple[str, ...] = ("transformers", "tokenizers")

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.version = 0
        self.tokenizer: Any = None
        self.model: Any = None
        self._fused: FusedStep | None = None
        self._torn = ""
        self._store: DeviceStore | None = None
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()  # of the waves being decoded

    def setup(self, model: Any, parallel: ParallelInfo, *, seed: int) -> None:
        """Build model (``model`` is the config node) and tokenizer; ``seed`` is the root seed."""
        import torch

        from rlinf_engines.models import load_model, load_tokenizer, max_positions, stop_ids
        from rlinf_engines.offload import DeviceStore
        from rlinf_engines.rollouts.decoding import use_grouped_attention
        from rlinf_engines.rollouts.fused_step import fused_step

        torch.set_num_threads(parallel.threads)
        self._device = torch.device(parallel.device)
        self.tokenizer = load_tokenizer(model)
        self.model = load_model(model, seed).to(self._device)
        use_grouped_attention(self.model)
        self._fused = fused_step(self.model)
        self._stop = stop_ids(self.model, self.tokenizer)
        self._max_positions = max_positions(model)
        self._max_num_seqs = int(self.cfg.max_num_seqs)
        self._store = DeviceStore("rollout", self._device, self._state, parallel.threads)

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> Iterator[Generated]:
        """Yield responses as they finish, in any order; the checks run before the first is drawn."""
        from rlinf_engines.rollouts.requests import check_requests
        from rlinf_engines.rollouts.stop_strings import check_stop
        from rlinf_engines.sampling import check_sampling

        if self.model is None:
            raise RLinfError("rollout transformers: the engine is closed, or was never set up")
        check_sampling(sampling)
        check_stop(sampling.stop)
        check_requests(requests, sampling, self._max_positions, self.model.config.vocab_size)
        # Neighbours of equal length waste no padding, and equal prompts are prefilled once.
        ordered = sorted(requests, key=lambda r: (len(r.prompt_ids), r.prompt_ids))
        return self._waves(ordered, sampling)

    def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy whole parameters into the model. All must come, under Hugging Face names, tied ones once."""
        import torch

        self._check_loaded(f"load_weights of version {version}")
        own = self.model.state_dict(keep_vars=True)
        missing: dict[int, str] = {}
        for name, tensor in own.items():  # a tied tensor goes by the name it comes under
            missing.setdefault(id(tensor), name)
        self._torn = f"version {version} was only partly installed"
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own:
                    raise RLinfError(f"weights of version {version}: the model has no parameter {name!r}")
                if own[name].shape != tensor.shape:
                    raise RLinfError(
                        f"weights of version {version}: {name} has shape {tuple(tensor.shape)}, the model's has "
                        f"{tuple(own[name].shape)}"
                    )
                own[name].copy_(tensor)
                missing.pop(id(own[name]), None)
        if missing:
            first = next(iter(missing.values()))
            raise RLinfError(f"weights of version {version}: {len(missing)} are missing, first {first}")
        self.version = version
        self._torn = ""

    def onload(self) -> None:
        """Bring weights and running caches back to the device, bit-equal (see ``DeviceStore``)."""
        if self._store is not None:
            self._store.onload()

    def offload(self) -> None:
        """Move weights and running caches to host memory."""
        if self._store is not None:
            self._store.offload()

    def close(self) -> None:
        """Let go of the model, and give host memory back."""
        if self._store is not None:
            self._store.close()
            self._store = None
        self.model = self._fused = None

    def _state(self) -> Iterator[torch.Tensor]:
        import torch

        from rlinf_engines.offload import state_tensors

        yield from state_tensors(self.model)
        for cache in self._caches:
            for layer in cache.layers:  # what they view is the whole buffer
                yield from (value for value in vars(layer).values() if isinstance(value, torch.Tensor))

    def _check_loaded(self, what: str) -> None:
        if self._store is not None:
            self._store.check(what)

    def _waves(self, requests: list[GenerateRequest], sampling: SamplingParams) -> Iterator[Generated]:
        for start in range(0, len(requests), self._max_num_seqs):
            yield from self._decode(requests[start : start + self._max_num_seqs], sampling)

    def _decode(self, requests: list[GenerateRequest], sampling: SamplingParams) -> Iterator[Generated]:
        import torch

        from rlinf_engines.rollouts.stop_strings import StopStrings
        from rlinf_engines.sampling import choose, request_streams, uniforms

        device = self._device
        logits_BV, cache, mask_BT, next_position_B = self._prefill(requests)
        rows = list(range(len(requests)))  # batch row -> request
        tokens: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        versions: list[list[int]] = [[] for _ in requests]
        watches = [StopStrings(self.tokenizer, sampling.stop) for _ in requests]
        done: list[bool] = [False] * len(requests)
        reasons = ["length"] * len(requests)
        streams_B = request_streams(sampling.seed, [r.key for r in requests]).to(device)
        greedy_B = torch.tensor([r.greedy for r in requests], device=device)
        ends = () if sampling.ignore_eos else self._stop
        stop = frozenset(ends) | frozenset(sampling.stop_token_ids)
        alive = len(rows)
        for position in range(sampling.max_new_tokens):
            ahead = position % DRAWN_AHEAD
            if not ahead:
                uniform_BP = uniforms(
                    streams_B.unsqueeze(1), torch.arange(position, position + DRAWN_AHEAD, device=device)
                )
            token_B, logp_B = choose(logits_BV, uniform_BP[:, ahead], greedy_B, sampling)
            del logits_BV  # not needed on the device while we are suspended
            if not bool(torch.isfinite(logp_B).all()):
                bad = requests[rows[int((~torch.isfinite(logp_B)).nonzero()[0])]]
                raise NonFiniteError(
                    f"rollout: log-probability of request {bad.id!r} at position {position} is not finite "
                    f"(policy version {self.version})"
                )
            last = position + 1 == sampling.max_new_tokens
            finished = []
            for i, token, logp in zip(rows, token_B.tolist(), logp_B.tolist(), strict=True):
                if done[i]:
                    continue
                tokens[i].append(token)
                logprobs[i].append(logp)
                versions[i].append(self.version)
                if token in stop or watches[i].push(token):
                    reasons[i] = "stop"
                elif not last:
                    continue
                done[i] = True
                finished.append(i)
            alive -= len(finished)
            # Weights may be replaced while we are suspended here: each token records its own version.
            for i in finished:
                yield Generated(requests[i].id, tokens[i], logprobs[i], versions[i], reasons[i])
            if alive == 0:
                return
            if alive <= COMPACT_BELOW * len(rows):
                keep = [row for row, i in enumerate(rows) if not done[i]]
                rows = [rows[row] for row in keep]
                keep_B = torch.tensor(keep, device=device)
                cache.reorder_cache(keep_B)
                token_B, mask_BT = token_B[keep_B], mask_BT[keep_B]
                streams_B, greedy_B, uniform_BP = streams_B[keep_B], greedy_B[keep_B], uniform_BP[keep_B]
                next_position_B = next_position_B[keep_B]
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(rows), 1)], dim=1)
            logits_BV = self._next(token_B, mask_BT, next_position_B, cache)  # noqa: F841 (next turn)
            next_position_B = next_position_B + 1

    def _prefill(self, requests: list[GenerateRequest]) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]:
        """(logits [B, V], cache, mask [B, P], position of the next token [B]) of the prompts."""
        import torch

        from rlinf_engines.rollouts.decoding import growing_cache

        unique: dict[tuple[int, ...], int] = {}
        row_of = [unique.setdefault(tuple(r.prompt_ids), len(unique)) for r in requests]
        width = max(map(len, unique))
        ids_UP = torch.full((len(unique), width), int(self.tokenizer.pad_token_id), dtype=torch.int64)
        mask_UP = torch.zeros((len(unique), width), dtype=torch.int64)
        for prompt, row in unique.items():
            ids_UP[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_UP[row, width - len(prompt) :] = 1
        position_UP = (mask_UP.cumsum(dim=1) - 1).clamp(min=0)
        ids_UP, mask_UP, position_UP = (t.to(self._device) for t in (ids_UP, mask_UP, position_UP))
        cache = growing_cache(self.model.config)
        self._caches.add(cache)
        logits_UV = self._forward(ids_UP, mask_UP, position_UP, cache)
        next_U = position_UP[:, -1] + 1
        if len(unique) == len(requests):
            return logits_UV, cache, mask_UP, next_U
        index_B = torch.tensor(row_of, device=self._device)
        cache.reorder_cache(index_B)
        return logits_UV[index_B], cache, mask_UP[index_B], next_U[index_B]

    def _next(self, token_B: torch.Tensor, mask_BT: torch.Tensor, position_B: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits [B, V] after one more token of each sequence; the cache grows by it."""
        import torch

        if self._fused is None:
            return self._forward(token_B.unsqueeze(1), mask_BT, position_B.unsqueeze(1), cache)
        self._check_whole()
        bias = None
        if not bool(mask_BT.all()):
            bias = torch.zeros(mask_BT.shape).masked_fill_(mask_BT == 0, float("-inf"))[:, None, None]
        with torch.no_grad():
            return self._fused(token_B, position_B, bias, cache)

    def _check_whole(self) -> None:
        self._check_loaded("generate")
        if self._torn:
            raise RLinfError(f"rollout: {self._torn}; load whole weights before generating")

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits [B, V] of each row's last column; the cache grows by the new columns."""
        import torch

        self._check_whole()
        # no_grad, not inference_mode: parameters and cache stay usable when weights are replaced between
        # steps. Only the forward is inside, since a generator would leak the mode to its consumer.
        with torch.no_grad():
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return out.logits[:, -1]
