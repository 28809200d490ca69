"""Speed, beside the peers and beside the arithmetic: repetitions in turn, medians, a table.

    python -m tools.bench optim --set vit-s     ms, memory and floor of a step on a model's matrices
    python -m tools.bench step                  tokens/s of a language model, beside nanoGPT's design
    python -m tools.bench step --model vit      images/s of a ViT, beside timm's
    python -m tools.bench ranks                 the optimizer's work on 1, 2 and 4 processes
    python -m tools.bench gpu                   CUDA, 8 minutes: the tests that need it, three tables

--quick takes seconds and shows that all works. Progress is printed as it comes. A bench stopped by
Ctrl-C prints the table of what it has, and --out holds the last whole repetition.

An optimizer refreshes every --cycle steps here; its time is reckoned for a refresh every --frequency
steps. The floor is its arithmetic at the rate of a large matrix product, measured in between. MFU:
the model's flops at the same rate. pytorch_optimizer, heavyball and timm take part if installed.
"""
import contextlib
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import optim
import runtime
from model import LM, SIZES, ViT

ROOT = Path(__file__).resolve().parent.parent


class GPT(nn.Module):
    """nanoGPT's architecture, written from its description. bias: as GPT-2 has them, nanoGPT not.

    Learned positions, LayerNorm of eps 1e-5, one matrix for q, k, v, exact GELU, a tied head."""

    class Block(nn.Module):
        def __init__(self, dim, heads, bias):
            super().__init__()
            self.heads = heads
            self.ln_1, self.ln_2 = nn.LayerNorm(dim, bias=bias), nn.LayerNorm(dim, bias=bias)
            self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim, bias), nn.Linear(dim, dim, bias)
            self.c_fc, self.mlp_proj = nn.Linear(dim, 4 * dim, bias), nn.Linear(4 * dim, dim, bias)

        def forward(self, x):
            qkv = self.c_attn(self.ln_1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(*qkv, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).flatten(2))
            return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))

    def __init__(self, vocab_size, block_size, embed_dim, depth, num_heads, bias=False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, embed_dim), nn.Embedding(block_size, embed_dim)
        self.h = nn.Sequential(*[self.Block(embed_dim, num_heads, bias) for _ in range(depth)])
        self.ln_f = nn.LayerNorm(embed_dim, bias=bias)
        self.lm_head = nn.Linear(embed_dim, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        return self.lm_head(self.ln_f(self.h(x)))


IMAGENET = dict(img_size=224, patch_size=16, in_chans=3, num_classes=1000)
DIGITS = dict(img_size=28, patch_size=7, in_chans=1, num_classes=10)
SIZES_OF = {                            # by --model and --size: (sequences or images a batch, sizes)
    "lm": {"laptop": (8, dict(vocab_size=257, block_size=128, embed_dim=128, depth=12, num_heads=4)),
           "paper": (8, dict(vocab_size=32000, block_size=512, embed_dim=768, depth=24, num_heads=12))},
    "vit": {"laptop": (100, DIGITS | SIZES["nano"]), "vit-s": (8, IMAGENET | SIZES["small"]),
            "vit-b": (8, IMAGENET | SIZES["base"])},
}
# width and blocks of the sets of matrices
SETS = {"nano": (96, 12), "vit-s": (384, 12), "vit-b": (768, 12), "lm-194m": (768, 24)}
REFRESHING = "soap", "kl-shampoo"       # kinds that refresh a basis now and then
KINDS = {                               # what each has to compute, for the floor
    "torch.optim.AdamW": None, "torch.optim.Muon": "muon", "pytorch_optimizer.Muon": "muon",
    "pytorch_optimizer.SOAP": "soap", "heavyball.SOAP": "soap", "heavyball.KLShampoo": "kl-shampoo",
    "optim.SOAP": "soap", "optim.KLShampoo": "kl-shampoo", "optim.Muon": "muon",
}


# --------------------------------------------------------------------------------------------------
# Measuring

def interleaved(steps, rounds, wait=lambda: None, clock=time.perf_counter, warmup=2, before=None,
                whole=1, report=None):
    """{name: [seconds, ...]} of the functions `steps`, in turn: a noisy machine disturbs all alike.

    The first `warmup` rounds do not count. before(name): called ahead of each step, outside of its time.
    report(seconds so far): called after every `whole` rounds."""
    seconds = {name: [] for name in steps}
    for k in range(warmup + rounds):
        for name, step in steps.items():
            if before:
                before(name)
            wait()
            start = clock()
            step()
            wait()
            seconds[name].append(clock() - start)
        took = ", ".join(f"{name} {1e3 * values[-1]:.3g}" for name, values in seconds.items())
        print_progress(f"round {k + 1} of {warmup + rounds}, ms: {took}")
        measured = {name: values[warmup:] for name, values in seconds.items()}
        if report and k >= warmup and (k + 1 - warmup) % whole == 0:
            report(measured)
    return measured


def print_progress(text):
    """A line of progress, on stderr: stdout has the tables."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def device_waiter(world):
    """A function that returns once the device has done its work."""
    return torch.cuda.synchronize if world.device.type == "cuda" else lambda: None


def amortise(seconds, cycle, frequency):
    """(a step on average, a plain one, one that refreshes), for a refresh in `frequency` steps.

    seconds: of steps with a refresh in `cycle` of them. Which one refreshes shows in its time.
    cycle 1: there is no refresh, all steps are alike."""
    if cycle == 1:
        return statistics.median(seconds), statistics.median(seconds), None
    at = [seconds[k::cycle] for k in range(cycle)]
    slow = max(at, key=statistics.median)
    plain = statistics.median(t for times in at if times is not slow for t in times)
    refresh = statistics.median(slow)
    return ((frequency - 1) * plain + refresh) / frequency, plain, refresh


def milliseconds(seconds, kind, args):
    """The columns of `amortise` for an optimizer of that kind."""
    times = amortise(seconds, args.cycle if kind in REFRESHING else 1, args.frequency)
    columns = "ms", "plain step, ms", "refresh, ms"
    return {column: t and 1e3 * t for column, t in zip(columns, times)}


def refreshing(kind, cycle):
    """The option of an optimizer of that kind that makes it refresh every `cycle` steps."""
    return dict(precondition_frequency=cycle) if kind in REFRESHING else {}


def matmul(n, device, dtype):
    """A function that multiplies two n x n matrices, 2 n^3 flops: the machine at its best."""
    a, b, out = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def state_bytes(optimizer):
    """Bytes of all tensors in an optimizer's state, however nested; each storage once."""
    storages = {}

    def visit(value):
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            visit(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for part in value:
                visit(part)

    for part in getattr(optimizer, "parts", [optimizer]):
        visit(dict(part.state))
    return sum(storages.values())


def peak_bytes(steps, device):
    """The most memory that tensors take during the last of `steps`, beyond what they take before it."""
    *first, last = steps
    if device.type == "cuda":
        for step in first:
            step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        last()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")         # else the profiler says that it starts
    # all steps: the profiler counts what is freed only where it saw it made
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        for step in first:
            step()
        with torch.profiler.record_function("last step"):
            last()
    events = profile.profiler.kineto_results.events()
    start = next(e.start_ns() for e in events if e.name() == "last step")
    memory = [e for e in events if e.name() == "[memory]" and e.start_ns() >= start]
    changes = sorted((e.start_ns(), e.nbytes()) for e in memory)
    return max([0, *itertools.accumulate(change for _, change in changes)])


# --------------------------------------------------------------------------------------------------
# Whole training steps

def model_flops(sizes, batch):
    """Flops of a training step of a ViT or LM: products only, whole attention, backward twice."""
    d = sizes["embed_dim"]
    if "block_size" in sizes:
        n = sizes["block_size"]
        ends = 2 * n * d * sizes["vocab_size"]
    else:
        patches = (sizes["img_size"] // sizes["patch_size"]) ** 2
        pixels = sizes["in_chans"] * sizes["patch_size"] ** 2
        n, ends = patches + 1, 2 * d * (patches * pixels + sizes["num_classes"])
    return 3 * batch * (sizes["depth"] * (24 * n * d ** 2 + 4 * n ** 2 * d) + ends)


def training_step(model, optimizer, x, y, device, dtype):
    """A function that makes one step: forward, backward, clip, update; the same for every model."""
    def step():
        with runtime.autocast(device, dtype):
            logits = model(x)
        F.cross_entropy(logits.float().flatten(0, -2), y.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def timm_vit(**sizes):
    module = runtime.import_optional("timm.models.vision_transformer", "bench step --model vit")
    return module.VisionTransformer(**sizes)


PEERS = {"lm": ("nanoGPT", GPT, LM, "tokens/s"), "vit": ("timm", timm_vit, ViT, "images/s")}
OURS = {f"ours, {shortcut}, {opt}": (shortcut, opt)
        for shortcut in ("residual", "skipless") for opt in ("adamw", "soap")}


def bench_step(args, world, report):
    """Tokens or images per second of a training step: ours and the peer's."""
    dtype, _ = runtime.pick_dtype(args.dtype, world.device)
    usual, sizes = SIZES_OF[args.model][args.size]
    batch, notes, (peer, theirs, ours, unit) = args.batch_size or usual, [], PEERS[args.model]
    if args.model == "lm":
        shape = batch, sizes["block_size"] + 1
        tokens = torch.randint(sizes["vocab_size"], shape, device=world.device)
        x, y, count = tokens[:, :-1], tokens[:, 1:], batch * sizes["block_size"]
    else:
        x, y, count = *random_images(batch, sizes, world.device), batch
    steps = {"matmul": matmul(args.matmul, world.device, dtype)}
    for name in args.only or [peer, *OURS]:
        shortcut, opt = OURS.get(name, (None, None))
        try:
            model = ours(**sizes, shortcut=shortcut) if shortcut else theirs(**sizes)
        except runtime.BadInput as missing:
            notes.append(str(missing))
            continue
        model = model.to(world.device)
        if shortcut:
            optimizer = optim.build_optimizer(model, opt, 1e-4, 0.01, **refreshing(opt, args.cycle))
        else:                                               # nanoGPT's is fused on CUDA only
            fused = world.device.type == "cuda" or peer == "timm"
            options = dict(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=fused)
            optimizer = torch.optim.AdamW(model.parameters(), **options)
        model = torch.compile(model) if args.compile else model
        steps[name] = training_step(model, optimizer, x, y, world.device, dtype)
    flops = model_flops(sizes, batch)

    def table(seconds):
        rate = 2 * args.matmul ** 3 / statistics.median(seconds["matmul"])
        mean = {name: amortise(times, args.cycle if "soap" in name else 1, args.frequency)[0]
                for name, times in seconds.items() if name != "matmul"}
        rows = {}
        for name, s in mean.items():
            own = mean.get(name.replace("soap", "adamw"))
            rows[name] = {unit: count / s, "ms": 1e3 * s,
                          f"speed, x {peer}": mean[peer] / s if peer in mean else None,
                          "time, x its adamw": own and s / own, "MFU, %": 100 * flops / s / rate}
        note = (f"batch {batch}, {str(dtype)[6:]}, matmul {rate / 1e9:.4g} Gflop/s, a step is "
                f"{flops / 1e9:.4g} Gflop; a refresh every {args.frequency} steps")
        report(rows, [*notes, note])
        return rows, [*notes, note]

    # warm-up: SOAP's seed, and one refresh
    rounds = -(-args.repeats // args.cycle) * args.cycle
    return table(interleaved(steps, rounds, device_waiter(world), warmup=1 + args.cycle,
                             whole=args.cycle, report=table))


def random_images(batch, sizes, device):
    """(images, labels) of noise."""
    x = torch.randn(batch, sizes["in_chans"], sizes["img_size"], sizes["img_size"], device=device)
    return x, torch.randint(sizes["num_classes"], (batch,), device=device)


# --------------------------------------------------------------------------------------------------
# Optimizers

def block_matrices(dim, depth):
    """The shapes (out, in) of the matrices of `depth` transformer blocks, as model.py has them."""
    return depth * [(3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim)]


def least_flops(shapes, kind, frequency):
    """Flops of one step on average: all updates, and a refresh every `frequency` steps."""
    counter = optim.OPTIMIZERS[kind]([nn.Parameter(torch.zeros(1, 1))])
    flops = [counter.flops(shape, counter.param_groups[0]) for shape in shapes]
    return sum(update + refresh / frequency for update, refresh, _ in flops)


@contextlib.contextmanager
def quick_seeds():
    """In here eigh returns the identity: that of the first step takes minutes, which nobody measures."""
    def eigh(s, *_):
        identity = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
        return s.diagonal(dim1=-2, dim2=-1), identity.expand_as(s)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch("torch.linalg.eigh", eigh))
        patches.enter_context(mock.patch("optim.SLOW_FIRST_STEP", float("inf")))
        if "heavyball" in sys.modules:                      # it has taken torch's at its import
            patches.enter_context(mock.patch("heavyball.utils.no_compile_eigh", eigh))
        yield


def contestant(name, params, cycle, compiled=False):
    """The optimizer of that name at its fastest equal setting, with a refresh every `cycle` steps.

    heavyball compiles its kernels, which takes a minute and a C++ compiler: here with `compiled` only.
    It merges no sides and has no limit for a side here, so that it preconditions what the others do.
    Raises BadInput where a package is missing."""
    package, _, kind = name.rpartition(".")
    known = {"torch.optim": torch.optim, "optim": optim}
    module = known.get(package) or runtime.import_optional(package, f"bench optim --only {name}")
    options = refreshing(KINDS[name], cycle)
    if package == "heavyball":
        module.utils.compile_mode = "default" if compiled else None
        options.update(max_precond_dim=10 ** 6, merge_dims=False)
    elif name == "torch.optim.AdamW":
        options.update(fused=True)
    elif name == "pytorch_optimizer.Muon":
        params = [dict(params=params, use_muon=True)]
    return getattr(module, kind)(params, lr=1e-4, **options)


def bench_optim(args, world, report):
    """ms per optimizer step on a model's block matrices, with random gradients; state, temporaries."""
    dim, depth = SETS[args.set]
    shapes, device = block_matrices(dim, args.depth or depth), world.device
    sizes = [m * n for m, n in shapes]
    pool = 0.01 * torch.randn(sum(sizes) + 2 * 997, device=device)
    offsets, buffer = itertools.cycle((0, 997, 2 * 997)), torch.empty(sum(sizes), device=device)
    params, optimizers, temporary, notes = {}, {}, {}, []

    def feed(name):
        """New gradients: some optimizers write into them, or drop them."""
        offset = next(offsets)
        buffer.copy_(pool[offset:offset + len(buffer)])
        for p, g in zip(params.get(name, ()), buffer.split(sizes)):
            p.grad = g.view_as(p)

    def warm_up(name):
        feed(name)
        optimizers[name].step()

    for name in args.only or KINDS:
        params[name] = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
        try:
            optimizers[name] = contestant(name, params[name], args.cycle, args.compile)
        except runtime.BadInput as missing:
            notes.append(str(missing))
            continue
        begin = time.perf_counter()
        with quick_seeds():                                 # the seed, and a cycle that refreshes last
            temporary[name] = peak_bytes((args.cycle + 1) * [lambda: warm_up(name)], device)
        print_progress(f"{name} is ready after {time.perf_counter() - begin:.1f} s")
    dtypes = torch.float32, torch.bfloat16
    steps = {dtype: matmul(args.matmul, device, dtype) for dtype in dtypes}
    steps |= {name: optimizer.step for name, optimizer in optimizers.items()}
    largest = 4 * max(shapes.count((m, n)) * m * n for m, n in shapes)

    def table(seconds):
        rate = {dtype: 2 * args.matmul ** 3 / statistics.median(seconds[dtype]) for dtype in dtypes}
        rows = {}
        for name, optimizer in optimizers.items():
            kind, times = KINDS[name], milliseconds(seconds[name], KINDS[name], args)
            used = optim.fast_dtype(device) if kind == "muon" else torch.float32
            least = kind and 1e3 * least_flops(shapes, kind, args.frequency) / rate[used]
            rows[name] = times | {
                "floor, ms": least, "x floor": least and times["ms"] / least,
                "state, MB": state_bytes(optimizer) / 1e6, "temporary, MB": temporary[name] / 1e6,
                "temporary / largest group": temporary[name] / largest}
        rates = ", ".join(f"{str(dtype)[6:]} {rate[dtype] / 1e9:.4g} Gflop/s" for dtype in dtypes)
        note = f"a refresh every {args.frequency} steps; matmul {rates}"
        if "heavyball" in sys.modules:
            note += f"; heavyball {'compiled' if args.compile else 'eager'}"
        report(rows, [*notes, note])
        return rows, [*notes, note]

    rounds = args.cycle * args.repeats
    return table(interleaved(steps, rounds, device_waiter(world), warmup=0, before=feed,
                             whole=args.cycle, report=table))


# --------------------------------------------------------------------------------------------------
# Ranks

class Blocks(nn.Module):
    """Matrices that `optim.build_optimizer` takes for those of a model's blocks."""

    def __init__(self, shapes):
        super().__init__()
        self.blocks = nn.ParameterList(nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes)


def run_rank(me, size, folder, shapes, name, cycle, pipe):
    """One process of `size`: a step for each "step" from the pipe; then its state and weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{size}", rank=me, world_size=size)
    torch.manual_seed(0)
    model = Blocks(shapes)
    gradients = [[0.01 * torch.randn(shape) for shape in shapes] for _ in range(2)]
    optimizer = optim.build_optimizer(model, name, 1e-3, 0.01, **refreshing(name, cycle))
    for k in itertools.count():
        for p, g in zip(model.blocks, gradients[k % 2]):
            p.grad = g
        if pipe.recv() != "step":
            break
        with quick_seeds() if k == 0 else contextlib.nullcontext():
            optimizer.step()
        pipe.send("done")
    weights = [p.detach().numpy() for p in model.blocks] if me == 0 else None
    pipe.send((state_bytes(optimizer), weights))
    dist.destroy_process_group()


def bench_ranks(args, world, report):
    """ms per optimizer step and state per rank, where processes of one thread share the matrices."""
    dim, depth = SETS[args.set]
    shapes, rows = block_matrices(dim, args.depth or depth), {}
    name = KINDS[args.only[0]] if args.only else "soap"
    context = torch.multiprocessing.get_context("spawn")
    count = 1 + args.cycle * (1 + args.repeats)
    notes = [f"{name}, {args.set}, {count} steps, one thread a rank, {os.cpu_count()} cores"]
    with tempfile.TemporaryDirectory() as folder:
        groups = {}
        for size in args.ranks:
            for me in range(size):
                ours, its = context.Pipe()
                arguments = me, size, folder, shapes, name, args.cycle, its
                process = context.Process(target=run_rank, args=arguments, daemon=True)
                process.start()
                its.close()                                 # then the end of the process ends the pipe
                groups.setdefault(size, []).append((process, ours))

        def tell(size, word):
            for _, pipe in groups[size]:
                pipe.send(word)
            return [pipe.recv() for _, pipe in groups[size]]

        def table(seconds):
            for size, times in seconds.items():
                rows[f"{size} rank{'s' * (size > 1)}"] = row = milliseconds(times, name, args)
                row["time, x first"] = row["ms"] / next(iter(rows.values()))["ms"]
            report(rows, notes)

        steps = {size: lambda size=size: tell(size, "step") for size in groups}
        interleaved(steps, args.cycle * args.repeats, warmup=1 + args.cycle, whole=args.cycle,
                    report=table)
        for row, size in zip(rows.values(), groups):
            states, weights = zip(*tell(size, "end"))
            row["state per rank, MB"] = max(states) / 1e6
            if row is next(iter(rows.values())):
                first, final = row, weights[0]
            row["state, x first"] = row["state per rank, MB"] / first["state per rank, MB"]
            differences = [float(np.abs(a - b).max()) for a, b in zip(weights[0], final)]
            row["largest difference"] = max(differences)
            for process, _ in groups[size]:
                process.join()
    report(rows, notes)
    return rows, notes


# --------------------------------------------------------------------------------------------------
# A GPU

FAST = "--dtype bfloat16 --compile --matmul 8192 --repeats 12 --only 'ours, residual, adamw'"
GPU_TABLES = {                          # flags as on the command line; what must be known comes first
    "ViT-B step": f"step --model vit --size vit-b --batch-size 128 {FAST} timm",
    "LM step": f"step --model lm --size paper --batch-size 32 {FAST} nanoGPT",
    "optimizers": "optim --set lm-194m --cycle 2 --repeats 3 --matmul 8192 --only torch.optim.AdamW "
                  "torch.optim.Muon optim.Muon optim.SOAP pytorch_optimizer.SOAP optim.KLShampoo",
}


def bench_gpu(args, world, report, tables=GPU_TABLES, tests="tests/test_cuda.py", limit=330):
    """The tests that need CUDA, then the tables; none begins after `limit` seconds: 8 minutes in all."""
    if world.device.type != "cuda" and tables is GPU_TABLES:
        raise runtime.BadInput(f"bench gpu needs a CUDA machine, and --device {args.device} gives "
                               f"{world.device} here: run it where torch sees a GPU")
    start, done, notes = time.perf_counter(), {}, []
    command = [sys.executable, "-m", "pytest", "-q", tests]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace")
    said = ran.stdout.strip().splitlines() or [ran.stderr.strip()[-200:]]
    notes.append(f"{tests}: {said[-1]}")
    print_progress(notes[-1])
    for name, command in tables.items():
        if time.perf_counter() - start > limit:
            notes.append(f"{name}: left out, {limit} s were over")
            continue
        rest = ["--device", str(world.device), "--threads", str(args.threads)]
        its = get_args([*shlex.split(command), *rest])
        torch.manual_seed(0)

        def partial(rows, more):
            report(done | {name: rows}, notes + more)
        done[name], more = BENCHES[its.bench](its, world, partial)
        notes += [f"{name}: {note}" for note in more]
        report(done, notes)
    return done, notes


# --------------------------------------------------------------------------------------------------
# The command

BENCHES = {"optim": bench_optim, "step": bench_step, "ranks": bench_ranks, "gpu": bench_gpu}
QUICK = dict(set="nano", depth=1, repeats=1, cycle=2, matmul=256, ranks=[1, 2])
USUAL = dict(set="vit-s", repeats=20, cycle=4, matmul=2048, ranks=[1, 2, 4])


def get_args(argv=None):
    number = runtime.number
    parser = runtime.Parser(description=__doc__)
    add = parser.add_argument
    add("bench", choices=list(BENCHES), help="what to measure")
    add("--quick", action="store_true", help="one small repetition: seconds")
    add("--model", choices=list(SIZES_OF), default="lm", help="step: a language model or a ViT")
    add("--size", default="laptop", help="step: laptop or paper; laptop, vit-s or vit-b for the ViT")
    add("--set", choices=list(SETS), help="optim, ranks: whose block matrices; else vit-s")
    add("--depth", type=number(int, low=1), help="optim, ranks: number of blocks; else the set's own")
    add("--only", nargs="+", metavar="ROW",
        help=f"optim: these of {', '.join(KINDS)}; ranks: one of ours; step: of its rows")
    add("--ranks", type=number(int, low=1), nargs="+", help="ranks: numbers of processes; else 1 2 4")
    add("--frequency", type=number(int, low=1), default=10, help="steps between refreshes, as reported")
    add("--cycle", type=number(int, low=2),
        help="steps between refreshes, as measured: a power of two, as heavyball needs it; else 4")
    add("--batch-size", type=number(int, low=1), help="step: sequences or images; else the size's own")
    add("--repeats", type=number(int, low=1), help="else 20; optim, ranks: of a cycle, else 2")
    add("--matmul", type=number(int, low=1), help="side of the matrices of the large product; else 2048")
    add("--threads", type=number(int, low=1), default=2, help="CPU threads")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="step: of the forward")
    add("--compile", action="store_true", help="step: torch.compile the models; optim: heavyball too")
    add("--out", help="also write the figures to this JSON file; else results/gpu.json for gpu")
    args = parser.parse_args(argv)
    if args.bench in ("optim", "ranks") and not args.repeats:
        args.repeats = 1 if args.quick else 2
    for key, value in (QUICK if args.quick else USUAL).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if args.size not in SIZES_OF[args.model]:
        raise runtime.BadInput(f"--size {args.size} is not one of --model {args.model}: "
                               f"choose {' or '.join(SIZES_OF[args.model])}")
    known = {"optim": list(KINDS), "ranks": [name for name in KINDS if name.startswith("optim.")],
             "step": [PEERS[args.model][0], *OURS]}.get(args.bench, [])
    for name in args.only or ():
        if name not in known:
            choose = f"choose from {'; '.join(known)}" if known else "leave it out"
            raise runtime.BadInput(f"--only '{name}' is no row of {args.bench}: {choose}")
    if args.bench == "gpu":
        args.out = args.out or str(ROOT / "results" / "gpu.json")
    folder = Path(args.out or ".").resolve().parent
    if args.out and (Path(args.out).is_dir() or not os.access(folder, os.W_OK)):
        raise runtime.BadInput(f"--out {args.out} cannot be written: choose a file in another folder")
    return args


def describe_machine(world):
    """What the figures were measured on."""
    on_gpu = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if on_gpu else platform.processor()
    return dict(device=name or platform.machine(), cores=os.cpu_count(), threads=torch.get_num_threads(),
                torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version(),
                system=platform.system())


def table_text(title, rows):
    """Rows {name: {column: number or None}} as a Markdown table."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [f"\n{title}\n", "| | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for name, row in rows.items():
        cells = ["-" if row.get(column) is None else f"{row[column]:.4g}" for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv=None):
    args = get_args(argv)
    world = runtime.start(args.device, args.threads)
    torch.manual_seed(0)
    found = {"rows": {}, "notes": []}

    def report(rows, notes):
        """Keep what there is: in `found`, and in the file."""
        found.update(rows=rows, notes=notes)
        if args.out:
            record = dict(args=vars(args), hardware=describe_machine(world), notes=notes, rows=rows)
            runtime.write_text(args.out, json.dumps(record, indent=1) + "\n")

    stopped = False
    try:
        report(*BENCHES[args.bench](args, world, report))
    except KeyboardInterrupt:
        stopped = True
    on = f"{describe_machine(world)['device']}, {world.device}, {torch.get_num_threads()} threads"
    of = f"{args.repeats} repetitions{', stopped before that' * stopped}"
    print(f"{args.bench}: {on}, torch {torch.__version__}; medians of {of}")
    tables = found["rows"] if args.bench == "gpu" else {args.bench: found["rows"]}
    for title, table in tables.items():
        print(table_text(title, table))
    print("", *found["notes"], sep="\n")
    if stopped:
        sys.exit(130)


if __name__ == "__main__":
    runtime.run_script(main)
