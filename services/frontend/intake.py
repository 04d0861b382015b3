"""From a request at the door to a job for an engine: names, options, prompt, length."""

from __future__ import annotations

from dataclasses import replace

from triptych.inference.v1 import inference_pb2

from services.common.contract import GRAMMAR
from services.common.errors import RequestError, invalid, unserved
from services.common.grammar import Grammar
from services.frontend import resume, tool_grammar
from services.frontend.chat_door import read_chat
from services.frontend.conversation import Conversation
from services.frontend.grammar_check import GrammarCheck
from services.frontend.request import EngineFacts, Job, Limits, Options
from services.frontend.served_model import ChatPrompt, ServedModel
from services.frontend.tokenizer import off_loop
from services.frontend.validation import check_choice, check_fits, check_ids, check_scored, output_length, read_options


class Intake:
    """Reads requests of one model. `path` is where the request stands in the message that came, "" or "request."."""

    def __init__(self, model: ServedModel, grammars: GrammarCheck, limits: Limits) -> None:
        self._model = model
        self._grammars = grammars
        self._limits = limits

    async def generate(self, request: inference_pb2.GenerateRequest, facts: EngineFacts, path: str = "") -> Job:
        """A job for a text or token-id prompt. Raises RequestError."""
        self._model.check_name(request.model)
        options = await self._options(request.options, facts, path)
        prompt_ids = await self._prompt(request, options, facts, path)
        kind = request.WhichOneof("prompt")
        job = self._job(prompt_ids, options, facts, prompt_field=f"{path}{kind}", path=path)
        is_whole = kind == "text" and options.truncate_prompt_tokens is None
        return await self._echoing(job, request.text if is_whole else None)

    async def chat(self, request: inference_pb2.ChatRequest, facts: EngineFacts, path: str = "") -> Job:
        """A job for a conversation. Raises RequestError."""
        self._model.check_name(request.model)
        options = await self._options(request.options, facts, path)
        conversation = await self._conversation(request, path)
        field = f"{path}messages"
        prompt = await self._model.encode_chat(conversation, field)
        job = self._job(options.kept(prompt.ids), options, facts, prompt_field=field, path=path)
        options = replace(options, grammar=await self._grammar(conversation, prompt, options, facts, path))
        formats = prompt.formats and prompt.formats.held_to(options.grammar)
        return await self._echoing(replace(job, options=options, formats=formats))

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
        for name in ("options", "parallel_tool_calls"):
            if request.chat.HasField(name):
                raise invalid(f"chat.{name}", "is for a generation; it changes no ids of the prompt")
        self._model.check_name(request.chat.model)
        conversation = await self._conversation(request.chat, "chat.")
        return (await self._model.encode_chat(conversation, "chat.messages")).ids

    async def _grammar(
        self, conversation: Conversation, prompt: ChatPrompt, options: Options, facts: EngineFacts, path: str
    ) -> Grammar | None:
        """What the answer is held to: what its tools promise, else what the options say. Raises RequestError."""
        use = conversation.tool_use
        promised, form = tool_grammar.promise(use), self._model.call_format(use)
        if not promised or form is None:
            return options.grammar
        if GRAMMAR not in facts.features:
            raise unserved(f"{path}{promised}", "needs grammars, which this engine does not serve")
        if options.grammar is not None:
            raise invalid(f"{path}options.grammar", f"is set beside {promised}, which is a grammar too; leave one out")
        if options.ignore_eos:
            raise invalid(f"{path}options.ignore_eos", f"is set beside {promised}, which says where the answer may end")
        grammar = tool_grammar.make(use, form, text_until=prompt.reasoning_until)
        try:
            await self._grammars.check(grammar, tool_grammar.PATH)
        except RequestError as error:
            raise tool_grammar.blame(error, use, f"{path}{promised}", path) from error
        return grammar

    async def _conversation(self, request: inference_pb2.ChatRequest, path: str) -> Conversation:
        conversation = await off_loop(request.ByteSize(), lambda: read_chat(request, self._limits, path))
        self._model.check_tools(conversation, path)
        return conversation

    async def _prompt(
        self, request: inference_pb2.GenerateRequest, options: Options, facts: EngineFacts, path: str
    ) -> tuple[int, ...]:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise invalid(f"{path}prompt", "is missing; text or token_ids is needed")
        if kind == "text":
            ids = await self._model.encode_text(request.text, add_special_tokens=_wants_special(request))
            return options.kept(ids)
        if request.add_special_tokens:
            raise invalid(f"{path}add_special_tokens", "is for text; token_ids are taken as they are")
        num_ids = len(request.token_ids.ids)
        num_kept = min(num_ids, options.truncate_prompt_tokens or num_ids)
        check_fits(
            options,
            prompt_tokens=num_kept,
            context_tokens=facts.context_tokens,
            prompt_field=f"{path}token_ids",
        )
        self._check_scored(options, num_kept, path)
        ids = tuple(request.token_ids.ids)
        check_ids(ids, self._model.vocab_size(facts), f"{path}token_ids.ids")
        return options.kept(ids)

    async def _options(self, message: inference_pb2.Options, facts: EngineFacts, path: str) -> Options:
        """All options, the grammar compiled."""
        options = read_options(
            message,
            defaults=self._model.defaults,
            limits=self._limits,
            vocab_size=self._model.vocab_size(facts),
            max_choices=facts.max_choices,
            max_logprobs=facts.max_logprobs,
            context_tokens=facts.context_tokens,
            path=f"{path}options",
        )
        if options.grammar is not None:
            if GRAMMAR not in facts.features:
                raise unserved(f"{path}options.grammar", "is not served by this engine")
            await self._grammars.check(options.grammar, f"{path}options.grammar")
        return resume.read(message, options, facts, f"{path}options")

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
