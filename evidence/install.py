"""From a fresh clone to ready: seconds and size of each set-up."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

import _common as common


def main() -> None:
    args = common.arguments(__doc__ or "")
    lines, data = [], {}
    with tempfile.TemporaryDirectory(prefix="rlinf-install-") as folder:
        clone = Path(folder) / "rlinf"
        subprocess.run(["git", "clone", "-q", str(Path.cwd()), str(clone)], check=True)
        for target, what in (("setup-run", "for `make run`"), ("setup", "then all that `make test` adds")):
            began = time.perf_counter()
            subprocess.run(["make", target], cwd=clone, check=True)
            spent = time.perf_counter() - began
            size = subprocess.run(["du", "-sm", ".venv"], cwd=clone, check=True, capture_output=True, text=True)
            megabytes = int(size.stdout.split()[0])
            data[target] = {"seconds": spent, "megabytes": megabytes}
            lines.append([what, f"{spent:.0f} s", f"{megabytes} MB"])
    text = "The size is that of `.venv` afterwards; wheels came from the local package cache where there is one.\n\n"
    common.write(args.out, "Installation", text + common.table(["set-up", "time", ".venv"], lines), data)


if __name__ == "__main__":
    main()
