"""Flow-matching transformers (SiT, U-ViT) whose shortcuts decay with depth (paper 3).

On a laptop: emoji of 32 x 32 pixels in seven groups, SiT of 8 layers and 2.7 M parameters, minutes on two cores:
    python train_sit.py                                          decayed to .8, long skips
    python train_sit.py --alpha-min 1                            plain shortcuts, long skips
    python train_sit.py --alpha-min 1 --no-long-skips            the usual SiT
    python train_sit.py --sample 1000 --cfg-scale 2              samples.png and samples.npz of the first run
On digits, samples that a person reads in 4 minutes on one core (validation loss .235):
    python train_sit.py --data mnist5k --patch-size 7 --steps 1600 --lr 3e-3 --lr-schedule cosine --cfg-scale 2

The paper's SiT-XL/2 on ImageNet-1k at 256 px, 8 GPUs (paper: FID 17.2 usual, 11.8 decayed after 400k steps; not run by us):
    python train_sit.py --preset paper --data /path/to/imagenet --vae stabilityai/sd-vae-ft-ema --img-size 256 --encode-latents data/latents
    torchrun --nproc_per_node=8 train_sit.py --preset paper --data data/latents --out out/sit
    torchrun --nproc_per_node=8 train_sit.py --preset paper --out out/sit --vae stabilityai/sd-vae-ft-ema --sample 50000
"""
import argparse
import copy
import dataclasses
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms import v2
from tqdm import tqdm

import data
import flow
import latents
import optim
import probe
import runtime
from model import SIT_SIZES, UVIT_SIZES, SiT, UViT, ViT, alpha_min_for, shortcut_weights
from runtime import BadInput

PRESETS = {
    # minutes on two cores
    "laptop": dict(
        data="emoji", size="nano", img_size=None, patch_size=4, alpha_min=0.8, steps=1000, batch_size=64, warmup=50,
        lr={"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 5e-4, "muon": 2e-3}, lr_schedule="constant", weight_decay=0.0, clip=1.0, ema=0.995, ema_warmup=True,
        eval_every=250, save_every=250, samples=32, sampler="heun", sample_steps=25, cfg_scale=1.0, measure_samples=512),
    # SiT-XL/2 on latents of ImageNet-1k. The official code: AdamW 1e-4 constant without warm-up, no decay, batch 256, EMA .9999, label dropout .1, no clipping,
    # flips; alpha_min .8. Samples of its tables: 50,000, SDE of 250 steps, no guidance. Not ours: fp16.
    "paper": dict(
        data=None, size="XL", img_size=None, patch_size=2, alpha_min=0.8, steps=400000, batch_size=256, warmup=0,
        lr={"adamw": 1e-4, "soap": 1e-4, "kl-shampoo": 5e-5, "muon": 1e-4}, lr_schedule="constant", weight_decay=0.0, clip=0.0, ema=0.9999, ema_warmup=False,
        eval_every=10000, save_every=10000, samples=32, sampler="sde", sample_steps=250, cfg_scale=1.0, measure_samples=50000, workers=8),
}
# Flags that define the run: a checkpoint with other values is another run. Flags that never touch its course are free; the rest may change, and is said.
FIXED = ("backbone", "size", "depth", "img_size", "patch_size", "shortcut", "alpha_min", "schedule", "decay_on", "long_skips", "zero_init", "learn_sigma", "path",
         "label_dropout", "opt", "betas", "weight_decay", *runtime.MATRIX_FLAGS, "batch_size", "seed", "holdout")
FREE = ("preset", "device", "compile", "workers", "threads", "out", "resume", "log_every", "eval_every", "save_every", "wandb", "micro_batch", "alpha_eff",
        "samples", "sample", "sampler", "sample_steps", "cfg_scale", "sample_ema", "measure_samples", "frechet", "frechet_set", "fid", "vae", "encode_latents",
        "kind", "model", "classes", "class_counts", "in_chans", "latents", "train_images")
# Flags that matter with --sample, which takes the rest from the checkpoint; those that name its folder where --out does not; flags that matter with --encode-latents.
SAMPLE = {"preset", "out", "sample", "sampler", "sample_steps", "cfg_scale", "sample_ema", "seed", "device", "dtype", "threads", "vae", "frechet", "frechet_set", "fid",
          "data"}
NAMING = {"backbone", "size", "shortcut", "alpha_min", "alpha_eff", "long_skips", "opt"}
ENCODE = {"preset", "encode_latents", "data", "vae", "img_size", "holdout", "seed", "micro_batch", "workers", "device", "threads"}


def get_args(argv=None):
    """Two passes: the first finds the preset, whose values then become the defaults that --help shows and flags win over."""
    number = runtime.number
    presets = runtime.Parser(add_help=False)
    presets.add_argument("--preset", choices=list(PRESETS), default="laptop", help="a dict of defaults at the top of this file")
    preset = presets.parse_known_args(argv)[0].preset
    parser = runtime.Parser(description=__doc__, parents=[presets])

    add = parser.add_argument_group("model").add_argument
    add("--backbone", choices=["sit", "uvit"], default="sit", help="SiT (adaLN-Zero, long skips added) or U-ViT (time and label as tokens, long skips concatenated)")
    add("--size", choices=list(dict.fromkeys([*SIT_SIZES, *UVIT_SIZES])), help=f"sit: {', '.join(SIT_SIZES)}; uvit: {', '.join(UVIT_SIZES)}")
    add("--depth", type=number(int, low=1), help="number of blocks (uvit: one more, the middle one); None is the size's own")
    add("--img-size", type=number(int, low=1), help="side of the images, pixels; None is the data's own")
    add("--patch-size", type=number(int, low=1), help="side of a patch, pixels or latents")
    add("--shortcut", choices=["residual", "skipless", "decayed"], default="decayed", help="x + f(x), f(x) (uvit only), or a x + f(x) with a falling to --alpha-min")
    add("--skipless", dest="shortcut", action="store_const", const="skipless", default=argparse.SUPPRESS, help="same as --shortcut skipless")
    add("--alpha-min", type=number(float, low=0, high=1), default=None, help=f"weight of the last shortcut; None is {PRESETS[preset]['alpha_min']} if decayed, else 1")
    add("--alpha-eff", type=number(float, above=0, high=1), default=None, help="instead of --alpha-min: the product of all shortcut weights (paper 3: 1e-3 to 1e-2)")
    add("--schedule", choices=["linear", "cosine", "per-layer"], default="linear", help="how the shortcuts' weights fall over the depth")
    add("--decay-on", choices=["both", "attn", "mlp"], default="both", help="which shortcuts decay")
    add("--long-skips", action=argparse.BooleanOptionalAction, default=True, help="from the first half of the blocks to the mirrored second half")
    add("--zero-init", action=argparse.BooleanOptionalAction, default=True, help="uvit: zeros in the last weight of each branch at the start (sit's gates always start at zero)")
    add("--learn-sigma", action="store_true", help="sit: twice the output channels, second half dropped, as in the released nets")

    add = parser.add_argument_group("flow and samples").add_argument
    add("--path", choices=list(flow.PATHS), default="linear", help="from noise to data")
    add("--label-dropout", type=number(float, low=0, high=1), default=0.1, help="share of labels that training replaces by the null class, for guidance")
    add("--sampler", choices=list(flow.SAMPLERS), help="euler or heun on the ODE, sde: Euler-Maruyama")
    add("--sample-steps", type=number(int, low=1), help="steps from noise to data; heun evaluates the net twice a step")
    add("--cfg-scale", type=number(float, low=0), help="classifier-free guidance; 1 is none")
    add("--samples", type=number(int, low=0), help="samples to draw at each evaluation, for samples.png; 0 is off")
    add("--sample", type=number(int, low=1), default=None, metavar="N",
        help="do not train: N samples of the checkpoint in --out -> samples.png, samples.npz; --seed seeds their noise, --data says where the images for --frechet are now")
    add("--sample-ema", action=argparse.BooleanOptionalAction, default=True, help="sample the averaged weights, where there are any")
    add("--vae", default=None, metavar="NAME_OR_PATH", help="autoencoder of the latents, e.g. stabilityai/sd-vae-ft-ema (needs the diffusers package)")
    add("--encode-latents", default=None, metavar="FOLDER", help="do not train: write the latents of the images in --data, each and its mirror image, to this folder")

    add = parser.add_argument_group("quality of samples, at the end of training and with --sample").add_argument
    add("--frechet", default=None, metavar="CKPT", help="a checkpoint of train_vit.py: Frechet distance on its pooled features, between samples and images (this is not FID)")
    add("--frechet-set", choices=["val", "train"], default="val", help="the images to compare with")
    add("--fid", default=None, metavar="REFERENCE", help="FID against this folder of images and Inception Score (needs the torch-fidelity package)")
    add("--measure-samples", type=number(int, low=2), help="samples for --frechet and --fid at the end of training")

    add = parser.add_argument_group("optimisation").add_argument
    add("--opt", choices=["adamw", "soap", "kl-shampoo", "muon"], default="adamw", help="for the matrices of the blocks; AdamW takes the rest")
    add("--lr", type=number(float, above=0, high=1e30), default=None, help=f"peak learning rate; None is the preset's, by optimizer: {PRESETS[preset]['lr']}")
    add("--lr-schedule", choices=["constant", "cosine"], help="after the warm-up")
    add("--weight-decay", type=number(float, low=0), help="decoupled; not on biases, norms and positions")
    add("--betas", type=number(float, low=0, below=1), nargs=2, default=None, metavar=("B1", "B2"), help="momenta; None is the optimizer's own")
    runtime.add_matrix_flags(add)
    add("--batch-size", type=number(int, low=1), help="global: samples per update over all processes")
    add("--micro-batch", type=number(int, low=1), default=None, help="samples per forward pass and process; None means as many as the batch gives it")
    add("--steps", type=number(int, low=1), help="updates")
    add("--warmup", type=number(int, low=0), help="steps of linear warm-up")
    add("--clip", type=number(float, low=0), help="largest gradient norm; 0 is off")
    add("--ema", type=number(float, low=0, below=1), help="decay of the averaged weights, which evaluation and sampling use; 0 is off")
    add("--ema-warmup", action=argparse.BooleanOptionalAction, help="decay of at most (1 + step) / (10 + step), so that in short runs the average leaves the start behind")

    add = parser.add_argument_group("data").add_argument
    add("--data", help=f"{', '.join(data.NAMES)}, a folder with train/<class>/ and val/<class>/, or one that --encode-latents wrote: "
                       "latents.npy (N, C, Y, X), scaled, labels.npy (N,), optionally val_latents.npy and val_labels.npy")
    add("--holdout", type=number(float, low=0, high=0.9), default=0.0, help="validate on this share of the training set instead: for tuning")
    add("--flip", action=argparse.BooleanOptionalAction, default=None,
        help="mirror training images at random, where that keeps their class; None is yes; latents have no such flag, as --encode-latents mirrors them")
    runtime.add_run_flags(parser, never="at the end only")

    parser.set_defaults(**{k: v for k, v in PRESETS[preset].items() if k not in ("lr", "alpha_min")})
    args = parser.parse_args(argv)
    unset = argparse.Namespace(**dict.fromkeys(vars(args), parser))                # filled already, so no default comes in: what changes was given
    given = {k for k, v in vars(parser.parse_args(argv, unset)).items() if v is not parser}
    check_given(args, given)
    if args.sample and "data" not in given:
        args.data = None                                         # the checkpoint's own
    elif args.data is None:
        raise BadInput(f"--preset {preset} needs --data: a folder that --encode-latents wrote")
    args.lr = args.lr or PRESETS[preset]["lr"][args.opt]
    if args.betas and args.opt == "muon":
        raise BadInput("--betas has no meaning for --opt muon, which has one momentum: leave it out")
    sizes = SIT_SIZES if args.backbone == "sit" else UVIT_SIZES
    if args.size not in sizes:
        raise BadInput(f"--backbone {args.backbone} has no --size {args.size}: use {', '.join(sizes)}")
    if args.backbone == "sit" and not args.zero_init:
        raise BadInput("--no-zero-init has no meaning for --backbone sit, whose gates start at zero: use --backbone uvit, or leave it out")
    if args.backbone == "uvit" and args.learn_sigma:
        raise BadInput("--learn-sigma has no meaning for --backbone uvit: leave it out")
    if args.cfg_scale != 1 and not args.label_dropout:
        raise BadInput(f"--cfg-scale {args.cfg_scale} needs a net that has seen samples without label: raise --label-dropout")
    if args.sample == 1 and (args.frechet or args.fid):
        raise BadInput("--frechet and --fid compare distributions, so they need a --sample of at least 2, better thousands: raise it")
    if args.sampler == "sde" and args.sample_steps < 2:
        raise BadInput(f"--sampler sde needs --sample-steps of at least 2, not {args.sample_steps}: the last step is without noise")
    args.depth = args.depth or sizes[args.size]["depth"]
    blocks = args.depth + (args.backbone == "uvit")
    try:
        if args.alpha_eff is not None:
            if args.alpha_min is not None:
                raise BadInput("--alpha-eff chooses --alpha-min: give one of the two")
            args.alpha_min = alpha_min_for(args.alpha_eff, blocks, args.schedule, args.decay_on)
        elif args.alpha_min is None:
            args.alpha_min = PRESETS[preset]["alpha_min"] if args.shortcut == "decayed" else 1.0
        alphas = shortcut_weights(args.shortcut, blocks, args.alpha_min, args.schedule, args.decay_on)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if 0 in alphas and args.zero_init:
        what = "--skipless (--shortcut skipless)" if args.shortcut == "skipless" else "--alpha-min 0"
        raise BadInput(f"{what} needs --backbone uvit and --no-zero-init: while branches start at zero nothing passes a shortcut of weight 0")
    args.out = args.out or (f"out/{args.backbone}-{args.size}-{args.shortcut}{f'-{args.alpha_min:.3g}' if args.shortcut == 'decayed' else ''}"
                            f"{'' if args.long_skips else '-noskips'}-{args.opt}-seed{args.seed}")
    return args


def check_given(args, given):
    """Raises BadInput for a flag that was given (a set of names) and has no effect."""
    rules = [(args.sample, given - SAMPLE - (set() if args.out else NAMING), "with --sample, which takes all that from the checkpoint: "),
             (args.encode_latents, given - ENCODE, "with --encode-latents: "),
             (args.sample and not args.frechet, given & {"data"}, "with --sample but without --frechet: "),
             (not args.frechet, given & {"frechet_set"}, "without --frechet: "),
             (not args.frechet and not args.fid, given & {"measure_samples"}, "without --frechet or --fid: "),
             (args.shortcut != "decayed", given & {"alpha_min", "alpha_eff", "schedule", "decay_on"}, f"with --shortcut {args.shortcut}: use --shortcut decayed, or ")]
    for applies, useless, why in rules:
        if applies and useless:
            flag = min(useless)
            raise BadInput(f"{'--resume or --fresh' if flag == 'resume' else '--' + flag.replace('_', '-')} has no effect {why}leave it out")


# ---------------------------------------------------------------------------------------------------------------------
# data: pixels in [-1, 1], or latents

def load_data(args):
    """(ImageData, training transform, evaluation transform, whether they are latents); fills in args.img_size and args.flip. Pixels come out in [-1, 1]."""
    folder, flip_given, args.flip = Path(args.data).expanduser(), args.flip is not None, args.flip is not False
    if not (folder / "latents.npy").exists():
        images = data.load_images(args.data, args.holdout, args.seed)
        images = dataclasses.replace(images, mean=[0.5] * images.in_chans, std=[0.5] * images.in_chans)
        args.img_size = args.img_size or images.size
        if args.img_size is None:
            raise BadInput(f"--data {args.data} is a folder of images of any size: pass --img-size, or turn it into latents with --encode-latents")
        return images, data.train_transform(images, args.img_size, "none", flip=args.flip), data.eval_transform(images, args.img_size), False
    images = latents.load(folder, args.holdout, args.seed)
    if flip_given:
        raise BadInput(f"--flip has no effect on the latents in {args.data}, whose mirror images --encode-latents has written beside them: leave it out")
    if args.img_size not in (None, images.size):
        raise BadInput(f"--img-size {args.img_size} does not fit the latents in {args.data}, which are {images.size} x {images.size}: leave it out")
    args.img_size = images.size
    as_is = v2.Compose([v2.ToDtype(torch.float32)])
    return images, as_is, as_is, True


# ---------------------------------------------------------------------------------------------------------------------
# model, loss, samples

def model_options(args, images):
    """The keyword arguments of the model, which the checkpoint keeps."""
    options = dict(input_size=args.img_size, patch_size=args.patch_size, in_chans=images.in_chans, num_classes=len(images.classes), alpha_min=args.alpha_min,
                   long_skips=args.long_skips, label_dropout=args.label_dropout, shortcut=args.shortcut, schedule=args.schedule, decay_on=args.decay_on)
    if args.backbone == "sit":
        return dict(options, learn_sigma=args.learn_sigma, **dict(SIT_SIZES[args.size], depth=args.depth))
    return dict(options, zero_init=args.zero_init, **dict(UVIT_SIZES[args.size], depth=args.depth))


def build_model(backbone, options, seed=0):
    """SiT or UViT. Equal on all ranks: the seed does not know the rank."""
    torch.manual_seed(seed)
    try:
        return {"sit": SiT, "uvit": UViT}[backbone](**options)
    except ValueError as error:                                  # the model's own sentence on a size that does not fit
        raise BadInput(str(error)) from error


def draws(args, step, shape):
    """Noise (B, *shape), time (B,) and which labels to drop (B,) of the whole global batch of this step: a function of (seed, step), so that it does not
    matter how the batch is split over processes and micro-batches."""
    generator = torch.Generator().manual_seed(runtime.mix_seed(args.seed, "flow", step))
    noise = torch.randn(args.batch_size, *shape, generator=generator)
    return noise, torch.rand(args.batch_size, generator=generator), torch.rand(args.batch_size, generator=generator) < args.label_dropout


@torch.no_grad()
def evaluate(net, images, transform, args, world, dtype):
    """Velocity loss over the whole validation set, strided over ranks. Validation image i always meets the same noise and the same time, whatever the run:
    times are spread evenly by steps of the golden section, so that every class sees all of them."""
    total, seen = 0.0, 0
    for x, y in data.eval_batches(images.val, transform, args.micro_batch, world.rank, world.size, args.workers):
        index = [world.rank + (seen + i) * world.size for i in range(len(y))]
        noise = torch.stack([torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(runtime.mix_seed("validation", i))) for i in index])
        t = torch.tensor([(i + 0.5) * 0.6180339887498949 % 1 for i in index])
        x, y, noise, t = (a.to(world.device, non_blocking=True) for a in (x, y, noise, t))
        x_t, target = flow.interpolate(args.path, t, x, noise)
        with runtime.autocast(world.device, dtype):
            velocity = net(x_t, t, y)
        total, seen = total + flow.velocity_loss(velocity, target).cpu().double().sum(), seen + len(y)      # mps has no float64
    total, seen = runtime.all_sum([total, seen], world)
    return total / seen


@torch.no_grad()
def make_samples(net, count, flags, args, world, dtype, vae=None):
    """uint8 images (count, C, Y, X) on rank 0, None on the others; all ranks share the work. flags: the run's, as the checkpoint has them."""
    def velocity(x, t, y):
        with runtime.autocast(world.device, dtype):
            return net(x, t, y).float()

    shape, parts = (flags["in_chans"], flags["img_size"], flags["img_size"]), []
    guided = flow.guided(velocity, flags["classes"], args.cfg_scale)
    for _, x, _ in flow.sample_groups(guided, shape, count, flags["class_counts"], args.sampler, args.sample_steps, flags["path"], args.seed, world.device, world.rank, world.size):
        if vae is not None:
            x = latents.decode(vae, x)
        turn = [flow.to_uint8(x).contiguous()]
        if world.size > 1:
            turn = [torch.empty_like(turn[0]) for _ in range(world.size)]
            dist.all_gather(turn, flow.to_uint8(x).contiguous())
        if world.main:
            parts += [part.cpu() for part in turn]
    return torch.cat(parts)[:count] if world.main else None


def describe_samples(args, ema):
    """Everything that the quality of samples depends on besides the weights."""
    return (f"cfg scale {args.cfg_scale:g}, {args.sampler} {args.sample_steps} steps, sample seed {args.seed}, "
            + (f"EMA weights ({ema:g})" if ema and args.sample_ema else "raw weights"))


def load_judge(path, images, side):
    """(ViT without head, steps from uint8 images to its input) of a train_vit.py checkpoint: what --frechet measures with. Raises BadInput for any other
    file, and where it cannot measure samples of `side` pixels against `images`."""
    remedy = "give the ckpt.pt of a run of train_vit.py"
    vit, made = probe.load_model(path, flag="--frechet", remedy=remedy)
    if not isinstance(vit, ViT):
        raise BadInput(f"--frechet {path} was not written by train_vit.py: {remedy}")
    if made["in_chans"] != images.in_chans:
        raise BadInput(f"--frechet {path} reads images of {made['in_chans']} channels and the samples have {images.in_chans}: pass a net trained on such images")
    if min(len(images.train), len(images.val)) < 2:
        raise BadInput(f"--frechet needs at least 2 training and 2 validation images, and --data has {len(images.train)} and {len(images.val)}: add some")
    vit.head = torch.nn.Identity()
    try:
        own = data.load_images(made["data"], made.get("holdout", 0.0), made.get("seed", 0))
    except BadInput as error:
        raise BadInput(f"--frechet {path} needs the mean and std of --data {made['data']}, on which it was trained and which cannot be loaded: bring it back, "
                       f"or {remedy}") from error
    steps = [v2.Resize((made["img_size"], made["img_size"]), **data.BICUBIC), *data.normalise(own)]
    if not flow.features(vit, [*data.fit(images, side), *steps], [images.val[0]]).isfinite().all():      # one image, before hours of training
        raise BadInput(f"--frechet {path} gives features that are not finite: {remedy} that has learned something")
    return vit, steps


def measure(pixels, args, images, judge, world, how):
    """(line to print, record to log) of the Frechet distance and FID that were asked for, on rank 0. judge: what `check_measures` returned."""
    words, record = [], dict(measured_samples=len(pixels), measured_how=how)
    if args.frechet:
        vit, steps = judge
        resized = [*data.fit(images, pixels.shape[-1]), *steps]                      # real images go through the samples' size
        real, other = (images.val, images.train) if args.frechet_set == "val" else (images.train, images.val)
        made, target, rest = (flow.moments(flow.features(vit, way, part)) for way, part in ((steps, pixels), (resized, real), (resized, other)))
        record.update(frechet_vit=flow.frechet_distance(*made, *target), frechet_floor=flow.frechet_distance(*rest, *target))
        words.append(f"Fréchet distance (ViT features) {record['frechet_vit']:.3f} to the {len(real)} {args.frechet_set} images "
                     f"(real images, the other {len(other)}: {record['frechet_floor']:.3f})")
    if args.fid:
        fidelity = runtime.import_optional("torch_fidelity", "--fid")
        found = fidelity.calculate_metrics(input1=flow.Pixels(pixels), input2=args.fid, cuda=world.device.type == "cuda", fid=True, isc=True, verbose=False)
        record.update(fid=found["frechet_inception_distance"], inception_score=found["inception_score_mean"])
        words.append(f"FID {record['fid']:.2f}, Inception Score {record['inception_score']:.1f} (torch-fidelity, {args.fid})")
    return f"{'; '.join(words)}; {len(pixels)} samples, {how}", record


def check_measures(args, images, is_latent, side):
    """What --frechet, --fid and --vae need, looked for before any work begins. Returns what --frechet measures samples of `side` pixels with, or None."""
    if args.vae and not is_latent:
        raise BadInput("--vae has no effect on a net of pixels: leave it out, or train on what --encode-latents writes")
    if args.fid:
        runtime.import_optional("torch_fidelity", "--fid")
        if is_latent and not args.vae:
            raise BadInput("--fid compares images, which the samples become only by --vae, the autoencoder of the latents: add it")
        if not (Path(args.fid).is_dir() and any(f.suffix.lower() in (".png", ".jpg", ".jpeg") for f in Path(args.fid).iterdir())):
            raise BadInput(f"--fid {args.fid} is not a folder of images (png, jpg): pass one")
    if args.frechet and is_latent:
        raise BadInput("--frechet compares pixels with the images of --data, which here are latents: use --fid, or leave it out")
    return load_judge(args.frechet, images, side) if args.frechet else None


def sample_only(args, world, dtype):
    """--sample: the checkpoint in --out -> samples.png, samples.npz and the measures that were asked for."""
    path, remedy = Path(args.out) / "ckpt.pt", "train first, or pass the --out of a run of train_sit.py"
    net, made = probe.load_model(path, args.sample_ema, "--out", remedy)
    needed = ("data", "holdout", "seed", "img_size", "in_chans", "classes", "class_counts", "train_images", "path", "label_dropout", "ema", "latents")
    lacking = [k for k in needed if k not in made]
    if made.get("kind") != "sit" or lacking:
        raise BadInput(f"--out {path} {'lacks ' + ', '.join(lacking) if made.get('kind') == 'sit' else 'was written by another train script'}: {remedy}")
    if args.cfg_scale != 1 and not made["label_dropout"]:
        raise BadInput(f"--cfg-scale {args.cfg_scale} needs a net that has seen samples without label, and {path} was trained with --label-dropout 0: pass --cfg-scale 1")
    if made["latents"] and not args.vae:
        raise BadInput(f"{path} makes latents: pass --vae, the autoencoder that turns them into images")
    images = load_again(args, made, path) if args.frechet and not made["latents"] else None
    judge = check_measures(args, images, made["latents"], made["img_size"])
    vae = latents.load_vae(args.vae, world.device) if made["latents"] else None
    how = describe_samples(args, made["weights"] == "ema" and made["ema"])
    pixels = make_samples(net.to(world.device), args.sample, made, args, world, dtype, vae)
    if world.main:
        print(f"{path}, step {made['step']}: {args.sample} samples, {how}")
        flow.write_grid(Path(args.out) / "samples.png", pixels[:256], columns=8 if args.sample < 64 else 16)
        flow.write_npz(Path(args.out) / "samples.npz", pixels)
        print(f"{args.out}: samples.png, samples.npz (arr_0, uint8 {tuple(pixels.permute(0, 2, 3, 1).shape[:3])} x 3)")
        if args.frechet or args.fid:
            print(measure(pixels, args, images, judge, world, how)[0])


def load_again(args, made, path):
    """The images that the checkpoint at `path` was trained on, which --data finds where they have moved. Raises BadInput where they are not the same ones."""
    try:
        images = data.load_images(args.data or made["data"], made["holdout"], made["seed"])
    except BadInput as error:
        if args.data:
            raise
        raise BadInput(f"{path} was trained on --data {made['data']}, which cannot be loaded: pass --data with the place where it is now") from error
    if (len(images.train), len(images.classes), images.in_chans) != (made["train_images"], made["classes"], made["in_chans"]):
        raise BadInput(f"--data {images.name} has {len(images.train)} training images, {len(images.classes)} classes, {images.in_chans} channels, "
                       f"but {path} was trained on {made['train_images']}, {made['classes']}, {made['in_chans']}: pass the place where those are now")
    return images


def main(argv=None):
    args = get_args(argv)
    world = runtime.start(args.device, args.threads)
    dtype, why = runtime.pick_dtype(args.dtype, world.device)
    if args.sample or args.encode_latents:
        return sample_only(args, world, dtype) if args.sample else latents.encode(args, world)
    micro_steps = runtime.split_batch(args, world)

    # data, model, optimizer
    images, train_tf, eval_tf, is_latent = load_data(args)
    judge = check_measures(args, images, is_latent, args.img_size)
    per_epoch = data.steps_per_epoch(len(images.train), args.batch_size)
    steps, eval_every, save_every = args.steps, args.eval_every or args.steps, args.save_every or args.steps
    options = model_options(args, images)
    raw = build_model(args.backbone, options, args.seed).to(world.device)
    ema = copy.deepcopy(raw).requires_grad_(False) if args.ema else None
    vae = latents.load_vae(args.vae, world.device) if is_latent and args.vae else None
    optimizer = optim.build_optimizer(raw, args.opt, args.lr, args.weight_decay, **runtime.matrix_options(args))

    # resume, before anything is written
    ckpt, saved = runtime.find_checkpoint(args.out, args.resume, "backbone")
    counts = images.train.labels.bincount(minlength=len(images.classes)).tolist()
    flags = dict(vars(args), kind="sit", model=options, classes=len(images.classes), class_counts=counts, in_chans=images.in_chans, latents=is_latent,
                 train_images=len(images.train))
    step, best, val_loss, notes = 0, float("inf"), None, []
    if saved:
        notes = runtime.check_resume(ckpt, saved["args"], flags, FIXED, FREE)
        runtime.check_same_data(ckpt, saved["args"], flags)
        step, best = runtime.restore(ckpt, saved, raw, ema, optimizer, steps, notes)
    if args.wandb:
        runtime.import_optional("wandb", "--wandb")
    runtime.make_out(args.out, flags, world)
    if world.main and not step:                                  # --fresh: the old checkpoint goes with the old log, or a later resume would find it
        ckpt.unlink(missing_ok=True)
    log = runtime.Log(args.out, world, step, args.wandb, flags)

    def lr_at(step):
        return runtime.lr_at(step, steps, args.warmup, args.lr, floor=args.lr if args.lr_schedule == "constant" else 0.0)

    log.say(f"config      {' '.join(f'{k}={v}' for k, v in sorted(flags.items()) if k not in ('model', 'class_counts'))}")
    log.say(f"versions    revision {runtime.git_revision()}, torch {torch.__version__}, python {sys.version.split()[0]}")
    log.say(f"device      {world.why}; {world.size} process(es) x {torch.get_num_threads()} threads; {dtype} ({why})")
    log.say(f"data        {args.data}: {len(images.train)} training and {len(images.val)} validation {'latents' if is_latent else 'images'}, "
            f"{images.in_chans} x {args.img_size} x {args.img_size}, {len(images.classes)} classes")
    log.say(f"model       {args.backbone} {sum(p.numel() for p in raw.parameters()) / 1e6:.2f} M parameters, {args.shortcut}, alpha_min {args.alpha_min:.3g}, "
            f"alpha_eff {raw.alpha_eff:.2e}, {'long skips' if args.long_skips else 'no long skips'}")
    log.say(f"optimizer   {optim.describe(optimizer)}".replace("\n", "\n            "))
    log.say(f"batch       {args.batch_size} = {world.size} processes x {micro_steps} micro-steps x {args.micro_batch}; {steps} steps, {per_epoch} per epoch")
    for note in notes:
        log.say(f"note        {note} from here on")
    if is_latent and not vae:
        log.say("note        samples are latents: without --vae no samples.png is written")
    if step:
        log.say(f"resume      {ckpt}, step {step}, lr {lr_at(step):.3g}")

    model = torch.compile(raw) if args.compile else raw
    if world.size > 1:
        model = DistributedDataParallel(model, device_ids=[world.device.index] if world.device.type == "cuda" else None)
    batches = data.train_batches(images.train, train_tf, args.batch_size, args.seed, step, steps, world.rank, world.size, micro_steps, args.workers)
    bar = tqdm(total=steps, initial=step, disable=not (world.main and sys.stdout.isatty()), unit="step", dynamic_ncols=True)
    share, shape = args.batch_size // world.size, (images.in_chans, args.img_size, args.img_size)
    window, clock = [], time.perf_counter()

    while step < steps:
        lr = lr_at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        noise_all, t_all, drop_all = draws(args, step, shape)
        loss = 0.0
        for micro in range(micro_steps):
            x, y = next(batches)
            rows = slice(world.rank * share + micro * args.micro_batch, world.rank * share + (micro + 1) * args.micro_batch)
            x, y, noise, t, drop = (a.to(world.device, non_blocking=True) for a in (x, y, noise_all[rows], t_all[rows], drop_all[rows]))
            x_t, target = flow.interpolate(args.path, t, x, noise)
            # gradients are exchanged once, with the last micro-batch; the switch must cover forward and backward
            last = micro == micro_steps - 1
            with nullcontext() if last or world.size == 1 else model.no_sync():
                with runtime.autocast(world.device, dtype):
                    velocity = model(x_t, t, y, drop)
                part = flow.velocity_loss(velocity, target).mean() / micro_steps       # a mean of means: same as one big batch
                part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), args.clip or float("inf"))
        window.append((step, lr, loss, norm))
        if world.device.type == "cpu":                           # elsewhere a look is a synchronisation, so it waits for the log step
            runtime.check_finite(window[-1:], world)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema:
            for average, p in zip(ema.parameters(), raw.parameters()):
                average.lerp_(p.detach(), 1 - (min(args.ema, (1 + step) / (10 + step)) if args.ema_warmup else args.ema))
        step += 1
        bar.update()

        eval_now = step % eval_every == 0 or step == steps
        save_now = step % save_every == 0 or step == steps
        if step % args.log_every == 0 or eval_now or save_now:
            mean, norm = runtime.check_finite(window, world)     # before anything is saved
            rate = len(window) * args.batch_size / (time.perf_counter() - clock)
            log.line(f"step {step:6d}  epoch {step / per_epoch:6.2f}  loss {mean:.4f}  lr {lr:.2e}  grad norm {norm:.2f}  {rate:.0f} images/s",
                     step=step, epoch=step / per_epoch, loss=mean, lr=lr, grad_norm=norm, images_per_s=rate)
            if eval_now:
                val_loss = evaluate(ema or raw, images, eval_tf, args, world, dtype)
                runtime.check_val(val_loss, step, lr)
                best = min(best, val_loss)
                log.line(f"step {step:6d}  val loss {val_loss:.4f}" + " (ema)" * bool(ema), step=step, val_loss=val_loss, alpha_eff=raw.alpha_eff)
                if args.samples and (vae or not is_latent):
                    pixels = make_samples(ema if ema and args.sample_ema else raw, args.samples, flags, args, world, dtype, vae)
                    if world.main:
                        flow.write_grid(Path(args.out) / "samples.png", pixels, columns=8)
            if save_now:                                         # on all ranks: each holds a share of the optimizer's state
                runtime.save_checkpoint(ckpt, dict(model=raw.state_dict(), ema=ema and ema.state_dict(), optimizer=optimizer.state_dict(),
                                                   step=step, best=best, rng=torch.get_rng_state(), args=flags), world.main)
            window, clock = [], time.perf_counter()
    bar.close()

    if val_loss is None:                                         # resumed at its end: nothing was left to train
        val_loss = evaluate(ema or raw, images, eval_tf, args, world, dtype)
        runtime.check_val(val_loss, step, args.lr)
    if args.frechet or args.fid:                                 # after the checkpoint is safe
        pixels = make_samples(ema if ema and args.sample_ema else raw, args.measure_samples, flags, args, world, dtype, vae)
        if world.main:
            line, record = measure(pixels, args, images, judge, world, describe_samples(args, args.ema))
            log.line(f"step {step:6d}  {line}", step=step, **record)
    if world.main:
        runtime.plot_curve(args.out, f"{args.backbone} {args.size}, {args.shortcut} {args.alpha_min:.3g}, {args.opt}", "val_loss", "validation loss", 4)
    log.say(f"{args.out}: ckpt.pt, log.jsonl, args.json, curve.png{', samples.png' if args.samples and (vae or not is_latent) else ''}; best val loss {best:.4f}")
    log.say(f"val loss {val_loss:.4f}")


if __name__ == "__main__":
    runtime.run(main)
