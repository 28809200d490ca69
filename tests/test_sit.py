"""SiT and UViT: published sizes, the maths a second time, long skips, the start, the null label."""
import math

import pytest
import torch
import torch.nn.functional as F

import model as models
from model import SIT_SIZES, UVIT_SIZES, SiT, UViT

SMALL = dict(input_size=8, patch_size=2, in_chans=3, num_classes=5, embed_dim=32, depth=4, num_heads=2)
KINDS = [SiT, UViT]


def build(kind, **options):
    """A small net in float64 whose zeros are filled, so that every part matters."""
    torch.manual_seed(0)
    net = kind(**{**SMALL, **options}).double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net


def batch(n=3, chans=3, size=8):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, chans, size, size, generator=g, dtype=torch.float64)
    return x, torch.rand(n, generator=g, dtype=torch.float64), torch.randint(0, 5, (n,), generator=g)


def float_batch(n=3):
    x, t, y = batch(n)
    return x.float(), t.float(), y


# -------------------------------------------------------------------------------------------------------
# sizes

@pytest.mark.parametrize("size, millions", [("S", 33), ("B", 130), ("L", 458), ("XL", 675)])
def test_published_sizes(size, millions):
    """DiT's and SiT's table, latents of 32 x 32 x 4, patch 2. Built without memory."""
    with torch.device("meta"):
        net = SiT(**SIT_SIZES[size])
    assert round(sum(p.numel() for p in net.parameters()) / 1e6) == millions


def test_default_is_xl_2():
    with torch.device("meta"):
        assert round(sum(p.numel() for p in SiT().parameters()) / 1e6) == 675
        long = SiT(long_skips=True)
    skips = [p for n, p in long.named_parameters() if ".skip." in n]
    assert sum(p.numel() for p in skips) == 14 * (1152 * 1152 + 1152)


@pytest.mark.parametrize("size, millions", [("M", 131), ("L", 287), ("H", 501)])
def test_published_uvit_sizes(size, millions):
    with torch.device("meta"):
        net = UViT(**UVIT_SIZES[size])
    assert round(sum(p.numel() for p in net.parameters()) / 1e6) == millions


# -------------------------------------------------------------------------------------------------------
# the maths, written out a second time

def attention_by_hand(attn, x):
    biases = attn.qkv.bias.chunk(3) if attn.qkv.bias is not None else [None] * 3
    q, k, v = (F.linear(x, w, b).unflatten(2, (attn.num_heads, -1))
               for w, b in zip(attn.qkv.weight.chunk(3), biases))
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(q.shape[-1])
    return attn.proj(torch.einsum("bhnm,bmhd->bnhd", logits.softmax(-1), v).flatten(2))


def norm_by_hand(x, eps=1e-6):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()


def features_by_hand(t, dim):
    rows = [[f(u * 10000 ** (-i / (dim // 2))) for f in (math.cos, math.sin) for i in range(dim // 2)]
            for u in t.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


def patches(x, p):
    """(B, N, C p p), channel by channel, as a convolution's kernel has them."""
    return F.unfold(x, p, stride=p).mT


def sit_by_hand(net, x, t, y):
    """DiT's formulas one after another; patches are put back pixel by pixel."""
    w = net.patch_embed.proj
    h = F.linear(patches(x, 2), w.weight.flatten(1), w.bias) + net.pos_embed[0]
    first, _, second = net.time_embed
    c = second(F.silu(first(features_by_hand(t, 256)))) + net.label_embed.weight[y]
    L, saved = len(net.blocks), []
    alphas = [1 - (1 - 0.6) * i / (2 * L - 1) for i in range(2 * L)]
    for i, b in enumerate(net.blocks):
        if i >= L // 2:
            h = h + b.skip(saved[L - 1 - i])
        m = b.modulation[1](F.silu(c))[:, None].split(32, dim=2)       # shift, scale, gate; twice
        h = alphas[2 * i] * h + m[2] * attention_by_hand(b.attn, norm_by_hand(h) * (1 + m[1]) + m[0])
        hidden = b.mlp.fc1(norm_by_hand(h) * (1 + m[4]) + m[3])
        h = alphas[2 * i + 1] * h + m[5] * b.mlp.fc2(F.gelu(hidden, approximate="tanh"))
        saved.append(h)
    shift, scale = net.modulation[1](F.silu(c))[:, None].chunk(2, dim=2)
    return to_image(net.head(norm_by_hand(h) * (1 + scale) + shift))


def to_image(tokens):
    image = torch.zeros(len(tokens), 3, 8, 8, dtype=tokens.dtype)
    for n in range(16):
        for r in range(2):
            for s in range(2):                             # channels last within a patch
                pixel = tokens[:, n].unflatten(1, (2, 2, -1))[:, r, s]
                image[:, :, n // 4 * 2 + r, n % 4 * 2 + s] = pixel
    return image


def test_sit_is_its_formulas():
    net = build(SiT, alpha_min=0.6, long_skips=True)
    x, t, y = batch()
    with torch.no_grad():                                  # the sinusoids are float32
        torch.testing.assert_close(net(x, t, y), sit_by_hand(net, x, t, y), rtol=1e-5, atol=1e-6)


def test_uvit_is_its_formulas():
    net = build(UViT, alpha_min=0.6)
    x, t, y = batch()
    with torch.no_grad():
        w = net.patch_embed.proj
        h = F.linear(patches(x, 2), w.weight.flatten(1), w.bias)
        label, time = net.label_embed.weight[y][:, None], features_by_hand(1000 * t, 32)[:, None]
        h = torch.cat([label, time, h], dim=1) + net.pos_embed
        alphas, saved = [1 - 0.4 * i / 9 for i in range(10)], []
        for i, b in enumerate(net.blocks):
            if i > 2:
                h = b.skip(torch.cat([h, saved[4 - i]], dim=2))
            z = norm_by_hand(h, 1e-5) * b.norm1.weight + b.norm1.bias
            h = alphas[2 * i] * h + attention_by_hand(b.attn, z)
            z = norm_by_hand(h, 1e-5) * b.norm2.weight + b.norm2.bias
            h = alphas[2 * i + 1] * h + b.mlp.fc2(F.gelu(b.mlp.fc1(z)))
            saved.append(h)
        h = net.head(norm_by_hand(h, 1e-5) * net.norm.weight + net.norm.bias)[:, 2:]
        truth = F.conv2d(to_image(h), net.smooth.weight, net.smooth.bias, padding=1)
        torch.testing.assert_close(net(x, t, y), truth, rtol=1e-4, atol=1e-4)
    assert [b.attn.qkv.bias for b in net.blocks] == [None] * 5
    assert [b.skip is not None for b in net.blocks] == [False, False, False, True, True]


def test_the_condition_is_each_samples_own():
    """Another time or label of sample 1 changes sample 1 and no other."""
    for kind in KINDS:
        net = build(kind)
        x, t, y = batch()
        before = net(x, t, y)
        other_t, other_y = t.clone(), y.clone()
        other_t[1], other_y[1] = 0.123, (y[1] + 1) % 5
        for changed in (net(x, other_t, y), net(x, t, other_y)):
            assert not torch.allclose(changed[1], before[1])
            assert torch.allclose(changed[[0, 2]], before[[0, 2]])


# -------------------------------------------------------------------------------------------------------
# shortcuts and their start

@pytest.mark.parametrize("alpha_min", [1.0, 0.8])
def test_at_the_start_sit_is_its_shortcut_and_says_zero(alpha_min):
    """adaLN-Zero: block l multiplies its input by the weights of its shortcuts; the velocity is 0."""
    torch.manual_seed(0)
    net = SiT(**SMALL, alpha_min=alpha_min)
    x, t, y = float_batch()
    tokens = list(net.layers(x, t, y))
    assert len(tokens) == 5
    for l in range(4):
        torch.testing.assert_close(tokens[l + 1], tokens[l] * math.prod(net.blocks[l].alphas))
    torch.testing.assert_close(tokens[-1], tokens[0] * net.alpha_eff)
    assert net(x, t, y).abs().max() == 0


def test_zero_init_makes_uvit_its_shortcut_at_the_start():
    torch.manual_seed(0)
    for zero in (True, False):
        net = UViT(**SMALL, alpha_min=0.5, long_skips=False, zero_init=zero)
        first, *_, last = net.layers(*float_batch())
        assert torch.allclose(last, first * net.alpha_eff, rtol=1e-5 if zero else 0.01) == zero


def test_alpha_eff():
    """The released SiT-XL/2: linspace(1, .8, 56), product 2.4e-3; U-ViT counts the middle block too."""
    with torch.device("meta"):
        assert SiT(alpha_min=0.8).alpha_eff == pytest.approx(2.4e-3, rel=0.02)
    expected = math.prod(1 - 0.2 * i / 9 for i in range(10))
    assert UViT(**SMALL, alpha_min=0.8).alpha_eff == pytest.approx(expected)
    assert SiT(**SMALL, shortcut="residual").alpha_eff == 1


def test_every_parameter_learns_after_the_first_step():
    """At step 0 only the head has a gradient; soon everything has, skips and null label too."""
    for kind in KINDS:
        torch.manual_seed(0)
        net = kind(**SMALL, alpha_min=0.8, long_skips=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x, t, y = float_batch(6)
        drop = torch.tensor([True, False] * 3)
        for _ in range(4):
            optimizer.zero_grad()
            (net(x, t, y, drop) - torch.randn_like(x)).square().mean().backward()
            optimizer.step()
        dead = [n for n, p in net.named_parameters() if not p.grad.any()]
        assert not dead


# -------------------------------------------------------------------------------------------------------
# labels, layers, sizes that do not fit

@pytest.mark.parametrize("kind", KINDS)
def test_dropped_labels_are_the_null_class(kind):
    net = build(kind)
    x, t, y = batch()
    drop = torch.tensor([False, True, False])
    with torch.no_grad():
        torch.testing.assert_close(net(x, t, y, drop), net(x, t, torch.where(drop, 5, y)))
        assert not torch.allclose(net(x, t, y, drop)[1], net(x, t, y)[1])
        assert torch.equal(net(x, t, y), net(x, t, y))     # nothing is random, in training mode either
    assert len(net.label_embed.weight) == 6


@pytest.mark.parametrize("kind, prefix", [(SiT, 0), (UViT, 2)])
def test_layers_are_what_the_forward_pass_goes_through(kind, prefix):
    net = build(kind, long_skips=True)
    x, t, y = batch()
    seen = []
    for block in net.blocks:
        block.register_forward_hook(lambda m, i, o: seen.append(o))
    net(x, t, y)
    tokens = list(net.layers(x, t, y))
    assert len(tokens) == 1 + len(net.blocks) and kind.prefix_tokens == prefix
    assert all(map(torch.equal, tokens[1:], seen)) and tokens[0].shape == (3, prefix + 16, 32)


@pytest.mark.parametrize("kind, options, match", [
    (SiT, dict(depth=3, long_skips=True), "make it even"),
    (UViT, dict(depth=3), "make it even"),
    (SiT, dict(shortcut="skipless"), "nothing is learned"),
    (SiT, dict(alpha_min=0.0), "nothing is learned"),
    (UViT, dict(shortcut="skipless"), "zero_init"),
    (SiT, dict(alphas=[(1.0, 0.0)] * 4), "nothing is learned"),
    (UViT, dict(alphas=[(1.0, 1.0)] * 4), "4 pairs for 5 blocks"),
    (SiT, dict(input_size=9), "divisible"),
    (SiT, dict(embed_dim=30), "width that 4 divides"),
])
def test_sizes_that_do_not_fit(kind, options, match):
    with pytest.raises(ValueError, match=match):
        kind(**{**SMALL, **options})


def test_another_image_size_is_refused():
    for kind in KINDS:
        with pytest.raises(ValueError, match="built for 8 x 8 inputs, not 16 x 16"):
            kind(**SMALL)(torch.zeros(1, 3, 16, 16), torch.zeros(1), torch.zeros(1, dtype=torch.int64))


def test_odd_depth_without_long_skips_and_a_skipless_uvit_exist():
    assert len(SiT(**{**SMALL, "depth": 3}).blocks) == 3
    assert UViT(**SMALL, shortcut="skipless", zero_init=False).alpha_eff == 0


def test_time_is_seen_at_its_own_scale():
    """The cosines come first, and half precision of the model does not touch the angles."""
    torch.testing.assert_close(models.timestep_features(torch.tensor([0.5, 1000.0]), 8).double(),
                               features_by_hand(torch.tensor([0.5, 1000.0]), 8), rtol=0, atol=1e-4)
    assert models.timestep_features(torch.tensor([0.5], dtype=torch.bfloat16), 8).dtype == torch.float32
