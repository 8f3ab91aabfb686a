"""Text: every kind of source gives its documents in order; what is no text is refused by file and line."""

import gzip
import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from unsoftmax.recipes.text import check_text, documents, is_held_out

TEXTS = ["first document", "zweites Dokument: äöü", "第三", "fourth\nwith a line"]


def jsonl(texts, field="text"):
    return "".join(json.dumps({field: t}) + "\n" for t in texts).encode()


def zstd_blocks():
    """A frame up to the end of a block, as an upload that broke off may leave it."""
    frame = zstandard.ZstdCompressor().compressobj()
    return frame.compress(jsonl(TEXTS)) + frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)


WRITERS = {
    "corpus.jsonl": lambda path: path.write_bytes(jsonl(TEXTS)),
    "corpus.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl(TEXTS))),
    "corpus.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(jsonl(TEXTS))),
    "corpus.parquet": lambda path: pq.write_table(pa.table({"id": range(4), "text": TEXTS}), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_kind_of_file_gives_the_same_documents(name, tmp_path):
    WRITERS[name](tmp_path / name)
    assert list(documents(str(tmp_path / name))) == TEXTS


def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n\ntwo")
    assert list(documents(str(tmp_path / "a.txt"))) == ["one\n\ntwo"]


def test_a_folder_gives_its_files_by_name_and_passes_over_others(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("two")
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one"]))
    (tmp_path / "README.md").write_text("not text to train on")
    (tmp_path / ".hidden.txt").write_text("nor this")
    assert list(documents(str(tmp_path))) == ["one", "two"]
    assert list(documents(f"{tmp_path}/b/*.txt")) == ["two"]


def test_several_zstd_frames_are_read_as_one_file(tmp_path):
    frames = zstandard.compress(jsonl(TEXTS[:2])) + zstandard.compress(jsonl(TEXTS[2:]))
    (tmp_path / "a.jsonl.zst").write_bytes(frames)
    assert list(documents(str(tmp_path / "a.jsonl.zst"))) == TEXTS


def test_an_enormous_document_comes_whole(tmp_path):
    enormous = "word " * 2_000_000
    (tmp_path / "a.jsonl").write_bytes(jsonl([enormous, "small"]))
    assert list(documents(str(tmp_path / "a.jsonl"))) == [enormous, "small"]


def test_documents_without_text_are_skipped_and_counted(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["", "one", " \n\t", None, "two"]) + b"\n\n")
    found = documents(str(tmp_path / "a.jsonl"))
    with caplog.at_level(logging.WARNING):
        assert list(found) == ["one", "two"]
    assert found.empty == 3
    assert "3 documents without text skipped" in caplog.text


def test_another_field_can_hold_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS, "body"))
    assert list(documents(str(tmp_path / "a.jsonl"), text_field="body")) == TEXTS


def test_about_a_tenth_is_held_out_and_the_rest_is_exactly_the_rest(tmp_path):
    texts = [f"document {n}" for n in range(1000)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    held, rest = (list(documents(str(tmp_path / "a.jsonl"), held_out=h)) for h in (True, False))
    assert 70 < len(held) < 130
    assert sorted(held + rest) == sorted(texts)
    assert all(map(is_held_out, held)) and not any(map(is_held_out, rest))


def test_python_s_own_documentation_is_a_source_that_splits_in_two():
    held, rest = (list(documents("python-docs", held_out=h)) for h in (True, False))
    assert len(held) > 10 and sum(map(len, held)) > 30_000
    assert sum(map(len, rest)) > 1_000_000
    assert not set(held) & set(rest)
    assert any("with" in text and "statement" in text for text in rest)


BAD_FILES = {  # name, bytes, what the message says after the file's path
    "bytes that are no UTF-8": ("a.txt", b"one\ntwo \xff", ", line 2 is not text in UTF-8 (byte 0xff)"),
    "a program": ("a.txt", b"\x7fELF\0\0", ", line 1 holds NUL characters: binary data"),
    "UTF-16": ("a.txt", "text".encode("utf-16"), ", line 1 is not text in UTF-8"),
    "a line that is no UTF-8": ("a.jsonl", jsonl(["a"]) + b'{"text": "\xe9"}', ", line 2 is not text"),
    "a line that is no JSON": ("a.jsonl", jsonl(["a"]) + b"{oops}\n", ", line 2 is not JSON"),
    "a list": ("a.jsonl", b"[1]\n", ", line 1 is not a JSON object"),
    "another field": ("a.jsonl", jsonl(["a"], "body"), ", line 1 has no field 'text', but 'body'"),
    "a number": ("a.jsonl", jsonl(["a", 3]), ", line 2: field 'text' holds a int, not text"),
    "NUL in JSON": ("a.jsonl", jsonl(["a\0"]), ", line 1 holds NUL characters"),
    "half a character": (
        "a.jsonl",
        b'{"text": "\\ud83d"}\n',
        ", line 1 holds '\\ud83d', half of a character",
    ),
    "no gzip": ("a.jsonl.gz", b"plain", " is damaged after line 0"),
    "half a gzip": ("a.jsonl.gz", gzip.compress(jsonl(TEXTS * 99))[:60], " is damaged after line"),
    "a zstd cut off between two blocks": ("a.jsonl.zst", zstd_blocks(), " is damaged after line 4"),
    "no zstd": ("a.jsonl.zst", b"plain text", " is damaged after line 0"),
    "no Parquet": ("a.parquet", b"PAR1 no", " is no Parquet file"),
}


@pytest.mark.parametrize("name, raw, said", BAD_FILES.values(), ids=BAD_FILES)
def test_what_is_no_text_is_refused_by_file_and_line(name, raw, said, tmp_path):
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(ValueError) as caught:
        list(documents(str(path)))
    assert str(caught.value).startswith(f"{path}{said}")


def test_half_a_zstd_file_is_refused_not_read_short(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    whole = zstandard.compress(b"".join(jsonl([f"document {n * n}"]) for n in range(30_000)))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst"):
        list(documents(str(path)))


def test_a_parquet_file_without_the_column_lists_those_it_has(tmp_path):
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no column 'text', but 'id', 'body'"):
        list(documents(str(tmp_path / "a.parquet")))


@pytest.mark.parametrize(
    "spec, said",
    {
        "nowhere": "nowhere does not exist; text is a file",
        "no/such/file.jsonl": "does not exist",
        "no/file.txt": "does not exist",
        "*.none": "matches no file",
    }.items(),
)
def test_a_source_that_is_not_there_is_told_before_reading(spec, said):
    with pytest.raises(ValueError) as caught:
        documents(spec)
    assert said in str(caught.value)


CHECKED = {  # what is in a.jsonl, the part wanted, what the message says after the key
    "no file": (None, None, r"\S+a\.jsonl does not exist"),
    "no JSON": (b"oops\n", None, r"\S+a\.jsonl, line 1 is not JSON"),
    "empty": (b"", None, r"\S+a\.jsonl holds no document with text; name a text of many documents"),
    "all set aside": (jsonl(["document 4"]), False, r".* that is not set aside for scoring"),
    "none set aside": (jsonl(["document 0"]), True, r".* that is set aside for scoring"),
}


@pytest.mark.parametrize("raw, held_out, said", CHECKED.values(), ids=CHECKED)
def test_a_text_without_a_first_document_is_refused_by_key(raw, held_out, said, tmp_path):
    if raw is not None:
        (tmp_path / "a.jsonl").write_bytes(raw)
    with pytest.raises(ValueError, match=r"^calibration\.text: " + said):
        check_text("calibration.text", str(tmp_path / "a.jsonl"), held_out=held_out)


def test_a_check_of_a_text_reads_its_first_document_only(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one"]) + b"oops\n")
    check_text("calibration.text", str(tmp_path / "a.jsonl"))


def test_a_folder_without_text_and_a_file_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match="without files that can be read"):
        documents(str(tmp_path))
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(ValueError, match=r"a\.pdf is of no kind that can be read"):
        documents(str(tmp_path / "a.pdf"))


class FakeHub:
    """Stands for the hub: `load_dataset` with the arguments it was given, and rows that may break off."""

    def __init__(self, rows):
        self.rows, self.asked = rows, None

    def __call__(self, name, config, *, split, streaming, revision):
        self.asked = (name, config, split, streaming, revision)
        return self.rows


def test_a_hub_id_is_streamed_with_its_config_and_revision(monkeypatch):
    import datasets

    hub = FakeHub([{"text": t} for t in TEXTS])
    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert list(documents("owner/name:config@v1.0")) == TEXTS
    assert hub.asked == ("owner/name", "config", "train", True, "v1.0")


def test_a_network_that_breaks_off_is_an_oserror_that_may_be_tried_again(monkeypatch):
    import datasets

    def rows():
        yield {"text": "one"}
        raise RuntimeError("connection lost")

    monkeypatch.setattr(datasets, "load_dataset", FakeHub(rows()))
    found = documents("owner/name")
    assert next(found) == "one"
    with pytest.raises(OSError, match="owner/name: connection lost"):
        next(found)


def test_a_data_set_that_the_hub_does_not_have_is_a_mistake_in_the_recipe(monkeypatch):
    import datasets

    def none(*args, **options):
        raise FileNotFoundError("Dataset 'owner/nmae' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", none)
    with pytest.raises(ValueError, match="owner/nmae is neither a file or folder here nor a hub data set"):
        documents("owner/nmae")
