r"""Self-distillation without labels, DINO (Caron et al. 2021), with and without shortcuts (paper 1).

    loss    =  mean over views i, global, and v, any other, of  -sum_k p_t(x_i)_k log p_s(x_v)_k
    p_t     =  softmax((t - center) / T_t),  p_s = softmax(s / T_s),  t, s: logits of teacher and student
    teacher <- m teacher + (1 - m) student,  center <- .9 center + .1 mean(t)

On a laptop (emoji on white, 32 px, 12 layers, 3 minutes on one core):
    python train_dino.py --skipless --opt soap                     no shortcuts
    python train_dino.py --opt soap                                the usual block
    python -m evals.segmentation linear --ckpt out/dino-*          linear segmentation of frozen patches
    python -m evals.discovery --ckpt out/dino-*                    unsupervised object discovery
    python probe.py pca --ckpt out/dino-*                          what patches have in common, drawn

The paper's ViT-S/16 on ImageNet-1k, DINO's 300-epoch recipe, (alpha, beta, c) = (1.8, 1, 3):
    torchrun --nproc_per_node=8 train_dino.py --preset paper --data /path/to/imagenet --skipless \
        --opt soap --micro-batch 64
"""
import math

import torch
import torch.nn.functional as F
from torchvision.utils import save_image

import data
import init
import optim
import orthogonal
import runtime
from model import DINO, SHORTCUTS, SIZES, patch_tokens
from runtime import BadInput

# What every preset has beside its own entries. `--set key=value` changes any of them.
COMMON = dict(
    student_temp=0.1,                       # T_s
    center_momentum=0.9,                    # of the centre; 1 switches centring off
    teacher_temp_start=0.04,                # T_t in the first epoch, on its way to teacher_temp
    weight_decay=0.04, weight_decay_end=0.4,            # half a cosine from the one to the other
    clip=3.0,                               # each parameter's gradient by itself
    alpha=1.0, c=3.0,                       # constants of --init skipless, beside each preset's beta
    global_scale=[0.4, 1.0], holdout=0.0, bad_images="stop",
)
PRESETS = {
    # 32 px emoji, 16 patches. Colour jitter, warm temperatures and 300 epochs are for large sets: here
    # views keep their colours. beta was chosen by hand, larger than a classifier's, so that patches keep
    # what lies under them; results/dino.md has --init auto beside it. lrs of AdamW and SOAP: searched.
    "laptop": dict(
        COMMON, data="emoji", size="nano", img_size=32, patch_size=8, pool="mean", drop_path=0.0,
        skipless_init="skipless", beta=4.0, epochs=6, batch_size=32, warmup=0.5,
        local_size=16, local_crops=2, local_scale=[0.15, 0.4], color=0.0,
        out_dim=256, hidden_dim=256, bottleneck_dim=64, norm_last_layer=True, freeze_last_layer=0.0,
        teacher_temp=0.04, teacher_temp_warmup=0.0, ema=0.98, min_lr=0.0,
        lr={"residual": {"adamw": 3e-3, "soap": 3e-3, "kl-shampoo": 1e-3, "muon": 1e-3},
            "skipless": {"adamw": 3e-4, "soap": 1e-3, "kl-shampoo": 3e-4, "muon": 1e-3}},
        betas=dict(adamw=[0.9, 0.999]),
        knn_every=1.0, knn_images=4096),    # k-NN by layer: epochs between, 0 is off; images in the bank
    # DINO's published ViT-S/16: batch 1024, lr 5e-4 * batch / 256, 10 of 300 epochs of warm-up, cosine
    # to 1e-6, teacher momentum .996 to 1, temperature .04 to .07 over 30 epochs, last layer frozen for
    # one. Assumed: the lrs of other optimizers than AdamW.
    "paper": dict(
        COMMON, data=None, size="small", img_size=224, patch_size=16, pool="token", drop_path=0.1,
        skipless_init="paper", beta=2.0, epochs=300, batch_size=1024, warmup=10.0,
        local_size=96, local_crops=8, local_scale=[0.05, 0.4], color=0.8,
        out_dim=65536, hidden_dim=2048, bottleneck_dim=256, norm_last_layer=False, freeze_last_layer=1.0,
        teacher_temp=0.07, teacher_temp_warmup=30.0, ema=0.996, min_lr=1e-6,
        lr={"residual": {"adamw": 2e-3, "soap": 1e-3, "kl-shampoo": 1e-3, "muon": 1e-3},
            "skipless": {"adamw": 2e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 1e-3}},
        betas=dict(adamw=[0.9, 0.999], soap=[0.9, 0.95]), knn_every=10.0, knn_images=20000, workers=8),
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
    add("--init", choices=["auto", "default", "paper", "skipless"],
        help="auto: constants from the net's size; paper: the paper's; skipless: the preset's; default: "
             f"std .02. Else {preset['skipless_init']} if skipless, default if not")
    add("--out-dim", type=runtime.number(int, low=2), help="outputs of the head, K")
    runtime.add_optimizer_flags(parser, optim.OPTIMIZERS)
    add = parser.add_argument_group("data").add_argument
    add("--data", help=f"{', '.join(data.NAMES)}, or a folder with train/<class>/ and val/<class>/")
    add("--local-crops", type=runtime.number(int, low=0), help="local views beside the 2 global ones")
    runtime.add_run_flags(parser)
    args, given = runtime.read_flags(parser, preset, argv, "dino", lead=("size", "shortcut", "opt"))

    if args.data is None:
        raise BadInput(f"--preset {args.preset} needs --data, a folder with train/<class>/ and val/")
    args.depth = args.depth or SIZES[args.size]["depth"]
    args.alpha_min = runtime.last_weight(args)
    args.lr = args.lr or runtime.by_net(preset["lr"], args)
    if args.shortcut != "residual" and "drop_path" not in given:
        args.drop_path = 0.0
    if args.init is None or (args.init == "auto" and args.shortcut != "skipless"):
        args.init = args.skipless_init if args.shortcut == "skipless" else "default"
    del args.skipless_init
    return args


def build_model(args, images):
    """(student, teacher, keyword arguments of the backbone, of the head, the init's constants).

    Equal on all ranks: the seed does not know the rank. Raises BadInput for sizes that do not fit."""
    torch.manual_seed(args.seed)
    backbone, head = dict(SIZES[args.size], in_chans=images.in_chans), {}
    for key in ("depth", "img_size", "patch_size", "shortcut", "alpha_min", "temperature_beta", "pool"):
        backbone[key] = getattr(args, key)
    for key in ("out_dim", "hidden_dim", "bottleneck_dim", "norm_last_layer"):
        head[key] = getattr(args, key)
    with runtime.user_errors():
        student = DINO(head, drop_path=args.drop_path, **backbone)
        if args.local_crops:                                     # do the patches tile a local view?
            student.backbone.embed(torch.zeros(1, images.in_chans, args.local_size, args.local_size))
        constants = init.apply_init(student.backbone, args.init, vars(args), args.size)
    teacher = DINO(head, **backbone)                             # drops no path
    teacher.load_state_dict(student.state_dict())
    return student, teacher.requires_grad_(False), backbone, head, constants


# --------------------------------------------------------------------------------------------------
# the method

def teacher_probs(logits, center, temperature):
    """Teacher logits (2, B, K) -> softmax((logits - center) / temperature), float32.

    The centre works against one output for all images, a low temperature against the uniform one."""
    return ((logits.float() - center) / temperature).softmax(-1)


def dino_loss(student, probs, temperature=0.1):
    """Student logits (V, B, K), teacher probabilities (2, B, K) -> mean cross-entropy, a scalar.

    The mean is over the batch and the 2 (V - 1) pairs of different views. As each p sums to 1, the sum
    of -<p_i, log softmax(s_v)> over both i is 2 logsumexp(s_v) - <s_v, p_0 + p_1>, from which a view's
    pair with itself is taken. So nothing of size pairs x B x K is kept for the backward pass."""
    scaled = student.float() / temperature
    total, V = probs.sum(0), len(scaled)
    pairs = 2 * scaled.logsumexp(-1).sum(0) - (scaled * total).sum((0, 2))           # v = i included
    own = scaled[:2].logsumexp(-1).sum(0) - (scaled[:2] * probs).sum((0, 2))
    return (pairs - own).mean() / (2 * V - 2)


def half_cosine(start, end, step, total):
    """From start at step 0 to end at step total."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * step / total))


def teacher_temperature(epoch, args):
    """T_t in an epoch, a whole number: teacher_temp, after a warm-up of equal steps, one an epoch."""
    start, end, warmup = args.teacher_temp_start, args.teacher_temp, args.teacher_temp_warmup
    return end if epoch >= warmup else start + (end - start) * min(1.0, epoch / max(1, warmup - 1))


def clip_each(parameters, limit):
    """Scale each gradient down to norm `limit` by itself (0: off). Returns the norm of all before."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack(torch._foreach_norm(grads))
    if limit:
        torch._foreach_mul_(grads, list((limit / (norms + 1e-6)).clamp(max=1).unbind()))
    return norms.norm()


def output_sums(probs, features):
    """Teacher probabilities (2, B, K), features (2, B, D) -> a vector for `collapse_monitors`.

    Sums of entropy (1), probabilities (K), normalised features (D) and their squares (D), count (1).
    Vectors of several batches and ranks may be added."""
    unit = F.normalize(features.float().flatten(0, 1), dim=1)
    count = torch.tensor([float(len(unit))], device=unit.device)
    return torch.cat([torch.special.entr(probs).sum()[None], probs.sum((0, 1)), unit.sum(0),
                      unit.square().sum(0), count])


def collapse_monitors(sums, out_dim):
    """What tells that all images get the same output, from a list of `output_sums`; entropies in nats:

    teacher_entropy   mean of H(p): 0 is one-hot, ln K uniform
    information       H(mean p) - mean H(p), what the output says about the image: 0 in any collapse
    feature_std       std of the L2-normalised features times sqrt(D): 1 if isotropic, 0 for a point"""
    width = (len(sums) - 2 - out_dim) // 2
    sums = torch.tensor(sums, dtype=torch.float64).split([1, out_dim, width, width, 1])
    entropy, probs, first, second, count = sums
    mean = torch.special.entr(probs / count).sum()
    variance = (second / count - (first / count).square()).clamp(min=0)
    return dict(teacher_entropy=float(entropy / count), information=float(mean - entropy / count),
                feature_std=float((variance.mean() * width).sqrt()))


# --------------------------------------------------------------------------------------------------
# evaluation

@torch.no_grad()
def evaluate(student, teacher, images, views, temperature, args, run):
    """The log's record of the validation set, strided over ranks, with the same views each time.

    Beside val_loss and `collapse_monitors`: shared_information, nats, H(mean p_t) - loss, a lower bound
    on what the student's output on one view says about the teacher's on another. It is 0 or less where
    nothing is learned and in a collapse; so it can choose a learning rate without labels."""
    student.eval()
    sums = 0.0
    for crops, _ in data.eval_batches(images.val, views, args.micro_batch, run.rank, run.size,
                                      args.workers):
        crops = run.to_device(*crops)
        with run.autocast():
            target, features = teacher(crops[:2])
            logits, _ = student(crops)
        probs = teacher_probs(target, teacher.center, temperature)
        loss = dino_loss(logits, probs, args.student_temp) * len(crops[0])
        sums = sums + torch.cat([loss[None], output_sums(probs, features)])
    student.train()
    loss, *sums = runtime.all_sum([sums], run.world)[0]
    loss, seen = loss / len(images.val), collapse_monitors(sums, args.out_dim)
    shared = seen["information"] + seen["teacher_entropy"] - loss
    return dict(val_loss=loss, shared_information=shared, **seen)


@torch.no_grad()
def pooled_layers(net, part, transform, args, run):
    """Features (1 + L, n, D) of a set's images: by layer, the embedding first, as the head reads it."""
    mine = []
    for x, _ in data.eval_batches(part, transform, args.micro_batch, run.rank, run.size, args.workers):
        layers = net.layers(x.to(run.device))
        rows = [t[:, 0] if args.pool == "token" else t[:, 1:].mean(1) for t in layers]
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


@torch.no_grad()
def layer_figures(net, images, transform, args, run):
    """For the log, lists over the layers: k-NN in %, effective rank in nats, cosine between tokens.

    Paper 3's effective rank is the entropy of the singular values, divided by their sum."""
    bank = torch.linspace(0, len(images.train) - 1, min(args.knn_images, len(images.train))).long()
    bank = images.train.take(bank)
    train, val = (pooled_layers(net, part, transform, args, run) for part in (bank, images.val))
    knn = [knn_top1(a, bank.labels, b, images.val.labels) for a, b in zip(train, val)]
    spectra = [torch.linalg.svdvals(x.double()) for x in val]
    ranks = [torch.special.entr(s / s.sum()).sum().item() for s in spectra]
    few = torch.linspace(0, len(images.val) - 1, min(64, len(images.val))).long().tolist()
    x = torch.stack([transform(images.val[i][0]) for i in few]).to(run.device)
    cosines = [init.token_cosine(tokens).item() for tokens in net.layers(x)]
    return dict(val_knn=knn, val_knn_best=max(knn), effective_rank=ranks, token_cosine=cosines)


@torch.no_grad()
def save_pca(net, images, transform, args, run, count=6):
    """out/pca.png: a row per validation image, enlarged; then its patches at four layers as colours.

    Red, green and blue are the patches' first three principal components in that image. The layers are
    a quarter, a half, three quarters and all of the depth."""
    index = torch.linspace(0, len(images.val) - 1, min(count, len(images.val))).long().tolist()
    x = torch.stack([transform(images.val[i][0]) for i in index]).to(run.device)
    x = F.interpolate(x, size=max(2 * args.img_size, 16 * args.patch_size), mode="bilinear")
    columns = [x.cpu().expand(-1, 3, -1, -1)]
    for tokens in patch_tokens(net, x, [math.ceil(args.depth * i / 4) for i in (1, 2, 3, 4)]):
        tokens = tokens.cpu().double()
        maps = torch.linalg.svd(tokens - tokens.mean(1, keepdim=True), full_matrices=False).U[..., :3]
        maps = maps * maps.pow(3).sum(1, keepdim=True).sign()    # what is rare is bright
        low, high = maps.quantile(maps.new_tensor([0.01, 0.99]), dim=1, keepdim=True)
        maps = ((maps - low) / (high - low)).clamp(0, 1).mT
        maps = maps.unflatten(2, (x.shape[2] // args.patch_size, -1)).float()
        columns.append(F.interpolate(maps, size=x.shape[2:]))
    tiles = torch.stack(columns, 1).flatten(0, 1)
    save_image(tiles, f"{args.out}/pca.png", nrow=5, pad_value=1, normalize=True, scale_each=True)


# --------------------------------------------------------------------------------------------------

def main(argv=None):
    args = get_args(argv)
    run = runtime.open_run(args, "dino", best=("val_knn_best", max))

    # data, student, teacher, optimizer
    images = data.load_images(args.data, args.holdout, args.seed, args.bad_images)
    per_epoch = data.steps_per_epoch(len(images.train), args.batch_size)
    steps, warmup = max(1, round(args.epochs * per_epoch)), round(args.warmup * per_epoch)
    eval_every, save_every = args.eval_every or per_epoch, args.save_every or per_epoch
    knn_every = args.knn_every and max(1, round(args.knn_every * per_epoch))
    raw, teacher, backbone, head, constants = build_model(args, images)
    raw.to(run.device)
    constraint = orthogonal.constrain(raw.backbone.blocks, args)
    teacher.to(run.device)
    optimizer = optim.build_optimizer(raw, args.opt, args.lr, args.weight_decay,
                                      constraint=constraint, **runtime.optimizer_options(args))
    last_layer = list(raw.head.last_layer.parameters())
    views = data.MultiCrop(images, args.img_size, args.local_size, args.local_crops, args.global_scale,
                           args.local_scale, args.color)
    eval_tf = data.eval_transform(images, args.img_size)

    facts = dict(data.facts(images), model=backbone, head=head, constants=constants)
    step = run.begin(facts, steps, raw, teacher, optimizer)
    line = " ".join(["init", args.init, *(f"{key} {value:.3g}" for key, value in constants.items())])
    run.banner(data.describe_images(images), f"backbone {runtime.millions(raw.backbone)}, head "
               f"{runtime.millions(raw.head)}, {args.shortcut}, {line}",
               f"2 + {args.local_crops} views; {steps} steps, {per_epoch} per epoch",
               optim.describe(optimizer))
    model = run.wrap(raw)
    batches = data.train_batches(images.train, views, args.batch_size, args.seed, step, steps, run.rank,
                                 run.size, run.micro_steps, args.workers)

    def look(step, lr):
        temperature = teacher_temperature((step - 1) // per_epoch, args)
        record = evaluate(raw, teacher, images, views, temperature, args, run)
        runtime.check_val(record["val_loss"], step, lr)
        line = f"step {step:6d}" + "".join(f"  {k.replace('_', ' ')} {v:.3f}" for k, v in record.items())
        if knn_every and (step % knn_every == 0 or step == steps):
            record.update(layer_figures(teacher.backbone, images, eval_tf, args, run))
            knn, best = record["val_knn"], record["val_knn_best"]
            line += f"  k-NN best {best:.1f} % (layer {knn.index(best)} of {args.depth})"
            line += f", last {knn[-1]:.1f} %"
            if run.main:
                save_pca(teacher.backbone, images, eval_tf, args, run)
        if record["information"] < 0.01:
            line += "\ncollapse: the teacher's output says nothing about the image: lower --lr, --ema, "
            line += "raise --warmup, or change teacher_temp"
        run.log(line, step=step, **record)

    if run.owes_look(step, eval_every) or (knn_every and run.owes_look(step, knn_every)):
        look(step, args.lr)
    while step < steps:
        lr = runtime.lr_at(step, steps, warmup, args.lr, args.min_lr)
        weight_decay = half_cosine(args.weight_decay, args.weight_decay_end, step, steps)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
            group["weight_decay"] = 0.0 if group["name"].endswith("no_decay") else weight_decay
        temperature = teacher_temperature(step // per_epoch, args)
        loss, seen = 0.0, 0.0
        for micro in range(run.micro_steps):
            crops = run.to_device(*next(batches)[0])
            share = run.share(len(crops[0]))
            torch.manual_seed(runtime.mix_seed(args.seed, "noise", step, run.rank, micro))   # drop path
            with run.accumulate(model, micro):
                with run.autocast():
                    with torch.no_grad():
                        target, _ = teacher(crops[:2])
                    logits, _ = model(crops)
                probs = teacher_probs(target, teacher.center, temperature)
                part = dino_loss(logits, probs, args.student_temp) * share
                part.backward()
            loss, seen = loss + part.detach(), seen + target.float().mean((0, 1)) * share
        if step < args.freeze_last_layer * per_epoch:
            for p in last_layer:
                p.grad = None
        norm = clip_each(raw.parameters(), args.clip)
        run.observe(step, lr, loss, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if run.size > 1:
            torch.distributed.all_reduce(seen)
        teacher.center.lerp_(seen / run.size, 1 - args.center_momentum)      # the whole batch's mean
        runtime.update_average(teacher, raw, half_cosine(args.ema, 1.0, step, steps))
        step += 1

        log_now, save_now, eval_now = run.due(step, save_every, eval_every)
        if knn_every and step % knn_every == 0:
            log_now = save_now = eval_now = True
        if log_now:
            run.log_training(step, lr, args.batch_size, "images", epoch=step / per_epoch)
        if save_now:
            run.save(step, raw, teacher, optimizer)
        if eval_now:
            look(step, lr)

    metric, label = ("val_knn_best", "k-NN of the best layer, %") if knn_every else ("val_loss", "loss")
    run.finish(f"DINO-{args.size}, {args.shortcut}, init {args.init}, {args.opt}", metric, label,
               digits=1 if knn_every else 3, files=["pca.png"] * bool(knn_every))
    last = run.last(metric)
    run.say(f"val k-NN {last:.1f} %" if knn_every else f"val loss {last:.4f}")


if __name__ == "__main__":
    runtime.run_script(main)
