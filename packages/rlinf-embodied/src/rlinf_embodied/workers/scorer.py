"""The stage that counts the episodes of an evaluation; no device."""

from __future__ import annotations

import json
import time
from typing import Any

from rlinf_core import In, Worker, task
from rlinf_core.rundir import guard
from rlinf_embodied.data import Finished
from rlinf_embodied.evaluation import estimates, file_of, line

PROGRESS_S = 10.0
"""How often an evaluation says how far it is."""


class Scorer(Worker):
    """What an evaluation comes to. Reads ``cfg.eval.videos`` and ``cfg.eval.video_fps``."""

    device = False

    @task
    def evaluate(self, episodes: In[Finished], when: str = "", total: int = 0) -> dict[str, float]:
        """Count the episodes, write them to ``evaluations/<when>.jsonl`` and those that were filmed as one tiled video
        to ``evaluations/<when>.mp4``.

        ``total``: how many will come, for the progress that is told every ten seconds. Returns ``success_once``,
        ``success_at_end``, ``return``, ``length``, each with the ends of its 95 % interval (``…/low``, ``…/high``), and
        ``episodes``; see ``evaluation.estimates``.
        """
        found: list[Finished] = []
        said = time.monotonic()
        for portion in episodes.batches():
            found += portion
            self.trained(portion)
            if time.monotonic() - said >= PROGRESS_S:
                said = time.monotonic()
                of = f" of {total}" if total else ""
                self.log.info(f"{when or 'evaluation'}: {len(found)}{of} episodes")
        found.sort(key=lambda one: one.id)
        path = file_of(self.run_dir, when, ".jsonl")
        with guard(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(_line(one)) + "\n" for one in found), encoding="utf-8")
        self._write_video([one for one in found if one.frames is not None], when)
        report = estimates(one.episode for one in found)
        self.log.info(f"{when or 'evaluation'}: {line(report)}")
        return report

    def _write_video(self, filmed: list[Finished], when: str) -> None:
        """The episodes side by side, each with a border that tells whether it succeeded."""
        if not filmed or not self.cfg.eval.videos:
            return
        from rlinf_embodied.video import write_tiled

        path = file_of(self.run_dir, when, ".mp4")
        frames = [one.frames for one in filmed if one.frames is not None]
        success = [one.episode.success_once for one in filmed]
        write_tiled(path, frames, success=success, fps=self.cfg.eval.video_fps)


def _line(one: Finished) -> dict[str, Any]:
    episode = one.episode
    return {
        "episode": episode.env,
        "seed": one.seed,
        "return": episode.ret,
        "length": episode.length,
        "success_once": episode.success_once,
        "success_at_end": episode.success_at_end,
        "truncated": episode.truncated,
        **one.fields,
    }
