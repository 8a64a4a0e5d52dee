from __future__ import annotations

import re
import runpy
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "proto/shardwright_proto/v1"


def floors() -> dict[str, tuple[int, ...]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [re.match(r"([a-z]+)>=([0-9.]+)", text) for text in project["dependencies"]]
    return {match[1]: numbers(match[2]) for match in found if match}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_the_generated_code_accepts_the_oldest_protobuf_that_we_promise() -> None:
    text = (GENERATED / "writer_pb2.py").read_text()
    match = re.search(r"Domain\.PUBLIC,\s*(\d+),\s*(\d+),\s*(\d+)", text)
    assert match, "the generated code has another gate than the one known here"
    assert tuple(map(int, match.groups())) <= floors()["protobuf"]


def test_the_generated_code_accepts_the_oldest_grpcio_that_we_promise() -> None:
    match = re.search(
        r"GRPC_GENERATED_VERSION = '([0-9.]+)'", (GENERATED / "writer_pb2_grpc.py").read_text()
    )
    assert match and numbers(match[1]) <= floors()["grpcio"]


def test_a_stream_is_carried_by_the_installed_versions() -> None:
    main = runpy.run_path(str(Path(__file__).with_name("one_rpc.py")))["main"]
    assert "one save's stream carried by protobuf" in main()
