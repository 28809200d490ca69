"""data.py: what a batch holds depends on (seed, step) and nothing else; every image is read as RGB; bad input gets one sentence."""
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
from runtime import BadInput


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
                save(tmp_path / split / name / f"{i}.png", np.full((20 + i, 30, 3), 40 * c + 10 * i, dtype=np.uint8))
    return tmp_path


def save(path, pixels, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path)


def numbered(n):
    """n images of 1 x 2 x 2 pixels whose value is their index."""
    index = torch.arange(n)
    return D.Images(index.to(torch.uint8)[:, None, None, None].expand(n, 1, 2, 2).contiguous(), index % 3)


RAW = v2.Compose([v2.ToDtype(torch.float32)])           # keeps the value 0..255, so a pixel still says which image it is


def ids(batches):
    return [x[:, 0, 0, 0].int().tolist() for x, _ in batches]


def fingerprint(images):
    return [image.numpy().tobytes() for image in images]


# ------------------------------------------------------------------------------------------------------------ the sets
def test_mnist5k_is_balanced_and_in_range(mnist):
    assert (len(mnist.train), len(mnist.val), mnist.in_chans, mnist.size, mnist.flip) == (4000, 1000, 1, 28, False)
    assert mnist.train.labels.bincount().tolist() == [400] * 10 and mnist.val.labels.bincount().tolist() == [100] * 10
    image, label = mnist.train[5]
    assert image.shape == (1, 28, 28) and image.dtype == torch.uint8 and isinstance(label, int)
    assert len(mnist.classes) == 10 and int(mnist.train.images.max()) == 255


def test_digits_use_the_whole_range_and_split_by_class():
    digits = D.load_images("digits8x8")
    assert (len(digits.train) + len(digits.val), digits.in_chans, digits.size, digits.flip) == (1797, 1, 8, False)
    assert (int(digits.train.images.min()), int(digits.train.images.max())) == (0, 255)
    share = digits.val.labels.bincount() / (digits.train.labels.bincount() + digits.val.labels.bincount())
    assert ((share - 0.2).abs() < 0.01).all()


def concepts_of(*sets):
    """For each set, the concepts (names) of its images, looked up in the sheets by an independent reading of the pixels."""
    names_of = {}
    for artist in ("noto", "fluent3d"):
        info = json.loads((D.ROOT / f"emoji_{artist}_32.json").read_text())
        sheet = np.asarray(Image.open(D.ROOT / f"emoji_{artist}_32.png")).astype(float)
        white = 255 + (sheet[..., :3] - 255) * sheet[..., 3:] / 255
        for i, name in enumerate(info["names"]):
            row, col = divmod(i, info["cols"])
            tile = white[row * 32:row * 32 + 32, col * 32:col * 32 + 32]
            names_of[name, artist] = tile
    keys, tiles = list(names_of), np.stack(list(names_of.values())).reshape(len(names_of), -1).astype(np.float32)
    result = []
    for images in sets:
        flat = images.images.permute(0, 2, 3, 1).reshape(len(images), -1).numpy().astype(np.float32)
        distance = (flat ** 2).sum(1)[:, None] - 2 * flat @ tiles.T + (tiles ** 2).sum(1)
        nearest = distance.argmin(1)
        assert np.abs(flat - tiles[nearest]).max() <= 1.01                    # alpha over white, up to rounding
        result.append([keys[j] for j in nearest])
    return result


def test_no_emoji_concept_and_no_picture_stands_on_both_sides(emoji):
    train, val = concepts_of(emoji.train, emoji.val)
    assert not {name for name, _ in train} & {name for name, _ in val}
    assert {artist for _, artist in train} == {artist for _, artist in val} == {"noto", "fluent3d"}
    assert not set(fingerprint(emoji.train.images)) & set(fingerprint(emoji.val.images))
    assert len(emoji.train) + len(emoji.val) == 2 * 1374 and len(emoji.val) == pytest.approx(0.2 * 2748, abs=14)
    info = json.loads((D.ROOT / "emoji_noto_32.json").read_text())
    group = dict(zip(info["names"], info["group"]))
    assert [emoji.classes[i] for i in emoji.val.labels] == [group[name] for name, _ in val]
    assert (emoji.in_chans, emoji.size, emoji.flip, len(emoji.classes)) == (3, 32, True, 7)


def test_subgroups_label_the_same_images_more_finely(emoji):
    fine = D.load_images("emoji-subgroups")
    assert torch.equal(fine.train.images, emoji.train.images) and torch.equal(fine.val.images, emoji.val.images) and fine.mean == emoji.mean
    info = json.loads((D.ROOT / "emoji_noto_32.json").read_text())
    subgroup = dict(zip(info["names"], info["subgroup"]))
    for part, names in zip((fine.train, fine.val), concepts_of(fine.train, fine.val)):
        assert [fine.classes[i] for i in part.labels] == [subgroup[name] for name, _ in names]
    assert len(fine.classes) == len(set(info["subgroup"])) == len(fine.train.labels.unique()) == 81
    held = D.load_images("emoji-subgroups", holdout=0.25, seed=1)
    train, val = concepts_of(held.train, held.val)
    assert not {name for name, _ in train} & {name for name, _ in val}


def test_artists_draw_the_same_concepts_on_either_side():
    data = D.load_images("emoji-artists")
    train, val = concepts_of(data.train, data.val)
    assert len(train) == len(val) == len(data.classes) == 1374
    assert train == [(data.classes[i], "noto") for i in data.train.labels] and val == [(data.classes[i], "fluent3d") for i in data.val.labels]
    assert len({name for name, _ in train}) == 1374 and not set(fingerprint(data.train.images)) & set(fingerprint(data.val.images))
    with pytest.raises(BadInput, match="leaves none to validate on.*leave it out"):
        D.load_images("emoji-artists", holdout=0.5)


def test_holdout_is_stratified_disjoint_and_leaves_the_test_set_alone(mnist):
    held = D.load_images("mnist5k", holdout=0.1, seed=3)
    assert held.val.labels.bincount().tolist() == [40] * 10 and held.train.labels.bincount().tolist() == [360] * 10
    assert sorted(fingerprint(held.train.images) + fingerprint(held.val.images)) == sorted(fingerprint(mnist.train.images))
    again, other = D.load_images("mnist5k", holdout=0.1, seed=3), D.load_images("mnist5k", holdout=0.1, seed=4)
    assert torch.equal(held.val.images, again.val.images) and not torch.equal(held.val.images, other.val.images)


def test_holdout_keeps_an_emoji_concept_on_one_side():
    held = D.load_images("emoji", holdout=0.25, seed=1)
    train, val = concepts_of(held.train, held.val)
    assert not {name for name, _ in train} & {name for name, _ in val} and len(val) == 2 * len({name for name, _ in val})


@pytest.mark.parametrize("name", ["mnist5k", "digits8x8", "emoji"])
def test_training_images_have_mean_0_and_std_1(name):
    data = D.load_images(name)
    x = torch.cat([x for x, _ in D.eval_batches(data.train, D.eval_transform(data, data.size), 500)])
    assert x.dtype == torch.float32 and x.shape == (len(data.train), data.in_chans, data.size, data.size)
    assert x.mean((0, 2, 3)).abs().max() < 1e-3 and (x.std((0, 2, 3)) - 1).abs().max() < 1e-3


# --------------------------------------------------------------------------------------------------------- the batches
@pytest.mark.parametrize("augment", ["none", "strong"])
@pytest.mark.parametrize("world, micro_steps, workers", [(1, 2, 0), (2, 1, 0), (2, 2, 0), (4, 2, 0), (1, 1, 2), (2, 2, 2)])
def test_ranks_micro_batches_and_workers_change_nothing(emoji, augment, world, micro_steps, workers):
    transform = D.train_transform(emoji, 24, augment)
    few = emoji.train.take(torch.arange(40))            # 16 does not divide 40: the run crosses an epoch's end at step 2
    whole = list(D.train_batches(few, transform, 16, 7, 1, 4))
    parts = [list(D.train_batches(few, transform, 16, 7, 1, 4, rank, world, micro_steps, workers)) for rank in range(world)]
    for step, (x, y) in enumerate(whole):
        mine = [micro for rank in parts for micro in rank[step * micro_steps:(step + 1) * micro_steps]]
        assert all(len(part) == 3 * micro_steps for part in parts) and {len(b) for _, b in mine} == {16 // (world * micro_steps)}
        assert torch.equal(torch.cat([a for a, _ in mine]), x) and torch.equal(torch.cat([b for _, b in mine]), y)


def test_ranks_see_different_samples_and_an_epoch_none_twice():
    ranks = [sum(ids(D.train_batches(numbered(50), RAW, 8, 0, 0, 6, rank, 2)), []) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == 24 and len(set(ranks[0] + ranks[1])) == 48


def test_the_order_differs_between_epochs_and_seeds():
    orders = [D.epoch_order(100, seed, epoch).tolist() for seed in range(4) for epoch in range(4)]
    assert all(sorted(order) == list(range(100)) for order in orders) and len(set(map(tuple, orders))) == 16
    assert D.epoch_order(100, 1, 2).tolist() == D.epoch_order(100, 1, 2).tolist()
    seen = ids(D.train_batches(numbered(10), RAW, 3, 5, 0, 6))
    assert sum(seen, []) == D.epoch_order(10, 5, 0)[:9].tolist() + D.epoch_order(10, 5, 1)[:9].tolist()


def test_a_resumed_run_goes_on_exactly(mnist):
    few, transform = mnist.train.take(torch.arange(30)), D.train_transform(mnist, 28, "strong")
    whole = list(D.train_batches(few, transform, 8, 2, 0, 9))
    for first in range(10):
        rest = list(D.train_batches(few, transform, 8, 2, first, 9))
        assert len(rest) == 9 - first
        assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(rest, whole[first:]))


def test_augmentation_differs_between_epochs_samples_and_seeds(mnist):
    same = D.Images(mnist.train.images[:1].expand(6, 1, 28, 28), torch.zeros(6, dtype=torch.long))
    transform = D.train_transform(mnist, 28, "light")
    seen = [x for seed in (0, 1) for x, _ in D.train_batches(same, transform, 6, seed, 0, 2)]
    assert len(set(fingerprint(torch.cat(seen)))) > 20              # 6 copies x 2 epochs x 2 seeds; two crops may agree by chance


@pytest.mark.parametrize("augment, workers", [("none", 0), ("strong", 0), ("strong", 2)])
def test_the_random_stream_of_the_caller_is_untouched(mnist, augment, workers):
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    transform = D.train_transform(mnist, 28, augment)
    drawn = [torch.rand(()) for _ in D.train_batches(mnist.train, transform, 10, 0, 0, 3, workers=workers)]
    drawn += [torch.rand(()) for _ in list(D.eval_batches(mnist.val, D.eval_transform(mnist, 28), 1000, workers=workers))]
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
    assert fast.at_once and not D.Batches(emoji.train, D.train_transform(emoji, img_size, "light"), 0).at_once
    for a, b in zip(fast.__getitems__(list(range(9))), slow.__getitems__(list(range(9)))):
        assert torch.equal(a, b) and a.dtype == b.dtype


@pytest.mark.parametrize("augment", ["light", "strong", "mae"])
def test_a_batch_equals_the_transform_of_each_image(emoji, augment):
    """Whatever is done to the whole batch: each image is what its own stream makes of it, to the last bit."""
    transform, n = D.train_transform(emoji, 24, augment), len(emoji.train)
    x, _ = D.Batches(emoji.train, transform, 3).__getitems__([5, n + 5, 2 * n + 7])
    for one, (epoch, index) in zip(x, ((0, 5), (1, 5), (2, 7))):
        torch.manual_seed(D.mix_seed("augment", 3, epoch, index))
        assert torch.equal(one, transform(emoji.train.images[index]))


@pytest.mark.parametrize("limit, decoded", [(6 * 22 * 30 * 3, 6), (6 * 20 * 30 * 3 - 1, 12), (6 * 21 * 30 * 3, 8)])
def test_files_that_fit_in_memory_are_decoded_once(folder, monkeypatch, limit, decoded):
    """Six images of 20, 21 and 22 rows of 30 pixels: all are kept, none, or those that take no more than a sixth of the limit."""
    read, reads = D.read_rgb, []
    monkeypatch.setattr(D, "read_rgb", lambda path: (reads.append(path), read(path))[1])
    monkeypatch.setattr(D.Images, "KEEP", limit)
    images = D.load_images(folder)
    transform = D.train_transform(images, 16, "light")
    epochs = [x for x, _ in D.train_batches(images.train, transform, 6, 0, 0, 2)]
    assert len(reads) == decoded
    monkeypatch.setattr(D.Images, "KEEP", 0)
    again = D.load_images(folder)
    assert all(torch.equal(a, b) for a, (b, _) in zip(epochs, D.train_batches(again.train, transform, 6, 0, 0, 2)))


def test_batches_must_fit_and_divide():
    with pytest.raises(BadInput, match=r"--batch-size 11 .* 10 images"):
        D.train_batches(numbered(10), RAW, 11, 0, 0, 1)
    with pytest.raises(BadInput, match=r"--batch-size 10 .* multiple of 6 \(2 processes x 3 micro-batches\).*--micro-batch"):
        D.train_batches(numbered(10), RAW, 10, 0, 0, 1, world=2, micro_steps=3)
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
    here, there = (list(D.train_batches(few, transform, 8, 0, 0, 3, workers=workers)) for workers in (0, 1))
    assert len(here) == 3 and all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(here, there))
    print("equal")

if __name__ == "__main__":
    main()
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "equal", done.stderr


# ------------------------------------------------------------------------------------------------------ the transforms
@pytest.mark.parametrize("augment", ["light", "strong"])
def test_digits_are_never_mirrored_but_pictures_are(mnist, emoji, augment):
    """An image that is bright on the left: with crops alone it stays so, with flips half of them turn."""
    def left_brighter(data, copies=64):
        image = torch.zeros(data.in_chans, 32, 32, dtype=torch.uint8)
        image[..., :16] = 255
        same = D.Images(image.expand(copies, -1, -1, -1), torch.zeros(copies, dtype=torch.long))
        transform = D.train_transform(data, 32, augment, crop_scale=(0.6, 1.0), randaugment=None, erase=0.0)
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
    assert [type(t) for t in D.train_transform(mnist, 28, "mae").transforms] == [v2.RandomResizedCrop, v2.ToDtype, v2.Normalize]
    assert D.train_transform(mnist, 28, "mae").transforms[0].scale == (0.2, 1.0)
    with pytest.raises(BadInput, match="--augment 'heavy'.*none, light, strong"):
        D.train_transform(mnist, 28, "heavy")
    with pytest.raises(TypeError):
        D.train_transform(mnist, 28, "strong", mix=1)


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
    assert row[:11].abs().max() < 1e-3 and (row[13:43] - 1).abs().max() < 1e-3 and row[45:].abs().max() < 1e-3


@pytest.mark.parametrize("mixup, cutmix", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
@pytest.mark.parametrize("batch", [1, 5, 8])
def test_mixed_targets_are_distributions_and_repeat_under_a_seed(mixup, cutmix, batch):
    mix = D.mixer(8, mixup, cutmix)
    x, y = torch.arange(batch).float()[:, None, None, None].expand(batch, 1, 8, 8).contiguous(), torch.arange(batch)
    for seed in range(8):
        torch.manual_seed(seed)
        a, t = mix(x, y)
        torch.manual_seed(seed)
        b, u = mix(x, y)
        assert torch.equal(a, b) and torch.equal(t, u)
        assert a.shape == x.shape and t.shape == (batch, 8) and torch.allclose(t.sum(1), torch.ones(batch)) and (t >= 0).all()
        # The targets hold the share of each image that is in the picture: its mean is the mix of the two images' values.
        own = t[torch.arange(batch), y]
        assert torch.allclose(a.mean((1, 2, 3)), own * x[:, 0, 0, 0] + (1 - own) * x.roll(1, 0)[:, 0, 0, 0], atol=1e-5)


def test_no_mixing_is_no_mixer():
    assert D.mixer(10) is None


# ------------------------------------------------------------------------------------------------------------- reading
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
    ("RGBA.png", Image.fromarray(np.array([[[200, 100, 0, 51], [9, 9, 9, 0]]], np.uint8)), [[244, 224, 204], [255, 255, 255]]),
    ("LA.png", Image.fromarray(np.array([[[100, 51], [30, 255]]], np.uint8)), [[224, 224, 224], [30, 30, 30]]),
    ("P.png", palette(False), [[10, 20, 30], [40, 50, 60]]),
    ("P-clear.png", palette(True), [[10, 20, 30], [255, 255, 255]]),
    ("1.png", Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1"), [[0, 0, 0], [255, 255, 255]]),
    # (255 - c) (255 - k) / 255
    ("CMYK.tif", Image.frombytes("CMYK", (2, 1), bytes([255, 0, 51, 0, 0, 0, 0, 51])), [[0, 255, 204], [204, 204, 204]]),
    ("16.png", Image.fromarray(np.array([[257 * 50, 65535]], np.uint16)), [[50, 50, 50], [255, 255, 255]]),
    ("16.tif", Image.fromarray(np.array([[257 * 50 + 100, 300]], np.uint16)), [[50, 50, 50], [1, 1, 1]]),
])
def test_every_mode_is_read_as_rgb(tmp_path, kind, image, expected):
    image.save(tmp_path / kind)
    x = D.read_rgb(str(tmp_path / kind))
    assert x.dtype == torch.uint8 and x.shape == (3, 1, 2) and x[:, 0].T.tolist() == expected


def test_labels_of_val_are_those_of_train(folder):
    save(folder / "train" / "aardvark" / "0.png", np.zeros((8, 8, 3), np.uint8))      # absent from val, and first in the alphabet
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    data = D.load_images(folder)
    assert data.classes == ["aardvark", "ant", "bee"] and data.val.labels.tolist() == [1, 2]
    assert data.train.labels.tolist() == [0, 1, 1, 1, 2, 2, 2] and data.val[1][1] == 2
    held = D.load_images(folder, holdout=0.34)
    assert len(held.val) == 2 and not set(held.val.images) & set(held.train.images)


def test_file_batches_are_the_same_with_workers(folder):
    data = D.load_images(folder)
    transform = D.train_transform(data, 16, "strong")
    here, there = (list(D.train_batches(data.train, transform, 4, 0, 0, 3, workers=workers)) for workers in (0, 2))
    assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(here, there))


# ----------------------------------------------------------------------------------------------------------- bad input
def no_folder(root): (root / "train").rename(root / "other")
def no_val(root): (root / "val").rename(root / "validation")
def no_classes(root): (root / "val" / "ant").rename(root / "a"), (root / "val" / "bee").rename(root / "b")
def new_class(root): (root / "val" / "bee").rename(root / "val" / "wasp")
def no_images(root): [path.rename(path.with_suffix(".txt")) for path in (root / "val").rglob("*.png")]
def empty_class(root): (root / "train" / "cat").mkdir()


@pytest.mark.parametrize("damage, says", [
    (no_folder, r"has no train/ subfolder: lay images out as train/<class>/\*\.jpg and val/<class>/\*\.jpg"),
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
    with pytest.raises(BadInput, match="'cifar11' is neither a folder nor one of mnist5k, digits8x8, emoji, emoji-subgroups, emoji-artists, scenes, scenes-subgroups, composites, composites-subgroups, cifar10, cifar100"):
        D.load_images("cifar11")
    for name in ("~nosuchuser/images", "x" * 300):
        with pytest.raises(BadInput, match="is neither a folder nor one of"):
            D.load_images(name)
    with pytest.raises(BadInput, match="--holdout 1.5"):
        D.load_images("mnist5k", holdout=1.5)
    with pytest.raises(BadInput, match="--holdout 0.1 of 6 images leaves none"):
        D.load_images(folder, holdout=0.1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["truncated", "no image", "deleted"])
def test_an_unreadable_image_is_named_in_one_sentence(folder, workers, damage):
    path = folder / "train" / "bee" / "1.png"
    data = D.load_images(folder)
    save(path, np.random.default_rng(0).integers(0, 255, (40, 40, 3)).astype(np.uint8))
    content = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(content[:len(content) // 2] if damage == "truncated" else b"hello")
    with pytest.raises(BadInput) as fault:
        list(D.eval_batches(data.train, D.eval_transform(data, 16), 2, workers=workers))
    assert str(fault.value).startswith(f"cannot read image '{path}' (") and "\n" not in str(fault.value)
    assert not mp.active_children()                      # the workers have ended, although the fault is still held


class FakeCIFAR:
    """Stands in for torchvision's class: reading fails until a download has finished, and each download leaves a line."""
    filename, url, classes = "fake.tar.gz", "https://example.org/fake.tar.gz", ["cat", "dog"]
    online = True

    def __init__(self, root, train=True, download=False):
        root = Path(root)
        if download:
            if not self.online:
                raise URLError("no route to host")
            with open(root / "downloads", "a") as log:
                log.write(f"rank {dist.get_rank() if dist.is_initialized() else 'none'}\n")
            time.sleep(0.3)
            (root / "complete").touch()
        if not (root / "complete").exists():
            raise RuntimeError("Dataset not found or corrupted.")
        self.data = np.arange(2 * 32 * 32 * 3).astype(np.uint8).reshape(2, 32, 32, 3)
        self.targets = [0, 1] if train else [1, 0]


def cifar_rank(rank, root):
    """One of two processes on a cold start, and then without a network."""
    torch.set_num_threads(1)
    datasets.CIFAR10 = datasets.CIFAR100 = FakeCIFAR
    D.ROOT = Path(root)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
    assert D.load_images("cifar10").val.labels.tolist() == [1, 0]
    dist.barrier()
    FakeCIFAR.online = False
    with pytest.raises(BadInput, match="'cifar100'.*fake.tar.gz"):
        D.load_images("cifar100")
    dist.destroy_process_group()


def test_only_rank_0_downloads_and_its_failure_stops_all(tmp_path):
    mp.spawn(cifar_rank, (str(tmp_path),), nprocs=2)
    assert (tmp_path / "downloads").read_text() == "rank 0\n"


def test_cifar_without_a_process_group(tmp_path, monkeypatch):
    monkeypatch.setattr(D, "ROOT", tmp_path)
    monkeypatch.setattr(datasets, "CIFAR10", FakeCIFAR)
    monkeypatch.setattr(FakeCIFAR, "online", False)
    with pytest.raises(BadInput, match="'cifar10' cannot be downloaded.*no route to host.*put fake.tar.gz from https") as fault:
        D.load_images("cifar10")
    assert "\n" not in str(fault.value)
    monkeypatch.setattr(FakeCIFAR, "online", True)
    data = D.load_images("cifar10")
    assert (data.in_chans, data.size, data.flip, data.classes) == (3, 32, True, ["cat", "dog"])
    assert data.train[1][0][2, 0, 5] == (32 * 32 * 3 + 5 * 3 + 2) % 256           # channel last became channel first


# ------------------------------------------------------------------------------------------------------------------- scenes
def test_a_scene_is_the_drawing_on_the_photograph_and_nothing_else():
    """One colour on another: an opaque square of half to nine tenths of the side, whole, on the rest; a transparent drawing leaves the photograph."""
    photo, drawing = torch.full((3, 50, 70), 40.0), torch.full((4, 32, 32), 255.0)
    sides, corners = set(), set()
    for seed in range(200):
        image = D.scene(drawing, [photo], torch.Generator().manual_seed(seed))
        assert image.dtype == torch.uint8 and set(image.unique().tolist()) == {40, 255}
        ys, xs = (image[0] == 255).nonzero().T
        side = int(ys.max() - ys.min()) + 1
        assert side == int(xs.max() - xs.min()) + 1 and len(ys) == side ** 2 and 16 <= side <= 28
        sides.add(side), corners.add((int(ys.min()), int(xs.min())))
    assert sides == set(range(16, 29)) and len(corners) > 50
    assert photo.eq(40).all()                                    # nothing stays in it
    drawing[3] = 0
    assert D.scene(drawing, [photo], torch.Generator().manual_seed(0)).eq(40).all()


def test_scenes_share_no_concept_and_no_photograph_between_training_and_validation(monkeypatch):
    """The concepts are split as emoji's, two scenes of each drawing; the photographs 4 to 1."""
    seen = []

    def record(drawing, photos, generator):
        seen.append({photo.sum().item() for photo in photos})
        return on_white(drawing)

    on_white = lambda rgba: D.on_white(rgba.to(torch.uint8))
    monkeypatch.setattr(D, "scene", record)
    plain, scenes = D.load_images("emoji"), D.load_images("scenes")
    for part in ("train", "val"):
        flat, pasted = getattr(plain, part), getattr(scenes, part)
        assert torch.equal(pasted.labels, flat.labels.repeat_interleave(2)) and torch.equal(pasted.images, flat.images.repeat_interleave(2, 0))
    train, val = seen[0], seen[-1]
    assert len(train) == 20 and len(val) == 5 and not train & val and all(s in (train, val) for s in seen)


def test_scenes_are_always_the_same_and_pixels_tell_little():
    first, again = D.load_images("scenes"), D.load_images("scenes-subgroups")
    assert torch.equal(first.train.images, again.train.images) and torch.equal(first.val.images, again.val.images)
    assert len(first.classes) == 7 and len(again.classes) == 81 and len(first.train) == 4404 and len(first.val) == 1092
    near = torch.cdist(first.val.images.flatten(1).float(), first.train.images.flatten(1).float()).argmin(1)
    assert (first.train.labels[near] == first.val.labels).float().mean() < 0.4
