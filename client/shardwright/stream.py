"""One save on the wire: a background thread that brings it to Committed, through broken streams.

`api` makes one per save and stages windows into it; the thread opens the stream, sends, takes
replies, and after a break re-attaches and resumes. The windows themselves are in `ledger`, what
the caller's thread waits for is in `sink`. Copies no shard bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

import grpc

from shardwright import outbox, stage, watchdog
from shardwright.errors import (
    SaveCancelledError,
    SaveFailedError,
    SaveTimeoutError,
    ShardwrightError,
    WriterUnavailableError,
)
from shardwright.handle import Event
from shardwright.layouts import LayoutWait
from shardwright.ledger import Ledger
from shardwright_proto.limits import TOKEN_METADATA_KEY
from shardwright_proto.v1 import writer_pb2 as wire

if TYPE_CHECKING:
    from shardwright.attach import Connection, Session
    from shardwright.capture import Capture
    from shardwright.config import Config
    from shardwright.handle import PendingSave
    from shardwright.target import Target

_log = logging.getLogger("shardwright")
_REOPENS_MAX: Final = 10
_PERMANENT: Final = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
_STALE_TOKEN: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_AN_OLDER_STAYS: Final = "An older checkpoint at this path stays"


class _BrokenStreamError(Exception):
    """The stream ended without a verdict."""


class SaveStream:
    """A save's way to the writer."""

    def __init__(
        self,
        handle: PendingSave,
        connection: Connection,
        session: Session,
        capture: Capture,
        target: Target,
        facts: outbox.SaveFacts,
        config: Config,
        *,
        want_bytes: int = 0,
        deadline_s: float = float("inf"),
    ) -> None:
        self._handle = handle
        self._connection = connection
        self._session = session
        self._plan, self._skeleton = capture.plan, capture.skeleton
        self._target = target
        self._facts = facts
        self._config = config
        self._want_bytes = want_bytes
        self._deadline_s = deadline_s
        self.layout = LayoutWait(facts.plan_digest, capture.nbytes, session)
        self.ledger = Ledger(session.arena, inline=connection.transport == "inline")
        self._lock = threading.Lock()
        self._skeleton_sent = False
        self._temporary_names: list[str] = []
        self._outbox: outbox.Outbox | None = None
        self._call: grpc.Call | None = None
        self._open_sent = False
        self._reopens = 0
        self._cancelled = False
        self._given_up_s = float("inf")
        self._ended = False
        self._heard_s = self._moved_s = time.monotonic()
        self._figures: object = None
        self._trouble = "it has said nothing yet"
        handle.transport = connection.transport
        handle.on_cancel(self.cancel)

    def start(self) -> None:
        """Begin: the stream opens in the background."""
        watchdog.watch(self)
        name = f"shardwright-save-{self._handle.save_id[:8]}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    # --- from other threads -----------------------------------------------------------------------

    def cancel(self) -> None:
        """Ask the writer to drop the save; it answers how the save ended."""
        self._cancelled = True
        self._stop_staging()
        with self._lock:
            if self._outbox is not None:
                self._outbox.put(outbox.cancel())

    def abort(self, error: ShardwrightError) -> None:
        """End the save for its caller, whatever the writer says; the thread gets its slots back.

        What the writer has captured it may still commit: that is not taken back.
        """
        captured = self._handle.is_captured
        self._given_up_s = min(self._given_up_s, time.monotonic())
        self._handle.apply(_event_of(error), error)
        if captured:
            self._stop_staging()
        else:
            self.cancel()

    def check(self, now_s: float) -> bool:
        """Look for what nobody else would notice; False when there is nothing left to watch."""
        figures = self._handle.figures
        if figures != self._figures:
            self._figures, self._moved_s = figures, now_s
        late = "not durable within timeout_s" if now_s > self._deadline_s else ""
        if now_s - self._moved_s > self._config.progress_timeout_s:
            late = f"nothing has moved for {now_s - self._moved_s:.0f} s"
        if late and not self._ended:
            self._deadline_s, self._moved_s = float("inf"), float("inf")
            late = f"{late} ({self.describe_writer()})"
            self.abort(SaveTimeoutError(late, lost=_AN_OLDER_STAYS))
        call = self._call
        if call is not None and now_s - self._heard_s > self._config.stall_timeout_s:
            call.cancel()
        return not self._ended

    def describe_writer(self) -> str:
        """Say what is known of the writer, for errors."""
        quiet_s = time.monotonic() - self._heard_s
        return f"last stage {self._handle.progress.stage!r}, last heard {quiet_s:.1f} s ago"

    # --- the save's own thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._bring_home()
        except Exception as error:  # noqa: BLE001 -- a bug must end the save, not leave it pending
            _log.exception("bug in save %s of %s", self._handle.save_id, self._handle.path)
            # Its slots are not freed: the writer may still read them.
            self._ended = True
            self.abort(SaveFailedError("INTERNAL", f"bug in the client: {error!r}"))
        finally:
            self._target.close()

    def _bring_home(self) -> None:
        config = self._config
        pause_s = config.retry_min_s
        while True:
            heard_s = self._heard_s
            ended = threading.Event()
            try:
                self._attempt()
            except _BrokenStreamError as error:
                self._trouble = str(error)
                ended = self._session.handshake.ended  # then the next attempt need not wait
            except WriterUnavailableError as error:
                self._trouble = str(error)
            except SaveFailedError as error:  # refused over the handshake socket
                if self._open_sent:
                    self.abort(error)
                else:
                    self._end(error)
            if self._is_over():
                return
            given_up = self._given_up_s < float("inf")
            pause_max_s = config.reclaim_pause_s if given_up else config.retry_max_s
            silent = self._heard_s == heard_s
            pause_s = min(2 * pause_s, pause_max_s) if silent else config.retry_min_s
            ended.wait(pause_s)

    def _is_over(self) -> bool:
        """After a break: decide whether to go on. Gives up when the writer is silent too long."""
        if self._ended:
            return True
        now_s = time.monotonic()
        quiet_s = now_s - self._heard_s
        if self._given_up_s == float("inf"):
            if quiet_s > self._config.stall_timeout_s:
                self._give_up(f"has said nothing for {quiet_s:.0f} s")
            elif self._reopens > _REOPENS_MAX:
                self._give_up(f"broke off {self._reopens} times without a window written")
        if self._given_up_s == float("inf"):
            return False
        if not self._open_sent:
            self._end(None)  # the writer has never heard of these slots
        elif now_s > self._given_up_s + self._config.reclaim_timeout_s:
            _log.error("arena slots of %r are lost: its writer never came back", self._handle)
            return True
        return not self.ledger.holds_slots

    def _give_up(self, what: str) -> None:
        if self._cancelled:
            self.abort(SaveCancelledError("the save was cancelled"))
            return
        captured = "The writer had everything, and commits it if it comes back"
        lost = captured if self._handle.is_captured else _AN_OLDER_STAYS
        self.abort(
            WriterUnavailableError(
                f"the writer at {self._connection.path} {what} ({self.describe_writer()}):"
                f" {self._trouble}",
                lost=lost,
                hint="look at `writer status` and at the writer's log",
            )
        )

    def give_up_if_nobody_listens(self) -> None:
        """Called while the caller's thread waits, which it shall not do long for nobody."""
        since_s = self._connection.unreachable_since_s
        if since_s is not None and not self.ledger.stopped:
            waited_s = time.monotonic() - since_s
            if waited_s > self._config.connect_timeout_s:
                self._give_up(f"has not listened for {waited_s:.0f} s")

    def _attempt(self) -> None:
        """Open the stream (again) and follow it until the save ends or the stream breaks."""
        given_up = self._given_up_s < float("inf")
        start_s = time.monotonic() if given_up else self._heard_s
        session = self._connection.live_session(start_s + self._config.stall_timeout_s)
        if session.arena is not self.ledger.arena:
            what = "the writer that came back could not take the arena over: is its budget smaller?"
            self._end(_failure("BUSY", what))
            return
        self._session = session
        if not self._open_sent:
            self._connection.reserve(session, self._want_bytes)
        session.handshake.request(
            "target",
            self._config.request_timeout_s,
            {"target_id": self._facts.save_id, "path": self._target.folder},
            [self._target.fd],
        )
        self._follow(session)

    def _follow(self, session: Session) -> None:
        box = outbox.Outbox()
        box.put(wire.SaveRequest(open=self._open_message(session)))
        self.layout.restart()
        self._skeleton_sent = False
        metadata = ((TOKEN_METADATA_KEY, session.token),)
        try:
            save = outbox.save_method(self._connection.channel(session))
            call = save(box.messages(), metadata=metadata)
        except ValueError as error:  # another save has just moved on to a newer channel
            raise _BrokenStreamError(str(error)) from None
        self._open_sent = True
        with self._lock:
            self._outbox, self._call = box, call
            if self._cancelled:
                box.put(outbox.cancel())
        try:
            for reply in call:
                self._heard_s = time.monotonic()
                self._take(reply, session)
                if self._ended:
                    return
            raise _BrokenStreamError("the writer closed the stream")
        except grpc.RpcError as error:
            self._on_rpc_error(error, session)
        finally:
            self.ledger.shut()
            with self._lock:
                self._outbox, self._call = None, None
            box.close()
            call.cancel()

    def _open_message(self, session: Session) -> wire.Open:
        resume = self._open_sent
        # Another server process may lay files out anew: then compare before going on.
        known = self.layout.is_confirmed(session)
        message = outbox.opening(self._facts, resume=resume, layout_known=known and not resume)
        if resume:
            outbox.add_durable(message, self.ledger.durable, self._temporary_names)
        return message

    def _on_rpc_error(self, error: grpc.RpcError, session: Session) -> None:
        assert isinstance(error, grpc.Call)
        code, what = error.code(), f"{error.code().name}: {error.details()}"
        if code in _PERMANENT:
            self.abort(_failure("INTERNAL", f"the writer's gRPC says {what}"))
        if code in _STALE_TOKEN:
            self._connection.invalidate(session)
        raise _BrokenStreamError(what) from None

    # --- replies ----------------------------------------------------------------------------------

    def _take(self, reply: wire.SaveReply, session: Session) -> None:
        kind = reply.WhichOneof("kind")
        if kind == "acks":
            self._reopens = 0
            self.ledger.acknowledge(
                ((done.file, done.window), done.crc32) for done in reply.acks.durable
            )
            self._handle.count(durable=self.ledger.bytes_durable)
        elif kind == "progress":
            self._handle.count(
                received=reply.progress.bytes_received,
                durable=reply.progress.bytes_durable,
                stage=reply.progress.stage,
            )
        elif kind == "need_plan" and self._outbox is not None:
            self._outbox.put(outbox.plan_chunks(self._plan))
        elif kind == "layout_chunk":
            self._on_layout(reply.layout_chunk, session)
        elif kind == "opened":
            self._on_opened(reply.opened, session)
        elif kind == "captured":
            self._handle.apply(Event.CAPTURED)
        elif kind == "committed":
            self._handle.count(durable=self._handle.progress.bytes_total)
            self._end(None, Event.COMMITTED)
        elif kind == "failed":
            self._on_failed(reply.failed)

    def _on_layout(self, chunk: wire.LayoutChunk, session: Session) -> None:
        try:
            whole = self.layout.add(chunk, session)
        except stage.LayoutError as error:
            self.abort(_failure("INTERNAL", str(error)))
            return
        if whole:
            # Not only after Opened: a writer without a journal needs it to check what was durable.
            self._send_skeleton()

    def _send_skeleton(self) -> None:
        if not self._skeleton_sent and self._skeleton and self._outbox is not None:
            self._skeleton_sent = True
            self._outbox.put(outbox.skeleton_chunks(self._skeleton))

    def _on_opened(self, opened: wire.Opened, session: Session) -> None:
        self._temporary_names = list(opened.temporary_names) or self._temporary_names
        durable = {(ref.file, ref.window) for ref in opened.durable}
        if opened.window_bytes != session.window_bytes or self.layout.schedule is None:
            self.abort(_failure("INTERNAL", "the writer opened the save without its layout"))
            return
        if (lost := self.ledger.lost(durable)) and not opened.captured:
            what = f"the writer and its journal were lost, and {lost} windows with them"
            self.abort(_failure("UNKNOWN_SAVE", what))
            return
        self._reopens += 1
        box = self._outbox
        if self._cancelled or box is None:
            return
        if not opened.have_skeleton:
            self._send_skeleton()
        received = {(ref.file, ref.window) for ref in opened.received}
        self.ledger.open(box, durable, received, captured=opened.captured)
        self._handle.count(durable=self.ledger.bytes_durable)
        if opened.captured:
            self._handle.apply(Event.CAPTURED)

    def _on_failed(self, failed: wire.Failed) -> None:
        reason = wire.Reason.Name(failed.reason).removeprefix("REASON_")
        if reason == "UNKNOWN_SAVE" and not self.ledger.durable and not self._cancelled:
            self._open_sent = False  # nothing of it is left there, everything here: send anew
            raise _BrokenStreamError("the writer has lost its journal")
        if reason == "CANCELLED" or self._cancelled:
            self._end(SaveCancelledError("the save was cancelled"))
        else:
            self._end(SaveFailedError(reason, failed.message, failed.hint))

    # --- the end ----------------------------------------------------------------------------------

    def _stop_staging(self) -> None:
        self.ledger.stop()
        self.layout.wake()

    def _end(self, error: ShardwrightError | None, event: Event | None = None) -> None:
        """The writer is done with this save: its slots are free, and the handle says so."""
        if self._ended:
            return
        self._ended = True
        if error is not None:
            event = _event_of(error)
        if event is not None:
            self._handle.apply(event, error)
        self._stop_staging()
        self.ledger.release_all()


def _failure(reason: str, message: str) -> SaveFailedError:
    return SaveFailedError(reason, message, "save again", lost=_AN_OLDER_STAYS)


def _event_of(error: ShardwrightError) -> Event:
    return Event.CANCELLED if isinstance(error, SaveCancelledError) else Event.FAILED
