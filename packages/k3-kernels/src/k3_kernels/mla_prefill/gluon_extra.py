"""Instructions of a Hopper GPU that Gluon of triton 3.6 has no name for.

Not interpretable: import it only where it runs.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin


@builtin
def reduce_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """`tma.async_copy_shared_to_global` that adds to what is there."""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, src.handle)


@gluon.jit
def load_acquire(ptr):
    """A count that another program releases."""
    return gl.inline_asm_elementwise(
        """
        ld.acquire.gpu.global.b32 $0, [$1];
        fence.proxy.async;
        """,
        "=r,l",
        [ptr],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def finish_reads(value):
    """Return `value` once this warp's copies have read shared memory, which is then free."""
    return gl.inline_asm_elementwise(
        """
        cp.async.bulk.wait_group.read 0;
        bar.warp.sync 0xffffffff;
        mov.b32 $0, $1;
        """,
        "=r,r",
        [value],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def finish_and_release(ptr, value):
    """Once this warp's copies to global memory are done there, store a count."""
    return gl.inline_asm_elementwise(
        """
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        fence.proxy.async;
        st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, $2;
        """,
        "=r,l,r",
        [ptr, value],
        gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def narrow(x, dtype: gl.constexpr):
    """To 16 bits, two values a register; the compiler keeps them there."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=True, pack=2
        )
