"""Cases of linear, rms_norm, gated_rms_norm, attn_res and situ_glu (report 1.4, 3, 4.1)."""

from functools import partial

from k3_core.testing.cases import Case
from k3_core.testing.values import Call, Values


def _plain_norm(v: Values, shape: tuple[int, ...]) -> Call:
    return Call((v.act(*shape), v.act(shape[-1], scale=0.2) + 1.0), {"eps": 1e-6})


def _norm(v: Values, tokens: int, heads: int, dim: int) -> Call:
    shape = (tokens, heads, dim)
    return Call((v.act(*shape), v.full(dim, scale=0.2, shift=1.0), v.act(*shape)), {"eps": 1e-6})


def _mix(v: Values, tokens: int, width: int, num_sources: int) -> Call:
    values = [v.act(tokens, width, scale=1.0 + source) for source in range(num_sources)]
    weights = v.act(width, scale=0.2) + 1.0, v.act(1, width)
    return Call((values, *weights), {"eps": 1e-6})


def _read(v: Values, tokens: int, width: int, num_sources: int, has_added: bool) -> Call:
    values, norm, proj = _mix(v, tokens, width, num_sources).args
    added = v.act(tokens, width) if has_added else None
    out_norm = v.act(width, scale=0.2) + 1.0
    args = (values[:-1], values[-1], added, norm, proj, out_norm)
    return Call(args, {"eps": 1e-6, "out_eps": 1e-5})


def _glu(v: Values, shape: tuple[int, ...], linear_beta: float | None, scale: float) -> Call:
    inputs = v.act(*shape, scale=scale), v.act(*shape, scale=scale)
    return Call(inputs, {"beta": 4.0, "linear_beta": linear_beta})


def _product(v: Values, shape: tuple[int, ...], num_out: int, has_added: bool) -> Call:
    width = shape[-1]
    options = {"add_to": v.act(*shape[:-1], num_out)} if has_added else {}
    return Call((v.act(*shape), v.act(num_out, width, scale=width**-0.5)), options)


CASES = [
    Case("linear", "one-row", partial(_product, shape=(1, 48), num_out=33, has_added=False)),
    Case("linear", "rows", partial(_product, shape=(11, 17), num_out=24, has_added=False)),
    Case("linear", "batches", partial(_product, shape=(2, 3, 16), num_out=5, has_added=False)),
    Case("linear", "sum", partial(_product, shape=(5, 32), num_out=19, has_added=True)),
    Case("linear", "no-tokens", partial(_product, shape=(0, 16), num_out=8, has_added=False)),
    Case("rms_norm", "rows", partial(_plain_norm, shape=(9, 48))),
    Case("rms_norm", "odd-width", partial(_plain_norm, shape=(2, 3, 17))),
    Case("rms_norm", "no-tokens", partial(_plain_norm, shape=(0, 16))),
    Case("gated_rms_norm", "rows", partial(_norm, tokens=9, heads=3, dim=32)),
    Case("gated_rms_norm", "odd-width", partial(_norm, tokens=4, heads=1, dim=17)),
    Case("gated_rms_norm", "no-tokens", partial(_norm, tokens=0, heads=2, dim=16)),
    Case("attn_res", "one-source", partial(_mix, tokens=5, width=24, num_sources=1)),
    Case("attn_res", "nine-sources", partial(_mix, tokens=7, width=33, num_sources=9)),
    Case("depth_read", "sum", partial(_read, tokens=7, width=33, num_sources=9, has_added=True)),
    Case("depth_read", "one", partial(_read, tokens=5, width=16, num_sources=1, has_added=True)),
    Case("depth_read", "mix", partial(_read, tokens=3, width=48, num_sources=4, has_added=False)),
    Case("situ_glu", "matrix", partial(_glu, shape=(13, 40), linear_beta=25.0, scale=2.0)),
    Case("situ_glu", "saturated", partial(_glu, shape=(6, 16), linear_beta=25.0, scale=40.0)),
    Case("situ_glu", "up-uncapped", partial(_glu, shape=(2, 3, 7), linear_beta=None, scale=2.0)),
    Case("situ_glu", "no-tokens", partial(_glu, shape=(0, 8), linear_beta=25.0, scale=1.0)),
]
