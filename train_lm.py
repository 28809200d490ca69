"""A LLaMA-style language model, with and without residual connections (paper 2).

On a laptop: 12 layers of width 128, 2.4 M parameters, the bytes of 2 MB of speeches, 300 steps of 1,024
tokens, 1 to 2 minutes on two cores. Validation loss in nats per byte over three seeds (results/lm.json,
2026-11-30):
    python train_lm.py --skipless --opt soap     1.940 +- .019   no residuals
    python train_lm.py --opt soap                1.797 +- .023   with residuals
    python train_lm.py                           1.984 +- .010   the usual decoder: residual, AdamW

A text from a finished run, with any prompt; nothing is trained:
    python train_lm.py --skipless --opt soap --sample 300 --set prompt="The state of the union is"

The paper's 194 M parameters on FineWeb-Edu (not run by us):
    python -m tools.prepare_text /path/to/fineweb-edu --tokenizer gpt2-32k --out data/fineweb-edu
    torchrun --nproc_per_node=8 train_lm.py --preset paper --data data/fineweb-edu \\
        --skipless --opt kl-shampoo --micro-batch 32
"""
import copy
import math
import textwrap

import torch
import torch.nn as nn
import torch.nn.functional as F

import init
import optim
import orthogonal
import runtime
import text
from model import LM, SHORTCUTS, activation
from runtime import BadInput

# What every preset has beside its own entries. `--set key=value` changes any of them.
COMMON = dict(
    mlp_ratio=4.0,                   # hidden width of the MLP over the width
    attention_scale="head",          # logits over sqrt(head dimension); model: over sqrt(width)
    alpha_qk=3.0, alpha_vo=3.0, alpha_u=1.5, alpha_d=1.5,    # --init residual-free (paper 2)
    mlp_init="suo",                  # fc1, fc2 independent; looks-linear: the MLP starts as an identity
    alpha=1.0, beta=2.0, c=3.0,      # --init skipless (paper 1), for heads of 32
    joint_heads=False,               # all heads' W_Q as one orthogonal matrix, for --orthogonal all
    center=None,                     # share of the activation's mean taken off; None: auto's, else 0
    tokenizer="",                    # bytes, gpt2, gpt2-32k or tiktoken's; else the folder's, or bytes
    prompt="",                       # what the samples begin with
)
PRESETS = {
    # Minutes on two cores. KL-Shampoo's eigenvalues forget their start at .98 a step: from its own 0.1
    # down to what clipped gradients of 2.4 M entries have (6e-4) would take most of 300 steps.
    "laptop": dict(
        COMMON, data="sotu", embed_dim=128, depth=12, num_heads=4, block_size=128,
        steps=300, batch_size=8, warmup=40, weight_decay=0.01, clip=1.0, init_factor=1e-3,
        skipless_init="auto", temperature_beta={"residual": 1.0, "skipless": 1.0},
        lr={"residual": {"adamw": 3e-3, "soap": 1e-2, "kl-shampoo": 1e-2, "muon": 3e-2},    # searched
            "skipless": {"adamw": 1e-3, "soap": 3e-3, "kl-shampoo": 9e-4, "muon": 1e-3}},
        eval_tokens=32768, eval_every=100, save_every=100, sample_tokens=200),
    # 24 x 768, 194.48 M parameters, FineWeb-Edu. The paper states: context 512, 512 sequences a step,
    # 50,000 steps, 2,000 warm-up, decay .01, KL-Shampoo's lrs, temperature 1.1 without residuals.
    # Assumed, as the paper's page does not say: cosine to 0, clip 1, the other optimizers' lrs,
    # KL-Shampoo's own momenta, no decay on embedding and norms.
    "paper": dict(
        COMMON, data=None, embed_dim=768, depth=24, num_heads=12, block_size=512,
        steps=50000, batch_size=512, warmup=2000, weight_decay=0.01, clip=1.0,
        skipless_init="paper", temperature_beta={"residual": 1.0, "skipless": 1.1},
        lr={"residual": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 1e-3, "muon": 1e-3},
            "skipless": {"adamw": 5e-4, "soap": 5e-4, "kl-shampoo": 5e-4, "muon": 5e-4}},
        eval_tokens=2 ** 20, eval_every=1000, save_every=1000, sample_tokens=100),
}
# The constants of --init paper. Those of auto and residual-free are the preset's entries of these names.
PAPER = dict(alpha_qk=0.9, alpha_vo=3.0, alpha_u=1.5, alpha_d=1.5, mlp_init="suo")


def get_args(argv=None):
    """Flags win over --set, --set over the preset."""
    parser, preset = runtime.train_parser(__doc__, PRESETS, argv)
    add = parser.add_argument_group("model").add_argument
    add("--embed-dim", type=runtime.number(int, low=2), help="width")
    add("--depth", type=runtime.number(int, low=1), help="number of blocks")
    add("--block-size", type=runtime.number(int, low=1), help="context, tokens")
    runtime.add_shortcut_flags(add, SHORTCUTS)
    add("--temperature-beta", type=runtime.number(float, low=0.1, high=10),
        help="attention temperature beta ** -layer; 1 is off; else the preset's, by shortcut")
    add("--init", choices=["auto", "default", "paper", "skipless", "residual-free"],
        help="auto: constants from the net's size; paper: paper 2's; skipless (paper 1), residual-free: "
             "the preset's; default: std .02. "
             f"Else {preset['skipless_init']} if skipless, default if not")
    runtime.add_optimizer_flags(parser, optim.OPTIMIZERS, unit="steps")
    add = parser.add_argument_group("data").add_argument
    add("--data", help=f"{', '.join(text.EMBEDDED)}, a .txt file, or a folder of tools.prepare_text")
    add("--sample", type=runtime.number(int, low=1), metavar="TOKENS",
        help="print a text of that length from the checkpoint in --out, and train nothing")
    runtime.add_run_flags(parser, never="at the end only")
    lead = ("embed_dim", "depth", "shortcut", "opt")
    args, _ = runtime.read_flags(parser, preset, argv, "lm", lead)

    if args.data is None and not args.sample:
        raise BadInput(f"--preset {args.preset} needs --data: a folder that tools.prepare_text wrote")
    args.lr = args.lr or runtime.by_net(preset["lr"], args)
    args.alpha_min = runtime.last_weight(args)
    args.temperature_beta = args.temperature_beta or preset["temperature_beta"].get(args.shortcut, 1.0)
    if args.init is None or (args.init == "auto" and args.shortcut != "skipless"):
        args.init = args.skipless_init if args.shortcut == "skipless" else "default"
    del args.skipless_init
    if args.init in ("default", "skipless"):
        del args.mlp_init                                        # args.json says what applies, no more
    return args


def lm_constants(args):
    """{name: value} of the constants that --init reads, and `center`."""
    names = {"default": (), "skipless": ("alpha", "beta", "c")}.get(args.init, PAPER)
    constants = {key: getattr(args, key) for key in names} | {"center": 0.0}
    if args.init == "paper":
        constants |= PAPER
    elif args.init == "auto":                                    # alpha_qk and center
        constants |= init.choose_lm_constants(
            args.embed_dim, args.num_heads, args.block_size, args.depth, args.temperature_beta,
            args.attention_scale, activation=activation)
    return constants if args.center is None else constants | {"center": args.center}


def build_model(args, vocab_size):
    """(the LM with its initialisation applied, its keyword arguments, the constants used).

    Equal on all ranks: the seed does not know the rank. Raises BadInput for sizes that do not fit."""
    torch.manual_seed(args.seed)
    options = dict(vocab_size=vocab_size)
    for key in ("block_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "shortcut", "alpha_min",
                "temperature_beta", "attention_scale"):
        options[key] = getattr(args, key)
    with runtime.user_errors():
        raw, constants = LM(**options), lm_constants(args)
        if args.init == "skipless":
            init.init_skipless_vit(raw, args.alpha, args.beta, args.c)
        elif args.init != "default":
            init.init_residual_free_lm(raw, *(constants[key] for key in PAPER), args.joint_heads)
    spread = constants.get("alpha_u", 1.0) ** 0.5                # of what fc1 gives the activation
    options["shift"] = constants["center"] * init.gaussian_mean(activation, spread)
    for block in raw.blocks:
        block.mlp.shift = options["shift"]
    return raw, options, constants


class KurtosisMeter:
    """A forward hook: excess kurtosis, E(x - mean)^4 / variance^2 - 3, of all outputs. A Gaussian has 0.

    It keeps the count n, the mean, and Sk, the sum of (x - mean)^k, in float64, and merges those of each
    batch into them (Chan et al. 1979, Pebay 2008): sums of x^k cancel where the mean is not 0."""

    def __init__(self):
        self.n, self.mean, self.S2, self.S3, self.S4 = 0, 0.0, 0.0, 0.0, 0.0

    def __call__(self, module, inputs, output):
        output = output.cpu() if output.device.type == "mps" else output     # mps has no float64
        size = 2 ** 17 if output.device.type == "cpu" else 2 ** 24           # what a cache holds
        for x in output.flatten().split(size):
            self.add(x.double())

    def add(self, x):
        """Merge the values of x (n,), float64."""
        a, A2, A3, A4 = self.n, self.S2, self.S3, self.S4
        b, mean = len(x), x.mean()
        d = x - mean
        d2 = d * d
        B2, B3, B4 = d2.sum(), (d2 * d).sum(), d2.square().sum()
        n, t = a + b, mean - self.mean
        self.n, self.mean = n, self.mean + t * (b / n)
        self.S2 = A2 + B2 + t ** 2 * (a * b / n)
        self.S3 = A3 + B3 + t ** 3 * (a * b * (a - b) / n ** 2) + 3 * t * (a * B2 - b * A2) / n
        self.S4 = (A4 + B4 + t ** 4 * (a * b * (a * a - a * b + b * b) / n ** 3)
                   + 6 * t ** 2 * (a * a * B2 + b * b * A2) / n ** 2 + 4 * t * (a * B3 - b * A3) / n)

    def value(self):
        """nan where nothing was seen, or the same value always."""
        n = max(1, self.n)
        variance = float(self.S2) / n
        return float(self.S4) / n / variance ** 2 - 3 if variance else math.nan


@torch.no_grad()
def evaluate(model, tokens, args, run):
    """(loss in nats per token, [excess kurtosis of each block's output]) on the validation tokens.

    The loss is that of all ranks: strided, no padding, SUM then divide. The kurtosis is that of rank 0's
    share: quantize.py measures all."""
    model.eval()
    meters = [KurtosisMeter() for _ in model.blocks]
    hooks = [block.register_forward_hook(meter) for block, meter in zip(model.blocks, meters)]
    batches = text.eval_batches(tokens, args.block_size, args.micro_batch, run.rank, run.size,
                                limit=-(-args.eval_tokens // args.block_size))
    loss, count = 0.0, 0
    for x, y in batches:
        x, y = run.to_device(x, y)
        with run.autocast():
            logits = model(x)
        loss += F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum").item()
        count += y.numel()
    for hook in hooks:
        hook.remove()
    model.train()
    loss, count = runtime.all_sum([loss, count], run.world)
    return loss / count, [meter.value() for meter in meters]


@torch.no_grad()
def isometry_drift(model):
    """Mean distance of the blocks' matrices from scaled orthogonal ones; q, k and v one by one.

    |W W^T / s - I|_F / sqrt(n) for W (n, m), n <= m, s the mean of its n squared singular values.
    Paper 2: a sign-like update (AdamW) drifts as lr sqrt(d), a spectral one (KL-Shampoo, ...) as lr."""
    drifts = []
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        for weight in (*attn.qkv.weight.chunk(3), attn.proj.weight, mlp.fc1.weight, mlp.fc2.weight):
            w = weight.float() if len(weight) <= weight.shape[1] else weight.float().T
            gram = w @ w.T
            gram /= gram.diagonal().mean()                       # trace n now, so |G - I|^2 = |G|^2 - n
            drifts.append((gram.square().sum() / len(gram) - 1).clamp(min=0).sqrt())
    return torch.stack(drifts).mean().item()


def flops_per_token(model):
    """Of a training step: 6 per weight, 12 depth width context for attention (Chowdhery et al. 2022)."""
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    return 6 * weights + 12 * len(model.blocks) * model.token_embed.embedding_dim * model.block_size


def sample_text(model, tokenizer, prompt, count, seed, step):
    """The prompt and `count` tokens after it, as text. The draw is a function of (seed, step)."""
    device = model.token_embed.weight.device
    generator = torch.Generator(device).manual_seed(runtime.mix_seed(seed, "sample", step))
    given = torch.tensor([[tokenizer.separator, *tokenizer.encode(prompt)]], device=device)
    tokens = model.generate(given, count, temperature=0.8, top_k=50, generator=generator)
    return tokenizer.decode(tokens[0, 1:].tolist())


def readable(written):
    """The text with its line breaks, but escapes for control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in written)


def print_sample(args):
    """What --sample does: a text from the checkpoint in --out. Raises BadInput where there is none."""
    checkpoint = runtime.find_checkpoint(args.out, True, "lm")
    if checkpoint is None:
        raise BadInput(f"--sample needs a trained net, and {args.out} has none: train it, or pass --out")
    net = LM(**checkpoint["args"]["model"])
    net.load_state_dict(checkpoint["ema"] or checkpoint["model"])
    net.to(runtime.start(args.device, args.threads).device)
    tokenizer = text.load_tokenizer(checkpoint["args"]["tokenizer"])
    written = sample_text(net, tokenizer, args.prompt, args.sample, args.seed, checkpoint["step"])
    print(readable(written))


def main(argv=None):
    args = get_args(argv)
    if args.sample:
        return print_sample(args)
    run = runtime.open_run(args, "lm")

    # data, model, optimizer
    corpus = text.load_text(args.data, args.tokenizer or None)
    args.tokenizer = corpus.tokenizer.name
    text.windows_per_epoch(corpus.train, args.block_size)        # a text too short is refused here
    text.eval_batches(corpus.val, args.block_size, args.micro_batch)
    steps, tokens = args.steps, args.batch_size * args.block_size
    eval_every, save_every = args.eval_every or steps, args.save_every or steps
    raw, options, constants = build_model(args, corpus.tokenizer.vocab_size)
    raw.to(run.device)
    constraint = orthogonal.constrain(raw.blocks, args)
    ema = copy.deepcopy(raw).requires_grad_(False) if args.ema else None
    optimizer = optim.build_optimizer(raw, args.opt, args.lr, args.weight_decay,
                                      constraint=constraint, **runtime.optimizer_options(args))
    peak = runtime.matmul_rate(run.device, run.dtype) * run.size

    facts = dict(train_tokens=len(corpus.train), tokenizer_digest=corpus.tokenizer.digest,
                 model=options, constants=constants)
    step = run.begin(facts, steps, raw, ema, optimizer)
    used = ", ".join(f"{key} {value}" for key, value in constants.items())
    note = f"; {corpus.note}" if corpus.note else ""
    run.banner(f"{len(corpus.train):,} training and {len(corpus.val):,} validation tokens, "
               f"{args.tokenizer} ({corpus.tokenizer.vocab_size:,}){note}",
               f"{runtime.millions(raw)}, {args.shortcut}, init {args.init}: {used}",
               f"{tokens:,} tokens; {steps} steps, {steps * tokens / len(corpus.train):.2f} epochs",
               optim.describe(optimizer))
    model = run.wrap(raw)
    batches = text.train_batches(corpus.train, args.block_size, args.batch_size, args.seed, step, steps,
                                 run.rank, run.size, run.micro_steps)

    def look(step, lr):
        net, tokenizer, written = ema or raw, corpus.tokenizer, None
        val_loss, kurtosis = evaluate(net, corpus.val, args, run)
        runtime.check_val(val_loss, step, lr)
        drift, most = isometry_drift(raw), max(kurtosis)
        line = (f"step {step:6d}  val loss {val_loss:.4f}{' (ema)' * bool(ema)}  excess kurtosis "
                f"{kurtosis[0]:.2f} .. {kurtosis[-1]:.2f}, max {most:.2f}  isometry drift {drift:.3f}")
        if args.sample_tokens and run.main:
            written = sample_text(net, tokenizer, args.prompt, args.sample_tokens, args.seed, step)
            line += "\n" + textwrap.indent(readable(written), " " * 4)
        run.log(line, step=step, val_loss=val_loss, kurtosis=kurtosis, kurtosis_max=most,
                isometry_drift=drift, sample=written)

    if run.owes_look(step, eval_every):
        look(step, args.lr)
    while step < steps:
        lr = runtime.lr_at(step, steps, args.warmup, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        loss = 0.0
        for micro in range(run.micro_steps):
            x, y = run.to_device(*next(batches))
            with run.accumulate(model, micro):
                with run.autocast():
                    logits = model(x)
                part = F.cross_entropy(logits.float().flatten(0, 1), y.flatten()) * run.share(len(x))
                part.backward()
            loss += part.detach()
        norm = nn.utils.clip_grad_norm_(raw.parameters(), args.clip or float("inf"))
        run.observe(step, lr, loss, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema:
            runtime.update_average(ema, raw, args.ema)
        step += 1

        log_now, save_now, eval_now = run.due(step, save_every, eval_every)
        if log_now:
            run.log_training(step, lr, tokens, "tokens", step * tokens / len(corpus.train),
                             flops_per_token(raw), peak)
        if save_now:
            run.save(step, raw, ema, optimizer)
        if eval_now:
            look(step, lr)

    title = f"LM {args.embed_dim} x {args.depth}, {args.shortcut}, init {args.init}, {args.opt}"
    run.finish(title, "kurtosis_max", "largest excess kurtosis", digits=2)
    run.say(f"best val loss {run.best():.4f}")
    run.say(f"val loss {run.last('val_loss'):.4f}")


if __name__ == "__main__":
    runtime.run_script(main)
