"""Several episodes side by side in one video.

Shape legend: E episodes, T frames of one, H x W its pictures.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import MissingExtraError, RLinfError, describe
from rlinf_core.registry import install_command
from rlinf_core.rundir import explain_save_error

Frames = NDArray[np.uint8]

SUCCEEDED, FAILED, UNKNOWN = (46, 160, 67), (207, 34, 46), (110, 110, 110)
"""Colours of the borders."""
AFTER = 0.45
"""How bright an episode is that has ended while others go on; its last picture stays."""


def write_tiled(
    path: str | Path, episodes: Sequence[Frames], *, success: Sequence[bool] | None = None, fps: int = 20
) -> None:
    """Write the episodes, each uint8 [T, H, W, 3], as tiles of one mp4 video (H.264) at ``path``.

    Lengths and sizes may differ: the shorter ones stay at their last picture, darkened, and the smaller ones are
    centred in tiles of the largest size. A border is green where ``success`` is true, red where it is false, and grey
    without ``success``. The file appears when it is whole. It needs the extra ``video``.

    Raises:
        MissingExtraError: imageio-ffmpeg is not installed.
        RLinfError: there is nothing to show, pictures are no such arrays, or the video cannot be written
            (RunDirectoryError: the disk is full).
    """
    _check(episodes, success)
    colours = [UNKNOWN] * len(episodes) if success is None else [SUCCEEDED if one else FAILED for one in success]
    try:
        import imageio_ffmpeg
    except ImportError as error:
        how = install_command("rlinf-embodied[video]")
        raise MissingExtraError(
            f"a video needs imageio-ffmpeg, which is not installed; install it with: {how}"
        ) from error

    target = Path(path)
    aside = target.with_name(f".{target.stem}.part.mp4")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        pictures = tiled(episodes, colours)
        first = next(pictures)
        writer: Any = imageio_ffmpeg.write_frames(
            str(aside),
            (first.shape[1], first.shape[0]),
            fps=fps,
            codec="libx264",
            pix_fmt_in="rgb24",
            pix_fmt_out="yuv420p",
            macro_block_size=2,
            ffmpeg_log_level="error",
            output_params=["-movflags", "+faststart"],
        )
        writer.send(None)
        try:
            writer.send(first)
            for picture in pictures:
                writer.send(picture)
        finally:
            writer.close()
        aside.replace(target)
    except (OSError, RuntimeError) as error:
        full = explain_save_error(target, error)  # of a full disk ffmpeg tells us no more than a broken pipe
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        if full is not None:
            raise full from error
        raise RLinfError(f"the video {target} cannot be written: {describe(error, 500)}") from error


def tiled(episodes: Sequence[Frames], colours: Sequence[tuple[int, int, int]]) -> Iterator[Frames]:
    """The pictures of the video, [rows x tile, columns x tile, 3], one by one; both sides are even."""
    height = max(episode.shape[1] for episode in episodes)
    width = max(episode.shape[2] for episode in episodes)
    edge = max(2, min(height, width) // 32)
    columns = math.ceil(math.sqrt(len(episodes)))
    rows = math.ceil(len(episodes) / columns)
    tile = (height + 2 * edge, width + 2 * edge)
    whole = np.zeros((_even(rows * tile[0]), _even(columns * tile[1]), 3), dtype=np.uint8)
    places = []
    for number, (episode, colour) in enumerate(zip(episodes, colours, strict=True)):
        top, left = (number // columns) * tile[0], (number % columns) * tile[1]
        whole[top : top + tile[0], left : left + tile[1]] = colour
        inner = whole[top + edge : top + edge + height, left + edge : left + edge + width]
        inner[:] = 0
        above, before = (height - episode.shape[1]) // 2, (width - episode.shape[2]) // 2
        places.append(inner[above : above + episode.shape[1], before : before + episode.shape[2]])
    for time in range(max(len(episode) for episode in episodes)):
        for episode, place in zip(episodes, places, strict=True):
            if time < len(episode):
                place[:] = episode[time]
            elif time == len(episode):
                place[:] = (episode[-1] * AFTER).astype(np.uint8)
        yield whole


def _even(number: int) -> int:
    return number + number % 2


def _check(episodes: Sequence[Any], success: Sequence[bool] | None) -> None:
    if not len(episodes):
        raise RLinfError("there is no episode to make a video of")
    if success is not None and len(success) != len(episodes):
        raise RLinfError(f"{len(episodes)} episodes of a video have {len(success)} successes; one for each is right")
    for number, episode in enumerate(episodes):
        if not isinstance(episode, np.ndarray) or episode.dtype != np.uint8 or episode.ndim != 4:
            what = (
                f"{episode.dtype} of shape {episode.shape}"
                if isinstance(episode, np.ndarray)
                else type(episode).__name__
            )
            raise RLinfError(f"pictures of episode {number} of a video are {what}; uint8 [frames, H, W, 3] is right")
        if 0 in episode.shape or episode.shape[3] != 3:
            raise RLinfError(
                f"pictures of episode {number} of a video have shape {episode.shape}; [frames, H, W, 3] without a 0 "
                "is right"
            )
