"""The public calls: save, async_save, prepare, drain.

An object goes through here in a straight line: target, capture, session, stream, staging. What
each step raises becomes the handle's error; `on_error` decides who hears of it. Imports torch,
gRPC and protobuf only when first used, and does no step itself.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from shardwright import config, lifecycle
from shardwright.errors import (
    SaveCancelledError,
    SaveFailedError,
    ShardwrightError,
    UnsupportedObjectError,
    WriterUnavailableError,
)
from shardwright.handle import Event, PendingSave
from shardwright.local import save_locally
from shardwright.target import StrOrBytesPath, Target, absolute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwright.attach import Connection
    from shardwright.capture import Capture
    from shardwright.stream import SaveStream

Format = Literal["torch", "safetensors"]
OnError = Literal["skip", "raise", "local"]
Transport = Literal["shared", "inline"]

_log = logging.getLogger("shardwright")
_BAD_INPUT: Final = ("BAD_REQUEST", "UNSUPPORTED")
_SHARD_OVERHEAD_BYTES: Final = 512
"""What a container adds to a shard (header, alignment, descriptor): an arena holds the image."""
_SAVE_OVERHEAD_BYTES: Final = 32 << 20
"""Two windows that are not full."""


@dataclass(frozen=True, slots=True)
class _Arguments:
    """What was asked for, and the settings for what was not."""

    format: str | None = None
    metadata: Mapping[str, str] | None = None
    max_shard_size: int | str | None = None
    step: int = 0
    endpoint: str | None = None
    timeout_s: float | None = None
    transport: str | None = None

    def format_for(self, path: str) -> str:
        """Return the format: as asked for, or guessed from the suffix."""
        if self.format is not None:
            return self.format
        return "safetensors" if path.endswith(".safetensors") else "torch"

    def connection(self, settings: config.Config) -> Connection:
        """Return the connection to use. Raises SaveFailedError for arguments that cannot be."""
        from shardwright import attach

        transport = self.transport or settings.transport
        if transport not in config.TRANSPORTS:
            raise _bad(f"transport {transport!r} is not one of {', '.join(config.TRANSPORTS)}")
        if not 0 <= self.step < 1 << 64:
            raise _bad(f"step {self.step!r} is not a whole number from 0 to 2**64 - 1")
        try:
            return attach.connect(config.socket_path(self.endpoint), transport, settings)
        except ValueError as error:
            raise _bad(str(error)) from None


def save(
    obj: object,
    path: StrOrBytesPath,
    *,
    format: Format | None = None,  # noqa: A002  the word that users look for
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    step: int = 0,
    endpoint: str | None = None,
    on_error: OnError | None = None,
    timeout_s: float | None = None,
    transport: Transport | None = None,
) -> PendingSave:
    """Save obj at path and return when the checkpoint is durable, or has failed.

    format is guessed from the suffix: `.safetensors`, else torch's. metadata and max_shard_size
    are for safetensors. With on_error="skip" a failure is on the returned handle and in the log;
    "raise" raises it; "local" then writes with torch.save or save_file, in this process. The save
    fails when it is not durable within timeout_s.
    """
    arguments = _Arguments(format, metadata, max_shard_size, step, endpoint, timeout_s, transport)
    with lifecycle.guard():
        call = _Call(obj, path, arguments, on_error)
        call.run()
        call.handle.wait_ended(None)
        call.fall_back()
    call.handle.reraise()
    return call.handle


def async_save(
    obj: object,
    path: StrOrBytesPath,
    *,
    format: Format | None = None,  # noqa: A002  the word that users look for
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    step: int = 0,
    endpoint: str | None = None,
    on_error: OnError | None = None,
    timeout_s: float | None = None,
    transport: Transport | None = None,
) -> PendingSave:
    """Save obj at path in the background; return when its tensors may change again.

    Arguments as for `save`. Of the errors only those of the object and of the arguments are
    raised here, with on_error="raise"; the others by `captured` and `committed`.
    """
    arguments = _Arguments(format, metadata, max_shard_size, step, endpoint, timeout_s, transport)
    with lifecycle.guard():
        call = _Call(obj, path, arguments, on_error)
        call.run()
        call.fall_back()
    if call.bad_input:
        call.handle.reraise()
    return call.handle


def prepare(
    obj: object = None,
    *,
    format: Format = "torch",  # noqa: A002  the word that users look for
    path: StrOrBytesPath | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    endpoint: str | None = None,
    on_error: OnError | None = None,
    timeout_s: float | None = None,
    transport: Transport | None = None,
) -> bool:
    """Do before training what the first save would otherwise do: attach, reserve, populate.

    With obj, the arena is as large as it needs (the writer's budget allowing) and its structure
    is known. With path, the format is guessed from it. Return True when all is done. A failure is
    logged, or raised with on_error="raise"; saves then try again by themselves.
    """
    named = None if path is not None else format
    arguments = _Arguments(named, metadata, max_shard_size, 0, endpoint, timeout_s, transport)
    where = "" if path is None else absolute(path)
    with lifecycle.guard():
        settings, trouble = _settings()
        mode = _on_error(on_error, settings)
        try:
            if trouble is not None:
                raise trouble
            return _prepare(obj, where, arguments, settings)
        except ShardwrightError as error:
            if mode == "raise":
                raise
            _log.error("cannot prepare for saves, they will try by themselves: %s", error)
            return False


def drain(timeout_s: float | None = None) -> bool:
    """Wait until every pending save of this process has ended; False when the time is up."""
    deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    for pending in lifecycle.pending():
        left_s = None if timeout_s is None else max(0.0, deadline_s - time.monotonic())
        if not pending.wait_ended(left_s):
            return False
    return True


class _Call:
    """One call of save or async_save, while its object is at hand."""

    def __init__(
        self, obj: object, path: StrOrBytesPath, arguments: _Arguments, on_error: str | None
    ) -> None:
        self._settings, self._trouble = _settings()
        self._rank, self._world_size = config.rank_and_world(self._settings)
        self._arguments = arguments
        self._obj = obj
        mode = _on_error(on_error, self._settings)
        self.handle = PendingSave(absolute(path), secrets.token_hex(16), mode, self._rank)
        self.bad_input = False

    def run(self) -> None:
        """Stage the object. Every error of ours ends up on the handle."""
        lifecycle.add(self.handle)
        try:
            self.bad_input = True
            connection, captured, target = self._check()
            self.bad_input = False
            try:
                save = self._start(connection, captured, target)
            except BaseException:
                target.close()
                raise
            inline = connection.transport == "inline"
            _stage(save, self.handle, captured, self._settings, inline=inline)
        except ShardwrightError as error:
            self.bad_input = self.bad_input or _is_bad_input(error)
            self.handle.apply(Event.FAILED, _without_frames(error, self.handle.on_error))
        except BaseException:
            self.handle.apply(Event.CANCELLED, SaveCancelledError("interrupted while staging"))
            raise

    def fall_back(self) -> None:
        """With on_error="local": write what failed here, unless the object is to blame."""
        handle, arguments = self.handle, self._arguments
        failed = handle.done() and handle.error is not None and not handle.was_captured
        cancelled = isinstance(handle.error, SaveCancelledError)
        if not failed or cancelled or handle.on_error != "local" or self.bad_input:
            return
        if _is_bad_input(handle.error):
            return
        try:
            target = Target(handle.path)
            try:
                name = arguments.format_for(handle.path)
                save_locally(self._obj, target, handle.save_id, name, arguments.metadata)
            finally:
                target.close()
        except ShardwrightError as error:
            _log.error("writing %s in the trainer failed too: %s", handle.path, error)
            return
        handle.transport = "local"
        handle.apply(Event.WRITTEN_HERE)
        _log.warning("%s was written by the trainer itself, which took its time", handle.path)

    def _check(self) -> tuple[Connection, Capture, Target]:
        """Do what can only fail for what the caller gave us."""
        if self._trouble is not None:
            raise self._trouble
        connection = self._arguments.connection(self._settings)
        target = Target(self.handle.path)
        try:
            name = self._arguments.format_for(self.handle.path)
            captured = _capture(self._obj, name, self._arguments)
        except BaseException:
            target.close()
            raise
        self.handle.count(total=captured.bytes_total)
        return connection, captured, target

    def _start(self, connection: Connection, captured: Capture, target: Target) -> SaveStream:
        from shardwright.outbox import SaveFacts
        from shardwright.stream import SaveStream

        settings, timeout_s = self._settings, self._arguments.timeout_s
        want_bytes = _want_bytes(captured, settings)
        session = connection.session(want_bytes, settings.connect_timeout_s)
        facts = SaveFacts(
            save_id=self.handle.save_id,
            file_name=target.file_name,
            plan_digest=captured.plan_digest,
            skeleton_bytes=len(captured.skeleton),
            umask=target.umask,
            step=self._arguments.step,
            rank=self._rank,
            world_size=self._world_size,
            job_id=settings.job,
        )
        save = SaveStream(
            self.handle,
            connection,
            session,
            captured,
            target,
            facts,
            settings,
            want_bytes=want_bytes,
            deadline_s=float("inf") if timeout_s is None else time.monotonic() + timeout_s,
        )
        save.start()
        return save


def _stage(
    save: SaveStream,
    handle: PendingSave,
    captured: Capture,
    settings: config.Config,
    *,
    inline: bool,
) -> None:
    from shardwright.sink import StagingSink
    from shardwright.stage import stage

    sink = StagingSink(save, handle, settings.slot_timeout_s)
    try:
        stage(captured, sink.wait_schedule(), sink, zero_gaps=inline)
        sink.staging_done()
    except ShardwrightError as error:
        save.abort(error)
        raise
    except Exception as error:
        trouble = SaveFailedError("INTERNAL", f"copying the tensors failed: {error!r}")
        save.abort(trouble)
        raise trouble from error
    except BaseException:
        save.abort(SaveCancelledError("interrupted while staging"))
        raise


def _prepare(obj: object, path: str, arguments: _Arguments, settings: config.Config) -> bool:
    from shardwright import stream  # noqa: F401  protobuf and gRPC take their time to import

    connection = arguments.connection(settings)
    want_bytes = settings.arena_bytes
    if obj is not None:
        captured = _capture(obj, arguments.format_for(path), arguments)
        want_bytes = _want_bytes(captured, settings)
    given_s = arguments.timeout_s
    timeout_s = settings.prepare_timeout_s if given_s is None else given_s
    deadline_s = time.monotonic() + timeout_s
    session = connection.session(
        want_bytes, min(timeout_s, settings.connect_timeout_s), patient=True
    )
    connection.reserve(session, want_bytes)
    if not connection.wait_lease(session, deadline_s - time.monotonic()):
        raise WriterUnavailableError(
            f"the writer at {connection.path} did not make {want_bytes} bytes of shared memory"
            f" within {timeout_s:g} s",
            hint="saves start with what is there; look at `writer status`",
        )
    session.arena.populate()
    connection.wait_ready(session, max(0.0, deadline_s - time.monotonic()))
    return True


def _capture(obj: object, format_name: str, arguments: _Arguments) -> Capture:
    from shardwright.capture import capture

    try:
        return capture(
            obj,
            format_name,
            metadata=arguments.metadata,
            max_shard_size=arguments.max_shard_size,
        )
    except ShardwrightError:
        raise
    except Exception as error:
        # The object's own code ran (__reduce__, __getstate__) and may raise anything.
        raise UnsupportedObjectError(f"the object cannot be pickled: {error!r}") from error


def _want_bytes(captured: Capture, settings: config.Config) -> int:
    image_bytes = captured.bytes_total + _SHARD_OVERHEAD_BYTES * len(captured.nbytes)
    return settings.arena_bytes or image_bytes + _SAVE_OVERHEAD_BYTES


def _settings() -> tuple[config.Config, ShardwrightError | None]:
    try:
        return config.get(), None
    except ValueError as error:
        return config.Config(), _bad(str(error))


def _on_error(on_error: str | None, settings: config.Config) -> str:
    mode = on_error or settings.on_error
    if mode not in config.ON_ERRORS:
        raise ValueError(f"on_error={mode!r} is not one of {', '.join(config.ON_ERRORS)}")
    return mode


def _without_frames(error: ShardwrightError, mode: str) -> ShardwrightError:
    """Drop what would keep the whole object alive for as long as the handle of a failed save."""
    error.__traceback__ = None
    if mode != "raise":  # there the caller sees the cause, and lets go of it
        error.__cause__ = error.__context__ = None
    return error


def _bad(message: str) -> SaveFailedError:
    return SaveFailedError("BAD_REQUEST", message, lost="Nothing was written")


def _is_bad_input(error: ShardwrightError | None) -> bool:
    if isinstance(error, SaveFailedError):
        return error.reason in _BAD_INPUT
    return isinstance(error, UnsupportedObjectError)
