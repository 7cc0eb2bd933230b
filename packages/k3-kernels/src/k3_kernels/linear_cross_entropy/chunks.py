"""What both forms of linear_cross_entropy share: chunks of tokens, their products, the gradients.

Only the logits of one chunk are ever stored. Where the loss is one number, the forward makes the
gradients too, of the same logits, and the backward only scales them: three products in all, where
logits made again in the backward would be a fourth. Losses of single tokens have factors that only
the backward knows, so that those calls do make the logits twice.

On a GPU products are those of the inputs' dtype and keep their float32 sums in the logits and in
the weight's gradient, which chunks add to. Rounded to bfloat16, logits that spread by 4 and by 10
put gradients off by 0.6% and 1.7%, kept in float32 by 0.2% (simulated with 8192 words).

8192 x 2048 -> 163,840: 16.5 TFLOP, 21.7 ms at 761 TFLOP/s; logits and sums are 25 GB of traffic
in float32, 6 ms. Weight 0.67 GB, its sums 1.34 GB, logits of 2048 tokens 1.34 GB.

Legend: T tokens, C tokens of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from k3_core.custom_op import Gradients, Needs, custom_op
from k3_core.ops.linear_cross_entropy.reference import check_reduction
from k3_core.ops.math import math_dtype, without_autocast

LOGITS_BYTES = {"cuda": 5 << 28, "cpu": 1 << 24}
"""Most bytes of a chunk's logits by device, but for chunks of `MIN_TOKENS`."""
MIN_TOKENS = 256
"""The gradient of the weight is read and written once a chunk."""


class Rows(Protocol):
    """Losses and gradients of a chunk's logits, which it may overwrite.

    It fills losses_C. scale_C: factors of the gradients, or None for ones. grad_dtype: that of the
    gradients that it returns, None where none are wanted. Tokens that are ignored get zeros.
    """

    def __call__(
        self,
        logits_CV: Tensor,
        labels_C: Tensor,
        losses_C: Tensor,
        scale_C: Tensor | None,
        *,
        loss: Loss,
        grad_dtype: torch.dtype | None,
    ) -> Tensor | None: ...


class Loss(NamedTuple):
    """What all chunks of a call share."""

    rows: Rows
    ignore_index: int
    z_loss: float
    logits_dtype: torch.dtype | None = None


def op_by(name: str, rows: Rows) -> Callable[..., Tensor]:
    """The op with the rows of one form; as `linear_cross_entropy.reference`, but for the dtype of
    the logits, None for the math dtype."""
    one = custom_op(
        name,
        forward=partial(_one_forward, rows),
        backward=_one_backward,
        saved=_one_saved,
    )(partial(_one_loss, rows))
    each = custom_op(f"{name}_tokens", backward=partial(_tokens_backward, rows))(
        partial(_token_losses, rows)
    )

    def linear_cross_entropy(
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        *,
        ignore_index: int,
        reduction: str,
        z_loss: float,
        **settings: torch.dtype,
    ) -> Tensor:
        check_reduction(reduction)
        _check_shapes(hidden_TD, weight_VD, labels_T)
        device = hidden_TD.device.type
        if torch.is_autocast_enabled(device) and hidden_TD.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            hidden_TD, weight_VD = hidden_TD.to(dtype), weight_VD.to(dtype)
        result: Tensor = (each if reduction == "none" else one)(
            hidden_TD,
            weight_VD,
            labels_T.contiguous(),
            ignore_index=ignore_index,
            reduction=reduction,
            z_loss=z_loss,
            **settings,
        )
        return result

    return linear_cross_entropy


# Reductions "mean" and "sum". The gradients are made before their factor is known, and kept
# unscaled, so that half precision neither overflows nor vanishes under a loss scale.


def _one_loss(
    rows: Rows,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    reduction: str,
    **settings: Any,
) -> Tensor:
    loss = Loss(rows, **settings)
    losses_T, _, _ = _run_chunks(hidden_TD, weight_VD, labels_T, None, loss, (False, False))
    return losses_T.sum() * _share(labels_T, reduction, loss, losses_T.dtype)


def _one_forward(
    rows: Rows,
    needs: Needs,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    reduction: str,
    **settings: Any,
) -> tuple[Tensor, list[Tensor]]:
    loss, wanted = Loss(rows, **settings), (needs["hidden_TD"], needs["weight_VD"])
    losses_T, *grads = _run_chunks(hidden_TD, weight_VD, labels_T, None, loss, wanted)
    share = _share(labels_T, reduction, loss, losses_T.dtype)
    like = hidden_TD.new_empty(0)
    return losses_T.sum() * share, [share, like, *(x for x in grads if x is not None)]


def _one_saved(needs: Needs, hidden_TD: Tensor, weight_VD: Tensor, **_: Any) -> list[Tensor]:
    sums = math_dtype(hidden_TD)
    saved = [hidden_TD.new_empty((), dtype=sums), hidden_TD.new_empty(0)]
    if needs["hidden_TD"]:
        saved.append(hidden_TD.new_empty(hidden_TD.shape))
    if needs["weight_VD"]:
        saved.append(weight_VD.new_empty(weight_VD.shape, dtype=sums))
    return saved


def _one_backward(grads: Sequence[Tensor], saved: Sequence[Tensor], needs: Needs) -> Gradients:
    share, like, *unscaled = saved
    factor_1 = (grads[0] * share).view(1)
    names = [name for name in ("hidden_TD", "weight_VD") if needs[name]]
    return {
        name: torch.mul(grad, factor_1, out=torch.empty_like(grad, dtype=like.dtype))
        for name, grad in zip(names, unscaled, strict=True)
    }


# Reduction "none": the backward makes the logits again.


def _token_losses(
    rows: Rows,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    reduction: str,
    **settings: Any,
) -> Tensor:
    loss = Loss(rows, **settings)
    return _run_chunks(hidden_TD, weight_VD, labels_T, None, loss, (False, False))[0]


def _tokens_backward(
    rows: Rows,
    grads: Sequence[Tensor],
    saved: Sequence[Tensor],
    needs: Needs,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    ignore_index: int,
    z_loss: float,
    logits_dtype: torch.dtype | None = None,
) -> Gradients:
    loss, wanted = (
        Loss(rows, ignore_index, z_loss, logits_dtype),
        (needs["hidden_TD"], needs["weight_VD"]),
    )
    _, d_hidden_TD, d_weight_VD = _run_chunks(
        hidden_TD, weight_VD, labels_T, grads[0].contiguous(), loss, wanted
    )
    if d_weight_VD is not None:
        d_weight_VD = d_weight_VD.to(weight_VD.dtype)
    return {"hidden_TD": d_hidden_TD, "weight_VD": d_weight_VD}


def _run_chunks(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    scale_T: Tensor | None,
    loss: Loss,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses [T], and the wanted gradients: of hidden in its dtype, of the weight in float32."""
    (num_tokens, _), vocabulary = hidden_TD.shape, len(weight_VD)
    _check_labels(labels_T, len(weight_VD), loss.ignore_index)
    sums = math_dtype(hidden_TD)
    logits_dtype = loss.logits_dtype or sums
    losses_T = hidden_TD.new_empty(num_tokens, dtype=sums)
    d_hidden_TD = torch.empty_like(hidden_TD) if wanted[0] else None
    d_weight_VD = torch.empty_like(weight_VD, dtype=sums) if wanted[1] else None
    size = min(num_tokens, chunk_tokens(vocabulary, logits_dtype, hidden_TD.device.type))
    buffer_CV = hidden_TD.new_empty(size, vocabulary, dtype=logits_dtype)
    with without_autocast(hidden_TD):
        for start in range(0, num_tokens, size or 1):
            rows = slice(start, min(start + size, num_tokens))
            logits_CV = buffer_CV[: rows.stop - start]
            _multiply(hidden_TD[rows], weight_VD.mT, logits_CV)
            d_logits_CV = loss.rows(
                logits_CV,
                labels_T[rows],
                losses_T[rows],
                None if scale_T is None else scale_T[rows],
                loss=loss,
                grad_dtype=hidden_TD.dtype if any(wanted) else None,
            )
            if d_logits_CV is None:
                continue
            if d_hidden_TD is not None:
                torch.mm(d_logits_CV, weight_VD, out=d_hidden_TD[rows])
            if d_weight_VD is not None:
                _multiply(d_logits_CV.mT, hidden_TD[rows], d_weight_VD, is_added=start > 0)
    if d_weight_VD is not None and not num_tokens:
        d_weight_VD.zero_()
    return losses_T, d_hidden_TD, d_weight_VD


def chunk_tokens(vocabulary: int, logits_dtype: torch.dtype, device: str) -> int:
    """Tokens of a chunk: a power of two, because tiles of its products fill a GPU then."""
    tokens = LOGITS_BYTES.get(device, LOGITS_BYTES["cuda"]) // (vocabulary * logits_dtype.itemsize)
    return 1 << max(tokens, MIN_TOKENS).bit_length() - 1


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, is_added: bool = False) -> None:
    """out = a @ b, or out += a @ b; on a GPU the float32 sums of 16-bit products are kept."""
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=int(is_added))
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(is_added), out=out)
    elif is_added:
        out.add_(torch.mm(a, b))
    else:
        out.copy_(torch.mm(a, b))


def _share(labels_T: Tensor, reduction: str, loss: Loss, dtype: torch.dtype) -> Tensor:
    """What the loss of a token counts for, a number: in a mean one over the tokens that count."""
    if reduction == "sum":
        return torch.ones((), dtype=dtype, device=labels_T.device)
    return (labels_T != loss.ignore_index).sum().clamp(min=1).to(dtype).reciprocal()


def _check_shapes(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> None:
    is_shaped = hidden_TD.dim() == weight_VD.dim() == 2 and labels_T.dim() == 1
    if not is_shaped or (hidden_TD.shape[1], len(hidden_TD)) != (weight_VD.shape[1], len(labels_T)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (hidden_TD, weight_VD, labels_T))
        raise ValueError(
            f"linear_cross_entropy: hidden, weight and labels {shapes} are not [T, D], [V, D], [T]"
        )


def _check_labels(labels_T: Tensor, vocabulary: int, ignore_index: int) -> None:
    """On a CPU only, since a GPU would have to be waited for."""
    if labels_T.is_cuda:
        return
    is_unknown_T = (labels_T != ignore_index) & ((labels_T < 0) | (labels_T >= vocabulary))
    if is_unknown_T.any():
        token = int(is_unknown_T.int().argmax())
        raise IndexError(
            f"linear_cross_entropy: label {int(labels_T[token])} of token {token} is outside the "
            f"vocabulary of {vocabulary} and is not ignore_index ({ignore_index})"
        )
