"""Speed of a training step beside the peers, in one run: interleaved repetitions, medians, ratios.

    python bench.py step                     tokens/s of a language model's training step, beside nanoGPT's architecture at the same sizes
    python bench.py tokenize                 MB/s of prepare.py on one core, beside tiktoken alone
    python bench.py tokencut --threads 1     ms per image of 784 patches (ViT-S/8 at 224 px) of TokenCut, beside scipy's generalised eigendecomposition
"""
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import discovery
import optim
import prepare
import runtime
import text
from model import LM


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


LM_SIZES = {                                                     # of train_lm.py's presets
    "laptop": dict(vocab_size=257, block_size=128, embed_dim=128, depth=12, num_heads=4),
    "paper": dict(vocab_size=32000, block_size=512, embed_dim=768, depth=24, num_heads=12),
}


def interleaved(steps, repeats, wait=lambda: None, clock=time.perf_counter):
    """{name: [seconds, ...]} of the functions `steps`, called in turn so that a noisy machine disturbs all alike; the first two rounds are warm-up."""
    seconds = {name: [] for name in steps}
    for _ in range(repeats + 2):
        for name, step in steps.items():
            wait()
            start = clock()
            step()
            wait()
            seconds[name].append(clock() - start)
    return {name: values[2:] for name, values in seconds.items()}


def training_step(model, optimizer, x, y, device, dtype):
    """A function that makes one step: forward, backward, clip, update; the same for every model."""
    def step():
        with runtime.autocast(device, dtype):
            logits = model(x)
        F.cross_entropy(logits.float().flatten(0, 1), y.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def bench_step(args, world):
    """Tokens/s of a training step with AdamW: ours with and without residuals, and nanoGPT's architecture. Ratios are of medians."""
    dtype, _ = runtime.pick_dtype(args.dtype, world.device)
    sizes = LM_SIZES[args.size]
    models = {"nanoGPT": GPT(**sizes), "ours, residual": LM(**sizes), "ours, skipless": LM(**sizes, shortcut="skipless")}
    tokens = torch.randint(sizes["vocab_size"], (args.batch_size, sizes["block_size"] + 1), device=world.device)
    steps = {}
    for name, model in models.items():
        model.to(world.device)
        if name == "nanoGPT":                                    # its AdamW is fused on CUDA only
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=world.device.type == "cuda")
        else:
            optimizer = optim.build_optimizer(model, "adamw", 1e-4, 0.01)
        run = torch.compile(model) if args.compile else model
        steps[name] = training_step(run, optimizer, tokens[:, :-1], tokens[:, 1:], world.device, dtype)
    wait = torch.cuda.synchronize if world.device.type == "cuda" else lambda: None
    seconds = {name: statistics.median(v) for name, v in interleaved(steps, args.repeats, wait).items()}
    return {name: dict(tokens_per_s=args.batch_size * sizes["block_size"] / s, ms=1e3 * s, ratio=seconds["nanoGPT"] / s) for name, s in seconds.items()}


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
    return rows


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
    return {name: {"ms per image": 1e3 * s, "ratio": seconds["scipy"] / s, f"same box, of {len(images)}": same} for name, s in seconds.items()}


def clusters(seed, grid, channels=384):
    """Features (N, channels) of a scene: an ellipse on two halves of background, each with a direction of its own, all with one in common, and noise."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in grid), indexing="ij")
    a, b, c, d, slope = torch.rand(5, generator=generator)
    part = torch.where(y > slope - 0.5 + 0.3 * x, 1, 0)
    part[((x - a + 0.5) / (0.25 + 0.4 * c)) ** 2 + ((y - b + 0.5) / (0.25 + 0.4 * d)) ** 2 < 1] = 2
    kinds = 0.6 * torch.randn(1, channels, generator=generator) + torch.randn(3, channels, generator=generator)
    return kinds[part.flatten()] + 0.8 * torch.randn(part.numel(), channels, generator=generator)


BENCHES = {"step": bench_step, "tokenize": bench_tokenize, "tokencut": bench_tokencut}


def main(argv=None):
    number = runtime.number
    parser = runtime.Parser(description=__doc__)
    add = parser.add_argument
    add("bench", choices=list(BENCHES), help="what to measure")
    add("--size", choices=list(LM_SIZES), default="laptop", help="step: the sizes of train_lm.py's preset of that name")
    add("--batch-size", type=number(int, low=1), default=8, help="step: sequences")
    add("--repeats", type=number(int, low=1), default=20, help="measured repetitions, after two that are not")
    add("--threads", type=number(int, low=1), default=2, help="CPU threads")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="step: arithmetic of the forward pass")
    add("--compile", action="store_true", help="step: torch.compile the models")
    add("--out", default=None, help="also write the figures to this JSON file")
    args = parser.parse_args(argv)
    world = runtime.start(args.device, args.threads)
    torch.manual_seed(0)
    rows = BENCHES[args.bench](args, world)
    columns = list(next(iter(rows.values())))
    print(f"{args.bench}, {world.device}, {torch.get_num_threads()} threads, torch {torch.__version__}, median of {args.repeats}\n")
    print("| | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{row[c]:.4g}" for c in columns) + " |")
    if args.out:
        Path(args.out).write_text(json.dumps(dict(args=vars(args), torch=torch.__version__, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    runtime.run(main)
