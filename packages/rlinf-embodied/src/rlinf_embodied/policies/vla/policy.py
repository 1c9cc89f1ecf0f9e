"""The vision-language-action policy: a picture and an instruction to a chunk of actions, one token per number.

In the style of OpenVLA (Kim et al., arXiv 2406.09246): image patches come after the begin token, then the prompt, then
the action tokens. ``decoding=autoregressive`` draws one token after the other, each given those before it;
``parallel`` draws all at once from placeholders (zero embeddings), as OpenVLA-OFT (arXiv 2502.19645) does, but with
causal attention: tokens are then independent of each other given the observation.

Shape legend: B decisions, C steps of a chunk, D numbers of an action, N = C D action tokens, P patches, L prompt
tokens, H the language model's width, K action bins.

A checkpoint of OpenVLA itself (7 billion parameters) has the same layout, names and sizes, which tests check on small
models alone; it has not been run here. What would have to match, and is not tested: the numbers of its pictures
(bicubic with antialiasing by torch, where it has PIL's), ``image_resize_strategy`` other than resize-naive (refused),
encoders other than those of ``vision.TIMM`` (refused), a checkpoint's own conventions for actions (one fine-tuned on
LIBERO gives the gripper as 0 ... 1 with 1 for open, where the simulator wants 1 ... -1), and pictures as it was
trained with (one fine-tuned on LIBERO saw them turned by 180 degrees from the simulator's upside-down ones, so
mirrored, and with a centre crop). Log-probs and the mode are over the action tokens, not over the whole vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError, nearest
from rlinf_embodied.envs.base import Box, EnvSpec, Observation, Text
from rlinf_embodied.policies.base import Decision
from rlinf_embodied.policies.vla import layout
from rlinf_embodied.policies.vla.network import Network, load_parts
from rlinf_embodied.policies.vla.prompt import Prompts

INSTRUCTION = "instruction"


class VlaPolicy(Network):
    """See ``rlinf_embodied.policies.base.Policy``. ``taken`` are token ids (int64 [B, C, D]).

    ``cfg`` is the node ``model`` (``rlinf_embodied.conf.vla.Vla``). Raises ConfigError when the environment lacks the
    picture or the instruction, or has no actions within bounds, or other ones than the checkpoint.
    """

    def __init__(self, cfg: Any, spec: EnvSpec, seed: int) -> None:
        _check_observations(cfg, spec)
        parts = load_parts(cfg, spec)
        if not isinstance(spec.action, Box) or spec.action.shape != (parts.actions.dims,):
            raise ConfigError(
                f"model.path: {cfg.path} acts with {parts.actions.dims} numbers, and the environment's actions are "
                f"{spec.action}; use a checkpoint for this environment"
            )
        super().__init__(parts, cfg.value_level == "chunk")
        self.initialise(parts, cfg.dtype, seed)
        self.chunk = int(cfg.chunk)
        self.tokens = parts.actions.dims
        self.value_level = "chunk" if cfg.value_level == "chunk" else "none"
        patches = self.vision_backbone.featurizer.pos_embed.shape[1]
        self.tokens_per_decision = patches + int(cfg.prompt_tokens) + self.chunk * self.tokens
        """The most tokens that the language model sees for a decision."""
        self.parts = parts
        self._image = str(cfg.image)
        self._parallel = cfg.decoding == "parallel"
        self._temperature = float(cfg.temperature)
        self._prompts = Prompts(parts.tokenizer, int(cfg.prompt_tokens))
        _check_length(self, cfg)

    @torch.no_grad()
    def act(self, obs: Observation, uniform: NDArray[np.float64], *, greedy: bool = False) -> Decision:
        """See ``Policy.act``. Tokens are drawn by inverting the cumulative distribution over the bins, lowest action
        first, in float64. Raises NonFiniteError when the network gives no numbers."""
        inputs = {name: tensor.to(self.device) for name, tensor in self.prepare(obs).items()}
        shape = (len(inputs["input_ids"]), self.chunk, self.tokens)
        numbers: torch.Tensor | None = None
        if not greedy:
            if uniform.shape != shape:
                raise RLinfError(f"uniform numbers have shape {uniform.shape}; {shape} is right")
            numbers = torch.from_numpy(np.array(uniform, dtype=np.float64)).reshape(shape[0], -1).to(self.device)
        tokens, logprobs, hidden = (self._parallel_tokens if self._parallel else self._tokens)(inputs, numbers)
        taken = tokens.reshape(shape).cpu().numpy()
        return Decision(
            actions=self.parts.actions.decode(taken).astype(np.float32),
            taken=taken,
            logprobs=logprobs.reshape(shape).float().cpu().numpy(),
            values=self.values(hidden).float().cpu().numpy() if self.value_level == "chunk" else None,
        )

    @torch.no_grad()
    def value(self, obs: Observation) -> NDArray[np.float32]:
        """See ``Policy.value``: [B, 1]. Raises RLinfError without a value head."""
        if self.value_level == "none":
            raise RLinfError("model.value_level=none: this policy has no values; model.value_level=chunk gives it some")
        inputs = {name: tensor.to(self.device) for name, tensor in self.prepare(obs).items()}
        values: NDArray[np.float32] = self.values(self.run(*self.prefix(inputs))[:, -1]).float().cpu().numpy()
        return values

    def prepare(self, obs: Observation) -> dict[str, torch.Tensor]:
        """``pixel_values`` float32 [B, 3 E, S, S] of E encoders, ``input_ids`` int64, ``prompt_mask`` bool [B, L]."""
        for name in (self._image, INSTRUCTION):
            if name not in obs:
                raise RLinfError(f"the policy needs the observation {name!r}; there are {', '.join(sorted(obs))}")
        ids, real = self._prompts(obs[INSTRUCTION])
        return {
            "pixel_values": self.parts.pixels(np.ascontiguousarray(obs[self._image])),
            "input_ids": torch.from_numpy(ids),
            "prompt_mask": torch.from_numpy(real),
        }

    def evaluate(self, inputs: dict[str, torch.Tensor], taken: torch.Tensor) -> dict[str, torch.Tensor]:
        """See ``Policy.evaluate``. Ids that are no action tokens (a filler's) count as the nearest that is."""
        shape = (len(taken), self.chunk, self.tokens)
        tokens = taken.reshape(len(taken), -1).long()
        given = self.embed(tokens[:, :-1])
        hidden = self.extended(self.prefix(inputs), torch.zeros_like(given) if self._parallel else given)
        logs = torch.log_softmax(self.bin_logits(hidden) / self._temperature, dim=-1)
        bins = (self.parts.actions.vocabulary - 1 - tokens).clamp(0, self.parts.actions.bins - 1)
        outputs = {
            "logprobs": logs.gather(-1, bins[..., None]).reshape(shape),
            "entropy": -(logs.exp() * logs).sum(dim=-1).reshape(shape),
        }
        if self.value_level == "chunk":
            outputs["values"] = self.values(hidden[:, 0])
        return outputs

    def forward(self, inputs: dict[str, torch.Tensor], taken: torch.Tensor) -> dict[str, torch.Tensor]:
        """``evaluate``, for wrappers that have to see the call."""
        return self.evaluate(inputs, taken)

    def observe(self, inputs: dict[str, torch.Tensor]) -> None:
        """Nothing: this policy keeps no running statistics."""

    @staticmethod
    def export(module: Any, weights: dict[str, torch.Tensor], path: Path) -> None:
        """Write a directory in the OpenVLA layout (``layout``), which exists; ``model.path`` loads it again."""
        parts = module.parts
        layout.write(Path(path), parts.config, weights, parts.tokenizer, parts.pixels)

    # Tokens: (ids [B, N], their log-probs [B, N], hidden state [B, H] of the prefix's last place)

    def _tokens(self, inputs: dict[str, torch.Tensor], numbers: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """One token after the other, each given those before it, with a cache of keys and values."""
        from transformers import DynamicCache

        embedded, keep, positions = self.prefix(inputs)
        cache = DynamicCache()
        last = first = self.run(embedded, keep, positions, cache)[:, -1]
        tokens, logprobs = [], []
        total = self.chunk * self.tokens
        for place in range(total):
            token, logprob = self._draw(last, None if numbers is None else numbers[:, place])
            tokens.append(token)
            logprobs.append(logprob)
            if place + 1 < total:
                keep = torch.cat([keep, keep.new_ones(len(keep), 1)], dim=1)
                positions = positions[:, -1:] + 1
                last = self.run(self.embed(token[:, None]), keep, positions, cache)[:, -1]
        return torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1), first

    def _parallel_tokens(
        self, inputs: dict[str, torch.Tensor], numbers: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """All tokens at once, from placeholders."""
        prefix = self.prefix(inputs)
        width = prefix[0].shape[2]
        hidden = self.extended(prefix, prefix[0].new_zeros(len(prefix[0]), self.chunk * self.tokens - 1, width))
        tokens, logprobs = self._draw(hidden, numbers)
        return tokens, logprobs, hidden[:, 0]

    def _draw(self, hidden: torch.Tensor, numbers: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, log-probs), as ``hidden`` [..., H] without its last dimension; ``numbers`` ``None``: the mode."""
        logits = self.bin_logits(hidden) / self._temperature
        if not torch.isfinite(logits).all():
            raise NonFiniteError("the policy's logits are not all finite: its weights or a picture hold NaN")
        if numbers is None:
            bins = logits.argmax(dim=-1)
        else:
            cumulative = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
            wanted = (numbers * cumulative[..., -1])[..., None]
            bins = torch.searchsorted(cumulative, wanted, right=True)[..., 0].clamp_(max=logits.shape[-1] - 1)
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, bins[..., None])[..., 0]
        return self.parts.actions.vocabulary - 1 - bins, logprobs


def _check_observations(cfg: Any, spec: EnvSpec) -> None:
    """That the environment has the picture and the instruction."""
    has = spec.observations
    pictures = [name for name, space in has.items() if isinstance(space, Box) and _is_picture(space)]
    if cfg.image not in pictures:
        raise ConfigError(
            f"model.image={cfg.image}: the environment has no picture of that name{nearest(cfg.image, pictures)}; its "
            f"pictures: {', '.join(pictures) or 'none'}, its observations: {', '.join(has)}"
        )
    if not isinstance(has.get(INSTRUCTION), Text):
        raise ConfigError(
            f"model.name=vla: the policy needs the observation {INSTRUCTION!r}, a text, and the environment has "
            f"{', '.join(has)}; use an environment with instructions (env=libero), or another policy (model=mlp)"
        )


def _is_picture(space: Box) -> bool:
    return space.dtype == "uint8" and len(space.shape) == 3 and space.shape[2] == 3


def _check_length(policy: VlaPolicy, cfg: Any) -> None:
    """That everything fits into the language model."""
    most = getattr(policy.parts.text_config, "max_position_embeddings", None)
    if most is not None and policy.tokens_per_decision > most:
        raise ConfigError(
            f"model.chunk={policy.chunk}: the picture's patches, model.prompt_tokens={cfg.prompt_tokens} and "
            f"{policy.chunk} x {policy.tokens} action tokens are {policy.tokens_per_decision} tokens, and the language "
            f"model has {most} positions"
        )
