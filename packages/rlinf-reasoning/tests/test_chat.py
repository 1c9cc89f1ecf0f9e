"""From prompts to tokens: chat templates, system messages, limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_core import Prompt
from rlinf_core.config import Config
from rlinf_core.errors import ConfigError
from rlinf_reasoning.conf.task_checks import check_answer_pattern, check_chat, check_eval, check_format
from rlinf_reasoning.conf.tasks import Jsonl
from rlinf_reasoning.tasks.chat import PromptEncoder, Prompting, has_chat_template, refusal, room_for_prompts


class Tokenizer:
    """One token a character; the template writes `<role>content` and opens the assistant's turn."""

    def __init__(self, template: str | None = "there is one") -> None:
        self.chat_template = template
        self.seen: dict[str, Any] = {}

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        self.seen = options
        if any(m["role"] == "tool" for m in messages):
            raise ValueError("no tools here")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


def text(encoder: PromptEncoder, prompt: Prompt) -> str:
    return "".join(chr(i) for i in encoder(prompt).ids)


CHAT = Prompt("p", "user: hi", messages=[{"role": "user", "content": "hi"}])


def test_auto_uses_the_template_where_there_is_one() -> None:
    assert text(PromptEncoder(Tokenizer(), Prompting()), Prompt("p", "1+1")) == "<user>1+1<assistant>"
    assert text(PromptEncoder(Tokenizer(None), Prompting()), Prompt("p", "1+1")) == "1+1"
    assert text(PromptEncoder(Tokenizer(), Prompting(chat="false")), Prompt("p", "1+1")) == "1+1"
    assert text(PromptEncoder(Tokenizer(), Prompting(chat="false")), CHAT) == "<user>hi<assistant>"


def test_the_system_message_comes_before_prompts_that_have_none() -> None:
    encoder = PromptEncoder(Tokenizer(), Prompting(system="Be brief."))
    own = Prompt("p", "", messages=[{"role": "system", "content": "Sing."}, {"role": "user", "content": "hi"}])
    assert text(encoder, Prompt("p", "1")) == "<system>Be brief.<user>1<assistant>"
    assert text(encoder, CHAT) == "<system>Be brief.<user>hi<assistant>"
    assert text(encoder, own) == "<system>Sing.<user>hi<assistant>"
    assert CHAT.messages == [{"role": "user", "content": "hi"}]


def test_settings_reach_the_template() -> None:
    tokenizer = Tokenizer()
    PromptEncoder(tokenizer, Prompting(options={"enable_thinking": False}))(CHAT)
    assert tokenizer.seen["enable_thinking"] is False and tokenizer.seen["add_generation_prompt"] is True


@pytest.mark.parametrize("how", [Prompting(chat="true"), Prompting(system="x"), Prompting(system="x", chat="false")])
def test_a_model_without_a_template_is_refused(how: Prompting) -> None:
    with pytest.raises(ConfigError, match=r"task\.(chat_template|system): .*instruction-tuned"):
        PromptEncoder(Tokenizer(None), how)


def test_messages_need_a_template_and_one_that_takes_them() -> None:
    with pytest.raises(ConfigError, match="prompt p is a list of messages.*no chat template"):
        PromptEncoder(Tokenizer(None), Prompting())(CHAT)
    tool = Prompt("t", "", messages=[{"role": "tool", "content": "x"}])
    with pytest.raises(ConfigError, match=r"refuses prompt t .*ValueError: no tools here"):
        PromptEncoder(Tokenizer(), Prompting())(tool)


def test_what_is_too_long_is_told_or_keeps_its_end() -> None:
    plain = Tokenizer(None)
    prompt = Prompt("p7", "0123456789")
    assert PromptEncoder(plain, Prompting(most=10))(prompt).problem == ""
    found = PromptEncoder(plain, Prompting(most=4))(prompt)
    assert found.length == 10 and found.problem == "prompt longer than 4 tokens (task.max_prompt_tokens)"
    error = str(refusal(prompt, found))
    assert error.startswith("task.max_prompt_tokens: p7 has 10 tokens") and "'0123456789'" in error
    assert text(PromptEncoder(plain, Prompting(most=4, too_long="truncate")), prompt) == "6789"
    assert "sampling.max_new_tokens" in PromptEncoder(plain, Prompting(), room=4)(prompt).problem
    assert text(PromptEncoder(plain, Prompting(most=8, too_long="truncate"), room=3), prompt) == "789"
    assert PromptEncoder(plain, Prompting(too_long="truncate"), room=0)(prompt).problem  # there is nothing to keep
    with pytest.raises(ConfigError, match="empty after tokenization"):
        PromptEncoder(plain, Prompting())(Prompt("p", ""))


def test_room_is_what_the_model_and_the_engine_take(tmp_path: Path) -> None:
    def room(model: dict[str, Any], **rollout: Any) -> int | None:
        return room_for_prompts(Config({"model": model, "rollout": rollout, "sampling": {"max_new_tokens": 30}}))

    assert room({"path": None, "tiny": {"max_positions": 64}}) == 34
    assert room({"path": str(tmp_path)}) is None
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    assert room({"path": str(tmp_path)}) == 2018
    assert room({"path": str(tmp_path)}, max_model_len=100) == 70
    assert room({"path": str(tmp_path)}, max_model_len=None) == 2018
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 50}}))
    assert room({"path": str(tmp_path)}) == 20


def test_the_directory_shows_whether_there_is_a_template(tmp_path: Path) -> None:
    assert has_chat_template(str(tmp_path)) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{}")
    assert has_chat_template(str(tmp_path)) is False
    config.write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(str(tmp_path)) is True
    config.write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("")
    assert has_chat_template(str(tmp_path)) is True


def chat_problems(path: str | None, **keys: Any) -> list[str]:
    return check_chat(Config(vars(Jsonl(path="p.jsonl", **keys))), Config({"model": {"path": path}}))


def test_what_a_configuration_asks_of_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for path, named in ((None, "the tiny model"), (str(tmp_path), "model.path=")):
        assert chat_problems(path) == chat_problems(path, chat_template="false") == []
        (problem,) = chat_problems(path, chat_template="True")
        assert problem.startswith(f"task.chat_template: {named}")
        (problem,) = chat_problems(path, system="x")
        assert problem.startswith(f"task.system: {named}")
    assert chat_problems(str(tmp_path / "absent"), chat_template="true") == []  # others say that
    (problem,) = chat_problems(None, chat_template="ture")
    assert "did you mean 'true'" in problem
    (problem,) = chat_problems(None, chat_template="false", system="x")
    assert "no place" in problem


def test_keys_of_evaluation_and_reward_that_do_not_go_together() -> None:
    def problems(**keys: Any) -> str:
        return "; ".join(check_eval(Config({"samples": 4, "k": [1, 4], "greedy": None, **keys})))

    assert problems() == problems(samples=1, k=[1], greedy=True) == ""
    assert "eval.k: pass@4 needs at least 4 answers per problem, eval.samples=2" in problems(samples=2)
    assert "eval.k: 4 is there twice" in problems(k=[4, 4])
    assert "eval.k: is empty" in problems(k=[])
    assert "eval.greedy: 4 greedy answers" in problems(greedy=True)
    assert check_format("auto", 0.0) == check_format("boxed", 0.1) == []
    assert "reward.format_score" in check_format("auto", 0.1)[0]
    assert check_answer_pattern(None) == check_answer_pattern("#### (.+)") == []
    assert "task.answer_pattern: '(' is not a regular expression" in check_answer_pattern("(")[0]
