"""Makes the toy workers importable by name, as a user's own modules are."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "toys"))
