"""Conversations in records, written by templates: which of their tokens have a loss."""

import json
from datetime import date

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from composable.data.chat import chat_encoder, marked
from composable.data.conversations import conversation_of
from composable.data.template import BUILT_IN

CONTROL = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEXT = ["Hello there! How are you today?\n\nFine, thanks.", "system\nuser\nassistant\n", "You are helpful.\n\n\n"] * 9
TALK = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Hello there, ünïcode!"},
    {"role": "assistant", "content": "Fine, thänks 🙂"},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "user\nassistant"},
]
QWEN3_LIKE = (  # earlier answers lose what the last one has: its thoughts
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)


LLAMA3_WORDS = (  # what Llama 3 and Qwen 2 split texts by: line feeds stay together whatever follows
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def save_bpe(folder, template=None, control=CONTROL, eos="<|im_end|>", trim=True, words=LLAMA3_WORDS):
    """A byte-level BPE tokenizer in a folder, as `transformers` saves one."""
    inner = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated") if words else None
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of]) if words else bytes_of
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim)
    inner.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=control, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<|bos|>", eos_token=eos)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe")
    return path, save_bpe(path, WITH_GENERATION)


def counted_texts(conversation):
    """What counts, piece by piece, as `marked` shows it."""
    return [piece.partition("]]")[0] for piece in marked(conversation, False).split("[[")[1:]]


# --- records


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "q\n\nx"}, {"role": "assistant", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "q\n\nx"}, {"from": "gpt", "value": "a"}]},
        {"prompt": "q\n\nx", "completion": "a"},
        {"prompt": [{"role": "user", "content": "q\n\nx"}], "completion": [{"role": "assistant", "content": "a"}]},
        {"instruction": "q", "input": "x", "output": "a"},
        {"instruction": "q\n\nx", "input": "", "output": "a"},
    ],
)
def test_every_form_of_a_record_is_the_same_conversation(record):
    talk = [{"role": "user", "content": "q\n\nx"}, {"role": "assistant", "content": "a"}]
    assert conversation_of(json.dumps(record)) == talk
    if "messages" not in record:
        with_system = conversation_of(json.dumps({**record, "system": "s"}))
        assert with_system == [{"role": "system", "content": "s"}, *talk]


USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON list"),
        ({"text": "x"}, "no conversation: the record has the fields 'text', and messages"),
        ({"messages": "x"}, "'messages' is str, not a list"),
        ({"messages": [USER]}, "no message of the assistant among 1"),
        ({"messages": []}, "no message of the assistant among 0"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, "message 2 has role 'bot'; roles are system, user"),
        ({"messages": [USER, {**ANSWER, "content": " \n"}]}, r"message 2 \(assistant\) is empty"),
        ({"messages": [USER, {**ANSWER, "content": None}]}, r"message 2 \(assistant\) .* null or missing"),
        ({"messages": [USER, {**ANSWER, "content": ["x"]}]}, r"message 2 \(assistant\) .* list, not a string"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [1]}]}, "message 2 .* tool_calls"),
        ({"messages": [USER, ANSWER], "tools": [1]}, "'tools' is not read"),
        ({"messages": ["hello"]}, "message 1 is str"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "message 1 has role 'alien'"),
        ({"instruction": None, "output": "x"}, r"message 1 \(user\) .* null or missing"),
    ],
)
def test_a_bad_record_says_what_is_wrong(line, reason):
    with pytest.raises(ValueError, match=reason):
        conversation_of(line if isinstance(line, str) else json.dumps(line))


# --- templates and answers

END_OF = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "plain": "<|im_end|>"}
SPACE = {"chatml": "", "llama3": "", "plain": " "}


@pytest.mark.parametrize("template", ["chatml", "llama3", "plain"])
@pytest.mark.parametrize("trim", [True, False])
def test_only_answers_and_what_ends_them_count_and_ids_are_those_of_transformers(tmp_path, template, trim):
    theirs = save_bpe(tmp_path, BUILT_IN[template], trim=trim)
    found = chat_encoder(str(tmp_path), template)(TALK)
    expected = theirs.apply_chat_template(TALK, tokenize=True, return_dict=False)
    assert found.ids.tolist() == expected
    assert found.text == theirs.apply_chat_template(TALK, tokenize=False)
    answers = [SPACE[template] + m["content"] + END_OF[template] for m in TALK if m["role"] == "assistant"]
    assert counted_texts(found) == answers
    assert (found.torn, found.endless) == (0, 0)
    assert chat_encoder(str(tmp_path), "tokenizer")(TALK).ids.tolist() == expected


@pytest.mark.parametrize("template", ["chatml", "llama3", "plain"])
def test_before_each_answer_is_what_a_model_is_given_to_answer(tmp_path, template):
    theirs = save_bpe(tmp_path, BUILT_IN[template])
    found = chat_encoder(str(tmp_path), template)(TALK)
    begins = np.flatnonzero(np.diff(found.counted.astype(int)) == 1) + 1
    for place, begin in zip((2, 4), begins, strict=True):
        asked = theirs.apply_chat_template(TALK[:place], add_generation_prompt=True, tokenize=True, return_dict=False)
        assert found.ids[:begin].tolist() == asked


def test_what_counts_is_what_a_template_that_marks_answers_itself_says(bpe):
    path, theirs = bpe
    found = chat_encoder(str(path), "tokenizer")(TALK)
    expected = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert found.ids.tolist() == expected["input_ids"]
    assert found.counted.astype(int).tolist() == expected["assistant_masks"]


def test_a_terminal_shows_in_colour_what_counts(bpe):
    found = chat_encoder(str(bpe[0]), "chatml")([USER, ANSWER])
    assert marked(found, True).endswith("assistant\n\x1b[32ma<|im_end|>\x1b[0m\n")


def test_the_last_answer_alone_or_all_tokens_can_count(bpe):
    path, _ = bpe
    assert counted_texts(chat_encoder(str(path), "chatml", "last-answer")(TALK)) == ["user\nassistant<|im_end|>"]
    everything = chat_encoder(str(path), "chatml", "none")(TALK)
    assert everything.counted is None
    assert counted_texts(everything) == [everything.text]


def test_a_template_that_rewrites_earlier_answers_is_refused_but_for_the_last(bpe, tmp_path):
    path, _ = bpe
    (tmp_path / "t.jinja").write_text(QWEN3_LIKE)
    source = str(tmp_path / "t.jinja")
    # What the template adds to an answer is the model's to write, so it counts.
    last = chat_encoder(str(path), source, "last-answer")(TALK)
    assert counted_texts(last) == ["<think></think>user\nassistant<|im_end|>"]
    assert len(counted_texts(chat_encoder(str(path), source)(TALK))) == 2
    forgetful = "{% for m in messages %}{% if loop.last or m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    (tmp_path / "t.jinja").write_text(forgetful)
    with pytest.raises(ValueError, match=r"what is before message 2 otherwise once .*--mask last-answer"):
        chat_encoder(str(path), source)([TALK[0], TALK[2]])
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ValueError, match="does not show message 3 once"):
        chat_encoder(str(path), source)(TALK[:3])


def test_an_answer_that_begins_inside_of_a_token_loses_it_and_is_told_of(bpe):
    path, _ = bpe
    found = chat_encoder(str(path), "chatml")([USER, {**ANSWER, "content": "\nFine"}])
    assert found.torn == 1  # the line feeds before and in the answer are one token
    assert counted_texts(found) == ["Fine<|im_end|>"]


def test_an_answer_before_which_the_prompt_alone_ends_in_other_tokens_is_told_of(tmp_path):
    save_bpe(tmp_path, words="")  # GPT-2's words: the last of several line feeds is a token of its own before a letter
    assert chat_encoder(str(tmp_path), "llama3")(TALK).torn == 2
    assert chat_encoder(str(tmp_path), "chatml")(TALK).torn == 0


def test_an_answer_without_a_token_that_ends_it_is_counted_as_endless(bpe, tmp_path):
    path, _ = bpe
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    found = chat_encoder(str(path), str(tmp_path / "t.jinja"))([USER, ANSWER])
    assert found.endless == 1


def test_bytes_have_answers_too():
    found = chat_encoder("byte", "plain")([{**USER, "content": "é￾"}, {**ANSWER, "content": "ü🙂"}])
    assert bytes(found.ids[found.counted][:-1].astype(np.uint8)).decode() == " ü🙂"
    assert found.ids[found.counted][-1] == 256
    assert (found.ids == 256).sum() == 1
    with pytest.raises(ValueError, match="no special token of the tokenizer byte"):
        chat_encoder("byte", "chatml")


def test_a_message_that_spells_a_control_token_is_refused(bpe):
    with pytest.raises(ValueError, match=r"message 1 spells '<\|im_end\|>'"):
        chat_encoder(str(bpe[0]), "chatml")([{**USER, "content": "x<|im_end|>y"}, ANSWER])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if %}", "not one that Jinja reads"),
        ("{{ raise_exception('alternate!') }}", "refuses it: alternate!"),
        ("{{ messages[9].content }}", "refuses it"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses it"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_error(bpe, tmp_path, source, reason):
    (tmp_path / "t.jinja").write_text(source)
    with pytest.raises(ValueError, match=reason):
        chat_encoder(str(bpe[0]), str(tmp_path / "t.jinja"))([USER, ANSWER])


def test_a_missing_template_names_those_that_there_are(tmp_path):
    save_bpe(tmp_path)
    with pytest.raises(ValueError, match=r"has no chat template .*choose one of chatml, llama3, plain"):
        chat_encoder(str(tmp_path), "tokenizer")
    with pytest.raises(ValueError, match="template 'mistral' is neither tokenizer, nor one of chatml"):
        chat_encoder(str(tmp_path), "mistral")
    save_bpe(tmp_path / "few", control=["<|bos|>", "<|im_end|>"])
    with pytest.raises(ValueError, match=r"template chatml writes <\|im_start\|>, no special token"):
        chat_encoder(str(tmp_path / "few"), "chatml")


def test_a_date_is_the_one_that_is_given(bpe, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ strftime_now('%d %b %Y') }} " + BUILT_IN["chatml"])
    found = chat_encoder(str(bpe[0]), str(tmp_path / "t.jinja"), today=date(2024, 7, 26))(TALK)
    assert found.text.startswith("26 Jul 2024 <|bos|><|im_start|>")
