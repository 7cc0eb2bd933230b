"""The whole text model written out from the specification, for every switch of the configuration.

Nothing of the package computes here: plain float64 loops over tokens, heads and experts on the
tensors of a state dict. Report 1.1, 2.1, 3.1 and 4; architecture 3.1 to 3.5 and 4.
"""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from k3_core.config import K3Config, TextConfig
from k3_core.model import K3ForConditionalGeneration, SequenceBatch

SWITCHES = {
    "as in the file": {},
    "silu": {"hidden_act": "silu"},
    "uncapped up branch": {"activation_situ_linear_beta": None},
    "beta missing": {"activation_situ_beta": None},
    "softplus gate": {"linear_attn_config": {"gate_lower_bound": None}},
    "another bound": {"linear_attn_config": {"gate_lower_bound": -1.5}},
    "low-rank gate": {"linear_attn_config": {"use_full_rank_gate": False}},
    "wider convolution": {"linear_attn_config": {"short_conv_kernel_size": 6}},
    "plain residual": {"attn_res_block_size": None},
    "one layer a block": {"attn_res_block_size": 1},
    "full attention residual": {"attn_res_type": "full"},
    "full-width experts": {"routed_expert_hidden_size": None},
    "no latent norm": {"latent_moe_use_norm": False},
    "expert groups": {"num_expert_group": 4, "topk_group": 2},
    "two dense layers": {"first_k_dense_replace": 2},
    "every second layer routed": {"moe_layer_freq": 2},
    "no renormalisation": {"moe_renormalize": False, "routed_scaling_factor": 2.5},
    "one shared expert": {"num_shared_experts": 1},
}
IDS = torch.tensor([17, 3, 250, 17, 99, 4, 4, 201, 60])
Weights = Callable[[str], Tensor]


@pytest.mark.parametrize("name", SWITCHES)
def test_logits_equal_the_formulas(golden, name):
    model, weight = model_of(golden, SWITCHES[name])
    config = model.config.text
    with torch.no_grad():
        actual = model(input_ids=IDS[None]).logits[0]
    mix = mix_of(config, weight, IDS)
    hidden = _rms(mix, weight("model.norm.weight"), config.rms_norm_eps)
    expected = hidden @ weight("lm_head.weight").T
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)
    assert expected.std() > 0.1


@pytest.mark.parametrize("is_shared", [False, True])
def test_mtp_logits_equal_the_formulas(golden, is_shared):
    """Architecture 4: position t reads the mix of t and token t + 1, which position 0 does not."""
    switches = {"num_nextn_predict_layers": 1, "mtp_share_embeddings": is_shared}
    model, weight = model_of(golden, switches)
    config, at = model.config.text, "model.layers.9"
    batch = SequenceBatch.from_lengths([len(IDS) - 1])
    with torch.no_grad():
        out = model.forward_packed(IDS[:-1], batch, output_logits=False)
        actual, _ = model.mtp_forward(IDS[1:], out.mix_TD, batch)

    def local(name: str) -> Tensor:
        return weight(f"{at}.{name}.weight")

    eps = config.rms_norm_eps
    table = weight("model.embed_tokens.weight") if is_shared else local("embed_tokens")
    embedding = table[IDS[1:]].clone()
    embedding[0] = 0
    previous = _rms(mix_of(config, weight, IDS[:-1]), local("hnorm"), eps)
    x = torch.cat((_rms(embedding, local("enorm"), eps), previous), dim=1) @ local("eh_proj").T
    h = _rms(x, local("input_layernorm"), eps)
    x = x + _mla(config, lambda name: weight(f"{at}.self_attn.{name}"), h)
    x = x + _moe(config, weight, at, _rms(x, local("post_attention_layernorm"), eps))
    head = weight("lm_head.weight") if is_shared else local("shared_head.head")
    expected = _rms(x, local("shared_head.norm"), eps) @ head.T
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)


def model_of(golden, changes: dict) -> tuple[K3ForConditionalGeneration, Weights]:
    """A float64 model with random values everywhere, and its tensors by their text-model names."""
    config = K3Config.from_file(golden("text_tiny"))
    changes = dict(changes)
    if linear := changes.pop("linear_attn_config", None):
        changes["linear_attn_config"] = dataclasses.replace(
            config.text.linear_attn_config, **linear
        )
    config = dataclasses.replace(config, text=dataclasses.replace(config.text, **changes))
    model = K3ForConditionalGeneration(config).double()
    model.bind_ops("cpu", "float64")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(draw * scale + ("norm" in key))
    state = model.state_dict()
    return model, lambda name: state[f"language_model.{name}"].detach()


def mix_of(config: TextConfig, weight: Weights, ids: Tensor) -> Tensor:
    """What enters the final norm [T, D], of one sequence."""
    embedding = weight("model.embed_tokens.weight")[ids]
    sources, running = [embedding], None  # finished blocks, sum of the running one
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"

        def local(name: str, at: str = at) -> Tensor:
            return weight(f"{at}.{name}.weight")

        h = _mix(config, sources, running, local, "self_attention_res")
        if _closes_block(config, layer) and running is not None:
            sources, running = [*sources, running], None
        x = _rms(h, local("input_layernorm"), config.rms_norm_eps)
        is_kda = layer + 1 in config.linear_attn_config.kda_layers
        attend = _kda if is_kda else _mla
        out = attend(config, lambda name, at=at: weight(f"{at}.self_attn.{name}"), x)
        sources, running = _write(config, sources, running, out)
        h = _mix(config, sources, running, local, "mlp_res")
        x = _rms(h, local("post_attention_layernorm"), config.rms_norm_eps)
        is_dense = layer < config.first_k_dense_replace or layer % config.moe_layer_freq
        out = _mlp(config, local, "mlp", x) if is_dense else _moe(config, weight, at, x)
        sources, running = _write(config, sources, running, out)

    def top(name: str) -> Tensor:
        return weight(f"model.{name}.weight")

    return _mix(config, sources, running, top, "output_attn_res")


def _closes_block(config: TextConfig, layer: int) -> bool:
    size = config.attn_res_block_size
    return size is not None and config.attn_res_type == "block" and layer % size == 0


def _write(config: TextConfig, sources: list, running: Tensor | None, out: Tensor) -> tuple:
    if config.attn_res_block_size is None:
        return [sources[0] + out], None
    if config.attn_res_type == "full":
        return [*sources, out], None
    return sources, out if running is None else running + out


def _mix(
    config: TextConfig, sources: list, running: Tensor | None, weight: Weights, site: str
) -> Tensor:
    values = sources if running is None else [*sources, running]
    if len(values) == 1:
        return values[0]
    norm, query = weight(f"{site}_norm"), weight(f"{site}_proj")[0]
    scores = torch.stack([_rms(v, norm, config.rms_norm_eps) @ query for v in values])
    shares = scores.exp() / scores.exp().sum(0)
    return (shares[..., None] * torch.stack(values)).sum(0)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / ((x**2).mean(-1, keepdim=True) + eps).sqrt()


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _kda(config: TextConfig, weight: Weights, x: Tensor) -> Tensor:
    kda = config.linear_attn_config
    heads, dim, length = kda.num_heads, kda.head_dim, len(x)
    q, k, v = (
        _convolved(x @ weight(f"{n}_proj.weight").T, weight(f"{n}_conv1d.weight")) for n in "qkv"
    )
    gate = x @ weight("f_a_proj.weight").T @ weight("f_b_proj.weight").T + weight("dt_bias")
    beta = _sigmoid(x @ weight("b_proj.weight").T)
    if kda.use_full_rank_gate:
        out_gate = x @ weight("g_proj.weight").T
    else:
        out_gate = x @ weight("g_a_proj.weight").T @ weight("g_b_proj.weight").T
    y = torch.zeros(length, heads * dim, dtype=torch.float64)
    for head in range(heads):
        part = slice(head * dim, (head + 1) * dim)
        rate = weight("A_log")[head].exp()
        state = torch.zeros(dim, dim, dtype=torch.float64)  # [key, value]
        for t in range(length):
            key, query = (z[t, part] / ((z[t, part] ** 2).sum() + 1e-6).sqrt() for z in (k, q))
            z = gate[t, part]
            if kda.gate_lower_bound is None:
                log_decay = -rate * (1 + z.exp()).log()
            else:
                log_decay = kda.gate_lower_bound * _sigmoid(rate * z)
            state = log_decay.exp()[:, None] * state
            error = v[t, part] - state.T @ key
            state = state + beta[t, head] * torch.outer(key, error)
            o = state.T @ query * dim**-0.5
            o = _rms(o, weight("o_norm.weight"), config.rms_norm_eps)
            y[t, part] = o * _sigmoid(out_gate[t, part])
    return y @ weight("o_proj.weight").T


def _convolved(x: Tensor, taps: Tensor) -> Tensor:
    width = taps.shape[-1]
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for j in range(width):
            if (source := t - (width - 1) + j) >= 0:
                y[t] += taps[:, 0, j] * x[source]
    return y * _sigmoid(y)


def _mla(config: TextConfig, weight: Weights, x: Tensor) -> Tensor:
    nope, rope, latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    eps, value = config.mla_norm_eps, config.v_head_dim
    q = _rms(x @ weight("q_a_proj.weight").T, weight("q_a_layernorm.weight"), eps)
    q = (q @ weight("q_b_proj.weight").T).view(len(x), -1, nope + rope)
    compressed = x @ weight("kv_a_proj_with_mqa.weight").T
    c = _rms(compressed[:, :latent], weight("kv_a_layernorm.weight"), eps)
    kv = (c @ weight("kv_b_proj.weight").T).view(len(x), -1, nope + value)
    y = torch.zeros(len(x), q.shape[1], value, dtype=torch.float64)
    for t in range(len(x)):
        for head in range(q.shape[1]):
            keys = torch.cat((kv[: t + 1, head, :nope], compressed[: t + 1, latent:]), dim=1)
            scores = (keys @ q[t, head] / math.sqrt(nope + rope)).exp()
            y[t, head] = scores / scores.sum() @ kv[: t + 1, head, nope:]
    return y.flatten(1) * _sigmoid(x @ weight("g_proj.weight").T) @ weight("o_proj.weight").T


def _activated(config: TextConfig, gate: Tensor, up: Tensor) -> Tensor:
    if config.hidden_act == "silu":
        return gate * _sigmoid(gate) * up
    beta, linear_beta = config.activation_situ_beta or 1.0, config.activation_situ_linear_beta
    capped = up if linear_beta is None else linear_beta * (up / linear_beta).tanh()
    return beta * (gate / beta).tanh() * _sigmoid(gate) * capped


def _mlp(config: TextConfig, weight: Weights, name: str, x: Tensor) -> Tensor:
    gate, up, down = (weight(f"{name}.{part}_proj") for part in ("gate", "up", "down"))
    return _activated(config, x @ gate.T, x @ up.T) @ down.T


def _moe(config: TextConfig, weight: Weights, at: str, x: Tensor) -> Tensor:
    def local(name: str) -> Tensor:
        return weight(f"{at}.block_sparse_moe.{name}.weight")

    bias = weight(f"{at}.block_sparse_moe.gate.e_score_correction_bias")
    has_latent = config.routed_expert_hidden_size is not None
    y = _mlp(config, local, "shared_experts", x)
    for t in range(len(x)):
        score = _sigmoid(local("gate") @ x[t])
        chosen = _chosen(config, (score + bias).tolist())
        share = score[chosen]
        if config.moe_renormalize:
            share = share / share.sum()
        share = share * config.routed_scaling_factor
        z = local("routed_expert_down_proj") @ x[t] if has_latent else x[t]
        total = torch.zeros_like(z)
        for weight_of, expert in zip(share, chosen, strict=True):
            w1, w2, w3 = (local(f"experts.{expert}.{n}") for n in ("w1", "w2", "w3"))
            total += weight_of * (w2 @ _activated(config, w1 @ z, w3 @ z))
        if has_latent and config.latent_moe_use_norm:
            total = _rms(total, local("routed_expert_norm"), config.rms_norm_eps)
        y[t] += local("routed_expert_up_proj") @ total if has_latent else total
    return y


def _chosen(config: TextConfig, biased: list[float]) -> list[int]:
    """Top-k of the experts in the best groups; a group counts by its best two."""
    groups, size = config.num_expert_group, len(biased) // config.num_expert_group
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    if groups > 1:
        members.sort(key=lambda group: -sum(sorted(biased[e] for e in group)[-2:]))
    eligible = [expert for group in members[: config.topk_group] for expert in group]
    return sorted(eligible, key=lambda e: -biased[e])[: config.num_experts_per_token]
