"""What frozen features know, at every layer: k-NN, linear probe, effective rank. Skipless and decayed encoders peak in the middle.

Any image checkpoint of ours (train_vit.py, train_dino.py, train_mae.py, train_sit.py), several side by side, for example snapshots of one run:
    python probe.py layers --ckpt out/mae/ckpt.pt                              the run's own data
    python probe.py layers --ckpt out/a out/b --data emoji-subgroups --k 20    two runs, finer labels
    torchrun --nproc_per_node=8 probe.py layers --ckpt out/mae --data /path/to/imagenet --linear lars --cache /scratch/features
    python probe.py seg --ckpt out/dino out/dino-skipless --layers all         linear segmentation of the composites, by layer and multi-scale: mIoU
    python probe.py seg --ckpt out/dino --data /path/to/VOC2012 --preset paper --device cuda
    python probe.py cluster --ckpt out/dino out/dino-skipless                  segmentation without labels: k-means, matched to the classes
    python probe.py tokencut --ckpt out/dino out/dino-skipless --layers all    one object per image without labels: CorLoc on the composites, boxes drawn
    python probe.py pca --ckpt out/dino out/dino-skipless --layers 3 6 9 12    principal components of the patches as colours
"""
import argparse
import contextlib
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
import discovery
import flow
import latents
import masks
import model as models
import runtime
import segmentation
from discovery import tokencut
from runtime import BadInput
from segmentation import mean_iou


# ---------------------------------------------------------------------------------------------------------------- features
REMEDY = "give the ckpt.pt of a run of train_vit.py, train_dino.py, train_mae.py or train_sit.py"


def load_model(path, ema=True, flag="--ckpt", remedy=REMEDY):
    """(model in eval mode on the CPU, args) from a checkpoint, or the folder of a run, of train_vit.py, train_dino.py, train_mae.py or train_sit.py.

    ema: take the averaged weights where there are some: of DINO, whose backbone comes without its head, the teacher's. args: the run's flags, and `weights` ("ema" or "raw") and `step` beside them.
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
        state = checkpoint["ema" if args["weights"] == "ema" else "model"]
        if args.get("kind") == "dino":
            state = {key.removeprefix("backbone."): value for key, value in state.items() if key.startswith("backbone.")}
        net.load_state_dict(state)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:    # other arguments, or other shapes
        raise BadInput(f"{flag} {path} does not fit the models of this version ({' '.join(str(error).split())[:200]}): {remedy}") from error
    return net.eval(), args


def build(args):
    """The model that a checkpoint's args describe."""
    if args.get("kind") == "dino":
        return models.ViT(num_classes=0, **args["model"])
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


# ------------------------------------------------------------------------------------------------------------------ results
@contextlib.contextmanager
def writing(folder, flag="--out"):
    """Turns a folder that cannot be written into a sentence that names it and its flag."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{flag} {folder} cannot be written ({error.strerror}): choose a folder that can") from error


def results_folder(args):
    """--out, or the folder of the first checkpoint; created before anything is measured."""
    out = Path(args.out) if args.out else Path(args.ckpt[0]) if Path(args.ckpt[0]).is_dir() else Path(args.ckpt[0]).parent
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    return out


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


def of_pixels(images, transform, ks, args, world):
    """k-NN of the clean images themselves, as the net is given them: what one has without a net. {k: fraction}, the same on every rank."""
    flat = []
    for part in (images.train, images.val):
        batches = data.eval_batches(part, transform, args.batch_size, world.rank, world.size, args.workers)
        flat.append(gather(torch.cat([x.flatten(1) for x, _ in batches]), world).to(world.device))
    return dict(zip(map(str, ks), knn(flat[0], images.train.labels, flat[1], images.val.labels, ks, args.temperature)))


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
                best=dict(layer=best, of=len(net.blocks), k=int(k), knn=rows[best]["knn"][k]), layers=rows,
                pixels=of_pixels(images, transform, ks, args, world) if args.pixels else None)


def describe(record, args):
    """What the table of this checkpoint was measured on and how."""
    capped = [k for k in args.k if k > record["train_images"]]
    return (f"{record['checkpoint']}: {record['kind']}, step {record['step']}, {'averaged weights (ema)' if record['weights'] == 'ema' else 'weights as trained'}"
            + ("" if record["alpha_eff"] is None else f", alpha_eff {record['alpha_eff']:.3g}") + "\n"
            f"{record['data']}: bank of {record['train_images']}, {record['val_images']} validation images, {record['classes']} classes, "
            f"the largest of them {100 * record['majority']:.1f} %"
            + ("" if record["pixels"] is None else "\nraw pixels: " + ", ".join(f"{k}-NN {100 * v:.1f} %" for k, v in record["pixels"].items()))
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
    out = results_folder(args)
    if args.cache:
        with writing(args.cache, "--cache"):
            Path(args.cache).mkdir(parents=True, exist_ok=True)
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
    with writing(out):
        (out / "probe.json").write_text(json.dumps(runtime.finite(result), indent=1) + "\n")
        figure(records, args.linear, out / "probe.png")
    print(f"\n{out}: probe.json, probe.png")
    for record in records:
        best = record["best"]
        print(f"{record['name']}: " * (len(records) > 1) + f"best layer {best['layer']} of {best['of']}: k-NN {100 * best['knn']:.1f} %")


# ------------------------------------------------------------------------------------------------------------ segmentation
def dense_net(path, args, dense, load=load_set):
    """(net, its args, the dense set in the pixel statistics that the net is used to, side of the images, groups of layers) of one checkpoint.

    Raises BadInput where flags, data and checkpoint do not fit."""
    net, saved = load_model(path, not args.raw)
    if saved.get("kind") == "sit":
        raise BadInput(f"--ckpt {path} is a flow model, whose features depend on a time: give a run of train_vit.py, train_dino.py or train_mae.py")
    channels, size = net.patch_embed.proj.in_channels, args.img_size or saved["img_size"]
    if args.pad:                                                 # what `discovery.fit` makes of a square
        size = args.img_size or dense.size or size
        size += -size % net.patch_embed.patch_size
    if channels != dense.in_chans:
        raise BadInput(f"--data {args.data} has images of {dense.in_chans} channels and {path} takes {channels}: give --ckpt a run on such images")
    if args.depth and args.depth > len(net.blocks):
        raise BadInput(f"--depth {args.depth}: {path} has {len(net.blocks)} blocks: cut it after one of these")
    net.blocks = net.blocks[:args.depth or len(net.blocks)]      # layers after the last block, and the final norm, now follow this one
    depth = len(net.blocks)
    single = [l for word in args.layers for l in (range(1, depth + 1) if word == "all" else [depth if word == "last" else word])]
    if len(args.multi) > 1 and {"auto", "none"} & set(args.multi):
        raise BadInput(f"--multi {' '.join(map(str, args.multi))}: auto and none stand alone: give one of them, or numbers")
    multi = segmentation.multi_scale(depth) if args.multi == ["auto"] else () if "none" in args.multi else tuple(args.multi)
    groups = list(dict.fromkeys([(l,) for l in single] + [multi] * bool(multi)))
    if "auto" in multi or max(max(group) for group in groups) > depth:
        raise BadInput(f"--layers {' '.join(map(str, args.layers))} --multi {' '.join(map(str, args.multi))}: {path} has layers 0 .. {depth}: name some of these"
                       + (f", or raise --depth {args.depth}" if args.depth else ""))
    try:
        with torch.no_grad():
            models.patch_tokens(net, torch.zeros(1, channels, size, size), [depth])
    except ValueError as error:
        raise BadInput(f"--img-size {size} does not suit {path}: {error}") from error
    mean, std = data.IMAGENET
    if saved["data"] in data.NAMES:
        own = load(saved["data"], saved.get("holdout", 0.0), saved.get("seed", 0))
        mean, std = own.mean, own.std
    return net, saved, replace(dense, mean=mean, std=std), size, groups


def start_dense(args, training, task="segmentation", alone=None):
    """What the commands on dense sets begin with: (world, dtype, the dense set, [(path, name, *`dense_net`)], folder for the results).

    alone: why a command runs in one process only; more are refused before anything is loaded."""
    world = runtime.start(args.device, args.threads)
    if alone and world.size > 1:
        raise BadInput(f"{alone}: start it without torchrun")
    if 0 in args.layers and getattr(args, "feature", "token") != "token":
        raise BadInput(f"--layers 0 is the embedding, which has no {args.feature}: use --feature token, or layers from 1")
    dtype, why = runtime.pick_dtype(args.dtype, world.device)
    dense = masks.load_dense(args.data, task, args.classes or 27, args.ids)
    for flag, value, name in (("--classes", args.classes, "COCO-Stuff"), ("--ids", args.ids, "COCO20k")):
        if value and not dense.name.startswith(name):
            raise BadInput(f"{flag} {value} has no effect on {dense.name}, only on {name}: leave it out")
    if training and dense.train is None:
        raise BadInput(f"--data {args.data} has no training part, which a head needs: add one, or use probe.py cluster")
    load = functools.cache(load_set)
    loaded = [(path, (Path(path) if Path(path).is_dir() else Path(path).parent).resolve().name, *dense_net(path, args, dense, load)) for path in args.ckpt]
    out = results_folder(args)
    if world.main:
        print(f"device {world.why}; {world.size} process(es); {dtype}, {why}; revision {runtime.git_revision()}, torch {torch.__version__}")
        print(f"{dense.name}: {len(dense.train or [])} training images, {len(dense.val)} validation images, {len(dense.classes)} classes", flush=True)
    return world, dtype, dense, loaded, out


def dense_table(rows, classes):
    """mIoU and pixel accuracy of each group of layers, then the IoU of each class at the best of them, as text."""
    best = max(rows, key=lambda row: row["miou"])
    lines = ["  mIoU %  pixels %  layers"] + [f"{100 * row['miou']:8.1f}  {100 * row['pixel_accuracy']:8.1f}  {' '.join(map(str, row['layers']))}" for row in rows]
    return "\n".join(lines + [f"IoU % of layer {' '.join(map(str, best['layers']))}: "
                              + ", ".join(f"{name} {'-' if math.isnan(v) else format(100 * v, '.1f')}" for name, v in zip(classes, best["iou"]))])


def dense_examples(part, count=6):
    """(indices of some images, evenly spread, the first two rows of pictures: [("image", ...), ("truth", ...)])."""
    shown = torch.linspace(0, len(part) - 1, min(count, len(part))).long().tolist()
    images, truth, _ = zip(*[part[i] for i in shown])
    return shown, [("image", images), ("truth", truth)]


def dense_record(path, name, net, saved, rows, protocol, start):
    """(record of a checkpoint for the JSON file, the start of its lines)."""
    norm = "final LayerNorm" if has_norm(net, "norm") else "no norm"
    record = dict(checkpoint=str(path), name=name, kind=saved.get("kind", "vit"), step=saved["step"], weights=saved["weights"],
                  protocol=dict(protocol, layers=[row["layers"] for row in rows], depth=len(net.blocks), norm=norm), rows=rows, seconds=time.perf_counter() - start)
    return record, f"\n{path}: {record['kind']}, step {saved['step']}, {len(net.blocks)} blocks; {protocol['img_size']} px, {norm}; {record['seconds']:.0f} s\n"


def write_dense(out, name, args, world, dtype, records, rows, classes):
    """{name}.json, {name}_examples.png of the rows of pictures, and {name}.png where there are several layers; then the last lines, the best of each checkpoint."""
    result = dict(command=f"python probe.py {shlex.join(args.argv)}", revision=runtime.git_revision(), torch=torch.__version__, device=str(world.device), dtype=str(dtype),
                  processes=world.size, data=args.data, classes=classes, checkpoints=records)
    by_layer = any(len(row["layers"]) == 1 and row["layers"] != records[0]["rows"][0]["layers"] for row in records[0]["rows"])
    with writing(out):
        (out / f"{name}.json").write_text(json.dumps(runtime.finite(result), indent=1) + "\n")
        segmentation.sheet(out / f"{name}_examples.png", rows, classes)
        if by_layer:
            segmentation.curves(out / f"{name}.png", records)
    print(f"\n{out}: {name}.json, {name}_examples.png{f', {name}.png' if by_layer else ''}")
    for record in records:
        kinds = {kind: [row for row in record["rows"] if (len(row["layers"]) > 1) == (kind == "multi")] for kind in ("single", "multi")}
        best = {kind: max(found, key=lambda row: row["miou"]) for kind, found in kinds.items() if found}
        print(f"{record['name']}: " * (len(records) > 1) + "mIoU " + ", ".join(
            f"{100 * row['miou']:.1f} % ({kind}, layer{'s' * (kind == 'multi')} {' '.join(map(str, row['layers']))})" for kind, row in best.items()))


def seg(args):
    """`probe.py seg`."""
    if args.steps and args.epochs:
        raise BadInput(f"--steps {args.steps} and --epochs {args.epochs:g} both say how long: give one of the two")
    world, dtype, dense, loaded, out = start_dense(args, training=True)
    how = {key: getattr(args, key) for key in (*segmentation.PRESETS["laptop"], "preset", "cache_gb", "seed")}
    if not (args.steps or args.epochs):
        how.update({key: segmentation.PRESETS[args.preset][key] for key in ("steps", "epochs")})
    per_epoch = data.steps_per_epoch(len(dense.train), how["batch_size"])
    how["steps"] = how["steps"] or max(1, round(how["epochs"] * per_epoch))
    how["epochs"] = how["steps"] / per_epoch
    if world.size > min(how["batch_size"], len(dense.val)):
        raise BadInput(f"{world.size} processes are more than --batch-size {how['batch_size']} or the {len(dense.val)} validation images: start fewer")
    say = functools.partial(print, flush=True) if world.main else lambda *_: None
    say(f"head: {'BatchNorm, ' * how['batch_norm']}linear; {how['opt']} lr {how['lr']:g} wd {how['weight_decay']:g} {how['schedule']}, {how['steps']} steps of {how['batch_size']} "
        f"({how['epochs']:.1f} epochs), {'crops and flips' if how['augment'] else 'no augmentation'}; loss at {how['loss_size']} px, pixels counted at {how['eval_size'] or 'the size of each mask'}")
    (shown, pictures), records = dense_examples(dense.val), []
    for path, name, net, saved, own, size, groups in loaded:
        start, how["img_size"] = time.perf_counter(), size
        rows, heads, cached = segmentation.probe(net.to(world.device), own, groups, how, world, dtype, args.workers)
        record, line = dense_record(path, name, net, saved, rows, dict(how, features="in memory" if cached else "per batch"), start)
        base = segmentation.constant(torch.tensor(rows[0]["confusion"]))
        record["baseline"] = dict(label=dense.classes[0], miou=segmentation.mean_iou(base), pixel_accuracy=segmentation.pixel_accuracy(base))
        records.append(record)
        say(f"{line}{dense_table(rows, dense.classes)}\nall {dense.classes[0]}: mIoU {100 * record['baseline']['miou']:.1f} %, pixels {100 * record['baseline']['pixel_accuracy']:.1f} %")
        if world.main:
            best = max(range(len(rows)), key=lambda i: rows[i]["miou"])
            tokens, sizes = next(segmentation.token_batches(net, segmentation.Pairs(own.val, own, size), [shown], groups[best], world.device, dtype))
            found = segmentation.predict([heads[best]], [groups[best]], groups[best], tokens, sizes)[0]
            pictures.append((f"{name}\nlayer {' '.join(map(str, groups[best]))}", [pred.cpu() for pred in found]))
        net.cpu()                                                # several checkpoints need not fit the device together
    if world.main:
        write_dense(out, "seg", args, world, dtype, records, pictures, dense.classes)


def cluster(args):
    """`probe.py cluster`."""
    for package in ("sklearn.cluster", "scipy.optimize"):        # said before the features are computed
        runtime.import_optional(package, "probe.py cluster")
    world, dtype, dense, loaded, out = start_dense(args, training=args.split == "train", alone="probe.py cluster runs in one process, as scikit-learn does")
    part, k = getattr(dense, args.split), args.clusters or len(dense.classes)
    for path, _, net, _, _, size, _ in loaded:
        if k > len(part) * (size // net.patch_embed.patch_size) ** 2:
            raise BadInput(f"--clusters {k} are more than the patches that {path} sees of {len(part)} images: lower it")
    how = dict(clusters=k, seeds=list(range(args.seed, args.seed + args.seeds)), leftover=args.leftover, split=args.split, eval_size=args.eval_size, batch_size=args.batch_size)
    print(f"k-means of the L2-normalised tokens of {args.split}, {k} clusters, matched by the Hungarian algorithm; clusters left over "
          f"{'are wrong' if args.leftover == 'wrong' else 'go to their majority'}; the median of {args.seeds} seeds", flush=True)
    (shown, pictures), records = dense_examples(part), []
    for path, name, net, saved, own, size, groups in loaded:
        start, how["img_size"] = time.perf_counter(), size
        rows, maps = segmentation.cluster(net.to(world.device), own, part, groups, how, world.device, dtype, args.workers)
        net.cpu()
        record, line = dense_record(path, name, net, saved, rows, how, start)
        records.append(record)
        print(f"{line}{dense_table(rows, dense.classes)}", flush=True)
        best = max(range(len(rows)), key=lambda i: rows[i]["miou"])
        pictures.append((f"{name}\nlayer {' '.join(map(str, groups[best]))}", [maps[best][i] for i in shown]))
    write_dense(out, "cluster", args, world, dtype, records, pictures, dense.classes)


# --------------------------------------------------------------------------------------------------------------- discovery
METHODS = {
    "tokencut": "normalised cut of the patches' cosine graph",
    "lost": "the patch with the fewest positive correlations, and what correlates with it",
}


def cut_objects(args):
    """`probe.py tokencut`."""
    for flag, value in (("tau", args.tau), ("eps", args.eps), ("k", args.k)):
        if value is not None and (flag == "k") == (args.method == "tokencut"):
            raise BadInput(f"--{flag} has no effect with --method {args.method}: leave it out")
    args.tau, args.eps, args.k = 0.2 if args.tau is None else args.tau, args.eps or 1e-5, args.k or 100
    world, dtype, dense, loaded, out = start_dense(args, training=False, task="discovery")
    positions = discovery.spread(args.limit or len(dense.val), len(dense.val))
    if world.size > len(positions):
        raise BadInput(f"{world.size} processes are more than there are images: start torchrun with --nproc_per_node={len(positions)} or less")
    find = functools.partial(discovery.tokencut, tau=args.tau, eps=args.eps) if args.method == "tokencut" else functools.partial(discovery.lost, k=args.k)
    setting = f"tau {args.tau:g}, eps {args.eps:g}" if args.method == "tokencut" else f"k {args.k}"
    how = dict(find=find, feature=args.feature, img_size=args.img_size, batch_size=args.batch_size, dtype=dtype)
    records, rows = [], []
    for path, name, net, saved, own, _, groups in loaded:
        start, layers = time.perf_counter(), [l for (l,) in groups]
        with refusals(path):
            score, boxes = discovery.corloc(net.to(world.device), own, positions, layers, world=world, **how)
        if not score["images"]:
            raise BadInput(f"--data {args.data}: none of the {len(positions)} images has a box: "
                           + ("raise --limit or leave it out" if args.limit else "give a set with boxes"))
        boxes, best = gather(boxes, world), max(range(len(layers)), key=lambda i: score["layers"][i])
        records.append(dict(checkpoint=str(path), name=name, kind=saved.get("kind", "vit"), step=saved["step"], weights=saved["weights"], depth=len(net.blocks), best=layers[best],
                            rows=[dict(layer=l, corloc=v) for l, v in zip(layers, score["layers"])], seconds=time.perf_counter() - start, **{k: v for k, v in score.items() if k != "layers"}))
        if args.boxes:
            records[-1]["boxes"] = {str(l): boxes[:, i].tolist() for i, l in enumerate(layers)}
        if world.main:
            shown = discovery.discover(net, own, [positions[i] for i in discovery.spread(8, len(positions))], [layers[best]], device=world.device, **how)
            rows.append((f"{name}, layer {layers[best]}", net.patch_embed.patch_size, list(shown)))
            print(f"\n{path}: {records[-1]['kind']}, step {saved['step']}, {len(net.blocks)} blocks; {args.method}, {args.feature}, {setting}; "
                  f"{f'shorter side {args.img_size} px' if args.img_size else 'images as large as they are'}, zero-padded to patches of {net.patch_embed.patch_size}; "
                  f"{score['images']} images, {score['skipped']} without boxes skipped; {records[-1]['seconds']:.0f} s\nlayer  CorLoc %")
            print("\n".join(f"{l:5d}  {100 * v:8.1f}" for l, v in zip(layers, score["layers"]))
                  + f"\ncentre box of .7 of the sides {100 * score['centre']:.1f} %, whole image {100 * score['whole']:.1f} %", flush=True)
        net.cpu()
    if not world.main:
        return
    result = dict(command=f"python probe.py {shlex.join(args.argv)}", revision=runtime.git_revision(), torch=torch.__version__, device=str(world.device), dtype=str(dtype), processes=world.size,
                  data=args.data, method=args.method, setting=setting, feature=args.feature, img_size=args.img_size, checkpoints=records)
    with writing(out):
        (out / "tokencut.json").write_text(json.dumps(runtime.finite(result), indent=1) + "\n")
        discovery.overlay(out / "tokencut.png", rows)
    print(f"\n{out}: tokencut.json, tokencut.png")
    for record in records:
        corloc = max(row["corloc"] for row in record["rows"])
        print(f"{record['name']}: " * (len(records) > 1) + f"CorLoc {100 * corloc:.1f} % ({'best ' * (len(record['rows']) > 1)}layer {record['best']}, {args.feature}), "
              f"centre box {100 * record['centre']:.1f} %, whole image {100 * record['whole']:.1f} %")


def pca(args):
    world, dtype, dense, loaded, out = start_dense(args, training=False, alone="probe.py pca draws a few images in one process")
    positions, columns = discovery.spread(args.count, len(dense.val)), []
    for path, name, net, _, own, _, groups in loaded:
        layers = [l for (l,) in groups]
        with refusals(path):
            maps = discovery.colour_maps(net.to(world.device), own, positions, layers, args.basis, args.feature, img_size=args.img_size, batch_size=args.batch_size, device=world.device, dtype=dtype)
        columns += [(f"{name}\nlayer {l}" if len(loaded) > 1 else f"layer {l}", column) for l, column in zip(layers, maps)]
        net.cpu()
    with writing(out):
        discovery.colour_sheet(out / "pca.png", [dense.val[i][0] for i in positions], columns)
    print(f"{out}: pca.png, {len(positions)} images, the first three principal components of {args.feature} as red, green, blue; "
          f"{'one basis per image' if args.basis == 'image' else 'one basis per layer, of all images shown'}, {args.img_size} px")


@contextlib.contextmanager
def refusals(path):
    """Turns what a net refuses (an image size that its position embedding does not fit) into a sentence that names the checkpoint."""
    try:
        yield
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(f"--ckpt {path}: {error}") from error


# --------------------------------------------------------------------------------------------------------------------- main
def layer_type(*words):
    """An argparse type: one of the words, or a number from 0."""
    def parse(text):
        return text if text in words else runtime.number(int, low=0)(text)
    parse.__name__ = "layer"                                     # argparse names the type in "invalid layer value: 'x'"
    return parse


def add_dense_flags(command, preset):
    """The flags that `seg` and `cluster` share; None where the preset decides."""
    number, add = runtime.number, command.add_argument

    add("--ckpt", nargs="+", required=True, help="checkpoints or folders of runs of train_vit.py, train_dino.py or train_mae.py, shown side by side")
    add("--data", default="composites", help=f"{', '.join(masks.NAMES)}, or a folder: VOC2012, ADE20K, COCO-Stuff, or images/ and masks/")
    add("--classes", type=int, choices=[27, 171], default=None, help="of COCO-Stuff, which no other set has a choice of; None is 27")
    add("--layers", nargs="+", type=layer_type("last", "all"), default=["last"], metavar="LAYER", help="single layers: last, all, or numbers (0: embedding)")
    add("--multi", nargs="+", type=layer_type("auto", "none"), default=["auto"], metavar="LAYER", help="layers to concatenate: auto (four, evenly spaced: 3 6 9 12 of 12), none, or numbers")
    add("--depth", type=number(int, low=1), default=None, help="cut the model after this many blocks; None keeps all")
    add("--raw", action="store_true", help="weights as trained; without it the averaged ones (ema; of DINO the teacher), where there are some")
    add("--img-size", type=number(int, low=1), default=preset.get("img_size"), help="side of the square that images are brought to; None is the one that the checkpoint was trained at")
    add("--eval-size", type=number(int, low=0), default=preset.get("eval_size", 0), help="side of the masks whose pixels are counted; 0 is their own size")
    add("--batch-size", type=number(int, low=1), default=preset.get("batch_size", 64), help="images per step, over all processes")
    add("--seed", type=number(int, low=0, high=2 ** 31), default=0, help="of the head, the order and the augmentation; of cluster, the first of --seeds")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda or mps")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="arithmetic of the forward pass; head, clusters and measures are float32 and integers")
    add("--workers", type=number(int, low=0), default=0, help="data loading processes per rank")
    add("--threads", type=number(int, low=0), default=0, help="CPU threads per process; 0 leaves torch's choice")
    add("--out", default=None, help="folder for the results; None is the folder of the first checkpoint")


def add_seg(what, argv):
    number, presets = runtime.number, runtime.Parser(add_help=False)
    presets.add_argument("--preset", choices=list(segmentation.PRESETS), default="laptop", help="a dict of defaults in segmentation.py; paper: Leopart's protocol, 448 px, 25 epochs")
    preset = segmentation.PRESETS[presets.parse_known_args(argv)[0].preset if "seg" in argv[:1] else "laptop"]
    about = "linear segmentation on frozen patch tokens, single layers and multi-scale: mIoU, seg.json, seg_examples.png, by layer seg.png"
    command = what.add_parser("seg", help=about, description=about, parents=[presets])
    add_dense_flags(command, preset)
    add = command.add_argument_group("head").add_argument
    add("--steps", type=number(int, low=1), default=None, help="updates; None is what --epochs or the preset says")
    add("--epochs", type=number(float, above=0, high=1e6), default=None, help="passes over the training set, if --steps is not given")
    add("--opt", choices=["adamw", "sgd"], default=preset["opt"], help="sgd has momentum .9")
    add("--lr", type=number(float, above=0, high=1e30), default=preset["lr"], help="peak learning rate")
    add("--weight-decay", type=number(float, low=0), default=preset["weight_decay"], help="of all parameters of the head")
    add("--schedule", choices=list(segmentation.SCHEDULES), default=preset["schedule"], help="cosine to 0, or a step of x .1 after four fifths")
    add("--loss-size", type=number(int, low=1), default=preset["loss_size"], help="side that masks are brought to in training")
    add("--augment", action=argparse.BooleanOptionalAction, default=preset["augment"], help="crops of .8 to 1 of the area and flips, of image and mask together")
    add("--batch-norm", action=argparse.BooleanOptionalAction, default=preset["batch_norm"], help="BatchNorm before the linear layer, as in DINOv2's head")
    add("--cache-gb", type=number(float, low=0), default=4.0, help="without --augment features are computed once where they fit in this much memory per process, else for every batch")
    command.set_defaults(run=seg, ids=None, pad=False)


def add_cluster(what):
    about = "segmentation without labels: k-means of patch tokens, matched to the classes (needs scikit-learn): mIoU, cluster.json, cluster_examples.png, by layer cluster.png"
    command, number = what.add_parser("cluster", help=about, description=about), runtime.number
    add_dense_flags(command, {})
    add = command.add_argument_group("clusters").add_argument
    add("--clusters", type=number(int, low=1), default=None, help="k of k-means; None is the number of classes")
    add("--seeds", type=number(int, low=1), default=5, help="runs of k-means, of which the one with the median mIoU is reported")
    add("--split", choices=["val", "train"], default="val", help="part that is clustered and measured")
    add("--leftover", choices=["wrong", "majority"], default="wrong", help="clusters beyond the number of classes: never right, or each the class of most of its pixels")
    command.set_defaults(run=cluster, ids=None, pad=False)


def add_discovery(what):
    """`tokencut` and `pca`."""
    number = runtime.number
    about = "one object per image from its patch features (TokenCut, LOST): CorLoc by layer beside trivial boxes; tokencut.json, tokencut.png"
    command = what.add_parser("tokencut", help=about, description=about)
    add = command.add_argument
    add_discovery_flags(add, "VOC2012 (its trainval list), COCO20k, or images/ and masks/", ["last"], "key")
    add("--method", choices=list(METHODS), default="tokencut", help="; ".join(f"{k}: {v}" for k, v in METHODS.items()))
    add("--tau", type=number(float, low=-1, high=1), default=None, help="tokencut: patches whose cosine exceeds this are joined; None is 0.2")
    add("--eps", type=number(float, above=0, below=1), default=None, help="tokencut: weight of the edges between the others; None is 1e-5")
    add("--k", type=number(int, low=1), default=None, help="lost: patches of the fewest correlations that may join the seed; None is 100")
    add("--ids", default=None, help="COCO20k: file that lists its images; None looks for coco_20k_filenames.txt in the folder")
    add("--img-size", type=number(int, low=1), default=None, help="shorter side that images are resized to; None keeps their size, as TokenCut does. Padded with zeros to whole patches")
    add("--limit", type=number(int, low=1), default=None, help="only this many images, evenly spread; None is all")
    add("--boxes", action="store_true", help="also write every box, in pixels of the image as it is stored, to tokencut.json")
    command.set_defaults(run=cut_objects, multi=["none"], classes=None, pad=True)

    about = "the first three principal components of patch features as red, green and blue, by layer and checkpoint: pca.png"
    command = what.add_parser("pca", help=about, description=about)
    add = command.add_argument
    add_discovery_flags(add, "VOC2012, ADE20K, COCO-Stuff, or images/ and masks/", ["all"], "token")
    add("--basis", choices=["image", "shared"], default="image", help="components of each image, or of all that are shown together")
    add("--count", type=number(int, low=1, high=50), default=6, help="images, evenly spread over the validation part")
    add("--img-size", type=number(int, low=1), default=128, help="shorter side that images are resized to: more pixels, more patches")
    command.set_defaults(run=pca, multi=["none"], classes=None, ids=None, pad=True)


def add_discovery_flags(add, folders, layers, feature):
    number = runtime.number
    add("--ckpt", nargs="+", required=True, help="checkpoints or folders of runs of train_vit.py, train_dino.py or train_mae.py, shown side by side")
    add("--data", default="composites", help=f"{', '.join(masks.NAMES)}, or a folder: {folders}")
    add("--layers", nargs="+", type=layer_type("last", "all"), default=layers, metavar="LAYER", help="last, all, or numbers (0: embedding)")
    add("--feature", choices=["key", "query", "value", "token"], default=feature, help="of the attention of that block, or the tokens after it, through the final LayerNorm")
    add("--depth", type=number(int, low=1), default=None, help="cut the model after this many blocks; None keeps all")
    add("--raw", action="store_true", help="weights as trained; without it the averaged ones (ema; of DINO the teacher), where there are some")
    add("--batch-size", type=number(int, low=1), default=32, help="images per forward pass and process; neighbours of one size share it")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda or mps")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="arithmetic of the forward pass; eigenvectors are float64")
    add("--threads", type=number(int, low=0), default=0, help="CPU threads per process; 0 leaves torch's choice")
    add("--out", default=None, help="folder for the results; None is the folder of the first checkpoint")


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
    add("--pixels", action="store_true", help="also k-NN on the images themselves, without a net: for small images, since all pixels of the set are held at once")
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
    add_seg(what, list(sys.argv[1:] if argv is None else argv))
    add_cluster(what)
    add_discovery(what)
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def main(argv=None):
    args = get_args(argv)
    args.run(args)


if __name__ == "__main__":
    runtime.run(main)
