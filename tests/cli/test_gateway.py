"""`triptych gateway` and `up --gateway`: command lines and what is refused; the real SMG is in tests/e2e."""

from __future__ import annotations

import http.server
import json
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from services.cli import gateway, up_plan
from services.cli.main import main
from services.common.errors import StartError


@pytest.fixture
def no_smg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def smg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A program of that name on PATH that writes its arguments, and no package."""
    found = tmp_path / "smg"
    found.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    found.chmod(0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    return found


def arguments_of(monkeypatch: pytest.MonkeyPatch, *argv: str) -> list[str]:
    """What SMG would become."""
    seen: list[list[str]] = []

    def execv(path: str, command: list[str]) -> None:
        assert path == command[0]
        seen.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit):
        main(["gateway", *argv])
    return seen[0]


def test_smg_is_told_where_to_listen_and_which_frontends_there_are(monkeypatch: pytest.MonkeyPatch, smg: Path) -> None:
    given = ["--listen", "127.0.0.1:8123", "--frontend", "a:1", "--frontend", "b:2", "--", "--api-key", "k"]
    path, *arguments = arguments_of(monkeypatch, *given)
    assert path == str(smg) and arguments[0] == "launch"
    flags = dict(zip(arguments[1:9:2], arguments[2:10:2], strict=True))
    assert (flags["--host"], flags["--port"], flags["--prometheus-host"]) == ("127.0.0.1", "8123", "127.0.0.1")
    assert int(flags["--prometheus-port"]) > 1024
    assert arguments[9:] == ["--worker-urls", "grpc://a:1", "grpc://b:2", "--api-key", "k"]


def test_by_default_it_stands_on_loopback_before_the_frontend_there(monkeypatch: pytest.MonkeyPatch, smg: Path) -> None:
    arguments = arguments_of(monkeypatch)
    assert arguments[arguments.index("--port") + 1] == "8000" and "127.0.0.1" in arguments
    assert arguments[-1] == "grpc://127.0.0.1:50051"


def test_the_package_of_this_python_comes_before_one_on_path(smg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "smg" else None)
    assert gateway.executable("it") == [sys.executable, "-P", "-m", "smg"]


@pytest.mark.usefixtures("no_smg")
def test_without_smg_both_commands_name_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway"]) == 1
    assert "triptych gateway needs SMG: pip install 'triptych[gateway]'" in capsys.readouterr().err
    with pytest.raises(StartError, match=r"--gateway needs SMG: pip install 'triptych\[gateway\]'"):
        up_plan.read(["--port", "0", "--gateway"])


@pytest.mark.parametrize("listen", ["8000", ":8000", "127.0.0.1:", "127.0.0.1:70000", "127.0.0.1:x"])
def test_an_address_that_is_none_is_refused_by_its_flag(listen: str, smg: Path) -> None:
    with pytest.raises(StartError, match=r"--gateway is '.*': HOST:PORT is needed"):
        up_plan.read(["--port", "0", "--gateway", listen])
    with pytest.raises(StartError, match=r"--frontend is '.*': HOST:PORT is needed"):
        gateway.run(["--frontend", listen])


def test_a_port_that_is_taken_is_refused_before_anything_starts(smg: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"the gateway cannot listen on {address}: Address already in use"):
            up_plan.read(["--port", "0", "--gateway", address])


def test_up_turns_the_adapter_on_for_its_gateway_alone(smg: Path) -> None:
    plain = up_plan.read(["--port", "0"])
    assert plain.gateway is None and "--vllm-adapter" not in plain.commands["frontend"].arguments
    free = up_plan.read(["--port", "0", "--gateway"])
    assert free.gateway == "" and free.configs["frontend"].model_dump()["vllm_adapter"]
    assert "--vllm-adapter" in free.commands["frontend"].arguments
    with pytest.raises(StartError, match=r"--gateway needs the frontend's vllm_adapter"):
        up_plan.read(["--port", "0", "--gateway", "--frontend.no-vllm-adapter"])


def test_a_free_address_is_one_on_loopback() -> None:
    host, _, port = gateway.free_address("127.0.0.1:0", "--gateway").rpartition(":")
    assert host == "127.0.0.1" and int(port) > 0


class Answers(http.server.BaseHTTPRequestHandler):
    """A gateway that knows its models before their tokenizers."""

    models: list[str] = []  # noqa: RUF012  set by the test
    tokenizers: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        told = {
            "/v1/models": {"data": [{"id": name} for name in self.models]},
            "/v1/tokenizers": {"tokenizers": [{"name": name} for name in self.tokenizers]},
        }[self.path]
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_gateway_is_ready_once_it_has_the_model_and_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # no proxy is asked for what is on this machine
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        for models, tokenizers, ready in ((["x"], ["m"], False), (["m"], [], False), (["x", "m"], ["m"], True)):
            Answers.models, Answers.tokenizers = models, tokenizers
            assert gateway._serves(address, "m") is ready
        server.shutdown()
    assert gateway._serves(address, "m") is False


def test_a_collector_makes_smg_trace_and_pass_traces_on(monkeypatch: pytest.MonkeyPatch, smg: Path) -> None:
    arguments = arguments_of(monkeypatch, "--otlp-endpoint", "http://collector:4317", "--", "--api-key", "k")
    traces = ["--enable-trace", "--otlp-traces-endpoint", "collector:4317", "--log-level", "info"]
    assert arguments[-7:] == [*traces, "--api-key", "k"]


@pytest.mark.parametrize("endpoint", ["https://collector:4317", "collector:4317", "http://collector", "http://c:1/x"])
@pytest.mark.usefixtures("smg")
def test_a_collector_that_smg_cannot_reach_is_refused(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--otlp-endpoint", endpoint]) == 1
    assert "--otlp-endpoint is" in capsys.readouterr().err


@pytest.mark.usefixtures("smg")
def test_up_tells_the_collector_to_all_services_and_the_gateway() -> None:
    plan = up_plan.read(["--port", "0", "--gateway", "--otlp-endpoint", "http://collector:4317"])
    assert {config.otlp_endpoint for config in plan.configs.values()} == {"http://collector:4317"}
    assert all("--otlp-endpoint" in command.arguments for command in plan.commands.values())
    told = up_plan.gateway_command("127.0.0.1:1", "127.0.0.1:2", "http://collector:4317").arguments
    assert told[-2:] == ("--otlp-endpoint", "http://collector:4317")
    assert plan.collector == "http://collector:4317"
    with pytest.raises(StartError, match="SMG sends spans without TLS alone"):
        up_plan.read(["--port", "0", "--gateway", "--otlp-endpoint", "https://collector:4317"])


@pytest.mark.usefixtures("smg")
@pytest.mark.parametrize(
    ("environ", "flags", "collector"),
    [
        ({}, [], None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, [], "http://c:4317"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "c:4317"}, [], "http://c:4317"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, ["--otlp-endpoint", "http://d:1"], "http://d:1"),
        ({"OTEL_SDK_DISABLED": "true"}, ["--otlp-endpoint", "http://d:1"], None),
        ({"OTEL_TRACES_EXPORTER": "none"}, ["--otlp-endpoint", "http://d:1"], None),
    ],
)
def test_the_gateway_of_up_traces_where_the_services_do(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], flags: list[str], collector: str | None
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert up_plan.read(["--port", "0", "--gateway", *flags]).collector == collector


@pytest.mark.usefixtures("smg")
def test_a_collector_of_the_environment_that_smg_cannot_reach_is_told_and_gone_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c:4317")
    assert up_plan.read(["--port", "0", "--gateway"]).collector is None
    assert "the gateway traces nothing: the environment's collector is https://c:4317" in caplog.text
