"""Resolution: who decides, in which order, and what is said when nothing can run."""

import math
from typing import Any

import pluggy
import pytest

from k3_core.plugins import (
    Impl,
    ImplLoadError,
    ImplUnavailable,
    PluginError,
    Registry,
    hookimpl,
    resolve,
)
from k3_core.plugins.spec import PROJECT, K3Spec


def impl(name: str, **fields: Any) -> Impl:
    given = {"kind": "kernel", "target": "math:sqrt", "implements": "probe"}
    return Impl(name=name, **{**given, **fields})


def registry_of(*impls: Impl) -> Registry:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(K3Spec)
    registry = Registry(manager)
    registry.add(impls, "test")
    return registry


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("K3_IMPL_KERNEL", "K3_IMPL_KERNEL_PROBE", "K3_STRICT_IMPL"):
        monkeypatch.delenv(name, raising=False)


REFERENCE = impl("probe.reference", dtypes=frozenset({"float64", "float32"}))
FAST = impl("probe.fast", priority=10, features=frozenset({"backward"}))
CUDA = impl("probe.cuda", priority=20, devices=frozenset({"cuda"}), min_capability=(9, 0))


def test_the_highest_priority_that_can_run_wins_and_the_rest_have_reasons() -> None:
    resolution = resolve("kernel", "probe", registry=registry_of(REFERENCE, FAST, CUDA))
    assert resolution.chosen is FAST
    assert resolution.source == "auto"
    reasons = {rejected.name: reason for rejected, reason in resolution.rejected}
    assert reasons == {
        "probe.cuda": "runs on cuda, not on cpu",
        "probe.reference": "priority 0, below 10 of probe.fast",
    }
    assert resolution.load() is math.sqrt


@pytest.mark.parametrize(
    ("request_", "chosen"),
    [
        ({"dtype": "float64"}, "probe.reference"),
        ({"features": {"backward"}}, "probe.fast"),
        ({"device": "cuda:1", "capability": (9, 0)}, "probe.cuda"),
        ({"device": "cuda:1", "capability": (8, 9)}, "probe.fast"),
    ],
)
def test_filters(request_: dict[str, Any], chosen: str) -> None:
    registry = registry_of(REFERENCE, FAST, CUDA)
    assert resolve("kernel", "probe", registry=registry, **request_).chosen.name == chosen


def test_the_order_is_argument_environment_config_policy_automatic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("argument", "env", "config", "select", "auto")
    registry = registry_of(*(impl(f"probe.{n}", priority=(n == "auto")) for n in names))
    policy = type("Policy", (), {})()
    policy.k3_select = hookimpl(specname="k3_select")(
        lambda request, candidates: next(c for c in candidates if c.name == "probe.select")
    )
    registry.manager.register(policy)
    monkeypatch.setenv("K3_IMPL_KERNEL_PROBE", "env")
    table = {"kernel": {"probe": "probe.config"}}

    def chosen(**arguments: Any) -> tuple[str, str]:
        resolution = resolve("kernel", "probe", registry=registry, **arguments)
        return resolution.chosen.name, resolution.source

    assert chosen(name="argument", overrides=table) == ("probe.argument", "argument")
    assert chosen(overrides=table) == ("probe.env", "env")
    monkeypatch.delenv("K3_IMPL_KERNEL_PROBE")
    assert chosen(overrides=table) == ("probe.config", "config")
    assert chosen() == ("probe.select", "select")
    registry.manager.unregister(policy)
    assert chosen() == ("probe.auto", "auto")


def test_a_setting_for_a_kind_names_a_variant_for_each_of_its_ops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = impl("other.one", implements="other"), impl("other.reference", implements="other")
    registry = registry_of(REFERENCE, FAST, *other)
    monkeypatch.setenv("K3_IMPL_KERNEL", "reference")
    for op in ("probe", "other"):
        resolution = resolve("kernel", op, registry=registry)
        assert (resolution.chosen.name, resolution.source) == (f"{op}.reference", "env")
    # A full name speaks of its own op: the other one is still chosen by priority.
    monkeypatch.setenv("K3_IMPL_KERNEL", "other.one")
    assert resolve("kernel", "probe", registry=registry).chosen is FAST
    assert resolve("kernel", "other", registry=registry).chosen.name == "other.one"
    monkeypatch.setenv("K3_IMPL_KERNEL_PROBE", "fast")
    assert resolve("kernel", "probe", registry=registry).chosen is FAST


def test_a_tie_is_an_error_that_names_both() -> None:
    registry = registry_of(impl("probe.b", priority=5), impl("probe.a", priority=5))
    with pytest.raises(ImplUnavailable, match=r"probe\.a and probe\.b tie at priority 5") as info:
        resolve("kernel", "probe", registry=registry)
    assert "export K3_IMPL_KERNEL_PROBE=probe.a" in str(info.value)


@pytest.mark.parametrize("how", ["argument", "env", "config"])
def test_a_named_implementation_that_cannot_run_is_an_error_with_the_candidates(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {}
    if how == "argument":
        arguments["name"] = "cuda"
    elif how == "env":
        monkeypatch.setenv("K3_IMPL_KERNEL_PROBE", "probe.cuda")
    else:
        arguments["overrides"] = {"kernel.probe": "probe.cuda"}
    with pytest.raises(ImplUnavailable) as info:
        resolve("kernel", "probe", registry=registry_of(REFERENCE, FAST, CUDA), **arguments)
    lines = str(info.value).splitlines()
    assert "cannot run" in lines[0]
    table = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert "runs on cuda, not on cpu" in table["probe.cuda"]
    assert "can run" in table["probe.fast"]
    # A variable would not win over the argument.
    helps = "k3 plugins impls --kind kernel"
    if how != "argument":
        helps = "export K3_IMPL_KERNEL_PROBE=probe.fast"
    assert lines[-1] == f"Try: {helps}"


def test_requirements_are_checked_and_suggested() -> None:
    needy = impl("probe.needy", priority=9, requires=("distribution-that-is-not-there>=3",))
    old = impl("probe.old", requires=("pluggy<0.1",))
    with pytest.raises(ImplUnavailable) as info:
        resolve("kernel", "probe", registry=registry_of(needy, old))
    message = str(info.value)
    assert "requires distribution-that-is-not-there>=3, which is not installed" in message
    assert "requires pluggy<0.1, found" in message
    assert message.endswith("Try: pip install 'distribution-that-is-not-there>=3'")
    fine = impl("probe.fine", requires=("pluggy>=1.0", 'absent; python_version < "3"'))
    assert resolve("kernel", "probe", registry=registry_of(needy, fine)).chosen is fine


def test_an_implementation_of_another_contract_is_never_chosen() -> None:
    future = impl("probe.future", priority=99, api=2)
    resolution = resolve("kernel", "probe", registry=registry_of(FAST, future))
    assert resolution.chosen is FAST
    assert "contract 2" in resolution.rejected[0][1]


def test_strict_forbids_an_automatic_reference_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of(REFERENCE)
    monkeypatch.setenv("K3_STRICT_IMPL", "1")
    assert resolve("kernel", "probe", registry=registry).chosen is REFERENCE
    with pytest.raises(ImplUnavailable, match="K3_STRICT_IMPL"):
        resolve("kernel", "probe", registry=registry, device="cuda")
    named = resolve("kernel", "probe", registry=registry, device="cuda", name="reference")
    assert named.chosen is REFERENCE


def test_settings_with_a_wrong_key_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of(FAST)
    with pytest.raises(PluginError, match=r"kernel\.prode.*did you mean kernel\.probe"):
        resolve("kernel", "probe", registry=registry, overrides={"kernel": {"prode": "fast"}})
    with pytest.raises(PluginError, match="give the name"):
        resolve("kernel", "probe", registry=registry, overrides={"kernel": {"probe": 1}})
    monkeypatch.setenv("K3_IMPL_KERNEL_PRODE", "fast")
    with pytest.raises(PluginError, match="did you mean K3_IMPL_KERNEL_PROBE"):
        resolve("kernel", "probe", registry=registry)


def test_unknown_kinds_and_ops_list_the_known_ones() -> None:
    with pytest.raises(
        ImplUnavailable, match=r"'kernal' \(did you mean 'kernel'\?\); one of attention"
    ):
        resolve("kernal", "probe", registry=registry_of(FAST))
    with pytest.raises(ImplUnavailable, match=r"no plugin declares the kernel 'nothing'.*probe"):
        resolve("kernel", "nothing", registry=registry_of(FAST))


def test_a_target_that_does_not_import_names_itself() -> None:
    bad = impl("probe.bad", target="module_that_is_not_there:thing")
    with pytest.raises(ImplLoadError, match=r"probe\.bad.*module_that_is_not_there:thing"):
        resolve("kernel", "probe", registry=registry_of(bad)).load()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": "math"}, "module:attribute"),
        ({"target": ":sqrt"}, "module:attribute"),
        ({"kind": "kernal"}, "unknown kind 'kernal'"),
        ({"kind": None}, "kind is None; give a string"),
        ({"name": ""}, "empty name"),
        ({"devices": "cpu"}, "devices is 'cpu'"),
        ({"dtypes": {1}}, "dtypes is {1}"),
        ({"features": None}, "features is None"),
        ({"requires": "triton>=3.6"}, "requires is 'triton>=3.6'"),
        ({"requires": ("no requirement!",)}, "PEP 508"),
        ({"priority": None}, "priority is None; give an integer"),
        ({"api": "1"}, "api is '1'"),
        ({"min_capability": 9}, "min_capability is 9"),
        ({"min_capability": (9, 0, 0)}, r"min_capability is \(9, 0, 0\)"),
        ({"summary": b"x"}, "summary is b'x'"),
    ],
)
def test_a_declaration_that_cannot_be_right_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    """Where it is made: `resolve` and `k3 plugins impls` could not go on with such a row."""
    with pytest.raises(PluginError, match=message):
        Impl(**{"kind": "kernel", "name": "probe.x", "target": "math:sqrt", **fields})


def test_collections_become_immutable() -> None:
    made = Impl(
        kind="kernel", name="probe.x", target="math:sqrt", dtypes=["float32"], requires=["pip"]
    )
    assert made.dtypes == frozenset({"float32"}) and made.requires == ("pip",)


def test_a_policy_that_fails_is_named_and_not_passed_over() -> None:
    class Policy:
        @hookimpl
        def k3_select(self, request: Any, candidates: Any) -> None:
            raise RuntimeError("no such site")

    registry = registry_of(REFERENCE, FAST)
    registry.manager.register(Policy(), name="site_policy")
    with pytest.raises(PluginError, match=r"RuntimeError: no such site\. .*site_policy"):
        resolve("kernel", "probe", registry=registry)
