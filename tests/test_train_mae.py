"""train_mae.py as people use it: resumed, on one process and on two, compiled, with wrong input.

What it logs and draws is compared with computations by hand."""
import functools
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import data
import init
import probe
import runtime
import train_mae
from model import MAE, learnable, shortcut_weights
from test_init import singular_values
from test_mae import kept_by_hand, loss_by_hand, patch_by_hand, zeros
from test_runtime import launch_ranks
from test_train_vit import (assert_close, assert_same, assert_same_run, contents, keys, load,
                            one_sentence, rows, stop_at)

pytestmark = pytest.mark.usefixtures("no_curve")
HALF = math.sqrt(.5)
TINY = ["--threads", "1", "--device", "cpu", "--data", "digits8x8", "--depth", "2", "--batch-size", "32",
        "--epochs", ".18", "--warmup", ".05", "--lr", "1e-3", "--eval-every", "4", "--save-every", "4",
        "--set", "img_size=8", "patch_size=2", "decoder_dim=16", "decoder_depth=2", "decoder_heads=2",
        "log_every=1", "knn_every=0", "knn_images=100"]          # 8 steps, 2 of them warm-up; 16 patches
SAME = ["--ema", ".5", "--set", "knn_every=.18"]


def command(out, *flags):
    return [*TINY, "--out", str(out), *map(str, flags)]


def train(out, *flags):
    """A run within this process. Returns its checkpoint."""
    train_mae.main(command(out, *flags))
    return load(out)


def quick():
    runtime.plot_curve = lambda *arguments, **more: None


def script(argv):
    runtime.run_script(lambda: train_mae.main(argv))


sentence = functools.partial(one_sentence, script)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with averaged weights, to be copied and not changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(out, *SAME)
    return out


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


# ----------------------------------------------------------------------------------------------------
# what a run leaves

def test_what_a_run_leaves(finished):
    """Five files; lines of the log with the agreed keys; args that rebuild the net, nothing stale."""
    files = ["args.json", "ckpt.pt", "curve.png", "log.jsonl", "reconstructions.png"]
    assert sorted(contents(finished)) == files
    log = (finished / "log.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in log.splitlines()]
    train_lines, eval_lines = ([r for r in lines if key in r] for key in ("loss", "val_loss"))
    assert len(train_lines) + len(eval_lines) == len(lines)
    for row in train_lines:
        assert row.keys() == {"step", "epoch", "loss", "lr", "grad_norm", "images_per_s"}
    assert [r["lr"] for r in train_lines] == [runtime.lr_at(s, 8, 2, 1e-3) for s in range(8)]
    assert [r["step"] for r in eval_lines] == [4, 8]
    assert eval_lines[0].keys() == {"step", "val_loss", "alpha_eff"}
    more = {"val_knn", "val_knn_best", "effective_rank", "feature_norm"}
    assert eval_lines[1].keys() == eval_lines[0].keys() | more
    saved = load(finished)
    args = saved["args"]
    assert saved["step"] == 8 and args["kind"] == "mae" and args["alphas"] is None
    assert args == json.loads((finished / "args.json").read_text(encoding="utf-8"))
    assert not {"alpha", "beta", "c", "plain", "skipless_init"} & args.keys()
    MAE(**args["model"]).load_state_dict(saved["model"])
    for name in ("curve.png", "reconstructions.png"):
        with Image.open(finished / name) as picture:
            assert picture.width > 600 and len(picture.convert("L").getcolors()) > 10


def rebuilt(folder):
    """(averaged net, data, its normalised validation images (355, 1, 8, 8), the masks' noise)."""
    saved = load(folder)
    net = MAE(**saved["args"]["model"]).eval()
    net.load_state_dict(saved["ema"])
    images = data.load_images("digits8x8")
    pixels = data.eval_transform(images, 8)(images.val.images)
    return net, images, pixels, train_mae.mask_noise(0, "validation", 355, 16)


@torch.no_grad()
def test_the_logged_figures_are_those_of_the_averaged_weights(finished):
    """Loss image by image; k-NN, effective rank and norm of every layer from a plain loop."""
    net, images, pixels, noise = rebuilt(finished)
    last, losses = rows(finished)[-1], []
    for x, u in zip(pixels[:, None], noise):
        prediction = net(x, 0.75, u[None])[1][0].double()
        losses.append(loss_by_hand(x[0].double(), prediction, 2, kept_by_hand(u, 4)))
    assert last["val_loss"] == pytest.approx(sum(losses) / 355, rel=1e-5)
    bank = torch.linspace(0, len(images.train) - 1, 100).long()
    train_pixels = data.eval_transform(images, 8)(images.train.images[bank])
    train_x, val_x = ([tokens.mean(1) for tokens in net.layers(x)] for x in (train_pixels, pixels))
    labels = images.train.labels[bank]
    knn = [100 * probe.knn(a, labels, b, images.val.labels) for a, b in zip(train_x, val_x)]
    assert last["val_knn"] == pytest.approx(knn, abs=0.6)        # near neighbours may swap by rounding
    assert len(knn) == 3 and last["val_knn_best"] == max(last["val_knn"])
    for rank, norm, x in zip(last["effective_rank"], last["feature_norm"], val_x, strict=True):
        p = singular_values(x) / singular_values(x).sum()
        assert rank == pytest.approx(-(p * p.log()).sum().item(), rel=1e-3)
        assert norm == pytest.approx(x.norm(dim=1).mean().item(), rel=1e-5)
    weights = [a for pair in shortcut_weights("decayed", 2, 0.6) for a in pair]
    assert last["alpha_eff"] == pytest.approx(math.prod(weights))


def test_reconstructions_show_true_pixels(finished, tmp_path, monkeypatch):
    """Eight images, masked, reconstructed. Kept patches are the input's own pixels, in both; removed
    ones the mean grey, or the prediction with the mean and the deviation of the true patch."""
    net, images, pixels, noise = rebuilt(finished)
    shown, grid = [], train_mae.make_grid
    monkeypatch.setattr(train_mae, "make_grid", lambda x, **how: (shown.append(x), grid(x, **how))[1])
    args = train_mae.get_args(command(tmp_path))
    run = runtime.open_run(args, "mae")
    train_mae.save_reconstructions(net, images, data.eval_transform(images, 8), noise, args, run)
    original, masked, filled = shown[0].unflatten(0, (3, 8))
    index = torch.linspace(0, 354, 8).long()
    assert (255 * original - images.val.images[index]).abs().max() < 1e-3
    with torch.no_grad():
        _, prediction, _ = net(pixels[index], 0.75, noise[index])
    for b, i in enumerate(index):
        kept = kept_by_hand(noise[i], 4)
        for n in range(16):
            truth, grey, fill = (patch_by_hand(row[b], 2, n) for row in (original, masked, filled))
            if n in kept:
                assert (grey - truth).abs().max() < 1e-5 and (fill - truth).abs().max() < 1e-5
            else:
                true = patch_by_hand(pixels[i], 2, n)
                expected = prediction[b, n] * (true.var() + 1e-6).sqrt() + true.mean()
                expected = expected * images.std[0] + images.mean[0]
                assert (grey - images.mean[0]).abs().max() < 1e-5
                assert (fill - expected.clamp(0, 1)).abs().max() < 1e-4


def test_first_and_last_lines(tmp_path, capsys):
    flags = "--opt soap --micro-batch 8 --epochs .05 --alpha-eff .3"
    train(tmp_path / "run", *flags.split())
    printed = capsys.readouterr().out
    for words in ("1442 training and 355 validation images, 10 classes", "decayed, alpha_eff 0.3,",
                  "init default", "both sides", "x 4 micro-step(s); 2 steps, 45 per epoch"):
        assert words in printed[:printed.index("step      1")], words
    assert re.fullmatch(r"val loss \d\.\d{4}", printed.splitlines()[-1])


def test_it_learns_what_lies_under_the_mask(tmp_path):
    """Two epochs: well below 1, the loss of the patch's mean."""
    train(tmp_path / "run", "--epochs", "2", "--eval-every", "0", "--save-every", "0", "--lr", "3e-3")
    assert rows(tmp_path / "run")[-1]["val_loss"] < 0.8


# ----------------------------------------------------------------------------------------------------
# flags reach the model

def built(*flags):
    """(arguments, net, alphas, constants) of a command; what a checkpoint holds rebuilds the net."""
    args = train_mae.get_args(command("nowhere", *flags))
    net, options, alphas, constants = train_mae.build_model(args, data.load_images("digits8x8"))
    again = MAE(**options, alphas=learnable(alphas) if args.alphas == "learned" else alphas)
    assert again.state_dict().keys() == net.state_dict().keys() and again.alpha_eff == net.alpha_eff
    json.dumps(alphas)                                           # plain lists
    return args, net, alphas, constants


DECAY = [1, 1 - .4 / 3, 1 - .8 / 3, .6]


@pytest.mark.parametrize("flags, expected", [
    ("", {}),
    ("--alpha-min .1", dict(alphas=[1, .7, .4, .1])),
    ("--alpha-min .1 --set alphas=cosine", dict(alphas=[1, .775, .325, .1])),
    ("--alpha-min .2 --set alphas=per-layer", dict(alphas=[.6, 1, .2, 1])),
    ("--alpha-min .1 --set alphas=attention-only", dict(alphas=[1, 1, .4, 1])),
    ("--alpha-min .1 --set alphas=mlp-only", dict(alphas=[1, .7, 1, .1])),
    ("--alpha-min .1 --set alphas=learned", dict(alphas=[1, .7, .4, .1], learned=4)),
    ("--shortcut residual", dict(alphas=[1] * 4)),
    ("--shortcut residual --set alphas=scaled-both", dict(alphas=[HALF] * 4, gain=HALF)),
    ("--shortcut residual --set alphas=scaled-branch", dict(alphas=[1] * 4, gain=HALF)),
    ("--skipless", dict(alphas=[0] * 4, zeros=6)),
    ("--no-long-skips", dict(skips=0, norm=True)),
    ("--no-long-skips --set encoder_norm=0", dict(skips=0)),
    ("--set encoder_norm=1", dict(norm=True)),
    ("--set zero_init=false", dict(zeros=0)),
    ("--set norm_pix_loss=false", dict(norm_pix_loss=False)),
    ("--plain", dict(alphas=[1] * 4, skips=0, norm=True, zeros=0)),
    ("--plain --skipless", dict(alphas=[0] * 4, skips=0, norm=True, zeros=0)),
    ("--plain --set zero_init=true", dict(alphas=[1] * 4, skips=0, norm=True, zeros=9)),
])
def test_each_ablation_reaches_the_model(flags, expected):
    """Two encoder and two decoder blocks: 8 branches, one skip and the head can start at zero."""
    net = built(*flags.split())[1]
    usual = dict(alphas=DECAY, gain=1.0, learned=0, skips=1, norm=False, norm_pix_loss=True)
    expected = usual | expected
    weights = [float(a) for block in net.blocks for a in block.alphas]
    assert weights == pytest.approx(expected["alphas"], abs=1e-7)
    assert {gain for block in net.blocks for gain in block.gains} == {expected["gain"]}
    assert sum("alphas" in name for name, _ in net.named_parameters()) == expected["learned"]
    assert len(net.skips) == expected["skips"] and net.norm_pix_loss == expected["norm_pix_loss"]
    assert isinstance(net.norm, torch.nn.LayerNorm) == expected["norm"]
    assert len(zeros(net)) == expected.get("zeros", 9 + expected["skips"])
    for block in net.decoder_blocks:
        assert block.alphas == block.gains == (1.0, 1.0)


@pytest.mark.parametrize("flags", [
    "--plain --opt muon", "--opt soap --set alphas=learned",
    "--skipless --opt kl-shampoo --set encoder_norm=1 augment=mae",
    "--shortcut residual --clip 1 --set alphas=scaled-both augment=light"])
def test_variants_train(tmp_path, flags):
    saved = train(tmp_path / "run", "--epochs", ".1", *flags.split())
    last = rows(tmp_path / "run")[-1]
    assert 0.3 < last["val_loss"] < 3
    if "learned" in flags:                                       # the log follows what moves
        net = MAE(**saved["args"]["model"], alphas=learnable(saved["args"]["alphas"]))
        assert not math.isclose(last["alpha_eff"], net.alpha_eff, rel_tol=1e-5)
        net.load_state_dict(saved["model"])
        assert last["alpha_eff"] == pytest.approx(net.alpha_eff, rel=1e-6)


@pytest.mark.parametrize("wanted", [0.001, 0.3])
def test_alpha_eff_chooses_alpha_min(wanted):
    args, net, *_ = built("--depth", "12", "--set", "decoder_depth=6", "--alpha-eff", wanted)
    assert net.alpha_eff == pytest.approx(wanted, rel=1e-6) and 0 < args.alpha_min < 1


@pytest.mark.parametrize("flags, how, c", [
    ("--init paper", "paper", 3), ("--init auto", "auto", 3), ("", "auto", 3),
    ("--init skipless --set c=2", "skipless", 2), ("--init default", "default", None)])
def test_skipless_initialisations(flags, how, c):
    """W_V W_O of the encoder is c^2 times an orthogonal matrix; the decoder keeps its own start."""
    args, net, _, constants = built("--skipless", *flags.split())
    attn = net.blocks[1].attn
    values = singular_values(attn.qkv.weight.detach().chunk(3)[2].T @ attn.proj.weight.detach().T)
    assert values.sub(c ** 2).abs().max() < 1e-3 if c else values.max() > 2 * values.min()
    assert args.init == how and constants == {
        "paper": init.PAPER_CONSTANTS["nano"], "skipless": dict(alpha=1.0, beta=2.0, c=2.0),
        "auto": init.choose_constants(96, 3, 5, 2),              # of the 17 tokens 1 + 4 are left
        "default": {}}[how]


def test_equal_seeds_build_equal_nets():
    one, same, other = (built("--seed", seed)[1].state_dict() for seed in (0, 0, 1))
    assert_same(one, same)
    assert not torch.equal(one["blocks.0.mlp.fc1.weight"], other["blocks.0.mlp.fc1.weight"])


def test_presets():
    """The paper's recipe as published, and what a flag changes in it."""
    args = train_mae.get_args(["--preset", "paper", "--data", "x"])
    expected = dict(
        size="base", depth=12, img_size=224, patch_size=16, decoder_dim=512, decoder_depth=8,
        decoder_heads=16, epochs=800, warmup=40, batch_size=8192, weight_decay=0.05, betas=[0.9, 0.95],
        augment="mae", mask_ratio=0.75, alpha_min=0.6, shortcut="decayed", long_skips=True,
        zero_init=True, norm_pix_loss=True, lr=pytest.approx(1.5e-4 * 8192 / 256))
    assert {key: getattr(args, key) for key in expected} == expected
    plain = train_mae.get_args(["--preset", "paper", "--data", "x", "--plain", "--batch-size", "4096"])
    expected = dict(shortcut="residual", alpha_min=1.0, long_skips=False, zero_init=False,
                    batch_size=4096)
    assert {key: getattr(plain, key) for key in expected} == expected
    laptop = train_mae.get_args([])
    assert (laptop.size, laptop.depth, laptop.alpha_min, laptop.lr) == ("nano", 12, 0.6, 1.5e-3)


def test_folders_tell_runs_apart():
    """Every choice that makes another table row makes another default folder."""
    choices = ["", "--plain", "--skipless", "--alpha-min .5", "--set alphas=cosine", "--no-long-skips",
               "--set alphas=learned", "--set zero_init=false", "--shortcut residual", "--opt soap",
               "--shortcut residual --set alphas=scaled-both", "--seed 1"]
    names = [train_mae.get_args(flags.split()).out for flags in choices]
    assert len(set(names)) == len(names)


# ----------------------------------------------------------------------------------------------------
# masks

def test_masks_are_a_function_of_seed_and_step():
    """Uniform, new in every step and with every seed, the same each time; validation has its own."""
    def draw(*which):
        return train_mae.mask_noise(*which, 64, 49)
    assert torch.equal(draw(0, 3), draw(0, 3))
    every = [draw(seed, step) for seed in (0, 1) for step in (0, 1, "validation")]
    assert len({tuple(noise.flatten().tolist()) for noise in every}) == 6
    noise = draw(0, 3)
    assert noise.mean().item() == pytest.approx(0.5, abs=0.03) and noise.min() >= 0 and noise.max() < 1


def test_each_image_gets_its_row_of_the_global_noise(tmp_path, monkeypatch):
    """In five micro-batches the net is handed the rows in order: none twice, none left out."""
    seen, forward = [], MAE.forward

    def watched(net, x, ratio=0.75, noise=None):
        seen.extend([noise] * torch.is_grad_enabled())           # not in an evaluation
        return forward(net, x, ratio, noise)

    monkeypatch.setattr(MAE, "forward", watched)
    train(tmp_path / "run", "--epochs", ".05", "--micro-batch", "7")
    assert [len(noise) for noise in seen] == [7, 7, 6, 6, 6] * 2
    whole = [train_mae.mask_noise(0, step, 32, 16) for step in range(2)]
    assert torch.equal(torch.cat(seen), torch.cat(whole))


# ----------------------------------------------------------------------------------------------------
# interrupted and resumed

@pytest.mark.parametrize("flags", ["--opt adamw --set alphas=learned",
                                   "--opt soap --skipless --micro-batch 16"])
def test_stopped_again_and_again_equals_never_stopped(tmp_path, flags):
    """Cut off in steps 1, 3 and 6 of 8, before and right after saves: equal to the run in one piece."""
    flags = [*flags.split(), "--ema", ".8", "--save-every", "2", "--eval-every", "3",
             "--set", "knn_every=.1", "augment=light"]
    train(tmp_path / "whole", *flags)
    for step in (1, 3, 6):
        stop_at(train_mae.main, step, command(tmp_path / "cut", *flags))
    assert load(tmp_path / "cut")["step"] == 6
    train(tmp_path / "cut", *flags)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    one, two = ((tmp_path / name / "reconstructions.png").read_bytes() for name in ("whole", "cut"))
    assert one == two


def test_a_look_that_a_kill_prevented_is_made_up_for(copied):
    """The checkpoint is written before the evaluation, so a kill may leave the one without the other."""
    whole = rows(copied)
    log = copied / "log.jsonl"
    text = log.read_text(encoding="utf-8").splitlines(keepends=True)
    log.write_text("".join(text[:-1]), encoding="utf-8")
    train(copied, *SAME)
    assert rows(copied) == whole


def test_a_longer_run_says_what_changed(copied, capsys):
    more = ["--epochs", ".27", "--set", "augment=light"]
    assert "--allow-change" in sentence(capsys, command(copied, *SAME, *more))
    train(copied, *SAME, *more, "--allow-change")
    printed = capsys.readouterr().out
    assert "epochs was 0.18 and is 0.27" in printed and "augment was none and is light" in printed
    assert load(copied)["step"] == 12


def test_finished_run_says_its_figure_again(copied, capsys):
    """Started once more, with defaults spelt out: nothing is trained and nothing changes."""
    before = contents(copied)
    spelt_out = "--size nano --alpha-min .6 --long-skips --set mask_ratio=.75 betas=.9,.95"
    train(copied, *SAME, *spelt_out.split())
    assert capsys.readouterr().out.splitlines()[-1] == f"val loss {rows(copied)[-1]['val_loss']:.4f}"
    after = contents(copied)
    assert all(after[name] == before[name] for name in ("ckpt.pt", "log.jsonl", "reconstructions.png"))


def test_fresh_starts_over_at_once(copied):
    stop_at(train_mae.main, 3, command(copied, *SAME, "--seed", "1", "--fresh"))
    assert [r["step"] for r in rows(copied)] == [1, 2, 3] and not (copied / "ckpt.pt").exists()


# ----------------------------------------------------------------------------------------------------
# several processes, accumulation, compile

def wide(argv):
    """The run in float64, where orders of summation compare even after an optimizer that normalises."""
    quick()
    build, single = train_mae.build_model, torch.Tensor.float

    def build_wide(args, images):
        raw, *rest = build(args, images)
        raw.double().patch_embed.register_forward_pre_hook(lambda module, x: (x[0].double(),))
        # on the prediction's way to the loss
        raw.register_forward_pre_hook(lambda *_: setattr(torch.Tensor, "float", torch.Tensor.double))
        raw.register_forward_hook(lambda *_: setattr(torch.Tensor, "float", single))
        return raw, *rest

    train_mae.build_model = build_wide
    script(argv)


WIDE = ["--ema", ".5", "--warmup", "0", "--batch-size", "31",
        "--set", "augment=light", "knn_every=.18", "encoder_norm=1", "alphas=learned"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run in float64 by one process with the whole batch."""
    folder = tmp_path_factory.mktemp("alone")
    codes, outputs = launch_ranks(1, wide, command(folder / "run", *WIDE), folder=folder, timeout=200)
    assert codes == [0], outputs
    return folder / "run"


@pytest.mark.parametrize("n, micro", [(1, 8), (2, 16), (2, 8)])
def test_processes_and_micro_batches_do_not_matter(tmp_path, alone, n, micro):
    """A batch of 31, which nothing divides: the same masks, weights, averages, losses, gradient norms,
    k-NN and effective ranks as one process with the whole batch; 355 validation images are odd too."""
    flags = [*WIDE, "--micro-batch", micro]
    argv = command(tmp_path / "run", *flags)
    codes, outputs = launch_ranks(n, wide, argv, folder=tmp_path, timeout=200)
    assert codes == [0] * n, outputs
    for a, b in zip(rows(tmp_path / "run"), rows(alone), strict=True):
        assert a.keys() == b.keys()
        for key in b:
            assert a[key] == pytest.approx(b[key], rel=1e-6, abs=1e-9), key
    one, many = load(alone), load(tmp_path / "run")
    assert many["model"]["blocks.0.mlp.fc1.weight"].dtype == torch.float64
    assert_close(many, one, tolerance=1e-8)
    assert_close(dict(model=many["ema"]), dict(model=one["ema"]), tolerance=1e-8)
    assert outputs[1:] in ([], [""])                             # rank 0 alone speaks


def traced(argv):
    """torch.compile with all its tracing, but no C++, which takes a minute and a compiler."""
    quick()
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    script(argv)


def test_compile_changes_no_key_and_averages_move(tmp_path):
    """Compiled under two processes: keys of a plain run, close weights, averaged weights that follow."""
    flags = ["--ema", ".5", "--epochs", ".09", "--warmup", "0", "--set", "zero_init=false"]
    plain = train(tmp_path / "plain", *flags)
    first = built(*flags)[1].state_dict()
    argv = command(tmp_path / "both", *flags, "--compile")
    codes, outputs = launch_ranks(2, traced, argv, folder=tmp_path, timeout=240)
    assert codes == [0, 0], outputs
    both = load(tmp_path / "both")
    assert keys(both) == keys(plain)
    assert_close(both, plain, tolerance=5e-3, but_key_bias=True)
    for name in first:
        fixed = name.endswith("pos_embed")
        assert torch.equal(first[name], both["ema"][name]) == fixed, name
        assert torch.equal(both["model"][name], both["ema"][name]) == fixed, name


# ----------------------------------------------------------------------------------------------------
# bad input

@pytest.mark.parametrize("flags, words", [
    ("--set patch_size=3", ["8 x 8", "patch size 3"]),
    ("--set mask_ratio=.99", ["mask ratio 0.99", "0 of 16"]),
    ("--set alphas=square", ["alphas=square", "cosine", "learned"]),
    ("--set decoder_heads=3", ["16", "3"]),
    ("--depth 3", ["long skips", "3 encoder blocks"]),
    ("--alpha-eff 0", ["--alpha-eff"]),
    ("--batch-size 2000", ["--batch-size 2000", "1442"]),
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
    "--shortcut residual", "--alpha-min .5", "--alpha-eff .3", "--no-long-skips", "--opt soap",
    "--seed 1", "--set alphas=cosine", "--set decoder_dim=32", "--set mask_ratio=.5", "--data mnist5k"])
def test_checkpoint_of_another_run(copied, capsys, flags):
    """Another net, target, optimizer, seed or data is refused; the run's files stay as they are."""
    before = contents(copied)
    said = sentence(capsys, command(copied, *SAME, *flags.split()))
    assert "ckpt.pt" in said and "--fresh" in said and contents(copied) == before


def test_a_last_update_that_blows_up_is_no_success(tmp_path, capsys):
    """A step's loss is that before its update, so the last one's fault shows in the validation loss."""
    flags = ["--epochs", ".02", "--lr", "1e29", "--warmup", "0"]
    said = sentence(capsys, command(tmp_path / "run", *flags))
    assert "validation loss is not finite after step 1" in said


def test_a_diverging_run_stops_with_a_sentence(tmp_path, capsys):
    flags = ["--lr", "1e30", "--warmup", "0", "--save-every", "1"]
    said = sentence(capsys, command(tmp_path / "run", *flags))
    assert re.search(r"not finite at step (\d+)", said)
    assert all(math.isfinite(r["loss"]) for r in rows(tmp_path / "run") if "loss" in r)


def test_knn_is_looked_at_however_short_the_interval(tmp_path):
    """An interval of less than a step is every step, not never."""
    train(tmp_path / "run", "--epochs", ".05", "--set", "knn_every=.001")
    assert [r["step"] for r in rows(tmp_path / "run") if "val_knn" in r] == [1, 2]
