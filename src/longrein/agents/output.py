"""What a program printed: the beginning and the end are kept, the middle is counted, and nothing ever blocks.

A program that prints without end costs no disk and no memory, and little of our time: past its quota it is read no
faster than SPEED.
"""

import asyncio
import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

CHUNK = 1 << 16
SPEED_BURST, SPEED_PAUSE_S = 1 << 20, 0.01
DRAIN_S = 5.0
# Of the files below one directory of /logs.
EVIDENCE_BYTES = 16 << 20


class Output:
    """One pipe. ``write_end`` is for the program; close it with ``finish``."""

    def __init__(self, limit: int) -> None:
        """``limit``: bytes kept."""
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0
        self._burst = 0
        self._ended = asyncio.Event()
        self._loop.add_reader(self._read_end, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._read_end, CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._read_end)
            self._ended.set()
            return
        self._keep(data)
        self._burst += len(data)
        if self._total > 2 * self._half and self._burst > SPEED_BURST:
            self._burst = 0
            self._loop.remove_reader(self._read_end)
            self._loop.call_later(SPEED_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._read_end >= 0:
            self._loop.add_reader(self._read_end, self._read)

    def _keep(self, data: bytes) -> None:
        self._total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    async def finish(self) -> bytes:
        """What was kept, once every writer is gone."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._ended.wait()
        except TimeoutError:
            pass  # a writer survived; what it adds is of no interest
        finally:
            self.close()
        tail = self._tail[-self._half :]
        omitted = self._total - len(self._head) - len(tail)
        notice = f"\n[{omitted} bytes omitted]\n".encode() if omitted else b""
        return bytes(self._head + notice + tail)

    def close(self) -> None:
        """Stop reading; what was not read is lost."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1
        if self._read_end >= 0:
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1


class Captured:
    """Standard output and standard error of one program, saved as ``NAME.stdout`` and ``NAME.stderr``."""

    def __init__(self, limit: int) -> None:
        self.stdout = Output(limit)
        self.stderr = Output(limit)

    async def save(self, directory: Path, name: str) -> str:
        """Write both; returns the last line printed (standard error first), to be quoted as evidence."""
        out, err = await self.stdout.finish(), await self.stderr.finish()
        (directory / f"{name}.stdout").write_bytes(out)
        (directory / f"{name}.stderr").write_bytes(err)
        lines = (err.strip() or out.strip()).splitlines()
        return lines[-1].decode(errors="replace")[:300] if lines else "it printed nothing"

    def close(self) -> None:
        self.stdout.close()
        self.stderr.close()


def keep_files(found: Iterable[tuple[str, int]], to: Path) -> None:
    """Copy open files into ``to`` by relative name, as long as they fit into EVIDENCE_BYTES; closes them.

    Names and sizes are a harness's doing. What does not fit or cannot be written is named in ``omitted.txt``.
    """
    room = EVIDENCE_BYTES
    omitted = []
    for name, descriptor in found:
        with os.fdopen(descriptor, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            target = to / name
            try:
                if size > room:
                    raise OSError(errno.EFBIG, f"{size} bytes")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read(room))
                room -= size
            except OSError as error:
                omitted.append(f"{name!r}: {error.strerror}\n")
    if omitted:
        to.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            (to / "omitted.txt").write_text("".join(omitted))
