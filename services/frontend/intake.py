"""From a request at the door to a job for an engine: names, options, prompt, length."""

from __future__ import annotations

from dataclasses import replace

from triptych.inference.v1 import inference_pb2

from services.common.errors import invalid
from services.frontend import resume
from services.frontend.door import read_messages
from services.frontend.request import EngineFacts, Job, Limits, Options
from services.frontend.served_model import ServedModel
from services.frontend.tokenizer import off_loop
from services.frontend.validation import check_choice, check_fits, check_ids, check_scored, output_length, read_options


class Intake:
    """Reads requests of one model. `path` is where the request stands in the message that came, "" or "request."."""

    def __init__(self, model: ServedModel, limits: Limits) -> None:
        self._model = model
        self._limits = limits

    async def generate(self, request: inference_pb2.GenerateRequest, facts: EngineFacts, path: str = "") -> Job:
        """A job for a text or token-id prompt. Raises RequestError."""
        self._model.check_name(request.model)
        options = self._options(request.options, facts, path)
        prompt_ids = await self._prompt(request, options, facts, path)
        kind = request.WhichOneof("prompt")
        job = self._job(prompt_ids, options, facts, prompt_field=f"{path}{kind}", path=path)
        return await self._echoing(job, request.text if kind == "text" else None)

    async def chat(self, request: inference_pb2.ChatRequest, facts: EngineFacts, path: str = "") -> Job:
        """A job for a conversation. Raises RequestError."""
        self._model.check_name(request.model)
        options = self._options(request.options, facts, path)
        field = f"{path}messages"
        prompt_ids = await self._model.encode_chat(read_messages(request, field), field)
        return await self._echoing(self._job(prompt_ids, options, facts, prompt_field=field, path=path))

    async def tokenize(self, request: inference_pb2.TokenizeRequest) -> tuple[int, ...]:
        """The ids that Generate or Chat would make of the same input. Raises RequestError."""
        self._model.check_name(request.model)
        kind = request.WhichOneof("input")
        if kind is None:
            raise invalid("input", "is missing; text or chat is needed")
        if kind == "text":
            return await self._model.encode_text(request.text, add_special_tokens=_wants_special(request))
        if request.HasField("add_special_tokens"):
            raise invalid("add_special_tokens", "is for text; a chat has what its template writes")
        if request.chat.HasField("options"):
            raise invalid("chat.options", "is for a generation; it changes no ids of the prompt")
        self._model.check_name(request.chat.model)
        return await self._model.encode_chat(read_messages(request.chat, "chat.messages"), "chat.messages")

    async def _prompt(
        self, request: inference_pb2.GenerateRequest, options: Options, facts: EngineFacts, path: str
    ) -> tuple[int, ...]:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise invalid(f"{path}prompt", "is missing; text or token_ids is needed")
        if kind == "text":
            return await self._model.encode_text(request.text, add_special_tokens=_wants_special(request))
        if request.add_special_tokens:
            raise invalid(f"{path}add_special_tokens", "is for text; token_ids are taken as they are")
        check_fits(
            options,
            prompt_tokens=len(request.token_ids.ids),
            context_tokens=facts.context_tokens,
            prompt_field=f"{path}token_ids",
        )
        self._check_scored(options, len(request.token_ids.ids), path)
        ids = tuple(request.token_ids.ids)
        check_ids(ids, self._model.vocab_size(facts), f"{path}token_ids.ids")
        return ids

    def _options(self, options: inference_pb2.Options, facts: EngineFacts, path: str) -> Options:
        resolved = read_options(
            options,
            defaults=self._model.defaults,
            limits=self._limits,
            vocab_size=self._model.vocab_size(facts),
            max_choices=facts.max_choices,
            max_logprobs=facts.max_logprobs,
            path=f"{path}options",
        )
        return resume.read(options, resolved, facts, f"{path}options")

    def _job(
        self, prompt_ids: tuple[int, ...], options: Options, facts: EngineFacts, *, prompt_field: str, path: str
    ) -> Job:
        max_tokens = output_length(
            options,
            prompt_tokens=len(prompt_ids),
            context_tokens=facts.context_tokens,
            prompt_field=prompt_field,
            path=f"{path}options",
        )
        resume.check_lengths(options, max_tokens, f"{path}options")
        self._check_scored(options, len(prompt_ids), path)
        if self._model.tokenizer.vocab_size > facts.vocab_size:
            check_ids(prompt_ids, facts.vocab_size, prompt_field)
        job = Job(prompt_ids, options, max_tokens, self._model.eos_ids, facts)
        if options.min_tokens:
            vocab_size = self._model.vocab_size(facts)
            check_choice(options.sampling, vocab_size, f"{path}options.sampling", stop_ids=job.stop_ids)
        return job

    def _check_scored(self, options: Options, prompt_tokens: int, path: str) -> None:
        check_scored(options, prompt_tokens=prompt_tokens, limits=self._limits, path=f"{path}options")

    async def _echoing(self, job: Job, text: str | None = None) -> Job:
        """With the prompt's text where it is to be echoed: as given, else what the ids stand for as a whole."""
        options, ids = job.options, job.prompt_ids
        if not options.echo:
            return job
        if text is None:
            decode = self._model.tokenizer.decode
            text = await off_loop(len(ids), lambda: decode(ids, skip_special_tokens=options.skip_special_tokens))
        return replace(job, prompt_text=text)


def _wants_special(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> bool:
    return request.add_special_tokens if request.HasField("add_special_tokens") else True
