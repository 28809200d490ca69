"""Images: the sets that ship in data/, CIFAR through torchvision, and any folder train/<class>/*, val/<class>/*.

    data = load_images("mnist5k")
    for x, y in train_batches(data.train, train_transform(data, 28, "light"), batch_size=100, seed=0, first_step=0, last_step=40):
        ...                                           # x float (100, 1, 28, 28), mean 0 and std 1; y int64 (100,)

Two rules make every run repeatable, whatever its number of processes, micro-batches or workers, and however often it resumes:
the batch of a step is a function of (seed, step), and the augmentation of a sample is a function of (seed, epoch, sample).
"""
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert
from torchvision import datasets
from torchvision.transforms import v2

from runtime import BadInput, mix_seed

ROOT = Path(__file__).resolve().parent / "data"        # not the working directory: scripts may be started from anywhere
NAMES = ("mnist5k", "digits8x8", "emoji", "emoji-subgroups", "emoji-artists", "scenes", "scenes-subgroups", "composites", "composites-subgroups", "cifar10", "cifar100")
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]            # mean and std of its pixels, per channel
LAYOUT = "lay images out as train/<class>/*.jpg and val/<class>/*.jpg"


# ---------------------------------------------------------------------------------------------------------------- datasets
class Images(Dataset):
    """images: uint8 (N, C, H, W) or a list of N file paths; labels: int64 (N,). Item: (uint8 (C, H, W), int)."""
    KEEP = 2 ** 30         # bytes: files whose images take less than that together are decoded once in each process

    def __init__(self, images, labels):
        self.images, self.labels, self.kept = images, labels, {}
        self.in_memory = isinstance(images, torch.Tensor)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i] if self.in_memory else self.kept.get(i)
        if image is None:
            image = read_rgb(self.images[i])
            if image.nbytes * len(self) <= self.KEEP:   # of each, so that it holds for all
                self.kept[i] = image
        return image, int(self.labels[i])

    def take(self, index):
        """The images at `index` (int64), as a set of their own."""
        return Images(self.images[index] if self.in_memory else [self.images[i] for i in index.tolist()], self.labels[index])


@dataclass
class ImageData:
    name: str
    train: Dataset
    val: Dataset
    classes: list          # class names; their index is the label
    in_chans: int
    size: int | None       # side of the (square) images; None for folders, whose images differ: 224 unless told otherwise
    flip: bool             # whether a mirrored image still belongs to its class (not so for digits)
    mean: list             # per channel, of pixels in 0..1
    std: list


def load_images(name_or_path, holdout=0.0, seed=0):
    """The image set of that name (one of NAMES), or the folder at that path. Returns ImageData.

    holdout in (0, 1): validate on that fraction of the *training* images, drawn per class by `seed`, and train on the rest;
    so a learning rate can be tuned without a look at the test set.
    Raises BadInput for an unknown name, an incomplete folder, a failed download, or a holdout that leaves nothing.
    """
    name = str(name_or_path)
    if not 0 <= holdout < 1:
        raise BadInput(f"--holdout {holdout} must be at least 0 and below 1: it is a fraction of the training images")
    embedded = {"mnist5k": mnist5k, "digits8x8": digits8x8, "emoji": emoji, "emoji-artists": emoji_artists,
                "emoji-subgroups": lambda: emoji("subgroup"), "scenes": scenes, "scenes-subgroups": lambda: scenes("subgroup"),
                "composites": composites, "composites-subgroups": lambda: composites("subgroup")}
    if name in embedded:
        train, val, classes = embedded[name]()
    elif name in ("cifar10", "cifar100"):
        train, val, classes = cifar(name)
    elif folder := as_folder(name):
        train, val, classes = image_folder(folder, with_val=holdout == 0)
    else:
        raise BadInput(f"--data '{name}' is neither a folder nor one of {', '.join(NAMES)}: check the spelling or the path")
    if holdout:
        rest, held = split_by_class(train.labels, holdout, seed, copies={"emoji": 2, "scenes": 4, "composites": 6}.get(name.removesuffix("-subgroups"), 1))
        if not len(held):
            raise BadInput(f"--holdout {holdout} of {len(train)} images leaves none to validate on: raise it or leave it out")
        train, val = train.take(rest), train.take(held)
    mean, std = pixel_statistics(train)
    in_chans, size = (train.images.shape[1], train.images.shape[-1]) if train.in_memory else (3, None)
    return ImageData(name, train, val, classes, in_chans, size, name not in ("mnist5k", "digits8x8"), mean, std)


def as_folder(name):
    """The folder of that name, ~ expanded, or None where there is none."""
    try:
        path = Path(name).expanduser()
        return path if path.is_dir() else None
    except (OSError, RuntimeError):                     # a name too long for a file, a ~user who does not exist
        return None


def mnist5k():
    with np.load(ROOT / "mnist5k.npz") as z:
        part = {split: Images(torch.from_numpy(z[f"x_{split}"])[:, None], torch.from_numpy(z[f"y_{split}"]).long())
                for split in ("train", "test")}
    return part["train"], part["test"], [str(d) for d in range(10)]


def digits8x8():
    """1,797 digits of 8 x 8; the file's 0..16 becomes 0..255. Every fifth of a class is validation."""
    with np.load(ROOT / "digits8x8.npz") as z:
        pixels = np.rint(z["x"] * (255 / 16)).astype(np.uint8)
        whole = Images(torch.from_numpy(pixels)[:, None], torch.from_numpy(z["y"]).long())
    train, val = split_by_class(whole.labels, 0.2)
    return whole.take(train), whole.take(val), [str(d) for d in range(10)]


def emoji_sheets():
    """(drawings, info) of 1,374 concepts. drawings: uint8 (1374, 2, 4, 32, 32), Noto's and Fluent's, RGBA; info: its lists names, group, subgroup."""
    twins = ("family", "cat")                           # one artist draws them exactly as man-man-boy and smiley_cat: left out
    (noto, info), (fluent, _) = (read_sheet(f"emoji_{artist}_32.png") for artist in ("noto", "fluent3d"))
    keep = [i for i, name in enumerate(info["names"]) if name not in twins]
    return torch.stack([noto, fluent], 1)[keep], {key: [info[key][i] for i in keep] for key in ("names", "group", "subgroup")}


def read_sheet(name):
    """(its tiles, RGBA uint8 (n, 4, tile, tile), the json beside it) of the sheet data/name, filled row by row."""
    info = json.loads((ROOT / name).with_suffix(".json").read_text(encoding="utf-8"))
    with Image.open(ROOT / name) as sheet:
        sheet = v2.functional.pil_to_tensor(sheet.convert("RGBA"))
    tiles = sheet.unflatten(1, (-1, info["tile"])).unflatten(3, (info["cols"], info["tile"]))      # (4, row, y, col, x)
    return tiles.permute(1, 3, 0, 2, 4).flatten(0, 1)[:info["n"]], info


def on_white(rgba):
    """uint8 RGBA (..., 4, H, W) laid on white: uint8 (..., 3, H, W)."""
    alpha = rgba[..., 3:, :, :].int()
    return ((rgba[..., :3, :, :].int() * alpha + 255 * (255 - alpha) + 127) // 255).to(torch.uint8)


def emoji_labels(info, label):
    """(labels of all drawings (2748,), their classes, (training, validation) indices). A concept's two drawings are neighbours; every fifth concept of a group
    is validation, whatever the label."""
    classes = {kind: list(dict.fromkeys(info[kind])) for kind in ("group", label)}
    index = {kind: torch.tensor([names.index(name) for name in info[kind]]).repeat_interleave(2) for kind, names in classes.items()}
    return index[label], classes[label], split_by_class(index["group"], 0.2, copies=2)


def emoji(label="group"):
    """1,374 concepts, each drawn by two artists, in 7 groups. Validation is every fifth *concept* of a group, by both artists.

    A concept's two drawings are neighbours in the order, so that `copies=2` keeps them on the same side of every split.
    label: "group" or the finer "subgroup", which leaves the images of both parts as they are.
    """
    drawings, info = emoji_sheets()
    labels, classes, (train, val) = emoji_labels(info, label)
    whole = Images(on_white(drawings).flatten(0, 1), labels)
    return whole.take(train), whole.take(val), classes


def emoji_artists():
    """The same concept across artists: train is all of Noto's drawings, validation all of Fluent's, the label is the concept (1,374 classes).

    Made for probing: with one training image a class, k-NN at k = 1 asks whether the nearest drawing in another hand means the same.
    """
    drawings, info = emoji_sheets()
    drawings, concepts = on_white(drawings), torch.arange(len(drawings))
    return Images(drawings[:, 0].contiguous(), concepts), Images(drawings[:, 1].contiguous(), concepts), info["names"]


def scenes(label="group", copies=2):
    """The emoji at random size and place on random pieces of photographs, 32 x 32: there the pixels of an image say little about what is in it.

    `copies` scenes of each drawing, always the same ones, one after the other. The split is that of `emoji`, and every fifth photograph is kept for validation.
    """
    drawings, info = emoji_sheets()
    labels, classes, parts = emoji_labels(info, label)
    photos = [read_rgb(path).float() for path in sorted((ROOT / "photos").glob("*.jpg"))]
    backgrounds = dict(train=[p for i, p in enumerate(photos) if i % 5 < 4], val=photos[4::5])
    sets = []
    for split, members in zip(("train", "val"), parts):
        generator = torch.Generator().manual_seed(mix_seed("scenes", split))
        images = [scene(drawings.flatten(0, 1)[i].float(), backgrounds[split], generator) for i in members.tolist() for _ in range(copies)]
        sets.append(Images(torch.stack(images), labels[members].repeat_interleave(copies)))
    return *sets, classes


def scene(drawing, photos, generator, side=32):
    """RGBA (4, Y, X), 0..255, half to nine tenths of `side` wide, on a piece of one of the photos (3, Y, X), scaled down up to 4 times: uint8 (3, side, side)."""
    return paste(drawing, photos, generator, side, side // 2)[0]


def paste(drawing, photos, generator, side, smallest):
    """A scene whose drawing is `smallest` pixels wide or more: (uint8 (3, side, side), bool (side, side): where the drawing covers more than half of the pixel)."""
    draw = lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))
    photo = photos[draw(0, len(photos) - 1)]
    piece = draw(side, min(4 * side, *photo.shape[1:]))
    top, left = (draw(0, n - piece) for n in photo.shape[1:])
    image = v2.functional.resize(photo[:, top:top + piece, left:left + piece], [side, side], antialias=True).clone()      # at equal size it is the photograph itself
    size = draw(smallest, side * 9 // 10)
    colour, alpha = drawing[:3] * drawing[3:] / 255, drawing[3:] / 255                 # premultiplied, so that hidden colours do not bleed in
    colour, alpha = (v2.functional.resize(t, [size, size], antialias=True) for t in (colour, alpha))
    y, x = draw(0, side - size), draw(0, side - size)
    image[:, y:y + size, x:x + size].mul_(1 - alpha).add_(colour)
    mask = torch.zeros(side, side, dtype=torch.bool)
    mask[y:y + size, x:x + size] = alpha[0] > .5
    return image.round().clamp(0, 255).to(torch.uint8), mask


def composites(label="group"):
    """The composites of masks.py, larger than `scenes` and with exact masks, as images with the class of what is pasted."""
    from masks import composite_sets                    # which itself builds on this file
    *sets, classes = composite_sets(label)
    return *[Images(part.images, part.masks.flatten(1).amax(1).long() - 1) for part in sets], classes[1:]


def cifar(name):
    """CIFAR-10 or -100. Rank 0 downloads while the others wait (call it after the process group exists); then all read."""
    kind = getattr(datasets, name.upper())

    def attempt(**options):
        try:
            return kind(ROOT, **options), None
        except (OSError, RuntimeError) as fault:
            return None, (f"'{name}' cannot be downloaded or read ({fault.__class__.__name__}: {' '.join(str(fault).split())}): "
                          f"check the network, or put {kind.filename} from {kind.url} into {ROOT.name}/")

    # Sending the outcome to all ranks is the barrier, and when rank 0 fails the others stop too instead of waiting for it.
    grouped = dist.is_available() and dist.is_initialized()
    fault = [attempt(download=True)[1] if not grouped or dist.get_rank() == 0 else None]
    if grouped:
        dist.broadcast_object_list(fault, src=0)
    if fault[0]:
        raise BadInput(fault[0])
    parts = []
    for is_train in (True, False):
        part, problem = attempt(train=is_train)
        if problem:                                     # another machine, whose data/ is not rank 0's
            raise BadInput(problem)
        parts.append(Images(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets)))
    return *parts, list(part.classes)


def image_folder(root, with_val=True):
    """The images under root/train and root/val. Labels of both are train's: its class folders in alphabetical order."""
    train, classes = folder_split(root, "train")
    return train, folder_split(root, "val", classes)[0] if with_val else None, classes


def folder_split(root, split, classes=None):
    """(Images, classes) of root/split/<class>/*. With `classes` given, their order gives the labels, and some may be absent."""
    folder = root / split
    if not folder.is_dir():
        raise BadInput(f"data folder '{root}' has no {split}/ subfolder: {LAYOUT}")
    # Hidden folders, such as .ipynb_checkpoints, are no classes.
    present = sorted(d.name for d in folder.iterdir() if d.is_dir() and not d.name.startswith("."))
    if not present:
        raise BadInput(f"'{folder}' has no class folders: {LAYOUT}")
    label = {name: i for i, name in enumerate(classes or present)}
    for name in present:
        if name not in label:
            raise BadInput(f"'{folder}' has the class '{name}', which train/ lacks: add it to train/ or remove it from {split}/")
    found = datasets.ImageFolder.make_dataset(str(folder), label, extensions=datasets.folder.IMG_EXTENSIONS, allow_empty=True)
    labels = torch.tensor([i for _, i in found], dtype=torch.int64)
    empty = sorted(set(range(len(label))) - set(labels.tolist()))
    if not found or (empty and classes is None):
        raise BadInput(f"'{folder / present[empty[0]]}' holds no images (jpg, png, webp, ...): add some or remove the folder")
    return Images([path for path, _ in found], labels), list(label)


def read_rgb(path):
    """The image file as uint8 (3, H, W). Raises BadInput that names the file."""
    try:
        with Image.open(path) as image:
            return v2.functional.pil_to_tensor(to_rgb(image))
    except Exception as fault:                          # a damaged file makes Pillow raise any of a dozen types
        raise BadInput(f"cannot read image '{path}' ({type(fault).__name__}): replace or remove the file") from fault


def to_rgb(image):
    """A Pillow image of any mode as RGB: transparency is laid on white, 16-bit grey 0..65535 is scaled to 0..255."""
    if image.mode == "I" or image.mode.startswith("I;16"):     # Pillow's own conversion would clip at 255
        grey = np.clip(np.asarray(image), 0, 65535) / 257
        return Image.fromarray(np.rint(grey).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:                            # dropping alpha would show the colours hidden under it
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def split_by_class(labels, fraction, seed=None, copies=1):
    """Index tensors (rest, held), disjoint and sorted; `held` is that fraction of each class, rounded down.

    Without a seed the held ones are spread evenly through the class (.2: every fifth), with one they are drawn at random.
    `copies` consecutive images are one unit and stay together.
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
    """Mean and std per channel of pixels in 0..1: counted where the images are in memory, ImageNet's customary ones for files."""
    if not train.in_memory:
        return IMAGENET
    values = torch.arange(256, dtype=torch.float64) / 255
    share = torch.stack([channel.flatten().bincount(minlength=256).double() for channel in train.images.unbind(1)])
    share /= share.sum(1, keepdim=True)                        # (C, 256): exact, and no float copy of all images
    mean = share @ values
    return mean.tolist(), (share @ values.square() - mean.square()).sqrt().tolist()


# -------------------------------------------------------------------------------------------------------------- transforms
AUGMENT = {
    "none": dict(crop_scale=None, ratio=None, flip=False, randaugment=None, erase=0.0),
    "light": dict(crop_scale=(0.6, 1.0), ratio=(0.9, 1.1), flip=True, randaugment=None, erase=0.0),
    "strong": dict(crop_scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=True, randaugment=(2, 9), erase=0.25),     # DeiT
    "mae": dict(crop_scale=(0.2, 1.0), ratio=(3 / 4, 4 / 3), flip=True, randaugment=None, erase=0.0),
}
BICUBIC = dict(interpolation=v2.InterpolationMode.BICUBIC, antialias=True)


def train_transform(data, img_size, augment="none", **overrides):
    """uint8 (C, H, W) -> float32 (C, img_size, img_size), mean 0 and std 1, augmented at random.

    augment: a key of AUGMENT; overrides: crop_scale (min, max) area or None, ratio, flip, randaugment (operations, magnitude
    0..10) or None, erase (a probability). The flip happens only where data.flip allows it.
    """
    if augment not in AUGMENT:
        raise BadInput(f"--augment '{augment}' is unknown: choose one of {', '.join(AUGMENT)}")
    if set(overrides) - set(AUGMENT[augment]):
        raise TypeError(f"no such augmentation: {set(overrides) - set(AUGMENT[augment])}")
    how = AUGMENT[augment] | overrides
    if how["crop_scale"]:
        steps = [v2.RandomResizedCrop(img_size, how["crop_scale"], how["ratio"] or (1.0, 1.0), **BICUBIC)]
    else:
        steps = fit(data, img_size)
    if how["flip"] and data.flip:
        steps += [v2.RandomHorizontalFlip()]
    if how["randaugment"]:
        operations, magnitude = how["randaugment"]
        # 11 bins make magnitudes 0..10, as in timm and DeiT; torchvision's own 31 would make 9 a third as strong.
        steps += [v2.RandAugment(operations, magnitude, num_magnitude_bins=11, interpolation=v2.InterpolationMode.BILINEAR,
                                 fill=[round(255 * m) for m in data.mean])]
    steps += normalise(data)
    if how["erase"]:
        steps += [v2.RandomErasing(how["erase"], value="random")]      # after normalisation, so that noise is N(0, 1)
    return v2.Compose(steps)


def eval_transform(data, img_size):
    """uint8 (..., C, H, W) -> float32 (..., C, img_size, img_size), mean 0 and std 1; nothing random."""
    return v2.Compose(fit(data, img_size) + normalise(data))


def fit(data, img_size):
    """Steps that bring an image to img_size: none if it has it; files: shorter side to img_size / .875, then the centre."""
    if data.size == img_size:
        return []
    if data.size is None:
        return [v2.Resize(round(img_size / 0.875), **BICUBIC), v2.CenterCrop(img_size)]
    return [v2.Resize((img_size, img_size), **BICUBIC)]


def normalise(data):
    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(data.mean, data.std)]


class MultiCrop:
    """DINO's views: uint8 (C, H, W) -> a list of 2 global and `local_crops` local ones, float32 (C, S, S), mean 0 and std 1.

    Every view: a random piece of `scale` of the area, brought to its side; flip; colour jitter (.4, .4, .2, .1) with probability .8; grey with .2; blur with
    probability 1, .1 and .5 for the first global, the second and the local ones; the second is solarised with .2. The blur's sigma, .1 to 2 pixels at 224,
    shrinks with global_size, or small images would be wiped out.
    """

    def __init__(self, data, global_size=224, local_size=96, local_crops=8, global_scale=(0.4, 1.0), local_scale=(0.05, 0.4), color=0.8):
        sigma = max(0.2, 2 * global_size / 224)

        def view(size, scale, blur, solarize=0.0):
            return v2.Compose([
                v2.RandomResizedCrop(size, scale, **BICUBIC),
                *[v2.RandomHorizontalFlip()] * data.flip,
                v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=color),
                v2.RandomGrayscale(0.2 * (color > 0)),
                v2.RandomApply([v2.GaussianBlur(2 * min(math.ceil(3 * sigma), size - 1) + 1, (min(0.1, sigma), sigma))], p=blur),
                *[v2.RandomSolarize(128, solarize)] * (solarize > 0),
                *normalise(data)])

        self.transforms = [view(global_size, global_scale, 1.0), view(global_size, global_scale, 0.1, 0.2)] + [view(local_size, local_scale, 0.5)] * local_crops

    def __call__(self, image):
        return [view(image) for view in self.transforms]


def mixer(num_classes, mixup=0.0, cutmix=0.0):
    """A function (x (B, C, H, W), y int64 (B,)) -> (x, targets (B, num_classes), rows that sum to 1); None if both alphas are 0.

    Each call mixes the batch with itself shifted by one, with one ratio for all, so odd batches work and a batch of one is
    unchanged. It draws from torch's default generator, which the caller seeds.
    """
    kinds = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in ((v2.MixUp, mixup), (v2.CutMix, cutmix)) if alpha > 0]
    return v2.RandomChoice(kinds) if kinds else None


# ----------------------------------------------------------------------------------------------------------------- batches
def epoch_order(n, seed, epoch):
    """The permutation of range(n) in which epoch `epoch` visits the samples: int64 (n,)."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(mix_seed("order", seed, epoch)))


def steps_per_epoch(n, batch_size):
    """Whole batches in n samples; the rest of an epoch is left out, and another epoch's order leaves out others."""
    if batch_size > n:
        raise BadInput(f"--batch-size {batch_size} is larger than the training set of {n} images: lower it")
    return n // batch_size


class Batches(Dataset):
    """A dataset seen through a transform, a batch at a time. Position p is sample p % len in epoch p // len.

    It holds no state, so workers may live through all epochs; a position says all that the augmentation depends on.
    """
    FIXED = (v2.Resize, v2.CenterCrop, v2.ToDtype, v2.Normalize)
    POINTWISE = (v2.ToDtype, v2.Normalize)

    def __init__(self, dataset, transform, seed):
        self.dataset, self.transform, self.seed = dataset, transform, seed
        # Without randomness the images in memory go through the transform all at once: the same numbers, some 20 times faster. With it, the last steps do.
        self.at_once = dataset.in_memory and all(isinstance(step, self.FIXED) for step in transform.transforms)
        steps, self.last = list(getattr(transform, "transforms", ())), []
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
        with torch.random.fork_rng(devices=[]):         # without workers this is the caller's process: leave its stream alone
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


def train_batches(dataset, transform, batch_size, seed, first_step, last_step, rank=0, world=1, micro_steps=1, workers=0):
    """Yields this rank's micro-batches (x, y) of the steps first_step .. last_step - 1, micro_steps of them per step.

    batch_size is the global one: step s of epoch e takes the positions [k * batch_size, (k + 1) * batch_size) of the epoch's
    order, k = s - e * steps_per_epoch; each rank takes an equal contiguous slice, and each micro-batch an equal part of it.
    Raises BadInput if the batch exceeds the set or cannot be shared out equally.
    """
    steps_per_epoch(len(dataset), batch_size)
    if batch_size % (world * micro_steps):
        raise BadInput(f"--batch-size {batch_size} must be a multiple of {world * micro_steps} "
                       f"({world} processes x {micro_steps} micro-batches): change it or --micro-batch")
    positions = train_positions(len(dataset), batch_size, seed, first_step, last_step, rank, world, micro_steps)
    return load(Batches(dataset, transform, seed), positions, workers)


def train_positions(n, batch_size, seed, first_step, last_step, rank, world, micro_steps):
    share = batch_size // world
    for step in range(first_step, last_step):
        epoch, k = divmod(step, steps_per_epoch(n, batch_size))
        if k == 0 or step == first_step:
            order = epoch_order(n, seed, epoch)
        start = k * batch_size + rank * share
        for part in order[start:start + share].split(share // micro_steps):
            yield (epoch * n + part).tolist()


def eval_batches(dataset, transform, batch_size, rank=0, world=1, workers=0):
    """Yields (x, y) of the samples rank, rank + world, ...: over all ranks each sample once, so sums over ranks are exact."""
    mine = list(range(rank, len(dataset), world))
    return load(Batches(dataset, transform, seed=0), [mine[i:i + batch_size] for i in range(0, len(mine), batch_size)], workers)


def load(batches, positions, workers):
    """One pass over `positions`, in their order. A run is one pass, so its workers start once."""
    # A generator of its own keeps DataLoader from drawing its workers' base seed from the caller's stream.
    loader = DataLoader(batches, batch_sampler=positions, collate_fn=default_convert, num_workers=workers,
                        pin_memory=torch.cuda.is_available(), generator=torch.Generator())
    try:
        yield from loader
    except BadInput as fault:                           # a worker's arrives as a whole traceback, which ends in the sentence
        fault.__traceback__ = None                      # lets the workers go; the garbage collector would need 5 s for each
        raise BadInput(str(fault).rpartition("BadInput: ")[2].strip()) from None
