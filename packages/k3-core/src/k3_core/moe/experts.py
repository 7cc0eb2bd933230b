"""ExpertBank: the routed experts as three stacks, saved under the released per-expert names.

A stack is a parameter [E, out, in] or, packed, an `MXTensor` (MXFP4, architecture 2.2). The
state dict always speaks of `E.w1.weight` or of `E.w1.weight_packed` and `E.w1.weight_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from k3_core.ops.moe_experts.weights import ExpertStack
from k3_core.quant import MXTensor

NAMES = ("w1", "w3", "w2")


class ExpertBank(nn.Module):
    """w1 (gate) and w3 (up) [E, I, D], w2 (down) [E, D, I]."""

    def __init__(
        self,
        num_experts: int,
        width: int,
        expert_width: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        shapes = {
            "w1": (num_experts, expert_width, width),
            "w3": (num_experts, expert_width, width),
            "w2": (num_experts, width, expert_width),
        }
        for name in NAMES:
            weight = torch.empty(shapes[name], device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(weight))

    @property
    def is_packed(self) -> bool:
        """Whether the stacks are MXFP4."""
        return getattr(self, "w1", None) is None

    def stack(self, name: str) -> ExpertStack:
        """One of w1, w3, w2 as the op takes it."""
        plain = self._parameters.get(name)
        if plain is not None:
            return plain
        return MXTensor(getattr(self, f"{name}_packed"), getattr(self, f"{name}_scale"))

    def stacks(self) -> tuple[ExpertStack, ExpertStack, ExpertStack]:
        """w1, w3 and w2 as the op takes them."""
        return self.stack("w1"), self.stack("w3"), self.stack("w2")

    def set_packed(self, stacks: Mapping[str, MXTensor]) -> None:
        """Replace the stacks by packed ones, which take no gradients."""
        for name in NAMES:
            self.register_parameter(name, None)
            self.register_buffer(f"{name}_packed", stacks[name].packed)
            self.register_buffer(f"{name}_scale", stacks[name].scale)

    def pack(self, quantize: Any) -> None:
        """Quantise to MXFP4 with the op `mx_quantize`; nothing happens when already packed."""
        if not self.is_packed:
            self.set_packed({name: quantize(getattr(self, name).detach()) for name in NAMES})

    def dequantize(self, dtype: torch.dtype) -> None:
        """Turn packed stacks into exactly decoded parameters of `dtype`."""
        if not self.is_packed:
            return
        stacks = ((name, self.stack(name)) for name in NAMES)
        weights = {n: stack.dequantize(dtype) for n, stack in stacks if isinstance(stack, MXTensor)}
        for name in NAMES:
            delattr(self, f"{name}_packed")
            delattr(self, f"{name}_scale")
            self.register_parameter(name, nn.Parameter(weights[name]))

    def _leaves(self) -> Iterator[tuple[str, Tensor]]:
        for expert in range(self.num_experts):
            for name in NAMES:
                if self.is_packed:
                    yield f"{expert}.{name}.weight_packed", getattr(self, f"{name}_packed")[expert]
                    yield f"{expert}.{name}.weight_scale", getattr(self, f"{name}_scale")[expert]
                else:
                    yield f"{expert}.{name}.weight", getattr(self, name)[expert]

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name, view in self._leaves():
            destination[prefix + name] = view if keep_vars else view.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected = {prefix + name: view for name, view in self._leaves()}
        for key, view in expected.items():
            if key not in state_dict:
                missing_keys.append(key)
            elif state_dict[key].shape != view.shape:
                error_msgs.append(
                    f"size mismatch for {key}: {tuple(state_dict[key].shape)} in the checkpoint, "
                    f"{tuple(view.shape)} in the model"
                )
            else:
                with torch.no_grad():
                    view.copy_(state_dict[key])
        unexpected_keys.extend(
            key for key in state_dict if key.startswith(prefix) and key not in expected
        )
