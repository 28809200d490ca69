"""The table is a function of the recorded runs alone, and the README shows exactly that table and commands that exist."""
import json
import re
from pathlib import Path

import pytest

import reproduce
import train_vit

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


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
def test_searches_never_touch_the_test_set(claim):
    for _, line in reproduce.pending(claim, Recorded({}), 3):
        assert claim["search"] is None or train_vit.get_args(line.split()[1:]).holdout > 0


@pytest.mark.parametrize("claim", reproduce.CLAIMS.values(), ids=list(reproduce.CLAIMS))
def test_every_cell_is_a_valid_command(claim):
    for cell in claim["cells"]:
        args = train_vit.get_args(reproduce.command(claim, cell, 1e-3, 0, claim["final"]).split()[1:])
        assert args.opt == cell["opt"] and args.shortcut in cell["name"]


@pytest.mark.parametrize("name", list(reproduce.CLAIMS))
def test_the_readme_shows_the_recorded_table(name):
    claim, path = reproduce.CLAIMS[name], ROOT / "results" / f"{name}.json"
    results = Recorded({})
    results.data = json.loads(path.read_text())
    table = reproduce.table(claim, results, 3).strip()
    shown = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", README, re.S).group(1).strip()
    assert shown == table
    assert len(table.splitlines()) == 2 + len(claim["cells"]), "a cell has no run yet"


def train_commands():
    lines = re.findall(r"train_vit\.py([^\n#`]*)", "\n".join(re.findall(r"```\n(.*?)```", README, re.S)))
    return [line.split() for line in lines]


def test_the_readmes_commands_parse():
    commands = train_commands()
    assert len(commands) >= 5
    for flags in commands:
        if "--help" not in flags:
            train_vit.get_args(flags)


@pytest.mark.parametrize("flags", [f for f in train_commands() if "--preset" not in f], ids=" ".join)
def test_the_readmes_training_commands_run(flags, tmp_path, capsys):
    train_vit.main([*flags, "--epochs", "0.05", "--warmup", "0", "--out", str(tmp_path), "--threads", "1"])
    assert re.search(r"^val top-1 \d+\.\d %$", capsys.readouterr().out.splitlines()[-1])
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_readmes_two_commands_stand_alone():
    """Each on one line, with its own set-up; .ci/run calls the second as printed."""
    setup = "python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt && .venv/bin/python "
    assert f"```\n{setup}train_vit.py --skipless --opt soap\n```" in README
    assert f"```\n{setup}-m pytest -q\n```" in README
