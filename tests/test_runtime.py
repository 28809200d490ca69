"""runtime.py: flags, schedule, batches, checkpoint, log, devices; each against a value known by hand."""
import argparse
import ast
import importlib
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import runtime
from runtime import BadInput

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in ROOT.glob("train_*.py"))
WORLD = runtime.World(0, 1, torch.device("cpu"), "test")


# -------------------------------------------------------------------------------------------------------
# processes, for this file and those of the train scripts

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def run_script(*flags, script="train_vit.py", env=None, nproc=1, timeout=120, limit=""):
    """A train script as a person runs it, from the root; with nproc > 1 under torchrun.

    limit: of the shell, such as "ulimit -f 500". Returns exit code, stdout and stderr."""
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={nproc}", "--master-port",
                free_port()]
    words = [sys.executable, *(launcher if nproc > 1 else []), script, *map(str, flags)]
    if limit:
        words = ["sh", "-c", f'{limit}; exec "$@"', "sh", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(words, cwd=ROOT, env=env, timeout=timeout, capture_output=True,
                          encoding="utf-8")


def _server():
    """Processes forked from one that has imported torch and the scripts: a start costs .1 s, not 5."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*SCRIPTS, "matplotlib.pyplot"])
    return context


SERVER = _server()


def _enter(function, arguments, output, env):
    os.environ.update(env)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    function(*arguments)


def launch(function, *arguments, output, env=None):
    """Start function(*arguments) in a process of its own; `output` gets its stdout and stderr."""
    process = SERVER.Process(target=_enter, args=(function, arguments, str(output), env or {}))
    process.start()
    return process


def start_ranks(n, function, *arguments, folder):
    """function(*arguments) in n processes with torchrun's variables: [process], [output file]."""
    port = free_port()
    env = {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": port}
    outputs = [Path(folder) / f"output-{port}-{rank}.txt" for rank in range(n)]
    processes = [launch(function, *arguments, output=output,
                        env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                 for rank, output in enumerate(outputs)]
    return processes, outputs


def join_ranks(processes, outputs, timeout=90):
    """Wait; like torchrun, end all when one fails. Returns ([exit code of each], [output of each]).

    The exit code of a process ended from here is negative."""
    end, grace = time.monotonic() + timeout, 10.0           # what the others get to fail by themselves
    while any(p.is_alive() for p in processes) and time.monotonic() < end:
        if any(p.exitcode for p in processes):
            end = min(end, time.monotonic() + grace)
            grace = math.inf
        time.sleep(0.02)
    for p in processes:
        if p.is_alive():
            p.kill()
        p.join()
    texts = [o.read_text(encoding="utf-8") if o.exists() else "" for o in outputs]
    return [p.exitcode for p in processes], texts


def launch_ranks(n, function, *arguments, folder, timeout=90):
    """`start_ranks` and `join_ranks`."""
    return join_ranks(*start_ranks(n, function, *arguments, folder=folder), timeout=timeout)


# -------------------------------------------------------------------------------------------------------
# flags

PRESETS = {"laptop": dict(betas={"soap": (0.9, 0.95)}, epochs=10, size="nano", patch_size=7,
                          pool="token", crops=(2, 8), lr={"residual": {"adamw": 3e-3}}),
           "paper": dict(size="base", epochs=300, patch_size=16, data=None)}


def read(*argv):
    """(args, given) of a made-up script."""
    parser, preset = runtime.train_parser("What it does.", PRESETS, list(argv))
    parser.add_argument("--size", choices=["nano", "base"])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--finetune")
    runtime.add_shortcut_flags(parser.add_argument, ["residual", "skipless", "decayed"])
    runtime.add_optimizer_flags(parser, ["adamw", "soap", "kl-shampoo", "lion"])
    runtime.add_run_flags(parser)
    return runtime.read_flags(parser, preset, list(argv), "vit", lead=("size", "shortcut", "opt"))


def test_flags_win_over_set_and_set_over_the_preset():
    args, given = read("--set", "epochs=3", "patch_size=14", "stagger=true", "--set", "crops=1,2",
                       "--epochs", "5", "--opt", "soap")
    assert (args.epochs, args.patch_size, args.stagger, args.crops) == (5, 14, True, [1, 2])
    assert (args.size, args.pool, args.log_every) == ("nano", "token", 20)
    assert given == {"epochs", "patch_size", "stagger", "crops", "opt"} and not hasattr(args, "set")
    assert read("--set", "size=base", "lr=1e-3")[0].lr == 1e-3
    assert read("--preset", "paper")[0].epochs == 300


def test_an_entry_by_optimizer_is_that_of_the_optimizer_or_what_was_set():
    assert read()[0].betas is None and read("--opt", "soap")[0].betas == (0.9, 0.95)
    args = read("--opt", "soap", "--set", "betas=0.8,0.99")[0]
    assert args.betas == [0.8, 0.99]
    options = dict(betas=[0.8, 0.99], precondition_frequency=10, stagger=False)
    assert runtime.optimizer_options(args) == options
    args = read("--opt", "kl-shampoo", "--set", "bf16_factors=true", "init_factor=1e-3")[0]
    options = dict(precondition_frequency=10, stagger=False, init_factor=1e-3,
                   factor_dtype=torch.bfloat16)
    assert runtime.optimizer_options(args) == options
    args = read("--opt", "lion")[0]                         # an optimizer that somebody has just added
    assert runtime.optimizer_options(args) == {} and not hasattr(args, "stagger")
    with pytest.raises(BadInput, match="--opt lion: pass --lr"):
        runtime.by_net(PRESETS["laptop"]["lr"], args)


@pytest.mark.parametrize("pair, words", [
    ("patch_size=4.5", "a whole number"), ("patch_size=nan", "a whole number"), ("stagger=1", "true or"),
    ("crops=a,b", "numbers with comma"), ("betas=.9,inf", "numbers with comma"), ("crops", "key=value"),
    ("pach_size=4", "patch_size"), ("nonsense=4", "patch_size"), ("init_factor=big", "a number")])
def test_a_setting_that_does_not_fit_is_named(pair, words):
    with pytest.raises(BadInput, match=f"--set {re.escape(pair)}.*{words}"):
        read("--set", pair)


@pytest.mark.parametrize("argv, words", [
    (["--epoch", "3"], "did you mean --epochs?"),
    (["--patch-size", "4"], "did you mean --set patch_size=...?"),
    (["--set", "epochs=-1"], "--epochs: -1 must be above 0"), (["--set", "size=huge"], "choice: 'huge'"),
    (["--skippless=1"], "did you mean --skipless?"), (["--preset", "huge"], "invalid choice: 'huge'")])
def test_a_wrong_flag_is_one_sentence_with_the_nearest(capsys, argv, words):
    with pytest.raises(SystemExit) as stop:
        read(*argv)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and words in said


def test_default_folders_tell_the_runs_of_a_sweep_apart():
    """All that is given and touches the course is in the name; what does not touch it is not."""
    name = "out/vit-nano-residual-adamw"
    assert read()[0].out == read("--eval-every", "5", "--threads", "2")[0].out == f"{name}-seed0"
    assert read("--lr", "1e-3", "--seed", "3")[0].out == f"{name}-lr0.001-seed3"
    assert read("--data", "/my/photos")[0].out == f"{name}-dataphotos-seed0"
    assert read("--set", "betas=.9,.95")[0].out == f"{name}-betas0.9,0.95-seed0"
    assert read("--finetune", "runs/mae/ckpt.pt")[0].out == "out/vit-finetune-mae-adamw-seed0"
    long = [read("--data", "x" * 200 + end)[0].out for end in "ab"]
    assert long[0] != long[1] and max(map(len, long)) < 140
    assert read("--out", "here")[0].out == "here"


def test_the_last_weight():
    assert runtime.last_weight(read()[0]) == runtime.last_weight(read("--skipless")[0]) == 1.0
    decayed = read("--shortcut", "decayed")[0], read("--shortcut", "decayed", "--alpha-min", "0")[0]
    assert [runtime.last_weight(args) for args in decayed] == [0.6, 0.0]
    assert runtime.last_weight(decayed[0], default=0.7) == 0.7


# -------------------------------------------------------------------------------------------------------
# batches

def test_any_batch_fits_any_number_of_processes_and_micro_steps():
    """The parts are the batch in order, differ by one sample at most, and none is empty."""
    for batch in (1, 7, 64, 100):
        for processes in (1, 2, 3, 7, 8):
            for micro in (None, 1, 3, 25, 1000):
                if batch < processes:
                    with pytest.raises(BadInput, match=f"--batch-size {batch} .* {processes} processes"):
                        runtime.split_batch(batch, micro, processes)
                    continue
                steps = runtime.split_batch(batch, micro, processes)
                parts = [runtime.my_part(torch.arange(batch), rank, processes, steps)
                         for rank in range(processes)]
                assert all(len(part) == steps for part in parts)
                assert torch.cat([x for part in parts for x in part]).equal(torch.arange(batch))
                ranks = [sum(map(len, part)) for part in parts]
                sizes = [len(x) for part in parts for x in part]
                assert max(ranks) - min(ranks) <= 1 and max(sizes) - min(sizes) <= 2 and min(sizes) > 0
                for part in parts:
                    assert max(map(len, part)) - min(map(len, part)) <= 1
                if micro and batch % (processes * micro) == 0:
                    assert set(sizes) == {micro}


# -------------------------------------------------------------------------------------------------------
# schedule

def test_warm_up_is_linear_and_its_first_step_learns():
    """Step s of a warm-up of 4 to a peak of 8 has lr 2 (s + 1): a first step of lr 0 would be wasted."""
    assert [runtime.lr_at(s, 10, 4, 8.0) for s in range(4)] == [2.0, 4.0, 6.0, 8.0]


def test_cosine_against_values_from_paper_and_pencil():
    """Ten steps, two of warm-up, peak 4: after it (1 + cos(pi k / 8)) * 2 for k = 0..7."""
    got = [runtime.lr_at(s, 10, 2, 4.0) for s in range(2, 10)]
    assert got[0] == 4.0
    assert got[2] == pytest.approx(2 + math.sqrt(2), rel=1e-12)
    assert got[4] == pytest.approx(2.0, rel=1e-12)
    assert got[6] == pytest.approx(2 - math.sqrt(2), rel=1e-12)
    assert all(a > b for a, b in zip(got, got[1:]))
    assert 0 < got[7] < 0.2                                 # the last step still learns a little


@pytest.mark.parametrize("total", [1, 2, 7, 100])
def test_no_warm_up_and_nothing_but_warm_up(total):
    assert runtime.lr_at(0, total, 0, 3.0) == 3.0
    ramp = [runtime.lr_at(s, total, total, 3.0) for s in range(total)]
    assert ramp[0] == pytest.approx(3.0 / total) and ramp[-1] == pytest.approx(3.0)


def test_floor_is_approached_and_never_crossed():
    """Between peak and floor: halfway it is their mean, at and beyond the end it is the floor."""
    values = [runtime.lr_at(s, 20, 0, 1.0, floor=0.2) for s in range(25)]
    assert values[10] == pytest.approx(0.6)
    assert min(values) >= 0.2 and values[20:] == pytest.approx([0.2] * 5)


# -------------------------------------------------------------------------------------------------------
# checkpoint

def _whole(step=3):
    return dict(model=dict(w=torch.full((4000,), float(step))), ema=None, optimizer=dict(state={}),
                step=step, best=None, rng=torch.get_rng_state(), args=dict(kind="vit", lr=0.1))


def _save_for_ever(path, started):
    """Saves version after version; each is a file of 1 MB in which every number is the version."""
    version = 0
    while True:
        version += 1
        big = dict(w=torch.full((250_000,), float(version)))
        runtime.save_checkpoint(path, dict(_whole(version), model=big))
        started.set()


def test_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """SIGKILL 20 times while writing: the file loads, holds one version, no orphans pile up.

    A writer that saved in place, or renamed before the data was on disk, would leave a torn file."""
    path, rng, torn = tmp_path / "ckpt.pt", random.Random(0), 0
    for _ in range(20):
        started = SERVER.Event()
        writer = launch(_save_for_ever, path, started, output=tmp_path / "output.txt")
        assert started.wait(30), (tmp_path / "output.txt").read_text(encoding="utf-8")
        time.sleep(rng.uniform(0, 0.03))
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        saved = runtime.load_checkpoint(path)
        assert (saved["model"]["w"] == saved["step"]).all() and len(saved["model"]["w"]) == 250_000
        torn += (tmp_path / "ckpt.pt.tmp").exists()
        assert {p.name for p in tmp_path.iterdir()} <= {"ckpt.pt", "ckpt.pt.tmp", "output.txt"}
    assert torn >= 1, "no kill fell into a save, so this test has shown nothing"
    runtime.save_checkpoint(path, saved)                    # what a killed save left is overwritten
    assert not (tmp_path / "ckpt.pt.tmp").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damaged_checkpoint_is_answered_with_its_name(tmp_path):
    """Cut short, noise, text, another pickle or nothing: a sentence names the file, no traceback."""
    runtime.save_checkpoint(tmp_path / "good.pt", _whole())
    whole, rng, path = (tmp_path / "good.pt").read_bytes(), random.Random(1), tmp_path / "ckpt.pt"
    ends = [0, 1, 2, 4, 10, 100, 1000, len(whole) // 2, len(whole) - 1]
    damaged = [whole[:n] for n in ends + [rng.randrange(len(whole)) for _ in range(20)]]
    damaged += [rng.randbytes(rng.randrange(1, 300)) for _ in range(60)]
    damaged += [b"hello\n", b'{"model": 1}', bytes(len(whole)), b"\x80\x04K\x01.", b"\x80\x02K\x01.",
                b"]q\x00.", b"cos\nsystem\n.", b"PK\x03\x04" + rng.randbytes(200)]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(BadInput) as caught:
            runtime.load_checkpoint(path)
            pytest.fail(f"{content[:50]} was loaded")
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    path.unlink()
    path.mkdir()
    with pytest.raises(BadInput, match="ckpt.pt"):
        runtime.load_checkpoint(path)


@pytest.mark.parametrize("other", [dict(model={}), [1, 2], torch.zeros(3), 7, {"state_dict": {}}])
def test_checkpoint_of_another_program_is_refused_by_name(tmp_path, other):
    torch.save(other, tmp_path / "foreign.pt")
    with pytest.raises(BadInput, match="foreign.pt"):
        runtime.load_checkpoint(tmp_path / "foreign.pt")


def test_checkpoint_comes_back_as_it_was(tmp_path):
    """Tensors keep dtype and bits, python scalars keep their type; by file or by folder."""
    saved = dict(_whole(), best=1 / 3, half=torch.tensor([1 / 3], dtype=torch.bfloat16))
    runtime.save_checkpoint(tmp_path / "ckpt.pt", saved)
    for path in (tmp_path, tmp_path / "ckpt.pt"):
        back = runtime.read_checkpoint(path, "--ckpt", "train one")
        assert back.keys() == saved.keys() and back["best"] == 1 / 3 and back["ema"] is None
        assert back["half"].dtype == torch.bfloat16 and torch.equal(back["half"], saved["half"])
        assert torch.equal(back["rng"], saved["rng"]) and back["step"] == 3
    with pytest.raises(BadInput, match="--ckpt .*nowhere.*: train one"):
        runtime.read_checkpoint(tmp_path / "nowhere", "--ckpt", "train one")
    assert runtime.find_checkpoint(tmp_path, True, "vit")["step"] == 3
    assert runtime.find_checkpoint(tmp_path, False, "vit") is None
    with pytest.raises(BadInput, match="another train script"):
        runtime.find_checkpoint(tmp_path, True, "lm")


def test_check_resume_names_the_value_and_both_sides():
    """Refused: what defines the run. With --allow-change only: lr, length. Silent: what never counts."""
    then = dict(img_size=28, lr=0.1, out="a", data="x", train_images=9, allow_change=False)
    assert runtime.check_resume("c", then, dict(then)) == {}
    assert runtime.check_resume("c", then, dict(then, out="b", data="y", new=1)) == {}
    with pytest.raises(BadInput, match="out/ckpt.pt was .* img_size=28, .* img_size=32: .*--fresh"):
        runtime.check_resume("out/ckpt.pt", then, dict(then, img_size=32, allow_change=True))
    with pytest.raises(BadInput, match="lr=0.1, .* lr=0.2: .*--allow-change"):
        runtime.check_resume("c", then, dict(then, lr=0.2))
    now = dict(then, lr=0.2, out="b", allow_change=True)
    assert runtime.check_resume("c", then, now) == {"lr": (0.1, 0.2)}
    with pytest.raises(BadInput, match="train_images=9, .* train_images=8 by --data x"):
        runtime.check_resume("c", then, dict(then, train_images=8))


# -------------------------------------------------------------------------------------------------------
# log

def make_run(out, world=WORLD):
    """A `Run` that logs, without a model."""
    args = argparse.Namespace(device="cpu", threads=1, dtype="auto", batch_size=4, micro_batch=None,
                              out=str(out), resume=True, save_best=False, keep_every=0, log_every=1)
    run = runtime.open_run(args, "vit")
    run.world, run.main, run.wandb = world, world.main, None
    Path(out).mkdir(exist_ok=True)
    return run


def test_log_drops_lines_past_the_resumed_step_and_a_torn_last_line(tmp_path):
    """The steps after the checkpoint run again, so their lines go; the kept ones stay to the byte."""
    kept = "".join(json.dumps({"step": s, "loss": 1 / (s + 3)}) + "\n" for s in (1, 2, 2, 3))
    log = tmp_path / "log.jsonl"
    log.write_text(kept + '{"step": 4, "loss": 0.5}\n' + '{"step": 5, "lo', encoding="utf-8")
    runtime.trim_log(tmp_path, 3)
    assert log.read_text(encoding="utf-8") == kept
    make_run(tmp_path).log("human", step=4, loss=0.25)
    assert [row["step"] for row in runtime.read_log(tmp_path)] == [1, 2, 2, 3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl"]
    runtime.trim_log(tmp_path, 0)
    assert log.read_text(encoding="utf-8") == ""


@pytest.mark.parametrize("junk", [b"5", b"null", b'"step"', b"[1]", b"{}", b'{"step": null}',
                                  b'{"step": "x"}', b"", b"not json", b"\xff\xfe\x00"])
def test_log_drops_a_line_that_has_no_step(tmp_path, junk):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n' + junk + b"\n")
    runtime.trim_log(tmp_path, 3)
    assert (tmp_path / "log.jsonl").read_bytes() == b'{"step": 1}\n'


def test_only_rank_0_logs_and_numbers_that_json_lacks_are_null(tmp_path):
    """NaN and Infinity are no JSON: a strict reader would choke on the whole file."""
    make_run(tmp_path, runtime.World(1, 2, torch.device("cpu"), "")).log("human", step=2, loss=1.0)
    assert not (tmp_path / "log.jsonl").exists()
    make_run(tmp_path).log("human", step=1, loss=float("nan"), val_loss=[float("inf"), 2.0], lr=0.1)
    text = (tmp_path / "log.jsonl").read_text(encoding="utf-8")
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the log"))
    assert row == {"step": 1, "loss": None, "val_loss": [None, 2.0], "lr": 0.1}


def test_best_and_last_come_from_the_log(tmp_path):
    run = make_run(tmp_path)
    assert math.isnan(run.best()) and math.isnan(run.last("val_loss"))
    for step, loss in enumerate((3.0, 1.0, 2.0)):
        run.log("human", step=step, val_loss=loss)
    assert (run.best(), run.last("val_loss")) == (1.0, 2.0)


# -------------------------------------------------------------------------------------------------------
# the check for non-finite numbers

def _window(losses, norms):
    rows = zip(map(torch.tensor, losses), map(torch.tensor, norms))
    return [(10 + i, 0.001 * (i + 1), *pair) for i, pair in enumerate(rows)]


def test_check_finite_returns_numbers():
    rows = runtime.check_finite(_window([1.0, 2.0], [4.0, 5.0]), WORLD)
    assert rows == [(10, 0.001, 1.0, 4.0), (11, 0.002, 2.0, 5.0)]


@pytest.mark.parametrize("losses, norms", [
    ([1.0, math.nan, math.nan], [1.0, 2.0, math.nan]), ([1.0, math.inf, 1.0], [1.0, 2.0, 3.0]),
    ([1.0, -math.inf, 1.0], [1.0, 2.0, 3.0]), ([1.0, 2.0, 3.0], [1.0, math.inf, math.nan])])
def test_check_finite_names_the_first_bad_step(losses, norms):
    """Of the steps 10, 11, 12 the one at fault is 11; its lr and gradient norm are in the sentence."""
    with pytest.raises(BadInput) as caught:
        runtime.check_finite(_window(losses, norms), WORLD)
    said = str(caught.value)
    assert "step 11" in said and "step 10" not in said and "step 12" not in said
    assert "lr 0.002" in said and f"gradient norm {norms[1]}" in said


def _one_rank_is_ill():
    world = runtime.start("cpu", 1)
    loss = math.nan if world.rank == 1 else 1.0
    runtime.run_script(lambda: runtime.check_finite(_window([1.0, loss], [1.0, 1.0]), world))


def test_one_ill_rank_stops_all_with_one_message(tmp_path):
    """NaN on rank 1 only: both ranks leave with code 2 and neither waits for the other."""
    codes, outputs = launch_ranks(2, _one_rank_is_ill, folder=tmp_path, timeout=60)
    assert codes == [2, 2], outputs
    assert "error: the loss is not finite at step 11" in outputs[0]


def _bad_input_on(rank):
    def main():
        world = runtime.start("cpu", 1)
        if world.rank == rank:
            raise BadInput("photo.jpg cannot be read")
        runtime.all_sum([1.0], world)
    runtime.run_script(main)


def test_fault_that_only_rank_1_meets_is_said(tmp_path):
    """A damaged image lies in one rank's share: that rank must speak, or the run ends without a word."""
    codes, outputs = launch_ranks(2, _bad_input_on, 1, folder=tmp_path, timeout=60)
    assert codes[1] == 2
    assert "error: photo.jpg cannot be read" in outputs[1]


# -------------------------------------------------------------------------------------------------------
# seeds, numbers

def test_mix_seed_is_distinct_over_a_grid_and_stable():
    """seed + rank + step collides between runs; a hash over the same grid of 20,000 does not."""
    seeds = {runtime.mix_seed(seed, kind, step, rank, micro)
             for seed in range(5) for kind in ("noise", "mask") for step in range(250)
             for rank in range(4) for micro in range(2)}
    assert len(seeds) == 5 * 2 * 250 * 4 * 2
    assert all(0 <= s < 2 ** 63 for s in seeds)
    assert runtime.mix_seed(1, 23) != runtime.mix_seed(12, 3)
    assert runtime.mix_seed(3, "noise", 7) == 2126882253    # python's own hash() changes every time


@pytest.mark.parametrize("kind, bounds, text, words", [
    (int, dict(low=1), "0", "at least 1"), (int, dict(low=0), "-1", "at least 0"),
    (int, {}, "x", "invalid int value: 'x'"), (int, {}, "1.5", "invalid int value"),
    (float, dict(above=0), "0", "above 0"), (float, dict(low=0, high=1), "1.5", "at most 1"),
    (float, {}, "nan", "finite"), (float, dict(low=0), "nan", "at least 0"),
    (float, {}, "inf", "finite"), (float, {}, "abc", "invalid float value: 'abc'"),
    (int, dict(high=9), "9" * 400, "at most 9")])
def test_number_says_what_is_wrong(capsys, kind, bounds, text, words):
    """One sentence on stderr that names the flag and the bound, exit code 2."""
    parser = runtime.Parser()
    parser.add_argument("--speed", type=runtime.number(kind, **bounds))
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--speed", text])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert error.startswith("error: argument --speed") and words in error


def test_number_accepts_its_bounds():
    parse = runtime.number(float, low=0, high=1)
    assert [parse("0"), parse("1"), parse("1e-3")] == [0.0, 1.0, 0.001]
    assert runtime.number(int, low=1)("12") == 12


# -------------------------------------------------------------------------------------------------------
# device, folder

def test_dtype_on_a_cpu_is_float32_unless_asked():
    """No bf16 on a CPU by itself, and no question to CUDA that raises where there is none."""
    cpu = torch.device("cpu")
    assert runtime.pick_dtype("auto", cpu)[0] == torch.float32
    assert runtime.pick_dtype("bfloat16", cpu)[0] == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float32):
        with runtime.autocast(cpu, dtype):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_a_lone_rank_variable_is_not_torchrun(monkeypatch):
    """Some schedulers set RANK for programs of their own."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert runtime.start("cpu").size == 1


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "gpu", "cpu:abc"])
def test_absent_device_is_refused_by_name(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(BadInput, match=f"--device {device} .*use auto or cpu"):
        runtime.start(device)
    assert runtime.start("auto").device.type == "cpu"


def test_more_processes_than_gpus_is_refused_with_the_number(monkeypatch):
    """LOCAL_RANK 3 on a machine with 2 GPUs: a sentence, not "invalid device ordinal"."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(BadInput, match="nproc_per_node=2"):
        runtime.start("cuda")


@pytest.mark.parametrize("place", ["file/out", "file", "file/deep/er/out"])
def test_unwritable_out_is_refused_by_name(tmp_path, place):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(BadInput, match="--out .*" + place):
        runtime.make_out(tmp_path / place, dict(a=1))
    assert (tmp_path / "file").read_text(encoding="utf-8") == "in the way"


# -------------------------------------------------------------------------------------------------------
# the whole repository

SOURCES = sorted(path for folder in (".", "evals", "tools", "tests")
                 for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_text_file_is_opened_with_its_encoding(path):
    """Else a machine whose default is not UTF-8 writes files that no other can read."""
    wrong = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or "encoding" in {keyword.arg for keyword in node.keywords}:
            continue
        words = ast.unparse(node)
        owner, _, name = ast.unparse(node.func).rpartition(".")
        if name in ("run", "Popen", "check_output") and "text=True" in words:
            wrong.append(f"line {node.lineno}: {words[:80]}")
        elif name == "open" and owner in ("Image", "tarfile", "zipfile", "gzip", "os"):
            continue
        elif name == "open" and not re.search(r"""['"][rwax]\+?b\+?['"]""", words):
            wrong.append(f"line {node.lineno}: {words[:80]}")
        elif name in ("read_text", "write_text") and owner not in ("", "runtime"):
            wrong.append(f"line {node.lineno}: {words[:80]}")
    assert not wrong, "\n".join(wrong)


def test_importing_does_nothing_else(tmp_path):
    """Every module of the root, imported without network in an empty folder: no output, file, thread
    setting, seed, group or CUDA context."""
    names = sorted(p.stem for p in ROOT.glob("*.py"))
    script = f"""
import os, random, signal, socket, sys, threading
import numpy, torch, torchvision.ops      # what these set is not ours
def refuse(*a, **k): raise AssertionError("network")
socket.socket.connect = socket.create_connection = refuse
def state():
    return dict(cwd=os.getcwd(), env=dict(os.environ), argv=list(sys.argv), files=os.listdir(),
                torch_rng=torch.get_rng_state().tolist(), rng=random.getstate(),
                numpy_rng=numpy.random.get_state()[1].tolist(), threads=torch.get_num_threads(),
                dtype=torch.get_default_dtype(), matmul=torch.get_float32_matmul_precision(),
                tf32=torch.backends.cuda.matmul.allow_tf32, cudnn=torch.backends.cudnn.benchmark,
                grad=torch.is_grad_enabled(), exact=torch.are_deterministic_algorithms_enabled(),
                group=torch.distributed.is_initialized(), cuda=torch.cuda.is_initialized(),
                live=threading.active_count(), signal=signal.getsignal(signal.SIGTERM))
before = state()
sys.argv = before["argv"] = ["x", "--no-such-flag"]
for name in {names}:
    __import__(name)
    after = state()
    for key in before:
        assert before[key] == after[key], f"importing {{name}} changes {{key}}"
"""
    ran = subprocess.run([sys.executable, "-B", "-c", script], cwd=tmp_path, capture_output=True,
                         encoding="utf-8", env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "" and ran.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_help_needs_no_data_no_network_no_gpu(tmp_path):
    """The scripts alone, copied without data/, with CUDA hidden and no way out: --help answers."""
    for source in ROOT.glob("*.py"):
        shutil.copy(source, tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    code = f"""
import runpy, socket, sys
def refuse(*a, **k): raise AssertionError("network")
socket.socket.connect = socket.create_connection = refuse
for name in {SCRIPTS}:
    sys.argv = [name + ".py", "--help"]
    try:
        runpy.run_path(name + ".py", run_name="__main__")
    except SystemExit as stop:
        assert stop.code == 0, name
"""
    ran = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True,
                         encoding="utf-8", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=120)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    assert ran.stdout.count("--skipless") >= len(SCRIPTS)
    docs = [importlib.import_module(name).__doc__ for name in SCRIPTS]
    assert all(doc.splitlines()[0] in ran.stdout for doc in docs)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("preset", ["laptop", "paper"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_help_shows_the_defaults_that_hold(monkeypatch, capsys, name, preset):
    """Every "(default: x)" of --help is what a run without that flag gets; every flag has a help text;
    at most 33 flags; every entry of the preset is a flag or reached by --set."""
    script = importlib.import_module(name)
    monkeypatch.setenv("COLUMNS", "1000")                   # no line is broken within a help text
    with pytest.raises(SystemExit) as stop:
        script.get_args(["--preset", preset, "--help"])
    assert stop.value.code == 0
    entries = re.split(r"\n  (?=--)", capsys.readouterr().out)[1:]
    assert len(entries) <= 33                               # about 32, says the design
    argv = ["--preset", preset, "--data", "sotu" if name == "train_lm" else "digits8x8"]
    args = vars(script.get_args(argv))
    for entry in entries:
        found = re.match(r"--([\w-]+).*?\s{2,}(\S.*?)( \(default: (.*)\))?\n", entry + "\n", re.DOTALL)
        assert found, f"no help: {entry}"
        key = found[1].replace("-", "_")
        if found[3] and key not in ("preset", "data"):
            assert found[4] == str(args[key]), entry
    assert not [line for line in script.__doc__.splitlines() if len(line) > 105]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_default_folder_is_the_scripts_own(name):
    out = importlib.import_module(name).get_args([]).out
    assert out.startswith(f"out/{name.removeprefix('train_')}") and out.endswith("-seed0")
