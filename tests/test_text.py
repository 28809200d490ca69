"""text.py and prepare.py: token ids known by heart, batches that cover the text, shards that survive a kill byte for byte; bad input gets one sentence."""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

import prepare as P
import text as T
from runtime import BadInput

ROOT = Path(__file__).resolve().parent.parent
NAMES = ["bytes", "gpt2", "gpt2-32k"]
UNICODE = "naïve Ωmega \U0001f642\u200d\u2640 中文字 \x00\x85\u00a0 x²½ it's  two\n\n \t tabs\r\n<|endoftext|> ü"


def numbered(n, parts=1):
    """Tokens whose value is their place."""
    return T.Tokens("numbers", np.array_split(np.arange(n, dtype=np.uint16), parts))


def write_text(path, size, seed=0):
    """About `size` bytes of paragraphs of random words; no two documents are equal."""
    words = np.random.default_rng(seed).integers(0, 10 ** 6, size // 7)
    text = "".join(f"{w:06d}" + ("\n\n" if i % 90 == 89 else " ") for i, w in enumerate(words))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return text


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    return path


def prepare(*arguments):
    P.main([*map(str, arguments)])


def shards(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).glob("*.bin"))}


def documents(tokens, tokenizer):
    """The documents of a Tokens: each must be followed by the separator."""
    ids = tokens[:]
    ends = np.flatnonzero(ids == tokenizer.separator)
    assert not len(ids) or ends[-1] == len(ids) - 1
    return [tokenizer.decode(part) for part in np.split(ids, ends + 1)[:-1] for part in [part[:-1]]]


# -------------------------------------------------------------------------------------------------------------- tokenizers
@pytest.mark.parametrize("string, ids", [
    ("Hello world", [15496, 995]), (" the", [262]), ("Hello, world!", [15496, 11, 995, 0]), ("I'm", [40, 1101]), ("\n", [198]), ("\n\n", [628]), (" ", [220]),
    ("The quick brown fox jumps over the lazy dog", [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290]), ("\x00", [188]), ("~", [93]), ("", []),
    ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29])])
def test_gpt2_ids_by_heart(string, ids):
    """Ids of the published GPT-2. The last is its separator spelt out in a text, which is no separator."""
    tokenizer = T.load_tokenizer("gpt2")
    assert tokenizer.encode(string) == ids == tokenizer.array(string).tolist()
    assert (tokenizer.vocab_size, tokenizer.separator, tokenizer.decode([50256])) == (50257, 50256, "<|endoftext|>")


@pytest.mark.parametrize("name, size", [("bytes", 257), ("gpt2", 50257), ("gpt2-32k", 32000)])
def test_vocabulary_is_complete(name, size):
    """Exactly that many ids: each is another token, the last is the separator, and every single byte has one."""
    tokenizer = T.load_tokenizer(name)
    assert (tokenizer.vocab_size, tokenizer.separator) == (size, size - 1)
    if name != "bytes":
        tokens = [tokenizer.encoding.decode_single_token_bytes(i) for i in range(size)]
        assert len(set(tokens)) == size and tokens[-1] == b"<|endoftext|>" and set(map(len, tokens[:256])) == {1}


def test_bpe_merges_as_a_plain_loop_does():
    """A second implementation: while two neighbours are a line of the merges file, join the pair of the earliest line. Also with fewer merges."""
    lines = (ROOT / "data" / "gpt2_vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    assert len(lines) == 50000
    for name, merges in (("gpt2", 50000), ("gpt2-32k", 31743)):
        rank, tokenizer = {tuple(line.split(" ")): i for i, line in enumerate(lines[:merges])}, T.load_tokenizer(name)
        for word in ["Government", " unprecedented", " counterproductive", "zzyzx", " Rumpelstiltskin", " informants", "aaaaaaaaa", " Collider", "Massachusetts"]:
            parts = list(word.replace(" ", "Ġ"))                 # ASCII letters stand for themselves in the file
            while pairs := [(rank[pair], i) for i, pair in enumerate(zip(parts, parts[1:])) if pair in rank]:
                i = min(pairs)[1]
                parts[i:i + 2] = [parts[i] + parts[i + 1]]
            assert [tokenizer.decode([i]) for i in tokenizer.encode(word)] == [p.replace("Ġ", " ") for p in parts]


def test_pieces_are_those_of_the_published_pattern():
    regex = pytest.importorskip("regex")
    published = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    sample = (ROOT / "data" / "shakespeare_1mb.txt").read_text()[:50000] + UNICODE + " we'll 'tis don't I'VE \n \n x   \t"
    assert regex.findall(T.GPT2_PIECES, sample) == regex.findall(published, sample)


@pytest.mark.parametrize("name", NAMES)
def test_any_unicode_goes_and_comes_back(name):
    tokenizer = T.load_tokenizer(name)
    ids = tokenizer.encode(UNICODE)
    assert tokenizer.decode(ids) == tokenizer.decode(torch.tensor(ids)) == UNICODE and max(ids) < tokenizer.separator
    assert tokenizer.array(UNICODE).tolist() == ids and tokenizer.array("").tolist() == [] and tokenizer.array("a").dtype == np.uint16
    assert tokenizer.decode(tokenizer.encode("half \ud83d pair")) == "half \ufffd pair"
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("\U0001f642")[:-1])                       # an emoji cut short
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.separator]) == "a<|endoftext|>"


def test_digest_tells_vocabularies_apart(monkeypatch):
    digests = {T.load_tokenizer(name).digest for name in NAMES}
    assert len(digests) == 3 and T.load_tokenizer.__wrapped__("gpt2").digest in digests
    ranks = T.gpt2_ranks(31999)
    ranks[b" the"], ranks[b" and"] = ranks[b" and"], ranks[b" the"]
    monkeypatch.setattr(T, "gpt2_ranks", lambda count: ranks)
    assert T.load_tokenizer.__wrapped__("gpt2-32k").digest not in digests


def test_tokenizers_that_cannot_be_had(monkeypatch):
    with pytest.raises(BadInput, match="--tokenizer 'gpt5' is unknown: choose one of bytes, gpt2, gpt2-32k, r50k_base"):
        T.load_tokenizer("gpt5")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: (_ for _ in ()).throw(ConnectionError("no route")))
    with pytest.raises(BadInput, match=r"--tokenizer r50k_base cannot be downloaded \(ConnectionError\): check the network, or use gpt2"):
        T.load_tokenizer("r50k_base")
    ranks = {bytes([b]): b for b in range(256)}
    large = tiktoken.Encoding("large", pat_str=r"\S+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 2 ** 16})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: large)
    with pytest.raises(BadInput, match="--tokenizer o200k_base has 65,537 tokens and the shards hold 16 bits"):
        T.load_tokenizer("o200k_base")


# ---------------------------------------------------------------------------------------------------------------- in memory
@pytest.mark.parametrize("name, files", [("sotu", ["sotu_tail_2mb.txt"]), ("shakespeare", ["shakespeare_1mb.txt"]), ("text", ["sotu_tail_2mb.txt", "shakespeare_1mb.txt"])])
def test_embedded_text_is_whole_and_split_by_document(name, files):
    """Train and val together are the documents, in order; each on the side of its hash; about a tenth in val."""
    data = T.load_text(name)
    assert data.tokenizer.name == "bytes" and data.name == name
    train, val = documents(data.train, data.tokenizer), documents(data.val, data.tokenizer)
    assert not set(train) & set(val) and not any(T.is_val(d, 0.1) for d in train) and all(T.is_val(d, 0.1) for d in val)
    assert 0.08 < len(data.val) / (len(data.train) + len(data.val)) < 0.14
    train, val, joined = iter(train), iter(val), ""
    for file in files:
        content = (ROOT / "data" / file).read_bytes()
        for document in T.split_text(content, min(T.DOCUMENT, len(content) // 100)):
            joined += next(val if T.is_val(document.decode(), 0.1) else train)
    assert joined == "".join((ROOT / "data" / f).read_bytes().decode() for f in files) and not [*train, *val]


def test_embedded_text_in_another_vocabulary():
    """The documents of both sides are the same under any tokenizer."""
    by_bytes, by_bpe = T.load_text("shakespeare"), T.load_text("shakespeare", "gpt2-32k")
    assert documents(by_bytes.val, by_bytes.tokenizer) == documents(by_bpe.val, by_bpe.tokenizer)
    assert len(by_bpe.val) < len(by_bytes.val) / 2.5


def test_a_txt_file_short_enough_to_be_one_document_still_has_both_sides(tmp_path):
    text = write_text(tmp_path / "a.txt", 9000)
    data = T.load_text(tmp_path / "a.txt")
    assert 0.02 < len(data.val) / len(text) < 0.3 and sorted("".join(documents(data.train, data.tokenizer) + documents(data.val, data.tokenizer))) == sorted(text)


def test_cuts_prefer_structure_and_never_break_a_character():
    text = b"a" * 9 + b"\n" + b"b" * 5 + b"\r\n\r\n" + b"c" * 20
    assert T.cut(text, 5, 25) == 19 and T.cut(text, 5, 14) == 10 and T.cut(text, 11, 14) == 14 and T.cut(text, 100, 200) == len(text)
    assert T.cut(b"One. Two three", 2, 12) == 5 and T.cut(b"One, two, three", 2, 12) == 5
    for size in (5, 6, 7, 64):
        parts = list(T.split_text("\U0001f642日本語é".encode() * 40, size))
        assert b"".join(parts).decode() == "\U0001f642日本語é" * 40 and all(p.decode() for p in parts)


# ------------------------------------------------------------------------------------------------------------------ tokens
def test_tokens_read_across_parts():
    """Every slice of 23 numbers in 5 parts of unequal length, one empty, is the slice of the whole."""
    whole = np.arange(23, dtype=np.uint16)
    tokens = T.Tokens("five", np.split(whole, [2, 3, 3, 17]))
    assert len(tokens) == 23
    for i in range(-1, 25):
        for j in range(-1, 25):
            assert tokens[i:j].tolist() == whole[i:j].tolist() and tokens[i:j].dtype == np.uint16
    assert tokens[:].tolist() == whole.tolist() and T.Tokens("none", [])[0:3].tolist() == [] and len(T.Tokens("none", [])) == 0


# ----------------------------------------------------------------------------------------------------------------- batches
def starts(batches):
    """First input of every row, after checking that rows are consecutive numbers and y is x shifted by one."""
    found = []
    for x, y in batches:
        assert x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous()
        assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(x.shape[1]))
        found.append(x[:, 0].tolist())
    return found


@pytest.mark.parametrize("n, block", [(9, 8), (10, 8), (15, 8), (16, 8), (17, 8), (31, 8), (100, 8), (50, 7), (2, 1), (3, 1), (40, 1)])
def test_every_token_is_an_input_sometime_and_none_lies_past_the_end(n, block):
    """By brute force over 40 blocks' worth of epochs: inputs are 0..n-2, targets 1..n-1, all of them; windows of an epoch do not overlap."""
    tokens, count = numbered(n, parts=3), T.windows_per_epoch(numbered(n), block)
    assert max(1, (n - 1) // block - 1) <= count <= (n - 1) // block
    inputs, targets, phases = set(), set(), set()
    for epoch in T.train_batches(tokens, block, count, seed=1, first_step=0, last_step=40 * block):
        first = sorted(epoch[0][:, 0].tolist())
        assert first == list(range(first[0], first[0] + count * block, block))
        phases.add(first[0])
        inputs |= set(epoch[0].flatten().tolist())
        targets |= set(epoch[1].flatten().tolist())
    assert inputs == set(range(n - 1)) and targets == set(range(1, n))
    assert phases == set(range(n - count * block)) and len(phases) >= min(block, n - block)


@pytest.mark.parametrize("batch, block, n", [(12, 8, 700), (12, 8, 60), (24, 8, 9), (12, 100, 5000)])
def test_ranks_and_micro_steps_share_out_the_one_batch(batch, block, n):
    """Also where a batch reaches into the next epoch, or holds several of them. Order within the batch included."""
    tokens = numbered(n)
    whole = starts(T.train_batches(tokens, block, batch, 5, 0, 9))
    assert len(whole) == 9 and all(len(rows) == batch for rows in whole)
    for world, micro in ((2, 1), (1, 3), (2, 3), (4, 1), (3, 4)):
        ranks = [starts(T.train_batches(tokens, block, batch, 5, 0, 9, rank, world, micro)) for rank in range(world)]
        assert all(len(rows) == 9 * micro for rows in ranks)
        assert [sum((rows[step * micro + m] for rows in ranks for m in range(micro)), []) for step in range(9)] == whole


def test_a_batch_is_a_function_of_seed_and_step():
    tokens = numbered(1000)
    whole = starts(T.train_batches(tokens, 8, 10, 3, 0, 60))                      # 124 windows: epochs end within batches
    assert whole == starts(T.train_batches(tokens, 8, 10, 3, 0, 60))
    for step in (1, 12, 13, 37):
        assert starts(T.train_batches(tokens, 8, 10, 3, step, step + 5)) == whole[step:step + 5]
    assert whole[:5] != starts(T.train_batches(tokens, 8, 10, 4, 0, 5))
    epochs = np.concatenate(whole)[:496].reshape(4, 124)
    assert all(len(set(e)) == 124 for e in epochs.tolist()) and len({tuple(e) for e in epochs.tolist()}) == 4 and len(set(epochs[:, 0] % 8)) > 1


def test_shuffled_windows_are_spread_over_the_text():
    """A batch of 500 of 10,000 windows: mean of the starts as of a uniform draw, within four standard errors."""
    rows = np.array(starts(T.train_batches(numbered(60001), 6, 500, 0, 0, 1))[0])
    assert abs(rows.mean() / 60000 - 0.5) < 4 * np.sqrt(1 / 12 / 500)


@pytest.mark.parametrize("n", [2, 3, 8, 9, 10, 16, 17, 100, 101])
@pytest.mark.parametrize("world, micro_batch", [(1, 1), (1, 4), (3, 2), (5, 100)])
def test_evaluation_counts_every_target_once(n, world, micro_batch):
    targets = []
    for rank in range(world):
        for x, y in T.eval_batches(numbered(n, parts=2), 8, micro_batch, rank, world):
            assert len(x) <= micro_batch and (x.shape[1] == 8 or (x.shape[0] == 1 and x.shape[1] == (n - 1) % 8))
            assert torch.equal(y, x + 1)
            targets += y.flatten().tolist()
    assert sorted(targets) == list(range(1, n))


def test_limited_evaluation_is_spread_evenly():
    """10 of 1,000 windows: every hundredth; a limit beyond what there is changes nothing."""
    tokens = numbered(8 * 1000 + 1)
    assert sum(starts(T.eval_batches(tokens, 8, 3, limit=10)), []) == [800 * i for i in range(10)]
    ranks = [sum(starts(T.eval_batches(tokens, 8, 3, rank, 4, limit=10)), []) for rank in range(4)]
    assert sorted(sum(ranks, [])) == [800 * i for i in range(10)] and max(map(len, ranks)) - min(map(len, ranks)) <= 1
    assert starts(T.eval_batches(numbered(30), 8, 3, limit=9)) == starts(T.eval_batches(numbered(30), 8, 3)) == [[0, 8, 16], [24]]


def test_batches_that_cannot_be_made():
    """At the call, not at the first batch."""
    with pytest.raises(BadInput, match="numbers has 8 tokens and --block-size 8 needs at least 9: lower it"):
        T.train_batches(numbered(8), 8, 1, 0, 0, 1)
    with pytest.raises(BadInput, match=r"--batch-size 10 must be a multiple of 6 \(2 processes x 3 micro-batches\)"):
        T.train_batches(numbered(100), 8, 10, 0, 0, 1, world_size=2, micro_steps=3)
    with pytest.raises(BadInput, match="numbers has 1 tokens, too few to evaluate on"):
        T.eval_batches(numbered(1), 8, 1)


# ------------------------------------------------------------------------------------------------------------------ shards
@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of text of all plain kinds, nested, and its shards by gpt2-32k (made with one process)."""
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "src" / "b" / "deep.txt", 1_100_000, seed=1)
    write_text(folder / "src" / "c.txt", 40_000, seed=2)
    write_jsonl(folder / "src" / "a.jsonl", [f"row {i} " * (i % 50 + 1) + UNICODE for i in range(900)] + ["", "\ud83d alone"])
    (folder / "src" / "notes.md").write_text("no source")
    prepare(folder / "src", "--out", folder / "out", "--shard-tokens", 1e5, "--val", 0.1, "--workers", 1)
    return folder


def test_shards_hold_every_document_once_followed_by_a_separator(corpus):
    data = T.load_text(corpus / "out")
    assert data.tokenizer.name == "gpt2-32k" and len(shards(corpus / "out")) >= 8 and not list((corpus / "out").glob("*.tmp"))
    train, val = documents(data.train, data.tokenizer), documents(data.val, data.tokenizer)
    assert not set(train) & set(val) and all(T.is_val(d, 0.1) for d in val if "\ufffd" not in d) and not any(T.is_val(d, 0.1) for d in train if "\ufffd" not in d)
    rows = [d for d in train + val if d.startswith("row ")]
    assert sorted(rows) == sorted(f"row {i} " * (i % 50 + 1) + UNICODE for i in range(900)) and "\ufffd alone" in train + val
    rest = [d for d in train + val if not d.startswith("row ") and "alone" not in d]
    texts = [(corpus / "src" / f).read_text() for f in ("b/deep.txt", "c.txt")]
    assert sum(map(len, rest)) == sum(map(len, texts)) and all(any(d in t for t in texts) for d in rest) and len(set(rest)) == len(rest)
    assert all(len(d) <= 2 * T.DOCUMENT for d in rest) and 0.05 < len(val) / len(train) < 0.2
    assert np.array_equal(T.load_text(corpus / "out", "gpt2-32k").train[1000:200_000], data.train[1000:200_000])


def test_two_processes_write_the_same_bytes(corpus, tmp_path, capsys):
    prepare(corpus / "src", "--out", tmp_path, "--shard-tokens", 1e5, "--val", 0.1, "--workers", 2)
    assert shards(tmp_path) == shards(corpus / "out") and "shards were there" in capsys.readouterr().out


def test_a_killed_run_continues_to_the_same_bytes(corpus, tmp_path):
    """Killed between the rename of a val shard and that of its train shard, the worst moment: one whole pair, one half, one file aside."""
    arguments = [str(corpus / "src"), "--out", str(tmp_path), "--shard-tokens", "1e5", "--val", "0.1", "--workers", "1"]
    code = ("import os, signal, prepare\nreal, calls = os.replace, []\ndef replace(a, b):\n    calls.append(b)\n"
            f"    os.kill(os.getpid(), signal.SIGKILL) if len(calls) == 5 else real(a, b)\nos.replace = replace\nprepare.main({arguments})")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL and list(shards(tmp_path)) == ["train_000000.bin", "val_000000.bin", "val_000001.bin"]
    assert list(tmp_path.glob("*.tmp"))
    with pytest.raises(BadInput, match=r"has 3 of \d+ shards: run the prepare command that began it again"):
        T.load_text(tmp_path)
    kept = (tmp_path / "train_000000.bin").stat().st_mtime_ns
    P.main(arguments)
    assert shards(tmp_path) == shards(corpus / "out") and (tmp_path / "train_000000.bin").stat().st_mtime_ns == kept and not list(tmp_path.glob("*.tmp"))


def test_another_command_is_refused_and_fresh_starts_over(tmp_path, capsys):
    source, out = tmp_path / "a.txt", tmp_path / "out"
    write_text(source, 300_000)
    command = [source, "--out", out, "--tokenizer", "bytes", "--val", 0.2, "--shard-tokens", 1e5, "--workers", 1]
    prepare(*command)
    before = shards(out)
    prepare(*command)
    assert shards(out) == before and "(4 of 4 shards were there)" in capsys.readouterr().out
    with pytest.raises(BadInput, match="was begun with tokenizer bytes and now it is gpt2: give the same, --fresh to start over, or another --out"):
        prepare(*command, "--tokenizer", "gpt2")
    with pytest.raises(BadInput, match=r"was begun with val 0.2 and now it is 0.1"):
        prepare(*command, "--val", 0.1)
    other = tmp_path / "b.txt"
    other.write_text("more\n")
    with pytest.raises(BadInput, match="b.txt' is new, changed or gone since"):
        prepare(other, *command)
    with source.open("a") as f:
        f.write("and more")
    with pytest.raises(BadInput, match="a.txt' is new, changed or gone since"):
        prepare(*command)
    assert shards(out) == before
    (out / "keep.txt").write_text("not a shard")
    prepare(*command, "--fresh", "--val", 0)
    data = T.load_text(out)
    assert len(data.val) == 0 and "".join(documents(data.train, data.tokenizer)) == source.read_text() and (out / "keep.txt").exists()
    (out / "manifest.json").unlink()
    with pytest.raises(BadInput, match="holds shards but no manifest.json"):
        prepare(*command)


@pytest.mark.parametrize("target", [66_000, 70_001, 300_000, 10 ** 9])
def test_pieces_of_a_file_partition_it(tmp_path, target):
    """However a .txt or .jsonl file is shared out, every byte of the one and every row of the other comes once, in order."""
    text, rows = write_text(tmp_path / "a.txt", 400_000), [f"{i} " * (i % 97) for i in range(2000)]
    rows = [f"{i:06d}".ljust(100 - len('{"id": , "text": ""}\n') - len(str(i))) for i in range(1500)] + rows      # lines of 100 bytes: some pieces begin with one
    write_jsonl(tmp_path / "b.jsonl", rows)
    pieces = [p for unit in P.make_units([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], target) for p in unit]
    parts = [d for p in pieces if p.path.endswith(".txt") for d in P.read_txt(p)]
    assert "".join(parts) == text and all(d[-1].isspace() for d in parts)         # also where a piece ends, no word is cut
    assert [r for p in pieces if p.path.endswith(".jsonl") for r in P.read_jsonl(p)] == rows
    units = P.make_units([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], target)
    assert all(sum(p.size for p in unit) <= target for unit in units)


@pytest.mark.parametrize("line", ['{"text": "cut', '{"body": "other field"}', '["list"]', '{"text": 5}', "\xff"])
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line):
    path = write_jsonl(tmp_path / "a.jsonl", [f"{i} " * 50 for i in range(1500)])
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:1234], line.encode("latin-1"), *lines[1234:]]))
    with pytest.raises(BadInput, match="a.jsonl line 1235 is no JSON object with a string named text"):
        prepare(path, "--out", tmp_path / "out", "--tokenizer", "bytes", "--shard-tokens", 1e5, "--workers", 1)
    assert not list((tmp_path / "out").glob("*.tmp")) and len(list((tmp_path / "out").glob("train_*.bin"))) == 2   # what was whole is kept for the restart


def test_parquet(tmp_path):
    """FineWeb-Edu's layout: nested folders, several row groups, a text column among others; nulls are left out."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    rows = [f"row {i} " * 40 for i in range(1000)]
    for k, part in enumerate((rows[:600], rows[600:])):
        path = tmp_path / "src" / "data" / f"CC-{k}" / "train-00000.parquet"
        path.parent.mkdir(parents=True)
        table = pyarrow.table({"text": [*part, None], "score": [1.0] * (len(part) + 1)})
        pyarrow.parquet.write_table(table, path, row_group_size=150)
    prepare(tmp_path / "src", "--out", tmp_path / "out", "--tokenizer", "bytes", "--shard-tokens", 1e5, "--val", 0.2, "--workers", 1)
    data = T.load_text(tmp_path / "out")
    assert sorted(documents(data.train, data.tokenizer) + documents(data.val, data.tokenizer)) == sorted(rows) and len(shards(tmp_path / "out")) > 2
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a"]}), tmp_path / "b.parquet")
    with pytest.raises(BadInput, match="b.parquet has no column named text that holds strings"):
        prepare(tmp_path / "b.parquet", "--out", tmp_path / "out2")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 nothing else")
    with pytest.raises(BadInput, match="c.parquet is not a readable parquet file"):
        prepare(tmp_path / "c.parquet", "--out", tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match="a.parquet needs the package pyarrow: pip install pyarrow"):
        prepare(tmp_path, "--out", tmp_path / "out")


def test_sources_that_are_none(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.txt").write_text("")
    (tmp_path / "a.csv").write_text("a,b")
    out = ["--out", tmp_path / "out", "--workers", 1]
    for source, sentence in (("nowhere", "source '.*nowhere' does not exist"), ("empty", r"source '.*empty' holds no .txt, .jsonl, .parquet file"),
                             ("a.csv", "source '.*a.csv' is no .txt"), ("zero.txt", "source '.*zero.txt' is empty")):
        with pytest.raises(BadInput, match=sentence):
            prepare(tmp_path / source, *out)
    assert not (tmp_path / "out").exists()
    write_text(tmp_path / "b.txt", 1000)
    with pytest.raises(BadInput, match="--out .*zero.txt cannot be written .*: choose a folder that can"):
        prepare(tmp_path / "b.txt", "--out", tmp_path / "zero.txt")


def test_shards_that_are_damaged_or_mixed(corpus, tmp_path):
    def copy(*names):
        for old in tmp_path.glob("*"):
            old.unlink()
        for name in names:
            (tmp_path / name).write_bytes((corpus / "out" / name).read_bytes())
        return tmp_path / names[-1]

    copy("train_000000.bin", "train_000001.bin")                  # without a manifest: shards that were moved
    assert T.load_text(tmp_path).train[:].tolist() == T.load_text(corpus / "out").train[:len(T.load_text(tmp_path).train)].tolist()
    path = copy("train_000000.bin", "val_000000.bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(BadInput, match=r"val_000000.bin is damaged, it should hold ([\d,]+) tokens and holds (?!\1)[\d,]+: delete it and run prepare again"):
        T.load_text(tmp_path)
    for content in (b"", b"\x89tok", b"PK\x03\x04" + bytes(500)):
        path.write_bytes(content)
        with pytest.raises(BadInput, match="val_000000.bin does not begin as a shard of tokens does"):
            T.load_text(tmp_path)
    path = copy("train_000000.bin", "train_000001.bin")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(T.load_tokenizer("gpt2-32k").digest.encode(), T.load_tokenizer("gpt2").digest.encode()))
    with pytest.raises(BadInput, match="train_000001.bin has another vocabulary .* than train_000000.bin"):
        T.load_text(tmp_path)
    (tmp_path / "train_000000.bin").unlink()
    with pytest.raises(BadInput, match="was tokenised with another vocabulary of the name gpt2-32k than today's"):
        T.load_text(tmp_path)
    with pytest.raises(BadInput, match="was tokenised with gpt2-32k and you ask for --tokenizer gpt2: leave the flag out"):
        T.load_text(corpus / "out", "gpt2")


def test_text_that_is_none(corpus, tmp_path):
    for name, sentence in (("sotoo", "--data 'sotoo' is neither a file, a folder nor one of sotu, shakespeare, text"), (tmp_path, "holds no shards of tokens: run python prepare.py"),
                           (corpus / "src", "holds no shards of tokens"), (corpus / "src" / "a.jsonl", "neither a .txt file nor a folder of shards: run python prepare.py")):
        with pytest.raises(BadInput, match=sentence):
            T.load_text(name)


def test_training_reads_from_shards(corpus):
    """The batches of memory-mapped shards are those of the same tokens in memory, across shard boundaries."""
    data = T.load_text(corpus / "out")
    assert len(data.train.parts) > 2 and all(isinstance(part, np.memmap) for part in data.train.parts)
    memory = T.Tokens("memory", [data.train[:]])
    for (x, y), (x_, y_) in zip(T.train_batches(data.train, 30_000, 4, 0, 0, 5), T.train_batches(memory, 30_000, 4, 0, 0, 5), strict=True):
        assert torch.equal(x, x_) and torch.equal(y, y_)


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"shards": "2"}', "\x00"])
def test_a_damaged_manifest_is_named(tmp_path, content):
    write_text(tmp_path / "a.txt", 60_000)
    prepare(tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", "bytes", "--workers", 1)
    (tmp_path / "out" / "manifest.json").write_text(content)
    for call in (lambda: T.load_text(tmp_path / "out"), lambda: prepare(tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", "bytes")):
        with pytest.raises(BadInput, match="manifest.json is not what prepare.py wrote: prepare the text again"):
            call()


def test_a_shard_of_another_vocabulary_size_and_a_folder_in_its_place(tmp_path):
    write_text(tmp_path / "a.txt", 60_000)
    prepare(tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", "bytes", "--workers", 1)
    shard = tmp_path / "out" / "train_000000.bin"
    data = bytearray(shard.read_bytes())
    data[8:12] = (5).to_bytes(4, "little")
    shard.write_bytes(data)
    with pytest.raises(BadInput, match="train_000000.bin says that bytes has 5 tokens, and it has 257"):
        T.load_text(tmp_path / "out")
    shard.unlink()
    shard.mkdir()
    with pytest.raises(BadInput, match="train_000000.bin does not begin as a shard"):
        T.load_text(tmp_path / "out")
