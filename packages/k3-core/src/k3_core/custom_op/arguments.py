"""Arguments and results of an op in the words of torch's schemas, found from its annotations.

A schema knows tensors, numbers, names and lists of them. What else an op takes is lowered to these:
a packed stack to its codes and scales, an activation to its name, lists of lists to one list.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from k3_core.quant import MXTensor

Written = Annotated[Tensor | None, "written"]
"""An argument that the op writes in place; it may be None where that is its default."""

Values = dict[str, Any]
"""Arguments of a call by name."""

Stack = Tensor | MXTensor
Function = Callable[[Tensor, Tensor], Tensor]


class Lowering(NamedTuple):
    """How one argument is passed: types in the schema, the way there and the way back."""

    types: tuple[str, ...]
    lower: Callable[[Any], tuple[Any, ...]] = lambda value: (value,)
    restore: Callable[..., Any] = lambda value: value


def _lower_stack(stack: Stack) -> tuple[Tensor, Tensor | None]:
    return (stack, None) if isinstance(stack, Tensor) else (stack.packed, stack.scale)


def _restore_stack(codes: Tensor, scale: Tensor | None) -> Stack:
    return codes if scale is None else MXTensor(codes, scale)


def _lower_pair(pair: tuple[Tensor, float] | None) -> tuple[Tensor | None, float | None]:
    return (None, None) if pair is None else pair


def _restore_pair(tensor: Tensor | None, number: float | None) -> tuple[Tensor, float] | None:
    return None if tensor is None or number is None else (tensor, number)


def _lower_function(function: Function) -> tuple[str]:
    """`module:name`, behind it `|keyword=value` for each keyword of a partial."""
    if isinstance(function, partial):
        keywords = "".join([f"|{name}={value!r}" for name, value in function.keywords.items()])
        return (f"{function.func.__module__}:{function.func.__name__}{keywords}",)
    return (f"{function.__module__}:{function.__name__}",)


def _restore_function(text: str) -> Function:
    path, *keywords = text.split("|")
    module, _, name = path.partition(":")
    function = getattr(import_module(module), name, None)
    if function is None:
        raise TypeError(
            f"{name} of {module} cannot be found by its name, as torch.compile needs it; "
            "define the function at the top of its module"
        )
    pairs = [keyword.partition("=") for keyword in keywords]
    given = {name: None if value == "None" else float(value) for name, _, value in pairs}
    return partial(function, **given) if given else function


def _lower_lists(lists: Sequence[Sequence[int]] | None) -> tuple[list[int] | None]:
    """Each list behind its length."""
    return (None if lists is None else [n for own in lists for n in (len(own), *own)],)


def _restore_lists(numbers: Sequence[int] | None) -> tuple[tuple[int, ...], ...] | None:
    if numbers is None:
        return None
    lists, rest = [], list(numbers)
    while rest:
        lists.append(tuple(rest[1 : 1 + rest[0]]))
        rest = rest[1 + rest[0] :]
    return tuple(lists)


LOWERINGS: dict[Any, Lowering] = {
    Tensor: Lowering(("Tensor",)),
    Tensor | None: Lowering(("Tensor?",)),
    Sequence[Tensor]: Lowering(("Tensor[]",), lambda value: (list(value),)),
    Stack: Lowering(("Tensor", "Tensor?"), _lower_stack, _restore_stack),
    tuple[Tensor, float] | None: Lowering(("Tensor?", "float?"), _lower_pair, _restore_pair),
    Function: Lowering(("str",), _lower_function, _restore_function),
    float: Lowering(("float",)),
    float | None: Lowering(("float?",)),
    int: Lowering(("int",)),
    bool: Lowering(("bool",)),
    str: Lowering(("str",)),
    torch.dtype | None: Lowering(("ScalarType?",)),
    tuple[int, ...] | None: Lowering(
        ("SymInt[]?",),
        lambda value: (None if value is None else list(value),),
        lambda value: None if value is None else tuple(value),
    ),
    tuple[tuple[int, ...], ...] | None: Lowering(("int[]?",), _lower_lists, _restore_lists),
}


class Parameter(NamedTuple):
    """One of an op's, with its place among the lowered ones."""

    name: str
    lowering: Lowering
    default: Any
    is_written: bool
    place: slice


class Signature:
    """The parameters of an op, from the annotations of its `meta`."""

    def __init__(self, op: str, meta: Callable[..., Any]) -> None:
        hints = get_type_hints(meta, include_extras=True)
        self.op, self.result = op, hints.pop("return")
        self.parameters: list[Parameter] = []
        place = 0
        for name, parameter in inspect.signature(meta).parameters.items():
            is_written = get_origin(hints[name]) is Annotated
            lowering = LOWERINGS[get_args(hints[name])[0] if is_written else hints[name]]
            end = place + len(lowering.types)
            default = parameter.default
            self.parameters.append(
                Parameter(name, lowering, default, is_written, slice(place, end))
            )
            place = end
        self.num_plain = place
        self.num_results = _count(self.result)
        self.names = [p.name for p in self.parameters]
        written = [p for p in self.parameters if p.is_written]
        self.written = [p.name for p in written]
        self.must_write = any(p.default is inspect.Parameter.empty for p in written)
        self._defaults = {
            p.name: p.default for p in self.parameters if p.default is not inspect.Parameter.empty
        }

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
        """All arguments by name, those that are an implementation's own included."""
        return {**self._defaults, **dict(zip(self.names, args, strict=False)), **kwargs}

    def lower(self, values: Values) -> list[Any]:
        """The arguments in the order of the schema; raises TypeError for others than the op's."""
        if len(values) != len(self.names):
            wrong = [name for name in values if name not in self.names]
            missing = [name for name in self.names if name not in values]
            raise TypeError(
                f"{self.op} under torch.compile takes the op's arguments: {wrong} are others, "
                f"{missing} are missing"
            )
        return [plain for p in self.parameters for plain in p.lowering.lower(values[p.name])]

    def restore(self, plain: Sequence[Any]) -> Values:
        """The arguments by name from the lowered ones."""
        return {p.name: p.lowering.restore(*plain[p.place]) for p in self.parameters}

    def schema(self, *, is_functional: bool = False, is_optional: bool = False) -> str:
        """The parameters of a schema: whether nothing is written, and tensors may be None."""
        parts: list[str] = []
        for p in self.parameters:
            for number, kind in enumerate(p.lowering.types):
                suffix = f"_{number}" if number else ""
                if is_optional and kind == "Tensor":
                    kind = "Tensor?"
                elif p.is_written and not is_functional:
                    kind = kind.replace("Tensor", f"Tensor(a{len(parts)}!)")
                parts.append(f"{kind} {p.name}{suffix}")
        return ", ".join(parts)


def _count(annotation: Any) -> int:
    """The tensors of a result of the annotated type, optional ones included."""
    if annotation is type(None):
        return 0
    if get_origin(annotation) is tuple:
        return len(get_args(annotation))
    return len(getattr(annotation, "_fields", (annotation,)))


def flatten(result: Any) -> list[Tensor]:
    """The tensors of a result, in order; None is left out."""
    if result is None:
        return []
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, MXTensor):
        return [result.packed, result.scale]
    return [tensor for item in result for tensor in flatten(item)]


def unflatten(tensors: Sequence[Tensor], annotation: Any) -> Any:
    """A result of the annotated type from its tensors; None for an optional last one."""
    if annotation is Tensor:
        return tensors[0]
    if annotation is type(None):
        return None
    if isinstance(annotation, type):
        return annotation(*tensors)
    if get_origin(annotation) is not tuple:  # a tensor, or several where they are asked for
        return tensors[0] if len(tensors) == 1 else tuple(tensors)
    missing = len(get_args(annotation)) - len(tensors)
    return (*tensors, *[None] * missing)
