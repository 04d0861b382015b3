"""`triptych up`: the three services on this machine, and a gateway if asked for, under one supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence

from services.cli import gateway, up_plan, up_tls
from services.cli.ask import Shown, client, for_people, show
from services.cli.model import provide
from services.cli.parts import shell_name
from services.cli.processes import Processes, ending
from services.cli.readiness import wait_ready
from services.cli.up_fit import refuse_too_large
from services.cli.up_plan import Plan
from services.common.errors import StartError
from services.common.startup import Startup

START_ORDER = ("executor", "scheduler", "frontend")
STOP_ORDER = ("gateway", "frontend", "scheduler", "executor")  # so that running streams drain

ANSWER_TOKENS = 256
"""Of the answer to --prompt, which is greedy, so that it is the same each time."""

PARENT_POLL_S = 0.25

BROKEN_STOP_S = 5.0
"""What each of the others is given to end once one has: no token can be made, so there is nothing to drain."""

_COLOURS = {"gateway": 34, "frontend": 36, "scheduler": 33, "executor": 35, "triptych": 32}


def run(argv: Sequence[str]) -> int:
    """Serves until SIGINT, SIGTERM or SIGHUP, or the end of --parent (exit code 0), or until one of the three ends by
    itself (1)."""
    startup = Startup()
    startup.done("imports")
    plan = up_plan.read(argv)
    if plan.prompt is not None:
        client("")  # told now, not after the weights are loaded, when the client package is missing
    paths = provide(plan.configs)
    if plan.configs["executor"].model_dump()["device"] == "cpu":
        refuse_too_large(paths["executor"])
    plan = up_plan.pinned(plan, paths)
    startup.done("the model is looked for")
    return asyncio.run(_supervise(plan, startup))


async def _supervise(plan: Plan, startup: Startup) -> int:
    processes = Processes(_show)
    stop = _on_signals(processes)
    watch = asyncio.create_task(_watch_parent(plan.parent_pid, processes, stop))
    at_most_s = None
    try:
        for name in START_ORDER:
            await processes.start(plan.commands[name])
        died = await _serve(plan, processes, stop, startup)
        if died is None:
            return 0
        at_most_s = BROKEN_STOP_S
        if plan.ready_json:
            _print_line({"ended": died})
        raise StartError(f"{died}; its last lines are above")
    finally:
        _say("stopping")
        await processes.stop(STOP_ORDER, at_most_s)
        watch.cancel()


async def _watch_parent(pid: int | None, processes: Processes, stop: asyncio.Event) -> None:
    """Stops all, without patience, once the parent is gone: nobody is left to read the streams.

    PR_SET_PDEATHSIG would not do: it follows the thread that started this process, not the parent as a whole.
    """
    if pid is not None:
        while os.getppid() == pid:  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(PARENT_POLL_S)
        processes.hurry()
        stop.set()


async def _serve(plan: Plan, processes: Processes, stop: asyncio.Event, startup: Startup) -> str | None:
    """Returns when told to stop, or, with the reason, when one of the three has ended by itself."""
    stopped = asyncio.create_task(stop.wait())
    died = asyncio.create_task(processes.first_exit())
    work = asyncio.create_task(_begin(plan, processes, startup))
    ends: set[asyncio.Task[object]] = {stopped, died}
    try:
        await asyncio.wait({*ends, work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        for task in ends:
            task.cancel()
    if stop.is_set():
        return None
    name, code = died.result()
    return f"the {name} {ending(code)}"


async def _begin(plan: Plan, processes: Processes, startup: Startup) -> None:
    """Waits for the engine, then for the gateway, says how to call them, and answers --prompt. Raises StartError."""
    await wait_ready(plan.probes, _say, startup.done)
    http = "" if plan.gateway is None else await _start_gateway(plan, processes)
    if http:
        startup.done("the gateway finds the frontend")
    _say(startup.times().line())
    flags = up_tls.client_flags(plan.configs["scheduler"])
    _say(f"watch the engine with: {shell_name('triptych')} top {plan.addresses['scheduler']}{flags}")
    address = plan.addresses["frontend"]
    if plan.ready_json:
        _print_line({"address": address, "model": plan.served_name} | ({"http": http} if http else {}))
        return
    if plan.prompt is not None:
        await _answer(address, plan.prompt)
    told = examples(address, plan.served_name) if plan.is_open else secured_example(address, plan.served_name)
    print(told, flush=True)
    if http:
        print(http_example(http, plan.served_name), flush=True)


async def _start_gateway(plan: Plan, processes: Processes) -> str:
    """Its URL, once it serves. Not started sooner: a free port is one only while nobody else takes it."""
    listen = plan.gateway or gateway.free_address("127.0.0.1:0", "--gateway")
    await processes.start(up_plan.gateway_command(listen, plan.addresses["frontend"], plan.collector))
    await gateway.wait_ready(listen, plan.served_name)
    return f"http://{listen}"


async def _answer(address: str, prompt: str) -> None:
    async with client(address) as connection:
        from triptych_client import TriptychError

        print(f"\n> {prompt}\n", flush=True)
        try:
            await show(connection.chat(prompt, temperature=0, max_tokens=ANSWER_TOKENS), Shown())
        except TriptychError as error:
            raise for_people(error, address) from None


def examples(address: str, served_name: str) -> str:
    """How to call a server, for people."""
    return f"""
{served_name} is served on {address}; Ctrl-C ends it. From another terminal:

  {shell_name("triptych")} chat --address {address} "Why is the sky blue?"

  {shell_name("grpcurl")} -plaintext -d '{{"messages": [{{"role": "ROLE_USER", "content": [{{"text": "Hi!"}}]}}]}}' \\
    {address} triptych.inference.v1.InferenceService/Chat

  {shell_name("python")} - <<'END'
  import asyncio
  from triptych_client import Client

  async def main():
      async with Client("{address}") as client:
          async for delta in client.chat("Why is the sky blue?", max_tokens=100):
              print(delta.text, end="", flush=True)

  asyncio.run(main())
  END
"""


def secured_example(address: str, served_name: str) -> str:
    """The same, of a server that asks for TLS or a token."""
    return f"""
{served_name} is served on {address}; Ctrl-C ends it. From another terminal:

  TRIPTYCH_TOKEN=... {shell_name("triptych")} chat --address {address} --tls-ca FILE "Why is the sky blue?"

The token where auth is on, --tls-ca where TLS is; --tls-cert and --tls-key where certificates are asked for.
"""


def http_example(url: str, served_name: str) -> str:
    """How to call a gateway, for people."""
    return f"""The OpenAI API is served on {url}/v1:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{served_name}", "messages": [{{"role": "user", "content": "Hi!"}}]}}'
"""


def _on_signals(processes: Processes) -> asyncio.Event:
    """Set by the first signal; the second one takes the patience out of the stop."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            processes.hurry()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    return stop


def _print_line(told: dict[str, str]) -> None:
    """One line of JSON on standard output, whole and at once."""
    with contextlib.suppress(BrokenPipeError):  # the program that asked for it has left
        os.write(sys.stdout.fileno(), json.dumps(told).encode() + b"\n")


def _say(line: str) -> None:
    _show("triptych", line)


def _show(name: str, line: str) -> None:
    prefix = f"{name:<9} |"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        prefix = f"\x1b[{_COLOURS[name]}m{prefix}\x1b[0m"
    with contextlib.suppress(BrokenPipeError):  # who read the lines has left; the services must not wait for it
        print(prefix, line, file=sys.stderr, flush=True)
