"""What a study is: arms as changes of settings, over a scale that is common to all studies.

Studies are TOML files: those of `k3_train/study/studies`, named by their stem, or a path. The
scales are in `scales.toml` there; a study may change a scale for itself under `[scales.NAME]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from k3_core.config import ConfigError, load_dataclass, read_toml
from k3_core.errors import K3Error, nearest

FOLDER = Path(__file__).parent / "studies"
_SCALES = Path(__file__).parent / "scales.toml"


@dataclass(frozen=True)
class Arm:
    """One way to do it.

    model: fields of the text configuration, "none" for null; also `kda_per_mla` (KDA layers for
    each MLA layer, 0 for MLA alone), `kda_heads` and `kda_head_dim`. set: settings of the run by
    dotted name. rates: factors on all peak learning rates to choose from; empty takes those of the
    scale. tokens: times those of the scale. at: more fields of the model, by name of a scale.
    """

    name: str
    about: str = ""
    model: dict[str, object] = field(default_factory=dict)
    set: dict[str, object] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    tokens: float = 1.0
    at: dict[str, dict[str, object]] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """What all arms of a study have in common.

    banner: what a page says above its figures. tokens: of a run; search_tokens: of a run that only
    chooses the learning rate. seeds: runs of an arm. rates: factors on the learning rates.
    workers: runs at a time. vocab_size: ids of the tokenizer, 256 special ones included.
    corpus_files: of the standard library, 0 for all. recall_share: share of recall tasks in the
    tokens of training, recall_pairs: pairs of a task. eval_tokens: held-out tokens.
    prefill_tokens: length at which prefill and state are measured.
    """

    name: str
    banner: str
    tokens: int
    search_tokens: int
    seeds: int
    rates: tuple[float, ...]
    workers: int
    vocab_size: int
    corpus_files: int
    eval_tokens: int
    prefill_tokens: int
    recall_share: float = 0.0
    recall_pairs: int = 8
    model: dict[str, object] = field(default_factory=dict)
    set: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """A question and its arms; every arm is run in every variant, as `arm/variant`.

    shown: measures of the page, by their names in a row; a page does not rank. law: fit held-out
    loss against FLOPs over all arms.
    """

    title: str
    question: str
    shown: tuple[str, ...]
    arms: tuple[Arm, ...]
    variants: tuple[Arm, ...] = ()
    scales: dict[str, dict[str, object]] = field(default_factory=dict)
    law: bool = False
    name: str = ""

    def all_arms(self) -> list[Arm]:
        """The arms in every variant."""
        if not self.variants:
            return list(self.arms)
        return [_combined(arm, variant) for variant in self.variants for arm in self.arms]

    def chosen(self, names: Sequence[str]) -> list[Arm]:
        """The arms of these names (`arm/variant`, or `arm` for all of its variants), in order.

        No names mean all. K3Error names an unknown one.
        """
        known = self.all_arms()
        taken: set[str] = set()
        for name in names:
            found = {arm.name for arm in known if name in (arm.name, arm.name.partition("/")[0])}
            if not found:
                raise _unknown("arm", name, [arm.name for arm in known])
            taken |= found
        return [arm for arm in known if not names or arm.name in taken]

    def scale(self, name: str) -> Scale:
        """A scale with the changes of this study; K3Error names an unknown one."""
        table = read_toml(_SCALES)
        if name not in table:
            raise _unknown("scale", name, table)
        base, own = dict(table[name]), self.scales.get(name, {})  # type: ignore[call-overload]
        for key in ("model", "set"):
            base[key] = {**base.get(key, {}), **_table(own, key)}
        rest = {key: value for key, value in own.items() if key not in ("model", "set")}
        return load_dataclass(Scale, {"name": name, **base, **rest}, f"scales.{name}")


def load_study(name: str) -> Study:
    """A shipped study by its name, or the study of a TOML file; K3Error names an unknown one."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise _unknown("study", name, study_names())
    study = load_dataclass(Study, {**read_toml(path), "name": path.stem})
    names = [arm.name for arm in study.all_arms()]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: arms", f"two have one name: {names}", "Rename one.")
    return study


def study_names() -> list[str]:
    """The shipped studies."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def scale_names() -> list[str]:
    """All scales."""
    return list(read_toml(_SCALES))


def _combined(arm: Arm, variant: Arm) -> Arm:
    given = asdict(arm) | {"name": f"{arm.name}/{variant.name}"}
    for one in fields(Arm):
        own = getattr(variant, one.name)
        if one.name in ("model", "set", "at"):
            given[one.name] = {**given[one.name], **own}
        elif one.name == "about":
            given["about"] = " ".join(filter(None, (arm.about, own)))
        elif one.name in ("rates", "tokens") and own != one.default:
            given[one.name] = own
    return Arm(**given)


def _table(values: Mapping[str, object], key: str) -> dict[str, Any]:
    table = values.get(key, {})
    if not isinstance(table, Mapping):
        raise ConfigError(key, f"{table!r} is not a table", "Write its keys under a heading.")
    return dict(table)


def _unknown(what: str, name: str, known: Iterable[str]) -> K3Error:
    near = nearest(name, known)
    meant = f" (did you mean {near!r}?)" if near else ""
    return K3Error(f"no {what} {name!r}{meant}; there are: {', '.join(known)}")
