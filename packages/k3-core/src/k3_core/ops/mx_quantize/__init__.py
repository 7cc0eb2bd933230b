"""mx_quantize: a weight to MXFP4 (E2M1 codes, E8M0 scales).

Source: architecture 2.2, OCP Microscaling formats. Two things are free in the format and fixed
here: the scale of a block is 2**(floor(log2(max |w|)) - 2), the floor rule of the OCP text, which
puts the largest value into [4, 8); codes are the nearest E2M1 values, ties to the even code,
and magnitudes above 6 saturate. A block of zeros takes the smallest scale (byte 0).
"""

from typing import Protocol

from torch import Tensor

from k3_core.quant import MXTensor


class MXQuantize(Protocol):
    """w [..., N] in any float dtype with N a multiple of 32 -> MXTensor of the same shape.

    Raises ValueError for other N (naming the shape), for a block size other than 32 and for
    values that are not finite or beyond 6 * 2**125. Decoding and quantising again changes nothing
    in blocks whose largest code is 4 or 6; in others the decoded values are the same.
    """

    def __call__(self, w: Tensor, *, block: int = 32) -> MXTensor: ...
