"""Initialisations for transformers with and without residual connections, one function per formula.

Convention: every weight is (out, in) as in nn.Linear, y = x W^T. The papers write row vectors, y = x W, so the paper's W is our weight transposed:
paper W^Q (W^K)^T  =  w_q^T w_k,  and paper W^V W^O  =  w_v^T w_o^T.  All functions work in place and draw from the default torch generator.

    python init.py          how well conditioned each initialisation is, layer by layer -> table and results/init.png
"""
import functools
import math

import torch
import torch.nn as nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@torch.no_grad()
def mimetic_qk_(w_q, w_k, num_heads, alpha, beta, dist="normal"):
    """Queries and keys whose product is diagonally dominant (paper 1, 5.2; recipe of Trockman & Kolter 2023).

    w_q, w_k: (D, D), rows h*d .. (h+1)*d belong to head h (d = D / num_heads).
    For each head its own M = alpha Z + beta I, Z_ij ~ N(0, 1/D) ("normal", the paper) or uniform with the same variance ("uniform", the author's code).
    With M = U S V^T and only the d largest singular triplets kept:  w_q = sqrt(S_d) U_d^T,  w_k = sqrt(S_d) V_d^T.
    Effective product: w_q^T w_k = U_d S_d V_d^T, the best rank-d approximation of M. Its singular values are the d largest of M;
    for alpha << beta all about beta, for beta << alpha the top of alpha times the quarter circle law on [0, 2].
    """
    D = w_q.shape[1]
    d = _head_dim(w_q, num_heads)
    for h in range(num_heads):
        M = alpha * _noise(D, dist) + beta * torch.eye(D, dtype=torch.float64)
        U, S, Vh = torch.linalg.svd(M)
        rows = slice(h * d, (h + 1) * d)
        w_q[rows] = (U[:, :d] * S[:d].sqrt()).T.to(w_q)
        w_k[rows] = (S[:d, None].sqrt() * Vh[:d]).to(w_k)


@torch.no_grad()
def orthogonal_vo_(w_v, w_o, c):
    """Values and output projection whose product is a scaled orthogonal matrix (paper 1, 5.1).

    w_v, w_o: (D, D), one full pair per layer, not one per head: independent orthogonal heads leave the full product near singular.
    Paper: W^V = c U, W^O = c V^T with U S V^T the SVD of a D x D standard normal matrix; so w_v = c U^T, w_o = c V.
    Effective product: W^V W^O = c^2 U V^T, Haar orthogonal times c^2 (9 for c = 3): every singular value c^2, condition number 1.
    """
    U, _, Vh = torch.linalg.svd(torch.randn(w_v.shape[0], w_v.shape[0], dtype=torch.float64))
    w_v.copy_(c * U.T)
    w_o.copy_(c * Vh.T)


@torch.no_grad()
def suo_(weight, gain=1.0):
    """Scaled uniform orthogonal: gain * max(sqrt(out / in), 1) * Haar (semi-)orthogonal (Martens et al. 2021, Deep Kernel Shaping).

    weight: (out, in). Singular values: all equal, gain * sqrt(out / in) where the layer widens, gain where it narrows. Keeps the mean square
    of a vector, |W x|^2 / out = gain^2 |x|^2 / in: exactly where out >= in, in expectation where out < in. (fc1 D -> 4D gets 2, fc2 4D -> D gets 1.
    The published PyTorch helper expects (in, out); on nn.Linear it would give 1 and 2, so mean squares off by 4.)
    """
    out, in_ = weight.shape
    _orthogonal_(weight, gain * max(math.sqrt(out / in_), 1.0))


def _orthogonal_(weight, gain):
    """nn.init.orthogonal_ for every type: QR knows no half precision."""
    full = weight if weight.dtype in (torch.float32, torch.float64) else torch.empty_like(weight, dtype=torch.float32)
    nn.init.orthogonal_(full, gain)
    weight.copy_(full)


@torch.no_grad()
def zero_(weight):
    """All zeros: the branch starts silent. For the last layer of a residual or decayed branch (paper 3), never for a skipless one."""
    weight.zero_()


def _head_dim(weight, num_heads):
    if weight.shape[0] % num_heads:
        raise ValueError(f"{weight.shape[0]} rows cannot be shared among {num_heads} heads: use a divisor")
    return weight.shape[0] // num_heads


def _noise(D, dist):
    """Z (D, D) with variance 1/D."""
    if dist == "normal":
        return torch.randn(D, D, dtype=torch.float64) / math.sqrt(D)
    if dist == "uniform":
        return (torch.rand(D, D, dtype=torch.float64) * 2 - 1) * math.sqrt(3 / D)
    raise ValueError(f"dist {dist!r} is unknown: use normal or uniform")


# ---------------------------------------------------------------------------------------------------------------------
# whole models

@torch.no_grad()
def init_vit(model):
    """The usual ViT initialisation (timm, DINO): Linear weights, position embedding and class token truncated normal of std 0.02,
    biases 0, LayerNorm 1 and 0; the patch convolution keeps torch's default, uniform of variance 1 / (3 fan_in), as in both."""
    for name, p in model.named_parameters():
        if name in ("pos_embed", "cls_token"):
            nn.init.trunc_normal_(p, std=0.02)
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.02)
            if m.bias is not None:
                zero_(m.bias)


@torch.no_grad()
def init_lm(model):
    """The usual decoder initialisation (GPT-2): embedding and Linear weights normal of std 0.02; with a shortcut the last weight of each of the
    2L branches, attn.proj and mlp.fc2, is divided by sqrt(2L), so that their sum has the variance of one. Norms 1."""
    for m in model.modules():
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)
    if model.shortcut != "skipless":
        for block in model.blocks:
            for m in (block.attn.proj, block.mlp.fc2):
                m.weight.div_(math.sqrt(2 * len(model.blocks)))


def _xavier_(model):
    """Linear weights and the patch convolution (as a matrix) Xavier uniform, biases 0."""
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            zero_(m.bias)
    nn.init.xavier_uniform_(model.patch_embed.proj.weight.flatten(1))
    zero_(model.patch_embed.proj.bias)


@torch.no_grad()
def init_mae(model, zero_init):
    """The masked autoencoder's initialisation: Linear weights Xavier uniform, the patch convolution too (as a matrix), biases 0, class and mask
    tokens normal of std 0.02, norms 1 and 0.

    zero_init (paper 3): zero weights in the last layer of every branch of encoder and decoder, of the skips and of the pixel head, so that a block
    starts as its shortcut alone; where the shortcut decays the net would else grow its features to make up for it. Not in a skipless encoder."""
    _xavier_(model)
    for name, p in model.named_parameters():
        if name.endswith("token"):
            nn.init.normal_(p, std=0.02)
    if zero_init:
        branches = [*(model.blocks if model.shortcut != "skipless" else ()), *model.decoder_blocks]
        for m in [m for block in branches for m in (block.attn.proj, block.mlp.fc2)] + [skip.fc2 for skip in model.skips] + [model.decoder_pred]:
            zero_(m.weight)


@torch.no_grad()
def init_sit(model):
    """DiT's initialisation: Linear weights and the patch convolution (as a matrix) Xavier uniform, biases 0, time MLP and label table normal of std 0.02,
    and zeros where the condition sets gate, shift and scale and in the head ("adaLN-Zero"): every block starts as its shortcut, the velocity as 0."""
    _xavier_(model)
    for m in (model.time_embed[0], model.time_embed[2], model.label_embed):
        nn.init.normal_(m.weight, std=0.02)
    for m in [block.modulation[1] for block in model.blocks] + [model.modulation[1], model.head]:
        zero_(m.weight)


@torch.no_grad()
def init_uvit(model, zero_init):
    """U-ViT's initialisation: Linear weights and positions truncated normal of std 0.02, biases 0, norms 1 and 0, the rest torch's own.

    zero_init (paper 3): zero weights in attn.proj and mlp.fc2, so that a block starts as its shortcut alone."""
    nn.init.trunc_normal_(model.pos_embed, std=0.02)
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.02)
            if m.bias is not None:
                zero_(m.bias)
    if zero_init:
        for block in model.blocks:
            zero_(block.attn.proj.weight)
            zero_(block.mlp.fc2.weight)


@torch.no_grad()
def init_residual_free_lm(model, alpha_qk=0.9, alpha_vo=3.0, alpha_u=1.5, alpha_d=1.5, mlp="suo"):
    """Paper 2's initialisation of a decoder (or ViT) without residuals; the defaults are its constants. Changes the blocks only.

    Q K   per head W^Q = W^K = sqrt(alpha_qk) P with P (D, d) Haar semi-orthogonal, so W^Q (W^K)^T = alpha_qk P P^T: alpha_qk times a projector of
          rank d, the nearest that a head can come to the paper's alpha_qk I. A token's logit with itself is alpha_qk sqrt(d), with others alpha_qk N(0, 1).
    V O   W^V = sqrt(alpha_vo) Q, W^O = sqrt(alpha_vo) Q^T with one Haar Q (D, D) per layer: the product is alpha_vo I exactly.
    MLP   "suo", the paper: W^U = sqrt(alpha_u) SUO, W^D = sqrt(alpha_d) SUO, drawn independently (see `suo_`: singular values
          2 sqrt(alpha_u) and sqrt(alpha_d) at ratio 4). "looks-linear", ours: see `looks_linear_`, same singular values.
    """
    for block in model.blocks:
        attn = block.attn
        w_q, w_k, w_v = attn.qkv.weight.chunk(3)                  # views: the functions write through
        for rows in range(0, len(w_q), attn.head_dim):
            head = slice(rows, rows + attn.head_dim)
            _orthogonal_(w_q[head], math.sqrt(alpha_qk))
        w_k.copy_(w_q)
        _orthogonal_(w_v, math.sqrt(alpha_vo))
        attn.proj.weight.copy_(w_v.T)
        if mlp == "suo":
            suo_(block.mlp.fc1.weight, math.sqrt(alpha_u))
            suo_(block.mlp.fc2.weight, math.sqrt(alpha_d))
        elif mlp == "looks-linear":
            looks_linear_(block.mlp.fc1.weight, block.mlp.fc2.weight, math.sqrt(alpha_u), math.sqrt(alpha_d))
        else:
            raise ValueError(f"mlp {mlp!r} is unknown: use suo or looks-linear")


@torch.no_grad()
def looks_linear_(fc1, fc2, gain_1=1.0, gain_2=1.0):
    """An MLP that starts as a multiple of the identity (ours for GELU; the idea is Balduzzi et al. 2017's for ReLU, arXiv 1702.08591).

    fc1 (h, D) = a [U; -U], fc2 (D, h) = b [U^T, -U^T], U (h/2, D) with orthonormal columns. Since gelu(z) - gelu(-z) = z,
        fc2 gelu(fc1 x) = a b U^T U x = a b x   exactly,
    whatever constant is taken off the activation. a = gain_1 sqrt(h / D / 2), b = gain_2 / sqrt(2): the singular values of fc1 and fc2 are those of `suo_`.
    The pairs part with the first update. Raises ValueError for an odd h, or h < 2 D, where U has no orthonormal columns.
    """
    h, D = fc1.shape
    if h % 2 or h < 2 * D:
        raise ValueError(f"a looks-linear MLP needs an even hidden width of at least twice the width, not {h} for {D}: use mlp_ratio 2 or more")
    U = nn.init.orthogonal_(torch.empty(h // 2, D, dtype=torch.float64))
    fc1.copy_(torch.cat([U, -U]) * gain_1 * math.sqrt(h / D / 2))
    fc2.copy_(torch.cat([U, -U]).T * gain_2 / math.sqrt(2))


@torch.no_grad()
def init_skipless_vit(model, alpha, beta, c, dist="normal", cancel_mean=0.0, mlp_gain=1.0, parts=("qk", "vo", "mlp")):
    """Paper 1's initialisation of a ViT (or LM) without residuals: mimetic Q K, orthogonal V O, scaled uniform orthogonal MLP, biases 0.

    Changes the blocks only; embeddings, norms and head keep the usual initialisation. Published constants: PAPER_CONSTANTS.
    cancel_mean, mlp_gain: ours, see `choose_constants`; 0 and 1 are the paper. parts: leave some out for an ablation.
    """
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        w_q, w_k, w_v = attn.qkv.weight.chunk(3)                  # views: the functions write through
        if "qk" in parts:
            mimetic_qk_(w_q, w_k, attn.num_heads, alpha, beta, dist)
        if "vo" in parts:
            orthogonal_vo_(w_v, attn.proj.weight, c)
        if "mlp" in parts:
            suo_(mlp.fc1.weight, mlp_gain)
            suo_(mlp.fc2.weight)
            if mlp.fc2.bias is not None:
                cancel_mean_(mlp, cancel_mean)
        for layer in (attn.qkv, attn.proj, mlp.fc1):
            if layer.bias is not None:
                zero_(layer.bias)


@torch.no_grad()
def cancel_mean_(mlp, fraction):
    """fc2.bias = -fraction * W_fc2 E[gelu(W_fc1 x)], x of zero mean and unit variance (ours). An initialisation only: the bias trains on.

    GELU's mean is the same vector for every token, so it pulls all tokens together: about 0.19 of cosine per layer, which
    no shortcut undoes. Hidden unit i sees a Gaussian of std |row i of W_fc1|, close to 1 after `suo_`.
    """
    mlp.fc2.bias.copy_(-fraction * mlp.fc2.weight @ gelu_mean(mlp.fc1.weight.norm(dim=1)))


def gelu_mean(scale=1.0):
    """E[gelu(s z)], z standard normal: s^2 / sqrt(2 pi (1 + s^2)), by Stein's lemma; 1 / sqrt(4 pi) = 0.2821 for s = 1. Numbers or tensors."""
    return scale ** 2 / (2 * math.pi * (1 + scale ** 2)) ** 0.5


# ---------------------------------------------------------------------------------------------------------------------
# choosing the constants (ours): a mean-field forecast of two numbers at initialisation, and the constants that bring them to a target

def qk_statistics(alpha, beta, dim, num_heads, seed=0):
    """(self_logit, logit_std) of one head with `mimetic_qk_` on tokens of unit variance, scale 1/sqrt(d).

    E[x^T M x] / sqrt(d) = tr(M) / sqrt(d) for a token with itself; std of x^T M y / sqrt(d) = |M|_F / sqrt(d) for two independent ones,
    M the truncated product. One draw of M is enough: both concentrate as D grows. Linear in (alpha, beta) together.
    """
    generator = torch.Generator().manual_seed(seed)
    d = dim // num_heads
    Z = torch.randn(dim, dim, dtype=torch.float64, generator=generator) / math.sqrt(dim)
    U, S, Vh = torch.linalg.svd(alpha * Z + beta * torch.eye(dim, dtype=torch.float64))
    trace = (S[:d] * (U[:, :d] * Vh[:d].T).sum(0)).sum()
    return (trace / math.sqrt(d)).item(), (S[:d].norm() / math.sqrt(d)).item()


def attention_map(cosine, self_logit, logit_std, tokens, rows=256, seed=0):
    """Mean diagonal of A and the token cosine after attention, for tokens x_i = sqrt(c) u + sqrt(1 - c) z_i of cosine c.

    The common part u of the keys shifts a whole row of logits and cancels in the softmax. What is left of the logits is
    (1 - c) self_logit on the diagonal and noise of std sqrt(1 - c) logit_std everywhere: tokens that grow alike attend more evenly,
    which makes them more alike. With weights A, the output keeps u whole and mixes z:
        c' = (c + (1 - c) r) / (c + (1 - c) q),   q = E sum_j A_ij^2,   r = E sum_j A_ij A_kj, i != k.
    """
    noise = torch.randn(rows, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * logit_std * math.sqrt(1 - cosine)
    noise[:, 0] += self_logit * (1 - cosine)
    A = noise.softmax(-1)
    a, q = A[:, 0].mean().item(), A.square().sum(1).mean().item()
    b = (1 - a) / max(1, tokens - 1)
    r = 2 * a * b + max(0, tokens - 2) * b * b
    return a, (cosine + (1 - cosine) * r) / (cosine + (1 - cosine) * q)


def mlp_map(cosine, cancel_mean=0.0, mlp_gain=1.0):
    """Token cosine after an SUO MLP with exact GELU, of which `cancel_mean` of the mean is subtracted.

    c' = (E[g g'] - k m^2) / (E[g^2] - k m^2),  g = gelu(s z), g' = gelu(s z'), corr(z, z') = c, m = E[g], k = 1 - (1 - cancel_mean)^2.
    The 2-D integral is Gauss-Hermite quadrature.
    """
    x, w = _gauss_hermite()
    g = lambda z: nn.functional.gelu(mlp_gain * z)
    z2 = cosine * x[:, None] + math.sqrt(max(0.0, 1 - cosine ** 2)) * x[None, :]
    cross = (w[:, None] * w[None, :] * g(x)[:, None] * g(z2)).sum().item()
    square = (w * g(x).square()).sum().item()
    removed = (1 - (1 - cancel_mean) ** 2) * gelu_mean(mlp_gain) ** 2
    return min(1.0, (cross - removed) / (square - removed))


def _gauss_hermite(points=48):
    """Nodes and weights for E[f(z)], z standard normal."""
    import numpy as np
    x, w = np.polynomial.hermite_e.hermegauss(points)
    return torch.from_numpy(x), torch.from_numpy(w / w.sum())


def forecast(self_logit, logit_std, tokens, depth, cancel_mean=0.0, mlp_gain=1.0, cosine=0.0, temperature_beta=1.0):
    """Mean attention diagonal and token cosine of every block of a skipless net: two lists of length depth. Logits of block l are times beta ** -l."""
    diagonal, cosines = [], []
    for l in range(depth):
        a, cosine = attention_map(cosine, self_logit * temperature_beta ** -l, logit_std * temperature_beta ** -l, tokens)
        cosine = mlp_map(cosine, cancel_mean, mlp_gain)
        diagonal.append(a)
        cosines.append(cosine)
    return diagonal, cosines


def choose_constants(dim, num_heads, tokens, depth, diagonal=0.95, cosine=0.95, ratio=2.0, c=3.0, temperature_beta=1.0):
    """Constants for `init_skipless_vit`, from the size of the net (ours; --init auto). Returns a dict of keyword arguments.

    The papers print constants, but what they do depends on the head dimension d: the self-logit is about beta sqrt(d). So aim at what counts:
    1. attention: alpha and beta, at the given ratio beta / alpha, are scaled until the first block's mean diagonal A_ii is `diagonal`
       (where narrow heads and many tokens put that out of reach at any scale, the ratio doubles: less noise beside the identity);
    2. tokens: the smallest share of GELU's mean is cancelled for which the forecast token cosine of the *last* block is at most `cosine`.
    A cosine near 1 by the last block is wanted, not feared: with near-identity attention the class token hears the patches only where tokens
    begin to merge. Where the target is out of reach even with all of the mean cancelled, the share is 1. What the targets buy, measured: much conditioning
    (python init.py), accuracy at 12 layers no search for constants; at 24 layers, at the same lr, nets that cancel nothing learn better (results/depth.md).
    Raises ValueError where nothing reaches the diagonal.
    """
    for ratio in (ratio, 2 * ratio, 4 * ratio, 8 * ratio):
        unit_logit, unit_std = qk_statistics(1.0, ratio, dim, num_heads)
        first_diagonal = lambda k: attention_map(0.0, k * unit_logit, k * unit_std, tokens, rows=1024)[0]
        if first_diagonal(100.0) > diagonal:
            break
    else:
        raise ValueError(f"no alpha and beta reach a mean attention diagonal of {diagonal} with heads of {dim // num_heads} dimensions and {tokens} tokens: use fewer heads")
    k = bisect(lambda k: first_diagonal(k) >= diagonal, 0.0, 100.0)
    last_cosine = lambda share: forecast(k * unit_logit, k * unit_std, tokens, depth, share, temperature_beta=temperature_beta)[1][-1]
    share = bisect(lambda share: last_cosine(share) <= cosine, 0.0, 1.0)
    return dict(alpha=k, beta=ratio * k, c=c, cancel_mean=share)


def causal_attention_map(cosine, alpha_qk, head_dim, tokens, temperature=1.0, seed=0):
    """`attention_map` for a head of `init_residual_free_lm`, under a causal mask and with rotary positions: mean diagonal and token cosine after it.

    Queries and keys are the same projection of the tokens, of which some samples are drawn: x_i = sqrt(c) u + sqrt(1 - c) z_i in d dimensions. What is
    common to all tokens does not cancel here: turned by the distance, it makes near tokens the likelier ones. Values as in attention_map, row by row:
        C_ik = (c + (1 - c) (A A^T)_ik) / sqrt((c + (1 - c) q_i) (c + (1 - c) q_k)),   q_i = sum_j A_ij^2;   c' is the mean over i != k.
    """
    from model import rope_table, rotate
    generator = torch.Generator().manual_seed(seed)
    heads = max(1, min(64, 2 ** 19 // tokens ** 2))               # short texts need more of them for a mean
    u, z = torch.randn(heads, 1, 1, head_dim, generator=generator), torch.randn(heads, 1, tokens, head_dim, generator=generator)
    x = rotate(math.sqrt(cosine) * u + math.sqrt(1 - cosine) * z, *rope_table(tokens, head_dim))
    logits = (x @ x.mT)[:, 0] * alpha_qk * temperature / math.sqrt(head_dim)
    A = logits.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    C = cosine + (1 - cosine) * (A @ A.mT).mean(0)
    C = C / torch.sqrt(C.diagonal()[:, None] * C.diagonal())
    return A.diagonal(dim1=-2, dim2=-1).mean().item(), ((C.sum() - tokens) / max(1, tokens * (tokens - 1))).item()


def forecast_lm(alpha_qk, head_dim, tokens, depth, temperature_beta=1.0, mlp="suo", center=0.0, alpha_u=1.5, scale=1.0, cosine=0.0):
    """`forecast` for a decoder with `init_residual_free_lm`: mean attention diagonal and token cosine of every block.

    A looks-linear MLP leaves cosines as they are, so only attention merges tokens. scale: of all logits, for attention_scale "model"."""
    diagonal, cosines = [], []
    for l in range(depth):
        a, cosine = causal_attention_map(cosine, alpha_qk, head_dim, tokens, scale * temperature_beta ** -l)
        if mlp == "suo":
            cosine = mlp_map(cosine, center, math.sqrt(alpha_u))
        diagonal.append(a)
        cosines.append(cosine)
    return diagonal, cosines


@functools.lru_cache
def choose_lm_constants(dim, num_heads, tokens, depth, temperature_beta=1.0, attention_scale="head", diagonal=0.9, cosine=0.95):
    """alpha_qk and center for a residual-free LM, from its size (ours; train_lm.py --init auto): a dict.

    What a printed alpha_qk does depends on the head dimension, the context and the depth: .9 leaves tokens collapsed, in the paper's own size too. So:
    1. alpha_qk is the smallest for which the forecast attention diagonal is at least `diagonal` in *every* block (at most 20: where narrow heads
       or a high temperature put some block out of reach, its diagonal is what 20 gives);
    2. center is the smallest share of GELU's mean for which the forecast token cosine of the last block is at most `cosine`: 0 in most sizes, once 1. holds.
    """
    head_dim = dim // num_heads
    scale = 1.0 if attention_scale == "head" else num_heads ** -0.5
    cast = lambda alpha, share: forecast_lm(alpha, head_dim, tokens, depth, temperature_beta, center=share, scale=scale)
    alpha_qk = math.exp(bisect(lambda log: min(cast(math.exp(log), 0.0)[0]) >= diagonal, math.log(0.1), math.log(20.0), steps=8))
    center = bisect(lambda share: cast(alpha_qk, share)[1][-1] <= cosine, 0.0, 1.0, steps=7)
    return dict(alpha_qk=float(f"{alpha_qk:.2g}"), center=center)


def bisect(ok, low, high, steps=25):
    """The smallest x in [low, high] with ok(x), for an ok that turns from False to True once; low if it holds there, high if it never does."""
    if ok(low):
        return low
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if ok(middle) else (middle, high)
    return high


# (alpha, beta, c). Paper 1 prints two: ViT-B (supervised) and ViT-S (DINO). nano's were chosen by hand (results/constants.md has their neighbours):
# its heads have 32 dimensions, half of the paper's 64, and ViT-B's printed constants lose 9 points there (results/table1.md). tiny has heads of 64
# and keeps ViT-S's, measured beside nano's (results/tiny.md); large takes ViT-B's.
PAPER_CONSTANTS = {
    "nano": dict(alpha=1.0, beta=2.0, c=3.0),
    "tiny": dict(alpha=1.8, beta=1.0, c=3.0),
    "small": dict(alpha=1.8, beta=1.0, c=3.0),
    "base": dict(alpha=2.0, beta=0.6, c=3.0),
    "large": dict(alpha=2.0, beta=0.6, c=3.0),
}


# ---------------------------------------------------------------------------------------------------------------------
# measuring an initialisation

def condition_number(matrix):
    """sigma_max / sigma_min in float64, batched over leading dimensions; capped at 1/eps = 4.5e15, since float64 resolves no more."""
    s = torch.linalg.svdvals(matrix.double())
    return s[..., 0] / torch.maximum(s[..., -1], s[..., 0] * torch.finfo(torch.float64).eps)


def effective_rank(x):
    """exp(entropy of the normalised singular values) of x (..., n, d): between 1 and min(n, d) (Roy & Vetterli 2007)."""
    s = torch.linalg.svdvals(x.double())
    p = s / s.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1).exp()


def token_cosine(x):
    """Mean cosine between different tokens of one image, x (B, n, d) -> scalar."""
    y = nn.functional.normalize(x, dim=-1)
    n = x.shape[1]
    return ((y @ y.mT).sum((1, 2)) - n).div(n * (n - 1)).mean()


def attention_jacobians(attn, x):
    """(K, B), each (n d, n d), of the attention sub-block at its normalised input x (n, d), exact, by autograd.

    K = d SA(x) / d x, softmax included. B is the same derivative with A held fixed: the Kronecker term (W^V W^O)^T (x) A of paper 1's
    K = (X W^V W^O (x) I)^T A' + (W^V W^O)^T (x) A, summed over heads. Proposition 2: with both initialisations kappa(K) ~ kappa(B).
    """
    A = attn.matrix(x[None]).detach()

    def frozen(z):
        _, _, v = attn.heads(z[None])
        return attn.proj((A @ v).transpose(1, 2).flatten(2))[0]

    jacobian = lambda f: torch.func.jacrev(f)(x).reshape(x.numel(), x.numel())
    return jacobian(lambda z: attn(z[None])[0]), jacobian(frozen)


@torch.no_grad()
def measure(model, x, jacobians=True):
    """One dict per block of a ViT in float64, for tokens x (B, n, d) that enter its first block.

    diagonal: mean A_ii (1/n when attention is uniform). range, gap: of the logits' rows, mean max - min (Delta of proposition 1) and mean
    self-logit minus the largest other (gamma; positive where rows are diagonally dominant). cond_A: median over images and heads.
    cond_VO: of the full d x d product. kappa_*: of attention_jacobians at the first image. cosine, rank: of the block's output.
    """
    rows = []
    for block in model.blocks:
        attn, z = block.attn, block.norm1(x)
        q, k, _ = attn.heads(z)
        logits = q @ k.mT * attn.scale
        A, own = logits.softmax(-1), logits.diagonal(dim1=-2, dim2=-1)
        others = logits.masked_fill(torch.eye(x.shape[1], dtype=torch.bool), -math.inf).amax(-1)
        w_v = attn.qkv.weight.chunk(3)[2]
        row = dict(diagonal=A.diagonal(dim1=-2, dim2=-1).mean(), range=(logits.amax(-1) - logits.amin(-1)).mean(), gap=(own - others).mean(),
                   cond_A=condition_number(A).median(), cond_VO=condition_number(w_v.T @ attn.proj.weight.T))
        if jacobians:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):      # the only one that jacrev can batch
                K, B = attention_jacobians(attn, z[0])
            row.update(kappa_K=condition_number(K), kappa_B=condition_number(B), kappa_K_plus_I=condition_number(K + torch.eye(len(K)).to(K)))
        x = block(x)
        row.update(cosine=token_cosine(x), rank=effective_rank(x).mean())
        rows.append({key: float(value) for key, value in row.items()})
    return rows


VARIANTS = {"default": (), "VO only": ("vo",), "QK only": ("qk",), "both": ("qk", "vo"), "both + MLP": ("qk", "vo", "mlp"), "auto": ("qk", "vo", "mlp")}


def report(args):
    """Tables on stdout, results as a dict {variant: one dict of medians over seeds per block}. The last variant is `choose_constants`, ours."""
    from model import ViT
    results = {}
    for name, parts in VARIANTS.items():
        constants, runs = dict(alpha=args.alpha, beta=args.beta, c=args.c), []
        if name == "auto":
            try:
                constants = choose_constants(args.dim, args.heads, 1 + args.grid ** 2, args.depth)
            except ValueError as error:
                print(f"\nauto: {error}")
                continue
        for seed in range(args.seeds):
            torch.manual_seed(seed)
            model = ViT(img_size=args.grid, patch_size=1, embed_dim=args.dim, depth=args.depth, num_heads=args.heads, num_classes=0, shortcut="skipless")
            if parts:
                init_skipless_vit(model, **constants, parts=parts)
            runs.append(measure(model.double(), torch.randn(2, 1 + args.grid ** 2, args.dim, dtype=torch.float64)))
        rows = results[name] = [{key: sorted(run[l][key] for run in runs)[args.seeds // 2] for key in runs[0][0]} for l in range(args.depth)]
        print(f"\n{name}" + f" ({', '.join(f'{k} {v:.3g}' for k, v in constants.items())})" * (name == "auto"))
        print("block  diagonal  range    gap   cond(A)  cond(VO)  kappa(K)  kappa(B)  kappa(K+I)  cosine  eff. rank")
        for l, r in enumerate(rows, 1):
            print(f"{l:5d}  {r['diagonal']:8.3f} {r['range']:6.2f} {r['gap']:6.2f}  {r['cond_A']:8.1e}  {r['cond_VO']:8.1e}  {r['kappa_K']:8.1e}  "
                  f"{r['kappa_B']:8.1e}  {r['kappa_K_plus_I']:10.1e}  {r['cosine']:6.3f}  {r['rank']:9.1f}")
    return results


def plot_report(results, path, title):
    """Four panels over depth: attention diagonal, kappa(K), token cosine, effective rank."""
    import runtime
    plt = runtime.pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), constrained_layout=True)
    panels = [("diagonal", "mean attention diagonal"), ("kappa_K", r"$\kappa(K)$ of the attention sub-block"), ("cosine", "mean token cosine"),
              ("rank", "effective rank of the tokens")]
    for axis, (key, label) in zip(axes, panels):
        for name, rows in results.items():
            axis.plot(range(1, len(rows) + 1), [r[key] for r in rows], "o-", ms=3, label=name, lw=5 if name == "default" else 1.5)       # VO only lies on it
        axis.set(xlabel="block", title=label, yscale="log" if key == "kappa_K" else "linear")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv=None):
    import json
    from pathlib import Path

    import runtime
    number = runtime.number
    parser = runtime.Parser(description=__doc__)
    add = parser.add_argument
    add("--dim", type=number(int, low=2), default=64, help="embedding width; the Jacobian has (tokens x dim)^2 entries")
    add("--heads", type=number(int, low=1), default=2, help="attention heads")
    add("--grid", type=number(int, low=2), default=4, help="side of the patch grid: grid^2 + 1 tokens")
    add("--depth", type=number(int, low=1), default=12, help="blocks")
    add("--alpha", type=number(float, low=0), default=1.8, help="random part of W_Q W_K^T")
    add("--beta", type=number(float, low=0), default=1.0, help="identity part of W_Q W_K^T")
    add("--c", type=number(float, above=0), default=3.0, help="W_V W_O is c^2 times an orthogonal matrix")
    add("--seeds", type=number(int, low=1), default=1, help="the table shows the median over this many draws")
    add("--out", default="results", help="folder for init.png and init.json")
    args = parser.parse_args(argv)
    if args.dim % args.heads:
        raise runtime.BadInput(f"--dim {args.dim} is not divisible by --heads {args.heads}: change one of them")
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise runtime.BadInput(f"--out {args.out} cannot be written ({error.strerror}): choose a folder that can") from error
    title = (f"{args.dim} channels, {args.heads} heads, {args.grid ** 2 + 1} tokens, no residuals; alpha {args.alpha:g}, beta {args.beta:g}, "
             f"c {args.c:g}; Gaussian tokens, median of {args.seeds}")
    print(title)
    results = report(args)
    (folder / "init.json").write_text(json.dumps(dict(args={k: v for k, v in vars(args).items() if k != "out"}, rows=results), indent=1) + "\n")
    plot_report(results, folder / "init.png", title)
    print(f"\n{folder / 'init.png'} and {folder / 'init.json'} written")


if __name__ == "__main__":
    import runtime
    runtime.run(main)
