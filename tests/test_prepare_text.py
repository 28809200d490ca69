"""tools/prepare_text.py: shards that hold every document once and survive a kill byte for byte; bad
input gets one sentence."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import text as T
from runtime import BadInput
from test_text import ROOT, UNICODE, documents, write_text
from tools import prepare_text as P


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
    return path


def prepare(*arguments):
    P.main([*map(str, arguments)])


def shards(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).glob("*.bin"))}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of text of all plain kinds, nested, and its shards by gpt2-32k (made with one
    process)."""
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "src" / "b" / "deep.txt", 1_100_000, seed=1)
    write_text(folder / "src" / "c.txt", 40_000, seed=2)
    write_jsonl(folder / "src" / "a.jsonl",
                [f"row {i} " * (i % 50 + 1) + UNICODE for i in range(900)] + ["", "\ud83d alone"])
    (folder / "src" / "notes.md").write_text("no source", encoding="utf-8")
    prepare(folder / "src", "--out", folder / "out", "--shard-tokens", 1e5, "--val", 0.1, "--workers", 1)
    return folder


def test_shards_hold_every_document_once_followed_by_a_separator(corpus):
    data = T.load_text(corpus / "out")
    assert (data.tokenizer.name == "gpt2-32k" and len(shards(corpus / "out")) >= 8
            and not list((corpus / "out").glob("*.tmp")))
    train, val = documents(data.train, data.tokenizer), documents(data.val, data.tokenizer)
    assert (not set(train) & set(val) and all(T.is_val(d, 0.1) for d in val if "\ufffd" not in d)
            and not any(T.is_val(d, 0.1) for d in train if "\ufffd" not in d))
    rows = [d for d in train + val if d.startswith("row ")]
    assert (sorted(rows) == sorted(f"row {i} " * (i % 50 + 1) + UNICODE for i in range(900))
            and "\ufffd alone" in train + val)
    rest = [d for d in train + val if not d.startswith("row ") and "alone" not in d]
    texts = [(corpus / "src" / f).read_text(encoding="utf-8") for f in ("b/deep.txt", "c.txt")]
    assert (sum(map(len, rest)) == sum(map(len, texts)) and all(any(d in t for t in texts) for d in rest)
            and len(set(rest)) == len(rest))
    assert all(len(d) <= 2 * T.DOCUMENT for d in rest) and 0.05 < len(val) / len(train) < 0.2
    assert np.array_equal(
        T.load_text(corpus / "out", "gpt2-32k").train[1000:200_000], data.train[1000:200_000])


def test_two_processes_write_the_same_bytes(corpus, tmp_path, capsys):
    prepare(corpus / "src", "--out", tmp_path, "--shard-tokens", 1e5, "--val", 0.1, "--workers", 2)
    assert shards(tmp_path) == shards(corpus / "out") and "shards were there" in capsys.readouterr().out


def test_a_killed_run_continues_to_the_same_bytes(corpus, tmp_path):
    """Killed between the rename of a val shard and that of its train shard, the worst moment: one whole
    pair, one half, one file aside."""
    arguments = [str(corpus / "src"), "--out", str(tmp_path), "--shard-tokens", "1e5", "--val", "0.1",
                 "--workers", "1"]
    code = ("import os, signal\nfrom tools import prepare_text\nreal, calls = os.replace, []\n"
            "def replace(a, b):\n    calls.append(b)\n"
            "    os.kill(os.getpid(), signal.SIGKILL) if len(calls) == 5 else real(a, b)\n"
            f"os.replace = replace\nprepare_text.main({arguments})")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL and list(shards(tmp_path)) == [
        "train_000000.bin", "val_000000.bin", "val_000001.bin"]
    assert list(tmp_path.glob("*.tmp"))
    with pytest.raises(BadInput, match=r"has 3 of \d+ shards: run the command that began it again"):
        T.load_text(tmp_path)
    kept = (tmp_path / "train_000000.bin").stat().st_mtime_ns
    P.main(arguments)
    assert (shards(tmp_path) == shards(corpus / "out")
            and (tmp_path / "train_000000.bin").stat().st_mtime_ns == kept
            and not list(tmp_path.glob("*.tmp")))


def test_another_command_is_refused_and_fresh_starts_over(tmp_path, capsys):
    source, out = tmp_path / "a.txt", tmp_path / "out"
    write_text(source, 300_000)
    command = [source, "--out", out, "--tokenizer", "bytes", "--val", 0.2, "--shard-tokens", 1e5,
               "--workers", 1]
    prepare(*command)
    before = shards(out)
    prepare(*command)
    assert shards(out) == before and "(4 of 4 shards were there)" in capsys.readouterr().out
    with pytest.raises(
            BadInput, match="was begun with tokenizer bytes and now it is gpt2: give the same, --fresh"):
        prepare(*command, "--tokenizer", "gpt2")
    with pytest.raises(BadInput, match=r"was begun with val 0.2 and now it is 0.1"):
        prepare(*command, "--val", 0.1)
    other = tmp_path / "b.txt"
    other.write_text("more\n", encoding="utf-8")
    with pytest.raises(BadInput, match="b.txt' is new, changed or gone since"):
        prepare(other, *command)
    with source.open("a", encoding="utf-8") as f:
        f.write("and more")
    with pytest.raises(BadInput, match="a.txt' is new, changed or gone since"):
        prepare(*command)
    assert shards(out) == before
    (out / "keep.txt").write_text("not a shard", encoding="utf-8")
    prepare(*command, "--fresh", "--val", 0)
    data = T.load_text(out)
    assert (len(data.val) == 0
            and "".join(documents(data.train, data.tokenizer)) == source.read_text(encoding="utf-8")
            and (out / "keep.txt").exists())
    (out / "manifest.json").unlink()
    with pytest.raises(BadInput, match="holds shards but no manifest.json"):
        prepare(*command)


@pytest.mark.parametrize("target", [66_000, 70_001, 300_000, 10 ** 9])
def test_pieces_of_a_file_partition_it(tmp_path, target):
    """However a .txt or .jsonl file is shared out, every byte of the one and every row of the other
    comes once, in order."""
    text, rows = write_text(tmp_path / "a.txt", 400_000), [f"{i} " * (i % 97) for i in range(2000)]
    # lines of 100 bytes: some pieces begin with one
    rows = [
        f"{i:06d}".ljust(100 - len('{"id": , "text": ""}\n') - len(str(i))) for i in range(1500)] + rows
    write_jsonl(tmp_path / "b.jsonl", rows)
    pieces = [p for unit in P.make_units([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], target)
              for p in unit]
    parts = [d for p in pieces if p.path.endswith(".txt") for d in P.read_txt(p)]
    # also where a piece ends, no word is cut
    assert "".join(parts) == text and all(d[-1].isspace() for d in parts)
    assert [r for p in pieces if p.path.endswith(".jsonl") for r in P.read_jsonl(p)] == rows
    units = P.make_units([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], target)
    assert all(sum(p.size for p in unit) <= target for unit in units)


@pytest.mark.parametrize("line", ['{"text": "cut', '{"body": "other field"}', '["list"]', '{"text": 5}'])
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line):
    path = write_jsonl(tmp_path / "a.jsonl", [f"{i} " * 50 for i in range(1500)])
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:1234], line.encode(), *lines[1234:]]))
    with pytest.raises(BadInput, match="a.jsonl line 1235 is no JSON object with a string named text"):
        prepare(path, "--out", tmp_path / "out", "--tokenizer", "bytes", "--shard-tokens", 1e5,
                "--workers", 1)
    # what was whole is kept for the restart
    assert (not list((tmp_path / "out").glob("*.tmp"))
            and len(list((tmp_path / "out").glob("train_*.bin"))) == 2)


def test_parquet(tmp_path):
    """FineWeb-Edu's layout: nested folders, several row groups, a text column among others; nulls are
    left out."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    rows = [f"row {i} " * 40 for i in range(1000)]
    for k, part in enumerate((rows[:600], rows[600:])):
        path = tmp_path / "src" / "data" / f"CC-{k}" / "train-00000.parquet"
        path.parent.mkdir(parents=True)
        table = pyarrow.table({"text": [*part, None], "score": [1.0] * (len(part) + 1)})
        pyarrow.parquet.write_table(table, path, row_group_size=150)
    prepare(tmp_path / "src", "--out", tmp_path / "out", "--tokenizer", "bytes", "--shard-tokens", 1e5,
            "--val", 0.2, "--workers", 1)
    data = T.load_text(tmp_path / "out")
    assert (sorted(documents(data.train, data.tokenizer) + documents(data.val, data.tokenizer))
            == sorted(rows) and len(shards(tmp_path / "out")) > 2)
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a"]}), tmp_path / "b.parquet")
    with pytest.raises(BadInput, match="b.parquet has no column named text that holds strings"):
        prepare(tmp_path / "b.parquet", "--out", tmp_path / "out2")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 nothing else")
    with pytest.raises(BadInput, match="c.parquet is not a readable parquet file"):
        prepare(tmp_path / "c.parquet", "--out", tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadInput, match="a.parquet needs the package pyarrow: pip install pyarrow"):
        prepare(tmp_path, "--out", tmp_path / "out")


def test_sources_that_are_none(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.txt").write_text("", encoding="utf-8")
    (tmp_path / "a.csv").write_text("a,b", encoding="utf-8")
    out = ["--out", tmp_path / "out", "--workers", 1]
    for source, sentence in (("nowhere", "source '.*nowhere' does not exist"),
                             ("empty", r"source '.*empty' holds no .txt, .jsonl, .parquet file"),
                             ("a.csv", "source '.*a.csv' is no .txt"),
                             ("zero.txt", "source '.*zero.txt' is empty")):
        with pytest.raises(BadInput, match=sentence):
            prepare(tmp_path / source, *out)
    assert not (tmp_path / "out").exists()
    write_text(tmp_path / "b.txt", 1000)
    with pytest.raises(BadInput, match="--out .*zero.txt cannot be written .*: choose another"):
        prepare(tmp_path / "b.txt", "--out", tmp_path / "zero.txt")


def test_shards_that_are_damaged_or_mixed(corpus, tmp_path):
    def copy(*names):
        for old in tmp_path.glob("*"):
            old.unlink()
        for name in names:
            (tmp_path / name).write_bytes((corpus / "out" / name).read_bytes())
        return tmp_path / names[-1]

    # without a manifest: shards that were moved
    copy("train_000000.bin", "train_000001.bin")
    assert (T.load_text(tmp_path).train[:].tolist()
            == T.load_text(corpus / "out").train[: len(T.load_text(tmp_path).train)].tolist())
    path = copy("train_000000.bin", "val_000000.bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(
            BadInput,
            match=r"val_000000.bin is damaged, it should hold ([\d,]+) tokens and holds (?!\1)[\d,]+"):
        T.load_text(tmp_path)
    for content in (b"", b"\x89tok", b"PK\x03\x04" + bytes(500)):
        path.write_bytes(content)
        with pytest.raises(BadInput, match="val_000000.bin does not begin as a shard of tokens does"):
            T.load_text(tmp_path)
    path = copy("train_000000.bin", "train_000001.bin")
    whole = path.read_bytes()
    path.write_bytes(
        whole.replace(
            T.load_tokenizer("gpt2-32k").digest.encode(), T.load_tokenizer("gpt2").digest.encode())
    )
    with pytest.raises(BadInput, match="train_000001.bin has another vocabulary .gpt2-32k. than"):
        T.load_text(tmp_path)
    (tmp_path / "train_000000.bin").unlink()
    with pytest.raises(
            BadInput, match="train_000001.bin has another vocabulary .gpt2-32k. than gpt2-32k has here"):
        T.load_text(tmp_path)
    with pytest.raises(
            BadInput,
            match="was tokenised with gpt2-32k and you ask for --tokenizer gpt2: leave the flag out"):
        T.load_text(corpus / "out", "gpt2")


def test_text_that_is_none(corpus, tmp_path):
    for name, sentence in (
        ("sotoo",
         "--data sotoo is no .txt file, no folder of shards and none of sotu, shakespeare, text"),
        (tmp_path, "holds no shards of tokens: run python -m tools.prepare_text"),
        (corpus / "src", "holds no shards of tokens"),
        (corpus / "src" / "a.jsonl",
         "is no .txt file.*run python -m tools.prepare_text .*a.jsonl --out"),
    ):
        with pytest.raises(BadInput, match=sentence):
            T.load_text(name)


def test_training_reads_from_shards(corpus):
    """The batches of memory-mapped shards are those of the same tokens in memory, across shard
    boundaries."""
    data = T.load_text(corpus / "out")
    assert len(data.train.parts) > 2 and all(isinstance(part, np.memmap) for part in data.train.parts)
    memory = T.Tokens("memory", [data.train[:]])
    for (x, y), (x_, y_) in zip(T.train_batches(data.train, 30_000, 4, 0, 0, 5),
                                T.train_batches(memory, 30_000, 4, 0, 0, 5), strict=True):
        assert torch.equal(x, x_) and torch.equal(y, y_)


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"shards": "2"}', "\x00"])
def test_a_damaged_manifest_is_named(tmp_path, content):
    write_text(tmp_path / "a.txt", 60_000)
    prepare(tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", "bytes", "--workers", 1)
    (tmp_path / "out" / "manifest.json").write_text(content, encoding="utf-8")
    for call in (lambda: T.load_text(tmp_path / "out"),
                 lambda: prepare(tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", "bytes")):
        with pytest.raises(BadInput, match="manifest.json is damaged: prepare the text again"):
            call()


def test_a_folder_in_the_place_of_a_shard(tmp_path):
    write_text(tmp_path / "a.txt", 60_000)
    prepare(tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", "bytes", "--workers", 1)
    shard = tmp_path / "out" / "train_000000.bin"
    shard.unlink()
    shard.mkdir()
    with pytest.raises(BadInput, match="train_000000.bin does not begin as a shard"):
        T.load_text(tmp_path / "out")


# -------------------------------------------------------------------------------------------------------
# what people's folders hold

@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2-32k"])
def test_no_corpus_goes_without_validation(tmp_path, tokenizer, capsys):
    """Alike documents, few, one: the last share of the tokens is validated on, and a note says so.
    Nothing is lost, and the same command again changes nothing."""
    alike = [f"The same document. {'words ' * 60}"] * 600
    for name, texts, val in (("alike", alike, 0.05), ("few", [f"{i} " * 3000 for i in range(3)], 0.01),
                             ("one", ["Some words. " * 500], 0.2)):
        source, out = write_jsonl(tmp_path / f"{name}.jsonl", texts), tmp_path / name
        command = [source, "--out", out, "--tokenizer", tokenizer, "--val", val, "--shard-tokens", 1e5,
                   "--workers", 1]
        prepare(*command)
        data, found = T.load_text(out), capsys.readouterr().out
        total = len(data.train) + len(data.val)
        assert len(data.val) == pytest.approx(val * total, abs=4) and len(data.val) >= 2
        assert data.note and f"note: {data.note}" in found
        joined = lambda tokens: data.tokenizer.decode(
            i for i in tokens[:] if i != data.tokenizer.separator)
        assert joined(data.train) + joined(data.val) == "".join(texts)
        before = shards(out)
        prepare(*command)
        assert shards(out) == before and T.load_text(out).note == data.note
        prepare(*command, "--fresh")
        assert shards(out) == before
    prepare(tmp_path / "one.jsonl", "--out", tmp_path / "none", "--val", 0, "--workers", 1)
    assert len(T.load_text(tmp_path / "none").val) == 0 and T.load_text(tmp_path / "none").note == ""


@pytest.mark.parametrize("stop", range(1, 10))
def test_a_second_split_that_is_killed_continues_to_the_same_bytes(tmp_path, stop, monkeypatch):
    """Killed at any rename or removal of the second pass, as an exception that nothing catches."""
    source = write_jsonl(tmp_path / "a.jsonl", [f"The same document. {'words ' * 200}"] * 160)
    command = [source, "--tokenizer", "bytes", "--val", 0.3, "--shard-tokens", 1e5, "--workers", 1,
               "--out"]
    prepare(*command, tmp_path / "whole")
    calls, replace, remove = [], os.replace, P.remove_shards

    def count(function):
        def counted(*arguments):
            calls.append(function)
            if len(calls) == stop:
                raise KeyboardInterrupt
            return function(*arguments)
        return counted
    monkeypatch.setattr(os, "replace", count(replace))
    monkeypatch.setattr(P, "remove_shards", count(remove))
    with pytest.raises(KeyboardInterrupt):
        prepare(*command, tmp_path / "killed")
    monkeypatch.undo()
    prepare(*command, tmp_path / "killed")
    assert (
        shards(tmp_path / "killed") == shards(tmp_path / "whole") and len(shards(tmp_path / "whole")) > 3
    )


def test_long_white_space_does_not_end_it(tmp_path):
    """A document of 10^6 spaces, in each kind of file that can hold one."""
    texts = ["before" + " " * 10 ** 6 + "after", "plain"] + [f"document {i}" for i in range(100)]
    write_jsonl(tmp_path / "src" / "a.jsonl", texts)
    (tmp_path / "src" / "b.txt").write_text(texts[0], encoding="utf-8")
    prepare(tmp_path / "src", "--out", tmp_path / "out", "--workers", 1, "--val", 0)
    data = T.load_text(tmp_path / "out")
    found = documents(data.train, data.tokenizer)
    assert texts[0] in found and "".join(found).count(texts[0]) == 2


def test_hidden_files_are_no_sources(tmp_path):
    """Those of macOS and of notebooks, and what lies in hidden folders; a folder that is named itself
    may be hidden."""
    source = tmp_path / ".corpus"
    for name in ("a.txt", "deep/b.txt", "._a.txt", ".ipynb_checkpoints/a-checkpoint.txt",
                 "deep/.cache/c.jsonl"):
        write_text(source / name, 300)
    assert P.find_sources([str(source)]) == [str(source / "a.txt"), str(source / "deep" / "b.txt")]
    assert P.find_sources([str(source / "._a.txt")]) == [str(source / "._a.txt")]


def test_sources_in_other_encodings(tmp_path):
    """By byte-order mark or --encoding, text and JSON lines have the tokens of their UTF-8. Else the
    place is named."""
    text = "".join(f"Numéro {i}: déjà vu, çà et là.\n\n" for i in range(4000))
    rows = "".join(json.dumps({"text": f"Déjà {i}"}, ensure_ascii=False) + "\n" for i in range(500))

    def tokens(encoding, *flags):
        for name, content in (("a.txt", text), ("b.jsonl", rows)):
            (tmp_path / name).write_bytes(content.encode(encoding))
        prepare(tmp_path / "a.txt", tmp_path / "b.jsonl", "--out", tmp_path / "out", "--tokenizer",
                "bytes", "--val", 0, "--workers", 1, "--fresh", *flags)
        return T.load_text(tmp_path / "out").train[:].tolist()
    expected = tokens("utf-8")
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        assert tokens(encoding) == expected
    for encoding in ("latin-1", "cp1252", "utf-16-le"):
        assert tokens(encoding, "--encoding", encoding) == expected
    for place, name, lead in ((40_000, "a.txt", b"word " * 8000),
                              (18, "b.jsonl", b'{"text": "a"}\n{"te')):
        (tmp_path / name).write_bytes(lead + b"\xe9" + lead)
        with pytest.raises(
                BadInput, match=f"{name} is not utf-8: byte 0xe9 at offset {place}: save it as UTF-8"):
            prepare(tmp_path / name, "--out", tmp_path / name[0], "--tokenizer", "bytes", "--workers", 1)
        (tmp_path / name).write_text("good", encoding="utf-8")
    with pytest.raises(BadInput, match="--encoding klingon is unknown"):
        tokens("utf-8", "--encoding", "klingon")
