"""The block and the ViT against formulas in numpy float64, and against timm's with the same weights."""
import math

import numpy as np
import pytest
import torch
import torch.nn as nn

from init import init_skipless_vit
from model import (SHORTCUTS, SIZES, Attention, Block, ViT, effective_alpha, learnable, linear_decay,
                   pair_up, resize_pos_embed, shortcut_weights)

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
    """float64, every parameter drawn anew: a bias of 0 or a gain of 1 would hide a missing term."""
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
    torch.testing.assert_close(attn.merge_heads(A @ v), attn(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(A.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))


def test_shortcut_weights_by_hand():
    assert shortcut_weights("residual", 2) == [(1, 1), (1, 1)]
    assert shortcut_weights("skipless", 2) == [(0, 0), (0, 0)]
    flat = [a for pair in shortcut_weights("decayed", 2, 0.4) for a in pair]
    assert flat == linear_decay(4, 0.4) == pytest.approx([1, 0.8, 0.6, 0.4])           # first exactly 1
    assert pair_up(flat) == shortcut_weights("decayed", 2, 0.4)
    for bad in (dict(shortcut="none"), dict(shortcut="decayed", alpha_min=1.5)):
        with pytest.raises(ValueError):
            shortcut_weights(depth=2, **bad)


def test_alpha_eff_is_the_product_of_the_shortcuts_weights():
    assert effective_alpha(shortcut_weights("decayed", 12, 0.6)) == pytest.approx(3.6e-3, rel=0.02)
    assert effective_alpha([((0.5, 3.0), 0.5), [1.0, [0.5, 0.1]]]) == 0.125            # g does not count
    assert effective_alpha(learnable([(0.5, 0.5)])) == 0.25
    assert type(effective_alpha(shortcut_weights("skipless", 2))) is float


def test_alphas_may_be_any_list():
    """A branch's weight, a kind of its own, and a wrong number of pairs."""
    shape = dict(img_size=8, patch_size=4, num_classes=5, embed_dim=24, depth=2, num_heads=2)
    x = torch.randn(2, 3, 8, 8)
    weighted, plain = ViT(**shape, alphas=[((1.0, 0.0), 1.0)] * 2), ViT(**shape)
    weighted.load_state_dict(plain.state_dict())
    for block in plain.blocks:
        block.attn.proj.weight.data.zero_()                      # g = 0 is a silent attention
    assert torch.equal(weighted(x), plain(x)) and weighted.alpha_eff == 1
    with pytest.raises(ValueError, match="1 pairs for 2 blocks"):
        ViT(**shape, alphas=[(1.0, 1.0)])


def test_a_new_kind_is_one_entry(monkeypatch):
    """ReZero, x + g f(x), g learned from 0: the identity at first; every g has a gradient and a name."""
    def rezero(depth, alpha_min):
        return [[(1.0, nn.Parameter(torch.zeros(()))) for _ in range(2)] for _ in range(depth)]

    monkeypatch.setitem(SHORTCUTS, "rezero", rezero)
    net = ViT(8, 4, 3, 5, 24, 2, 2, shortcut="rezero", drop_path=0.1)
    first, *_, last = net.layers(torch.randn(2, 3, 8, 8))
    assert torch.equal(first, last) and net.alpha_eff == 1
    net(torch.randn(2, 3, 8, 8)).square().sum().backward()
    names = [f"blocks.{l}.gains.{i}" for l in range(2) for i in range(2)]
    assert [n for n in net.state_dict() if "gains" in n] == names
    assert all(net.get_parameter(n).grad.abs() > 0 for n in names)


def test_learned_weights_are_in_the_state_and_a_parameter_at_0_is_no_fixed_0():
    net = ViT(8, 4, 3, 5, 24, 1, 2, alphas=learnable([(1.0, 0.0)]))
    assert [n for n in net.state_dict() if "alphas" in n] == ["blocks.0.alphas.0", "blocks.0.alphas.1"]
    net(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert all(p.grad.abs() > 0 for p in net.blocks[0].alphas)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    block = randomised(Block(12, 3, alphas=(nn.Parameter(torch.tensor(0.3)), 0.5)))
    assert [n for n, _ in block.named_parameters() if "alphas" in n] == ["alphas.0"]
    fixed = randomised(Block(12, 3, alphas=(block.alphas[0].item(), 0.5)))
    fixed.load_state_dict({k: v for k, v in block.state_dict().items() if "alphas" not in k})
    assert torch.equal(block(x), fixed(x))


def test_decayed_with_alpha_min_1_is_residual():
    x = torch.randn(2, 3, 8, 8)
    nets = [ViT(8, 4, 3, 5, 24, 2, 2, shortcut=s) for s in ("residual", "decayed")]
    nets[1].load_state_dict(nets[0].state_dict())
    assert torch.equal(nets[0](x), nets[1](x))


def test_skipless_output_forgets_the_input_when_a_branch_is_silent():
    """With a = 0 only the branch passes: silence the last MLP and all images look the same."""
    x = torch.randn(4, 3, 8, 8)
    for shortcut, same in (("skipless", True), ("residual", False)):
        net = ViT(8, 4, 3, 5, 24, 2, 2, shortcut=shortcut)
        net.blocks[-1].mlp.fc2.weight.data.zero_()
        y = net(x)
        assert torch.allclose(y, y[:1].expand_as(y), atol=1e-7) == same


@pytest.mark.parametrize("name, count", [
    ("tiny", 5_717_416), ("small", 22_050_664), ("base", 86_567_656), ("large", 304_326_632)])
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
    wide = resize_pos_embed(torch.cat([torch.zeros(1, 1, 1), rows], 1), (8, 8), (16, 16))
    wide = wide[0, 1:, 0].view(16, 16)
    assert torch.allclose(wide[4:-4, 0].diff(), torch.tensor(0.5), atol=1e-4)      # half as steep
    assert torch.allclose(wide, wide[:, :1].expand_as(wide), atol=1e-4)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="not divisible by patch size 16"):
        ViT(img_size=100)
    with pytest.raises(ValueError, match="not divisible by patch size 4"):
        ViT(8, 4, 3, 5, 24, 2, 2)(torch.randn(1, 3, 10, 8))
    with pytest.raises(ValueError, match="num_heads"):
        ViT(8, 4, 3, 5, 25, 2, 2)


def test_drop_path_needs_a_shortcut():
    for shortcut, alpha_min in (("skipless", 1.0), ("decayed", 0.0)):
        with pytest.raises(ValueError, match="drop path"):
            ViT(8, 4, 3, 5, 24, 3, 2, shortcut=shortcut, alpha_min=alpha_min, drop_path=0.1)
    with pytest.raises(ValueError, match="drop path"):          # even where the only block has rate 0
        ViT(8, 4, 3, 5, 24, 1, 2, shortcut="skipless", drop_path=0.1)
    ViT(8, 4, 3, 5, 24, 3, 2, shortcut="decayed", alpha_min=0.5, drop_path=0.1)


def test_drop_path_drops_whole_samples_keeps_the_mean_and_is_off_in_eval():
    torch.manual_seed(0)
    block = Block(8, 2, drop_path=0.5)
    x, f = torch.zeros(4000, 1, 8), torch.ones(4000, 1, 8)
    y = block.train().join(0, x, f)
    per_sample = y.flatten(1)
    assert torch.equal(per_sample, per_sample[:, :1].expand_as(per_sample))        # all or nothing
    assert set(per_sample[:, 0].tolist()) == {0.0, 2.0}
    assert abs(y.mean() - 1) < 0.1
    assert torch.equal(block.eval().join(0, x, f), f)


def test_mean_pooling_ignores_the_class_token_at_the_last_block():
    net = randomised(ViT(8, 4, 3, 5, 24, 1, 2, pool="mean"))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    tokens = net.blocks(net.embed(x))[:, 1:].mean(1)
    torch.testing.assert_close(net(x), net.head(net.fc_norm(tokens)))


def test_gradients_reach_every_parameter_of_a_skipless_net():
    torch.manual_seed(0)
    net = ViT(28, 7, 1, 10, **SIZES["nano"], shortcut="skipless")
    init_skipless_vit(net, 1.8, 1.0, 3.0)
    net(torch.randn(4, 1, 28, 28)).square().sum().backward()
    for name, p in net.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        assert p.grad.abs().max() > 0, name
