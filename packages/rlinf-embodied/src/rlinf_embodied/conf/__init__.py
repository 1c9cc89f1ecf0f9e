"""Config schemas of the embodied recipes: groups ``env``, ``model`` and ``algorithm``, and the recipes themselves.

Standard library only: composing a config must load neither torch nor a simulator. Field metadata carries ``help`` and,
where they apply, ``min``, ``max`` and ``choices``.
"""

from __future__ import annotations

from rlinf_embodied.conf import algorithms, envs, libero, models, recipes, vla

SCHEMAS: dict[str, type] = {
    **recipes.SCHEMAS,
    **algorithms.SCHEMAS,
    **models.SCHEMAS,
    **vla.SCHEMAS,
    **envs.SCHEMAS,
    **libero.SCHEMAS,
}
