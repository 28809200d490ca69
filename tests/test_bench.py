"""tools/bench.py: its counts against numbers worked out by hand and torch's counter, the arithmetic of a
period, what is left of a bench that is stopped, and a smoke run of each."""
import itertools
import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import optim
import runtime
from model import LM, ViT
from tools import bench

TINY = "--threads", "1", "--matmul", "32", "--device", "cpu", "--repeats", "1", "--cycle", "2"
PEERS = "pytorch_optimizer.Muon", "pytorch_optimizer.SOAP", "heavyball.SOAP", "heavyball.KLShampoo"


def refused(capsys, *flags):
    """What a wrong command says: one sentence, and exit code 2."""
    with pytest.raises(SystemExit) as stop:
        runtime.run_script(lambda: bench.main([*flags]))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "Traceback" not in said
    return said


def run(tmp_path, *flags):
    bench.main([*flags, *TINY, "--out", str(tmp_path / "rows.json")])
    return read(tmp_path / "rows.json")


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


# --------------------------------------------------------------------------------------------------
# Counting

@pytest.mark.parametrize("kind", ["soap", "kl-shampoo", "muon"])
def test_flops_by_hand(kind):
    """For 4 x 6. One product Q_L^T G Q_R: 2*4*4*6 + 2*4*6*6 = 480. S Q and QR: 14/3 n^3 a side."""
    update, refresh = {"soap": (3 * 480, 2 * 480 + (4 ** 3 + 6 ** 3) * 14 / 3),
                       "kl-shampoo": (3 * 480 + 2 * 4 * 4 * 6, 2 * 480 + (4 ** 3 + 6 ** 3) * 14 / 3),
                       "muon": (5 * 2 * (2 * 4 * 4 * 6 + 4 ** 3), 0)}[kind]      # Y Y^T, A A and B Y
    for frequency in (1, 10):
        expected = 3 * (update + refresh / frequency)
        assert bench.least_flops([(4, 6)] * 3, kind, frequency) == pytest.approx(expected)


def test_flops_of_the_vit_s_matrices():
    shapes = bench.block_matrices(384, 12)
    assert sum(m * n for m, n in shapes) == 12 * 12 * 384 ** 2 == 21_233_664
    cube = 12 * 384 ** 3
    u = 2 * cube * (3 * 4 + 1 * 2 + 4 * 5 + 4 * 5)          # 2 m n (m + n)
    sides = cube * ((27 + 1) + (1 + 1) + 2 * (64 + 1))      # m^3 + n^3
    assert bench.least_flops(shapes, "soap", 10) == pytest.approx(3 * u + (2 * u + 14 / 3 * sides) / 10)


@pytest.mark.parametrize("set_, params", [
    ("nano", 12 * 12 * 96 ** 2), ("vit-b", 84_934_656), ("lm-194m", 169_869_312)])
def test_sets_are_the_models_block_matrices(set_, params):
    assert sum(m * n for m, n in bench.block_matrices(*bench.SETS[set_])) == params


def test_block_matrices_are_those_that_the_optimizer_gets():
    model = ViT(**bench.SIZES_OF["vit"]["laptop"][1])
    group = optim.build_optimizer(model, "soap", 1e-3, 0.).param_groups[0]
    shapes = sorted(tuple(p.shape) for p in group["params"])
    assert shapes == sorted(bench.block_matrices(*bench.SETS["nano"]))


SMALL = dict(embed_dim=16, depth=3, num_heads=2)
PIXELS = dict(img_size=12, patch_size=4, in_chans=3, num_classes=7)
TOKENS = dict(vocab_size=29, block_size=24)


@pytest.mark.parametrize("make, sizes", [(ViT, PIXELS), (LM, TOKENS), (bench.GPT, TOKENS)])
def test_model_flops_equal_torchs_counter(make, sizes):
    """It sees every product of the mathematical attention; the fused one computes some of them twice."""
    sizes = SMALL | sizes
    x = torch.zeros(2, 3, 12, 12) if make is ViT else torch.zeros(2, 24, dtype=torch.long)
    mathematical = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with mathematical, FlopCounterMode(display=False) as counter:
        y = make(**sizes)(x)
        forward = counter.get_total_flops()
        y.sum().backward()
    assert 3 * forward == bench.model_flops(sizes, 2)
    unneeded = 2 * 2 * 9 * 16 * 3 * 16 if make is ViT else 0            # the gradient of the pixels
    assert counter.get_total_flops() == bench.model_flops(sizes, 2) - unneeded


# --------------------------------------------------------------------------------------------------
# Measuring

def test_amortised_step():
    """A cycle of 4 whose third step refreshes, 9 and 11; the plain ones are 1 2 3 1 2 3."""
    assert bench.amortise([1, 2, 9, 3, 1, 2, 11, 3], 4, 10) == pytest.approx(((9 * 2 + 10) / 10, 2, 10))
    assert bench.amortise([7, 5, 6], 1, 10) == (6, 6, None)


def test_interleaving_what_lies_outside_of_the_time_and_reports():
    order, now, reports = [], itertools.count(), []

    def report(measured):
        reports.append({name: list(times) for name, times in measured.items()})

    def clock():
        return next(now)

    def slow():
        order.append("b")
        clock()

    steps = {"a": lambda: order.append("a"), "b": slow}
    seconds = bench.interleaved(steps, 4, clock=clock, warmup=1, before=lambda name: clock(), whole=2,
                                report=report)
    assert order == list("ababababab") and seconds == {"a": [1] * 4, "b": [2] * 4}
    assert reports == [{"a": [1] * n, "b": [2] * n} for n in (2, 4)]


def test_state_bytes_counts_storages_once():
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, 1.)
    for p, view in zip(params, torch.zeros(2, 5)):
        own = {"deep": torch.zeros(3, dtype=torch.float64)}
        optimizer.state[p] = {"views": [view, None], "own": own, "step": 3}
    assert bench.state_bytes(optimizer) == 2 * 5 * 4 + 2 * 3 * 8


def test_peak_bytes_of_the_last_step():
    held = {}

    def make():
        held["x"] = torch.zeros(3000)

    def last():                                             # 4000 numbers beside 3000, then 1000 more
        held["y"] = torch.zeros(4000)
        del held["x"]
        held["z"] = torch.zeros(1000)

    assert bench.peak_bytes([make, last], torch.device("cpu")) == pytest.approx(4 * 4000, abs=600)


def test_quick_seeds_give_torch_back():
    before = torch.linalg.eigh
    with bench.quick_seeds():
        assert torch.equal(torch.linalg.eigh(torch.ones(2, 3, 3))[1], torch.eye(3).expand(2, 3, 3))
    assert torch.linalg.eigh is before and optim.SLOW_FIRST_STEP == 1e11


# --------------------------------------------------------------------------------------------------
# Runs

def test_optim_names_missing_peers(monkeypatch, tmp_path, capsys):
    def missing(name, flag):
        raise runtime.BadInput(f"{flag} needs the package {name}")
    monkeypatch.setattr(runtime, "import_optional", missing)
    result = run(tmp_path, "optim", "--set", "nano", "--depth", "1")
    rows = result["rows"]
    assert list(rows) == [name for name in bench.KINDS if name.startswith(("optim.", "torch."))]
    assert all(any(name in note for note in result["notes"]) for name in PEERS)
    for name, row in rows.items():
        assert row["ms"] > 0
        assert (row["refresh, ms"] is not None) == (bench.KINDS[name] in bench.REFRESHING)
    weights = 4 * 12 * 96 ** 2 / 1e6
    for name in ("torch.optim.Muon", "optim.Muon"):
        assert rows[name]["state, MB"] == pytest.approx(weights)
    sides = 4 * 2 * 96 ** 2 * ((9 + 1) + (1 + 1) + 2 * (16 + 1)) / 1e6          # S and Q of both sides
    assert rows["optim.SOAP"]["state, MB"] == pytest.approx(2 * weights + sides, rel=1e-3)
    said = capsys.readouterr().err
    assert "optim.SOAP is ready" in said and "round 2 of 2, ms: torch.float32" in said


@pytest.mark.parametrize("name", PEERS)
def test_peers_refresh_once_a_cycle_and_move(name):
    pytest.importorskip(name.partition(".")[0])
    p = nn.Parameter(torch.randn(12, 8))
    start, optimizer = p.detach().clone(), bench.contestant(name, [p], cycle=4)
    calls, qr = [], torch.linalg.qr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "qr", lambda *a, **k: (calls.append(step), qr(*a, **k))[1])
        if "heavyball" in name:
            import heavyball
            patch.setattr(heavyball.utils, "no_compile_qr", torch.linalg.qr)
        for step in range(13):
            p.grad = torch.randn(12, 8)
            optimizer.step()
    assert not torch.equal(p, start)
    assert len(set(calls)) == (3 if bench.KINDS[name] in bench.REFRESHING else 0)


def test_a_stopped_bench_keeps_what_it_has(monkeypatch, tmp_path, capsys):
    """Ctrl-C in the second repetition: the table and the file have the first; exit code 130."""
    out, calls, step = tmp_path / "rows.json", [], optim.SOAP.step

    def interrupted(self, closure=None):
        calls.append(None)
        if len(calls) == 3 + 2 + 1:                         # warm-up, a whole cycle, and one more
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(optim.SOAP, "step", interrupted)
    flags = "optim", "--set", "nano", "--depth", "1", "--only", "optim.SOAP", *TINY, "--repeats", "3"
    with pytest.raises(SystemExit) as stop:
        bench.main([*flags, "--out", str(out)])
    assert stop.value.code == 130 and read(out)["rows"]["optim.SOAP"]["ms"] > 0
    said = capsys.readouterr().out
    assert "| optim.SOAP |" in said and "3 repetitions, stopped before that" in said


def test_quick_is_small():
    args = bench.get_args(["optim", "--quick"])
    assert (args.set, args.depth, args.repeats, args.cycle) == ("nano", 1, 1, 2)
    args = bench.get_args(["optim", "--quick", "--set", "vit-s", "--repeats", "3"])
    assert (args.set, args.depth, args.repeats) == ("vit-s", 1, 3)
    args = bench.get_args(["optim"])
    assert (args.set, args.depth, args.repeats, args.cycle) == ("vit-s", None, 2, 4)


@pytest.mark.parametrize("model, unit", [("lm", "tokens/s"), ("vit", "images/s")])
def test_step_runs(model, unit, tmp_path):
    rows = "ours, residual, adamw", "ours, residual, soap"
    result = run(tmp_path, "step", "--model", model, "--batch-size", "2", "--only", *rows)
    adamw, soap = result["rows"].values()
    assert soap["time, x its adamw"] == pytest.approx(soap["ms"] / adamw["ms"])
    assert adamw["time, x its adamw"] == 1 and 0 < adamw["MFU, %"]
    assert adamw[unit] == pytest.approx(2 * {"lm": 128, "vit": 1}[model] / adamw["ms"] * 1e3)


def test_timm_has_our_sizes():
    timm = pytest.importorskip("timm.models.vision_transformer")
    sizes = bench.SIZES_OF["vit"]["laptop"][1]
    ours, theirs = (make(**sizes).state_dict() for make in (ViT, timm.VisionTransformer))
    assert {key: v.shape for key, v in theirs.items()} == {key: v.shape for key, v in ours.items()}


def test_ranks_share_the_state_and_agree(tmp_path):
    result = run(tmp_path, "ranks", "--set", "nano", "--depth", "1", "--ranks", "1", "2")
    one, two = result["rows"].values()
    assert one["largest difference"] == 0 and two["largest difference"] < 1e-6
    assert two["state, x first"] < 0.6 and one["time, x first"] == 1


def test_gpu_without_one(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA machine" in refused(capsys, "gpu", "--out", str(tmp_path / "gpu.json"))
    assert not (tmp_path / "gpu.json").exists()


def test_gpu_on_tiny_tables(tmp_path):
    tests = tmp_path / "test_two.py"
    tests.write_text("def test_a():\n    pass\n", encoding="utf-8")
    args, world = bench.get_args(["gpu", "--threads", "1", "--device", "cpu"]), runtime.start("cpu", 1)
    reports = []

    def report(rows, notes):
        reports.append(list(rows))

    tables = {"optimizers": "optim --quick --matmul 32 --only optim.Muon"}
    rows, notes = bench.bench_gpu(args, world, report, tables, str(tests))
    assert list(rows) == ["optimizers"] and list(rows["optimizers"]) == ["optim.Muon"]
    assert "1 passed" in notes[0] and reports[-1] == ["optimizers"]
    rows, notes = bench.bench_gpu(args, world, report, {"late": "step"}, str(tests), limit=0)
    assert rows == {} and "left out" in notes[-1]


def test_gpu_tables_are_commands():
    for command in bench.GPU_TABLES.values():
        bench.get_args(bench.shlex.split(command))


@pytest.mark.parametrize("flags, words", [
    (("optim", "--only", "optim.Sophia"), "--only 'optim.Sophia'"),
    (("gpu", "--only", "x"), "leave it out"), (("optim", "--set", "vit-h"), "--set"),
    (("step", "--model", "vit", "--size", "paper"), "--size paper"),
    (("step", "--size", "vit-s"), "--size vit-s"), (("optim", "--cycle", "1"), "--cycle"),
    (("optim", "--out", "/nowhere/at/all.json"), "--out /nowhere/at/all.json"),
    (("ranks", "--only", "torch.optim.Muon"), "--only"), (("speed",), "speed")])
def test_bad_flags_get_a_sentence(flags, words, capsys):
    assert words in refused(capsys, *flags)
