"""Self-distillation without labels, DINO (Caron et al. 2021), with and without residual connections (paper 1's other half).

    loss = mean over pairs (i, v), i a global view, v any other view, of  -sum_k p_t(x_i)_k log p_s(x_v)_k
    p_t = softmax((t - center) / T_t),  p_s = softmax(s / T_s);  teacher <- m teacher + (1 - m) student;  center <- .9 center + .1 mean(t)

On a laptop (emoji on white, 32 px, 12 layers, 3 minutes on one core; the probes ask on drawings pasted on photographs):
    python train_dino.py --skipless --opt soap               no residuals
    python train_dino.py --opt soap                          the usual block
    python probe.py seg --ckpt out/dino-*/ckpt.pt            linear segmentation of frozen patch features
    python probe.py tokencut --ckpt out/dino-*/ckpt.pt       unsupervised object discovery
    python probe.py pca --ckpt out/dino-*/ckpt.pt            what the patches have in common, as pictures

The paper's ViT-S/16 on ImageNet-1k, DINO's published 300-epoch recipe, (alpha, beta, c) = (1.8, 1, 3):
    torchrun --nproc_per_node=8 train_dino.py --preset paper --data /path/to/imagenet --skipless --opt soap --micro-batch 64
"""
import argparse
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms import v2
from tqdm import tqdm

import data
import discovery
import init
import optim
import probe
import runtime
import segmentation
from model import DINO, SIZES, patch_tokens
from runtime import BadInput

PRESETS = {
    # 32 px emoji, 16 patches. Strong colour jitter, small temperatures and 300 epochs are for large sets: here views keep their colours. The constants of the
    # skipless init were chosen by hand, stronger than the classifier's, with which patches lose what lies under them; beside them results/dino.md has --init auto.
    "laptop": dict(
        data="emoji", size="nano", img_size=32, patch_size=8, local_size=16, local_crops=2, global_scale=(0.4, 1.0), local_scale=(0.15, 0.4), color=0.0, pool="mean",
        skipless_init="skipless", constants=dict(alpha=1.0, beta=4.0, c=3.0),
        out_dim=256, hidden_dim=256, bottleneck_dim=64, norm_last_layer=True, teacher_temp=0.04, teacher_temp_start=0.04, teacher_temp_warmup=0.0, momentum=0.98,
        freeze_last_layer=0.0, epochs=6, batch_size=32, warmup=0.5, min_lr=0.0, weight_decay=0.04, weight_decay_end=0.4, clip=3.0, drop_path=0.0,
        betas={"adamw": (0.9, 0.999)},
        lr={"shortcut": {"adamw": 3e-3, "soap": 3e-3, "kl-shampoo": 1e-3, "muon": 1e-3},             # adamw, soap: searched (results/dino.json)
            "skipless": {"adamw": 3e-4, "soap": 1e-3, "kl-shampoo": 3e-4, "muon": 1e-3}}, knn_every=1.0, knn_images=4096),
    # DINO's published "boosted" ViT-S/16: batch 1024, lr 5e-4 * batch / 256 = 2e-3, 10 of 300 epochs of warm-up, cosine to 1e-6, weight decay .04 to .4,
    # teacher momentum .996 to 1 and temperature .04 to .07 over 30 epochs. Other optimizers than AdamW: the paper names no setting, ours are an assumption.
    "paper": dict(
        data=None, size="small", img_size=224, patch_size=16, local_size=96, local_crops=8, global_scale=(0.4, 1.0), local_scale=(0.05, 0.4), color=0.8, pool="token",
        skipless_init="paper", constants=dict(alpha=1.0, beta=2.0, c=3.0),
        out_dim=65536, hidden_dim=2048, bottleneck_dim=256, norm_last_layer=False, teacher_temp=0.07, teacher_temp_start=0.04, teacher_temp_warmup=30.0, momentum=0.996,
        freeze_last_layer=1.0, epochs=300, batch_size=1024, warmup=10.0, min_lr=1e-6, weight_decay=0.04, weight_decay_end=0.4, clip=3.0, drop_path=0.1,
        betas={"adamw": (0.9, 0.999), "soap": (0.9, 0.95)},
        lr={"shortcut": {"adamw": 2e-3, "soap": 1e-3, "kl-shampoo": 1e-3, "muon": 1e-3},
            "skipless": {"adamw": 2e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3}}, knn_every=10.0, knn_images=20000, workers=8),
}
# Flags that define the run: a checkpoint with other values is another run. Flags that never touch its course are free; the rest may change, and is said.
FIXED = ("size", "depth", "img_size", "patch_size", "local_size", "local_crops", "global_scale", "local_scale", "color", "shortcut", "alpha_min", "temperature_beta", "pool",
         "init", "alpha", "beta", "c", "out_dim", "hidden_dim", "bottleneck_dim", "norm_last_layer", "drop_path", "opt", "betas", *runtime.MATRIX_FLAGS, "batch_size",
         "seed", "holdout", "student_temp", "center_momentum", "freeze_last_layer")
FREE = ("preset", "device", "compile", "workers", "threads", "out", "resume", "log_every", "eval_every", "save_every", "wandb", "micro_batch", "knn_every",
        "knn_images", "train_images", "classes", "in_chans", "kind", "model", "head")


def get_args(argv=None):
    """Two passes: the first finds the preset, whose values then become the defaults that --help shows and flags win over."""
    number = runtime.number
    presets = runtime.Parser(add_help=False)
    presets.add_argument("--preset", choices=list(PRESETS), default="laptop", help="a dict of defaults at the top of this file")
    preset = PRESETS[presets.parse_known_args(argv)[0].preset]
    parser = runtime.Parser(description=__doc__, parents=[presets])
    switch, share = argparse.BooleanOptionalAction, number(float, above=0, high=1)

    add = parser.add_argument_group("model").add_argument
    add("--size", choices=list(SIZES), help="embedding width, depth and heads")
    add("--depth", type=number(int, low=1), help="number of blocks; None is the size's own")
    add("--patch-size", type=number(int, low=1), help="side of a patch, pixels")
    add("--shortcut", choices=["residual", "skipless", "decayed"], default="residual", help="x + f(x), f(x), or a x + f(x) with a falling to --alpha-min")
    add("--skipless", dest="shortcut", action="store_const", const="skipless", default=argparse.SUPPRESS, help="same as --shortcut skipless")
    add("--alpha-min", type=number(float, low=0, high=1), default=None, help="weight of the last shortcut, for --shortcut decayed; None is 0.6")
    add("--temperature-beta", type=number(float, above=0, high=1e3), default=1.0, help="attention temperature beta ** -layer (paper 2)")
    add("--pool", choices=["token", "mean"], help="what the head sees: the class token, or the mean of the patch tokens")
    add("--drop-path", type=number(float, low=0, below=1), default=None, help=f"stochastic depth of the last block of the student; None is {preset['drop_path']} with "
        "residual shortcuts, else 0: it would wipe a skipless sample out")
    add("--init", choices=["auto", "default", "paper", "skipless"], default=None,
        help=f"auto: constants chosen for this size; paper: the paper's constants; skipless: --alpha --beta --c; None: {preset['skipless_init']} if skipless, else default")
    add("--alpha", type=number(float, low=0), help=f"random part of W_Q W_K^T, for --init skipless; None is {preset['constants']['alpha']:g}")
    add("--beta", type=number(float, low=0), help=f"identity part of W_Q W_K^T, for --init skipless; None is {preset['constants']['beta']:g}")
    add("--c", type=number(float, above=0), help=f"W_V W_O is c^2 times an orthogonal matrix, for --init skipless; None is {preset['constants']['c']:g}")

    add = parser.add_argument_group("views").add_argument
    add("--img-size", type=number(int, low=1), help="side of the 2 global views, pixels")
    add("--local-size", type=number(int, low=1), help="side of the local views, pixels")
    add("--local-crops", type=number(int, low=0), help="number of local views")
    add("--global-scale", type=share, nargs=2, metavar=("MIN", "MAX"), help="share of the image's area in a global view")
    add("--local-scale", type=share, nargs=2, metavar=("MIN", "MAX"), help="share of the image's area in a local view")
    add("--color", type=number(float, low=0, high=1), help="probability of colour jitter; 0 switches greyscale off too")

    add = parser.add_argument_group("self-distillation").add_argument
    add("--out-dim", type=number(int, low=2), help="outputs of the head, K")
    add("--hidden-dim", type=number(int, low=1), help="width of the head's hidden layers")
    add("--bottleneck-dim", type=number(int, low=1), help="width before the head's last layer")
    add("--norm-last-layer", action=switch, help="rows of the head's last layer keep norm 1")
    add("--student-temp", type=number(float, above=0), default=0.1, help="T_s")
    add("--teacher-temp", type=number(float, above=0), help="T_t after its warm-up")
    add("--teacher-temp-start", type=number(float, above=0), help="T_t in the first epoch")
    add("--teacher-temp-warmup", type=number(float, low=0), help="epochs in which T_t goes from the one to the other, in equal steps, one an epoch")
    add("--momentum", type=share, help="m of the teacher at the start; half a cosine takes it to 1")
    add("--center-momentum", type=number(float, low=0, high=1), default=0.9, help="of the centre; 1 switches centring off")
    add("--freeze-last-layer", type=number(float, low=0), help="epochs in which the head's last layer does not learn")

    add = parser.add_argument_group("optimisation").add_argument
    add("--opt", choices=["adamw", "soap", "kl-shampoo", "muon"], default="adamw", help="for the matrices of all blocks; AdamW takes the rest")
    add("--lr", type=number(float, above=0, high=1e30), default=None, help=f"peak learning rate; None is the preset's, by shortcut and optimizer: {preset['lr']}")
    add("--min-lr", type=number(float, low=0), help="learning rate at the end")
    add("--weight-decay", type=number(float, low=0), help="decoupled, at the start; not on biases, norms and tokens")
    add("--weight-decay-end", type=number(float, low=0), help="at the end; half a cosine between")
    add("--betas", type=number(float, low=0, below=1), nargs=2, default=None, metavar=("B1", "B2"),
        help=f"momenta; None is the preset's, by optimizer: {preset['betas']}, or the optimizer's own")
    runtime.add_matrix_flags(add)
    add("--batch-size", type=number(int, low=1), help="global: images per update over all processes")
    add("--micro-batch", type=number(int, low=1), default=None, help="images per forward pass and process; None means as many as the batch gives it")
    add("--epochs", type=number(float, above=0, high=1e6), help="passes over the training set")
    add("--warmup", type=number(float, low=0), help="epochs of linear warm-up")
    add("--clip", type=number(float, low=0), help="largest gradient norm of each parameter by itself, as DINO has it; 0 is off")

    add = parser.add_argument_group("data and evaluation").add_argument
    add("--data", help=f"{', '.join(data.NAMES)}, or a folder with train/<class>/ and val/<class>/; labels serve the k-NN alone")
    add("--holdout", type=number(float, low=0, high=0.9), default=0.0, help="validate on this share of the training set instead of the test set: for tuning")
    add("--knn-every", type=number(float, low=0), help="epochs between looks at every layer, k-NN and monitors (the last step has one too); 0 is off")
    add("--knn-images", type=number(int, low=1), help="training images in the k-NN bank, at most")
    runtime.add_run_flags(parser)

    parser.set_defaults(**{k: list(v) if isinstance(v, tuple) else v for k, v in preset.items() if k not in ("lr", "betas", "skipless_init", "constants", "drop_path")})
    args = parser.parse_args(argv)
    if args.data is None:
        raise BadInput("--preset paper needs --data: a folder with train/<class>/ and val/<class>/")
    for name in ("global_scale", "local_scale"):
        low, high = getattr(args, name)
        if low > high:
            raise BadInput(f"--{name.replace('_', '-')} {low:g} {high:g}: the first must not exceed the second")
    args.depth = args.depth or SIZES[args.size]["depth"]
    if args.shortcut != "decayed" and args.alpha_min is not None:
        raise BadInput(f"--alpha-min has no effect with --shortcut {args.shortcut}: use --shortcut decayed, or leave it out")
    args.alpha_min = 1.0 if args.shortcut != "decayed" else 0.6 if args.alpha_min is None else args.alpha_min
    args.drop_path = args.drop_path if args.drop_path is not None else preset["drop_path"] if args.shortcut == "residual" else 0.0
    resolve_init(args, preset["skipless_init"], preset["constants"])
    args.lr = args.lr or preset["lr"]["skipless" if args.shortcut == "skipless" else "shortcut"][args.opt]
    args.betas = list(args.betas or preset["betas"].get(args.opt, ())) or None
    if args.betas and args.opt == "muon":
        raise BadInput("--betas has no effect with --opt muon, which has one momentum: leave it out")
    args.out = args.out or f"out/dino-{run_name(args, preset)}-{args.opt}-seed{args.seed}"
    return args


def resolve_init(args, skipless_init, constants):
    """Fill in --init and its constants; a constant alone means --init skipless, and with another init it is refused."""
    given = [k for k in constants if getattr(args, k) is not None]
    if args.init is None:
        args.init = "skipless" if given else skipless_init if args.shortcut == "skipless" else "default"
    if given and args.init != "skipless":
        raise BadInput(f"--{given[0]} has no effect with --init {args.init}: use --init skipless, or leave it out")
    if args.init != "default" and args.shortcut != "skipless":
        raise BadInput(f"--init {args.init} is for a net without shortcuts: add --skipless, or leave it out")
    for k, value in constants.items():
        if args.init == "skipless" and getattr(args, k) is None:
            setattr(args, k, value)


def run_name(args, preset):
    """What sets this run apart, for its folder: of init and pool only what is not the preset's."""
    name = [args.size] + [f"depth{args.depth}"] * (args.depth != SIZES[args.size]["depth"])
    name += [args.shortcut + (f"{args.alpha_min:.3g}" if args.shortcut == "decayed" else "")]
    usual = preset["skipless_init"] if args.shortcut == "skipless" else "default"
    name += [args.init] * (args.init != usual)
    if args.init == "skipless":
        name += [f"{k}{getattr(args, k):g}" for k, v in preset["constants"].items() if getattr(args, k) != v]
    return "-".join(name + [args.pool] * (args.pool != preset["pool"]))


def build_model(args, images):
    """(student, teacher, the backbone's and the head's keyword arguments, a line that says which init). Equal on all ranks: the seed does not know the rank."""
    torch.manual_seed(args.seed)
    size = dict(SIZES[args.size], depth=args.depth)
    backbone = dict(size, in_chans=images.in_chans, **{k: getattr(args, k) for k in ("img_size", "patch_size", "shortcut", "alpha_min", "temperature_beta", "pool")})
    head = {k: getattr(args, k) for k in ("out_dim", "hidden_dim", "bottleneck_dim", "norm_last_layer")}
    line = "default: truncated normal, std .02"
    try:
        if args.local_crops and args.local_size % args.patch_size:
            raise ValueError(f"--local-size {args.local_size} is not divisible by --patch-size {args.patch_size}: choose a multiple of the patch size")
        student = DINO(head, drop_path=args.drop_path, **backbone)
        if args.init != "default":
            if args.init == "auto":
                constants = init.choose_constants(size["embed_dim"], size["num_heads"], student.backbone.pos_embed.shape[1], size["depth"], temperature_beta=args.temperature_beta)
            elif args.init == "paper":
                constants = init.PAPER_CONSTANTS[args.size]
            else:
                constants = dict(alpha=args.alpha, beta=args.beta, c=args.c)
            init.init_skipless_vit(student.backbone, **constants)
            line = f"{args.init}: " + ", ".join(f"{k} {v:.3g}" for k, v in constants.items())
    except ValueError as error:                                  # the model's own sentence on a size that does not fit
        raise BadInput(str(error)) from error
    teacher = DINO(head, **backbone)                             # a copy, but for drop path
    teacher.load_state_dict(student.state_dict())
    return student, teacher.requires_grad_(False), backbone, head, line


# ---------------------------------------------------------------------------------------------------------------------
# the method

def teacher_probs(logits, center, temperature):
    """Teacher logits (2, B, K) -> softmax((logits - center) / temperature), float32: centring against one output for all, a low temperature against the uniform one."""
    return ((logits.float() - center) / temperature).softmax(-1)


def dino_loss(student, probs, temperature=0.1):
    """Student logits (V, B, K), teacher probabilities (2, B, K) -> cross-entropy, mean over the batch and the 2 (V - 1) pairs of different views.

    The sum over pairs of -<p_i, log s_v> is taken apart: as each p sums to 1, it is a dot product with the sum of the p minus the view's own, and a log-sum-exp
    per view; so nothing of size pairs x B x K is kept for the backward pass.
    """
    scaled = student.float() / temperature
    total, V = probs.sum(0), len(scaled)
    terms = 2 * scaled.logsumexp(-1).sum(0) - (scaled * total).sum((0, 2))          # all pairs (i, v), v = i included
    own = scaled[:2].logsumexp(-1).sum(0) - (scaled[:2] * probs).sum((0, 2))
    return (terms - own).mean() / (2 * V - 2)


def cosine(start, end, step, total):
    """Half a cosine from start at step 0 to end at step total."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * step / total))


def teacher_temp(epoch, start, end, warmup):
    """T_t in an epoch (a whole number): from start to end in `warmup` equally spaced values, end included; then end."""
    return end if epoch >= warmup else start + (end - start) * min(1.0, epoch / max(1, warmup - 1))


def clip_each(parameters, limit):
    """Scale each gradient down to norm `limit` by itself; returns the norm of all of them before that."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack(torch._foreach_norm(grads))
    if limit:
        torch._foreach_mul_(grads, list((limit / (norms + 1e-6)).clamp(max=1).unbind()))
    return norms.norm()


def monitors(probs, features):
    """[sum of the teacher's entropies, sum of its probabilities (K,), sum and sum of squares of the normalised features (D,), count]: `collapse` reads them,
    and sums over batches and ranks come first."""
    unit = torch.nn.functional.normalize(features.float().flatten(0, 1), dim=1)
    return [torch.special.entr(probs).sum(), probs.sum((0, 1)), unit.sum(0), unit.square().sum(0), torch.tensor(float(len(unit)))]


def collapse(sums):
    """What tells that all images get the same output (entropies in nats), from the sums of `monitors`:

    teacher_entropy   mean of H(p): 0 is one-hot, ln K uniform
    information       H(mean p) - mean H(p), what the output says about the image: 0 in every kind of collapse
    feature_std       standard deviation of the L2-normalised features times sqrt(D): 1 in all directions alike, 0 a point
    """
    entropy, probs, first, second, count = [s.double() for s in sums]
    mean = torch.special.entr(probs / count).sum()
    variance = (second / count - (first / count).square()).clamp(min=0)
    return dict(teacher_entropy=float(entropy / count), information=float(mean - entropy / count), feature_std=float((variance.mean() * len(first)).sqrt()))


def verdict(record, out_dim):
    """A sentence on collapse, or None: with less than a hundredth of a nat per image, the teacher's output does not depend on the image."""
    if record["information"] > 0.01:
        return None
    how = "uniform" if record["teacher_entropy"] > 0.9 * math.log(out_dim) else "the same for every image"
    return (f"collapse: the teacher's output is {how} (entropy {record['teacher_entropy']:.2f} of ln K = {math.log(out_dim):.2f}, {record['information']:.4f} nats about the "
            f"image, validation loss {record['val_loss']:.2f}): lower --lr or --momentum, raise --warmup, or change --teacher-temp")


# ---------------------------------------------------------------------------------------------------------------------
# evaluation

@torch.no_grad()
def evaluate(student, teacher, images, views, temperature, args, world, dtype):
    """(loss, what `collapse` says of the teacher) on the validation set, every image with the same views each time, strided over ranks."""
    student.eval()
    loss, total = 0.0, None
    for crops, _ in data.eval_batches(images.val, views, args.micro_batch, world.rank, world.size, args.workers):
        crops = [crop.to(world.device, non_blocking=True) for crop in crops]
        with runtime.autocast(world.device, dtype):
            target, features = teacher(crops[:2])
            logits, _ = student(crops)
        probs = teacher_probs(target, teacher.center, temperature)
        loss = loss + dino_loss(logits, probs, args.student_temp) * len(crops[0])
        part = monitors(probs, features)
        total = part if total is None else [a + b for a, b in zip(total, part)]
    student.train()
    sums = runtime.all_sum([torch.cat([torch.as_tensor(s, device=world.device).reshape(-1) for s in [loss, *total]])], world)[0]
    loss, *sums = torch.tensor(sums, dtype=torch.float64).split([1] + [s.numel() for s in total])
    return float(loss / len(images.val)), collapse(sums)


@torch.no_grad()
def probe_layers(model, images, transform, args, world):
    """(k-NN accuracy (k = 20), %; effective rank; mean cosine between the tokens of an image) by layer, of what the head is given: the class token, or the mean of
    the patches. Training images, at most --knn-images, are the bank."""
    bank = images.train.take(torch.linspace(0, len(images.train) - 1, min(max(args.knn_images, world.size), len(images.train))).long())
    (train_x, train_y), (val_x, val_y) = [
        probe.layer_features(model, data.eval_batches(part, transform, args.micro_batch, world.rank, world.size, args.workers), world.device,
                             "token" if args.pool == "token" else "patches", world) for part in (bank, images.val)]
    few = torch.linspace(0, len(images.val) - 1, min(64, len(images.val))).long().tolist()
    x = torch.stack([transform(images.val[i][0]) for i in few]).to(world.device)
    return ([100 * probe.knn(a, train_y, b, val_y) for a, b in zip(train_x, val_x)], [probe.effective_rank(x) for x in val_x],
            [float(init.token_cosine(tokens.float())) for tokens in model.layers(x)])


@torch.no_grad()
def save_pca(model, images, args, world, count=6):
    """out/pca.png: validation images, enlarged, and the first three principal components of their patches at four layers as colours, a basis for each image."""
    side = max(2 * args.img_size, 16 * args.patch_size)
    shown = [v2.functional.resize(images.val[i][0], [side, side], **data.BICUBIC) for i in discovery.spread(count, len(images.val))]
    x = torch.stack([v2.Compose(data.normalise(images))(image) for image in shown]).to(world.device)
    layers, columns = segmentation.multi_scale(args.depth), []
    for l, tokens in zip(layers, patch_tokens(model, x, layers)):
        maps = [discovery.colours(t, discovery.pca(t)).unflatten(0, (side // args.patch_size,) * 2) for t in tokens.float()]
        columns.append((f"layer {l}", [(colours, (0, side, side, 0)) for colours in maps]))
    discovery.colour_sheet(Path(args.out) / "pca.png", [image.expand(3, -1, -1) for image in shown], columns)


def look(step, lr, student, teacher, images, views, transform, temperature, with_layers, args, world, dtype):
    """The record of an evaluation: validation loss, `collapse` of the teacher, and with_layers its k-NN accuracy, effective rank and token cosine by layer.

    shared_information, nats: H(mean p_t) - loss, a lower bound on what the student's output on one view says about the teacher's on another. It is 0 or less
    where nothing is learned and where all has collapsed, so unlike the loss it can choose a learning rate without labels.
    Raises BadInput where the loss is not finite."""
    val_loss, seen = evaluate(student, teacher, images, views, temperature, args, world, dtype)
    runtime.check_val(val_loss, step, lr)
    record = dict(step=step, val_loss=val_loss, shared_information=seen["information"] + seen["teacher_entropy"] - val_loss, **seen)
    if with_layers:
        knn, rank, cosines = probe_layers(teacher.backbone, images, transform, args, world)
        record.update(val_knn=knn, val_knn_best=max(knn), effective_rank=rank, token_cosine=cosines)
    return record


def describe(record, args):
    """The human line of a record, and one more where the outputs have collapsed."""
    line = f"step {record['step']:6d}  val loss {record['val_loss']:.4f}  teacher entropy {record['teacher_entropy']:.2f}  information {record['information']:.2f}, shared {record['shared_information']:.2f}  " \
           f"feature std {record['feature_std']:.2f}"
    if "val_knn" in record:
        knn = record["val_knn"]
        line += f"  k-NN best {max(knn):.1f} % (layer {knn.index(max(knn))} of {args.depth}), last {knn[-1]:.1f} %"
    sentence = verdict(record, args.out_dim)
    return line + f"\n{sentence}" * bool(sentence)


def main(argv=None):
    args = get_args(argv)
    world = runtime.start(args.device, args.threads)
    dtype, why = runtime.pick_dtype(args.dtype, world.device)
    micro_steps = runtime.split_batch(args, world)

    # data, student, teacher, optimizer
    images = data.load_images(args.data, args.holdout, args.seed)
    if world.size > len(images.val):
        raise BadInput(f"--data {args.data} has {len(images.val)} validation images for {world.size} processes: start torchrun with fewer, or add some")
    per_epoch = data.steps_per_epoch(len(images.train), args.batch_size)
    steps, warmup = max(1, round(args.epochs * per_epoch)), round(args.warmup * per_epoch)
    eval_every, save_every, knn_every = args.eval_every or per_epoch, args.save_every or per_epoch, args.knn_every and max(1, round(args.knn_every * per_epoch))
    raw, teacher, backbone, head, init_line = build_model(args, images)
    raw.to(world.device), teacher.to(world.device)
    optimizer = optim.build_optimizer(raw, args.opt, args.lr, args.weight_decay, **runtime.matrix_options(args))
    decays = [not group["name"].endswith("no_decay") for group in optimizer.param_groups]
    last_layer = list(raw.head.last_layer.parameters())
    views = data.MultiCrop(images, args.img_size, args.local_size, args.local_crops, args.global_scale, args.local_scale, args.color)
    eval_tf = data.eval_transform(images, args.img_size)

    # resume, before anything is written
    ckpt, saved = runtime.find_checkpoint(args.out, args.resume, "teacher_temp")
    flags = dict(vars(args), kind="dino", model=backbone, head=head, train_images=len(images.train), classes=len(images.classes), in_chans=images.in_chans)
    step, best, record, notes = 0, 0.0, None, []
    if saved:
        notes = runtime.check_resume(ckpt, saved["args"], flags, FIXED, FREE)
        runtime.check_same_data(ckpt, saved["args"], flags)
        step, best = runtime.restore(ckpt, saved, raw, teacher, optimizer, steps, notes)
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
    log.say(f"model       backbone {sum(p.numel() for p in raw.backbone.parameters()) / 1e6:.2f} M and head {sum(p.numel() for p in raw.head.parameters()) / 1e6:.2f} M "
            f"parameters, {args.shortcut}, init {init_line}; ln K = {math.log(args.out_dim):.3f}")
    log.say(f"optimizer   {optim.describe(optimizer)}".replace("\n", "\n            "))
    log.say(f"batch       {args.batch_size} = {world.size} processes x {micro_steps} micro-steps x {args.micro_batch}; 2 + {args.local_crops} views; {steps} steps, {per_epoch} per epoch")
    for note in notes:
        log.say(f"note        {note} from here on")
    if step:
        log.say(f"resume      {ckpt}, step {step}, lr {runtime.lr_at(step, steps, warmup, args.lr, args.min_lr):.3g}")

    model = torch.compile(raw) if args.compile else raw
    if world.size > 1:
        model = DistributedDataParallel(model, device_ids=[world.device.index] if world.device.type == "cuda" else None)
    batches = data.train_batches(images.train, views, args.batch_size, args.seed, step, steps, world.rank, world.size, micro_steps, args.workers)
    bar = tqdm(total=steps, initial=step, disable=not (world.main and sys.stdout.isatty()), unit="step", dynamic_ncols=True)
    window, clock = [], time.perf_counter()

    while step < steps:
        lr = runtime.lr_at(step, steps, warmup, args.lr, args.min_lr)
        for group, decay in zip(optimizer.param_groups, decays):
            group["lr"] = lr * group["lr_scale"]
            group["weight_decay"] = cosine(args.weight_decay, args.weight_decay_end, step, steps) if decay else 0.0
        temperature = teacher_temp(step // per_epoch, args.teacher_temp_start, args.teacher_temp, args.teacher_temp_warmup)
        loss, seen = 0.0, 0.0
        for micro in range(micro_steps):
            crops = [crop.to(world.device, non_blocking=True) for crop in next(batches)[0]]
            torch.manual_seed(runtime.mix_seed(args.seed, "noise", step, world.rank, micro))     # drop path: a function of the step
            # gradients are exchanged once, with the last micro-batch; the switch must cover forward and backward
            last = micro == micro_steps - 1
            with nullcontext() if last or world.size == 1 else model.no_sync():
                with runtime.autocast(world.device, dtype):
                    with torch.no_grad():
                        target, _ = teacher(crops[:2])
                    logits, _ = model(crops)
                part = dino_loss(logits, teacher_probs(target, teacher.center, temperature), args.student_temp) / micro_steps   # a mean of means: same as one big batch
                part.backward()
            loss, seen = loss + part.detach(), seen + target.float().mean((0, 1)) / micro_steps
        if step < args.freeze_last_layer * per_epoch:
            for p in last_layer:
                p.grad = None
        norm = clip_each(raw.parameters(), args.clip)
        window.append((step, lr, loss, norm))
        if world.device.type == "cpu":                           # elsewhere a look is a synchronisation, so it waits for the log step
            runtime.check_finite(window[-1:], world)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():                                    # the centre moves after the loss, by the mean of the whole global batch
            if world.size > 1:
                torch.distributed.all_reduce(seen)
            teacher.center.lerp_(seen / world.size, 1 - args.center_momentum)
            for average, p in zip(teacher.parameters(), raw.parameters()):
                average.lerp_(p.detach(), 1 - cosine(args.momentum, 1.0, step, steps))
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
                record = look(step, lr, raw, teacher, images, views, eval_tf, temperature, knn_now, args, world, dtype)
                best = max(best, record.get("val_knn_best", 0.0))
                log.line(describe(record, args), **record)
                if world.main and knn_now:
                    save_pca(teacher.backbone, images, args, world)
            if save_now:                                         # on all ranks: each holds a share of the optimizer's state
                runtime.save_checkpoint(ckpt, dict(model=raw.state_dict(), ema=teacher.state_dict(), optimizer=optimizer.state_dict(),
                                                   step=step, best=best, rng=torch.get_rng_state(), args=flags), world.main)
            window, clock = [], time.perf_counter()
    bar.close()

    if record is None:                                           # resumed at its end: nothing was left to train
        temperature = teacher_temp((steps - 1) // per_epoch, args.teacher_temp_start, args.teacher_temp, args.teacher_temp_warmup)
        record = look(step, args.min_lr, raw, teacher, images, views, eval_tf, temperature, args.knn_every, args, world, dtype)
    if world.main:
        metric, label = ("val_knn_best", "k-NN of the best layer, %") if args.knn_every else ("val_loss", "validation loss")
        runtime.plot_curve(args.out, f"DINO, {run_name(args, PRESETS[args.preset])}, {args.opt}", metric, label, digits=1 if args.knn_every else 3)
    log.say(f"{args.out}: ckpt.pt, log.jsonl, args.json, curve.png" + ", pca.png" * bool(args.knn_every))
    log.say(f"val k-NN {record['val_knn_best']:.1f} %" if args.knn_every else f"val loss {record['val_loss']:.4f}")


if __name__ == "__main__":
    runtime.run(main)
