"""Latents: tools/encode_latents.py with a stand-in for the autoencoder, folders of latents, the way from
images to samples."""
import functools
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data
import runtime
import train_sit
from evals import samples
from test_runtime import launch_ranks
from test_train_vit import load, one_sentence
from tools import encode_latents

pytestmark = pytest.mark.usefixtures("no_curve")
SCALE = samples.LATENT_SCALE


class FakeVAE(torch.nn.Module):
    """Encodes by the mean of 2 x 2 pixels and decodes by repeating them; the fourth channel is the mean
    of the others. std is that of the posterior."""
    std = 0.0

    @classmethod
    def from_pretrained(cls, name):
        if name == "missing":
            raise OSError("no such model")
        return cls()

    def encode(self, x):
        small = F.avg_pool2d(x, 2)
        mean = torch.cat([small, small.mean(1, keepdim=True)], dim=1) / SCALE
        posterior = types.SimpleNamespace(mean=mean, std=torch.full_like(mean, self.std / SCALE))
        return types.SimpleNamespace(latent_dist=posterior)

    def decode(self, z):
        pixels = (z * SCALE)[:, :3].repeat_interleave(2, 2).repeat_interleave(2, 3)
        return types.SimpleNamespace(sample=pixels)


class NoisyVAE(FakeVAE):
    std = 0.5


def encode(out, vae, *flags):
    """Runs the tool on digits of 8 x 8, in this or a child process."""
    sys.modules["diffusers"] = types.SimpleNamespace(AutoencoderKL=vae)
    argv = ["--data", "digits8x8", "--out", out, "--device", "cpu", "--threads", 1, "--batch-size", 300]
    runtime.run_script(lambda: encode_latents.main([*map(str, argv), *flags]))


@pytest.fixture(autouse=True)
def no_package(monkeypatch):
    """Whatever `encode` puts there is gone after the test."""
    monkeypatch.setitem(sys.modules, "diffusers", None)


def test_latents_from_images_to_samples(tmp_path, capsys):
    """Images -> latents with mirror images -> training without the images -> samples by the decoder."""
    encode(tmp_path / "latents", FakeVAE, "--data", "emoji", "--batch-size", "60")
    z, y = (np.load(tmp_path / "latents" / f"{name}.npy") for name in ("latents", "labels"))
    images = data.load_images("emoji")
    small = F.avg_pool2d(images.train.images.float() / 127.5 - 1, 2)
    assert z.shape == (2 * len(small), 4, 16, 16) and z.dtype == np.float16
    assert (y == images.train.labels.repeat_interleave(2).numpy()).all()
    np.testing.assert_allclose(z[::2, :3], small, atol=2e-3)
    np.testing.assert_allclose(z[1::2, :3], small.flip(3), atol=2e-3)
    assert len(np.load(tmp_path / "latents" / "val_latents.npy")) == len(images.val)
    assert not list((tmp_path / "latents").glob("*.tmp"))

    run = tmp_path / "run"
    train_sit.main([str(word) for word in (
        "--data", tmp_path / "latents", "--out", run, "--depth", 2, "--batch-size", 32, "--steps", 2,
        "--device", "cpu", "--threads", 1, "--set", "workers=1")])
    made = load(run)["args"]
    assert (made["latents"], made["in_chans"], made["img_size"], made["flip"]) == (True, 4, 16, False)
    assert not (run / "samples.png").exists() and "no samples.png" in capsys.readouterr().out
    argv = ["--ckpt", str(run), "--count", "2", "--steps", "2", "--vae", "any", "--device", "cpu"]
    samples.main(argv)
    with np.load(run / "samples.npz") as found:
        assert found["arr_0"].shape == (2, 32, 32, 3)
        assert (found["arr_0"][:, ::2, ::2] == found["arr_0"][:, 1::2, 1::2]).all()


def test_two_processes_write_the_same_latents(tmp_path):
    """An image's draw of the posterior depends on the image alone."""
    encode(tmp_path / "alone", NoisyVAE)
    codes, outputs = launch_ranks(2, encode, tmp_path / "many", NoisyVAE, folder=tmp_path)
    assert codes == [0, 0], outputs
    for name in ("latents", "labels", "val_latents", "val_labels"):
        a, b = (np.load(tmp_path / who / f"{name}.npy") for who in ("alone", "many"))
        assert (a == b).all()
    encode(tmp_path / "exact", FakeVAE)
    noise = np.load(tmp_path / "alone" / "latents.npy") - np.load(tmp_path / "exact" / "latents.npy")
    assert noise.std() == pytest.approx(0.5, rel=0.02) and abs(noise.mean()) < 0.01


def test_a_missing_autoencoder_is_said_before_any_work(tmp_path, capsys, monkeypatch):
    def script(argv):
        runtime.run_script(lambda: encode_latents.main(argv))
    sentence = functools.partial(one_sentence, script)
    argv = ["--data", "digits8x8", "--out", tmp_path / "l", "--vae", "missing"]
    assert "pip install diffusers" in sentence(capsys, argv)
    monkeypatch.setitem(sys.modules, "diffusers", types.SimpleNamespace(AutoencoderKL=FakeVAE))
    assert "--vae missing" in sentence(capsys, argv) and not (tmp_path / "l").exists()


# --------------------------------------------------------------------------------------------------
# folders of latents

def latent_folder(folder, n=80, shape=(4, 8, 8)):
    folder.mkdir()
    latents = np.random.default_rng(0).standard_normal((n, *shape)).astype(np.float16)
    np.save(folder / "latents.npy", latents)
    np.save(folder / "labels.npy", np.arange(n) // 2 % 2)
    return folder


def test_latents_without_validation_are_split_with_their_mirror_images(tmp_path):
    folder = latent_folder(tmp_path / "l")
    images = data.load_images(folder)
    assert images.size == 8 and (len(images.train), len(images.val)) == (76, 4)
    held = set(images.val.index.tolist())
    assert held == {i ^ 1 for i in held} and not held & set(images.train.index.tolist())
    x, y = images.val[1]
    i = images.val.index[1].item()
    assert torch.equal(x, torch.from_numpy(np.load(folder / "latents.npy")[i]).float())
    assert y == i // 2 % 2


def save(name, array):
    return lambda folder: np.save(folder / name, array)


@pytest.mark.parametrize("damage, word", [
    (lambda folder: (folder / "labels.npy").unlink(), "labels.npy"),
    (lambda folder: (folder / "latents.npy").write_bytes(b"x"), "latents.npy"),
    (lambda folder: np.savez(open(folder / "labels.npy", "wb"), np.zeros(80, dtype=int)), "labels.npy"),
    (save("labels.npy", np.zeros(3, dtype=np.int64)), "labels.npy"),
    (save("labels.npy", np.arange(80) % 3 - 1), "labels.npy"),
    (save("labels.npy", np.arange(80)), "pass a larger --holdout, or add val_latents.npy"),
    (save("latents.npy", np.zeros((80, 4, 8), dtype=np.float16)), "latents.npy"),
])
def test_damaged_latents(tmp_path, damage, word):
    folder = latent_folder(tmp_path / "l")
    damage(folder)
    with pytest.raises(runtime.BadInput, match=word):
        data.load_images(folder)
