"""The optimizers against independent truth: slow float64 references in numpy, torch's Muon, properties.

The references take another road than optim.py. SOAP's first moment stays in the parameter's basis, and
each side gets an explicit rotation matrix, the identity if it has no factor. KL-Shampoo's
preconditioner is the dense mn x mn matrix, and it tracks lambda, not lambda^(-1/2).
"""
import copy
import io
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import optim
from optim import SOAP, KLShampoo, Muon, build_optimizer, describe


# --------------------------------------------------------------------------------------------------
# References

class SlowSOAP:
    """One tensor, numpy float64. `q`: the bases after the first call, which a long side leaves open."""

    def __init__(self, w):
        self.w, self.t, self.s = w.copy(), 0, None

    def apply(self, x, bases):
        for k, q in enumerate(bases):                       # multiply mode k by the matrix q^T
            x = np.moveaxis(np.einsum("ij,i...->j...", q, np.moveaxis(x, k, 0)), 0, k)
        return x

    def outer(self, g, k):
        others = [i for i in range(g.ndim) if i != k]
        return np.tensordot(g, g, axes=(others, others))

    def __call__(self, g, o, q=None):
        b1, b2 = o["betas"]
        b = b2 if o["shampoo_beta"] is None else o["shampoo_beta"]
        if self.s is None:
            self.has = [g.ndim > 1 and d <= o["max_precond_dim"] for d in g.shape]
            self.s = [(1 - b) * self.outer(g, k) for k in range(g.ndim)]
            self.q = [q[k] if has else np.eye(d) for k, (d, has) in enumerate(zip(g.shape, self.has))]
            self.m, self.v = np.zeros_like(g), np.zeros_like(g)
            return
        self.t += 1
        inverse = [q.T for q in self.q]
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * self.apply(g, self.q) ** 2
        u = self.apply(self.apply(self.m, self.q) / (np.sqrt(self.v) + o["eps"]), inverse)
        if o["normalize_grads"]:
            u = u / (1e-30 + np.sqrt(np.mean(u ** 2)))
        rate = o["lr"] * (np.sqrt(1 - b2 ** self.t) / (1 - b1 ** self.t) if o["correct_bias"] else 1)
        self.w = self.w - rate * u
        self.w = self.w - o["lr"] * o["weight_decay"] * self.w
        self.s = [b * s + (1 - b) * self.outer(g, k) for k, s in enumerate(self.s)]
        if self.t % o["precondition_frequency"] == 0:
            for k in range(g.ndim):
                if self.has[k]:
                    order = np.argsort(-np.diag(self.q[k].T @ self.s[k] @ self.q[k]), kind="stable")
                    self.v = np.take(self.v, order, axis=k)
                    self.q[k] = np.linalg.qr(self.s[k] @ self.q[k][:, order])[0]


class SlowKL:
    """One matrix, numpy float64, everything dense."""

    def __init__(self, w):
        self.w, self.t, self.s = w.copy(), 0, None

    def __call__(self, g, o, q=None):
        (m, n), b1 = g.shape, o["betas"][0]
        b = o["betas"][1] if o["shampoo_beta"] is None else o["shampoo_beta"]
        if self.s is None:
            self.s = [(1 - b) * g @ g.T / n, (1 - b) * g.T @ g / m]
            self.q, self.m = list(q), np.zeros_like(g)
            self.lam = [np.full(m, o["init_factor"]), np.full(n, o["init_factor"])]
            return
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * g
        basis = np.kron(self.q[0], self.q[1])               # eigenvectors of L (x) R, for row-major vec
        denominator = np.sqrt(np.kron(self.lam[0], self.lam[1])) + o["eps"]
        u = ((basis / denominator) @ basis.T @ self.m.reshape(-1)).reshape(m, n)
        inverse = [q @ np.diag(1 / lam) @ q.T for q, lam in zip(self.q, self.lam)]
        seen = [g @ inverse[1] @ g.T / n, g.T @ inverse[0] @ g / m]
        for k in range(2):
            self.s[k] = b * self.s[k] + (1 - b) * seen[k]
            self.lam[k] = b * self.lam[k] + (1 - b) * np.diag(self.q[k].T @ seen[k] @ self.q[k])
            if o["max_clamp_value"] is not None:
                largest = max(10, min(g.shape[k], o["max_clamp_value"]))
                self.lam[k] = np.maximum(self.lam[k], largest ** -2.)
        if self.t % o["precondition_frequency"] == 0:
            self.q = [np.linalg.qr(s @ q)[0] for s, q in zip(self.s, self.q)]
        self.w = self.w - o["lr"] * u
        self.w = self.w - o["lr"] * o["weight_decay"] * self.w


def gradients(shape, calls=26, scale=1., seed=0):
    """Noise seen through an ill-conditioned map, so that bases and eigenvalues matter."""
    rng = np.random.default_rng(seed)
    x = [rng.standard_normal(shape) * scale for _ in range(calls)]
    weights = np.geomspace(1, .1, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    mix = np.linalg.qr(rng.standard_normal((shape[0], shape[0])))[0]
    return [np.tensordot(mix, weights * g, axes=1) + .3 * scale for g in x]


def deviation(cls, slow_cls, shape, options, scale=1., missing=(), change=None):
    """Largest |W - W_ref| over 25 updates, in units of the distance travelled."""
    rng = np.random.default_rng(1)
    w = nn.Parameter(torch.from_numpy(rng.standard_normal(shape)))
    opt, slow = cls([w], **options), slow_cls(w.detach().numpy())
    group, start, worst = opt.param_groups[0], w.detach().numpy().copy(), 0.
    peak = group["lr"]
    for call, g in enumerate(gradients(shape, 26 + len(missing), scale)):
        group["lr"] = peak * (1 + math.cos(call / 9))                   # a schedule
        if change is not None and call == 8:
            group.update(change)
        if call in missing:
            w.grad = None
            opt.step()
            continue
        w.grad = torch.from_numpy(g)
        opt.step()
        seeded = slow.s is None
        slow(g, group, [None if q is None else q.numpy().copy() for q in opt.state[w]["Q"]])
        travelled = np.linalg.norm(slow.w - start)
        if seeded:
            assert np.array_equal(w.detach().numpy(), start)
        else:
            worst = max(worst, np.linalg.norm(w.detach().numpy() - slow.w) / travelled)
    assert opt.state[w]["step"] == 25 and travelled > 0
    return worst


LIVE = dict(betas=(.5, .9), shampoo_beta=.3, precondition_frequency=2, weight_decay=.5, eps=1e-3)
SOAP_CASES = {                                              # shape, options, the rest
    "square": ((6, 6), {}, {}),
    "wide": ((4, 12), {}, {}),
    "tall": ((10, 4), dict(precondition_frequency=3), {}),
    "every step": ((6, 4), dict(precondition_frequency=1), {}),
    "3-D": ((4, 3, 5), dict(precondition_frequency=3), {}),
    "4-D": ((3, 4, 2, 3), dict(precondition_frequency=1), {}),
    "capped left": ((8, 5), dict(max_precond_dim=6, precondition_frequency=3), {}),
    "capped right": ((5, 8), dict(max_precond_dim=6, precondition_frequency=3), {}),
    "just not capped": ((8, 6), dict(max_precond_dim=6), {}),
    "capped middle": ((4, 7, 3), dict(max_precond_dim=5, precondition_frequency=3), {}),
    "capped both": ((6, 6), dict(max_precond_dim=5), {}),
    "one row": ((1, 6), dict(max_precond_dim=5), {}),
    "betas": ((6, 5), dict(betas=(.8, .99), shampoo_beta=.7, precondition_frequency=3), {}),
    "shampoo_beta 0": ((6, 6), dict(shampoo_beta=0, precondition_frequency=3), {}),
    "beta1 0": ((6, 6), dict(betas=(0., .9)), {}),
    "no decay": ((6, 6), dict(weight_decay=0.), {}),
    "decay": ((6, 6), dict(weight_decay=2.), {}),
    "normalize": ((6, 6), dict(normalize_grads=True, precondition_frequency=3), {}),
    "no bias correction": ((6, 6), dict(correct_bias=False), {}),
    "eps": ((6, 6), dict(eps=.1), {}),
    "missing": ((6, 5), dict(precondition_frequency=3), dict(missing=(0, 4, 5, 11))),
    "live options": ((6, 6), {}, dict(change=LIVE)),
}
KL_CASES = {
    "square": ((6, 6), {}, {}),
    "wide": ((4, 12), {}, {}),
    "tall": ((10, 4), dict(precondition_frequency=3), {}),
    "every step": ((6, 4), dict(precondition_frequency=1), {}),
    "one row": ((1, 6), dict(precondition_frequency=7), {}),
    "betas": ((6, 5), dict(betas=(.8, .9), shampoo_beta=.7, precondition_frequency=3), {}),
    "shampoo_beta 0": ((6, 6), dict(shampoo_beta=0, precondition_frequency=3), {}),
    "decay": ((6, 6), dict(weight_decay=2.), {}),
    "eps": ((6, 6), dict(eps=.1), {}),
    "clamped": ((6, 6), dict(betas=(.9, .6)), dict(scale=1e-3)),
    "clamped at its side": ((6, 14), dict(betas=(.9, .6)), dict(scale=1e-3)),
    "clamped at the value": ((6, 14), dict(betas=(.9, .6), max_clamp_value=12), dict(scale=1e-3)),
    "no clamp": ((6, 6), dict(betas=(.9, .6), max_clamp_value=None), dict(scale=1e-3)),
    "init_factor": ((6, 5), dict(init_factor=1e-4, precondition_frequency=3), {}),
    "missing": ((6, 5), dict(precondition_frequency=3), dict(missing=(0, 4, 5, 11))),
    "live options": ((6, 6), {}, dict(change=LIVE)),
}


@pytest.mark.parametrize("case", SOAP_CASES)
def test_soap_follows_the_slow_reference(case):
    shape, options, rest = SOAP_CASES[case]
    assert deviation(SOAP, SlowSOAP, shape, options, **rest) < 1e-9


@pytest.mark.parametrize("case", KL_CASES)
def test_kl_shampoo_follows_the_slow_reference(case):
    shape, options, rest = KL_CASES[case]
    assert deviation(KLShampoo, SlowKL, shape, options, **rest) < 1e-9


def test_the_clamp_cases_do_reach_the_clamp():
    """Otherwise the cases above would pass without any clamp."""
    w = nn.Parameter(torch.ones(6, 14, dtype=torch.float64))
    opt = KLShampoo([w], betas=(.9, .6))
    run(opt, [w], [[torch.from_numpy(g)] for g in gradients((6, 14), scale=1e-3)])
    a, c = opt.state[w]["eigen_sqrt_inv"]
    assert a.max() == 10 and c.max() == 14


# --------------------------------------------------------------------------------------------------
# Helpers for the properties

MAKE = {"soap": lambda p, **o: SOAP(p, **{"precondition_frequency": 3, **o}),
        "kl": lambda p, **o: KLShampoo(p, **{"precondition_frequency": 3, **o}),
        "muon": lambda p, **o: Muon(p, **o)}


def run(opt, params, grads):
    """One call per entry of grads, a list with a gradient (or None) per parameter."""
    for row in grads:
        for p, g in zip(params, row):
            p.grad = None if g is None else g.to(p.dtype).clone()
        opt.step()


def randn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def rows(shapes, calls, seed=0, dtype=torch.float32):
    return [[randn(*s, seed=1000 * seed + 50 * i + j, dtype=dtype) for j, s in enumerate(shapes)]
            for i in range(calls)]


def tensors(state):
    for v in state.values():
        yield from (t for t in (v if isinstance(v, list) else [v]) if isinstance(t, torch.Tensor))


class Net(nn.Module):
    """The names of the real models, small."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, 8, 2, 2)})
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 8))
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "norm1": nn.LayerNorm(8),
            "attn": nn.ModuleDict({"qkv": nn.Linear(8, 24), "proj": nn.Linear(8, 8)}),
            "mlp": nn.ModuleDict({"fc1": nn.Linear(8, 32), "fc2": nn.Linear(32, 8)})}) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def fake_gradients(self, seed):
        for i, p in enumerate(self.parameters()):
            p.grad = randn(*p.shape, seed=100 * seed + i, dtype=p.dtype)


NAMES = ["adamw", "soap", "kl-shampoo", "muon"]


def build(model, name, **options):
    if name in ("soap", "kl-shampoo"):
        options = {"precondition_frequency": 3, **options}
    return build_optimizer(model, name, lr=1e-2, weight_decay=.1, **options)


# --------------------------------------------------------------------------------------------------
# The first call

@pytest.mark.parametrize("kind", ["soap", "kl"])
def test_the_first_call_only_seeds(kind):
    w = nn.Parameter(randn(6, 4, dtype=torch.float64))
    before, g = w.detach().clone(), randn(6, 4, seed=1, dtype=torch.float64)
    opt = MAKE[kind]([w], weight_decay=.5, lr=.1)
    run(opt, [w], [[g]])
    state = opt.state[w]
    assert torch.equal(w, before) and state["step"] == 0 and not state["exp_avg"].any()
    b, (m, n) = opt.param_groups[0]["betas"][1], g.shape
    expected = [(1 - b) * g @ g.T, (1 - b) * g.T @ g]
    if kind == "kl":
        expected = [expected[0] / n, expected[1] / m]
        assert all((a == .1 ** -.5).all() for a in state["eigen_sqrt_inv"])
    else:
        assert not state["exp_avg_sq"].any()
    for s, q, e in zip(state["GG"], state["Q"], expected):
        torch.testing.assert_close(s, e)
        torch.testing.assert_close(q.T @ q, torch.eye(len(q), dtype=q.dtype))
        diagonal = q.T @ s @ q
        torch.testing.assert_close(diagonal, diagonal.diag().diag(), atol=1e-14, rtol=0)
        assert (diagonal.diag().diff() < 1e-14).all()       # the largest first


@pytest.mark.parametrize("kind", ["soap", "kl"])
def test_each_parameter_counts_for_itself(kind):
    """A parameter whose first gradient comes late does what it would have done alone."""
    shapes = [(5, 5), (4, 6)]
    early, late = (nn.Parameter(randn(*s, seed=9)) for s in shapes)
    alone = nn.Parameter(late.detach().clone())
    grads = rows(shapes, 9)
    together = MAKE[kind]([early, late])
    run(together, [early, late], [[g, None if i < 4 else h] for i, (g, h) in enumerate(grads)])
    run(MAKE[kind]([alone]), [alone], [[h] for _, h in grads[4:]])
    assert torch.equal(late, alone)
    assert together.state[early]["step"] == 8 and together.state[late]["step"] == 4


# --------------------------------------------------------------------------------------------------
# Symmetries

def test_soap_does_not_care_about_the_order_of_its_basis():
    """Columns of Q permuted with M and V along, and flipped signs, are the same state; later too."""
    w = nn.Parameter(randn(6, 5, dtype=torch.float64))
    opt, grads = SOAP([w], precondition_frequency=3), rows([(6, 5)], 12, dtype=torch.float64)
    run(opt, [w], grads[:6])                                # five updates, the next one refreshes
    w2 = nn.Parameter(w.detach().clone())
    opt2 = SOAP([w2], precondition_frequency=3)
    opt2.load_state_dict(opt.state_dict())
    state = opt2.state[w2]
    left, right = torch.tensor([3, 1, 5, 0, 2, 4]), torch.tensor([4, 2, 0, 1, 3])
    state["Q"] = [state["Q"][0][:, left], -state["Q"][1][:, right]]
    state["exp_avg"] = -state["exp_avg"][left][:, right]
    state["exp_avg_sq"] = state["exp_avg_sq"][left][:, right]
    for row in grads[6:]:
        run(opt, [w], [row])
        run(opt2, [w2], [row])
        torch.testing.assert_close(w2, w, atol=1e-13, rtol=0)


@pytest.mark.parametrize("kind", ["soap", "kl"])
def test_a_rotated_problem_gives_the_rotated_path(kind):
    p, r = (torch.linalg.qr(randn(5, 5, seed=s, dtype=torch.float64))[0] for s in (7, 8))
    w = nn.Parameter(randn(5, 5, dtype=torch.float64))
    turned = nn.Parameter(p @ w.detach() @ r)
    grads = rows([(5, 5)], 15, seed=1, dtype=torch.float64)
    run(MAKE[kind]([w], lr=.1), [w], grads)
    run(MAKE[kind]([turned], lr=.1), [turned], [[p @ g @ r] for g, in grads])
    torch.testing.assert_close(turned, p @ w @ r, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", ["kl", "muon"])
@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (4, 3, 5)])
def test_higher_rank_is_the_matrix_out_by_rest(kind, shape):
    w, flat = nn.Parameter(randn(*shape)), nn.Parameter(randn(*shape).flatten(1))
    grads = rows([shape], 9, seed=2)
    run(MAKE[kind]([w], lr=.1), [w], grads)
    run(MAKE[kind]([flat], lr=.1), [flat], [[g.flatten(1)] for g, in grads])
    assert torch.equal(w.flatten(1), flat) and not torch.equal(w, randn(*shape))


@pytest.mark.parametrize("shape, cap", [((), 10), ((7,), 10), ((6, 5), 4)])
def test_soap_without_factors_is_adam_one_call_late(shape, cap):
    """eps is added before the bias correction: torch's Adam with eps / sqrt(1 - b2^t)."""
    w = nn.Parameter(randn(*shape, dtype=torch.float64))
    grads = rows([shape], 8, seed=3, dtype=torch.float64)
    expected, m, v = w.detach().clone(), 0., 0.
    opt = SOAP([w], lr=.1, betas=(.9, .99), eps=1e-2, weight_decay=.1, max_precond_dim=cap)
    run(opt, [w], grads)
    for t, (g,) in enumerate(grads[1:], 1):
        m, v = .9 * m + .1 * g, .99 * v + .01 * g ** 2
        eps = 1e-2 / math.sqrt(1 - .99 ** t)
        expected = expected - .1 * (m / (1 - .9 ** t)) / ((v / (1 - .99 ** t)).sqrt() + eps)
        expected = expected * (1 - .1 * .1)
    torch.testing.assert_close(w.detach(), expected, atol=1e-13, rtol=0)
    assert opt.state[w]["Q"] == opt.state[w]["GG"] == [None] * len(shape)


def test_kl_shampoo_rests_where_a_direction_never_had_a_gradient():
    a = optim.kl_inverse_root(torch.tensor([2., 2.]), torch.tensor([0., 4.]), 0., None)
    assert a.tolist() == [0., .5]


# --------------------------------------------------------------------------------------------------
# Muon

@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("dtype, nesterov", [
    (torch.float32, True), (torch.float32, False), (torch.bfloat16, True)])
def test_muon_is_torchs_muon(adjust, dtype, nesterov):
    shapes = [(6, 6), (12, 4), (4, 12)]
    ours, theirs = ([nn.Parameter(randn(*s, seed=4, dtype=dtype)) for s in shapes] for _ in range(2))
    options = dict(lr=.02, weight_decay=.1, nesterov=nesterov, adjust_lr_fn=adjust)
    grads = rows(shapes, 10, seed=5)
    run(Muon(ours, ns_dtype=torch.bfloat16, **options), ours, grads)
    run(torch.optim.Muon(theirs, **options), theirs, grads)
    for a, b in zip(ours, theirs):
        assert torch.equal(a, b)


def test_muon_in_bf16_without_nesterov_keeps_its_momentum():
    """torch 2.14 normalises the buffer itself then; ours is the plain average of the gradients."""
    w, grads = nn.Parameter(randn(6, 4, dtype=torch.bfloat16)), rows([(6, 4)], 4, dtype=torch.bfloat16)
    opt = Muon([w], nesterov=False, momentum=.5, ns_dtype=torch.bfloat16)
    run(opt, [w], grads)
    expected = torch.zeros(6, 4, dtype=torch.bfloat16)
    for g, in grads:
        expected.lerp_(g, .5)
    assert torch.equal(opt.state[w]["momentum_buffer"], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_newton_schulz_moves_singular_values_towards_one(dtype):
    x = randn(40, 24)
    y = optim.newton_schulz(x, 5, dtype)
    before, after = torch.linalg.svdvals(x), torch.linalg.svdvals(y.float())
    assert y.dtype == dtype
    assert before[0] / before[-1] > 5 and after.min() > .6 and after.max() < 1.25


def test_newton_schulz_runs_in_the_type_that_the_device_multiplies_fast(monkeypatch):
    """float32 on a CPU without units for bfloat16, close to the published path; describe says which."""
    grads, paths = rows([(12, 8)], 6), {}
    for units in ({"avx512_bf16": True}, {"bf16": True}, {"avx512_bf16": False}, {}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units, raising=False)
        w = nn.Parameter(randn(12, 8))
        opt = Muon([w])
        run(opt, [w], grads)
        dtype = torch.bfloat16 if any(units.values()) else torch.float32
        assert optim.fast_dtype(w.device) == dtype
        assert f"Newton-Schulz in {str(dtype)[6:]}, which this device" in describe(opt)
        assert torch.equal(w, paths.setdefault(dtype, w.detach().clone()))
    given, step = nn.Parameter(randn(12, 8)), paths[torch.bfloat16] - randn(12, 8)
    run(Muon([given], ns_dtype=torch.bfloat16), [given], grads)
    assert torch.equal(given, paths[torch.bfloat16])
    assert 0 < (paths[torch.float32] - paths[torch.bfloat16]).norm() < .03 * step.norm()
    assert optim.fast_dtype(torch.device("cuda")) == torch.bfloat16


# --------------------------------------------------------------------------------------------------
# Gradients, closures, number types, options given as tensors

@pytest.mark.parametrize("kind, options", [
    ("soap", {}), ("kl", {}), ("muon", {}), ("muon", {"nesterov": False})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_not_modified(kind, options, dtype):
    shapes = [(6, 4), (4, 3, 2, 2)] + ([(5,), ()] if kind == "soap" else [])
    params = [nn.Parameter(randn(*s, dtype=dtype)) for s in shapes]
    opt = MAKE[kind](params, **options)
    for row in rows(shapes, 5, dtype=dtype):
        run(opt, params, [row])
        assert all(torch.equal(p.grad, g) for p, g in zip(params, row))


@pytest.mark.parametrize("kind", [*MAKE, "built"])
def test_a_closure_may_call_backward(kind):
    model = Net()
    w = model.blocks[0]["attn"]["proj"].weight
    opt = build(model, "soap") if kind == "built" else MAKE[kind]([w])
    calls = []

    def closure():
        opt.zero_grad()
        loss = (w ** 2).sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    for _ in range(3):
        before = (w ** 2).sum().item()
        assert opt.step(closure).item() == pytest.approx(before)
    assert len(calls) == 3 and calls[2] < calls[0]


def descend_with(name, lr, weight_decay, steps=6):
    """Six steps of an optimizer; lr and weight_decay are numbers or tensors."""
    model = Net()
    if name in MAKE:
        weights = [block["attn"]["proj"].weight for block in model.blocks]
        opt = MAKE[name](weights, lr=lr, weight_decay=weight_decay)
    elif name == "torch":
        opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, foreach=False)
    else:
        opt = build_optimizer(model, name, lr, weight_decay)
    for i in range(steps):
        model.fake_gradients(i)
        opt.step()
    return [p.detach() for p in model.parameters()], opt


@pytest.mark.parametrize("name", [*MAKE, *NAMES, "torch"])
def test_options_given_as_tensors_are_left_alone(name):
    """lr and weight decay as tensors: the path of the numbers, as in torch's AdamW, and no change."""
    lr, decay = torch.tensor(.01, dtype=torch.float64), torch.tensor(.1, dtype=torch.float64)
    given = [lr] if name in ("torch", "adamw") else [lr, decay]         # torch takes only lr as a tensor
    plain, _ = descend_with(name, .01, .1)
    tensors_, opt = descend_with(name, *given, *[.1] * (2 - len(given)))
    assert lr.item() == .01 and decay.item() == .1
    for a, b in zip(plain, tensors_):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)
    if name != "torch":
        assert "lr 0.01, weight decay 0.1" in describe(opt)


@pytest.mark.parametrize("kind", ["soap", "kl"])
@pytest.mark.parametrize("dtype, state_dtype", [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)])
def test_state_is_fp32_and_stays_so_through_a_load(kind, dtype, state_dtype):
    """torch casts a loaded state to the parameter's type, which loses the factors of bf16 parameters."""
    w = nn.Parameter(randn(6, 4, dtype=dtype))
    grads = rows([(6, 4)], 12, dtype=dtype)
    opt = MAKE[kind]([w])
    run(opt, [w], grads[:6])
    assert {t.dtype for t in tensors(opt.state[w])} == {state_dtype}
    assert w.dtype == dtype and w.isfinite().all()
    w2 = nn.Parameter(w.detach().clone())
    opt2 = MAKE[kind]([w2])
    opt2.load_state_dict(opt.state_dict())
    for a, b in zip(tensors(opt.state[w]), tensors(opt2.state[w2])):
        assert b.dtype == state_dtype and torch.equal(a, b) and a.data_ptr() != b.data_ptr()
    run(opt, [w], grads[6:])
    run(opt2, [w2], grads[6:])
    assert torch.equal(w, w2)


@pytest.mark.parametrize("kind, expected", [
    ("soap", torch.float32), ("kl", torch.float32), ("muon", torch.bfloat16)])
def test_the_state_of_a_float64_run_fits_bf16_parameters(kind, expected):
    w, w2 = (nn.Parameter(randn(6, 4, dtype=dtype)) for dtype in (torch.float64, torch.bfloat16))
    opt, opt2 = MAKE[kind]([w]), MAKE[kind]([w2])
    run(opt, [w], rows([(6, 4)], 3))
    opt2.load_state_dict(opt.state_dict())
    assert {t.dtype for t in tensors(opt2.state[w2])} == {expected}
    run(opt2, [w2], rows([(6, 4)], 3))


@pytest.mark.parametrize("kind", MAKE)
def test_loaded_state_goes_to_the_device_of_the_parameter(kind):
    w = nn.Parameter(randn(6, 4))
    opt = MAKE[kind]([w])
    run(opt, [w], rows([(6, 4)], 3))
    elsewhere = nn.Parameter(torch.empty(6, 4, device="meta"))      # the second device of any machine
    opt2 = MAKE[kind]([elsewhere])
    opt2.load_state_dict(opt.state_dict())
    assert {t.device.type for t in tensors(opt2.state[elsewhere])} == {"meta"}


def test_bf16_parameters_round_once_per_update():
    """A decay of lr wd = 1e-4 is below bf16's resolution; rounded with the step it is not lost twice."""
    w16 = nn.Parameter(randn(6, 6, dtype=torch.bfloat16))
    w32 = nn.Parameter(w16.detach().float())
    grads = rows([(6, 6)], 2, dtype=torch.bfloat16)
    run(SOAP([w32], lr=.1), [w32], grads)
    run(SOAP([w16], lr=.1), [w16], grads)
    assert torch.equal(w32.bfloat16(), w16)


@pytest.mark.parametrize("kind, tolerance", [("soap", 1e-3), ("kl", 1e-4)])
def test_fp32_follows_float64(kind, tolerance):
    paths = {}
    for dtype in (torch.float32, torch.float64):
        w = nn.Parameter(randn(12, 12).to(dtype))
        run(MAKE[kind]([w], lr=.1), [w], [[torch.from_numpy(g)] for g in gradients((12, 12))])
        paths[dtype] = w.detach().double() - randn(12, 12)
    difference = paths[torch.float32] - paths[torch.float64]
    assert difference.norm() < tolerance * paths[torch.float64].norm()


@pytest.mark.parametrize("choice", ["old switch", "new switch"])
@pytest.mark.parametrize("kind", ["soap", "kl"])
def test_factors_are_true_fp32_whatever_the_user_chose(kind, choice, monkeypatch):
    """The same numbers under autocast and with reduced precision allowed; the choice comes back."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    plain, reduced = nn.Parameter(randn(16, 16)), nn.Parameter(randn(16, 16))
    grads, seen, qr = rows([(16, 16)], 7), [], torch.linalg.qr
    run(MAKE[kind]([plain]), [plain], grads)

    def spy(x):
        seen.append([b.fp32_precision for b in backends])
        return qr(x)

    default = [b.fp32_precision for b in backends]
    monkeypatch.setattr(torch.linalg, "qr", spy)
    try:
        if choice == "old switch":
            torch.set_float32_matmul_precision("medium")
        else:
            backends[0].fp32_precision, backends[1].fp32_precision = "tf32", "bf16"
        chosen = [b.fp32_precision for b in backends]
        with torch.autocast("cpu", torch.bfloat16):
            run(MAKE[kind]([reduced]), [reduced], grads)
        assert [b.fp32_precision for b in backends] == chosen != ["ieee", "ieee"]
        if choice == "old switch":
            assert torch.get_float32_matmul_precision() == "medium"
    finally:
        for b in backends:
            b.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")
        for b, precision in zip(backends, default):
            b.fp32_precision = precision
    assert torch.equal(plain, reduced)
    assert len(seen) == 4 and all(s == ["ieee", "ieee"] for s in seen)


# --------------------------------------------------------------------------------------------------
# Failures are seen

@pytest.mark.parametrize("kind", ["soap", "kl"])
@pytest.mark.parametrize("name", ["eigh", "qr"])
def test_a_failed_factorisation_is_repeated_in_float64(kind, name, monkeypatch):
    """... and gives what fp32 would have given."""
    w, w2 = nn.Parameter(randn(8, 8)), nn.Parameter(randn(8, 8))
    grads, original = rows([(8, 8)], 7), getattr(torch.linalg, name)
    run(MAKE[kind]([w]), [w], grads)

    def only_float64(x):
        if x.dtype != torch.float64:
            raise torch.linalg.LinAlgError("did not converge")
        return original(x)

    monkeypatch.setattr(torch.linalg, name, only_float64)
    opt = MAKE[kind]([w2])
    with pytest.warns(UserWarning, match=r"\(8, 8\) factor failed in torch.float32"):
        run(opt, [w2], grads)
    assert {t.dtype for t in tensors(opt.state[w2])} == {torch.float32}
    assert (w - w2).norm() < 1e-2 * (w - randn(8, 8)).norm()


@pytest.mark.parametrize("kind", ["soap", "kl"])
@pytest.mark.parametrize("name", ["eigh", "qr"])
def test_a_factorisation_that_fails_twice_is_an_error(kind, name, monkeypatch):
    def never(x):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, name, never)
    w = nn.Parameter(randn(8, 8))
    error = pytest.raises(RuntimeError, match=r"\(8, 8\) factor failed in float64 too")
    with warnings.catch_warnings(), error:
        warnings.simplefilter("ignore")
        run(MAKE[kind]([w]), [w], rows([(8, 8)], 7))


VECTOR, COMPLEX = torch.zeros(3), torch.zeros(2, 2, dtype=torch.complex64)
WRONG = [
    (lambda p: SOAP(p, lr=-1), "lr"), (lambda p: Muon(p, lr=math.nan), "lr"),
    (lambda p: SOAP(p, eps=-1e-8), "eps"), (lambda p: SOAP(p, weight_decay=-1), "weight_decay"),
    (lambda p: SOAP(p, betas=(.9, 1.)), "betas"), (lambda p: SOAP(p, shampoo_beta=-1), "shampoo_beta"),
    (lambda p: Muon(p, momentum=1.), "momentum"), (lambda p: Muon(p, adjust_lr_fn="x"), "adjust_lr_fn"),
    (lambda p: SOAP(p, precondition_frequency=0), "precondition_frequency"),
    (lambda p: SOAP([dict(params=p, precondition_frequency=.5)]), "precondition_frequency"),
    (lambda p: SOAP([nn.Parameter(COMPLEX)]), "complex64"),
    (lambda p: KLShampoo([nn.Parameter(VECTOR)]), r"\(3,\)"),
    (lambda p: Muon([nn.Parameter(VECTOR)]), r"\(3,\)"),
    (lambda p: build_optimizer(Net(), "adam", 1e-3, 0.), "adam"),
    (lambda p: build_optimizer(Net(), "soap", 0., 0.), "lr"),
    (lambda p: build_optimizer(nn.LayerNorm(4), "soap", 1e-3, 0.), "no weight matrix"),
]


@pytest.mark.parametrize("make, word", WRONG)
def test_wrong_values_get_a_sentence(make, word):
    with pytest.raises(ValueError, match=word):
        make([nn.Parameter(torch.zeros(2, 2))])


# --------------------------------------------------------------------------------------------------
# Cost

def flops_of_one_update(opt, w, update):
    """Matmul flops of update number `update`."""
    grads = rows([tuple(w.shape)], update + 1)
    run(opt, [w], grads[:-1])
    with FlopCounterMode(display=False) as counter:
        run(opt, [w], grads[-1:])
    return counter.get_total_flops()


@pytest.mark.parametrize("m, n", [(24, 24), (16, 48), (48, 16)])
def test_matmul_cost(m, n):
    u, w = 2 * m * n * (m + n), nn.Parameter(randn(m, n))
    assert flops_of_one_update(SOAP([w]), w, 2) == 3 * u
    assert flops_of_one_update(KLShampoo([w]), w, 2) == 3 * u + 2 * m * n * min(m, n)
    refresh = 2 * u + 2 * m ** 3 + 2 * n ** 3               # M out and in, S Q of each side, no QR
    assert flops_of_one_update(SOAP([w]), w, 10) == 3 * u + refresh
    assert flops_of_one_update(KLShampoo([w]), w, 10) == 3 * u + 2 * m * n * min(m, n) + refresh


class Syncs(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += func in (aten._local_scalar_dense.default, aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", MAKE)
def test_an_update_never_waits_for_the_device(kind):
    w = nn.Parameter(randn(6, 6))
    opt, grads = MAKE[kind]([w]), rows([(6, 6)], 5)
    run(opt, [w], grads[:1])
    with Syncs() as syncs:
        run(opt, [w], grads[1:])                            # refresh included
    assert syncs.count == 0
    with Syncs() as syncs:
        w.sum().item()
    assert syncs.count == 1                                 # the counter counts


# --------------------------------------------------------------------------------------------------
# build_optimizer

def names(model, group):
    by_id = {id(p): key for key, p in model.named_parameters()}
    return {by_id[id(p)] for p in group["params"]}


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_goes_to_its_place(name):
    model = Net()
    model.norm.bias.requires_grad_(False)
    opt = build_optimizer(model, name, 1e-2, .1, **({} if name == "muon" else {"betas": (.8, .9)}))
    groups = {g["name"]: g for g in opt.param_groups}
    layers = "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"
    weights = {f"blocks.{i}.{layer}.weight" for i in range(2) for layer in layers}
    maps = {"patch_embed.proj.weight", "head.weight"}
    vectors = {key for key, p in model.named_parameters() if p.ndim == 1 and p.requires_grad}
    still = vectors | {"cls_token", "pos_embed"}
    if name == "adamw":
        expected = {"decay": weights | maps, "no_decay": still}
        assert all(g["betas"] == (.8, .9) for g in groups.values())
    else:
        expected = {"matrix": weights, "aux_decay": maps, "aux_no_decay": still}
        assert [type(part) for part in opt.parts] == [optim.OPTIMIZERS[name], torch.optim.AdamW]
        assert all(groups[key]["betas"] == (.9, .999) for key in ("aux_decay", "aux_no_decay"))
        assert name == "muon" or groups["matrix"]["betas"] == (.8, .9)
        assert name != "muon" or groups["matrix"]["adjust_lr_fn"] == "match_rms_adamw"
    assert {key: names(model, g) for key, g in groups.items()} == expected
    assert all(g["lr"] == 1e-2 and g["lr_scale"] == 1 for g in groups.values())
    assert all(g["weight_decay"] == (0 if key.endswith("no_decay") else .1) for key, g in groups.items())


class Plain(nn.Module):
    """Without `blocks`, with a tied head."""

    def __init__(self):
        super().__init__()
        self.embed, self.conv = nn.Embedding(5, 6), nn.Conv2d(3, 4, 2)
        self.layer, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_model_without_blocks():
    """Its linear layers and convolutions are the matrices; a head tied to the embedding is not."""
    for model, expected in ((Plain(), {"conv.weight", "layer.weight"}), (nn.Linear(3, 2), {"weight"})):
        opt = build_optimizer(model, "soap", 1e-2, .1)
        assert names(model, opt.param_groups[0]) == expected
        every = set(dict(model.named_parameters()))
        assert set.union(*(names(model, g) for g in opt.param_groups)) == every


class Sign(torch.optim.Optimizer):
    """W <- (1 - lr wd) W - lr sign(G)."""

    def __init__(self, params, lr, weight_decay=0.):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * p.grad.sign())


def test_a_new_optimizer_is_one_line(monkeypatch):
    monkeypatch.setitem(optim.OPTIMIZERS, "sign", Sign)
    model = Net()
    before = [p.detach().clone() for p in model.parameters()]
    opt = build_optimizer(model, "sign", 1e-2, .1)
    model.fake_gradients(0)
    opt.step()
    for p, old in zip(model.parameters(), before):
        is_map = p.ndim > 1 and p is not model.cls_token and p is not model.pos_embed
        expected = old * (1 - (1e-3 if is_map else 0)) - 1e-2 * p.grad.sign()
        torch.testing.assert_close(p.detach(), expected)
    assert "Sign decay: 10 tensors" in describe(opt)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer_decay", [1., .5])
def test_torchs_schedulers_work(name, layer_decay):
    """... and give the weights that a schedule written by hand gives, after a load of the state too."""
    ends = []
    for by_hand in (True, False):
        model = Net()
        opt = build(model, name, layer_decay=layer_decay)
        if not by_hand:
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8)
        for i in range(8):
            if by_hand:
                for g in opt.param_groups:
                    g["lr"] = 1e-2 * g["lr_scale"] * (1 + math.cos(math.pi * i / 8)) / 2
            model.fake_gradients(i)
            opt.step()
            if not by_hand:
                schedule.step()
            if i == 4:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        ends.append([p.detach() for p in model.parameters()])
    for a, b in zip(*ends):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    copied = copy.deepcopy(opt)
    assert all(a is b for a, b in zip(copied.param_groups, copied.parts[0].param_groups))


def test_tokens_and_biases_inside_blocks_and_nested_blocks():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder_blocks = nn.ModuleList([nn.Linear(4, 4)])
            self.decoder_blocks[0].mask_token = nn.Parameter(torch.zeros(1, 1, 4))
            self.decoder_blocks[0].position_bias = nn.Parameter(torch.zeros(4, 4))

    model = Decoder()
    opt = build_optimizer(model, "kl-shampoo", 1e-3, .1)
    still = {f"decoder_blocks.0.{key}" for key in ("bias", "mask_token", "position_bias")}
    assert [names(model, g) for g in opt.param_groups] == [{"decoder_blocks.0.weight"}, still]


@pytest.mark.parametrize("name", NAMES)
def test_training_resumes_bitwise_from_a_file(name):
    """torch.save, torch.load(weights_only=True), another model object: not one bit of difference."""
    model = Net()
    opt = build(model, name)

    def train(model, opt, steps):
        for i in steps:
            model.fake_gradients(i)
            for g in opt.param_groups:
                g["lr"] = 1e-2 / (i + 1) * g["lr_scale"]
            opt.step()
            opt.zero_grad()

    train(model, opt, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model2 = Net()
    model2.load_state_dict(saved["model"])
    opt2 = build(model2, name)
    opt2.load_state_dict(saved["optimizer"])
    start = copy.deepcopy(saved["model"])
    train(model, opt, range(5, 12))
    train(model2, opt2, range(5, 12))
    for (key, a), b in zip(model.named_parameters(), model2.parameters()):
        assert torch.equal(a, b), key
        assert not torch.equal(a, start[key]), key
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_state_is_not_shared(name):
    model, model2 = Net(), Net()
    opt, opt2 = build(model, name), build(model2, name)
    for i in range(2):
        model.fake_gradients(i)
        opt.step()
    opt2.load_state_dict(opt.state_dict())
    before = copy.deepcopy(opt.state_dict())
    model2.fake_gradients(3)
    opt2.step()
    for part, old in zip(opt.state_dict()["parts"], before["parts"]):
        for i, state in part["state"].items():
            assert all(torch.equal(a, b) for a, b in zip(tensors(state), tensors(old["state"][i])))


def test_the_state_of_another_optimizer_is_refused():
    state = build(Net(), "soap").state_dict()
    with pytest.raises(ValueError, match="'soap'.*'muon'"):
        build(Net(), "muon").load_state_dict(state)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("alone", [True, False])
def test_a_state_finds_its_parameter_by_name(name, alone):
    """Modules defined as (p, q) in one model and (q, p) in the other, of equal shapes or not."""
    for shapes in ({"p": (4, 4), "q": (4, 4)}, {"p": (4, 6), "q": (6, 4)}):
        def make(order):
            layers = {key: nn.Linear(*shapes[key], bias=False) for key in order}
            model = nn.ModuleDict({"blocks": nn.ModuleDict(layers)})
            opt = build(model, name)
            return model, opt, opt.parts[0] if alone and name != "adamw" else opt

        def train(model, opt, steps):
            for i in steps:
                for key, p in sorted(model.named_parameters()):
                    p.grad = randn(*p.shape, seed=10 * i + ord(key[7]))
                opt.step()

        (one, opt, part), (two, opt2, part2) = make("pq"), make("qp")
        train(one, opt, range(5))
        two.load_state_dict(one.state_dict())
        part2.load_state_dict(part.state_dict())
        train(one, opt, range(5, 9))
        train(two, opt2, range(5, 9))
        assert all(torch.equal(p, two.state_dict()[key]) for key, p in one.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_another_model_is_refused(name):
    def saved(**shapes):
        layers = {key: nn.Linear(*reversed(shape), bias=False) for key, shape in shapes.items()}
        model = nn.ModuleDict({"blocks": nn.ModuleDict(layers)})
        opt = build(model, name)
        for p in model.parameters():
            p.grad = randn(*p.shape)
        opt.step()
        return opt

    state = saved(p=(4, 4), q=(4, 4)).state_dict()
    with pytest.raises(ValueError, match=r"parameter blocks.q.weight is \(4, 6\), was \(4, 4\)"):
        saved(p=(4, 4), q=(4, 6)).load_state_dict(state)
    with pytest.raises(ValueError, match="another model: only one has a parameter blocks.[qr].weight"):
        saved(p=(4, 4), r=(4, 4)).load_state_dict(state)
    kind = optim.OPTIMIZERS[name]
    unnamed, other = (kind([nn.Parameter(torch.zeros(s))], lr=.1) for s in ((4, 4), (6, 4)))
    for opt in (unnamed, other):
        run(opt, opt.param_groups[0]["params"], [[randn(*opt.param_groups[0]["params"][0].shape)]])
    if name != "adamw":                                     # which is torch's own
        with pytest.raises(ValueError, match=r"parameter 0 is \(6, 4\), was \(4, 4\)"):
            other.load_state_dict(unnamed.state_dict())


def test_describe_names_the_sides():
    text = describe(build(Net(), "soap", max_precond_dim=30))
    assert "2 x (24, 8): both sides" in text
    assert "2 x (32, 8): sides [1] of 2" in text and "2 x (8, 32): sides [0] of 2" in text
    assert "SOAP matrix: 8 tensors, 1,536 parameters" in text and "AdamW aux_no_decay" in text
    assert "2 x (32, 8): both sides" in describe(build(Net(), "kl-shampoo"))
    assert "no side, plain Adam" in describe(SOAP([nn.Parameter(torch.zeros(5))]))
    assert "sides [0, 1, 2, 3] of 4" in describe(SOAP([nn.Parameter(torch.zeros(2, 2, 2, 2))]))


def test_describe_counts_flops():
    """By hand for 100 x 100, u = 4e6: 3u, a refresh 2u + 2 (2 + 8/3) 1e6, the first call u + 18e6."""
    weights = [nn.Parameter(torch.zeros(100, 100)) for _ in range(3)]
    text = describe(SOAP(weights, precondition_frequency=10))
    mean, first = 3 * (12e6 + (8e6 + 28e6 / 3) / 10), 3 * (4e6 + 18e6)
    assert f"{mean / 1e9:.3g} Gflop a step on average, {first / 1e9:.3g} the first" in text


@pytest.mark.parametrize("kind", MAKE)
def test_a_slow_first_step_is_announced_once(kind, monkeypatch):
    w, grads = nn.Parameter(randn(6, 4)), rows([(6, 4)], 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(MAKE[kind]([w]), [w], grads)                    # a small one says nothing
    monkeypatch.setattr(optim, "SLOW_FIRST_STEP", 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(MAKE[kind]([w]), [w], grads)
    assert [str(warning.message).count("first step") for warning in said] == [1] * (kind != "muon")


# --------------------------------------------------------------------------------------------------
# layer decay

SCALES = {"patch_embed": .125, "cls_token": .125, "pos_embed": .125, "blocks.0": .25, "blocks.1": .5,
          "norm": 1.0, "head": 1.0}                         # .5 ** (2 + 1 - i)


def scale_of(key):
    return next(v for k, v in SCALES.items() if key.startswith(k + ".") or key == k)


@pytest.mark.parametrize("name", NAMES)
def test_each_layer_has_its_lr(name):
    """Two blocks, decay .5: scales counted by hand; kinds, weight decay and members as without."""
    model = Net()
    opt = build_optimizer(model, name, 1e-2, .1, layer_decay=.5)
    plain = {g["name"]: g for g in build_optimizer(model, name, 1e-2, .1).param_groups}
    seen = {kind: set() for kind in plain}
    for g in opt.param_groups:
        for key in names(model, g):
            assert g["lr_scale"] == pytest.approx(scale_of(key), rel=1e-12), key
            assert g["lr"] == pytest.approx(1e-2 * scale_of(key), rel=1e-12), key
        assert g["weight_decay"] == plain[g["name"]]["weight_decay"]
        assert not seen[g["name"]] & names(model, g)
        seen[g["name"]] |= names(model, g)
    assert seen == {kind: names(model, g) for kind, g in plain.items()}


def test_adam_moves_each_layer_by_its_share():
    """Adam's first update without decay is lr times the gradient's sign: a step tells its lr."""
    model = Net()
    opt = build_optimizer(model, "adamw", 1e-3, 0., layer_decay=.5)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    model.fake_gradients(0)
    opt.step()
    for key, p in model.named_parameters():
        moved = (p - before[key]).abs().mean().item()
        assert moved == pytest.approx(1e-3 * scale_of(key), rel=1e-3), key


@pytest.mark.parametrize("name", NAMES)
def test_without_layer_decay_nothing_is_different(name):
    """Groups, their order and the saved state's layout: old checkpoints must load."""
    states = []
    for options in ({}, {"layer_decay": 1.0}):
        model = Net()
        opt = build(model, name, **options)
        model.fake_gradients(0)
        opt.step()
        states.append([part["param_groups"] for part in opt.state_dict()["parts"]])
    assert states[0] == states[1]
    expected = ["decay", "no_decay"] if name == "adamw" else ["matrix", "aux_decay", "aux_no_decay"]
    assert [g["name"] for part in states[0] for g in part] == expected


def test_describe_does_not_list_the_layers():
    texts = (describe(build(Net(), "soap", layer_decay=decay)) for decay in (1., .5))
    plain, layered = (text.splitlines() for text in texts)
    assert "lr 0.0025 to 0.005 by layer" in layered[0] and "lr 0.01," in plain[0]
    plain, layered = ([line.split(", lr")[0] for line in lines] for lines in (plain, layered))
    assert plain == layered                                 # tensors, parameters, flops, sides: the sums


@pytest.mark.parametrize("decay", [0., -1., 1.5])
def test_a_layer_decay_out_of_range(decay):
    with pytest.raises(ValueError, match="layer_decay"):
        build(Net(), "adamw", layer_decay=decay)
    with pytest.raises(ValueError, match="blocks"):
        build(nn.Linear(2, 2), "adamw", layer_decay=.5)
