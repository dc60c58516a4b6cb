"""Work on large requests, beside the event loop: to read and to tokenise megabytes takes seconds, in which no other
rollout's call would be served."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from longrein.errors import InvalidRequest

LARGE = 256 * 1024
"""Bytes of a request from which its work is done beside the loop; what is smaller is done at once."""

T = TypeVar("T")


class Beside:
    """One thread: large requests wait for one another, and nobody else for them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="longrein-large")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of ``work`` on a request of ``size`` bytes.

        Raises:
            InvalidRequest: the tokenizer gave up on the request's text.
        """
        try:
            if size < LARGE:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except BaseException as error:
            # What a tokenizer in Rust raises has no name to catch it by, and is no Exception.
            if type(error).__name__ == "PanicException":
                raise InvalidRequest(f"The model's tokenizer gave up on this text: {error}") from None
            raise

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
