"""Loops of the threads that run a program together.

A job (`thread_pool.Job`) is a list of steps, and each step has parts that may run at once. All memory that the threads
share is one array of int64, the board. Its word TICKET holds the parts of the open step that no thread has taken yet::

    TICKET = number of the opening (31 bits) | one bit for each part that is free (32 bits)

A thread takes a part by exchanging the ticket for one without its bit. The thread that completes the last part of a
step opens the next one. So no thread waits for a thread that has taken nothing: one that sleeps, or that the operating
system has stopped, delays no step.

Why every thread sees the memory that it reads (acquire and release as in C11):

* The thread that opens a step has written its description before it stores the ticket (release). A part is taken by an
  exchange that reads this store, or an exchange of it (acquire): the description is visible, and it stays, because the
  step ends only after the part is done.
* A thread adds 1 to DONE after its part (release). The thread that reads the last number (acquire) sees the results of
  all parts, and opens the next step with a release: a thread that takes a part of it sees these results, too.
* DONE is set to 0 before the ticket is stored: when all parts of the previous step have added their 1, and no part of
  the next step is taken.
* A thread that has added its 1, and was not the last one, reads nothing of the job any more: the job may be finished,
  its memory freed, and the next job begun.
* FINISHED is stored (release) after the last step, and the caller waits for it (acquire).
* An exchange that succeeds takes a free bit of the open step, even if the thread has read the ticket long before: it
  reads nothing of the description before the exchange.

The threads either wait at the board for the next job (`lead` and `serve`), or OpenMP brings them to each job, and the
caller goes on when all have left it (`lead_team` and `join_team`).
"""

from __future__ import annotations

from fxq.backends.loops.code.atomic_code import (
    add,
    call_number,
    call_plain,
    call_step,
    call_team,
    exchange,
    load_acquire,
    lowest_bit,
    pause,
    store_release,
)
from fxq.backends.loops.code.compiler import compiled, helper
from fxq.backends.loops.code.memory_loops import words

MAX_PARTS = 32
"""Maximum number of parts of a step: the bits of the ticket."""
_LINE = 16
"""Distance between words that threads write often, in words: two cache lines, since CPUs fetch pairs of them."""
TICKET, DONE, FINISHED, JOB, STOP, YIELD, THREAD_NUMBER, ASLEEP = (k * _LINE for k in range(8))
"""Words of the board. STOP: not 0 if the threads must end. YIELD: address of a C function that lets other threads of
the machine run. THREAD_NUMBER: address of OpenMP's `omp_get_thread_num`, for `join_team`. ASLEEP: from here on, whether
each thread sleeps."""
STEP, FUNCTION, ROWS, PARTS, COUNT, STEP_BYTES, ROW_BYTES, BASES, BASES_BYTES = (JOB + k for k in range(9))
"""Words of the job: index of the open step; the function that runs a part, `void (row, 1, bases)`; address of the rows
of all steps and parts; address of the number of parts of each step, int64; number of steps; bytes from a step to the
next and from a part to the next in the rows; address of the bases of the first part, and bytes to those of the next."""
_SPINS_PER_YIELD = 1000
"""Number of rounds of waiting between two yields to other threads of the machine."""
_SPINS_AWAKE = 4000
"""Number of rounds that a thread waits for work before it sleeps."""


@helper
def _run(board, step, part):
    """Run one part of a step of the job."""
    job = words(board)
    row = job[ROWS] + step * job[STEP_BYTES] + part * job[ROW_BYTES]
    call_step(job[FUNCTION], row, 1, job[BASES] + part * job[BASES_BYTES])


@helper
def _open_next(board, step, part):
    """Open the first step from `step` on that has several parts, and take its part number `part`, or its last.

    Steps of one part are run at once. At the end, the job is finished.

    Returns:
        The part, or -1 if no step is left.
    """
    job = words(board)
    parts = words(job[PARTS])
    while step < job[COUNT] and parts[step] == 1:
        _run(board, step, 0)
        step += 1
    if step == job[COUNT]:
        store_release(board + 8 * FINISHED, 1)
        return -1
    job[STEP], job[DONE] = step, 0
    part = min(part, parts[step] - 1)
    free = ((1 << parts[step]) - 1) & ~(1 << part)
    opening = (load_acquire(board + 8 * TICKET) >> 32) + 1
    store_release(board + 8 * TICKET, (opening & 0x7FFFFFFF) << 32 | free)
    return part


@helper
def _take(board, part):
    """Take part number `part` if it is free, else another free one. Returns its number; -1 if this thread got none."""
    ticket = load_acquire(board + 8 * TICKET)
    free = ticket & 0xFFFFFFFF
    if free == 0:
        return -1
    part = part if free >> part & 1 else lowest_bit(free)
    return part if exchange(board + 8 * TICKET, ticket, ticket & ~(1 << part)) else -1


@helper
def _complete(board, part):
    """Run a part that this thread has taken. If it is the last of its step, go on with a part of the next step."""
    job = words(board)
    while part >= 0:
        step = job[STEP]
        parts = words(job[PARTS])[step]
        _run(board, step, part)
        is_last = add(board + 8 * DONE, 1) + 1 == parts
        part = _open_next(board, step + 1, part) if is_last else -1


@helper
def _wait(board, spins):
    """Wait for one round, and let other threads run now and then. `spins` is the number of rounds so far."""
    pause()
    if spins % _SPINS_PER_YIELD == 0 and words(board)[YIELD] != 0:
        call_plain(words(board)[YIELD])


@helper
def _describe(board, function, rows, parts, count, step_bytes, row_bytes, bases, bases_bytes):
    """Write a job on the board."""
    job = words(board)
    job[FUNCTION], job[ROWS], job[PARTS], job[COUNT] = function, rows, parts, count
    job[STEP_BYTES], job[ROW_BYTES], job[BASES], job[BASES_BYTES] = step_bytes, row_bytes, bases, bases_bytes
    job[FINISHED] = 0


@helper
def _finish(board, preferred):
    """Take parts of the job, number `preferred` of a step if it is free, until the job is finished."""
    spins = 0
    while load_acquire(board + 8 * FINISHED) == 0:
        part = _take(board, preferred)
        if part >= 0:
            _complete(board, part)
            spins = 0
        else:
            spins += 1
            _wait(board, spins)


@compiled("i i i i i i i i i")
def lead(board, function, rows, parts, count, step_bytes, row_bytes, bases, bases_bytes):
    """Run a job together with the threads that `serve` on the board. One thread at a time may lead.

    `board` is the address of the board. Other arguments: see `thread_pool.Job` and `thread_pool.ThreadPool.run`.
    """
    _describe(board, function, rows, parts, count, step_bytes, row_bytes, bases, bases_bytes)
    _complete(board, _open_next(board, 0, 0))
    _finish(board, 0)


@compiled("i")
def join_team(board):
    """Body of each thread of an OpenMP team: thread 0 opens the first step, and all take parts of the job."""
    index = call_number(words(board)[THREAD_NUMBER])
    if index == 0:
        _complete(board, _open_next(board, 0, 0))
    _finish(board, index)


@compiled("i i i i i i i i i i i i")
def lead_team(
    board, function, rows, parts, count, step_bytes, row_bytes, bases, bases_bytes, start_team, member, threads
):
    """Run a job on a team of OpenMP threads.

    `start_team` and `member` are the addresses of `GOMP_parallel` and `join_team`; other arguments: see `lead`.
    """
    _describe(board, function, rows, parts, count, step_bytes, row_bytes, bases, bases_bytes)
    call_team(start_team, member, board, threads)


@compiled("i i")
def serve(board, index):
    """Take parts of jobs until there has been none for a while, or until STOP. The thread prefers part `index`."""
    spins = 0
    while spins < _SPINS_AWAKE and load_acquire(board + 8 * STOP) == 0:
        part = _take(board, index)
        if part >= 0:
            _complete(board, part)
            spins = 0
        else:
            spins += 1
            _wait(board, spins)
    store_release(board + 8 * (ASLEEP + index), 1)
