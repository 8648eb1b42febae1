"""Work on several ranks of a process group, in a process that is killed, or in one that has nothing of fxq.

Forked: none imports torch again.
"""

import functools
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

FORKED = multiprocessing.get_context("fork")
SECONDS = 60


@contextmanager
def full_disk(most):
    """Inside, no file can have more bytes than that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def on_ranks(size, folder, work, seconds=SECONDS):
    """Results of `work(rank)` on each rank of a gloo group; the exception where it raises one."""
    folder.mkdir(exist_ok=True)
    store = folder / "store"
    store.unlink(missing_ok=True)

    def run(rank):
        dist.init_process_group(
            "gloo", f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds / 2)
        )
        try:
            result = work(rank)
        except Exception as error:
            traceback.print_exc()
            result = error
        torch.save(result, folder / f"{rank}.pt")
        dist.destroy_process_group()

    processes = [FORKED.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
    assert not hung, "a rank waits for another one"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def apart(work):
    """Do `work()` in a process of its own: what it registers is not there for other tests."""
    process = FORKED.Process(target=work)
    process.start()
    process.join(SECONDS)
    hung = process.is_alive()
    process.kill()
    assert not hung, "the process hangs"
    assert process.exitcode == 0, "the process says above why it failed"


def killed(work, seconds=None):
    """Run `work()` in a process that kills itself, see `die`, or that is killed after so many seconds."""
    process = FORKED.Process(target=work)
    process.start()
    if seconds is not None:
        process.join(seconds)
        process.kill()
    process.join(SECONDS)
    assert process.exitcode == -signal.SIGKILL


@functools.cache
def _fork_server():
    command = [sys.executable, str(Path(__file__).with_name("fork_server.py"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def in_new_python(code, *args, cwd=None, **env):
    """Run code as `python -c` does, in a process that has imported torch and nothing else; a `CompletedProcess`.

    Args:
        code: the code.
        *args: its arguments in `sys.argv`.
        cwd: its working directory.
        **env: variables of its environment. It has one thread.
    """
    server = _fork_server()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        job = {"code": code, "args": list(map(str, args)), "cwd": str(cwd or Path.cwd()), "env": {**os.environ, **env}}
        print(json.dumps({**job, "out": str(out), "err": str(err)}), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(args, code, out.read_text(), err.read_text())


def die():
    """End this process at once: nothing is cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def dying(batches, at):
    """The batches; asked for the one of that number, the process dies."""
    for i, batch in enumerate(batches):
        if i == at:
            die()
        yield batch
