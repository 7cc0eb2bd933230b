"""A source by its registry name, with its options checked."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from k3_core.config import ConfigError, apply_overrides, load_dataclass
from k3_core.errors import K3Error, nearest
from k3_core.plugins import ensure_plugins, resolve
from k3_train.data.documents import Corpus, Document, Source


def source_names() -> list[str]:
    """Names of the sources that plugins offer."""
    return sorted({impl.implements for impl in ensure_plugins().impls("dataset")})


def open_source(
    name: str, options: Mapping[str, object] | None = None, sets: Sequence[str] = ()
) -> Source:
    """The source `name`; `sets` are `key=value` changes of its options.

    K3Error for an unknown name, ConfigError for an option that the source does not have.
    """
    known = source_names()
    if name not in known:
        close = nearest(name, known)
        hint = f"; did you mean {close!r}?" if close else "."
        raise K3Error(f"no source {name!r}{hint} There are: {', '.join(known)}")
    target: Any = resolve("dataset", name).load()
    return load_dataclass(target, apply_overrides(options or {}, sets), name)


def open_documents(name: str, options: Mapping[str, object], setting: str) -> Iterator[Document]:
    """The documents of the source `name`; ConfigError at `setting` for one of something else."""
    source = open_source(name, options)
    if not isinstance(source, Corpus):
        raise ConfigError(setting, f"{name!r} is endless", "Name a source of documents.")
    for entry in source.entries():
        if not isinstance(entry, Document):
            raise ConfigError(setting, f"{name!r} has no documents", "Name another source.")
        yield entry


def source_options(name: str) -> dict[str, str]:
    """Option names of a source with their defaults, for listings."""
    target: Any = resolve("dataset", name).load()
    return {field.name: _default(field) for field in dataclasses.fields(target)}


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "required"
