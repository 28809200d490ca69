"""What `reproduce.py` runs and what it says of it: the tables (commands and cells), and the papers'
claims with the rule that gives each its verdict.

Nothing here is run or measured: every rule is a function of the recorded runs alone, and tests what the
paper's sentence says.
"""
import functools
import math
import re
import statistics
from typing import Callable, NamedTuple


# One entry per cell: label, flags, the paper's number. `lrs` is where the search starts; it moves on
# while the best lies at an end.
ADAMW, SOAP = dict(opt="adamw", lrs=[3e-4, 1e-3, 3e-3]), dict(opt="soap", lrs=[3e-4, 1e-3, 3e-3])
TABLES = {
    "table1": dict(
        title="Paper 1, Table 1: supervised ViT, top-1 %", script="train_vit.py",
        search="--set holdout=0.2 --epochs 5", final="", minutes=1.5, cells=[
            dict(name="residual, default init, AdamW", flags="--shortcut residual --init default",
                 paper=80.3, **ADAMW),
            dict(name="residual, default init, SOAP", flags="--shortcut residual --init default",
                 paper=80.1, **SOAP),
            dict(name="residual, paper init, AdamW", flags="--shortcut residual --init paper",
                 paper=None, **ADAMW),
            dict(name="residual, paper init, SOAP", flags="--shortcut residual --init paper", paper=None,
                 **SOAP),
            dict(name="skipless, default init, AdamW", flags="--shortcut skipless --init default",
                 paper=61.4, **ADAMW),
            dict(name="skipless, default init, SOAP", flags="--shortcut skipless --init default",
                 paper=77.0, **SOAP),
            dict(name="skipless, paper init, AdamW", flags="--shortcut skipless --init paper",
                 paper=78.1, **ADAMW),
            dict(name="skipless, paper init, SOAP", flags="--shortcut skipless --init paper", paper=80.8,
                 **SOAP),
            dict(name="skipless, auto init, AdamW", flags="--shortcut skipless --init auto", paper=None,
                 **ADAMW),
            dict(name="skipless, auto init, SOAP", flags="--shortcut skipless --init auto", paper=None,
                 **SOAP),
            dict(name="skipless, ViT-B's constants (2, .6, 3), SOAP",
                 flags="--shortcut skipless --init skipless --set alpha=2 beta=0.6 c=3", paper=None,
                 **SOAP),
        ]),
    "augmented": dict(
        title="The best cells of Table 1 with crops (--set augment=light), lr as found there, top-1 %",
        script="train_vit.py", search=None, final="--set augment=light", minutes=2.5, cells=[
            dict(name="residual, default init, AdamW", flags="--shortcut residual --init default",
                 paper=80.3, opt="adamw", lrs=[3e-3]),
            dict(name="residual, default init, SOAP", flags="--shortcut residual --init default",
                 paper=80.1, opt="soap", lrs=[3e-3]),
            dict(name="skipless, paper init, SOAP", flags="--shortcut skipless --init paper", paper=80.8,
                 opt="soap", lrs=[1e-3]),
            dict(name="skipless, auto init, SOAP", flags="--shortcut skipless --init auto", paper=None,
                 opt="soap", lrs=[1e-3]),
        ]),
    "depth": dict(
        title="Twice the depth: 24 layers, 5 epochs, lr of 12 layers, top-1 %", script="train_vit.py",
        search=None, final="--depth 24 --epochs 5", minutes=3.3, cells=[
            dict(name="residual, default init, SOAP", flags="--shortcut residual --init default",
                 paper=None, opt="soap", lrs=[3e-3]),
            dict(name="skipless, paper init, SOAP", flags="--shortcut skipless --init paper", paper=None,
                 opt="soap", lrs=[1e-3]),
            dict(name="skipless, auto init, SOAP", flags="--shortcut skipless --init auto", paper=None,
                 opt="soap", lrs=[1e-3]),
        ]),
    "targets": dict(
        title=("The targets of the rule: nano, 5 epochs, lr 1e-3, validated on a fifth of the "
               "training set, top-1 %"),
        script="train_vit.py",
        search=None,
        final="--set holdout=0.2 --epochs 5",
        minutes=1.5,
        cells=[
            dict(
                name=f"skipless, {name}, SOAP",
                flags=(f"--shortcut skipless --init skipless --set alpha={a} beta={b} "
                       f"cancel_mean={share}"), paper=None, opt="soap", lrs=[1e-3])
            for name, a, b, share in (
                ("(1, 2), GELU's mean kept", 1, 2, 0),
                ("(1, 2), GELU's mean cancelled", 1, 2, 1),  # the two ends
                ("diagonal .98, cosine .95", .634, 1.269, .367),
                ("diagonal .95, cosine .95", .482, .963, .535),  # choose_constants(96, 3, 17, 12, ...)
                ("diagonal .90, cosine .95", .388, .776, .729),
                ("diagonal .80, cosine .95", .302, .605, 1))
        ]),
    "tiny": dict(
        title="Constants at size tiny (heads of 64), 3 epochs, lr not searched, top-1 %",
        script="train_vit.py", search=None, final="--size tiny --epochs 3", minutes=2.7, cells=[
            dict(name=f"skipless, ({a:g}, {b:g}, 3), SOAP",
                 flags=f"--shortcut skipless --init skipless --set alpha={a:g} beta={b:g} c=3",
                 paper=None, opt="soap", lrs=[1e-3]) for a, b in ((1.8, 1), (1, 2))
        ]),
}


# Paper 2 at laptop scale: 12 layers of 128, bytes, 300 steps of 1,024 tokens. With a temperature the
# constants and the lr are those without.
FREE, TEMPERATURE = "--shortcut skipless --init auto", (
    "--shortcut skipless --init residual-free --set alpha_qk=4.1 "
    "--temperature-beta 1.1")
TABLES["lm"] = dict(
    title=("Paper 2, language models: loss (nats per byte), what quantisation adds to it, "
           "and how Gaussian activations are"), script="train_lm.py",
    search="--steps 200 --eval-every 200 --set sample_tokens=0",
    final="--eval-every 300 --set sample_tokens=0", minutes=2, cells=[
        dict(name=f"residual, {label}", flags="--shortcut residual --init default", opt=opt, lrs=lrs)
        for label, opt, lrs in (("AdamW", "adamw", [1e-3, 3e-3, 1e-2]),
                                ("KL-Shampoo", "kl-shampoo", [1e-3, 3e-3, 1e-2]),
                                ("SOAP", "soap", [1e-3, 3e-3, 1e-2]),
                                ("Muon", "muon", [1e-3, 3e-3, 1e-2]))
    ] + [
        dict(name=f"skipless, {label}", flags=FREE, opt=opt, lrs=lrs)
        for label, opt, lrs in (("KL-Shampoo", "kl-shampoo", [3e-3, 1e-2, 3e-2]),
                                ("SOAP", "soap", [1e-3, 3e-3, 1e-2]),
                                ("Muon", "muon", [1e-3, 3e-3, 1e-2]),
                                ("AdamW", "adamw", [3e-4, 1e-3, 3e-3]))
    ] + [
        dict(name=f"skipless, temperature 1.1, {label}", flags=TEMPERATURE, opt=opt,
             lrs=f"skipless, {label}") for label, opt in (("KL-Shampoo", "kl-shampoo"), ("SOAP", "soap"),
                                                          ("Muon", "muon"), ("AdamW", "adamw"))
    ] + [
        dict(name="skipless, the paper's constants, KL-Shampoo",
             flags="--shortcut skipless --init paper --temperature-beta 1.1", opt="kl-shampoo",
             lrs=[3e-3, 1e-2, 3e-2])
    ])

# What could close the full-precision gap, one change at a time from the skipless net with SOAP. The lr
# is that of "lm", not searched again.
TABLES["lm-gap"] = dict(
    title="What moves the skipless language model's loss: 200 steps, SOAP, lr 3e-3",
    script="train_lm.py", search=None, final="--steps 200 --eval-every 200 --set sample_tokens=0",
    minutes=2.5, cells=[
        dict(name=f"skipless, {name}", flags=f"--shortcut skipless {flags}", opt="soap", lrs=[3e-3])
        for name, flags in (("the rule: alpha_qk 4.1",
                             "--init auto"), ("alpha_qk 2", "--init residual-free --set alpha_qk=2"),
                            ("alpha_qk 7",
                             "--init residual-free --set alpha_qk=7"), ("all of GELU's mean off",
                                                                        "--init auto --set center=1"),
                            ("looks-linear MLP",
                             "--init residual-free --set alpha_qk=4.1 mlp_init=looks-linear"),
                            ("MLP gain: alpha_u .3",
                             "--init residual-free --set alpha_qk=4.1 alpha_u=0.3"),
                            ("temperature 1.1",
                             "--init residual-free --set alpha_qk=4.1 --temperature-beta 1.1"),
                            ("temperature 1.2",
                             "--init residual-free --set alpha_qk=4.1 --temperature-beta 1.2"))
    ])

# Paper 3, masked autoencoders. `paper` is its linear probe on ImageNet-100 (ViT-B/16). One lr for all
# rows, as in the paper: that of the decayed net's best reconstruction, without labels, on a fifth of the
# training set; the two baselines also at their own best, both under SOAP, and what has no shortcuts at
# all.
MAE = dict(paper=None, opt="adamw", lrs=[1.5e-3])
TABLES["mae"] = dict(
    title="Paper 3, masked autoencoders on scenes, 4 epochs: frozen features probed at every layer",
    script="train_mae.py", search="--set holdout=0.2 --epochs 2 --set knn_every=0 --eval-every 1000000",
    final="--epochs 4 --set knn_every=0 --eval-every 1000000", minutes=2, cells=[
        dict(name=name, flags=flags, paper=paper, opt="adamw",
             lrs=[5e-4, 1.5e-3, 5e-3] if name == "decayed to .6" else "decayed to .6")
        for name, flags, paper in (
            ("residual, original MAE", "--plain", None),
            ("residual, long skips", "--shortcut residual", 76.5),
            ("decayed to .8", "--alpha-min 0.8", None), ("decayed to .7", "--alpha-min 0.7", None),
            ("decayed to .6", "--alpha-min 0.6", 83.6), ("decayed to .5", "--alpha-min 0.5", None),
            ("decayed to .5, no zero init", "--alpha-min 0.5 --set zero_init=false", None),
            ("decayed to .6, attention only", "--alpha-min 0.6 --set alphas=attention-only", 79.3),
            ("decayed to .6, MLP only", "--alpha-min 0.6 --set alphas=mlp-only", 80.6),
            ("decayed to .6, no long skips", "--alpha-min 0.6 --no-long-skips", 61.5),
            ("decayed to .6, cosine schedule", "--alpha-min 0.6 --set alphas=cosine", 82.8),
            ("decayed, weights learned from 1", "--alpha-min 1 --set alphas=learned", 79.5),
            ("residual, both branches x sqrt(.5)", "--shortcut residual --set alphas=scaled-both", 82.6),
            ("residual, only f x sqrt(.5)", "--shortcut residual --set alphas=scaled-branch", 76.9))
    ] + [
        dict(name=name, flags=flags, paper=None, opt=opt, lrs=lrs) for name, flags, opt, lrs in (
            ("residual, original MAE, its own lr", "--plain", "adamw", [5e-4, 1.5e-3, 5e-3]),
            ("residual, long skips, its own lr", "--shortcut residual", "adamw",
             [2e-4, 5e-4, 1.5e-3, 5e-3]),
            ("residual, long skips, SOAP", "--shortcut residual", "soap", [5e-4, 1.5e-3, 5e-3]),
            ("decayed to .6, SOAP", "--alpha-min 0.6", "soap", "residual, long skips, SOAP"),
            ("skipless, AdamW", "--skipless", "adamw", [1.5e-4, 5e-4, 1.5e-3]),
            ("skipless, SOAP", "--skipless", "soap", [5e-4, 1.5e-3, 5e-3]))
    ])
ABLATIONS = [
    c["name"] for c in TABLES["mae"]["cells"]
    if any(word in c["name"] for word in ("only", "no zero", "no long", "cosine", "learned", "both"))
]

# Paper 3, flow matching. `paper` is its FID on ImageNet-1k at 256 px, SiT-XL/2 after 400k steps. Samples
# are judged by the features of a ViT of ours.
JUDGE, SIT = "out/judge-mnist5k", "--data mnist5k --set patch_size=7 samples=0 --eval-every 1000000"
TABLES["sit"] = dict(
    title=("Paper 3, flow matching on digits, 600 steps; loss, Frechet distance of 1,000 "
           "samples, frozen features probed at every layer"), script="train_sit.py",
    search=f"{SIT} --set holdout=0.2 --steps 300", final=f"{SIT} --steps 600",
    needs={JUDGE: "train_vit.py --opt soap --epochs 5"}, minutes=2, cells=[
        dict(name="residual, no long skips", flags="--shortcut residual --no-long-skips", paper=17.2,
             opt="adamw", lrs=[1e-3, 3e-3]),
        dict(name="residual, long skips", flags="--shortcut residual", paper=16.5, opt="adamw",
             lrs=[1e-3, 3e-3]),
        dict(name="decayed to .8, long skips", flags="--alpha-min 0.8", paper=11.8, opt="adamw",
             lrs=[1e-3, 3e-3]),
        dict(name="decayed to alpha_eff .005, long skips", flags="--alpha-eff 0.005", paper=11.8,
             opt="adamw", lrs=[1e-3, 3e-3]),
        dict(name="residual, long skips, the lr of that row", flags="--shortcut residual", paper=None,
             opt="adamw", lrs=[3e-3])
    ])

# Paper 1, self-supervised. `paper` is its linear segmentation of VOC2012, mIoU of a single layer
# (AdamW), and its TokenCut on VOC2012, CorLoc (SOAP): ViT-S/16, 300 epochs of ImageNet-1k. The lr is
# searched without labels, by the information that teacher and student share about held-out images: 0 in
# a collapse.
UNTRAINED = dict(lrs=[1e-12], opt="adamw", paper=None, seeds=1)
TABLES["dino"] = dict(
    title=("Paper 1, self-distillation on emoji, 6 epochs; frozen features on composites: "
           "linear segmentation and object discovery by layer"), script="train_dino.py",
    search="--set holdout=0.2 --epochs 3 --set knn_every=0 --eval-every 1000000",
    final="--set knn_every=6 --eval-every 1000000", minutes=3.5, cells=[
        dict(UNTRAINED, name="residual, untrained", flags="--epochs 0.05 --shortcut residual"),
        dict(UNTRAINED, name="skipless, untrained, auto init",
             flags="--epochs 0.05 --skipless --init auto"),
        dict(UNTRAINED, name="skipless, untrained", flags="--epochs 0.05 --skipless"),
        dict(name="residual, AdamW", flags="--shortcut residual", paper="56.3 / -", opt="adamw",
             lrs=[3e-4, 1e-3, 3e-3]),
        dict(name="residual, SOAP", flags="--shortcut residual", paper="- / 49.4", opt="soap",
             lrs=[3e-4, 1e-3, 3e-3]),
        dict(name="skipless, AdamW", flags="--skipless", paper="62.3 / -", opt="adamw",
             lrs=[1e-4, 3e-4, 1e-3]),
        dict(name="skipless, SOAP", flags="--skipless", paper="- / 63.2", opt="soap",
             lrs=[3e-4, 1e-3, 3e-3]),
        dict(name="skipless, auto init, SOAP", flags="--skipless --init auto", paper=None, opt="soap",
             lrs="skipless, SOAP", seeds=1),
        dict(name="skipless, class token, SOAP", flags="--skipless --set pool=token", paper=None,
             opt="soap", lrs="skipless, SOAP", seeds=1),
        dict(name="residual, class token, SOAP", flags="--shortcut residual --set pool=token",
             paper=None, opt="soap", lrs="residual, SOAP", seeds=1)
    ] + [
        dict(name=f"{name}, {depth} layers, SOAP", flags=f"{flags} --depth {depth}", paper=None,
             opt="soap", lrs=f"{name}, SOAP", seeds=1) for depth in (6, 9, 10)
        for name, flags in (("residual", "--shortcut residual"), ("skipless", "--skipless"))
    ])

# Paper 1 calls its constants insensitive: one changed at a time.
TABLES["constants"] = dict(
    title="Paper 1, how much alpha, beta and c matter: nano, 5 epochs, lr 1e-3, top-1 %",
    script="train_vit.py", search=None, final="--epochs 5", minutes=1, cells=[
        dict(name=f"skipless, ({a:g}, {b:g}, {c:g}), SOAP",
             flags=f"--shortcut skipless --init skipless --set alpha={a:g} beta={b:g} c={c:g}",
             paper=None, opt="soap", lrs=[1e-3])
        for a, b, c in ((1, 2, 3), (.5, 2, 3), (2, 2, 3), (1, 1, 3), (1, 4, 3), (1, 2, 1), (1, 2, 5))
    ])

# Beyond the papers: paper 2's optimizers on paper 1's model.
TABLES["vit-optimizers"] = dict(
    title="Paper 1's network under paper 2's optimizers, and from its initialisation, top-1 %",
    script="train_vit.py", search="--set holdout=0.2 --epochs 5", final="", minutes=2, cells=[
        dict(name="residual, default init, Muon", flags="--shortcut residual --init default", paper=None,
             opt="muon", lrs=[3e-3, 1e-2, 3e-2]),
        dict(name="skipless, paper init, Muon", flags="--shortcut skipless --init paper", paper=None,
             opt="muon", lrs=[3e-4, 1e-3, 3e-3]),
        dict(name="residual, default init, KL-Shampoo", flags="--shortcut residual --init default",
             paper=None, opt="kl-shampoo", lrs=[1e-3, 3e-3, 1e-2]),
        dict(name="skipless, paper init, KL-Shampoo", flags="--shortcut skipless --init paper",
             paper=None, opt="kl-shampoo", lrs=[3e-4, 1e-3, 3e-3]),
        dict(name="skipless, paper 2's init, SOAP", flags="--shortcut skipless --init residual-free",
             paper=None, opt="soap", lrs=[3e-4, 1e-3, 3e-3])
    ])

# Beyond the papers: shortcuts decayed as in paper 3 in the language model, at the lr of either end
# ("lm"); and paper 1's initialisation.
TABLES["lm-beyond"] = dict(
    title=("Paper 2's network with the shortcuts of paper 3, and with the initialisation "
           "of paper 1, SOAP"), script="train_lm.py", search=TABLES["lm"]["search"],
    final=TABLES["lm"]["final"], minutes=2.7, cells=[
        dict(name=f"decayed to alpha_eff {eff:g}, lr {lr:g}, SOAP",
             flags=f"--shortcut decayed --alpha-min {low}", opt="soap", lrs=[lr])
        for eff, low in ((.05, .771), (.005, .62)) for lr in (1e-2, 3e-3)
    ] + [
        dict(name="skipless, paper 1's init, SOAP", flags="--shortcut skipless --init skipless",
             opt="soap", lrs=[1e-3, 3e-3, 1e-2])
    ])

# Paper 3's window for alpha_eff over depth: alpha_min fixed, or chosen for the same product. The decoder
# has half the encoder's blocks, as at 12.
TABLES["mae-depth"] = dict(
    title=("Paper 3, the window for alpha_eff at 6 and 18 layers, 4 epochs: frozen "
           "features probed at every layer"), script="train_mae.py", search=None,
    final=TABLES["mae"]["final"], minutes=3, cells=[
        dict(MAE, name=f"{name}, {depth} layers",
             flags=f"--depth {depth} --set decoder_depth={depth // 2} {flags}") for depth in (6, 18)
        for name, flags in (("residual, long skips", "--shortcut residual"),
                            ("decayed to .6", "--alpha-min 0.6"), ("decayed to alpha_eff .004",
                                                                   "--alpha-eff 0.004"))
    ])

# Paper 3: an objective that is abstract by itself should have no use for the decay. Self-distillation
# stands for it; no zero init here.
TABLES["contrastive"] = dict(
    title=("Paper 3, decay under self-distillation instead of reconstruction: emoji, 3 "
           "epochs, AdamW, lr of the residual net; frozen features by layer"), script="train_dino.py",
    search=None, final="--epochs 3 --set knn_every=3 --eval-every 1000000", after="emoji", minutes=2,
    cells=[
        dict(name=name, flags=flags, paper=None, opt="adamw", lrs=[3e-3])
        for name, flags in (("residual", "--shortcut residual"), ("decayed to .8",
                                                                  "--shortcut decayed --alpha-min 0.8"),
                            ("decayed to .6", "--shortcut decayed --alpha-min 0.6"))
    ])

# Paper 3: what the effective rank of the first epoch says of the last one's features. The runs of "mae"
# with a look at every layer after each epoch.
TABLES["early-rank"] = dict(
    title=("Paper 3, masked autoencoders on scenes, 4 epochs: effective rank of the last "
           "layer and k-NN of the best one, epoch by epoch"), script="train_mae.py", search=None,
    final="--epochs 4 --set knn_every=1 --eval-every 1000000", after=None, minutes=2.2, cells=[
        dict(MAE, name=name, flags=flags)
        for name, flags in (("residual, long skips", "--shortcut residual"),
                            *((f"decayed to .{a}", f"--alpha-min 0.{a}") for a in (8, 7, 6, 5)))
    ])

# Beyond the papers: 4-bit weights, and what finer scales and compensated rounding are worth to either
# net. The lrs are those of "lm".
TABLES["four-bit"] = dict(
    title=("Four bits: loss added (nats per byte) by weights of 4 bits, one scale per "
           "tensor or per channel (weights), per tensor or token (activations), and GPTQ"),
    script="train_lm.py", search=None, final=TABLES["lm"]["final"], after="four_bit", minutes=4, cells=[
        dict(name="residual, SOAP", flags="--shortcut residual --init default", opt="soap", lrs=[1e-2]),
        dict(name="skipless, SOAP", flags=FREE, opt="soap", lrs=[3e-3])
    ])

# Beyond the papers: weights kept orthogonal through training, not only at the start (orthogonal.py).
# The free nets and the residual ones are those of "lm" and "table1".
TABLES["orthogonal"] = dict(
    title="Paper 2's network with all block matrices kept orthogonal through training",
    script="train_lm.py", search=TABLES["lm"]["search"], final=TABLES["lm"]["final"], minutes=3, cells=[
        dict(name="skipless, orthogonal, SOAP", opt="soap", lrs=[1e-3, 3e-3, 9e-3],
             flags="--shortcut skipless --init auto --orthogonal all --set joint_heads=true")])
TABLES["orthogonal-vit"] = dict(
    title="Paper 1's network with V, O and the MLP kept orthogonal through training, top-1 %",
    script="train_vit.py", search="--set holdout=0.2 --epochs 5", final="", minutes=2.5, cells=[
        dict(name="skipless, auto init, orthogonal, SOAP", paper=None, opt="soap",
             lrs=[1e-3, 3e-3, 9e-3], flags="--shortcut skipless --init auto --orthogonal vo-mlp")])

# What decides: the record's entry that the lr search compares, that the table shows, and its sign where
# less is better; a worse score than `useless` is no progress. A language model is searched on the loss
# of its last quarter of training, since batches of the first epoch are new to it.
METRICS = {
    "train_vit.py": dict(search="val_top1", final="val_top1", sign=1,
                         useless=15), "train_lm.py": dict(search="tail_loss", final="val_loss", sign=-1,
                                                          useless=-3),
    "train_mae.py": dict(search="val_loss", final="val_loss", sign=-1,
                         useless=-0.95), "train_sit.py": dict(search="val_loss", final="val_loss",
                                                              sign=-1, useless=-1),
    "train_dino.py": dict(search="shared_information", final="shared_information", sign=1, useless=0.05)
}

# ---------------------------------------------------------------------------------------------------
# Measures: (name, digits, function from a cell's runs to one value per run). Best layers are those of
# the mean over runs, as in the tables.

class Measure(NamedTuple):
    name: str
    digits: int
    of: Callable


def per_run(key, value):
    """The value of every run that holds the key; nan for one that diverged, so that nothing holds
    because it is left out."""
    return lambda runs: [
        math.nan if "diverged" in r else value(r) for r in runs if "diverged" in r or key in r
    ]


def last(key):
    """The last evaluation's value."""
    return per_run(key, lambda r: r[key][-1])


def layer(path, best):
    """The best layer by the mean over runs, or the last one, of a list by layer inside every record;
    path: its keys."""
    def of(runs):
        curve = lambda r: functools.reduce(lambda r, key: r[key], path, r)
        mean = mean_curve([curve(r) for r in runs if path[0] in r])
        return per_run(path[0], lambda r: curve(r)[mean.index(max(mean)) if best else -1])(runs)
    return of


def mean_curve(curves):
    return [statistics.mean(v) for v in zip(*curves)]


def quantized(value):
    return per_run("quantized", lambda r: value(r["quantized"]))


def four_bits(scales, width):
    return Measure(
        f"loss added at {width}, scales and rounding: {scales}", 3,
        per_run("four_bit", lambda r: r["four_bit"][scales][width] - r["four_bit"][scales]["float32"]))


TOP1, LOSS, DRIFT = Measure("top-1 %", 1, last("val_top1")), Measure("loss", 3,
                                                                     last("val_loss")), Measure(
                                                                         "isometry drift", 2,
                                                                         last("isometry_drift"))
WHOLE = Measure("top-1 %, mean over epochs", 1,
                per_run("val_top1", lambda r: statistics.mean(r["val_top1"])))
KURTOSIS = Measure("kurtosis at 2/3 depth", 2,
                   quantized(lambda q: q["kurtosis"][round(len(q["kurtosis"]) * 2 / 3) - 1]))
GROWTH = Measure("kurtosis, last block less first", 2,
                 quantized(lambda q: q["kurtosis"][-1] - q["kurtosis"][0]))
SQNR = Measure("SQNR at 8 bits, dB", 1, quantized(lambda q: q["sqnr8_mean"]))
COST = {
    bits: Measure(f"loss added at A{bits}", 4,
                  quantized(lambda q, b=bits: q["loss"][f"W8A{b}"] - q["loss"]["float32"]))
    for bits in (12, 8, 6, 4)
}
AT = {
    bits: Measure(f"loss at A{bits}", 3, quantized(lambda q, b=bits: q["loss"][f"W8A{b}"]))
    for bits in (8, 6)
}
KNN, LINEAR = (Measure(f"{name}, best layer, %", 1, layer(("probed", "scenes", key), True))
               for name, key in (("k-NN", "knn"), ("linear probe", "linear")))
EMOJI = [
    Measure(f"{name}, best layer, %", 1, layer(("probed", "emoji", key), True))
    for name, key in (("k-NN", "knn"), ("linear probe", "linear"))
]
RANK = Measure("effective rank, last layer", 2, layer(("probed", "scenes", "effective_rank"), False))
ALPHA = Measure("log10 alpha_eff", 1, per_run("alpha_eff", lambda r: math.log10(r["alpha_eff"][-1])))
EARLY_RANK = Measure("effective rank after an epoch", 2,
                     per_run("effective_rank", lambda r: r["effective_rank"][0][-1]))
LATE_KNN = Measure("k-NN at the end, best layer, %", 1,
                   per_run("val_knn", lambda r: max(r["val_knn"][-1])))
MIOU, CORLOC = Measure("mIoU %, last layer", 1, layer(("dense", "miou"),
                                                      False)), Measure("CorLoc %, last layer", 1,
                                                                       layer(("dense", "corloc"), False))
MULTI, FRECHET = Measure("mIoU %, four layers", 1,
                         per_run("dense", lambda r: r["dense"]["miou_multi"])), Measure(
                             "Frechet distance", 2, last("frechet_vit"))


def moments(values):
    """(mean, standard deviation) of the runs that did not diverge; nan where there is none, and 0 where
    there is one."""
    good = [v for v in values if not math.isnan(v)]
    return statistics.mean(good) if good else math.nan, statistics.stdev(good) if len(good) > 1 else 0


def spread(values, digits=1, sign=""):
    """mean ± std; a run that diverged is counted, not averaged."""
    (mean, std), diverged = moments(values), sum(map(math.isnan, values))
    shown = "-" if math.isnan(mean) else f"{mean:{sign}.{digits}f}"
    shown += f" ± {std:.{digits}f}" if len(values) - diverged > 1 else ""
    return shown + (f", {diverged} diverged" if diverged else "")


# ---------------------------------------------------------------------------------------------------
# Tests and verdicts. A test compares two cells' runs: 2 it holds, 1 it may (the noise decides), 0 it
# does not.

VERDICTS = "reproduces", "partly", "does not at this scale", "not measured"


class NotMeasured(Exception):
    """A cell that a rule needs has no run yet."""


class Evidence:
    """The recorded runs that rules ask for, and which of them one rule has asked for. data: {table:
    {key: record}}, and "init": results/init.json."""

    def __init__(self, data):
        self.data, self.seen = data, {}

    def runs(self, table, cell):
        assert any(c["name"] == cell for c in TABLES[table]["cells"]), f"{table} has no cell {cell!r}"
        found = [
            r for key, r in sorted(self.data.get(table, {}).items())
            if key.startswith(f"final | {cell} | seed ")
        ]
        if not found:
            raise NotMeasured(f"no run of {table}, {cell}")
        self.seen[table, cell] = found
        return found

    def __call__(self, measure, table, cell):
        """The measure of every run; cell may name another table: "lm | skipless, SOAP"."""
        table, cell = cell.split(" | ") if " | " in cell else (table, cell)
        values = measure.of(self.runs(table, cell))
        if not values:
            raise NotMeasured(f"no {measure.name} of {table}, {cell}")
        return values


def noise(a, b):
    """Pooled standard deviation of a run; nan where a cell has one seed, so that nothing exceeds it and
    nothing lies within it."""
    return math.sqrt(
        (statistics.variance(a) + statistics.variance(b)) / 2) if min(len(a), len(b)) > 1 else math.nan


def greater(a, b):
    """A cell with a run that diverged is greater than none, and none than it: every comparison with nan
    is false."""
    difference = statistics.mean(a) - statistics.mean(b)
    return 2 if difference > noise(a, b) else int(difference > 0)


def no_less(a, b):
    difference = statistics.mean(a) - statistics.mean(b)
    return 0 if math.isnan(difference) else 2 if difference >= -noise(a, b) else int(
        not difference < -2 * noise(a, b))


def slightly(a, b):
    """a is the greater one, by a tenth of it at most."""
    return min(greater(a, b),
               2 if statistics.mean(a) - statistics.mean(b) <= abs(statistics.mean(a)) / 10 else 0)


def same(a, b):
    difference = abs(statistics.mean(a) - statistics.mean(b))
    return 0 if math.isnan(difference) else 2 if difference <= noise(a, b) else int(not difference > 2 *
                                                                                    noise(a, b))


def verdict(scores):
    """reproduces: every comparison holds; partly: on average they may."""
    return VERDICTS[0] if min(scores) == 2 else VERDICTS[1] if statistics.mean(
        scores) >= 1 else VERDICTS[2]


def label(cell):
    """A cell's name in a list: without its table, and without commas but in brackets."""
    return re.sub(r", (?![^(]*\))", " ", cell.split(" | ")[-1].replace(", default init", ""))


class Order(NamedTuple):
    """The rule of most claims: for every pair (a, b) of cells and every measure, test(a, b); greater
    unless said."""
    table: str
    measures: tuple
    pairs: tuple
    test: Callable = greater

    def ours(self, e, cells):
        return "; ".join(f"{m.name}: " + ", ".join(f"{label(c)} {spread(e(m, self.table, c), m.digits)}"
                                                   for c in cells) for m in self.measures)

    def scores(self, e):
        return [
            self.test(e(m, self.table, a), e(m, self.table, b)) for m in self.measures
            for a, b in self.pairs
        ]

    def __call__(self, e):
        return self.ours(e, list(dict.fromkeys(c for pair in self.pairs
                                               for c in pair))), verdict(self.scores(e))


class All(NamedTuple):
    """Several `Order`s of one table that must all hold; those of the same measures show their cells
    together."""
    orders: tuple

    @property
    def table(self):
        return self.orders[0].table

    def __call__(self, e):
        cells = {}
        for order in self.orders:
            cells.setdefault(order.measures,
                             {}).update(dict.fromkeys(c for pair in order.pairs for c in pair))
        ours = "; ".join(
            Order(self.table, measures, ()).ours(e, list(found)) for measures, found in cells.items())
        return ours, verdict([score for order in self.orders for score in order.scores(e)])


class Trend(NamedTuple):
    """The rule of a correlation over all runs of some cells: it holds beyond 2 / sqrt(runs), some 5 % by
    chance; within that, its sign is right or not."""
    table: str
    links: tuple                # (x, y, sign expected)
    cells: tuple

    def __call__(self, e):
        scores, shown = [], []
        for x, y, sign in self.links:
            xs, ys = ([v for c in self.cells for v in e(m, self.table, c)] for m in (x, y))
            r = sign * statistics.correlation(xs, ys) if min(map(lambda v: max(v) - min(v),
                                                                 (xs, ys))) > 0 else 0.0
            scores.append(2 if r > 2 / math.sqrt(len(xs)) else int(r > 0))
            shown.append(f"correlation of {x.name} and {y.name} {sign * r:+.2f} over {len(xs)} runs")
        return "; ".join(shown), verdict(scores)


def constants_rule(e):
    """No constant costs more than the noise: reproduces; than 5 points, a third of what the
    initialisation as a whole is worth in the paper (16.7): partly."""
    centre, *others = [e(TOP1, "constants", c["name"]) for c in TABLES["constants"]["cells"]]
    names = [c["name"] for c in TABLES["constants"]["cells"]]
    drops = [statistics.mean(centre) - statistics.mean(o) for o in others]
    worst = drops.index(max(drops))
    ours = (f"top-1 %: {names[0]} {spread(centre)}, worst of {len(others)} changes "
            f"{names[worst + 1]} {spread(others[worst])}")
    return ours, VERDICTS[0 if all(d <= noise(centre, o)
                                   for d, o in zip(drops, others)) else 1 if max(drops) < 5 else 2]


# Nats per byte. A language model above it has learned the frequencies of bytes, of entropy 3.05, and no
# more.
UNIGRAM = 3.0


def coupling_rule(e):
    """AdamW stays at the unigram entropy, or diverges, and the spectral optimizers do not: reproduces;
    it learns, but less than under each of them: partly."""
    adamw, others = e(LOSS, "lm", "skipless, AdamW"), [
        e(LOSS, "lm", f"skipless, {o}") for o in ("KL-Shampoo", "SOAP", "Muon")
    ]
    ours = "loss without residuals: " + ", ".join(
        f"{n} {spread(v, 3)}" for n, v in zip(("AdamW", "KL-Shampoo", "SOAP", "Muon"), (adamw, *others)))
    train = all(statistics.mean(o) < UNIGRAM for o in others)
    return ours, VERDICTS[0 if train and not statistics.mean(adamw) <= UNIGRAM else 1 if all(
        greater(adamw, o) == 2 for o in others) else 2]


def trains_rule(e):
    """The loss ends below the unigram entropy in every run: reproduces; in some: partly."""
    losses = e(LOSS, "lm", "skipless, the paper's constants, KL-Shampoo")
    below = sum(loss < UNIGRAM for loss in losses)
    return f"loss {spread(losses, 3)}; bytes' entropy 3.05", VERDICTS[0 if below ==
                                                                      len(losses) else 1 if below else 2]


def growth_rule(e):
    """From the first block to the last kurtosis grows by more with residuals than without, and without
    by less than 1 (a Gaussian's is 0)."""
    growth = {
        net: [e(GROWTH, "lm", f"{net}, {o}") for o in SPECTRAL] for net in ("residual", "skipless")
    }
    scores = [greater(a, b) for a, b in zip(growth["residual"], growth["skipless"])
              ] + [2 if statistics.mean(v) < 1 else 0 for v in growth["skipless"]]
    return f"{GROWTH.name}: " + ", ".join(f"{net} {o} {spread(v, 2)}" for net in growth
                                          for o, v in zip(SPECTRAL, growth[net])), verdict(scores)


def learned(e, cells, table="lm-beyond"):
    """Of cells that differ in lr alone, the one with the lowest loss."""
    return min(cells, key=lambda cell: statistics.mean(e(LOSS, table, cell)))


class Decayed(NamedTuple):
    """The rule of the decayed language models, each at the better of its two lrs: the net of "lm" has
    the greater measure than both."""
    measure: Measure
    net: str
    table: str = "lm-beyond"

    def __call__(self, e):
        cells = [
            learned(e, [f"decayed to alpha_eff {a}, lr {lr}, SOAP" for lr in ("0.01", "0.003")])
            for a in ("0.05", "0.005")
        ]
        order = Order(self.table, (self.measure, ),
                      tuple((f"lm | {self.net}, SOAP", cell) for cell in cells))
        if any(statistics.mean(e(LOSS, self.table, cell)) > UNIGRAM for cell in cells):
            return order.ours(e, cells) + "; nothing learned", VERDICTS[2]
        return order(e)


def picture_rule(e):
    raise NotMeasured("a picture, results/dino_pca.png: no number decides")


def init_rows(e):
    if "init" not in e.data:
        raise NotMeasured("no results/init.json")
    e.seen["init", ""] = [{}] * e.data["init"]["args"]["seeds"]
    return {name: blocks[0]
            for name, blocks in e.data["init"]["rows"].items()}  # the first block, before tokens merge


def skip_rule(e):
    """kappa(K + I) is smaller than kappa(K) by 100 and more: reproduces; smaller: partly."""
    row = init_rows(e)["default"]
    gain = row["kappa_K"] / row["kappa_K_plus_I"]
    return (f"first block, usual init: kappa(K) {row['kappa_K']:.1e}, kappa(K + I) "
            f"{row['kappa_K_plus_I']:.2f}"), VERDICTS[0 if gain > 100 else 1 if gain > 1 else 2]


def init_rule(e):
    """Both halves together lower kappa(K) by 100 and more, and below either half alone: reproduces;
    below the usual init: partly."""
    kappa = {name: row["kappa_K"] for name, row in init_rows(e).items()}
    ours = "kappa(K), first block: " + ", ".join(f"{name} {kappa[name]:.1e}"
                                                 for name in ("default", "VO only", "QK only", "both"))
    both = kappa["both"] < min(kappa["VO only"],
                               kappa["QK only"]) and kappa["both"] < kappa["default"] / 100
    return ours, VERDICTS[0 if both else 1 if kappa["both"] < kappa["default"] else 2]


def proposition_rule(e):
    """kappa(K) / kappa(B) below 10 with the printed constants: reproduces; with those of --init auto:
    partly."""
    ratio = {name: row["kappa_K"] / row["kappa_B"] for name, row in init_rows(e).items()}
    ours = (f"kappa(K) / kappa(B), first block: printed constants {ratio['both']:.0f}, "
            f"--init auto {ratio['auto']:.1f}")
    return ours, VERDICTS[0 if ratio["both"] < 10 else 1 if ratio["auto"] < 10 else 2]


# ---------------------------------------------------------------------------------------------------
# The claims. Pairs (a, b): a's measure is said to be the greater one.

class Claim(NamedTuple):
    id: str
    paper: str
    says: str
    rule: Callable
    table: str = None           # where it is not the rule's
    command: str = None
    headline: object = False    # whether README's first table shows it: True, or the cells that it shows


R, N, P = "residual, default init, ", "skipless, default init, ", "skipless, paper init, "
SPECTRAL = "KL-Shampoo", "SOAP", "Muon"
FIXED, PLAIN, BARE = "decayed to .6", "residual, long skips", "residual, original MAE"
PROBES, ALPHAS = (KNN, LINEAR), ("residual, long skips", "decayed to .8", "decayed to .7",
                                 "decayed to .6", "decayed to .5")
CLAIMS = [
    Claim("p1-skipless-fails", "1",
          ("Without shortcuts and with the usual init AdamW falls from 80.3 to 61.4 % "
           "(Table 1)"), Order("table1", (TOP1, ), ((R + "AdamW", N + "AdamW"), ))),
    Claim(
        "p1-complementary", "1",
        ("Init and SOAP are complementary: neither 61.4, SOAP 77.0, init 78.1, both "
         "80.8 % (Table 1)"),
        Order("table1", (TOP1, ),
              ((P + "SOAP", P + "AdamW"), (P + "SOAP", N + "SOAP"), (P + "AdamW", N + "AdamW"),
               (N + "SOAP", N + "AdamW"))), headline=True),
    Claim("p1-beats-adamw", "1",
          ("Skipless with both, 80.8 %, is ahead of the residual ViT with AdamW, 80.3 "
           "(Table 1)"), Order("table1", (TOP1, ), ((P + "SOAP", R + "AdamW"), )), headline=True),
    Claim("p1-beats-soap", "1",
          ("Skipless with both, 80.8 %, is ahead of the residual ViT with SOAP, 80.1 "
           "(Table 1)"), Order("table1", (TOP1, ), ((P + "SOAP", R + "SOAP"), )), headline=True),
    Claim("p1-as-fast", "1", "It converges as fast as with shortcuts, in the same 300 epochs (abstract)",
          Order("table1", (WHOLE, ), ((P + "SOAP", R + "AdamW"), (P + "SOAP", R + "SOAP")), no_less)),
    Claim("p1-constants", "1", "Results are insensitive to alpha, beta and c (experiments, set-up)",
          constants_rule, "constants"),
    Claim("p1-skip-conditions", "1",
          ("A shortcut adds I to the Jacobian of attention and lifts its smallest "
           "singular values (section 4)"), skip_rule, "init", "python -m evals.conditioning --seeds 3"),
    Claim("p1-init-conditions", "1",
          ("Orthogonal W_V W_O and diagonally dominant W_Q W_K^T together do so without a "
           "shortcut (section 5); attention alone, first block"), init_rule, "init",
          "python -m evals.conditioning --seeds 3"),
    Claim("p1-proposition-2", "1",
          ("With both, kappa(K) is about kappa(B) of the dominant Kronecker term "
           "(Proposition 2)"), proposition_rule, "init", "python -m evals.conditioning --seeds 3"),
    Claim("p1-dense-single", "1",
          ("DINO, linear segmentation of one layer, AdamW: VOC2012 mIoU 56.3 with, 62.3 "
           "without shortcuts (dense prediction table); the last layer"),
          Order("dino", (MIOU, ), (("skipless, AdamW", "residual, AdamW"), ))),
    Claim("p1-dense-multi", "1",
          "The same of several layers: 61.6 with, 65.4 without (dense prediction table)",
          Order("dino", (MULTI, ), (("skipless, AdamW", "residual, AdamW"), ))),
    Claim("p1-tokencut", "1",
          ("TokenCut on DINO's features, SOAP: VOC2012 CorLoc 49.4 with, 63.2 without "
           "(object discovery table)"),
          Order("dino", (CORLOC, ), (("skipless, SOAP", "residual, SOAP"), )), headline=True),
    Claim(
        "p1-depth", "1", ("9 skipless layers find objects better than 12 residual ones, and segment "
                          "about as well with 10 (depth analysis)"),
        All((Order("dino", (CORLOC, ), (("skipless, 9 layers, SOAP", "residual, SOAP"), )),
             Order("dino", (MIOU, ), (("skipless, 10 layers, SOAP", "residual, SOAP"), ), no_less)))),
    Claim("p1-pca", "1",
          ("Principal components of layer 11 are cleaner without shortcuts (its figure of "
           "PCA maps)"), picture_rule, "dino", "python probe.py pca --ckpt out/dino-*"),
    Claim(
        "p2-kurtosis", "2", ("Layer 16 of 24: kurtosis 40,527 (AdamW) and some 750 (KL-Shampoo) with "
                             "residuals, .26 to .31 without (ablation table)"),
        Order("lm", (KURTOSIS, ),
              (("residual, AdamW", "skipless, KL-Shampoo"), *((f"residual, {o}", f"skipless, {o}")
                                                              for o in SPECTRAL))),
        headline=("residual, AdamW", "residual, KL-Shampoo", "skipless, KL-Shampoo")),
    Claim("p2-kurtosis-depth", "2",
          ("Residual streams add up what each block leaves, so kurtosis grows with depth; "
           "without them it does not (analysis, figure by layer)"), growth_rule, "lm"),
    Claim("p2-kurtosis-optimizer",
          "2", ("With residuals AdamW leaves heavier tails (40,527) than KL-Shampoo (some 750) "
                "(ablation table)"),
          Order("lm", (KURTOSIS, ), (("residual, AdamW", "residual, KL-Shampoo"), ))),
    *(Claim(
        f"p2-a{bits}", "2",
        (f"W8A{bits} costs residual nets more than residual-free ones: accuracy falls by "
         f"{numbers} (AdamW, KL-Shampoo; without residuals; main table)"),
        Order("lm", (COST[bits], ), tuple(
            (f"residual, {o}", "skipless, KL-Shampoo") for o in dearer)), headline=bits == 6)
      for bits, numbers, dearer in ((12, ".071, not at all; .002",
                                     ("AdamW", )), (8, ".080, .050; .006", ("AdamW", "KL-Shampoo")),
                                    (6, ".069, .104; .021", ("AdamW", "KL-Shampoo")))),
    Claim(
        "p2-gap", "2", ("In full precision residual-free nets are slightly behind: .435 against .449 "
                        "(AdamW) and .452 (KL-Shampoo) (main table)"),
        Order("lm", (LOSS, ),
              (("skipless, KL-Shampoo", "residual, AdamW"), *((f"skipless, {o}", f"residual, {o}")
                                                              for o in SPECTRAL)), slightly),
        headline=("residual, AdamW", "residual, KL-Shampoo", "skipless, KL-Shampoo", "residual, SOAP",
                  "skipless, SOAP")),
    Claim(
        "p2-trade-off", "2",
        ("Behind before quantisation, residual-free nets are ahead after it: W8A8 .429 "
         "against .402, W8A6 .414 against .348 (main table)"),
        All((Order("lm", (LOSS, ),
                   tuple(("skipless, KL-Shampoo", f"residual, {o}") for o in ("KL-Shampoo", "AdamW"))),
             Order("lm", (AT[8], AT[6]),
                   tuple(
                       (f"residual, {o}", "skipless, KL-Shampoo") for o in ("KL-Shampoo", "AdamW")))))),
    Claim("p2-sqnr", "2", "SQNR at W8A8 is higher without residuals (ablation table)",
          Order("lm", (SQNR, ), tuple((f"skipless, {o}", f"residual, {o}") for o in SPECTRAL))),
    Claim(
        "p2-kl-best", "2", ("Without residuals KL-Shampoo loses least to W8A8: .6 points, SOAP .9, Muon "
                            "1.1 (ablation table)"),
        Order("lm", (COST[8], ),
              (("skipless, SOAP", "skipless, KL-Shampoo"), ("skipless, Muon", "skipless, KL-Shampoo")))),
    Claim("p2-coupling", "2",
          ("AdamW does not train residual-free nets, spectral optimizers do (ablation "
           "table)"), coupling_rule, "lm"),
    Claim(
        "p2-temperature", "2",
        ("A temperature of 1.1 ** -layer keeps attention of deep layers from collapse "
         "(method, third part); judged by the loss"),
        Order("lm", (LOSS, ),
              tuple((f"skipless, {o}", f"skipless, temperature 1.1, {o}") for o in SPECTRAL))),
    Claim(
        "p2-drift", "2", ("Sign-like updates (AdamW) break the isometry of weights by eta sqrt(d) a "
                          "step, spectral ones by eta (method, second part); judged at the end of "
                          "training, each at its own lr"),
        Order(
            "lm", (DRIFT, ),
            tuple((f"{net}, AdamW", f"{net}, {o}") for net in ("residual", "skipless")
                  for o in SPECTRAL))),
    Claim("p2-constants", "2",
          ("alpha_QK .9, alpha_VO 3, alpha_U = alpha_D = 1.5 and temperature 1.1 train "
           "with KL-Shampoo (experiments, set-up)"), trains_rule, "lm"),
    Claim("p3-decay", "3", ("alpha_min .6 against MAE: k-NN 63.9 and 27.4, linear probe 72.7 and 67.8 "
                            "(ImageNet-1k table)"),
          Order("mae", PROBES, ((FIXED, BARE), (FIXED, f"{BARE}, its own lr")))),
    Claim("p3-decay-alone", "3",
          ("Decay against plain shortcuts: linear probe 83.6 and 76.5 (ImageNet-100 "
           "ablation)"), Order("mae", PROBES,
                               ((FIXED, PLAIN), (FIXED, f"{PLAIN}, its own lr"))), headline=True),
    Claim("p3-alpha-min", "3", "alpha_min between .6 and .7 is best (experiments)",
          Order("mae", PROBES, tuple((FIXED, c) for c in (PLAIN, "decayed to .8", "decayed to .5")))),
    Claim(
        "p3-long-skips", "3",
        ("Without encoder-decoder skips the linear probe falls from 83.6 to 61.5, below "
         "plain shortcuts (ablation)"),
        Order("mae", PROBES,
              ((FIXED, "decayed to .6, no long skips"), (PLAIN, "decayed to .6, no long skips")))),
    Claim("p3-branch", "3", "Scaling f alone by sqrt(.5) does nothing: 76.9 against 76.5 (ablation)",
          Order("mae", PROBES, (("residual, only f x sqrt(.5)", PLAIN), ), same)),
    Claim(
        "p3-both", "3", ("Scaling shortcut and branch by sqrt(.5) helps nearly as much as decay: 82.6 "
                         "against 76.5 (ablation)"),
        All((Order("mae", PROBES, (("residual, both branches x sqrt(.5)", PLAIN), )),
             Order("mae", PROBES, (("residual, both branches x sqrt(.5)", FIXED), ), no_less)))),
    Claim(
        "p3-parts", "3", ("Decay on attention alone 79.3 or the MLP alone 80.6 lies between none, 76.5, "
                          "and both, 83.6 (ablation)"),
        Order(
            "mae", PROBES,
            tuple(pair for part in ("attention", "MLP")
                  for pair in ((FIXED, f"{FIXED}, {part} only"), (f"{FIXED}, {part} only", PLAIN))))),
    Claim(
        "p3-schedule", "3", ("The schedule's shape matters little: cosine 82.8, far above none, 76.5 "
                             "(ablation)"),
        All((Order("mae", PROBES, ((f"{FIXED}, cosine schedule", PLAIN), )),
             Order("mae", PROBES, ((f"{FIXED}, cosine schedule", FIXED), ), same)))),
    Claim("p3-learned", "3", "Fixed weights beat learned ones: 83.6 against 79.5 (ablation)",
          Order("mae", PROBES, ((FIXED, "decayed, weights learned from 1"), ))),
    Claim("p3-rank", "3", "The smaller alpha_min, the lower the effective rank (analysis)",
          Trend("mae", ((ALPHA, RANK, 1), ), ALPHAS), headline=True),
    Claim("p3-early-rank", "3",
          ("Early in training already: the smaller alpha_min the lower the rank, and the "
           "better the probes (analysis)"),
          Trend("early-rank", ((ALPHA, EARLY_RANK, 1), (EARLY_RANK, LATE_KNN, -1)), ALPHAS)),
    Claim("p3-zero-init", "3", "alpha_min of .7 and below needs branches that start at zero (method)",
          Order("mae", PROBES, (("decayed to .5", "decayed to .5, no zero init"), ))),
    Claim(
        "p3-window", "3", "The best alpha_min follows depth: alpha_eff between 1e-3 and 1e-2 (analysis)",
        Order(
            "mae-depth", PROBES,
            tuple((f"decayed to alpha_eff .004, {d} layers", f"{c}, {d} layers") for d in (6, 18)
                  for c in (FIXED, PLAIN)))),
    Claim(
        "p3-contrastive", "3",
        ("The method is for generative objectives: contrastive ones do not profit "
         "(limitations)"),
        Order("contrastive", tuple(EMOJI),
              (("residual", "decayed to .8"), ("residual", "decayed to .6")), no_less)),
    Claim(
        "p3-sit", "3", ("SiT-XL/2, FID: 17.2 as it is, 16.5 with long skips, 11.8 with decay (ImageNet "
                        "256 table); here at an alpha_eff of its range"),
        Order(
            "sit", (FRECHET, ),
            tuple((c, "decayed to alpha_eff .005, long skips")
                  for c in ("residual, no long skips", "residual, long skips",
                            "residual, long skips, the lr of that row"))), headline=True),
    Claim("p3-sit-skips", "3", "Long skips alone bring little: FID 17.2 and 16.5 (ImageNet 256 table)",
          Order("sit", (FRECHET, ), (("residual, no long skips", "residual, long skips"), ), slightly)),
    Claim(
        "p3-sit-printed", "3", "The same with the printed alpha_min, .8 (28 layers there, 8 here)",
        Order(
            "sit", (FRECHET, ),
            tuple((c, "decayed to .8, long skips")
                  for c in ("residual, no long skips", "residual, long skips")))),
    Claim(
        "b-auto", "beyond",
        ("Constants chosen from the net's size do no worse than (1, 2, 3), chosen by "
         "hand for this net (ours)"),
        Order("table1", (TOP1, ), tuple((f"skipless, auto init, {o}", P + o) for o in ("AdamW", "SOAP")),
              no_less), headline=True),
    Claim(
        "b-sizes", "beyond",
        ("Paper 1's printed constants (ViT-B) serve heads of half the size as well (not "
         "claimed; what insensitivity would imply)"),
        Order("table1", (TOP1, ), (("skipless, ViT-B's constants (2, .6, 3), SOAP", P + "SOAP"), ),
              no_less), headline=True),
    Claim("b-residual-init", "beyond", "The skipless init helps residual nets too, with AdamW (ours)",
          Order("table1", (TOP1, ), (("residual, paper init, AdamW", R + "AdamW"), ))),
    Claim("b-depth", "beyond", "The rule for the constants carries to 24 layers (ours)",
          Order("depth", (TOP1, ), (("skipless, auto init, SOAP", P + "SOAP"), ), no_less)),
    Claim(
        "b-vit-optimizers", "beyond",
        ("Muon and KL-Shampoo train the skipless ViT no worse than SOAP does (paper 2's "
         "optimizers, paper 1's net)"),
        Order("vit-optimizers", (TOP1, ),
              tuple((P + o, "table1 | " + P + "SOAP") for o in ("Muon", "KL-Shampoo")), no_less)),
    Claim(
        "b-vit-init", "beyond", "Paper 2's init serves paper 1's network as well as its own",
        Order("vit-optimizers", (TOP1, ),
              (("skipless, paper 2's init, SOAP", "table1 | " + P + "SOAP"), ), no_less)),
    Claim(
        "b-lm-init", "beyond", "Paper 1's init serves paper 2's network as well as its own",
        Order("lm-beyond", (LOSS, ), (("lm | skipless, SOAP", "skipless, paper 1's init, SOAP"), ),
              no_less)),
    Claim("b-mae-soap", "beyond",
          ("Decay makes features more abstract under SOAP too (paper 1's optimizer, paper "
           "3's task)"), Order("mae", PROBES, ((f"{FIXED}, SOAP", f"{PLAIN}, SOAP"), ))),
    Claim("b-mae-skipless", "beyond",
          ("Without any shortcut in its encoder, under SOAP, a masked autoencoder's "
           "features are no worse than with decayed ones (paper 1's net, paper 3's task)"),
          Order("mae", PROBES, (("skipless, SOAP", FIXED), ), no_less)),
    Claim(
        "b-gap", "beyond", ("An MLP that starts as the identity (looks-linear) closes a part of the "
                            "full-precision gap (open in paper 2)"),
        Order("lm-gap", (LOSS, ),
              (("skipless, the rule: alpha_qk 4.1", "skipless, looks-linear MLP"), ))),
    *(Claim(f"b-decayed-{what}", "beyond",
            f"A decayed language model {says} (paper 3's shortcut, paper 2's net)", Decayed(
                measure, net), headline=what == "loss") for what, says, measure, net in (
                    ("loss", "is ahead of the skipless one in full precision", LOSS, "skipless"),
                    ("tails", "has lighter tails than the residual one", KURTOSIS, "residual"),
                    ("bits", "loses less to W8A6 than the skipless one", COST[6], "skipless"))),
    Claim(
        "b-four-bit", "beyond",
        ("With a scale per channel and token, 4-bit weights cost the residual-free net "
         "less than the residual one (open in paper 2)"),
        Order("four-bit", (four_bits("channel, token", "W4A8"), four_bits("channel, token", "W4A4")),
              (("residual, SOAP", "skipless, SOAP"), )), headline=True),
    Claim(
        "b-gptq", "beyond",
        ("With GPTQ's rounding on top, 4-bit weights cost the residual-free net less "
         "than the residual one (its outlook names GPTQ)"),
        Order("four-bit",
              (four_bits("channel, token, gptq", "W4A8"), four_bits("channel, token, gptq", "W4A4")),
              (("residual, SOAP", "skipless, SOAP"), ))),
    # Written on 2026-12-01, before the runs.
    Claim("b-orthogonal", "beyond",
          "Weights kept orthogonal through training lower the skipless language model's loss (ours)",
          Order("orthogonal", (LOSS,), (("lm | skipless, SOAP", "skipless, orthogonal, SOAP"),))),
    Claim("b-orthogonal-gap", "beyond",
          "... to that of the residual net under the same optimizer (open in paper 2)",
          Order("orthogonal", (LOSS,),
                (("lm | residual, SOAP", "skipless, orthogonal, SOAP"),), no_less),
          headline=True),
    Claim("b-orthogonal-vit", "beyond",
          "Values, outputs and MLPs kept orthogonal raise the skipless ViT's accuracy under SOAP (ours)",
          Order("orthogonal-vit", (TOP1,), (("skipless, auto init, orthogonal, SOAP",
                                             "table1 | skipless, auto init, SOAP"),))),
]


# What `tools.reproduce` alone runs, in minutes: seed 0 of a few cells, shorter, and the order that the
# papers give them. One seed cannot tell a difference from noise.
def shortened(table, final, lrs):
    return dict(
        TABLES[table], search=None, final=final,
        cells=[dict(c, lrs=[lrs[c["name"]]]) for c in TABLES[table]["cells"] if c["name"] in lrs])


QUICK = {
    "table1": shortened("table1", "--epochs 5",
                        {R + "AdamW": 3e-3, N + "AdamW": 3e-5, P + "AdamW": 3e-4, P + "SOAP": 1e-3}),
    "lm": shortened("lm", "--steps 200 --eval-every 200 --set sample_tokens=0",
                    {"residual, SOAP": 1e-2, "skipless, SOAP": 3e-3}),
    "mae": shortened("mae", TABLES["mae"]["final"], {PLAIN: 1.5e-3, FIXED: 1.5e-3})
}
QUICK_CLAIMS = [
    Claim(
        "quick-1", "1", ("Without shortcuts init and SOAP each help, and both together beat the usual "
                         "ViT"),
        Order("table1", (TOP1, ),
              ((P + "SOAP", P + "AdamW"), (P + "AdamW", N + "AdamW"), (P + "SOAP", R + "AdamW")))),
    Claim("quick-2-tails", "2", "Residuals make activations heavy-tailed",
          Order("lm", (KURTOSIS, ), (("residual, SOAP", "skipless, SOAP"), ))),
    Claim("quick-2-bits", "2", "... and dearer to quantise",
          Order("lm", (COST[6], ), (("residual, SOAP", "skipless, SOAP"), ))),
    Claim("quick-3-features", "3",
          "Decayed shortcuts make a masked autoencoder's features more abstract",
          Order("mae", PROBES, ((FIXED, PLAIN), ))),
    Claim("quick-3-rank", "3", "... and lower their effective rank",
          Order("mae", (RANK, ), ((PLAIN, FIXED), ))),
]


def judge(claim, data):
    """The claim's row, from the recorded runs alone: a dict for claims.json."""
    e = Evidence(data)
    try:
        ours, verdict = claim.rule(e)
        short = claim.rule.ours(e, claim.headline) if isinstance(claim.headline, tuple) else ours
    except NotMeasured as missing:
        ours, short, verdict, e.seen = str(missing), "no run yet", VERDICTS[3], {}
    table = claim.table or claim.rule.table
    runs = [r for found in e.seen.values() for r in found]
    return dict(id=claim.id, paper=claim.paper, says=claim.says, ours=ours, verdict=verdict,
                seeds=min(map(len, e.seen.values()), default=0),
                hardware=sorted({r["hardware"] for r in runs if "hardware" in r}), command=claim.command
                or f"python -m tools.reproduce {table}", headline=short if claim.headline else None)
