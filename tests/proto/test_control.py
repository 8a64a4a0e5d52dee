from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from shardwright_proto.control import ControlProtocolError, receive_message, send_message
from shardwright_proto.limits import CONTROL_BYTES_MAX, CONTROL_FDS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        yield left, right


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_message_arrives_whole_with_its_descriptors(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    read, write = os.pipe()
    send_message(pair[0], {"op": "offer", "seq": 3, "text": "ä\n"}, [write])
    os.close(write)
    received = receive_message(pair[1])
    assert received is not None
    message, (fd,) = received
    assert message == {"op": "offer", "seq": 3, "text": "ä\n"}
    assert not os.get_inheritable(fd)
    os.write(fd, b"through")
    assert os.read(read, 10) == b"through"
    os.close(fd)
    os.close(read)


def test_messages_keep_their_bounds(pair: tuple[socket.socket, socket.socket]) -> None:
    for number in range(50):
        send_message(pair[0], {"seq": number})
    for number in range(50):
        assert receive_message(pair[1]) == ({"seq": number}, [])


def test_the_longest_message_with_the_most_descriptors_fits(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    text = "x" * (CONTROL_BYTES_MAX - len('{"t":""}'))
    send_message(pair[0], {"t": text}, [0] * CONTROL_FDS_MAX)
    received = receive_message(pair[1])
    assert received is not None
    assert received[0] == {"t": text} and len(received[1]) == CONTROL_FDS_MAX
    for fd in received[1]:
        os.close(fd)
    with pytest.raises(AssertionError):
        send_message(pair[0], {"t": text + "x"})


def test_the_end_of_the_stream_is_no_message(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    assert receive_message(pair[1]) is None


@pytest.mark.parametrize(
    "data",
    [b"[1]", b"nonsense", b'"text"', b"\xff\xfe", b"[" * 60000, b"x" * (CONTROL_BYTES_MAX + 1)],
    ids=["list", "words", "string", "bytes", "nested", "long"],
)
def test_what_is_no_message_is_refused_and_its_descriptors_are_closed(
    pair: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    before = open_fds()
    socket.send_fds(pair[0], [data], [0, 1])
    with pytest.raises(ControlProtocolError):
        receive_message(pair[1])
    assert open_fds() == before


def test_more_descriptors_than_allowed_are_refused_and_closed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    before = open_fds()
    socket.send_fds(pair[0], [b"{}"], [0] * (CONTROL_FDS_MAX + 20))
    with pytest.raises(ControlProtocolError, match="cut"):
        receive_message(pair[1])
    assert open_fds() == before
