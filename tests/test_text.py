"""text.py: token ids known by heart, splits that hold, batches that cover the text; bad input gets one
sentence."""
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import runtime
import text as T
from runtime import BadInput

ROOT = Path(__file__).resolve().parent.parent
NAMES = ["bytes", "gpt2", "gpt2-32k"]
UNICODE = ("naïve Ωmega \U0001f642\u200d\u2640 中文字 \x00\x85\u00a0 x²½ it's  two"
           "\n\n \t tabs\r\n<|endoftext|> ü")


def numbered(n, parts=1):
    """Tokens whose value is their place."""
    return T.Tokens("numbers", np.array_split(np.arange(n, dtype=np.uint16), parts))


def write_text(path, size, seed=0):
    """About `size` bytes of paragraphs of random words; no two documents are equal."""
    words = np.random.default_rng(seed).integers(0, 10 ** 6, size // 7)
    text = "".join(f"{w:06d}" + ("\n\n" if i % 90 == 89 else " ") for i, w in enumerate(words))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return text


def documents(tokens, tokenizer):
    """The documents of a Tokens: each must be followed by the separator."""
    ids = tokens[:]
    ends = np.flatnonzero(ids == tokenizer.separator)
    assert not len(ids) or ends[-1] == len(ids) - 1
    return [tokenizer.decode(part) for part in np.split(ids, ends + 1)[:-1] for part in [part[:-1]]]


# -------------------------------------------------------------------------------------------------------
# -------- tokenizers
@pytest.mark.parametrize(
    "string, ids",
    [
        ("Hello world", [15496, 995]),
        (" the", [262]),
        ("Hello, world!", [15496, 11, 995, 0]),
        ("I'm", [40, 1101]),
        ("\n", [198]),
        ("\n\n", [628]),
        (" ", [220]),
        ("The quick brown fox jumps over the lazy dog",
         [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290]),
        ("\x00", [188]),
        ("~", [93]),
        ("", []),
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
    ],
)
def test_gpt2_ids_by_heart(string, ids):
    """Ids of the published GPT-2. The last is its separator spelt out in a text, which is no
    separator."""
    tokenizer = T.load_tokenizer("gpt2")
    assert tokenizer.encode(string) == ids == tokenizer.array(string).tolist()
    assert (tokenizer.vocab_size, tokenizer.separator, tokenizer.decode([50256])) == (
        50257, 50256, "<|endoftext|>")


@pytest.mark.parametrize("name, size", [("bytes", 257), ("gpt2", 50257), ("gpt2-32k", 32000)])
def test_vocabulary_is_complete(name, size):
    """Exactly that many ids: each is another token, the last is the separator, and every single byte
    has one."""
    tokenizer = T.load_tokenizer(name)
    assert (tokenizer.vocab_size, tokenizer.separator) == (size, size - 1)
    if name != "bytes":
        tokens = [tokenizer.encoding.decode_single_token_bytes(i) for i in range(size)]
        assert (len(set(tokens)) == size and tokens[-1] == b"<|endoftext|>"
                and set(map(len, tokens[:256])) == {1})


def test_bpe_merges_as_a_plain_loop_does():
    """A second implementation: while two neighbours are a line of the merges file, join the pair of the
    earliest line. Also with fewer merges."""
    lines = (ROOT / "data" / "gpt2_vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    assert len(lines) == 50000
    for name, merges in (("gpt2", 50000), ("gpt2-32k", 31743)):
        rank, tokenizer = ({tuple(line.split(" ")): i for i, line in enumerate(lines[:merges])},
                           T.load_tokenizer(name))
        for word in ["Government", " unprecedented", " counterproductive", "zzyzx", " Rumpelstiltskin",
                     " informants", "aaaaaaaaa", " Collider", "Massachusetts"]:
            # ASCII letters stand for themselves in the file
            parts = list(word.replace(" ", "Ġ"))
            while pairs := [
                    (rank[pair], i) for i, pair in enumerate(zip(parts, parts[1:])) if pair in rank]:
                i = min(pairs)[1]
                parts[i:i + 2] = [parts[i] + parts[i + 1]]
            assert [tokenizer.decode([i]) for i in tokenizer.encode(word)] == [
                p.replace("Ġ", " ") for p in parts]


def test_pieces_are_those_of_the_published_pattern():
    regex = pytest.importorskip("regex")
    published = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    sample = ((ROOT / "data" / "shakespeare_1mb.txt").read_text(encoding="utf-8")[:50000] + UNICODE
              + " we'll 'tis don't I'VE \n \n x   \t")
    assert regex.findall(T.GPT2_PIECES, sample) == regex.findall(published, sample)


@pytest.mark.parametrize("name", NAMES)
def test_any_unicode_goes_and_comes_back(name):
    tokenizer = T.load_tokenizer(name)
    ids = tokenizer.encode(UNICODE)
    assert (tokenizer.decode(ids) == tokenizer.decode(torch.tensor(ids)) == UNICODE
            and max(ids) < tokenizer.separator)
    assert (tokenizer.array(UNICODE).tolist() == ids and tokenizer.array("").tolist() == []
            and tokenizer.array("a").dtype == np.uint16)
    assert tokenizer.decode(tokenizer.encode("half \ud83d pair")) == "half \ufffd pair"
    # an emoji cut short
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("\U0001f642")[:-1])
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.separator]) == "a<|endoftext|>"


def test_digest_tells_vocabularies_apart(monkeypatch):
    digests = {T.load_tokenizer(name).digest for name in NAMES}
    assert len(digests) == 3 and T.load_tokenizer.__wrapped__("gpt2").digest in digests
    ranks = T.gpt2_ranks(31999)
    ranks[b" the"], ranks[b" and"] = ranks[b" and"], ranks[b" the"]
    monkeypatch.setattr(T, "gpt2_ranks", lambda count: ranks)
    assert T.load_tokenizer.__wrapped__("gpt2-32k").digest not in digests


def test_tokenizers_that_cannot_be_had():
    for name in ("gpt5", "r50k_base", ""):
        with pytest.raises(
                BadInput, match=f"--tokenizer {name} is unknown: use bytes, gpt2 or gpt2-32k"):
            T.load_tokenizer(name)


@pytest.mark.parametrize("white", [" ", "\n", " \n", "\u00a0", "\t \u2003"])
@pytest.mark.parametrize("name", NAMES)
def test_long_white_space_is_encoded(name, white):
    """10^6 of it: tiktoken's pattern overflows its stack there. Shorter white space has the tokens that
    it had."""
    tokenizer = T.load_tokenizer(name)
    text = "before it" + white * (10 ** 6 // len(white)) + " and after" + white * 70_000 + "end"
    ids = tokenizer.array(text)
    assert tokenizer.decode(ids) == text and ids.tolist() == tokenizer.encode(text)
    assert list(T.cut_long_space("a" * 10 ** 5 + white * 5 + "b")) == ["a" * 10 ** 5 + white * 5 + "b"]
    assert max(map(len, filter(str.isspace, T.cut_long_space(text)))) <= T.LONGEST_SPACE
    if name != "bytes":
        short = "word " * 20_000 + white * 500 + "x"             # long, but not of white space
        assert tokenizer.encode(short) == tokenizer.encoding.encode_ordinary(short)


# -------------------------------------------------------------------------------------------------------
# ---------- in memory
@pytest.mark.parametrize(
    "name, files",
    [("sotu", ["sotu_tail_2mb.txt"]), ("shakespeare", ["shakespeare_1mb.txt"]),
     ("text", ["sotu_tail_2mb.txt", "shakespeare_1mb.txt"])],
)
def test_embedded_text_is_whole_and_split_by_document(name, files):
    """Train and val together are the documents, in order; each on the side of its hash; about a tenth
    in val."""
    data = T.load_text(name)
    assert data.tokenizer.name == "bytes" and data.name == name
    train, val = documents(data.train, data.tokenizer), documents(data.val, data.tokenizer)
    assert (not set(train) & set(val) and not any(T.is_val(d, 0.1) for d in train)
            and all(T.is_val(d, 0.1) for d in val))
    assert 0.08 < len(data.val) / (len(data.train) + len(data.val)) < 0.14
    train, val, joined = iter(train), iter(val), ""
    for file in files:
        content = (ROOT / "data" / file).read_bytes()
        for document in T.split_text(content, min(T.DOCUMENT, len(content) // 100)):
            joined += next(val if T.is_val(document.decode(), 0.1) else train)
    assert joined == "".join((ROOT / "data" / f).read_bytes().decode() for f in files) and not [
        *train, *val]


def test_embedded_text_in_another_vocabulary():
    """The documents of both sides are the same under any tokenizer."""
    by_bytes, by_bpe = T.load_text("shakespeare"), T.load_text("shakespeare", "gpt2-32k")
    assert documents(by_bytes.val, by_bytes.tokenizer) == documents(by_bpe.val, by_bpe.tokenizer)
    assert len(by_bpe.val) < len(by_bytes.val) / 2.5


def test_a_txt_file_short_enough_to_be_one_document_still_has_both_sides(tmp_path):
    text = write_text(tmp_path / "a.txt", 9000)
    data = T.load_text(tmp_path / "a.txt")
    assert 0.02 < len(data.val) / len(text) < 0.3 and data.note == ""
    parts = documents(data.train, data.tokenizer) + documents(data.val, data.tokenizer)
    assert sorted("".join(parts)) == sorted(text)


def test_embedded_texts_keep_their_split():
    """Token for token: recorded runs were trained on it."""
    for name, train, val in (("sotu", 1_731_944, 269_478), ("shakespeare", 996_582, 103_516),
                             ("text", 2_728_526, 372_994)):
        data = T.load_text(name)
        assert (len(data.train), len(data.val), data.note) == (train, val, "")


OWN_TEXTS = {"one line": "The same line again and again. " * 3000, "alike": "A line.\n\n" * 50_000,
             "short": "Twenty words or so. " * 10, "tiny": "abcdefghij", "letters": "x" * 5000,
             "paragraphs": "".join(f"Paragraph {i}.\n\n" for i in range(30)),
             "wide": "\U0001f642日本語é" * 60}


@pytest.mark.parametrize("name", OWN_TEXTS)
def test_no_own_text_goes_without_validation(tmp_path, name):
    """However short or repetitive: a twentieth to a fifth is validated on, and a note says where hashes
    did not do it."""
    text = OWN_TEXTS[name]
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="\n")
    data = T.load_text(tmp_path / "a.txt")
    train, val = ("".join(documents(part, data.tokenizer)) for part in (data.train, data.val))
    assert 0.04 <= len(val.encode()) / len(text.encode()) <= 0.2 and len(data.val) >= 2
    if data.note:
        assert (
            train + val == text and "its last 10% is validated on" in data.note and "a.txt" in data.note)
    assert bool(data.note) or name in ("paragraphs", "wide")
    for x, y in T.eval_batches(data.val, 8, 4):
        assert torch.equal(x[:, 1:], y[:, :-1])


def test_a_text_in_another_encoding(tmp_path):
    """A byte-order mark is obeyed and is no text. Without one, what is not UTF-8 is refused, with its
    place."""
    text = "".join(f"Déjà vu, numéro {i}, “ça va”. \U0001f642\n\n" for i in range(300))
    path, expected = tmp_path / "a.txt", None
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        path.write_bytes(text.encode(encoding))
        data = T.load_text(path)
        expected = expected or data
        assert np.array_equal(data.train[:], expected.train[:]) and np.array_equal(
            data.val[:], expected.val[:])
    for encoding in ("utf-16-be", "utf-32-be"):
        path.write_bytes(("\ufeff" + text).encode(encoding))
        assert np.array_equal(T.load_text(path).train[:], expected.train[:])
    latin = text.replace("\U0001f642", "").replace("“", "").replace("”", "")
    path.write_bytes(latin.encode("latin-1"))
    with pytest.raises(BadInput, match=r"a.txt is not utf-8: byte 0xe9 at offset 1: save it as UTF-8"):
        T.load_text(path)
    data = T.load_text(path, encoding="latin-1")
    path.write_text(latin, encoding="utf-8", newline="\n")
    assert np.array_equal(T.load_text(path).train[:], data.train[:])
    for begin, place in ((b"\xef\xbb\xbfplain", 8), (b"x" * 50_000, 50_000)):
        path.write_bytes(begin + b"\xff and more")
        with pytest.raises(BadInput, match=f"a.txt is not utf-8: byte 0xff at offset {place}"):
            T.load_text(path)
    path.write_bytes(b"\xff\xfea\0\0\xd8")                      # half a pair in UTF-16
    with pytest.raises(BadInput, match="a.txt is not utf-16: byte 0x00 at offset 4"):
        T.load_text(path)
    with pytest.raises(BadInput, match="--encoding klingon is unknown"):
        T.load_text(path, encoding="klingon")


@pytest.mark.parametrize("name", T.DIGESTS)
def test_a_changed_embedded_file_is_refused(name, tmp_path, monkeypatch):
    """Other line ends, a byte more, a letter: each file that is read from data/ is checked."""
    content = (ROOT / "data" / name).read_bytes()
    monkeypatch.setattr(T, "ROOT", tmp_path)
    for changed in (content.replace(b"\n", b"\r\n"), content + b"\n", b"X" + content[1:]):
        (tmp_path / name).write_bytes(changed)
        with pytest.raises(BadInput, match=f"{name} was changed, perhaps in its line ends"):
            T.gpt2_ranks(300) if name.endswith("bpe") else T.load_text(name.split("_")[0])
    (tmp_path / name).write_bytes(content)
    assert T.read_embedded(name) == content


def test_git_leaves_the_data_alone(tmp_path):
    """A checkout with core.autocrlf holds the embedded files byte for byte, and sources with plain line
    ends."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "data").mkdir()
    content = {f"data/{name}": b"a\nb\n" for name in T.DIGESTS} | {
        "a.py": b"a\nb\n", "requirements.txt": b"a\nb\n"}
    content[".gitattributes"] = (ROOT / ".gitattributes").read_bytes()
    git("init", "-q")
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all")
    for name in content:
        (tmp_path / name).unlink()
    git("-c", "core.autocrlf=true", "checkout", "-f", "HEAD", "--", ".")
    assert all((tmp_path / name).read_bytes() == data for name, data in content.items())


def test_cuts_prefer_structure_and_never_break_a_character():
    text = b"a" * 9 + b"\n" + b"b" * 5 + b"\r\n\r\n" + b"c" * 20
    assert (T.find_cut(text, 5, 25) == 19 and T.find_cut(text, 5, 14) == 10
            and T.find_cut(text, 11, 14) == 14 and T.find_cut(text, 100, 200) == len(text))
    assert T.find_cut(b"One. Two three", 2, 12) == 5 and T.find_cut(b"One, two, three", 2, 12) == 5
    for size in (5, 6, 7, 64):
        parts = list(T.split_text("\U0001f642日本語é".encode() * 40, size))
        assert b"".join(parts).decode() == "\U0001f642日本語é" * 40 and all(p.decode() for p in parts)


# -------------------------------------------------------------------------------------------------------
# ------------ tokens
def test_tokens_read_across_parts():
    """Every slice of 23 numbers in 5 parts of unequal length, one empty, is the slice of the whole."""
    whole = np.arange(23, dtype=np.uint16)
    tokens = T.Tokens("five", np.split(whole, [2, 3, 3, 17]))
    assert len(tokens) == 23
    for i in range(-1, 25):
        for j in range(-1, 25):
            assert tokens[i:j].tolist() == whole[i:j].tolist() and tokens[i:j].dtype == np.uint16
    assert (tokens[:].tolist() == whole.tolist() and T.Tokens("none", [])[0:3].tolist() == []
            and len(T.Tokens("none", [])) == 0)


# -------------------------------------------------------------------------------------------------------
# ----------- batches
def starts(batches):
    """First input of every row, after checking that rows are consecutive numbers and y is x shifted by
    one."""
    found = []
    for x, y in batches:
        assert x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous()
        assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(x.shape[1]))
        found.append(x[:, 0].tolist())
    return found


@pytest.mark.parametrize(
    "n, block",
    [(9, 8), (10, 8), (15, 8), (16, 8), (17, 8), (31, 8), (100, 8), (50, 7), (2, 1), (3, 1), (40, 1)])
def test_every_token_is_an_input_sometime_and_none_lies_past_the_end(n, block):
    """By brute force over 40 blocks' worth of epochs: inputs are 0..n-2, targets 1..n-1, all of them;
    windows of an epoch do not overlap."""
    tokens, count = numbered(n, parts=3), T.windows_per_epoch(numbered(n), block)
    assert max(1, (n - 1) // block - 1) <= count <= (n - 1) // block
    inputs, targets, phases = set(), set(), set()
    for epoch in T.train_batches(tokens, block, count, seed=1, step=0, steps=40 * block):
        first = sorted(epoch[0][:, 0].tolist())
        assert first == list(range(first[0], first[0] + count * block, block))
        phases.add(first[0])
        inputs |= set(epoch[0].flatten().tolist())
        targets |= set(epoch[1].flatten().tolist())
    assert inputs == set(range(n - 1)) and targets == set(range(1, n))
    assert phases == set(range(n - count * block)) and len(phases) >= min(block, n - block)


@pytest.mark.parametrize("batch, block, n", [(12, 8, 700), (12, 8, 60), (24, 8, 9), (12, 100, 5000)])
def test_ranks_and_micro_steps_share_out_the_one_batch(batch, block, n):
    """Any batch on any number of both, order included; also where a batch reaches into the next epoch,
    or holds several."""
    tokens = numbered(n)
    whole = starts(T.train_batches(tokens, block, batch, 5, 0, 9))
    assert len(whole) == 9 and all(len(rows) == batch for rows in whole)
    for world, micro in ((2, 1), (1, 3), (2, 3), (4, 1), (3, 4), (5, 1), (5, 2), (7, 1), (1, 5), (3, 3)):
        ranks = [starts(T.train_batches(tokens, block, batch, 5, 0, 9, rank, world, micro))
                 for rank in range(world)]
        assert all(len(rows) == 9 * micro for rows in ranks)
        sizes = {len(part) for rows in ranks for part in rows}
        assert max(sizes) - min(sizes) == (batch % (world * micro) > 0) and min(sizes) > 0
        assert [sum((rows[step * micro + m] for rows in ranks for m in range(micro)), [])
                for step in range(9)] == whole


def test_a_batch_is_a_function_of_seed_and_step():
    tokens = numbered(1000)
    # 124 windows: epochs end within batches
    whole = starts(T.train_batches(tokens, 8, 10, 3, 0, 60))
    assert whole == starts(T.train_batches(tokens, 8, 10, 3, 0, 60))
    for step in (1, 12, 13, 37):
        assert starts(T.train_batches(tokens, 8, 10, 3, step, step + 5)) == whole[step:step + 5]
    assert whole[:5] != starts(T.train_batches(tokens, 8, 10, 4, 0, 5))
    epochs = np.concatenate(whole)[:496].reshape(4, 124)
    assert (all(len(set(e)) == 124 for e in epochs.tolist())
            and len({tuple(e) for e in epochs.tolist()}) == 4 and len(set(epochs[:, 0] % 8)) > 1)


def test_shuffled_windows_are_spread_over_the_text():
    """A batch of 500 of 10,000 windows: mean of the starts as of a uniform draw, within four standard
    errors."""
    rows = np.array(starts(T.train_batches(numbered(60001), 6, 500, 0, 0, 1))[0])
    assert abs(rows.mean() / 60000 - 0.5) < 4 * np.sqrt(1 / 12 / 500)


@pytest.mark.parametrize("n", [2, 3, 8, 9, 10, 16, 17, 100, 101])
@pytest.mark.parametrize("world, micro_batch", [(1, 1), (1, 4), (3, 2), (5, 100)])
def test_evaluation_counts_every_target_once(n, world, micro_batch):
    targets = []
    for rank in range(world):
        for x, y in T.eval_batches(numbered(n, parts=2), 8, micro_batch, rank, world):
            assert len(x) <= micro_batch and (
                x.shape[1] == 8 or (x.shape[0] == 1 and x.shape[1] == (n - 1) % 8))
            assert torch.equal(y, x + 1)
            targets += y.flatten().tolist()
    assert sorted(targets) == list(range(1, n))


def test_limited_evaluation_is_spread_evenly():
    """10 of 1,000 windows: every hundredth; a limit beyond what there is changes nothing."""
    tokens = numbered(8 * 1000 + 1)
    assert sum(starts(T.eval_batches(tokens, 8, 3, limit=10)), []) == [800 * i for i in range(10)]
    ranks = [sum(starts(T.eval_batches(tokens, 8, 3, rank, 4, limit=10)), []) for rank in range(4)]
    assert (sorted(sum(ranks, [])) == [800 * i for i in range(10)]
            and max(map(len, ranks)) - min(map(len, ranks)) <= 1)
    assert (starts(T.eval_batches(numbered(30), 8, 3, limit=9))
            == starts(T.eval_batches(numbered(30), 8, 3)) == [[0, 8, 16], [24]])


def test_batches_that_cannot_be_made():
    """At the call, not at the first batch."""
    with pytest.raises(
            BadInput, match="numbers has 8 tokens and --block-size 8 needs at least 9: lower it"):
        T.train_batches(numbered(8), 8, 1, 0, 0, 1)
    with pytest.raises(BadInput, match="numbers has 1 tokens, too few to evaluate on"):
        T.eval_batches(numbered(1), 8, 1)
