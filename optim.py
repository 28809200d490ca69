"""SOAP, KL-Shampoo and Muon, and which parameter goes to which optimizer.

A transformer without residuals is badly conditioned. Its initialisation is half of the cure, a
preconditioned optimizer is the other half:

    SOAP        Adam in the eigenbasis of Shampoo's two factors                  (Vyas et al. 2024)
    KL-Shampoo  L^(-1/2) M R^(-1/2); L and R fit the gradients in KL divergence  (Lin et al. 2025)
    Muon        the momentum, with all its singular values moved towards 1       (Jordan et al. 2024)

They are for the weight matrices of the blocks. Everything else gets AdamW: `build_optimizer`.

Notation: W is an m x n weight, G its gradient, M and V the first and second moment. S_L (m x m) and
S_R (n x n) are the factors of the left and right side, and the columns of Q are the eigenvectors of S.
t counts the updates of this weight.

A step takes a stack of B weights of one shape: `ws` is the list of them, `g` (B, m, n) their
gradients, and each tensor in `state` has B rows. `group` is the dict of options. Weights and state
change in place.
"""
import copy
import functools
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn


# --------------------------------------------------------------------------------------------------
# SOAP

def soap_seed(g: Tensor, group: dict) -> dict:
    """SOAP's state after the first gradient, which moves no weight:

        S_L = (1-b) G G^T,   S_R = (1-b) G^T G,   Q = eigenvectors of S,   M = V = 0

    A vector, and a side longer than max_precond_dim, has no factor: None for S and Q."""
    share, dtype = 1 - factor_beta(group), group["factor_dtype"] or g.dtype
    sides = sides_with_factor(g.shape[1:], group)
    factors = [first_gram(unfolding(g, k), share, dtype) if k in sides else None
               for k in range(g.ndim - 1)]
    return {"step": 0, "exp_avg": torch.zeros_like(g), "exp_avg_sq": torch.zeros_like(g),
            "GG": factors, "Q": [None if s is None else eigenbasis(s) for s in factors]}


def sides_with_factor(shape: tuple, group: dict) -> list[int]:
    """The sides of a tensor that have a factor."""
    longest = group.get("max_precond_dim", math.inf)
    return [k for k, d in enumerate(shape) if len(shape) > 1 and d <= longest]


def soap_step(ws: list[Tensor], g: Tensor, state: dict, group: dict) -> None:
    """Update t of SOAP. Tensors of any rank have a factor for each side; for a matrix:

        R = Q_L^T G Q_R                                 G in the basis of the previous updates
        M <- b1 M + (1-b1) R                            M and V live in that basis
        V <- b2 V + (1-b2) R^2
        W <- W - a Q_L [M / (sqrt(V) + eps)] Q_R^T      a = lr sqrt(1-b2^t) / (1-b1^t)
        W <- W - lr wd W
        S_L <- b S_L + (1-b) G G^T                      b = shampoo_beta
        S_R <- b S_R + (1-b) G^T G
        every f updates: `refresh_bases`

    eps comes before the bias correction, unlike in Adam. S comes last: G never turns its own basis.
    """
    (b1, b2), b, lr, t = group["betas"], factor_beta(group), float(group["lr"]), state["step"]
    m, v, bases = state["exp_avg"], state["exp_avg_sq"], state["Q"]
    r = to_eigenbasis(g, bases)
    m.lerp_(r, 1 - b1)
    v.mul_(b2).addcmul_(r, r, value=1 - b2)
    directions = from_eigenbasis(m / v.sqrt().add_(group["eps"]), bases)
    a = lr * (math.sqrt(1 - b2 ** t) / (1 - b1 ** t)) if group["correct_bias"] else lr
    if group["normalize_grads"]:
        rms = directions.flatten(1).square().mean(1).sqrt()
        directions = directions / (1e-30 + rms).view(-1, *[1] * (g.ndim - 1))
    descend(ws, directions, a, lr * float(group["weight_decay"]))
    for k, s in enumerate(state["GG"]):
        if s is not None:
            add_gram(s, unfolding(g, k), b, 1 - b)


def refresh_bases(state: dict) -> None:
    """For SOAP and KL-Shampoo: one step of orthogonal iteration towards the eigenvectors of S.

        Q <- the orthogonal factor of QR(S Q)

    M lives in the old basis and is carried over to the new one. SOAP first sorts each basis by
    diag(Q^T S Q), the largest first, and V along with it."""
    m, v = from_eigenbasis(state["exp_avg"], state["Q"]), state.get("exp_avg_sq")
    for k, (s, q) in enumerate(zip(state["GG"], state["Q"])):
        if s is not None:
            order = orthogonal_iteration(s, q, sort=v is not None)
            if v is not None:
                order = order.view(len(v), *[-1 if side == k else 1 for side in range(v.ndim - 1)])
                v.copy_(v.gather(k + 1, order.expand_as(v)))
    state["exp_avg"].copy_(to_eigenbasis(m, state["Q"]))


# --------------------------------------------------------------------------------------------------
# KL-Shampoo

def kl_shampoo_seed(g: Tensor, group: dict) -> dict:
    """KL-Shampoo's state after the first gradient, which moves no weight:

        S_L = (1-b)/n G G^T,   S_R = (1-b)/m G^T G,   Q = eigenvectors of S,   M = 0
        lambda = init_factor                            not the eigenvalues of S
    """
    (count, m, n), share, dtype = g.shape, 1 - factor_beta(group), group["factor_dtype"] or g.dtype
    factors = [first_gram(g, share / n, dtype), first_gram(g.mT, share / m, dtype)]
    return {"step": 0, "exp_avg": torch.zeros_like(g), "GG": factors,
            "Q": [eigenbasis(s) for s in factors],
            "eigen_sqrt_inv": [g.new_full((count, d), group["init_factor"] ** -.5) for d in (m, n)]}


def kl_shampoo_step(ws: list[Tensor], g: Tensor, state: dict, group: dict) -> None:
    """One update of KL-Shampoo. L (x) R is the Kronecker product closest in KL divergence to the second
    moment of G: L = E[G R^-1 G^T] / n and R = E[G^T L^-1 G] / m, tracked by moving averages. With
    b = shampoo_beta, and a = lambda_L^(-1/2) (m), c = lambda_R^(-1/2) (n) of the previous update:

        H = Q_L^T G Q_R
        M <- b1 M + (1-b1) G                            kept as Q_L^T M Q_R; no bias correction
        W <- W - lr Q_L [(Q_L^T M Q_R)_ij / (1 / (a_i c_j) + eps)] Q_R^T
        W <- W - lr wd W
        S_L <- b S_L + (1-b)/n (G Q_R) diag(c^2) (G Q_R)^T
        S_R <- b S_R + (1-b)/m (Q_L^T G)^T diag(a^2) (Q_L^T G)
        lambda_L,i <- b lambda_L,i + (1-b) mean_j (H_ij c_j)^2
        lambda_R,j <- b lambda_R,j + (1-b) mean_i (H_ij a_i)^2
        every f updates: `refresh_bases`, which leaves lambda as it is
    """
    (_, rows, columns), lr, b = g.shape, float(group["lr"]), factor_beta(group)
    m, (left, right), (a, c) = state["exp_avg"], state["Q"], state["eigen_sqrt_inv"]
    x = g.to(left.dtype)
    lg, gr = left.mT @ x, x @ right                         # both are needed below,
    h = left.mT @ gr if rows <= columns else lg @ right     # so H comes from the cheaper one
    lg, gr, h = lg.to(g.dtype), gr.to(g.dtype), h.to(g.dtype)
    m.lerp_(h, 1 - group["betas"][0])
    scale = a[:, :, None] * c[:, None]
    scaled = (m * scale).div_(scale.mul_(group["eps"]).add_(1))
    descend(ws, from_eigenbasis(scaled, state["Q"]), lr, lr * float(group["weight_decay"]))
    add_gram(state["GG"][0], gr * c[:, None], b, (1 - b) / columns)
    add_gram(state["GG"][1], (lg * a[:, :, None]).mT, b, (1 - b) / rows)
    seen = (h * c[:, None]).square_().mean(2), (h * a[:, :, None]).square_().mean(1)
    for root, squares in zip((a, c), seen):
        root.copy_(kl_inverse_root(root, squares, b, group["max_clamp_value"]))


def kl_inverse_root(root: Tensor, seen: Tensor, b: float, limit: float | None) -> Tensor:
    """lambda^(-1/2) (B, d) after lambda <- b lambda + (1-b) seen. root: lambda^(-1/2) before.

    At most max(10, min(d, limit)): a floor under lambda. A direction without gradients gets 0."""
    new = (b * root.pow(-2) + (1 - b) * seen).rsqrt()
    new = torch.where(new.isfinite(), new, 0.)
    return new if limit is None else new.clamp(max=max(10, min(root.shape[1], limit)))


# --------------------------------------------------------------------------------------------------
# Muon

def muon_step(ws: list[Tensor], g: Tensor, state: dict, group: dict) -> None:
    """One update of Muon, with the numbers of torch.optim.Muon:

        B <- mu B + (1-mu) G
        O = NewtonSchulz((1-mu) G + mu B)               NewtonSchulz(B) without nesterov
        W <- (1 - lr wd) W                              decay comes first and is not scaled
        W <- W - lr scale O                             scale: `muon_scale`
    """
    buffer, mu, lr = state["momentum_buffer"], group["momentum"], float(group["lr"])
    buffer.lerp_(g, 1 - mu)
    momentum = g.lerp(buffer, mu) if group["nesterov"] else buffer
    dtype = group["ns_dtype"] or fast_dtype(g.device)
    step_size = lr * muon_scale(group["adjust_lr_fn"], *g.shape[1:])
    for w, direction in zip(ws, newton_schulz(momentum, group["ns_steps"], dtype)):
        w.mul_(1 - lr * float(group["weight_decay"]))
        w.add_(direction.reshape(w.shape), alpha=-step_size)


def newton_schulz(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Roughly U V^T of x = U S V^T, (m, n) or a stack, by a polynomial in the singular values:

        Y <- 3.4445 Y + (-4.7750 A + 2.0315 A^2) Y with A = Y Y^T, from Y = x / |x| on

    It is steep at 0 and never settles at 1: they end in [0.7, 1.2]. Computed in `dtype`."""
    if x.ndim == 3 and len(x) == 1:                         # the plain product is faster for one
        return newton_schulz(x[0], steps, dtype)[None]
    fused, tall = torch.addmm if x.ndim == 2 else torch.baddbmm, x.shape[-2] > x.shape[-1]
    y = x.to(dtype).mT if tall else x.to(dtype)             # the short side has the small A
    norm = torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True)
    y = y / norm.clamp(min=1e-7)                            # not in place: y may be the momentum
    for _ in range(steps):
        a = y @ y.mT
        y = fused(y, fused(a, a, a, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return y.mT if tall else y


def muon_scale(rule: str | None, rows: int, columns: int) -> float:
    """The factor on lr. match_rms_adamw: updates are as large as AdamW's, so AdamW's lr fits."""
    if rule in (None, "original"):
        return math.sqrt(max(1, rows / columns))
    if rule == "match_rms_adamw":
        return .2 * math.sqrt(max(rows, columns))
    if rule == "spectral_unclamped":
        return math.sqrt(rows / columns)
    raise ValueError(f"adjust_lr_fn is original, match_rms_adamw or spectral_unclamped, not {rule!r}.")


def fast_dtype(device: torch.device) -> torch.dtype:
    """The type for Newton-Schulz: bfloat16 on CUDA, and on CPUs with units for it; else float32.

    Without units bfloat16 takes six times as long as float32. The CPU's own list of units decides,
    not a clock, so that a run gives the same numbers each time."""
    fast = device.type == "cuda"
    if device.type == "cpu" and torch.backends.mkldnn.is_available():
        units = getattr(torch.cpu, "get_capabilities", dict)()              # torch 2.9 has no list
        fast = any(units.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if fast else torch.float32


# --------------------------------------------------------------------------------------------------
# Linear algebra of stacks

def factor_beta(group: dict) -> float:
    """The decay b of the factors: shampoo_beta, or b2 where that is None. 0 is a real value."""
    return group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]


def to_eigenbasis(x: Tensor, bases: list) -> Tensor:
    """Q_L^T x Q_R of x (B, m, n), and likewise for any rank. None is the identity."""
    return multiply_sides(x, bases)


def from_eigenbasis(x: Tensor, bases: list) -> Tensor:
    """Q_L x Q_R^T, the way back."""
    return multiply_sides(x, [None if q is None else q.mT for q in bases])


def multiply_sides(x: Tensor, matrices: list) -> Tensor:
    """x (B, ...) times matrix^T along each side. A round takes the first side and puts it last."""
    for matrix in matrices:
        x = x.movedim(1, -1)
        if matrix is not None:
            y = x.flatten(1, -2).to(matrix.dtype) @ matrix
            x = y.to(x.dtype).unflatten(1, x.shape[1:-1])
    return x


def unfolding(x: Tensor, side: int) -> Tensor:
    """x (B, ...) as matrices (B, d, rest) with the rows of that side: x and x^T for a matrix."""
    return x.movedim(side + 1, 1).flatten(2)


BLOCKS_FROM = 1024                      # rows from which `add_gram` works in blocks


def add_gram(s: Tensor, x: Tensor, decay: float, share: float) -> None:
    """S <- decay S + share X X^T, X (B, d, rest). If large, in four blocks: one is mirrored."""
    x, d = x.to(s.dtype), x.shape[1]
    if d < BLOCKS_FROM or s.dtype == torch.bfloat16:
        torch.baddbmm(s, x, x.mT, beta=decay, alpha=share, out=s)
        return
    first, last = slice(0, d // 2), slice(d // 2, d)
    for rows, columns in ((first, first), (last, first), (last, last)):
        block = s[:, rows, columns]
        torch.baddbmm(block, x[:, rows], x[:, columns].mT, beta=decay, alpha=share, out=block)
    s[:, first, last].copy_(s[:, last, first].mT)


def first_gram(x: Tensor, share: float, dtype: torch.dtype) -> Tensor:
    """share X X^T (B, d, d) of X (B, d, rest), in that type."""
    s = x.new_zeros(len(x), x.shape[1], x.shape[1], dtype=dtype)
    add_gram(s, x, 0., share)
    return s


def orthogonal_iteration(s: Tensor, q: Tensor, sort: bool) -> Tensor | None:
    """Q <- QR(S Q).Q in place; S and Q are (B, n, n). Returns the order (B, n), if sorted.

    It takes 2^22 numbers at a time, for the sake of memory."""
    orders, at_a_time = [], max(1, 2 ** 22 // s.shape[-1] ** 2)
    for s, q in zip(s.split(at_a_time), q.split(at_a_time)):
        sq = s @ q
        if sort:
            diagonal = (q * sq).sum(1, dtype=torch.promote_types(q.dtype, torch.float32))
            orders.append(diagonal.argsort(dim=1, descending=True, stable=True))
            sq = sq.gather(2, orders[-1][:, None].expand_as(sq))
        q.copy_(decompose(torch.linalg.qr, sq.float() if sq.dtype == torch.bfloat16 else sq)[0])
    return torch.cat(orders) if sort else None


def eigenbasis(s: Tensor) -> Tensor:
    """Eigenvectors of the symmetric S (B, n, n) as columns, the largest eigenvalue first."""
    full = s.float() if s.dtype == torch.bfloat16 else s
    jitter = 1e-30 * torch.eye(s.shape[-1], dtype=full.dtype, device=s.device)
    return decompose(torch.linalg.eigh, full + jitter)[1].flip(-1).to(s.dtype)


def decompose(method, s: Tensor) -> list[Tensor]:
    """method(s), eigh or qr, of a stack (B, n, n). If it fails: in float64 on the CPU, with a warning.

    Raises RuntimeError if that fails too, as it does for gradients that are not finite."""
    size = tuple(s.shape[1:])
    try:
        return decompose_in_threads(method, s)
    except RuntimeError as error:                           # includes LinAlgError
        warnings.warn(f"The {size} factor failed in {s.dtype} and is repeated in float64: {error}")
    try:
        return [part.to(s) for part in method(s.to("cpu", torch.float64))]
    except RuntimeError as error:
        raise RuntimeError(f"The {size} factor failed in float64 too: are all gradients finite? "
                           f"({error})") from error


def decompose_in_threads(method, s: Tensor) -> list[Tensor]:
    """method(s). On CPUs a matrix below n of about 1,000 gets one thread: LAPACK is slower with two."""
    threads = torch.get_num_threads()
    if s.device.type != "cpu" or threads == 1 or s.shape[-1] > 1000:
        return method(s)
    try:
        torch.set_num_threads(1)
        return [torch.cat(parts) for parts in zip(*lasting_threads(threads).map(method, s.split(1)))]
    finally:
        torch.set_num_threads(threads)


@functools.cache
def lasting_threads(count: int) -> ThreadPoolExecutor:
    """Threads that stay: starting them takes longer than a small decomposition."""
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


def descend(ws: list[Tensor], directions: Tensor, step_size: float, decay: float) -> None:
    """W <- (1 - decay) (W - step_size U), in the type of U (B, ...), rounded once to the weight's."""
    wide = [w.to(directions.dtype) for w in ws]             # w itself where it has that type
    torch._foreach_add_(wide, [u.view_as(w) for u, w in zip(directions, wide)], alpha=-step_size)
    if decay:
        torch._foreach_mul_(wide, 1 - decay)
    for w, x in zip(ws, wide):
        if x is not w:
            w.copy_(x)


@contextmanager
def true_fp32(device_type: str):
    """Without autocast, TF32 (CUDA) and bf16 (CPU): TF32 loses a Gram matrix's small eigenvalues.

    The user's choice comes back at the end. torch has an old and a new switch, which must agree."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [backend.fp32_precision for backend in backends]
    try:
        old_switch = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    except RuntimeError:                                    # the user set the new one: it cannot be read
        old_switch = None
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        if old_switch is not None:
            torch.set_float32_matmul_precision(old_switch)
        for backend, precision in zip(backends, before):
            backend.fp32_precision = precision


# --------------------------------------------------------------------------------------------------
# The engine: stacks, ranks, checkpoints

QR_FLOPS, EIGH_FLOPS = 8 / 3, 9         # over n^3: QR with its Q written out; eigh, roughly
SLOW_FIRST_STEP = 1e11                  # flops, some seconds on a CPU: worth a warning


class Stack:
    """Equal parameters. `state` holds tensors (B, ...), or None before the first gradient."""

    def __init__(self, params: list[Tensor], group: dict):
        self.params, self.group, self.state, self.views = params, group, None, []


class MatrixOptimizer(torch.optim.Optimizer):
    """What SOAP, KL-Shampoo and Muon share; a subclass gives the maths, `seed` and `update`.

    Equal parameters are one stack, so that a call of `step` makes few large products. state[p] has
    views into it, in float32 (float64 for float64 parameters).
    stagger: the refreshes are spread over the calls of a period, as even in cost as can be.
    shard: each matrix belongs to one rank, which alone has its state and moves it; then all get the
    weight. Gradients must be equal on all ranks, as DDP leaves them. All must call `state_dict`, and
    rank 0's is whole: a checkpoint does not depend on the number of ranks.

    Raises ValueError for an option out of range and for parameters that are no matrices."""

    any_rank = False                                        # or matrices (out, rest) only
    constraint = None                                       # restores what this rank has moved
    seed_moves_nothing = True                               # the first gradient makes the state, no more
    stack_size = {"cpu": 2 ** 19, "cuda": 2 ** 24}          # numbers that keep the device busy

    def __init__(self, params, defaults: dict, stagger=False, shard=False):
        self.stagger, self.owner = stagger, {}
        self.shard = shard and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.shard else 0
        super().__init__(params, defaults)

    def matrix_shape(self, p: Tensor) -> tuple:
        return tuple(p.shape) if self.any_rank else (p.shape[0], math.prod(p.shape[1:]))

    def state_dtype(self, p: Tensor) -> torch.dtype:
        return torch.float64 if p.dtype == torch.float64 else torch.float32

    def flops(self, shape: tuple, group: dict) -> tuple[float, float, float]:
        """(of an update, of a refresh on top, of the first call) for a `matrix_shape`.

        With u = 2mn(m+n), which is one product Q_L^T G Q_R: into the basis, back, and the factors are
        3u; to carry M over is 2u, and S Q is 2n^3 for each side."""
        sides = [shape[k] for k in sides_with_factor(shape, group)]
        u, refresh = 2 * math.prod(shape) * sum(sides), sum((2 + QR_FLOPS) * d ** 3 for d in sides)
        return 3 * u, 2 * u + refresh, u + EIGH_FLOPS * sum(d ** 3 for d in sides)

    def add_param_group(self, param_group: dict) -> None:
        check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if not p.is_floating_point() or (p.ndim < 2 and not self.any_rank):
                raise ValueError(f"{type(self).__name__} is for real matrices, not {p.dtype} of shape "
                                 f"{tuple(p.shape)}: give biases, gains and tokens to AdamW.")
        self.assign_ranks_and_phases()

    def assign_ranks_and_phases(self) -> None:
        """Choose each parameter's rank and phase, the call of a period in which it is refreshed.

        Both follow from the shapes alone, so all ranks agree. A parameter stays on its rank, which
        has its state. Phases do not depend on the ranks, and so neither do the numbers."""
        self.stacks, self.missing = [], None                # None: form the stacks anew
        self.periods = [group.get("precondition_frequency", 1) for group in self.param_groups]
        period_of, flops = {}, {}
        for group, period in zip(self.param_groups, self.periods):
            for p in group["params"]:
                period_of[p], flops[p] = period, self.flops(self.matrix_shape(p), group)
        cost = {p: update + refresh / period_of[p] for p, (update, refresh, _) in flops.items()}
        ranks = dist.get_world_size() if self.shard else 1
        load = [sum(cost[p] for p in cost if self.owner.get(p) == rank) for rank in range(ranks)]
        new = [p for p in cost if p not in self.owner]
        self.owner.update(zip(new, assign_bins([cost[p] for p in new], load)))
        self.phase = dict.fromkeys(cost, 0)
        for period in set(self.periods) if self.stagger else ():
            members = [p for p in cost if period_of[p] == period]
            phases = assign_bins([flops[p][1] for p in members], [0.] * period)
            self.phase.update(zip(members, phases))

    @torch.no_grad()
    def step(self, closure=None):
        """One call. A parameter without a gradient stays as it is, and so does its t."""
        loss = None
        if closure is not None:
            with torch.enable_grad():                       # a closure calls backward
                loss = closure()
        if self.periods != [group.get("precondition_frequency", 1) for group in self.param_groups]:
            self.assign_ranks_and_phases()
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        missing = [p.grad is None for p in params]
        if missing != self.missing or not all(map(self.is_current, self.stacks)):
            self.missing = missing
            self.form_stacks()
        moved = [p for p in params if p.grad is not None and p.numel()]
        with true_fp32(moved[0].device.type if moved else "cpu"):
            for stack in self.stacks:
                if stack.params[0].grad is not None:
                    self.step_stack(stack)
            if self.constraint:
                self.constraint.restore(p for p in moved if self.owner[p] == self.rank)
        if self.shard:
            broadcast_weights(moved, self.owner)
        return loss

    def form_stacks(self) -> None:
        """Stack this rank's parameters that are equal, at most `stack_size` numbers together.

        Done in the first call, and when other parameters have gradients or the state was replaced."""
        equal, first_flops = {}, 0
        for k, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.numel() and self.owner[p] == self.rank:
                    state = self.state.get(p, {})
                    age = len(state), state.get("step"), p.grad is None, self.phase[p]
                    equal.setdefault((k, p.shape, p.device, p.dtype, age), []).append(p)
                    if not state and p.grad is not None:
                        first_flops += self.flops(self.matrix_shape(p), group)[2]
        self.stacks = []
        for (k, shape, device, *_), params in equal.items():
            count = max(1, self.stack_size.get(device.type, 2 ** 24) // shape.numel())
            for i in range(0, len(params), count):
                stack = Stack(params[i:i + count], self.param_groups[k])
                states = [self.state.get(p) for p in stack.params]
                if states[0]:
                    self.set_stack_state(stack, map_tensors(lambda *t: torch.stack(t), *states))
                self.stacks.append(stack)
        if first_flops > SLOW_FIRST_STEP and self.seed_moves_nothing and self.rank == 0:
            warnings.warn(f"{type(self).__name__}'s first step decomposes all factors, "
                          f"{first_flops / 1e9:.3g} Gflop. It may take long; the later ones do not.")

    def set_stack_state(self, stack: Stack, state: dict) -> None:
        """Make `state`, tensors (B, ...), that of a stack; self.state gets the views of its rows."""
        stack.state = map_tensors(torch.Tensor.contiguous, state)       # for equal bits after a resume
        for i, p in enumerate(stack.params):
            self.state[p] = map_tensors(lambda t: t[i], stack.state)
        stack.views = [tensors_in(self.state[p]) for p in stack.params]

    def is_current(self, stack: Stack) -> bool:
        """Are a stack's views still in self.state? Not after a load, or where a user replaced them."""
        for p, views in zip(stack.params, stack.views):
            found = tensors_in(self.state.get(p, {}))
            if len(found) != len(views) or any(a is not b for a, b in zip(found, views)):
                return False
        return True

    def step_stack(self, stack: Stack) -> None:
        """One call for a stack: seed its state, or update its weights."""
        params, group = stack.params, stack.group
        g = params[0].grad[None] if len(params) == 1 else torch.stack([p.grad for p in params])
        g = g.to(self.state_dtype(params[0])).reshape(len(params), *self.matrix_shape(params[0]))
        if stack.state is None:
            self.set_stack_state(stack, self.seed(g, group))
            if self.seed_moves_nothing:
                return
        if "step" in stack.state:
            stack.state["step"] = self.state[params[0]]["step"] + 1
            for p in params:
                self.state[p]["step"] = stack.state["step"]
        self.update(params, g, stack.state, group)
        period = group.get("precondition_frequency")
        if period and stack.state["step"] % period == self.phase[params[0]]:
            refresh_bases(stack.state)

    def state_dict(self) -> dict:
        """As torch's. With `shard` all ranks call it: rank 0 gets the others' states one by one."""
        whole = super().state_dict()
        if self.shard:
            for i, p in enumerate(chain.from_iterable(group["params"] for group in self.param_groups)):
                box = [None]
                if self.owner[p] == self.rank != 0:
                    box = [map_tensors(lambda t: t.to("cpu", copy=True), self.state.get(p))]
                    dist.send_object_list(box, 0)
                elif self.rank == 0 != self.owner[p]:
                    dist.recv_object_list(box, self.owner[p])
                    whole["state"].update({i: box[0]} if box[0] else {})
        return whole

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's, but by name (`match_saved`), and only what this rank owns.

        torch would cast every tensor to the parameter's type; here they keep the state's types."""
        saved = match_saved(state_dict, self)
        super().load_state_dict({**saved, "state": {}})
        for theirs, group in zip(saved["param_groups"], self.param_groups):
            for i, p in zip(theirs["params"], group["params"]):
                if self.owner[p] == self.rank:
                    for key, value in saved["state"].get(i, {}).items():
                        narrow = group.get("factor_dtype") if key in ("GG", "Q") else None
                        dtype = narrow or self.state_dtype(p)
                        copied = map_tensors(lambda t: t.to(p.device, dtype, copy=True), value)
                        self.state[p][key] = copied

    def __getstate__(self):
        own = "stagger", "owner", "shard", "rank"
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state):
        """Of a copy or a checkpoint. Options that an older checkpoint lacks get their defaults."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key in self.defaults.keys() - {"differentiable"}:    # which torch adds
                group.setdefault(key, self.defaults[key])
        self.assign_ranks_and_phases()


def check_options(options: dict) -> None:
    """Raises ValueError for an option out of range."""
    betas = *options.get("betas", ()), options.get("shampoo_beta") or 0, options.get("momentum", 0)
    period = options.get("precondition_frequency", 1)
    for key in ("lr", "weight_decay", "eps"):
        if not options.get(key, 0) >= 0:                    # NaN too
            raise ValueError(f"{key} must be at least 0, not {options[key]}.")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas, shampoo_beta and momentum must be in [0, 1), not {betas}.")
    if not isinstance(period, int) or period < 1:
        raise ValueError(f"precondition_frequency must be a whole number above 0, not {period}.")
    muon_scale(options.get("adjust_lr_fn"), 1, 1)


def assign_bins(costs: list[float], load: list[float]) -> list[int]:
    """A bin for each cost, given the load of the bins, so that the fullest is nearly as empty as can be.

    The dearest goes first, each to the emptiest bin: at most 4/3 of the optimum."""
    load, bin_of = list(load), [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        bin_of[i] = min(range(len(load)), key=load.__getitem__)
        load[bin_of[i]] += costs[i]
    return bin_of


def broadcast_weights(params: list[Tensor], owner: dict) -> None:
    """All ranks get each weight from its owner. Weights, not updates: so all have the same bits."""
    whole = [p.detach().contiguous() for p in params]       # p itself, unless it lies otherwise
    works = [dist.broadcast(t, owner[p], async_op=True) for p, t in zip(params, whole)]
    for p, t, work in zip(params, whole, works):
        work.wait()
        if t.data_ptr() != p.data_ptr():
            p.copy_(t)


def match_saved(saved: dict, optimizer: torch.optim.Optimizer) -> dict:
    """A saved state_dict in the optimizer's order: by name where both have names, else by place.

    Raises ValueError where a name is missing on one side, or a shape does not fit."""
    groups, fault = list(saved["param_groups"]), "The saved optimizer state is of another model:"
    for k, (theirs, ours) in enumerate(zip(saved["param_groups"], optimizer.param_groups)):
        names = ours.get("param_names", range(len(ours["params"])))
        if "param_names" in theirs and "param_names" in ours:
            ids = dict(zip(theirs["param_names"], theirs["params"]))
            if ids.keys() != set(names):
                raise ValueError(f"{fault} only one has a parameter {min(ids.keys() ^ set(names))}.")
            groups[k] = {**theirs, "params": [ids[name] for name in names], "param_names": names}
        for i, p, name in zip(groups[k]["params"], ours["params"], names):
            state = saved["state"].get(i, {})
            then = state.get("exp_avg", state.get("momentum_buffer", p)).shape
            if then not in (p.shape, p.flatten(1).shape if p.ndim > 2 else p.shape):
                raise ValueError(f"{fault} parameter {name} is {tuple(p.shape)}, was {tuple(then)}.")
    return {**saved, "param_groups": groups}


def map_tensors(f, *states):
    """f of the tensors at the same place of nested dicts and lists; numbers are the first one's."""
    first = states[0]
    if isinstance(first, Tensor):
        return f(*states)
    if isinstance(first, dict):
        return {key: map_tensors(f, *(state[key] for state in states)) for key in first}
    return [map_tensors(f, *parts) for parts in zip(*states)] if isinstance(first, list) else first


def tensors_in(state) -> list[Tensor]:
    found = []
    map_tensors(found.append, state)
    return found


# --------------------------------------------------------------------------------------------------
# The three classes

class SOAP(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's factors, for tensors of any rank: `soap_step`.

    A tensor without factors (a vector, two sides above max_precond_dim) gets Adam, one call late.
    factor_dtype=torch.bfloat16 halves the memory of factors and bases. Memory: M, V, S, Q are
    2 + 2(m^2+n^2)/mn times the weight, 6 for a square one, 10.5 for an MLP's 4:1."""

    any_rank, seed, update = True, staticmethod(soap_seed), staticmethod(soap_step)

    def __init__(self, params, lr=3e-3, betas=(.95, .95), shampoo_beta=None, eps=1e-8, weight_decay=.01,
                 precondition_frequency=10, max_precond_dim=10000, correct_bias=True,
                 normalize_grads=False, factor_dtype=None, stagger=False, shard=False):
        defaults = dict(
            lr=lr, betas=betas, shampoo_beta=shampoo_beta, eps=eps, weight_decay=weight_decay,
            precondition_frequency=precondition_frequency, max_precond_dim=max_precond_dim,
            correct_bias=correct_bias, normalize_grads=normalize_grads, factor_dtype=factor_dtype)
        super().__init__(params, defaults, stagger, shard)


class KLShampoo(MatrixOptimizer):
    """Shampoo whose factors fit the gradients in KL divergence: `kl_shampoo_step`.

    Published code runs it in bfloat16, this in float32 unless factor_dtype=torch.bfloat16. Memory:
    M, S, Q are 1 + 2(m^2+n^2)/mn times the weight."""

    seed, update = staticmethod(kl_shampoo_seed), staticmethod(kl_shampoo_step)

    def __init__(self, params, lr=1e-4, betas=(.9, .98), shampoo_beta=None, eps=1e-8, weight_decay=.01,
                 precondition_frequency=10, init_factor=.1, max_clamp_value=4000, factor_dtype=None,
                 stagger=False, shard=False):
        defaults = dict(
            lr=lr, betas=betas, shampoo_beta=shampoo_beta, eps=eps, weight_decay=weight_decay,
            precondition_frequency=precondition_frequency, init_factor=init_factor,
            max_clamp_value=max_clamp_value, factor_dtype=factor_dtype)
        super().__init__(params, defaults, stagger, shard)

    def flops(self, shape, group):
        update, refresh, first = super().flops(shape, group)
        return update + 2 * math.prod(shape) * min(shape), refresh, first       # H, beside its halves


class Muon(MatrixOptimizer):
    """Momentum, orthogonalised: `muon_step`.

    ns_dtype: the type of Newton-Schulz. None is the device's fast one, torch.optim.Muon's is bfloat16.
    Memory: one buffer, 1 times the weight, in the weight's type as torch has it."""

    seed_moves_nothing, update = False, staticmethod(muon_step)

    def __init__(self, params, lr=1e-3, weight_decay=.1, momentum=.95, nesterov=True, ns_steps=5,
                 adjust_lr_fn=None, ns_dtype=None, shard=False):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
                        ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, ns_dtype=ns_dtype)
        super().__init__(params, defaults, shard=shard)

    def seed(self, g, group):
        return {"momentum_buffer": torch.zeros_like(g)}

    def state_dtype(self, p):
        return p.dtype

    def flops(self, shape, group):
        short, long = sorted(shape)
        update = group["ns_steps"] * 2 * (2 * short * short * long + short ** 3)
        return update, 0, update


# --------------------------------------------------------------------------------------------------
# Which parameter goes where

# A new optimizer is one line. A MatrixOptimizer gets the blocks' matrices, any other all parameters.
OPTIMIZERS = {"adamw": torch.optim.AdamW, "soap": SOAP, "kl-shampoo": KLShampoo, "muon": Muon}


class Optimizers(torch.optim.Optimizer):
    """A matrix optimizer and the AdamW beside it, or one optimizer alone, driven as one.

    `parts` holds them with their states. `param_groups` are those of all parts, so that torch's
    lr_schedulers work."""

    def __init__(self, name: str, parts: list, constraint=None):
        self.name, self.parts, self.constraint = name, parts, constraint
        for part in parts:
            if isinstance(part, MatrixOptimizer):           # which restores before it sends weights
                part.constraint = constraint
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
            if self.constraint and not isinstance(part, MatrixOptimizer):
                self.constraint.restore(p for group in part.param_groups for p in group["params"])
        return loss

    def state_dict(self) -> dict:
        gains = self.constraint and self.constraint.gains
        return {"name": self.name, "parts": [part.state_dict() for part in self.parts], "gains": gains}

    def load_state_dict(self, state_dict: dict) -> None:
        """Raises ValueError for the state of another optimizer or another model."""
        theirs = state_dict.get("name")
        if theirs != self.name:
            raise ValueError(f"This is the state of the optimizer {theirs!r}, but the run uses "
                             f"{self.name!r}: choose {theirs!r}, or start afresh.")
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(copy.deepcopy(match_saved(saved, part)))       # torch shares tensors
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        if self.constraint:
            self.constraint.gains = state_dict["gains"]

    def __getstate__(self):
        return {**super().__getstate__(), "name": self.name, "parts": self.parts,
                "constraint": self.constraint}


def build_optimizer(model, name: str, lr: float, weight_decay: float, layer_decay: float = 1.0,
                    shard: bool = True, constraint=None, **options) -> Optimizers:
    """The optimizer `name` of `OPTIMIZERS` for a model, with `options`.

    A matrix optimizer gets the weights of `matrix_names`; everything else (embeddings, positions,
    tokens, head, norms, biases) goes to AdamW with the same lr. Any other optimizer gets all
    parameters. Vectors, biases, tokens and positions never decay.
    Muon has adjust_lr_fn "match_rms_adamw" unless another is given, so that one lr serves both.
    shard: with several ranks each moves its share of the matrices. AdamW is cheap and on all ranks.
    layer_decay below 1, for fine-tuning: a layer learns that much more slowly than the next one.
    constraint: an `orthogonal.Orthogonal`, kept after every step.

    A schedule sets group["lr"] = lr_t * group["lr_scale"] for all param_groups.
    Raises ValueError for an unknown name, an lr or layer_decay out of range, and a model in which
    there is nothing to do for the optimizer."""
    if name not in OPTIMIZERS:
        raise ValueError(f"There is no optimizer {name!r}: choose {', '.join(OPTIMIZERS)}.")
    if not (lr > 0 and 0 < layer_decay <= 1):
        raise ValueError(f"lr must be above 0, layer_decay in (0, 1], not {lr} and {layer_decay}.")
    depth = len(getattr(model, "blocks", ()))
    if layer_decay < 1 and not depth:
        raise ValueError("layer_decay counts the model's `blocks`, and it has none: leave it at 1.")
    kind, prefix, parts = OPTIMIZERS[name], "", []
    names = matrix_names(model) if issubclass(kind, MatrixOptimizer) else ()
    matrices, others, still = [], [], []
    for key, p in model.named_parameters():
        if p.requires_grad:
            # tokens and positions are points, not maps: to pull them to 0 means nothing
            is_map = p.ndim > 1 and not ("token" in key or "pos_embed" in key or key.endswith("bias"))
            (still if not is_map else matrices if key in names else others).append((key, p))
    if issubclass(kind, MatrixOptimizer):
        if not matrices:
            raise ValueError(f"The model has no weight matrix for {name!r} to train: choose adamw.")
        if kind is Muon:
            options.setdefault("adjust_lr_fn", "match_rms_adamw")
        groups = split_by_layer({"params": matrices, "name": "matrix"}, depth, layer_decay, lr)
        parts = [kind(groups, lr=lr, weight_decay=weight_decay, shard=shard, **options)]
        kind, prefix, options = torch.optim.AdamW, "aux_", {}
    if kind is torch.optim.AdamW:
        options.setdefault("fused", True)                   # one pass over memory
    groups = []
    for params, label, wd in ((others, "decay", weight_decay), (still, "no_decay", 0.0)):
        group = {"params": params, "name": prefix + label, "weight_decay": wd}
        groups += split_by_layer(group, depth, layer_decay, lr)
    if groups:
        parts.append(kind(groups, lr=lr, **options))
    return Optimizers(name, parts, constraint)


def matrix_names(model) -> set[str]:
    """Names of the parameters inside `blocks.` (attention, MLP, decoder blocks too). For a model
    without `blocks.`: of the weights of all nn.Linear and convolutions."""
    inside = {name for name, _ in model.named_parameters() if "blocks." in name}
    kinds = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d
    layers = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    return inside or {f"{name}.weight".lstrip(".") for name in layers}


def split_by_layer(group: dict, depth: int, decay: float, lr: float) -> list[dict]:
    """The group with lr_scale 1, or where decay is below 1 a group for each layer i, with lr_scale
    decay^(depth + 1 - i), as in MAE and BEiT. i is 0 for embeddings, positions and tokens, 1 to depth
    for the blocks, depth + 1 for the rest. No group for no parameters."""
    if decay == 1:
        return [{**group, "lr_scale": 1.0}] if group["params"] else []
    layers = {}
    for key, p in group["params"]:
        first, _, rest = key.partition(".")
        i = 0 if first in ("patch_embed", "token_embed", "cls_token", "pos_embed") else depth + 1
        i = 1 + int(rest.partition(".")[0]) if first == "blocks" else i
        layers.setdefault(i, []).append((key, p))
    scales = {i: decay ** (depth + 1 - i) for i in sorted(layers)}
    return [{**group, "params": layers[i], "lr_scale": s, "lr": lr * s} for i, s in scales.items()]


# --------------------------------------------------------------------------------------------------
# Printing

def describe(optimizer) -> str:
    """A few lines: tensors, parameters and lr of each kind of group, flops, sides with a factor."""
    lines = []
    for part in getattr(optimizer, "parts", [optimizer]):
        kinds = {}
        for i, group in enumerate(part.param_groups):       # the layers of one kind are one line
            kinds.setdefault(group.get("name", i), []).append(group)
        for name, groups in kinds.items():
            params = list(chain.from_iterable(group["params"] for group in groups))
            lrs, decay = sorted({float(group["lr"]) for group in groups}), groups[0]["weight_decay"]
            lr = f"{lrs[0]:.3g} to {lrs[-1]:.3g} by layer" if len(lrs) > 1 else f"{lrs[0]:g}"
            lines.append(f"{type(part).__name__} {name}: {len(params)} tensors, "
                         f"{sum(p.numel() for p in params):,} parameters, lr {lr}, "
                         f"weight decay {float(decay):g}")
            if isinstance(part, MatrixOptimizer):
                lines += ["  " + line for line in describe_matrices(part, params, groups[0])]
    return "\n".join(lines)


def describe_matrices(part: MatrixOptimizer, params: list[Tensor], group: dict) -> list[str]:
    """Flops of a step; then Muon's number type, or `12 x (288, 96): both sides` for each shape."""
    shapes = [part.matrix_shape(p) for p in params]
    flops = zip(*(part.flops(shape, group) for shape in shapes))
    update, refresh, first = (sum(each) / 1e9 for each in flops)
    if isinstance(part, Muon):
        dtype = group["ns_dtype"] or fast_dtype(params[0].device)
        why = "as ns_dtype says" if group["ns_dtype"] else "which this device multiplies fast"
        return [f"{update:.3g} Gflop a step; Newton-Schulz in {str(dtype)[6:]}, {why}"]
    mean = update + refresh / group.get("precondition_frequency", 1)
    lines = [f"{mean:.3g} Gflop a step on average, {first:.3g} the first, with its eigendecompositions"]
    for shape in dict.fromkeys(shapes):
        sides = sides_with_factor(shape, group)
        which = "both sides" if sides == [0, 1] and len(shape) == 2 else f"sides {sides} of {len(shape)}"
        lines.append(f"{shapes.count(shape)} x {shape}: {which if sides else 'no side, plain Adam'}")
    return lines
