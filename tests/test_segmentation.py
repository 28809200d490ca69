"""evals/segmentation.py: measures by hand and scikit-learn, the head against torch's layers, clusters,
and the two commands as they are used."""
import functools
import json
import math
import re

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image

import model
import runtime
from evals import dense_data
from evals import segmentation as seg
from runtime import BadInput
from test_probe import make_flow, make_vit, save_run
from test_runtime import launch_ranks

ONE = runtime.World(0, 1, torch.device("cpu"), "")
HOW = dict(seg.PRESETS["laptop"], lr=3e-3, img_size=16, loss_size=8, batch_size=6, steps=12)


def rand(*shape, seed=0, kind=torch.randn, **options):
    return kind(*shape, generator=torch.Generator().manual_seed(seed), **options)


def labels(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def vit(depth=2, seed=0, **kwargs):
    return make_vit(seed, img_size=16, in_chans=3, num_classes=3, depth=depth, **kwargs)[0]


def squares(n, side=16, seed=0, ignore=True, stripes=False):
    """A Dense set of three colours, one a class, on a 4 x 4 grid or in 4 stripes, a border to ignore."""
    grid = labels(3, n, 4, 1 if stripes else 4, seed=seed).expand(n, 4, 4)
    where = grid.repeat_interleave(side // 4, 1).repeat_interleave(side // 4, 2)
    colours = torch.tensor([[220, 20, 20], [20, 220, 20], [20, 20, 220]], dtype=torch.uint8)
    images = colours[where].permute(0, 3, 1, 2).contiguous()
    where = where.to(torch.uint8)
    if ignore:
        where[:, :2] = 255
    return dense_data.Dense(images, where, [torch.zeros(0, 4)] * n)


def dense(n=20, side=16):
    names = ["background", "leaf", "sky"]
    train, val = squares(n, side), squares(7, side, seed=1)
    return dense_data.DenseData("squares", train, val, names, side, [.5] * 3, [.25] * 3)


# -------------------------------------------------------------------------------------------------------
# measures
def test_a_confusion_matrix_by_hand():
    """Three classes of a 2 x 4 image, one pixel ignored; of the fourth there is none."""
    truth = torch.tensor([[0, 0, 0, 1], [1, 2, 2, 255]])
    called = torch.tensor([[0, 0, 1, 1], [0, 2, 1, 3]])
    matrix = seg.confusion_matrix(called, truth, 4)
    assert matrix.tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert matrix.dtype == torch.int64 and seg.pixel_accuracy(matrix) == pytest.approx(4 / 7)
    assert seg.score_matrix(matrix)["miou"] == pytest.approx((2 / 4 + 1 / 4 + 1 / 2) / 3)
    called[0, 0] = 3                                    # now the fourth is predicted, and never right
    matrix = seg.confusion_matrix(called, truth, 4)
    assert seg.score_matrix(matrix)["miou"] == pytest.approx((1 / 4 + 1 / 4 + 1 / 2 + 0) / 4)


def test_confusion_equals_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    truth, called = labels(5, 3, 20, 20), labels(5, 3, 20, 20, seed=1)
    matrix = seg.confusion_matrix(called, truth, 5)
    flat = truth.flatten(), called.flatten()
    assert matrix.tolist() == metrics.confusion_matrix(*flat, labels=range(5)).tolist()
    jaccard = metrics.jaccard_score(*flat, average="macro")
    assert seg.score_matrix(matrix)["miou"] == pytest.approx(jaccard, abs=1e-12)


def test_what_is_ignored_is_not_counted():
    truth, called = labels(4, 9, 9), labels(4, 9, 9, seed=1)
    cut = truth.clone()
    cut[2:6] = 255
    seen = torch.cat([torch.arange(2), torch.arange(6, 9)])
    expected = seg.confusion_matrix(called[seen], truth[seen], 4)
    assert torch.equal(seg.confusion_matrix(called, cut, 4), expected)


# -------------------------------------------------------------------------------------------------------
# head
def test_bilinear_logits_by_hand():
    """Two patches 0 and 4 over four pixels: centres at 1/4 and 3/4, the outer pixels held."""
    logits = torch.tensor([0.0, 4.0]).view(1, 1, 1, 2)
    assert seg.pixel_logits(logits, (1, 4)).flatten().tolist() == pytest.approx([0, 1, 3, 4])
    head, tokens = seg.make_head(5, 3, batch_norm=False), rand(2, 4, 5)
    grid = seg.patch_logits(head, tokens)               # row by row
    assert torch.allclose(grid[:, :, 1, 0], head(tokens[:, 2]))


@pytest.mark.parametrize("opt, schedule", [("sgd", "step"), ("adamw", "cosine")])
def test_training_equals_torch_by_hand(opt, schedule):
    """Ten steps of two heads side by side are those of a 1 x 1 convolution in a loop of its own."""
    how = HOW | dict(opt=opt, schedule=schedule, lr=.05, weight_decay=.1, steps=10, batch_norm=False)
    batches = []
    for i in range(10):
        masks = labels(3, 3, 8, 8, seed=i).masked_fill(rand(3, 8, 8, seed=i) > 1, 255)
        batches.append(([rand(3, 4, 5, seed=i), rand(3, 4, 2, seed=i + 50)], masks))
    heads, losses = seg.train_heads([(2,), (7, 2)], [2, 7], batches, 3, how, "cpu")
    for head, group, loss in zip(heads, [(2,), (7, 2)], losses):
        start = seg.make_head(7 if len(group) == 2 else 5, 3, batch_norm=False)[1]
        conv = nn.Conv2d(start.in_features, 3, 1)
        conv.load_state_dict(dict(weight=start.weight[:, :, None, None], bias=start.bias))
        optimizer = torch.optim.AdamW(conv.parameters(), weight_decay=.1, lr=1)
        if opt == "sgd":
            optimizer = torch.optim.SGD(conv.parameters(), momentum=.9, weight_decay=.1, lr=1)
        for step, (tokens, target) in enumerate(batches):
            lr = .05 * (1 if step < 8 else .1)
            if schedule == "cosine":
                lr = .05 * (1 + math.cos(math.pi * step / 10)) / 2
            optimizer.param_groups[0]["lr"] = lr
            x = torch.cat([tokens[1], tokens[0]], -1) if len(group) == 2 else tokens[0]
            logits = F.interpolate(conv(x.mT.unflatten(2, (2, 2))), size=(8, 8), mode="bilinear")
            value = F.cross_entropy(logits, target, ignore_index=255)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        assert torch.allclose(head[1].weight, conv.weight[:, :, 0, 0], atol=1e-5)
        assert torch.allclose(head[1].bias, conv.bias, atol=1e-5)
        assert loss == pytest.approx(value.item(), abs=1e-5)


def test_a_batch_in_which_all_is_ignored_moves_nothing():
    how = HOW | dict(opt="sgd", weight_decay=0.0, batch_norm=False, steps=1)
    batches = [([rand(2, 4, 5)], torch.full((2, 8, 8), 255))]
    heads, losses = seg.train_heads([(1,)], [1], batches, 3, how, "cpu")
    assert losses == [0] and torch.equal(heads[0][1].weight, seg.make_head(5, 3, False)[1].weight)


def test_a_loss_that_is_not_finite_stops_with_a_sentence():
    batches = [([rand(2, 4, 5), rand(2, 4, 5) * math.inf], labels(3, 2, 8, 8))]
    with pytest.raises(BadInput, match="head on layer 3 is not finite: lower --lr"):
        seg.train_heads([(1,), (3,)], [1, 3], batches, 3, HOW | dict(steps=1), "cpu")


# -------------------------------------------------------------------------------------------------------
# the probe as a whole
@functools.cache
def probed(groups=((2,), (1, 2)), **changes):
    return seg.linear_segmentation(vit(), dense(), groups, HOW | dict(changes), ONE)


def test_what_is_linearly_separable_is_segmented_without_a_fault():
    """In stripes, as where three patches meet, bilinear logits cannot follow the corner."""
    part = dense()
    part.train, part.val = squares(20, stripes=True), squares(7, seed=1, stripes=True)
    how = HOW | dict(steps=100, lr=.03)
    rows = seg.linear_segmentation(vit(), part, [(0,), (1, 2)], how, ONE)[0]
    assert [row["layers"] for row in rows] == [[0], [1, 2]]
    assert [row["miou"] for row in rows] == [1, 1] and rows[0]["iou"] == [1, 1, 1]
    assert np.sum(rows[0]["confusion"]) == 7 * 14 * 16             # of 16 rows two are ignored


def test_features_in_memory_or_per_batch_and_heads_alone_or_together_are_the_same():
    rows, heads = probed()
    others, (head,) = probed(cache_gb=0.0)[1], probed(groups=((1, 2),))[1]
    for a, b in zip(heads, others):
        for x, y in zip(a.state_dict().values(), b.state_dict().values()):
            assert torch.allclose(x, y, atol=1e-6)
    assert torch.allclose(head[1].weight, heads[1][1].weight, atol=1e-6)
    assert probed(groups=((1, 2),))[0][0]["confusion"] == rows[1]["confusion"]


def test_one_matrix_over_the_set_not_a_mean_over_images():
    rows, heads = probed()
    part, net, total = dense(), vit(), torch.zeros(3, 3, dtype=torch.int64)
    for i in range(7):
        x = (part.val.images[i:i + 1].float() / 255 - .5) / .25
        with torch.no_grad():
            tokens = model.patch_tokens(net, x, [1, 2])
            logits = heads[1](torch.cat(tokens, -1)[0]).T.view(1, 3, 4, 4)
            logits = F.interpolate(logits, size=(16, 16), mode="bilinear")
        for t, p in zip(part.val.masks[i].flatten().tolist(), logits.argmax(1).flatten().tolist()):
            if t != 255:
                total[t, p] += 1
    assert rows[1]["confusion"] == total.tolist()


def test_masks_of_all_sizes_count_at_their_own():
    head, tokens = seg.make_head(5, 3, False, seed=1), rand(3, 4, 5)
    sizes = [(8, 8), (5, 9), (16, 12)]
    found = seg.predict_pixels(head, tokens, [torch.zeros(size) for size in sizes])
    for i, (size, pred) in enumerate(zip(sizes, found)):
        alone = seg.predict_pixels(head, tokens[i:i + 1], torch.zeros(1, *size))
        assert pred.shape == size and torch.equal(pred, alone[0])


def test_crops_and_flips_move_the_mask_with_the_image():
    """What was red is still class 0, up to a pixel at borders; the same position gives the same crop."""
    part = dense(side=64)
    part.train = squares(20, 64, ignore=False)
    pairs = seg.Pairs(part.train, part, 64, 64, augment=True, seed=3)
    state = torch.get_rng_state()
    x, y = pairs.__getitems__(list(range(20)))
    again, other = (pairs.__getitems__(list(range(i, i + 20)))[0] for i in (0, 20))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(x, again) and not torch.equal(x, other)
    assert (x.argmax(1) == y).float().mean() > .97 and not torch.equal(y, part.train.masks.long())
    plain, where = seg.Pairs(part.train, part, 32, 16).__getitems__([4, 24])
    assert torch.equal(plain[0], plain[1])
    assert torch.equal(plain.argmax(1)[:, 1::2, 1::2], where)


@pytest.mark.parametrize("depth, expected", [
    (12, (3, 6, 9, 12)), (24, (6, 12, 18, 24)), (9, (3, 5, 7, 9)), (6, (2, 3, 5, 6)), (2, (1, 2))])
def test_multi_scale_layers_are_evenly_spaced(depth, expected):
    args = seg.get_args(["linear", "--ckpt", "x"])
    assert seg.layer_groups(args, depth) == list(dict.fromkeys([(depth,), expected]))
    args = seg.get_args(["linear", "--ckpt", "x", "--layers", "0", "--multi", "1", "0"])
    assert seg.layer_groups(args, depth) == [(0,), (1, 0)]


# -------------------------------------------------------------------------------------------------------
# clusters
def test_hungarian_matching_by_hand():
    """Cluster 0 is class 2, 1 is 0, 2 is 1, where greedy matching would lose. Cluster 3 is left over."""
    matrix = torch.tensor([[0, 5, 6, 1], [0, 0, 5, 3], [7, 0, 0, 0]])
    pytest.importorskip("scipy")
    to, matched = seg.match_clusters(matrix)
    assert to.tolist() == [2, 0, 1, 3]
    assert matched.tolist() == [[5, 6, 0, 1], [0, 5, 0, 3], [0, 0, 7, 0]]
    assert seg.score_matrix(matched)["miou"] == pytest.approx((5 / 12 + 5 / 14 + 1) / 3)
    to, matched = seg.match_clusters(matrix, "majority")
    assert to.tolist() == [2, 0, 1, 1]
    assert matched.tolist() == [[5, 7, 0, 0], [0, 8, 0, 0], [0, 0, 7, 0]]
    few = seg.match_clusters(matrix[:, :2])[1]     # fewer clusters than classes: one is never called
    assert few.tolist() == [[5, 0, 0, 0], [0, 0, 0, 0], [0, 0, 7, 0]]


@pytest.mark.parametrize("clusters, seeds", [(3, [0]), (3, [4, 5, 6]), (5, [0, 1])])
def test_blobs_are_found_under_any_names(clusters, seeds, monkeypatch):
    pytest.importorskip("sklearn")
    pytest.importorskip("scipy")
    part = dense()
    centres = torch.tensor([[0., 5, 0], [5, 0, 0], [0, 0, 5]])
    grid = part.val.masks.clone().long()[:, 3::4, 3::4]
    tokens = centres[grid].flatten(1, 2) + .01 * rand(7, 16, 3)
    tokens = tokens * (1 + rand(7, 16, 1, kind=torch.rand))       # of any length: only directions count
    batch = [tokens], part.val.masks.long()
    monkeypatch.setattr(seg, "token_batches", lambda *arguments: iter([batch]))
    how = HOW | dict(batch_size=7, clusters=clusters, seeds=seeds, leftover="majority")
    (row,), (found,) = seg.cluster_segmentation(vit(), part, part.val, [(2,)], how, ONE)
    assert row["miou"] == row["pixel_accuracy"] == 1 and row["trials"] == [1.0] * len(seeds)
    assert torch.equal(found, grid)


# -------------------------------------------------------------------------------------------------------
# the command
def folder(path, n=(12, 6)):
    """squares as images/ and masks/ of train and val, with images of two shapes."""
    for split, count, seed in (("train", n[0], 0), ("val", n[1], 1)):
        part = squares(count, 16, seed=seed)
        for kind in ("images", "masks"):
            (path / kind / split).mkdir(parents=True)
        for i in range(count):
            wide = 1 + i % 2
            image = part.images[i].permute(1, 2, 0).repeat_interleave(wide, 1).numpy()
            mask = part.masks[i].repeat_interleave(wide, 1).numpy()
            Image.fromarray(image).save(path / "images" / split / f"{i}.png")
            Image.fromarray(mask).save(path / "masks" / split / f"{i}.png")
    return path


def save(path, **kwargs):
    kwargs = dict(img_size=16, in_chans=3, num_classes=3) | kwargs
    return save_run(path, *make_vit(data="a folder", **kwargs))


@pytest.fixture
def run(tmp_path):
    return save(tmp_path / "run"), str(folder(tmp_path / "set"))


def command(what, *flags):
    some = ["--steps", "6", "--batch-size", "6"] if what == "linear" else ["--seeds", "1"]
    seg.main([what, "--device", "cpu", "--threads", "1", *some, *map(str, flags)])


def record(path, name="seg"):
    return json.loads((path / f"{name}.json").read_text(encoding="utf-8"))


def test_linear_by_layer(run, tmp_path, capsys):
    ckpt, where = run
    command("linear", "--ckpt", ckpt, "--data", where, "--layers", "all", "--steps", 40)
    printed, result = capsys.readouterr().out, record(ckpt)
    rows, protocol = result["checkpoints"][0]["rows"], result["checkpoints"][0]["protocol"]
    assert [row["layers"] for row in rows] == [[1], [2], [1, 2]] == protocol["layers"]
    assert (protocol["img_size"], protocol["steps"], protocol["depth"]) == (16, 40, 2)
    best = max(rows[:2], key=lambda row: row["miou"])
    single = f"{100 * best['miou']:.1f} % (single, layer {best['layers'][0]})"
    multi = f"{100 * rows[2]['miou']:.1f} % (multi, layers 1 2)"
    assert printed.splitlines()[-1] == f"mIoU {single}, {multi}"
    # pixels of all validation images at their own size, 16 x 16 and 16 x 32, two rows of them ignored
    assert all(np.sum(row["confusion"]) == 3 * 14 * 16 + 3 * 14 * 32 for row in rows)
    truth, base = np.sum(rows[0]["confusion"], 1), result["checkpoints"][0]["baseline"]
    assert base["miou"] == pytest.approx(truth[0] / truth.sum() / 3)
    assert base["pixel_accuracy"] == pytest.approx(truth[0] / truth.sum())
    assert f"all 0: mIoU {100 * base['miou']:.1f} %" in printed
    for picture in ("seg.png", "seg_examples.png"):
        assert Image.open(ckpt / picture).size[0] > 500
    deep = save(tmp_path / "deep", depth=3)
    flags = "--data", where, "--multi", "none", "--out", tmp_path / "both"
    command("linear", "--ckpt", ckpt, deep, *flags)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed[-2:]] == ["run", "deep"]
    assert "multi" not in printed[-1]


@pytest.mark.parametrize("flags", [
    [], ["--augment", "--opt", "sgd", "--eval-size", "10"], ["--no-batch-norm", "--cache-gb", "0"]])
def test_two_ranks_give_the_head_of_one(run, tmp_path, flags):
    """Batches of 5, so that the ranks' shares differ."""
    ckpt, where = run
    flags = ["linear", "--device", "cpu", "--threads", "1", "--steps", "8", "--batch-size", "5",
             "--ckpt", str(ckpt), "--data", where, *flags, "--out"]
    seg.main([*flags, str(tmp_path / "one")])
    codes, outputs = launch_ranks(2, seg.main, [*flags, str(tmp_path / "two")], folder=tmp_path)
    assert codes == [0, 0], outputs
    assert "mIoU" in outputs[0] and not outputs[1]
    one, two = (record(tmp_path / n)["checkpoints"][0]["rows"] for n in ("one", "two"))
    for a, b in zip(one, two):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["miou"] == pytest.approx(b["miou"], abs=.005)
        assert np.sum(a["confusion"]) == np.sum(b["confusion"])


def test_cluster(run, capsys):
    pytest.importorskip("sklearn")
    ckpt, where = run
    command("cluster", "--ckpt", ckpt, "--data", where, "--layers", 0, 2, "--clusters", 4, "--seeds", 3)
    printed, result = capsys.readouterr().out, record(ckpt, "cluster")
    rows = result["checkpoints"][0]["rows"]
    assert [row["layers"] for row in rows] == [[0], [2], [1, 2]]
    assert all(len(row["trials"]) == 3 and row["miou"] == sorted(row["trials"])[1] for row in rows)
    assert printed.splitlines()[-1].startswith("mIoU ") and "(multi, layers 1 2)" in printed
    assert (ckpt / "cluster.png").exists() and (ckpt / "cluster_examples.png").exists()


def test_without_scikit_learn_only_cluster_is_missing(run, monkeypatch):
    """It says what to install before it computes anything, and `linear` does not miss it."""
    ckpt, where = run
    monkeypatch.setitem(__import__("sys").modules, "sklearn.cluster", None)
    says = "evals.segmentation cluster needs the package sklearn: pip install scikit-learn$"
    with pytest.raises(BadInput, match=says):
        command("cluster", "--ckpt", ckpt, "--data", "nowhere")
    command("linear", "--ckpt", ckpt, "--data", where)


@pytest.mark.parametrize("flags, words", [
    (["--ckpt", "missing.pt"], "--ckpt missing.pt is no checkpoint, .*: give a run"),
    (["--data", "nowhere"], "--data 'nowhere' is neither a folder nor"),
    (["--img-size", "18"], "--ckpt .*run: image size 18 x 18 .* patch size 4"),
    (["--layers", "3"], "--ckpt .*run: layers 3 1 2 are not all within 0 .. 2"),
    (["--data", "BLANK"], "no pixel of the validation masks of blank has a label"),
    (["--ckpt", "GREY"], "--ckpt .*grey takes 1 channel.*--data has 3"),
    (["--ckpt", "FLOW"], "--ckpt .*flow is a flow model.*: give another"),
    (["--out", "RUN/ckpt.pt/x"], "--out .* cannot be written .*: choose another"),
    (["--batch-size", "50"], "--batch-size 50 is larger than the training set of 12 images"),
    (["--layers", "first"], "argument --layers: invalid"),
    (["--lr", "0"], "argument --lr: 0 must be above 0"),
])
def test_wrong_input_gets_one_sentence(run, tmp_path, flags, words, capsys):
    ckpt, where = run
    save(tmp_path / "grey", in_chans=1)
    save_run(tmp_path / "flow", *make_flow(in_chans=3))
    for path in (folder(tmp_path / "blank") / "masks" / "val").iterdir():
        Image.fromarray(np.full_like(np.array(Image.open(path)), 255)).save(path)
    (tmp_path / "blank" / "classes.txt").write_text("a\nb\nc\n", encoding="utf-8")
    names = dict(RUN=ckpt, GREY=tmp_path / "grey", FLOW=tmp_path / "flow", BLANK=tmp_path / "blank")
    for name, path in names.items():
        flags = [flag.replace(name, str(path)) for flag in flags]
    usual = [] if "--ckpt" in flags else ["--ckpt", ckpt]
    usual += [] if "--data" in flags else ["--data", where]
    with pytest.raises(SystemExit) as stopped:
        runtime.run_script(lambda: command("linear", *usual, *flags))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and re.search(words, error), error
    assert not (ckpt / "seg.json").exists()


def test_flags_win_over_the_preset_and_steps_over_its_epochs(run, monkeypatch):
    seen = []

    def note(net, dense, groups, how, *rest):
        seen.append(how)
        raise BadInput("enough")

    monkeypatch.setattr(seg, "linear_segmentation", note)
    ckpt, where = run
    flags = ["--ckpt", ckpt, "--data", where, "--preset", "paper", "--img-size", 16, "--lr", .02]
    for more in ([], ["--epochs", 2.5]):
        with pytest.raises(BadInput, match="enough"):
            seg.main(["linear", "--device", "cpu", *map(str, [*flags, "--batch-size", 6, *more])])
    with pytest.raises(BadInput, match="enough"):
        command("linear", *flags)
    paper, short, steps = seen
    assert (paper["lr"], paper["loss_size"], paper["eval_size"], paper["opt"]) == (.02, 100, 100, "sgd")
    assert (paper["augment"], paper["schedule"], paper["batch_norm"]) == (True, "step", False)
    assert (paper["epochs"], paper["steps"], short["steps"], steps["steps"]) == (25, 50, 5, 6)
    lrs = [seg.head_lr(dict(schedule="step", steps=25, lr=.01), epoch) for epoch in (0, 19, 20, 24)]
    assert lrs == pytest.approx([.01, .01, .001, .001])
