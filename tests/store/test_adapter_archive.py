"""Archives: PEFT's adapters go in and come out; what is none is refused, cheaply, and writes no other file."""

from __future__ import annotations

import errno
import gzip
import io
import json
import pickle
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from groupwise.errors import AdapterError
from groupwise.store import archive
from groupwise.store.archive import read_archive, stream_archive
from groupwise.store.files import CONFIG, WEIGHTS
from wording import raises

KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
PEFT_CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q_proj"]}
Entry = tuple[tarfile.TarInfo, bytes]


def config_bytes(**changes) -> bytes:
    return json.dumps(PEFT_CONFIG | changes).encode()


def weight_bytes(value: float = 1.0, *, rank: int = 2) -> bytes:
    halves = {"A": (rank, 8), "B": (8, rank)}
    return save({KEY.format(half): np.full(shape, value, np.float32) for half, shape in halves.items()})


def entry(name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, **fields) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def adapter(top: str = "", **changes) -> list[Entry]:
    return [entry(f"{top}{CONFIG}", config_bytes(**changes)), entry(f"{top}{WEIGHTS}", weight_bytes())]


def packed(*entries: Entry, format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=format, compresslevel=1) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def read(archive: bytes, directory: Path) -> set[str]:
    directory.mkdir()
    read_archive(io.BytesIO(archive), directory)
    return {path.name for path in directory.iterdir()}


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[bytes], None]:
    """Read an archive that must be refused. Nothing is written but the two files."""

    def check(archive: bytes) -> None:
        directory = tmp_path / "inner" / "target"
        directory.mkdir(parents=True)
        with raises(AdapterError):
            read_archive(io.BytesIO(archive), directory)
        written = {path for path in tmp_path.rglob("*") if path.is_symlink() or not path.is_dir()}
        assert written <= {directory / CONFIG, directory / WEIGHTS}

    return check


# --- what goes in ---


@pytest.mark.parametrize("top", ["", "./", "math/", "./math/", "math-" + "x" * 120 + "/"])
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_one_directory_or_none(tmp_path: Path, top: str, format: int):
    if len(top) > 100 and format == tarfile.USTAR_FORMAT:
        top = "math-" + "x" * 90 + "/"  # what this format can say, in its prefix field
    archive = packed(*adapter(top), entry(f"{top}README.md", b"# hello"), format=format)
    assert read(archive, tmp_path / "got") == {CONFIG, WEIGHTS}
    assert (tmp_path / "got" / WEIGHTS).read_bytes() == weight_bytes()
    assert json.loads((tmp_path / "got" / CONFIG).read_text()) == PEFT_CONFIG


@pytest.mark.parametrize("options", [[], ["--format=ustar"], ["--format=posix"], ["--format=v7"], ["--format=oldgnu"]])
def test_what_tar_makes(tmp_path: Path, options: list[str]):
    source = tmp_path / "math"
    source.mkdir()
    (source / CONFIG).write_bytes(config_bytes())
    (source / WEIGHTS).write_bytes(weight_bytes())
    (source / "logs").mkdir()
    (source / "logs" / "a.txt").write_text("x" * 5000)
    subprocess.run(["tar", *options, "-czf", "../a.tar.gz", "-C", str(tmp_path), "math"], cwd=source, check=True)
    assert read((tmp_path / "a.tar.gz").read_bytes(), tmp_path / "got") == {CONFIG, WEIGHTS}


def test_what_a_mac_makes(tmp_path: Path):
    """bsdtar adds a resource fork, `._name`, for every file, and extended attributes as pax headers."""
    forks = [entry(f"math/._{name}", b"\0\5\x16\7" * 40) for name in (CONFIG, WEIGHTS)]
    attributes = {"pax_headers": {"LIBARCHIVE.xattr.com.apple.quarantine": "MDA4MQ=="}}
    entries = [entry("math/", kind=tarfile.DIRTYPE, **attributes), *forks, *adapter("math/")]
    assert read(packed(*entries), tmp_path / "got") == {CONFIG, WEIGHTS}


def test_an_adapter_that_peft_saved(make_base, tmp_path: Path):
    torch.manual_seed(0)
    options = {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"^model.layers.1.self_attn.v_proj": 5}}
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    peft.get_peft_model(make_base().model, config).save_pretrained(str(tmp_path / "saved"))
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "saved", "saved")
    assert read((tmp_path / "a.tar.gz").read_bytes(), tmp_path / "got") == {CONFIG, WEIGHTS}
    assert (tmp_path / "got" / WEIGHTS).read_bytes() == (tmp_path / "saved" / WEIGHTS).read_bytes()


# --- what comes out ---


def test_a_download_loads_in_peft_with_the_same_logits(make_base, make_adapter, tmp_path: Path):
    base = make_base()
    directory = make_adapter(base)
    (tmp_path / "d.tar.gz").write_bytes(b"".join(stream_archive(directory, top="math@3")))
    subprocess.run(["tar", "-xzf", "d.tar.gz"], cwd=tmp_path, check=True)
    assert {path.name for path in (tmp_path / "math@3").iterdir()} == {CONFIG, WEIGHTS}
    ids = torch.arange(9)[None]
    logits = [
        peft.PeftModel.from_pretrained(make_base().model, str(d), autocast_adapter_dtype=False)(input_ids=ids).logits
        for d in (directory, tmp_path / "math@3")
    ]
    assert torch.equal(*logits)


def test_a_download_is_an_upload(make_base, make_adapter, tmp_path: Path):
    directory = make_adapter(make_base())
    archive = b"".join(stream_archive(directory, top="math"))
    assert read(archive, tmp_path / "got") == {CONFIG, WEIGHTS}
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "got" / name).read_bytes() == (directory / name).read_bytes()
    assert archive == b"".join(stream_archive(directory, top="math"))
    with tarfile.open(fileobj=io.BytesIO(archive)) as listed:
        assert listed.getnames() == [f"math/{CONFIG}", f"math/{WEIGHTS}"]


def test_a_version_that_is_deleted_while_it_is_sent(make_base, make_adapter, tmp_path: Path):
    source = make_adapter(make_base())
    directory = tmp_path / "version"
    directory.mkdir()
    for name in (CONFIG, WEIGHTS):
        (directory / name).write_bytes((source / name).read_bytes())
    stream = stream_archive(directory, top="math")
    for name in (CONFIG, WEIGHTS):
        (directory / name).unlink()
    assert read(b"".join(stream), tmp_path / "got") == {CONFIG, WEIGHTS}


# --- attacks ---


@pytest.mark.parametrize(
    "name",
    ["../adapter_config.json", "../../etc/cron.d/x", "/etc/passwd", "a/../../b", "a\\..\\b", f"/{CONFIG}", "a/.."],
)
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_paths_that_lead_out(refused, name: str, format: int):
    refused(packed(entry(name, b"x"), *adapter(), format=format))


def test_a_long_path_that_leads_out(refused):
    """Its name is in an extended header; the field of the plain one holds nothing suspicious."""
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        archive = packed(entry("x/" * 60 + "../" * 70 + "root/.ssh/authorized_keys", b"key"), format=format)
        with raises(AdapterError):
            read_archive(io.BytesIO(archive), Path("/nowhere"))


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.FIFOTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.GNUTYPE_SPARSE,
        tarfile.CONTTYPE,
        b"V",
    ],
)
@pytest.mark.parametrize("name", [WEIGHTS, "harmless.txt"])
def test_special_members(refused, kind: bytes, name: str):
    archive = packed(entry(name, kind=kind, linkname="/etc/passwd"), entry(CONFIG, config_bytes()))
    refused(archive)


def test_a_hundred_thousand_members(refused, monkeypatch):
    reads, read = [], archive._Reader.read
    monkeypatch.setattr(archive._Reader, "read", lambda reader, size: reads.append(size) or read(reader, size))
    block = entry("a.txt")[0].tobuf(tarfile.USTAR_FORMAT)
    refused(gzip.compress(block * 100_000, 1, mtime=0))
    assert reads.count(512) == 1024


def test_ten_thousand_descriptions_of_one_member(refused):
    """x and g headers are no members, but they are not free either."""
    block = entry("p", kind=b"g")[0].tobuf(tarfile.USTAR_FORMAT)
    refused(gzip.compress(block * 10_000, 1, mtime=0))


@pytest.mark.parametrize(("name", "size"), [(CONFIG, 200 << 20), ("data.txt", 200 << 20), (WEIGHTS, 3 << 30)])
def test_a_bomb_costs_nothing(refused, name: str, size: int):
    """200 MB of zeros from 200 kB: refused by what the header says, before any of it is unpacked."""
    bomb = gzip.compress(entry(name, size=size)[0].tobuf(tarfile.USTAR_FORMAT) + bytes(min(size, 20 << 20)), 1)
    tracemalloc.start()
    refused(bomb)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_bomb_behind_the_end(refused):
    inside = gzip.decompress(packed(*adapter()))
    refused(gzip.compress(inside + bytes(100 << 20), 1))


def test_a_bomb_in_an_extended_header(refused):
    for kind in (b"x", b"g", b"L", b"K"):
        header = entry("p", kind=kind, size=1 << 30)[0].tobuf(tarfile.USTAR_FORMAT)
        with raises(AdapterError):
            read_archive(io.BytesIO(gzip.compress(header + bytes(1 << 20), 1)), Path("/nowhere"))


def test_gzip_files_in_a_row(refused, tmp_path: Path):
    """A few are an archive; millions of empty ones once took 20 seconds, and were taken."""
    data = gzip.decompress(packed(*adapter()))
    half = len(data) // 2
    several = gzip.compress(data[:half]) + gzip.compress(b"") + gzip.compress(data[half:]) + bytes(2000)
    refused(gzip.compress(b"") * 2000 + gzip.compress(data))
    assert read(several, tmp_path / "got") == {CONFIG, WEIGHTS}


def test_a_gzip_that_unpacks_to_nothing_for_long(refused, tmp_path: Path):
    """A name of 50 MB, once read letter by letter; blocks that hold nothing."""
    data = gzip.decompress(packed(*adapter()))
    named = bytearray(gzip.compress(data))
    named[3] |= 8  # FNAME
    short, long = (bytes(named[:10]) + b"n" * size + b"\0" + bytes(named[10:]) for size in (1000, 50 << 20))
    reading = io.BytesIO(long)
    with raises(AdapterError):
        read_archive(reading, tmp_path)
    assert reading.tell() < 1 << 20
    stored = b"\0\0\0\xff\xff" * 20_000  # deflate's empty stored block
    refused(gzip.compress(b"")[:10] + stored)
    assert read(short, tmp_path / "got") == {CONFIG, WEIGHTS}


def test_duplicates(refused):
    refused(packed(*adapter(), entry(CONFIG, config_bytes(r=4))))


def test_two_directories(refused):
    refused(packed(*adapter("a/"), entry(f"b/{WEIGHTS}", weight_bytes(2.0))))


def test_halves_in_two_directories(refused):
    refused(packed(entry(f"a/{CONFIG}", config_bytes()), entry(f"b/{WEIGHTS}", weight_bytes())))


@pytest.mark.parametrize("suffix", ["bin", "PT", "pth", "pkl", "pickle", "ckpt", "joblib"])
def test_pickles(refused, suffix: str):
    refused(packed(*adapter(), entry(f"adapter_model.{suffix}", b"\x80\4.")))


@pytest.mark.parametrize("protocol", ["zip", 4])
def test_a_pickle_under_another_name(refused, protocol: str | int):
    data = io.BytesIO()
    if protocol == "zip":
        torch.save({KEY.format("A"): torch.ones(2, 8)}, data)
    else:
        pickle.dump({KEY.format("A"): [1.0] * 16}, data, protocol=protocol)
    refused(packed(entry(CONFIG, config_bytes()), entry(WEIGHTS, data.getvalue())))


@pytest.mark.parametrize(
    "changes",
    [
        {"r": 10**9},
        {"lora_alpha": -4},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"auto_mapping": {"parent_library": "os", "base_model_class": "system"}},
        {"layer_replication": [[0, 4], [2, 5]]},
        {"alora_invocation_tokens": [1]},
        {"trainable_token_indices": [1]},
        {"target_parameters": ["x"]},
        {"target_parameters": ["mlp.down_proj.weight", "experts.bias"]},
        {"target_parameters": "down_proj.weight"},
        {"lora_bias": True},
        {"an_option_of_peft_1_0": {"x": 1}},
        {"init_lora_weights": "pissa_niter_4"},
        {"alpha_pattern": {"(a+": 8}},
        {"alpha_pattern": {"q_proj": float("nan")}},
        {"alpha_pattern": {"q_proj": "8"}},
        {"alpha_pattern": [["q_proj", 8]]},
        {"rank_pattern": {".*": 8}},
    ],
)
def test_configurations(refused, changes: dict):
    refused(packed(*adapter(**changes)))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"r": NaN}'])
def test_configurations_that_are_none(refused, data: bytes):
    refused(packed(entry(CONFIG, data), entry(WEIGHTS, weight_bytes())))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(refused, value: float):
    refused(packed(entry(CONFIG, config_bytes()), entry(WEIGHTS, weight_bytes(value))))


def test_a_rank_that_is_not_the_configurations(refused):
    refused(packed(entry(CONFIG, config_bytes()), entry(WEIGHTS, weight_bytes(rank=3))))


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS])
def test_a_file_that_is_missing(refused, missing: str):
    archive = packed(*(e for e in adapter("math/deeper/") + adapter() if e[0].name != missing))
    refused(archive)


@pytest.mark.parametrize(
    "archive", [b"", b"PK\3\4" + bytes(100), b"\x1f\x8b", gzip.compress(b"", mtime=0), gzip.compress(b"hello", mtime=0)]
)
def test_no_archive_at_all(refused, archive: bytes):
    refused(archive)


def test_an_archive_cut_anywhere(tmp_path: Path):
    archive = packed(*adapter("math/"))
    for i, cut in enumerate(range(0, len(archive) - 1, 7)):
        directory = tmp_path / str(i)
        directory.mkdir()
        with pytest.raises(AdapterError):
            read_archive(io.BytesIO(archive[:cut]), directory)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_an_error_or_harmless(tmp_path_factory: pytest.TempPathFactory, data):
    """Flip bytes of the tar inside: it is refused, or both files pass every check."""
    inside = bytearray(
        gzip.decompress(packed(entry("n.txt", b"n" * 700), *adapter("math/"), format=tarfile.GNU_FORMAT))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        inside[data.draw(st.integers(0, len(inside) - 1))] = data.draw(st.integers(0, 255))
    directory = tmp_path_factory.mktemp("fuzz")
    try:
        read_archive(io.BytesIO(gzip.compress(bytes(inside), 1)), directory)
    except AdapterError:
        return
    finally:
        assert {path.name for path in directory.iterdir()} <= {CONFIG, WEIGHTS}
    assert json.loads((directory / CONFIG).read_bytes())["peft_type"] == "LORA"


def test_sizes_that_lie(refused):
    """Negative and huge sizes (base 256), and a member that says that it is longer than the archive."""
    for size in (-1, -512, 1 << 40):
        header = bytearray(entry("a.txt")[0].tobuf(tarfile.USTAR_FORMAT))
        header[124:136] = size.to_bytes(12, "big", signed=True)
        header[124] |= 0x80
        header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 8 * 32)
        with raises(AdapterError):
            read_archive(io.BytesIO(gzip.compress(bytes(header) + bytes(1024), 1)), Path("/nowhere"))
    header = entry("a.txt", size=5000)[0].tobuf(tarfile.USTAR_FORMAT)
    refused(gzip.compress(header + bytes(1000), 1))


def test_a_damaged_header(refused):
    """One bit of a name: without the checksum it would be the name of something to skip."""
    header = bytearray(entry(CONFIG, config_bytes())[0].tobuf(tarfile.USTAR_FORMAT))
    header[0] ^= 1
    inside = bytes(header) + config_bytes().ljust(512, b"\0")
    refused(gzip.compress(inside + gzip.decompress(packed(*adapter())), 1))


def test_a_damaged_extended_header(refused):
    for text in (b"x", b"99 path=a\n", b"0 path=a\n", b"-5 path=a\n", b"9" * 3000, b"2 path=a\n"):
        header = entry("p", text, kind=b"x")[0].tobuf(tarfile.USTAR_FORMAT)
        with raises(AdapterError):
            read_archive(
                io.BytesIO(gzip.compress(header + text.ljust(-(-len(text) // 512) * 512, b"\0"), 1)), Path("/nowhere")
            )


def test_a_disk_that_fails_is_not_the_archives_fault(tmp_path: Path):
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    with raises(OSError):
        read_archive(Failing(), tmp_path)
