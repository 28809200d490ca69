"""SOAP, KL-Shampoo and Muon from scratch, and which parameter goes to which optimizer.

A residual-free transformer is badly conditioned, and preconditioning is half of the cure (the initialisation is the other half).
    SOAP        Adam, run in the slowly turning eigenbasis of Shampoo's two factors      (Vyas et al. 2024)
    KL-Shampoo  L^(-1/2) M R^(-1/2), with L and R fitted to the gradients in KL divergence (Lin et al. 2025)
    Muon        the momentum with all its singular values pushed towards 1                (Jordan et al. 2024)
They are meant for the weight matrices of the blocks; everything else belongs to AdamW. `build_optimizer` sorts that out.

Notation: W an m x n weight, G its gradient, M and V first and second moment, S_k the factor of side k, Q_k its eigenvectors,
t the number of updates made *for this parameter*, u = 2mn(m+n) the flops of one product Q_L^T G Q_R. `optimizer.step()` is a "call".

State is float32 whatever the parameter's type (float64 for float64 parameters), and so are the factors, `eigh` and QR: a Gram
matrix in TF32 has no small eigenvalues left. The exception is Muon, which keeps its momentum in the parameter's type, as torch does.
"""
import copy
import math
import warnings
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor


# ----------------------------------------------------------------------------------------------------------------------
# What the three have in common

@contextmanager
def true_fp32(device_type: str):
    """fp32 products are fp32 in here: no autocast, no TF32 (cuda), no bf16 (cpu); the user's choice comes back at the end."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [b.fp32_precision for b in backends]
    try:                                            # torch has an old and a new switch and complains where the two disagree, so set both
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:                            # the user took the new one: the old one can't be read, and needn't be
        legacy = None
    try:
        if legacy is not None:
            torch.set_float32_matmul_precision("highest")
        for b in backends:
            b.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)
        for b, precision in zip(backends, before):
            b.fp32_precision = precision


VALID = {                                           # option: (test, "must be ...")
    "lr": (lambda x: x >= 0, "at least 0"),
    "weight_decay": (lambda x: x >= 0, "at least 0"),
    "eps": (lambda x: x >= 0, "at least 0"),
    "betas": (lambda x: len(x) == 2 and all(0 <= b < 1 for b in x), "two numbers in [0, 1)"),
    "shampoo_beta": (lambda x: x is None or 0 <= x < 1, "in [0, 1), or None for the second of betas"),
    "precondition_frequency": (lambda x: isinstance(x, int) and x >= 1, "a whole number of at least 1"),
    "max_precond_dim": (lambda x: x >= 0, "at least 0"),
    "init_factor": (lambda x: x > 0, "above 0"),
    "max_clamp_value": (lambda x: x is None or x > 0, "above 0, or None for no limit"),
    "momentum": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "ns_steps": (lambda x: isinstance(x, int) and 0 <= x < 100, "a whole number from 0 to 99"),
    "adjust_lr_fn": (lambda x: x in MUON_SCALES, "None, original, match_rms_adamw or spectral_unclamped"),
}


def require(ok: bool, sentence: str) -> None:
    if not ok:
        raise ValueError(sentence)


class MatrixOptimizer(torch.optim.Optimizer):
    """The loop over parameters, validation, and a state that survives `load_state_dict`. The maths of one parameter is in `update`."""

    least_rank = 2

    def update(self, p: Tensor, group: dict) -> None:
        raise NotImplementedError

    def preconditioned(self, shape: tuple, group: dict) -> list[bool]:
        """For each side of a tensor, as this optimizer sees it: does it have a factor?"""
        return []

    def state_dtype(self, p: Tensor) -> torch.dtype:
        return torch.float64 if p.dtype == torch.float64 else torch.float32

    def add_param_group(self, param_group: dict) -> None:
        for key, value in {**self.defaults, **param_group}.items():
            test, words = VALID.get(key, (lambda x: True, ""))
            require(test(value), f"{key} must be {words}, not {value!r}.")
        super().add_param_group(param_group)
        me = type(self).__name__
        for p in self.param_groups[-1]["params"]:
            require(p.is_floating_point(), f"{me} needs real floating-point parameters, not {p.dtype} of shape {tuple(p.shape)}.")
            require(p.ndim >= self.least_rank, f"{me} is for matrices, not for shape {tuple(p.shape)}; give biases, gains and tokens to AdamW.")

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():               # a closure calls backward
                loss = closure()
        with true_fp32(next(p for group in self.param_groups for p in group["params"]).device.type):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        require(not p.grad.is_sparse, f"{type(self).__name__} needs dense gradients; give the {tuple(p.shape)} tensor to SparseAdam.")
                        self.update(p, group)
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """torch casts every floating tensor of the state to the parameter's type, those in lists too: take them again from the source."""
        super().load_state_dict(state_dict)
        saved_ids = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        params = chain.from_iterable(g["params"] for g in self.param_groups)
        for i, p in zip(saved_ids, params):
            if i in state_dict["state"]:
                self.state[p] = copy_to(state_dict["state"][i], p.device, self.state_dtype(p))


def copy_to(value, device, dtype):
    """A copy of a state: tensors inside dicts and lists move to device and dtype, numbers and None stay as they are."""
    if isinstance(value, Tensor):
        return value.to(device, dtype, copy=True)
    if isinstance(value, dict):
        return {key: copy_to(v, device, dtype) for key, v in value.items()}
    return [copy_to(v, device, dtype) for v in value] if isinstance(value, list) else value


def move(p: Tensor, direction: Tensor, step_size: float, decay: float) -> None:
    """W <- (1 - decay)(W - step_size U): decay acts on the moved weight. Computed in U's type, rounded once to the parameter's."""
    w = p.to(direction.dtype)                       # p itself for fp32 parameters
    w.sub_(direction, alpha=step_size)
    if decay:
        w.mul_(1 - decay)
    if w is not p:
        p.copy_(w)


def factorise(decomposition, s: Tensor, what: str):
    """decomposition(s); if that fails, in float64 on the CPU (LAPACK is there on every machine); if that fails too, say so."""
    try:
        return decomposition(s)
    except RuntimeError as error:                   # includes LinAlgError
        warnings.warn(f"{what} of the {tuple(s.shape)} factor failed in {s.dtype} and is repeated in float64: {error}", stacklevel=2)
    try:
        return [part.to(s) for part in decomposition(s.to("cpu", torch.float64))]
    except RuntimeError as error:
        raise RuntimeError(f"{what} of the factor of shape {tuple(s.shape)} failed, in float64 too: are all gradients finite? ({error})") from error


def eigenbasis(s: Tensor) -> Tensor:
    """Eigenvectors of the symmetric s (n, n) as columns, the largest eigenvalue first."""
    jitter = 1e-30 * torch.eye(len(s), dtype=s.dtype, device=s.device)
    return factorise(torch.linalg.eigh, s + jitter, "eigh")[1].flip(1)


def orthonormal(x: Tensor) -> Tensor:
    """Q of x = QR, both (n, n). With x = S Q this is one step of orthogonal iteration towards the eigenvectors of S."""
    return factorise(torch.linalg.qr, x, "QR")[0]


def rotate(x: Tensor, bases: list, back: bool = False) -> Tensor:
    """x times Q_k^T along each mode k, or Q_k with `back`; None stands for the identity. For a matrix: Q_L^T x Q_R, or Q_L x Q_R^T.

    Each round consumes the leading mode and appends the result as the last one, so after all rounds the modes are in order again."""
    for q in bases:
        x = x.movedim(0, -1) if q is None else torch.tensordot(x, q, dims=([0], [1 if back else 0]))
    return x


def gram(x: Tensor, mode: int) -> Tensor:
    """X_(k) X_(k)^T (d_k, d_k), with X_(k) the unfolding of x along mode k: x x^T and x^T x for a matrix."""
    rows = x.movedim(mode, 0).flatten(1) if x.ndim > 1 else x[:, None]
    return rows @ rows.T


def shampoo_beta(group: dict) -> float:
    return group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]      # 0 is a real value


# ----------------------------------------------------------------------------------------------------------------------
# SOAP

class SOAP(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's factors. For a tensor of any rank, one factor per mode; for a matrix, with b = shampoo_beta:

        R = Q_L^T G Q_R                                     G as seen from the basis of the *previous* calls
        M <- b1 M + (1-b1) R,   V <- b2 V + (1-b2) R^2      both live in the eigenbasis
        W <- W - a Q_L [M / (sqrt(V) + eps)] Q_R^T          a = lr sqrt(1-b2^t) / (1-b1^t): eps comes before the bias correction
        W <- W - lr wd W
        S_L <- b S_L + (1-b) G G^T,   S_R <- b S_R + (1-b) G^T G
        every f updates: sort the basis by diag(Q^T S Q), V along with it; Q <- QR(S Q).Q; M moves to the new basis, V stays

    The first call in which a parameter has a gradient only seeds S and Q (by eigh): nothing moves, M = V = 0, t = 0.
    Sides longer than max_precond_dim have the identity for a basis (None in the state); no factor at all (scalars, vectors, two long
    sides) is Adam, one call late. Memory: M, V, S_k, Q_k = 2 + 2(m^2+n^2)/mn times the weight: 6x if square, 10.5x for an MLP's 4:1.
    Flops: 3u per update (into the basis, back, factors), because M stays in the eigenbasis from one refresh to the next; a refresh
    adds 2u for M and per side 2n^3 (S Q, used for the sorting and for the QR) and a QR of about 8/3 n^3.
    """

    least_rank = 0

    def __init__(self, params, lr=3e-3, betas=(.95, .95), shampoo_beta=None, eps=1e-8, weight_decay=.01, precondition_frequency=10,
                 max_precond_dim=10000, correct_bias=True, normalize_grads=False):
        super().__init__(params, dict(lr=lr, betas=betas, shampoo_beta=shampoo_beta, eps=eps, weight_decay=weight_decay,
                                      precondition_frequency=precondition_frequency, max_precond_dim=max_precond_dim,
                                      correct_bias=correct_bias, normalize_grads=normalize_grads))

    def preconditioned(self, shape, group):
        return [len(shape) > 1 and d <= group["max_precond_dim"] for d in shape]

    def update(self, p, group):
        g = p.grad.to(self.state_dtype(p))
        if not self.state[p]:
            self.state[p] = soap_seed(g, shampoo_beta(group), self.preconditioned(p.shape, group))
            return
        state = self.state[p]
        direction, step_size = soap_direction(g, state, group)
        move(p, direction, step_size, group["lr"] * group["weight_decay"])
        for k, s in enumerate(state["GG"]):
            if s is not None:
                s.lerp_(gram(g, k), 1 - shampoo_beta(group))
        # Last of all: G_t turns the basis of update t+1, never its own
        if state["step"] % group["precondition_frequency"] == 0:
            soap_refresh(state)


def soap_seed(g: Tensor, b: float, sides: list[bool]) -> dict:
    """The state after the first gradient: factors (1-b) G_(k) G_(k)^T and their eigenvectors."""
    factors = [(1 - b) * gram(g, k) if has else None for k, has in enumerate(sides)]
    return {"step": 0, "exp_avg": torch.zeros_like(g), "exp_avg_sq": torch.zeros_like(g), "GG": factors,
            "Q": [None if s is None else eigenbasis(s) for s in factors]}


def soap_direction(g: Tensor, state: dict, group: dict) -> tuple[Tensor, float]:
    """Advances M, V and t with g; returns U (in the shape of g) and its step size."""
    m, v, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
    state["step"] += 1
    r = rotate(g, state["Q"])
    m.lerp_(r, 1 - beta1)
    v.mul_(beta2).addcmul_(r, r, value=1 - beta2)
    direction = rotate(m / (v.sqrt() + group["eps"]), state["Q"], back=True)
    step_size = group["lr"]
    if group["correct_bias"]:
        step_size *= math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
    if group["normalize_grads"]:
        direction = direction / (1e-30 + direction.square().mean().sqrt())
    return direction, step_size


def soap_refresh(state: dict) -> None:
    """Turn the bases towards the factors' eigenvectors; V is permuted with its basis vectors, M is carried over exactly."""
    m = rotate(state["exp_avg"], state["Q"], back=True)
    for k, (s, q) in enumerate(zip(state["GG"], state["Q"])):
        if s is None:
            continue
        sq = s @ q
        eigenvalues = (q * sq).sum(0)                                   # diag(Q^T S Q)
        order = eigenvalues.argsort(descending=True, stable=True)
        state["exp_avg_sq"] = state["exp_avg_sq"].index_select(k, order)
        state["Q"][k] = orthonormal(sq[:, order])
    state["exp_avg"] = rotate(m, state["Q"])


# ----------------------------------------------------------------------------------------------------------------------
# KL-Shampoo

class KLShampoo(MatrixOptimizer):
    """L^(-1/2) M R^(-1/2), where L (x) R is the Kronecker product closest in KL divergence to the gradients' second moment: the fixed
    point L = E[G R^-1 G^T] / n, R = E[G^T L^-1 G] / m. Tensors of rank 3 and 4 are the matrix (out, rest). With b = shampoo_beta,
    lambda the eigenvalues of L and R, and a = lambda_L^(-1/2) (m), c = lambda_R^(-1/2) (n), all of the *previous* call:

        M <- b1 M + (1-b1) G                                no bias correction anywhere
        W <- W - lr Q_L [(Q_L^T M Q_R)_ij * 1 / (1/(a_i c_j) + eps)] Q_R^T;      W <- W - lr wd W
        S_L <- b S_L + (1-b)/n G Q_R diag(c^2) Q_R^T G^T,   S_R <- b S_R + (1-b)/m G^T Q_L diag(a^2) Q_L^T G
        lambda_L,i <- b lambda_L,i + (1-b) mean_j (H_ij c_j)^2,  lambda_R,j likewise over i with a_i,  H = Q_L^T G Q_R
        a <- lambda_L^(-1/2), at most max(10, min(m, max_clamp_value)); c likewise; no limit if max_clamp_value is None
        every f updates: Q <- QR(S Q).Q (not sorted, lambda stays as it is)

    The first call in which a parameter has a gradient only seeds: S_L = (1-b)/n G G^T, Q by eigh, all lambda = init_factor, M = 0.
    Published code runs this in bfloat16; here the state is fp32. Memory: M, S_k, Q_k = 1 + 2(m^2+n^2)/mn times the weight (no V).
    Flops: 3u + 2mn min(m,n) per update, because M is kept as Q_L^T M Q_R; a refresh adds 2u for M and per side 2n^3 and a QR.
    """

    def __init__(self, params, lr=1e-4, betas=(.9, .98), shampoo_beta=None, eps=1e-8, weight_decay=.01, precondition_frequency=10,
                 init_factor=.1, max_clamp_value=4000):
        super().__init__(params, dict(lr=lr, betas=betas, shampoo_beta=shampoo_beta, eps=eps, weight_decay=weight_decay,
                                      precondition_frequency=precondition_frequency, init_factor=init_factor, max_clamp_value=max_clamp_value))

    def preconditioned(self, shape, group):
        return [True, True]

    def update(self, p, group):
        g = p.grad.to(self.state_dtype(p)).flatten(1)                       # (out, rest)
        if not self.state[p]:
            self.state[p] = kl_seed(g, shampoo_beta(group), group["init_factor"])
            return
        state = self.state[p]
        state["step"] += 1
        left, right = state["Q"]
        lg, gr = left.T @ g, g @ right                                  # both halves are needed below,
        h = left.T @ gr if len(g) <= g.shape[1] else lg @ right         # the whole from whichever is cheaper
        direction = kl_direction(h, state, group)
        kl_factors(lg, gr, h, state, group)
        move(p, direction.reshape(p.shape), group["lr"], group["lr"] * group["weight_decay"])
        if state["step"] % group["precondition_frequency"] == 0:
            kl_refresh(state)


def kl_seed(g: Tensor, b: float, init_factor: float) -> dict:
    """The state after the first gradient. Each factor takes the other for the identity; eigh's eigenvalues are thrown away."""
    m, n = g.shape
    factors = [(1 - b) / n * gram(g, 0), (1 - b) / m * gram(g, 1)]
    return {"step": 0, "exp_avg": torch.zeros_like(g), "GG": factors, "Q": [eigenbasis(s) for s in factors],
            "eigen_sqrt_inv": [g.new_full((d,), init_factor ** -.5) for d in (m, n)]}


def kl_direction(h: Tensor, state: dict, group: dict) -> Tensor:
    """Advances M with h = Q_L^T G Q_R; returns L^(-1/2) M R^(-1/2) in the parameter's basis, all (m, n)."""
    a, c = state["eigen_sqrt_inv"]
    state["exp_avg"].lerp_(h, 1 - group["betas"][0])
    scale = a[:, None] * c
    return rotate(state["exp_avg"] * scale / (1 + group["eps"] * scale), state["Q"], back=True)


def kl_factors(lg: Tensor, gr: Tensor, h: Tensor, state: dict, group: dict) -> None:
    """Factors and eigenvalues from lg = Q_L^T G, gr = G Q_R and h = Q_L^T G Q_R; both sides see the other as it was before."""
    (a, c), (m, n), b = state["eigen_sqrt_inv"], h.shape, shampoo_beta(group)
    state["GG"][0].lerp_(gram(gr * c, 0) / n, 1 - b)
    state["GG"][1].lerp_(gram(lg * a[:, None], 1) / m, 1 - b)
    seen = (h * c).square().mean(1), (h * a[:, None]).square().mean(0)
    state["eigen_sqrt_inv"] = [kl_inverse_root(old, new, b, group["max_clamp_value"]) for old, new in zip((a, c), seen)]


def kl_inverse_root(a: Tensor, seen: Tensor, b: float, limit: float | None) -> Tensor:
    """lambda^(-1/2) (d,) after lambda = a^-2 has moved towards `seen`. Only a is stored, so the limit on a is a floor under lambda."""
    a = (b * a.pow(-2) + (1 - b) * seen).rsqrt()
    a = torch.where(a.isfinite(), a, 0.)            # a direction without any gradient stands still
    return a if limit is None else a.clamp(max=max(10, min(len(a), limit)))


def kl_refresh(state: dict) -> None:
    m = rotate(state["exp_avg"], state["Q"], back=True)
    state["Q"] = [orthonormal(s @ q) for s, q in zip(state["GG"], state["Q"])]
    state["exp_avg"] = rotate(m, state["Q"])


# ----------------------------------------------------------------------------------------------------------------------
# Muon

MUON_SCALES = {                                     # of (out, in)
    None: lambda m, n: math.sqrt(max(1, m / n)),
    "original": lambda m, n: math.sqrt(max(1, m / n)),
    "match_rms_adamw": lambda m, n: .2 * math.sqrt(max(m, n)),
    "spectral_unclamped": lambda m, n: math.sqrt(m / n),
}


class Muon(MatrixOptimizer):
    """Momentum, orthogonalised. Tensors of rank 3 and 4 are the matrix (out, rest); otherwise the same numbers as torch.optim.Muon:

        B <- mu B + (1-mu) G
        O = NewtonSchulz(nesterov ? (1-mu) G + mu B : B)    singular values to about [0.7, 1.2], in bfloat16
        W <- (1 - lr wd) W - lr scale O                     decay comes first and knows no scale

    scale, by adjust_lr_fn: "original" (None) sqrt(max(1, out/in)); "match_rms_adamw" 0.2 sqrt(max(out, in)), which gives the update the
    size of an AdamW update, so that AdamW's lr fits; "spectral_unclamped" sqrt(out/in). Memory: one buffer, 1x the weight, in its type.
    Flops: 2(2 r^2 c + r^3) for each of ns_steps, r the short and c the long side.
    """

    def __init__(self, params, lr=1e-3, weight_decay=.1, momentum=.95, nesterov=True, ns_steps=5, adjust_lr_fn=None):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps,
                                      adjust_lr_fn=adjust_lr_fn))

    def state_dtype(self, p):
        return p.dtype

    def update(self, p, group):
        mu, g = group["momentum"], p.grad
        if not self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(g)
        buffer = self.state[p]["momentum_buffer"]
        buffer.lerp_(g, 1 - mu)
        o = newton_schulz((g.lerp(buffer, mu) if group["nesterov"] else buffer).flatten(1), group["ns_steps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(o.reshape(p.shape), alpha=-group["lr"] * MUON_SCALES[group["adjust_lr_fn"]](*o.shape))


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """U V^T, roughly, of x = U S V^T (m, n): a quintic in the singular values that is steep at 0 and never quite settles at 1."""
    tall = x.shape[0] > x.shape[1]
    y = x.bfloat16().T if tall else x.bfloat16()                        # the Gram matrix of the short side is the small one
    y = y / y.norm().clamp(min=1e-7)                                    # not in place: y may be the momentum buffer itself
    for _ in range(steps):
        a = y @ y.T
        y = torch.addmm(y, torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return y.T if tall else y


# ----------------------------------------------------------------------------------------------------------------------
# Which parameter goes where

MATRIX_OPTIMIZERS = {"soap": SOAP, "kl-shampoo": KLShampoo, "muon": Muon}


class Optimizers:
    """A matrix optimizer and the AdamW beside it (or AdamW alone), driven as one. `parts` holds the torch optimizers.

    Not a torch.optim.Optimizer itself, so torch's lr_schedulers do not take it: set the lr in param_groups, as `build_optimizer` says."""

    def __init__(self, name: str, parts: list):
        self.name, self.parts = name, parts

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict:
        return {"name": self.name, "parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict) -> None:
        theirs = state_dict.get("name")
        require(theirs == self.name, f"This is the state of the optimizer {theirs!r}, but the run uses {self.name!r}: choose {theirs!r}, or start afresh.")
        require(len(state_dict["parts"]) == len(self.parts), "This optimizer state was saved for a model with other kinds of parameters.")
        for part, state in zip(self.parts, state_dict["parts"]):
            scales = [group["lr_scale"] for group in part.param_groups]
            part.load_state_dict(copy.deepcopy(state))                  # torch would share tensors with the given dict
            for group, scale in zip(part.param_groups, scales):         # of the lrs this run was started with, which may be new
                group["lr_scale"] = scale


def is_token(name: str) -> bool:
    """Tokens and positions are points, not maps: pulling them to 0 means nothing."""
    return "token" in name or "pos_embed" in name


def by_layer(group: dict, depth: int, decay: float, lr: float) -> list[dict]:
    """The group, or where decay is below 1 one group per layer i = 0 (embeddings, positions, tokens), 1 .. depth (blocks), depth + 1 (head, final norm):
    lr_scale times decay ** (depth + 1 - i), as in MAE and BEiT."""
    if decay == 1:
        return [group]
    layers = {}
    for key, p in group["params"]:
        first, _, rest = key.partition(".")
        i = 1 + int(rest.partition(".")[0]) if first == "blocks" else 0 if first in ("patch_embed", "token_embed", "cls_token", "pos_embed") else depth + 1
        layers.setdefault(i, []).append((key, p))
    scales = {i: group["lr_scale"] * decay ** (depth + 1 - i) for i in sorted(layers)}
    return [{**group, "params": layers[i], "layer": i, "lr_scale": scale, "lr": lr * scale} for i, scale in scales.items()]


def build_optimizer(model, name: str, lr: float, weight_decay: float, aux_lr: float | None = None, aux_betas=(.9, .999), layer_decay: float = 1.0,
                    **options) -> Optimizers:
    """The optimizer `name` ("adamw", "soap", "kl-shampoo", "muon") for a model.

    Weights of rank >= 2 inside `blocks.` (attention and MLP, decoder blocks included) go to the matrix optimizer with `options`. Everything
    else (patch and token embedding, positions, tokens, head, norms, biases) goes to AdamW with `aux_lr` (default: lr) and `aux_betas`.
    For "adamw" all parameters go to AdamW with lr and `options`; aux_lr has no meaning then. Vectors, biases, tokens and positions never decay.
    For Muon adjust_lr_fn is "match_rms_adamw" unless given, since then one lr serves both parts.
    layer_decay below 1, for fine-tuning: each layer learns that much more slowly than the one above it, and has groups of its own (`by_layer`).

    A schedule sets `g["lr"] = lr_t * g["lr_scale"]` for g in param_groups; lr_scale is aux_lr / lr for AdamW's groups beside a matrix optimizer, else 1,
    times the layer's share.
    """
    require(name == "adamw" or name in MATRIX_OPTIMIZERS, f"There is no optimizer {name!r}: choose adamw, {', '.join(MATRIX_OPTIMIZERS)}.")
    require(lr > 0, f"lr must be above 0, not {lr}.")
    require(aux_lr is None or aux_lr > 0, f"aux_lr must be above 0, not {aux_lr}.")
    require(0 < layer_decay <= 1, f"layer_decay must be above 0 and at most 1, not {layer_decay}.")
    depth = len(getattr(model, "blocks", ()))
    require(layer_decay == 1 or depth > 0, "layer_decay counts the model's `blocks`, and it has none: leave it at 1.")
    matrix, decay, still = [], [], []
    for key, p in model.named_parameters():
        if p.requires_grad:
            maps = p.ndim >= 2 and not is_token(key) and not key.endswith("bias")
            is_matrix = name != "adamw" and maps and "blocks." in key
            (matrix if is_matrix else decay if maps else still).append((key, p))
    alone = name == "adamw"
    require(alone or matrix, f"The model has no trainable weight matrix inside `blocks.`, so there is nothing for {name!r} to do: choose adamw.")

    def layered(groups):
        return [layer for group in groups for layer in by_layer(group, depth, layer_decay, lr)]

    parts = []
    if not alone:
        if name == "muon":
            options.setdefault("adjust_lr_fn", "match_rms_adamw")
        group = {"params": matrix, "name": "matrix", "lr_scale": 1.0}
        parts.append(MATRIX_OPTIMIZERS[name](layered([group]), lr=lr, weight_decay=weight_decay, **options))
    scale = 1.0 if alone or aux_lr is None else aux_lr / lr
    prefix = "" if alone else "aux_"
    groups = [{"params": params, "name": prefix + label, "lr_scale": scale, "weight_decay": wd}
              for params, label, wd in ((decay, "decay", weight_decay), (still, "no_decay", 0.0)) if params]
    if groups:
        parts.append(torch.optim.AdamW(layered(groups), lr=lr * scale, **{"betas": aux_betas, "fused": True, **(options if alone else {})}))      # fused: one pass over memory
    return Optimizers(name, parts)


def describe(optimizer) -> str:
    """A few lines: tensors and parameters per group, and which sides of which matrices are preconditioned."""
    lines = []
    for part in getattr(optimizer, "parts", [optimizer]):
        for group in merge_layers(part.param_groups):
            count = sum(p.numel() for p in group["params"])
            lines.append(f"{type(part).__name__} {group['name']}: {len(group['params'])} tensors, {count:,} parameters, "
                         f"lr {group['lr']}, weight decay {group['weight_decay']:g}")
            if isinstance(part, (SOAP, KLShampoo)):
                lines += ["  " + line for line in describe_sides(part, group)]
    return "\n".join(lines)


def merge_layers(groups: list[dict]) -> list[dict]:
    """The groups as `describe` prints them: those that `by_layer` split are one again, lr is a text, and a group without a name has its number."""
    named = {}
    for i, group in enumerate(groups):
        named.setdefault(group["name"] if "layer" in group else i, []).append(group)
    merged = []
    for i, parts in named.items():
        lrs = sorted(g["lr"] for g in parts)
        lr = f"{lrs[0]:g}" if len(parts) == 1 else f"{lrs[0]:.3g} to {lrs[-1]:.3g} in {len(parts)} layers"
        whole = {key: [x for g in parts for x in g[key]] for key in ("params", "param_names") if key in parts[0]}
        merged.append({**parts[0], **whole, "lr": lr, "name": parts[0].get("name", i)})
    return merged


def describe_sides(part: MatrixOptimizer, group: dict) -> list[str]:
    """`12 x (288, 96): both sides` per shape; where max_precond_dim leaves a side out, the names of the tensors too."""
    lines, names_of = [], {}
    for name, p in zip(group.get("param_names", map(str, range(len(group["params"])))), group["params"]):
        names_of.setdefault(tuple(p.shape), []).append(name)
    for shape, names in names_of.items():
        sides = part.preconditioned(shape, group)
        if len(shape) < 2:
            which = "plain Adam"
        elif all(sides):
            which = "both sides" if len(sides) == 2 else f"all {len(sides)} sides"
        else:
            kept = ", ".join(str(k) for k, has in enumerate(sides) if has)
            left_out = ", ".join(f"{k} ({shape[k]})" for k, has in enumerate(sides) if not has)
            which = (f"{'only side ' + kept if kept else 'no side'}; left out, longer than max_precond_dim {group['max_precond_dim']}: "
                     f"side {left_out} of {', '.join(names)}")
        lines.append(f"{len(names)} x {shape}: {which}")
    return lines
