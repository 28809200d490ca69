"""Supervised ViT, with and without residual connections (paper 1, Table 1).

On a laptop: embedded MNIST digits (4,000 + 1,000), 12 layers, 1.35 M parameters, 10 epochs, 1 to 2
minutes on two cores. Top-1 over three seeds (results/table1.json, 2026-11-30):
    python train_vit.py --skipless --opt soap                           88.0 +- 1.2 %
    python train_vit.py --skipless --opt soap --init default --lr 3e-4  69.8 +- 0.8 %   the usual initialisation
    python train_vit.py                                                 83.2 +- 1.6 %   the usual ViT: residual, AdamW

The paper's ViT-B/16 on ImageNet-1k (paper: residual AdamW 80.3, skipless + init + SOAP 80.8 % top-1):
    torchrun --nproc_per_node=8 train_vit.py --preset paper --data /path/to/imagenet --skipless --opt soap

Fine-tuning of an encoder that train_mae.py, train_dino.py or this script trained; on a laptop, and MAE's
recipe:
    python train_vit.py --finetune out/mae-seed0 --set pool=mean layer_decay=0.65 --lr 1e-3
    torchrun --nproc_per_node=8 train_vit.py --preset finetune --finetune out/mae --data /path/to/imagenet
"""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

import data
import init
import optim
import runtime
from model import SHORTCUTS, SIZES, ViT, resize_pos_embed
from runtime import BadInput

# What every preset has beside its own entries. `--set key=value` changes any of them.
COMMON = dict(
    img_size=28, patch_size=7,              # pixels
    pool="token",                           # what the head reads: the class token, or the mean of the patch tokens
    drop_path=0.0,                          # stochastic depth of the last block, growing from 0; 0 without shortcuts
    alpha=1.0, beta=2.0, c=3.0,             # constants of --init skipless (paper 1), ours for heads of 32
    cancel_mean=0.0,                        # share of GELU's mean that the bias of fc2 starts by cancelling (ours)
    alpha_qk=3.0, alpha_vo=3.0, alpha_u=1.5, alpha_d=1.5,       # constants of --init residual-free (paper 2)
    layer_decay=1.0,                        # lr of a layer as a share of the next one's; 1 is off
    holdout=0.0,                            # validate on this share of the training set instead of the test set
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
    # cutmix 1, smoothing .1 (a third party's account of the paper); RandAugment 2/9, random erasing .25,
    # clip 1 (DeiT, timm); SOAP's betas (.9, .95) (the first author's MAE code), frequency 10 (SOAP's
    # reference).
    "paper": dict(
        COMMON, data=None, size="base", img_size=224, patch_size=16, epochs=300, batch_size=1024, warmup=5.0,
        skipless_init="paper",
        lr={"residual": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3},
            "skipless": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3}},
        betas=dict(soap=(0.9, 0.95)), weight_decay=0.3, clip=1.0,
        augment="strong", mixup=0.8, cutmix=1.0, label_smoothing=0.1, workers=8),
    # MAE's fine-tuning of ViT-B: lr 5e-4 * 1024 / 256, mean pooling, no clipping. Assumed: the lrs
    # without shortcuts and of other optimizers than AdamW.
    "finetune": dict(
        COMMON, data=None, size="base", pool="mean", epochs=100, batch_size=1024, warmup=5.0, skipless_init="default",
        lr={"residual": {"adamw": 2e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3},
            "skipless": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3}},
        betas=dict(soap=(0.9, 0.95)), weight_decay=0.05, layer_decay=0.65, drop_path=0.1, clip=0.0,
        augment="strong", mixup=0.8, cutmix=1.0, label_smoothing=0.1, workers=8),
}
ENCODER = ("embed_dim", "depth", "num_heads", "patch_size", "shortcut", "alpha_min", "temperature_beta")


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
        help="auto: constants from the net's size; paper: paper 1's; skipless, residual-free: those of the preset's "
             f"dict; default: std .02. Else {preset['skipless_init']} if skipless, default if not")
    add("--finetune", metavar="CKPT", help="start from the encoder of this run: its size, patches and shortcuts; its "
                                           "data and image size too, unless given")
    runtime.add_optimizer_flags(parser, optim.OPTIMIZERS)
    add = parser.add_argument_group("data").add_argument
    add("--data", help=f"{', '.join(data.NAMES)}, or a folder with train/<class>/ and val/<class>/")
    runtime.add_run_flags(parser)
    args, given = runtime.read_flags(parser, preset, argv, "vit", lead=("size", "shortcut", "opt"))

    args.encoder, args.alphas = {}, None
    if args.finetune:
        adopt_encoder(args, given)
    elif args.preset == "finetune":
        raise BadInput("--preset finetune needs --finetune, the run to start from")
    if args.data is None:
        raise BadInput(f"--preset {args.preset} needs --data: a folder with train/<class>/ and val/<class>/")
    args.lr = args.lr or runtime.by_net(preset["lr"], args)
    args.depth = args.depth or SIZES[args.size]["depth"]
    args.alpha_min = runtime.last_weight(args)
    if args.shortcut == "skipless":
        args.drop_path = 0.0
    if args.init is None or (args.init == "auto" and args.shortcut != "skipless"):
        args.init = preset["skipless_init"] if args.shortcut == "skipless" else "default"
    return args


def adopt_encoder(args, given):
    """What defines the encoder to fine-tune, from its checkpoint, or from our own where this run is
    resumed."""
    own = runtime.find_checkpoint(args.out, args.resume, "vit")[1]
    made = own["args"] if own else read_encoder(args.finetune)["args"]
    if own is None and "data" not in given:
        args.data = made["data"]
    for key in ("data", "img_size"):
        if key not in given:
            setattr(args, key, made[key] if args.data == made["data"] or key == "img_size" else args.data)
    args.encoder = {key: made["model"][key] for key in ENCODER if key in made["model"]}
    args.alphas, args.init = made.get("alphas"), "default"
    args.shortcut, args.alpha_min = args.encoder["shortcut"], args.encoder["alpha_min"]
    args.depth, args.patch_size = args.encoder["depth"], args.encoder["patch_size"]


def read_encoder(path):
    """The checkpoint of an encoder of images. Raises BadInput for any other file."""
    remedy = "give a run of train_mae.py, train_dino.py or train_vit.py"
    checkpoint = runtime.read_checkpoint(path, "--finetune", remedy)
    if checkpoint["args"]["kind"] not in ("mae", "dino", "vit"):
        raise BadInput(f"--finetune {path} holds another kind of model ({checkpoint['args']['kind']}): {remedy}")
    return checkpoint


@torch.no_grad()
def load_encoder(raw, path):
    """Copy embeddings, positions, blocks and the norm after them from the checkpoint at `path` into the
    ViT `raw`.

    MAE's fixed positions become learned ones, another grid interpolates them. Returns a line that says
    what came. Raises BadInput where it does not fit."""
    checkpoint = read_encoder(path)
    made, weights = checkpoint["args"], checkpoint["ema"] or checkpoint["model"]
    weights = {k.removeprefix("backbone."): v for k, v in weights.items()}          # DINO's, beside its head
    own, side = raw.state_dict(), made["img_size"] // made["model"]["patch_size"]
    parts = ("patch_embed", "cls_token", "pos_embed", "blocks", "norm", "fc_norm")
    kept = {k: v for k, v in weights.items() if k in own and k.split(".")[0] in parts}
    try:
        kept["pos_embed"] = resize_pos_embed(kept["pos_embed"], (side, side), raw.grid)
        raw.load_state_dict(own | kept)
    except (KeyError, RuntimeError) as error:                    # other channels, or a net of another version
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"--finetune {path} does not fit --data and this model ({reason}): pretrain on such images") from error
    new = sorted({k.split(".")[0] for k in own.keys() - kept.keys()})
    which = "averaged" if checkpoint["ema"] else "last"
    return f"pretrained: {which} weights of {path}, step {checkpoint['step']}; new: {', '.join(new)}"


def build_model(args, images):
    """(the ViT with its initialisation applied, its keyword arguments, the constants used).

    Equal on all ranks: the seed does not know the rank. Raises BadInput for sizes that do not fit."""
    torch.manual_seed(args.seed)
    options = dict(SIZES[args.size], depth=args.depth, img_size=args.img_size, patch_size=args.patch_size,
                   in_chans=images.in_chans, num_classes=len(images.classes), shortcut=args.shortcut,
                   alpha_min=args.alpha_min, temperature_beta=args.temperature_beta, drop_path=args.drop_path,
                   pool=args.pool) | args.encoder
    with runtime.user_errors():
        raw = ViT(**options, alphas=args.alphas)
        if args.finetune:
            nn.init.trunc_normal_(raw.head.weight, std=2e-5)     # MAE's: the first logits are as good as zero
        return raw, options, init.apply_init(raw, args.init, vars(args), args.size)


@torch.no_grad()
def evaluate(model, images, transform, args, run):
    """(loss, top-1 %, top-5 %) over the whole validation set: strided over ranks, SUM then divide."""
    model.eval()
    loss, top1, top5, seen = 0.0, 0.0, 0.0, 0
    for batch in data.eval_batches(images.val, transform, args.micro_batch, run.rank, run.size, args.workers):
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


def main(argv=None):
    args = get_args(argv)
    run = runtime.open_run(args, "vit", best=("val_top1", max))

    # data, model, optimizer
    images = data.load_images(args.data, args.holdout, args.seed, args.bad_images)
    per_epoch = data.steps_per_epoch(len(images.train), args.batch_size)
    steps, warmup = max(1, round(args.epochs * per_epoch)), round(args.warmup * per_epoch)
    eval_every, save_every = args.eval_every or per_epoch, args.save_every or per_epoch
    raw, options, constants = build_model(args, images)
    line = load_encoder(raw, args.finetune) if args.finetune and not run.saved else f"init {args.init} {constants or ''}"
    raw.to(run.device)
    ema = copy.deepcopy(raw).requires_grad_(False) if args.ema else None
    optimizer = optim.build_optimizer(raw, args.opt, args.lr, args.weight_decay, args.layer_decay,
                                      **runtime.optimizer_options(args))
    train_tf = data.train_transform(images, args.img_size, args.augment)
    eval_tf = data.eval_transform(images, args.img_size)
    mix = data.mixer(len(images.classes), args.mixup, args.cutmix)

    step = run.begin(dict(data.facts(images), model=options, constants=constants), steps, raw, ema, optimizer)
    run.banner(data.describe(images), f"{runtime.millions(raw)}, {args.shortcut}, {line}",
               f"{steps} steps, {per_epoch} per epoch", optimizer)
    model = run.wrap(raw)
    batches = data.train_batches(images.train, train_tf, args.batch_size, args.seed, step, steps, run.rank, run.size,
                                 run.micro_steps, args.workers)

    def look(step, lr):
        val_loss, top1, top5 = evaluate(ema or raw, images, eval_tf, args, run)
        runtime.check_val(val_loss, step, lr)
        run.log(f"step {step:6d}  val loss {val_loss:.4f}  top-1 {top1:.1f} %  top-5 {top5:.1f} %" + " (ema)" * bool(ema),
                step=step, val_loss=val_loss, val_top1=top1, val_top5=top5)

    if run.owes_look(step, eval_every):
        look(step, args.lr)
    while step < steps:
        lr = runtime.lr_at(step, steps, warmup, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        loss = 0.0
        for micro in range(run.micro_steps):
            x, y = run.to_device(*next(batches))
            torch.manual_seed(runtime.mix_seed(args.seed, "noise", step, run.rank, micro))   # drop path, MixUp
            if mix:
                x, y = mix(x, y)
            with run.accumulate(model, micro):
                with run.autocast():
                    logits = model(x)
                part = F.cross_entropy(logits.float(), y, label_smoothing=args.label_smoothing) * run.share(len(x))
                part.backward()
            loss += part.detach()
        norm = nn.utils.clip_grad_norm_(raw.parameters(), args.clip or float("inf"))
        run.observe(step, lr, loss, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema:
            runtime.update_average(ema, raw, args.ema)
        step += 1

        log_now, save_now, eval_now = run.due(step, args.log_every, save_every, eval_every)
        if log_now:
            run.log_training(step, lr, args.batch_size, "images", epoch=step / per_epoch)
        if save_now:
            run.save(step, raw, ema, optimizer)
        if eval_now:
            look(step, lr)

    run.finish(f"ViT-{args.size}, {args.shortcut}, init {args.init}, {args.opt}", "val_top1", "validation top-1, %")
    run.say(f"best top-1 {run.best():.1f} %")
    run.say(f"val top-1 {run.last('val_top1'):.1f} %")


if __name__ == "__main__":
    runtime.run_script(main)
