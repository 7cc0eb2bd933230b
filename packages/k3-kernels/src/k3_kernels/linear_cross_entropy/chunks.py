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

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from k3_core.ops.linear_cross_entropy.reference import check_reduction
from k3_core.ops.math import math_dtype, without_autocast
from k3_kernels.launch import needs_grad
from k3_kernels.once import refuse_second_derivative

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
    logits_dtype: torch.dtype


def run(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, reduction: str, loss: Loss
) -> Tensor:
    """The op with the rows of one form; as `linear_cross_entropy.reference`."""
    check_reduction(reduction)
    _check(hidden_TD, weight_VD, labels_T, loss.ignore_index)
    device = hidden_TD.device.type
    if torch.is_autocast_enabled(device) and hidden_TD.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        hidden_TD, weight_VD = hidden_TD.to(dtype), weight_VD.to(dtype)
    inputs = hidden_TD, weight_VD, labels_T.contiguous()
    if reduction == "none":
        losses_T: Tensor = _TokenLosses.apply(*inputs, loss)
        return losses_T
    if needs_grad(hidden_TD, weight_VD):
        total: Tensor = _OneLoss.apply(*inputs, reduction, loss)
        return total
    losses_T, _, _ = _run_chunks(*inputs, None, loss, (False, False))
    return losses_T.sum() * _share(labels_T, reduction, loss, losses_T.dtype)


class _OneLoss(torch.autograd.Function):
    """Reductions "mean" and "sum". The gradients are made before their factor is known, and kept
    unscaled, so that half precision neither overflows nor vanishes under a loss scale."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        reduction: str,
        loss: Loss,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:2]
        losses_T, *grads = _run_chunks(hidden_TD, weight_VD, labels_T, None, loss, wanted)
        share = _share(labels_T, reduction, loss, losses_T.dtype)
        ctx.save_for_backward(share, *grads)
        ctx.dtype = hidden_TD.dtype
        return losses_T.sum() * share

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cross_entropy")
        share, *grads = ctx.saved_tensors
        factor_1 = (d_loss * share).view(1)
        return *(_scaled(grad, factor_1, ctx.dtype) for grad in grads), None, None, None


class _TokenLosses(torch.autograd.Function):
    """Reduction "none": the backward makes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, loss: Loss
    ) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T)
        ctx.loss = loss
        return _run_chunks(hidden_TD, weight_VD, labels_T, None, loss, (False, False))[0]

    @staticmethod
    def backward(ctx: Any, d_losses_T: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_cross_entropy")
        hidden_TD, weight_VD, labels_T = ctx.saved_tensors
        scale_T, wanted = d_losses_T.contiguous(), ctx.needs_input_grad[:2]
        _, d_hidden_TD, d_weight_VD = _run_chunks(
            hidden_TD, weight_VD, labels_T, scale_T, ctx.loss, wanted
        )
        if d_weight_VD is not None:
            d_weight_VD = d_weight_VD.to(weight_VD.dtype)
        return d_hidden_TD, d_weight_VD, None, None


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
    sums = math_dtype(hidden_TD)
    losses_T = hidden_TD.new_empty(num_tokens, dtype=sums)
    d_hidden_TD = torch.empty_like(hidden_TD) if wanted[0] else None
    d_weight_VD = torch.empty_like(weight_VD, dtype=sums) if wanted[1] else None
    size = min(num_tokens, chunk_tokens(vocabulary, loss.logits_dtype, hidden_TD.device.type))
    buffer_CV = hidden_TD.new_empty(size, vocabulary, dtype=loss.logits_dtype)
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


def _scaled(grad: Tensor | None, factor_1: Tensor, dtype: torch.dtype) -> Tensor | None:
    """grad times a factor, multiplied in the wider of their dtypes and rounded once."""
    if grad is None:
        return None
    return torch.mul(grad, factor_1, out=torch.empty_like(grad, dtype=dtype))


def _check(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, ignore_index: int) -> None:
    """Shapes; labels on a CPU only, since a GPU would have to be waited for."""
    is_shaped = hidden_TD.dim() == weight_VD.dim() == 2 and labels_T.dim() == 1
    if not is_shaped or (hidden_TD.shape[1], len(hidden_TD)) != (weight_VD.shape[1], len(labels_T)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (hidden_TD, weight_VD, labels_T))
        raise ValueError(
            f"linear_cross_entropy: hidden, weight and labels {shapes} are not [T, D], [V, D], [T]"
        )
    if labels_T.is_cuda:
        return
    is_unknown_T = (labels_T != ignore_index) & ((labels_T < 0) | (labels_T >= len(weight_VD)))
    if is_unknown_T.any():
        token = int(is_unknown_T.int().argmax())
        raise IndexError(
            f"linear_cross_entropy: label {int(labels_T[token])} of token {token} is outside the "
            f"vocabulary of {len(weight_VD)} and is not ignore_index ({ignore_index})"
        )
