"""The papers' claims at laptop scale: runs the train scripts through their command lines, keeps what
they print, and judges.

    python -m tools.reproduce                quick mode: eight short runs, seed 0, beside the recorded
                                             ones (8 minutes on two cores)
    python -m tools.reproduce all            every table below, 3 seeds (8 hours on two cores)
    python -m tools.reproduce NAME ...       some of them; minutes on two cores:
        table1           42  paper 1, Table 1: shortcut x init x optimizer, lr searched per row
        constants        13  paper 1: alpha, beta and c, one at a time
        dino             57  paper 1: self-distillation, dense prediction, object discovery, depth
        lm               58  paper 2: language models, shortcut x optimizer x temperature, quantised
        mae              82  paper 3: masked autoencoders, decay and its ablations, probed at every layer
        mae-depth        34  paper 3: alpha_eff at 6 and 18 layers
        early-rank       21  paper 3: effective rank epoch by epoch
        contrastive       8  paper 3: decay without reconstruction
        sit              23  paper 3: flow matching with decayed shortcuts
        vit-optimizers   31  beyond: Muon, KL-Shampoo and paper 2's init on paper 1's network
        lm-beyond        27  beyond: decayed shortcuts and paper 1's init in paper 2's network
        four-bit         14  beyond: 4-bit weights, coarse and fine scales, GPTQ
        lm-gap           26  beyond: what moves the skipless language model's loss
        orthogonal       13  beyond: weights kept orthogonal through training, language model
        orthogonal-vit    7  beyond: the same for the ViT
        augmented        15  beyond: Table 1's best cells with crops
        depth 10, targets 9, tiny 8    beyond: the rule that chooses the constants
    python -m tools.reproduce claims         no run: the verdicts anew, from what is recorded
    python -m tools.reproduce NAME --list    the runs that remain, and how long they take

Finished runs are kept in results/<name>.json, so a killed reproduction continues and a table can grow.
Tables (results/<name>.md), figures and verdicts (results/claims.md and .json, by the rules in claims.py)
are drawn from those files alone.
"""
import datetime
import functools
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from tqdm import tqdm

import runtime
from tools import claims, figures
from tools.claims import METRICS, QUICK, TABLES, UNTRAINED, mean_curve, spread
from tools.figures import PROBED, by_layer, final_key

ROOT = Path(__file__).resolve().parent.parent


def command(claim, cell, lr, seed, extra=""):
    return (f"{claim['script']} {cell['flags']} --opt {cell['opt']} --lr {lr:g} --seed "
            f"{seed} {extra}").strip()


def python(command_line, out):
    """Run one command on one thread. It ends with this process: see `end_children`."""
    child = subprocess.Popen([sys.executable, *command_line.split(), "--threads", "1", "--out", out],
                             cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
                             env=dict(os.environ, OMP_NUM_THREADS="1"))
    CHILDREN.add(child)
    stdout, stderr = child.communicate()
    CHILDREN.discard(child)
    return subprocess.CompletedProcess(child.args, child.returncode, stdout, stderr)


CHILDREN = set()                # the commands that run now


def end_children(signum, frame):
    """What a SIGTERM does: nobody would read what the commands find."""
    for child in list(CHILDREN):
        child.kill()
    os._exit(128 + signum)


def run(command_line, after=None):
    """Run one command in a folder of its own; return its measurements, and those of after(folder), a
    dict. Raises RuntimeError with the script's own words."""
    with tempfile.TemporaryDirectory() as out:
        start = time.monotonic()
        done = python(command_line, out)
        log = Path(out, "log.jsonl")
        rows = [json.loads(line)
                for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
        record = dict(command=f"python {command_line}", date=datetime.date.today().isoformat(),
                      revision=runtime.git_revision(), hardware=hardware())
        if done.returncode == 2 and "not finite" in done.stderr:   # an lr too high is an answer
            return dict(record, diverged=done.stderr.strip())
        if done.returncode:
            raise RuntimeError(f"{command_line}\n{done.stderr}")
        record.update(after(out) if after else {}, seconds=round(time.monotonic() - start))
    losses = [r["loss"] for r in rows if "loss" in r]
    last_quarter = losses[-(-3 * len(losses) // 4):] or losses[-1:]
    for key in ("val_loss", "val_top1", "kurtosis_max", "isometry_drift", "val_knn", "effective_rank",
                "feature_norm", "alpha_eff", "information", "shared_information", "teacher_entropy",
                "feature_std", "token_cosine"):
        if any(key in r for r in rows):
            record[key] = [r[key] for r in rows if key in r]
    return dict(
        record, loss=losses[-1], tail_loss=[statistics.mean(last_quarter)], model=next(
            l.split("model", 1)[1].strip() for l in done.stdout.splitlines() if l.startswith("model")))


def measure(line, out, name):
    """Run a measurement of the checkpoint in a folder; return what it wrote of it to
    <folder>/<name>.json."""
    done = python(line, out)
    if done.returncode:
        raise RuntimeError(f"{line}\n{done.stderr}")
    found = json.loads(Path(out, f"{name}.json").read_text(encoding="utf-8"))
    return found.get("checkpoints", [found])[0]


def quantize(out):
    """The run's checkpoint through quantize.py: loss per precision, kurtosis of every block's output,
    SQNR of the Linears' inputs at 8 bits."""
    measured = measure(f"quantize.py --ckpt {out} --bits 12 8 6 4 --eval-tokens 32768", out, "quantize")
    return dict(quantized=dict(
        loss={row["precision"]: row["loss"] for row in measured["rows"]
              }, sqnr8_mean=measured["sqnr8_mean"], sqnr8_min=measured["sqnr8_min"],
        kurtosis=[layer["excess_kurtosis"] for layer in measured["stats"]["block_output"]]))


def four_bit(out):
    """As `quantize`, with weights of 4 bits: the loss by activation width, by scales (of weights, of
    activations) and rounding."""
    measured = {}
    for weights, acts, rounding in (("tensor", "tensor", ""), ("channel", "tensor", ""),
                                    ("channel", "token", ""), ("channel", "token", "gptq")):
        found = measure(
            f"quantize.py --ckpt {out} --weight-bits 4 --bits 8 4 --weight-granularity "
            f"{weights} --act-granularity {acts} "
            f"--weight-rounding {rounding or 'nearest'} --eval-tokens 32768", out, "quantize")
        measured[", ".join(filter(None, (weights, acts, rounding)))] = {
            row["precision"].split()[0]: row["loss"] for row in found["rows"]
        }
    return dict(four_bit=measured)


def probe(out, sets):
    """The run's checkpoint through probe.py, by layer: k-NN (k = 20) and linear probe in %, effective
    rank, norm. sets: (data, linear probe) pairs."""
    probed = {}
    for name, linear in sets:
        found = measure(
            f"probe.py layers --ckpt {out} --data {name} --k 20 --linear {linear} --cache "
            f"{out}/features", out, "probe")
        rows = [r for r in found["layers"] if r["layer"] != "final norm"]
        probed[name] = dict(knn=[100 * r["knn"]["20"]
                                 for r in rows], linear=[100 * r["linear"] for r in rows],
                            effective_rank=[r["effective_rank"] for r in rows],
                            norm=[r["norm"] for r in rows])
    return dict(probed=probed)


def dense(out):
    """`probe` on emoji, then linear segmentation and TokenCut of the composites at 64 px, by layer, in
    %: what a checkpoint of train_dino.py goes through."""
    flags = f"--ckpt {out} --data composites --img-size 64 --layers all"
    seg = measure(f"-m evals.segmentation linear {flags}", out, "seg")
    cut = measure(f"-m evals.discovery {flags}", out, "tokencut")
    single, multi = ([100 * r["miou"] for r in seg["rows"] if (len(r["layers"]) > 1) == many]
                     for many in (False, True))
    return dict(
        probe(out, [("emoji", "lbfgs")]),
        dense=dict(miou=single, miou_multi=multi[0], miou_background=100 * seg["baseline"]["miou"],
                   corloc=[100 * r["corloc"] for r in cut["rows"]], corloc_centre=100 * cut["centre"],
                   corloc_whole=100 * cut["whole"]))


def flow(out):
    """The Frechet distance of 1,000 samples to the training images, on the features of our own judge;
    then `probe` on digits."""
    judge = f"--frechet {claims.JUDGE} --frechet-set train"
    found = measure(f"-m evals.samples --ckpt {out} --count 1000 {judge}", out, "samples")
    distances = {key: [found[key]] for key in ("frechet_vit", "frechet_floor")}
    return dict(probe(out, [("mnist5k", "lbfgs")]), **distances)


# What a final run's checkpoint goes through. The scenes have 7 groups and 81 subgroups.
AFTER = {
    "train_lm.py": quantize,
    "train_mae.py": functools.partial(probe, sets=(("scenes", "lbfgs"), ("scenes-subgroups", "ridge"))),
    "train_sit.py": flow, "train_dino.py": dense,
    "emoji": functools.partial(probe, sets=(("emoji", "lbfgs"), )), "four_bit": four_bit
}


def hardware():
    """What a reader needs to compare times and rounding: cores, processor, torch."""
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else ()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{os.cpu_count()} CPU cores ({name}), one thread per run, torch {torch.__version__}"


class Results:
    """results/<claim>.json: {"runs": {key: record}, ...}, written after every run."""

    def __init__(self, path):
        self.path = path
        self.data = dict(runs={})
        self.read()

    def read(self):
        """Take over what the file holds by now. Raises BadInput where that is no record of runs."""
        if self.path.exists():
            try:
                self.data["runs"].update(
                    dict(json.loads(self.path.read_text(encoding="utf-8"))["runs"].items()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise runtime.BadInput(
                    f"{self.path} is damaged: restore it from the repository, or delete it to run "
                    "its table again") from error

    def put(self, key, record):
        self.read()                                              # another process may have added to it
        self.data["runs"][key] = record
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)

    def final(self, key, line=None, metric="val_top1"):
        """The last value of a run; nan for a run that diverged, None for one not yet made (or made by
        another command than `line`)."""
        record = self.data["runs"].get(key)
        if record is None or (line is not None and record["command"] != f"python {line}"):
            return None
        return (record.get(metric) or [math.nan])[-1]


def search_key(cell, lr):
    return f"search | {cell['name']} | lr {lr:g}"


def best_lr(cell, results, metric=METRICS["train_vit.py"]):
    """(best lr so far, lrs still to try). The grid widens by its own step while its best lies at an end:
    up to 7 lrs, and not where the best is useless, since near chance there is nothing to follow."""
    def score(lr):
        value = results.final(search_key(cell, lr), metric=metric["search"])
        return -math.inf if math.isnan(value) else metric["sign"] * value

    if isinstance(cell["lrs"], str):  # the cell whose lr this one takes over
        claims = sorted(TABLES.values(), key=lambda claim: cell not in claim[
            "cells"])  # its own claim first: cells of others may have the same name
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
        lrs = [float(f"{lrs[0] / step:.1g}"), *lrs
               ] if best == lrs[0] else [*lrs, float(f"{lrs[-1] * step:.1g}")]


def pending(claim, results, seeds):
    """The runs that can be made now: [(key, command)]. Searches first; then seed by seed over all cells
    whose lr is known."""
    jobs = []
    for cell in claim["cells"]:
        lr, missing = best_lr(cell, results, METRICS[claim["script"]])
        jobs += [(search_key(cell, m), command(claim, cell, m, 1000, claim["search"])) for m in missing]
        if lr is not None:
            lines = {
                final_key(cell, s): command(claim, cell, lr, s, claim["final"])
                for s in range(min(seeds, cell.get("seeds", seeds)))
            }
            jobs += [(key, line) for key, line in lines.items() if results.final(key, line) is None]
    return sorted(
        jobs, key=lambda job: (job[0].startswith("final"), int(job[0].split()[-1])
                               if job[0].startswith("final") else 0))


def finished(claim, results, seeds, key):
    """(cell, lr, its final runs, those that hold what `key` names) of every cell that has a run and
    whose lr is known."""
    for cell in claim["cells"]:
        lr, _ = best_lr(cell, results, METRICS[claim["script"]])
        runs = [
            results.data["runs"][final_key(cell, s)] for s in range(seeds)
            if final_key(cell, s) in results.data["runs"]
        ]
        if runs and lr is not None:
            yield cell, lr, runs, [r for r in runs if key in r]


def markdown(heads, rows):
    return "\n".join([
        f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |"
                                                                 for row in rows)
    ]) + "\n"


def table(claim, results, seeds):
    """The Markdown table, from the recorded runs alone."""
    rows = []
    for cell, lr, runs, _ in finished(claim, results, seeds, "val_top1"):
        rows.append([
            cell["name"],
            str(cell["paper"] or "-"),
            spread([(r.get("val_top1") or [math.nan])[-1] for r in runs]),
            str(len(runs)), f"{lr:g}"
        ])
    return markdown(["cell", "paper", "ours, mean ± std", "seeds", "lr"], rows)


def lm_table(claim, results, seeds):
    """As `table`, for language models: validation loss, what each activation width adds to it, and how
    Gaussian the blocks' outputs are."""
    rows = []
    for cell, lr, runs, good in finished(claim, results, seeds, "quantized"):
        shown = [spread([r["val_loss"][-1] if "val_loss" in r else math.nan for r in runs], 3)]
        shown += [
            spread(
                [r["quantized"]["loss"][f"W8A{bits}"] - r["quantized"]["loss"]["float32"]
                 for r in good], 3, "+") for bits in (12, 8, 6, 4)
        ]
        kurtosis = [r["quantized"]["kurtosis"] for r in good]
        shown += [
            spread([k[round(len(k) * 2 / 3) - 1] for k in kurtosis], 2),
            spread([max(k) for k in kurtosis], 2)
        ]
        shown += [
            spread([r["quantized"]["sqnr8_mean"] for r in good], 1),
            spread([r["isometry_drift"][-1] for r in good], 2)
        ]
        rows.append([cell["name"], *shown, str(len(runs)), f"{lr:g}"])
    return markdown([
        "cell", "val loss", "A12", "A8", "A6", "A4", "kurtosis at ⅔ depth", "largest",
        "SQNR at 8 bits, dB", "isometry drift", "seeds", "lr"
    ], rows)


def probed_table(claim, results, seeds):
    """As `table`, for frozen features by layer. The best layer is that of the mean over seeds. Masked
    autoencoders have subgroups beside it, flow matching the Fréchet distance in the place of norms."""
    how = PROBED[claim["script"]]
    flow, mae = (claim["script"] == f"train_{kind}.py" for kind in ("sit", "mae"))
    heads = [
        "cell", how["paper"], "val loss", *["Fréchet distance (ViT features)"] * flow,
        "k-NN, best layer", "last layer", "linear, best layer", "last layer", *["subgroups, k-NN"] * mae,
        "effective rank, last layer", *["norm, last layer / embedding"] * (not flow), "alpha_eff",
        "seeds", "lr"
    ]
    rows = []
    for cell, lr, runs, good in finished(claim, results, seeds, "probed"):
        if not good:
            continue
        best = []
        for data, measure in ((how["data"], "knn"), (how["data"], "linear"),
                              *[(how["data"] + "-subgroups", "knn")] * mae):
            mean, curves = by_layer(good, data, measure)
            top = max(range(len(mean)), key=lambda l: mean[l])
            best += [f"{spread([c[top] for c in curves])} ({top})", spread([c[-1] for c in curves])]
        rank, norm = (by_layer(good, how["data"], measure)[1] for measure in ("effective_rank", "norm"))
        alpha = good[0].get("alpha_eff")
        rows.append([
            cell["name"],
            str(cell["paper"] or "-"),
            spread([r["val_loss"][-1] if "val_loss" in r else math.nan for r in runs], 4 if flow else 3),
            *[spread([r["frechet_vit"][-1] for r in good], 2) for _ in range(flow)], *best[:4 + mae],
            spread([c[-1] for c in rank],
                   2), *[spread([c[-1] / c[0] for c in norm], 1) for _ in range(not flow)],
            f"{alpha[-1]:.2g}" if alpha else "-",
            str(len(runs)), f"{lr:g}"
        ])
    return markdown(heads, rows)


def early_table(claim, results, seeds):
    """As `table`: after every epoch the effective rank of the last layer and the k-NN of the best one,
    of train_mae.py's own look at each."""
    rows, epochs = [], 0
    for cell, _, runs, good in finished(claim, results, seeds, "val_knn"):
        epochs = len(good[0]["val_knn"])
        shown = [spread([r["effective_rank"][e][-1] for r in good], 2) for e in range(epochs)
                 ] + [spread([max(r["val_knn"][e]) for r in good]) for e in range(epochs)]
        rows.append([cell["name"], *shown, str(len(runs))])
    return markdown([
        "cell",
        *[f"{what}, epoch {e + 1}" for what in ("effective rank", "k-NN")
          for e in range(epochs)], "seeds"
    ], rows)


def four_bit_table(claim, results, seeds):
    """As `table`: what rounding adds to the loss, by width and by scales."""
    rows, heads = [], []
    for cell, _, runs, good in finished(claim, results, seeds, "four_bit"):
        found = [r["four_bit"] for r in good]
        pairs = [(scales, width) for width in ("W4A8", "W4A4") for scales in found[0]]
        heads = [f"{width}, {scales}" for scales, width in pairs]
        shown = [
            spread([f[scales][width] - f[scales]["float32"] for f in found], 3, "+")
            for scales, width in pairs
        ]
        rows.append([cell["name"], spread([r["val_loss"][-1] for r in good], 3), *shown, str(len(runs))])
    return markdown(["cell", "val loss", *heads, "seeds"], rows)


def dense_table(claim, results, seeds):
    """As `table`, for DINO: the monitors of collapse, and what frozen patch features know, of the best
    layer by the mean over seeds, of the last, and of four layers."""
    heads = [
        "cell", "paper: mIoU / CorLoc", "shared information, nats", "feature std",
        "token cosine, last layer", "k-NN, best layer", "last layer", "mIoU, best layer", "last layer",
        "multi-scale", "CorLoc, best layer", "last layer", "seeds", "lr"
    ]
    rows, trivial = [], None
    for cell, lr, runs, good in finished(claim, results, seeds, "dense"):
        if not good:
            continue
        trivial = good[0]["dense"]
        shown = [
            spread([r["shared_information"][-1] for r in good], 2),
            spread([r["feature_std"][-1] for r in good], 2),
            spread([r["token_cosine"][-1][-1] for r in good], 2)
        ]
        for curves, first in (([r["probed"]["emoji"]["knn"]
                                for r in good], 0), ([r["dense"]["miou"] for r in good], 1),
                              ([r["dense"]["corloc"] for r in good], 1)):
            mean = mean_curve(curves)
            top = max(range(len(mean)), key=lambda l: mean[l])
            shown += [
                f"{spread([c[top] for c in curves])} ({top + first})",
                spread([c[-1] for c in curves])
            ]
        shown.insert(7, spread([r["dense"]["miou_multi"] for r in good]))
        rows.append([
            cell["name"], cell["paper"] or "-", *shown,
            str(len(runs)), "-" if cell.get("lrs") == UNTRAINED["lrs"] else f"{lr:g}"
        ])
    if trivial:
        rows.append([
            "all background / centre box / whole image", *["-"] * 6, f"{trivial['miou_background']:.1f}",
            "-", "-", f"{trivial['corloc_centre']:.1f} / {trivial['corloc_whole']:.1f}", "-", "-", "-"
        ])
    return markdown(heads, rows)


COMPACT = {
    "lm": ("cell", "val loss", "A8", "A6", "kurtosis at ⅔ depth", "SQNR at 8 bits, dB",
           "seeds"),  # the columns that docs/results.md shows
    "mae": ("cell", "paper, linear", "k-NN, best layer", "linear, best layer",
            "effective rank, last layer", "alpha_eff", "seeds")
}


def compact(name, text):
    """A table as docs/results.md shows it: of some, not all columns."""
    rows = [line.strip("|").split("|") for line in text.splitlines()]
    heads = [h.strip() for h in rows[0]]
    kept = [heads.index(h) for h in COMPACT.get(name, heads)]
    return "".join("|" + "|".join(row[i] for i in kept) + "|\n"
                   for row in rows) if name in COMPACT else text


def show_in_docs(name, text):
    """Put the text between <!-- name --> and <!-- /name --> of README and docs, where that place is."""
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        before, start, rest = path.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
        if start:
            runtime.write_text(path, before + start + text + rest[rest.index(f"<!-- /{name} -->"):])


# ---------------------------------------------------------------------------------------------------

SHOW = {
    "train_vit.py": table, "train_lm.py": lm_table, "train_mae.py": probed_table,
    "train_sit.py": probed_table, "train_dino.py": dense_table, "early-rank": early_table,
    "four-bit": four_bit_table, "contrastive": probed_table
}
DRAW = {
    "train_vit.py": figures.accuracy_figure, "train_lm.py": figures.kurtosis_figure,
    "train_mae.py": figures.layers_figure, "train_sit.py": figures.layers_figure,
    "train_dino.py": figures.dense_figure, "early-rank": None, "four-bit": None,
    "contrastive": figures.layers_figure
}


def outlook(claim, results, seeds):
    """(runs that remain, seconds of one of them): the final runs of cells whose lr is not yet known
    count too. A run takes what its like took, or what the table declares."""
    jobs = pending(claim, results, seeds)
    unknown = [c for c in claim["cells"] if best_lr(c, results, METRICS[claim["script"]])[0] is None]
    known = [r["seconds"] for r in results.data["runs"].values() if "seconds" in r]
    return len(jobs) + sum(min(seeds, c.get("seeds", seeds))
                           for c in unknown), statistics.mean(known) if known else 60 * claim["minutes"]


def say_time(seconds):
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{max(1, round(seconds / 60))} minutes"


def complete(name, claim, results, seeds, jobs):
    """Make the runs of a table that remain, `jobs` at a time, each kept as soon as it ends."""
    for out, line in claim.get("needs", {}).items():  # a checkpoint that the runs themselves read
        if not (ROOT / out / "ckpt.pt").exists() and (done := python(line, out)).returncode:
            raise runtime.BadInput(
                f"{line} failed, and {name} needs its checkpoint: {done.stderr.strip()}")
    after = AFTER.get(claim.get("after", claim["script"]))
    with ThreadPoolExecutor(jobs) as pool, tqdm(unit="run", desc=name,
                                                total=outlook(claim, results, seeds)[0]) as bar:
        running = {}
        while True:
            for key, line in pending(claim, results, seeds):
                if key not in running.values() and len(running) < jobs:
                    running[pool.submit(run, line, after if key.startswith("final") else None)] = key
            if not running:
                break
            left, seconds = outlook(claim, results, seeds)
            bar.total = bar.n + left
            bar.set_postfix_str(f"about {say_time(left * seconds / jobs)} left")
            done = next(as_completed(running))
            key = running.pop(done)
            results.put(key, done.result())
            bar.update()
            tqdm.write(f"{key}: {results.final(key, metric=METRICS[claim['script']]['final']):.4g}")


def present(name, claim, results, folder):
    """The table and the figure of what is recorded, of all seeds as in the verdicts."""
    seeds = 1 + max(
        (int(key.split()[-1]) for key in results.data["runs"] if key.startswith("final")), default=0)
    text = SHOW.get(name, SHOW[claim["script"]])(claim, results, seeds)
    where = sorted({f"{r['hardware']}, {r['date']}" for r in results.data["runs"].values()})
    (folder / f"{name}.md").write_text(f"# {claim['title']}\n\n{text}\n" + "\n".join(where) + "\n",
                                       encoding="utf-8")
    if folder == ROOT / "results":
        show_in_docs(name, compact(name, text))
    if draw := DRAW.get(name, DRAW[claim["script"]]):
        draw(claim, results, seeds, folder / f"{name}.png")
    print(text)


def recorded(folder):
    """{table: its runs} of all that a folder holds, and "init", "pixels": what evals.conditioning wrote,
    and `probe.py layers --pixels`."""
    data = {
        name: Results(folder / f"{name}.json").data["runs"] for name in TABLES
        if (folder / f"{name}.json").exists()
    }
    for name, keys in (("init", ("args", "rows")), ("pixels", ("sets",))):
        if (folder / f"{name}.json").exists():
            try:
                data[name] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
                [data[name][key] for key in keys]
            except (ValueError, KeyError, TypeError) as error:
                raise runtime.BadInput(
                    f"{folder / f'{name}.json'} is damaged: restore it from the repository, or "
                    "delete it") from error
    return data


def headlines(rows):
    """The first table of docs/results.md: the claims that say most."""
    return markdown(["paper", "it says", "ours, mean ± std", "verdict"],
                    [[r["paper"], r["says"], r["headline"], r["verdict"]]
                     for r in rows if r["headline"]])


def count_verdicts(rows):
    words = "reproduce", "in part", "do not at this scale", "not measured yet"
    return f"{len(rows)} claims: " + ", ".join(f"{n} {word}" for v, word in zip(claims.VERDICTS, words)
                                               if (n := sum(r["verdict"] == v for r in rows))) + ".\n"


def judged(folder):
    """Every claim's verdict from what a folder holds: claims.json, claims.md, the tables in docs and a
    figure per paper."""
    data = recorded(folder)
    rows = [claims.judge(claim, data) for claim in claims.CLAIMS]
    (folder / "claims.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    text = markdown(
        ["paper", "it says", "ours, mean ± std", "verdict", "seeds", "again"],
        [[r["paper"], r["says"], r["ours"], r["verdict"],
          str(r["seeds"] or "-"), f"`{r['command']}`"] for r in rows])
    hardware = sorted({h for r in rows for h in r["hardware"]})
    (folder / "claims.md").write_text(
        f"# The papers' claims at laptop scale\n\n{text}\n" + "\n".join(hardware) + "\n",
        encoding="utf-8")
    if folder == ROOT / "results":
        show_in_docs("claims", headlines(rows))
        show_in_docs("verdicts", count_verdicts(rows))
    for draw in (figures.paper1, figures.paper2, figures.paper3):
        try:
            draw(claims.Evidence(data), folder / f"{draw.__name__}.png")
        except claims.NotMeasured:  # a picture of cells that nobody has run yet
            continue
    print(f"{folder / 'claims.md'}: {count_verdicts(rows)}", end="")


def quick_table(folder):
    """The short runs beside the recorded long ones: what the papers say, the order in one seed, the
    verdict of all."""
    short, full = recorded(folder), recorded(ROOT / "results")
    rows = []
    for claim in claims.QUICK_CLAIMS:
        now, then = claims.judge(claim, short), claims.judge(claim, full)
        rows.append([
            claim.paper, claim.says, now["ours"],
            "as said" if now["verdict"] in claims.VERDICTS[:2] else "otherwise", then["ours"],
            then["verdict"]
        ])
    return markdown(["paper", "it says", "short runs", "order", "recorded, full", "verdict"], rows)


def get_args(argv=None):
    number = runtime.number
    parser = runtime.Parser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="tables, or all, or claims (verdicts alone); none is the quick mode")
    parser.add_argument(
        "--seeds", type=number(int, low=1), default=None,
        help="final runs per cell to be made; None is 3, or 1 in quick mode; tables and "
        "verdicts show all that are recorded")
    parser.add_argument("--jobs", type=number(int, low=1), default=os.cpu_count(),
                        help="runs at a time, one thread each")
    parser.add_argument("--list", "--dry-run", action="store_true",
                        help="show the runs that remain, with the time they take, and stop")
    parser.add_argument("--only", default="", help="run only the cells whose name contains this text")
    parser.add_argument(
        "--results", default=None,
        help="folder for JSON, tables and figures; None is results, or out/reproduce-quick "
        "in quick mode")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in (*TABLES, "all", "claims"):
            raise runtime.BadInput(
                f"there is no table {name!r}: give some of {', '.join(TABLES)}, or all, or "
                "claims")
    args.quick = not args.names
    args.tables = QUICK if args.quick else {
        name: TABLES[name] for name in (TABLES if "all" in args.names else args.names)
        if name != "claims"
    }
    args.seeds = args.seeds or (1 if args.quick else 3)
    args.folder = Path(args.results).resolve() if args.results else ROOT / (
        "out/reproduce-quick" if args.quick else "results")
    if args.results == "":
        raise runtime.BadInput("--results is empty: give a folder, or leave it out")
    return args


def selected(args, stored):
    """The tables with the cells that --only leaves. Raises BadInput where it leaves nothing that can be
    run."""
    work = {
        name: dict(table, cells=[c for c in table["cells"] if args.only in c["name"]])
        for name, table in args.tables.items()
    }
    if work and not any(table["cells"] for table in work.values()):
        raise runtime.BadInput(
            f"--only {args.only!r} names no cell: "
            f"{'; '.join(c['name'] for table in args.tables.values() for c in table['cells'])}")
    for name, table in work.items():
        for cell in table["cells"]:
            if isinstance(cell["lrs"],
                          str) and cell["lrs"] not in [c["name"] for c in table["cells"]] and best_lr(
                              cell, stored[name], METRICS[table["script"]])[0] is None:
                raise runtime.BadInput(
                    f"--only {args.only!r}: {cell['name']} of {name} takes over the lr of "
                    f"{cell['lrs']}, which is not yet searched: run that first, or leave --only out")
    return {
        name: table for name, table in work.items() if table["cells"] or not args.tables[name]["cells"]
    }


def main(argv=None):
    args = get_args(argv)
    stored = {name: Results(args.folder / f"{name}.json") for name in args.tables}
    work = selected(args, stored)
    if args.quick and any(key in stored[name].data["runs"] for name in work
                          for key, _ in pending(work[name], stored[name], args.seeds)):
        raise runtime.BadInput(
            f"--results {args.folder} holds full runs, which the short ones of quick mode "
            "would replace: give another folder, or the name of a table")
    if args.list:
        total = 0
        for name, claim in work.items():
            left, seconds = outlook(claim, stored[name], args.seeds)
            total += left * seconds / args.jobs
            print("\n".join([
                f"# {name}: {left} runs, about {say_time(left * seconds / args.jobs)}"
                if left else f"# {name}: nothing remains",
                *(f"python {line}" for _, line in pending(claim, stored[name], args.seeds))
            ]))
        print(f"# about {say_time(total)} in all, {args.jobs} at a time" if total else "nothing remains")
        return
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.folder).close()
    except OSError as error:
        raise runtime.BadInput(
            f"--results {args.folder} cannot be made a folder to write in: choose another") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end_children)
    for name, claim in work.items():
        complete(name, claim, stored[name], args.seeds, args.jobs)
        if not args.quick:
            present(name, args.tables[name], stored[name],
                    args.folder)  # --only limits what runs, not what is shown
    if args.quick:
        text = quick_table(args.folder)
        (args.folder / "quick.md").write_text(text, encoding="utf-8")
        print(text)
    else:
        judged(args.folder)


if __name__ == "__main__":
    runtime.run_script(main)
