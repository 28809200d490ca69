"""discovery.py: TokenCut against scipy's generalised eigenproblem, LOST against a slow loop, boxes and CorLoc by hand, PCA against numpy; the two commands as they are used."""
import json
import re
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import bench
import discovery
import masks
import model
import probe
import runtime
from discovery import lost, tokencut
from test_probe import save, sit, stirred
from test_runtime import launch_ranks


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def two_clusters(grid, box, seed=0, noise=0.1):
    """Features (N, 16): one direction inside the box (x0, y0, x1, y1), the orthogonal one outside."""
    x0, y0, x1, y1 = box
    inside = torch.zeros(grid, dtype=torch.long)
    inside[y0:y1, x0:x1] = 1
    return 3 * torch.eye(16)[inside.flatten()] + noise * randn(grid[0] * grid[1], 16, seed=seed)


# ---------------------------------------------------------------------------------------------------------------- TokenCut
@pytest.mark.parametrize("grid, box", [((6, 5), (1, 2, 4, 5)), ((14, 14), (0, 0, 4, 5)), ((20, 13), (12, 7, 13, 19)), ((1, 7), (5, 0, 7, 1))])
def test_two_clusters_give_the_exact_box(grid, box):
    """Of unequal clusters the smaller one holds the seed: |v| is inversely proportional to a cluster's size."""
    found = tokencut(two_clusters(grid, box), grid)
    assert found["box"] == box
    assert found["mask"].sum() == (box[2] - box[0]) * (box[3] - box[1]) and found["mask"].shape == grid and found["mask"].dtype == torch.bool
    v = found["eigenvector"].view(grid)
    assert (v[found["mask"]] > 0).all() and (v[~found["mask"]] < 0).all()


def scipy_vectors(x, tau=.2, eps=1e-5):
    linalg = pytest.importorskip("scipy.linalg")
    x = F.normalize(x, dim=1).numpy()
    A = np.where(x @ x.T > tau, 1.0, eps)
    values, vectors = linalg.eigh(np.diag(A.sum(1)) - A, np.diag(A.sum(1)), subset_by_index=[1, 2])
    return values, vectors[:, 0]


def published_box(v, grid):
    """(box, "sure", "tied" or "open"): split, seed, flip and label as TokenCut is published, but of tied largest |v| the first is the seed.
    "open": some patch lies at the mean, and rounding decides on which side."""
    label = pytest.importorskip("scipy.ndimage").label
    largest = np.flatnonzero(np.abs(v) >= (1 - 1e-6) * np.abs(v).max())
    side = v > v.mean()
    seed = largest[0]
    side = side if side[seed] else ~side
    labels, _ = label(side.reshape(grid))
    y, x = np.nonzero(labels == labels.flat[seed])
    kind = "open" if np.abs(v - v.mean()).min() < 1e-9 * np.abs(v).max() else "sure" if seed == np.abs(v).argmax() else "tied"
    return (x.min(), y.min(), x.max() + 1, y.max() + 1), kind


def hard_images():
    """50 images of 14 x 14: scenes, scenes with patches that nothing resembles, objects that fall apart, and many clusters that hardly touch (lambda of about eps)."""
    grid, images = (14, 14), []
    for seed in range(50):
        x = bench.clusters(seed, grid, channels=48)
        if seed % 5 == 1:
            x[torch.randperm(196, generator=torch.Generator().manual_seed(seed))[:6]] = 9 * randn(6, 48, seed=seed)
        if seed % 5 == 2:
            x = two_clusters(grid, (2, 2, 9, 6), seed, noise=.9)
        if seed % 5 == 3:
            kinds = torch.randint(7, (3, 3), generator=torch.Generator().manual_seed(seed)).repeat_interleave(5, 0).repeat_interleave(5, 1)[:14, :14].flatten()
            x = torch.eye(48)[kinds] + 0.02 * randn(196, 48, seed=seed)
        images.append(x.double())                                # so that no edge hangs on the rounding of a cosine
    return grid, images


def test_fifty_images_agree_with_scipy():
    """Every eigenvector, however close the next eigenvalue (3e-6), and every box but where two patches of the object and its surroundings are equal to rounding."""
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
    assert kinds.count("open") <= 2 and kinds.count("sure") >= 30 and sum(gap < 1e-4 for gap in gaps) > 10 and min(gaps) < 1e-5


def test_the_solver_that_stops_early_finds_what_the_full_one_finds(monkeypatch):
    """Same eigenvector from block Lanczos and from the decomposition that takes over where it does not converge; 784 patches, float64 residual of the pencil."""
    x = bench.clusters(3, (28, 28), channels=64)
    fast = tokencut(x, (28, 28))
    near = F.normalize(x, dim=1) @ F.normalize(x, dim=1).T > .2
    A = torch.where(near, 1.0, 1e-5).double()
    d, v = A.sum(1), fast["eigenvector"]
    value = v @ (d * v - A @ v) / (v @ (d * v))
    assert (d * v - A @ v - value * d * v).norm() < 1e-6 * (d * v).norm() and abs(float((d * v).sum())) < 1e-6 * float((d * v).abs().sum())
    calls = []
    monkeypatch.setattr(discovery, "krylov", lambda P, first: calls.append(1) or (torch.zeros_like(first), torch.zeros(len(first), dtype=torch.bool)))
    full = tokencut(x, (28, 28))
    assert calls and full["box"] == fast["box"]
    assert abs(float(F.cosine_similarity(full["eigenvector"], v, dim=0))) > 1 - 1e-10


def test_the_sign_of_the_eigenvector_does_not_matter():
    v = torch.stack([randn(12 * 9, seed=s).double() for s in range(40)])
    v[0, :5] = v[0].mean()                                       # some exactly at the mean
    one, other = discovery.cut(v, (12, 9)), discovery.cut(-v, (12, 9))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert len(one[1].unique(dim=0)) > 20


@pytest.mark.parametrize("features", [torch.ones(60, 8), torch.zeros(60, 8), torch.eye(60), 5 + 1e-3 * randn(60, 8)])
def test_where_nothing_is_apart_the_object_is_the_whole_image(features):
    found = tokencut(features, (6, 10))
    assert found["box"] == (0, 0, 10, 6) and found["mask"].all() and not found["eigenvector"].any()
    large = tokencut(features[:1].expand(400, -1), (20, 20))
    assert large["box"] == (0, 0, 20, 20) and large["mask"].all()
    assert tokencut(torch.ones(1, 4), (1, 1))["box"] == (0, 0, 1, 1)


def test_many_images_equal_one_after_the_other():
    grid, images = hard_images()
    batch = torch.stack([images[i] for i in (0, 5, 10)] + [torch.ones(196, 48).double()])
    for method in (tokencut, lost):
        together = method(batch, grid)
        for i, x in enumerate(batch):
            alone = method(x, grid)
            assert tuple(together["box"][i].tolist()) == alone["box"] and torch.equal(together["mask"][i], alone["mask"])


def test_features_that_are_not_finite_or_do_not_fit_are_refused():
    x = randn(12, 4)
    for bad in (float("nan"), float("inf")):
        y = x.clone()
        y[3, 1] = bad
        for method in (tokencut, lost):
            with pytest.raises(ValueError, match="not finite"):
                method(y, (3, 4))
    with pytest.raises(ValueError, match="grid of 3 x 5"):
        tokencut(x, (3, 5))
    with pytest.raises(ValueError, match="eps 0.* above 0"):
        tokencut(x, (3, 4), eps=0.0)


def test_the_component_of_the_seed():
    """A snake is followed through all its turns, corners do not connect; against scipy's labels on random masks."""
    text = ["#######", "......#", "#####.#", "#...#.#", "#.###.#", "#.....#", "#######", ".......", "#.#.#.#"]
    inside = torch.tensor([[c == "#" for c in line] for line in text])[None]
    mask = discovery.component(inside, torch.tensor([0]))
    assert mask.sum() == inside[0, :7].sum() and discovery.box_of(mask).tolist() == [[0, 0, 7, 7]]
    assert discovery.component(inside, torch.tensor([8 * 7 + 2])).sum() == 1
    label = pytest.importorskip("scipy.ndimage").label
    inside = torch.rand(30, 11, 8, generator=torch.Generator().manual_seed(0)) < .6
    seeds = inside.flatten(1).int().argmax(1)
    for got, one, seed in zip(discovery.component(inside, seeds), inside, seeds):
        labels = label(one.numpy())[0]
        assert np.array_equal(got.numpy(), labels == labels.flat[int(seed)])


# -------------------------------------------------------------------------------------------------------------------- LOST
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
        x = bench.clusters(seed, (9, 7), channels=12) * (1 + randn(63, 1, seed=seed).abs())     # norms count: the features are not normalised
        found, (box, reached) = lost(x, (9, 7), k), slow_lost(x, (9, 7), k)
        assert found["box"] == box and set(found["mask"].flatten().nonzero().flatten().tolist()) == reached
    assert lost(torch.zeros(6, 3), (2, 3))["box"] == (0, 0, 1, 1)


# ------------------------------------------------------------------------------------------------------------------- boxes
def test_iou_and_corloc_by_hand():
    boxes = torch.tensor([[0.0, 0, 4, 4], [2, 2, 6, 6], [4, 0, 8, 4], [0, 0, 0, 0], [1, 1, 3, 2]])
    assert discovery.iou((0, 0, 4, 4), boxes).tolist() == pytest.approx([1, 4 / 28, 0, 0, 2 / 16])
    assert discovery.meets((0, 0, 4, 4), [[5.0, 5, 6, 6], [0, 0, 4, 8]])         # exactly one half
    assert not discovery.meets((0, 0, 4, 4), [[0.0, 0, 4, 8.01]]) and not discovery.meets((0, 0, 4, 4), torch.empty(0, 4))
    assert discovery.centre_box(100, 200).tolist() == pytest.approx([30, 15, 170, 85])


def test_boxes_in_pixels_of_the_original():
    """37 x 50 pixels, patches of 16: 3 x 4 patches, the last ones partly padding, whose box ends with the image. Resized to a shorter side of 74: twice that, and back."""
    image = torch.full((3, 37, 50), 255, dtype=torch.uint8)
    x, scale = discovery.fit(image, lambda t: t.float(), 16)
    assert x.shape == (3, 48, 64) and scale == (1, 1) and x[:, :37, :50].eq(255).all() and not x[:, 37:].any() and not x[:, :, 50:].any()
    assert discovery.to_pixels((1, 0, 4, 3), 16, (37, 50), scale).tolist() == [16, 0, 50, 37]
    assert discovery.to_pixels((0, 1, 2, 2), 16, (37, 50), scale).tolist() == [0, 16, 32, 32]
    x, scale = discovery.fit(image, lambda t: t.float(), 16, img_size=74)
    assert x.shape == (3, 80, 112) and scale == (2, 2)
    assert discovery.to_pixels((1, 0, 7, 5), 16, (37, 50), scale).tolist() == [8, 0, 50, 37]


# --------------------------------------------------------------------------------------------------- principal components
def test_pca_equals_numpy():
    x = randn(200, 12) @ torch.diag(torch.linspace(3, .1, 12)) + 5
    x[:, 0] += 4 * (randn(200, seed=1) > 1.2)                    # some skew
    mean, components = discovery.pca(x)
    centred = x.double().numpy() - x.double().numpy().mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    assert np.allclose(np.abs(components.numpy() @ vectors[:, ::-1][:, :3]), np.eye(3), atol=1e-8)
    scores = centred @ components.numpy().T
    assert (np.mean(scores ** 3, 0) > 0).all()
    assert torch.allclose(discovery.pca(-x)[1], -components)     # the sign goes with the data, not with the solver
    shown = discovery.colours(x, (mean, components)).numpy()
    low, high = np.percentile(scores, [1, 99], axis=0)
    assert np.allclose(shown, np.clip((scores - low) / (high - low), 0, 1)) and shown.min() == 0 and shown.max() == 1
    flat = discovery.colours(torch.ones(9, 4), discovery.pca(torch.ones(9, 4)))
    assert flat.shape == (9, 3) and flat.isfinite().all()
    assert discovery.colours(randn(9, 2), discovery.pca(randn(9, 2))).shape == (9, 3)             # two channels have no third component


# ---------------------------------------------------------------------------------------------------------- the commands
def make_run(folder, seed=0, **flags):
    torch.manual_seed(seed)
    args = dict(size="nano", depth=2, img_size=16, patch_size=4, in_chans=3, classes=10, shortcut="residual", alpha_min=1.0, temperature_beta=1.0, pool="token", data="x") | flags
    return save(folder, stirred(probe.build(args), seed), args)


def make_images(folder, sizes=((16, 16), (18, 23), (16, 16), (21, 14), (18, 23))):
    """images/ and masks/: a bright block of label 1 on a dark ground; the third mask is empty."""
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for i, (height, width) in enumerate(sizes):
        mask = np.zeros((height, width), dtype=np.uint8)
        if i != 2:
            mask[4:12, i:i + 8] = 1
        pixels = np.where(mask[..., None] > 0, [230, 40, 20], [20, 30, 90]) + np.random.default_rng(i).integers(0, 20, (height, width, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{i}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{i}.png")
    return folder


@pytest.fixture
def place(tmp_path):
    make_run(tmp_path / "run")
    make_images(tmp_path / "data")
    return tmp_path


def command(what, place, *flags):
    probe.main([what, "--ckpt", str(place / "run"), "--data", str(place / "data"), "--device", "cpu", "--threads", "1", *map(str, flags)])


@pytest.mark.parametrize("method, feature", [("tokencut", "key"), ("lost", "value")])
@torch.no_grad()
def test_the_command_counts_hits_by_hand(place, capsys, method, feature):
    command("tokencut", place, "--layers", "all", "--boxes", "--method", method, "--feature", feature, *(["--k", "9"] if method == "lost" else []))
    printed, record = capsys.readouterr().out, json.loads((place / "run" / "tokencut.json").read_text())["checkpoints"][0]
    net, dense = probe.load_model(place / "run")[0], masks.load_dense(place / "data", "discovery")
    mean, std = torch.tensor(dense.mean).view(3, 1, 1), torch.tensor(dense.std).view(3, 1, 1)
    for layer in (1, 2):
        hits = centre = 0
        for i in range(5):
            image, _, truth = dense.val[i]
            height, width = image.shape[1:]
            x = torch.zeros(1, 3, height + -height % 4, width + -width % 4)
            x[0, :, :height, :width] = (image / 255 - mean) / std
            tokens, = model.patch_tokens(net, x, [layer], feature)
            box = (tokencut(tokens[0], (x.shape[2] // 4, x.shape[3] // 4)) if method == "tokencut" else lost(tokens[0], (x.shape[2] // 4, x.shape[3] // 4), 9))["box"]
            box = [min(4 * v, edge) for v, edge in zip(box, (width, height, width, height))]
            assert record["boxes"][str(layer)][i] == box
            if i != 2:
                hits += float(discovery.iou(box, truth)[0]) >= .5
                centre += float(discovery.iou(discovery.centre_box(height, width), truth)[0]) >= .5
        assert record["rows"][layer - 1] == dict(layer=layer, corloc=hits / 4) and record["centre"] == centre / 4
    assert (record["images"], record["skipped"]) == (4, 1) and "4 images, 1 without boxes skipped" in printed
    best = max(row["corloc"] for row in record["rows"])
    assert re.fullmatch(rf"CorLoc {100 * best:.1f} % \(best layer [12], {feature}\), centre box {100 * record['centre']:.1f} %, whole image \d+\.\d %", printed.splitlines()[-1])
    assert Image.open(place / "run" / "tokencut.png").size[0] > 500


def test_two_ranks_equal_one(place):
    flags = ["tokencut", "--ckpt", str(place / "run"), "--data", str(place / "data"), "--device", "cpu", "--threads", "1", "--layers", "all", "--boxes", "--img-size", "24"]
    probe.main([*flags, "--out", str(place / "one")])
    codes, outputs = launch_ranks(2, probe.main, [*flags, "--out", str(place / "two")], folder=place)
    assert codes == [0, 0], outputs
    one, two = (json.loads((place / n / "tokencut.json").read_text())["checkpoints"][0] for n in ("one", "two"))
    assert one | dict(seconds=0) == two | dict(seconds=0) and len(one["boxes"]["2"]) == 5


def test_several_checkpoints_and_a_part_of_the_images(place, capsys):
    command("tokencut", place, "--ckpt", place / "run", make_run(place / "other", seed=9), "--limit", 3, "--img-size", 24, "--out", place / "o")
    lines, records = capsys.readouterr().out.splitlines(), json.loads((place / "o" / "tokencut.json").read_text())["checkpoints"]
    assert [line.split(":")[0] for line in lines[-2:]] == ["run", "other"] and "(layer 2, key)" in lines[-1]
    assert [record["images"] + record["skipped"] for record in records] == [3, 3] and "boxes" not in records[0]


@pytest.mark.parametrize("basis", ["image", "shared"])
def test_pictures_of_components(place, basis, capsys):
    make_run(place / "other", seed=9)
    probe.main(["pca", "--ckpt", str(place / "run"), str(place / "other"), "--data", str(place / "data"), "--layers", "0", "2", "--basis", basis, "--count", "3", "--img-size", "30",
                "--threads", "1", "--device", "cpu"])
    width, height = Image.open(place / "run" / "pca.png").size
    assert width > height > 300 and "pca.png, 3 images" in capsys.readouterr().out.splitlines()[-1]
    net, dense = probe.load_model(place / "run")[0], masks.load_dense(place / "data")
    one, = discovery.colour_maps(net, dense, [0, 2, 4], [2], basis)
    alone, = discovery.colour_maps(net, dense, [4], [2], basis)
    assert torch.allclose(one[2][0], alone[0][0], atol=1e-4) == (basis == "image") and one[2][0].shape == (5, 6, 3) and one[2][1] == (0, 24, 20, 0)


@pytest.mark.parametrize("what, flags, sentence", [
    ("tokencut", ["--layers", "3"], "--layers 3 .*has layers 0 .. 2: name some of these"),
    ("tokencut", ["--layers", "0"], "--layers 0 is the embedding, which has no key: use --feature token"),
    ("pca", ["--layers", "0", "--feature", "value"], "--layers 0 is the embedding, which has no value"),
    ("tokencut", ["--ckpt", "SIT"], "sit is a flow model"),
    ("tokencut", ["--depth", "3"], "--depth 3: .*has 2 blocks"),
    ("tokencut", ["--ckpt", "NAN"], "--ckpt .*nan: the features are not finite: give those of an earlier checkpoint"),
    ("tokencut", ["--ckpt", "GREY"], "images of 3 channels and .*grey takes 1"),
    ("tokencut", ["--data", "EMPTY"], "tell only one class apart"),
    ("tokencut", ["--data", "EMPTY/two"], "none of the 2 images has a box: give a set with boxes"),
    ("tokencut", ["--data", "EMPTY/two", "--limit", "1"], "none of the 1 images has a box: raise --limit"),
    ("tokencut", ["--method", "lost", "--tau", ".3"], "--tau has no effect with --method lost"),
    ("tokencut", ["--method", "lost", "--eps", ".3"], "--eps has no effect with --method lost"),
    ("tokencut", ["--k", "5"], "--k has no effect with --method tokencut"),
    ("tokencut", ["--ids", "list.txt"], "--ids list.txt has no effect on .*, only on COCO20k"),
    ("pca", ["--count", "51"], "--count: 51 must be .* at most 50"),
    ("tokencut", ["--data", "nowhere"], "--data 'nowhere' is neither a folder nor one of composites"),
    ("tokencut", ["--out", "FILE/x"], "--out .* cannot be written"),
])
def test_wrong_input_gets_one_sentence(place, what, flags, sentence, capsys):
    save(place / "sit", *sit(in_chans=3))
    make_run(place / "grey", in_chans=1)
    net, args = probe.load_model(place / "run")
    with torch.no_grad():
        net.blocks[1].attn.qkv.bias[:] = float("nan")
    save(place / "nan", net, {k: v for k, v in args.items() if k not in ("weights", "step")})
    make_images(place / "none", sizes=())
    for name in "ab":
        for part in ("images", "masks"):
            Image.fromarray(np.zeros((16, 16), dtype=np.uint8)).save(place / "none" / part / f"{name}.png")
    shutil.copytree(place / "none", place / "none" / "two")
    (place / "none" / "two" / "classes.txt").write_text("ground\nthing\n")
    names = dict(SIT=place / "sit", NAN=place / "nan", GREY=place / "grey", EMPTY=place / "none", FILE=place / "run" / "ckpt.pt")
    for key, value in names.items():
        flags = [flag.replace(key, str(value)) for flag in flags]
    with pytest.raises(SystemExit) as stopped:
        runtime.run(lambda: command(what, place, *flags))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and re.search(sentence, error), error
    assert not list(place.rglob("tokencut.json")) and not list(place.rglob("*.png.tmp"))


@pytest.mark.parametrize("flags, sentence", [(["--tau", "2"], "--tau: 2 must be"), (["--eps", "0"], "--eps: 0 must be .*above 0"), (["--layers", "some"], "--layers: invalid layer value"),
                                             (["--feature", "x"], "--feature: invalid choice"), (["--limit", "0"], "--limit: 0 must be at least 1")])
def test_wrong_flags_get_one_sentence(flags, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        probe.main(["tokencut", "--ckpt", "x", *flags])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and re.search(sentence, error)


def test_help_shows_the_defaults(capsys):
    for what in ("tokencut", "pca"):
        with pytest.raises(SystemExit):
            probe.main([what, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "None is 0.2 (default: None)" in text and "None is 1e-5 (default: None)" in text and "(default: 128)" in text and probe.tokencut is tokencut
