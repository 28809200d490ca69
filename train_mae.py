"""Masked autoencoder with decayed shortcuts (paper 3): trained on pixels, its features are abstract.

    x <- a x + f(x),  a falling from 1 to alpha_min over the 2L sub-layers of the encoder

Long skips carry the detail that the decay removes to the decoder.

On a laptop: embedded scenes (emoji on photographs, 32 px), an encoder of 12 layers, 4 epochs, 2 minutes
on two cores. k-NN of the best layer over three seeds; 7 classes, the largest 26.4 % (results/mae.json,
2026-11-30):
    python train_mae.py                            30.6 +- 1.6 %   decayed to 0.6, long skips, zero init
    python train_mae.py --shortcut residual        25.9 +- 0.9 %   plain shortcuts: its baseline
    python train_mae.py --plain                    29.0 +- 0.2 %   the original MAE
    python train_mae.py --skipless --opt soap                      no shortcut in the encoder
    python train_mae.py --set alphas=cosine                        an ablation, see `ablated`
    python probe.py layers --ckpt out/mae-*                        k-NN and linear probe of every layer

The paper's ViT-B/16 on ImageNet-1k, 800 epochs (paper: k-NN 27.4 % for MAE, 63.9 % for this):
    torchrun --nproc_per_node=8 train_mae.py --preset paper --data /path/to/imagenet --micro-batch 256
"""
import argparse
import copy
import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.utils import make_grid

import data
import init
import optim
import orthogonal
import runtime
from model import (MAE, SHORTCUTS, SIZES, alpha_min_for, learnable, pair_up, random_masking,
                   shortcut_weights)
from runtime import BadInput

# What every preset has beside its own entries. `--set key=value` changes any of them.
COMMON = dict(
    shortcut="decayed", alpha_min=0.6, long_skips=True,
    alphas="linear",                        # the ablations of paper 3, see `ablated`
    zero_init=True,                         # the last weight of every branch with a shortcut starts at 0
    encoder_norm=None,                      # 1 or 0: a final norm of the encoder; None: if no long skips
    mask_ratio=0.75,                        # share of the patches that is removed
    norm_pix_loss=True,                     # targets are normalised per patch
    alpha=1.0, beta=2.0, c=3.0,             # constants of --init skipless
    weight_decay=0.05, clip=0.0, holdout=0.0, bad_images="stop",
)
PLAIN = dict(shortcut="residual", long_skips=False, zero_init=False)
PRESETS = {
    # Minutes on two cores. The lrs of AdamW and SOAP were searched (results/mae.json).
    "laptop": dict(
        COMMON, data="scenes", size="nano", img_size=32, patch_size=4, decoder_dim=64, decoder_depth=6,
        decoder_heads=2, skipless_init="auto", epochs=4, batch_size=32, warmup=0.25, augment="none",
        lr={"residual": {"adamw": 1.5e-3, "soap": 5e-3, "kl-shampoo": 1e-3, "muon": 1.5e-3},
            "skipless": {"adamw": 1.5e-4, "soap": 5e-3, "kl-shampoo": 3e-4, "muon": 1e-3}},
        betas=dict(adamw=[0.9, 0.95]),
        knn_every=2.0, knn_images=2048),    # k-NN by layer: epochs between, 0 is off; images in the bank
    # ViT-B/16, ImageNet-1k, as in the paper's code: batch 8192, lr 1.5e-4 * batch / 256, 40 of 800
    # epochs of warm-up, AdamW (.9, .95), crops of .2 to 1 and flips. alpha_min .6 is the paper's table;
    # its code runs .7. Assumed: the lrs of other optimizers.
    "paper": dict(
        COMMON, data=None, size="base", img_size=224, patch_size=16, decoder_dim=512, decoder_depth=8,
        decoder_heads=16, skipless_init="paper", epochs=800, batch_size=8192, warmup=40.0, augment="mae",
        lr={"residual": {"adamw": 4.8e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3},
            "skipless": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3}},
        betas=dict(adamw=[0.9, 0.95], soap=[0.9, 0.95]), knn_every=40.0, knn_images=20000, workers=8),
}


def ablated(name, alphas):
    """Shortcut weights, one pair (attention, MLP) per block, as an ablation of paper 3 changes them.

    A weight a is a x + f(x), weights [a, g] are a x + g f(x). Raises BadInput for an unknown name."""
    if name == "linear":
        return [list(pair) for pair in alphas]
    depth, last, half = len(alphas), alphas[-1][1], math.sqrt(.5)
    fall = [(1 - math.cos(math.pi * (i / (2 * depth - 1)))) / 2 for i in range(2 * depth)]
    lists = {
        "cosine": pair_up([1 - t * (1 - last) for t in fall]),
        "per-layer": [(1 - (1 - last) * layer / depth, 1.0) for layer in range(1, depth + 1)],
        "attention-only": [(a, 1.0) for a, _ in alphas],
        "mlp-only": [(1.0, a) for _, a in alphas],
        "scaled-both": [[[half * a, half], [half * b, half]] for a, b in alphas],
        "scaled-branch": [[[a, half], [b, half]] for a, b in alphas],
        "learned": alphas,                                       # where `learnable` parameters start
    }
    if name not in lists:
        raise BadInput(f"--set alphas={name} is unknown: use linear, {', '.join(lists)}")
    return [list(pair) for pair in lists[name]]


def get_args(argv=None):
    """Flags win over --set, --set over --plain, --plain over the preset."""
    parser, preset = runtime.train_parser(__doc__, PRESETS, argv)
    if "--plain" in (sys.argv[1:] if argv is None else argv):
        preset |= PLAIN
    add = parser.add_argument_group("model").add_argument
    add("--size", choices=list(SIZES), help="embedding width, depth and heads")
    add("--depth", type=runtime.number(int, low=1), help="number of blocks, if not the size's own")
    runtime.add_shortcut_flags(add, SHORTCUTS)
    add("--alpha-eff", type=runtime.number(float, above=0, high=1),
        help="choose --alpha-min for this product of all weights; paper 3: 1e-3 to 1e-2")
    add("--plain", action="store_true", default=argparse.SUPPRESS,
        help="the original MAE: residual, no long skips, no zero init")
    add("--long-skips", action=argparse.BooleanOptionalAction,
        help="every second encoder block feeds a decoder block; else mask tokens")
    add("--init", choices=["auto", "default", "paper", "skipless"],
        help="auto: constants from the net's size; paper: paper 1's; skipless: the preset's; default: "
             f"MAE's. Else {preset['skipless_init']} if skipless, default if not")
    runtime.add_optimizer_flags(parser, optim.OPTIMIZERS)
    add = parser.add_argument_group("data").add_argument
    add("--data", help=f"{', '.join(data.NAMES)}, or a folder with train/<class>/ and val/<class>/")
    runtime.add_run_flags(parser)
    args, _ = runtime.read_flags(parser, preset, argv, "mae", lead=("size", "shortcut", "opt"))

    vars(args).pop("plain", None)
    if args.data is None:
        raise BadInput(f"--preset {args.preset} needs --data, a folder with train/<class>/ and val/")
    args.depth = args.depth or SIZES[args.size]["depth"]
    if args.alpha_eff:
        args.alpha_min = alpha_min_for(args.alpha_eff, args.depth)
    args.alpha_min = runtime.last_weight(args)
    args.lr = args.lr or runtime.by_net(preset["lr"], args)
    if args.init is None or (args.init == "auto" and args.shortcut != "skipless"):
        args.init = args.skipless_init if args.shortcut == "skipless" else "default"
    del args.skipless_init
    return args


def build_model(args, images):
    """(the MAE with its initialisation applied, its keyword arguments, alphas, the constants used).

    Equal on all ranks: the seed does not know the rank. Raises BadInput for sizes that do not fit."""
    torch.manual_seed(args.seed)
    alphas = ablated(args.alphas, shortcut_weights(args.shortcut, args.depth, args.alpha_min))
    options = dict(SIZES[args.size], in_chans=images.in_chans)
    for key in ("depth", "img_size", "patch_size", "decoder_dim", "decoder_depth", "decoder_heads",
                "shortcut", "alpha_min", "long_skips", "zero_init", "encoder_norm", "norm_pix_loss"):
        options[key] = getattr(args, key)
    with runtime.user_errors():
        raw = MAE(**options, alphas=learnable(alphas) if args.alphas == "learned" else alphas)
        kept, _, _ = random_masking(torch.zeros(1, math.prod(raw.grid)), args.mask_ratio)
        constants = init.apply_init(raw, args.init, vars(args), args.size, tokens=1 + kept.shape[1])
    return raw, options, None if args.alphas == "linear" else alphas, constants


def mask_noise(seed, step, samples, patches):
    """Uniform noise (samples, N) that decides which patches are removed, for the whole global batch.

    It depends on seed and step alone, and not on how ranks share the batch."""
    generator = torch.Generator().manual_seed(runtime.mix_seed(seed, "mask", step))
    return torch.rand(samples, patches, generator=generator)


@torch.no_grad()
def evaluate(model, images, transform, noise, args, run):
    """Reconstruction loss over the whole validation set, strided over ranks, SUM then divide.

    Image i is masked by row i of noise (n, N), the same each time."""
    loss, seen = 0.0, 0
    batches = data.eval_batches(images.val, transform, args.micro_batch, run.rank, run.size,
                                args.workers)
    for (x, _), rows in zip(batches, noise[run.rank::run.size].split(args.micro_batch)):
        x, rows = run.to_device(x, rows)
        with run.autocast():
            part, _, _ = model(x, args.mask_ratio, rows)
        loss, seen = loss + part * len(x), seen + len(x)         # images lose equally many patches
    loss, seen = runtime.all_sum([loss, seen], run.world)
    return loss / seen


# --------------------------------------------------------------------------------------------------
# what the layers know

@torch.no_grad()
def pooled_layers(model, part, transform, args, run):
    """Features (1 + L, n, D) of all images of a set: by layer, the embedding first, the mean token."""
    mine = []
    for x, _ in data.eval_batches(part, transform, args.micro_batch, run.rank, run.size, args.workers):
        rows = [tokens.mean(1) for tokens in model.layers(x.to(run.device))]
        mine.append(torch.stack(rows))
    whole = torch.zeros(len(rows), len(part), rows[0].shape[1], device=run.device)
    whole[:, run.rank::run.size] = torch.cat(mine, 1)
    if run.size > 1:
        torch.distributed.all_reduce(whole)                      # the other ranks' images are zeros here
    return whole.cpu()


def knn_top1(bank, bank_labels, queries, labels, k=20, temperature=0.07):
    """Top-1 in % of DINO's k-NN: the k nearest by cosine vote with exp(cosine / temperature)."""
    bank, hits = F.normalize(bank, dim=1), 0
    for x, y in zip(queries.split(4096), labels.split(4096)):
        nearest = (F.normalize(x, dim=1) @ bank.T).topk(min(k, len(bank)), dim=1)
        weights = ((nearest.values - nearest.values[:, :1]) / temperature).exp()
        votes = torch.zeros(len(x), int(bank_labels.max()) + 1)
        votes.scatter_add_(1, bank_labels[nearest.indices], weights)
        hits += int((votes.argmax(1) == y).sum())
    return 100 * (hits / len(queries))


def layer_figures(model, images, transform, args, run):
    """For the log, lists over the layers: k-NN in %, effective rank in nats, mean norm of features.

    Paper 3's effective rank is the entropy of the singular values, divided by their sum."""
    bank = torch.linspace(0, len(images.train) - 1, min(args.knn_images, len(images.train))).long()
    bank = images.train.take(bank)
    train, val = (pooled_layers(model, part, transform, args, run) for part in (bank, images.val))
    knn = [knn_top1(a, bank.labels, b, images.val.labels) for a, b in zip(train, val)]
    spectra = [torch.linalg.svdvals(x.double()) for x in val]
    ranks = [torch.special.entr(s / s.sum()).sum().item() for s in spectra]
    return dict(val_knn=knn, val_knn_best=max(knn), effective_rank=ranks,
                feature_norm=[x.norm(dim=1).mean().item() for x in val])


@torch.no_grad()
def save_reconstructions(model, images, transform, noise, args, run, count=8):
    """out/reconstructions.png: validation images, masked, reconstructed; one column each."""
    index = torch.linspace(0, len(images.val) - 1, min(count, len(images.val))).long()
    x = torch.stack([transform(images.val[i][0]) for i in index.tolist()]).to(run.device)
    masked, filled = model.reconstruct(x, args.mask_ratio, noise[index].to(run.device))
    mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in (images.mean, images.std))
    pixels = (torch.cat([x, masked, filled]) * std + mean).clamp(0, 1)
    sheet = make_grid(pixels, nrow=len(index), padding=1, pad_value=1).cpu().numpy()
    plt = runtime.pyplot()
    figure, axis = plt.subplots(figsize=(len(index) + 1, 3.2), constrained_layout=True)
    axis.imshow(sheet.transpose(1, 2, 0), interpolation="nearest")
    row = x.shape[-1] + 1
    axis.set_yticks([row / 2, 1.5 * row, 2.5 * row], ["original", "masked", "reconstructed"])
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.set_frame_on(False)
    figure.savefig(Path(args.out) / "reconstructions.png", dpi=120)
    plt.close(figure)


# --------------------------------------------------------------------------------------------------

def main(argv=None):
    args = get_args(argv)
    run = runtime.open_run(args, "mae")

    # data, model, optimizer
    images = data.load_images(args.data, args.holdout, args.seed, args.bad_images)
    per_epoch = data.steps_per_epoch(len(images.train), args.batch_size)
    steps, warmup = max(1, round(args.epochs * per_epoch)), round(args.warmup * per_epoch)
    eval_every, save_every = args.eval_every or per_epoch, args.save_every or per_epoch
    knn_every = args.knn_every and max(1, round(args.knn_every * per_epoch))
    raw, options, alphas, constants = build_model(args, images)
    raw.to(run.device)
    constraint = orthogonal.constrain(raw.blocks, args)
    ema = copy.deepcopy(raw).requires_grad_(False) if args.ema else None
    optimizer = optim.build_optimizer(raw, args.opt, args.lr, args.weight_decay,
                                      constraint=constraint, **runtime.optimizer_options(args))
    train_tf = data.train_transform(images, args.img_size, args.augment)
    eval_tf = data.eval_transform(images, args.img_size)
    patches = math.prod(raw.grid)
    val_noise = mask_noise(args.seed, "validation", len(images.val), patches)

    facts = dict(data.facts(images), model=options, alphas=alphas, constants=constants)
    step = run.begin(facts, steps, raw, ema, optimizer)
    line = " ".join(["init", args.init, *(f"{key} {value:.3g}" for key, value in constants.items())])
    run.banner(data.describe_images(images),
               f"{runtime.millions(raw)}, {args.shortcut}, alpha_eff {raw.alpha_eff:.2g}, {line}",
               f"{steps} steps, {per_epoch} per epoch", optim.describe(optimizer))
    model = run.wrap(raw)
    batches = data.train_batches(images.train, train_tf, args.batch_size, args.seed, step, steps,
                                 run.rank, run.size, run.micro_steps, args.workers)

    def look(step, lr):
        net = (ema or raw).eval()
        val_loss = evaluate(net, images, eval_tf, val_noise, args, run)
        runtime.check_val(val_loss, step, lr)
        record = dict(step=step, val_loss=val_loss, alpha_eff=raw.alpha_eff)
        line = f"step {step:6d}  val loss {val_loss:.4f}" + " (ema)" * bool(ema)
        if knn_every and (step % knn_every == 0 or step == steps):
            record.update(layer_figures(net, images, eval_tf, args, run))
            knn, best = record["val_knn"], record["val_knn_best"]
            line += f"  k-NN best {best:.1f} % (layer {knn.index(best)} of {args.depth})"
            line += f", last {knn[-1]:.1f} %"
        net.train()
        run.log(line, **record)
        if run.main:
            save_reconstructions(net, images, eval_tf, val_noise, args, run)

    if run.owes_look(step, eval_every) or (knn_every and run.owes_look(step, knn_every)):
        look(step, args.lr)
    while step < steps:
        lr = runtime.lr_at(step, steps, warmup, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        noise = mask_noise(args.seed, step, args.batch_size, patches)
        noise = runtime.my_part(noise, run.rank, run.size, run.micro_steps)
        loss = 0.0
        for micro in range(run.micro_steps):
            x, rows = run.to_device(next(batches)[0], noise[micro])
            with run.accumulate(model, micro):
                with run.autocast():
                    part, _, _ = model(x, args.mask_ratio, rows)
                part = part * run.share(len(x))                  # images lose equally many patches
                part.backward()
            loss += part.detach()
        norm = nn.utils.clip_grad_norm_(raw.parameters(), args.clip or float("inf"))
        run.observe(step, lr, loss, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema:
            runtime.update_average(ema, raw, args.ema)
        step += 1

        log_now, save_now, eval_now = run.due(step, save_every, eval_every)
        if knn_every and step % knn_every == 0:
            log_now = save_now = eval_now = True
        if log_now:
            run.log_training(step, lr, args.batch_size, "images", epoch=step / per_epoch)
        if save_now:
            run.save(step, raw, ema, optimizer)
        if eval_now:
            look(step, lr)

    metric, label = ("val_knn_best", "k-NN of the best layer, %") if knn_every else ("val_loss", "loss")
    run.finish(f"MAE-{args.size}, {args.shortcut}, {args.alphas}, init {args.init}, {args.opt}", metric,
               label, digits=1 if knn_every else 3, files=["reconstructions.png"])
    run.say(f"best val loss {run.best():.4f}")
    run.say(f"val loss {run.last('val_loss'):.4f}")


if __name__ == "__main__":
    runtime.run_script(main)
