r"""Samples of a flow-matching run (train_sit.py), and their distance from real images.

    python -m evals.samples --ckpt out/sit-... --count 64 --cfg-scale 2
    python -m evals.samples --ckpt out/sit-... --count 1000 --frechet out/vit-...
    torchrun --nproc_per_node=8 -m evals.samples --ckpt out/sit --vae stabilityai/sd-vae-ft-ema \
        --count 50000 --sampler sde --steps 250 --fid /path/to/images        as in the tables of SiT

--frechet is the Frechet distance on the features of one of our own ViTs. It is not FID, which needs the
Inception net of the package torch-fidelity. In the run's folder: samples.png, samples.npz (arr_0, uint8
(N, Y, X, 3), as ADM's evaluation reads it) and samples.json with the measures.
"""
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from torchvision.transforms import v2
from torchvision.utils import save_image

import data
import probe
import runtime
from model import guided, path_coefficients
from runtime import BadInput

GROUP = 32                      # samples that are always computed together: see `sample_groups`
LAST_STEP = 0.04                # length of the SDE's last step, without noise
LATENT_SCALE = 0.18215          # of Stable Diffusion's autoencoder: its latents get a std of about 1


# --------------------------------------------------------------------------------------------------
# samplers. A velocity is a function (x (B, ...), t (B,), y (B,) labels) -> (B, ...)

def score_from_velocity(path, t, x, velocity):
    """grad log p_t(x) = (r v - x) / (sigma^2 - r sigma' sigma), r = alpha / alpha'; t: a float below 1.

    From v = alpha' E[x_1 | x] + sigma' E[x_0 | x],  x = alpha E[x_1 | x] + sigma E[x_0 | x],
    and the score -E[x_0 | x] / sigma."""
    alpha, sigma, d_alpha, d_sigma = path_coefficients(path, torch.tensor(float(t), dtype=torch.float64))
    ratio = alpha / d_alpha
    return (ratio.item() * velocity - x) / (sigma * sigma - ratio * d_sigma * sigma).item()


def euler(velocity, x, y, steps, path, draw):
    """The ODE dx = v dt from noise x (B, ...) at t = 0 to data at t = 1, one evaluation a step."""
    dt = 1 / steps
    for i in range(steps):
        x = x + velocity(x, x.new_full([len(x)], i * dt), y) * dt
    return x


def heun(velocity, x, y, steps, path, draw):
    """The same with the mean of the slopes at both ends of each step: two evaluations, second order."""
    dt = 1 / steps
    for i in range(steps):
        first = velocity(x, x.new_full([len(x)], i * dt), y)
        second = velocity(x + first * dt, x.new_full([len(x)], (i + 1) * dt), y)
        x = x + (first + second) / 2 * dt
    return x


def sde(velocity, x, y, steps, path, draw):
    """Euler-Maruyama on dx = (v + w s) dt + sqrt(2 w) dW, score s, w = sigma(t): the same marginals.

    Up to t = 1 - LAST_STEP; then one step along the drift without noise, as s has no limit at t = 1.
    draw: a function () -> noise like x."""
    dt = (1 - LAST_STEP) / (steps - 1)
    for i in range(steps):
        t = i * dt
        w = path_coefficients(path, torch.tensor(t, dtype=torch.float64))[1].item()
        v = velocity(x, x.new_full([len(x)], t), y)
        drift = v + w * score_from_velocity(path, t, x, v)
        last = i == steps - 1
        x = x + drift * LAST_STEP if last else x + drift * dt + math.sqrt(2 * w * dt) * draw()
    return x


SAMPLERS = {"euler": euler, "heun": heun, "sde": sde}


def label_sequence(counts, n):
    """Labels of samples 0 ... n - 1, int64 (n,), in the shares of `counts`, the images per class.

    Each goes to the class that is furthest behind its share, so equal counts give 0, 1, ..., 0, 1, ...,
    and a longer sequence begins like a shorter one."""
    share = np.asarray(counts, dtype=np.float64) / sum(counts)
    labels, given = np.empty(n, dtype=np.int64), np.zeros(len(share))
    for i in range(n):
        labels[i] = np.argmax((share * (i + 1) - given).round(9))        # rounded: the first of a tie
        given[labels[i]] += 1
    return torch.from_numpy(labels)


def sample_groups(velocity, shape, count, class_counts, sampler="heun", steps=25, path="linear", seed=0,
                  device="cpu", rank=0, world=1):
    """Yields samples (GROUP, *shape): of rank r the groups r, r + world, ...; every rank as many.

    Sample i is a function of the velocity and (seed, i): its noise has its own generator. As matrix
    products may round differently in a batch of another size, a group is always computed as a whole.
    The caller drops what lies past `count`."""
    turns = math.ceil(count / GROUP / world)
    labels = label_sequence(class_counts, turns * world * GROUP).to(device)
    for group in range(rank, turns * world, world):
        index = range(group * GROUP, (group + 1) * GROUP)
        generators = [torch.Generator().manual_seed(runtime.mix_seed(seed, "sample", i)) for i in index]

        def draw():
            return torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)

        yield SAMPLERS[sampler](velocity, draw(), labels[index], steps, path, draw)


def to_uint8(x):
    """Images in [-1, 1] -> uint8, clipped and rounded."""
    return ((x.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def load_vae(name, device):
    """Stable Diffusion's autoencoder, frozen. Raises BadInput where it or diffusers is missing."""
    kind = runtime.import_optional("diffusers", "--vae").AutoencoderKL
    try:
        return kind.from_pretrained(name).to(device).eval().requires_grad_(False)
    except (OSError, ValueError) as error:
        words = " ".join(str(error).split())[:200]
        raise BadInput(f"--vae {name} cannot be loaded ({words}): check the name or the "
                       "network") from error


@torch.no_grad()
def draw_images(net, saved, args, world, dtype, vae=None):
    """args.count samples as uint8 images (N, C, Y, X), on rank 0; all ranks share the work."""
    def velocity(x, t, y):
        with runtime.autocast(world.device, dtype):
            return net(x, t, y).float()

    shape = (saved["in_chans"], saved["img_size"], saved["img_size"])
    groups = sample_groups(guided(velocity, saved["classes"], args.cfg_scale), shape, args.count,
                           saved["class_counts"], args.sampler, args.steps, saved["path"], args.seed,
                           world.device, world.rank, world.size)
    images = []
    for x in groups:
        x = to_uint8(vae.decode(x / LATENT_SCALE).sample if vae else x).contiguous()
        turn = [torch.empty_like(x) for _ in range(world.size)] if world.size > 1 else [x]
        if world.size > 1:
            dist.all_gather(turn, x)
        if world.main:
            images += [part.cpu() for part in turn]
    return torch.cat(images)[:args.count] if world.main else None


# --------------------------------------------------------------------------------------------------
# measures

def mean_and_covariance(features):
    """(N, D) -> mean (D,) and unbiased covariance (D, D), float64."""
    features = features.double()
    return features.mean(0), torch.cov(features.T).reshape(features.shape[1], -1)


def frechet_distance(mean1, cov1, mean2, cov2):
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)): the squared 2-Wasserstein distance of two Gaussians.

    The root's trace is the sum of the roots of the eigenvalues of C1^(1/2) C2 C1^(1/2). That matrix is
    symmetric, so singular covariances (fewer samples than dimensions) make nothing complex."""
    mean1, cov1, mean2, cov2 = (a.double() for a in (mean1, cov1, mean2, cov2))
    values, vectors = torch.linalg.eigh(cov1)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov2 @ root).clamp(min=0).sqrt().sum()
    return ((mean1 - mean2).square().sum() + cov1.trace() + cov2.trace() - 2 * cross).item()


@torch.no_grad()
def image_moments(net, images, steps, device):
    """Mean and covariance of the net's output over a set of images, which go through `steps` first."""
    batches = data.eval_batches(images, v2.Compose(steps), 100)
    return mean_and_covariance(torch.cat([net(x.to(device)).cpu() for x, _ in batches]))


def load_judge(path, in_chans):
    """(ViT without its head, the steps from uint8 images to its input) of a run of train_vit.py.

    Raises BadInput for any other run, and for images of another number of channels."""
    remedy = "give a run of train_vit.py on such images"
    vit, saved = probe.load_net(path, "--frechet", remedy)
    if saved["kind"] != "vit" or saved["in_chans"] != in_chans:
        raise BadInput(f"--frechet {path} is a {saved['kind']} of {saved['in_chans']} channels, and the "
                       f"samples have {in_chans}: {remedy}")
    vit.head = torch.nn.Identity()
    side, (mean, std) = saved["img_size"], probe.pixel_scale(saved)
    return vit, [v2.Resize((side, side), **data.BICUBIC), v2.ToDtype(torch.float32, scale=True),
                 v2.Normalize(mean, std)]


def load_real_images(args, saved):
    """The images that the run was trained on. Raises BadInput where they are latents or other ones."""
    if saved["latents"]:
        raise BadInput(f"--frechet needs images, and {args.ckpt} was trained on latents: use --fid")
    images = data.load_images(args.data or saved["data"], saved["holdout"], saved["seed"])
    for key, value in data.facts(images).items():
        if value != saved[key]:
            raise BadInput(f"--data {images.name} has {key} {value}, and {args.ckpt} was trained with "
                           f"{saved[key]}: pass the same images")
    return images


def measure_frechet(pixels, images, judge, which, device):
    """Frechet distance of samples, uint8 (N, C, Y, X), from the "val" or "train" part of the images.

    frechet_floor: that of the other part, which is real. Images go through the samples' size."""
    vit, steps = judge
    resized = data.resize_steps(images, pixels.shape[-1]) + steps
    real, other = (images.val, images.train) if which == "val" else (images.train, images.val)
    samples = data.Images(pixels, torch.zeros(len(pixels), dtype=torch.int64))
    target = image_moments(vit.to(device), real, resized, device)
    return dict(frechet_vit=frechet_distance(*image_moments(vit, samples, steps, device), *target),
                frechet_floor=frechet_distance(*image_moments(vit, other, resized, device), *target),
                frechet_set=which)


class PlainImages(Dataset):
    """uint8 images (N, 3, Y, X) without labels, as torch-fidelity reads them."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i]


def measure_fid(images, folder, device):
    """FID against the images in `folder`, and Inception Score, of uint8 images (N, 3, Y, X)."""
    fidelity = runtime.import_optional("torch_fidelity", "--fid")
    found = fidelity.calculate_metrics(input1=PlainImages(images), input2=folder, fid=True, isc=True,
                                       cuda=device.type == "cuda", verbose=False)
    return dict(fid=found["frechet_inception_distance"], inception_score=found["inception_score_mean"])


# --------------------------------------------------------------------------------------------------
# command line

def get_args(argv=None):
    number, parser = runtime.number, runtime.Parser(description=__doc__)
    add = parser.add_argument
    add("--ckpt", required=True, help="a run of train_sit.py: its folder, or the checkpoint in it")
    add("--count", type=number(int, low=1), default=1000, help="samples")
    add("--sampler", choices=list(SAMPLERS), default="heun", help="of the ODE, or the SDE")
    add("--steps", type=number(int, low=2), default=25, help="from noise to data")
    add("--cfg-scale", type=number(float, low=0), default=1.0, help="guidance by the label; 1 is none")
    add("--seed", type=number(int, low=0), help="of the noise; else the run's")
    add("--frechet", metavar="RUN", help="Frechet distance on the features of this run of train_vit.py")
    add("--frechet-set", choices=["val", "train"], default="val", help="the images to compare with")
    add("--data", help="where the run's images are now, for --frechet")
    add("--fid", metavar="FOLDER", help="FID against these images (pip install torch-fidelity)")
    add("--vae", metavar="NAME", help="autoencoder of latents: stabilityai/sd-vae-ft-ema, or a folder")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda or mps")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of the forward pass")
    add("--threads", type=number(int, low=0), default=0, help="CPU threads; 0 leaves torch's choice")
    add("--out", help="folder for the results; else the run's")
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def main(argv=None):
    args = get_args(argv)
    world, dtype = probe.start_probe(args)
    net, saved = probe.load_net(args.ckpt, "--ckpt", "give a run of train_sit.py")
    if saved["kind"] != "sit":
        raise BadInput(f"--ckpt {args.ckpt} is a run of train_{saved['kind']}.py, not of train_sit.py")
    if args.cfg_scale != 1 and not saved["label_dropout"]:
        raise BadInput(f"--cfg-scale {args.cfg_scale} needs a net that knows samples without label, and "
                       f"{args.ckpt} has label_dropout 0: pass --cfg-scale 1")
    if saved["latents"] and not args.vae:
        raise BadInput(f"--ckpt {args.ckpt} makes latents: pass --vae, the autoencoder to decode them")
    if args.fid and not Path(args.fid).is_dir():
        raise BadInput(f"--fid {args.fid} is not a folder: pass one of images")
    if args.fid:
        runtime.import_optional("torch_fidelity", "--fid")       # missed before the work, not after
    args.seed = saved["seed"] if args.seed is None else args.seed
    judge = load_judge(args.frechet, saved["in_chans"]) if args.frechet else None
    images = load_real_images(args, saved) if args.frechet else None
    vae = load_vae(args.vae, world.device) if saved["latents"] else None
    out = Path(args.out or (args.ckpt if Path(args.ckpt).is_dir() else Path(args.ckpt).parent))
    out.mkdir(parents=True, exist_ok=True)

    pixels = draw_images(net.to(world.device), saved, args, world, dtype, vae)
    if not world.main:
        return
    colour = pixels.expand(-1, 3, -1, -1)                                # grey: three equal channels
    save_image(colour[:256] / 255, out / "samples.png", nrow=16)
    np.savez(out / "samples.npz", arr_0=colour.permute(0, 2, 3, 1).numpy())
    found = dict(step=saved["step"], weights=saved["weights"], count=args.count, sampler=args.sampler,
                 steps=args.steps, cfg_scale=args.cfg_scale, seed=args.seed)
    if args.frechet:
        found.update(measure_frechet(pixels, images, judge, args.frechet_set, world.device))
    if args.fid:
        found.update(measure_fid(colour, args.fid, world.device))
    probe.write_results(out / "samples.json", "-m evals.samples", args, world, dtype, **found)
    print(", ".join(f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in found.items()))
    print(f"{out}: samples.png, samples.npz, samples.json")


if __name__ == "__main__":
    runtime.run_script(main)
