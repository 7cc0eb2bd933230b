"""KDA without chunks: the layer of k3-core with one op exchanged.

A layer of another design would be an `nn.Module` with the same constructor, `forward(x_TD, batch)`
and `cache_spec()`: see `k3_core.attention.base.Attention`.
"""

from k3_core.attention.kda import KimiDeltaAttention
from k3_core.ops import OP_NAMES, OpSet
from k3_core.ops.kda_chunk.reference import kda_chunk as token_by_token


class RecurrentKDA(KimiDeltaAttention):
    """Kimi Delta Attention that runs the recurrence token by token, whatever the device."""

    @property
    def ops(self) -> OpSet:
        """The ops that the layer calls; a model sets them again when it moves."""
        return self._ops

    @ops.setter
    def ops(self, ops: OpSet) -> None:
        functions = {name: getattr(ops, name) for name in OP_NAMES}
        self._ops = OpSet({**functions, "kda_chunk": token_by_token}, ops.resolutions)
