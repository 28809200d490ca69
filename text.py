"""Text: tokenizers, the texts that ship in data/, corpora tokenised to shards, and batches of windows.

    data = load_text("sotu")                          # embedded, 2 MB, tokenised by bytes; or a .txt file, or a folder of shards
    for x, y in train_batches(data.train, block_size=256, batch_size=32, seed=0, first_step=0, last_step=40):
        ...                                           # x and y int64 (32, 256), y is x shifted by one token

Larger corpora are tokenised once, into memory-mapped shards (folders may hold .txt, .jsonl and .parquet, FineWeb-Edu's layout for one):
    python text.py prepare /path/to/fineweb-edu --out shards --tokenizer gpt2-32k --val 0.01
Started again after a kill, the same command keeps what is finished, and ends with the same bytes.

Every document is *followed* by the tokenizer's separator, so a prompt that begins a new document is the separator alone. Whether a document is
trained or validated on depends on a hash of its text and nothing else. The batch of a step is a function of (seed, step), whatever the number of processes.
"""
import functools
import hashlib
import json
import multiprocessing
import os
import re
import signal
import struct
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import runtime
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
        raise BadInput(f"--data {name} is neither a .txt file nor a folder of shards: run python text.py prepare {name} --out FOLDER, and pass FOLDER")
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
    with open(path, "rb") as file:
        data = file.read(HEADER.size)
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise BadInput(f"{path} does not begin as a shard of tokens does: delete it, and run prepare again if it was one")
    _, _, count, digest, name = HEADER.unpack(data)
    if (size := os.path.getsize(path)) != HEADER.size + 2 * count:
        raise BadInput(f"{path} is damaged, it should hold {count:,} tokens and holds {(size - HEADER.size) // 2:,}: delete it and run prepare again")
    return count, digest.decode(), name.rstrip(b"\0").decode()


def load_shards(folder, asked=None):
    """TextData over the memory-mapped shards of a folder; `asked` is the tokenizer's name that it must have, if any."""
    manifest, paths = read_manifest(folder), sorted(folder.glob(f"train_{SHARD}")) + sorted(folder.glob(f"val_{SHARD}"))
    if not paths:
        raise BadInput(f"{folder} holds no shards of tokens: run python text.py prepare {folder} --out FOLDER, and pass FOLDER")
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
    return json.loads(path.read_text()) if path.exists() else None


# ----------------------------------------------------------------------------------------------------------------- sources
class Piece(NamedTuple):
    """A part of a source: the documents that begin in the bytes start..stop of the file; of a parquet file, those in row group `start`."""
    path: str
    start: int
    stop: int
    size: int                                                    # bytes to read, for the progress bar and the size of shards


def find_sources(names):
    """The .txt, .jsonl and .parquet files that are named, or that lie in the folders that are named."""
    found = []
    for name in names:
        path = Path(name).expanduser().absolute()                # not resolved: what a link points to may lack the ending
        if not path.exists():
            raise BadInput(f"source '{name}' does not exist: check the spelling or the path")
        kept = [str(p) for p in (sorted(path.rglob("*")) if path.is_dir() else [path]) if p.suffix in READERS and p.is_file()]
        if not kept:
            raise BadInput(f"source '{name}' {'holds' if path.is_dir() else 'is'} no {', '.join(READERS)} file: choose another")
        found += kept
    return list(dict.fromkeys(found))


def make_units(paths, target):
    """Lists of Pieces, each list at most about `target` bytes: the work of one shard. A function of the sources, so that a restart finds the same."""
    units, room = [], 0
    for path in paths:
        if path.endswith(".parquet"):
            groups = open_parquet(path).metadata
            pieces = [Piece(path, i, i + 1, groups.row_group(i).total_byte_size) for i in range(groups.num_row_groups)]
        else:
            bounds = [*range(0, os.path.getsize(path), min(target, 2 ** 24)), os.path.getsize(path)]
            pieces = [Piece(path, start, stop, stop - start) for start, stop in zip(bounds, bounds[1:])]
        for piece in pieces:
            if not units or piece.size > room:
                units, room = units + [[]], target
            units[-1].append(piece)
            room -= piece.size
    return units


def read_txt(piece):
    """Yields the documents of a .txt file that belong to the piece."""
    size = os.path.getsize(piece.path)
    with open(piece.path, "rb") as file:
        def boundary(offset):                                    # the first good cut from there on: the same for the piece that ends and the one that begins
            file.seek(offset)
            return offset + cut(file.read(2 * DOCUMENT + 1), 0, 2 * DOCUMENT) if 0 < offset < size else offset
        start, stop = boundary(piece.start), boundary(piece.stop)
        file.seek(start)
        for document in split_text(file.read(stop - start)):
            yield document.decode(errors="replace")


def read_jsonl(piece):
    """Yields the text of each line that begins within the piece."""
    with open(piece.path, "rb") as file:
        file.seek(max(0, piece.start - 1))
        if piece.start:
            file.readline()                                      # the end of a line that began before
        while (at := file.tell()) < piece.stop:
            line = file.readline()
            try:
                text = json.loads(line)["text"] if line.strip() else ""
                if not isinstance(text, str):
                    raise TypeError("not a string")
            except (ValueError, KeyError, TypeError, RecursionError) as fault:
                file.seek(0)
                number = 1
                while file.tell() < at:
                    number += bool(file.readline())
                raise BadInput(f"{piece.path} line {number} is no JSON object with a string named text: mend or remove the line") from fault
            yield text


def read_parquet(piece):
    """Yields the text of each row of a row group."""
    file = open_parquet(piece.path)
    try:
        for batch in file.iter_batches(256, row_groups=[piece.start], columns=["text"]):
            yield from (text or "" for text in batch.column(0).to_pylist())
    except (OSError, ValueError) as fault:
        raise BadInput(f"{piece.path} is damaged ({type(fault).__name__}): replace or remove it") from fault


@functools.lru_cache(maxsize=1)                                  # once for all row groups of a file
def open_parquet(path):
    runtime.import_optional("pyarrow", f"the source {path}")
    import pyarrow.parquet
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as fault:                       # pyarrow's own errors are ValueErrors
        raise BadInput(f"{path} is not a readable parquet file ({type(fault).__name__}): replace or remove it") from fault
    if "text" not in file.schema_arrow.names or str(file.schema_arrow.field("text").type) not in ("string", "large_string", "string_view"):
        raise BadInput(f"{path} has no column named text that holds strings: rename a column, or remove the file")
    return file


READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}


# ----------------------------------------------------------------------------------------------------------------- prepare
def write_shards(index, unit, out, tokenizer, val):
    """Tokenise a unit into val_<index>.bin and train_<index>.bin, written aside, synced and renamed: each is whole or not there. Returns the bytes read."""
    tokenizer = load_tokenizer(tokenizer)
    paths = {split: out / f"{split}_{index:06d}.bin" for split in ("val", "train")}
    aside = {split: Path(f"{path}.{os.getpid()}.tmp") for split, path in paths.items()}
    counts, separator = dict.fromkeys(paths, 0), np.array([tokenizer.separator], dtype="<u2").tobytes()
    try:
        with open(aside["val"], "wb") as val_file, open(aside["train"], "wb") as train_file:
            files = {"val": val_file, "train": train_file}
            for file in files.values():
                file.write(bytes(HEADER.size))                   # room for it: the count is known at the end
            for text in (text for piece in unit for text in READERS[Path(piece.path).suffix](piece) if text):
                split = "val" if is_val(text, val) else "train"
                tokens = tokenizer.array(text)
                files[split].write(tokens.astype("<u2", copy=False).tobytes() + separator)
                counts[split] += len(tokens) + 1
            for split, file in files.items():
                file.seek(0)
                file.write(HEADER.pack(MAGIC, tokenizer.vocab_size, counts[split], tokenizer.digest.encode(), tokenizer.name.encode()))
                file.flush()
                os.fsync(file.fileno())
        for split in paths:
            os.replace(aside[split], paths[split])
    except OSError as fault:
        raise BadInput(f"{fault.filename or out} cannot be read or written ({fault.strerror}): mend that and run the same command again") from fault
    finally:
        for path in aside.values():
            path.unlink(missing_ok=True)
    return sum(piece.size for piece in unit)


def start_worker():
    """A worker dies with its parent, however that ended, and without a traceback by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def in_parallel(function, calls, workers):
    """Yields function(*call) for each call, as they are done. When one raises, all are ended."""
    if workers <= 1:
        yield from (function(*call) for call in calls)
        return
    spawn = multiprocessing.get_context("spawn")                 # the same on every system, and safe beside threads
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=start_worker) as pool:
        try:
            for job in as_completed([pool.submit(function, *call) for call in calls]):
                yield job.result()
        except BrokenProcessPool as fault:
            raise BadInput("a worker process was killed, often for want of memory: lower --workers and run the same command again, it continues") from fault
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def remove(out, ending):
    for path in [*out.glob(f"train_{SHARD}{ending}"), *out.glob(f"val_{SHARD}{ending}")]:
        path.unlink(missing_ok=True)


def check_manifest(out, manifest):
    """Two commands must not mix their shards in one folder. Raises BadInput that names the first difference."""
    saved = read_manifest(out)
    if saved is None and any(out.glob(f"*_{SHARD}")):
        raise BadInput(f"--out {out} holds shards but no manifest.json to say what they are: --fresh replaces them, or choose another --out")
    for key in manifest if saved else ():
        if key == "sources" and saved.get(key) != manifest[key]:
            path = next((now or before)[0] for before, now in zip_longest(saved[key], manifest[key]) if before != now)
            raise BadInput(f"source '{path}' is new, changed or gone since --out {out} was begun: --fresh starts over, or choose another --out")
        if saved.get(key) != manifest[key]:
            raise BadInput(f"--out {out} was begun with {key} {saved.get(key)} and now it is {manifest[key]}: give the same, --fresh to start over, or another --out")


def prepare(args):
    """Sources -> shards in args.out; what an earlier, killed call of the same command finished is kept."""
    tokenizer, out, paths = load_tokenizer(args.tokenizer), Path(args.out), find_sources(args.sources)
    bytes_per_token = 1 if args.tokenizer == "bytes" else 4      # of English text, about
    units = make_units(paths, int(args.shard_tokens) * bytes_per_token)
    if not units:
        raise BadInput(f"source '{args.sources[0]}' is empty: choose another")
    manifest = dict(tokenizer=args.tokenizer, digest=tokenizer.digest, val=args.val, shard_tokens=args.shard_tokens,
                    sources=[[path, os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in paths], shards=len(units))
    try:
        out.mkdir(parents=True, exist_ok=True)
        if args.fresh:
            remove(out, "")
            (out / "manifest.json").unlink(missing_ok=True)
        check_manifest(out, manifest)
        remove(out, ".*.tmp")                                    # what a kill left
        (out / "manifest.json.tmp").write_text(json.dumps(manifest, indent=1) + "\n")
        os.replace(out / "manifest.json.tmp", out / "manifest.json")
    except OSError as fault:
        raise BadInput(f"--out {out} cannot be written ({fault.strerror}): choose a folder that can") from fault

    todo = [(i, unit, out, args.tokenizer, args.val) for i, unit in enumerate(units)
            if not all((out / f"{split}_{i:06d}.bin").exists() for split in ("train", "val"))]
    total, left = (sum(piece.size for unit in some for piece in unit) for some in (units, [unit for _, unit, *_ in todo]))
    try:
        with tqdm(total=total, initial=total - left, unit="B", unit_scale=True) as bar:
            for size in in_parallel(write_shards, todo, min(args.workers or os.cpu_count(), len(todo))):
                bar.update(size)
    finally:
        remove(out, ".*.tmp")
    data = load_shards(out)
    print(f"{out}: {len(data.train):,} tokens to train on, {len(data.val):,} to validate on ({len(units) - len(todo)} of {len(units)} shards were there)")
    if args.val and not len(data.val):
        print("no document fell to validation: give more text, or raise --val")


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
        raise BadInput(f"{tokens.name} has {len(tokens)} tokens, too few to evaluate on: give more text, or prepare it with a larger --val")
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


def main(argv=None):
    parser = runtime.Parser(description=__doc__)
    add = parser.add_argument
    add("command", choices=["prepare"], help="tokenise sources into a folder of shards")
    add("sources", nargs="+", metavar="SOURCE", help=".txt (cut into documents of 16 to 32 kB), .jsonl or .parquet (rows with a field text), or a folder of them")
    add("--out", required=True, help="folder for the shards, to be passed to --data")
    add("--tokenizer", default="gpt2-32k", help="bytes, gpt2, gpt2-32k, or a tiktoken name")
    add("--val", type=runtime.number(float, low=0, below=1), default=0.01, help="share of the documents to validate on")
    add("--workers", type=runtime.number(int, low=0), default=0, help="processes; 0 is one per core")
    add("--shard-tokens", type=runtime.number(float, low=1e5, high=1e12), default=1e8, help="tokens of a shard, about and at most: what a kill costs a process")
    add("--fresh", action="store_true", help="delete the shards in --out and start over")
    prepare(parser.parse_args(argv))


if __name__ == "__main__":
    runtime.run(main)
