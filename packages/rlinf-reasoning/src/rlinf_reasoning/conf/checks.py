"""What spans keys in the reasoning configs. Each check returns messages ``key: what is wrong, what would be right``."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from rlinf_core.errors import ConfigError
from rlinf_core.registry import check_name
from rlinf_reasoning.tasks.chat import room_for_prompts

# Trainers that want a torch.distributed group on one rank too.
GROUPED = ("deepspeed", "megatron")


def check_pattern(pattern: str | None) -> list[str]:
    if pattern is None:
        return []
    try:
        re.compile(pattern)
    except re.error as error:
        return [f"task.pattern: {pattern!r} is not a regular expression: {error}"]
    return []


def check_template(template: str) -> list[str]:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        return [f"task.template: {template!r} is not a format string: {error}"]
    if not names:
        return [
            f"task.template: {template!r} names no field, all prompts would be equal; use {{question}} or {{prompt}}"
        ]
    return []


def check_function(function: str) -> list[str]:
    module, colon, name = function.partition(":")
    if colon and module and name:
        return []
    return [f"reward.function: {function!r} is not of the form module:function"]


def check_reward(reward: Any) -> list[str]:
    """That the reward's plugin is there, and that the chosen option has the keys that it needs."""
    own = {"function": "function", "math": "timeout_s"}
    if reward.name in own and own[reward.name] not in reward:
        return [f"reward.name: {reward.name!r} has keys of its own; choose it with reward={reward.name}"]
    return [] if reward.name == "function" else check_name("rlinf.rewards", reward.name, "reward.name")


def check_jsonl(path: str, template: str, root: Any) -> list[str]:
    """Read the whole file: its faults, and whether it fills the evaluation, the warm start and a batch."""
    from rlinf_reasoning.tasks.base import load_data
    from rlinf_reasoning.tasks.jsonl_task import JsonlTask

    try:
        load_data(root, JsonlTask(root.task))
    except ConfigError as error:
        return [str(error)]
    return []


def check_stop(stop: Sequence[str], model: Any) -> list[str]:
    """That each of ``sampling.stop`` is a text that a response can come to, and is needed."""
    problems = []
    tiny = "path" in model and model.path is None
    for index, text in enumerate(stop):
        if not text:
            problems.append("sampling.stop: an empty text would end every response at once; leave it out")
        elif text in stop[:index]:
            problems.append(f"sampling.stop: {text!r} is there twice")
        elif tiny and (others := sorted(set(text) - set(model.tiny.characters))):
            problems.append(
                f"sampling.stop: {text!r} never comes up, the tiny model has no {others[0]!r} (model.tiny.characters)"
            )
        elif shorter := next((s for s in stop if s and s != text and s in text), None):
            problems.append(f"sampling.stop: {text!r} never comes up, its part {shorter!r} ends the response before")
    return problems


def check_recipe(root: Any) -> list[str]:
    """Impossible combinations of a recipe's own keys."""
    problems = []
    warm = root.warm_start
    if warm.max_steps and warm.problems < warm.held_out + warm.batch_size:
        problems.append(
            f"warm_start.problems: {warm.problems} is less than warm_start.held_out={warm.held_out} + "
            f"warm_start.batch_size={warm.batch_size}; give at least {warm.held_out + warm.batch_size}, "
            "or warm_start.max_steps=0 to skip the phase"
        )
    if warm.max_steps and not warm.held_out:
        problems.append("warm_start.held_out: 0 leaves nothing to measure warm_start.target_accuracy on; try 128")
    rollout, trainer = root.rollout, root.trainer.name
    if root.cluster.debug and trainer in GROUPED and rollout.name == "vllm" and not rollout.engine_process:
        problems.append(
            f"rollout.engine_process: with cluster.debug=true, vllm and {trainer} would be in one process, whose "
            "torch.distributed group each of them takes for its own; set rollout.engine_process=true"
        )
    return problems + check_room(root)


def check_room(root: Any) -> list[str]:
    """That the model takes a prompt beside the longest response."""
    room, response = room_for_prompts(root), root.sampling.max_new_tokens
    if room is None or room >= 1:
        return []
    keys = "model.tiny.max_positions" if root.model.path is None else "its config.json"
    if root.model.path is not None and "max_model_len" in root.rollout:
        keys += ", or rollout.max_model_len"
    return [
        f"sampling.max_new_tokens: {response} leaves no room for a prompt in the model's {response + room} positions "
        f"({keys})"
    ]
