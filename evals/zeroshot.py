"""Zero-shot commonsense accuracy of a language model, as in paper 2's table, by lm-evaluation-harness.

    python -m evals.zeroshot --ckpt out/lm-skipless --tasks-dir data/commonsense        100 items a task
    python -m evals.zeroshot --ckpt out/lm-skipless --bits 8              the complete sets, downloaded

Needs pip install lm-eval, 0.4.12 or newer. Tasks, prompts, choices and metrics are the harness's own,
without examples in the prompt. With --tasks-dir the items come from that folder, and nothing is
downloaded.

When you compare with published numbers:
- A choice is scored by the log-likelihood of its text. acc takes the likeliest choice, acc_norm the
  likeliest per character. The harness has acc_norm for ARC-C, ARC-E, HellaSwag, OBQA and PIQA only.
  WinoGrande puts its two options into the context and scores what follows the blank.
- The complete sets are the test sets of ARC and OBQA and the validation sets of the others. The files in
  data/commonsense are validation items.
- BoolQ is SuperGLUE's in the harness: labels 0 and 1, passages that begin with their title. The local
  file has the original form: true and false, no titles.
"""
import contextlib
import functools
import io
import itertools
import json
import logging
import math
import sys
from pathlib import Path

import torch
from tqdm import tqdm

import quantize
import runtime
from runtime import BadInput

# The harness's name -> (column of the paper's table, accuracy of guessing, fields of a local file with
# the answer last).
TASKS = {
    "arc_challenge": ("ARC-C", 1 / 4, ("question", "choices", "answerKey")),
    "arc_easy": ("ARC-E", 1 / 4, ("question", "choices", "answerKey")),
    "boolq": ("BoolQ", 1 / 2, ("passage", "question", "answer")),
    "hellaswag": ("HellaSwag", 1 / 4, ("activity_label", "ctx_a", "ctx_b", "endings", "label")),
    "openbookqa": ("OBQA", 1 / 4, ("question_stem", "choices", "answerKey")),
    "piqa": ("PIQA", 1 / 2, ("goal", "sol1", "sol2", "label")),
    "social_iqa": ("SIQA", 1 / 3, ("context", "question", "answerA", "answerB", "answerC", "label")),
    "winogrande": ("WinoG", 1 / 2, ("sentence", "option1", "option2", "answer")),
}
ANSWERS = {"boolq": (False, True), "piqa": (0, 1), "social_iqa": tuple("123"), "winogrande": tuple("12")}
# The folders in which the harness keeps these tasks. It takes seconds to look through all it has.
FOLDERS = ("arc", "super_glue/boolq", "hellaswag", "openbookqa", "piqa", "siqa", "winogrande")


# -------------------------------------------------------------------------------------------------------
# log-likelihoods

def encode_pair(tokenizer, context, continuation):
    """Texts -> (context ids, continuation ids), which joined are the tokens of the whole text.

    White space at the end of the context goes to the continuation, since BPE joins it to the next word.
    The continuation begins where the tokens first differ from those of the context alone, so a token
    across the boundary is scored. An empty context becomes the separator, which begins a document."""
    whole, alone = tokenizer.encode(context + continuation), tokenizer.encode(context.rstrip())
    k = next((i for i, (a, b) in enumerate(zip(whole, alone)) if a != b), min(len(whole), len(alone)))
    if k == 0 and whole[:1] != [tokenizer.separator]:
        whole = [tokenizer.separator] + whole
    return whole[:max(k, 1)], whole[max(k, 1):]


def scoring_windows(context, continuation, block_size):
    """Yields (inputs, targets): up to block_size inputs, and what follows the last len(targets) of them.

    Each continuation token is a target once. Where all does not fit, the context is cut on its left. A
    long continuation is scored block_size tokens at a time; its last window begins with tokens already
    scored."""
    if not context:
        raise ValueError("the context is empty: pass the separator")
    tokens = context + continuation
    for start in range(len(context), len(tokens), block_size):
        stop = min(start + block_size, len(tokens))
        yield tokens[max(0, stop - 1 - block_size):stop - 1], tokens[start:stop]


@torch.no_grad()
def loglikelihoods(model, pairs, block_size, batch_size=16, device=None):
    """[(context ids, continuation ids)] -> [(log p(continuation | context), is it the greedy one)].

    model: tokens (B, N) -> logits (B, N, V), causal. Nats; the log-softmax in float32. A batch holds
    inputs of one length only, since an activation quantiser with a scale per tensor would see padding.
    It sees the other rows too; batch_size 1 is free of that. Raises BadInput where logits are nan: the
    first choice would win."""
    device = device or next(itertools.chain(model.parameters(), model.buffers()), torch.empty(0)).device
    pieces = [(i, *window) for i, pair in enumerate(pairs)
              for window in scoring_windows(*pair, block_size)]
    pieces.sort(key=lambda piece: len(piece[1]), reverse=True)   # out of memory at once, or never
    batches = []
    for _, group in itertools.groupby(pieces, key=lambda piece: len(piece[1])):
        while batch := list(itertools.islice(group, batch_size)):
            batches.append(batch)
    total, greedy, training = [0.0] * len(pairs), [True] * len(pairs), model.training
    model.eval()
    hidden = not sys.stdout.isatty()
    for batch in tqdm(batches, "zero-shot", leave=False, file=sys.__stderr__, disable=hidden):
        logits = model(torch.tensor([inputs for _, inputs, _ in batch], device=device))
        for row, (index, _, targets) in zip(logits, batch):
            log_p = row[-len(targets):].float().log_softmax(-1)
            targets = torch.tensor(targets, device=device)
            total[index] += log_p.gather(-1, targets[:, None]).sum().item()
            greedy[index] &= (log_p.argmax(-1) == targets).all().item()
    model.train(training)
    if any(math.isnan(value) for value in total):
        raise BadInput("the model's logits are not finite, so it has no zero-shot accuracy: "
                       "check the checkpoint, or quantise to more bits")
    return list(zip(total, greedy))


# -------------------------------------------------------------------------------------------------------
# items from a folder

def read_items(folder, task):
    """The items of folder/task.jsonl, else folder/task_sample100.jsonl, dicts with the harness's fields.

    Raises BadInput with file and line for what is no JSON, lacks a field, or has an answer that is none
    of the choices: the harness would count that as wrong and go on."""
    paths = [Path(folder) / f"{task}.jsonl", Path(folder) / f"{task}_sample100.jsonl"]
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        raise BadInput(f"{folder} has neither {paths[0].name} nor {paths[1].name}: "
                       f"choose another --tasks-dir, or leave {task} out of --tasks")
    items = []
    for n, line in enumerate(path.read_bytes().splitlines(), 1):     # a str would also be cut at U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            items.append(check_item(task, {field: row[field] for field in TASKS[task][2]}))
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{path} line {n} is no item of {task} ({type(error).__name__}: {error}): "
                           f"repair or delete it; it needs {', '.join(TASKS[task][2])}") from error
    if not items:
        raise BadInput(f"{path} is empty: copy it again")
    return items


def check_item(task, row):
    """A row of a local file as the harness wants it. Raises ValueError, KeyError or TypeError."""
    *texts, answer = row.values()
    while texts:                                     # all must be strings that UTF-8 can hold
        field = texts.pop()
        if isinstance(field, dict):
            texts += [*field["text"], *field["label"]]
        elif isinstance(field, list):
            texts += field
        else:
            "".join([field]).encode()
    if task == "hellaswag":
        options = list("0123")[:len(row["endings"])]
    else:
        options = row["choices"]["label"] if "choices" in row else ANSWERS[task]
    if answer not in options:
        raise ValueError(f"the answer {answer!r} is none of {', '.join(map(repr, options))}")
    if "choices" in row and len(row["choices"]["text"]) != len(options):
        raise ValueError(f"{len(row['choices']['text'])} choices with {len(options)} labels")
    if task == "winogrande" and "_" not in row["sentence"]:
        raise ValueError("the sentence has no blank _")
    if task == "boolq":
        return dict(passage=row["passage"], question=row["question"], label=int(answer))
    return row


# -------------------------------------------------------------------------------------------------------
# the harness

@functools.lru_cache(maxsize=1)
def load_harness():
    """(lm_eval.api.model.LM, lm_eval.evaluator.evaluate, a TaskManager that knows the eight tasks)."""
    evaluator = runtime.import_optional("lm_eval.evaluator", "zero-shot accuracy")
    import lm_eval.api.model
    import lm_eval.tasks
    if not hasattr(lm_eval.tasks.TaskManager, "load"):
        raise BadInput(f"zero-shot accuracy needs lm-eval 0.4.12 and this is {lm_eval.__version__}: "
                       f"pip install --upgrade lm-eval")
    folders = [Path(lm_eval.tasks.__file__).parent / name for name in FOLDERS]
    folders = [folder for folder in folders if folder.is_dir()]
    manager = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
    if not set(TASKS) <= set(manager.all_tasks):                 # another version keeps them elsewhere
        manager = lm_eval.tasks.TaskManager()
    return lm_eval.api.model.LM, evaluator.evaluate, manager


def harness_model(model, tokenizer, batch_size=16, device=None):
    """The model as the harness wants it. It needs .block_size, the tokenizer .encode and .separator."""
    class Adapter(load_harness()[0]):
        def loglikelihood(self, requests):
            pairs = [encode_pair(tokenizer, *r.args) for r in requests]
            return loglikelihoods(model, pairs, model.block_size, batch_size, device)

        def loglikelihood_rolling(self, requests):
            """Of whole texts, each a document of its own."""
            pairs = [([tokenizer.separator], tokenizer.encode(r.args[0])) for r in requests]
            found = loglikelihoods(model, pairs, model.block_size, batch_size, device)
            return [value for value, _ in found]

        def generate_until(self, requests):
            raise NotImplementedError("the eight tasks compare likelihoods: none generates text")
    return Adapter()


def load_tasks(names, items=None):
    """The harness's tasks. items: {name: list of dicts} to use in place of its downloads.

    Raises BadInput when a download fails."""
    specs = [dict(task=name, num_fewshot=0) for name in names]
    if items:
        import datasets                              # comes with the harness, which wants its type
        for spec in specs:
            def give_items(rows=datasets.Dataset.from_list(items[spec["task"]]), **_):
                return {"validation": rows}
            spec.update(custom_dataset=give_items, training_split=None, validation_split="validation",
                        test_split=None)
    try:                                             # only in a group do these override the tasks
        return load_harness()[2].load([dict(group="commonsense", task=specs)])
    except OSError as error:
        raise BadInput(f"the data sets cannot be downloaded ({error}): "
                       f"check the network, or pass --tasks-dir data/commonsense") from error


@contextlib.contextmanager
def silent_harness():
    """Without the harness's progress bars and notes."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def choose_tasks(tasks, tasks_dir=None):
    """(names, {name: items} or None) for `zero_shot`. Raises BadInput for unknown tasks and items."""
    names = list(TASKS) if tasks == "all" else list(dict.fromkeys(tasks.replace(" ", "").split(",")))
    for name in names:
        if name not in TASKS:
            raise BadInput(f"--tasks {name} is unknown: use all, or some of {','.join(TASKS)}")
    return names, {name: read_items(tasks_dir, name) for name in names} if tasks_dir else None


def zero_shot(model, tokenizer, tasks="all", tasks_dir=None, limit=None, batch_size=16, device=None):
    """{task: {acc, acc_stderr, acc_norm, acc_norm_stderr, n}}, and the same under "average".

    tasks: "all" or names with commas between. tasks_dir: a folder of items, see `read_items`; None
    downloads the complete sets. limit: the first so many items of each task. acc_norm is None where the
    harness has none; the average then takes acc. Errors are standard errors over items, None for a
    single item; the average's is that of a mean of independent tasks. Nothing is random. Raises
    BadInput."""
    names, items = choose_tasks(tasks, tasks_dir)
    if getattr(model, "vocab_size", math.inf) < tokenizer.vocab_size:
        raise BadInput(f"the model knows {model.vocab_size} tokens and the tokenizer "
                       f"{tokenizer.vocab_size}: use the one that the model was trained with")
    with silent_harness():
        adapter = harness_model(model, tokenizer, batch_size, device)
        found = load_harness()[1](adapter, load_tasks(names, items), limit=limit, log_samples=False)
    results = {}
    for name in names:
        value = {key: None if v == "N/A" else v for key, v in found["results"][name].items()}
        results[name] = dict(n=found["n-samples"][name]["effective"])
        for metric in ("acc", "acc_norm"):
            results[name][metric] = value.get(f"{metric},none")
            results[name][f"{metric}_stderr"] = value.get(f"{metric}_stderr,none")
    average = dict(n=sum(r["n"] for r in results.values()))
    for metric in ("acc", "acc_norm"):
        values, errors = zip(*(value_and_error(r, metric) for r in results.values()))
        average[metric] = sum(values) / len(values)
        average[f"{metric}_stderr"] = None if None in errors else math.hypot(*errors) / len(errors)
    return dict(results, average=average)


def value_and_error(result, metric):
    """(value, standard error) of acc or acc_norm; of acc where the task has no acc_norm."""
    metric = metric if result[metric] is not None else "acc"
    return result[metric], result[f"{metric}_stderr"]


# -------------------------------------------------------------------------------------------------------
# table and command line

def accuracy_table(results):
    """{row: what `zero_shot` returned} -> markdown: a table for each accuracy, the paper's columns."""
    def digits(x):
        return f"{x:.3f}".removeprefix("0")

    def accuracy(result, metric):
        value, error = value_and_error(result, metric)
        return digits(value) + (f" ± {digits(error)}" if error is not None else "")

    names = [name for name in TASKS if any(name in r for r in results.values())]
    titles = {"acc": "Accuracy, zero-shot, ± standard error",
              "acc_norm": "Length-normalised (BoolQ, SIQA and WinoG have none: their accuracy)"}
    header, tables = ["precision", *(TASKS[name][0] for name in names), "average"], []
    for metric, title in titles.items():
        rows = [[row, *(accuracy(r[name], metric) if name in r else "-" for name in (*names, "average"))]
                for row, r in results.items()]
        tables.append(f"{title}\n\n{quantize.markdown_table(header, rows)}")
    guesses = [TASKS[name][1] for name in names]
    guessing = [f"{TASKS[name][0]} {digits(guess)}" for name, guess in zip(names, guesses)]
    guessing.append(f"average {digits(sum(guesses) / len(guesses))}")
    counts = {name: r[name]["n"] for r in results.values() for name in names if name in r}
    items = [f"{TASKS[name][0]} {count}" for name, count in counts.items()]
    tables.append(f"Guessing: {', '.join(guessing)}. Items: {', '.join(items)}.\n"
                  f"The paper does not say which of the two it reports; its .32 for OBQA and .26 for\n"
                  f"ARC-C look length-normalised.\n")
    return "\n".join(tables)


def main(argv=None):
    parser = quantize.lm_parser(__doc__)
    add = parser.add_argument_group("tasks").add_argument
    add("--tasks", default="all", help=f"names with commas between: {','.join(TASKS)}")
    add("--tasks-dir", help="folder of items, such as data/commonsense; else the sets are downloaded")
    add("--limit", type=runtime.number(int, low=1), help="items per task; else all")
    args = parser.parse_args(argv)
    choose_tasks(args.tasks, args.tasks_dir)                     # what is missing is said at once
    load_harness()
    world = runtime.start(args.device, args.threads)
    dtype, _ = runtime.pick_dtype(args.dtype, world.device)
    runs, folder = quantize.open_lms(args, world.device)
    results = {}
    for name, net, _, data in runs:
        full = str(dtype).removeprefix("torch."), None, net
        variants = quantize.quantized_variants(net, data, args, dtype)
        for precision, _, variant in itertools.chain([full], variants):
            with runtime.autocast(world.device, dtype):
                found = zero_shot(variant, data.tokenizer, args.tasks, args.tasks_dir, args.limit,
                                  args.batch_size, world.device)
            results[f"{precision}, {name}"] = found
            print(f"{precision}, {name}: average accuracy {found['average']['acc']:.3f}", flush=True)
    table = accuracy_table(results)
    print(f"\n{table}")
    found = dict(args=vars(args), results=results)
    runtime.write_text(folder / "zeroshot.json", json.dumps(found, indent=1) + "\n")
    runtime.write_text(folder / "zeroshot.md", table)


if __name__ == "__main__":
    runtime.run_script(main)
