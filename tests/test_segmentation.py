"""segmentation.py and probe.py seg, cluster: the measures against numbers by hand and scikit-learn, the head against torch's own layers, and the commands as they are used."""
import functools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image

import masks
import model
import probe
import runtime
import segmentation as seg
from runtime import BadInput
from test_runtime import launch_ranks

ONE = runtime.World(0, 1, torch.device("cpu"), "")
HOW = dict(seg.PRESETS["laptop"], lr=3e-3, img_size=16, loss_size=8, batch_size=6, steps=12, seed=0, cache_gb=1.0)
VIT = dict(size="nano", depth=2, img_size=16, patch_size=4, in_chans=3, classes=3, shortcut="residual", alpha_min=1.0, temperature_beta=1.0, pool="token", data="folder")


def rand(*shape, seed=0, kind=torch.randn, **options):
    return kind(*shape, generator=torch.Generator().manual_seed(seed), **options)


def labels(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def vit(depth=2, seed=0, img_size=16):
    """A ViT whose parameters are all random, as zero-initialised branches would hide a wrong layer."""
    torch.manual_seed(seed)
    net = probe.build(VIT | dict(depth=depth, img_size=img_size)).eval()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.add_(0.2 * rand(*p.shape, seed=seed + i))
    return net


def squares(n, side=16, seed=0, ignore=True, stripes=False):
    """Images of three colours, one a class, on a 4 x 4 grid of patches or in 4 stripes, so that a linear head can tell them: a masks.Dense set with a border to ignore."""
    grid = labels(3, n, 4, 1 if stripes else 4, seed=seed).expand(n, 4, 4)
    where = grid.repeat_interleave(side // 4, 1).repeat_interleave(side // 4, 2)
    images = torch.tensor([[220, 20, 20], [20, 220, 20], [20, 20, 220]], dtype=torch.uint8)[where].permute(0, 3, 1, 2).contiguous()
    where = where.to(torch.uint8)
    if ignore:
        where[:, :2] = 255
    return masks.Dense(images, where, [torch.zeros(0, 4)] * n)


def dense(n=20, side=16):
    return masks.DenseData("squares", squares(n, side), squares(7, side, seed=1), ["background", "leaf", "sky"], side, [.5] * 3, [.25] * 3)


# ---------------------------------------------------------------------------------------------------------------- measures
def test_mean_iou_by_hand():
    """Three classes of a 2 x 4 image, one pixel ignored; of the fourth there is none, in truth or prediction, so it does not count."""
    truth = torch.tensor([[0, 0, 0, 1], [1, 2, 2, 255]])
    called = torch.tensor([[0, 0, 1, 1], [0, 2, 1, 3]])
    matrix = seg.confusion(called, truth, 4)
    assert matrix.tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]] and matrix.dtype == torch.int64
    assert seg.iou(matrix)[:3].tolist() == pytest.approx([2 / 4, 1 / 4, 1 / 2]) and seg.iou(matrix)[3].isnan()
    assert probe.mean_iou(matrix) == pytest.approx((2 / 4 + 1 / 4 + 1 / 2) / 3) and seg.pixel_accuracy(matrix) == pytest.approx(4 / 7)
    called[0, 0] = 3                                              # now the fourth is predicted, and never right
    assert probe.mean_iou(seg.confusion(called, truth, 4)) == pytest.approx((1 / 4 + 1 / 4 + 1 / 2 + 0) / 4)
    assert seg.constant(matrix, 1).tolist() == [[0, 3, 0, 0], [0, 2, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0]]
    assert seg.mean_iou(seg.constant(matrix, 1)) == pytest.approx((0 + 2 / 7 + 0) / 3)
    assert math.isnan(probe.mean_iou(torch.zeros(3, 3, dtype=torch.int64)))


def test_confusion_equals_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    truth, called = labels(5, 3, 20, 20), labels(5, 3, 20, 20, seed=1)
    assert seg.confusion(called, truth, 5).tolist() == metrics.confusion_matrix(truth.flatten(), called.flatten(), labels=range(5)).tolist()
    jaccard = metrics.jaccard_score(truth.flatten(), called.flatten(), average="macro")
    assert seg.mean_iou(seg.confusion(called, truth, 5)) == pytest.approx(jaccard, abs=1e-12)


def test_what_is_ignored_is_not_counted_and_other_labels_are_refused():
    truth, called = labels(4, 9, 9), labels(4, 9, 9, seed=1)
    cut = truth.clone()
    cut[2:6] = 255
    seen = torch.cat([torch.arange(2), torch.arange(6, 9)])
    assert torch.equal(seg.confusion(called, cut, 4), seg.confusion(called[seen], truth[seen], 4))
    assert torch.equal(seg.confusion(called, truth.masked_fill(truth == 3, 7), 3 + 1, ignore=7), seg.confusion(called, truth.masked_fill(truth == 3, 255), 4))
    for pred, target in ((called, truth + 1), (called + 1, truth), (called - 1, truth)):
        with pytest.raises(ValueError, match="outside 0 .. 3"):
            seg.confusion(pred, target, 4)


# -------------------------------------------------------------------------------------------------------------------- head
@pytest.mark.parametrize("grid, size", [((2, 3), (8, 12)), ((3, 2), (7, 5)), ((4, 4), (2, 2)), ((1, 1), (3, 3))])
def test_bilinear_logits(grid, size):
    tokens = rand(2, grid[0] * grid[1], 5, dtype=torch.float64).float()
    truth = F.interpolate(tokens.mT.reshape(2, 5, *grid), size=size, mode="bilinear", align_corners=False)
    assert torch.allclose(seg.upsample(tokens, grid, size), truth, atol=1e-6)


def test_bilinear_logits_by_hand():
    """Two patches 0 and 4 over four pixels: their centres lie at 1/4 and 3/4, so the pixels are 0, 1, 3, 4, the outer ones held."""
    assert seg.upsample(torch.tensor([[[0.0], [4.0]]]), (1, 2), (1, 4)).flatten().tolist() == pytest.approx([0, 1, 3, 4])


def test_the_head_is_batch_norm_and_a_linear_layer():
    head, norm = seg.Head(6, 3, batch_norm=True), nn.BatchNorm1d(6)
    with torch.no_grad():
        for p, own, seed in ((norm.weight, head.weight, 1), (norm.bias, head.bias, 2)):
            p.copy_(rand(6, seed=seed))
            own.copy_(p)
    reference = nn.Sequential(norm, head.linear)
    for step in range(3):
        x = 3 + 2 * rand(4, 5, 6, seed=step)
        a, b = head(x), reference(x.flatten(0, 1)).view(4, 5, 3)
        assert torch.allclose(a, b, atol=1e-5)
        got, truth = (torch.autograd.grad(y.square().sum(), [first, second, head.linear.weight], retain_graph=True) for y, first, second in ((a, head.weight, head.bias), (b, norm.weight, norm.bias)))
        assert all(torch.allclose(g, t, rtol=1e-3, atol=1e-3) for g, t in zip(got, truth))
    assert torch.allclose(head.mean, norm.running_mean, atol=1e-5) and torch.allclose(head.var, norm.running_var, atol=1e-5)
    assert torch.allclose(head.eval()(x), reference.eval()(x.flatten(0, 1)).view(4, 5, 3), atol=1e-5)


@pytest.mark.parametrize("opt, schedule", [("sgd", "step"), ("adamw", "cosine")])
def test_training_equals_torch_by_hand(opt, schedule):
    """Ten steps of two heads side by side are those of a 1 x 1 convolution, F.interpolate and cross-entropy that ignores 255, in a loop of its own."""
    how = HOW | dict(opt=opt, schedule=schedule, lr=.05, weight_decay=.1, steps=10, batch_norm=False)
    batches = [([rand(3, 4, 5, seed=i), rand(3, 4, 2, seed=i + 50)], labels(3, 3, 8, 8, seed=i).masked_fill(rand(3, 8, 8, seed=i) > 1, 255)) for i in range(10)]
    heads, losses = seg.train_heads([(2,), (7, 2)], [2, 7], batches, 3, how, ONE)
    for head, pick, loss in zip(heads, (lambda t: t[0], lambda t: torch.cat([t[1], t[0]], -1)), losses):
        start = seg.Head(pick(batches[0][0]).shape[-1], 3, seed=0).linear
        conv = nn.Conv2d(start.in_features, 3, 1)
        conv.load_state_dict(dict(weight=start.weight[:, :, None, None], bias=start.bias))
        optimizer = torch.optim.SGD(conv.parameters(), momentum=.9, weight_decay=.1, lr=1) if opt == "sgd" else torch.optim.AdamW(conv.parameters(), weight_decay=.1, lr=1)
        for step, (tokens, target) in enumerate(batches):
            optimizer.param_groups[0]["lr"] = .05 * (1 if step < 8 else .1) if schedule == "step" else .05 * (1 + math.cos(math.pi * step / 10)) / 2
            logits = F.interpolate(conv(pick(tokens).mT.unflatten(2, (2, 2))), size=(8, 8), mode="bilinear", align_corners=False)
            value = F.cross_entropy(logits, target, ignore_index=255)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        assert torch.allclose(head.linear.weight, conv.weight[:, :, 0, 0], atol=1e-5) and torch.allclose(head.linear.bias, conv.bias, atol=1e-5)
        assert loss == pytest.approx(value.item(), abs=1e-5)


def test_a_batch_in_which_all_is_ignored_moves_nothing():
    how = HOW | dict(opt="sgd", weight_decay=0.0, batch_norm=False, steps=1)
    heads, losses = seg.train_heads([(1,)], [1], [([rand(2, 4, 5)], torch.full((2, 8, 8), 255))], 3, how, ONE)
    assert losses == [0] and torch.equal(heads[0].linear.weight, seg.Head(5, 3).linear.weight)


def test_a_loss_that_is_not_finite_stops_with_a_sentence():
    with pytest.raises(BadInput, match="head on layer 3 is not finite at step 0: lower --lr"):
        seg.train_heads([(1,), (3,)], [1, 3], [([rand(2, 4, 5), rand(2, 4, 5) * math.inf], labels(3, 2, 8, 8))], 3, HOW | dict(steps=1), ONE)


# ------------------------------------------------------------------------------------------------------ the probe as a whole
@functools.cache
def probed(groups=((2,), (1, 2)), **changes):
    return seg.probe(vit(), dense(), groups, HOW | dict(changes), ONE)


def test_what_is_linearly_separable_is_segmented_without_a_fault():
    """In stripes, as where three patches meet, bilinear logits cannot follow the corner."""
    part = dense()
    part.train, part.val = squares(20, stripes=True), squares(7, seed=1, stripes=True)
    rows = seg.probe(vit(), part, [(0,), (1, 2)], HOW | dict(steps=100, lr=.03), ONE)[0]
    assert [row["layers"] for row in rows] == [[0], [1, 2]] and [row["miou"] for row in rows] == [1, 1] and rows[0]["iou"] == [1, 1, 1]
    assert np.sum(rows[0]["confusion"]) == 7 * 14 * 16             # of 16 rows two are ignored


def test_features_in_memory_or_per_batch_and_heads_alone_or_together_are_the_same():
    together, heads, cached = probed()
    again, others, no = probed(cache_gb=0.0)
    assert cached and not no
    for a, b in zip(heads, others):
        assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    alone, (head,), _ = probed(groups=((1, 2),))
    assert torch.allclose(head.linear.weight, heads[1].linear.weight, atol=1e-6) and alone[0]["confusion"] == together[1]["confusion"]


def test_one_matrix_over_the_set_not_a_mean_over_images():
    rows, heads, _ = probed()
    part, net, total = dense(), vit(), torch.zeros(3, 3, dtype=torch.int64)
    for i in range(7):
        x = (part.val.images[i:i + 1].float() / 255 - .5) / .25
        with torch.no_grad():
            tokens = model.patch_tokens(net, x, [1, 2])
            logits = F.interpolate(heads[1](torch.cat(tokens, -1)).mT.unflatten(2, (4, 4)), size=(16, 16), mode="bilinear", align_corners=False)
        for t, p in zip(part.val.masks[i].flatten().tolist(), logits.argmax(1).flatten().tolist()):
            if t != 255:
                total[t, p] += 1
    assert rows[1]["confusion"] == total.tolist()


def test_masks_of_all_sizes_count_at_their_own():
    heads, tokens = [seg.Head(5, 3, seed=1)], rand(3, 4, 5)
    sizes = [(8, 8), (5, 9), (16, 12)]
    found = seg.predict(heads, [(1,)], [1], [tokens], [torch.zeros(size) for size in sizes])[0]
    for i, (size, pred) in enumerate(zip(sizes, found)):
        alone = seg.predict(heads, [(1,)], [1], [tokens[i:i + 1]], torch.zeros(1, *size))[0]
        assert pred.shape == size and torch.equal(pred, alone[0])


def test_crops_and_flips_move_the_mask_with_the_image():
    """Where red is class 0, green 1 and blue 2, they still are after augmentation, up to a pixel at the border; the same position gives the same crop."""
    part = dense(side=64)
    part.train = squares(20, 64, ignore=False)
    pairs = seg.Pairs(part.train, part, 64, 64, augment=True, seed=3)
    state = torch.get_rng_state()
    x, y = pairs.__getitems__(list(range(20)))
    again, other = pairs.__getitems__(list(range(20)))[0], pairs.__getitems__(list(range(20, 40)))[0]
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(x, again) and not torch.equal(x, other)
    assert (x.argmax(1) == y).float().mean() > .97 and not torch.equal(y, part.train.masks.long())
    plain, where = seg.Pairs(part.train, part, 32, 16).__getitems__([4, 24])
    assert torch.equal(plain[0], plain[1]) and torch.equal(plain.argmax(1)[:, 1::2, 1::2], where)


def test_a_label_without_a_class_is_refused():
    part = dense()
    part.train.masks[3, 5, 5] = 3
    with pytest.raises(BadInput, match="the mask of image 3 has label 3, but there are 3 classes: labels must be 0 .. 2, or 255"):
        seg.probe(vit(), part, [(2,)], HOW, ONE)


def test_multi_scale_layers_are_evenly_spaced():
    assert [seg.multi_scale(n) for n in (12, 24, 9, 10, 6, 2, 1)] == [(3, 6, 9, 12), (6, 12, 18, 24), (3, 5, 7, 9), (3, 5, 8, 10), (2, 3, 5, 6), (1, 2), (1,)]


# ---------------------------------------------------------------------------------------------------------------- clusters
def test_hungarian_matching_by_hand():
    """Cluster 0 is class 2, 1 is 0, 2 is 1; greedy matching (class 0 takes cluster 2 with 6) would lose. Cluster 3 is left over."""
    matrix = torch.tensor([[0, 5, 6, 1], [0, 0, 5, 3], [7, 0, 0, 0]])
    pytest.importorskip("scipy")
    to, matched = seg.match(matrix)
    assert to.tolist() == [2, 0, 1, 3] and matched.tolist() == [[5, 6, 0, 1], [0, 5, 0, 3], [0, 0, 7, 0]]
    assert seg.mean_iou(matched) == pytest.approx((5 / 12 + 5 / 14 + 1) / 3)
    to, matched = seg.match(matrix, "majority")
    assert to.tolist() == [2, 0, 1, 1] and matched.tolist() == [[5, 7, 0, 0], [0, 8, 0, 0], [0, 0, 7, 0]]
    assert seg.match(matrix[:, :2])[1].tolist() == [[5, 0, 0, 0], [0, 0, 0, 0], [0, 0, 7, 0]]      # fewer clusters than classes: one is never called


@pytest.mark.parametrize("clusters, seeds", [(3, [0]), (3, [4, 5, 6]), (5, [0, 1])])
def test_blobs_are_found_under_any_names(clusters, seeds, monkeypatch):
    pytest.importorskip("sklearn")
    pytest.importorskip("scipy")
    part = dense()
    centres = torch.tensor([[0., 5, 0], [5, 0, 0], [0, 0, 5]])
    grid = part.val.masks.clone().long()[:, 3::4, 3::4]
    tokens = (centres[grid].flatten(1, 2) + .01 * rand(7, 16, 3)) * (1 + rand(7, 16, 1, kind=torch.rand))       # of any length: only directions count
    monkeypatch.setattr(seg, "token_batches", lambda *_: iter([([tokens], part.val.masks.long())]))
    how = dict(img_size=16, eval_size=0, batch_size=7, clusters=clusters, seeds=seeds, leftover="majority")
    (row,), (found,) = seg.cluster(vit(), part, part.val, [(2,)], how, torch.device("cpu"))
    assert row["miou"] == row["pixel_accuracy"] == 1 and row["trials"] == [1.0] * len(seeds) and torch.equal(found, grid)


# ------------------------------------------------------------------------------------------------------------- the command
def folder(path, n=(12, 6)):
    """squares as images/ and masks/ of train and val, with images of two shapes."""
    for split, count, seed in (("train", n[0], 0), ("val", n[1], 1)):
        part = squares(count, 16, seed=seed)
        for kind in ("images", "masks"):
            (path / kind / split).mkdir(parents=True)
        for i in range(count):
            wide = 1 + i % 2
            Image.fromarray(part.images[i].permute(1, 2, 0).repeat_interleave(wide, 1).numpy()).save(path / "images" / split / f"{i}.png")
            Image.fromarray(part.masks[i].repeat_interleave(wide, 1).numpy()).save(path / "masks" / split / f"{i}.png")
    return path


def save(path, depth=2, args=None, net=None):
    path.mkdir(parents=True, exist_ok=True)
    net = net or vit(depth)
    runtime.save_checkpoint(path / "ckpt.pt", dict(model=net.state_dict(), ema=None, optimizer={}, step=3, best=0.0, rng=torch.get_rng_state(), args=VIT | dict(depth=depth) | (args or {})))
    return path


@pytest.fixture
def run(tmp_path):
    return save(tmp_path / "run"), str(folder(tmp_path / "set"))


def command(what, *flags):
    head = ["--steps", "6", "--batch-size", "6"] if what == "seg" else ["--seeds", "1"]
    probe.main([what, "--device", "cpu", "--threads", "1", *head, *map(str, flags)])


def record(path, name="seg"):
    return json.loads((path / f"{name}.json").read_text())


def test_seg_by_layer(run, tmp_path, capsys):
    ckpt, where = run
    command("seg", "--ckpt", ckpt, "--data", where, "--layers", "all", "--steps", 40)
    printed, result = capsys.readouterr().out, record(ckpt)
    rows, protocol = result["checkpoints"][0]["rows"], result["checkpoints"][0]["protocol"]
    assert [row["layers"] for row in rows] == [[1], [2], [1, 2]] == protocol["layers"]
    assert (protocol["img_size"], protocol["steps"], protocol["opt"], protocol["norm"], protocol["features"]) == (16, 40, "adamw", "final LayerNorm", "in memory")
    best = max(rows[:2], key=lambda row: row["miou"])
    assert printed.splitlines()[-1] == f"mIoU {100 * best['miou']:.1f} % (single, layer {best['layers'][0]}), {100 * rows[2]['miou']:.1f} % (multi, layers 1 2)"
    # pixels of all validation images at their own size: three of 16 x 16 and three of 16 x 32, two rows of 16 ignored
    assert all(np.sum(row["confusion"]) == 3 * 14 * 16 + 3 * 14 * 32 for row in rows)
    truth = np.sum(rows[0]["confusion"], 1)
    base = result["checkpoints"][0]["baseline"]
    assert base["miou"] == pytest.approx(truth[0] / truth.sum() / 3) and base["pixel_accuracy"] == pytest.approx(truth[0] / truth.sum())
    assert f"mIoU {100 * base['miou']:.1f} %" in printed and "adamw lr 0.01" in printed and "40 steps of 6" in printed
    for picture in ("seg.png", "seg_examples.png"):
        assert Image.open(ckpt / picture).size[0] > 500
    command("seg", "--ckpt", ckpt, save(tmp_path / "deep", 3), "--data", where, "--multi", "none", "--out", tmp_path / "both")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[-2:]] == ["run", "deep"] and not (tmp_path / "both" / "seg.png").exists() and "multi" not in printed[-1]


def test_depth_is_a_model_of_so_many_blocks(run, tmp_path):
    ckpt, where = run
    deep = vit(5, seed=9)
    short = vit(3)
    short.load_state_dict({k: v for k, v in deep.state_dict().items() if not k.startswith(("blocks.3", "blocks.4"))})
    for what, name in (("seg", "seg"), ("cluster", "cluster")):
        if what == "cluster":
            pytest.importorskip("sklearn")
        command(what, "--ckpt", save(tmp_path / "deep", 5, net=deep), "--data", where, "--depth", 3, "--layers", "all")
        command(what, "--ckpt", save(tmp_path / "short", 3, net=short), "--data", where, "--layers", "all")
        one, two = (record(tmp_path / run, name)["checkpoints"][0]["rows"] for run in ("deep", "short"))
        assert [row["layers"] for row in one] == [[1], [2], [3], [1, 2, 3]] and one == two
    command("seg", "--ckpt", tmp_path / "deep", "--data", where)
    assert record(tmp_path / "deep")["checkpoints"][0]["rows"][0]["miou"] != one[2]["miou"]


@pytest.mark.parametrize("flags", [[], ["--augment", "--opt", "sgd", "--eval-size", "10"], ["--no-batch-norm", "--cache-gb", "0"]])
def test_two_ranks_give_the_head_of_one(run, tmp_path, flags):
    ckpt, where = run
    flags = ["seg", "--device", "cpu", "--threads", "1", "--steps", "8", "--batch-size", "5", "--ckpt", str(ckpt), "--data", where, *flags]
    probe.main([*flags, "--out", str(tmp_path / "one")])
    codes, outputs = launch_ranks(2, probe.main, [*flags, "--out", str(tmp_path / "two")], folder=tmp_path)
    assert codes == [0, 0], outputs
    assert "mIoU" in outputs[0] and not outputs[1]
    one, two = (record(tmp_path / n)["checkpoints"][0]["rows"] for n in ("one", "two"))
    for a, b in zip(one, two):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["miou"] == pytest.approx(b["miou"], abs=.005) and np.sum(a["confusion"]) == np.sum(b["confusion"])


def heads_on_rank(path):
    world = runtime.start("cpu")
    heads = seg.probe(vit(), dense(), [(2,), (1, 2)], HOW | dict(batch_size=7), world)[1]
    torch.save([head.state_dict() for head in heads], f"{path}-{world.rank}.pt")


def test_two_ranks_give_the_weights_of_one(tmp_path):
    """With batches of 7 the ranks' shares differ, so a mean of means would show."""
    codes, outputs = launch_ranks(2, heads_on_rank, str(tmp_path / "head"), folder=tmp_path)
    assert codes == [0, 0], outputs
    alone = probed(batch_size=7)[1]
    for rank in range(2):
        for head, state in zip(alone, torch.load(tmp_path / f"head-{rank}.pt", weights_only=True)):
            assert all(torch.allclose(value, state[key], atol=2e-4) for key, value in head.state_dict().items())


def test_cluster(run, capsys):
    pytest.importorskip("sklearn")
    ckpt, where = run
    command("cluster", "--ckpt", ckpt, "--data", where, "--layers", 0, 2, "--clusters", 4, "--seeds", 3)
    printed, result = capsys.readouterr().out, record(ckpt, "cluster")
    rows = result["checkpoints"][0]["rows"]
    assert [row["layers"] for row in rows] == [[0], [2], [1, 2]] and all(len(row["trials"]) == 3 and row["miou"] == sorted(row["trials"])[1] for row in rows)
    assert "4 clusters" in printed and "left over are wrong" in printed and printed.splitlines()[-1].startswith("mIoU ") and "(multi, layers 1 2)" in printed
    assert (ckpt / "cluster.png").exists() and (ckpt / "cluster_examples.png").exists()


def test_without_scikit_learn_only_cluster_is_missing(run, monkeypatch, capsys):
    """Without scikit-learn `cluster` says what to install before it computes anything, and `seg` does not miss it."""
    ckpt, where = run
    monkeypatch.setitem(__import__("sys").modules, "sklearn.cluster", None)
    with pytest.raises(BadInput, match="probe.py cluster needs the package sklearn: pip install scikit-learn$"):
        command("cluster", "--ckpt", ckpt, "--data", "nowhere")
    command("seg", "--ckpt", ckpt, "--data", where)


@pytest.mark.parametrize("flags, words", [
    (["--ckpt", "missing.pt"], "--ckpt missing.pt is not a file: give"),
    (["--data", "nowhere"], "--data 'nowhere' is neither a folder nor"),
    (["--img-size", "18"], "--img-size 18 does not suit .* patch size 4"),
    (["--depth", "3"], "--depth 3: .* has 2 blocks: cut it"),
    (["--layers", "3"], "--layers 3 --multi auto: .* has layers 0 .. 2: name some"),
    (["--depth", "1", "--layers", "2"], "--layers 2 .* has layers 0 .. 1: .* or raise --depth 1"),
    (["--multi", "1", "auto"], "--multi 1 auto: auto and none stand alone"),
    (["--multi", "none", "1"], "--multi none 1: auto and none stand alone"),
    (["--steps", "5", "--epochs", "3"], "--steps 5 and --epochs 3 both say how long"),
    (["--classes", "171"], "--classes 171 has no effect on set, only on COCO-Stuff"),
    (["--data", "BLANK"], "no pixel of the validation masks of blank has a label"),
    (["--ckpt", "GREY"], "--data .* has images of 3 channels and .*grey takes 1"),
    (["--ckpt", "FLOW"], "--ckpt .*flow is a flow model.*: give a run of train_vit.py"),
    (["--out", "RUN/ckpt.pt/x"], "--out .* cannot be written .*: choose a folder"),
    (["--batch-size", "50"], "--batch-size 50 is larger than the training set of 12 images"),
    (["--layers", "first"], "argument --layers: invalid layer value: 'first'"),
    (["--lr", "0"], "argument --lr: 0 must be above 0"),
])
def test_wrong_input_gets_one_sentence(run, tmp_path, flags, words, capsys):
    ckpt, where = run
    if "GREY" in flags:
        save(tmp_path / "grey", args=dict(in_chans=1), net=probe.build(VIT | dict(in_chans=1)))
    if "FLOW" in flags:
        kwargs = dict(input_size=8, patch_size=4, in_chans=3, num_classes=10, embed_dim=32, depth=2, num_heads=2)
        save(tmp_path / "flow", net=model.SiT(**kwargs), args=dict(kind="sit", backbone="sit", model=kwargs, img_size=8))
    if "BLANK" in flags:
        for path in (folder(tmp_path / "blank") / "masks" / "val").iterdir():
            Image.fromarray(np.full_like(np.array(Image.open(path)), 255)).save(path)
    names = dict(RUN=ckpt, GREY=tmp_path / "grey", FLOW=tmp_path / "flow", BLANK=tmp_path / "blank")
    flags = [functools.reduce(lambda text, name: text.replace(name, str(names[name])), names, flag) for flag in flags]
    with pytest.raises(SystemExit) as stopped:
        runtime.run(lambda: command("seg", *([] if "--ckpt" in flags else ["--ckpt", ckpt]), *([] if "--data" in flags else ["--data", where]), *flags))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    with pytest.raises(BadInput, match=words):
        raise BadInput(error.removeprefix("error: "))
    assert not (ckpt / "seg.json").exists()


def test_the_paper_protocol_is_the_published_one():
    args = probe.get_args(["seg", "--ckpt", "x", "--preset", "paper", "--lr", "0.02"])
    assert (args.img_size, args.loss_size, args.eval_size, args.opt, args.weight_decay, args.batch_size, args.schedule, args.augment) == (448, 100, 100, "sgd", 1e-4, 60, "step", True)
    assert args.lr == .02 and seg.PRESETS["paper"]["lr"] == .01 and seg.PRESETS["paper"]["epochs"] == 25
    assert [seg.SCHEDULES["step"](epoch, 25, .01) for epoch in (0, 19, 20, 24)] == pytest.approx([.01, .01, .001, .001])
