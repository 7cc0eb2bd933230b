"""Cases of kda_chunk, kda_step, kda_decode, kda_replay, kda_segment and short_conv (report 1).

T tokens, N sequences, H heads, K and V head dims, B rows, W tokens a row or taps, C channels.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from k3_core.testing.cases import Case
from k3_core.testing.values import Call, Values

VARLEN = frozenset({"varlen"})
STATES = frozenset({"state_in", "state_out"})
UNBOUNDED = frozenset({"unbounded_gate"})


def _inputs(
    v: Values,
    lead: tuple[int, ...],
    heads: int,
    dims: tuple[int, int],
    gate_scale: float = 1.0,
    gate_shift: float = 0.0,
) -> tuple[Tensor, ...]:
    """q, k, v, gate, beta with leading sizes `lead`, then A_log and dt_bias."""
    num_k, num_v = dims
    return (
        v.act(*lead, heads, num_k),
        v.act(*lead, heads, num_k),
        v.act(*lead, heads, num_v),
        v.act(*lead, heads, num_k, scale=gate_scale) + gate_shift,
        v.act(*lead, heads),
        v.full(heads, scale=0.3),
        v.full(heads, num_k, scale=0.5),
    )


def _chunk(
    v: Values,
    lengths: tuple[int, ...],
    dims: tuple[int, int] = (16, 16),
    lower_bound: float | None = -5.0,
    has_state: bool = False,
    gate_scale: float = 1.0,
    gate_shift: float = 0.0,
    is_key_repeated: bool = False,
    group: int = 1,
    checkpoints: tuple[tuple[int, ...], ...] | None = None,
) -> Call:
    heads, tokens = 2 * group, sum(lengths)
    inputs = list(_inputs(v, (tokens,), heads, dims, gate_scale, gate_shift))
    inputs[:2] = [x[:, :2].contiguous() for x in inputs[:2]]
    if is_key_repeated:
        inputs[1] = inputs[1][:1].expand_as(inputs[1]).clone()
    named: dict[str, Any] = {"lower_bound": lower_bound, "cu_seqlens_N1": v.offsets(lengths)}
    named["seqlens"] = lengths
    if has_state:
        named["initial_state_NHVK"] = v.full(len(lengths), heads, dims[1], dims[0])
        named["output_final_state"] = True
    if checkpoints is None:
        return Call(tuple(inputs), named)
    shape = (sum(map(len, checkpoints)), heads, dims[1], dims[0])
    named["checkpoint_offsets"] = checkpoints
    named["checkpoints_EHVK"] = torch.zeros(shape, dtype=v.math_dtype, device=v.device)
    return Call(tuple(inputs), named, mutated=("checkpoints_EHVK",))


def _step(v: Values, tokens: int, commits: tuple[int, ...] | None, slots: tuple[int, ...]) -> Call:
    inputs = _inputs(v, (len(slots), tokens), 2, (16, 16))
    named: dict[str, Any] = {
        "state_SHVK": v.full(4, 2, 16, 16),
        "slots_B": torch.tensor(slots, device=v.device),
        "lower_bound": -5.0,
    }
    if commits is not None:
        named["num_commit_B"] = torch.tensor(commits, device=v.device)
    return Call(inputs, named, mutated=("state_SHVK",))


def _verify(v: Values, tokens: int, slots: tuple[int, ...]) -> Call:
    call = _step(v, tokens, None, slots)
    writes = torch.zeros_like(call.args[2], dtype=v.math_dtype)
    return Call(
        call.args, {**call.kwargs, "writes_BWHV": writes}, mutated=("state_SHVK", "writes_BWHV")
    )


def _decode(v: Values, tokens: int, slots: tuple[int, ...], has_records: bool = False) -> Call:
    lead, heads, dim, taps = (len(slots), tokens), 2, 16, 4
    channels = 3 * heads * dim
    q, _, _, gate, beta, A_log, dt_bias = _inputs(v, lead, heads, (dim, dim))
    args = (v.act(*lead, channels), v.full(channels, 1, taps), gate, beta, A_log, dt_bias)
    named: dict[str, Any] = {
        "state_SHVK": v.full(4, heads, dim, dim),
        "window_SCR": v.act(4, channels, taps - 1),
        "slots_B": torch.tensor(slots, device=v.device),
        "lower_bound": -5.0,
        "eps": 1e-5,
    }
    mutated: tuple[str, ...] = ("state_SHVK", "window_SCR")
    if has_records:
        keys, writes = torch.zeros_like(q), torch.zeros_like(q, dtype=v.math_dtype)
        named |= {"keys_BWHK": keys, "writes_BWHV": writes}
        mutated = (*mutated, "keys_BWHK", "writes_BWHV")
    return Call((*args, v.act(*lead, heads, dim), v.full(dim, shift=1.0)), named, mutated=mutated)


def _replay(v: Values, accepted: tuple[int, ...], slots: tuple[int, ...], has_conv: bool) -> Call:
    lead, heads, num_k, num_v, channels = (len(slots), 3), 2, 16, 8, 10
    _, k, _, gate, _, A_log, dt_bias = _inputs(v, lead, heads, (num_k, num_v))
    named: dict[str, Any] = {
        "state_SHVK": v.full(4, heads, num_v, num_k),
        "slots_B": torch.tensor(slots, device=v.device),
        "num_accepted_B": torch.tensor(accepted, device=v.device),
        "lower_bound": -5.0,
    }
    if has_conv:
        named |= {"x_BWC": v.act(*lead, channels), "window_SCR": v.act(4, channels, 3)}
    mutated = ("state_SHVK", "window_SCR") if has_conv else ("state_SHVK",)
    writes = v.full(*lead, heads, num_v)
    return Call((k, gate, writes, A_log, dt_bias), named, mutated=mutated)


def _segment(v: Values, lengths: tuple[int, ...], gate_shift: float = 0.0) -> Call:
    inputs = _inputs(v, (sum(lengths),), 2, (16, 8), gate_shift=gate_shift)[1:]
    named = {"cu_seqlens_N1": v.offsets(lengths), "seqlens": lengths}
    return Call(inputs, {"lower_bound": -5.0, **named})


def _conv(v: Values, lengths: tuple[int, ...], has_state: bool) -> Call:
    channels, width = 6, 4
    args = (v.act(sum(lengths), channels), v.full(channels, 1, width))
    named: dict[str, Any] = {"cu_seqlens_N1": v.offsets(lengths), "seqlens": lengths}
    if has_state:
        named["initial_state_NCW"] = v.act(len(lengths), channels, width - 1)
        named["output_final_state"] = True
    return Call(args, named)


CASES = [
    Case("kda_chunk", "one-sequence", partial(_chunk, lengths=(37,))),
    Case(
        "kda_chunk",
        "varlen-state",
        partial(_chunk, lengths=(5, 1, 0, 67), has_state=True),
        VARLEN | STATES,
    ),
    Case(
        "kda_chunk",
        "unbounded-gate",
        partial(_chunk, lengths=(33,), lower_bound=None),
        UNBOUNDED,
    ),
    Case("kda_chunk", "wide-keys", partial(_chunk, lengths=(40,), dims=(32, 8), gate_shift=-2.0)),
    Case("kda_chunk", "gate-extremes", partial(_chunk, lengths=(70,), gate_scale=8.0)),
    Case("kda_chunk", "repeated-key", partial(_chunk, lengths=(48,), is_key_repeated=True)),
    Case(
        "kda_chunk",
        "grouped-heads",
        partial(_chunk, lengths=(40, 9), group=3, has_state=True),
        frozenset({"grouped_heads"}),
    ),
    Case(
        "kda_chunk",
        "checkpoints",
        partial(_chunk, lengths=(70, 0, 33), checkpoints=((1, 40, 70), (), (32,)), has_state=True),
        frozenset({"checkpoints"}),
    ),
    Case("kda_step", "decode", partial(_step, tokens=1, commits=None, slots=(2, 0, 3))),
    Case(
        "kda_step",
        "padded-rows",
        partial(_step, tokens=1, commits=None, slots=(2, -1, 0)),
        frozenset({"padded_rows"}),
    ),
    Case(
        "kda_step",
        "verify",
        partial(_step, tokens=3, commits=(0, 3, 2), slots=(1, 3, 0)),
        frozenset({"multi_token", "num_commit"}),
    ),
    Case(
        "kda_step",
        "records",
        partial(_verify, tokens=3, slots=(1, 3, -1)),
        frozenset({"multi_token", "padded_rows", "records"}),
    ),
    Case("kda_decode", "one-token", partial(_decode, tokens=1, slots=(2, 0, 3))),
    Case(
        "kda_decode",
        "padded-rows",
        partial(_decode, tokens=1, slots=(2, -1, 0)),
        frozenset({"padded_rows"}),
    ),
    Case(
        "kda_decode",
        "tokens",
        partial(_decode, tokens=5, slots=(1, 3)),
        frozenset({"multi_token"}),
    ),
    Case(
        "kda_decode",
        "records",
        partial(_decode, tokens=2, slots=(1, 3, 0), has_records=True),
        frozenset({"multi_token", "records"}),
    ),
    Case(
        "kda_replay",
        "accepted",
        partial(_replay, accepted=(3, 0, 2), slots=(1, 3, 0), has_conv=False),
    ),
    Case(
        "kda_replay",
        "windows-padded-rows",
        partial(_replay, accepted=(1, 3, 3), slots=(2, -1, 0), has_conv=True),
        frozenset({"padded_rows", "conv_window"}),
    ),
    # Gates that remember: without them the map of a stretch is 1e-17, and says nothing.
    Case("kda_segment", "one-stretch", partial(_segment, lengths=(35,), gate_shift=-4.0)),
    Case("kda_segment", "varlen", partial(_segment, lengths=(7, 0, 20)), VARLEN),
    Case("short_conv", "one-sequence", partial(_conv, lengths=(11,), has_state=False)),
    Case(
        "short_conv",
        "short-sequences-state",
        partial(_conv, lengths=(1, 0, 2, 9), has_state=True),
        VARLEN | STATES,
    ),
]
