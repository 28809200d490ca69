"""The papers' claims at laptop scale: runs the train scripts as a person would, through their command lines, and keeps what they print.

    python reproduce.py table1               paper 1, Table 1: shortcut x init x optimizer, lr search and 3 seeds (55 minutes on two cores)
    python reproduce.py augmented            its best cells with random crops (15 minutes)
    python reproduce.py depth                ours: 24 layers, with and without the rule that chooses the constants (10 minutes)
    python reproduce.py targets              ours: what the two targets of the rule do (5 minutes)
    python reproduce.py tiny                 the constants of ViT-S and of nano at four times nano's size (5 minutes)
    python reproduce.py lm                   paper 2: language models, shortcut x optimizer x temperature, and their quantisation (75 minutes)
    python reproduce.py lm-gap --seeds 1     ours: what moves the skipless model's loss (10 minutes)
    python reproduce.py mae                  paper 3: masked autoencoders, decay and its ablations, probed at every layer (65 minutes)
    python reproduce.py sit                  paper 3: flow matching with decayed shortcuts (30 minutes)
    python reproduce.py dino                 paper 1: self-distillation, dense prediction and object discovery, depth (60 minutes)
    python reproduce.py table1 --list        the runs that remain

Finished runs are kept in results/<claim>.json, so that a killed reproduction continues and a table can grow. The table (results/<claim>.md)
and the figure (results/<claim>.png) are drawn from that file alone.
"""
import datetime
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

import runtime

HERE = Path(__file__).resolve().parent

# One entry per cell: label, flags, the paper's number. `lrs` is where the search starts; it moves on while the best lies at an end.
ADAMW, SOAP = dict(opt="adamw", lrs=[3e-4, 1e-3, 3e-3]), dict(opt="soap", lrs=[3e-4, 1e-3, 3e-3])
CLAIMS = {
    "table1": dict(
        title="Paper 1, Table 1: supervised ViT, top-1 %",
        script="train_vit.py", search="--holdout 0.2 --epochs 5", final="",
        cells=[
            dict(name="residual, default init, AdamW", flags="--shortcut residual --init default", paper=80.3, **ADAMW),
            dict(name="residual, default init, SOAP", flags="--shortcut residual --init default", paper=80.1, **SOAP),
            dict(name="residual, paper init, AdamW", flags="--shortcut residual --init paper", paper=None, **ADAMW),
            dict(name="residual, paper init, SOAP", flags="--shortcut residual --init paper", paper=None, **SOAP),
            dict(name="skipless, default init, AdamW", flags="--shortcut skipless --init default", paper=61.4, **ADAMW),
            dict(name="skipless, default init, SOAP", flags="--shortcut skipless --init default", paper=77.0, **SOAP),
            dict(name="skipless, paper init, AdamW", flags="--shortcut skipless --init paper", paper=78.1, **ADAMW),
            dict(name="skipless, paper init, SOAP", flags="--shortcut skipless --init paper", paper=80.8, **SOAP),
            dict(name="skipless, auto init, AdamW", flags="--shortcut skipless --init auto", paper=None, **ADAMW),
            dict(name="skipless, auto init, SOAP", flags="--shortcut skipless --init auto", paper=None, **SOAP),
            dict(name="skipless, ViT-B's constants (2, .6, 3), SOAP", flags="--shortcut skipless --init skipless --alpha 2 --beta 0.6 --c 3", paper=None, **SOAP),
        ]),
    "augmented": dict(
        title="The best cells of Table 1 with crops (--augment light), lr as found there, top-1 %",
        script="train_vit.py", search=None, final="--augment light",
        cells=[
            dict(name="residual, default init, AdamW", flags="--shortcut residual --init default", paper=80.3, opt="adamw", lrs=[3e-3]),
            dict(name="residual, default init, SOAP", flags="--shortcut residual --init default", paper=80.1, opt="soap", lrs=[3e-3]),
            dict(name="skipless, paper init, SOAP", flags="--shortcut skipless --init paper", paper=80.8, opt="soap", lrs=[1e-3]),
            dict(name="skipless, auto init, SOAP", flags="--shortcut skipless --init auto", paper=None, opt="soap", lrs=[1e-3]),
        ]),
    "depth": dict(
        title="Twice the depth: 24 layers, 5 epochs, lr of 12 layers, top-1 %",
        script="train_vit.py", search=None, final="--depth 24 --epochs 5",
        cells=[
            dict(name="residual, default init, SOAP", flags="--shortcut residual --init default", paper=None, opt="soap", lrs=[3e-3]),
            dict(name="skipless, paper init, SOAP", flags="--shortcut skipless --init paper", paper=None, opt="soap", lrs=[1e-3]),
            dict(name="skipless, auto init, SOAP", flags="--shortcut skipless --init auto", paper=None, opt="soap", lrs=[1e-3]),
        ]),
    "targets": dict(
        title="The targets of the rule: nano, 5 epochs, lr 1e-3, validated on a fifth of the training set, top-1 %",
        script="train_vit.py", search=None, final="--holdout 0.2 --epochs 5",
        cells=[dict(name=f"skipless, {name}, SOAP", flags=f"--shortcut skipless --init skipless --alpha {a} --beta {b} --cancel-mean {share}", paper=None,
                    opt="soap", lrs=[1e-3]) for name, a, b, share in (
            ("(1, 2), GELU's mean kept", 1, 2, 0), ("(1, 2), GELU's mean cancelled", 1, 2, 1),          # the two ends
            ("diagonal .98, cosine .95", .634, 1.269, .367), ("diagonal .95, cosine .95", .482, .963, .535),      # choose_constants(96, 3, 17, 12, ...)
            ("diagonal .90, cosine .95", .388, .776, .729), ("diagonal .80, cosine .95", .302, .605, 1))]),
    "tiny": dict(
        title="Constants at size tiny (heads of 64), 3 epochs, lr not searched, top-1 %",
        script="train_vit.py", search=None, final="--size tiny --epochs 3",
        cells=[dict(name=f"skipless, ({a:g}, {b:g}, 3), SOAP", flags=f"--shortcut skipless --init skipless --alpha {a:g} --beta {b:g} --c 3", paper=None,
                    opt="soap", lrs=[1e-3]) for a, b in ((1.8, 1), (1, 2))]),
}


# Paper 2 at laptop scale: 12 layers of 128, bytes, 300 steps of 1,024 tokens. With a temperature the constants and the lr are those without.
FREE, TEMPERATURE = "--shortcut skipless --init auto", "--shortcut skipless --init residual-free --alpha-qk 4.1 --temperature-beta 1.1"
CLAIMS["lm"] = dict(
    title="Paper 2, language models: loss (nats per byte), what quantisation adds to it, and how Gaussian activations are",
    script="train_lm.py", search="--steps 200 --eval-every 200 --sample-tokens 0", final="--eval-every 300 --sample-tokens 0",
    cells=[dict(name=f"residual, {label}", flags="--shortcut residual --init default", opt=opt, lrs=lrs)
           for label, opt, lrs in (("AdamW", "adamw", [1e-3, 3e-3, 1e-2]), ("KL-Shampoo", "kl-shampoo", [1e-3, 3e-3, 1e-2]),
                                   ("SOAP", "soap", [1e-3, 3e-3, 1e-2]), ("Muon", "muon", [1e-3, 3e-3, 1e-2]))]
    + [dict(name=f"skipless, {label}", flags=FREE, opt=opt, lrs=lrs)
       for label, opt, lrs in (("KL-Shampoo", "kl-shampoo", [3e-3, 1e-2, 3e-2]), ("SOAP", "soap", [1e-3, 3e-3, 1e-2]), ("Muon", "muon", [1e-3, 3e-3, 1e-2]),
                               ("AdamW", "adamw", [3e-4, 1e-3, 3e-3]))]
    + [dict(name=f"skipless, temperature 1.1, {label}", flags=TEMPERATURE, opt=opt, lrs=f"skipless, {label}")
       for label, opt in (("KL-Shampoo", "kl-shampoo"), ("SOAP", "soap"), ("Muon", "muon"), ("AdamW", "adamw"))]
    + [dict(name="skipless, the paper's constants, KL-Shampoo", flags="--shortcut skipless --init paper --temperature-beta 1.1", opt="kl-shampoo", lrs=[3e-3, 1e-2, 3e-2])])

# What could close the full-precision gap, one change at a time from the skipless net with SOAP. The lr is that of "lm", not searched again.
CLAIMS["lm-gap"] = dict(
    title="What moves the skipless language model's loss: 200 steps, SOAP, lr 3e-3",
    script="train_lm.py", search=None, final="--steps 200 --eval-every 200 --sample-tokens 0",
    cells=[dict(name=f"skipless, {name}", flags=f"--shortcut skipless {flags}", opt="soap", lrs=[3e-3]) for name, flags in (
        ("the rule: alpha_qk 4.1", "--init auto"), ("alpha_qk 2", "--alpha-qk 2"), ("alpha_qk 7", "--alpha-qk 7"),
        ("all of GELU's mean off", "--init auto --center 1"),
        ("looks-linear MLP", "--alpha-qk 4.1 --mlp-init looks-linear"), ("MLP gain: alpha_u .3", "--alpha-qk 4.1 --alpha-u 0.3"),
        ("temperature 1.1", "--alpha-qk 4.1 --temperature-beta 1.1"), ("temperature 1.2", "--alpha-qk 4.1 --temperature-beta 1.2"))])

# Paper 3, masked autoencoders. `paper` is its linear probe on ImageNet-100 (ViT-B/16). One lr for all rows, as in the paper: near the best reconstruction of both
# the original and the decayed net (searches without labels, on a fifth of the training set, are in results/mae.json).
MAE = dict(paper=None, opt="adamw", lrs=[1.5e-3])
CLAIMS["mae"] = dict(
    title="Paper 3, masked autoencoders on scenes, 4 epochs: frozen features probed at every layer",
    script="train_mae.py", search=None, final="--epochs 4 --knn-every 0 --eval-every 1000000",
    cells=[dict(MAE, name=name, flags=flags, paper=paper) for name, flags, paper in (
        ("residual, original MAE", "--plain", None),
        ("residual, long skips", "--shortcut residual", 76.5),
        ("decayed to .8", "--alpha-min 0.8", None),
        ("decayed to .7", "--alpha-min 0.7", None),
        ("decayed to .6", "--alpha-min 0.6", 83.6),
        ("decayed to .5", "--alpha-min 0.5", None),
        ("decayed to .5, no zero init", "--alpha-min 0.5 --no-zero-init", None),
        ("decayed to .6, attention only", "--alpha-min 0.6 --decay-on attn", 79.3),
        ("decayed to .6, MLP only", "--alpha-min 0.6 --decay-on mlp", 80.6),
        ("decayed to .6, no long skips", "--alpha-min 0.6 --no-long-skips", 61.5),
        ("decayed to .6, cosine schedule", "--alpha-min 0.6 --schedule cosine", 82.8),
        ("decayed, weights learned from 1", "--alpha-min 1 --learn-alphas", 79.5),
        ("residual, both branches x sqrt(.5)", "--shortcut residual --scaling both", 82.6),
        ("residual, only f x sqrt(.5)", "--shortcut residual --scaling branch", 76.9))])
ABLATIONS = [c["name"] for c in CLAIMS["mae"]["cells"] if any(word in c["name"] for word in ("only", "no zero", "no long", "cosine", "learned", "both"))]

# Paper 3, flow matching. `paper` is its FID on ImageNet-1k at 256 px, SiT-XL/2 after 400k steps. Samples are judged by the features of a ViT of ours.
JUDGE, SIT = "out/judge-mnist5k", "--data mnist5k --patch-size 7 --samples 0 --eval-every 1000000"
CLAIMS["sit"] = dict(
    title="Paper 3, flow matching on digits, 600 steps; loss, Frechet distance of 1,000 samples, frozen features probed at every layer",
    script="train_sit.py", search=f"{SIT} --holdout 0.2 --steps 300",
    final=f"{SIT} --steps 600 --frechet {JUDGE}/ckpt.pt --frechet-set train --measure-samples 1000", needs={JUDGE: "train_vit.py --opt soap --epochs 5"},
    cells=[dict(name="residual, no long skips", flags="--shortcut residual --no-long-skips", paper=17.2, opt="adamw", lrs=[1e-3, 3e-3]),
           dict(name="residual, long skips", flags="--shortcut residual", paper=16.5, opt="adamw", lrs=[1e-3, 3e-3]),
           dict(name="decayed to .8, long skips", flags="--alpha-min 0.8", paper=11.8, opt="adamw", lrs=[1e-3, 3e-3]),
           dict(name="decayed to alpha_eff .005, long skips", flags="--alpha-eff 0.005", paper=None, opt="adamw", lrs=[1e-3, 3e-3]),
           dict(name="residual, long skips, the lr of that row", flags="--shortcut residual", paper=None, opt="adamw", lrs=[3e-3])])

# Paper 1, self-supervised. `paper` is its linear segmentation of VOC2012, mIoU of a single layer (AdamW), and its TokenCut on VOC2012, CorLoc (SOAP): ViT-S/16, 300
# epochs of ImageNet-1k. The lr is searched without labels, by the information that teacher and student share about held-out images: 0 in a collapse.
UNTRAINED = dict(lrs=[1e-12], opt="adamw", paper=None, seeds=1)
CLAIMS["dino"] = dict(
    title="Paper 1, self-distillation on emoji, 6 epochs; frozen features on composites: linear segmentation and object discovery by layer",
    script="train_dino.py", search="--holdout 0.2 --epochs 3 --knn-every 0 --eval-every 1000000", final="--knn-every 6 --eval-every 1000000",
    cells=[dict(UNTRAINED, name="residual, untrained", flags="--epochs 0.05 --shortcut residual"), dict(UNTRAINED, name="skipless, untrained, auto init", flags="--epochs 0.05 --skipless --init auto"),
           dict(UNTRAINED, name="skipless, untrained", flags="--epochs 0.05 --skipless"),
           dict(name="residual, AdamW", flags="--shortcut residual", paper="56.3 / -", opt="adamw", lrs=[3e-4, 1e-3, 3e-3]),
           dict(name="residual, SOAP", flags="--shortcut residual", paper="- / 49.4", opt="soap", lrs=[3e-4, 1e-3, 3e-3]),
           dict(name="skipless, AdamW", flags="--skipless", paper="62.3 / -", opt="adamw", lrs=[1e-4, 3e-4, 1e-3]),
           dict(name="skipless, SOAP", flags="--skipless", paper="- / 63.2", opt="soap", lrs=[3e-4, 1e-3, 3e-3]),
           dict(name="skipless, auto init, SOAP", flags="--skipless --init auto", paper=None, opt="soap", lrs="skipless, SOAP", seeds=1),
           dict(name="skipless, class token, SOAP", flags="--skipless --pool token", paper=None, opt="soap", lrs="skipless, SOAP", seeds=1),
           dict(name="residual, class token, SOAP", flags="--shortcut residual --pool token", paper=None, opt="soap", lrs="residual, SOAP", seeds=1)]
    + [dict(name=f"{name}, {depth} layers, SOAP", flags=f"{flags} --depth {depth}", paper=None, opt="soap", lrs=f"{name}, SOAP", seeds=1)
       for depth in (6, 9) for name, flags in (("residual", "--shortcut residual"), ("skipless", "--skipless"))])

# What decides: the record's entry that the lr search compares, that the table shows, and its sign where less is better; a worse score than `useless` is no
# progress. A language model is searched on the loss of its last quarter of training, since batches of the first epoch are new to it.
METRICS = {"train_vit.py": dict(search="val_top1", final="val_top1", sign=1, useless=15), "train_lm.py": dict(search="tail_loss", final="val_loss", sign=-1, useless=-3),
           "train_mae.py": dict(search="val_loss", final="val_loss", sign=-1, useless=-0.95), "train_sit.py": dict(search="val_loss", final="val_loss", sign=-1, useless=-1),
           "train_dino.py": dict(search="shared_information", final="shared_information", sign=1, useless=0.05)}


def command(claim, cell, lr, seed, extra=""):
    return f"{claim['script']} {cell['flags']} --opt {cell['opt']} --lr {lr:g} --seed {seed} {extra}".strip()


def python(command_line, out):
    """Run one command on one thread."""
    return subprocess.run([sys.executable, *command_line.split(), "--threads", "1", "--out", out], cwd=HERE, capture_output=True, text=True,
                          env=dict(os.environ, OMP_NUM_THREADS="1"))


def run(command_line, after=None):
    """Run one command in a folder of its own; return its measurements, and those of after(folder), a dict. Raises RuntimeError with the script's own words."""
    with tempfile.TemporaryDirectory() as out:
        done = python(command_line, out)
        log = Path(out, "log.jsonl")
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        record = dict(command=f"python {command_line}", date=datetime.date.today().isoformat(), revision=runtime.git_revision(), hardware=hardware())
        if done.returncode == 2 and "not finite" in done.stderr:  # an lr too high is an answer, not a fault
            return dict(record, diverged=done.stderr.strip())
        if done.returncode:
            raise RuntimeError(f"{command_line}\n{done.stderr}")
        record.update(after(out) if after else {})
    losses = [r["loss"] for r in rows if "loss" in r]
    last_quarter = losses[-(-3 * len(losses) // 4):] or losses[-1:]
    for key in ("val_loss", "val_top1", "kurtosis_max", "isometry_drift", "val_knn", "effective_rank", "feature_norm", "alpha_eff", "frechet_vit", "frechet_floor",
                "information", "shared_information", "teacher_entropy", "feature_std", "token_cosine"):
        if any(key in r for r in rows):
            record[key] = [r[key] for r in rows if key in r]
    return dict(record, loss=losses[-1], tail_loss=[statistics.mean(last_quarter)],
                model=next(l.split("model", 1)[1].strip() for l in done.stdout.splitlines() if l.startswith("model")))


def quantize(out):
    """The run's checkpoint through quantize.py: loss per precision, kurtosis of every block's output, SQNR of the Linears' inputs at 8 bits."""
    done = python(f"quantize.py --ckpt {out}/ckpt.pt --bits 12 8 6 4 --eval-tokens 32768", out)
    if done.returncode:
        raise RuntimeError(done.stderr)
    measured = json.loads(Path(out, "quantize.json").read_text())["checkpoints"][0]
    return dict(quantized=dict(loss={row["precision"]: row["loss"] for row in measured["rows"]}, sqnr8_mean=measured["sqnr8_mean"], sqnr8_min=measured["sqnr8_min"],
                               kurtosis=[layer["excess_kurtosis"] for layer in measured["stats"]["block_output"]]))


def probe(out, sets):
    """The run's checkpoint through probe.py, by layer: k-NN (k = 20) and linear probe in %, effective rank, norm. sets: (data, linear probe) pairs."""
    probed = {}
    for name, linear in sets:
        done = python(f"probe.py layers --ckpt {out} --data {name} --k 20 --linear {linear} --cache {out}/features", out)
        if done.returncode:
            raise RuntimeError(done.stderr)
        rows = [r for r in json.loads(Path(out, "probe.json").read_text())["checkpoints"][0]["layers"] if r["layer"] != "final norm"]
        probed[name] = dict(knn=[100 * r["knn"]["20"] for r in rows], linear=[100 * r["linear"] for r in rows],
                            effective_rank=[r["effective_rank"] for r in rows], norm=[r["norm"] for r in rows])
    return dict(probed=probed)


def dense(out):
    """`probe` on emoji, then linear segmentation and TokenCut of the composites at 64 px, by layer, in %: what a checkpoint of train_dino.py goes through."""
    measured = {}
    for what in ("seg", "tokencut"):
        done = python(f"probe.py {what} --ckpt {out} --data composites --img-size 64 --layers all", out)
        if done.returncode:
            raise RuntimeError(done.stderr)
        measured[what] = json.loads(Path(out, f"{what}.json").read_text())["checkpoints"][0]
    single, multi = ([100 * r["miou"] for r in measured["seg"]["rows"] if (len(r["layers"]) > 1) == many] for many in (False, True))
    cut = measured["tokencut"]
    return dict(probe(out, [("emoji", "lbfgs")]), dense=dict(miou=single, miou_multi=multi[0], miou_background=100 * measured["seg"]["baseline"]["miou"],
                                                             corloc=[100 * r["corloc"] for r in cut["rows"]], corloc_centre=100 * cut["centre"], corloc_whole=100 * cut["whole"]))


# What a final run's checkpoint goes through. The scenes have 7 groups and 81 subgroups.
AFTER = {"train_lm.py": quantize, "train_mae.py": functools.partial(probe, sets=(("scenes", "lbfgs"), ("scenes-subgroups", "ridge"))),
         "train_sit.py": functools.partial(probe, sets=(("mnist5k", "lbfgs"),)), "train_dino.py": dense}


def hardware():
    """What a reader needs to compare times and rounding."""
    import torch
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        name = next((l.split(":")[1].strip() for l in Path("/proc/cpuinfo").read_text().splitlines() if l.startswith("model name")), name)
    return f"{os.cpu_count()} CPU cores ({name}), one thread per run, torch {torch.__version__}"


class Results:
    """results/<claim>.json: {"runs": {key: record}, ...}, written after every run."""

    def __init__(self, path):
        self.path = path
        self.data = json.loads(path.read_text()) if path.exists() else dict(runs={})

    def put(self, key, record):
        self.data["runs"][key] = record
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data, indent=1, sort_keys=True) + "\n")
        os.replace(temporary, self.path)

    def final(self, key, line=None, metric="val_top1"):
        """The last value of a run; nan for a run that diverged, None for one not yet made (or made by another command than `line`)."""
        record = self.data["runs"].get(key)
        if record is None or (line is not None and record["command"] != f"python {line}"):
            return None
        return (record.get(metric) or [math.nan])[-1]


def search_key(cell, lr):
    return f"search | {cell['name']} | lr {lr:g}"


def final_key(cell, seed):
    return f"final | {cell['name']} | seed {seed}"


def best_lr(cell, results, metric=METRICS["train_vit.py"]):
    """(best lr so far, lrs still to try). The grid widens by its own step while its best lies at an end: up to 7 lrs, and not where the best is
    useless, since near chance there is nothing to follow."""
    def score(lr):
        value = results.final(search_key(cell, lr), metric=metric["search"])
        return -math.inf if math.isnan(value) else metric["sign"] * value
    if isinstance(cell["lrs"], str):                               # the cell whose lr this one takes over
        claims = sorted(CLAIMS.values(), key=lambda claim: cell not in claim["cells"])     # its own claim first: cells of others may have the same name
        other = next(c for claim in claims for c in claim["cells"] if c["name"] == cell["lrs"])
        return best_lr(other, results, metric)[0], []
    lrs = list(cell["lrs"])
    if len(lrs) == 1:                                              # given, not searched
        return lrs[0], []
    while True:
        missing = [lr for lr in lrs if results.final(search_key(cell, lr)) is None]
        if missing:
            return None, missing
        best = max(lrs, key=score)
        if len(lrs) >= 7 or lrs[0] < best < lrs[-1] or score(best) < metric["useless"]:
            return best, []
        step = lrs[1] / lrs[0]
        lrs = [float(f"{lrs[0] / step:.1g}"), *lrs] if best == lrs[0] else [*lrs, float(f"{lrs[-1] * step:.1g}")]


def pending(claim, results, seeds):
    """The runs that can be made now: [(key, command)]. Searches first; then seed by seed over all cells whose lr is known."""
    jobs = []
    for cell in claim["cells"]:
        lr, missing = best_lr(cell, results, METRICS[claim["script"]])
        jobs += [(search_key(cell, m), command(claim, cell, m, 1000, claim["search"])) for m in missing]
        if lr is not None:
            lines = {final_key(cell, s): command(claim, cell, lr, s, claim["final"]) for s in range(min(seeds, cell.get("seeds", seeds)))}
            jobs += [(key, line) for key, line in lines.items() if results.final(key, line) is None]
    return sorted(jobs, key=lambda job: (job[0].startswith("final"), int(job[0].split()[-1]) if job[0].startswith("final") else 0))


def table(claim, results, seeds):
    """The Markdown table, from the recorded runs alone."""
    lines = ["| cell | paper | ours, mean ± std | seeds | lr |", "|---|---|---|---|---|"]
    for cell in claim["cells"]:
        values = [v for s in range(seeds) if (v := results.final(final_key(cell, s))) is not None]
        lr, _ = best_lr(cell, results)
        if values and lr is not None:
            lines.append(f"| {cell['name']} | {cell['paper'] or '-'} | {spread(values)} | {len(values)} | {lr:g} |")
    return "\n".join(lines) + "\n"


def spread(values, digits=1, sign=""):
    """mean ± std; a run that diverged is counted, not averaged."""
    good = [v for v in values if not math.isnan(v)]
    shown = f"{statistics.mean(good):{sign}.{digits}f}" if good else "-"
    shown += f" ± {statistics.stdev(good):.{digits}f}" if len(good) > 1 else ""
    return shown + (f", {len(values) - len(good)} diverged" if len(good) < len(values) else "")


def lm_table(claim, results, seeds):
    """As `table`, for language models: validation loss, what each activation width adds to it, and how Gaussian the blocks' outputs are."""
    lines = ["| cell | val loss | A12 | A8 | A6 | A4 | kurtosis at ⅔ depth | largest | SQNR at 8 bits, dB | isometry drift | seeds | lr |", "|" + "---|" * 12]
    for cell in claim["cells"]:
        lr, _ = best_lr(cell, results, METRICS["train_lm.py"])
        runs = [results.data["runs"][final_key(cell, s)] for s in range(seeds) if final_key(cell, s) in results.data["runs"]]
        if not runs or lr is None:
            continue
        good = [r for r in runs if "quantized" in r]
        shown = [spread([r["val_loss"][-1] if "val_loss" in r else math.nan for r in runs], 3)]
        shown += [spread([r["quantized"]["loss"][f"W8A{bits}"] - r["quantized"]["loss"]["float32"] for r in good], 3, "+") for bits in (12, 8, 6, 4)]
        kurtosis = [r["quantized"]["kurtosis"] for r in good]
        shown += [spread([k[round(len(k) * 2 / 3) - 1] for k in kurtosis], 2), spread([max(k) for k in kurtosis], 2)]
        shown += [spread([r["quantized"]["sqnr8_mean"] for r in good], 1), spread([r["isometry_drift"][-1] for r in good], 2)]
        lines.append(f"| {cell['name']} | {' | '.join(shown)} | {len(runs)} | {lr:g} |")
    return "\n".join(lines) + "\n"


def by_layer(runs, data, measure):
    """Mean over runs of a measure of probe.py by layer, a list; and the list over runs of those lists. Layer 0 is the embedding."""
    curves = [r["probed"][data][measure] for r in runs]
    return [statistics.mean(v) for v in zip(*curves)], curves


PROBED = {"train_mae.py": dict(data="scenes", paper="paper, linear"), "train_sit.py": dict(data="mnist5k", paper="paper, FID")}


def probed_table(claim, results, seeds):
    """As `table`, for paper 3: what frozen features know. The best layer is that of the mean over seeds. Masked autoencoders have subgroups and norms beside
    it, flow matching the Fréchet distance."""
    script, how = claim["script"], PROBED[claim["script"]]
    flow = script == "train_sit.py"
    heads = ["cell", how["paper"], "val loss", *["Fréchet distance (ViT features)"] * flow, "k-NN, best layer", "last layer", "linear, best layer", "last layer",
             *["subgroups, k-NN"] * (not flow), "effective rank, last layer", *["norm, last layer / embedding"] * (not flow), "alpha_eff", "seeds", "lr"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for cell in claim["cells"]:
        lr, _ = best_lr(cell, results, METRICS[script])
        runs = [results.data["runs"][final_key(cell, s)] for s in range(seeds) if final_key(cell, s) in results.data["runs"]]
        good = [r for r in runs if "probed" in r]
        if not good or lr is None:
            continue
        best = []
        for data, measure in ((how["data"], "knn"), (how["data"], "linear"), *[(how["data"] + "-subgroups", "knn")] * (not flow)):
            mean, curves = by_layer(good, data, measure)
            top = max(range(len(mean)), key=lambda l: mean[l])
            best += [f"{spread([c[top] for c in curves])} ({top})", spread([c[-1] for c in curves])]
        rank, norm = (by_layer(good, how["data"], measure)[1] for measure in ("effective_rank", "norm"))
        shown = [spread([r["val_loss"][-1] if "val_loss" in r else math.nan for r in runs], 4 if flow else 3), *[spread([r["frechet_vit"][-1] for r in good], 2) for _ in range(flow)],
                 *best[:5 - flow], spread([c[-1] for c in rank], 2), *[spread([c[-1] / c[0] for c in norm], 1) for _ in range(not flow)], f"{good[0]['alpha_eff'][-1]:.2g}"]
        lines.append(f"| {cell['name']} | {cell['paper'] or '-'} | {' | '.join(shown)} | {len(runs)} | {lr:g} |")
    return "\n".join(lines) + "\n"


def dense_table(claim, results, seeds):
    """As `table`, for DINO: the monitors of collapse, and what frozen patch features know, of the best layer by the mean over seeds, of the last, and of four layers."""
    heads = ["cell", "paper: mIoU / CorLoc", "shared information, nats", "feature std", "token cosine, last layer", "k-NN, best layer", "last layer", "mIoU, best layer", "last layer", "multi-scale",
             "CorLoc, best layer", "last layer", "seeds", "lr"]
    lines, trivial = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)], None
    for cell in claim["cells"]:
        lr, _ = best_lr(cell, results, METRICS["train_dino.py"])
        runs = [results.data["runs"][final_key(cell, s)] for s in range(seeds) if final_key(cell, s) in results.data["runs"]]
        good = [r for r in runs if "dense" in r]
        if not good or lr is None:
            continue
        trivial = good[0]["dense"]
        shown = [spread([r["shared_information"][-1] for r in good], 2), spread([r["feature_std"][-1] for r in good], 2), spread([r["token_cosine"][-1][-1] for r in good], 2)]
        for curves, first in (([r["probed"]["emoji"]["knn"] for r in good], 0), ([r["dense"]["miou"] for r in good], 1), ([r["dense"]["corloc"] for r in good], 1)):
            mean = [statistics.mean(v) for v in zip(*curves)]
            top = max(range(len(mean)), key=lambda l: mean[l])
            shown += [f"{spread([c[top] for c in curves])} ({top + first})", spread([c[-1] for c in curves])]
        shown.insert(7, spread([r["dense"]["miou_multi"] for r in good]))
        lines.append(f"| {cell['name']} | {cell['paper'] or '-'} | {' | '.join(shown)} | {len(runs)} | {'-' if cell.get('lrs') == UNTRAINED['lrs'] else f'{lr:g}'} |")
    if trivial:
        lines.append(f"| all background / centre box / whole image | - | - | - | - | - | - | {trivial['miou_background']:.1f} | - | - | "
                     f"{trivial['corloc_centre']:.1f} / {trivial['corloc_whole']:.1f} | - | - | - |")
    return "\n".join(lines) + "\n"


def dense_figure(claim, results, seeds, path):
    """Token cosine, k-NN, mIoU and CorLoc by layer, means over seeds; residual nets grey, untrained dotted, AdamW dashed; without the other depths."""
    plt = runtime.pyplot()
    fig, axes = plt.subplots(1, 4, figsize=(17, 3.8), layout="constrained")
    greys = iter([".75", ".1", ".35", ".55"])
    for cell in claim["cells"]:
        runs = [r for s in range(seeds) if "dense" in (r := results.data["runs"].get(final_key(cell, s), {}))]
        if not runs or " layers" in cell["name"]:
            continue
        style = dict(ls=":" if "untrained" in cell["name"] else "--" if "AdamW" in cell["name"] else "-", **(dict(color=next(greys)) if cell["name"].startswith("residual") else {}))
        measures = [[r["token_cosine"][-1] for r in runs], [r["probed"]["emoji"]["knn"] for r in runs], [r["dense"]["miou"] for r in runs], [r["dense"]["corloc"] for r in runs]]
        for axis, curves, first in zip(axes, measures, (0, 0, 1, 1)):
            mean = [statistics.mean(v) for v in zip(*curves)]
            line, = axis.plot(range(first, first + len(mean)), mean, "o", ms=3, label=cell["name"], **style)
            style["color"] = line.get_color()
        trivial = runs[0]["dense"]
    for axis, label in zip(axes, ("cosine between an image's tokens", "k-NN, %", "linear segmentation, mIoU %", "TokenCut, CorLoc %")):
        axis.set(xlabel="layer (0: embedding)", ylabel=label)
        axis.grid(alpha=.3)
    for axis, level in ((axes[2], "miou_background"), (axes[3], "corloc_centre")):
        axis.axhline(trivial[level], color="k", lw=.8, ls="-.")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def layers_figure(claim, results, seeds, path):
    """k-NN, linear probe and effective rank by layer, means over seeds; residual nets grey, SOAP dashed; without the ablations."""
    plt = runtime.pyplot()
    fig, axes = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained")
    greys, shown = iter([".2", ".45", ".7"]), [c for c in claim["cells"] if c["name"] not in ABLATIONS]
    for cell in shown:
        runs = [r for s in range(seeds) if "probed" in (r := results.data["runs"].get(final_key(cell, s), {}))]
        if not runs:
            continue
        style = dict(color=next(greys, ".8")) if cell["name"].startswith("residual") else {}
        for axis, measure in zip(axes, ("knn", "linear", "effective_rank")):
            mean, _ = by_layer(runs, PROBED[claim["script"]]["data"], measure)
            axis.plot(range(len(mean)), mean, "o", ms=3, ls="--" if "SOAP" in cell["name"] else "-", label=cell["name"], **style)
    for axis, label in zip(axes, ("k-NN, %", "linear probe, %", "effective rank, nats")):
        axis.set(xlabel="layer (0: embedding)", ylabel=label)
        axis.grid(alpha=.3)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def show_in_readme(name, text):
    """Put the table between <!-- name --> and <!-- /name --> of README.md, if it has that place; so the README shows what was recorded."""
    path = HERE / "README.md"
    before, start, rest = path.read_text().partition(f"<!-- {name} -->\n")
    if start:
        path.write_text(before + start + text + rest[rest.index(f"<!-- /{name} -->"):])


def lm_figure(claim, results, seeds, path):
    """Left: excess kurtosis of the blocks' outputs over depth. Right: what each activation width costs. Means over seeds; residual nets grey.

    Cells that learned nothing are left out: a net that ignores its input loses nothing by rounding."""
    plt = runtime.pyplot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(12, 3.8), layout="constrained")
    bits, greys = (12, 8, 6, 4), iter([".2", ".4", ".6", ".8"])
    for cell in claim["cells"]:
        runs = [r["quantized"] for s in range(seeds) if "quantized" in (r := results.data["runs"].get(final_key(cell, s), {}))]
        if runs and statistics.mean(r["loss"]["float32"] for r in runs) < -METRICS["train_lm.py"]["useless"]:
            style = dict(color=next(greys, ".8"), ls="--") if cell["name"].startswith("residual,") else {}
            mean = [statistics.mean(v) for v in zip(*(r["kurtosis"] for r in runs))]
            left.plot(range(1, len(mean) + 1), mean, "o", ms=3, label=cell["name"], **{"ls": "-", **style})
            cost = [statistics.mean(r["loss"][f"W8A{b}"] - r["loss"]["float32"] for r in runs) for b in bits]
            right.plot([f"A{b}" for b in bits], cost, "o", ms=3, **{"ls": "-", **style})
    left.set(xlabel="block", ylabel="excess kurtosis of its output", yscale="symlog")
    right.set(xlabel="bits of the activations (weights 8)", ylabel="loss added, nats per token", yscale="log")
    fig.legend(loc="outside right center", frameon=False, fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=.3)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def figure(claim, results, seeds, path):
    """Validation curves, mean over seeds with the range shaded; one panel per optimizer."""
    plt = runtime.pyplot()
    optimizers = list(dict.fromkeys(cell["opt"] for cell in claim["cells"]))
    fig, axes = plt.subplots(1, len(optimizers), figsize=(5 * len(optimizers), 3.8), sharey=True, squeeze=False, constrained_layout=True)
    label = lambda cell: cell["name"].rsplit(",", 1)[0]              # without the optimizer, so that a cell has one colour in all panels
    labels = list(dict.fromkeys(map(label, claim["cells"])))
    skipless = [name for name in labels if name.startswith("skipless")]
    style = lambda name: (f"C{skipless.index(name)}", "-") if name in skipless else ("0.5", ["-", ":"][labels.index(name) % 2])
    for axis, opt in zip(axes[0], optimizers):
        for cell in claim["cells"]:
            runs = [results.data["runs"].get(final_key(cell, s), {}).get("val_top1", []) for s in range(seeds)]
            runs = [r for r in runs if r]
            if cell["opt"] == opt and runs:
                color, line = style(label(cell))
                epochs = range(1, len(runs[0]) + 1)
                axis.plot(epochs, [statistics.mean(v) for v in zip(*runs)], line, color=color, label=label(cell))
                axis.fill_between(epochs, [min(v) for v in zip(*runs)], [max(v) for v in zip(*runs)], color=color, alpha=.15, lw=0)
        axis.set(xlabel="epoch", title={"adamw": "AdamW", "soap": "SOAP"}[opt], ylim=(0, 100))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=.3)
        axis.legend(frameon=False, fontsize=7, loc="lower right")
    axes[0, 0].set_ylabel("validation top-1, %")
    fig.savefig(path, dpi=130)
    plt.close(fig)


TABLES = {"train_vit.py": table, "train_lm.py": lm_table, "train_mae.py": probed_table, "train_sit.py": probed_table, "train_dino.py": dense_table}
FIGURES = {"train_vit.py": figure, "train_lm.py": lm_figure, "train_mae.py": layers_figure, "train_sit.py": layers_figure, "train_dino.py": dense_figure}


def main(argv=None):
    parser = runtime.Parser(description=__doc__)
    parser.add_argument("claim", choices=list(CLAIMS), help="which claim")
    parser.add_argument("--seeds", type=runtime.number(int, low=1), default=3, help="final runs per cell")
    parser.add_argument("--jobs", type=runtime.number(int, low=1), default=os.cpu_count(), help="runs at a time, one thread each")
    parser.add_argument("--list", action="store_true", help="show the runs that remain and stop")
    parser.add_argument("--only", default="", help="only the cells whose name contains this text")
    parser.add_argument("--results", default=str(HERE / "results"), help="folder for the JSON, the table and the figure")
    args = parser.parse_args(argv)
    whole = CLAIMS[args.claim]
    claim = dict(whole, cells=[c for c in whole["cells"] if args.only in c["name"]])
    if not claim["cells"]:
        raise runtime.BadInput(f"--only {args.only!r} names no cell of {args.claim}: {'; '.join(c['name'] for c in whole['cells'])}")
    folder = Path(args.results)
    results = Results(folder / f"{args.claim}.json")
    if args.list:
        jobs = pending(claim, results, args.seeds)
        print("\n".join(f"python {line}" for _, line in jobs) or "nothing remains")
        return
    folder.mkdir(parents=True, exist_ok=True)
    for out, line in whole.get("needs", {}).items():               # a checkpoint that the runs themselves read
        if not (HERE / out / "ckpt.pt").exists() and (done := python(line, out)).returncode:
            raise runtime.BadInput(f"{line} failed, and {args.claim} needs its checkpoint: {done.stderr.strip()}")
    with ThreadPoolExecutor(args.jobs) as pool, tqdm(unit="run", desc=args.claim) as bar:
        running = {}
        while True:
            for key, line in pending(claim, results, args.seeds):
                if key not in running.values() and len(running) < args.jobs:
                    running[pool.submit(run, line, AFTER.get(claim["script"]) if key.startswith("final") else None)] = key
            if not running:
                break
            done = next(as_completed(running))
            key = running.pop(done)
            results.put(key, done.result())
            bar.update()
            tqdm.write(f"{key}: {results.final(key, metric=METRICS[claim['script']]['final']):.4g}")
    text = TABLES[claim["script"]](whole, results, args.seeds)                         # --only limits what runs, not what is shown
    where = sorted({f"{r['hardware']}, {r['date']}" for r in results.data["runs"].values()})
    (folder / f"{args.claim}.md").write_text(f"# {claim['title']}\n\n{text}\n" + "\n".join(where) + "\n")
    if folder == HERE / "results":
        show_in_readme(args.claim, text)
    FIGURES[claim["script"]](whole, results, args.seeds, folder / f"{args.claim}.png")
    print(text)


if __name__ == "__main__":
    runtime.run(main)
