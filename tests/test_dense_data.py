"""evals/dense_data.py: every layout in miniature, in its true file formats, with values by hand."""
import json

import numpy as np
import pytest
import torch
from PIL import Image

import data as D
from evals import dense_data as M
from runtime import BadInput


# -------------------------------------------------------------------------------------------------------
# composites
@pytest.fixture(scope="module")
def composites():
    return M.load_dense("composites")


def test_composites_have_one_object_each_and_a_tight_box_around_it(composites):
    assert composites.classes == ["background", *D.COARSE] and composites.size == 64
    for part in (composites.train, composites.val):
        assert part.images.dtype == part.masks.dtype == torch.uint8
        assert len(part) == len(part.boxes)
        for i in range(0, len(part), 7):
            image, mask, boxes = part[i]
            labels = [c for c in mask.unique().tolist() if c]
            rows, cols = np.nonzero(mask.numpy())
            assert len(labels) == 1 and 1 <= labels[0] <= 6 and mask.dtype == torch.int64
            assert boxes.tolist() == [[cols.min(), rows.min(), cols.max() + 1, rows.max() + 1]]
            assert image.equal(part.images[i])
    pixels = composites.train.images.double() / 255
    assert torch.tensor(composites.mean).allclose(pixels.mean((0, 2, 3)).float())
    assert torch.tensor(composites.std).allclose(pixels.std((0, 2, 3)).float(), atol=1e-4)


def test_finer_labels_leave_the_composites_as_they_are(composites):
    finer, images = M.load_dense("composites-subgroups"), D.load_images("composites-subgroups")
    assert len(finer.classes) == 35 and finer.classes[:2] == ["background", "animal-mammal"]
    for split in ("train", "val"):
        coarse, fine, flat = (getattr(parts, split) for parts in (composites, finer, images))
        assert coarse.images.equal(fine.images) and (coarse.masks > 0).equal(fine.masks > 0)
        assert fine.masks.flatten(1).amax(1).long().equal(flat.labels + 1)


# -------------------------------------------------------------------------------------------------------
# folders
def picture(path, width=8, height=6, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, quality=95)
    return path


def labels(path, values, mode="L"):
    """A mask file; mode P as VOC's: the values are indices into a palette of colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.array(values, dtype=np.uint8))
    if mode == "P":
        image.putpalette([(37 * i) % 256 for i in range(768)])
    image.save(path)
    assert Image.open(path).mode == mode
    return path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def says(path, *parts, **options):
    with pytest.raises(BadInput) as stop:
        dense = M.load_dense(path, **options)
        for part in (dense.train, dense.val):
            [part[i] for i in range(len(part or ()))]
    said = str(stop.value)
    assert "\n" not in said and all(part in said for part in parts), said
    return said


XML = "<annotation><size><width>8</width><height>6</height></size>{objects}</annotation>"
OBJECT = ("<object><name>person</name><difficult>{hard}</difficult><bndbox><xmax>{x1}</xmax>"
          "<xmin>{x0}</xmin><ymax>{y1}</ymax><ymin>{y0}</ymin></bndbox>{part}</object>")
PART = "<part><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"
VOC_MASK = [[0] * 8, [0, 255, 255, 255, 0, 0, 0, 0], [0, 255, 15, 255, 0, 0, 20, 0],
            [0, 255, 255, 255, 0, 0, 0, 0], [0] * 8, [0] * 8]


@pytest.fixture
def voc(tmp_path):
    """Four images: two for training, one of the augmented set, one for validation, one of boxes."""
    root = tmp_path / "VOCdevkit" / "VOC2012"
    for i, name in enumerate(("2007_000032", "2007_000033", "2008_000002", "2008_000008")):
        picture(root / "JPEGImages" / f"{name}.jpg", seed=i)
    labels(root / "SegmentationClass" / "2007_000032.png", VOC_MASK, "P")
    labels(root / "SegmentationClass" / "2007_000033.png", [[3] * 8] * 6, "P")
    segmentation = root / "ImageSets" / "Segmentation"
    write(segmentation / "train.txt", "2007_000032\n")
    write(segmentation / "val.txt", "2007_000033\n")
    write(root / "ImageSets" / "Main" / "trainval.txt", "2008_000008\n2007_000032\n")
    objects = (OBJECT.format(x0=1, y0=1, x1=8, y1=6, hard=1, part=PART)
               + OBJECT.format(x0=46.7, y0=2, x1=50, y1=4, hard=0, part=""))
    write(root / "Annotations" / "2008_000008.xml", XML.format(objects=objects))
    write(root / "Annotations" / "2007_000032.xml", XML.format(objects=""))
    return root


def test_voc_gives_palette_indices_the_ignored_border_and_its_two_lists(voc):
    dense = M.load_dense(voc)
    assert (dense.name, len(dense.train), len(dense.val), dense.size) == ("VOC2012 train", 1, 1, None)
    assert len(dense.classes) == 21
    assert [dense.classes[i] for i in (0, 15, 20)] == ["background", "person", "tvmonitor"]
    image, mask, boxes = dense.train[0]
    assert image.equal(D.read_rgb(voc / "JPEGImages" / "2007_000032.jpg"))
    assert mask.dtype == torch.int64 and mask.tolist() == VOC_MASK and boxes.shape == (0, 4)
    assert dense.val[0][1].eq(3).all()
    assert (dense.mean, dense.std) == D.IMAGENET


def test_voc_trains_on_the_augmented_list_where_it_is(voc):
    """The augmented masks are grey; DeepLab's list names an image and its mask a line, with folders."""
    names = "2007_000032", "2008_000002"
    lines = [f"/JPEGImages/{n}.jpg /SegmentationClassAug/{n}.png\n" for n in names]
    write(voc / "ImageSets" / "Segmentation" / "trainaug.txt", "".join(lines))
    assert M.load_dense(voc).name == "VOC2012 train", "a list without its masks"
    labels(voc / "SegmentationClassAug" / "2007_000032.png", [[1] * 8] * 6)
    labels(voc / "SegmentationClassAug" / "2008_000002.png", [[7] * 8] * 6)
    dense = M.load_dense(voc.parent.parent)                  # the folder that holds VOCdevkit will do
    assert (dense.name, len(dense.train), len(dense.val)) == ("VOC2012 trainaug", 2, 1)
    samples = dense.train[0], dense.train[1], dense.val[0]
    assert [int(mask.unique()) for _, mask, _ in samples] == [1, 7, 3]


def test_voc_boxes_count_from_zero_take_the_difficult_and_leave_out_parts(voc):
    dense = M.load_dense(voc, "discovery")
    assert (dense.name, dense.train, len(dense.val)) == ("VOC2012 trainval", None, 2)
    image, mask, boxes = dense.val[0]
    assert mask is None and image.equal(D.read_rgb(voc / "JPEGImages" / "2008_000008.jpg"))
    assert boxes.tolist()[0] == [0, 0, 8, 6], "(1, 1, width, height) is the whole image"
    assert boxes[1].allclose(torch.tensor([45.7, 1.0, 50.0, 4.0])), "some are no whole numbers"
    assert dense.val[1][2].shape == (0, 4)


def test_voc_that_is_incomplete_is_refused(voc):
    broken = voc / "Annotations" / "2008_000008.xml"
    odd = OBJECT.format(x0="one", y0=1, x1=2, y1=2, hard=0, part="")
    for text in ("<annotation>", XML.format(objects="<object></object>"), XML.format(objects=odd)):
        write(broken, text)
        says(voc, str(broken), "replace", task="discovery")
    broken.unlink()
    says(voc, str(broken), task="discovery")
    labels(voc / "SegmentationClass" / "2007_000033.png", [[21] * 8] * 6, "P")
    says(voc, "2007_000033.png", "21")
    labels(voc / "SegmentationClass" / "2007_000033.png", [[1] * 7] * 6, "P")
    says(voc, "2007_000033.png", "(6, 7)", "(6, 8)")
    (voc / "SegmentationClass" / "2007_000033.png").write_bytes(b"no image")
    says(voc, "2007_000033.png", "replace")
    (voc / "SegmentationClass" / "2007_000033.png").unlink()
    says(voc, "SegmentationClass", "val.txt", "2007_000033")
    write(voc / "ImageSets" / "Segmentation" / "val.txt", "\n")
    says(voc, "val.txt", "empty")
    (voc / "ImageSets" / "Segmentation" / "val.txt").unlink()
    says(voc, "val.txt")


@pytest.fixture
def ade(tmp_path):
    root = tmp_path / "ADEChallengeData2016"
    for split, name, values in (("training", "ADE_train_00000001", [[0, 1, 150, 7]] * 3),
                                ("validation", "ADE_val_00000001", [[150, 0, 0, 2]] * 3)):
        picture(root / "images" / split / f"{name}.jpg", 4, 3)
        labels(root / "annotations" / split / f"{name}.png", values)
    return root


def test_ade20k_ignores_zero_and_counts_its_classes_from_there(ade):
    dense = M.load_dense(ade)
    assert (dense.name, len(dense.classes)) == ("ADE20K", 150)
    assert dense.train[0][1].tolist() == [[255, 0, 149, 6]] * 3
    assert dense.val[0][1].tolist() == [[149, 255, 255, 1]] * 3
    lines = ["Idx\tRatio\tTrain\tVal\tName\n", *(f"{i}\t0.1\t9\t1\tclass, {i}\n" for i in range(1, 151))]
    write(ade / "objectInfo150.txt", "".join(lines))
    assert M.load_dense(ade.parent).classes[149] == "class, 150"


def test_ade20k_that_is_incomplete_or_asked_for_boxes_is_refused(ade):
    says(ade, str(ade), "no boxes", task="discovery")
    labels(ade / "annotations" / "validation" / "ADE_val_00000001.png", [[151] * 4] * 3)
    says(ade, "ADE_val_00000001.png", "151")
    write(ade / "objectInfo150.txt", "Idx\tName\n1\twall\n")
    says(ade, "objectInfo150.txt", "1 classes")
    (ade / "objectInfo150.txt").unlink()
    picture(ade / "images" / "training" / "ADE_train_00000002.jpg")
    says(ade, "annotations/training", "ADE_train_00000002", "1 of the 2")


# Of the hierarchy that COCO-Stuff's authors publish: (COCO's id, name, index among the 171, the coarse
# class that IIC, PiCIE and STEGO use), and how many ids each coarse class has
COCO_KNOWN = [
    (1, "person", 0, 9), (2, "bicycle", 1, 11), (13, "stop sign", 11, 8), (17, "cat", 15, 7),
    (27, "backpack", 24, 6), (44, "bottle", 39, 5), (67, "dining table", 60, 3), (72, "tv", 62, 0),
    (82, "refrigerator", 72, 1), (90, "toothbrush", 79, 4), (92, "banner", 80, 17),
    (96, "building-other", 84, 20), (106, "clouds", 94, 23), (124, "grass", 112, 22),
    (135, "mountain", 123, 24), (149, "road", 137, 21), (155, "sea", 143, 26),
    (177, "wall-wood", 165, 18), (181, "window-other", 169, 19), (182, "wood", 170, 24)]
COARSE_SIZES = [6, 5, 10, 6, 7, 7, 5, 10, 5, 1, 10, 8, 2, 6, 4, 11, 4, 11, 7, 2, 6, 11, 9, 2, 6, 5, 5]


def test_cocostuff_classes_are_those_of_its_authors():
    fine_names, fine = M.coco_classes(171)
    coarse_names, coarse = M.coco_classes(27)
    assert len(fine_names) == len(set(fine_names)) == 171 and len(coarse_names) == 27
    for identity, name, index, node in COCO_KNOWN:
        assert fine_names[index] == name and int(fine[identity - 1]) == index
        assert int(coarse[identity - 1]) == node
    removed = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83, 91}
    for table in (fine, coarse):
        assert {i + 1 for i in range(182) if table[i] < 0} == removed
        assert table[182:255].eq(-1).all() and int(table[255]) == 255
    assert [int((coarse[:182] == c).sum()) for c in range(27)] == COARSE_SIZES
    assert [coarse_names[i] for i in (9, 12, 26)] == ["person-things", "ceiling-stuff", "water-stuff"]


@pytest.fixture
def coco(tmp_path):
    root = tmp_path / "coco"
    for split, values in (("train2017", [[0, 181, 255, 95]] * 3), ("val2017", [[16, 16, 255, 134]] * 3)):
        picture(root / "images" / split / "000000000009.jpg", 4, 3)
        labels(root / "stuffthingmaps" / split / "000000000009.png", values)
    return root


def masks_of(dense):
    return dense.train[0][1].tolist(), dense.val[0][1].tolist()


def test_cocostuff_reads_pixelmaps(coco):
    dense = M.load_dense(coco)
    assert (dense.name, len(dense.classes)) == ("COCO-Stuff 27", 27)
    assert masks_of(dense) == ([[9, 24, 255, 20]] * 3, [[7, 7, 255, 24]] * 3)
    expected = [[0, 170, 255, 84]] * 3, [[15, 15, 255, 123]] * 3
    dense = M.load_dense(coco, classes=171)
    assert (dense.name, len(dense.classes)) == ("COCO-Stuff 171", 171) and masks_of(dense) == expected
    (coco / "stuffthingmaps").rename(coco / "annotations")
    for split in ("train2017", "val2017"):              # and images without the folder images/
        (coco / "images" / split).rename(coco / split)
    assert masks_of(M.load_dense(coco, classes=171)) == expected


def test_cocostuff_that_is_incomplete_is_refused(coco):
    says(coco, "no boxes", task="discovery")
    labels(coco / "stuffthingmaps" / "val2017" / "000000000009.png", [[200] * 4] * 3)
    says(coco, "000000000009.png", "200")
    (coco / "stuffthingmaps").rename(coco / "elsewhere")
    says(coco, str(coco), "stuffthingmaps")


@pytest.fixture
def coco2014(tmp_path):
    """Three images, of which the list names two, in its own order."""
    root = tmp_path / "coco"
    name = "COCO_train2014_{:012d}".format
    for i in (9, 25, 30):
        picture(root / "images" / "train2014" / f"{name(i)}.jpg", seed=i)
    boxes = [(9, [1.4, 2.6, 3.0, 2.0], 0), (25, [0, 0, 8, 6], 0), (30, [1, 1, 1, 1], 1),
             (30, [2, 0, 4.4, 6], 0), (30, [0, 0, 2, 2], 0)]
    write(root / "annotations" / "instances_train2014.json", json.dumps(dict(
        images=[dict(id=i, file_name=f"{name(i)}.jpg") for i in (9, 25, 30)],
        annotations=[dict(image_id=i, bbox=box, iscrowd=crowd) for i, box, crowd in boxes],
        categories=[dict(id=1, name="person"), dict(id=90, name="toothbrush")])))
    write(root / "coco_20k_filenames.txt", f"train2014/{name(30)}.jpg\ntrain2014/{name(9)}.jpg\n")
    return root


def test_coco20k_is_the_list_without_crowds(coco2014):
    dense = M.load_dense(coco2014, "discovery")
    assert (dense.name, dense.train, dense.classes) == ("COCO20k", None, ["person", "toothbrush"])
    assert [p.name[-6:-4] for p in dense.val.images] == ["30", "09"]
    assert dense.val[0][2].tolist() == [[2, 0, 6, 6], [0, 0, 2, 2]] and dense.val[0][1] is None
    assert dense.val[1][2].tolist() == [[1, 3, 4, 5]], "x, y, x + width, y + height, rounded"
    listed = write(coco2014.parent / "elsewhere.txt", "COCO_train2014_000000000025\n")
    assert M.load_dense(coco2014, "discovery", ids=listed).val[0][2].tolist() == [[0, 0, 8, 6]]


def test_coco20k_that_is_incomplete_is_refused(coco2014):
    listed = coco2014 / "coco_20k_filenames.txt"
    annotations = coco2014 / "annotations" / "instances_train2014.json"
    says(coco2014, "known", task="segmentation")
    write(listed, "train2014/COCO_train2014_000000000001.jpg\n")
    says(coco2014, "coco_20k_filenames.txt", "COCO_train2014_000000000001", task="discovery")
    write(listed, "train2014/COCO_train2014_000000000009.jpg\n")
    for text in ("{", "[]", '{"images": [], "annotations": [{"id": 1}], "categories": []}'):
        write(annotations, text)
        says(coco2014, str(annotations), task="discovery")
    annotations.unlink()
    says(coco2014, str(annotations), task="discovery")
    listed.unlink()
    says(coco2014, "coco_20k_filenames.txt", task="discovery")
    says(coco2014, "mine.txt", task="discovery", ids=coco2014 / "mine.txt")


OWN_MASK = [[0, 0, 0, 0], [0, 2, 2, 0], [1, 255, 2, 1]]


@pytest.fixture
def own(tmp_path):
    root = tmp_path / "leaves"
    for split, values, mode in (("train", [[0, 1, 3, 255]] * 3, "P"), ("val", OWN_MASK, "L")):
        picture(root / "images" / split / "a.jpg", 4, 3)
        labels(root / "masks" / split / "a.png", values, mode)
    return root


def test_a_folder_of_images_and_masks_counts_its_classes_or_reads_their_names(own):
    dense = M.load_dense(own)
    assert (dense.name, dense.classes) == ("leaves", ["0", "1", "2", "3"])
    assert masks_of(dense) == ([[0, 1, 3, 255]] * 3, OWN_MASK)
    assert dense.train[0][2].shape == (0, 4)
    write(own / "classes.txt", "soil\nstem\nleaf\nfruit\nroot\n")
    assert M.load_dense(own).classes == ["soil", "stem", "leaf", "fruit", "root"]
    boxes = M.load_dense(own, "discovery").val[0][2]
    assert boxes.tolist() == [[0, 2, 4, 3], [1, 1, 3, 3]], "of labels 1 and 2; 0 and 255 are no objects"
    for kind, name in (("images", "a.jpg"), ("masks", "a.png")):               # and without splits
        (own / kind / "val" / name).rename(own / kind / name)
        for split in ("train", "val"):
            (own / kind / split).rename(own.parent / f"{kind}-{split}")
    dense = M.load_dense(own)
    assert dense.train is None and len(dense.val) == 1


def test_masks_of_0_and_255_are_not_taken_for_a_perfect_set(own):
    """The usual export of binary masks: to read 255 as "no label" leaves the background alone."""
    for split in ("train", "val"):
        labels(own / "masks" / split / "a.png", [[0, 255, 255, 0]] * 3, "L")
    says(own, "only one class", "255", "as 1")


def test_hidden_files_are_no_images(own):
    for kind in ("images", "masks"):
        (own / kind / "val" / "._a.png").write_bytes(b"no image")
    assert len(M.load_dense(own).val) == 1


def test_two_images_of_one_name_are_refused(own):
    picture(own / "images" / "val" / "a.png", 4, 3)
    says(own, "images/val", "a.jpg", "a.png")


def test_a_folder_whose_masks_do_not_fit_is_refused(own):
    write(own / "classes.txt", "soil\nstem\nleaf\n")
    says(own, "masks/train/a.png", "the value 3")
    write(own / "classes.txt", "\n")
    says(own, "classes.txt", "empty")
    (own / "classes.txt").unlink()
    picture(own / "masks" / "val" / "a.png", 4, 3)
    says(own, "masks/val/a.png", "RGB")
    Image.fromarray(np.full((3, 4), 999, dtype=np.uint16)).save(own / "masks" / "val" / "a.png")
    says(own, "masks/val/a.png", "8 bits")
    (own / "masks" / "val" / "a.png").rename(own / "masks" / "val" / "b.png")
    says(own, "masks/val", "images/val", "such as a")
    (own / "masks" / "val" / "b.png").unlink()
    says(own, "masks/val", "no png")
    (own / "masks" / "val").rmdir()
    says(own, "no folder", "masks/val")
    (own / "images" / "val").rename(own / "images" / "validation")
    says(own, "images", "no val/")


def test_names_and_layouts_that_are_unknown_are_refused(tmp_path):
    says("composite", "'composite' is neither a folder nor one of composites, composites-subgroups")
    says(tmp_path, str(tmp_path), "dense_data.py")
