"""Initialisations for transformers with and without residual connections, one function per formula.

Convention: every weight is (out, in), as in nn.Linear: y = x W^T. The papers write row vectors, y = x W,
so their W is our weight transposed: W^Q (W^K)^T = w_q^T w_k and W^V W^O = w_v^T w_o^T. All functions
work in place and draw from torch's default generator.

How well conditioned each one is, block by block: python -m evals.conditioning
"""
import functools
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


# -------------------------------------------------------------------------------------------------------
# formulas of paper 1

@torch.no_grad()
def mimetic_qk_(w_q, w_k, num_heads, alpha, beta, dist="normal"):
    """Queries and keys whose product is diagonally dominant (paper 1, 5.2; Trockman & Kolter 2023).

    w_q, w_k: (D, D); rows h*d .. (h+1)*d belong to head h, d = D / num_heads. For each head
        M = alpha Z + beta I = U S V^T,    w_q = sqrt(S_d) U_d^T,    w_k = sqrt(S_d) V_d^T
    with the d largest singular triplets. Z_ij ~ N(0, 1/D) ("normal", the paper), or uniform of the same
    variance ("uniform", the author's code).
    Product: w_q^T w_k = U_d S_d V_d^T, the best rank-d approximation of M. Its singular values are about
    beta for alpha << beta, and the top of alpha times the quarter circle law for beta << alpha.
    """
    D, d = w_q.shape[1], len(w_q) // num_heads
    for h in range(num_heads):
        U, S, Vh = torch.linalg.svd(alpha * _noise(D, dist) + beta * torch.eye(D, dtype=torch.float64))
        rows = slice(h * d, (h + 1) * d)
        w_q[rows] = (U[:, :d] * S[:d].sqrt()).T.to(w_q)
        w_k[rows] = (S[:d, None].sqrt() * Vh[:d]).to(w_k)


@torch.no_grad()
def orthogonal_vo_(w_v, w_o, c):
    """Values and output projection whose product is a scaled orthogonal matrix (paper 1, 5.1).

    w_v, w_o: (D, D), one pair per layer; one pair per head would leave the product near singular.
    Paper: W^V = c U, W^O = c V^T, U S V^T the SVD of a standard normal matrix:  w_v = c U^T, w_o = c V.
    Product: W^V W^O = c^2 U V^T. Every singular value is c^2 (9 for c = 3), the condition number 1.
    """
    U, _, Vh = torch.linalg.svd(torch.randn(w_v.shape[0], w_v.shape[0], dtype=torch.float64))
    w_v.copy_(c * U.T)
    w_o.copy_(c * Vh.T)


@torch.no_grad()
def suo_(weight, gain=1.0):
    """Scaled uniform orthogonal: gain * max(sqrt(out / in), 1) * Haar (semi-)orthogonal.

    Keeps the mean square, |W x|^2 / out = gain^2 |x|^2 / in (Martens et al. 2021): exactly where
    out >= in, in expectation where out < in. All singular values are equal, 2 for fc1 (D -> 4D),
    1 for fc2 at gain 1. (The published PyTorch helper expects (in, out): on nn.Linear it gives 1 and 2.)
    """
    out, in_ = weight.shape
    _orthogonal_(weight, gain * max(math.sqrt(out / in_), 1.0))


@torch.no_grad()
def cancel_mean_(mlp, fraction):
    """fc2.bias = -fraction * W_fc2 E[act(W_fc1 x)], x of zero mean and unit variance (ours).

    GELU's mean is the same vector for every token, so it pulls them together: by about .19 of cosine per
    layer, which no shortcut undoes. Hidden unit i sees a Gaussian of std |row i of W_fc1|.
    """
    mean = gaussian_mean(mlp.act, mlp.fc1.weight.norm(dim=1))
    mlp.fc2.bias.copy_(-fraction * mlp.fc2.weight @ mean)


# -------------------------------------------------------------------------------------------------------
# formulas of paper 2

@torch.no_grad()
def projector_qk_(w_q, w_k, num_heads, alpha, joint=False):
    """W^Q = W^K = sqrt(alpha) P for each head, P (D, d) Haar semi-orthogonal.

    joint (ours): the P of all heads are one orthogonal matrix, so that heads see orthogonal subspaces.

    Product: alpha P P^T, alpha times a projector of rank d, the nearest a head can come to the paper's
    alpha I. A token's logit with itself is alpha sqrt(d), with others alpha N(0, 1).
    """
    for rows in [w_q] if joint else w_q.chunk(num_heads):
        _orthogonal_(rows, math.sqrt(alpha))
    w_k.copy_(w_q)


@torch.no_grad()
def identity_vo_(w_v, w_o, alpha):
    """W^V = sqrt(alpha) Q, W^O = sqrt(alpha) Q^T, Q (D, D) Haar orthogonal. Product: alpha I."""
    _orthogonal_(w_v, math.sqrt(alpha))
    w_o.copy_(w_v.T)


@torch.no_grad()
def looks_linear_(fc1, fc2, gain_1=1.0, gain_2=1.0):
    """An MLP that starts as a multiple of the identity (ours, for GELU; for ReLU Balduzzi et al. 2017).

    fc1 (h, D) = a [U; -U], fc2 (D, h) = b [U^T, -U^T], U (h/2, D) with orthonormal columns. As
    gelu(z) - gelu(-z) = z, whatever constant is taken off the activation,
        fc2 gelu(fc1 x) = a b U^T U x = a b x.
    a = gain_1 sqrt(h / D / 2), b = gain_2 / sqrt(2) give the singular values of `suo_`. The pairs part
    with the first update. Raises ValueError for an odd h, or h < 2 D, where no such U exists.
    """
    h, D = fc1.shape
    if h % 2 or h < 2 * D:
        raise ValueError(f"a looks-linear MLP needs an even hidden width of at least twice the width, "
                         f"not {h} for {D}: use mlp_ratio 2 or more")
    U = nn.init.orthogonal_(torch.empty(h // 2, D, dtype=torch.float64))
    fc1.copy_(torch.cat([U, -U]) * gain_1 * math.sqrt(h / D / 2))
    fc2.copy_(torch.cat([U, -U]).T * gain_2 / math.sqrt(2))


def _noise(D, dist):
    """Z (D, D) with variance 1/D."""
    if dist == "normal":
        return torch.randn(D, D, dtype=torch.float64) / math.sqrt(D)
    if dist == "uniform":
        return (torch.rand(D, D, dtype=torch.float64) * 2 - 1) * math.sqrt(3 / D)
    raise ValueError(f"dist {dist!r} is unknown: use normal or uniform")


def _orthogonal_(weight, gain):
    """nn.init.orthogonal_ for every type: QR knows no half precision."""
    full = weight if weight.dtype in (torch.float32, torch.float64) else weight.float()
    weight.copy_(nn.init.orthogonal_(full, gain))


# -------------------------------------------------------------------------------------------------------
# whole models

# Paper 1 prints those of ViT-B (supervised) and ViT-S (DINO). nano's were chosen by hand: its heads have
# 32 dimensions, not 64, and lose 9 points with ViT-B's (results/table1.md, results/constants.md). tiny
# keeps ViT-S's, measured beside nano's (results/tiny.md); large takes ViT-B's.
PAPER_CONSTANTS = {
    "nano": dict(alpha=1.0, beta=2.0, c=3.0),
    "tiny": dict(alpha=1.8, beta=1.0, c=3.0),
    "small": dict(alpha=1.8, beta=1.0, c=3.0),
    "base": dict(alpha=2.0, beta=0.6, c=3.0),
    "large": dict(alpha=2.0, beta=0.6, c=3.0),
}


@torch.no_grad()
def init_skipless_vit(model, alpha, beta, c, dist="normal", cancel_mean=0.0, parts=("qk", "vo", "mlp")):
    """Paper 1's initialisation of a ViT (or LM) without residuals. Changes the blocks only.

    Mimetic Q K, orthogonal V O, scaled uniform orthogonal MLP, biases 0. Constants: PAPER_CONSTANTS.
    cancel_mean: ours, see `choose_constants`; 0 is the paper. parts: leave some out for an ablation.
    """
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        w_q, w_k, w_v = attn.qkv.weight.chunk(3)                # views: the functions write through
        if "qk" in parts:
            mimetic_qk_(w_q, w_k, attn.num_heads, alpha, beta, dist)
        if "vo" in parts:
            orthogonal_vo_(w_v, attn.proj.weight, c)
        if "mlp" in parts:
            suo_(mlp.fc1.weight)
            suo_(mlp.fc2.weight)
            if mlp.fc2.bias is not None:
                cancel_mean_(mlp, cancel_mean)
        for layer in (attn.qkv, attn.proj, mlp.fc1):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@torch.no_grad()
def init_residual_free_lm(model, alpha_qk=0.9, alpha_vo=3.0, alpha_u=1.5, alpha_d=1.5, mlp="suo",
                          joint_heads=False):
    """Paper 2's initialisation of a decoder (or ViT) without residuals. Changes the blocks only.

    W^Q (W^K)^T = alpha_qk times a projector, W^V W^O = alpha_vo I. mlp "suo": W^U and W^D are
    sqrt(alpha_u) and sqrt(alpha_d) times independent `suo_`; "looks-linear", ours: see `looks_linear_`.
    joint_heads: see `projector_qk_`.
    """
    for block in model.blocks:
        attn, fc1, fc2 = block.attn, block.mlp.fc1.weight, block.mlp.fc2.weight
        w_q, w_k, w_v = attn.qkv.weight.chunk(3)
        projector_qk_(w_q, w_k, attn.num_heads, alpha_qk, joint_heads)
        identity_vo_(w_v, attn.proj.weight, alpha_vo)
        if mlp == "suo":
            suo_(fc1, math.sqrt(alpha_u))
            suo_(fc2, math.sqrt(alpha_d))
        elif mlp == "looks-linear":
            looks_linear_(fc1, fc2, math.sqrt(alpha_u), math.sqrt(alpha_d))
        else:
            raise ValueError(f"mlp {mlp!r} is unknown: use suo or looks-linear")


@torch.no_grad()
def apply_init(net, how, constants, size, tokens=None):
    """--init `how` on the blocks of an encoder of images; returns the constants used, a dict.

    default: as the net was built. auto: `choose_constants` for this net; tokens: how many its attention
    sees, if not one per position. paper: PAPER_CONSTANTS[size]. skipless, residual-free: the entries of
    `constants`, by name. Raises ValueError where auto finds no constants."""
    if how == "default":
        return {}
    if how == "residual-free":
        used = {key: constants[key] for key in ("alpha_qk", "alpha_vo", "alpha_u", "alpha_d")}
        init_residual_free_lm(net, **used)
        return used
    used = PAPER_CONSTANTS[size]
    if how == "skipless":
        used = {key: constants[key] for key in ("alpha", "beta", "c", "cancel_mean") if key in constants}
    if how == "auto":
        used = constants_for(net, tokens)
    init_skipless_vit(net, **used)
    return used


def constants_for(net, tokens=None):
    """`choose_constants` for what can be read off a ViT: width, heads, tokens, depth, activation."""
    attn, block = net.blocks[0].attn, net.blocks[-1]
    beta = (attn.scale / block.attn.scale) ** (1 / max(1, len(net.blocks) - 1))
    return choose_constants(attn.proj.out_features, attn.num_heads, tokens or net.pos_embed.shape[1],
                            len(net.blocks), temperature_beta=beta, activation=block.mlp.act)


@torch.no_grad()
def init_vit(model):
    """The usual ViT initialisation (timm, DINO). The patch convolution keeps torch's own, as in both.

    Linear weights, positions and class token truncated normal of std 0.02, biases 0, norms 1 and 0."""
    for name, p in model.named_parameters():
        if name in ("pos_embed", "cls_token"):
            nn.init.trunc_normal_(p, std=0.02)
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.02)
            if m.bias is not None:
                nn.init.zeros_(m.bias)


@torch.no_grad()
def init_lm(model):
    """The usual decoder initialisation (GPT-2): embedding and Linear weights normal of std 0.02.

    The last weight of a branch beside a shortcut is divided by sqrt(2L), as 2L of them add up."""
    for m in model.modules():
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)
    for weight in _branch_ends(model.blocks):
        weight.div_(math.sqrt(2 * len(model.blocks)))


@torch.no_grad()
def init_mae(model, zero_init):
    """The masked autoencoder's initialisation: `_xavier_`, class and mask tokens normal of std 0.02.

    zero_init (paper 3): zeros in the last weight of every branch, of the skips and of the pixel head, so
    that a block starts as its shortcut. Else a net with decaying shortcuts grows its features.
    Not where the shortcut's weight is 0: there the branch is the whole signal."""
    _xavier_(model)
    for name, p in model.named_parameters():
        if name.endswith("token"):
            nn.init.normal_(p, std=0.02)
    if zero_init:
        for weight in _branch_ends(model.blocks) + _branch_ends(model.decoder_blocks):
            nn.init.zeros_(weight)
        for layer in [skip.fc2 for skip in model.skips] + [model.decoder_pred]:
            nn.init.zeros_(layer.weight)


@torch.no_grad()
def init_sit(model):
    """DiT's initialisation, "adaLN-Zero": `_xavier_`, time MLP and label table normal of std 0.02.

    Zeros in the head and where the condition sets gate, shift, scale: a block starts as its shortcut."""
    _xavier_(model)
    for m in (model.time_embed[0], model.time_embed[2], model.label_embed):
        nn.init.normal_(m.weight, std=0.02)
    for m in [block.modulation[1] for block in model.blocks] + [model.modulation[1], model.head]:
        nn.init.zeros_(m.weight)


@torch.no_grad()
def init_uvit(model, zero_init):
    """U-ViT's initialisation, that of `init_vit`. zero_init (paper 3): see `init_mae`."""
    init_vit(model)
    if zero_init:
        for weight in _branch_ends(model.blocks):
            nn.init.zeros_(weight)


def _xavier_(model):
    """Linear weights and the patch convolution, as a matrix, Xavier uniform; biases 0."""
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            nn.init.zeros_(m.bias)
    nn.init.xavier_uniform_(model.patch_embed.proj.weight.flatten(1))
    nn.init.zeros_(model.patch_embed.proj.bias)


def _branch_ends(blocks):
    """The last weights, attn.proj's and mlp.fc2's, of all branches beside a shortcut."""
    return [layer.weight for block in blocks
            for a, layer in zip(block.alphas, (block.attn.proj, block.mlp.fc2)) if a != 0]


# -------------------------------------------------------------------------------------------------------
# the rule behind --init auto (ours): constants for which two forecast numbers are on target

def choose_constants(dim, num_heads, tokens, depth, diagonal=0.95, cosine=0.95, ratio=2.0, c=3.0,
                     temperature_beta=1.0, activation=F.gelu):
    """Keyword arguments for `init_skipless_vit`, from the size of the net.

    What printed constants do depends on the head dimension d: the self-logit is about beta sqrt(d). So
    1. attention: alpha and beta, at the given ratio beta / alpha, are scaled until the first block's
       mean diagonal A_ii is `diagonal`. Where many tokens put that out of reach, the ratio doubles.
    2. tokens: the smallest share of the activation's mean is cancelled for which the token cosine of the
       *last* block is at most `cosine`; all of it where no share is enough.
    A last cosine near 1 is wanted: with near-identity attention the class token hears the patches only
    where tokens begin to merge. Measured: conditioning gains much (python -m evals.conditioning); at 12
    layers no search is needed; at 24, at the same lr, nets that cancel nothing learn better
    (results/depth.md).
    Raises ValueError where nothing reaches the diagonal.
    """
    for ratio in (ratio, 2 * ratio, 4 * ratio, 8 * ratio):
        self_logit, logit_std = qk_statistics(1.0, ratio, dim, num_heads)

        def first_diagonal(k):
            return attention_map(0.0, k * self_logit, k * logit_std, tokens, rows=1024)[0]
        if first_diagonal(100.0) > diagonal:
            break
    else:
        raise ValueError(f"no alpha and beta reach an attention diagonal of {diagonal} for {tokens} "
                         f"tokens and heads of {dim // num_heads} dimensions: use fewer heads")
    k = bisect(lambda k: first_diagonal(k) >= diagonal, 0.0, 100.0)

    def last_cosine(share):
        logits = k * self_logit, k * logit_std
        return forecast(*logits, tokens, depth, share, temperature_beta, activation)[1][-1]
    share = bisect(lambda share: last_cosine(share) <= cosine, 0.0, 1.0)
    return dict(alpha=k, beta=ratio * k, c=c, cancel_mean=share)


@functools.lru_cache
def choose_lm_constants(dim, num_heads, tokens, depth, temperature_beta=1.0, attention_scale="head",
                        diagonal=0.9, cosine=0.95, activation=F.gelu):
    """A dict of alpha_qk and center for a residual-free LM, from its size.

    What alpha_qk does depends on head dimension, context and depth: the printed .9 collapses tokens. So
    1. alpha_qk is the smallest, up to 20, that brings every block's attention diagonal to `diagonal`.
    2. center is the smallest share of the activation's mean to take off, so that the token cosine of the
       last block is at most `cosine`: 0 in most sizes, once 1. holds.
    """
    scale = 1.0 if attention_scale == "head" else num_heads ** -0.5

    def forecast_for(alpha_qk, center):
        return forecast_lm(alpha_qk, dim // num_heads, tokens, depth, temperature_beta, center=center,
                           scale=scale, activation=activation)

    def sharp(log_alpha):
        return min(forecast_for(math.exp(log_alpha), 0.0)[0]) >= diagonal
    alpha_qk = math.exp(bisect(sharp, math.log(0.1), math.log(20.0), steps=8))
    center = bisect(lambda share: forecast_for(alpha_qk, share)[1][-1] <= cosine, 0.0, 1.0, steps=7)
    return dict(alpha_qk=float(f"{alpha_qk:.2g}"), center=center)


def bisect(ok, low, high, steps=25):
    """The smallest x in [low, high] with ok(x), which turns True once; high if it never does."""
    if ok(low):
        return low
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if ok(middle) else (middle, high)
    return high


def forecast(self_logit, logit_std, tokens, depth, cancel_mean=0.0, temperature_beta=1.0,
             activation=F.gelu):
    """Mean attention diagonal and token cosine of every block of a skipless net: two lists.

    self_logit, logit_std: see `qk_statistics`; those of block l are times beta ** -l."""
    diagonals, cosines = [], [0.0]
    for l in range(depth):
        tau = temperature_beta ** -l
        diagonal, cosine = attention_map(cosines[-1], self_logit * tau, logit_std * tau, tokens)
        diagonals.append(diagonal)
        cosines.append(mlp_map(cosine, cancel_mean, activation=activation))
    return diagonals, cosines[1:]


def forecast_lm(alpha_qk, head_dim, tokens, depth, temperature_beta=1.0, mlp="suo", center=0.0,
                alpha_u=1.5, scale=1.0, activation=F.gelu):
    """`forecast` for a decoder with `init_residual_free_lm`. scale: of all logits.

    A looks-linear MLP leaves cosines as they are, so only attention merges tokens."""
    diagonals, cosines = [], [0.0]
    for l in range(depth):
        tau = scale * temperature_beta ** -l
        diagonal, cosine = causal_attention_map(cosines[-1], alpha_qk, head_dim, tokens, tau)
        diagonals.append(diagonal)
        if mlp == "suo":
            cosine = mlp_map(cosine, center, math.sqrt(alpha_u), activation)
        cosines.append(cosine)
    return diagonals, cosines[1:]


def qk_statistics(alpha, beta, dim, num_heads, seed=0):
    """(self_logit, logit_std) of a head with `mimetic_qk_`, for independent tokens of unit variance.

    M is the truncated product. x^T M x / sqrt(d), of a token with itself, has the mean tr(M) / sqrt(d);
    x^T M y / sqrt(d), of two tokens, has the std |M|_F / sqrt(d). One draw is enough: both concentrate.
    """
    generator = torch.Generator().manual_seed(seed)
    d = dim // num_heads
    Z = torch.randn(dim, dim, dtype=torch.float64, generator=generator) / math.sqrt(dim)
    U, S, Vh = torch.linalg.svd(alpha * Z + beta * torch.eye(dim, dtype=torch.float64))
    trace = (S[:d] * (U[:, :d] * Vh[:d].T).sum(0)).sum()
    return (trace / math.sqrt(d)).item(), (S[:d].norm() / math.sqrt(d)).item()


def attention_map(cosine, self_logit, logit_std, tokens, rows=256, seed=0):
    """Mean diagonal of A, and the token cosine c' after it, for tokens sqrt(c) u + sqrt(1 - c) z_i.

    The part u, common to all keys, shifts a whole row of logits and cancels in the softmax. What is left
    is (1 - c) self_logit on the diagonal and noise of std sqrt(1 - c) logit_std everywhere: tokens that
    grow alike attend more evenly, which makes them more alike. The output keeps u whole and mixes z:
        c' = (c + (1 - c) r) / (c + (1 - c) q),   q = E sum_j A_ij^2,   r = E sum_j A_ij A_kj, i != k.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, tokens, dtype=torch.float64, generator=generator)
    logits = logits * logit_std * math.sqrt(1 - cosine)
    logits[:, 0] += self_logit * (1 - cosine)
    A = logits.softmax(-1)
    a, q = A[:, 0].mean().item(), A.square().sum(1).mean().item()
    b = (1 - a) / max(1, tokens - 1)
    r = 2 * a * b + max(0, tokens - 2) * b * b
    return a, (cosine + (1 - cosine) * r) / (cosine + (1 - cosine) * q)


def causal_attention_map(cosine, alpha_qk, head_dim, tokens, temperature=1.0, seed=0):
    """`attention_map` for a head of `init_residual_free_lm`, with a causal mask and rotary positions.

    Queries and keys are one projection of the tokens, here drawn in d dimensions. The common part does
    not cancel: turned by the distance, it makes near tokens likelier. c' is the mean over i != k of
        C_ik = (c + (1 - c) (A A^T)_ik) / sqrt((c + (1 - c) q_i) (c + (1 - c) q_k)),  q_i = sum_j A_ij^2.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = max(1, min(64, 2 ** 19 // tokens ** 2))             # short texts need more for a mean
    u = torch.randn(heads, 1, head_dim, generator=generator)
    z = torch.randn(heads, tokens, head_dim, generator=generator)
    x = _turn_by_position(math.sqrt(cosine) * u + math.sqrt(1 - cosine) * z)
    logits = x @ x.mT * alpha_qk * temperature / math.sqrt(head_dim)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    A = logits.masked_fill(future, -math.inf).softmax(-1)
    C = cosine + (1 - cosine) * (A @ A.mT).mean(0)
    C = C / torch.sqrt(C.diagonal()[:, None] * C.diagonal())
    off_diagonal = (C.sum() - tokens) / max(1, tokens * (tokens - 1))
    return A.diagonal(dim1=-2, dim2=-1).mean().item(), off_diagonal.item()


def _turn_by_position(x):
    """Rotary positions of x (..., N, d): dimensions i and i + d/2, as a complex number, are turned."""
    N, d = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(N, dtype=torch.float64)[:, None] * frequency
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle).cfloat()
    return torch.cat([turned.real, turned.imag], dim=-1)


def mlp_map(cosine, cancel_mean=0.0, scale=1.0, activation=F.gelu):
    """Token cosine after an SUO MLP, f(z) = activation(scale z), less a share cancel_mean of its mean m.

    c' = (E[f(z) f(z')] - k m^2) / (E[f(z)^2] - k m^2),   corr(z, z') = c,   k = 1 - (1 - cancel_mean)^2,
    by Gauss-Hermite quadrature in two dimensions.
    """
    x, w = _gauss_hermite()
    other = cosine * x[:, None] + math.sqrt(max(0.0, 1 - cosine ** 2)) * x[None, :]
    f, f_other = activation(scale * x), activation(scale * other)
    cross = (w[:, None] * w[None, :] * f[:, None] * f_other).sum().item()
    square = (w * f.square()).sum().item()
    removed = (1 - (1 - cancel_mean) ** 2) * gaussian_mean(activation, scale) ** 2
    return min(1.0, (cross - removed) / (square - removed))


def gaussian_mean(f, scale=1.0):
    """E[f(s z)], z standard normal, s a number or a tensor: by quadrature, for GELU in closed form.

    GELU's is s^2 / sqrt(2 pi (1 + s^2)), by Stein's lemma; .2821 for s = 1."""
    if f is F.gelu:
        return scale ** 2 / (2 * math.pi * (1 + scale ** 2)) ** 0.5
    x, w = _gauss_hermite()
    s = torch.as_tensor(scale)
    mean = (f(s.double()[..., None] * x.to(s.device)) * w.to(s.device)).sum(-1)
    return mean.to(s.dtype) if torch.is_tensor(scale) else mean.item()


def _gauss_hermite(points=48):
    """Nodes and weights for E[f(z)], z standard normal."""
    x, w = np.polynomial.hermite_e.hermegauss(points)
    return torch.from_numpy(x), torch.from_numpy(w / w.sum())


def token_cosine(x):
    """Mean cosine between different tokens of an image, x (B, N, D) -> scalar."""
    y = F.normalize(x, dim=-1)
    n = x.shape[1]
    return ((y @ y.mT).sum((1, 2)) - n).div(n * (n - 1)).mean()
