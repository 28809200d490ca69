"""What is not about the experiment: flags, processes, devices, schedule, checkpoint, log.

A train script writes its own loop. Around it stands a `Run`:
    run = open_run(args, "vit")                      processes, device, dtype, the checkpoint in --out
    step = run.begin(facts, steps, raw, ema, opt)    resume, folder, log
    run.banner(...)                                  what a person should know before the start
    model = run.wrap(raw)                            torch.compile, DistributedDataParallel
    run.share, observe, due, log_training, save      inside the loop
    run.finish(...)                                  curve.png, and what the folder holds
"""
import argparse
import contextlib
import datetime
import difflib
import errno
import hashlib
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm


class BadInput(ValueError):
    """A fault of the input, not of the program: a sentence that names file or flag, and the remedy."""


@contextlib.contextmanager
def user_errors():
    """Turn a model's ValueError, a sentence on sizes that do not fit, into `BadInput`."""
    try:
        yield
    except ValueError as error:
        raise BadInput(str(error)) from error


# -----------------------------------------------------------------------------------------------
# flags

class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as it is written, and defaults where a flag takes a value and has one."""

    def _get_help_string(self, action):
        plain = action.default is None or action.nargs == 0
        return action.help if plain else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse that answers a wrong flag with one sentence and exit code 2. entries: those of --set."""

    def __init__(self, entries=(), **kwargs):
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **kwargs)
        self.entries = entries

    def error(self, message):
        known = {f"--{key.replace('_', '-')}": f"--set {key}=..." for key in self.entries}
        known |= {option: option for option in self._option_string_actions}
        wrong = message.rpartition("unrecognized arguments: ")[2].split(" ")[0].partition("=")[0]
        near = difflib.get_close_matches(wrong, known, n=1)
        hint = f"; did you mean {known[near[0]]}?" if near else ""
        self.exit(2, f"error: {message}{hint}; see --help\n")


def number(kind, low=-math.inf, high=math.inf, above=-math.inf, below=math.inf):
    """An argparse type: a finite int or float with low <= value <= high and above < value < below."""
    def parse(text):
        value = kind(text)
        if abs(value) < math.inf and low <= value <= high and above < value < below:     # NaN is not
            return value
        bounds = [("above", above), ("at least", low), ("below", below), ("at most", high)]
        words = [f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound)]
        raise argparse.ArgumentTypeError(f"{text} must be {' and '.join(words) or 'finite'}")
    parse.__name__ = kind.__name__                   # argparse names the type: "invalid int value: 'x'"
    return parse


# Entries of every preset that no flag has; `--set key=value` reaches them, as it does all of a preset's.
RARE = dict(
    betas={},                       # momenta, by optimizer; --set betas=0.9,0.95 for the one that runs
    precondition_frequency=10,      # updates between two refreshes of the eigenbases (soap, kl-shampoo)
    init_factor=None,               # eigenvalues that KL-Shampoo starts from; None: its own
    orthogonal_gain="kept",         # of an orthogonal matrix: kept, or following the updates
    stagger=False,                  # spread the refreshes over the updates between them
    bf16_factors=False,             # factors and bases in bfloat16: half the memory
    workers=0,                      # data loading processes per rank
    log_every=20,                   # steps between lines of the log
    save_best=False,                # keep the best evaluation's checkpoint as best.pt
    keep_every=0,                   # keep the checkpoint of every N-th step as ckpt-N.pt; 0 is off
)
# Entries that some optimizers read, and entries that some kinds of --init read.
MATRIX_ENTRIES = {"soap": ("precondition_frequency", "stagger", "bf16_factors"),
                  "kl-shampoo": ("precondition_frequency", "stagger", "bf16_factors", "init_factor")}
INIT_ENTRIES = ("alpha", "beta", "c", "cancel_mean", "alpha_qk", "alpha_vo", "alpha_u", "alpha_d")


def train_parser(doc, presets, argv):
    """(parser, preset): a parser with --preset and --set, and the preset that argv names, with `RARE`.

    doc: the script's docstring; presets: its dict of dicts, the default first."""
    first = Parser(add_help=False)
    first.add_argument("--preset", choices=list(presets), default=next(iter(presets)),
                       help="a dict of defaults at the top of this file")
    preset = RARE | presets[first.parse_known_args(argv)[0].preset]
    parser = Parser(entries=preset, description=doc, parents=[first])
    parser.add_argument("--set", nargs="+", action="extend", metavar="KEY=VALUE",
                        help="change any entry of the preset's dict")
    return parser, preset


def add_shortcut_flags(add, shortcuts, default="residual"):
    """The flags of the method itself. shortcuts: the names of the kinds."""
    add("--shortcut", choices=list(shortcuts), default=default,
        help="x + f(x), f(x), or a x + f(x) with a falling to --alpha-min")
    add("--skipless", dest="shortcut", action="store_const", const="skipless",
        default=argparse.SUPPRESS, help="same as --shortcut skipless")
    add("--alpha-min", type=number(float, low=0, high=1), help="weight of the last shortcut, if decayed")


def last_weight(args, default=0.6):
    """The last shortcut's weight: 1 unless they decay, then --alpha-min; `default` without that."""
    if args.shortcut != "decayed":
        return 1.0
    return default if args.alpha_min is None else args.alpha_min


def add_optimizer_flags(parser, optimizers, unit="epochs"):
    """The flags of optimizer and schedule. optimizers: their names; unit: of the run's length."""
    kind = float if unit == "epochs" else int
    add = parser.add_argument_group("optimisation").add_argument
    add("--opt", choices=list(optimizers), default="adamw",
        help="for the matrices of the blocks; AdamW takes the rest")
    add("--lr", type=number(float, above=0, high=1e30),
        help="peak learning rate; else the preset's, by shortcut and optimizer")
    add("--orthogonal", choices=["off", "vo-mlp", "all"], default="off",
        help="block matrices that stay orthogonal after every update (orthogonal.py)")
    add("--weight-decay", type=number(float, low=0), help="decoupled; not on vectors, positions, tokens")
    add("--batch-size", type=number(int, low=1), help="global: samples per update over all processes")
    add("--micro-batch", type=number(int, low=1),
        help="samples per forward pass and process; else as many as the batch gives it")
    add(f"--{unit}", type=number(kind, above=0, high=1e9),
        help="passes over the training set" if unit == "epochs" else "updates")
    add("--warmup", type=number(kind, low=0), help=f"{unit} of linear warm-up")
    add("--clip", type=number(float, low=0), help="largest gradient norm; 0 is off")
    add("--ema", type=number(float, low=0, below=1), default=0.0,
        help="decay of averaged weights, which are then evaluated; 0 is off")


def add_run_flags(parser, never="once per epoch"):
    """The flags that say nothing about the experiment. never: what an interval of 0 means."""
    add = parser.add_argument_group("run").add_argument
    add("--seed", type=number(int, low=0, high=2 ** 63 - 1), default=0,
        help="of init, data order, augmentation and noise")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda or mps")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"],
        help="of the forward pass; weights and optimizer stay float32")
    add("--compile", action="store_true", help="torch.compile the training step's model")
    add("--threads", type=number(int, low=0), default=0, help="CPU threads a process; 0: torch's choice")
    add("--out", help="folder for checkpoint, logs and pictures; else named after the run, under out/")
    add("--resume", action="store_true", default=True, help=argparse.SUPPRESS)      # the default, aloud
    add("--fresh", dest="resume", action="store_false", default=argparse.SUPPRESS,
        help="start over, whatever --out holds")
    add("--allow-change", action="store_true",
        help="resume with another lr, length or augmentation than the run began with")
    add("--eval-every", type=number(int, low=0), default=0,
        help=f"steps between evaluations, each after a checkpoint; 0: {never}")
    add("--save-every", type=number(int, low=0), default=0,
        help=f"steps between checkpoints; 0: {never}")
    add("--wandb", metavar="PROJECT", help="also log to this Weights & Biases project")


def read_flags(parser, preset, argv, kind, lead=()):
    """(args, given): a namespace of all flags and all entries of the preset; and the names given.

    Flags win over --set, --set over the preset. Of an entry that is a dict by optimizer --opt's counts.
    Where --out is left out it becomes out/<kind>-..., named after the flags in `lead` and all that was
    given. Raises BadInput for a --set that does not fit."""
    argv, unset = sys.argv[1:] if argv is None else list(argv), object()
    options = {action.dest: action.option_strings[0] for action in reversed(parser._actions)}
    parser.set_defaults(**{k: v for k, v in preset.items() if k in options and not isinstance(v, dict)})
    texts = dict(split_setting(pair, preset) for pair in parser.parse_args(argv).set or ())
    argv = [f"{options[key]}={text}" for key, text in texts.items() if key in options] + argv
    args = parser.parse_args(argv)
    bare = argparse.Namespace(**dict.fromkeys(vars(args), unset) | {"set": None})
    given = {k for k, v in vars(parser.parse_args(argv, bare)).items() if v is not unset} - {"set"}
    for key, value in preset.items():
        if key not in options:
            value = value.get(args.opt) if isinstance(value, dict) and key not in texts else value
            setattr(args, key, read_value(key, texts[key], value) if key in texts else value)
    for key in set(MATRIX_ENTRIES["kl-shampoo"]) - set(MATRIX_ENTRIES.get(args.opt, ())):
        delattr(args, key)                           # args.json says what applies, no more
    del args.set
    args.out = args.out or f"out/{folder_name(args, given | texts.keys(), kind, lead)}"
    return args, given | texts.keys()


def split_setting(pair, preset):
    """(key, text) of "key=text". Raises BadInput where it has no = or the preset no such key."""
    key, equals, text = pair.partition("=")
    if not equals or key not in preset:
        near = difflib.get_close_matches(key, preset, n=1) or sorted(preset)
        raise BadInput(f"--set {pair}: write key=value, with a key of the preset: {', '.join(near)}")
    return key, text


def read_value(key, text, default):
    """`text` as a value like `default`: a number, true or false, a text, numbers with commas between."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, (list, tuple, dict)):
            kind = float if isinstance(default, dict) or not default else type(default[0])
            return [number(kind)(part) for part in text.split(",")]
        if default is None:
            return None if text.lower() == "none" else number(float)(text)
        return text if isinstance(default, str) else number(type(default))(text)
    except (KeyError, ValueError, argparse.ArgumentTypeError):
        kinds = {bool: "true or false", int: "a whole number", float: "a number", type(None): "a number"}
        words = kinds.get(type(default), "numbers with commas between")
        raise BadInput(f"--set {key}={text}: it must be {words}") from None


def folder_name(args, given, kind, lead):
    """A run's folder: `lead` and all that was given and touches its course, so a sweep has one each.

    Of a path it has the last part, of a checkpoint the run's folder."""
    def shown(key):
        value = getattr(args, key)
        path = Path(",".join(map(str, value)) if isinstance(value, list) else str(value))
        return path.resolve().parent.name if path.suffix == ".pt" else path.name
    if getattr(args, "finetune", None):
        kind, lead = f"{kind}-finetune", ("finetune", "opt")
    more = [k for k in sorted(given - {*lead, "seed"}) if k not in UNTOUCHED or k == "data"]
    name = "-".join([kind, *map(shown, lead), *(key + shown(key) for key in more)])
    name = name if len(name) < 120 else f"{name[:100]}-{mix_seed(name):08x}"
    return f"{name}-seed{args.seed}"


def by_net(table, args):
    """The preset's value for this shortcut and optimizer. A kind that it lacks counts as residual.

    Raises BadInput for an optimizer that it lacks."""
    row = table.get(args.shortcut, table["residual"])
    if args.opt not in row:
        raise BadInput(f"the preset has no learning rate for --opt {args.opt}: pass --lr")
    return row[args.opt]


def optimizer_options(args):
    """Keyword arguments of `optim.build_optimizer` from the preset's entries."""
    entries = ("betas", *MATRIX_ENTRIES.get(args.opt, ()))
    options = {key: getattr(args, key) for key in entries if getattr(args, key) is not None}
    if options.pop("bf16_factors", False):
        options["factor_dtype"] = torch.bfloat16
    return options


# -----------------------------------------------------------------------------------------------
# processes and devices

class World(NamedTuple):
    """Where this process stands: global rank, number of processes, its device, and why that device."""
    rank: int
    size: int
    device: torch.device
    why: str

    @property
    def main(self):
        return self.rank == 0


def start(device="auto", threads=0):
    """Join the process group if torchrun launched us, pick this process's device, return a `World`.

    Raises BadInput when the device is absent or there are more processes than GPUs on this machine."""
    if threads:
        torch.set_num_threads(threads)
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    have = [kind for kind, there in have.items() if there]
    name = have[0] if device == "auto" else device
    kind, _, index = name.partition(":")
    if kind not in have or not (index.isdigit() or name == kind):
        raise BadInput(f"--device {device} is not available here: use auto or {', '.join(have)}")
    if kind == "cuda":
        count = torch.cuda.device_count()
        index = int(os.environ.get("LOCAL_RANK", index or 0))    # not the global rank: other nodes
        if index >= count:
            raise BadInput(f"process {index} has no GPU, this machine has {count}: "
                           f"start torchrun with --nproc_per_node={count}")
        torch.cuda.set_device(index)
        name = f"cuda:{index}"
    chosen = torch.device(name)
    why = f"{name}, {'first of cuda, mps, cpu here' if device == 'auto' else 'asked for by --device'}"
    if not {"RANK", "WORLD_SIZE"} <= set(os.environ):            # no torchrun
        return World(0, 1, chosen, why)
    if not dist.is_initialized() and kind == "cuda":             # gloo beside nccl: see Run.stop_agreed
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=chosen)
    elif not dist.is_initialized():
        dist.init_process_group("gloo")
    return World(dist.get_rank(), dist.get_world_size(), chosen, why)


def pick_dtype(name, device):
    """(dtype, why). bf16 needs no loss scaler, so it is the only half precision offered."""
    if name != "auto":
        return getattr(torch, name), "asked for by --dtype"
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16, "this GPU has bf16"
    reason = {"cuda": "this GPU has no bf16", "mps": "bf16 is incomplete on mps"}
    return torch.float32, reason.get(device.type, "exact and no slower on most CPUs")


def autocast(device, dtype):
    """Mixed precision for the forward pass; does nothing for float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def all_sum(values, world):
    """Sum a list of numbers or tensors over all ranks, in float64 where the device has it.

    SUM only: gloo has no safe average."""
    kind = torch.float32 if world.device.type == "mps" else torch.float64
    total = torch.stack([torch.as_tensor(v, dtype=kind, device=world.device) for v in values])
    if world.size > 1:
        dist.all_reduce(total)
    return total.tolist()


def mix_seed(*parts):
    """A 32-bit seed from integers and strings. Sums such as seed + rank collide, a hash does not."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


def lr_at(step, total, warmup, peak, floor=0.0):
    """Linear warm-up, then half a cosine from `peak` to `floor`.

    A pure function of the step, so a resume needs no scheduler. Warm-up is (step + 1) / warmup, so
    that step 0 already learns; warmup = 0 and warmup = total both work."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@torch.no_grad()
def update_average(average, model, decay):
    """average <- decay average + (1 - decay) model, over the parameters of two equal modules."""
    for mean, p in zip(average.parameters(), model.parameters()):
        mean.lerp_(p.detach(), 1 - decay)


def millions(module):
    """The number of parameters, for a person."""
    return f"{sum(p.numel() for p in module.parameters()) / 1e6:.2f} M parameters"


def split_batch(batch_size, micro_batch, processes):
    """Micro-steps per update, the same on all ranks. Ranks and micro-steps may differ by one sample.

    Raises BadInput where there are fewer samples than processes."""
    if batch_size < processes:
        raise BadInput(f"--batch-size {batch_size} is less than one sample for each of the {processes} "
                       "processes: raise it, or start fewer")
    least, most = batch_size // processes, -(-batch_size // processes)
    return min(least, -(-most // micro_batch)) if micro_batch else 1


def my_part(samples, rank, processes, micro_steps):
    """The global batch (B, ...) -> this rank's micro-batches, contiguous and of nearly equal size."""
    return samples.tensor_split(processes)[rank].tensor_split(micro_steps)


# -----------------------------------------------------------------------------------------------
# checkpoint

# What a resume may change. The first never touch the course of a run. The second do: they need
# --allow-change, and the change is logged. Everything else makes another run.
UNTOUCHED = (
    "preset", "device", "dtype", "compile", "workers", "threads", "out", "resume", "allow_change",
    "wandb", "log_every", "eval_every", "save_every", "save_best", "keep_every", "micro_batch", "data",
    "model", "knn_every", "knn_images", "samples", "sample_steps", "cfg_scale",
    "sample", "sample_tokens", "prompt", "eval_tokens")
CHANGEABLE = (
    "lr", "min_lr", "lr_schedule", "epochs", "steps", "warmup", "clip", "ema", "ema_warmup", "augment",
    "mixup", "cutmix", "label_smoothing", "flip", "weight_decay_end", "momentum", "teacher_temp",
    "teacher_temp_start", "teacher_temp_warmup", "bad_images")
# Of the data: a folder may move, but not change.
FACTS = ("train_images", "train_tokens", "classes", "in_chans", "tokenizer_digest")


def save_checkpoint(path, checkpoint):
    """Write one dict of tensors and python scalars: a kill at any moment leaves the old file or the new.

    The temporary name is fixed, so a killed save leaves no orphans behind. Raises BadInput where the
    disk is full or the folder is gone."""
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:                     # torch's writer raises RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise BadInput(f"{path} cannot be written ({' '.join(str(error).split())[:100]}): make room "
                       "under --out; the checkpoint before this one is whole") from error


def load_checkpoint(path):
    """The dict that `save_checkpoint` wrote, on the CPU. Raises BadInput where it is not a whole one."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                                   # a damaged file raises almost any type
        raise BadInput(f"{path} is not a readable checkpoint: delete it, or pass --fresh") from error
    keys = {"model", "ema", "optimizer", "step", "best", "rng", "args"}
    if not isinstance(checkpoint, dict) or keys - checkpoint.keys() or "kind" not in checkpoint["args"]:
        raise BadInput(f"{path} was not written by a train script of this version: choose another --out")
    return checkpoint


def read_checkpoint(path, flag, remedy):
    """The checkpoint of another run, which `flag` named: its file or its folder. Raises BadInput."""
    file = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise BadInput(f"{flag} {path} is no checkpoint, nor a folder with ckpt.pt: {remedy}")
    try:
        return load_checkpoint(file)
    except BadInput as error:
        raise BadInput(f"{flag} {path} is not a whole checkpoint of this version: {remedy}") from error


def find_checkpoint(out, resume, kind):
    """The checkpoint in folder `out`; None where there is none or it is not to be resumed.

    Raises BadInput for a checkpoint of another train script than `kind`'s."""
    path = Path(out) / "ckpt.pt"
    if not resume or not path.exists():
        return None
    checkpoint = load_checkpoint(path)
    if checkpoint["args"]["kind"] != kind:
        raise BadInput(f"{path} was written by another train script: choose another --out, or --fresh")
    return checkpoint


def check_resume(path, then, now):
    """Compare a checkpoint's values with this command's, two dicts. Returns {key: (then, now)}.

    Raises BadInput, naming the key and both values, for a change that is not allowed."""
    pairs = {key: (then.get(key, new), new) for key, new in now.items() if key not in UNTOUCHED}
    changes = {key: (old, new) for key, (old, new) in pairs.items() if old != new}
    for key, (old, new) in changes.items():
        if not (key in CHANGEABLE and now["allow_change"]):
            where = f" by --data {now['data']}" * (key in FACTS)
            remedy = ", or --allow-change to go on with the new one" * (key in CHANGEABLE)
            raise BadInput(f"{path} was trained with {key}={old}, and you ask for {key}={new}{where}: "
                           f"pass the old value, --fresh to start over, another --out{remedy}")
    return changes


# -----------------------------------------------------------------------------------------------
# the run

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)]


class Run:
    """A training run: its processes, device and dtype, its folder with checkpoint and log.

    kind: the train script's name in the checkpoint. best: (key of the log, max or min), which value of
    the evaluations is the best one. Nothing is written before `begin`."""

    def __init__(self, args, kind, best=("val_loss", min)):
        self.args, self.kind, self.best_key = args, kind, best
        self.world = start(args.device, args.threads)
        self.rank, self.size, self.device, _ = self.world
        self.main = self.world.main
        self.dtype, self.why_dtype = pick_dtype(args.dtype, self.device)
        self.micro_steps = split_batch(args.batch_size, args.micro_batch, self.size)
        args.micro_batch = args.micro_batch or max(1, args.batch_size // self.size)
        self.out = Path(args.out)
        self.ckpt = self.out / "ckpt.pt"
        self.saved = find_checkpoint(args.out, args.resume, kind)
        self.first_step, self.window, self.unchecked = 0, [], []
        self.signal, self.signal_time, self.agreed, self.handlers = 0, 0.0, 0, {}

    def begin(self, facts, steps, model, ema, optimizer):
        """Resume, or begin; make the folder, args.json and the log. Returns the step.

        facts: what is known beside the flags, for args.json and the checkpoint: size of the data,
        options of the model, `constants` of its initialisation. ema: the averaged model or None.
        Nothing is written before all is checked. Raises BadInput for flags that make another run, and
        for a folder that cannot be written."""
        used = facts.get("constants", {})
        known = vars(self.args) | facts | {"kind": self.kind}
        known = {k: v for k, v in known.items() if k not in ("constants", *INIT_ENTRIES)}
        self.steps, self.facts, changes = steps, known | used, {}
        if saved := self.saved:
            changes = check_resume(self.ckpt, saved["args"], self.facts)
            if saved["step"] + bool(changes) > steps:
                raise BadInput(f"{self.ckpt} has its {saved['step']} steps, and you ask for {steps}: "
                               "pass --fresh to start over, or another --out")
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            if ema:
                ema.load_state_dict(saved["ema"] or saved["model"])
            torch.set_rng_state(saved["rng"])
            self.first_step, self.window = saved["step"], saved.get("window", [])
            self.saved = True                                    # lets the tensors go
        self.wandb = import_optional("wandb", "--wandb") if self.args.wandb else None
        if self.main:
            make_out(self.out, self.facts)
            if not self.first_step:                              # old checkpoints go with the old log
                for old in (self.ckpt, self.out / "best.pt", *self.out.glob("ckpt-*.pt")):
                    old.unlink(missing_ok=True)
            trim_log(self.out, self.first_step)
            if self.wandb:
                self.wandb = self.wandb.init(
                    project=self.args.wandb, config=self.facts, dir=str(self.out))
        for key, (old, new) in changes.items():
            self.log(f"step {self.first_step:6d}  {key} was {old} and is {new} from here on",
                     step=self.first_step, changed=key, was=old, now=new)
        self.catch_signals()
        return self.first_step

    def banner(self, data, model, batch, optimizer):
        """Print what a person should know before the run starts, from one text each: about ten lines."""
        lines = dict(
            revision=f"{git_revision()}, torch {torch.__version__}, python {sys.version.split()[0]}",
            device=f"{self.world.why}; {self.size} process(es) x {torch.get_num_threads()} threads; "
                   f"{self.dtype} ({self.why_dtype})",
            data=f"{self.args.data}: {data}", model=model, optimizer=optimizer,
            batch=f"{self.args.batch_size} over {self.size} process(es) x {self.micro_steps} "
                  f"micro-step(s); {batch}",
            folder=f"{self.out}, all flags in args.json")
        if self.first_step:
            lines["resume"] = f"{self.ckpt}, step {self.first_step} of {self.steps}"
        for name, text in lines.items():
            self.say(f"{name:12s}{text}".replace("\n", "\n" + " " * 12))

    def wrap(self, raw):
        """The model that training calls: compiled if asked for, gradients averaged over processes.

        Save and evaluate `raw`."""
        model = torch.compile(raw) if self.args.compile else raw
        if self.size > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
        hidden = not (self.main and sys.stdout.isatty())
        self.bar = tqdm(total=self.steps, initial=self.first_step, disable=hidden, unit="step",
                        dynamic_ncols=True)
        self.restart_clock(self.first_step)
        self.began = self.clock
        return model

    # what the loop needs

    def autocast(self):
        return autocast(self.device, self.dtype)

    def to_device(self, *tensors):
        return [t.to(self.device, non_blocking=True) for t in tensors]

    def accumulate(self, model, micro):
        """Around forward and backward of a micro-batch: gradients are exchanged once, with the last."""
        last = micro == self.micro_steps - 1
        return contextlib.nullcontext() if last or self.size == 1 else model.no_sync()

    def share(self, samples):
        """The factor of a micro-batch's mean loss: samples x processes / batch.

        So the gradients' mean over processes is that of one mean over the whole batch, however split."""
        return samples * self.size / self.args.batch_size

    def observe(self, step, lr, loss, norm):
        """Note a step's loss and gradient norm, tensors, for the log; stop where they are not finite.

        On GPUs the check is a synchronisation, so it waits for the log step."""
        self.unchecked.append((step, lr, loss, norm))
        if self.device.type == "cpu":
            self.check_window()
        self.bar.update()

    def check_window(self):
        """Average what was observed over the ranks; stop them all where it is not finite."""
        if self.unchecked:
            self.window += check_finite(self.unchecked, self.world)
            self.unchecked = []

    def due(self, step, save_every, eval_every):
        """(log now?, save now?, evaluate now?): all three at the last step; a signal saves too.

        A checkpoint goes before each evaluation: nothing that fails there costs training."""
        evaluate, planned = (step % n == 0 or step == self.steps for n in (eval_every, save_every))
        log = evaluate or planned or step % self.args.log_every == 0
        return log, self.stop_agreed() or evaluate or planned or self.kept(step), evaluate

    def kept(self, step):
        return self.args.keep_every > 0 and step % self.args.keep_every == 0

    def log_training(self, step, lr, samples, unit, epoch, flops=0.0, peak=0.0):
        """The training line of the log: mean loss since the last one, gradient norm, rate, time left.

        samples: a step's, in that unit; flops: of one; peak: the machine's rate, for the MFU."""
        self.check_window()
        losses, norm = [row[2] for row in self.window], self.window[-1][3]
        loss, now = sum(losses) / len(losses), time.perf_counter()
        rate = (step - self.clock_step) * samples / (now - self.clock)
        left = (now - self.began) / (step - self.first_step) * (self.steps - step)
        more = {f"{unit}_per_s": rate} | ({"mfu": rate * flops / peak} if peak else {})
        words = [f"step {step:6d}", f"epoch {epoch:6.2f}", f"loss {loss:.4f}", f"lr {lr:.2e}",
                 f"grad norm {norm:.2f}", f"{rate:.0f} {unit}/s"]
        if peak:
            words.append(f"MFU {100 * more['mfu']:.0f} %")
        if self.device.type == "cuda":
            words.append(f"{torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB")
        words.append(f"{datetime.timedelta(seconds=round(left))} left")
        self.log("  ".join(words), step=step, epoch=epoch, loss=loss, lr=lr, grad_norm=norm, **more)
        self.window = []

    def save(self, step, model, ema, optimizer):
        """Write ckpt.pt; after a signal, leave. All ranks call it: each has a share of the state."""
        self.check_window()
        state = optimizer.state_dict()
        if self.main:
            save_checkpoint(self.ckpt, dict(
                model=model.state_dict(), ema=ema and ema.state_dict(), optimizer=state, step=step,
                best=finite(self.best()), rng=torch.get_rng_state(), args=self.facts,
                **({"window": self.window} if self.window else {})))     # losses not yet in the log
            if self.kept(step):
                copy_file(self.ckpt, self.out / f"ckpt-{step}.pt")
        if self.agreed and step < self.steps:
            all_sum([0.0], self.world)                           # torchrun ends all when one has left
            self.bar.close()
            self.say(f"saved at step {step}: the same command continues")
            sys.exit(128 + self.agreed)
        self.restart_clock(step)

    def log(self, human, **record):
        """A line for a person and, on rank 0, a line of log.jsonl. The next rate starts after it.

        After the best evaluation so far ckpt.pt, saved just before it, becomes best.pt if asked for."""
        self.say(human)
        if self.main:
            record = finite(record)
            new = self.args.save_best and record.get(self.best_key[0])
            best = new and self.best_key[1]([new, *self.logged(self.best_key[0])])
            with open(self.out / "log.jsonl", "a", encoding="utf-8") as f:
                f.write(json.dumps(record) + "\n")
            if self.wandb:
                self.wandb.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])
            if new and new == best:
                copy_file(self.ckpt, self.out / "best.pt")
        self.restart_clock(record["step"])

    def say(self, text):
        """Print, on rank 0, without tearing the progress bar."""
        if self.main:
            tqdm.write(text)
            sys.stdout.flush()

    def restart_clock(self, step):
        self.clock, self.clock_step = time.perf_counter(), step

    # what the log already holds

    def logged(self, key):
        return [row[key] for row in read_log(self.out) if row.get(key) is not None]

    def best(self):
        """The best evaluation so far; nan if there is none."""
        key, choose = self.best_key
        return choose(self.logged(key), default=math.nan)

    def last(self, key):
        """The last evaluation's value; nan if there is none."""
        return (self.logged(key) or [math.nan])[-1]

    def owes_look(self, step, every):
        """Is the evaluation of the step that we resume from missing? A kill may come before it."""
        done = any(row["step"] == step and "val_loss" in row for row in read_log(self.out))
        missing = self.main and step and not done and (step % every == 0 or step == self.steps)
        return all_sum([float(missing)], self.world)[0] > 0

    # signals

    def catch_signals(self):
        """Remember SIGTERM, SIGUSR1 and Ctrl-C until the step is done; a second Ctrl-C ends at once."""
        def remember(number_, _):
            again = self.signal == number_ == signal.SIGINT
            if again and time.monotonic() - self.signal_time > 1:            # torchrun sends each twice
                raise KeyboardInterrupt
            if not again:
                self.signal, self.signal_time = int(number_), time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self.handlers = {number_: signal.signal(number_, remember) for number_ in SIGNALS}

    def stop_agreed(self):
        """Has a signal come to any process? They ask each other over the CPU: no GPU waits."""
        self.agreed = self.signal
        if self.size > 1:
            signals = torch.tensor(self.signal)
            dist.all_reduce(signals, dist.ReduceOp.MAX)
            self.agreed = int(signals)
        return self.agreed > 0

    def finish(self, title, metric, label, digits=1, files=()):
        """curve.png, and the line that names what the folder holds."""
        self.bar.close()
        if self.main:
            plot_curve(self.out, title, metric, label, digits)
        for number_, before in self.handlers.items():
            signal.signal(number_, before)
        names = ["ckpt.pt", "log.jsonl", "args.json", "curve.png", *files]
        self.say(f"{self.out}: {', '.join(names)}")


open_run = Run


def check_finite(window, world):
    """Stop all ranks together at the first step whose loss or gradient norm is not finite.

    window: (step, lr, loss, grad_norm) of some steps, tensors still on the device: one synchronisation
    for all. Returns the same with numbers, means over the ranks. Raises BadInput, on all ranks."""
    mean = [v / world.size for v in all_sum([w[2] for w in window] + [w[3] for w in window], world)]
    rows = [(*w[:2], *pair) for w, pair in zip(window, zip(mean, mean[len(window):]))]
    for step, lr, loss, norm in rows:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise BadInput(f"the loss is not finite at step {step} (loss {loss}, lr {lr:.3g}, gradient "
                           f"norm {norm}): lower --lr, raise --warmup or set --clip")
    return rows


def check_val(value, step, lr):
    """Stop where the validation loss, equal on all ranks, is not finite: an update broke the net."""
    if not math.isfinite(value):
        raise BadInput(f"the validation loss is not finite after step {step} (lr {lr:.3g}): lower --lr, "
                       "raise --warmup or set --clip")


# -----------------------------------------------------------------------------------------------
# files

def read_log(out):
    """The rows of out/log.jsonl, dicts with a step; a line that a kill cut short is left out."""
    path, rows = Path(out) / "log.jsonl", []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def trim_log(out, step):
    """Drop the lines past `step`, as the steps they describe are run again; all of them if it is 0."""
    rows = [row for row in read_log(out) if row["step"] <= step] if step else []
    write_text(Path(out) / "log.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def write_text(path, text):
    """Write a text file as UTF-8, so that a kill leaves the old one or the new one."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    os.replace(temporary, path)


def copy_file(source, target):
    """Copy a file, so that a kill leaves the old target or the new one."""
    shutil.copyfile(source, f"{target}.tmp")
    os.replace(f"{target}.tmp", target)


def make_out(out, args):
    """Create the run's folder and write args.json. Raises BadInput when it cannot be written."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        write_text(Path(out) / "args.json", json.dumps(finite(args), indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise BadInput(f"--out {out} cannot be written ({error.strerror}): choose another") from error


def finite(value):
    """Nested plain data with None for nan and inf, for which JSON has no word."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def import_optional(name, flag):
    """Import a package, or a module of it, that only one flag needs. Raises BadInput naming both."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        wheel = {"sklearn": "scikit-learn"}.get(package, package.replace("_", "-"))
        raise BadInput(f"{flag} needs the package {package}: pip install {wheel}") from error


def git_revision():
    """The commit of the code that runs, with + where files differ from it; 'unknown' outside git."""
    words = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    with contextlib.suppress(FileNotFoundError):                 # no git on this machine
        ran = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, encoding="utf-8")
        return ran.stdout.strip() or "unknown"
    return "unknown"


def matmul_rate(device, dtype, size=1024, repeats=5):
    """Flops per second of a large matrix product on this device, measured: what MFU is a share of."""
    size *= 4 if device.type == "cuda" else 1                    # a GPU is not filled by less
    generator = torch.Generator(device).manual_seed(0)           # the run's own must not move
    a = torch.rand(size, size, generator=generator, device=device).to(dtype)
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    a @ a                                                        # the first call sets the library up
    best = math.inf
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        a @ a
        wait()
        best = min(best, time.perf_counter() - begin)
    return 2 * size ** 3 / best


def pyplot():
    """matplotlib.pyplot, drawing to files only; imported late, since only the end of a run needs it."""
    import matplotlib
    matplotlib.use("Agg")                                        # no display needed
    import matplotlib.pyplot
    return matplotlib.pyplot


def plot_curve(out, title, metric, label, digits=1):
    """out/log.jsonl -> out/curve.png: losses on the left, `metric` with its last value on the right."""
    plt = pyplot()
    lines = {key: [(r["step"], r[key]) for r in read_log(out) if r.get(key) is not None]
             for key in ("loss", "val_loss", metric)}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    left.plot(*zip(*lines["loss"]), label="train", lw=1)
    left.plot(*zip(*lines["val_loss"]), "o-", label="validation", ms=3)
    left.set(xlabel="step", ylabel="loss")
    left.legend(frameon=False)
    right.plot(*zip(*lines[metric]), "o-", ms=3, color="C2")
    end = f", {lines[metric][-1][1]:.{digits}f} at the end" if lines[metric] else ""
    right.set(xlabel="step", title=label + end)
    for axis in (left, right):
        axis.grid(alpha=.3)
    figure.suptitle(title, fontsize=10)
    figure.savefig(Path(out) / "curve.png", dpi=120)
    plt.close(figure)


def run_script(main):
    """Call main(). BadInput becomes one sentence on stderr and exit code 2; the rest is a traceback."""
    for stream in (sys.stdout, sys.stderr):                      # no letter that it lacks may end a run
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (BadInput, OSError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        if not (full or isinstance(error, BadInput)):
            raise
        if int(os.environ.get("RANK", 0)) > 0:
            time.sleep(8)                                        # rank 0 says a fault that all meet
        print(f"error: {error}{': make room under --out' * full}", file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
