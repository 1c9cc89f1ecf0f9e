"""Plugins by name: found without importing, loaded on demand, explained on a miss."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_core import registry
from rlinf_core.errors import MissingExtraError, PluginError
from rlinf_core.registry import Entry, KnownPlugin, Registry, install_command, installed_entries, missing_imports

MODULES = {
    "plug_good": "class Good:\n    pass\n\nclass Nested:\n    class Inner: pass\n",
    "plug_needy": "class Needy:\n    requires = ('no_such_library',)\n",
    "plug_module_needs": "REQUIRES = {'no_such_library': 'fast'}\nclass Needy: pass\n",
    "plug_imports": "import no_such_library\n",
    "plug_broken": "raise RuntimeError('it is broken')\n",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def reward(name: str, value: str, distribution: str = "other-dist") -> Entry:
    return Entry("rlinf.rewards", name, value, distribution, "2.0")


def test_names_and_descriptions_import_nothing(modules: None) -> None:
    found = Registry("rlinf.rewards", [reward("good", "plug_good:Good"), reward("bad", "plug_broken:Bad")])
    assert found.names() == ["bad", "good"]
    rows = {info.name: info for info in found.describe()}
    assert rows["good"].source == "other-dist 2.0" and rows["exact"].source == "(not installed)"
    assert "rlinf-reasoning" in rows["exact"].status
    assert not set(MODULES) & set(sys.modules)


def test_one_plugin_is_loaded_on_demand(modules: None) -> None:
    found = Registry("rlinf.rewards", [reward("good", "plug_good:Good"), reward("inner", "plug_good:Nested.Inner")])
    assert found.load("good").__name__ == "Good" and found.load("inner").__name__ == "Inner"
    assert "plug_broken" not in sys.modules


def test_two_distributions_with_one_name_are_refused_by_name(modules: None) -> None:
    entries = [
        reward("good", "plug_good:Good"),
        reward("good", "plug_good:Good", "rival"),
        reward("x", "plug_good:Good"),
    ]
    found = Registry("rlinf.rewards", entries)
    with pytest.raises(PluginError, match=r"'good' is claimed by other-dist 2\.0 .* and rival 2\.0 .*uninstall one"):
        found.load("good")
    assert found.load("x")
    assert [info.status for info in found.describe() if info.name == "good"] == [
        "claimed twice: uninstall one of them"
    ] * 2
    # the same distribution seen twice (its metadata is on two folders of the path) is one
    assert Registry("rlinf.rewards", [entries[0], entries[0]]).load("good")


def test_a_miss_names_the_nearest_what_is_installed_and_the_command() -> None:
    found = Registry("rlinf.rewards", [reward("length", "m:L")])
    with pytest.raises(PluginError) as caught:
        found.load("lenght")
    text = str(caught.value)
    assert "no reward 'lenght'" in text and "did you mean 'length'" in text and "length (other-dist 2.0)" in text
    assert "exact with " in text and "tools/install rlinf-reasoning" in text
    with pytest.raises(MissingExtraError, match=r"part of rlinf-reasoning, which is not installed.*tools/install"):
        found.load("exact")
    with pytest.raises(PluginError, match="did you mean 'rlinf.rewards'"):
        Registry("rlinf.reward")


@pytest.mark.parametrize(
    ("entry", "command"),
    [
        (reward("a", "plug_needy:Needy"), "pip install no_such_library"),
        (reward("a", "plug_module_needs:Needy"), "pip install 'other-dist[fast]'"),
        (reward("a", "plug_imports:Needy"), "pip install no_such_library"),
        (
            Entry("rlinf.rollouts", "vllm", "plug_imports:V", "rlinf-engines", "1"),
            "tools/install 'rlinf-engines[vllm]'",
        ),
    ],
)
def test_a_missing_extra_names_the_command(modules: None, entry: Entry, command: str) -> None:
    with pytest.raises(MissingExtraError) as caught:
        Registry(entry.group, [entry]).load(entry.name)
    assert "no_such_library" in str(caught.value) and command in str(caught.value)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("plug_broken:Bad", "RuntimeError: it is broken"),
        ("plug_good:Absent", "AttributeError"),
        ("plug_absent:X", "No module named 'plug_absent'"),
    ],
)
def test_a_broken_plugin_names_its_distribution_and_the_cause(modules: None, value: str, cause: str) -> None:
    with pytest.raises(PluginError) as caught:
        Registry("rlinf.rewards", [reward("bad", value)]).load("bad")
    assert not isinstance(caught.value, MissingExtraError)
    assert "other-dist 2.0" in str(caught.value) and cause in str(caught.value)


def test_a_folder_that_an_uninstall_left_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "was_a_library" / "__pycache__").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_imports(["was_a_library", "json", "os.path"]) == ("was_a_library",)


def test_a_package_below_a_mere_folder_is_found_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared_folder" / "core").mkdir(parents=True)
    (tmp_path / "shared_folder" / "core" / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_imports(["shared_folder.core"]) == ()
    assert missing_imports(["shared_folder.other", "shared_folder"]) == ("shared_folder.other", "shared_folder")


def lacking_megatron(monkeypatch: pytest.MonkeyPatch) -> Registry:
    known = dict(registry.KNOWN["rlinf.trainers"])
    known["megatron"] = KnownPlugin("rlinf-engines", "megatron", ("no_such_library.core",))
    known["torch"] = KnownPlugin("rlinf-engines", "torch")
    monkeypatch.setitem(registry.KNOWN, "rlinf.trainers", known)
    entries = [Entry("rlinf.trainers", name, f"plug_broken:{name}", "rlinf-engines") for name in ("megatron", "torch")]
    monkeypatch.setattr(registry, "installed_entries", lambda: tuple(entries))
    return Registry("rlinf.trainers", entries)


def test_what_a_plugin_lacks_is_told_without_importing_it(modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = lacking_megatron(monkeypatch)
    (problem,) = registry.check_plugin("rlinf.trainers", "megatron", "trainer.name")
    assert problem.startswith("trainer.name: trainer 'megatron' of rlinf-engines needs no_such_library.core")
    assert problem.endswith(f"install it with: {install_command('rlinf-engines[megatron]')}")
    assert registry.check_plugin("rlinf.trainers", "torch", "trainer.name") == []
    text = found.unknown("fsdp")
    assert "installed: torch (rlinf-engines); also available: " in text
    assert f"megatron with {install_command('rlinf-engines[megatron]')}" in text
    assert "plug_broken" not in sys.modules


def test_the_install_command_fits_where_one_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "tools").mkdir(parents=True)
    module = checkout / "packages" / "rlinf-core" / "src" / "rlinf_core" / "registry.py"
    monkeypatch.setattr(registry, "__file__", str(module))
    assert install_command("rlinf-algos") == "tools/install rlinf-algos   (in a checkout of the project)"
    (checkout / "tools" / "install").write_text("")
    assert install_command("a[b]") == f"{checkout / 'tools' / 'install'} 'a[b]'"
    monkeypatch.chdir(checkout)
    assert install_command("a[b]") == "tools/install 'a[b]'"


def test_a_plugin_that_needs_a_package_of_ours_names_our_way_to_install_it(
    modules: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Registry("rlinf.rewards", [reward("needy", "plug_needy:Needy")])
    for ours, how in ((), "pip install no_such_library"), (("no_such_library",), install_command("no-such-library")):
        monkeypatch.setattr(registry, "OURS", ours)
        with pytest.raises(MissingExtraError) as caught:
            found.load("needy")
        assert str(caught.value).endswith(f"install it with: {how}")


def test_installed_metadata_is_read() -> None:
    loggers = [entry.name for entry in installed_entries() if entry.group == "rlinf.loggers"]
    assert {"jsonl", "tensorboard"} <= set(loggers)
    assert Registry("rlinf.loggers").load("jsonl").__name__ == "JsonlLogger"


def test_a_name_is_checked_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlinf_core import registry

    found = (Entry("rlinf.rewards", "shiny", "no_such_module:f", "dist-own", "2.0"),)
    monkeypatch.setattr(registry, "installed_entries", lambda: found)
    assert registry.check_name("rlinf.rewards", "shiny", "reward.name") == []
    (problem,) = registry.check_name("rlinf.rewards", "shiney", "reward.name")
    assert problem.startswith("reward.name: ") and "did you mean 'shiny'" in problem
