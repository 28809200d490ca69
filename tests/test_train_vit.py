"""train_vit.py as people use it: killed and resumed, on one process and on two, compiled, with wrong input, and learning."""
import contextlib
import functools
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import data
import runtime
import train_dino
import train_mae
import train_vit
from test_runtime import launch, launch_ranks, run_script

TINY = ["--threads", "1", "--device", "cpu", "--data", "digits8x8", "--img-size", "8", "--patch-size", "4", "--depth", "2", "--batch-size", "64",
        "--lr", "1e-3"]
SKIPLESS = ["--skipless", "--init", "skipless"]


def command(out, *flags):
    return [*TINY, "--out", str(out), *map(str, flags)]


def train(out, *flags):
    """A run within this process. Returns its checkpoint."""
    train_vit.main(command(out, *flags))
    return load(out)


def load(out):
    return torch.load(Path(out) / "ckpt.pt", weights_only=True)


def rows(out):
    """The lines of the log without the rate, which is a measurement; floats compare bit by bit, as JSON keeps every digit."""
    return [{k: v for k, v in json.loads(line).items() if k != "images_per_s"} for line in (Path(out) / "log.jsonl").read_text().splitlines()]


def script(argv):
    runtime.run(lambda: train_vit.main(argv))


class Stopped(BaseException):
    """Stands for a power cut."""


def stop_at(main, step, argv):
    """A train script's main(argv), cut off in the middle of this step (None: never): the same on every rank."""
    check = runtime.check_finite

    def check_and_stop(window, world):
        if window[-1][0] == step:
            raise Stopped
        return check(window, world)

    runtime.check_finite = check_and_stop
    try:
        with contextlib.suppress(Stopped):
            main(argv)
    finally:
        runtime.check_finite = check


def assert_same(a, b, where="checkpoint"):
    """Equal to the bit, all the way down."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for k in a:
            assert_same(a[k], b[k], f"{where}.{k}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b, where


def assert_same_run(a, b):
    """Weights, averaged weights, optimizer, step, best, generator and log of two run folders are equal to the bit."""
    one, two = load(a), load(b)
    one.pop("args"), two.pop("args")
    assert_same(one, two)
    assert rows(a) == rows(b)


def assert_close(a, b, tolerance, but_key_bias=False):
    """Weights equal up to the order of summation: the difference relative to the size of each tensor.

    but_key_bias leaves out the key third of the qkv bias. Softmax does not see it, so its gradient is rounding noise alone, which Adam scales up to full steps.
    """
    assert a["model"].keys() == b["model"].keys()
    for key, x in a["model"].items():
        y = b["model"][key]
        if but_key_bias and key.endswith("qkv.bias"):
            x, y = (torch.cat([t.chunk(3)[0], t.chunk(3)[2]]) for t in (x, y))
        assert (x - y).norm() <= tolerance * max(y.norm().item(), 1e-2), f"{key}: {(x - y).norm() / y.norm():.1e}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of one epoch, to be copied and not changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(out, "--epochs", "1", "--ema", ".9", "--log-every", "10", "--eval-every", "11")
    return out


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# ---------------------------------------------------------------------------------------------------------------------
# interrupted and resumed

def test_killed_twenty_times_equals_never_killed(tmp_path):
    """SIGKILL at 20 random moments of one run (while starting, training, evaluating, writing): the checkpoint always loads, and the
    run that comes out is the uninterrupted one to the bit: weights, EMA, SOAP's state, log. Augmentation and MixUp make the random numbers matter."""
    flags = ["--epochs", "2.4", "--batch-size", "32", "--opt", "soap", *SKIPLESS, "--augment", "light", "--mixup", ".2", "--ema", ".9", "--save-every", "1",
             "--log-every", "1", "--eval-every", "9"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    reference = launch(script, command(whole, *flags), output=tmp_path / "whole.txt")
    rng, log, killed_in_training, step = random.Random(0), killed / "log.jsonl", 0, 0
    for _ in range(20):
        run = launch(script, command(killed, *flags), output=tmp_path / "killed.txt")
        goal, end = step + rng.randrange(5), time.monotonic() + 60
        while run.is_alive() and goal > step and steps_logged(log) < goal and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05 if goal > step else 0.2))
        run.kill()
        run.join()
        assert run.exitcode == -signal.SIGKILL, (tmp_path / "killed.txt").read_text()
        if (killed / "ckpt.pt").exists():
            before, step = step, runtime.load_checkpoint(killed / "ckpt.pt")["step"]
            assert step >= before
            killed_in_training += step > before
        if killed.exists():
            assert {p.name for p in killed.iterdir()} <= {"ckpt.pt", "ckpt.pt.tmp", "log.jsonl", "log.tmp", "args.json"}
    assert killed_in_training >= 5, "too few kills fell into the training"
    last = launch(script, command(killed, *flags), output=tmp_path / "killed.txt")
    last.join(120), reference.join(120)
    assert last.exitcode == 0 and reference.exitcode == 0, (tmp_path / "killed.txt").read_text()
    assert_same_run(whole, killed)
    assert rows(whole)[-1]["step"] == load(whole)["step"] == 108
    assert not list(killed.glob("*.tmp"))


def steps_logged(log):
    found = re.findall(r'"step": (\d+)', log.read_text()) if log.exists() else []
    return int(found[-1]) if found else 0


@pytest.mark.parametrize("flags", [
    ["--opt", "adamw", "--drop-path", ".1"],
    ["--opt", "kl-shampoo", *SKIPLESS],
    ["--opt", "muon", "--shortcut", "decayed", "--alpha-min", ".5", "--micro-batch", "16"],
], ids=lambda flags: flags[1])
def test_resume_is_exact_for_every_optimizer(tmp_path, flags):
    """Cut off two steps after a save and started again: the two steps' old lines go, and all that is left equals the run in one piece, to the bit."""
    flags = [*flags, "--epochs", ".6", "--warmup", ".2", "--ema", ".8", "--cutmix", ".5", "--augment", "light", "--save-every", "5", "--log-every", "1",
             "--eval-every", "4"]
    train(tmp_path / "whole", *flags)
    stop_at(train_vit.main, 8, command(tmp_path / "cut", *flags))
    assert load(tmp_path / "cut")["step"] == 5 and rows(tmp_path / "cut")[-1]["step"] == 8
    train(tmp_path / "cut", *flags)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert load(tmp_path / "cut")["step"] == 13


def test_noise_is_new_in_every_micro_step(tmp_path, monkeypatch):
    """MixUp and drop path draw from a generator that is seeded per step and micro-step: never twice with the same seed."""
    seeds, seed = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda value: (seeds.append(value), seed(value))[1])
    train(tmp_path / "run", "--epochs", ".2", "--micro-batch", "32", "--log-every", "1")
    assert len(seeds) == len(set(seeds)) == 1 + 4 * 2            # the first is the initialisation's


def test_resume_says_where_it_goes_on(copied, capsys):
    """The step and the learning rate at a resume are printed: a schedule that began anew would show."""
    train(copied, "--epochs", "2", "--ema", ".9", "--log-every", "10", "--eval-every", "11")
    printed = capsys.readouterr().out
    lr = runtime.lr_at(22, 44, 11, 1e-3)
    assert re.search(rf"^resume .*step 22, lr {lr:.3g}$", printed, re.MULTILINE)
    assert "--epochs was 1.0 and is 2.0" in printed
    assert [r["step"] for r in rows(copied)] == sorted(r["step"] for r in rows(copied)) and rows(copied)[-1]["step"] == 44


def test_fresh_starts_over_at_once(copied, tmp_path):
    """--fresh: log and checkpoint of the old run are gone from the first step on, so that a cut-off fresh run cannot resume the old one."""
    old = load(copied)
    stop_at(train_vit.main, 3, command(copied, "--epochs", "1", "--fresh", "--seed", "1", "--log-every", "1"))
    assert [r["step"] for r in rows(copied)] == [1, 2, 3]
    again, new = (train(out, "--epochs", ".2", "--seed", "1", "--log-every", "1") for out in (copied, tmp_path / "new"))
    assert again["step"] == 4
    assert not torch.equal(again["model"]["head.weight"], old["model"]["head.weight"])
    assert_same(again["model"], new["model"])
    assert rows(copied) == rows(tmp_path / "new")


def test_finished_run_says_its_figure_again(copied, capsys):
    """Started once more with the same command, a finished run trains nothing, changes neither log nor weights, and ends with the same line."""
    before = contents(copied)
    train_vit.main(command(copied, "--epochs", "1", "--ema", ".9", "--log-every", "10", "--eval-every", "11"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"val top-1 \d+\.\d %", last)
    assert last == f"val top-1 {rows(copied)[-1]['val_top1']:.1f} %"
    assert all(contents(copied)[name] == before[name] for name in ("ckpt.pt", "log.jsonl"))


def test_spelling_out_a_default_is_the_same_run(tmp_path):
    """nano has 12 blocks: a resume that says --depth 12 is the same run, not another architecture."""
    flags = ["--threads", "1", "--data", "digits8x8", "--img-size", "8", "--patch-size", "8", "--epochs", ".02", "--out", str(tmp_path / "run")]
    train_vit.main(flags)
    train_vit.main([*flags, "--depth", "12", "--size", "nano"])


# ---------------------------------------------------------------------------------------------------------------------
# several processes, accumulation

FEW = ["--epochs", "1.2", "--warmup", "0", "--log-every", "1", "--save-every", "4", "--precondition-frequency", "4"]


def wide(argv, last=None):
    """The run of argv with the model in float64, cut off in step `last` if that is given.

    In float32 two orders of summation cannot be compared after an optimizer that normalises: where a gradient is zero in truth it is rounding noise, and
    noise / (|noise| + eps) is a full step. In float64 the noise lies far below eps.
    """
    build = train_vit.build_model

    def build_wide(args, images):
        raw, line = build(args, images)
        raw.double().register_forward_pre_hook(lambda module, x: (x[0].double(),))
        return raw, line

    train_vit.build_model = build_wide
    runtime.run(lambda: stop_at(train_vit.main, last, argv))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By optimizer: (the folder of a run cut off after 16 of its 26 steps, the folder of the whole run), by one process with the whole batch, in float64.

    The runs to compare start from the former and not from zero, because SOAP's first bases are not determined: the sum of a few gradients' outer products
    has a null space, in which any basis is as good as another, and rounding chooses. After 16 steps there is none left, and refreshes agree as well.
    """
    made = {}

    def get(opt):
        if opt not in made:
            folder = tmp_path_factory.mktemp(opt)
            for last in (17, None):
                codes, outputs = launch_ranks(1, wide, command(folder / "run", "--opt", opt, *FEW), last, folder=folder)
                assert codes == [0], outputs
                if last:
                    assert load(folder / "run")["step"] == 16
                    shutil.copytree(folder / "run", folder / "start")
            made[opt] = folder / "start", folder / "run"
        return made[opt]
    return get


def assert_equal_runs(out, reference):
    """The same lines in the log and the same weights, to 1e-7."""
    for a, b in zip(rows(out), rows(reference), strict=True):
        assert a == {k: pytest.approx(v, rel=1e-5, abs=1e-9) for k, v in b.items()}
    assert load(out)["model"]["head.weight"].dtype == torch.float64
    assert_close(load(out), load(reference), tolerance=1e-7)


@pytest.mark.parametrize("opt", ["adamw", "soap"])
@pytest.mark.parametrize("n, micro", [(1, 16), (2, 32), (2, 16)])
def test_processes_and_micro_batches_do_not_matter(tmp_path, alone, opt, n, micro):
    """The same global batch in four micro-batches, on two processes, and on two processes with two micro-batches each: always the weights, losses and
    gradient norms of one process with the whole batch. A missing division, a gradient exchanged once too often or a shared-out batch that overlaps shows."""
    start, whole = alone(opt)
    out = Path(shutil.copytree(start, tmp_path / "run"))
    codes, outputs = launch_ranks(n, wide, command(out, "--opt", opt, *FEW, "--micro-batch", micro), folder=tmp_path)
    assert codes == [0] * n and "step 16" in outputs[0], outputs
    assert_equal_runs(out, whole)
    assert outputs[1:] in ([], [""])                             # rank 0 alone speaks


def test_two_processes_equal_one_in_float32(tmp_path):
    """The run as it is shipped, with AdamW: equal to the order of summation in float32."""
    flags = ["--epochs", ".4", "--warmup", "0"]
    one = train(tmp_path / "one", *flags)
    codes, outputs = launch_ranks(2, script, command(tmp_path / "two", *flags, "--micro-batch", "16"), folder=tmp_path)
    assert codes == [0, 0], outputs
    assert_close(load(tmp_path / "two"), one, tolerance=3e-5, but_key_bias=True)


def test_resume_on_another_number_of_processes(tmp_path, alone):
    """A checkpoint does not know how many processes wrote it: steps on one, on two and on one again give the weights and the log of one throughout."""
    start, whole = alone("soap")
    out = Path(shutil.copytree(start, tmp_path / "run"))
    argv = command(out, "--opt", "soap", *FEW)
    codes, outputs = launch_ranks(2, wide, argv, 22, folder=tmp_path)
    assert codes == [0, 0], outputs
    assert load(out)["step"] == 20 and rows(out)[-1]["step"] == 22
    codes, outputs = launch_ranks(1, wide, argv, folder=tmp_path)
    assert codes == [0] and "step 20" in outputs[0], outputs
    assert_equal_runs(out, whole)


def evaluate_to_file(out, path):
    """The exact evaluation of a run's weights by as many processes as there are."""
    args = train_vit.get_args(command(out, "--micro-batch", "50"))
    world = runtime.start("cpu", 1)
    images = data.load_images("digits8x8")
    raw, _ = train_vit.build_model(args, images)
    raw.load_state_dict(load(out)["model"])
    result = train_vit.evaluate(raw, images, data.eval_transform(images, 8), args, world, torch.float32)
    if world.main:
        Path(path).write_text(json.dumps(result))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_evaluation_is_exact_on_any_number_of_processes(tmp_path, finished, n):
    """355 images are shared evenly by neither 2 nor 3, nor cut evenly into 50s: top-1 and top-5 must still be the very fractions of a plain count."""
    images = data.load_images("digits8x8")
    assert len(images.val) % 2 and len(images.val) % 3
    raw, _ = train_vit.build_model(train_vit.get_args(command(tmp_path)), images)
    raw.load_state_dict(load(finished)["model"])
    with torch.no_grad():
        logits = raw.eval()(data.eval_transform(images, 8)(images.val.images)).double()
    true = logits.gather(1, images.val.labels[:, None])
    place = (logits > true).sum(1)                               # how many classes come before the right one
    codes, outputs = launch_ranks(n, evaluate_to_file, finished, tmp_path / "result.json", folder=tmp_path)
    assert codes == [0] * n, outputs
    loss, top1, top5 = json.loads((tmp_path / "result.json").read_text())
    assert top1 == 100 * (place < 1).sum().item() / 355 and top5 == 100 * (place < 5).sum().item() / 355
    assert loss == pytest.approx((logits.logsumexp(1) - true[:, 0]).mean().item(), rel=1e-5)


def test_torchrun(tmp_path):
    """The command of the docstring under torchrun on CPUs: an ordinary run ends well; a bad one says one sentence although two processes met the fault."""
    good = run_script(*command(tmp_path / "run", "--epochs", ".1"), nproc=2)
    assert good.returncode == 0, good.stderr
    assert "64 = 2 processes x 1 micro-steps x 32" in good.stdout and re.fullmatch(r"val top-1 \d+\.\d %", good.stdout.splitlines()[-1])
    bad = run_script(*command(tmp_path / "none", "--data", tmp_path / "nowhere"), nproc=2)
    assert bad.returncode != 0 and not (tmp_path / "none").exists()
    said = [line for line in bad.stderr.splitlines() if line.startswith("error:")]
    assert len(said) == 1 and "nowhere" in said[0]


# ---------------------------------------------------------------------------------------------------------------------
# compile

HAS_COMPILER = any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl")))
COMPILER = pytest.mark.skipif(not HAS_COMPILER, reason="torch.compile on a CPU needs a C++ compiler")


def wrapped_only(argv):
    """torch.compile with all its wrapping and tracing, without the minute that C++ takes in two processes."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    script(argv)


@COMPILER
def test_compile_changes_no_key_and_ema_still_moves(tmp_path):
    """Plain, compiled, and compiled under two processes: the same keys everywhere in the checkpoint, no wrapper's prefix, and averaged weights that follow."""
    flags = ["--depth", "1", "--epochs", ".14", "--ema", ".5", "--warmup", "0"]
    plain = train(tmp_path / "plain", *flags)
    codes, outputs = launch_ranks(1, script, command(tmp_path / "compiled", *flags, "--compile"), folder=tmp_path, timeout=240)
    assert codes == [0], outputs
    codes, outputs = launch_ranks(2, wrapped_only, command(tmp_path / "both", *flags, "--compile"), folder=tmp_path)
    assert codes == [0, 0], outputs
    first = train_vit.build_model(train_vit.get_args(command(tmp_path, *flags)), data.load_images("digits8x8"))[0].state_dict()
    for other in (load(tmp_path / "compiled"), load(tmp_path / "both")):
        assert keys(other) == keys(plain)
        assert not any(k.startswith(("_orig_mod.", "module.")) for k in other["model"])
        assert_close(other, plain, tolerance=1e-3, but_key_bias=True)
        moved = [k for k in first if not torch.equal(first[k], other["ema"][k])]
        assert set(moved) == set(first) and any(not torch.equal(other["model"][k], other["ema"][k]) for k in moved)
    train(tmp_path / "compiled", *flags)                         # and a plain run goes on from a compiled one's checkpoint


def keys(tree):
    """Every path of a nested checkpoint."""
    if isinstance(tree, dict):
        return {f"{k}.{rest}" for k, v in tree.items() for rest in keys(v)}
    if isinstance(tree, (list, tuple)):
        return {f"{i}.{rest}" for i, v in enumerate(tree) for rest in keys(v)}
    return {""}


# ---------------------------------------------------------------------------------------------------------------------
# what a run leaves

def test_what_a_run_leaves(finished):
    """The four files; train and eval lines with the agreed keys; the configuration as JSON; a picture that is a PNG."""
    assert sorted(contents(finished)) == ["args.json", "ckpt.pt", "curve.png", "log.jsonl"]
    lines = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    train_lines, eval_lines = [r for r in lines if "loss" in r], [r for r in lines if "val_loss" in r]
    assert len(train_lines) + len(eval_lines) == len(lines)
    assert all({"step", "epoch", "loss", "lr", "grad_norm"} < r.keys() and len(r) == 6 for r in train_lines)
    assert all(r.keys() == {"step", "val_loss", "val_top1", "val_top5"} for r in eval_lines)
    assert [r["step"] for r in train_lines] == [10, 11, 20, 22] and [r["step"] for r in eval_lines] == [11, 22]
    for r in train_lines:                                        # the line of step s tells of the update that made it: lr(s - 1)
        assert r["lr"] == runtime.lr_at(r["step"] - 1, 22, 11, 1e-3) and r["epoch"] == r["step"] / 22
    args = json.loads((finished / "args.json").read_text())
    assert args["depth"] == 2 and args["lr"] == 1e-3 and args["data"] == "digits8x8" and args == load(finished)["args"]
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with Image.open(finished / "curve.png") as picture:
        assert picture.width > 600 and len(picture.convert("L").getcolors()) > 10
    saved = load(finished)
    assert set(saved) == {"model", "ema", "optimizer", "step", "best", "rng", "args"}
    assert not any(k.startswith(("_orig_mod.", "module.")) for k in [*saved["model"], *saved["ema"]])
    assert saved["best"] == max(r["val_top1"] for r in eval_lines)


def test_first_lines_say_what_runs(tmp_path, capsys):
    """Configuration, revision, torch, device and why, parameters per group, preconditioned sides, batch and steps: before the first step."""
    train(tmp_path / "run", "--epochs", ".1", "--opt", "soap", *SKIPLESS, "--micro-batch", "16")
    printed = capsys.readouterr().out
    head = printed[:printed.index("step      2")]
    for words in ("opt=soap", torch.__version__, "asked for by --device", "torch.float32", "1442 training and 355 validation images", "221,184 parameters",
                  "(288, 96): both sides", "64 = 1 processes x 4 micro-steps x 16", "2 steps, 22 per epoch", "skipless", "c 3"):
        assert words in head, words
    assert re.fullmatch(r"val top-1 \d+\.\d %", printed.splitlines()[-1])


def test_skipless_initialisation_of_a_residual_net_runs(tmp_path):
    """Init and shortcut are separate flags: the paper's table has this cell too. And the initialisation is applied: another start than the default's."""
    flags = ["--epochs", ".05", "--lr", "1e-9"]
    a, b = train(tmp_path / "a", *flags, "--init", "skipless"), train(tmp_path / "b", *flags)
    assert not torch.allclose(a["model"]["blocks.0.attn.qkv.weight"], b["model"]["blocks.0.attn.qkv.weight"], atol=1e-3)


@pytest.mark.parametrize("init", ["auto", "paper", "default"])
def test_each_skipless_initialisation_runs(tmp_path, init):
    train(tmp_path / "run", "--skipless", "--init", init, "--epochs", ".05")


# ---------------------------------------------------------------------------------------------------------------------
# bad input

def one_sentence(script, capsys, argv):
    """The one line that a script says on stderr when it refuses, after which it exits with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        script([str(a) for a in argv])
    said = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert len(said) == 1 and said[0].startswith("error: "), said
    return said[0]


sentence = functools.partial(one_sentence, script)


def picture(path, content=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        Image.new("RGB", (8, 8), (200, 30, 30)).save(path)
    else:
        path.write_bytes(content)


@pytest.mark.parametrize("flags, words", [
    (["--img-size", "8", "--patch-size", "3"], ["image size", "8", "patch size 3"]),
    (["--micro-batch", "24"], ["--batch-size 64", "--micro-batch 24"]),
    (["--batch-size", "2000"], ["--batch-size 2000", "1442"]),
    ([*SKIPLESS, "--drop-path", ".1"], ["drop path"]),
    (["--shortcut", "decayed", "--alpha-min", "0", "--drop-path", ".1"], ["drop path"]),
    (["--alpha-min", ".5"], ["alpha_min", "residual"]),
    (["--preset", "huge"], ["--preset", "huge", "laptop"]),
    (["--learning-rate", "1"], ["--learning-rate"]),
    (["--lr", "nan"], ["--lr"]), (["--lr", "-1"], ["--lr"]), (["--lr", "abc"], ["--lr", "abc"]), (["--lr", "0"], ["--lr"]), (["--lr", "inf"], ["--lr"]),
    (["--epochs", "0"], ["--epochs"]), (["--depth", "0"], ["--depth"]), (["--seed", "9" * 30], ["--seed"]), (["--seed", "-1"], ["--seed"]),
    (["--data", "nowhere/at/all"], ["--data", "nowhere/at/all"]), (["--data", ""], ["data"]),
    (["--device", "tpu"], ["--device tpu"]), (["--device", "cpu:abc"], ["--device cpu:abc"]),
    (["--betas", "1", ".5"], ["--betas"]), (["--temperature-beta", "1e-300"], ["--temperature-beta"]), (["--epochs", "1e308"], ["--epochs"]),
    (["--shortcut", "decayed"], ["--alpha-min"]), (["--skipless", "--init", "paper", "--alpha", "2"], ["--alpha", "--init skipless"]),
    (["--opt", "muon", "--betas", ".9", ".9"], ["--betas", "muon"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "")
def test_bad_flag(tmp_path, capsys, flags, words):
    """Exit code 2, one sentence that names the flag and its value, and no folder left behind."""
    said = sentence(capsys, command(tmp_path / "out", *flags))
    assert all(w in said for w in words), said
    assert not (tmp_path / "out").exists()


def test_bad_input_from_the_shell(tmp_path):
    """The same through a real process: exit code, and stderr holds nothing but the sentence."""
    ran = run_script(*command(tmp_path / "out", "--data", tmp_path / "missing"))
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.count("\n") == 1 and ran.stderr.startswith("error: ") and "missing" in ran.stderr
    assert not (tmp_path / "out").exists()


def test_absent_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cuda" in sentence(capsys, command(tmp_path / "out", "--device", "cuda"))
    assert not (tmp_path / "out").exists()


def test_paper_preset_asks_for_data(tmp_path, capsys):
    said = sentence(capsys, ["--preset", "paper", "--out", tmp_path / "out"])
    assert "--preset paper" in said and "--data" in said and not (tmp_path / "out").exists()


def test_wandb_without_the_package(tmp_path, capsys, monkeypatch):
    """An optional package that is missing is found out before anything is written."""
    monkeypatch.setitem(sys.modules, "wandb", None)          # makes the import fail even where it is installed
    said = sentence(capsys, command(tmp_path / "out", "--wandb", "project"))
    assert "--wandb" in said and "pip install wandb" in said and not (tmp_path / "out").exists()


def test_out_below_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert f"--out {tmp_path / 'file' / 'out'}" in sentence(capsys, command(tmp_path / "file" / "out"))
    assert (tmp_path / "file").read_text() == "in the way"


def folder(root, train=("a", "b"), val=("a", "b")):
    for split, names in (("train", train), ("val", val)):
        for name in names:
            for i in range(4):
                picture(root / split / name / f"{i}.png")
    return root


@pytest.mark.parametrize("make, words", [
    (lambda root: root.mkdir(), ["photos", "train"]),
    (lambda root: (root / "train").mkdir(parents=True), ["train", "class"]),
    (lambda root: folder(root, val=()), ["val"]),
    (lambda root: folder(root, val=("a", "zebra")), ["zebra", "val"]),
    (lambda root: (folder(root), (root / "train" / "c").mkdir()), ["c'", "no images"]),
], ids=["empty", "no class folders", "no val", "class in val only", "class without images"])
def test_bad_folder(tmp_path, capsys, make, words):
    """Faults of an image folder are found before anything is written, and named."""
    make(tmp_path / "photos")
    said = sentence(capsys, command(tmp_path / "out", "--data", tmp_path / "photos", "--batch-size", "4"))
    assert all(w in said for w in words), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("split, workers, content", [
    ("train", 0, b"no jpeg"), ("train", 0, b""), ("train", 0, None), ("train", 1, None), ("val", 0, b"no jpeg"), ("val", 0, None),
], ids=["text", "empty", "cut", "cut, read by a worker", "text in val", "cut in val"])
def test_unreadable_image(tmp_path, capsys, split, workers, content):
    """A damaged picture is named, whether this process or a worker reads it; nothing of it is saved as a checkpoint."""
    root, bad = folder(tmp_path / "photos"), tmp_path / "photos" / split / "a" / "broken.jpg"
    if content is None:
        Image.effect_noise((64, 64), 90).save(bad)
        content = bad.read_bytes()[:600]
    picture(bad, content)
    said = sentence(capsys, command(tmp_path / "out", "--data", root, "--batch-size", "8", "--epochs", "1", "--workers", workers))
    assert str(bad) in said and "\\n" not in said
    assert not (tmp_path / "out" / "ckpt.pt").exists()


@pytest.mark.parametrize("flags, words", [
    (["--depth", "3"], ["--depth 2", "--depth 3"]), (["--opt", "soap"], ["--opt adamw", "--opt soap"]), (["--seed", "1"], ["--seed 0", "--seed 1"]),
    (["--patch-size", "2"], ["--patch-size 4", "--patch-size 2"]), (["--init", "paper"], ["--init default", "--init paper"]),
    (["--skipless", "--init", "default"], ["--shortcut residual", "--shortcut skipless"]), (["--shortcut", "decayed", "--alpha-min", ".5"], ["--shortcut residual", "--shortcut decayed"]),
    (["--weight-decay", ".5"], ["--weight-decay 0.05", "--weight-decay 0.5"]), (["--batch-size", "32"], ["--batch-size 64", "--batch-size 32"]),
    (["--betas", ".8", ".9"], ["--betas None", "--betas 0.8 0.9"]), (["--precondition-frequency", "3"], ["--precondition-frequency 10"]),
    (["--size", "tiny"], ["--size nano", "--size tiny"]), (["--data", "emoji"], ["--data emoji", "digits8x8", "7 classes"]),
    (["--lr", ".5"], ["finished", "--lr", "0.001", "0.5"])], ids=lambda value: value[0])
def test_checkpoint_of_another_run(copied, capsys, flags, words):
    """Another architecture, optimizer or seed, and another lr for a run that is over, are refused with both values; the run's files stay as they are."""
    before = contents(copied)
    said = sentence(capsys, command(copied, "--epochs", "1", "--ema", ".9", "--log-every", "10", "--eval-every", "11", *flags))
    assert all(w in said for w in words) and "ckpt.pt" in said and "--fresh" in said, said
    assert contents(copied) == before


def test_constants_alone_mean_init_skipless():
    """--alpha without --init skipless must not be dropped silently."""
    args = train_vit.get_args(["--skipless", "--alpha", "2", "--beta", ".6"])
    assert (args.init, args.alpha, args.beta, args.c) == ("skipless", 2, .6, 3)


def test_paper_2s_init_on_the_vit(tmp_path, capsys):
    """W_V W_O = alpha_vo I and W_Q = W_K per head in every block, fc1 and fc2 with singular values 2 sqrt(alpha_u) and sqrt(alpha_d); its constant alone chooses it."""
    args = train_vit.get_args(["--skipless", "--alpha-vo", "2", "--alpha-u", ".5", "--alpha-d", "3", "--out", str(tmp_path)])
    assert (args.init, args.alpha_qk, args.alpha_vo) == ("residual-free", 3, 2)
    raw, line = train_vit.build_model(args, data.load_images("mnist5k"))
    for block in raw.blocks:
        w_q, w_k, w_v = block.attn.qkv.weight.double().chunk(3)
        assert torch.equal(w_q, w_k)
        torch.testing.assert_close(block.attn.proj.weight.double() @ w_v, 2 * torch.eye(96, dtype=torch.float64), rtol=0, atol=1e-5)
        for layer, value in ((block.mlp.fc1, 2 * .5 ** .5), (block.mlp.fc2, 3 ** .5)):
            torch.testing.assert_close(torch.linalg.svdvals(layer.weight.double()), torch.full((96,), value, dtype=torch.float64), rtol=1e-5, atol=0)
    assert "residual-free" in line
    assert "--alpha-vo has no effect with --init skipless: use --init residual-free" in sentence(capsys, command(tmp_path, "--init", "skipless", "--alpha-vo", "2"))
    assert "--c has no effect with --init residual-free: use --init skipless" in sentence(capsys, command(tmp_path, "--init", "residual-free", "--c", "2"))


@pytest.mark.parametrize("opt", ["adamw", "muon"])
@pytest.mark.parametrize("flag", ["--stagger", "--bf16-factors"])
def test_a_setting_of_another_optimizer(tmp_path, capsys, opt, flag):
    said = sentence(capsys, command(tmp_path / "run", "--opt", opt, flag))
    assert f"{flag} has no effect with --opt {opt}" in said and "--opt soap or kl-shampoo" in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize("opt", ["soap", "kl-shampoo"])
def test_settings_of_the_matrix_optimizers_reach_them(tmp_path, opt):
    """Stagger, bf16 factors, frequency and initial eigenvalues: in the checkpoint's optimizer, and with an effect."""
    out, plain = tmp_path / "run", tmp_path / "plain"
    train(plain, "--opt", opt, *FEW)
    state = train(out, "--opt", opt, *FEW, "--stagger", "--bf16-factors", "--init-factor", ".02")["optimizer"]["parts"][0]
    group = state["param_groups"][0]
    assert group["factor_dtype"] is torch.bfloat16 and group["precondition_frequency"] == 4 and group.get("init_factor", .02) == .02
    assert all(t.dtype == torch.bfloat16 for s in state["state"].values() for t in (*s["GG"], *s["Q"]))
    assert not torch.equal(load(out)["model"]["blocks.1.mlp.fc1.weight"], load(plain)["model"]["blocks.1.mlp.fc1.weight"])


def test_checkpoint_that_is_a_folder(tmp_path, capsys):
    (tmp_path / "run" / "ckpt.pt").mkdir(parents=True)
    for flags in ([], ["--fresh"]):
        assert "is not a file" in sentence(capsys, command(tmp_path / "run", *flags))


def test_corrupted_checkpoint(copied, capsys):
    (copied / "ckpt.pt").write_bytes((copied / "ckpt.pt").read_bytes()[:5000])
    before = contents(copied)
    said = sentence(capsys, command(copied, "--epochs", "1"))
    assert str(copied / "ckpt.pt") in said and "--fresh" in said
    assert contents(copied) == before


# ---------------------------------------------------------------------------------------------------------------------
# non-finite loss

@pytest.mark.parametrize("n, opt", [(1, "soap"), (1, "adamw"), (2, "adamw")])
def test_divergence_stops_all_processes(tmp_path, n, opt):
    """A learning rate of 1e30: exit code 2 and a sentence with step, lr and gradient norm; with two processes neither hangs; what was saved before is finite."""
    argv = command(tmp_path / "run", "--opt", opt, "--lr", "1e30", "--warmup", "0", "--save-every", "1")
    codes, outputs = launch_ranks(n, script, argv, folder=tmp_path, timeout=60)
    assert codes == [2] * n, outputs                             # a process that hangs is ended from outside, which is another code
    said = re.findall(r"^error: .*", outputs[0], re.MULTILINE)
    assert len(said) == 1
    step = int(re.search(r"not finite at step (\d+)", said[0])[1])
    assert 1 <= step <= 3 and f"lr {runtime.lr_at(step, 220, 0, 1e30):.3g}" in said[0] and "gradient norm" in said[0]
    assert load(tmp_path / "run")["step"] == step                # the updates before the bad one
    assert all(math.isfinite(r["loss"]) for r in rows(tmp_path / "run") if "loss" in r)


# ---------------------------------------------------------------------------------------------------------------------
# learning

def test_it_learns_and_the_shortcut_matters(tmp_path):
    """Twelve blocks on 8 x 8 digits, two epochs: the usual ViT reaches 87 %, and the net without residuals, which has no special
    initialisation and plain AdamW, 18 % (chance is 10): the gap that the paper closes."""
    train(tmp_path / "residual", "--depth", "12", "--epochs", "2")
    train(tmp_path / "skipless", "--depth", "12", "--epochs", "2", "--skipless", "--init", "default")
    residual, skipless = (rows(tmp_path / name)[-1]["val_top1"] for name in ("residual", "skipless"))
    assert residual > 80
    assert skipless < 40


# ---------------------------------------------------------------------------------------------------------------------
# fine-tuning

def pretrained(folder, *flags, chans=1, ema=False):
    """A checkpoint of train_mae.py with arbitrary weights, none of them zero, and its path. Returns (path, the MAE whose weights count)."""
    args = train_mae.get_args(["--data", "digits8x8", "--img-size", "8", "--patch-size", "4", "--depth", "2", "--decoder-depth", "2", *flags])
    images = replace(data.load_images(args.data), in_chans=chans)
    raw, kwargs, _ = train_mae.build_model(args, images)
    states = []
    for _ in range(1 + ema):
        with torch.no_grad():
            for p in raw.parameters():
                p.add_(torch.randn_like(p), alpha=.1)
        states.append({k: v.clone() for k, v in raw.state_dict().items()})
    flags = dict(vars(args), kind="mae", model=kwargs, train_images=len(images.train), classes=10, in_chans=chans)
    return checkpoint(folder, args=flags, model=states[0], ema=states[1] if ema else None), raw.eval()


def checkpoint(folder, **entries):
    folder.mkdir(parents=True, exist_ok=True)
    runtime.save_checkpoint(folder / "ckpt.pt", dict(dict(model={}, ema=None, optimizer={}, step=7, best=0.0, rng=torch.get_rng_state()), **entries))
    return folder / "ckpt.pt"


def start_from(path, *flags):
    """(the ViT as a fine-tuning run of these flags would start with it, the run's args)."""
    args = train_vit.get_args(["--finetune", str(path), "--out", str(path.parent / "none"), *flags])
    images = data.load_images(args.data)
    raw, _ = train_vit.build_model(args, images)
    train_vit.load_encoder(raw, args.finetune)
    return raw.eval(), args


KINDS = [["--plain"], ["--alpha-min", ".6"], ["--alpha-eff", ".1"], ["--schedule", "cosine"], ["--schedule", "per-layer"], ["--decay-on", "attn"], ["--skipless"],
         ["--learn-alphas"], ["--shortcut", "residual", "--scaling", "both"], ["--shortcut", "residual", "--scaling", "branch", "--no-long-skips"]]


@pytest.mark.parametrize("flags", KINDS, ids=" ".join)
def test_the_encoder_is_carried_on_exactly(tmp_path, flags):
    """Whatever its shortcuts, the ViT's tokens after the embedding and after every block are the MAE's to the bit, at its image size and at another."""
    path, mae = pretrained(tmp_path, *flags)
    for size in (8, 12):
        x = torch.randn(3, 1, size, size, generator=torch.Generator().manual_seed(1))
        vit, _ = start_from(path, *(["--img-size", "12"] if size == 12 else []))
        with torch.no_grad():
            for layer, (a, b) in enumerate(zip(vit.layers(x), mae.layers(x), strict=True)):
                assert torch.equal(a, b), (size, layer)
    assert vit.pos_embed.shape[1] == 1 + 9 and vit.pos_embed.requires_grad


@pytest.mark.parametrize("pool", ["token", "mean"])
@pytest.mark.parametrize("norm", ["--encoder-norm", "--no-encoder-norm"])
def test_averaged_weights_a_new_head_and_which_norm(tmp_path, pool, norm):
    """EMA weights win over the last ones; head (std 2e-5) and mean pooling's norm are new; the class token's norm is the encoder's where it has one."""
    path, average = pretrained(tmp_path, norm, ema=True)
    vit, args = start_from(path, "--pool", pool)
    assert torch.equal(vit.blocks[1].mlp.fc2.weight, average.blocks[1].mlp.fc2.weight)
    assert not torch.equal(vit.blocks[1].mlp.fc2.weight, load(tmp_path)["model"]["blocks.1.mlp.fc2.weight"])
    assert vit.head.weight.shape == (10, 96) and 1.8e-5 < vit.head.weight.std() < 2.2e-5 and not vit.head.bias.any()     # of 960 numbers: 2.3 % off at one sigma
    if pool == "mean":
        assert torch.equal(vit.fc_norm.weight, torch.ones(96)) and not vit.fc_norm.bias.any()
    else:
        expected = average.norm.weight if norm == "--encoder-norm" else torch.ones(96)
        assert torch.equal(vit.norm.weight, expected)
    assert (args.data, args.img_size, args.depth, args.drop_path) == ("digits8x8", 8, 2, 0)


def test_a_supervised_encoder_too(finished, tmp_path):
    """From a checkpoint of this script: its averaged features; data, size and patches come with it."""
    path = Path(shutil.copytree(finished, tmp_path / "run")) / "ckpt.pt"
    vit, args = start_from(path)
    old, _ = train_vit.build_model(train_vit.get_args(command(tmp_path)), data.load_images("digits8x8"))
    old.load_state_dict(load(finished)["ema"])
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(vit.forward_features(x), old.eval().forward_features(x))
        assert vit(x).abs().max() < .01
    assert (args.data, args.size, args.patch_size, args.img_size) == ("digits8x8", "nano", 4, 8)


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_a_self_distilled_encoder_too(tmp_path, pool):
    """From a checkpoint of train_dino.py: the teacher's backbone with its final norm, not the student's, and nothing of the head."""
    args = train_dino.get_args(["--data", "digits8x8", "--img-size", "8", "--patch-size", "4", "--local-size", "4", "--depth", "2", "--skipless", "--pool", pool])
    student, teacher, kwargs, head, _ = train_dino.build_model(args, data.load_images("digits8x8"))
    with torch.no_grad():
        for p in teacher.parameters():
            p.add_(torch.randn_like(p), alpha=.1)
    flags = dict(vars(args), kind="dino", model=kwargs, head=head, train_images=1440, classes=10, in_chans=1)
    vit, found = start_from(checkpoint(tmp_path, args=flags, model=student.state_dict(), ema=teacher.state_dict()), "--pool", pool)
    x = torch.randn(2, 1, 8, 8)
    vit.head = torch.nn.Identity()
    with torch.no_grad():
        assert torch.equal(vit(x), teacher.eval().backbone(x))
    assert (found.shortcut, found.img_size, found.data) == ("skipless", 8, "digits8x8")


FINETUNE = ["--threads", "1", "--device", "cpu", "--batch-size", "64", "--log-every", "1", "--epochs", ".4", "--warmup", ".2", "--save-every", "3"]


@pytest.mark.parametrize("opt", ["adamw", "soap"])
def test_a_fine_tuning_run_resumes_exactly_without_the_pretrained_file(tmp_path, opt, capsys):
    """Cut off and started again after the pretrained checkpoint is gone: the run in one piece, to the bit. Each layer's lr is in the checkpoint."""
    path, _ = pretrained(tmp_path / "mae", "--learn-alphas")
    flags = [*FINETUNE, "--finetune", path, "--opt", opt, "--layer-decay", ".5", "--ema", ".8", "--pool", "mean", "--lr", "1e-3", "--drop-path", ".2"]
    argv = lambda out: [str(a) for a in [*flags, "--out", tmp_path / out]]
    train_vit.main(argv("whole"))
    assert f"last weights of {path} (mae, step 7); new: fc_norm, head" in capsys.readouterr().out
    stop_at(train_vit.main, 5, argv("cut"))
    assert load(tmp_path / "cut")["step"] == 3
    path.unlink()
    train_vit.main(argv("cut"))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    scales = {g["lr_scale"] for part in load(tmp_path / "cut")["optimizer"]["parts"] for g in part["param_groups"]}
    assert scales == {.125, .25, .5, 1.0}
    refused = sentence(capsys, [*argv("cut"), "--layer-decay", ".7"])
    assert "--layer-decay 0.5" in refused and "--layer-decay 0.7" in refused
    assert f"--finetune {path}" in sentence(capsys, [*TINY, "--out", tmp_path / "cut"])


def test_no_fine_tuning_on_top_of_an_ordinary_run(copied, tmp_path, capsys):
    """A run that began without --finetune is not silently continued with it, also where its checkpoint is too old to say; nor is a pretrained file overwritten."""
    path, _ = pretrained(tmp_path / "mae")
    old = load(copied)
    for key in ("finetune", "layer_decay"):
        del old["args"][key]
    runtime.save_checkpoint(copied / "ckpt.pt", old)
    train(copied, "--epochs", "1", "--ema", ".9", "--log-every", "10", "--eval-every", "11")             # still resumes as it was
    before = contents(copied)
    said = sentence(capsys, [*FINETUNE, "--finetune", path, "--out", copied])
    assert "--finetune None" in said and f"--finetune {path}" in said
    assert "lies in --out" in sentence(capsys, [*FINETUNE, "--finetune", copied / "ckpt.pt", "--out", copied])
    assert "lies in --out" in sentence(capsys, [*FINETUNE, "--finetune", copied / "ckpt.pt", "--out", copied, "--fresh"])
    assert "another train script" in sentence(capsys, [*FINETUNE, "--data", "digits8x8", "--out", tmp_path / "mae"])
    assert contents(copied) == before


def test_the_finetune_preset(tmp_path, capsys):
    """MAE's recipe; drop path only where there is a shortcut; flags win."""
    for name, flags in (("decayed", []), ("skipless", ["--skipless"])):
        pretrained(tmp_path / name, *flags)
    get = lambda name, *more: train_vit.get_args(["--preset", "finetune", "--finetune", str(tmp_path / name / "ckpt.pt"), *more])
    args = get("decayed")
    assert (args.lr, args.layer_decay, args.weight_decay, args.drop_path, args.epochs, args.batch_size, args.warmup) == (2e-3, .65, .05, .1, 100, 1024, 5)
    assert (args.mixup, args.cutmix, args.label_smoothing, args.augment, args.pool, args.opt, args.clip) == (.8, 1, .1, "strong", "mean", "adamw", 0)
    assert (args.shortcut, args.alpha_min, args.out) == ("decayed", .6, "out/vit-finetune-decayed-adamw-seed0")
    skipless = get("skipless", "--data", "mnist5k", "--layer-decay", ".9")
    assert (skipless.shortcut, skipless.drop_path, skipless.data, skipless.layer_decay) == ("skipless", 0, "mnist5k", .9)
    assert "--preset finetune needs --finetune" in sentence(capsys, ["--preset", "finetune"])


@pytest.mark.parametrize("make, flags, words", [
    (lambda to: to / "nowhere", [], ["nowhere", "not a file"]),
    (lambda to: to.parent, [], ["not a file"]),
    (lambda to: checkpoint(to, args={"lm": {}, "patch_size": 1}), [], ["language model", "train_mae.py"]),
    (lambda to: checkpoint(to, args={"kind": "sit", "train_images": 1, "patch_size": 2}), [], ["another kind of model", "train_mae.py"]),
    (lambda to: picture(to / "ckpt.pt", b"not a checkpoint") or to / "ckpt.pt", [], ["not a whole checkpoint"]),
    (lambda to: pretrained(to, chans=3)[0], [], ["3 channels", "--data has 1"]),
    (lambda to: pretrained(to)[0], ["--depth", "3"], ["--depth 3", "--depth 2"]),
    (lambda to: pretrained(to)[0], ["--skipless"], ["--shortcut skipless", "--shortcut decayed"]),
    (lambda to: pretrained(to)[0], ["--alpha-min", ".7"], ["--alpha-min 0.7", "--alpha-min 0.6"]),
    (lambda to: pretrained(to)[0], ["--size", "tiny"], ["--size tiny", "--size nano"]),
    (lambda to: pretrained(to)[0], ["--init", "default"], ["--init"]),
    (lambda to: pretrained(to)[0], ["--c", "2"], ["--c "]),
    (lambda to: pretrained(to)[0], ["--img-size", "10"], ["patch size 4"]),
    (lambda to: pretrained(to)[0], ["--layer-decay", "0"], ["--layer-decay"]),
    (lambda to: pretrained(to, "--skipless")[0], ["--drop-path", ".1"], ["drop path"]),
    (lambda to: "", [], ["--finetune", "not a file"]),           # an empty shell variable
], ids=["missing", "folder", "lm", "sit", "damaged", "channels", "depth", "shortcut", "alpha_min", "size", "init", "c", "patches", "decay", "drop path", "empty"])
def test_what_cannot_be_fine_tuned(tmp_path, capsys, make, flags, words):
    """Exit code 2, one sentence, no folder."""
    said = sentence(capsys, [*FINETUNE, "--out", tmp_path / "out", "--finetune", make(tmp_path / "mae"), *flags])
    assert all(w in said for w in words), said
    assert not (tmp_path / "out").exists()
