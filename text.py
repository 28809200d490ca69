"""Text: tokenizers, the texts that ship in data/, corpora tokenised to shards, and batches of windows.

    data = load_text("sotu")                          # embedded, 2 MB, tokenised by bytes; or a .txt file, or a folder of shards
    for x, y in train_batches(data.train, block_size=256, batch_size=32, seed=0, first_step=0, last_step=40):
        ...                                           # x and y int64 (32, 256), y is x shifted by one token

Larger corpora are tokenised once, by `prepare.py`, into shards that are memory-mapped here.

Every document is *followed* by the tokenizer's separator, so a prompt that begins a new document is the separator alone. Whether a document is
trained or validated on depends on a hash of its text and nothing else. The batch of a step is a function of (seed, step), whatever the number of processes.
"""
import functools
import hashlib
import json
import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from runtime import BadInput, mix_seed

ROOT = Path(__file__).resolve().parent / "data"
EMBEDDED = {"sotu": ["sotu_tail_2mb.txt"], "shakespeare": ["shakespeare_1mb.txt"], "text": ["sotu_tail_2mb.txt", "shakespeare_1mb.txt"]}
SEPARATOR = "<|endoftext|>"
# GPT-2 cuts text into pieces before it merges: contractions, then words, digits and other signs, each with the space before it, then white space.
GPT2_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+"


# -------------------------------------------------------------------------------------------------------------- tokenizers
class Bytes:
    """Every byte of UTF-8 is a token; 256 is the separator."""
    name, vocab_size, separator = "bytes", 257, 256
    digest = hashlib.blake2b(b"bytes", digest_size=16).hexdigest()

    def array(self, text):
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.uint16)

    def encode(self, text):
        return list(utf8(text))

    def decode(self, ids):
        return b"".join(SEPARATOR.encode() if i == self.separator else bytes([i]) for i in map(int, ids)).decode(errors="replace")


class BPE:
    """A tiktoken encoding. Text that spells out a special token is encoded as ordinary text."""

    def __init__(self, name, encoding):
        self.name, self.encoding, self.vocab_size, self.separator = name, encoding, encoding.n_vocab, encoding.eot_token
        vocabulary = sorted(encoding._mergeable_ranks.items()), sorted(encoding._special_tokens.items())
        self.digest = hashlib.blake2b(repr(vocabulary).encode(), digest_size=16).hexdigest()

    def array(self, text):
        return np.array(self.encoding.encode_ordinary(text), dtype=np.uint16)

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def decode(self, ids):
        return self.encoding.decode([int(i) for i in ids], errors="replace")


def utf8(text):
    """UTF-8 of any str: half a surrogate pair, which a JSON escape or a shell can leave in one, becomes U+FFFD, as in tiktoken."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


@functools.lru_cache(maxsize=None)
def load_tokenizer(name):
    """The tokenizer of that name: bytes (257), gpt2 (50,257), gpt2-32k (32,000: gpt2 without its later merges), or one of tiktoken's.

    It has .name, .vocab_size, .separator (id that ends a document), .digest (changes with the vocabulary), .encode(str) -> list of ints,
    .array(str) -> np.uint16, .decode(ids) -> str, where bytes that are no UTF-8 become U+FFFD.
    Raises BadInput for an unknown name, one that cannot be downloaded, or a vocabulary beyond uint16.
    """
    import tiktoken
    if name == "bytes":
        return Bytes()
    if name in ("gpt2", "gpt2-32k"):
        ranks = gpt2_ranks(50256 if name == "gpt2" else 31999)
        return BPE(name, tiktoken.Encoding(name, pat_str=GPT2_PIECES, mergeable_ranks=ranks, special_tokens={SEPARATOR: len(ranks)}))
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(["bytes", "gpt2", "gpt2-32k"] + [n for n in tiktoken.list_encoding_names() if n != "gpt2"])
        raise BadInput(f"--tokenizer '{name}' is unknown: choose one of {known}")
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as fault:                       # no network, a refused download, a damaged cache
        raise BadInput(f"--tokenizer {name} cannot be downloaded ({type(fault).__name__}): check the network, or use gpt2, gpt2-32k or bytes") from fault
    if encoding.n_vocab > 2 ** 16:
        raise BadInput(f"--tokenizer {name} has {encoding.n_vocab:,} tokens and the shards hold 16 bits: choose one of at most 65,536, such as gpt2")
    return BPE(name, encoding)


def gpt2_ranks(count):
    """The first `count` tokens of GPT-2, {bytes: id}: the 256 bytes, printable ones first, then a token per line of the merges file.

    The file writes a byte as a printable character: itself, or for the n-th unprintable byte chr(256 + n), as the space, which is chr(288).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [b for b in range(256) if b not in printable]
    byte = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(unprintable)}
    tokens = [bytes([b]) for b in byte.values()]
    with open(ROOT / "gpt2_vocab.bpe", encoding="utf-8") as lines:
        next(lines)                                              # the version
        tokens += [bytes(byte[c] for c in line if c not in " \n") for line in lines]
    return {token: i for i, token in enumerate(tokens[:count])}


# --------------------------------------------------------------------------------------------------------------- documents
DOCUMENT = 16384                                                 # bytes: a .txt file is cut where its structure allows it, at this size to twice this size
ENDS = [re.compile(end) for end in (rb"\n\s*\n", rb"\n", rb"[.!?]\s", rb"\s")]


def cut(data, low, high):
    """The place in low..high where `data` (bytes) is best cut: after a blank line, else a line, a sentence, a word, at least not within a character."""
    if low >= len(data):
        return len(data)
    for end in ENDS:
        found = end.search(data, low, high)
        if found:
            return found.end()
    while low < high < len(data) and data[high] & 0xC0 == 0x80:
        high -= 1
    return min(high, len(data))


def split_text(data, size=DOCUMENT):
    """The documents of a text in memory, as bytes; joined they are the text."""
    at = 0
    while at < len(data):
        end = cut(data, at + size, at + 2 * size)
        yield data[at:end]
        at = end


def is_val(text, share):
    """Whether a document is validated on: a property of its text, which no order, shard or number of processes changes."""
    return int.from_bytes(hashlib.blake2b(utf8(text), digest_size=8).digest(), "big") < share * 2 ** 64


# ------------------------------------------------------------------------------------------------------------------ tokens
class Tokens:
    """Arrays of uint16 as one sequence: len(tokens), tokens[i:j] -> np.uint16 array, which may cross from one part to the next."""

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


def load_text(name_or_path="sotu", tokenizer=None):
    """The embedded text of that name (sotu, shakespeare, text: both), a .txt file, or a folder that `prepare` filled. Returns TextData.

    tokenizer: a name; None means the one that the shards were made with, and bytes for the rest. An embedded text or a .txt file is tokenised in
    memory, and about every tenth document of it is validated on. Raises BadInput if there is no such text or its shards are damaged.
    """
    name = str(name_or_path)
    path = Path(name).expanduser()
    if name in EMBEDDED:
        return in_memory(name, [ROOT / file for file in EMBEDDED[name]], tokenizer or "bytes")
    if path.is_dir():
        return load_shards(path, tokenizer)
    if path.is_file() and path.suffix == ".txt":
        return in_memory(name, [path], tokenizer or "bytes")
    if path.exists():
        raise BadInput(f"--data {name} is neither a .txt file nor a folder of shards: run python prepare.py {name} --out FOLDER, and pass FOLDER")
    raise BadInput(f"--data '{name}' is neither a file, a folder nor one of {', '.join(EMBEDDED)}: check the spelling or the path")


def in_memory(name, paths, tokenizer):
    tokenizer, parts = load_tokenizer(tokenizer), {True: [], False: []}
    for path in paths:
        data = path.read_bytes()
        for document in split_text(data, min(DOCUMENT, max(64, len(data) // 100))):         # a short text needs short documents, to have some of either kind
            text = document.decode(errors="replace")
            parts[is_val(text, 0.1)] += [tokenizer.array(text), np.array([tokenizer.separator], dtype=np.uint16)]
    join = lambda some: [np.concatenate(some)] if some else []
    return TextData(name, tokenizer, Tokens(f"{name} (train)", join(parts[False])), Tokens(f"{name} (val)", join(parts[True])))


# ------------------------------------------------------------------------------------------------------------------ shards
# A shard is a header (magic with the format's version, vocabulary size, number of tokens, digest and name of the tokenizer), then uint16 little-endian.
HEADER = struct.Struct("<8sIQ32s64s12x")
MAGIC = b"\x89tokens1"
SHARD = "[0-9]" * 6 + ".bin"                                     # behind train_ or val_


def read_header(path):
    """(number of tokens, digest, tokenizer's name) of a shard. Raises BadInput if it is none, or not as long as it says."""
    data = path.open("rb").read(HEADER.size) if path.is_file() else b""
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise BadInput(f"{path} does not begin as a shard of tokens does: delete it, and run prepare again if it was one")
    _, vocabulary, count, digest, name = HEADER.unpack(data)
    if (size := os.path.getsize(path)) != HEADER.size + 2 * count:
        raise BadInput(f"{path} is damaged, it should hold {count:,} tokens and holds {(size - HEADER.size) // 2:,}: delete it and run prepare again")
    name = name.rstrip(b"\0").decode(errors="replace")
    if vocabulary != load_tokenizer(name).vocab_size:
        raise BadInput(f"{path} says that {name} has {vocabulary:,} tokens, and it has {load_tokenizer(name).vocab_size:,}: prepare the text again with --fresh")
    return count, digest.decode(errors="replace"), name


def load_shards(folder, asked=None):
    """TextData over the memory-mapped shards of a folder; `asked` is the tokenizer's name that it must have, if any."""
    manifest, paths = read_manifest(folder), sorted(folder.glob(f"train_{SHARD}")) + sorted(folder.glob(f"val_{SHARD}"))
    if not paths:
        raise BadInput(f"{folder} holds no shards of tokens: run python prepare.py {folder} --out FOLDER, and pass FOLDER")
    if manifest and len(paths) < 2 * manifest["shards"]:
        raise BadInput(f"{folder} has {len(paths)} of {2 * manifest['shards']} shards: run the prepare command that began it again, it continues")
    headers = {path: read_header(path) for path in paths}
    _, digest, name = headers[paths[0]]
    for path, (_, other_digest, other) in headers.items():
        if other_digest != digest:
            raise BadInput(f"{path} has another vocabulary ({other}) than {paths[0].name} ({name}): prepare them into separate folders")
    if asked and asked != name:
        raise BadInput(f"{folder} was tokenised with {name} and you ask for --tokenizer {asked}: leave the flag out, or prepare the text again")
    tokenizer = load_tokenizer(name)
    if tokenizer.digest != digest:
        raise BadInput(f"{folder} was tokenised with another vocabulary of the name {name} than today's: prepare the text again with --fresh")
    parts = {split: [np.memmap(path, "<u2", "r", HEADER.size, (count,)) for path, (count, *_) in headers.items() if count and path.name.startswith(split)]
             for split in ("train", "val")}
    return TextData(str(folder), tokenizer, *(Tokens(f"{folder} ({split})", part) for split, part in parts.items()))


def read_manifest(folder):
    """What `prepare` noted in the folder: tokenizer, flags, sources and the number of shards; None if it noted nothing."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text()) if path.exists() else None
    except (ValueError, OSError):                                # no JSON, or a folder
        manifest = ()
    if manifest is not None and not (isinstance(manifest, dict) and isinstance(manifest.get("shards"), int)):
        raise BadInput(f"{path} is not what prepare.py wrote: prepare the text again with --fresh, or into another folder")
    return manifest


# ----------------------------------------------------------------------------------------------------------------- batches
def windows_per_epoch(tokens, block_size):
    """Windows of block_size inputs that an epoch visits. At most one less than fit, which leaves room for the phase.

    Raises BadInput if not even one fits.
    """
    if len(tokens) < block_size + 1:
        raise BadInput(f"{tokens.name} has {len(tokens):,} tokens and --block-size {block_size} needs at least {block_size + 1:,}: lower it, or give more text")
    return max(1, len(tokens) // block_size - 1)


def train_batches(tokens, block_size, batch_size, seed, first_step, last_step, rank=0, world_size=1, micro_steps=1):
    """Yields (x, y), int64 (batch_size / world_size / micro_steps, block_size), for steps first_step..last_step - 1, micro_steps of them per step.

    An epoch is a sequence of windows side by side, which begins at a random phase and is visited in random order, both drawn from (seed, epoch):
    window w has the inputs tokens[phase + w block_size:][:block_size]. Over the epochs every token is an input, except the last, which has no successor.
    batch_size is the global one: sample i of step s is window s * batch_size + i of the endless sequence of epochs; ranks take equal contiguous slices
    of a batch, micro-steps equal parts of those. Raises BadInput if the text is too short or the batch cannot be shared out equally.
    """
    count = windows_per_epoch(tokens, block_size)
    if batch_size % (world_size * micro_steps):
        raise BadInput(f"--batch-size {batch_size} must be a multiple of {world_size * micro_steps} "
                       f"({world_size} processes x {micro_steps} micro-batches): change it or --micro-batch")
    part, phases = batch_size // (world_size * micro_steps), len(tokens) - count * block_size      # at the last phase the last target is the last token

    @functools.lru_cache(maxsize=2)                              # a batch may lie in two epochs
    def epoch_order(epoch):
        generator = torch.Generator().manual_seed(mix_seed("windows", seed, epoch))
        return mix_seed("phase", seed, epoch) % phases, torch.randperm(count, generator=generator, dtype=torch.int32).numpy()

    def window(i):
        epoch, k = divmod(i, count)
        phase, order = epoch_order(epoch)
        start = phase + int(order[k]) * block_size
        return tokens[start:start + block_size + 1]

    def batches():
        for step in range(first_step, last_step):
            for micro in range(micro_steps):
                first = step * batch_size + (rank * micro_steps + micro) * part
                yield shifted([window(i) for i in range(first, first + part)])
    return batches()


def eval_batches(tokens, block_size, micro_batch, rank=0, world_size=1, limit=0):
    """Yields (x, y), int64 (<= micro_batch, block_size): every token but the first is a target once, summed over the ranks.

    The last window may be shorter and comes as a batch of its own. limit: at most that many windows, spread evenly over the text; 0 is all.
    A rank may have no window at all. Raises BadInput if there is no target.
    """
    if len(tokens) < 2:
        raise BadInput(f"{tokens.name} has {len(tokens)} tokens, too few to evaluate on: give more text, or prepare a folder with a larger --val")
    count = -(-(len(tokens) - 1) // block_size)
    chosen = [i * count // limit for i in range(limit)] if 0 < limit < count else range(count)

    def batches():
        rows = []
        for i in chosen[rank::world_size]:
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
