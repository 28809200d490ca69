"""How Gaussian are a net's activations, and what do few bits cost it? (paper 2)

Residual-free nets keep their activations near a Gaussian. So the plainest quantiser works on them: one
uniform grid for a whole tensor. Residual nets have outliers, which stretch that grid.

    python quantize.py --ckpt out/lm-residual out/lm-skipless     loss at W8A12 .. W8A4, kurtosis, SQNR
    python quantize.py --ckpt out/lm-skipless --weight-bits 4 --weight-rounding gptq

`watch` and `quantized` take any net with Linear layers, for instance your own in a notebook:

    with quantize.watch(net) as stats: net(x)
    print({name: moments.excess_kurtosis for name, moments in stats.items()})
    print(quantize.sqnr_db(net(x), quantize.quantized(net, weight_bits=8, act_bits=8)(x)))

What the paper leaves open is a flag, and the tables name it. By default the grid is symmetric, up to
the largest magnitude; activations and weights have one scale per tensor; each weight goes to its
nearest level; every Linear of the blocks is quantised, embedding and head are not.
"""
import contextlib
import copy
import json
import math
import statistics
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

import runtime
import text
from model import LM
from runtime import BadInput

# -------------------------------------------------------------------------------------------------------
# statistics of activations

def excess_kurtosis(x):
    """E(x - mu)^4 / Var(x)^2 - 3 over all values of x: 0 for a Gaussian. nan where all are equal."""
    moments = Moments()
    moments.update(x)
    return moments.excess_kurtosis


def sqnr_db(x, x_hat):
    """Signal to quantisation noise, 10 log10(|x|^2 / |x - x_hat|^2) decibels; inf without noise."""
    x, x_hat = to_float64(x), to_float64(x_hat)
    return decibels(float(x.square().sum()), float((x - x_hat).square().sum()))


class Moments:
    """Statistics of all values that pass through `update`, pooled over axes and batches, in float64.

    It holds a few numbers, however many batches come. bits: also the SQNR of
    fake_quantize(x, b, granularity, symmetric) for each b; each batch has a scale of its own."""

    def __init__(self, bits=(), granularity="tensor", symmetric=True):
        self.sums = 0, 0.0, 0.0, 0.0, 0.0                        # see `central_sums`; tensors later
        self.low, self.high = torch.tensor(math.inf), torch.tensor(-math.inf)
        self.noise = dict.fromkeys(bits, 0.0)                    # bits -> sum of (x - x_hat)^2
        self.granularity, self.symmetric = granularity, symmetric

    @torch.no_grad()
    def update(self, x):
        size = 2 ** 17 if x.device.type == "cpu" else 2 ** 24    # float64 copies that fit a CPU's cache
        parts = x.flatten().split(size) if x.numel() else ()
        for part in map(to_float64, parts):
            self.sums = combine_sums(self.sums, central_sums(part))
            low, high = part.aminmax()
            self.low = torch.minimum(self.low.to(low), low)
            self.high = torch.maximum(self.high.to(high), high)
        for bits in self.noise:
            x_hat = fake_quantize(x, bits, self.granularity, self.symmetric)
            for part, rounded in zip(parts, x_hat.flatten().split(size)):
                error = to_float64(part) - to_float64(rounded)
                self.noise[bits] = self.noise[bits] + error.square().sum()

    def summary(self):
        """A dict of plain numbers, nan where undefined; sqnr_db is a dict by bits.

        crest is max |x| / root mean square: what outliers cost the grid."""
        count, (mean, squares, _, fourths) = self.sums[0], map(float, self.sums[1:])
        variance = squares / count if count else math.nan
        varies = float(self.low) < float(self.high)      # the variance of equal values may round to > 0
        max_abs = max(-float(self.low), float(self.high)) if count else math.nan
        power = count * (variance + mean ** 2) if count else 0.0
        return dict(count=count, mean=mean if count else math.nan, variance=variance,
                    excess_kurtosis=fourths / count / variance ** 2 - 3 if varies else math.nan,
                    max_abs=max_abs, crest=max_abs / math.sqrt(power / count) if power else math.nan,
                    sqnr_db={b: decibels(power, float(noise)) for b, noise in self.noise.items()})

    @property
    def excess_kurtosis(self):
        return self.summary()["excess_kurtosis"]


def central_sums(x):
    """x (n,), float64 -> (n, mean, sum of (x - mean)^2, ^3, ^4)."""
    mean = x.mean()
    d = x - mean
    d2 = d * d
    return len(x), mean, d2.sum(), (d2 * d).sum(), d2.square_().sum()


def combine_sums(first, second):
    """The `central_sums` of two sets together, from those of each (Chan et al. 1979, Pebay 2008).

    Sums of plain powers of x would lose all digits where the mean is large beside the deviation."""
    (a, mean, *A), (b, mean_b, *B) = first, second
    n = max(1, a + b)
    t = mean_b - mean
    squares = A[0] + B[0] + t ** 2 * (a * b / n)
    cubes = A[1] + B[1] + t ** 3 * (a * b * (a - b) / n ** 2) + 3 * t * (a * B[0] - b * A[0]) / n
    fourths = (A[2] + B[2] + t ** 4 * (a * b * (a * a - a * b + b * b) / n ** 3)
               + 6 * t ** 2 * (a * a * B[0] + b * b * A[0]) / n ** 2 + 4 * t * (a * B[1] - b * A[1]) / n)
    return a + b, mean + t * (b / n), squares, cubes, fourths


def to_float64(x):
    return (x.cpu() if x.device.type == "mps" else x).detach().double()      # mps has no float64


def decibels(signal, noise):
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf          # nan stays nan


@contextlib.contextmanager
def watch(model, places=None, bits=(), granularity="tensor", symmetric=True):
    """Inside the `with`, fill {key: Moments} with all that passes through these places of the model.

    places: {key: (module's name, "input" or "output")}; None is the input of every Linear, by its name.
    The rest: see `Moments`. Watch the model itself, not its torch.compile'd form."""
    if places is None:
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        places = {name: (name, "input") for name in linears}
    stats = {key: Moments(bits, granularity, symmetric) for key in places}
    with contextlib.ExitStack() as hooks:
        for key, (name, side) in places.items():
            def update(module, inputs, output=None, moments=stats[key]):
                moments.update(inputs[0] if output is None else output)
            module = model.get_submodule(name)
            is_input = side == "input"
            register = module.register_forward_pre_hook if is_input else module.register_forward_hook
            hooks.callback(register(update).remove)
        yield stats


# Places in a decoder's block: (module, "" for the block itself; its input or its output).
SITES = {"block_input": ("", "input"), "attn_input": ("attn.qkv", "input"),
         "attn_context": ("attn.proj", "input"), "attn_out": ("attn", "output"),
         "mlp_input": ("mlp.fc1", "input"), "mlp_hidden": ("mlp.fc2", "input"),
         "mlp_out": ("mlp", "output"), "block_output": ("", "output")}
LINEAR_INPUTS = ("attn_input", "attn_context", "mlp_input", "mlp_hidden")    # what is quantised


def block_places(model):
    """{(site, block): place} for `watch`: every site in each of model.blocks."""
    return {(site, l): (f"blocks.{l}.{name}".rstrip("."), side)
            for site, (name, side) in SITES.items() for l in range(len(model.blocks))}


# -------------------------------------------------------------------------------------------------------
# the quantiser

def fake_quantize(x, bits, granularity="tensor", symmetric=True):
    """x rounded to the grid of `integers`, in x's dtype. Halves round to even.

    bits: 2 to 16. A nan or inf in x makes everything that shares its scale nan."""
    if not x.numel():
        return x
    q, scale, low = integers(x, bits, granularity, symmetric)
    return (q * scale + low).to(x.dtype)


def integers(x, bits, granularity="tensor", symmetric=True):
    """The integer codes of x and what maps them back: (q, scale, low), x_hat = q * scale + low.

    symmetric: scale = max|x| / (2^(b-1) - 1), low = 0, |q| <= 2^(b-1) - 1, so that 0 stays 0.
    else: scale = (max - min) / (2^b - 1), low = min, 0 <= q <= 2^b - 1, so that min and max are exact.
    granularity: "tensor" is one scale for all of x. The others are one for each row of the last axis:
    "token" where x is (..., tokens, channels), "channel" where x is a weight (out, in).
    All in float32, or float64 as x. Raises ValueError for unknown bits or granularity."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))          # a scale in bf16 is too coarse
    grid = find_grid(x, bits, granularity, symmetric)
    return round_to_codes(x, *grid), *grid[:2]


def find_grid(x, bits, granularity, symmetric):
    """(scale, low, least code, greatest code) of `integers`."""
    if not (isinstance(bits, int) and 2 <= bits <= 16):
        raise ValueError(f"bits {bits} must be an integer from 2 to 16")
    if granularity not in ("tensor", "token", "channel"):
        raise ValueError(f"granularity {granularity!r} is unknown: use tensor, token or channel")
    low, high = x.aminmax() if granularity == "tensor" else x.aminmax(dim=-1, keepdim=True)
    levels = 2 ** (bits - 1) - 1 if symmetric else 2 ** bits - 1
    span = torch.maximum(high, -low) if symmetric else high - low
    low = torch.zeros_like(low) if symmetric else low
    scale = (span / levels).clamp(min=torch.finfo(torch.float32).tiny)       # equal values: span 0
    return scale, low, -levels if symmetric else 0, levels


def round_to_codes(x, scale, low, least, greatest):
    return ((x - low) / scale).round().clamp(least, greatest)


class QuantLinear(nn.Module):
    """A Linear whose weight is quantised once, and its input as it comes. bits None leaves it as it is.

    With act_granularity "tensor" one scale serves a whole batch. Then the result for a text depends on
    those beside it, and a table must name its batch size. codes: the weight's (q, scale, low)."""

    def __init__(self, linear, weight_bits, act_bits, act_granularity="tensor",
                 weight_granularity="tensor", symmetric=True, codes=None):
        super().__init__()
        self.act_bits, self.act_granularity, self.symmetric = act_bits, act_granularity, symmetric
        weight = linear.weight.detach()
        if codes is not None:
            q, scale, low = codes
            weight = (q * scale + low).to(weight.dtype)
        elif weight_bits is not None:
            weight = fake_quantize(weight, weight_bits, weight_granularity, symmetric)
        self.weight = nn.Parameter(weight, requires_grad=False)  # a new one: the old may be tied
        self.bias = linear.bias

    def forward(self, x):
        if self.act_bits is not None:
            x = fake_quantize(x, self.act_bits, self.act_granularity, self.symmetric)
        return F.linear(x, self.weight, self.bias)


def quantized(model, weight_bits=8, act_bits=8, act_granularity="tensor", weight_granularity="tensor",
              symmetric=True, skip=("head",), embedding=False, codes=None):
    """A deep copy of the model, for evaluation, in which every nn.Linear is a `QuantLinear`.

    skip: names of Linears to leave alone. embedding: also quantise the tables of nn.Embedding; a head
    that shares such a table keeps its own. codes: {name of a Linear: its codes}, see `gptq`.
    Raises ValueError for nn.MultiheadAttention, which uses its weights without calling a Linear."""
    if any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        raise ValueError("nn.MultiheadAttention calls no Linear and would stay as it is: use Linears")
    net, new = copy.deepcopy(model).eval().requires_grad_(False), {}
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear) and name not in skip:
            new[module] = QuantLinear(module, weight_bits, act_bits, act_granularity, weight_granularity,
                                      symmetric, (codes or {}).get(name))
        elif isinstance(module, nn.Embedding) and embedding and weight_bits is not None:
            table = fake_quantize(module.weight, weight_bits, weight_granularity, symmetric)
            module.weight = nn.Parameter(table, requires_grad=False)
    for parent in list(net.modules()):
        for name, child in list(parent._modules.items()):        # named_children() misses a second use
            if child in new:
                setattr(parent, name, new[child])
    return new.get(net, net)


# -------------------------------------------------------------------------------------------------------
# GPTQ: rounding that makes good for its errors (Frantar et al. 2023)

def gptq_integers(weight, H, bits, granularity="tensor", symmetric=True, damping=0.01, block=128):
    """The codes of `integers` for a weight W (out, in), so that its outputs stay close.

    H (in, in) is 2 X^T X of the layer's inputs X (tokens, in). With D = W - W_hat, |X D^T|^2 is
    tr(D H D^T) / 2. Columns are rounded from left to right, and those at the right of column i, j > i,
    make good for its error:
        e = (w_i - w_hat_i) / U_ii,    w_j <- w_j - e U_ij,    H^-1 = U^T U with U upper triangular.
    Row i of U is what is left of H^-1 once the columns before i are fixed.
    damping: share of H's mean diagonal that is added to it. block: columns that are updated one at a
    time; those behind them follow in one product, for speed. Raises BadInput for a nan in H."""
    H = to_float64(H)
    if not H.isfinite().all():
        raise BadInput("the activations are not finite, which GPTQ needs: round to nearest")
    weight = weight.detach().to(H.device, torch.promote_types(weight.dtype, torch.float32))
    grid = scale, low, *_ = find_grid(weight, bits, granularity, symmetric)
    eye = torch.eye(len(H), dtype=H.dtype, device=H.device)
    H = H + eye * (damping * float(H.diagonal().mean()) or 1.0)              # 1 where all inputs were 0
    U = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)
    W, q = weight.double().clone(), torch.empty_like(weight)
    for start in range(0, len(H), block):
        stop = min(start + block, len(H))
        E = torch.empty_like(W[:, start:stop])
        for i in range(start, stop):
            column = W[:, i:i + 1]
            q[:, i:i + 1] = round_to_codes(column.to(q.dtype), *grid)
            E[:, i - start] = (column - (q[:, i:i + 1] * scale + low))[:, 0] / U[i, i]
            W[:, i + 1:stop].addr_(E[:, i - start], U[i, i + 1:stop], alpha=-1)
        W[:, stop:] -= E @ U[start:stop, stop:]
    return q, scale, low


@torch.no_grad()
def gptq(model, batches, bits, granularity="tensor", symmetric=True, embedding=False,
         dtype=torch.float32):
    """{name: `gptq_integers`} of each Linear in an LM's blocks. batches: calibration tokens (B, N).

    One Linear after the other, each with the inputs that the rounded Linears before it give; activations
    are not quantised. (The authors' code takes a block's inputs at once.) embedding: see `quantized`."""
    net = quantized(model, bits, None, "tensor", granularity, symmetric, embedding=embedding)
    device, codes = net.token_embed.weight.device, {}
    inputs = [net.token_embed(tokens.to(device)) for tokens in batches]

    def run_block(block):
        with runtime.autocast(device, dtype):
            return [block(x, net.rope(0, x.shape[1])) for x in inputs]

    for l, block in enumerate(net.blocks):
        for path, module in block.named_modules():               # in the order in which they run
            if isinstance(module, QuantLinear):
                H, name = [], f"blocks.{l}.{path}"
                hook = module.register_forward_pre_hook(lambda _, x: H.append(second_moments(*x)))
                run_block(block)
                hook.remove()
                weight = model.get_submodule(name).weight
                found = gptq_integers(weight, sum(H), bits, granularity, symmetric)
                codes[name] = q, scale, low = [t.to(device) for t in found]
                module.weight.copy_(q * scale + low)
        inputs = run_block(block)
    return codes


def second_moments(x):
    """2 X^T X (D, D) of x (..., D), in float64."""
    x = to_float64(x).flatten(0, -2)
    return 2 * x.T @ x


# -------------------------------------------------------------------------------------------------------
# a language model, quantised and measured

@torch.no_grad()
def loss_per_token(model, batches, device="cpu", dtype=torch.float32):
    """Cross-entropy in nats over batches of (tokens, next tokens), (B, N) each; summed in float32."""
    device, loss, count = torch.device(device), 0.0, 0
    for x, y in batches:
        with runtime.autocast(device, dtype):
            logits = model(x.to(device))
        y = y.to(device).flatten()
        loss += F.cross_entropy(logits.float().flatten(0, 1), y, reduction="sum").item()
        count += y.numel()
    return loss / count


def quantized_variants(net, data, args, dtype):
    """Yields (name, activation bits, quantised copy) for each of args.bits. GPTQ rounds once for all."""
    symmetric, codes, granularity = not args.asymmetric, None, args.weight_granularity
    if args.weight_rounding == "gptq":
        count = -(-args.calibration_tokens // net.block_size)
        batches = text.eval_batches(data.train, net.block_size, args.batch_size, limit=count)
        windows = [x for x, _ in batches]
        codes = gptq(net, windows, args.weight_bits, granularity, symmetric, args.embedding, dtype)
    for bits in args.bits:
        name = f"W{args.weight_bits}A{bits}" + " gptq" * (codes is not None)
        yield name, bits, quantized(net, args.weight_bits, bits, args.act_granularity, granularity,
                                    symmetric, () if args.head else ("head",), args.embedding, codes)


def measure_lm(net, saved, data, args, device, dtype):
    """What quantize.json holds of a run: loss by precision, statistics of each site and block."""
    count, rows = -(-args.eval_tokens // net.block_size), []                 # windows; 0 is all

    def measure_loss(name, bits, model):
        batches = text.eval_batches(data.val, net.block_size, args.batch_size, limit=count)
        loss = loss_per_token(model, batches, device, dtype)
        perplexity = math.exp(min(loss, 700.0))                  # e^710 overflows
        delta = loss - rows[0]["loss"] if rows else 0.0
        rows.append(dict(precision=name, act_bits=bits, loss=loss, perplexity=perplexity, delta=delta))
        print(f"  {name:9s} loss {loss:.4f}", flush=True)

    bits = sorted({4, 6, 8, 12, *args.bits})
    with watch(net, block_places(net), bits, args.act_granularity, not args.asymmetric) as stats:
        measure_loss(str(dtype).removeprefix("torch."), None, net)
    for variant in quantized_variants(net, data, args, dtype):
        measure_loss(*variant)

    depth = len(net.blocks)
    stats = {site: [stats[site, l].summary() for l in range(depth)] for site in SITES}
    kurtosis = [s["excess_kurtosis"] for s in stats["block_output"]]
    linears = [s for site in LINEAR_INPUTS for s in stats[site]]
    sqnr = [s["sqnr_db"][8] for s in linears]
    middle = max(1, round(depth * 2 / 3))                        # counted from 1: the paper's 16 of 24
    return dict(data=data.name, rows=rows, layer=middle, kurtosis=kurtosis[middle - 1],
                kurtosis_max=largest(kurtosis), crest_max=largest(s["crest"] for s in linears),
                sqnr8_mean=statistics.fmean(sqnr), sqnr8_min=min(sqnr), stats=stats,
                **{key: saved.get(key) for key in ("weights", "step", "opt", "init", "seed", "model")})


def largest(values):
    return max((value for value in values if not math.isnan(value)), default=math.nan)


# -------------------------------------------------------------------------------------------------------
# tables and figure

def table_cell(value, digits=2, sign=""):
    """A number for a table, - where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:{sign},.{digits}f}"


def markdown_table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def precision_table(records):
    """Paper 2's main table: loss by precision, the runs beside each other."""
    lines = []
    for rows in zip(*(r["rows"] for r in records)):
        for r, row in zip(records, rows):
            delta = table_cell(row["delta"], 4, "+") if row["act_bits"] else ""
            lines.append([row["precision"], r["name"], table_cell(row["loss"], 4),
                          table_cell(row["perplexity"]), delta])
    return markdown_table(["precision", "checkpoint", "val loss", "perplexity", "Δ loss"], lines)


def activation_table(records):
    """Paper 2's ablation. Kurtosis is of the blocks' outputs, crest and SQNR of the Linears' inputs."""
    header = ["checkpoint", "shortcut", "optimizer", "β", "val loss", "kurtosis at ⅔ depth",
              "kurtosis, max", "crest, max", "SQNR at 8 bits, mean", "min", "Δ loss at A8"]
    lines = []
    for r in records:
        a8 = next((row["delta"] for row in r["rows"] if row["act_bits"] == 8), None)
        shortcut, beta = r["model"].get("shortcut", "residual"), r["model"].get("temperature_beta", 1)
        lines.append([r["name"], shortcut, r["opt"], f"{beta:g}", table_cell(r["rows"][0]["loss"], 4),
                      f"{table_cell(r['kurtosis'])} (block {r['layer']})", table_cell(r["kurtosis_max"]),
                      table_cell(r["crest_max"], 1), f"{table_cell(r['sqnr8_mean'], 1)} dB",
                      f"{table_cell(r['sqnr8_min'], 1)} dB", table_cell(a8, 4, "+")])
    return markdown_table(header, lines)


def describe_quantizer(args, dtype):
    """The flags that the tables depend on: without the granularity a table of W8A8 says little."""
    names = ["act_granularity", "batch_size", "weight_bits", "weight_granularity", "weight_rounding"]
    names += ["calibration_tokens"] * (args.weight_rounding == "gptq")
    names += ["asymmetric", "head", "embedding", "eval_tokens"]
    flags = [f"{name.replace('_', ' ')} {getattr(args, name)}" for name in names]
    return f"Measured with {', '.join(flags)}; {str(dtype).removeprefix('torch.')}.\n"


def plot_quantization(records, path):
    """Excess kurtosis of each block's output (axis linear up to 1, then log), and SQNR by bits."""
    plt = runtime.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
    for r in records:
        kurtosis = [s["excess_kurtosis"] for s in r["stats"]["block_output"]]
        left.plot(range(1, len(kurtosis) + 1), kurtosis, "o-", ms=3, label=r["name"])
        layers = [s["sqnr_db"] for site in LINEAR_INPUTS for s in r["stats"][site]]
        bits = sorted(layers[0])
        found = [[layer[b] for layer in layers] for b in bits]
        right.plot(bits, [statistics.fmean(v) for v in found], "o-", ms=3, label=r["name"])
        right.fill_between(bits, [min(v) for v in found], [max(v) for v in found], alpha=.12)
    left.set_yscale("symlog", linthresh=1)
    left.set(xlabel="block", ylabel="excess kurtosis of the output")
    right.set(xlabel="bits", ylabel="SQNR of the Linears' inputs, dB: mean and range", xticks=bits)
    for axis in (left, right):
        axis.grid(alpha=.3)
        axis.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# -------------------------------------------------------------------------------------------------------
# command line

def lm_parser(doc):
    """A parser with the flags that name runs of train_lm.py and a quantiser."""
    parser, number = runtime.Parser(description=doc), runtime.number
    add = parser.add_argument
    add("--ckpt", nargs="+", required=True, help="runs of train_lm.py, shown side by side")
    add("--raw", action="store_true", help="weights as trained; else averaged ones, if any")
    add("--data", help="text, as for train_lm.py; else each run's own")
    add("--batch-size", type=number(int, low=1), default=16, help="sequences that share a scale")
    add("--device", default="auto", help="auto (cuda, then mps, then cpu), cpu, cuda or mps")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="float32",
        help="of the forward pass; bfloat16, the paper's, cannot hold a 12-bit grid")
    add("--threads", type=number(int, low=0), default=0, help="CPU threads; 0 leaves torch's choice")
    add("--out", help="folder for the results; else that of the first checkpoint")
    add, width = parser.add_argument_group("quantiser").add_argument, number(int, low=2, high=16)
    add("--bits", type=width, nargs="+", default=[12, 8, 6, 4], help="of activations")
    add("--weight-bits", type=width, default=8, help="of weights")
    add("--weight-rounding", choices=["nearest", "gptq"], default="nearest", help="of weights")
    add("--calibration-tokens", type=number(int, low=1), default=8192, help="training tokens for GPTQ")
    add("--act-granularity", choices=["tensor", "token"], default="tensor", help="has one scale")
    add("--weight-granularity", choices=["tensor", "channel"], default="tensor", help="has one scale")
    add("--asymmetric", action="store_true", help="grid from min to max, instead of -max|x| to max|x|")
    add("--head", action="store_true", help="also the output projection")
    add("--embedding", action="store_true", help="also the token embedding's table")
    return parser


def load_lm(path, raw=False):
    """(model.LM in eval mode, the args of its run with "step" and "weights") from a folder or a ckpt.pt.

    The averaged weights, if there are some, unless raw. Raises BadInput for any other file."""
    remedy = "give the folder or the ckpt.pt of a run of train_lm.py"
    checkpoint = runtime.read_checkpoint(path, "--ckpt", remedy)
    args, weights = checkpoint["args"], "model" if raw or checkpoint["ema"] is None else "ema"
    if args["kind"] != "lm":
        raise BadInput(f"--ckpt {path} holds no language model: {remedy}")
    alphas = {"alphas": args["alphas"]} if args.get("alphas") else {}
    try:
        net = LM(**args["model"], **alphas)
        net.load_state_dict(checkpoint[weights])
    except (TypeError, ValueError, RuntimeError) as error:       # other arguments, or other shapes
        raise BadInput(f"--ckpt {path} does not fit model.LM: use the version of its run") from error
    return net.eval(), dict(args, step=checkpoint["step"], weights=weights.replace("model", "raw"))


def open_lms(args, device):
    """([(name, net, its args, TextData)] of args.ckpt, folder for results), before anything is measured.

    Raises BadInput for files that are no such runs, and for a text of another vocabulary."""
    files = [Path(path) / "ckpt.pt" if Path(path).is_dir() else Path(path) for path in args.ckpt]
    names, found = [file.parent.name for file in files], []
    for path, file, name in zip(args.ckpt, files, names):
        net, saved = load_lm(path, args.raw)
        data = text.load_text(args.data or saved["data"], saved["tokenizer"])
        if data.tokenizer.digest != saved["tokenizer_digest"]:
            raise BadInput(f"--ckpt {path} had another vocabulary named {saved['tokenizer']}: "
                           f"use the tokenizer files of its training")
        name = (name if names.count(name) == 1 else str(file)) + " (ema)" * (saved["weights"] == "ema")
        found.append((name, net.to(device), saved, data))
    folder = Path(args.out or files[0].parent)
    folder.mkdir(parents=True, exist_ok=True)
    return found, folder


def get_args(argv=None):
    parser = lm_parser(__doc__)
    parser.add_argument("--eval-tokens", type=runtime.number(int, low=0), default=32768,
                        help="validation tokens, spread evenly; 0 is all")
    return parser.parse_args(argv)


def main(argv=None):
    args = get_args(argv)
    world = runtime.start(args.device, args.threads)
    dtype, why = runtime.pick_dtype(args.dtype, world.device)
    runs, folder = open_lms(args, world.device)
    print(f"device {world.why}; {dtype}, {why}")
    records = []
    for name, net, saved, data in runs:
        print(f"{name}, {data.name}", flush=True)
        records.append(dict(name=name, **measure_lm(net, saved, data, args, world.device, dtype)))
    report = [describe_quantizer(args, dtype), precision_table(records), activation_table(records)]
    print("\n" + "\n".join(report))
    results = dict(args=vars(args), device=world.why, torch=torch.__version__, checkpoints=records)
    runtime.write_text(folder / "quantize.json", json.dumps(runtime.finite(results), indent=1) + "\n")
    runtime.write_text(folder / "quantize.md", "\n".join(report))
    plot_quantization(records, folder / "quantize.png")
    print(f"{folder}: quantize.md, quantize.json, quantize.png")


if __name__ == "__main__":
    runtime.run_script(main)
