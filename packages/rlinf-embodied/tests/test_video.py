"""Tiled videos, read back."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlinf_core import rundir
from rlinf_core.errors import MissingExtraError, RLinfError, RunDirectoryError
from rlinf_embodied.video import AFTER, FAILED, SUCCEEDED, UNKNOWN, tiled, write_tiled

NOISE = 14  # what the compression may change a flat colour by
EDGE = 2


def flat(colour: tuple[int, int, int], frames: int, height: int = 48, width: int = 64) -> Any:
    return np.tile(np.array(colour, dtype=np.uint8), (frames, height, width, 1))


def read(path: Path) -> tuple[dict[str, Any], list[Any]]:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    reader = ffmpeg.read_frames(str(path))
    about = next(reader)
    width, height = about["size"]
    return about, [np.frombuffer(frame, dtype=np.uint8).reshape(height, width, 3) for frame in reader]


def near(pixel: Any, colour: tuple[int, int, int]) -> bool:
    return bool((np.abs(pixel.astype(int) - np.array(colour)) <= NOISE).all())


def test_episodes_of_equal_size_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "new" / "episodes.mp4"
    colours = [(200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40)]
    write_tiled(path, [flat(colour, 6) for colour in colours], success=[True, False, False, True], fps=12)
    about, frames = read(path)
    assert about["fps"] == 12
    assert about["codec"].startswith("h264")
    assert len(frames) == 6
    high, wide = 48 + 2 * EDGE, 64 + 2 * EDGE
    assert frames[0].shape == (2 * high, 2 * wide, 3)
    for frame in frames:
        for number, colour in enumerate(colours):
            top, left = number // 2 * high, number % 2 * wide
            assert near(frame[top + high // 2, left + wide // 2], colour)
    assert [path.name for path in path.parent.iterdir()] == ["episodes.mp4"]


def test_borders_tell_success() -> None:
    black = [flat((0, 0, 0), 1, 32, 32)] * 3
    picture = next(tiled(black, [SUCCEEDED, FAILED, UNKNOWN]))
    assert picture.shape == (72, 72, 3)
    for (top, left), colour in zip(((0, 0), (0, 36), (36, 0)), (SUCCEEDED, FAILED, UNKNOWN), strict=True):
        tile = picture[top : top + 36, left : left + 36]
        for edge in (tile[:2], tile[-2:], tile[:, :2], tile[:, -2:]):
            assert (edge == np.array(colour)).all()
        assert (tile[2:-2, 2:-2] == 0).all()
    assert (picture[36:, 36:] == 0).all()  # no fourth episode


def test_borders_are_seen_in_the_file(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "a.mp4"
    big = [flat((0, 0, 0), 3, 256, 256) for _ in range(2)]
    write_tiled(path, big, success=[True, False])
    _, frames = read(path)
    edge = 8
    assert frames[1].shape == (256 + 2 * edge, 2 * (256 + 2 * edge), 3)
    assert near(frames[1][130, 3], SUCCEEDED)
    assert near(frames[1][130, 256 + 2 * edge + 3], FAILED)


def test_shorter_episodes_wait_darkened() -> None:
    pictures = [
        picture.copy() for picture in tiled([flat((200, 100, 50), 2, 32, 32), flat((9, 9, 9), 5, 32, 32)], [FAILED] * 2)
    ]
    assert len(pictures) == 5
    assert (pictures[1][18, 18] == (200, 100, 50)).all()
    dark = (np.array((200, 100, 50)) * AFTER).astype(np.uint8)
    for picture in pictures[2:]:
        assert (picture[18, 18] == dark).all()
        assert (picture[18, 36 + 18] == 9).all()


def test_smaller_episodes_are_centred_and_sizes_are_even(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    small, large = flat((250, 250, 250), 2, 11, 15), flat((120, 120, 120), 4, 41, 33)
    picture = next(tiled([small, large], [UNKNOWN] * 2))
    high, wide = 41 + 2 * EDGE, 33 + 2 * EDGE
    assert picture.shape == (high + high % 2, 2 * wide, 3)
    inside = picture[EDGE : high - EDGE, EDGE : wide - EDGE]
    rows, columns = np.nonzero((inside == 250).all(axis=2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (15, 25, 9, 23)
    path = tmp_path / "odd.mp4"
    write_tiled(path, [small, large])
    _, frames = read(path)
    assert len(frames) == 4
    assert frames[0].shape == picture.shape


def test_one_episode(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    write_tiled(str(tmp_path / "one.mp4"), [flat((30, 60, 90), 1)])
    _, frames = read(tmp_path / "one.mp4")
    assert len(frames) == 1
    assert near(frames[0][25, 30], (30, 60, 90))


@pytest.mark.parametrize(
    ("episodes", "success", "words"),
    [
        ([], None, "no episode"),
        ([flat((0, 0, 0), 2)], [True, False], "1 episodes of a video have 2 successes"),
        ([flat((0, 0, 0), 2), flat((0, 0, 0), 2).astype(np.float32)], None, "episode 1 of a video are float32"),
        ([flat((0, 0, 0), 2)[0]], None, r"episode 0 of a video are uint8 of shape \(48, 64, 3\)"),
        ([[1, 2]], None, "episode 0 of a video are list"),
        ([flat((0, 0, 0), 0)], None, r"shape \(0, 48, 64, 3\)"),
        ([flat((0, 0, 0), 2)[..., :1]], None, r"shape \(2, 48, 64, 1\)"),
    ],
)
def test_what_is_no_video_is_named(tmp_path: Path, episodes: Any, success: Any, words: str) -> None:
    with pytest.raises(RLinfError, match=words):
        write_tiled(tmp_path / "a.mp4", episodes, success=success)
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingExtraError, match=r"imageio-ffmpeg.*rlinf-embodied\[video\]"):
        write_tiled(tmp_path / "a.mp4", [flat((0, 0, 0), 2)])


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    (tmp_path / "file").write_text("")
    with pytest.raises(RLinfError, match="cannot be written"):
        write_tiled(tmp_path / "file" / "a.mp4", [flat((0, 0, 0), 2)])


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ffmpeg ends, and the pipe to it is broken: the message must not stop at that."""
    ffmpeg = pytest.importorskip("imageio_ffmpeg")

    def broken(*args: Any, **options: Any) -> Any:
        yield
        raise OSError("[Errno 32] Broken pipe\n\nFFMPEG COMMAND: ...")

    monkeypatch.setattr(ffmpeg, "write_frames", broken)
    with pytest.raises(RLinfError, match="a.mp4 cannot be written: OSError: .*Broken pipe"):
        write_tiled(tmp_path / "a.mp4", [flat((0, 0, 0), 2)])
    monkeypatch.setattr(rundir.shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    with pytest.raises(RunDirectoryError, match=r"^cannot write .*a.mp4: No space left on device$"):
        write_tiled(tmp_path / "a.mp4", [flat((0, 0, 0), 2)])
