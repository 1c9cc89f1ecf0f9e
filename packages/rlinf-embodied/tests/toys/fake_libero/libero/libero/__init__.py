from __future__ import annotations

import os


def get_libero_path(what: str) -> str:
    assert what == "bddl_files"
    return os.environ["FAKE_LIBERO"]
