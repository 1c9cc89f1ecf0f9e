"""Exact checkpoints of the torch trainer: a directory that is written aside and renamed when whole.

``state.pt`` holds weights, optimizer state, step counter and each rank's RNG; ``meta.json``, written last,
names the model (a fingerprint of names, shapes and formats) and the size of ``state.pt``.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlinf_core.errors import ConfigError
from rlinf_engines.models import named_weights, replace_directory
from rlinf_engines.seeds import derive_seed

if TYPE_CHECKING:
    from rlinf_engines.trainers.torch_trainer import TorchTrainer

FORMAT = 1


def save(trainer: TorchTrainer, path: Path) -> None:
    """Write the trainer's state to the directory ``path`` (rank 0 writes; collective)."""
    rngs = _gather_rng(trainer)
    if trainer.parallel.rank == 0:
        aside = path.with_name(f".{path.name}.part")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        with (aside / "state.pt").open("wb") as file:
            torch.save(
                {
                    "weights": dict(named_weights(trainer.model)),
                    "optimizer": trainer.optimizer.state_dict(),
                    "steps_done": trainer.steps_done,
                    "rngs": rngs,
                },
                file,
            )
            file.flush()
            os.fsync(file.fileno())
        meta = {
            "format": FORMAT,
            "bytes": (aside / "state.pt").stat().st_size,
            "weights": _fingerprint(trainer.model),
        }
        (aside / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        replace_directory(aside, path)
    trainer.barrier()


def load(trainer: TorchTrainer, path: Path) -> None:
    """Restore the state at ``path`` on every rank; refuses, before it changes anything, what is not whole
    or belongs to another model."""
    _check(trainer, path)
    try:
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(f"checkpoint {path} cannot be read: {error}") from error
    with torch.no_grad():
        for name, tensor in named_weights(trainer.model):
            tensor.copy_(state["weights"][name])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.steps_done = int(state["steps_done"])
    _restore_rng(trainer, state["rngs"])
    trainer.barrier()


def _check(trainer: TorchTrainer, path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"checkpoint {path} does not exist")
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        size = (path / "state.pt").stat().st_size
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint {path} is not whole: {error}") from error
    if meta.get("format") != FORMAT:
        raise ConfigError(f"checkpoint {path} has format {meta.get('format')}, this trainer reads {FORMAT}")
    if size != meta["bytes"]:
        raise ConfigError(f"checkpoint {path} is not whole: state.pt has {size} of {meta['bytes']} bytes")
    own, theirs = _fingerprint(trainer.model), meta["weights"]
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            raise ConfigError(
                f"checkpoint {path} is of another model: {name} is {theirs.get(name, 'absent')} there and "
                f"{own.get(name, 'absent')} here"
            )


def _fingerprint(model: Any) -> dict[str, str]:
    return {n: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for n, t in named_weights(model)}


def _gather_rng(trainer: TorchTrainer) -> list[dict[str, torch.Tensor]]:
    mine = {"cpu": torch.get_rng_state()}
    if trainer._device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(trainer._device)
    if trainer.parallel.world_size == 1:
        return [mine]
    import torch.distributed as dist

    everyone: list[dict[str, torch.Tensor]] = [{} for _ in range(trainer.parallel.world_size)]
    dist.all_gather_object(everyone, mine)
    return everyone


def _restore_rng(trainer: TorchTrainer, rngs: list[dict[str, torch.Tensor]]) -> None:
    if len(rngs) != trainer.parallel.world_size:
        # Another number of ranks cannot continue the same streams; begin new ones that no step has used.
        torch.manual_seed(derive_seed(trainer._seed, "resumed", trainer.steps_done, trainer.parallel.rank))
        return
    mine = rngs[trainer.parallel.rank]
    torch.set_rng_state(mine["cpu"])
    if trainer._device.type == "cuda" and "cuda" in mine:
        torch.cuda.set_rng_state(mine["cuda"], trainer._device)
