"""train_dino.py as people use it: cut off and resumed, on one process and on two, with wrong input; and its schedules, averages, centre and log against computations by hand."""
import functools
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import data
import init
import optim
import probe
import runtime
import train_dino
from model import DINO
from test_dino import loss_by_hand
from test_init import singular_values
from test_runtime import launch_ranks
from test_train_vit import assert_close, assert_same, assert_same_run, contents, keys, load, one_sentence, rows, stop_at

pytestmark = pytest.mark.usefixtures("no_curve")
TINY = ["--threads", "1", "--device", "cpu", "--data", "digits8x8", "--holdout", ".0278", "--img-size", "8", "--patch-size", "4", "--local-size", "4", "--local-crops", "2", "--depth", "2",
        "--color", "0", "--pool", "token", "--out-dim", "16", "--hidden-dim", "12", "--bottleneck-dim", "6", "--norm-last-layer", "--freeze-last-layer", "0", "--batch-size", "16", "--epochs", ".092",
        "--warmup", ".023", "--teacher-temp-warmup", "0", "--lr", "1e-3", "--clip", "3", "--drop-path", "0", "--log-every", "1", "--eval-every", "4", "--save-every", "4",
        "--knn-every", "0", "--knn-images", "100"]               # 8 steps, 2 of them warm-up; 37 validation images


def command(out, *flags):
    return [*TINY, "--out", str(out), *map(str, flags)]


def train(out, *flags):
    """A run within this process. Returns its checkpoint."""
    train_dino.main(command(out, *flags))
    return load(out)


def quick():
    runtime.plot_curve = lambda *arguments, **more: None


def script(argv):
    runtime.run(lambda: train_dino.main(argv))


SAME = ["--knn-every", ".092", "--pool", "mean", "--drop-path", ".3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, to be copied and not changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(out, *SAME)
    return out


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


# ---------------------------------------------------------------------------------------------------------------------
# what a run leaves

def test_what_a_run_leaves(finished):
    """The five files; train and eval lines with the agreed keys; a checkpoint whose args alone rebuild student and teacher."""
    assert sorted(contents(finished)) == ["args.json", "ckpt.pt", "curve.png", "log.jsonl", "pca.png"]
    lines = [json.loads(line) for line in (finished / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    train_lines, eval_lines = [r for r in lines if "loss" in r], [r for r in lines if "val_loss" in r]
    assert len(train_lines) + len(eval_lines) == len(lines)
    assert all(r.keys() == {"step", "epoch", "loss", "lr", "grad_norm", "images_per_s"} for r in train_lines)
    assert [r["lr"] for r in train_lines] == [runtime.lr_at(s, 8, 2, 1e-3) for s in range(8)]
    assert [r["step"] for r in eval_lines] == [4, 8] and "val_knn" not in eval_lines[0]
    assert eval_lines[1].keys() == {"step", "val_loss", "shared_information", "teacher_entropy", "information", "feature_std", "val_knn", "val_knn_best", "effective_rank", "token_cosine"}
    assert all(r["shared_information"] == pytest.approx(r["information"] + r["teacher_entropy"] - r["val_loss"]) for r in eval_lines)
    saved = load(finished)
    assert set(saved) == {"model", "ema", "optimizer", "step", "best", "rng", "args"} and saved["step"] == 8 and saved["best"] == eval_lines[1]["val_knn_best"]
    assert saved["args"] == json.loads((finished / "args.json").read_text(encoding="utf-8")) and saved["args"]["kind"] == "dino"
    for part in ("model", "ema"):
        DINO(saved["args"]["head"], **saved["args"]["model"]).load_state_dict(saved[part])
    assert not saved["model"]["center"].any() and saved["ema"]["center"].all()
    with Image.open(finished / "curve.png") as picture:
        assert picture.width > 600 and len(picture.convert("L").getcolors()) > 10


def test_the_logged_figures_are_those_of_student_and_teacher(finished):
    """Loss, teacher's entropy and information image by image, with the views of a validation image drawn from its own seed; k-NN, effective rank and token cosine of
    the teacher by layer from a plain loop. --pool mean: the mean of the patch tokens is what the head is given."""
    saved, last = load(finished), rows(finished)[-1]
    student, teacher = (DINO(saved["args"]["head"], **saved["args"]["model"]).eval() for _ in range(2))
    student.load_state_dict(saved["model"]), teacher.load_state_dict(saved["ema"])
    images = data.load_images("digits8x8", 0.0278, 0)
    views = data.MultiCrop(images, 8, 4, 2, saved["args"]["global_scale"], saved["args"]["local_scale"], 0)
    losses, entropies, mean, unit = [], [], 0.0, []
    with torch.no_grad():
        for i in range(len(images.val)):
            torch.manual_seed(runtime.mix_seed("augment", 0, 0, i))
            crops = [crop[None] for crop in views(images.val[i][0])]
            target, features = teacher(crops[:2])
            p = ((target - teacher.center).double() / saved["args"]["teacher_temp"]).softmax(-1)
            losses.append(loss_by_hand(student(crops)[0], p, 0.1))
            entropies += [-sum(x * math.log(x) for x in row.tolist() if x > 0) for row in p[:, 0]]
            mean, unit = mean + p.sum((0, 1)) / (2 * len(images.val)), unit + [f / f.norm() for f in features[:, 0].double()]
        bank = torch.linspace(0, len(images.train) - 1, 100).long()
        tf = data.eval_transform(images, 8)
        train_x, val_x = ([tokens for tokens in teacher.backbone.layers(tf(x))] for x in (images.train.images[bank], images.val.images))
    entropy = sum(entropies) / len(entropies)
    assert last["val_loss"] == pytest.approx(float(sum(losses)) / len(losses), rel=1e-5)
    assert last["teacher_entropy"] == pytest.approx(entropy, rel=1e-4)
    assert last["information"] == pytest.approx(-sum(x * math.log(x) for x in mean.tolist()) - entropy, abs=1e-5)
    assert last["feature_std"] == pytest.approx((torch.stack(unit).var(0, correction=0).mean() * 96).sqrt().item(), rel=1e-4)
    knn = [100 * probe.knn(a[:, 1:].mean(1), images.train.labels[bank], b[:, 1:].mean(1), images.val.labels) for a, b in zip(train_x, val_x)]
    assert last["val_knn"] == pytest.approx(knn, abs=2.8) and len(knn) == 3                      # two near neighbours may swap by rounding: one image of 37
    assert last["val_knn_best"] == max(last["val_knn"])
    for logged, cosine, x in zip(last["effective_rank"], last["token_cosine"], val_x, strict=True):
        s = singular_values(x[:, 1:].mean(1))
        p = s / s.sum()
        assert logged == pytest.approx(-(p * p.log()).sum().item(), rel=1e-3)
        u = x.double() / x.double().norm(dim=-1, keepdim=True)
        pairs = [(u[:, a] * u[:, b]).sum(-1).mean().item() for a in range(5) for b in range(5) if a != b]
        assert cosine == pytest.approx(sum(pairs) / len(pairs), abs=1e-5)


def test_load_model_gives_the_teachers_backbone(finished):
    """And with ema=False the student's: features by the net of the checkpoint itself."""
    saved, x = load(finished), torch.randn(3, 1, 8, 8)
    for ema, part in ((True, "ema"), (False, "model")):
        whole = DINO(saved["args"]["head"], **saved["args"]["model"]).eval()
        whole.load_state_dict(saved[part])
        net, args = probe.load_model(finished, ema)
        assert torch.equal(net(x), whole([x])[1][0]) and not net.training and args["kind"] == "dino" and args["weights"] == dict(ema="ema", model="raw")[part]


def test_first_and_last_lines(tmp_path, capsys):
    train(tmp_path / "run", "--opt", "soap", "--micro-batch", "4", "--epochs", ".023", "--knn-every", "1", "--skipless", "--init", "auto")
    printed = capsys.readouterr().out
    head = printed[:printed.index("step      1")]
    for words in ("opt=soap", torch.__version__, "asked for by --device", "torch.float32", "10 classes", "skipless, init auto: alpha", "ln K = 2.773", "weight decay 0.04",
                  "both sides", "16 = 1 processes x 4 micro-steps x 4; 2 + 2 views; 2 steps"):
        assert words in head, words
    assert re.fullmatch(r"val k-NN \d+\.\d %", printed.splitlines()[-1])


# ---------------------------------------------------------------------------------------------------------------------
# schedules, teacher and centre of a run

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny folder of colour images, 16 to train on, where an epoch of batches of 4 is 4 steps."""
    root, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, n in (("train", 8), ("val", 2)):
        for label in "ab":
            (root / split / label).mkdir(parents=True)
            for i in range(n):
                Image.fromarray(generator.integers(0, 256, (10, 12, 3), dtype=np.uint8)).save(root / split / label / f"{i}.png")
    return root


def half_cosine(start, end, n):
    return end + 0.5 * (start - end) * (1 + np.cos(np.pi * np.arange(n) / n))


def test_a_run_follows_its_schedules_across_a_resume(tmp_path, monkeypatch, folder):
    """Three epochs of 4 steps in two micro-batches, cut off in step 7 and resumed from step 6: what the optimizer is given at each step, and what becomes of last layer,
    teacher and centre, against the published formulas written out."""
    steps, pending, true_probs, true_step = [], [], train_dino.teacher_probs, optim.Optimizers.step

    def probs(logits, center, temperature):
        if torch.is_grad_enabled():                              # not those of an evaluation
            pending.append((logits.double(), center.clone(), temperature))
        return true_probs(logits, center, temperature)

    def step(optimizer):
        before = {name: p.detach().clone() for group in optimizer.param_groups for name, p in zip(group["param_names"], group["params"])}
        last = {name: p.grad is None for group in optimizer.param_groups for name, p in zip(group["param_names"], group["params"]) if "last_layer" in name}
        true_step(optimizer)
        after = {name: p.detach().clone() for group in optimizer.param_groups for name, p in zip(group["param_names"], group["params"])}
        steps.append(dict(teacher=pending[-2:], before=before, after=after, frozen=last,
                          groups=[(g["name"], g["lr"], g["weight_decay"], list(g["param_names"])) for g in optimizer.param_groups]))

    monkeypatch.setattr(train_dino, "teacher_probs", probs)
    monkeypatch.setattr(optim.Optimizers, "step", step)
    flags = ["--data", folder, "--holdout", "0", "--batch-size", "4", "--micro-batch", "2", "--epochs", "3", "--warmup", "1", "--min-lr", "1e-5", "--weight-decay", ".04",
             "--weight-decay-end", ".4", "--momentum", ".5", "--teacher-temp-start", ".1", "--teacher-temp", ".3", "--teacher-temp-warmup", "2", "--freeze-last-layer", "1",
             "--no-norm-last-layer", "--save-every", "3", "--eval-every", "5"]
    stop_at(train_dino.main, 7, command(tmp_path / "run", *flags))
    assert len(steps) == 7 and load(tmp_path / "run")["step"] == 6
    start = {k: v.clone() for k, v in steps[0]["before"].items()}
    del steps[6]
    saved = train(tmp_path / "run", *flags)
    assert len(steps) == 12

    # what the optimizer is told; biases, norms, tokens and positions never decay. Published warm-ups start at 0, ours is one step ahead
    rate = [1e-3 * (s + 1) / 4 for s in range(4)] + half_cosine(1e-3, 1e-5, 8).tolist()
    assert [s["teacher"][0][2] for s in steps] == pytest.approx([0.1] * 4 + [0.3] * 8)
    for s, decay, lr in zip(steps, half_cosine(0.04, 0.4, 12), rate):
        (name, lr_one, wd, decayed), (_, lr_two, none, still) = s["groups"]
        assert name == "decay" and lr_one == lr_two == pytest.approx(lr) and wd == pytest.approx(decay) and none == 0
        assert {"backbone.blocks.0.mlp.fc1.weight", "head.mlp.0.weight", "head.last_layer.parametrizations.weight.original1"} <= set(decayed)
        assert {"backbone.cls_token", "backbone.pos_embed", "backbone.norm.weight", "head.mlp.0.bias"} <= set(still) and not any(n.endswith("bias") for n in decayed)

    # the last layer stands still for an epoch, weight decay included, then both its factors move, and its optimizer state is that much younger
    last = [f"head.last_layer.parametrizations.weight.original{i}" for i in (0, 1)]
    for i, s in enumerate(steps):
        moved = {name for name in s["before"] if not torch.equal(s["before"][name], s["after"][name])}
        assert set(s["frozen"].values()) == {i < 4} and (moved & set(last)) == (set() if i < 4 else set(last)) and "backbone.patch_embed.proj.weight" in moved
    names, state = sum((g["param_names"] for g in saved["optimizer"]["parts"][0]["param_groups"]), []), saved["optimizer"]["parts"][0]["state"]
    ages = {name: int(state[i]["step"]) for i, name in enumerate(names)}
    assert {ages[name] for name in last} == {8} and {age for name, age in ages.items() if name not in last} == {12}

    # teacher <- m teacher + (1 - m) student; the centre, used before it moves, <- .9 centre + .1 mean of the teacher's logits of the whole batch, both views
    teacher, center = {k: v.double() for k, v in start.items()}, torch.zeros(1, 16, dtype=torch.float64)
    for s, m in zip(steps, half_cosine(0.5, 1.0, 12)):
        logits = torch.cat([part[0] for part in s["teacher"]], 1)
        assert logits.shape == (2, 4, 16) and all((part[1] - center).abs().max() < 1e-6 for part in s["teacher"])
        center = 0.9 * center + 0.1 * logits.mean((0, 1))
        teacher = {k: m * t + (1 - m) * s["after"][k].double() for k, t in teacher.items()}
    assert (saved["ema"]["center"] - center).abs().max() < 1e-6 and center.abs().max() > 0.01
    for k, t in teacher.items():
        assert (saved["ema"][k] - t).abs().max() < 1e-6, k
        assert torch.equal(saved["model"][k], steps[-1]["after"][k])


def test_a_normalised_last_layer_keeps_its_norm(tmp_path, folder):
    """Rows of norm 1 in student and teacher, however strong the decay."""
    saved = train(tmp_path / "run", "--data", folder, "--holdout", "0", "--batch-size", "8", "--epochs", "2", "--weight-decay", "1", "--norm-last-layer", "--opt", "soap", "--lr", ".01")
    for part in ("model", "ema"):
        assert (saved[part]["head.last_layer.parametrizations.weight.original0"] == 1).all()


# ---------------------------------------------------------------------------------------------------------------------
# collapse

def test_a_collapsed_run_says_so(tmp_path, capsys, folder):
    """Without centring and with hot teachers everything becomes alike; the log has the figures that tell."""
    train(tmp_path / "run", "--data", folder, "--holdout", "0", "--batch-size", "4", "--epochs", "4", "--lr", ".03", "--warmup", "0", "--center-momentum", "1", "--teacher-temp", "2",
          "--momentum", ".5", "--eval-every", "16", "--clip", "0", "--knn-every", "4")
    last, printed = rows(tmp_path / "run")[-1], capsys.readouterr().out
    assert last["information"] < 0.01 and "\ncollapse: the teacher's output is" in printed and f"{last['information']:.4f} nats" in printed
    assert len(last["val_knn"]) == 3                             # the images of a folder have different sizes, those of k-NN one


# ---------------------------------------------------------------------------------------------------------------------
# flags reach the model

def built(*flags):
    """(arguments, student, line that says which init) of a command."""
    args = train_dino.get_args(command("nowhere", *flags))
    student, teacher, backbone, head, line = train_dino.build_model(args, data.load_images("digits8x8"))
    assert_same(dict(student.state_dict()), dict(DINO(head, **backbone).state_dict() | teacher.state_dict()))
    return args, student, line


@pytest.mark.parametrize("flags", [["--opt", "muon", "--shortcut", "decayed"], ["--opt", "kl-shampoo", "--skipless", "--pool", "mean"], ["--dtype", "bfloat16", "--drop-path", ".2"],
                                   ["--local-crops", "0", "--local-size", "5"], ["--batch-size", "1", "--epochs", ".0015", "--color", "1"]], ids=" ".join)
def test_variants_train(tmp_path, capsys, flags):
    """Other shortcuts and optimizers, half precision, two views alone, one image at a time."""
    saved = train(tmp_path / "run", "--epochs", ".023", "--weight-decay", "0", *flags)
    last = rows(tmp_path / "run")[-1]
    assert saved["step"] == 2 and 0 < last["val_loss"] < 30 and last["teacher_entropy"] > 0
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in [*saved["model"].values(), *saved["ema"].values()])
    assert capsys.readouterr().out.splitlines()[-1] == f"val loss {last['val_loss']:.4f}"


def test_half_precision_is_close(tmp_path):
    """bfloat16 arithmetic, float32 loss: the first step's loss differs by rounding alone."""
    for dtype in ("float32", "bfloat16"):
        train(tmp_path / dtype, "--dtype", dtype, "--epochs", ".012")
    one, half = (rows(tmp_path / dtype)[0]["loss"] for dtype in ("float32", "bfloat16"))
    assert one != half and half == pytest.approx(one, rel=0.05)


@pytest.mark.parametrize("flags, c", [(["--init", "paper"], 3), (["--init", "auto"], 3), (["--init", "skipless", "--alpha", "1.8", "--beta", "1", "--c", "2"], 2), (["--c", "2"], 2)],
                         ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_skipless_initialisations(flags, c):
    """W_V W_O is c^2 times an orthogonal matrix."""
    args, net, line = built("--skipless", *flags)
    w_v = net.backbone.blocks[1].attn.qkv.weight.detach().chunk(3)[2]
    assert singular_values(w_v.T @ net.backbone.blocks[1].attn.proj.weight.detach().T).sub(c ** 2).abs().max() < 1e-3
    assert f"c {c}" in line and net.backbone.blocks[0].alphas == (0, 0)


def test_presets():
    """The paper's recipe as published; --skipless takes the paper's constants for DINO."""
    args = train_dino.get_args(["--preset", "paper", "--data", "x", "--skipless", "--opt", "soap"])
    assert (args.size, args.depth, args.img_size, args.patch_size, args.local_size, args.local_crops) == ("small", 12, 224, 16, 96, 8)
    assert (args.global_scale, args.local_scale, args.color) == ([0.4, 1.0], [0.05, 0.4], 0.8)
    assert (args.out_dim, args.hidden_dim, args.bottleneck_dim, args.norm_last_layer, args.freeze_last_layer) == (65536, 2048, 256, False, 1)
    assert (args.student_temp, args.center_momentum, args.clip, args.drop_path, args.init) == (0.1, 0.9, 3, 0, "paper")
    assert init.PAPER_CONSTANTS["small"] == dict(alpha=1.8, beta=1.0, c=3.0)


def test_folders_tell_runs_apart():
    names = [train_dino.get_args(flags).out for flags in ([], ["--skipless"], ["--shortcut", "decayed"], ["--shortcut", "decayed", "--alpha-min", ".5"], ["--depth", "9"], ["--size", "tiny"],
             ["--skipless", "--init", "default"], ["--skipless", "--init", "auto"], ["--skipless", "--beta", "3"], ["--skipless", "--init", "skipless", "--c", "2"], ["--pool", "token"], ["--opt", "soap"], ["--seed", "1"])]
    assert len(set(names)) == len(names)


# ---------------------------------------------------------------------------------------------------------------------
# interrupted and resumed

@pytest.mark.parametrize("flags", [["--opt", "adamw", "--drop-path", ".3"], ["--opt", "soap", "--skipless", "--micro-batch", "8"]], ids=lambda flags: flags[1])
def test_stopped_again_and_again_equals_never_stopped(tmp_path, flags):
    """Cut off in steps 1, 3, 4 and 6 of 8, before and right after saves, the last layer frozen until step 4: student, teacher, centre, optimizer and log of the run in one piece."""
    flags = [*flags, "--freeze-last-layer", ".04", "--save-every", "2", "--eval-every", "3", "--knn-every", ".092"]
    train(tmp_path / "whole", *flags)
    for step, saved in ((1, None), (3, 2), (4, 4), (6, 6)):
        stop_at(train_dino.main, step, command(tmp_path / "cut", *flags))
        assert (load(tmp_path / "cut")["step"] if (tmp_path / "cut" / "ckpt.pt").exists() else None) == saved
    train(tmp_path / "cut", *flags)
    assert load(tmp_path / "cut")["step"] == 8 and load(tmp_path / "cut")["ema"]["center"].all()
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_resume_says_where_it_goes_on(copied, capsys):
    train(copied, *SAME, "--epochs", ".138", "--momentum", ".9")
    printed = capsys.readouterr().out
    assert re.search(rf"^resume .*step 8, lr {runtime.lr_at(8, 12, 2, 1e-3):.3g}$", printed, re.MULTILINE)
    assert "--epochs was 0.092 and is 0.138 from here on" in printed and re.search(r"--momentum was \S+ and is 0.9 from", printed)
    assert load(copied)["step"] == 12 and [r["step"] for r in rows(copied)] == sorted(r["step"] for r in rows(copied))


def test_finished_run_says_its_figure_again(copied, capsys):
    """Started once more, with defaults spelt out: nothing is trained and nothing changes."""
    before = contents(copied)
    train(copied, *SAME, "--size", "nano", "--student-temp", ".1", "--opt", "adamw", "--shortcut", "residual", "--center-momentum", ".9")
    assert capsys.readouterr().out.splitlines()[-1] == f"val k-NN {rows(copied)[-1]['val_knn_best']:.1f} %"
    assert all(contents(copied)[name] == before[name] for name in ("ckpt.pt", "log.jsonl"))


def test_fresh_starts_over_at_once(copied):
    stop_at(train_dino.main, 3, command(copied, *SAME, "--seed", "1", "--fresh"))
    assert [r["step"] for r in rows(copied)] == [1, 2, 3] and not (copied / "ckpt.pt").exists()


# ---------------------------------------------------------------------------------------------------------------------
# several processes, accumulation, compile

def wide(argv):
    """The run of argv with both nets in float64, where two orders of summation can be compared after an optimizer that normalises."""
    quick()
    build, knn, single = train_dino.build_model, probe.knn, torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double                     # on the way to head and loss

    def single_knn(*arguments):
        torch.Tensor.float = single
        accuracy = knn(*arguments)
        torch.Tensor.float = torch.Tensor.double
        return accuracy

    def build_wide(args, images):
        student, teacher, *rest = build(args, images)
        for net in (student.double(), teacher.double()):
            net.backbone.patch_embed.register_forward_pre_hook(lambda module, x: (x[0].double(),))
        return student, teacher, *rest

    train_dino.build_model, probe.knn = build_wide, single_knn
    script(argv)


WIDE = ["--knn-every", ".092", "--warmup", "0", "--epochs", ".046", "--freeze-last-layer", ".02", "--no-norm-last-layer", "--momentum", ".5"]       # 4 steps


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run in float64 by one process with the whole batch."""
    folder = tmp_path_factory.mktemp("alone")
    codes, outputs = launch_ranks(1, wide, command(folder / "run", *WIDE), folder=folder, timeout=200)
    assert codes == [0], outputs
    return folder / "run"


@pytest.mark.parametrize("n, micro", [(1, 4), (2, 4)])
def test_processes_and_micro_batches_do_not_matter(tmp_path, alone, n, micro):
    """Four micro-batches, and two processes with two each: student, teacher, centre, losses, gradient norms, collapse figures, k-NN and effective ranks of one process with
    the whole batch. 37 validation images are not shared evenly by two."""
    codes, outputs = launch_ranks(n, wide, command(tmp_path / "run", *WIDE, "--micro-batch", micro), folder=tmp_path, timeout=200)
    assert codes == [0] * n, outputs
    for a, b in zip(rows(tmp_path / "run"), rows(alone), strict=True):
        assert a.keys() == b.keys()
        for key in b:
            assert a[key] == pytest.approx(b[key], rel=1e-6, abs=1e-9), key
    one, many = load(alone), load(tmp_path / "run")
    assert many["ema"]["center"].dtype == torch.float64 and many["ema"]["center"].all()
    assert keys(many) == keys(one)                               # no wrapper's prefix
    assert_close(many, one, tolerance=1e-8)
    assert_close(dict(model=many["ema"]), dict(model=one["ema"]), tolerance=1e-8)
    assert outputs[1:] in ([], [""])                             # rank 0 alone speaks


def test_compile_changes_no_key(tmp_path, monkeypatch):
    """torch.compile with all its tracing, and without C++, which takes a minute and a compiler: the keys of a plain run, close weights, and a teacher that has moved."""
    flags = ["--epochs", ".023", "--warmup", "0"]
    plain = train(tmp_path / "plain", *flags)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    both = train(tmp_path / "compiled", *flags, "--compile")
    assert keys(both) == keys(plain) and not any(k.startswith("_orig_mod.") for k in [*both["model"], *both["ema"]])
    assert_close(both, plain, tolerance=5e-3, but_key_bias=True)
    name = "backbone.blocks.0.mlp.fc1.weight"
    assert not torch.equal(built(*flags)[1].state_dict()[name], both["ema"][name]) and not torch.equal(both["model"][name], both["ema"][name])


# ---------------------------------------------------------------------------------------------------------------------
# bad input

sentence = functools.partial(one_sentence, script)


@pytest.mark.parametrize("flags, words", [
    (["--local-size", "6"], ["--local-size 6", "--patch-size 4"]), (["--patch-size", "3", "--local-size", "3"], ["8 x 8", "patch size 3"]), (["--img-size", "10"], ["10 x 10", "patch size 4"]),
    (["--global-scale", ".9", ".4"], ["--global-scale 0.9 0.4"]), (["--local-scale", ".4", ".1"], ["--local-scale 0.4 0.1"]), (["--local-scale", "0", ".1"], ["--local-scale"]),
    (["--global-scale", ".4"], ["--global-scale"]), (["--global-scale", ".4", "1.5"], ["--global-scale"]), (["--local-crops", "-1"], ["--local-crops"]), (["--out-dim", "1"], ["--out-dim"]),
    (["--student-temp", "0"], ["--student-temp"]), (["--teacher-temp", "nan"], ["--teacher-temp"]), (["--momentum", "1.1"], ["--momentum"]), (["--center-momentum", "-1"], ["--center-momentum"]),
    (["--skipless", "--drop-path", ".1"], ["drop path", "shortcut"]), (["--drop-path", "1"], ["--drop-path"]), (["--shortcut", "residual", "--alpha-min", ".5"], ["--alpha-min", "--shortcut residual"]),
    (["--init", "paper"], ["--init paper", "--skipless"]), (["--alpha", "2"], ["--init skipless", "--skipless"]), (["--skipless", "--init", "paper", "--beta", "2"], ["--beta", "--init paper"]),
    (["--opt", "muon", "--betas", ".9", ".9"], ["--betas", "muon"]), (["--micro-batch", "12"], ["--batch-size 16", "--micro-batch 12"]), (["--batch-size", "2000"], ["--batch-size 2000"]),
    (["--preset", "huge"], ["--preset", "huge"]), (["--learning-rate", "1"], ["--learning-rate"]), (["--lr", "0"], ["--lr"]), (["--epochs", "0"], ["--epochs"]), (["--device", "tpu"], ["--device tpu"]),
    (["--data", "nowhere/at/all"], ["--data", "nowhere/at/all"]), (["--knn-images", "0"], ["--knn-images"]), (["--size", "huge"], ["--size", "huge"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "")
def test_bad_flag(tmp_path, capsys, flags, words):
    """Exit code 2, one sentence that names the flag and its value, and no folder left behind."""
    said = sentence(capsys, command(tmp_path / "out", *flags))
    assert all(w in said for w in words), said
    assert not (tmp_path / "out").exists()


def test_paper_preset_asks_for_data(tmp_path, capsys):
    said = sentence(capsys, ["--preset", "paper", "--out", tmp_path / "out"])
    assert "--preset paper" in said and "--data" in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags, words", [
    (["--depth", "4"], ["--depth 2", "--depth 4"]), (["--patch-size", "2"], ["--patch-size 4", "--patch-size 2"]), (["--shortcut", "decayed"], ["--shortcut residual", "--shortcut decayed"]),
    (["--pool", "token"], ["--pool mean", "--pool token"]), (["--out-dim", "32"], ["--out-dim 16", "--out-dim 32"]), (["--hidden-dim", "8"], ["--hidden-dim 12", "--hidden-dim 8"]),
    (["--bottleneck-dim", "8"], ["--bottleneck-dim 6", "--bottleneck-dim 8"]), (["--no-norm-last-layer"], ["trained with --norm-last-layer and", "ask for --no-norm-last-layer:"]),
    (["--local-size", "8"], ["--local-size 4", "--local-size 8"]), (["--local-crops", "3"], ["--local-crops 2", "--local-crops 3"]), (["--drop-path", ".1"], ["--drop-path 0.3", "--drop-path 0.1"]),
    (["--global-scale", ".5", "1"], ["--global-scale 0.4 1.0", "--global-scale 0.5 1.0"]), (["--center-momentum", ".8"], ["--center-momentum 0.9", "--center-momentum 0.8"]),
    (["--opt", "soap"], ["--opt adamw", "--opt soap"]), (["--batch-size", "32"], ["--batch-size 16", "--batch-size 32"]), (["--seed", "1"], ["--seed 0", "--seed 1"]),
    (["--data", "mnist5k"], ["--data mnist5k", "digits8x8"]), (["--lr", ".5"], ["finished", "--lr was 0.001 and is 0.5"]),
], ids=lambda value: value[0])
def test_checkpoint_of_another_run(copied, capsys, flags, words):
    """Another architecture, head, view, optimizer, seed or data is refused with both values, and so is a change to a run that is over; the run's files stay as they are."""
    before = contents(copied)
    said = sentence(capsys, command(copied, *SAME, *flags))
    assert all(w in said for w in words) and "ckpt.pt" in said and "--fresh" in said, said
    assert contents(copied) == before


@pytest.mark.parametrize("foreign", [dict(train_images=5, classes=10), dict(lm={}), dict(kind="mae", decoder_dim=16)], ids=str)
def test_another_scripts_checkpoint_is_refused_by_name(tmp_path, capsys, foreign):
    runtime.save_checkpoint(tmp_path / "ckpt.pt", dict(model={}, ema=None, optimizer={}, step=1, best=0.0, rng=torch.get_rng_state(), args=foreign))
    said = sentence(capsys, command(tmp_path))
    assert "ckpt.pt was written by another train script" in said and contents(tmp_path).keys() == {"ckpt.pt"}


def test_weights_that_blow_up_in_the_last_update_are_met_before_the_layers_are_looked_at(tmp_path, capsys):
    said = sentence(capsys, command(tmp_path / "run", "--lr", "1e25", "--warmup", "0", "--clip", "0", "--epochs", ".012", "--eval-every", "1", "--knn-every", ".0115"))
    assert re.search(r"validation loss is not finite after step 1 ", said), said


def test_a_diverging_run_stops_with_a_sentence(tmp_path, capsys):
    said = sentence(capsys, command(tmp_path / "run", "--lr", "1e30", "--warmup", "0", "--save-every", "1", "--skipless"))
    assert re.search(r"not finite (at|after) step (\d+)", said)
    assert all(math.isfinite(r["loss"]) for r in rows(tmp_path / "run") if "loss" in r)


def test_knn_is_looked_at_however_short_the_interval(tmp_path):
    """--knn-every of less than a step is every step, not never."""
    train(tmp_path / "run", "--epochs", ".023", "--knn-every", ".001")
    assert [r["step"] for r in rows(tmp_path / "run") if "val_knn" in r] == [1, 2]
