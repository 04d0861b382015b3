"""A model of one's own, from a folder and from a hub, as a newcomer serves it: `triptych up`, the documented call, and
the mistakes on the way."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from services.cli.up_fit import stored_bytes
from tests.support.calls import by_ids, generate, greedy
from tests.support.checkpoints import CHAT_TEMPLATE, check_same_ids, reference_ids, tiny_model, tiny_tokenizer
from tests.support.cluster import free_port
from tests.support.hub import environment, serving

ROOT = Path(__file__).parents[2]
UP = (sys.executable, "-m", "services.cli.main", "up")
PATIENCE_S = 100
PROMPTS = [[5 + i, 6, 7 + 2 * i, *range(20, 20 + 3 * i)] for i in range(6)]


@contextmanager
def up(*arguments: str, log: Path, environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """`triptych up`, its standard output to be read; at the end Ctrl-C, which it must answer with exit code 0."""
    with log.open("w") as lines:
        process = subprocess.Popen(
            [*UP, *arguments], stdout=subprocess.PIPE, stderr=lines, text=True, env=os.environ | dict(environ or {})
        )
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def first_line(process: subprocess.Popen[str], holding: str) -> str:
    """The first line of standard output that holds the text; the process ends by itself where it cannot come."""
    assert process.stdout is not None
    return next((line for line in process.stdout if holding in line), "")


async def test_a_model_of_a_hub_is_fetched_once_pinned_and_answers_like_transformers(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "qwen3", "qwen3", head_dim=24, tie_word_embeddings=True)
    config = json.loads((source / "config.json").read_text())
    del config["max_position_embeddings"]  # as some publish it: transformers knows the family's
    (source / "config.json").write_text(json.dumps(config))
    log = tmp_path / "up.log"
    with serving() as hub:
        commit = hub.repo("org/qwen3").add(source, "v1")
        arguments = ["--model", "org/qwen3", "--revision", "v1", "--port", "0", "--ready-json"]
        flags = ["--scheduler.max-model-len", "512", "--executor.threads", "1"]
        with up(*arguments, *flags, log=log, environ=environment(hub, tmp_path / "cache")) as process:
            line = await asyncio.to_thread(first_line, process, "{")
            assert line, log.read_text()
            ready = json.loads(line)
            assert ready["model"] == "org/qwen3"
            async with grpc.aio.insecure_channel(ready["address"]) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                told = (await stub.GetModel(inference_pb2.GetModelRequest(model="org/qwen3"))).model
                assert (told.revision, told.context_tokens, told.vocab_size) == (commit, 512, 512)
                options = greedy(max_tokens=32, ignore_eos=True)
                answers = await asyncio.gather(*(generate(channel, by_ids(prompt, options)) for prompt in PROMPTS))
        downloads = [line.rpartition("/")[2] for line in hub.asked_for("GET", "/resolve/")]
        assert sorted(downloads) == sorted(set(downloads))
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(downloads)
        assert len(hub.asked_for("GET", "/api/models/org/qwen3/revision/v1")) == 1  # `up` alone has asked
    expected = reference_ids(source, PROMPTS, 32, ignore_eos=True)
    check_same_ids(source, PROMPTS, [answer.ids for answer in answers], expected)
    assert f"org/qwen3 at v1 is commit {commit}" in log.read_text()


def own_model(folder: Path) -> Path:
    """What a user of transformers has: a model and a tokenizer, both written by save_pretrained."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    made = tiny_tokenizer(folder.parent / "trained", chat_template=None)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(made / "tokenizer.json"),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def too_large(own: Path, folder: Path) -> Path:
    """The same model, but its weights are a file with nothing in it that is twice as large as the machine's memory."""
    folder.mkdir()
    for file in own.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    rows = 2 * int(re.search(r"MemTotal: *(\d+) kB", Path("/proc/meminfo").read_text())[1])  # type: ignore[index]
    tensor = {"dtype": "F32", "shape": [rows, 256], "data_offsets": [0, rows * 1024]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as sparse:
        sparse.write(len(header).to_bytes(8, "little") + header)
        sparse.truncate(8 + len(header) + rows * 1024)
    assert stored_bytes(folder) == rows * 1024
    return folder


def mistake(*arguments: str) -> str:
    """The one line that `triptych up` answers a mistake with."""
    ended = subprocess.run([*UP, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout) == (1, ""), ended
    (line,) = ended.stderr.splitlines()
    return line.removeprefix("triptych: error: ")


def reference_text(own: Path, question: str) -> str:
    """The beginning of the greedy answer, as transformers gives it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(own)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    ids = torch.tensor([prompt["input_ids"]])
    answer = AutoModelForCausalLM.from_pretrained(own).generate(ids, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))


def test_the_newcomers_walk_from_the_readme_to_an_answer_and_three_mistakes(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    assert "triptych up --model FOLDER" in readme
    (program,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    (question,) = re.findall(r'client\.chat\("(.*?)"', program)
    own = own_model(tmp_path / "mine")
    port = str(free_port())

    with up("--model", str(own), "--port", port, "--executor.threads", "1", log=tmp_path / "up.log") as process:
        assert first_line(process, "is served on") == f"mine is served on 127.0.0.1:{port}; Ctrl-C ends it." + (
            " From another terminal:\n"
        )
        program = program.replace("127.0.0.1:50051", f"127.0.0.1:{port}")
        shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.startswith(reference_text(own, question)) and len(shown.stdout) > 24

        taken = mistake("--model", str(own), "--port", port)
        assert taken == (
            f"the frontend cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --port"
        )
    assert "Traceback" not in (tmp_path / "up.log").read_text()

    typo = str(own) + "e"
    assert mistake("--model", typo, "--port", port).startswith(
        f"no model at {typo!r}: give --model a checkpoint folder"
    )
    large = mistake("--model", str(too_large(own, tmp_path / "large")), "--port", port)
    assert re.fullmatch(
        r"the weights of large take \d+ bytes or more, \d+ are free; raise the memory limit or serve a smaller model",
        large,
    )
