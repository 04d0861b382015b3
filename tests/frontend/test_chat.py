"""Chat templates: what they see, what they may refuse, and that their control ids are theirs alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.common.errors import RequestError, StartError
from services.frontend.chat import ChatEncoder, TemplateSource, load_source
from services.frontend.control_tokens import ControlTokens, is_control
from services.frontend.tokenizer import TextTokenizer, load_definition
from tests.frontend.conversations import ids_of, talk
from tests.frontend.made_tokenizers import WORD_STARTS
from tests.support.checkpoints import CHAT_TEMPLATE, tiny_tokenizer

ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] | trim }} {{ eos_token }}{% endfor %}"
)


@pytest.fixture(scope="module")
def definition(tmp_path_factory: pytest.TempPathFactory) -> str:
    return load_definition(tiny_tokenizer(tmp_path_factory.mktemp("t")))


def encoder(definition: str, template: str | None, **tokens: str) -> ChatEncoder:
    return ChatEncoder(TemplateSource(template, tokens), ControlTokens(definition))


def refusal(chat: ChatEncoder, *messages: tuple[str, str]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ids_of(chat, messages)
    return caught.value


def test_control_tokens_of_the_template_are_ids(definition: str) -> None:
    ids = ids_of(encoder(definition, CHAT_TEMPLATE), [("user", "hello")])
    plain = TextTokenizer(definition)
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids == plain.encode(rendered, add_special_tokens=False)
    assert ids.count(1) == 2 and ids.count(2) == 1


def test_the_template_may_use_what_templates_use(definition: str) -> None:
    template = (
        "{%- for m in messages %}\n    {%- if loop.index > 2 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{%- endfor %}{{ strftime_now('%Y')[:2] }}"
        "{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}"
    )
    rendered = encoder(definition, template).render(talk(*[("user", "<é>")] * 3), "messages")
    assert rendered == '{"role": "user", "content": "<é>"}' * 2 + "20" + "2"


def test_the_sandbox_keeps_templates_from_python(definition: str) -> None:
    chat = encoder(definition, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    assert "SecurityError" in refusal(chat, ("user", "hi")).message


def test_a_template_sees_special_tokens_and_may_refuse(definition: str) -> None:
    chat = encoder(definition, ALTERNATING, bos_token="<|im_start|>", eos_token="<|im_end|>")
    assert chat.render(talk(("user", " hi ")), "messages") == "<|im_start|>[user] hi <|im_end|>"
    error = refusal(chat, ("user", "hi"), ("user", "hi again"))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Conversation roles must alternate user/assistant" in error.message
    assert error.violations[0].field == "messages"


def test_a_template_program_that_fails_is_the_requests_error_not_ours(definition: str) -> None:
    error = refusal(encoder(definition, "{{ 1 // 0 }}"), ("user", "hi"))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT and "ZeroDivisionError" in error.message


def test_a_templates_message_keeps_its_own_words_and_leaves_out_what_a_user_wrote(definition: str) -> None:
    chat = encoder(definition, "{{ raise_exception('no: ' + messages[0]['content']) }}")
    for text in ("<|im_end|>", "a secret", "no: "):
        assert refusal(chat, ("user", text)).message == "messages: the model's chat template refuses them: no: ..."
    undefined = encoder(definition, "{{ {}[messages[0]['content']].x }}")
    assert "secret" not in refusal(undefined, ("user", "a secret")).message


@pytest.mark.parametrize("name", sorted(WORD_STARTS))
def test_spelled_control_tokens_are_text_in_models_whose_vocabulary_holds_them(name: str) -> None:
    definition = WORD_STARTS[name]()
    plain = TextTokenizer(definition)
    bos, eos = plain.backend.token_to_id("<s>"), plain.backend.token_to_id("</s>")
    chat = encoder(
        definition, "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", bos_token="<s>", eos_token="</s>"
    )
    ids = ids_of(chat, [("user", "the dog </s><s> sleeps")])
    assert ids.count(bos) == 1 and ids[0] == bos
    assert ids.count(eos) == 1 and ids[-1] == eos
    ordinary = ids_of(chat, [("user", "the dog sleeps")])
    assert ordinary == plain.encode("<s>the dog sleeps</s>", add_special_tokens=False)


@pytest.mark.parametrize(
    ("token", "control"),
    [
        ({"content": "<|im_end|>", "special": True}, True),
        ({"content": "<tool_call>", "special": False}, True),
        ({"content": "[INST]", "special": False}, True),
        ({"content": "  ", "special": False}, False),
        ({"content": "\n\n", "special": False}, False),
        ({"content": "▁▁", "special": False}, False),
        ({"content": "insulin", "special": False}, False),
    ],
)
def test_what_counts_as_a_control_token(token: dict[str, Any], control: bool) -> None:
    assert is_control(token) is control


def test_a_tokenizer_without_added_tokens_can_chat() -> None:
    definition = json.loads(WORD_STARTS["metaspace_bpe"]())
    definition["added_tokens"] = []
    definition["model"]["unk_token"] = None
    text = json.dumps(definition)
    ids = ids_of(encoder(text, "{{ messages[0]['content'] }}"), [("user", "the dog")])
    assert ids == TextTokenizer(text).encode("the dog", add_special_tokens=False)


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert load_source(tmp_path).text is None
    config: dict[str, Any] = {"chat_template": "from the config", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_source(tmp_path) == TemplateSource("from the config", {"eos_token": "</s>"})
    config["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_source(tmp_path).text == "d"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_source(tmp_path).text == "from the file"
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(StartError, match=r"tokenizer_config\.json"):
        load_source(tmp_path)


@pytest.mark.parametrize("flags", [{}, {"rstrip": True}, {"lstrip": True}, {"single_word": True}])
@pytest.mark.parametrize("name", ["byte_level", *sorted(WORD_STARTS)])
def test_the_second_tokenizer_reads_a_templates_text_as_the_first_does(
    definition: str, name: str, flags: dict[str, bool]
) -> None:
    parsed = json.loads(definition if name == "byte_level" else WORD_STARTS[name]())
    if name == "metaspace_unigram":
        flags = flags | {"single_word": False}  # its own vocabulary would find what the flag leaves as text
    for token in parsed["added_tokens"]:
        token.update(flags)
    parsed["added_tokens"].append(parsed["added_tokens"][0] | {"id": 9999, "content": "<tool>", "special": False})
    made = json.dumps(parsed)
    first, second = TextTokenizer(made), ControlTokens(made)
    pieces = [token["content"] for token in parsed["added_tokens"]] + ["the dog", " ", "  ", "\n", "a", "<", ">", "s"]
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(12)))
        assert second.encode(text) == first.encode(text, add_special_tokens=False), repr(text)


def test_a_template_makes_control_ids_where_a_normalizer_would_hide_them() -> None:
    parsed = json.loads(WORD_STARTS["llama2_like"]())
    for token in parsed["added_tokens"]:
        token["normalized"] = True  # then `tokenizers` looks for "▁</s>", and "dog</s>" has none
    made = json.dumps(parsed)
    first, second = TextTokenizer(made), ControlTokens(made)
    assert 2 not in first.encode("the dog</s>", add_special_tokens=False)
    assert second.encode("the dog</s>")[-1] == 2


def test_T9_templates_find_what_a_model_writes_in_its_own_answers_alone(definition: str) -> None:
    parsed = json.loads(definition)
    think = parsed["added_tokens"][0] | {"id": 9999, "content": "</think>", "special": False}
    parsed["added_tokens"].append(think)
    # As templates of reasoning models do: earlier thoughts are left out of the prompt.
    template = "{% for m in messages %}{{ m['content'].split('</think>')[-1] }};{% endfor %}"
    chat = ChatEncoder(TemplateSource(template), ControlTokens(json.dumps(parsed)))
    plain = TextTokenizer(json.dumps(parsed))
    ids = ids_of(chat, [("assistant", "hm</think>yes"), ("user", "what is </think>?")])
    assert 9999 not in ids
    assert plain.decode(ids, skip_special_tokens=False) == "yes;what is </think>?;"
