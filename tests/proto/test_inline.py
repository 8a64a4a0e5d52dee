"""Hand-made inline chunks are what protobuf makes of them, in both directions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwright_proto.inline import InlineBytes, decode_chunk, encode_chunk
from shardwright_proto.v1 import writer_pb2 as wire

UINT32 = st.integers(0, (1 << 32) - 1)
CHUNKS = st.builds(
    InlineBytes,
    file=UINT32,
    window=UINT32,
    offset=UINT32,
    data=st.binary(max_size=300).map(memoryview),
    crc32=UINT32,
    last=st.booleans(),
)


def message_of(chunk: InlineBytes) -> wire.SaveRequest:
    return wire.SaveRequest(
        inline_chunk=wire.InlineChunk(
            file=chunk.file,
            window=chunk.window,
            offset=chunk.offset,
            data=bytes(chunk.data),
            crc32=chunk.crc32,
            last=chunk.last,
        )
    )


@given(CHUNKS)
def test_the_encoding_is_protobufs_byte_for_byte(chunk: InlineBytes) -> None:
    assert encode_chunk(chunk) == message_of(chunk).SerializeToString(deterministic=True)


@given(CHUNKS)
def test_decoding_gives_back_what_was_encoded(chunk: InlineBytes) -> None:
    assert decode_chunk(encode_chunk(chunk)) == chunk


@given(st.binary(max_size=64) | st.binary(max_size=64).map(lambda tail: b"\x2a" + tail))
def test_garbage_is_left_to_protobuf_or_read_as_protobuf_reads_it(message: bytes) -> None:
    chunk = decode_chunk(message)
    if chunk is not None:
        assert message_of(chunk) == wire.SaveRequest.FromString(message)


@given(CHUNKS, st.data())
def test_a_cut_message_is_never_taken_for_a_chunk(chunk: InlineBytes, data: st.DataObject) -> None:
    message = encode_chunk(chunk)
    cut = message[: data.draw(st.integers(0, len(message) - 1))]
    assert decode_chunk(cut) is None


def test_other_requests_are_left_to_protobuf() -> None:
    assert decode_chunk(wire.SaveRequest(finish=wire.Finish()).SerializeToString()) is None
    assert decode_chunk(b"") is None
