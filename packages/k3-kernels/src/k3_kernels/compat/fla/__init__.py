"""fla's module paths on K3's ops: `install()`, then `from fla.ops.kda import chunk_kda`.

fla is not needed. Names, arguments and formats are those of flash-linear-attention (fla-core
0.6.0 and the paths of its August 2026 sources); the code is K3's. What runs:

- a call whose inputs are raw (gate with a lower bound, L2 norm and sigmoid of beta all "in
  kernel") is the op of K3 and runs what the registry resolves for it, Triton included;
- every other call runs the chunk form in plain torch, on any device. So does the unbounded
  softplus gate, which K3's Triton kernels refuse, and `attnres` with gradients runs in plain torch.
"""

from k3_kernels.compat.fla.install import install

__all__ = ["install"]
