import gzip
import json

import pytest
import zstandard

from composable.data.documents import clean, read_documents, source_files


def lines(*rows):
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode()


def texts(path, **more):
    return [document.text for document in read_documents(path, **more)]


RECORDS = lines(
    {"text": ""}, {"text": "a"}, "", {"text": "   "}, '{"text": "b"}\r', "\r", {"text": "m" * 1_000_000}, {"text": ""}
)
FOUND = ["", "a", "   ", "b", "m" * 1_000_000, ""]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n"])
def test_each_record_is_one_document(tmp_path, suffix, end):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](RECORDS + end))
    found = list(read_documents(path))
    assert [document.text for document in found] == FOUND
    assert [document.line for document in found] == [1, 2, 4, 5, 7, 8]
    assert not any(document.skipped or document.undecodable for document in found)
    assert sum(document.read for document in found) == path.stat().st_size


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_archive_of_several_frames_is_read_to_its_end(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"".join(COMPRESS[suffix](lines({"text": str(part)}) + b"\n") for part in range(3)))
    assert texts(path) == ["0", "1", "2"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_archive_that_is_cut_off_is_an_error(tmp_path, suffix):
    whole = COMPRESS[suffix](lines(*({"text": str(number)} for number in range(1000))))
    path = tmp_path / f"a.jsonl{suffix}"
    for size in (6, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"a.jsonl{suffix}: the archive is damaged or cut off"):
            texts(path)
    path.write_bytes(b"no archive")
    with pytest.raises(ValueError, match="damaged"):
        texts(path)


WRONG = [
    ('{"x": 1}', "no field 'text'"),
    ('{"text": null}', "field 'text' is null, not a string"),
    ('{"text": 5}', "field 'text' is int, not a string"),
    ('["text"]', "a JSON list where an object"),
    ('{"text": "a"', "not JSON"),
    ("[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("row", "reason"), WRONG)
def test_a_record_without_text_is_counted_with_its_place_or_refused(tmp_path, row, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines({"text": "before"}, row, {"text": "after"}))
    found = list(read_documents(path))
    assert [document.text for document in found] == ["before", "", "after"]
    assert (found[1].line, found[1].file) == (2, str(path))
    assert reason in found[1].skipped
    with pytest.raises(ValueError, match=r"a.jsonl:2: "):
        list(read_documents(path, strict=True))


def test_the_field_can_be_another(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "no", "content": "yes"}))
    assert texts(tmp_path / "a.jsonl", field="content") == ["yes"]


def test_undecodable_bytes_are_counted_and_marked(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a\xff\xfeb"}\n{"text": "\\ud800c\\ud83d\\ude00"}')
    first, second = read_documents(tmp_path / "a.jsonl")
    assert (first.text, first.undecodable) == ("a\ufffd\ufffdb", 2)
    assert (second.text, second.undecodable) == ("\ufffdc\U0001f600", 1)
    assert clean("plain") == ("plain", 0)


def test_a_text_file_is_one_document_byte_for_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n\n\xff")
    (document,) = read_documents(tmp_path / "a.txt")
    assert (document.text, document.line, document.undecodable) == (b"one\r\ntwo\n\n\xff", 0, 1)


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "z.txt").write_text("3")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.jsonl").write_bytes(lines({"text": "1"}, {"text": "2"}))
    (tmp_path / "b" / "d.py").write_text("code")
    (tmp_path / "b" / "image.png").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "a.txt").write_text("no")
    assert texts(tmp_path) == ["1", "2", b"3"]
    assert texts(tmp_path, suffixes=[".py"]) == [b"code"]
    assert texts(tmp_path, suffixes=[".py", ".txt"]) == [b"code", b"3"]


def test_sources_that_give_nothing_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file below it ends with .txt"):
        source_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing: no such file or folder"):
        source_files(tmp_path / "missing")
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(ValueError, match=r"a.parquet: of unknown kind; .*--suffix .parquet"):
        source_files(tmp_path / "a.parquet")
    assert source_files(tmp_path / "a.parquet", [".parquet"]) == [tmp_path / "a.parquet"]
