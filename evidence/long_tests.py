"""The tests that take minutes, most of them on a real pretrained model: each with its outcome and its seconds."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import _common as common


def main() -> None:
    args = common.arguments(__doc__ or "")
    with tempfile.TemporaryDirectory(prefix="rlinf-evidence-") as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "long and not gpu",
            f"--junitxml={report}",
            "packages",
            "tests",
        ]
        code = subprocess.run(command).returncode
        rows = []
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            rows.append([name, bad[0] if bad else "passed", f"{float(case.get('time', 0)):.0f}"])
    if code != 0:
        raise SystemExit(f"pytest ended with {code}")
    common.write(args.out, "Tests that take minutes", common.table(["test", "outcome", "seconds"], rows), rows)


if __name__ == "__main__":
    main()
