"""Images: the sets that ship in data/, CIFAR through torchvision, folders of files, folders of latents.

    data = load_images("mnist5k")
    transform = train_transform(data, 28, "light")
    for x, y in train_batches(data.train, transform, batch_size=100, seed=0, first_step=0, last_step=40):
        ...                                # x float (100, 1, 28, 28), mean 0 and std 1; y int64 (100,)

Two rules make every run repeatable, for any number of processes, micro-batches, workers and resumes:
a step's batch is a function of (seed, step); a sample's augmentation is one of (seed, epoch, sample).
"""
import functools
import hashlib
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert
from torchvision import datasets
from torchvision.transforms import v2

from runtime import BadInput, mix_seed, my_part

ROOT = Path(__file__).resolve().parent / "data"         # scripts may be started from any folder
NAMES = ("mnist5k", "digits8x8", "emoji", "emoji-subgroups", "scenes", "scenes-subgroups", "composites",
         "composites-subgroups", "cifar10", "cifar100")
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]            # mean and std of its pixels
LAYOUT = "lay images out as train/<class>/*.jpg and val/<class>/*.jpg"


# -------------------------------------------------------------------------------------------------------
# image sets

class Images(Dataset):
    """images: uint8 (N, C, H, W) or N file paths; labels: int64 (N,). Item: (uint8 (C, H, W), int)."""
    KEEP = 2 ** 30         # bytes: smaller sets of files are decoded once per process

    def __init__(self, images, labels):
        self.images, self.labels, self.kept = images, labels, {}
        self.in_memory = isinstance(images, torch.Tensor)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i] if self.in_memory else self.kept.get(i)
        if image is None:
            image = read_rgb(self.images[i])
            if image.nbytes * len(self) <= self.KEEP:
                self.kept[i] = image
        return image, int(self.labels[i])

    def take(self, index):
        """The images at `index` (int64), as a set of their own."""
        images = self.images[index] if self.in_memory else [self.images[i] for i in index.tolist()]
        return Images(images, self.labels[index])


@dataclass
class ImageData:
    name: str
    train: Dataset
    val: Dataset
    classes: list          # class names; their index is the label
    in_chans: int
    size: int | None       # side of the square images; None for files, whose images differ
    flip: bool             # does a mirrored image still belong to its class? Not so for digits
    mean: list             # per channel, of pixels in 0..1
    std: list
    skipped: int = 0       # files left out because they cannot be read


def facts(images):
    """What a checkpoint remembers of its data: a folder may move, but not change."""
    return dict(train_images=len(images.train), classes=len(images.classes), in_chans=images.in_chans)


def describe_images(images):
    """The sizes of an image set, for the banner."""
    skipped = f", {images.skipped} unreadable ones left out" if images.skipped else ""
    return (f"{len(images.train)} training and {len(images.val)} validation images, "
            f"{len(images.classes)} classes{skipped}")


def load_images(name_or_path, holdout=0.0, seed=0, bad_images="stop"):
    """The image set of that name (one of NAMES), or the folder at that path. Returns ImageData.

    A folder holds image files (LAYOUT) or latents (`load_latents`). bad_images: see `readable_files`.
    holdout in (0, 1): validate on that fraction of the *training* images, drawn per class by `seed`, and
    train on the rest; so a learning rate can be tuned without a look at the test set.
    Raises BadInput for an unknown name, an incomplete folder, a failed download, an empty holdout.
    """
    name = str(name_or_path)
    kind, label, skipped = name.removesuffix("-subgroups"), "group", 0
    if name in NAMES and kind in EMBEDDED:
        train, val, classes = EMBEDDED[kind]("group" if kind == name else "subgroup")
    elif name in NAMES:
        train, val, classes = cifar(name)
    elif folder := as_folder(name):
        if (folder / "latents.npy").exists():
            return load_latents(folder, holdout, seed)
        train, val, classes, skipped = image_folder(folder, holdout == 0, bad_images)
    else:
        raise BadInput(f"--data '{name}' is neither a folder nor one of {', '.join(NAMES)}")
    if holdout:
        copies = dict(emoji=2, scenes=4, composites=6).get(kind, 1)
        rest, held = split_by_class(train.labels, holdout, seed, copies)
        if not len(held):
            raise BadInput(f"--holdout {holdout} of {len(train)} images leaves none to validate on")
        train, val = train.take(rest), train.take(held)
    mean, std = pixel_statistics(train)
    in_chans, size = (train.images.shape[1], train.images.shape[-1]) if train.in_memory else (3, None)
    flip = name not in ("mnist5k", "digits8x8")
    return ImageData(name, train, val, classes, in_chans, size, flip, mean, std, skipped)


def as_folder(name):
    """The folder of that name, ~ expanded, or None where there is none."""
    try:
        path = Path(name).expanduser()
        return path if path.is_dir() else None
    except (OSError, RuntimeError):                     # a name too long, a ~user who does not exist
        return None


def split_by_class(labels, fraction, seed=None, copies=1):
    """Index tensors (rest, held), disjoint and sorted; `held` is that fraction of each class.

    Rounded down. Without a seed the held ones are spread evenly through the class (.2: every fifth),
    with one they are drawn at random. `copies` consecutive images stay together.
    """
    units = labels[::copies]
    held = torch.zeros(len(units), dtype=torch.bool)
    generator = torch.Generator().manual_seed(mix_seed("split", seed))
    for label in units.unique():
        members = (units == label).nonzero().flatten()
        if seed is not None:
            members = members[torch.randperm(len(members), generator=generator)]
        count = torch.arange(len(members) + 1, dtype=torch.float64).mul(fraction).floor()
        held[members[count.diff() > 0]] = True
    held = held.repeat_interleave(copies)
    return (~held).nonzero().flatten(), held.nonzero().flatten()


def pixel_statistics(train):
    """Mean and std per channel of pixels in 0..1: counted in memory, ImageNet's for files."""
    if not train.in_memory:
        return IMAGENET
    values = torch.arange(256, dtype=torch.float64) / 255
    share = torch.stack([c.flatten().bincount(minlength=256).double() for c in train.images.unbind(1)])
    share /= share.sum(1, keepdim=True)                 # (C, 256): exact, without a float copy
    mean = share @ values
    return mean.tolist(), (share @ values.square() - mean.square()).sqrt().tolist()


# -------------------------------------------------------------------------------------------------------
# sets that ship in data/: functions of the label ("group" or "subgroup") -> (train, val, classes)

DIGESTS = {                                             # blake2b, 8 bytes; of a folder: of all its files
    "mnist5k.npz": "15cee7d02386ac8e", "digits8x8.npz": "b2fdca644fe9a8dd",
    "emoji_noto_32.png": "19d9cc720bb48789", "emoji_fluent3d_32.png": "588a9927e5baf7ad",
    "cutouts_fluent3d_64.webp": "3fff4934e63a0f51", "photos": "58c7bb2f39203920",
}


@functools.cache
def shipped(name):
    """The path of data/<name>, a file or a folder. Raises BadInput where it is damaged."""
    path = ROOT / name
    files = sorted(path.glob("*.jpg")) if path.is_dir() else [path] * path.exists()
    content = b"".join(file.read_bytes() for file in files)
    if hashlib.blake2b(content, digest_size=8).hexdigest() != DIGESTS[name]:
        raise BadInput(f"'{path}' is missing or damaged: restore it with git checkout -- data")
    return path


def mnist5k(label):
    """4,000 and 1,000 digits of MNIST, grey, 28 x 28."""
    with np.load(shipped("mnist5k.npz")) as z:
        x, y = ([torch.from_numpy(z[f"{k}_{split}"]) for split in ("train", "test")] for k in "xy")
    train, val = (Images(images[:, None], labels.long()) for images, labels in zip(x, y))
    return train, val, [str(d) for d in range(10)]


def digits8x8(label):
    """1,797 digits of 8 x 8; the file's 0..16 becomes 0..255. Every fifth of a class is validation."""
    with np.load(shipped("digits8x8.npz")) as z:
        pixels = np.rint(z["x"] * (255 / 16)).astype(np.uint8)
        whole = Images(torch.from_numpy(pixels)[:, None], torch.from_numpy(z["y"]).long())
    train, val = split_by_class(whole.labels, 0.2)
    return whole.take(train), whole.take(val), [str(d) for d in range(10)]


def read_sheet(name):
    """(tiles, uint8 RGBA (n, 4, tile, tile), the json beside it) of the sheet data/<name>."""
    path = shipped(name)
    info = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    with Image.open(path) as sheet:
        sheet = v2.functional.pil_to_tensor(sheet.convert("RGBA"))
    tiles = sheet.unflatten(1, (-1, info["tile"])).unflatten(3, (info["cols"], info["tile"]))
    return tiles.permute(1, 3, 0, 2, 4).flatten(0, 1)[:info["n"]], info     # from (4, row, y, column, x)


def emoji_drawings(label):
    """1,374 concepts, each drawn by Noto and then by Fluent: (uint8 RGBA (2748, 4, 32, 32), labels,
    classes, (training, validation) indices). Every fifth concept of a group is validation."""
    (noto, info), (fluent, _) = (read_sheet(f"emoji_{artist}_32.png") for artist in ("noto", "fluent3d"))
    twins = ("family", "cat")                           # drawn as man-man-boy and smiley_cat
    kept = [i for i, name in enumerate(info["names"]) if name not in twins]
    drawings = torch.stack([noto, fluent], 1)[kept].flatten(0, 1)
    index, classes = {}, {}
    for kind in ("group", label):
        names = [info[kind][i] for i in kept]
        classes[kind] = list(dict.fromkeys(names))
        index[kind] = torch.tensor([classes[kind].index(name) for name in names]).repeat_interleave(2)
    return drawings, index[label], classes[label], split_by_class(index["group"], 0.2, copies=2)


def on_white(rgba):
    """uint8 RGBA (..., 4, H, W) laid on white: uint8 (..., 3, H, W)."""
    alpha = rgba[..., 3:, :, :].int()
    return ((rgba[..., :3, :, :].int() * alpha + 255 * (255 - alpha) + 127) // 255).to(torch.uint8)


def emoji(label):
    """1,374 concepts by two artists each, 32 x 32, in 7 groups or 81 subgroups."""
    drawings, labels, classes, (train, val) = emoji_drawings(label)
    whole = Images(on_white(drawings), labels)
    return whole.take(train), whole.take(val), classes


def photographs():
    """The photographs, float (3, Y, X), 0..255: for training, and every fifth for validation."""
    photos = [read_rgb(path).float() for path in sorted(shipped("photos").glob("*.jpg"))]
    return [photo for i, photo in enumerate(photos) if i % 5 < 4], photos[4::5]


def scenes(label, copies=2):
    """The emoji at random size and place on random pieces of photographs, 32 x 32; always the same ones.

    There the pixels say little about what is in an image. `copies` scenes of each drawing, one after the
    other. Parts are those of `emoji`, and share no photograph."""
    drawings, labels, classes, parts = emoji_drawings(label)
    sets = []
    for split, members, photos in zip(("train", "val"), parts, photographs()):
        generator = torch.Generator().manual_seed(mix_seed("scenes", split))
        which = members.repeat_interleave(copies)
        pasted = [paste_on_photo(drawings[i].float(), photos, generator, 32, 16) for i in which.tolist()]
        sets.append(Images(torch.stack([image for image, _ in pasted]), labels[which]))
    return *sets, classes


def paste_on_photo(drawing, photos, generator, side, smallest):
    """A drawing, RGBA (4, Y, X), 0..255, on a piece of one of the photos, which is shrunk up to 4 times.

    The drawing becomes `smallest` to .9 `side` wide. Returns (uint8 (3, side, side), bool (side, side):
    where the drawing covers more than half of the pixel)."""
    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    photo = photos[draw(0, len(photos) - 1)]
    piece = draw(side, min(4 * side, *photo.shape[1:]))
    top, left = (draw(0, n - piece) for n in photo.shape[1:])
    piece = photo[:, top:top + piece, left:left + piece]
    image = v2.functional.resize(piece, [side, side], antialias=True).clone()     # it may be a view
    size = draw(smallest, side * 9 // 10)
    colour, alpha = drawing[:3] * drawing[3:] / 255, drawing[3:] / 255     # no hidden colour bleeds in
    colour, alpha = (v2.functional.resize(t, [size, size], antialias=True) for t in (colour, alpha))
    y, x = draw(0, side - size), draw(0, side - size)
    image[:, y:y + size, x:x + size].mul_(1 - alpha).add_(colour)
    mask = torch.zeros(side, side, dtype=torch.bool)
    mask[y:y + size, x:x + size] = alpha[0] > .5
    return image.round().clamp(0, 255).to(torch.uint8), mask


COARSE = ("animal", "plant", "food", "transport", "clothing", "object")       # groups of the cutouts


@functools.cache                                        # seconds to make, 50 MB; every label shares them
def pasted_cutouts():
    """(parts, groups, subgroups): the images of `composites` with masks; classes of 591 cutouts.

    A part, for training and for validation: (images uint8 (N, 3, 64, 64), where the cutout is, bool
    (N, 64, 64), which cutout it is, int64 (N,)). Six composites of a cutout for training, four for
    validation, one after the other. Every fifth cutout of a group is validation."""
    cutouts, info = read_sheet("cutouts_fluent3d_64.webp")
    groups = [next((g for g in COARSE if name.startswith(g)), "object") for name in info["subgroup"]]
    split, parts = split_by_class(torch.tensor([COARSE.index(g) for g in groups]), 0.2), []
    for name, copies, members, photos in zip(("train", "val"), (6, 4), split, photographs()):
        generator = torch.Generator().manual_seed(mix_seed("composites", name))
        which = members.repeat_interleave(copies)
        pasted = [paste_on_photo(cutouts[i].float(), photos, generator, 64, 21) for i in which.tolist()]
        parts.append((*(torch.stack(column) for column in zip(*pasted)), which))
    return parts, groups, info["subgroup"]


def composites(label):
    """Cutouts on photographs, 64 x 64, in 6 groups or 34 subgroups: the class of what is pasted."""
    parts, groups, subgroups = pasted_cutouts()
    kinds, classes = (groups, COARSE) if label == "group" else (subgroups, dict.fromkeys(subgroups))
    labels = torch.tensor([list(classes).index(kind) for kind in kinds])
    return *(Images(images, labels[which]) for images, _, which in parts), list(classes)


EMBEDDED = dict(mnist5k=mnist5k, digits8x8=digits8x8, emoji=emoji, scenes=scenes, composites=composites)


def cifar(name):
    """CIFAR-10 or -100. Rank 0 downloads while the others wait, so the process group must exist."""
    kind, fault = getattr(datasets, name.upper()), [None]
    grouped = dist.is_available() and dist.is_initialized()
    try:
        if not grouped or dist.get_rank() == 0:
            kind(ROOT, download=True)
    except (OSError, RuntimeError) as error:
        words = " ".join(str(error).split())
        fault = [f"'{name}' cannot be downloaded ({type(error).__name__}: {words}): check the network, "
                 f"or put {kind.filename} from {kind.url} into {ROOT.name}/"]
    if grouped:
        dist.broadcast_object_list(fault, src=0)        # the barrier; and all stop where rank 0 fails
    if fault[0]:
        raise BadInput(fault[0])
    sets = []
    for is_train in (True, False):
        part = kind(ROOT, train=is_train)
        pixels = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
        sets.append(Images(pixels, torch.tensor(part.targets)))
    return *sets, list(part.classes)


# -------------------------------------------------------------------------------------------------------
# folders of image files

def image_folder(root, with_val=True, bad_images="stop"):
    """(train, val or None, classes, files left out) of root/train and root/val.

    Labels of both are train's: its class folders in alphabetical order."""
    train, classes, skipped = folder_split(root, "train", None, bad_images)
    if not with_val:
        return train, None, classes, skipped
    val, _, more = folder_split(root, "val", classes, bad_images)
    return train, val, classes, skipped + more


def folder_split(root, split, classes, bad_images):
    """(Images, classes, files left out) of root/split/<class>/**, without hidden files and folders.

    With `classes` given, their order gives the labels, and some may be absent."""
    folder = root / split
    if not folder.is_dir():
        raise BadInput(f"data folder '{root}' has no {split}/ subfolder: {LAYOUT}")
    present = sorted(d.name for d in folder.iterdir() if d.is_dir() and not d.name.startswith("."))
    if not present:
        raise BadInput(f"'{folder}' has no class folders: {LAYOUT}")
    label = {name: i for i, name in enumerate(classes or present)}
    for name in present:
        if name not in label:
            raise BadInput(f"'{folder}' has the class '{name}', which train/ lacks: add or remove it")
    kinds = datasets.folder.IMG_EXTENSIONS
    found = datasets.ImageFolder.make_dataset(str(folder), label, extensions=kinds, allow_empty=True)
    found = [(path, i) for path, i in found if f"{os.sep}." not in path[len(str(folder)):]]   # ._a.jpg
    readable = readable_files([path for path, _ in found], bad_images)
    kept = [pair for pair, is_readable in zip(found, readable) if is_readable]
    labels = torch.tensor([i for _, i in kept], dtype=torch.int64)
    empty = sorted(set(range(len(label))) - set(labels.tolist()))
    if not kept or (empty and classes is None):
        raise BadInput(f"'{folder / present[empty[0]]}' holds no images: add some or remove it")
    return Images([path for path, _ in kept], labels), list(label), len(found) - len(kept)


def readable_files(paths, bad_images="stop"):
    """Which of these image files can be read: truth values. All ranks call it and share the work.

    bad_images "stop": raise BadInput that names the first bad file; "skip": leave the bad ones to the
    caller. Only ends of files are read, so damage in the middle shows up later, in `read_rgb`."""
    grouped = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    with ThreadPoolExecutor(16) as pool:
        faults = enumerate(pool.map(image_fault, paths[rank::ranks]))
        parts = [{rank + ranks * i: fault for i, fault in faults if fault}] * ranks
    if grouped:
        dist.all_gather_object(parts, parts[rank])
    bad = {i: fault for part in parts for i, fault in part.items()}
    if bad and bad_images == "stop":
        raise BadInput(f"{bad[min(bad)]}; --set bad_images=skip leaves out all {len(bad)} such files")
    return [i not in bad for i in range(len(paths))]


def image_fault(path):
    """None, or a sentence that says what is wrong with an image file.

    Fine is a JPEG or PNG file whose head Pillow reads and that ends as it should. Others are decoded."""
    try:
        with open(path, "rb") as file:
            end = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}.get(Image.open(file).format)
            file.seek(-min(4096, os.fstat(file.fileno()).st_size), os.SEEK_END)
            if end and end in file.read():              # these two bytes never occur in a JPEG's pixels
                return None
        read_rgb(path)
    except Exception as fault:                          # Pillow raises any of a dozen types
        kind = type(fault.__cause__ or fault).__name__
        return f"cannot read image '{path}' ({kind}): replace or remove the file"


def read_rgb(path):
    """The image file as uint8 (3, H, W), turned upright as its EXIF data say. Raises BadInput."""
    try:
        with Image.open(path) as image:
            ImageOps.exif_transpose(image, in_place=True)
            return v2.functional.pil_to_tensor(to_rgb(image))
    except Exception as fault:
        kind = type(fault).__name__
        raise BadInput(f"cannot read image '{path}' ({kind}): replace or remove the file") from fault


def to_rgb(image):
    """A Pillow image of any mode as RGB: transparency is laid on white, 16-bit grey becomes 8-bit."""
    if image.mode == "I" or image.mode.startswith("I;16"):             # Pillow's own way clips at 255
        grey = np.clip(np.asarray(image), 0, 65535) / 257
        return Image.fromarray(np.rint(grey).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:                     # without alpha the hidden colours would show
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


# -------------------------------------------------------------------------------------------------------
# folders of latents

class Latents(Dataset):
    """Rows of a latents.npy on the disk, never read as a whole. Item: (float32 (C, Y, X), int)."""
    in_memory = False

    def __init__(self, path, labels, index):
        self.path, self.labels, self.index = path, labels, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        rows = np.load(self.path, mmap_mode="r")        # opened anew: workers would get a map as a copy
        return torch.from_numpy(rows[self.index[i]].astype(np.float32)), int(self.labels[i])

    def take(self, index):
        """The latents at `index` (int64), as a set of their own."""
        return Latents(self.path, self.labels[index], self.index[index])


def read_latents(folder, prefix):
    """(Latents, shape (C, Y, X) of one) of folder/<prefix>latents.npy and <prefix>labels.npy."""
    path, beside = folder / f"{prefix}latents.npy", folder / f"{prefix}labels.npy"
    again = "write both anew with python -m tools.encode_latents"
    try:                                                # np.load would also take an archive for an array
        latents, labels = (np.lib.format.open_memmap(file, mode="r") for file in (path, beside))
    except (OSError, ValueError, EOFError) as error:
        raise BadInput(f"{path} and {beside.name} cannot be read ({error}): {again}") from error
    if latents.ndim != 4 or latents.shape[2] != latents.shape[3] or latents.dtype.kind != "f":
        raise BadInput(f"{path} holds {latents.dtype} {latents.shape}, not floats (N, C, Y, Y): {again}")
    if labels.shape != (len(latents),) or labels.dtype.kind not in "iu" or labels.min(initial=0) < 0:
        raise BadInput(f"{beside} has no label from 0 for each of {len(latents)} latents: {again}")
    labels = torch.from_numpy(labels.astype(np.int64))
    return Latents(path, labels, torch.arange(len(labels))), latents.shape[1:]


def load_latents(folder, holdout=0.0, seed=0):
    """The ImageData of a folder of latents of std 1, as tools/encode_latents.py writes it.

    latents.npy (N, C, Y, Y), float16 or float32; labels.npy (N,), integers. Validation: val_latents.npy
    and val_labels.npy, else `holdout` or 5 % of each class. Raises BadInput where files do not fit."""
    train, shape = read_latents(Path(folder), "")
    if (train.path.parent / "val_latents.npy").exists() and not holdout:
        val, val_shape = read_latents(Path(folder), "val_")
        if val_shape != shape:
            raise BadInput(f"{val.path} holds shapes {val_shape}, latents.npy {shape}: write both anew")
    else:
        y = train.labels
        pairs = len(y) % 2 == 0 and torch.equal(y[::2], y[1::2])       # an image and its mirror image
        rest, held = split_by_class(y, holdout or 0.05, seed if holdout else None, copies=1 + pairs)
        if not len(held):
            raise BadInput(f"{folder} has too few latents for a validation part of {holdout or .05}: "
                           f"pass a larger --holdout, or add val_latents.npy and val_labels.npy")
        train, val = train.take(rest), train.take(held)
    classes = [str(c) for c in range(1 + int(max(train.labels.max(), val.labels.max())))]
    mean, std = [0.0] * shape[0], [1.0] * shape[0]
    return ImageData(str(folder), train, val, classes, shape[0], shape[-1], False, mean, std)


# -------------------------------------------------------------------------------------------------------
# transforms

AUGMENT = {
    "none": dict(crop_scale=None, ratio=None, flip=False, randaugment=None, erase=0.0),
    "light": dict(crop_scale=(0.6, 1.0), ratio=(0.9, 1.1), flip=True, randaugment=None, erase=0.0),
    "strong": dict(crop_scale=(0.08, 1.0), ratio=(.75, 4 / 3), flip=True, randaugment=(2, 9), erase=.25),
    "mae": dict(crop_scale=(0.2, 1.0), ratio=(.75, 4 / 3), flip=True, randaugment=None, erase=0.0),
}
BICUBIC = dict(interpolation=v2.InterpolationMode.BICUBIC, antialias=True)


def train_transform(data, img_size, augment="none", **overrides):
    """uint8 (C, H, W) -> float32 (C, img_size, img_size), mean 0 and std 1, augmented at random.

    augment: a key of AUGMENT; overrides: crop_scale (min, max) area or None, ratio, flip, randaugment
    (operations, magnitude 0..10) or None, erase (a probability). Only where data.flip allows it is there
    a flip."""
    if augment not in AUGMENT:
        raise BadInput(f"augment {augment!r} is unknown: use {', '.join(AUGMENT)}")
    how = AUGMENT[augment] | overrides
    if how["crop_scale"]:
        ratio = how["ratio"] or (1.0, 1.0)
        steps = [v2.RandomResizedCrop(img_size, how["crop_scale"], ratio, **BICUBIC)]
    else:
        steps = resize_steps(data, img_size)
    if how["flip"] and data.flip:
        steps += [v2.RandomHorizontalFlip()]
    if how["randaugment"]:
        operations, magnitude = how["randaugment"]
        fill = [round(255 * m) for m in data.mean]
        # 11 bins make magnitudes 0..10, as in timm and DeiT; of torchvision's 31, 9 is a third as strong
        steps += [v2.RandAugment(operations, magnitude, num_magnitude_bins=11, fill=fill,
                                 interpolation=v2.InterpolationMode.BILINEAR)]
    steps += normalise(data)
    if how["erase"]:
        steps += [v2.RandomErasing(how["erase"], value="random")]      # last, so that noise is N(0, 1)
    return v2.Compose(steps)


def eval_transform(data, img_size):
    """uint8 (..., C, H, W) -> float32 (..., C, img_size, img_size), mean 0 and std 1; nothing random."""
    return v2.Compose(resize_steps(data, img_size) + normalise(data))


def resize_steps(data, img_size):
    """Steps to the side img_size. Of files: shorter side to img_size / .875, then the centre."""
    if data.size == img_size:
        return []
    if data.size is None:
        return [v2.Resize(round(img_size / 0.875), **BICUBIC), v2.CenterCrop(img_size)]
    return [v2.Resize((img_size, img_size), **BICUBIC)]


def normalise(data):
    """Steps from uint8 to float32 of mean 0 and std 1."""
    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(data.mean, data.std)]


class MultiCrop:
    """DINO's views: uint8 (C, H, W) -> a list of 2 global and `local_crops` local ones.

    A view, float32 (C, S, S): a random piece of `scale` of the area, resized; flip; colour jitter with
    probability `color`; grey with .2; blur with 1, .1 and .5 for the first global, the second and the
    local ones; the second is solarised with .2. The blur's sigma, .1 to 2 pixels at 224, shrinks with
    global_size, or small images would be wiped out."""

    def __init__(self, data, global_size=224, local_size=96, local_crops=8, global_scale=(0.4, 1.0),
                 local_scale=(0.05, 0.4), color=0.8):
        sigma = max(0.2, 2 * global_size / 224)

        def view(size, scale, blur, solarize=0.0):
            kernel = 2 * min(math.ceil(3 * sigma), size - 1) + 1
            return v2.Compose([
                v2.RandomResizedCrop(size, scale, **BICUBIC),
                *[v2.RandomHorizontalFlip()] * data.flip,
                v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=color),
                v2.RandomGrayscale(0.2 * (color > 0)),
                v2.RandomApply([v2.GaussianBlur(kernel, (min(0.1, sigma), sigma))], p=blur),
                *[v2.RandomSolarize(128, solarize)] * (solarize > 0),
                *normalise(data)])

        self.views = [view(global_size, global_scale, 1.0), view(global_size, global_scale, 0.1, 0.2)]
        self.views += [view(local_size, local_scale, 0.5)] * local_crops

    def __call__(self, image):
        return [view(image) for view in self.views]


def mixer(num_classes, mixup=0.0, cutmix=0.0):
    """A function (x (B, C, H, W), y int64 (B,)) -> (x, targets (B, num_classes), rows that sum to 1).

    None if both alphas are 0. Each call mixes the batch with itself shifted by one, one ratio for all.
    It draws from torch's default generator, which the caller seeds."""
    kinds = [(v2.MixUp, mixup), (v2.CutMix, cutmix)]
    kinds = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha > 0]
    return v2.RandomChoice(kinds) if kinds else None


# -------------------------------------------------------------------------------------------------------
# batches

def epoch_order(n, seed, epoch):
    """The permutation of range(n) in which epoch `epoch` visits the samples: int64 (n,)."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(mix_seed("order", seed, epoch)))


def steps_per_epoch(n, batch_size):
    """Whole batches in n samples; the rest of an epoch is left out."""
    if batch_size > n:
        raise BadInput(f"--batch-size {batch_size} is larger than the training set of {n} images")
    return n // batch_size


class Batches(Dataset):
    """A dataset seen through a transform, by batches. Position p: sample p % len in epoch p // len.

    It holds no state, so workers may live through all epochs; a position decides the augmentation."""
    FIXED = (v2.Resize, v2.CenterCrop, v2.ToDtype, v2.Normalize)
    POINTWISE = (v2.ToDtype, v2.Normalize)

    def __init__(self, dataset, transform, seed):
        self.dataset, self.transform, self.seed = dataset, transform, seed
        # Where nothing is random, images in memory go through all steps together: the same numbers, some
        # 20 times faster. Where something is, they go through the last steps together.
        steps, self.last = list(getattr(transform, "transforms", [transform])), []
        self.at_once = dataset.in_memory and all(isinstance(step, self.FIXED) for step in steps)
        while steps and isinstance(steps[-1], self.POINTWISE):
            self.last.insert(0, steps.pop())
        self.first = v2.Compose(steps or [torch.nn.Identity()]) if self.last else transform

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, positions):
        if self.at_once:
            index = torch.tensor(positions) % len(self)
            return self.transform(self.dataset.images[index]), self.dataset.labels[index]
        images, labels = [], []
        with torch.random.fork_rng(devices=[]):         # without workers this is the caller's own stream
            for position in positions:
                epoch, index = divmod(position, len(self))
                image, label = self.dataset[index]
                torch.default_generator.manual_seed(mix_seed("augment", self.seed, epoch, index))
                images.append(self.first(image))
                labels.append(label)
        images = default_collate(images)                # of several views an image: a list of batches
        for step in self.last:
            images = step(images)
        return images, torch.tensor(labels)


def train_batches(dataset, transform, batch_size, seed, first_step, last_step,
                  rank=0, world=1, micro_steps=1, workers=0):
    """Yields this rank's micro-batches (x, y) of the steps first_step .. last_step - 1.

    batch_size is global: step s of epoch e takes positions k * batch_size ... (k + 1) * batch_size
    of the epoch's order, k = s - e * steps_per_epoch. `runtime.my_part` shares them out over ranks and
    micro_steps, as evenly as it goes. Raises BadInput if the batch exceeds the set."""
    n = len(dataset)
    steps_per_epoch(n, batch_size)
    positions = train_positions(n, batch_size, seed, first_step, last_step, rank, world, micro_steps)
    return run_loader(Batches(dataset, transform, seed), positions, workers)


def train_positions(n, batch_size, seed, first_step, last_step, rank=0, world=1, micro_steps=1):
    """Yields the positions of the micro-batches of `train_batches`, lists of numbers."""
    for step in range(first_step, last_step):
        epoch, k = divmod(step, steps_per_epoch(n, batch_size))
        if k == 0 or step == first_step:
            order = epoch_order(n, seed, epoch)
        for part in my_part(order[k * batch_size:(k + 1) * batch_size], rank, world, micro_steps):
            yield (epoch * n + part).tolist()


def eval_batches(dataset, transform, batch_size, rank=0, world=1, workers=0):
    """Yields (x, y) of the samples rank, rank + world, ...: over all ranks each once."""
    mine = list(range(rank, len(dataset), world))
    positions = [mine[i:i + batch_size] for i in range(0, len(mine), batch_size)]
    return run_loader(Batches(dataset, transform, seed=0), positions, workers)


def run_loader(batches, positions, workers):
    """One pass over `positions`, in their order. A run is one pass, so its workers start once."""
    # A generator of its own: the DataLoader would draw its workers' base seed from the caller's stream.
    loader = DataLoader(batches, batch_sampler=positions, collate_fn=default_convert,
                        num_workers=workers, prefetch_factor=4 if workers else None,
                        pin_memory=torch.cuda.is_available(), generator=torch.Generator())
    try:
        yield from loader
    except BadInput as fault:                           # a worker's comes as a traceback that ends in it
        fault.__traceback__ = None                      # lets the workers go at once
        raise BadInput(str(fault).rpartition("BadInput: ")[2].strip()) from None
