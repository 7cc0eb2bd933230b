"""Loading: what is broken is recorded and stops nothing else."""

from collections.abc import Callable
from pathlib import Path

import pytest

from k3_core.plugins import PluginError, PluginRecord, Registry, load_plugins
from k3_core.plugins.discover import FIRST_PARTY

Write = Callable[..., Path]
Source = Callable[..., str]
HEAD = "from k3_core.plugins import Impl, hookimpl\n"


def record_of(registry: Registry, name: str, distribution: str = "") -> PluginRecord:
    records = [r for r in registry.records if r.name == name]
    (record,) = [r for r in records if distribution in ("", r.distribution)]
    return record


def test_first_party_plugins_come_first_and_are_in_order(install: Write, one_impl: Source) -> None:
    install("zz_last", one_impl("probe.z"))
    install("aa_first", one_impl("probe.a"))
    registry = load_plugins({})
    names = [record.name for record in registry.records]
    assert names[0] == "k3_core"
    assert names.index("aa_first") < names.index("zz_last")
    assert set(names[: names.index("aa_first")]) <= set(FIRST_PARTY)
    assert {r.state for r in registry.records if r.name in ("k3_core", "zz_last")} == {"ok"}
    assert [impl.name for impl in registry.impls("kernel", "probe")] == ["probe.a", "probe.z"]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import module_that_is_not_there", "module_that_is_not_there"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def k3_register_kernel():\n    return []", "lacks the decorator"),
        (HEAD + "@hookimpl\ndef k3_register_kernel():\n    return [1]", "must return Impl objects"),
        (HEAD + "@hookimpl\ndef k3_register_kernel():\n    1 / 0", "ZeroDivisionError"),
        (HEAD + "@hookimpl\ndef k3_register_kernel(wrong):\n    return []", "wrong"),
        (
            HEAD + "@hookimpl\ndef k3_register_cache():\n"
            "    return [Impl(kind='kernel', name='probe.x', target='math:sqrt')]",
            "of kind 'kernel'",
        ),
    ],
)
def test_a_broken_plugin_is_recorded_and_the_others_load(
    install: Write, one_impl: Source, source: str, error: str
) -> None:
    install("a_broken", source)
    install("b_fine", one_impl("probe.fine"))
    registry = load_plugins({})
    broken = record_of(registry, "a_broken")
    assert broken.state == "broken"
    assert error in broken.error + broken.traceback
    assert "Traceback" in broken.traceback
    assert record_of(registry, "b_fine").state == "ok"
    assert not registry.manager.has_plugin("a_broken")
    assert [impl.name for impl in registry.impls(implements="probe")] == ["probe.fine"]


def test_a_name_declared_twice_drops_the_later_plugin_whole(
    install: Write, one_impl: Source
) -> None:
    install("a_owner", one_impl("probe.same"))
    install("b_thief", one_impl("probe.same") + one_impl("probe.same").replace("kernel", "cache"))
    registry = load_plugins({})
    assert record_of(registry, "b_thief").state == "duplicate"
    assert "already declared by a_owner" in record_of(registry, "b_thief").error
    assert registry.owner(registry.impls("kernel", "probe")[0]) == "a_owner"
    assert registry.impls("cache", "probe") == []


def test_the_same_plugin_name_from_two_distributions_is_a_duplicate(
    install: Write, one_impl: Source
) -> None:
    install("twice", one_impl("probe.one"), distribution="a-dist")
    install("twice", one_impl("probe.one"), distribution="b-dist")
    registry = load_plugins({})
    assert record_of(registry, "twice", "a-dist").state == "ok"
    assert record_of(registry, "twice", "b-dist").state == "duplicate"


def test_an_entry_point_is_named_like_its_package(install: Write, one_impl: Source) -> None:
    install("real_name", one_impl("probe.one"), entry="nickname")
    record = record_of(load_plugins({}), "nickname")
    assert record.state == "broken"
    assert "'real_name'" in record.error


def test_nobody_takes_a_first_party_name(install: Write, one_impl: Source) -> None:
    install("k3_core_evil", one_impl("probe.evil"), entry="k3_core")
    registry = load_plugins({})
    assert record_of(registry, "k3_core", "k3-core").state == "ok"
    assert record_of(registry, "k3_core", "k3-core-evil").state == "duplicate"


def test_plugins_of_a_future_contract_are_incompatible_and_stay_explained(
    install: Write, one_impl: Source
) -> None:
    install("a_future", one_impl("probe.new", api=2))
    install("b_hooks", HEAD + "@hookimpl\ndef k3_register_telescope():\n    return []")
    optional = HEAD + "@hookimpl(optionalhook=True)\ndef k3_register_telescope():\n    return []"
    install("c_optional", optional)
    registry = load_plugins({})
    assert record_of(registry, "a_future").state == "incompatible"
    assert "contract 2" in record_of(registry, "a_future").error
    assert record_of(registry, "b_hooks").state == "incompatible"
    assert "k3_register_telescope" in record_of(registry, "b_hooks").error
    assert record_of(registry, "c_optional").state == "ok"
    assert [impl.name for impl in registry.impls(implements="probe")] == ["probe.new"]


def test_block_and_allow_lists(install: Write, one_impl: Source) -> None:
    install("a_one", one_impl("probe.one"))
    install("b_two", one_impl("probe.two"))
    blocked = load_plugins({"K3_PLUGINS_BLOCK": "a_one, k3_core"})
    assert record_of(blocked, "a_one").state == "blocked"
    assert record_of(blocked, "b_two").state == "ok"
    assert record_of(blocked, "k3_core").state == "ok"
    allowed = load_plugins({"K3_PLUGINS": "a_one,absent"})
    assert record_of(allowed, "a_one").state == "ok"
    assert record_of(allowed, "b_two").state == "blocked"
    assert record_of(allowed, "k3_core").state == "ok"
    assert record_of(allowed, "absent").state == "broken"
    assert "not installed" in record_of(allowed, "absent").error


def test_strict_raises_for_what_is_broken_but_not_for_what_is_blocked(install: Write) -> None:
    install("a_broken", "import module_that_is_not_there")
    strict = {"K3_PLUGINS_STRICT": "1", "K3_PLUGINS": "k3_core"}
    assert record_of(load_plugins(strict), "a_broken").state == "blocked"
    with pytest.raises(PluginError, match=r"(?s)a_broken: broken: .*module_that_is_not_there"):
        load_plugins({"K3_PLUGINS_STRICT": "1"})


def test_file_plugins(
    site: Path, tmp_path: Path, one_impl: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("single_file.py").write_text(
        one_impl("probe.file", target="single_file:answer") + "def answer():\n    return 42\n"
    )
    package = Path("packed_plugin")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "values.py").write_text("ANSWER = 43\n")
    (package / "plugin.py").write_text(
        one_impl("probe.packed", target="packed_plugin.values:ANSWER")
    )
    Path("random.py").write_text(one_impl("probe.clash"))
    files = "./single_file.py,packed_plugin/plugin.py,./random.py,./absent.py"
    registry = load_plugins({"K3_PLUGINS": files})
    assert record_of(registry, "single_file").state == "ok"
    assert record_of(registry, "packed_plugin").state == "ok"
    assert "rename the file" in record_of(registry, "random").error
    assert "is not a file" in record_of(registry, "absent").error
    impls = {impl.name: impl for impl in registry.impls(implements="probe")}
    assert set(impls) == {"probe.file", "probe.packed"}
    assert impls["probe.file"].load()() == 42  # type: ignore[operator]
    assert impls["probe.packed"].load() == 43


def test_a_checkout_without_metadata_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3_core.plugins.discover.entry_points", lambda group: ())
    record = record_of(load_plugins({}), "k3_core")
    assert (record.state, record.version) == ("ok", "checkout")
    assert record.source.startswith("checkout ")
    assert record.num_impls > 20


def test_a_hook_may_have_another_function_name(install: Write, one_impl: Source) -> None:
    source = one_impl("probe.renamed").replace("k3_register_kernel", "kernels")
    source = source.replace("@hookimpl", "@hookimpl(specname='k3_register_kernel')")
    install("a_renamed", source)
    registry = load_plugins({})
    assert record_of(registry, "a_renamed").state == "ok"
    assert record_of(registry, "a_renamed").hooks == ("k3_register_kernel",)
    assert [impl.name for impl in registry.impls(implements="probe")] == ["probe.renamed"]


def test_a_hook_that_raises_later_marks_its_plugin(install: Write) -> None:
    install("a_bad", HEAD + "@hookimpl\ndef k3_info():\n    raise RuntimeError('no lines')")
    install("b_good", HEAD + "@hookimpl\ndef k3_info():\n    return {'colour': 'blue'}")
    registry = load_plugins({})
    lines = dict(registry.call_each("k3_info"))
    assert lines["b_good"] == {"colour": "blue"}
    assert "a_bad" not in lines
    assert record_of(registry, "a_bad").state == "broken"
    assert "no lines" in record_of(registry, "a_bad").error


def test_only_the_first_line_of_a_late_error_is_recorded_with_its_own_plugin(
    install: Write,
) -> None:
    """A plugin of the same name that did not load keeps its record."""
    install("a_bad", "1 / 0", distribution="one")
    install("a_bad", "1 / 0", distribution="two")
    hook = HEAD + "@hookimpl\ndef k3_info():\n    raise SystemExit('first\\nsecond')"
    install("b_late", hook)
    registry = load_plugins({})
    assert "b_late" not in dict(registry.call_each("k3_info"))
    assert record_of(registry, "b_late").error == "k3_info: SystemExit: first"
    assert [r.error for r in registry.records if r.name == "a_bad"] == [
        "ZeroDivisionError: division by zero"
    ] * 2
