"""TokenCut against scipy's generalised eigenproblem, LOST against a slow loop, boxes and CorLoc by hand,
and evals/discovery.py as it is used."""
import json
import re
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import model
import probe
import runtime
from evals import discovery
from evals.dense_data import load_dense
from evals.discovery import lost
from probe import tokencut
from test_probe import make_flow, make_vit, save_run
from test_runtime import launch_ranks


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def two_clusters(grid, box, seed=0, noise=0.1):
    """Features (N, 16): a direction inside the box (x0, y0, x1, y1), the orthogonal one outside."""
    x0, y0, x1, y1 = box
    inside = torch.zeros(grid, dtype=torch.long)
    inside[y0:y1, x0:x1] = 1
    return 3 * torch.eye(16)[inside.flatten()] + noise * randn(grid[0] * grid[1], 16, seed=seed)


def ellipse_scene(seed, grid, channels=48):
    """Features (N, channels) of an ellipse on two halves of background: each has a direction of its own,
    all have one in common, and noise."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in grid), indexing="ij")
    a, b, c, d, slope = torch.rand(5, generator=generator)
    part = torch.where(y > slope - 0.5 + 0.3 * x, 1, 0)
    part[((x - a + 0.5) / (0.25 + 0.4 * c)) ** 2 + ((y - b + 0.5) / (0.25 + 0.4 * d)) ** 2 < 1] = 2
    kinds = 0.6 * torch.randn(1, channels, generator=generator)
    kinds = kinds + torch.randn(3, channels, generator=generator)
    return kinds[part.flatten()] + 0.8 * torch.randn(part.numel(), channels, generator=generator)


# -------------------------------------------------------------------------------------------------------
# TokenCut
@pytest.mark.parametrize("grid, box", [
    ((6, 5), (1, 2, 4, 5)), ((14, 14), (0, 0, 4, 5)), ((20, 13), (12, 7, 13, 19)),
    ((1, 7), (5, 0, 7, 1))])
def test_two_clusters_give_the_exact_box(grid, box):
    """Of unequal clusters the smaller holds the seed: |v| goes with the inverse of a cluster's size."""
    found = tokencut(two_clusters(grid, box), grid)
    assert found["box"] == box
    assert found["mask"].sum() == (box[2] - box[0]) * (box[3] - box[1])
    assert found["mask"].shape == grid and found["mask"].dtype == torch.bool
    v = found["eigenvector"].view(grid)
    assert (v[found["mask"]] > 0).all() and (v[~found["mask"]] < 0).all()


def scipy_vectors(x, tau=.2, eps=1e-5):
    linalg = pytest.importorskip("scipy.linalg")
    x = F.normalize(x, dim=1).numpy()
    A = np.where(x @ x.T > tau, 1.0, eps)
    values, vectors = linalg.eigh(np.diag(A.sum(1)) - A, np.diag(A.sum(1)), subset_by_index=[1, 2])
    return values, vectors[:, 0]


def published_box(v, grid):
    """(box, "sure", "tied" or "open") as TokenCut is published, but of tied largest |v| the first is the
    seed. "open": some patch lies at the mean, and rounding decides on which side."""
    label = pytest.importorskip("scipy.ndimage").label
    largest = np.flatnonzero(np.abs(v) >= (1 - 1e-6) * np.abs(v).max())
    side = v > v.mean()
    seed = largest[0]
    side = side if side[seed] else ~side
    labels, _ = label(side.reshape(grid))
    y, x = np.nonzero(labels == labels.flat[seed])
    kind = "sure" if seed == np.abs(v).argmax() else "tied"
    kind = "open" if np.abs(v - v.mean()).min() < 1e-9 * np.abs(v).max() else kind
    return (x.min(), y.min(), x.max() + 1, y.max() + 1), kind


def hard_images():
    """50 images of 14 x 14: scenes, scenes with patches that nothing resembles, objects that fall apart,
    and many clusters that hardly touch (lambda of about eps)."""
    grid, images = (14, 14), []
    for seed in range(50):
        x, generator = ellipse_scene(seed, grid), torch.Generator().manual_seed(seed)
        if seed % 5 == 1:
            x[torch.randperm(196, generator=generator)[:6]] = 9 * randn(6, 48, seed=seed)
        if seed % 5 == 2:
            x = two_clusters(grid, (2, 2, 9, 6), seed, noise=.9)
        if seed % 5 == 3:
            kinds = torch.randint(7, (3, 3), generator=generator)
            kinds = kinds.repeat_interleave(5, 0).repeat_interleave(5, 1)[:14, :14].flatten()
            x = torch.eye(48)[kinds] + 0.02 * randn(196, 48, seed=seed)
        images.append(x.double())                       # no edge hangs on the rounding of a cosine
    return grid, images


def test_fifty_images_agree_with_scipy():
    """Every eigenvector, however close the next eigenvalue (3e-6), and every box but the "open" ones."""
    grid, images = hard_images()
    kinds, gaps = [], []
    for x in images:
        values, v = scipy_vectors(x)
        box, kind = published_box(v, grid)
        found = tokencut(x, grid)
        u = found["eigenvector"].numpy()
        assert abs(u @ v) / np.linalg.norm(u) / np.linalg.norm(v) > 1 - 1e-9
        assert found["box"] == box or kind == "open"
        kinds.append(kind)
        gaps.append(values[1] - values[0])
    assert kinds.count("open") <= 2 and kinds.count("sure") >= 30
    assert sum(gap < 1e-4 for gap in gaps) > 10 and min(gaps) < 1e-5


def test_the_eigenvector_solves_the_pencil_and_is_positive_at_the_seed():
    """784 patches; v is orthogonal to the constant, which has lambda 0, in the metric of D."""
    x = ellipse_scene(3, (28, 28))
    v = tokencut(x, (28, 28))["eigenvector"]
    x = F.normalize(x, dim=1)
    A = torch.where(x @ x.T > .2, 1.0, 1e-5).double()
    d = A.sum(1)
    value = v @ (d * v - A @ v) / (v @ (d * v))
    assert (d * v - A @ v - value * d * v).norm() < 1e-9 * (d * v).norm()
    assert abs(float((d * v).sum())) < 1e-9 * float((d * v).abs().sum())
    assert v[v.abs().argmax()] > 0


@pytest.mark.parametrize("features", [
    torch.ones(60, 8), torch.zeros(60, 8), torch.eye(60), 5 + 1e-3 * randn(60, 8)])
def test_where_nothing_is_apart_the_object_is_the_whole_image(features):
    found = tokencut(features, (6, 10))
    assert found["box"] == (0, 0, 10, 6) and found["mask"].all() and not found["eigenvector"].any()
    large = tokencut(features[:1].expand(400, -1), (20, 20))
    assert large["box"] == (0, 0, 20, 20) and large["mask"].all()
    assert tokencut(torch.ones(1, 4), (1, 1))["box"] == (0, 0, 1, 1)


def test_features_that_are_not_finite_or_do_not_fit_are_refused():
    x = randn(12, 4)
    for bad in (float("nan"), float("inf")):
        y = x.clone()
        y[3, 1] = bad
        for method in (tokencut, lost):
            with pytest.raises(ValueError, match="not finite"):
                method(y, (3, 4))
    with pytest.raises(ValueError, match="do not fit 3 x 5 patches"):
        tokencut(x, (3, 5))


def test_the_part_that_is_connected_with_the_seed():
    """A snake is followed through its turns, corners do not connect; against scipy's labels."""
    text = ["#######", "......#", "#####.#", "#...#.#", "#.###.#", "#.....#", "#######", ".......",
            "#.#.#.#"]
    inside = torch.tensor([[c == "#" for c in line] for line in text])
    mask = probe.connected_patches(inside, 0)
    assert mask.sum() == inside[:7].sum() and probe.box_around(mask) == (0, 0, 7, 7)
    assert probe.connected_patches(inside, 8 * 7 + 2).sum() == 1
    label = pytest.importorskip("scipy.ndimage").label
    for inside in torch.rand(30, 11, 8, generator=torch.Generator().manual_seed(0)) < .6:
        seed = int(inside.flatten().int().argmax())
        found = label(inside.numpy())[0]
        assert np.array_equal(probe.connected_patches(inside, seed).numpy(), found == found.flat[seed])


# -------------------------------------------------------------------------------------------------------
# LOST
def slow_lost(features, grid, k):
    F_ = features.double().tolist()
    n = len(F_)
    A = [[sum(a * b for a, b in zip(p, q)) for q in F_] for p in F_]
    degree = [sum(A[i][j] > 0 for j in range(n) if j != i) for i in range(n)]
    order = sorted(range(n), key=lambda i: (degree[i], i))
    seed = order[0]
    similar = [p for p in order[:k] if A[seed][p] > 0]
    inside = [sum(A[p][j] for p in similar) > 0 for j in range(n)]
    reached, todo = {seed}, [seed]
    while todo:
        y, x = divmod(todo.pop(), grid[1])
        for y1, x1 in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
            p = y1 * grid[1] + x1
            if 0 <= y1 < grid[0] and 0 <= x1 < grid[1] and inside[p] and p not in reached:
                reached.add(p)
                todo.append(p)
    ys, xs = zip(*(divmod(p, grid[1]) for p in reached))
    return (min(xs), min(ys), max(xs) + 1, max(ys) + 1), reached


@pytest.mark.parametrize("k", [1, 10, 100])
def test_lost_equals_a_slow_loop(k):
    for seed in range(8):
        x = ellipse_scene(seed, (9, 7), 12) * (1 + randn(63, 1, seed=seed).abs())          # norms count
        found, (box, reached) = lost(x, (9, 7), k), slow_lost(x, (9, 7), k)
        assert found["box"] == box
        assert set(found["mask"].flatten().nonzero().flatten().tolist()) == reached
    assert lost(torch.zeros(6, 3), (2, 3))["box"] == (0, 0, 1, 1)


# -------------------------------------------------------------------------------------------------------
# boxes
def test_iou_and_corloc_by_hand():
    boxes = torch.tensor([[0.0, 0, 4, 4], [2, 2, 6, 6], [4, 0, 8, 4], [0, 0, 0, 0], [1, 1, 3, 2]])
    assert discovery.box_iou((0, 0, 4, 4), boxes).tolist() == pytest.approx([1, 4 / 28, 0, 0, 2 / 16])
    assert discovery.meets_any((0, 0, 4, 4), [[5.0, 5, 6, 6], [0, 0, 4, 8]])   # exactly one half
    assert not discovery.meets_any((0, 0, 4, 4), [[0.0, 0, 4, 8.01]])
    assert not discovery.meets_any((0, 0, 4, 4), torch.empty(0, 4))
    assert discovery.centre_box(100, 200).tolist() == pytest.approx([30, 15, 170, 85])


def test_boxes_in_pixels_of_the_original():
    """37 x 50 pixels, patches of 16: 3 x 4, the last partly padding, whose box ends with the image.

    Resized to a shorter side of 74: twice that, and back."""
    image = torch.full((3, 37, 50), 255, dtype=torch.uint8)
    x, scale = discovery.fit_patches(image, lambda t: t.float(), 16)
    assert x.shape == (3, 48, 64) and scale == (1, 1) and x[:, :37, :50].eq(255).all()
    assert not x[:, 37:].any() and not x[:, :, 50:].any()
    assert discovery.box_in_pixels((1, 0, 4, 3), 16, (37, 50), scale).tolist() == [16, 0, 50, 37]
    assert discovery.box_in_pixels((0, 1, 2, 2), 16, (37, 50), scale).tolist() == [0, 16, 32, 32]
    x, scale = discovery.fit_patches(image, lambda t: t.float(), 16, img_size=74)
    assert x.shape == (3, 80, 112) and scale == (2, 2)
    assert discovery.box_in_pixels((1, 0, 7, 5), 16, (37, 50), scale).tolist() == [8, 0, 50, 37]


# -------------------------------------------------------------------------------------------------------
# the command

def make_run(folder, seed=0, **kwargs):
    kwargs = dict(img_size=16, in_chans=3) | kwargs
    return save_run(folder, *make_vit(seed, data="a folder", **kwargs))


def make_images(folder, sizes=((16, 16), (18, 23), (16, 16), (21, 14), (18, 23))):
    """images/ and masks/: a bright block of label 1 on a dark ground; the third mask is empty."""
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for i, (height, width) in enumerate(sizes):
        mask = np.zeros((height, width), dtype=np.uint8)
        if i != 2:
            mask[4:12, i:i + 8] = 1
        pixels = np.where(mask[..., None] > 0, [230, 40, 20], [20, 30, 90])
        pixels = pixels + np.random.default_rng(i).integers(0, 20, (height, width, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{i}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{i}.png")
    return folder


@pytest.fixture
def place(tmp_path):
    make_run(tmp_path / "run")
    make_images(tmp_path / "data")
    return tmp_path


def command(place, *flags):
    usual = ["--ckpt", place / "run", "--data", place / "data", "--device", "cpu", "--threads", 1]
    discovery.main([str(flag) for flag in (*usual, *flags)])


def read_records(folder):
    return json.loads((folder / "tokencut.json").read_text(encoding="utf-8"))["checkpoints"]


@pytest.mark.parametrize("method, feature", [("tokencut", "key"), ("lost", "value")])
@torch.no_grad()
def test_the_command_counts_hits_by_hand(place, capsys, method, feature):
    flags = ["--layers", "all", "--boxes", "--method", method, "--feature", feature, "--k", 9]
    command(place, *flags)
    printed, (record,) = capsys.readouterr().out, read_records(place / "run")
    net, dense = probe.load_net(place / "run")[0], load_dense(place / "data", "discovery")
    mean, std = torch.tensor(dense.mean).view(3, 1, 1), torch.tensor(dense.std).view(3, 1, 1)
    for layer in (1, 2):
        hits = centre = 0
        for i in range(5):
            image, _, truth = dense.val[i]
            height, width = image.shape[1:]
            x = torch.zeros(1, 3, height + -height % 4, width + -width % 4)
            x[0, :, :height, :width] = (image / 255 - mean) / std
            tokens, = model.patch_tokens(net, x, [layer], feature)
            grid = x.shape[2] // 4, x.shape[3] // 4
            found = tokencut(tokens[0], grid) if method == "tokencut" else lost(tokens[0], grid, 9)
            box = [min(4 * v, edge) for v, edge in zip(found["box"], (width, height, width, height))]
            assert record["boxes"][str(layer)][i] == box
            if i != 2:
                hits += float(discovery.box_iou(box, truth)[0]) >= .5
                middle = discovery.centre_box(height, width)
                centre += float(discovery.box_iou(middle, truth)[0]) >= .5
        assert record["rows"][layer - 1] == dict(layer=layer, corloc=hits / 4)
        assert record["centre"] == centre / 4
    assert (record["images"], record["skipped"]) == (4, 1)
    assert "4 images, 1 without boxes skipped" in printed
    best = max(row["corloc"] for row in record["rows"])
    last = printed.splitlines()[-1]
    assert re.fullmatch(rf"CorLoc {100 * best:.1f} % \(best layer [12], {feature}\)", last)
    assert Image.open(place / "run" / "tokencut.png").size[0] > 500


def test_two_ranks_equal_one(place):
    flags = ["--ckpt", str(place / "run"), "--data", str(place / "data"), "--device", "cpu",
             "--threads", "1", "--layers", "all", "--boxes", "--img-size", "24", "--out"]
    discovery.main([*flags, str(place / "one")])
    codes, outputs = launch_ranks(2, discovery.main, [*flags, str(place / "two")], folder=place)
    assert codes == [0, 0], outputs
    one, two = (read_records(place / n)[0] for n in ("one", "two"))
    assert one | dict(seconds=0) == two | dict(seconds=0) and len(one["boxes"]["2"]) == 5


def test_several_checkpoints_and_a_part_of_the_images(place, capsys):
    other = make_run(place / "other", seed=9)
    command(place, "--ckpt", place / "run", other, "--limit", 3, "--img-size", 24, "--out", place / "o")
    lines, records = capsys.readouterr().out.splitlines(), read_records(place / "o")
    assert [line.split(":")[0] for line in lines[-2:]] == ["run", "other"]
    assert "(best layer 2, key)" in lines[-1]
    assert [record["images"] + record["skipped"] for record in records] == [3, 3]
    assert "boxes" not in records[0]


@pytest.mark.parametrize("flags, sentence", [
    (["--layers", "3"], "--ckpt .*run: layers 3 are not all within 1 .. 2, the key layers"),
    (["--layers", "0"], "--ckpt .*run: layers 0 are not all within 1 .. 2, the key layers"),
    (["--ckpt", "SIT"], "sit is a flow model"),
    (["--ckpt", "NAN"], "--ckpt .*nan: the features are not finite: give those of an earlier"),
    (["--ckpt", "GREY"], "--ckpt .*grey takes 1 channel.*--data has 3"),
    (["--data", "EMPTY"], "tell only one class apart"),
    (["--data", "EMPTY/two"], "none of the 2 images has a box"),
    (["--data", "nowhere"], "--data 'nowhere' is neither a folder nor one of composites"),
    (["--out", "FILE/x"], "--out .* cannot be written"),
    (["--tau", "2"], "--tau: 2 must be"),
    (["--eps", "0"], "--eps: 0 must be .*above 0"),
])
def test_wrong_input_gets_one_sentence(place, flags, sentence, capsys):
    save_run(place / "sit", *make_flow(in_chans=3))
    make_run(place / "grey", in_chans=1)
    net, args = make_vit(img_size=16, in_chans=3)
    with torch.no_grad():
        net.blocks[1].attn.qkv.bias[:] = float("nan")
    save_run(place / "nan", net, args)
    make_images(place / "none", sizes=())
    for name in "ab":
        for part in ("images", "masks"):
            blank = Image.fromarray(np.zeros((16, 16), dtype=np.uint8))
            blank.save(place / "none" / part / f"{name}.png")
    shutil.copytree(place / "none", place / "none" / "two")
    (place / "none" / "two" / "classes.txt").write_text("ground\nthing\n", encoding="utf-8")
    names = dict(SIT=place / "sit", NAN=place / "nan", GREY=place / "grey", EMPTY=place / "none",
                 FILE=place / "run" / "ckpt.pt")
    for key, value in names.items():
        flags = [flag.replace(key, str(value)) for flag in flags]
    with pytest.raises(SystemExit) as stopped:
        runtime.run_script(lambda: command(place, *flags))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and re.search(sentence, error), error
    assert not list(place.rglob("tokencut.json"))
