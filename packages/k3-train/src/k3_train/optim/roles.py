"""Which rule updates which parameter, by the released tensor names (report 5, training 3.4).

Per-Head Muon: KDA q/k/v and MLA q up-projections by head, MLA kv up-projections by head with the
K rows and the V rows of a head apart. Whole-matrix Muon: every other matrix; a stack of experts
[E, out, in] is E matrices. AdamW: everything that is not a matrix of a linear map between hidden
vectors. The report names only Q, K and V and says "following K2" for the rest. Our own choice:
the router weight, the patch embedding and the position grid go to AdamW; convolution taps decay,
pseudo-queries do not; the three matrices of the fused vision wqkv are apart, but not its heads.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from k3_core.config import TextConfig

Rule = Literal["muon", "adamw", "frozen"]

_ADAMW_DECAYED = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "shared_head.head": "head",
    "gate": "router",
    "q_conv1d": "conv",
    "k_conv1d": "conv",
    "v_conv1d": "conv",
    "patch_embed.proj": "patch",
    "patch_embed.pos_emb": "patch",
}
_BARE = {"A_log": "vector", "dt_bias": "vector", "e_score_correction_bias": "balance_bias"}


@dataclass(frozen=True)
class Role:
    """How one parameter is updated.

    blocks and rows describe the matrices of a Muon parameter: `blocks` equal groups of rows
    (heads, experts), each cut into pieces of `rows` rows that are orthogonalised alone.
    """

    name: str
    rule: Rule
    is_decayed: bool
    blocks: int = 1
    rows: tuple[int, ...] = ()

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Views [blocks, rows_i, in] of a tensor of this role's shape, one per piece."""
        return list(tensor.view(self.blocks, sum(self.rows), tensor.shape[-1]).split(self.rows, 1))

    def whole_matrix(self) -> "Role":
        """The role with each stored matrix in one piece; experts stay a stack of matrices."""
        if self.name == "expert" or not self.rows:
            return self
        return replace(self, blocks=1, rows=(self.blocks * sum(self.rows),))


def assign_roles(
    shapes: Iterable[tuple[str, tuple[int, ...]]], text: TextConfig
) -> dict[str, Role]:
    """The role of every parameter; `shapes` are (name, shape) pairs of the whole model.

    Raises ValueError for a shape that no rule covers.
    """
    shapes = list(shapes)
    kda = {name.removesuffix("A_log") for name, _ in shapes if name.endswith(".A_log")}
    return {name: _role(name, shape, kda, text) for name, shape in shapes}


def _role(name: str, shape: tuple[int, ...], kda: set[str], text: TextConfig) -> Role:
    path, _, leaf = name.rpartition(".")
    if leaf in _BARE:
        role = _BARE[leaf]
        return Role(role, "frozen" if role == "balance_bias" else "adamw", False)
    for suffix, role in _ADAMW_DECAYED.items():
        if path == suffix or path.endswith("." + suffix):
            return Role(role, "adamw", True)
    if len(shape) == 1:
        return Role("vector", "adamw", False)
    if path.endswith("res_proj"):
        return Role("pseudo_query", "adamw", False)
    if len(shape) == 3 and ".experts" in name:
        return Role("expert", "muon", True, shape[0], (shape[1],))
    if len(shape) == 2:
        return _matrix_role(path, shape, kda, text)
    raise ValueError(
        f"no optimizer role for {name} of shape {list(shape)}: matrices, vectors, expert stacks "
        "and the named tensors of the released model are covered; add it to k3_train.optim.roles"
    )


def _matrix_role(path: str, shape: tuple[int, ...], kda: set[str], text: TextConfig) -> Role:
    parent, _, leaf = path.rpartition(".")
    if f"{parent}." in kda and leaf in ("q_proj", "k_proj", "v_proj"):
        heads = text.linear_attn_config.num_heads
        return Role("kda_qkv", "muon", True, heads, (shape[0] // heads,))
    if parent.endswith("self_attn") and f"{parent}." not in kda:
        heads = text.num_attention_heads
        if leaf in ("q_b_proj", "q_proj"):
            return Role("mla_q", "muon", True, heads, (shape[0] // heads,))
        if leaf == "kv_b_proj":
            return Role("mla_kv", "muon", True, heads, (text.qk_nope_head_dim, text.v_head_dim))
    if leaf == "wqkv":
        return Role("vision_qkv", "muon", True, 3, (shape[0] // 3,))
    return Role("matrix", "muon", True, 1, (shape[0],))
