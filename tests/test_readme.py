"""README and docs: every command exists and those that run on a laptop run, every number is a recorded one,
every link leads somewhere, every table is what the JSON gives."""
import functools
import importlib
import itertools
import json
import math
import re
import shlex
import statistics
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.distributed import run as torchrun

import data
import init
import probe
import quantize
import runtime
import train_dino
import train_lm
import train_mae
import train_sit
import train_vit
from evals import conditioning, discovery, quantization_theory, samples, segmentation, zeroshot
from runtime import BadInput
from tools import bench, claims, encode_latents, prepare_text, reproduce

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": (ROOT / "README.md").read_text(encoding="utf-8")}
PAGES |= {f"docs/{path.name}": path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
README, ALL = PAGES["README.md"], "\n\n".join(PAGES.values())
TRAIN = {"train_vit.py": train_vit, "train_lm.py": train_lm, "train_mae.py": train_mae, "train_sit.py": train_sit, "train_dino.py": train_dino}
OTHERS = {"probe.py": probe, "quantize.py": quantize, "tools.reproduce": reproduce, "tools.bench": bench,
          "evals.segmentation": segmentation, "evals.discovery": discovery, "evals.samples": samples,
          "evals.conditioning": conditioning, "tools.encode_latents": encode_latents}
RUNNERS = {"tools.prepare_text": prepare_text, "evals.zeroshot": zeroshot,
           "evals.quantization_theory": quantization_theory}


class Parsed(Exception):
    """Raised in the place of what a script does once it has read its flags."""
SETUP = "python3 -m venv .venv && .venv/bin/pip install -q -r requirements.txt && .venv/bin/python "


# ---------------------------------------------------------------------------------------------------------------------
# commands

def commands(text=ALL):
    """Every command, a list of words, of the code blocks without a language and of `python ...` within a sentence or a table."""
    lines = [line for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M) if not language for line in block.splitlines()]
    lines += re.findall(r"`(python (?:-m )?[^\s`]+[^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    return [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]


def script_of(words):
    """(script, flags) of a command that runs one of ours, under torchrun too; else None."""
    if words[0] == "torchrun":
        args = torchrun.parse_args(words[1:])
        return args.training_script, args.training_script_args
    if not re.fullmatch(r"(\.venv/bin/)?python", words[0]):
        return None
    words = words[2:] if words[1] == "-m" else words[1:]
    return (words[0], words[1:]) if words[0].endswith(".py") or words[0].split(".")[0] in ("evals", "tools") else None


SCRIPTS = [found for words in commands() if (found := script_of(words))]
RUN = [(script, flags) for script, flags in SCRIPTS if script in TRAIN and not {"--preset", "--sample", "--finetune"} & set(flags)]


def parse(script, flags, monkeypatch, tmp_path):
    """The script's own parser takes the flags; nothing is run."""
    if "--finetune" in flags:                                    # the run is not here: all else was parsed
        with pytest.raises(BadInput, match="^--finetune out/mae.* is no checkpoint"):
            TRAIN[script].get_args(flags)
    elif script in RUNNERS:
        read = runtime.Parser.parse_args

        def stop(self, *a, **k):
            raise Parsed(read(self, *a, **k))
        monkeypatch.setattr(runtime.Parser, "parse_args", stop)
        with pytest.raises(Parsed):
            RUNNERS[script].main(flags)
    else:
        (TRAIN | OTHERS)[script].get_args(flags)


@pytest.mark.parametrize("script, flags", SCRIPTS, ids=lambda c: c if isinstance(c, str) else " ".join(c))
def test_every_command_parses(script, flags, monkeypatch, tmp_path):
    parse(script, flags, monkeypatch, tmp_path)


def test_a_wrong_flag_is_caught(monkeypatch, tmp_path, capsys):
    (words,) = commands("```\ntorchrun --nproc_per_node=8 train_vit.py --presett paper   # a comment\n```\n")
    with pytest.raises(SystemExit):
        parse(*script_of(words), monkeypatch, tmp_path)
    assert "--presett" in capsys.readouterr().err
    assert commands("see `python train_vit.py --skipples` there") == [["python", "train_vit.py", "--skipples"]]


def test_other_commands_are_known():
    """What is no script of ours: the set-up, the tests, and packages that a script or a test names as optional."""
    for words in commands():
        if script_of(words) is None:
            line = shlex.join(words)
            assert line in ("python3 -m venv .venv", ".venv/bin/pip install -q -r requirements.txt", ".venv/bin/python -m pytest -q", "pip install lm-eval"), line
    code = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("**/*.py") if ".venv" not in path.parts)
    for package in re.findall(r"pip install ([a-z][\w-]*)", ALL):
        assert package in ("torch", "lm-eval") or package in code or package.replace("-", "_") in code


load_once = functools.cache(data.load_images)                    # the same few sets in every command


@pytest.mark.parametrize("script, flags", RUN, ids=lambda c: c if isinstance(c, str) else " ".join(c))
def test_the_training_commands_run(script, flags, tmp_path, capsys, monkeypatch):
    """All but those of a preset, shortened. What probe.py, quantize.py, bench.py, init.py and prepare.py do is run by the tests that bear their names."""
    short = {"train_vit.py": ["--epochs", "0.05"], "train_lm.py": ["--steps", "2", "--set", "eval_tokens=2048", "sample_tokens=5"],
             "train_mae.py": ["--epochs", "0.03", "--set", "knn_images=64", "holdout=0.05"], "train_sit.py": ["--steps", "2", "--set", "samples=4", "sample_steps=2"],
             "train_dino.py": ["--epochs", "0.03", "--set", "knn_images=64", "holdout=0.05"]}[script]
    monkeypatch.setattr(data, "load_images", load_once)
    TRAIN[script].main([*flags, *short, "--warmup", "0", "--out", str(tmp_path), "--threads", "1"])
    last = {"train_vit.py": r"^val top-1 \d+\.\d %$", "train_dino.py": r"^val k-NN \d+\.\d %$"}
    assert re.search(last.get(script, r"^val loss \d+\.\d{4}$"), capsys.readouterr().out.splitlines()[-1])
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def at_scale(tmp_path_factory):
    """{path in README: a miniature of it}: folders of JPEGs in two classes, a text to be made shards, and checkpoints that later commands read."""
    folder, draw = tmp_path_factory.mktemp("scale"), np.random.default_rng(0)
    for split, label in itertools.product(("train", "val"), ("a", "b")):
        (folder / "imagenet" / split / label).mkdir(parents=True)
        for i in range(4):
            pixels = draw.integers(0, 255, (13, 15, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((300, 260)).save(folder / "imagenet" / split / label / f"{i}.jpeg")
    (folder / "corpus").mkdir()
    text = (ROOT / "data" / "shakespeare_1mb.txt").read_text(encoding="utf-8")[:80_000]
    (folder / "corpus" / "a.txt").write_text(text, encoding="utf-8")
    prepare_text.main([str(folder / "corpus"), "--out", str(folder / "shards"), "--tokenizer", "gpt2-32k", "--val", "0.3"])
    (folder / "latents").mkdir()
    for name in ("", "val_"):
        np.save(folder / "latents" / f"{name}latents.npy", draw.standard_normal((4, 4, 32, 32), dtype=np.float32))
        np.save(folder / "latents" / f"{name}labels.npy", np.arange(4) % 2)
    train_mae.main(["--preset", "paper", "--data", str(folder / "imagenet"), *SMALL["train_mae.py"], "--out", str(folder / "mae")])
    return {"/path/to/imagenet": folder / "imagenet", "data/fineweb-edu": folder / "shards", "data/latents": folder / "latents", "out/mae": folder / "mae"}


TINY = ["--size", "tiny", "--depth", "2", "--batch-size", "4", "--micro-batch", "2", "--epochs", "1", "--warmup", "0", "--threads", "1", "--device", "cpu", "--set", "workers=1"]
SMALL = {"train_vit.py": TINY, "train_dino.py": [*TINY, "out_dim=64"], "train_mae.py": [*TINY, "decoder_depth=1"],
         "train_lm.py": ["--embed-dim", "96", "--depth", "2", "--batch-size", "4", "--micro-batch", "2", "--steps", "2", "--warmup", "0", "--threads", "1", "--device", "cpu", "--set", "eval_tokens=1024", "num_heads=2"],
         "train_sit.py": ["--size", "nano", "--depth", "2", "--batch-size", "4", "--micro-batch", "2", "--steps", "2", "--warmup", "0", "--threads", "1", "--device", "cpu", "--set", "workers=1"]}
SCALED = dict.fromkeys((script, tuple(flags)) for script, flags in SCRIPTS if script in TRAIN and "--preset" in flags and not {"--vae", "--sample"} & set(flags))


@pytest.mark.parametrize("script, flags", SCALED, ids=lambda c: c if isinstance(c, str) else " ".join(c))
def test_the_papers_presets_run(script, flags, at_scale, tmp_path, capsys):
    """The commands of the section on scale: their recipe and image size, with a small net, a batch of four and two updates."""
    flags = [str(at_scale.get(flag, flag)) for flag in flags]
    TRAIN[script].main([*flags, *SMALL[script], "--out", str(tmp_path)])
    steps = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert steps[-1]["step"] == 2 and all(math.isfinite(row["loss"]) for row in steps if "loss" in row)
    assert (tmp_path / "ckpt.pt").exists() and (tmp_path / "curve.png").exists()


def test_the_two_commands_stand_alone():
    """Each on one line, with its own set-up, on the first screen; the first is run above, .ci/run calls the second as printed."""
    assert f"```\n{SETUP}train_vit.py --skipless --opt soap\n```" in README.partition("## ")[0]
    assert f"```\n{SETUP}-m pytest -q\n```" in README.partition("## ")[0]
    assert ("train_vit.py", ["--skipless", "--opt", "soap"]) in RUN


def test_the_forks_example_changes_what_it_says():
    """The function of the example, in the place of orthogonal_vo_: singular values of W_V W_O spread, and their mean square stays."""
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
    assert len(code.splitlines()) <= 10
    found = dict(vars(init))
    exec(code, found)
    made = {}
    for name, function in (("orthogonal", init.orthogonal_vo_), ("gaussian", found["gaussian_vo_"])):
        init.torch.manual_seed(0)
        w_v, w_o = init.torch.empty(64, 64), init.torch.empty(64, 64)
        function(w_v, w_o, 3.0)
        made[name] = init.torch.linalg.svdvals((w_o @ w_v).double())
    assert made["orthogonal"].max() / made["orthogonal"].min() < 1.001 and made["gaussian"].max() / made["gaussian"].min() > 100
    assert made["gaussian"].square().mean().sqrt() == pytest.approx(9, rel=.1) and made["orthogonal"].square().mean().sqrt() == pytest.approx(9, rel=1e-3)
    assert "orthogonal_vo_(" in Path(init.__file__).read_text(encoding="utf-8").split("def init_skipless_vit")[1]


# ---------------------------------------------------------------------------------------------------------------------
# tables, links, names

@functools.cache
def results(name):
    return reproduce.Results(ROOT / "results" / f"{name}.json")


@functools.cache
def table(name):
    claim = claims.TABLES[name]
    return reproduce.SHOW.get(name, reproduce.SHOW[claim["script"]])(claim, results(name), 3)


def blocks():
    return dict(re.findall(r"<!-- ([\w-]+) -->\n(.*?)<!-- /\1 -->", ALL, re.S))


def test_the_tables_are_what_was_recorded():
    rows = json.loads((ROOT / "results" / "claims.json").read_text(encoding="utf-8"))
    shown = blocks()
    assert shown["claims"] == reproduce.headlines(rows) and shown["verdicts"] == reproduce.count_verdicts(rows), "python reproduce.py claims"
    assert 10 <= shown["claims"].count("\n") - 2 <= 15 and {r["paper"] for r in rows if r["headline"]} == {"1", "2", "3", "beyond"}
    assert {"table1", *reproduce.COMPACT} <= set(shown) and set(shown) <= {"claims", "verdicts", *claims.TABLES}
    assert README.count(shown["verdicts"]) == 1
    for name in set(shown) & set(claims.TABLES):
        assert shown[name] == reproduce.compact(name, table(name)), f"python -m tools.reproduce {name}"
    assert len(re.findall("<!-- ", ALL)) == 2 * len(shown) + 2                 # the verdicts stand on two pages


def test_headlines_are_a_part_of_what_is_judged():
    """The cells that a headline shows are some of its rule's, with the same figures."""
    data = reproduce.recorded(ROOT / "results")
    for claim in claims.CLAIMS:
        row = claims.judge(claim, data)
        assert bool(claim.headline) == bool(row["headline"])
        if isinstance(claim.headline, tuple) and row["seeds"]:
            assert set(claim.headline) <= {c for pair in claim.rule.pairs for c in pair}
            pieces = lambda text: {piece.split(": ")[-1] for piece in re.split(", |; ", text)}
            assert len(pieces(row["headline"])) == len(claim.headline) and pieces(row["headline"]) < pieces(row["ours"])


def test_a_compact_table_keeps_its_columns():
    wide = reproduce.markdown([*reproduce.COMPACT["lm"], "other"], [[*map(str, range(len(reproduce.COMPACT["lm"]))), "x"]])
    assert reproduce.compact("lm", wide) == wide.replace(" other |", "").replace(" x |", "").replace("---|", "", 1)
    assert reproduce.compact("table1", wide) == wide


def dead_ends(text, page="README.md"):
    """Links and pictures without a file, anchors without a heading, names of code that are not there."""
    anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)", text, re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            if target[1:] not in anchors:
                yield target
        elif not target.startswith("https://") and not (ROOT / page).parent.joinpath(target).exists():
            yield target
    for name in re.findall(r"`([\w/-]+\.py|(?:results|data)/[\w./-]+)`", text):
        if not (ROOT / name).exists():
            yield name
    for module, name in re.findall(r"`([a-z]\w*)\.([a-zA-Z_]\w*)`", text):
        if name != "py" and (ROOT / f"{module}.py").exists() and not hasattr(importlib.import_module(module), name):
            yield f"{module}.{name}"


def test_links_lead_somewhere():
    assert {page: found for page, text in PAGES.items() if (found := list(dead_ends(text, page)))} == {}
    assert all(f"results/paper{n}.png)" in ALL for n in (1, 2, 3))
    assert list(dead_ends("# A b\n[x](#a-b) [y](#c) ![z](results/none.png) `init.suo_` `init.none` `none.py` `train_vit.py`")) == ["#c", "results/none.png", "none.py", "init.none"]


# ---------------------------------------------------------------------------------------------------------------------
# numbers

NUMBER = re.compile(r"(?<![\w./,-])\d*\.\d+(?![\w]|\.\d)")
WHOLE = re.compile(r"(?<![\w./,^-])(?:\d{1,3}(?:,\d{3})+|\d+)(?![\w]|[.,]\d)")            # looked up from 13 on: below, it counts layers, seeds and papers
PAIR = re.compile(r"(\d*\.\d+) ± (\d*\.\d+)")
SETTINGS = {                                                     # what is no measurement of ours: a phrase of README, and where its number comes from
    "(4,000 + 1,000)": "images of mnist5k",
    "4,000 training digits": "images of mnist5k",
    "ImageNet-1k, 300 epochs": "paper 1",
    "224 px, 300 epochs, batch 1,024": "paper 1",
    "heads of 32 dimensions": "size of the laptop ViT",
    "at 18 layers": "the table's title",
    "over 15 runs": "five cells, three seeds",
    "heads of 64": "size of the net",
    "408 steps": "6 epochs of 2,202 images in batches of 32",
    "12 layers of width 128": "size of the laptop language model",
    "300 steps of 1,024": "--steps, and tokens a step",
    "after 300 steps": "--steps",
    "after 200 steps": "--steps of the searches",
    "24 layers of 768, 13 G tokens": "paper 2",
    "the paper's are 750 and 40,000": "paper 2, rounded",
    "12 layers of width 96": "size of the laptop MAE",
    "548 steps of 32 images": "4 epochs of 4,404 images",
    "ViT-B/16, 800 epochs": "paper 3",
    "is for 28 layers": "paper 3",
    "some 150 steps": "read off the curves",
    "194 M parameters on FineWeb-Edu (context 512, 512 sequences a step, 50,000 steps)": "paper 2",
    "100 items": "lines of data/commonsense",
    "batch 8,192, 800 epochs": "paper 3",
    "parameter count, 194 M": "paper 2",
    "untied it is 219 M": "32,000 x 768 more",
    "1,600 epochs, its own runs have 800": "paper 3",
    "1.35 M parameters": "size of the laptop ViT",
    "2.4 M parameters": "size of the laptop language model",
    "(2, .6, 3)": "constants printed in paper 1",
    "alpha_QK .9, temperature 1.1": "constants printed in paper 2",
    "attention diagonal is .9": "target of init.choose_alpha_qk",
    "1e-3 in this preset, .1 in the reference": "eigenvalues at the start, KL-Shampoo's code",
    "Decay to .6": "alpha_min",
    "The paper's .8": "alpha_min",
    "at .7 the three": "alpha_min",
    "needed below .7": "alpha_min",
    "3.6 hours": "sum over the tables, the docstring of reproduce.py",
    "5.5 M in its MAE": "parameters, from the shapes in paper 3's code",
    "(.0036 for .6 at 12 layers)": "alpha_eff, checked below",
    "(.047)": "alpha_eff, checked below",
    "alpha_min .6, its code runs .7": "paper 3",
}


def prose(text):
    """[(paragraph, bullet or table row; names of the results whose record it links to, or else its section)], without code, tables between markers, settings and addresses."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    text = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", text, flags=re.S)
    for phrase in SETTINGS:
        text = re.sub(r"\s+".join(map(re.escape, phrase.split())), "", text)
    text = re.sub(r"`[^`\n]*`", "", re.sub(r"\[[\d.]+\]\(https\S+\)", "", text))
    linked = lambda part: {Path(target).stem for target in re.findall(r"\]\((?:\.\./)?(results/[^)]+\.(?:md|json))\)", part)}
    return [(part, linked(part) or linked(section)) for section in re.split(r"^(?=##+ )", text, flags=re.M) for part in re.split(r"\n\s*\n|\n(?=- |\| )", section)]


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [x for v in value for x in leaves(v)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


@functools.cache
def pool(name):
    """({(value, digits)}, {"mean ± std"}) of one record: as its table prints them (over seeds), last values of its runs, the texts of its claims.
    None for the digits: a recorded value, good for any."""
    numbers = []
    rows = json.loads((ROOT / "results" / "claims.json").read_text(encoding="utf-8"))
    texts = [f"{r['says']} {r['ours']}" for r in rows if name == "claims" or r["command"].endswith(f"tools.reproduce {name}")]
    if name in claims.TABLES:
        texts.append(table(name))
        for record in results(name).data["runs"].values():
            numbers += [(record[key][-1], None) for key in ("val_loss", "val_top1", "kurtosis_max") if record.get(key)]
    elif name != "claims":
        numbers += [(v, None) for v in leaves(json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8")))]
    numbers += [(float(n), len(n.split(".")[1])) for text in texts for n in NUMBER.findall(text)]
    return numbers, {pair for text in texts for pair in PAIR.findall(text)}


def digits(number):
    return len(number.split(".")[1])


def whole(text):
    """The integers from 13 on: (as printed, value, half of the last place that is no zero behind a comma)."""
    for found in WHOLE.findall(text):
        value = int(found.replace(",", ""))
        if value > 12:
            yield found, value, .5 * (10 ** (len(str(value)) - len(str(value).rstrip("0"))) if "," in found else 1)


def close(value, number):
    return abs(abs(value) - float(number)) <= .5 * 10 ** -digits(number) + 1e-12


def strangers(part, names):
    """The numbers in a part of README's prose that no record of these names has, after rounding to the digits printed; of mean ± std, the pair."""
    numbers, pairs = [pair for name in names for pair in pool(name)[0]], [pair for name in names for pair in pool(name)[1]]
    for found in PAIR.finditer(part):
        if not any(all(digits(p) >= digits(n) and close(float(p), n) for p, n in zip(pair, found.groups())) for pair in pairs):
            yield found.group()
    for number in NUMBER.findall(PAIR.sub("", part)):
        if not any((d is None or d >= digits(number)) and close(value, number) for value, d in numbers):
            yield number
    for number, value, half in whole(NUMBER.sub("", part)):
        if not any(abs(abs(v) - value) <= half + 1e-12 for v, _ in numbers):
            yield number


def all_strangers(text):
    return [number for part, names in prose(text) for number in strangers(part, names)]


def test_every_number_is_recorded():
    assert {page: found for page, text in PAGES.items() if (found := all_strangers(text))} == {}


def test_a_made_up_number_is_caught():
    assert all_strangers("## A\nsee [lm](results/lm.md): 1.940 and 9.876, or 1.940 ± .010\n## B\nno link: 1.940") == ["1.940 ± .010", "9.876", "1.940"]
    assert all_strangers("## A\n[x](results/lm.md), 3 seeds and 7,654 of 98 things") == ["7,654", "98"] and list(whole("8 to 37,000, 1,776")) == [("37,000", 37000, 500), ("1,776", 1776, .5)]
    assert all_strangers("## A\nin `--lr 9.87`, [2510.00345](https://arxiv.org/abs/2510.00345), 1.94 ± .02, [x](results/lm.md)\n\nas above: 1.940.") == []
    caught = []                                                  # every number of README in turn, changed by 37 in the last digit
    for part, names in prose(ALL):
        for found in NUMBER.finditer(part):
            other = f"{float(found.group()) + 37 * 10 ** -digits(found.group()):.{digits(found.group())}f}"
            caught.append(any(True for _ in strangers(part[:found.start()] + other + part[found.end():], names)))
    assert len(caught) > 20 and statistics.mean(caught) > 0.75


def test_settings_are_still_there():
    for phrase in SETTINGS:
        assert " ".join(phrase.split()) in " ".join(ALL.split()), f"{phrase!r} is no phrase of the pages any more"
    from model import effective_alpha, shortcut_weights
    assert f"{effective_alpha(shortcut_weights('decayed', 12, .6)):.4f}" == "0.0036"
    assert f"{init.math.prod(1 - .4 * l / 12 for l in range(1, 13)):.3f}" == "0.047"
