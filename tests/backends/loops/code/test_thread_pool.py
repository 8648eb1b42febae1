"""The pool of threads: callers at once, forks, the end of the process, and changes of the number of threads."""

import ctypes
import os
import threading
import time

import pytest
import torch

from fxq.backends.loops.code import thread_pool
from fxq.backends.loops.code.compiler import loops
from fxq.backends.loops.code.thread_pool import Job, OpenMP, ThreadPool, code_address, run_together, usable_threads
from fxq.common.timed_calls import threads_set_to
from tests.support.processes import in_new_python
from tests.support.programs import LOOPS, Draft, divided, program

pytestmark = pytest.mark.any_cpu


def network(draft):
    """Three layers with a residual."""
    x = draft.qdq(draft.conv(draft.image(1, 16, 12, 12), 32, 3))
    return draft.op("add", draft.qdq(draft.conv(x, 32, 3)), x)


def copies(steps, parts=2):
    """A job of steps in which each part copies eight bytes that another part of the step before has written.

    Returns the job, the memory that it reads and writes, (steps + 1, parts, 8), and what must stay alive.
    """
    memory = torch.zeros(steps + 1, parts, 8, dtype=torch.uint8)
    rows = torch.zeros(steps, parts, LOOPS.MAX_STEP_FIELDS, dtype=torch.int64)
    for k in range(steps):
        for p in range(parts):
            row = [LOOPS.MOVE, 0, memory[k, (p + 1) % parts].data_ptr(), 0, 0, 0, 0, memory[k + 1, p].data_ptr()]
            row += [0, 0, 0, 1, 1, 1, 1, 8, 1]
            rows[k, p, : len(row)] = torch.tensor(row)
    counts = torch.full((steps,), parts)
    size = 8 * LOOPS.MAX_STEP_FIELDS
    job = Job(code_address(LOOPS.run), rows.data_ptr(), counts.data_ptr(), steps, parts * size, size)
    return job, memory, (rows, counts)


@pytest.fixture(params=["threads of OpenMP", "threads of the pool"])
def pool(request):
    openmp = OpenMP.of_torch() if request.param == "threads of OpenMP" else None
    if openmp is None and request.param == "threads of OpenMP":
        pytest.skip("PyTorch does not use GNU's OpenMP")
    pool = ThreadPool(loops("pool_loops"), openmp)
    yield pool
    pool.stop()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("parts", [2, 3, 32])
def test_each_step_sees_the_results_of_all_parts_of_the_step_before(pool, parts):
    """Every byte travels through all threads. A step that began too early would copy an older value."""
    job, memory, _alive = copies(500, parts)
    bases = torch.zeros(parts, 8, dtype=torch.int64)
    for value in range(1, 60):
        memory[0] = torch.arange(parts)[:, None] + value
        assert pool.run(job, min(parts, 4), bases.data_ptr(), 64)
        assert torch.equal(memory[-1], memory[0].roll(-500, 0))


def test_jobs_of_other_numbers_of_parts_follow_each_other(pool):
    """A thread that has done its part reads nothing of the job, which may be gone."""
    bases = torch.zeros(5, 8, dtype=torch.int64)
    for k in range(600):
        parts = 2 + k % 4
        job, memory, _alive = copies(1 + k % 3, parts)
        memory[0] = torch.arange(parts)[:, None] + 1
        assert pool.run(job, 3, bases.data_ptr(), 64)
        assert torch.equal(memory[-1], memory[0].roll(-(1 + k % 3), 0))


def test_a_job_without_steps(pool):
    job, _, _alive = copies(1)
    empty = Job(job.function, job.rows, job.parts, 0, job.step_bytes, job.row_bytes)
    assert pool.run(empty, 2, 0, 0)


def test_threads_that_sleep_wake_up(pool):
    job, memory, _alive = copies(3)
    bases = torch.zeros(2, 8, dtype=torch.int64)
    for value in (1, 2, 3):
        time.sleep(0.05)
        memory[0] = value
        assert pool.run(job, 2, bases.data_ptr(), 64) and bool((memory[-1] == value).all())


def test_several_threads_of_openmp_run_a_job():
    """Each part sleeps, so that a thread cannot run two of them before the others begin."""
    openmp = OpenMP.of_torch()
    if openmp is None:
        pytest.skip("PyTorch does not use GNU's OpenMP")
    pool, numbers = ThreadPool(loops("pool_loops"), openmp), set()

    @ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    def part(_row, _count, _bases):
        time.sleep(0.05)
        numbers.add(threading.get_native_id())

    counts = torch.tensor([4])
    job = Job(ctypes.cast(part, ctypes.c_void_p).value, 0, counts.data_ptr(), 1, 0, 0)
    assert pool.run(job, 4, 0, 0)
    assert len(numbers) == 4 and pool._threads == []


def test_a_pool_has_one_caller_and_none_after_it_has_stopped():
    pool = ThreadPool(loops("pool_loops"))
    job, memory, _alive = copies(3)
    bases = torch.zeros(2, 8, dtype=torch.int64)
    with pool._caller:
        assert not pool.run(job, 2, bases.data_ptr(), 64)
    memory[0] = 7
    assert pool.run(job, 2, bases.data_ptr(), 64) and bool((memory[-1] == 7).all())
    pool.stop()
    assert not any(thread.is_alive() for thread in pool._threads)
    assert not pool.run(job, 2, bases.data_ptr(), 64)


def test_where_no_thread_can_be_started(monkeypatch):
    """The caller runs all parts, and a later call starts what it can."""
    pool = ThreadPool(loops("pool_loops"))
    job, memory, _alive = copies(3)
    bases = torch.zeros(2, 8, dtype=torch.int64)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        memory[0] = 7
        assert pool.run(job, 2, bases.data_ptr(), 64) and bool((memory[-1] == 7).all())
        assert pool._threads == []
    memory[0] = 8
    assert pool.run(job, 2, bases.data_ptr(), 64) and bool((memory[-1] == 8).all())
    assert len(pool._threads) == 1
    pool.stop()


def test_a_pool_stops_after_an_interrupt_while_its_lock_was_taken(monkeypatch):
    monkeypatch.setattr(thread_pool, "_SECONDS_TO_STOP", 0.1)
    pool = ThreadPool(loops("pool_loops"))
    job, _, _alive = copies(3)
    bases = torch.zeros(2, 8, dtype=torch.int64)
    assert pool.run(job, 2, bases.data_ptr(), 64)
    assert pool._caller.acquire(timeout=1)
    pool.stop()
    pool._threads[0].join(5)
    assert not pool._threads[0].is_alive()


def test_a_program_runs_alone_while_another_caller_has_the_threads(monkeypatch):
    draft = Draft()
    form = draft.form(network(draft))
    compiled, wanted = divided(form, draft.inputs, 2), program(form, draft.inputs)(*draft.inputs)
    monkeypatch.setattr("fxq.backends.loops.programs.step_rows.run_together", lambda *_: False)
    assert torch.equal(compiled(*draft.inputs), wanted)


def called_at_once(compiled, inputs, wanted, callers, calls):
    """Wrong results of callers that run a program at once, on inputs in turn."""
    wrong, begin = [], threading.Barrier(callers)

    def call(k):
        begin.wait()
        for i in range(calls):
            n = (k + i) % len(inputs)
            if not torch.equal(compiled(inputs[n]), wanted[n]):
                wrong.append((k, i))

    threads = [threading.Thread(target=call, args=(k,)) for k in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("calls", [40, pytest.param(10_000, marks=pytest.mark.slow)])
def test_eight_callers(threads, calls):
    draft = Draft()
    form = draft.form(network(draft))
    alone, compiled = program(form, draft.inputs), divided(form, draft.inputs, threads)
    inputs = [torch.randn_like(draft.inputs[0]) for _ in range(8)]
    assert called_at_once(compiled, inputs, [alone(x) for x in inputs], 8, calls) == []


def test_the_number_of_threads_is_that_of_pytorch():
    for threads in (1, 2, 3):
        with threads_set_to(threads):
            assert usable_threads() == threads
    with threads_set_to(100):
        assert usable_threads() == thread_pool.MAX_THREADS == loops("pool_loops").MAX_PARTS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own():
    job, memory, _alive = copies(100)
    bases = torch.zeros(2, 8, dtype=torch.int64)
    memory[0] = 5
    assert run_together(job, 2, bases.data_ptr(), 64)
    child = os.fork()
    if child == 0:
        memory[0] = 9
        ran = run_together(job, 2, bases.data_ptr(), 64) and bool((memory[-1] == 9).all())
        os._exit(0 if ran and len(thread_pool._process_pool.get()._threads) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((memory[-1] == 5).all()) and run_together(job, 2, bases.data_ptr(), 64)


EXIT = """
import atexit
atexit.register(lambda: late())  # runs after those of later imports, so after the pool has stopped
import torch
from tests.support.programs import Draft, divided
draft = Draft()
form = draft.form(draft.conv(draft.image(1, 16, 12, 12), 32, 3))
compiled = divided(form, draft.inputs, 3)
wanted = compiled(*draft.inputs)
def late():
    assert torch.equal(compiled(*draft.inputs), wanted)
    print("late")
for _ in range(20):
    compiled(*draft.inputs)
print("end")
"""


@pytest.mark.slow
def test_the_end_of_a_process():
    """Threads that wait for work neither keep the process alive nor crash it. Functions at exit may run programs."""
    done = in_new_python(EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\nlate\n", "")
