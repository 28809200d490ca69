"""The figures of `tools.reproduce`: one for each kind of table, one for each paper; all from recorded
runs."""
import statistics

import runtime
from tools import claims
from tools.claims import ABLATIONS, METRICS, mean_curve


def final_key(cell, seed):
    return f"final | {cell['name']} | seed {seed}"


def by_layer(runs, data, measure):
    """Mean over runs of a measure of probe.py by layer, a list; and the list over runs of those lists.
    Layer 0 is the embedding."""
    curves = [r["probed"][data][measure] for r in runs]
    return mean_curve(curves), curves


PROBED = {
    "train_mae.py": dict(data="scenes", paper="paper, linear"),
    "train_sit.py": dict(data="mnist5k",
                         paper="paper, FID"), "train_dino.py": dict(data="emoji", paper="paper")
}


def dense_figure(claim, results, seeds, path):
    """Token cosine, k-NN, mIoU and CorLoc by layer, means over seeds; residual nets grey, untrained
    dotted, AdamW dashed; without the other depths."""
    plt = runtime.pyplot()
    fig, axes = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    axes = axes.flatten()
    greys = iter([".75", ".1", ".35", ".55"])
    for cell in claim["cells"]:
        runs = [
            r for s in range(seeds) if "dense" in (r := results.data["runs"].get(final_key(cell, s), {}))
        ]
        if not runs or " layers" in cell["name"]:
            continue
        style = dict(ls=":" if "untrained" in cell["name"] else "--" if "AdamW" in cell["name"] else "-",
                     **(dict(color=next(greys)) if cell["name"].startswith("residual") else {}))
        measures = [[r["token_cosine"][-1] for r in runs], [r["probed"]["emoji"]["knn"] for r in runs],
                    [r["dense"]["miou"] for r in runs], [r["dense"]["corloc"] for r in runs]]
        for axis, curves, first in zip(axes, measures, (0, 0, 1, 1)):
            mean = mean_curve(curves)
            line, = axis.plot(range(first, first + len(mean)), mean, "o", ms=3, label=cell["name"],
                              **style)
            style["color"] = line.get_color()
        trivial = runs[0]["dense"]
    for axis, label in zip(axes, ("cosine between an image's tokens", "k-NN, %",
                                  "linear segmentation, mIoU %", "TokenCut, CorLoc %")):
        axis.set(xlabel="layer (0: embedding)", ylabel=label)
        axis.grid(alpha=.3)
    for axis, level in ((axes[2], "miou_background"), (axes[3], "corloc_centre")):
        axis.axhline(trivial[level], color="k", lw=.8, ls="-.")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", frameon=False, ncols=3)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def layers_figure(claim, results, seeds, path):
    """k-NN, linear probe and effective rank by layer, means over seeds; residual nets grey, SOAP dashed;
    without the ablations."""
    plt = runtime.pyplot()
    fig, axes = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained")
    greys, shown = iter([".2", ".45", ".7"]), [c for c in claim["cells"] if c["name"] not in ABLATIONS]
    for cell in shown:
        runs = [
            r for s in range(seeds)
            if "probed" in (r := results.data["runs"].get(final_key(cell, s), {}))
        ]
        if not runs:
            continue
        style = dict(color=next(greys, ".8")) if cell["name"].startswith("residual") else {}
        for axis, measure in zip(axes, ("knn", "linear", "effective_rank")):
            mean, _ = by_layer(runs, PROBED[claim["script"]]["data"], measure)
            axis.plot(range(len(mean)), mean, "o", ms=3, ls="--" if "SOAP" in cell["name"] else "-",
                      label=cell["name"], **style)
    for axis, label in zip(axes, ("k-NN, %", "linear probe, %", "effective rank, nats")):
        axis.set(xlabel="layer (0: embedding)", ylabel=label)
        axis.grid(alpha=.3)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False,
               fontsize=8)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def kurtosis_figure(claim, results, seeds, path):
    """Left: excess kurtosis of the blocks' outputs over depth. Right: what each activation width costs.
    Means over seeds; residual nets grey.

    Cells that learned nothing are left out: a net that ignores its input loses nothing by rounding."""
    plt = runtime.pyplot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(12, 3.8), layout="constrained")
    bits, greys = (12, 8, 6, 4), iter([".2", ".4", ".6", ".8"])
    for cell in claim["cells"]:
        runs = [
            r["quantized"] for s in range(seeds)
            if "quantized" in (r := results.data["runs"].get(final_key(cell, s), {}))
        ]
        if runs and statistics.mean(r["loss"]["float32"]
                                    for r in runs) < -METRICS["train_lm.py"]["useless"]:
            style = dict(color=next(greys, ".8"),
                         ls="--") if cell["name"].startswith("residual,") else {}
            mean = mean_curve([r["kurtosis"] for r in runs])
            left.plot(range(1,
                            len(mean) + 1), mean, "o", ms=3, label=cell["name"], **{"ls": "-", **style})
            cost = [
                statistics.mean(r["loss"][f"W8A{b}"] - r["loss"]["float32"] for r in runs) for b in bits
            ]
            right.plot([f"A{b}" for b in bits], cost, "o", ms=3, **{"ls": "-", **style})
    left.set(xlabel="block", ylabel="excess kurtosis of its output", yscale="symlog")
    right.set(xlabel="bits of the activations (weights 8)", ylabel="loss added, nats per token",
              yscale="log")
    fig.legend(loc="outside right center", frameon=False, fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=.3)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def accuracy_figure(claim, results, seeds, path):
    """Validation curves, mean over seeds with the range shaded; one panel per optimizer."""
    plt = runtime.pyplot()
    optimizers = list(dict.fromkeys(cell["opt"] for cell in claim["cells"]))
    fig, axes = plt.subplots(1, len(optimizers), figsize=(5 * len(optimizers), 3.8), sharey=True,
                             squeeze=False, constrained_layout=True)
    label = lambda cell: cell["name"].rsplit(",", 1)[
        0]  # without the optimizer, so that a cell has one colour in all panels
    labels = list(dict.fromkeys(map(label, claim["cells"])))
    skipless = [name for name in labels if name.startswith("skipless")]
    style = lambda name: (f"C{skipless.index(name)}", "-") if name in skipless else ("0.5", ["-", ":"][
        labels.index(name) % 2])
    for axis, opt in zip(axes[0], optimizers):
        for cell in claim["cells"]:
            runs = [
                results.data["runs"].get(final_key(cell, s), {}).get("val_top1", [])
                for s in range(seeds)
            ]
            runs = [r for r in runs if r]
            if cell["opt"] == opt and runs:
                color, line = style(label(cell))
                epochs = range(1, len(runs[0]) + 1)
                axis.plot(epochs, mean_curve(runs), line, color=color, label=label(cell))
                axis.fill_between(epochs, [min(v) for v in zip(*runs)], [max(v) for v in zip(*runs)],
                                  color=color, alpha=.15, lw=0)
        axis.set(
            xlabel="epoch",
            title={"adamw": "AdamW", "soap": "SOAP", "muon": "Muon",
                   "kl-shampoo": "KL-Shampoo"}[opt], ylim=(0, 100))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=.3)
        axis.legend(frameon=False, fontsize=7, loc="lower right")
    axes[0, 0].set_ylabel("validation top-1, %")
    fig.savefig(path, dpi=130)
    plt.close(fig)


GREY, BLUE, ORANGE = "#6e7681", "#2f81f7", "#d9701e"
GREEN, PINK, VIOLET = "#2da44e", "#db61a2", "#a371f7"


def paper_figure(panels, path):
    """panels: functions that each draw on one axis. Grey text on a transparent ground is legible in both
    of GitHub's themes."""
    plt = runtime.pyplot()
    parts = [f"{part}.color" for part in ("text", "xtick", "ytick", "grid")]
    parts += [f"axes.{part}color" for part in ("label", "edge", "title")]
    style = {
        "axes.facecolor": "none", "axes.grid": True, "axes.axisbelow": True, "grid.alpha": .3,
        "legend.frameon": False, "font.size": 9.5, "legend.fontsize": 8.5, "axes.titlesize": 10.5
    }
    with plt.rc_context(dict.fromkeys(parts, GREY) | style):
        fig, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), layout="constrained")
        for axis, panel in zip(axes, panels):
            panel(axis)
        fig.savefig(path, dpi=150, transparent=True)
        plt.close(fig)


def whole_runs(e, table, cell):
    """Those that did not diverge: a curve of half a run would end in nothing."""
    if not (found := [r for r in e.runs(table, cell) if "diverged" not in r]):
        raise claims.NotMeasured(f"every run of {table}, {cell} diverged")
    return found


def paper1(e, path):
    """Accuracy of shortcut x init x optimizer, and by epoch."""
    nets = {
        "residual": "residual, default init", "residual\n+ init": "residual, paper init",
        "skipless": "skipless, default init", "skipless\n+ init": "skipless, paper init"
    }

    def corners(axis):
        for shift, opt, color in ((-.2, "AdamW", BLUE), (.2, "SOAP", ORANGE)):
            means, spreads = zip(*(claims.moments(e(claims.TOP1, "table1", f"{net}, {opt}"))
                                   for net in nets.values()))
            bars = axis.bar([i + shift for i in range(len(nets))], means, .38, yerr=spreads, color=color,
                            ecolor=GREY, capsize=2, label=opt)
            axis.bar_label(bars, fmt="%.1f", fontsize=7.5, color=GREY, padding=2)
        axis.set(xticks=range(len(nets)), xticklabels=list(nets), ylabel="top-1, %", ylim=(0, 112),
                 title="without shortcuts, init and SOAP are both needed")
        axis.legend(loc="upper center", ncols=2)

    def epochs(axis):
        for cell, color, style in (("residual, default init, AdamW", BLUE,
                                    "--"), ("residual, default init, SOAP", ORANGE,
                                            "--"), ("skipless, default init, SOAP", PINK,
                                                    "-"), ("skipless, paper init, AdamW", BLUE, "-"),
                                   ("skipless, paper init, SOAP", ORANGE, "-")):
            curves = [r["val_top1"] for r in whole_runs(e, "table1", cell)]
            axis.plot(range(1,
                            len(curves[0]) + 1), mean_curve(curves), style, color=color,
                      label=claims.label(cell).replace(" paper", ""))
        axis.set(xlabel="epoch", title="validation accuracy by epoch", ylim=(0, 100))
        axis.legend(loc="lower right")
    paper_figure((corners, epochs), path)


def paper2(e, path):
    """Kurtosis by depth, and what the activations' bits cost."""
    cells = [(f"{net}, {opt}", color, style) for net, style in (("residual", "--"), ("skipless", "-"))
             for opt, color in (("AdamW", BLUE), ("KL-Shampoo", GREEN), ("SOAP", ORANGE), ("Muon", PINK))
             ]

    def kurtosis(axis):
        for cell, color, style in cells:
            curve = mean_curve([r["quantized"]["kurtosis"] for r in whole_runs(e, "lm", cell)])
            axis.plot(range(1, len(curve) + 1), curve, style, color=color, label=cell)
        axis.set(xlabel="block", ylabel="excess kurtosis",
                 title="tails by depth, each net at its own lr")
        axis.set_ylim(top=1.35 * axis.get_ylim()[1])                          # room for the legend
        axis.legend(ncols=2, loc="upper left", columnspacing=1)

    def cost(axis):
        for cell, color, style in cells:
            axis.plot([f"A{b}" for b in claims.COST],
                      [claims.moments(e(m, "lm", cell))[0] for m in claims.COST.values()], style,
                      color=color, marker="o", ms=3)
        axis.set(xlabel="bits of activations (weights 8)", ylabel="loss added, nats per byte",
                 title="what rounding costs")
        axis.set_yscale("symlog", linthresh=1e-3)
    paper_figure((kurtosis, cost), path)


def paper3(e, path):
    """k-NN by layer, and effective rank beside it by alpha_min."""
    cells = dict(zip(claims.ALPHAS, ("1", ".8", ".7", ".6", ".5")))

    def layers(axis):
        for cell, color in zip(cells, (GREY, BLUE, GREEN, ORANGE, PINK)):
            curve = mean_curve([r["probed"]["scenes"]["knn"] for r in whole_runs(e, "mae", cell)])
            axis.plot(range(len(curve)), curve, color=color,
                      label=f"alpha_min {cells[cell]}" + ", plain shortcuts" * (cells[cell] == "1"),
                      lw=2.4 if cells[cell] == ".6" else 1.2)
        if "pixels" in e.data:
            scenes = e.data["pixels"]["sets"]["scenes"]
            for level, text in ((scenes["knn20"], "raw pixels"), (scenes["largest_class"],
                                                                  "the largest class alone")):
                axis.axhline(level, ls=":", color=GREY)
                axis.annotate(text, (0, level), (0, 2), textcoords="offset points", fontsize=8)
        axis.set(xlabel="layer (0: embedding)", ylabel="k-NN, %", title="what frozen features know")
        axis.set_ylim(top=1.1 * axis.get_ylim()[1])                           # room for the legend
        axis.legend(loc="upper left", ncols=2)

    def rank(axis):
        axis.set(title="rank falls as the shortcut decays", xlabel="alpha_min", xticks=range(len(cells)),
                 xticklabels=cells.values())
        for side, shift, measure, color, text in ((axis, -.06, claims.RANK, VIOLET,
                                                   "effective rank of the last layer, nats"),
                                                  (axis.twinx(), .06, claims.KNN, ORANGE,
                                                   "k-NN of the best layer, %")):
            means, spreads = zip(*(claims.moments(e(measure, "mae", cell)) for cell in cells))
            side.errorbar([i + shift for i in range(len(cells))], means, spreads, fmt="o-", ms=4,
                          capsize=3, color=color)
            side.set_ylabel(text, color=color)
            side.grid(False)
    paper_figure((layers, rank), path)
