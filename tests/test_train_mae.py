"""train_mae.py as people use it: cut off and resumed, on one process and on two, compiled, with wrong input; and what it logs and draws against computations by hand."""
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
import probe
import runtime
import train_mae
from model import MAE, shortcut_weights
from test_init import singular_values
from test_mae import R, kept_by_hand, loss_by_hand, patch_by_hand, zeros
from test_runtime import launch_ranks, run_script
from test_train_vit import assert_close, assert_same, assert_same_run, contents, keys, load, one_sentence, rows, stop_at

pytestmark = pytest.mark.usefixtures("no_curve")
TINY = ["--threads", "1", "--device", "cpu", "--data", "digits8x8", "--img-size", "8", "--patch-size", "2", "--depth", "2", "--decoder-dim", "16", "--decoder-depth", "2",
        "--decoder-heads", "2", "--batch-size", "32", "--epochs", ".18", "--warmup", ".05", "--lr", "1e-3", "--log-every", "1", "--eval-every", "4", "--save-every", "4",
        "--knn-every", "0", "--knn-images", "100"]               # 8 steps, 2 of them warm-up; 16 patches


def command(out, *flags):
    return [*TINY, "--out", str(out), *map(str, flags)]


def train(out, *flags):
    """A run within this process. Returns its checkpoint."""
    train_mae.main(command(out, *flags))
    return load(out)


def quick():
    runtime.plot_curve = lambda *arguments, **more: None


def script(argv):
    runtime.run(lambda: train_mae.main(argv))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with averaged weights, to be copied and not changed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(out, "--ema", ".5", "--knn-every", ".18")
    return out


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


SAME = ["--ema", ".5", "--knn-every", ".18"]


# ---------------------------------------------------------------------------------------------------------------------
# what a run leaves

def test_what_a_run_leaves(finished):
    """The five files; train and eval lines with the agreed keys; a checkpoint whose args alone rebuild the net."""
    assert sorted(contents(finished)) == ["args.json", "ckpt.pt", "curve.png", "log.jsonl", "reconstructions.png"]
    lines = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    train_lines, eval_lines = [r for r in lines if "loss" in r], [r for r in lines if "val_loss" in r]
    assert len(train_lines) + len(eval_lines) == len(lines)
    assert all(r.keys() == {"step", "epoch", "loss", "lr", "grad_norm", "images_per_s"} for r in train_lines)
    assert [r["lr"] for r in train_lines] == [runtime.lr_at(s, 8, 2, 1e-3) for s in range(8)]
    assert [r["step"] for r in eval_lines] == [4, 8] and "val_knn" not in eval_lines[0]
    assert eval_lines[1].keys() >= {"step", "val_loss", "alpha_eff", "val_knn", "val_knn_best", "effective_rank"}
    saved = load(finished)
    assert set(saved) == {"model", "ema", "optimizer", "step", "best", "rng", "args"} and saved["step"] == 8
    assert saved["best"] == min(r["val_loss"] for r in eval_lines)
    assert saved["args"] == json.loads((finished / "args.json").read_text()) and saved["args"]["kind"] == "mae"
    MAE(**saved["args"]["model"]).load_state_dict(saved["model"])
    for name in ("curve.png", "reconstructions.png"):
        with Image.open(finished / name) as picture:
            assert picture.width > 600 and len(picture.convert("L").getcolors()) > 10


def rebuilt(folder):
    """(the averaged net, the data, its normalised validation images (355, 1, 8, 8), the noise of their masks)."""
    saved = load(folder)
    net = MAE(**saved["args"]["model"]).eval()
    net.load_state_dict(saved["ema"])
    images = data.load_images("digits8x8")
    return net, images, data.eval_transform(images, 8)(images.val.images), train_mae.noise_for(0, "validation", 355, 16)


def test_the_logged_figures_are_those_of_the_averaged_weights(finished):
    """Validation loss image by image, k-NN and effective rank of every layer from a plain loop over `layers`: mean of all tokens, 100 images as the bank."""
    net, images, pixels, noise = rebuilt(finished)
    last = rows(finished)[-1]
    losses = []
    with torch.no_grad():
        for x, u in zip(pixels[:, None], noise):
            losses.append(loss_by_hand(x[0].double(), net(x, 0.75, u[None])[1][0].double(), 2, kept_by_hand(u, 4)))
        bank = torch.linspace(0, len(images.train) - 1, 100).long()
        train_x, val_x = ([tokens.mean(1) for tokens in net.layers(x)] for x in (data.eval_transform(images, 8)(images.train.images[bank]), pixels))
    assert last["val_loss"] == pytest.approx(sum(losses) / 355, rel=1e-5)
    knn = [100 * probe.knn(a, images.train.labels[bank], b, images.val.labels) for a, b in zip(train_x, val_x)]
    assert last["val_knn"] == pytest.approx(knn, abs=0.6) and len(knn) == 3                      # two near neighbours may swap by rounding
    assert last["val_knn_best"] == max(last["val_knn"])
    for logged, x in zip(last["effective_rank"], val_x, strict=True):
        s = singular_values(x)
        p = s / s.sum()
        assert logged == pytest.approx(-(p * p.log()).sum().item(), rel=1e-3)
    assert last["alpha_eff"] == pytest.approx(math.prod(shortcut_weights("decayed", 2, 0.6)))


def test_reconstructions_show_true_pixels(finished):
    """Three rows of eight: images, masked, reconstructed. Kept patches are the input's own pixels, in both; removed ones are the mean grey, or the
    prediction brought back with the mean and the standard deviation of the true patch, here computed pixel by pixel."""
    net, images, pixels, noise = rebuilt(finished)
    with Image.open(finished / "reconstructions.png") as file:
        picture = np.asarray(file.convert("L"))
    assert picture.shape == (3 * 98 + 2, 8 * 98 + 2)
    tiles = torch.tensor(picture[2:].reshape(3, 98, -1)[:, :96, 2:].reshape(3, 96, 8, 98)[..., :96]).permute(0, 2, 1, 3)      # (row, column, 96, 96)
    assert torch.equal(tiles, tiles[:, :, ::12, ::12].repeat_interleave(12, 2).repeat_interleave(12, 3))                       # enlarged, not smoothed
    original, masked, filled = tiles[:, :, ::12, ::12]
    index = torch.linspace(0, 354, 8).long()
    assert torch.equal(original, images.val.images[index, 0])
    with torch.no_grad():
        _, prediction, _ = net(pixels[index], 0.75, noise[index])
    for b, i in enumerate(index):
        kept = kept_by_hand(noise[i], 4)
        for n in range(16):
            truth, grey, fill = (patch_by_hand(rows[b][None], 2, n).tolist() for rows in (original, masked, filled))
            if n in kept:
                assert grey == fill == truth
            else:
                assert set(grey) == {round(255 * images.mean[0])}
                true = patch_by_hand(pixels[i], 2, n)
                expected = (prediction[b, n] * (true.var() + 1e-6).sqrt() + true.mean()) * images.std[0] + images.mean[0]
                assert (torch.tensor(fill) - 255 * expected.clamp(0, 1)).abs().max() <= 0.51


def test_first_and_last_lines(tmp_path, capsys):
    train(tmp_path / "run", "--opt", "soap", "--micro-batch", "8", "--epochs", ".05", "--alpha-eff", ".3")
    printed = capsys.readouterr().out
    head = printed[:printed.index("step      1")]
    for words in ("opt=soap", torch.__version__, "asked for by --device", "torch.float32", "1442 training and 355 validation images, 10 classes", "decayed, alpha_min 0.",
                  "alpha_eff 0.3,", "default: Xavier uniform, last weights of branches zero", "both sides", "32 = 1 processes x 4 micro-steps x 8; 2 steps, 45 per epoch"):
        assert words in head, words
    assert re.fullmatch(r"val loss \d\.\d{4}", printed.splitlines()[-1])


def test_from_the_shell(tmp_path):
    """The real thing under torchrun, and a fault that both processes meet said once."""
    good = run_script(*command(tmp_path / "run", "--epochs", ".05"), script="train_mae.py", nproc=2)
    assert good.returncode == 0, good.stderr
    assert "32 = 2 processes x 1 micro-steps x 16" in good.stdout and re.fullmatch(r"val loss \d\.\d{4}", good.stdout.splitlines()[-1])


def test_it_learns_what_lies_under_the_mask(tmp_path):
    """Two epochs: well below 1, the loss of the patch's mean."""
    train(tmp_path / "run", "--epochs", "2", "--eval-every", "0", "--save-every", "0", "--log-every", "50", "--lr", "3e-3")
    assert rows(tmp_path / "run")[-1]["val_loss"] < 0.8


# ---------------------------------------------------------------------------------------------------------------------
# flags reach the model

def built(*flags):
    """(arguments, net, line that says which init) of a command."""
    args = train_mae.get_args(command("nowhere", *flags))
    net, kwargs, line = train_mae.build_model(args, data.load_images("digits8x8"))
    assert MAE(**kwargs).state_dict().keys() == net.state_dict().keys()
    return args, net, line


def alphas(net):
    return [float(getattr(a, "data", a)) for block in net.blocks for a in block.alphas]


@pytest.mark.parametrize("flags, expected", [
    ([], dict(alphas=[1, 1 - .4 / 3, 1 - .8 / 3, .6])), (["--alpha-min", ".1"], dict(alphas=[1, .7, .4, .1])),
    (["--alpha-min", ".1", "--schedule", "cosine"], dict(alphas=[1, .775, .325, .1])), (["--alpha-min", ".2", "--schedule", "per-layer"], dict(alphas=[.6, 1, .2, 1])),
    (["--alpha-min", ".1", "--decay-on", "attn"], dict(alphas=[1, 1, .4, 1])), (["--alpha-min", ".1", "--decay-on", "mlp"], dict(alphas=[1, .7, 1, .1])),
    (["--shortcut", "residual"], dict(alphas=[1] * 4)), (["--alpha-min", ".1", "--learn-alphas"], dict(alphas=[1, .7, .4, .1], learned=4)),
    (["--shortcut", "residual", "--scaling", "both"], dict(alphas=[R] * 4, gain=R)), (["--shortcut", "residual", "--scaling", "branch"], dict(alphas=[1] * 4, gain=R)),
    (["--no-long-skips"], dict(skips=0, norm=True)), (["--no-long-skips", "--no-encoder-norm"], dict(skips=0)), (["--encoder-norm"], dict(norm=True)),
    (["--no-zero-init"], dict(zeros=0)), (["--no-norm-pix-loss"], dict(norm_pix_loss=False)), (["--skipless"], dict(alphas=[0] * 4, zeros=6)),
    (["--plain"], dict(alphas=[1] * 4, skips=0, norm=True, zeros=0)), (["--plain", "--skipless"], dict(alphas=[0] * 4, skips=0, norm=True, zeros=0)),
    (["--zero-init", "--plain"], dict(alphas=[1] * 4, skips=0, norm=True, zeros=9)),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_each_ablation_reaches_the_model(flags, expected):
    """Two encoder and two decoder blocks: 8 branches, one skip and the head can start at zero."""
    _, net, _ = built(*flags)
    expected = dict(dict(alphas=[1, 1 - .4 / 3, 1 - .8 / 3, .6], gain=1.0, learned=0, skips=1, norm=False, norm_pix_loss=True), **expected)
    assert alphas(net) == pytest.approx(expected["alphas"], abs=1e-7)
    assert {block.gain for block in net.blocks} == {expected["gain"]} and {block.gain for block in net.decoder_blocks} == {1.0}
    assert len([n for n, _ in net.named_parameters() if "alphas" in n]) == expected["learned"]
    assert len(net.skips) == expected["skips"] and isinstance(net.norm, torch.nn.LayerNorm) == expected["norm"] and net.norm_pix_loss == expected["norm_pix_loss"]
    assert len(zeros(net)) == expected.get("zeros", 9 + expected["skips"])
    assert all(block.alphas == (1.0, 1.0) for block in net.decoder_blocks)


@pytest.mark.parametrize("flags", [["--plain", "--opt", "muon"], ["--learn-alphas", "--opt", "soap"], ["--skipless", "--opt", "kl-shampoo", "--encoder-norm", "--augment", "mae"],
                                   ["--shortcut", "residual", "--scaling", "both", "--augment", "light", "--clip", "1"]], ids=" ".join)
def test_variants_train(tmp_path, flags):
    saved = train(tmp_path / "run", *flags)
    last = rows(tmp_path / "run")[-1]
    assert 0.3 < last["val_loss"] < 3
    if "--learn-alphas" in flags:                                # the log follows the weights, which move
        net = MAE(**saved["args"]["model"])
        assert not math.isclose(last["alpha_eff"], net.alpha_eff, rel_tol=1e-5)
        net.load_state_dict(saved["model"])
        assert last["alpha_eff"] == pytest.approx(net.alpha_eff, rel=1e-6)


@pytest.mark.parametrize("wanted", [0.001, 0.005, 0.3])
@pytest.mark.parametrize("flags", [[], ["--schedule", "cosine"], ["--decay-on", "attn"]], ids=" ".join)
def test_alpha_eff_chooses_alpha_min(wanted, flags):
    args, net, _ = built("--depth", "12", "--decoder-depth", "6", "--alpha-eff", wanted, *flags)
    assert net.alpha_eff == pytest.approx(wanted, rel=1e-6) and 0 < args.alpha_min < 1
    assert net.alpha_eff == pytest.approx(math.prod(shortcut_weights("decayed", 12, args.alpha_min, args.schedule, args.decay_on)))


@pytest.mark.parametrize("flags, c", [(["--init", "paper"], 3), (["--init", "auto"], 3), ([], 3), (["--init", "skipless", "--c", "2"], 2), (["--c", "2"], 2), (["--init", "default"], None)],
                         ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_skipless_initialisations(flags, c):
    """W_V W_O of the encoder is c^2 times an orthogonal matrix; the decoder keeps its own start. --init auto counts the tokens that are left: 1 + 4."""
    args, net, line = built("--skipless", *flags)
    w_v = net.blocks[1].attn.qkv.weight.detach().chunk(3)[2]
    values = singular_values(w_v.T @ net.blocks[1].attn.proj.weight.detach().T)
    assert (values.sub(c ** 2).abs().max() < 1e-3) if c else (values.max() > 2 * values.min())
    assert zeros(net) == {"decoder_blocks.0.attn.proj.weight", "decoder_blocks.0.mlp.fc2.weight", "decoder_blocks.1.attn.proj.weight", "decoder_blocks.1.mlp.fc2.weight",
                          "skips.0.fc2.weight", "decoder_pred.weight"}
    if args.init == "auto":
        constants = init.choose_constants(96, 3, 5, 2)
        assert f"alpha {constants['alpha']:.3g}, beta {constants['beta']:.3g}" in line
    else:
        assert {"paper": "paper: alpha 1, beta 2, c 3", "skipless": "skipless: alpha 1, beta 2, c 2", "default": "default: Xavier uniform"}[args.init] in line


def test_equal_seeds_build_equal_nets():
    one, same, other = (built("--seed", seed)[1].state_dict() for seed in (0, 0, 1))
    assert_same(one, same)
    assert not torch.equal(one["blocks.0.mlp.fc1.weight"], other["blocks.0.mlp.fc1.weight"])


def test_presets():
    """The paper's recipe as published, and what a flag changes in it."""
    args = train_mae.get_args(["--preset", "paper", "--data", "x"])
    assert (args.size, args.depth, args.img_size, args.patch_size, args.decoder_dim, args.decoder_depth, args.decoder_heads) == ("base", 12, 224, 16, 512, 8, 16)
    assert (args.epochs, args.warmup, args.batch_size, args.weight_decay, args.betas, args.augment, args.mask_ratio) == (800, 40, 8192, 0.05, [0.9, 0.95], "mae", 0.75)
    assert args.lr == pytest.approx(1.5e-4 * 8192 / 256) and (args.alpha_min, args.shortcut, args.long_skips, args.zero_init, args.norm_pix_loss) == (0.6, "decayed", True, True, True)
    plain = train_mae.get_args(["--preset", "paper", "--data", "x", "--plain", "--batch-size", "4096"])
    assert (plain.shortcut, plain.alpha_min, plain.long_skips, plain.zero_init, plain.batch_size) == ("residual", 1.0, False, False, 4096)
    laptop = train_mae.get_args([])
    assert (laptop.size, laptop.depth, laptop.alpha_min, laptop.lr) == ("nano", 12, 0.6, 1.5e-3)
    assert train_mae.get_args(["--skipless", "--opt", "soap"]).init == "auto" and train_mae.get_args(["--skipless", "--alpha", "3"]).init == "skipless"


def test_folders_tell_runs_apart():
    """Every flag that makes another table row makes another default folder."""
    names = [train_mae.get_args(flags).out for flags in ([], ["--plain"], ["--skipless"], ["--alpha-min", ".5"], ["--alpha-eff", ".005"], ["--schedule", "cosine"], ["--decay-on", "mlp"],
             ["--learn-alphas"], ["--no-long-skips"], ["--no-zero-init"], ["--shortcut", "residual"], ["--shortcut", "residual", "--scaling", "both"], ["--opt", "soap"], ["--seed", "1"])]
    assert len(set(names)) == len(names)


# ---------------------------------------------------------------------------------------------------------------------
# masks

def test_masks_are_a_function_of_seed_and_step():
    """Uniform, new in every step and with every seed, the same each time it is asked; validation has its own."""
    draw = lambda *which: train_mae.noise_for(*which, 64, 49)
    assert torch.equal(draw(0, 3), draw(0, 3))
    assert len({tuple(draw(seed, step).flatten().tolist()) for seed in (0, 1) for step in (0, 1, "validation")}) == 6
    assert draw(0, 3).mean().item() == pytest.approx(0.5, abs=0.03) and draw(0, 3).min() >= 0 and draw(0, 3).max() < 1


def test_each_image_gets_its_row_of_the_global_noise(tmp_path, monkeypatch):
    """In four micro-batches the net is handed the rows in order: none twice, none left out."""
    seen, forward = [], MAE.forward
    monkeypatch.setattr(MAE, "forward", lambda net, x, ratio=0.75, noise=None: (seen.append(noise) if net.training and torch.is_grad_enabled() else None, forward(net, x, ratio, noise))[1])
    train(tmp_path / "run", "--epochs", ".05", "--micro-batch", "8")
    assert len(seen) == 8
    assert torch.equal(torch.cat(seen), torch.cat([train_mae.noise_for(0, step, 32, 16) for step in range(2)]))


# ---------------------------------------------------------------------------------------------------------------------
# interrupted and resumed

@pytest.mark.parametrize("flags", [["--opt", "adamw", "--learn-alphas"], ["--opt", "soap", "--skipless", "--micro-batch", "16"]], ids=lambda flags: flags[1])
def test_stopped_again_and_again_equals_never_stopped(tmp_path, flags):
    """Cut off in steps 1, 3, 4 and 6 of 8, before and right after saves: all that is left equals the run in one piece, to the bit."""
    flags = [*flags, "--ema", ".8", "--augment", "light", "--save-every", "2", "--eval-every", "3", "--knn-every", ".1"]
    train(tmp_path / "whole", *flags)
    for step, saved in ((1, None), (3, 2), (4, 4), (6, 6)):
        stop_at(train_mae.main, step, command(tmp_path / "cut", *flags))
        assert (load(tmp_path / "cut")["step"] if (tmp_path / "cut" / "ckpt.pt").exists() else None) == saved
    train(tmp_path / "cut", *flags)
    assert load(tmp_path / "cut")["step"] == 8
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert (tmp_path / "whole" / "reconstructions.png").read_bytes() == (tmp_path / "cut" / "reconstructions.png").read_bytes()


def test_resume_says_where_it_goes_on(copied, capsys):
    train(copied, *SAME, "--epochs", ".27", "--augment", "light")
    printed = capsys.readouterr().out
    assert re.search(rf"^resume .*step 8, lr {runtime.lr_at(8, 12, 2, 1e-3):.3g}$", printed, re.MULTILINE)
    assert "--epochs was 0.18 and is 0.27 from here on" in printed and "--augment was none and is light" in printed
    assert load(copied)["step"] == 12 and [r["step"] for r in rows(copied)] == sorted(r["step"] for r in rows(copied))


def test_finished_run_says_its_figure_again(copied, capsys):
    """Started once more, with defaults spelt out and --alpha-eff for --alpha-min: nothing is trained and nothing changes."""
    before = contents(copied)
    train(copied, *SAME, "--size", "nano", "--mask-ratio", ".75", "--alpha-min", ".6", "--opt", "adamw", "--schedule", "linear", "--long-skips")
    assert capsys.readouterr().out.splitlines()[-1] == f"val loss {rows(copied)[-1]['val_loss']:.4f}"
    assert all(contents(copied)[name] == before[name] for name in ("ckpt.pt", "log.jsonl", "reconstructions.png"))


def test_fresh_starts_over_at_once(copied):
    stop_at(train_mae.main, 3, command(copied, *SAME, "--seed", "1", "--fresh"))
    assert [r["step"] for r in rows(copied)] == [1, 2, 3] and not (copied / "ckpt.pt").exists()


# ---------------------------------------------------------------------------------------------------------------------
# several processes, accumulation, compile

def wide(argv):
    """The run of argv with the net in float64, where two orders of summation can be compared after an optimizer that normalises."""
    quick()
    build, single = train_mae.build_model, torch.Tensor.float

    def build_wide(args, images):
        raw, *rest = build(args, images)
        raw.double().patch_embed.register_forward_pre_hook(lambda module, x: (x[0].double(),))
        raw.register_forward_pre_hook(lambda *_: setattr(torch.Tensor, "float", torch.Tensor.double))          # on the prediction's way to the loss
        raw.register_forward_hook(lambda *_: setattr(torch.Tensor, "float", single))
        return raw, *rest

    train_mae.build_model = build_wide
    script(argv)


WIDE = ["--ema", ".5", "--augment", "light", "--knn-every", ".18", "--warmup", "0", "--encoder-norm", "--learn-alphas"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run in float64 by one process with the whole batch."""
    folder = tmp_path_factory.mktemp("alone")
    codes, outputs = launch_ranks(1, wide, command(folder / "run", *WIDE), folder=folder, timeout=200)
    assert codes == [0], outputs
    return folder / "run"


@pytest.mark.parametrize("n, micro", [(1, 8), (2, 16), (2, 8)])
def test_processes_and_micro_batches_do_not_matter(tmp_path, alone, n, micro):
    """Four micro-batches, two processes, and two processes with two micro-batches each: the same masks, so the same weights, averages, losses, gradient norms, validation
    losses (355 images, which two do not share evenly), k-NN and effective ranks as one process with the whole batch."""
    codes, outputs = launch_ranks(n, wide, command(tmp_path / "run", *WIDE, "--micro-batch", micro), folder=tmp_path, timeout=200)
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
    """torch.compile with all its wrapping and tracing, and without C++, which takes a minute and a compiler."""
    quick()
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    script(argv)


def test_compile_changes_no_key_and_averages_move(tmp_path):
    """Compiled under two processes: the keys of a plain run, no wrapper's prefix, close weights, and averaged weights that follow, each of them."""
    flags = ["--ema", ".5", "--epochs", ".09", "--warmup", "0", "--no-zero-init"]
    plain = train(tmp_path / "plain", *flags)
    first = built(*flags)[1].state_dict()
    codes, outputs = launch_ranks(2, traced, command(tmp_path / "both", *flags, "--compile"), folder=tmp_path, timeout=240)
    assert codes == [0, 0], outputs
    both = load(tmp_path / "both")
    assert keys(both) == keys(plain) and not any(k.startswith(("_orig_mod.", "module.")) for k in [*both["model"], *both["ema"]])
    assert_close(both, plain, tolerance=5e-3, but_key_bias=True)
    for name in first:
        fixed = name.endswith("pos_embed")
        assert torch.equal(first[name], both["ema"][name]) == fixed and torch.equal(both["model"][name], both["ema"][name]) == fixed, name


# ---------------------------------------------------------------------------------------------------------------------
# bad input

sentence = functools.partial(one_sentence, script)


@pytest.mark.parametrize("flags, words", [
    (["--patch-size", "3"], ["8 x 8", "patch size 3"]), (["--mask-ratio", ".99"], ["mask ratio 0.99", "0 of 16"]), (["--patch-size", "8"], ["mask ratio 0.75", "0 of 1"]),
    (["--mask-ratio", "0"], ["--mask-ratio"]), (["--mask-ratio", "1"], ["--mask-ratio"]), (["--mask-ratio", "nan"], ["--mask-ratio"]),
    (["--depth", "3"], ["long skips", "3 encoder blocks"]), (["--depth", "6"], ["6 encoder blocks", "2 decoder blocks"]),
    (["--decoder-heads", "3"], ["16", "decoder_heads 3"]), (["--decoder-dim", "18"], ["18", "divisible by 4"]),
    (["--shortcut", "residual", "--alpha-min", ".5"], ["--alpha-min", "--shortcut residual"]), (["--skipless", "--alpha-eff", ".01"], ["--alpha-eff", "--shortcut skipless"]),
    (["--plain", "--alpha-min", ".5"], ["--alpha-min", "--shortcut residual"]), (["--shortcut", "residual", "--schedule", "cosine"], ["--schedule", "no effect"]),
    (["--skipless", "--decay-on", "mlp"], ["--decay-on", "no effect"]), (["--alpha-min", ".5", "--alpha-eff", ".01"], ["--alpha-eff", "--alpha-min", "one of the two"]),
    (["--alpha-eff", ".001", "--decay-on", "attn"], ["alpha_eff 0.001", "out of reach"]), (["--alpha-eff", "0"], ["--alpha-eff"]), (["--alpha-min", "1.5"], ["--alpha-min"]),
    (["--schedule", "per-layer", "--decay-on", "mlp"], ["per-layer", "mlp"]), (["--scaling", "both"], ["scaling 'both'", "shortcut residual"]),
    (["--skipless", "--learn-alphas"], ["learn"]), (["--shortcut", "residual", "--scaling", "branch", "--learn-alphas"], ["learn"]),
    (["--init", "paper"], ["--init paper", "--skipless"]), (["--alpha", "2"], ["--init skipless", "--skipless"]), (["--skipless", "--init", "paper", "--beta", "2"], ["--beta", "--init paper"]),
    (["--skipless", "--init", "default", "--c", "2"], ["--c", "--init default"]), (["--opt", "muon", "--betas", ".9", ".9"], ["--betas", "muon"]),
    (["--micro-batch", "24"], ["--batch-size 32", "--micro-batch 24"]), (["--batch-size", "2000"], ["--batch-size 2000", "1442"]), (["--preset", "huge"], ["--preset", "huge"]),
    (["--learning-rate", "1"], ["--learning-rate"]), (["--lr", "nan"], ["--lr"]), (["--lr", "0"], ["--lr"]), (["--epochs", "0"], ["--epochs"]), (["--device", "tpu"], ["--device tpu"]),
    (["--data", "nowhere/at/all"], ["--data", "nowhere/at/all"]), (["--augment", "strong"], ["--augment", "strong"]), (["--knn-images", "0"], ["--knn-images"]),
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
    (["--decoder-dim", "32"], ["--decoder-dim 16", "--decoder-dim 32"]), (["--depth", "4"], ["--depth 2", "--depth 4"]), (["--patch-size", "1"], ["--patch-size 2", "--patch-size 1"]),
    (["--shortcut", "residual"], ["--shortcut decayed", "--shortcut residual"]), (["--alpha-min", ".5"], ["--alpha-min 0.6", "--alpha-min 0.5"]),
    (["--alpha-eff", ".3"], ["--alpha-min 0.6"]), (["--schedule", "cosine"], ["--schedule linear", "--schedule cosine"]), (["--decay-on", "mlp"], ["--decay-on both", "--decay-on mlp"]),
    (["--learn-alphas"], ["trained with --no-learn-alphas and", "ask for --learn-alphas:"]), (["--no-long-skips"], ["trained with --long-skips and", "ask for --no-long-skips:"]),
    (["--no-zero-init"], ["--zero-init"]), (["--encoder-norm"], ["--encoder-norm"]), (["--no-norm-pix-loss"], ["--norm-pix-loss"]), (["--mask-ratio", ".5"], ["--mask-ratio 0.75", "--mask-ratio 0.5"]),
    (["--opt", "soap"], ["--opt adamw", "--opt soap"]), (["--batch-size", "64"], ["--batch-size 32", "--batch-size 64"]), (["--seed", "1"], ["--seed 0", "--seed 1"]),
    (["--betas", ".8", ".9"], ["--betas 0.9 0.95", "--betas 0.8 0.9"]), (["--data", "mnist5k"], ["--data mnist5k", "4000", "digits8x8", "1442"]), (["--lr", ".5"], ["finished", "--lr was 0.001 and is 0.5"]),
], ids=lambda value: value[0])
def test_checkpoint_of_another_run(copied, capsys, flags, words):
    """Another architecture, target, optimizer, seed or data is refused with both values, and so is a change to a run that is over; the run's files stay as they are."""
    before = contents(copied)
    said = sentence(capsys, command(copied, *SAME, *flags))
    assert all(w in said for w in words) and "ckpt.pt" in said and "--fresh" in said, said
    assert contents(copied) == before


@pytest.mark.parametrize("foreign", [dict(train_images=5, classes=10), dict(lm={}), dict(kind="sit")], ids=str)
def test_another_scripts_checkpoint_is_refused_by_name(tmp_path, capsys, foreign):
    runtime.save_checkpoint(tmp_path / "ckpt.pt", dict(model={}, ema=None, optimizer={}, step=1, best=0.0, rng=torch.get_rng_state(), args=foreign))
    said = sentence(capsys, command(tmp_path))
    assert "ckpt.pt was written by another train script" in said and contents(tmp_path).keys() == {"ckpt.pt"}


def test_a_last_update_that_blows_up_is_no_success(tmp_path, capsys):
    """The loss of a step is that before its update, so the last update's fault shows in the validation loss alone."""
    said = sentence(capsys, command(tmp_path / "run", "--epochs", ".02", "--lr", "1e29", "--warmup", "0", "--knn-every", "0"))
    assert "validation loss is not finite after step 1" in said and not (tmp_path / "run" / "ckpt.pt").exists()


def test_a_diverging_run_stops_with_a_sentence(tmp_path, capsys):
    said = sentence(capsys, command(tmp_path / "run", "--lr", "1e30", "--warmup", "0", "--save-every", "1"))
    step = int(re.search(r"not finite at step (\d+)", said)[1])
    assert 1 <= step <= 4 and load(tmp_path / "run")["step"] == step
    assert all(math.isfinite(r["loss"]) for r in rows(tmp_path / "run") if "loss" in r)


def test_knn_is_looked_at_however_short_the_interval(tmp_path):
    """--knn-every of less than a step is every step, not never."""
    train(tmp_path / "run", "--epochs", ".05", "--knn-every", ".001")
    assert [r["step"] for r in rows(tmp_path / "run") if "val_knn" in r] == [1, 2]
