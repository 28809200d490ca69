"""What frozen features know, at every layer: k-NN, linear probe, effective rank. Skipless and decayed encoders peak in the middle.

Any image checkpoint of ours (train_vit.py, train_mae.py, train_sit.py), several side by side, for example snapshots of one run:
    python probe.py layers --ckpt out/mae/ckpt.pt                              the run's own data
    python probe.py layers --ckpt out/a out/b --data emoji-subgroups --k 20    two runs, finer labels
    torchrun --nproc_per_node=8 probe.py layers --ckpt out/mae --data /path/to/imagenet --linear lars --cache /scratch/features
"""
import functools
import hashlib
import itertools
import json
import math
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import data
import flow
import latents
import model as models
import runtime
from runtime import BadInput


# ---------------------------------------------------------------------------------------------------------------- features
REMEDY = "give the ckpt.pt of a run of train_vit.py, train_mae.py or train_sit.py"


def load_model(path, ema=True, flag="--ckpt", remedy=REMEDY):
    """(model in eval mode on the CPU, args) from a checkpoint, or the folder of a run, of train_vit.py, train_mae.py or train_sit.py.

    ema: take the averaged weights where there are some. args: the run's flags, and `weights` ("ema" or "raw") and `step` beside them.
    Raises BadInput, which names `flag` and `remedy`, for a file that is missing, damaged, or holds another kind of model.
    """
    path = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    checkpoint = runtime.read_checkpoint(path, flag, remedy)
    args = dict(checkpoint["args"])
    if not {"data", "img_size"} <= set(args) and "lm" not in args:
        raise BadInput(f"{flag} {path} does not say what it was trained on: {remedy}")
    if "lm" in args:
        raise BadInput(f"{flag} {path} holds a language model, which has no images to probe: {remedy}")
    args["weights"], args["step"] = "ema" if ema and checkpoint["ema"] else "raw", checkpoint["step"]
    try:
        net = build(args)
        net.load_state_dict(checkpoint["ema" if args["weights"] == "ema" else "model"])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:    # other arguments, or other shapes
        raise BadInput(f"{flag} {path} does not fit the models of this version ({' '.join(str(error).split())[:200]}): {remedy}") from error
    return net.eval(), args


def build(args):
    """The model that a checkpoint's args describe."""
    if args.get("kind") == "mae":
        return models.MAE(**args["model"])
    if args.get("kind") == "sit":
        return {"sit": models.SiT, "uvit": models.UViT}[args["backbone"]](**args["model"])
    return models.ViT(img_size=args["img_size"], patch_size=args["patch_size"], in_chans=args["in_chans"], num_classes=args["classes"], shortcut=args["shortcut"],
                      alpha_min=args["alpha_min"], temperature_beta=args["temperature_beta"], pool=args["pool"], **dict(models.SIZES[args["size"]], depth=args["depth"]),
                      **{k: args[k] for k in ("schedule", "decay_on", "scaling", "learn_alphas") if k in args})


def pooled(tokens, pool, prefix):
    """Tokens (B, prefix + N, D) -> (B, D), float32. pool: mean (of all tokens, as paper 3's code has it), patches (mean of those), token (the first)."""
    tokens = tokens.float()
    return tokens[:, 0] if pool == "token" else tokens[:, prefix if pool == "patches" else 0:].mean(1)


@torch.no_grad()
def layer_features(model, batches, device, pool="mean", world=None, dtype=torch.float32, t=None, final_norm=False):
    """([features (n, D) of layer 0 (the embedding), 1, ..., L], labels (n,)), float32 on the CPU, of the batches (x, y).

    world: gather the samples of all ranks, in the data set's order, where the batches are `data.eval_batches` of that rank (every rank calls this).
    t: for SiT and UViT, the time that the net is told, in [0, 1], with the null label. final_norm: one more item, after the model's final norm, if it
    has one. The model's mode (train or eval) is left as it was.
    """
    device, was_training = torch.device(device), model.training
    model.eval()
    layers, labels = [], []
    for x, y in batches:
        x = x.to(device, non_blocking=True)
        extra = [] if t is None else [torch.full((len(x),), float(t), device=device), torch.full((len(x),), model.num_classes, device=device)]
        with runtime.autocast(device, dtype):
            rows = []
            for tokens in model.layers(x, *extra):
                rows.append(pooled(tokens, pool, model.prefix_tokens))
            if final_norm and has_norm(model, "norm"):
                rows.append(pooled(model.norm(tokens), pool, model.prefix_tokens))
            elif final_norm and has_norm(model, "fc_norm"):      # ViT with pool "mean" normalises after pooling
                rows.append(model.fc_norm(rows[-1]).float())
        layers = layers or [[] for _ in rows]
        for layer, row in zip(layers, rows):
            layer.append(row.cpu())
        labels.append(y)
    model.train(was_training)
    layers, labels = [torch.cat(layer) for layer in layers], torch.cat(labels)
    return ([gather(layer, world) for layer in layers], gather(labels, world)) if world else (layers, labels)


def has_norm(model, name):
    return isinstance(getattr(model, name, None), nn.LayerNorm)


def gather(x, world):
    """x (n_r, ...) of the samples rank, rank + world, ... -> (n, ...) of all of them in order, on the CPU of every rank: each once."""
    if world.size == 1:
        return x
    n = int(runtime.all_sum([len(x)], world)[0])
    most = -(-n // world.size)                                   # ranks differ by one sample at most: fill up, exchange, cut off
    mine = F.pad(x, (0, 0) * (x.dim() - 1) + (0, most - len(x))).to(world.device)
    parts = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(parts, mine)
    return torch.stack(parts, 1).flatten(0, 1)[:n].cpu()


# ---------------------------------------------------------------------------------------------------------------- measures
SIMILARITIES = 2 ** 26                                           # that k-NN holds at once: 256 MB


def knn(train_x, train_y, test_x, test_y, k=20, temperature=.07):
    """Top-1 accuracy, a fraction, of DINO's weighted k-NN: the k nearest of the bank by cosine vote with exp(cosine / temperature).

    x (n, D) features, y (n,) labels. k is capped at the bank's size. A sequence of k gives a list of accuracies for one search.
    """
    ks = [min(n, len(train_x)) for n in ([k] if isinstance(k, int) else k)]
    if min(ks) < 1 or not len(test_x):
        raise ValueError(f"k-NN needs k of at least 1, a bank and something to classify, not k {k}, {len(train_x)} and {len(test_x)} samples")
    bank, queries = (F.normalize(x.float(), dim=1) for x in (train_x, test_x))
    train_y, test_y = train_y.to(bank.device), test_y.to(bank.device)
    hits = torch.zeros(len(ks), dtype=torch.int64, device=bank.device)
    for q, y in zip(*(t.split(max(1, SIMILARITIES // len(bank))) for t in (queries, test_y))):
        nearest = (q @ bank.T).topk(max(ks), dim=1)
        weight = ((nearest.values - nearest.values[:, :1]) / temperature).exp()                # divided by the largest, which changes no vote
        for i, n in enumerate(ks):
            votes = torch.zeros(len(q), int(train_y.max()) + 1, device=q.device)
            hits[i] += (votes.scatter_add_(1, train_y[nearest.indices[:, :n]], weight[:, :n]).argmax(1) == y).sum()
    shares = (hits.double() / len(test_x)).tolist()
    return shares[0] if isinstance(k, int) else shares


def effective_rank(x, center=False):
    """Paper 3's effective rank of features x (n, D): -sum s log s, in nats and not exponentiated, s the singular values divided by their sum.

    center: without the mean feature, which otherwise counts as a direction. n equal singular values give log n; a zero matrix gives 0.
    """
    x = x.double()
    s = torch.linalg.svdvals(x - x.mean(0) if center else x)
    return float(torch.special.entr(s / s.sum()).sum()) if s.any() else 0.0


# ------------------------------------------------------------------------------------------------------------ linear probes
PROTOCOLS = {
    "lbfgs": "multinomial logistic regression on standardised features, L-BFGS in float64, mean cross-entropy + l2 / 2 |W|^2",
    "ridge": "least squares on one-hot labels and standardised features, closed form in float64, mean squared error + l2 |W|^2",
    "lars": "MAE's protocol on cached features without augmentation: BatchNorm without affine, LARS, lr = blr * batch / 256, cosine after warm-up, no weight decay",
}


def linear_probe(train_x, train_y, test_x, test_y, protocol="lbfgs", l2=1e-3, device="cpu", **lars):
    """Top-1 accuracy, a fraction, of a linear classifier on features x (n, D), labels y (n,). protocol: see PROTOCOLS; lars: arguments of `lars_probe`."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol {protocol!r} is unknown: use {', '.join(PROTOCOLS)}")
    classes = int(torch.cat([train_y, test_y]).max()) + 1
    if protocol == "lars":
        train_x, test_x, train_y = train_x.float().to(device), test_x.float().to(device), train_y.to(device)
        logits = lars_probe(train_x, train_y, classes, **lars)(test_x)
    else:
        device = "cpu" if torch.device(device).type == "mps" else device         # which has no float64
        train_x, test_x, train_y = train_x.double().to(device), test_x.double().to(device), train_y.to(device)
        mean, std = train_x.mean(0), train_x.std(0, correction=0).clamp(min=1e-6)     # a constant feature stays 0
        fit = logistic_regression if protocol == "lbfgs" else ridge_regression
        weight, bias = fit((train_x - mean) / std, train_y, classes, l2)
        logits = (test_x - mean) / std @ weight + bias
    return float((logits.argmax(1).cpu() == test_y.cpu()).double().mean())


def logistic_regression(x, y, classes, l2, tolerance=1e-5, steps=1000):
    """(W (D, classes), b (classes,)) that minimise mean cross-entropy(x W + b, y) + l2 / 2 |W|^2, by L-BFGS with strong-Wolfe line search.

    It stops where no entry of the gradient exceeds `tolerance`: with 1e-6 no accuracy changed at the default l2, on 7 and on 81 classes."""
    weight, bias = (torch.zeros(*shape, dtype=x.dtype, device=x.device, requires_grad=True) for shape in ((x.shape[1], classes), (classes,)))
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, tolerance_grad=tolerance, tolerance_change=1e-14, history_size=20, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weight + bias, y) + l2 / 2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach(), bias.detach()


def ridge_regression(x, y, classes, l2):
    """(W, b) that minimise mean |x W + b - onehot(y)|^2 + l2 |W|^2: with centred targets (x^T x / n + l2 I) W = x^T (targets) / n, x centred too."""
    targets = F.one_hot(y, classes).to(x.dtype)
    mean, bias = x.mean(0), targets.mean(0)
    x = x - mean
    gram = x.T @ x / len(x) + l2 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weight = torch.linalg.solve(gram, x.T @ (targets - bias) / len(x))
    return weight, bias - mean @ weight


def lars_probe(x, y, classes, blr=0.1, batch_size=16384, epochs=90, warmup=10, seed=0):
    """MAE's linear head, trained: BatchNorm1d (no affine, eps 1e-6), then Linear (truncated normal .01, bias 0), in eval mode.

    A step of LARS: m <- .9 m + q g, p <- p - lr m, with q = .001 |p| / |g| for the weight and 1 for the bias; lr per step, no weight decay.
    batch_size is capped at the number of samples; the rest of an epoch is left out, and another epoch's order leaves out others.
    """
    batch_size = min(batch_size, len(x))
    if batch_size < 2:
        raise BadInput("--linear lars needs at least 2 training images in a batch, for its BatchNorm: use --linear lbfgs, or raise --probe-batch-size")
    head = nn.Linear(x.shape[1], classes).to(x.device)
    with torch.no_grad():
        start = torch.empty(head.weight.shape)
        head.weight.copy_(nn.init.trunc_normal_(start, std=0.01, generator=torch.Generator().manual_seed(runtime.mix_seed(seed, "head"))))
        head.bias.zero_()
    net = nn.Sequential(nn.BatchNorm1d(x.shape[1], affine=False, eps=1e-6).to(x.device), head).train()
    momenta, per_epoch = [torch.zeros_like(p) for p in head.parameters()], len(x) // batch_size
    for step in range(epochs * per_epoch):
        epoch, k = divmod(step, per_epoch)
        if k == 0:
            order = data.epoch_order(len(x), seed, epoch).to(x.device)
        index = order[k * batch_size:(k + 1) * batch_size]
        lr = runtime.lr_at(step, epochs * per_epoch, min(warmup, epochs) * per_epoch, blr * batch_size / 256)
        grads = torch.autograd.grad(F.cross_entropy(net(x[index]), y[index]), list(head.parameters()))
        with torch.no_grad():
            for p, g, m in zip(head.parameters(), grads, momenta):
                if p.dim() > 1:
                    size, slope = p.norm(), g.norm()
                    g = g * torch.where((size > 0) & (slope > 0), 0.001 * size / slope, 1.0)
                m.mul_(0.9).add_(g)
                p.sub_(lr * m)
    return net.eval().requires_grad_(False)


# ------------------------------------------------------------------------------------------------------------------- layers
def load_set(name, holdout=0.0, seed=0):
    """The ImageData of that name, image folder, or folder of latents."""
    folder = data.as_folder(name)
    return latents.load(folder, holdout, seed) if folder and (folder / "latents.npy").exists() else data.load_images(name, holdout, seed)


def prepare(path, args, load=load_set):
    """(model, its args, images, transform) of one checkpoint. Raises BadInput where flags, data and checkpoint do not fit."""
    net, saved = load_model(path, not args.raw)
    is_flow, channels, size = saved.get("kind") == "sit", net.patch_embed.proj.in_channels, saved["img_size"]
    if is_flow and args.pool == "token":
        raise BadInput(f"--pool token: {path} has no class token: use --pool mean or patches")
    if not is_flow and args.time != 1:
        raise BadInput(f"--time {args.time} has no effect on {path}, which knows no time: leave it out")
    own = saved["data"], saved.get("holdout", 0.0), saved.get("seed", 0)         # the sets that the run itself trained and validated on
    images = load(args.data) if args.data else load(*own)
    is_latent = isinstance(images.train, latents.Latents)
    if images.in_chans != channels:
        raise BadInput(f"--data {args.data or saved['data']} has images of {images.in_chans} channel(s) and {path} takes {channels}: give --data with such images")
    if is_latent and images.size != size:
        raise BadInput(f"--data {args.data or saved['data']} has latents of side {images.size} and {path} takes {size}: give --data with such latents")
    if is_flow and not is_latent:                                # pixels in [-1, 1]
        images = replace(images, mean=[0.5] * channels, std=[0.5] * channels)
    elif args.data:                                              # the net is used to the mean and std of its own data, which as a folder may have moved
        mean, std = (load(*own).mean, load(*own).std) if saved["data"] in data.NAMES else data.IMAGENET
        images = replace(images, mean=mean, std=std)
    return net, saved, images, data.eval_transform(images, size)


def on_path(batches, t, path, seed, split, rank, world):
    """The images at time t of the path that SiT trained on, `flow.interpolate`; the noise is a function of (seed, split, sample)."""
    index = itertools.count(rank, world)
    for x, y in batches:
        seeds = [runtime.mix_seed(seed, "probe", split, i) for i in itertools.islice(index, len(x))]
        noise = torch.stack([torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(s)) for s in seeds])
        yield flow.interpolate(path, torch.full((len(x),), float(t)), x, noise)[0], y


def share_of_features(net, saved, images, transform, args, world, dtype):
    """{"train": [features of each layer], "val": ...} of this rank's samples, from --cache where they lie there."""
    t = args.time if saved.get("kind") == "sit" else None
    file = args.cache and Path(args.cache) / f"{fingerprint(net, saved, images, args, t, dtype)}-{world.rank}of{world.size}.pt"
    if file and file.exists():
        try:
            return torch.load(file, weights_only=True)
        except Exception as error:                               # on a damaged file the unpickler raises almost any type
            raise BadInput(f"--cache {file} is not readable: delete it") from error
    shares = {}
    net.to(world.device)
    for split, part in (("train", images.train), ("val", images.val)):
        batches = data.eval_batches(part, transform, args.batch_size, world.rank, world.size, args.workers)
        if t is not None and t != 1:
            batches = on_path(batches, t, saved["path"], args.seed, split, world.rank, world.size)
        shares[split], _ = layer_features(net, batches, world.device, args.pool, dtype=dtype, t=t, final_norm=True)
    net.cpu()                                                    # several checkpoints need not fit the device together
    if file:
        runtime.save_checkpoint(file, shares)
    return shares


def fingerprint(net, saved, images, args, t, dtype):
    """A name for the features of these weights on these images: of files the paths count, not what is in them."""
    settings = args.pool, t, args.seed, saved.get("path"), saved["img_size"], images.mean, images.std, args.batch_size, str(dtype), str(torch.__version__)
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=8)
    for tensor in net.state_dict().values():
        digest.update(tensor.cpu().contiguous().numpy())
    for part in (images.train, images.val):
        if isinstance(part, latents.Latents):
            digest.update(f"{part.path} {part.index.tolist()}".encode())
        else:
            digest.update(part.images.contiguous().numpy() if part.in_memory else "\n".join(part.images).encode(errors="surrogateescape"))
    return digest.hexdigest()


def measure(train_x, train_y, val_x, val_y, ks, args, device):
    """A layer's row: accuracy of k-NN for each k and of the linear probe, fractions; effective rank and mean L2 norm of the validation features."""
    near = knn(train_x.to(device), train_y, val_x.to(device), val_y, ks, args.temperature)
    lars = dict(blr=args.probe_lr, batch_size=args.probe_batch_size, epochs=args.probe_epochs, warmup=min(10, args.probe_epochs), seed=args.seed) if args.linear == "lars" else {}
    linear = math.nan if args.linear == "none" else linear_probe(train_x, train_y, val_x, val_y, args.linear, args.l2, device, **lars)
    return [*near, linear, effective_rank(val_x, args.center), float(val_x.norm(dim=1).mean())]


def probe_checkpoint(path, net, saved, images, transform, args, world, dtype):
    """The record of one checkpoint: what it is, and a row per layer. Each rank extracts its share of the samples, then measures its share of the layers."""
    start = time.perf_counter()
    shares = share_of_features(net, saved, images, transform, args, world, dtype)
    bad = runtime.all_sum([(~x.isfinite()).sum() for x in shares["val"]], world)
    if any(bad):
        raise BadInput(f"--ckpt {path}: the features of layer {[n > 0 for n in bad].index(True)} are not finite, as the run diverged: give an earlier checkpoint")
    train_y, val_y, count, mine = images.train.labels, images.val.labels, len(shares["val"]), {}
    for l in range(count):
        pair = [gather(shares[split][l], world) for split in ("train", "val")]
        shares["train"][l] = shares["val"][l] = None             # at ImageNet's size a layer's bank takes 4 GB
        if l % world.size == world.rank:
            mine[l] = pair
    ks = list(dict.fromkeys(min(k, len(train_y)) for k in args.k))
    rows = [torch.zeros(len(ks) + 3, dtype=torch.float64)] * count
    for l in list(mine):
        train_x, val_x = mine.pop(l)
        rows[l] = torch.tensor(measure(train_x, train_y, val_x, val_y, ks, args, world.device), dtype=torch.float64)
    names, rows = ["embedding", *map(str, range(1, len(net.blocks) + 1)), "final norm"], runtime.all_sum(rows, world)
    rows = [dict(layer=name, knn=dict(zip(map(str, ks), row)), linear=row[-3], effective_rank=row[-2], norm=row[-1]) for name, row in zip(names, rows)]
    k = str(min(20, len(train_y))) if min(20, len(train_y)) in ks else str(ks[0])
    best = max(range(len(net.blocks) + 1), key=lambda l: rows[l]["knn"][k])      # the final norm is no layer of its own
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return dict(checkpoint=str(path), name=folder.resolve().name, kind=saved.get("kind", "vit"), step=saved["step"], weights=saved["weights"], alpha_eff=getattr(net, "alpha_eff", None),
                data=args.data or saved["data"], train_images=len(train_y), val_images=len(val_y), classes=len(images.classes),
                majority=float(val_y.bincount().max() / len(val_y)), k=ks, seconds=time.perf_counter() - start,
                best=dict(layer=best, of=len(net.blocks), k=int(k), knn=rows[best]["knn"][k]), layers=rows)


def describe(record, args):
    """What the table of this checkpoint was measured on and how."""
    capped = [k for k in args.k if k > record["train_images"]]
    return (f"{record['checkpoint']}: {record['kind']}, step {record['step']}, {'averaged weights (ema)' if record['weights'] == 'ema' else 'weights as trained'}"
            + ("" if record["alpha_eff"] is None else f", alpha_eff {record['alpha_eff']:.3g}") + "\n"
            f"{record['data']}: bank of {record['train_images']}, {record['val_images']} validation images, {record['classes']} classes, "
            f"the largest of them {100 * record['majority']:.1f} %"
            + f"\nnote: k {', '.join(map(str, capped))} exceeds the bank and is {record['train_images']}" * bool(capped))


def table(record, linear):
    """The rows of a record as text, columns aligned."""
    head = ["layer", *(f"{k}-NN %" for k in record["k"]), *([f"{linear} %"] if linear != "none" else []), "eff. rank", "norm"]
    body = [[row["layer"], *(f"{100 * v:.1f}" for v in row["knn"].values()), *([f"{100 * row['linear']:.1f}"] if linear != "none" else []),
             f"{row['effective_rank']:.3f}", f"{row['norm']:.3g}"] for row in record["layers"]]
    widths = [max(map(len, column)) for column in zip(head, *body)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in [head, *body])


def figure(records, linear, path):
    """Accuracy by layer (k-NN, and the linear probe dashed) and effective rank by layer, a colour per checkpoint."""
    plt = runtime.pyplot()
    chart, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    for i, record in enumerate(records):
        rows = record["layers"][:record["best"]["of"] + 1]
        k, color, label = str(record["best"]["k"]), f"C{i % 10}", f"{record['name']}, step {record['step']}"
        left.plot([100 * row["knn"][k] for row in rows], "o-", ms=3, color=color, label=f"{label}: {k}-NN")
        if linear != "none":
            left.plot([100 * row["linear"] for row in rows], "s--", ms=3, lw=1, color=color, label=f"{label}: {linear}")
        right.plot([row["effective_rank"] for row in rows], "o-", ms=3, color=color, label=label)
    left.set(xlabel="layer (0: embedding)", ylabel="validation accuracy, %")
    right.set(xlabel="layer (0: embedding)", ylabel="effective rank, nats")
    for axis in (left, right):
        axis.grid(alpha=.3)
        axis.legend(frameon=False, fontsize=7)
    chart.suptitle(", ".join(dict.fromkeys(record["data"] for record in records)), fontsize=10)
    chart.savefig(path, dpi=120)
    plt.close(chart)


def layers(args):
    world = runtime.start(args.device, args.threads)
    dtype, why = runtime.pick_dtype(args.dtype, world.device)
    load = functools.cache(load_set)
    loaded = [(path, *prepare(path, args, load)) for path in args.ckpt]          # all of them, so that a wrong last one is said at once
    for path, _, _, images, _ in loaded:
        if world.size > min(len(images.train), len(images.val)):
            raise BadInput(f"{world.size} processes are more than there are images: start torchrun with --nproc_per_node={min(len(images.train), len(images.val))} or less")
        if args.linear == "lars" and min(len(images.train), args.probe_batch_size) < 2:
            raise BadInput("--linear lars needs 2 training images or more in a batch, for its BatchNorm: use --linear lbfgs, or raise --probe-batch-size")
    out = Path(args.out) if args.out else Path(args.ckpt[0]) if Path(args.ckpt[0]).is_dir() else Path(args.ckpt[0]).parent
    for flag, folder in [("--out", out)] + [("--cache", args.cache)] * bool(args.cache):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{flag} {folder} cannot be written ({error.strerror}): choose a folder that can") from error
    protocol = PROTOCOLS.get(args.linear, "none")
    if args.linear == "lars":
        protocol += f"; blr {args.probe_lr:g}, batch {args.probe_batch_size} (at most the bank), {args.probe_epochs} epochs"
    elif args.linear != "none":
        protocol += f"; l2 {args.l2:g}"
    say = print if world.main else lambda *_, **__: None
    say(f"device {world.why}; {world.size} process(es); {dtype}, {why}; revision {runtime.git_revision()}, torch {torch.__version__}")
    say(f"features: {args.pool} of the tokens, no augmentation; k-NN: cosine, votes exp(cosine / {args.temperature:g}); linear: {protocol}", flush=True)
    records = []
    for path, *parts in loaded:
        records.append(probe_checkpoint(path, *parts, args, world, dtype))
        say(f"\n{describe(records[-1], args)}\n{table(records[-1], args.linear)}", flush=True)
    if not world.main:
        return
    result = dict(command=f"python probe.py {shlex.join(args.argv)}", revision=runtime.git_revision(), torch=torch.__version__, device=str(world.device), dtype=str(dtype),
                  processes=world.size, pool=args.pool, temperature=args.temperature, linear=args.linear, protocol=protocol, centred=args.center, checkpoints=records)
    try:
        (out / "probe.json").write_text(json.dumps(runtime.finite(result), indent=1) + "\n")
        figure(records, args.linear, out / "probe.png")
    except OSError as error:
        raise BadInput(f"--out {out} cannot be written ({error.strerror}): choose a folder that can") from error
    print(f"\n{out}: probe.json, probe.png")
    for record in records:
        best = record["best"]
        print(f"{record['name']}: " * (len(records) > 1) + f"best layer {best['layer']} of {best['of']}: k-NN {100 * best['knn']:.1f} %")


# --------------------------------------------------------------------------------------------------------------------- main
def get_args(argv=None):
    number = runtime.number
    parser = runtime.Parser(description=__doc__)
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)

    about = "k-NN, linear probe, effective rank and feature norm of every layer: table, probe.json, probe.png"
    command = what.add_parser("layers", help=about, description=about)
    command.set_defaults(run=layers)
    add = command.add_argument
    add("--ckpt", nargs="+", required=True, help="checkpoints or folders of runs, shown side by side")
    add("--data", default=None, help=f"{', '.join(data.NAMES)}, a folder with train/<class>/ and val/<class>/, or one of latents; None is each checkpoint's own, with its holdout")
    add("--raw", action="store_true", help="weights as trained; without it the averaged ones (ema), where there are some")
    add("--pool", choices=["mean", "patches", "token"], default="mean",
        help="mean of all tokens (paper 3's code), of the patch tokens, or the class token alone")
    add("--time", type=number(float, low=0, high=1), default=1.0, help="for SiT and U-ViT: probe at this time of the path; 1 is the clean image, below it noise is added")
    add("--cache", default=None, help="folder that keeps the features for the next call, per number of processes; images replaced under the same path go unnoticed")
    add("--batch-size", type=number(int, low=1), default=256, help="images per forward pass and process")
    add = command.add_argument_group("measures").add_argument
    add("--k", type=number(int, low=1), nargs="+", default=[10, 20, 100, 200], help="neighbours; capped at the training set. The best layer is that of 20, or of the first")
    add("--temperature", type=number(float, above=0), default=0.07, help="of the k-NN vote")
    add("--linear", choices=[*PROTOCOLS, "none"], default="lbfgs",
        help="linear probe: " + "; ".join(f"{k}: {v}" for k, v in PROTOCOLS.items()) + " (it needs thousands of steps: for large sets)")
    add("--l2", type=number(float, above=0), default=1e-3, help="for lbfgs and ridge")
    add("--probe-lr", type=number(float, above=0), default=0.1, help="for lars: blr")
    add("--probe-batch-size", type=number(int, low=1), default=16384, help="for lars: features per step, at most the training set")
    add("--probe-epochs", type=number(int, low=1), default=90, help="for lars; up to 10 of them warm-up")
    add("--center", action="store_true", help="effective rank of the features minus their mean")
    add = command.add_argument_group("run").add_argument
    add("--seed", type=number(int, low=0, high=2 ** 63 - 1), default=0, help="of lars, and of the noise at --time below 1")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda or mps")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="arithmetic of the forward pass; the measures are float32 and float64")
    add("--workers", type=number(int, low=0), default=0, help="data loading processes per rank")
    add("--threads", type=number(int, low=0), default=0, help="CPU threads per process; 0 leaves torch's choice")
    add("--out", default=None, help="folder for probe.json and probe.png; None is the folder of the first checkpoint")
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def main(argv=None):
    args = get_args(argv)
    args.run(args)


if __name__ == "__main__":
    runtime.run(main)
