"""Documents in pieces of a limited length, cut between pictures and never through one.

D stretches of a token file before, P pieces after.
"""

import numpy as np

from k3_train.data.image_store import ImageStore, Integers


def cut(
    starts_D: Integers, stops_D: Integers, length: int, images: ImageStore
) -> tuple[Integers, Integers, Integers]:
    """(starts [P], stops [P], stretch of each [P]) of pieces of at most `length` tokens, in order.

    A piece is as long as may be: it ends at `length`, at the end of its stretch, or before the
    picture that does not fit. No picture may be longer than `length`.
    """
    found = []
    of_P, at_P = np.arange(len(starts_D)), starts_D
    while True:
        stops_P = images.before(np.minimum(at_P + length, stops_D[of_P]))
        found.append((at_P, stops_P, of_P))
        is_left_P = stops_P < stops_D[of_P]
        if not is_left_P.any():
            break
        of_P, at_P = of_P[is_left_P], stops_P[is_left_P]
    pieces_P, ends_P, parents_P = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    order_P = np.argsort(parents_P, kind="stable")
    return pieces_P[order_P], ends_P[order_P], parents_P[order_P]
