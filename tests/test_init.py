"""Initialisations have the products and spectra of their formulas; forecasts agree with real nets."""
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn as nn

import init
from model import MLP, SIZES, ViT


def singular_values(product):
    return torch.linalg.svdvals(product.double())


# -------------------------------------------------------------------------------------------------------
# queries and keys

@pytest.mark.parametrize("dist", ["normal", "uniform"])
def test_each_head_is_the_best_low_rank_approximation_of_its_own_matrix(dist):
    """Independent truth: draw the same Z again, and let numpy's SVD truncate alpha Z + beta I."""
    D, heads, alpha, beta = 48, 3, 1.8, 1.0
    w_q, w_k = torch.empty(D, D, dtype=torch.float64), torch.empty(D, D, dtype=torch.float64)
    torch.manual_seed(5)
    init.mimetic_qk_(w_q, w_k, heads, alpha, beta, dist)
    torch.manual_seed(5)
    for h in range(heads):
        if dist == "normal":
            Z = torch.randn(D, D, dtype=torch.float64).numpy() / D ** 0.5
        else:
            Z = (torch.rand(D, D, dtype=torch.float64).numpy() * 2 - 1) * (3 / D) ** 0.5
        U, S, Vh = np.linalg.svd(alpha * Z + beta * np.eye(D))
        rows = slice(h * 16, (h + 1) * 16)
        product = w_q[rows].T @ w_k[rows]                          # the paper's W^Q (W^K)^T of this head
        np.testing.assert_allclose(product.numpy(), (U[:, :16] * S[:16]) @ Vh[:16], atol=1e-10)
        np.testing.assert_allclose(singular_values(product)[:16], S[:16], rtol=1e-10)
        for w in (w_q[rows], w_k[rows]):                           # sqrt(S) on each side
            np.testing.assert_allclose((w @ w.T).numpy(), np.diag(S[:16]), atol=1e-10)


def test_noise_has_variance_one_over_width():
    for dist in ("normal", "uniform"):
        Z = init._noise(400, dist)
        assert Z.var().item() * 400 == pytest.approx(1, rel=0.02) and abs(Z.mean().item()) < 1e-3
    assert init._noise(400, "uniform").abs().max() <= math.sqrt(3 / 400)
    with pytest.raises(ValueError, match="dist"):
        init._noise(4, "laplace")


def test_identity_only_gives_a_projector_and_noise_only_the_quarter_circle():
    D, d = 256, 64
    w_q, w_k = torch.empty(D, D), torch.empty(D, D)
    init.mimetic_qk_(w_q, w_k, D // d, alpha=0.0, beta=0.7)
    s = singular_values(w_q[:d].T @ w_k[:d])
    assert s[:d].sub(0.7).abs().max() < 1e-6 and s[d:].max() < 1e-6
    init.mimetic_qk_(w_q, w_k, D // d, alpha=2.0, beta=0.0)
    s = singular_values(w_q[:d].T @ w_k[:d])[:d]
    assert s[0].item() == pytest.approx(4.0, rel=0.05)             # the edge, alpha times 2
    # the smallest one kept is its upper quartile: solve (x sqrt(4 - x^2) + 4 asin(x / 2)) / (2 pi) = 3/4
    x = np.linspace(0, 2, 100001)
    quartile = x[np.searchsorted((x * np.sqrt(4 - x ** 2) + 4 * np.arcsin(x / 2)) / (2 * np.pi), 0.75)]
    assert s[-1].item() == pytest.approx(2 * quartile, rel=0.05)


def gaussian_logits(w_q, w_k, tokens, scale):
    x = nn.functional.layer_norm(torch.randn(tokens, w_q.shape[1]), (w_q.shape[1],))
    return (x @ w_q.T) @ (x @ w_k.T).T * scale


@pytest.mark.parametrize("D, alpha, beta, own, off, diagonal", [
    (768, 2.0, 0.6, 14.1, 3.7, 0.77), (384, 1.8, 1.0, 18.7, 3.4, 0.986)])
def test_attention_diagonal_as_measured_from_the_authors_code(D, alpha, beta, own, off, diagonal):
    """197 Gaussian tokens, a head of ViT-B and of ViT-S: self-logit, std of the others, mean A_ii."""
    torch.manual_seed(0)
    w_q, w_k = torch.empty(64, D), torch.empty(64, D)
    init.mimetic_qk_(w_q, w_k, 1, alpha, beta)
    logits = torch.stack([gaussian_logits(w_q, w_k, 197, 64 ** -0.5) for _ in range(8)])
    others = logits[:, ~torch.eye(197, dtype=torch.bool)]
    assert logits.diagonal(dim1=1, dim2=2).mean().item() == pytest.approx(own, rel=0.08)
    assert others.std().item() == pytest.approx(off, rel=0.08)
    assert logits.softmax(-1).diagonal(dim1=1, dim2=2).mean().item() == pytest.approx(diagonal, abs=0.04)


def test_default_attention_is_uniform():
    net = ViT(224, 16, **SIZES["small"])
    A = net.blocks[0].attn.matrix(nn.functional.layer_norm(torch.randn(2, 197, 384), (384,)))
    assert A.diagonal(dim1=-2, dim2=-1).mean().item() == pytest.approx(1 / 197, rel=0.1)


# -------------------------------------------------------------------------------------------------------
# values and output, MLP

@pytest.mark.parametrize("D", [96, 384])
def test_the_full_value_output_product_is_scaled_orthogonal(D):
    """The full D x D product in float32: a test of each head would pass on a near singular product."""
    w_v, w_o = torch.empty(D, D), torch.empty(D, D)
    init.orthogonal_vo_(w_v, w_o, 3.0)
    s = singular_values(w_v.T @ w_o.T)
    assert s[0] / s[-1] < 1.001
    assert s.sub(9).abs().max() < 1e-3                              # c^2, not c
    for w in (w_v, w_o):
        assert singular_values(w).sub(3).abs().max() < 1e-4
    assert w_v.std().item() == pytest.approx(3 / math.sqrt(D), rel=0.01)
    assert (w_v @ w_o - 9 * torch.eye(D)).norm() > D ** 0.5        # and it is not the identity


@pytest.mark.parametrize("out, in_", [(1536, 384), (384, 1536), (384, 384), (384, 96), (96, 384)])
def test_suo_keeps_the_mean_square(out, in_):
    """(|Wx|^2 / out) / (|x|^2 / in) is 1: exactly where the layer widens, else in expectation."""
    torch.manual_seed(0)
    w = torch.empty(out, in_)
    init.suo_(w)
    x = torch.randn(4000, in_)
    gain = (x @ w.T).square().mean(1) / x.square().mean(1)
    assert gain.mean().item() == pytest.approx(1, abs=0.01)
    if out >= in_:
        assert gain.sub(1).abs().max() < 1e-4
    assert singular_values(w).sub(max(math.sqrt(out / in_), 1)).abs().max() < 1e-5
    init.suo_(w, gain=0.5)
    assert singular_values(w).sub(0.5 * max(math.sqrt(out / in_), 1)).abs().max() < 1e-5


def relu_squared(x):
    return nn.functional.relu(x).square()


@pytest.mark.parametrize("f", [nn.functional.gelu, relu_squared], ids=["gelu", "relu^2"])
@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
def test_the_activations_mean_and_its_cancellation(f, scale):
    z = torch.randn(2_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean = init.gaussian_mean(f, scale)
    assert mean == pytest.approx(f(scale * z).mean().item(), rel=5e-3, abs=3e-3)
    assert init.gaussian_mean(f, torch.full((2, 3), scale)) == pytest.approx(mean)
    mlp = MLP(96, 384, act=f)
    nn.init.zeros_(mlp.fc1.bias)
    init.suo_(mlp.fc1.weight, scale)
    init.suo_(mlp.fc2.weight)
    x = torch.randn(20000, 96)
    means = []
    for fraction in (0.0, 0.5, 1.0):
        init.cancel_mean_(mlp, fraction)
        means.append(mlp(x).mean(0).norm().item())
    assert means[1] == pytest.approx(means[0] / 2, rel=0.1)
    assert means[2] < 0.05 * means[0] + 0.05                       # the noise of 20,000 samples


def test_the_closed_form_of_gelu_is_the_quadrature():
    """`lambda` hides from gaussian_mean which function it is."""
    for scale in (0.3, 1.0, 2.0):
        by_quadrature = init.gaussian_mean(lambda x: nn.functional.gelu(x), scale)
        assert init.gaussian_mean(nn.functional.gelu, scale) == pytest.approx(by_quadrature, abs=1e-6)


# -------------------------------------------------------------------------------------------------------
# whole models

def test_default_init_is_timms():
    torch.manual_seed(0)
    net = ViT(28, 7, 1, 10, **SIZES["nano"])
    truncated = 0.02                                               # timm cuts at +-2, that is at 100 std
    for name, p in net.named_parameters():
        if name.endswith("norm.weight") or "norm1.weight" in name or "norm2.weight" in name:
            assert torch.equal(p, torch.ones_like(p)), name
        elif name == "patch_embed.proj.weight":
            assert p.std().item() == pytest.approx((1 / 49 / 3) ** 0.5, rel=0.05)
        elif p.ndim > 1 and p.numel() > 900:
            assert p.std().item() == pytest.approx(truncated, rel=0.1), name
        elif name.endswith("bias") and not name.startswith("patch_embed"):
            assert not p.any(), name


def test_skipless_init_changes_the_blocks_only_and_is_a_function_of_the_seed():
    nets = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        net = ViT(28, 7, 1, 10, **SIZES["nano"], shortcut="skipless")
        before = {k: v.clone() for k, v in net.state_dict().items()}
        init.init_skipless_vit(net, 1.8, 1.0, 3.0)
        for key, value in net.state_dict().items():
            matrices = ("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight")
            touched = key.startswith("blocks.") and key.endswith(matrices)
            assert torch.equal(value, before[key]) != touched, key
        nets.append(net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(nets[0].values(), nets[1].values()))
    assert not torch.equal(nets[0]["blocks.0.attn.qkv.weight"], nets[2]["blocks.0.attn.qkv.weight"])
    assert not torch.equal(nets[0]["blocks.0.attn.qkv.weight"], nets[0]["blocks.1.attn.qkv.weight"])


def test_parts_leave_the_rest_alone():
    torch.manual_seed(0)
    net = ViT(28, 7, 1, 10, **SIZES["nano"], shortcut="skipless")
    before = net.blocks[0].attn.qkv.weight.clone()
    init.init_skipless_vit(net, 1.8, 1.0, 3.0, parts=("vo",))
    w = net.blocks[0].attn.qkv.weight
    assert torch.equal(w[:192], before[:192]) and not torch.equal(w[192:], before[192:])
    assert net.blocks[0].mlp.fc1.weight.std() < 0.03


def test_published_constants():
    assert init.PAPER_CONSTANTS["base"] == dict(alpha=2.0, beta=0.6, c=3.0)
    assert init.PAPER_CONSTANTS["small"] == dict(alpha=1.8, beta=1.0, c=3.0)
    assert set(init.PAPER_CONSTANTS) == set(SIZES)


# -------------------------------------------------------------------------------------------------------
# the forecast and the choice of constants

def test_token_cosine_by_hand():
    x = torch.tensor([[[1.0, 0], [0, 2.0], [3.0, 3.0]]])
    assert init.token_cosine(x).item() == pytest.approx((0 + 2 * math.sqrt(0.5)) / 3)


def real_net(size, tokens, constants, depth, seed=0):
    """Mean attention diagonal and token cosine of each block of a real net on Gaussian tokens."""
    torch.manual_seed(seed)
    net = ViT(3, 1, 3, 0, **dict(SIZES[size], depth=depth), shortcut="skipless")
    init.init_skipless_vit(net, **constants)
    x, diagonal, cosine = torch.randn(4, tokens, SIZES[size]["embed_dim"]), [], []
    with torch.no_grad():
        for block in net.blocks:
            diagonal.append(block.attn.matrix(block.norm1(x)).diagonal(dim1=-2, dim2=-1).mean().item())
            x = block(x)
            cosine.append(init.token_cosine(x).item())
    return np.array(diagonal), np.array(cosine)


@pytest.mark.parametrize("alpha, beta, cancel", [
    (1, 2, 0), (1, 2, 0.5), (1, 2, 1), (1.8, 1, 0), (2, 0.6, 0)])
@pytest.mark.parametrize("size, tokens", [("nano", 17), ("nano", 65)])
def test_forecast_predicts_real_nets(size, tokens, alpha, beta, cancel):
    kind, constants = SIZES[size], dict(alpha=alpha, beta=beta, c=3.0, cancel_mean=cancel)
    statistics = init.qk_statistics(alpha, beta, kind["embed_dim"], kind["num_heads"])
    diagonal, cosine = (np.array(v) for v in init.forecast(*statistics, tokens, 4, cancel))
    runs = [real_net(size, tokens, constants, 4, seed) for seed in range(3)]
    assert np.abs(np.mean([d for d, _ in runs], 0) - diagonal).max() < 0.15
    assert np.abs(np.mean([c for _, c in runs], 0) - cosine).max() < 0.12


@pytest.mark.parametrize("f", [nn.functional.gelu, relu_squared], ids=["gelu", "relu^2"])
def test_mlp_map_against_sampling(f):
    z = torch.randn(2, 1_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for c, cancel, scale in ((0.0, 0.0, 1.0), (0.5, 0.0, 1.0), (0.5, 0.6, 1.0), (0.3, 1.0, 0.5)):
        shift = cancel * init.gaussian_mean(f, scale)
        a = f(scale * z[0]) - shift
        b = f(scale * (c * z[0] + math.sqrt(1 - c * c) * z[1])) - shift
        truth = ((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()).item()
        assert init.mlp_map(c, cancel, scale, f) == pytest.approx(truth, abs=5e-3)
    assert init.mlp_map(1.0, 0.3, activation=f) == pytest.approx(1.0)
    assert init.mlp_map(0.0) == pytest.approx(0.187, abs=0.002)     # the .19 a layer of GELU


def test_the_rule_follows_the_activation():
    """Another function than the default's: other constants, and the forecast still meets the target."""
    for f in (nn.functional.gelu, relu_squared):
        chosen = init.choose_constants(96, 3, 17, 24, activation=f)
        statistics = init.qk_statistics(chosen["alpha"], chosen["beta"], 96, 3)
        _, cosines = init.forecast(*statistics, 17, 24, chosen["cancel_mean"], activation=f)
        assert cosines[-1] <= 0.95 + 1e-6
    assert chosen != init.choose_constants(96, 3, 17, 24)


@pytest.mark.parametrize("size", list(SIZES)[:4])
def test_auto_constants_hit_their_targets_at_every_size(size):
    """The diagonal is met; the last cosine is met from below, or needs no cancelling."""
    dim, heads = SIZES[size]["embed_dim"], SIZES[size]["num_heads"]
    for tokens, depth in itertools.product((16, 65, 197) if size == "nano" else (16, 197), (6, 48)):
        chosen = init.choose_constants(dim, heads, tokens, depth)
        statistics = init.qk_statistics(chosen["alpha"], chosen["beta"], dim, heads)
        diagonal, cosine = init.forecast(*statistics, tokens, depth, chosen["cancel_mean"])
        assert diagonal[0] == pytest.approx(0.95, abs=0.01)
        assert cosine[-1] <= 0.95 + 1e-6
        assert chosen["cancel_mean"] == 0 or cosine[-1] > 0.9      # no more than needed
        assert chosen["beta"] >= 1.99 * chosen["alpha"]


@pytest.mark.parametrize("depth", [6, 12, 24, 48])
def test_auto_keeps_tokens_apart_in_a_real_net_until_its_upper_end(depth):
    """At width 96 a real net keeps half of its depth uncollapsed, where the paper's constants do not."""
    chosen = init.choose_constants(96, 3, 17, depth)
    runs = [real_net("nano", 17, chosen, depth, seed) for seed in range(2)]
    diagonal, cosine = (np.mean(v, 0) for v in zip(*runs))
    assert diagonal[0] == pytest.approx(0.95, abs=0.04)
    assert cosine[depth // 2] < 0.75
    if depth >= 24:
        _, printed = real_net("nano", 17, init.PAPER_CONSTANTS["base"], depth)
        assert printed[depth // 2] > 0.99


def test_the_rule_knows_the_attention_temperature():
    """Logits of block l are times beta ** -l: forecast and real net agree, and the rule cancels more."""
    constants, beta = dict(alpha=0.48, beta=0.96, c=3.0, cancel_mean=0.9), 1.2
    torch.manual_seed(0)
    net = ViT(3, 1, 3, 0, 192, 6, 6, shortcut="skipless", temperature_beta=beta)
    init.init_skipless_vit(net, **constants)
    x, diagonal = torch.randn(4, 10, 192), []
    with torch.no_grad():
        for block in net.blocks:
            diagonal.append(block.attn.matrix(block.norm1(x)).diagonal(dim1=-2, dim2=-1).mean().item())
            x = block(x)
    forecast, _ = init.forecast(*init.qk_statistics(0.48, 0.96, 192, 6), 10, 6, 0.9, beta)
    assert np.abs(np.array(diagonal) - forecast).max() < 0.12 and forecast[5] < forecast[0] - 0.2
    hot, usual = (init.choose_constants(96, 3, 17, 6, temperature_beta=b) for b in (1.1, 1.0))
    assert hot["cancel_mean"] > usual["cancel_mean"] + 0.05


def test_half_precision_models_can_be_initialised():
    net = ViT(8, 4, 3, 5, 24, 2, 2, shortcut="skipless").bfloat16()
    init.init_skipless_vit(net, 1.0, 2.0, 3.0, cancel_mean=0.5)
    assert singular_values(net.blocks[0].mlp.fc1.weight).sub(2).abs().max() < 0.02


def test_bisect_by_hand():
    assert init.bisect(lambda x: x >= 0.3, 0, 1) == pytest.approx(0.3)
    assert init.bisect(lambda x: True, 0, 1) == 0 and init.bisect(lambda x: False, 0, 1) == 1
    with pytest.raises(ValueError, match="diagonal"):
        init.choose_constants(16, 8, 197, 4, diagonal=0.9999)
