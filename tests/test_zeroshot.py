"""evals/zeroshot.py: log-likelihoods against sums computed by hand, the harness's tasks with models
whose accuracy is known; the latter need lm-eval."""
import json
import logging
import math
import random
import re
import socket
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import runtime
import text
from evals import zeroshot
from model import LM
from runtime import BadInput

DATA = Path(__file__).resolve().parent.parent / "data" / "commonsense"


class Bigram(nn.Module):
    """Logits from a table by the last token alone. Keeps the batches that it was given."""

    def __init__(self, logits, block_size=16):
        super().__init__()
        self.register_buffer("logits", logits)
        self.block_size, self.seen = block_size, []

    def forward(self, tokens):
        assert tokens.shape[1] <= self.block_size
        self.seen.append(tokens)
        return self.logits[tokens]


class Sum(Bigram):
    """Logits by the sum of all tokens in the window: what was cut off, or put in between, changes every
    answer."""

    def forward(self, tokens):
        super().forward(tokens)
        return self.logits[tokens.cumsum(1) % len(self.logits)]


def by_hand(model, context, continuation, block_size):
    """Token by token in float64: log p(token | the window before it); the window holds what its place
    in the scheme allows."""
    log_p, tokens, greedy = model.logits.double().log_softmax(-1), context + continuation, True
    total = 0.0
    for i in range(len(context), len(tokens)):
        # where the block_size tokens that i is scored with begin
        chunk = (i - len(context)) // block_size * block_size + len(context)
        start = max(0, min(chunk + block_size, len(tokens)) - 1 - block_size)
        row = log_p[sum(tokens[start:i]) % len(log_p) if isinstance(model, Sum) else tokens[i - 1]]
        total += row[tokens[i]].item()
        greedy &= row.argmax().item() == tokens[i]
    return total, greedy


def some_pairs(count, vocab, seed=0, longest=30):
    r = random.Random(seed)
    ids = lambda n: [r.randrange(vocab) for _ in range(n)]
    return [(ids(r.randint(1, longest)), ids(r.randint(1, longest))) for _ in range(count)]


# -------------------------------------------------------------------------------------------------------
# log-likelihoods

@pytest.mark.parametrize("kind", [Bigram, Sum])
def test_loglikelihoods_equal_the_sum_by_hand(kind):
    torch.manual_seed(0)
    model = kind(torch.randn(11, 11) * 3)
    pairs = some_pairs(60, 11)
    lengths = [(len(a), len(b)) for a, b in pairs]
    # whole, windows, cut
    assert (any(a + b <= 16 for a, b in lengths) and any(b > 16 for _, b in lengths)
            and any(b <= 16 < a + b - 1 for a, b in lengths))
    for (value, greedy), (context, continuation) in zip(
            zeroshot.loglikelihoods(model, pairs, 16), pairs):
        expected = by_hand(model, context, continuation, 16)
        assert value == pytest.approx(expected[0], abs=1e-4) and greedy == expected[1]


def test_greedy_is_true_for_the_argmax_path_only_and_over_all_windows():
    torch.manual_seed(1)
    model = Bigram(torch.randn(7, 7), block_size=4)
    path = [3]
    for _ in range(10):
        path.append(model.logits[path[-1]].argmax().item())
    wrong = [path[1:]] * 10
    wrong = [w[:i] + [(w[i] + 1) % 7] + w[i + 1:] for i, w in enumerate(wrong)]
    got = zeroshot.loglikelihoods(model, [([3], path[1:])] + [([3], w) for w in wrong], 4)
    assert [g for _, g in got] == [True] + [False] * 10


def test_order_batches_and_duplicates_change_nothing():
    torch.manual_seed(0)
    model = LM(vocab_size=40, block_size=16, embed_dim=32, depth=2, num_heads=2)
    nn.init.normal_(model.token_embed.weight, std=1.0)                         # logits far from uniform
    pairs = some_pairs(40, 40)
    reference = [zeroshot.loglikelihoods(model, [pair], 16)[0] for pair in pairs]
    assert max(v for v, _ in reference) - min(v for v, _ in reference) > 10
    order = random.Random(1).sample(range(40), 40) + [5, 5, 7]
    for batch_size in (1, 3, 64):
        got = zeroshot.loglikelihoods(model, [pairs[i] for i in order], 16, batch_size)
        assert len(got) == 43
        for i, (value, greedy) in zip(order, got):
            assert value == pytest.approx(reference[i][0], abs=1e-3) and greedy == reference[i][1]


def test_only_the_requests_own_tokens_reach_the_model():
    """A quantiser with one scale per tensor would see padding."""
    model = Bigram(torch.randn(9, 9))
    pairs = some_pairs(50, 9)
    zeroshot.loglikelihoods(model, pairs, 16, batch_size=8)
    expected = sorted(inputs for pair in pairs for inputs, _ in zeroshot.scoring_windows(*pair, 16))
    assert sorted(row.tolist() for batch in model.seen for row in batch) == expected
    assert max(len(batch) for batch in model.seen) == 8                        # batched nevertheless
    widths = [batch.shape[1] for batch in model.seen]
    assert widths == sorted(widths, reverse=True)


def test_windows_of_the_harness_s_documentation():
    """Ten tokens after the separator (here 99), context 4: the last window is full and only its last
    two tokens are scored."""
    assert list(zeroshot.scoring_windows([99], list(range(10)), 4)) == [
        ([99, 0, 1, 2], [0, 1, 2, 3]), ([3, 4, 5, 6], [4, 5, 6, 7]), ([5, 6, 7, 8], [8, 9])]


def test_windows_score_each_continuation_token_once_with_all_the_context_that_fits():
    for c, k, block in [
            (c, k, block) for c in (1, 2, 5, 9) for k in range(0, 12) for block in (1, 3, 5, 20)]:
        tokens = list(range(c + k))
        scored = []
        for inputs, targets in zeroshot.scoring_windows(tokens[:c], tokens[c:], block):
            # full, or everything that there is before the last target
            assert len(inputs) == min(block, targets[-1])
            assert inputs == tokens[targets[-1] - len(inputs) : targets[-1]] and len(targets) <= len(
                inputs)
            scored += targets
        assert scored == tokens[c:]
    with pytest.raises(ValueError, match="separator"):
        list(zeroshot.scoring_windows([], [1], 4))


def test_an_empty_continuation_is_certain():
    assert zeroshot.loglikelihoods(Bigram(torch.zeros(3, 3)), [([1], [])], 16) == [(0.0, True)]


def test_mode_is_eval_and_comes_back_and_bf16_logits_are_summed_in_float32():
    class Noisy(Bigram):
        def forward(self, tokens):
            return nn.functional.dropout(super().forward(tokens), 0.5, self.training).bfloat16()
    torch.manual_seed(0)
    table = (torch.randn(5, 5) * 4).bfloat16().float()
    model, pairs = Noisy(table), some_pairs(20, 5, longest=14)
    model.train()
    for (value, _), pair in zip(zeroshot.loglikelihoods(model, pairs, 16), pairs):
        assert value == pytest.approx(by_hand(Bigram(table), *pair, 16)[0], abs=1e-4)
    assert model.training
    model.eval()
    zeroshot.loglikelihoods(model, pairs, 16)
    assert not model.training


def test_nan_is_refused_and_an_impossible_token_is_not():
    table = torch.zeros(3, 3)
    table[1, 2] = -math.inf
    (certain, _), (impossible, _) = zeroshot.loglikelihoods(Bigram(table), [([1], [1]), ([1], [2])], 16)
    assert certain == pytest.approx(-math.log(2)) and impossible == -math.inf
    table[0, 0] = math.nan
    with pytest.raises(BadInput, match="not finite"):
        zeroshot.loglikelihoods(Bigram(table), [([1], [1]), ([0], [1])], 16)


# -------------------------------------------------------------------------------------------------------
# where the context ends

@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_joined_tokens_are_those_of_the_whole_text(name):
    tokenizer = text.load_tokenizer(name)
    for context, continuation in [("Question: why?\nAnswer:", " because"), ("Answer: ", "yes"),
                                  ("Answer:  \n ", "yes"), ("I said hel", "lo world"), ("a", " b"),
                                  ("the café", "s")]:
        a, b = zeroshot.encode_pair(tokenizer, context, continuation)
        assert a + b == tokenizer.encode(context + continuation) and a and b
        assert tokenizer.decode(b).endswith(continuation)                      # all of it is scored
        # and nothing of it is given away
        assert context.startswith(tokenizer.decode(a))


def test_boundary_of_gpt2():
    tokenizer = text.load_tokenizer("gpt2")
    yes = tokenizer.encode(" yes")
    assert len(yes) == 1
    assert (zeroshot.encode_pair(tokenizer, "Answer:", " yes")
            == zeroshot.encode_pair(tokenizer, "Answer: ", "yes") == (tokenizer.encode("Answer:"), yes))
    # 'hello' is one token, which begins in the context and ends in the continuation
    whole = tokenizer.encode("hello world")
    assert zeroshot.encode_pair(tokenizer, "hel", "lo world") == ([tokenizer.separator], whole)
    assert zeroshot.encode_pair(tokenizer, "I said hel", "lo") == (
        tokenizer.encode("I said"), tokenizer.encode(" hello"))


def test_an_empty_context_is_the_separator_once():
    tokenizer = text.load_tokenizer("gpt2")
    assert zeroshot.encode_pair(tokenizer, "", " yes") == (
        [tokenizer.separator], tokenizer.encode(" yes"))
    assert zeroshot.encode_pair(tokenizer, "  ", "yes") == (
        [tokenizer.separator], tokenizer.encode("  yes"))

    # a tokenizer that begins every text with the separator itself
    class Marked:
        separator = 0

        def encode(self, string):
            return [0] + [ord(c) for c in string]
    assert zeroshot.encode_pair(Marked(), "", "ab") == ([0], [97, 98])

    # or only where the text spells it out
    class Special(Marked):
        def encode(self, string):
            return [ord(c) if c != "$" else 0 for c in string]

    assert (zeroshot.encode_pair(Special(), "", "$ab") == zeroshot.encode_pair(Special(), "", "ab")
            == ([0], [97, 98]))
    assert zeroshot.encode_pair(Marked(), "a", "b") == ([0, 97], [98])


# -------------------------------------------------------------------------------------------------------
# local files

def one_row(task):
    with open(DATA / f"{task}_sample100.jsonl", encoding="utf-8") as lines:
        return json.loads(next(lines))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("task", zeroshot.TASKS)
def test_shipped_files_are_whole(task):
    items = zeroshot.read_items(DATA, task)
    assert len(items) == 100 and len({json.dumps(item, sort_keys=True) for item in items}) == 100


@pytest.mark.parametrize("task", zeroshot.TASKS)
def test_a_faulty_row_is_named(task, tmp_path):
    *texts, answer = zeroshot.TASKS[task][2]
    row = one_row(task)
    path = tmp_path / f"{task}.jsonl"
    # each field missing
    faults = [({k: v for k, v in row.items() if k != field}, field) for field in (*texts, answer)]
    faults += [({**row, field: None}, "") for field in (*texts, answer)] + [
        ({**row, answer: 7}, "7"), ({**row, answer: "Z"}, "Z"), ([1], ""), ("x", ""), (None, "")]
    if "choices" in row:
        faults += [({**row, "choices": {"text": ["a", "b"], "label": ["A"]}, answer: "A"}, "2 choices"),
                   ({**row, "choices": {"text": ["a", 5], "label": ["A", "B"]}}, "")]
    if task == "hellaswag":
        faults.append(({**row, "endings": ["a", "b"], answer: "2"}, "'2'"))
    if task == "winogrande":
        faults.append(({**row, "sentence": "no gap"}, "blank"))
    for fault, word in faults:
        write(path, [row, fault])
        with pytest.raises(BadInput, match=re.escape(f"{path} line 2")) as error:
            zeroshot.read_items(tmp_path, task)
        assert word in str(error.value) and "\n" not in str(error.value)
    write(path, [row, row])
    assert len(zeroshot.read_items(tmp_path, task)) == 2


def test_broken_lines_are_named_and_odd_ones_are_read(tmp_path):
    path = tmp_path / "piqa_sample100.jsonl"
    good = json.dumps(dict(goal="line\u2028separator", sol1="a", sol2="b", label=0), ensure_ascii=False)
    path.write_text(good + "\r\n\n" + good + "\n" + good[:-9] + "\n", encoding="utf-8")
    with pytest.raises(BadInput, match="line 4 is no item of piqa .JSONDecodeError"):
        zeroshot.read_items(tmp_path, "piqa")
    path.write_bytes(good.encode() + b"\n\xff{}\n")
    with pytest.raises(BadInput, match="line 2 is no item of piqa .UnicodeDecodeError"):
        zeroshot.read_items(tmp_path, "piqa")
    path.write_text(json.dumps(dict(goal="\ud800", sol1="a", sol2="b", label=0)), encoding="utf-8")
    with pytest.raises(BadInput, match="line 1 is no item of piqa .UnicodeEncodeError"):
        zeroshot.read_items(tmp_path, "piqa")
    path.write_text(good + "\r\n\n" + good, encoding="utf-8")
    assert [item["goal"] for item in zeroshot.read_items(tmp_path, "piqa")] == [
        "line\u2028separator"] * 2
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(BadInput, match="is empty"):
        zeroshot.read_items(tmp_path, "piqa")


def test_the_complete_file_is_preferred_and_an_absent_one_is_named(tmp_path):
    write(tmp_path / "piqa_sample100.jsonl", [one_row("piqa")])
    write(tmp_path / "piqa.jsonl", [one_row("piqa")] * 3)
    assert len(zeroshot.read_items(tmp_path, "piqa")) == 3
    with pytest.raises(BadInput, match="neither boolq.jsonl nor boolq_sample100.jsonl"):
        zeroshot.read_items(tmp_path, "boolq")
    with pytest.raises(BadInput, match="nowhere has neither"):
        zeroshot.zero_shot(
            Bigram(torch.zeros(257, 257)), text.load_tokenizer("bytes"), tasks_dir=tmp_path / "nowhere")


def test_unknown_tasks_are_refused():
    for tasks in ("piqa,mmlu", "", "PIQA"):
        with pytest.raises(BadInput, match="is unknown: use all, or some of arc_challenge"):
            zeroshot.choose_tasks(tasks, DATA)
    assert zeroshot.choose_tasks("piqa, boolq,piqa")[0] == ["piqa", "boolq"]


def test_run_refuses_a_tokenizer_that_the_model_does_not_know():
    model = LM(vocab_size=257, block_size=8, embed_dim=8, depth=1, num_heads=1)
    with pytest.raises(BadInput, match="knows 257 tokens and the tokenizer 50257"):
        zeroshot.zero_shot(model, text.load_tokenizer("gpt2"), tasks_dir=DATA)


def test_without_the_harness_one_sentence_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(BadInput, match="pip install lm-eval"):
        zeroshot.load_harness.__wrapped__()


# -------------------------------------------------------------------------------------------------------
# the table

def test_table_by_hand():
    piqa = dict(acc=.6, acc_stderr=.05, acc_norm=.7, acc_norm_stderr=.04, n=100)
    boolq = dict(acc=1.0, acc_stderr=0.0, acc_norm=None, acc_norm_stderr=None, n=50)
    average = dict(acc=.8, acc_stderr=.025, acc_norm=.85, acc_norm_stderr=None, n=150)
    markdown = zeroshot.accuracy_table(
        {"float32": dict(boolq=boolq, piqa=piqa, average=average),
         "W8A8": dict(piqa=piqa, average=dict(average, acc=0.1234))}
    )
    rows = [line for line in markdown.split("\n") if line.startswith("|")]
    head = ["| precision | BoolQ | PIQA | average |", "| --- | --- | --- | --- |"]
    assert rows == [*head, "| float32 | 1.000 ± .000 | .600 ± .050 | .800 ± .025 |",
                    "| W8A8 | - | .600 ± .050 | .123 ± .025 |", *head,
                    "| float32 | 1.000 ± .000 | .700 ± .040 | .850 |",
                    "| W8A8 | - | .700 ± .040 | .850 |"]
    assert "average .500. Items: BoolQ 50, PIQA 100." in markdown and "does not say" in markdown


# -------------------------------------------------------------------------------------------------------
# with the harness

@pytest.fixture
def harness():
    pytest.importorskip("lm_eval")
    return zeroshot.load_harness()


@pytest.fixture
def offline(monkeypatch):
    """Any look at the network is a failure of the test."""
    def refuse(*args, **kwargs):
        pytest.fail(f"the network was asked: {args}")
    for name in ("getaddrinfo", "create_connection", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


# choices of 2 and 10 characters
SHORT, LONG = "aa", "aaaaaaaaaa"


def hand_made(task, right, number):
    """An item whose answer is the choice that a uniform model finds likeliest (right) or another one;
    the position of the two varies with `number`."""
    n = {"boolq": 2, "piqa": 2, "winogrande": 2, "social_iqa": 3}.get(task, 4)
    short = number % n
    gold = short if right else (short + 1) % n
    choices = [SHORT if i == short else LONG for i in range(n)]
    label = dict(zip(range(n), "ABCD" if short else "1234"))
    if task in ("arc_challenge", "arc_easy", "openbookqa"):
        return {"question_stem" if task == "openbookqa" else "question": "q?",
                "choices": dict(text=choices, label=list(label.values())), "answerKey": label[gold]}
    # ' no' is shorter than ' yes'
    if task == "boolq":
        return dict(passage="p.", question="q", answer=not right)
    # the brackets are longer than LONG, and go only if process_docs is applied
    if task == "hellaswag":
        return dict(activity_label="act", ctx_a="one", ctx_b="two",
                    endings=["[substeps] " + c if c == SHORT else c for c in choices], label=str(gold))
    if task == "piqa":
        return dict(goal="g", sol1=choices[0], sol2=choices[1], label=gold)
    if task == "social_iqa":
        return dict(context="c.", question="q?", answerA=choices[0], answerB=choices[1],
                    answerC=choices[2], label=str(gold + 1))
    # winogrande: a space follows z likelier than w
    names = ["z" if i == short else "w" for i in range(2)]
    return dict(sentence="The _ fell down.", option1=names[0], option2=names[1], answer=str(gold + 1))


def test_a_model_with_known_preferences_gets_the_known_accuracy(harness, offline, tmp_path):
    """Uniform but for z and w: log-likelihood is -length log V, so the shortest choice wins, and per
    character the longest, since the space before it counts."""
    logits = torch.zeros(257, 257)
    logits[ord("z"), ord(" ")], logits[ord("w"), ord(" ")] = 5, -5
    expected = {}
    for i, task in enumerate(zeroshot.TASKS):
        # another share of right answers for each
        expected[task] = (i + 1) / 10
        write(tmp_path / f"{task}.jsonl", [hand_made(task, j <= i, j) for j in range(10)])
    results = zeroshot.zero_shot(
        Bigram(logits, block_size=64), text.load_tokenizer("bytes"), tasks_dir=tmp_path)
    for task, share in expected.items():
        r = results[task]
        assert r["n"] == 10 and r["acc"] == pytest.approx(share), task
        # sample standard deviation / sqrt(10)
        assert r["acc_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 9))
        if task in ("boolq", "social_iqa", "winogrande"):
            assert r["acc_norm"] is None and r["acc_norm_stderr"] is None
    # of two choices, the other
    assert results["piqa"]["acc_norm"] == pytest.approx(1 - expected["piqa"])
    # of four choices the first of three equally long ones wins: position 0, or 1 where the short one is
    # at 0
    first = [1 if short == 0 else 0 for short in positions(tmp_path, "arc_easy")]
    assert results["arc_easy"]["acc_norm"] == pytest.approx(
        sum(a == b for a, b in zip(first, golds(tmp_path, "arc_easy"))) / 10)
    assert results["average"]["acc"] == pytest.approx(sum(expected.values()) / 8)
    norm = [
        results[t]["acc"] if results[t]["acc_norm"] is None else results[t]["acc_norm"] for t in expected
    ]
    assert results["average"]["acc_norm"] == pytest.approx(sum(norm) / 8)
    assert results["average"]["acc_stderr"] == pytest.approx(
        math.sqrt(sum(s * (1 - s) / 9 for s in expected.values())) / 8)
    assert results["average"]["n"] == 80


def positions(folder, task):
    return [json.loads(line)["choices"]["text"].index(SHORT)
            for line in (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]


def golds(folder, task):
    rows = [
        json.loads(line) for line in (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["choices"]["label"].index(row["answerKey"]) for row in rows]


def test_prompts_are_the_harness_s(harness, offline):
    """One request per choice, in the harness's words: ARC and HellaSwag written out here from the
    shipped items; each choice once."""
    asked = []

    class Ask(harness[0]):
        def loglikelihood(self, requests):
            asked.extend(r.args for r in requests)
            return [(0.0, True)] * len(requests)
        loglikelihood_rolling = generate_until = None
    names = ["arc_easy", "boolq", "hellaswag", "winogrande"]
    with zeroshot.silent_harness():
        harness[1](Ask(), zeroshot.load_tasks(names, {n: zeroshot.read_items(DATA, n) for n in names}),
                   limit=1, log_samples=False)
    arc, boolq, hella, wino = (one_row(n) for n in names)
    expected = [(f"Question: {arc['question']}\nAnswer:", " " + c) for c in arc["choices"]["text"]]
    expected += [(f"{boolq['passage']}\nQuestion: {boolq['question']}?\nAnswer:", answer)
                 for answer in (" no", " yes")]
    clean = lambda s: re.sub(r"\[.*?\]", "", s.strip().replace(" [title]", ". ")).replace("  ", " ")
    expected += [
        (clean(f"{hella['activity_label']}: {hella['ctx_a']} {hella['ctx_b'].capitalize()}"),
         " " + clean(ending))
        for ending in hella["endings"]
    ]
    before, after = wino["sentence"].split("_")
    expected += [(before + option, " " + after.strip()) for option in (wino["option1"], wino["option2"])]
    assert asked == expected


def test_shipped_files_run_with_an_lm_and_leave_nothing_behind(harness, offline, capsys, monkeypatch):
    tokenizer = text.load_tokenizer("gpt2")
    torch.manual_seed(0)
    model = LM(vocab_size=tokenizer.vocab_size, block_size=64, embed_dim=16, depth=1, num_heads=2)
    monkeypatch.setattr(logging.getLogger("lm_eval"), "level", logging.INFO)
    state = torch.get_rng_state()
    results = zeroshot.zero_shot(model, tokenizer, tasks_dir=DATA, limit=2, batch_size=4)
    assert (list(results) == [*zeroshot.TASKS, "average"]
            and all(results[t]["n"] == 2 for t in zeroshot.TASKS) and results["average"]["n"] == 16)
    assert all(results[t]["acc"] in (0, .5, 1) for t in zeroshot.TASKS)
    assert (logging.getLogger("lm_eval").level == logging.INFO
            and torch.equal(torch.get_rng_state(), state) and model.training)
    assert capsys.readouterr() == ("", "")
    again = zeroshot.zero_shot(model, tokenizer, tasks="piqa, arc_easy", tasks_dir=str(DATA), limit=1)
    assert (list(again) == ["piqa", "arc_easy", "average"] and again["piqa"]["acc_stderr"] is None
            and again["average"]["acc_stderr"] is None)
    rows = [line.split("|")
            for line in zeroshot.accuracy_table({"float32": results, "again": again}).split("\n")
            if line.startswith("|")]
    # precision, 8 tasks, average, and the two ends
    assert {len(row) for row in rows} == {12} and len(rows) == 8


def test_the_adapter_scores_a_choice_as_text(harness):
    """log p(' yes' | 'a') through the harness's request object, rolling likelihood of a whole text, and
    no generation."""
    from lm_eval.api.instance import Instance
    torch.manual_seed(0)
    model, tokenizer = Bigram(torch.randn(257, 257), block_size=4), text.load_tokenizer("bytes")
    lm = zeroshot.harness_model(model, tokenizer)
    request = lambda kind, *args: Instance(request_type=kind, doc={}, arguments=args, idx=0)
    [(value, greedy)] = lm.loglikelihood([request("loglikelihood", "a", " yes")])
    assert (
        value == pytest.approx(by_hand(model, [97], list(b" yes"), 4)[0], abs=1e-4) and greedy is False)
    assert lm.loglikelihood_rolling([request("loglikelihood_rolling", "long text")]) == [
        pytest.approx(by_hand(model, [256], list(b"long text"), 4)[0], abs=1e-4)]
    with pytest.raises(NotImplementedError, match="compare likelihoods"):
        lm.generate_until([])


def test_a_failed_download_is_one_sentence(harness, monkeypatch):
    class Manager:
        def load(self, specs):
            raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub")
    monkeypatch.setattr(zeroshot, "load_harness", lambda: (*harness[:2], Manager()))
    with pytest.raises(BadInput, match="baber/piqa.*pass --tasks-dir data/commonsense"):
        zeroshot.zero_shot(Bigram(torch.zeros(257, 257)), text.load_tokenizer("bytes"), tasks="piqa")


def test_the_command_line_compares_precisions(harness, offline, tmp_path, capsys):
    """A run's folder in, one row per precision out: those of `zero_shot` with the quantised copies."""
    import quantize
    shape = dict(vocab_size=257, block_size=64, embed_dim=16, depth=1, num_heads=2)
    torch.manual_seed(0)
    net, tokenizer = LM(**shape).eval(), text.load_tokenizer("bytes")
    nn.init.normal_(net.token_embed.weight)
    args = dict(
        kind="lm", model=shape, tokenizer="bytes", tokenizer_digest=tokenizer.digest, data="shakespeare")
    runtime.save_checkpoint(
        tmp_path / "ckpt.pt",
        dict(model=net.state_dict(), ema=None, optimizer={}, step=1, best=0.0, rng=0, args=args))
    zeroshot.main(
        ["--ckpt", str(tmp_path), "--bits", "8", "2", "--tasks", "piqa,boolq", "--tasks-dir", str(DATA),
         "--limit", "10", "--device", "cpu"]
    )
    found = json.loads((tmp_path / "zeroshot.json").read_text(encoding="utf-8"))["results"]
    nets = {"float32": net, "W8A8": quantize.quantized(net), "W8A2": quantize.quantized(net, 8, 2)}
    assert list(found) == [f"{name}, {tmp_path.name}" for name in nets]
    for got, net in zip(found.values(), nets.values()):
        assert got == zeroshot.zero_shot(net, tokenizer, "piqa,boolq", DATA, 10)
    assert zeroshot.accuracy_table(found) == (tmp_path / "zeroshot.md").read_text(encoding="utf-8")
    assert zeroshot.accuracy_table(found) in capsys.readouterr().out
