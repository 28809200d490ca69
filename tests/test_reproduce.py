"""Tables and verdicts are functions of the recorded runs alone."""
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import probe
import text
import train_dino
import train_lm
import train_mae
import train_sit
import train_vit
import runtime
from evals import conditioning
from runtime import BadInput
from tools import claims, figures, reproduce

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"train_vit.py": train_vit, "train_lm.py": train_lm, "train_mae.py": train_mae, "train_sit.py": train_sit, "train_dino.py": train_dino}


class Recorded:
    """Results without files: {key: list of top-1}."""

    def __init__(self, runs):
        self.data = dict(runs={k: dict(val_top1=v) for k, v in runs.items()})

    final = reproduce.Results.final


CELL = dict(name="a", flags="", paper=80.3, opt="soap", lrs=[1e-3, 3e-3, 1e-2])


def searched(**scores):
    return Recorded({f"search | a | lr {lr}": [score] for lr, score in scores.items()})


def test_lr_search_tries_the_grid_then_widens_towards_the_best():
    assert reproduce.best_lr(CELL, searched()) == (None, [1e-3, 3e-3, 1e-2])
    assert reproduce.best_lr(CELL, searched(**{"0.001": 50, "0.003": 60, "0.01": 55})) == (3e-3, [])
    assert reproduce.best_lr(CELL, searched(**{"0.001": 60, "0.003": 50, "0.01": 40})) == (None, [3e-4])
    assert reproduce.best_lr(CELL, searched(**{"0.001": 40, "0.003": 50, "0.01": 60})) == (None, [3e-2])
    assert reproduce.best_lr(CELL, searched(**{"0.0003": 40, "0.001": 60, "0.003": 50, "0.01": 40})) == (1e-3, [])
    assert reproduce.best_lr(CELL, searched(**{"0.001": 10, "0.003": 11, "0.01": 12})) == (1e-2, [])      # chance: nothing to follow


def test_a_single_lr_is_taken_as_given():
    assert reproduce.best_lr(dict(CELL, lrs=[1e-3]), searched()) == (1e-3, [])


def test_a_diverged_run_counts_as_the_worst():
    results = searched(**{"0.001": 50, "0.003": 60})
    results.data["runs"]["search | a | lr 0.01"] = dict(diverged="the loss is not finite", val_top1=[])
    assert reproduce.best_lr(CELL, results) == (3e-3, [])


def test_pending_runs_and_the_table_by_hand():
    claim = dict(claims.TABLES["table1"], cells=[CELL])
    results = searched(**{"0.001": 50, "0.003": 60, "0.01": 55})
    jobs = reproduce.pending(claim, results, seeds=3)
    assert [key for key, _ in jobs] == [f"final | a | seed {s}" for s in range(3)]
    lines = dict(jobs)
    assert all("--lr 0.003" in line and "--holdout" not in line for _, line in jobs)
    for seed, values in enumerate(([1, 90], [2, 92], [3, 97])):
        key = f"final | a | seed {seed}"
        results.data["runs"][key] = dict(val_top1=values, command=f"python {lines[key]}")
    assert reproduce.pending(claim, results, seeds=3) == []
    assert reproduce.table(claim, results, 3).splitlines()[-1] == "| a | 80.3 | 93.0 ± 3.6 | 3 | 0.003 |"       # last epoch, sample std
    results.data["runs"]["final | a | seed 1"]["command"] = "python train_vit.py --other"                          # of another command: run again
    assert [key for key, _ in reproduce.pending(claim, results, seeds=3)] == ["final | a | seed 1"]


def test_a_diverged_seed_is_named_and_not_averaged():
    results = searched(**{"0.001": 50, "0.003": 60, "0.01": 55})
    for seed, values in enumerate(([93.0], [94.0], [])):
        results.data["runs"][f"final | a | seed {seed}"] = dict(val_top1=values)
    assert "| 93.5 ± 0.7, 1 diverged | 3 |" in reproduce.table(dict(cells=[CELL], script="train_vit.py"), results, 3)
    assert "| 93.0 | 1 |" in reproduce.table(dict(cells=[CELL], script="train_vit.py"), results, 1)


@pytest.mark.parametrize("claim", claims.TABLES.values(), ids=list(claims.TABLES))
def test_searches_never_look_at_what_the_table_shows(claim):
    """Images: a part of the training set is held out. Text: the loss of training batches, which are new to the net throughout the first epoch."""
    searches = [line for key, line in reproduce.pending(claim, Recorded({}), 3) if key.startswith("search")]
    assert searches or claim["search"] is None
    for line in searches:
        if claim["script"] != "train_lm.py":
            assert SCRIPTS[claim["script"]].get_args(line.split()[1:]).holdout > 0
        else:
            args = train_lm.get_args(line.split()[1:])
            assert claims.METRICS["train_lm.py"]["search"] == "tail_loss"
            assert args.steps * args.batch_size * args.block_size < 0.85 * len(text.load_text(args.data, args.tokenizer).train), "more than an epoch"


@pytest.mark.parametrize("claim", (*claims.TABLES.values(), *claims.QUICK.values()), ids=[*claims.TABLES, *(f"quick {name}" for name in claims.QUICK)])
def test_every_cell_is_a_valid_command(claim):
    for cell in claim["cells"]:
        args = SCRIPTS[claim["script"]].get_args(reproduce.command(claim, cell, 1e-3, 0, claim["final"]).split()[1:])
        assert args.opt == cell["opt"] and args.shortcut in cell["name"]


@pytest.mark.parametrize("name", list(claims.TABLES))
def test_every_cell_has_a_run(name):
    claim, path = claims.TABLES[name], ROOT / "results" / f"{name}.json"
    if not path.exists():
        pytest.skip("not run yet")
    results = Recorded({})
    results.data = json.loads(path.read_text(encoding="utf-8"))
    table = reproduce.SHOW.get(name, reproduce.SHOW[claim["script"]])(claim, results, 3).strip()
    missing = [cell["name"] for cell in claim["cells"] if not any(line.startswith(f"| {cell['name']} |") for line in table.splitlines())]
    assert not missing, "a cell has no run yet"


def test_the_language_model_table_by_hand():
    """Two seeds of one cell, three blocks: two thirds of the depth is block 2; a cost is a loss less the same run's full-precision loss."""
    cell = dict(name="a", flags="", opt="soap", lrs=[1e-3])
    results = Recorded({})
    for seed, (loss, kurtosis) in enumerate([(2.0, [0, 1, 5]), (2.2, [0, 3, 4])]):
        losses = dict(float32=loss, W8A12=loss, W8A8=loss + 0.1, W8A6=loss + 0.2 * (seed + 1), W8A4=loss + 1)
        results.data["runs"][f"final | a | seed {seed}"] = dict(val_loss=[9.0, loss], isometry_drift=[0.25], quantized=dict(
            loss=losses, kurtosis=kurtosis, sqnr8_mean=30.0 + seed, sqnr8_min=20.0))
    row = reproduce.lm_table(dict(cells=[cell], script="train_lm.py"), results, 3).splitlines()[-1]
    assert row == "| a | 2.100 ± 0.141 | +0.000 ± 0.000 | +0.100 ± 0.000 | +0.300 ± 0.141 | +1.000 ± 0.000 | 2.00 ± 1.41 | 4.50 ± 0.71 | 30.5 ± 0.7 | 0.25 ± 0.00 | 2 | 0.001 |"
    results.data["runs"]["final | a | seed 2"] = dict(diverged="the loss is not finite")
    assert "| 2.100 ± 0.141, 1 diverged | +0.000" in reproduce.lm_table(dict(cells=[cell], script="train_lm.py"), results, 3)


def test_the_masked_autoencoders_table_by_hand():
    """Two seeds, an embedding and twelve blocks: the best layer is that of the mean over seeds, not the mean of each seed's best."""
    cell = dict(name="a", flags="", paper=76.5, opt="adamw", lrs=[1e-3])
    results = Recorded({})
    for seed, (peak, loss) in enumerate([(3, 0.5), (5, 0.7)]):
        curve = [20.0] * 13
        curve[peak], curve[4], curve[12] = 40.0, 35.0, 30.0 + seed
        layers = dict(knn=curve, linear=[v + 10 for v in curve], effective_rank=[2.0] * 12 + [1.0], norm=[2.0] * 12 + [5.0 + seed])
        results.data["runs"][f"final | a | seed {seed}"] = dict(val_loss=[1.0, loss], alpha_eff=[0.0035782], probed={"scenes": layers, "scenes-subgroups": layers})
    row = reproduce.probed_table(dict(cells=[cell], script="train_mae.py"), results, 3).splitlines()[-1]
    assert row == ("| a | 76.5 | 0.600 ± 0.141 | 35.0 ± 0.0 (4) | 30.5 ± 0.7 | 45.0 ± 0.0 (4) | 40.5 ± 0.7 | 35.0 ± 0.0 (4) | 1.00 ± 0.00 | 2.8 ± 0.4 | 0.0036 | 2 | 0.001 |")


def test_the_table_of_dense_features():
    """Best layers are those of the mean over seeds, k-NN counted from the embedding and the others from block 1; what is trivial has a row of its own."""
    cell, results = dict(CELL, name="a", paper="56.3 / -", lrs=[1e-3]), Recorded({})
    for seed in range(2):
        dense = dict(miou=[10.0, 30.0 + seed, 20.0], miou_multi=33.0 + seed, miou_background=11.7, corloc=[40.0, 20.0, 30.0 - 2 * seed], corloc_centre=38.5, corloc_whole=8.3)
        results.data["runs"][f"final | a | seed {seed}"] = dict(
            shared_information=[0.5, 1.0 + seed], feature_std=[0.9], token_cosine=[[0.1, 0.2, 0.3, 0.4]], probed={"emoji": dict(knn=[50.0 - 20 * seed, 20.0, 45.0, 10.0])}, dense=dense)
    lines = reproduce.dense_table(dict(cells=[cell], script="train_dino.py"), results, 3).splitlines()
    assert lines[2] == ("| a | 56.3 / - | 1.50 ± 0.71 | 0.90 ± 0.00 | 0.40 ± 0.00 | 45.0 ± 0.0 (2) | 10.0 ± 0.0 | 30.5 ± 0.7 (2) | 20.0 ± 0.0 | 33.5 ± 0.7 | 40.0 ± 0.0 (1) | 29.0 ± 1.4 | 2 | 0.001 |")
    assert lines[3].startswith("| all background / centre box / whole image |") and "| 11.7 |" in lines[3] and "| 38.5 / 8.3 |" in lines[3]
    assert {line.count("|") for line in lines} == {15}


def test_a_cell_takes_the_lr_of_its_own_claim():
    """Language models and DINO both have a cell "skipless, SOAP", with other lrs."""
    cells = {c["name"]: c for c in claims.TABLES["dino"]["cells"]}
    results, metric = Recorded({}), claims.METRICS["train_dino.py"]
    for lr, shared in ((3e-4, 0.7), (1e-3, 0.8), (3e-3, 0.5)):
        results.data["runs"][f"search | skipless, SOAP | lr {lr:g}"] = dict(shared_information=[shared])
    for name in ("skipless, auto init, SOAP", "skipless, 9 layers, SOAP"):
        assert reproduce.best_lr(cells[name], results, metric) == (1e-3, [])
    assert reproduce.best_lr(cells["residual, 9 layers, SOAP"], results, metric)[0] is None


def test_a_search_for_the_lowest_loss():
    cell, metric = dict(CELL, name="a"), claims.METRICS["train_lm.py"]
    results = Recorded({})
    for lr, loss in ((1e-3, 2.5), (3e-3, 2.2), (1e-2, None)):
        results.data["runs"][f"search | a | lr {lr:g}"] = dict(tail_loss=[loss]) if loss else dict(diverged="")
    assert reproduce.best_lr(cell, results, metric) == (3e-3, [])
    results.data["runs"]["search | a | lr 0.003"]["tail_loss"] = [2.6]
    assert reproduce.best_lr(cell, results, metric) == (None, [3e-4])


# ---------------------------------------------------------------------------------------------------------------------
# Claims and their verdicts.

ORDERS = [c for c in (*claims.CLAIMS, *claims.QUICK_CLAIMS) if isinstance(c.rule, claims.Order)]
REPRODUCES, PARTLY, NOT, UNKNOWN = claims.VERDICTS


def record(value):
    """A run whose every measure is this value."""
    layers = dict(knn=[value], linear=[value], effective_rank=[value], norm=[value])
    losses = dict(float32=0.0, **{f"W8A{b}": value for b in (12, 8, 6, 4)})
    trivial = dict(miou_background=value, corloc_centre=value, corloc_whole=value)
    return dict(val_top1=[value], val_loss=[value], tail_loss=[value], isometry_drift=[value], frechet_vit=[value], shared_information=[value], feature_std=[value], token_cosine=[[value]],
                effective_rank=[[value]], val_knn=[[value]], alpha_eff=[1.0], probed=dict.fromkeys(("scenes", "scenes-subgroups", "emoji", "mnist5k"), layers), hardware="by hand", date="today",
                quantized=dict(kurtosis=[0.0, value, value], sqnr8_mean=value, loss=losses), dense=dict(trivial, miou=[value], corloc=[value], miou_multi=value),
                four_bit={scales: dict(float32=0.0, W4A8=value, W4A4=value) for scales in ("tensor, tensor", "channel, token", "channel, token, gptq")})


def by_hand(table, values):
    """{cell: mean} as three runs each, .1 apart, so that one run's standard deviation is .1."""
    data = {}
    for cell, value in values.items():
        where, name = cell.split(" | ") if " | " in cell else (table, cell)
        for seed in range(3):
            data.setdefault(where, {})[f"final | {name} | seed {seed}"] = record(value + 0.1 * (seed - 1))
    return data


def heights(pairs):
    """Cells by rank, so that a stands above b in every pair (a, b)."""
    cells = {c for pair in pairs for c in pair}
    above = lambda c: max((1 + above(b) for a, b in pairs if a == c), default=0)
    return {c: above(c) for c in cells}


@pytest.mark.parametrize("claim", ORDERS, ids=lambda c: c.id)
def test_every_comparison_can_end_in_each_verdict(claim):
    rule, rank = claim.rule, heights(claim.rule.pairs)
    steps = {claims.greater: (10, 0.05, -10), claims.no_less: (-0.05, -0.15, -10), claims.same: (0, 0.15, 10), claims.slightly: (1, 0.05, -10)}[rule.test]      # std of a run: .1
    for step, expected in zip(steps, (REPRODUCES, PARTLY, NOT)):
        row = claims.judge(claim, by_hand(rule.table, {c: 20 + step * r for c, r in rank.items()}))
        assert (row["verdict"], row["seeds"], row["hardware"]) == (expected, 3, ["by hand"]), row["ours"]
    assert claims.judge(claim, {})["verdict"] == UNKNOWN


@pytest.mark.parametrize("claim", ORDERS, ids=lambda c: c.id)
def test_a_diverged_run_is_not_left_out(claim):
    """A comparison that holds by far holds no longer when one of its runs diverged, and the row says so."""
    rule, rank = claim.rule, heights(claim.rule.pairs)
    step = {claims.greater: 10, claims.no_less: 10, claims.same: 0, claims.slightly: 1}[rule.test]
    data = by_hand(rule.table, {c: 20 + step * r for c, r in rank.items()})
    assert claims.judge(claim, data)["verdict"] == REPRODUCES
    for table, runs in data.items():
        for key in runs:
            row = claims.judge(claim, {**data, table: {**runs, key: dict(diverged="the loss is not finite", hardware="by hand", date="today")}})
            assert row["verdict"] != REPRODUCES and "1 diverged" in row["ours"], key


def test_figures_of_records_with_diverged_runs(tmp_path):
    """One seed of every cell, then all of them: a picture without it, or none."""
    data = reproduce.recorded(ROOT / "results")
    for name, draw in (("table1", figures.paper1), ("lm", figures.paper2), ("mae", figures.paper3)):
        one = {key: dict(diverged="") if key.endswith("seed 1") else r for key, r in data[name].items()}
        draw(claims.Evidence({**data, name: one}), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        with pytest.raises(claims.NotMeasured, match="diverged"):
            draw(claims.Evidence({**data, name: dict.fromkeys(data[name], dict(diverged=""))}), tmp_path / "none.png")


def test_one_seed_proves_nothing():
    """Neither a difference nor its absence; and where more is said, the wrong sign is still the wrong sign."""
    a, b = [5.0], [1.0, 1.1, 1.2]
    assert claims.greater(a, b) == 1 and claims.greater(b, a) == 0
    assert claims.no_less(a, b) == 1 and claims.no_less(b, a) == 1
    assert claims.same(a, b) == 1
    assert claims.verdict([2, 1]) == PARTLY and claims.verdict([2, 0, 0]) == NOT and claims.verdict([2, 2]) == REPRODUCES


def test_slightly_is_not_by_much():
    a, b = [1.95, 2.0, 2.05], [1.8, 1.81, 1.82]
    assert claims.slightly(a, b) == 2 and claims.slightly(b, a) == 0 and claims.slightly(a, [1.95, 1.98, 2.0]) == 1
    assert claims.slightly(a, [1.7, 1.7, 1.7]) == 0                     # greater by 15 %
    assert claims.greater(a, [1.7, 1.7, 1.7]) == 2


def test_rules_of_two_parts_need_both():
    """Both factors scaled: ahead of plain, and no worse than decay. The schedule: ahead of plain, and as good as the linear one."""
    plain, fixed, both, cosine = "residual, long skips", "decayed to .6", "residual, both branches x sqrt(.5)", "decayed to .6, cosine schedule"
    for name, cell in (("p3-both", both), ("p3-schedule", cosine)):
        assert verdict_of(name, by_hand("mae", {plain: 20, fixed: 30, cell: 30}))[0] == REPRODUCES
        assert verdict_of(name, by_hand("mae", {plain: 20, fixed: 30, cell: 20.3}))[0] == PARTLY            # ahead of plain, far behind decay
        assert verdict_of(name, by_hand("mae", {plain: 20, fixed: 30, cell: 10}))[0] == NOT
    assert verdict_of("p3-schedule", by_hand("mae", {plain: 20, fixed: 60, cosine: 30}))[0] == PARTLY


def test_the_rule_of_growing_tails():
    """`record` has kurtosis 0 in the first block and the value in the last."""
    nets = [f"{net}, {o}" for net in ("residual", "skipless") for o in claims.SPECTRAL]
    grown = dict(zip(nets, (9, 9, 9, .2, .2, .2)))
    assert verdict_of("p2-kurtosis-depth", by_hand("lm", grown))[0] == REPRODUCES
    assert verdict_of("p2-kurtosis-depth", by_hand("lm", grown | {nets[4]: 2}))[0] == PARTLY               # less than with residuals, but it grows
    assert verdict_of("p2-kurtosis-depth", by_hand("lm", dict.fromkeys(nets, 9)))[0] == NOT


def test_decayed_language_models_are_judged_where_they_learned():
    """At the better of the two lrs; a net at the entropy of single bytes has no tails to compare."""
    def data(**losses):
        found = by_hand("lm-beyond", {f"decayed to alpha_eff {a}, lr {lr}, SOAP": 7.0 for a in ("0.05", "0.005") for lr in ("0.01", "0.003")})
        for key, r in found["lm-beyond"].items():
            r["val_loss"] = [losses["fast" if "lr 0.01" in key else "slow"]]
            r["quantized"]["kurtosis"] = [0.0, 30.0 if "lr 0.01" in key else 0.5, 0.0]
        return found | by_hand("lm", {"residual, SOAP": 8.0, "skipless, SOAP": 2.4})
    assert verdict_of("b-decayed-tails", data(fast=3.05, slow=2.1))[0] == REPRODUCES
    assert verdict_of("b-decayed-tails", data(fast=2.1, slow=3.05))[0] == NOT
    assert verdict_of("b-decayed-tails", data(fast=3.06, slow=3.05)) [0] == NOT and "nothing learned" in verdict_of("b-decayed-tails", data(fast=3.06, slow=3.05))[1]
    assert verdict_of("b-decayed-loss", data(fast=2.3, slow=2.1))[0] == REPRODUCES and verdict_of("b-decayed-loss", data(fast=2.6, slow=2.5))[0] == NOT


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"runs": 3}', '{"runs": []}'])
def test_a_damaged_record_is_named(tmp_path, content, capsys):
    (tmp_path / "table1.json").write_text(content, encoding="utf-8")
    with pytest.raises(runtime.BadInput, match="table1.json is damaged: .* delete it"):
        reproduce.main(["table1", "--list", "--results", str(tmp_path)])


def test_results_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(runtime.BadInput, match="--results .*file cannot be made a folder to write in"):
        reproduce.main(["table1", "--results", str(tmp_path / "file")])


def test_two_processes_add_to_one_record(tmp_path):
    one, two = reproduce.Results(tmp_path / "a.json"), reproduce.Results(tmp_path / "a.json")
    one.put("A", dict(val_top1=[1.0]))
    two.put("B", dict(val_top1=[2.0]))
    assert set(json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["runs"]) == {"A", "B"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_terminated_reproduction_takes_its_runs_along(tmp_path):
    """They would go on for minutes, and nobody would read what they find."""
    code = (f"import sys, threading, signal; sys.path.insert(0, {str(ROOT)!r}); from tools import reproduce; signal.signal(signal.SIGTERM, reproduce.end_children)\n"
            "threading.Thread(target=reproduce.python, args=('-c import(time).sleep(60)', 'x')).start()\n")
    code = code.replace("'-c import(time).sleep(60)'", f"{str(tmp_path / 'sleep.py')!r}") + "import time; time.sleep(60)\n"
    (tmp_path / "sleep.py").write_text(f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(60)", encoding="utf-8")
    parent = subprocess.Popen([sys.executable, "-c", code])
    for _ in range(600):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(encoding="utf-8"):
            break
        time.sleep(0.1)
    parent.terminate()
    assert parent.wait(30) == 128 + 15
    child = int((tmp_path / "pid").read_text(encoding="utf-8"))
    for _ in range(100):
        if not alive(child):
            break
        time.sleep(0.1)
    assert not alive(child)


def alive(pid):
    """A killed child whose parent is gone may wait for its burial: that is not life."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z" if Path("/proc").exists() else os.kill(pid, 0) is None
    except (FileNotFoundError, ProcessLookupError):
        return False


def verdict_of(name, data):
    row = claims.judge(next(c for c in claims.CLAIMS if c.id == name), data)
    return row["verdict"], row["ours"]


def test_the_rule_of_the_constants():
    names = [c["name"] for c in claims.TABLES["constants"]["cells"]]
    for drop, expected in ((0.05, REPRODUCES), (3, PARTLY), (6, NOT)):
        verdict, ours = verdict_of("p1-constants", by_hand("constants", {n: 80.0 - drop * (i == 4) for i, n in enumerate(names)}))
        assert verdict == expected
    assert ours == "top-1 %: skipless, (1, 2, 3), SOAP 80.0 ± 0.1, worst of 6 changes skipless, (1, 4, 3), SOAP 74.0 ± 0.1"


def test_the_rules_of_training_at_all():
    spectral = {f"skipless, {o}": 2.0 for o in claims.SPECTRAL}
    for adamw, expected in ((3.05, REPRODUCES), (2.3, PARTLY), (2.05, NOT)):
        assert verdict_of("p2-coupling", by_hand("lm", spectral | {"skipless, AdamW": adamw}))[0] == expected
    assert verdict_of("p2-coupling", by_hand("lm", dict.fromkeys((*spectral, "skipless, AdamW"), 3.05)))[0] == NOT          # none of them trains
    for loss, expected in ((2.0, REPRODUCES), (3.0, PARTLY), (3.2, NOT)):                 # 2.9, 3.0, 3.1: one run of three is below 3
        assert verdict_of("p2-constants", by_hand("lm", {"skipless, the paper's constants, KL-Shampoo": loss}))[0] == expected


def test_the_rules_of_conditioning():
    def rows(default, vo, qk, both, auto, plus, b=1.0):
        block = lambda k: [dict(kappa_K=k, kappa_B=b, kappa_K_plus_I=plus)]
        return dict(init=dict(args=dict(seeds=3), rows={"default": block(default), "VO only": block(vo), "QK only": block(qk), "both": block(both), "auto": block(auto)}))
    good, half, bad = rows(1e8, 1e6, 1e5, 5, 5, 1.1), rows(1e3, 1e3, 5, 50, 5, 100), rows(10, 10, 10, 20, 30, 11)
    for name in ("p1-skip-conditions", "p1-init-conditions", "p1-proposition-2"):
        assert [verdict_of(name, data)[0] for data in (good, half, bad)] == [REPRODUCES, PARTLY, NOT], name
        assert verdict_of(name, {})[0] == UNKNOWN


def test_the_rule_of_a_trend():
    """Effective rank against log alpha_eff: 15 runs, so that .52 is the margin; .3 of noise leaves the sign, and nothing else."""
    def runs(rank):
        data = {}
        for i, cell in enumerate(claims.ALPHAS):
            for seed in range(3):
                data[f"final | {cell} | seed {seed}"] = dict(alpha_eff=[10.0 ** -i], probed=dict(scenes=dict(effective_rank=[rank(i, seed)])))
        return dict(mae=data)
    assert verdict_of("p3-rank", runs(lambda i, s: 5 - i + 0.1 * s)) == (REPRODUCES, "correlation of log10 alpha_eff and effective rank, last layer +1.00 over 15 runs")
    verdict, ours = verdict_of("p3-rank", runs(lambda i, s: 5 - 0.2 * i + s))
    assert verdict == PARTLY and "+0.33" in ours                         # covariance .4, variances 2 and .08 + 2/3
    assert verdict_of("p3-rank", runs(lambda i, s: i + 0.1 * s))[0] == NOT
    early = runs(lambda i, s: 0)["mae"]
    for (key, r), (i, s) in zip(early.items(), [(i, s) for i in range(5) for s in range(3)]):
        r.update(effective_rank=[[9.0, 5.0 - i], [9.0, 0.0]], val_knn=[[90.0, 90.0], [20.0 + i, 10.0]])        # the first epoch's rank, the last one's k-NN
    assert verdict_of("p3-early-rank", {"early-rank": early})[0] == REPRODUCES


@pytest.mark.parametrize("claim", (*claims.CLAIMS, *claims.QUICK_CLAIMS), ids=lambda c: c.id)
def test_every_claim_names_what_exists(claim, monkeypatch, tmp_path):
    table = claim.table or claim.rule.table
    if table != "init":
        names = {c["name"] for c in claims.TABLES[table]["cells"]}
        cells = [c for pair in claim.rule.pairs for c in pair] if isinstance(claim.rule, claims.Order) else getattr(claim.rule, "cells", ())
        for cell in cells:
            where, _, name = cell.rpartition(" | ")
            assert name in ({c["name"] for c in claims.TABLES[where]["cells"]} if where else names)
    assert claim.paper in ("1", "2", "3", "beyond") and "|" not in claim.says
    words = claims.judge(claim, {})["command"].split()[1:]
    script, *flags = words[1:] if words[0] == "-m" else words
    if script == "evals.conditioning":
        conditioning.get_args(flags)
    else:
        {"tools.reproduce": reproduce, "probe.py": probe}[script].get_args(flags)


def test_claims_have_names_of_their_own():
    names = [c.id for c in (*claims.CLAIMS, *claims.QUICK_CLAIMS)]
    assert len(set(names)) == len(names)
    assert {c.paper for c in claims.CLAIMS} == {"1", "2", "3", "beyond"}


def test_the_verdicts_on_disk_follow_from_the_recorded_runs():
    data = reproduce.recorded(ROOT / "results")
    assert json.loads((ROOT / "results" / "claims.json").read_text(encoding="utf-8")) == [claims.judge(c, data) for c in claims.CLAIMS], "python -m tools.reproduce claims"


@pytest.mark.parametrize("name", list(claims.TABLES))
def test_recorded_runs_are_those_declared(name):
    """Every record is of a cell, and of the command that is declared for it today; and no run costs more than its share (twice as long where cores are shared)."""
    claim, results = claims.TABLES[name], reproduce.Results(ROOT / "results" / f"{name}.json")
    declared = {}
    for cell in claim["cells"]:
        lr, _ = reproduce.best_lr(cell, results, claims.METRICS[claim["script"]])
        declared |= {reproduce.final_key(cell, seed): reproduce.command(claim, cell, lr, seed, claim["final"]) for seed in range(10) if lr is not None}
        tried = [float(key.split()[-1]) for key in results.data["runs"] if key.startswith(f"search | {cell['name']} | lr ")]
        declared |= {reproduce.search_key(cell, lr): reproduce.command(claim, cell, lr, 1000, claim["search"]) for lr in tried}
    assert {key: record["command"] for key, record in results.data["runs"].items()} == {key: f"python {declared.get(key)}" for key in results.data["runs"]}
    seconds = [r["seconds"] for r in results.data["runs"].values() if "seconds" in r]
    assert claim["minutes"] <= 5 and (not seconds or statistics.median(seconds) < 600)


def test_only_what_can_be_run(tmp_path, capsys):
    """A cell whose lr is another's waits for that one's search; a table without the text is left out, unless all are."""
    flags = ["--list", "--results", str(tmp_path)]
    with pytest.raises(BadInput, match="--only 'attention only': .* takes over the lr of decayed to .6, which is not yet searched"):
        reproduce.main(["mae", "--only", "attention only", *flags])
    with pytest.raises(BadInput, match="--only 'none such' names no cell: residual, "):
        reproduce.main(["table1", "lm", "--only", "none such", *flags])
    reproduce.main(["table1", "lm", "--only", "residual, SOAP", *flags])
    assert "# lm: 6 runs" in (said := capsys.readouterr().out) and "table1" not in said                    # 3 searches, 3 seeds
    reproduce.main(["mae", "--only", "its own lr", *flags])
    assert capsys.readouterr().out.count("holdout=0.2") == 3 + 4


def test_tables_show_all_seeds_whatever_is_asked_for(tmp_path, capsys, monkeypatch):
    """As verdicts do: asking for fewer runs nothing and hides nothing."""
    monkeypatch.setattr(reproduce, "run", made_up([]))
    for seeds in ("2", "1"):
        reproduce.main(["constants", "--seeds", seeds, "--jobs", "1", "--results", str(tmp_path)])
        assert (tmp_path / "constants.md").read_text(encoding="utf-8").count("| 2 | 0.001 |") == 7
    assert next(r["seeds"] for r in json.loads((tmp_path / "claims.json").read_text(encoding="utf-8")) if r["id"] == "p1-constants") == 2


@pytest.mark.parametrize("name", ["init.json", "pixels.json"])
def test_other_records_that_are_damaged_are_named(name, tmp_path):
    for content in ("", "{}", "[]", "3"):
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(BadInput, match=f"{name} is damaged: .* delete it"):
            reproduce.main(["claims", "--results", str(tmp_path)])


def test_short_runs_never_replace_full_ones(tmp_path, monkeypatch):
    """Both would bear the same names in one folder."""
    monkeypatch.chdir(ROOT)
    for folder in ("results", str(ROOT / "results")):
        with pytest.raises(BadInput, match="--results .*results holds full runs.* give another folder"):
            reproduce.main(["--results", folder])
    with pytest.raises(BadInput, match="--results is empty"):
        reproduce.main(["claims", "--results", ""])
    assert reproduce.get_args(["table1", "--results", "results"]).folder == reproduce.ROOT / "results"          # README's tables follow, however one writes it
    assert reproduce.get_args(["--results", str(tmp_path)]).seeds == 1 and reproduce.get_args(["--seeds", "2"]).seeds == 2 and reproduce.get_args(["lm"]).seeds == 3


def test_quick_mode_is_a_fixed_list(tmp_path, capsys):
    reproduce.main(["--list", "--results", str(tmp_path), "--jobs", "2"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("python")]
    assert lines == [
        "python train_vit.py --shortcut residual --init default --opt adamw --lr 0.003 --seed 0 --epochs 5",
        "python train_vit.py --shortcut skipless --init default --opt adamw --lr 3e-05 --seed 0 --epochs 5",
        "python train_vit.py --shortcut skipless --init paper --opt adamw --lr 0.0003 --seed 0 --epochs 5",
        "python train_vit.py --shortcut skipless --init paper --opt soap --lr 0.001 --seed 0 --epochs 5",
        "python train_lm.py --shortcut residual --init default --opt soap --lr 0.01 --seed 0 --steps 200 --eval-every 200 --set sample_tokens=0",
        "python train_lm.py --shortcut skipless --init auto --opt soap --lr 0.003 --seed 0 --steps 200 --eval-every 200 --set sample_tokens=0",
        "python train_mae.py --shortcut residual --opt adamw --lr 0.0015 --seed 0 --epochs 4 --set knn_every=0 --eval-every 1000000",
        "python train_mae.py --alpha-min 0.6 --opt adamw --lr 0.0015 --seed 0 --epochs 4 --set knn_every=0 --eval-every 1000000"]
    assert not list(tmp_path.iterdir())
    assert sum(60 * t["minutes"] * len(t["cells"]) for t in claims.QUICK.values()) / 2 < 30 * 60


def made_up(calls, fail_at=None):
    """In the place of reproduce.run: keeps what it was asked for; stops the reproduction at one of the calls."""
    def run(line, after=None):
        if len(calls) == fail_at:
            raise KeyboardInterrupt
        calls.append(line)
        return dict(record(50.0 + len(calls)), val_top1=[10.0, 50.0 + len(calls)], command=f"python {line}", date="today", hardware="made up", seconds=60)
    return run


def test_a_killed_run_continues(tmp_path, monkeypatch, capsys):
    first, second = [], []
    flags = ["constants", "--seeds", "1", "--jobs", "1", "--results", str(tmp_path)]
    monkeypatch.setattr(reproduce, "run", made_up(first, fail_at=3))
    with pytest.raises(KeyboardInterrupt):
        reproduce.main(flags)
    assert len(first) == 3 and len(json.loads((tmp_path / "constants.json").read_text(encoding="utf-8"))["runs"]) == 3
    monkeypatch.setattr(reproduce, "run", made_up(second))
    reproduce.main([*flags, "--list"])
    assert "# constants: 4 runs, about 4 minutes" in capsys.readouterr().out                  # by the minute that the three took
    reproduce.main(flags)
    assert len(second) == 4 and not set(first) & set(second)
    reproduce.main([*flags, "--list"])
    assert "# constants: nothing remains" in capsys.readouterr().out
    rows = {r["id"]: r for r in json.loads((tmp_path / "claims.json").read_text(encoding="utf-8"))}
    assert rows["p1-constants"]["seeds"] == 1 and rows["p1-constants"]["hardware"] == ["made up"] and rows["p1-beats-soap"]["verdict"] == UNKNOWN
    assert "p1-constants" not in (tmp_path / "claims.md").read_text(encoding="utf-8") and rows["p1-constants"]["ours"] in (tmp_path / "claims.md").read_text(encoding="utf-8")


def test_quick_mode_ends_with_its_runs_beside_the_recorded_ones(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(reproduce, "run", made_up(calls))
    reproduce.main(["--results", str(tmp_path), "--jobs", "1"])
    assert len(calls) == 8
    rows = (tmp_path / "quick.md").read_text(encoding="utf-8").splitlines()[2:]
    assert len(rows) == len(claims.QUICK_CLAIMS) and rows[0].startswith("| 1 |")
    assert "skipless paper init SOAP 54.0" in rows[0] and "| as said |" in rows[0]            # the fourth run is the best of the four
    assert "residual SOAP 55.00, skipless SOAP 56.00" in rows[1] and "| otherwise |" in rows[1]
    full = reproduce.recorded(ROOT / "results")
    assert claims.judge(claims.QUICK_CLAIMS[0], full)["ours"] in rows[0]
    reproduce.main(["--results", str(tmp_path), "--jobs", "1"])
    assert len(calls) == 8


@pytest.mark.parametrize("name", list(claims.TABLES))
def test_every_table_shows_all_its_cells(name, tmp_path, capsys):
    """From one made-up run of each, of 2 in everything; with a figure, where the table has one."""
    claim, results = claims.TABLES[name], Recorded({})
    cells = [dict(c, lrs=[c["lrs"][0]] if isinstance(c["lrs"], list) else [1e-3]) for c in claim["cells"]]
    for cell in cells:
        results.data["runs"][reproduce.final_key(cell, 0)] = record(2.0)
    reproduce.present(name, dict(claim, cells=cells), results, tmp_path)
    rows = [line for line in (tmp_path / f"{name}.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert [r.split(" | ")[0] for r in rows[2:2 + len(cells)]] == [f"| {c['name']}" for c in cells]
    assert all(re.search(r"[+ ]2\.0", r) and " ± " not in r for r in rows[2:2 + len(cells)]) and len({r.count("|") for r in rows}) == 1
    assert (tmp_path / f"{name}.png").exists() == (name not in ("early-rank", "four-bit"))


def test_names_and_seeds(tmp_path):
    assert list(reproduce.get_args(["all"]).tables) == list(claims.TABLES) and reproduce.get_args(["all"]).seeds == 3
    assert list(reproduce.get_args(["lm", "mae", "--seeds", "1"]).tables) == ["lm", "mae"]
    assert reproduce.get_args([]).folder != reproduce.get_args(["lm"]).folder
    with pytest.raises(BadInput, match="^there is no table 'table2': give some of table1, "):
        reproduce.get_args(["table2"])
    with pytest.raises(BadInput, match="^--only 'nobody' names no cell: skipless"):
        reproduce.main(["constants", "--only", "nobody", "--results", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


def contrast(first, second):
    """WCAG's ratio of luminances of two colours #rrggbb: 1 the same, 21 black and white; 3 is asked of graphics and large text."""
    def luminance(color):
        parts = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(w * (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4) for w, c in zip((0.2126, 0.7152, 0.0722), parts))
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", (1, 2, 3))
def test_a_papers_figure_is_legible_on_white_and_on_black(paper, tmp_path):
    matplotlib = pytest.importorskip("matplotlib.image")
    for color in (figures.GREY, figures.BLUE, figures.ORANGE, figures.GREEN, figures.PINK, figures.VIOLET):
        assert min(contrast(color, "#ffffff"), contrast(color, "#0d1117")) > 3
    getattr(figures, f"paper{paper}")(claims.Evidence(reproduce.recorded(ROOT / "results")), tmp_path / "p.png")
    pixels = matplotlib.imread(tmp_path / "p.png")
    solid = pixels[pixels[..., 3] > 0.9][:, :3]
    assert pixels.shape[2] == 4 and (pixels[..., 3] == 0).mean() > 0.5                          # the page shows through
    assert not ((solid < 0.15).all(axis=1) | (solid > 0.9).all(axis=1)).any()                   # nothing black, nothing white
