"""Corpora (.txt, .jsonl, .parquet) to token shards, once, before training; parallel, restartable.

    python -m tools.prepare_text /path/to/fineweb-edu --out shards --tokenizer gpt2-32k --val 0.01
    python train_lm.py --data shards

Started again after a kill, the same command keeps what is finished, and ends with the same bytes.
"""
import functools
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import runtime
import text
from runtime import BadInput
from text import DOCUMENT, HEADER, MAGIC, SHARD

# -------------------------------------------------------------------------------------------------------
# sources

class Piece(NamedTuple):
    """The documents that begin in the bytes start..stop of a file; of parquet, those of a row group.

    encoding: the whole file is one piece, to be read in that encoding. None is UTF-8."""
    path: str
    start: int
    stop: int
    size: int                                        # bytes, for the progress bar and the size of shards
    encoding: str = None


def find_sources(names):
    """The .txt, .jsonl and .parquet files that are named, or lie in named folders and are not hidden."""
    found = []
    for name in names:
        path = Path(name).expanduser().absolute()    # not resolved: a link's target may lack the ending
        if not path.exists():
            raise BadInput(f"source '{name}' does not exist: check the spelling or the path")
        files = [path]
        if path.is_dir():
            files = [p for p in sorted(path.rglob("*"))
                     if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        files = [str(p) for p in files if p.suffix in READERS and p.is_file()]
        if not files:
            verb = "holds" if path.is_dir() else "is"
            raise BadInput(f"source '{name}' {verb} no {', '.join(READERS)} file: choose another")
        found += files
    return list(dict.fromkeys(found))


def make_units(paths, target, encoding=None):
    """Lists of Pieces, each list of about `target` bytes at most: the work of one shard.

    A function of the sources, so that a restart finds the same."""
    pieces = []
    for path in paths:
        if path.endswith(".parquet"):
            groups = open_parquet(path).metadata
            sizes = [groups.row_group(i).total_byte_size for i in range(groups.num_row_groups)]
            pieces += [Piece(path, i, i + 1, size) for i, size in enumerate(sizes)]
            continue
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            special = encoding or text.encoding_of(file.read(4))
        if special in ("utf-8", "utf-8-sig"):
            bounds = [*range(0, size, min(target, 2 ** 24)), size]
            pieces += [Piece(path, start, stop, stop - start) for start, stop in zip(bounds, bounds[1:])]
        elif size:
            pieces.append(Piece(path, 0, sys.maxsize, size, special))
    units, room = [], 0
    for piece in pieces:
        if not units or piece.size > room:
            units, room = units + [[]], target
        units[-1].append(piece)
        room -= piece.size
    return units


def open_utf8(piece):
    """(binary file of UTF-8, its size in bytes) of a piece's source."""
    file = open(piece.path, "rb")
    if piece.encoding:
        with file:
            file = io.BytesIO(text.utf8(text.decode_text(file.read(), piece.path, piece.encoding)))
    return file, file.seek(0, io.SEEK_END)


def read_txt(piece):
    """Yields the documents of a .txt file that belong to the piece."""
    file, size = open_utf8(piece)

    def find_boundary(offset):           # the same for the piece that ends and the one that begins
        file.seek(offset)
        found = text.find_cut(file.read(2 * DOCUMENT + 1), 0, 2 * DOCUMENT) if 0 < offset < size else 0
        return offset + found

    with file:
        start, stop = find_boundary(piece.start), min(find_boundary(piece.stop), size)
        file.seek(start)
        for document in text.split_text(file.read(stop - start)):
            encoding = "utf-8" if start else "utf-8-sig"     # drops the byte-order mark
            yield text.decode_text(document, piece.path, encoding, start)
            start += len(document)


def read_jsonl(piece):
    """Yields the text of each line that begins within the piece."""
    file, size = open_utf8(piece)
    with file:
        file.seek(max(0, piece.start - 1))
        if piece.start:
            file.readline()                          # the end of a line that began before
        while (at := file.tell()) < min(piece.stop, size):
            line = file.readline().removeprefix(b"\xef\xbb\xbf" if at == 0 else b"")
            line = text.decode_text(line, piece.path, "utf-8", at)
            try:
                row = json.loads(line)["text"] if line.strip() else ""
                if not isinstance(row, str):
                    raise TypeError("not a string")
            except (ValueError, KeyError, TypeError, RecursionError) as fault:
                file.seek(0)
                number = 1
                while file.tell() < at:
                    number += bool(file.readline())
                raise BadInput(f"{piece.path} line {number} is no JSON object with a string named text: "
                               f"mend or remove the line") from fault
            yield row


def read_parquet(piece):
    """Yields the text of each row of a row group."""
    file = open_parquet(piece.path)
    try:
        for batch in file.iter_batches(256, row_groups=[piece.start], columns=["text"]):
            yield from (row or "" for row in batch.column(0).to_pylist())
    except (OSError, ValueError) as fault:
        raise BadInput(f"{piece.path} is damaged ({type(fault).__name__}): replace it") from fault


@functools.lru_cache(maxsize=1)                      # once for all row groups of a file
def open_parquet(path):
    parquet = runtime.import_optional("pyarrow.parquet", f"the source {path}")
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as fault:           # pyarrow's own errors are ValueErrors
        raise BadInput(f"{path} is not a readable parquet file ({type(fault).__name__}): "
                       f"replace or remove it") from fault
    kinds = {field.name: str(field.type) for field in file.schema_arrow}
    if kinds.get("text") not in ("string", "large_string", "string_view"):
        raise BadInput(f"{path} has no column named text that holds strings: rename one, or remove it")
    return file


READERS = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}

# -------------------------------------------------------------------------------------------------------
# shards

def write_shards(index, unit, out, tokenizer, val, begin=None):
    """Tokenise a unit into val_<index>.bin and train_<index>.bin. Returns the bytes read.

    A hash decides which documents are validated on, about the share `val`. With `begin`, the first
    `begin` tokens of the unit are trained on instead, the rest is validated on: it may cut a document.
    Both files are written aside, synced and renamed: each is whole or not there."""
    tokenizer = text.load_tokenizer(tokenizer)
    paths = {split: out / f"{split}_{index:06d}.bin" for split in ("val", "train")}
    aside = {split: Path(f"{path}.{os.getpid()}.tmp") for split, path in paths.items()}
    counts, separator = dict.fromkeys(paths, 0), np.array([tokenizer.separator], dtype="<u2").tobytes()
    try:
        with open(aside["val"], "wb") as val_file, open(aside["train"], "wb") as train_file:
            files = {"val": val_file, "train": train_file}
            for file in files.values():
                file.write(bytes(HEADER.size))       # room for it: the count is known at the end
            for document in read_documents(unit):
                tokens = tokenizer.array(document)
                if begin is None:
                    parts = {"val" if text.is_val(document, val) else "train": tokens}
                else:
                    parts = {"train": tokens[:max(0, begin)], "val": tokens[max(0, begin):]}
                    begin -= len(tokens) + 1
                for split, part in parts.items():
                    if len(part):
                        files[split].write(part.astype("<u2", copy=False).tobytes() + separator)
                        counts[split] += len(part) + 1
            for split, file in files.items():
                file.seek(0)
                file.write(HEADER.pack(MAGIC, tokenizer.vocab_size, counts[split],
                                       tokenizer.digest.encode(), tokenizer.name.encode()))
                file.flush()
                os.fsync(file.fileno())
        for split in paths:
            os.replace(aside[split], paths[split])
    except OSError as fault:
        raise BadInput(f"{fault.filename or out} cannot be read or written ({fault.strerror}): "
                       f"mend that and run the same command again") from fault
    finally:
        for path in aside.values():
            path.unlink(missing_ok=True)
    return sum(piece.size for piece in unit)


def read_documents(unit):
    for piece in unit:
        yield from filter(None, READERS[Path(piece.path).suffix](piece))


def start_worker():
    """A worker dies with its parent, however that ended, and without a traceback by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def follow_parent():
        multiprocessing.parent_process().join()
        os._exit(1)
    threading.Thread(target=follow_parent, daemon=True).start()


def in_parallel(function, calls, workers):
    """Yields function(*call) for each call, as they are done. When one raises, all are ended."""
    if workers <= 1:
        yield from (function(*call) for call in calls)
        return
    spawn = multiprocessing.get_context("spawn")     # the same on every system, and safe beside threads
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=start_worker) as pool:
        try:
            for job in as_completed([pool.submit(function, *call) for call in calls]):
                yield job.result()
        except BrokenProcessPool as fault:
            raise BadInput("a worker process was killed, often for want of memory: lower --workers and "
                           "run the same command again, it continues") from fault
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def write_missing(units, args, out, begins):
    """Write the shards that are not there yet, `begin` as in begins. Returns how many were there."""
    names = [(f"train_{i:06d}.bin", f"val_{i:06d}.bin") for i in range(len(units))]
    todo = [i for i, pair in enumerate(names) if not all((out / name).exists() for name in pair)]
    calls = [(i, units[i], out, args.tokenizer, args.val, begins[i]) for i in todo]
    sizes = [sum(piece.size for piece in unit) for unit in units]
    done = sum(sizes) - sum(sizes[i] for i in todo)
    workers = min(args.workers or os.cpu_count(), len(todo))
    try:
        with tqdm(total=sum(sizes), initial=done, unit="B", unit_scale=True) as bar:
            for size in in_parallel(write_shards, calls, workers):
                bar.update(size)
    finally:
        remove_shards(out, ".*.tmp")                 # what a kill left, now or before
    return len(units) - len(todo)


def remove_shards(out, ending=""):
    for path in [*out.glob(f"train_{SHARD}{ending}"), *out.glob(f"val_{SHARD}{ending}")]:
        path.unlink(missing_ok=True)


def split_by_place(out, shards, share):
    """Where the hashes missed the share to validate on: the number of tokens to train on of each shard.

    Then the last `share` of all tokens is validated on. None where the hashes are right within a factor
    of two; few or like documents let them miss."""
    train, val = ([text.read_header(out / f"{split}_{i:06d}.bin")[0] for i in range(shards)]
                  for split in ("train", "val"))
    total = sum(train) + sum(val)
    if not share or not text.split_fails(sum(val), total, share):
        return None
    left, begins = total - max(2, round(share * total)), []
    for count in map(sum, zip(train, val)):
        begins.append(max(0, min(left, count)))
        left -= count
    return begins


# -------------------------------------------------------------------------------------------------------
# command line

def check_manifest(out, saved, manifest):
    """Two commands must not mix their shards in a folder. Raises BadInput with the first difference."""
    if saved is None and any(out.glob(f"*_{SHARD}")):
        raise BadInput(f"--out {out} holds shards but no manifest.json to say what they are: "
                       f"--fresh replaces them, or choose another --out")
    for key in manifest if saved else ():
        was, now = saved.get(key), manifest[key]
        if key == "sources" and was != now:
            path = next((new or old)[0] for old, new in zip_longest(was, now) if old != new)
            raise BadInput(f"source '{path}' is new, changed or gone since --out {out} was begun: "
                           f"--fresh starts over, or choose another --out")
        if was != now:
            raise BadInput(f"--out {out} was begun with {key} {was} and now it is {now}: "
                           f"give the same, --fresh to start over, or another --out")


def prepare(args):
    """Sources -> shards in args.out; what an earlier call of the same command finished is kept."""
    tokenizer, out = text.load_tokenizer(args.tokenizer), Path(args.out)
    paths = find_sources(args.sources)
    bytes_per_token = 1 if args.tokenizer == "bytes" else 4      # of English text, about
    units = make_units(paths, int(args.shard_tokens) * bytes_per_token, args.encoding)
    if not units:
        raise BadInput(f"source '{args.sources[0]}' is empty: choose another")
    manifest = dict(tokenizer=args.tokenizer, digest=tokenizer.digest, val=args.val,
                    shard_tokens=args.shard_tokens, encoding=args.encoding,
                    sources=[[path, os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in paths],
                    shards=len(units))
    path = out / "manifest.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if args.fresh:
            remove_shards(out)
            path.unlink(missing_ok=True)
        saved = text.read_manifest(out)
        check_manifest(out, saved, manifest)
        manifest = saved or manifest
        runtime.write_text(path, json.dumps(manifest, indent=1) + "\n")
    except OSError as fault:
        raise BadInput(f"--out {out} cannot be written ({fault.strerror}): choose another") from fault

    there = write_missing(units, args, out, manifest.get("begins") or [None] * len(units))
    begins = None if manifest.get("begins") else split_by_place(out, len(units), args.val)
    if begins:
        remove_shards(out)                           # before the manifest: a kill between starts over
        note = f"documents are few or alike, so the last {args.val:.2%} of the tokens is validated on"
        manifest.update(begins=begins, note=note)
        runtime.write_text(path, json.dumps(manifest, indent=1) + "\n")
        write_missing(units, args, out, begins)
    data = text.load_shards(out)
    print(f"{out}: {len(data.train):,} tokens to train on, {len(data.val):,} to validate on "
          f"({there} of {len(units)} shards were there)")
    if data.note:
        print(f"note: {data.note}")


def main(argv=None):
    parser, number = runtime.Parser(description=__doc__), runtime.number
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE",
        help=".txt (cut into documents of 16 to 32 kB), .jsonl or .parquet (with a field text); folders")
    add("--out", required=True, help="folder for the shards, to be passed to --data")
    add("--tokenizer", default="gpt2-32k", help="bytes, gpt2 or gpt2-32k")
    add("--encoding", help="of .txt and .jsonl files; else that of their byte-order mark, else UTF-8")
    add("--val", type=number(float, low=0, below=1), default=0.01, help="share to validate on")
    add("--workers", type=number(int, low=0), default=0, help="processes; 0 is one per core")
    add("--shard-tokens", type=number(float, low=1e5, high=1e12), default=1e8,
        help="tokens of a shard, about and at most: what a kill costs a process")
    add("--fresh", action="store_true", help="delete the shards in --out and start over")
    prepare(parser.parse_args(argv))


if __name__ == "__main__":
    runtime.run_script(main)
