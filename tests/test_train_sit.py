"""train_sit.py as people use it: killed and resumed, on one process and on two, compiled, sampled from, with wrong input; and its draws against counts."""
import dataclasses
import functools
import json
import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import data
import flow
import runtime
import train_sit
import train_vit
from model import SiT
from test_runtime import launch_ranks
from test_train_vit import assert_close, assert_same_run, contents, keys, load, one_sentence, rows, stop_at

pytestmark = pytest.mark.usefixtures("no_curve")
TINY = ["--threads", "1", "--device", "cpu", "--data", "digits8x8", "--patch-size", "4", "--depth", "2", "--batch-size", "32", "--steps", "8", "--warmup", "2",
        "--lr", "1e-3", "--ema", ".9", "--eval-every", "4", "--save-every", "4", "--log-every", "1", "--samples", "4", "--sample-steps", "2"]
CPU = runtime.World(0, 1, torch.device("cpu"), "test")


def command(out, *flags):
    return [*TINY, "--out", str(out), *map(str, flags)]


def sampling(out, count, *flags):
    """The flags of --sample, which refuses those of training."""
    return [*map(str, ["--threads", "1", "--device", "cpu", "--out", out, "--sample", count, "--sample-steps", "2", *flags])]


def train(out, *flags):
    """A run within this process. Returns its checkpoint."""
    train_sit.main(command(out, *flags))
    return load(out)


def script(argv):
    runtime.plot_curve = lambda *arguments, **more: None
    runtime.run(lambda: train_sit.main(argv))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, to be copied and not changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(out)
    return out


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


# ---------------------------------------------------------------------------------------------------------------------
# what a run leaves

def test_what_a_run_leaves(finished):
    assert sorted(contents(finished)) == ["args.json", "ckpt.pt", "curve.png", "log.jsonl", "samples.png"]
    lines = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    train_lines, eval_lines = [r for r in lines if "loss" in r], [r for r in lines if "val_loss" in r]
    assert all({"step", "epoch", "loss", "lr", "grad_norm", "images_per_s"} == r.keys() for r in train_lines)
    assert [r.keys() for r in eval_lines] == [{"step", "val_loss", "alpha_eff"}] * 2 and [r["step"] for r in eval_lines] == [4, 8]
    assert [r["lr"] for r in train_lines] == [5e-4] + [1e-3] * 7           # warm-up, then constant
    saved = load(finished)
    assert set(saved) == {"model", "ema", "optimizer", "step", "best", "rng", "args"} and saved["best"] == min(r["val_loss"] for r in eval_lines)
    made = saved["args"]
    assert made["kind"] == "sit" and made["backbone"] == "sit" and made["classes"] == 10 and made["in_chans"] == 1 and made["img_size"] == 8
    SiT(**made["model"]).load_state_dict(saved["model"])         # the options alone rebuild the net
    assert made == json.loads((finished / "args.json").read_text())
    for name in ("curve.png", "samples.png"):
        with Image.open(finished / name) as picture:
            assert picture.width > 200


def test_first_and_last_lines(tmp_path, capsys):
    train(tmp_path / "run", "--opt", "soap", "--micro-batch", "16", "--steps", "2")
    printed = capsys.readouterr().out
    for words in ("opt=soap", torch.__version__, "1442 training and 355 validation images, 1 x 8 x 8, 10 classes", "decayed, alpha_min 0.8, alpha_eff 6.47e-01, long skips",
                  "both sides", "32 = 1 processes x 2 micro-steps x 16; 2 steps"):
        assert words in printed, words
    assert re.fullmatch(r"val loss \d\.\d{4}", printed.splitlines()[-1])


@pytest.mark.parametrize("flags", [["--backbone", "uvit", "--path", "gvp", "--opt", "muon"], ["--shortcut", "residual", "--no-long-skips", "--lr-schedule", "cosine"],
                                   ["--alpha-eff", ".3", "--schedule", "cosine", "--opt", "kl-shampoo", "--sampler", "sde"], ["--ema", "0", "--decay-on", "attn", "--learn-sigma"],
                                   ["--backbone", "uvit", "--skipless", "--no-zero-init", "--sampler", "heun", "--cfg-scale", "2"]], ids=" ".join)
def test_every_variant_runs(tmp_path, flags):
    saved = train(tmp_path / "run", *flags, "--steps", "3", "--eval-every", "3")
    assert rows(tmp_path / "run")[-1]["val_loss"] < 5
    if "--alpha-eff" in flags:
        assert train_sit.build_model("sit", saved["args"]["model"]).alpha_eff == pytest.approx(0.3)
    if "cosine" in flags and "--lr-schedule" in flags:
        assert [r["lr"] for r in rows(tmp_path / "run") if "loss" in r] == [runtime.lr_at(s, 3, 2, 1e-3) for s in range(3)]


def test_images_of_a_folder_need_a_size_and_run(tmp_path, capsys):
    for i in range(8):
        path = tmp_path / "photos" / ("train" if i < 6 else "val") / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20), (30 * i, 0, 99)).save(path)
    flags = ["--data", tmp_path / "photos", "--batch-size", "4", "--steps", "1"]
    assert "--img-size" in sentence(capsys, command(tmp_path / "out", *flags))
    assert train(tmp_path / "out", *flags, "--img-size", "16")["args"]["in_chans"] == 3


# ---------------------------------------------------------------------------------------------------------------------
# interrupted and resumed, several processes

def test_killed_run_equals_the_uninterrupted_one(tmp_path):
    """Cut off two steps after a save and started again: weights, EMA, optimizer, log, all to the bit; and samples on the way disturb nothing."""
    flags = ["--opt", "soap", "--micro-batch", "16", "--data", "digits8x8"]
    train(tmp_path / "whole", *flags)
    stop_at(train_sit.main, 6, command(tmp_path / "cut", *flags))
    assert load(tmp_path / "cut")["step"] == 4 and rows(tmp_path / "cut")[-1]["step"] == 6
    train(tmp_path / "cut", *flags, "--samples", "0")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_resume_refuses_another_run_and_says_what_changed(copied, capsys):
    said = sentence(capsys, command(copied, "--alpha-min", ".5", "--steps", "10"))
    assert "--alpha-min 0.8" in said and "--alpha-min 0.5" in said
    assert "has 4000 training images" in sentence(capsys, command(copied, "--data", "mnist5k", "--img-size", "8"))
    assert "finished run" in sentence(capsys, command(copied, "--lr", "5e-4"))
    train(copied, "--steps", "10", "--lr", "5e-4")
    printed = capsys.readouterr().out
    assert "--lr was 0.001 and is 0.0005" in printed and "step 8, lr 0.0005" in printed


def test_finished_run_says_its_figure_again(copied, capsys):
    before = contents(copied)
    train(copied)
    assert capsys.readouterr().out.splitlines()[-1] == f"val loss {rows(copied)[-1]['val_loss']:.4f}"
    assert all(contents(copied)[name] == before[name] for name in ("ckpt.pt", "log.jsonl"))


def wide(argv):
    """The run of argv with the model in float64, so that the order of summation does not matter."""
    build = train_sit.build_model

    def build_wide(*arguments):
        raw = build(*arguments).double()
        raw.register_forward_pre_hook(lambda module, x: (x[0].double(), *x[1:]))
        return raw
    train_sit.build_model = build_wide
    script(argv)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process with the whole batch, in float64."""
    folder = tmp_path_factory.mktemp("alone")
    codes, outputs = launch_ranks(1, wide, command(folder / "run"), folder=folder)
    assert codes == [0], outputs
    return folder / "run"


@pytest.mark.parametrize("n, micro", [(1, 8), (2, 16), (2, 8)])
def test_processes_and_micro_batches_do_not_matter(tmp_path, alone, n, micro):
    """Noise, times and dropped labels belong to the sample's place in the global batch: losses, norms, weights, EMA and validation agree."""
    codes, outputs = launch_ranks(n, wide, command(tmp_path / "many", "--micro-batch", micro), folder=tmp_path)
    assert codes == [0] * n, outputs
    for a, b in zip(rows(tmp_path / "many"), rows(alone), strict=True):
        assert a == {k: pytest.approx(v, rel=1e-6) for k, v in b.items()}
    one, many = load(alone), load(tmp_path / "many")
    assert_close(many, one, tolerance=1e-7)
    assert_close({"model": many["ema"]}, {"model": one["ema"]}, tolerance=1e-7)
    with Image.open(alone / "samples.png") as a, Image.open(tmp_path / "many" / "samples.png") as b:
        assert np.abs(np.asarray(a, dtype=int) - np.asarray(b, dtype=int)).max() <= 1


def test_compile_changes_no_key_and_ema_moves(tmp_path, monkeypatch):
    """Traced and wrapped as by --compile (without the C++, which train_vit.py's test takes): the same keys, and averaged weights that follow."""
    plain = train(tmp_path / "plain", "--steps", "2")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled = train(tmp_path / "compiled", "--steps", "2", "--compile")
    assert keys(compiled) == keys(plain)
    assert_close(compiled, plain, tolerance=1e-3, but_key_bias=True)
    assert_close({"model": compiled["ema"]}, {"model": plain["ema"]}, tolerance=1e-3, but_key_bias=True)
    assert not torch.equal(compiled["ema"]["head.weight"], compiled["model"]["head.weight"]) and compiled["ema"]["head.weight"].any()


# ---------------------------------------------------------------------------------------------------------------------
# draws

def arguments(*flags):
    return train_sit.get_args(command("unused", *flags))


def test_label_drop_rate():
    """Over 500 steps of 64 the share of dropped labels is --label-dropout to within four standard errors, for any seed; and it is none for 0."""
    for rate in (0.1, 0.4):
        dropped = torch.cat([train_sit.draws(arguments("--label-dropout", rate, "--batch-size", "64"), step, (1,))[2] for step in range(500)])
        assert abs(dropped.double().mean().item() - rate) < 4 * (rate * (1 - rate) / len(dropped)) ** 0.5
    assert not train_sit.draws(arguments("--label-dropout", "0"), 0, (1,))[2].any()


def test_the_net_is_told_which_labels_are_dropped(tmp_path, monkeypatch):
    """What reaches the model is the draw of that step, so that the null class is learned from as many samples."""
    seen, forward = [], SiT.forward

    def spy(self, x, t, y, drop=None):
        if drop is not None:
            seen.append((t, drop))
        return forward(self, x, t, y, drop)
    monkeypatch.setattr(SiT, "forward", spy)
    train(tmp_path / "run", "--steps", "3", "--label-dropout", ".3", "--micro-batch", "16")
    for step in range(3):
        _, t, drop = train_sit.draws(arguments("--label-dropout", ".3"), step, (1, 8, 8))
        assert torch.equal(torch.cat([s[1] for s in seen[2 * step:2 * step + 2]]), drop)
        assert torch.equal(torch.cat([s[0] for s in seen[2 * step:2 * step + 2]]), t)


def test_draws_are_functions_of_seed_and_step():
    one, again, later, other = (train_sit.draws(arguments("--seed", s), step, (3, 8, 8)) for s, step in ((0, 5), (0, 5), (0, 6), (1, 5)))
    assert all(torch.equal(a, b) for a, b in zip(one, again))
    assert not torch.equal(one[0], later[0]) and not torch.equal(one[1], later[1]) and not torch.equal(one[0], other[0])
    assert 0 <= one[1].min() and one[1].max() < 1 and abs(one[0].std().item() - 1) < 0.05


def test_loss_of_a_net_that_says_zero_is_that_of_the_target(tmp_path):
    """At step 0 SiT says 0, so the first loss is E |x_1 - x_0|^2 = 1 + E x_1^2, pixels in [-1, 1]: the target's sign and scale show."""
    train(tmp_path / "run", "--steps", "1", "--batch-size", "512", "--no-flip")
    images = data.load_images("digits8x8").train.images.float() / 127.5 - 1
    assert rows(tmp_path / "run")[0]["loss"] == pytest.approx(1 + images.square().mean().item(), rel=0.02)


def test_validation_meets_the_same_noise_in_every_run(finished):
    """A net's validation loss does not depend on the run's seed or batch size, and times cover [0, 1] evenly."""
    saved, losses = load(finished), []
    net = SiT(**saved["args"]["model"])
    net.load_state_dict(saved["ema"])
    for flags in ((), ("--seed", "3", "--micro-batch", "16")):
        args = arguments(*flags)
        runtime.split_batch(args, CPU)
        images, _, transform, _ = train_sit.load_data(args)
        losses.append(train_sit.evaluate(net, images, transform, args, CPU, torch.float32))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] == pytest.approx(rows(finished)[-1]["val_loss"], rel=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# sampling

def npz(out):
    with np.load(Path(out) / "samples.npz") as z:
        assert z.files == ["arr_0"]
        return z["arr_0"]


def by_hand(saved, weights, n, scale=1.0, steps=2, seed=0):
    """n samples of a checkpoint by a plain Heun loop over one group of 32, with guidance written out."""
    net = SiT(**saved["args"]["model"])
    net.load_state_dict(saved[weights])
    x = torch.stack([torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(runtime.mix_seed(seed, "sample", i))) for i in range(32)])
    y = flow.label_sequence(saved["args"]["class_counts"], 32)

    @torch.no_grad()
    def v(x, t):
        t = torch.full((32,), t)
        null = net(x, t, torch.full_like(y, 10))
        return null + scale * (net(x, t, y) - null)
    for i in range(steps):
        a = v(x, i / steps)
        x = x + (a + v(x + a / steps, (i + 1) / steps)) / 2 / steps
    return ((x[:n].clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 1).expand(-1, -1, -1, 3).numpy()


@pytest.mark.parametrize("flags, weights, words", [
    ([], "ema", "EMA weights (0.9)"), (["--no-sample-ema"], "model", "raw weights"), (["--cfg-scale", "3", "--seed", "4"], "ema", "cfg scale 3"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_sample_uses_the_weights_it_says(copied, capsys, flags, weights, words):
    """--sample: N images from the averaged weights unless told otherwise; the npz is uint8 NHWC of three channels. Nothing else in the folder changes."""
    saved = load(copied)
    for i, (name, p) in enumerate(sorted(saved["ema"].items())):                     # far from the raw weights, and no zeros
        p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    runtime.save_checkpoint(copied / "ckpt.pt", saved)
    before = contents(copied)
    train_sit.main(sampling(copied, 5, *flags))
    printed = capsys.readouterr().out
    assert words in printed and "5 samples" in printed and "heun 2 steps" in printed and "step 8" in printed
    images = npz(copied)
    assert images.shape == (5, 8, 8, 3) and images.dtype == np.uint8
    truth = by_hand(saved, weights, 5, scale=3.0 if "--cfg-scale" in flags else 1.0, seed=4 if "--seed" in flags else 0)
    assert np.abs(images.astype(int) - truth).max() <= 1
    other = by_hand(saved, "model" if weights == "ema" else "ema", 5)
    assert np.abs(images.astype(int) - other).max() > 5
    assert {n: c for n, c in contents(copied).items() if not n.startswith("samples")} == {n: c for n, c in before.items() if not n.startswith("samples")}


@pytest.mark.parametrize("sampler", flow.SAMPLERS)
def test_samples_do_not_depend_on_how_many_or_on_processes(copied, sampler):
    """70 samples by one process and by two, and the first 9 alone: equal to the bit, guided too."""
    found = []
    for n, count in ((1, 70), (2, 70), (1, 9)):
        codes, outputs = launch_ranks(n, script, sampling(copied, count, "--sampler", sampler, "--cfg-scale", "2", "--sample-steps", "3"), folder=copied.parent)
        assert codes == [0] * n, outputs
        found.append(npz(copied))
    assert (found[0] == found[1]).all() and (found[0][:9] == found[2]).all()


def test_a_run_is_found_by_the_flags_that_name_it(tmp_path, monkeypatch, capsys):
    """Without --out; with it they would have no effect. The checkpoint says the rest, and its --data is not read."""
    monkeypatch.chdir(tmp_path)
    made = train("out/sit-nano-residual-adamw-seed0", "--shortcut", "residual", "--steps", "1")
    runtime.save_checkpoint("out/sit-nano-residual-adamw-seed0/ckpt.pt", made | dict(args=made["args"] | dict(data="nowhere")))
    train_sit.main(["--shortcut", "residual", "--sample", "2", "--sample-steps", "2"])
    assert npz("out/sit-nano-residual-adamw-seed0").shape == (2, 8, 8, 3)
    assert "--shortcut has no effect with --sample" in sentence(capsys, sampling("out/sit-nano-residual-adamw-seed0", 2, "--shortcut", "residual"))


def test_any_number_of_processes_samples(copied):
    """Three, by which the training's batch of 64 cannot be divided."""
    codes, outputs = launch_ranks(3, script, sampling(copied, 2), folder=copied.parent)
    assert codes == [0] * 3 and npz(copied).shape == (2, 8, 8, 3), outputs


@pytest.mark.parametrize("flags, words", [
    *((flags, [flags[0].replace("no-", ""), "no effect with --sample"]) for flags in (
        ["--path", "gvp"], ["--backbone", "uvit"], ["--alpha-min", ".5"], ["--lr", ".1"], ["--steps", "9"], ["--holdout", ".1"], ["--encode-latents", "l"], ["--no-flip"],
        ["--batch-size", "7"], ["--micro-batch", "7"], ["--samples", "3"], ["--measure-samples", "9"])),
    (["--fresh"], ["--fresh", "no effect with --sample"]), (["--data", "emoji"], ["--data", "without --frechet"]), (["--vae", "x"], ["--vae", "net of pixels"]),
    (["--frechet-set", "train"], ["--frechet-set", "without --frechet"]), (["--sample", "1", "--frechet", "VIT"], ["--frechet", "--sample of at least 2"]),
    (["--data", "emoji", "--frechet", "VIT"], ["--data emoji", "2202 training images", "trained on 1442", "where those are now"]),
    (["--data", "nowhere", "--frechet", "VIT"], ["--data 'nowhere'"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "")
def test_sample_refuses_what_has_no_effect(copied, vit, capsys, flags, words):
    before = contents(copied)
    said = sentence(capsys, sampling(copied, 2, *(str(vit) if f == "VIT" else f for f in flags)))
    assert all(w in said for w in words), said
    assert contents(copied) == before


@pytest.mark.parametrize("damage, words", [
    (lambda saved: saved.pop("optimizer"), ["not a whole checkpoint"]), (lambda saved: saved["args"].pop("class_counts"), ["lacks class_counts"]),
    (lambda saved: saved["args"].pop("kind"), []), (lambda saved: saved["args"].update(lm=True), ["language model"]),
    (lambda saved: saved["ema"].pop("head.weight"), ["head.weight"]), (None, ["not a whole checkpoint"])])
def test_sample_needs_a_whole_checkpoint_of_its_own(copied, capsys, damage, words):
    saved = load(copied)
    if damage:
        damage(saved)
        torch.save(saved, copied / "ckpt.pt")
    else:
        (copied / "ckpt.pt").write_bytes(b"x")
    said = sentence(capsys, sampling(copied, 2))
    assert "--out" in said and "ckpt.pt" in said and said.endswith(": train first, or pass the --out of a run of train_sit.py") and "--fresh" not in said
    assert all(w in said for w in words), said


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    out = tmp_path_factory.mktemp("vit") / "run"
    train_vit.main(["--threads", "1", "--device", "cpu", "--data", "digits8x8", "--img-size", "8", "--patch-size", "4", "--depth", "2", "--batch-size", "64",
                    "--epochs", ".5", "--out", str(out)])
    return out / "ckpt.pt"


def test_frechet_distance_on_vit_features(copied, vit, capsys):
    """The printed figure is the distance of the features before the head, of the samples in the npz and the validation images; never called FID."""
    train_sit.main(sampling(copied, 40, "--frechet", vit))
    printed = capsys.readouterr().out.splitlines()[-1]
    assert "Fréchet distance (ViT features)" in printed and "FID" not in printed
    for words in ("355 val images", "40 samples", "cfg scale 1", "heun 2 steps", "EMA"):
        assert words in printed, words
    args = train_vit.get_args(["--data", "digits8x8", "--img-size", "8", "--patch-size", "4", "--depth", "2"])
    images = data.load_images("digits8x8")
    net = train_vit.build_model(args, images)[0].eval()
    net.load_state_dict(torch.load(vit, weights_only=True)["model"])
    transform = data.eval_transform(images, 8)
    a, b = (net.forward_features(transform(x))[:, 0].detach().double().numpy()
            for x in (images.val.images, torch.from_numpy(npz(copied))[..., :1].permute(0, 3, 1, 2)))
    product = np.linalg.eigvals(np.cov(a.T) @ np.cov(b.T))      # their roots' sum is the trace of the product's root
    truth = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(np.cov(a.T)) + np.trace(np.cov(b.T)) - 2 * np.sqrt(product.astype(complex)).real.sum()
    assert float(re.search(r"features\) ([\d.]+)", printed).group(1)) == pytest.approx(truth, rel=1e-3)


def test_frechet_distance_at_the_end_of_training_is_logged(tmp_path, vit):
    train(tmp_path / "run", "--frechet", vit, "--measure-samples", "6", "--frechet-set", "train", "--steps", "2")
    last = rows(tmp_path / "run")[-1]
    assert last["step"] == 2 and last["measured_samples"] == 6 and last["frechet_vit"] > 0 and "cfg scale 1, heun 2 steps" in last["measured_how"]


@pytest.mark.parametrize("make", [lambda i: torch.full((3, 30 + i, 44), 20 * i, dtype=torch.uint8).numpy(), None], ids=["a folder", "emoji"])
def test_frechet_distance_between_images_of_other_sizes(tmp_path, vit3, make):
    """Samples of 12 x 12, a ViT of 16 x 16, images of 32 x 32 or of any size: real images go through the samples' size and then, as the samples do, through the
    ViT's. So a net that says real images exactly, here by a stand-in for the samples, has distance 0."""
    name = "emoji"
    if make:
        name = tmp_path / "photos"
        for i in range(12):
            path = name / ("train" if i < 8 else "val") / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(make(i).transpose(1, 2, 0)).save(path)
    images = data.load_images(name)
    if not make:                                                 # fewer, to be quick
        images = dataclasses.replace(images, train=images.train.take(torch.arange(99)), val=images.val.take(torch.arange(60)))
    shrink = train_sit.v2.Compose(data.fit(images, 12))
    real = torch.stack([shrink(images.val[i][0]) for i in range(len(images.val))])
    assert real.shape[1:] == (3, 12, 12) and real.dtype == torch.uint8
    args = train_sit.get_args(["--data", str(name), "--frechet", str(vit3)])
    judge = train_sit.check_measures(args, images, False, 12)
    record = train_sit.measure(real, args, images, judge, CPU, "how")[1]
    assert record["frechet_vit"] == pytest.approx(0, abs=1e-4) and record["frechet_floor"] > 1e-2
    args.frechet_set = "train"                                   # the other way round
    assert train_sit.measure(real, args, images, judge, CPU, "how")[1]["frechet_vit"] == pytest.approx(record["frechet_floor"], rel=1e-6)


@pytest.fixture(scope="module")
def vit3(tmp_path_factory):
    """A ViT of colour images of 16 x 16, trained on part of the emoji."""
    out = tmp_path_factory.mktemp("vit3") / "run"
    train_vit.main(["--threads", "1", "--device", "cpu", "--data", "emoji", "--img-size", "16", "--patch-size", "8", "--depth", "1", "--batch-size", "64",
                    "--epochs", ".1", "--holdout", ".5", "--seed", "3", "--out", str(out)])
    return out / "ckpt.pt"


def test_the_judge_normalises_with_its_own_statistics(vit3):
    """Those of the half of the emoji that the holdout of its own seed left to train on."""
    images, own = data.load_images("emoji"), data.load_images("emoji", 0.5, 3)
    x = images.val[0][0]
    found = train_sit.v2.Compose(train_sit.load_judge(vit3, images, 32)[1])(x)
    torch.testing.assert_close(found, data.eval_transform(own, 16)(x))
    assert (found - data.eval_transform(images, 16)(x)).abs().max() > 1e-4


def test_frechet_at_another_img_size_than_the_datas(tmp_path, vit):
    """The whole way: trained at 16 x 16 on digits of 8 x 8 and judged by a net of 8 x 8."""
    train(tmp_path / "run", "--img-size", "16", "--steps", "1", "--frechet", vit, "--measure-samples", "4")
    assert rows(tmp_path / "run")[-1]["frechet_vit"] > 0


def test_a_measure_that_fails_costs_no_training(tmp_path, vit, monkeypatch):
    """The checkpoint is there before; and the same command then measures what it holds."""
    def fail(*arguments):
        raise RuntimeError("no memory")
    flags = ["--steps", "2", "--samples", "0", "--frechet", vit, "--measure-samples", "4"]
    with monkeypatch.context() as patch:
        patch.setattr(train_sit, "measure", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            train(tmp_path / "run", *flags)
    assert load(tmp_path / "run")["step"] == 2 and "frechet_vit" not in rows(tmp_path / "run")[-1]
    train(tmp_path / "run", *flags)
    assert [r["step"] for r in rows(tmp_path / "run") if "frechet_vit" in r] == [2]


def test_data_that_has_moved(tmp_path, vit, capsys):
    """Sampling looks for the images where --data says, and otherwise names the checkpoint and the remedy; the judge's own are named with --frechet."""
    for i in range(16):
        path = tmp_path / "old" / ("train" if i < 8 else "val") / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (15 * i, 0, 99)).save(path)
    judge = tmp_path / "judge"
    train_vit.main(["--threads", "1", "--device", "cpu", "--data", str(tmp_path / "old"), "--img-size", "8", "--patch-size", "4", "--depth", "1", "--batch-size", "4",
                    "--epochs", "1", "--out", str(judge)])
    train(tmp_path / "run", "--data", tmp_path / "old", "--img-size", "8", "--batch-size", "4", "--steps", "1")
    shutil.move(tmp_path / "old", tmp_path / "new")
    flags = sampling(tmp_path / "run", 2, "--frechet", judge)
    said = sentence(capsys, flags)
    assert f"{tmp_path / 'run' / 'ckpt.pt'} was trained on --data {tmp_path / 'old'}" in said and "pass --data" in said
    said = sentence(capsys, [*flags, "--data", tmp_path / "new"])
    assert f"--frechet {judge}" in said and f"--data {tmp_path / 'old'}" in said
    saved = load(judge)
    runtime.save_checkpoint(judge / "ckpt.pt", saved | dict(args=saved["args"] | dict(data=str(tmp_path / "new"))))
    capsys.readouterr()
    train_sit.main([*flags, "--data", str(tmp_path / "new")])
    assert "to the 8 val images" in capsys.readouterr().out


def test_fid_through_torch_fidelity(copied, capsys, monkeypatch):
    """What the package is handed: three-channel uint8 images; and what comes back is printed with all it depends on."""
    def calculate_metrics(input1, input2, fid, isc, **rest):
        assert input1[0].shape == (3, 8, 8) and input1[0].dtype == torch.uint8 and len(input1) == 4 and input2 == str(copied.parent / "photos")
        return {"frechet_inception_distance": 12.345, "inception_score_mean": 67.89}
    monkeypatch.setitem(sys.modules, "torch_fidelity", types.SimpleNamespace(calculate_metrics=calculate_metrics))
    photos = copied.parent / "photos"
    photos.mkdir()
    assert f"--fid {photos} is not a folder of images" in sentence(capsys, sampling(copied, 4, "--fid", photos))
    Image.new("RGB", (8, 8)).save(photos / "a.png")
    train_sit.main(sampling(copied, 4, "--fid", photos))
    assert f"FID 12.35, Inception Score 67.9 (torch-fidelity, {photos}); 4 samples, cfg scale 1" in capsys.readouterr().out.splitlines()[-1].replace("12.34,", "12.35,")


# ---------------------------------------------------------------------------------------------------------------------
# latents

class FakeVAE(torch.nn.Module):
    """Encodes by averaging 2 x 2 pixels, decodes by repeating them; the fourth channel is the mean of the others; std 0."""

    @classmethod
    def from_pretrained(cls, name):
        if name == "missing":
            raise OSError("no such model")
        return cls()

    def encode(self, x):
        small = torch.nn.functional.avg_pool2d(x, 2)
        mean = torch.cat([small, small.mean(1, keepdim=True)], dim=1) / 0.18215
        return types.SimpleNamespace(latent_dist=types.SimpleNamespace(mean=mean, std=torch.zeros_like(mean)))

    def decode(self, z):
        return types.SimpleNamespace(sample=(z * 0.18215)[:, :3].repeat_interleave(2, 2).repeat_interleave(2, 3))


@pytest.fixture
def vae(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", types.SimpleNamespace(AutoencoderKL=FakeVAE))


def test_latents_from_images_to_samples(tmp_path, vae, capsys):
    """Images -> latents.npy with mirror images -> training without the images -> samples through the decoder."""
    train_sit.main(["--threads", "1", "--device", "cpu", "--data", "emoji", "--vae", "any", "--encode-latents", str(tmp_path / "latents"), "--micro-batch", "60"])
    z, y = np.load(tmp_path / "latents" / "latents.npy"), np.load(tmp_path / "latents" / "labels.npy")
    images = data.load_images("emoji")
    pixels = images.train.images.float() / 127.5 - 1
    small = torch.nn.functional.avg_pool2d(pixels, 2)
    assert z.shape == (2 * len(pixels), 4, 16, 16) and z.dtype == np.float16 and (y == images.train.labels.repeat_interleave(2).numpy()).all()
    np.testing.assert_allclose(z[::2, :3], small, atol=2e-3)
    np.testing.assert_allclose(z[1::2, :3], small.flip(3), atol=2e-3)
    assert len(np.load(tmp_path / "latents" / "val_latents.npy")) == len(images.val)
    assert not list((tmp_path / "latents").glob("*.tmp"))
    saved = train(tmp_path / "run", "--data", tmp_path / "latents", "--steps", "2", "--workers", "1")
    assert saved["args"]["latents"] and saved["args"]["in_chans"] == 4 and saved["args"]["img_size"] == 16 and not (tmp_path / "run" / "samples.png").exists()
    assert "without --vae" in capsys.readouterr().out
    assert "--vae" in sentence(capsys, sampling(tmp_path / "run", 2))
    train_sit.main(sampling(tmp_path / "run", 2, "--vae", "any"))
    assert npz(tmp_path / "run").shape == (2, 32, 32, 3)


def latent_folder(folder, n=80, shape=(4, 8, 8), labels=None):
    folder.mkdir()
    np.save(folder / "latents.npy", np.random.default_rng(0).standard_normal((n, *shape)).astype(np.float16))
    np.save(folder / "labels.npy", np.arange(n) // 2 % 2 if labels is None else labels)
    return folder


def test_latents_without_validation_are_split_with_their_mirror_images(tmp_path):
    args = arguments("--data", latent_folder(tmp_path / "l"))
    images, _, _, is_latent = train_sit.load_data(args)
    assert is_latent and args.img_size == 8 and len(images.train) + len(images.val) == 80 and len(images.val) == 4
    held = set(images.val.index.tolist())
    assert held == {i ^ 1 for i in held} and not held & set(images.train.index.tolist())
    x, y = images.val[1]
    i = images.val.index[1].item()
    assert torch.equal(x, torch.from_numpy(np.load(tmp_path / "l" / "latents.npy")[i]).float()) and y == i // 2 % 2


@pytest.mark.parametrize("damage, word", [
    (lambda f: (f / "labels.npy").unlink(), "labels.npy"),
    (lambda f: (f / "latents.npy").write_bytes(b"x"), "latents.npy"),
    (lambda f: np.save(f / "labels.npy", np.zeros(3, dtype=np.int64)), "labels.npy"),
    (lambda f: np.save(f / "labels.npy", np.arange(80) % 3 - 1), "labels.npy has the label -1, and labels count from 0"),
    (lambda f: np.savez((f / "latents.npy").open("wb"), np.zeros((80, 4, 8, 8))), "latents.npy"),
    (lambda f: np.savez((f / "labels.npy").open("wb"), np.zeros(80, dtype=int)), "labels.npy"),
    (lambda f: np.save(f / "labels.npy", np.arange(80)), "share of 0.05 of each class: pass a larger --holdout, or add val_latents.npy"),
    (lambda f: np.save(f / "latents.npy", np.zeros((80, 4, 8), dtype=np.float16)), "latents.npy"),
])
def test_damaged_latents(tmp_path, capsys, damage, word):
    folder = latent_folder(tmp_path / "l")
    damage(folder)
    assert word in sentence(capsys, command(tmp_path / "out", "--data", folder)) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags, words", [(["--flip"], ["--flip", "latents"]), (["--no-flip"], ["--flip", "latents"]), (["--frechet", "x"], ["--frechet", "latents"]),
                                          (["--fid", "."], ["--fid", "--vae"]), (["--img-size", "9"], ["--img-size 9"]), (["--holdout", ".01"], ["--holdout 0.01", "raise it"])])
def test_flags_that_latents_refuse(tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.setitem(sys.modules, "torch_fidelity", types.SimpleNamespace())
    said = sentence(capsys, command(tmp_path / "out", "--data", latent_folder(tmp_path / "l"), *flags))
    assert all(w in said for w in words) and not (tmp_path / "out").exists(), said


# ---------------------------------------------------------------------------------------------------------------------
# bad input

sentence = functools.partial(one_sentence, lambda argv: runtime.run(lambda: train_sit.main(argv)))


@pytest.mark.parametrize("flags, words", [
    (["--patch-size", "3"], ["image size", "patch size 3"]),
    (["--micro-batch", "24"], ["--batch-size 32", "--micro-batch 24"]),
    (["--batch-size", "2000"], ["--batch-size 2000", "1442"]),
    (["--depth", "3"], ["depth 3", "even"]),
    (["--skipless"], ["--skipless (--shortcut skipless) needs --backbone uvit and --no-zero-init"]), (["--backbone", "uvit", "--skipless"], ["--skipless", "--no-zero-init"]),
    (["--alpha-min", "0"], ["--alpha-min 0 needs --backbone uvit and --no-zero-init"]),
    *((["--shortcut", "residual", *flags], [f"{flags[0]} has no effect with --shortcut residual: use --shortcut decayed"]) for flags in (
        ["--alpha-min", ".5"], ["--alpha-eff", ".5"], ["--schedule", "cosine"], ["--decay-on", "mlp"])),
    (["--vae", "x"], ["--vae", "pixels"]), (["--frechet-set", "train"], ["--frechet-set", "without --frechet"]), (["--measure-samples", "9"], ["--measure-samples", "--fid"]),
    (["--frechet", "nosuch"], ["--frechet nosuch is not a file: give the ckpt.pt of a run of train_vit.py"]),
    (["--alpha-min", ".5", "--alpha-eff", ".1"], ["--alpha-eff", "--alpha-min"]),
    (["--alpha-eff", ".1", "--decay-on", "attn"], ["alpha_eff 0.1", "out of reach"]),
    (["--backbone", "uvit", "--size", "XL"], ["--size XL", "nano"]),
    (["--no-zero-init"], ["--no-zero-init", "uvit"]),
    (["--backbone", "uvit", "--learn-sigma"], ["--learn-sigma"]),
    (["--cfg-scale", "2", "--label-dropout", "0"], ["--cfg-scale", "--label-dropout"]),
    (["--sampler", "sde", "--sample-steps", "1"], ["--sample-steps", "2"]),
    (["--opt", "muon", "--betas", ".9", ".9"], ["--betas", "muon"]),
    (["--data", "nowhere/at/all"], ["--data", "nowhere/at/all"]),
    (["--frechet", "nowhere.pt"], ["nowhere.pt"]),
    (["--sample", "0"], ["--sample"]), (["--ema", "1"], ["--ema"]), (["--lr", "nan"], ["--lr"]),
    (["--encode-latents", "l"], ["--batch-size", "no effect with --encode-latents"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "")
def test_bad_flag(tmp_path, capsys, flags, words):
    """Exit code 2, one sentence that names the flag, and no folder left behind."""
    said = sentence(capsys, command(tmp_path / "out", *flags))
    assert all(w in said for w in words), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag, module", [("--fid", "torch_fidelity"), ("--wandb", "wandb")])
def test_optional_packages_are_missed_before_anything_is_written(tmp_path, capsys, monkeypatch, flag, module):
    monkeypatch.setitem(sys.modules, module, None)
    said = sentence(capsys, command(tmp_path / "out", flag, "x"))
    assert flag in said and f"pip install {module.replace('_', '-')}" in said and not (tmp_path / "out").exists()


def test_what_is_missing_is_said_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    flags = ["--device", "cpu", "--data", "digits8x8", "--encode-latents", tmp_path / "l", "--vae"]
    assert "--vae stabilityai" in sentence(capsys, flags[:-1])
    assert "--out" in sentence(capsys, sampling(tmp_path / "out", 3)) and not (tmp_path / "out").exists()
    assert "pip install diffusers" in sentence(capsys, [*flags, "any"])
    monkeypatch.setitem(sys.modules, "diffusers", types.SimpleNamespace(AutoencoderKL=FakeVAE))
    assert "--vae missing" in sentence(capsys, [*flags, "missing"]) and not (tmp_path / "l").exists()


def test_a_last_update_that_blows_up_is_said_and_not_saved(tmp_path, capsys):
    """The loss of the only step is finite, the weights after it are not."""
    said = sentence(capsys, command(tmp_path / "out", "--steps", "1", "--warmup", "0", "--lr", "1e30", "--weight-decay", "1e10", "--ema", "0"))
    assert "validation loss" in said and "step 1" in said and "1e+30" in said and not (tmp_path / "out" / "ckpt.pt").exists()


def test_checkpoints_of_other_scripts_are_refused(copied, vit, tmp_path, capsys):
    assert "another train script" in sentence(capsys, command(vit.parent))
    assert "not written by train_vit.py" in sentence(capsys, command(tmp_path / "out", "--frechet", copied / "ckpt.pt"))
    assert "samples have 3" in sentence(capsys, command(tmp_path / "out", "--data", "emoji", "--frechet", vit))


def test_paper_preset_asks_for_data_and_is_the_papers(tmp_path, capsys):
    said = sentence(capsys, ["--preset", "paper", "--out", tmp_path / "out"])
    assert "--preset paper" in said and "--encode-latents" in said
    args = train_sit.get_args(["--preset", "paper", "--data", "x"])
    assert (args.size, args.depth, args.patch_size, args.lr, args.lr_schedule, args.weight_decay, args.batch_size, args.ema, args.label_dropout, args.alpha_min,
            args.long_skips, args.path, args.opt) == ("XL", 28, 2, 1e-4, "constant", 0.0, 256, 0.9999, 0.1, 0.8, True, "linear", "adamw")
