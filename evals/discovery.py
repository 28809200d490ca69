"""Objects without labels: TokenCut (Wang et al. 2022) or LOST (Simeoni et al. 2021) finds a box.

    python -m evals.discovery --ckpt out/dino-a out/dino-b --layers all                on the composites
    python -m evals.discovery --ckpt out/dino-a --data /path/to/VOC2012 --method lost

CorLoc is the share of images whose found box meets a true one: IoU of .5 or more. `probe.tokencut` is
the method itself. Shapes: B images, N = rows * columns patches row by row, D channels.
"""
import functools
import itertools
import sys
import time
from collections import namedtuple

import torch
import torch.nn.functional as F
from torchvision.transforms import v2
from torchvision.utils import draw_bounding_boxes, save_image

import data
import probe
import runtime
from evals.dense_data import NAMES, load_dense, load_dense_net
from probe import box_around, check_features, connected_patches, tokencut
from runtime import BadInput


# -------------------------------------------------------------------------------------------------------
# LOST

def lost(features, grid, k=100):
    """The object of an image by LOST. features (N, D), not normalised; grid (rows, columns).

    A = F F^T. The seed is the patch with the fewest positive entries, itself not counted (the first of
    equals). Of the k patches with the fewest, those that correlate positively with the seed join it.
    score is the sum of their rows of A, and the object what is connected with the seed where score > 0.
    Returns a dict: mask (rows, columns) bool; box (x0, y0, x1, y1) in patches, half-open; score (N,)."""
    x = check_features(features, grid)
    A = x @ x.T
    degree = (A > 0).sum(1) - (A.diagonal() > 0).int()
    few = degree.argsort(stable=True)
    seed = int(few[0])
    similar = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    similar[few[:k]] = True
    score = (similar & (A[seed] > 0)).double() @ A.double()
    inside = score > 0
    inside[seed] = True                                 # a seed of zeros is alone
    mask = connected_patches(inside.view(grid), seed)
    return dict(mask=mask, box=box_around(mask), score=score)


# -------------------------------------------------------------------------------------------------------
# boxes (x0, y0, x1, y1), float64

def box_in_pixels(box, patch_size, size, scale=(1.0, 1.0)):
    """A box in patches -> (4,) in pixels of the image of `size` (height, width).

    scale (down, across): by what it had been resized before it was padded."""
    down, across = scale
    scale = torch.tensor([across, down, across, down], dtype=torch.float64)
    box = torch.tensor(box, dtype=torch.float64) * patch_size / scale
    return box.minimum(torch.tensor([size[1], size[0]] * 2, dtype=torch.float64))


def centre_box(height, width, side=0.7):
    """The box of `side` times the image's sides in its middle: what a method must beat."""
    x, y = width * (1 - side) / 2, height * (1 - side) / 2
    return torch.tensor([x, y, width - x, height - y], dtype=torch.float64)


def box_iou(box, boxes):
    """Intersection over union of a box (4,) with each of boxes (n, 4): float64 (n,)."""
    def area(b):
        return (b[..., 2:] - b[..., :2]).clamp(min=0).prod(-1)
    box, boxes = (torch.as_tensor(t, dtype=torch.float64) for t in (box, boxes))
    both = area(torch.cat([box[:2].maximum(boxes[:, :2]), box[2:].minimum(boxes[:, 2:])], 1))
    return both / (area(box) + area(boxes) - both).clamp(min=1e-12)


def meets_any(box, boxes):
    """Has a box an IoU of .5 or more with any of the true ones (n, 4)?"""
    return bool((box_iou(box, boxes) >= 0.5).any())


# -------------------------------------------------------------------------------------------------------
# images

# Of a set: uint8 (3, H, W); true boxes (n, 4) in its pixels; what the net sees; (down, across)
Sample = namedtuple("Sample", "image boxes x scale")


def fit_patches(image, transform, patch_size, img_size=None):
    """uint8 (3, H, W) -> (x float (3, Y, X) that the patches tile, scale (down, across)).

    img_size: what the shorter side becomes; None keeps the pixels. Then `transform`, then zeros, the
    mean colour, below and to the right, as TokenCut pads."""
    height, width = image.shape[1:]
    if img_size:
        ratio = img_size / min(height, width)
        size = [round(height * ratio), round(width * ratio)]
        image = v2.functional.resize(image, size, **data.BICUBIC)
    x = transform(image)
    rows, columns = x.shape[1:]
    x = F.pad(x, (0, -columns % patch_size, 0, -rows % patch_size))
    return x, (rows / height, columns / width)


def discover(net, dense, positions, layers, find, feature="key", img_size=None, batch_size=32,
             device="cpu", dtype=torch.float32):
    """Yields (Sample, boxes float64 (layers, 4) in its pixels, [what `find` returned for each layer]).

    Of dense.val at `positions`, in their order; find(features, grid) is `tokencut` or `lost`. Neighbours
    of one size share a forward pass."""
    patch, transform = net.patch_embed.patch_size, v2.Compose(data.normalise(dense))
    items = (dense.val[i] for i in positions)
    samples = (Sample(image, boxes, *fit_patches(image, transform, patch, img_size))
               for image, _, boxes in items)
    for shape, group in itertools.groupby(samples, lambda sample: sample.x.shape):
        while part := list(itertools.islice(group, batch_size)):
            x = torch.stack([sample.x for sample in part])
            tokens = probe.dense_tokens(net, x, layers, torch.device(device), dtype, feature)
            for i, sample in enumerate(part):
                found = [find(layer[i], (shape[1] // patch, shape[2] // patch)) for layer in tokens]
                size = sample.image.shape[1:]
                boxes = [box_in_pixels(f["box"], patch, size, sample.scale) for f in found]
                yield sample, torch.stack(boxes), found


def corloc(net, dense, positions, layers, find, world, **how):
    """({"layers": [CorLoc of each], "centre", "whole": of two baselines, "images", "skipped"}, boxes).

    The share of the images with boxes in which the found one meets any of them; the others are skipped.
    Ranks count their shares of `positions`; boxes (n, layers, 4) are those of this rank's images."""
    hits, skipped, mine = torch.zeros(len(layers) + 2, dtype=torch.float64), 0, []
    share = positions[world.rank::world.size]
    for sample, boxes, _ in discover(net, dense, share, layers, find, device=world.device, **how):
        mine.append(boxes)
        if not len(sample.boxes):
            skipped += 1
            continue
        height, width = sample.image.shape[1:]
        guesses = [*boxes, centre_box(height, width), torch.tensor([0, 0, width, height])]
        hits += torch.tensor([meets_any(box, sample.boxes) for box in guesses])
    *hits, skipped = runtime.all_sum([*hits, skipped], world)
    count = len(positions) - int(skipped)
    *hits, centre, whole = [n / max(1, count) for n in hits]
    score = dict(layers=hits, centre=centre, whole=whole, images=count, skipped=int(skipped))
    return score, torch.stack(mine)


def draw_discovered(path, items, side=160):
    """A picture of items of `discover` for one layer, eight a row: the image with true boxes (green) and
    the found one (red), then, as bright as it is there, the eigenvector or score."""
    pictures = [[], []]
    for sample, boxes, found in items:
        image = v2.functional.resize(sample.image, [side, side])
        height, width = sample.image.shape[1:]
        scale = torch.tensor([width, height] * 2) / side
        both = torch.cat([sample.boxes, boxes[-1:].float()]) / scale
        colours = ["lime"] * len(sample.boxes) + ["red"]
        pictures[0].append(draw_bounding_boxes(image, both, colors=colours, width=2) / 255)
        field = found[-1]["eigenvector" if "eigenvector" in found[-1] else "score"].float().cpu()
        field = field.view(found[-1]["mask"].shape)
        field = (field - field.min()) / (field.max() - field.min()).clamp(min=1e-12)
        pictures[1].append(F.interpolate(field[None, None], (side, side))[0].expand(3, -1, -1))
    rows = [picture for i in range(0, len(items), 8) for half in pictures for picture in half[i:i + 8]]
    save_image(torch.stack(rows), path, nrow=min(8, len(items)), pad_value=1.0)


# -------------------------------------------------------------------------------------------------------
# command line

def evenly_spread(count, n):
    """`count` of the positions 0 .. n - 1, evenly spread; all where there are fewer."""
    return torch.linspace(0, n - 1, min(count, n)).round().long().tolist()


def get_args(argv=None):
    number, parser = runtime.number, runtime.Parser(description=__doc__)
    add = parser.add_argument
    probe.add_probe_flags(add, batch_size=32)
    add("--data", default="composites", help=f"{', '.join(NAMES)}, or a folder: see evals/dense_data.py")
    add("--layers", nargs="+", type=probe.layer_type, default=["last"], help="last, all, numbers")
    add("--feature", choices=["key", "query", "value", "token"], default="key",
        help="of the attention of that block, or the tokens after it")
    add("--method", choices=["tokencut", "lost"], default="tokencut", help="see probe.tokencut and lost")
    add("--tau", type=number(float, low=-1, high=1), default=0.2, help="tokencut: cosine of an edge")
    add("--eps", type=number(float, above=0, below=1), default=1e-5, help="tokencut: weight of others")
    add("--k", type=number(int, low=1), default=100, help="lost: patches that may join the seed")
    add("--ids", help="COCO20k: file that lists its images, if it is not in the folder")
    add("--img-size", type=number(int, low=1), help="shorter side of the images; else as they are")
    add("--limit", type=number(int, low=1), help="only this many images, evenly spread")
    add("--boxes", action="store_true", help="also write every box, in pixels of the image as it is")
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def main(argv=None):
    args = get_args(argv)
    find, setting = functools.partial(lost, k=args.k), f"k {args.k}"
    if args.method == "tokencut":
        find = functools.partial(tokencut, tau=args.tau, eps=args.eps)
        setting = f"tau {args.tau:g}, eps {args.eps:g}"
    world, dtype = probe.start_probe(args)
    dense, nets = load_dense(args.data, "discovery", ids=args.ids), []
    positions = evenly_spread(args.limit or len(dense.val), len(dense.val))
    if world.size > len(positions):
        raise BadInput(f"{world.size} processes are more than there are images: start fewer")
    for path in args.ckpt:
        net, saved, own = load_dense_net(path, args, dense)
        layers, patch = probe.layer_numbers(args.layers, len(net.blocks)), net.patch_embed.patch_size
        probe.check_net(path, net, torch.zeros(1, 3, 2 * patch, 2 * patch), layers, args.feature)
        nets.append((path, net, saved, own, layers))
    out, records, shown = probe.results_folder(args), [], []
    how = dict(feature=args.feature, img_size=args.img_size, batch_size=args.batch_size, dtype=dtype)
    for path, net, saved, own, layers in nets:
        start = time.perf_counter()
        try:
            score, boxes = corloc(net, own, positions, layers, find, world, **how)
        except ValueError as error:                     # features that are not finite
            raise BadInput(f"--ckpt {path}: {error}") from error
        if not score["images"]:
            raise BadInput(f"--data {args.data}: none of the {len(positions)} images has a box")
        boxes = probe.gather_samples(boxes, world)
        rows = [dict(layer=l, corloc=v) for l, v in zip(layers, score.pop("layers"))]
        best = max(rows, key=lambda row: row["corloc"])["layer"]
        records.append(dict(probe.run_facts(path, saved), depth=len(net.blocks), best=best, rows=rows,
                            seconds=time.perf_counter() - start, **score))
        if args.boxes:
            records[-1]["boxes"] = {str(l): boxes[:, i].tolist() for i, l in enumerate(layers)}
        if world.main:
            few = [positions[i] for i in evenly_spread(8, len(positions))]
            shown += discover(net, own, few, [best], find, device=world.device, **how)
            print(f"\n{path}: {score['images']} images, {score['skipped']} without boxes skipped")
            for row in rows:
                print(f"layer {row['layer']:2d}  CorLoc {100 * row['corloc']:5.1f} %")
            print(f"centre box of .7 {100 * score['centre']:.1f} %, whole {100 * score['whole']:.1f} %")
        net.cpu()
    if not world.main:
        return
    probe.write_results(out / "tokencut.json", "-m evals.discovery", args, world, dtype, data=args.data,
                        method=args.method, setting=setting, feature=args.feature,
                        img_size=args.img_size, checkpoints=records)
    draw_discovered(out / "tokencut.png", shown)
    print(f"\n{out}: tokencut.json, tokencut.png; {args.method}, {setting}")
    for record in records:
        top = max(row["corloc"] for row in record["rows"])
        name = f"{record['name']}: " * (len(records) > 1)
        print(f"{name}CorLoc {100 * top:.1f} % (best layer {record['best']}, {args.feature})")


if __name__ == "__main__":
    runtime.run_script(main)
