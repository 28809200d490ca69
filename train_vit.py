"""Supervised ViT, with and without residual connections (paper 1, Table 1).

On a laptop: embedded MNIST digits (4,000 + 1,000), 12 layers, 1.35 M parameters, 10 epochs, 1 to 2 minutes on two cores. Top-1 over three seeds
(results/table1.json, 2026-11-30):
    python train_vit.py --skipless --opt soap                           88.0 +- 1.2 %
    python train_vit.py --skipless --opt soap --init default --lr 3e-4  69.8 +- 0.8 %   the same net without the initialisation
    python train_vit.py                                                 83.2 +- 1.6 %   the usual ViT: residual, AdamW

The paper's ViT-B/16 on ImageNet-1k, 8 GPUs (paper: residual AdamW 80.3, skipless + init + SOAP 80.8 % top-1):
    torchrun --nproc_per_node=8 train_vit.py --preset paper --data /path/to/imagenet --skipless --opt soap

Fine-tuning of a pretrained encoder (train_mae.py's, or one of these), whose shortcuts, size and data it takes over; on a laptop, and MAE's recipe:
    python train_vit.py --finetune out/mae-nano-decayed0.6-adamw-seed0/ckpt.pt --pool mean --layer-decay 0.65 --lr 1e-3
    torchrun --nproc_per_node=8 train_vit.py --preset finetune --finetune out/mae/ckpt.pt --data /path/to/imagenet
"""
import argparse
import copy
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import data
import init
import optim
import runtime
from model import SIZES, ViT, resize_pos_embed
from runtime import BadInput

PRESETS = {
    # minutes on two cores
    "laptop": dict(
        data="mnist5k", size="nano", img_size=28, patch_size=7, pool="token", epochs=10, batch_size=100, warmup=0.5, skipless_init="auto", betas={},
        lr={"residual": {"adamw": 3e-3, "soap": 3e-3, "kl-shampoo": 1e-3, "muon": 3e-3},      # adamw, soap: searched (results/table1.json)
            "skipless": {"adamw": 3e-4, "soap": 1e-3, "kl-shampoo": 3e-4, "muon": 1e-3}},
        weight_decay=0.05, clip=1.0, init_factor=1e-3, augment="none", mixup=0.0, cutmix=0.0, label_smoothing=0.0),
    # ViT-B/16, ImageNet-1k. The paper states: 300 epochs, no drop path without residuals, SOAP or AdamW. Assumed, as the paper's page does not say:
    # batch 1024, cosine with 5 warm-up epochs and lr 1e-3 (DeiT); weight decay .3, mixup .8, cutmix 1, smoothing .1 (a third party's account
    # of the paper); RandAugment 2/9, random erasing .25, clip 1 (DeiT, timm); SOAP betas (.9, .95) (the first author's MAE code), frequency 10 (SOAP's reference).
    "paper": dict(
        data=None, size="base", img_size=224, patch_size=16, pool="token", epochs=300, batch_size=1024, warmup=5.0, skipless_init="paper",
        lr={"residual": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3},
            "skipless": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3}},
        betas=dict(soap=(0.9, 0.95)), weight_decay=0.3, clip=1.0,
        augment="strong", mixup=0.8, cutmix=1.0, label_smoothing=0.1, workers=8),
    # MAE's fine-tuning of ViT-B: lr 5e-4 * 1024 / 256, mean pooling, no clipping. Assumed: the lrs without shortcuts and of other optimizers than AdamW.
    "finetune": dict(
        data=None, pool="mean", epochs=100, batch_size=1024, warmup=5.0, skipless_init="default", weight_decay=0.05, layer_decay=0.65, drop_path=0.1, clip=0.0,
        lr={"residual": {"adamw": 2e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3},
            "skipless": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3}},
        betas=dict(soap=(0.9, 0.95)), augment="strong", mixup=0.8, cutmix=1.0, label_smoothing=0.1, workers=8),
}
# The constants of --init, and what they are where they are left out. skipless: paper 1's, measured for heads of 32; residual-free: paper 2's, for its own models.
CONSTANTS = {"skipless": dict(alpha=1.0, beta=2.0, c=3.0, cancel_mean=0.0, mlp_gain=1.0), "residual-free": dict(alpha_qk=3.0, alpha_vo=3.0, alpha_u=1.5, alpha_d=1.5)}
# What defines an encoder and comes out of its checkpoint with --finetune; the values are for checkpoints that do not say.
ENCODER = dict(size=None, depth=None, patch_size=None, shortcut=None, alpha_min=1.0, temperature_beta=1.0, schedule="linear", decay_on="both", scaling="none",
               learn_alphas=False)
# Flags that define the run: a checkpoint with other values is another run. Flags that never touch its course are free; the rest may change, and is said.
FIXED = ("finetune", "size", "depth", "img_size", "patch_size", "pool", "shortcut", "alpha_min", "temperature_beta", "init", "alpha", "beta", "c", "cancel_mean",
         "mlp_gain", *CONSTANTS["residual-free"], "opt", "betas", "weight_decay", "layer_decay", *runtime.MATRIX_FLAGS, "batch_size", "seed", "holdout")
FREE = ("preset", "device", "compile", "workers", "threads", "out", "resume", "log_every", "eval_every", "save_every", "wandb", "micro_batch",
        "train_images", "classes", "in_chans")


def get_args(argv=None):
    """Two passes: the first finds the preset, whose values then become the defaults that --help shows and flags win over; a third for --finetune."""
    number = runtime.number
    presets = runtime.Parser(add_help=False)
    presets.add_argument("--preset", choices=list(PRESETS), default="laptop", help="a dict of defaults at the top of this file")
    preset = presets.parse_known_args(argv)[0].preset
    parser = runtime.Parser(description=__doc__, parents=[presets])

    add = parser.add_argument_group("model").add_argument
    add("--finetune", default=None, metavar="CKPT",
        help="start from the encoder of this checkpoint of train_mae.py, train_dino.py (the teacher's) or train_vit.py, its averaged weights if it has some; size, patches and shortcuts "
             "are its own, data and image size too unless given")
    add("--size", choices=list(SIZES), help="embedding width, depth and heads")
    add("--depth", type=number(int, low=1), help="number of blocks; None is the size's own")
    add("--img-size", type=number(int, low=1), help="side of the square images, pixels")
    add("--patch-size", type=number(int, low=1), help="side of a patch, pixels")
    add("--pool", choices=["token", "mean"], help="what the head reads: the class token, or the mean of the patch tokens")
    add("--shortcut", choices=["residual", "skipless", "decayed"], default="residual", help="x + f(x), f(x), or a x + f(x) with a falling to --alpha-min")
    add("--skipless", dest="shortcut", action="store_const", const="skipless", default=argparse.SUPPRESS, help="same as --shortcut skipless")
    add("--alpha-min", type=number(float, low=0, high=1), default=None, help="weight of the last shortcut, which --shortcut decayed needs (paper 3: 0.6 to 0.7); None is 1, for the others")
    add("--temperature-beta", type=number(float, low=0.1, high=10), default=1.0, help="attention temperature beta ** -layer (paper 2); 1 is off")
    add("--drop-path", type=number(float, low=0, below=1), default=None,
        help=f"stochastic depth of the last block, growing from 0; needs a shortcut; None is {PRESETS[preset].get('drop_path', 0)}, without shortcuts 0")

    add = parser.add_argument_group("initialisation").add_argument
    add("--init", choices=["auto", "default", "paper", *CONSTANTS], default=None,
        help="auto: if skipless, constants chosen for this head size, token count and depth, else default; paper: the paper's constants (for nano, measured ones: "
             f"init.PAPER_CONSTANTS); skipless: --alpha --beta --c; residual-free: paper 2's, --alpha-qk and the like; None: skipless if one of these is given, else default with residuals and {PRESETS[preset]['skipless_init']} without")
    add("--alpha", type=number(float, low=0), help="random part of W_Q W_K^T, for --init skipless; None is 1")
    add("--beta", type=number(float, low=0), help="identity part of W_Q W_K^T, for --init skipless; None is 2")
    add("--c", type=number(float, above=0), help="W_V W_O is c^2 times an orthogonal matrix, for --init skipless; None is 3")
    add("--cancel-mean", type=number(float, low=0, high=1), help="share of GELU's mean that the bias of fc2 starts by cancelling, for --init skipless; None is 0")
    add("--mlp-gain", type=number(float, above=0), help="gain of fc1: below 1 GELU starts closer to linear, for --init skipless; None is 1")
    runtime.add_residual_free_flags(add, CONSTANTS["residual-free"])

    add = parser.add_argument_group("optimisation").add_argument
    add("--opt", choices=["adamw", "soap", "kl-shampoo", "muon"], default="adamw", help="for the matrices of the blocks; AdamW takes the rest")
    add("--lr", type=number(float, above=0, high=1e30), default=None, help=f"peak learning rate; None is the preset's, by shortcut and optimizer: {PRESETS[preset]['lr']}")
    add("--weight-decay", type=number(float, low=0), help="decoupled; not on biases, norms, position embedding and class token")
    add("--layer-decay", type=number(float, above=0, high=1), default=1.0, help="lr of a layer as a share of the next one's, the head's in full; 1 is off")
    add("--betas", type=number(float, low=0, below=1), nargs=2, default=None, metavar=("B1", "B2"),
        help=f"momenta; None is the preset's, by optimizer: {PRESETS[preset]['betas']}, or the optimizer's own")
    runtime.add_matrix_flags(add)
    add("--batch-size", type=number(int, low=1), help="global: images per update over all processes")
    add("--micro-batch", type=number(int, low=1), default=None, help="images per forward pass and process; None means as many as the batch gives it")
    add("--epochs", type=number(float, above=0, high=1e6), help="passes over the training set")
    add("--warmup", type=number(float, low=0), help="epochs of linear warm-up")
    add("--clip", type=number(float, low=0), help="largest gradient norm; 0 is off")
    add("--ema", type=number(float, low=0, below=1), default=0.0, help="decay of the averaged weights, e.g. 0.9999; 0 is off")

    add = parser.add_argument_group("data").add_argument
    add("--data", help=f"{', '.join(data.NAMES)}, or a folder with train/<class>/ and val/<class>/")
    add("--holdout", type=number(float, low=0, high=0.9), default=0.0, help="validate on this share of the training set instead of the test set: for tuning")
    add("--augment", choices=["none", "light", "strong"], help="light: crops and flips; strong: RandAugment and random erasing too")
    add("--mixup", type=number(float, low=0), help="MixUp alpha; 0 is off")
    add("--cutmix", type=number(float, low=0), help="CutMix alpha; 0 is off")
    add("--label-smoothing", type=number(float, low=0, high=1), help="share of the target spread over all classes")
    runtime.add_run_flags(parser)

    parser.set_defaults(schedule="linear", decay_on="both", scaling="none", learn_alphas=False)          # no flags: only a pretrained encoder has others
    parser.set_defaults(**{k: v for k, v in PRESETS[preset].items() if k not in ("lr", "betas", "skipless_init", "drop_path")})
    args = parser.parse_args(argv)
    if args.finetune is not None:
        parser.set_defaults(**dict.fromkeys([*ENCODER, "img_size", "data"]))     # None is now what no flag says
        args = parser.parse_args(argv)
        adopt_encoder(args)
    elif preset == "finetune":
        raise BadInput("--preset finetune needs --finetune, the checkpoint to start from")
    if args.data is None:
        raise BadInput(f"--preset {preset} needs --data: a folder with train/<class>/ and val/<class>/")
    if args.lr is None:
        args.lr = PRESETS[preset]["lr"]["skipless" if args.shortcut == "skipless" else "residual"][args.opt]
    if args.drop_path is None:
        args.drop_path = 0.0 if args.shortcut == "skipless" else PRESETS[preset].get("drop_path", 0.0)
    args.betas = list(args.betas or PRESETS[preset]["betas"].get(args.opt, ())) or None
    if args.betas and args.opt == "muon":
        raise BadInput("--betas has no meaning for --opt muon, which has one momentum: leave it out")
    resolve_init(args, PRESETS[preset]["skipless_init"])
    if args.shortcut == "decayed" and args.alpha_min is None:
        raise BadInput("--shortcut decayed needs --alpha-min, the weight of the last shortcut: 1 would be residual, paper 3 uses 0.6 to 0.7")
    args.alpha_min = 1.0 if args.alpha_min is None else args.alpha_min
    if args.out is None:
        depth = f"-depth{args.depth}" if args.depth else ""
        args.out = f"out/vit-{args.size}{depth}-{args.shortcut}-{args.init}-{args.opt}-seed{args.seed}"
    args.depth = args.depth or SIZES[args.size]["depth"]         # so that a resume with the depth spelt out is the same run
    return args


def read_pretrained(path):
    """The checkpoint with the encoder to fine-tune. Raises BadInput for a file that is missing, damaged, or holds another kind of model."""
    remedy = "give the ckpt.pt of a run of train_mae.py, train_dino.py or train_vit.py"
    checkpoint = runtime.read_checkpoint(path, "--finetune", remedy)
    if checkpoint["args"].get("kind", "vit") not in ("mae", "dino", "vit") or not {"train_images", "patch_size"} <= set(checkpoint["args"]):
        what = "a language model" if "lm" in checkpoint["args"] else "another kind of model"
        raise BadInput(f"--finetune {path} holds {what}, not an encoder of images: {remedy}")
    return checkpoint


def adopt_encoder(args):
    """Fill in what defines the encoder from the checkpoint, and --data and --img-size where they were left out. Raises BadInput where a flag says otherwise.

    A run that is resumed knows all of it from its own checkpoint and needs the pretrained one no more."""
    args.out = args.out or f"out/vit-finetune-{Path(args.finetune).resolve().parent.name}-{args.opt}-seed{args.seed}"
    ckpt, saved = runtime.find_checkpoint(args.out, args.resume, "pool")
    if ckpt.resolve() == Path(args.finetune).resolve():
        raise BadInput(f"--finetune {args.finetune} lies in --out {args.out}, where it would be replaced: choose another --out")
    made = saved["args"] if saved and saved["args"].get("finetune") == args.finetune else read_pretrained(args.finetune)["args"]
    for key, default in ENCODER.items():
        value, given = made.get(key, default), getattr(args, key)
        if given not in (None, value):
            flag = f"--{key.replace('_', '-')}"
            raise BadInput(f"{flag} {given} contradicts --finetune {args.finetune}, an encoder with {flag} {value}: leave it out")
        setattr(args, key, value)
    for key in ("init", *(k for constants in CONSTANTS.values() for k in constants)):
        if getattr(args, key) is not None:
            raise BadInput(f"--{key.replace('_', '-')} has no effect with --finetune, which brings its own weights: leave it out")
    if args.data is None and made["data"] not in data.NAMES and not data.as_folder(made["data"]):
        raise BadInput(f"--finetune {args.finetune} was trained on {made['data']}, which is no folder here: pass --data")
    args.init, args.img_size, args.data = "pretrained", args.img_size or made["img_size"], args.data or made["data"]


@torch.no_grad()
def load_encoder(raw, path):
    """Embeddings, positions (MAE's fixed ones become learned ones; another grid interpolates them), blocks and, where both have one, the norm
    after them, from the checkpoint at `path` into the ViT `raw`. Returns a line that says what came and what is new. Raises BadInput where it does not fit."""
    checkpoint = read_pretrained(path)
    made, weights = checkpoint["args"], checkpoint["ema"] or checkpoint["model"]
    if made["in_chans"] != raw.patch_embed.proj.in_channels:
        raise BadInput(f"--finetune {path} saw images of {made['in_chans']} channels and --data has {raw.patch_embed.proj.in_channels}: choose another --data, "
                       "or pretrain on it")
    weights = {k.removeprefix("backbone."): v for k, v in weights.items()}          # DINO's, beside its head
    own, side = raw.state_dict(), made["img_size"] // made["patch_size"]
    kept = {k: v for k, v in weights.items() if k in own and k.split(".")[0] in ("patch_embed", "cls_token", "pos_embed", "blocks", "norm", "fc_norm")}
    try:
        kept["pos_embed"] = resize_pos_embed(kept["pos_embed"], (side, side), raw.grid)
        raw.load_state_dict(own | kept)
    except (KeyError, RuntimeError) as error:
        raise BadInput(f"--finetune {path} does not fit the models of this version ({' '.join(str(error).split())[:200]}): pretrain anew") from error
    return (f"pretrained: {'averaged' if checkpoint['ema'] else 'last'} weights of {path} ({made.get('kind', 'vit')}, step {checkpoint['step']}); "
            f"new: {', '.join(sorted({k.split('.')[0] for k in own.keys() - kept.keys()}))}")


def resolve_init(args, skipless_init):
    """Fill in --init and its constants where they were left out; a constant alone chooses its init, and with another one it is refused."""
    runtime.fill_constants(args, CONSTANTS)
    if args.init is None or (args.init == "auto" and args.shortcut != "skipless"):
        args.init = skipless_init if args.shortcut == "skipless" else "default"


def build_model(args, images):
    """The ViT with its initialisation applied; also a line that says which. Equal on all ranks: the seed does not know the rank."""
    torch.manual_seed(args.seed)
    size = dict(SIZES[args.size], depth=args.depth)
    try:
        raw = ViT(img_size=args.img_size, patch_size=args.patch_size, in_chans=images.in_chans, num_classes=len(images.classes), shortcut=args.shortcut,
                  alpha_min=args.alpha_min, temperature_beta=args.temperature_beta, drop_path=args.drop_path, pool=args.pool, schedule=args.schedule,
                  decay_on=args.decay_on, scaling=args.scaling, learn_alphas=args.learn_alphas, **size)
        if args.init == "pretrained":                            # by `load_encoder`, or by a resume
            nn.init.trunc_normal_(raw.head.weight, std=2e-5)     # MAE's: the first logits are as good as zero
            return raw, f"pretrained: {args.finetune}"
        if args.init == "default":
            return raw, "default: truncated normal, std .02"
        if args.init == "auto":
            constants = init.choose_constants(size["embed_dim"], size["num_heads"], raw.pos_embed.shape[1], size["depth"],
                                              temperature_beta=args.temperature_beta)
        elif args.init == "paper":
            constants = init.PAPER_CONSTANTS[args.size]
        else:
            constants = {k: getattr(args, k) for k in CONSTANTS[args.init]}
    except ValueError as error:                                  # the model's own sentence on a size that does not fit
        raise BadInput(str(error)) from error
    (init.init_residual_free_lm if args.init == "residual-free" else init.init_skipless_vit)(raw, **constants)
    return raw, f"{args.init}: " + ", ".join(f"{k} {v:.3g}" for k, v in constants.items())


@torch.no_grad()
def evaluate(model, images, transform, args, world, dtype):
    """(loss, top-1 %, top-5 %) over the whole validation set: strided over ranks, no padding, no drop, SUM then divide."""
    model.eval()
    loss, top1, top5, seen = 0.0, 0.0, 0.0, 0
    for x, y in data.eval_batches(images.val, transform, args.micro_batch, world.rank, world.size, args.workers):
        x, y = x.to(world.device, non_blocking=True), y.to(world.device, non_blocking=True)
        with runtime.autocast(world.device, dtype):
            logits = model(x)
        logits = logits.float()
        hit = logits.topk(min(5, logits.shape[1]), dim=1).indices == y[:, None]
        loss, top1, top5, seen = loss + F.cross_entropy(logits, y, reduction="sum"), top1 + hit[:, 0].sum(), top5 + hit.sum(), seen + len(y)
    model.train()
    loss, top1, top5, seen = runtime.all_sum([loss, top1, top5, seen], world)
    return loss / seen, 100 * top1 / seen, 100 * top5 / seen


def main(argv=None):
    args = get_args(argv)
    world = runtime.start(args.device, args.threads)
    dtype, why = runtime.pick_dtype(args.dtype, world.device)
    micro_steps = runtime.split_batch(args, world)

    # data, model, optimizer
    images = data.load_images(args.data, args.holdout, args.seed)
    per_epoch = data.steps_per_epoch(len(images.train), args.batch_size)
    steps, warmup = max(1, round(args.epochs * per_epoch)), round(args.warmup * per_epoch)
    eval_every, save_every = args.eval_every or per_epoch, args.save_every or per_epoch
    ckpt, saved = runtime.find_checkpoint(args.out, args.resume, "pool")
    raw, init_line = build_model(args, images)
    if args.finetune and not saved:
        init_line = load_encoder(raw, args.finetune)
    raw.to(world.device)
    ema = copy.deepcopy(raw).requires_grad_(False) if args.ema else None
    optimizer = optim.build_optimizer(raw, args.opt, args.lr, args.weight_decay, layer_decay=args.layer_decay, **runtime.matrix_options(args))
    train_tf, eval_tf = data.train_transform(images, args.img_size, args.augment), data.eval_transform(images, args.img_size)
    mix = data.mixer(len(images.classes), args.mixup, args.cutmix)

    # resume, before anything is written
    flags, step, best, top1, notes = dict(vars(args), train_images=len(images.train), classes=len(images.classes), in_chans=images.in_chans), 0, 0.0, None, []
    if saved:
        notes = runtime.check_resume(ckpt, {"finetune": None, "layer_decay": 1.0, **saved["args"]}, flags, FIXED, FREE)      # older ones lack the two
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
    log.say(f"model       {sum(p.numel() for p in raw.parameters()) / 1e6:.2f} M parameters, {args.shortcut}, init {init_line}")
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
        loss = 0.0
        for micro in range(micro_steps):
            x, y = next(batches)
            x, y = x.to(world.device, non_blocking=True), y.to(world.device, non_blocking=True)
            torch.manual_seed(runtime.mix_seed(args.seed, "noise", step, world.rank, micro))     # drop path, MixUp: a function of the step
            if mix:
                x, y = mix(x, y)
            # gradients are exchanged once, with the last micro-batch; the switch must cover forward and backward
            last = micro == micro_steps - 1
            with nullcontext() if last or world.size == 1 else model.no_sync():
                with runtime.autocast(world.device, dtype):
                    logits = model(x)
                part = F.cross_entropy(logits.float(), y, label_smoothing=args.label_smoothing) / micro_steps   # a mean of means: same as one big batch
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
        if step % args.log_every == 0 or eval_now or save_now:
            mean, norm = runtime.check_finite(window, world)     # before anything is saved
            rate = len(window) * args.batch_size / (time.perf_counter() - clock)
            log.line(f"step {step:6d}  epoch {step / per_epoch:6.2f}  loss {mean:.4f}  lr {lr:.2e}  grad norm {norm:.2f}  {rate:.0f} images/s",
                     step=step, epoch=step / per_epoch, loss=mean, lr=lr, grad_norm=norm, images_per_s=rate)
            if eval_now:
                val_loss, top1, top5 = evaluate(ema or raw, images, eval_tf, args, world, dtype)
                runtime.check_val(val_loss, step, lr)
                best = max(best, top1)
                log.line(f"step {step:6d}  val loss {val_loss:.4f}  top-1 {top1:.1f} %  top-5 {top5:.1f} %" + " (ema)" * bool(ema),
                         step=step, val_loss=val_loss, val_top1=top1, val_top5=top5)
            if save_now:                                         # on all ranks: each holds a share of the optimizer's state
                runtime.save_checkpoint(ckpt, dict(model=raw.state_dict(), ema=ema and ema.state_dict(), optimizer=optimizer.state_dict(),
                                                   step=step, best=best, rng=torch.get_rng_state(), args=flags), world.main)
            window, clock = [], time.perf_counter()
    bar.close()

    if top1 is None:                                             # resumed at its end: nothing was left to train
        _, top1, _ = evaluate(ema or raw, images, eval_tf, args, world, dtype)
    if world.main:
        runtime.plot_curve(args.out, f"ViT-{args.size}, {args.shortcut}, init {args.init}, {args.opt}", "val_top1", "validation top-1, %")
    log.say(f"{args.out}: ckpt.pt, log.jsonl, args.json, curve.png; best top-1 {best:.1f} %")
    log.say(f"val top-1 {top1:.1f} %")


if __name__ == "__main__":
    runtime.run(main)
