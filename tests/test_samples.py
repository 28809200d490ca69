"""evals/samples.py against closed forms (Gaussian targets, distances of Gaussians) and plain loops."""
import functools
import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

import data
import runtime
from evals import samples
from model import PATHS, SiT, ViT, guided, path_coefficients
from test_runtime import launch_ranks
from test_train_vit import contents, one_sentence


def gaussian_velocity(path, mean, cov):
    """The exact velocity from N(0, I) to N(mean, cov): x_t and v_t are jointly Gaussian, so E[v | x] is
    a linear regression. No net, no learning."""
    def velocity(x, t, y=None):
        alpha, sigma, d_alpha, d_sigma = path_coefficients(path, t[0].double())
        eye = torch.eye(len(mean), dtype=x.dtype)
        total = alpha ** 2 * cov + sigma ** 2 * eye
        gain = (alpha * d_alpha * cov + sigma * d_sigma * eye) @ torch.linalg.inv(total)
        return d_alpha * mean + (x - alpha * mean) @ gain.T
    return velocity


def target():
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=generator))[0]
    spread = torch.tensor([0.1, 0.5, 2.0], dtype=torch.float64).diag()
    return torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), basis @ spread @ basis.T


def noise(n, seed=1):
    return torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------------
# samplers

@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("t", [0.0, 0.3, 0.9])
def test_score_is_that_of_the_marginal(path, t):
    """The marginal of a Gaussian target is N(alpha m, alpha^2 S + sigma^2 I), whose score is known."""
    mean, cov = target()
    alpha, sigma, _, _ = path_coefficients(path, torch.tensor(t, dtype=torch.float64))
    x, total = noise(7), alpha ** 2 * cov + sigma ** 2 * torch.eye(3, dtype=torch.float64)
    velocity = gaussian_velocity(path, mean, cov)(x, torch.full((7,), t, dtype=torch.float64))
    found = samples.score_from_velocity(path, t, x, velocity)
    torch.testing.assert_close(found, -(x - alpha * mean) @ torch.linalg.inv(total))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sampler, order", [("euler", 1), ("heun", 2)])
def test_ode_samplers_converge_at_their_order(path, sampler, order):
    """The ODE takes x to mean + cov^(1/2) x. Half the step divides Euler's error by 2, Heun's by 4."""
    mean, cov = target()
    values, vectors = torch.linalg.eigh(cov)
    x, errors = noise(50), []
    truth = mean + x @ (vectors * values.sqrt()) @ vectors.T
    for steps in (40, 80, 160):
        velocity = gaussian_velocity(path, mean, cov)
        end = samples.SAMPLERS[sampler](velocity, x, None, steps, path, None)
        errors.append((end - truth).norm().item())
    rates = [math.log2(a / b) for a, b in zip(errors, errors[1:])]
    assert rates == pytest.approx([order, order], abs=0.15), errors


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sampler, steps", [("euler", 100), ("heun", 25), ("sde", 150)])
def test_samples_of_a_known_target_have_its_moments(path, sampler, steps):
    """8,000 samples of the exact velocity: within five standard errors and the step's own error."""
    mean, cov = target()
    generator = torch.Generator().manual_seed(5)

    def draw():
        return torch.randn(8000, 3, dtype=torch.float64, generator=generator)
    x = samples.SAMPLERS[sampler](gaussian_velocity(path, mean, cov), draw(), None, steps, path, draw)
    found_mean, found_cov = samples.mean_and_covariance(x)
    torch.testing.assert_close(found_mean, mean, atol=5 * math.sqrt(2 / 8000) + 0.01, rtol=0)
    torch.testing.assert_close(found_cov, cov, atol=10 * math.sqrt(2 / 8000) + 0.04, rtol=0)


@pytest.mark.parametrize("sampler, evaluations, draws, last", [
    ("euler", 6, 0, 5 / 6), ("heun", 12, 0, 1.0), ("sde", 6, 5, 0.96)])
def test_samplers_end_at_one_and_cost_what_they_say(sampler, evaluations, draws, last):
    """The last step of the SDE is without noise."""
    times, drawn = [], []

    def velocity(x, t, y):
        times.append(t[0].item())
        return torch.zeros_like(x)

    def draw():
        drawn.append(1)
        return noise(2)
    samples.SAMPLERS[sampler](velocity, noise(2), None, 6, "linear", draw)
    assert len(times) == evaluations and times[0] == 0 and times == sorted(times)
    assert times[-1] == pytest.approx(last) and len(drawn) == draws


# --------------------------------------------------------------------------------------------------
# seeded groups

def matmul_velocity(batches):
    """A small net whose products round differently in batches of different sizes."""
    weight = torch.randn(48, 48, generator=torch.Generator().manual_seed(3)) / 7

    def velocity(x, t, y):
        batches.append(len(x))
        return ((x.flatten(1) + y[:, None]) @ weight).view_as(x) * t[:, None, None, None] - x
    return velocity


def all_samples(count, sampler="heun", world=1, seed=0):
    """The samples in order, as `world` processes draw them one after the other."""
    batches, ranks = [], []
    for rank in range(world):
        ranks.append(list(samples.sample_groups(matmul_velocity(batches), (3, 4, 4), count, [1, 1, 1],
                                                sampler, 5, seed=seed, rank=rank, world=world)))
    assert set(batches) == {samples.GROUP} and len({len(groups) for groups in ranks}) == 1
    return torch.cat([group for turn in zip(*ranks) for group in turn])[:count]


@pytest.mark.parametrize("sampler", samples.SAMPLERS)
@pytest.mark.parametrize("count, world", [(7, 1), (100, 2), (100, 3), (33, 4)])
def test_a_sample_is_the_same_to_the_bit_on_any_split(sampler, count, world):
    """However many are asked for and however many processes share them; all take as many turns."""
    assert torch.equal(all_samples(count, sampler, world), all_samples(100, sampler)[:count])


def test_seeds_and_samples_differ():
    a, b = all_samples(40), all_samples(40, seed=1)
    assert len({x.sum().item() for x in torch.cat([a, b])}) == 80


def test_labels_have_the_shares_of_the_classes():
    assert samples.label_sequence([5, 5, 5], 7).tolist() == [0, 1, 2, 0, 1, 2, 0]
    counts = [700, 200, 100, 0]
    labels = samples.label_sequence(counts, 1000)
    for n in (10, 100, 1000):                                    # at every length, to within one image
        given = np.bincount(labels[:n], minlength=4)
        assert np.abs(given - np.array(counts) / 1000 * n).max() < 1
    assert samples.label_sequence(counts, 50).tolist() == labels[:50].tolist()


def test_pixels():
    found = samples.to_uint8(torch.tensor([-9.0, -1.0, 0.0, 1 / 255, 1.0, 9.0]))
    assert found.tolist() == [0, 0, 128, 128, 255, 255]
    whole = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(samples.to_uint8(whole / 127.5 - 1), whole)


# --------------------------------------------------------------------------------------------------
# Frechet distance

def test_frechet_distance_of_one_dimension():
    """(m1 - m2)^2 + (s1 - s2)^2."""
    one, two = torch.tensor([1.0]), torch.tensor([3.0])
    found = samples.frechet_distance(one, torch.tensor([[4.0]]), two, torch.tensor([[0.25]]))
    assert found == pytest.approx(4 + 1.5 ** 2, rel=1e-12)


def test_frechet_distance_by_newtons_root():
    """The root of the product of two full covariances by the Denman-Beavers iteration."""
    generator = torch.Generator().manual_seed(0)
    x, y, mix = torch.randn(3, 40, 5, dtype=torch.float64, generator=generator)
    y = y @ mix[:5]
    (m1, c1), (m2, c2) = samples.mean_and_covariance(x), samples.mean_and_covariance(y)
    np.testing.assert_allclose(c1, np.cov(x.numpy().T), rtol=1e-12)
    root, inverse = c1 @ c2, torch.eye(5, dtype=torch.float64)
    for _ in range(60):
        root, inverse = (root + torch.linalg.inv(inverse)) / 2, (inverse + torch.linalg.inv(root)) / 2
    truth = ((m1 - m2).square().sum() + (c1 + c2 - 2 * root).trace()).item()
    assert samples.frechet_distance(m1, c1, m2, c2) == pytest.approx(truth, rel=1e-8)
    assert samples.frechet_distance(m2, c2, m1, c1) == pytest.approx(truth, rel=1e-8)


def test_frechet_distance_of_few_samples_is_real_and_zero_to_itself():
    """Fewer samples than dimensions: singular covariances."""
    x = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    m, c = samples.mean_and_covariance(x)
    assert samples.frechet_distance(m, c, m, c) == pytest.approx(0, abs=1e-6)
    assert samples.frechet_distance(m, c, m + 1, c) == pytest.approx(20, abs=1e-5)


# --------------------------------------------------------------------------------------------------
# the command

def stirred(net, seed):
    """State of the net with noise on every weight: no zeros, no symmetry."""
    generator = torch.Generator().manual_seed(seed)
    return {k: v + 0.1 * torch.randn(v.shape, generator=generator) for k, v in net.state_dict().items()}


def save_run(folder, net, options, ema=False, **args):
    """A folder with ckpt.pt of a net, as a train script leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    runtime.save_checkpoint(folder / "ckpt.pt", dict(
        model=stirred(net, 0), ema=stirred(net, 1) if ema else None, optimizer={}, step=8, best=0.0,
        rng=torch.get_rng_state(), args=dict(args, model=options)))
    return folder


def save_sit(folder, **args):
    options = dict(input_size=8, patch_size=4, in_chans=1, num_classes=10, embed_dim=32, depth=2,
                   num_heads=2, alpha_min=0.8, long_skips=True)
    facts = dict(kind="sit", backbone="sit", data="digits8x8", img_size=8, path="linear", latents=False,
                 label_dropout=0.1, holdout=0.0, seed=0, train_images=1442, classes=10, in_chans=1,
                 class_counts=[144, 146, 142, 147, 145, 146, 145, 144, 140, 143])
    return save_run(folder, SiT(**options), options, ema=True, **facts | args)


def save_vit(folder, side=8, chans=1, classes=10, **args):
    options = dict(img_size=side, patch_size=side // 2, in_chans=chans, num_classes=classes,
                   embed_dim=24, depth=1, num_heads=2)
    facts = dict(kind="vit", data="digits8x8", img_size=side, in_chans=chans, holdout=0.0, seed=0)
    return save_run(folder, ViT(**options), options, **facts | args)


def draw(run, count, *flags):
    """The images of a call, uint8 (N, Y, X, 3)."""
    samples.main(command(run, count, *flags))
    with np.load(run / "samples.npz") as z:
        assert z.files == ["arr_0"] and z["arr_0"].dtype == np.uint8
        return z["arr_0"]


def command(run, count, *flags):
    return [str(word) for word in ("--threads", 1, "--device", "cpu", "--ckpt", run, "--count", count,
                                   "--steps", 2, *flags)]


def results(run):
    return json.loads((run / "samples.json").read_text(encoding="utf-8"))


def script(argv):
    runtime.run_script(lambda: samples.main(argv))


def by_hand(run, weights, n, scale=1.0, seed=0):
    """n samples of a checkpoint by two plain steps of Heun, with guidance written out."""
    saved = torch.load(run / "ckpt.pt", weights_only=True)
    net = SiT(**saved["args"]["model"])
    net.load_state_dict(saved[weights])
    seeds = [runtime.mix_seed(seed, "sample", i) for i in range(32)]
    x = torch.stack([torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(s)) for s in seeds])
    y = samples.label_sequence(saved["args"]["class_counts"], 32)

    @torch.no_grad()
    def v(x, t):
        t = torch.full((32,), t)
        null = net(x, t, torch.full_like(y, 10))
        return null + scale * (net(x, t, y) - null)
    for t in (0.0, 0.5):
        a = v(x, t)
        x = x + (a + v(x + a / 2, t + 0.5)) / 4
    return ((x[:n].clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 1).expand(-1, -1, -1, 3).numpy()


@pytest.mark.parametrize("scale, flags", [(1.0, []), (3.0, ["--cfg-scale", 3, "--seed", 4])])
def test_samples_are_those_of_the_averaged_weights(tmp_path, scale, flags):
    """The seed is the run's unless given; the checkpoint is left as it is."""
    run = save_sit(tmp_path / "run", seed=7)
    before, seed = contents(run), 4 if flags else 7
    images = draw(run, 5, *flags)
    assert images.shape == (5, 8, 8, 3)
    assert np.abs(images.astype(int) - by_hand(run, "ema", 5, scale, seed)).max() <= 1
    assert np.abs(images.astype(int) - by_hand(run, "model", 5, scale, seed)).max() > 5
    after = contents(run)
    assert after.keys() - before.keys() == {"samples.png", "samples.npz", "samples.json"}
    assert after["ckpt.pt"] == before["ckpt.pt"]
    found = results(run)
    assert (found["seed"], found["cfg_scale"], found["weights"]) == (seed, scale, "ema")
    assert (found["step"], found["count"], found["sampler"], found["steps"]) == (8, 5, "heun", 2)


def test_two_processes_draw_the_same(tmp_path):
    """70 samples by one process and by two, and the first 9 alone: equal to the bit, guided too."""
    run = save_sit(tmp_path / "run")
    alone = draw(run, 70, "--sampler", "sde", "--cfg-scale", 2)
    assert (draw(run, 9, "--sampler", "sde", "--cfg-scale", 2) == alone[:9]).all()
    codes, outputs = launch_ranks(2, script, command(run, 70, "--sampler", "sde", "--cfg-scale", 2),
                                  folder=tmp_path)
    assert codes == [0, 0], outputs
    with np.load(run / "samples.npz") as z:
        assert (z["arr_0"] == alone).all()


def test_frechet_distance_on_vit_features(tmp_path):
    """That of the features before the head, of the samples in the npz and the validation images."""
    run, judge = save_sit(tmp_path / "run"), save_vit(tmp_path / "judge")
    pixels = draw(run, 40, "--frechet", judge, "--out", run)
    saved, images = torch.load(judge / "ckpt.pt", weights_only=True), data.load_images("digits8x8")
    net, transform = ViT(**saved["args"]["model"]), data.eval_transform(images, 8)
    net.load_state_dict(saved["model"])
    made = torch.from_numpy(pixels[..., :1]).permute(0, 3, 1, 2)
    a, b = (net.forward_features(transform(x))[:, 0].detach().double().numpy()
            for x in (images.val.images, made))
    roots = np.sqrt(np.linalg.eigvals(np.cov(a.T) @ np.cov(b.T)).astype(complex)).real.sum()
    truth = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(np.cov(a.T) + np.cov(b.T)) - 2 * roots
    assert results(run)["frechet_vit"] == pytest.approx(truth, rel=1e-3)
    assert 0 < results(run)["frechet_floor"] < truth
    draw(run, 40, "--frechet", judge, "--frechet-set", "train")
    assert results(run)["frechet_vit"] != pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("kind", ["a folder", "emoji"])
def test_frechet_distance_between_images_of_other_sizes(tmp_path, kind):
    """Samples of 12 x 12, a ViT of 16 x 16, images of another size. Real images go through the samples'
    size, so a net that says real images exactly has distance 0."""
    name = "emoji"
    if kind == "a folder":
        name = tmp_path / "photos"
        for i in range(12):
            path = name / ("train" if i < 8 else "val") / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (44, 30 + i), (20 * i, 9 * i, 200 - 9 * i)).save(path)
    images = data.load_images(name)
    few = {part: torch.arange(min(60, len(getattr(images, part)))) for part in ("train", "val")}
    images.train, images.val = images.train.take(few["train"]), images.val.take(few["val"])
    shrink = v2.Compose(data.resize_steps(images, 12))
    real = torch.stack([shrink(images.val[i][0]) for i in range(len(images.val))])
    judge = samples.load_judge(save_vit(tmp_path / "judge", 16, 3, 7, data="emoji"), 3)
    found = samples.measure_frechet(real, images, judge, "val", torch.device("cpu"))
    assert found["frechet_vit"] == pytest.approx(0, abs=1e-4 * found["frechet_floor"])
    found = samples.measure_frechet(real, images, judge, "train", torch.device("cpu"))
    assert found["frechet_vit"] == pytest.approx(found["frechet_floor"], rel=1e-6)


def test_the_judge_normalises_with_its_own_statistics(tmp_path):
    """Those of the half of the emoji that the holdout of its own seed left to train on."""
    judge = save_vit(tmp_path / "judge", 16, 3, 7, data="emoji", holdout=0.5, seed=3)
    images, own = data.load_images("emoji"), data.load_images("emoji", 0.5, 3)
    x = images.val[0][0]
    found = v2.Compose(samples.load_judge(judge, 3)[1])(x)
    torch.testing.assert_close(found, data.eval_transform(own, 16)(x))
    assert (found - data.eval_transform(images, 16)(x)).abs().max() > 1e-4


def test_fid_through_torch_fidelity(tmp_path, monkeypatch):
    """What the package is handed, uint8 images of three channels, and where its figures go."""
    def calculate_metrics(input1, input2, fid, isc, **rest):
        assert input1[0].shape == (3, 8, 8) and input1[0].dtype == torch.uint8 and len(input1) == 4
        assert input2 == str(tmp_path)
        return {"frechet_inception_distance": 12.5, "inception_score_mean": 67.5}
    package = types.SimpleNamespace(calculate_metrics=calculate_metrics)
    monkeypatch.setitem(sys.modules, "torch_fidelity", package)
    run = save_sit(tmp_path / "run")
    draw(run, 4, "--fid", tmp_path)
    assert (results(run)["fid"], results(run)["inception_score"]) == (12.5, 67.5)


sentence = functools.partial(one_sentence, script)


@pytest.mark.parametrize("args, flags, words", [
    ({}, ["--ckpt", "nowhere"], "--ckpt nowhere"),
    ({}, ["--ckpt", "JUDGE"], "not of train_sit.py"),
    ({"label_dropout": 0.0}, ["--cfg-scale", 2], "has label_dropout 0"),
    ({"latents": True}, [], "pass --vae"),
    ({"latents": True}, ["--vae", "x", "--frechet", "JUDGE"], "trained on latents: use --fid"),
    ({}, ["--fid", "nowhere"], "--fid nowhere is not a folder"),
    ({}, ["--fid", "."], "pip install torch-fidelity"),
    ({}, ["--frechet", "RUN"], "is a sit of 1 channels"),
    ({"in_chans": 3}, ["--frechet", "JUDGE"], "samples have 3"),
    ({}, ["--frechet", "JUDGE", "--data", "mnist5k"], "train_images 4000"),
    ({}, ["--frechet", "JUDGE", "--data", "nowhere"], "--data 'nowhere'"),
], ids=str)
def test_bad_input(tmp_path, capsys, monkeypatch, args, flags, words):
    """One sentence, exit code 2, and nothing written."""
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    places = dict(RUN=save_sit(tmp_path / "run", **args), JUDGE=save_vit(tmp_path / "judge"))
    flags = [places.get(flag, flag) for flag in flags]
    assert words in sentence(capsys, command(places["RUN"], 2, *flags))
    assert sorted(contents(Path(places["RUN"]))) == ["ckpt.pt"]


# --------------------------------------------------------------------------------------------------
# guidance

def test_guidance_extrapolates_from_no_label_to_the_label():
    """In one pass of twice the batch; a scale of 1 is the model itself, as cheap."""
    batches = []

    def velocity(x, t, y):
        batches.append(len(x))
        return x * t[:, None] + y[:, None].double()
    x, t, y = noise(4), torch.linspace(0, 1, 4, dtype=torch.float64), torch.arange(4)
    found = guided(velocity, 9, 3.0)(x, t, y)
    torch.testing.assert_close(found, x * t[:, None] + (9 + 3 * (y[:, None] - 9)).double())
    assert batches == [8] and guided(velocity, 9, 1.0) is velocity
    torch.testing.assert_close(guided(velocity, 9, 0.0)(x, t, y), velocity(x, t, torch.full_like(y, 9)))
