"""Text: tokenizers, the texts in data/, folders of token shards, batches of windows.

    data = load_text("sotu")        # embedded, 2 MB, by bytes; or a .txt file, or a folder of shards
    for x, y in train_batches(data.train, block_size=256, batch_size=32, seed=0, step=0, steps=40):
        ...                         # int64 (32, 256) each; y is x one token later

`python -m tools.prepare_text` tokenises a larger corpus once, into shards that are memory-mapped here.

Every document is followed by the tokenizer's separator, so the prompt for a new one is the separator
alone. A hash of its text decides whether a document is trained or validated on. The batch of a step is
a function of (seed, step), whatever the number of processes.
"""
import codecs
import functools
import hashlib
import json
import re
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from runtime import BadInput, mix_seed, my_part

ROOT = Path(__file__).resolve().parent / "data"
EMBEDDED = {"sotu": ["sotu_tail_2mb.txt"], "shakespeare": ["shakespeare_1mb.txt"],
            "text": ["sotu_tail_2mb.txt", "shakespeare_1mb.txt"]}
DIGESTS = {"sotu_tail_2mb.txt": "e72ce43bde034a43ab68a8b8fb2fc15c",
           "shakespeare_1mb.txt": "cfa331ecd73e144b4b096c6faed1d79b",
           "gpt2_vocab.bpe": "ec89dd3e34abe7b7135e29648c740fc1"}
SEPARATOR = "<|endoftext|>"
# GPT-2 cuts text into these pieces before it merges: contractions; words, numbers and other signs, each
# with the space before it; white space.
GPT2_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+"


def blake2b(data):
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_embedded(name):
    """The bytes of a file in data/. Raises BadInput where they are not those of this repository."""
    data = (ROOT / name).read_bytes()
    if blake2b(data) != DIGESTS[name]:
        raise BadInput(f"{ROOT / name} was changed, perhaps in its line ends by git's core.autocrlf: "
                       f"delete it, then git -c core.autocrlf=false checkout -- data")
    return data


# -------------------------------------------------------------------------------------------------------
# tokenizers

class Bytes:
    """Every byte of UTF-8 is a token; 256 is the separator."""
    name, vocab_size, separator, digest = "bytes", 257, 256, blake2b(b"bytes")

    def array(self, text):
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.uint16)

    def encode(self, text):
        return list(utf8(text))

    def decode(self, ids):
        parts = [SEPARATOR.encode() if i == self.separator else bytes([i]) for i in map(int, ids)]
        return b"".join(parts).decode(errors="replace")


class BPE:
    """A tiktoken encoding. Text that spells out a special token is encoded as ordinary text."""

    def __init__(self, name, encoding):
        self.name, self.encoding = name, encoding
        self.vocab_size, self.separator = encoding.n_vocab, encoding.eot_token
        vocabulary = sorted(encoding._mergeable_ranks.items()), sorted(encoding._special_tokens.items())
        self.digest = blake2b(repr(vocabulary).encode())

    def array(self, text):
        return np.array(self.encode(text), dtype=np.uint16)

    def encode(self, text):
        if len(text) <= LONGEST_SPACE:
            return self.encoding.encode_ordinary(text)
        return [i for part in cut_long_space(text) for i in self.encoding.encode_ordinary(part)]

    def decode(self, ids):
        return self.encoding.decode([int(i) for i in ids], errors="replace")


LONGEST_SPACE = 2 ** 16             # tiktoken's stack overflows on much longer white space
LONG_SPACE = re.compile(rf"((?<!\s)\s{{{LONGEST_SPACE},}})")


def cut_long_space(text):
    """Yields the text in parts, none of which has more than LONGEST_SPACE white space in a row."""
    for part in LONG_SPACE.split(text):
        size = LONGEST_SPACE if part.isspace() else len(part) or 1
        yield from (part[i:i + size] for i in range(0, len(part), size))


def utf8(text):
    """UTF-8 of any str. Half a surrogate pair, which a JSON escape can hold, becomes U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


@functools.lru_cache(maxsize=None)
def load_tokenizer(name):
    """The tokenizer of that name: bytes (257 tokens), gpt2 (50,257) or gpt2-32k (its first 32,000).

    It has .name, .vocab_size, .separator (the id that ends a document), .encode(str) -> list of ints,
    .array(str) -> np.uint16, .decode(ids) -> str, .digest (a hash of the vocabulary).
    Raises BadInput for an unknown name."""
    if name == "bytes":
        return Bytes()
    if name not in ("gpt2", "gpt2-32k"):
        raise BadInput(f"--tokenizer {name} is unknown: use bytes, gpt2 or gpt2-32k")
    import tiktoken
    ranks = gpt2_ranks(50256 if name == "gpt2" else 31999)
    return BPE(name, tiktoken.Encoding(name, pat_str=GPT2_PIECES, mergeable_ranks=ranks,
                                       special_tokens={SEPARATOR: len(ranks)}))


def gpt2_ranks(count):
    """The first `count` tokens of GPT-2, {bytes: id}: 256 bytes, then a token per line of the file.

    The file writes a printable byte as itself, and the n-th unprintable one as chr(256 + n)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [b for b in range(256) if b not in printable]
    byte = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(unprintable)}
    merges = read_embedded("gpt2_vocab.bpe").decode().split("\n")[1:-1]     # the first line is a version
    tokens = [bytes([b]) for b in byte.values()]
    tokens += [bytes(byte[c] for c in merge if c != " ") for merge in merges]
    return {token: i for i, token in enumerate(tokens[:count])}


# -------------------------------------------------------------------------------------------------------
# documents

DOCUMENT = 16384                    # bytes; a .txt file is cut at this size to twice this size
ENDS = [re.compile(end) for end in (rb"\n\s*\n", rb"\n", rb"[.!?]\s", rb"\s")]
# Byte-order marks. UTF-32 stands first, since one of its marks begins with one of UTF-16.
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF8: "utf-8-sig",
         codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def encoding_of(data):
    """What the byte-order mark at the beginning of `data` says; UTF-8 without one."""
    return next((encoding for mark, encoding in MARKS.items() if data.startswith(mark)), "utf-8")


def decode_text(data, path, encoding, start=0):
    """bytes -> str. Raises BadInput with the first byte that does not fit; data[0] is at `start`."""
    try:
        return data.decode(encoding)
    except LookupError as fault:
        raise BadInput(f"--encoding {encoding} is unknown: use a name of Python's codecs") from fault
    except UnicodeDecodeError as fault:
        at = fault.start + len(data) - len(fault.object)         # the object lacks a byte-order mark
        name = encoding.removesuffix("-sig")
        raise BadInput(f"{path} is not {name}: byte {data[at]:#04x} at offset {start + at}: "
                       f"save it as UTF-8, or pass --encoding to tools.prepare_text") from fault


def find_cut(data, low, high):
    """The best place in low..high to cut bytes: after a blank line, else a line, a sentence, a word.

    Else at `high`, or just before it where that would cut a character."""
    if low >= len(data):
        return len(data)
    for end in ENDS:
        found = end.search(data, low, high)
        if found:
            return found.end()
    while 0 < high < len(data) and data[high] & 0xC0 == 0x80:
        high -= 1
    return min(high, len(data))


def split_text(data, size=DOCUMENT):
    """Yields the documents of a text in memory, as bytes; joined they are the text."""
    at = 0
    while at < len(data):
        end = find_cut(data, at + size, at + 2 * size)
        yield data[at:end]
        at = end


def is_val(text, share):
    """Is a document validated on? A hash of its text says so, whatever the order of documents."""
    return int.from_bytes(hashlib.blake2b(utf8(text), digest_size=8).digest(), "big") < share * 2 ** 64


def split_fails(val, total, share):
    """Is the part `val` of `total` off by more than a factor of two? Few or like documents do that."""
    return not share / 2 <= val / max(1, total) <= 2 * share


def split_end(data, share):
    """bytes -> (text, its end): the end is about `share` of it, and half of that at least."""
    low = int((1 - share) * len(data))
    at = find_cut(data, low, low + int(share / 2 * len(data)))
    return data[:at], data[at:]


# -------------------------------------------------------------------------------------------------------
# tokens

class Tokens:
    """Arrays of uint16 as one sequence: len(tokens), tokens[i:j] -> np.uint16 array, across parts."""

    def __init__(self, name, parts):
        self.name, self.parts = name, [part for part in parts if len(part)]
        self.starts = np.cumsum([0] + [len(part) for part in self.parts])

    def __len__(self):
        return int(self.starts[-1])

    def __getitem__(self, window):
        start, stop, _ = window.indices(len(self))
        found, pieces = int(np.searchsorted(self.starts, start, side="right")) - 1, []
        while start < stop:
            offset = int(self.starts[found])
            pieces.append(self.parts[found][start - offset:stop - offset])
            start, found = offset + len(self.parts[found]), found + 1
        return np.concatenate(pieces or [np.empty(0, np.uint16)])


class TextData(NamedTuple):
    name: str
    tokenizer: object
    train: Tokens
    val: Tokens
    note: str = ""                  # what a user should know of the split, if anything


def load_text(name_or_path="sotu", tokenizer=None, encoding=None):
    """TextData of an embedded text (sotu, shakespeare, text: both), a .txt file, or a folder of shards.

    tokenizer: a name; None is that of the shards, and bytes for the rest. encoding: of a .txt file; None
    is that of its byte-order mark, else UTF-8. About a tenth of the documents is validated on. Where the
    hashes miss that, the last tenth of the text is, and .note says so.
    Raises BadInput if there is no such text, it has another encoding, or its shards are damaged."""
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name in EMBEDDED:
        return tokenise_texts(name, map(read_embedded, EMBEDDED[name]), tokenizer or "bytes")
    if path.is_dir():
        return load_shards(path, tokenizer)
    if path.is_file() and path.suffix == ".txt":
        data = path.read_bytes()
        data = utf8(decode_text(data, path, encoding or encoding_of(data)))
        return tokenise_texts(name, [data], tokenizer or "bytes")
    remedy = "check the spelling or the path"
    if path.exists():
        remedy = f"run python -m tools.prepare_text {name} --out FOLDER, and pass FOLDER"
    raise BadInput(f"--data {name} is no .txt file, no folder of shards and none of "
                   f"{', '.join(EMBEDDED)}: {remedy}")


def tokenise_texts(name, texts, tokenizer, share=0.1):
    """TextData of texts in memory, UTF-8 bytes. A short text is cut into short documents."""
    tokenizer, note, documents = load_tokenizer(tokenizer), "", []
    for data in texts:
        documents += split_text(data, min(DOCUMENT, max(64, len(data) // 100)))
    sides = [is_val(document.decode(), share) for document in documents]
    sizes = [len(document) for document in documents]
    if split_fails(sum(size for size, val in zip(sizes, sides) if val), sum(sizes), share):
        note = f"the documents of {name} are few or alike, so its last {share:.0%} is validated on"
        begin, end = (list(split_text(part)) for part in split_end(b"".join(documents), share))
        documents, sides = begin + end, [False] * len(begin) + [True] * len(end)
    parts = {False: [], True: []}
    separator = np.array([tokenizer.separator], dtype=np.uint16)
    for document, val in zip(documents, sides):
        parts[val] += [tokenizer.array(document.decode()), separator]
    train, val = (Tokens(f"{name} ({split})", [np.concatenate(parts[val] or [np.empty(0, np.uint16)])])
                  for split, val in (("train", False), ("val", True)))
    return TextData(name, tokenizer, train, val, note)


# -------------------------------------------------------------------------------------------------------
# shards: a header, then tokens as uint16 little-endian

HEADER = struct.Struct("<8sIQ32s64s12x")            # magic, vocabulary size, tokens, digest, name
MAGIC = b"\x89tokens1"
SHARD = "[0-9]" * 6 + ".bin"                                     # behind train_ or val_


def read_header(path):
    """(number of tokens, digest, tokenizer's name) of a shard. Raises BadInput if it is not whole."""
    data = path.open("rb").read(HEADER.size) if path.is_file() else b""
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise BadInput(f"{path} does not begin as a shard of tokens does: delete it and prepare again")
    _, _, count, digest, name = HEADER.unpack(data)
    found = path.stat().st_size - HEADER.size
    if found != 2 * count:
        raise BadInput(f"{path} is damaged, it should hold {count:,} tokens and holds {found // 2:,}: "
                       f"delete it and prepare again")
    return count, digest.decode(errors="replace"), name.rstrip(b"\0").decode(errors="replace")


def load_shards(folder, asked=None):
    """TextData over the memory-mapped shards of a folder. asked: the tokenizer to expect, if any."""
    manifest = read_manifest(folder) or {"shards": 0}
    paths = sorted(folder.glob(f"train_{SHARD}")) + sorted(folder.glob(f"val_{SHARD}"))
    if not paths:
        raise BadInput(f"{folder} holds no shards of tokens: "
                       f"run python -m tools.prepare_text {folder} --out FOLDER, and pass FOLDER")
    if len(paths) < 2 * manifest["shards"]:
        raise BadInput(f"{folder} has {len(paths)} of {2 * manifest['shards']} shards: "
                       f"run the command that began it again, it continues")
    parts, name = {"train": [], "val": []}, read_header(paths[0])[2]
    if asked and asked != name:
        raise BadInput(f"{folder} was tokenised with {name} and you ask for --tokenizer {asked}: "
                       f"leave the flag out, or prepare the text again")
    tokenizer = load_tokenizer(name)
    for path in paths:
        count, digest, other = read_header(path)
        if (other, digest) != (name, tokenizer.digest):
            raise BadInput(f"{path} has another vocabulary ({other}) than {name} has here: "
                           f"prepare the text again with --fresh")
        if count:
            parts[path.name.split("_")[0]].append(np.memmap(path, "<u2", "r", HEADER.size, (count,)))
    train, val = (Tokens(f"{folder} ({split})", part) for split, part in parts.items())
    return TextData(str(folder), tokenizer, train, val, manifest.get("note", ""))


def read_manifest(folder):
    """What tools/prepare_text.py noted in the folder, a dict; None if nothing."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (ValueError, OSError):                                # no JSON, or a folder
        manifest = ()
    whole = manifest is None or isinstance(manifest, dict) and isinstance(manifest.get("shards"), int)
    if not whole:
        raise BadInput(f"{path} is damaged: prepare the text again with --fresh, or into another folder")
    return manifest


# -------------------------------------------------------------------------------------------------------
# batches

def windows_per_epoch(tokens, block_size):
    """Windows of block_size inputs in an epoch: at most one less than fit, to leave room for its phase.

    Raises BadInput if not even one fits."""
    if len(tokens) < block_size + 1:
        raise BadInput(f"{tokens.name} has {len(tokens):,} tokens and --block-size {block_size} needs "
                       f"at least {block_size + 1:,}: lower it, or give more text")
    return max(1, len(tokens) // block_size - 1)


def train_batches(tokens, block_size, batch_size, seed, step, steps, rank=0, world=1, micro_steps=1):
    """Yields (x, y), int64 (samples, block_size) each: this rank's micro-batches from `step` on.

    batch_size is global, see `runtime.my_part`. Sample i of step s is window s * batch_size + i of an
    endless sequence of epochs. The windows of an epoch lie side by side from a random phase on and
    come in random order, both drawn from (seed, epoch). So every token but the last is an input in time.
    Raises BadInput if the text is too short."""
    count = windows_per_epoch(tokens, block_size)
    phases = len(tokens) - count * block_size                    # the last phase ends at the last token

    @functools.lru_cache(maxsize=2)                              # a batch may lie in two epochs
    def epoch_order(epoch):
        generator = torch.Generator().manual_seed(mix_seed("windows", seed, epoch))
        order = torch.randperm(count, generator=generator, dtype=torch.int32)
        return mix_seed("phase", seed, epoch) % phases, order.numpy()

    def window(i):
        epoch, k = divmod(i, count)
        phase, order = epoch_order(epoch)
        start = phase + int(order[k]) * block_size
        return tokens[start:start + block_size + 1]

    def batches():
        for s in range(step, steps):
            samples = torch.arange(s * batch_size, (s + 1) * batch_size)
            for part in my_part(samples, rank, world, micro_steps):
                yield shifted([window(i) for i in part.tolist()])
    return batches()


def eval_batches(tokens, block_size, micro_batch, rank=0, world=1, limit=0):
    """Yields (x, y), int64 (<= micro_batch, block_size) each: each token but the first is a target once.

    The last window may be shorter and comes as a batch of its own. A rank may have no window at all.
    limit: at most that many windows, spread evenly; 0 is all. Raises BadInput if there is no target."""
    if len(tokens) < 2:
        raise BadInput(f"{tokens.name} has {len(tokens)} tokens, too few to evaluate on: "
                       f"give more text, or prepare a folder with a larger --val")
    count = -(-(len(tokens) - 1) // block_size)
    chosen = [i * count // limit for i in range(limit)] if 0 < limit < count else range(count)

    def batches():
        rows = []
        for i in chosen[rank::world]:
            row = tokens[i * block_size:(i + 1) * block_size + 1]
            if rows and (len(rows) == micro_batch or len(row) <= block_size):
                yield shifted(rows)
                rows = []
            rows.append(row)
        if rows:
            yield shifted(rows)
    return batches()


def shifted(rows):
    """Rows of N + 1 tokens -> inputs and targets, int64 (rows, N) each."""
    rows = torch.from_numpy(np.stack(rows).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
