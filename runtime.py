"""What is not about the experiment: process group, device and dtype, seeds, schedules, checkpoint, log.

Plain functions, no Trainer. Each train script writes its own loop and calls these.
"""
import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist


class BadInput(ValueError):
    """A fault of the input, not of the program: one sentence that names the file or flag and what to do."""


class Parser(argparse.ArgumentParser):
    """argparse that shows every default in --help and answers a wrong flag with one sentence and exit code 2."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        self.exit(2, f"error: {message}; see --help\n")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it is written (it holds the commands), and the default behind each flag."""


def number(kind, low=-math.inf, high=math.inf, above=-math.inf, below=math.inf):
    """An argparse type: a finite `kind` (int or float) with low <= value <= high and above < value < below."""
    def parse(text):
        value = kind(text)
        if not (abs(value) < math.inf and low <= value <= high and above < value < below):      # false for NaN too; an int may exceed any float
            bounds = ["finite"] * (not abs(value) < math.inf) + [f"above {above:g}"] * (above > -math.inf) + [f"at least {low:g}"] * (low > -math.inf)
            bounds += [f"below {below:g}"] * (below < math.inf) + [f"at most {high:g}"] * (high < math.inf)
            raise argparse.ArgumentTypeError(f"{text} must be {' and '.join(bounds)}")
        return value
    parse.__name__ = kind.__name__           # argparse names the type in "invalid int value: 'x'"
    return parse


MATRIX_FLAGS = ("precondition_frequency", "init_factor", "stagger", "bf16_factors")


def add_matrix_flags(add):
    """The flags of the matrix optimizers' own settings (optim.py), for the train scripts' optimisation group."""
    add("--precondition-frequency", type=number(int, low=1), default=10, help="updates between two refreshes of the eigenbases (soap, kl-shampoo)")
    add("--init-factor", type=number(float, above=0), default=None, help="kl-shampoo: the eigenvalues it starts from; None is the optimizer's own, 0.1")
    add("--stagger", action=argparse.BooleanOptionalAction, default=False, help="spread the refreshes of the eigenbases evenly over the updates between them (soap, kl-shampoo)")
    add("--bf16-factors", action=argparse.BooleanOptionalAction, default=False, help="keep the factors and their bases in bfloat16: half the memory, products as fast as the device has them (soap, kl-shampoo)")


def matrix_options(args):
    """Keyword arguments of `optim.build_optimizer` from those flags and --betas. Raises BadInput where one has no effect on --opt."""
    options = {"betas": tuple(args.betas)} if args.betas else {}
    for flag, on, kinds in (("--stagger", args.stagger, ("soap", "kl-shampoo")), ("--bf16-factors", args.bf16_factors, ("soap", "kl-shampoo"))):
        if on and args.opt not in kinds:
            raise BadInput(f"{flag} has no effect with --opt {args.opt}: leave it out, or use --opt {' or '.join(kinds)}")
    if args.opt in ("soap", "kl-shampoo"):
        options.update(precondition_frequency=args.precondition_frequency, stagger=args.stagger, factor_dtype=torch.bfloat16 if args.bf16_factors else None)
    if args.opt == "kl-shampoo" and args.init_factor:
        options["init_factor"] = args.init_factor
    return options


def add_residual_free_flags(add, defaults):
    """The constants of `init.init_residual_free_lm`, for the train scripts that offer --init residual-free."""
    for name, what in (("qk", "W_Q W_K^T per head is alpha times a projector"), ("vo", "W_V W_O is alpha times the identity"),
                       ("u", "fc1 is sqrt(alpha) times scaled orthogonal"), ("d", "fc2 is sqrt(alpha) times orthogonal")):
        add(f"--alpha-{name}", type=number(float, above=0), help=f"{what}, for --init residual-free; None is {defaults[f'alpha_{name}']:g}")


def fill_constants(args, kinds):
    """Give the constants of each --init, kinds = {init: {constant: default}}, their values where they were left out; a constant alone chooses its init.

    Raises BadInput for a constant of another init than the chosen one."""
    given = [(k, kind) for kind, constants in kinds.items() for k in constants if getattr(args, k) is not None]
    if given and args.init is None:
        args.init = given[0][1]
    for k, kind in given:
        if kind != args.init:
            raise BadInput(f"--{k.replace('_', '-')} has no effect with --init {args.init}: use --init {kind}, or leave it out")
    for constants in kinds.values():
        for k, value in constants.items():
            if getattr(args, k) is None:
                setattr(args, k, value)


def add_run_flags(parser, never="once per epoch"):
    """The flags that every train script shares and that say nothing about the experiment. never: what --eval-every 0 and --save-every 0 mean."""
    add = parser.add_argument_group("run").add_argument
    add("--seed", type=number(int, low=0, high=2 ** 63 - 1), default=0, help="seeds the init, the data order, the augmentation and the noise")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda or mps")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="arithmetic of the forward pass; weights and optimizer stay float32")
    add("--compile", action="store_true", help="torch.compile the training step's model")
    add("--workers", type=number(int, low=0), default=0, help="data loading processes per rank")
    add("--threads", type=number(int, low=0), default=0, help="CPU threads per process; 0 leaves torch's choice")
    add("--out", default=None, help="folder for ckpt.pt, log.jsonl, args.json and curve.png; None names it after the run, under out/")
    add("--resume", action=argparse.BooleanOptionalAction, default=True, help="continue from the checkpoint in --out if there is one")
    add("--fresh", dest="resume", action="store_false", default=argparse.SUPPRESS, help="start over: same as --no-resume")
    add("--log-every", type=number(int, low=1), default=20, help="steps between lines of the log")
    add("--eval-every", type=number(int, low=0), default=0, help=f"steps between evaluations; 0 means {never}")
    add("--save-every", type=number(int, low=0), default=0, help=f"steps between checkpoints; 0 means {never}")
    add("--wandb", default=None, metavar="PROJECT", help="also log to this Weights & Biases project (needs the wandb package)")


# ---------------------------------------------------------------------------------------------------------------------
# processes and devices

class World(NamedTuple):
    """Where this process stands: global rank, number of processes, its device."""
    rank: int
    size: int
    device: torch.device
    why: str

    @property
    def main(self):
        return self.rank == 0


def start(device="auto", threads=0):
    """Join the process group when launched by torchrun, pick this process's device, return a `World`.

    Raises BadInput when the device is absent or there are more processes than GPUs on this machine.
    """
    if threads:
        torch.set_num_threads(threads)
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = next(k for k in ("cuda", "mps", "cpu") if have[k]) if device == "auto" else device
    kind = name.split(":")[0]
    if kind not in have:
        raise BadInput(f"--device {device} is unknown: use auto, cpu, cuda or mps")
    if not have[kind]:
        raise BadInput(f"--device {device} is not available on this machine: use --device cpu, or auto")
    if kind == "cuda":
        count = torch.cuda.device_count()
        index = int(os.environ.get("LOCAL_RANK", name.partition(":")[2] or 0))   # never the global rank: it breaks on node 2
        if index >= count:
            raise BadInput(f"process {index} has no GPU, this machine has {count}: start torchrun with --nproc_per_node={count}")
        torch.cuda.set_device(index)
        name = f"cuda:{index}"
    try:
        device_ = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"--device {device} is unknown: use auto, cpu, cuda or mps") from error
    why = f"{name}, {'asked for by --device' if device != 'auto' else 'the first of cuda, mps, cpu that this machine has'}"
    if {"RANK", "WORLD_SIZE"} <= set(os.environ):                                                   # torchrun
        if not dist.is_initialized():
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=device_ if kind == "cuda" else None)
        return World(dist.get_rank(), dist.get_world_size(), device_, why)
    return World(0, 1, device_, why)


def pick_dtype(name, device):
    """(dtype, why). bf16 needs no loss scaler, so it is the only half precision offered."""
    if name != "auto":
        return getattr(torch, name), "asked for by --dtype"
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, "this GPU has bf16"
    reason = {"cuda": "this GPU has no bf16", "mps": "bf16 is incomplete on mps", "cpu": "exact and no slower on most CPUs"}
    return torch.float32, reason[device.type]


def autocast(device, dtype):
    """Mixed precision for the forward pass; does nothing for float32."""
    return torch.autocast(device.type, dtype=dtype) if dtype != torch.float32 else contextlib.nullcontext()


def all_sum(values, world):
    """Sum a list of numbers or tensors over all ranks, in float64 where the device has it. SUM only: gloo has no safe average."""
    kind = torch.float32 if world.device.type == "mps" else torch.float64
    total = torch.stack([torch.as_tensor(v, dtype=kind, device=world.device) for v in values])
    if world.size > 1:
        dist.all_reduce(total)
    return total.tolist()


def split_batch(args, world):
    """Micro-steps per update; fills in args.micro_batch. Raises BadInput where --batch-size does not divide among processes and micro-batches."""
    args.micro_batch = args.micro_batch or max(1, args.batch_size // world.size)
    if args.batch_size % (world.size * args.micro_batch):
        raise BadInput(f"--batch-size {args.batch_size} is not divisible by {world.size} processes x --micro-batch {args.micro_batch}: change one of the three")
    return args.batch_size // (world.size * args.micro_batch)


def mix_seed(*parts):
    """A seed from integers and strings: sums such as seed + rank collide between runs, a hash does not. 32 bits are all that torch's CPU generator uses."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


def lr_at(step, total, warmup, peak, floor=0.0):
    """Linear warm-up, then half a cosine from `peak` to `floor`: a pure function of the step, so a resume needs no scheduler.

    Step 0 already learns ((step + 1) / warmup); warmup = 0 and warmup = total both work.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


# ---------------------------------------------------------------------------------------------------------------------
# checkpoint

def save_checkpoint(path, checkpoint, main=True):
    """Write one dict of tensors and python scalars so that a kill at any moment leaves the old file or the new one.

    main: is this rank 0? It is the only writer, so the temporary name is fixed, and a killed save leaves no orphans behind. The others come here all the
    same, since `optim`'s state_dict, which makes the dict, collects the state from all of them.
    """
    if not main:
        return
    temporary = Path(f"{path}.tmp")
    with open(temporary, "wb") as f:
        torch.save(checkpoint, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def load_checkpoint(path):
    """The dict that `save_checkpoint` wrote, on the CPU. Raises BadInput when the file is not a whole checkpoint."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                                   # on a damaged file the unpickler raises almost any type
        raise BadInput(f"{path} is not a readable checkpoint: delete it or pass --fresh to start over") from error
    missing = {"model", "ema", "optimizer", "step", "best", "rng", "args"} - set(checkpoint if isinstance(checkpoint, dict) else ())
    if missing or not isinstance(checkpoint["args"], dict):
        raise BadInput(f"{path} lacks {', '.join(sorted(missing)) or 'the run it belongs to'}, so it was not written by this script: choose another --out")
    return checkpoint


def read_checkpoint(path, flag, remedy):
    """The checkpoint at `path`, which `flag` named, of another run. Raises BadInput, with that remedy, where it is missing or damaged."""
    if not Path(path).is_file():
        raise BadInput(f"{flag} {path} is not a file: {remedy}")
    try:
        return load_checkpoint(path)
    except BadInput as error:
        raise BadInput(f"{flag} {path} is not a whole checkpoint: {remedy}") from error


def find_checkpoint(out, resume, own):
    """(path, checkpoint) of the run in folder `out`; checkpoint is None where there is none, or it is not to be resumed.

    own: an entry of args that only this script's checkpoints have. Raises BadInput for another script's."""
    path = Path(out) / "ckpt.pt"
    if path.exists() and not path.is_file():
        raise BadInput(f"{path} is not a file: choose another --out")
    checkpoint = load_checkpoint(path) if resume and path.exists() else None
    if checkpoint and own not in checkpoint["args"]:
        raise BadInput(f"{path} was written by another train script: choose another --out, or --fresh to replace it")
    return path, checkpoint


def check_resume(path, saved, args, fixed, free):
    """Compare a checkpoint's flags with this command's. Returns the notes to print for flags that may change mid-run.

    saved, args: dicts of flags. fixed: flags that define the run (architecture, init, optimizer, data, seed): a difference is refused.
    free: flags that do not matter to the trajectory. Raises BadInput naming the flag and both values.
    """
    notes = []
    common = set(saved) & set(args) - set(free)
    for key in [k for k in fixed if k in common] + sorted(common - set(fixed)):      # in the order of `fixed`, so that what follows from a flag is not named before it
        if saved[key] != args[key]:
            flag = "--" + key.replace("_", "-")
            if key in fixed:
                raise BadInput(f"{path} was trained with {typed(flag, saved[key])} and you ask for {typed(flag, args[key])}: "
                               f"pass {typed(flag, saved[key])}, --fresh to start over, or another --out")
            notes.append(f"{flag} was {saved[key]} and is {args[key]}")
    return notes


def typed(flag, value):
    """A flag with its value as one types it."""
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"


def restore(path, saved, model, ema, optimizer, steps, notes):
    """Put a checkpoint's weights, optimizer state and generator back; returns (step, best). ema: the averaged model, or None; without saved averages it starts
    at the weights. Raises BadInput where the run is finished and `notes` (of `check_resume`) says that it should now be another."""
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if ema:
        ema.load_state_dict(saved["ema"] or saved["model"])
    torch.set_rng_state(saved["rng"])
    if saved["step"] >= steps and notes:
        raise BadInput(f"{path} is a finished run of {saved['step']} steps, but {'; '.join(notes)}: pass --fresh to start over, or another --out")
    return saved["step"], saved["best"]


def check_same_data(path, saved, args):
    """Refuse to continue on an image set of another size: a folder may move, but not change. Raises BadInput with both."""
    kind = [[f[k] for k in ("train_images", "classes", "in_chans")] for f in (saved, args)]
    if kind[0] != kind[1]:
        raise BadInput("--data {} has {} training images, {} classes, {} channels".format(args["data"], *kind[1])
                       + ", but {} was trained on {}, with {}, {}, {}".format(path, saved["data"], *kind[0])
                       + ": pass the same data, --fresh to start over, or another --out")


# ---------------------------------------------------------------------------------------------------------------------
# log

class Log:
    """Human lines on stdout and JSON lines in out/log.jsonl, from rank 0; optionally Weights & Biases.

    After a resume the lines past `step` are dropped: the steps they describe are run again.
    """

    def __init__(self, out, world, step=0, wandb=None, config=None):
        self.path, self.main, self.wandb = Path(out) / "log.jsonl", world.main, None
        if not self.main:
            return
        lines = self.path.read_text(errors="replace").splitlines() if self.path.exists() and step else []
        kept = [line for line in lines if _step_of(line) <= step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, self.path)
        if wandb:
            self.wandb = import_optional("wandb", "--wandb").init(project=wandb, config=config, dir=str(out))

    def say(self, text):
        if self.main:
            from tqdm import tqdm
            tqdm.write(text)                                     # does not tear the progress bar
            sys.stdout.flush()

    def line(self, human, **record):
        """One human line and one JSON line. Non-finite numbers are written as null, which JSON has no other word for."""
        if not self.main:
            return
        self.say(human)
        record = finite(record)
        with open(self.path, "a") as f:
            f.write(json.dumps(record) + "\n")
        if self.wandb:
            self.wandb.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])


def finite(value):
    """Nested plain data with null for nan and inf, which JSON has no word for."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line):
    """The step of a log line; a line cut short by a kill belongs to no step that was kept."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):                    # no JSON, no step, or a step that is no number
        return math.inf


def import_optional(name, flag):
    """Import a package, or a module of it, that only one flag needs. Raises BadInput naming both."""
    import importlib
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise BadInput(f"{flag} needs the package {package}: pip install {dict(sklearn='scikit-learn').get(package, package.replace('_', '-'))}") from error


def make_out(out, args, world):
    """Create the run's folder and write args.json, on rank 0. Raises BadInput when the folder cannot be written."""
    if not world.main:
        return
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        (Path(out) / "args.json").write_text(json.dumps(args, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise BadInput(f"--out {out} cannot be written ({error.strerror}): choose a folder that can") from error


def check_finite(window, world):
    """Stop all ranks together at the first step whose loss or gradient norm is not finite.

    window: list of (step, lr, loss, grad_norm) since the last check, tensors still on the device: one synchronisation
    for the whole window instead of one a step. Returns (mean loss over window and ranks, last gradient norm).
    """
    mean = [v / world.size for v in all_sum([w[2] for w in window] + [w[3] for w in window], world)]
    losses, norms = mean[:len(window)], mean[len(window):]
    for (step, lr, _, _), loss, norm in zip(window, losses, norms):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise BadInput(f"the loss is not finite at step {step} (loss {loss}, lr {lr:.3g}, gradient norm {norm}): "
                           f"lower --lr, raise --warmup or set --clip; the last checkpoint is from before it")
    return sum(losses) / len(losses), norms[-1]


def check_val(value, step, lr):
    """Stop where the validation loss is not finite: the update before it blew the weights up. The value is equal on all ranks."""
    if not math.isfinite(value):
        raise BadInput(f"the validation loss is not finite after step {step} (lr {lr:.3g}): lower --lr, raise --warmup or set --clip; the last checkpoint is from before it")


def cpu_name():
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        name = next((l.split(":")[1].strip() for l in Path("/proc/cpuinfo").read_text().splitlines() if l.startswith("model name")), name)
    return name


def git_revision():
    """The commit of the code that runs, with + where files differ from it; 'unknown' outside a git checkout."""
    here = Path(__file__).resolve().parent
    run = lambda *a: subprocess.run(["git", "-C", str(here), *a], capture_output=True, text=True)
    try:
        head = run("rev-parse", "--short", "HEAD")
        dirty = run("status", "--porcelain", "--untracked-files=no")
    except FileNotFoundError:                                    # no git on this machine
        return "unknown"
    return head.stdout.strip() + "+" * bool(dirty.stdout.strip()) if head.returncode == 0 else "unknown"


def pyplot():
    """matplotlib.pyplot, drawing to files only; imported late, since only the end of a run needs it."""
    import matplotlib
    matplotlib.use("Agg")                                        # no display needed
    import matplotlib.pyplot
    return matplotlib.pyplot


def matmul_rate(device, dtype, size=1024, repeats=5):
    """Floating-point operations per second of a large matrix product on this device, measured: what MFU is a share of."""
    size *= 4 if device.type == "cuda" else 1                    # a GPU is not filled by less
    generator = torch.Generator(device).manual_seed(0)           # the run's own must not move: a resume continues it
    a = torch.rand(size, size, generator=generator, device=device).to(dtype)
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    a @ a                                                        # the first call sets the library up
    best = math.inf
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        a @ a
        wait()
        best = min(best, time.perf_counter() - start)
    return 2 * size ** 3 / best


def plot_curve(out, title, metric, label, digits=1):
    """out/log.jsonl -> out/curve.png: training loss and validation loss on the left, `metric` on the right, its last value to that many digits."""
    plt = pyplot()
    rows = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    train, val, seen = ([r for r in rows if r.get(key) is not None] for key in ("loss", metric, "val_loss"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    left.plot([r["step"] for r in train], [r["loss"] for r in train], label="train", lw=1)
    left.plot([r["step"] for r in seen], [r["val_loss"] for r in seen], "o-", label="validation", ms=3)
    left.set(xlabel="step", ylabel="loss")
    left.legend(frameon=False)
    right.plot([r["step"] for r in val], [r[metric] for r in val], "o-", ms=3, color="C2")
    if val:
        right.annotate(f"{val[-1][metric]:.{digits}f}", (val[-1]["step"], val[-1][metric]), xytext=(-4, -14), textcoords="offset points", ha="right")
    right.set(xlabel="step", ylabel=label)
    for axis in (left, right):
        axis.grid(alpha=.3)
    figure.suptitle(title, fontsize=10)
    figure.savefig(Path(out) / "curve.png", dpi=120)
    plt.close(figure)


def run(main):
    """Call main() and turn BadInput into one sentence on stderr and exit code 2; every other error keeps its traceback."""
    try:
        main()
    except BadInput as error:
        if int(os.environ.get("RANK", 0)) > 0:
            time.sleep(8)                                        # a fault that all meet is said by rank 0, and torchrun then ends the others in time
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
