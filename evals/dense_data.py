"""Images with a label at every pixel, or with boxes: the composites that ship in data/, and folders, known by their layout.

    dense = load_dense("composites")                     # or a path
    image, mask, boxes = dense.val[0]                    # uint8 (3, H, W); int64 (H, W), labels and 255 where there is none; float32 (n, 4)

VOC2012       JPEGImages/, ImageSets/, SegmentationClass/ (for trainaug also SegmentationClassAug/ and ImageSets/Segmentation/trainaug.txt), Annotations/
ADE20K        images/ and annotations/, in both training/ and validation/, as ADEChallengeData2016 unpacks
COCO-Stuff    images/ and annotations/ (or stuffthingmaps/, stuffthingmaps_trainids/), in both train2017/ and val2017/
COCO20k       images/train2014/, annotations/instances_train2014.json and coco_20k_filenames.txt, the list that the LOST and TokenCut repositories hold
your own      images/ and masks/, in both train/ and val/ or neither: to every image a PNG of the same name, 8 bits, grey or palette, whose values are the labels,
              255 where there is none; classes.txt beside them may name the classes, one a line
"""
import functools
import json
import os
import xml.etree.ElementTree
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

import data
from data import IMAGENET, ROOT
from runtime import BadInput, mix_seed

NAMES = ("composites", "composites-subgroups")
TASKS = ("segmentation", "discovery")
IGNORE = 255
COARSE = ("animal", "plant", "food", "transport", "clothing", "object")            # of the cutouts; what is none of the first five is an object
LAYOUTS = "lay it out as VOC2012, ADE20K, COCO-Stuff or COCO20k, or as images/ and masks/ (masks.py shows each)"
VOC = ("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog", "horse", "motorbike", "person",
       "pottedplant", "sheep", "sofa", "train", "tvmonitor")

# COCO-Stuff's hierarchy (H. Caesar et al., COCO-Stuff: Thing and Stuff Classes in Context, CVPR 2018): its 27 inner nodes are the coarse classes of IIC, PiCIE
# and STEGO, here in their order. A thing's id counts on from the first of its node, with what COCO later removed (-). All stuff, in alphabetical order, is 92 to 182.
THINGS = {
    "electronic-things": (72, "tv, laptop, mouse, remote, keyboard, cell phone"),
    "appliance-things": (78, "microwave, oven, toaster, sink, refrigerator, -blender"),
    "food-things": (52, "banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake"),
    "furniture-things": (62, "chair, couch, potted plant, bed, -mirror, dining table, -window, -desk, toilet, -door"),
    "indoor-things": (84, "book, clock, vase, scissors, teddy bear, hair drier, toothbrush, -hair brush"),
    "kitchen-things": (44, "bottle, -plate, wine glass, cup, fork, knife, spoon, bowl"),
    "accessory-things": (26, "-hat, backpack, umbrella, -shoe, -eye glasses, handbag, tie, suitcase"),
    "animal-things": (16, "bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe"),
    "outdoor-things": (10, "traffic light, fire hydrant, -street sign, stop sign, parking meter, bench"),
    "person-things": (1, "person"),
    "sports-things": (34, "frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket"),
    "vehicle-things": (2, "bicycle, car, motorcycle, airplane, bus, train, truck, boat"),
}
STUFF = {
    "ceiling-stuff": "ceiling-other, ceiling-tile",
    "floor-stuff": "carpet, floor-marble, floor-other, floor-stone, floor-tile, floor-wood",
    "food-stuff": "food-other, fruit, salad, vegetable",
    "furniture-stuff": "cabinet, counter, cupboard, desk-stuff, door-stuff, furniture-other, light, mirror-stuff, shelf, stairs, table",
    "rawmaterial-stuff": "cardboard, metal, paper, plastic",
    "textile-stuff": "banner, blanket, cloth, clothes, curtain, mat, napkin, pillow, rug, textile-other, towel",
    "wall-stuff": "wall-brick, wall-concrete, wall-other, wall-panel, wall-stone, wall-tile, wall-wood",
    "window-stuff": "window-blind, window-other",
    "building-stuff": "bridge, building-other, house, roof, skyscraper, tent",
    "ground-stuff": "dirt, gravel, ground-other, mud, pavement, platform, playingfield, railroad, road, sand, snow",
    "plant-stuff": "branch, bush, flower, grass, leaves, moss, plant-other, straw, tree",
    "sky-stuff": "clouds, sky-other",
    "solid-stuff": "hill, mountain, rock, solid-other, stone, wood",
    "structural-stuff": "cage, fence, net, railing, structural-other",
    "water-stuff": "fog, river, sea, water-other, waterdrops",
}


# -------------------------------------------------------------------------------------------------------------- data sets
class Dense(Dataset):
    """images: uint8 (N, 3, H, W) or N paths; masks: uint8 (N, H, W), N paths, or None; boxes: N times float32 (n, 4), or None where the set has none.

    Item: (image uint8 (3, H, W), mask int64 (H, W) of labels and 255 where there is none, or None, boxes float32 (n, 4)). A box is x0, y0, x1, y1 in pixels
    of the image as it is stored, half-open: x1 - x0 is its width. table: int64 (256,), the label of each value in the mask files, -1 where there must be none.
    """

    def __init__(self, images, masks, boxes=None, table=None):
        self.images, self.masks, self.boxes, self.table = images, masks, boxes, table
        self.in_memory = isinstance(images, torch.Tensor)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        boxes = torch.empty(0, 4) if self.boxes is None else self.boxes[i]
        if self.in_memory:
            return self.images[i], self.masks[i].long(), boxes
        image, mask = data.read_rgb(self.images[i]), None if self.masks is None else read_mask(self.masks[i], self.table)
        if mask is not None and mask.shape != image.shape[1:]:
            (height, width), (_, rows, cols) = mask.shape, image.shape
            raise BadInput(f"'{self.masks[i]}' is {width} x {height} pixels and its image {cols} x {rows}: give it the image's size")
        return image, mask, boxes


@dataclass
class DenseData:
    name: str
    train: Dense | None
    val: Dense
    classes: list          # names, index = label
    size: int | None       # side of the square images in memory; None for files, whose images differ
    mean: list             # per channel, of pixels in 0..1
    std: list
    in_chans: int = 3
    ignore: int = IGNORE


def load_dense(name_or_path, task="segmentation", classes=27, ids=None):
    """The set of that name (one of NAMES), or the folder at that path. Returns DenseData; its `name` says which list or classes of a folder were taken.

    task: "segmentation", or "discovery", which needs boxes and no training part: VOC2012 gives its trainval images and all their boxes, difficult ones too, and
    COCO its 20k subset without crowds, both as LOST and TokenCut do; in your own masks every label but 0 and 255 has one box. classes: of COCO-Stuff, 27 or 171.
    ids: the list of COCO20k, where it is not in the folder. Raises BadInput for an unknown name, a layout that is none of the above, and whatever is missing in it.
    """
    if task not in TASKS or classes not in (27, 171):
        raise ValueError(f"the task is one of {', '.join(TASKS)} and COCO-Stuff has 27 or 171 classes, not '{task}' and {classes}")
    name = str(name_or_path)
    if name in NAMES:
        train, val, names = composite_sets("subgroup" if name.endswith("subgroups") else "group")
        mean, std = data.pixel_statistics(train)
        return DenseData(name, train, val, names, train.images.shape[-1], mean, std)
    folder = data.as_folder(name)
    if not folder:
        raise BadInput(f"--data '{name}' is neither a folder nor one of {', '.join(NAMES)}: check the spelling or the path")
    inner = (folder / part for part in ("VOC2012", "VOCdevkit/VOC2012", "ADEChallengeData2016"))        # what the archives unpack to
    root = next((path for path in inner if path.is_dir()), folder)
    if (root / "JPEGImages").is_dir():
        title, train, val, names = voc(root, task)
    elif task == "discovery" and coco_images(root, "train2014").is_dir():
        title, train, val, names = coco20k(root, ids)
    elif (root / "images").is_dir() and (root / "masks").is_dir():
        title, train, val, names = own_folder(root, task)
    elif (root / "annotations" / "validation").is_dir():
        title, train, val, names = ade20k(root)
    elif coco_images(root, "val2017").is_dir():
        title, train, val, names = coco_stuff(root, classes)
    else:
        raise BadInput(f"the layout of '{name}' is none that is known: {LAYOUTS}")
    if task == "discovery" and val.boxes is None:
        raise BadInput(f"'{name}' has no boxes of objects, so there is nothing to discover: give VOC2012, COCO20k, a folder with images/ and masks/, or composites")
    return DenseData(title, train, val, names, None, *IMAGENET)


# -------------------------------------------------------------------------------------------------------------- composites
def cutouts():
    """(591 cutouts, uint8 RGBA (591, 4, 64, 64), their subgroups)."""
    drawings, info = data.read_sheet("cutouts_fluent3d_64.webp")
    return drawings, info["subgroup"]


def coarse(subgroup):
    return next((name for name in COARSE if subgroup.startswith(name)), "object")


@functools.cache                                                 # seconds to make and some 50 MB, which every label shares
def composites():
    """For training and validation: (images uint8 (N, 3, 64, 64), where the cutout is, bool (N, 64, 64), which one it is, int64 (N,)). Always the same.

    Six composites of a cutout for training, four for validation, one after the other; every fifth cutout of a coarse class and every fifth photograph is kept
    for validation.
    """
    drawings, subgroups = cutouts()
    parts = data.split_by_class(torch.tensor([COARSE.index(coarse(name)) for name in subgroups]), 0.2)
    photos = [data.read_rgb(path).float() for path in sorted((ROOT / "photos").glob("*.jpg"))]
    backgrounds, made = ([p for i, p in enumerate(photos) if i % 5 < 4], photos[4::5]), []
    for split, copies, members, behind in zip(("train", "val"), (6, 4), parts, backgrounds):
        generator, which = torch.Generator().manual_seed(mix_seed("composites", split)), members.repeat_interleave(copies)
        pasted = [data.paste(drawings[i].float(), behind, generator, 64, 64 // 3) for i in which.tolist()]
        made.append((*(torch.stack(part) for part in zip(*pasted)), which))
    return made


def composite_sets(label="group"):
    """(train, val, classes) of cutouts at random size and place on random pieces of photographs, where the class of every pixel is known.

    label: "group" (COARSE) or the finer "subgroup", which leaves the images as they are. Class 0 is the background.
    """
    subgroups = cutouts()[1]
    kinds = [coarse(name) for name in subgroups] if label == "group" else subgroups
    names = list(COARSE) if label == "group" else list(dict.fromkeys(subgroups))
    labels = torch.tensor([names.index(kind) + 1 for kind in kinds], dtype=torch.uint8)
    sets = [Dense(images, where * labels[which][:, None, None], [tight_box(mask)[None] for mask in where]) for images, where, which in composites()]
    return *sets, ["background", *names]


def tight_box(mask):
    """The smallest box around the True pixels of a bool (H, W): float32 (4,)."""
    y, x = (mask.any(axis).nonzero() for axis in (1, 0))
    return torch.stack([x[0, 0], y[0, 0], x[-1, 0] + 1, y[-1, 0] + 1]).float()


# ---------------------------------------------------------------------------------------------------------------- folders
def read_mask(path, table=None):
    """The mask file's values, through `table`: int64 (H, W). Raises BadInput for a file that is damaged, holds colours, or a label that does not exist."""
    try:
        with Image.open(path) as image:
            mode, values = image.mode, np.array(image)               # of a palette image these are the indices
    except Exception as fault:                                       # a damaged file makes Pillow raise any of a dozen types
        raise BadInput(f"cannot read mask '{path}' ({type(fault).__name__}): replace or remove the file") from fault
    if mode not in ("1", "L", "P"):
        raise BadInput(f"mask '{path}' is of Pillow's mode {mode}, not of 8 bits, grey or palette: save the labels themselves, not their colours")
    mask = torch.from_numpy(values).long()
    mask = mask if table is None else table[mask]
    if mask.min() < 0:
        raise BadInput(f"mask '{path}' holds the value {int(values[mask.numpy() < 0].max())}, which is no label of this data set: replace or remove the file")
    return mask


def label_table(values):
    """int64 (256,): the index of each value in `values`, 255 for 255, else -1."""
    table = torch.full((256,), -1)
    table[IGNORE] = IGNORE
    table[torch.as_tensor(values)] = torch.arange(len(values))
    return table


def listing(folder, extensions=IMG_EXTENSIONS):
    """{name without ending: path} of the images in a folder, in alphabetical order."""
    if not folder.is_dir():
        raise BadInput(f"there is no folder '{folder}': {LAYOUTS}")
    names = [name for name in sorted(os.listdir(folder)) if name.lower().endswith(tuple(extensions)) and not name.startswith(".")]
    found = {os.path.splitext(name)[0]: folder / name for name in names}
    if len(found) < len(names):
        twice = next(name for name in names if found[os.path.splitext(name)[0]].name != name)
        raise BadInput(f"'{folder}' has both {twice} and {found[os.path.splitext(twice)[0]].name}, and one mask cannot be of two: rename or remove one")
    if not found:
        raise BadInput(f"'{folder}' holds no {extensions[0][1:]} files: {LAYOUTS}")
    return found


def pick(folder, names, source, extensions=IMG_EXTENSIONS):
    """The files of those names in the folder; `source` tells who asks for them."""
    found = listing(folder, extensions)
    missing = [name for name in names if name not in found]
    if missing:
        raise BadInput(f"'{folder}' lacks {len(missing)} of the {len(names)} files that {source} asks for, such as {missing[0]}: add them")
    return [found[name] for name in names]


def pairs(images, masks, names=None, source=None, ending=""):
    """(image paths, mask paths) of those names, or of all images: each has its mask, a PNG, whose name may have an `ending` more."""
    names, source = names or list(listing(images)), source or f"'{images}'"
    return pick(images, names, source), pick(masks, [name + ending for name in names], source, (".png",))


def read_lines(path):
    """The lines of a text file that are not empty."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as fault:
        raise BadInput(f"cannot read '{path}' ({type(fault).__name__}): it comes with the data set, unpack it anew") from fault
    if not lines:
        raise BadInput(f"'{path}' is empty: it comes with the data set, unpack it anew")
    return lines


def read_list(path):
    """The names of the images that a text file lists in its first column, without folder and ending."""
    return [Path(line.split()[0]).stem for line in read_lines(path)]


def voc(root, task):
    images, lists, masks = root / "JPEGImages", root / "ImageSets" / "Segmentation", root / "SegmentationClass"
    if task == "discovery":
        source = root / "ImageSets" / "Main" / "trainval.txt"
        names = read_list(source)
        boxes = [voc_boxes(root / "Annotations" / f"{name}.xml") for name in names]
        return "VOC2012 trainval", None, Dense(pick(images, names, f"'{source}'"), None, boxes), list(VOC)
    augmented = (lists / "trainaug.txt").is_file() and (root / "SegmentationClassAug").is_dir()
    which, train_masks = ("trainaug", root / "SegmentationClassAug") if augmented else ("train", masks)
    parts = [Dense(*pairs(images, folder, read_list(lists / f"{split}.txt"), f"'{lists / split}.txt'"), table=label_table(range(len(VOC))))
             for split, folder in ((which, train_masks), ("val", masks))]
    return f"VOC2012 {which}", *parts, list(VOC)


def voc_boxes(path):
    """All objects of a VOC annotation, float32 (n, 4). VOC counts pixels from 1 and includes the last one: (xmin - 1, ymin - 1, xmax, ymax) is half-open."""
    try:
        found = [[float(thing.find("bndbox").find(side).text) for side in ("xmin", "ymin", "xmax", "ymax")]      # not those of an object's parts
                 for thing in xml.etree.ElementTree.parse(path).getroot().findall("object")]
    except (OSError, xml.etree.ElementTree.ParseError, AttributeError, TypeError, ValueError) as fault:
        raise BadInput(f"cannot read the boxes in '{path}' ({type(fault).__name__}): replace the file") from fault
    return torch.tensor(found).reshape(-1, 4) - torch.tensor([1.0, 1.0, 0.0, 0.0])


def ade20k(root):
    """0 is what belongs to none of the 150 classes; objectInfo150.txt, which comes with the images, names them."""
    names = [str(i) for i in range(1, 151)]
    if (root / "objectInfo150.txt").is_file():
        names = [row.split("\t")[-1].strip() for row in read_lines(root / "objectInfo150.txt")[1:]]
        if len(names) != 150:
            raise BadInput(f"'{root / 'objectInfo150.txt'}' names {len(names)} classes instead of 150: replace or remove it")
    table = label_table(range(1, 151))
    table[0] = IGNORE
    train, val = (Dense(*pairs(root / "images" / split, root / "annotations" / split), table=table) for split in ("training", "validation"))
    return "ADE20K", train, val, names


def coco_images(root, split):
    return root / "images" / split if (root / "images" / split).is_dir() else root / split


def coco_classes(classes):
    """(names, the label of each value in a pixelmap, which is COCO's id - 1, the label of each train id, 0..170): both int64 (256,)."""
    fine = {first + i: (name, node) for node, (first, members) in THINGS.items() for i, name in enumerate(members.split(", "))}
    fine |= dict(enumerate(sorted((name, node) for node, members in STUFF.items() for name in members.split(", ")), 92))
    kept = [i for i in sorted(fine) if not fine[i][0].startswith("-")]
    nodes = [*THINGS, *STUFF]
    names = nodes if classes == 27 else [fine[i][0] for i in kept]
    labels = torch.tensor([nodes.index(fine[i][1]) for i in kept]) if classes == 27 else torch.arange(len(kept))
    by_value, by_train_id = label_table([i - 1 for i in kept]), label_table(range(len(kept)))
    padded = torch.cat([labels, torch.full((256 - len(labels),), IGNORE)])             # 255 stays 255
    return names, *(torch.where(table < 0, -1, padded[table]) for table in (by_value, by_train_id))


def coco_stuff(root, classes):
    names, by_value, by_train_id = coco_classes(classes)
    parts = {}
    for split in ("train2017", "val2017"):
        images = coco_images(root, split)
        folder = next((root / kind / split for kind in ("stuffthingmaps", "annotations", "stuffthingmaps_trainids") if (root / kind / split).is_dir()), None)
        if not folder:
            raise BadInput(f"'{root}' has no pixelmaps: unpack stuffthingmaps_trainval2017.zip to stuffthingmaps/{split}/*.png")
        listed = listing(folder, (".png",))
        ending = "_labelTrainIds" if all(name.endswith("_labelTrainIds") for name in listed) else ""           # as mmsegmentation converts them
        by_train = ending or folder.parent.name == "stuffthingmaps_trainids"
        parts[split] = Dense(*pairs(images, folder, ending=ending), table=by_train_id if by_train else by_value)
    return f"COCO-Stuff {classes}", parts["train2017"], parts["val2017"], names


def coco20k(root, ids=None):
    """The boxes of the images that the list names, without crowds and, as in LOST, rounded to whole pixels."""
    places = [Path(ids)] if ids else [folder / "coco_20k_filenames.txt" for folder in (root, root / "annotations", root.parent)]
    source = next((path for path in places if path.is_file()), None)
    if not source:
        raise BadInput(f"there is no '{places[0]}', the list of COCO20k's images: take it from the folder datasets/ of the LOST or TokenCut repository")
    names, annotations = read_list(source), root / "annotations" / "instances_train2014.json"
    images = pick(coco_images(root, "train2014"), names, f"'{source}'")
    boxes = {name: [] for name in names}
    try:
        content = json.loads(annotations.read_text(encoding="utf-8"))
        name_of = {image["id"]: Path(image["file_name"]).stem for image in content["images"]}
        for thing in content["annotations"]:
            name = name_of.get(thing["image_id"])
            if name in boxes and not thing.get("iscrowd"):
                x, y, width, height = thing["bbox"]
                boxes[name].append([x, y, x + width, y + height])
        names_ = [category["name"] for category in content["categories"]]
    except (OSError, KeyError, TypeError, ValueError) as fault:
        raise BadInput(f"cannot read '{annotations}' ({type(fault).__name__}): unpack annotations_trainval2014.zip there") from fault
    return "COCO20k", None, Dense(images, None, [torch.tensor(boxes[name]).reshape(-1, 4).round() for name in names]), names_


def own_folder(root, task):
    splits = [split for split in ("train", "val") if (root / "images" / split).is_dir()]
    if splits == ["train"]:
        raise BadInput(f"'{root / 'images'}' has train/ and no val/: {LAYOUTS}")
    files = {split: pairs(root / "images" / split, root / "masks" / split) for split in splits} or {"val": pairs(root / "images", root / "masks")}
    if (root / "classes.txt").is_file():
        names = read_lines(root / "classes.txt")
    else:                                                            # then the largest label of all tells how many there are
        largest = max(int(torch.where(mask == IGNORE, -1, mask).max()) for _, masks in files.values() for mask in map(read_mask, masks))
        names = [str(i) for i in range(largest + 1)]
    if len(names) == 1:
        raise BadInput(f"the masks of '{root}' tell only one class apart, as {IGNORE} stands for no label: save the pixels of an object as 1, or name the classes in classes.txt")
    if not 1 <= len(names) <= IGNORE:
        raise BadInput(f"'{root}' has {len(names)} classes, where 1 to {IGNORE} are possible: 0 to {IGNORE - 1} are labels and {IGNORE} stands for no label")
    table = label_table(range(len(names)))
    parts = {split: Dense(*paths, table=table) for split, paths in files.items()}
    if task == "discovery":
        parts = {"val": Dense(*files["val"], [label_boxes(read_mask(path, table)) for path in files["val"][1]], table)}
    return root.resolve().name, parts.get("train"), parts["val"], names


def label_boxes(mask):
    """The tight box of each label in the mask but 0 and 255: float32 (n, 4)."""
    boxes = [tight_box(mask == label) for label in mask.unique().tolist() if label not in (0, IGNORE)]
    return torch.stack(boxes) if boxes else torch.empty(0, 4)
