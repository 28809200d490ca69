"""train_lm.py as people use it: resumed, on one process and on two, compiled, with wrong input.

What it logs is compared with independent computations."""
import copy
import functools
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import init
import quantize
import runtime
import text
import train_lm
from model import LM
from test_init import singular_values
from test_runtime import launch_ranks
from test_train_vit import assert_close, assert_same, contents, keys, load, one_sentence, stop_at
from tools import prepare_text

ENTRIES = ["log_every=1", "sample_tokens=4", "eval_tokens=160", "num_heads=2", "tokenizer=bytes"]
TINY = ["--threads", "1", "--device", "cpu", "--embed-dim", "16", "--depth", "2", "--block-size", "16",
        "--batch-size", "8", "--steps", "8", "--warmup", "2", "--lr", "3e-3", "--eval-every", "4",
        "--save-every", "4", "--set", *ENTRIES]
LOOKS_LINEAR = ["--skipless", "--init", "residual-free", "--set", "mlp_init=looks-linear"]


def command(out, *flags):
    return [*TINY, "--out", str(out), *map(str, flags)]


def train(out, *flags):
    """A run within this process. Returns its checkpoint."""
    train_lm.main(command(out, *flags))
    return load(out)


def lines(out):
    """The log as a strict reader of JSON takes it: NaN is no JSON."""
    log = (Path(out) / "log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in log.splitlines()]


def rows(out, without=()):
    """The lines without the measurements of speed; floats compare bit by bit."""
    without = ("tokens_per_s", "mfu", *without)
    return [{k: v for k, v in line.items() if k not in without} for line in lines(out)]


def quick(patch=setattr):
    """No half second for a picture, none for a matrix of 1024 x 1024."""
    patch(runtime, "plot_curve", lambda *arguments, **more: None)
    patch(runtime, "matmul_rate", lambda device, dtype: 1e9)


@pytest.fixture(autouse=True)
def quick_here(monkeypatch):
    quick(monkeypatch.setattr)


def script(argv):
    runtime.run_script(lambda: train_lm.main(argv))


def quick_script(argv):
    """For a process of its own."""
    quick()
    script(argv)


sentence = functools.partial(one_sentence, script)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A text of 60 kB, whose share to validate on 16 does not divide."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_bytes((text.ROOT / "shakespeare_1mb.txt").read_bytes()[:60_000])
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, story):
    """A finished run, to be copied and not changed, and its flags. It evaluates on all of the text."""
    out = tmp_path_factory.mktemp("finished") / "run"
    flags = ["--data", str(story), "--ema", ".9",
             "--set", "eval_tokens=0", "prompt=The ", "sample_tokens=60"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "matmul_rate", lambda device, dtype: 1e9)
        train(out, *flags)
    return out, flags


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished[0], tmp_path / "run")), finished[1]


def windows_of(tokens, chosen):
    """The windows of 16 inputs and their targets, (1, 17); the last may be shorter."""
    return [torch.from_numpy(tokens[16 * i:16 * i + 17].astype("int64"))[None] for i in chosen]


@torch.no_grad()
def reference_loss(model, tokens, chosen):
    """Mean of -log p over the targets of these windows, in float64, window by window."""
    model, total, count = model.double(), 0.0, 0
    for row in windows_of(tokens, chosen):
        p = model(row[:, :-1])[0].log_softmax(-1)
        total, count = total - p.gather(1, row[0, 1:, None]).sum().item(), count + row.shape[1] - 1
    return total / count


@torch.no_grad()
def reference_kurtosis(model, tokens, chosen):
    """Excess kurtosis of each block's output over these windows, in float64, block by block."""
    model, outputs = model.double(), [[] for _ in model.blocks]
    for row in windows_of(tokens, chosen):
        for seen, x in zip(outputs, list(model.layers(row[:, :-1]))[1:]):
            seen.append(x.flatten())
    spread = [torch.cat(seen) - torch.cat(seen).mean() for seen in outputs]
    return [(d.pow(4).mean() / d.square().mean() ** 2 - 3).item() for d in spread]


# -------------------------------------------------------------------------------------------------
# what a run leaves

def test_what_a_run_leaves(finished):
    """Four files; lines of the log with the agreed keys; args.json with what applies and no more."""
    out, _ = finished
    assert sorted(contents(out)) == ["args.json", "ckpt.pt", "curve.png", "log.jsonl"]
    train_lines, eval_lines = ([r for r in lines(out) if key in r] for key in ("loss", "val_loss"))
    assert [r["step"] for r in train_lines] == list(range(1, 9))
    assert [r["step"] for r in eval_lines] == [4, 8]
    assert all(r.keys() == {"step", "epoch", "loss", "lr", "grad_norm", "tokens_per_s", "mfu"}
               for r in train_lines)
    assert all(r.keys() == {"step", "val_loss", "kurtosis", "kurtosis_max", "isometry_drift", "sample"}
               for r in eval_lines)
    flops = 6 * (257 * 16 + 2 * 12 * 16 ** 2) + 12 * 2 * 16 * 16
    for r in train_lines:                                        # step s tells of the update before it
        assert r["lr"] == runtime.lr_at(r["step"] - 1, 8, 2, 3e-3)
        assert r["mfu"] == pytest.approx(r["tokens_per_s"] * flops / 1e9)
    saved, args = load(out), json.loads((out / "args.json").read_text(encoding="utf-8"))
    assert saved["args"] == args and saved["step"] == 8 and saved["best"] == eval_lines[0]["val_loss"]
    assert (args["kind"], args["tokenizer"], args["center"]) == ("lm", "bytes", 0)
    assert args["tokenizer_digest"] == text.Bytes.digest
    assert not {"alpha_qk", "alpha", "c", "mlp_init", "skipless_init"} & args.keys()
    with Image.open(out / "curve.png") as picture:
        assert picture.width > 600 and len(picture.convert("L").getcolors()) > 10


def test_flops_by_hand():
    """10 words, width 4, one block, context 8: 40 + 48 + 16 + 64 + 64 = 232 weights, 12 * 1 * 4 * 8."""
    net = LM(vocab_size=10, block_size=8, embed_dim=4, depth=1, num_heads=2)
    assert train_lm.flops_per_token(net) == 6 * 232 + 384


def test_the_checkpoint_rebuilds_what_was_evaluated(finished, story):
    """args["model"] builds the net; its averaged weights give the logged loss, kurtosis and sample."""
    saved, last = load(finished[0]), lines(finished[0])[-1]
    model, raw = LM(**saved["args"]["model"]), LM(**saved["args"]["model"])
    model.load_state_dict(saved["ema"])
    raw.load_state_dict(saved["model"])

    def written_by(net):
        generator = torch.Generator().manual_seed(runtime.mix_seed(0, "sample", 8))
        prompt = torch.tensor([[256, *b"The "]])
        return text.Bytes().decode(net.generate(prompt, 60, 0.8, 50, generator)[0, 1:])

    assert last["sample"] == written_by(model) != written_by(raw) and last["sample"].startswith("The ")
    tokens = text.load_text(story, "bytes").val
    assert (len(tokens) - 1) % 16 and len(tokens) > 2000
    windows = range(-(-(len(tokens) - 1) // 16))
    assert last["isometry_drift"] == train_lm.isometry_drift(raw) != train_lm.isometry_drift(model)
    assert last["val_loss"] == pytest.approx(reference_loss(model, tokens, windows), rel=1e-6)
    kurtosis = reference_kurtosis(model, tokens, windows)
    assert last["kurtosis"] == pytest.approx(kurtosis, rel=1e-4, abs=1e-4)
    assert abs(reference_loss(raw, tokens, windows) - last["val_loss"]) > 1e-3       # raw is another net


def test_kurtosis_is_quantizes_to_the_last_digit():
    """In batches of several sizes, far from 0 too; nan where there is nothing, or one value."""
    meter, moments = train_lm.KurtosisMeter(), quantize.Moments()
    assert math.isnan(meter.value())
    for i, shape in enumerate([(2, 8, 16), (3, 50, 1000), (1, 1, 7)]):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(i)).pow(3) + 10 * i
        meter(None, None, x)
        moments.update(x)
        assert meter.value() == moments.excess_kurtosis
    zeros = train_lm.KurtosisMeter()
    zeros(None, None, torch.zeros(4, 5))
    assert math.isnan(zeros.value())


def test_first_lines_say_what_runs(tmp_path, story, capsys):
    train(tmp_path / "run", "--data", story, "--opt", "soap", *LOOKS_LINEAR, "--micro-batch", "2",
          "--steps", "1")
    printed = capsys.readouterr().out
    head, corpus = printed[:printed.index("step      1")], text.load_text(story)
    for words in (torch.__version__, "asked for by --device", "torch.float32", "bytes (257)", "skipless",
                  "residual-free", "alpha_qk 3", "looks-linear", "(48, 16): both sides", "128 tokens",
                  f"{len(corpus.train):,} training and {len(corpus.val):,} validation tokens",
                  "8 over 1 process(es) x 4 micro-step(s)"):
        assert words in head, words
    assert re.fullmatch(r"val loss \d\.\d{4}", printed.splitlines()[-1])


def test_a_diverging_run_stops_with_a_log_that_is_json(tmp_path, capsys):
    """lr 1e30: exit code 2, the step in the sentence, a finite training log."""
    flags = ["--lr", "1e30", "--warmup", "0", "--eval-every", "1", *LOOKS_LINEAR]
    said = sentence(capsys, command(tmp_path / "run", *flags))
    step = int(re.search(r"not finite (?:at|after) step (\d+)", said)[1])
    assert 1 <= step <= 3 and "lr 9." in said and load(tmp_path / "run")["step"] == step
    assert all(math.isfinite(r["loss"]) for r in lines(tmp_path / "run") if "loss" in r)


def test_it_learns(tmp_path, story):
    """150 steps: below the entropy of single bytes, which a net without context cannot pass."""
    counts = torch.from_numpy(text.load_text(story).train[:].astype("int64")).bincount().double()
    train(tmp_path / "run", "--data", story, "--steps", "150", "--lr", "1e-2", "--warmup", "10",
          "--batch-size", "16", "--eval-every", "0", "--save-every", "0", "--set", "log_every=50")
    assert rows(tmp_path / "run")[-1]["val_loss"] < torch.special.entr(counts / counts.sum()).sum() - 0.2


# -------------------------------------------------------------------------------------------------
# samples

def test_a_sample_is_a_document_that_begins_with_the_prompt():
    """The net gets the separator, which every document follows, and the prompt; both count as given."""
    class Net:
        token_embed = torch.nn.Embedding(257, 2)

        def generate(self, tokens, count, **how):
            self.given = tokens.tolist(), count
            return torch.cat([tokens, torch.tensor([[*b"ef"]])], dim=1)

    net = Net()
    assert train_lm.sample_text(net, text.Bytes(), "abcd", 4, 0, 8) == "abcdef"
    assert net.given == ([[256, *b"abcd"]], 4)


def test_no_sample_when_none_is_asked_for(tmp_path):
    train(tmp_path / "run", "--set", "sample_tokens=0", "--steps", "1")
    assert lines(tmp_path / "run")[-1]["sample"] is None


def test_control_characters_are_shown_and_not_obeyed():
    assert train_lm.readable("a\n\n\x1b[2Jb\té\u2028\ufffd") == "a\n\n\\x1b[2Jb\\té\\u2028\ufffd"


def test_a_trained_net_writes_on_demand(tmp_path, story, capsys, monkeypatch):
    """The same command with --sample finds the run and draws as its log did. Nothing changes."""
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, "--data", str(story), "--skipless", "--set", "sample_tokens=30", "prompt=The\n"]
    train_lm.main(flags)
    printed = capsys.readouterr().out
    out, = Path("out").iterdir()
    written = train_lm.readable(lines(out)[-1]["sample"])
    assert written.startswith("The\n") and "\n    The\n" in printed and f"\n{written}" not in printed
    before = contents(out)
    train_lm.main([*flags, "--sample", "30"])
    assert capsys.readouterr().out == written + "\n"
    train_lm.main(["--sample", "9", "--out", str(out), "--set", "prompt=O "])
    assert capsys.readouterr().out.startswith("O ") and contents(out) == before


def test_a_sample_needs_a_trained_net(tmp_path, capsys):
    assert f"{tmp_path} has none" in sentence(capsys, ["--sample", "9", "--out", tmp_path])


# -------------------------------------------------------------------------------------------------
# initialisation, presets

def built(*flags):
    args = train_lm.get_args(command("nowhere", "--embed-dim", "32", *flags))
    return train_lm.build_model(args, 257)


@pytest.mark.parametrize("flags, a_qk, a_vo, a_u, mlp", [
    (["--init", "paper"], 0.9, 3, 1.5, "suo"),
    (["--init", "residual-free"], 3, 3, 1.5, "suo"),
    (["--init", "residual-free", "--set", "alpha_u=2", "alpha_vo=1", "alpha_qk=2"], 2, 1, 2, "suo"),
    (["--init", "residual-free", "--set", "mlp_init=looks-linear"], 3, 3, 1.5, "looks-linear"),
], ids=["paper", "defaults", "others", "looks-linear"])
@pytest.mark.parametrize("shortcut", ["skipless", "residual"])
def test_flags_reach_the_weights(shortcut, flags, a_qk, a_vo, a_u, mlp):
    """Told from the products of the net that is built. Init and shortcut are separate flags."""
    net, options, constants = built("--shortcut", shortcut, *flags)
    block, x = net.blocks[1], torch.randn(5, 32)
    w_q, w_k, w_v = block.attn.qkv.weight.detach().chunk(3)
    assert singular_values(w_q[:16].T @ w_k[:16])[:16].sub(a_qk).abs().max() < 1e-4
    product = w_v.T @ block.attn.proj.weight.T
    torch.testing.assert_close(product, a_vo * torch.eye(32), rtol=0, atol=1e-4)
    assert singular_values(block.mlp.fc1.weight).sub(2 * a_u ** 0.5).abs().max() < 1e-4
    linear = torch.allclose(block.mlp(x), (a_u * 1.5) ** 0.5 * x, atol=1e-4)
    assert linear == (mlp == "looks-linear")
    assert constants == dict(alpha_qk=a_qk, alpha_vo=a_vo, alpha_u=a_u, alpha_d=1.5, mlp_init=mlp,
                             center=0) and options["shortcut"] == shortcut
    assert LM(**options).state_dict().keys() == net.state_dict().keys()


def test_residual_nets_start_as_usual():
    net, options, constants = built("--init", "auto")
    assert options["shift"] == 0 and constants == dict(center=0)
    assert net.blocks[0].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert net.blocks[0].mlp.fc2.weight.std().item() == pytest.approx(0.01, rel=0.1)     # over sqrt(2 L)


def test_center_is_a_share_of_the_activations_mean():
    net, options, _ = built("--skipless", "--init", "paper", "--set", "center=.5")
    z = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    assert options["shift"] == pytest.approx(0.5 * F.gelu(1.5 ** 0.5 * z).mean().item(), rel=0.01)
    assert all(block.mlp.shift == options["shift"] for block in [*net.blocks, *LM(**options).blocks])


def test_auto_takes_the_rules_constants_and_center_may_be_given():
    chosen = init.choose_lm_constants(32, 2, 16, 2)
    assert chosen.items() <= built("--skipless")[2].items()
    given = built("--skipless", "--set", "center=.3")[2]
    assert given["center"] == 0.3 and given["alpha_qk"] == chosen["alpha_qk"]


def test_paper_1s_init_on_the_lm():
    """The twin that init_skipless_vit makes, with the constants of the preset's dict."""
    net, options, constants = built("--skipless", "--init", "skipless", "--set", "beta=1.5", "c=2")
    assert constants == dict(alpha=1, beta=1.5, c=2, center=0)
    torch.manual_seed(0)
    twin = LM(**options)
    init.init_skipless_vit(twin, 1.0, 1.5, 2.0)
    assert_same(net.state_dict(), twin.state_dict())


def test_equal_seeds_build_equal_nets():
    one, same, other = (built("--seed", seed)[0].state_dict() for seed in (0, 0, 1))
    assert_same(one, same)
    assert not torch.equal(one["token_embed.weight"], other["token_embed.weight"])


@pytest.mark.parametrize("flags, beta, lr, init_", [
    (["--skipless", "--opt", "kl-shampoo"], 1.1, 5e-4, "paper"),
    (["--opt", "kl-shampoo"], 1.0, 1e-3, "default"),
    (["--skipless", "--temperature-beta", "1"], 1.0, 5e-4, "paper"),
    (["--shortcut", "decayed", "--alpha-min", ".6", "--lr", ".1"], 1.0, 0.1, "default")])
def test_paper_preset(flags, beta, lr, init_):
    """The published sizes, constants and rates; a flag wins over the preset."""
    args = train_lm.get_args(["--preset", "paper", "--data", "shards", *flags])
    assert (args.temperature_beta, args.lr, args.init) == (beta, lr, init_)
    assert (args.embed_dim, args.depth, args.num_heads, args.block_size) == (768, 24, 12, 512)
    assert (args.mlp_ratio, args.attention_scale, args.batch_size) == (4, "head", 512)
    assert (args.steps, args.warmup, args.weight_decay) == (50000, 2000, 0.01)
    if init_ == "paper":
        assert train_lm.lm_constants(args) == dict(train_lm.PAPER, center=0)


# -------------------------------------------------------------------------------------------------
# isometry

def reference_drift(model):
    """From the singular values s of every weight: |s^2 - m| / (m sqrt(n)), m the mean of s^2."""
    drifts = []
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        for w in (*attn.qkv.weight.chunk(3), attn.proj.weight, mlp.fc1.weight, mlp.fc2.weight):
            s2 = singular_values(w.detach()).square()
            drifts.append((s2 - s2.mean()).norm().item() / (s2.mean().item() * len(s2) ** 0.5))
    return sum(drifts) / len(drifts)


@pytest.mark.parametrize("ratio", [4.0, 0.5])
def test_isometry_drift_against_singular_values(ratio):
    """Random weights of any scale; scaled orthogonal ones have none; noise on them shows."""
    torch.manual_seed(0)
    net = LM(20, 8, 24, 2, 1, mlp_ratio=ratio)
    for scale, p in zip(itertools.cycle([0.01, 1, 30]), net.blocks.parameters()):
        p.data = torch.randn_like(p) * scale
    assert train_lm.isometry_drift(net) == pytest.approx(reference_drift(net), rel=1e-5)
    init.init_residual_free_lm(net)
    assert train_lm.isometry_drift(net) < 1e-3
    start = copy.deepcopy(net)
    for noise in (0.03, 0.1):
        for p, q in zip(net.blocks.parameters(), start.blocks.parameters()):
            p.data = q + noise * torch.randn_like(q)
        assert train_lm.isometry_drift(net) == pytest.approx(reference_drift(net), rel=1e-4)
    assert train_lm.isometry_drift(net) > 0.1


# -------------------------------------------------------------------------------------------------
# interrupted and resumed

@pytest.mark.parametrize("flags", [
    ["--opt", "adamw", "--eval-every", "2"],
    ["--opt", "soap", *LOOKS_LINEAR, "precondition_frequency=2"],
    ["--opt", "kl-shampoo", "--skipless", "--init", "paper", "--micro-batch", "2"],
    ["--opt", "muon", "--shortcut", "decayed", "--alpha-min", ".5"]], ids=lambda flags: flags[1])
def test_resume_is_exact_for_every_optimizer(tmp_path, flags):
    """Cut off and started again: weights, optimizer and log are those of the whole run, to the bit."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = [*flags, "--ema", ".8", "--save-every", "3"]
    train(whole, *flags)
    stop_at(train_lm.main, 5, command(cut, *flags))
    assert load(cut)["step"] == 4 and rows(cut)[-1]["step"] == 5
    one, two = load(whole), train(cut, *flags)
    assert one["step"] == 8 and one.pop("args") != two.pop("args")           # another --out
    assert_same(one, two)
    assert rows(whole) == rows(cut)


def test_finished_run_says_its_figure_again(copied, capsys):
    """With defaults spelt out it trains nothing, changes nothing, and ends with the same line."""
    out, flags = copied
    before = contents(out)
    train(out, *flags, "--shortcut", "residual", "--init", "default", "--temperature-beta", "1",
          "--opt", "adamw", "--set", "mlp_ratio=4", "attention_scale=head")
    assert capsys.readouterr().out.splitlines()[-1] == f"val loss {rows(out)[-1]['val_loss']:.4f}"
    assert all(contents(out)[name] == before[name] for name in ("ckpt.pt", "log.jsonl"))


def test_a_text_may_move_but_not_change(tmp_path, story, capsys):
    """The same file elsewhere is as good; another is refused by name before anything is written."""
    out, moved, other = tmp_path / "run", tmp_path / "moved.txt", tmp_path / "other.txt"
    stop_at(train_lm.main, 5, command(out, "--data", story))
    moved.write_bytes(story.read_bytes())
    other.write_bytes(story.read_bytes()[:30_000])
    before = contents(out)
    said = sentence(capsys, command(out, "--data", other))
    assert f"--data {other}" in said and "train_tokens=" in said and contents(out) == before
    train(out, "--data", moved)
    assert_same(load(out)["model"], train(tmp_path / "whole", "--data", story)["model"])


def test_a_folder_of_shards_brings_its_tokenizer(tmp_path, story):
    """The checkpoint names the tokenizer and the sizes follow."""
    prepare_text.main([str(story), "--out", str(tmp_path / "shards"), "--tokenizer", "gpt2-32k",
                       "--val", ".2", "--workers", "1"])
    flags = command(tmp_path / "run", "--data", tmp_path / "shards", "--steps", "1")
    flags.remove("tokenizer=bytes")
    train_lm.main(flags)
    args = load(tmp_path / "run")["args"]
    assert args["tokenizer"] == "gpt2-32k" and args["model"]["vocab_size"] == 32000


# -------------------------------------------------------------------------------------------------
# several processes, accumulation

FEW = ["--steps", "14", "--warmup", "0", "--batch-size", "9", "--set", "precondition_frequency=4"]


def wide(argv, last=None):
    """The run of argv with model and loss in float64, cut off in step `last` if that is given.

    In float32 two orders of summation cannot be compared after an optimizer that normalises: a gradient
    of zero is rounding noise, and noise / (|noise| + eps) is a full step. In float64 it is below eps."""
    quick()
    torch.Tensor.float = torch.Tensor.double                     # the logits' way to the loss
    build = train_lm.build_model

    def build_wide(args, vocab_size):
        raw, *rest = build(args, vocab_size)
        return raw.double(), *rest

    train_lm.build_model = build_wide
    runtime.run_script(lambda: stop_at(train_lm.main, last, argv))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By optimizer: the folders of a run cut off after 8 of its 14 steps, and of the whole run.

    By one process with the whole batch, in float64. The runs to compare start from the former: SOAP's
    first bases are not determined, as the sum of a few gradients' outer products has a null space."""
    made = {}

    def get(opt):
        if opt not in made:
            folder = tmp_path_factory.mktemp(opt)
            for last in (9, None):
                argv = command(folder / "run", "--opt", opt, *FEW)
                codes, outputs = launch_ranks(1, wide, argv, last, folder=folder)
                assert codes == [0], outputs
                if last:
                    assert load(folder / "run")["step"] == 8
                    shutil.copytree(folder / "run", folder / "start")
            made[opt] = folder / "start", folder / "run"
        return made[opt]
    return get


@pytest.mark.parametrize("opt, n, micro", [
    ("adamw", 2, 2), ("soap", 1, 4), ("soap", 2, 9), ("soap", 2, 2)])
def test_processes_and_micro_batches_do_not_matter(tmp_path, alone, opt, n, micro):
    """9 samples, which neither processes nor micro-batches divide: always the run of one process.

    Weights, losses, gradient norms, drift, samples. (The kurtosis is that of rank 0's share.)"""
    start, whole = alone(opt)
    out = Path(shutil.copytree(start, tmp_path / "run"))
    argv = command(out, "--opt", opt, *FEW, "--micro-batch", micro)
    codes, outputs = launch_ranks(n, wide, argv, folder=tmp_path)
    assert codes == [0] * n and "step 8" in outputs[0], outputs
    share = ("kurtosis", "kurtosis_max") if n > 1 else ()
    for a, b in zip(rows(out, share), rows(whole, share), strict=True):
        assert a == {k: v if isinstance(v, str | None) else pytest.approx(v, rel=1e-5, abs=1e-9)
                     for k, v in b.items()}
    assert load(out)["model"]["norm.weight"].dtype == torch.float64
    assert_close(load(out), load(whole), tolerance=1e-7)
    assert outputs[1:] in ([], [""])                             # rank 0 alone speaks


def evaluate_to_file(out, flags, path):
    """The exact evaluation of a run's weights by as many processes as there are."""
    args = train_lm.get_args(command(out, *flags))
    run, corpus = runtime.open_run(args, "lm"), text.load_text(args.data)
    raw, *_ = train_lm.build_model(args, corpus.tokenizer.vocab_size)
    raw.load_state_dict(load(out)["model"])
    loss, kurtosis = train_lm.evaluate(raw, corpus.val, args, run)
    if run.main:
        Path(path).write_text(json.dumps([loss, kurtosis, raw.training]), encoding="utf-8")


@pytest.mark.parametrize("n", [1, 2])
def test_evaluation_is_exact_on_any_number_of_processes(tmp_path, finished, story, n):
    """All of the text, whose last window is short, and 10 windows of it: the mean of a plain loop.

    The kurtosis is that of every n-th window, rank 0's share."""
    tokens, model = text.load_text(story).val, LM(**load(finished[0])["args"]["model"])
    model.load_state_dict(load(finished[0])["model"])
    count = -(-(len(tokens) - 1) // 16)
    assert count % 2 and (len(tokens) - 1) % 16
    for asked, windows in ((0, range(count)), (160, [i * count // 10 for i in range(10)])):
        flags = [*finished[1], "--micro-batch", "3", "--set", f"eval_tokens={asked}"]
        codes, outputs = launch_ranks(n, evaluate_to_file, finished[0], flags, tmp_path / "result.json",
                                      folder=tmp_path)
        assert codes == [0] * n, outputs
        loss, kurtosis, training = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
        assert loss == pytest.approx(reference_loss(model, tokens, windows), rel=1e-6) and training
        expected = reference_kurtosis(model, tokens, windows[::n])
        assert kurtosis == pytest.approx(expected, rel=1e-4, abs=1e-4)


# -------------------------------------------------------------------------------------------------
# compile

def traced(argv):
    """torch.compile with its wrapping and tracing, but without C++, which takes a minute."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    quick_script(argv)


def test_two_compiled_processes_equal_one(tmp_path):
    """Equal keys without a wrapper's prefix, equal weights to float32's rounding, equal losses.

    Each process keeps the averaged weights for itself and evaluates them on its share."""
    flags = ["--warmup", "0", "--ema", ".9", *LOOKS_LINEAR]
    one = train(tmp_path / "one", *flags)
    codes, outputs = launch_ranks(2, traced, command(tmp_path / "two", *flags, "--compile"),
                                  folder=tmp_path, timeout=240)
    assert codes == [0, 0], outputs
    two = load(tmp_path / "two")
    assert keys(two) == keys(one)
    assert not any(k.startswith(("_orig_mod.", "module.")) for k in [*two["model"], *two["ema"]])
    assert_close(two, one, tolerance=1e-3)
    losses = [rows(tmp_path / name)[-1]["val_loss"] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert any(not torch.equal(two["model"][k], two["ema"][k]) for k in two["model"])


# -------------------------------------------------------------------------------------------------
# bad input

@pytest.mark.parametrize("flags, words", [
    (["--set", "num_heads=3"], ["embed_dim 16", "num_heads 3"]),
    (["--skipless", "--embed-dim", "18", "--set", "num_heads=6"], ["3 dimensions", "even"]),
    ([*LOOKS_LINEAR, "mlp_ratio=1"], ["looks-linear", "mlp_ratio"]),
    (["--set", "tokenizer=klingon"], ["klingon", "bytes"]),
    (["--data", "nowhere/at/all"], ["--data", "nowhere/at/all"]),
    (["--block-size", "100000"], ["--block-size 100000"]),
    (["--steps", "0"], ["--steps"]),
    (["--num-heads", "2"], ["--num-heads", "--set num_heads"]),
], ids=lambda value: " ".join(value) if value[0].startswith("--") else "")
def test_bad_flag(tmp_path, story, capsys, flags, words):
    """Exit code 2, one sentence that names the flag and its value, and no folder left behind."""
    said = sentence(capsys, command(tmp_path / "out", "--data", story, *flags))
    assert all(w in said for w in words), said
    assert not (tmp_path / "out").exists()


def test_paper_preset_asks_for_data(tmp_path, capsys):
    said = sentence(capsys, ["--preset", "paper", "--out", tmp_path / "out"])
    assert "--preset paper" in said and "--data" in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize("content, words", [(b"", "train"), (b"too short", "needs at least 17")])
def test_a_text_without_enough_to_train_on(tmp_path, capsys, monkeypatch, content, words):
    """Found before a model is built and before anything is written."""
    monkeypatch.setattr(train_lm, "build_model", None)
    (tmp_path / "short.txt").write_bytes(content)
    said = sentence(capsys, command(tmp_path / "out", "--data", tmp_path / "short.txt"))
    assert "short.txt" in said and words in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags, words", [
    (["--embed-dim", "32"], ["embed_dim=16", "embed_dim=32"]),
    (["--set", "num_heads=4"], ["num_heads=2", "num_heads=4"]),
    (["--temperature-beta", "1.1"], ["temperature_beta=1.0", "temperature_beta=1.1"]),
    (["--set", "center=.5"], ["center=0.0", "center=0.5"]),
    (["--init", "paper"], ["init=default", "init=paper"]),
    (["--set", "tokenizer=gpt2-32k"], ["tokenizer=bytes", "tokenizer=gpt2-32k"]),
    (["--data", "shakespeare"], ["train_tokens=", "--data shakespeare"]),
], ids=lambda value: value[-1])
def test_checkpoint_of_another_run(copied, capsys, flags, words):
    """Another model, init or text is refused with both values; the run's files stay as they are."""
    out, own = copied
    before = contents(out)
    said = sentence(capsys, command(out, *own, *flags))
    assert all(w in said for w in words) and "ckpt.pt" in said and "--fresh" in said, said
    assert contents(out) == before


def test_a_checkpoint_keeps_its_constants(tmp_path, capsys):
    flags = ["--steps", "1", "--shortcut", "decayed", "--alpha-min", ".5", "--init", "residual-free"]
    train(tmp_path / "run", *flags)
    for more, words in ((["--set", "alpha_qk=2"], ["alpha_qk=3.0", "alpha_qk=2.0"]),
                        (["--set", "mlp_init=looks-linear"], ["mlp_init=suo", "mlp_init=looks-linear"]),
                        (["--alpha-min", ".6"], ["alpha_min=0.5", "alpha_min=0.6"])):
        said = sentence(capsys, command(tmp_path / "run", *flags, *more))
        assert all(w in said for w in words) and "--fresh" in said, said
