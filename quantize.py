"""Activation statistics and low-bit quantisation of language models (paper 2): residual-free nets keep near-Gaussian activations, so the plainest
quantiser works on them, one uniform grid per tensor, and breaks residual nets.

    python quantize.py --ckpt out/lm-residual/ckpt.pt out/lm-skipless/ckpt.pt          loss at W8A12, W8A8, W8A6, W8A4; kurtosis; SQNR
    python quantize.py --ckpt out/lm-skipless/ckpt.pt --weight-bits 4 --weight-rounding gptq       weights rounded with compensated errors
    python quantize.py --theory                                                        the paper's formulas, measured; needs no checkpoint

What the paper leaves open is a flag, and the table names it: symmetric abs-max grid (--asymmetric), one dynamic scale per tensor for activations
and weights (--act-granularity token, --weight-granularity channel), each weight to the nearest level (--weight-rounding gptq), at the input of every
Linear of the blocks; embedding and head stay as they are.
"""
import argparse
import contextlib
import copy
import json
import math
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import runtime
import text
from model import LM
from runtime import BadInput

# site -> (module inside the block, whether its input or its output is looked at); "" is the block itself
SITES = {"block_input": ("", "input"), "attn_input": ("attn.qkv", "input"), "attn_context": ("attn.proj", "input"), "attn_out": ("attn", "output"),
         "mlp_input": ("mlp.fc1", "input"), "mlp_hidden": ("mlp.fc2", "input"), "mlp_out": ("mlp", "output"), "block_output": ("", "output")}
LINEAR_INPUTS = ("attn_input", "attn_context", "mlp_input", "mlp_hidden")      # what W8A8 quantises: the inputs of qkv, proj, fc1, fc2
SQNR_BITS = (4, 6, 8, 12)

# ---------------------------------------------------------------------------------------------------------------------
# statistics

class Moments:
    """Streaming moments of all the values that pass through `update`, pooled over every axis: a handful of numbers, however many batches.

    In float64 on the values' own device (on the CPU for mps, which has none), merged batch by batch: see `combine`. bits: also the SQNR of
    fake_quantize(x, b, granularity, symmetric) for each b, every batch with its own scale.
    """

    def __init__(self, bits=(), granularity="tensor", symmetric=True):
        self.sums = 0, 0.0, 0.0, 0.0, 0.0                                      # count, mean, sums of (x - mean)^2, ^3, ^4; 0-d tensors later
        self.low, self.high = torch.tensor(math.inf, dtype=torch.float64), torch.tensor(-math.inf, dtype=torch.float64)
        self.noise = dict.fromkeys(bits, 0.0)                                  # bits -> sum of (x - x_hat)^2
        self.granularity, self.symmetric = granularity, symmetric

    @torch.no_grad()
    def update(self, x):
        x = _has_double(x)
        size = 2 ** 17 if x.device.type == "cpu" else 2 ** 24                   # values turned to float64 at a time: what a cache holds
        for b in self.noise if x.numel() else ():
            x_hat = fake_quantize(x, b, self.granularity, self.symmetric)
            for part, rounded in zip(x.flatten().split(size), x_hat.flatten().split(size)):
                self.noise[b] = self.noise[b] + (part.double() - rounded.double()).square().sum()
        for part in x.flatten().split(size) if x.numel() else ():
            part = part.double()
            low, high = part.aminmax()
            self.sums = combine(self.sums, central_sums(part))
            self.low, self.high = torch.minimum(self.low.to(low.device), low), torch.maximum(self.high.to(high.device), high)

    @property
    def count(self):
        return self.sums[0]

    @property
    def mean(self):
        return float(self.sums[1]) if self.count else math.nan

    @property
    def variance(self):
        """Of the population (divided by n); nan when nothing was seen."""
        return float(self.sums[2]) / self.count if self.count else math.nan

    @property
    def excess_kurtosis(self):
        """E(x - mu)^4 / Var^2 - 3: 0 for a Gaussian, 3.08 for GELU of one. nan where it is undefined: all values equal, or none seen."""
        if not self.count or float(self.low) == float(self.high):              # by the extremes, as rounding of the mean leaves a variance above 0
            return math.nan
        return float(self.sums[4]) / self.count / self.variance ** 2 - 3

    @property
    def max_abs(self):
        return max(-float(self.low), float(self.high)) if self.count else math.nan

    @property
    def power(self):
        """Sum of x^2."""
        return self.count * (self.variance + self.mean ** 2) if self.count else 0.0

    @property
    def crest(self):
        """max |x| / root mean square: what an abs-max grid pays for outliers. For mean 0 its square is at least the kurtosis + 3. nan for zeros."""
        return self.max_abs / math.sqrt(self.power / self.count) if self.power else math.nan

    def sqnr_db(self, bits):
        """10 log10(sum x^2 / sum (x - x_hat)^2) over all batches, decibels."""
        return _decibel(self.power, float(self.noise[bits]))

    def summary(self):
        """A dict of plain numbers, for JSON."""
        return dict({k: getattr(self, k) for k in ("count", "mean", "variance", "excess_kurtosis", "max_abs", "crest")},
                    sqnr_db={b: self.sqnr_db(b) for b in self.noise})


def central_sums(x):
    """x (n,) -> (n, mean, sum of (x - mean)^2, ^3, ^4) in float64."""
    x = x.double()
    mean = x.mean()
    d = x - mean
    d2 = d * d
    return len(x), mean, d2.sum(), (d2 * d).sum(), d2.square_().sum()


def combine(first, second):
    """The central sums of two sets from those of each (Chan et al. 1979, Pebay 2008): sums of plain powers, which cancel far from 0, never form."""
    (a, mean, *A), (b, mean_b, *B) = first, second
    n = max(1, a + b)
    t = mean_b - mean
    return (a + b, mean + t * (b / n), A[0] + B[0] + t ** 2 * (a * b / n),
            A[1] + B[1] + t ** 3 * (a * b * (a - b) / n ** 2) + 3 * t * (a * B[0] - b * A[0]) / n,
            A[2] + B[2] + t ** 4 * (a * b * (a * a - a * b + b * b) / n ** 3) + 6 * t ** 2 * (a * a * B[0] + b * b * A[0]) / n ** 2
            + 4 * t * (a * B[1] - b * A[1]) / n)


def excess_kurtosis(x):
    """Of one tensor, over all its values; nan where they are all equal."""
    moments = Moments()
    moments.update(x)
    return moments.excess_kurtosis


def sqnr_db(x, x_hat):
    """Signal to quantisation noise, 10 log10(|x|^2 / |x - x_hat|^2), decibels, in float64; inf where the two are equal."""
    x, x_hat = _has_double(x).double(), _has_double(x_hat).double()
    return _decibel(float(x.square().sum()), float((x - x_hat).square().sum()))


def _has_double(x):
    return x.detach().cpu() if x.device.type == "mps" else x.detach()


def _decibel(signal, noise):
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf            # nan stays nan


@contextlib.contextmanager
def watch(model, sites=tuple(SITES), bits=(), granularity="tensor", symmetric=True):
    """Fill {site: [one Moments per block]} with everything that passes through model.blocks inside the `with`; the hooks go at its end.

    with watch(model, ("block_output",)) as stats: model(tokens)
    stats["block_output"][7].excess_kurtosis, and with bits=(8,): stats["mlp_hidden"][7].sqnr_db(8).
    sites: keys of SITES. Watch the model itself, not its torch.compile'd form. Each rank sees its own share.
    """
    unknown = set(sites) - set(SITES)
    if unknown:
        raise ValueError(f"site {sorted(unknown)[0]!r} is unknown: use {', '.join(SITES)}")
    blocks = list(model.blocks)
    stats = {site: [Moments(bits, granularity, symmetric) for _ in blocks] for site in sites}
    hooks = []
    try:
        for site in sites:
            path, side = SITES[site]
            for block, moments in zip(blocks, stats[site]):
                module = block.get_submodule(path)
                if side == "input":
                    hooks.append(module.register_forward_pre_hook(lambda module, inputs, moments=moments: moments.update(inputs[0])))
                else:
                    hooks.append(module.register_forward_hook(lambda module, inputs, output, moments=moments: moments.update(output)))
        yield stats
    finally:
        for hook in hooks:
            hook.remove()


# ---------------------------------------------------------------------------------------------------------------------
# the quantiser

def integers(x, bits, granularity="tensor", symmetric=True):
    """The integer codes of x and what maps them back: (q, scale, low) with x_hat = q * scale + low. All three in float32 (float64 for float64 input).

    symmetric: q in -(2^(b-1) - 1) .. 2^(b-1) - 1, scale = max|x| / (2^(b-1) - 1), low = 0; the grid is its own mirror image and 0 stays 0.
    else: q in 0 .. 2^b - 1, scale = (max - min) / (2^b - 1), low = min; the zero point is the real number -low / scale, so min and max are
    exact (and 0 is not). granularity: "tensor", one scale for all of x; "token" or "channel", one per row of the last axis: a token where
    x is (..., tokens, channels), an output channel where x is a weight (out, in). The two are one reduction under two names.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))                      # scales in bf16 would lose the accuracy of 8 bits
    levels = grid(x, bits, granularity, symmetric)
    return encode(x, *levels), *levels[:2]


def grid(x, bits, granularity, symmetric):
    """(scale, low, least code, greatest code) of `integers`."""
    if not (isinstance(bits, int) and 2 <= bits <= 16):
        raise ValueError(f"bits {bits} must be an integer from 2 to 16")
    if granularity not in ("tensor", "token", "channel"):
        raise ValueError(f"granularity {granularity!r} is unknown: use tensor, token or channel")
    axis = {} if granularity == "tensor" else dict(dim=-1, keepdim=True)
    low, high = x.aminmax(**axis)
    levels = 2 ** (bits - 1) - 1 if symmetric else 2 ** bits - 1
    span = torch.maximum(high, -low) if symmetric else high - low
    low = torch.zeros_like(low) if symmetric else low
    scale = (span / levels).clamp(min=torch.finfo(torch.float32).tiny)         # a constant tensor has no span: do not divide by 0
    return scale, low, -levels if symmetric else 0, levels


def encode(x, scale, low, least, greatest):
    return ((x - low) / scale).round().clamp(least, greatest)


def fake_quantize(x, bits, granularity="tensor", symmetric=True):
    """x rounded to the grid of `integers`, in x's dtype. Dynamic: the scale is that of the x that arrives.

    bits 2..16; granularity "tensor", "token" or "channel". Halves round to even. A NaN or inf in x makes everything that shares its scale NaN.
    The result is rounded once more where x is bf16, whose 8 significant bits cannot hold a 12-bit grid.
    """
    if not x.numel():
        return x
    q, scale, low = integers(x, bits, granularity, symmetric)
    return (q * scale + low).to(x.dtype)


class QuantLinear(nn.Module):
    """A Linear whose weight is fake-quantised once and whose input is fake-quantised as it comes; bits None leaves either as it is.

    With act_granularity "tensor" one scale serves the whole input (batch, tokens, channels): the result for a text then depends on the
    texts beside it, so a table must say the batch size it was measured with. With "token" it does not. codes: the weight's (q, scale, low),
    instead of its own rounding to nearest.
    """

    def __init__(self, linear, weight_bits, act_bits, act_granularity="tensor", weight_granularity="tensor", symmetric=True, codes=None):
        super().__init__()
        self.act = act_bits, act_granularity, symmetric
        self.weight, self.bias = linear.weight, linear.bias
        if codes is not None:
            q, scale, low = codes
            self.weight = nn.Parameter((q * scale + low).to(linear.weight.dtype), requires_grad=False)
        elif weight_bits is not None:                                          # a new Parameter: the old one may be tied to the embedding
            self.weight = nn.Parameter(fake_quantize(linear.weight.detach(), weight_bits, weight_granularity, symmetric), requires_grad=False)

    def forward(self, x):
        return F.linear(x if self.act[0] is None else fake_quantize(x, *self.act), self.weight, self.bias)


class Int8Linear(nn.Module):
    """W8A8 as integer hardware does it: int8 weight and input, int32 sums, one float32 multiplication by the two scales. Symmetric only.

    Equals QuantLinear(linear, 8, 8) up to float32 rounding of the sums, which here are exact."""

    def __init__(self, linear, act_granularity="tensor", weight_granularity="tensor", codes=None):
        super().__init__()
        q, scale, _ = codes or integers(linear.weight.detach(), 8, weight_granularity)
        self.register_buffer("weight", q.to(torch.int8))
        self.register_buffer("scale", scale.float().flatten())                 # (1,) or (out,)
        self.bias, self.act_granularity = linear.bias, act_granularity

    def forward(self, x):
        q, scale, _ = integers(x, 8, self.act_granularity)
        sums = int8_linear(q.to(torch.int8).flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
        y = sums.float() * (scale.float() * self.scale)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def int8_linear(a, weight):
    """a (m, k), weight (n, k), both int8 within -127..127 -> a weight^T (m, n), int32 and exact.

    torch._int_mm on CPU and CUDA, where it wants m > 16 and k, n multiples of 8: zeros are added, which changes no sum. Elsewhere (mps) float32
    products of 1024 terms at a time, exact as 1024 * 127^2 < 2^24, added in int32.
    """
    m, n, k = len(a), *weight.shape
    if a.device.type in ("cpu", "cuda"):
        a, weight = F.pad(a, (0, -k % 8, 0, max(-m % 8, 24 - m))), F.pad(weight, (0, -k % 8, 0, -n % 8))
        return torch._int_mm(a, weight.T)[:m, :n]
    return _blocked_linear(a, weight)


def _blocked_linear(a, weight):
    with torch.autocast(a.device.type, enabled=False):                         # bf16 would round the sums
        return sum((x.float() @ w.float().T).to(torch.int32) for x, w in zip(a.split(1024, 1), weight.split(1024, 1)))


def quantized(model, weight_bits=8, act_bits=8, act_granularity="tensor", weight_granularity="tensor", symmetric=True,
              head=False, embedding=False, int8=False, codes=None):
    """A deep copy of an LM, for evaluation, whose Linears inside .blocks quantise their weight and their input; the original is left alone.

    bits None leaves weights or activations as they are. head: also the output projection (weight and input). embedding: also the token embedding's
    table. The two share one matrix in the model; in the copy each keeps or quantises it on its own. int8: real int8 arithmetic, see `Int8Linear`.
    codes: the blocks' weights as `compensated` rounded them to weight_bits; None rounds to nearest, as head and embedding always are.
    """
    if int8 and not (weight_bits == act_bits == 8 and symmetric):
        raise ValueError("int8 arithmetic is for 8-bit weights and activations on the symmetric grid: leave int8 out")
    net = copy.deepcopy(model).eval().requires_grad_(False)

    def convert(linear, codes=None):
        if int8:
            return Int8Linear(linear, act_granularity, weight_granularity, codes)
        return QuantLinear(linear, weight_bits, act_bits, act_granularity, weight_granularity, symmetric, codes)

    for path, parent in list(net.blocks.named_modules(prefix="blocks")):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, convert(child, codes and codes[f"{path}.{name}"]))
    if head:
        net.head = convert(net.head)
    if embedding and weight_bits is not None:
        table = fake_quantize(net.token_embed.weight, weight_bits, weight_granularity, symmetric)
        net.token_embed.weight = nn.Parameter(table, requires_grad=False)
    return net


# ---------------------------------------------------------------------------------------------------------------------
# rounding with compensated errors (GPTQ, Frantar et al. 2023)

def compensated_integers(weight, H, bits, granularity="tensor", symmetric=True, damping=0.01, block=128):
    """The codes of `integers` for a weight W (out, in) on the same grid, chosen so that its outputs, not its entries, stay close.

    H (in, in) = 2 X^T X of the layer's inputs X (tokens, in), so that ||X (W - W_hat)^T||^2 = tr (W - W_hat) H (W - W_hat)^T / 2. Columns are
    rounded one by one. Once column i has its error w_i - w_hat_i, the columns j > i that make good for it best are W_j - e U_ij with
    e = (w_i - w_hat_i) / U_ii and U the upper Cholesky factor of the inverse, H^-1 = U^T U: row i of U holds what eliminating the columns before i
    leaves of H^-1. damping: share of H's mean diagonal added to it. block: columns within which errors are spread one at a time, and behind which
    in one product; it changes the speed only. In float64. Raises ValueError where H is not finite.
    """
    weight, H = _has_double(weight), _has_double(H).double()
    if not H.isfinite().all():
        raise ValueError("the inputs' second moments are not finite: round to nearest")
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    scale, low, *_ = levels = grid(weight, bits, granularity, symmetric)
    W, q = weight.double().clone(), torch.empty_like(weight)
    H = H + torch.eye(len(H), dtype=H.dtype, device=H.device) * (damping * float(H.diagonal().mean()) or 1.0)      # 1 where all inputs were 0
    U = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)
    for start in range(0, len(H), block):
        stop = min(start + block, len(H))
        E = torch.empty_like(W[:, start:stop])
        for i in range(start, stop):
            q[:, i:i + 1] = encode(W[:, i:i + 1].to(q.dtype), *levels)         # rounded as `integers` does it: the same where nothing is spread
            E[:, i - start] = (W[:, i] - (q[:, i:i + 1] * scale + low)[:, 0]) / U[i, i]
            W[:, i + 1:stop].addr_(E[:, i - start], U[i, i + 1:stop], alpha=-1)
        W[:, stop:] -= E @ U[start:stop, stop:]
    return q, scale, low


@torch.no_grad()
def compensated(model, batches, bits, granularity="tensor", symmetric=True, embedding=False, dtype=torch.float32):
    """{name of each Linear in the blocks: its `compensated_integers`}, for `quantized`, from calibration tokens: an iterable of (B, N).

    One Linear after the other, each with the inputs that the Linears before it give once they are rounded, as in the paper; the activations are not
    quantised there. The paper gathers a block's four at once, in the block as it was. embedding: whether its table is rounded too.
    """
    net, codes = quantized(model, bits, None, weight_granularity=granularity, symmetric=symmetric, embedding=embedding), {}
    device = net.token_embed.weight.device
    inputs = [net.token_embed(tokens.to(device)) for tokens in batches]

    def run(block):
        with runtime.autocast(device, dtype):
            return [block(x, net.rope(0, x.shape[1])) for x in inputs]

    for l, block in enumerate(net.blocks):
        for path, module in block.named_modules():                             # in the order in which they are run
            if isinstance(module, QuantLinear):
                H, name = [], f"blocks.{l}.{path}"
                hook = module.register_forward_pre_hook(lambda module, arguments: H.append(second_moments(arguments[0])))
                run(block)
                hook.remove()
                weight = model.get_submodule(name).weight.detach()
                codes[name] = tuple(t.to(device) for t in compensated_integers(weight, sum(H), bits, granularity, symmetric))
                q, scale, low = codes[name]
                module.weight.copy_(q * scale + low)
        inputs = run(block)
    return codes


def second_moments(x):
    """2 X^T X (D, D) of x (..., D), in float64."""
    x = _has_double(x).double().flatten(0, -2)
    return 2 * x.T @ x


# ---------------------------------------------------------------------------------------------------------------------
# evaluation

@torch.no_grad()
def evaluate(model, batches, device="cpu", dtype=torch.float32):
    """(loss in nats per token, perplexity) over batches of (tokens, next tokens), each (B, N). The cross-entropy is in float32 whatever dtype is."""
    device, training = torch.device(device), model.training
    model.eval()
    loss, count = 0.0, 0
    for x, y in batches:
        with runtime.autocast(device, dtype):
            logits = model(x.to(device))
        loss += F.cross_entropy(logits.float().flatten(0, 1), y.to(device).flatten(), reduction="sum").item()
        count += y.numel()
    model.train(training)
    return loss / count, math.exp(min(loss / count, 700.0))                    # e^710 overflows


def load_model(path, device="cpu", which="auto"):
    """(model.LM in eval mode, its checkpoint) from a checkpoint of train_lm.py; checkpoint["weights"] says which were taken, "ema" or "raw".

    which: "auto" takes the averaged weights where there are some. The optimizer's state is let go. Raises BadInput for any other file.
    """
    remedy = "give the ckpt.pt of a run of train_lm.py"
    checkpoint = runtime.read_checkpoint(path, "--ckpt", remedy)
    if not {"lm", "data", "tokenizer", "tokenizer_digest"} <= set(checkpoint["args"]):
        raise BadInput(f"--ckpt {path} holds no language model: {remedy}")
    ema = checkpoint.get("ema")
    if which == "ema" and ema is None:
        raise BadInput(f"--ckpt {path} has no averaged weights: leave --ema out, or train with --ema")
    del checkpoint["optimizer"]
    checkpoint["weights"] = "raw" if which == "raw" or ema is None else "ema"
    try:
        net = LM(**checkpoint["args"]["lm"])
        net.load_state_dict(checkpoint["model"] if checkpoint["weights"] == "raw" else ema)
    except (TypeError, ValueError, RuntimeError) as error:                     # other arguments, or other shapes
        raise BadInput(f"--ckpt {path} does not fit model.LM of this version: use the version that trained it") from error
    return net.to(device).eval(), checkpoint


def load_data(path, checkpoint, name=None):
    """The TextData to evaluate a checkpoint on: of that name, or its own. Raises BadInput where it is gone, or has another vocabulary."""
    saved = checkpoint["args"]
    try:
        data = text.load_text(name or saved["data"], saved["tokenizer"])
    except BadInput as error:
        if name:
            raise
        raise BadInput(f"--ckpt {path} was trained on {saved['data']}, which cannot be read here: pass --data") from error
    if data.tokenizer.digest != saved["tokenizer_digest"]:
        raise BadInput(f"--ckpt {path} was trained with another vocabulary named {saved['tokenizer']}: use the tokenizer files of its training")
    return data


def measure(path, net, checkpoint, data, args, world, dtype):
    """Everything about one checkpoint, as a dict of plain numbers: what quantize.json holds."""
    saved, net, start = checkpoint["args"], net.to(world.device), time.perf_counter()
    limit = -(-args.eval_tokens // net.block_size)                             # windows, rounded up; 0 is all
    batches = lambda: text.eval_batches(data.val, net.block_size, args.batch_size, limit=limit)
    rows, options = [], dict(act_granularity=args.act_granularity, weight_granularity=args.weight_granularity, symmetric=not args.asymmetric,
                             head=args.head, embedding=args.embedding, int8=args.int8)
    with watch(net, bits=sorted({*SQNR_BITS, *args.bits}), granularity=args.act_granularity, symmetric=options["symmetric"]) as stats:
        full = evaluate(net, batches(), world.device, dtype)
    calibration = None
    if args.weight_rounding == "gptq":                                         # one rounding of the weights serves every row
        windows = [x for x, _ in text.eval_batches(data.train, net.block_size, args.batch_size, limit=-(-args.calibration_tokens // net.block_size))]
        calibration = dict(tokens=sum(x.numel() for x in windows), text=data.train.name)
        try:
            options["codes"] = compensated(net, windows, args.weight_bits, args.weight_granularity, options["symmetric"], args.embedding, dtype)
        except ValueError as error:
            raise BadInput(f"--weight-rounding gptq fails on {path}, whose activations are not finite: use nearest") from error
        print(f"{path}  gptq on {calibration['tokens']:,} tokens of {calibration['text']}  {time.perf_counter() - start:.0f} s", flush=True)
    for bits in (None, *args.bits):
        if bits is None:
            variant, name, (loss, perplexity) = net, str(dtype).removeprefix("torch."), full
        else:
            variant = quantized(net, args.weight_bits, bits, **options)
            name = f"W{args.weight_bits}A{bits}" + " gptq" * (args.weight_rounding == "gptq")
            loss, perplexity = evaluate(variant, batches(), world.device, dtype)
        rows.append(dict(precision=name, act_bits=bits, loss=loss, perplexity=perplexity, delta=loss - full[0]))
        if args.tasks:
            import zeroshot
            rows[-1]["tasks"] = zeroshot.run(variant, data.tokenizer, args.tasks, args.tasks_dir, args.limit, args.batch_size, world.device)
        print(f"{path}  {name:9s} loss {loss:.4f}  perplexity {show(perplexity)}  {time.perf_counter() - start:.0f} s", flush=True)
    outputs, linears = stats["block_output"], [m for site in LINEAR_INPUTS for m in stats[site]]
    middle = max(1, round(len(outputs) * 2 / 3))                               # counted from 1: the paper's layer 16 of 24
    sqnr = [m.sqnr_db(8) for m in linears]
    return dict(path=str(path), weights=checkpoint["weights"], step=checkpoint["step"], data=data.name, shortcut=net.shortcut, opt=saved["opt"],
                init=saved.get("init"), seed=saved.get("seed"), lm=saved["lm"], rows=rows, calibration=calibration, layer=middle,
                kurtosis=outputs[middle - 1].excess_kurtosis, kurtosis_max=largest(m.excess_kurtosis for m in outputs),
                crest_max=largest(m.crest for m in linears), sqnr8_mean=statistics.fmean(sqnr), sqnr8_min=min(sqnr),
                stats={site: [m.summary() for m in layers] for site, layers in stats.items()})


def largest(values):
    return max((v for v in values if not math.isnan(v)), default=math.nan)


# ---------------------------------------------------------------------------------------------------------------------
# tables and figures

def show(value, digits=2, sign=""):
    """A table's cell: - where there is no value; large magnitudes with separators, since kurtosis runs from -1 to 10^5."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:{sign},.0f}" if 1e4 <= abs(value) < math.inf else f"{value:{sign}.{digits}f}"


def markdown(header, rows):
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [header, ["---"] * len(header), *rows]) + "\n"


def main_table(records):
    """Paper 2's main table: one row per precision and checkpoint; the zero-shot tasks, if asked for, in `zeroshot`'s layout below."""
    pairs = [(r, row) for group in zip(*(r["rows"] for r in records)) for r, row in zip(records, group)]
    rows = [[row["precision"], r["name"], show(row["loss"], 4), show(row["perplexity"]), show(row["delta"], 4, "+") if row["act_bits"] else ""]
            for r, row in pairs]
    tables = markdown(["precision", "checkpoint", "val loss", "perplexity", "Δ loss"], rows)
    if "tasks" in pairs[0][1]:
        import zeroshot
        tables += "\n" + zeroshot.table({f"{row['precision']}, {r['name']}": row["tasks"] for r, row in pairs}) + "\n"
    return tables


def ablation_table(records):
    """Paper 2's ablation: what the net is, how Gaussian its activations are, and what 8 bits cost.

    Kurtosis of the blocks' outputs; crest and SQNR of the inputs of all their Linears."""
    header = ["checkpoint", "shortcut", "optimizer", "β", "val loss", "kurtosis at ⅔ depth", "kurtosis, max", "crest, max", "SQNR at 8 bits, mean",
              "min", "Δ loss at A8"]
    rows = []
    for r in records:
        a8 = next((row["delta"] for row in r["rows"] if row["act_bits"] == 8), None)
        depth = len(r["stats"]["block_output"])
        rows.append([r["name"], r["shortcut"], r["opt"], f"{r['lm'].get('temperature_beta', 1):g}", show(r["rows"][0]["loss"], 4),
                     f"{show(r['kurtosis'])} (block {r['layer']} of {depth})", show(r["kurtosis_max"]), show(r["crest_max"], 1),
                     f"{show(r['sqnr8_mean'], 1)} dB", f"{show(r['sqnr8_min'], 1)} dB", show(a8, 4, "+")])
    return markdown(header, rows)


def figures(records, folder):
    """kurtosis_by_depth.png: excess kurtosis of every block's output, on an axis linear within 1 of 0 and logarithmic beyond.
    sqnr_by_bits.png: mean over the inputs of the blocks' Linears, range shaded, beside a Gaussian tensor of a million values (crest 4.9)."""
    plt = runtime.pyplot()
    (depth, left), (sqnr, right) = (plt.subplots(figsize=(6, 3.8), constrained_layout=True) for _ in range(2))
    for r in records:
        values = [s["excess_kurtosis"] for s in r["stats"]["block_output"]]
        left.plot(range(1, len(values) + 1), values, "o-", ms=3, label=r["name"])
        layers = [s["sqnr_db"] for site in LINEAR_INPUTS for s in r["stats"][site]]
        bits = sorted(layers[0])
        values = [[layer[b] for layer in layers] for b in bits]
        line, = right.plot(bits, [statistics.fmean(v) for v in values], "o-", ms=3, label=r["name"])
        right.fill_between(bits, [min(v) for v in values], [max(v) for v in values], alpha=.12, lw=0, color=line.get_color())
    left.axhline(0, color="0.6", lw=.8)
    left.set_yscale("symlog", linthresh=1)
    left.set(xlabel="block", ylabel="excess kurtosis of the output")
    left.xaxis.get_major_locator().set_params(integer=True)
    right.plot(bits, [uniform_sqnr(b, 4.9) for b in bits], ":", color="0.4", label="Gaussian")
    right.set(xlabel="bits", ylabel="SQNR of the Linears' inputs, dB", xticks=bits)
    for figure, axis, name in ((depth, left, "kurtosis_by_depth.png"), (sqnr, right, "sqnr_by_bits.png")):
        axis.grid(alpha=.3)
        axis.legend(frameon=False, fontsize=7)
        figure.savefig(folder / name, dpi=120)
        plt.close(figure)


def uniform_sqnr(bits, crest):
    """SQNR in dB where the noise is uniform within a step: 10 log10(3) + 20 log10(2^b - 1) - 20 log10(max / sigma). Not for a handful of levels."""
    return 10 * math.log10(3) + 20 * math.log10((2 ** bits - 1) / crest)


# ---------------------------------------------------------------------------------------------------------------------
# the paper's theory, measured

def slope(xs, ys):
    """Exponent of the power law through the points: least squares in log-log."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def theory_activation(f, limit=12.0, nodes=200):
    """Excess kurtosis of f(z), z standard normal: Gauss-Legendre quadrature on each side of 0, where ReLU has its kink."""
    t, w = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(nodes))
    z = torch.cat([t - 1, t + 1]) * limit / 2
    p = torch.cat([w, w]) * limit / 2 * torch.exp(-z ** 2 / 2) / math.sqrt(2 * math.pi)
    d = f(z) - (p * f(z)).sum()
    return float((p * d ** 4).sum() / (p * d ** 2).sum() ** 2 - 3)


def laplace(*shape, generator):
    """Independent Laplace variables of unit variance: excess kurtosis 3."""
    a, b = (torch.empty(shape).exponential_(generator=generator) for _ in range(2))
    return (a - b) / math.sqrt(2)


def theory_mixing(d, samples=2 ** 22, seed=0):
    """Dense mixing, y = sum_i a_i x_i with |a| = 1 and d iid Laplace x: (kurtosis measured, by formula, standard error of the measurement).

    The formula is gamma_x sum a_i^4, about 9 / d for a random direction. Up to 256 directions share each draw of x.
    """
    g, k = torch.Generator().manual_seed(seed), min(d, 256)
    a = F.normalize(torch.randn(d, k, generator=g), dim=0)
    parts = [excess_kurtosis(laplace(samples // (16 * k), d, generator=g) @ a) for _ in range(16)]
    return statistics.fmean(parts), 3 * float(a.double().pow(4).sum(0).mean()), statistics.stdev(parts) / 4


def residual_kurtosis(gamma_x, var_x, gamma_f, var_f):
    """Of x + f, independent: fourth cumulants add, (gamma_x s_x^4 + gamma_f s_f^4) / (s_x^2 + s_f^2)^2, so nothing shrinks with the width."""
    return (gamma_x * var_x ** 2 + gamma_f * var_f ** 2) / (var_x + var_f) ** 2


def theory_residual(var_f, samples=2 ** 22, seed=0):
    """x + f with x Laplace of variance 1 and f Gaussian of variance var_f: (kurtosis measured, by formula)."""
    g = torch.Generator().manual_seed(seed)
    return excess_kurtosis(laplace(samples, generator=g) + var_f ** 0.5 * torch.randn(samples, generator=g)), residual_kurtosis(3, 1, 0, var_f)


def theory_softmax(d, std, entries=2 ** 20, seed=0):
    """Excess kurtosis of the entries of softmax rows over d positions, logits normal of this std.

    Smooth rows tend to a log-normal law, whatever d: e^(4 s^2) + 2 e^(3 s^2) + 3 e^(2 s^2) - 6, 5.90 at std .5. One-hot rows (large std), a share
    p = 1 / d of ones, have 1 / (p (1 - p)) - 6, about d.
    """
    logits = std * torch.randn(max(1, entries // d), d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return excess_kurtosis(logits.softmax(-1))


def theory_step(d, eta=1e-4, seed=0):
    """|W W^T - I|_2 after one step of size eta from an orthogonal W (d, d), for a Gaussian gradient G: (sign step, spectral step).

    sign: W - eta sign(G), whose |sign(G)|_2 is about 2 sqrt(d). spectral: W - eta U V^T with G = U S V^T, of norm 1.
    """
    g = torch.Generator().manual_seed(seed)
    W, G = (torch.randn(d, d, generator=g, dtype=torch.float64) for _ in range(2))
    W, (U, _, Vh), eye = torch.linalg.qr(W)[0], torch.linalg.svd(G), torch.eye(d, dtype=torch.float64)
    return tuple(float(torch.linalg.matrix_norm(V @ V.T - eye, 2)) for V in (W - eta * G.sign(), W - eta * U @ Vh))


def theory_report():
    """Print the formulas beside their measurement; about 10 seconds on one core."""
    def table(title, columns, points, f, form=".2f"):
        rows = [f(p) for p in points]
        print(f"## {title}\n\n{markdown(columns, [[p, *(format(v, form) for v in row)] for p, row in zip(points, rows)])}")
        return list(zip(*rows))

    activations = {"GELU": (F.gelu, 3.0847), "ReLU": (F.relu, 2.4076)}
    table("An activation of a Gaussian", ["", "measured", "paper"], list(activations),
          lambda name: (theory_activation(activations[name][0]), activations[name][1]), ".4f")
    dims, steps, eta = [16, 64, 256, 1024, 4096], [16, 32, 64, 128, 256, 512], 1e-4
    measured, *_ = table("Dense mixing of d Laplace inputs contracts kurtosis by sum a^4", ["d", "measured", "formula", "standard error"],
                         dims, theory_mixing, ".4f")
    print(f"slope over d = 16 .. 256: {slope(dims[:3], measured[:3]):.2f} (theory -1)\n")
    table("A residual sum x + f does not: x Laplace (3), f Gaussian (0)", ["var f / var x", "measured", "formula"], [0.01, 0.1, 1], theory_residual, ".3f")
    smooth, hot = table("Softmax rows", ["d", "smooth: logits of std .5", "saturated: std 1000"], dims,
                        lambda d: (theory_softmax(d, .5), theory_softmax(d, 1000)))
    print(f"slopes over d: {slope(dims, smooth):.2f} (theory 0) and {slope(dims, hot):.2f} (theory 1)\n")
    sign, spectral = table(f"|W W^T - I|_2 / eta after one step of size eta = {eta} from an orthogonal W", ["d", "sign step", "spectral step"], steps,
                           lambda d: [distance / eta for distance in theory_step(d, eta)])
    print(f"slopes over d: {slope(steps, sign):.2f} (theory 1/2) and {slope(steps, spectral):.2f} (theory 0)")


# ---------------------------------------------------------------------------------------------------------------------

def get_args(argv=None):
    number = runtime.number
    parser = runtime.Parser(description=__doc__)
    add = parser.add_argument
    add("--ckpt", nargs="+", default=[], help="checkpoints of train_lm.py, shown side by side")
    add("--raw", dest="weights", action="store_const", const="raw", default="auto", help="weights as trained; without it the averaged ones, if any")
    add("--ema", dest="weights", action="store_const", const="ema", default=argparse.SUPPRESS, help="the averaged weights, or an error")
    add("--theory", action="store_true", help="measure the paper's formulas")
    add = parser.add_argument_group("quantiser").add_argument
    add("--bits", type=number(int, low=2, high=16), nargs="+", default=None, help="of the activations, a row each; None is 12 8 6 4, or 8 with --int8")
    add("--weight-bits", type=number(int, low=2, high=16), default=None, help="bits of the weights; None is 8")
    add("--weight-rounding", choices=["nearest", "gptq"], default="nearest",
        help="of the blocks' weights: each to its nearest level, or column by column, with the error made good by the columns that follow")
    add("--calibration-tokens", type=number(int, low=1), default=None,
        help="tokens of the training text, spread evenly, whose activations gptq weighs the errors with; rounded up to whole windows; None is 8192")
    add("--act-granularity", choices=["tensor", "token"], default="tensor", help="one scale for the whole batch, or one per token")
    add("--weight-granularity", choices=["tensor", "channel"], default="tensor", help="one scale per matrix, or one per output channel")
    add("--asymmetric", action="store_true", help="min-max grid for weights and activations, instead of abs-max")
    add("--head", action="store_true", help="also the output projection")
    add("--embedding", action="store_true", help="also the token embedding's table")
    add("--int8", action="store_true", help="W8A8 in real int8 arithmetic instead of rounded floats")
    add = parser.add_argument_group("evaluation").add_argument
    add("--data", default=None, help="text to evaluate on, as for train_lm.py; None is each checkpoint's own")
    add("--eval-tokens", type=number(int, low=0), default=32768, help="validation tokens, spread evenly; 0 is all; as in train_lm.py's laptop preset")
    add("--batch-size", type=number(int, low=1), default=16, help="sequences per forward pass; scales per tensor depend on it")
    add("--tasks", default=None, help="zero-shot tasks, separated by commas, or all")
    add("--tasks-dir", default=None, help="folder of the tasks' items, see zeroshot.py; None downloads the complete sets")
    add("--limit", type=number(int, low=1), default=None, help="questions per task; None is all")
    add = parser.add_argument_group("run").add_argument
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda or mps")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="float32",
        help="arithmetic of the forward pass; bfloat16 (the paper's) cannot hold a 12-bit grid, so the rows then differ by more than the quantiser")
    add("--threads", type=number(int, low=0), default=0, help="CPU threads; 0 leaves torch's choice")
    add("--out", default=None, help="folder for quantize.md, quantize.json and two figures; None is the folder of the first checkpoint")
    args = parser.parse_args(argv)
    if not (args.ckpt or args.theory):
        raise BadInput("there is nothing to do: give --ckpt with checkpoints of train_lm.py, or --theory")
    args.bits = list(dict.fromkeys(args.bits or ([8] if args.int8 else [12, 8, 6, 4])))
    if not args.tasks and (args.tasks_dir or args.limit):
        raise BadInput("--tasks-dir and --limit have no effect without --tasks: give --tasks all, or leave them out")
    if args.weight_rounding == "gptq" and args.weight_bits is None:
        raise BadInput("--weight-rounding gptq is for few bits, and --weight-bits is not given: add --weight-bits 4, or another number")
    if args.weight_rounding == "nearest" and args.calibration_tokens:
        raise BadInput("--calibration-tokens has no effect without --weight-rounding gptq: add it, or leave the tokens out")
    args.weight_bits = args.weight_bits or 8
    args.calibration_tokens = args.calibration_tokens or (8192 if args.weight_rounding == "gptq" else None)
    if args.int8 and (args.bits != [8] or args.weight_bits != 8 or args.asymmetric):
        raise BadInput("--int8 is for --bits 8 and --weight-bits 8 on the symmetric grid: leave the other flags out, or --int8")
    return args


def describe(args, dtype, records):
    """What the tables were measured with, in words: without the granularity a table of W8A8 says little."""
    scale = "token" if args.act_granularity == "token" else f"tensor, over a batch of {args.batch_size} sequences"
    where = "every Linear of the blocks" + " and of the head" * args.head
    state = lambda flag: "quantised" if flag else "as it is"
    rounding = "rounded to nearest" if args.weight_rounding == "nearest" else "those of the blocks rounded by GPTQ, calibrated on " + "; ".join(
        dict.fromkeys(f"{r['calibration']['tokens']} tokens of {r['calibration']['text']}" for r in records))
    return (f"Weights: {args.weight_bits} bits, one scale per {args.weight_granularity}, {rounding}. "
            f"Activations: dynamic, one scale per {scale}, at the input of {where}. "
            f"{'Asymmetric min-max' if args.asymmetric else 'Symmetric abs-max'} grid, {'int8 arithmetic' if args.int8 else 'rounded floats'}. "
            f"Embedding {state(args.embedding)}, head {state(args.head)}. Text: {', '.join(dict.fromkeys(r['data'] for r in records))}, "
            f"{f'up to {args.eval_tokens}' if args.eval_tokens else 'all'} validation tokens; {str(dtype).removeprefix('torch.')}.")


def main(argv=None):
    args = get_args(argv)
    world = runtime.start(args.device, args.threads)
    if world.size > 1:
        raise BadInput("quantize.py is one process: start it without torchrun")
    dtype, why = runtime.pick_dtype(args.dtype, world.device)
    loaded = [load_model(path, which=args.weights) for path in args.ckpt]      # all of them, so that a wrong last one is said at once,
    loaded = [(*pair, load_data(path, pair[1], args.data)) for path, pair in zip(args.ckpt, loaded)]
    for _, _, data in loaded:
        if (args.calibration_tokens or 0) > len(data.train):
            raise BadInput(f"--calibration-tokens {args.calibration_tokens} is more than the {len(data.train)} of {data.train.name}: lower it")
    if args.tasks:                                                             # and wrong tasks or a missing package too
        import zeroshot
        zeroshot.chosen(args.tasks, args.tasks_dir)
        zeroshot.harness()
    if args.theory:
        theory_report()
    if not loaded:
        return
    folder = Path(args.out or Path(args.ckpt[0]).parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {folder} cannot be written ({error.strerror}): choose a folder that can") from error
    print(f"device {world.why}; {dtype}, {why}", flush=True)
    records = [measure(path, *parts, args, world, dtype) for path, parts in zip(args.ckpt, loaded)]
    names = [Path(path).parent.name for path in args.ckpt]
    for record, name in zip(records, names):
        record["name"] = (name if name and names.count(name) == 1 else record["path"]) + " (ema)" * (record["weights"] == "ema")
    report = f"{describe(args, dtype, records)}\n\n{main_table(records)}\n{ablation_table(records)}"
    results = runtime.finite(dict(args=vars(args), device=str(world.device), torch=torch.__version__, checkpoints=records))
    print(f"\n{report}")                                                       # first of all: a folder that cannot be written must not lose it
    try:
        (folder / "quantize.json").write_text(json.dumps(results, indent=1) + "\n")
        (folder / "quantize.md").write_text(report)
        figures(records, folder)
    except OSError as error:
        raise BadInput(f"--out {folder} cannot be written ({error.strerror}): choose a folder that can") from error
    print(f"{folder}: quantize.md, quantize.json, kurtosis_by_depth.png, sqnr_by_bits.png")


if __name__ == "__main__":
    runtime.run(main)
