"""tp.save and tp.load: what comes back, and what is refused."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

import tensorplay as tp


def test_nested_data_comes_back(tmp_path):
    path = tmp_path / "data.pt"
    data = {
        "model": OrderedDict(weight=tp.arange(6.0).reshape(2, 3), flag=tp.tensor([True, False])),
        "numbers": [1, -2.5, True, None, "text", 2**70, float("inf"), 1 + 2j, b"raw"],
        "pair": (tp.float32, tp.device("cpu")),
        3: {"size": tp.Size([2, 3]), "set": {1, 2}},
        ("a", 1): np.arange(3, dtype=np.int16),
        "scalar": np.float32(1.5),
    }
    tp.save(data, path)
    back = tp.load(path)
    assert list(back) == list(data)
    assert type(back["model"]) is OrderedDict and list(back["model"]) == ["weight", "flag"]
    assert back["model"]["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert back["model"]["flag"].dtype is tp.bool
    assert back["numbers"] == data["numbers"] and type(back["numbers"][2]) is bool
    assert back["pair"] == (tp.float32, tp.device("cpu"))
    assert type(back[3]["size"]) is tp.Size and back[3]["set"] == {1, 2}
    assert back["a", 1].dtype == np.int16 and back["a", 1].tolist() == [0, 1, 2]
    assert type(back["scalar"]) is np.float32 and back["scalar"] == 1.5
    assert os.listdir(tmp_path) == ["data.pt"]


@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", "float64", "int64", "uint8", "complex64", "bool"]
)
def test_every_dtype(name):
    x = tp.tensor([[0, 1], [3, 2]]).to(getattr(tp, name))
    file = io.BytesIO()
    tp.save([x, x[:, 1], tp.zeros(0, 3, dtype=x.dtype), tp.tensor(1).to(x.dtype)], file)
    file.seek(0)
    back, view, empty, scalar = tp.load(file)
    assert back.dtype is x.dtype and tp.equal(back, x) and tp.equal(view, x[:, 1])
    assert empty.shape == (0, 3) and empty.dtype is x.dtype and scalar.shape == ()


def test_aliases_stay_aliases_and_flags_are_kept():
    weight = tp.ones(2, requires_grad=True)
    file = io.BytesIO()
    tp.save({"a": weight, "b": weight.detach(), "c": tp.ones(2)}, file)
    file.seek(0)
    back = tp.load(file, map_location="cpu", weights_only=True)
    assert back["a"].requires_grad and not back["b"].requires_grad
    with tp.no_grad():
        back["a"].add_(1)
    assert back["b"].tolist() == [2, 2] and back["c"].tolist() == [1, 1]


def test_map_location():
    file = io.BytesIO()
    tp.save(tp.ones(2), file)
    for place in ("meta", tp.device("meta"), {"cpu": "meta"}):
        file.seek(0)
        assert tp.load(file, place).is_meta
    file.seek(0)
    assert not tp.load(file, lambda storage, location: storage).is_meta


class Unknown:
    pass


def test_unsupported_objects_are_named(tmp_path):
    path = tmp_path / "data.pt"
    tp.save(1, path)
    with pytest.raises(TypeError, match=r"obj\['layers'\]\[1\], a .*Unknown; .*state_dict"):
        tp.save({"layers": [1, Unknown()]}, path)
    with pytest.raises(TypeError, match="function"):
        tp.save(lambda: 1, path)
    with pytest.raises(RuntimeError, match="meta"):
        tp.save(tp.empty(2, device="meta"), path)
    loop: list = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        tp.save(loop, path)
    assert tp.load(path) == 1 and os.listdir(tmp_path) == ["data.pt"]


class _Sharded:
    pass


def test_sharded_tensors_are_refused():
    x = tp.ones(2)
    x._layout = _Sharded()
    with pytest.raises(RuntimeError, match=r"obj\['w'\].*full_tensor\(\).*to_local\(\)"):
        tp.save({"w": x}, io.BytesIO())


def test_damaged_and_foreign_files(tmp_path):
    path = tmp_path / "data.pt"
    tp.save({"x": tp.arange(1000)}, path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not a zip file"):
        path.write_bytes(content)
        with pytest.raises(RuntimeError, match=r"data\.pt is not a file that tensorplay\.save"):
            tp.load(path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    path.write_bytes(flipped)
    with pytest.raises(RuntimeError, match=r"data\.pt"):
        tp.load(path)
    with pytest.raises(FileNotFoundError):
        tp.load(tmp_path / "missing.pt")


def _archive(path, **entries):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name.replace("__", "/").replace("_json", ".json"), content)


def test_archives_that_lie(tmp_path):
    path = tmp_path / "data.pt"
    _archive(path, archive__data="x")
    with pytest.raises(RuntimeError, match="not one that tensorplay"):
        tp.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", b"x")
    with pytest.raises(RuntimeError, match=r"torch\.save wrote it"):
        tp.load(path)
    tensor = {
        "tensor": 0,
        "dtype": "float32",
        "shape": [4],
        "requires_grad": False,
        "device": "cpu",
    }
    for data, message in (
        ({"format": "tensorplay", "version": 9, "data": 1}, "version 9"),
        ({"format": "tensorplay", "version": 1, "data": {"code": "x"}}, "unknown kind 'code'"),
        ({"format": "tensorplay", "version": 1, "data": tensor}, "needs 16"),
        ({"format": "tensorplay", "version": 1, "data": {**tensor, "dtype": "q4"}}, "dtype 'q4'"),
        ({"format": "tensorplay", "version": 1, "data": {**tensor, "tensor": 7}}, "arrays/7"),
    ):
        _archive(path, tensorplay_json=json.dumps(data), arrays__0=b"12345678")
        with pytest.raises(RuntimeError, match=message):
            tp.load(path)
