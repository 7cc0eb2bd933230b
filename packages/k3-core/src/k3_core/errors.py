"""The errors that K3 raises on purpose; the command line prints them without a traceback.

Each message names the offending value, the allowed ones and the next thing to do.
"""

from collections.abc import Iterable


class K3Error(Exception):
    """Base of every error that is the caller's to fix (exit code 2 of the command line)."""


class PluginError(K3Error):
    """A plugin, a declaration or a plugin setting that breaks the contract."""


class DuplicateName(PluginError):
    """A plugin, an implementation or a command takes a name that is taken."""


class PluginTableMismatch(PluginError):
    """A worker process sees other implementations than the process that started it."""


class ImplUnavailable(K3Error):
    """No implementation can serve a request, or the named one cannot run."""


class ImplLoadError(K3Error):
    """The target of an implementation cannot be imported."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None: the hint of a message about an unknown name."""
    import difflib  # on use: errors are imported at every start of `k3`

    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)), None)


def one_line(error: BaseException) -> str:
    """Type and first line of an error, for a table or a record."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__.lstrip('_')}: {first}"
