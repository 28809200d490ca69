"""Corpora to token shards, once, before training: .txt, .jsonl and .parquet files (FineWeb-Edu's layout for one), in parallel and restartable.

    python prepare.py /path/to/fineweb-edu --out shards --tokenizer gpt2-32k --val 0.01
    python train_lm.py --data shards

Started again after a kill, the same command keeps what is finished, and ends with the same bytes. `text.py` reads what this writes.
"""
import functools
import json
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import runtime
from runtime import BadInput
from text import DOCUMENT, HEADER, MAGIC, SHARD, cut, is_val, load_shards, load_tokenizer, read_manifest, split_text


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
        remove(out, ".*.tmp")                                    # what a kill left, now or before
    data = load_shards(out)
    print(f"{out}: {len(data.train):,} tokens to train on, {len(data.val):,} to validate on ({len(units) - len(todo)} of {len(units)} shards were there)")
    if args.val and not len(data.val):
        print("no document fell to validation: give more text, or raise --val")


def main(argv=None):
    parser = runtime.Parser(description=__doc__)
    add = parser.add_argument
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
