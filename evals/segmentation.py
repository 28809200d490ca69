"""Semantic segmentation from frozen patch tokens: mIoU of a linear head, or of clusters without labels.

    python -m evals.segmentation linear --ckpt out/dino-a out/dino-b --layers all      mIoU by layer
    python -m evals.segmentation linear --ckpt out/dino-a --data /path/to/VOC2012 --preset paper
    python -m evals.segmentation cluster --ckpt out/dino-a       k-means, matched to the classes

    logits(y, x) = bilinear(W token + b)     a 1 x 1 convolution on the patches, resized to the mask

A data set is a `dense_data.DenseData`. A group is a tuple of layers whose tokens are concatenated: (12,)
is the last of 12, (3, 6, 9, 12) multi-scale. Heads of several groups learn side by side on the same
batches, each as it would alone. Ranks share the images; every rank trains the heads on whole batches.
"""
import argparse
import colorsys
import math
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.utils import save_image

import data
import probe
import runtime
from evals.dense_data import IGNORE, NAMES, load_dense, load_dense_net
from probe import class_iou, gather_samples, mean_iou
from runtime import BadInput, mix_seed

# Every entry is a flag too. img_size: side of the images; None is the net's own. loss_size: side of the
# masks in training. eval_size: side at which pixels are counted; 0 is each mask's own. augment: random
# crop of .8 to 1 of the area, and flip, of image and mask. epochs: None leaves the length to steps.
PRESETS = {
    "laptop": dict(
        img_size=None, loss_size=32, eval_size=0, augment=False, opt="adamw", lr=1e-2, weight_decay=0.0,
        schedule="cosine", batch_size=32, steps=400, epochs=None, batch_norm=True, cache_gb=4.0, seed=0),
    # Leopart's linear probe. DINOv2's head has a BatchNorm in front.
    "paper": dict(
        img_size=448, loss_size=100, eval_size=100, augment=True, opt="sgd", lr=0.01, weight_decay=1e-4,
        schedule="step", batch_size=60, steps=None, epochs=25.0, batch_norm=False, cache_gb=4.0, seed=0),
}


# -------------------------------------------------------------------------------------------------------
# measures

def confusion_matrix(pred, target, classes, columns=None):
    """int64 (classes, columns): entry (t, p) counts the pixels of class t that were called p.

    Pixels whose target is IGNORE are left out. columns: labels of a prediction; None is `classes`."""
    columns, seen = columns or classes, target != IGNORE
    index = target[seen].long() * columns + pred[seen].long()
    return index.bincount(minlength=classes * columns).view(classes, columns)


def pixel_accuracy(matrix):
    """The share of pixels called right, a fraction, from a confusion matrix."""
    return float(matrix.diagonal().sum() / matrix.sum())


def score_matrix(matrix):
    """mIoU, pixel accuracy and the IoU of each class, fractions, from a confusion matrix."""
    iou = class_iou(matrix).tolist()
    return dict(miou=mean_iou(matrix), pixel_accuracy=pixel_accuracy(matrix), iou=iou)


# -------------------------------------------------------------------------------------------------------
# data

class Pairs(Dataset):
    """Images and masks, by batches. Position p is sample p % len in epoch p // len.

    Batch: (float32 (B, 3, img_size, img_size), mean 0 and std 1; int64 (B, mask_size, mask_size), or
    with mask_size 0 a list of masks of their own sizes)."""

    def __init__(self, part, dense, img_size, mask_size=0, augment=False, seed=0):
        self.part, self.img_size, self.mask_size = part, img_size, mask_size
        self.augment, self.seed = augment, seed
        self.normalise = v2.Compose(data.normalise(dense))
        crop = v2.RandomResizedCrop(img_size, (0.8, 1.0), **data.BICUBIC)
        self.jitter = v2.Compose([crop, v2.RandomHorizontalFlip()])

    def __len__(self):
        return len(self.part)

    def __getitems__(self, positions):
        with torch.random.fork_rng(devices=[]):         # without workers this is the caller's own stream
            images, masks = zip(*[self.sample(*divmod(p, len(self))) for p in positions])
        return self.normalise(torch.stack(images)), torch.stack(masks) if self.mask_size else list(masks)

    def sample(self, epoch, i):
        """(uint8 (3, img_size, img_size), mask) of sample i in that epoch."""
        image, mask, _ = self.part[i]
        if self.augment:
            torch.default_generator.manual_seed(mix_seed("augment", self.seed, epoch, i))
            image, mask = self.jitter(tv_tensors.Image(image), tv_tensors.Mask(mask))
            image, mask = image.as_subclass(torch.Tensor), mask.as_subclass(torch.Tensor)
        elif image.shape[-2:] != (self.img_size, self.img_size):
            image = v2.functional.resize(image, [self.img_size, self.img_size], **data.BICUBIC)
        if self.mask_size and mask.shape != (self.mask_size, self.mask_size):
            mask = resize_labels(mask, (self.mask_size, self.mask_size))
        return image, mask


def resize_labels(labels, size):
    """int64 (Y, X) brought to `size`, each pixel taking the label nearest to its centre."""
    return F.interpolate(labels[None, None].float(), size=size, mode="nearest-exact")[0, 0].long()


def token_batches(net, pairs, positions, layers, device, dtype=torch.float32, workers=0):
    """Yields ([tokens (B, N, D) of each of `layers`, float32], masks) of the batches of positions."""
    for x, masks in data.run_loader(pairs, positions, workers):
        yield probe.dense_tokens(net, x, layers, device, dtype), masks


def rank_positions(n, batch_size, world):
    """The positions rank, rank + size, ... of n in batches: over all ranks each once."""
    mine = list(range(world.rank, n, world.size))
    return [mine[i:i + batch_size] for i in range(0, len(mine), batch_size)]


def head_batches(net, dense, layers, how, world, dtype=torch.float32, workers=0):
    """Yields ([tokens (B, N, D) of each layer], masks) of all steps, the same on every rank.

    Where nothing is random and the tokens of all images fit in how["cache_gb"] they are computed once,
    else batch by batch. Either way the ranks share the images."""
    n, side = len(dense.train), how["img_size"] // net.patch_embed.patch_size
    pairs = Pairs(dense.train, dense, how["img_size"], how["loss_size"], how["augment"], how["seed"])
    steps = data.train_positions(n, how["batch_size"], how["seed"], 0, how["steps"])
    floats = n * side ** 2 * len(layers) * net.patch_embed.proj.out_channels
    if how["augment"] or 4 * floats > how["cache_gb"] * 1e9:
        mine = (batch[world.rank::world.size] for batch in steps)
        for tokens, masks in token_batches(net, pairs, mine, layers, world.device, dtype, workers):
            yield [gather_samples(t, world) for t in tokens], gather_samples(masks, world)
        return
    mine = rank_positions(n, how["batch_size"], world)
    found = token_batches(net, pairs, mine, layers, world.device, dtype, workers)
    tokens, masks = zip(*[([t.cpu() for t in tokens], masks) for tokens, masks in found])
    tokens = [gather_samples(torch.cat(layer), world) for layer in zip(*tokens)]
    masks = gather_samples(torch.cat(masks), world)
    for batch in steps:
        index = torch.tensor(batch) % n
        yield [layer[index].to(world.device) for layer in tokens], masks[index]


# -------------------------------------------------------------------------------------------------------
# linear head

def make_head(dim, classes, batch_norm, seed=0):
    """A linear layer on tokens, with batch_norm behind a BatchNorm."""
    linear = nn.Linear(dim, classes)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(mix_seed(seed, "head"))
        linear.weight.normal_(0, 0.01, generator=generator)
        linear.bias.zero_()
    return nn.Sequential(nn.BatchNorm1d(dim) if batch_norm else nn.Identity(), linear)


def join_layers(tokens, layers, group):
    """[tokens (B, N, D) of each of `layers`] -> (B, N, len(group) * D), those of the group."""
    return torch.cat([tokens[layers.index(l)] for l in group], dim=-1)


def patch_logits(head, tokens):
    """Tokens (B, N, D) of square images -> logits of their patches (B, classes, rows, columns)."""
    logits, side = head(tokens.flatten(0, 1)), math.isqrt(tokens.shape[1])
    return logits.view(len(tokens), side, side, -1).permute(0, 3, 1, 2)


def pixel_logits(logits, size):
    """Logits of patches (B, C, rows, columns) -> of pixels (B, C, *size), bilinear."""
    return F.interpolate(logits, size=size, mode="bilinear", align_corners=False)


def head_lr(how, step):
    """Learning rate of a step: cosine to 0, or a tenth after four fifths."""
    if how["schedule"] == "cosine":
        return runtime.lr_at(step, how["steps"], 0, how["lr"])
    return how["lr"] * (0.1 if step >= 0.8 * how["steps"] else 1.0)


def train_heads(groups, layers, batches, classes, how, device):
    """One head per group, trained on batches of ([tokens of each of `layers`], masks).

    A step minimises cross-entropy, the mean over the pixels of the batch that are not to be ignored.
    Returns (heads in eval mode, losses at the last step). Raises BadInput where one is not finite."""
    heads = None
    for step, (tokens, masks) in enumerate(batches):
        inputs = [join_layers(tokens, layers, group) for group in groups]
        if heads is None:
            heads = [make_head(x.shape[-1], classes, how["batch_norm"], how["seed"]) for x in inputs]
            heads = nn.ModuleList(heads).to(device)
            options = dict(lr=how["lr"], weight_decay=how["weight_decay"])
            if how["opt"] == "sgd":
                optimizer = torch.optim.SGD(heads.parameters(), momentum=0.9, **options)
            else:
                optimizer = torch.optim.AdamW(heads.parameters(), **options)
        optimizer.param_groups[0]["lr"] = head_lr(how, step)
        masks, losses = masks.to(device), []
        for head, x in zip(heads, inputs):
            logits = pixel_logits(patch_logits(head, x), masks.shape[1:])
            losses.append(F.cross_entropy(logits, masks, ignore_index=IGNORE, reduction="sum"))
        losses = torch.stack(losses) / (masks != IGNORE).sum().clamp(min=1)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    for group, loss in zip(groups, losses.tolist()):
        if not math.isfinite(loss):
            raise BadInput(f"the loss of the head on layer {' '.join(map(str, group))} is not finite: "
                           "lower --lr, or give an earlier checkpoint if the run diverged")
    return heads.eval(), losses.tolist()


@torch.no_grad()
def predict_pixels(head, x, masks):
    """The class of each pixel, int64 (Y, X) for each image, as large as its mask; tokens x (B, N, D)."""
    logits, sizes = patch_logits(head, x), [mask.shape for mask in masks]
    if len(set(sizes)) == 1:
        return list(pixel_logits(logits, sizes[0]).argmax(1))
    return [pixel_logits(z[None], size)[0].argmax(0) for z, size in zip(logits, sizes)]


def evaluate_heads(net, heads, groups, layers, dense, how, world, dtype=torch.float32, workers=0):
    """The confusion matrices (C, C) of the heads over the whole validation set: every image once."""
    pairs, classes = Pairs(dense.val, dense, how["img_size"], how["eval_size"]), len(dense.classes)
    totals = torch.zeros(len(heads), classes, classes, dtype=torch.int64, device=world.device)
    mine = rank_positions(len(pairs), how["batch_size"], world)
    for tokens, masks in token_batches(net, pairs, mine, layers, world.device, dtype, workers):
        masks = [mask.to(world.device) for mask in masks]
        for total, head, group in zip(totals, heads, groups):
            found = predict_pixels(head, join_layers(tokens, layers, group), masks)
            total += sum(confusion_matrix(pred, mask, classes) for pred, mask in zip(found, masks))
    if world.size > 1:
        dist.all_reduce(totals)
    if not totals.any():
        raise BadInput(f"--data: no pixel of the validation masks of {dense.name} has a label")
    return totals.cpu()


def linear_segmentation(net, dense, groups, how, world, dtype=torch.float32, workers=0):
    """The linear probe as a whole: (a row of each group, heads). how: a preset with all filled in."""
    layers = sorted({l for group in groups for l in group})
    batches = head_batches(net, dense, layers, how, world, dtype, workers)
    heads, losses = train_heads(groups, layers, batches, len(dense.classes), how, world.device)
    if world.size > 1:                                  # GPUs may have rounded differently
        for value in heads.state_dict().values():
            dist.broadcast(value, src=0)
    found = evaluate_heads(net, heads, groups, layers, dense, how, world, dtype, workers)
    rows = [dict(layers=list(group), loss=loss, **score_matrix(matrix), confusion=matrix.tolist())
            for group, loss, matrix in zip(groups, losses, found)]
    return rows, heads


# -------------------------------------------------------------------------------------------------------
# clusters

def kmeans(x, k, seed=0):
    """The cluster 0 .. k - 1 of each row of x (n, D): int64 (n,). Above 2^18 rows in batches."""
    cluster = runtime.import_optional("sklearn.cluster", "evals.segmentation cluster")
    method = cluster.KMeans(k, n_init=3, random_state=seed)
    if len(x) > 2 ** 18:
        method = cluster.MiniBatchKMeans(k, n_init=3, random_state=seed, batch_size=4096)
    return torch.from_numpy(method.fit_predict(x.numpy())).long()


def match_clusters(matrix, leftover="wrong"):
    """Clusters become classes. matrix (C, K): pixels of class c in cluster k.

    One cluster a class, by the Hungarian algorithm, so that most pixels are right. Clusters that are
    left over are class C, never right, or with leftover "majority" the class of most of their pixels.
    Returns (class of each cluster (K,), confusion matrix (C, C + 1))."""
    optimize = runtime.import_optional("scipy.optimize", "evals.segmentation cluster")
    classes, clusters = matrix.shape
    to = matrix.argmax(0) if leftover == "majority" else torch.full((clusters,), classes)
    rows, columns = optimize.linear_sum_assignment(matrix.numpy(), maximize=True)
    to[torch.from_numpy(columns)] = torch.from_numpy(rows)
    return to, torch.zeros(classes, classes + 1, dtype=torch.int64).index_add_(1, to, matrix)


def cluster_segmentation(net, dense, part, groups, how, world, dtype=torch.float32, workers=0):
    """k-means of the L2-normalised tokens of all images of `part`, matched to the classes.

    A patch's cluster is that of its pixels. Returns (a row of each group, [classes of the patches
    (n, rows, columns) of each group]), of the seed with the median mIoU. In a row: trials, the mIoU of
    every seed; confusion (C, K), before the matching."""
    pairs, classes = Pairs(part, dense, how["img_size"], how["eval_size"]), len(dense.classes)
    layers = sorted({l for group in groups for l in group})
    positions = rank_positions(len(pairs), how["batch_size"], world)
    found = token_batches(net, pairs, positions, layers, world.device, dtype, workers)
    tokens, masks = zip(*[([t.cpu() for t in tokens], masks) for tokens, masks in found])
    tokens = [torch.cat(layer) for layer in zip(*tokens)]
    masks = [mask for batch in masks for mask in batch]
    side, rows, maps = math.isqrt(tokens[0].shape[1]), [], []
    for group in groups:
        x, trials = F.normalize(join_layers(tokens, layers, group), dim=-1), []
        for seed in how["seeds"]:
            patches = kmeans(x.flatten(0, 1), how["clusters"], seed).view(len(x), side, side)
            matrix = torch.zeros(classes, how["clusters"], dtype=torch.int64)
            for labels, mask in zip(patches, masks):
                pred = resize_labels(labels, mask.shape)
                matrix += confusion_matrix(pred, mask, classes, how["clusters"])
            to, matched = match_clusters(matrix, how["leftover"])
            trials.append((mean_iou(matched), matched, to[patches], matrix))
        trials.sort(key=lambda trial: trial[0])
        _, matched, patches, matrix = trials[(len(trials) - 1) // 2]
        rows.append(dict(layers=list(group), **score_matrix(matched), confusion=matrix.tolist(),
                         trials=[trial[0] for trial in trials]))
        maps.append(patches)
    return rows, maps


# -------------------------------------------------------------------------------------------------------
# commands

def layer_groups(args, depth):
    """The groups that --layers and --multi ask for, each once."""
    multi = tuple(l for l in args.multi if l not in ("auto", "none"))
    if "auto" in args.multi:                            # four, evenly spaced: (3, 6, 9, 12) of 12
        multi = tuple(dict.fromkeys(math.ceil(depth * i / 4) for i in range(1, 5)))
    single = [(l,) for l in probe.layer_numbers(args.layers, depth)]
    return list(dict.fromkeys(single + [multi] * bool(multi)))


def open_nets(args, dense, how):
    """[(path, net, the run's args, set in the net's pixel scale, settings, groups)] of all checkpoints.

    Raises BadInput where layers, images and a net do not fit."""
    nets = []
    for path in args.ckpt:
        net, saved, own = load_dense_net(path, args, dense)
        size, groups = how["img_size"] or saved["side"], layer_groups(args, len(net.blocks))
        probe.check_net(path, net, torch.zeros(1, 3, size, size), [l for g in groups for l in g])
        nets.append((path, net, saved, own, dict(how, img_size=size), groups))
    return nets


def run_linear(args):
    """`evals.segmentation linear`."""
    given = {key: getattr(args, key) for key in PRESETS["laptop"]}
    how = PRESETS[args.preset] | {key: value for key, value in given.items() if value is not None}
    if args.steps:
        how["epochs"] = args.epochs                     # the preset's would win over --steps
    world, dtype = probe.start_probe(args)
    runtime.split_batch(how["batch_size"], 0, world.size)
    dense = load_dense(args.data, "segmentation", args.classes)
    if dense.train is None:
        raise BadInput(f"--data {args.data} has no training part, which a head needs: use cluster")
    per_epoch = data.steps_per_epoch(len(dense.train), how["batch_size"])
    if how["epochs"]:
        how["steps"] = max(1, round(how["epochs"] * per_epoch))
    how["epochs"] = how["steps"] / per_epoch
    nets, out = open_nets(args, dense, how), probe.results_folder(args)
    records, pictures = [], first_pictures(dense.val)
    for path, net, saved, own, settings, groups in nets:
        start = time.perf_counter()
        rows, heads = linear_segmentation(net, own, groups, settings, world, dtype, args.workers)
        truth = torch.tensor(rows[0]["confusion"]).sum(1, keepdim=True)
        constant = score_matrix(F.pad(truth, (0, len(truth) - 1)))                # all the first class
        baseline = dict(label=dense.classes[0], **constant)
        records.append(segmentation_record(path, net, saved, settings, rows, start, baseline=baseline))
        if world.main:
            print(segmentation_table(records[-1], dense.classes))
            print(f"all {dense.classes[0]}: mIoU {100 * constant['miou']:.1f} %", flush=True)
            best = max(range(len(rows)), key=lambda i: rows[i]["miou"])
            pairs = Pairs(own.val, own, settings["img_size"])
            x, masks = pairs.__getitems__(shown_positions(own.val))
            tokens = probe.dense_tokens(net, x, groups[best], world.device, dtype)
            found = predict_pixels(heads[best], torch.cat(tokens, -1), masks)
            pictures += [pred.cpu() for pred in found]
        net.cpu()                                       # several nets need not fit the device together
    if world.main:
        write_segmentation(out, "seg", args, world, dtype, dense.classes, records, pictures)


def run_cluster(args):
    """`evals.segmentation cluster`, in one process, as scikit-learn runs."""
    for package in ("sklearn.cluster", "scipy.optimize"):        # said before the features are computed
        runtime.import_optional(package, "evals.segmentation cluster")
    world, dtype = probe.start_probe(args)
    if world.size > 1:
        raise BadInput("evals.segmentation cluster runs in one process: start it without torchrun")
    dense = load_dense(args.data, "segmentation", args.classes)
    how = dict(img_size=args.img_size, eval_size=args.eval_size or 0, batch_size=args.batch_size or 64,
               clusters=args.clusters or len(dense.classes), seeds=list(range(args.seeds)),
               leftover=args.leftover, split=args.split)
    nets, out = open_nets(args, dense, how), probe.results_folder(args)
    part = dense.val if args.split == "val" else dense.train
    records, pictures = [], first_pictures(part)
    for path, net, saved, own, settings, groups in nets:
        start = time.perf_counter()
        rows, maps = cluster_segmentation(net, own, part, groups, settings, world, dtype, args.workers)
        records.append(segmentation_record(path, net, saved, settings, rows, start))
        print(segmentation_table(records[-1], dense.classes), flush=True)
        best = max(range(len(rows)), key=lambda i: rows[i]["miou"])
        pictures += [maps[best][i] for i in shown_positions(part)]
        net.cpu()
    write_segmentation(out, "cluster", args, world, dtype, dense.classes, records, pictures)


def segmentation_record(path, net, saved, settings, rows, start, **more):
    """What the JSON file says about a checkpoint."""
    protocol = dict(settings, layers=[row["layers"] for row in rows], depth=len(net.blocks))
    seconds = time.perf_counter() - start
    return dict(probe.run_facts(path, saved), protocol=protocol, rows=rows, seconds=seconds, **more)


def segmentation_table(record, classes):
    """mIoU and pixel accuracy of each group, then the IoU of each class at the best, as text."""
    lines = [f"\n{record['checkpoint']}", "  mIoU %  pixels %  layers"]
    for row in record["rows"]:
        shares = f"{100 * row['miou']:8.1f}  {100 * row['pixel_accuracy']:8.1f}"
        lines.append(f"{shares}  {' '.join(map(str, row['layers']))}")
    best = max(record["rows"], key=lambda row: row["miou"])
    ious = ", ".join(f"{name} {100 * value:.1f}" for name, value in zip(classes, best["iou"]))
    return "\n".join([*lines, f"IoU % of layer {' '.join(map(str, best['layers']))}: {ious}"])


def write_segmentation(out, name, args, world, dtype, classes, records, pictures):
    """The files {name}.json, {name}.png and {name}_examples.png, and the last lines: the best mIoU."""
    probe.write_results(out / f"{name}.json", "-m evals.segmentation", args, world, dtype,
                        data=args.data, classes=classes, checkpoints=records)
    draw_curves(out / f"{name}.png", records)
    pictures = torch.stack([picture_of(image, len(classes)) for image in pictures])
    columns = len(pictures) // (2 + len(records))
    save_image(pictures, out / f"{name}_examples.png", nrow=columns, pad_value=1.0)
    print(f"\n{out}: {name}.json, {name}.png, {name}_examples.png (images, truth, each checkpoint)")
    for record in records:
        words = []
        for kind in ("single", "multi"):
            rows = [row for row in record["rows"] if (len(row["layers"]) > 1) == (kind == "multi")]
            if rows:
                best = max(rows, key=lambda row: row["miou"])
                where = f"{kind}, layer{'s' * (kind == 'multi')} {' '.join(map(str, best['layers']))}"
                words.append(f"{100 * best['miou']:.1f} % ({where})")
        print(f"{record['name']}: " * (len(records) > 1) + f"mIoU {', '.join(words)}")


def shown_positions(part, count=6):
    """The images that are shown, evenly spread."""
    return torch.linspace(0, len(part) - 1, min(count, len(part))).long().tolist()


def first_pictures(part):
    """The first rows of pictures: images uint8 (3, Y, X), then their masks int64 (Y, X)."""
    images, masks, _ = zip(*[part[i] for i in shown_positions(part)])
    return [*images, *masks]


def picture_of(image, classes, side=128):
    """uint8 (3, Y, X) or labels (Y, X) -> float (3, side, side). Class 0 is black, no label white."""
    if image.dim() == 3:
        return v2.functional.resize(image, [side, side]) / 255
    hues = [colorsys.hsv_to_rgb(0.618 * i % 1, 0.8, 0.9) for i in range(1, classes)]
    colours = torch.ones(IGNORE + 1, 3)
    colours[:classes] = torch.tensor([(0.0, 0.0, 0.0), *hues])
    return colours[resize_labels(image, (side, side))].permute(2, 0, 1)


def draw_curves(path, records):
    """mIoU by layer, a colour per checkpoint; several layers dashed."""
    plt = runtime.pyplot()
    chart, axis = plt.subplots(figsize=(5.6, 3.8), constrained_layout=True)
    for i, record in enumerate(records):
        points = [(row["layers"], 100 * row["miou"]) for row in record["rows"]]
        single = [(layers[0], miou) for layers, miou in points if len(layers) == 1]
        axis.plot(*zip(*single), "o-", ms=3, color=f"C{i % 10}", label=record["name"])
        for layers, miou in points:
            if len(layers) > 1:
                axis.axhline(miou, ls="--", lw=1, color=f"C{i % 10}")
    axis.set(xlabel="layer (0: embedding); dashed: several layers", ylabel="mIoU, %")
    axis.grid(alpha=.3)
    axis.legend(frameon=False, fontsize=7)
    chart.savefig(path, dpi=120)
    plt.close(chart)


def multi_type(text):
    """An argparse type: auto, none, or the number of a layer."""
    return text if text in ("auto", "none") else runtime.number(int, low=0)(text)


def add_head_flags(add):
    """A flag for each entry of a preset that `linear` has to itself."""
    number, switch = runtime.number, argparse.BooleanOptionalAction
    add("--steps", type=number(int, low=1), help="updates")
    add("--epochs", type=number(float, above=0), help="passes over the training set, instead of steps")
    add("--opt", choices=["adamw", "sgd"], help="sgd has momentum .9")
    add("--lr", type=number(float, above=0), help="peak learning rate")
    add("--weight-decay", type=number(float, low=0))
    add("--schedule", choices=["cosine", "step"], help="see head_lr")
    add("--loss-size", type=number(int, low=1), help="side of the masks in training")
    add("--augment", action=switch, help="crops and flips")
    add("--batch-norm", action=switch, help="before the linear layer")
    add("--cache-gb", type=number(float, low=0), help="memory for features that are computed once")
    add("--seed", type=number(int, low=0), help="of head, order and augmentation")


def get_args(argv=None):
    number, parser = runtime.number, runtime.Parser(description=__doc__)
    what = parser.add_subparsers(metavar="WHAT", required=True)
    for name, run in (("linear", run_linear), ("cluster", run_cluster)):
        command = what.add_parser(name, help=run.__doc__)
        command.set_defaults(run=run)
        add = command.add_argument
        probe.add_probe_flags(add, batch_size=None)
        add("--data", default="composites", help=f"{', '.join(NAMES)}, or a folder: see dense_data.py")
        add("--classes", type=int, choices=[27, 171], default=27, help="of COCO-Stuff")
        add("--layers", nargs="+", type=probe.layer_type, default=["last"], help="last, all, numbers")
        add("--multi", nargs="+", type=multi_type, default=["auto"],
            help="layers to concatenate: auto (four, evenly spaced), none, or numbers")
        add("--img-size", type=number(int, low=1), help="side of the images; else the preset's or net's")
        add("--eval-size", type=number(int, low=0), help="side of the masks that count; 0: their own")
        if name == "linear":
            add("--preset", choices=list(PRESETS), default="laptop", help="a dict of defaults")
            add_head_flags(command.add_argument_group("head, from the preset unless given").add_argument)
        else:
            add("--clusters", type=number(int, low=1), help="k of k-means; else the number of classes")
            add("--seeds", type=number(int, low=1), default=5, help="runs of k-means; the median counts")
            add("--split", choices=["val", "train"], default="val", help="part that is clustered")
            add("--leftover", choices=["wrong", "majority"], default="wrong", help="see match_clusters")
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def main(argv=None):
    args = get_args(argv)
    args.run(args)


if __name__ == "__main__":
    runtime.run_script(main)
