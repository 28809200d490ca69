"""Images as the latents of an autoencoder: written once, read from the disk while training.

A folder of latents holds latents.npy (N, C, Y, X), float16 or float32, already scaled to a std of about 1, and labels.npy (N,) of integers;
optionally val_latents.npy and val_labels.npy. `train_sit.py --encode-latents FOLDER` writes one with Stable Diffusion's autoencoder.
"""
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

import data
import runtime
from data import ImageData
from runtime import BadInput

SCALE = 0.18215                                                  # of Stable Diffusion's latents: brings their std to about 1


class Latents(Dataset):
    """Rows of a latents.npy on the disk, which is mapped and never read as a whole. Item: (float32 (C, Y, X), int)."""
    in_memory = False

    def __init__(self, path, labels, index):
        self.path, self.labels, self.index = path, labels, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        rows = np.load(self.path, mmap_mode="r")                 # opened anew: a map kept in the object would travel to the workers as an array
        return torch.from_numpy(rows[self.index[i]].astype(np.float32)), int(self.labels[i])


def read_latents(folder, name):
    """(path, labels) of folder/<name>latents.npy. Raises BadInput where the two files are damaged or do not fit."""
    path, beside = folder / f"{name}latents.npy", folder / f"{name}labels.npy"
    try:
        latents, labels = (np.lib.format.open_memmap(file, mode="r") for file in (path, beside))      # np.load would also take an archive for an array
    except (OSError, ValueError, EOFError) as error:
        raise BadInput(f"{path} and {beside.name} cannot be read ({error}): write them anew with --encode-latents") from error
    if latents.ndim != 4 or latents.shape[2] != latents.shape[3] or latents.dtype.kind != "f":
        raise BadInput(f"{path} holds {latents.dtype} {latents.shape}, not square latents (N, C, Y, X) of floats: write it anew with --encode-latents")
    if labels.shape != (len(latents),) or labels.dtype.kind not in "iu" or not len(labels):
        raise BadInput(f"{beside} must hold an integer for each of the {len(latents)} latents, not {labels.dtype} {labels.shape}: write it anew")
    if labels.min() < 0:
        raise BadInput(f"{beside} has the label {labels.min()}, and labels count from 0: write it anew")
    return path, torch.from_numpy(labels.astype(np.int64)), latents.shape[1:]


def load(folder, holdout=0.0, seed=0):
    """The ImageData of a folder of latents, whose items are float32 (C, Y, X). Validation: val_latents.npy, else `holdout` or 5 % of each class.

    Raises BadInput for files that are missing, damaged, or do not fit."""
    path, labels, shape = read_latents(folder, "")
    train = torch.arange(len(labels))
    if (folder / "val_latents.npy").exists() and not holdout:
        val_path, val_labels, val_shape = read_latents(folder, "val_")
        if val_shape != shape:
            raise BadInput(f"{val_path} holds latents of shape {val_shape} and latents.npy of {shape}: write both anew with --encode-latents")
        val = Latents(val_path, val_labels, torch.arange(len(val_labels)))
    else:
        pairs = len(labels) % 2 == 0 and torch.equal(labels[::2], labels[1::2])       # an image and its mirror image stay on one side
        train, held = data.split_by_class(labels, holdout or 0.05, seed if holdout else None, copies=1 + pairs)
        if not len(held):
            raise BadInput(f"{folder} has too few latents to validate on {f'--holdout {holdout}' if holdout else 'the usual share of 0.05'} of each class: "
                           + ("raise it" if holdout else "pass a larger --holdout, or add val_latents.npy and val_labels.npy"))
        val = Latents(path, labels[held], held)
    classes = [str(c) for c in range(1 + int(max(labels.max(), val.labels.max())))]
    return ImageData(str(folder), Latents(path, labels[train], train), val, classes, shape[0], shape[-1], False, [0.0] * shape[0], [1.0] * shape[0])


def load_vae(name, device):
    """Stable Diffusion's autoencoder, frozen. Raises BadInput where diffusers, or the model, is not there."""
    kind = runtime.import_optional("diffusers", "--vae").AutoencoderKL
    try:
        return kind.from_pretrained(name).to(device).eval().requires_grad_(False)
    except (OSError, ValueError) as error:
        raise BadInput(f"--vae {name} cannot be loaded ({' '.join(str(error).split())[:200]}): check the name, the path or the network") from error


@torch.no_grad()
def encode(args, world):
    """The images of --data -> latents.npy, labels.npy (each image, then its mirror image where that keeps its class) and val_* (without mirrors) in --encode-latents.

    The posterior is sampled once, seeded by the image's index; centre crop after the shorter side was brought to --img-size."""
    if not args.vae:
        raise BadInput("--encode-latents needs --vae, the autoencoder: for example --vae stabilityai/sd-vae-ft-ema")
    images, vae = data.load_images(args.data, args.holdout, args.seed), load_vae(args.vae, world.device)
    size, batch = args.img_size or images.size or 256, args.micro_batch or 32
    if min(len(images.train), len(images.val)) < world.size:
        raise BadInput(f"--data {args.data} has fewer images in train/ or val/ than there are processes: start fewer")
    transform = v2.Compose([v2.Resize(size, **data.BICUBIC), v2.CenterCrop(size), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])])
    out = Path(args.encode_latents)
    runtime.make_out(out, vars(args), world)
    for name, part, mirrors in (("", images.train, 1 + images.flip), ("val_", images.val, 1)):
        rows = None
        for k, (x, _) in enumerate(data.eval_batches(part, transform, batch, world.rank, world.size, args.workers)):
            x = x.to(world.device).expand(-1, 3, -1, -1)
            for mirror in range(mirrors):
                posterior = vae.encode(x.flip(3) if mirror else x).latent_dist
                first = k * batch
                index = [(world.rank + (first + i) * world.size) * mirrors + mirror for i in range(len(x))]
                noise = torch.stack([torch.randn(posterior.mean.shape[1:], generator=torch.Generator().manual_seed(runtime.mix_seed("encode", name, i))) for i in index])
                z = (posterior.mean + posterior.std * noise.to(posterior.mean)).mul(SCALE).to("cpu", torch.float16).numpy()
                if rows is None:                                 # all ranks write into one file, which rank 0 has made
                    path, shape = out / f"{name}latents.npy.tmp", (len(part) * mirrors, *z.shape[1:])
                    if world.main:
                        np.lib.format.open_memmap(path, "w+", np.float16, shape)
                    runtime.all_sum([0], world)
                    rows = np.load(path, mmap_mode="r+")
                rows[index] = z
        rows.flush()
        runtime.all_sum([0], world)
        if world.main:
            np.save(out / f"{name}labels.npy", part.labels.repeat_interleave(mirrors).numpy())
            (out / f"{name}latents.npy.tmp").replace(out / f"{name}latents.npy")
            print(f"{out}: {name}latents.npy {rows.shape}, std {rows[:1000].astype(np.float32).std():.2f} (about 1 is right)")


@torch.no_grad()
def decode(vae, z):
    """Scaled latents (B, C, Y, X) -> images (B, 3, 8 Y, 8 X) in [-1, 1]."""
    return vae.decode(z / SCALE).sample
