"""Which renderer is chosen, what it refuses, and that demonstrations and tools reach the model."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.calls import hermes
from longrein.calls.conversation import Conversation, Message, Tool, ToolCall
from longrein.calls.package import PackageRenderer
from longrein.calls.rendering import Renderer, check_renderer
from longrein.calls.template import TemplateRenderer
from longrein.errors import InvalidRequest, ModelError
from tests.calls.loaded import renderer_of, tokenizer_of
from tests.calls.properties import examples

BASH = Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
ASKED = Conversation((Message("system", "Be brief."), Message("user", "List the files.")))
WITH_TOOL = Conversation(ASKED.messages, (BASH,))


def encoded(directory: Path, text: str) -> list[int]:
    ids: list[int] = tokenizer_of(directory).encode(text, add_special_tokens=False)
    return ids


def shown(renderer: Renderer, conversation: Conversation) -> str:
    return renderer.decode(renderer.render(conversation).ids.tolist())


def test_the_package_renders_the_family_it_knows(qwen3_directory: Path) -> None:
    renderer = renderer_of(qwen3_directory)
    assert isinstance(renderer, PackageRenderer)
    by_template = renderer_of(qwen3_directory, renderer="template")
    assert isinstance(by_template, TemplateRenderer)
    assert renderer.render(WITH_TOOL).ids.tolist() == by_template.render(WITH_TOOL).ids.tolist()
    assert "qwen3 (agrees with" in check_renderer(renderer)
    assert "<|im_end|>" in check_renderer(by_template)


def test_a_model_type_alone_does_not_make_a_family(tiny_directory: Path, tmp_path: Path) -> None:
    for file in tiny_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert isinstance(renderer_of(tmp_path), TemplateRenderer)


def test_a_changed_template_leaves_the_family(qwen3_directory: Path, tmp_path: Path) -> None:
    for file in qwen3_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("# Tools", "# Functions")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert isinstance(renderer_of(tmp_path), TemplateRenderer)


def test_an_unknown_renderer_names_near_ones(tiny_directory: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.renderer was given 'qwen-3'.*qwen3"):
        renderer_of(tiny_directory, renderer="qwen-3")
    with pytest.raises(ModelError, match=r"model\.renderer: qwen3 does not fit"):
        renderer_of(tiny_directory, renderer="qwen3")


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer can be loaded.*tokenizer\.json"):
        renderer_of(tmp_path)


def test_tools_are_refused_where_the_template_ignores_them(tiny_directory: Path) -> None:
    renderer = renderer_of(tiny_directory)
    renderer.render(ASKED)
    with pytest.raises(InvalidRequest, match=r"model\.tool_format: hermes") as caught:
        renderer.render(WITH_TOOL)
    assert caught.value.param == "tools"
    called = Message("assistant", "", (ToolCall("1", "bash", "{}"),))
    with pytest.raises(InvalidRequest, match=r"model\.tool_format"):
        renderer.render(Conversation((*ASKED.messages, called)))


def test_hermes_declares_tools_and_shows_calls_and_results(tiny_directory: Path) -> None:
    renderer = renderer_of(tiny_directory, tool_format="hermes")
    called = Message("assistant", "I look.", (ToolCall("1", "bash", '{"command":"ls"}'),))
    results = (Message("tool", "a.txt", tool_call_id="1"), Message("tool", "b.txt", tool_call_id="2"))
    text = shown(renderer, Conversation((*ASKED.messages, called, *results), (BASH,)))
    assert f"<tools>\n{json.dumps(BASH.as_function())}\n</tools>" in text
    assert 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>' in text
    assert (
        "<|im_start|>user\n<tool_response>\na.txt\n</tool_response>\n<tool_response>\nb.txt\n</tool_response><|im_end|>"
    ) in text
    assert "<|im_start|>tool" not in text


@pytest.mark.parametrize("which", ["hermes", "package", "template"])
def test_a_reply_is_read_back(which: str, tiny_directory: Path, qwen3_directory: Path) -> None:
    directory = tiny_directory if which == "hermes" else qwen3_directory
    keys = {"hermes": {"tool_format": "hermes"}, "package": {}, "template": {"renderer": "template"}}[which]
    renderer = renderer_of(directory, **keys)
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo “é”"}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls}\n</tool_call>'
    prompt = renderer.render(WITH_TOOL).ids.tolist()

    def read(text: str, tools: tuple[Tool, ...] = (BASH,)) -> Message:
        return renderer.parse(encoded(directory, text + "<|im_end|>"), prompt, tools)

    good = read(f"I look.\n{call}")
    assert good.content == "I look."
    assert [(c.name, json.loads(c.arguments)) for c in good.tool_calls] == [("bash", {"command": "echo “é”"})]
    assert [len(read(f"{call}\n{call}").tool_calls), read(f"{call}\n{call}").content] == [2, ""]
    malformed = read(f"I look.\n{broken}")
    assert (malformed.content, malformed.tool_calls) == (f"I look.\n{broken}", ())
    unclosed = read(call.removesuffix("</tool_call>"))
    assert unclosed.tool_calls == () and unclosed.content.startswith("<tool_call>")
    mixed = read(f"{call}\n{broken}")
    assert len(mixed.tool_calls) == 1 and broken in mixed.content
    assert read(f"I look.\n{call}", ()).content == f"I look.\n{call}"
    thought = read("<think>\nHm.\n</think>\n\nI look.")
    assert (thought.reasoning, thought.content.strip()) == ("Hm.", "I look.")


@examples(60)
@given(st.text(alphabet=st.sampled_from(list('<>/tool_call{}":a \n')), max_size=60))
def test_hermes_never_loses_text(text: str) -> None:
    content, blocks = hermes.split(text + "<tool_call>\n{}\n</tool_call>")
    kept = content + "".join(block.text for block in blocks)
    assert "<tool_call>\n{}\n</tool_call>" in kept or "<tool_call>" in text
    content, blocks = hermes.split(text)
    if not blocks:
        assert content == text


def test_demonstrations_are_part_of_every_prompt(tiny_directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "shown.yaml"
    file.write_text("- {role: user, content: Say A}\n- {role: assistant, content: A}\n")
    renderer = renderer_of(tiny_directory, demonstrations=file)
    assert shown(renderer, ASKED) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay A<|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nList the files.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "2 demonstration turns" in check_renderer(renderer)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- {role: user, content: a}\n- {role: robot, content: b}\n", r"item 1 has role 'robot'"),
        ("- {role: user, content: 3}\n", r"item 0 has content 3"),
        ("- {role: user, content: a, name: b}\n", r"item 0 was given .*name"),
        ("- {role: user, content: a}\n", r"end with an assistant turn"),
        ("{}\n", r"expected a list"),
        ("- [\n", r"not valid YAML"),
    ],
)
def test_bad_demonstrations_name_file_and_item(
    content: str, message: str, tiny_directory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "shown.yaml"
    file.write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        renderer_of(tiny_directory, demonstrations=file)
    assert "shown.yaml" in str(caught.value)


def test_a_missing_demonstrations_file_is_named(tiny_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.yaml: cannot be read"):
        renderer_of(tiny_directory, demonstrations=tmp_path / "absent.yaml")
