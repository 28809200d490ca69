"""Zero-shot commonsense accuracy of a language model (paper 2's table), through lm-evaluation-harness: pip install lm-eval, 0.4.12 or newer.

    results = {"float32": run(model, tokenizer, tasks_dir="data/commonsense")}         100 items of each task, offline
    print(table(results))                                                              run(model, tokenizer): the complete sets, downloaded

The eight tasks are the harness's own: its prompts, its choices, its metrics, no examples in the prompt. With tasks_dir only the items are others, namely
the folder's; the harness's download is not called, so nothing is asked of the network. What to know when comparing with published numbers:

- Each choice is scored by the log-likelihood of its text. acc takes the likeliest, acc_norm the likeliest per character. The harness defines acc_norm for
  ARC-C, ARC-E, HellaSwag, OBQA and PIQA only. WinoGrande puts the two options into the context and scores what follows the blank.
- The complete sets are the test sets of ARC and OBQA and the validation sets of the others; the files in data/commonsense are validation items.
- BoolQ is SuperGLUE's in the harness: a label 0 or 1, and passages that open with the article's title. The local file is in the original's form: its
  boolean `answer` becomes the label; the titles are not in it.
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

from runtime import BadInput

# the harness's name -> (column of the paper's table, accuracy of guessing, fields of a local file under their Hugging Face names, the answer last)
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
ANSWERS = {"boolq": (False, True), "piqa": (0, 1), "social_iqa": ("1", "2", "3"), "winogrande": ("1", "2")}      # the others' depend on the row
FOLDERS = ("arc", "super_glue/boolq", "hellaswag", "openbookqa", "piqa", "siqa", "winogrande")      # where the harness keeps them; all its folders take seconds


# ---------------------------------------------------------------------------------------------------------------------
# log-likelihoods; these need no harness

def encode_pair(tokenizer, context, continuation):
    """Texts -> (context ids, continuation ids), which joined are the tokens of the whole text.

    White space at the end of the context belongs to the continuation, where BPE merges it into the next word. The continuation begins at the first token
    that differs from the context alone, so a token across the boundary is scored. Where no context is left, it is the separator, which begins a document.
    """
    text = context.rstrip()
    whole, alone = tokenizer.encode(context + continuation), tokenizer.encode(text)
    k = next((i for i, (a, b) in enumerate(zip(whole, alone)) if a != b), min(len(whole), len(alone)))
    if k == 0 and whole[:1] != [tokenizer.separator]:
        whole = [tokenizer.separator] + whole
    return whole[:max(k, 1)], whole[max(k, 1):]


def windows(context, continuation, block_size):
    """(inputs, targets) that score each continuation token once: inputs of at most block_size tokens, targets what follows the last len(targets) of them.

    One window with the context cut on its left, where the continuation fits; a longer one is scored block_size tokens at a time, and the last window is
    filled up with tokens that were scored before. Raises ValueError for an empty context: nothing would predict the first token.
    """
    if not context:
        raise ValueError("the context is empty: pass the separator")
    tokens = context + continuation
    for start in range(len(context), len(tokens), block_size):
        stop = min(start + block_size, len(tokens))
        yield tokens[max(0, stop - 1 - block_size):stop - 1], tokens[start:stop]


@torch.no_grad()
def loglikelihoods(model, pairs, block_size, batch_size=16, device=None):
    """[(context ids, continuation ids)] -> [(log p(continuation | context) in nats, whether greedy decoding would write it)], in the same order.

    model: tokens (B, N) -> logits (B, N, V), causal; evaluated in eval mode, the log-softmax in float32. device: where the model is; None looks.
    A batch holds inputs of one length only: padding would be seen by an activation quantiser with one scale per tensor. Such a quantiser also
    sees the other rows of its batch; batch_size=1 is free of that. Raises BadInput when the logits are NaN, which would silently pick the first choice.
    """
    device = device or next(itertools.chain(model.parameters(), model.buffers()), torch.empty(0)).device
    pieces = [(index, *window) for index, pair in enumerate(pairs) for window in windows(*pair, block_size)]
    pieces.sort(key=lambda piece: len(piece[1]), reverse=True)                 # the longest first: it runs out of memory at once or never
    batches = []
    for _, group in itertools.groupby(pieces, key=lambda piece: len(piece[1])):
        while batch := list(itertools.islice(group, batch_size)):
            batches.append(batch)
    total, greedy, training = [0.0] * len(pairs), [True] * len(pairs), model.training
    model.eval()
    try:
        for batch in tqdm(batches, desc="zero-shot", unit="batch", leave=False, file=sys.__stderr__, disable=not sys.stdout.isatty()):
            logits = model(torch.tensor([inputs for _, inputs, _ in batch], device=device))
            for row, (index, _, targets) in zip(logits, batch):
                log_p, targets = row[-len(targets):].float().log_softmax(-1), torch.tensor(targets, device=device)
                total[index] += log_p.gather(-1, targets[:, None]).sum().item()
                greedy[index] &= (log_p.argmax(-1) == targets).all().item()
    finally:
        model.train(training)
    if any(math.isnan(value) for value in total):
        raise BadInput("the model's logits are not finite, so it has no zero-shot accuracy: check the checkpoint, or quantise to more bits")
    return list(zip(total, greedy))


# ---------------------------------------------------------------------------------------------------------------------
# the harness

@functools.lru_cache(maxsize=1)
def harness():
    """(lm_eval.api.model.LM, lm_eval.evaluator.evaluate, a TaskManager that knows the eight tasks)."""
    try:
        import lm_eval.api.model
        import lm_eval.evaluator
        import lm_eval.tasks
    except ImportError as error:
        raise BadInput(f"--tasks needs the package lm-eval ({error}): pip install lm-eval") from error
    if not hasattr(lm_eval.tasks.TaskManager, "load"):
        raise BadInput(f"--tasks needs lm-eval 0.4.12 or newer and this is {lm_eval.__version__}: pip install --upgrade lm-eval")
    folders = [Path(lm_eval.tasks.__file__).parent / name for name in FOLDERS]
    manager = lm_eval.tasks.TaskManager(include_path=[folder for folder in folders if folder.is_dir()], include_defaults=False)
    if not set(TASKS) <= set(manager.all_tasks):                 # another version keeps them elsewhere
        manager = lm_eval.tasks.TaskManager()
    return lm_eval.api.model.LM, lm_eval.evaluator.evaluate, manager


def adapter(model, tokenizer, batch_size=16, device=None):
    """The model as the harness wants it. model needs .block_size; tokenizer .encode(str) -> ids and .separator."""
    class Adapter(harness()[0]):
        def loglikelihood(self, requests):
            return loglikelihoods(model, [encode_pair(tokenizer, *r.args) for r in requests], model.block_size, batch_size, device)

        def loglikelihood_rolling(self, requests):
            """Of whole texts, each a document of its own."""
            pairs = [([tokenizer.separator], tokenizer.encode(r.args[0])) for r in requests]
            return [value for value, _ in loglikelihoods(model, pairs, model.block_size, batch_size, device)]

        def generate_until(self, requests):
            raise NotImplementedError("tasks that generate text are not supported: the eight commonsense tasks compare likelihoods")
    return Adapter()


def read_items(folder, task):
    """The items of one task from folder/task.jsonl, or else folder/task_sample100.jsonl: a list of dicts with the fields of the harness.

    Raises BadInput, with file and line, for what is no JSON, lacks a field, or has an answer that is none of the choices: the harness would count
    the last as wrong and go on.
    """
    paths = [Path(folder) / f"{task}.jsonl", Path(folder) / f"{task}_sample100.jsonl"]
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        raise BadInput(f"{folder} has neither {paths[0].name} nor {paths[1].name}: choose another --tasks-dir, or leave {task} out of --tasks")
    items = []
    for n, line in enumerate(path.read_bytes().splitlines(), 1):             # of bytes: those of a str would also end at a U+2028 inside a JSON string
        if line.strip():
            try:
                row = json.loads(line)
                items.append(_item(task, {field: row[field] for field in TASKS[task][2]}))
            except (ValueError, KeyError, TypeError) as error:
                raise BadInput(f"{path} line {n} is no item of {task} ({type(error).__name__}: {error}): repair or delete it; "
                               f"it needs the fields {', '.join(TASKS[task][2])}") from error
    if not items:
        raise BadInput(f"{path} is empty: copy it again")
    return items


def _item(task, row):
    """One row of a local file as the harness wants it. Raises ValueError, KeyError or TypeError, in words for a person."""
    *texts, answer = row.values()
    flat = lambda value: flat(value["text"]) + flat(value["label"]) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    "".join(text for value in texts for text in flat(value)).encode()          # all must be strings, and whole ones
    options = (list("0123")[:len(row["endings"])] if task == "hellaswag" else row["choices"]["label"] if "choices" in row else ANSWERS[task])
    if answer not in options:
        raise ValueError(f"the answer {answer!r} is none of {', '.join(map(repr, options))}")
    if "choices" in row and len(row["choices"]["text"]) != len(options):
        raise ValueError(f"{len(row['choices']['text'])} choices with {len(options)} labels")
    if task == "winogrande" and "_" not in row["sentence"]:
        raise ValueError("the sentence has no blank _")
    return dict(passage=row["passage"], question=row["question"], label=int(answer)) if task == "boolq" else row


def load_tasks(names, items=None):
    """The harness's tasks, zero-shot. items: {name: list of dicts} to use in place of its downloads. Raises BadInput when a download fails."""
    specs = [dict(task=name, num_fewshot=0) for name in names]
    if items:
        import datasets                                          # the harness's own dependency; its process_docs want this type
        for spec in specs:
            rows = datasets.Dataset.from_list(items[spec["task"]])
            spec.update(custom_dataset=lambda rows=rows, **_: {"validation": rows}, training_split=None, validation_split="validation", test_split=None)
    try:
        return harness()[2].load([dict(group="commonsense", task=specs)])      # only inside a group does a dict override the registered task
    except OSError as error:
        raise BadInput(f"the data sets of --tasks cannot be downloaded ({error}): check the network, or pass --tasks-dir data/commonsense") from error


@contextlib.contextmanager
def quiet():
    """Without the harness's progress bars and notes; the warnings worth having are errors in read_items."""
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


def chosen(tasks, tasks_dir=None):
    """(names, items or None) for the `tasks` and `tasks_dir` of `run`. Raises BadInput for an unknown task and an unreadable file."""
    names = list(TASKS) if tasks == "all" else [name.strip() for name in tasks.split(",")] if isinstance(tasks, str) else list(tasks)
    for name in names:
        if name not in TASKS:
            raise BadInput(f"--tasks {name} is unknown: use all, or some of {','.join(TASKS)}")
    if not names or len(set(names)) < len(names):
        raise BadInput(f"--tasks {','.join(names)} must name at least one task, and none twice")
    return names, {name: read_items(tasks_dir, name) for name in names} if tasks_dir else None


def run(model, tokenizer, tasks="all", tasks_dir=None, limit=None, batch_size=16, device=None):
    """{task: {acc, acc_stderr, acc_norm, acc_norm_stderr, n}} and the same under "average". Nothing here is random.

    tasks: "all", names separated by commas, or a list. tasks_dir: a folder of JSON lines, see `read_items`; None downloads the complete sets.
    limit: the first so many items of each task. acc_norm is None where the harness defines none; the average then takes acc. Errors are standard
    errors over items, None for a single item; the average's is that of a mean of independent tasks. Raises BadInput.
    """
    names, items = chosen(tasks, tasks_dir)
    if limit is not None and limit < 1:
        raise BadInput(f"--limit {limit} must be at least 1 item")
    if getattr(model, "vocab_size", math.inf) < tokenizer.vocab_size:
        raise BadInput(f"the model knows {model.vocab_size} tokens and the tokenizer {tokenizer.vocab_size}: use the tokenizer that the model was trained with")
    with quiet():
        measured = harness()[1](adapter(model, tokenizer, batch_size, device), load_tasks(names, items), limit=limit, log_samples=False)
    results = {}
    for name in names:
        value = measured["results"][name]
        error = lambda metric: None if value.get(metric) in (None, "N/A") else value[metric]
        results[name] = dict(acc=value["acc,none"], acc_stderr=error("acc_stderr,none"), acc_norm=value.get("acc_norm,none"),
                             acc_norm_stderr=error("acc_norm_stderr,none"), n=measured["n-samples"][name]["effective"])
    average = dict(n=sum(r["n"] for r in results.values()))
    for metric in ("acc", "acc_norm"):
        values, errors = zip(*(_metric(r, metric) for r in results.values()))
        average[metric] = sum(values) / len(values)
        average[metric + "_stderr"] = None if None in errors else math.hypot(*errors) / len(errors)
    return dict(results, average=average)


def _metric(result, metric):
    """(value, standard error) of acc or acc_norm; of acc where the task has no acc_norm."""
    metric = metric if result[metric] is not None else "acc"
    return result[metric], result[metric + "_stderr"]


def table(results_by_precision):
    """{precision: what `run` returned} -> markdown: one table for each of the two accuracies, one row per precision, the paper's columns."""
    names = [name for name in TASKS if any(name in r for r in results_by_precision.values())]
    digits = lambda x: f"{x:.3f}".removeprefix("0")
    cell = lambda value, error: digits(value) + (f" ± {digits(error)}" if error is not None else "")
    lines = []
    for metric, title in (("acc", "Accuracy"), ("acc_norm", "Length-normalised accuracy (BoolQ, SIQA and WinoG have none: their accuracy)")):
        lines += [f"{title}, zero-shot, ± standard error", "", f"| precision | {' | '.join(TASKS[name][0] for name in names)} | average |",
                  "|---" * (len(names) + 2) + "|"]
        lines += [f"| {precision} | " + " | ".join(cell(*_metric(r[name], metric)) if name in r else "-" for name in (*names, "average")) + " |"
                  for precision, r in results_by_precision.items()] + [""]
    counts = [sorted({str(r[name]["n"]) for r in results_by_precision.values() if name in r}) for name in names]
    lines += ["Guessing: " + ", ".join(f"{TASKS[name][0]} {digits(TASKS[name][1])}" for name in names)
              + f", average {digits(sum(TASKS[name][1] for name in names) / len(names))}. "
              "Items: " + ", ".join(f"{TASKS[name][0]} {' or '.join(n)}" for name, n in zip(names, counts)) + ". "
              "The paper does not say which of the two accuracies it reports; its .32 for OBQA and .26 for ARC-C at 194 M parameters look length-normalised."]
    return "\n".join(lines)
