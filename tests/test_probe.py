"""probe.py: measures against second implementations and closed forms, features against a forward pass by
hand, nets as they were saved, and the commands as they are used. TokenCut: test_discovery.py."""
import json
import math
import re

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image

import data
import model
import probe
import runtime
from runtime import BadInput
from test_runtime import launch_ranks

VIT = dict(img_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=32, depth=2, num_heads=2)
FLAGS = ["--device", "cpu", "--threads", "1", "--linear", "ridge"]


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def randint(high, n, seed=0):
    return torch.randint(high, (n,), generator=torch.Generator().manual_seed(seed))


def save_run(folder, net, args, ema=None, step=3):
    """A checkpoint as a train script writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = dict(model=net.state_dict(), ema=ema and ema.state_dict(), optimizer={}, step=step,
                      best=0.0, rng=torch.get_rng_state(), args=args)
    runtime.save_checkpoint(folder / "ckpt.pt", checkpoint)
    return folder


def stirred(net, seed=0):
    """All parameters random: zero-initialised branches and heads would hide a wrong layer."""
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.add_(0.2 * randn(*p.shape, seed=seed + i, dtype=torch.float32))
    return net.eval()


def make_vit(seed=0, data="digits8x8", alphas=None, **kwargs):
    """(a ViT, not trained, its args)."""
    torch.manual_seed(seed)
    kwargs = VIT | kwargs
    args = dict(kind="vit", model=kwargs, data=data, alphas=plain_weights(alphas))
    return stirred(model.ViT(**kwargs, alphas=alphas), seed), args


def make_flow(seed=0, kind=model.SiT, data="digits8x8", **kwargs):
    """(a flow model, not trained, its args)."""
    kwargs = dict(input_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=32, depth=2,
                  num_heads=2, alpha_min=.8) | kwargs
    torch.manual_seed(seed)
    backbone = "sit" if kind is model.SiT else "uvit"
    return stirred(kind(**kwargs), seed), dict(kind="sit", backbone=backbone, model=kwargs, data=data)


def make_mae(data="digits8x8", **kwargs):
    """(a masked autoencoder, not trained, its args)."""
    kwargs = dict(img_size=8, patch_size=4, in_chans=1, embed_dim=16, depth=2, num_heads=2,
                  decoder_dim=8, decoder_depth=1, decoder_heads=2, alpha_min=.6) | kwargs
    return stirred(model.MAE(**kwargs)), dict(kind="mae", model=kwargs, data=data)


def plain_weights(alphas):
    """Shortcut weights as a checkpoint holds them: nested lists of numbers."""
    if isinstance(alphas, (list, tuple)):
        return [plain_weights(part) for part in alphas]
    return alphas.item() if torch.is_tensor(alphas) else alphas


def write_latents(folder, channels, side):
    """Ten latents, of which the last four validate."""
    folder.mkdir(parents=True)
    z, y = randn(10, channels, side, side).numpy().astype(np.float32), np.arange(10) % 2
    for name, rows in (("", slice(0, 6)), ("val_", slice(6, 10))):
        np.save(folder / f"{name}latents.npy", z[rows])
        np.save(folder / f"{name}labels.npy", y[rows])
    return z


@pytest.fixture
def run(tmp_path):
    """A ViT of two blocks on digits, not trained."""
    return save_run(tmp_path / "run", *make_vit())


def layers(*flags):
    probe.main(["layers", *FLAGS, "--ckpt", *map(str, flags)])


def read_record(folder):
    return json.loads((folder / "probe.json").read_text(encoding="utf-8"))


# -------------------------------------------------------------------------------------------------------
# nets

def parameter(value):
    return nn.Parameter(torch.tensor(value))


@pytest.mark.parametrize("alphas", [
    None,
    [(1.0, .5), (.25, .5)],
    [((.7, .7), (1.0, .5)), (1.0, (.5, 1.0))],
    [(parameter(.5), 1.0), (parameter(.25), parameter(.1))],
    [((1.0, parameter(.3)), (1.0, parameter(.2))), (1.0, .5)],
])
def test_a_net_comes_back_as_it_was_saved(tmp_path, alphas):
    """With the shortcut weights of its kind, with others, scaled branches, learned weights and gains."""
    net, args = make_vit(shortcut="decayed", alpha_min=.6, alphas=alphas)
    x = randn(3, 1, 8, 8, dtype=torch.float32)
    got, saved = probe.load_net(save_run(tmp_path, net, args))
    assert torch.equal(got(x), net(x)) and not got.training
    assert {k for k, _ in got.named_parameters()} == {k for k, _ in net.named_parameters()}
    assert (saved["step"], saved["weights"], saved["side"], saved["kind"]) == (3, "raw", 8, "vit")


def test_every_kind_of_run_is_loaded(tmp_path):
    kwargs = VIT | dict(shortcut="skipless", pool="mean")
    del kwargs["num_classes"]
    head = dict(out_dim=8, hidden_dim=8, bottleneck_dim=4)
    student, teacher = (stirred(model.DINO(head=head, **kwargs), seed) for seed in (0, 7))
    args = dict(kind="dino", model=kwargs, head=head, data="digits8x8")
    got, saved = probe.load_net(save_run(tmp_path / "dino", student, args, teacher) / "ckpt.pt")
    x = randn(3, 1, 8, 8, dtype=torch.float32)
    assert torch.equal(got(x), teacher.backbone(x)) and saved["weights"] == "ema"
    assert torch.equal(probe.load_net(tmp_path / "dino", raw=True)[0](x), student.backbone(x))
    for kind in (model.SiT, model.UViT):
        net, args = make_flow(kind=kind)
        got, _ = probe.load_net(save_run(tmp_path / kind.__name__, net, args))
        t, y = torch.rand(3), torch.arange(3)
        assert type(got) is kind and torch.equal(got(x, t, y), net(x, t, y))
    net, args = make_mae()
    got, _ = probe.load_net(save_run(tmp_path / "mae", net, args))
    assert torch.equal(got.forward_features(x), net.forward_features(x))


# -------------------------------------------------------------------------------------------------------
# measures

def slow_knn(train_x, train_y, test_x, test_y, k, temperature):
    hits = 0
    for q, y in zip(test_x.tolist(), test_y.tolist()):
        dots = [sum(a * b for a, b in zip(q, x)) / math.hypot(*x) for x in train_x.tolist()]
        cosines, votes = [dot / math.hypot(*q) for dot in dots], {}
        for i in sorted(range(len(cosines)), key=lambda i: -cosines[i])[:k]:
            label = int(train_y[i])
            votes[label] = votes.get(label, 0) + math.exp((cosines[i] - 1) / temperature)
        hits += max(votes, key=votes.get) == y
    return hits / len(test_y)


@pytest.mark.parametrize("k, temperature", [(1, .07), (5, .07), (20, .07), (5, .5), (40, 1e-3)])
def test_knn_equals_a_slow_loop(k, temperature, monkeypatch):
    train_y, test_y = randint(4, 40), randint(4, 30, seed=1)
    train_x = 0.7 * randn(40, 6) + F.one_hot(train_y, 6)
    test_x = 0.7 * randn(30, 6, seed=1) + F.one_hot(test_y, 6)
    truth = slow_knn(train_x, train_y, test_x, test_y, k, temperature)
    got = probe.knn(train_x, train_y, test_x, test_y, k, temperature)
    assert got == pytest.approx(truth, abs=1e-9) and 0.25 < truth < 1
    monkeypatch.setattr(probe, "SIMILARITIES", 7 * 40)            # in parts of 7 queries, the last of 2
    got = probe.knn(train_x, train_y, test_x, test_y, [1, k], temperature)
    assert got[1] == pytest.approx(truth, abs=1e-9)


def test_knn_votes_by_similarity_and_caps_k():
    """One neighbour at cosine 1 outvotes two of the other class at cosine 0 as e^(1 / .07) > 2.

    Not so at a temperature of 10, where votes count."""
    bank, labels, query = torch.eye(3), torch.tensor([1, 0, 0]), torch.tensor([[2.0, 0, 0]])
    assert probe.knn(bank, labels, query, torch.tensor([1]), k=3) == 1.0
    assert probe.knn(bank, labels, query, torch.tensor([1]), k=3, temperature=10) == 0.0
    assert probe.knn(bank, labels, query, torch.tensor([1]), k=200) == 1.0
    assert probe.knn(bank, labels, query, torch.tensor([7])) == 0.0     # the bank lacks that class


@pytest.mark.parametrize("n, d", [(6, 6), (50, 6), (6, 50)])
def test_equal_singular_values_have_the_rank_log_n(n, d):
    q = torch.linalg.qr(randn(max(n, d), 6))[0]
    assert probe.effective_rank(3.7 * (q if n >= d else q.T)) == pytest.approx(math.log(6), abs=1e-12)


def test_effective_rank_by_hand():
    """Singular values 3 and 1; turning and scaling change nothing; one direction, or none, has 0."""
    u, v = torch.linalg.qr(randn(9, 2))[0], torch.linalg.qr(randn(5, 2, seed=1))[0]
    hand = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    x = 8 * u @ torch.diag(torch.tensor([3.0, 1.0]).double()) @ v.T
    assert probe.effective_rank(x) == pytest.approx(hand, abs=1e-9)
    assert probe.effective_rank(torch.ones(7, 4)) == pytest.approx(0, abs=1e-6)
    assert probe.effective_rank(torch.zeros(7, 4)) == 0
    x = randn(40, 5)
    assert probe.effective_rank(x + 100) < 0.2 < probe.effective_rank(x)       # the mean is a direction


def test_mean_iou_by_hand():
    """IoU is TP / (TP + FP + FN); a class that is neither there nor predicted does not count."""
    matrix = torch.tensor([[2, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]])
    assert probe.class_iou(matrix)[:3].tolist() == pytest.approx([2 / 4, 1 / 4, 1 / 2])
    assert probe.class_iou(matrix)[3].isnan()
    assert probe.mean_iou(matrix) == pytest.approx((2 / 4 + 1 / 4 + 1 / 2) / 3)
    wide = torch.tensor([[2, 1, 3], [0, 4, 0]])    # a column past the classes is never right
    assert probe.class_iou(wide).tolist() == pytest.approx([2 / 6, 4 / 5])
    assert math.isnan(probe.mean_iou(torch.zeros(3, 3, dtype=torch.int64)))


# -------------------------------------------------------------------------------------------------------
# linear probes

def test_lbfgs_equals_newton():
    x, y, l2, classes = randn(60, 3), randint(3, 60), 0.03, 3

    def objective(theta):
        weight, bias = theta[:9].view(3, 3), theta[9:]
        logs = (x @ weight + bias).log_softmax(1)[torch.arange(60), y]
        return -logs.mean() + l2 / 2 * (weight ** 2).sum()

    theta = torch.zeros(12, dtype=torch.float64)
    for _ in range(20):                                           # the bias is free up to a constant
        gradient, hessian = torch.func.grad(objective)(theta), torch.func.hessian(objective)(theta)
        theta = theta - torch.linalg.pinv(hessian, rtol=1e-12) @ gradient
    assert torch.func.grad(objective)(theta).abs().max() < 1e-12
    weight, bias = probe.logistic_regression(x, y, classes, l2, tolerance=1e-9)
    assert (weight - theta[:9].view(3, 3)).abs().max() < 1e-6
    assert (bias - bias.mean() - theta[9:]).abs().max() < 1e-6
    near, _ = probe.logistic_regression(x, y, classes, l2)
    assert (near - weight).abs().max() < 1e-3


def test_lbfgs_of_nothing_learns_the_class_frequencies():
    x, y = torch.zeros(10, 2, dtype=torch.float64), torch.tensor([0] * 6 + [1] * 3 + [2])
    weight, bias = probe.logistic_regression(x, y, 3, 1e-3, tolerance=1e-9)
    assert bias.softmax(0).tolist() == pytest.approx([.6, .3, .1], abs=1e-6) and not weight.any()


def test_ridge_equals_least_squares():
    """Least squares with sqrt(n l2) I below x and zeros below the targets; the bias is not penalised."""
    x, y, l2 = randn(50, 4) + 3, randint(3, 50), 0.2
    below = torch.cat([math.sqrt(50 * l2) * torch.eye(4).double(), torch.zeros(4, 1)], 1)
    rows = torch.cat([torch.cat([x, torch.ones(50, 1)], 1), below])
    truth = torch.linalg.lstsq(rows, torch.cat([F.one_hot(y, 3).double(), torch.zeros(4, 3)])).solution
    weight, bias = probe.ridge_regression(x, y, 3, l2)
    assert (weight - truth[:4]).abs().max() < 1e-12 and (bias - truth[4]).abs().max() < 1e-12


def test_lars_equals_steps_by_hand():
    """Two epochs of two batches of 8 of 17 samples, in numpy, the softmax's gradient written out."""
    x, y, blr = randn(17, 5, dtype=torch.float32) * 3 + 1, randint(4, 17), 20.0
    net = probe.lars_probe(x, y, 4, blr=blr, batch_size=8, epochs=2, warmup=1, seed=5)
    start = probe.lars_probe(x, y, 4, epochs=0, seed=5)[1].weight
    assert 0.005 < float(start.std()) < 0.02
    weight, bias = start.double().numpy(), np.zeros(4)
    features, labels = x.double().numpy(), y.numpy()
    momentum_w, momentum_b, step = np.zeros_like(weight), np.zeros(4), 0
    peak = blr * 8 / 256
    for lr in (peak / 2, peak, peak, peak * 0.5):     # 2 steps of warm-up, half a cosine over 2
        order = data.epoch_order(17, 5, step // 2).numpy()[8 * (step % 2):8 * (step % 2) + 8]
        batch = features[order]
        batch = (batch - batch.mean(0)) / np.sqrt(batch.var(0) + 1e-6)
        logits = batch @ weight.T + bias
        slope = np.exp(logits - logits.max(1, keepdims=True))
        slope = (slope / slope.sum(1, keepdims=True) - np.eye(4)[labels[order]]) / 8
        gradient = slope.T @ batch
        gradient = gradient * 0.001 * np.linalg.norm(weight) / np.linalg.norm(gradient)
        momentum_w, momentum_b = 0.9 * momentum_w + gradient, 0.9 * momentum_b + slope.sum(0)
        weight, bias, step = weight - lr * momentum_w, bias - lr * momentum_b, step + 1
    assert np.allclose(net[1].weight.numpy(), weight, atol=2e-6)
    assert np.allclose(net[1].bias.numpy(), bias, atol=2e-6)
    assert np.abs(weight - start.numpy()).max() > 1e-4 and not net.training


@pytest.mark.parametrize("protocol", ["lbfgs", "ridge", "lars"])
def test_a_linear_probe_finds_what_is_linear(protocol):
    """At any scale and offset, beside a feature that never changes; labels by chance are not found."""
    train_y, test_y = randint(3, 600), randint(3, 300, seed=1)
    train_x, test_x = (1e-3 * (0.1 * randn(len(y), 4, seed=s) + F.one_hot(y, 4)) + 5
                       for y, s in ((train_y, 0), (test_y, 1)))
    train_x[:, 3] = test_x[:, 3] = 5.0
    lars = dict(batch_size=100, blr=30.0, epochs=30) if protocol == "lars" else {}
    assert probe.linear_probe(train_x, train_y, test_x, test_y, protocol, **lars) == 1.0
    assert probe.linear_probe(train_x, train_y, test_x, randint(3, 300, seed=9), protocol, **lars) < 0.45


# -------------------------------------------------------------------------------------------------------
# features

@pytest.mark.parametrize("pool", ["mean", "patches", "token"])
@pytest.mark.parametrize("kind", ["vit", "vit-mean", "mae"])
def test_features_equal_a_forward_pass_by_hand(kind, pool):
    net, _ = make_mae() if kind == "mae" else make_vit(pool="mean" if kind == "vit-mean" else "token")
    x = randn(5, 1, 8, 8, dtype=torch.float32)
    seen = {"mean": slice(None), "patches": slice(1, None), "token": slice(0, 1)}[pool]
    tokens = [net.embed(x)]
    for block in net.blocks:
        tokens.append(block(tokens[-1]))
    expected = [t[:, seen].sum(1) / t[:, seen].shape[1] for t in tokens]
    if kind == "vit":
        expected.append(net.norm(tokens[-1])[:, seen].mean(1))
    if kind == "vit-mean":
        expected.append(net.fc_norm(expected[-1]))
    net.train()
    got = probe.layer_features(net, [(x[:3], None), (x[3:], None)], "cpu", pool, final_norm=True)
    assert net.training and len(got) == len(expected)
    for a, b in zip(got, expected):
        assert a.dtype == torch.float32 and not a.requires_grad and torch.allclose(a, b, atol=1e-5)
    assert len(probe.layer_features(net, [(x, None)], "cpu", pool)) == 3


@pytest.mark.parametrize("kind", [model.SiT, model.UViT])
def test_a_flow_model_is_told_the_time_and_no_label(kind):
    net, _ = make_flow(kind=kind)
    x = randn(4, 1, 8, 8, dtype=torch.float32)
    tokens = list(net.layers(x, torch.full((4,), .3), torch.full((4,), 10)))
    got = probe.layer_features(net, [(x, None)], "cpu", "patches", t=.3)
    assert len(got) == len(tokens)
    for a, b in zip(got, tokens):
        assert torch.allclose(a, b[:, net.prefix_tokens:].mean(1), atol=1e-6)
    other = probe.layer_features(net, [(x, None)], "cpu", "patches", t=1.0)
    assert not torch.allclose(got[-1], other[-1], atol=1e-3)


def gather_on_rank():
    world = runtime.start("cpu")
    for n in (7, 8, 2, 1):
        for whole in (torch.arange(n), torch.arange(3 * n).view(n, 3).float()):
            assert torch.equal(probe.gather_samples(whole[world.rank::world.size], world), whole)


def test_ranks_gather_each_sample_once_in_order(tmp_path):
    codes, outputs = launch_ranks(2, runtime.run_script, gather_on_rank, folder=tmp_path)
    assert codes == [0, 0], outputs


# -------------------------------------------------------------------------------------------------------
# probe.py layers

def test_the_command_reports_each_layer(run, capsys):
    layers(run, "--k", 1, 20, 100)
    images = data.load_images("digits8x8")
    transform, (net, _) = data.eval_transform(images, 8), probe.load_net(run)
    batches = (data.eval_batches(part, transform, 500) for part in (images.train, images.val))
    bank, queries = (probe.layer_features(net, part, "cpu", final_norm=True) for part in batches)
    train_y, val_y = images.train.labels, images.val.labels
    result, printed = read_record(run), capsys.readouterr().out
    rows = result["checkpoints"][0]["layers"]
    assert [row["layer"] for row in rows] == ["embedding", "1", "2", "final norm"]
    for row, a, b in zip(rows, bank, queries):
        assert list(row["knn"]) == ["1", "20", "100"]
        near = probe.knn(a, train_y, b, val_y, [1, 20, 100])
        assert list(row["knn"].values()) == pytest.approx(near, abs=.004)
        linear = probe.linear_probe(a, train_y, b, val_y, "ridge")
        assert row["linear"] == pytest.approx(linear, abs=.004)
        assert row["effective_rank"] == pytest.approx(probe.effective_rank(b), rel=1e-4)
        assert row["norm"] == pytest.approx(float(b.square().sum(1).sqrt().mean()), rel=1e-4)
        assert f"{100 * row['knn']['20']:.1f}" in printed and f"{row['effective_rank']:.3f}" in printed
    best = max(range(3), key=lambda l: rows[l]["knn"]["20"])
    last = f"best layer {best} of 2: k-NN {100 * rows[best]['knn']['20']:.1f} %"
    assert printed.splitlines()[-1] == last and f"{run}: probe.json, probe.png" in printed
    assert result["command"].startswith("python probe.py layers --device cpu")
    assert "least squares" in result["protocol"]
    kept = result["checkpoints"][0]
    assert (kept["step"], kept["weights"], kept["data"]) == (3, "raw", "digits8x8")
    assert (kept["train_images"], kept["val_images"], kept["classes"]) == (1442, 355, 10)
    assert Image.open(run / "probe.png").size[0] > 800


def test_averaged_weights_by_default_and_several_checkpoints(tmp_path, capsys):
    (net, args), (average, _) = make_vit(), make_vit(seed=50)
    folder = save_run(tmp_path / "both", net, args, average, step=9)
    plain = save_run(tmp_path / "plain", net, args)
    layers(folder, plain / "ckpt.pt", "--out", tmp_path / "new" / "out")
    printed, (one, two) = capsys.readouterr().out, read_record(tmp_path / "new" / "out")["checkpoints"]
    assert "step 9, weights ema" in printed and "step 3, weights raw" in printed
    assert [line.split(":")[0] for line in printed.splitlines()[-2:]] == ["both", "plain"]
    assert one["layers"] != two["layers"]
    layers(folder, "--raw")
    assert read_record(folder)["checkpoints"][0]["layers"] == two["layers"]


def test_two_ranks_equal_one(run, tmp_path):
    flags = ["layers", *FLAGS, "--linear", "lars", "--pixels", "--ckpt", str(run), "--out"]
    probe.main([*flags, str(tmp_path / "one")])
    codes, outputs = launch_ranks(2, probe.main, [*flags, str(tmp_path / "two")], folder=tmp_path)
    assert codes == [0, 0], outputs
    assert "best layer" in outputs[0] and not outputs[1]
    one, two = (read_record(tmp_path / n)["checkpoints"][0] for n in ("one", "two"))
    assert one["pixels"] == two["pixels"] and len(one["layers"]) == len(two["layers"]) == 4
    for a, b in zip(one["layers"], two["layers"]):     # other batches round otherwise: near ties
        assert a["knn"] == pytest.approx(b["knn"], abs=.003)
        assert a["linear"] == pytest.approx(b["linear"], abs=.003)
        assert a["effective_rank"] == pytest.approx(b["effective_rank"], rel=1e-5)
        assert a["norm"] == pytest.approx(b["norm"], rel=1e-5)


def test_k_nn_of_pixels(run, capsys):
    """Against scikit-learn's neighbours of the standardised images; without the flag there is none."""
    neighbors = pytest.importorskip("sklearn.neighbors")
    layers(run, "--pixels", "--k", "1", "20")
    images = data.load_images("digits8x8")
    x = [((part.images.double() / 255 - images.mean[0]) / images.std[0]).flatten(1).numpy()
         for part in (images.train, images.val)]
    y = [part.labels.numpy() for part in (images.train, images.val)]
    found = read_record(run)["checkpoints"][0]["pixels"]
    for k, weights in (("1", "uniform"), ("20", lambda d: np.exp(-d / .07))):
        options = dict(weights=weights, metric="cosine", algorithm="brute")
        judge = neighbors.KNeighborsClassifier(int(k), **options)
        truth = judge.fit(x[0], y[0]).score(x[1], y[1])
        assert found[k] == pytest.approx(truth, abs=2.5 / len(y[1])) and .8 < truth < 1
    assert f"pixels: 1-NN {100 * found['1']:.1f}%" in capsys.readouterr().out
    layers(run)
    assert read_record(run)["checkpoints"][0]["pixels"] is None


@pytest.mark.parametrize("linear", ["lbfgs", "ridge", "lars", "none"])
def test_seven_images_are_enough(tmp_path, linear):
    for i in range(7):
        path = tmp_path / "images" / ("train" if i < 4 else "val") / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((12, 10, 3), 30 * i, dtype=np.uint8)).save(path)
    net, args = make_vit(in_chans=3, num_classes=2, data=str(tmp_path / "images"))
    layers(save_run(tmp_path / "run", net, args), "--linear", linear)
    rows = read_record(tmp_path / "run")["checkpoints"][0]["layers"]
    assert [list(row["knn"]) for row in rows] == [["4"]] * 4      # k is capped at the bank
    assert all(row["linear"] is None if linear == "none" else 0 <= row["linear"] <= 1 for row in rows)


def test_the_cache_saves_the_forward_passes(run, tmp_path, monkeypatch):
    flags = run, "--cache", tmp_path / "cache"
    layers(*flags)
    first, forward = read_record(run)["checkpoints"][0]["layers"], model.ViT.layers
    monkeypatch.setattr(model.ViT, "layers", None)
    layers(*flags)
    assert read_record(run)["checkpoints"][0]["layers"] == first
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setattr(model.ViT, "layers", forward)
    layers(save_run(run, *make_vit(seed=1)), *flags[1:])          # other weights under the same name
    assert read_record(run)["checkpoints"][0]["layers"] != first
    layers(*flags, "--pool", "token")
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_net_sees_other_labels_in_the_pixel_statistics_of_its_own_data(tmp_path):
    net, args = make_vit(in_chans=3, num_classes=7, data="emoji")
    saved = args | dict(side=8, holdout=.1, seed=4)
    images, transform = probe.probe_set("x", net, saved, "emoji-subgroups")
    own = data.load_images("emoji", .1, 4)
    assert images.mean == own.mean != data.load_images("emoji").mean and len(images.classes) == 81
    assert torch.equal(transform(own.val.images[:2]), data.eval_transform(own, 8)(own.val.images[:2]))
    images, _ = probe.probe_set("x", net, saved, None)   # probed on what it held out
    assert torch.equal(images.val.images, own.val.images)
    net, args = make_flow()
    _, transform = probe.probe_set("x", net, args | dict(side=8), None)
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 8, 8)
    assert transform(ends).unique().tolist() == [-1, 1]


@torch.no_grad()
def test_a_flow_model_on_latents(tmp_path):
    """Latents go in as they are, at time 1."""
    z = torch.from_numpy(write_latents(tmp_path / "latents", 4, 8))
    net, args = make_flow(in_chans=4, data=str(tmp_path / "latents"))
    layers(save_run(tmp_path / "run", net, args), "--batch-size", "3")
    tokens = list(net.layers(z[6:], torch.ones(4), torch.full((4,), 10)))
    found = read_record(tmp_path / "run")["checkpoints"][0]
    norms = [float(t.mean(1).norm(dim=1).mean()) for t in tokens]
    assert [row["norm"] for row in found["layers"][:3]] == pytest.approx(norms, rel=1e-4)
    assert found["alpha_eff"] == pytest.approx(1 * (1 - .2 / 3) * (1 - .4 / 3) * .8)


# -------------------------------------------------------------------------------------------------------
# probe.py pca

def test_pca_equals_numpy():
    x = randn(200, 12, dtype=torch.float32) @ torch.diag(torch.linspace(3, .1, 12)) + 5
    x[:, 0] += 4 * (randn(200, seed=1, dtype=torch.float32) > 1.2)              # some skew
    mean, components = probe.principal_components(x)
    centred = x.double().numpy() - x.double().numpy().mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    assert np.allclose(np.abs(components.numpy() @ vectors[:, ::-1][:, :3]), np.eye(3), atol=1e-8)
    scores = centred @ components.numpy().T
    assert (np.mean(scores ** 3, 0) > 0).all()
    assert torch.allclose(probe.principal_components(-x)[1], -components)   # signs go with the data
    shown = probe.component_colours(x).numpy()
    low, high = np.percentile(scores, [1, 99], axis=0)
    assert np.allclose(shown, np.clip((scores - low) / (high - low), 0, 1))
    assert probe.component_colours(torch.ones(9, 4)).isfinite().all()
    assert probe.component_colours(randn(9, 2)).shape == (9, 3)   # two channels have no third component


def test_pictures_of_components(run, tmp_path, capsys):
    for i in range(5):
        for split in ("train", "val"):
            path = tmp_path / "images" / split / "a" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(i).integers(0, 255, (20 + i, 30, 3), dtype=np.uint8)
            Image.fromarray(noise).save(path)
    folder = save_run(tmp_path / "colour", *make_vit(in_chans=3))
    flags = ["--device", "cpu", "--threads", "1", "--layers", "0", "2", "--img-size", "18"]
    (folder / "pca.png").write_text("train_dino.py's", encoding="utf-8")
    where = str(tmp_path / "images")
    probe.main(["pca", "--ckpt", str(folder), "--data", where, "--count", "3", *flags])
    assert Image.open(folder / "probe_pca.png").size == (3 * 20 + 2, 3 * 20 + 2)    # 2 px between
    assert f"{folder}: probe_pca.png, 3 images" in capsys.readouterr().out
    assert (folder / "pca.png").read_text(encoding="utf-8") == "train_dino.py's"
    probe.main(["pca", "--ckpt", str(run), "--data", "mnist5k", "--count", "2", *flags])
    assert Image.open(run / "probe_pca.png").size == (3 * 20 + 2, 2 * 20 + 2)


# -------------------------------------------------------------------------------------------------------
# bad input

@pytest.mark.parametrize("flags, sentence", [
    (["missing.pt"], "--ckpt missing.pt is no checkpoint, .*: give a run of train_vit.py"),
    (["RUN/damaged.pt"], "--ckpt .*damaged.pt is not a whole checkpoint.*: give a run"),
    (["RUN/lm.pt"], "--ckpt .*lm.pt holds no image model, but one of the kind lm: give a run"),
    (["RUN/odd.pt"], "--ckpt .*odd.pt does not fit our models .*: give a run"),
    (["RUN", "--data", "emoji"], "--data emoji has 3 channel.* takes 1, side 8: give --data that fits"),
    (["RUN", "--data", "nowhere"], "--data 'nowhere' is neither a folder nor one of"),
    (["RUN/sit", "--data", "RUN/latents"], "--data .*latents has 1 channel.*, side 4; .* side 8: give"),
    (["RUN/nan"], "--ckpt .*nan: layer 2 is not finite: give an earlier one"),
    (["RUN", "--out", "RUN/ckpt.pt/x"], "--out .* cannot be written .*: choose another"),
])
def test_wrong_input_gets_one_sentence(run, flags, sentence, capsys):
    net, args = make_vit()
    with torch.no_grad():
        net.blocks[1].mlp.fc2.bias[0] = math.nan
    save_run(run / "nan", net, args)
    save_run(run / "sit", *make_flow())
    write_latents(run / "latents", 1, 4)
    whole = torch.load(run / "ckpt.pt", weights_only=True)
    torch.save(whole | dict(args=dict(kind="lm", model={}, data="x")), run / "lm.pt")
    torch.save(whole | dict(args=args | dict(model=VIT | dict(depth=5))), run / "odd.pt")
    (run / "damaged.pt").write_bytes((run / "ckpt.pt").read_bytes()[:1000])
    with pytest.raises(SystemExit) as stopped:
        runtime.run_script(lambda: layers(*(flag.replace("RUN", str(run)) for flag in flags)))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and re.search(sentence, error), error
    assert not (run / "probe.json").exists()


@pytest.mark.parametrize("flags, sentence", [
    (["--layers", "3"], "--ckpt .*run: layers 3 are not all within 0 .. 2"),
    (["--ckpt", "SIT"], "--ckpt .*sit is a flow model"),
    (["--data", "emoji"], "--ckpt .*run takes 1 channel.*--data has 3"),
])
def test_pca_names_what_does_not_fit(run, flags, sentence):
    flags = [flag.replace("SIT", str(save_run(run / "sit", *make_flow()))) for flag in flags]
    with pytest.raises(BadInput, match=sentence):
        probe.main(["pca", "--ckpt", str(run), "--data", "digits8x8", "--device", "cpu", *flags])


def test_wrong_flags_get_one_sentence(capsys):
    for flags, sentence in (([], "required: WHAT"), (["layers"], "required: --ckpt"),
                            (["layers", "--ckpt", "x", "--k", "0"], "--k: 0 must be at least 1"),
                            (["pca", "--ckpt", "x", "--layers", "some"], "--layers: invalid")):
        with pytest.raises(SystemExit) as stopped:
            probe.main(flags)
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count("\n") == 1 and sentence in error
