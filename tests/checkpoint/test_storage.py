import os
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composable.checkpoint import storage
from composable.checkpoint.storage import PAGE, File, opened, read_all, write_all

SIZE = 12 * PAGE


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("storage") / "file"


near_pages = st.builds(lambda page, off: min(SIZE, max(0, page * PAGE + off)), st.integers(0, 12), st.integers(-3, 3))


@settings(deadline=None, max_examples=60)
@given(near_pages, near_pages, st.sampled_from(["direct", "warm", "ordinary", "cached"]), st.booleans())
def test_bytes_written_at_any_offset_are_read_back_and_their_neighbours_kept(path, one, two, way, direct_writes):
    start, stop = sorted((one, two))
    before, data = os.urandom(SIZE), os.urandom(stop - start)
    path.write_bytes(before)
    probe = (lambda *_: False) if way == "direct" else storage._in_cache
    with (
        mock.patch.multiple(storage, LARGE=PAGE, STEP=3 * PAGE, _in_cache=probe),
        mock.patch.object(storage, "PIECE", PAGE + 7),
        opened(path, os.O_RDWR) as target,
        opened(path, os.O_RDONLY) as source,
    ):
        write_all(target if direct_writes else File(target.handle, None), memoryview(data), start)
        got = bytearray(len(data))
        used = source if way != "ordinary" else File(source.handle, None)
        read_all(used, memoryview(got), start, cached=way == "cached")
    assert bytes(got) == data
    assert path.read_bytes() == before[:start] + data + before[stop:]


@pytest.mark.parametrize("direct", [True, False])
def test_reading_beyond_the_end_is_an_error(path, direct):
    path.write_bytes(bytes(3 * PAGE))
    with (
        mock.patch.object(storage, "LARGE", PAGE),
        opened(path, os.O_RDONLY) as file,
        pytest.raises(OSError, match="ends"),
    ):
        read_all(file if direct else File(file.handle, None), memoryview(bytearray(3 * PAGE + 1)), 0)


def test_where_direct_reads_want_more_than_page_alignment_the_ordinary_way_is_taken(path):
    data, got = os.urandom(SIZE), bytearray(SIZE)
    path.write_bytes(data)
    with mock.patch.object(storage, "LARGE", PAGE), opened(path, os.O_RDONLY) as file:
        assert file.direct is not None
        real = os.preadv

        def refuse(handle, data, offset, *flags):
            if flags or handle == file.direct:
                raise OSError(22, "Invalid argument")
            return real(handle, data, offset)

        with mock.patch.object(os, "preadv", refuse):
            read_all(file, memoryview(got), 0)
    assert bytes(got) == data


@pytest.mark.parametrize("answer", [OSError(22, "Invalid argument"), PAGE, 0])
def test_what_a_direct_write_leaves_is_written_the_ordinary_way(path, answer):
    data = os.urandom(SIZE - 5)
    path.write_bytes(bytes(SIZE))
    with mock.patch.object(storage, "LARGE", PAGE), opened(path, os.O_WRONLY) as file:
        assert file.direct is not None
        real, asked = os.pwrite, []

        def partly(handle, data, offset):
            if handle != file.direct:
                return real(handle, data, offset)
            asked.append(offset)
            if isinstance(answer, OSError):
                raise answer
            return real(handle, data[:answer], offset)

        with mock.patch.object(os, "pwrite", partly):
            write_all(file, memoryview(data), 3)
    assert asked == [PAGE]
    assert path.read_bytes() == bytes(3) + data + bytes(2)


def test_a_disk_that_fails_is_told_of_by_a_direct_write_too(path):
    path.write_bytes(bytes(SIZE))
    with mock.patch.object(storage, "LARGE", PAGE), opened(path, os.O_WRONLY) as file:
        real = os.pwrite

        def fail(handle, data, offset):
            if handle == file.direct:
                raise OSError(5, "Input/output error")
            return real(handle, data, offset)

        with mock.patch.object(os, "pwrite", fail), pytest.raises(OSError, match="Input/output"):
            write_all(file, memoryview(bytes(SIZE)), 0)


def test_a_file_that_is_made_is_written_past_the_page_cache_too(tmp_path):
    with opened(tmp_path / "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        assert file.direct is not None
    with pytest.raises(FileExistsError), opened(tmp_path / "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL):
        pass
