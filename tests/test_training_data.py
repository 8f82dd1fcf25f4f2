"""Documents from files, their packing, and which rows a step sees."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoints import write_byte_tokenizer

from lsjax.text.tokenizer import load_tokenizer
from lsjax.training.batch import IGNORED
from lsjax.training.documents import Document, encode_pieces, hold_out, read_documents, take_prompts
from lsjax.training.packing import pack

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
EOS = 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(directory, chat_template=TEMPLATE)
    return load_tokenizer(directory)


def text_of(tokenizer, tokens) -> str:
    return tokenizer.decode(tokens)


def write_lines(path, *entries):
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    return path


def documents_of(*lengths):
    """Texts of the tokens 100, 101, ... 200, 201, ..."""
    return [Document(np.arange(length, dtype=np.int32) + 100 * (n + 1)) for n, length in enumerate(lengths)]


def test_texts_end_with_eos(tmp_path, tokenizer):
    (tmp_path / "b.txt").write_text("second\nline")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("first")
    (tmp_path / "empty.txt").write_text("")
    sizes = []
    found = read_documents([tmp_path / "**" / "*.txt", tmp_path / "b.txt"], tokenizer, progress=sizes.append)
    assert [text_of(tokenizer, document.tokens) for document in found] == ["second\nline</s>", "first</s>"]
    assert all(document.learned is None and document.tokens.dtype == np.int32 for document in found)
    assert sum(sizes) == 16


def test_lines_of_every_kind_in_their_order(tmp_path, tokenizer):
    path = write_lines(
        tmp_path / "mixed.jsonl",
        {"text": "plain", "other": 1},
        {"prompt": "2+2=", "completion": "4"},
        {"tokens": [5, 6, 7]},
        {"text": "again"},
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "so"},
                {"role": "assistant", "content": "no"},
            ]
        },
    )
    plain, pair, ids, again, chat = read_documents([path], tokenizer)
    assert text_of(tokenizer, plain.tokens) == "plain</s>"
    assert text_of(tokenizer, again.tokens) == "again</s>"
    assert ids.tokens.tolist() == [5, 6, 7]
    assert text_of(tokenizer, pair.tokens) == "2+2=4</s>"
    assert text_of(tokenizer, pair.tokens[pair.learned]) == "4</s>"
    whole = "<s>[user]hi</s>[assistant]yes</s>[user]so</s>[assistant]no</s>"
    assert text_of(tokenizer, chat.tokens) == whole
    assert text_of(tokenizer, chat.tokens[chat.learned]) == "yes</s>no</s>"
    assert chat.tokens[0] == 256
    assert chat.tokens.tolist().count(256) == 1  # the template writes the special tokens itself


def test_pieces_continue_a_prompt_as_a_model_would():
    """A tokenizer that joins "a" and "b": after a prompt that ends in "a" the answer "b" is a token of its own."""

    class Joining:
        def __call__(self, texts, add_special_tokens, verbose):
            special = [0] if add_special_tokens else []
            ids = {"ab": [9], "a": [1], "b": [2], "c": [3], "ac": [1, 3]}
            return {"input_ids": [special + ids[text] for text in texts]}

    assert encode_pieces([("a", False), ("c", True)], Joining(), special=True) == ([0, 1, 3], [False, False, True])
    assert encode_pieces([("a", False), ("b", True)], Joining(), special=True) == ([0, 1, 2], [False, False, True])
    assert encode_pieces([("", False), ("b", True)], Joining(), special=False) == ([2], [True])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .*: expected JSON"),
        ('{"prompt": "a"}', 'line 2 of .*: expected {"text": "..."}, {"prompt": "...", "completion": "..."}'),
        ('{"prompt": "a", "completion": ""}', "line 2 of .*: expected"),
        ('{"tokens": [1, -1]}', "line 2 of .*: expected"),
        ('{"messages": [{"role": "user"}]}', "line 2 of .*: expected"),
        (
            '{"messages": [{"role": "user", "content": "hi"}]}',
            'line 2 of .*: expected a message of the role "assistant"',
        ),
        ("[1, 2]", "line 2 of .*: expected"),
        (
            r'{"text": "half of \ud83d"}',
            "line 2 of .*: expected Unicode text, got the lone surrogate in .*half of .ud83d",
        ),
    ],
)
def test_lines_that_are_none_are_named(tmp_path, tokenizer, line, message):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=message):
        read_documents([tmp_path / "bad.jsonl"], tokenizer)


def test_files_that_are_none_are_named(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"files: expected a file or a pattern of files, got '.*nothing\*', which"):
        read_documents([tmp_path / "nothing*"], tokenizer)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin.txt: expected text in UTF-8"):
        read_documents([tmp_path / "latin.txt"], tokenizer)
    path = write_lines(tmp_path / "text.jsonl", {"text": "a"})
    with pytest.raises(ValueError, match="is text, and there is no tokenizer"):
        read_documents([path])
    path = write_lines(tmp_path / "short.jsonl", {"tokens": [4]})
    with pytest.raises(ValueError, match="expected documents of at least two tokens, got none"):
        read_documents([path])


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path, tokenizer):
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    path = write_lines(tmp_path / "chat.jsonl", {"messages": turns})
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
        with pytest.raises(ValueError, match=r"line 1 of .*chat template does not take this conversation"):
            read_documents([path], tokenizer)
    finally:
        tokenizer.chat_template = before


def test_texts_fill_rows_without_a_gap():
    rows = pack(documents_of(4, 6, 3), 5)
    # Pairs of a token and the next one: 3 + 5 + 2, so two rows.
    assert rows.tokens.tolist() == [[100, 101, 102, 200, 201], [202, 203, 204, 300, 301]]
    assert rows.labels.tolist() == [[101, 102, 103, 201, 202], [203, 204, 205, 301, 302]]
    assert rows.documents.tolist() == [[1, 1, 1, 2, 2], [1, 1, 1, 2, 2]]
    assert rows.take([1, 0]).positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1]]
    assert rows.num_labels == 10
    rows = pack(documents_of(4, 5), 5)
    assert rows.tokens.tolist() == [[100, 101, 102, 200, 201], [202, 203, 0, 0, 0]]
    assert rows.labels[1].tolist() == [203, 204, IGNORED, IGNORED, IGNORED]
    assert rows.documents[1].tolist() == [1, 1, 0, 0, 0]
    assert rows.take([1]).positions.tolist() == [[0, 1, 0, 1, 2]]


def test_examples_are_not_split():
    def example(first, length, learned):
        return Document(np.arange(first, first + length, dtype=np.int32), np.arange(length) >= length - learned)

    rows = pack([example(100, 4, 2), example(200, 6, 1), example(300, 3, 3), example(400, 9, 7)], 5)
    # Sizes 3, 5, 2 and 5 (cut): the longest first, each into the fullest row that has room.
    assert rows.tokens.tolist() == [
        [200, 201, 202, 203, 204],
        [400, 401, 402, 403, 404],
        [100, 101, 102, 300, 301],
    ]
    assert rows.labels.tolist() == [
        [IGNORED, IGNORED, IGNORED, IGNORED, 205],
        [IGNORED, 402, 403, 404, 405],
        [IGNORED, 102, 103, 301, 302],
    ]
    assert rows.documents.tolist() == [[1] * 5, [1] * 5, [1, 1, 1, 2, 2]]
    assert rows.truncated == 1


def test_packing_loses_nothing_and_fills_well():
    rng = np.random.default_rng(0)
    documents = []
    for number in range(200):
        length = int(rng.integers(2, 40))
        learned = None if number % 2 else rng.random(length) < 0.5
        documents.append(Document(rng.integers(0, 10**6, length).astype(np.int32), learned))
    rows = pack(documents, 48)
    pairs = [(int(a), int(b)) for d in documents if d.learned is None for a, b in zip(d.tokens, d.tokens[1:])]  # noqa: B905
    for document in documents:
        if document.learned is not None:
            inner = zip(document.tokens, document.tokens[1:], document.learned[1:])  # noqa: B905
            pairs += [(int(a), int(b)) for a, b, flag in inner if flag]
    valid = rows.labels != IGNORED
    assert sorted(zip(rows.tokens[valid].tolist(), rows.labels[valid].tolist(), strict=True)) == sorted(pairs)
    assert (rows.documents > 0).mean() > 0.95
    batch = rows.take(np.arange(len(rows)))
    same = (batch.documents[:, 1:] == batch.documents[:, :-1]) & (batch.documents[:, 1:] > 0)
    np.testing.assert_array_equal(batch.positions[:, 1:][same], batch.positions[:, :-1][same] + 1)
    assert (batch.positions[:, 1:][~same & (batch.documents[:, 1:] > 0)] == 0).all()


def test_batches_follow_from_seed_and_step():
    rows = pack([Document(np.arange(1, 72, dtype=np.int32))], 10)  # 7 rows
    firsts = {step: rows.batch(step, 3, seed=5).tokens[:, 0].tolist() for step in (9, 4, 0, 1, 2, 3, 5, 6)}
    order = [first for step in range(7) for first in firsts[step]]
    epochs = [order[:7], order[7:14], order[14:21]]
    assert all(sorted(epoch) == [1, 11, 21, 31, 41, 51, 61] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert rows.batch(9, 3, seed=5).tokens[:, 0].tolist() == firsts[9]
    assert rows.batch(0, 7, seed=6).tokens[:, 0].tolist() != epochs[0]
    whole = rows.batch(0, 20, seed=5)  # more rows than there are
    assert whole.tokens[:, 0].tolist() == order[:20]


def test_fingerprints_tell_data_apart():
    one, two, three = (pack(documents_of(*lengths), 5) for lengths in ((4, 6), (4, 6), (5, 5)))
    assert one.fingerprint == two.fingerprint != three.fingerprint


def test_documents_are_held_out_whole():
    documents = documents_of(*([10] * 50))
    training, held_out = hold_out(documents, 0.1, seed=1)
    assert (len(training), len(held_out)) == (45, 5)
    firsts = [int(document.tokens[0]) for document in (*training, *held_out)]
    assert sorted(firsts) == [100 * (n + 1) for n in range(50)]
    assert [d.tokens[0] for d in hold_out(documents, 0.1, seed=1)[1]] == [d.tokens[0] for d in held_out]
    assert [d.tokens[0] for d in hold_out(documents, 0.1, seed=2)[1]] != [d.tokens[0] for d in held_out]
    training, held_out = hold_out(documents_of(100), 0.1, seed=0)  # of a single text its end
    assert (training[0].tokens.tolist(), held_out[0].tokens.tolist()) == ([*range(100, 190)], [*range(190, 200)])
    for share in (0, 1, -1):
        with pytest.raises(ValueError, match="held_out: expected a share above 0 and below 1"):
            hold_out(documents, share, seed=0)
    with pytest.raises(ValueError, match="2 documents leave nothing to train on"):
        hold_out(documents_of(5, 5), 0.9, seed=0)


def test_prompts_are_passages_and_questions():
    texts = take_prompts(documents_of(50, 4, 60), 8, 10, seed=0)
    assert sorted(len(prompt) for prompt in texts) == [3] + [10] * 7  # the long ones more than once
    assert len({int(prompt[0]) for prompt in texts}) == 8
    assert {int(prompt[0]) // 100 for prompt in texts[:3]} == {1, 2, 3}  # after each has had its turn
    for prompt in texts:
        np.testing.assert_array_equal(np.diff(prompt), 1)
    example = Document(np.arange(20, dtype=np.int32), np.arange(20) >= 12)
    assert take_prompts([example], 1, 5, seed=0)[0].tolist() == [7, 8, 9, 10, 11]
    answer_alone = Document(np.arange(4, dtype=np.int32), np.ones(4, bool))
    assert take_prompts([answer_alone], 1, 5, seed=0) == []
    assert len(take_prompts(documents_of(*([9] * 30)), 8, 4, seed=0)) == 8


def test_nothing_to_learn_is_refused():
    with pytest.raises(ValueError, match="data: expected documents of at least two tokens with something to learn"):
        pack([Document(np.arange(5, dtype=np.int32), np.zeros(5, bool))], 8)
    with pytest.raises(ValueError, match="sequence_length: expected an int of at least 1, got 0"):
        pack(documents_of(5), 0)
