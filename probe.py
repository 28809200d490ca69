"""What frozen features know, layer by layer: k-NN, linear probe, effective rank. And TokenCut and mIoU.

Any run of train_vit.py, train_dino.py, train_mae.py or train_sit.py, several side by side:
    python probe.py layers --ckpt out/mae-...                                 on the run's own data
    python probe.py layers --ckpt out/a out/b --data emoji-subgroups --k 20   two runs, finer labels
    python probe.py pca --ckpt out/dino-... --layers 3 6 9 12                 what patches have in common
    torchrun --nproc_per_node=8 probe.py layers --ckpt out/mae-... --data /path/to/imagenet --linear lars

Skipless and decayed encoders peak in the middle.
"""
import functools
import hashlib
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
from torchvision.transforms import v2
from torchvision.utils import save_image

import data
import model
import runtime
from runtime import BadInput

open_images = functools.cache(data.load_images)


# -------------------------------------------------------------------------------------------------------
# nets

NETS = {"vit": model.ViT, "dino": model.ViT, "mae": model.MAE, "sit": model.SiT, "uvit": model.UViT}
REMEDY = "give a run of train_vit.py, train_dino.py, train_mae.py or train_sit.py"


def load_net(path, flag="--ckpt", remedy=REMEDY, raw=False):
    """(net in eval mode on the CPU, args) from a checkpoint or the folder of a run.

    The averaged weights where there are some, unless raw; of DINO the teacher's backbone.
    args: the run's, and beside them "weights" ("ema" or "raw"), "step" and "side", of the images that it
    was made for. Raises BadInput, with `flag` and `remedy`, for a file that is missing, damaged or of
    another kind."""
    checkpoint = runtime.read_checkpoint(path, flag, remedy)
    args = dict(checkpoint["args"], step=checkpoint["step"])
    args["weights"] = "ema" if checkpoint["ema"] and not raw else "raw"
    state = checkpoint["ema" if args["weights"] == "ema" else "model"]
    kind = args.get("backbone") if args["kind"] == "sit" else args["kind"]
    if kind not in NETS:
        raise BadInput(f"{flag} {path} holds no image model, but one of the kind {kind}: {remedy}")
    special = {"num_classes": 0} if kind == "dino" else {}
    if kind == "dino":
        state = {k.removeprefix("backbone."): v for k, v in state.items() if k.startswith("backbone.")}
    if args.get("alphas"):
        special["alphas"] = [restore_weights(l, pair, state) for l, pair in enumerate(args["alphas"])]
    try:
        net = NETS[kind](**{**args["model"], **special})
        net.load_state_dict(state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:        # another version's model
        words = " ".join(str(error).split())[:200]
        raise BadInput(f"{flag} {path} does not fit our models ({words}): {remedy}") from error
    args["side"] = net.grid[0] * net.patch_embed.patch_size
    return net.eval(), args


def restore_weights(l, pair, state):
    """The shortcut weights of block l, from plain numbers; those that `state` holds were learned."""
    def restore(name, value):
        return nn.Parameter(torch.zeros(())) if f"blocks.{l}.{name}" in state else value
    pair = [model.split_weight(weight) for weight in pair]
    return [(restore(f"alphas.{i}", a), restore(f"gains.{i}", g)) for i, (a, g) in enumerate(pair)]


def pixel_scale(saved):
    """(mean, std) of the pixels that a net is used to: of its own embedded set, of files ImageNet's."""
    if saved["data"] not in data.NAMES:
        return data.IMAGENET
    own = open_images(saved["data"], saved.get("holdout", 0.0), saved.get("seed", 0))
    return own.mean, own.std


# -------------------------------------------------------------------------------------------------------
# features

def pool_tokens(tokens, pool, prefix):
    """Tokens (B, prefix + N, D) -> (B, D), float32.

    pool: "mean" of all, as in paper 3's code, mean of the "patches" alone, or the first "token"."""
    tokens = tokens.float()
    return tokens[:, 0] if pool == "token" else tokens[:, prefix if pool == "patches" else 0:].mean(1)


@torch.no_grad()
def layer_features(net, batches, device, pool="mean", dtype=torch.float32, t=None, final_norm=False):
    """[features (n, D) of layer 0 (the embedding), 1, ..., L], float32 on the CPU, of batches (x, y).

    t: the time that SiT and UViT are told, with the null label. final_norm: one more item, after the
    net's final norm."""
    device, was_training, layers = torch.device(device), net.training, []
    net.eval()
    for x, _ in batches:
        x = x.to(device, non_blocking=True)
        extra = []
        if t is not None:
            extra = [torch.full((len(x),), float(t), device=device),
                     torch.full((len(x),), net.num_classes, device=device)]
        with runtime.autocast(device, dtype):
            rows = []
            for tokens in net.layers(x, *extra):
                rows.append(pool_tokens(tokens, pool, net.prefix_tokens))
            if final_norm and has_norm(net, "norm"):
                rows.append(pool_tokens(net.norm(tokens), pool, net.prefix_tokens))
            elif final_norm and has_norm(net, "fc_norm"):        # a ViT may normalise after pooling
                rows.append(net.fc_norm(rows[-1]).float())
        layers.append([row.cpu() for row in rows])
    net.train(was_training)
    return [torch.cat(layer) for layer in zip(*layers)]


def has_norm(net, name):
    """Does the net have a LayerNorm of that name? Others have the identity there."""
    return isinstance(getattr(net, name, None), nn.LayerNorm)


def gather_samples(x, world):
    """x (n_r, ...) of the samples rank, rank + size, ... -> (n, ...) of all in order, on every rank."""
    if world.size == 1:
        return x
    n = int(runtime.all_sum([len(x)], world)[0])
    most = -(-n // world.size)                          # ranks differ by one: fill up, cut off again
    mine = F.pad(x, (0, 0) * (x.dim() - 1) + (0, most - len(x))).to(world.device)
    parts = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(parts, mine)
    return torch.stack(parts, 1).flatten(0, 1)[:n].to(x.device)


# -------------------------------------------------------------------------------------------------------
# measures

SIMILARITIES = 2 ** 26                                  # that k-NN holds at once: 256 MB


def knn(train_x, train_y, test_x, test_y, k=20, temperature=.07):
    """Top-1 accuracy, a fraction, of DINO's weighted k-NN.

    The k nearest of the bank by cosine vote with exp(cosine / temperature). x (n, D) features, y (n,)
    labels; k is capped at the bank's size. A sequence of k gives a list of accuracies for one search."""
    ks = [min(n, len(train_x)) for n in ([k] if isinstance(k, int) else k)]
    bank, queries = (F.normalize(x.float(), dim=1) for x in (train_x, test_x))
    train_y, test_y = train_y.to(bank.device), test_y.to(bank.device)
    hits = torch.zeros(len(ks), dtype=torch.int64, device=bank.device)
    chunk = max(1, SIMILARITIES // len(bank))
    for q, y in zip(queries.split(chunk), test_y.split(chunk)):
        nearest = (q @ bank.T).topk(max(ks), dim=1)
        weight = ((nearest.values - nearest.values[:, :1]) / temperature).exp()    # the largest is 1
        for i, n in enumerate(ks):
            votes = torch.zeros(len(q), int(train_y.max()) + 1, device=q.device)
            votes.scatter_add_(1, train_y[nearest.indices[:, :n]], weight[:, :n])
            hits[i] += (votes.argmax(1) == y).sum()
    shares = (hits.double() / len(test_x)).tolist()
    return shares[0] if isinstance(k, int) else shares


def effective_rank(x):
    """Paper 3's effective rank of features x (n, D): -sum s log s, in nats and not exponentiated.

    s: the singular values divided by their sum. n equal ones give log n; a zero matrix gives 0."""
    s = torch.linalg.svdvals(x.double())
    return float(torch.special.entr(s / s.sum()).sum()) if s.any() else 0.0


def class_iou(confusion):
    """Intersection over union of each class, float64 (C,): TP / (TP + FP + FN).

    confusion (C, C): entry (t, p) counts pixels of class t that were called p; columns past C are never
    right. nan where a class is neither there nor predicted."""
    matrix = confusion.double()
    right = matrix.diagonal()
    return right / (matrix.sum(1) + matrix.sum(0)[:len(matrix)] - right)


def mean_iou(confusion):
    """mIoU, a fraction: the mean of `class_iou` over the classes that are there or predicted."""
    return float(class_iou(confusion).nanmean())


# -------------------------------------------------------------------------------------------------------
# linear probes

PROTOCOLS = {
    "lbfgs": "multinomial logistic regression, L-BFGS in float64, mean cross-entropy + l2 / 2 |W|^2",
    "ridge": "least squares on one-hot labels, closed form in float64, mean squared error + l2 |W|^2",
    "lars": "MAE's protocol, without augmentation: BatchNorm, LARS, 90 epochs of batches of 16384",
}


def linear_probe(train_x, train_y, test_x, test_y, protocol="lbfgs", l2=1e-3, device="cpu", **lars):
    """Top-1 accuracy, a fraction, of a linear classifier on features x (n, D), labels y (n,).

    protocol: see PROTOCOLS; features are standardised. lars: arguments of `lars_probe`."""
    classes, kind = int(torch.cat([train_y, test_y]).max()) + 1, torch.float64
    if protocol == "lars":
        kind = torch.float32
    elif torch.device(device).type == "mps":            # which has no float64
        device = "cpu"
    train_x, test_x, train_y = train_x.to(device, kind), test_x.to(device, kind), train_y.to(device)
    if protocol == "lars":
        logits = lars_probe(train_x, train_y, classes, **lars)(test_x)
    else:
        mean = train_x.mean(0)
        std = train_x.std(0, correction=0).clamp(min=1e-6)       # a constant feature stays 0
        regression = {"lbfgs": logistic_regression, "ridge": ridge_regression}[protocol]
        weight, bias = regression((train_x - mean) / std, train_y, classes, l2)
        logits = (test_x - mean) / std @ weight + bias
    return float((logits.argmax(1).cpu() == test_y.cpu()).double().mean())


def logistic_regression(x, y, classes, l2, tolerance=1e-5, steps=1000):
    """(W (D, classes), b (classes,)) that minimise mean cross-entropy(x W + b, y) + l2 / 2 |W|^2.

    It stops where no entry of the gradient exceeds `tolerance`: 1e-6 changed no accuracy."""
    weight = torch.zeros(x.shape[1], classes, dtype=x.dtype, device=x.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=x.dtype, device=x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, tolerance_grad=tolerance,
                                  tolerance_change=1e-14, history_size=20, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weight + bias, y) + l2 / 2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(closure)
    return weight.detach(), bias.detach()


def ridge_regression(x, y, classes, l2):
    """(W, b) that minimise mean |x W + b - onehot(y)|^2 + l2 |W|^2.

    With x and targets centred, (x^T x / n + l2 I) W = x^T targets / n."""
    targets = F.one_hot(y, classes).to(x.dtype)
    mean, bias = x.mean(0), targets.mean(0)
    x = x - mean
    gram = x.T @ x / len(x) + l2 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weight = torch.linalg.solve(gram, x.T @ (targets - bias) / len(x))
    return weight, bias - mean @ weight


def lars_probe(x, y, classes, blr=0.1, batch_size=16384, epochs=90, warmup=10, seed=0):
    """MAE's linear head, trained: BatchNorm1d (no affine, eps 1e-6), then Linear; in eval mode.

    A step of LARS: m <- .9 m + q g, p <- p - lr m, with q = .001 |p| / |g| for the weight and 1 for the
    bias. lr: its peak is blr * batch / 256, a cosine follows the warm-up. batch_size is capped at n; the
    rest of an epoch is left out."""
    batch_size, warmup = min(batch_size, len(x)), min(warmup, epochs)
    head = nn.Linear(x.shape[1], classes)
    generator = torch.Generator().manual_seed(runtime.mix_seed(seed, "head"))
    nn.init.trunc_normal_(head.weight, std=0.01, generator=generator)
    nn.init.zeros_(head.bias)
    net = nn.Sequential(nn.BatchNorm1d(x.shape[1], affine=False, eps=1e-6), head).to(x.device).train()
    parameters, per_epoch = list(head.parameters()), len(x) // batch_size
    momenta = [torch.zeros_like(p) for p in parameters]
    for step in range(epochs * per_epoch):
        epoch, k = divmod(step, per_epoch)
        if k == 0:
            order = data.epoch_order(len(x), seed, epoch).to(x.device)
        index = order[k * batch_size:(k + 1) * batch_size]
        lr = runtime.lr_at(step, epochs * per_epoch, warmup * per_epoch, blr * batch_size / 256)
        grads = torch.autograd.grad(F.cross_entropy(net(x[index]), y[index]), parameters)
        with torch.no_grad():
            for p, g, m in zip(parameters, grads, momenta):
                if p.dim() > 1:
                    size, slope = p.norm(), g.norm()
                    g = g * torch.where((size > 0) & (slope > 0), 0.001 * size / slope, 1.0)
                m.mul_(0.9).add_(g)
                p.sub_(lr * m)
    return net.eval().requires_grad_(False)


# -------------------------------------------------------------------------------------------------------
# TokenCut (Wang et al. 2022): one object in an image, without labels

TIE = 1e-6                                              # entries of v this close, relatively, are equal


def tokencut(features, grid, tau=0.2, eps=1e-5):
    """The object of an image by normalised cut. features (N, D) of its patches; grid (rows, columns).

    The graph joins patches whose cosine exceeds tau by an edge of weight 1, all others by eps: A (N, N),
    D = diag(row sums). Of (D - A) v = lambda D v the eigenvector v of the second smallest lambda is
    split at its mean. The object is the side of the seed, the patch of largest |v|, and there what is
    connected with it (4 neighbours). Returns a dict: mask (rows, columns) bool; box (x0, y0, x1, y1) in
    patches, half-open; eigenvector (N,), float64, positive at the seed. Where all edges are equal the
    mask is the whole image, the eigenvector 0. Raises ValueError for features that are not finite."""
    x = F.normalize(check_features(features, grid), dim=-1)
    near = x @ x.T > tau
    others = near.sum() - near.diagonal().sum()         # edges of weight 1 between two patches
    if others in (0, len(x) * (len(x) - 1)):            # nothing is apart
        vector = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    else:
        A = torch.where(near, 1.0, eps).double()
        root = A.sum(1).sqrt()
        # with w = D^1/2 v: D^-1/2 A D^-1/2 w = (1 - lambda) w, whose eigenvalues ascend
        vector = torch.linalg.eigh(A / root[:, None] / root).eigenvectors[:, -2] / root
    size = vector.abs()
    seed = int((size >= (1 - TIE) * size.max()).int().argmax())      # the first of equals, by any solver
    vector = vector * (-1 if vector[seed] < 0 else 1)
    side = vector - vector.mean()
    mask = connected_patches((side >= TIE * side[seed]).view(grid), seed)
    return dict(mask=mask, box=box_around(mask), eigenvector=vector)


def check_features(features, grid):
    """Features (N, D) detached, float32 or float64, on a device with float64. Raises ValueError."""
    x = features.detach().cpu() if features.device.type == "mps" else features.detach()
    if x.dim() != 2 or len(x) != grid[0] * grid[1]:
        raise ValueError(f"features of shape {tuple(x.shape)} do not fit {grid[0]} x {grid[1]} patches")
    if not x.isfinite().all():
        raise ValueError("the features are not finite: give those of an earlier checkpoint")
    return x if x.dtype == torch.float64 else x.float()


def connected_patches(inside, seed):
    """The 4-connected part of bool (rows, columns) that holds the patch of number `seed`."""
    mask, before = torch.zeros_like(inside), None
    mask.view(-1)[seed] = True
    while before is None or not mask.equal(before):      # it grows by its neighbours until it is whole
        before, wide = mask, F.pad(mask, (1, 1, 1, 1))
        grown = wide[:-2, 1:-1] | wide[2:, 1:-1] | wide[1:-1, :-2] | wide[1:-1, 2:]
        mask = mask | grown & inside
    return mask


def box_around(mask):
    """The smallest box (x0, y0, x1, y1), half-open, around the True entries of (rows, columns)."""
    y, x = mask.nonzero().unbind(1)
    return int(x.min()), int(y.min()), int(x.max()) + 1, int(y.max()) + 1


# -------------------------------------------------------------------------------------------------------
# probe.py layers

def probe_set(path, net, saved, data_):
    """(images, transform) for a net, in the pixel scale that it is used to; data_: None for its own set.

    Raises BadInput where the images do not fit the net."""
    channels, size = net.patch_embed.proj.in_channels, saved["side"]
    own = saved["data"], saved.get("holdout", 0.0), saved.get("seed", 0)
    images = open_images(data_) if data_ else open_images(*own)
    is_latent = isinstance(images.train, data.Latents)
    if images.in_chans != channels or (is_latent and images.size != size):
        raise BadInput(f"--data {images.name} has {images.in_chans} channel(s), side {images.size}; "
                       f"{path} takes {channels}, side {size}: give --data that fits")
    if saved["kind"] == "sit" and not is_latent:
        images = replace(images, mean=[0.5] * channels, std=[0.5] * channels)
    elif data_ and not is_latent:
        mean, std = pixel_scale(saved)
        images = replace(images, mean=mean, std=std)
    return images, data.eval_transform(images, size)


def cached_features(net, saved, images, transform, args, world, dtype):
    """{"train": [features of each layer], "val": ...} of this rank's samples; from --cache if there.

    The file's name is a digest of weights and settings; of images in files only the folder counts."""
    file = None
    if args.cache:
        part = args.data or (saved.get("holdout"), saved.get("seed"))
        source = images.name.removesuffix("-subgroups"), part, len(images.train), images.mean, images.std
        settings = source, args.pool, args.batch_size, dtype, torch.__version__
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=8)
        for tensor in net.state_dict().values():
            digest.update(tensor.contiguous().numpy())
        file = Path(args.cache, f"{digest.hexdigest()}-{world.rank}of{world.size}.pt")
        if file.exists():
            return torch.load(file, weights_only=True)
    found, t = {}, 1.0 if saved["kind"] == "sit" else None       # a flow's clean image
    net.to(world.device)
    for split, part in (("train", images.train), ("val", images.val)):
        batches = data.eval_batches(part, transform, args.batch_size, *world[:2], args.workers)
        found[split] = layer_features(net, batches, world.device, args.pool, dtype, t, final_norm=True)
    net.cpu()                                           # several nets need not fit the device together
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        runtime.save_checkpoint(file, found)
    return found


def pixel_knn(images, transform, ks, args, world):
    """k-NN of the images themselves, as the net is given them: {k: fraction}, the same on every rank."""
    flat = []
    for part in (images.train, images.val):
        batches = data.eval_batches(part, transform, args.batch_size, *world[:2], args.workers)
        mine = torch.cat([x.flatten(1) for x, _ in batches])
        flat.append(gather_samples(mine, world).to(world.device))
    return dict(zip(map(str, ks), knn(flat[0], images.train.labels, flat[1], images.val.labels, ks)))


def layer_rows(path, net, found, train_y, val_y, ks, linear, world):
    """A row per layer, dicts. Each rank measures its share of the layers. `found` is emptied on the way.

    Raises BadInput where features are not finite."""
    bad = runtime.all_sum([(~x.isfinite()).sum() for x in found["val"]], world)
    if any(bad):
        layer = [n > 0 for n in bad].index(True)
        raise BadInput(f"--ckpt {path}: layer {layer} is not finite: give an earlier one")
    rows = torch.zeros(len(bad), len(ks) + 3, dtype=torch.float64)
    for l in range(len(bad)):
        train_x, val_x = (gather_samples(found[split][l], world) for split in ("train", "val"))
        found["train"][l] = found["val"][l] = None      # of ImageNet a layer takes 4 GB
        if l % world.size == world.rank:
            top1 = knn(train_x.to(world.device), train_y, val_x.to(world.device), val_y, ks)
            top1.append(math.nan)
            if linear != "none":
                top1[-1] = linear_probe(train_x, train_y, val_x, val_y, linear, device=world.device)
            norm = float(val_x.norm(dim=1).mean())
            rows[l] = torch.tensor([*top1, effective_rank(val_x), norm], dtype=torch.float64)
    names = ["embedding", *map(str, range(1, len(net.blocks) + 1)), "final norm"]
    return [dict(layer=name, knn=dict(zip(map(str, ks), row)), linear=row[-3], effective_rank=row[-2],
                 norm=row[-1]) for name, row in zip(names, runtime.all_sum(list(rows), world))]


def probe_checkpoint(path, net, saved, images, transform, args, world, dtype):
    """The record of one checkpoint: what it is, and a row per layer."""
    start, (train_y, val_y) = time.perf_counter(), (images.train.labels, images.val.labels)
    ks = list(dict.fromkeys(min(k, len(train_y)) for k in args.k))
    found = cached_features(net, saved, images, transform, args, world, dtype)
    rows = layer_rows(path, net, found, train_y, val_y, ks, args.linear, world)
    k = min(20, len(train_y))
    k = str(k if k in ks else ks[0])
    best = max(range(len(net.blocks) + 1), key=lambda l: rows[l]["knn"][k])    # the final norm is none
    return dict(
        **run_facts(path, saved), alpha_eff=getattr(net, "alpha_eff", None),
        data=args.data or saved["data"], train_images=len(train_y), val_images=len(val_y),
        classes=len(images.classes), majority=float(val_y.bincount().max() / len(val_y)), k=ks,
        seconds=time.perf_counter() - start,
        best=dict(layer=best, of=len(net.blocks), k=int(k), knn=rows[best]["knn"][k]), layers=rows,
        pixels=pixel_knn(images, transform, ks, args, world) if args.pixels else None)


def layer_table(record, linear):
    """What a record was measured on, and its rows as text, columns aligned."""
    about = ("{checkpoint}: {kind}, step {step}, weights {weights}; {data}: bank of {train_images}, "
             "{val_images} to classify, {classes} classes, majority {majority:.1%}\n".format(**record))
    if record["pixels"]:
        about += "pixels: " + ", ".join(f"{k}-NN {v:.1%}" for k, v in record["pixels"].items()) + "\n"
    lines = [["layer", *(f"{k}-NN" for k in record["k"]), linear, "eff. rank", "norm"]]
    for row in record["layers"]:
        shares = [f"{100 * v:.1f}" for v in (*row["knn"].values(), row["linear"])]
        lines.append([row["layer"], *shares, f"{row['effective_rank']:.3f}", f"{row['norm']:.3g}"])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return about + "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def layer_figure(records, linear, path):
    """Accuracy by layer (k-NN, the linear probe dashed) and effective rank by layer."""
    plt = runtime.pyplot()
    chart, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    for i, record in enumerate(records):
        rows = record["layers"][:record["best"]["of"] + 1]
        k, style = str(record["best"]["k"]), dict(color=f"C{i % 10}", ms=3)
        left.plot([100 * r["knn"][k] for r in rows], "o-", label=f"{record['name']}: {k}-NN", **style)
        if linear != "none":
            line = [100 * r["linear"] for r in rows]
            left.plot(line, "s--", label=f"{record['name']}: {linear}", **style)
        right.plot([r["effective_rank"] for r in rows], "o-", label=record["name"], **style)
    for axis, title in ((left, "validation accuracy, %"), (right, "effective rank, nats")):
        axis.set(xlabel="layer (0: embedding)", ylabel=title)
        axis.grid(alpha=.3)
        axis.legend(frameon=False, fontsize=7)
    chart.savefig(path, dpi=120)
    plt.close(chart)


def run_layers(args):
    """`probe.py layers`."""
    world, dtype = start_probe(args)
    nets = [(path, *load_net(path, raw=args.raw)) for path in args.ckpt]
    sets = [probe_set(*entry, args.data) for entry in nets]
    for images, _ in sets:
        if world.size > min(len(images.train), len(images.val)):
            raise BadInput(f"{world.size} processes are more than {images.name} has images: start fewer")
    out, records = results_folder(args), []
    for entry, (images, transform) in zip(nets, sets):
        records.append(probe_checkpoint(*entry, images, transform, args, world, dtype))
        if world.main:
            print(f"\n{layer_table(records[-1], args.linear)}", flush=True)
    if not world.main:
        return
    write_results(out / "probe.json", "probe.py", args, world, dtype, pool=args.pool, linear=args.linear,
                  protocol=PROTOCOLS.get(args.linear), checkpoints=records)
    layer_figure(records, args.linear, out / "probe.png")
    print(f"\n{out}: probe.json, probe.png")
    for record in records:
        best, name = record["best"], f"{record['name']}: " * (len(records) > 1)
        print(f"{name}best layer {best['layer']} of {best['of']}: k-NN {100 * best['knn']:.1f} %")


# -------------------------------------------------------------------------------------------------------
# probe.py pca

def principal_components(features, count=3):
    """(mean (D,), components (count, D)) of features (n, D), float64: directions of largest variance.

    Their signs make the third moment of the scores positive: what is rare lies on the bright side."""
    x = features.detach().cpu().double()
    mean = x.mean(0)
    components = torch.linalg.svd(x - mean, full_matrices=False).Vh[:count]
    skew = ((x - mean) @ components.T).pow(3).sum(0)
    return mean, torch.where(skew < 0, -1.0, 1.0)[:, None] * components


def component_colours(features):
    """Features (n, D) -> colours (n, 3) in 0..1, each component from its 1st to its 99th percentile."""
    mean, components = principal_components(features)
    x = (features.detach().cpu().double() - mean) @ components.T
    low, high = torch.quantile(x, torch.tensor([0.01, 0.99], dtype=torch.float64), dim=0)
    return F.pad(((x - low) / (high - low).clamp(min=1e-12)).clamp(0, 1), (0, 3 - len(components)))


@torch.no_grad()
def run_pca(args):
    """`probe.py pca`: a row per checkpoint and image: the image, then its patches by layer."""
    world, dtype = start_probe(args)
    out, rows, images = results_folder(args), [], open_images(args.data)
    count = min(args.count, len(images.val))
    positions = torch.linspace(0, len(images.val) - 1, count).round().long().tolist()
    for path in args.ckpt:
        net, saved = load_net(path, raw=args.raw)
        layers = layer_numbers(args.layers, len(net.blocks))
        mean, std = pixel_scale(saved)
        side = args.img_size // net.patch_embed.patch_size                       # in patches
        size = side * net.patch_embed.patch_size
        square = v2.Compose([v2.Resize(size, **data.BICUBIC), v2.CenterCrop(size)])
        shown = torch.stack([square(images.val[i][0]) for i in positions])
        x = v2.Compose(data.normalise(replace(images, mean=mean, std=std)))(shown)
        columns = [shown.expand(-1, 3, -1, -1) / 255]
        check_net(path, net, x[:1], layers)
        for tokens in dense_tokens(net, x, layers, world.device, dtype):
            maps = torch.stack([component_colours(t).float() for t in tokens])
            columns.append(F.interpolate(maps.mT.unflatten(2, (side, side)), args.img_size))
        columns[0] = F.interpolate(columns[0], args.img_size)
        rows.append(torch.stack(columns, 1).flatten(0, 1))
    save_image(torch.cat(rows), out / "probe_pca.png", nrow=len(columns), pad_value=1.0)
    print(f"{out}: probe_pca.png, {count} images a checkpoint; columns: the image, layers {layers}")


@torch.no_grad()
def dense_tokens(net, x, layers, device, dtype=torch.float32, feature="token"):
    """`model.patch_tokens` of images x (B, C, Y, X), in float32: [(B, N, D) of each of `layers`]."""
    with runtime.autocast(device, dtype):
        found = model.patch_tokens(net.to(device), x.to(device, non_blocking=True), layers, feature)
    return [tokens.float() for tokens in found]


def check_net(path, net, x, layers, feature="token"):
    """Raises BadInput, which names the checkpoint, where net, images x and layers do not fit."""
    channels = net.patch_embed.proj.in_channels
    if isinstance(net, model.FlowNet):
        raise BadInput(f"--ckpt {path} is a flow model, whose features depend on a time: give another")
    if channels != x.shape[1]:
        raise BadInput(f"--ckpt {path} takes {channels} channel(s), and --data has {x.shape[1]}")
    try:
        dense_tokens(net, x, layers, x.device, feature=feature)
    except ValueError as error:
        raise BadInput(f"--ckpt {path}: {error}") from error


def layer_numbers(words, depth):
    """Layers as numbers: "all" is 1 .. depth, "last" is depth."""
    return [l for word in words for l in {"all": range(1, depth + 1), "last": [depth]}.get(word, [word])]


# -------------------------------------------------------------------------------------------------------
# command line

def start_probe(args):
    """(world, dtype) of a measurement; says on what it runs."""
    world = runtime.start(args.device, args.threads)
    dtype, why = runtime.pick_dtype(args.dtype, world.device)
    if world.main:
        print(f"device {world.why}; {world.size} process(es); {dtype}, {why}; "
              f"revision {runtime.git_revision()}, torch {torch.__version__}", flush=True)
    return world, dtype


def run_name(path):
    """The name of the run's folder."""
    path = Path(path)
    return (path if path.is_dir() else path.parent).resolve().name


def run_facts(path, saved):
    """What a record says about its checkpoint."""
    about = {key: saved[key] for key in ("kind", "step", "weights")}
    return dict(checkpoint=str(path), name=run_name(path), **about)


def results_folder(args):
    """--out, or the folder of the first checkpoint; made before anything is measured."""
    first = Path(args.ckpt[0])
    out = Path(args.out) if args.out else first if first.is_dir() else first.parent
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {out} cannot be written ({error.strerror}): choose another") from error
    return out


def write_results(path, script, args, world, dtype, **found):
    """A measurement's JSON: the command, what it ran on, and `found`."""
    command = shlex.join(["python", *script.split(), *args.argv])
    made = dict(command=command, revision=runtime.git_revision(), torch=torch.__version__,
                device=str(world.device), dtype=str(dtype), processes=world.size)
    runtime.write_text(path, json.dumps(runtime.finite({**made, **found}), indent=1) + "\n")


def layer_type(text):
    """An argparse type: last, all, or the number of a layer."""
    return text if text in ("last", "all") else runtime.number(int, low=0)(text)


def add_probe_flags(add, batch_size):
    """The flags that all measurements of checkpoints share."""
    number = runtime.number
    add("--ckpt", nargs="+", required=True, help="checkpoints, or folders of runs, shown side by side")
    add("--raw", action="store_true", help="weights as trained, not the averaged ones")
    add("--batch-size", type=number(int, low=1), default=batch_size, help="images per forward pass")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda or mps")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of the forward pass")
    add("--workers", type=number(int, low=0), default=0, help="data loading processes per rank")
    add("--threads", type=number(int, low=0), default=0, help="CPU threads; 0 leaves torch's choice")
    add("--out", help="folder for the results; else that of the first checkpoint")


def get_args(argv=None):
    number, parser = runtime.number, runtime.Parser(description=__doc__)
    what = parser.add_subparsers(metavar="WHAT", required=True)
    command = what.add_parser("layers", help="k-NN, linear probe and effective rank of every layer")
    command.set_defaults(run=run_layers)
    add = command.add_argument
    add_probe_flags(add, batch_size=256)
    add("--data", help=f"{', '.join(data.NAMES)}, or a folder; else each checkpoint's own")
    add("--pool", choices=["mean", "patches", "token"], default="mean",
        help="of the tokens: mean of all, mean of the patches, or the first one")
    add("--k", type=number(int, low=1), nargs="+", default=[10, 20, 100, 200], help="neighbours")
    add("--pixels", action="store_true", help="also k-NN of the images themselves, for small ones")
    add("--linear", choices=[*PROTOCOLS, "none"], default="lbfgs",
        help="; ".join(f"{name}: {text}" for name, text in PROTOCOLS.items()))
    add("--cache", help="folder that keeps the features for the next call with as many processes")
    command = what.add_parser("pca", help="principal components of the patches as colours: a picture")
    command.set_defaults(run=run_pca)
    add = command.add_argument
    add_probe_flags(add, batch_size=1)
    add("--data", default="composites", help=f"{', '.join(data.NAMES)}, or a folder")
    add("--layers", nargs="+", type=layer_type, default=["all"], help="all, last, numbers")
    add("--count", type=number(int, low=1, high=50), default=6, help="validation images, evenly spread")
    add("--img-size", type=number(int, low=1), default=128, help="side of the images, in pixels")
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def main(argv=None):
    args = get_args(argv)
    args.run(args)


if __name__ == "__main__":
    runtime.run_script(main)
