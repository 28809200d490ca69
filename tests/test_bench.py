"""bench.py: the counts against numbers worked out by hand and torch's own counter, the arithmetic of a period, and a smoke run of each bench."""
import itertools
import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import bench
import optim
import runtime
from model import LM, ViT

TINY = ("--threads", "1", "--matmul", "32", "--device", "cpu", "--repeats", "1", "--cycle", "2")


def sentence(capsys, *flags):
    """What a wrong command says: one sentence, and exit code 2."""
    with pytest.raises(SystemExit) as stop:
        runtime.run(lambda: bench.main([*flags]))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "Traceback" not in said
    return said


def run(tmp_path, *flags):
    bench.main([*flags, *TINY, "--out", str(tmp_path / "rows.json")])
    return json.loads((tmp_path / "rows.json").read_text())


# ---------------------------------------------------------------------------------------------------------------- counting
@pytest.mark.parametrize("kind", ["soap", "kl-shampoo", "muon"])
def test_flops_by_hand(kind):
    # one product Q_L^T G Q_R of a 4 x 6 matrix: 2*4*4*6 + 2*4*6*6 = 192 + 288 = 480
    by_hand = {"soap": (1440, 960 + 4 * 4 * 4 * 14 / 3 + 6 * 6 * 6 * 14 / 3),    # 3 of them; 2 of them, S Q (2 n^3) and QR (8/3 n^3) per side
               "kl-shampoo": (1440 + 192, 960 + 280 * 14 / 3),                   # and one half product more, of the short side: 2*4*4*6
               "muon": (5 * 2 * (2 * 4 * 4 * 6 + 4 * 4 * 4), 0)}[kind]           # five times Y Y^T, A A and B Y
    for frequency in (1, 10):
        assert bench.floor([(4, 6)] * 3, kind, frequency) == pytest.approx(3 * (by_hand[0] + by_hand[1] / frequency))


def test_flops_of_the_vit_s_matrices():
    shapes = bench.block_matrices(384, 12)
    assert sum(m * n for m, n in shapes) == 12 * 12 * 384 ** 2 == 21_233_664
    u = 12 * 2 * 384 ** 3 * (3 * 4 + 1 * 2 + 4 * 5 + 4 * 5)                      # 2 m n (m + n), in units of 384^3
    sides = 12 * 384 ** 3 * ((27 + 1) + (1 + 1) + 2 * (64 + 1))                  # m^3 + n^3
    assert bench.floor(shapes, "soap", 10) == pytest.approx(3 * u + (2 * u + 14 / 3 * sides) / 10)


@pytest.mark.parametrize("set_, params", [("nano", 12 * 12 * 96 ** 2), ("vit-b", 84_934_656), ("lm-194m", 169_869_312)])
def test_sets_are_the_models_block_matrices(set_, params):
    assert sum(m * n for m, n in bench.block_matrices(*bench.SETS[set_])) == params


def test_block_matrices_are_those_that_the_optimizer_gets():
    matrix = optim.build_optimizer(ViT(img_size=28, patch_size=7, in_chans=1, embed_dim=96, depth=12, num_heads=3), "soap", 1e-3, 0.).parts[0]
    assert sorted(tuple(p.shape) for p in matrix.param_groups[0]["params"]) == sorted(bench.block_matrices(*bench.SETS["nano"]))


@pytest.mark.parametrize("make, sizes, x", [
    (ViT, dict(img_size=12, patch_size=4, in_chans=3, num_classes=7, embed_dim=16, depth=3, num_heads=2), torch.zeros(2, 3, 12, 12)),
    (LM, dict(vocab_size=29, block_size=24, embed_dim=16, depth=3, num_heads=2), torch.zeros(2, 24, dtype=torch.long)),
    (bench.GPT, dict(vocab_size=29, block_size=24, embed_dim=16, depth=3, num_heads=2), torch.zeros(2, 24, dtype=torch.long))])
def test_model_flops_equal_torchs_counter(make, sizes, x):
    """The counter sees every product; it is asked about the mathematical attention, as the fused one computes some of it twice."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        y = make(**sizes)(x)
        forward = counter.get_total_flops()
        y.sum().backward()
    assert 3 * forward == bench.model_flops(sizes, 2)
    unneeded = 2 * 2 * 9 * 16 * 3 * 16 if make is ViT else 0                     # nobody asks for the gradient of the pixels
    assert counter.get_total_flops() == bench.model_flops(sizes, 2) - unneeded


# --------------------------------------------------------------------------------------------------------------- measuring
def test_amortised_step():
    plain_and_slow = [1, 2, 9, 3, 1, 2, 11, 3]                                   # cycle 4, the third refreshes: 9 and 11; plain: 1 2 3 1 2 3
    assert bench.amortise(plain_and_slow, 4, 10) == pytest.approx(((9 * 2 + 10) / 10, 2, 10))
    assert bench.amortise([7, 5, 6], 1, 10) == (6, 6, None)


def test_interleaving_and_what_lies_outside_of_the_time():
    order, now = [], itertools.count()
    clock = lambda: next(now)
    seconds = bench.interleaved({"a": lambda: order.append("a"), "b": lambda: (order.append("b"), clock())}, 3, clock=clock, warmup=1, before=lambda name: clock())
    assert order == list("abababab") and seconds == {"a": [1] * 3, "b": [2] * 3}


def test_state_bytes_counts_storages_once():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))], 1.)
    stack = torch.zeros(2, 5)
    for p, view in zip(optimizer.param_groups[0]["params"], stack):
        optimizer.state[p] = {"views": [view, None], "own": {"deep": torch.zeros(3, dtype=torch.float64)}, "step": 3}
    assert bench.state_bytes(optimizer) == 2 * 5 * 4 + 2 * 3 * 8


def test_peak_bytes_of_the_last_step():
    held = {}

    def make():
        held["x"] = torch.zeros(3000)

    def last():                                                  # 4000 new numbers while 3000 old ones live, then 1000 more
        held["y"] = torch.zeros(4000)
        del held["x"]
        held["z"] = torch.zeros(1000)

    assert bench.peak_bytes([make, last], torch.device("cpu")) == pytest.approx(4 * 4000, abs=600)


def test_fit_finds_the_rate():
    rows = {f"a, d = {d}": {"ms": ms} for d, ms in ((1, 10.), (2, 20.), (3, 30.))}
    notes = []
    bench.fit(rows, {"a, d = 1": 10e6, "a, d = 2": 20e6, "a, d = 3": 30e6}, notes)
    assert all(row["deviation, %"] == pytest.approx(0, abs=1e-9) for row in rows.values()) and "at 1 Gflop/s" in notes[0]
    rows["a, d = 1"]["ms"] = 20.                                 # x = 1/2, 1, 1: ms per flop 2.5 / 2.25
    bench.fit(rows, {"a, d = 1": 10e6, "a, d = 2": 20e6, "a, d = 3": 30e6}, notes)
    assert rows["a, d = 1"]["deviation, %"] == pytest.approx(100 * (2 * 2.25 / 2.5 - 1)) and rows["a, d = 3"]["deviation, %"] == pytest.approx(-10)


def test_quick_seeds_give_torch_back():
    before = torch.linalg.eigh
    with bench.quick_seeds():
        assert torch.equal(torch.linalg.eigh(torch.ones(2, 3, 3))[1], torch.eye(3).expand(2, 3, 3))
    assert torch.linalg.eigh is before


# ------------------------------------------------------------------------------------------------------------------- runs
def test_optim_names_missing_peers(monkeypatch, tmp_path):
    def missing(name, flag):
        raise runtime.BadInput(f"{flag} needs the package {name}")
    monkeypatch.setattr(runtime, "import_optional", missing)
    result = run(tmp_path, "optim", "--set", "nano", "--depth", "1")
    assert list(result["rows"]) == [name for name in bench.KINDS if name.startswith(("optim.", "torch."))]
    assert all(any(name in note for note in result["notes"]) for name in ("pytorch_optimizer.SOAP", "pytorch_optimizer.Muon", "heavyball.SOAP", "heavyball.KLShampoo"))
    for name, row in result["rows"].items():
        assert row["ms"] > 0 and (row["refresh, ms"] is not None) == ("SOAP" in name or "Shampoo" in name)
    weights = 4 * 12 * 96 ** 2 / 1e6
    assert result["rows"]["torch.optim.Muon"]["state, MB"] == result["rows"]["optim.Muon"]["state, MB"] == pytest.approx(weights)
    sides = 4 * 2 * 96 ** 2 * ((9 + 1) + (1 + 1) + 2 * (16 + 1)) / 1e6           # S and Q of both sides
    assert result["rows"]["optim.SOAP"]["state, MB"] == pytest.approx(2 * weights + sides, rel=1e-3)


@pytest.mark.parametrize("name", ["pytorch_optimizer.SOAP", "pytorch_optimizer.Muon", "heavyball.SOAP", "heavyball.KLShampoo"])
def test_peers_refresh_once_a_cycle_and_move(name):
    pytest.importorskip(name.partition(".")[0])
    p = nn.Parameter(torch.randn(12, 8))
    start, optimizer = p.detach().clone(), bench.contestant(name, [p], cycle=4)
    calls = []
    qr = torch.linalg.qr
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


def test_fit_runs(tmp_path):
    result = run(tmp_path, "optim", "--fit", "8", "16", "--depth", "1")
    assert list(result["rows"]) == ["optim.SOAP, d = 8", "optim.SOAP, d = 16"] and "largest deviation" in result["notes"][-1]


@pytest.mark.parametrize("model, unit", [("lm", "tokens/s"), ("vit", "images/s")])
def test_step_runs(model, unit, tmp_path):
    result = run(tmp_path, "step", "--model", model, "--batch-size", "2", "--only", "ours, residual, adamw", "ours, residual, soap")
    adamw, soap = result["rows"].values()
    assert soap["time, x its adamw"] == pytest.approx(soap["ms"] / adamw["ms"]) and adamw["time, x its adamw"] == 1
    assert adamw[unit] == pytest.approx(2 * {"lm": 128, "vit": 1}[model] / adamw["ms"] * 1e3) and 0 < adamw["MFU, %"]


def test_timm_has_our_sizes():
    timm = pytest.importorskip("timm.models.vision_transformer")
    sizes = bench.SIZES_OF["vit"]["laptop"][1]
    assert {k: v.shape for k, v in timm.VisionTransformer(**sizes).state_dict().items()} == {k: v.shape for k, v in ViT(**sizes).state_dict().items()}


def test_ranks_share_the_state_and_agree(tmp_path):
    result = run(tmp_path, "ranks", "--set", "nano", "--depth", "1", "--ranks", "1", "2")
    one, two = result["rows"].values()
    assert one["largest difference"] == 0 and two["largest difference"] < 1e-6 and two["state, x first"] < 0.6


def test_data_runs(tmp_path):
    (name, row), = run(tmp_path, "data", "--only", "digits8x8")["rows"].items()
    assert name == "digits8x8" and row["none, images/s"] > row["light, images/s"] > row["strong, images/s"] > 0


def test_gpu_without_one(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA machine" in sentence(capsys, "gpu", "--out", str(tmp_path / "gpu.json")) and not (tmp_path / "gpu.json").exists()


def test_gpu_on_tiny_tables(tmp_path):
    (tmp_path / "test_two.py").write_text("def test_a():\n    pass\n")
    tables = {"optimizers": "optim --set nano --depth 1 --matmul 32 --repeats 1 --cycle 2 --only optim.Muon", "late": "step"}
    args = bench.get_args(["gpu", "--threads", "1", "--device", "cpu"])
    tables, notes = bench.bench_gpu(args, runtime.start("cpu", 1), {"optimizers": tables["optimizers"]}, str(tmp_path / "test_two.py"))
    assert list(tables) == ["optimizers"] and list(tables["optimizers"]) == ["optim.Muon"] and "1 passed" in notes[0]
    tables, notes = bench.bench_gpu(args, runtime.start("cpu", 1), {"late": "step"}, str(tmp_path / "test_two.py"), limit=0)
    assert tables == {} and "left out" in notes[-1]


def test_gpu_tables_are_commands():
    for command in bench.GPU_TABLES.values():
        bench.get_args(bench.shlex.split(command))


@pytest.mark.parametrize("flags, words", [
    (("optim", "--only", "optim.Sophia"), "--only 'optim.Sophia'"), (("tokenize", "--only", "x"), "leave it out"), (("optim", "--set", "vit-h"), "--set"),
    (("step", "--model", "vit", "--size", "paper"), "--size paper"), (("step", "--size", "vit-s"), "--size vit-s"), (("optim", "--cycle", "1"), "--cycle"),
    (("optim", "--out", "/nowhere/at/all.json"), "--out /nowhere/at/all.json"), (("ranks", "--only", "torch.optim.Muon"), "--only"), (("speed",), "speed")])
def test_bad_flags_get_a_sentence(flags, words, capsys):
    assert words in sentence(capsys, *flags)
