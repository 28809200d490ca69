"""Speed beside the peers and beside the arithmetic: interleaved repetitions, medians, one table, one JSON (--out).

    python bench.py optim --set vit-s        ms per optimizer step, amortised over a refresh period, on the matrices of a model; state, temporaries, floor
    python bench.py optim --fit              is the step time of SOAP that of its arithmetic? three widths, one rate
    python bench.py step                     tokens/s of a language model's training step, beside nanoGPT's architecture at the same sizes
    python bench.py step --model vit         images/s of a ViT's, beside timm's
    python bench.py ranks                    the optimizer's work shared out over 1, 2 and 4 processes of one thread
    python bench.py data                     images/s of the input pipeline alone, beside the laptop ViT's training step
    python bench.py tokenize                 MB/s of prepare.py on one core, beside tiktoken alone
    python bench.py tokencut --threads 1     ms per image of 784 patches (ViT-S/8 at 224 px) of TokenCut, beside scipy's generalised eigendecomposition
    python bench.py gpu                      on a CUDA machine, in under 8 minutes: the tests that need one, and the tables -> results/gpu.json

An optimizer is measured with a refresh every --cycle steps and reckoned for one every --frequency: (frequency - 1) plain steps and one that refreshes.
The floor is the arithmetic that has to be done, over the rate of a large matrix product, measured in between. MFU: the model's flops over the same rate in the
type of the forward pass. pytorch_optimizer, heavyball and timm are compared with where they are installed.
"""
import contextlib
import io
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

import data
import discovery
import optim
import prepare
import runtime
import text
from model import LM, SIZES, ViT


class GPT(nn.Module):
    """nanoGPT's architecture, written from its description: learned positions, LayerNorm eps 1e-5, one fused q k v, SDPA, exact GELU, tied head, no dropout.

    bias: nanoGPT trains without (bias=False) by default, GPT-2 has them."""

    class Block(nn.Module):
        def __init__(self, dim, heads, bias):
            super().__init__()
            self.heads = heads
            self.ln_1, self.ln_2 = nn.LayerNorm(dim, bias=bias), nn.LayerNorm(dim, bias=bias)
            self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim, bias=bias)
            self.c_fc, self.mlp_proj = nn.Linear(dim, 4 * dim, bias=bias), nn.Linear(4 * dim, dim, bias=bias)

        def forward(self, x):
            B, N, D = x.shape
            q, k, v = (t.view(B, N, self.heads, D // self.heads).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(D, dim=2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).reshape(B, N, D))
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
        return self.lm_head(self.ln_f(self.h(self.wte(tokens) + self.wpe.weight[:tokens.shape[1]])))


SIZES_OF = {                                                     # by --model and --size: (sequences or images in a batch, the model's sizes)
    "lm": {"laptop": (8, dict(vocab_size=257, block_size=128, embed_dim=128, depth=12, num_heads=4)),       # as train_lm.py's presets
           "paper": (8, dict(vocab_size=32000, block_size=512, embed_dim=768, depth=24, num_heads=12))},
    "vit": {"laptop": (100, dict(img_size=28, patch_size=7, in_chans=1, num_classes=10, **SIZES["nano"])),  # as train_vit.py's
            "vit-s": (8, dict(img_size=224, patch_size=16, in_chans=3, num_classes=1000, **SIZES["small"])),
            "vit-b": (8, dict(img_size=224, patch_size=16, in_chans=3, num_classes=1000, **SIZES["base"]))},
}
SETS = {"nano": (96, 12), "vit-s": (384, 12), "vit-b": (768, 12), "lm-194m": (768, 24)}      # width, blocks
REFRESHING = "soap", "kl-shampoo"                               # kinds that turn a basis now and then
KINDS = {                                                        # what each has to compute, for the floor
    "torch.optim.AdamW": None, "torch.optim.Muon": "muon", "pytorch_optimizer.Muon": "muon", "pytorch_optimizer.SOAP": "soap", "heavyball.SOAP": "soap",
    "heavyball.KLShampoo": "kl-shampoo", "optim.SOAP": "soap", "optim.KLShampoo": "kl-shampoo", "optim.Muon": "muon",
}
EMBEDDED = [name for name in data.NAMES if not name.startswith("cifar")]


# ---------------------------------------------------------------------------------------------------------- Measuring
def interleaved(steps, repeats, wait=lambda: None, clock=time.perf_counter, warmup=2, before=lambda name: None):
    """{name: [seconds, ...]} of the functions `steps`, called in turn so that a noisy machine disturbs all alike; the first `warmup` rounds do not count.
    before(name) is called ahead of each step, outside of its time."""
    seconds = {name: [] for name in steps}
    for _ in range(repeats + warmup):
        for name, step in steps.items():
            before(name)
            wait()
            start = clock()
            step()
            wait()
            seconds[name].append(clock() - start)
    return {name: values[warmup:] for name, values in seconds.items()}


def waiter(world):
    """A function that returns once the device has done its work."""
    return torch.cuda.synchronize if world.device.type == "cuda" else lambda: None


def amortise(seconds, cycle, frequency):
    """(a step on average, a plain one, one that refreshes) in seconds, for a refresh every `frequency` steps, of steps measured with one every `cycle`.

    Which of a cycle's steps refreshes shows in its time; medians over the repetitions. cycle 1: there is no refresh, all steps are alike."""
    if cycle == 1:
        return statistics.median(seconds), statistics.median(seconds), None
    at = [seconds[k::cycle] for k in range(cycle)]
    slow = max(at, key=statistics.median)
    plain, refresh = statistics.median(t for times in at if times is not slow for t in times), statistics.median(slow)
    return ((frequency - 1) * plain + refresh) / frequency, plain, refresh


def milliseconds(seconds, kind, args):
    """The columns of `amortise` for an optimizer of that kind."""
    times = amortise(seconds, args.cycle if kind in REFRESHING else 1, args.frequency)
    return {column: t and 1e3 * t for column, t in zip(("ms", "plain step, ms", "refresh, ms"), times)}


def refreshing(kind, cycle):
    """The option of an optimizer of that kind that makes it refresh every `cycle` steps."""
    return dict(precondition_frequency=cycle) if kind in REFRESHING else {}


def matmul(n, device, dtype):
    """A function that multiplies two n x n matrices, 2 n^3 flops: what the machine gives at best, measured among what is compared with it."""
    a, b, out = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def state_bytes(optimizer):
    """Bytes of all tensors in an optimizer's state, however nested; each storage once."""
    seen = {}

    def visit(value):
        if isinstance(value, torch.Tensor):
            seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            visit(part)

    for part in getattr(optimizer, "parts", [optimizer]):
        visit(dict(part.state))
    return sum(seen.values())


def peak_bytes(steps, device):
    """The most memory that tensors take during the last of `steps`, beyond what they take before it; on cpu and cuda."""
    *first, last = steps
    if device.type == "cuda":
        for step in first:
            step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        last()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")              # the profiler says when it starts and stops otherwise
    # all of them, as the profiler counts what is freed only where it saw it made
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for step in first:
            step()
        with torch.profiler.record_function("last step"):
            last()
    events = profile.profiler.kineto_results.events()
    start = next(e.start_ns() for e in events if e.name() == "last step")
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and e.start_ns() >= start)
    return max([0, *itertools.accumulate(change for _, change in changes)])


# ----------------------------------------------------------------------------------------------- Whole training steps
def model_flops(sizes, batch):
    """Flops of a training step of a ViT or LM of these sizes: products only, the whole attention matrix, and the backward pass twice the forward one."""
    d = sizes["embed_dim"]
    if "block_size" in sizes:
        n = sizes["block_size"]
        ends = 2 * n * d * sizes["vocab_size"]
    else:
        patches = (sizes["img_size"] // sizes["patch_size"]) ** 2
        n, ends = patches + 1, 2 * d * (patches * sizes["in_chans"] * sizes["patch_size"] ** 2 + sizes["num_classes"])
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
    return runtime.import_optional("timm.models.vision_transformer", "bench.py step --model vit").VisionTransformer(**sizes)


PEERS = {"lm": ("nanoGPT", GPT, LM, "tokens/s"), "vit": ("timm", timm_vit, ViT, "images/s")}
OURS = {f"ours, {shortcut}, {opt}": (shortcut, opt) for shortcut in ("residual", "skipless") for opt in ("adamw", "soap")}


def bench_step(args, world):
    """Tokens or images per second of a training step: ours with and without residuals, with AdamW and SOAP, beside nanoGPT's architecture or timm's ViT."""
    dtype, _ = runtime.pick_dtype(args.dtype, world.device)
    usual, sizes = SIZES_OF[args.model][args.size]
    batch, notes, (peer, theirs, ours, unit) = args.batch_size or usual, [], PEERS[args.model]
    if args.model == "lm":
        tokens = torch.randint(sizes["vocab_size"], (batch, sizes["block_size"] + 1), device=world.device)
        x, y, count = tokens[:, :-1], tokens[:, 1:], batch * sizes["block_size"]
    else:
        x, y, count = *random_images(batch, sizes, world.device), batch
    steps = {"matmul": matmul(args.matmul, world.device, dtype)}
    for name in args.only or [peer, *OURS]:
        shortcut, opt = OURS.get(name, (None, "adamw"))
        try:
            model = (ours(**sizes, shortcut=shortcut) if shortcut else theirs(**sizes)).to(world.device)
        except runtime.BadInput as missing:
            notes.append(str(missing))
            continue
        if shortcut:
            optimizer = optim.build_optimizer(model, opt, 1e-4, 0.01, **refreshing(opt, args.cycle))
        else:                                                    # nanoGPT's is fused on CUDA only
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=world.device.type == "cuda" or peer == "timm")
        steps[name] = training_step(torch.compile(model) if args.compile else model, optimizer, x, y, world.device, dtype)
    seconds = interleaved(steps, -(-args.repeats // args.cycle) * args.cycle, waiter(world), warmup=1 + args.cycle)      # warm-up: SOAP's seed, and one refresh
    rate, flops = 2 * args.matmul ** 3 / statistics.median(seconds.pop("matmul")), model_flops(sizes, batch)
    mean = {name: amortise(times, args.cycle if "soap" in name else 1, args.frequency)[0] for name, times in seconds.items()}
    notes.append(f"batch {batch}, {str(dtype)[6:]}, matmul {rate / 1e9:.4g} Gflop/s, a step is {flops / 1e9:.4g} Gflop; a refresh every {args.frequency} steps")
    return {name: {unit: count / s, "ms": 1e3 * s, f"speed, x {peer}": mean[peer] / s if peer in mean else None,
                   "time, x its adamw": s / mean[own] if (own := name.replace("soap", "adamw")) in mean else None, "MFU, %": 100 * flops / s / rate}
            for name, s in mean.items()}, notes


def random_images(batch, sizes, device):
    return torch.randn(batch, sizes["in_chans"], sizes["img_size"], sizes["img_size"], device=device), torch.randint(sizes["num_classes"], (batch,), device=device)


# --------------------------------------------------------------------------------------------------------- Optimizers
def block_matrices(dim, depth):
    """The shapes (out, in) of the matrices of `depth` transformer blocks, as model.py has them."""
    return depth * [(3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim)]


def floor(shapes, kind, frequency):
    """Flops of one step on average: all updates, and a refresh every `frequency` steps."""
    counter = optim.MATRIX_OPTIMIZERS[kind]([nn.Parameter(torch.zeros(1, 1))])
    return sum(update + refresh / frequency for update, refresh in (counter.flops(shape, counter.param_groups[0]) for shape in shapes))


@contextlib.contextmanager
def quick_seeds():
    """The first step's eigendecompositions take minutes and are not measured: in here they all return the identity, an orthogonal matrix as good as another."""
    def eigh(s, *_):
        return s.diagonal(dim1=-2, dim2=-1), torch.eye(s.shape[-1], dtype=s.dtype, device=s.device).expand_as(s)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch("torch.linalg.eigh", eigh))
        if "heavyball" in sys.modules:                           # it has taken torch's at its import
            patches.enter_context(mock.patch("heavyball.utils.no_compile_eigh", eigh))
        yield


def contestant(name, params, cycle, compiled=False):
    """The optimizer of that name at its fastest equal setting, with a refresh every `cycle` steps. Raises BadInput where its package is missing.

    heavyball compiles its kernels, which takes a minute and a C++ compiler: here with `compiled` only. Its merging of sides and its limit of 2048 for a side
    are off, so that it preconditions what the others do."""
    package, _, kind = name.rpartition(".")
    module = {"torch.optim": torch.optim, "optim": optim}.get(package) or runtime.import_optional(package, f"bench.py optim --only {name}")
    options = refreshing(KINDS[name], cycle)
    if package == "heavyball":
        module.utils.compile_mode = "default" if compiled else None
        options.update(max_precond_dim=10 ** 6, merge_dims=False)
    elif name == "torch.optim.AdamW":
        options.update(fused=True)
    elif name == "pytorch_optimizer.Muon":
        params = [dict(params=params, use_muon=True)]
    return getattr(module, kind)(params, lr=1e-4, **options)


def bench_optim(args, world):
    """ms per optimizer step on the block matrices of a model, with random gradients; with --fit on those of several widths."""
    dim, depth = SETS[args.set]
    if args.fit:
        entries = {f"{name}, d = {d}": (name, block_matrices(d, args.depth or 2)) for name in args.only or ["optim.SOAP"] for d in args.fit}
    else:
        entries = {name: (name, block_matrices(dim, args.depth or depth)) for name in args.only or KINDS}
    most = max(sum(m * n for m, n in shapes) for _, shapes in entries.values())
    pool, offsets = 0.01 * torch.randn(most + 2 * 997, device=world.device), itertools.cycle((0, 997, 2 * 997))       # three sets of gradients
    buffer, params, optimizers, temporary, notes = torch.empty(most, device=world.device), {}, {}, {}, []

    def feed(label):
        """New gradients: some optimizers write into them, or drop them."""
        offset, own = next(offsets), params.get(label, ())
        buffer.copy_(pool[offset:offset + most])
        for p, g in zip(own, buffer.split([*(p.numel() for p in own), most - sum(p.numel() for p in own)])):
            p.grad = g.view_as(p)

    for label, (name, shapes) in entries.items():
        params[label] = [nn.Parameter(0.02 * torch.randn(shape, device=world.device)) for shape in shapes]
        try:
            optimizers[label] = contestant(name, params[label], args.cycle, args.compile)
        except runtime.BadInput as missing:
            notes.append(str(missing))
            continue
        with quick_seeds():                                      # warm-up: the seed, and one cycle, whose last step is the one that refreshes
            temporary[label] = peak_bytes((args.cycle + 1) * [lambda: (feed(label), optimizers[label].step())], world.device)
    dtypes = torch.float32, torch.bfloat16
    steps = {dtype: matmul(args.matmul, world.device, dtype) for dtype in dtypes} | {label: optimizer.step for label, optimizer in optimizers.items()}
    seconds = interleaved(steps, args.cycle * args.repeats, waiter(world), warmup=0, before=feed)
    rate = {dtype: 2 * args.matmul ** 3 / statistics.median(seconds[dtype]) for dtype in dtypes}
    rows, counts = {}, {label: KINDS[name] and floor(shapes, KINDS[name], args.frequency) for label, (name, shapes) in entries.items()}
    for label, optimizer in optimizers.items():
        name, shapes = entries[label]
        largest = 4 * max(shapes.count(shape) * shape[0] * shape[1] for shape in shapes)
        times = milliseconds(seconds[label], KINDS[name], args)
        least = counts[label] and 1e3 * counts[label] / rate[torch.bfloat16 if KINDS[name] == "muon" else torch.float32]
        rows[label] = times | {"floor, ms": least, "x floor": least and times["ms"] / least, "state, MB": state_bytes(optimizer) / 1e6,
                               "temporary, MB": temporary[label] / 1e6, "temporary / largest group": temporary[label] / largest}
    notes.append(f"a refresh every {args.frequency} steps; matmul " + ", ".join(f"{str(dtype)[6:]} {rate[dtype] / 1e9:.4g} Gflop/s" for dtype in dtypes)
                 + f"; heavyball {'compiled' if args.compile else 'eager'}" * ("heavyball" in sys.modules))
    if args.fit:
        fit(rows, counts, notes)
    return rows, notes


def fit(rows, counts, notes):
    """Adds what one rate for all, the least squares of predicted / measured - 1, makes of the flops in `counts`, and how far each row is from it."""
    for name in dict.fromkeys(label.partition(",")[0] for label in rows):
        mine = [label for label in rows if label.partition(",")[0] == name]
        x = [counts[label] / rows[label]["ms"] for label in mine]
        ms_per_flop = sum(x) / sum(v * v for v in x)
        for label in mine:
            predicted = ms_per_flop * counts[label]
            rows[label] |= {"predicted, ms": predicted, "deviation, %": 100 * (rows[label]["ms"] / predicted - 1)}
        worst = max(abs(rows[label]["deviation, %"]) for label in mine)
        notes.append(f"{name}: the flops at {1e-6 / ms_per_flop:.4g} Gflop/s, largest deviation {worst:.1f} %")


# -------------------------------------------------------------------------------------------------------------- Ranks
class Blocks(nn.Module):
    """Matrices that `optim.build_optimizer` takes for those of a model's blocks."""

    def __init__(self, shapes):
        super().__init__()
        self.blocks = nn.ParameterList(nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes)


def rank(me, size, folder, shapes, name, cycle, pipe):
    """One process of `size`: a step for each "step" that comes down the pipe; at last its state's bytes, and rank 0's weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{size}", rank=me, world_size=size)
    torch.manual_seed(0)
    model = Blocks(shapes)
    gradients = [[0.01 * torch.randn(shape) for shape in shapes] for _ in range(2)]
    optimizer = optim.build_optimizer(model, name, 1e-3, 0.01, **refreshing(name, cycle))
    for turn in itertools.count():
        for p, g in zip(model.blocks, gradients[turn % 2]):
            p.grad = g
        if pipe.recv() != "step":
            break
        with quick_seeds() if turn == 0 else contextlib.nullcontext():
            optimizer.step()
        pipe.send("done")
    pipe.send((state_bytes(optimizer), [p.detach().numpy() for p in model.blocks] if me == 0 else None))
    dist.destroy_process_group()


def bench_ranks(args, world):
    """ms per optimizer step and bytes of state per rank where 1, 2 and 4 processes of one thread share the matrices; how far their weights end from one's."""
    dim, depth = SETS[args.set]
    shapes, context, rows = block_matrices(dim, args.depth or depth), torch.multiprocessing.get_context("spawn"), {}
    name = KINDS[args.only[0]] if args.only else "soap"
    with tempfile.TemporaryDirectory() as folder:
        groups = {}
        for size in args.ranks:
            for me in range(size):
                ours, its = context.Pipe()
                process = context.Process(target=rank, args=(me, size, folder, shapes, name, args.cycle, its), daemon=True)
                process.start()
                its.close()                                      # so that the end of the process ends the pipe
                groups.setdefault(size, []).append((process, ours))

        def tell(size, word):
            for _, pipe in groups[size]:
                pipe.send(word)
            return [pipe.recv() for _, pipe in groups[size]]

        seconds = interleaved({size: lambda size=size: tell(size, "step") for size in groups}, args.cycle * args.repeats, warmup=1 + args.cycle)
        for size in groups:
            states, weights = zip(*tell(size, "end"))
            row = milliseconds(seconds[size], name, args) | {"state per rank, MB": max(states) / 1e6}
            first, final = (row, weights[0]) if not rows else (first, final)
            rows[f"{size} rank{'s' * (size > 1)}"] = row | {
                "time, x first": row["ms"] / first["ms"], "state, x first": row["state per rank, MB"] / first["state per rank, MB"],
                "largest difference": max(float(np.abs(a - b).max()) for a, b in zip(weights[0], final))}
            for process, _ in groups[size]:
                process.join()
    return rows, [f"{name}, {args.set}, {1 + args.cycle * (1 + args.repeats)} steps, one thread a rank, {os.cpu_count()} cores"]


# -------------------------------------------------------------------------------------------------- Data, text, boxes
def bench_data(args, world):
    """Images/s of the loop's `next(batches)` alone, per embedded set and augmentation, beside those of the laptop ViT's training step at the set's image size."""
    rows = {}
    for name in args.only or EMBEDDED:
        start = time.perf_counter()
        images = data.load_images(name)
        loading = time.perf_counter() - start
        usual, sizes = SIZES_OF["vit"]["laptop"]
        batch = args.batch_size or usual
        sizes = sizes | dict(img_size=images.size, patch_size=images.size // 4, in_chans=images.in_chans, num_classes=len(images.classes))
        model = ViT(**sizes).to(world.device)
        optimizer = optim.build_optimizer(model, "adamw", 1e-4, 0.01)
        steps = {"step": training_step(model, optimizer, *random_images(batch, sizes, world.device), world.device, torch.float32)}
        for level in ("none", "light", "strong"):
            batches = data.train_batches(images.train, data.train_transform(images, images.size, level), batch, 0, 0, args.repeats + 2, workers=args.workers)
            steps[level] = lambda batches=batches: next(batches)
        rate = {key: batch / statistics.median(times) for key, times in interleaved(steps, args.repeats, waiter(world)).items()}
        rows[name] = {"load, s": loading} | {f"{key}, images/s": value for key, value in rate.items()} | {
            f"{level}, %": 100 * rate["step"] / (rate["step"] + rate[level]) for level in ("none", "light", "strong")}
    return rows, [f"step: of the laptop ViT with AdamW; %: the loader's share of both, where nothing overlaps; {args.workers} workers"]


def bench_tokenize(args, world):
    """MB/s from text to shards on one core (read, cut into documents, BPE, write), beside tiktoken's encoder alone on the same documents; seconds of the process."""
    source = (text.ROOT / "sotu_tail_2mb.txt").read_bytes() * 5
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_bytes(source)
        documents = [document.decode(errors="replace") for document in text.split_text(source)]
        for name in ("gpt2", "gpt2-32k"):
            encode = text.load_tokenizer(name).array
            command = [f"{folder}/text.txt", "--out", f"{folder}/{name}", "--tokenizer", name, "--workers", "1", "--fresh"]
            steps = {"tiktoken": lambda: [encode(document) for document in documents], "prepare.py": lambda: prepare.main(command)}
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                seconds = {k: statistics.median(v) for k, v in interleaved(steps, args.repeats, clock=time.process_time).items()}
            rows[name] = {"prepare.py, MB/s": len(source) / 1e6 / seconds["prepare.py"], "tiktoken alone, MB/s": len(source) / 1e6 / seconds["tiktoken"],
                          "ratio": seconds["tiktoken"] / seconds["prepare.py"]}
    return rows, []


def bench_tokencut(args, world):
    """ms per image from features to box on the CPU: `discovery.tokencut`, and the same with scipy.linalg.eigh of (D - A) v = lambda D v, whole but for two
    eigenvectors, as TokenCut is published; 20 images of 28 x 28 patches, 384 channels, in which an object differs from what is behind it."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(args.threads))     # scipy brings a BLAS of its own, which looks here when it is loaded
    linalg, grid = runtime.import_optional("scipy.linalg", "bench.py tokencut"), (28, 28)
    images = [clusters(seed, grid) for seed in range(20)]

    def scipy_box(x):
        x = F.normalize(x, dim=1)
        A = torch.where(x @ x.T > 0.2, 1.0, 1e-5).double().numpy()
        D = A.sum(1)
        _, v = linalg.eigh(-A + np.diag(D), np.diag(D), subset_by_index=[1, 2])
        return discovery.cut(torch.from_numpy(v[:, :1].T.copy()), grid)[1][0].tolist()

    steps = {"scipy": lambda: [scipy_box(x) for x in images], "ours": lambda: [list(discovery.tokencut(x, grid)["box"]) for x in images]}
    same = sum(a == b for a, b in zip(*(step() for step in steps.values())))
    seconds = {name: statistics.median(v) / len(images) for name, v in interleaved(steps, args.repeats, clock=time.process_time).items()}
    return {name: {"ms per image": 1e3 * s, "ratio": seconds["scipy"] / s, f"same box, of {len(images)}": same} for name, s in seconds.items()}, []


def clusters(seed, grid, channels=384):
    """Features (N, channels) of a scene: an ellipse on two halves of background, each with a direction of its own, all with one in common, and noise."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in grid), indexing="ij")
    a, b, c, d, slope = torch.rand(5, generator=generator)
    part = torch.where(y > slope - 0.5 + 0.3 * x, 1, 0)
    part[((x - a + 0.5) / (0.25 + 0.4 * c)) ** 2 + ((y - b + 0.5) / (0.25 + 0.4 * d)) ** 2 < 1] = 2
    kinds = 0.6 * torch.randn(1, channels, generator=generator) + torch.randn(3, channels, generator=generator)
    return kinds[part.flatten()] + 0.8 * torch.randn(part.numel(), channels, generator=generator)


# -------------------------------------------------------------------------------------------------------------- A GPU
GPU_TABLES = {                                                   # in the order of what must be known first; flags as on the command line
    "ViT-B step": "step --model vit --size vit-b --batch-size 128 --dtype bfloat16 --compile --matmul 8192 --repeats 12 --only timm 'ours, residual, adamw'",
    "LM step": "step --model lm --size paper --batch-size 32 --dtype bfloat16 --compile --matmul 8192 --repeats 12 --only nanoGPT 'ours, residual, adamw'",
    "optimizers": "optim --set lm-194m --cycle 2 --repeats 3 --matmul 8192 "
                  "--only torch.optim.AdamW torch.optim.Muon optim.Muon optim.SOAP pytorch_optimizer.SOAP optim.KLShampoo",
}


def bench_gpu(args, world, tables=GPU_TABLES, tests="tests/test_cuda.py", limit=330):
    """The tests that need CUDA, then the tables; one that would begin after `limit` seconds is left out, so that all takes less than 8 minutes."""
    if world.device.type != "cuda" and tables is GPU_TABLES:
        raise runtime.BadInput(f"bench.py gpu needs a CUDA machine, and --device {args.device} gives {world.device} here: run it where torch sees a GPU")
    start, done, notes = time.perf_counter(), {}, []
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", tests], cwd=Path(__file__).resolve().parent, capture_output=True, text=True, errors="replace")
    notes.append(f"{tests}: {ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ran.stderr.strip()[-200:]}")
    for name, command in tables.items():
        if time.perf_counter() - start > limit:
            notes.append(f"{name}: left out, {limit} s were over")
            continue
        its = get_args([*shlex.split(command), "--device", str(world.device), "--threads", str(args.threads)])
        torch.manual_seed(0)
        rows, more = BENCHES[its.bench](its, world)
        done[name] = rows
        notes += [f"{name}: {note}" for note in more]
        if args.out and tables is GPU_TABLES:                    # what there is, should the next one fail: time on a GPU is dear
            write(args, world, done, notes)
    return done, notes


def machine(world):
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else runtime.cpu_name()
    return dict(device=name, cores=os.cpu_count(), threads=torch.get_num_threads(), torch=torch.__version__, cuda=torch.version.cuda,
                python=platform.python_version(), system=platform.system())


def write(args, world, rows, notes):
    Path(args.out).write_text(json.dumps(dict(args=vars(args), hardware=machine(world), notes=notes, rows=rows), indent=1) + "\n")


BENCHES = {"optim": bench_optim, "step": bench_step, "ranks": bench_ranks, "data": bench_data, "tokenize": bench_tokenize, "tokencut": bench_tokencut, "gpu": bench_gpu}


def get_args(argv=None):
    number = runtime.number
    parser = runtime.Parser(description=__doc__)
    add = parser.add_argument
    add("bench", choices=list(BENCHES), help="what to measure")
    add("--model", choices=list(SIZES_OF), default="lm", help="step: a language model or a ViT")
    add("--size", default="laptop", help="step: laptop or paper for the language model; laptop, vit-s or vit-b for the ViT")
    add("--set", choices=list(SETS), default="vit-s", help="optim, ranks: whose block matrices")
    add("--depth", type=number(int, low=1), default=None, help="optim, ranks: number of blocks; None is the set's own, for --fit 2")
    add("--fit", type=number(int, low=1), nargs="*", default=None, metavar="WIDTH", help="optim: one rate for these widths (192 384 768) instead of --set")
    add("--only", nargs="+", default=None, metavar="ROW", help=f"optim: these of {', '.join(KINDS)}; ranks: one of ours; step: of its rows; data: sets")
    add("--ranks", type=number(int, low=1), nargs="+", default=[1, 2, 4], help="ranks: numbers of processes")
    add("--frequency", type=number(int, low=1), default=10, help="steps between two refreshes of the bases, over which a step is amortised")
    add("--cycle", type=number(int, low=2), default=4, help="steps between two refreshes while measuring: a power of two, or heavyball's come irregularly")
    add("--batch-size", type=number(int, low=1), default=None, help="step, data: sequences or images; None is the size's own")
    add("--repeats", type=number(int, low=1), default=None, help="measured repetitions, for optim and ranks of a cycle; None is 2 for these, else 20")
    add("--matmul", type=number(int, low=1), default=2048, help="side of the matrices whose product tells what the machine gives at best")
    add("--workers", type=number(int, low=0), default=0, help="data: loading processes")
    add("--threads", type=number(int, low=1), default=2, help="CPU threads")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="step: arithmetic of the forward pass")
    add("--compile", action="store_true", help="step: torch.compile the models; optim: let heavyball compile")
    add("--out", default=None, help="also write the figures to this JSON file; None is results/gpu.json for gpu, else nowhere")
    args = parser.parse_args(argv)
    if args.size not in SIZES_OF[args.model]:
        raise runtime.BadInput(f"--size {args.size} is not one of --model {args.model}: choose {' or '.join(SIZES_OF[args.model])}")
    known = {"optim": list(KINDS), "ranks": [name for name in KINDS if name.startswith("optim.")], "data": EMBEDDED,
             "step": [PEERS[args.model][0], *OURS]}.get(args.bench, [])
    for name in args.only or ():
        if name not in known:
            raise runtime.BadInput(f"--only '{name}' is no row of {args.bench}: " + (f"choose from {'; '.join(known)}" if known else "leave it out"))
    if args.fit == []:
        args.fit = [192, 384, 768]
    args.repeats = args.repeats or (2 if args.bench in ("optim", "ranks") else 20)
    if args.bench == "gpu":
        args.out = args.out or str(Path(__file__).resolve().parent / "results" / "gpu.json")
    if args.out and (Path(args.out).is_dir() or not Path(args.out).resolve().parent.is_dir() or not os.access(Path(args.out).resolve().parent, os.W_OK)):
        raise runtime.BadInput(f"--out {args.out} cannot be written: choose a file in a folder that exists and can be")
    return args


def show(title, rows):
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    print(f"\n{title}\n\n| | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join("-" if row.get(c) is None else f"{row[c]:.4g}" for c in columns) + " |")


def main(argv=None):
    args = get_args(argv)
    world = runtime.start(args.device, args.threads)
    torch.manual_seed(0)
    rows, notes = BENCHES[args.bench](args, world)
    print(f"{args.bench}: {machine(world)['device']}, {world.device}, {torch.get_num_threads()} threads, torch {torch.__version__}; medians of {args.repeats}")
    for title, table in (rows if args.bench == "gpu" else {args.bench: rows}).items():
        show(title, table)
    print("", *notes, sep="\n")
    if args.out:
        write(args, world, rows, notes)


if __name__ == "__main__":
    runtime.run(main)
