"""train_vit.py as people use it: interrupted and resumed, on several processes, with wrong input."""
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
from test_runtime import join_ranks, launch, launch_ranks, run_script, start_ranks

pytestmark = pytest.mark.usefixtures("no_curve")
TINY = ["--threads", "1", "--device", "cpu", "--data", "digits8x8", "--depth", "2", "--batch-size", "64",
        "--lr", "1e-3", "--set", "img_size=8", "patch_size=4"]
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
    """The lines of the log without the rate; floats compare bit by bit, as JSON keeps every digit."""
    text = (Path(out) / "log.jsonl").read_text(encoding="utf-8")
    lines = map(json.loads, text.splitlines())
    return [{k: v for k, v in row.items() if k != "images_per_s"} for row in lines]


def script(argv):
    runtime.run_script(lambda: train_vit.main(argv))


class Stopped(BaseException):
    """Stands for a power cut."""


def stop_at(main, step, argv):
    """A train script's main(argv), cut off in the middle of this step (None: never), on every rank."""
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
    """Weights, averages, optimizer, step, best, generator and log of two run folders are equal."""
    one, two = load(a), load(b)
    one.pop("args"), two.pop("args")
    assert_same(one, two)
    assert rows(a) == rows(b)


def assert_close(a, b, tolerance, but_key_bias=False):
    """Weights equal up to the order of summation: the difference relative to the size of each tensor.

    but_key_bias leaves out the key third of the qkv bias. Softmax does not see it, so its gradient is
    rounding noise alone, which Adam scales up to full steps."""
    assert a["model"].keys() == b["model"].keys()
    for key, x in a["model"].items():
        y = b["model"][key]
        if but_key_bias and key.endswith("qkv.bias"):
            x, y = (torch.cat([t.chunk(3)[0], t.chunk(3)[2]]) for t in (x, y))
        error = (x - y).norm() / max(y.norm().item(), 1e-2)
        assert error <= tolerance, f"{key}: {error:.1e}"


FINISHED = ["--epochs", "1", "--ema", ".9", "--eval-every", "11", "--set", "log_every=10"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of one epoch, to be copied and not changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(out, *FINISHED)
    return out


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# -------------------------------------------------------------------------------------------------------
# interrupted and resumed

EPOCHS = os.environ.get("EPOCHS", "1.2")
LONG = ["--epochs", EPOCHS, "--batch-size", "32", "--opt", "soap", *SKIPLESS, "--ema", ".9",
        "--eval-every", "9", "--set", "augment=light", "mixup=0.2"]
KILLS = int(os.environ.get("KILLS", 5))


def steps_said(output):
    """The last step of which a process has spoken; 0 before it trains."""
    said = output.read_text(encoding="utf-8") if output.exists() else ""
    return max(map(int, re.findall(r"^step +(\d+)  epoch", said, re.MULTILINE)), default=0)


def wait_for_step(processes, outputs, step):
    """Until rank 0 has said this step, or the run is over."""
    end = time.monotonic() + 60
    while steps_said(outputs[0]) < step and all(p.is_alive() for p in processes):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_killed_at_random_moments_equals_never_killed(tmp_path):
    """SIGTERM or SIGKILL to one of two ranks at random moments: starting, training, evaluating, saving.

    A SIGTERM saves on both; a rank whose neighbour is dead ends within seconds; the checkpoint always
    loads; and the run that comes out is the uninterrupted one to the bit: weights, averages, SOAP's
    state, log. Augmentation and MixUp make the random numbers matter. KILLS=20 EPOCHS=6: more."""
    flags = [*LONG, "--save-every", "4", "--set", "log_every=3"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert launch_ranks(2, script, command(whole, *flags), folder=tmp_path)[0] == [0, 0]
    rng, step = random.Random(0), 0
    names = {f"{name}{end}" for name in ("ckpt.pt", "log.jsonl", "args.json") for end in ("", ".tmp")}
    for kill in range(KILLS):
        processes, outputs = start_ranks(2, script, command(killed, *flags), folder=tmp_path)
        if rng.random() < 0.85:                             # else while it starts
            wait_for_step(processes, outputs, step + rng.randrange(1, 12))
        time.sleep(rng.uniform(0, 0.1))
        training, victim = steps_said(outputs[0]) > 0, processes[rng.randrange(2)]
        number = rng.choice([signal.SIGTERM, signal.SIGKILL])
        os.kill(victim.pid, number)
        begin = time.monotonic()
        codes, texts = join_ranks(processes, outputs, timeout=60 if training else 3)
        print(kill, number.name, "to rank", processes.index(victim), "after step", step, codes)
        if training and number == signal.SIGTERM:
            assert codes in ([143, 143], [0, 0]), texts
        elif training:
            assert victim.exitcode == -9 and codes.count(-9) == 1, texts
            assert time.monotonic() - begin < 9
        if (killed / "ckpt.pt").exists():
            before, step = step, runtime.load_checkpoint(killed / "ckpt.pt")["step"]
            assert step >= before
            assert {p.name for p in killed.iterdir()} <= names
        if step == rows(whole)[-1]["step"]:
            break
    codes, texts = launch_ranks(2, script, command(killed, *flags), folder=tmp_path)
    assert codes == [0, 0], texts
    assert_same_run(whole, killed)
    assert rows(whole)[-1]["step"] == load(whole)["step"]
    assert not list(killed.glob("*.tmp"))


@pytest.mark.parametrize("n", [1, 2])
def test_a_signal_ends_the_step_and_saves(tmp_path, n):
    """SIGTERM, SIGUSR1, Ctrl-C, to one process of one and of two: all end with 128 + its number.

    One line says so; the same command goes on, and the log is that of a run in one piece, though the
    signals fall between two of its lines."""
    flags, out = [*LONG, "--set", "log_every=5"], tmp_path / "run"
    saved = 0
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        processes, outputs = start_ranks(n, script, command(out, *flags), folder=tmp_path)
        wait_for_step(processes, outputs, saved + 1)
        time.sleep(0.03)
        os.kill(processes[-1].pid, number)
        codes, texts = join_ranks(processes, outputs)
        assert codes == [128 + number] * n, texts
        before, saved = saved, load(out)["step"]
        assert texts[0].splitlines()[-1] == f"saved at step {saved}: the same command continues"
        assert saved > before and "Traceback" not in "".join(texts)
    whole = tmp_path / "whole"
    for folder in (out, whole):
        assert launch_ranks(n, script, command(folder, *flags), folder=tmp_path)[0] == [0] * n
    assert_same_run(out, whole)


def slow(argv):
    """A run whose step takes half a minute."""
    runtime.Run.share = lambda run, samples: time.sleep(30)
    script(argv)


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    """And nothing is saved, as the step is not over; one that comes twice in a moment counts once."""
    process = launch(slow, command(tmp_path / "run"), output=tmp_path / "text")
    while not (tmp_path / "run" / "args.json").exists():
        time.sleep(0.02)
    time.sleep(1)
    for pause in (0.01, 1.3, 0):
        os.kill(process.pid, signal.SIGINT)
        assert process.is_alive()
        time.sleep(pause)
    process.join(10)
    assert process.exitcode == 130 and not (tmp_path / "run" / "ckpt.pt").exists()


def test_an_evaluation_that_fails_costs_no_training(tmp_path, monkeypatch):
    """The step is saved before; the next start makes up for the evaluation, and the run is the same."""
    flags = ["--epochs", ".4", "--eval-every", "4", "--save-every", "100"]
    train(tmp_path / "whole", *flags)
    evaluate, calls = train_vit.evaluate, []

    def fail_once(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a broken disk")
        return evaluate(*arguments)
    monkeypatch.setattr(train_vit, "evaluate", fail_once)
    with pytest.raises(RuntimeError):
        train(tmp_path / "run", *flags)
    assert load(tmp_path / "run")["step"] == 8 and "val_loss" not in rows(tmp_path / "run")[-1]
    train(tmp_path / "run", *flags)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_full_disk_is_one_sentence(tmp_path):
    """No file may grow above 250 kB: the save fails, names --out, and leaves no half of a checkpoint."""
    ran = run_script(*command(tmp_path / "run", "--epochs", ".1"), limit="ulimit -f 500")
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr.count("\n") == 1
    assert "ckpt.pt cannot be written" in ran.stderr and "--out" in ran.stderr
    assert sorted(contents(tmp_path / "run")) == ["args.json", "log.jsonl"]


@pytest.mark.parametrize("flags", [
    ["--opt", "adamw", "--set", "drop_path=0.1"], ["--opt", "kl-shampoo", *SKIPLESS],
    ["--opt", "muon", "--shortcut", "decayed", "--alpha-min", ".5", "--micro-batch", "16"],
], ids=lambda flags: flags[1])
def test_resume_is_exact_for_every_optimizer(tmp_path, flags):
    """Cut off two steps after a save and started again: all equals the run in one piece, to the bit."""
    flags = [*flags, "--epochs", ".6", "--warmup", ".2", "--ema", ".8", "--save-every", "5",
             "--eval-every", "4", "--set", "cutmix=0.5", "augment=light", "log_every=1"]
    train(tmp_path / "whole", *flags)
    stop_at(train_vit.main, 7, command(tmp_path / "cut", *flags))
    assert load(tmp_path / "cut")["step"] == 5 and rows(tmp_path / "cut")[-1]["step"] == 7
    train(tmp_path / "cut", *flags)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert load(tmp_path / "cut")["step"] == 13


def test_noise_is_new_in_every_micro_step(tmp_path, monkeypatch):
    """MixUp and drop path draw from a generator that is seeded per step and micro-step."""
    seeds, seed = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda value: (seeds.append(value), seed(value))[1])
    train(tmp_path / "run", "--epochs", ".2", "--micro-batch", "32")
    assert len(seeds) == len(set(seeds)) == 1 + 4 * 2       # the first is the initialisation's


def test_a_change_needs_a_word_and_is_logged(copied, capsys):
    """lr, warm-up and length: refused without --allow-change; with it the log tells of the change."""
    changed = [*FINISHED, "--epochs", "1.4", "--lr", "2e-3"]
    for flags, key in ((changed, "lr=0.001"), ([*FINISHED, "--epochs", "2"], "epochs=1.0"),
                       ([*FINISHED, "--warmup", "1"], "warmup=0.5")):
        said = sentence(capsys, command(copied, *flags))
        assert key in said and "--allow-change" in said
    train(copied, *changed, "--allow-change")
    assert "resume" in capsys.readouterr().out
    changes = [row for row in rows(copied) if "changed" in row]
    assert {"step": 22, "changed": "lr", "was": .001, "now": .002} in changes and len(changes) == 2
    assert rows(copied)[-1]["step"] == 31
    lrs = {row["step"]: row["lr"] for row in rows(copied) if "lr" in row}
    assert lrs[30] == runtime.lr_at(29, 31, 11, 2e-3) and lrs[20] == runtime.lr_at(19, 22, 11, 1e-3)


def test_fresh_starts_over_at_once(copied, tmp_path):
    """--fresh: log and checkpoint of the old run are gone from the first step on."""
    old = load(copied)
    for name in ("best.pt", "ckpt-11.pt"):
        shutil.copy(copied / "ckpt.pt", copied / name)
    flags = ["--seed", "1", "--set", "log_every=1"]
    stop_at(train_vit.main, 3, command(copied, *flags, "--fresh"))
    assert [r["step"] for r in rows(copied)] == [1, 2, 3] and "ckpt.pt" not in contents(copied)
    assert not list(copied.glob("*.pt"))
    again, new = (train(out, *flags, "--epochs", ".2") for out in (copied, tmp_path / "new"))
    assert again["step"] == 4
    assert not torch.equal(again["model"]["head.weight"], old["model"]["head.weight"])
    assert_same(again["model"], new["model"])
    assert rows(copied) == rows(tmp_path / "new")


def test_finished_run_says_its_figure_again(copied, capsys):
    """Started once more it trains nothing, changes neither log nor weights, says the same."""
    before = contents(copied)
    train(copied, *FINISHED)
    said = capsys.readouterr().out
    best = max(row["val_top1"] for row in rows(copied) if "val_top1" in row)
    assert said.endswith(f"best top-1 {best:.1f} %\nval top-1 {rows(copied)[-1]['val_top1']:.1f} %\n")
    assert "step 22 of 22" in said and "loss" not in said
    assert all(contents(copied)[name] == before[name] for name in ("ckpt.pt", "log.jsonl"))


def test_spelling_out_a_default_is_the_same_run(copied):
    """A resume that says --size nano is the same run, not another architecture."""
    train(copied, *FINISHED, "--size", "nano", "--opt", "adamw", "--weight-decay", "0.05")


def test_the_best_and_every_nth_checkpoint_stay(tmp_path):
    """best.pt holds the step of the best evaluation, ckpt-N.pt those steps; the log is the same."""
    flags = ["--epochs", ".6", "--eval-every", "3", "--lr", "1e-2"]
    train(tmp_path / "plain", *flags)
    train(tmp_path / "run", *flags, "--set", "save_best=true", "keep_every=5")
    assert rows(tmp_path / "run") == rows(tmp_path / "plain")
    seen = [row for row in rows(tmp_path / "run") if "val_top1" in row]
    best = max(seen, key=lambda row: (row["val_top1"], row["step"]))
    assert runtime.load_checkpoint(tmp_path / "run" / "best.pt")["step"] == best["step"]
    for step in (5, 10):
        assert runtime.load_checkpoint(tmp_path / "run" / f"ckpt-{step}.pt")["step"] == step


# -------------------------------------------------------------------------------------------------------
# several processes, accumulation

FEW = ["--epochs", ".9", "--warmup", "0", "--save-every", "4", "--batch-size", "50",
       "--set", "precondition_frequency=4", "log_every=1"]


def wide(argv, last=None):
    """The run of argv with the model in float64, cut off in step `last` if that is given.

    In float32 two orders of summation cannot be compared after an optimizer that normalises: where a
    gradient is zero in truth it is rounding noise, and noise / (|noise| + eps) is a full step."""
    build = train_vit.build_model

    def build_wide(args, images):
        raw, *rest = build(args, images)
        raw.double().register_forward_pre_hook(lambda module, x: (x[0].double(),))
        return raw, *rest

    train_vit.build_model = build_wide
    runtime.run_script(lambda: stop_at(train_vit.main, last, argv))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By optimizer: the folders of a run cut off after 16 of its 25 steps, and of the whole run.

    By one process with the whole batch, in float64. The runs to compare start from the former, because
    SOAP's first bases are not determined: the sum of a few gradients' outer products has a null space,
    in which any basis is as good as another, and rounding chooses. After 16 steps none is left."""
    made = {}

    def get(opt):
        if opt not in made:
            folder = tmp_path_factory.mktemp(opt)
            for last in (17, None):
                argv = command(folder / "run", "--opt", opt, *FEW)
                codes, outputs = launch_ranks(1, wide, argv, last, folder=folder)
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
@pytest.mark.parametrize("n, micro", [(1, 13), (2, 25), (3, 5), (8, 3)])
def test_processes_and_micro_batches_do_not_matter(tmp_path, alone, opt, n, micro):
    """50 samples on 1, 2, 3 and 8 processes, in micro-batches that do not divide it: one process's run.

    A missing weight, a gradient exchanged once too often or parts that overlap show."""
    start, whole = alone(opt)
    out = Path(shutil.copytree(start, tmp_path / "run"))
    argv = command(out, "--opt", opt, *FEW, "--micro-batch", micro)
    codes, outputs = launch_ranks(n, wide, argv, folder=tmp_path, timeout=180)
    assert codes == [0] * n and "step 16" in outputs[0], outputs
    assert_equal_runs(out, whole)
    assert not any(outputs[1:])                             # rank 0 alone speaks


def test_even_shares_divide_as_before():
    """The factor of a micro-batch's loss is 1 / micro-steps, exactly, where all are equal."""
    for processes, micro_steps, size in ((1, 1, 64), (1, 4, 25), (2, 1, 50), (8, 2, 64)):
        args = train_vit.get_args(["--batch-size", str(processes * micro_steps * size)])
        run = argparse_run(args, processes)
        assert run.share(size) == 1 / micro_steps


def argparse_run(args, processes):
    run = runtime.Run.__new__(runtime.Run)
    run.args, run.size = args, processes
    return run


def test_two_processes_equal_one_in_float32(tmp_path):
    """The run as it is shipped, with AdamW: equal to the order of summation in float32."""
    flags = ["--epochs", ".4", "--warmup", "0"]
    one, argv = train(tmp_path / "one", *flags), command(tmp_path / "two", *flags, "--micro-batch", "16")
    codes, outputs = launch_ranks(2, script, argv, folder=tmp_path)
    assert codes == [0, 0], outputs
    assert_close(load(tmp_path / "two"), one, tolerance=3e-5, but_key_bias=True)


def test_the_command_of_the_first_page_on_eight_processes(tmp_path):
    """100 samples on 8 processes. Fewer samples than processes is the one thing that is refused."""
    argv = ["--skipless", "--opt", "soap", "--epochs", ".05", "--threads", "1", "--out",
            str(tmp_path / "a")]
    codes, outputs = launch_ranks(8, script, argv, folder=tmp_path, timeout=180)
    assert codes == [0] * 8, outputs
    assert "100 over 8 process(es)" in outputs[0] and "val top-1" in outputs[0].splitlines()[-1]
    argv = command(tmp_path / "b", "--batch-size", "1")
    codes, outputs = launch_ranks(2, script, argv, folder=tmp_path)
    assert codes[0] == 2 and "--batch-size 1 is less than one sample for each" in outputs[0]
    assert not (tmp_path / "b").exists()


def test_resume_on_another_number_of_processes(tmp_path, alone):
    """A checkpoint does not know how many processes wrote it: on one, two and one again."""
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
    run = runtime.open_run(args, "vit")
    images = data.load_images("digits8x8")
    raw, _, _ = train_vit.build_model(args, images)
    raw.load_state_dict(load(out)["model"])
    result = train_vit.evaluate(raw, images, data.eval_transform(images, 8), args, run)
    if run.main:
        runtime.write_text(path, json.dumps(result))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_evaluation_is_exact_on_any_number_of_processes(tmp_path, finished, n):
    """355 images, which neither 2 nor 3 nor 50 divides: the very fractions of a plain count."""
    images = data.load_images("digits8x8")
    assert len(images.val) % 2 and len(images.val) % 3
    raw, _, _ = train_vit.build_model(train_vit.get_args(command(tmp_path)), images)
    raw.load_state_dict(load(finished)["model"])
    with torch.no_grad():
        logits = raw.eval()(data.eval_transform(images, 8)(images.val.images)).double()
    true = logits.gather(1, images.val.labels[:, None])
    place = (logits > true).sum(1)                          # how many classes come before the right one
    file = tmp_path / "result.json"
    codes, outputs = launch_ranks(n, evaluate_to_file, finished, file, folder=tmp_path)
    assert codes == [0] * n, outputs
    loss, top1, top5 = json.loads(file.read_text(encoding="utf-8"))
    assert top1 == 100 * (place < 1).sum().item() / 355
    assert top5 == 100 * (place < 5).sum().item() / 355
    assert loss == pytest.approx((logits.logsumexp(1) - true[:, 0]).mean().item(), rel=1e-5)


def test_torchrun(tmp_path):
    """The command of the docstring under torchrun: a run ends well; a bad one says one sentence."""
    good = run_script(*command(tmp_path / "run", "--epochs", ".1"), nproc=2)
    assert good.returncode == 0, good.stderr
    assert "64 over 2 process(es) x 1 micro-step(s)" in good.stdout
    assert re.fullmatch(r"val top-1 \d+\.\d %", good.stdout.splitlines()[-1])
    bad = run_script(*command(tmp_path / "none", "--data", tmp_path / "nowhere"), nproc=2)
    assert bad.returncode != 0 and not (tmp_path / "none").exists()
    said = [line for line in bad.stderr.splitlines() if line.startswith("error:")]
    assert len(said) == 1 and "nowhere" in said[0]


def wrapped_only(argv):
    """torch.compile with all its wrapping and tracing, without the minute that C++ takes."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    script(argv)


def test_compile_changes_no_key_and_ema_still_moves(tmp_path):
    """Compiled, on one process and two: the same keys, no wrapper's prefix, averages that follow."""
    flags = ["--depth", "1", "--epochs", ".14", "--ema", ".5", "--warmup", "0"]
    plain = train(tmp_path / "plain", *flags)
    for n in (1, 2):
        argv = command(tmp_path / f"{n}", *flags, "--compile")
        codes, outputs = launch_ranks(n, wrapped_only, argv, folder=tmp_path)
        assert codes == [0] * n, outputs
    args = train_vit.get_args(command(tmp_path, *flags))
    first = train_vit.build_model(args, data.load_images("digits8x8"))[0].state_dict()
    for other in (load(tmp_path / "1"), load(tmp_path / "2")):
        assert keys(other) == keys(plain)
        assert not any(k.startswith(("_orig_mod.", "module.")) for k in other["model"])
        assert_close(other, plain, tolerance=1e-3, but_key_bias=True)
        moved = [k for k in first if not torch.equal(first[k], other["ema"][k])]
        assert set(moved) == set(first)
        assert any(not torch.equal(other["model"][k], other["ema"][k]) for k in moved)
    train(tmp_path / "1", *flags)                           # a plain run goes on from a compiled one's


def keys(tree):
    """Every path of a nested checkpoint."""
    if isinstance(tree, dict):
        return {f"{k}.{rest}" for k, v in tree.items() for rest in keys(v)}
    if isinstance(tree, (list, tuple)):
        return {f"{i}.{rest}" for i, v in enumerate(tree) for rest in keys(v)}
    return {""}


# -------------------------------------------------------------------------------------------------------
# what a run leaves and says

def test_what_a_run_leaves(finished):
    """The four files; train and eval lines with the agreed keys; the configuration; a picture."""
    assert sorted(contents(finished)) == ["args.json", "ckpt.pt", "curve.png", "log.jsonl"]
    text = (finished / "log.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    train_lines = [row for row in lines if "loss" in row]
    eval_lines = [row for row in lines if "val_loss" in row]
    assert len(train_lines) + len(eval_lines) == len(lines)
    keys_ = {"step", "epoch", "loss", "lr", "grad_norm", "images_per_s"}
    assert all(row.keys() == keys_ for row in train_lines)
    assert all(row.keys() == {"step", "val_loss", "val_top1", "val_top5"} for row in eval_lines)
    assert [row["step"] for row in train_lines] == [10, 11, 20, 22]
    assert [row["step"] for row in eval_lines] == [11, 22]
    for row in train_lines:                                 # of the update that made the step: lr(s - 1)
        assert row["lr"] == runtime.lr_at(row["step"] - 1, 22, 11, 1e-3)
        assert row["epoch"] == row["step"] / 22
    saved = load(finished)
    assert set(saved) == {"model", "ema", "optimizer", "step", "best", "rng", "args"}
    assert saved["best"] == eval_lines[0]["val_top1"]       # the checkpoint is from before the last
    assert not any(k.startswith(("_orig_mod.", "module.")) for k in [*saved["model"], *saved["ema"]])
    args = json.loads((finished / "args.json").read_text(encoding="utf-8"))
    assert args == json.loads(json.dumps(saved["args"])) and args["kind"] == "vit"
    with Image.open(finished / "curve.png") as picture:
        assert picture.width > 600 and len(picture.convert("L").getcolors()) > 10


def test_the_record_holds_what_applied(tmp_path):
    """The constants of --init auto, not the preset's; nothing of other optimizers or inits."""
    argv = ["--threads", "1", "--skipless", "--opt", "soap", "--epochs", ".01", "--out", str(tmp_path)]
    train_vit.main(argv)
    args = load(tmp_path)["args"]
    constants = {key: round(args[key], 3) for key in ("alpha", "beta", "c", "cancel_mean")}
    assert constants == dict(alpha=.482, beta=.963, c=3.0, cancel_mean=.535) and args["init"] == "auto"
    assert not {"alpha_qk", "alpha_u", "init_factor", "skipless_init", "constants"} & args.keys()
    assert args["precondition_frequency"] == 10 and args["alpha_min"] == 1.0 and args["lr"] == 1e-3
    assert args["model"]["shortcut"] == "skipless" and args["depth"] == 12


def test_a_plain_adamw_run_records_no_constants(finished):
    args = load(finished)["args"]
    assert not {"alpha", "beta", "c", "alpha_vo", "precondition_frequency", "stagger"} & args.keys()


def test_first_lines_say_what_runs(tmp_path, capsys):
    """Revision, torch, device and why, parameters, preconditioned sides, batch, steps: before step 1."""
    train(tmp_path / "run", "--epochs", ".1", "--opt", "soap", *SKIPLESS, "--micro-batch", "16")
    printed = capsys.readouterr().out
    head = printed[:printed.index("step      2")]
    for words in (torch.__version__, "asked for by --device", "torch.float32", "1442 training",
                  "355 validation", "221,184 parameters", "(288, 96): both sides",
                  "2 steps, 22 per epoch", "64 over 1 process(es) x 4 micro-step(s)", "skipless", "c 3"):
        assert words in head, words
    assert head.count("\n") < 18 and re.search(r"\d:\d\d:\d\d left", printed)
    assert re.fullmatch(r"val top-1 \d+\.\d %", printed.splitlines()[-1])


def test_evaluation_without_training(finished, tmp_path, capsys):
    """The averaged net's figures, of its own data or other, with nothing written."""
    def only(path, *flags):
        return ["--threads", "1", "--set", f"eval_only={path}", *flags]
    before, row = contents(finished), rows(finished)[-1]
    train_vit.main(only(finished))
    said = capsys.readouterr().out
    assert said.startswith(f"{finished}, step 22: val loss {row['val_loss']:.4f}, ")
    assert said.endswith(f"top-1 {row['val_top1']:.1f} %, top-5 {row['val_top5']:.1f} %\n")
    train_vit.main(only(finished / "ckpt.pt", "--data", "mnist5k"))
    assert "val loss" in capsys.readouterr().out and contents(finished) == before
    assert "classes 7" in sentence(capsys, only(finished, "--data", "emoji"))
    assert "--set eval_only" in sentence(capsys, only(tmp_path))


def test_a_locale_without_utf_8(tmp_path):
    """Where the default encoding is ASCII: nothing dies, and all texts are UTF-8."""
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    ran = run_script(*command(tmp_path / "années", "--epochs", ".05"), env=env)
    assert ran.returncode == 0, ran.stderr
    assert rows(tmp_path / "années")[-1]["step"] == 1
    json.loads((tmp_path / "années" / "args.json").read_text(encoding="utf-8"))


# -------------------------------------------------------------------------------------------------------
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
    (["--set", "patch_size=3"], ["image size", "8", "patch size 3"]),
    (["--batch-size", "2000"], ["--batch-size 2000", "1442"]),
    (["--shortcut", "decayed", "--alpha-min", "0", "--set", "drop_path=0.1"], ["drop path"]),
    (["--learning-rate", "1"], ["--learning-rate"]), (["--lr", "nan"], ["--lr"]),
    (["--lr", "0"], ["--lr"]), (["--epochs", "0"], ["--epochs"]), (["--depth", "0"], ["--depth"]),
    (["--seed", "9" * 30], ["--seed"]),
    (["--data", "nowhere/at/all"], ["--data", "nowhere/at/all"]), (["--data", ""], ["data"]),
    (["--device", "tpu"], ["--device tpu"]), (["--temperature-beta", "1e-300"], ["--temperature-beta"]),
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


def test_paper_preset_asks_for_data(tmp_path, capsys):
    said = sentence(capsys, ["--preset", "paper", "--out", tmp_path / "out"])
    assert "--preset paper" in said and "--data" in said and not (tmp_path / "out").exists()


def test_wandb_without_the_package(tmp_path, capsys, monkeypatch):
    """An optional package that is missing is found out before anything is written."""
    monkeypatch.setitem(sys.modules, "wandb", None)         # makes the import fail anywhere
    said = sentence(capsys, command(tmp_path / "out", "--wandb", "project"))
    assert "--wandb" in said and "pip install wandb" in said and not (tmp_path / "out").exists()


def test_out_below_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    out = tmp_path / "file" / "out"
    assert f"--out {out}" in sentence(capsys, command(out))
    assert (tmp_path / "file").read_text(encoding="utf-8") == "in the way"


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
    flags = ["--data", tmp_path / "photos", "--batch-size", "4"]
    said = sentence(capsys, command(tmp_path / "out", *flags))
    assert all(w in said for w in words), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("split, workers, content", [
    ("train", 0, b""), ("train", 1, None), ("val", 0, b"no jpeg"), ("val", 0, None),
], ids=["empty", "cut, read by a worker", "text in val", "cut in val"])
def test_unreadable_image(tmp_path, capsys, split, workers, content):
    """A damaged picture is named, whether this process, a worker or the first check meets it."""
    root, bad = folder(tmp_path / "photos"), tmp_path / "photos" / split / "a" / "broken.jpg"
    if content is None:
        Image.effect_noise((64, 64), 90).save(bad)
        content = bad.read_bytes()[:600]
    picture(bad, content)
    argv = command(tmp_path / "out", "--data", root, "--batch-size", "8", "--epochs", "1",
                   "--set", f"workers={workers}")
    said = sentence(capsys, argv)
    assert str(bad) in said and "\\n" not in said


@pytest.mark.parametrize("flags, words", [
    (["--depth", "3"], ["depth=2", "depth=3"]), (["--opt", "soap"], ["opt=adamw", "opt=soap"]),
    (["--seed", "1"], ["seed=0", "seed=1"]),
    (["--set", "patch_size=2"], ["patch_size=4", "patch_size=2"]),
    (["--init", "paper"], ["init=default", "init=paper"]),
    (["--size", "tiny"], ["size=nano", "size=tiny"]),
    (["--skipless", "--init", "default"], ["shortcut=residual", "shortcut=skipless"]),
    (["--weight-decay", ".5"], ["weight_decay=0.05", "weight_decay=0.5"]),
    (["--batch-size", "32"], ["batch_size=64", "batch_size=32"]),
    (["--set", "betas=.8,.9"], ["betas=None", "betas=[0.8, 0.9]"]),
    (["--data", "emoji"], ["--data emoji", "train_images=1442"]),
    (["--lr", ".5", "--allow-change"], ["22 steps", "--fresh"])], ids=lambda value: " ".join(value))
def test_checkpoint_of_another_run(copied, capsys, flags, words):
    """Another architecture, optimizer or seed, or another lr for a run that is over: refused with both
    values; the run's files stay as they are."""
    before = contents(copied)
    said = sentence(capsys, command(copied, *FINISHED, *flags))
    assert all(w in said for w in words) and "ckpt.pt" in said and "--fresh" in said, said
    assert contents(copied) == before


def test_corrupted_checkpoint(copied, capsys):
    (copied / "ckpt.pt").write_bytes((copied / "ckpt.pt").read_bytes()[:5000])
    before = contents(copied)
    said = sentence(capsys, command(copied, "--epochs", "1"))
    assert str(copied / "ckpt.pt") in said and "--fresh" in said
    assert contents(copied) == before


@pytest.mark.parametrize("n, opt", [(1, "soap"), (2, "adamw")])
def test_divergence_stops_all_processes(tmp_path, n, opt):
    """An lr of 1e30: code 2 and a sentence with step, lr and gradient norm; what was saved is finite."""
    flags = ["--opt", opt, "--lr", "1e30", "--warmup", "0", "--save-every", "1"]
    argv = command(tmp_path / "run", *flags)
    codes, outputs = launch_ranks(n, script, argv, folder=tmp_path, timeout=60)
    assert codes == [2] * n, outputs                        # one that hangs has another code
    said = re.findall(r"^error: .*", outputs[0], re.MULTILINE)
    assert len(said) == 1
    step = int(re.search(r"not finite at step (\d+)", said[0])[1])
    lr = runtime.lr_at(step, 220, 0, 1e30)
    assert 1 <= step <= 3 and f"lr {lr:.3g}" in said[0] and "gradient norm" in said[0]
    assert load(tmp_path / "run")["step"] == step           # the updates before the bad one
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path / "run") if "loss" in row)


# -------------------------------------------------------------------------------------------------------
# initialisation, optimizers, learning

@pytest.mark.parametrize("flags", [["--init", "skipless"], ["--skipless", "--init", "paper"],
                                   ["--skipless", "--init", "default"], ["--skipless"]], ids=" ".join)
def test_each_initialisation_is_another_start(tmp_path, flags):
    """Init and shortcut are separate flags: the paper's table has a residual net with its init too."""
    images, builds = data.load_images("digits8x8"), []
    for more in (flags, []):
        raw, _, used = train_vit.build_model(train_vit.get_args(command(tmp_path, *more)), images)
        builds.append(raw.blocks[0].attn.qkv.weight)
    same = "default" in flags
    assert torch.allclose(*builds, atol=1e-3) == same


def test_paper_2s_init_on_the_vit(tmp_path):
    """W_V W_O = alpha_vo I and W_Q = W_K in every block; fc1, fc2 with singular values
    2 sqrt(alpha_u), sqrt(alpha_d)."""
    args = train_vit.get_args(command(tmp_path, "--skipless", "--init", "residual-free", "--set",
                                      "alpha_vo=2", "alpha_u=0.5", "alpha_d=3"))
    raw, _, used = train_vit.build_model(args, data.load_images("digits8x8"))
    assert used == dict(alpha_qk=3.0, alpha_vo=2.0, alpha_u=0.5, alpha_d=3.0)
    for block in raw.blocks:
        w_q, w_k, w_v = block.attn.qkv.weight.double().chunk(3)
        assert torch.equal(w_q, w_k)
        eye = torch.eye(96, dtype=torch.float64)
        torch.testing.assert_close(block.attn.proj.weight.double() @ w_v, 2 * eye, rtol=0, atol=1e-5)
        for layer, value in ((block.mlp.fc1, 2 * .5 ** .5), (block.mlp.fc2, 3 ** .5)):
            values = torch.linalg.svdvals(layer.weight.double())
            torch.testing.assert_close(values, torch.full_like(values, value), rtol=1e-5, atol=0)


@pytest.mark.parametrize("opt", ["soap", "kl-shampoo"])
def test_settings_of_the_matrix_optimizers_reach_them(tmp_path, opt):
    """Stagger, bf16 factors, frequency, momenta, first eigenvalues: in the checkpoint's optimizer."""
    flags = ["--opt", opt, "--epochs", ".05", "--set", "stagger=true", "bf16_factors=true",
             "precondition_frequency=4", "init_factor=0.02", "betas=0.8,0.9"]
    state = train(tmp_path / "run", *flags)["optimizer"]["parts"][0]
    group = state["param_groups"][0]
    assert group["factor_dtype"] is torch.bfloat16 and group["precondition_frequency"] == 4
    assert tuple(group["betas"]) == (.8, .9) and group.get("init_factor", .02) == .02
    assert any(t.dtype == torch.bfloat16 for s in state["state"].values() for t in tensors(s))


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [t for part in parts for t in tensors(part)]


def test_it_learns_and_the_shortcut_matters(tmp_path):
    """Twelve blocks, two epochs: the usual ViT reaches 87 %, and the net without residuals, special
    initialisation and SOAP 18 % (chance is 10): the gap that the paper closes."""
    train(tmp_path / "residual", "--depth", "12", "--epochs", "2")
    train(tmp_path / "skipless", "--depth", "12", "--epochs", "2", "--skipless", "--init", "default")
    residual, skipless = (rows(tmp_path / name)[-1]["val_top1"] for name in ("residual", "skipless"))
    assert residual > 80
    assert skipless < 40


# -------------------------------------------------------------------------------------------------------
# fine-tuning

def pretrained(folder, *flags, chans=1, ema=False):
    """A checkpoint of train_mae.py with arbitrary weights, none of them zero: (its path, the MAE)."""
    args = train_mae.get_args(["--data", "digits8x8", "--depth", "2", *flags, "--set", "img_size=8",
                               "patch_size=4", "decoder_depth=2"])
    images = replace(data.load_images(args.data), in_chans=chans)
    raw, options, alphas, _ = train_mae.build_model(args, images)
    states = []
    for _ in range(1 + ema):
        with torch.no_grad():
            for p in raw.parameters():
                p.add_(torch.randn_like(p), alpha=.1)
        states.append({k: v.clone() for k, v in raw.state_dict().items()})
    made = dict(vars(args), kind="mae", model=options, alphas=alphas, in_chans=chans)
    return checkpoint(folder, args=made, model=states[0], ema=states[1] if ema else None), raw.eval()


def checkpoint(folder, **entries):
    folder.mkdir(parents=True, exist_ok=True)
    parts = dict(model={}, ema=None, optimizer={}, step=7, best=0.0, rng=torch.get_rng_state())
    runtime.save_checkpoint(folder / "ckpt.pt", parts | entries)
    return folder / "ckpt.pt"


def start_from(path, *flags):
    """(the ViT as a fine-tuning run of these flags would start with it, the run's args)."""
    argv = ["--finetune", str(path), "--out", str(path.parent / "none"), *flags]
    args = train_vit.get_args(argv)
    raw, _, _ = train_vit.build_model(args, data.load_images(args.data))
    train_vit.load_encoder(raw, args.finetune)
    return raw.eval(), args


KINDS = [["--plain"], ["--alpha-min", ".6"], ["--skipless"], ["--set", "alphas=cosine"],
         ["--set", "alphas=attention-only"], ["--set", "alphas=learned"],
         ["--shortcut", "residual", "--set", "alphas=scaled-both"],
         ["--shortcut", "residual", "--no-long-skips", "--set", "alphas=scaled-branch"]]


@pytest.mark.parametrize("flags", KINDS, ids=" ".join)
def test_the_encoder_is_carried_on_exactly(tmp_path, flags):
    """Whatever its shortcuts, the ViT's tokens after every block are the MAE's to the bit, at its image
    size and at another."""
    path, mae = pretrained(tmp_path, *flags)
    for size in (8, 12):
        x = torch.randn(3, 1, size, size, generator=torch.Generator().manual_seed(1))
        vit, _ = start_from(path, *(["--set", "img_size=12"] if size == 12 else []))
        with torch.no_grad():
            for layer, (a, b) in enumerate(zip(vit.layers(x), mae.layers(x), strict=True)):
                assert torch.equal(a, b), (size, layer)
    assert vit.pos_embed.shape[1] == 1 + 9 and vit.pos_embed.requires_grad


@pytest.mark.parametrize("pool", ["token", "mean"])
@pytest.mark.parametrize("norm", [1, 0])
def test_averaged_weights_a_new_head_and_which_norm(tmp_path, pool, norm):
    """EMA weights win over the last ones; head (std 2e-5) and mean pooling's norm are new; the class
    token's norm is the encoder's where it has one."""
    path, average = pretrained(tmp_path, "--set", f"encoder_norm={norm}", ema=True)
    vit, args = start_from(path, "--set", f"pool={pool}")
    weight = vit.blocks[1].mlp.fc2.weight
    assert torch.equal(weight, average.blocks[1].mlp.fc2.weight)
    assert not torch.equal(weight, load(tmp_path)["model"]["blocks.1.mlp.fc2.weight"])
    assert vit.head.weight.shape == (10, 96) and 1.8e-5 < vit.head.weight.std() < 2.2e-5
    assert not vit.head.bias.any()
    if pool == "mean":
        assert torch.equal(vit.fc_norm.weight, torch.ones(96)) and not vit.fc_norm.bias.any()
    else:
        assert torch.equal(vit.norm.weight, average.norm.weight if norm else torch.ones(96))
    assert (args.data, args.img_size, args.depth, args.drop_path) == ("digits8x8", 8, 2, 0)


def test_a_supervised_encoder_too(finished, tmp_path):
    """From a checkpoint of this script: its averaged features; data, size and patches come with it."""
    path = Path(shutil.copytree(finished, tmp_path / "run")) / "ckpt.pt"
    vit, args = start_from(path)
    own = train_vit.get_args(command(tmp_path))
    old, _, _ = train_vit.build_model(own, data.load_images("digits8x8"))
    old.load_state_dict(load(finished)["ema"])
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(vit.forward_features(x), old.eval().forward_features(x))
        assert vit(x).abs().max() < .01
    assert (args.data, args.size, args.patch_size, args.img_size) == ("digits8x8", "nano", 4, 8)


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_a_self_distilled_encoder_too(tmp_path, pool):
    """From a checkpoint of train_dino.py: the teacher's backbone and its final norm."""
    args = train_dino.get_args(["--data", "digits8x8", "--depth", "2", "--skipless", "--set",
                                "img_size=8", "patch_size=4", "local_size=4", f"pool={pool}"])
    images = data.load_images("digits8x8")
    student, teacher, backbone, head, _ = train_dino.build_model(args, images)
    with torch.no_grad():
        for p in teacher.parameters():
            p.add_(torch.randn_like(p), alpha=.1)
    made = dict(vars(args), kind="dino", model=backbone, head=head, in_chans=1)
    path = checkpoint(tmp_path, args=made, model=student.state_dict(), ema=teacher.state_dict())
    vit, found = start_from(path, "--set", f"pool={pool}")
    x = torch.randn(2, 1, 8, 8)
    vit.head = torch.nn.Identity()
    with torch.no_grad():
        assert torch.equal(vit(x), teacher.eval().backbone(x))
    assert (found.shortcut, found.img_size, found.data) == ("skipless", 8, "digits8x8")


FINETUNE = ["--threads", "1", "--device", "cpu", "--batch-size", "64", "--epochs", ".4", "--warmup",
            ".2", "--save-every", "3", "--set", "log_every=1"]


@pytest.mark.parametrize("opt", ["adamw", "soap"])
def test_a_fine_tuning_run_resumes_exactly_without_the_pretrained_file(tmp_path, opt, capsys):
    """Cut off and started again after the pretrained checkpoint is gone: the run in one piece."""
    path, _ = pretrained(tmp_path / "mae", "--set", "alphas=learned")
    flags = [*FINETUNE, "layer_decay=0.5", "pool=mean", "drop_path=0.2", "--finetune", path, "--opt",
             opt, "--ema", ".8", "--lr", "1e-3"]

    def argv(out):
        return [str(a) for a in [*flags, "--out", tmp_path / out]]
    train_vit.main(argv("whole"))
    assert f"last weights of {path}, step 7; new: fc_norm, head" in capsys.readouterr().out
    stop_at(train_vit.main, 5, argv("cut"))
    assert load(tmp_path / "cut")["step"] == 3
    path.unlink()
    train_vit.main(argv("cut"))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert load(tmp_path / "cut")["args"]["init"] == "pretrained"
    parts = load(tmp_path / "cut")["optimizer"]["parts"]
    assert {g["lr_scale"] for part in parts for g in part["param_groups"]} == {.125, .25, .5, 1.0}
    refused = sentence(capsys, [*argv("cut"), "--set", "layer_decay=0.7"])
    assert "layer_decay=0.5" in refused and "layer_decay=0.7" in refused
    assert "was trained with" in sentence(capsys, [*TINY, "--out", tmp_path / "cut"])


def test_no_fine_tuning_on_top_of_another_run(copied, tmp_path, capsys):
    """An ordinary run is not continued as a fine-tuning one, nor is a pretrained file overwritten."""
    path, _ = pretrained(tmp_path / "mae")
    before = contents(copied)
    said = sentence(capsys, [*FINETUNE, "--finetune", path, "--out", copied])
    assert "ckpt.pt was trained with" in said
    said = sentence(capsys, [*FINETUNE, "--finetune", path, "--out", tmp_path / "mae"])
    assert "another train script" in said
    assert contents(copied) == before


def test_the_finetune_preset(tmp_path, capsys):
    """MAE's recipe; drop path only where there is a shortcut; flags win."""
    for name, flags in (("decayed", []), ("skipless", ["--skipless"])):
        pretrained(tmp_path / name, *flags)

    def get(name, *more):
        return train_vit.get_args(["--preset", "finetune", "--finetune", str(tmp_path / name), *more])
    args = get("decayed")
    recipe = dict(lr=2e-3, layer_decay=.65, weight_decay=.05, drop_path=.1, epochs=100, batch_size=1024,
                  warmup=5, mixup=.8, cutmix=1, label_smoothing=.1, augment="strong", pool="mean",
                  clip=0, shortcut="decayed", alpha_min=.6, out="out/vit-finetune-decayed-adamw-seed0")
    assert {key: getattr(args, key) for key in recipe} == recipe
    skipless = get("skipless", "--data", "mnist5k", "--set", "layer_decay=0.9")
    assert (skipless.shortcut, skipless.drop_path, skipless.lr) == ("skipless", 0, 1e-3)
    assert (skipless.data, skipless.layer_decay) == ("mnist5k", .9)
    assert "--preset finetune needs --finetune" in sentence(capsys, ["--preset", "finetune"])


@pytest.mark.parametrize("make, flags, words", [
    (lambda to: to / "nowhere", [], ["nowhere", "no checkpoint"]),
    (lambda to: to.parent, [], ["no checkpoint"]),
    (lambda to: checkpoint(to, args={"kind": "lm"}), [], ["another kind of model (lm)", "train_mae.py"]),
    (lambda to: picture(to / "ckpt.pt", b"x") or to / "ckpt.pt", [], ["not a whole checkpoint"]),
    (lambda to: pretrained(to, chans=3)[0], [], ["does not fit --data", "pretrain"]),
    (lambda to: pretrained(to)[0], ["--set", "img_size=10"], ["patch size 4"]),
], ids=["missing", "folder", "lm", "damaged", "channels", "patches"])
def test_what_cannot_be_fine_tuned(tmp_path, capsys, make, flags, words):
    """Exit code 2, one sentence, no folder."""
    argv = [*FINETUNE, "--out", tmp_path / "out", "--finetune", make(tmp_path / "mae"), *flags]
    said = sentence(capsys, argv)
    assert all(w in said for w in words), said
    assert not (tmp_path / "out").exists()
