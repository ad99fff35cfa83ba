import json
import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from composable.data.text import bigram_entropy, byte_tokenizer, load_tokenizer, python_stdlib
from composable.data.tokens import Tokens, load_tokens

ALPHABET = ["<unk>", "<bos>", "<eos>", *"abcdefghijklmnopqrstuvwxyz<>/s \ufffd"]


def tokens_of(values, vocab_size=256):
    return Tokens(np.array(values, np.uint16), np.array([0, len(values)] if len(values) else [0]), vocab_size)


@pytest.fixture(scope="module")
def corpus():
    return load_tokens("python-stdlib")


def test_the_default_corpus_is_the_standard_library_byte_by_byte(corpus):
    assert len(corpus) > 10_000_000
    assert (corpus.tokens.dtype, corpus.vocab_size, corpus.eos, corpus.bos) == (np.uint8, 256, None, None)
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        (path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages", "__pycache__"} & set(path.relative_to(root).parts)
        and path.stat().st_size
    )
    assert corpus.documents == len(files)
    for document in (0, 17, len(files) - 1):
        start, stop = corpus.offsets[document : document + 2]
        assert corpus.tokens[start:stop].tobytes() == files[document][1].read_bytes()
    assert (np.diff(corpus.offsets) > 0).all()


def test_the_default_corpus_is_the_same_each_time(corpus):
    assert python_stdlib().fingerprint() == corpus.fingerprint()


def test_bigram_entropy_of_chains_is_exact():
    assert bigram_entropy(tokens_of([1, 2] * 50)) == 0.0
    # From 0 to 0 or 1 evenly, from 1 always to 0: 4 pairs begin with 0 (2 end in 1), 2 with 1.
    assert bigram_entropy(tokens_of([0, 0, 1, 0, 0, 1, 0])) == pytest.approx(4 / 6 * math.log(2), rel=1e-15)
    assert bigram_entropy(tokens_of([7, 7])) == 0.0


def test_bigram_entropy_of_noise_is_that_of_its_tokens():
    noise = np.random.default_rng(7).integers(0, 4, 5_000_000)  # more than one chunk of counting
    assert bigram_entropy(tokens_of(noise, 4)) == pytest.approx(math.log(4), abs=1e-5)


def test_bigram_entropy_counts_the_pair_at_a_chunk_border():
    values = np.zeros((1 << 22) + 1, np.uint16)
    values[-1] = 1  # the last pair of the first chunk
    n = 1 << 22
    expected = -((n - 1) / n * math.log((n - 1) / n) + 1 / n * math.log(1 / n))
    assert bigram_entropy(tokens_of(values, 2)) == pytest.approx(expected, rel=1e-9)
    values = np.append(values, 0).astype(np.uint16)  # and the first of the second: 1 -> 0, certain
    expected *= n / (n + 1)
    assert bigram_entropy(tokens_of(values, 2)) == pytest.approx(expected, rel=1e-9)


def test_bigram_entropy_bounds_the_corpus(corpus):
    assert 2.0 < bigram_entropy(corpus) < 3.0


@pytest.mark.parametrize(("tokens", "reason"), [(tokens_of([1, 2], 4097), "4097"), (tokens_of([1]), "got 1")])
def test_bigram_entropy_refuses_what_it_cannot_count(tokens, reason):
    with pytest.raises(ValueError, match=reason):
        bigram_entropy(tokens)


def test_the_byte_tokenizer_is_exact():
    coder = load_tokenizer("byte")
    assert (coder.vocab_size, coder.bos, coder.eos) == (257, None, 256)
    assert coder.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert coder.encode(b"\xff\r\n").tolist() == [255, 13, 10]
    assert coder.decode([97, 0xC3, 0xA9, 256]) == "aé"
    assert byte_tokenizer().encode("\ud800").tobytes() == "\ufffd".encode()


def save(folder, config=None, bos="<bos>", vocab=None, flags=(), merges=()):
    """A tokenizer.json of single characters; `bos` and <eos> are special tokens."""
    vocab = vocab or {token: index for index, token in enumerate(ALPHABET)}
    coder = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    coder.decoder = tokenizers.decoders.Fuse()
    coder.add_special_tokens([bos, "<eos>"])
    coder.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A <eos>", special_tokens=[(bos, coder.token_to_id(bos)), ("<eos>", coder.token_to_id("<eos>"))]
    )
    if "truncate" in flags:
        coder.enable_truncation(4)
        coder.enable_padding(length=8)
    folder.mkdir(exist_ok=True)
    coder.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizer_file_is_read_with_its_special_tokens(tmp_path):
    folder = save(tmp_path / "small", {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}})
    for path in (folder, folder / "tokenizer.json"):
        coder = load_tokenizer(str(path))
        assert coder.name == str(folder / "tokenizer.json")  # found again from any folder
        assert (coder.vocab_size, coder.bos, coder.eos) == (len(ALPHABET), 1, 2)
        assert coder.encode("abc").tolist() == [3, 4, 5]
        assert coder.encode(b"abc").tolist() == [3, 4, 5]
        assert coder.decode([1, 3, 4, 5, 2]) == "abc"


def test_special_tokens_are_recognised_by_their_usual_names(tmp_path):
    coder = load_tokenizer(str(save(tmp_path / "small")))
    assert (coder.bos, coder.eos) == (1, 2)


def test_a_configuration_beats_the_usual_names(tmp_path):
    coder = load_tokenizer(str(save(tmp_path / "small", {"bos_token": "<eos>", "eos_token": "<eos>"})))
    assert (coder.bos, coder.eos) == (2, 2)


def test_text_that_spells_a_special_token_is_plain_text(tmp_path):
    coder = load_tokenizer(str(save(tmp_path / "small")))
    ids = coder.encode("<bos>hi<eos>")
    assert not np.isin(ids, [coder.bos, coder.eos]).any()
    assert coder.decode(ids) == "<bos>hi<eos>"


def test_text_that_the_vocabulary_itself_spells_out_is_plain_text_too(tmp_path):
    # Merges lead to <bos>, so an encoder that does not look for special tokens finds it all the same.
    extra = ["<b", "<bo", "<bos"]
    vocab = {token: index for index, token in enumerate([*ALPHABET, *extra])}
    merges = [("<", "b"), ("<b", "o"), ("<bo", "s"), ("<bos", ">")]
    coder = load_tokenizer(str(save(tmp_path / "small", vocab=vocab, merges=merges)))
    ids = coder.encode("a<bos><bos>b")
    assert coder.bos not in ids
    assert coder.decode(ids) == "a<bos><bos>b"


def test_a_file_that_asks_for_truncation_loses_nothing(tmp_path):
    coder = load_tokenizer(str(save(tmp_path / "small", flags=["truncate"])))
    assert coder.encode("abcdefghij").tolist() == list(range(3, 13))
    assert coder.encode("a").tolist() == [3]


def test_ids_with_gaps_are_all_inside_of_the_vocabulary(tmp_path):
    vocab = {token: 10 * index for index, token in enumerate(ALPHABET)}
    coder = load_tokenizer(str(save(tmp_path / "small", vocab=vocab)))
    assert coder.vocab_size == 10 * (len(ALPHABET) - 1) + 1


def test_a_tokenizer_that_is_not_there_or_not_one_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'neither "byte" nor a tokenizer.json'):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not a tokenizer.json"):
        load_tokenizer(str(tmp_path))
