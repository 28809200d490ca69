"""What is not about the experiment: flags, processes, devices, schedule, checkpoint, log.

A train script writes its own loop. Around the loop stands a `Run`:

    run = open_run(args, "vit")                        processes, device, dtype, the checkpoint in --out
    step, best = run.begin(facts, steps, raw, ...)     resume, folder, log
    run.banner(...)                                    what a person should know before it starts
    model = run.wrap(raw)                              torch.compile and DistributedDataParallel
    run.observe(...) run.log_training(...) run.save(...) run.log(...)          inside the loop
    run.finish(...)                                    curve.png and the last lines
"""
import argparse
import ast
import contextlib
import hashlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist


class BadInput(ValueError):
    """A fault of the input, not of the program: one sentence that names the file or flag and what to do."""


# ---------------------------------------------------------------------------------------------------------
# flags

class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the docstring as it is written, and the default behind each flag that has one."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse that answers a wrong flag with one sentence and exit code 2."""

    def __init__(self, **kwargs):
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        self.exit(2, f"error: {message}; see --help\n")


def number(kind, low=-math.inf, high=math.inf, above=-math.inf, below=math.inf):
    """An argparse type: a finite `kind` (int or float) with low <= value <= high and above < value < below."""
    def parse(text):
        value = kind(text)
        # false for NaN too; an int may exceed any float
        if not (abs(value) < math.inf and low <= value <= high and above < value < below):
            bounds = ["finite"] * (not abs(value) < math.inf)
            bounds += [f"above {above:g}"] * (above > -math.inf) + [f"at least {low:g}"] * (low > -math.inf)
            bounds += [f"below {below:g}"] * (below < math.inf) + [f"at most {high:g}"] * (high < math.inf)
            raise argparse.ArgumentTypeError(f"{text} must be {' and '.join(bounds)}")
        return value
    parse.__name__ = kind.__name__           # argparse names the type in "invalid int value: 'x'"
    return parse


# Entries that every preset has. No flag, but `--set key=value` reaches them, as it does every entry of a preset.
RARE = dict(
    betas={},                       # momenta, by optimizer; one pair for all: --set betas=0.9,0.95
    precondition_frequency=10,      # updates between two refreshes of the eigenbases (soap, kl-shampoo)
    init_factor=None,               # the eigenvalues that KL-Shampoo starts from; None: its own
    stagger=False,                  # spread the refreshes evenly over the updates between them (soap, kl-shampoo)
    bf16_factors=False,             # factors and bases in bfloat16: half the memory (soap, kl-shampoo)
    workers=0,                      # data loading processes per rank
    log_every=20,                   # steps between lines of the log
)


def train_parser(doc, presets, argv):
    """(parser, preset) of a train script: a parser with --preset and --set, and the preset that argv names.

    doc: the script's docstring; presets: its dict of dicts, laptop first. The preset comes with all of `RARE`."""
    first = Parser(add_help=False)
    first.add_argument("--preset", choices=list(presets), default=next(iter(presets)), help="a dict of defaults at the top of this file")
    preset = RARE | presets[first.parse_known_args(argv)[0].preset]
    parser = Parser(description=doc, parents=[first])
    parser.add_argument("--set", nargs="+", action="extend", metavar="KEY=VALUE", help="change any entry of the preset's dict")
    return parser, preset


def add_shortcut_flags(add, shortcuts, default="residual"):
    """The flags of the method itself. shortcuts: the names of the kinds, `model.SHORTCUTS`."""
    add("--shortcut", choices=list(shortcuts), default=default, help="x + f(x), f(x), or a x + f(x) with a falling to --alpha-min")
    add("--skipless", dest="shortcut", action="store_const", const="skipless", default=argparse.SUPPRESS,
        help="same as --shortcut skipless")
    add("--alpha-min", type=number(float, low=0, high=1), help="weight of the last shortcut, if decayed")


def add_optimizer_flags(parser, optimizers, unit="epochs"):
    """The flags of optimizer and schedule. optimizers: their names; unit: what the length of a run is counted in."""
    add = parser.add_argument_group("optimisation").add_argument
    add("--opt", choices=list(optimizers), default="adamw", help="for the matrices of the blocks; AdamW takes the rest")
    add("--lr", type=number(float, above=0, high=1e30), help="peak learning rate; else the preset's, by shortcut and optimizer")
    add("--weight-decay", type=number(float, low=0), help="decoupled; not on biases, norms, positions and tokens")
    add("--batch-size", type=number(int, low=1), help="global: samples per update over all processes")
    add("--micro-batch", type=number(int, low=1), help="samples per forward pass and process; else as many as the batch gives it")
    if unit == "epochs":
        add("--epochs", type=number(float, above=0, high=1e6), help="passes over the training set")
        add("--warmup", type=number(float, low=0), help="epochs of linear warm-up")
    else:
        add("--steps", type=number(int, low=1), help="updates")
        add("--warmup", type=number(int, low=0), help="steps of linear warm-up")
    add("--clip", type=number(float, low=0), help="largest gradient norm; 0 is off")
    return add


def add_run_flags(parser, never="once per epoch"):
    """The flags that say nothing about the experiment. never: what --eval-every 0 and --save-every 0 mean."""
    add = parser.add_argument_group("run").add_argument
    add("--seed", type=number(int, low=0, high=2 ** 63 - 1), default=0, help="of init, data order, augmentation and noise")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda or mps")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="of the forward pass; weights stay float32")
    add("--compile", action="store_true", help="torch.compile the training step's model")
    add("--threads", type=number(int, low=0), default=0, help="CPU threads per process; 0 leaves torch's choice")
    add("--out", help="folder for ckpt.pt, log.jsonl, args.json and curve.png; else named after the run, under out/")
    add("--resume", action="store_true", default=True, help=argparse.SUPPRESS)           # the default, said aloud
    add("--fresh", dest="resume", action="store_false", default=argparse.SUPPRESS, help="start over, whatever --out holds")
    add("--allow-change", action="store_true", help="resume with another lr, length or augmentation than the run began with")
    add("--eval-every", type=number(int, low=0), default=0, help=f"steps between evaluations; 0 means {never}")
    add("--save-every", type=number(int, low=0), default=0, help=f"steps between checkpoints; 0 means {never}")
    add("--wandb", metavar="PROJECT", help="also log to this Weights & Biases project (needs the wandb package)")


def read_flags(parser, preset, argv, name):
    """The namespace of all flags and all entries of the preset: flags win over --set, --set over the preset.

    name: of the run's folder, out/<name>-..., to which comes what was given and differs from the default.
    Raises BadInput for a --set that names no entry, or gives it a value of another type."""
    flags = {action.dest for action in parser._actions}
    parser.set_defaults(**{k: v for k, v in preset.items() if k in flags and not isinstance(v, dict)})
    before = {**preset, **{k: parser.get_default(k) for k in flags}}
    args = parser.parse_args(argv)
    changed = read_settings(args.set or (), preset)
    chosen = {k: v for k, v in vars(args).items() if v != before.get(k)}
    for key, value in {**preset, **changed}.items():
        if key not in flags or (key in changed and key not in chosen):
            setattr(args, key, value)
    del args.set
    if args.out is None:
        args.out = f"out/{folder_name(name, {**changed, **chosen}, args.seed)}"
    return args


def read_settings(pairs, preset):
    """{key: value} of the texts "key=value", each of the type that the preset's entry has."""
    found = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or key not in preset:
            near = closest(key, preset)
            raise BadInput(f"--set {pair}: the preset has no entry {key!r}{near}" if equals else f"--set {pair}: write key=value")
        found[key] = read_value(key, text, preset[key])
    return found


def closest(name, names):
    import difflib
    near = difflib.get_close_matches(name, names, n=1)
    return f", did you mean {near[0]!r}?" if near else f"; its entries are {', '.join(sorted(names))}"


def read_value(key, text, default):
    """`text` as a value like `default`: a number, a truth value, a text, or numbers with commas between."""
    try:
        value = {"true": True, "false": False, "none": None}.get(text.lower(), ...)
        value = ast.literal_eval(text) if value is ... else value
    except (ValueError, SyntaxError):
        value = text
    if isinstance(default, str):
        return text
    if value is None and not isinstance(default, (bool, int, float)):
        return None
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    numbers = value if isinstance(value, (tuple, list)) else [value]
    wanted = (tuple, list) if isinstance(default, (tuple, list, dict)) else type(default)
    fits = default is None or (isinstance(value, wanted) and isinstance(value, bool) == isinstance(default, bool))
    if not fits or any(isinstance(v, float) and not math.isfinite(v) for v in numbers):
        kinds = {bool: "true or false", int: "a whole number", float: "a number", dict: "numbers with commas between"}
        raise BadInput(f"--set {key}={text}: {key} must be {kinds.get(type(default), 'numbers with commas between')}")
    return list(value) if isinstance(value, tuple) else value


def folder_name(name, chosen, seed):
    """The run's folder: what was chosen and touches its course is part of the name, so that a sweep has a folder for each run."""
    words = [name]
    for key, value in sorted(chosen.items()):
        if key not in UNTOUCHED and key not in ("seed", "opt", "shortcut", "size"):
            shown = Path(value).name if key == "data" else value if isinstance(value, str) else json.dumps(value).replace(" ", "")
            words.append(f"{key}{shown}".replace("/", "_"))
    text = "-".join([*words, f"seed{seed}"])
    return text if len(text) < 120 else f"{text[:100]}-{mix_seed(text):08x}-seed{seed}"


def by_net(table, args):
    """The preset's value for this run's shortcut and optimizer: table[shortcut][opt], residual's for kinds that are not listed.

    Raises BadInput where there is none, as for an optimizer that somebody has just added."""
    row = table.get(args.shortcut, table.get("residual", table))
    if args.opt not in row:
        raise BadInput(f"the preset has no learning rate for --opt {args.opt}: pass --lr")
    return row[args.opt]


def optimizer_options(args):
    """Keyword arguments of `optim.build_optimizer` from the preset's entries: betas, and those of the matrix optimizers."""
    betas = args.betas.get(args.opt) if isinstance(args.betas, dict) else args.betas
    options = {"betas": tuple(betas)} if betas else {}
    if args.opt in ("soap", "kl-shampoo"):
        options.update(precondition_frequency=args.precondition_frequency, stagger=args.stagger,
                       factor_dtype=torch.bfloat16 if args.bf16_factors else None)
    if args.opt == "kl-shampoo" and args.init_factor:
        options["init_factor"] = args.init_factor
    return options


# ---------------------------------------------------------------------------------------------------------
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
    if {"RANK", "WORLD_SIZE"} <= set(os.environ):                                # torchrun
        if not dist.is_initialized():
            backend = "nccl" if kind == "cuda" else "gloo"
            dist.init_process_group(backend, device_id=device_ if kind == "cuda" else None)
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


def mix_seed(*parts):
    """A 32-bit seed from integers and strings: sums such as seed + rank collide between runs, a hash does not."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


def lr_at(step, total, warmup, peak, floor=0.0):
    """Linear warm-up, then half a cosine from `peak` to `floor`: a pure function of the step, so a resume needs no scheduler.

    Step 0 already learns ((step + 1) / warmup); warmup = 0 and warmup = total both work.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


# ---------------------------------------------------------------------------------------------------------
# batches

def split_batch(batch_size, micro_batch, processes):
    """Micro-steps per update, the same on all ranks. Raises BadInput where there are fewer samples than processes.

    Ranks and micro-steps may differ by one sample (see `my_part`), so that every batch fits any number of processes."""
    if batch_size < processes:
        raise BadInput(f"--batch-size {batch_size} is smaller than the {processes} processes: raise it, or start fewer")
    least, most = batch_size // processes, -(-batch_size // processes)
    return min(least, -(-most // micro_batch)) if micro_batch else 1


def my_part(order, rank, processes, micro_steps):
    """A step's samples, a tensor of the global batch -> the micro-batches of this rank: contiguous, of nearly equal size."""
    return order.tensor_split(processes)[rank].tensor_split(micro_steps)


# ---------------------------------------------------------------------------------------------------------
# checkpoint

# What a resume may change. The first never touch the course of a run. The second do, and need --allow-change; a change is logged.
# Everything else makes another run.
UNTOUCHED = ("preset", "device", "dtype", "compile", "workers", "threads", "out", "resume", "allow_change", "log_every", "eval_every",
             "save_every", "wandb", "micro_batch", "data", "knn_every", "knn_images", "samples", "sampler", "sample_steps", "cfg_scale",
             "sample_tokens", "prompt", "eval_tokens", "alpha_eff", "plain", "model")
CHANGEABLE = ("lr", "min_lr", "epochs", "steps", "warmup", "clip", "ema", "ema_warmup", "lr_schedule", "augment", "mixup", "cutmix",
              "label_smoothing", "flip", "weight_decay_end", "momentum", "teacher_temp", "teacher_temp_start", "teacher_temp_warmup")
FACTS = ("train_images", "train_tokens", "classes", "in_chans", "tokenizer_digest")           # of the data: a folder may move, not change


def save_checkpoint(path, checkpoint, main=True):
    """Write one dict of tensors and python scalars so that a kill at any moment leaves the old file or the new one.

    main: is this rank 0? It is the only writer, so the temporary name is fixed, and a killed save leaves no orphans behind.
    The others come here all the same: `optim`'s state_dict, which makes the dict, collects the state from all of them.
    Raises BadInput where the disk is full or the folder is gone.
    """
    if not main:
        return
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:                     # torch's own writer raises RuntimeError on a full disk
        temporary.unlink(missing_ok=True)
        raise BadInput(f"{path} cannot be written ({' '.join(str(error).split())[:120]}): make room under --out; "
                       f"the checkpoint before it is whole") from error


def load_checkpoint(path):
    """The dict that `save_checkpoint` wrote, on the CPU. Raises BadInput when the file is not a whole checkpoint."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                                   # on a damaged file the unpickler raises almost any type
        raise BadInput(f"{path} is not a readable checkpoint: delete it or pass --fresh to start over") from error
    missing = {"model", "ema", "optimizer", "step", "best", "rng", "args"} - set(checkpoint if isinstance(checkpoint, dict) else ())
    if missing or not isinstance(checkpoint["args"], dict) or "kind" not in checkpoint["args"]:
        raise BadInput(f"{path} lacks {', '.join(sorted(missing)) or 'the run it belongs to'}, so no train script of this version "
                       f"wrote it: choose another --out")
    return checkpoint


def read_checkpoint(path, flag, remedy):
    """The checkpoint of another run that `flag` named: a file, or a folder with ckpt.pt. Raises BadInput, with that remedy."""
    file = Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise BadInput(f"{flag} {path} is not a checkpoint file or a folder with one: {remedy}")
    try:
        return load_checkpoint(file)
    except BadInput as error:
        raise BadInput(f"{flag} {path} is not a whole checkpoint: {remedy}") from error


def find_checkpoint(out, resume, kind):
    """(path, checkpoint) of the run in folder `out`; None where there is none, or it is not to be resumed.

    Raises BadInput for a checkpoint of another train script than `kind`'s."""
    path = Path(out) / "ckpt.pt"
    if path.exists() and not path.is_file():
        raise BadInput(f"{path} is not a file: choose another --out")
    checkpoint = load_checkpoint(path) if resume and path.exists() else None
    if checkpoint and checkpoint["args"]["kind"] != kind:
        raise BadInput(f"{path} was written by another train script: choose another --out, or --fresh to replace it")
    return path, checkpoint


def check_resume(path, saved, now, allow_change):
    """Compare a checkpoint's flags with this command's, both dicts. Returns {flag: (value then, value now)} of allowed changes.

    Raises BadInput naming the flag and both values."""
    changes = {}
    for key in [k for k in now if k in saved and k not in UNTOUCHED and saved[k] != now[k]]:
        if key in FACTS:
            raise BadInput(f"--data {now['data']} has {key.replace('_', ' ')} {now[key]}, but {path} was trained on {saved['data']} "
                           f"with {saved[key]}: pass the same data, --fresh to start over, or another --out")
        if key not in CHANGEABLE or not allow_change:
            what = "--fresh to start over, or another --out" + ", or --allow-change to go on with it" * (key in CHANGEABLE)
            raise BadInput(f"{path} was trained with {typed(key, saved[key])} and you ask for {typed(key, now[key])}: pass the former, {what}")
        changes[key] = saved[key], now[key]
    return changes


def typed(key, value):
    """A flag with its value as one types it."""
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    return f"--{key.replace('_', '-')} {value}"


# ---------------------------------------------------------------------------------------------------------
# the run

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)]


class Run:
    """A training run: its processes, device and dtype, its folder with checkpoint and log. Made by `open_run`."""

    def __init__(self, args, kind):
        self.args, self.kind, self.world = args, kind, start(args.device, args.threads)
        self.rank, self.size, self.device, self.main = *self.world[:3], self.world.main
        self.dtype, self.why_dtype = pick_dtype(args.dtype, self.device)
        self.micro_steps = split_batch(args.batch_size, args.micro_batch, self.size)
        args.micro_batch = args.micro_batch or max(1, args.batch_size // self.size)         # evaluation takes as many
        self.ckpt, self.saved = find_checkpoint(args.out, args.resume, kind)
        self.window, self.clock, self.changes, self.signal = [], time.perf_counter(), {}, 0

    def begin(self, facts, steps, model, ema, optimizer):
        """Resume from the checkpoint, or begin; make the folder, args.json and the log. Returns (step, best).

        facts: what is known beside the flags (size of the data, options of the model), for args.json and the checkpoint. The
        averaged model `ema`, if there is one, starts at the weights where the checkpoint has none. Nothing is written before
        all is checked. Raises BadInput for flags that make another run, and for a folder that cannot be written."""
        args, saved, step, best = self.args, self.saved, 0, None
        self.facts, self.steps, self.start_step = dict(vars(args), kind=self.kind, **facts), steps, 0
        if saved:
            self.changes = check_resume(self.ckpt, saved["args"], self.facts, args.allow_change)
            if saved["step"] >= steps and self.changes:
                raise BadInput(f"{self.ckpt} is a finished run of {saved['step']} steps: pass --fresh to start over, or another --out")
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            if ema:
                ema.load_state_dict(saved["ema"] or saved["model"])
            torch.set_rng_state(saved["rng"])
            step, best = saved["step"], saved["best"]
            self.start_step, self.saved = step, True             # lets the tensors go
        wandb = import_optional("wandb", "--wandb") if args.wandb else None
        make_out(args.out, self.facts, self.world)
        if self.main and not step:                               # with --fresh the old checkpoint goes with the old log
            self.ckpt.unlink(missing_ok=True)
        self.journal = Log(args.out, self.world, step, wandb, self.facts)
        for key, (then, now) in self.changes.items():
            self.log(f"step {step:6d}  {typed(key, then)} is {now} from here on", step=step, changed=key, was=then, value=now)
        if self.main or self.size > 1:
            self.catch_signals()
        return step, best

    def banner(self, data, model, batch, optimizer):
        """What a person should know before the run starts: some ten lines. All flags are in args.json."""
        from optim import describe
        count, micro = torch.get_num_threads(), f"{self.micro_steps} micro-steps" if self.micro_steps > 1 else "1 micro-step"
        self.say(f"versions    revision {git_revision()}, torch {torch.__version__}, python {sys.version.split()[0]}")
        self.say(f"device      {self.world.why}; {self.size} process(es) x {count} threads; {self.dtype} ({self.why_dtype})")
        self.say(f"data        {self.args.data}: {data}")
        self.say(f"model       {model}")
        self.say(f"optimizer   {describe(optimizer)}".replace("\n", "\n            "))
        self.say(f"batch       {self.args.batch_size} over {self.size} process(es) x {micro}; {batch}")
        self.say(f"folder      {self.args.out}: all flags in args.json")
        if self.start_step:
            self.say(f"resume      {self.ckpt}, step {self.start_step} of {self.steps}")

    def wrap(self, raw):
        """The model that training calls: compiled if asked for, its gradients averaged over processes. Save and evaluate `raw`."""
        from tqdm import tqdm
        model = torch.compile(raw) if self.args.compile else raw
        if self.size > 1:
            device_ids = [self.device.index] if self.device.type == "cuda" else None
            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=device_ids)
        hidden = not (self.main and sys.stdout.isatty())
        self.bar = tqdm(total=self.steps, initial=self.start_step, disable=hidden, unit="step", dynamic_ncols=True)
        self.clock = self.began = time.perf_counter()
        return model

    def autocast(self):
        return autocast(self.device, self.dtype)

    def to_device(self, *tensors):
        return [t.to(self.device, non_blocking=True) for t in tensors]

    def accumulate(self, model, micro):
        """Around forward and backward of a micro-batch: gradients are exchanged once, with the last one."""
        last = micro == self.micro_steps - 1
        return contextlib.nullcontext() if last or self.size == 1 else model.no_sync()

    def share(self, samples):
        """What the mean loss of a micro-batch counts: samples x processes / batch.

        The gradients' average over processes is then that of one mean over the whole batch, however it was split."""
        return samples * self.size / self.args.batch_size

    def observe(self, step, lr, loss, norm):
        """Keep a step's loss and gradient norm for the log. On CPUs stop at once where they are not finite.

        Elsewhere a look is a synchronisation, so it waits for the log step (`check_finite`)."""
        self.window.append((step, lr, loss, norm))
        if self.device.type == "cpu":
            check_finite(self.window[-1:], self.world)
        self.bar.update()

    def log_training(self, step, lr, samples, unit, epoch, **more):
        """The log's line of a training step: mean loss since the last one, and the rate. `more`: numbers from the rate, by name."""
        mean, norm = check_finite(self.window, self.world)
        rate = len(self.window) * samples / (time.perf_counter() - self.clock)
        found = {name: f(rate) for name, f in more.items()}
        extra = "".join(f"  {name} {value:.2g}" for name, value in found.items())
        left = (time.perf_counter() - self.began) / max(1, step - self.start_step) * (self.steps - step)
        self.log(f"step {step:6d}  epoch {epoch:6.2f}  loss {mean:.4f}  lr {lr:.2e}  grad norm {norm:.2f}  {rate:.0f} {unit}/s{extra}"
                 f"  {clock_time(left)} left",
                 step=step, epoch=epoch, loss=mean, lr=lr, grad_norm=norm, **{f"{unit}_per_s": rate}, **found)

    def restart_clock(self):
        """The next rate starts here, so that evaluations and saves do not count."""
        self.window, self.clock = [], time.perf_counter()

    def save(self, step, best, model, ema, optimizer):
        """Write ckpt.pt. All ranks must call it: each holds a share of the optimizer's state."""
        checkpoint = dict(model=model.state_dict(), ema=ema and ema.state_dict(), optimizer=optimizer.state_dict(), step=step, best=best,
                          rng=torch.get_rng_state(), args=self.facts)
        save_checkpoint(self.ckpt, checkpoint, self.main)

    def say(self, text):
        self.journal.say(text)

    def log(self, human, **record):
        """A line for a person and a line of log.jsonl."""
        self.journal.line(human, **record)

    def logged(self, key):
        """All values of `key` in log.jsonl so far, on rank 0."""
        return [row[key] for row in read_log(self.args.out) if row.get(key) is not None] if self.main else []

    def needs_look(self, step, every):
        """After a resume: is the evaluation of the checkpoint's step still due? A kill may come between saving and evaluating."""
        if not step or not (step % every == 0 or step == self.steps):
            return False
        missing = not any(row["step"] == step and "val_loss" in row for row in read_log(self.args.out)) if self.main else False
        return all_sum([float(missing)], self.world)[0] > 0

    def catch_signals(self):
        """SIGTERM, SIGUSR1 and Ctrl-C are remembered until the step is done; a second Ctrl-C ends at once."""
        def remember(number_, frame):
            if self.signal and number_ == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = number_
        import threading
        if threading.current_thread() is threading.main_thread():
            for number_ in SIGNALS:
                signal.signal(number_, remember)

    def interrupted(self, step):
        """Has a signal come, to any process? With several GPUs the question is asked at log steps only: it costs a synchronisation."""
        if self.size > 1 and (self.device.type == "cpu" or step % self.args.log_every == 0 or step == self.steps):
            self.signal = int(max(all_max(self.signal, self.world)))
        elif self.size > 1:
            return False
        return bool(self.signal)

    def leave(self, step):
        """After a signal, once the step is saved: say so and end with the exit code that shells expect, 128 + signal."""
        self.bar.close()
        self.say(f"saved at step {step}: the same command continues")
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit(128 + self.signal)

    def finish(self, title, metric, label, digits=1, files=()):
        """curve.png and the line that names what the folder holds."""
        self.bar.close()
        if self.main:
            plot_curve(self.args.out, title, metric, label, digits)
        self.say(f"{self.args.out}: {', '.join(['ckpt.pt', 'log.jsonl', 'args.json', 'curve.png', *files])}")


def open_run(args, kind):
    """A `Run` of the train script `kind`: joins the process group and finds the checkpoint; nothing is written yet."""
    return Run(args, kind)


def all_max(value, world):
    """The largest of a number over all ranks, as a list of one."""
    total = torch.tensor([float(value)], device=world.device)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return total.tolist()


def clock_time(seconds):
    """A time left, as a clock shows it: 1:02:03 or 4:05."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"


# ---------------------------------------------------------------------------------------------------------
# log

class Log:
    """Human lines on stdout and JSON lines in out/log.jsonl, from rank 0; optionally Weights & Biases.

    After a resume the lines past `step` are dropped: the steps they describe are run again.
    """

    def __init__(self, out, world, step=0, wandb=None, config=None):
        self.path, self.main, self.wandb = Path(out) / "log.jsonl", world.main, None
        if not self.main:
            return
        kept = [json.dumps(row) for row in read_log(out) if row["step"] <= step] if step else []
        write_text(self.path, "".join(line + "\n" for line in kept))
        if wandb:
            self.wandb = wandb.init(project=config["wandb"], config=config, dir=str(out))

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
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")
        if self.wandb:
            self.wandb.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])


def read_log(out):
    """The rows of out/log.jsonl, dicts with a step; a line cut short by a kill is left out."""
    path, rows = Path(out) / "log.jsonl", []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            rows += [row] if isinstance(row.get("step"), int) else []
        except (ValueError, AttributeError):
            continue
    return rows


def write_text(path, text):
    """Write a text file so that a kill leaves the old one or the new one."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    os.replace(temporary, path)


def finite(value):
    """Nested plain data with null for nan and inf, which JSON has no word for."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def import_optional(name, flag):
    """Import a package, or a module of it, that only one flag needs. Raises BadInput naming both."""
    import importlib
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        wheel = dict(sklearn="scikit-learn").get(package, package.replace("_", "-"))
        raise BadInput(f"{flag} needs the package {package}: pip install {wheel}") from error


def make_out(out, args, world):
    """Create the run's folder and write args.json, on rank 0. Raises BadInput when the folder cannot be written."""
    if not world.main:
        return
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        write_text(Path(out) / "args.json", json.dumps(args, indent=2, sort_keys=True) + "\n")
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
        raise BadInput(f"the validation loss is not finite after step {step} (lr {lr:.3g}): "
                       f"lower --lr, raise --warmup or set --clip")


def cpu_name():
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return name


def git_revision():
    """The commit of the code that runs, with + where files differ from it; 'unknown' outside a git checkout."""
    here = Path(__file__).resolve().parent

    def git(*words):
        return subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, encoding="utf-8")
    try:
        head, dirty = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
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
        begin = time.perf_counter()
        a @ a
        wait()
        best = min(best, time.perf_counter() - begin)
    return 2 * size ** 3 / best


def plot_curve(out, title, metric, label, digits=1):
    """out/log.jsonl -> out/curve.png: training and validation loss on the left, `metric` and its last value on the right."""
    plt = pyplot()
    rows = read_log(out)
    train, val, seen = ([r for r in rows if r.get(key) is not None] for key in ("loss", metric, "val_loss"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    left.plot([r["step"] for r in train], [r["loss"] for r in train], label="train", lw=1)
    left.plot([r["step"] for r in seen], [r["val_loss"] for r in seen], "o-", label="validation", ms=3)
    left.set(xlabel="step", ylabel="loss")
    left.legend(frameon=False)
    right.plot([r["step"] for r in val], [r[metric] for r in val], "o-", ms=3, color="C2")
    if val:
        label = f"{label}: {val[-1][metric]:.{digits}f} at the end"
    right.set(xlabel="step", title=label)
    for axis in (left, right):
        axis.grid(alpha=.3)
    figure.suptitle(title, fontsize=10)
    figure.savefig(Path(out) / "curve.png", dpi=120)
    plt.close(figure)


def run_script(main):
    """Call main() and turn BadInput into one sentence on stderr and exit code 2; every other error keeps its traceback."""
    for stream in (sys.stdout, sys.stderr):                      # a letter that the terminal cannot show must not end a run
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except BadInput as error:
        if int(os.environ.get("RANK", 0)) > 0:
            time.sleep(8)                                        # a fault that all meet is said by rank 0
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
