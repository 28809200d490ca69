"""The table is a function of the recorded runs alone, and the README shows exactly that table and commands that exist."""
import json
import re
from pathlib import Path

import pytest

import probe
import reproduce
import text
import train_dino
import train_lm
import train_mae
import train_sit
import train_vit
from runtime import BadInput

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
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
    claim = dict(reproduce.CLAIMS["table1"], cells=[CELL])
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
    assert "| 93.5 ± 0.7, 1 diverged | 3 |" in reproduce.table(dict(cells=[CELL]), results, 3)
    assert "| 93.0 | 1 |" in reproduce.table(dict(cells=[CELL]), results, 1)


@pytest.mark.parametrize("claim", reproduce.CLAIMS.values(), ids=list(reproduce.CLAIMS))
def test_searches_never_look_at_what_the_table_shows(claim):
    """Images: a part of the training set is held out. Text: the loss of training batches, which are new to the net throughout the first epoch."""
    searches = [line for key, line in reproduce.pending(claim, Recorded({}), 3) if key.startswith("search")]
    assert searches or claim["search"] is None
    for line in searches:
        if claim["script"] != "train_lm.py":
            assert SCRIPTS[claim["script"]].get_args(line.split()[1:]).holdout > 0
        else:
            args = train_lm.get_args(line.split()[1:])
            assert reproduce.METRICS["train_lm.py"]["search"] == "tail_loss"
            assert args.steps * args.batch_size * args.block_size < 0.85 * len(text.load_text(args.data, args.tokenizer).train), "more than an epoch"


@pytest.mark.parametrize("claim", reproduce.CLAIMS.values(), ids=list(reproduce.CLAIMS))
def test_every_cell_is_a_valid_command(claim):
    for cell in claim["cells"]:
        args = SCRIPTS[claim["script"]].get_args(reproduce.command(claim, cell, 1e-3, 0, claim["final"]).split()[1:])
        assert args.opt == cell["opt"] and args.shortcut in cell["name"]


@pytest.mark.parametrize("name", list(reproduce.CLAIMS))
def test_the_readme_shows_the_recorded_table(name):
    claim, path = reproduce.CLAIMS[name], ROOT / "results" / f"{name}.json"
    results = Recorded({})
    results.data = json.loads(path.read_text())
    table = reproduce.TABLES[claim["script"]](claim, results, 3).strip()
    shown = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", README, re.S).group(1).strip()
    assert shown == table
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
    row = reproduce.lm_table(dict(cells=[cell]), results, 3).splitlines()[-1]
    assert row == "| a | 2.100 ± 0.141 | +0.000 ± 0.000 | +0.100 ± 0.000 | +0.300 ± 0.141 | +1.000 ± 0.000 | 2.00 ± 1.41 | 4.50 ± 0.71 | 30.5 ± 0.7 | 0.25 ± 0.00 | 2 | 0.001 |"
    results.data["runs"]["final | a | seed 2"] = dict(diverged="the loss is not finite")
    assert "| 2.100 ± 0.141, 1 diverged | +0.000" in reproduce.lm_table(dict(cells=[cell]), results, 3)


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
    cells = {c["name"]: c for c in reproduce.CLAIMS["dino"]["cells"]}
    results, metric = Recorded({}), reproduce.METRICS["train_dino.py"]
    for lr, shared in ((3e-4, 0.7), (1e-3, 0.8), (3e-3, 0.5)):
        results.data["runs"][f"search | skipless, SOAP | lr {lr:g}"] = dict(shared_information=[shared])
    for name in ("skipless, auto init, SOAP", "skipless, 9 layers, SOAP"):
        assert reproduce.best_lr(cells[name], results, metric) == (1e-3, [])
    assert reproduce.best_lr(cells["residual, 9 layers, SOAP"], results, metric)[0] is None


def test_a_search_for_the_lowest_loss():
    cell, metric = dict(CELL, name="a"), reproduce.METRICS["train_lm.py"]
    results = Recorded({})
    for lr, loss in ((1e-3, 2.5), (3e-3, 2.2), (1e-2, None)):
        results.data["runs"][f"search | a | lr {lr:g}"] = dict(tail_loss=[loss]) if loss else dict(diverged="")
    assert reproduce.best_lr(cell, results, metric) == (3e-3, [])
    results.data["runs"]["search | a | lr 0.003"]["tail_loss"] = [2.6]
    assert reproduce.best_lr(cell, results, metric) == (None, [3e-4])


def train_commands():
    """(script, flags) of every training command in README's code blocks."""
    lines = re.findall(r"(train_\w+\.py)([^\n#`]*)", "\n".join(re.findall(r"```\n(.*?)```", README, re.S)))
    return [(script, line.split()) for script, line in lines]


def test_the_readmes_commands_parse():
    commands = train_commands()
    assert len(commands) >= 8
    for script, flags in commands:
        if "--finetune" in flags:                                # whose checkpoint is not here: all that was parsed before is right
            with pytest.raises(BadInput, match="^--finetune out/mae-base-.* is not a file"):
                SCRIPTS[script].get_args(flags)
        elif "--help" not in flags:
            SCRIPTS[script].get_args(flags)


def test_the_readmes_probes_parse():
    commands = re.findall(r"probe\.py([^\n#`]*)", "\n".join(re.findall(r"```\n(.*?)```", README, re.S)))
    assert {"layers", "seg", "tokencut", "pca", "cluster"} <= {line.split()[0] for line in commands}
    for line in commands:
        probe.get_args(line.split())


@pytest.mark.parametrize("script, flags", [c for c in train_commands() if "--preset" not in c[1]], ids=lambda c: c if isinstance(c, str) else " ".join(c))
def test_the_readmes_training_commands_run(script, flags, tmp_path, capsys):
    short = {"train_vit.py": ["--epochs", "0.05"], "train_lm.py": ["--steps", "2", "--eval-tokens", "2048", "--sample-tokens", "5"],
             "train_mae.py": ["--epochs", "0.03", "--knn-images", "64", "--holdout", "0.05"], "train_sit.py": ["--steps", "2", "--samples", "4", "--sample-steps", "2"],
             "train_dino.py": ["--epochs", "0.03", "--knn-images", "64", "--holdout", "0.05"]}[script]
    SCRIPTS[script].main([*flags, *short, "--warmup", "0", "--out", str(tmp_path), "--threads", "1"])
    last = {"train_vit.py": r"^val top-1 \d+\.\d %$", "train_dino.py": r"^val k-NN \d+\.\d %$"}
    assert re.search(last.get(script, r"^val loss \d+\.\d{4}$"), capsys.readouterr().out.splitlines()[-1])
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_readmes_two_commands_stand_alone():
    """Each on one line, with its own set-up; .ci/run calls the second as printed."""
    setup = "python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt && .venv/bin/python "
    assert f"```\n{setup}train_vit.py --skipless --opt soap\n```" in README
    assert f"```\n{setup}-m pytest -q\n```" in README
