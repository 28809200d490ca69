r"""Flow-matching transformers (SiT, U-ViT) whose shortcuts decay with depth (paper 3).

On a laptop: emoji of 32 x 32 pixels in seven groups, SiT of 8 layers and 2.5 M parameters, minutes on
two cores:
    python train_sit.py                                   decayed to .8, long skips
    python train_sit.py --shortcut residual               plain shortcuts, long skips
    python train_sit.py --shortcut residual --no-long-skips                      the usual SiT
Digits that a person reads, 4 minutes on one core (validation loss .235):
    python train_sit.py --data mnist5k --steps 1600 --lr 3e-3 \
        --set patch_size=7 lr_schedule=cosine cfg_scale=2
More samples of a run, and their measured quality: python -m evals.samples --help

The paper's SiT-XL/2 on ImageNet-1k at 256 px, 8 GPUs (paper, after 400k steps: FID 17.2 usual, 11.8
decayed; not run by us):
    python -m tools.encode_latents --data /path/to/imagenet --out data/latents
    torchrun --nproc_per_node=8 train_sit.py --preset paper --data data/latents --out out/sit
"""
import argparse
import copy
import dataclasses
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.utils import save_image

import data
import optim
import runtime
from model import (PATHS, SHORTCUTS, SIT_SIZES, UVIT_SIZES, SiT, UViT, alpha_min_for, guided,
                   path_coefficients)
from runtime import BadInput

# What both presets have beside their own entries. `--set key=value` changes any of them.
COMMON = dict(
    path="linear",              # from noise to data: linear or gvp, see model.path_coefficients
    label_dropout=0.1,          # share of labels that training replaces by the null label, for guidance
    zero_init=True,             # uvit: each branch starts at zero; sit's gates always do
    lr_schedule="constant",     # after the warm-up: constant, or cosine down to 0
    flip=True,                  # mirror training images, where that keeps their class
    holdout=0.0,                # validate on this share of the training set instead of the test set
    bad_images="stop",          # at files that cannot be read: stop or skip
    samples=32,                 # images in samples.png, drawn at each evaluation; 0 is off
    sample_steps=25,            # Heun's steps from noise to data
    cfg_scale=1.0,              # classifier-free guidance of samples.png; 1 is none
)
PRESETS = {
    # Minutes on two cores.
    "laptop": dict(
        COMMON, data="emoji", size="nano", img_size=None, patch_size=4, alpha_min=0.8,
        steps=1000, batch_size=64, warmup=50,
        lr={"residual": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 2e-3}},
        weight_decay=0.0, clip=1.0, ema=0.995, ema_warmup=True, eval_every=250, save_every=250),
    # SiT-XL/2 on latents of ImageNet-1k. The official code: AdamW 1e-4, constant, without warm-up, decay
    # or clipping, batch 256, EMA .9999, label dropout .1, flips; alpha_min .8. Not ours: fp16.
    "paper": dict(
        COMMON, data=None, size="XL", img_size=None, patch_size=2, alpha_min=0.8,
        steps=400000, batch_size=256, warmup=0,
        lr={"residual": {"adamw": 1e-4, "soap": 1e-4, "kl-shampoo": 5e-5, "muon": 1e-4}},
        weight_decay=0.0, clip=0.0, ema=0.9999, ema_warmup=False, eval_every=10000, save_every=10000,
        workers=8),
}
NETS = {"sit": (SiT, SIT_SIZES), "uvit": (UViT, UVIT_SIZES)}
GOLDEN = 0.6180339887498949     # the golden section: its multiples, modulo 1, cover [0, 1] evenly


def get_args(argv=None):
    """Flags win over --set, --set over the preset."""
    parser, preset = runtime.train_parser(__doc__, PRESETS, argv)
    add = parser.add_argument_group("model").add_argument
    add("--backbone", choices=list(NETS), default="sit",
        help="SiT (adaLN-Zero) or U-ViT (time and label as tokens)")
    add("--size", choices=list(SIT_SIZES | UVIT_SIZES),
        help=f"sit: {', '.join(SIT_SIZES)}; uvit: {', '.join(UVIT_SIZES)}")
    add("--depth", type=runtime.number(int, low=1),
        help="number of blocks, if not the size's own; uvit has one more in the middle")
    runtime.add_shortcut_flags(add, SHORTCUTS, default="decayed")
    add("--alpha-eff", type=runtime.number(float, above=0, high=1),
        help="instead of --alpha-min: the product of all shortcut weights (paper 3: 1e-3 to 1e-2)")
    add("--long-skips", action=argparse.BooleanOptionalAction, default=True,
        help="from the first half of the blocks to the mirrored second half")
    runtime.add_optimizer_flags(parser, optim.OPTIMIZERS, unit="steps")
    add = parser.add_argument_group("data").add_argument
    add("--data", help=f"{', '.join(data.NAMES)}, a folder with train/<class>/ and val/<class>/, or one "
                       "that tools/encode_latents.py wrote")
    add("--img-size", type=runtime.number(int, low=1), help="side of the images, pixels; else their own")
    runtime.add_run_flags(parser, never="at the end only")
    args, _ = runtime.read_flags(parser, preset, argv, "sit", lead=("size", "shortcut", "opt"))

    if args.data is None:
        raise BadInput(f"--preset {args.preset} needs --data, a folder of latents: "
                       "python -m tools.encode_latents writes one")
    if args.path not in PATHS or args.lr_schedule not in ("constant", "cosine"):
        raise BadInput(f"--set path={args.path} lr_schedule={args.lr_schedule}: path must be one of "
                       f"{', '.join(PATHS)}, lr_schedule constant or cosine")
    sizes = NETS[args.backbone][1]
    if args.size not in sizes:
        raise BadInput(f"--backbone {args.backbone} has no --size {args.size}: use {', '.join(sizes)}")
    args.lr = args.lr or runtime.by_net(preset["lr"], args)
    args.depth = args.depth or sizes[args.size]["depth"]
    if args.alpha_eff and args.shortcut == "decayed":
        with runtime.user_errors():
            args.alpha_min = alpha_min_for(args.alpha_eff, args.depth + (args.backbone == "uvit"))
    args.alpha_min = runtime.last_weight(args)
    if args.backbone == "sit":
        del args.zero_init                                       # args.json says what applies, no more
    return args


def pixels_or_latents(args):
    """(images, are they latents?). Pixels are scaled to [-1, 1], latents stay as they are."""
    images = data.load_images(args.data, args.holdout, args.seed, args.bad_images)
    latents = isinstance(images.train, data.Latents)
    if not latents:
        half = [0.5] * images.in_chans
        images = dataclasses.replace(images, mean=half, std=half)
    args.img_size = images.size if latents else args.img_size or images.size
    if args.img_size is None:
        raise BadInput(f"--data {args.data} holds images of any size: pass --img-size, or turn them "
                       "into latents with python -m tools.encode_latents")
    args.flip = args.flip and images.flip
    return images, latents


def build_model(args, images):
    """(SiT or UViT, its keyword arguments). Equal on all ranks: the seed does not know the rank.

    Raises BadInput for sizes and shortcuts that do not fit."""
    torch.manual_seed(args.seed)
    kind, sizes = NETS[args.backbone]
    options = dict(sizes[args.size], depth=args.depth, input_size=args.img_size,
                   patch_size=args.patch_size, in_chans=images.in_chans, num_classes=len(images.classes),
                   shortcut=args.shortcut, alpha_min=args.alpha_min, long_skips=args.long_skips,
                   label_dropout=args.label_dropout)
    if args.backbone == "uvit":
        options["zero_init"] = args.zero_init
    with runtime.user_errors():
        return kind(**options), options


# --------------------------------------------------------------------------------------------------
# flow matching

def interpolate(path, t, x, noise):
    """The point x_t on the way from noise to data x, and the velocity there, the target: each (B, ...).

        x_t = alpha(t) x + sigma(t) noise,  target = alpha'(t) x + sigma'(t) noise,  t (B,) in [0, 1]
    """
    coefficients = path_coefficients(path, t)
    alpha, sigma, d_alpha, d_sigma = (c.view(-1, *[1] * (x.ndim - 1)) for c in coefficients)
    return alpha * x + sigma * noise, d_alpha * x + d_sigma * noise


def velocity_loss(velocity, target):
    """Squared error, mean over each sample: (B,). In float32: half precision overflows in long runs."""
    return (velocity.float() - target.float()).square().flatten(1).mean(1)


def draw_flow(args, step, shape):
    """Noise (B, *shape), times (B,) and which labels to drop (B,), of this step's whole global batch.

    A function of (seed, step): no matter how the batch is split over processes and micro-batches."""
    generator = torch.Generator().manual_seed(runtime.mix_seed(args.seed, "flow", step))
    noise = torch.randn(args.batch_size, *shape, generator=generator)
    t = torch.rand(args.batch_size, generator=generator)
    drop = torch.rand(args.batch_size, generator=generator) < args.label_dropout
    return noise, t, drop


@torch.no_grad()
def draw_samples(net, args, images, run):
    """`args.samples` images (N, C, Y, X) in [-1, 1], their labels in turn.

    Heun's method on dx = v dt, from noise at t = 0 to data at t = 1."""
    generator = torch.Generator().manual_seed(runtime.mix_seed(args.seed, "samples"))
    x = torch.randn(args.samples, images.in_chans, args.img_size, args.img_size, generator=generator)
    x, y = run.to_device(x, torch.arange(args.samples) % len(images.classes))
    velocity = guided(net, len(images.classes), args.cfg_scale)
    dt = 1 / args.sample_steps
    for i in range(args.sample_steps):
        t = torch.full_like(y, i * dt, dtype=torch.float32)
        with run.autocast():
            first = velocity(x, t, y).float()
            second = velocity(x + first * dt, t + dt, y).float()
        x = x + (first + second) / 2 * dt
    return x


@torch.no_grad()
def evaluate(net, images, transform, args, run):
    """Velocity loss over the whole validation set, strided over ranks.

    Validation image i meets the same noise and the same time in every run."""
    total, seen, generator = 0.0, 0, torch.Generator()
    for x, y in data.eval_batches(images.val, transform, args.micro_batch, run.rank, run.size,
                                  args.workers):
        index = [run.rank + (seen + i) * run.size for i in range(len(y))]
        seeds = [runtime.mix_seed("validation", i) for i in index]
        noise = [torch.randn(x.shape[1:], generator=generator.manual_seed(seed)) for seed in seeds]
        noise, t = torch.stack(noise), torch.tensor([(i + 0.5) * GOLDEN % 1 for i in index])
        x, y, noise, t = run.to_device(x, y, noise, t)
        x_t, target = interpolate(args.path, t, x, noise)
        with run.autocast():
            velocity = net(x_t, t, y)
        total += velocity_loss(velocity, target).cpu().double().sum()           # mps has no float64
        seen += len(y)
    total, seen = runtime.all_sum([total, seen], run.world)
    return total / seen


def main(argv=None):
    args = get_args(argv)
    run = runtime.open_run(args, "sit")

    # data, model, optimizer
    images, latents = pixels_or_latents(args)
    per_epoch = data.steps_per_epoch(len(images.train), args.batch_size)
    steps, shape = args.steps, (images.in_chans, args.img_size, args.img_size)
    eval_every, save_every = args.eval_every or steps, args.save_every or steps
    raw, options = build_model(args, images)
    raw.to(run.device)
    ema = copy.deepcopy(raw).requires_grad_(False) if args.ema else None
    optimizer = optim.build_optimizer(raw, args.opt, args.lr, args.weight_decay,
                                      **runtime.optimizer_options(args))
    train_tf = data.train_transform(images, args.img_size, "none", flip=args.flip)
    eval_tf = data.eval_transform(images, args.img_size)

    counts = images.train.labels.bincount(minlength=len(images.classes)).tolist()
    facts = dict(data.facts(images), class_counts=counts, latents=latents, model=options)
    step = run.begin(facts, steps, raw, ema, optimizer)
    run.banner(data.describe_images(images) + ", latents: no samples.png" * latents,
               f"{args.backbone}, {runtime.millions(raw)}, {args.shortcut}, "
               f"alpha_min {args.alpha_min:.3g}, alpha_eff {raw.alpha_eff:.2e}, "
               f"{'long skips' if args.long_skips else 'no long skips'}",
               f"{steps} steps, {per_epoch} per epoch", optim.describe(optimizer))
    model = run.wrap(raw)
    batches = data.train_batches(images.train, train_tf, args.batch_size, args.seed, step, steps,
                                 run.rank, run.size, run.micro_steps, args.workers)

    def look(step, lr):
        net = ema or raw
        val_loss = evaluate(net, images, eval_tf, args, run)
        runtime.check_val(val_loss, step, lr)
        run.log(f"step {step:6d}  val loss {val_loss:.4f}" + " (ema)" * bool(ema),
                step=step, val_loss=val_loss, alpha_eff=raw.alpha_eff)
        if run.main and args.samples and not latents:
            x = F.interpolate(draw_samples(net, args, images, run), scale_factor=2)
            save_image(x, Path(args.out, "samples.png"), nrow=min(len(images.classes), 10),
                       normalize=True, value_range=(-1, 1))

    if run.owes_look(step, eval_every):
        look(step, args.lr)
    floor = args.lr if args.lr_schedule == "constant" else 0.0
    while step < steps:
        lr = runtime.lr_at(step, steps, args.warmup, args.lr, floor)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        loss = 0.0
        drawn = [runtime.my_part(whole, run.rank, run.size, run.micro_steps)
                 for whole in draw_flow(args, step, shape)]
        for micro, (noise, t, drop) in enumerate(zip(*drawn)):
            x, y, noise, t, drop = run.to_device(*next(batches), noise, t, drop)
            x_t, target = interpolate(args.path, t, x, noise)
            with run.accumulate(model, micro):
                with run.autocast():
                    velocity = model(x_t, t, y, drop)
                part = velocity_loss(velocity, target).mean() * run.share(len(x))
                part.backward()
            loss += part.detach()
        norm = nn.utils.clip_grad_norm_(raw.parameters(), args.clip or float("inf"))
        run.observe(step, lr, loss, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema:
            # early on the average spans few steps: else a short run's would keep its start
            decay = min(args.ema, (1 + step) / (10 + step)) if args.ema_warmup else args.ema
            runtime.update_average(ema, raw, decay)
        step += 1

        log_now, save_now, eval_now = run.due(step, save_every, eval_every)
        if log_now:
            run.log_training(step, lr, args.batch_size, "images", epoch=step / per_epoch)
        if save_now:
            run.save(step, raw, ema, optimizer)
        if eval_now:
            look(step, lr)

    files = ["samples.png"] if args.samples and not latents else []
    run.finish(f"{args.backbone} {args.size}, {args.shortcut} {args.alpha_min:.3g}, {args.opt}",
               "val_loss", "validation loss", 4, files)
    run.say(f"best val loss {run.best():.4f}")
    run.say(f"val loss {run.last('val_loss'):.4f}")


if __name__ == "__main__":
    runtime.run_script(main)
