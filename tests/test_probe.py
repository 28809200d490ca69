"""probe.py: k-NN, linear probes and effective rank against second implementations and closed forms; features against a forward pass by hand; the command as it is used."""
import functools
import json
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import data
import model
import probe
import runtime
from runtime import BadInput
from test_runtime import launch_ranks

VIT = dict(size="nano", depth=2, img_size=8, patch_size=4, in_chans=1, classes=10, shortcut="residual", alpha_min=1.0, temperature_beta=1.0, pool="token", data="digits8x8")
FLAGS = ["--device", "cpu", "--threads", "1", "--linear", "ridge"]


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def randint(high, n, seed=0):
    return torch.randint(high, (n,), generator=torch.Generator().manual_seed(seed))


def save(folder, net, args, ema=None, step=3):
    folder.mkdir(parents=True, exist_ok=True)
    runtime.save_checkpoint(folder / "ckpt.pt", dict(model=net.state_dict(), ema=ema and ema.state_dict(), optimizer={}, step=step, best=0.0, rng=torch.get_rng_state(), args=args))
    return folder


def stirred(net, seed=0):
    """All parameters random: zero-initialised branches and heads would hide a wrong layer."""
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.add_(0.2 * randn(*p.shape, seed=seed + i, dtype=torch.float32))
    return net


def vit(seed=0, **flags):
    args = VIT | flags
    torch.manual_seed(seed)
    return stirred(probe.build(args), seed), args


def sit(seed=0, kind=model.SiT, **kwargs):
    torch.manual_seed(seed)
    kwargs = dict(input_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=32, depth=2, num_heads=2, alpha_min=.8) | kwargs
    return stirred(kind(**kwargs), seed), dict(kind="sit", backbone="sit" if kind is model.SiT else "uvit", model=kwargs, data="digits8x8", img_size=8, path="linear")


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
    return save(tmp_path / "run", *vit())


def layers(*flags):
    probe.main(["layers", *FLAGS, "--ckpt", *map(str, flags)])


def record(folder):
    return json.loads((folder / "probe.json").read_text())


# ---------------------------------------------------------------------------------------------------------------- measures
def slow_knn(train_x, train_y, test_x, test_y, k, temperature):
    hits = 0
    for q, y in zip(test_x.tolist(), test_y.tolist()):
        cosines = [sum(a * b for a, b in zip(q, x)) / math.hypot(*q) / math.hypot(*x) for x in train_x.tolist()]
        votes = {}
        for i in sorted(range(len(cosines)), key=lambda i: -cosines[i])[:k]:
            votes[int(train_y[i])] = votes.get(int(train_y[i]), 0) + math.exp((cosines[i] - 1) / temperature)
        hits += max(votes, key=votes.get) == y
    return hits / len(test_y)


@pytest.mark.parametrize("k, temperature", [(1, .07), (5, .07), (20, .07), (5, .5), (40, 1e-3)])
def test_knn_equals_a_slow_loop(k, temperature, monkeypatch):
    train_y, test_y = randint(4, 40), randint(4, 30, seed=1)
    train_x, test_x = 0.7 * randn(40, 6) + F.one_hot(train_y, 6), 0.7 * randn(30, 6, seed=1) + F.one_hot(test_y, 6)
    truth = slow_knn(train_x, train_y, test_x, test_y, k, temperature)
    assert probe.knn(train_x, train_y, test_x, test_y, k, temperature) == pytest.approx(truth, abs=1e-9) and 0.25 < truth < 1
    monkeypatch.setattr(probe, "SIMILARITIES", 7 * 40)            # in parts of 7 queries, the last of 2
    assert probe.knn(train_x, train_y, test_x, test_y, [1, k], temperature)[1] == pytest.approx(truth, abs=1e-9)


def test_knn_votes_by_similarity_and_caps_k():
    """One neighbour at cosine 1 outvotes two of the other class at cosine 0 as e^(1 / .07) > 2, but not at a temperature of 10, where votes count."""
    bank, labels, query = torch.eye(3), torch.tensor([1, 0, 0]), torch.tensor([[2.0, 0, 0]])
    assert probe.knn(bank, labels, query, torch.tensor([1]), k=3) == 1.0
    assert probe.knn(bank, labels, query, torch.tensor([1]), k=3, temperature=10) == 0.0
    assert probe.knn(bank, labels, query, torch.tensor([1]), k=200) == 1.0
    assert probe.knn(bank, labels, query, torch.tensor([7])) == 0.0                               # a class that the bank lacks
    with pytest.raises(ValueError, match="at least 1"):
        probe.knn(bank, labels, query, torch.tensor([1]), k=0)


@pytest.mark.parametrize("n, d", [(6, 6), (50, 6), (6, 50)])
def test_equal_singular_values_have_the_rank_log_n(n, d):
    q = torch.linalg.qr(randn(max(n, d), 6))[0]
    assert probe.effective_rank(3.7 * (q if n >= d else q.T)) == pytest.approx(math.log(6), abs=1e-12)


def test_effective_rank_by_hand():
    """Singular values 3 and 1: -(3/4) ln(3/4) - (1/4) ln(1/4); turning, scaling and padding change nothing; one direction, or none, has 0."""
    u, v = torch.linalg.qr(randn(9, 2))[0], torch.linalg.qr(randn(5, 2, seed=1))[0]
    hand = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert probe.effective_rank(8 * u @ torch.diag(torch.tensor([3.0, 1.0]).double()) @ v.T) == pytest.approx(hand, abs=1e-9)
    assert probe.effective_rank(torch.ones(7, 4)) == pytest.approx(0, abs=1e-6) and probe.effective_rank(torch.zeros(7, 4)) == 0
    x = randn(40, 5)
    assert probe.effective_rank(x + 100, center=True) == pytest.approx(probe.effective_rank(x - x.mean(0)), abs=1e-9)
    assert probe.effective_rank(x + 100) < 0.2 < probe.effective_rank(x)                          # uncentred, the mean is a direction


def test_lbfgs_equals_newton():
    x, y, l2, classes = randn(60, 3), randint(3, 60), 0.03, 3

    def objective(theta):
        weight, bias = theta[:9].view(3, 3), theta[9:]
        return -((x @ weight + bias).log_softmax(1)[torch.arange(60), y]).mean() + l2 / 2 * (weight ** 2).sum()

    theta = torch.zeros(12, dtype=torch.float64)
    for _ in range(20):                                           # the bias is free up to a constant, so the Hessian is singular there
        gradient, hessian = torch.func.grad(objective)(theta), torch.func.hessian(objective)(theta)
        theta = theta - torch.linalg.pinv(hessian, rtol=1e-12) @ gradient
    assert torch.func.grad(objective)(theta).abs().max() < 1e-12
    weight, bias = probe.logistic_regression(x, y, classes, l2, tolerance=1e-9)
    assert (weight - theta[:9].view(3, 3)).abs().max() < 1e-6 and (bias - bias.mean() - theta[9:]).abs().max() < 1e-6
    near, _ = probe.logistic_regression(x, y, classes, l2)
    assert (near - weight).abs().max() < 1e-3


def test_lbfgs_of_nothing_learns_the_class_frequencies():
    y = torch.tensor([0] * 6 + [1] * 3 + [2])
    weight, bias = probe.logistic_regression(torch.zeros(10, 2, dtype=torch.float64), y, 3, 1e-3, tolerance=1e-9)
    assert bias.softmax(0).tolist() == pytest.approx([.6, .3, .1], abs=1e-6) and not weight.any()


def test_ridge_equals_least_squares():
    """Least squares with sqrt(n l2) I below x and zeros below the targets, the bias a column that is not penalised."""
    x, y, l2 = randn(50, 4) + 3, randint(3, 50), 0.2
    rows = torch.cat([torch.cat([x, torch.ones(50, 1)], 1), torch.cat([math.sqrt(50 * l2) * torch.eye(4).double(), torch.zeros(4, 1)], 1)])
    truth = torch.linalg.lstsq(rows, torch.cat([F.one_hot(y, 3).double(), torch.zeros(4, 3)])).solution
    weight, bias = probe.ridge_regression(x, y, 3, l2)
    assert (weight - truth[:4]).abs().max() < 1e-12 and (bias - truth[4]).abs().max() < 1e-12


def test_lars_equals_steps_by_hand():
    """Two epochs of two batches of 8 of 17 samples, in numpy: normalised by the batch's own mean and variance, the gradient of the softmax written out."""
    x, y, blr = randn(17, 5, dtype=torch.float32) * 3 + 1, randint(4, 17), 20.0
    net = probe.lars_probe(x, y, 4, blr=blr, batch_size=8, epochs=2, warmup=1, seed=5)
    start = probe.lars_probe(x, y, 4, epochs=0, seed=5)[1].weight
    assert 0.005 < float(start.std()) < 0.02
    weight, bias, features, labels = start.double().numpy(), np.zeros(4), x.double().numpy(), y.numpy()
    momentum_w, momentum_b, step = np.zeros_like(weight), np.zeros(4), 0
    peak = blr * 8 / 256
    for lr in (peak / 2, peak, peak, peak * 0.5):                 # warm-up of 2 steps, then half a cosine over 2
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
    assert np.allclose(net[1].weight.numpy(), weight, atol=2e-6) and np.allclose(net[1].bias.numpy(), bias, atol=2e-6)
    assert np.abs(weight - start.numpy()).max() > 1e-4 and not net.training


@pytest.mark.parametrize("protocol", ["lbfgs", "ridge", "lars"])
def test_a_linear_probe_finds_what_is_linear(protocol):
    """Classes that a plane separates are found, at any scale and offset, beside a feature that never changes; labels by chance are not."""
    train_y, test_y = randint(3, 600), randint(3, 300, seed=1)
    train_x, test_x = (1e-3 * (0.1 * randn(len(y), 4, seed=s) + F.one_hot(y, 4)) + 5 for y, s in ((train_y, 0), (test_y, 1)))
    train_x[:, 3] = test_x[:, 3] = 5.0
    lars = dict(batch_size=100, blr=30.0, epochs=30) if protocol == "lars" else {}
    assert probe.linear_probe(train_x, train_y, test_x, test_y, protocol, **lars) == 1.0
    assert probe.linear_probe(train_x, train_y, test_x, randint(3, 300, seed=9), protocol, **lars) < 0.45
    with pytest.raises(ValueError, match="svm.*lbfgs"):
        probe.linear_probe(train_x, train_y, test_x, test_y, "svm")


# ---------------------------------------------------------------------------------------------------------------- features
@pytest.mark.parametrize("pool", ["mean", "patches", "token"])
@pytest.mark.parametrize("kind", ["vit", "vit-mean", "mae"])
def test_features_equal_a_forward_pass_by_hand(kind, pool):
    if kind == "mae":
        torch.manual_seed(0)
        net = stirred(model.MAE(img_size=8, patch_size=4, in_chans=1, embed_dim=16, depth=2, num_heads=2, decoder_dim=8, decoder_depth=1, decoder_heads=2, alpha_min=.6))
    else:
        net, _ = vit(pool="mean" if kind == "vit-mean" else "token")
    x, y = randn(5, 1, 8, 8, dtype=torch.float32), torch.arange(5)
    tokens, seen = [net.embed(x)], {"mean": slice(None), "patches": slice(1, None), "token": slice(0, 1)}[pool]
    for block in net.blocks:
        tokens.append(block(tokens[-1]))
    expected = [t[:, seen].sum(1) / t[:, seen].shape[1] for t in tokens]
    if kind == "vit":
        expected.append(net.norm(tokens[-1])[:, seen].mean(1))
    if kind == "vit-mean":
        expected.append(net.fc_norm(expected[-1]))
    net.train()
    got, labels = probe.layer_features(net, [(x[:3], y[:3]), (x[3:], y[3:])], "cpu", pool, final_norm=True)
    assert net.training and labels.tolist() == [0, 1, 2, 3, 4] and len(got) == len(expected)
    for a, b in zip(got, expected):
        assert a.dtype == torch.float32 and not a.requires_grad and torch.allclose(a, b, atol=1e-5)
    assert len(probe.layer_features(net, [(x, y)], "cpu", pool)[0]) == 3


@pytest.mark.parametrize("kind", [model.SiT, model.UViT])
def test_a_flow_model_is_told_the_time_and_no_label(kind):
    net, _ = sit(kind=kind)
    x, y = randn(4, 1, 8, 8, dtype=torch.float32), torch.arange(4)
    tokens = list(net.layers(x, torch.full((4,), .3), torch.full((4,), 10)))
    got, labels = probe.layer_features(net, [(x, y)], "cpu", "patches", t=.3)
    assert len(got) == len(tokens) and labels.equal(y)
    assert all(torch.allclose(a, b[:, net.prefix_tokens:].mean(1), atol=1e-6) for a, b in zip(got, tokens))
    other = probe.layer_features(net, [(x, y)], "cpu", "patches", t=1.0)[0]
    assert not torch.allclose(got[-1], other[-1], atol=1e-3)


def test_images_between_noise_and_clean():
    """x_t = t x + (1 - t) noise, the noise of a sample the same on any number of ranks, in any batch, and other in the other split."""
    images = [(torch.full((1, 2, 2), float(i)), torch.tensor(i)) for i in range(7)]

    def walk(t, path, split, rank, world, size):
        mine = images[rank::world]
        batches = [(torch.stack([x for x, _ in mine[i:i + size]]), torch.stack([y for _, y in mine[i:i + size]])) for i in range(0, len(mine), size)]
        return {int(i): v for x, y in probe.on_path(batches, t, path, 0, split, rank, world) for v, i in zip(x, y)}

    noise, there = walk(0.0, "linear", "val", 0, 1, 7), walk(0.25, "linear", "val", 0, 2, 3) | walk(0.25, "linear", "val", 1, 2, 2)
    assert sorted(there) == list(range(7)) and all(torch.allclose(there[i], 0.25 * i + 0.75 * noise[i]) for i in range(7))
    values = torch.stack(list(walk(0.0, "linear", "train", 0, 1, 7).values()) + list(noise.values()))
    assert len(values.unique()) == 56 and abs(float(values.mean())) < .5 and .7 < float(values.std()) < 1.3
    gvp = walk(0.5, "gvp", "val", 0, 1, 4)
    assert all(torch.allclose(gvp[i], math.sqrt(.5) * (i + noise[i]), atol=1e-6) for i in range(7))


# ------------------------------------------------------------------------------------------------------------- the command
def by_hand(folder, pool="mean"):
    net, saved = probe.load_model(folder)
    images = data.load_images(saved["data"])
    transform = data.eval_transform(images, saved["img_size"])
    parts = [probe.layer_features(net, data.eval_batches(part, transform, 500), "cpu", pool, final_norm=True) for part in (images.train, images.val)]
    return images, [[features[l] for features, _ in parts] for l in range(len(parts[0][0]))]


def test_the_command_reports_each_layer(run, capsys):
    layers(run, "--k", 1, 20, 100)
    images, pairs = by_hand(run)
    result, printed = record(run), capsys.readouterr().out
    rows = result["checkpoints"][0]["layers"]
    assert [row["layer"] for row in rows] == ["embedding", "1", "2", "final norm"]
    for row, (bank, queries) in zip(rows, pairs):
        near = probe.knn(bank, images.train.labels, queries, images.val.labels, [1, 20, 100])
        assert list(row["knn"]) == ["1", "20", "100"] and list(row["knn"].values()) == pytest.approx(near, abs=.004)
        assert row["linear"] == pytest.approx(probe.linear_probe(bank, images.train.labels, queries, images.val.labels, "ridge"), abs=.004)
        assert row["effective_rank"] == pytest.approx(probe.effective_rank(queries), rel=1e-4)
        assert row["norm"] == pytest.approx(float(queries.square().sum(1).sqrt().mean()), rel=1e-4)
        assert f"{100 * row['knn']['20']:.1f}" in printed and f"{row['effective_rank']:.3f}" in printed
    best = max(range(3), key=lambda l: rows[l]["knn"]["20"])
    assert printed.splitlines()[-1] == f"best layer {best} of 2: k-NN {100 * rows[best]['knn']['20']:.1f} %"
    assert result["command"].startswith("python probe.py layers --device cpu") and "least squares" in result["protocol"] and "l2 0.001" in printed
    kept = result["checkpoints"][0]
    assert (kept["step"], kept["weights"], kept["data"], kept["train_images"], kept["val_images"]) == (3, "raw", "digits8x8", 1442, 355)
    assert Image.open(run / "probe.png").size[0] > 800


def test_averaged_weights_by_default_and_several_checkpoints(tmp_path, capsys):
    (net, args), (average, _) = vit(), vit(seed=50)
    folder, plain = save(tmp_path / "both", net, args, average, step=9), save(tmp_path / "plain", net, args)
    assert probe.load_model(folder)[1]["weights"] == "ema" and probe.load_model(folder / "ckpt.pt", ema=False)[1]["weights"] == "raw"
    assert torch.equal(probe.load_model(folder)[0].head.weight, average.head.weight) and torch.equal(probe.load_model(folder, ema=False)[0].head.weight, net.head.weight)
    layers(folder, plain / "ckpt.pt", "--out", tmp_path / "new" / "out")
    printed, (one, two) = capsys.readouterr().out, record(tmp_path / "new" / "out")["checkpoints"]
    assert "step 9, averaged weights (ema)" in printed and "step 3, weights as trained" in printed
    assert [line.split(":")[0] for line in printed.splitlines()[-2:]] == ["both", "plain"] and one["layers"] != two["layers"]
    layers(folder, "--raw")
    assert record(folder)["checkpoints"][0]["layers"] == two["layers"]


def test_two_ranks_equal_one(run, tmp_path):
    flags = ["layers", "--device", "cpu", "--threads", "1", "--linear", "lars", "--probe-epochs", "3", "--probe-batch-size", "300", "--pixels", "--ckpt", str(run)]
    one = probe.main([*flags, "--out", str(tmp_path / "one")])
    codes, outputs = launch_ranks(2, probe.main, [*flags, "--out", str(tmp_path / "two")], folder=tmp_path)
    assert codes == [0, 0], outputs
    assert "best layer" in outputs[0] and not outputs[1]
    one, two = (record(tmp_path / n)["checkpoints"][0] for n in ("one", "two"))
    assert one["pixels"] == two["pixels"]
    one, two = one["layers"], two["layers"]
    assert len(one) == len(two) == 4
    for a, b in zip(one, two):                                    # batches of other samples round otherwise: a near tie may fall to the other side
        assert a["knn"] == pytest.approx(b["knn"], abs=.003) and a["linear"] == pytest.approx(b["linear"], abs=.003)
        assert a["effective_rank"] == pytest.approx(b["effective_rank"], rel=1e-5) and a["norm"] == pytest.approx(b["norm"], rel=1e-5)


def test_k_nn_of_pixels(run, capsys):
    """Against scikit-learn's neighbours of the standardised images; without the flag there is none."""
    neighbors = pytest.importorskip("sklearn.neighbors")
    layers(run, "--pixels", "--k", "1", "20")
    images = data.load_images("digits8x8")
    x, y = ([f(part) for part in (images.train, images.val)] for f in (lambda p: ((p.images.double() / 255 - images.mean[0]) / images.std[0]).flatten(1).numpy(), lambda p: p.labels.numpy()))
    found = record(run)["checkpoints"][0]["pixels"]
    for k, weights in (("1", "uniform"), ("20", lambda d: np.exp(-d / .07))):          # cosine distances: exp(cosine / .07) up to a factor
        truth = neighbors.KNeighborsClassifier(int(k), weights=weights, metric="cosine", algorithm="brute").fit(x[0], y[0]).score(x[1], y[1])
        assert found[k] == pytest.approx(truth, abs=2.5 / len(y[1])) and .8 < truth < 1            # near ties may fall to the other side
    assert f"raw pixels: 1-NN {100 * found['1']:.1f} %, 20-NN {100 * found['20']:.1f} %" in capsys.readouterr().out
    layers(run)
    assert record(run)["checkpoints"][0]["pixels"] is None and "raw pixels" not in capsys.readouterr().out


def gather_on_rank():
    world = runtime.start("cpu")
    for n in (7, 8, 2, 1):
        for whole in (torch.arange(n), torch.arange(3 * n).view(n, 3).float()):
            assert torch.equal(probe.gather(whole[world.rank::world.size], world), whole)
    net, _ = vit()
    images = data.Images((randn(5, 1, 8, 8).abs() * 50).to(torch.uint8), torch.arange(5))
    transform = data.eval_transform(data.ImageData("", images, images, list("abcde"), 1, 8, False, [.5], [.5]), 8)
    whole, _ = probe.layer_features(net, data.eval_batches(images, transform, 8), "cpu")
    shared, labels = probe.layer_features(net, data.eval_batches(images, transform, 2, world.rank, world.size), "cpu", world=world)
    assert labels.tolist() == [0, 1, 2, 3, 4] and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, shared))


def test_ranks_gather_each_sample_once_in_order(tmp_path):
    codes, outputs = launch_ranks(2, runtime.run, gather_on_rank, folder=tmp_path)
    assert codes == [0, 0], outputs


@pytest.mark.parametrize("linear", ["lbfgs", "ridge", "lars"])
def test_seven_images_are_enough(tmp_path, capsys, linear):
    for i in range(7):
        path = tmp_path / "images" / ("train" if i < 4 else "val") / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((12, 10, 3), 30 * i, dtype=np.uint8)).save(path)
    net, args = vit(in_chans=3, classes=2, data=str(tmp_path / "images"))
    layers(save(tmp_path / "run", net, args), "--linear", linear)
    rows = record(tmp_path / "run")["checkpoints"][0]["layers"]
    assert [list(row["knn"]) for row in rows] == [["4"]] * 4 and all(0 <= row["linear"] <= 1 for row in rows)
    assert "note: k 10, 20, 100, 200 exceeds the bank and is 4" in capsys.readouterr().out


def test_the_cache_saves_the_forward_passes(run, tmp_path, monkeypatch):
    flags = run, "--cache", tmp_path / "cache"
    layers(*flags)
    first = record(run)["checkpoints"][0]["layers"]
    forward = model.ViT.layers
    monkeypatch.setattr(model.ViT, "layers", None)
    layers(*flags)
    assert record(run)["checkpoints"][0]["layers"] == first and len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setattr(model.ViT, "layers", forward)
    net, args = vit(seed=1)
    layers(save(run, net, args), *flags[1:])                      # other weights under the same name
    assert record(run)["checkpoints"][0]["layers"] != first
    layers(*flags, "--pool", "token")
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == 3
    for file in files:
        file.write_bytes(b"?")
    with pytest.raises(BadInput, match="--cache .* is not readable: delete it"):
        layers(*flags)


def test_a_net_sees_other_labels_in_the_pixel_statistics_of_its_own_data(tmp_path):
    path, load = save(tmp_path, *vit(in_chans=3, classes=7, data="emoji")), functools.cache(probe.load_set)
    args = probe.get_args(["layers", "--ckpt", str(path), "--data", "emoji-artists"])
    _, _, images, transform = probe.prepare(path, args, load)
    own = load("emoji")
    assert images.mean == own.mean != load("emoji-artists").mean and len(images.classes) == 1374
    assert torch.equal(transform(own.val.images[:2]), data.eval_transform(own, 8)(own.val.images[:2]))
    net, flags = vit()
    held = save(tmp_path / "held", net, flags | dict(holdout=0.2, seed=4))         # a run that was tuned on a part of its training set is probed there
    args = probe.get_args(["layers", "--ckpt", str(held)])
    assert torch.equal(probe.prepare(held, args, load)[2].val.images, load("digits8x8", 0.2, 4).val.images)
    _, _, images, transform = probe.prepare(save(tmp_path / "sit", *sit()), args, load)
    assert transform(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 8, 8)).unique().tolist() == [-1, 1]


@torch.no_grad()
def test_a_flow_model_on_latents(tmp_path):
    """Latents go in as they are; at a time below 1 with the noise of their path, and from the cache just the same."""
    z = torch.from_numpy(write_latents(tmp_path / "latents", 4, 8))
    net, args = sit(in_chans=4)
    folder = save(tmp_path / "run", net, args | dict(data=str(tmp_path / "latents"), path="gvp"))
    for flags in ([], ["--time", "0.4", "--cache", tmp_path / "cache"], ["--time", "0.4", "--cache", tmp_path / "cache"]):
        layers(folder, *flags, "--batch-size", "3")
        noise = torch.stack([torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(runtime.mix_seed(0, "probe", "val", i))) for i in range(4)])
        x = math.sin(.2 * math.pi) * z[6:] + math.cos(.2 * math.pi) * noise if flags else z[6:]
        tokens = list(net.layers(x, torch.full((4,), .4 if flags else 1.0), torch.full((4,), 10)))
        result = record(folder)["checkpoints"][0]
        assert [row["norm"] for row in result["layers"][:3]] == pytest.approx([float(t.mean(1).norm(dim=1).mean()) for t in tokens], rel=1e-4)
    assert result["alpha_eff"] == pytest.approx(1 * (1 - .2 / 3) * (1 - .4 / 3) * .8)


@pytest.mark.parametrize("flags, sentence", [
    (["missing.pt"], "--ckpt missing.pt is not a file: give the ckpt.pt of a run of train_vit.py"),
    (["RUN/damaged.pt"], "--ckpt .*damaged.pt is not a whole checkpoint: give"),
    (["RUN/lm.pt"], "--ckpt .*lm.pt holds a language model.*: give"),
    (["RUN/odd.pt"], "--ckpt .*odd.pt does not fit the models of this version .*: give"),
    (["RUN", "--data", "emoji"], "--data emoji has images of 3 channel.* takes 1: give --data"),
    (["RUN", "--data", "nowhere"], "--data 'nowhere' is neither a folder nor one of"),
    (["RUN/sit", "--pool", "token"], "--pool token: .* has no class token: use --pool mean or patches"),
    (["RUN", "--time", "0.5"], "--time 0.5 has no effect on .*run, which knows no time: leave it out"),
    (["RUN/sit", "--data", "RUN/latents"], "--data .*latents has latents of side 4 and .* takes 8: give --data"),
    (["RUN/nan"], "--ckpt .*nan: the features of layer 2 are not finite.*: give an earlier checkpoint"),
    (["RUN", "--linear", "lars", "--probe-batch-size", "1"], "--linear lars needs 2 training images or more.*: use --linear lbfgs"),
    (["RUN", "--out", "RUN/ckpt.pt/x"], "--out .* cannot be written .*: choose a folder that can"),
])
def test_wrong_input_gets_one_sentence(run, tmp_path, flags, sentence, capsys):
    net, args = vit()
    with torch.no_grad():
        net.blocks[1].mlp.fc2.bias[0] = math.nan
    save(run / "nan", net, args)
    save(run / "sit", *sit())
    write_latents(run / "latents", 1, 4)
    whole = torch.load(run / "ckpt.pt", weights_only=True)
    torch.save(whole | dict(args=dict(lm={}, data="x")), run / "lm.pt")
    torch.save(whole | dict(args=VIT | dict(depth=5)), run / "odd.pt")
    (run / "damaged.pt").write_bytes((run / "ckpt.pt").read_bytes()[:1000])
    with pytest.raises(SystemExit) as stopped:
        runtime.run(lambda: layers(*(flag.replace("RUN", str(run)) for flag in flags)))
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    with pytest.raises(BadInput, match=sentence):
        raise BadInput(error.removeprefix("error: "))
    assert not (run / "probe.json").exists()


@pytest.mark.parametrize("flags, sentence", [([], "required: WHAT"), (["layers"], "required: --ckpt"), (["layers", "--ckpt", "x", "--k", "0"], "argument --k: 0 must be at least 1"),
                                             (["layers", "--ckpt", "x", "--l2", "0"], "--l2: 0 must be above 0"), (["layers", "--ckpt", "x", "--time", "2"], "--time: 2 must be .*at most 1")])
def test_wrong_flags_get_one_sentence(flags, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        probe.main(flags)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and error.startswith("error: ")
    assert re.search(sentence, error)


def test_help_names_the_protocols(capsys):
    for flags in (["--help"], ["layers", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            probe.main(flags)
        assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(protocol.split()[:5]) in text for protocol in probe.PROTOCOLS.values())
