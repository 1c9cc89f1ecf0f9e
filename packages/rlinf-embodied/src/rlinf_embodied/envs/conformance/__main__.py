"""``python -m rlinf_embodied.envs.conformance NAME key=value ...``"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rlinf_core.errors import RLinfError
from rlinf_embodied.envs.conformance import check_env


def main(argv: Sequence[str]) -> int:
    """``NAME key=value …``: load the plugin with this configuration and check it."""
    from rlinf_core.config.node import Config
    from rlinf_embodied.envs import load_env

    if not argv or "=" in argv[0]:
        print("usage: python -m rlinf_embodied.envs.conformance NAME [key=value ...]", file=sys.stderr)
        return 2
    cfg: dict[str, Any] = {"name": argv[0]}
    for text in argv[1:]:
        key, equals, value = text.partition("=")
        if not equals:
            print(f"{text!r}: write key=value", file=sys.stderr)
            return 2
        try:
            cfg[key] = json.loads(value)
        except ValueError:
            cfg[key] = value
    try:
        report = check_env(lambda indices, seed: load_env(Config(cfg, "env"), indices, seed))
    except RLinfError as error:
        print(f"{argv[0]} does not conform: {error}", file=sys.stderr)
        return 1
    for rule, seen in report.items():
        print(f"{rule:14} {seen}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
