"""Supervised ViT, with and without residual connections (paper 1, Table 1).

On a laptop: embedded MNIST digits (4,000 + 1,000), 12 layers, 1.35 M parameters, 10 epochs, 1 to 2
minutes on two cores. Top-1 over three seeds (results/table1.json, 2026-11-30):
    python train_vit.py --skipless --opt soap                           88.0 +- 1.2 %
    python train_vit.py --skipless --opt soap --init default --lr 3e-4  69.8 +- 0.8 %   the usual init
    python train_vit.py                                                 83.2 +- 1.6 %   the usual ViT

The paper's ViT-B/16 on ImageNet-1k (paper: residual AdamW 80.3, skipless + init + SOAP 80.8 % top-1):
    torchrun --nproc_per_node=8 train_vit.py --preset paper --data IMAGENET --skipless --opt soap

Fine-tuning of an encoder that train_mae.py, train_dino.py or this script trained; and MAE's recipe:
    python train_vit.py --finetune out/mae --set pool=mean layer_decay=0.65 --lr 1e-3
    torchrun --nproc_per_node=8 train_vit.py --preset finetune --finetune out/mae --data IMAGENET

The figures of a trained net on any data of its classes:
    python train_vit.py --set eval_only=out/vit --data IMAGENET
"""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

import data
import init
import optim
import orthogonal
import runtime
from model import SHORTCUTS, SIZES, ViT, learnable, resize_pos_embed
from runtime import BadInput

# What every preset has beside its own entries. `--set key=value` changes any of them.
COMMON = dict(
    img_size=28, patch_size=7,              # pixels
    pool="token",                           # the head reads the class token, or the mean of the patches
    drop_path=0.0,                          # stochastic depth of the last block, growing from 0
    alpha=1.0, beta=2.0, c=3.0,             # constants of --init skipless (paper 1), for heads of 32
    cancel_mean=0.0,                        # share of GELU's mean that the bias of fc2 cancels (ours)
    alpha_qk=3.0, alpha_vo=3.0, alpha_u=1.5, alpha_d=1.5,       # of --init residual-free (paper 2)
    layer_decay=1.0,                        # lr of a layer as a share of the next one's; 1 is off
    holdout=0.0,                            # validate on this share of the training set
    eval_only="",                           # a run of this script: print its figures, train nothing
    augment="none", mixup=0.0, cutmix=0.0, label_smoothing=0.0, bad_images="stop",
)
PRESETS = {
    # Minutes on two cores. The lrs of AdamW and SOAP were searched (results/table1.json).
    "laptop": dict(
        COMMON, data="mnist5k", size="nano", epochs=10, batch_size=100, warmup=0.5, skipless_init="auto",
        lr={"residual": {"adamw": 3e-3, "soap": 3e-3, "kl-shampoo": 1e-3, "muon": 3e-3},
            "skipless": {"adamw": 3e-4, "soap": 1e-3, "kl-shampoo": 3e-4, "muon": 1e-3}},
        weight_decay=0.05, clip=1.0, init_factor=1e-3),
    # ViT-B/16, ImageNet-1k. Reported: 300 epochs, no drop path without residuals, SOAP or AdamW.
    # Assumed: batch 1024, cosine with 5 warm-up epochs and lr 1e-3 (DeiT); weight decay .3, mixup .8,
    # cutmix 1, smoothing .1 (a third party's account of the paper); RandAugment 2/9, random erasing
    # .25, clip 1 (DeiT, timm); SOAP's betas (.9, .95) (the first author's MAE code), frequency 10
    # (SOAP's reference).
    "paper": dict(
        COMMON, data=None, size="base", img_size=224, patch_size=16, epochs=300, batch_size=1024,
        warmup=5.0, skipless_init="paper",
        lr={"residual": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3},
            "skipless": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3}},
        betas={"soap": (0.9, 0.95)}, weight_decay=0.3, clip=1.0,
        augment="strong", mixup=0.8, cutmix=1.0, label_smoothing=0.1, workers=8),
    # MAE's fine-tuning of ViT-B: lr 5e-4 * 1024 / 256, mean pooling, no clipping. Assumed: the lrs
    # without shortcuts and of other optimizers than AdamW.
    "finetune": dict(
        COMMON, data=None, size="base", pool="mean", epochs=100, batch_size=1024, warmup=5.0,
        skipless_init="default",
        lr={"residual": {"adamw": 2e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3},
            "skipless": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3}},
        betas={"soap": (0.9, 0.95)}, weight_decay=0.05, layer_decay=0.65, drop_path=0.1, clip=0.0,
        augment="strong", mixup=0.8, cutmix=1.0, label_smoothing=0.1, workers=8),
}


def get_args(argv=None):
    """Flags win over --set, --set over the preset."""
    parser, preset = runtime.train_parser(__doc__, PRESETS, argv)
    add = parser.add_argument_group("model").add_argument
    add("--size", choices=list(SIZES), help="embedding width, depth and heads")
    add("--depth", type=runtime.number(int, low=1), help="number of blocks, if not the size's own")
    runtime.add_shortcut_flags(add, SHORTCUTS)
    add("--temperature-beta", type=runtime.number(float, low=0.1, high=10), default=1.0,
        help="attention temperature beta ** -layer (paper 2); 1 is off")
    add("--init", choices=["auto", "default", "paper", "skipless", "residual-free"],
        help="auto: constants from the net's size; paper: paper 1's; skipless, residual-free: the "
             f"preset's; default: std .02. Else {preset['skipless_init']} if skipless, default if not")
    add("--finetune", metavar="CKPT", help="start from the encoder of this run: its size, patches and "
                                           "shortcuts; its data and image size too, unless given")
    runtime.add_optimizer_flags(parser, optim.OPTIMIZERS)
    add = parser.add_argument_group("data").add_argument
    add("--data", help=f"{', '.join(data.NAMES)}, or a folder with train/<class>/ and val/<class>/")
    runtime.add_run_flags(parser)
    args, given = runtime.read_flags(parser, preset, argv, "vit", lead=("size", "shortcut", "opt"))

    if args.eval_only:
        return adopt_run(args, given)
    args.alpha_min, args.alphas, args.learned = runtime.last_weight(args), None, False
    args.depth = args.depth or SIZES[args.size]["depth"]
    if args.init is None or (args.init == "auto" and args.shortcut != "skipless"):
        args.init = args.skipless_init if args.shortcut == "skipless" else "default"
    del args.skipless_init
    if args.finetune:
        adopt_encoder(args, given)
    elif args.preset == "finetune":
        raise BadInput("--preset finetune needs --finetune, the run to start from")
    if args.data is None:
        raise BadInput(f"--preset {args.preset} needs --data, a folder with train/<class>/ and val/")
    args.lr = args.lr or runtime.by_net(preset["lr"], args)
    args.drop_path *= args.shortcut != "skipless"
    return args


def adopt_run(args, given):
    """eval_only: what that run was trained with, apart from what is given now. Returns args."""
    made = read_encoder(args.eval_only, "--set eval_only", ["vit"])["args"]
    for key, value in made.items():
        if key not in given and (key == "data" or key not in runtime.UNTOUCHED):
            setattr(args, key, value)
    args.resume = False                                          # --out does not matter
    return args


def adopt_encoder(args, given):
    """What defines the encoder to fine-tune, from its checkpoint; of a resumed run, from its own."""
    own = runtime.find_checkpoint(args.out, args.resume, "vit")
    checkpoint = own or read_encoder(args.finetune)
    made, options = checkpoint["args"], checkpoint["args"]["model"]
    args.data = args.data if "data" in given else made["data"]
    args.img_size = args.img_size if "img_size" in given else made["img_size"]
    args.size, args.init, args.alphas = made["size"], "pretrained", made.get("alphas")
    args.learned = "blocks.0.alphas.0" in checkpoint["model"]
    args.temperature_beta = options.get("temperature_beta", 1.0)
    for key in ("depth", "patch_size", "shortcut", "alpha_min"):
        setattr(args, key, options[key])


def read_encoder(path, flag="--finetune", kinds=("mae", "dino", "vit")):
    """The checkpoint of an encoder of images. Raises BadInput for any other file."""
    remedy = f"give a run of {', '.join(f'train_{kind}.py' for kind in kinds)}"
    checkpoint = runtime.read_checkpoint(path, flag, remedy)
    kind = checkpoint["args"]["kind"]
    if kind not in kinds:
        raise BadInput(f"{flag} {path} holds another kind of model ({kind}): {remedy}")
    return checkpoint


@torch.no_grad()
def load_encoder(raw, path):
    """Copy embedding, positions, blocks and the norm after them from a checkpoint into the ViT `raw`.

    MAE's fixed positions become learned ones; another grid interpolates them. Returns a line that says
    what came. Raises BadInput where it does not fit."""
    checkpoint = read_encoder(path)
    made, weights = checkpoint["args"], checkpoint["ema"] or checkpoint["model"]
    weights = {k.removeprefix("backbone."): v for k, v in weights.items()}          # DINO's
    own, side = raw.state_dict(), made["img_size"] // made["model"]["patch_size"]
    parts = ("patch_embed", "cls_token", "pos_embed", "blocks", "norm", "fc_norm")
    kept = {k: v for k, v in weights.items() if k in own and k.split(".")[0] in parts}
    try:
        kept["pos_embed"] = resize_pos_embed(kept["pos_embed"], (side, side), raw.grid)
        raw.load_state_dict(own | kept)
    except (KeyError, RuntimeError) as error:                    # other channels, or another version's
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"--finetune {path} does not fit --data and this model ({reason}): pretrain on "
                       "such images") from error
    new = sorted({k.split(".")[0] for k in own.keys() - kept.keys()})
    which = "averaged" if checkpoint["ema"] else "last"
    return f"{which} weights of {path}, step {checkpoint['step']}; new: {', '.join(new)}"


def build_model(args, images):
    """(the ViT with its initialisation applied, its keyword arguments, the constants used).

    Equal on all ranks: the seed does not know the rank. Raises BadInput for sizes that do not fit."""
    torch.manual_seed(args.seed)
    options = dict(SIZES[args.size], in_chans=images.in_chans, num_classes=len(images.classes))
    for key in ("depth", "img_size", "patch_size", "shortcut", "alpha_min", "temperature_beta",
                "drop_path", "pool"):
        options[key] = getattr(args, key)
    with runtime.user_errors():
        raw = ViT(**options, alphas=learnable(args.alphas) if args.learned else args.alphas)
        if args.init != "pretrained":
            return raw, options, init.apply_init(raw, args.init, vars(args), args.size)
    nn.init.trunc_normal_(raw.head.weight, std=2e-5)             # MAE's: the first logits are almost 0
    return raw, options, {}


@torch.no_grad()
def evaluate(model, images, transform, args, run):
    """(loss, top-1 %, top-5 %) over the whole validation set: strided over ranks, SUM then divide."""
    model.eval()
    loss, top1, top5, seen = 0.0, 0.0, 0.0, 0
    for batch in data.eval_batches(images.val, transform, args.micro_batch, run.rank, run.size,
                                   args.workers):
        x, y = run.to_device(*batch)
        with run.autocast():
            logits = model(x)
        logits = logits.float()
        hit = logits.topk(min(5, logits.shape[1]), dim=1).indices == y[:, None]
        loss += F.cross_entropy(logits, y, reduction="sum")
        top1, top5, seen = top1 + hit[:, 0].sum(), top5 + hit.sum(), seen + len(y)
    model.train()
    loss, top1, top5, seen = runtime.all_sum([loss, top1, top5, seen], run.world)
    return loss / seen, 100 * top1 / seen, 100 * top5 / seen


def evaluate_only(args):
    """Print the figures of a trained net on the validation set of --data; write nothing."""
    run = runtime.open_run(args, "vit")
    images = data.load_images(args.data, args.holdout, args.seed, args.bad_images)
    facts = data.facts(images)
    for key in ("classes", "in_chans"):
        if facts[key] != getattr(args, key):
            raise BadInput(f"--data {args.data} has {key} {facts[key]}, but {args.eval_only} was "
                           f"trained with {getattr(args, key)}: give data like its own")
    raw, _, _ = build_model(args, images)
    checkpoint = read_encoder(args.eval_only)
    raw.load_state_dict(checkpoint["ema"] or checkpoint["model"])
    raw.to(run.device)
    loss, top1, top5 = evaluate(raw, images, data.eval_transform(images, args.img_size), args, run)
    run.say(f"{args.eval_only}, step {checkpoint['step']}: val loss {loss:.4f}, top-1 {top1:.1f} %, "
            f"top-5 {top5:.1f} %")


def main(argv=None):
    args = get_args(argv)
    if args.eval_only:
        return evaluate_only(args)
    run = runtime.open_run(args, "vit", best=("val_top1", max))

    # data, model, optimizer
    images = data.load_images(args.data, args.holdout, args.seed, args.bad_images)
    per_epoch = data.steps_per_epoch(len(images.train), args.batch_size)
    steps, warmup = max(1, round(args.epochs * per_epoch)), round(args.warmup * per_epoch)
    eval_every, save_every = args.eval_every or per_epoch, args.save_every or per_epoch
    raw, options, constants = build_model(args, images)
    line = ", ".join(f"{key} {value:.3g}" for key, value in constants.items())
    if args.finetune and not run.saved:
        line = load_encoder(raw, args.finetune)
    raw.to(run.device)
    constraint = orthogonal.constrain(raw.blocks, args)
    ema = copy.deepcopy(raw).requires_grad_(False) if args.ema else None
    optimizer = optim.build_optimizer(raw, args.opt, args.lr, args.weight_decay, args.layer_decay,
                                      constraint=constraint, **runtime.optimizer_options(args))
    train_tf = data.train_transform(images, args.img_size, args.augment)
    eval_tf = data.eval_transform(images, args.img_size)
    mix = data.mixer(len(images.classes), args.mixup, args.cutmix)

    facts = dict(data.facts(images), model=options, constants=constants)
    step = run.begin(facts, steps, raw, ema, optimizer)
    run.banner(data.describe_images(images),
               f"{runtime.millions(raw)}, {args.shortcut}, init {args.init} {line}",
               f"{steps} steps, {per_epoch} per epoch", optim.describe(optimizer))
    model = run.wrap(raw)
    batches = data.train_batches(images.train, train_tf, args.batch_size, args.seed, step, steps,
                                 run.rank, run.size, run.micro_steps, args.workers)

    def look(step, lr):
        val_loss, top1, top5 = evaluate(ema or raw, images, eval_tf, args, run)
        runtime.check_val(val_loss, step, lr)
        line = f"step {step:6d}  val loss {val_loss:.4f}  top-1 {top1:.1f} %  top-5 {top5:.1f} %"
        run.log(line + " (ema)" * bool(ema), step=step, val_loss=val_loss, val_top1=top1, val_top5=top5)

    if run.owes_look(step, eval_every):
        look(step, args.lr)
    while step < steps:
        lr = runtime.lr_at(step, steps, warmup, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        loss = 0.0
        for micro in range(run.micro_steps):
            x, y = run.to_device(*next(batches))
            noise_seed = runtime.mix_seed(args.seed, "noise", step, run.rank, micro)
            torch.manual_seed(noise_seed)                        # of drop path and MixUp
            if mix:
                x, y = mix(x, y)
            with run.accumulate(model, micro):
                with run.autocast():
                    logits = model(x)
                part = F.cross_entropy(logits.float(), y, label_smoothing=args.label_smoothing)
                part = part * run.share(len(x))
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
        if log_now:
            run.log_training(step, lr, args.batch_size, "images", epoch=step / per_epoch)
        if save_now:
            run.save(step, raw, ema, optimizer)
        if eval_now:
            look(step, lr)

    run.finish(f"ViT-{args.size}, {args.shortcut}, init {args.init}, {args.opt}", "val_top1",
               "validation top-1, %")
    run.say(f"best top-1 {run.best():.1f} %")
    run.say(f"val top-1 {run.last('val_top1'):.1f} %")


if __name__ == "__main__":
    runtime.run_script(main)
