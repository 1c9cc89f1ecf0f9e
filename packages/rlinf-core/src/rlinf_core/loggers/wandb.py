"""Weights & Biases (https://wandb.ai): one run for each run directory.

Set it up with its own variables: ``WANDB_PROJECT`` (``rlinf`` by default), ``WANDB_NAME``, ``WANDB_ENTITY``,
``WANDB_TAGS``, ``WANDB_MODE=offline`` (files below the run directory, for ``wandb sync`` later; what a run that goes on
writes is in ``wandb-2/`` and so on).
"""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path
from typing import Any

from rlinf_core.errors import RLinfError
from rlinf_core.loggers import PROJECT, axis, read_config, run_name

REQUIRES = {"wandb": "wandb"}
ID_FILE = "wandb-id"


class WandbLogger:
    """Metrics as ``phase/name`` over ``phase/step``, with the run's whole configuration.

    The id of the run is kept in the run directory, so that a run that goes on in it is the same one there; the points
    after the checkpoint that it goes on from are then there twice.

    Raises:
        RLinfError: the service refuses (no key, no network); the message says how to do without it.
    """

    def __init__(self, run_dir: Path) -> None:
        import wandb

        self._run_dir = run_dir
        self._phases: set[str] = set()
        self._configured = False
        path = run_dir / ID_FILE
        if path.is_file():
            identity = path.read_text(encoding="utf-8").strip()
        else:
            identity = uuid.uuid4().hex[:12]
            path.write_text(identity + "\n", encoding="utf-8")
        offline = os.environ.get("WANDB_MODE", "online") != "online"
        place = run_dir
        # wandb names a folder after the second; a run that goes on within it would overwrite what was written before.
        if earlier := len(list(run_dir.glob(f"**/offline-run-*-{identity}"))):
            place = run_dir / f"wandb-{earlier + 1}"
            place.mkdir(exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                name=os.environ.get("WANDB_NAME") or run_name(run_dir),
                id=identity,
                dir=str(place),
                resume=None if offline else "allow",  # offline there is nobody to ask; `wandb sync` joins equal ids
                settings=wandb.Settings(console="off", quiet=True),  # the progress line is not for a log file
            )
        except wandb.Error as error:
            raise RLinfError(
                f"loggers: wandb cannot begin a run: {error}; log in with `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def log(self, step: int, phase: str, metrics: dict[str, float]) -> None:
        if not self._configured:
            self._configured = True
            self._run.config.update(read_config(self._run_dir), allow_val_change=True)
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        values = {f"{phase}/{name}": value for name, value in metrics.items()}
        self._run.log({**values, f"{phase}/step": axis(step, metrics)})

    def close(self) -> None:
        """Send what is left. A run that ends with an error is marked as failed there."""
        self._run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)
