"""The block and the ViT against formulas written out in numpy float64, and against timm's ViT with the same weights."""
import math

import numpy as np
import pytest
import torch

from init import init_skipless_vit
from model import SIZES, Attention, Block, ViT, resize_pos_embed, shortcut_weights

erf = np.vectorize(math.erf)


def np_norm(x, layer):
    """LayerNorm with biased variance and eps 1e-6."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-6) * layer.weight.detach().numpy() + layer.bias.detach().numpy()


def np_linear(x, layer):
    return x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()


def np_attention(x, attn, temperature):
    """One image (N, D), head by head, from the definition."""
    d, out = attn.head_dim, []
    q, k, v = np.split(np_linear(x, attn.qkv), 3, axis=-1)
    for h in range(attn.num_heads):
        cols = slice(h * d, (h + 1) * d)
        logits = temperature * q[:, cols] @ k[:, cols].T / np.sqrt(d)
        A = np.exp(logits - logits.max(-1, keepdims=True))
        out.append(A / A.sum(-1, keepdims=True) @ v[:, cols])
    return np_linear(np.concatenate(out, -1), attn.proj)


def np_mlp(x, mlp):
    h = np_linear(x, mlp.fc1)
    return np_linear(h * 0.5 * (1 + erf(h / math.sqrt(2))), mlp.fc2)


def randomised(module, seed=0):
    """float64, every parameter drawn anew: an initial bias of 0 or gain of 1 would hide a missing term."""
    g = torch.Generator().manual_seed(seed)
    module = module.double()
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.3
    return module.eval()


@pytest.mark.parametrize("alphas", [(1.0, 1.0), (0.0, 0.0), (0.7, 0.3), (1.0, 0.0)])
@pytest.mark.parametrize("temperature", [1.0, 1.1 ** -5])
def test_block_equals_its_formula(alphas, temperature):
    block = randomised(Block(12, 3, alphas=alphas, temperature=temperature))
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    for image, got in zip(x.numpy(), block(x).detach().numpy()):
        y = alphas[0] * image + np_attention(np_norm(image, block.norm1), block.attn, temperature)
        y = alphas[1] * y + np_mlp(np_norm(y, block.norm2), block.mlp)
        np.testing.assert_allclose(got, y, rtol=0, atol=1e-12)


def test_attention_matrix_is_the_one_that_is_applied():
    attn = randomised(Attention(12, 3, temperature=0.8))
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    A = attn.matrix(x)
    _, _, v = attn.heads(x)
    torch.testing.assert_close(attn.proj((A @ v).transpose(1, 2).flatten(2)), attn(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(A.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))


def test_shortcut_weights_by_hand():
    assert shortcut_weights("residual", 2) == [1, 1, 1, 1]
    assert shortcut_weights("skipless", 2) == [0, 0, 0, 0]
    assert shortcut_weights("decayed", 2, 0.4) == pytest.approx([1, 0.8, 0.6, 0.4])           # over 2L sub-layers, first exactly 1
    assert math.prod(shortcut_weights("decayed", 12, 0.6)) == pytest.approx(3.6e-3, rel=0.02)  # alpha_eff of paper 3's ViT-B
    for bad in (dict(shortcut="none"), dict(shortcut="decayed", alpha_min=1.5), dict(shortcut="skipless", alpha_min=0.5)):
        with pytest.raises(ValueError):
            shortcut_weights(depth=2, **bad)


def test_decayed_with_alpha_min_1_is_residual():
    x = torch.randn(2, 3, 8, 8)
    nets = [ViT(8, 4, 3, 5, 24, 2, 2, shortcut=s) for s in ("residual", "decayed")]
    nets[1].load_state_dict(nets[0].state_dict())
    assert torch.equal(nets[0](x), nets[1](x))


def test_skipless_output_forgets_the_input_when_a_branch_is_silent():
    """With a = 0 nothing but the branch may pass: silence the last MLP and every image looks the same. With a = 1 it must not."""
    x = torch.randn(4, 3, 8, 8)
    for shortcut, same in (("skipless", True), ("residual", False)):
        net = ViT(8, 4, 3, 5, 24, 2, 2, shortcut=shortcut)
        net.blocks[-1].mlp.fc2.weight.data.zero_()
        y = net(x)
        assert torch.allclose(y, y[:1].expand_as(y), atol=1e-7) == same


@pytest.mark.parametrize("name, count", [("tiny", 5_717_416), ("small", 22_050_664), ("base", 86_567_656), ("large", 304_326_632)])
def test_parameter_counts_are_timms(name, count):
    with torch.device("meta"):
        assert sum(p.numel() for p in ViT(**SIZES[name]).parameters()) == count


@pytest.mark.parametrize("pool, timm_pool", [("token", "token"), ("mean", "avg")])
def test_equals_timm_with_the_same_weights(pool, timm_pool):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    ours = ViT(pool=pool, **SIZES["small"]).eval()
    theirs = timm.create_model("vit_small_patch16_224", global_pool=timm_pool).eval()
    for p in ours.parameters():
        p.data += 0.02 * torch.randn_like(p)                      # biases and gains away from 0 and 1
    theirs.load_state_dict(ours.state_dict())                     # strict: the same names and shapes ...
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert (ours(x) - theirs(x)).abs().max() < 1e-5
        back = ViT(pool=pool, **SIZES["small"]).eval()
        back.load_state_dict(theirs.state_dict())                 # ... and back
        assert torch.equal(back(x), ours(x))


def test_position_embedding_interpolates_as_timms():
    layers = pytest.importorskip("timm.layers")
    pos = torch.randn(1, 1 + 14 * 14, 6)
    theirs = layers.resample_abs_pos_embed(pos, new_size=[6, 9], old_size=[14, 14], num_prefix_tokens=1)
    torch.testing.assert_close(resize_pos_embed(pos, (14, 14), (6, 9)), theirs, rtol=0, atol=1e-6)
    assert resize_pos_embed(pos, (14, 14), (14, 14)) is pos


def test_other_image_sizes_run_and_a_linear_ramp_stays_one():
    net = ViT(32, 4, 3, 5, 24, 2, 2)
    assert net(torch.randn(2, 3, 48, 16)).shape == (2, 5)
    rows = torch.arange(8.0)[:, None].expand(8, 8).reshape(1, 64, 1)
    wide = resize_pos_embed(torch.cat([torch.zeros(1, 1, 1), rows], 1), (8, 8), (16, 16))[0, 1:, 0].view(16, 16)
    assert torch.allclose(wide[4:-4, 0].diff(), torch.tensor(0.5), atol=1e-4)      # position rises along rows, half as steep
    assert torch.allclose(wide, wide[:, :1].expand_as(wide), atol=1e-4)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="not divisible by patch size 16"):
        ViT(img_size=100)
    with pytest.raises(ValueError, match="not divisible by patch size 4"):
        ViT(8, 4, 3, 5, 24, 2, 2)(torch.randn(1, 3, 10, 8))
    with pytest.raises(ValueError, match="num_heads"):
        ViT(8, 4, 3, 5, 25, 2, 2)
    with pytest.raises(ValueError, match="pool"):
        ViT(pool="max")


def test_drop_path_needs_a_shortcut():
    for shortcut, alpha_min in (("skipless", 1.0), ("decayed", 0.0)):
        with pytest.raises(ValueError, match="drop path"):
            ViT(8, 4, 3, 5, 24, 3, 2, shortcut=shortcut, alpha_min=alpha_min, drop_path=0.1)
    with pytest.raises(ValueError, match="drop path"):
        ViT(8, 4, 3, 5, 24, 1, 2, shortcut="skipless", drop_path=0.1)              # its only block would have rate 0: still refused
    for rate in (-0.1, 1.0):
        with pytest.raises(ValueError, match="drop path"):
            ViT(8, 4, 3, 5, 24, 2, 2, drop_path=rate)
    ViT(8, 4, 3, 5, 24, 3, 2, shortcut="decayed", alpha_min=0.5, drop_path=0.1)


def test_drop_path_drops_whole_samples_keeps_the_mean_and_is_off_in_eval():
    torch.manual_seed(0)
    block = Block(8, 2, drop_path=0.5)
    x, f = torch.zeros(4000, 1, 8), torch.ones(4000, 1, 8)
    y = block.train().join(1.0, x, f)
    per_sample = y.flatten(1)
    assert torch.equal(per_sample, per_sample[:, :1].expand_as(per_sample))        # all or nothing
    assert set(per_sample[:, 0].tolist()) == {0.0, 2.0}
    assert abs(y.mean() - 1) < 0.1
    assert torch.equal(block.eval().join(1.0, x, f), f)


def test_mean_pooling_ignores_the_class_token_at_the_last_block():
    net = randomised(ViT(8, 4, 3, 5, 24, 1, 2, pool="mean"))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    tokens = net.blocks(net.embed(x))[:, 1:].mean(1)
    torch.testing.assert_close(net(x), net.head(net.fc_norm(tokens)))
    assert ViT(8, 4, 3, 5, 24, 1, 2, pool="avg").pool == "mean"                    # timm's name


def test_gradients_reach_every_parameter_of_a_skipless_net():
    torch.manual_seed(0)
    net = ViT(28, 7, 1, 10, **SIZES["nano"], shortcut="skipless")
    init_skipless_vit(net, 1.8, 1.0, 3.0)
    net(torch.randn(4, 1, 28, 28)).square().sum().backward()
    for name, p in net.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        assert p.grad.abs().max() > 0, name
