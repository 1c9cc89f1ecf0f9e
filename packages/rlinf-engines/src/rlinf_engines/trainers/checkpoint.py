"""Exact checkpoints: a directory that is written aside and renamed when whole.

``state.pt`` holds weights and optimizer state whole, under Hugging Face names, the step counter, and each rank's random
numbers. Nothing in it depends on how the state was split, so any number of ranks, sharding or backend that gives and
takes it (``TrainerBase._whole_state``, ``_install_state``) can go on from it. ``meta.json``, written last, names the
role, the model (names, shapes and number formats of its weights) and the size of ``state.pt``.
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
from rlinf_engines.models import replace_directory
from rlinf_engines.seeds import derive_seed

if TYPE_CHECKING:
    from rlinf_engines.trainers.base import TrainerBase

FORMAT = 2


def save(trainer: TrainerBase, path: Path) -> None:
    """Write the trainer's state to the directory ``path``: rank 0 writes; an error there is one on every rank.

    Collective. Host memory for the whole state is needed on rank 0.
    """
    state = trainer._whole_state()
    rngs = trainer._ranks().everyone(trainer._rng_state(), "saving random numbers")
    own = trainer._fingerprint()
    failure: Exception | None = None
    if trainer.parallel.rank == 0:
        try:
            _write(path, {**(state or {}), "steps_done": trainer.steps_done, "rngs": rngs}, trainer.role, own)
        except Exception as error:  # raised by ``_agree`` on every rank
            failure = error
    trainer._agree(failure, f"saving the checkpoint {path}")


def load(trainer: TrainerBase, path: Path) -> None:
    """Restore the state at ``path`` on every rank; refuses, before it changes anything anywhere, what is not whole or
    belongs to another model. Collective; every rank reads the directory.

    With the ranks that saved, random numbers go on where they were; with another number of ranks new ones begin.
    """
    failure: Exception | None = None
    state: dict[str, Any] = {}
    own = trainer._fingerprint()
    try:
        _check(path, trainer.role, own)
        state = _read(path)
    except Exception as error:  # raised by ``_agree`` on every rank
        failure = error
    trainer._agree(failure, f"loading the checkpoint {path}")
    trainer._install_state(state)
    trainer.steps_done = int(state["steps_done"])
    if len(state["rngs"]) == trainer.parallel.world_size:
        trainer._set_rng_state(state["rngs"][trainer.parallel.rank])
    else:
        torch.manual_seed(derive_seed(trainer._seed, "resumed", trainer.steps_done, trainer.replica))
    trainer.barrier()


def _write(path: Path, state: dict[str, Any], role: str, fingerprint: dict[str, str]) -> None:
    aside = path.with_name(f".{path.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    with (aside / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    meta = {
        "format": FORMAT,
        "role": role,
        "steps_done": state["steps_done"],
        "ranks": len(state["rngs"]),
        "bytes": (aside / "state.pt").stat().st_size,
        "weights": fingerprint,
    }
    with (aside / "meta.json").open("w", encoding="utf-8") as text:
        json.dump(meta, text)
        text.flush()
        os.fsync(text.fileno())
    replace_directory(aside, path)


def _check(path: Path, role: str, own: dict[str, str]) -> None:
    if not path.is_dir():
        raise ConfigError(f"checkpoint {path} does not exist")
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        size = (path / "state.pt").stat().st_size
        kind, whole, theirs = meta["format"], meta["bytes"], meta["weights"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"checkpoint {path} is not whole: {type(error).__name__}: {error}") from error
    if kind != FORMAT:
        raise ConfigError(f"checkpoint {path} has format {kind}, this trainer reads {FORMAT}")
    if size != whole:
        raise ConfigError(f"checkpoint {path} is not whole: state.pt has {size} of {whole} bytes")
    if meta.get("role") != role:
        raise ConfigError(f"checkpoint {path} is one of a {meta.get('role')}; this trainer's role is {role}")
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            raise ConfigError(
                f"checkpoint {path} is of another model: {name} is {theirs.get(name, 'absent')} there and "
                f"{own.get(name, 'absent')} here"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        # Mapped, not read: a rank touches the parts that it takes.
        state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(f"checkpoint {path} cannot be read: {error}") from error
    missing = {"weights", "optimizer", "steps_done", "rngs"} - state.keys()
    if missing:
        raise ConfigError(f"checkpoint {path} lacks {', '.join(sorted(missing))}")
    return state
