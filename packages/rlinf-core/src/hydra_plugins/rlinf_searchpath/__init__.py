"""Adds every installed conf package (entry-point group ``rlinf.recipes``) to Hydra's search path."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class RLinfSearchPathPlugin(SearchPathPlugin):
    """Hydra does not read entry points; this plugin does. A package that cannot be imported is left out here and
    named by ``rlinf_core.config.compose`` when it matters."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from rlinf_core.config.sources import conf_packages

        for package in conf_packages():
            if not package.error:
                search_path.append(provider=f"rlinf ({package.distribution})", path=f"pkg://{package.module}")
