"""Images with a label at every pixel, or with boxes: the composites, and folders, known by their layout.

    dense = load_dense("composites")           # or a path
    image, mask, boxes = dense.val[0]          # uint8 (3, H, W); int64 (H, W), 255: none; float32 (n, 4)

VOC2012      JPEGImages/, ImageSets/, SegmentationClass/, Annotations/; for trainaug also
             SegmentationClassAug/ and ImageSets/Segmentation/trainaug.txt
ADE20K       images/ and annotations/, in both training/ and validation/, as ADEChallengeData2016 unpacks
COCO-Stuff   images/ (or none) and stuffthingmaps/ (or annotations/), in both train2017/ and val2017/
COCO20k      images/train2014/, annotations/instances_train2014.json, and coco_20k_filenames.txt, the
             list that the LOST and TokenCut repositories hold
your own     images/ and masks/, in both train/ and val/ or neither: to every image a PNG of the same
             name, 8 bits, grey or palette, whose values are the labels, 255 where there is none;
             classes.txt beside them may name the classes, one a line
"""
import json
import os
import xml.etree.ElementTree
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

import data
import probe
from runtime import BadInput

NAMES = ("composites", "composites-subgroups")
IGNORE = 255
LAYOUTS = "lay it out as the head of evals/dense_data.py shows"
REMEDY = "give a run of train_vit.py, train_dino.py or train_mae.py"
VOC = ("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair",
       "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa",
       "train", "tvmonitor")

# COCO-Stuff's hierarchy (Caesar et al., COCO-Stuff: Thing and Stuff Classes in Context, CVPR 2018): its
# 27 inner nodes are the coarse classes of IIC, PiCIE and STEGO, in their order. A thing's id counts
# on from the first of its node, with what COCO later removed (-). All stuff, by alphabet, is 92 to 182.
THINGS = {
    "electronic-things": (72, "tv, laptop, mouse, remote, keyboard, cell phone"),
    "appliance-things": (78, "microwave, oven, toaster, sink, refrigerator, -blender"),
    "food-things": (52, "banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut, "
                        "cake"),
    "furniture-things": (62, "chair, couch, potted plant, bed, -mirror, dining table, -window, -desk, "
                             "toilet, -door"),
    "indoor-things": (84, "book, clock, vase, scissors, teddy bear, hair drier, toothbrush, "
                          "-hair brush"),
    "kitchen-things": (44, "bottle, -plate, wine glass, cup, fork, knife, spoon, bowl"),
    "accessory-things": (26, "-hat, backpack, umbrella, -shoe, -eye glasses, handbag, tie, suitcase"),
    "animal-things": (16, "bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe"),
    "outdoor-things": (10, "traffic light, fire hydrant, -street sign, stop sign, parking meter, bench"),
    "person-things": (1, "person"),
    "sports-things": (34, "frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, "
                          "skateboard, surfboard, tennis racket"),
    "vehicle-things": (2, "bicycle, car, motorcycle, airplane, bus, train, truck, boat"),
}
STUFF = {
    "ceiling-stuff": "ceiling-other, ceiling-tile",
    "floor-stuff": "carpet, floor-marble, floor-other, floor-stone, floor-tile, floor-wood",
    "food-stuff": "food-other, fruit, salad, vegetable",
    "furniture-stuff": "cabinet, counter, cupboard, desk-stuff, door-stuff, furniture-other, light, "
                       "mirror-stuff, shelf, stairs, table",
    "rawmaterial-stuff": "cardboard, metal, paper, plastic",
    "textile-stuff": "banner, blanket, cloth, clothes, curtain, mat, napkin, pillow, rug, "
                     "textile-other, towel",
    "wall-stuff": "wall-brick, wall-concrete, wall-other, wall-panel, wall-stone, wall-tile, wall-wood",
    "window-stuff": "window-blind, window-other",
    "building-stuff": "bridge, building-other, house, roof, skyscraper, tent",
    "ground-stuff": "dirt, gravel, ground-other, mud, pavement, platform, playingfield, railroad, road, "
                    "sand, snow",
    "plant-stuff": "branch, bush, flower, grass, leaves, moss, plant-other, straw, tree",
    "sky-stuff": "clouds, sky-other",
    "solid-stuff": "hill, mountain, rock, solid-other, stone, wood",
    "structural-stuff": "cage, fence, net, railing, structural-other",
    "water-stuff": "fog, river, sea, water-other, waterdrops",
}


# -------------------------------------------------------------------------------------------------------
# data sets

class Dense(Dataset):
    """images: uint8 (N, 3, H, W) or N paths; masks: uint8 (N, H, W), N paths, or None; boxes: N times
    float32 (n, 4), or None.

    Item: (image uint8 (3, H, W), mask int64 (H, W) of labels or None, boxes float32 (n, 4)). A box is
    x0, y0, x1, y1 in pixels of the upright image, half-open: x1 - x0 is its width. table: int64 (256,),
    the label of each value in the mask files, -1 where there must be none."""

    def __init__(self, images, masks, boxes=None, table=None):
        self.images, self.masks, self.boxes, self.table = images, masks, boxes, table
        self.in_memory = isinstance(images, torch.Tensor)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        boxes = torch.empty(0, 4) if self.boxes is None else self.boxes[i]
        if self.in_memory:
            return self.images[i], self.masks[i].long(), boxes
        image, mask = data.read_rgb(self.images[i]), None
        if self.masks is not None:
            mask = read_mask(self.masks[i], self.table)
            if mask.shape != image.shape[1:]:
                raise BadInput(f"'{self.masks[i]}' has {tuple(mask.shape)} pixels and its image "
                               f"{tuple(image.shape[1:])}: give it the image's size")
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


def load_dense(name_or_path, task="segmentation", classes=27, ids=None):
    """The set of that name (one of NAMES), or the folder at that path. Returns DenseData.

    task: "segmentation", or "discovery", which needs boxes and no training part. VOC2012 then gives its
    trainval images and all boxes, difficult ones too, and COCO its 20k subset without crowds, both as
    LOST and TokenCut do; in your own masks every label but 0 and 255 has one box. classes: of
    COCO-Stuff, 27 or 171. ids: the list of COCO20k, where it is not in the folder. Raises BadInput
    for an unknown name or layout, and for what is missing in it."""
    name = str(name_or_path)
    if name in NAMES:
        train, val, names = composite_sets("subgroup" if name.endswith("subgroups") else "group")
        return DenseData(name, train, val, names, train.images.shape[-1], *data.pixel_statistics(train))
    folder = data.as_folder(name)
    if not folder:
        raise BadInput(f"--data '{name}' is neither a folder nor one of {', '.join(NAMES)}")
    inner = (folder / part for part in ("VOC2012", "VOCdevkit/VOC2012", "ADEChallengeData2016"))
    root = next((path for path in inner if path.is_dir()), folder)         # what the archives unpack to
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
        raise BadInput(f"'{name}' has no boxes of objects: {LAYOUTS}, but ADE20K and COCO-Stuff")
    return DenseData(title, train, val, names, None, *data.IMAGENET)


def composite_sets(label):
    """(train, val, classes) of `data.composites` with masks and boxes. Class 0 is the background.

    label: "group" or the finer "subgroup", which leaves the images as they are."""
    *sets, names = data.composites(label)
    parts = []
    for images, (_, where, _) in zip(sets, data.pasted_cutouts()[0]):
        masks = where * (images.labels + 1).to(torch.uint8)[:, None, None]
        parts.append(Dense(images.images, masks, [tight_box(mask)[None] for mask in where]))
    return *parts, ["background", *names]


def tight_box(mask):
    """The smallest box around the True pixels of a bool (H, W): float32 (4,)."""
    y, x = mask.nonzero().unbind(1)
    return torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1]).float()


# -------------------------------------------------------------------------------------------------------
# files

def read_mask(path, table=None):
    """The mask file's values, through `table`: int64 (H, W). Raises BadInput for a file that is damaged,
    holds colours, or a label that does not exist."""
    try:
        with Image.open(path) as image:
            mode, values = image.mode, np.array(image)  # of a palette image these are the indices
    except Exception as fault:                          # Pillow raises any of a dozen types
        raise BadInput(f"cannot read mask '{path}' ({type(fault).__name__}): replace it") from fault
    if mode not in ("1", "L", "P"):
        raise BadInput(f"mask '{path}' is of Pillow's mode {mode}, not 8 bits, grey or palette: save "
                       "the labels, not their colours")
    mask = torch.from_numpy(values).long()
    mask = mask if table is None else table[mask]
    if mask.min() < 0:
        value = int(values[mask.numpy() < 0].max())
        raise BadInput(f"mask '{path}' holds the value {value}, which is no label of its set: replace")
    return mask


def label_table(values):
    """int64 (256,): the index of each value in `values`, 255 for 255, else -1."""
    table = torch.full((256,), -1)
    table[IGNORE] = IGNORE
    table[torch.as_tensor(values)] = torch.arange(len(values))
    return table


def list_images(folder, extensions=IMG_EXTENSIONS):
    """{name without ending: path} of the images in a folder, by alphabet, without hidden files."""
    if not folder.is_dir():
        raise BadInput(f"there is no folder '{folder}': {LAYOUTS}")
    found = {}
    for name in sorted(os.listdir(folder)):
        stem = os.path.splitext(name)[0]
        if name.startswith(".") or not name.lower().endswith(tuple(extensions)):
            continue
        if stem in found:
            raise BadInput(f"'{folder}' has both {found[stem].name} and {name}: remove one")
        found[stem] = folder / name
    if not found:
        raise BadInput(f"'{folder}' holds no {extensions[0][1:]} files: {LAYOUTS}")
    return found


def named_images(folder, names, source, extensions=IMG_EXTENSIONS):
    """The files of those names in the folder; `source` tells who asks for them."""
    found = list_images(folder, extensions)
    missing = [name for name in names if name not in found]
    if missing:
        raise BadInput(f"'{folder}' lacks {len(missing)} of the {len(names)} files that {source} asks "
                       f"for, such as {missing[0]}: add them")
    return [found[name] for name in names]


def image_pairs(images, masks, names=None, source=None):
    """(image paths, mask paths) of those names, or of all images; masks are PNGs of the same names."""
    names, source = names or list(list_images(images)), source or f"'{images}'"
    return named_images(images, names, source), named_images(masks, names, source, (".png",))


def read_lines(path):
    """The lines of a text file that are not empty."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as fault:
        raise BadInput(f"cannot read '{path}' ({type(fault).__name__}): unpack the set anew") from fault
    if not lines:
        raise BadInput(f"'{path}' is empty: unpack the data set anew")
    return lines


def read_names(path):
    """The names of the images that a text file lists in its first column, without folder and ending."""
    return [Path(line.split()[0]).stem for line in read_lines(path)]


# -------------------------------------------------------------------------------------------------------
# layouts: (title, train, val, classes) of a folder

def voc(root, task):
    images, lists, masks = (root / path for path in ("JPEGImages", "ImageSets", "SegmentationClass"))
    if task == "discovery":
        source = lists / "Main" / "trainval.txt"
        names = read_names(source)
        boxes = [voc_boxes(root / "Annotations" / f"{name}.xml") for name in names]
        val = Dense(named_images(images, names, f"'{source}'"), None, boxes)
        return "VOC2012 trainval", None, val, list(VOC)
    lists, which, train_masks = lists / "Segmentation", "train", masks
    if (lists / "trainaug.txt").is_file() and (root / "SegmentationClassAug").is_dir():
        which, train_masks = "trainaug", root / "SegmentationClassAug"
    parts = []
    for split, folder in ((which, train_masks), ("val", masks)):
        source = lists / f"{split}.txt"
        pairs = image_pairs(images, folder, read_names(source), f"'{source}'")
        parts.append(Dense(*pairs, table=label_table(range(len(VOC)))))
    return f"VOC2012 {which}", *parts, list(VOC)


def voc_boxes(path):
    """All objects of a VOC annotation, float32 (n, 4).

    VOC counts pixels from 1 and includes the last: (xmin - 1, ymin - 1, xmax, ymax) is half-open."""
    try:
        objects = xml.etree.ElementTree.parse(path).getroot().findall("object")         # not their parts
        sides = ("xmin", "ymin", "xmax", "ymax")
        found = [[float(thing.find("bndbox").find(side).text) for side in sides] for thing in objects]
    except (OSError, xml.etree.ElementTree.ParseError, AttributeError, TypeError, ValueError) as fault:
        raise BadInput(f"cannot read boxes in '{path}' ({type(fault).__name__}): replace it") from fault
    return torch.tensor(found).reshape(-1, 4) - torch.tensor([1.0, 1.0, 0.0, 0.0])


def ade20k(root):
    """0 is what belongs to none of the 150 classes; objectInfo150.txt, which comes along, names them."""
    names = [str(i) for i in range(1, 151)]
    if (root / "objectInfo150.txt").is_file():
        names = [row.split("\t")[-1].strip() for row in read_lines(root / "objectInfo150.txt")[1:]]
        if len(names) != 150:
            raise BadInput(f"'{root}' has an objectInfo150.txt of {len(names)} classes: replace it")
    table = label_table(range(1, 151))
    table[0] = IGNORE
    train, val = (Dense(*image_pairs(root / "images" / split, root / "annotations" / split), table=table)
                  for split in ("training", "validation"))
    return "ADE20K", train, val, names


def coco_images(root, split):
    """The folder of images, with or without images/ above it."""
    return root / "images" / split if (root / "images" / split).is_dir() else root / split


def coco_classes(classes):
    """(names, the label of each value in a pixelmap, which is COCO's id - 1: int64 (256,))."""
    fine = {first + i: (name, node) for node, (first, members) in THINGS.items()
            for i, name in enumerate(members.split(", "))}
    stuff = sorted((name, node) for node, members in STUFF.items() for name in members.split(", "))
    fine |= dict(enumerate(stuff, 92))
    kept = [i for i in sorted(fine) if not fine[i][0].startswith("-")]
    nodes, table = [*THINGS, *STUFF], label_table([i - 1 for i in kept])
    if classes == 27:
        known = torch.tensor([i - 1 for i in kept])
        table[known] = torch.tensor([nodes.index(fine[i][1]) for i in kept])
        return nodes, table
    return [fine[i][0] for i in kept], table


def coco_stuff(root, classes):
    names, table = coco_classes(classes)
    parts = []
    for split in ("train2017", "val2017"):
        folder = next((root / kind / split for kind in ("stuffthingmaps", "annotations")
                       if (root / kind / split).is_dir()), None)
        if not folder:
            raise BadInput(f"'{root}' has no stuffthingmaps/{split}/: unpack them there")
        parts.append(Dense(*image_pairs(coco_images(root, split), folder), table=table))
    return f"COCO-Stuff {classes}", *parts, names


def coco20k(root, ids=None):
    """The boxes of the images that the list names, without crowds and, as in LOST, in whole pixels."""
    places = [folder / "coco_20k_filenames.txt" for folder in (root, root / "annotations", root.parent)]
    places = [Path(ids)] if ids else places
    source = next((path for path in places if path.is_file()), None)
    if not source:
        raise BadInput(f"there is no '{places[0]}', the list of COCO20k's images: take it from "
                       "datasets/ of the LOST or TokenCut repository")
    names, annotations = read_names(source), root / "annotations" / "instances_train2014.json"
    images = named_images(coco_images(root, "train2014"), names, f"'{source}'")
    boxes = {name: [] for name in names}
    try:
        content = json.loads(annotations.read_text(encoding="utf-8"))
        name_of = {image["id"]: Path(image["file_name"]).stem for image in content["images"]}
        for thing in content["annotations"]:
            name = name_of.get(thing["image_id"])
            if name in boxes and not thing.get("iscrowd"):
                x, y, width, height = thing["bbox"]
                boxes[name].append([x, y, x + width, y + height])
        classes = [category["name"] for category in content["categories"]]
    except (OSError, KeyError, TypeError, ValueError) as fault:
        raise BadInput(f"cannot read '{annotations}' ({type(fault).__name__}): unpack "
                       "annotations_trainval2014.zip there") from fault
    boxes = [torch.tensor(boxes[name]).reshape(-1, 4).round() for name in names]
    return "COCO20k", None, Dense(images, None, boxes), classes


def own_folder(root, task):
    splits = [split for split in ("train", "val") if (root / "images" / split).is_dir()]
    if splits == ["train"]:
        raise BadInput(f"'{root / 'images'}' has train/ and no val/: {LAYOUTS}")
    files = {split: image_pairs(root / "images" / split, root / "masks" / split) for split in splits}
    files = files or {"val": image_pairs(root / "images", root / "masks")}
    if (root / "classes.txt").is_file():
        names = read_lines(root / "classes.txt")
    else:                                               # the largest label tells how many there are
        masks = (read_mask(path) for _, paths in files.values() for path in paths)
        largest = max(int(torch.where(mask == IGNORE, 0, mask).max()) for mask in masks)
        names = [str(i) for i in range(largest + 1)]
    if len(names) == 1:
        raise BadInput(f"the masks of '{root}' tell only one class apart, as {IGNORE} stands for none: "
                       "save an object's pixels as 1, or name the classes in classes.txt")
    table = label_table(range(len(names)))
    parts = {split: Dense(*paths, table=table) for split, paths in files.items()}
    if task == "discovery":
        boxes = [label_boxes(read_mask(path, table)) for path in files["val"][1]]
        parts = {"val": Dense(*files["val"], boxes, table)}
    return root.resolve().name, parts.get("train"), parts["val"], names


def label_boxes(mask):
    """The tight box of each label in the mask but 0 and 255: float32 (n, 4)."""
    labels = [label for label in mask.unique().tolist() if label not in (0, IGNORE)]
    return torch.stack([tight_box(mask == label) for label in labels]) if labels else torch.empty(0, 4)


# -------------------------------------------------------------------------------------------------------
# nets

def load_dense_net(path, args, dense):
    """(net, the run's args, the dense set in the pixel scale that the net is used to)."""
    net, saved = probe.load_net(path, remedy=REMEDY, raw=args.raw)
    mean, std = probe.pixel_scale(saved)
    return net, saved, replace(dense, mean=mean, std=std)
