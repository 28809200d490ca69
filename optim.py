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

Speed: weights of equal shape and age are one stack (B, m, n), so the formulas below have a leading B, which the text leaves out.
`shard` shares the matrices out over the ranks: each has the state of its own and moves those, and all get all weights afterwards.
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
    "factor_dtype": (lambda x: x in (None, torch.bfloat16), "None or torch.bfloat16"),
    "adjust_lr_fn": (lambda x: x in MUON_SCALES, "None, original, match_rms_adamw or spectral_unclamped"),
}


def require(ok: bool, sentence: str) -> None:
    if not ok:
        raise ValueError(sentence)


class MatrixOptimizer(torch.optim.Optimizer):
    """Stacks of equal parameters, their share of the ranks, validation, and a state that survives `load_state_dict`. The maths is in `update`.

    stagger: the refreshes of a period are spread over its calls, as even in cost as can be, so that no call is a spike.
    shard: each matrix belongs to one rank of the default process group (`share_out`): the others have no state for it and get its weight from there.
    Gradients must be the same on all ranks, as DDP leaves them. `state_dict` is a collective call then and only rank 0's is whole."""

    least_rank = 2
    stack_size = {"cpu": 2 ** 19, "cuda": 2 ** 24}  # numbers in a stack: what the device needs to be busy, and no more, since temporaries grow with it

    def __init__(self, params, defaults, stagger=False, shard=False):
        self.stagger, self.shard, self._stacks, self.owner = stagger, shard and dist.is_initialized() and dist.get_world_size() > 1, {}, {}
        super().__init__(params, defaults)

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.shard else 0

    def __getstate__(self):
        return {**super().__getstate__(), "stagger": self.stagger, "shard": self.shard, "owner": self.owner}

    def __setstate__(self, state):                  # of a copy or a checkpoint, which may be older than an option
        super().__setstate__(state)
        for group in self.param_groups if "factor_dtype" in self.defaults else ():
            group.setdefault("factor_dtype", self.defaults["factor_dtype"])
        self._stacks = {}
        self._plan()

    def update(self, params: list[Tensor], group: dict) -> None:
        """One step of parameters of one shape and age."""
        raise NotImplementedError

    def preconditioned(self, shape: tuple, group: dict) -> list[bool]:
        """For each side of a tensor, as this optimizer sees it: does it have a factor?"""
        return []

    def flops(self, shape: tuple, group: dict) -> tuple[float, float]:
        """(of an update, of a refresh) for a tensor of this shape: what work is shared out by."""
        raise NotImplementedError

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
        self._plan()

    def _plan(self) -> None:
        """Which rank moves a parameter, and in which call of a period its bases are refreshed: the same on all ranks, from the shapes alone.

        An owner stays the owner, since it has the state; phases are those of all matrices together, so that the path is the same on any number of ranks."""
        each = [(p, group) for group in self.param_groups for p in group["params"]]
        costs = [self.flops(tuple(p.shape), group) for p, group in each]
        period = [group.get("precondition_frequency", 1) for _, group in each]
        ranks = dist.get_world_size() if self.shard else 1
        cost = {p: update + refresh / f for (p, _), (update, refresh), f in zip(each, costs, period)}
        new = [p for p, _ in each if p not in self.owner]
        full = [sum(cost[p] for p, _ in each if self.owner.get(p) == rank) for rank in range(ranks)]
        self.owner.update(zip(new, share_out([cost[p] for p in new], ranks, full)))
        self._period, self.phase = period, {p: 0 for p, _ in each}
        for f in set(period) if self.stagger else ():
            mine = [i for i, x in enumerate(period) if x == f]
            self.phase.update(zip((each[i][0] for i in mine), share_out([costs[i][1] for i in mine], f)))

    def refreshes(self, p: Tensor, group: dict) -> bool:
        return self.state[p]["step"] % group["precondition_frequency"] == self.phase[p]

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():               # a closure calls backward
                loss = closure()
        if [group.get("precondition_frequency", 1) for group in self.param_groups for _ in group["params"]] != self._period:
            self._plan()
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with true_fp32(moved[0].device.type if moved else "cpu"):
            for group in self.param_groups:
                for params in self.alike(group["params"]):
                    self.update(params, group)
        if self.shard:
            exchange(moved, self.owner)
        return loss

    def alike(self, params: list[Tensor]) -> list[list[Tensor]]:
        """This rank's parameters with a gradient, together where shape, type, number of updates and phase are equal, in lists of at most `stack_size` numbers."""
        alike = {}
        for p in params:
            if p.grad is not None and self.owner[p] == self.rank:
                require(not p.grad.is_sparse, f"{type(self).__name__} needs dense gradients; give the {tuple(p.shape)} tensor to SparseAdam.")
                state = self.state[p]
                alike.setdefault((p.shape, p.dtype, p.device, len(state), state.get("step"), self.phase[p]), []).append(p)
        lists = []
        for same in alike.values():
            many = max(1, self.stack_size.get(same[0].device.type, 2 ** 24) // max(1, same[0].numel()))
            lists += [same[i:i + many] for i in range(0, len(same), many)]
        return lists

    def gradients(self, params: list[Tensor]) -> Tensor:
        """(B, ...) in the state's type. Not to be written to: for one parameter it may be the gradient itself."""
        g = params[0].grad[None] if len(params) == 1 else torch.stack([p.grad for p in params])
        return g.to(self.state_dtype(params[0]))

    def keep(self, params: list[Tensor], stack: dict) -> dict:
        """From now on the state of these parameters lies in `stack`, tensors (B, ...): what self.state holds for each are views into it."""
        mine, stack = set(map(id, params)), tree(torch.Tensor.contiguous, stack)          # as a stack of loaded states is, so that a resumed run has the same bits
        for key in [key for key in self._stacks if not mine.isdisjoint(key)]:
            for p in self._stacks.pop(key)[2]:
                if id(p) not in mine:                # who is left behind: its view would keep the whole old stack alive
                    self.state[p] = tree(torch.clone, self.state[p])
        for i, p in enumerate(params):
            self.state[p] = tree(lambda t: t[i], stack)
        self._stacks[tuple(map(id, params))] = stack, [tensors(self.state[p]) for p in params], params
        return stack

    def stack(self, params: list[Tensor]) -> dict:
        """The state of parameters of one age as one stack, one update older. It is made anew where self.state no longer holds the views: another company
        of parameters, a loaded state, a user's change."""
        stack, views, _ = self._stacks.get(tuple(map(id, params)), (None, [], None))
        if stack is None or any(list(map(id, tensors(self.state[p]))) != list(map(id, v)) for p, v in zip(params, views)):
            stack = self.keep(params, tree(lambda *t: torch.stack(t), *(self.state[p] for p in params)))
        if "step" in stack:
            stack["step"] = self.state[params[0]]["step"] + 1
            for p in params:
                self.state[p]["step"] = stack["step"]
        return stack

    def state_dict(self) -> dict:
        """As torch's. With `shard` all ranks must call it: rank 0 gets the states of the others, one parameter after the other, on the CPU."""
        state_dict = super().state_dict()
        if self.shard:
            for i, p in enumerate(p for group in self.param_groups for p in group["params"]):
                box = [None]
                if self.owner[p] == self.rank != 0:
                    dist.send_object_list([copy_to(self.state[p], "cpu")], 0)
                elif self.rank == 0 != self.owner[p]:
                    dist.recv_object_list(box, self.owner[p])
                    state_dict["state"].update({i: box[0]} if box[0] else {})
        return state_dict

    def load_state_dict(self, state_dict: dict) -> None:
        """torch casts every floating tensor of the state to the parameter's type, those in lists too: take them again from the source, and only this rank's."""
        super().load_state_dict({**state_dict, "state": {}})
        saved_ids = chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        for i, (p, group) in zip(saved_ids, [(p, group) for group in self.param_groups for p in group["params"]]):
            if i in state_dict["state"] and self.owner[p] == self.rank:
                self.state[p] = self.fit(state_dict["state"][i], p, group)

    def fit(self, state: dict, p: Tensor, group: dict) -> dict:
        """A copy of a parameter's state on its device and in this optimizer's types."""
        fitted = copy_to(state, p.device, self.state_dtype(p))
        if group.get("factor_dtype"):
            fitted |= {key: copy_to(fitted[key], p.device, group["factor_dtype"]) for key in ("GG", "Q")}
        return fitted


def share_out(costs: list[float], bins: int, full: list[float] | None = None) -> list[int]:
    """For each cost a bin, so that the fullest one is nearly as empty as can be: the dearest first, each to the emptiest (at most 4/3 of the optimum).
    full: what the bins hold already."""
    full, bin_of = list(full or [0.] * bins), [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        bin_of[i] = min(range(bins), key=full.__getitem__)
        full[bin_of[i]] += costs[i]
    return bin_of


def exchange(params: list[Tensor], owner: dict) -> None:
    """Every rank gets each weight from the rank that moved it: weights and not updates, so that all ranks have the same bits."""
    whole = [p.detach().contiguous() for p in params]                                # p itself, unless it lies otherwise in memory
    for p, t, work in [(p, t, dist.broadcast(t, owner[p], async_op=True)) for p, t in zip(params, whole)]:
        work.wait()
        if t.data_ptr() != p.data_ptr():
            p.copy_(t)


def tree(f, *values):
    """f over the tensors that lie at the same place of some states (dicts and lists of tensors); numbers and None are the first one's."""
    first = values[0]
    if isinstance(first, Tensor):
        return f(*values)
    if isinstance(first, dict):
        return {key: tree(f, *(v[key] for v in values)) for key in first}
    return [tree(f, *v) for v in zip(*values)] if isinstance(first, list) else first


def tensors(state) -> list[Tensor]:
    found = []
    tree(found.append, state)
    return found


def copy_to(value, device, dtype=None):
    """A copy of a state on that device; in that type, unless it is None."""
    return tree(lambda t: t.to(device, dtype, copy=True), value)


def move(params: list[Tensor], directions: Tensor, step_size: float, decay: float) -> None:
    """W <- (1 - decay)(W - step_size U): decay acts on the moved weight. Computed in U's type, rounded once to the parameter's. U (B, ...)."""
    ws = [p.to(directions.dtype) for p in params]                                   # p itself for fp32 parameters
    torch._foreach_add_(ws, [u.view_as(w) for u, w in zip(directions, ws)], alpha=-step_size)
    if decay:
        torch._foreach_mul_(ws, 1 - decay)
    for p, w in zip(params, ws):
        if w is not p:
            p.copy_(w)


def factorise(decomposition, s: Tensor, what: str) -> list[Tensor]:
    """decomposition(s) of a stack (B, n, n); if that fails, one by one in float64 on the CPU (LAPACK is there on every machine); if that fails too, say so."""
    try:
        return side_by_side(decomposition, s)
    except RuntimeError as error:                   # includes LinAlgError
        warnings.warn(f"{what} of the {tuple(s.shape[1:])} factor failed in {s.dtype} and is repeated in float64: {error}", stacklevel=2)
    try:
        return [part.to(s) for part in decomposition(s.to("cpu", torch.float64))]
    except RuntimeError as error:
        raise RuntimeError(f"{what} of the factor of shape {tuple(s.shape[1:])} failed, in float64 too: are all gradients finite? ({error})") from error


def side_by_side(decomposition, s: Tensor) -> list[Tensor]:
    """decomposition(s) of a stack (B, n, n). On CPUs small matrices have one thread each: LAPACK is slower with two than with one up to n of about 1,000."""
    threads = torch.get_num_threads()
    if s.device.type != "cpu" or threads == 1 or s.shape[-1] > 1000:
        return decomposition(s)
    try:
        torch.set_num_threads(1)
        if len(s) == 1:
            return decomposition(s)
        return [torch.stack(parts) for parts in zip(*workers(threads).map(decomposition, s))]
    finally:
        torch.set_num_threads(threads)


@functools.cache
def workers(threads: int) -> ThreadPoolExecutor:
    """That many threads for `side_by_side`, which stay: to start some takes longer than a small decomposition."""
    return ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))


def eigenbasis(s: Tensor) -> Tensor:
    """Eigenvectors of the symmetric s (B, n, n) as columns, the largest eigenvalue first, in fp32 or more."""
    full = s.float() if s.dtype == torch.bfloat16 else s
    jitter = 1e-30 * torch.eye(s.shape[-1], dtype=full.dtype, device=s.device)
    return factorise(torch.linalg.eigh, full + jitter, "eigh")[1].flip(-1).to(s.dtype)


def turn(s: Tensor, q: Tensor, sort: bool) -> Tensor | None:
    """Q <- QR(S Q).Q in place, one step of orthogonal iteration towards the eigenvectors of S; s and q are (B, n, n).

    sort: by diag(Q^T S Q), the largest first; returns that order (B, n). As many matrices at a time as have 2^22 numbers, for the sake of memory."""
    orders, many = [], max(1, 2 ** 22 // max(1, s.shape[-1] ** 2))
    for s, q in zip(s.split(many), q.split(many)):
        sq = s @ q
        if sort:
            orders.append((q * sq).sum(1, dtype=torch.promote_types(q.dtype, torch.float32)).argsort(dim=1, descending=True, stable=True))
            sq = sq.gather(2, orders[-1][:, None].expand_as(sq))
        q.copy_(factorise(torch.linalg.qr, sq.float() if sq.dtype == torch.bfloat16 else sq, "QR")[0])
    return torch.cat(orders) if sort else None


def rotate(x: Tensor, bases: list, back: bool = False) -> Tensor:
    """x (B, ...) times Q_k^T along each mode k, or Q_k with `back`; None stands for the identity. For a matrix: Q_L^T x Q_R, or Q_L x Q_R^T.

    Each round consumes the leading mode and appends the result as the last one, so after all rounds the modes are in order again."""
    for q in bases:
        x = x.movedim(1, -1)
        if q is not None:
            y = (x if x.ndim == 3 else x.flatten(1, -2)).to(q.dtype) @ (q.mT if back else q)
            x = y.to(x.dtype) if x.ndim == 3 else y.to(x.dtype).unflatten(1, x.shape[1:-1])
    return x


def unfold(x: Tensor, mode: int) -> Tensor:
    """X_(k) (B, d_k, rest), the unfolding of x (B, ...) along mode k: x and x^T for a matrix."""
    return x.movedim(mode + 1, 1).flatten(2)


def add_gram(s: Tensor, x: Tensor, keep: float, share: float) -> None:
    """S <- keep S + share X X^T, X (B, d, rest). Of many rows in blocks, the upper ones mirrored, which saves a quarter of the flops."""
    x, d = x.to(s.dtype), x.shape[1]
    if d < BLOCKS_FROM or s.dtype == torch.bfloat16:
        torch.baddbmm(s, x, x.mT, beta=keep, alpha=share, out=s)
        return
    a, b = slice(0, d // 2), slice(d // 2, d)
    for rows, columns in ((a, a), (b, a), (b, b)):
        part = s[:, rows, columns]
        torch.baddbmm(part, x[:, rows], x[:, columns].mT, beta=keep, alpha=share, out=part)
    s[:, a, b].copy_(s[:, b, a].mT)


BLOCKS_FROM = 1024                                  # rows from which `add_gram` goes by blocks: below, products of half the size are no faster


def first_gram(x: Tensor, share: float, dtype: torch.dtype) -> Tensor:
    """share X X^T (B, d, d) of x (B, d, rest), in that dtype."""
    s = x.new_zeros(len(x), x.shape[1], x.shape[1], dtype=dtype)
    add_gram(s, x, 0., share)
    return s


REFRESH = 2 + 8 / 3                                 # flops over n^3 of one side: S Q, and QR with its Q written out


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
                 max_precond_dim=10000, correct_bias=True, normalize_grads=False, factor_dtype=None, stagger=False, shard=False):
        super().__init__(params, dict(lr=lr, betas=betas, shampoo_beta=shampoo_beta, eps=eps, weight_decay=weight_decay,
                                      precondition_frequency=precondition_frequency, max_precond_dim=max_precond_dim,
                                      correct_bias=correct_bias, normalize_grads=normalize_grads, factor_dtype=factor_dtype), stagger, shard)

    def preconditioned(self, shape, group):
        return [len(shape) > 1 and d <= group["max_precond_dim"] for d in shape]

    def flops(self, shape, group):
        has = self.preconditioned(shape, group)
        through = sum(2 * math.prod(shape) * d for d, one in zip(shape, has) if one)                  # u for a matrix
        return 3 * through, 2 * through + sum(REFRESH * d ** 3 for d, one in zip(shape, has) if one)

    def update(self, params, group):
        g, b = self.gradients(params), shampoo_beta(group)
        if not self.state[params[0]]:
            self.keep(params, soap_seed(g, b, self.preconditioned(params[0].shape, group), group["factor_dtype"] or g.dtype))
            return
        state = self.stack(params)
        move(params, *soap_direction(g, state, group), group["lr"] * group["weight_decay"])
        for k, s in enumerate(state["GG"]):
            if s is not None:
                add_gram(s, unfold(g, k), b, 1 - b)
        # Last of all: G_t turns the basis of update t+1, never its own
        if self.refreshes(params[0], group):
            soap_refresh(state)


def soap_seed(g: Tensor, b: float, sides: list[bool], dtype: torch.dtype) -> dict:
    """The state after the first gradient: factors (1-b) G_(k) G_(k)^T and their eigenvectors, of that dtype."""
    factors = [first_gram(unfold(g, k), 1 - b, dtype) if has else None for k, has in enumerate(sides)]
    return {"step": 0, "exp_avg": torch.zeros_like(g), "exp_avg_sq": torch.zeros_like(g), "GG": factors,
            "Q": [None if s is None else eigenbasis(s) for s in factors]}


def soap_direction(g: Tensor, state: dict, group: dict) -> tuple[Tensor, float]:
    """Advances M and V with g; returns U (in the shape of g) and its step size."""
    m, v, (beta1, beta2), t = state["exp_avg"], state["exp_avg_sq"], group["betas"], state["step"]
    r = rotate(g, state["Q"])
    m.lerp_(r, 1 - beta1)
    v.mul_(beta2).addcmul_(r, r, value=1 - beta2)
    directions = rotate(m / v.sqrt().add_(group["eps"]), state["Q"], back=True)
    step_size = group["lr"]
    if group["correct_bias"]:
        step_size *= math.sqrt(1 - beta2 ** t) / (1 - beta1 ** t)
    if group["normalize_grads"]:
        directions = directions / (1e-30 + directions.flatten(1).square().mean(1).sqrt()).view(-1, *[1] * (g.ndim - 1))
    return directions, step_size


def soap_refresh(state: dict) -> None:
    """Turn the bases towards the factors' eigenvectors; V is permuted with its basis vectors, M is carried over exactly."""
    m, v = rotate(state["exp_avg"], state["Q"], back=True), state["exp_avg_sq"]
    for k, (s, q) in enumerate(zip(state["GG"], state["Q"])):
        if s is not None:
            order = turn(s, q, sort=True)
            v.copy_(v.gather(k + 1, order.view(len(v), *[-1 if mode == k else 1 for mode in range(v.ndim - 1)]).expand_as(v)))
    state["exp_avg"].copy_(rotate(m, state["Q"]))


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
                 init_factor=.1, max_clamp_value=4000, factor_dtype=None, stagger=False, shard=False):
        super().__init__(params, dict(lr=lr, betas=betas, shampoo_beta=shampoo_beta, eps=eps, weight_decay=weight_decay,
                                      precondition_frequency=precondition_frequency, init_factor=init_factor, max_clamp_value=max_clamp_value,
                                      factor_dtype=factor_dtype), stagger, shard)

    def preconditioned(self, shape, group):
        return [True, True]

    def flops(self, shape, group):
        m, n = shape[0], math.prod(shape[1:])
        u = 2 * m * n * (m + n)
        return 3 * u + 2 * m * n * min(m, n), 2 * u + REFRESH * (m ** 3 + n ** 3)

    def update(self, params, group):
        g = self.gradients(params).flatten(2)                               # (B, out, rest)
        if not self.state[params[0]]:
            self.keep(params, kl_seed(g, shampoo_beta(group), group["init_factor"], group["factor_dtype"] or g.dtype))
            return
        state = self.stack(params)
        move(params, kl_directions(g, state, group), group["lr"], group["lr"] * group["weight_decay"])
        if self.refreshes(params[0], group):
            kl_refresh(state)


def kl_seed(g: Tensor, b: float, init_factor: float, dtype: torch.dtype) -> dict:
    """The state after the first gradient. Each factor takes the other for the identity; eigh's eigenvalues are thrown away."""
    B, m, n = g.shape
    factors = [first_gram(g, (1 - b) / n, dtype), first_gram(g.mT, (1 - b) / m, dtype)]
    return {"step": 0, "exp_avg": torch.zeros_like(g), "GG": factors, "Q": [eigenbasis(s) for s in factors],
            "eigen_sqrt_inv": [g.new_full((B, d), init_factor ** -.5) for d in (m, n)]}


def kl_directions(g: Tensor, state: dict, group: dict) -> Tensor:
    """Advances M, factors and eigenvalues with g; returns L^(-1/2) M R^(-1/2) in the parameter's basis, of the eigenvalues before; all (B, m, n)."""
    (left, right), x = state["Q"], g.to(state["Q"][0].dtype)
    lg, gr = left.mT @ x, x @ right                                     # both halves are needed below,
    h = left.mT @ gr if g.shape[1] <= g.shape[2] else lg @ right        # the whole from whichever is cheaper
    lg, gr, h = (y.to(g.dtype) for y in (lg, gr, h))
    state["exp_avg"].lerp_(h, 1 - group["betas"][0])
    a, c = (t.clone() for t in state["eigen_sqrt_inv"])
    kl_factors(lg, gr, h, state, group)
    del lg, gr, h                                                       # temporaries, of which there are enough below
    scale = a[:, :, None] * c[:, None]
    return rotate((state["exp_avg"] * scale).div_(scale.mul_(group["eps"]).add_(1)), state["Q"], back=True)


def kl_factors(lg: Tensor, gr: Tensor, h: Tensor, state: dict, group: dict) -> None:
    """Factors and eigenvalues from lg = Q_L^T G, gr = G Q_R and h = Q_L^T G Q_R; both sides see the other as it was before."""
    (a, c), (_, m, n), b = state["eigen_sqrt_inv"], h.shape, shampoo_beta(group)
    add_gram(state["GG"][0], gr * c[:, None], b, (1 - b) / n)
    add_gram(state["GG"][1], (lg * a[:, :, None]).mT, b, (1 - b) / m)
    seen = (h * c[:, None]).square_().mean(2), (h * a[:, :, None]).square_().mean(1)
    for old, new in zip((a, c), seen):
        old.copy_(kl_inverse_root(old, new, b, group["max_clamp_value"]))


def kl_inverse_root(a: Tensor, seen: Tensor, b: float, limit: float | None) -> Tensor:
    """lambda^(-1/2) (B, d) after lambda = a^-2 has moved towards `seen`. Only a is stored, so the limit on a is a floor under lambda."""
    a = (b * a.pow(-2) + (1 - b) * seen).rsqrt()
    a = torch.where(a.isfinite(), a, 0.)            # a direction without any gradient stands still
    return a if limit is None else a.clamp(max=max(10, min(a.shape[1], limit)))


def kl_refresh(state: dict) -> None:
    m = rotate(state["exp_avg"], state["Q"], back=True)
    for s, q in zip(state["GG"], state["Q"]):
        turn(s, q, sort=False)
    state["exp_avg"].copy_(rotate(m, state["Q"]))


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

    def __init__(self, params, lr=1e-3, weight_decay=.1, momentum=.95, nesterov=True, ns_steps=5, adjust_lr_fn=None, shard=False):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps,
                                      adjust_lr_fn=adjust_lr_fn), shard=shard)

    def state_dtype(self, p):
        return p.dtype

    def flops(self, shape, group):
        r, c = sorted((shape[0], math.prod(shape[1:])))
        return group["ns_steps"] * 2 * (2 * r * r * c + r ** 3), 0

    def update(self, params, group):
        mu, g = group["momentum"], self.gradients(params)
        if not self.state[params[0]]:
            self.keep(params, {"momentum_buffer": torch.zeros_like(g)})
        buffer = self.stack(params)["momentum_buffer"]
        buffer.lerp_(g, 1 - mu)
        o = newton_schulz((g.lerp(buffer, mu) if group["nesterov"] else buffer).flatten(2), group["ns_steps"])
        step_size = group["lr"] * MUON_SCALES[group["adjust_lr_fn"]](*o.shape[1:])
        for p, u in zip(params, o):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(u.reshape(p.shape), alpha=-step_size)


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """U V^T, roughly, of x = U S V^T (m, n) or of a stack of them: a quintic in the singular values that is steep at 0 and never quite settles at 1."""
    if x.ndim == 3 and len(x) == 1:                                     # for one matrix the plain product is the faster one
        return newton_schulz(x[0], steps)[None]
    tall, fused = x.shape[-2] > x.shape[-1], torch.addmm if x.ndim == 2 else torch.baddbmm
    y = x.bfloat16().mT if tall else x.bfloat16()                       # the Gram matrix of the short side is the small one
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=1e-7)      # not in place: y may be the momentum buffer itself
    for _ in range(steps):
        a = y @ y.mT
        y = fused(y, fused(a, a, a, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return y.mT if tall else y


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
                    shard: bool = True, **options) -> Optimizers:
    """The optimizer `name` ("adamw", "soap", "kl-shampoo", "muon") for a model.

    Weights of rank >= 2 inside `blocks.` (attention and MLP, decoder blocks included) go to the matrix optimizer with `options`. Everything
    else (patch and token embedding, positions, tokens, head, norms, biases) goes to AdamW with `aux_lr` (default: lr) and `aux_betas`.
    For "adamw" all parameters go to AdamW with lr and `options`; aux_lr has no meaning then. Vectors, biases, tokens and positions never decay.
    For Muon adjust_lr_fn is "match_rms_adamw" unless given, since then one lr serves both parts.
    shard: with several ranks each has its share of the matrices; AdamW's part, which is cheap, is on all of them.
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
        parts.append(MATRIX_OPTIMIZERS[name](layered([group]), lr=lr, weight_decay=weight_decay, shard=shard, **options))
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
