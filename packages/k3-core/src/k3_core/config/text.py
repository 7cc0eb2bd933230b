"""`text_config` of the released config.json (report 2, architecture 1 and 3.1).

Field names and 1-based layer lists are the released ones. Numbers the model uses after the
released fall-back rules are properties (`situ_beta`, `kda_layers_0`, ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError, bad_value
from .part import ConfigPart, ours, unwritten
from .quantization import check_quantization

DType = Literal["bfloat16", "float16", "float32"]
MXFP4_BLOCK = 32


def check_at_least(part: ConfigPart, minimum: int, *names: str) -> None:
    """Raise ConfigError for the first of the named integer fields below `minimum`."""
    for name in names:
        if (value := getattr(part, name)) is not None and value < minimum:
            raise bad_value(name, value, f"an integer of at least {minimum}")


@dataclass(frozen=True, kw_only=True)
class LinearAttnConfig(ConfigPart):
    """KDA section; layer numbers are 1-based. `gate_lower_bound` None is the softplus gate."""

    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float | None
    use_full_rank_gate: bool

    def validate(self) -> None:
        check_at_least(self, 1, "num_heads", "head_dim")
        check_at_least(self, 2, "short_conv_kernel_size")
        bound = self.gate_lower_bound
        if bound is not None and not -5.0 <= bound < 0.0:
            step = "The kernels need this range: clamp it to -5.0, or use null (softplus gate)."
            raise bad_value("gate_lower_bound", bound, "null or a number in [-5, 0)", step)


@dataclass(frozen=True, kw_only=True)
class TextConfig(ConfigPart):
    """The text model. Every switch that the released class accepts, nothing else."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: Literal["situ", "silu"]
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_nope: Literal[True]
    mla_use_output_gate: Literal[True]
    linear_attn_config: LinearAttnConfig
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    latent_moe_use_norm: bool
    model_type: Literal["kimi_linear"] = "kimi_linear"
    architectures: tuple[str, ...] | None = ("KimiLinearForCausalLM",)
    dtype: DType | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None
    rms_norm_eps: float = 1e-5
    routed_expert_hidden_size: int | None = None
    routed_scaling_factor: float = 1.0
    moe_renormalize: bool = True
    moe_router_activation_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    attn_res_block_size: int | None = None
    num_nextn_predict_layers: int = 0
    max_position_embeddings: int = 1048576
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: Literal[False] = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    quantization_config: Mapping[str, object] | None = None
    mla_norm_eps: float = ours(1e-6)
    attn_res_type: Literal["block", "full"] = ours("block")
    mtp_share_embeddings: bool = ours(False)
    a_log_length: int | None = unwritten(None)

    def validate(self) -> None:
        check_at_least(
            self, 1, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
            "qk_rope_head_dim", "v_head_dim", "num_experts", "num_experts_per_token",
            "num_shared_experts", "moe_intermediate_size", "routed_expert_hidden_size",
            "num_expert_group", "topk_group", "moe_layer_freq", "attn_res_block_size",
            "max_position_embeddings",
        )  # fmt: skip
        check_at_least(self, 0, "first_k_dense_replace", "num_nextn_predict_layers")
        self._check_numbers()
        self._check_layers()
        self._check_groups()
        self._check_quantization()

    def _check_numbers(self) -> None:
        for name in ("rms_norm_eps", "mla_norm_eps", "initializer_range", "routed_scaling_factor"):
            if not getattr(self, name) > 0:
                raise bad_value(name, getattr(self, name), "a number above 0")
        for name in ("activation_situ_beta", "activation_situ_linear_beta"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise bad_value(name, value, "null or a number of at least 0")
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            allowed = f"null or num_attention_heads = {self.num_attention_heads}"
            step = "Gated MLA has no grouped heads; remove the field."
            raise bad_value("num_key_value_heads", self.num_key_value_heads, allowed, step)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < self.vocab_size:
                raise bad_value(name, value, f"0 to vocab_size - 1 = {self.vocab_size - 1}")
        heads = self.linear_attn_config.num_heads
        if self.a_log_length is not None and self.a_log_length < heads:
            raise bad_value("a_log_length", self.a_log_length, f"null or at least {heads} heads")

    def _check_layers(self) -> None:
        kda = self.linear_attn_config.kda_layers
        mla = self.linear_attn_config.full_attn_layers
        if sorted((*kda, *mla)) != list(range(1, self.num_hidden_layers + 1)):
            odd = sorted(set(kda + mla) ^ set(range(1, self.num_hidden_layers + 1)))
            twice = sorted({one for one in kda + mla if (kda + mla).count(one) > 1})
            raise ConfigError(
                "linear_attn_config.kda_layers and full_attn_layers",
                f"must hold each of 1..{self.num_hidden_layers} once; "
                f"missing or out of range: {odd}, listed twice: {twice}",
                "Correct the two lists (they are 1-based) or num_hidden_layers.",
            )

    def _check_groups(self) -> None:
        groups, kept, experts = self.num_expert_group, self.topk_group, self.num_experts
        if groups > 1 and not self.use_grouped_topk:
            raise bad_value("use_grouped_topk", False, f"true with num_expert_group = {groups}")
        if experts % groups or (groups > 1 and experts // groups < 2):
            allowed = f"a divisor of num_experts = {experts} that leaves 2 or more in each group"
            raise bad_value("num_expert_group", groups, allowed)
        if kept > groups:
            raise bad_value("topk_group", kept, f"1 to num_expert_group = {groups}")
        limit = experts // groups * kept
        if self.num_experts_per_token > limit:
            raise bad_value("num_experts_per_token", self.num_experts_per_token, f"1 to {limit}")

    def _check_quantization(self) -> None:
        if self.quantization_config is None:
            return
        check_quantization(self.quantization_config)
        widths = {
            "routed_expert_hidden_size": self.expert_hidden_size,
            "moe_intermediate_size": self.moe_intermediate_size,
        }
        for name, width in widths.items():
            if width % MXFP4_BLOCK:
                step = "Choose such a width or remove quantization_config."
                raise bad_value(name, width, "a multiple of 32 for MXFP4 experts", step)

    @property
    def situ_beta(self) -> float:
        """Cap of the gate branch; a missing or zero `activation_situ_beta` means 1.0."""
        return self.activation_situ_beta or 1.0

    @property
    def situ_linear_beta(self) -> float | None:
        """Cap of the up branch; None leaves it uncapped."""
        return self.activation_situ_linear_beta

    @property
    def is_latent_moe(self) -> bool:
        """Whether routed experts work in a latent width of their own."""
        return self.routed_expert_hidden_size is not None

    @property
    def expert_hidden_size(self) -> int:
        """Input and output width of a routed expert."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the one MLP that stands for all shared experts."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def kda_layers_0(self) -> tuple[int, ...]:
        """0-based indices of the KDA layers."""
        return tuple(sorted(one - 1 for one in self.linear_attn_config.kda_layers))

    def is_kda_layer(self, index: int) -> bool:
        """Whether the 0-based layer is KDA; MTP layers (index >= num_hidden_layers) are not."""
        return index + 1 in self.linear_attn_config.kda_layers

    def is_moe_layer(self, index: int) -> bool:
        """Whether the 0-based layer has routed experts; MTP layers always do."""
        if index >= self.num_hidden_layers:
            return True
        return index >= self.first_k_dense_replace and index % self.moe_layer_freq == 0
