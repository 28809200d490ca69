"""DINO's method: loss, schedules, clipping, views, monitors of collapse, against slow references."""
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import runtime
import train_dino
from model import DINO, MAE, DINOHead, ViT, patch_tokens
from train_dino import (clip_each, collapse_monitors, dino_loss, half_cosine, output_sums, teacher_probs,
                        teacher_temperature)

TINY = dict(img_size=8, patch_size=2, in_chans=1, embed_dim=12, depth=3, num_heads=2)
HEAD = dict(out_dim=7, hidden_dim=10, bottleneck_dim=5)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randomised(net, seed=0):
    """Away from the init, whose zero biases and equal gains hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return net


# ----------------------------------------------------------------------------------------------------
# the loss

def loss_by_hand(student, probs, temperature):
    """Caron et al., algorithm 1, number by number: the cross-entropy of each image for every global
    teacher view i and every other student view v."""
    student, probs, terms = student.double(), probs.double(), []
    for i in range(2):
        for v in range(len(student)):
            for b, row in enumerate(student[v] / temperature):
                if v != i:
                    terms.append(-sum(p * (s - row.logsumexp(0)) for p, s in zip(probs[i, b], row)))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("local", [0, 1, 4])
def test_loss_and_gradient_against_a_double_loop(local):
    """The gradient is (2 or 1) softmax(s_v) minus the other views' teachers, over T B pairs."""
    V, B, K = 2 + local, 3, 6
    student = numbers(V, B, K, seed=local).requires_grad_()
    probs = numbers(2, B, K, seed=9).mul(3).softmax(-1)
    loss = dino_loss(student, probs, 0.1)
    loss.backward()
    assert loss.item() == pytest.approx(loss_by_hand(student.detach(), probs, 0.1).item(), rel=1e-6)
    for v in range(V):
        q = (student[v].detach().double() / 0.1).softmax(-1)
        expected = sum(q - probs[i].double() for i in range(2) if i != v) / (0.1 * B * 2 * (V - 1))
        assert (student.grad[v] - expected).abs().max() < 5e-6
    by_hand = loss_by_hand(student.detach(), probs, 0.3).item()
    assert dino_loss(student, probs, 0.3).item() == pytest.approx(by_hand, rel=1e-6)


def test_loss_of_a_uniform_teacher_and_student_is_ln_k():
    """Where a collapsed run sits."""
    loss = dino_loss(torch.zeros(4, 2, 50), torch.full((2, 2, 50), 1 / 50))
    assert loss.item() == pytest.approx(math.log(50), rel=1e-6)


def test_loss_is_float32_under_bfloat16_and_finite_for_huge_logits():
    """The loss of bfloat16 logits, under autocast too, is that of the same numbers in float64."""
    logits = numbers(4, 3, 20).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        probs = teacher_probs(logits[:2], torch.zeros(1, 20), 0.04)
        loss = dino_loss(logits, probs, 0.1)
    assert loss.dtype == probs.dtype == torch.float32
    assert (probs - (logits[:2].double() / 0.04).softmax(-1)).abs().max() < 1e-6
    assert loss.item() == pytest.approx(loss_by_hand(logits, probs, 0.1).item(), rel=1e-5)
    for dtype, size in ((torch.bfloat16, 1e30), (torch.float16, 6e4), (torch.float32, 1e30)):
        huge = (logits.float().sign() * size).to(dtype).requires_grad_()
        loss = dino_loss(huge, teacher_probs(huge.detach()[:2], torch.zeros(1, 20), 0.04), 0.1)
        loss.backward()
        assert loss.isfinite() and huge.grad.isfinite().all(), dtype


def test_teacher_is_centred_and_sharpened():
    logits, center = torch.tensor([[[1.0, 2.0, 4.0]]] * 2), torch.tensor([[0.0, 1.5, 4.5]])
    odds = [math.exp(x / 0.5) for x in (1.0, 0.5, -0.5)]
    found = teacher_probs(logits, center, 0.5)[1, 0].tolist()
    assert found == pytest.approx([x / sum(odds) for x in odds], rel=1e-6)


# ----------------------------------------------------------------------------------------------------
# schedules and clipping

EPOCHS, PER_EPOCH = 300, 1281167 // 1024                         # batch 1024 on ImageNet-1k
STEPS, WARMUP = EPOCHS * PER_EPOCH, 10 * PER_EPOCH
PAPER = ["--preset", "paper", "--data", "x"]


def published(base, final, warmup=0):
    """A schedule as an array: np.linspace up to base over the warm-up, then half a cosine."""
    rise = np.linspace(0, base, warmup)
    i = np.arange(STEPS - len(rise))
    fall = final + 0.5 * (base - final) * (1 + np.cos(np.pi * i / len(i)))
    return np.concatenate([rise, fall])


def test_schedules_of_the_published_recipe():
    """Weight decay, momentum and learning rate of the preset. One deliberate difference: the published
    warm-up starts at 0, so its first step moves nothing; ours is (s + 1) / n instead of s / (n - 1)."""
    args = train_dino.get_args(PAPER)
    assert args.lr == pytest.approx(5e-4 * args.batch_size / 256) and args.warmup == 10
    decay, momentum = published(0.04, 0.4), published(0.996, 1.0)
    rate = published(args.lr, 1e-6, WARMUP)
    special = {0, 1, PER_EPOCH, WARMUP - 1, WARMUP, STEPS // 2, STEPS - 1}
    for step in sorted({*special, *range(0, STEPS, 9973)}):
        ours = half_cosine(args.weight_decay, args.weight_decay_end, step, STEPS)
        assert ours == pytest.approx(decay[step], rel=1e-12)
        assert half_cosine(args.ema, 1.0, step, STEPS) == pytest.approx(momentum[step], rel=1e-12)
        ours = runtime.lr_at(step, STEPS, WARMUP, args.lr, args.min_lr)
        if step < WARMUP:
            assert 0 < ours and 0 <= ours - rate[step] <= args.lr / WARMUP + 1e-15
        else:
            assert ours == pytest.approx(rate[step], rel=1e-12)


def test_teacher_temperature_of_the_published_recipe():
    """.04 to .07 in 30 equal steps, one an epoch, the end included as in np.linspace; then .07."""
    args = train_dino.get_args(PAPER)
    expected = np.concatenate([np.linspace(0.04, 0.07, 30), np.full(270, 0.07)])
    ours = [teacher_temperature(epoch, args) for epoch in range(300)]
    assert ours == pytest.approx(expected.tolist(), rel=1e-12) and ours[0] == 0.04 and ours[299] == 0.07


@pytest.mark.parametrize("warmup, expected", [
    (0, [7, 7, 7, 7]), (0.5, [4, 7, 7, 7]), (1, [4, 7, 7, 7]), (2, [4, 7, 7, 7]), (2.5, [4, 6, 7, 7]),
    (3, [4, 5.5, 7, 7]), (4, [4, 5, 6, 7])])
def test_short_and_broken_temperature_warm_ups(warmup, expected):
    """None of them goes past the end value."""
    args = SimpleNamespace(teacher_temp_start=4.0, teacher_temp=7.0, teacher_temp_warmup=warmup)
    assert [teacher_temperature(epoch, args) for epoch in range(4)] == pytest.approx(expected)


@pytest.mark.parametrize("limit", [3.0, 0.5, 0.0])
def test_clipping_is_per_parameter(limit):
    """Each by its own norm with DINO's coefficient, without gradient left out, 0 off; the norm of all."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 2), (6,))]
    for p, scale in zip(parameters, (0.01, 1.0, 100.0)):
        p.grad = numbers(*p.shape) * scale
    before = [p.grad.clone() for p in parameters[:3]]
    norm = clip_each(iter(parameters), limit)
    squares = [sum(x * x for x in g.flatten().tolist()) for g in before]
    for p, g, square in zip(parameters, before, squares):
        coefficient = limit / (math.sqrt(square) + 1e-6)
        expected = g * (coefficient if limit and coefficient < 1 else 1)
        assert torch.allclose(p.grad, expected, rtol=1e-5)
    assert parameters[3].grad is None
    assert norm.item() == pytest.approx(math.sqrt(sum(squares)), rel=1e-5)


# ----------------------------------------------------------------------------------------------------
# the net

@pytest.mark.parametrize("norm_last_layer", [True, False])
def test_head_by_hand(norm_last_layer):
    """Linear, exact GELU, Linear, GELU, Linear, L2, then rows g v / |v|, in numpy; logits are cosines
    where the last layer is normalised, which holds g at 1."""
    head = DINOHead(12, **HEAD, norm_last_layer=norm_last_layer)
    fixed = dict(head.named_parameters())["last_layer.parametrizations.weight.original0"]
    assert (fixed == 1).all() and fixed.requires_grad is not norm_last_layer
    randomised(head)
    if norm_last_layer:
        torch.nn.init.ones_(fixed)
    *mlp, g, v = [p.detach().double().numpy() for p in head.parameters()]
    x = numbers(4, 12, seed=1)
    z = x.double().numpy()
    for i in range(3):
        z = z @ mlp[2 * i].T + mlp[2 * i + 1]
        z = z if i == 2 else z / 2 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
    z = z / np.sqrt((z ** 2).sum(1, keepdims=True))
    expected = z @ (g * v / np.sqrt((v ** 2).sum(1, keepdims=True))).T
    assert np.abs(head(x).detach().numpy() - expected).max() < 1e-5
    assert not norm_last_layer or np.abs(expected).max() <= 1


def test_head_starts_as_published():
    first = DINOHead(400, out_dim=300, hidden_dim=200, bottleneck_dim=100).mlp[0]
    assert first.weight.std().item() == pytest.approx(0.02, rel=0.02) and not first.bias.any()


@pytest.mark.parametrize("sizes, forwards", [
    ([8, 8, 4, 4, 4], [(6, 8), (9, 4)]), ([8, 8], [(6, 8)]), ([8, 8, 4], [(6, 8), (3, 4)])], ids=str)
@pytest.mark.parametrize("pool", ["token", "mean"])
def test_equal_sizes_share_a_forward(sizes, forwards, pool):
    """One call of the backbone a size, one of the head; what comes out is that of each view alone."""
    net = randomised(DINO(HEAD, pool=pool, **TINY))
    crops = [numbers(3, 1, size, size, seed=v) for v, size in enumerate(sizes)]
    seen, heads = [], []
    net.backbone.register_forward_pre_hook(lambda _, x: seen.append((len(x[0]), x[0].shape[-1])))
    net.head.register_forward_pre_hook(lambda _, x: heads.append(len(x[0])))
    logits, features = net(crops)
    assert seen == forwards and heads == [3 * len(sizes)]
    assert logits.shape == (len(sizes), 3, 7) and features.shape == (len(sizes), 3, 12)
    for v, crop in enumerate(crops):
        alone = net.backbone(crop)
        assert torch.allclose(features[v], alone, atol=1e-5)
        assert torch.allclose(logits[v], net.head(alone), atol=1e-5)


def test_only_the_student_drops_paths():
    flags = "--data digits8x8 --depth 3 --set img_size=8 patch_size=2 local_size=4 drop_path=.5"
    args = train_dino.get_args(flags.split())
    student, teacher, *_ = train_dino.build_model(args, SimpleNamespace(in_chans=1))
    assert [block.drop_path for block in student.backbone.blocks] == [0, 0.25, 0.5]
    assert [block.drop_path for block in teacher.backbone.blocks] == [0, 0, 0]
    crops = [torch.randn(16, 1, 8, 8)] * 2
    assert student.training and not torch.equal(student(crops)[0], student(crops)[0])
    assert torch.equal(student.eval()(crops)[0], teacher(crops)[0])
    assert not any(p.requires_grad for p in teacher.parameters())


def test_drop_path_defaults_follow_the_shortcut():
    choices = ("", "--skipless", "--shortcut decayed", "--set drop_path=0")
    found = [train_dino.get_args([*PAPER, *flags.split()]).drop_path for flags in choices]
    assert found == [0.1, 0, 0, 0]


# ----------------------------------------------------------------------------------------------------
# features of the patches

@pytest.mark.parametrize("shortcut", ["residual", "skipless"])
def test_patch_tokens_against_hooks(shortcut):
    """Tokens after each block, and the thirds of what each qkv layer puts out, in the order asked for, on
    images larger than the net was made for."""
    net = randomised(ViT(num_classes=0, shortcut=shortcut, **TINY)).eval()
    x, outputs, thirds, hooks = numbers(2, 1, 12, 10), {}, {}, []             # 6 x 5 patches
    for l, block in enumerate(net.blocks, 1):
        for module, found in ((block, outputs), (block.attn.qkv, thirds)):
            keep = lambda _module, _x, y, l=l, found=found: found.update({l: y})
            hooks.append(module.register_forward_hook(keep))
    net(x)
    for hook in hooks:
        hook.remove()
    order = [3, 1, 2]
    normed, raw = patch_tokens(net, x, order), patch_tokens(net, x, order, norm=False)
    for l, token, bare in zip(order, normed, raw):
        assert torch.equal(bare, outputs[l][:, 1:])
        y = outputs[l][:, 1:].double()
        variance = y.var(-1, correction=0, keepdim=True)
        y = (y - y.mean(-1, keepdim=True)) / (variance + 1e-6).sqrt() * net.norm.weight + net.norm.bias
        assert token.shape == (2, 30, 12) and torch.allclose(token.double(), y, atol=1e-4)
    assert torch.equal(patch_tokens(net, x, [0], norm=False)[0], net.embed(x)[:, 1:])
    for i, feature in enumerate(("query", "key", "value")):
        for l, found in zip((2, 3), patch_tokens(net, x, [2, 3], feature)):
            assert torch.allclose(found, thirds[l][:, 1:, 12 * i:12 * (i + 1)], atol=1e-6), feature
    keys = net.blocks[1].attn.heads(net.blocks[1].norm1(outputs[1]))[1]       # (B, H, N, d)
    side_by_side = keys.transpose(1, 2).flatten(2)[:, 1:]
    assert torch.allclose(patch_tokens(net, x, [2], "key")[0], side_by_side, atol=1e-6)


def test_patch_tokens_runs_no_block_too_many():
    net, ran = ViT(num_classes=0, **TINY), []
    for l, block in enumerate(net.blocks, 1):
        block.register_forward_hook(lambda *_, l=l: ran.append(l))
    x = torch.zeros(1, 1, 8, 8)
    for layers, feature, expected in (([2], "token", [1, 2]), ([2], "key", [1]), ([1], "value", []),
                                      ([1, 3], "query", [1, 2]), ([0], "token", []),
                                      ([2, 2], "token", [1, 2])):
        ran.clear()
        assert len(patch_tokens(net, x, layers, feature)) == len(layers) and ran == expected


@pytest.mark.parametrize("layers, feature, words", [
    ([4], "token", r"0 \.\. 3"), ([0], "key", r"1 \.\. 3"), ([], "token", r"0 \.\. 3"),
    ([1], "keys", "'keys'")])
def test_patch_tokens_refuses_what_is_not_there(layers, feature, words):
    with pytest.raises(ValueError, match=words):
        patch_tokens(ViT(num_classes=0, **TINY), torch.zeros(1, 1, 8, 8), layers, feature)


def test_patch_tokens_of_other_nets():
    """No final norm where the net has none: the mean pool's ViT, and the paper's MAE encoder."""
    x = torch.randn(2, 1, 8, 8)
    mae = MAE(**dict(TINY, depth=2), decoder_dim=8, decoder_depth=2, decoder_heads=2).eval()
    for net in (ViT(num_classes=0, pool="mean", **TINY), mae):
        last = list(net.layers(x))[-1]
        assert torch.equal(patch_tokens(net, x, [len(net.blocks)])[0], last[:, 1:])


# ----------------------------------------------------------------------------------------------------
# views

def plain(flip=False, channels=3):
    """What MultiCrop asks of a data set, with pixels left in 0..1."""
    return SimpleNamespace(flip=flip, mean=[0.0] * channels, std=[1.0] * channels)


def views_of(image, draws, seed=0, **options):
    """`draws` times the views of an image: tensors (draws, C, S, S), one per view."""
    torch.manual_seed(seed)
    crop = data.MultiCrop(options.pop("data", plain(channels=len(image))), **options)
    return [torch.stack(view) for view in zip(*[crop(image) for _ in range(draws)])]


def share_of(flags):
    return flags.float().mean().item()


@pytest.mark.parametrize("local", [0, 3])
def test_views_of_digits(local):
    """Number, sizes, one channel, and the range of whole pixels 0..255 after normalisation."""
    images = data.load_images("digits8x8")
    views = views_of(images.train[0][0], 20, data=images, global_size=8, local_size=4, local_crops=local)
    assert [tuple(v.shape[1:]) for v in views] == [(1, 8, 8)] * 2 + [(1, 4, 4)] * local
    pixels = torch.cat([v.flatten() for v in views]) * images.std[0] + images.mean[0]
    assert pixels.dtype == torch.float32
    assert -1e-6 <= pixels.min() < 0.1 and 0.8 < pixels.max() <= 1 + 1e-6
    assert (pixels * 255 - (pixels * 255).round()).abs().max() < 1e-3


@pytest.mark.parametrize("large, small", [(224, 4), (48, 2), (8, 1)])
def test_blur_fits_into_the_smallest_views(large, small):
    """Its kernel may not reach beyond a view."""
    for channels in (1, 3):
        image = torch.full((channels, 16, 16), 51, dtype=torch.uint8)
        for view in views_of(image, 6, global_size=large, local_size=small, local_crops=2, color=0)[2:]:
            assert torch.allclose(view, torch.full((6, channels, small, small), 0.2))


def ramp(side=64):
    """Red grows to the right, green downwards, from 0 to 126: a view shows where it was cut.

    Below 128 solarising changes nothing."""
    steps = torch.linspace(0, 126, side).round().to(torch.uint8)
    across = steps.expand(side, side)
    return torch.stack([across, across.T, torch.zeros_like(across)])


@pytest.mark.parametrize("flip", [False, True])
def test_mirrored_only_where_the_data_allows(flip):
    sizes = dict(global_size=32, local_size=16, local_crops=1)
    for view in views_of(ramp(), 60, data=plain(flip), color=0, **sizes):
        mirrored = share_of((view[:, 0, :, -2] < view[:, 0, :, 1]).all(1))
        assert (view[:, 1, -2] > view[:, 1, 1]).all()            # never upside down
        assert 0.25 < mirrored < 0.75 if flip else mirrored == 0


def test_views_show_the_share_of_the_area_that_was_asked_for():
    """Read off the ramps: width times height of what is seen, within the two scales and filling them."""
    scales = dict(global_scale=(0.5, 0.9), local_scale=(0.1, 0.3))
    views = views_of(ramp(), 60, global_size=32, local_size=32, local_crops=1, color=0, **scales)
    for view, (low, high) in zip(views, [(0.5, 0.9), (0.5, 0.9), (0.1, 0.3)], strict=True):
        seen = (view.flatten(2).amax(2) - view.flatten(2).amin(2))[:, :2] * 255 / 126
        area = seen.prod(1)
        assert low - 0.08 < area.min() < low + 0.12 and high - 0.12 < area.max() < high + 0.08


def test_colour_grey_and_solarise_have_their_probabilities():
    """A surface of one colour stays one; unjittered it keeps its colour, a fifth turns grey, and a fifth
    of the second view alone is solarised (255 - 200 = 55)."""
    colour = torch.tensor([60, 90, 120], dtype=torch.uint8)[:, None, None].expand(3, 8, 8)
    size = dict(global_size=4, local_size=4, local_crops=1)
    for view in views_of(colour, 150, **size):
        assert (view.flatten(2).amax(2) - view.flatten(2).amin(2)).max() < 2 / 255
        grey = share_of((view.amax(1) - view.amin(1)).flatten(1).amax(1) < 0.5 / 255)
        changed = share_of((view - colour[:, :4, :4] / 255).abs().flatten(1).amax(1) > 1.5 / 255)
        assert 0.1 < grey < 0.32 and 0.7 < changed < 0.95        # of .2, and of .8 + .2 * .2
    for view in views_of(colour, 10, color=0, **size):
        assert torch.allclose(view, (colour[:, :4, :4] / 255).expand_as(view))
    bright = torch.full((1, 8, 8), 200, dtype=torch.uint8)
    views = views_of(bright, 150, color=0, **size)
    first, second, local = (view.flatten(1).mul(255).round() for view in views)
    assert (first == 200).all() and (local == 200).all()
    assert set(second.flatten().tolist()) == {55, 200} and 0.1 < share_of(second[:, 0] == 55) < 0.32


def test_blur_has_its_probabilities():
    """Always, a tenth, a half. The whole image is the crop, so what differs from it was blurred; sigma
    below .3 of its .1 .. 2 shows nothing."""
    noise = torch.randint(0, 128, (1, 224, 224), generator=torch.Generator().manual_seed(0))
    noise = noise.to(torch.uint8)
    whole = dict(global_size=224, local_size=224, global_scale=(1, 1), local_scale=(1, 1))
    views = views_of(noise, 50, local_crops=1, color=0, **whole)
    first, second, local = (share_of(((v * 255).round() != noise).flatten(1).any(1)) for v in views)
    assert first > 0.8 and 0 < second < 0.25 and 0.3 < local < 0.65


def test_views_are_a_function_of_seed_epoch_and_sample():
    """Whatever else is in the batch; and the caller's generator is left alone."""
    images = data.load_images("digits8x8")
    images = replace(images, train=images.train.take(torch.arange(10)))
    crop = data.MultiCrop(images, 8, 4, 2)

    def views(positions, seed=0):
        return data.Batches(images.train, crop, seed).__getitems__(positions)[0]

    state = torch.get_rng_state()
    first = views([3, 5, 13])                                    # 13 is sample 3 in the second epoch
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(5)
    again, other = views([13, 3]), views([3, 3], seed=1)
    assert len(first) == 4 and first[2].shape == (3, 1, 4, 4)
    for a, b, c in zip(first, again, other):
        assert torch.equal(a[0], b[1]) and torch.equal(a[2], b[0])
        assert not torch.equal(a[0], a[2]) and not torch.equal(a[0], c[0]) and torch.equal(c[0], c[1])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[2], first[3])


# ----------------------------------------------------------------------------------------------------
# collapse

def monitored(probs, features=None):
    """`collapse_monitors` of probabilities (2, B, K), gathered in two parts as batches would be."""
    features = numbers(2, probs.shape[1], 4) if features is None else features
    parts = [output_sums(p, f) for p, f in zip(probs.chunk(2, 1), features.chunk(2, 1))]
    return collapse_monitors(sum(parts).tolist(), probs.shape[2])


def one_hot(index, K=8):
    return torch.nn.functional.one_hot(torch.tensor(index), K).float().expand(2, -1, -1)


def test_uniform_output_and_one_peak_for_all_tell_nothing():
    uniform, peak = monitored(torch.full((2, 6, 8), 1 / 8)), monitored(one_hot([3] * 6))
    assert uniform["teacher_entropy"] == pytest.approx(math.log(8), rel=1e-6)
    assert peak["teacher_entropy"] == 0
    for found in (uniform, peak):
        assert found["information"] == pytest.approx(0, abs=1e-6)


def test_informative_outputs():
    """Peaks in equal numbers on 4 of 8 outputs tell ln 4 about the image; soft ones of .9 and .1 on two
    outputs tell ln 2 - H(.9)."""
    found = monitored(one_hot([0, 1, 2, 5] * 3))
    assert found["teacher_entropy"] == 0
    assert found["information"] == pytest.approx(math.log(4), rel=1e-6)
    soft = monitored(torch.tensor([[0.9, 0.1], [0.1, 0.9]] * 2).expand(2, -1, -1))
    entropy = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert soft["teacher_entropy"] == pytest.approx(entropy, rel=1e-6)
    assert soft["information"] == pytest.approx(math.log(2) - entropy, rel=1e-6)


def test_feature_std():
    """0 where all features point one way, whatever their length; 1 where no direction is preferred, and
    for two opposite ones."""
    probs, generator = one_hot([0] * 3000), torch.Generator().manual_seed(0)
    length = torch.rand(2, 3000, 1, generator=generator) + 1
    opposite = torch.tensor([[1.0, 0, 0, 0], [-2.0, 0, 0, 0]]).repeat(1500, 1).expand(2, -1, -1)
    for features, expected in ((length * torch.tensor([1.0, -2.0, 0.5, 3.0]), 0),
                               (length * torch.randn(2, 3000, 16, generator=generator), 1), (opposite, 1)):
        assert monitored(probs, features)["feature_std"] == pytest.approx(expected, abs=0.01)
