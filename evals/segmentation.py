"""Semantic segmentation from frozen patch tokens: a linear head, clusters without labels, and mIoU from one confusion matrix. `probe.py seg` and `cluster` run it.

    logits(y, x) = bilinear(W token + b)        a 1 x 1 convolution on the patch grid, brought to the size of the mask
    IoU_c = TP_c / (TP_c + FP_c + FN_c)         pixels of the whole validation set; mIoU is the mean over classes

A data set is a `masks.DenseData`; a group is a tuple of layers whose tokens are concatenated: (12,) is the last of 12, (3, 6, 9, 12) multi-scale.
Heads of several groups learn side by side on the same batches, each exactly as it would alone.
"""
import functools
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

import data
import runtime
from masks import IGNORE
from model import patch_tokens
from runtime import BadInput, mix_seed

# img_size: side of the images, pixels; None is the one that the net was trained at. loss_size: side of the masks in training. eval_size: side at which
# pixels are counted; 0 is each mask's own size. augment: random crop of .8 to 1 of the area, and flip, of image and mask together.
PRESETS = {
    "laptop": dict(img_size=None, loss_size=32, eval_size=0, augment=False, opt="adamw", lr=1e-2, weight_decay=0.0, schedule="cosine", batch_size=32, steps=400, epochs=None, batch_norm=True),
    # Leopart's linear probe: features to 100 x 100, masks too; lr x .1 at epoch 20 of 25. DINOv2's head has a BatchNorm in front.
    "paper": dict(img_size=448, loss_size=100, eval_size=100, augment=True, opt="sgd", lr=0.01, weight_decay=1e-4, schedule="step", batch_size=60, steps=None, epochs=25.0, batch_norm=False),
}
SCHEDULES = {"cosine": lambda step, steps, lr: runtime.lr_at(step, steps, 0, lr), "step": lambda step, steps, lr: lr * (0.1 if step >= 0.8 * steps else 1.0)}


# ---------------------------------------------------------------------------------------------------------------- measures
def confusion(pred, target, classes, ignore=IGNORE, columns=None):
    """int64 (classes, columns): entry (t, p) counts the pixels of class t that were called p. Pixels whose target is `ignore` are left out.

    columns: how many labels a prediction may have; None is `classes`. Raises ValueError for a label that is out of range."""
    columns = columns or classes
    seen = target != ignore
    target, pred = target[seen].long(), pred[seen].long()
    for name, values, count in (("target", target, classes), ("prediction", pred, columns)):
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < count:
            raise ValueError(f"the {name} has labels {int(values.min())} .. {int(values.max())}, outside 0 .. {count - 1}")
    return (target * columns + pred).bincount(minlength=classes * columns).view(classes, columns)


def iou(confusion):
    """Intersection over union per class, float64 (C,), of a confusion matrix (C, C or more); nan where a class is neither there nor predicted.

    Columns past C stand for labels that are no class: never right."""
    matrix = confusion.double()
    right = matrix.diagonal()
    return right / (matrix.sum(1) + matrix.sum(0)[:len(matrix)] - right)


def mean_iou(confusion):
    """mIoU, a fraction: the mean of `iou` over the classes that are there or predicted; nan where there are none."""
    return float(iou(confusion).nanmean())


def pixel_accuracy(confusion):
    """The share of pixels called right, a fraction."""
    return float(confusion.diagonal().sum() / confusion.sum())


def constant(confusion, label=0):
    """The confusion matrix (C, C) of a prediction that calls every pixel `label`, from any matrix with the same truth."""
    result = torch.zeros(len(confusion), len(confusion), dtype=torch.int64)
    result[:, label] = confusion.sum(1)
    return result


# -------------------------------------------------------------------------------------------------------------------- data
class Pairs(Dataset):
    """Images and masks of a `masks.Dense` set, a batch at a time. Position p is sample p % len in epoch p // len, which is all that its augmentation depends on.

    Batch: (float32 (B, 3, img_size, img_size), mean 0 and std 1; int64 (B, mask_size, mask_size), with mask_size 0 a list of masks of their own sizes).
    """

    def __init__(self, part, dense, img_size, mask_size=0, augment=False, seed=0):
        self.part, self.classes, self.img_size, self.mask_size, self.augment, self.seed = part, len(dense.classes), img_size, mask_size, augment, seed
        self.normalise = v2.Compose(data.normalise(dense))
        self.jitter = v2.Compose([v2.RandomResizedCrop(img_size, (0.8, 1.0), **data.BICUBIC), v2.RandomHorizontalFlip()])

    def __len__(self):
        return len(self.part)

    def __getitems__(self, positions):
        with torch.random.fork_rng(devices=[]):                  # without workers this is the caller's process: leave its stream alone
            images, masks = zip(*[self.sample(*divmod(p, len(self))) for p in positions])
        return self.normalise(torch.stack(images)), torch.stack(masks) if self.mask_size else list(masks)

    def sample(self, epoch, i):
        image, mask, _ = self.part[i]
        if mask is None:
            raise BadInput(f"--data: image {i} has no mask: give a set with a mask for every image")
        labels = mask[mask != IGNORE]
        if len(labels) and int(labels.max()) >= self.classes:
            raise BadInput(f"--data: the mask of image {i} has label {int(labels.max())}, but there are {self.classes} classes: labels must be 0 .. {self.classes - 1}, or {IGNORE} to ignore")
        if self.augment:
            torch.default_generator.manual_seed(mix_seed("augment", self.seed, epoch, i))
            image, mask = (t.as_subclass(torch.Tensor) for t in self.jitter(tv_tensors.Image(image), tv_tensors.Mask(mask)))
        elif image.shape[-2:] != (self.img_size, self.img_size):
            image = v2.functional.resize(image, [self.img_size, self.img_size], **data.BICUBIC)
        if self.mask_size and mask.shape != (self.mask_size, self.mask_size):
            mask = F.interpolate(mask[None, None].float(), size=(self.mask_size, self.mask_size), mode="nearest-exact")[0, 0].long()
        return image, mask


def token_batches(net, pairs, positions, layers, device, dtype=torch.float32, workers=0):
    """Yields ([tokens (B, N, D) of each of `layers`, float32], masks) of the batches of positions."""
    for x, masks in data.load(pairs, positions, workers):
        with torch.no_grad(), runtime.autocast(device, dtype):
            tokens = patch_tokens(net, x.to(device, non_blocking=True), layers)
        yield [t.float() for t in tokens], masks


def share(n, batch_size, world):
    """The positions of this rank's samples, rank, rank + size, ..., in batches: over all ranks each sample once."""
    mine = list(range(world.rank, n, world.size))
    return [mine[i:i + batch_size] for i in range(0, len(mine), batch_size)]


def train_batches(net, dense, layers, how, world, dtype=torch.float32, workers=0):
    """(batches of `token_batches` for all steps, whether from memory). A batch is the same for any number of ranks, which share its images.

    Where nothing is random and the tokens fit in how["cache_gb"] per process, they are computed once: each rank keeps those of its own images, and takes
    from a batch the images that are its own. Else the net runs on every batch."""
    n = len(dense.train)
    pairs = Pairs(dense.train, dense, how["img_size"], how["loss_size"], how["augment"], how["seed"])
    positions = data.train_positions(n, how["batch_size"], how["seed"], 0, how["steps"], 0, 1, 1)
    floats = -(-n // world.size) * len(layers) * net.patch_embed.proj.out_channels * (how["img_size"] // net.patch_embed.patch_size) ** 2
    if how["augment"] or 4 * floats > how["cache_gb"] * 1e9:
        return token_batches(net, pairs, (batch[world.rank::world.size] for batch in positions), layers, world.device, dtype, workers), False
    tokens, masks = zip(*token_batches(net, pairs, share(n, how["batch_size"], world), layers, world.device, dtype, workers))
    masks, tokens = torch.cat(masks), [torch.cat([t.cpu() for t in layer]) for layer in zip(*tokens)]

    def from_memory():
        for batch in positions:
            index = torch.tensor([p % n // world.size for p in batch if p % n % world.size == world.rank], dtype=torch.int64)
            yield [layer[index].to(world.device) for layer in tokens], masks[index]
    return from_memory(), True


# -------------------------------------------------------------------------------------------------------------------- head
class Head(nn.Module):
    """Linear(tokens), tokens (B, N, D) -> (B, N, classes); batch_norm: behind a BatchNorm, as in DINOv2's head, over the tokens of the batch of all ranks.

    What comes before is frozen, so the batch's mean and variance need no gradient, and normalising is a few lines that are exact over ranks."""

    def __init__(self, dim, classes, batch_norm=False, seed=0, momentum=0.1, eps=1e-5):
        super().__init__()
        self.batch_norm, self.momentum, self.eps = batch_norm, momentum, eps
        self.linear = nn.Linear(dim, classes)
        with torch.no_grad():
            self.linear.weight.normal_(0, 0.01, generator=torch.Generator().manual_seed(mix_seed(seed, "head")))
            self.linear.bias.zero_()
        if batch_norm:
            self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
            self.register_buffer("mean", torch.zeros(dim))
            self.register_buffer("var", torch.ones(dim))

    def forward(self, tokens, world=None):
        if not self.batch_norm:
            return self.linear(tokens)
        mean, var = self.statistics(tokens.flatten(0, 1), world) if self.training else (self.mean, self.var)
        scale = (var + self.eps).rsqrt() * self.weight           # W (s (x - mean) + b) = (W s) x + W (b - s mean): no pass over the tokens
        return F.linear(tokens, self.linear.weight * scale, self.linear.bias + self.linear.weight @ (self.bias - scale * mean))

    @torch.no_grad()
    def statistics(self, x, world):
        """Mean and biased variance of the rows of x (n, D) of all ranks; the running ones follow."""
        double = torch.float32 if x.device.type == "mps" else torch.float64
        mean = x.sum(0) / max(1, len(x))
        squares, mean = (x - mean).square().sum(0).to(double), mean.to(double)
        sums = torch.cat([x.new_tensor([len(x)], dtype=double), len(x) * mean, squares + len(x) * mean.square()])
        if world and world.size > 1:
            dist.all_reduce(sums)
        n, (mean, square) = sums[0], (sums[1:] / sums[0]).chunk(2)
        var = (square - mean.square()).clamp(min=0)
        self.mean.lerp_(mean.float(), self.momentum)
        self.var.lerp_((var * (n / (n - 1).clamp(min=1))).float(), self.momentum)
        return mean.float(), var.float()


@functools.lru_cache(maxsize=256)
def stretch(old, new, device):
    """The matrix (new, old) of bilinear interpolation along one axis, edges aligned, not centres of corner pixels (align_corners=False)."""
    return F.interpolate(torch.eye(old, device=device).view(1, old, old, 1), size=(new, 1), mode="bilinear", align_corners=False).view(old, new).T.contiguous()


def upsample(logits, grid, size):
    """Logits of patches (B, rows * columns, C) -> of pixels (B, C, *size), bilinear: the two products that F.interpolate amounts to, at half its time on a CPU."""
    rows, columns = (stretch(old, new, logits.device) for old, new in zip(grid, size))
    return rows @ logits.mT.unflatten(2, grid) @ columns.T


def square(tokens):
    """The patch grid (rows, columns) of the tokens (B, N, D) of square images."""
    return (math.isqrt(tokens.shape[1]),) * 2


def train_heads(groups, layers, batches, classes, how, world):
    """One `Head` per group, trained on batches of ([tokens of each of `layers`], masks), and the loss of each at its last step: (heads in eval mode, losses).

    A step minimises cross-entropy, the mean over all pixels of the batch, on all ranks, that are not to be ignored; N processes give the head of one.
    Raises BadInput where a loss is not finite."""
    heads = None
    for step, (tokens, masks) in enumerate(batches):
        inputs = [torch.cat([tokens[layers.index(l)] for l in group], dim=-1) for group in groups]
        if heads is None:
            heads = [Head(x.shape[-1], classes, how["batch_norm"], how["seed"]).to(world.device) for x in inputs]
            parameters = [p for head in heads for p in head.parameters()]
            options = dict(lr=how["lr"], weight_decay=how["weight_decay"])
            optimizer = torch.optim.SGD(parameters, momentum=0.9, **options) if how["opt"] == "sgd" else torch.optim.AdamW(parameters, **options)
        for settings in optimizer.param_groups:
            settings["lr"] = SCHEDULES[how["schedule"]](step, how["steps"], how["lr"])
        masks = masks.to(world.device)
        logits = [upsample(head(x, world), square(x), masks.shape[1:]) for head, x in zip(heads, inputs)]
        losses = torch.stack([F.cross_entropy(z, masks, ignore_index=IGNORE, reduction="sum") for z in logits])
        grads = torch.autograd.grad(losses.sum(), parameters)
        total = torch.cat([losses.detach(), (masks != IGNORE).sum()[None].float(), *[g.flatten() for g in grads]])
        if world.size > 1:                                       # sums of losses, of pixels and of gradients
            dist.all_reduce(total)
        losses, pixels, total = total[:len(groups)], total[len(groups)].clamp(min=1), total[len(groups) + 1:]
        for p, g in zip(parameters, total.div(pixels).split([p.numel() for p in parameters])):
            p.grad = g.view_as(p)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == how["steps"]:
            bad = [group for group, loss in zip(groups, (losses / pixels).tolist()) if not math.isfinite(loss)]
            if bad:
                raise BadInput(f"the loss of the head on layer {' '.join(map(str, bad[0]))} is not finite at step {step}: lower --lr, or give an earlier checkpoint if the run diverged")
    return [head.eval() for head in heads], (losses / pixels).tolist()


@torch.no_grad()
def predict(heads, groups, layers, tokens, masks):
    """For each head the classes of the pixels: int64 (B, Y, X) of masks (B, Y, X), or a list of (Y, X) for a list of masks of different sizes."""
    result = []
    for head, group in zip(heads, groups):
        x = torch.cat([tokens[layers.index(l)] for l in group], dim=-1)
        logits = head(x)
        sizes = None if torch.is_tensor(masks) else [tuple(mask.shape) for mask in masks]
        if sizes is None or len(set(sizes)) == 1:
            result.append(upsample(logits, square(x), masks[0].shape).argmax(1))
        else:
            result.append([upsample(z[None], square(x), size)[0].argmax(0) for z, size in zip(logits, sizes)])
    return result


def evaluate(net, heads, groups, layers, dense, how, world, dtype=torch.float32, workers=0):
    """The confusion matrices (C, C) of the heads over the whole validation set: every image once, summed over ranks as integers."""
    pairs, classes = Pairs(dense.val, dense, how["img_size"], how["eval_size"]), len(dense.classes)
    totals = torch.zeros(len(heads), classes, classes, dtype=torch.int64, device=world.device)
    for tokens, masks in token_batches(net, pairs, share(len(pairs), how["batch_size"], world), layers, world.device, dtype, workers):
        masks = [mask.to(world.device) for mask in masks]
        for total, pred in zip(totals, predict(heads, groups, layers, tokens, masks)):
            total += sum(confusion(p, mask, classes) for p, mask in zip(pred, masks))
    if world.size > 1:
        dist.all_reduce(totals)
    if not totals[0].any():
        raise BadInput(f"--data: no pixel of the validation masks of {dense.name} has a label, all are {IGNORE}: give masks of labels")
    return list(totals.cpu())


def probe(net, dense, groups, how, world, dtype=torch.float32, workers=0):
    """The linear probe as a whole: ([dict(layers, miou, pixel_accuracy, iou, loss, confusion) of each group], heads, from memory or not).

    net: frozen, on world.device. groups: tuples of layers. how: a preset with every setting filled in."""
    layers = sorted({l for group in groups for l in group})
    batches, cached = train_batches(net, dense, layers, how, world, dtype, workers)
    heads, losses = train_heads(groups, layers, batches, len(dense.classes), how, world)
    matrices = evaluate(net, heads, groups, layers, dense, how, world, dtype, workers)
    rows = [dict(layers=list(group), miou=mean_iou(m), pixel_accuracy=pixel_accuracy(m), iou=iou(m).tolist(), loss=loss, confusion=m.tolist())
            for group, loss, m in zip(groups, losses, matrices)]
    return rows, heads, cached


def multi_scale(depth, count=4):
    """`count` evenly spaced layers of 1 .. depth, the last included: (3, 6, 9, 12) of 12."""
    return tuple(dict.fromkeys(math.ceil(depth * i / count) for i in range(1, count + 1)))


# ---------------------------------------------------------------------------------------------------------------- clusters
def kmeans(x, k, seed=0):
    """The cluster 0 .. k - 1 of each row of x (n, D), by scikit-learn: int64 (n,). Above 2^18 rows k-means sees them in batches of 4096."""
    cluster = runtime.import_optional("sklearn.cluster", "probe.py cluster")
    options = dict(n_clusters=k, n_init=3, random_state=seed)
    method = cluster.KMeans(**options) if len(x) <= 2 ** 18 else cluster.MiniBatchKMeans(batch_size=4096, **options)
    return torch.from_numpy(method.fit_predict(x.numpy())).long()


def match(confusion, leftover="wrong"):
    """Clusters become classes: a matrix (C, K) of pixels of class c in cluster k -> (class of each cluster (K,), confusion matrix (C, C + 1)); class C is none.

    One cluster a class, by the Hungarian algorithm, so that most pixels are right. Clusters that are left over, where K > C, count as
    wrong, or with leftover "majority" go to the class that most of their pixels have."""
    solve = runtime.import_optional("scipy.optimize", "probe.py cluster").linear_sum_assignment
    classes, clusters = confusion.shape
    to = confusion.argmax(0) if leftover == "majority" else torch.full((clusters,), classes)
    rows, columns = (torch.from_numpy(i) for i in solve(confusion.numpy(), maximize=True))
    to[columns] = rows
    return to, torch.zeros(classes, classes + 1, dtype=torch.int64).index_add_(1, to, confusion)


def cluster(net, dense, part, groups, how, device, dtype=torch.float32, workers=0):
    """Segmentation without labels: k-means of the L2-normalised tokens of all images of `part`, matched to the classes; a patch's cluster is that of its pixels.

    how: img_size, eval_size, batch_size, clusters, seeds, leftover. Returns (a row for each group, that of the seed with the median mIoU: dict(layers, miou,
    pixel_accuracy, iou, trials (the mIoU of every seed, ascending), confusion (C, K) before the matching); the classes of the patches (n, rows, columns) of each).
    Raises BadInput for features that are not finite."""
    pairs, classes, everyone = Pairs(part, dense, how["img_size"], how["eval_size"]), len(dense.classes), runtime.World(0, 1, device, "")
    layers = sorted({l for group in groups for l in group})
    tokens, masks = zip(*token_batches(net, pairs, share(len(pairs), how["batch_size"], everyone), layers, device, dtype, workers))
    tokens, masks = [torch.cat([t.cpu() for t in layer]) for layer in zip(*tokens)], [mask for batch in masks for mask in batch]
    rows, maps = [], []
    for group in groups:
        x = F.normalize(torch.cat([tokens[layers.index(l)] for l in group], dim=-1), dim=-1)
        if not x.isfinite().all():
            raise BadInput(f"the features of layer {' '.join(map(str, group))} are not finite, as the run diverged: give an earlier checkpoint")
        trials = []
        for seed in how["seeds"]:
            found = kmeans(x.flatten(0, 1), how["clusters"], seed).view(len(x), *square(x))
            matrix = sum(confusion(F.interpolate(patches[None, None].float(), size=mask.shape, mode="nearest-exact")[0, 0].long(), mask, classes, columns=how["clusters"])
                         for patches, mask in zip(found, masks))
            to, matched = match(matrix, how["leftover"])
            trials.append((mean_iou(matched), matched, to[found], matrix))
        trials.sort(key=lambda trial: trial[0])
        miou, matched, patches, matrix = trials[(len(trials) - 1) // 2]          # of an even number the lower one
        rows.append(dict(layers=list(group), miou=miou, pixel_accuracy=pixel_accuracy(matched), iou=iou(matched).tolist(), trials=[trial[0] for trial in trials], confusion=matrix.tolist()))
        maps.append(patches)
    return rows, maps


# ---------------------------------------------------------------------------------------------------------------- pictures
def sheet(path, rows, classes):
    """A picture of rows (title, [images uint8 (3, Y, X), or masks (Y, X) of labels]): a colour per class, the first black; white is ignored."""
    plt = runtime.pyplot()
    colours = torch.ones(256, 3)                                 # what is ignored or no class stays white
    colours[:len(classes)] = torch.tensor([(0, 0, 0) if i == 0 else plt.get_cmap("tab10")(i - 1)[:3] if len(classes) <= 11 else plt.get_cmap("gist_rainbow")(i * 0.618 % 1)[:3]
                                           for i in range(len(classes))])
    chart, axes = plt.subplots(len(rows), len(rows[0][1]), figsize=(1.6 * len(rows[0][1]) + 1, 1.6 * len(rows) + 0.8), squeeze=False, constrained_layout=True)
    for line, (title, pictures) in zip(axes, rows):
        for axis, picture in zip(line, pictures):
            axis.imshow((picture.permute(1, 2, 0) if picture.dim() == 3 else colours[picture]).numpy(), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(title, fontsize=7)
    shown = sorted({int(c) for _, pictures in rows for p in pictures if p.dim() == 2 for c in p.unique() if c < len(classes)})
    marks = [plt.Line2D([], [], marker="s", ls="", color=colours[c].tolist(), label=classes[c]) for c in shown[:24]]
    chart.legend(handles=marks, loc="outside lower center", ncols=8, fontsize=7, frameon=False)
    chart.savefig(path, dpi=120)
    plt.close(chart)


def curves(path, records):
    """mIoU by layer, a colour per checkpoint, single layers as a line and multi-scale dashed across. records: dicts with name and rows."""
    plt = runtime.pyplot()
    chart, axis = plt.subplots(figsize=(5.6, 3.8), constrained_layout=True)
    for i, record in enumerate(records):
        single, multi = ([row for row in record["rows"] if (len(row["layers"]) > 1) == many] for many in (False, True))
        axis.plot([row["layers"][0] for row in single], [100 * row["miou"] for row in single], "o-", ms=3, color=f"C{i % 10}", label=record["name"])
        for row in multi:
            axis.axhline(100 * row["miou"], ls="--", lw=1, color=f"C{i % 10}", label=f"{record['name']}, layers {' '.join(map(str, row['layers']))}")
    axis.set(xlabel="layer (0: embedding)", ylabel="mIoU, %")
    axis.grid(alpha=.3)
    axis.legend(frameon=False, fontsize=7)
    chart.savefig(path, dpi=120)
    plt.close(chart)
