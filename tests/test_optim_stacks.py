"""What makes the optimizers fast must not show in their numbers: stacks of equal matrices, small
decompositions in threads, refreshes spread over a period, bfloat16 factors, shares over ranks."""
import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import optim
from optim import SOAP, KLShampoo, Muon, build_optimizer
from test_optim import MAKE, NAMES, Net, build, gradients, randn, rows, run, tensors
from test_runtime import launch_ranks

SHAPES = [(6, 4), (4, 6), (6, 4), (6, 4), (4, 6), (5, 5), (6, 4)]


def numbers(opt, params):
    return [t for p in params for t in tensors(opt.state[p])]


def close(a, b, tolerance=1e-9):
    a, b, equal_shapes = a.double(), b.double(), a.shape == b.shape
    return equal_shapes and (a - b).norm() <= tolerance * b.norm().clamp(min=1e-30)


# --------------------------------------------------------------------------------------------------
# Stacks

@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("limit", [1, 50, 10 ** 9])
def test_together_is_as_alone(kind, limit, monkeypatch):
    """Seven matrices in stacks of any size, each as with its own optimizer; gradients are missing."""
    monkeypatch.setattr(optim.MatrixOptimizer, "stack_size", {"cpu": limit})
    grads = rows(SHAPES, 12, dtype=torch.float64)
    grads[4][2] = grads[5][2] = grads[0][3] = grads[7][0] = None
    many, alone = ([nn.Parameter(randn(*s, seed=i, dtype=torch.float64)) for i, s in enumerate(SHAPES)]
                   for _ in range(2))
    run(MAKE[kind](many), many, grads)
    for i, w in enumerate(alone):
        run(MAKE[kind]([w]), [w], [[row[i]] for row in grads])
    tolerance = 1e-9 if kind != "muon" else 2e-2            # sums in bfloat16 depend on their order
    assert all(close(a, b, tolerance) for a, b in zip(many, alone))


class Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make, products", [(SOAP, 6), (KLShampoo, 7), (Muon, 15)])
def test_a_stack_is_one_product_however_many_matrices(make, products):
    for many in (1, 12):
        ws = [nn.Parameter(randn(6, 4, seed=i)) for i in range(many)]
        opt, grads = make(ws), rows([(6, 4)] * many, 3)
        run(opt, ws, grads[:2])
        with Products() as counter:
            run(opt, ws, grads[2:])
        assert counter.count == products


@pytest.mark.parametrize("kind", MAKE)
def test_stacks_are_formed_once(kind, monkeypatch):
    """... and again only where other parameters have a gradient, or the state was loaded."""
    formed, form = [], optim.MatrixOptimizer.form_stacks
    monkeypatch.setattr(optim.MatrixOptimizer, "form_stacks", lambda o: (formed.append(call), form(o)))
    ws, grads = [nn.Parameter(randn(6, 4, seed=i)) for i in range(3)], rows([(6, 4)] * 3, 10)
    opt = MAKE[kind](ws)
    grads[4][1] = None
    for call, row in enumerate(grads):
        if call == 8:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        run(opt, ws, [row])
    assert formed == [0, 4, 5, 8]


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_put_into_the_state_counts(kind):
    """State is a view: a tensor put in its place takes effect, and so does a change in place."""
    key = "momentum_buffer" if kind == "muon" else "exp_avg"
    ways = []
    for way in ("never", "replaced", "in place"):
        ws = [nn.Parameter(randn(6, 4, seed=i, dtype=torch.float64)) for i in range(3)]
        opt, grads = MAKE[kind](ws), rows([(6, 4)] * 3, 6, dtype=torch.float64)
        run(opt, ws, grads[:3])
        state = opt.state[ws[1]]
        if way == "replaced":
            state[key] = -3 * state[key]
        if way == "in place":
            state[key].mul_(-3)
        run(opt, ws, grads[3:])
        ways.append([w.detach().clone() for w in ws])
    never, replaced, in_place = ways
    assert all(close(a, b, 1e-9 if kind != "muon" else 2e-2) for a, b in zip(replaced, in_place))
    assert torch.equal(never[0], in_place[0]) and not close(never[1], in_place[1], 1e-5)


@pytest.mark.parametrize("kind", MAKE)
def test_who_is_left_behind_does_not_keep_a_stack_alive(kind):
    """One parameter after the other misses a gradient: the memory behind the state stays its own."""
    ws = [nn.Parameter(randn(6, 4, seed=i)) for i in range(8)]
    opt, grads = MAKE[kind](ws), rows([(6, 4)] * 8, 9)
    for i, row in enumerate(grads[1:]):
        row[i] = None
    run(opt, ws, grads)
    held = numbers(opt, ws)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert sum(storages.values()) == sum(t.nbytes for t in held)


def test_empty_groups_and_empty_matrices():
    for make in (SOAP, KLShampoo, Muon):
        w = nn.Parameter(randn(4, 3))
        opt = make([dict(params=[]), dict(params=[w])])
        run(opt, [w], rows([(4, 3)], 3))
        assert not torch.equal(w, randn(4, 3))


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_matrix_has_nothing_to_do(kind, dtype):
    shapes = [(0, 4), (5, 3), (4, 0)]
    ws = [nn.Parameter(randn(*shape, dtype=dtype)) for shape in shapes]
    opt, grads = MAKE[kind](ws), rows(shapes, 6, dtype=dtype)
    run(opt, ws, grads[:4])
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    run(opt, ws, grads[4:])
    assert optim.describe(opt) and list(opt.state_dict()["state"]) == [1]
    alone = nn.Parameter(randn(5, 3, dtype=dtype))
    run(MAKE[kind]([alone]), [alone], [row[1:2] for row in grads])
    assert torch.equal(ws[1], alone)
    only_empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
    run(MAKE[kind]([only_empty]), [only_empty], rows([(0, 3)], 3, dtype=dtype))


def test_each_group_has_its_type_of_factors():
    a, b = nn.Parameter(randn(6, 4)), nn.Parameter(randn(6, 4, seed=1))
    opt = SOAP([dict(params=[a], factor_dtype=torch.bfloat16), dict(params=[b])])
    run(opt, [a, b], rows([(6, 4)] * 2, 3))
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert [opt.state[p]["Q"][0].dtype for p in (a, b)] == [torch.bfloat16, torch.float32]
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["factor_dtype"]                           # a checkpoint from before the option
    opt2 = SOAP([dict(params=[a]), dict(params=[b])], factor_dtype=torch.bfloat16)
    opt2.load_state_dict(saved)
    assert {opt2.state[p]["Q"][0].dtype for p in (a, b)} == {torch.bfloat16}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("kind", MAKE)
def test_a_copy_of_an_optimizer_goes_on_alone(kind, copied):
    ws = nn.ParameterList([nn.Parameter(randn(6, 4, seed=i)) for i in range(3)])
    opt = MAKE[kind](list(ws), **({} if kind == "muon" else {"stagger": True}))
    grads = rows([(6, 4)] * 3, 8)
    run(opt, ws, grads[:4])
    ws2, opt2 = copied((ws, opt))
    before = [t.clone() for t in numbers(opt, ws)]
    run(opt2, list(ws2), grads[4:])
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(opt, ws)))
    run(opt, list(ws), grads[4:])
    assert all(torch.equal(a, b) for a, b in zip(ws, ws2)) and opt2.phase.keys() == set(ws2)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_what_is_built_goes_on_alone(name):
    model = Net()
    opt = build(model, name)
    model2, opt2 = copy.deepcopy((model, opt))
    for m, o in ((model, opt), (model2, opt2)):
        for i in range(4):
            m.fake_gradients(i)
            for group in o.param_groups:
                group["lr"] = 1e-2 / (i + 1)
            o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model2.parameters()))
    assert not torch.equal(model.head.weight, Net().head.weight)


def test_a_checkpoint_from_before_an_option(tmp_path):
    """... takes the option's default, and is otherwise the same."""
    w, w2 = nn.Parameter(randn(6, 4)), nn.Parameter(randn(6, 4))
    grads = rows([(6, 4)], 8)
    opt, opt2 = SOAP([w]), SOAP([w2])
    run(opt, [w], grads[:4])
    w2.data.copy_(w)
    saved = opt.state_dict()
    del saved["param_groups"][0]["factor_dtype"]
    opt2.load_state_dict(saved)
    run(opt, [w], grads[4:])
    run(opt2, [w2], grads[4:])
    assert torch.equal(w, w2)


def test_decompositions_in_threads_are_those_one_by_one_and_give_the_threads_back():
    before, seen = torch.get_num_threads(), []
    qr = torch.linalg.qr

    def spy(x):
        seen.append((tuple(x.shape), torch.get_num_threads()))
        return qr(x)

    try:
        torch.set_num_threads(2)
        for shape in ((5, 8, 8), (1, 8, 8), (2, 1001, 1001)):
            s, seen[:] = randn(*shape), []
            q, r = optim.decompose_in_threads(spy, s)
            assert all(torch.equal(a, qr(x)[0]) for a, x in zip(q, s)) or shape[1] > 1000
            assert close(q @ r, s, 1e-5) and torch.get_num_threads() == 2
            assert seen == ([((1, 8, 8), 1)] * shape[0] if shape[1] == 8 else [(shape, 2)])

        def fails(x):
            raise torch.linalg.LinAlgError("no")

        with pytest.raises(torch.linalg.LinAlgError):
            optim.decompose_in_threads(fails, randn(3, 4, 4))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows_", [1, 5, 6, 513])
def test_a_gram_in_blocks_is_a_gram(rows_, monkeypatch):
    x, s = randn(2, rows_, 7, dtype=torch.float64), randn(2, rows_, rows_, dtype=torch.float64)
    s = s + s.mT
    expected = .7 * s + .4 * torch.einsum("bik,bjk->bij", x, x)
    for limit in (1, 10 ** 9):
        monkeypatch.setattr(optim, "BLOCKS_FROM", limit)
        got = s.clone()
        optim.add_gram(got, x, .7, .4)
        assert close(got, expected, 1e-12) and close(got, got.mT, 1e-15)


# --------------------------------------------------------------------------------------------------
# Refreshes spread over a period

@pytest.mark.parametrize("kind", ["soap", "kl"])
def test_stagger_refreshes_each_matrix_once_a_period_and_few_at_a_time(kind):
    ws = [nn.Parameter(randn(6, 6, seed=i)) for i in range(7)]
    opt = MAKE[kind](ws, precondition_frequency=4, stagger=True)
    run(opt, ws, rows([(6, 6)] * 7, 1))
    turned = []
    for row in rows([(6, 6)] * 7, 12, seed=1):
        before = [opt.state[w]["Q"][0].clone() for w in ws]
        run(opt, ws, [row])
        turned.append([i for i, w in enumerate(ws) if not torch.equal(opt.state[w]["Q"][0], before[i])])
    for period in (turned[:4], turned[4:8], turned[8:]):
        assert sorted(itertools.chain(*period)) == list(range(7))
        assert sorted(map(len, period)) == [1, 2, 2, 2]
    assert turned[:4] == turned[4:8] == turned[8:]


@pytest.mark.parametrize("kind", ["soap", "kl"])
def test_a_staggered_matrix_is_the_reference_with_another_start_of_its_period(kind):
    """A phase moves the refreshes, no more: the path with refreshes at those calls, made by hand."""
    grads = [torch.from_numpy(g) for g in gradients((6, 4))]
    ws = [nn.Parameter(randn(6, 4, dtype=torch.float64)) for _ in range(3)]
    opt = MAKE[kind](ws, precondition_frequency=3, stagger=True)
    run(opt, ws, [[g] * 3 for g in grads])
    assert sorted(opt.phase[w] for w in ws) == [0, 1, 2]
    for w in ws:
        byhand = nn.Parameter(randn(6, 4, dtype=torch.float64))
        other = MAKE[kind]([byhand])
        for t, g in enumerate(grads):                                   # call t makes update t
            other.param_groups[0]["precondition_frequency"] = 1 if t % 3 == opt.phase[w] else 10 ** 6
            run(other, [byhand], [[g]])
        assert close(byhand, w)


def test_a_new_frequency_gives_new_phases():
    ws = [nn.Parameter(randn(6, 6, seed=i)) for i in range(6)]
    opt = SOAP(ws, precondition_frequency=2, stagger=True)
    run(opt, ws, rows([(6, 6)] * 6, 2))
    assert sorted(opt.phase.values()) == [0, 0, 0, 1, 1, 1]
    opt.param_groups[0]["precondition_frequency"] = 6
    run(opt, ws, rows([(6, 6)] * 6, 1))
    assert sorted(opt.phase.values()) == [0, 1, 2, 3, 4, 5]


def test_share_out_is_fair():
    """Within 4/3 of the best split, found by trying all."""
    for seed in range(20):
        costs = randn(7, seed=seed).abs().tolist()
        for bins in (1, 2, 3):
            def fullest(where):
                return max(sum(c for c, b in zip(costs, where) if b == i) for i in range(bins))
            best = min(fullest(where) for where in itertools.product(range(bins), repeat=7))
            assert best <= fullest(optim.assign_bins(costs, [0.] * bins)) <= 4 / 3 * best + 1e-9
    assert optim.assign_bins([], [0.] * 3) == []
    assert optim.assign_bins([3., 2., 4.], [5., 0.]) == [1, 0, 1]


# --------------------------------------------------------------------------------------------------
# Cost

@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
@pytest.mark.parametrize("make", [SOAP, KLShampoo, Muon])
def test_flops_are_what_is_computed(make, shape):
    """All but QR and eigh, which torch does not count."""
    w = nn.Parameter(randn(*shape))
    opt, grads = make([w]), rows([shape], 12)
    update, refresh, first = opt.flops(shape, opt.param_groups[0])
    counted = []
    for row in grads:
        with FlopCounterMode(display=False) as counter:
            run(opt, [w], [row])
        counted.append(counter.get_total_flops())
    assert counted[5] == update
    cubes = sum(d ** 3 for d in shape) if make is not Muon else 0
    assert counted[10] == pytest.approx(update + refresh - 8 / 3 * cubes)
    assert counted[0] == pytest.approx(first - optim.EIGH_FLOPS * cubes)


# --------------------------------------------------------------------------------------------------
# bfloat16 factors

@pytest.mark.parametrize("kind", ["soap", "kl"])
def test_bf16_factors_halve_their_memory_and_keep_the_direction(kind):
    paths, sizes = [], []
    for dtype in (None, torch.bfloat16):
        ws = [nn.Parameter(torch.zeros(12, 12)) for _ in range(2)]
        opt = MAKE[kind](ws, lr=.1, factor_dtype=dtype)
        grads = [torch.from_numpy(g).float() for g in gradients((12, 12))]
        run(opt, ws, [[g, g.T] for g in grads])
        state = opt.state[ws[0]]
        assert {t.dtype for key in ("GG", "Q") for t in state[key]} == {dtype or torch.float32}
        assert state["exp_avg"].dtype == torch.float32
        sizes.append(sum(t.nbytes for key in ("GG", "Q") for t in state[key]))
        paths.append(ws[0].detach().clone())
        saved = copy.deepcopy(opt.state_dict())
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        ws2 = [nn.Parameter(w.detach().clone()) for w in ws]
        opt2 = MAKE[kind](ws2, lr=.1, factor_dtype=dtype)
        opt2.load_state_dict(torch.load(file, weights_only=True))
        more = rows([(12, 12)] * 2, 4)
        run(opt, ws, more)
        run(opt2, ws2, more)
        assert all(torch.equal(a, b) for a, b in zip(ws, ws2))
    assert sizes[0] == 2 * sizes[1]
    similarity = torch.nn.functional.cosine_similarity(*(p.flatten() for p in paths), dim=0)
    assert similarity > .98 and not torch.equal(*paths)


# --------------------------------------------------------------------------------------------------
# Shared out over ranks

class Deep(Net):
    """Three more matrices than can be split evenly, one of them of another type."""

    def __init__(self):
        super().__init__()
        mlp = nn.ModuleDict({"fc1": nn.Linear(8, 40), "fc2": nn.Linear(40, 8)})
        self.blocks.append(nn.ModuleDict({"mlp": mlp}))
        self.blocks.append(nn.ModuleDict({"mlp": nn.ModuleDict({"fc1": nn.Linear(8, 8).bfloat16()})}))


def model_of(dtype=torch.float64):
    model = Deep()
    for name, p in model.named_parameters():
        if p.dtype == torch.float32:
            p.data = p.data.to(dtype)
    return model


def descend(model, opt, steps):
    for i in steps:
        model.fake_gradients(i)
        if i == 2:
            model.blocks[0]["attn"]["proj"].weight.grad = None
        opt.step()


def half_on_ranks(name, folder, source, target, begin, end):
    """Steps begin to end, from a checkpoint if there is one; saves one, and each rank's weights."""
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), model_of()
    opt = build(model, name, **({} if name == "muon" else {"stagger": True}))
    if source:
        saved = torch.load(folder / source, weights_only=True)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
    descend(model, opt, range(begin, end))
    torch.save([p.detach() for p in model.parameters()], folder / f"{target}-weights{rank}")
    matrix = opt.parts[0]
    params = [p for g in matrix.param_groups for p in g["params"]]
    held = [sum(t.nbytes for t in tensors(matrix.state.get(p, {}))) for p in params]
    torch.save(held, folder / f"{target}-held{rank}")
    state = opt.state_dict()
    if rank == 0:
        torch.save(dict(model=model.state_dict(), optimizer=state), folder / target)
    dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES[1:])
def test_shared_out_is_as_alone_and_its_checkpoint_knows_no_ranks(name, tmp_path):
    """Two ranks, then one, then three, each from the checkpoint before: as one process all the way."""
    model = model_of()
    opt = build(model, name, **({} if name == "muon" else {"stagger": True}))
    descend(model, opt, range(9))
    for n, source, target, steps in (2, None, "a", (0, 4)), (1, "a", "b", (4, 6)), (3, "b", "c", (6, 9)):
        arguments = name, tmp_path, source, target, *steps
        codes, outputs = launch_ranks(n, half_on_ranks, *arguments, folder=tmp_path)
        assert codes == [0] * n, outputs
        weights = [torch.load(tmp_path / f"{target}-weights{r}") for r in range(n)]
        # the same bits on all ranks; each matrix lies on one rank
        assert all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other))
        held = [torch.load(tmp_path / f"{target}-held{r}") for r in range(n)]
        whole = [sum(column) for column in zip(*held)]
        assert all(sum(h > 0 for h in column) == 1 for column in zip(*held))
        if n == 2:
            assert max(map(sum, held)) < .6 * sum(whole)
    last = torch.load(tmp_path / "c", weights_only=True)
    tolerance = 1e-9 if name != "muon" else 3e-2
    for (key, p), q in zip(model.named_parameters(), weights[0]):
        assert close(q, p, tolerance if p.dtype == torch.float64 else 3e-2), key
    mine, theirs = opt.state_dict()["parts"], last["optimizer"]["parts"]
    for a, b in zip(mine, theirs):
        assert a["state"].keys() == b["state"].keys()
        for i in a["state"]:
            for x, y in zip(tensors(a["state"][i]), tensors(b["state"][i])):
                if x.dtype == torch.float64 and x.ndim:
                    assert close(y, x, 1e-6 if name != "muon" else 3e-2)


def changing(folder):
    """Shapes of many costs, a new group on the way, another frequency: a state stays where it is."""
    dist.init_process_group("gloo")
    shapes = [(12, 3), (5, 5), (3, 14), (7, 4), (6, 6), (4, 4), (9, 2)]
    paths = []
    for shard in (True, False):
        ws = [nn.Parameter(randn(*s, seed=i, dtype=torch.float64)) for i, s in enumerate(shapes)]
        opt = SOAP(ws[:5], precondition_frequency=10, shard=shard)
        for step, row in enumerate(rows(shapes, 14, dtype=torch.float64)):
            if step == 4:
                opt.add_param_group(dict(params=ws[5:]))
            if step == 8:
                for group in opt.param_groups:
                    group["precondition_frequency"] = 1
            run(opt, ws if step >= 4 else ws[:5], [row])
        paths.append(ws)
        if shard:
            torch.save([len(opt.state[p]) > 0 for p in ws], folder / f"held{dist.get_rank()}")
    assert all(close(a, b) for a, b in zip(*paths))
    dist.destroy_process_group()


def test_shares_outlast_new_groups_and_new_frequencies(tmp_path):
    codes, outputs = launch_ranks(2, changing, tmp_path, folder=tmp_path)
    assert codes == [0, 0], outputs
    held = [torch.load(tmp_path / f"held{r}") for r in range(2)]
    assert all(a != b for a, b in zip(*held))               # on one rank each, all the time


def test_alone_nothing_is_shared():
    """Without a process group `shard` changes nothing."""
    model, model2 = Net(), Net()
    opt = build_optimizer(model, "soap", 1e-2, .1)
    opt2 = build_optimizer(model2, "soap", 1e-2, .1, shard=False)
    assert not opt.parts[0].shard and set(opt.parts[0].owner.values()) == {0}
    for i in range(3):
        for m, o in ((model, opt), (model2, opt2)):
            m.fake_gradients(i)
            o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model2.parameters()))
