"""MAE: masking and loss by slow loops, the net a second time in float64, alpha_eff, the zero start."""
import math

import pytest
import torch
import torch.nn.functional as F

import data
import init
from model import (MAE, SIZES, Block, alpha_min_for, effective_alpha, learnable, linear_decay, pair_up,
                   patchify, random_masking, shortcut_weights, sincos_pos_embed, unpatchify, unshuffle)

SMALL = dict(img_size=16, patch_size=4, in_chans=3, embed_dim=16, depth=4, num_heads=2,
             decoder_dim=12, decoder_depth=3, decoder_heads=3)
PLAIN = dict(alpha_min=1.0, long_skips=False, zero_init=False)


def build(**options):
    """A small net in float64 with no weight at zero and no norm at one, so that every part matters."""
    torch.manual_seed(0)
    net = MAE(**{**SMALL, **options}).double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return net


def images(n=3, rows=16, cols=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, rows, cols, generator=generator, dtype=torch.float64)


def noise(n=3, patches=16, seed=2):
    return torch.rand(n, patches, generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------------------------------------------
# the maths, written out a second time

def patch_by_hand(image, p, i):
    """Patch i of an image (C, Y, X), row by row, the channels of a pixel side by side."""
    per_row = image.shape[2] // p
    top, left = i // per_row * p, i % per_row * p
    return torch.stack([image[c, top + y, left + x]
                        for y in range(p) for x in range(p) for c in range(len(image))])


def positions_by_hand(dim, rows, cols):
    """MAE's table, number by number: "w goes first", sines before cosines."""
    def channels(row, col):
        return [f(place / 10000 ** (k / (dim // 4)))
                for place in (col, row) for f in (math.sin, math.cos) for k in range(dim // 4)]
    return torch.tensor([channels(row, col) for row in range(rows) for col in range(cols)])


def norm_by_hand(norm, x):
    variance = x.var(-1, unbiased=False, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / (variance + 1e-6).sqrt() * norm.weight + norm.bias


def attention_by_hand(attn, x):
    """x (N, D), one image, one head after another."""
    heads, d = attn.num_heads, x.shape[1] // attn.num_heads
    q, k, v = (x @ w.T + b for w, b in zip(attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3)))
    parts = [slice(h * d, h * d + d) for h in range(heads)]
    mixed = [((q[:, s] @ k[:, s].T) / math.sqrt(d)).softmax(1) @ v[:, s] for s in parts]
    return torch.cat(mixed, dim=1) @ attn.proj.weight.T + attn.proj.bias


def mlp_by_hand(mlp, x):
    z = x @ mlp.fc1.weight.T + mlp.fc1.bias
    return (z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))) @ mlp.fc2.weight.T + mlp.fc2.bias


def block_by_hand(block, x, a_attn=1.0, a_mlp=1.0, gain=1.0):
    x = a_attn * x + gain * attention_by_hand(block.attn, norm_by_hand(block.norm1, x))
    return a_mlp * x + gain * mlp_by_hand(block.mlp, norm_by_hand(block.norm2, x))


def kept_by_hand(row, count):
    """The patches with the smallest noise, in its order."""
    return sorted(range(len(row)), key=lambda i: float(row[i]))[:count]


def in_place(tokens, kept, filler, patches):
    """Tokens at the places of their patches, the filler everywhere else."""
    return torch.stack([tokens[kept.index(i)] if i in kept else filler for i in range(patches)])


def mae_by_hand(net, image, row, alphas, gain, keep, final_norm, skips):
    """One image -> [states after the embedding and each block], prediction (N, p p C)."""
    p, (rows, cols) = net.patch_size, net.grid
    kept = kept_by_hand(row, keep)
    kernel = net.patch_embed.proj.weight.permute(0, 2, 3, 1).flatten(1)     # patch_by_hand's order
    pos = positions_by_hand(kernel.shape[0], rows, cols).float().double()
    tokens = [kernel @ patch_by_hand(image, p, i) + net.patch_embed.proj.bias + pos[i] for i in kept]
    x = torch.stack([net.cls_token[0, 0], *tokens])
    states = [x]
    for l, block in enumerate(net.blocks):
        x = block_by_hand(block, x, alphas[2 * l], alphas[2 * l + 1], gain)
        states.append(x)
    ends = [*states[:-1], norm_by_hand(net.norm, x) if final_norm else x]
    weights = net.decoder_embed.weight.T
    decoder_pos = positions_by_hand(len(weights.T), rows, cols).float().double()
    if skips:                                              # the image enters through the skips alone
        y = torch.cat([net.decoder_cls_token[0], decoder_pos]) @ weights + net.decoder_embed.bias
    else:
        y = ends[-1] @ weights + net.decoder_embed.bias
        y = torch.cat([y[:1], in_place(y[1:], kept, net.mask_token[0, 0], rows * cols) + decoder_pos])
    sources = list(range(len(net.blocks), 0, -2))          # blocks L, L - 2, ..., 2
    for i, block in enumerate(net.decoder_blocks):
        if skips and i < len(sources):
            source, skip = ends[sources[i]], net.skips[i]
            patches = in_place(source[1:], kept, skip.mask_token[0, 0], rows * cols)
            source = torch.cat([source[:1], patches])
            z = torch.cat([source, y], dim=1) @ skip.fc1.weight.T + skip.fc1.bias
            y = y + (z * torch.sigmoid(z)) @ skip.fc2.weight.T + skip.fc2.bias
        y = block_by_hand(block, y)
    y = norm_by_hand(net.decoder_norm, y)[1:]
    return states, y @ net.decoder_pred.weight.T + net.decoder_pred.bias


def loss_by_hand(image, prediction, p, kept, normalised=True):
    """Mean squared error over the removed patches of one image."""
    errors = []
    for i in range(len(prediction)):
        if i not in kept:
            target = patch_by_hand(image, p, i).tolist()
            mean = sum(target) / len(target)
            std = math.sqrt(sum((v - mean) ** 2 for v in target) / (len(target) - 1) + 1e-6)
            target = [(v - mean) / std for v in target] if normalised else target
            squares = [(a - b) ** 2 for a, b in zip(prediction[i].tolist(), target)]
            errors.append(sum(squares) / len(target))
    return sum(errors) / len(errors)


R, DECAYED = math.sqrt(0.5), [1 - i / 7 * 0.7 for i in range(8)]
HALVES = shortcut_weights("decayed", 4, 0.3)
NETS = {          # options, weights of the 8 shortcuts, gain of the branches, final norm, skips
    "original": (PLAIN, [1] * 8, 1, True, False),
    "decayed, long skips": (dict(alpha_min=0.3), DECAYED, 1, False, True),
    "decayed, mask tokens": (dict(alpha_min=0.3, long_skips=False), DECAYED, 1, True, False),
    "no final norm": (dict(PLAIN, encoder_norm=False), [1] * 8, 1, False, False),
    "long skips, final norm": (dict(encoder_norm=True), [1] * 8, 1, True, True),
    "skipless": (dict(shortcut="skipless"), [0] * 8, 1, False, True),
    "per layer": (
        dict(alphas=[(.8, 1), (.6, 1), (.4, 1), (.2, 1)]), [.8, 1, .6, 1, .4, 1, .2, 1], 1, False, True),
    "attention only": (
        dict(alphas=[(a, 1.0) for a, _ in HALVES]), [1, 1, .8, 1, .6, 1, .4, 1], 1, False, True),
    "MLP only": (
        dict(alphas=[(1.0, a) for _, a in HALVES]), [1, .9, 1, .7, 1, .5, 1, .3], 1, False, True),
    "both scaled": (dict(alphas=[((R, R), (R, R))] * 4), [R] * 8, R, False, True),
    "branch scaled": (dict(alphas=[((1, R), (1, R))] * 4), [1] * 8, R, False, True),
}


@pytest.mark.parametrize("name", NETS)
def test_equals_a_second_implementation(name):
    """States after every block, predictions and loss, one image at a time, in float64."""
    options, alphas, gain, final_norm, skips = NETS[name]
    net, x, u = build(**options), images(), noise()
    kept, _, _ = random_masking(u, 0.7)
    loss, prediction, mask = net(x, 0.7, u)
    states = list(net.layers(x, kept))
    losses = []
    for b in range(len(x)):
        by_hand, expected = mae_by_hand(net, x[b], u[b], alphas, gain, int(16 * 0.3), final_norm, skips)
        got = torch.stack([state[b] for state in states])
        torch.testing.assert_close(got, torch.stack(by_hand), rtol=0, atol=1e-9)
        torch.testing.assert_close(prediction[b], expected, rtol=0, atol=1e-8)
        losses.append(loss_by_hand(x[b], expected, 4, kept_by_hand(u[b], 4)))
    assert loss.item() == pytest.approx(sum(losses) / 3, rel=1e-6)


def test_loss_without_normalisation_is_that_of_the_pixels():
    net, x, u = build(norm_pix_loss=False), images(), noise()
    loss, prediction, _ = net(x, 0.75, u)
    losses = [loss_by_hand(x[b], prediction[b], 4, kept_by_hand(u[b], 4), False) for b in range(3)]
    assert loss.item() == pytest.approx(sum(losses) / 3, rel=1e-6)


def test_layers_see_the_whole_image_unless_told_otherwise():
    """Item 0 is the embedding, then one per block; forward_features is the last with the final norm."""
    net, x = build(**PLAIN), images(1)
    in_order = torch.arange(16)[None] / 16                 # nothing is removed, nothing is shuffled
    expected, _ = mae_by_hand(net, x[0], in_order[0], [1] * 8, 1, 16, True, False)
    torch.testing.assert_close(torch.cat(list(net.layers(x))), torch.stack(expected), rtol=0, atol=1e-9)
    last = norm_by_hand(net.norm, expected[-1])
    torch.testing.assert_close(net.forward_features(x)[0], last, rtol=0, atol=1e-9)


def test_vit_b_has_the_published_size():
    """111,907,840 numbers in the published ViT-B/16 with its position tables, which are buffers here."""
    with torch.device("meta"):
        net = MAE(**SIZES["base"], **PLAIN)
        decayed = MAE(**SIZES["base"])
    assert sum(v.numel() for v in net.state_dict().values()) == 111_907_840
    skips = 6 * ((768 + 512 + 1) * 512 + 512 * 513 + 768)
    change = skips + (512 - 768) * 512 - 1536              # a square decoder_embed, and no norm
    assert sum(v.numel() for v in decayed.state_dict().values()) == 111_907_840 + change


def test_published_weights_would_load():
    """Names and shapes of the published checkpoint: block 0 of each kind, and all that is no block."""
    net = MAE(**dict(SIZES["tiny"], depth=1), decoder_depth=1, **PLAIN)
    ours = {k: tuple(v.shape) for k, v in net.state_dict().items()}
    block = {
        "norm1.weight": (1,), "norm1.bias": (1,), "norm2.weight": (1,), "norm2.bias": (1,),
        "attn.qkv.weight": (3, 1), "attn.qkv.bias": (3,),
        "attn.proj.weight": (1, 1), "attn.proj.bias": (1,),
        "mlp.fc1.weight": (4, 1), "mlp.fc1.bias": (4,), "mlp.fc2.weight": (1, 4), "mlp.fc2.bias": (1,)}
    published = {
        "cls_token": (1, 1, 192), "pos_embed": (1, 197, 192), "decoder_pos_embed": (1, 197, 512),
        "mask_token": (1, 1, 512), "norm.weight": (192,), "norm.bias": (192,),
        "patch_embed.proj.weight": (192, 3, 16, 16), "patch_embed.proj.bias": (192,),
        "decoder_embed.weight": (512, 192), "decoder_embed.bias": (512,), "decoder_norm.weight": (512,),
        "decoder_norm.bias": (512,), "decoder_pred.weight": (768, 512), "decoder_pred.bias": (768,)}
    for where, dim in (("blocks", 192), ("decoder_blocks", 512)):
        published |= {f"{where}.0.{k}": tuple(dim * n for n in shape) for k, shape in block.items()}
    assert ours == published


# -------------------------------------------------------------------------------------------------------
# masking, patches, positions

@pytest.mark.parametrize("patches, ratio, count", [
    (16, 0.75, 4), (196, 0.75, 49), (49, 0.75, 12), (64, 0.9, 6), (10, 0.55, 4), (4, 0.5, 2)])
def test_masking_keeps_the_smallest_and_unshuffle_restores(patches, ratio, count):
    """int(N (1 - r)) of each row; the mask marks the others, and their places take the mask token."""
    u = noise(5, patches)
    kept, mask, restore = random_masking(u, ratio)
    assert kept.shape == (5, count)
    tokens, filler = torch.randn(5, patches, 3), torch.full((1, 1, 3), 9.0)
    back = unshuffle(tokens.gather(1, kept[:, :, None].expand(-1, -1, 3)), filler, restore)
    for b in range(5):
        chosen = kept_by_hand(u[b], count)
        assert kept[b].tolist() == chosen
        assert mask[b].tolist() == [float(i not in chosen) for i in range(patches)]
        expected = [tokens[b, i] if i in chosen else filler[0, 0] for i in range(patches)]
        assert torch.equal(back[b], torch.stack(expected))


def test_every_patch_is_removed_equally_often():
    _, mask, _ = random_masking(noise(20_000, 16), 0.75)
    assert (mask.mean(0) - 0.75).abs().max() < 0.02             # six standard deviations


def test_masks_differ_between_images_and_calls():
    net, x = build(), images(8)
    masks = [net(x)[2] for _ in range(2)]
    assert not torch.equal(*masks) and len(masks[0].unique(dim=0)) > 1


@pytest.mark.parametrize("patches, ratio", [(4, 0.8), (2, 0.75), (16, 0.0), (9, 1.0)])
def test_a_mask_that_keeps_or_removes_nothing_is_refused(patches, ratio):
    with pytest.raises(ValueError, match=f"mask ratio {ratio} keeps .+ of {patches} patches"):
        random_masking(noise(1, patches), ratio)


@pytest.mark.parametrize("rows, cols, chans, p", [(8, 8, 3, 4), (6, 4, 1, 2), (4, 12, 5, 2)])
def test_pixels_of_a_patch_are_in_the_published_order(rows, cols, chans, p):
    """Row by row, channels last ("nhwpqc"), by a slow loop; and back again, to the bit."""
    x = torch.randn(2, chans, rows, cols)
    patches = patchify(x, p)
    by_hand = [[patch_by_hand(image, p, i) for i in range(rows * cols // p ** 2)] for image in x]
    assert torch.equal(patches, torch.stack([torch.stack(one) for one in by_hand]))
    assert torch.equal(unpatchify(patches, p, rows // p, cols // p), x)


@pytest.mark.parametrize("dim, rows, cols", [(8, 2, 3), (16, 4, 4), (512, 14, 14)])
def test_positions_by_hand(dim, rows, cols):
    by_hand = positions_by_hand(dim, rows, cols).float()
    torch.testing.assert_close(sincos_pos_embed(dim, rows, cols), by_hand, rtol=0, atol=1e-6)


def test_positions_column_first_and_none_for_the_class_token():
    """Moving along a row changes the first half of the channels only; none of it is trained."""
    net = MAE(**SMALL)
    for table in (net.pos_embed, net.decoder_pos_embed):
        grid = table[0, 1:].unflatten(0, (4, 4))
        half = grid.shape[2] // 2
        assert torch.equal(grid[:, :1, half:].expand_as(grid[..., half:]), grid[..., half:])
        assert torch.equal(grid[:1, :, :half].expand_as(grid[..., :half]), grid[..., :half])
        assert not torch.equal(grid[0, 0, :half], grid[0, 1, :half])
        assert not table[0, 0].any()
    assert not {"pos_embed", "decoder_pos_embed"} & {name for name, _ in net.named_parameters()}


# -------------------------------------------------------------------------------------------------------
# the loss touches removed patches only

@pytest.mark.parametrize("long_skips", [True, False])
def test_loss_has_no_gradient_at_kept_patches(long_skips):
    net, u = build(long_skips=long_skips), noise()
    loss, prediction, mask = net(images(), 0.75, u)
    gradient, = torch.autograd.grad(loss, prediction)
    assert not gradient[mask == 0].any()
    assert gradient[mask == 1].abs().amin(-1).gt(0).all()


def test_target_of_kept_patches_and_input_of_removed_ones_do_not_matter():
    """Pixels of removed patches change the loss through the target alone: the prediction stays.

    Of the target only removed patches count: with a fixed prediction kept pixels change nothing."""
    net, x, u = build(), images(), noise()
    kept, mask, _ = random_masking(u, 0.75)
    removed = unpatchify(mask[:, :, None].expand(-1, -1, 48).double(), 4, 4, 4)
    loss, prediction, _ = net(x, 0.75, u)
    other_removed = net(x + removed * images(seed=5), 0.75, u)
    assert torch.equal(other_removed[1], prediction) and other_removed[0] != loss
    with torch.no_grad():
        net.decoder_pred.weight.zero_()                    # a prediction that no pixel can change
    loss = net(x, 0.75, u)[0]
    assert torch.equal(loss, net(x + (1 - removed) * images(seed=5), 0.75, u)[0])
    assert loss != net(x + removed * images(seed=5), 0.75, u)[0]


def test_a_flat_patch_gives_a_finite_loss():
    """Variance 0: the target is 0, by the 1e-6."""
    loss, prediction, mask = build()(torch.ones(1, 3, 16, 16, dtype=torch.float64))
    assert loss.item() == pytest.approx(prediction[mask == 1].square().mean().item(), rel=1e-5)


def test_loss_is_float32_under_half_precision():
    net = MAE(**SMALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, prediction, _ = net(images().float(), 0.75, noise())
    assert prediction.dtype == torch.bfloat16 and loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


# -------------------------------------------------------------------------------------------------------
# reconstruction

@pytest.mark.parametrize("norm_pix_loss", [True, False])
def test_reconstruction_has_the_true_statistics_of_each_patch(norm_pix_loss):
    """Kept patches are the input to the bit; removed ones grey, or prediction * true std + true mean."""
    net, x, u = build(norm_pix_loss=norm_pix_loss), images() * 3 + 1, noise()
    masked, filled = net.reconstruct(x, 0.75, u)
    _, prediction, _ = net(x, 0.75, u)
    for b in range(3):
        kept = kept_by_hand(u[b], 4)
        for i in range(16):
            truth, grey, fill = (patch_by_hand(image[b], 4, i) for image in (x, masked, filled))
            if i in kept:
                assert torch.equal(grey, truth) and torch.equal(fill, truth)
            else:
                assert not grey.any()
                std, mean = ((truth.var() + 1e-6).sqrt(), truth.mean()) if norm_pix_loss else (1, 0)
                torch.testing.assert_close(fill, prediction[b, i] * std + mean, rtol=0, atol=1e-5)


# -------------------------------------------------------------------------------------------------------
# shortcut weights

@pytest.mark.parametrize("depth, alpha_min, low, high", [
    (12, 0.6, 3.55e-3, 3.65e-3), (12, 0.65, 8.05e-3, 8.15e-3), (12, 0.7, 1.75e-2, 1.85e-2),
    (12, 0.5, 5.5e-4, 6.5e-4), (24, 0.75, 1e-3, 1e-2), (24, 0.8, 1e-3, 1e-2), (24, 0.6, 0, 1e-3)])
def test_alpha_eff_over_sub_layers(depth, alpha_min, low, high):
    """Paper 3's numbers for ViT-B; its range [1e-3, 1e-2) asks for more in a deeper net."""
    net = MAE(8, 4, 3, 4, depth, 1, 4, depth // 2, 1, alpha_min=alpha_min)
    logs = [math.log(1 - i / (2 * depth - 1) * (1 - alpha_min)) for i in range(2 * depth)]
    assert low < net.alpha_eff < high
    assert net.alpha_eff == pytest.approx(math.exp(sum(logs)), rel=1e-9)


@pytest.mark.parametrize("depth, wanted", [(12, 1e-3), (12, 9e-3), (24, 5e-3), (2, 0.9), (12, 1.0)])
def test_alpha_min_for_inverts_alpha_eff(depth, wanted):
    weights = shortcut_weights("decayed", depth, alpha_min_for(wanted, depth))
    assert effective_alpha(weights) == pytest.approx(wanted, rel=1e-9)


def test_deeper_nets_need_a_larger_alpha_min():
    needed = [alpha_min_for(5e-3, depth) for depth in (6, 12, 24, 48)]
    assert needed == sorted(needed) and needed[0] < 0.5 and needed[-1] > 0.85


def test_the_share_of_the_input_is_the_product_of_the_weights():
    """A linear toy net by Block.join: x_L = prod(a) x_0 + all paths through at least one W."""
    torch.manual_seed(0)
    alphas = linear_decay(6, 0.4)
    branches = [0.5 * torch.randn(5, 5, dtype=torch.float64) for _ in alphas]
    blocks = [Block(4, 1, alphas=pair) for pair in pair_up(alphas)]
    x = start = torch.randn(5, dtype=torch.float64)
    for l, W in enumerate(branches):
        x = blocks[l // 2].join(l % 2, x, W @ x)
    total = math.prod(alphas) * start
    for path in range(1, 2 ** len(alphas)):                # bit l: whether the path takes branch l
        y = start
        for l, (a, W) in enumerate(zip(alphas, branches)):
            y = W @ y if path >> l & 1 else a * y
        total = total + y
    torch.testing.assert_close(x, total, rtol=0, atol=1e-10)


def test_learned_weights_start_where_they_are_told_and_learn():
    """The same net at first; every weight has a gradient that a difference quotient confirms."""
    alphas = pair_up([1.0, 0.9, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4])
    fixed, learned = build(alphas=alphas), MAE(**SMALL, alphas=learnable(alphas)).double()
    names, weights = [f"blocks.{l}.alphas.{i}" for l in range(4) for i in (0, 1)], sum(alphas, ())
    assert [n for n, _ in learned.named_parameters() if "alphas" in n] == names
    assert [learned.get_parameter(n).item() for n in names] == pytest.approx(weights)
    assert learned.alpha_eff == pytest.approx(fixed.alpha_eff, rel=1e-6)
    learned.load_state_dict(learned.state_dict() | fixed.state_dict())
    x, u = images(), noise()

    def energy(name=None, value=None):
        if name:
            learned.get_parameter(name).data.fill_(value)
        return learned(x, 0.75, u)[1].square().mean()

    for n, a in zip(names, weights):                       # all digits of float64
        learned.get_parameter(n).data.fill_(a)
    assert torch.equal(learned(x, 0.75, u)[1], fixed(x, 0.75, u)[1])
    energy().backward()
    for n, a in zip(names, weights):
        quotient = (energy(n, a + 1e-5) - energy(n, a - 1e-5)).item() / 2e-5
        energy(n, a)
        gradient = learned.get_parameter(n).grad.item()
        assert gradient == pytest.approx(quotient, rel=1e-4, abs=1e-8) and quotient != 0
    before = learned.alpha_eff
    with torch.no_grad():
        learned.get_parameter(names[-1]).mul_(0.5)
    assert learned.alpha_eff == pytest.approx(before / 2)


# -------------------------------------------------------------------------------------------------------
# the zero start

def zeros(net):
    return {n for n, p in net.named_parameters() if p.ndim == 2 and not p.any()}


def branch_ends(blocks, n):
    return {f"{blocks}.{l}.{name}.weight" for l in range(n) for name in ("attn.proj", "mlp.fc2")}


ENCODER = branch_ends("blocks", 4)
DECODER = branch_ends("decoder_blocks", 3) | {"decoder_pred.weight"}
SKIPS = {"skips.0.fc2.weight", "skips.1.fc2.weight"}


@pytest.mark.parametrize("options, expected", [
    ({}, ENCODER | DECODER | SKIPS), (dict(long_skips=False), ENCODER | DECODER),
    (dict(shortcut="skipless"), DECODER | SKIPS), (dict(zero_init=False), set()), (PLAIN, set()),
    (dict(alphas=[(1.0, 0.0)] * 4), {n for n in ENCODER if "proj" in n} | DECODER | SKIPS),
], ids=["decayed", "no skips", "skipless", "no zero init", "original", "half skipless"])
def test_which_weights_start_at_zero(options, expected):
    """The last weights of branches beside shortcuts, of skips and head. Biases 0, norms 1."""
    torch.manual_seed(0)
    net = MAE(**{**SMALL, **options})
    assert zeros(net) == expected
    for name, p in net.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        elif name.endswith("token"):
            assert 0 < p.std() < 0.05, name


def test_weights_are_xavier_uniform():
    """The largest of many uniform numbers is near the bound sqrt(6 / (in + out))."""
    torch.manual_seed(0)
    net = MAE(16, 4, 3, 64, 2, 2, 32, 2, 2, zero_init=False)
    for name, p in net.named_parameters():
        if p.ndim in (2, 4):
            w = p.flatten(1)
            bound = math.sqrt(6 / sum(w.shape))
            assert 0.97 * bound < w.abs().max() <= bound, name
            assert w.var().item() == pytest.approx(bound ** 2 / 3, rel=0.15), name


@pytest.mark.parametrize("alphas", [HALVES, [(1.0, 1.0)] * 4, [(0.6, 1.0)] * 4])
def test_a_net_that_starts_at_zero_is_its_shortcut(alphas):
    """The tokens after block l are the weights' product times the embedding; the prediction is 0."""
    torch.manual_seed(0)
    net = MAE(**SMALL, alphas=alphas).double()
    states = list(net.layers(images()))
    for l, state in enumerate(states):
        torch.testing.assert_close(state, math.prod(sum(alphas[:l], ())) * states[0], rtol=1e-12, atol=0)
    assert not net(images())[1].any()
    torch.testing.assert_close(states[-1], net.alpha_eff * states[0], rtol=1e-12, atol=0)


def test_a_net_that_starts_at_zero_learns_everywhere():
    """Zeros at the ends are no dead end: after a few steps every weight has moved."""
    torch.manual_seed(0)
    net = MAE(**SMALL, alpha_min=0.5)
    first = {n: p.detach().clone() for n, p in net.named_parameters()}
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0)
    for step in range(8):          # the head, the skips, the encoder's branches, what is before
        net(images(8, seed=step).float())[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    still = [n for n, p in net.named_parameters() if torch.equal(p, first[n])]
    assert not still and not zeros(net)


def growth(zero_init, seed=0):
    """Largest norm of a layer's features over the embedding's, before and after 20 steps."""
    emoji = data.load_images("emoji")
    pixels = data.eval_transform(emoji, 32)(emoji.train.images)
    torch.manual_seed(seed)
    net = MAE(32, 8, 3, 32, 12, 2, 32, 6, 2, alpha_min=0.5, zero_init=zero_init)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.05)

    def largest():
        with torch.no_grad():
            norms = torch.stack([tokens.norm(dim=-1).mean() for tokens in net.layers(pixels[::400])])
        return (norms.max() / norms[0]).item()

    before = largest()
    for _ in range(20):
        net(pixels[torch.randint(len(pixels), (16,))])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, largest()


def test_without_the_zero_start_features_grow():
    """A net whose shortcut decays grows its features, unless its branches start silent (paper 3).

    Four seeds without it: by .41, .12, .08, .09 of the embedding's norm; with it: by nothing."""
    before, after = growth(False)
    assert before < 1.2 and after > before + 0.05
    before, after = growth(True)
    assert before == 1 and after < 1.01


def test_skipless_initialisation_reaches_the_encoder_alone():
    torch.manual_seed(0)
    net = MAE(**dict(SMALL, embed_dim=32), shortcut="skipless")
    decoder = {n: p.detach().clone() for n, p in net.named_parameters() if not n.startswith("blocks")}
    init.init_skipless_vit(net, alpha=1.0, beta=2.0, c=3.0)
    w_v = net.blocks[1].attn.qkv.weight.chunk(3)[2]
    product = (w_v.T @ net.blocks[1].attn.proj.weight.T).detach()
    torch.testing.assert_close(product @ product.T, 81 * torch.eye(32), rtol=0, atol=1e-3)
    assert all(torch.equal(p, net.get_parameter(n)) for n, p in decoder.items())


# -------------------------------------------------------------------------------------------------------
# sizes

@pytest.mark.parametrize("options", [{}, dict(long_skips=False)], ids=["long skips", "mask tokens"])
@pytest.mark.parametrize("rows, cols", [(24, 24), (8, 12), (16, 32)])
def test_images_of_another_size(options, rows, cols):
    """Positions are interpolated, so loss, prediction and reconstruction have the image's own grid."""
    net, x = build(**options), images(2, rows, cols)
    patches = rows * cols // 16
    loss, prediction, mask = net(x, 0.75, noise(2, patches))
    assert prediction.shape == (2, patches, 48) and loss.isfinite()
    assert mask.sum(1).tolist() == [patches - patches // 4] * 2
    grid = net.pos_embed[0, 1:].T.reshape(1, -1, 4, 4)
    size = rows // 4, cols // 4
    resized = F.interpolate(grid.float(), size=size, mode="bicubic", antialias=True).double()
    expected = net.patch_embed(x)[0] + resized[0].flatten(1).T
    torch.testing.assert_close(net.embed(x)[0, 1:], expected, rtol=0, atol=1e-10)
    assert [image.shape for image in net.reconstruct(x)] == [x.shape] * 2
    assert [len(state[0]) for state in net.layers(x)] == [1 + patches] * 5


@pytest.mark.parametrize("rows, cols", [(18, 16), (16, 15), (2, 16)])
def test_images_that_patches_do_not_tile_are_refused(rows, cols):
    net = build()
    for use in (net, net.reconstruct, net.forward_features, lambda x: list(net.layers(x))):
        with pytest.raises(ValueError, match=f"image size {rows} x {cols} is not divisible by patch"):
            use(images(1, rows, cols))


@pytest.mark.parametrize("options, words", [
    (dict(img_size=18), "18 x 18 is not divisible by patch size 4"),
    (dict(depth=3), "every second of 3 encoder"), (dict(decoder_depth=1), "one of 1 decoder blocks"),
    (dict(num_heads=3), "16 is not divisible by num_heads 3"),
    (dict(decoder_heads=5), "12 is not divisible by num_heads 5"),
    (dict(embed_dim=18), "4 divides, not 18"), (dict(decoder_dim=6), "4 divides, not 6"),
    (dict(alphas=[(1, 1)] * 3), "3 pairs for 4 blocks"),
    (dict(alpha_min=1.5), "between 0 and 1"), (dict(shortcut="none"), "shortcut 'none' is unknown"),
], ids=str)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        MAE(**{**SMALL, **options})
    assert "\n" not in str(caught.value)


def test_odd_depth_needs_no_long_skips():
    assert len(MAE(**{**SMALL, "depth": 3}, long_skips=False).blocks) == 3
    assert MAE.prefix_tokens == 1
