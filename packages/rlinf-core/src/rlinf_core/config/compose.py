"""Compose a recipe's configuration: YAML and config groups by Hydra, types and messages by us.

Hydra finds the YAML (conf packages on its search path), resolves the defaults list and the choice of config-group
options, and parses override syntax. Values are then put, key by key, into typed OmegaConf nodes built from the
packages' dataclasses, so that every fault can name its key. Nothing here imports ray, torch or transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlinf_core.conf import CoreConfig
from rlinf_core.config import sources, values
from rlinf_core.config.node import Config
from rlinf_core.config.schema import UNTYPED, KeyInfo, Schema
from rlinf_core.config.user_recipe import find_recipe, load_user_module
from rlinf_core.config.values import RecipeSource, first_line
from rlinf_core.errors import ConfigError, MissingExtraError, nearest
from rlinf_core.registry import OURS, Registry, install_command, lacking, missing_imports

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

MAIN = "rlinf_main"
PLUGIN_SECTIONS = {"trainer": "rlinf.trainers", "rollout": "rlinf.rollouts"}
"""Config sections whose ``name`` is a plugin that a worker loads."""


@dataclass(frozen=True)
class Composed:
    """A composed configuration and what it was made of. ``name`` is the recipe's name for the run directory."""

    name: str
    config: Config
    schema: Schema
    choices: dict[str, str]

    def list_keys(self) -> list[KeyInfo]:
        """Every key of the recipe, with its type, value and help."""
        return list(self.schema.keys(self.config.to_dict()))


def compose(recipe: str, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """The configuration of ``recipe`` with ``overrides`` (``key=value``) applied.

    ``recipe`` is the name of an installed one (``reasoning/grpo_arithmetic``) or the path of a ``.py`` file with a
    function decorated ``@recipe``. Raises ConfigError, with one line for the user, for anything that is wrong.
    """
    return compose_full(recipe, overrides).config


def compose_full(
    recipe: str,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    allow_missing: bool = False,
    carried: Mapping[str, Any] | None = None,
) -> Composed:
    """As ``compose``, with the schema and the chosen options. ``allow_missing`` leaves mandatory keys unset (None).

    ``carried``: values of another configuration, put in where this recipe has the key too, before the overrides.
    """
    source = _load_recipe(recipe)
    groups = sources.config_groups()
    choosing: list[Override] = []
    setting: list[Override] = []
    for override in [_parse(text) for text in overrides]:
        is_choice = override.key_or_group in groups and not isinstance(override.value(), Mapping)
        (choosing if is_choice else setting).append(override)
    base, choices = _hydra_compose(source, choosing, groups)
    try:
        typed = {path: sources.schema_of(f"{group}/{option}") or UNTYPED for path, group, option in choices}
        schema = Schema([CoreConfig, *source.schemas], typed)
        root = values.new_root(schema)
    except ConfigError:
        raise
    except Exception as error:  # e.g. an annotation that OmegaConf has no node for
        raise ConfigError(f"a schema of recipe {source.name!r} is broken: {first_line(error)}") from error
    chosen = {override.key_or_group for override in choosing}
    values.put_base(root, schema, source, base, frozenset(path for path, group, _ in choices if group in chosen))
    values.carry(root, schema, carried or {})
    for override in setting:
        values.apply(root, schema, source, override)
    data = values.resolve(root, schema, source, allow_missing)
    config = Config(data)
    if not allow_missing and (problems := schema.problems(config) or _not_installed(config)):
        raise ConfigError("; ".join(problems))
    return Composed(source.name, Config(data), schema, {path: option for path, _, option in choices})


def _not_installed(config: Config) -> list[str]:
    """What the chosen trainer and rollout need and is not there; a worker would find it after the cluster is up."""
    problems = []
    for section, group in PLUGIN_SECTIONS.items():
        if section not in config or not isinstance(node := config[section], Config) or "name" not in node:
            continue
        name, registry = node["name"], Registry(group)
        if name in registry.names():
            try:
                registry.check_imports(name)
            except MissingExtraError as error:
                problems.append(f"{section}.name: {error}")
    return problems


# -- the recipe ------------------------------------------------------------------------------------------------------


def _load_recipe(recipe: str) -> RecipeSource:
    if recipe.endswith(".py"):
        path = Path(recipe)
        function, info = find_recipe(load_user_module(path), path)
        program = f"{path.expanduser().resolve()}:{function.__name__}"
        data = {"defaults": [{group: option} for group, option in info.groups.items()], "program": program}
        return RecipeSource(path.stem, str(path), data, [info.schema] if info.schema else [])
    name = recipe.removesuffix(".yaml")
    found = sources.find_file(name)
    if found is None:
        _unknown_recipe(recipe)
    package, path = found
    if package.error:
        raise ConfigError(
            f"recipe {name!r} belongs to {package.distribution}, whose {package.module} cannot be imported: "
            f"{package.error}"
        )
    if not sources.is_recipe(path):
        known = ", ".join(sources.recipe_names()) or "none"
        raise ConfigError(f"{name!r} is an option of config group {Path(name).parent}, not a recipe; recipes: {known}")
    data = _read_yaml(path, name)
    return RecipeSource(name, f"{name}.yaml of {package.distribution}", data, _recipe_schemas(name, data))


def _recipe_schemas(name: str, data: dict[str, Any]) -> list[type]:
    """The recipe's own dataclass, else that of the recipe it builds on (``- /other/recipe@_global_``)."""
    own = sources.schema_of(name)
    if own is not None:
        return [own]
    found: list[type] = []
    for item in data.get("defaults") or []:
        if isinstance(item, str) and item.endswith("@_global_"):
            parent = item.removesuffix("@_global_").strip().strip("/")
            if (file := sources.find_file(parent)) is not None:
                found += _recipe_schemas(parent, _read_yaml(file[1], parent))
    return found


def _unknown_recipe(recipe: str) -> NoReturn:
    known = sources.recipe_names()
    package, slash, _ = recipe.partition("/")
    if slash and f"rlinf_{package}" in OURS and missing_imports((f"rlinf_{package}",)):
        raise ConfigError(
            f"unknown recipe {recipe!r}: it would be one of rlinf-{package}, which is not installed; "
            f"install it with: {install_command(f'rlinf-{package}')}"
        )
    text = f"unknown recipe {recipe!r}{nearest(recipe, known)}; recipes: {', '.join(known) or 'none installed'}"
    if not known:
        text += f"; install some with: {install_command('rlinf-reasoning')}"
    if Path(recipe).exists():
        text += "; a file of your own must end in .py"
    for broken in sources.broken_packages():
        text += f"; {broken.distribution} is left out, its {broken.module} cannot be imported: {broken.error}"
    raise ConfigError(text)


def _read_yaml(path: Path, name: str) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        data = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" (line {mark.line + 1})" if mark else ""
        raise ConfigError(
            f"recipe {name!r}: {path} is not valid YAML: {getattr(error, 'problem', error)}{at}"
        ) from error
    except (OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"recipe {name!r}: {path} cannot be read: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"recipe {name!r}: {path} must hold a mapping of keys")
    return {str(key): value for key, value in data.items()}


# -- Hydra -----------------------------------------------------------------------------------------------------------


def _parse(text: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if "=" not in text and not text.startswith("~"):
        raise ConfigError(f"override {text!r} has no '=': write key=value")
    try:
        return OverridesParser.create().parse_overrides([text])[0]
    except HydraException as error:
        reason = str(getattr(error, "message", error)).split("\nSee ")[0]
        raise ConfigError(
            f"override {text!r} cannot be parsed: {' '.join(reason.split())}; "
            "a value with special characters needs quotes inside the shell's: \"key='value'\""
        ) from error


def _hydra_compose(
    source: RecipeSource, choosing: list[Override], groups: dict[str, dict[str, sources.ConfPackage]]
) -> tuple[dict[str, Any], list[tuple[str, str, str]]]:
    """The untyped base configuration and the choices made: (dotted path, group, option)."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for override in choosing:
        options = override.value() if isinstance(override.value(), list) else [override.value()]
        for option in options:
            if option is not None and not override.is_delete() and str(option) not in groups[override.key_or_group]:
                _unknown_option(override.key_or_group, str(option), groups[override.key_or_group])
    defaults = list(source.data.get("defaults") or [])
    if defaults and "_self_" not in defaults:  # as Hydra does, without its warning: the file's own keys come last
        defaults.append("_self_")
    ConfigStore.instance().store(name=MAIN, node=OmegaConf.create({**source.data, "defaults": defaults}))
    lines = [str(override.input_line) for override in choosing]
    try:
        with initialize_config_module(sources.CORE_MODULE, version_base="1.3"):
            full = hydra_compose(MAIN, overrides=lines, return_hydra_config=True)
        chosen = OmegaConf.to_container(full.hydra.runtime.choices)
        base = OmegaConf.to_container(OmegaConf.masked_copy(full, [key for key in full if key != "hydra"]))
    except MissingConfigException as error:
        group, _, option = str(error.missing_cfg_file or "").strip("/").rpartition("/")
        if not group or option in groups.get(group, {}):
            raise ConfigError(f"{source.origin}: {first_line(error)}") from error
        _unknown_option(group, option, groups.get(group, {}), needed_by=source.origin)
    except HydraException as error:
        for override in choosing:
            if f"'{override.key_or_group}" in str(error) and "No match in the defaults list" in str(error):
                used = [str(key) for key in (source.data.get("defaults") or [])]
                raise ConfigError(
                    f"override {override.input_line!r}: recipe {source.name!r} does not choose a "
                    f"{override.key_or_group}; its defaults: {', '.join(used) or 'none'}"
                ) from error
        raise ConfigError(f"{source.origin}: {first_line(error)}") from error
    except (OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"{source.origin}: {first_line(error)}") from error
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            raise ConfigError(f"{source.origin}: a YAML file of its groups is broken: {first_line(error)}") from error
        raise
    choices = []
    assert isinstance(chosen, dict) and isinstance(base, dict)
    for key, picked in chosen.items():
        group, _, package = str(key).partition("@")
        if group.startswith("hydra/") or picked is None or package == "_global_":
            continue
        for option in picked if isinstance(picked, list) else [picked]:
            choices.append((package or group.replace("/", "."), group, str(option)))
    return {str(key): value for key, value in base.items()}, choices


def _unknown_option(
    group: str, option: str, options: Mapping[str, sources.ConfPackage], needed_by: str = ""
) -> NoReturn:
    elsewhere = lacking(f"rlinf.{group}s", options)
    text = f"{group}={option}: " + (f"needed by {needed_by}, but " if needed_by else "")
    if option in elsewhere:
        text += f"not installed; {elsewhere[option].distribution} ships it: "
        raise ConfigError(text + install_command(elsewhere[option].requirement))
    text += f"there is no such {group}{nearest(option, [*options, *elsewhere])}; installed: "
    text += (
        ", ".join(f"{name} ({package.distribution})" for name, package in options.items() if name not in elsewhere)
        or "none"
    )
    if elsewhere:
        text += "; others: " + ", ".join(
            f"{name} with {install_command(plugin.requirement)}" for name, plugin in elsewhere.items()
        )
    for package in sources.broken_packages():
        text += f"; {package.distribution} is left out, its {package.module} cannot be imported: {package.error}"
    raise ConfigError(text)
