"""Cases of mla_prefill, mla_decode and gated_mla_decode (report 2).

T queries, S keys, H heads, D head dim, V value dim, B sequences, C latent, R shared key,
P pages, L tokens a page, M pages a sequence.
"""

from functools import partial
from typing import Any

import torch

from k3_core.testing.cases import Case
from k3_core.testing.values import Call, Values

VARLEN = frozenset({"varlen"})


def _prefill(
    v: Values, queries: tuple[int, ...], keys: tuple[int, ...], return_max: bool = False
) -> Call:
    heads, dim, value_dim = 2, 24, 16
    args = (
        v.act(sum(queries), heads, dim),
        v.act(sum(keys), heads, dim),
        v.act(sum(keys), heads, value_dim),
    )
    named: dict[str, Any] = {
        "scale": dim**-0.5,
        "cu_seqlens_q": v.offsets(queries),
        "cu_seqlens_k": v.offsets(keys),
        "seqlens_q": queries,
        "seqlens_k": keys,
    }
    return Call(args, {**named, "return_max": True} if return_max else named)


def _decode(v: Values, lengths: tuple[int, ...]) -> Call:
    heads, latent, shared, page, per_row = 2, 32, 8, 4, 3
    rows = len(lengths)
    table = v.distinct(rows * per_row + 2, 1, rows * per_row).view(rows, per_row)
    args = (
        v.act(rows, heads, latent),
        v.act(rows, heads, shared),
        v.act(rows * per_row + 2, page, latent + shared),
        table,
        torch.tensor(lengths, device=v.device),
    )
    return Call(args, {"scale": (latent + shared) ** -0.5})


def _gated(v: Values, lengths: tuple[int, ...], dims: tuple[int, ...] = (2, 24, 12, 8, 16)) -> Call:
    """dims: heads, rank of the queries, nope, shared, value dim."""
    heads, rank, nope, shared, value = dims
    latent, page, per_row, rows = 32, 4, 3, len(lengths)
    table = v.distinct(rows * per_row + 2, 1, rows * per_row).view(rows, per_row)
    args = (
        v.act(rows, rank),
        v.act(rows, latent + shared),
        v.act(rows, heads, value),
        v.act(rank, scale=0.3),
        v.act(heads, nope + shared, rank, scale=rank**-0.5),
        v.act(latent, scale=0.3),
        v.act(heads, nope + value, latent, scale=latent**-0.5),
    )
    named: dict[str, Any] = {
        "pages_PLX": v.act(rows * per_row + 2, page, latent + shared),
        "page_table_BM": table,
        "lengths_B": torch.tensor(lengths, device=v.device),
        "scale": (nope + shared) ** -0.5,
        "eps": 1e-5,
    }
    return Call(args, named, mutated=("pages_PLX",))


CASES = [
    Case("mla_prefill", "one-sequence", partial(_prefill, queries=(19,), keys=(19,))),
    Case(
        "mla_prefill",
        "varlen-with-past",
        partial(_prefill, queries=(3, 1, 8), keys=(7, 5, 8)),
        VARLEN,
    ),
    Case(
        "mla_prefill",
        "maxima",
        partial(_prefill, queries=(6, 5), keys=(6, 9), return_max=True),
        VARLEN | {"return_max"},
    ),
    Case("mla_decode", "pages", partial(_decode, lengths=(1, 12, 6)), frozenset({"paged"})),
    Case("mla_decode", "empty-row", partial(_decode, lengths=(0, 5)), frozenset({"paged"})),
    Case("gated_mla_decode", "pages", partial(_gated, lengths=(1, 12, 6)), frozenset({"paged"})),
    Case(
        "gated_mla_decode",
        "widths-of-two",
        partial(_gated, lengths=(5, 9), dims=(3, 48, 32, 16, 16)),
        frozenset({"paged"}),
    ),
]
