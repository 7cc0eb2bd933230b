"""A step of fixed shapes, recorded once and replayed without its Python: on a CPU what a CUDA graph
is on a GPU (serving.md 3).

A decode step of a small model takes longer to say than to compute. A recording keeps each call of
torch that computes something and each call that a kernel announces with `launch`, with their
tensors; a replay makes them again, in order, on the same memory. So a step may read its inputs from
tensors that change between replays, and nothing else: Python values are those of the recording.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")

HOST_READS = (
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__iter__",
)
"""Methods of a tensor that give Python its values, which a replay could not follow."""

_current = threading.local()


class RecordError(RuntimeError):
    """A step that cannot be recorded; the message names the call."""


class _Call(NamedTuple):
    """`function(*args, **kwargs)`; it must return `expected`, unless that is None."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    expected: Any = None


class Recording(Generic[Result]):
    """The calls of `step`, which runs once for it; `result` is what it returned.

    Raises RecordError when the step reads a tensor's values on the host.
    """

    def __init__(self, step: Callable[[], Result]) -> None:
        self._calls: list[_Call] = []
        self._kept: list[Any] = []
        with _announced_to(self), _NoHostReads(), _Calls(self):
            self.result = step()

    def replay(self) -> None:
        """Makes the calls again. Raises RuntimeError where one returns what it did not before."""
        for function, args, kwargs, expected in self._calls:
            returned = function(*args, **kwargs)
            if expected is not None and returned != expected:
                raise RuntimeError(f"{function} gave {returned}, not {expected}")

    def add(self, call: _Call, *kept: Any) -> None:
        """Has replays make the call; `kept` lives as long as the recording."""
        self._calls.append(call)
        self._kept.extend(kept)


def launch(function: Callable[..., Result], *args: Any) -> Result:
    """Call a kernel that torch does not see, on addresses of tensors that torch made.

    Its result (a number or None) has to be the same in a replay: it says whether inputs were valid.
    """
    result = function(*args)
    recording = getattr(_current, "recording", None)
    if recording is not None:
        recording.add(_Call(function, args, {}, result))
    return result


@contextmanager
def _announced_to(recording: Recording) -> Iterator[None]:
    if getattr(_current, "recording", None) is not None:
        raise RecordError("a recording is under way in this thread")
    _current.recording = recording
    try:
        yield
    finally:
        _current.recording = None


class _NoHostReads(TorchFunctionMode):
    """Refuses what would turn a tensor's values into constants of the recording."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in HOST_READS:
            raise RecordError(f"the step reads a tensor on the host by {name}")
        return function(*args, **(kwargs or {}))


class _Calls(TorchDispatchMode):
    """Adds the calls of torch that write memory.

    One that reads no tensor gives the same in every replay: it is added only where a later call of
    torch writes to what it gave.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        self._constants: dict[int, _Call] = {}

    def __torch_dispatch__(
        self, overload: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in overload.tags:
            raise RecordError(f"the step reads a tensor on the host by {overload}")
        if torch.Tag.dynamic_output_shape in overload.tags and _has_mask(args):
            raise RecordError(f"the shape of what {overload} gives depends on values")
        result = overload(*args, **kwargs)
        self._recording._kept.append(result)
        if overload._schema.is_mutable:
            for written in args:
                if isinstance(written, Tensor) and _memory(written) in self._constants:
                    self._recording.add(self._constants.pop(_memory(written)))
            self._recording.add(_Call(overload._op, args, kwargs), args, kwargs)
        elif overload in _CONSTANTS:
            self._constants[_memory(result)] = _again(overload, args, kwargs, result)
        elif not (_is_view(overload, args, result) or "empty" in overload.__name__):
            self._recording.add(_again(overload, args, kwargs, result))
        return result


_CONSTANTS = (torch.ops.aten.arange.default, torch.ops.aten.arange.start)
"""Numbers that kernels read, and do not write to as they may to zeros."""


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _has_mask(args: Any) -> bool:
    """False for an index by integers, whose shape is known."""
    if len(args) < 2 or not isinstance(args[1], (list, tuple)):
        return True
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _is_view(overload: Any, args: Any, result: Any) -> bool:
    """Whether the result lies in the memory of an argument; contiguous() may copy or not."""
    if all(returned.alias_info is None for returned in overload._schema.returns):
        return False
    first = result if isinstance(result, Tensor) else result[0]
    return _memory(first) == _memory(args[0])


def _again(overload: Any, args: Any, kwargs: Any, result: Any) -> _Call:
    """The call into the memory of its result."""
    if overload.overloadpacket in _COPIES:
        source = args[0]
        return _Call(result.view(source.shape).copy_, (source,), {})
    out = getattr(overload.overloadpacket, _out_name(overload), None)
    if isinstance(result, Tensor) and out is not None and _fits(overload, out):
        return _Call(out._op, args, {**kwargs, "out": result})

    def compute() -> None:
        again = overload._op(*args, **kwargs)
        pairs = (
            ((result, again),) if isinstance(result, Tensor) else zip(result, again, strict=True)
        )
        for kept, new in pairs:
            kept.copy_(new)

    return _Call(compute, (), {})


_COPIES = (torch.ops.aten.contiguous, torch.ops.aten.flatten, torch.ops.aten.reshape)
"""They give the numbers of their first argument in order, copied where they do not lie so."""

_OUT = {"Scalar": "Scalar_out", "dim": "dim_out"}
"""Overloads that write into `out`, by the name of the one that returns a new tensor."""


def _out_name(overload: Any) -> str:
    if overload.overloadpacket is torch.ops.aten.index:
        return "Tensor_out"
    return _OUT.get(overload._overloadname, "out")


def _fits(overload: Any, out: Any) -> bool:
    """Whether an overload takes the same arguments and `out`."""
    own = [(a.name, str(a.type)) for a in overload._schema.arguments]
    others = [(a.name, str(a.type)) for a in out._schema.arguments if a.name != "out"]
    return own == others and any(a.name == "out" for a in out._schema.arguments)
