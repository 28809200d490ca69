"""Masked autoencoder with decayed shortcuts (paper 3): a reconstruction objective whose features are abstract.

    x <- a x + f(x),  a falling from 1 to alpha_min over the 2L sub-layers of the encoder; long skips take the detail to the decoder.

On a laptop (embedded scenes: emoji on photographs, 32 px, encoder of 12 layers, 2 minutes on two cores). k-NN of the best layer over three seeds, 7 classes,
the largest 26.4 % (results/mae.json, 2026-11-30):
    python train_mae.py                              decayed: alpha_min 0.6, long skips, zero init                            30.6 +- 1.6 %
    python train_mae.py --shortcut residual          the same net with plain shortcuts: the baseline for the decay alone      25.9 +- 0.9 %
    python train_mae.py --plain                      the original MAE: no long skips, no zero init                            29.0 +- 0.2 %
    python train_mae.py --skipless --opt soap        no shortcut in the encoder at all
    python probe.py layers --ckpt out/mae-*/ckpt.pt  k-NN and linear probe of every layer

The paper's ViT-B/16 on ImageNet-1k, 800 epochs (paper: k-NN 27.4 % for MAE, 63.9 % for this):
    torchrun --nproc_per_node=8 train_mae.py --preset paper --data /path/to/imagenet --micro-batch 256
"""
import argparse
import copy
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import data
import flow
import init
import model as models
import optim
import probe
import runtime
from model import MAE, SIZES
from runtime import BadInput

PRESETS = {
    # minutes on two cores
    "laptop": dict(
        data="scenes", size="nano", img_size=32, patch_size=4, decoder_dim=64, decoder_depth=6, decoder_heads=2, alpha_min=0.6, skipless_init="auto",
        epochs=4, batch_size=32, warmup=0.25, augment="none", weight_decay=0.05, clip=0.0, betas={"adamw": (0.9, 0.95)},
        lr={"shortcut": {"adamw": 1.5e-3, "soap": 5e-3, "kl-shampoo": 1e-3, "muon": 1.5e-3},          # adamw, soap: searched (results/mae.json)
            "skipless": {"adamw": 1.5e-4, "soap": 5e-3, "kl-shampoo": 3e-4, "muon": 1e-3}}, knn_every=2.0, knn_images=2048),
    # ViT-B/16, ImageNet-1k, as in the paper's code: batch 8192, blr 1.5e-4 (lr = blr batch / 256), 40 of 800 epochs of warm-up, AdamW (.9, .95), crops of
    # .2 to 1 and flips. alpha_min .6 is the paper's table; its code runs .7. Other optimizers than AdamW: our assumption.
    "paper": dict(
        data=None, size="base", img_size=224, patch_size=16, decoder_dim=512, decoder_depth=8, decoder_heads=16, alpha_min=0.6, skipless_init="paper",
        epochs=800, batch_size=8192, warmup=40.0, augment="mae", weight_decay=0.05, clip=0.0, betas={"adamw": (0.9, 0.95), "soap": (0.9, 0.95)},
        lr={"shortcut": {"adamw": 4.8e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3},
            "skipless": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3}}, knn_every=40.0, knn_images=20000, workers=8),
}
# Flags that define the run: a checkpoint with other values is another run. Flags that never touch its course are free; the rest may change, and is said.
FIXED = ("size", "depth", "img_size", "patch_size", "decoder_dim", "decoder_depth", "decoder_heads", "shortcut", "alpha_min", "schedule", "decay_on", "learn_alphas",
         "scaling", "long_skips", "zero_init", "encoder_norm", "norm_pix_loss", "mask_ratio", "init", "alpha", "beta", "c", "opt", "betas", "weight_decay",
         *runtime.MATRIX_FLAGS, "batch_size", "seed", "holdout")
FREE = ("preset", "device", "compile", "workers", "threads", "out", "resume", "log_every", "eval_every", "save_every", "wandb", "micro_batch", "knn_every",
        "knn_images", "alpha_eff", "train_images", "classes", "in_chans", "kind", "model")


def get_args(argv=None):
    """Two passes: the first finds the preset, whose values then become the defaults that --help shows and flags win over."""
    number = runtime.number
    presets = runtime.Parser(add_help=False)
    presets.add_argument("--preset", choices=list(PRESETS), default="laptop", help="a dict of defaults at the top of this file")
    presets.add_argument("--plain", action="store_true", default=argparse.SUPPRESS, help="the original MAE: --shortcut residual --no-long-skips --no-zero-init")
    known = presets.parse_known_args(argv)[0]
    preset = PRESETS[known.preset]
    parser = runtime.Parser(description=__doc__, parents=[presets])
    switch = argparse.BooleanOptionalAction

    add = parser.add_argument_group("encoder").add_argument
    add("--size", choices=list(SIZES), help="embedding width, depth and heads")
    add("--depth", type=number(int, low=1), help="number of blocks; None is the size's own")
    add("--img-size", type=number(int, low=1), help="side of the square images, pixels")
    add("--patch-size", type=number(int, low=1), help="side of a patch, pixels")
    add("--shortcut", choices=["residual", "skipless", "decayed"], default="decayed", help="x + f(x), f(x), or a x + f(x) with a falling to --alpha-min")
    add("--skipless", dest="shortcut", action="store_const", const="skipless", default=argparse.SUPPRESS, help="same as --shortcut skipless")
    add("--alpha-min", type=number(float, low=0, high=1), default=None, help=f"weight of the last shortcut, for --shortcut decayed; None is {preset['alpha_min']}")
    add("--alpha-eff", type=number(float, above=0, high=1), default=None, help="choose alpha-min so that the product of all shortcut weights is this; paper 3 finds 1e-3 to 1e-2 best")
    add("--schedule", choices=models.SCHEDULES, default="linear", help="how the weight falls; per-layer is the paper's formula, linear its code")
    add("--decay-on", choices=["both", "attn", "mlp"], default="both", help="which shortcuts decay")
    add("--learn-alphas", action=switch, default=False, help="shortcut weights are parameters that start at the schedule")
    add("--scaling", choices=["none", "both", "branch"], default="none", help="ablation of the plain shortcut: sqrt(.5) (x + f(x)), or x + sqrt(.5) f(x)")
    add("--zero-init", action=switch, default=True, help="the last weight of every branch starts at zero")
    add("--encoder-norm", action=switch, default=None, help="final norm of the encoder; None: only without long skips")

    add = parser.add_argument_group("decoder and target").add_argument
    add("--long-skips", action=switch, default=True, help="every second encoder block feeds a decoder block; else mask tokens")
    add("--decoder-dim", type=number(int, low=1), help="width of the decoder")
    add("--decoder-depth", type=number(int, low=1), help="blocks of the decoder")
    add("--decoder-heads", type=number(int, low=1), help="attention heads of the decoder")
    add("--mask-ratio", type=number(float, above=0, below=1), default=0.75, help="share of the patches that is removed")
    add("--norm-pix-loss", action=switch, default=True, help="targets are normalised per patch")

    add = parser.add_argument_group("initialisation of a skipless encoder").add_argument
    add("--init", choices=["auto", "default", "paper", "skipless"], default=None,
        help="auto: constants chosen for this size; paper: paper 1's constants; skipless: --alpha --beta --c; default: MAE's. "
             f"None: {preset['skipless_init']} if skipless, else default")
    add("--alpha", type=number(float, low=0), help="random part of W_Q W_K^T, for --init skipless; None is 1")
    add("--beta", type=number(float, low=0), help="identity part of W_Q W_K^T, for --init skipless; None is 2")
    add("--c", type=number(float, above=0), help="W_V W_O is c^2 times an orthogonal matrix, for --init skipless; None is 3")

    add = parser.add_argument_group("optimisation").add_argument
    add("--opt", choices=["adamw", "soap", "kl-shampoo", "muon"], default="adamw", help="for the matrices of all blocks; AdamW takes the rest")
    add("--lr", type=number(float, above=0, high=1e30), default=None, help=f"peak learning rate; None is the preset's, by shortcut and optimizer: {preset['lr']}")
    add("--weight-decay", type=number(float, low=0), help="decoupled; not on biases, norms and tokens")
    add("--betas", type=number(float, low=0, below=1), nargs=2, default=None, metavar=("B1", "B2"),
        help=f"momenta; None is the preset's, by optimizer: {preset['betas']}, or the optimizer's own")
    runtime.add_matrix_flags(add)
    add("--batch-size", type=number(int, low=1), help="global: images per update over all processes")
    add("--micro-batch", type=number(int, low=1), default=None, help="images per forward pass and process; None means as many as the batch gives it")
    add("--epochs", type=number(float, above=0, high=1e6), help="passes over the training set")
    add("--warmup", type=number(float, low=0), help="epochs of linear warm-up")
    add("--clip", type=number(float, low=0), help="largest gradient norm; 0 is off")
    add("--ema", type=number(float, low=0, below=1), default=0.0, help="decay of the averaged weights, e.g. 0.9999; 0 is off")

    add = parser.add_argument_group("data and evaluation").add_argument
    add("--data", help=f"{', '.join(data.NAMES)}, or a folder with train/<class>/ and val/<class>/")
    add("--holdout", type=number(float, low=0, high=0.9), default=0.0, help="validate on this share of the training set instead of the test set: for tuning")
    add("--augment", choices=["none", "light", "mae"], help="mae: crops of 20 to 100 %% of the area, and flips")
    add("--knn-every", type=number(float, low=0), help="epochs between looks at every layer, k-NN and effective rank (the last step has one too); 0 is off")
    add("--knn-images", type=number(int, low=1), help="training images in the k-NN bank, at most")
    runtime.add_run_flags(parser)

    parser.set_defaults(**{k: v for k, v in preset.items() if k not in ("lr", "betas", "skipless_init", "alpha_min")})
    if "plain" in known:                                         # defaults too, so --plain --skipless is the original with a skipless encoder
        parser.set_defaults(shortcut="residual", long_skips=False, zero_init=False)
    args = parser.parse_args(argv)
    vars(args).pop("plain", None)
    if args.data is None:
        raise BadInput("--preset paper needs --data: a folder with train/<class>/ and val/<class>/")
    args.depth = args.depth or SIZES[args.size]["depth"]
    resolve_shortcut(args, preset["alpha_min"])
    resolve_init(args, preset["skipless_init"])
    if args.lr is None:
        args.lr = preset["lr"]["skipless" if args.shortcut == "skipless" else "shortcut"][args.opt]
    args.betas = list(args.betas or preset["betas"].get(args.opt, ())) or None
    if args.betas and args.opt == "muon":
        raise BadInput("--betas has no meaning for --opt muon, which has one momentum: leave it out")
    if args.out is None:
        args.out = f"out/mae-{run_name(args)}-{args.opt}-seed{args.seed}"
    return args


def resolve_shortcut(args, alpha_min):
    """Fill in --alpha-min; refuse it, or --alpha-eff, where it has no effect."""
    try:
        if args.shortcut != "decayed":
            given = [f"--{k.replace('_', '-')}" for k in ("alpha_min", "alpha_eff") if getattr(args, k) is not None]
            given += ["--schedule"] * (args.schedule != "linear") + ["--decay-on"] * (args.decay_on != "both")
            if given:
                raise BadInput(f"{given[0]} has no effect with --shortcut {args.shortcut}: use --shortcut decayed, or leave it out")
            args.alpha_min = 1.0
        elif args.alpha_eff is not None:
            if args.alpha_min is not None:
                raise BadInput("--alpha-eff chooses --alpha-min: give one of the two")
            args.alpha_min = models.alpha_min_for(args.alpha_eff, args.depth, args.schedule, args.decay_on)
        elif args.alpha_min is None:
            args.alpha_min = alpha_min
    except ValueError as error:
        raise BadInput(str(error)) from error


def resolve_init(args, skipless_init):
    """Fill in --init and its constants; a constant alone means --init skipless, and with another init it is refused."""
    constants = dict(alpha=1.0, beta=2.0, c=3.0)
    given = [k for k in constants if getattr(args, k) is not None]
    if args.init is None:
        args.init = "skipless" if given else skipless_init if args.shortcut == "skipless" else "default"
    if given and args.init != "skipless":
        raise BadInput(f"--{given[0]} has no effect with --init {args.init}: use --init skipless, or leave it out")
    if args.init != "default" and args.shortcut != "skipless":
        raise BadInput(f"--init {args.init} is for an encoder without shortcuts: add --skipless, or leave it out")
    for k, value in constants.items():
        if getattr(args, k) is None:
            setattr(args, k, value)


def run_name(args):
    """What sets this run apart, for its folder."""
    name = [args.size, args.shortcut + (f"{args.alpha_min:.3g}" if args.shortcut == "decayed" else "")]
    name += [args.init] * (args.init != "default") + [args.schedule] * (args.schedule != "linear") + [f"on-{args.decay_on}"] * (args.decay_on != "both")
    name += ["learned"] * args.learn_alphas + [f"scaled-{args.scaling}"] * (args.scaling != "none")
    return "-".join(name + ["noskips"] * (not args.long_skips) + ["nozero"] * (not args.zero_init))


def build_model(args, images):
    """(the MAE with its initialisation applied, its keyword arguments, a line that says which init). Equal on all ranks: the seed does not know the rank."""
    torch.manual_seed(args.seed)
    size = dict(SIZES[args.size], depth=args.depth)
    keys = ("img_size", "patch_size", "decoder_dim", "decoder_depth", "decoder_heads", "alpha_min", "long_skips", "zero_init", "shortcut", "schedule", "decay_on",
            "learn_alphas", "scaling", "encoder_norm", "norm_pix_loss")
    kwargs = dict(size, in_chans=images.in_chans, **{k: getattr(args, k) for k in keys})
    try:
        raw = MAE(**kwargs)
        patches = math.prod(raw.grid)
        models.random_masking(torch.zeros(1, patches), args.mask_ratio)          # its sentence on a ratio that leaves nothing, before anything runs
        if args.init == "default":
            return raw, kwargs, "default: Xavier uniform" + ", last weights of branches zero" * args.zero_init
        if args.init == "auto":
            constants = init.choose_constants(size["embed_dim"], size["num_heads"], 1 + int(patches * (1 - args.mask_ratio)), size["depth"])
        elif args.init == "paper":
            constants = init.PAPER_CONSTANTS[args.size]
        else:
            constants = dict(alpha=args.alpha, beta=args.beta, c=args.c)
    except ValueError as error:                                  # the model's own sentence on a size that does not fit
        raise BadInput(str(error)) from error
    init.init_skipless_vit(raw, **constants)
    return raw, kwargs, f"{args.init}: " + ", ".join(f"{k} {v:.3g}" for k, v in constants.items())


def noise_for(seed, step, batch_size, patches):
    """The uniform noise (batch, N) that decides which patches are removed, for the whole global batch: it does not depend on how ranks share it."""
    return torch.rand(batch_size, patches, generator=torch.Generator().manual_seed(runtime.mix_seed(seed, "mask", step)))


@torch.no_grad()
def evaluate(model, images, transform, noise, args, world, dtype):
    """Reconstruction loss over the whole validation set, strided over ranks; image i is masked by row i of noise (n, N), the same each time."""
    model.eval()
    loss, seen = 0.0, 0
    batches = data.eval_batches(images.val, transform, args.micro_batch, world.rank, world.size, args.workers)
    for (x, _), rows in zip(batches, noise[world.rank::world.size].split(args.micro_batch)):
        with runtime.autocast(world.device, dtype):
            part, _, _ = model(x.to(world.device, non_blocking=True), args.mask_ratio, rows.to(world.device))
        loss, seen = loss + part * len(x), seen + len(x)         # every image has as many removed patches, so a mean of means is exact
    model.train()
    loss, seen = runtime.all_sum([loss, seen], world)
    return loss / seen


def probe_layers(model, images, transform, args, world):
    """(k-NN accuracy (k = 20), %; effective rank; mean norm), by layer: mean of all tokens, part of the training set as the bank, all of the validation set."""
    bank = images.train.take(torch.linspace(0, len(images.train) - 1, min(max(args.knn_images, world.size), len(images.train))).long())
    (train_x, train_y), (val_x, val_y) = [
        probe.layer_features(model, data.eval_batches(part, transform, args.micro_batch, world.rank, world.size, args.workers), world.device, world=world)
        for part in (bank, images.val)]
    return [100 * probe.knn(a, train_y, b, val_y) for a, b in zip(train_x, val_x)], [probe.effective_rank(x) for x in val_x], [x.norm(dim=1).mean().item() for x in val_x]


@torch.no_grad()
def save_reconstructions(model, images, transform, noise, args, world, count=8):
    """out/reconstructions.png: validation images, masked, reconstructed; one column each."""
    index = torch.linspace(0, len(images.val) - 1, min(count, len(images.val))).long()
    x = torch.stack([transform(images.val[i][0]) for i in index.tolist()]).to(world.device)
    rows = torch.stack([x, *model.reconstruct(x, args.mask_ratio, noise[index].to(world.device))])
    mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in (images.mean, images.std))
    side = max(1, 96 // x.shape[-1])                             # small images are enlarged, pixel by pixel
    picture = ((rows.flatten(0, 1) * std + mean).clamp(0, 1) * 255 + 0.5).to(torch.uint8).cpu()
    flow.write_grid(Path(args.out) / "reconstructions.png", picture, columns=len(index), smallest=side * x.shape[-1])


def main(argv=None):
    args = get_args(argv)
    world = runtime.start(args.device, args.threads)
    dtype, why = runtime.pick_dtype(args.dtype, world.device)
    micro_steps = runtime.split_batch(args, world)

    # data, model, optimizer
    images = data.load_images(args.data, args.holdout, args.seed)
    if world.size > len(images.val):
        raise BadInput(f"--data {args.data} has {len(images.val)} validation images for {world.size} processes: start torchrun with fewer, or add some")
    per_epoch = data.steps_per_epoch(len(images.train), args.batch_size)
    steps, warmup = max(1, round(args.epochs * per_epoch)), round(args.warmup * per_epoch)
    eval_every, save_every, knn_every = args.eval_every or per_epoch, args.save_every or per_epoch, args.knn_every and max(1, round(args.knn_every * per_epoch))
    raw, kwargs, init_line = build_model(args, images)
    raw.to(world.device)
    ema = copy.deepcopy(raw).requires_grad_(False) if args.ema else None
    optimizer = optim.build_optimizer(raw, args.opt, args.lr, args.weight_decay, **runtime.matrix_options(args))
    train_tf, eval_tf = data.train_transform(images, args.img_size, args.augment), data.eval_transform(images, args.img_size)
    patches = math.prod(raw.grid)
    val_noise = noise_for(args.seed, "validation", len(images.val), patches)
    share = args.batch_size // world.size

    # resume, before anything is written
    ckpt, saved = runtime.find_checkpoint(args.out, args.resume, "mask_ratio")
    flags = dict(vars(args), kind="mae", model=kwargs, train_images=len(images.train), classes=len(images.classes), in_chans=images.in_chans)
    step, best, val_loss, notes = 0, math.inf, None, []
    if saved:
        notes = runtime.check_resume(ckpt, saved["args"], flags, FIXED, FREE)
        runtime.check_same_data(ckpt, saved["args"], flags)
        step, best = runtime.restore(ckpt, saved, raw, ema, optimizer, steps, notes)
    if args.wandb:
        runtime.import_optional("wandb", "--wandb")
    runtime.make_out(args.out, flags, world)
    if world.main and not step:                                  # --fresh: the old checkpoint goes with the old log, or a later resume would find it
        ckpt.unlink(missing_ok=True)
    log = runtime.Log(args.out, world, step, args.wandb, flags)

    log.say(f"config      {' '.join(f'{k}={v}' for k, v in sorted(flags.items()))}")
    log.say(f"versions    revision {runtime.git_revision()}, torch {torch.__version__}, python {sys.version.split()[0]}")
    log.say(f"device      {world.why}; {world.size} process(es) x {torch.get_num_threads()} threads; {dtype} ({why})")
    log.say(f"data        {args.data}: {len(images.train)} training and {len(images.val)} validation images, {len(images.classes)} classes")
    log.say(f"model       {sum(p.numel() for p in raw.parameters()) / 1e6:.2f} M parameters, {args.shortcut}, alpha_min {args.alpha_min:.3g}, "
            f"alpha_eff {raw.alpha_eff:.2g}, init {init_line}")
    log.say(f"optimizer   {optim.describe(optimizer)}".replace("\n", "\n            "))
    log.say(f"batch       {args.batch_size} = {world.size} processes x {micro_steps} micro-steps x {args.micro_batch}; {steps} steps, {per_epoch} per epoch")
    for note in notes:
        log.say(f"note        {note} from here on")
    if step:
        log.say(f"resume      {ckpt}, step {step}, lr {runtime.lr_at(step, steps, warmup, args.lr):.3g}")

    model = torch.compile(raw) if args.compile else raw
    if world.size > 1:
        model = DistributedDataParallel(model, device_ids=[world.device.index] if world.device.type == "cuda" else None)
    batches = data.train_batches(images.train, train_tf, args.batch_size, args.seed, step, steps, world.rank, world.size, micro_steps, args.workers)
    bar = tqdm(total=steps, initial=step, disable=not (world.main and sys.stdout.isatty()), unit="step", dynamic_ncols=True)
    window, clock = [], time.perf_counter()

    while step < steps:
        lr = runtime.lr_at(step, steps, warmup, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        noise = noise_for(args.seed, step, args.batch_size, patches)[world.rank * share:(world.rank + 1) * share].split(args.micro_batch)
        loss = 0.0
        for micro in range(micro_steps):
            x, _ = next(batches)
            x = x.to(world.device, non_blocking=True)
            # gradients are exchanged once, with the last micro-batch; the switch must cover forward and backward
            last = micro == micro_steps - 1
            with nullcontext() if last or world.size == 1 else model.no_sync():
                with runtime.autocast(world.device, dtype):
                    part, _, _ = model(x, args.mask_ratio, noise[micro].to(world.device, non_blocking=True))
                part = part / micro_steps                        # a mean of means: same as one big batch
                part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), args.clip or float("inf"))
        window.append((step, lr, loss, norm))
        if world.device.type == "cpu":                           # elsewhere a look is a synchronisation, so it waits for the log step
            runtime.check_finite(window[-1:], world)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema:
            for average, p in zip(ema.parameters(), raw.parameters()):
                average.lerp_(p.detach(), 1 - args.ema)
        step += 1
        bar.update()

        eval_now = step % eval_every == 0 or step == steps
        save_now = step % save_every == 0 or step == steps
        knn_now = knn_every and (step % knn_every == 0 or step == steps)
        if step % args.log_every == 0 or eval_now or save_now or knn_now:
            mean, norm = runtime.check_finite(window, world)     # before anything is saved
            rate = len(window) * args.batch_size / (time.perf_counter() - clock)
            log.line(f"step {step:6d}  epoch {step / per_epoch:6.2f}  loss {mean:.4f}  lr {lr:.2e}  grad norm {norm:.2f}  {rate:.0f} images/s",
                     step=step, epoch=step / per_epoch, loss=mean, lr=lr, grad_norm=norm, images_per_s=rate)
            if eval_now or knn_now:
                val_loss = evaluate(ema or raw, images, eval_tf, val_noise, args, world, dtype)
                runtime.check_val(val_loss, step, lr)
                best = min(best, val_loss)
                record = dict(step=step, val_loss=val_loss, alpha_eff=raw.alpha_eff)
                human = f"step {step:6d}  val loss {val_loss:.4f}" + " (ema)" * bool(ema)
                if knn_now:
                    knn, rank, norms = probe_layers(ema or raw, images, eval_tf, args, world)
                    record.update(val_knn=knn, val_knn_best=max(knn), effective_rank=rank, feature_norm=norms)
                    human += f"  k-NN best {max(knn):.1f} % (layer {knn.index(max(knn))} of {args.depth}), last {knn[-1]:.1f} %"
                log.line(human, **record)
                if world.main:
                    save_reconstructions(ema or raw, images, eval_tf, val_noise, args, world)
            if save_now:                                         # on all ranks: each holds a share of the optimizer's state
                runtime.save_checkpoint(ckpt, dict(model=raw.state_dict(), ema=ema and ema.state_dict(), optimizer=optimizer.state_dict(),
                                                   step=step, best=best, rng=torch.get_rng_state(), args=flags), world.main)
            window, clock = [], time.perf_counter()
    bar.close()

    if val_loss is None:                                         # resumed at its end: nothing was left to train
        val_loss = evaluate(ema or raw, images, eval_tf, val_noise, args, world, dtype)
    if world.main:
        metric, label = ("val_knn_best", "k-NN of the best layer, %") if args.knn_every else ("val_loss", "validation loss")
        runtime.plot_curve(args.out, f"MAE, {run_name(args)}, {args.opt}", metric, label, digits=1 if args.knn_every else 3)
    log.say(f"{args.out}: ckpt.pt, log.jsonl, args.json, curve.png, reconstructions.png; best val loss {best:.4f}")
    log.say(f"val loss {val_loss:.4f}")


if __name__ == "__main__":
    runtime.run(main)
