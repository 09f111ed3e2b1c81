"""The server against the engine without one and against vLLM's server, by vLLM's own client.

    .venv/bin/python -m benches.engine.serving            # half an hour on two cores
    .venv/bin/python -m benches.engine.serving --quick    # ours alone, two minutes
    .venv/bin/python -m benches.engine.serving --show     # the tables of the last run again

from the root of the repository. SmolLM2-135M-Instruct; passages of this repository's pages as
prompts, new ones each round, the same for all; greedy, 64 tokens each, the end of sequence ignored.

- 64 prompts by 32 clients that wait for their answer: prompts that share nothing, and prompts with
  a long beginning in common. The same texts go to `LLM.generate`, with 32 slots and all at once.
- The first of these by Poisson arrivals, at half and at nine tenths of the rate at which the
  slowest server answered them: all servers get the same arrivals.
- 256 clients at once: times between tokens beside those of 256 tasks that read `AsyncEngine` in
  its own process, and by py-spy what the server's event loop is busy with meanwhile.

`pyengine` is `pyengine serve --compile`, as vLLM compiles by itself; `vllm` and `vllm32` are vLLM's
server as it comes and with blocks of 32, on all cores. All are up from the beginning and take
turns, in another order each round; figures are medians of the rounds. Client and vLLM are those of
`.venv-peers` (`benches/peers/env.py` makes it).

Tables go to standard output, with `--docs` into docs/benchmarks/serving.md too, everything to
`benches/results/serving-MACHINE.json`: each kind of machine has its file and its place on the page.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any
from urllib.request import urlopen

import numpy as np

from benches.engine.child import PEERS, ROOT, Child, say
from benches.engine.crowd import profile
from benches.engine.end_to_end import VLLM_SPINS_SECONDS, check_tokens
from benches.engine.float_model import float_folder
from benches.engine.page import publish
from benches.engine.serve import GenerateRequest
from benches.engine.serving_tables import ALONE, AT_ONCE, OURS, SERVERS, SLOTS, VLLM32, tables
from benches.engine.works import passages
from benches.peers.report import libraries, machine, results_file, results_name
from pyengine.utils.openmp import BRIEF_SPIN

PAGE = ROOT / "docs/benchmarks/serving.md"
STARTS_WITHIN = 600.0
POOL_GIB = 2
"""For each engine, ample for every load: all are up at the same time."""


@dataclass(frozen=True)
class Load:
    """`count` prompts of about `shared` + `own` words; `clients` at a time, or Poisson arrivals.

    `share` is the rate of these, of what the slowest server can do.
    """

    name: str
    count: int
    shared: int
    own: int
    clients: int | None = None
    share: float | None = None
    max_tokens: int = 64

    def prompts(self, seed: object) -> list[str]:
        """Texts; one seed, the same texts."""
        random, words = Random(f"{self.name} {seed}"), passages()
        at = random.randrange(len(words) - self.shared)
        common = words[at : at + self.shared]
        starts = random.sample(range(len(words) - self.own), self.count)
        return [" ".join([*common, *words[start : start + self.own]]) for start in starts]


def loads(count: int, clients: int, crowd: int) -> tuple[Load, ...]:
    """Those of a run; the first two are also given to `LLM.generate`."""
    return (
        Load(f"{count} prompts, {clients} clients", count, 0, 96, clients),
        Load(
            f"{count} prompts with a beginning in common, {clients} clients",
            count,
            384,
            24,
            clients,
        ),
        Load("Poisson, half of saturation", count, 0, 96, share=0.5),
        Load("Poisson, nine tenths of saturation", count, 0, 96, share=0.9),
        Load(f"{crowd} clients", crowd, 0, 24, crowd),
    )


class Server(Child):
    """A server that answers. Raises `RuntimeError` where it does not come up."""

    serves = True

    def __init__(self, name: str, dtype: str) -> None:
        if name != OURS:
            check_peers()
        self.name = name
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        folder = str(float_folder())
        if name == OURS:
            code = "from pyengine.cli import main; main()"
            command = [sys.executable, "-c", code, "serve", folder, "--log-format", "none"]
            command += ["--compile", f"--kv-cache-gib={POOL_GIB}"]
        else:
            server = "vllm.entrypoints.openai.api_server"
            sizes = {"max-model-len": 4096, "max-num-seqs": 256}
            sizes["kv-cache-memory-bytes"] = POOL_GIB << 30
            more = [f"--{option}={value}" for option, value in sizes.items()]
            more += ["--block-size=32"] * (name == VLLM32)
            command = [str(PEERS), "-m", server, "--model", folder, *more]
        begin = monotonic()
        super().__init__([*command, "--dtype", dtype, "--port", f"{port}"])
        while not self._answers():
            if self.process.poll() is not None or monotonic() - begin > STARTS_WITHIN:
                error = self.failed() if self.process.poll() is not None else RuntimeError("slow")
                self.__exit__()
                raise error
            sleep(0.2)
        self.start_seconds = monotonic() - begin

    def _answers(self) -> bool:
        with suppress(OSError), urlopen(f"{self.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_peers() -> None:
    """Raise `RuntimeError` where vLLM is not there."""
    if not PEERS.exists():
        raise RuntimeError(f"no {PEERS.relative_to(ROOT)}; benches/peers/env.py makes it")


class Run:
    """The processes of one run, and `results[load][server]`, a dict for each round."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.about: dict[str, Any] = {"machine": machine(), "libraries": libraries()}
        self.about |= {"dtype": options.dtype, "missing": {}, "starts": {}}
        self.results: dict[str, dict[str, list[Any]]] = {}
        self.servers: list[Server] = []
        check_peers()
        self.client = stack.enter_context(Child([str(PEERS), "-m", "benches.engine.vllm_client"]))
        serve = ["-m", "benches.engine.serve", "compiled", str(float_folder()), options.dtype]
        self.offline, settings = {}, {"kv_cache_memory": POOL_GIB << 30}
        self.apart = stack.enter_context(ExitStack())
        for name, slots in ((SLOTS, options.clients), (AT_ONCE, options.prompts)):
            command = [sys.executable, *serve, json.dumps(settings | {"max_num_seqs": slots})]
            # As the command line has it, which is what the server runs under.
            self.offline[name] = self.apart.enter_context(Child(command, GOMP_SPINCOUNT=BRIEF_SPIN))
            self.offline[name].answer()  # it is ready
        for name in options.servers:
            say(f"starting {name}")
            try:
                self.servers.append(stack.enter_context(Server(name, options.dtype)))
            except RuntimeError as error:
                self.about["missing"][name] = str(error)
            else:
                self.about["starts"][name] = self.servers[-1].start_seconds

    def call(self, server: Server, load: Load, seed: object, rate: float | None = None) -> Any:
        """The measurements of the client, or the reason for none."""
        data = self.folder / "prompts.json"
        data.write_text(json.dumps(load.prompts(seed)))
        arguments = {
            "base-url": server.url,
            "tokenizer": float_folder(),
            "dataset-name": "custom",
            "dataset-path": data,
            "custom-output-len": load.max_tokens,
            "num-prompts": load.count,
            "temperature": 0,
            "seed": 0,
            "percentile-metrics": "ttft,itl",
            "metric-percentiles": "50,99",
            **({"max-concurrency": load.clients} if load.clients else {}),
            **({"request-rate": rate} if rate else {}),
        }
        flags = ["--ignore-eos", "--disable-tqdm"]
        result = self.client.ask([f"--{name}={value}" for name, value in arguments.items()] + flags)
        if result["completed"] != load.count:
            raise RuntimeError(f"{server.name}, {load.name}: {result['completed']} answers")
        if server.name != OURS:
            sleep(VLLM_SPINS_SECONDS)
        return result

    def measure(self, load: Load, rounds: int) -> None:
        """A warming call each, then all in turn; `LLM.generate` too where clients wait."""
        rounds_of = self.results[load.name] = {server.name: [] for server in self.servers}
        rate = None
        if load.share is not None:
            rate = load.share * min(self.saturation().values())
            self.about.setdefault("rates", {})[load.name] = rate
        offline = self.offline if load.clients and load.count > load.clients else {}
        rounds_of |= {name: [] for name in offline}
        order: list[Server | str] = [*self.servers, *offline]
        for turn in range(-1, rounds):
            for item in order:
                if isinstance(item, Server):
                    name, result = item.name, self.call(item, load, turn, rate)
                else:
                    request = GenerateRequest(load.prompts(turn), load.max_tokens)
                    answer = self.offline[item].ask(asdict(request))
                    check_tokens(item, request, answer["tokens"])
                    rate_out = sum(map(len, answer["tokens"])) / answer["seconds"]
                    name, result = item, {"output_throughput": rate_out}
                say(f"{load.name}: {name}: {result['output_throughput']:.0f} tokens/s")
                if turn >= 0:
                    rounds_of[name].append(result)
            order = order[1:] + order[:1]

    def end_offline(self) -> None:
        """The engines without a server, whose memory others need."""
        self.offline = {}
        self.apart.close()

    def saturation(self) -> dict[str, float]:
        """Requests a second that each server answered when clients waited."""
        closed = next(iter(self.results.values()))
        return {
            server.name: median([item["request_throughput"] for item in closed[server.name]])
            for server in self.servers
        }

    def crowd(self, load: Load, rounds: int) -> None:
        """The server beside the engine alone; then the profile of the server's event loop."""
        ours = [server for server in self.servers if server.name == OURS]
        if not ours:
            return
        rounds_of = self.results[load.name] = {OURS: [], ALONE: []}
        given = [str(float_folder()), self.options.dtype, f"{POOL_GIB}"]
        command = ["-m", "benches.engine.crowd", *given]
        for turn in range(-1, rounds):
            result = self.call(ours[0], load, turn)
            if turn < 0:
                continue
            rounds_of[OURS].append(result)
            request = json.dumps(asdict(GenerateRequest(load.prompts(turn), load.max_tokens)))
            done = subprocess.run(
                [sys.executable, *command],
                input=request,
                env=os.environ | {"GOMP_SPINCOUNT": BRIEF_SPIN},
                capture_output=True,
                text=True,
                check=True,
                cwd=ROOT,
            )
            p50, p99 = np.percentile(json.loads(done.stdout), [50, 99])
            rounds_of[ALONE].append({"median_itl_ms": p50, "p99_itl_ms": p99})
            say(f"{load.name}: p99 {result['p99_itl_ms']:.0f} ms, engine alone {p99:.0f} ms")
        self.profile(ours[0], load, rounds_of[OURS][-1]["duration"])

    def profile(self, server: Server, load: Load, lasts: float) -> None:
        """While the crowd is served once more, after its prompts were read."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(self.call, server, load, "profile")
            sleep(lasts / 3)
            try:
                seconds = max(2.0, lasts / 3)
                self.about["profile"] = profile(server.process.pid, seconds, self.folder)
            except (RuntimeError, OSError) as error:
                self.about["missing"]["profile"] = str(error)
            call.result()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="ours alone, few prompts, one round")
    parser.add_argument("--servers", help=f"of {', '.join(SERVERS)}, which is all")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per load (3)")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--crowd", type=int, default=256, help="clients of the last load")
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument("--results", help="name of file and place (serving-MACHINE)")
    parser.add_argument("--docs", action="store_true", help="write the tables into the docs")
    parser.add_argument("--show", action="store_true", help="print its tables, measure nothing")
    options = parser.parse_args()
    every = OURS if options.quick else ",".join(SERVERS)
    options.servers = (options.servers or every).split(",")
    if unknown := set(options.servers) - set(SERVERS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(SERVERS)}")
    if options.quick:
        options.rounds, options.prompts, options.clients, options.crowd = 1, 8, 4, 16
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; the processes end with it."""
    *timed, crowd = loads(options.prompts, options.clients, options.crowd)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="serving-")))
        measured = Run(options, stack, folder)
        for load in timed:
            if not load.clients:
                measured.end_offline()
            measured.measure(load, options.rounds)
        measured.crowd(crowd, options.rounds)
        return {**measured.about, "found": measured.results}


def main() -> None:
    """Run, print, write."""
    options = parse()
    name = options.results or results_name("serving")
    target = results_file(name)
    if options.show:
        results = json.loads(target.read_text())
    else:
        results = run(options)
        if not options.quick:
            target.write_text(json.dumps(results, indent=1) + "\n")
    publish(name, tables(results), write=options.docs, page=PAGE)


if __name__ == "__main__":
    main()
