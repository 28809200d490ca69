"""train_sit.py as people use it: killed and resumed, on several processes, with wrong input; its draws,
its path and its loss."""
import functools
import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import data
import runtime
import train_sit
from evals import samples
from model import PATHS, SiT, path_coefficients
from test_runtime import launch_ranks
from test_train_vit import (assert_close, assert_same_run, contents, keys, load, one_sentence, rows,
                            stop_at)

pytestmark = pytest.mark.usefixtures("no_curve")
TINY = ("--threads 1 --device cpu --data digits8x8 --depth 2 --batch-size 32 --steps 8 --warmup 2 "
        "--lr 1e-3 --ema .9 --eval-every 4 --save-every 4").split()
RARE = "--set patch_size=4 log_every=1 samples=4 sample_steps=2".split()


def command(out, *flags):
    return [*TINY, *RARE, "--out", str(out), *map(str, flags)]


def train(out, *flags):
    """A run within this process. Returns its checkpoint."""
    train_sit.main(command(out, *flags))
    return load(out)


def script(argv):
    runtime.run_script(lambda: train_sit.main(argv))


sentence = functools.partial(one_sentence, script)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, to be copied and not changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(out)
    return out


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


# --------------------------------------------------------------------------------------------------
# what a run leaves

def test_what_a_run_leaves(finished):
    names = ["args.json", "ckpt.pt", "curve.png", "log.jsonl", "samples.png"]
    assert sorted(contents(finished)) == names
    train_rows = [row for row in rows(finished) if "loss" in row]
    eval_rows = [row for row in rows(finished) if "val_loss" in row]
    assert all(row.keys() == {"step", "epoch", "loss", "lr", "grad_norm"} for row in train_rows)
    assert all(row.keys() == {"step", "val_loss", "alpha_eff"} for row in eval_rows)
    assert [row["step"] for row in eval_rows] == [4, 8]
    assert [row["lr"] for row in train_rows] == [5e-4] + [1e-3] * 7              # warm-up, then constant
    saved = load(finished)
    made = saved["args"]
    assert saved["best"] == eval_rows[0]["val_loss"]             # it was saved before the last
    assert (made["kind"], made["backbone"], made["path"]) == ("sit", "sit", "linear")
    assert (made["classes"], made["in_chans"], made["img_size"]) == (10, 1, 8)
    assert sum(made["class_counts"]) == made["train_images"] == 1442
    assert (made["latents"], made["flip"]) == (False, False)     # digits are never mirrored
    SiT(**made["model"]).load_state_dict(saved["model"])         # the options alone rebuild the net
    assert made == json.loads((finished / "args.json").read_text(encoding="utf-8"))
    for name in ("curve.png", "samples.png"):
        with Image.open(finished / name) as picture:
            assert picture.width > 60


def test_first_and_last_lines(tmp_path, capsys):
    train(tmp_path / "run", "--opt", "soap", "--micro-batch", 16, "--steps", 2)
    printed = capsys.readouterr().out
    for words in (torch.__version__, "1442 training and 355 validation images", "10 classes",
                  "decayed, alpha_min 0.8, alpha_eff 6.47e-01, long skips", "SOAP", "2 micro-step"):
        assert words in printed, words
    assert re.fullmatch(r"val loss \d\.\d{4}", printed.splitlines()[-1])


@pytest.mark.parametrize("flags", [
    "--backbone uvit --opt muon --set path=gvp",
    "--shortcut residual --no-long-skips --set lr_schedule=cosine",
    "--alpha-eff .3 --opt kl-shampoo --set ema_warmup=false",
    "--backbone uvit --skipless --ema 0 --set zero_init=false cfg_scale=2",
])
def test_every_variant_runs(tmp_path, flags):
    saved = train(tmp_path / "run", *flags.split(), "--steps", 3, "--eval-every", 3)
    assert rows(tmp_path / "run")[-1]["val_loss"] < 5
    if "--alpha-eff" in flags:
        assert SiT(**saved["args"]["model"]).alpha_eff == pytest.approx(0.3)
    if "cosine" in flags:
        found = [row["lr"] for row in rows(tmp_path / "run") if "loss" in row]
        assert found == [runtime.lr_at(step, 3, 2, 1e-3) for step in range(3)]


def test_images_of_a_folder_need_a_size(tmp_path, capsys):
    for i in range(8):
        path = tmp_path / "photos" / ("train" if i < 6 else "val") / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20), (30 * i, 0, 99)).save(path)
    flags = ["--data", tmp_path / "photos", "--batch-size", 4, "--steps", 1]
    assert "--img-size" in sentence(capsys, command(tmp_path / "out", *flags))
    assert train(tmp_path / "out", *flags, "--img-size", 16)["args"]["in_chans"] == 3


def test_a_run_can_be_sampled(copied):
    samples.main(["--ckpt", str(copied), "--count", "3", "--steps", "2", "--device", "cpu"])
    with np.load(copied / "samples.npz") as z:
        assert z["arr_0"].shape == (3, 8, 8, 3)


def test_samples_in_training_follow_the_ode(finished):
    """They agree with the sampler of evals/samples.py, which is tested against closed forms."""
    saved, args = load(finished), train_sit.get_args(command("unused", "--set", "cfg_scale=2"))
    net, run = SiT(**saved["args"]["model"]), runtime.open_run(args, "sit")
    net.load_state_dict(saved["ema"])
    images, _ = train_sit.pixels_or_latents(args)
    found = train_sit.draw_samples(net, args, images, run)
    generator = torch.Generator().manual_seed(runtime.mix_seed(0, "samples"))
    velocity = train_sit.guided(net, 10, 2.0)
    with torch.no_grad():
        noise = torch.randn(4, 1, 8, 8, generator=generator)
        truth = samples.heun(velocity, noise, torch.arange(4), 2, "linear", None)
    torch.testing.assert_close(found, truth)


# --------------------------------------------------------------------------------------------------
# interrupted and resumed, several processes

def test_killed_run_equals_the_uninterrupted_one(tmp_path):
    """Cut off two steps after a save and started again: weights, EMA, optimizer, log, all to the bit.
    Samples on the way disturb nothing."""
    flags = ["--opt", "soap", "--micro-batch", 16]
    train(tmp_path / "whole", *flags)
    stop_at(train_sit.main, 6, command(tmp_path / "cut", *flags))
    assert load(tmp_path / "cut")["step"] == 4 and rows(tmp_path / "cut")[-1]["step"] == 6
    train(tmp_path / "cut", *flags, "--set", "samples=0")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_resume_refuses_another_run_and_logs_what_changed(copied, capsys):
    said = sentence(capsys, command(copied, "--alpha-min", ".5", "--steps", 10))
    assert "alpha_min=0.8" in said and "alpha_min=0.5" in said
    assert "4000" in sentence(capsys, command(copied, "--data", "mnist5k", "--img-size", 8))
    flags = ["--steps", 10, "--lr", "5e-4"]
    assert "--allow-change" in sentence(capsys, command(copied, *flags))
    train(copied, *flags, "--allow-change")
    assert {row["changed"] for row in rows(copied) if "changed" in row} == {"steps", "lr"}
    assert rows(copied)[-1]["step"] == 10


def test_finished_run_says_its_figure_again(copied, capsys):
    before = contents(copied)
    train(copied)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"val loss {rows(copied)[-1]['val_loss']:.4f}"
    assert all(contents(copied)[name] == before[name] for name in ("ckpt.pt", "log.jsonl"))


def wide(argv):
    """The run of argv in float64, so that the order of summation does not matter."""
    build = train_sit.build_model

    def build_wide(*arguments):
        raw, options = build(*arguments)
        raw.double().register_forward_pre_hook(lambda module, x: (x[0].double(), *x[1:]))
        return raw, options
    runtime.plot_curve = lambda *arguments, **more: None
    train_sit.build_model = build_wide
    script(argv)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process with the whole batch, in float64."""
    folder = tmp_path_factory.mktemp("alone")
    codes, outputs = launch_ranks(1, wide, command(folder / "run"), folder=folder)
    assert codes == [0], outputs
    return folder / "run"


@pytest.mark.parametrize("n, micro", [(1, 5), (2, 16), (3, 6)])
def test_processes_and_micro_batches_do_not_matter(tmp_path, alone, n, micro):
    """Noise, times and dropped labels belong to the sample's place in the global batch, also where that
    does not divide evenly: losses, norms, weights, EMA and validation agree."""
    codes, outputs = launch_ranks(n, wide, command(tmp_path / "many", "--micro-batch", micro),
                                  folder=tmp_path)
    assert codes == [0] * n, outputs
    for a, b in zip(rows(tmp_path / "many"), rows(alone), strict=True):
        assert a == {k: pytest.approx(v, rel=1e-6) for k, v in b.items()}
    many, one = load(tmp_path / "many"), load(alone)
    assert_close(many, one, tolerance=1e-7)
    assert_close({"model": many["ema"]}, {"model": one["ema"]}, tolerance=1e-7)
    with Image.open(alone / "samples.png") as a, Image.open(tmp_path / "many" / "samples.png") as b:
        assert np.abs(np.asarray(a, dtype=int) - np.asarray(b, dtype=int)).max() <= 1


def test_compile_changes_no_key_and_ema_moves(tmp_path, monkeypatch):
    """Traced and wrapped as by --compile (without the C++): the same keys, and averages that follow."""
    plain = train(tmp_path / "plain", "--steps", 2)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled = train(tmp_path / "compiled", "--steps", 2, "--compile")
    assert keys(compiled) == keys(plain)
    assert_close(compiled, plain, tolerance=1e-3, but_key_bias=True)
    assert_close({"model": compiled["ema"]}, {"model": plain["ema"]}, tolerance=1e-3, but_key_bias=True)
    average = compiled["ema"]["head.weight"]
    assert not torch.equal(average, compiled["model"]["head.weight"]) and average.any()


# --------------------------------------------------------------------------------------------------
# path, loss, draws

@pytest.mark.parametrize("path", PATHS)
def test_a_path_goes_from_noise_to_data_and_its_velocity_is_its_derivative(path):
    t = torch.linspace(0, 1, 11, dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 11, 3, dtype=torch.float64, generator=generator)
    x_t, target = train_sit.interpolate(path, t, x, noise)
    for d in range(3):
        slope, = torch.autograd.grad(x_t[:, d].sum(), t, retain_graph=True)
        torch.testing.assert_close(target[:, d], slope)
    torch.testing.assert_close(x_t[0], noise[0])
    torch.testing.assert_close(x_t[-1], x[-1])


def test_paths_by_hand():
    t = torch.tensor([0.25], dtype=torch.float64)
    assert [c.item() for c in path_coefficients("linear", t)] == [0.25, 0.75, 1.0, -1.0]
    c, s = math.cos(math.pi / 8), math.sin(math.pi / 8)
    found = [c.item() for c in path_coefficients("gvp", t)]
    assert found == pytest.approx([s, c, math.pi / 2 * c, -math.pi / 2 * s])


def test_loss_is_the_mean_square_in_float32():
    v, u = torch.zeros(2, 2, 3, 4, 4, dtype=torch.float16)
    v[1] = 300                                                   # its square does not fit half precision
    loss = train_sit.velocity_loss(v, u)
    assert loss.dtype == torch.float32 and loss.tolist() == [0.0, 90000.0]


def test_loss_of_a_net_that_says_zero_is_that_of_the_target(tmp_path):
    """SiT starts by saying 0, so the first loss is E |x - noise|^2 = 1 + E x^2, pixels in [-1, 1]."""
    train(tmp_path / "run", "--steps", 1, "--batch-size", 512)
    x = data.load_images("digits8x8").train.images.float() / 127.5 - 1
    assert rows(tmp_path / "run")[0]["loss"] == pytest.approx(1 + x.square().mean().item(), rel=0.02)


def arguments(*flags):
    return train_sit.get_args(command("unused", *flags))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.4])
def test_label_drop_rate(rate):
    """Over 500 steps of 64, to within four standard errors."""
    args = arguments("--batch-size", 64, "--set", f"label_dropout={rate}")
    dropped = torch.cat([train_sit.draw_flow(args, step, (1,))[2] for step in range(500)])
    error = (rate * (1 - rate) / len(dropped)) ** 0.5
    assert abs(dropped.double().mean().item() - rate) <= 4 * error


def test_the_net_is_told_which_labels_are_dropped(tmp_path, monkeypatch):
    """What reaches the model is the draw of that step, so the null label is learned from as many."""
    seen, forward = [], SiT.forward

    def spy(self, x, t, y, drop=None):
        if drop is not None:
            seen.append((t, drop))
        return forward(self, x, t, y, drop)
    monkeypatch.setattr(SiT, "forward", spy)
    flags = ["--set", "label_dropout=.3"]
    train(tmp_path / "run", "--steps", 3, "--micro-batch", 16, *flags)
    for step in range(3):
        _, t, drop = train_sit.draw_flow(arguments(*flags), step, (1, 8, 8))
        pairs = zip(*seen[2 * step:2 * step + 2])
        assert all(torch.equal(torch.cat(pair), whole) for pair, whole in zip(pairs, (t, drop)))


def test_draws_are_functions_of_seed_and_step():
    one, again, later, other = (train_sit.draw_flow(arguments("--seed", seed), step, (3, 8, 8))
                                for seed, step in ((0, 5), (0, 5), (0, 6), (1, 5)))
    assert all(torch.equal(a, b) for a, b in zip(one, again))
    assert not torch.equal(one[0], later[0]) and not torch.equal(one[1], later[1])
    assert not torch.equal(one[0], other[0])
    assert 0 <= one[1].min() and one[1].max() < 1 and abs(one[0].std().item() - 1) < 0.05


def test_validation_meets_the_same_noise_in_every_run(finished):
    """A net's validation loss does not depend on the run's seed or batch size."""
    saved, losses = load(finished), []
    net = SiT(**saved["args"]["model"])
    net.load_state_dict(saved["ema"])
    for flags in ((), ("--seed", 3, "--micro-batch", 16)):
        args = arguments(*flags)
        run, (images, _) = runtime.open_run(args, "sit"), train_sit.pixels_or_latents(args)
        losses.append(train_sit.evaluate(net, images, data.eval_transform(images, 8), args, run))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] == pytest.approx(rows(finished)[-1]["val_loss"], rel=1e-6)


# --------------------------------------------------------------------------------------------------
# bad input

@pytest.mark.parametrize("flags, words", [
    ("--set patch_size=3", "patch size 3"),
    ("--batch-size 2000", "1442"),
    ("--depth 3", "depth 3"),
    ("--skipless", "shortcut of weight 0"),
    ("--backbone uvit --alpha-min 0", "zero_init"),
    ("--backbone uvit --size XL", "--size XL: use nano"),
    ("--data nowhere/at/all", "nowhere/at/all"),
    ("--set path=vp", "linear, gvp"),
    ("--set lr_schedule=cosin", "constant or cosine"),
    ("--lr nan", "--lr"),
    ("--wandb x", "pip install wandb"),
])
def test_bad_flag(tmp_path, capsys, monkeypatch, flags, words):
    """Exit code 2, one sentence that says what is wrong, and no folder left behind."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert words in sentence(capsys, command(tmp_path / "out", *flags.split()))
    assert not (tmp_path / "out").exists()


def test_a_last_update_that_blows_up_is_said(tmp_path, capsys):
    """The loss of the only step is finite, the weights after it are not."""
    flags = "--steps 1 --warmup 0 --lr 1e30 --weight-decay 1e10 --ema 0".split()
    said = sentence(capsys, command(tmp_path / "out", *flags))
    assert "validation loss" in said and "step 1" in said and "1e+30" in said


def test_a_checkpoint_of_another_script_is_refused(copied, capsys):
    saved = load(copied)
    runtime.save_checkpoint(copied / "ckpt.pt", saved | dict(args=saved["args"] | dict(kind="mae")))
    assert "another train script" in sentence(capsys, command(copied))


def test_the_paper_preset_is_the_papers(tmp_path, capsys):
    said = sentence(capsys, ["--preset", "paper", "--out", tmp_path / "out"])
    assert "--preset paper" in said and "encode_latents" in said
    args = train_sit.get_args(["--preset", "paper", "--data", "x"])
    expected = dict(size="XL", depth=28, patch_size=2, lr=1e-4, lr_schedule="constant", weight_decay=0.0,
                    batch_size=256, ema=0.9999, label_dropout=0.1, alpha_min=0.8, long_skips=True,
                    path="linear", opt="adamw")
    assert {key: getattr(args, key) for key in expected} == expected
