"""kda_segment on the token-by-token recurrence (report 1.7)."""

from functools import partial

from k3_core.custom_op import custom_op
from k3_core.ops.kda_chunk.reference import kda_chunk
from k3_core.ops.kda_segment import KdaSegment
from k3_core.ops.kda_segment.augment import segment_by_chunk

kda_segment: KdaSegment = custom_op("kda_segment.reference")(partial(segment_by_chunk, kda_chunk))
