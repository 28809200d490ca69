"""data.py: a batch depends on (seed, step) and nothing else; every image is read as RGB; bad files are
found before training; the sets that ship are what they should be; bad input gets one sentence."""
import json
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image
from torchvision import datasets
from torchvision.transforms import v2

import data as D
import runtime
from runtime import BadInput
from test_runtime import launch_ranks


@pytest.fixture(scope="module")
def mnist():
    return D.load_images("mnist5k")


@pytest.fixture(scope="module")
def emoji():
    return D.load_images("emoji")


@pytest.fixture
def folder(tmp_path):
    """Two classes, three train images and one val image each, none of them square or of equal size."""
    for split, count in (("train", 3), ("val", 1)):
        for c, name in enumerate(("ant", "bee")):
            for i in range(count):
                pixels = np.full((20 + i, 30, 3), 40 * c + 10 * i, dtype=np.uint8)
                save(tmp_path / split / name / f"{i}.png", pixels)
    return tmp_path


def save(path, pixels, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path)


def numbered(n):
    """n images of 1 x 2 x 2 pixels whose value is their index."""
    index = torch.arange(n)
    pixels = index.to(torch.uint8)[:, None, None, None].expand(n, 1, 2, 2)
    return D.Images(pixels.contiguous(), index % 3)


RAW = v2.Compose([v2.ToDtype(torch.float32)])       # a pixel still says which image it is


def ids(batches):
    return [x[:, 0, 0, 0].int().tolist() for x, _ in batches]


def fingerprint(images):
    return [image.numpy().tobytes() for image in images]


# -------------------------------------------------------------------------------------------------------
# the sets
def test_mnist5k_is_balanced_and_in_range(mnist):
    assert (len(mnist.train), len(mnist.val)) == (4000, 1000)
    assert (mnist.in_chans, mnist.size, mnist.flip) == (1, 28, False)
    assert mnist.train.labels.bincount().tolist() == [400] * 10
    assert mnist.val.labels.bincount().tolist() == [100] * 10
    image, label = mnist.train[5]
    assert image.shape == (1, 28, 28) and image.dtype == torch.uint8 and isinstance(label, int)
    assert len(mnist.classes) == 10 and int(mnist.train.images.max()) == 255


def test_digits_use_the_whole_range_and_split_by_class():
    digits = D.load_images("digits8x8")
    assert len(digits.train) + len(digits.val) == 1797
    assert (digits.in_chans, digits.size, digits.flip) == (1, 8, False)
    assert (int(digits.train.images.min()), int(digits.train.images.max())) == (0, 255)
    counts = [part.labels.bincount() for part in (digits.train, digits.val)]
    share = counts[1] / sum(counts)
    assert ((share - 0.2).abs() < 0.01).all()


def read_info(artist):
    return json.loads((D.ROOT / f"emoji_{artist}_32.json").read_text(encoding="utf-8"))


def concepts_of(*sets):
    """For each set, the (name, artist) of its images, by a reading of the sheets of its own."""
    names_of = {}
    for artist in ("noto", "fluent3d"):
        info = read_info(artist)
        sheet = np.asarray(Image.open(D.ROOT / f"emoji_{artist}_32.png")).astype(float)
        white = 255 + (sheet[..., :3] - 255) * sheet[..., 3:] / 255
        for i, name in enumerate(info["names"]):
            row, col = divmod(i, info["cols"])
            tile = white[row * 32:row * 32 + 32, col * 32:col * 32 + 32]
            names_of[name, artist] = tile
    keys = list(names_of)
    tiles = np.stack(list(names_of.values())).reshape(len(keys), -1).astype(np.float32)
    result = []
    for images in sets:
        flat = images.images.permute(0, 2, 3, 1).reshape(len(images), -1).numpy().astype(np.float32)
        distance = (flat ** 2).sum(1)[:, None] - 2 * flat @ tiles.T + (tiles ** 2).sum(1)
        nearest = distance.argmin(1)
        assert np.abs(flat - tiles[nearest]).max() <= 1.01        # alpha over white, up to rounding
        result.append([keys[j] for j in nearest])
    return result


def test_no_emoji_concept_and_no_picture_stands_on_both_sides(emoji):
    train, val = concepts_of(emoji.train, emoji.val)
    assert not {name for name, _ in train} & {name for name, _ in val}
    assert {artist for _, artist in train} == {artist for _, artist in val} == {"noto", "fluent3d"}
    assert not set(fingerprint(emoji.train.images)) & set(fingerprint(emoji.val.images))
    assert len(emoji.train) + len(emoji.val) == 2 * 1374
    assert len(emoji.val) == pytest.approx(0.2 * 2748, abs=14)
    info = read_info("noto")
    group = dict(zip(info["names"], info["group"]))
    assert [emoji.classes[i] for i in emoji.val.labels] == [group[name] for name, _ in val]
    assert (emoji.in_chans, emoji.size, emoji.flip, len(emoji.classes)) == (3, 32, True, 7)


def test_subgroups_label_the_same_images_more_finely(emoji):
    fine = D.load_images("emoji-subgroups")
    assert torch.equal(fine.train.images, emoji.train.images) and fine.mean == emoji.mean
    assert torch.equal(fine.val.images, emoji.val.images)
    info = read_info("noto")
    subgroup = dict(zip(info["names"], info["subgroup"]))
    for part, names in zip((fine.train, fine.val), concepts_of(fine.train, fine.val)):
        assert [fine.classes[i] for i in part.labels] == [subgroup[name] for name, _ in names]
    assert len(fine.classes) == len(set(info["subgroup"])) == len(fine.train.labels.unique()) == 81
    held = D.load_images("emoji-subgroups", holdout=0.25, seed=1)
    train, val = concepts_of(held.train, held.val)
    assert not {name for name, _ in train} & {name for name, _ in val}


def test_holdout_is_stratified_disjoint_and_leaves_the_test_set_alone(mnist):
    held = D.load_images("mnist5k", holdout=0.1, seed=3)
    assert held.val.labels.bincount().tolist() == [40] * 10
    assert held.train.labels.bincount().tolist() == [360] * 10
    both = fingerprint(held.train.images) + fingerprint(held.val.images)
    assert sorted(both) == sorted(fingerprint(mnist.train.images))
    again, other = (D.load_images("mnist5k", holdout=0.1, seed=seed).val.images for seed in (3, 4))
    assert torch.equal(held.val.images, again) and not torch.equal(held.val.images, other)


def test_holdout_keeps_an_emoji_concept_on_one_side():
    held = D.load_images("emoji", holdout=0.25, seed=1)
    train, val = concepts_of(held.train, held.val)
    assert not {name for name, _ in train} & {name for name, _ in val}
    assert len(val) == 2 * len({name for name, _ in val})


@pytest.mark.parametrize("name", ["mnist5k", "digits8x8", "emoji"])
def test_training_images_have_mean_0_and_std_1(name):
    data = D.load_images(name)
    transform = D.eval_transform(data, data.size)
    x = torch.cat([x for x, _ in D.eval_batches(data.train, transform, 500)])
    assert x.dtype == torch.float32
    assert x.shape == (len(data.train), data.in_chans, data.size, data.size)
    assert x.mean((0, 2, 3)).abs().max() < 1e-3 and (x.std((0, 2, 3)) - 1).abs().max() < 1e-3


# -------------------------------------------------------------------------------------------------------
# the batches
@pytest.mark.parametrize("augment", ["none", "strong"])
@pytest.mark.parametrize("world, micro_steps, workers", [
    (1, 2, 0), (2, 1, 0), (2, 2, 0), (4, 2, 0), (3, 1, 0), (3, 2, 0), (5, 3, 0), (1, 1, 2), (2, 2, 2)])
def test_ranks_micro_batches_and_workers_change_nothing(emoji, augment, world, micro_steps, workers):
    """Any batch on any number of ranks: their parts differ by one sample at most."""
    transform = D.train_transform(emoji, 24, augment)
    few = emoji.train.take(torch.arange(40))            # an epoch ends after step 1
    whole = list(D.train_batches(few, transform, 16, 7, 1, 4))
    parts = [list(D.train_batches(few, transform, 16, 7, 1, 4, rank, world, micro_steps, workers))
             for rank in range(world)]
    assert all(len(part) == 3 * micro_steps for part in parts)
    for step, (x, y) in enumerate(whole):
        mine = [part[step * micro_steps:(step + 1) * micro_steps] for part in parts]
        shares = [sum(len(b) for _, b in micros) for micros in mine]
        sizes = [[len(b) for _, b in micros] for micros in mine]
        assert max(shares) - min(shares) <= 1 and all(max(n) - min(n) <= 1 for n in sizes)
        xs, ys = zip(*[micro for micros in mine for micro in micros])
        assert torch.equal(torch.cat(xs), x) and torch.equal(torch.cat(ys), y)


def test_ranks_see_different_samples_and_an_epoch_none_twice():
    ranks = [sum(ids(D.train_batches(numbered(50), RAW, 8, 0, 0, 6, r, 2)), []) for r in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == 24 and len(set(ranks[0] + ranks[1])) == 48


def test_the_order_differs_between_epochs_and_seeds():
    orders = [D.epoch_order(100, seed, epoch).tolist() for seed in range(4) for epoch in range(4)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len(set(map(tuple, orders))) == 16
    assert D.epoch_order(100, 1, 2).tolist() == D.epoch_order(100, 1, 2).tolist()
    seen = ids(D.train_batches(numbered(10), RAW, 3, 5, 0, 6))
    assert sum(seen, []) == D.epoch_order(10, 5, 0)[:9].tolist() + D.epoch_order(10, 5, 1)[:9].tolist()


def test_a_resumed_run_goes_on_exactly(mnist):
    few, transform = mnist.train.take(torch.arange(30)), D.train_transform(mnist, 28, "strong")
    whole = list(D.train_batches(few, transform, 8, 2, 0, 9))
    for first in range(10):
        rest = list(D.train_batches(few, transform, 8, 2, first, 9))
        assert len(rest) == 9 - first
        for (a, b), (c, d) in zip(rest, whole[first:]):
            assert torch.equal(a, c) and torch.equal(b, d)


def test_augmentation_differs_between_epochs_samples_and_seeds(mnist):
    same = D.Images(mnist.train.images[:1].expand(6, 1, 28, 28), torch.zeros(6, dtype=torch.long))
    transform = D.train_transform(mnist, 28, "light")
    seen = [x for seed in (0, 1) for x, _ in D.train_batches(same, transform, 6, seed, 0, 2)]
    assert len(set(fingerprint(torch.cat(seen)))) > 20          # of 24; two crops may agree by chance


@pytest.mark.parametrize("augment, workers", [("none", 0), ("strong", 0), ("strong", 2)])
def test_the_random_stream_of_the_caller_is_untouched(mnist, augment, workers):
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    transform = D.train_transform(mnist, 28, augment)
    batches = D.train_batches(mnist.train, transform, 10, 0, 0, 3, workers=workers)
    drawn = [torch.rand(()) for _ in batches]
    batches = D.eval_batches(mnist.val, D.eval_transform(mnist, 28), 1000, workers=workers)
    drawn += [torch.rand(()) for _ in list(batches)]
    assert torch.equal(torch.stack(drawn), expected)


@pytest.mark.parametrize("n, batch_size", [(100, 7), (2, 5)])
def test_evaluation_sees_each_sample_once_on_three_ranks(n, batch_size):
    parts = [list(D.eval_batches(numbered(n), RAW, batch_size, rank, 3)) for rank in range(3)]
    assert sorted(sum((sum(ids(part), []) for part in parts), [])) == list(range(n))
    assert all((x[:, 0, 0, 0].long() % 3).equal(y) for part in parts for x, y in part)


@pytest.mark.parametrize("img_size", [32, 20, 48])
def test_all_at_once_equals_one_by_one(emoji, img_size):
    transform = D.eval_transform(emoji, img_size)
    fast = D.Batches(emoji.train, transform, 0)
    slow = D.Batches(emoji.train, transform, 0)
    slow.at_once = False
    augmented = D.Batches(emoji.train, D.train_transform(emoji, img_size, "light"), 0)
    assert fast.at_once and not augmented.at_once
    for a, b in zip(fast.__getitems__(list(range(9))), slow.__getitems__(list(range(9)))):
        assert torch.equal(a, b) and a.dtype == b.dtype


@pytest.mark.parametrize("augment", ["light", "strong", "mae"])
def test_a_batch_equals_the_transform_of_each_image(emoji, augment):
    """Whatever is done to the whole batch: each image is what its own stream makes of it."""
    transform, n = D.train_transform(emoji, 24, augment), len(emoji.train)
    x, _ = D.Batches(emoji.train, transform, 3).__getitems__([5, n + 5, 2 * n + 7])
    for one, (epoch, index) in zip(x, ((0, 5), (1, 5), (2, 7))):
        torch.manual_seed(D.mix_seed("augment", 3, epoch, index))
        assert torch.equal(one, transform(emoji.train.images[index]))


@pytest.mark.parametrize("limit, decoded", [
    (6 * 22 * 30 * 3, 6), (6 * 20 * 30 * 3 - 1, 12), (6 * 21 * 30 * 3, 8)])
def test_files_that_fit_in_memory_are_decoded_once(folder, monkeypatch, limit, decoded):
    """Six images of 20, 21 and 22 rows of 30 pixels: kept are those of at most a sixth of the limit."""
    read, reads = D.read_rgb, []
    monkeypatch.setattr(D, "read_rgb", lambda path: (reads.append(path), read(path))[1])
    monkeypatch.setattr(D.Images, "KEEP", limit)
    images = D.load_images(folder)
    transform = D.train_transform(images, 16, "light")
    epochs = [x for x, _ in D.train_batches(images.train, transform, 6, 0, 0, 2)]
    assert len(reads) == decoded
    monkeypatch.setattr(D.Images, "KEEP", 0)
    again = D.load_images(folder)
    for a, (b, _) in zip(epochs, D.train_batches(again.train, transform, 6, 0, 0, 2)):
        assert torch.equal(a, b)


def test_batches_must_fit():
    with pytest.raises(BadInput, match=r"--batch-size 11 .* 10 images"):
        D.train_batches(numbered(10), RAW, 11, 0, 0, 1)
    assert D.steps_per_epoch(10, 10) == 1 and D.steps_per_epoch(19, 10) == 1


def test_workers_can_be_spawned(tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(Path(D.__file__).parent)!r})
import torch
import data as D

def main():
    torch.multiprocessing.set_start_method("spawn")
    emoji = D.load_images("emoji")
    few, transform = emoji.train.take(torch.arange(16)), D.train_transform(emoji, 32, "strong")
    here, there = (list(D.train_batches(few, transform, 8, 0, 0, 3, workers=n)) for n in (0, 1))
    assert len(here) == 3
    for (a, b), (c, d) in zip(here, there):
        assert torch.equal(a, c) and torch.equal(b, d)
    print("equal")

if __name__ == "__main__":
    main()
""", encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, encoding="utf-8", timeout=100)
    assert done.stdout.strip() == "equal", done.stderr


# -------------------------------------------------------------------------------------------------------
# the transforms
@pytest.mark.parametrize("augment", ["light", "strong"])
def test_digits_are_never_mirrored_but_pictures_are(mnist, emoji, augment):
    """An image that is bright on the left: crops leave it so, flips turn half of them."""
    def left_brighter(data, copies=64):
        image = torch.zeros(data.in_chans, 32, 32, dtype=torch.uint8)
        image[..., :16] = 255
        same = D.Images(image.expand(copies, -1, -1, -1), torch.zeros(copies, dtype=torch.long))
        how = dict(crop_scale=(0.6, 1.0), randaugment=None, erase=0.0)
        transform = D.train_transform(data, 32, augment, **how)
        x, _ = next(D.train_batches(same, transform, copies, 0, 0, 1))
        return (x[..., :4].mean((1, 2, 3)) > x[..., -4:].mean((1, 2, 3))).float().mean()

    assert left_brighter(mnist) == 1 and 0.2 < left_brighter(emoji) < 0.8


def test_strong_augmentation_erases_a_quarter_and_overrides_hold(mnist):
    steps = [type(t) for t in D.train_transform(mnist, 28, "strong").transforms]
    assert steps == [v2.RandomResizedCrop, v2.RandAugment, v2.ToDtype, v2.Normalize, v2.RandomErasing]
    bare = D.train_transform(mnist, 28, "strong", crop_scale=None, randaugment=None, erase=0.0)
    image = mnist.train[0][0]
    assert torch.equal(bare(image), D.eval_transform(mnist, 28)(image))
    always = D.train_transform(mnist, 28, "none", erase=0.25)
    torch.manual_seed(0)
    changed = sum(not torch.equal(always(image), bare(image)) for _ in range(400))
    assert 70 < changed < 130
    crop, *last = D.train_transform(mnist, 28, "mae").transforms
    assert crop.scale == (0.2, 1.0) and [type(t) for t in last] == [v2.ToDtype, v2.Normalize]


def test_files_of_any_shape_become_square_with_the_centre_kept(folder):
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:, 48:80] = 255                               # a white bar in the middle of a wide image
    save(folder / "val" / "ant" / "wide.png", pixels)
    data = D.load_images(folder)
    assert data.size is None and data.flip and data.mean == [0.485, 0.456, 0.406]
    for augment in ("none", "light", "strong"):
        x, _ = next(D.train_batches(data.train, D.train_transform(data, 16, augment), 6, 0, 0, 1))
        assert x.shape == (6, 3, 16, 16)
    index = [i for i, path in enumerate(data.val.images) if path.endswith("wide.png")][0]
    row = D.eval_transform(data, 56)(data.val[index][0])[0, 28] * data.std[0] + data.mean[0]
    # 64 -> 64 rows (56 / .875), crop of columns 36..92: the bar is at 12..44
    assert row[:11].abs().max() < 1e-3 and row[45:].abs().max() < 1e-3
    assert (row[13:43] - 1).abs().max() < 1e-3


@pytest.mark.parametrize("mixup, cutmix", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
@pytest.mark.parametrize("batch", [1, 5, 8])
def test_mixed_targets_are_distributions_and_repeat_under_a_seed(mixup, cutmix, batch):
    mix = D.mixer(8, mixup, cutmix)
    y = torch.arange(batch)
    x = y.float()[:, None, None, None].expand(batch, 1, 8, 8).contiguous()
    for seed in range(8):
        torch.manual_seed(seed)
        a, t = mix(x, y)
        torch.manual_seed(seed)
        b, u = mix(x, y)
        assert torch.equal(a, b) and torch.equal(t, u)
        assert a.shape == x.shape and t.shape == (batch, 8) and (t >= 0).all()
        assert torch.allclose(t.sum(1), torch.ones(batch))
        # targets hold the share of each image in the picture, whose mean is the mix of their values
        own, values = t[torch.arange(batch), y], x[:, 0, 0, 0]
        mean = own * values + (1 - own) * values.roll(1, 0)
        assert torch.allclose(a.mean((1, 2, 3)), mean, atol=1e-5)


def test_no_mixing_is_no_mixer():
    assert D.mixer(10) is None


# -------------------------------------------------------------------------------------------------------
# reading
def palette(transparent):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    if transparent:
        image.info["transparency"] = 1
    return image


@pytest.mark.parametrize("kind, image, expected", [
    ("L.png", Image.fromarray(np.array([[7, 200]], np.uint8)), [[7, 7, 7], [200, 200, 200]]),
    ("RGB.png", Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)), [[1, 2, 3], [4, 5, 6]]),
    # alpha 51 is a fifth: 255 - (255 - v) / 5
    ("RGBA.png", Image.fromarray(np.array([[[200, 100, 0, 51], [9, 9, 9, 0]]], np.uint8)),
     [[244, 224, 204], [255, 255, 255]]),
    ("LA.png", Image.fromarray(np.array([[[100, 51], [30, 255]]], np.uint8)),
     [[224, 224, 224], [30, 30, 30]]),
    ("P.png", palette(False), [[10, 20, 30], [40, 50, 60]]),
    ("P-clear.png", palette(True), [[10, 20, 30], [255, 255, 255]]),
    ("1.png", Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1"),
     [[0, 0, 0], [255, 255, 255]]),
    # (255 - c) (255 - k) / 255
    ("CMYK.tif", Image.frombytes("CMYK", (2, 1), bytes([255, 0, 51, 0, 0, 0, 0, 51])),
     [[0, 255, 204], [204, 204, 204]]),
    ("16.png", Image.fromarray(np.array([[257 * 50, 65535]], np.uint16)),
     [[50, 50, 50], [255, 255, 255]]),
    ("16.tif", Image.fromarray(np.array([[257 * 50 + 100, 300]], np.uint16)), [[50, 50, 50], [1, 1, 1]]),
])
def test_every_mode_is_read_as_rgb(tmp_path, kind, image, expected):
    image.save(tmp_path / kind)
    x = D.read_rgb(str(tmp_path / kind))
    assert x.dtype == torch.uint8 and x.shape == (3, 1, 2) and x[:, 0].T.tolist() == expected


def test_labels_of_val_are_those_of_train(folder):
    save(folder / "train" / "aardvark" / "0.png", np.zeros((8, 8, 3), np.uint8))      # absent from val
    data = D.load_images(folder)
    assert data.classes == ["aardvark", "ant", "bee"] and data.val.labels.tolist() == [1, 2]
    assert data.train.labels.tolist() == [0, 1, 1, 1, 2, 2, 2] and data.val[1][1] == 2
    held = D.load_images(folder, holdout=0.34)
    assert len(held.val) == 2 and not set(held.val.images) & set(held.train.images)


def test_file_batches_are_the_same_with_workers(folder):
    data = D.load_images(folder)
    transform = D.train_transform(data, 16, "strong")
    here, there = (list(D.train_batches(data.train, transform, 4, 0, 0, 3, workers=n)) for n in (0, 2))
    for (a, b), (c, d) in zip(here, there):
        assert torch.equal(a, c) and torch.equal(b, d)


def test_hidden_files_are_no_images(folder):
    """As macOS and editors leave them: ._1.png beside 1.png, .DS_Store, folders of checkpoints."""
    before = D.load_images(folder).train.images
    for name in ("bee/._1.png", "bee/.DS_Store", "bee/.cache/2.png", ".ipynb_checkpoints/3.png"):
        path = folder / "train" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"no image")
    assert D.load_images(folder).train.images == before


def test_photographs_are_turned_upright(tmp_path):
    """EXIF's orientation 6: the camera was turned, so that the first row is the right column."""
    image = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3) * 40)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    image.save(tmp_path / "plain.png")
    plain = D.read_rgb(tmp_path / "plain.png")
    assert torch.equal(D.read_rgb(tmp_path / "turned.png"), plain.rot90(-1, (1, 2)))


# -------------------------------------------------------------------------------------------------------
# bad input
def no_folder(root):
    (root / "train").rename(root / "other")


def no_val(root):
    (root / "val").rename(root / "validation")


def no_classes(root):
    (root / "val" / "ant").rename(root / "a")
    (root / "val" / "bee").rename(root / "b")


def new_class(root):
    (root / "val" / "bee").rename(root / "val" / "wasp")


def no_images(root):
    for path in list((root / "val").rglob("*.png")):
        path.rename(path.with_suffix(".txt"))


def empty_class(root):
    (root / "train" / "cat").mkdir()


@pytest.mark.parametrize("damage, says", [
    (no_folder, r"has no train/ subfolder: lay images out as train/<class>/\*\.jpg and val/<class>"),
    (no_val, r"has no val/ subfolder: lay images out"),
    (no_classes, r"val' has no class folders: lay images out"),
    (new_class, r"val' has the class 'wasp', which train/ lacks"),
    (no_images, r"ant' holds no images"),
    (empty_class, r"cat' holds no images.*: add some or remove"),
])
def test_an_incomplete_folder_is_named(folder, damage, says):
    damage(folder)
    with pytest.raises(BadInput, match=says) as fault:
        D.load_images(folder)
    assert str(folder) in str(fault.value) and "\n" not in str(fault.value)


def test_unknown_names_and_impossible_holdouts(folder):
    with pytest.raises(BadInput, match="'cifar11' is neither a folder nor one of mnist5k, .*, cifar100"):
        D.load_images("cifar11")
    for name in ("~nosuchuser/images", "x" * 300):
        with pytest.raises(BadInput, match="is neither a folder nor one of"):
            D.load_images(name)
    with pytest.raises(BadInput, match="--holdout 0.1 of 6 images leaves none"):
        D.load_images(folder, holdout=0.1)


def noise_file(path, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def spoil(path, damage):
    """Make a whole image file unreadable, as disks, downloads and people do."""
    content = path.read_bytes()
    path.write_bytes({"truncated": content[:len(content) // 2], "empty": b"", "no image": b"<html>",
                      "no head": b"\0" * 64 + content[64:]}[damage])


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "gif", "bmp"])
def test_bad_files_are_found_and_good_ones_are_not(tmp_path, ending):
    for damage in ("truncated", "empty", "no image", "no head"):
        path = noise_file(tmp_path / f"{damage}.{ending}")
        assert D.image_fault(path) is None
        with open(path, "ab") as file:                  # some cameras leave a few bytes behind the image
            file.write(b"\0" * 64)
        assert D.image_fault(path) is None
        spoil(noise_file(path), damage)
        assert D.image_fault(path).startswith(f"cannot read image '{path}' (")


@pytest.mark.parametrize("damage", ["truncated", "empty", "no image"])
def test_a_damaged_file_is_named_before_training_starts(folder, damage):
    path = noise_file(folder / "train" / "bee" / "1.png")
    spoil(path, damage)
    says = rf"cannot read image '{path}' \(\w+\): replace or remove the file; --set bad_images=skip"
    with pytest.raises(BadInput, match=says):
        D.load_images(folder)


def test_a_run_that_skips_bad_files_sees_the_same_when_they_are_gone(folder):
    """train_images, the order and the batches: so a resume continues after the files were removed."""
    bad = [noise_file(folder / "train" / "ant" / "0.png"), noise_file(folder / "val" / "bee" / "9.png")]
    for path in bad:
        spoil(path, "truncated")
    before = D.load_images(folder, bad_images="skip")
    assert before.skipped == 2 and len(before.train) == 5 and str(bad[0]) not in before.train.images
    for path in bad:
        path.unlink()
    after, strict = D.load_images(folder, bad_images="skip"), D.load_images(folder)
    assert (after.skipped, strict.skipped) == (0, 0) and D.facts(before) == D.facts(after)
    batches = []
    for images in (before, after, strict):
        assert images.train.images == before.train.images and images.val.images == before.val.images
        transform = D.train_transform(images, 16, "light")
        batches.append([x for x, _ in D.train_batches(images.train, transform, 2, 0, 0, 4)])
    assert all(torch.equal(a, b) for other in batches[1:] for a, b in zip(batches[0], other))
    assert "2 unreadable" in D.describe_images(before) and "unreadable" not in D.describe_images(after)


def bad_files_on_rank(root):
    runtime.start("cpu", 1)
    images = D.load_images(root, bad_images="skip")
    assert images.skipped == 1 and len(images.train) == 5
    with pytest.raises(BadInput, match="1.png"):
        D.load_images(root)


def test_ranks_find_the_same_bad_files(folder):
    spoil(folder / "train" / "bee" / "1.png", "empty")
    codes, outputs = launch_ranks(2, bad_files_on_rank, str(folder), folder=folder)
    assert codes == [0, 0], outputs


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_an_image_that_is_damaged_later_is_named_in_one_sentence(folder, workers, damage):
    path = noise_file(folder / "train" / "bee" / "1.png")
    data = D.load_images(folder)
    path.unlink() if damage == "deleted" else spoil(path, damage)
    with pytest.raises(BadInput) as fault:
        list(D.eval_batches(data.train, D.eval_transform(data, 16), 2, workers=workers))
    assert str(fault.value).startswith(f"cannot read image '{path}' (") and "\n" not in str(fault.value)
    assert not mp.active_children()                     # the workers end, although the fault is held


def test_a_damaged_file_of_the_repository_is_named(tmp_path, monkeypatch):
    content = (D.ROOT / "mnist5k.npz").read_bytes()
    monkeypatch.setattr(D, "ROOT", tmp_path)
    read = D.shipped.__wrapped__
    for text in (None, content[:-1], content.replace(b"\n", b"\r\n")):
        if text:
            (tmp_path / "mnist5k.npz").write_bytes(text)
        with pytest.raises(BadInput, match="mnist5k.npz' is missing or damaged: restore it with git"):
            read("mnist5k.npz")
    (tmp_path / "mnist5k.npz").write_bytes(content)
    assert read("mnist5k.npz") == tmp_path / "mnist5k.npz"


# -------------------------------------------------------------------------------------------------------
# latents

def latents(folder, n=40, shape=(4, 6, 6), val=0, dtype=np.float16):
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for name, count in (("", n), ("val_", val)):
        if count:
            np.save(folder / f"{name}latents.npy", rng.normal(size=(count, *shape)).astype(dtype))
            np.save(folder / f"{name}labels.npy", np.arange(count) % 2)
    return folder


def test_latents_are_read_as_they_are(tmp_path):
    data = D.load_images(latents(tmp_path, val=6))
    rows = np.load(tmp_path / "val_latents.npy").astype(np.float32)
    assert (len(data.train), len(data.val), data.in_chans, data.size, data.flip) == (40, 6, 4, 6, False)
    assert data.classes == ["0", "1"] and data.mean == [0.0] * 4
    x, y = next(D.eval_batches(data.val, D.eval_transform(data, 6), 6))
    assert np.array_equal(x.numpy(), rows) and y.tolist() == [0, 1] * 3


@pytest.mark.parametrize("pairs", [False, True])
def test_latents_hold_out_whole_pairs_of_mirror_images(tmp_path, pairs):
    latents(tmp_path, n=80)
    if pairs:
        np.save(tmp_path / "labels.npy", np.arange(40).repeat(2) % 2)
    for holdout in (0.0, 0.2):
        data = D.load_latents(tmp_path, holdout, seed=3)
        index = torch.cat([data.train.index, data.val.index])
        assert sorted(index.tolist()) == list(range(80)) and len(data.val) == (16 if holdout else 4)
        if pairs:
            held = data.val.index.view(-1, 2)
            assert (held[:, 0] % 2 == 0).all() and (held[:, 1] == held[:, 0] + 1).all()


@pytest.mark.parametrize("name, content, says", [
    ("labels.npy", None, "labels.npy cannot be read"),
    ("latents.npy", np.zeros((40, 4, 6, 5), np.float32), "not floats"),
    ("latents.npy", np.zeros((40, 4, 6, 6), np.int64), "not floats"),
    ("labels.npy", np.zeros(39, np.int64), "no label from 0 for each of 40"),
    ("labels.npy", np.full(40, -1), "no label from 0"),
    ("val_latents.npy", np.zeros((6, 4, 3, 3), np.float32), "write both anew"),
    ("labels.npy", np.arange(40), "too few latents"),
])
def test_latents_that_do_not_fit_are_refused(tmp_path, name, content, says):
    latents(tmp_path, val=6 if name.startswith("val") else 0)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        np.save(tmp_path / name, content)
    with pytest.raises(BadInput, match=says):
        D.load_images(tmp_path)


# -------------------------------------------------------------------------------------------------------
# CIFAR

class FakeCIFAR:
    """Stands in for torchvision's class: reading fails until a download is done, which leaves a line."""
    filename, url, classes = "fake.tar.gz", "https://example.org/fake.tar.gz", ["cat", "dog"]
    online = True

    def __init__(self, root, train=True, download=False):
        root = Path(root)
        if download:
            if not self.online:
                raise URLError("no route to host")
            with open(root / "downloads", "a", encoding="utf-8") as log:
                log.write(f"rank {dist.get_rank() if dist.is_initialized() else 'none'}\n")
            time.sleep(0.3)
            (root / "complete").touch()
        if not (root / "complete").exists():
            raise RuntimeError("Dataset not found or corrupted.")
        self.data = np.arange(2 * 32 * 32 * 3).astype(np.uint8).reshape(2, 32, 32, 3)
        self.targets = [0, 1] if train else [1, 0]


def cifar_rank(root):
    """One of two processes on a cold start, and then without a network."""
    datasets.CIFAR10 = datasets.CIFAR100 = FakeCIFAR
    D.ROOT = Path(root)
    runtime.start("cpu", 1)
    assert D.load_images("cifar10").val.labels.tolist() == [1, 0]
    dist.barrier()
    FakeCIFAR.online = False
    with pytest.raises(BadInput, match="'cifar100'.*fake.tar.gz"):
        D.load_images("cifar100")


def test_only_rank_0_downloads_and_its_failure_stops_all(tmp_path):
    codes, outputs = launch_ranks(2, cifar_rank, str(tmp_path), folder=tmp_path)
    assert codes == [0, 0], outputs
    assert (tmp_path / "downloads").read_text(encoding="utf-8") == "rank 0\n"


def test_cifar_without_a_process_group(tmp_path, monkeypatch):
    monkeypatch.setattr(D, "ROOT", tmp_path)
    monkeypatch.setattr(datasets, "CIFAR10", FakeCIFAR)
    monkeypatch.setattr(FakeCIFAR, "online", False)
    says = "'cifar10' cannot be downloaded.*no route to host.*put fake.tar.gz from https"
    with pytest.raises(BadInput, match=says) as fault:
        D.load_images("cifar10")
    assert "\n" not in str(fault.value)
    monkeypatch.setattr(FakeCIFAR, "online", True)
    data = D.load_images("cifar10")
    assert (data.in_chans, data.size, data.flip, data.classes) == (3, 32, True, ["cat", "dog"])
    assert data.train[1][0][2, 0, 5] == (32 * 32 * 3 + 5 * 3 + 2) % 256       # channels come first now


# -------------------------------------------------------------------------------------------------------
# scenes
@pytest.mark.parametrize("side, smallest", [(32, 16), (64, 21)])
def test_a_drawing_lies_on_the_photograph_and_its_mask_where_it_is(side, smallest):
    """An opaque square of one colour on a photograph of one grey; a transparent one leaves it."""
    photo, drawing = torch.full((3, 110, 120), 40.0), torch.full((4, 32, 32), 255.0)
    sides, corners = set(), set()
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        image, mask = D.paste_on_photo(drawing, [photo], generator, side, smallest)
        assert image.dtype == torch.uint8 and set(image.unique().tolist()) == {40, 255}
        assert torch.equal(mask, image[0] == 255) and mask.shape == (side, side)
        ys, xs = mask.nonzero().T
        size = int(ys.max() - ys.min()) + 1
        assert size == int(xs.max() - xs.min()) + 1 and len(ys) == size ** 2
        sides.add(size)
        corners.add((int(ys.min()), int(xs.min())))
    assert min(sides) >= smallest and max(sides) <= side * 9 // 10
    assert len(sides) > 12 and len(corners) > 50
    assert photo.eq(40).all()                           # nothing stays in it
    drawing[3] = 0
    image, mask = D.paste_on_photo(drawing, [photo], torch.Generator().manual_seed(0), side, smallest)
    assert image.eq(40).all() and not mask.any()


def test_a_mask_halves_the_edge():
    """A soft edge: between 40 of the photograph and 200 of the drawing the mask ends halfway."""
    photo, cutout = torch.full((3, 100, 100), 40.0), torch.zeros(4, 64, 64)
    cutout[:3], cutout[3, 10:50, 20:60] = 200, 255
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        image, mask = D.paste_on_photo(cutout, [photo], generator, 64, 21)
        assert mask.equal(image[0] > 120)


def test_scenes_share_no_concept_and_no_photograph_between_training_and_validation(monkeypatch):
    """The concepts are split as emoji's, two scenes of each drawing; the photographs 4 to 1."""
    seen = []

    def note_photos(drawing, photos, generator, side, smallest):
        seen.append(photos)
        return D.on_white(drawing.to(torch.uint8)), None

    monkeypatch.setattr(D, "paste_on_photo", note_photos)
    plain, scenes = D.load_images("emoji"), D.load_images("scenes")
    for part in ("train", "val"):
        flat, pasted = getattr(plain, part), getattr(scenes, part)
        assert torch.equal(pasted.labels, flat.labels.repeat_interleave(2))
        assert torch.equal(pasted.images, flat.images.repeat_interleave(2, 0))
    train, val = ({photo.sum().item() for photo in photos} for photos in (seen[0], seen[-1]))
    assert len(train) == 20 and len(val) == 5 and not train & val
    assert all(photos is seen[0] or photos is seen[-1] for photos in seen)


def test_composites_share_no_cutout_and_no_photograph_between_training_and_validation(monkeypatch):
    seen = []

    def note_cutout(drawing, photos, generator, side, smallest):
        seen.append((drawing.sum().item(), photos))
        return torch.zeros(3, 1, 1, dtype=torch.uint8), torch.ones(1, 1, dtype=torch.bool)

    monkeypatch.setattr(D, "paste_on_photo", note_cutout)
    parts, groups, subgroups = D.pasted_cutouts.__wrapped__()
    (_, _, train), (_, _, val) = parts
    assert len(groups) == len(subgroups) == 591
    assert train.tolist() == [i for i in dict.fromkeys(train.tolist()) for _ in range(6)]
    assert val.tolist() == [i for i in dict.fromkeys(val.tolist()) for _ in range(4)]
    assert sorted({*train.tolist()} ^ {*val.tolist()}) == list(range(591))      # each in one part
    sums = [total for total, _ in seen]
    assert len(set(sums[:len(train)])) > 460 and len(seen) == len(train) + len(val)
    first, last = seen[0][1], seen[-1][1]
    assert all(photos is (first if i < len(train) else last) for i, (_, photos) in enumerate(seen))
    behind = [{photo.sum().item() for photo in photos} for photos in (first, last)]
    assert [len(photos) for photos in behind] == [20, 5] and not behind[0] & behind[1]
    for kind in D.COARSE:
        assert sum(groups[i] == kind for i in set(val.tolist())) == groups.count(kind) // 5


def test_scenes_are_always_the_same_and_pixels_tell_little():
    first, again = D.load_images("scenes"), D.load_images("scenes-subgroups")
    assert torch.equal(first.train.images, again.train.images)
    assert torch.equal(first.val.images, again.val.images)
    assert (len(first.classes), len(again.classes)) == (7, 81)
    assert (len(first.train), len(first.val)) == (4404, 1092)
    flat = [part.images.flatten(1).float() for part in (first.val, first.train)]
    near = torch.cdist(*flat).argmin(1)
    assert (first.train.labels[near] == first.val.labels).float().mean() < 0.4


def test_composites_are_the_class_of_what_is_pasted():
    """And a holdout keeps the six composites of a cutout together."""
    coarse, fine = D.load_images("composites"), D.load_images("composites-subgroups")
    assert coarse.classes == list(D.COARSE) and len(fine.classes) == 34 and coarse.size == 64
    assert torch.equal(coarse.train.images, fine.train.images)
    for a, b in zip(coarse.val.labels.tolist(), fine.val.labels.tolist()):
        prefix = fine.classes[b].split("-")[0]
        assert coarse.classes[a] == (prefix if prefix in D.COARSE else "object")
    held = D.load_images("composites", holdout=0.2).val
    assert len(held) % 6 == 0
    assert all(len(set(labels)) == 1 for labels in held.labels.view(-1, 6).tolist())
