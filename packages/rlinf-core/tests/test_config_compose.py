"""Composing configurations: recipes, groups, overrides, types, and every fault by name."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlinf_core import registry
from rlinf_core.config import Config, compose, compose_full, load_program, sources
from rlinf_core.errors import ConfigError
from rlinf_core.registry import Entry, KnownPlugin, missing_imports

CONF = """
from dataclasses import dataclass, field

@dataclass
class Stop:
    patience: int = 3

@dataclass
class Data:
    path: str = "???"
    limit: float = field(default=float("inf"), metadata={"allow_inf": True})
    size: int = field(default=8, metadata={"min": 1, "max": 100, "help": "problems"})

@dataclass
class Toy:
    data: Data = field(default_factory=Data)
    group_size: int = 4
    batch: int = 8
    stop: Stop | None = None
    weights: dict[str, float] = field(default_factory=dict)
    layers: list[int] = field(default_factory=lambda: [1, 2])

    def validate(self, root):
        if self.batch % self.group_size:
            return [f"batch: {self.batch} is not a multiple of group_size={self.group_size}"]
        return []

@dataclass
class Fast:
    name: str = "fast"
    slots: int = field(default=2, metadata={"min": 1})

@dataclass
class Slow:
    name: str = "slow"
    patience_s: float = 1.5
    mode: str = field(default="kind", metadata={"choices": ("kind", "strict")})

    def validate(self, root):
        return ["rollout.mode: strict needs num_steps=1"] if self.mode == "strict" and root.num_steps != 1 else []

SCHEMAS = {"toys/count": Toy, "rollout/fast": Fast, "rollout/slow": Slow}
"""

FILES = {
    "toys/count.yaml": """
        defaults:
          - /rollout: fast
          - _self_
        program: toy_programs:count
        num_steps: 3
        data: {path: here}
        weights: {a: 1.0}
        rollout: {slots: 5}
        """,
    "toys/more.yaml": """
        defaults:
          - /toys/count@_global_
          - override /rollout: slow
          - _self_
        num_steps: 7
        """,
    "toys/untyped.yaml": """
        program: toy_programs:count
        num_steps: 1
        anything: {goes: 1}
        """,
    "toys/unset.yaml": "program: toy_programs:count\n",
    "toys/needy.yaml": "defaults: [{/trainer: torch}, _self_]\nprogram: a:b\nnum_steps: 1\n",
    "toys/broken_yaml.yaml": "program: a:b\nnum_steps: [1\n",
    "rollout/fast.yaml": "name: fast\n",
    "rollout/slow.yaml": "name: slow\n",
    "rollout/free.yaml": "name: free\nnested: {depth: 2}\n",
}

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes conf packages from text and has them found as if they were installed."""
    entries: list[Entry] = []
    made: list[str] = []

    def make(name: str, init: str, files: dict[str, str]) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text(init)
        for path, text in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(textwrap.dedent(text))
        entries.append(Entry("rlinf.recipes", name, name, f"dist-{name}", "1.0"))
        made.append(name)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sources, "_entries", lambda: tuple(entries))
    monkeypatch.setattr(sources, "_loaded", {})
    yield make
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def toys(install: Install) -> None:
    install("toy_conf", CONF, FILES)


def fault(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(recipe, list(overrides))
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text and "hydra" not in text.lower()
    return text


def test_a_recipe_has_the_keys_of_core_its_own_and_its_groups(toys: None) -> None:
    cfg = compose("toys/count", [])
    assert cfg.program == "toy_programs:count" and cfg.num_steps == 3 and cfg.seed == 0
    assert cfg.cluster.virtual_devices is None and cfg.loggers == ["jsonl", "tensorboard"]
    assert cfg.data.to_dict() == {"path": "here", "limit": math.inf, "size": 8}
    assert cfg.rollout.to_dict() == {"name": "fast", "slots": 5}
    assert cfg.weights.to_dict() == {"a": 1.0} and cfg.stop is None


def test_overrides_are_typed_as_in_the_schema(toys: None) -> None:
    cfg = compose(
        "toys/count",
        ["num_steps=5", "weights.b=2", "layers=[3]", "stop.patience=9", "portion=4", "placement.a=0,2", "run_dir=7"],
    )
    assert (cfg.num_steps, cfg.layers, cfg.stop.patience, cfg.portion) == (5, [3], 9, 4)
    assert cfg.weights.to_dict() == {"a": 1.0, "b": 2.0} and isinstance(cfg.weights.b, float)
    assert cfg.placement.a == "0,2" and cfg.run_dir == "7"
    assert compose("toys/count", ["~weights.a", "portion=null", "data={size: 9}"]).data.to_dict() == {
        "path": "here",
        "limit": math.inf,
        "size": 9,
    }
    assert compose("toys/count", ["seed=3", "batch=${seed}", "group_size=1"]).batch == 3


def test_an_open_mapping_takes_new_keys(toys: None) -> None:
    cfg = compose("toys/count", ["placement.maker=0-1", "+profile.overrides.trainer=small", "profile.overrides.k=2"])
    assert cfg.placement.maker == "0-1"
    assert cfg.profile.overrides.to_dict() == {"trainer": "small", "k": 2}
    assert "unknown key" in fault("toys/count", "cluster.k=2")


def test_a_group_is_chosen_by_name_and_brings_its_own_keys(toys: None) -> None:
    free = compose("toys/count", ["rollout=free", "rollout.nested.depth=3"])
    assert free.rollout.to_dict() == {"name": "free", "nested": {"depth": 3}, "slots": 5}
    # what the recipe sets for its own choice alone is left out of another typed option
    slow = compose("toys/count", ["rollout=slow", "rollout.patience_s=2"])
    assert slow.rollout.to_dict() == {"name": "slow", "patience_s": 2.0, "mode": "kind"}


def test_a_recipe_builds_on_another(install: Install) -> None:
    files = dict(FILES)
    files["toys/count.yaml"] = files["toys/count.yaml"].replace("rollout: {slots: 5}", "")
    install("toy_conf", CONF, files)
    cfg = compose("toys/more", ["group_size=2"])
    assert (cfg.num_steps, cfg.group_size, cfg.rollout.name, cfg.data.path) == (7, 2, "slow", "here")
    assert "group_sise" in fault("toys/more", "group_sise=2")


def test_a_recipe_without_a_dataclass_keeps_its_keys_untyped(toys: None) -> None:
    assert compose("toys/untyped", ["anything.goes=text"]).anything.goes == "text"
    assert "did you mean 'anything.goes'" in fault("toys/untyped", "anything.go=1")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["num_stepz=3"], ["'num_stepz'", "did you mean 'num_steps'", "group_size", "--keys"]),
        (["data.sise=3"], ["'data.sise'", "did you mean 'data.size'", "path, limit, size"]),
        (["patience=3"], ["did you mean 'stop.patience'"]),
        (["data={sise: 3}"], ["data.sise", "did you mean 'size'"]),
        (["+extra=3"], ["'extra'"]),
        (["num_steps=many"], ["num_steps=many", "expected an integer", "got text"]),
        (["num_steps=1.5"], ["num_steps=1.5", "an integer"]),
        (["num_steps=null"], ["num_steps=null", "an integer"]),
        (["seed=true"], ["seed=True", "an integer", "true/false"]),
        (["cluster.debug=3.5"], ["true or false"]),
        (["layers=[1,x]"], ["layers=[1, 'x']", "a list of integers"]),
        (["weights.a=heavy"], ["weights.a=heavy", "a number"]),
        (["plan={a: 1}"], ["plan=", "expected text", "a mapping"]),
        (["data=3"], ["data=3", "a group of keys (path, limit, size)"]),
        (["data.size=0"], ["data.size=0: must be at least 1"]),
        (["data.size=101"], ["must be at most 100"]),
        (["cluster.virtual_devices=100000000"], ["cluster.virtual_devices=100000000: must be at most 1024"]),
        (["rollout=slow", "rollout.mode=strickt"], ["rollout.mode=strickt", "kind, strict", "did you mean 'strict'"]),
        (["rollout=slow", "rollout.mode=strict"], ["strict needs num_steps=1"]),
        (["rollout=slow", "rollout.patience_s=inf"], ["rollout.patience_s=inf: must be a finite number"]),
        (["rollout=slow", "rollout.patience_s=-inf"], ["rollout.patience_s=-inf: must be a finite number"]),
        (["weights.a=nan"], ["weights.a=nan: must be a finite number"]),
        (["cluster.launch_timeout_s=nan"], ["cluster.launch_timeout_s=nan: must be a finite number"]),
        (["data.limit=nan"], ["data.limit=nan: must be a finite number"]),
        (["loggers=[jsonl,jsonl]"], ["loggers: 'jsonl' is there twice"]),
        (["loggers=[jsnl]"], ["loggers: ", "'jsnl'", "did you mean 'jsonl'"]),
        (["plan=auto", "scheduler=none_such"], ["scheduler: ", "'none_such'"]),
        (["plan=temporl"], ["plan: 'temporl' is not a mode (did you mean 'temporal'?)"]),
        (["plan=hybird"], ["plan: 'hybird' is not a mode (did you mean 'hybrid'?)"]),
        (["plan=./none.yaml"], ["plan: there is no file './none.yaml'"]),
        (["plan=/"], ["plan: '/' is a directory"]),
        (["placement.actor=0-"], ["placement.actor: '0-' has '0-', where '0-' is not devices"]),
        (["placement.actor='0:0-99999'"], ["placement.actor: '0:0-99999'", "at most 64"]),
        (["batch=9"], ["batch: 9 is not a multiple of group_size=4"]),
        (["batch"], ["'batch'", "write key=value"]),
        (["layers=[1"], ["'layers=[1'", "cannot be parsed"]),
        (["num_steps=1,2"], ["sweeps are not supported"]),
        (["~seed"], ["'~seed'", "only entries of a mapping"]),
        (["seed=${sed}"], ["seed", "'sed' not found"]),
        (["rollout=fasst"], ["rollout=fasst", "did you mean 'fast'", "fast (dist-toy_conf 1.0)", "vllm with"]),
        (["rollout=vllm"], ["rollout=vllm", "rlinf-engines ships it", "tools/install 'rlinf-engines[vllm]'"]),
    ],
)
def test_faults_of_overrides_name_the_key(toys: None, overrides: list[str], parts: list[str]) -> None:
    text = fault("toys/count", *overrides)
    for part in parts:
        assert part in text, text


def test_a_rollout_without_what_it_needs_is_refused(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a worker would find when Ray is up; an option that is named beside it says what it lacks."""
    lacking = {"fast": KnownPlugin("dist-toys", "quick", ("no_such_library",)), "slow": KnownPlugin("dist-toys")}
    monkeypatch.setitem(registry.KNOWN, "rlinf.rollouts", lacking)
    entries = tuple(Entry("rlinf.rollouts", name, f"no_such_module:{name}", "dist-toys") for name in lacking)
    monkeypatch.setattr(registry, "installed_entries", lambda: entries)
    assert fault("toys/count", "loggers=[]") == (
        "rollout.name: rollout 'fast' of dist-toys needs no_such_library, which is not installed; "
        f"install it with: {registry.install_command('dist-toys[quick]')}"
    )
    assert compose("toys/count", ["loggers=[]", "rollout=slow"]).rollout.name == "slow"
    assert compose_full("toys/count", ["loggers=[]"], allow_missing=True).choices["rollout"] == "fast"
    text = fault("toys/count", "rollout=fasst")
    assert "installed: free (dist-toy_conf 1.0), slow (dist-toy_conf 1.0); others: fast with " in text


def test_a_logger_without_what_it_needs_is_refused(toys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    needy = KnownPlugin("rlinf-core", "wandb", ("no_such_library",))
    monkeypatch.setitem(registry.KNOWN, "rlinf.loggers", {**registry.KNOWN["rlinf.loggers"], "wandb": needy})
    text = fault("toys/count", "loggers=[jsonl,wandb]")
    assert text.startswith("loggers: logger 'wandb' of rlinf-core") and "needs no_such_library" in text
    assert text.endswith(f"install it with: {registry.install_command('rlinf-core[wandb]')}")


SAME = """
from dataclasses import dataclass, field
@dataclass
class Trainer:
    lr: float = 1.0
    tp: int = 1
@dataclass
class Engine:
    tensor_parallel_size: int = 1
@dataclass
class Same:
    trainer: Trainer = field(default_factory=Trainer)
    engine: Engine = field(default_factory=Engine)
    prompts_per_step: int = 8
SCHEMAS = {"toys/same": Same}
"""


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("trainer.learning_rate", "trainer.lr"),
        ("learning_rate", "trainer.lr"),
        ("engine.tp", "engine.tensor_parallel_size"),
        ("engine.lr", "trainer.lr"),
        ("trainer.tensor_parallel_size", "trainer.tp"),
        ("batch_size", "prompts_per_step"),
        ("trainer.lrr", "trainer.lr"),
    ],
)
def test_other_names_of_the_same_are_known(install: Install, given: str, meant: str) -> None:
    install("same_conf", SAME, {"toys/same.yaml": "program: a:b\nnum_steps: 1\n"})
    assert f"unknown key {given!r} (did you mean {meant!r}?)" in fault("toys/same", f"{given}=2")


def test_a_message_comes_once_where_recipe_and_core_declare_a_key(install: Install) -> None:
    both = """
from dataclasses import dataclass, field
@dataclass
class Both:
    num_steps: int = field(default=2, metadata={"min": 1})
SCHEMAS = {"toys/both": Both}
"""
    install("both_conf", both, {"toys/both.yaml": "program: a:b\n"})
    assert fault("toys/both", "num_steps=-1") == "num_steps=-1: must be at least 1"


def test_untyped_numbers_are_finite_too(toys: None) -> None:
    assert fault("toys/untyped", "anything.goes=inf") == "anything.goes=inf: must be a finite number"


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("toys/cuont", ["unknown recipe 'toys/cuont'", "did you mean 'toys/count'", "toys/untyped"]),
        ("embodied/anything", ["unknown recipe 'embodied/anything'", "one of rlinf-embodied", "not installed"]),
        ("rollout/fast", ["an option of config group rollout, not a recipe"]),
        ("toys/unset", ["num_steps (an integer)", "give num_steps="]),
        (
            "toys/needy",
            ["trainer=torch", "toys/needy.yaml of dist-toy_conf 1.0", "tools/install 'rlinf-engines[torch]'"],
        ),
        ("toys/broken_yaml", ["not valid YAML", "line"]),
        ("./absent.py", ["absent.py does not exist"]),
    ],
)
def test_faults_of_recipes(toys: None, recipe: str, parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = missing_imports
    module = sys.modules["rlinf_core.config.compose"]  # the package has a function of this name
    monkeypatch.setattr(module, "missing_imports", lambda names: ("x",) if "rlinf_embodied" in names else real(names))
    text = fault(recipe)
    for part in parts:
        assert part in text, text


def test_keys_of_yaml_are_checked_too(install: Install) -> None:
    files = {**FILES, "toys/count.yaml": "program: a:b\nnum_steps: 1\ndata: {path: x, sise: 3}\n"}
    files["toys/top.yaml"] = "program: a:b\nnum_steps: 1\nbatsch: 3\n"
    install("toy_conf", CONF + 'SCHEMAS["toys/top"] = Toy\n', files)
    assert "unknown key 'data.sise' (toys/count.yaml of dist-toy_conf 1.0)" in fault("toys/count")
    text = fault("toys/top")
    assert "unknown key 'batsch' in toys/top.yaml of dist-toy_conf 1.0 (did you mean 'batch'?)" in text


def test_a_broken_schema_module_is_named_and_kills_nothing_else(toys: None, install: Install) -> None:
    install("sick_conf", "import nothing_like_this\n", {"sick/run.yaml": "program: a:b\nnum_steps: 1\n"})
    assert compose("toys/count", []).num_steps == 3
    for text in (fault("sick/run"), fault("sick/ran")):
        assert "dist-sick_conf 1.0" in text and "No module named 'nothing_like_this'" in text


def test_a_schema_that_cannot_be_typed_is_named(install: Install) -> None:
    init = (
        "from dataclasses import dataclass\n@dataclass\nclass Odd:\n    items: int = 1\n"
        "@dataclass\nclass Clash:\n    seed: str = ''\nSCHEMAS = {'odd/a': Odd, 'odd/b': Clash}\n"
    )
    install("odd_conf", init, {f"odd/{name}.yaml": "program: a:b\nnum_steps: 1\n" for name in "ab"})
    assert (
        "odd_conf.Odd may not have a field 'items': 'items' is the name of a method of the configuration node; "
        "choose another name, e.g. num_items" in fault("odd/a")
    )
    assert "changes the type of 'seed' from int to str" in fault("odd/b")


def test_keys_are_listed_with_type_default_and_help(toys: None) -> None:
    keys = {key.path: key for key in compose_full("toys/count", []).list_keys()}
    assert keys["data.size"].type == "int" and keys["data.size"].default == 8 and keys["data.size"].help == "problems"
    assert keys["weights"].type == "dict[str, float]" and keys["portion"].type == "int | None"
    assert keys["stop.patience"].default == 3 and "rollout.slots" in keys
    unset = {key.path: key for key in compose_full("toys/unset", [], allow_missing=True).list_keys()}
    assert unset["num_steps"].default == "???"


USER = """
from dataclasses import dataclass
from rlinf_core.config import recipe

@dataclass
class Mine:
    num_steps: int = 20
    speed: float = 1.0

@recipe(schema=Mine, groups={"rollout": "fast"})
def program(flow, cfg):
    return cfg.speed
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Iterator[Callable[[str, str], str]]:
    before, modules = list(sys.path), set(sys.modules)

    def write(name: str, text: str) -> str:
        folder = tmp_path / "own"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        return str(folder / name)

    yield write
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name.startswith("user_recipe_"):
            del sys.modules[name]


def test_a_users_own_file_is_a_recipe(toys: None, user_file: Callable[[str, str], str]) -> None:
    path = user_file("user_recipe_a.py", USER)
    done = compose_full(path, ["speed=2", "rollout=slow"])
    assert done.name == "user_recipe_a" and done.config.num_steps == 20 and done.config.rollout.name == "slow"
    assert load_program(done.config.program)(None, done.config) == 2.0
    assert "did you mean 'speed'" in fault(path, "sped=2")


def test_faults_of_a_users_file(toys: None, user_file: Callable[[str, str], str]) -> None:
    none = user_file("user_recipe_none.py", "x = 1\n")
    assert "exactly one function must be decorated with @recipe, the file has none" in fault(none)
    two = user_file("user_recipe_two.py", USER + "\n@recipe\ndef other(flow, cfg): ...\n")
    assert "has 2 (program, other)" in fault(two)
    assert "invalid syntax" in (text := fault(user_file("user_recipe_bad.py", "def f(:\n"))) and "line 1" in text
    assert "ZeroDivisionError" in (text := fault(user_file("user_recipe_zero.py", "\n1 / 0\n"))) and "line 2" in text
    assert "rename it" in fault(user_file("user-recipe.py", USER))
    assert "rename it" in fault(user_file("json.py", USER))


def test_programs_are_found_by_name() -> None:
    assert load_program("os.path:join")("a", "b") == str(Path("a", "b"))
    for program, part in [
        ("os.path", "module:function"),
        ("no_such_mod:f", "no module"),
        ("os.path:nope", "no function"),
    ]:
        with pytest.raises(ConfigError, match=part):
            load_program(program)


def test_configs_are_equal_and_independent_between_calls(toys: None) -> None:
    first, second = compose("toys/count", []), compose("toys/count", [])
    assert first == second and isinstance(first, Config)
    assert not first.reads and first.num_steps and not second.reads


def test_composing_imports_nothing_heavy() -> None:
    code = """
import sys
from rlinf_core.config import compose
from rlinf_core.errors import ConfigError
try:
    compose("no/such", [])
except ConfigError:
    pass
import hydra_plugins.rlinf_searchpath
print(sorted({"ray", "torch", "transformers", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
