"""Images as people give them, and as attackers do."""

from __future__ import annotations

import base64
import io
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from groupwise import pictures
from groupwise.errors import DataError
from groupwise.pictures import Picture, TooManyPixels, decoding, kept_pictures, pictures_in, read_picture, text_of
from seeing_models import drawn
from wording import raises


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, format=kind, **options)
    return written.getvalue()


PNG = file_of(drawn(6, 4))


def claimed(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose head says that it is so large."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a b.png").write_bytes(PNG)
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [
        PNG,
        memoryview(PNG),
        {"bytes": PNG, "path": None},
        {"bytes": None, "path": "a b.png"},
        "a b.png",
        Path("a b.png"),
        f"data:image/png;base64,{base64.b64encode(PNG).decode()}",
        Picture(PNG),
    ],
)
def test_one_image_in_many_forms(given: Any, folder: Path) -> None:
    assert read_picture(given, folder=folder) == Picture(PNG)


def test_urls_of_files(folder: Path) -> None:
    assert read_picture((folder / "a b.png").as_uri()) == Picture(PNG)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "I;16"])
def test_a_pil_image_of_any_mode_is_rgb(mode: str) -> None:
    image = Image.new(mode, (5, 3)) if mode == "I;16" else drawn(5, 3).convert(mode)
    pixels = read_picture(image).pixels()
    assert pixels.mode == "RGB" and pixels.size == (5, 3)


def test_it_stands_as_its_exif_tag_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    picture = read_picture(file_of(drawn(6, 4), "JPEG", exif=exif))
    assert picture.pixels().size == (4, 6)


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"no image",
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        b"%PDF-1.4",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        claimed(20_000, 20_000),
        claimed(2**31 - 1, 2**31 - 1),
        file_of(drawn(4, 4), "GIF", save_all=True, append_images=[drawn(4, 4, seed=1)]),
        file_of(drawn(4, 4), "TIFF", save_all=True, append_images=[drawn(4, 4, seed=1)]),
        "http://example.org/a.png",
        "https://169.254.169.254/latest",
        "s3://bucket/a.png",
        "data:image/png;base64,###",
        "data:image/png",
        "missing.png",
        ".",
        7,
        {"path": None},
    ],
)
def test_what_is_not_an_image_is_refused_before_it_is_decoded(
    given: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)  # decoding would fail otherwise than so
    with raises(DataError, kind="image", words=False):
        read_picture(given, folder=folder)


def test_a_file_that_is_too_large_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_BYTES", len(PNG) - 1)
    monkeypatch.setattr(Path, "read_bytes", None)
    with raises(DataError, kind="image"):
        read_picture("a b.png", folder=folder, where="rows.jsonl:1: image")


def test_a_file_that_was_cut_off_is_told_when_it_is_decoded() -> None:
    picture = read_picture(file_of(drawn(64, 64))[:-200])
    with raises(DataError, kind="image", words=False):
        picture.pixels()


def test_the_bytes_of_a_file_are_read_where_they_are_needed(folder: Path) -> None:
    picture = read_picture("a b.png", folder=folder)
    assert pickle.loads(pickle.dumps(picture)) == picture == Picture(PNG) and len(pickle.dumps(picture)) < 1000
    assert picture.data == PNG
    (folder / "a b.png").write_bytes(file_of(drawn(6, 4, seed=1)))
    with raises(DataError, kind="image"):
        picture.pixels()
    (folder / "a b.png").unlink()
    with raises(DataError, kind="image"):
        picture.pixels()


def test_it_is_kept_once_by_its_digest(tmp_path: Path) -> None:
    read_picture(PNG).keep(tmp_path / "images")
    read_picture(PNG).keep(tmp_path / "images")
    (kept,) = (tmp_path / "images").iterdir()
    assert kept.name == f"{Picture(PNG).digest}.png" and kept.read_bytes() == PNG


@pytest.mark.parametrize("beginning", ["**", "*", "/etc/", "../", "[0-9a-f]", ".", "\0"])
def test_what_a_digest_begins_with_names_no_file(tmp_path: Path, beginning: str) -> None:
    kept = read_picture(PNG).keep(tmp_path / "images")
    assert kept_pictures(tmp_path / "images", kept.digest[:5]) == [kept.path]
    assert kept_pictures(tmp_path / "images", beginning) == kept_pictures(tmp_path / "none") == []


def test_what_is_seen_of_messages() -> None:
    said = [{"type": "image", "image": Picture(PNG)}, {"type": "text", "text": "How many?"}]
    assert pictures_in([{"role": "user", "content": said}, {"role": "user", "content": "And?"}]) == [Picture(PNG)]
    assert text_of(said) == "[image] How many?" and text_of(None) == "" and text_of("so") == "so"
    assert str(Picture(PNG)) == f"sha256:{Picture(PNG).digest}"


def test_so_many_pixels_are_decoded_and_no_more() -> None:
    picture = read_picture(drawn(10, 10))
    with decoding(250):
        assert [picture.pixels().size for _ in range(2)] == [(10, 10)] * 2
        with pytest.raises(TooManyPixels):
            picture.pixels()
    assert picture.pixels().size == (10, 10)
