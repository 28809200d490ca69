"""Objects without labels: TokenCut (Wang et al. 2022) and LOST (Simeoni et al. 2021) find one box in an image from the features of its patches; CorLoc scores it.

    found = tokencut(keys, (14, 14))                # keys (196, D) of the last attention: found["box"] = (x0, y0, x1, y1) in patches, half-open
    hit = meets(to_pixels(found["box"], 16, (224, 224)), boxes)

And the principal components of patch features as colours (`pca`). Shapes: B images, N = rows * columns patches row by row, D channels.
"""
import itertools
import textwrap
from collections import namedtuple

import torch
import torch.nn.functional as F
from torchvision.transforms import v2

import data
import runtime
from model import patch_tokens

TIE = 1e-6                                                       # entries of an eigenvector this close, relatively, are equal: of patches with the same neighbours


# ---------------------------------------------------------------------------------------------------------------- TokenCut
def tokencut(features, grid, tau=0.2, eps=1e-5):
    """One object per image by normalised cut. features (N, D), or (B, N, D) for many images; grid (rows, columns).

    The graph joins patches whose cosine exceeds tau by an edge of weight 1, all others by eps: A (N, N). Of (D - A) v = lambda D v, D = diag(row sums of A), the
    eigenvector v of the second smallest lambda is split at its mean; the object is the side of the seed, the patch of the largest |v|, and there the patches
    connected with it (4 neighbours). Returns a dict: mask (rows, columns) bool; box (x0, y0, x1, y1), patches, half-open; eigenvector (N,), float64 on the CPU or
    CUDA, positive at the seed. For many images all have a leading B and box is an int64 tensor (B, 4).
    Where all edges are equal nothing is apart: the mask is the whole image and the eigenvector 0. Raises ValueError for features that are not finite or do
    not fit the grid, and for eps that is not above 0 (a patch without any edge has no cut).
    """
    x = check(features, grid)
    if not eps > 0:
        raise ValueError(f"eps {eps} must be above 0: patches without any edge leave the cut undefined")
    x = F.normalize(x, dim=-1)
    parts = x.split(len(x) if x.is_cuda else 1)                  # the cache of a CPU holds one graph: several at once take longer
    vector = torch.cat([second_eigenvector(part @ part.mT > tau, eps) for part in parts])
    mask, box = cut(vector, grid)
    sign = vector.gather(1, seed_of(vector)[:, None]).sign()
    return one(features, mask=mask, box=box, eigenvector=torch.where(sign < 0, -vector, vector))


def check(features, grid):
    """Features (N, D) or (B, N, D) as (B, N, D), float32 or float64, where float64 exists. Raises ValueError."""
    x = features.detach()
    x = x.cpu() if x.device.type == "mps" else x
    x = x if x.dtype == torch.float64 else x.float()
    if x.dim() not in (2, 3) or x.shape[-2] != grid[0] * grid[1]:
        raise ValueError(f"features of shape {tuple(x.shape)} do not fit a grid of {grid[0]} x {grid[1]} patches: give (N, D) or (B, N, D) with N = {grid[0] * grid[1]}")
    if not x.isfinite().all():
        raise ValueError("the features are not finite: give those of an earlier checkpoint")
    return x if x.dim() == 3 else x[None]


def one(features, **found):
    """The results of a batch as they are, or those of the only image where `features` was (N, D), its box then as ints."""
    if features.dim() == 3:
        return found
    return {key: tuple(value[0].tolist()) if key == "box" else value[0] for key, value in found.items()}


def second_eigenvector(near, eps):
    """near (B, N, N), bool and symmetric -> v (B, N), float64: (D - A) v = lambda D v at the second smallest lambda, A = 1 where near, eps elsewhere.

    With w = D^1/2 v that is D^-1/2 A D^-1/2 w = (1 - lambda) w, whose first eigenvector D^1/2 1 is known. The images that `krylov` does not settle get a full
    eigendecomposition. float64, as lambda is as small as eps where the graph falls apart. Zeros where all edges between patches are equal.
    """
    A, n = near.double(), near.shape[1]
    edges = A.sum(2)
    joined = (edges - A.diagonal(dim1=1, dim2=2)).sum(1)         # edges to other patches
    apart = (joined > 0) & (joined < n * (n - 1))
    root = ((1 - eps) * edges + eps * n).sqrt()
    A.mul_(1 - eps).add_(eps).div_(root[:, :, None]).div_(root[:, None, :])
    first = root / root.norm(dim=1, keepdim=True)
    w, settled = krylov(A, first) if n > 100 else (torch.zeros_like(root), torch.zeros_like(apart))      # of fewer, a full decomposition costs nothing
    rest = (apart & ~settled).nonzero().flatten()
    if len(rest):
        u = first[rest]
        w[rest] = torch.linalg.eigh(A[rest] - 2 * u[:, :, None] * u[:, None, :]).eigenvectors[:, :, -1]      # the known one moves to the other end
    return torch.where(apart[:, None], w / root, 0.0)


def krylov(P, first, block=2, steps=48, every=4, tolerance=1e-7):
    """The leading eigenvector w (B, N) of P (B, N, N), symmetric, that is orthogonal to its eigenvector `first` (B, N); and whether it is one (B,) bool.

    Rayleigh-Ritz in the span of X, X P, X P^2, ... (block Lanczos with all vectors kept orthogonal; a block, so that a repeated eigenvalue does not hide). It is
    one where its residual is below tolerance times the distance of the two largest Ritz values: the angle to the eigenvector is that small.
    """
    B, n = first.shape
    X = torch.randn(block, n, generator=torch.Generator().manual_seed(0), dtype=P.dtype).to(P.device).expand(B, -1, -1)
    Q, PQ = (torch.zeros(B, 1 + block * steps, n, dtype=P.dtype, device=P.device) for _ in range(2))
    Q[:, 0] = first
    for step in range(steps):
        used = 1 + block * step
        for _ in range(2):                                       # twice is enough, also where the space is exhausted and only rounding is left
            X = X - X @ Q[:, :used].mT @ Q[:, :used]
            X = torch.linalg.qr(X.mT).Q.mT
        Q[:, used:used + block] = X
        PQ[:, used:used + block] = X = X @ P
        if step % every == every - 1:
            basis, image = Q[:, 1:used + block], PQ[:, 1:used + block]
            values, vectors = torch.linalg.eigh(basis @ image.mT)
            w, Pw = (torch.einsum("bm,bmn->bn", vectors[:, :, -1], t) for t in (basis, image))
            settled = (Pw - values[:, -1:] * w).norm(dim=1) <= tolerance * (values[:, -1] - values[:, -2])
            if settled.all():
                break
    return w, settled


def seed_of(vector):
    """The index (B,) of the largest |v| of (B, N): the first of those that differ by rounding only, so that it does not depend on the solver."""
    size = vector.abs()
    return (size >= (1 - TIE) * size.amax(1, keepdim=True)).int().argmax(1)


def cut(vector, grid):
    """(mask (B, rows, columns), box (B, 4)) of eigenvectors (B, N): the side of the mean that holds the seed, and there its component. Blind to the sign of v."""
    seed = seed_of(vector)
    side = vector - vector.mean(1, keepdim=True)
    edge = side.gather(1, seed[:, None])
    side = side * edge > TIE * edge.square()                     # at the mean but for rounding is not beyond it
    side |= (vector == 0).all(1, keepdim=True)                   # nothing is apart
    mask = component(side.unflatten(1, grid), seed)
    return mask, box_of(mask)


def component(inside, seed):
    """The 4-connected component of bool (B, rows, columns) that holds the patch `seed` (B,): the seed grows by its neighbours inside until nothing changes."""
    B, rows, columns = inside.shape
    mask = F.one_hot(seed, rows * columns).bool().view(B, rows, columns) & inside
    while True:
        before = mask
        for _ in range(8):                                       # a look whether it changed costs more than a few steps too many
            wide = F.pad(mask, (1, 1, 1, 1))
            mask = (mask | wide[:, :-2, 1:-1] | wide[:, 2:, 1:-1] | wide[:, 1:-1, :-2] | wide[:, 1:-1, 2:]) & inside
        if torch.equal(mask, before):
            return mask


def box_of(mask):
    """The smallest box (B, 4), x0 y0 x1 y1, int64 and half-open, around the True entries of (B, rows, columns); there must be one."""
    across, down = mask.any(1).int(), mask.any(2).int()
    low = [t.argmax(1) for t in (across, down)]
    high = [t.shape[1] - t.flip(1).argmax(1) for t in (across, down)]
    return torch.stack(low + high, 1)


# -------------------------------------------------------------------------------------------------------------------- LOST
def lost(features, grid, k=100):
    """LOST on features that are not normalised, of the shapes of `tokencut`: dict of mask, box and score (N,).

    A = F F^T. The seed is the patch with the fewest positive entries, itself not counted (the first of equals); of the k patches with the fewest, those
    that correlate positively with the seed join it; score is the sum of their rows of A, and the object the component of the seed where score > 0.
    """
    x = check(features, grid)
    A = x @ x.mT
    degree = (A > 0).sum(2) - (A.diagonal(dim1=1, dim2=2) > 0).int()
    few = degree.argsort(dim=1, stable=True)
    seed = few[:, 0]
    similar = torch.zeros_like(degree, dtype=torch.bool).scatter_(1, few[:, :k], True) & (A[torch.arange(len(A)), seed] > 0)
    score = (similar[:, None].double() @ A.double())[:, 0]
    inside = (score > 0).scatter(1, seed[:, None], True)         # a seed of zeros is alone
    mask = component(inside.unflatten(1, grid), seed)
    return one(features, mask=mask, box=box_of(mask), score=score)


# ------------------------------------------------------------------------------------------------------------------- boxes
def to_pixels(box, patch_size, size, scale=(1.0, 1.0)):
    """A box in patches -> float64 (4,), x0 y0 x1 y1 in pixels of the image of `size` (height, width) before it was resized by `scale` (down, across) and padded."""
    down, across = scale
    box = torch.as_tensor(box, dtype=torch.float64) * patch_size / torch.tensor([across, down, across, down], dtype=torch.float64)
    return box.minimum(torch.tensor([size[1], size[0]] * 2, dtype=torch.float64))


def centre_box(height, width, side=0.7):
    """The box of `side` times the image's height and width in its middle: what a method must beat."""
    x, y = width * (1 - side) / 2, height * (1 - side) / 2
    return torch.tensor([x, y, width - x, height - y], dtype=torch.float64)


def iou(box, boxes):
    """Intersection over union of a box (4,) with each of boxes (n, 4): float64 (n,)."""
    box, boxes = (torch.as_tensor(t, dtype=torch.float64) for t in (box, boxes))
    area = lambda b: (b[..., 2:] - b[..., :2]).clamp(min=0).prod(-1)
    both = area(torch.cat([box[:2].maximum(boxes[:, :2]), box[2:].minimum(boxes[:, 2:])], 1))
    return both / (area(box) + area(boxes) - both).clamp(min=1e-12)


def meets(box, boxes):
    """Whether a box has an IoU of at least .5 with any of the true ones (n, 4); CorLoc is the share of images in which it does."""
    return bool((iou(box, boxes) >= 0.5).any())


# --------------------------------------------------------------------------------------------------- principal components
def pca(features, count=3):
    """(mean (D,), components (count, D)) of features (n, D), float64: the orthonormal directions of largest variance, largest first.

    Their signs are such that the third moment of the projections is positive: what is rare lies on the bright side, from checkpoint to checkpoint.
    """
    x = features.detach().cpu().double()
    mean = x.mean(0)
    components = torch.linalg.svd(x - mean, full_matrices=False).Vh[:count]
    skew = ((x - mean) @ components.T).pow(3).sum(0)
    return mean, torch.where(skew < 0, -1.0, 1.0)[:, None] * components


def colours(features, basis):
    """Features (..., D) in a basis of `pca` as colours (..., 3) in 0..1: each component from its 1st to its 99th percentile over all that is given."""
    mean, components = basis
    x = (features.detach().cpu().double() - mean) @ components.T
    low, high = torch.quantile(x.flatten(0, -2), torch.tensor([0.01, 0.99], dtype=torch.float64), dim=0)
    return F.pad(((x - low) / (high - low).clamp(min=1e-12)).clamp(0, 1), (0, 3 - len(components)))


# ------------------------------------------------------------------------------------------------------------------ images
Sample = namedtuple("Sample", "index image boxes x scale")       # of a set: uint8 (3, H, W); true boxes (n, 4) in its pixels; what the net sees; (down, across)


def fit(image, transform, patch_size, img_size=None):
    """uint8 (3, H, W) -> (x float (3, Y, X) that the patches tile, scale (down, across)).

    img_size: side to which the shorter one is resized, the aspect kept; None keeps the pixels. Then `transform`, and zeros, which are the mean colour, below
    and to the right, as TokenCut pads.
    """
    height, width = image.shape[1:]
    if img_size:
        ratio = img_size / min(height, width)
        image = v2.functional.resize(image, [round(height * ratio), round(width * ratio)], **data.BICUBIC)
    x = transform(image)
    rows, columns = x.shape[1:]
    return F.pad(x, (0, -columns % patch_size, 0, -rows % patch_size)), (rows / height, columns / width)


@torch.no_grad()
def token_batches(net, dense, positions, layers, feature, img_size=None, batch_size=32, device="cpu", dtype=torch.float32):
    """Yields ([Sample], grid, [features (B, N, D) of each layer]) of dense.val at `positions`, in their order; neighbours of one size share a batch."""
    patch, transform = net.patch_embed.patch_size, v2.Compose(data.normalise(dense))
    items = ((i, *dense.val[i]) for i in positions)
    samples = (Sample(i, image, boxes, *fit(image, transform, patch, img_size)) for i, image, _, boxes in items)
    for shape, group in itertools.groupby(samples, lambda sample: sample.x.shape):
        while part := list(itertools.islice(group, batch_size)):
            with runtime.autocast(torch.device(device), dtype):
                tokens = patch_tokens(net, torch.stack([sample.x for sample in part]).to(device), layers, feature)
            yield part, (shape[1] // patch, shape[2] // patch), [t.float() for t in tokens]


def discover(net, dense, positions, layers, find, feature="key", **how):
    """Yields (Sample, boxes float64 (layers, 4) in its pixels, [what `find` returned for each layer]); find(features, grid) is `tokencut` or `lost`."""
    for part, grid, tokens in token_batches(net, dense, positions, layers, feature, **how):
        found = [find(t, grid) for t in tokens]
        for i, sample in enumerate(part):
            one = [{key: value[i] for key, value in layer.items()} for layer in found]
            size = sample.image.shape[1:]
            yield sample, torch.stack([to_pixels(f["box"].cpu(), net.patch_embed.patch_size, size, sample.scale) for f in one]), one


def corloc(net, dense, positions, layers, find, world, **how):
    """({"layers": [CorLoc of each], "centre", "whole": of the two baselines, "images", "skipped"}, boxes (n, layers, 4) of this rank's images).

    A share of the images with boxes in which the found one meets any of them; exact, as each rank counts its share of `positions` and the sums are added."""
    hits, skipped, mine = torch.zeros(len(layers) + 2, dtype=torch.float64), 0, []
    for sample, boxes, _ in discover(net, dense, positions[world.rank::world.size], layers, find, device=world.device, **how):
        mine.append(boxes)
        if len(sample.boxes):
            height, width = sample.image.shape[1:]
            guesses = [*boxes, centre_box(height, width), torch.tensor([0, 0, width, height])]
            hits += torch.tensor([meets(box, sample.boxes) for box in guesses])
        else:
            skipped += 1
    *hits, centre, whole, skipped = runtime.all_sum([*hits, skipped], world)
    count = len(positions) - int(skipped)
    share = lambda n: n / count if count else float("nan")
    return (dict(layers=[share(n) for n in hits], centre=share(centre), whole=share(whole), images=count, skipped=int(skipped)),
            torch.stack(mine) if mine else torch.empty(0, len(layers), 4, dtype=torch.float64))


def spread(count, n):
    """`count` of the positions 0 .. n - 1, evenly spread; all where there are fewer."""
    return torch.linspace(0, n - 1, min(count, n)).round().long().tolist()


def wrapped(title, width):
    """A title whose lines, long names of runs, are broken at hyphens and spaces."""
    return "\n".join(part for line in title.splitlines() for part in textwrap.wrap(line, width))


def tidy(axis, title="", size=None):
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=7)
    if size:                                                     # of the image: what was padded stays outside
        axis.set(xlim=(0, size[1]), ylim=(size[0], 0))


def extent_of(sample, grid, patch):
    """Where a map of the patches lies over the image, as matplotlib's imshow wants it."""
    return 0, grid[1] * patch / sample.scale[1], grid[0] * patch / sample.scale[0], 0


def overlay(path, rows):
    """A picture: for each (title, patch size, [item of `discover` for one layer]) the images with true boxes (green) and the found one (red), and under them the eigenvector or score."""
    plt = runtime.pyplot()
    columns = len(rows[0][2])
    chart, axes = plt.subplots(2 * len(rows), columns, figsize=(1.5 * columns + 0.3, 3.2 * len(rows)), squeeze=False, constrained_layout=True)
    for row, (title, patch, items) in enumerate(rows):
        for column, (sample, boxes, found) in enumerate(items):
            above, below = axes[2 * row, column], axes[2 * row + 1, column]
            size, grid = sample.image.shape[1:], found[-1]["mask"].shape
            above.imshow(sample.image.permute(1, 2, 0).numpy(), extent=(0, size[1], size[0], 0))
            for (x0, y0, x1, y1), colour in [(b, "lime") for b in sample.boxes.tolist()] + [(boxes[-1].tolist(), "red")]:
                above.add_patch(plt.Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, color=colour, lw=1.5))
            field = next(found[-1][key] for key in ("eigenvector", "score") if key in found[-1])
            below.imshow(field.cpu().view(grid).numpy(), extent=extent_of(sample, grid, patch), interpolation="nearest")
            tidy(above, f"IoU {iou(boxes[-1], sample.boxes).max():.2f}" if len(sample.boxes) else "no box", size)
            tidy(below, size=size)
        axes[2 * row, 0].set_ylabel(wrapped(title, 22), fontsize=7)
    chart.savefig(path, dpi=120)
    plt.close(chart)


def colour_maps(net, dense, positions, layers, basis, feature="token", **how):
    """[[(colours (rows, columns, 3), extent) of each position] of each layer]. basis: "image", one for each image, or "shared" by all of a layer."""
    samples, grids, tokens = [], [], [[] for _ in layers]
    for part, grid, found in token_batches(net, dense, positions, layers, feature, **how):
        samples, grids = samples + part, grids + [grid] * len(part)
        for layer, t in zip(tokens, found):
            layer += check(t, grid).cpu().unbind(0)
    maps = []
    for layer in tokens:
        if basis == "shared":
            whole = torch.cat(layer)
            parts = colours(whole, pca(whole)).split([len(t) for t in layer])
        else:
            parts = [colours(t, pca(t)) for t in layer]
        maps.append([(part.view(*grid, 3), extent_of(sample, grid, net.patch_embed.patch_size)) for part, grid, sample in zip(parts, grids, samples)])
    return maps


def colour_sheet(path, images, columns):
    """A picture: a row per image uint8 (3, H, W), the image and then a column for each (title, maps of `colour_maps` of one layer)."""
    plt = runtime.pyplot()
    chart, axes = plt.subplots(len(images), 1 + len(columns), figsize=(1.3 * (1 + len(columns)) + 0.2, 1.3 * len(images) + 0.5), squeeze=False, constrained_layout=True)
    for row, image in enumerate(images):
        size = image.shape[1:]
        axes[row, 0].imshow(image.permute(1, 2, 0).numpy(), extent=(0, size[1], size[0], 0))
        tidy(axes[row, 0], size=size)
        for axis, (title, maps) in zip(axes[row, 1:], columns):
            axis.imshow(maps[row][0].numpy(), extent=maps[row][1], interpolation="nearest")
            tidy(axis, wrapped(title, 17) if row == 0 else "", size)
    chart.savefig(path, dpi=120)
    plt.close(chart)
