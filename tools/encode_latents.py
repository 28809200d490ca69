"""Images -> the latents of Stable Diffusion's autoencoder, on which train_sit.py --preset paper trains.

    python -m tools.encode_latents --data /path/to/imagenet --out data/latents
    torchrun --nproc_per_node=8 -m tools.encode_latents ...              the same file, written together

It needs `pip install diffusers`. --out will hold latents.npy (N, 4, size / 8, size / 8), float16, scaled
to a std of about 1, and labels.npy (N,): each image, then its mirror image where that keeps its class.
val_latents.npy and val_labels.npy are the validation part, without mirror images. `data.load_latents`
reads them.
"""
from pathlib import Path

import numpy as np
import torch
from torchvision.transforms import v2

import data
import runtime
from evals.samples import LATENT_SCALE, load_vae


def get_args(argv=None):
    number, parser = runtime.number, runtime.Parser(description=__doc__)
    add = parser.add_argument
    add("--data", required=True,
        help=f"{', '.join(data.NAMES)}, or a folder with train/<class>/ and val/<class>/")
    add("--vae", default="stabilityai/sd-vae-ft-ema", metavar="NAME", help="autoencoder, or its folder")
    add("--out", required=True, help="folder for the latents")
    add("--img-size", type=number(int, low=8), help="pixels; else the images' own, of files 256")
    add("--batch-size", type=number(int, low=1), default=32, help="images per forward pass and process")
    add("--bad-images", choices=["stop", "skip"], default="stop", help="at files that cannot be read")
    add("--workers", type=number(int, low=0), default=0, help="data loading processes per rank")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda or mps")
    add("--threads", type=number(int, low=0), default=0, help="CPU threads; 0 leaves torch's choice")
    return parser.parse_args(argv)


@torch.no_grad()
def encode_batch(vae, x, seeds):
    """Pixels (B, 3, Y, X) in [-1, 1] -> a draw of their posterior, scaled, float16 (B, 4, Y / 8, X / 8).

    seeds: one per image, so that its latent depends on nothing else."""
    posterior, generator = vae.encode(x).latent_dist, torch.Generator()
    noise = [torch.randn(posterior.mean.shape[1:], generator=generator.manual_seed(s)) for s in seeds]
    latents = posterior.mean + posterior.std * torch.stack(noise).to(posterior.mean)
    return latents.mul(LATENT_SCALE).to("cpu", torch.float16).numpy()


def encode_part(images, mirrors, prefix, transform, vae, args, world):
    """Write <prefix>latents.npy and <prefix>labels.npy of a data set. All ranks write into one file.

    mirrors: 2 with mirror images, else 1. Row i * mirrors is image i, the next its mirror image."""
    path, rows, seen = Path(args.out, f"{prefix}latents.npy"), None, 0
    batches = data.eval_batches(images, transform, args.batch_size, world.rank, world.size, args.workers)
    for x, _ in batches:
        x = x.to(world.device).expand(-1, 3, -1, -1)
        for mirror in range(mirrors):
            index = [(world.rank + (seen + i) * world.size) * mirrors + mirror for i in range(len(x))]
            seeds = [runtime.mix_seed("encode", prefix, i) for i in index]
            latents = encode_batch(vae, x.flip(3) if mirror else x, seeds)
            if rows is None:
                rows = open_rows(f"{path}.tmp", (len(images) * mirrors, *latents.shape[1:]), world)
            rows[index] = latents
        seen += len(x)
    rows.flush()
    runtime.all_sum([0], world)                                  # wait for all
    if world.main:
        np.save(Path(args.out, f"{prefix}labels.npy"), images.labels.repeat_interleave(mirrors).numpy())
        Path(f"{path}.tmp").replace(path)
        std = rows[:1000].astype(np.float32).std()
        print(f"{path}: {rows.shape}, std {std:.2f} (about 1 is right)")


def open_rows(path, shape, world):
    """The array of the file `path`, writable, which rank 0 makes."""
    if world.main:
        np.lib.format.open_memmap(path, "w+", np.float16, shape)
    runtime.all_sum([0], world)                                  # wait for it
    return np.load(path, mmap_mode="r+")


def main(argv=None):
    args = get_args(argv)
    world = runtime.start(args.device, args.threads)
    images = data.load_images(args.data, bad_images=args.bad_images)
    if min(len(images.train), len(images.val)) < world.size:
        raise runtime.BadInput(f"--data {args.data} has fewer images than processes: start fewer")
    vae, size = load_vae(args.vae, world.device), args.img_size or images.size or 256
    # the shorter side to `size`, then the centre, as the released code does
    transform = v2.Compose([v2.Resize(size, **data.BICUBIC), v2.CenterCrop(size),
                            v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])])
    if world.main:
        runtime.make_out(args.out, vars(args))
    encode_part(images.train, 1 + images.flip, "", transform, vae, args, world)
    encode_part(images.val, 1, "val_", transform, vae, args, world)


if __name__ == "__main__":
    runtime.run_script(main)
