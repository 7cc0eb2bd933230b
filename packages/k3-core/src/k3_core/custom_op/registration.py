"""An implementation in torch's dispatcher, under `torch.ops.k3`, from when it is first traced.

`<op>_<variant>` computes, and `<op>_<variant>_backward` is its backward: the function that
`custom_op` was given, or else the op once more with autograd on. Where the forward saves more than
arguments, calls that need gradients are `<op>_<variant>_forward`. Calls that write an argument are
`<op>_<variant>_`, without gradients.

All of them take the op's lowered arguments (`arguments`) and the dtype of autocast, None without:
a graph runs outside the block that it was traced in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from k3_core.custom_op.arguments import flatten
from k3_core.custom_op.implementation import Implementation, Needs, needs_grad

NAMESPACE = "k3"
ABSENT = torch.bool
"""The dtype of what stands for an optional result that is not there; no result has it."""


def name_of(own: Implementation) -> str:
    """The name of an implementation's op in the namespace."""
    return own.name.replace(".", "_")


def traced(own: Implementation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The call as a node of the graph that is being traced."""
    values = own.signature.bind(args, kwargs)
    plain = own.signature.lower(values)
    autocast = _autocast_dtype(plain)
    if any(values[name] is not None for name in own.signature.written):
        if own.is_differentiable and needs_grad(plain):
            written = ", ".join(own.signature.written)
            raise TypeError(f"{own.op}: in a graph a call that writes {written} has no gradients")
        tensors = getattr(torch.ops.k3, f"{name_of(own)}_").default(*plain, autocast)
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors or ()
        tensors = [x for x in tensors if x.dtype != ABSENT]
    elif own.forward is not None and needs_grad(plain):
        needs = [x.requires_grad for x in _tensors(plain)]
        op = getattr(torch.ops.k3, f"{name_of(own)}_forward").default
        tensors = op(*plain, autocast, needs)[0]
    else:
        tensors = getattr(torch.ops.k3, name_of(own)).default(*plain, autocast)
    return own.unflatten(tensors, values)


def register(own: Implementation) -> None:
    """Define the ops of an implementation."""
    name, signature = f"{NAMESPACE}::{name_of(own)}", own.signature
    if signature.written:
        returns = ", ".join(["Tensor"] * signature.num_results)
        op = torch.library.custom_op(
            f"{name}_",
            lambda *plain: _filled(own, _run(own, plain), plain),
            mutates_args=signature.written,
            schema=f"({signature.schema()}, ScalarType? autocast) -> ({returns})",
        )
        op.register_fake(lambda *plain: _filled(own, _fake(own, plain), plain))
    if signature.must_write:
        return
    schema = signature.schema(is_functional=True)
    op = torch.library.custom_op(
        name,
        lambda *plain: _run(own, plain),
        mutates_args=(),
        schema=f"({schema}, ScalarType? autocast) -> Tensor[]",
    )
    op.register_fake(lambda *plain: _fake(own, plain))
    if own.is_differentiable:
        _register_gradient(own, name, op)


def _register_gradient(own: Implementation, name: str, op: Any) -> None:
    if own.forward is not None:
        schema = own.signature.schema(is_functional=True)
        op = torch.library.custom_op(
            f"{name}_forward",
            lambda *plain: _run_forward(own, plain),
            mutates_args=(),
            schema=f"({schema}, ScalarType? autocast, bool[] needs) -> (Tensor[], Tensor[])",
        )
        op.register_fake(lambda *plain: _fake_forward(own, plain))
    op.register_autograd(
        lambda ctx, *grads: _differentiate(own, ctx, grads),
        setup_context=lambda ctx, inputs, output: _keep(own, ctx, inputs, output),
    )
    schema = own.signature.schema(is_functional=True, is_optional=True)
    backward = torch.library.custom_op(
        f"{name}_backward",
        lambda *plain: _run_backward(own, plain),
        mutates_args=(),
        schema=f"({schema}, ScalarType? autocast, Tensor[] kept, Tensor?[] grads, bool[] needs)"
        " -> Tensor[]",
    )
    backward.register_fake(lambda *plain: [_empty(x) for x in _wanted(plain[:-4], plain[-1])])


def _run(own: Implementation, plain: Sequence[Any]) -> list[Tensor]:
    *plain, autocast = plain
    with _autocast(plain, autocast):
        return _owned(own.run(**own.signature.restore(plain)), plain)


def _fake(own: Implementation, plain: Sequence[Any]) -> list[Tensor]:
    *plain, autocast = plain
    with _autocast(plain, autocast):
        result = own.module.meta(**own.signature.restore(plain))
    given = list(_tensors(plain))
    return [x for x in flatten(result) if not _is_in(x, given)]


def _filled(own: Implementation, tensors: list[Tensor], plain: Sequence[Any]) -> Any:
    """As many results as the op may have: what writes can return no list."""
    num_absent = own.signature.num_results - len(tensors)
    like = next(_tensors(plain))
    tensors += [like.new_empty(0, dtype=ABSENT) for _ in range(num_absent)]
    return None if not tensors else tensors[0] if len(tensors) == 1 else tuple(tensors)


def _run_forward(own: Implementation, plain: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    *plain, autocast, needs = plain
    with _autocast(plain, autocast):
        values = own.signature.restore(plain)
        result, saved = own.run_forward(values, _by_argument(own, plain, needs))
    results = _owned(result, plain)
    return results, _owned(saved, [*plain, results])


def _fake_forward(own: Implementation, plain: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    *plain, autocast, needs = plain
    results = _fake(own, [*plain, autocast])
    if own.saved is None:
        return results, []
    values = own.signature.restore(plain)
    return results, list(own.saved(_by_argument(own, plain, needs), **values))


def _keep(own: Implementation, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    """What the backward reads; of other inputs something of their shape and dtype."""
    ctx.set_materialize_grads(False)
    results, saved = (output, []) if own.forward is None else output
    own.mark_constants(ctx, results)
    kept = [*saved, *(results if own.reads_results else ())]
    num_plain = own.signature.num_plain
    plain: list[Any] = []
    for parameter in own.signature.parameters:
        is_read = own.backward is None or parameter.name in own.read
        given = list(inputs[parameter.place])
        plain.extend(given if is_read else pytree.tree_map_only(Tensor, _stand_in, given))
    leaves, ctx.structure = pytree.tree_flatten(plain)
    ctx.others = [None if isinstance(x, Tensor) else (x,) for x in leaves]
    ctx.autocast, ctx.num_kept = inputs[num_plain], len(kept)
    ctx.empty = [isinstance(x, list) and not x for x in inputs]
    ctx.save_for_backward(*kept, *(x for x in leaves if isinstance(x, Tensor)))


def _differentiate(own: Implementation, ctx: Any, grads: Sequence[Any]) -> tuple[Any, ...]:
    """One gradient for each input of the op, by its backward."""
    all_kept = ctx.saved_tensors
    kept, tensors = all_kept[: ctx.num_kept], iter(all_kept[ctx.num_kept :])
    leaves = [next(tensors) if other is None else other[0] for other in ctx.others]
    plain = pytree.tree_unflatten(leaves, ctx.structure)
    needs = [
        need
        for value, own_need in zip(plain, ctx.needs_input_grad, strict=False)
        for need in _flags(value, own_need)
    ]
    op = getattr(torch.ops.k3, f"{name_of(own)}_backward").default
    found = iter(op(*plain, ctx.autocast, list(kept), list(grads[0]), needs))
    wanted = iter([next(found) if need else None for need in needs])
    d_inputs: list[Any] = []
    for value, is_empty in zip([*plain, *[None] * 2], ctx.empty, strict=False):
        flags = _flags(value, True)
        if isinstance(value, list) and flags:
            d_inputs.append([next(wanted) for _ in flags])
        elif flags:
            d_inputs.append(next(wanted))
        else:
            d_inputs.append([] if is_empty else None)
    return tuple(d_inputs)


def _run_backward(own: Implementation, plain: Sequence[Any]) -> list[Tensor]:
    *plain, autocast, kept, grads, needs = plain
    if own.backward is None:
        found = _differentiate_again(own, plain, autocast, grads, needs)
    else:
        wanted = _by_argument(own, plain, needs)
        gradients = own.run_backward(grads, kept, wanted, own.signature.restore(plain))
        found = [
            gradient
            for name, need in wanted.items()
            for gradient, is_wanted in _pairs(gradients.get(name), need)
            if is_wanted
        ]
    inputs = _wanted(plain, needs)
    full = [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]
    return _owned(full, [*plain, kept, grads])


def _differentiate_again(
    own: Implementation,
    plain: Sequence[Any],
    autocast: torch.dtype | None,
    grads: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """The gradients by autograd, of the op run once more."""
    flags = iter(needs)
    leaves = pytree.tree_map_only(
        Tensor, lambda x: x.detach().requires_grad_(next(flags)), list(plain)
    )
    with torch.enable_grad(), _with_autograd(), _autocast(plain, autocast):
        results = flatten(own.run(**own.signature.restore(leaves)))
        pairs = [
            (x, grad)
            for x, grad in zip(results, grads, strict=True)
            if grad is not None and x.requires_grad
        ]
        inputs = _wanted(leaves, needs)
        outputs = [x for x, _ in pairs]
        if not outputs:
            return [None] * len(inputs)
        given = [grad for _, grad in pairs]
        return torch.autograd.grad(outputs, inputs, given, allow_unused=True)


def _with_autograd() -> AbstractContextManager[Any]:
    """The dispatcher as outside of autograd's own kernels, in which this runs."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)


# -- lists of lowered arguments ------------------------------------------------------------------


def _tensors(plain: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among lowered arguments, those in lists too."""
    for value in plain:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (x for x in value if isinstance(x, Tensor))


def _wanted(plain: Sequence[Any], needs: Sequence[bool]) -> list[Tensor]:
    """The tensors whose flag is set."""
    return [x for x, need in zip(_tensors(plain), needs, strict=True) if need]


def _flags(value: Any, needs: Any) -> list[bool]:
    """The flags of a lowered argument, one for each of its tensors."""
    if isinstance(value, Tensor):
        return [bool(needs)]
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return (
            [bool(need) for need in needs]
            if isinstance(needs, list | tuple)
            else [True] * len(value)
        )
    return []


def _by_argument(own: Implementation, plain: Sequence[Any], needs: Sequence[bool]) -> Needs:
    """The flags by name; a packed stack has none of its own."""
    left, found = iter(needs), Needs()
    for parameter in own.signature.parameters:
        for value in plain[parameter.place]:
            if isinstance(value, Tensor):
                found[parameter.name] = next(left) or found[parameter.name]
            elif isinstance(value, list) and value and isinstance(value[0], Tensor):
                found[parameter.name] = tuple(next(left) for _ in value)
    return found


def _pairs(gradient: Any, need: Any) -> list[tuple[Any, bool]]:
    if not isinstance(need, tuple):
        return [(gradient, need)]
    return list(zip([None] * len(need) if gradient is None else gradient, need, strict=True))


def _owned(result: Any, plain: Sequence[Any]) -> list[Tensor]:
    """The tensors of a result, contiguous and each in memory of its own; without those that are
    arguments."""
    given = list(_tensors(plain))
    taken = {x.untyped_storage().data_ptr() for x in given}
    tensors = []
    for tensor in flatten(result):
        if _is_in(tensor, given):
            continue
        own = tensor.contiguous()
        address = own.untyped_storage().data_ptr()
        tensors.append(own.clone() if address in taken and own.numel() else own)
        taken.add(address)
    return tensors


def _is_in(tensor: Tensor, given: Sequence[Tensor]) -> bool:
    return any(tensor is x for x in given)


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _stand_in(tensor: Tensor) -> Tensor:
    """One number that looks like the tensor."""
    return tensor.detach().new_empty(()).expand(tensor.shape)


def _autocast_dtype(plain: Sequence[Any]) -> torch.dtype | None:
    device = next(_tensors(plain)).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _autocast(plain: Sequence[Any], dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """The block of autocast that a call was traced in."""
    device = next(_tensors(plain)).device.type
    is_on = torch.is_autocast_enabled(device)
    if dtype == (torch.get_autocast_dtype(device) if is_on else None):
        return nullcontext()
    return torch.autocast(device, dtype, enabled=dtype is not None)
