"""A LLaMA-style language model, with and without residual connections (paper 2).

On a laptop: 12 layers of width 128, 2.4 M parameters, the bytes of 2 MB of speeches, 300 steps of 1,024; 1 to 2 minutes on two cores. Validation loss in
nats per byte over three seeds (results/lm.json, 2026-11-30):
    python train_lm.py --skipless --opt soap     1.940 +- .019   no residuals
    python train_lm.py --opt soap                1.797 +- .023   with residuals
    python train_lm.py                           1.984 +- .010   the usual decoder: residual, AdamW

The paper's 194 M parameters on FineWeb-Edu, 8 GPUs (paper: KL-Shampoo lr 5e-4 residual-free, 1e-3 residual; not run by us):
    python prepare.py /path/to/fineweb-edu --tokenizer gpt2-32k --out data/fineweb-edu-32k
    torchrun --nproc_per_node=8 train_lm.py --preset paper --data data/fineweb-edu-32k --skipless --opt kl-shampoo --micro-batch 32
"""
import argparse
import copy
import json
import sys
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import init
import optim
import quantize
import runtime
import text
from model import LM
from runtime import BadInput

PRESETS = {
    # 2.4 M parameters, minutes on two cores. KL-Shampoo's eigenvalues are averages that forget their start at .98 a step, two per matrix: from the
    # reference's 0.1 down to what clipped gradients of 2.4 M entries have (6e-4), a run of 300 steps would be almost over.
    "laptop": dict(
        data="sotu", tokenizer=None, embed_dim=128, depth=12, num_heads=4, block_size=128, steps=300, batch_size=8, warmup=40,
        temperature_beta=1.0, skipless_init="auto",
        lr={"residual": {"adamw": 3e-3, "soap": 1e-2, "kl-shampoo": 1e-2, "muon": 3e-2},      # searched (results/lm.json)
            "skipless": {"adamw": 1e-3, "soap": 3e-3, "kl-shampoo": 9e-4, "muon": 1e-3}},
        weight_decay=0.01, clip=1.0, init_factor=1e-3, eval_tokens=32768, eval_every=100, save_every=100, sample_tokens=200),
    # 24 x 768, 194.48 M parameters, FineWeb-Edu. The paper states: context 512, 512 sequences a step, 50,000 steps, 2,000 warm-up, decay .01, the lrs of
    # KL-Shampoo, temperature beta 1.1 without residuals. Assumed, as the paper's page does not say: cosine to 0, clip 1, the lrs of AdamW (the residual
    # baselines' 1e-3), SOAP and Muon, KL-Shampoo's own momenta, no decay on embeddings and norms.
    "paper": dict(
        data=None, tokenizer=None, embed_dim=768, depth=24, num_heads=12, block_size=512, steps=50000, batch_size=512, warmup=2000,
        temperature_beta=None, skipless_init="paper",
        lr={"residual": {"adamw": 1e-3, "soap": 1e-3, "kl-shampoo": 1e-3, "muon": 1e-3},
            "skipless": {"adamw": 5e-4, "soap": 5e-4, "kl-shampoo": 5e-4, "muon": 5e-4}},
        weight_decay=0.01, clip=1.0, eval_tokens=2 ** 20, eval_every=1000, save_every=1000, sample_tokens=100),
}
# Flags that define the run: a checkpoint with other values is another run. Flags that never touch its course are free; the rest may change, and is said.
# The constants of --init, and what they are where they are left out: paper 2's, and paper 1's (measured for heads of 32).
CONSTANTS = {"residual-free": dict(alpha_qk=3.0, alpha_vo=3.0, alpha_u=1.5, alpha_d=1.5, mlp_init="suo"), "skipless": dict(alpha=1.0, beta=2.0, c=3.0)}
FIXED = ("embed_dim", "depth", "num_heads", "mlp_ratio", "block_size", "shortcut", "alpha_min", "temperature_beta", "attention_scale", "center", "init", "alpha_qk", "alpha_vo",
         "alpha_u", "alpha_d", "mlp_init", *CONSTANTS["skipless"], "opt", "betas", "weight_decay", *runtime.MATRIX_FLAGS, "batch_size", "seed", "tokenizer", "tokenizer_digest")
FREE = ("preset", "device", "compile", "workers", "threads", "out", "resume", "log_every", "eval_every", "save_every", "wandb", "micro_batch", "sample_tokens",
        "prompt", "train_tokens", "lm")


def get_args(argv=None):
    """Two passes: the first finds the preset, whose values then become the defaults that --help shows and flags win over."""
    number = runtime.number
    presets = runtime.Parser(add_help=False)
    presets.add_argument("--preset", choices=list(PRESETS), default="laptop", help="a dict of defaults at the top of this file")
    preset = presets.parse_known_args(argv)[0].preset
    parser = runtime.Parser(description=__doc__, parents=[presets])

    add = parser.add_argument_group("model").add_argument
    add("--embed-dim", type=number(int, low=2), help="width")
    add("--depth", type=number(int, low=1), help="number of blocks")
    add("--num-heads", type=number(int, low=1), help="attention heads")
    add("--mlp-ratio", type=number(float, above=0), default=4.0, help="hidden width of the MLP over the width")
    add("--block-size", type=number(int, low=1), help="context, tokens")
    add("--shortcut", choices=["residual", "skipless", "decayed"], default="residual", help="x + f(x), f(x), or a x + f(x) with a falling to --alpha-min")
    add("--skipless", dest="shortcut", action="store_const", const="skipless", default=argparse.SUPPRESS, help="same as --shortcut skipless: residual-free")
    add("--alpha-min", type=number(float, low=0, high=1), default=None, help="weight of the last shortcut, which --shortcut decayed needs (paper 3: 0.6 to 0.7); None is 1, for the others")
    add("--temperature-beta", type=number(float, low=0.1, high=10), default=None,
        help="attention temperature beta ** -layer, layers from 0; 1 is off; None is the preset's: 1, but 1.1 for a skipless net of the paper")
    add("--attention-scale", choices=["head", "model"], default="head", help="logits over the square root of the head's dimension, or of the width")
    add("--center", type=number(float, low=0, high=1), default=None,
        help="share of GELU's mean at initialisation that is taken off the activation (there are no biases to do it); None is 0, or what --init auto chooses")

    add = parser.add_argument_group("initialisation").add_argument
    add("--init", choices=["auto", "default", "paper", *CONSTANTS], default=None,
        help="auto: if skipless, constants chosen for this size, else default; default: normal, std .02; paper: (.9, 3, 1.5, 1.5) and orthogonal MLP; residual-free: the "
             f"flags below; skipless: paper 1's, --alpha --beta --c; None: the one whose flags are given, else default with residuals and {PRESETS[preset]['skipless_init']} without")
    runtime.add_residual_free_flags(add, CONSTANTS["residual-free"])
    add("--alpha", type=number(float, low=0), help="random part of W_Q W_K^T, for --init skipless; None is 1")
    add("--beta", type=number(float, low=0), help="identity part of W_Q W_K^T, for --init skipless; None is 2")
    add("--c", type=number(float, above=0), help="W_V W_O is c^2 times an orthogonal matrix, for --init skipless; None is 3")
    add("--mlp-init", choices=["suo", "looks-linear"], help="independent orthogonal fc1 and fc2, or mirrored pairs that start as the identity; None is suo")

    add = parser.add_argument_group("optimisation").add_argument
    add("--opt", choices=["adamw", "soap", "kl-shampoo", "muon"], default="adamw", help="for the matrices of the blocks; AdamW takes embedding and norms")
    add("--lr", type=number(float, above=0, high=1e30), default=None, help=f"peak learning rate; None is the preset's, by shortcut and optimizer: {PRESETS[preset]['lr']}")
    add("--embed-lr", type=number(float, above=0, high=1e30), default=None, help="peak learning rate of AdamW's part beside another optimizer; None is --lr")
    add("--weight-decay", type=number(float, low=0), help="decoupled; not on norms and embedding")
    add("--betas", type=number(float, low=0, below=1), nargs=2, default=None, metavar=("B1", "B2"), help="momenta; None is the optimizer's own")
    runtime.add_matrix_flags(add)
    add("--batch-size", type=number(int, low=1), help="global: sequences per update over all processes")
    add("--micro-batch", type=number(int, low=1), default=None, help="sequences per forward pass and process; None means as many as the batch gives it")
    add("--steps", type=number(int, low=1), help="updates")
    add("--warmup", type=number(int, low=0), help="steps of linear warm-up")
    add("--clip", type=number(float, low=0), help="largest gradient norm; 0 is off")
    add("--ema", type=number(float, low=0, below=1), default=0.0, help="decay of the averaged weights, e.g. 0.9999; 0 is off")

    add = parser.add_argument_group("data").add_argument
    add("--data", help="sotu, shakespeare, text (both), a .txt file, or a folder that `python prepare.py` wrote")
    add("--tokenizer", help="bytes, gpt2, gpt2-32k or a name of tiktoken's; None is the prepared folder's own, and bytes for a text")
    add("--eval-tokens", type=number(int, low=0), help="validation tokens to evaluate on, spread evenly; 0 is all")
    add("--sample-tokens", type=number(int, low=0), help="tokens of text to write at each evaluation; 0 is off")
    add("--prompt", default="", help="what the samples begin with")
    runtime.add_run_flags(parser, never="at the end only")

    parser.set_defaults(**{k: v for k, v in PRESETS[preset].items() if k not in ("lr", "skipless_init")})
    args = parser.parse_args(argv)
    kind = "skipless" if args.shortcut == "skipless" else "residual"
    if args.data is None:
        raise BadInput(f"--preset {preset} needs --data: a folder that `python prepare.py` wrote")
    args.lr = args.lr or PRESETS[preset]["lr"][kind][args.opt]
    if args.embed_lr and args.opt == "adamw":
        raise BadInput("--embed-lr has no meaning for --opt adamw, which has one lr: leave it out")
    if args.betas and args.opt == "muon":
        raise BadInput("--betas has no meaning for --opt muon, which has one momentum: leave it out")
    if args.shortcut == "decayed" and args.alpha_min is None:
        raise BadInput("--shortcut decayed needs --alpha-min, the weight of the last shortcut: 1 would be residual, paper 3 uses 0.6 to 0.7")
    args.alpha_min = 1.0 if args.alpha_min is None else args.alpha_min
    args.temperature_beta = args.temperature_beta or PRESETS[preset]["temperature_beta"] or {"skipless": 1.1, "residual": 1.0}[kind]
    resolve_init(args, PRESETS[preset]["skipless_init"])
    args.out = args.out or f"out/lm-{args.embed_dim}x{args.depth}-{args.shortcut}-{args.init}-{args.opt}-seed{args.seed}"
    return args


def resolve_init(args, skipless_init):
    """Fill in --init and its constants where they were left out; a constant alone chooses its init, and with another one it is refused."""
    runtime.fill_constants(args, CONSTANTS)
    if args.init is None or (args.init == "auto" and args.shortcut != "skipless"):
        args.init = skipless_init if args.shortcut == "skipless" else "default"
    constants = dict(center=0.0)                                 # and what the init chooses itself: next to it no constant is given
    if args.init == "paper":
        constants.update(alpha_qk=0.9)
    elif args.init == "auto":
        constants.update(init.choose_lm_constants(args.embed_dim, args.num_heads, args.block_size, args.depth, args.temperature_beta, args.attention_scale))
    if args.center is not None:
        constants["center"] = args.center
    vars(args).update(constants)


def build_model(args, vocab_size):
    """The LM with its initialisation applied, its keyword arguments, and a line that says which init. Equal on all ranks: the seed does not know the rank."""
    torch.manual_seed(args.seed)
    shift = args.center * init.gelu_mean(1.0 if args.init in ("default", "skipless") else args.alpha_u ** 0.5)      # the mean for the spread that fc1 starts with
    shape = dict(vocab_size=vocab_size, block_size=args.block_size, embed_dim=args.embed_dim, depth=args.depth, num_heads=args.num_heads, mlp_ratio=args.mlp_ratio,
                 shortcut=args.shortcut, temperature_beta=args.temperature_beta, alpha_min=args.alpha_min, attention_scale=args.attention_scale, shift=shift)
    try:
        raw = LM(**shape)
        if args.init == "default":
            return raw, shape, "default: normal, std .02"
        if args.init == "skipless":
            init.init_skipless_vit(raw, args.alpha, args.beta, args.c)
            return raw, shape, f"skipless: alpha {args.alpha:g}, beta {args.beta:g}, c {args.c:g}"
        init.init_residual_free_lm(raw, args.alpha_qk, args.alpha_vo, args.alpha_u, args.alpha_d, args.mlp_init)
    except ValueError as error:                                  # the model's own sentence on a size that does not fit
        raise BadInput(str(error)) from error
    return raw, shape, f"{args.init}: alpha_qk {args.alpha_qk:.3g}, alpha_vo {args.alpha_vo:.3g}, alpha_u {args.alpha_u:.3g}, alpha_d {args.alpha_d:.3g}, MLP {args.mlp_init}"


@torch.no_grad()
def evaluate(model, tokens, args, world, dtype):
    """(loss in nats per token, excess kurtosis of each block's output) on the validation tokens: strided over ranks, no padding, SUM then divide.

    The kurtosis is rank 0's share only: a statistic to watch, which `quantize.py` measures in full."""
    model.eval()
    loss, count = 0.0, 0
    with quantize.watch(model, sites=("block_output",)) as stats:
        for x, y in text.eval_batches(tokens, args.block_size, args.micro_batch, world.rank, world.size, -(-args.eval_tokens // args.block_size)):
            x, y = x.to(world.device), y.to(world.device)
            with runtime.autocast(world.device, dtype):
                logits = model(x)
            loss, count = loss + F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum").double(), count + y.numel()
    model.train()
    loss, count = runtime.all_sum([loss, count], world)
    return loss / count, [m.excess_kurtosis for m in stats["block_output"]]


@torch.no_grad()
def isometry_drift(model):
    """Mean over the blocks' matrices of |W W^T - s I|_F / (s sqrt(n)), s the mean squared singular value: 0 for scaled orthogonal weights.

    Paper 2: a sign-like update (AdamW) drifts as lr sqrt(d), a spectral one (KL-Shampoo, SOAP, Muon) as lr. q, k, v are taken one by one."""
    drifts = []
    for block in model.blocks:
        for w in (*block.attn.qkv.weight.chunk(3), block.attn.proj.weight, block.mlp.fc1.weight, block.mlp.fc2.weight):
            w = w.float() if len(w) <= w.shape[1] else w.float().T                      # the side that can be orthonormal
            gram = w @ w.T
            gram /= gram.diagonal().mean()
            drifts.append((gram.square().sum() / len(gram) - 1).clamp(min=0).sqrt())    # |G - I|_F^2 / n, since tr G = n
    return torch.stack(drifts).mean().item()


def flops_per_token(model):
    """Of a training step: 6 per weight that multiplies (the embedding does as the head), and 12 depth width context for attention (Chowdhery et al. 2022)."""
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    return 6 * weights + 12 * len(model.blocks) * model.token_embed.embedding_dim * model.block_size


def sample(model, tokenizer, args, world, step):
    """A text of args.sample_tokens tokens after the prompt: the same draw at the same step, apart from the weights."""
    generator = torch.Generator(world.device).manual_seed(runtime.mix_seed(args.seed, "sample", step))
    prompt = [tokenizer.separator] + tokenizer.encode(args.prompt)
    out = model.generate(torch.tensor([prompt], device=world.device), args.sample_tokens, temperature=0.8, top_k=50, generator=generator)
    return tokenizer.decode(out[0, 1:].tolist())


def main(argv=None):
    args = get_args(argv)
    world = runtime.start(args.device, args.threads)
    dtype, why = runtime.pick_dtype(args.dtype, world.device)
    micro_steps = runtime.split_batch(args, world)

    # data, model, optimizer
    corpus = text.load_text(args.data, args.tokenizer)
    args.tokenizer = corpus.tokenizer.name
    text.windows_per_epoch(corpus.train, args.block_size)        # a text shorter than the context is said before a model is built,
    text.eval_batches(corpus.val, args.block_size, args.micro_batch)      # one without validation part too
    steps, eval_every, save_every = args.steps, args.eval_every or args.steps, args.save_every or args.steps
    raw, shape, init_line = build_model(args, corpus.tokenizer.vocab_size)
    raw.to(world.device)
    ema = copy.deepcopy(raw).requires_grad_(False) if args.ema else None
    optimizer = optim.build_optimizer(raw, args.opt, args.lr, args.weight_decay, aux_lr=args.embed_lr, **runtime.matrix_options(args))

    # resume, before anything is written
    ckpt, saved = runtime.find_checkpoint(args.out, args.resume, "train_tokens")
    flags = dict(vars(args), lm=shape, tokenizer_digest=corpus.tokenizer.digest, train_tokens=len(corpus.train))
    step, best, val_loss, notes = 0, float("inf"), None, []
    if saved:
        notes = runtime.check_resume(ckpt, saved["args"], flags, FIXED, FREE)
        if saved["args"]["train_tokens"] != len(corpus.train):   # a folder may move, but not change
            raise BadInput(f"--data {args.data} has {len(corpus.train)} training tokens, but {ckpt} was trained on {saved['args']['data']} with "
                           f"{saved['args']['train_tokens']}: pass the same data, --fresh to start over, or another --out")
        step, best = runtime.restore(ckpt, saved, raw, ema, optimizer, steps, notes)
    batches = text.train_batches(corpus.train, args.block_size, args.batch_size, args.seed, step, steps, world.rank, world.size, micro_steps)
    if args.wandb:
        runtime.import_optional("wandb", "--wandb")
    runtime.make_out(args.out, flags, world)
    if world.main and not step:                                  # --fresh: the old checkpoint goes with the old log, or a later resume would find it
        ckpt.unlink(missing_ok=True)
    log = runtime.Log(args.out, world, step, args.wandb, flags)

    per_step = args.batch_size * args.block_size
    peak = runtime.matmul_rate(world.device, dtype) * world.size
    log.say(f"config      {' '.join(f'{k}={v}' for k, v in sorted(flags.items()))}")
    log.say(f"versions    revision {runtime.git_revision()}, torch {torch.__version__}, python {sys.version.split()[0]}")
    log.say(f"device      {world.why}; {world.size} process(es) x {torch.get_num_threads()} threads; {dtype} ({why}); measured {peak / 1e9:.0f} GFLOP/s, MFU is a share of that")
    log.say(f"data        {args.data}: {len(corpus.train):,} training and {len(corpus.val):,} validation tokens, {args.tokenizer} ({corpus.tokenizer.vocab_size:,})")
    log.say(f"model       {sum(p.numel() for p in raw.parameters()) / 1e6:.2f} M parameters, {args.shortcut}, init {init_line}")
    log.say(f"optimizer   {optim.describe(optimizer)}".replace("\n", "\n            "))
    log.say(f"batch       {args.batch_size} = {world.size} processes x {micro_steps} micro-steps x {args.micro_batch} sequences of {args.block_size}: {per_step:,} tokens; "
            f"{steps} steps, {steps * per_step / len(corpus.train):.2f} epochs")
    for note in notes:
        log.say(f"note        {note} from here on")
    if step:
        log.say(f"resume      {ckpt}, step {step}, lr {runtime.lr_at(step, steps, args.warmup, args.lr):.3g}")

    model = torch.compile(raw) if args.compile else raw
    if world.size > 1:
        model = DistributedDataParallel(model, device_ids=[world.device.index] if world.device.type == "cuda" else None)
    bar = tqdm(total=steps, initial=step, disable=not (world.main and sys.stdout.isatty()), unit="step", dynamic_ncols=True)
    window, clock = [], time.perf_counter()

    while step < steps:
        lr = runtime.lr_at(step, steps, args.warmup, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        loss = 0.0
        for micro in range(micro_steps):
            x, y = next(batches)
            x, y = x.to(world.device, non_blocking=True), y.to(world.device, non_blocking=True)
            # gradients are exchanged once, with the last micro-batch; the switch must cover forward and backward
            last = micro == micro_steps - 1
            with nullcontext() if last or world.size == 1 else model.no_sync():
                with runtime.autocast(world.device, dtype):
                    logits = model(x)
                part = F.cross_entropy(logits.float().flatten(0, 1), y.flatten()) / micro_steps   # a mean of means: same as one big batch
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
                average.lerp_(p.detach(), 1 - args.ema)
        step += 1
        bar.update()

        eval_now = step % eval_every == 0 or step == steps
        save_now = step % save_every == 0 or step == steps
        if step % args.log_every == 0 or eval_now or save_now:
            mean, norm = runtime.check_finite(window, world)     # before anything is saved
            rate = len(window) * per_step / (time.perf_counter() - clock)
            mfu = rate * flops_per_token(raw) / peak
            log.line(f"step {step:6d}  loss {mean:.4f}  lr {lr:.2e}  grad norm {norm:.2f}  {rate:.0f} tokens/s  MFU {100 * mfu:.0f} %",
                     step=step, epoch=step * per_step / len(corpus.train), loss=mean, lr=lr, grad_norm=norm, tokens_per_s=rate, mfu=mfu)
            if eval_now:
                val_loss, kurtosis = evaluate(ema or raw, corpus.val, args, world, dtype)
                runtime.check_val(val_loss, step, lr)
                best, drift = min(best, val_loss), isometry_drift(raw)
                written = sample(ema or raw, corpus.tokenizer, args, world, step) if args.sample_tokens and world.main else None
                log.line(f"step {step:6d}  val loss {val_loss:.4f}  excess kurtosis {kurtosis[0]:.2f} .. {kurtosis[-1]:.2f}, max {max(kurtosis):.2f}  "
                         f"isometry drift {drift:.3f}" + " (ema)" * bool(ema) + (f"\n{json.dumps(written, ensure_ascii=False)}" if written else ""),
                         step=step, val_loss=val_loss, kurtosis=kurtosis, kurtosis_max=max(kurtosis), isometry_drift=drift, sample=written)
            if save_now:                                         # on all ranks: each holds a share of the optimizer's state
                runtime.save_checkpoint(ckpt, dict(model=raw.state_dict(), ema=ema and ema.state_dict(), optimizer=optimizer.state_dict(),
                                                   step=step, best=best, rng=torch.get_rng_state(), args=flags), world.main)
            window, clock = [], time.perf_counter()
    bar.close()

    if val_loss is None:                                         # resumed at its end: nothing was left to train
        val_loss, _ = evaluate(ema or raw, corpus.val, args, world, dtype)
    if world.main:
        runtime.plot_curve(args.out, f"LM {args.embed_dim} x {args.depth}, {args.shortcut}, init {args.init}, {args.opt}", "kurtosis_max", "largest excess kurtosis", 2)
    log.say(f"{args.out}: ckpt.pt, log.jsonl, args.json, curve.png; best val loss {best:.4f}")
    log.say(f"val loss {val_loss:.4f}")


if __name__ == "__main__":
    runtime.run(main)
