"""Pool of threads that run the steps of a program together; see `pool_loops.py`.

Where PyTorch uses GNU's OpenMP library, they are its threads. These keep a core busy for a while after each operator of
PyTorch, so that other threads would have to share the core with them. With another library, and in a forked process,
which has none of the threads of its parent, the pool starts threads when a program first needs them. They wait in
compiled code, without the GIL, for a fraction of a millisecond, and sleep after that.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fxq.backends.loops.code.compiler import loops

MAX_THREADS = 32
"""Maximum number of threads of a program. It equals `pool_loops.MAX_PARTS`, which cannot be read without Numba."""
_WORD = 8
_SECONDS_TO_STOP = 1.0
"""Time that threads have at exit to complete their part."""


@dataclass(frozen=True)
class Job:
    """Steps that run in order, each divided into parts that may run at once.

    A row is the array of int64 that describes a part. Memory at the addresses must stay until the job is done.

    Attributes:
        function: Address of the C function that runs a part, `void (row, 1, bases)`.
        rows: Address of the rows of all parts of all steps.
        parts: Address of the number of parts of each step, int64.
        count: Number of steps.
        step_bytes: Bytes from the first row of a step to that of the next step.
        row_bytes: Bytes from the row of a part to that of the next part.
    """

    function: int
    rows: int
    parts: int
    count: int
    step_bytes: int
    row_bytes: int


def _yield_address() -> int:
    """Address of the C function that lets other threads of the machine run; 0 where there is none."""
    try:
        library: Any = ctypes.CDLL(None) if os.name == "posix" else ctypes.CDLL("kernel32")
        function = library.sched_yield if os.name == "posix" else library.SwitchToThread
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@dataclass(frozen=True)
class OpenMP:
    """Addresses of functions of GNU's OpenMP library.

    Attributes:
        start_team: Address of `GOMP_parallel`, which runs a function on several threads.
        thread_number: Address of `omp_get_thread_num`, the number of a thread in its team.
    """

    start_team: int
    thread_number: int

    @classmethod
    def of_torch(cls) -> OpenMP | None:
        """Return the functions of the library whose threads PyTorch uses; None if it does not have them."""
        try:
            library: Any = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
            functions = library.GOMP_parallel, library.omp_get_thread_num
        except (AttributeError, OSError):
            return None
        return cls(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions))


class ThreadPool:
    """Threads that run jobs, for one caller at a time.

    Args:
        compiled: The module `fxq.backends.loops.code.pool_loops`.
        openmp: The library whose threads run the jobs; None for threads that the pool starts.
    """

    def __init__(self, compiled: ModuleType, openmp: OpenMP | None = None) -> None:
        self._compiled = compiled
        self._openmp = openmp
        words = compiled.ASLEEP + MAX_THREADS
        with torch.inference_mode(False):
            self._memory = torch.zeros(words + compiled.TICKET + 16, dtype=torch.int64, device="cpu")
        self._board = -(-self._memory.data_ptr() // 128) * 128
        first = (self._board - self._memory.data_ptr()) // _WORD
        array: Any = self._memory.numpy()
        self._words = memoryview(array)[first : first + words]
        self._words[compiled.YIELD] = _yield_address()
        self._words[compiled.THREAD_NUMBER] = openmp.thread_number if openmp else 0
        self._caller = threading.Lock()
        self._bells: list[threading.Lock] = []
        self._threads: list[threading.Thread] = []

    def run(self, job: Job, threads: int, bases: int, bases_bytes: int) -> bool:
        """Run a job with up to `threads` threads, the calling one included.

        Args:
            job: The job.
            threads: Maximum number of threads.
            bases: Address of the third argument of the job's function, for the first part of each step.
            bases_bytes: Bytes from there to the argument for the next part; 0 if all parts have the same.

        Returns:
            False, and nothing is run, if the pool has another caller or has stopped.
        """
        if not self._caller.acquire(blocking=False):
            return False
        try:
            if self._words[self._compiled.STOP]:
                return False
            arguments = (
                self._board, job.function, job.rows, job.parts, job.count, job.step_bytes, job.row_bytes, bases,
                bases_bytes,
            )  # fmt: skip
            if self._openmp:
                member = code_address(self._compiled.join_team)
                self._compiled.lead_team(*arguments, self._openmp.start_team, member, threads)
            else:
                self._wake(threads)
                self._compiled.lead(*arguments)
        finally:
            self._caller.release()
        return True

    def _wake(self, threads: int) -> None:
        """Start missing threads, and wake those that sleep. The caller is thread 0."""
        asleep = self._compiled.ASLEEP
        for index in range(1, threads):
            if index > len(self._threads):
                bell = threading.Lock()
                bell.acquire()
                thread = threading.Thread(target=self._serve, args=(index, bell), name=f"fxq-{index}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads: those that run take all parts
                    break
                self._bells.append(bell)
                self._threads.append(thread)
            elif self._words[asleep + index]:
                self._words[asleep + index] = 0
                self._bells[index - 1].release()

    def _serve(self, index: int, bell: threading.Lock) -> None:
        """Body of a thread: run parts until there are none for a while, then sleep until `_wake` releases the bell."""
        while not self._words[self._compiled.STOP]:
            self._compiled.serve(self._board, index)
            bell.acquire()

    def stop(self) -> None:
        """End the threads. Later calls run nothing."""
        is_free = self._caller.acquire(timeout=_SECONDS_TO_STOP)  # or a caller was interrupted while it took the lock
        self._words[self._compiled.STOP] = 1
        for bell in self._bells:
            if bell.locked():
                bell.release()
        if is_free:
            self._caller.release()
        for thread in self._threads:
            thread.join(_SECONDS_TO_STOP)


class _ProcessPool:
    """Holder of the pool of this process, which is started when a program first needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPool | None = None
        self._is_closed = False
        self._openmp = OpenMP.of_torch()

    def get(self) -> ThreadPool | None:
        """Return the pool; None at exit, or where Numba is missing."""
        if self._pool is None and not self._is_closed:
            compiled = loops("pool_loops")
            with self._lock:
                if self._pool is None and not self._is_closed and compiled is not None:
                    self._pool = ThreadPool(compiled, self._openmp)
        return self._pool

    def forget(self) -> None:
        """Drop the pool in a forked process: its threads exist in the parent process only."""
        self._lock, self._pool, self._openmp = threading.Lock(), None, None

    def close(self) -> None:
        """Stop the pool before Python frees compiled code and memory, which its threads use."""
        self._is_closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()


_process_pool = _ProcessPool()
atexit.register(_process_pool.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process_pool.forget)


def usable_threads() -> int:
    """Number of threads that PyTorch has, up to `MAX_THREADS`."""
    return min(torch.get_num_threads(), MAX_THREADS)


def code_address(function: Callable[..., None]) -> int:
    """Address of the machine code of a function that `compiler.compiled` has decorated."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]  # it is a ctypes function


def run_together(job: Job, threads: int, bases: int, bases_bytes: int) -> bool:
    """Run a job on the threads of this process, see `ThreadPool.run`."""
    pool = _process_pool.get()
    return pool is not None and pool.run(job, threads, bases, bases_bytes)
