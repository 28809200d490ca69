"""train_dino.py as people use it: resumed, on one process and on two, compiled, with wrong input.

Its schedules, averages, centre and log are compared with computations by hand."""
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
from test_train_vit import (assert_close, assert_same, assert_same_run, contents, keys, load,
                            one_sentence, rows, stop_at)

pytestmark = pytest.mark.usefixtures("no_curve")
TINY = ["--threads", "1", "--device", "cpu", "--data", "digits8x8", "--depth", "2", "--out-dim", "16",
        "--batch-size", "16", "--epochs", ".092", "--warmup", ".023", "--lr", "1e-3",
        "--eval-every", "4", "--save-every", "4",
        "--set", "holdout=.0278", "img_size=8", "patch_size=4", "local_size=4", "pool=token",
        "hidden_dim=12", "bottleneck_dim=6", "log_every=1", "knn_every=0", "knn_images=100"]
SAME = ["--set", "knn_every=.092", "pool=mean", "drop_path=.3"]  # 8 steps, 2 of warm-up; 37 images


def command(out, *flags):
    return [*TINY, "--out", str(out), *map(str, flags)]


def train(out, *flags):
    """A run within this process. Returns its checkpoint."""
    train_dino.main(command(out, *flags))
    return load(out)


def quick():
    runtime.plot_curve = lambda *arguments, **more: None


def script(argv):
    runtime.run_script(lambda: train_dino.main(argv))


sentence = functools.partial(one_sentence, script)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, to be copied and not changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(out, *SAME)
    return out


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


# ----------------------------------------------------------------------------------------------------
# what a run leaves

def test_what_a_run_leaves(finished):
    """Five files; lines of the log with the agreed keys; args that rebuild student and teacher."""
    files = ["args.json", "ckpt.pt", "curve.png", "log.jsonl", "pca.png"]
    assert sorted(contents(finished)) == files
    log = (finished / "log.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in log.splitlines()]
    train_lines, eval_lines = ([r for r in lines if key in r] for key in ("loss", "val_loss"))
    assert len(train_lines) + len(eval_lines) == len(lines)
    for row in train_lines:
        assert row.keys() == {"step", "epoch", "loss", "lr", "grad_norm", "images_per_s"}
    assert [r["lr"] for r in train_lines] == [runtime.lr_at(s, 8, 2, 1e-3) for s in range(8)]
    assert [r["step"] for r in eval_lines] == [4, 8]
    monitors = {"teacher_entropy", "information", "feature_std", "shared_information"}
    more = {"val_knn", "val_knn_best", "effective_rank", "token_cosine"}
    assert eval_lines[0].keys() == {"step", "val_loss"} | monitors
    assert eval_lines[1].keys() == eval_lines[0].keys() | more
    for row in eval_lines:
        shared = row["information"] + row["teacher_entropy"] - row["val_loss"]
        assert row["shared_information"] == pytest.approx(shared)
    saved = load(finished)
    args = saved["args"]
    assert saved["step"] == 8 and args["kind"] == "dino"
    assert args == json.loads((finished / "args.json").read_text(encoding="utf-8"))
    assert not {"alpha", "beta", "c", "skipless_init"} & args.keys()
    for part in ("model", "ema"):
        DINO(args["head"], **args["model"]).load_state_dict(saved[part])
    assert not saved["model"]["center"].any() and saved["ema"]["center"].all()
    for name in ("curve.png", "pca.png"):
        with Image.open(finished / name) as picture:
            assert picture.width > 300 and len(picture.convert("L").getcolors()) > 10


@torch.no_grad()
def test_the_logged_figures_are_those_of_student_and_teacher(finished):
    """Loss and monitors image by image, with views drawn from the image's own seed; k-NN, effective rank
    and token cosine of the teacher from a plain loop. The head reads the mean of the patches here."""
    saved, last = load(finished), rows(finished)[-1]
    args = saved["args"]
    student, teacher = (DINO(args["head"], **args["model"]).eval() for _ in range(2))
    student.load_state_dict(saved["model"])
    teacher.load_state_dict(saved["ema"])
    images = data.load_images("digits8x8", 0.0278, 0)
    views = data.MultiCrop(images, 8, 4, 2, args["global_scale"], args["local_scale"], 0)
    losses, entropies, mean, unit = [], [], 0.0, []
    for i in range(len(images.val)):
        torch.manual_seed(runtime.mix_seed("augment", 0, 0, i))
        crops = [crop[None] for crop in views(images.val[i][0])]
        target, features = teacher(crops[:2])
        p = ((target - teacher.center).double() / args["teacher_temp"]).softmax(-1)
        losses.append(loss_by_hand(student(crops)[0], p, 0.1))
        entropies += [-sum(x * math.log(x) for x in row.tolist() if x > 0) for row in p[:, 0]]
        mean = mean + p.sum((0, 1)) / (2 * len(images.val))
        unit += [f / f.norm() for f in features[:, 0].double()]
    entropy = sum(entropies) / len(entropies)
    information = -sum(x * math.log(x) for x in mean.tolist()) - entropy
    spread = (torch.stack(unit).var(0, correction=0).mean() * 96).sqrt().item()
    assert last["val_loss"] == pytest.approx(float(sum(losses)) / len(losses), rel=1e-5)
    assert last["teacher_entropy"] == pytest.approx(entropy, rel=1e-4)
    assert last["information"] == pytest.approx(information, abs=1e-5)
    assert last["feature_std"] == pytest.approx(spread, rel=1e-4)

    bank = torch.linspace(0, len(images.train) - 1, 100).long()
    tf, labels = data.eval_transform(images, 8), images.train.labels[bank]
    train_x, val_x = (list(teacher.backbone.layers(tf(x)))
                      for x in (images.train.images[bank], images.val.images))
    knn = [100 * probe.knn(a[:, 1:].mean(1), labels, b[:, 1:].mean(1), images.val.labels)
           for a, b in zip(train_x, val_x)]
    assert last["val_knn"] == pytest.approx(knn, abs=2.8)        # neighbours may swap: one image of 37
    assert len(knn) == 3 and last["val_knn_best"] == max(last["val_knn"])
    for logged, cosine, x in zip(last["effective_rank"], last["token_cosine"], val_x, strict=True):
        p = singular_values(x[:, 1:].mean(1)) / singular_values(x[:, 1:].mean(1)).sum()
        assert logged == pytest.approx(-(p * p.log()).sum().item(), rel=1e-3)
        u = x.double() / x.double().norm(dim=-1, keepdim=True)
        pairs = [(a, b) for a in range(5) for b in range(5) if a != b]
        cosines = [(u[:, a] * u[:, b]).sum(-1).mean().item() for a, b in pairs]
        assert cosine == pytest.approx(sum(cosines) / len(cosines), abs=1e-5)


def test_load_net_gives_the_teachers_backbone(finished):
    saved, x = load(finished), torch.randn(3, 1, 8, 8)
    whole = DINO(saved["args"]["head"], **saved["args"]["model"]).eval()
    whole.load_state_dict(saved["ema"])
    net, args = probe.load_net(finished)
    assert torch.equal(net(x), whole([x])[1][0]) and not net.training and args["kind"] == "dino"


def test_first_and_last_lines(tmp_path, capsys):
    flags = "--opt soap --micro-batch 4 --epochs .023 --skipless --init auto --set knn_every=1"
    train(tmp_path / "run", *flags.split())
    printed = capsys.readouterr().out
    for words in ("10 classes", "skipless, init auto alpha", "weight decay 0.04", "both sides",
                  "x 4 micro-step(s); 2 + 2 views; 2 steps"):
        assert words in printed[:printed.index("step      1")], words
    assert re.fullmatch(r"val k-NN \d+\.\d %", printed.splitlines()[-1])


# ----------------------------------------------------------------------------------------------------
# schedules, teacher and centre of a run

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of colour images, 16 to train on: with batches of 4 an epoch is 4 steps."""
    root, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, n in (("train", 8), ("val", 2)):
        for label in "ab":
            (root / split / label).mkdir(parents=True)
            for i in range(n):
                pixels = generator.integers(0, 256, (10, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{i}.png")
    return root


def published(start, end, n):
    """Half a cosine over n steps."""
    return end + 0.5 * (start - end) * (1 + np.cos(np.pi * np.arange(n) / n))


def named(optimizer):
    """Every parameter that the optimizer has, by name."""
    return {name: p for group in optimizer.param_groups
            for name, p in zip(group["param_names"], group["params"])}


def test_a_run_follows_its_schedules_across_a_resume(tmp_path, monkeypatch, folder):
    """Three epochs of 4 steps in two micro-batches, cut off in step 7, resumed from step 6: what the
    optimizer is given, and what becomes of last layer, teacher and centre, by the published formulas."""
    steps, pending = [], []
    true_probs, true_step = train_dino.teacher_probs, optim.Optimizers.step

    def probs(logits, center, temperature):
        if torch.is_grad_enabled():                              # not those of an evaluation
            pending.append((logits.double(), center.clone(), temperature))
        return true_probs(logits, center, temperature)

    def step(optimizer):
        groups = [(g["name"], g["lr"], g["weight_decay"], list(g["param_names"]))
                  for g in optimizer.param_groups]
        before = {name: p.detach().clone() for name, p in named(optimizer).items()}
        frozen = {p.grad is None for name, p in named(optimizer).items() if "last_layer" in name}
        true_step(optimizer)
        after = {name: p.detach().clone() for name, p in named(optimizer).items()}
        steps.append(dict(teacher=pending[-2:], before=before, after=after, frozen=frozen,
                          groups=groups))

    monkeypatch.setattr(train_dino, "teacher_probs", probs)
    monkeypatch.setattr(optim.Optimizers, "step", step)
    flags = ["--data", folder, "--batch-size", "4", "--micro-batch", "2", "--epochs", "3",
             "--warmup", "1", "--weight-decay", ".04", "--ema", ".5", "--save-every", "3",
             "--eval-every", "5",
             "--set", "holdout=0", "min_lr=1e-5", "weight_decay_end=.4", "teacher_temp_start=.1",
             "teacher_temp=.3", "teacher_temp_warmup=2", "freeze_last_layer=1", "norm_last_layer=false"]
    stop_at(train_dino.main, 7, command(tmp_path / "run", *flags))
    assert len(steps) == 7 and load(tmp_path / "run")["step"] == 6
    start = {k: v.clone() for k, v in steps[0]["before"].items()}
    del steps[6]
    saved = train(tmp_path / "run", *flags)
    assert len(steps) == 12

    # what the optimizer is told; biases, norms, tokens and positions never decay
    rate = [1e-3 * (s + 1) / 4 for s in range(4)] + published(1e-3, 1e-5, 8).tolist()
    assert [s["teacher"][0][2] for s in steps] == pytest.approx([0.1] * 4 + [0.3] * 8)
    for s, decay, lr in zip(steps, published(0.04, 0.4, 12), rate):
        (name, lr_one, wd, decayed), (_, lr_two, none, still) = s["groups"]
        assert name == "decay" and lr_one == lr_two == pytest.approx(lr)
        assert wd == pytest.approx(decay) and none == 0
        assert {"backbone.blocks.0.mlp.fc1.weight", "head.mlp.0.weight"} <= set(decayed)
        assert "head.last_layer.parametrizations.weight.original1" in decayed
        assert {"backbone.cls_token", "backbone.pos_embed", "backbone.norm.weight"} <= set(still)
        assert not any(n.endswith("bias") for n in decayed)

    # the last layer stands still for an epoch, weight decay included; then both its factors move
    last = {f"head.last_layer.parametrizations.weight.original{i}" for i in (0, 1)}
    for i, s in enumerate(steps):
        moved = {name for name in s["before"] if not torch.equal(s["before"][name], s["after"][name])}
        assert s["frozen"] == {i < 4} and moved & last == (set() if i < 4 else last)
        assert "backbone.patch_embed.proj.weight" in moved

    # teacher <- m teacher + (1 - m) student; the centre, used before it moves, <- .9 centre + .1 mean of
    # the teacher's logits of the whole batch, both views
    teacher, center = {k: v.double() for k, v in start.items()}, torch.zeros(1, 16, dtype=torch.float64)
    for s, m in zip(steps, published(0.5, 1.0, 12)):
        logits = torch.cat([part[0] for part in s["teacher"]], 1)
        assert logits.shape == (2, 4, 16)
        assert all((part[1] - center).abs().max() < 1e-6 for part in s["teacher"])
        center = 0.9 * center + 0.1 * logits.mean((0, 1))
        teacher = {k: m * t + (1 - m) * s["after"][k].double() for k, t in teacher.items()}
    assert (saved["ema"]["center"] - center).abs().max() < 1e-6 and center.abs().max() > 0.01
    for k, t in teacher.items():
        assert (saved["ema"][k] - t).abs().max() < 1e-6, k
        assert torch.equal(saved["model"][k], steps[-1]["after"][k])


def test_a_normalised_last_layer_keeps_its_norm(tmp_path, folder):
    """Rows of norm 1 in student and teacher, however strong the decay."""
    flags = "--batch-size 8 --epochs 2 --weight-decay 1 --opt soap --lr .01 --set holdout=0"
    saved = train(tmp_path / "run", "--data", folder, *flags.split())
    for part in ("model", "ema"):
        assert (saved[part]["head.last_layer.parametrizations.weight.original0"] == 1).all()


def test_a_collapsed_run_says_so(tmp_path, capsys, folder):
    """Without centring and with hot teachers everything becomes alike; the log has what tells."""
    flags = "--batch-size 4 --epochs 4 --lr .03 --warmup 0 --ema .5 --eval-every 16 --clip 0 --set " \
            "holdout=0 center_momentum=1 teacher_temp=2 knn_every=4"
    train(tmp_path / "run", "--data", folder, *flags.split())
    last = rows(tmp_path / "run")[-1]
    assert last["information"] < 0.01 and "\ncollapse: the teacher" in capsys.readouterr().out
    assert len(last["val_knn"]) == 3                             # of images of one size after all


# ----------------------------------------------------------------------------------------------------
# flags reach the model

def built(*flags):
    """(arguments, student, constants) of a command. The teacher is a copy, apart from drop path."""
    args = train_dino.get_args(command("nowhere", *flags))
    images = data.load_images("digits8x8")
    student, teacher, backbone, head, constants = train_dino.build_model(args, images)
    assert_same(dict(student.state_dict()), dict(teacher.state_dict()))
    assert DINO(head, **backbone).state_dict().keys() == student.state_dict().keys()
    return args, student, constants


@pytest.mark.parametrize("flags", [
    "--opt muon --shortcut decayed", "--opt kl-shampoo --skipless --set pool=mean",
    "--dtype bfloat16 --set drop_path=.2", "--local-crops 0 --set local_size=5",
    "--batch-size 1 --epochs .0015 --set color=1"])
def test_variants_train(tmp_path, capsys, flags):
    """Other shortcuts and optimizers, half precision, two views alone, one image at a time."""
    saved = train(tmp_path / "run", "--epochs", ".023", *flags.split())
    last = rows(tmp_path / "run")[-1]
    assert saved["step"] == 2 and 0 < last["val_loss"] < 30 and last["teacher_entropy"] > 0
    for p in [*saved["model"].values(), *saved["ema"].values()]:
        assert p.dtype == torch.float32 and p.isfinite().all()
    assert capsys.readouterr().out.splitlines()[-1] == f"val loss {last['val_loss']:.4f}"


def test_half_precision_is_close(tmp_path):
    """bfloat16 arithmetic, float32 loss: the first step's loss differs by rounding alone."""
    for dtype in ("float32", "bfloat16"):
        train(tmp_path / dtype, "--dtype", dtype, "--epochs", ".012")
    one, half = (rows(tmp_path / dtype)[0]["loss"] for dtype in ("float32", "bfloat16"))
    assert one != half and half == pytest.approx(one, rel=0.05)


@pytest.mark.parametrize("flags, how, expected", [
    ("", "skipless", dict(alpha=1.0, beta=4.0, c=3.0)),
    ("--set alpha=1.8 beta=1 c=2", "skipless", dict(alpha=1.8, beta=1.0, c=2.0)),
    ("--init paper", "paper", init.PAPER_CONSTANTS["nano"]),
    ("--init auto --temperature-beta 1.1", "auto",
     init.choose_constants(96, 3, 5, 2, temperature_beta=1.1))])
def test_skipless_initialisations(flags, how, expected):
    """W_V W_O is c^2 times an orthogonal matrix."""
    args, net, constants = built("--skipless", *flags.split())
    attn = net.backbone.blocks[1].attn
    values = singular_values(attn.qkv.weight.detach().chunk(3)[2].T @ attn.proj.weight.detach().T)
    assert values.sub(expected["c"] ** 2).abs().max() < 1e-3
    assert args.init == how and constants == pytest.approx(expected)
    assert net.backbone.blocks[0].alphas == (0, 0)


def test_presets():
    """The paper's recipe as published; --skipless takes the paper's constants for DINO."""
    args = train_dino.get_args("--preset paper --data x --skipless --opt soap".split())
    expected = dict(
        size="small", depth=12, img_size=224, patch_size=16, local_size=96, local_crops=8, color=0.8,
        global_scale=[0.4, 1.0], local_scale=[0.05, 0.4], out_dim=65536, hidden_dim=2048,
        bottleneck_dim=256, norm_last_layer=False, freeze_last_layer=1, student_temp=0.1,
        center_momentum=0.9, clip=3, drop_path=0, init="paper")
    assert {key: getattr(args, key) for key in expected} == expected
    assert init.PAPER_CONSTANTS["small"] == dict(alpha=1.8, beta=1.0, c=3.0)


def test_folders_tell_runs_apart():
    choices = ["", "--skipless", "--shortcut decayed", "--shortcut decayed --alpha-min .5", "--depth 9",
               "--size tiny", "--skipless --init default", "--skipless --init auto", "--opt soap",
               "--skipless --set beta=3", "--set pool=token", "--seed 1"]
    names = [train_dino.get_args(flags.split()).out for flags in choices]
    assert len(set(names)) == len(names)


# ----------------------------------------------------------------------------------------------------
# interrupted and resumed

@pytest.mark.parametrize("flags", ["--opt adamw --set drop_path=.3",
                                   "--opt soap --skipless --micro-batch 8"])
def test_stopped_again_and_again_equals_never_stopped(tmp_path, flags):
    """Cut off in steps 1, 3 and 6 of 8, before and right after saves, the last layer frozen until step
    4: student, teacher, centre, optimizer and log of the run in one piece."""
    flags = [*flags.split(), "--save-every", "2", "--eval-every", "3",
             "--set", "knn_every=.092", "freeze_last_layer=.04"]
    train(tmp_path / "whole", *flags)
    for step in (1, 3, 6):
        stop_at(train_dino.main, step, command(tmp_path / "cut", *flags))
    assert load(tmp_path / "cut")["step"] == 6
    train(tmp_path / "cut", *flags)
    assert load(tmp_path / "cut")["ema"]["center"].all()
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_look_that_a_kill_prevented_is_made_up_for(copied):
    """The checkpoint is written before the evaluation, so a kill may leave the one without the other."""
    whole = rows(copied)
    log = copied / "log.jsonl"
    text = log.read_text(encoding="utf-8").splitlines(keepends=True)
    log.write_text("".join(text[:-1]), encoding="utf-8")
    train(copied, *SAME)
    assert rows(copied) == whole


def test_a_longer_run_says_what_changed(copied, capsys):
    more = ["--epochs", ".138", "--ema", ".9"]
    assert "--allow-change" in sentence(capsys, command(copied, *SAME, *more))
    train(copied, *SAME, *more, "--allow-change")
    printed = capsys.readouterr().out
    assert "epochs was 0.092 and is 0.138" in printed and "ema was 0.98 and is 0.9" in printed
    assert load(copied)["step"] == 12


def test_finished_run_says_its_figure_again(copied, capsys):
    """Started once more, with defaults spelt out: nothing is trained and nothing changes."""
    before = contents(copied)
    spelt_out = "--size nano --shortcut residual --set student_temp=.1 global_scale=.4,1"
    train(copied, *SAME, *spelt_out.split())
    figure = rows(copied)[-1]["val_knn_best"]
    assert capsys.readouterr().out.splitlines()[-1] == f"val k-NN {figure:.1f} %"
    assert all(contents(copied)[name] == before[name] for name in ("ckpt.pt", "log.jsonl"))


def test_fresh_starts_over_at_once(copied):
    stop_at(train_dino.main, 3, command(copied, *SAME, "--seed", "1", "--fresh"))
    assert [r["step"] for r in rows(copied)] == [1, 2, 3] and not (copied / "ckpt.pt").exists()


# ----------------------------------------------------------------------------------------------------
# several processes, accumulation, compile

def wide(argv):
    """The run in float64, where orders of summation compare even after an optimizer that normalises."""
    quick()
    build = train_dino.build_model
    torch.Tensor.float = torch.Tensor.double                     # on the way to head and loss

    def build_wide(args, images):
        student, teacher, *rest = build(args, images)
        for net in (student.double(), teacher.double()):
            patches = net.backbone.patch_embed
            patches.register_forward_pre_hook(lambda module, x: (x[0].double(),))
        return student, teacher, *rest

    train_dino.build_model = build_wide
    script(argv)


WIDE = ["--batch-size", "15", "--warmup", "0", "--epochs", ".046", "--ema", ".5",         # 4 steps
        "--set", "knn_every=.046", "freeze_last_layer=.02", "norm_last_layer=false"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run in float64 by one process with the whole batch."""
    folder = tmp_path_factory.mktemp("alone")
    codes, outputs = launch_ranks(1, wide, command(folder / "run", *WIDE), folder=folder, timeout=200)
    assert codes == [0], outputs
    return folder / "run"


@pytest.mark.parametrize("n, micro", [(1, 4), (2, 4)])
def test_processes_and_micro_batches_do_not_matter(tmp_path, alone, n, micro):
    """A batch of 15, which nothing divides: student, teacher, centre, losses, gradient norms, collapse
    figures, k-NN and effective ranks as of one process with the whole batch; 37 images to validate."""
    argv = command(tmp_path / "run", *WIDE, "--micro-batch", micro)
    codes, outputs = launch_ranks(n, wide, argv, folder=tmp_path, timeout=200)
    assert codes == [0] * n, outputs
    for a, b in zip(rows(tmp_path / "run"), rows(alone), strict=True):
        assert a.keys() == b.keys()
        for key in b:
            assert a[key] == pytest.approx(b[key], rel=1e-6, abs=1e-7), key
    one, many = load(alone), load(tmp_path / "run")
    assert many["ema"]["center"].dtype == torch.float64 and many["ema"]["center"].all()
    assert keys(many) == keys(one)                               # no wrapper's prefix
    assert_close(many, one, tolerance=1e-8)
    assert_close(dict(model=many["ema"]), dict(model=one["ema"]), tolerance=1e-8)
    assert outputs[1:] in ([], [""])                             # rank 0 alone speaks


def test_compile_changes_no_key(tmp_path, monkeypatch):
    """torch.compile with all its tracing, but no C++, which takes a minute and a compiler."""
    flags = ["--epochs", ".023", "--warmup", "0"]
    plain = train(tmp_path / "plain", *flags)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    both = train(tmp_path / "compiled", *flags, "--compile")
    assert keys(both) == keys(plain)
    assert_close(both, plain, tolerance=5e-3, but_key_bias=True)
    name = "backbone.blocks.0.mlp.fc1.weight"
    assert not torch.equal(built(*flags)[1].state_dict()[name], both["ema"][name])
    assert not torch.equal(both["model"][name], both["ema"][name])


# ----------------------------------------------------------------------------------------------------
# bad input

@pytest.mark.parametrize("flags, words", [
    ("--set local_size=6", ["6 x 6", "patch size 4"]),
    ("--set img_size=10", ["10 x 10", "patch size 4"]),
    ("--set global_scale=.4,x", ["global_scale=.4,x", "numbers"]),
    ("--skipless --set drop_path=.1", ["drop path", "shortcut"]),
    ("--out-dim 1", ["--out-dim"]),
    ("--batch-size 2000", ["--batch-size 2000"]),
    ("--data nowhere/at/all", ["--data", "nowhere/at/all"]),
])
def test_bad_input(tmp_path, capsys, flags, words):
    """Exit code 2, one sentence that names the flag and its value, and no folder left behind."""
    said = sentence(capsys, command(tmp_path / "out", *flags.split()))
    assert all(w in said for w in words), said
    assert not (tmp_path / "out").exists()


def test_paper_preset_asks_for_data(tmp_path, capsys):
    said = sentence(capsys, ["--preset", "paper", "--out", tmp_path / "out"])
    assert "--preset paper" in said and "--data" in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [
    "--depth 4", "--shortcut decayed", "--out-dim 32", "--local-crops 3", "--opt soap", "--seed 1",
    "--set pool=token", "--set bottleneck_dim=8", "--set global_scale=.5,1", "--data mnist5k"])
def test_checkpoint_of_another_run(copied, capsys, flags):
    """Another net, head, view, optimizer, seed or data is refused; the run's files stay as they are."""
    before = contents(copied)
    said = sentence(capsys, command(copied, *SAME, *flags.split()))
    assert "ckpt.pt" in said and "--fresh" in said and contents(copied) == before


def test_a_last_update_that_blows_up_is_met_before_the_layers_are_looked_at(tmp_path, capsys):
    flags = "--lr 1e25 --warmup 0 --clip 0 --epochs .012 --eval-every 1 --set knn_every=.0115"
    said = sentence(capsys, command(tmp_path / "run", *flags.split()))
    assert "validation loss is not finite after step 1 " in said


def test_a_diverging_run_stops_with_a_sentence(tmp_path, capsys):
    flags = "--lr 1e30 --warmup 0 --save-every 1 --skipless"
    said = sentence(capsys, command(tmp_path / "run", *flags.split()))
    assert re.search(r"not finite (at|after) step (\d+)", said)
    assert all(math.isfinite(r["loss"]) for r in rows(tmp_path / "run") if "loss" in r)


def test_knn_is_looked_at_however_short_the_interval(tmp_path):
    """An interval of less than a step is every step, not never."""
    train(tmp_path / "run", "--epochs", ".023", "--set", "knn_every=.001")
    assert [r["step"] for r in rows(tmp_path / "run") if "val_knn" in r] == [1, 2]
