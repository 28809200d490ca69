"""train_lm.py as people use it: resumed, on one process and on two, compiled, with wrong input; and what it logs against independent computations."""
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
import prepare
import runtime
import text
import train_lm
from model import LM
from test_init import singular_values
from test_runtime import launch_ranks
from test_train_vit import assert_close, assert_same, contents, keys, load, one_sentence, stop_at

TINY = ["--threads", "1", "--device", "cpu", "--tokenizer", "bytes", "--embed-dim", "16", "--depth", "2", "--num-heads", "2", "--block-size", "16",
        "--batch-size", "8", "--steps", "8", "--warmup", "2", "--lr", "3e-3", "--eval-tokens", "160", "--eval-every", "4", "--save-every", "4",
        "--log-every", "1", "--sample-tokens", "4"]
LOOKS_LINEAR = ["--skipless", "--init", "residual-free", "--alpha-qk", "3", "--mlp-init", "looks-linear"]


def command(out, *flags):
    return [*TINY, "--out", str(out), *map(str, flags)]


def train(out, *flags):
    """A run within this process. Returns its checkpoint."""
    train_lm.main(command(out, *flags))
    return load(out)


def lines(out):
    """The log as a strict reader of JSON takes it: NaN is no JSON."""
    refuse = lambda name: pytest.fail(f"{name} in the log")
    return [json.loads(line, parse_constant=refuse) for line in (Path(out) / "log.jsonl").read_text().splitlines()]


def rows(out, without=()):
    """The lines without the two measurements of speed; floats compare bit by bit, as JSON keeps every digit."""
    return [{k: v for k, v in line.items() if k not in ("tokens_per_s", "mfu", *without)} for line in lines(out)]


def quick(monkeypatch=None):
    """No half second for a picture, none for a matrix of 1024 x 1024: what they are is tested once."""
    patch = monkeypatch.setattr if monkeypatch else setattr
    patch(runtime, "plot_curve", lambda *arguments, **more: None)
    patch(runtime, "matmul_rate", functools.partial(runtime.matmul_rate, size=32))


@pytest.fixture(autouse=True)
def quick_here(monkeypatch):
    quick(monkeypatch)


def script(argv):
    runtime.run(lambda: train_lm.main(argv))


def quick_script(argv):
    """For a process of its own."""
    quick()
    script(argv)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A text of 60 kB: 54 kB to train on, and a share to validate on that 16 does not divide."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_bytes((text.ROOT / "shakespeare_1mb.txt").read_bytes()[:60_000])
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, story):
    """A finished run, to be copied and not changed, and its command's flags. Its --eval-tokens are all."""
    out, flags = tmp_path_factory.mktemp("finished") / "run", ["--data", str(story), "--ema", ".9", "--eval-tokens", "0", "--prompt", "The ",
                                                                       "--sample-tokens", "60"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "matmul_rate", lambda device, dtype: 1e9)
        train(out, *flags)
    return out, flags


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copytree(finished[0], tmp_path / "run")), finished[1]


def reference_loss(model, tokens, windows):
    """Mean of -log p over the targets of these windows of 16, in float64, window by window; the last may be shorter."""
    model, total, count = model.double(), 0.0, 0
    with torch.no_grad():
        for i in windows:
            row = torch.from_numpy(tokens[16 * i:16 * i + 17].astype("int64"))
            p = model(row[None, :-1])[0].log_softmax(-1)
            total, count = total - p.gather(1, row[1:, None]).sum().item(), count + len(row) - 1
    return total / count


def reference_kurtosis(model, tokens, windows):
    """Excess kurtosis of each block's output over these windows of 16, in float64, block by block."""
    model, outputs = model.double(), [[] for _ in model.blocks]
    with torch.no_grad():
        for i in windows:
            x = model.token_embed(torch.from_numpy(tokens[16 * i:16 * i + 17].astype("int64"))[None, :-1])
            for block, seen in zip(model.blocks, outputs):
                x = block(x, model.rope(0, x.shape[1]))
                seen.append(x.flatten())
    spread = [torch.cat(seen) - torch.cat(seen).mean() for seen in outputs]
    return [(d.pow(4).mean() / d.square().mean() ** 2 - 3).item() for d in spread]


# ---------------------------------------------------------------------------------------------------------------------
# what a run leaves

def test_what_a_run_leaves(finished):
    """The four files; train and eval lines with the agreed keys and values; the configuration as JSON; a picture that is a PNG."""
    out, _ = finished
    assert sorted(contents(out)) == ["args.json", "ckpt.pt", "curve.png", "log.jsonl"]
    train_lines, eval_lines = [r for r in lines(out) if "loss" in r], [r for r in lines(out) if "val_loss" in r]
    assert len(train_lines) + len(eval_lines) == len(lines(out))
    assert [r["step"] for r in train_lines] == list(range(1, 9)) and [r["step"] for r in eval_lines] == [4, 8]
    assert all({"step", "loss", "lr", "grad_norm", "tokens_per_s", "mfu"} <= r.keys() for r in train_lines)
    assert all({"step", "val_loss", "kurtosis", "isometry_drift", "sample"} <= r.keys() for r in eval_lines)
    assert all(len(r["kurtosis"]) == 2 and all(-2 <= k < 100 for k in r["kurtosis"]) for r in eval_lines)
    for r in train_lines:                                        # the line of step s tells of the update that made it: lr(s - 1)
        assert r["lr"] == runtime.lr_at(r["step"] - 1, 8, 2, 3e-3)
        assert r["mfu"] == pytest.approx(r["tokens_per_s"] * flops_of_tiny() / 1e9)
    saved, args = load(out), json.loads((out / "args.json").read_text())
    assert set(saved) == {"model", "ema", "optimizer", "step", "best", "rng", "args"}
    assert saved["args"] == args and args["tokenizer"] == "bytes" and args["tokenizer_digest"] == text.Bytes.digest and args["shortcut"] == "residual"
    assert saved["step"] == 8 and saved["best"] == min(r["val_loss"] for r in eval_lines)
    with Image.open(out / "curve.png") as picture:
        assert picture.width > 600 and len(picture.convert("L").getcolors()) > 10


def flops_of_tiny():
    """257 x 16 embedding and head, 2 blocks of 12 x 16^2, context 16."""
    return 6 * (257 * 16 + 2 * 12 * 16 ** 2) + 12 * 2 * 16 * 16


def test_flops_by_hand():
    """10 words, width 4, one block: 40 + 48 + 16 + 64 + 64 = 232 weights, 6 each; and 12 * 1 * 4 * 8 for a context of 8. Norms do not count."""
    net = LM(vocab_size=10, block_size=8, embed_dim=4, depth=1, num_heads=2)
    assert train_lm.flops_per_token(net) == 6 * 232 + 384


def test_the_checkpoint_rebuilds_what_was_evaluated(finished, story):
    """args["lm"] alone builds the net; its averaged weights give the logged validation loss, kurtosis and sample, by independent computations."""
    saved, last = load(finished[0]), lines(finished[0])[-1]
    model = LM(**saved["args"]["lm"])
    model.load_state_dict(saved["ema"])
    raw = LM(**saved["args"]["lm"])
    raw.load_state_dict(saved["model"])
    generator = lambda: torch.Generator().manual_seed(runtime.mix_seed(0, "sample", 8))
    written, other = (net.generate(torch.tensor([[256, *b"The "]]), 60, temperature=0.8, top_k=50, generator=generator()) for net in (model, raw))
    assert last["sample"] == text.Bytes().decode(written[0, 1:]) and last["sample"].startswith("The ") and not torch.equal(written, other)
    tokens = text.load_text(story, "bytes").val
    assert (len(tokens) - 1) % 16 and len(tokens) > 2000
    windows = range(-(-(len(tokens) - 1) // 16))
    assert last["val_loss"] == pytest.approx(reference_loss(model, tokens, windows), rel=1e-6)
    assert last["kurtosis"] == pytest.approx(reference_kurtosis(model, tokens, windows), rel=1e-4, abs=1e-4)
    assert last["isometry_drift"] == pytest.approx(train_lm.isometry_drift(raw), rel=1e-6) and train_lm.isometry_drift(raw) != train_lm.isometry_drift(model)
    assert abs(reference_loss(raw, tokens, windows) - last["val_loss"]) > 1e-3       # the raw weights are other ones


def test_first_lines_say_what_runs(tmp_path, story, capsys):
    train(tmp_path / "run", "--data", story, "--opt", "soap", *LOOKS_LINEAR, "--micro-batch", "2", "--steps", "1")
    printed = capsys.readouterr().out
    head = printed[:printed.index("step      1")]
    corpus = text.load_text(story)
    for words in ("opt=soap", torch.__version__, "asked for by --device", "torch.float32", "bytes (257)", "skipless", "residual-free", "alpha_qk 3", "looks-linear",
                  f"{len(corpus.train):,} training and {len(corpus.val):,} validation tokens", "(48, 16): both sides", "8 = 1 processes x 4 micro-steps x 2",
                  "128 tokens"):
        assert words in head, words
    assert re.fullmatch(r"val loss \d\.\d{4}", printed.splitlines()[-1])


def test_a_sample_is_a_document_that_begins_with_the_prompt():
    """What the net is given: the separator, which every document follows, then the prompt; and what comes back is decoded without it."""
    class Net:
        def generate(self, tokens, count, **how):
            self.given = tokens.tolist(), count
            return torch.cat([tokens, torch.tensor([[*b"ef"]])], dim=1)

    net, args = Net(), train_lm.get_args(command("nowhere", "--prompt", "abcd"))
    assert train_lm.sample(net, text.Bytes(), args, runtime.World(0, 1, torch.device("cpu"), ""), 8) == "abcdef"
    assert net.given == ([[256, *b"abcd"]], 4)


def test_no_sample_when_none_is_asked_for(tmp_path):
    train(tmp_path / "run", "--sample-tokens", "0", "--steps", "1")
    assert lines(tmp_path / "run")[-1]["sample"] is None


def test_a_diverging_run_stops_with_a_log_that_is_json(tmp_path, capsys):
    """lr 1e30: the first evaluation has a kurtosis of NaN, the second step none at all. Exit code 2, a finite training log, and a step in the sentence."""
    said = sentence(capsys, command(tmp_path / "run", "--lr", "1e30", "--warmup", "0", "--eval-every", "1", "--save-every", "1", *LOOKS_LINEAR))
    step = int(re.search(r"not finite at step (\d+)", said)[1])
    assert 1 <= step <= 3 and "lr 9." in said and load(tmp_path / "run")["step"] == step
    assert all(math.isfinite(r["loss"]) for r in lines(tmp_path / "run") if "loss" in r)


def test_it_learns(tmp_path, story):
    """150 steps: below the entropy of the single bytes, which a net that ignores its context cannot pass."""
    counts = torch.from_numpy(text.load_text(story).train[:].astype("int64")).bincount().double()
    train(tmp_path / "run", "--data", story, "--steps", "150", "--lr", "1e-2", "--warmup", "10", "--batch-size", "16", "--log-every", "50",
          "--eval-every", "0", "--save-every", "0")
    assert rows(tmp_path / "run")[-1]["val_loss"] < torch.special.entr(counts / counts.sum()).sum() - 0.2


# ---------------------------------------------------------------------------------------------------------------------
# initialisation, presets, flags

def built(*flags):
    args = train_lm.get_args(command("nowhere", "--embed-dim", "32", *flags))
    return train_lm.build_model(args, 257)


@pytest.mark.parametrize("flags, a_qk, a_vo, a_u, mlp", [
    (["--init", "paper"], 0.9, 3, 1.5, "suo"), (["--alpha-qk", "2"], 2, 3, 1.5, "suo"),
    (["--init", "residual-free", "--alpha-u", "2", "--alpha-vo", "1"], 3, 1, 2, "suo"),
    (["--mlp-init", "looks-linear"], 3, 3, 1.5, "looks-linear"),
], ids=lambda value: value[0] if isinstance(value, list) else "")
@pytest.mark.parametrize("shortcut", ["skipless", "residual"])
def test_flags_reach_the_weights(shortcut, flags, a_qk, a_vo, a_u, mlp):
    """A constant alone means --init residual-free; init and shortcut are separate flags. Told from the products of the net that is built."""
    net, shape, _ = built("--shortcut", shortcut, *flags)
    block, x = net.blocks[1], torch.randn(5, 32)
    w_q, w_k, w_v = block.attn.qkv.weight.detach().chunk(3)
    assert singular_values(w_q[:16].T @ w_k[:16])[:16].sub(a_qk).abs().max() < 1e-4
    torch.testing.assert_close(w_v.T @ block.attn.proj.weight.T, a_vo * torch.eye(32), rtol=0, atol=1e-4)
    assert singular_values(block.mlp.fc1.weight).sub(2 * a_u ** 0.5).abs().max() < 1e-4
    assert torch.allclose(block.mlp(x), (a_u * 1.5) ** 0.5 * x, atol=1e-4) == (mlp == "looks-linear")
    assert shape["shortcut"] == net.shortcut == shortcut and LM(**shape).state_dict().keys() == net.state_dict().keys()


def test_residual_nets_start_as_usual_and_center_is_a_share_of_gelus_mean():
    net, shape, line = built()
    assert shape["shift"] == 0 and "default" in line
    assert net.blocks[0].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert net.blocks[0].mlp.fc2.weight.std().item() == pytest.approx(0.01, rel=0.1)      # over sqrt(2 L) = 2
    _, shape, _ = built("--skipless", "--init", "paper", "--center", ".5")
    z = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    assert shape["shift"] == pytest.approx(0.5 * F.gelu(1.5 ** 0.5 * z).mean().item(), rel=0.01)


def test_equal_seeds_build_equal_nets():
    one, same, other = (built("--seed", seed)[0].state_dict() for seed in (0, 0, 1))
    assert_same(one, same)
    assert not torch.equal(one["token_embed.weight"], other["token_embed.weight"])


@pytest.mark.parametrize("flags, beta, lr, init_", [
    (["--skipless", "--opt", "kl-shampoo"], 1.1, 5e-4, "paper"), (["--opt", "kl-shampoo"], 1.0, 1e-3, "default"),
    (["--skipless", "--temperature-beta", "1"], 1.0, 5e-4, "paper"), (["--shortcut", "decayed", "--alpha-min", ".6", "--lr", ".1"], 1.0, 0.1, "default")])
def test_paper_preset(flags, beta, lr, init_):
    """The published sizes (194.48 M parameters with its vocabulary), constants and rates; a flag wins over the preset."""
    args = train_lm.get_args(["--preset", "paper", "--data", "shards", *flags])
    assert (args.temperature_beta, args.lr, args.init) == (beta, lr, init_)
    assert (args.embed_dim, args.depth, args.num_heads, args.block_size, args.mlp_ratio, args.attention_scale) == (768, 24, 12, 512, 4, "head")
    assert (args.steps, args.warmup, args.batch_size, args.weight_decay, args.center) == (50000, 2000, 512, 0.01, 0)
    if init_ == "paper":
        assert (args.alpha_qk, args.alpha_vo, args.alpha_u, args.alpha_d, args.mlp_init) == (0.9, 3, 1.5, 1.5, "suo")


def test_paper_preset_asks_for_data(tmp_path, capsys):
    said = sentence(capsys, ["--preset", "paper", "--out", tmp_path / "out"])
    assert "--preset paper" in said and "--data" in said and not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# isometry

def reference_drift(model):
    """From singular values s of every weight, q, k, v one by one: |W W^T - m I|_F / (m sqrt(n)), m the mean of s^2."""
    drifts = []
    for block in model.blocks:
        for w in (*block.attn.qkv.weight.detach().chunk(3), block.attn.proj.weight.detach(), block.mlp.fc1.weight.detach(), block.mlp.fc2.weight.detach()):
            s2 = singular_values(w).square()
            drifts.append((s2 - s2.mean()).norm().item() / (s2.mean().item() * len(s2) ** 0.5))
    return sum(drifts) / len(drifts)


@pytest.mark.parametrize("ratio", [4.0, 0.5])
def test_isometry_drift_against_singular_values(ratio):
    """One head. Random weights of any scale; scaled orthogonal ones have none; and noise on them shows as it grows."""
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


# ---------------------------------------------------------------------------------------------------------------------
# interrupted and resumed

def assert_same_run(a, b):
    """Weights, averaged weights, optimizer, step, best, generator and log of two run folders are equal to the bit."""
    one, two = load(a), load(b)
    one.pop("args"), two.pop("args")
    assert_same(one, two)
    assert rows(a) == rows(b)


@pytest.mark.parametrize("flags", [["--opt", "adamw", "--eval-every", "2"], ["--opt", "soap", "--precondition-frequency", "2", *LOOKS_LINEAR],
                                   ["--opt", "kl-shampoo", "--skipless", "--init", "paper", "--micro-batch", "2"],
                                   ["--opt", "muon", "--embed-lr", ".01", "--shortcut", "decayed", "--alpha-min", ".5"]], ids=lambda flags: flags[1])
def test_resume_is_exact_for_every_optimizer(tmp_path, flags):
    """Cut off two steps after a save and started again: the two steps' old lines go, and all that is left equals the run in one piece, to the bit."""
    flags = [*flags, "--ema", ".8", "--save-every", "3"]
    train(tmp_path / "whole", *flags)
    stop_at(train_lm.main, 5, command(tmp_path / "cut", *flags))
    assert load(tmp_path / "cut")["step"] == 3 and rows(tmp_path / "cut")[-1]["step"] == 5
    train(tmp_path / "cut", *flags)
    assert load(tmp_path / "cut")["step"] == 8
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_finished_run_says_its_figure_again(copied, capsys):
    """Started once more, with defaults spelt out, a finished run trains nothing, changes neither log nor weights, and ends with the same line."""
    out, flags = copied
    before = contents(out)
    train(out, *flags, "--shortcut", "residual", "--init", "default", "--temperature-beta", "1", "--mlp-ratio", "4", "--opt", "adamw", "--attention-scale", "head")
    assert capsys.readouterr().out.splitlines()[-1] == f"val loss {rows(out)[-1]['val_loss']:.4f}"
    assert all(contents(out)[name] == before[name] for name in ("ckpt.pt", "log.jsonl"))


def test_resume_says_where_it_goes_on(copied, capsys):
    """More steps for a finished run are not what it was meant to be, so it is said; the schedule goes on where the longer one is."""
    out, flags = copied
    train(out, *flags, "--steps", "10")
    printed = capsys.readouterr().out
    assert re.search(rf"^resume .*step 8, lr {runtime.lr_at(8, 10, 2, 3e-3):.3g}$", printed, re.MULTILINE)
    assert "--steps was 8 and is 10" in printed and load(out)["step"] == 10
    assert [r["step"] for r in rows(out)] == sorted(r["step"] for r in rows(out))


def test_a_new_learning_rate_is_used_where_it_says_so(tmp_path, capsys):
    """What a resume notes as changed must change: with next to no rate for the embedding it stays where it was, and the blocks go on; and the other way round."""
    flags = ["--opt", "soap", "--embed-lr", ".01"]
    stop_at(train_lm.main, 5, command(tmp_path / "run", *flags))
    start = load(tmp_path / "run")["model"]
    for name, changed, still in (("embed", ["--embed-lr", "1e-12"], "token_embed.weight"), ("blocks", ["--lr", "1e-12"], "blocks.0.mlp.fc1.weight")):
        out = shutil.copytree(tmp_path / "run", tmp_path / name)
        after = train(out, *flags, *changed)["model"]
        assert f"{changed[0]} was" in capsys.readouterr().out
        moved = {k: (after[k] - start[k]).abs().max().item() for k in ("token_embed.weight", "blocks.0.mlp.fc1.weight")}
        assert moved.pop(still) < 1e-8 and min(moved.values()) > 1e-4, (name, moved)


def test_fresh_starts_over_at_once(copied, tmp_path):
    """--fresh: log and checkpoint of the old run are gone from the first step on, so that a cut-off fresh run cannot resume the old one."""
    out, flags = copied
    stop_at(train_lm.main, 3, command(out, *flags, "--seed", "1", "--fresh"))
    assert [r["step"] for r in rows(out)] == [1, 2, 3] and not (out / "ckpt.pt").exists()
    assert_same(train(out, *flags, "--seed", "1")["model"], train(tmp_path / "new", *flags, "--seed", "1")["model"])


def test_a_text_may_move_but_not_change(tmp_path, story, capsys):
    """The same file elsewhere is noted; another is refused by name before anything is written."""
    out, moved, other = tmp_path / "run", tmp_path / "moved.txt", tmp_path / "other.txt"
    stop_at(train_lm.main, 5, command(out, "--data", story))
    moved.write_bytes(story.read_bytes())
    other.write_bytes(story.read_bytes()[:30_000])
    before = contents(out)
    said = sentence(capsys, command(out, "--data", other))
    assert f"--data {other}" in said and str(story) in said and "--fresh" in said
    assert contents(out) == before
    train(out, "--data", moved)
    assert f"--data was {story} and is {moved}" in capsys.readouterr().out
    assert_same(load(out)["model"], train(tmp_path / "whole", "--data", story)["model"])


def test_a_folder_of_shards_brings_its_tokenizer(tmp_path, story):
    """--data FOLDER needs no --tokenizer, with the laptop's preset too; the checkpoint names the tokenizer and the sizes follow."""
    prepare.main([str(story), "--out", str(tmp_path / "shards"), "--tokenizer", "gpt2-32k", "--val", ".2", "--workers", "1"])
    flags = [f for f in command(tmp_path / "run", "--data", tmp_path / "shards", "--steps", "1") if f not in ("--tokenizer", "bytes")]
    train_lm.main(flags)
    args = load(tmp_path / "run")["args"]
    assert args["tokenizer"] == "gpt2-32k" and args["lm"]["vocab_size"] == 32000


# ---------------------------------------------------------------------------------------------------------------------
# several processes, accumulation

FEW = ["--steps", "14", "--warmup", "0", "--precondition-frequency", "4"]


def wide(argv, last=None):
    """The run of argv with model and loss in float64, cut off in step `last` if that is given.

    In float32 two orders of summation cannot be compared after an optimizer that normalises: where a gradient is zero in truth it is rounding noise, and
    noise / (|noise| + eps) is a full step. In float64 the noise lies far below eps.
    """
    quick()
    torch.Tensor.float = torch.Tensor.double                     # the logits' way to the loss
    build = train_lm.build_model

    def build_wide(args, vocab_size):
        raw, *rest = build(args, vocab_size)
        return raw.double(), *rest

    train_lm.build_model = build_wide
    runtime.run(lambda: stop_at(train_lm.main, last, argv))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By optimizer: (the folder of a run cut off after 8 of its 14 steps, the folder of the whole run), by one process with the whole batch, in float64.

    The runs to compare start from the former and not from zero, because SOAP's first bases are not determined: the sum of a few gradients' outer products
    has a null space, in which any basis is as good as another, and rounding chooses. After 8 steps of 128 tokens there is none left.
    """
    made = {}

    def get(opt):
        if opt not in made:
            folder = tmp_path_factory.mktemp(opt)
            for last in (9, None):
                codes, outputs = launch_ranks(1, wide, command(folder / "run", "--opt", opt, *FEW), last, folder=folder)
                assert codes == [0], outputs
                if last:
                    assert load(folder / "run")["step"] == 8
                    shutil.copytree(folder / "run", folder / "start")
            made[opt] = folder / "start", folder / "run"
        return made[opt]
    return get


@pytest.mark.parametrize("opt, n, micro", [("adamw", 2, 2), ("soap", 1, 2), ("soap", 2, 4), ("soap", 2, 2)])
def test_processes_and_micro_batches_do_not_matter(tmp_path, alone, opt, n, micro):
    """The same global batch in four micro-batches, on two processes, and on two processes with two micro-batches each: always the weights, losses, gradient norms,
    drift, validation losses and samples of one process with the whole batch. (The kurtosis is that of rank 0's share.)"""
    start, whole = alone(opt)
    out = Path(shutil.copytree(start, tmp_path / "run"))
    codes, outputs = launch_ranks(n, wide, command(out, "--opt", opt, *FEW, "--micro-batch", micro), folder=tmp_path)
    assert codes == [0] * n and "step 8" in outputs[0], outputs
    share = ("kurtosis", "kurtosis_max") if n > 1 else ()
    for a, b in zip(rows(out, share), rows(whole, share), strict=True):
        assert a == {k: v if isinstance(v, str | None) else pytest.approx(v, rel=1e-5, abs=1e-9) for k, v in b.items()}
    assert load(out)["model"]["norm.weight"].dtype == torch.float64
    assert_close(load(out), load(whole), tolerance=1e-7)
    assert outputs[1:] in ([], [""])                             # rank 0 alone speaks


def test_two_processes_equal_one_in_float32(tmp_path):
    """The run as it is shipped, from the first step, with AdamW: equal to the order of summation in float32. So is the loss of the averaged weights,
    which every process keeps for itself and evaluates on its share."""
    flags = ["--warmup", "0", "--ema", ".9"]
    one = train(tmp_path / "one", *flags)
    codes, outputs = launch_ranks(2, quick_script, command(tmp_path / "two", *flags, "--micro-batch", "2"), folder=tmp_path)
    assert codes == [0, 0], outputs
    assert_close(load(tmp_path / "two"), one, tolerance=1e-4)
    assert rows(tmp_path / "two")[-1]["val_loss"] == pytest.approx(rows(tmp_path / "one")[-1]["val_loss"], rel=1e-5)


def evaluate_to_file(out, flags, path):
    """The exact evaluation of a run's weights by as many processes as there are."""
    args = train_lm.get_args(command(out, *flags))
    world = runtime.start("cpu", 1)
    corpus = text.load_text(args.data, args.tokenizer)
    raw, _, _ = train_lm.build_model(args, corpus.tokenizer.vocab_size)
    raw.load_state_dict(load(out)["model"])
    loss, kurtosis = train_lm.evaluate(raw, corpus.val, args, world, torch.float32)
    if world.main:
        Path(path).write_text(json.dumps([loss, kurtosis, raw.training]))


@pytest.mark.parametrize("n", [1, 2])
def test_evaluation_is_exact_on_any_number_of_processes(tmp_path, finished, story, n):
    """All of the text, of which the last window is short, and 10 windows of it, in batches of 3: the mean over targets of a plain loop in float64.
    The kurtosis is that of every n-th window, rank 0's share."""
    tokens, model = text.load_text(story, "bytes").val, LM(**load(finished[0])["args"]["lm"])
    model.load_state_dict(load(finished[0])["model"])
    count = -(-(len(tokens) - 1) // 16)
    assert count % 2 and (len(tokens) - 1) % 16
    for tokens_asked, windows in ((0, range(count)), (160, [i * count // 10 for i in range(10)])):
        flags = [*finished[1], "--eval-tokens", str(tokens_asked), "--micro-batch", "3", "--batch-size", "6"]
        codes, outputs = launch_ranks(n, evaluate_to_file, finished[0], flags, tmp_path / "result.json", folder=tmp_path)
        assert codes == [0] * n, outputs
        loss, kurtosis, training = json.loads((tmp_path / "result.json").read_text())
        assert loss == pytest.approx(reference_loss(model, tokens, windows), rel=1e-6)
        assert kurtosis == pytest.approx(reference_kurtosis(model, tokens, windows[::n]), rel=1e-4, abs=1e-4) and training


# ---------------------------------------------------------------------------------------------------------------------
# compile

def traced(argv):
    """torch.compile with all its wrapping and tracing, and without C++, which takes a minute and a compiler: what it makes of a block, test_train_vit.py asks."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    quick_script(argv)


def test_compile_changes_no_key_and_no_value(tmp_path):
    """Plain, compiled, and compiled under two processes: the same keys everywhere in the checkpoint, no wrapper's prefix, and averaged weights that follow."""
    flags = ["--ema", ".5", *LOOKS_LINEAR]
    plain, first = train(tmp_path / "plain", *flags), train_lm.build_model(train_lm.get_args(command(tmp_path, *flags)), 257)[0].state_dict()
    for n in (1, 2):
        codes, outputs = launch_ranks(n, traced, command(tmp_path / str(n), *flags, "--compile"), folder=tmp_path, timeout=240)
        assert codes == [0] * n, outputs
        other = load(tmp_path / str(n))
        assert keys(other) == keys(plain)
        assert not any(k.startswith(("_orig_mod.", "module.")) for k in [*other["model"], *other["ema"]])
        assert_close(other, plain, tolerance=1e-3)
        assert all(not torch.equal(first[k], other["ema"][k]) for k in first)
        assert any(not torch.equal(other["model"][k], other["ema"][k]) for k in first)


# ---------------------------------------------------------------------------------------------------------------------
# bad input

sentence = functools.partial(one_sentence, script)


@pytest.mark.parametrize("flags, words", [
    (["--num-heads", "3"], ["embed_dim 16", "num_heads 3"]), (["--num-heads", "16"], ["1 dimensions", "num_heads", "even"]),
    (["--embed-dim", "18", "--num-heads", "6"], ["3 dimensions"]), ([*LOOKS_LINEAR, "--mlp-ratio", "1"], ["looks-linear", "mlp_ratio"]),
    (["--mlp-ratio", ".01"], ["mlp"]), (["--mlp-ratio", ".01", "--init", "paper"], ["mlp"]),
    (["--init", "default", "--alpha-qk", "2"], ["--alpha-qk", "--init default", "--init residual-free"]),
    (["--skipless", "--init", "paper", "--alpha-d", "2"], ["--alpha-d", "--init paper"]),
    (["--init", "default", "--mlp-init", "suo"], ["--mlp-init", "--init default"]), (["--embed-lr", ".1"], ["--embed-lr", "adamw"]),
    (["--opt", "muon", "--betas", ".9", ".9"], ["--betas", "muon"]), (["--tokenizer", "klingon"], ["--tokenizer", "klingon", "bytes"]),
    (["--data", "nowhere/at/all"], ["--data", "nowhere/at/all"]), (["--block-size", "100000"], ["--block-size 100000"]),
    (["--micro-batch", "3"], ["--batch-size 8", "--micro-batch 3"]), (["--micro-batch", "16"], ["--batch-size 8", "--micro-batch 16"]),
    (["--shortcut", "decayed"], ["--alpha-min"]), (["--alpha-min", ".5"], ["alpha_min", "residual"]),
    (["--skipless", "--init", "paper", "--alpha-min", ".5"], ["alpha_min", "skipless"]), (["--preset", "huge"], ["--preset", "huge", "paper"]),
    (["--opt", "adam"], ["--opt", "adam", "soap"]), (["--learning-rate", "1"], ["--learning-rate"]), (["--lr", "nan"], ["--lr"]), (["--lr", "0"], ["--lr"]),
    (["--steps", "0"], ["--steps"]), (["--depth", "0"], ["--depth"]), (["--temperature-beta", "0"], ["--temperature-beta"]),
    (["--center", "1.5"], ["--center"]), (["--alpha-qk", "0"], ["--alpha-qk"]), (["--device", "tpu"], ["--device tpu"]),
    (["--attention-scale", "width"], ["--attention-scale"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else "")
def test_bad_flag(tmp_path, story, capsys, flags, words):
    """Exit code 2, one sentence that names the flag and its value, and no folder left behind."""
    said = sentence(capsys, command(tmp_path / "out", "--data", story, *flags))
    assert all(w in said for w in words), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content, words", [(b"", "train"), (b"too short", "needs at least 17"), (b"hello world, this is a short text\n" * 4, "val")])
def test_a_text_without_enough_to_train_or_validate_on(tmp_path, capsys, content, words):
    """Found before anything is written, not at the first evaluation."""
    (tmp_path / "short.txt").write_bytes(content)
    said = sentence(capsys, command(tmp_path / "out", "--data", tmp_path / "short.txt"))
    assert "short.txt" in said and words in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags, words", [
    (["--embed-dim", "32"], ["--embed-dim 16", "--embed-dim 32"]), (["--depth", "3"], ["--depth 2", "--depth 3"]),
    (["--num-heads", "4"], ["--num-heads 2", "--num-heads 4"]), (["--block-size", "8"], ["--block-size 16", "--block-size 8"]),
    (["--mlp-ratio", "2"], ["--mlp-ratio 4.0", "--mlp-ratio 2.0"]), (["--skipless", "--init", "default"], ["--shortcut residual", "--shortcut skipless"]),
    (["--temperature-beta", "1.1"], ["--temperature-beta 1.0", "--temperature-beta 1.1"]),
    (["--attention-scale", "model"], ["--attention-scale head", "--attention-scale model"]), (["--center", ".5"], ["--center 0.0", "--center 0.5"]),
    (["--init", "paper"], ["--init default", "--init paper"]), (["--alpha-u", "2"], ["--init default", "--init residual-free"]),
    (["--opt", "soap"], ["--opt adamw", "--opt soap"]), (["--betas", ".8", ".9"], ["--betas None", "--betas 0.8 0.9"]),
    (["--weight-decay", ".5"], ["--weight-decay 0.01", "--weight-decay 0.5"]),
    (["--precondition-frequency", "3"], ["--precondition-frequency 10", "--precondition-frequency 3"]),
    (["--batch-size", "16"], ["--batch-size 8", "--batch-size 16"]), (["--seed", "1"], ["--seed 0", "--seed 1"]),
    (["--tokenizer", "gpt2-32k"], ["--tokenizer bytes", "--tokenizer gpt2-32k"]), (["--data", "shakespeare"], ["--data shakespeare", "story.txt"]),
    (["--lr", ".5"], ["finished", "--lr", "0.003", "0.5"]),
], ids=lambda value: value[0])
def test_checkpoint_of_another_run(copied, capsys, flags, words):
    """Another architecture, initialisation, optimizer, tokenizer or seed is refused with both values, in flags that exist; the run's files stay as they are."""
    out, own = copied
    before = contents(out)
    said = sentence(capsys, command(out, *own, *flags))
    assert all(w in said for w in words) and "ckpt.pt" in said and "--fresh" in said, said
    assert contents(out) == before


def test_a_checkpoint_keeps_its_constants(tmp_path, capsys):
    flags = ["--steps", "1", "--shortcut", "decayed", "--alpha-min", ".5", "--init", "residual-free"]
    train(tmp_path / "run", *flags)
    for more, words in ((["--alpha-qk", "2"], ["--alpha-qk 3.0", "--alpha-qk 2.0"]), (["--mlp-init", "looks-linear"], ["--mlp-init suo", "--mlp-init looks-linear"]),
                        (["--alpha-min", ".6"], ["--alpha-min 0.5", "--alpha-min 0.6"])):
        said = sentence(capsys, command(tmp_path / "run", *flags, *more))
        assert all(w in said for w in words) and "--fresh" in said, said


@pytest.mark.parametrize("foreign", [dict(train_images=5), dict()])
def test_another_scripts_checkpoint_is_refused_by_name(tmp_path, capsys, foreign):
    """Not by the first flag that differs, and never with a KeyError."""
    runtime.save_checkpoint(tmp_path / "ckpt.pt", dict(model={}, ema=None, optimizer={}, step=1, best=0.0, rng=torch.get_rng_state(), args=foreign))
    said = sentence(capsys, command(tmp_path))
    assert "ckpt.pt was written by another train script" in said and contents(tmp_path).keys() == {"ckpt.pt"}


def test_a_context_longer_than_the_text_is_said_before_a_model_is_built(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_lm, "build_model", None)
    assert "--block-size 100000000 needs" in sentence(capsys, command(tmp_path / "out", "--block-size", "100000000"))


# ---------------------------------------------------------------------------------------------------------------------
# paper 1's initialisation on paper 2's model

def test_paper_1s_init_on_the_lm(tmp_path, capsys):
    """W_V W_O is c^2 times an orthogonal matrix, W_Q W_K^T of a head has its trace near beta d, fc1 and fc2 the singular values of scaled orthogonal ones."""
    args = train_lm.get_args(["--skipless", "--beta", "2", "--c", "1.5"])
    assert (args.init, args.alpha, args.beta, args.c) == ("skipless", 1, 2, 1.5)
    raw, shape, line = train_lm.build_model(args, 257)
    for block in raw.blocks:
        w_q, w_k, w_v = block.attn.qkv.weight.double().chunk(3)
        values = torch.linalg.svdvals(block.attn.proj.weight.double() @ w_v)
        torch.testing.assert_close(values, torch.full((128,), 1.5 ** 2, dtype=torch.float64), rtol=1e-4, atol=0)
        torch.testing.assert_close(torch.linalg.svdvals(block.mlp.fc1.weight.double()), torch.full((128,), 2., dtype=torch.float64), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.linalg.svdvals(block.mlp.fc2.weight.double()), torch.full((128,), 1., dtype=torch.float64), rtol=1e-5, atol=0)
    assert "skipless: alpha 1, beta 2, c 1.5" in line
    model = LM(**shape)
    torch.manual_seed(args.seed)
    twin = LM(**shape)
    init.init_skipless_vit(twin, 1., 2., 1.5)
    assert all(torch.equal(a, b) for a, b in zip(raw.parameters(), twin.parameters())) and not torch.equal(model.blocks[0].mlp.fc1.weight, raw.blocks[0].mlp.fc1.weight)
    assert "--c has no effect with --init residual-free: use --init skipless" in sentence(capsys, command(tmp_path, "--init", "residual-free", "--c", "2"))
    assert "--alpha-qk has no effect with --init skipless: use --init residual-free" in sentence(capsys, command(tmp_path, "--init", "skipless", "--alpha-qk", "2"))
